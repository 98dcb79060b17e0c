//! Packs weights into the layouts that kernels read.

use graph::content;
use half::{bf16, f16};
use model::Tensor;
use sha2::{Digest, Sha256};

use super::view::Element;

/// A name of a tensor's type, shape and elements.
pub fn content_name(tensor: &Tensor) -> String {
    let mut hash = Sha256::new();
    hash.update(tensor.dtype().wire_name());
    hash.update(format!("{:?}", tensor.shape()));
    hash.update(tensor.raw().map(|raw| raw.as_ref()).unwrap_or_default());
    let digest = hash.finalize();
    digest[..12].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Floats as bytes of `element`.
pub fn floats_as(values: &[f32], element: Element) -> Option<Vec<u8>> {
    Some(match element {
        Element::F16 => values.iter().flat_map(|x| saturated(*x).to_le_bytes()).collect(),
        Element::BF16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        Element::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => return None,
    })
}

/// Half precision; finite numbers beyond its range become its largest, so that masks of -1e9 stay
/// finite.
fn saturated(x: f32) -> f16 {
    if x.is_finite() { f16::from_f32(x.clamp(-65504.0, 65504.0)) } else { f16::from_f32(x) }
}

/// Whether [`convert`] supports the types, without converting: weights are large and packed at most
/// once.
pub fn converts(tensor: &Tensor, element: Element) -> bool {
    let exact = Element::exact(tensor.dtype());
    let narrows = matches!(element, Element::F16 | Element::BF16 | Element::F32);
    exact == Some(element) || (narrows && exact.is_some_and(Element::is_float))
}

/// The elements of `tensor` as bytes of `element`, in the same order; `None` for incompatible
/// types.
pub fn convert(tensor: &Tensor, element: Element) -> Option<Vec<u8>> {
    if Element::exact(tensor.dtype()) == Some(element) {
        return tensor.raw().map(|raw| raw.to_vec());
    }
    floats_as(&content::floats(tensor)?, element)
}

/// Rows of the weights for `columns` output channels: a multiple of eight; from 64 on of 32, which
/// the copy engine reads at once.
pub fn weight_rows(columns: usize) -> usize {
    columns.next_multiple_of(if columns < 64 { 8 } else { 32 })
}

/// A filter `[out, in, taps...]` as `[out][taps][in rounded up]` halves; rows rounded up to eight,
/// and output channels too.
pub fn filter(tensor: &Tensor, in_rounded: usize) -> Option<Vec<u8>> {
    let values = content::floats(tensor)?;
    let (out_c, in_c) = (tensor.shape()[0], tensor.shape()[1]);
    let taps: usize = tensor.shape()[2..].iter().product();
    let row = (taps * in_rounded).next_multiple_of(8);
    let mut packed = vec![f16::ZERO; out_c.next_multiple_of(8) * row];
    for o in 0..out_c {
        for i in 0..in_c {
            for tap in 0..taps {
                let value = values[(o * in_c + i) * taps + tap];
                packed[o * row + tap * in_rounded + i] = saturated(value);
            }
        }
    }
    Some(bytemuck::cast_slice(&packed).to_vec())
}

/// A matrix `[depth, columns]` (or its transpose) as `[columns][depth]` halves times `factor`, both
/// rounded up to eight.
pub fn matrix(tensor: &Tensor, transposed: bool, factor: f32) -> Option<Vec<u8>> {
    let values = content::floats(tensor)?;
    let rank = tensor.shape().len();
    let (a, b) = (tensor.shape()[rank - 2], tensor.shape()[rank - 1]);
    let (depth, columns) = if transposed { (b, a) } else { (a, b) };
    let row = depth.next_multiple_of(8);
    let mut packed = vec![f16::ZERO; columns.next_multiple_of(8) * row];
    for column in 0..columns {
        for d in 0..depth {
            let at = if transposed { column * depth + d } else { d * columns + column };
            packed[column * row + d] = saturated(values[at] * factor);
        }
    }
    Some(bytemuck::cast_slice(&packed).to_vec())
}

/// The elements of a tensor, its rows (the last dimension) rounded up to eight with zeros.
pub fn aligned_rows(tensor: &Tensor, element: Element) -> Option<Vec<u8>> {
    let row = *tensor.shape().last()?;
    let bytes = convert(tensor, element)?;
    let gap = (row.next_multiple_of(8) - row) * element.size();
    let mut packed = Vec::with_capacity(bytes.len() + bytes.len() / row.max(1) * gap);
    for line in bytes.chunks(row * element.size()) {
        packed.extend_from_slice(line);
        packed.resize(packed.len() + gap, 0);
    }
    Some(packed)
}

/// A depthwise filter `[channels, 1, taps...]` as `[taps][channels]` halves.
pub fn depthwise(tensor: &Tensor) -> Option<Vec<u8>> {
    let values = content::floats(tensor)?;
    let channels = tensor.shape()[0];
    let taps: usize = tensor.shape()[1..].iter().product();
    let transposed = (0..taps)
        .flat_map(|tap| (0..channels).map(move |c| (c, tap)))
        .map(|(c, tap)| saturated(values[c * taps + tap]));
    Some(bytemuck::cast_slice(&transposed.collect::<Vec<f16>>()).to_vec())
}

/// A row of floats, rounded up to eight with zeros.
pub fn float_row(tensor: &Tensor, factor: f32) -> Option<Vec<u8>> {
    let mut values = content::floats(tensor)?;
    values.iter_mut().for_each(|x| *x *= factor);
    values.resize(values.len().next_multiple_of(8), 0.0);
    Some(bytemuck::cast_slice(&values).to_vec())
}

/// Scales, then shifts, as halves: what a normalising product applies to its input.
pub fn scales_and_shifts(scale: &Tensor, shift: &Tensor) -> Option<Vec<u8>> {
    let values = content::floats(scale)?.into_iter().chain(content::floats(shift)?);
    Some(bytemuck::cast_slice(&values.map(saturated).collect::<Vec<f16>>()).to_vec())
}

/// A filter `[out, in, taps...]` as `[out][taps][in]` elements.
pub fn channels_fastest(tensor: &Tensor, element: Element) -> Option<Vec<u8>> {
    let values = content::floats(tensor)?;
    let (outer, channels) = (tensor.shape()[0], tensor.shape()[1]);
    let taps: usize = tensor.shape()[2..].iter().product();
    let mut turned = Vec::with_capacity(values.len());
    for o in 0..outer {
        for tap in 0..taps {
            turned.extend((0..channels).map(|c| values[(o * channels + c) * taps + tap]));
        }
    }
    floats_as(&turned, element)
}
