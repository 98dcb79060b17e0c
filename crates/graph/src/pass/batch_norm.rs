//! Folds batch normalisation into the previous operator, or makes it one multiply-add per channel.

use model::op::{Activation, Binary, Op};
use model::{DataType, Tensor, ValueId};

use super::editor::Editor;
use super::epilogue::along_axis;
use crate::content;
use crate::ir::Graph;

/// Replaces batch normalisations with constant statistics. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        if let Some(affine) = affine(&editor, index)
            && fold(&mut editor, index, &affine).is_none()
        {
            keep(&mut editor, index, &affine);
        }
    }
    editor.finish()
}

/// `x * scale[c] + shift[c]`.
struct Affine {
    x: ValueId,
    dtype: DataType,
    scale: Vec<f64>,
    shift: Vec<f64>,
}

fn floats(editor: &Editor, id: ValueId) -> Option<Vec<f64>> {
    let tensor = editor.graph.constant(id)?;
    match tensor.dtype() {
        DataType::F64 => tensor.to_vec::<f64>(),
        _ => Some(content::floats(tensor)?.into_iter().map(f64::from).collect()),
    }
}

fn affine(editor: &Editor, index: usize) -> Option<Affine> {
    let node = editor.node(index)?;
    match (&node.op, node.inputs.as_slice()) {
        (
            Op::BatchNorm { epsilon },
            [Some(x), Some(scale), Some(bias), Some(mean), Some(variance)],
        ) => {
            let dtype = editor.graph.value(*x).dtype;
            let parameters = [scale, bias, mean, variance];
            if parameters.iter().any(|id| editor.graph.value(**id).dtype != dtype) {
                return None;
            }
            let [scale, bias, mean, variance] = parameters.map(|id| floats(editor, *id));
            let (scale, bias, mean, variance) = (scale?, bias?, mean?, variance?);
            let count = scale.len();
            if [bias.len(), mean.len(), variance.len()] != [count; 3] {
                return None;
            }
            let factor: Vec<f64> =
                (0..count).map(|c| scale[c] / (variance[c] + f64::from(*epsilon)).sqrt()).collect();
            let shift = (0..count).map(|c| bias[c] - mean[c] * factor[c]).collect();
            Some(Affine { x: *x, dtype, scale: factor, shift })
        }
        // A factor per channel, as exporters without batch normalisation write it.
        (Op::Binary(Binary::Mul), [Some(a), Some(b)]) => {
            let (x, factor) = if editor.graph.constant(*b).is_some() { (*a, *b) } else { (*b, *a) };
            let foldable = matches!(editor.op(x)?.0, Op::Conv(_) | Op::ConvTranspose(_));
            let shape = editor.graph.shape(x).filter(|_| foldable)?;
            let channels = shape.get(1)?.size()?;
            let factor = along_axis(editor.graph.constant(factor)?, 1, shape)?;
            let scale = if factor.len() == 1 { vec![factor[0]; channels] } else { factor };
            let dtype = editor.graph.value(x).dtype;
            Some(Affine { x, dtype, scale, shift: vec![0.0; channels] })
        }
        // The result of an earlier round: the operator before it may be foldable now.
        (Op::ScaleShift { activation: Activation::None }, [Some(x), Some(scale), Some(shift)]) => {
            let (scale, shift) = (floats(editor, *scale)?, floats(editor, *shift)?);
            let foldable = matches!(editor.op(*x)?.0, Op::Conv(_) | Op::ConvTranspose(_));
            let dtype = editor.graph.value(*x).dtype;
            foldable.then_some(Affine { x: *x, dtype, scale, shift })
        }
        _ => None,
    }
}

/// Scales the weight and adjusts the bias of the previous convolution or matrix product.
fn fold(editor: &mut Editor, index: usize, affine: &Affine) -> Option<()> {
    let (at, producer) = editor.producer(affine.x)?;
    let (op, mut inputs) = (producer.op.clone(), producer.inputs.clone());
    if !editor.is_private(affine.x) || inputs.get(3).copied().flatten().is_some() {
        return None;
    }
    let weight_id = inputs.get(1).copied().flatten()?;
    let weight = editor.graph.constant(weight_id)?.clone();
    let shape = weight.shape().to_vec();
    let channels = affine.scale.len();
    let mut beta = 1.0;
    // Which output channel an element of the weight belongs to, as (stride, count) of one
    // dimension.
    let channel: Box<dyn Fn(usize) -> usize> = match &op {
        Op::Conv(conv)
            if conv.activation == Activation::None && shape.first() == Some(&channels) =>
        {
            let stride = shape[1..].iter().product::<usize>().max(1);
            Box::new(move |element| element / stride)
        }
        Op::ConvTranspose(conv) if conv.groups == 1 && shape.get(1) == Some(&channels) => {
            let stride = shape[2..].iter().product::<usize>().max(1);
            Box::new(move |element| element / stride % channels)
        }
        Op::Gemm(gemm) if gemm.activation == Activation::None && shape.len() == 2 => {
            beta = f64::from(gemm.beta);
            let transposed = gemm.transpose_b;
            if shape[usize::from(!transposed)] != channels {
                return None;
            }
            let width = shape[1].max(1);
            Box::new(move |element| if transposed { element / width } else { element % width })
        }
        _ => return None,
    };
    let bias = match inputs.get(2).copied().flatten() {
        None => vec![0.0; channels],
        Some(id) => match floats(editor, id)? {
            bias if bias.len() == channels => bias.into_iter().map(|b| b * beta).collect(),
            bias if bias.len() == 1 => vec![bias[0] * beta; channels],
            _ => return None,
        },
    };
    let elements = floats(editor, weight_id)?;
    let scaled: Vec<f64> =
        elements.iter().enumerate().map(|(at, x)| x * affine.scale[channel(at)]).collect();
    let moved: Vec<f64> =
        (0..channels).map(|c| bias[c] * affine.scale[c] + affine.shift[c]).collect();
    let weight = content::float_tensor(affine.dtype, shape, &scaled)?;
    let bias = content::float_tensor(affine.dtype, vec![channels], &moved)?;
    let op = match op {
        Op::Gemm(gemm) => Op::Gemm(model::op::Gemm { beta: 1.0, ..gemm }),
        op => op,
    };
    inputs.resize(3, None);
    inputs[1] = Some(add(editor, index, "weight", weight)?);
    inputs[2] = Some(add(editor, index, "bias", bias)?);
    editor.replace(index, op, inputs);
    editor.remove(at);
    Some(())
}

fn add(editor: &mut Editor, index: usize, part: &str, tensor: Tensor) -> Option<ValueId> {
    let name = format!("{}/{part}", editor.node(index)?.name);
    Some(editor.constant(&name, tensor))
}

/// One multiply-add per channel.
fn keep(editor: &mut Editor, index: usize, affine: &Affine) -> Option<()> {
    if !matches!(editor.node(index)?.op, Op::BatchNorm { .. }) {
        return None;
    }
    let vector = |values: &[f64]| content::float_tensor(affine.dtype, vec![values.len()], values);
    let (scale, shift) = (vector(&affine.scale)?, vector(&affine.shift)?);
    let scale = add(editor, index, "scale", scale)?;
    let shift = add(editor, index, "shift", shift)?;
    let op = Op::ScaleShift { activation: Activation::None };
    editor.replace(index, op, vec![Some(affine.x), Some(scale), Some(shift)]);
    Some(())
}
