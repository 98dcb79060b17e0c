//! Operators that move or create elements by shape alone.

use model::op::{Op, PadMode};
use model::{DataType, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::elementwise::element_bytes;
use super::tensor::{data_type, to_tensor};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "Shape" => {
            let start = cx.attributes.int_or("start", 0)?;
            let end = cx.attributes.int("end")?;
            cx.emit_all(Op::Shape { start, end }, 1)
        }
        "Size" => cx.emit_all(Op::Size, 1),
        "Reshape" => reshape(cx),
        "Flatten" => {
            let axis = cx.attributes.int_or("axis", 1)?;
            cx.emit_all(Op::Flatten { axis }, 1)
        }
        "Squeeze" => with_axes(cx, Op::Squeeze, true),
        "Unsqueeze" => with_axes(cx, Op::Unsqueeze, false),
        "Transpose" => {
            let perm = cx.attributes.sizes("perm")?;
            cx.emit_all(Op::Transpose { perm }, 1)
        }
        "Expand" => cx.emit_all(Op::Expand, 2),
        "Tile" if cx.opset < 6 => unsupported("tiles and axis as inputs"),
        "Tile" => cx.emit_all(Op::Tile, 2),
        "Concat" => concat(cx),
        "Split" => split(cx),
        "Slice" => slice(cx),
        "Pad" => pad(cx),
        "Range" => {
            cx.attributes.ignore(&["stash_type"]);
            cx.emit_all(Op::Range, 3)
        }
        "ConstantOfShape" => constant_of_shape(cx),
        "EyeLike" => eye_like(cx),
        "Trilu" => {
            let upper = cx.attributes.flag("upper", true)?;
            cx.emit_all(Op::Trilu { upper }, 2)
        }
        "DepthToSpace" => {
            let block = cx.attributes.size_or("blocksize", 0)?;
            let crd = match cx.attributes.string("mode")?.as_deref() {
                None | Some("DCR") => false,
                Some("CRD") => true,
                Some(other) => return unsupported(format!("mode '{other}'")),
            };
            cx.emit_all(Op::DepthToSpace { block, crd }, 1)
        }
        "SpaceToDepth" => {
            let block = cx.attributes.size_or("blocksize", 0)?;
            cx.emit_all(Op::SpaceToDepth { block }, 1)
        }
        _ => Ok(false),
    }
}

fn reshape(cx: &mut Context) -> Mapped {
    if cx.opset >= 5 {
        let allow_zero = cx.attributes.flag("allowzero", false)?;
        return cx.emit_all(Op::Reshape { allow_zero }, 2);
    }
    cx.at_most(1)?;
    let shape = cx.attributes.ints("shape").unwrap_or_default();
    let shape = cx.ints(shape)?;
    let inputs = vec![Some(cx.input(0)?), Some(shape)];
    cx.emit(Op::Reshape { allow_zero: false }, inputs)
}

/// Squeeze and Unsqueeze: the axes are an attribute before opset 13.
fn with_axes(cx: &mut Context, op: Op, optional: bool) -> Mapped {
    if cx.opset >= 13 {
        return cx.emit_all(op, 2);
    }
    cx.at_most(1)?;
    let axes = match cx.attributes.ints("axes") {
        Some(axes) => Some(cx.ints(axes)?),
        None if optional => None,
        None => return invalid("attribute 'axes' is missing"),
    };
    let inputs = vec![Some(cx.input(0)?), axes];
    cx.emit(op, inputs)
}

fn concat(cx: &mut Context) -> Mapped {
    let axis = match (cx.attributes.int("axis")?, cx.opset) {
        (Some(axis), _) => axis,
        (None, ..4) => 1,
        (None, _) => return invalid("attribute 'axis' is missing"),
    };
    let count = cx.inputs.len();
    cx.emit_all(Op::Concat { axis }, count)
}

fn split(cx: &mut Context) -> Mapped {
    let axis = cx.attributes.int_or("axis", 0)?;
    cx.at_most(2)?;
    let x = cx.input(0)?;
    if let Some(sizes) = cx.attributes.ints("split").filter(|_| cx.opset < 13) {
        let sizes = cx.ints(sizes)?;
        return cx.emit(Op::Split { axis }, vec![Some(x), Some(sizes)]);
    }
    if let Some(sizes) = cx.optional(1) {
        return cx.emit(Op::Split { axis }, vec![Some(x), Some(sizes)]);
    }
    let count = cx.node.outputs.len() as i64;
    if cx.opset >= 18 {
        match cx.attributes.int("num_outputs")? {
            Some(wanted) if wanted == count => {}
            Some(wanted) => {
                return invalid(format!("num_outputs is {wanted}, there are {count} outputs"));
            }
            None => return invalid("neither sizes nor num_outputs"),
        }
    }
    let sizes = uneven_sizes(cx, x, axis, count)?;
    cx.emit(Op::Split { axis }, vec![Some(x), sizes])
}

/// From opset 18 on the last part may be smaller: the sizes are then explicit.
fn uneven_sizes(
    cx: &mut Context,
    x: ValueId,
    axis: i64,
    count: i64,
) -> Result<Option<ValueId>, MapError> {
    let rank = cx.rank(x)? as i64;
    let index = if axis < 0 { axis + rank } else { axis };
    let dim = usize::try_from(index).ok().and_then(|index| cx.shape(x)?.get(index));
    let Some(size) = dim.and_then(|dim| dim.fixed()) else { return Ok(None) };
    if count <= 0 || size % count == 0 || cx.opset < 18 {
        return Ok(None);
    }
    let part = size / count + 1;
    let sizes: Vec<i64> =
        (0..count).map(|index| part.min(size - (part * index).min(size))).collect();
    cx.ints(&sizes).map(Some)
}

fn slice(cx: &mut Context) -> Mapped {
    if cx.opset >= 10 {
        return cx.emit_all(Op::Slice, 5);
    }
    cx.at_most(1)?;
    let (Some(starts), Some(ends)) = (cx.attributes.ints("starts"), cx.attributes.ints("ends"))
    else {
        return invalid("starts or ends are missing");
    };
    let axes = cx.attributes.ints("axes");
    let (starts, ends) = (cx.ints(starts)?, cx.ints(ends)?);
    let axes = axes.map(|axes| cx.ints(axes)).transpose()?;
    let inputs = vec![Some(cx.input(0)?), Some(starts), Some(ends), axes];
    cx.emit(Op::Slice, inputs)
}

fn pad(cx: &mut Context) -> Mapped {
    let mode = match cx.attributes.string("mode")?.as_deref() {
        None | Some("constant") => PadMode::Constant,
        Some("reflect") => PadMode::Reflect,
        Some("edge") => PadMode::Edge,
        Some("wrap") => PadMode::Wrap,
        Some(other) => return unsupported(format!("mode '{other}'")),
    };
    if cx.opset >= 11 {
        return cx.emit_all(Op::Pad { mode }, 4);
    }
    cx.at_most(1)?;
    let name = if cx.opset < 2 { "paddings" } else { "pads" };
    let Some(pads) = cx.attributes.ints(name) else {
        return invalid(format!("attribute '{name}' is missing"));
    };
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let value = f64::from(cx.attributes.float_or("value", 0.0)?);
    let (pads, value) = (cx.ints(pads)?, cx.scalar(dtype, value)?);
    cx.emit(Op::Pad { mode }, vec![Some(x), Some(pads), Some(value)])
}

fn constant_of_shape(cx: &mut Context) -> Mapped {
    let (dtype, value) = match cx.attributes.tensor("value")? {
        None => (DataType::F32, [0; 8]),
        Some(proto) => {
            if data_type(proto.data_type).is_none() {
                return unsupported("an element type without kernels");
            }
            let tensor =
                to_tensor(proto, cx.external).map_err(|e| MapError::Invalid(e.to_string()))?;
            match element_bytes(&tensor) {
                Some(bytes) => (tensor.dtype(), bytes),
                None => return invalid("the value is not one element"),
            }
        }
    };
    cx.emit_all(Op::ConstantOfShape { dtype, value }, 1)
}

fn eye_like(cx: &mut Context) -> Mapped {
    let k = cx.attributes.int_or("k", 0)?;
    let dtype = match cx.attributes.int("dtype")? {
        None => None,
        Some(number) => match data_type(number) {
            Some(dtype) => Some(dtype),
            None => return unsupported("an element type without kernels"),
        },
    };
    cx.emit_all(Op::EyeLike { dtype, k }, 1)
}
