//! Windows over spatial dimensions. One to three dimensions are treated as three, with leading
//! dimensions of extent 1.

use crate::kernel::{KernelError, invalid};
use model::op::{Padding, Window};

/// A window resolved against an input. Dimensions are depth, height, width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// The number of dimensions before the missing ones were added.
    pub(super) rank: usize,
    /// Extent of the input.
    pub(super) input: [usize; 3],
    /// Extent of the window.
    pub(super) kernel: [usize; 3],
    /// Step between windows.
    pub(super) strides: [usize; 3],
    /// Distance of a window's taps.
    pub(super) dilations: [usize; 3],
    /// Border before the input.
    pub(super) begin: [usize; 3],
    /// Border after the input.
    pub(super) end: [usize; 3],
    /// How many windows there are.
    pub(super) output: [usize; 3],
}

/// `values` as three dimensions, `missing` filling the front.
pub(super) fn three(values: &[usize], missing: usize) -> [usize; 3] {
    let mut all = [missing; 3];
    all[3 - values.len()..].copy_from_slice(values);
    all
}

/// Strides or dilations of a window: ones where none are given.
pub(super) fn steps(values: &[usize], rank: usize, what: &str) -> Result<[usize; 3], KernelError> {
    if values.is_empty() {
        return Ok([1; 3]);
    }
    if values.len() != rank || values.contains(&0) {
        return Err(invalid!("{what} {values:?} do not fit {rank} spatial dimensions"));
    }
    Ok(three(values, 1))
}

/// The extent that `kernel` taps at distance `dilation` cover.
pub(super) fn covered(kernel: usize, dilation: usize) -> Result<usize, KernelError> {
    (kernel - 1)
        .checked_mul(dilation)
        .and_then(|extent| extent.checked_add(1))
        .ok_or_else(|| invalid!("a window of {kernel} taps at distance {dilation} is too large"))
}

impl Geometry {
    /// Resolves `window` against the spatial extents `input`; `kernel` is used if the window has no
    /// kernel extents.
    pub(super) fn new(
        window: &Window,
        input: &[usize],
        kernel: &[usize],
        ceil_mode: bool,
    ) -> Result<Geometry, KernelError> {
        let rank = input.len();
        if !(1..=3).contains(&rank) {
            return Err(invalid!("windows over {rank} spatial dimensions are not supported"));
        }
        if kernel.len() != rank || kernel.contains(&0) {
            return Err(invalid!("kernel {kernel:?} does not fit {rank} spatial dimensions"));
        }
        let mut geometry = Geometry {
            rank,
            input: three(input, 1),
            kernel: three(kernel, 1),
            strides: steps(&window.strides, rank, "strides")?,
            dilations: steps(&window.dilations, rank, "dilations")?,
            begin: [0; 3],
            end: [0; 3],
            output: [1; 3],
        };
        if let Padding::Explicit(pads) = &window.padding
            && !pads.is_empty()
        {
            if pads.len() != 2 * rank {
                return Err(invalid!("pads {pads:?} do not fit {rank} spatial dimensions"));
            }
            geometry.begin = three(&pads[..rank], 0);
            geometry.end = three(&pads[rank..], 0);
        }
        for axis in 3 - rank..3 {
            geometry.resolve(axis, &window.padding, ceil_mode)?;
        }
        Ok(geometry)
    }

    fn resolve(
        &mut self,
        axis: usize,
        padding: &Padding,
        ceil_mode: bool,
    ) -> Result<(), KernelError> {
        let (input, stride) = (self.input[axis], self.strides[axis]);
        let extent = covered(self.kernel[axis], self.dilations[axis])?;
        let too_large = || "the padded input is too large".to_string();
        if !matches!(padding, Padding::Explicit(_)) {
            let output = input.div_ceil(stride);
            let needed = output.saturating_sub(1) * stride;
            let total = needed.checked_add(extent).ok_or_else(too_large)?.saturating_sub(input);
            let small = total / 2;
            let upper = *padding == Padding::SameUpper;
            self.begin[axis] = if upper { small } else { total - small };
            self.end[axis] = total - self.begin[axis];
            self.output[axis] = output;
            return Ok(());
        }
        let (begin, end) = (self.begin[axis], self.end[axis]);
        let padded = input.checked_add(begin).and_then(|sum| sum.checked_add(end));
        let free = padded.ok_or_else(too_large)?.checked_sub(extent).ok_or_else(|| {
            format!(
                "a window of extent {extent} does not fit an input of {input} with {begin}+{end} \
                 padding"
            )
        })?;
        self.output[axis] = if ceil_mode {
            let windows = free.div_ceil(stride) + 1;
            // The last window must begin inside the input or the border before it.
            if (windows - 1) * stride >= input + begin { windows - 1 } else { windows }
        } else {
            free / stride + 1
        };
        Ok(())
    }

    /// Elements of one input plane.
    pub(super) fn input_size(&self) -> usize {
        self.input.iter().product()
    }

    /// Elements of one output plane.
    pub(super) fn output_size(&self) -> usize {
        self.output.iter().product()
    }

    /// Taps of the window.
    pub(super) fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// The output's shape behind `leading` dimensions.
    pub(super) fn output_shape(&self, leading: &[usize]) -> Vec<usize> {
        leading.iter().chain(&self.output[3 - self.rank..]).copied().collect()
    }

    /// Whether each window is one element of the input, in order.
    pub(super) fn is_pointwise(&self) -> bool {
        self.kernel == [1; 3]
            && self.strides == [1; 3]
            && self.begin == [0; 3]
            && self.end == [0; 3]
    }

    /// The taps of window `position` along `axis` that lie inside the input, and the first one's
    /// input position.
    pub(super) fn inside(&self, axis: usize, position: usize) -> (std::ops::Range<usize>, usize) {
        let dilation = self.dilations[axis];
        let start = position * self.strides[axis];
        let first = self.begin[axis].saturating_sub(start).div_ceil(dilation);
        let room = (self.input[axis] + self.begin[axis]).saturating_sub(start);
        let last = room.div_ceil(dilation).min(self.kernel[axis]);
        (first..last.max(first), start + first * dilation - self.begin[axis])
    }
}
