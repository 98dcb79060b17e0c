//! Operators that ONNX Runtime adds: its optimiser and quantiser write them.

mod attention;
mod fused;
mod quantized;

use model::op::{Activation, Binary, MatMul, Op, Unary};

use super::context::{Context, Mapped, invalid};
pub(crate) use fused::conv as fused_conv;

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "Gelu" => cx.emit_all(Op::Unary(Unary::Gelu { tanh: false }), 1),
        "QuickGelu" => {
            let alpha = cx.attributes.float_or("alpha", 1.702)?;
            cx.emit_all(Op::Unary(Unary::Silu { alpha }), 1)
        }
        "BiasGelu" => biased(cx, false),
        "FastGelu" => biased(cx, true),
        "FusedMatMul" => {
            if cx.attributes.flag("transBatchA", false)?
                || cx.attributes.flag("transBatchB", false)?
            {
                return invalid("transposed batches");
            }
            let matmul = MatMul {
                transpose_a: cx.attributes.flag("transA", false)?,
                transpose_b: cx.attributes.flag("transB", false)?,
                alpha: cx.attributes.float_or("alpha", 1.0)?,
                activation: Activation::None,
            };
            cx.emit_all(Op::MatMul(matmul), 2)
        }
        "LayerNormalization" => super::norm::layer_norm(cx),
        "SimplifiedLayerNormalization" => simplified_norm(cx),
        "Attention" => attention::attention(cx),
        "MultiHeadAttention" => attention::multi_head_attention(cx),
        "GroupQueryAttention" => attention::group_query_attention(cx),
        "RotaryEmbedding" => attention::rotary_embedding(cx),
        "EmbedLayerNormalization" => fused::embed_layer_norm(cx),
        "Tokenizer" => super::text::tokenizer(cx),
        "FusedConv" => fused::conv(cx),
        "FusedGemm" => fused::gemm(cx),
        "SkipLayerNormalization" => skip_norm(cx, false),
        "SkipSimplifiedLayerNormalization" => skip_norm(cx, true),
        _ => quantized::map(cx, op),
    }
}

/// ONNX Runtime also writes it without its domain.
pub(crate) fn simplified_norm(cx: &mut Context) -> Mapped {
    let axis = cx.attributes.int_or("axis", -1)?;
    let epsilon = cx.attributes.float_or("epsilon", 1e-5)?;
    cx.attributes.ignore(&["stash_type"]);
    cx.no_output_from(1, "the inverse deviation is read")?;
    cx.emit_all(Op::RmsNorm { axis, epsilon }, 2)
}

fn biased(cx: &mut Context, tanh: bool) -> Mapped {
    cx.at_most(2)?;
    let mut x = cx.input(0)?;
    if let Some(bias) = cx.optional(1) {
        x = cx.part(Op::Binary(Binary::Add), &[x, bias])?;
    }
    cx.emit(Op::Unary(Unary::Gelu { tanh }), vec![Some(x)])
}

/// `norm(x + skip + bias)`; the sum itself is the fourth output.
fn skip_norm(cx: &mut Context, simplified: bool) -> Mapped {
    let epsilon = cx.attributes.float_or("epsilon", 1e-12)?;
    if cx.wants(1) || cx.wants(2) {
        return super::context::unsupported("the statistics are read");
    }
    let add = Op::Binary(Binary::Add);
    let mut sum = cx.part(add.clone(), &[cx.input(0)?, cx.input(1)?])?;
    let scale = cx.input(2)?;
    let (beta, bias) = match simplified {
        true => (None, cx.optional(3)),
        false => (cx.optional(3), cx.optional(4)),
    };
    if let Some(bias) = bias {
        sum = cx.part(add, &[sum, bias])?;
    }
    let normed = match simplified {
        true => cx.part(Op::RmsNorm { axis: -1, epsilon }, &[sum, scale])?,
        false => {
            let inputs = vec![Some(sum), Some(scale), beta];
            cx.parts(Op::LayerNorm { axis: -1, epsilon }, inputs, 1)?[0]
        }
    };
    if cx.wants(3) {
        cx.emit_identity(3, sum)?;
    }
    cx.emit_identity(0, normed)
}
