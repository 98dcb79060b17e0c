//! Spectra and random numbers.

use model::DataType;
use model::dim::SymDim;
use model::op::{Distribution, Draw, Signal};

use super::shape::axis_index;
use super::{Fact, Inferred, Operands, fail};

pub fn signal(signal: &Signal, x: &Operands) -> Inferred<Fact> {
    match *signal {
        Signal::Dft { inverse, onesided, axis } => dft(x, inverse, onesided, axis),
        Signal::Stft { onesided } => stft(x, onesided),
        Signal::Window { dtype, .. } => {
            let size = x.content(0).and_then(|content| content.first().cloned());
            Ok(Fact::new(dtype, Some(vec![size.unwrap_or(SymDim::Unknown)])))
        }
        Signal::MelWeights { dtype } => {
            x.require(5)?;
            let bins = x.ints(0).and_then(|v| v.first().copied());
            let length = x.ints(1).and_then(|v| v.first().copied());
            let rows = length.map(|length| SymDim::Fixed(length.max(0) / 2 + 1));
            let dims = [rows, bins.map(SymDim::Fixed)];
            let dims = dims.map(|dim| dim.unwrap_or(SymDim::Unknown)).to_vec();
            Ok(Fact::new(dtype, Some(dims)))
        }
    }
}

fn real(x: &Operands) -> Inferred<DataType> {
    match x.dtype(0)? {
        dtype if dtype.is_float() => Ok(dtype),
        other => fail(format!("a signal of {other}")),
    }
}

fn dft(x: &Operands, inverse: bool, onesided: bool, axis: i64) -> Inferred<Fact> {
    let dtype = real(x)?;
    let axis = match x.has(2) {
        false => Some(axis),
        true => x.ints(2).and_then(|axis| axis.first().copied()),
    };
    let (Some(shape), Some(axis)) = (x.shape(0), axis) else {
        return Ok(Fact::new(dtype, x.rank(0).map(|rank| vec![SymDim::Unknown; rank])));
    };
    let axis = axis_index(axis, shape.len())?;
    if axis + 1 == shape.len() {
        return fail("the last dimension holds the parts of a number");
    }
    let one = SymDim::Fixed(1);
    let length = match x.has(1) {
        false if inverse && onesided => shape[axis].sub(&one).mul(&SymDim::Fixed(2)),
        false => shape[axis].clone(),
        true => match x.content(1) {
            Some([length]) => length.clone(),
            _ => SymDim::Unknown,
        },
    };
    let mut dims = shape.to_vec();
    dims[axis] = match onesided && !inverse {
        true => length.div(&SymDim::Fixed(2)).add(&one),
        false => length,
    };
    *dims.last_mut().expect("the rank is at least two") =
        SymDim::Fixed(if inverse && onesided { 1 } else { 2 });
    Ok(Fact::new(dtype, Some(dims)))
}

fn stft(x: &Operands, onesided: bool) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = real(x)?;
    let one = SymDim::Fixed(1);
    let step = x.content(1).and_then(|c| c.first().cloned()).unwrap_or(SymDim::Unknown);
    let length = match (x.content(3), x.shape(2)) {
        (Some([length]), _) => length.clone(),
        (_, Some([length])) if !x.has(3) => length.clone(),
        _ => SymDim::Unknown,
    };
    let (batch, samples) = match x.shape(0) {
        Some([batch, samples, ..]) => (batch.clone(), samples.clone()),
        _ => (SymDim::Unknown, SymDim::Unknown),
    };
    let frames = match step.is(0) {
        true => return fail("a step of zero"),
        false => samples.sub(&length).div(&step).add(&one),
    };
    let bins = match onesided {
        true => length.div(&SymDim::Fixed(2)).add(&one),
        false => length,
    };
    Ok(Fact::new(dtype, Some(vec![batch, frames, bins, SymDim::Fixed(2)])))
}

pub fn draw(draw: &Draw, x: &Operands) -> Inferred<Fact> {
    let shape = match draw.distribution {
        Distribution::Bernoulli => x.owned_shape(0),
        Distribution::Multinomial { count } => {
            let rows = x.shape(0).and_then(|shape| shape.first().cloned());
            Some(vec![rows.unwrap_or(SymDim::Unknown), SymDim::from(count)])
        }
        _ => match (x.content(0), x.shape(0)) {
            (Some(content), _) => Some(content.to_vec()),
            (None, Some([rank])) => rank.size().map(|rank| vec![SymDim::Unknown; rank.min(64)]),
            _ => None,
        },
    };
    Ok(Fact::new(draw.dtype, shape))
}
