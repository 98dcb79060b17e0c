//! Element-wise functions of several broadcast operands.

mod number;
mod power;
mod ternary;

use model::DataType;
use model::op::{Binary, Compare, Op, Variadic};

pub(crate) use number::Number;

use super::elementwise::{InPlaceFn, MapFn, ZipFn, ZipRow, map_in_place, zip, zip_in_place};
use super::operand::{Element, dtype_of, elements, is_half, one, output_len, through_f32};
use super::strided::{StridedLoop, broadcast_shape};
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::into_elements;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    match &facts.step.op {
        Op::Binary(Binary::Pow) => power::build(facts, dtype),
        Op::Binary(binary) => {
            same_types(facts)?;
            through_half(dtype, |dtype| arithmetic(facts, *binary, dtype))
        }
        Op::Compare(compare) => {
            same_types(facts)?;
            through_half(dtype, |dtype| comparison(facts, *compare, dtype))
        }
        Op::Variadic(variadic) => {
            same_types(facts)?;
            through_half(dtype, |dtype| reduction(facts, *variadic, dtype))
        }
        Op::Where => ternary::where_kernel(facts),
        Op::Clip => through_half(dtype, |dtype| ternary::clip(facts, dtype)),
        Op::PRelu => {
            same_types(facts)?;
            through_half(dtype, |dtype| prelu(facts, dtype))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// Builds a kernel of single precision if `dtype` is half precision.
fn through_half(
    dtype: DataType,
    build: impl Fn(DataType) -> Result<Kernel, KernelError>,
) -> Result<Kernel, KernelError> {
    if is_half(dtype) { Ok(through_f32(dtype, build(DataType::F32)?)) } else { build(dtype) }
}

/// An error if the operands have different types.
fn same_types(facts: &StepFacts) -> Result<(), KernelError> {
    let first = facts.input_dtype(0);
    if (0..facts.step.inputs.len()).all(|index| facts.input_dtype(index) == first) {
        Ok(())
    } else {
        Err(no_kernel(facts))
    }
}

/// Calls `$body` with `$rust` being the numeric type of `$dtype`.
macro_rules! with_type {
    ($dtype:expr, $facts:expr, $rust:ident => $body:expr) => {{
        match $dtype {
            DataType::U8 => {
                type $rust = u8;
                $body
            }
            DataType::U16 => {
                type $rust = u16;
                $body
            }
            DataType::U32 => {
                type $rust = u32;
                $body
            }
            DataType::U64 => {
                type $rust = u64;
                $body
            }
            DataType::I8 => {
                type $rust = i8;
                $body
            }
            DataType::I16 => {
                type $rust = i16;
                $body
            }
            DataType::I32 => {
                type $rust = i32;
                $body
            }
            DataType::I64 => {
                type $rust = i64;
                $body
            }
            DataType::F32 => {
                type $rust = f32;
                $body
            }
            DataType::F64 => {
                type $rust = f64;
                $body
            }
            _ => Err(no_kernel($facts)),
        }
    }};
}

/// Like [`with_type`], for integers.
macro_rules! with_integer {
    ($dtype:expr, $facts:expr, $rust:ident => $body:expr) => {{
        match $dtype {
            DataType::U8 => {
                type $rust = u8;
                $body
            }
            DataType::U16 => {
                type $rust = u16;
                $body
            }
            DataType::U32 => {
                type $rust = u32;
                $body
            }
            DataType::U64 => {
                type $rust = u64;
                $body
            }
            DataType::I8 => {
                type $rust = i8;
                $body
            }
            DataType::I16 => {
                type $rust = i16;
                $body
            }
            DataType::I32 => {
                type $rust = i32;
                $body
            }
            DataType::I64 => {
                type $rust = i64;
                $body
            }
            _ => Err(no_kernel($facts)),
        }
    }};
}

pub(crate) use with_type;

fn arithmetic(facts: &StepFacts, binary: Binary, dtype: DataType) -> Result<Kernel, KernelError> {
    match binary {
        // Models use these most, so they have in-place loops of their own.
        Binary::Add if dtype == DataType::F32 => Ok(in_place(<f32 as Number>::add, true)),
        Binary::Sub if dtype == DataType::F32 => Ok(in_place(<f32 as Number>::sub, false)),
        Binary::Mul if dtype == DataType::F32 => Ok(in_place(<f32 as Number>::mul, true)),
        Binary::Div if dtype == DataType::F32 => Ok(in_place(<f32 as Number>::div, false)),
        Binary::Add => with_type!(dtype, facts, T => Ok(combining(T::add))),
        Binary::Sub => with_type!(dtype, facts, T => Ok(combining(T::sub))),
        Binary::Mul => with_type!(dtype, facts, T => Ok(combining(T::mul))),
        Binary::Div => with_type!(dtype, facts, T => Ok(dividing(T::div))),
        Binary::Mod => with_type!(dtype, facts, T => Ok(dividing(T::floor_mod))),
        Binary::Fmod => with_type!(dtype, facts, T => Ok(dividing(T::trunc_mod))),
        Binary::And | Binary::Or | Binary::Xor if dtype != DataType::Bool => Err(no_kernel(facts)),
        Binary::And => Ok(combining(|a: bool, b| a & b)),
        Binary::Or => Ok(combining(|a: bool, b| a | b)),
        Binary::Xor => Ok(combining(|a: bool, b| a ^ b)),
        Binary::BitAnd => with_integer!(dtype, facts, T => Ok(combining(|a: T, b| a & b))),
        Binary::BitOr => with_integer!(dtype, facts, T => Ok(combining(|a: T, b| a | b))),
        Binary::BitXor => with_integer!(dtype, facts, T => Ok(combining(|a: T, b| a ^ b))),
        Binary::ShiftLeft => with_integer!(dtype, facts, T => Ok(combining(T::shift_left))),
        Binary::ShiftRight => with_integer!(dtype, facts, T => Ok(combining(T::shift_right))),
        Binary::Pow => power::build(facts, dtype),
    }
}

/// A kernel of two operands of one type whose result may overwrite either.
fn combining<T: Element + Copy>(f: impl Fn(T, T) -> T + Send + Sync + Copy + 'static) -> Kernel {
    combine_kernel(Box::new(ZipFn(f)))
}

/// Like [`combining`], with in-place loops.
fn in_place(f: impl Fn(f32, f32) -> f32 + Send + Sync + Copy + 'static, commutes: bool) -> Kernel {
    combine_kernel(Box::new(InPlaceFn { f, commutes }))
}

fn combine_kernel<T: Element + Copy>(f: Box<dyn ZipRow<T, T, T>>) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| combine(context, inputs, &*f))
}

/// Like [`combining`], refusing zeros among integer divisors.
fn dividing<T: Number>(f: impl Fn(T, T) -> T + Send + Sync + Copy + 'static) -> Kernel {
    divide_kernel(Box::new(ZipFn(f)))
}

fn divide_kernel<T: Number>(f: Box<dyn ZipRow<T, T, T>>) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| {
        if T::INTEGER && elements(inputs.typed::<T>(1)?).contains(&T::default()) {
            return Err("an integer is divided by zero".into());
        }
        combine(context, inputs, &*f)
    })
}

/// Computes `f` of operands 0 and 1, in the memory of one of them if possible.
fn combine<T: Element + Copy>(
    context: &Context,
    mut inputs: Inputs,
    f: &dyn ZipRow<T, T, T>,
) -> KernelResult {
    let shapes = [inputs.typed::<T>(0)?.shape(), inputs.typed::<T>(1)?.shape()];
    let shape = broadcast_shape(&shapes)?;
    let fits = [shapes[0] == shape, shapes[1] == shape];
    for (target, other) in [(0, 1), (1, 0)] {
        if !(fits[target] && inputs.is_owned(target)) {
            continue;
        }
        let mut data = into_elements(T::take(inputs.take(target)?).map_err(|_| "types differ")?);
        let operand = inputs.typed::<T>(other)?;
        let strided = StridedLoop::broadcast(&shape, [operand.shape()]);
        zip_in_place(&strided, &mut data, elements(operand), f, target == 1);
        return one(T::wrap(&shape, data));
    }
    broadcast(context, &inputs, f)
}

/// Computes `f` of operands 0 and 1 into new memory.
fn broadcast<A: Element + Copy, B: Element + Copy, U: Element>(
    context: &Context,
    inputs: &Inputs,
    f: &dyn ZipRow<A, B, U>,
) -> KernelResult {
    let (a, b) = (inputs.typed::<A>(0)?, inputs.typed::<B>(1)?);
    let shape = broadcast_shape(&[a.shape(), b.shape()])?;
    let count = output_len(&shape)?;
    let strided = StridedLoop::broadcast(&shape, [a.shape(), b.shape()]);
    let mut out = context.pool.filled(count, U::default())?;
    zip(&strided, elements(a), elements(b), &mut out, f);
    one(U::wrap(&shape, out))
}

fn comparison(facts: &StepFacts, compare: Compare, dtype: DataType) -> Result<Kernel, KernelError> {
    match (compare, dtype) {
        (Compare::Equal, DataType::Bool) => Ok(comparing(|a: bool, b: bool| a == b)),
        (Compare::Equal, DataType::String) => {
            Ok(Kernel::new(|_: &Context, inputs: Inputs| equal_strings(&inputs)))
        }
        _ => with_type!(dtype, facts, T => Ok(match compare {
            Compare::Equal => comparing(|a: T, b: T| a == b),
            Compare::Less => comparing(|a: T, b: T| a < b),
            Compare::LessOrEqual => comparing(|a: T, b: T| a <= b),
            Compare::Greater => comparing(|a: T, b: T| a > b),
            Compare::GreaterOrEqual => comparing(|a: T, b: T| a >= b),
        })),
    }
}

fn comparing<T: Element + Copy>(f: impl Fn(T, T) -> bool + Send + Sync + Copy + 'static) -> Kernel {
    broadcast_kernel::<T, T, bool>(Box::new(ZipFn(f)))
}

fn broadcast_kernel<A: Element + Copy, B: Element + Copy, U: Element>(
    f: Box<dyn ZipRow<A, B, U>>,
) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| broadcast(context, &inputs, &*f))
}

fn equal_strings(inputs: &Inputs) -> KernelResult {
    let (a, b) = (inputs.typed::<bytes::Bytes>(0)?, inputs.typed::<bytes::Bytes>(1)?);
    let shape = broadcast_shape(&[a.shape(), b.shape()])?;
    let strided = StridedLoop::broadcast(&shape, [a.shape(), b.shape()]);
    let mut out = Buffer::filled(output_len(&shape)?, false)?;
    let (a, b) = (elements(a), elements(b));
    let [a_stride, b_stride] = strided.inner_strides.map(|stride| stride as usize);
    let count = out.len();
    strided.for_each_run(0, count, &mut |position, length, [a_at, b_at]| {
        for i in 0..length {
            out[position + i] = a[a_at + i * a_stride] == b[b_at + i * b_stride];
        }
    });
    one(bool::wrap(&shape, out))
}

fn reduction(
    facts: &StepFacts,
    variadic: Variadic,
    dtype: DataType,
) -> Result<Kernel, KernelError> {
    with_type!(dtype, facts, T => match variadic {
        Variadic::Sum => Ok(folding::<T>(Box::new(ZipFn(T::add)), false)),
        Variadic::Max => Ok(folding::<T>(Box::new(ZipFn(T::larger)), false)),
        Variadic::Min => Ok(folding::<T>(Box::new(ZipFn(T::smaller)), false)),
        Variadic::Mean if dtype.is_float() => Ok(folding::<T>(Box::new(ZipFn(T::add)), true)),
        Variadic::Mean => Err(no_kernel(facts)),
    })
}

/// A kernel that folds its operands from the left, and divides by their number if `mean`.
fn folding<T: Number>(f: Box<dyn ZipRow<T, T, T>>, mean: bool) -> Kernel {
    Kernel::new(move |context: &Context, mut inputs: Inputs| {
        let count = inputs.len();
        let mut sum = inputs.take(0)?;
        for index in 1..count {
            let next = inputs.take_operand(index)?;
            let pair = [super::Operand::Owned(sum), next].into_iter().collect();
            let pair = Inputs::new(pair, context.pool);
            sum = combine(context, pair, &*f)?.pop().ok_or("no result")?;
        }
        if !mean {
            return one(sum);
        }
        let tensor = T::take(sum).map_err(|_| "types differ")?;
        let shape = tensor.shape().to_vec();
        let mut data = into_elements(tensor);
        let count = T::from_f64(count as f64);
        map_in_place(&mut data, &MapFn(move |x: T| T::div(x, count)));
        one(T::wrap(&shape, data))
    })
}

fn prelu(facts: &StepFacts, dtype: DataType) -> Result<Kernel, KernelError> {
    with_type!(dtype, facts, T => Ok(prelu_kernel::<T>()))
}

fn prelu_kernel<T: Number>() -> Kernel {
    Kernel::new(|context: &Context, inputs: Inputs| {
        let shapes = [inputs.get(0)?.shape(), inputs.get(1)?.shape()];
        if broadcast_shape(&shapes)? != shapes[0] {
            return Err(invalid!("slope {:?} does not broadcast to {:?}", shapes[1], shapes[0]));
        }
        let f = |x: T, slope: T| if x < T::default() { T::mul(x, slope) } else { x };
        combine(context, inputs, &ZipFn(f))
    })
}

#[cfg(test)]
mod tests {
    use base::Random;
    use model::Tensor;
    use model::op::{Binary, Compare, Op, Variadic};

    use super::super::testing::*;

    #[test]
    fn broadcasts_agree_with_a_naive_reference() {
        let mut random = Random::new(7);
        let shapes: [(&[usize], &[usize]); 9] = [
            (&[2, 3, 4], &[2, 3, 4]),
            (&[2, 3, 4, 5], &[1, 3, 1, 1]),
            (&[7, 5], &[5]),
            (&[], &[3, 2]),
            (&[2, 1, 4], &[1, 3, 1]),
            (&[0, 3], &[1, 3]),
            (&[1], &[]),
            (&[2, 1, 2, 1, 2], &[1, 3, 2, 3, 1]),
            (&[64, 1000], &[64, 1]),
        ];
        for (a_shape, b_shape) in shapes {
            let (a, b) = (random_floats(&mut random, a_shape), random_floats(&mut random, b_shape));
            for (op, f) in
                [(Binary::Sub, (|a, b| a - b) as fn(f32, f32) -> f32), (Binary::Div, |a, b| a / b)]
            {
                let got = &run(Op::Binary(op), &[a.clone(), b.clone()])[0];
                let want = naive(&a, &b, got.shape(), f);
                assert_eq!(values::<f32>(got), want, "{a_shape:?} {b_shape:?}");
            }
        }
    }

    fn naive(a: &Tensor, b: &Tensor, shape: &[usize], f: fn(f32, f32) -> f32) -> Vec<f32> {
        let at = |tensor: &Tensor, mut position: usize| {
            let (mut offset, mut stride) = (0, 1);
            for axis in (0..shape.len()).rev() {
                let index = position % shape[axis];
                position /= shape[axis];
                let lead = shape.len() - tensor.shape().len();
                if axis >= lead {
                    let size = tensor.shape()[axis - lead];
                    offset += if size == 1 { 0 } else { index * stride };
                    stride *= size;
                }
            }
            values::<f32>(tensor)[offset]
        };
        let count: usize = shape.iter().product();
        (0..count).map(|position| f(at(a, position), at(b, position))).collect()
    }

    #[test]
    fn integer_broadcasts_agree_with_a_naive_reference() {
        // Rows longer than a block, with either operand broadcast or overwritten.
        let shapes: [(&[usize], &[usize]); 5] = [
            (&[3, 300], &[3, 300]),
            (&[3, 300], &[3, 1]),
            (&[1, 300], &[3, 1]),
            (&[], &[700]),
            (&[300], &[2, 300]),
        ];
        for (a_shape, b_shape) in shapes {
            let tensor = |shape: &[usize], factor: i64| {
                let count: usize = shape.iter().product();
                integers(shape, &(0..count as i64).map(|i| i * factor).collect::<Vec<_>>())
            };
            let (a, b) = (tensor(a_shape, 3), tensor(b_shape, 7));
            let got = &run(Op::Binary(Binary::Sub), &[a.clone(), b.clone()])[0];
            let single = |x: &Tensor| {
                floats(x.shape(), &values::<i64>(x).iter().map(|&x| x as f32).collect::<Vec<_>>())
            };
            let want = naive(&single(&a), &single(&b), got.shape(), |a, b| a - b);
            let got: Vec<f32> = values::<i64>(got).iter().map(|&x| x as f32).collect();
            assert_eq!(got, want, "{a_shape:?} {b_shape:?}");
        }
    }

    #[test]
    fn integers_wrap_and_divide_as_in_c() {
        let of = |data: &[i64]| integers(&[data.len()], data);
        let on = |op, a: &[i64], b: &[i64]| values::<i64>(&run(Op::Binary(op), &[of(a), of(b)])[0]);
        assert_eq!(on(Binary::Add, &[i64::MAX], &[1]), [i64::MIN]);
        assert_eq!(on(Binary::Div, &[-7, 7, i64::MIN], &[2, -2, -1]), [-3, -3, i64::MIN]);
        assert_eq!(on(Binary::Mod, &[-7, 7, -6], &[3, -3, 3]), [2, -2, 0]);
        assert_eq!(on(Binary::Fmod, &[-7, 7, i64::MIN], &[3, -3, -1]), [-1, 1, 0]);
        assert_eq!(on(Binary::Pow, &[3, 2, -2], &[39, 63, 3]), [4052555153018976267, i64::MIN, -8]);
        assert!(error(Op::Binary(Binary::Div), &[of(&[1]), of(&[0])]).contains("zero"));
        let big = (1i64 << 53) + 1;
        assert_eq!(on(Binary::Sub, &[big], &[1]), [big - 1]);
    }

    #[test]
    fn shifts_past_the_width_are_zero() {
        let of = |data: &[u8]| Tensor::from_vec(vec![data.len()], data.to_vec()).unwrap();
        let got = run(Op::Binary(Binary::ShiftLeft), &[of(&[1, 1, 255]), of(&[7, 8, 200])]);
        assert_eq!(values::<u8>(&got[0]), [128, 0, 0]);
    }

    #[test]
    fn extremes_propagate_nan() {
        let (a, b) = (floats(&[3], &[f32::NAN, 1.0, 2.0]), floats(&[3], &[1.0, f32::NAN, 3.0]));
        for variadic in [Variadic::Max, Variadic::Min] {
            let got: Vec<f32> = values(&run(Op::Variadic(variadic), &[a.clone(), b.clone()])[0]);
            assert!(got[0].is_nan() && got[1].is_nan() && !got[2].is_nan());
        }
        let mean =
            run(Op::Variadic(Variadic::Mean), &[floats(&[1], &[1.0]), floats(&[2], &[2.0, 4.0])]);
        assert_eq!(values::<f32>(&mean[0]), [1.5, 2.5]);
    }

    #[test]
    fn strings_compare_and_select() {
        let (a, b) = (strings(&[2], &["x", "y"]), strings(&[1], &["y"]));
        let equal = run(Op::Compare(Compare::Equal), &[a.clone(), b.clone()]);
        assert_eq!(equal[0], bools(&[2], &[false, true]));
        let chosen = run(Op::Where, &[bools(&[2, 1], &[true, false]), a, b]);
        assert_eq!(chosen[0], strings(&[2, 2], &["x", "y", "y", "y"]));
    }

    #[test]
    fn clip_prefers_the_upper_bound() {
        let x = floats(&[3], &[-1.0, 0.5, f32::NAN]);
        let got = run(Op::Clip, &[x.clone(), floats(&[], &[2.0]), floats(&[], &[1.0])]);
        let got: Vec<f32> = values(&got[0]);
        assert_eq!(got[..2], [1.0, 1.0]);
        assert!(got[2].is_nan());
        let open = try_run(Op::Clip, &[Some(x), None, Some(floats(&[], &[0.0]))], 1).unwrap();
        assert_eq!(values::<f32>(&open[0])[..2], [-1.0, 0.0]);
    }
}
