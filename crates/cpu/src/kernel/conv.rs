//! Convolutions.
//!
//! A convolution is a product of the weights with the windows of the image. Pointwise ones read
//! the image as it is; others border it with zeros first and let the product gather its windows.
//! Depthwise ones have a separate loop because their products would have one row.

mod border;
mod depthwise;
mod plain;

pub(super) use border::Border;
pub(super) use depthwise::{DepthwisePlane, run as run_depthwise};
use depthwise::{SmallPlane, SmallPlaneTerms};
use model::DataType;
use model::op::Conv;
pub(super) use plain::{ConvShapes, convolve};

use super::dense::{self, elements};
use super::gemm::{self, Epilogue, Image, Left, Matrix, PackedLeft, Right};
use super::matmul::PlainNumber;
use super::parallel::try_for_each;
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::{Buffer, Data};
use crate::kernel::{KernelError, invalid};
use crate::spare_buffers;
use crate::value::{TypedTensor, Value, into_elements};

pub(crate) fn build(facts: &StepFacts, conv: &Conv) -> Result<Kernel, KernelError> {
    match facts.input_dtype(0) {
        Some(DataType::F32) if dense::all_of_type(facts, DataType::F32) => {
            build_f32(facts, conv.clone())
        }
        Some(DataType::F16 | DataType::BF16) => {
            Ok(dense::through_f32(facts, build_f32(facts, conv.clone())?))
        }
        Some(DataType::F64) if dense::all_of_type(facts, DataType::F64) => {
            let conv = conv.clone();
            Ok(Kernel::new(move |_, inputs| run_f64(&inputs, &conv)))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// The weights as the fast paths read them.
struct Weights {
    shape: Vec<usize>,
    form: WeightLayout,
}

enum WeightLayout {
    /// One packed matrix per group.
    Groups(Vec<PackedLeft>),
    /// Unchanged: one row of taps per output channel.
    Depthwise(Buffer<f32>),
}

impl Weights {
    fn new(weight: &TypedTensor<f32>, groups: usize) -> Result<Weights, KernelError> {
        let shape = weight.shape().to_vec();
        let [outputs, per_group, ..] = shape.as_slice() else {
            return Err(invalid!("weights of shape {shape:?} have no channels"));
        };
        if groups == 0 || outputs % groups != 0 {
            return Err(invalid!("{outputs} output channels do not divide into {groups} groups"));
        }
        let data = elements(weight);
        if *per_group == 1 && groups > 1 {
            let mut taps = Buffer::copy_of(data)?;
            gemm::flush_subnormal(&mut taps);
            return Ok(Weights { form: WeightLayout::Depthwise(taps), shape });
        }
        let rows = outputs / groups;
        let depth = shape[1..].iter().product();
        let form = (0..groups)
            .map(|group| {
                let part = &data[group * rows * depth..(group + 1) * rows * depth];
                PackedLeft::new(Matrix::new(part, rows, depth))
            })
            .collect::<Result<_, _>>()?;
        Ok(Weights { form: WeightLayout::Groups(form), shape })
    }

    fn size_bytes(&self) -> usize {
        match &self.form {
            WeightLayout::Groups(groups) => groups.iter().map(PackedLeft::size_bytes).sum(),
            WeightLayout::Depthwise(data) => size_of_val(&**data),
        }
    }
}

fn build_f32(facts: &StepFacts, conv: Conv) -> Result<Kernel, KernelError> {
    let weights = match dense::constant_f32(facts, 1)? {
        Some(weight) => dense::unless_invalid(Weights::new(&weight, conv.groups))?,
        None => None,
    };
    let resident_bytes = weights.as_ref().map_or(0, Weights::size_bytes);
    let packed_inputs = if weights.is_some() { vec![1] } else { vec![] };
    let run = move |context: &Context, inputs: Inputs| match &weights {
        Some(weights) => run_f32(context, inputs, &conv, weights),
        None => {
            let weights = Weights::new(inputs.typed(1)?, conv.groups)?;
            run_f32(context, inputs, &conv, &weights)
        }
    };
    Ok(Kernel { run: Box::new(run), resident_bytes, packed_inputs })
}

fn run_f32(context: &Context, mut inputs: Inputs, conv: &Conv, weights: &Weights) -> KernelResult {
    let shapes = ConvShapes::new(inputs.get(0)?.shape(), &weights.shape, conv)?;
    let count = dense::count(&shapes.output)?;
    let same_shape = |value: &Value| value.shape() == shapes.output;
    // A residual that no later step reads becomes the result: the product is added to it.
    let accumulate = inputs.is_owned(3) && inputs.optional(3).is_some_and(same_shape);
    let mut out = if accumulate {
        match inputs.take(3)? {
            Value::F32(tensor) => into_elements(tensor),
            other => return Err(invalid!("operand 3 is {}", other.dtype())),
        }
    } else {
        spare_buffers::take(context.pool, count)?
    };
    let residual = match inputs.optional_typed::<f32>(3)? {
        Some(tensor) if tensor.shape() == shapes.output => Some(Data::Borrowed(elements(tensor))),
        Some(tensor) => Some(Data::Owned(dense::broadcast(tensor, &shapes.output)?)),
        None => None,
    };
    let bias = inputs.optional_typed::<f32>(2)?.map(elements);
    shapes.check_bias(bias.map(<[f32]>::len))?;
    let call = ConvCall { shapes: &shapes, conv, bias, residual: residual.as_deref(), accumulate };
    if count > 0 {
        let x = elements(inputs.typed::<f32>(0)?);
        match &weights.form {
            WeightLayout::Groups(groups) => call.products(&mut out, x, groups)?,
            WeightLayout::Depthwise(taps) => call.depthwise(&mut out, x, taps)?,
        }
    }
    dense::output(&shapes.output, out)
}

/// One call of a convolution.
struct ConvCall<'a> {
    shapes: &'a ConvShapes,
    conv: &'a Conv,
    bias: Option<&'a [f32]>,
    residual: Option<&'a [f32]>,
    accumulate: bool,
}

impl ConvCall<'_> {
    /// One product per image and group.
    fn products(
        &self,
        out: &mut [f32],
        x: &[f32],
        groups: &[PackedLeft],
    ) -> Result<(), KernelError> {
        let shapes = self.shapes;
        let border = Border::new(&shapes.geometry, shapes.group_inputs)?;
        let windows = SignalWindows::of(shapes);
        let in_size = shapes.group_inputs * shapes.geometry.input_size();
        let out_size = shapes.group_outputs * shapes.geometry.output_size();
        let count = out.len() / out_size;
        let one = |(index, out): (usize, &mut [f32]), parallel: bool| {
            let group = index % shapes.groups;
            let input = &x[index * in_size..(index + 1) * in_size];
            let channels = group * shapes.group_outputs..(group + 1) * shapes.group_outputs;
            let epilogue = Epilogue {
                row_bias: self.bias.map(|bias| &bias[channels]),
                residual: self.residual.map(|all| &all[index * out_size..(index + 1) * out_size]),
                accumulate: self.accumulate,
                activation: self.conv.activation,
                ..Epilogue::default()
            };
            let left = Left::Packed(&groups[group]);
            let product = if parallel { gemm::product } else { gemm::product_here };
            if let Some(windows) = &windows {
                return windows.with(input, |matrix| product(out, left, matrix, epilogue))?;
            }
            if shapes.geometry.is_pointwise() {
                let plane = shapes.geometry.input_size();
                let right = Right::Plain(Matrix::new(input, shapes.group_inputs, plane));
                return product(out, left, right, epilogue);
            }
            gemm::with_scratch(border.length(), |scratch| {
                border.copy(scratch, input, 0.0, parallel);
                let image = Image {
                    data: scratch,
                    taps: border.taps(),
                    rows: border.rows(),
                    width: shapes.geometry.output[2],
                };
                product(out, left, Right::Image(&image), epilogue)
            })?
        };
        if count < 2 * rayon::current_num_threads() {
            out.chunks_exact_mut(out_size).enumerate().try_for_each(|item| one(item, true))
        } else {
            let items = out.chunks_exact_mut(out_size).enumerate();
            try_for_each(items, &|item| one(item, false))
        }
    }

    /// One plane per image and output channel.
    fn depthwise(&self, out: &mut [f32], x: &[f32], weights: &[f32]) -> Result<(), KernelError> {
        let shapes = self.shapes;
        let border = Border::new(&shapes.geometry, 1)?;
        let (in_plane, out_plane) = (shapes.geometry.input_size(), shapes.geometry.output_size());
        let outputs = shapes.groups * shapes.group_outputs;
        let taps = shapes.geometry.taps();
        let small = SmallPlane::new(&shapes.geometry)?;
        let one = |(index, out): (usize, &mut [f32])| {
            let channel = index % outputs;
            let input =
                (index / outputs * shapes.groups + channel / shapes.group_outputs) * in_plane;
            if let Some(small) = &small {
                let terms = SmallPlaneTerms {
                    weights: &weights[channel * taps..(channel + 1) * taps],
                    bias: self.bias.map_or(0.0, |bias| bias[channel]),
                    residual: self.residual.map(|all| &all[index * out_plane..][..out_plane]),
                    accumulate: self.accumulate,
                    activation: self.conv.activation,
                };
                small.run(out, &x[input..input + in_plane], terms);
                return Ok(());
            }
            gemm::with_scratch(border.length(), |scratch| {
                border.copy(scratch, &x[input..input + in_plane], 0.0, false);
                run_depthwise(DepthwisePlane {
                    out,
                    image: scratch,
                    taps: border.taps(),
                    rows: border.rows(),
                    width: shapes.geometry.output[2],
                    weights: &weights[channel * taps..(channel + 1) * taps],
                    bias: self.bias.map_or(0.0, |bias| bias[channel]),
                    residual: self.residual.map(|all| &all[index * out_plane..][..out_plane]),
                    accumulate: self.accumulate,
                    activation: self.conv.activation,
                })
            })?
        };
        let work = out.len().saturating_mul(taps);
        let mut planes = out.chunks_exact_mut(out_plane).enumerate();
        if work < gemm::MIN_PARALLEL_WORK {
            planes.try_for_each(one)
        } else {
            try_for_each(planes, &one)
        }
    }
}

/// Windows of one signal that lie apart: each is a run of adjacent elements, and as a column of the
/// product it is read from front to back. Short-time spectra are such convolutions.
struct SignalWindows {
    length: usize,
    count: usize,
    stride: usize,
    /// Zeros before the signal.
    before: usize,
}

impl SignalWindows {
    fn of(shapes: &ConvShapes) -> Option<SignalWindows> {
        let g = &shapes.geometry;
        let is_line = |axis: usize| (g.kernel[axis], g.input[axis], g.output[axis]) == (1, 1, 1);
        let apart = g.strides[2] > 1 && g.dilations[2] == 1;
        (shapes.group_inputs == 1 && is_line(0) && is_line(1) && apart).then_some(SignalWindows {
            length: g.kernel[2],
            count: g.output[2],
            stride: g.strides[2],
            before: g.begin[2],
        })
    }

    /// Elements that windows read.
    fn reach(&self) -> usize {
        self.count.saturating_sub(1) * self.stride + self.length
    }

    fn columns<'a>(&self, data: &'a [f32]) -> Right<'a> {
        let (rows, columns) = (self.length, self.count);
        Right::Plain(Matrix { data, rows, columns, row_stride: 1, column_stride: self.stride })
    }

    /// Calls `f` with the windows of `signal` as columns of a matrix.
    fn with<R>(&self, signal: &[f32], f: impl FnOnce(Right) -> R) -> Result<R, KernelError> {
        if self.before == 0 && self.reach() <= signal.len() {
            return Ok(f(self.columns(signal)));
        }
        Ok(gemm::with_scratch(self.reach(), |scratch| {
            let before = self.before.min(scratch.len());
            let used = signal.len().min(scratch.len() - before);
            scratch[..before].fill(0.0);
            scratch[before..before + used].copy_from_slice(&signal[..used]);
            scratch[before + used..].fill(0.0);
            f(self.columns(scratch))
        })?)
    }
}

fn run_f64(inputs: &Inputs, conv: &Conv) -> KernelResult {
    let (x, weight) = (inputs.typed::<f64>(0)?, inputs.typed::<f64>(1)?);
    let shapes = ConvShapes::new(x.shape(), weight.shape(), conv)?;
    let mut out = convolve::<f64>(elements(x), elements(weight), &shapes)?;
    if let Some(bias) = inputs.optional_typed::<f64>(2)? {
        shapes.check_bias(Some(bias.len()))?;
        let bias = elements(bias);
        let plane = shapes.geometry.output_size().max(1);
        for (index, row) in out.chunks_exact_mut(plane).enumerate() {
            row.iter_mut().for_each(|y| *y += bias[index % bias.len()]);
        }
    }
    if let Some(residual) = inputs.optional_typed::<f64>(3)? {
        let residual = dense::broadcast(residual, &shapes.output)?;
        out.iter_mut().zip(&residual).for_each(|(y, x)| *y += x);
    }
    f64::activated(conv.activation, &mut out)?;
    dense::output(&shapes.output, out)
}

#[cfg(test)]
mod tests;
