//! Spectra, and what is needed to compute them from sound.

mod fourier;
#[cfg(test)]
mod tests;

use model::DataType;
use model::op::{Op, Signal, WindowKind};

use super::operand::{around, dtype_of, integer_scalar, integers, one, output_len, resolve_axis};
use super::wide::{from_reals, real_scalar, reals};
use super::{Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::parallel::{Failure, in_chunks};
use crate::kernel::{KernelError, invalid};
use crate::yield_point;
use fourier::{Complex, Transform};

/// The most points of a transform, samples of a window or mel bins.
const MAX_POINTS: usize = 1 << 26;

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let Op::Signal(signal) = facts.step.op else { return Err(no_kernel(facts)) };
    let dtype = dtype_of(facts, 0)?;
    match signal {
        Signal::Dft { inverse, onesided, axis } if dtype.is_float() => {
            Ok(Kernel::new(move |_, inputs| dft(&inputs, inverse, onesided, axis)))
        }
        Signal::Stft { onesided } if dtype.is_float() => {
            Ok(Kernel::new(move |_, inputs| stft(&inputs, onesided)))
        }
        Signal::Window { kind, periodic, dtype } if dtype != DataType::String => {
            Ok(Kernel::new(move |_, inputs| window(&inputs, kind, periodic, dtype)))
        }
        Signal::MelWeights { dtype } if dtype != DataType::String => {
            Ok(Kernel::new(move |_, inputs| mel_weights(&inputs, dtype)))
        }
        _ => Err(no_kernel(facts)),
    }
}

fn points(value: i64, what: &str) -> Result<usize, KernelError> {
    let size = usize::try_from(value).ok().filter(|size| *size <= MAX_POINTS);
    size.ok_or_else(|| invalid!("{what} of {value} is outside of 0..={MAX_POINTS}"))
}

/// One line of complex numbers: `line` numbers of `parts` parts, `stride` apart.
fn load(
    data: &[f64],
    start: usize,
    stride: usize,
    count: usize,
    line: &mut [Complex],
    parts: usize,
) {
    line.fill(Complex::default());
    for (index, slot) in line.iter_mut().take(count).enumerate() {
        let at = (start + index * stride) * parts;
        *slot = Complex { re: data[at], im: if parts == 2 { data[at + 1] } else { 0.0 } };
    }
}

fn dft(inputs: &Inputs, inverse: bool, onesided: bool, axis: i64) -> KernelResult {
    let value = inputs.get(0)?;
    let (shape, dtype) = (value.shape(), value.dtype());
    let axis = match inputs.optional(2) {
        Some(_) => integer_scalar(inputs, 2)?,
        None => axis,
    };
    let axis = resolve_axis(axis, shape.len())?;
    let parts = shape[shape.len() - 1];
    if axis + 1 == shape.len() || !(1..=2).contains(&parts) {
        return Err(invalid!("shape {shape:?} has no dimension {axis} of complex numbers"));
    }
    let (outer, given, inner) = around(&shape[..shape.len() - 1], axis);
    let real_result = inverse && onesided;
    let length = match inputs.optional(1) {
        Some(_) => points(integer_scalar(inputs, 1)?, "a transform")?,
        None if real_result => 2 * given.saturating_sub(1),
        None => given,
    };
    if length == 0 {
        return Err(invalid!("a transform of no points"));
    }
    let kept = if onesided && !inverse { length / 2 + 1 } else { length };
    let parts_out = if real_result { 1 } else { 2 };
    let mut out_shape = shape.to_vec();
    out_shape[axis] = kept;
    out_shape[shape.len() - 1] = parts_out;
    let data = reals(value)?;
    let mut out = Buffer::filled(output_len(&out_shape)?, 0f64)?;
    let transform = Transform::new(length, inverse)?;
    let failure = Failure::default();
    let _ = outer;
    in_chunks(&mut out, (kept * inner * parts_out).max(1), &|row: usize, block: &mut [f64]| {
        let Some(mut line) = failure.check(Buffer::filled(length, Complex::default())) else {
            return;
        };
        for column in 0..inner {
            yield_point::did_work(transform.work_ns());
            let count = if real_result { length / 2 + 1 } else { length }.min(given);
            load(&data, row * given * inner + column, inner, count, &mut line, parts);
            if real_result {
                mirror(&mut line);
            }
            if failure.check(transform.run(&mut line)).is_none() {
                return;
            }
            for (index, number) in line.iter().take(kept).enumerate() {
                let slot = &mut block[(index * inner + column) * parts_out..][..parts_out];
                slot[0] = number.re;
                if let [_, imaginary] = slot {
                    *imaginary = number.im;
                }
            }
        }
    });
    failure.result()?;
    one(from_reals(&out_shape, out, dtype)?)
}

/// The second half of the frequencies of a real signal.
fn mirror(line: &mut [Complex]) {
    let length = line.len();
    line[0].im = 0.0;
    for index in 1..length.div_ceil(2) {
        line[length - index] = Complex { re: line[index].re, im: -line[index].im };
    }
    if length.is_multiple_of(2) && length > 1 {
        line[length / 2].im = 0.0;
    }
}

fn stft(inputs: &Inputs, onesided: bool) -> KernelResult {
    let value = inputs.get(0)?;
    let (shape, dtype) = (value.shape(), value.dtype());
    let (batch, samples, parts) = match *shape {
        [batch, samples] => (batch, samples, 1),
        [batch, samples, parts @ (1 | 2)] => (batch, samples, parts),
        _ => return Err(invalid!("a signal of shape {shape:?}")),
    };
    let step = points(integer_scalar(inputs, 1)?, "a step")?;
    let weights = inputs.optional(2).map(reals).transpose()?;
    let length = match (inputs.optional(3), &weights) {
        (Some(_), _) => points(integer_scalar(inputs, 3)?, "a frame")?,
        (None, Some(weights)) => weights.len(),
        (None, None) => return Err("neither a window nor a length of frames".into()),
    };
    if step == 0 || length == 0 || samples < length {
        return Err(invalid!("frames of {length} at steps of {step} in {samples} samples"));
    }
    if let Some(weights) = weights.as_ref().filter(|weights| weights.len() > length) {
        return Err(invalid!("a window of {} samples for frames of {length}", weights.len()));
    }
    let (frames, kept) = ((samples - length) / step + 1, kept_bins(length, onesided));
    let out_shape = [batch, frames, kept, 2];
    let data = reals(value)?;
    let mut out = Buffer::filled(output_len(&out_shape)?, 0f64)?;
    let transform = Transform::new(length, false)?;
    let failure = Failure::default();
    in_chunks(&mut out, (kept * 2).max(1), &|frame: usize, block: &mut [f64]| {
        yield_point::did_work(transform.work_ns());
        let Some(mut line) = failure.check(Buffer::filled(length, Complex::default())) else {
            return;
        };
        let start = frame / frames * samples + frame % frames * step;
        load(&data, start, 1, length, &mut line, parts);
        for (index, slot) in line.iter_mut().enumerate() {
            let weight = weights.as_ref().map_or(1.0, |w| w.get(index).copied().unwrap_or(0.0));
            *slot = Complex { re: slot.re * weight, im: slot.im * weight };
        }
        if failure.check(transform.run(&mut line)).is_some() {
            for (pair, number) in block.chunks_exact_mut(2).zip(line.iter()) {
                pair.copy_from_slice(&[number.re, number.im]);
            }
        }
    });
    failure.result()?;
    one(from_reals(&out_shape, out, dtype)?)
}

fn kept_bins(length: usize, onesided: bool) -> usize {
    if onesided { length / 2 + 1 } else { length }
}

fn window(inputs: &Inputs, kind: WindowKind, periodic: bool, dtype: DataType) -> KernelResult {
    let size = points(integer_scalar(inputs, 0)?, "a window")?;
    let [c0, c1, c2] = match kind {
        WindowKind::Hann => [0.5, 0.5, 0.0],
        WindowKind::Hamming => [25.0 / 46.0, 21.0 / 46.0, 0.0],
        WindowKind::Blackman => [0.42, 0.5, 0.08],
    };
    let period = if periodic { size } else { size.saturating_sub(1) }.max(1) as f64;
    let data = Buffer::collect((0..size).map(|n| {
        let angle = 2.0 * std::f64::consts::PI * n as f64 / period;
        c0 - c1 * angle.cos() + c2 * (2.0 * angle).cos()
    }))?;
    one(from_reals(&[size], data, dtype)?)
}

/// Triangles over the bins of a spectrum, as ONNX defines them.
fn mel_weights(inputs: &Inputs, dtype: DataType) -> KernelResult {
    let single = |index: usize| -> Result<i64, KernelError> {
        match &*integers(inputs.get(index)?)? {
            [only] => Ok(*only),
            many => Err(invalid!("operand {index} must be one integer, has {}", many.len())),
        }
    };
    let (bins, length, rate) = (single(0)?, single(1)?, single(2)?);
    let (low, high) = (real_scalar(inputs, 3)?, real_scalar(inputs, 4)?);
    let bins = points(bins, "mel bins")?;
    let rows = points(length, "a transform")? / 2 + 1;
    if rate <= 0 {
        return Err(invalid!("a sample rate of {rate}"));
    }
    let mel = |hertz: f64| 2595.0 * (1.0 + hertz / 700.0).log10();
    let (low, high) = (mel(low), mel(high));
    let step = (high - low) / (bins as f64 + 2.0);
    let edge = |index: usize| {
        let hertz = 700.0 * (10f64.powf((index as f64 * step + low) / 2595.0) - 1.0);
        ((length as f64 + 1.0) * hertz / rate as f64).floor().clamp(0.0, rows as f64) as usize
    };
    let mut out = Buffer::filled(output_len(&[rows, bins])?, 0f64)?;
    for bin in 0..bins {
        let (lower, centre, upper) = (edge(bin), edge(bin + 1), edge(bin + 2));
        yield_point::did_work(upper.saturating_sub(lower));
        if centre == lower {
            if let Some(slot) = out.get_mut(centre * bins + bin) {
                *slot = 1.0;
            }
        } else {
            for row in lower..=centre.min(rows - 1) {
                out[row * bins + bin] = (row - lower) as f64 / (centre - lower) as f64;
            }
        }
        for row in centre..upper.min(rows) {
            out[row * bins + bin] = (upper - row) as f64 / (upper - centre) as f64;
        }
    }
    one(from_reals(&[rows, bins], out, dtype)?)
}
