//! Normalisations and softmax operators.

use model::ValueId;
use model::op::{Binary, Op, Reduce, ReduceKind, Softmax, SoftmaxKind, Unary};

use super::context::{Context, MapError, Mapped, invalid, unsupported};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "BatchNormalization" => batch_norm(cx),
        "LayerNormalization" => layer_norm(cx),
        "RMSNormalization" => {
            stash_type(cx)?;
            let axis = cx.attributes.int_or("axis", -1)?;
            let epsilon = cx.attributes.float_or("epsilon", 1e-5)?;
            cx.emit_all(Op::RmsNorm { axis, epsilon }, 2)
        }
        "SimplifiedLayerNormalization" => super::microsoft::simplified_norm(cx),
        "InstanceNormalization" => {
            let epsilon = cx.attributes.float_or("epsilon", 1e-5)?;
            cx.emit_all(Op::InstanceNorm { epsilon }, 3)
        }
        "GroupNormalization" => group_norm(cx),
        "LRN" => {
            let op = Op::Lrn {
                alpha: cx.attributes.float_or("alpha", 1e-4)?,
                beta: cx.attributes.float_or("beta", 0.75)?,
                bias: cx.attributes.float_or("bias", 1.0)?,
                size: cx.attributes.size_or("size", 0)?,
            };
            if matches!(op, Op::Lrn { size: 0, .. }) {
                return invalid("attribute 'size' is missing");
            }
            cx.emit_all(op, 1)
        }
        "LpNormalization" => {
            let axis = cx.attributes.int_or("axis", -1)?;
            match cx.attributes.int_or("p", 2)? {
                p @ (1 | 2) => cx.emit_all(Op::LpNorm { axis, p: p as u8 }, 1),
                p => invalid(format!("a norm of order {p}")),
            }
        }
        "MeanVarianceNormalization" => mean_variance(cx),
        "Softmax" => softmax(cx, SoftmaxKind::Softmax),
        "LogSoftmax" => softmax(cx, SoftmaxKind::LogSoftmax),
        "Hardmax" => softmax(cx, SoftmaxKind::Hardmax),
        _ => Ok(false),
    }
}

fn softmax(cx: &mut Context, kind: SoftmaxKind) -> Mapped {
    let flatten = cx.opset < 13;
    let axis = cx.attributes.int_or("axis", if flatten { 1 } else { -1 })?;
    cx.emit_all(Op::Softmax(Softmax { kind, axis, flatten }), 1)
}

fn batch_norm(cx: &mut Context) -> Mapped {
    let a = &cx.attributes;
    let momentum = a.float_or("momentum", 0.9)?;
    let epsilon = a.float_or("epsilon", 1e-5)?;
    let training = match cx.opset {
        ..7 => !a.flag("is_test", false)?,
        7..14 => false,
        _ => a.flag("training_mode", false)?,
    };
    if cx.opset < 9 && !a.flag("spatial", true)? {
        return unsupported("spatial = 0");
    }
    if training && cx.opset >= 14 {
        return training_norm(cx, epsilon, momentum);
    }
    if training {
        return unsupported("training mode before opset 14");
    }
    cx.no_output_from(1, "outputs of the training mode are read")?;
    cx.emit_all(Op::BatchNorm { epsilon }, 5)
}

/// Statistics of the batch itself, and the running ones moved towards them.
fn training_norm(cx: &mut Context, epsilon: f32, momentum: f32) -> Mapped {
    cx.at_most(5)?;
    let x = cx.input(0)?;
    let rank = cx.rank(x)? as i64;
    let axes: Vec<i64> = (0..rank).filter(|axis| *axis != 1).collect();
    let axes = cx.ints(&axes)?;
    let average = |keep_dims| {
        let kind = ReduceKind::Mean;
        Op::Reduce(Reduce { kind, keep_dims, noop_with_empty_axes: false })
    };
    let wide = cx.part(average(true), &[x, axes])?;
    let centred = cx.part(Op::Binary(Binary::Sub), &[x, wide])?;
    let square = cx.part(Op::Binary(Binary::Mul), &[centred, centred])?;
    let mean = cx.part(average(false), &[x, axes])?;
    let variance = cx.part(average(false), &[square, axes])?;
    let running = [(1, cx.input(3)?, mean), (2, cx.input(4)?, variance)];
    for (index, old, new) in running {
        if cx.wants(index) {
            let dtype = cx.dtype(old);
            let keep = cx.scalar(dtype, f64::from(momentum))?;
            let take = cx.scalar(dtype, 1.0 - f64::from(momentum))?;
            let old = cx.part(Op::Binary(Binary::Mul), &[old, keep])?;
            let new = cx.part(Op::Binary(Binary::Mul), &[new, take])?;
            let sum = cx.part(Op::Binary(Binary::Add), &[old, new])?;
            cx.emit_identity(index, sum)?;
        }
    }
    let inputs = [x, cx.input(1)?, cx.input(2)?, mean, variance];
    let y = cx.part(Op::BatchNorm { epsilon }, &inputs)?;
    cx.emit_identity(0, y)
}

/// The precision of the statistics: every device uses single precision.
fn stash_type(cx: &Context) -> Result<(), MapError> {
    match cx.attributes.int_or("stash_type", 1)? {
        1 => Ok(()),
        other => unsupported(format!("stash_type {other}")),
    }
}

pub(crate) fn layer_norm(cx: &mut Context) -> Mapped {
    stash_type(cx)?;
    let axis = cx.attributes.int_or("axis", -1)?;
    let epsilon = cx.attributes.float_or("epsilon", 1e-5)?;
    cx.emit_all(Op::LayerNorm { axis, epsilon }, 3)
}

fn group_norm(cx: &mut Context) -> Mapped {
    stash_type(cx)?;
    let epsilon = cx.attributes.float_or("epsilon", 1e-5)?;
    let groups = cx.attributes.size_or("num_groups", 0)?;
    cx.at_most(3)?;
    let (x, mut scale, mut bias) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    if cx.opset < 21 {
        // One scale per group: repeated for its channels.
        let channels = cx.shape(x).and_then(|shape| shape.get(1)).and_then(|dim| dim.size());
        let Some(channels) = channels.filter(|channels| groups > 0 && channels % groups == 0)
        else {
            return unsupported(
                "the number of channels is not known or not a multiple of the groups",
            );
        };
        let width = channels / groups;
        scale = repeat_each(cx, scale, groups, width)?;
        bias = repeat_each(cx, bias, groups, width)?;
    }
    cx.emit(Op::GroupNorm { groups, epsilon }, vec![Some(x), Some(scale), Some(bias)])
}

/// `[a, b]` becomes `[a, a, b, b]` for a width of 2.
fn repeat_each(
    cx: &mut Context,
    vector: ValueId,
    length: usize,
    width: usize,
) -> Result<ValueId, MapError> {
    let (axes, wide) = (cx.ints(&[1])?, cx.ints(&[length as i64, width as i64])?);
    let flat = cx.ints(&[(length * width) as i64])?;
    let column = cx.part(Op::Unsqueeze, &[vector, axes])?;
    let matrix = cx.part(Op::Expand, &[column, wide])?;
    cx.part(Op::Reshape { allow_zero: false }, &[matrix, flat])
}

/// `(x - mean) / (deviation + 1e-9)`, as the operator is defined.
fn mean_variance(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let axes = cx.attributes.ints("axes").unwrap_or(&[0, 2, 3]);
    let axes = cx.ints(axes)?;
    let (two, tiny) = (cx.scalar(dtype, 2.0)?, cx.scalar(dtype, 1e-9)?);
    let mean =
        Op::Reduce(Reduce { kind: ReduceKind::Mean, keep_dims: true, noop_with_empty_axes: false });
    let average = cx.part(mean.clone(), &[x, axes])?;
    let average_squared = cx.part(Op::Binary(Binary::Pow), &[average, two])?;
    let square = cx.part(Op::Binary(Binary::Pow), &[x, two])?;
    let square_average = cx.part(mean, &[square, axes])?;
    let variance = cx.part(Op::Binary(Binary::Sub), &[square_average, average_squared])?;
    let deviation = cx.part(Op::Unary(Unary::Sqrt), &[variance])?;
    let centred = cx.part(Op::Binary(Binary::Sub), &[x, average])?;
    let divisor = cx.part(Op::Binary(Binary::Add), &[deviation, tiny])?;
    cx.emit(Op::Binary(Binary::Div), vec![Some(centred), Some(divisor)])
}
