//! Operators on images beside convolution and pooling.

use model::dim::SymDim;
use model::op::{Conv, Spatial};

use super::shape::axes_indices;
use super::{Fact, Inferred, Operands, fail, window};

pub fn spatial(spatial: &Spatial, x: &Operands) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    match spatial {
        Spatial::AffineGrid { .. } => affine_grid(x),
        Spatial::CenterCropPad { axes } => center_crop_pad(axes.as_deref(), x),
        Spatial::Col2Im { .. } => {
            x.require(3)?;
            let image = x.content(1).map(<[SymDim]>::to_vec);
            let blocks: Option<i64> = x.ints(2).map(|block| block.iter().product());
            let dims = match (x.shape(0), image) {
                (Some([batch, columns, _]), Some(image)) => {
                    let channels = match blocks {
                        Some(blocks) if blocks > 0 => columns.div(&SymDim::Fixed(blocks)),
                        _ => SymDim::Unknown,
                    };
                    Some([vec![batch.clone(), channels], image].concat())
                }
                _ => None,
            };
            Ok(Fact::new(dtype, dims))
        }
        Spatial::MaxUnpool { kernel, pads, strides } => {
            x.require(2)?;
            max_unpool(x, kernel, pads, strides)
        }
        Spatial::RoiAlign(roi) => {
            x.require(3)?;
            let channels = x.shape(0).and_then(|shape| shape.get(1).cloned());
            let boxes = x.shape(1).and_then(|shape| shape.first().cloned());
            let dims = vec![
                boxes.unwrap_or(SymDim::Unknown),
                channels.unwrap_or(SymDim::Unknown),
                SymDim::from(roi.height),
                SymDim::from(roi.width),
            ];
            Ok(Fact::new(dtype, Some(dims)))
        }
        Spatial::DeformConv { window, groups, .. } => {
            x.require(3)?;
            let activation = model::op::Activation::None;
            let conv = Conv { window: window.clone(), groups: *groups, activation };
            let plain = Operands { graph: x.graph, inputs: &x.inputs[..2] };
            window::conv(&conv, &plain)
        }
    }
}

fn affine_grid(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dims = match (x.content(1), x.shape(1)) {
        (Some([batch, _, rest @ ..]), _) => {
            let spatial = rest.len() as i64;
            Some([std::slice::from_ref(batch), rest, &[SymDim::Fixed(spatial)]].concat())
        }
        (_, Some([SymDim::Fixed(length)])) if (4..=5).contains(length) => {
            let mut dims = vec![SymDim::Unknown; *length as usize - 1];
            dims.push(SymDim::Fixed(length - 2));
            Some(dims)
        }
        _ => None,
    };
    Ok(Fact::new(x.dtype(0)?, dims))
}

fn center_crop_pad(axes: Option<&[i64]>, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let Some(shape) = x.shape(0) else { return Ok(Fact::new(x.dtype(0)?, None)) };
    let all: Vec<i64> = (0..shape.len() as i64).collect();
    let axes = axes_indices(axes.unwrap_or(&all), shape.len())?;
    let mut dims = shape.to_vec();
    for (place, axis) in axes.iter().enumerate() {
        let size = x.content(1).and_then(|content| content.get(place).cloned());
        dims[*axis] = size.unwrap_or(SymDim::Unknown);
    }
    Ok(Fact::new(x.dtype(0)?, Some(dims)))
}

fn max_unpool(x: &Operands, kernel: &[usize], pads: &[usize], strides: &[usize]) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    if x.has(2) {
        return Ok(Fact::new(dtype, x.content(2).map(<[SymDim]>::to_vec)));
    }
    let Some(shape) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let spatial = kernel.len();
    let fits = |list: &[usize], want: usize| list.is_empty() || list.len() == want;
    if shape.len() != spatial + 2 || !fits(strides, spatial) || !fits(pads, 2 * spatial) {
        return fail("kernel, strides and pads do not fit the rank");
    }
    let number = |list: &[usize], at: usize, default: usize| {
        SymDim::from(list.get(at).copied().unwrap_or(default))
    };
    let mut dims = shape[..2].to_vec();
    for axis in 0..spatial {
        let grown = shape[axis + 2].sub(&SymDim::Fixed(1)).mul(&number(strides, axis, 1));
        let border = number(pads, axis, 0).add(&number(pads, axis + spatial, 0));
        dims.push(grown.add(&SymDim::from(kernel[axis])).sub(&border));
    }
    Ok(Fact::new(dtype, Some(dims)))
}
