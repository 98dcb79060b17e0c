//! Products of bytes with constant weights: convolutions and matrix products whose operands are
//! quantized. Results are sums, numbers, or bytes again.

pub(crate) mod blocks;
mod depthwise;
pub(crate) mod elementwise;
mod finish;
pub(crate) mod mean;
mod pack;
mod product;

use int8::{Unsigned, WORD_DEPTH};
use model::op::{Activation, Conv};

use self::finish::{Channels, Finish, Target};
pub(super) use self::finish::{clamped, rounded};
use self::pack::{ByteImage, FLIP};
use self::product::{BYTES_PER_NUMBER, ByteProduct, Right};
use super::conv::{Border, ConvShapes};
use super::dense::{self, elements};
use super::gemm::{IMAGE_GUARD, with_scratch};
use super::parallel::try_for_each;
use super::{Context, Inputs, Kernel, KernelResult};
use crate::buffer::{Buffer, Data};
use crate::buffer_pool::Pooled;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value};

/// Where the channels of a product are in its weight.
#[derive(Clone, Debug)]
pub(crate) enum ByteLayout {
    /// `[out, in, taps...]`.
    Convolution(Conv),
    /// `[depth, columns]`, or its transpose.
    Matrix { transposed: bool },
}

/// How a result is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ByteOutput {
    /// As the sums of the products.
    Sums,
    /// As numbers.
    Numbers,
    /// As bytes of a scale of one; the product's own scales are relative to it.
    Bytes { zero: i32, signed: bool },
}

/// A product of bytes with a constant weight. Vectors have one element, or one for each channel.
///
/// Operands of its kernel: the activations; a residual of numbers; the zero point of the
/// activations, if it is not constant; factors of the scales that are not constant.
#[derive(Clone, Debug)]
pub(crate) struct ByteSpec {
    pub(crate) layout: ByteLayout,
    pub(crate) activations_signed: bool,
    /// None: it is an operand.
    pub(crate) activations_zero: Option<i32>,
    pub(crate) weight_zeros: Vec<i32>,
    pub(crate) scales: Vec<f32>,
    /// Added to the sums.
    pub(crate) sum_bias: Option<Vec<i32>>,
    /// Added to the scaled sums.
    pub(crate) bias: Option<Vec<f32>>,
    /// The result's least and largest number.
    pub(crate) clamp: (f32, f32),
    /// Applied to numbers last.
    pub(crate) activation: Activation,
    pub(crate) output: ByteOutput,
}

impl ByteSpec {
    /// The clamp of values before they are rounded.
    fn clamp(&self) -> (f32, f32) {
        let (low, high) = self.clamp;
        match self.output {
            ByteOutput::Bytes { zero, signed } => {
                let (least, most) = if signed { (-128, 127) } else { (0, 255) };
                (low.max((least - zero) as f32), high.min((most - zero) as f32))
            }
            _ => (low, high),
        }
    }
}

/// The weight as the products read it.
struct ByteWeights {
    shape: Vec<usize>,
    channels: usize,
    depth: usize,
    form: WeightForm,
}

enum WeightForm {
    /// Channels as rows, one packed matrix for each group.
    Rows(Vec<Buffer<u32>>),
    /// Channels as columns.
    Columns(Buffer<u32>),
    /// One filter for each channel, as numbers without zero points and scales.
    Filters(Buffer<f32>),
}

/// A spec whose vectors are as long as there are channels.
struct ByteKernel {
    spec: ByteSpec,
    weights: ByteWeights,
    /// The sum of each channel's bytes, as the products read them.
    weight_sums: Buffer<i32>,
    /// None where all are zero.
    weight_zeros: Option<Buffer<i32>>,
    scales: Buffer<f32>,
    bias: Option<Buffer<f32>>,
}

/// The elements of a tensor of bytes, and whether they are signed.
fn bytes_of(value: &Value) -> Result<(&[u8], bool), KernelError> {
    match value {
        Value::U8(tensor) => Ok((elements(tensor), false)),
        Value::I8(tensor) => Ok((bytemuck::cast_slice(elements(tensor)), true)),
        other => Err(invalid!("an operand is {}", other.dtype())),
    }
}

/// `values` for each of `count` channels.
fn spread<T: Copy>(values: &[T], count: usize, what: &str) -> Result<Buffer<T>, KernelError> {
    match values {
        [one] => Ok(Buffer::filled(count, *one)?),
        all if all.len() == count => Ok(Buffer::copy_of(all)?),
        all => Err(invalid!("{} {what} for {count} channels", all.len())),
    }
}

/// The kernel of a product with the constant `weight`.
pub(crate) fn build(spec: ByteSpec, weight: &Value) -> Result<Kernel, KernelError> {
    let kernel = ByteKernel::new(spec, weight)?;
    let resident_bytes = kernel.size_bytes();
    let run = move |context: &Context, inputs: Inputs| kernel.run(context, &inputs);
    Ok(Kernel { run: Box::new(run), resident_bytes, packed_inputs: Vec::new() })
}

impl ByteKernel {
    fn new(spec: ByteSpec, weight: &Value) -> Result<ByteKernel, KernelError> {
        if let Value::F32(filters) = weight {
            return ByteKernel::with_filters(spec, filters);
        }
        let (data, signed) = bytes_of(weight)?;
        let shape = weight.shape().to_vec();
        // Weights are signed where products read them.
        let number = |byte: u8| match signed {
            true => i32::from(byte as i8),
            false => i32::from(byte) - 128,
        };
        let shift = if signed { 0 } else { 128 };
        let (channels, depth) = extents(&spec.layout, &shape)?;
        let zeros: Buffer<i32> = spread(&spec.weight_zeros, channels, "zero points")?;
        let zeros = Buffer::collect(zeros.iter().map(|zero| zero.wrapping_sub(shift)))?;
        let (form, weight_sums) = match &spec.layout {
            ByteLayout::Convolution(conv) if conv.groups > 1 && shape[1] == 1 => {
                (WeightForm::Filters(numbers_of(&spec, weight)?), Buffer::filled(channels, 0)?)
            }
            ByteLayout::Convolution(conv) => {
                let sum = |row: &[u8]| row.iter().map(|byte| number(*byte)).sum();
                let sums = Buffer::collect(data.chunks_exact(depth).map(sum))?;
                (WeightForm::Rows(packed_groups(data, conv.groups, channels, depth, signed)?), sums)
            }
            ByteLayout::Matrix { transposed } => {
                let at = |row: usize, column: usize| match transposed {
                    true => data[column * depth + row],
                    false => data[row * channels + column],
                };
                let sum = |column: usize| (0..depth).map(|row| number(at(row, column))).sum();
                let sums = Buffer::collect((0..channels).map(sum))?;
                let words = depth.div_ceil(WORD_DEPTH);
                let mut packed = Buffer::filled(pack::right_length(words, channels), 0)?;
                let flip = if signed { 0 } else { 0x80 };
                pack::pack_right(&mut packed, depth, channels, |row, column| {
                    at(row, column) ^ flip
                });
                (WeightForm::Columns(packed), sums)
            }
        };
        let scales = spread(&spec.scales, channels, "scales")?;
        let bias = spec.bias.as_deref().map(|bias| spread(bias, channels, "biases")).transpose()?;
        let weights = ByteWeights { shape, channels, depth, form };
        let weight_zeros = zeros.iter().any(|zero| *zero != 0).then_some(zeros);
        Ok(ByteKernel { spec, weights, weight_sums, weight_zeros, scales, bias })
    }

    /// A convolution of one filter for each channel, whose weight is numbers.
    fn with_filters(spec: ByteSpec, filters: &TypedTensor<f32>) -> Result<ByteKernel, KernelError> {
        let shape = filters.shape().to_vec();
        let (channels, depth) = extents(&spec.layout, &shape)?;
        let is_depthwise = matches!(&spec.layout, ByteLayout::Convolution(conv) if conv.groups > 1)
            && shape.get(1) == Some(&1);
        if !is_depthwise {
            return Err(invalid!("a weight of numbers of shape {shape:?}"));
        }
        let form = WeightForm::Filters(Buffer::copy_of(elements(filters))?);
        Ok(ByteKernel {
            scales: spread(&spec.scales, channels, "scales")?,
            bias: spec.bias.as_deref().map(|bias| spread(bias, channels, "biases")).transpose()?,
            spec,
            weights: ByteWeights { shape, channels, depth, form },
            weight_sums: Buffer::filled(channels, 0)?,
            weight_zeros: None,
        })
    }

    fn size_bytes(&self) -> usize {
        let channels = 4 * self.weights.channels * 4;
        channels
            + match &self.weights.form {
                WeightForm::Rows(groups) => groups.iter().map(|words| size_of_val(&**words)).sum(),
                WeightForm::Columns(words) => size_of_val(&**words),
                WeightForm::Filters(numbers) => size_of_val(&**numbers),
            }
    }

    fn run(&self, context: &Context, inputs: &Inputs) -> KernelResult {
        let x = inputs.get(0)?;
        let (_, signed) = bytes_of(x)?;
        if signed != self.spec.activations_signed {
            return Err(invalid!("the activations are {}", x.dtype()));
        }
        match self.spec.output {
            ByteOutput::Sums => self.run_as::<i32>(context, inputs),
            ByteOutput::Numbers => self.run_as::<f32>(context, inputs),
            ByteOutput::Bytes { signed: false, .. } => self.run_as::<u8>(context, inputs),
            ByteOutput::Bytes { signed: true, .. } => self.run_as::<i8>(context, inputs),
        }
    }

    fn run_as<T: Target + Pooled>(&self, context: &Context, inputs: &Inputs) -> KernelResult
    where
        TypedTensor<T>: Into<Value>,
    {
        let (x, _) = bytes_of(inputs.get(0)?)?;
        let zero = match (self.spec.activations_zero, inputs.optional(2)) {
            (Some(zero), _) => zero,
            (None, Some(value)) => match bytes_of(value)? {
                ([zero], false) => i32::from(*zero),
                ([zero], true) => i32::from(*zero as i8),
                (all, _) => return Err(invalid!("{} zero points of activations", all.len())),
            },
            (None, None) => 0,
        };
        // Activations are unsigned where products read them.
        let zero = if self.spec.activations_signed { zero + 128 } else { zero };
        let scales = self.scales_of(inputs)?;
        let shape = self.output_shape(inputs.get(0)?.shape())?;
        let count = dense::count(&shape)?;
        let residual = match inputs.optional_typed::<f32>(1)? {
            Some(tensor) if tensor.shape() == shape => Some(Data::Borrowed(elements(tensor))),
            Some(tensor) => Some(Data::Owned(dense::broadcast(tensor, &shape)?)),
            None => None,
        };
        let offsets = self.offsets(zero)?;
        let mut out = context.pool.filled(count, T::default())?;
        let call = Call { kernel: self, zero, offsets: &offsets, scales: &scales };
        if count > 0 {
            let input = inputs.get(0)?.shape();
            call.run(&mut out, x, input, residual.as_deref())?;
        }
        T::activate(self.spec.activation, &mut out);
        dense::output(&shape, out)
    }

    fn output_shape(&self, x: &[usize]) -> Result<Vec<usize>, KernelError> {
        match &self.spec.layout {
            ByteLayout::Convolution(conv) => {
                Ok(ConvShapes::new(x, &self.weights.shape, conv)?.output)
            }
            ByteLayout::Matrix { .. } => {
                let Some((depth, rows)) = x.split_last().filter(|(_, rows)| !rows.is_empty())
                else {
                    return Err(invalid!("activations of shape {x:?} are no matrix"));
                };
                if *depth != self.weights.depth {
                    let depth = self.weights.depth;
                    return Err(invalid!(
                        "activations of shape {x:?} by a weight of depth {depth}"
                    ));
                }
                Ok(rows.iter().copied().chain([self.weights.channels]).collect())
            }
        }
    }

    /// The scales, times those that are operands.
    fn scales_of(&self, inputs: &Inputs) -> Result<Data<'_, f32>, KernelError> {
        let Some(factors) = inputs.optional_typed::<f32>(3)? else {
            return Ok(Data::Borrowed(&self.scales));
        };
        let factors = spread(elements(factors), self.weights.channels, "scales")?;
        let all = self.scales.iter().zip(&factors).map(|(scale, factor)| scale * factor);
        Ok(Data::Owned(Buffer::collect(all)?))
    }

    /// What the zero points of both operands and the bias add to the sums of each channel, without
    /// the sums of activations.
    fn offsets(&self, zero: i32) -> Result<Buffer<i32>, KernelError> {
        let depth = self.weights.depth as i32;
        let bias = self.spec.sum_bias.as_deref();
        if let Some(bias) = bias
            && bias.len() != self.weights.channels
        {
            return Err(invalid!("{} biases for {} channels", bias.len(), self.weights.channels));
        }
        let one = |channel: usize| {
            let own = self.weight_zeros.as_ref().map_or(0, |zeros| zeros[channel]);
            let both = depth.wrapping_mul(zero).wrapping_mul(own);
            let sum = self.weight_sums[channel].wrapping_mul(zero);
            bias.map_or(0, |bias| bias[channel]).wrapping_add(both).wrapping_sub(sum)
        };
        Ok(Buffer::collect((0..self.weights.channels).map(one))?)
    }

    fn output_zero(&self) -> i32 {
        match self.spec.output {
            ByteOutput::Bytes { zero, .. } => zero,
            _ => 0,
        }
    }
}

/// The weight of a convolution with one filter for each channel, as numbers without zero points and
/// scales.
fn numbers_of(spec: &ByteSpec, weight: &Value) -> Result<Buffer<f32>, KernelError> {
    if let Value::F32(filters) = weight {
        return Ok(Buffer::copy_of(elements(filters))?);
    }
    let (data, signed) = bytes_of(weight)?;
    let (channels, depth) = extents(&spec.layout, weight.shape())?;
    let zeros: Buffer<i32> = spread(&spec.weight_zeros, channels, "zero points")?;
    let number = |(at, byte): (usize, &u8)| {
        let byte = if signed { i32::from(*byte as i8) } else { i32::from(*byte) };
        byte.wrapping_sub(zeros[at / depth]) as f32
    };
    Ok(Buffer::collect(data.iter().enumerate().map(number))?)
}

/// Whether a weight of `shape` has a kernel.
pub(crate) fn supports(layout: &ByteLayout, shape: &[usize]) -> bool {
    extents(layout, shape).is_ok()
}

/// Channels and the depth of each.
fn extents(layout: &ByteLayout, shape: &[usize]) -> Result<(usize, usize), KernelError> {
    let refused = || invalid!("weights of shape {shape:?}");
    let (channels, depth) = match (layout, shape) {
        (ByteLayout::Convolution(conv), [outputs, inner @ ..]) if !inner.is_empty() => {
            if conv.groups == 0 || outputs % conv.groups != 0 {
                return Err(refused());
            }
            (*outputs, inner.iter().product())
        }
        (ByteLayout::Matrix { transposed: false }, [depth, columns]) => (*columns, *depth),
        (ByteLayout::Matrix { transposed: true }, [columns, depth]) => (*columns, *depth),
        _ => return Err(refused()),
    };
    // Sums of more products than this may exceed 32 bits.
    if channels == 0 || depth == 0 || depth > MAX_DEPTH {
        return Err(refused());
    }
    Ok((channels, depth))
}

/// A sum of more products of bytes may not fit.
const MAX_DEPTH: usize = i32::MAX as usize / (255 * 255) / 2;

fn packed_groups(
    data: &[u8],
    groups: usize,
    channels: usize,
    depth: usize,
    signed: bool,
) -> Result<Vec<Buffer<u32>>, KernelError> {
    let rows = channels / groups;
    let words = depth.div_ceil(WORD_DEPTH);
    let flip = if signed { 0 } else { FLIP };
    data.chunks_exact(rows * depth)
        .map(|part| {
            let mut packed = Buffer::filled(pack::left_length(rows, words), 0)?;
            pack::pack_left(&mut packed, part, rows, depth, flip);
            Ok(packed)
        })
        .collect()
}

/// One call of a kernel.
struct Call<'a> {
    kernel: &'a ByteKernel,
    /// The zero point of the activations, as products read them.
    zero: i32,
    offsets: &'a [i32],
    scales: &'a [f32],
}

impl Call<'_> {
    fn run<T: Target>(
        &self,
        out: &mut [T],
        x: &[u8],
        shape: &[usize],
        residual: Option<&[f32]>,
    ) -> Result<(), KernelError> {
        let kernel = self.kernel;
        match (&kernel.spec.layout, &kernel.weights.form) {
            (ByteLayout::Convolution(conv), WeightForm::Rows(groups)) => {
                let shapes = ConvShapes::new(shape, &kernel.weights.shape, conv)?;
                self.convolution(out, x, &shapes, groups, residual)
            }
            (ByteLayout::Convolution(conv), WeightForm::Filters(filters)) => {
                let shapes = ConvShapes::new(shape, &kernel.weights.shape, conv)?;
                self.depthwise(out, x, &shapes, filters, residual)
            }
            (ByteLayout::Matrix { .. }, WeightForm::Columns(packed)) => {
                self.matrix(out, x, packed, residual)
            }
            _ => Err("the weight has another layout".into()),
        }
    }

    /// The finish of the channels `range`.
    fn finish(&self, channels: Channels, range: std::ops::Range<usize>) -> Finish<'_> {
        let kernel = self.kernel;
        Finish {
            channels,
            offsets: &self.offsets[range.clone()],
            weight_zeros: kernel.weight_zeros.as_ref().map(|zeros| &zeros[range.clone()]),
            scales: &self.scales[range.clone()],
            bias: kernel.bias.as_ref().map(|bias| &bias[range]),
            residual: None,
            clamp: kernel.spec.clamp(),
            zero: kernel.output_zero(),
        }
    }

    /// One product for each image and group.
    fn convolution<T: Target>(
        &self,
        out: &mut [T],
        x: &[u8],
        shapes: &ConvShapes,
        groups: &[Buffer<u32>],
        residual: Option<&[f32]>,
    ) -> Result<(), KernelError> {
        let geometry = &shapes.geometry;
        let in_size = shapes.group_inputs * geometry.input_size();
        let columns = geometry.output_size();
        let out_size = shapes.group_outputs * columns;
        let windows = Windows::new(shapes)?;
        let flip = if self.kernel.spec.activations_signed { FLIP } else { 0 };
        // What surrounds the image is the number zero.
        let fill = self.zero as u8 ^ flip as u8;
        let one = |(index, out): (usize, &mut [T]), parallel: bool| {
            let group = index % shapes.groups;
            let input = &x[index * in_size..(index + 1) * in_size];
            let channels = group * shapes.group_outputs..(group + 1) * shapes.group_outputs;
            let mut finish = self.finish(Channels::Rows, channels);
            let part = index * out_size..(index + 1) * out_size;
            finish.residual = residual.map(|all| (&all[part], columns));
            windows.with(input, fill, flip, parallel, |image| {
                ByteProduct {
                    rows: shapes.group_outputs,
                    columns,
                    depth: self.kernel.weights.depth,
                    words: windows.taps.len() / WORD_DEPTH,
                    left: &groups[group],
                    right: Right::Windows(image),
                    unsigned: Unsigned::Right,
                    finish,
                    row_sums: &[],
                }
                .run(out, parallel)
            })?
        };
        if out.len() / out_size < 2 * rayon::current_num_threads() {
            out.chunks_exact_mut(out_size).enumerate().try_for_each(|item| one(item, true))
        } else {
            let items = out.chunks_exact_mut(out_size).enumerate();
            try_for_each(items, &|item| one(item, false))
        }
    }

    /// One product of all rows.
    fn matrix<T: Target>(
        &self,
        out: &mut [T],
        x: &[u8],
        packed: &[u32],
        residual: Option<&[f32]>,
    ) -> Result<(), KernelError> {
        let (channels, depth) = (self.kernel.weights.channels, self.kernel.weights.depth);
        let rows = out.len() / channels;
        let words = depth.div_ceil(WORD_DEPTH);
        let flip = if self.kernel.spec.activations_signed { FLIP } else { 0 };
        let row_sums = match self.kernel.weight_zeros {
            Some(_) => Buffer::collect(
                x.chunks_exact(depth)
                    .map(|row| row.iter().map(|byte| i32::from(byte ^ flip as u8)).sum::<i32>()),
            )?,
            None => Buffer::default(),
        };
        let mut finish = self.finish(Channels::Columns, 0..channels);
        finish.residual = residual.map(|all| (all, channels));
        with_scratch(pack::left_length(rows, words), |scratch| {
            let left: &mut [u32] = bytemuck::cast_slice_mut(scratch);
            pack::pack_left(left, x, rows, depth, flip);
            ByteProduct {
                rows,
                columns: channels,
                depth,
                words,
                left,
                right: Right::Packed(packed),
                unsigned: Unsigned::Left,
                finish,
                row_sums: &row_sums,
            }
            .run(out, true)
        })?
    }
}

/// How the windows of images of one geometry are read.
struct Windows<'a> {
    border: Option<Border<'a>>,
    taps: Buffer<usize>,
    rows: Buffer<usize>,
    width: usize,
}

impl<'a> Windows<'a> {
    fn new(shapes: &'a ConvShapes) -> Result<Windows<'a>, KernelError> {
        let geometry = &shapes.geometry;
        let padded = |taps: &[usize]| -> Result<Buffer<usize>, KernelError> {
            // The weight is zero past the depth, so that any tap will do.
            let last = taps.last().copied().unwrap_or(0);
            let mut all = Buffer::with_capacity(taps.len().next_multiple_of(WORD_DEPTH))?;
            all.extend_from_slice(taps);
            all.resize(taps.len().next_multiple_of(WORD_DEPTH), last);
            Ok(all)
        };
        if geometry.is_pointwise() {
            let plane = geometry.input_size();
            let taps = Buffer::collect((0..shapes.group_inputs).map(|channel| channel * plane))?;
            let rows = Buffer::filled(1, 0)?;
            return Ok(Windows { border: None, taps: padded(&taps)?, rows, width: plane });
        }
        let border = Border::new(geometry, shapes.group_inputs)?;
        let guarded = Buffer::collect(border.taps().iter().map(|tap| tap + IMAGE_GUARD))?;
        let (taps, rows) = (padded(&guarded)?, Buffer::copy_of(border.rows())?);
        Ok(Windows { border: Some(border), taps, rows, width: geometry.output[2] })
    }

    /// Calls `f` with the windows of `input`.
    fn with<R>(
        &self,
        input: &[u8],
        fill: u8,
        flip: u32,
        parallel: bool,
        f: impl FnOnce(&ByteImage) -> R,
    ) -> Result<R, KernelError> {
        let Some(border) = &self.border else { return Ok(f(&self.image(input, flip))) };
        let length = border.length();
        Ok(with_scratch(length.div_ceil(size_of::<f32>()), |scratch| {
            let target: &mut [u8] = bytemuck::cast_slice_mut(scratch);
            let target = &mut target[..length];
            border.copy(target, input, fill, parallel);
            f(&self.image(target, flip))
        })?)
    }

    fn image<'b>(&'b self, data: &'b [u8], flip: u32) -> ByteImage<'b> {
        ByteImage { data, taps: &self.taps, rows: &self.rows, width: self.width, flip }
    }
}

#[cfg(test)]
mod tests;
