//! Operators that ONNX Runtime's optimiser writes for one processor (`com.microsoft.nchwc`), turned
//! back into plain ones.
//!
//! There, channels lie in blocks, and weights in the order in which that processor reads them. Here
//! a value in blocks is a plain one whose channels are filled up to whole blocks with zeros.

use model::op::{Op, PadMode};
use model::{Tensor, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::microsoft::fused_conv;
use super::proto::{GraphProto, NodeProto};
use super::window;

/// The domain of these operators.
pub(crate) const DOMAIN: &str = "com.microsoft.nchwc";

/// The operator set of ONNX whose operators these follow.
const OPSET: i64 = 13;

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "ReorderInput" => reorder_input(cx),
        "ReorderOutput" => reorder_output(cx),
        "Conv" => conv(cx),
        "MaxPool" | "AveragePool" | "GlobalAveragePool" | "GlobalMaxPool" => {
            cx.opset = OPSET;
            window::map(cx, op)
        }
        _ => Ok(false),
    }
}

/// The channels of a block. A file does not tell it: its weights and the channels that are read at
/// the end do, unless all of them fit either size. Then it is that of this processor, which is what
/// ONNX Runtime assumes.
pub(crate) fn block_size(source: &GraphProto) -> usize {
    let convolutions = || source.nodes.iter().filter(|node| is(node, "Conv"));
    let dims = |node: &NodeProto| {
        let name = node.inputs.get(1)?;
        source.initializers.iter().find(|tensor| tensor.name == *name).map(|tensor| &tensor.dims)
    };
    for dims in convolutions().filter_map(dims) {
        match dims[..] {
            [outputs, ..] if outputs % 16 != 0 => return 8,
            [_, 9..=15, ..] => return 16,
            _ => {}
        }
    }
    for node in source.nodes.iter().filter(|node| is(node, "ReorderOutput")) {
        let channels = node.attributes.iter().find(|attribute| attribute.name == "channels");
        let channels = channels.and_then(|attribute| attribute.int).unwrap_or(0);
        let read = node.inputs.first();
        let writer = convolutions().find(|conv| conv.outputs.first() == read);
        if let Some([outputs, ..]) = writer.and_then(dims).map(Vec::as_slice)
            && channels.checked_add(7).is_some_and(|sum| sum / 8 * 8 != *outputs)
        {
            return 16;
        }
    }
    if has_wide_vectors() { 16 } else { 8 }
}

fn is(node: &NodeProto, op: &str) -> bool {
    node.domain == DOMAIN && node.op_type == op
}

#[cfg(target_arch = "x86_64")]
fn has_wide_vectors() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_wide_vectors() -> bool {
    false
}

/// Fills channels up to whole blocks.
fn reorder_input(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let mut x = cx.input(0)?;
    if cx.attributes.flag("channels_last", false)? {
        x = cx.part(Op::Transpose { perm: Some(vec![0, 3, 1, 2]) }, &[x])?;
    }
    let channels = cx.shape(x).and_then(|dims| dims.get(1)?.fixed());
    let Some(channels) = channels else { return unsupported("an unknown number of channels") };
    let block = cx.block as i64;
    let rest = channels.rem_euclid(block);
    if rest == 0 {
        return cx.emit_identity(0, x);
    }
    let pads = cx.ints(&[0, 0, 0, 0, 0, block - rest, 0, 0])?;
    let dtype = cx.dtype(x);
    let zero = cx.scalar(dtype, 0.0)?;
    cx.emit(Op::Pad { mode: PadMode::Constant }, vec![Some(x), Some(pads), Some(zero)])
}

/// Takes the channels that are no filling.
fn reorder_output(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let mut x = cx.input(0)?;
    let Some(channels) = cx.attributes.int("channels")? else { return invalid("no channels") };
    let held = cx.shape(x).and_then(|dims| dims.get(1)?.fixed());
    if held != Some(channels) {
        let (start, end) = (cx.ints(&[0])?, cx.ints(&[channels])?);
        let axis = cx.ints(&[1])?;
        x = cx.part(Op::Slice, &[x, start, end, axis])?;
    }
    if cx.attributes.flag("channels_last", false)? {
        x = cx.part(Op::Transpose { perm: Some(vec![0, 2, 3, 1]) }, &[x])?;
    }
    cx.emit_identity(0, x)
}

fn conv(cx: &mut Context) -> Mapped {
    let blocks = cx.input(1)?;
    cx.inputs[1] = Some(plain_weights(cx, blocks)?);
    cx.opset = OPSET;
    fused_conv(cx)
}

/// Weights in the order of ONNX.
fn plain_weights(cx: &mut Context, id: ValueId) -> Result<ValueId, MapError> {
    let Some(tensor) = cx.graph.constant(id).cloned() else {
        return unsupported("weights that are no constant");
    };
    let (Some(values), [outputs, inputs, height, width]) = (tensor.to_vec::<f32>(), tensor.shape())
    else {
        return invalid("weights that are no FP32 of four dimensions");
    };
    let (block, points) = (cx.block, height * width);
    if outputs % block != 0 || (*inputs >= block && inputs % block != 0) {
        return invalid(format!("weights of {outputs}x{inputs} channels in blocks of {block}"));
    }
    let plain = in_order(&values, *outputs, *inputs, points, block);
    match Tensor::from_vec(tensor.shape().to_vec(), plain) {
        Ok(tensor) => Ok(cx.constant(tensor)),
        Err(error) => invalid(error.to_string()),
    }
}

/// From `[outputs / B][inputs / B][points][B inputs][B outputs]`, or from
/// `[outputs / B][inputs][points][B outputs]` with fewer inputs than a block, to
/// `[outputs][inputs][points]`.
fn in_order(
    values: &[f32],
    outputs: usize,
    inputs: usize,
    points: usize,
    block: usize,
) -> Vec<f32> {
    let mut plain = Vec::with_capacity(values.len());
    for output in 0..outputs {
        for input in 0..inputs {
            for point in 0..points {
                let (of_block, within) = (output / block, output % block);
                let at = if inputs < block {
                    ((of_block * inputs + input) * points + point) * block
                } else {
                    let row = of_block * (inputs / block) + input / block;
                    ((row * points + point) * block + input % block) * block
                };
                plain.push(values[at + within]);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks written one after another, as ONNX Runtime writes them.
    fn in_blocks(plain: &[f32], [outputs, inputs, points]: [usize; 3], block: usize) -> Vec<f32> {
        let of_inputs = if inputs < block { 1 } else { block };
        let mut blocks = Vec::new();
        for first_output in (0..outputs).step_by(block) {
            for first_input in (0..inputs).step_by(of_inputs) {
                for point in 0..points {
                    for input in first_input..first_input + of_inputs {
                        for output in first_output..first_output + block {
                            blocks.push(plain[(output * inputs + input) * points + point]);
                        }
                    }
                }
            }
        }
        blocks
    }

    #[test]
    fn weights_come_back_from_blocks() {
        for (dims, block) in [([16, 3, 4], 8), ([16, 16, 9], 8), ([32, 48, 1], 16)] {
            let count = dims.iter().product::<usize>();
            let plain: Vec<f32> = (0..count).map(|index| index as f32).collect();
            let [outputs, inputs, points] = dims;
            let back = in_order(&in_blocks(&plain, dims, block), outputs, inputs, points, block);
            assert_eq!(back, plain, "{dims:?}");
        }
    }
}
