//! Convolutions with packed weights on tensor cores: grouped, transposed, of one to three
//! dimensions.
//!
//! Groups of few channels share a part of the product, with zeros between groups: a tile of the
//! tensor cores is wider than such a group. A transposed convolution has one part per phase, that
//! is, per remainder of the output's position by the stride: with `u = position + padding = q *
//! stride + phase` and `tap * dilation = j * stride + phase`, it reads the input at `q - j`.

use graph::content;
use model::Tensor;
use model::gpu::GpuTarget;
use model::op::{Activation, Conv, ConvTranspose};

use super::super::conv::Window2;
use super::super::draft::StepDraft;
use super::super::loop_nest::{LoopNest, describe_all};
use super::super::packing::{floats_as, weight_rows};
use super::super::view::{Element, View};
use super::bytes::CHUNK;
use super::convolution::{Sizes, checked, checked_transposed, three};
use super::tensor::{Axis, TensorLoops, multiplies};
use super::{Epilogue, Extra, Views, check, finished};

/// With more phases than this, most of them would be empty.
const MAX_PHASES: usize = 1024;

/// A convolution as parts with packed weights.
#[derive(Clone, Debug)]
pub struct PackedConv {
    op: &'static str,
    activation: Activation,
    sizes: Sizes,
    groups: usize,
    /// Input and output channels of a group.
    channels: usize,
    columns: usize,
    /// Groups of a part.
    merged: usize,
    /// Elements read at a time, and the most of them: those of 16 bytes.
    vec: usize,
    chunk: usize,
    /// How often the depth is repeated: weights beyond the range of a byte are sums of several.
    repeats: usize,
    /// Taps and their distance in the input.
    taps: [usize; 3],
    distance: [usize; 3],
    /// Padding of the input at the beginning.
    pads: [i32; 3],
    /// Phases of the output (the stride, if transposed), and the positions before the first.
    phases: [usize; 3],
    before: [usize; 3],
    /// Rows: positions of the output, or of each phase.
    rows: [usize; 3],
    /// Input positions from one row to the next.
    pace: [usize; 3],
}

impl PackedConv {
    /// A convolution of `x` to `output` with weights of shape `weight`.
    pub fn conv(
        spec: &Conv,
        x: &[usize],
        weight: &[usize],
        output: &[usize],
    ) -> Result<PackedConv, String> {
        Ok(PackedConv::plain(spec, x, weight, output)?.with_groups_merged())
    }

    /// As [`PackedConv::conv`], of bytes; each weight is a sum of `repeats` bytes.
    pub fn of_bytes(
        spec: &Conv,
        x: &[usize],
        weight: &[usize],
        output: &[usize],
        repeats: usize,
    ) -> Result<PackedConv, String> {
        let plain = PackedConv::plain(spec, x, weight, output)?;
        Ok(PackedConv { chunk: CHUNK, repeats, ..plain }.with_groups_merged())
    }

    fn plain(
        spec: &Conv,
        x: &[usize],
        weight: &[usize],
        output: &[usize],
    ) -> Result<PackedConv, String> {
        let (sizes, pads) = checked(spec, x, weight, output)?;
        Ok(PackedConv {
            op: "Conv",
            activation: spec.activation,
            groups: spec.groups,
            channels: weight[1],
            columns: weight[0] / spec.groups,
            merged: 1,
            vec: 1,
            chunk: 8,
            repeats: 1,
            taps: sizes.kernel,
            distance: sizes.dilations,
            pads,
            phases: [1; 3],
            before: [0; 3],
            rows: sizes.output,
            pace: sizes.strides,
            sizes,
        })
    }

    /// A transposed convolution.
    pub fn transposed(
        spec: &ConvTranspose,
        x: &[usize],
        weight: &[usize],
        output: &[usize],
    ) -> Result<PackedConv, String> {
        let (sizes, pads) = checked_transposed(spec, x, weight, output)?;
        let mut conv = PackedConv {
            op: "ConvTranspose",
            activation: Activation::None,
            groups: spec.groups,
            channels: weight[0] / spec.groups,
            columns: weight[1],
            merged: 1,
            vec: 1,
            chunk: 8,
            repeats: 1,
            taps: [1; 3],
            distance: [1; 3],
            pads: [0; 3],
            phases: sizes.strides,
            before: [0; 3],
            rows: [1; 3],
            pace: [1; 3],
            sizes,
        };
        let phases = conv.phases.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        if phases.is_none_or(|phases| phases > MAX_PHASES) {
            return Err(format!("{:?} phases", conv.phases));
        }
        for (i, pad) in pads.iter().enumerate() {
            let (stride, dilation) = (conv.sizes.strides[i], conv.sizes.dilations[i]);
            let pad = usize::try_from(*pad).map_err(|_| "negative padding")?;
            conv.distance[i] = if dilation.is_multiple_of(stride) { dilation / stride } else { 1 };
            conv.taps[i] = (conv.sizes.kernel[i] - 1) * dilation / stride / conv.distance[i] + 1;
            let first = pad / stride;
            conv.before[i] = pad - first * stride;
            conv.rows[i] = (conv.sizes.output[i] - 1 + pad) / stride - first + 1;
            let reach = (conv.taps[i] - 1) * conv.distance[i];
            conv.pads[i] = i32::try_from(reach as i64 - first as i64).map_err(|_| "padding")?;
        }
        Ok(conv.with_groups_merged())
    }

    /// Chooses how many groups share a part: the fewest multiplications, counting the unused
    /// columns of a tile, and reads of few elements at a time as slower ones.
    fn with_groups_merged(mut self) -> PackedConv {
        const TILE: usize = 32;
        // Copies are of 4 bytes or more.
        let pieces: [usize; 4] = if self.chunk == CHUNK { [16, 8, 4, 1] } else { [8, 4, 2, 1] };
        let cost = |merged: usize, vec: usize| {
            let slower = match self.chunk / vec {
                1 => 1.0,
                2 => 1.4,
                4 => 2.5,
                _ => 8.0,
            };
            let depth = (merged * self.channels).next_multiple_of(vec);
            let columns = (merged * self.columns).next_multiple_of(TILE);
            (self.groups / merged * columns * depth) as f64 * slower
        };
        let mut best = (f64::INFINITY, 1, 1);
        for merged in (1..=self.groups).filter(|merged| self.groups.is_multiple_of(*merged)) {
            for vec in pieces {
                // Only the last channels of a pixel may be rounded up.
                let even = (merged * self.channels).is_multiple_of(vec);
                if even || merged == self.groups {
                    let cost = cost(merged, vec);
                    best = if cost <= best.0 { (cost, merged, vec) } else { best };
                }
            }
        }
        (self.merged, self.vec) = (best.1, best.2);
        self
    }

    /// Input channels of a part, rounded up.
    fn part_channels(&self) -> usize {
        (self.merged * self.channels).next_multiple_of(self.vec)
    }

    /// Output channels of a part. One part may write those that round its pixels up: zeros.
    fn part_columns(&self, rounded: bool) -> usize {
        let columns = self.merged * self.columns;
        match (rounded, self.chunk) {
            (true, CHUNK) => weight_rows(columns),
            (true, _) => columns.next_multiple_of(8),
            (false, _) => columns,
        }
    }

    /// The depth without repetitions.
    fn single_depth(&self) -> usize {
        self.taps.iter().product::<usize>() * self.part_channels()
    }

    fn depth(&self) -> usize {
        self.repeats * self.single_depth()
    }

    fn weight_row(&self) -> usize {
        self.depth().next_multiple_of(self.chunk)
    }

    /// Elements of the packed weights; rows of a single part are rounded up to eight.
    pub fn weight_len(&self) -> usize {
        let phases: usize = self.phases.iter().product();
        let columns = self.part_columns(self.is_single());
        self.groups / self.merged * phases * columns * self.weight_row()
    }

    /// Whether all groups are one part.
    pub fn is_single(&self) -> bool {
        self.groups == self.merged
    }

    /// Whether most work is one filter per channel: a product is the wrong kernel.
    pub fn is_depthwise(&self) -> bool {
        self.groups > 1 && self.channels == 1 && self.columns < 8
    }

    /// The channels of a pixel that the kernel reads, beyond those of `x`.
    pub fn slack(&self) -> usize {
        if self.is_single() { self.part_channels() - self.channels * self.groups } else { 0 }
    }

    /// A name of the packing.
    pub fn packing(&self) -> String {
        format!(
            "{} g{} m{} v{} p{:?} t{:?} d{:?}",
            self.op,
            self.groups,
            self.merged,
            self.vec,
            self.phases,
            self.taps,
            self.sizes.dilations
        )
    }

    /// Whether the kernel reads this view as it is, in pieces of at least `vec` elements.
    pub fn reads(&self, x: &View) -> bool {
        let slack = x.slack >= self.slack();
        let channels = x.shape[1] == 1 || x.strides[1] == 1;
        let even = |axis: usize| x.shape[axis] == 1 || x.strides[axis].is_multiple_of(self.vec);
        let outer = (0..x.shape.len()).filter(|axis| *axis != 1).all(even);
        slack && channels && outer && x.offset.is_multiple_of(self.vec)
    }

    /// The elements read at a time where the input is copied anyway.
    pub fn rounding(&self) -> usize {
        if self.vec == 4 && self.is_single() && self.channels <= 4 { 4 } else { self.chunk }
    }

    /// The weights as parts, phases, output channels, taps and input channels; the last two rounded
    /// up to whole rows.
    pub fn pack(&self, tensor: &Tensor, element: Element) -> Option<Vec<u8>> {
        let values = content::floats(tensor)?;
        let mut packed = vec![0f32; self.weight_len()];
        self.place_all(|at, to| packed[to] = values[at]);
        floats_as(&packed, element)
    }

    /// As [`PackedConv::pack`], of integers as sums of bytes.
    pub fn pack_bytes(&self, values: &[i16]) -> Vec<u8> {
        let mut packed = vec![0; self.weight_len()];
        self.place_all(|at, to| {
            let mut rest = values[at];
            for repeat in 0..self.repeats {
                let byte = rest.clamp(i8::MIN.into(), i8::MAX.into());
                packed[to + repeat * self.single_depth()] = byte as i8 as u8;
                rest -= byte;
            }
        });
        packed
    }

    /// Calls `put` with the index of every weight and its place among the packed ones.
    fn place_all(&self, mut put: impl FnMut(usize, usize)) {
        let places: usize = self.sizes.kernel.iter().product();
        for group in 0..self.groups {
            for column in 0..self.columns {
                for channel in 0..self.channels {
                    let at = if self.op == "Conv" {
                        (group * self.columns + column) * self.channels + channel
                    } else {
                        (group * self.channels + channel) * self.columns + column
                    };
                    for tap in 0..places {
                        put(at * places + tap, self.place(group, column, channel, tap));
                    }
                }
            }
        }
    }

    /// Where a weight is in the packed ones.
    fn place(&self, group: usize, column: usize, channel: usize, tap: usize) -> usize {
        let [_, h, w] = self.sizes.kernel;
        let position = [tap / (h * w), tap / w % h, tap % w];
        let (mut phase, mut place) = (0, 0);
        for (i, at) in position.iter().enumerate() {
            let mut step = *at;
            if self.op == "ConvTranspose" {
                let far = at * self.sizes.dilations[i];
                let stride = self.phases[i];
                phase = phase * stride + far % stride;
                step = self.taps[i] - 1 - far / stride / self.distance[i];
            }
            place = place * self.taps[i] + step;
        }
        let phases: usize = self.phases.iter().product();
        let columns = self.part_columns(self.is_single());
        let (part, inside) = (group / self.merged, group % self.merged);
        let row = (part * phases + phase) * columns + inside * self.columns + column;
        row * self.weight_row() + place * self.part_channels() + inside * self.channels + channel
    }

    /// The step; `weight` is packed, `bias` a row. With `rounded`, `bias` and the pixels of
    /// `output` and `residual` have room for channels rounded up to eight.
    pub fn work(
        &self,
        target: &GpuTarget,
        (x, weight): (&View, &View),
        (bias, residual): (Option<&View>, Option<&View>),
        output: &View,
        rounded: bool,
    ) -> Result<StepDraft, String> {
        check(x, weight, Extra { bias, residual }, output)?;
        let views = Views { a: x, b: weight, bias, residual, output };
        if !multiplies(&views) {
            return Err("tensor cores multiply 16-bit numbers".to_string());
        }
        let loops = self.loops(&views, rounded && self.is_single());
        let epilogue = Epilogue { alpha: 1.0, beta: 1.0, activation: self.activation };
        let drafts = loops.drafts(target, &views, epilogue)?;
        let signature = format!(
            "{} {} to {}",
            self.description(),
            describe_all(&views.reads()),
            describe_all(&[output])
        );
        // Useful operations: zeros between groups and phases do not count.
        let taps: usize = self.sizes.kernel.iter().product();
        let rows = if self.op == "Conv" { output.len() } else { x.len() };
        let other = if self.op == "Conv" { self.channels } else { self.columns };
        let flops = (rows as u64).saturating_mul(2 * (other * taps) as u64);
        Ok(finished(self.op, signature, drafts, flops, &views))
    }

    /// Sizes of input and output, window and channels of a plain convolution of images with one
    /// part; `None` for others.
    pub(super) fn as_image(&self) -> Option<([[usize; 2]; 2], Window2, usize)> {
        let last = |all: [usize; 3]| [all[1], all[2]];
        let pad = |at: usize| usize::try_from(self.pads[at]).ok();
        let window = Window2 {
            kernel: last(self.taps),
            stride: last(self.pace),
            pad: [pad(1)?, pad(2)?],
            dilation: last(self.distance),
        };
        let flat = self.sizes.rank == 2 && self.groups == 1 && self.repeats == 1;
        let sizes = [last(self.sizes.input), last(self.sizes.output)];
        (flat && self.op == "Conv").then_some((sizes, window, self.part_channels()))
    }

    /// The convolution without its operands.
    pub(super) fn description(&self) -> String {
        format!(
            "{} {:?} to {:?} {:?} s{:?} p{:?} {}",
            self.packing(),
            self.sizes.input,
            self.sizes.output,
            self.activation,
            self.pace,
            self.pads,
            self.before.map(|before| before.to_string()).join(","),
        )
    }

    pub(super) fn loops(&self, views: &Views, rounded: bool) -> TensorLoops {
        let Views { a: x, bias, residual, output, .. } = *views;
        let transposed = self.op == "ConvTranspose";
        let columns = self.part_columns(rounded);
        let stored = self.part_columns(self.is_single()) * self.weight_row();
        let spatial = |view: &View| three(&view.strides[2..], 0);
        let (from, to) = (spatial(x), spatial(output));
        let over = residual.map_or([0; 3], spatial);
        let bias_stride = bias.map_or(0, |bias| bias.strides[0]);
        let residual_channel = residual.map_or(0, |view| view.strides[1]);
        let leaves = |axis: usize| {
            let last = (self.rows[axis] - 1) * self.pace[axis]
                + (self.taps[axis] - 1) * self.distance[axis];
            let exact = self.before[axis] == 0
                && self.rows[axis] * self.phases[axis] == self.sizes.output[axis];
            self.pads[axis] != 0 || last >= self.sizes.input[axis] || (transposed && !exact)
        };
        // Phases of the last axis are adjacent columns where its pixels are adjacent in the output.
        let adjacent = transposed
            && self.phases[2] > 1
            && self.is_single()
            && columns.is_multiple_of(8)
            && output.strides[1] == 1
            && to[2] == columns;
        let mut kept: Vec<usize> = (0..3).filter(|axis| leaves(*axis)).collect();
        if adjacent && !kept.is_empty() && !kept.contains(&2) {
            kept.push(2);
        }
        let coordinate = |axis: usize, step: usize| -> Vec<usize> {
            kept.iter().map(|other| if *other == axis { step } else { 0 }).collect()
        };
        let nothing = vec![0; kept.len()];

        let phases: usize = self.phases.iter().product();
        let mut part = LoopNest { loops: Vec::new(), operands: 5 + kept.len() };
        let push = |nest: &mut LoopNest, size: usize, strides: Vec<usize>, more: Vec<usize>| {
            if size != 1 {
                nest.push(size, [strides, more].concat());
            }
        };
        let moved = vec![
            self.merged * self.channels,
            phases * stored,
            self.merged * self.columns * bias_stride,
            self.merged * self.columns * output.strides[1],
            self.merged * self.columns * residual_channel,
        ];
        push(&mut part, self.groups / self.merged, moved, nothing.clone());
        let mut after = phases;
        for (axis, stride) in to.iter().enumerate() {
            after /= self.phases[axis];
            let strides = vec![0, after * stored, 0, *stride, 0];
            if !(adjacent && axis == 2) {
                push(&mut part, self.phases[axis], strides, coordinate(axis, 1));
            }
        }

        let mut row = LoopNest { loops: Vec::new(), operands: 4 + kept.len() };
        let images = residual.map_or(0, |view| view.strides[0]);
        let first = vec![x.strides[0], 0, output.strides[0], images];
        push(&mut row, x.shape[0], first, nothing.clone());
        for axis in 0..3 {
            let pace = self.pace[axis];
            let strides = vec![from[axis] * pace, 0, to[axis] * self.phases[axis], over[axis]];
            push(&mut row, self.rows[axis], strides, coordinate(axis, pace));
        }

        let mut inner = LoopNest { loops: Vec::new(), operands: 2 + kept.len() };
        let mut below = self.single_depth();
        push(&mut inner, self.repeats, vec![0, below], nothing.clone());
        for (axis, stride) in from.iter().enumerate() {
            below /= self.taps[axis];
            let distance = self.distance[axis];
            let strides = vec![stride * distance, below];
            push(&mut inner, self.taps[axis], strides, coordinate(axis, distance));
        }
        push(&mut inner, self.part_channels(), vec![1, 1], nothing);

        let axis = |axis: &usize| Axis {
            size: self.sizes.input[*axis],
            pad: self.pads[*axis],
            out_size: self.sizes.output[*axis],
            step: self.phases[*axis],
            before: self.before[*axis],
        };
        let shift = |at: usize| i64::from(self.pads[at]) * from[at] as i64;
        let back = |at: usize| (self.before[at] * to[at]) as i64;
        TensorLoops {
            part: part.merged(),
            row: row.merged(),
            inner: inner.merged(),
            columns: if adjacent { columns * self.phases[2] } else { columns },
            depth: self.depth(),
            column: [self.weight_row(), bias_stride, output.strides[1], residual_channel],
            axes: kept.iter().map(axis).collect(),
            a_shift: -(0..3).map(shift).sum::<i64>(),
            out_shift: -(0..3).map(back).sum::<i64>(),
            phases: transposed && (adjacent || !kept.is_empty()),
            phase_columns: adjacent.then_some(columns),
            constant: true,
        }
    }
}
