//! Operators that slide a window, and resampling.

use model::DataType;
use model::op::{AspectPolicy, Conv, ConvTranspose, Padding, Pool, PoolKind, Resize, Window};

use super::elementwise::same_float;
use super::shape::{axes_indices, unify};
use super::{Fact, Inferred, Operands, Shape, fail};
use model::dim::SymDim;

/// Geometry along one spatial dimension.
struct SlidingWindow {
    kernel: SymDim,
    stride: i64,
    dilation: i64,
    /// Padding at both ends; `None` when it follows from the input.
    border: Option<(i64, i64)>,
}

fn small(size: usize) -> Inferred<i64> {
    match i64::try_from(size) {
        Ok(value) if value <= i64::from(i32::MAX) => Ok(value),
        _ => fail(format!("a window parameter of {size}")),
    }
}

fn sliding_windows(window: &Window, kernel: &[SymDim]) -> Inferred<Vec<SlidingWindow>> {
    let rank = kernel.len();
    let expect = |name: &str, length: usize, want: usize| match length {
        0 => Ok(()),
        length if length == want => Ok(()),
        length => fail(format!("{length} {name} for {rank} spatial dimensions")),
    };
    expect("strides", window.strides.len(), rank)?;
    expect("dilations", window.dilations.len(), rank)?;
    if let Padding::Explicit(pads) = &window.padding {
        expect("pads", pads.len(), 2 * rank)?;
    }
    (0..rank)
        .map(|axis| {
            let stride = small(window.strides.get(axis).copied().unwrap_or(1))?;
            let dilation = small(window.dilations.get(axis).copied().unwrap_or(1))?;
            if stride == 0 || dilation == 0 || kernel[axis].is(0) {
                return fail("a window with a zero stride, dilation or extent");
            }
            let border = match &window.padding {
                Padding::Explicit(pads) if pads.is_empty() => Some((0, 0)),
                Padding::Explicit(pads) => Some((small(pads[axis])?, small(pads[axis + rank])?)),
                _ => None,
            };
            Ok(SlidingWindow { kernel: kernel[axis].clone(), stride, dilation, border })
        })
        .collect()
}

impl SlidingWindow {
    fn reach(&self) -> SymDim {
        let one = SymDim::Fixed(1);
        self.kernel.sub(&one).mul(&SymDim::Fixed(self.dilation)).add(&one)
    }

    fn output(&self, input: &SymDim, ceil: bool) -> Inferred<SymDim> {
        let stride = SymDim::Fixed(self.stride);
        let Some((begin, end)) = self.border else {
            return Ok(input.div_ceil(&stride));
        };
        let room = input.add(&SymDim::Fixed(begin + end)).sub(&self.reach());
        if room.fixed().is_some_and(|room| room < 0) {
            return fail(format!("a window of {} over an extent of {input}", self.reach()));
        }
        if !ceil {
            return Ok(room.div(&stride).add(&SymDim::Fixed(1)));
        }
        // A window that starts in the padding at the end does not count.
        let windows = room.div_ceil(&stride).add(&SymDim::Fixed(1));
        Ok(match (windows.fixed(), input.fixed()) {
            (Some(count), Some(size)) if (count - 1) * self.stride >= size + begin => {
                SymDim::Fixed(count - 1)
            }
            (Some(count), Some(_)) => SymDim::Fixed(count),
            _ if self.stride == 1 => windows,
            _ => SymDim::Unknown,
        })
    }

    fn transposed_output(&self, input: &SymDim, extra: i64) -> SymDim {
        let stride = SymDim::Fixed(self.stride);
        let Some((begin, end)) = self.border else { return input.mul(&stride) };
        input
            .sub(&SymDim::Fixed(1))
            .mul(&stride)
            .add(&SymDim::Fixed(extra))
            .add(&self.reach())
            .sub(&SymDim::Fixed(begin + end))
    }
}

/// Batch and channels, then the result of `window` for each spatial dimension.
fn slide_all(
    input: &[SymDim],
    channels: SymDim,
    sliding_windows: &[SlidingWindow],
    window: impl Fn(&SlidingWindow, &SymDim, usize) -> Inferred<SymDim>,
) -> Inferred<Vec<SymDim>> {
    let mut out = vec![input[0].clone(), channels];
    for (axis, (one, dim)) in sliding_windows.iter().zip(&input[2..]).enumerate() {
        out.push(window(one, dim, axis)?);
    }
    Ok(out)
}

/// The extent of the window: as declared, else the weight's.
fn kernel_of(window: &Window, spatial: usize, weight: Option<&[SymDim]>) -> Inferred<Vec<SymDim>> {
    let declared: Vec<SymDim> = window.kernel.iter().map(|size| SymDim::from(*size)).collect();
    let kernel = match (declared.is_empty(), weight) {
        (false, Some(weight)) if weight.len() == declared.len() + 2 => declared
            .iter()
            .zip(&weight[2..])
            .map(|(a, b)| unify(a, b, "kernel extent"))
            .collect::<Inferred<_>>()?,
        (false, _) => declared,
        (true, Some(weight)) if weight.len() >= 2 => weight[2..].to_vec(),
        (true, _) => vec![SymDim::Unknown; spatial],
    };
    if kernel.len() != spatial {
        return fail(format!("a window of {} dimensions over {spatial}", kernel.len()));
    }
    Ok(kernel)
}

/// The output shape of a convolution of operand `x` with the weight operand `w`.
fn conv_shape(op: &Conv, x: &Operands, w: usize) -> Inferred<Shape> {
    let Some(input) = x.shape(0) else { return Ok(None) };
    if input.len() < 3 {
        return fail(format!("a convolution over rank {}", input.len()));
    }
    if let Some(rank) = x.rank(w)
        && rank != input.len()
    {
        return fail(format!("a weight of rank {rank} for an input of rank {}", input.len()));
    }
    let kernel = kernel_of(&op.window, input.len() - 2, x.shape(w))?;
    let sliding_windows = sliding_windows(&op.window, &kernel)?;
    let channels = match x.shape(w) {
        Some(weight) => {
            let groups = SymDim::Fixed(small(op.groups)?);
            if groups.is(0) {
                return fail("zero groups");
            }
            unify(&input[1], &weight[1].mul(&groups), "input channels")?;
            if weight[0].size().is_some_and(|size| size % op.groups != 0) {
                return fail(format!("{} output channels in {} groups", weight[0], op.groups));
            }
            weight[0].clone()
        }
        None => SymDim::Unknown,
    };
    slide_all(input, channels, &sliding_windows, |window, dim, _| window.output(dim, false))
        .map(Some)
}

pub fn conv(op: &Conv, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.same_type(0..x.count())?;
    if !dtype.is_float() {
        return fail(format!("a convolution of {dtype}"));
    }
    x.expect_rank(2, 1)?;
    let shape = conv_shape(op, x, 1)?;
    if let (Some(shape), Some([length])) = (&shape, x.shape(2)) {
        unify(&shape[1], length, "bias")?;
    }
    if let (Some(shape), Some(residual)) = (&shape, x.shape(3)) {
        if shape.len() != residual.len() {
            return fail("the residual has another rank than the output");
        }
        for (a, b) in shape.iter().zip(residual) {
            unify(a, b, "residual")?;
        }
    }
    Ok(Fact::new(dtype, shape))
}

pub fn conv_integer(op: &Conv, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    Ok(Fact::new(DataType::I32, conv_shape(op, x, 1)?))
}

pub fn qlinear_conv(op: &Conv, x: &Operands) -> Inferred<Fact> {
    x.require(8)?;
    Ok(Fact::new(x.dtype(7)?, conv_shape(op, x, 3)?))
}

pub fn conv_transpose(op: &ConvTranspose, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.same_type(0..x.count())?;
    let Some(input) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    if input.len() < 3 {
        return fail(format!("a convolution over rank {}", input.len()));
    }
    if let Some(rank) = x.rank(1)
        && rank != input.len()
    {
        return fail(format!("a weight of rank {rank} for an input of rank {}", input.len()));
    }
    let spatial = input.len() - 2;
    let kernel = kernel_of(&op.window, spatial, x.shape(1))?;
    let sliding_windows = sliding_windows(&op.window, &kernel)?;
    if ![0, spatial].contains(&op.output_padding.len()) {
        return fail(format!("{} output paddings over {spatial}", op.output_padding.len()));
    }
    if op.output_shape.as_ref().is_some_and(|shape| shape.len() != spatial) {
        return fail("the output shape has another rank than the input");
    }
    let channels = match x.shape(1) {
        Some(weight) => {
            unify(&input[1], &weight[0], "input channels")?;
            weight[1].mul(&SymDim::Fixed(small(op.groups)?))
        }
        None => SymDim::Unknown,
    };
    let shape = slide_all(input, channels, &sliding_windows, |window, dim, axis| {
        Ok(match &op.output_shape {
            Some(shape) => SymDim::from(shape[axis]),
            None => {
                let extra = small(op.output_padding.get(axis).copied().unwrap_or(0))?;
                window.transposed_output(dim, extra)
            }
        })
    })?;
    Ok(Fact::new(dtype, Some(shape)))
}

pub fn pool(op: &Pool, x: &Operands) -> Inferred<Vec<Fact>> {
    let dtype = x.dtype(0)?;
    let shape = match x.shape(0) {
        Some(input) if input.len() < 3 => {
            return fail(format!("pooling over rank {}", input.len()));
        }
        Some(input) => {
            let kernel = kernel_of(&op.window, input.len() - 2, None)?;
            let sliding_windows = sliding_windows(&op.window, &kernel)?;
            let output = |window: &SlidingWindow, dim: &SymDim, _| window.output(dim, op.ceil_mode);
            Some(slide_all(input, input[1].clone(), &sliding_windows, output)?)
        }
        None => None,
    };
    let mut facts = vec![Fact::new(dtype, shape.clone())];
    if matches!(op.kind, PoolKind::MaxWithIndices { .. }) {
        facts.push(Fact::new(DataType::I64, shape));
    }
    Ok(facts)
}

pub fn global_pool(x: &Operands) -> Inferred<Fact> {
    let fact = same_float(x)?;
    let shape = match fact.shape {
        Some(shape) if shape.len() < 3 => {
            return fail(format!("pooling over rank {}", shape.len()));
        }
        Some(mut shape) => {
            shape[2..].fill(SymDim::Fixed(1));
            Some(shape)
        }
        None => None,
    };
    Ok(Fact::new(fact.dtype, shape))
}

pub fn resize(op: &Resize, x: &Operands) -> Inferred<Fact> {
    let dtype = x.dtype(0)?;
    let Some(input) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let axes = match &op.axes {
        Some(axes) => axes_indices(axes, input.len())?,
        None => (0..input.len()).collect(),
    };
    let mut out = input.to_vec();
    let check = |count: usize| match count == axes.len() {
        true => Ok(()),
        false => fail(format!("{count} scales or sizes for {} dimensions", axes.len())),
    };
    if x.has(3) {
        match x.content(3) {
            Some(sizes) => {
                check(sizes.len())?;
                resized(op.keep_aspect, input, &axes, sizes, &mut out)?;
            }
            None => axes.iter().for_each(|axis| out[*axis] = SymDim::Unknown),
        }
    } else if let Some(scales) = x.floats(2) {
        check(scales.len())?;
        for (axis, scale) in axes.iter().zip(scales) {
            out[*axis] = scaled(&input[*axis], scale)?;
        }
    } else {
        match x.content(2) {
            Some(scales) => {
                check(scales.len())?;
                axes.iter()
                    .zip(scales)
                    .for_each(|(axis, scale)| out[*axis] = input[*axis].mul(scale));
            }
            None => axes.iter().for_each(|axis| out[*axis] = SymDim::Unknown),
        }
    }
    Ok(Fact::new(dtype, Some(out)))
}

fn scaled(dim: &SymDim, scale: f32) -> Inferred<SymDim> {
    if !scale.is_finite() || scale <= 0.0 || scale > 65_536.0 {
        return fail(format!("a scale of {scale}"));
    }
    Ok(match dim.fixed() {
        Some(size) => SymDim::Fixed((size as f32 * scale).floor() as i64),
        None if scale.fract() == 0.0 => dim.mul(&SymDim::Fixed(scale as i64)),
        None => SymDim::Unknown,
    })
}

/// Output extents from sizes; with an aspect policy, one scale applies to all axes.
fn resized(
    policy: AspectPolicy,
    input: &[SymDim],
    axes: &[usize],
    sizes: &[SymDim],
    out: &mut [SymDim],
) -> Inferred<()> {
    if policy == AspectPolicy::Stretch {
        axes.iter().zip(sizes).for_each(|(axis, size)| out[*axis] = size.clone());
        return Ok(());
    }
    let mut scale: Option<f32> = None;
    for (axis, size) in axes.iter().zip(sizes) {
        let (Some(size), Some(dim)) = (size.fixed(), input[*axis].fixed()) else {
            axes.iter().for_each(|axis| out[*axis] = SymDim::Unknown);
            return Ok(());
        };
        if dim <= 0 {
            return fail("resizing nothing");
        }
        let own = size as f32 / dim as f32;
        scale = Some(match (scale, policy) {
            (None, _) => own,
            (Some(other), AspectPolicy::NotLarger) => other.min(own),
            (Some(other), _) => other.max(own),
        });
    }
    for axis in axes {
        let (Some(scale), Some(dim)) = (scale, input[*axis].fixed()) else { continue };
        out[*axis] = SymDim::Fixed((scale * dim as f32).round() as i64);
    }
    Ok(())
}

pub fn grid_sample(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let shape = match (x.shape(0), x.shape(1)) {
        (Some(input), Some(grid)) => {
            if input.len() != grid.len() || input.len() < 3 {
                return fail(format!("a grid of rank {} over rank {}", grid.len(), input.len()));
            }
            let mut out = input.to_vec();
            out[0] = unify(&input[0], &grid[0], "batch")?;
            out[2..].clone_from_slice(&grid[1..grid.len() - 1]);
            Some(out)
        }
        _ => None,
    };
    Ok(Fact::new(x.dtype(0)?, shape))
}
