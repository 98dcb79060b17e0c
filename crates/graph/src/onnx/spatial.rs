//! Operators on images beside convolution and pooling.

use model::op::{Op, Padding, RoiAlign, Spatial, Window};

use super::context::{Context, MapError, Mapped, invalid, unsupported};

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "AffineGrid" => {
            let align_corners = cx.attributes.flag("align_corners", false)?;
            cx.emit_all(Op::Spatial(Spatial::AffineGrid { align_corners }), 2)
        }
        "Col2Im" => {
            let list = |name| cx.attributes.sizes(name).map(Option::unwrap_or_default);
            let (dilations, pads, strides) = (list("dilations")?, list("pads")?, list("strides")?);
            cx.emit_all(Op::Spatial(Spatial::Col2Im { dilations, pads, strides }), 3)
        }
        "MaxUnpool" => {
            let list = |name| cx.attributes.sizes(name).map(Option::unwrap_or_default);
            let (kernel, pads, strides) = (list("kernel_shape")?, list("pads")?, list("strides")?);
            if kernel.is_empty() {
                return invalid("attribute 'kernel_shape' is missing");
            }
            cx.emit_all(Op::Spatial(Spatial::MaxUnpool { kernel, pads, strides }), 3)
        }
        "RoiAlign" => {
            let roi = roi_align(cx)?;
            cx.emit_all(Op::Spatial(Spatial::RoiAlign(roi)), 3)
        }
        "DeformConv" => deform_conv(cx),
        _ => Ok(false),
    }
}

fn roi_align(cx: &Context) -> Result<RoiAlign, MapError> {
    let a = &cx.attributes;
    let max = match a.string("mode")?.as_deref() {
        None | Some("avg") => false,
        Some("max") => true,
        Some(other) => return unsupported(format!("mode '{other}'")),
    };
    let half_pixel = match a.string("coordinate_transformation_mode")?.as_deref() {
        None => cx.opset >= 16,
        Some("half_pixel") => true,
        Some("output_half_pixel") => false,
        Some(other) => return unsupported(format!("coordinates '{other}'")),
    };
    let (height, width) = (a.size_or("output_height", 1)?, a.size_or("output_width", 1)?);
    let sampling_ratio = a.size_or("sampling_ratio", 0)?;
    let scale = a.float_or("spatial_scale", 1.0)?;
    Ok(RoiAlign { max, half_pixel, height, width, sampling_ratio, scale })
}

fn deform_conv(cx: &mut Context) -> Mapped {
    let list = |name| cx.attributes.sizes(name).map(Option::unwrap_or_default);
    let padding = Padding::Explicit(list("pads")?);
    let (strides, dilations) = (list("strides")?, list("dilations")?);
    let window = Window { kernel: list("kernel_shape")?, strides, dilations, padding };
    let groups = cx.attributes.size_or("group", 1)?;
    let offset_groups = cx.attributes.size_or("offset_group", 1)?;
    cx.emit_all(Op::Spatial(Spatial::DeformConv { window, groups, offset_groups }), 5)
}
