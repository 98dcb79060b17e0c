//! Matrix products.

use model::op::{Activation, Gemm, MatMul, Op};

use super::context::{Context, MapError, Mapped, invalid};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "MatMul" => cx.emit_all(Op::MatMul(MatMul::default()), 2),
        "Gemm" => gemm(cx),
        "Einsum" => match cx.attributes.string("equation")? {
            Some(equation) => {
                let count = cx.inputs.len();
                cx.emit_all(Op::Einsum { equation }, count)
            }
            None => invalid("attribute 'equation' is missing"),
        },
        _ => Ok(false),
    }
}

fn gemm(cx: &mut Context) -> Mapped {
    // Before opset 7 an attribute enabled broadcasting; it works the same.
    cx.attributes.ignore(&["broadcast"]);
    let gemm = gemm_of(cx)?;
    cx.emit_all(Op::Gemm(gemm), 3)
}

/// The product that the node's attributes describe.
pub(crate) fn gemm_of(cx: &Context) -> Result<Gemm, MapError> {
    Ok(Gemm {
        transpose_a: cx.attributes.flag("transA", false)?,
        transpose_b: cx.attributes.flag("transB", false)?,
        alpha: cx.attributes.float_or("alpha", 1.0)?,
        beta: cx.attributes.float_or("beta", 1.0)?,
        activation: Activation::None,
    })
}
