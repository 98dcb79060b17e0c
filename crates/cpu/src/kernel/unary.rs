//! Element-wise functions of one operand.

mod real;
mod vector;

use model::DataType;
use model::op::Unary;
use rten_simd::SimdUnaryOp;

pub(crate) use real::Real;
use real::{Erf, Gelu};
use vector::{Elu, Ln, Mish, Softplus};

use super::elementwise::{MapFn, MapRow, convert, map, map_in_place};
use super::operand::{Element, dtype_of, elements, is_half, one, through_f32};
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::kernel::{KernelError, invalid};
use crate::value::{Value, into_elements};

pub(crate) fn build(facts: &StepFacts, unary: Unary) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    match unary {
        Unary::Not if dtype == DataType::Bool => Ok(mapping(|x: bool| !x)),
        Unary::BitNot if dtype.is_integer() => integer_not(facts, dtype),
        Unary::Not | Unary::BitNot => Err(no_kernel(facts)),
        Unary::IsNan if dtype.is_float() => {
            Ok(Kernel::new(|context, inputs| is_nan(context, &inputs)))
        }
        Unary::IsInf { positive, negative } if dtype.is_float() => {
            Ok(Kernel::new(move |context, inputs| is_inf(context, &inputs, positive, negative)))
        }
        _ if is_half(dtype) => {
            Ok(through_f32(dtype, single(unary).ok_or_else(|| no_kernel(facts))?))
        }
        _ if dtype == DataType::F32 => single(unary).ok_or_else(|| no_kernel(facts)),
        _ if dtype == DataType::F64 => real_kernel::<f64>(unary).ok_or_else(|| no_kernel(facts)),
        _ if dtype.is_integer() => integer(facts, unary, dtype),
        _ => Err(no_kernel(facts)),
    }
}

/// A kernel that applies `f` to each element, in place if possible.
fn mapping<T: Element + Copy>(f: impl Fn(T) -> T + Send + Sync + Copy + 'static) -> Kernel {
    map_kernel(Box::new(MapFn(f)))
}

/// A kernel that calls `f` for each element. For functions that are calls into the mathematical
/// library anyway: they share one loop.
fn calling<T: Element + Copy>(f: fn(T) -> T) -> Kernel {
    mapping(f)
}

/// A kernel that applies a vectorized function to each element, in place if possible.
fn vectorized(op: impl SimdUnaryOp<f32> + Send + Sync + 'static) -> Kernel {
    map_kernel(Box::new(VectorFn(op)))
}

/// The [`MapRow`] of a vectorized function.
struct VectorFn<Op>(Op);

impl<Op: SimdUnaryOp<f32> + Send + Sync> MapRow<f32> for VectorFn<Op> {
    fn run(&self, row: &mut [f32]) {
        self.0.map_mut(row);
    }
}

fn map_kernel<T: Element + Copy>(f: Box<dyn MapRow<T>>) -> Kernel {
    Kernel::new(move |context: &Context, inputs: Inputs| apply(context, inputs, &*f))
}

/// Applies `f` to operand 0, in place if no later step reads it.
pub(super) fn apply<T: Element + Copy>(
    context: &Context,
    mut inputs: Inputs,
    f: &dyn MapRow<T>,
) -> KernelResult {
    if inputs.is_owned(0) {
        let tensor =
            T::take(inputs.take(0)?).map_err(|value| invalid!("operand 0 is {}", value.dtype()))?;
        let shape = tensor.shape().to_vec();
        let mut data = into_elements(tensor);
        map_in_place(&mut data, f);
        return one(T::wrap(&shape, data));
    }
    let tensor = inputs.typed::<T>(0)?;
    let source = elements(tensor);
    let mut out = context.pool.filled(source.len(), T::default())?;
    map(source, &mut out, f);
    one(T::wrap(tensor.shape(), out))
}

/// The function in single precision: vectorized where exponentials or logarithms are involved.
fn single(unary: Unary) -> Option<Kernel> {
    Some(match unary {
        Unary::Exp => vectorized(rten_vecmath::Exp {}),
        Unary::Sigmoid => vectorized(rten_vecmath::Sigmoid {}),
        Unary::Tanh => vectorized(rten_vecmath::Tanh {}),
        Unary::Erf => vectorized(Erf),
        Unary::Gelu { tanh: false } => vectorized(Gelu),
        Unary::Gelu { tanh: true } => vectorized(rten_vecmath::ApproxGelu {}),
        Unary::Silu { alpha: 1.0 } => vectorized(rten_vecmath::Silu {}),
        Unary::Silu { alpha } => vectorized(rten_vecmath::Swish { alpha }),
        Unary::Celu { alpha } => vectorized(Elu { alpha, slope: alpha, gamma: 1.0 }),
        Unary::Elu { alpha } => vectorized(Elu { alpha, slope: 1.0, gamma: 1.0 }),
        Unary::Selu { alpha, gamma } => vectorized(Elu { alpha, slope: 1.0, gamma }),
        Unary::Log => vectorized(Ln),
        Unary::Mish => vectorized(Mish),
        Unary::Softplus => vectorized(Softplus),
        other => return real_kernel::<f32>(other),
    })
}

/// The function in precision `F`.
fn real_kernel<F: Real>(unary: Unary) -> Option<Kernel> {
    let (zero, one, half) = (F::of(0.0), F::of(1.0), F::of(0.5));
    Some(match unary {
        Unary::Abs => mapping(|x: F| x.abs()),
        Unary::Acos => calling(|x: F| x.acos()),
        Unary::Acosh => calling(|x: F| x.acosh()),
        Unary::Asin => calling(|x: F| x.asin()),
        Unary::Asinh => calling(|x: F| x.asinh()),
        Unary::Atan => calling(|x: F| x.atan()),
        Unary::Atanh => calling(|x: F| x.atanh()),
        Unary::Ceil => mapping(|x: F| x.ceil()),
        Unary::Cos => calling(|x: F| x.cos()),
        Unary::Cosh => calling(|x: F| x.cosh()),
        Unary::Erf => calling(|x: F| x.erf()),
        Unary::Exp => calling(|x: F| x.exp()),
        Unary::Floor => mapping(|x: F| x.floor()),
        Unary::Log => calling(|x: F| x.ln()),
        Unary::Neg => mapping(|x: F| -x),
        Unary::Reciprocal => mapping(move |x: F| one / x),
        Unary::Relu => mapping(move |x: F| if x < zero { zero } else { x }),
        Unary::Round => mapping(|x: F| x.round_even()),
        Unary::Sigmoid => calling(|x: F| x.sigmoid()),
        Unary::Sign => mapping(|x: F| x.sign()),
        Unary::Sin => calling(|x: F| x.sin()),
        Unary::Sinh => calling(|x: F| x.sinh()),
        Unary::Softplus => calling(|x: F| x.softplus()),
        Unary::Softsign => mapping(move |x: F| x / (one + x.abs())),
        Unary::Sqrt => mapping(|x: F| x.sqrt()),
        Unary::Tan => calling(|x: F| x.tan()),
        Unary::Tanh => calling(|x: F| x.tanh()),
        Unary::Mish => calling(|x: F| x * x.softplus().tanh()),
        Unary::HardSwish => {
            let sixth = one / F::of(6.0);
            mapping(move |x: F| x * (x * sixth + half).clamp_nan(zero, one))
        }
        Unary::Gelu { tanh: false } => {
            let root = F::of(std::f64::consts::FRAC_1_SQRT_2);
            mapping(move |x: F| half * x * (one + (x * root).erf()))
        }
        Unary::Gelu { tanh: true } => {
            let (root, cubic) = (F::of((2.0 / std::f64::consts::PI).sqrt()), F::of(0.044715));
            mapping(move |x: F| half * x * (one + (root * (x + cubic * x * x * x)).tanh()))
        }
        parametric => return parametric_kernel::<F>(parametric),
    })
}

/// Functions with parameters.
fn parametric_kernel<F: Real>(unary: Unary) -> Option<Kernel> {
    let (zero, one) = (F::of(0.0), F::of(1.0));
    let of = |parameter: f32| F::of(f64::from(parameter));
    Some(match unary {
        Unary::Celu { alpha } => {
            let alpha = of(alpha);
            mapping(move |x: F| if x < zero { alpha * (x / alpha).exp_m1() } else { x })
        }
        Unary::Elu { alpha } => {
            let alpha = of(alpha);
            mapping(move |x: F| if x < zero { alpha * x.exp_m1() } else { x })
        }
        Unary::HardSigmoid { alpha, beta } => {
            let (alpha, beta) = (of(alpha), of(beta));
            mapping(move |x: F| (alpha * x + beta).clamp_nan(zero, one))
        }
        Unary::LeakyRelu { alpha } => {
            let alpha = of(alpha);
            mapping(move |x: F| if x < zero { alpha * x } else { x })
        }
        Unary::Selu { alpha, gamma } => {
            let (alpha, gamma) = (of(alpha), of(gamma));
            mapping(move |x: F| gamma * if x > zero { x } else { alpha * x.exp_m1() })
        }
        Unary::Shrink { bias, lambda } => {
            let (bias, lambda) = (of(bias), of(lambda));
            mapping(move |x: F| {
                if x < -lambda {
                    x + bias
                } else if x > lambda {
                    x - bias
                } else {
                    zero
                }
            })
        }
        Unary::Silu { alpha } => {
            let alpha = of(alpha);
            mapping(move |x: F| x * (alpha * x).sigmoid())
        }
        Unary::ThresholdedRelu { alpha } => {
            let alpha = of(alpha);
            mapping(move |x: F| if x > alpha { x } else { zero })
        }
        _ => return None,
    })
}

/// Functions that integers have too.
fn integer(facts: &StepFacts, unary: Unary, dtype: DataType) -> Result<Kernel, KernelError> {
    macro_rules! signed {
        ($rust:ty) => {
            match unary {
                Unary::Abs => Ok(mapping(|x: $rust| x.wrapping_abs())),
                Unary::Neg => Ok(mapping(|x: $rust| x.wrapping_neg())),
                Unary::Sign => Ok(mapping(|x: $rust| x.signum())),
                Unary::Relu => Ok(mapping(|x: $rust| x.max(0))),
                _ => Err(no_kernel(facts)),
            }
        };
    }
    match dtype {
        DataType::I8 => signed!(i8),
        DataType::I16 => signed!(i16),
        DataType::I32 => signed!(i32),
        DataType::I64 => signed!(i64),
        _ => match unary {
            Unary::Abs | Unary::Relu => Ok(Kernel::new(|_, mut inputs| one(inputs.take(0)?))),
            Unary::Sign => match dtype {
                DataType::U8 => Ok(mapping(|x: u8| x.min(1))),
                DataType::U16 => Ok(mapping(|x: u16| x.min(1))),
                DataType::U32 => Ok(mapping(|x: u32| x.min(1))),
                _ => Ok(mapping(|x: u64| x.min(1))),
            },
            _ => Err(no_kernel(facts)),
        },
    }
}

fn integer_not(facts: &StepFacts, dtype: DataType) -> Result<Kernel, KernelError> {
    Ok(match dtype {
        DataType::U8 => mapping(|x: u8| !x),
        DataType::U16 => mapping(|x: u16| !x),
        DataType::U32 => mapping(|x: u32| !x),
        DataType::U64 => mapping(|x: u64| !x),
        DataType::I8 => mapping(|x: i8| !x),
        DataType::I16 => mapping(|x: i16| !x),
        DataType::I32 => mapping(|x: i32| !x),
        DataType::I64 => mapping(|x: i64| !x),
        _ => return Err(no_kernel(facts)),
    })
}

fn is_nan(context: &Context, inputs: &Inputs) -> KernelResult {
    test(context, inputs, |x| x.is_nan(), |x| x.is_nan())
}

fn is_inf(context: &Context, inputs: &Inputs, positive: bool, negative: bool) -> KernelResult {
    test(
        context,
        inputs,
        move |x| x.is_infinite() && if x > 0.0 { positive } else { negative },
        move |x| x.is_infinite() && if x > 0.0 { positive } else { negative },
    )
}

/// A boolean per element of a float operand.
fn test(
    context: &Context,
    inputs: &Inputs,
    single: impl Fn(f32) -> bool + Sync + Copy,
    double: impl Fn(f64) -> bool + Sync + Copy,
) -> KernelResult {
    let value = inputs.get(0)?;
    let mut out = context.pool.filled(value.shape().iter().product(), false)?;
    match value {
        Value::F32(x) => convert(elements(x), &mut out, single),
        Value::F64(x) => convert(elements(x), &mut out, double),
        Value::F16(x) => convert(elements(x), &mut out, |x: half::f16| single(x.to_f32())),
        Value::BF16(x) => convert(elements(x), &mut out, |x: half::bf16| single(x.to_f32())),
        other => return Err(invalid!("operand 0 is {}", other.dtype())),
    }
    one(bool::wrap(value.shape(), out))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{floats, run, values};
    use super::*;
    use model::op::Op;

    fn on(unary: Unary, x: &[f32]) -> Vec<f32> {
        values(&run(Op::Unary(unary), &[floats(&[x.len()], x)])[0])
    }

    #[test]
    fn edge_cases_follow_numpy() {
        assert_eq!(on(Unary::Round, &[0.5, 1.5, 2.5, -0.5, -2.5]), [0.0, 2.0, 2.0, 0.0, -2.0]);
        assert_eq!(on(Unary::Sign, &[0.0, -3.0, 4.0]), [0.0, -1.0, 1.0]);
        assert!(on(Unary::Relu, &[f32::NAN])[0].is_nan());
        assert_eq!(on(Unary::Softplus, &[200.0, -200.0]), [200.0, 0.0]);
        assert_eq!(on(Unary::Sigmoid, &[-200.0, 200.0]), [0.0, 1.0]);
    }

    #[test]
    fn erf_is_accurate_in_both_precisions() {
        // From tables of the error function to 16 digits.
        let table: [(f64, f64); 6] = [
            (0.1, 0.1124629160182849),
            (0.5, 0.5204998778130465),
            (1.0, 0.8427007929497149),
            (2.0, 0.9953222650189527),
            (2.9, 0.9999589021219005),
            (3.5, 0.9999992569016276),
        ];
        for (x, want) in table {
            let double: [f64; 2] = [Real::erf(x), Real::erf(-x)];
            assert!((double[0] - want).abs() < 1e-15, "erf({x}) is {}", double[0]);
            assert!((double[1] + want).abs() < 1e-15);
            let single = on(Unary::Erf, &[x as f32])[0];
            assert!((f64::from(single) - want).abs() < 1e-6, "erf({x}) is {single}");
        }
        assert_eq!(on(Unary::Erf, &[0.0])[0], 0.0);
        assert!((on(Unary::Erf, &[1e-5])[0] - 1.128379e-5).abs() < 1e-11);
    }

    #[test]
    fn vectorized_functions_agree_with_plain_ones() {
        let x: Vec<f32> = (-4000..4000).map(|i| i as f32 * 0.01).collect();
        for unary in [
            Unary::Exp,
            Unary::Sigmoid,
            Unary::Tanh,
            Unary::Erf,
            Unary::Gelu { tanh: false },
            Unary::Gelu { tanh: true },
            Unary::Silu { alpha: 1.0 },
            Unary::Silu { alpha: 1.7 },
            Unary::Celu { alpha: 0.4 },
            Unary::Celu { alpha: -2.5 },
            Unary::Elu { alpha: 1.3 },
            Unary::Selu { alpha: 1.673_263_2, gamma: 1.050_701 },
            Unary::Mish,
            Unary::Softplus,
        ] {
            let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            let input = model::Tensor::from_vec(vec![wide.len()], wide).unwrap();
            let want: Vec<f64> = values(&run(Op::Unary(unary), &[input])[0]);
            for ((&x, got), want) in x.iter().zip(on(unary, &x)).zip(want) {
                let error = (f64::from(got) - want).abs();
                // Gelu scales the error of erf by its argument.
                assert!(
                    error < 2e-6 * want.abs().max(1.0).max(f64::from(x).abs()),
                    "{unary:?}({x}): {got} {want}"
                );
            }
        }
    }

    /// The largest error of `unary` relative to the result, in single precision's steps.
    fn steps_off(unary: Unary, x: &[f32]) -> f64 {
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let input = model::Tensor::from_vec(vec![wide.len()], wide).unwrap();
        let want: Vec<f64> = values(&run(Op::Unary(unary), &[input])[0]);
        let errors = on(unary, x).into_iter().zip(want).map(|(got, want)| {
            (f64::from(got) - want).abs() / (want.abs() * f64::from(f32::EPSILON))
        });
        errors.fold(0.0, f64::max)
    }

    #[test]
    fn logarithms_are_accurate_for_all_magnitudes() {
        let mut random = base::Random::new(7);
        let x: Vec<f32> = (0..20_000)
            .map(|_| f32::from_bits((random.next_u64() % 0x7f7f_ffff) as u32).max(1e-45))
            .filter(|x| (x - 1.0).abs() > 1e-3)
            .collect();
        assert!(steps_off(Unary::Log, &x) < 2.0, "{}", steps_off(Unary::Log, &x));
        let near: Vec<f32> = (1..2000).map(|i| 1.0 + (i as f32 - 1000.5) * 1e-4).collect();
        assert!(steps_off(Unary::Log, &near) < 2.0, "{}", steps_off(Unary::Log, &near));
        let edges = on(Unary::Log, &[0.0, -0.0, 1.0, f32::INFINITY]);
        assert_eq!(edges, [f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0, f32::INFINITY]);
        assert!(on(Unary::Log, &[-1.0, f32::NAN, f32::NEG_INFINITY]).iter().all(|x| x.is_nan()));
    }

    #[test]
    fn small_and_large_arguments_keep_their_accuracy() {
        let small: Vec<f32> = (0..3000).map(|i| -(0.99f32.powi(i))).collect();
        for unary in [Unary::Elu { alpha: 1.0 }, Unary::Celu { alpha: 0.7 }, Unary::Mish] {
            assert!(steps_off(unary, &small) < 4.0, "{unary:?}: {}", steps_off(unary, &small));
        }
        for unary in [Unary::Elu { alpha: 1.5 }, Unary::Mish, Unary::Softplus] {
            assert_eq!(on(unary, &[1e30, f32::INFINITY]), [1e30, f32::INFINITY], "{unary:?}");
            assert!(on(unary, &[f32::NAN])[0].is_nan(), "{unary:?}");
        }
        assert_eq!(on(Unary::Elu { alpha: 1.5 }, &[f32::NEG_INFINITY, -0.0]), [-1.5, 0.0]);
        assert_eq!(on(Unary::Softplus, &[f32::NEG_INFINITY]), [0.0]);
    }
}
