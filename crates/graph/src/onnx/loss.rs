//! Losses. Exporters keep them in models that are also evaluated, so they are supported.

use model::ValueId;
use model::op::{Binary, Cast, Compare, Op, Reduce, ReduceKind, Softmax, SoftmaxKind, Unary};

use super::context::{Context, MapError, Mapped, invalid};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "NegativeLogLikelihoodLoss" => {
            let x = cx.input(0)?;
            negative_log_likelihood(cx, x)
        }
        "SoftmaxCrossEntropyLoss" => {
            let softmax = Softmax { kind: SoftmaxKind::LogSoftmax, axis: 1, flatten: false };
            let x = cx.input(0)?;
            let logs = cx.part(Op::Softmax(softmax), &[x])?;
            if cx.wants(1) {
                cx.emit_identity(1, logs)?;
            }
            negative_log_likelihood(cx, logs)
        }
        _ => Ok(false),
    }
}

/// Targets with ignored ones replaced by a valid class, and a mask of the ignored ones.
fn targets(cx: &mut Context) -> Result<(ValueId, Option<ValueId>), MapError> {
    let target = cx.input(1)?;
    let dtype = cx.dtype(target);
    let Some(ignored) = cx.attributes.int("ignore_index")? else { return Ok((target, None)) };
    let (ignored, zero) = (cx.scalar(dtype, ignored as f64)?, cx.scalar(dtype, 0.0)?);
    let hits = cx.part(Op::Compare(Compare::Equal), &[target, ignored])?;
    let safe = cx.part(Op::Where, &[hits, zero, target])?;
    Ok((safe, Some(hits)))
}

/// One weight per target; `None` when all are equal.
fn weights(
    cx: &mut Context,
    x: ValueId,
    target: ValueId,
    ignored: Option<ValueId>,
) -> Result<Option<ValueId>, MapError> {
    let dtype = cx.dtype(x);
    let given = match cx.optional(2) {
        Some(weight) => Some(cx.part(Op::Gather { axis: 0 }, &[weight, target])?),
        None => None,
    };
    let Some(ignored) = ignored else { return Ok(given) };
    Ok(Some(match given {
        Some(weights) => {
            let zero = cx.scalar(dtype, 0.0)?;
            cx.part(Op::Where, &[ignored, zero, weights])?
        }
        None => {
            let counted = cx.part(Op::Unary(Unary::Not), &[ignored])?;
            cx.part(Op::Cast(Cast { to: dtype }), &[counted])?
        }
    }))
}

fn negative_log_likelihood(cx: &mut Context, x: ValueId) -> Mapped {
    cx.at_most(3)?;
    let reduction = cx.attributes.string("reduction")?.unwrap_or_else(|| "mean".to_string());
    let (target, ignored) = targets(cx)?;
    let weights = weights(cx, x, target, ignored)?;
    let axis = cx.ints(&[1])?;
    let places = cx.part(Op::Unsqueeze, &[target, axis])?;
    let picked = cx.part(Op::GatherElements { axis: 1 }, &[x, places])?;
    let flat = cx.part(Op::Squeeze, &[picked, axis])?;
    let mut loss = cx.part(Op::Unary(Unary::Neg), &[flat])?;
    if let Some(weights) = weights {
        loss = cx.part(Op::Binary(Binary::Mul), &[loss, weights])?;
    }
    let total = |kind| Op::Reduce(Reduce { kind, keep_dims: false, noop_with_empty_axes: false });
    match (reduction.as_str(), weights) {
        ("none", _) => cx.emit_identity(0, loss),
        ("sum", _) => {
            let sum = cx.part(total(ReduceKind::Sum), &[loss])?;
            cx.emit_identity(0, sum)
        }
        ("mean", None) => {
            let mean = cx.part(total(ReduceKind::Mean), &[loss])?;
            cx.emit_identity(0, mean)
        }
        ("mean", Some(weights)) => {
            let sum = cx.part(total(ReduceKind::Sum), &[loss])?;
            let count = cx.part(total(ReduceKind::Sum), &[weights])?;
            let mean = cx.part(Op::Binary(Binary::Div), &[sum, count])?;
            cx.emit_identity(0, mean)
        }
        (other, _) => invalid(format!("reduction '{other}'")),
    }
}
