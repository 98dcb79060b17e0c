//! Tracks the elements of small tensors through shape arithmetic.

use model::DataType;
use model::op::{Binary, Compare, Unary, Variadic};

use super::Fact;
use crate::content::{MAX_CONTENT, fixed_count};
use model::dim::SymDim;

/// A tensor whose elements are tracked: shape as numbers, elements in row-major order.
pub(crate) struct TrackedElements<'a> {
    pub shape: &'a [SymDim],
    pub elements: &'a [SymDim],
}

/// Drops contents that are too large, of the wrong count, or too wide for their type.
pub(crate) fn limit(fact: &mut Fact) {
    let count = fact.shape.as_deref().and_then(fixed_count);
    let fits = |content: &Vec<SymDim>| {
        content.len() <= MAX_CONTENT
            && Some(content.len()) == count
            && content.iter().all(|element| match element {
                SymDim::Fixed(value) => in_range(fact.dtype, *value),
                _ => true,
            })
    };
    if !fact.content.as_ref().is_some_and(fits) {
        fact.content = None;
    }
}

/// Whether arithmetic of `dtype` gives `value` exactly: no wrapping, no rounding.
fn in_range(dtype: DataType, value: i64) -> bool {
    let within = |low: i64, high: i64| (low..=high).contains(&value);
    match dtype {
        DataType::Bool => within(0, 1),
        DataType::U8 => within(0, 255),
        DataType::I8 => within(-128, 127),
        DataType::U16 => within(0, 65_535),
        DataType::I16 => within(-32_768, 32_767),
        DataType::U32 => within(0, i64::from(u32::MAX)),
        DataType::I32 => within(i64::from(i32::MIN), i64::from(i32::MAX)),
        DataType::U64 => value >= 0,
        DataType::I64 | DataType::F64 => true,
        DataType::F32 => within(-(1 << 24), 1 << 24),
        DataType::F16 => within(-2048, 2048),
        DataType::BF16 => within(-256, 256),
        DataType::String => false,
    }
}

pub(crate) fn unary(op: Unary, dtype: DataType, x: &SymDim) -> Option<SymDim> {
    let zero = SymDim::Fixed(0);
    Some(match op {
        Unary::Neg => zero.sub(x),
        Unary::Abs => x.greater(&zero.sub(x)),
        Unary::Relu => x.greater(&zero),
        Unary::Ceil | Unary::Floor | Unary::Round => x.clone(),
        Unary::Not => SymDim::Fixed(1).sub(x),
        Unary::Sign => x.fixed().map_or(SymDim::Unknown, |value| SymDim::Fixed(value.signum())),
        Unary::Sqrt if dtype.is_float() => {
            let value = x.fixed()?;
            let root = (value as f64).sqrt();
            (root.fract() == 0.0).then_some(SymDim::Fixed(root as i64))?
        }
        _ => return None,
    })
}

pub(crate) fn binary(op: Binary, dtype: DataType, a: &SymDim, b: &SymDim) -> Option<SymDim> {
    Some(match op {
        Binary::Add => a.add(b),
        Binary::Sub => a.sub(b),
        Binary::Mul => a.mul(b),
        // A quotient of floats is tracked only when it is an integer.
        Binary::Div if dtype.is_float() => match (a.fixed(), b.fixed()) {
            (Some(x), Some(y)) if x.checked_rem(y) == Some(0) => a.div(b),
            _ => return None,
        },
        Binary::Div => a.div(b),
        Binary::Mod => match (a.fixed(), b.fixed()) {
            (Some(x), Some(y)) if y > 0 => SymDim::Fixed(x.checked_rem_euclid(y)?),
            (Some(_), Some(_)) => return None,
            _ if a.is_non_negative() && b.is_non_negative() => a.rem(b),
            _ => SymDim::Unknown,
        },
        Binary::Pow => {
            let exponent = u32::try_from(b.fixed()?).ok()?;
            SymDim::Fixed(a.fixed()?.checked_pow(exponent)?)
        }
        Binary::And => a.mul(b),
        Binary::Or => a.greater(b),
        _ => return None,
    })
}

pub(crate) fn compare(op: Compare, a: &SymDim, b: &SymDim) -> SymDim {
    let difference = a.sub(b);
    let positive = difference.sub(&SymDim::Fixed(1)).is_non_negative();
    let negative = SymDim::Fixed(-1).sub(&difference).is_non_negative();
    let non_negative = difference.is_non_negative();
    let non_positive = SymDim::Fixed(0).sub(&difference).is_non_negative();
    let decided = |yes: bool, no: bool| match (yes, no) {
        (true, _) => SymDim::Fixed(1),
        (_, true) => SymDim::Fixed(0),
        _ => SymDim::Unknown,
    };
    if difference == SymDim::Unknown {
        return SymDim::Unknown;
    }
    match op {
        Compare::Equal => decided(difference.is(0), positive || negative),
        Compare::Less => decided(negative, non_negative),
        Compare::LessOrEqual => decided(non_positive, positive),
        Compare::Greater => decided(positive, non_positive),
        Compare::GreaterOrEqual => decided(non_negative, negative),
    }
}

pub(crate) fn variadic(op: Variadic, a: &SymDim, b: &SymDim) -> Option<SymDim> {
    Some(match op {
        Variadic::Sum => a.add(b),
        Variadic::Max => a.greater(b),
        Variadic::Min => a.lesser(b),
        Variadic::Mean => return None,
    })
}

/// Applies `f` to broadcast elements. `shape` is the broadcast shape, all numbers.
pub(crate) fn zip(
    shape: &[SymDim],
    operands: &[TrackedElements],
    f: impl Fn(&[&SymDim]) -> Option<SymDim>,
) -> Option<Vec<SymDim>> {
    let sizes: Vec<usize> = shape.iter().map(SymDim::size).collect::<Option<_>>()?;
    let count = fixed_count(shape).filter(|count| *count <= MAX_CONTENT)?;
    let strides: Vec<Vec<usize>> = operands
        .iter()
        .map(|operand| strides(operand.shape, sizes.len()))
        .collect::<Option<_>>()?;
    (0..count)
        .map(|flat| {
            let elements: Option<Vec<&SymDim>> = operands
                .iter()
                .zip(&strides)
                .map(|(operand, strides)| operand.elements.get(offset(flat, &sizes, strides)))
                .collect();
            f(&elements?)
        })
        .collect()
}

/// Strides of `shape` seen as broadcast to `rank` dimensions.
fn strides(shape: &[SymDim], rank: usize) -> Option<Vec<usize>> {
    let mut strides = vec![0; rank];
    let mut step = 1usize;
    for (back, dim) in shape.iter().rev().enumerate() {
        let size = dim.size()?;
        let slot = strides.len().checked_sub(back + 1)?;
        strides[slot] = if size == 1 { 0 } else { step };
        step = step.checked_mul(size)?;
    }
    Some(strides)
}

fn offset(mut flat: usize, sizes: &[usize], strides: &[usize]) -> usize {
    let mut position = 0;
    for (size, stride) in sizes.iter().zip(strides).rev() {
        position += flat % size * stride;
        flat /= size;
    }
    position
}
