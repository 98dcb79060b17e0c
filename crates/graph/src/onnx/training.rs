//! Steps of optimisers, made of simpler operators.

use model::op::{Binary, Cast, Op, Unary};
use model::{DataType, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    let (states, step): (usize, Step) = match op {
        "Adagrad" => (1, adagrad),
        "Adam" => (2, adam),
        "Momentum" => (1, momentum),
        _ => return Ok(false),
    };
    // Operands are the rate, the number of steps, then all weights, all gradients, all states.
    let width = 2 + states;
    let Some(count) = cx.inputs.len().checked_sub(2).map(|rest| rest / width) else {
        return invalid("neither a rate nor a number of steps");
    };
    if cx.inputs.len() != 2 + count * width || count == 0 {
        return invalid(format!("{} operands", cx.inputs.len()));
    }
    for index in 0..count {
        let operand = |part: usize| cx.input(2 + part * count + index);
        let operands: Vec<ValueId> = (0..width).map(operand).collect::<Result<_, _>>()?;
        let results = step(cx, &operands)?;
        for (part, id) in results.into_iter().enumerate() {
            cx.emit_identity(part * count + index, id)?;
        }
    }
    Ok(true)
}

/// The new weights and states from weights, gradients and states.
type Step = fn(&mut Context, &[ValueId]) -> Result<Vec<ValueId>, MapError>;

fn binary(cx: &mut Context, op: Binary, a: ValueId, b: ValueId) -> Result<ValueId, MapError> {
    cx.part(Op::Binary(op), &[a, b])
}

/// `x` times the number `factor`.
fn times(cx: &mut Context, x: ValueId, factor: f32) -> Result<ValueId, MapError> {
    let factor = cx.scalar(cx.dtype(x), f64::from(factor))?;
    binary(cx, Binary::Mul, x, factor)
}

/// The gradient with the decay of the weights.
fn regularized(cx: &mut Context, x: ValueId, gradient: ValueId) -> Result<ValueId, MapError> {
    let decay = cx.attributes.float_or("norm_coefficient", 0.0)?;
    let decayed = times(cx, x, decay)?;
    binary(cx, Binary::Add, decayed, gradient)
}

/// The number of steps as a number like `x`.
fn steps(cx: &mut Context, x: ValueId) -> Result<ValueId, MapError> {
    let (count, to) = (cx.input(1)?, cx.dtype(x));
    cx.part(Op::Cast(Cast { to }), &[count])
}

fn adagrad(cx: &mut Context, x: &[ValueId]) -> Result<Vec<ValueId>, MapError> {
    let &[weights, gradient, sum] = x else { return invalid("operands are missing") };
    let decay = cx.attributes.float_or("decay_factor", 0.0)?;
    let epsilon = cx.attributes.float_or("epsilon", 0.0)?;
    let dtype = cx.dtype(weights);
    let count = steps(cx, weights)?;
    let one = cx.scalar(dtype, 1.0)?;
    let slowed = times(cx, count, decay)?;
    let slowed = binary(cx, Binary::Add, one, slowed)?;
    let rate = cx.input(0)?;
    let rate = binary(cx, Binary::Div, rate, slowed)?;
    let gradient = regularized(cx, weights, gradient)?;
    let square = binary(cx, Binary::Mul, gradient, gradient)?;
    let sum = binary(cx, Binary::Add, sum, square)?;
    let root = cx.part(Op::Unary(Unary::Sqrt), &[sum])?;
    let epsilon = cx.scalar(dtype, f64::from(epsilon))?;
    let root = binary(cx, Binary::Add, root, epsilon)?;
    let change = binary(cx, Binary::Mul, rate, gradient)?;
    let change = binary(cx, Binary::Div, change, root)?;
    Ok(vec![binary(cx, Binary::Sub, weights, change)?, sum])
}

fn adam(cx: &mut Context, x: &[ValueId]) -> Result<Vec<ValueId>, MapError> {
    let &[weights, gradient, first, second] = x else { return invalid("operands are missing") };
    let alpha = cx.attributes.float_or("alpha", 0.9)?;
    let beta = cx.attributes.float_or("beta", 0.999)?;
    let epsilon = cx.attributes.float_or("epsilon", 1e-6)?;
    let after = cx.attributes.float_or("norm_coefficient_post", 0.0)?;
    let dtype = cx.dtype(weights);
    let gradient = regularized(cx, weights, gradient)?;
    let square = binary(cx, Binary::Mul, gradient, gradient)?;
    let first = moved(cx, first, gradient, alpha)?;
    let second = moved(cx, second, square, beta)?;
    let root = cx.part(Op::Unary(Unary::Sqrt), &[second])?;
    let epsilon = cx.scalar(dtype, f64::from(epsilon))?;
    let root = binary(cx, Binary::Add, root, epsilon)?;
    let rate = corrected_rate(cx, weights, alpha, beta)?;
    let change = binary(cx, Binary::Mul, rate, first)?;
    let change = binary(cx, Binary::Div, change, root)?;
    let new = binary(cx, Binary::Sub, weights, change)?;
    Ok(vec![times(cx, new, 1.0 - after)?, first, second])
}

/// `share * old + (1 - share) * new`.
fn moved(cx: &mut Context, old: ValueId, new: ValueId, share: f32) -> Result<ValueId, MapError> {
    let (old, new) = (times(cx, old, share)?, times(cx, new, 1.0 - share)?);
    binary(cx, Binary::Add, old, new)
}

/// Adam's rate: from the second step on it makes up for states that began as zeros.
fn corrected_rate(
    cx: &mut Context,
    like: ValueId,
    alpha: f32,
    beta: f32,
) -> Result<ValueId, MapError> {
    let dtype = cx.dtype(like);
    let count = steps(cx, like)?;
    let mut missing = Vec::with_capacity(2);
    for share in [beta, alpha] {
        let (one, base) = (cx.scalar(dtype, 1.0)?, cx.scalar(dtype, f64::from(share))?);
        let power = binary(cx, Binary::Pow, base, count)?;
        missing.push(binary(cx, Binary::Sub, one, power)?);
    }
    let root = cx.part(Op::Unary(Unary::Sqrt), &[missing[0]])?;
    let rate = cx.input(0)?;
    let scaled = binary(cx, Binary::Mul, rate, root)?;
    let scaled = binary(cx, Binary::Div, scaled, missing[1])?;
    let zero = cx.scalar(dtype, 0.0)?;
    let later = cx.part(Op::Compare(model::op::Compare::Greater), &[count, zero])?;
    cx.part(Op::Where, &[later, scaled, rate])
}

fn momentum(cx: &mut Context, x: &[ValueId]) -> Result<Vec<ValueId>, MapError> {
    let &[weights, gradient, speed] = x else { return invalid("operands are missing") };
    let alpha = cx.attributes.float_or("alpha", 0.0)?;
    let beta = cx.attributes.float_or("beta", 0.0)?;
    let nesterov = match cx.attributes.string("mode")?.as_deref() {
        Some("standard") => false,
        Some("nesterov") => true,
        other => return unsupported(format!("mode {other:?}")),
    };
    let gradient = regularized(cx, weights, gradient)?;
    let count = cx.input(1)?;
    let zero = cx.scalar(DataType::I64, 0.0)?;
    // The first step takes the gradient whole.
    let later = cx.part(Op::Compare(model::op::Compare::Greater), &[count, zero])?;
    let share = times(cx, gradient, beta)?;
    let share = cx.part(Op::Where, &[later, share, gradient])?;
    let kept = times(cx, speed, alpha)?;
    let speed = binary(cx, Binary::Add, kept, share)?;
    let rate = cx.input(0)?;
    let direction = match nesterov {
        false => speed,
        true => {
            let ahead = times(cx, speed, alpha)?;
            binary(cx, Binary::Add, gradient, ahead)?
        }
    };
    let change = binary(cx, Binary::Mul, rate, direction)?;
    Ok(vec![binary(cx, Binary::Sub, weights, change)?, speed])
}
