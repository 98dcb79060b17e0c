//! Reductions, sorting and sums along a dimension.

use model::op::{ArgReduce, Op, Reduce, ReduceKind};

use super::context::{Context, Mapped, invalid};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "ReduceL1" => reduce(cx, ReduceKind::L1),
        "ReduceL2" => reduce(cx, ReduceKind::L2),
        "ReduceLogSum" => reduce(cx, ReduceKind::LogSum),
        "ReduceLogSumExp" => reduce(cx, ReduceKind::LogSumExp),
        "ReduceMax" => reduce(cx, ReduceKind::Max),
        "ReduceMean" => reduce(cx, ReduceKind::Mean),
        "ReduceMin" => reduce(cx, ReduceKind::Min),
        "ReduceProd" => reduce(cx, ReduceKind::Prod),
        "ReduceSum" => reduce(cx, ReduceKind::Sum),
        "ReduceSumSquare" => reduce(cx, ReduceKind::SumSquare),
        "ArgMax" => arg_reduce(cx, true),
        "ArgMin" => arg_reduce(cx, false),
        "CumSum" => {
            let exclusive = cx.attributes.flag("exclusive", false)?;
            let reverse = cx.attributes.flag("reverse", false)?;
            cx.emit_all(Op::CumSum { exclusive, reverse }, 2)
        }
        "CumProd" => {
            let exclusive = cx.attributes.flag("exclusive", false)?;
            let reverse = cx.attributes.flag("reverse", false)?;
            cx.emit_all(Op::CumProd { exclusive, reverse }, 2)
        }
        "Det" => cx.emit_all(Op::Det, 1),
        "Unique" => {
            let axis = cx.attributes.int("axis")?;
            let sorted = cx.attributes.flag("sorted", true)?;
            cx.emit_all(Op::Unique { axis, sorted }, 1)
        }
        "TopK" => top_k(cx),
        _ => Ok(false),
    }
}

fn reduce(cx: &mut Context, kind: ReduceKind) -> Mapped {
    let keep_dims = cx.attributes.flag("keepdims", true)?;
    let first_with_input = if kind == ReduceKind::Sum { 13 } else { 18 };
    if cx.opset >= first_with_input {
        let noop_with_empty_axes = cx.attributes.flag("noop_with_empty_axes", false)?;
        return cx.emit_all(Op::Reduce(Reduce { kind, keep_dims, noop_with_empty_axes }), 2);
    }
    cx.at_most(1)?;
    let axes = cx.attributes.ints("axes").map(|axes| cx.ints(axes)).transpose()?;
    let inputs = vec![Some(cx.input(0)?), axes];
    cx.emit(Op::Reduce(Reduce { kind, keep_dims, noop_with_empty_axes: false }), inputs)
}

fn arg_reduce(cx: &mut Context, max: bool) -> Mapped {
    let op = ArgReduce {
        max,
        axis: cx.attributes.int_or("axis", 0)?,
        keep_dims: cx.attributes.flag("keepdims", true)?,
        select_last: cx.attributes.flag("select_last_index", false)?,
    };
    cx.emit_all(Op::ArgReduce(op), 1)
}

fn top_k(cx: &mut Context) -> Mapped {
    let axis = cx.attributes.int_or("axis", -1)?;
    let largest = cx.attributes.flag("largest", true)?;
    let sorted = cx.attributes.flag("sorted", true)?;
    let op = Op::TopK { axis, largest, sorted };
    if cx.opset >= 10 {
        return cx.emit_all(op, 2);
    }
    cx.at_most(1)?;
    let Some(k) = cx.attributes.int("k")? else { return invalid("attribute 'k' is missing") };
    let k = cx.ints(&[k])?;
    let inputs = vec![Some(cx.input(0)?), Some(k)];
    cx.emit(op, inputs)
}
