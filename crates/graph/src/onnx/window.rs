//! Convolutions, pooling and resampling.

use model::op::{
    Activation, AspectPolicy, Conv, ConvTranspose, CoordinateMode, GlobalPool, GridPadding,
    NearestMode, Op, Padding, Pool, PoolKind, Resize, ResizeMode, Window,
};

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use crate::content;
use model::DataType;

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "Conv" => {
            let conv = conv(cx)?;
            cx.emit_all(Op::Conv(conv), 3)
        }
        "ConvTranspose" => conv_transpose(cx),
        "MaxPool" => max_pool(cx),
        "AveragePool" => {
            let pool = average_pool(cx)?;
            cx.emit_all(Op::Pool(pool), 1)
        }
        "LpPool" => {
            let p = match cx.opset {
                ..2 => norm_order(cx.attributes.float_or("p", 2.0)?)?,
                _ => order(cx, "p")?,
            };
            pool(cx, PoolKind::Lp { p })
        }
        "GlobalAveragePool" => cx.emit_all(Op::GlobalPool(GlobalPool::Average), 1),
        "GlobalMaxPool" => cx.emit_all(Op::GlobalPool(GlobalPool::Max), 1),
        "GlobalLpPool" => {
            let p = match cx.opset {
                ..2 => norm_order(cx.attributes.float_or("p", 2.0)?)?,
                _ => order(cx, "p")?,
            };
            cx.emit_all(Op::GlobalPool(GlobalPool::Lp { p }), 1)
        }
        "Resize" => resize(cx),
        "Upsample" => upsample(cx),
        "GridSample" => grid_sample(cx),
        _ => Ok(false),
    }
}

fn order(cx: &Context, name: &str) -> Result<u32, MapError> {
    match u32::try_from(cx.attributes.int_or(name, 2)?) {
        Ok(p) if p > 0 => Ok(p),
        _ => invalid("the norm's order is not positive"),
    }
}

fn norm_order(p: f32) -> Result<u32, MapError> {
    match p.fract() == 0.0 && (1.0..1000.0).contains(&p) {
        true => Ok(p as u32),
        false => unsupported(format!("a norm of order {p}")),
    }
}

/// The window's geometry, from the attributes that all of these operators have.
pub(crate) fn window(cx: &Context) -> Result<Window, MapError> {
    let a = &cx.attributes;
    let pads = a.ints("pads").map(<[i64]>::to_vec);
    let explicit = |pads: Option<Vec<i64>>| -> Result<Padding, MapError> {
        let sizes: Option<Vec<usize>> =
            pads.unwrap_or_default().iter().map(|pad| usize::try_from(*pad).ok()).collect();
        match sizes {
            Some(sizes) => Ok(Padding::Explicit(sizes)),
            None => unsupported("negative pads"),
        }
    };
    let padding = match a.string("auto_pad")?.as_deref() {
        None | Some("" | "NOTSET") => explicit(pads)?,
        // Some writers also give pads; they are ignored.
        Some("VALID") => Padding::Explicit(vec![]),
        Some("SAME_UPPER") => Padding::SameUpper,
        Some("SAME_LOWER") => Padding::SameLower,
        Some(other) => return unsupported(format!("auto_pad '{other}'")),
    };
    Ok(Window {
        kernel: a.sizes("kernel_shape")?.unwrap_or_default(),
        strides: a.sizes("strides")?.unwrap_or_default(),
        dilations: a.sizes("dilations")?.unwrap_or_default(),
        padding,
    })
}

pub(crate) fn conv(cx: &Context) -> Result<Conv, MapError> {
    let groups = cx.attributes.size_or("group", 1)?;
    Ok(Conv { window: window(cx)?, groups, activation: Activation::None })
}

fn conv_transpose(cx: &mut Context) -> Mapped {
    let rank = cx.shape(cx.input(0)?).map(<[_]>::len);
    let output_shape = match cx.attributes.sizes("output_shape")? {
        // Some writers put batch and channels in front.
        Some(shape) if rank.is_some_and(|rank| rank >= 2 && shape.len() == rank) => {
            Some(shape[2..].to_vec())
        }
        Some(shape) if !shape.is_empty() => Some(shape),
        _ => None,
    };
    let op = ConvTranspose {
        window: window(cx)?,
        groups: cx.attributes.size_or("group", 1)?,
        output_padding: cx.attributes.sizes("output_padding")?.unwrap_or_default(),
        output_shape,
    };
    cx.emit_all(Op::ConvTranspose(op), 3)
}

fn pool(cx: &mut Context, kind: PoolKind) -> Mapped {
    let pool = pool_of(cx, kind)?;
    cx.emit_all(Op::Pool(pool), 1)
}

pub(crate) fn average_pool(cx: &Context) -> Result<Pool, MapError> {
    let count_include_pad = cx.attributes.flag("count_include_pad", false)?;
    pool_of(cx, PoolKind::Average { count_include_pad })
}

fn pool_of(cx: &Context, kind: PoolKind) -> Result<Pool, MapError> {
    let window = window(cx)?;
    if window.kernel.is_empty() {
        return invalid("attribute 'kernel_shape' is missing");
    }
    let ceil_mode = cx.attributes.flag("ceil_mode", false)?;
    Ok(Pool { kind, window, ceil_mode })
}

fn max_pool(cx: &mut Context) -> Mapped {
    let column_major = cx.attributes.flag("storage_order", false)?;
    match cx.wants(1) {
        true => pool(cx, PoolKind::MaxWithIndices { column_major }),
        false => pool(cx, PoolKind::Max),
    }
}

fn resize_mode(name: Option<&str>) -> Result<ResizeMode, MapError> {
    match name {
        None | Some("nearest") => Ok(ResizeMode::Nearest),
        Some("linear" | "bilinear") => Ok(ResizeMode::Linear),
        Some("cubic" | "bicubic") => Ok(ResizeMode::Cubic),
        Some(other) => unsupported(format!("mode '{other}'")),
    }
}

/// As in opset 10 and Upsample: no half-pixel shift, nearest rounds down.
fn asymmetric(mode: ResizeMode) -> Resize {
    Resize {
        mode,
        coordinates: CoordinateMode::Asymmetric,
        nearest: NearestMode::Floor,
        cubic_coefficient: -0.75,
        exclude_outside: false,
        extrapolation_value: 0.0,
        antialias: false,
        axes: None,
        keep_aspect: AspectPolicy::Stretch,
    }
}

fn coordinates(name: Option<&str>) -> Result<CoordinateMode, MapError> {
    Ok(match name {
        None | Some("half_pixel") => CoordinateMode::HalfPixel,
        Some("half_pixel_symmetric") => CoordinateMode::HalfPixelSymmetric,
        Some("pytorch_half_pixel") => CoordinateMode::PytorchHalfPixel,
        Some("align_corners") => CoordinateMode::AlignCorners,
        Some("asymmetric") => CoordinateMode::Asymmetric,
        Some("tf_crop_and_resize") => CoordinateMode::CropAndResize,
        Some(other) => return unsupported(format!("coordinate_transformation_mode '{other}'")),
    })
}

fn resize(cx: &mut Context) -> Mapped {
    let mode = resize_mode(cx.attributes.string("mode")?.as_deref())?;
    if cx.opset < 11 {
        cx.at_most(2)?;
        let inputs = vec![Some(cx.input(0)?), None, Some(cx.input(1)?)];
        return cx.emit(Op::Resize(asymmetric(mode)), inputs);
    }
    let a = &cx.attributes;
    let op = Resize {
        mode,
        coordinates: coordinates(a.string("coordinate_transformation_mode")?.as_deref())?,
        nearest: match a.string("nearest_mode")?.as_deref() {
            None | Some("round_prefer_floor") => NearestMode::RoundPreferFloor,
            Some("round_prefer_ceil") => NearestMode::RoundPreferCeil,
            Some("floor") => NearestMode::Floor,
            Some("ceil") => NearestMode::Ceil,
            Some(other) => return unsupported(format!("nearest_mode '{other}'")),
        },
        cubic_coefficient: a.float_or("cubic_coeff_a", -0.75)?,
        exclude_outside: a.flag("exclude_outside", false)?,
        extrapolation_value: a.float_or("extrapolation_value", 0.0)?,
        antialias: a.flag("antialias", false)?,
        axes: a.ints("axes").map(<[i64]>::to_vec),
        keep_aspect: match a.string("keep_aspect_ratio_policy")?.as_deref() {
            None | Some("stretch") => AspectPolicy::Stretch,
            Some("not_larger") => AspectPolicy::NotLarger,
            Some("not_smaller") => AspectPolicy::NotSmaller,
            Some(other) => return unsupported(format!("keep_aspect_ratio_policy '{other}'")),
        },
    };
    let crops = op.coordinates == CoordinateMode::CropAndResize;
    let x = cx.input(0)?;
    // Absent scales and regions are often given as empty tensors.
    let present = |index: usize| {
        cx.optional(index).filter(|id| {
            !cx.shape(*id).is_some_and(|shape| shape.first().is_some_and(|dim| dim.is(0)))
        })
    };
    let (roi, scales, sizes) = (present(1).filter(|_| crops), present(2), present(3));
    match (scales, sizes) {
        (Some(_), Some(_)) => return invalid("both scales and sizes"),
        (None, None) => return invalid("neither scales nor sizes"),
        _ => {}
    }
    if crops && roi.is_none() {
        return invalid("tf_crop_and_resize without a region");
    }
    cx.emit(Op::Resize(op), vec![Some(x), roi, scales, sizes])
}

fn upsample(cx: &mut Context) -> Mapped {
    let mode = resize_mode(cx.attributes.string("mode")?.as_deref())?;
    let x = cx.input(0)?;
    let scales = match cx.opset {
        9.. => cx.input(1)?,
        7.. => {
            let Some(scales) = cx.attributes.floats("scales") else {
                return invalid("attribute 'scales' is missing");
            };
            let values: Vec<f64> = scales.iter().map(|scale| f64::from(*scale)).collect();
            match content::float_tensor(DataType::F32, vec![values.len()], &values) {
                Some(tensor) => cx.constant(tensor),
                None => return invalid("too many scales"),
            }
        }
        _ => {
            let height = f64::from(cx.attributes.float_or("height_scale", 1.0)?);
            let width = f64::from(cx.attributes.float_or("width_scale", 1.0)?);
            match content::float_tensor(DataType::F32, vec![4], &[1.0, 1.0, height, width]) {
                Some(tensor) => cx.constant(tensor),
                None => return invalid("bad scales"),
            }
        }
    };
    cx.emit(Op::Resize(asymmetric(mode)), vec![Some(x), None, Some(scales)])
}

fn grid_sample(cx: &mut Context) -> Mapped {
    let mode = match cx.attributes.string("mode")?.as_deref() {
        None => ResizeMode::Linear,
        name => resize_mode(name)?,
    };
    let padding = match cx.attributes.string("padding_mode")?.as_deref() {
        None | Some("zeros") => GridPadding::Zeros,
        Some("border") => GridPadding::Border,
        Some("reflection") => GridPadding::Reflection,
        Some(other) => return unsupported(format!("padding_mode '{other}'")),
    };
    let align_corners = cx.attributes.flag("align_corners", false)?;
    cx.emit_all(Op::GridSample { mode, padding, align_corners }, 2)
}
