//! Operators that gather, scatter or find elements.

use model::op::{Op, ScatterReduction};

use super::context::{Context, MapError, Mapped, unsupported};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "Gather" => {
            let axis = cx.attributes.int_or("axis", 0)?;
            cx.emit_all(Op::Gather { axis }, 2)
        }
        "GatherElements" => {
            let axis = cx.attributes.int_or("axis", 0)?;
            cx.emit_all(Op::GatherElements { axis }, 2)
        }
        "GatherND" => {
            let batch_dims = cx.attributes.size_or("batch_dims", 0)?;
            cx.emit_all(Op::GatherNd { batch_dims }, 2)
        }
        "Scatter" | "ScatterElements" => {
            let axis = cx.attributes.int_or("axis", 0)?;
            let reduction = reduction(cx)?;
            cx.emit_all(Op::ScatterElements { axis, reduction }, 3)
        }
        "ScatterND" => {
            let reduction = reduction(cx)?;
            cx.emit_all(Op::ScatterNd { reduction }, 3)
        }
        "OneHot" => {
            let axis = cx.attributes.int_or("axis", -1)?;
            cx.emit_all(Op::OneHot { axis }, 3)
        }
        "TensorScatter" => {
            let axis = cx.attributes.int_or("axis", -2)?;
            let circular = match cx.attributes.string("mode")?.as_deref() {
                None | Some("linear") => false,
                Some("circular") => true,
                Some(other) => return unsupported(format!("mode '{other}'")),
            };
            cx.emit_all(Op::TensorScatter { axis, circular }, 3)
        }
        "NonZero" => cx.emit_all(Op::NonZero, 1),
        "ReverseSequence" => {
            let batch_axis = cx.attributes.size_or("batch_axis", 1)?;
            let time_axis = cx.attributes.size_or("time_axis", 0)?;
            cx.emit_all(Op::ReverseSequence { batch_axis, time_axis }, 2)
        }
        "Compress" => {
            let axis = cx.attributes.int("axis")?;
            cx.emit_all(Op::Compress { axis }, 2)
        }
        "NonMaxSuppression" => {
            let center_point = cx.attributes.flag("center_point_box", false)?;
            cx.emit_all(Op::NonMaxSuppression { center_point }, 5)
        }
        _ => Ok(false),
    }
}

fn reduction(cx: &Context) -> Result<ScatterReduction, MapError> {
    Ok(match cx.attributes.string("reduction")?.as_deref() {
        None | Some("none") => ScatterReduction::None,
        Some("add") => ScatterReduction::Add,
        Some("mul") => ScatterReduction::Mul,
        Some("max") => ScatterReduction::Max,
        Some("min") => ScatterReduction::Min,
        Some(other) => return unsupported(format!("reduction '{other}'")),
    })
}
