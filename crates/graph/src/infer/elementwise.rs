//! Operators whose output has the broadcast shape of their operands.

use model::DataType;
use model::op::{Binary, Cast, Compare, Unary, Variadic};

use super::shape::{broadcast_all, unify};
use super::tracked::{self, TrackedElements};
use super::{Fact, Inferred, Operands, fail};
use model::dim::SymDim;

fn tracked_elements<'a>(x: &Operands<'a>, index: usize) -> Option<TrackedElements<'a>> {
    Some(TrackedElements { shape: x.shape(index)?, elements: x.content(index)? })
}

fn broadcast_shape(x: &Operands) -> Inferred<super::Shape> {
    broadcast_all((0..x.count()).filter(|index| x.has(*index)).map(|index| x.shape(index)))
}

fn zip_content(
    x: &Operands,
    shape: &super::Shape,
    f: impl Fn(&[&SymDim]) -> Option<SymDim>,
) -> Option<Vec<SymDim>> {
    let operands: Vec<TrackedElements> =
        (0..x.count()).map(|index| tracked_elements(x, index)).collect::<Option<_>>()?;
    tracked::zip(shape.as_deref()?, &operands, f)
}

pub fn identity(x: &Operands) -> Inferred<Fact> {
    Ok(Fact::new(x.dtype(0)?, x.owned_shape(0)).with_content(x.content(0).map(<[SymDim]>::to_vec)))
}

pub fn same_float(x: &Operands) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    if !dtype.is_float() {
        return fail(format!("{dtype} is not a floating-point type"));
    }
    Ok(Fact::new(dtype, x.owned_shape(0)))
}

pub fn unary(op: Unary, x: &Operands) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    let allowed = match op {
        Unary::Not => dtype == DataType::Bool,
        Unary::BitNot => dtype.is_integer(),
        Unary::Abs | Unary::Neg | Unary::Sign | Unary::Relu => {
            dtype.is_float() || dtype.is_integer()
        }
        Unary::Shrink { .. } => dtype.is_float() || dtype.is_integer(),
        _ => dtype.is_float(),
    };
    if !allowed {
        return fail(format!("{op:?} does not take {dtype}"));
    }
    let out = match op {
        Unary::IsInf { .. } | Unary::IsNan => DataType::Bool,
        _ => dtype,
    };
    let content = x.content(0).and_then(|content| {
        content.iter().map(|element| tracked::unary(op, dtype, element)).collect()
    });
    Ok(Fact::new(out, x.owned_shape(0)).with_content(content))
}

pub fn binary(op: Binary, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = match op {
        Binary::Pow => x.dtype(0)?,
        _ => x.same_type([0, 1])?,
    };
    let allowed = match op {
        Binary::And | Binary::Or | Binary::Xor => dtype == DataType::Bool,
        Binary::BitAnd | Binary::BitOr | Binary::BitXor => dtype.is_integer(),
        Binary::ShiftLeft | Binary::ShiftRight => dtype.is_integer(),
        _ => dtype.is_integer() || dtype.is_float(),
    };
    if !allowed {
        return fail(format!("{op:?} does not take {dtype}"));
    }
    let shape = broadcast_shape(x)?;
    let content = zip_content(x, &shape, |e| tracked::binary(op, dtype, e[0], e[1]));
    Ok(Fact::new(dtype, shape).with_content(content))
}

pub fn compare(op: Compare, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    x.same_type([0, 1])?;
    let shape = broadcast_shape(x)?;
    let content = zip_content(x, &shape, |e| Some(tracked::compare(op, e[0], e[1])));
    Ok(Fact::new(DataType::Bool, shape).with_content(content))
}

pub fn variadic(op: Variadic, x: &Operands) -> Inferred<Fact> {
    x.require(x.count().max(1))?;
    let dtype = x.same_type(0..x.count())?;
    if dtype == DataType::String || dtype == DataType::Bool {
        return fail(format!("{op:?} does not take {dtype}"));
    }
    let shape = broadcast_shape(x)?;
    let content = zip_content(x, &shape, |e| {
        let (first, rest) = e.split_first()?;
        rest.iter().try_fold((*first).clone(), |a, b| tracked::variadic(op, &a, b))
    });
    Ok(Fact::new(dtype, shape).with_content(content))
}

pub fn select(x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    if x.dtype(0)? != DataType::Bool {
        return fail("the condition is not boolean");
    }
    let dtype = x.same_type([1, 2])?;
    let shape = broadcast_shape(x)?;
    let content = zip_content(x, &shape, |e| {
        Some(match e[0].fixed() {
            Some(0) => e[2].clone(),
            Some(_) => e[1].clone(),
            None if e[1].is_same(e[2]) => e[1].clone(),
            None => SymDim::Unknown,
        })
    });
    Ok(Fact::new(dtype, shape).with_content(content))
}

pub fn clip(x: &Operands) -> Inferred<Fact> {
    let dtype = x.same_type(0..x.count())?;
    let bound = |index: usize| match x.has(index) {
        true => x.content(index).and_then(|c| c.first()).cloned().map(Some),
        false => Some(None),
    };
    let content = match (x.content(0), bound(1), bound(2)) {
        (Some(content), Some(low), Some(high)) => Some(
            content
                .iter()
                .map(|element| {
                    low.as_ref().map_or_else(|| element.clone(), |low| element.greater(low))
                })
                .map(|element| {
                    high.as_ref().map_or_else(|| element.clone(), |high| element.lesser(high))
                })
                .collect(),
        ),
        _ => None,
    };
    Ok(Fact::new(dtype, x.owned_shape(0)).with_content(content))
}

pub fn prelu(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.same_type([0, 1])?;
    broadcast_shape(x)?;
    Ok(Fact::new(dtype, x.owned_shape(0)))
}

pub fn cast(cast: Cast, x: &Operands) -> Inferred<Fact> {
    let from = x.dtype(0)?;
    // Only between integers, and to floats: a fraction is not tracked.
    let numeric = from != DataType::String && cast.to != DataType::String;
    let content = x.content(0).filter(|_| numeric).map(|content| {
        let to_bool = |element: &SymDim| match element.fixed() {
            Some(value) => SymDim::Fixed(i64::from(value != 0)),
            None => SymDim::Unknown,
        };
        match cast.to {
            DataType::Bool => content.iter().map(to_bool).collect(),
            _ => content.to_vec(),
        }
    });
    Ok(Fact::new(cast.to, x.owned_shape(0)).with_content(content))
}

pub fn scale_shift(x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    let dtype = x.same_type([0, 1, 2])?;
    super::reduce::check_channels(x, &[1, 2])?;
    Ok(Fact::new(dtype, x.owned_shape(0)))
}

pub fn quantize(dtype: DataType, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let out = if x.has(2) { x.dtype(2)? } else { dtype };
    Ok(Fact::new(out, x.owned_shape(0)))
}

pub fn dequantize(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    x.same_type([0, 2])?;
    Ok(Fact::new(x.dtype(1)?, x.owned_shape(0)))
}

pub fn dynamic_quantize(x: &Operands) -> Inferred<Vec<Fact>> {
    let dtype = x.dtype(0)?;
    if dtype != DataType::F32 {
        return fail(format!("dynamic quantization does not take {dtype}"));
    }
    Ok(vec![
        Fact::new(DataType::U8, x.owned_shape(0)),
        Fact::new(DataType::F32, Some(vec![])),
        Fact::new(DataType::U8, Some(vec![])),
    ])
}

/// Unifies the channel dimension of `x` with the length of a vector operand.
pub(super) fn meet_channels(x: &Operands, vector: usize) -> Inferred<()> {
    if let (Some([_, channels, ..]), Some([length])) = (x.shape(0), x.shape(vector)) {
        unify(channels, length, "channels")?;
    }
    Ok(())
}
