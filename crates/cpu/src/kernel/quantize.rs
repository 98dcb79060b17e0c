//! Conversion between real and quantized numbers.

use std::sync::{Mutex, PoisonError};

use model::DataType;
use model::op::Op;
use rten_simd::{Isa, SimdOp};

use super::bytes::{clamped, rounded};
use super::cast::convert;
use super::elementwise;
use super::operand::{Element, around, dtype_of, elements, narrowed, one, resolve_axis, widened};
use super::parallel::{for_each, in_pieces};
use super::{Context, Inputs, Kernel, KernelResult, Outputs, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value};
use crate::yield_point;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    match facts.step.op {
        Op::QuantizeLinear { axis, dtype: to } => {
            let to = facts.input_dtype(2).unwrap_or(to);
            let scale = dtype_of(facts, 1)?;
            let from_real =
                matches!(dtype, DataType::F32 | DataType::F16 | DataType::BF16 | DataType::I32);
            if !from_real || !scale.is_float() || scale == DataType::F64 {
                return Err(no_kernel(facts));
            }
            match to {
                DataType::U8 => Ok(quantizer::<u8>(axis)),
                DataType::I8 => Ok(quantizer::<i8>(axis)),
                DataType::U16 => Ok(quantizer::<u16>(axis)),
                DataType::I16 => Ok(quantizer::<i16>(axis)),
                _ => Err(no_kernel(facts)),
            }
        }
        Op::DequantizeLinear { axis } => {
            let scale = dtype_of(facts, 1)?;
            if !matches!(scale, DataType::F32 | DataType::F16 | DataType::BF16) {
                return Err(no_kernel(facts));
            }
            match dtype {
                DataType::U8 => Ok(dequantizer::<u8>(axis, scale)),
                DataType::I8 => Ok(dequantizer::<i8>(axis, scale)),
                DataType::U16 => Ok(dequantizer::<u16>(axis, scale)),
                DataType::I16 => Ok(dequantizer::<i16>(axis, scale)),
                DataType::I32 => Ok(dequantizer::<i32>(axis, scale)),
                _ => Err(no_kernel(facts)),
            }
        }
        Op::DynamicQuantizeLinear if dtype == DataType::F32 => {
            Ok(Kernel::new(|_, inputs| dynamic(&inputs)))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// A quantized number.
trait Quantized: Element + Copy {
    fn to_i64(self) -> i64;
    /// The nearest value to `x`, halves to even, plus `zero`, within the type's range.
    fn quantize(x: f32, zero: f32) -> Self;
    /// `(source - zero) * scale`.
    fn dequantize(source: &[Self], target: &mut [f32], scale: f32, zero: i64) {
        match i32::try_from(zero) {
            // Differences of narrow numbers fit; vectors are twice as wide as with 64 bits.
            Ok(zero) if size_of::<Self>() < 4 => {
                let number = move |x: Self| (x.to_i64() as i32 - zero) as f32 * scale;
                elementwise::convert_run(source, target, number);
            }
            _ => {
                let number = move |x: Self| (x.to_i64() - zero) as f32 * scale;
                elementwise::convert_run(source, target, number);
            }
        }
    }
}

macro_rules! quantized {
    ($($rust:ty),+) => {
        $(impl Quantized for $rust {
            #[inline(always)]
            fn to_i64(self) -> i64 {
                i64::from(self)
            }
            #[inline(always)]
            fn quantize(x: f32, zero: f32) -> Self {
                // Vectors have instructions for all of this, but none for casts that saturate.
                let (least, most) = (<$rust>::MIN as f32 - zero, <$rust>::MAX as f32 - zero);
                rounded(clamped(x, least, most), zero as i32) as $rust
            }
        })+
    };
}

quantized!(u8, i8, u16, i16);

impl Quantized for i32 {
    fn to_i64(self) -> i64 {
        i64::from(self)
    }
    fn quantize(x: f32, zero: f32) -> i32 {
        // Casts from float saturate.
        (x.round_ties_even() + zero) as i32
    }
}

/// Which scale belongs to which element.
enum ScaleGroups {
    /// One for all elements.
    Tensor,
    /// One per position along a dimension that is followed by `inner` elements.
    Axis { along: usize, inner: usize },
    /// One per `block` positions of a dimension of `along`, followed by `inner` elements.
    Block { along: usize, block: usize, inner: usize },
}

impl ScaleGroups {
    fn new(shape: &[usize], scale: &[usize], axis: i64) -> Result<ScaleGroups, KernelError> {
        let bad =
            || invalid!("scales of shape {scale:?} do not fit shape {shape:?} at axis {axis}");
        if scale.iter().product::<usize>() == 1 && scale.len() <= 1 {
            return Ok(ScaleGroups::Tensor);
        }
        let at = resolve_axis(axis, shape.len())?;
        let (_, along, inner) = around(shape, at);
        if scale == [along] {
            return Ok(ScaleGroups::Axis { along, inner });
        }
        let beside = scale.len() == shape.len()
            && (0..shape.len()).all(|other| other == at || shape[other] == scale[other]);
        if !beside || scale[at] == 0 || along % scale[at] != 0 {
            return Err(bad());
        }
        Ok(ScaleGroups::Block { along, block: along / scale[at], inner })
    }

    /// The scale of the element at `position`, and how many elements from there on share it.
    fn at(&self, position: usize) -> (usize, usize) {
        match *self {
            ScaleGroups::Tensor => (0, usize::MAX),
            ScaleGroups::Axis { along, inner } => {
                (position / inner % along, inner - position % inner)
            }
            ScaleGroups::Block { along, block, inner } => {
                let (line, column) = (position / inner, position % inner);
                let (outer, row) = (line / along, line % along);
                let run = if inner == 1 { block - row % block } else { 1 };
                ((outer * (along / block) + row / block) * inner + column, run)
            }
        }
    }

    /// Calls `visit` with position, length and scale of every run within `start..end`.
    fn visit(&self, start: usize, end: usize, mut visit: impl FnMut(usize, usize, usize)) {
        let mut position = start;
        while position < end {
            let (scale, run) = self.at(position);
            let length = run.min(end - position);
            visit(position, length, scale);
            position += length;
        }
    }
}

/// Scales in single precision and zero points as integers, equally many.
fn parameters<T: Quantized>(inputs: &Inputs) -> Result<(Buffer<f32>, Buffer<i64>), KernelError> {
    let scale = inputs.get(1)?;
    let wide = widened(scale)?;
    let scales = match wide.as_ref().unwrap_or(scale) {
        Value::F32(tensor) => Buffer::copy_of(elements(tensor))?,
        other => return Err(invalid!("scales are {}", other.dtype())),
    };
    let zeros = match inputs.optional_typed::<T>(2)? {
        Some(tensor) => Buffer::collect(elements(tensor).iter().map(|x| x.to_i64()))?,
        None => Buffer::filled(scales.len(), 0)?,
    };
    if zeros.len() != scales.len() {
        return Err(invalid!("{} zero points for {} scales", zeros.len(), scales.len()));
    }
    Ok((scales, zeros))
}

fn quantizer<T: Quantized>(axis: i64) -> Kernel {
    Kernel::new(move |context, inputs| {
        let (scales, zeros) = parameters::<T>(&inputs)?;
        let value = inputs.get(0)?;
        let single = match value {
            Value::F32(_) => None,
            other => Some(convert(other, DataType::F32)?),
        };
        let Value::F32(x) = single.as_ref().unwrap_or(value) else {
            return Err("the operand is not of numbers".into());
        };
        let groups = ScaleGroups::new(x.shape(), inputs.get(1)?.shape(), axis)?;
        let data = elements(x);
        let mut out = context.pool.filled(data.len(), T::default())?;
        in_pieces(&mut out, &|start: usize, piece: &mut [T]| {
            groups.visit(start, start + piece.len(), |position, length, group| {
                let (scale, zero) = (scales[group], zeros[group] as f32);
                let target = &mut piece[position - start..][..length];
                let source = &data[position..][..length];
                elementwise::convert_run(source, target, |x: f32| T::quantize(x / scale, zero));
            });
        });
        one(T::wrap(x.shape(), out))
    })
}

fn dequantizer<T: Quantized>(axis: i64, to: DataType) -> Kernel {
    Kernel::new(move |context, inputs| one(narrowed(dequantize::<T>(context, &inputs, axis)?, to)?))
}

fn dequantize<T: Quantized>(
    context: &Context,
    inputs: &Inputs,
    axis: i64,
) -> Result<Value, KernelError> {
    let (scales, zeros) = parameters::<T>(inputs)?;
    let x: &TypedTensor<T> = inputs.typed(0)?;
    let groups = ScaleGroups::new(x.shape(), inputs.get(1)?.shape(), axis)?;
    let data = elements(x);
    let mut out = context.pool.filled(data.len(), 0f32)?;
    in_pieces(&mut out, &|start: usize, piece: &mut [f32]| {
        groups.visit(start, start + piece.len(), |position, length, group| {
            let (scale, zero) = (scales[group], zeros[group]);
            let target = &mut piece[position - start..][..length];
            let source = &data[position..][..length];
            T::dequantize(source, target, scale, zero);
        });
    });
    Ok(f32::wrap(x.shape(), out))
}

/// Quantizes to `u8` over the range of the elements themselves and zero.
fn dynamic(inputs: &Inputs) -> KernelResult {
    let x = inputs.typed::<f32>(0)?;
    let data = elements(x);
    let (low, high) = range_with_zero(data);
    let scale = if high == low { 1.0 } else { (high - low) / 255.0 };
    let zero = (-low / scale).clamp(0.0, 255.0).round_ties_even();
    let mut out = Buffer::filled(data.len(), 0u8)?;
    elementwise::convert(data, &mut out, |x: f32| u8::quantize(x / scale, zero));
    Ok(Outputs::from_iter([
        u8::wrap(x.shape(), out),
        f32::wrap(&[], Buffer::filled(1, scale)?),
        u8::wrap(&[], Buffer::filled(1, zero as u8)?),
    ]))
}

/// Elements of which one thread finds the range.
const RANGE_PART: usize = 1 << 15;

/// The least and the largest of the elements and zero; what is no number is left out.
fn range_with_zero(data: &[f32]) -> (f32, f32) {
    let wider = |(low, high): (f32, f32), (other_low, other_high): (f32, f32)| {
        (low.min(other_low), high.max(other_high))
    };
    if data.len() <= RANGE_PART {
        return RangeOf(data).dispatch();
    }
    let all = Mutex::new((0.0, 0.0));
    for_each(data.chunks(RANGE_PART), &|part: &[f32]| {
        let range = RangeOf(part).dispatch();
        yield_point::did_work(part.len() / 8);
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        *all = wider(*all, range);
    });
    all.into_inner().unwrap_or_else(PoisonError::into_inner)
}

struct RangeOf<'a>(&'a [f32]);

impl SimdOp for RangeOf<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn eval<I: Isa>(self, _: I) -> (f32, f32) {
        // Several at a time, so that each does not wait for the one before.
        let (mut low, mut high) = ([0f32; 64], [0f32; 64]);
        let (chunks, rest) = self.0.as_chunks::<64>();
        for chunk in chunks {
            for ((low, high), x) in low.iter_mut().zip(&mut high).zip(chunk) {
                *low = if *x < *low { *x } else { *low };
                *high = if *x > *high { *x } else { *high };
            }
        }
        let all = || rest.iter().copied();
        let low = low.into_iter().chain(all()).fold(0f32, f32::min);
        (low, high.into_iter().chain(all()).fold(0f32, f32::max))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use model::Tensor as Host;

    #[test]
    fn rounds_half_to_even_and_saturates() {
        let x = floats(&[6], &[0.0, 1.0, 3.0, 1000.0, -254.0, -1000.0]);
        let zero = Host::from_vec(vec![], vec![128u8]).unwrap();
        let op = Op::QuantizeLinear { axis: 1, dtype: DataType::U8 };
        let got = run(op, &[x, floats(&[], &[2.0]), zero.clone()]);
        assert_eq!(values::<u8>(&got[0]), [128, 128, 130, 255, 1, 0]);
        let back =
            run(Op::DequantizeLinear { axis: 1 }, &[got[0].clone(), floats(&[], &[2.0]), zero]);
        assert_eq!(values::<f32>(&back[0]), [0.0, 0.0, 4.0, 254.0, -254.0, -256.0]);
    }

    #[test]
    fn supports_scales_per_axis_and_per_block() {
        let x = Host::from_vec(vec![2, 2], vec![1i8, 2, 3, 4]).unwrap();
        let on = |scale: Host, axis| {
            values::<f32>(&run(Op::DequantizeLinear { axis }, &[x.clone(), scale])[0])
        };
        assert_eq!(on(floats(&[2], &[1.0, 10.0]), 0), [1.0, 2.0, 30.0, 40.0]);
        assert_eq!(on(floats(&[2], &[1.0, 10.0]), -1), [1.0, 20.0, 3.0, 40.0]);
        assert_eq!(on(floats(&[2, 1], &[1.0, 10.0]), 1), [1.0, 2.0, 30.0, 40.0]);
        assert_eq!(on(floats(&[1, 2], &[1.0, 10.0]), 0), [1.0, 20.0, 3.0, 40.0]);
        let bad = [x.clone(), floats(&[3], &[1.0; 3])];
        assert!(error(Op::DequantizeLinear { axis: 0 }, &bad).contains("do not fit"));
    }

    #[test]
    fn dynamic_ranges_include_zero() {
        let inputs = [Some(floats(&[3], &[0.0, 2.0, -3.0]))];
        let got = try_run(Op::DynamicQuantizeLinear, &inputs, 3).unwrap();
        assert_eq!(values::<u8>(&got[0]), [153, 255, 0]);
        assert_eq!(values::<f32>(&got[1]), [5.0 / 255.0]);
        assert_eq!(values::<u8>(&got[2]), [153]);
        let none = try_run(Op::DynamicQuantizeLinear, &[Some(floats(&[1], &[0.0]))], 3).unwrap();
        assert_eq!(values::<u8>(&none[0]), [0]);
    }
}
