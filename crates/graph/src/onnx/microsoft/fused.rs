//! Operators that ONNX Runtime's optimiser fused, as their parts.

use model::op::{Binary, Cast, Op, Reduce, ReduceKind, Unary};
use model::{DataType, ValueId};

use super::super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::super::nn::range;
use super::super::{matrix, window};

/// A convolution with a residual and an activation.
pub(crate) fn conv(cx: &mut Context) -> Mapped {
    cx.at_most(4)?;
    let conv = window::conv(cx)?;
    let parameters = cx.attributes.floats("activation_params").unwrap_or_default().to_vec();
    let activation = cx.attributes.string("activation")?.unwrap_or_default();
    let inputs = vec![Some(cx.input(0)?), Some(cx.input(1)?), cx.optional(2)];
    let mut y = cx.parts(Op::Conv(conv), without_end(inputs), 1)?[0];
    if let Some(residual) = cx.optional(3) {
        y = cx.part(Op::Binary(Binary::Add), &[y, residual])?;
    }
    let y = activated(cx, y, &activation, &parameters)?;
    cx.emit_identity(0, y)
}

/// A product of matrices with an activation.
pub(super) fn gemm(cx: &mut Context) -> Mapped {
    cx.at_most(3)?;
    let gemm = matrix::gemm_of(cx)?;
    let activation = cx.attributes.string("activation")?.unwrap_or_default();
    let mut parameters = Vec::new();
    for name in ["activation_alpha", "activation_beta", "activation_gamma"] {
        parameters.extend(cx.attributes.float(name)?);
    }
    let inputs = vec![Some(cx.input(0)?), Some(cx.input(1)?), cx.optional(2)];
    let y = cx.parts(Op::Gemm(gemm), without_end(inputs), 1)?[0];
    let y = activated(cx, y, &activation, &parameters)?;
    cx.emit_identity(0, y)
}

fn without_end(mut inputs: Vec<Option<ValueId>>) -> Vec<Option<ValueId>> {
    while inputs.last() == Some(&None) {
        inputs.pop();
    }
    inputs
}

fn activated(
    cx: &mut Context,
    x: ValueId,
    name: &str,
    parameters: &[f32],
) -> Result<ValueId, MapError> {
    let parameter = |index: usize, default: f32| parameters.get(index).copied().unwrap_or(default);
    let op = match name {
        "" => return Ok(x),
        "Relu" => Unary::Relu,
        "Tanh" => Unary::Tanh,
        "Sigmoid" => Unary::Sigmoid,
        "LeakyRelu" => Unary::LeakyRelu { alpha: parameter(0, 0.01) },
        "HardSigmoid" => Unary::HardSigmoid { alpha: parameter(0, 0.2), beta: parameter(1, 0.5) },
        "HardSwish" => Unary::HardSwish,
        "Clip" => {
            let dtype = cx.dtype(x);
            let low = cx.scalar(dtype, f64::from(parameter(0, f32::MIN)))?;
            let high = cx.scalar(dtype, f64::from(parameter(1, f32::MAX)))?;
            return cx.part(Op::Clip, &[x, low, high]);
        }
        other => return unsupported(format!("activation '{other}'")),
    };
    cx.part(Op::Unary(op), &[x])
}

/// Embeddings of words, positions and segments, added and normalised.
pub(super) fn embed_layer_norm(cx: &mut Context) -> Mapped {
    cx.at_most(9)?;
    let epsilon = cx.attributes.float_or("epsilon", 1e-12)?;
    cx.attributes.ignore(&["mask_index_type"]);
    let (ids, words, positions) = (cx.input(0)?, cx.input(2)?, cx.input(3)?);
    let mut sum = cx.part(Op::Gather { axis: 0 }, &[words, ids])?;
    let places = match cx.optional(8) {
        Some(places) => places,
        None => {
            let tokens = cx.part(Op::Shape { start: 1, end: Some(2) }, &[ids])?;
            let axis = cx.ints(&[0])?;
            let tokens = cx.part(Op::Squeeze, &[tokens, axis])?;
            range(cx, tokens)?
        }
    };
    let add = |cx: &mut Context, sum: ValueId, table: ValueId, index: ValueId| {
        let rows = cx.part(Op::Gather { axis: 0 }, &[table, index])?;
        cx.part(Op::Binary(Binary::Add), &[sum, rows])
    };
    sum = add(cx, sum, positions, places)?;
    match (cx.optional(1), cx.optional(4)) {
        (Some(segments), Some(table)) => sum = add(cx, sum, table, segments)?,
        (None, None) => {}
        _ => return invalid("segments without their embedding"),
    }
    if cx.wants(2) {
        cx.emit_identity(2, sum)?;
    }
    if cx.wants(1) {
        let counts = match cx.optional(7) {
            Some(mask) => {
                let mask = cx.part(Op::Cast(Cast { to: DataType::I32 }), &[mask])?;
                let kind = ReduceKind::Sum;
                let reduce = Reduce { kind, keep_dims: false, noop_with_empty_axes: false };
                let axis = cx.ints(&[1])?;
                cx.part(Op::Reduce(reduce), &[mask, axis])?
            }
            None => return unsupported("the mask's index is read and there is no mask"),
        };
        cx.emit_identity(1, counts)?;
    }
    let inputs = vec![Some(sum), Some(cx.input(5)?), Some(cx.input(6)?)];
    let y = cx.parts(Op::LayerNorm { axis: -1, epsilon }, inputs, 1)?[0];
    cx.emit_identity(0, y)
}
