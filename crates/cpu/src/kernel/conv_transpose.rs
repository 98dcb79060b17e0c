//! Transposed convolutions: a product that computes every tap's contribution of every window, then
//! a sum of the contributions where windows overlap.

use model::DataType;
use model::op::{ConvTranspose, Op, Padding};

use super::dense::{self, elements};
use super::gemm::{self, Epilogue, Left, Matrix, PackedLeft, Right};
use super::geometry::{Geometry, covered, steps, three};
use super::matmul::{PlainNumber, row_major};
use super::parallel::for_each;
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::spare_buffers;
use crate::value::TypedTensor;
use crate::yield_point;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let Op::ConvTranspose(conv) = facts.step.op.clone() else {
        return Err(invalid!("{} is not a transposed convolution", facts.step.op.name()));
    };
    match facts.input_dtype(0) {
        Some(DataType::F32) if dense::all_of_type(facts, DataType::F32) => build_f32(facts, conv),
        Some(DataType::F16 | DataType::BF16) => {
            Ok(dense::through_f32(facts, build_f32(facts, conv)?))
        }
        Some(DataType::F64) if dense::all_of_type(facts, DataType::F64) => {
            Ok(Kernel::new(move |_, inputs| run_f64(&inputs, &conv)))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// The shapes of the operands, checked against each other. The geometry is that of the convolution
/// this is the transpose of: its output is our input.
struct ConvTransposeShapes {
    geometry: Geometry,
    groups: usize,
    group_inputs: usize,
    group_outputs: usize,
    output: Vec<usize>,
}

impl ConvTransposeShapes {
    fn new(
        x: &[usize],
        weight: &[usize],
        conv: &ConvTranspose,
    ) -> Result<ConvTransposeShapes, KernelError> {
        let ([images, channels, spatial @ ..], [inputs, per_group, kernel @ ..]) = (x, weight)
        else {
            return Err(invalid!("input {x:?} and weights {weight:?} have no channels"));
        };
        let groups = conv.groups;
        let rank = spatial.len();
        if rank != kernel.len() || !(1..=3).contains(&rank) || kernel.contains(&0) {
            return Err(invalid!("weights {weight:?} do not fit an input of shape {x:?}"));
        }
        if groups == 0 || channels != inputs || channels % groups != 0 {
            return Err(invalid!(
                "input {x:?} and weights {weight:?} do not divide into {groups} groups"
            ));
        }
        let geometry = transposed(conv, spatial, kernel)?;
        let outputs = per_group.checked_mul(groups).ok_or("too many output channels")?;
        let mut output = vec![*images, outputs];
        output.extend(&geometry.input[3 - rank..]);
        dense::count(&output)?;
        Ok(ConvTransposeShapes {
            geometry,
            groups,
            group_inputs: channels / groups,
            group_outputs: *per_group,
            output,
        })
    }
}

/// The geometry of the convolution that `conv` is the transpose of.
fn transposed(
    conv: &ConvTranspose,
    spatial: &[usize],
    kernel: &[usize],
) -> Result<Geometry, KernelError> {
    let rank = spatial.len();
    let fit = |values: &[usize], what: &str| match values.len() {
        0 => Ok([0; 3]),
        length if length == rank => Ok(three(values, 0)),
        _ => Err(invalid!("{what} {values:?} do not fit {rank} spatial dimensions")),
    };
    let extra = fit(&conv.output_padding, "output padding")?;
    let wanted = match &conv.output_shape {
        Some(shape) if shape.len() == rank => Some(three(shape, 1)),
        // Some models list batch and channels as well.
        Some(shape) if shape.len() == rank + 2 => Some(three(&shape[2..], 1)),
        Some(shape) => {
            return Err(invalid!("output shape {shape:?} does not fit {rank} dimensions"));
        }
        None => None,
    };
    let mut g = Geometry {
        rank,
        input: [1; 3],
        kernel: three(kernel, 1),
        strides: steps(&conv.window.strides, rank, "strides")?,
        dilations: steps(&conv.window.dilations, rank, "dilations")?,
        begin: [0; 3],
        end: [0; 3],
        output: three(spatial, 1),
    };
    if let Padding::Explicit(pads) = &conv.window.padding
        && !pads.is_empty()
    {
        let (begin, end) = pads.split_at(pads.len() / 2);
        (g.begin, g.end) = (fit(begin, "pads")?, fit(end, "pads")?);
    }
    let same = !matches!(conv.window.padding, Padding::Explicit(_));
    for axis in 3 - rank..3 {
        let extent = covered(g.kernel[axis], g.dilations[axis])?;
        let full = g.output[axis].saturating_sub(1).checked_mul(g.strides[axis]);
        let full = full.and_then(|full| full.checked_add(extent)?.checked_add(extra[axis]));
        let full = full.ok_or("the output is too large")?;
        let target = match &wanted {
            Some(wanted) => Some(wanted[axis]),
            None if same => Some(g.output[axis].saturating_mul(g.strides[axis])),
            None => None,
        };
        g.input[axis] = match target {
            Some(target) => {
                let total = full.saturating_sub(target);
                let upper = conv.window.padding == Padding::SameUpper;
                g.begin[axis] = if upper { total / 2 } else { total - total / 2 };
                target
            }
            None => full
                .checked_sub(g.begin[axis].saturating_add(g.end[axis]))
                .ok_or_else(|| invalid!("the padding exceeds an output of {full}"))?,
        };
    }
    Ok(g)
}

/// Adds every window's contributions to the output planes they belong to. `contributions` has a row
/// per channel and tap, and a column per window.
fn add_contributions<T: PlainNumber>(
    out: &mut [T],
    contributions: &[T],
    g: &Geometry,
    parallel: bool,
) {
    let (plane, taps, windows) = (g.input_size(), g.taps(), g.output_size());
    if plane == 0 || windows == 0 {
        return;
    }
    let add = |(out, contributions): (&mut [T], &[T])| {
        for (tap, share) in contributions.chunks_exact(windows).enumerate() {
            let tap = [
                tap / (g.kernel[1] * g.kernel[2]),
                tap / g.kernel[2] % g.kernel[1],
                tap % g.kernel[2],
            ];
            add_tap(out, share, g, tap);
            yield_point::did_work(windows);
        }
    };
    if parallel {
        let planes = out.chunks_exact_mut(plane).zip(contributions.chunks_exact(taps * windows));
        for_each(planes, &add);
    } else {
        out.chunks_exact_mut(plane).zip(contributions.chunks_exact(taps * windows)).for_each(add);
    }
}

/// Adds one tap's contributions of all windows to an output plane.
fn add_tap<T: PlainNumber>(out: &mut [T], share: &[T], g: &Geometry, tap: [usize; 3]) {
    let at = |axis: usize, window: usize| {
        (window * g.strides[axis] + tap[axis] * g.dilations[axis])
            .checked_sub(g.begin[axis])
            .filter(|&at| at < g.input[axis])
    };
    let width = g.output[2];
    for (row, share) in share.chunks_exact(width).enumerate() {
        let (z, y) = (at(0, row / g.output[1]), at(1, row % g.output[1]));
        let (Some(z), Some(y)) = (z, y) else { continue };
        let line = &mut out[(z * g.input[1] + y) * g.input[2]..][..g.input[2]];
        let offset = tap[2] * g.dilations[2];
        let first = g.begin[2].saturating_sub(offset).div_ceil(g.strides[2]).min(width);
        let start = (first * g.strides[2] + offset).saturating_sub(g.begin[2]).min(line.len());
        for (y, &x) in line[start..].iter_mut().step_by(g.strides[2]).zip(&share[first..]) {
            *y = T::multiply_add(x, T::one(), *y);
        }
    }
}

/// Constant weights: their shape and, per group, the packed transpose of their matrix.
struct Weights {
    shape: Vec<usize>,
    groups: Vec<PackedLeft>,
}

impl Weights {
    fn new(weight: &TypedTensor<f32>, groups: usize) -> Result<Weights, KernelError> {
        let shape = weight.shape().to_vec();
        let inputs = shape.first().copied().unwrap_or(0);
        if groups == 0 || inputs % groups != 0 {
            return Err(invalid!("weights {shape:?} do not divide into {groups} groups"));
        }
        let (rows, columns) = (inputs / groups, shape[1..].iter().product::<usize>());
        let data = elements(weight);
        let pack = |group: usize| {
            let part = &data[group * rows * columns..(group + 1) * rows * columns];
            PackedLeft::new(Matrix::new(part, rows, columns).transposed())
        };
        Ok(Weights { groups: (0..groups).map(pack).collect::<Result<_, _>>()?, shape })
    }
}

fn build_f32(facts: &StepFacts, conv: ConvTranspose) -> Result<Kernel, KernelError> {
    let weights = match dense::constant_f32(facts, 1)? {
        Some(weight) => dense::unless_invalid(Weights::new(&weight, conv.groups))?,
        None => None,
    };
    let resident_bytes = weights
        .as_ref()
        .map_or(0, |weights| weights.groups.iter().map(PackedLeft::size_bytes).sum());
    let packed_inputs = if weights.is_some() { vec![1] } else { vec![] };
    let run = move |context: &Context, inputs: Inputs| match &weights {
        Some(weights) => run_f32(context, &inputs, &conv, weights),
        None => run_f32(context, &inputs, &conv, &Weights::new(inputs.typed(1)?, conv.groups)?),
    };
    Ok(Kernel { run: Box::new(run), resident_bytes, packed_inputs })
}

fn run_f32(
    context: &Context,
    inputs: &Inputs,
    conv: &ConvTranspose,
    weights: &Weights,
) -> KernelResult {
    let x = inputs.typed::<f32>(0)?;
    let shapes = ConvTransposeShapes::new(x.shape(), &weights.shape, conv)?;
    let mut out = context.pool.filled(dense::count(&shapes.output)?, 0.0)?;
    let g = &shapes.geometry;
    let windows = g.output_size();
    let rows = shapes.group_outputs * g.taps();
    let data = elements(x);
    let bias = bias_of::<f32>(inputs, &shapes)?;
    let share_count = dense::count(&[rows, windows])?;
    let in_size = shapes.group_inputs * windows;
    let out_size = shapes.group_outputs * g.input_size();
    if out_size > 0 {
        fill_bias(&mut out, bias.as_deref(), g.input_size());
        let mut contributions = spare_buffers::take(context.pool, share_count)?;
        for (index, out) in out.chunks_exact_mut(out_size).enumerate() {
            let input = &data[index * in_size..(index + 1) * in_size];
            let left = Left::Packed(&weights.groups[index % shapes.groups]);
            let right = Right::Plain(Matrix::new(input, shapes.group_inputs, windows));
            gemm::product(&mut contributions, left, right, Epilogue::default())?;
            add_contributions(out, &contributions, g, true);
        }
        spare_buffers::keep(contributions, context.pool);
    }
    dense::output(&shapes.output, out)
}

fn bias_of<T: PlainNumber>(
    inputs: &Inputs,
    shapes: &ConvTransposeShapes,
) -> Result<Option<Buffer<T>>, KernelError> {
    let Some(bias) = inputs.optional_typed::<T>(2)? else { return Ok(None) };
    let outputs = shapes.groups * shapes.group_outputs;
    if bias.len() != outputs {
        return Err(invalid!("a bias of {} elements for {outputs} output channels", bias.len()));
    }
    Ok(Some(Buffer::copy_of(elements(bias))?))
}

/// Initializes every plane with its channel's bias.
fn fill_bias<T: PlainNumber>(out: &mut [T], bias: Option<&[T]>, plane: usize) {
    if let Some(bias) = bias {
        for (index, row) in out.chunks_exact_mut(plane).enumerate() {
            row.fill(bias[index % bias.len()]);
        }
    }
}

fn run_f64(inputs: &Inputs, conv: &ConvTranspose) -> KernelResult {
    let (x, weight) = (inputs.typed::<f64>(0)?, inputs.typed::<f64>(1)?);
    let shapes = ConvTransposeShapes::new(x.shape(), weight.shape(), conv)?;
    let mut out = Buffer::filled(dense::count(&shapes.output)?, 0.0f64)?;
    let g = &shapes.geometry;
    let windows = g.output_size();
    let rows = shapes.group_outputs * g.taps();
    let (data, weight) = (elements(x), elements(weight));
    let bias = bias_of::<f64>(inputs, &shapes)?;
    let mut contributions = Buffer::filled(dense::count(&[rows, windows])?, 0.0f64)?;
    let in_size = shapes.group_inputs * windows;
    let out_size = shapes.group_outputs * g.input_size();
    if out_size > 0 {
        fill_bias(&mut out, bias.as_deref(), g.input_size());
        for (index, out) in out.chunks_exact_mut(out_size).enumerate() {
            let group = index % shapes.groups;
            let size = shapes.group_inputs * rows;
            let weight = &weight[group * size..(group + 1) * size];
            let weight = row_major(weight, rows, shapes.group_inputs, true)?;
            let input = &data[index * in_size..(index + 1) * in_size];
            contributions.fill(0.0);
            dense::plain_product(&mut contributions, &weight, input, windows, f64::multiply_add);
            add_contributions(out, &contributions, g, false);
        }
    }
    dense::output(&shapes.output, out)
}

#[cfg(test)]
mod tests;
