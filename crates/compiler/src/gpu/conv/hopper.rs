//! Variants of a product for Hopper's own instructions (`kernels/hopper.cuh`).

use model::gpu::{CopyShape, GpuTarget, MemoryLocation, TensorMap};

use super::super::args::{Address, ArgsWriter};
use super::super::draft::{KernelText, LaunchDraft};
use super::super::loop_nest::address;
use super::super::lowering::Lowering;
use super::super::packing;
use super::super::tile::{SplitReduction, Tile, Variant, fitted, overlapped_us, weights_us};
use super::super::view::View;
use super::{Product, Window2};

/// The only capability with these instructions; its successors have others.
const CAPABILITY: u32 = 90;

/// Depth of a step: a swizzled row of 128 bytes.
const DEPTH: usize = 64;

/// Less work than this is not worth the time to compile and measure the kernels.
const FLOPS_MIN: u64 = 200_000_000;

/// `HopperConfig`: outputs per tile, warpgroups that share it, stages and blocks per SM. With one
/// warpgroup per tile, two of them alternate, and the tile of a best-effort launch is two output
/// tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    bm: usize,
    bn: usize,
    groups: (usize, usize),
    stages: usize,
    blocks: usize,
}

const fn shape(
    bm: usize,
    bn: usize,
    groups: (usize, usize),
    stages: usize,
    blocks: usize,
) -> Shape {
    Shape { bm, bn, groups, stages, blocks }
}

static SHAPES: [Shape; 7] = [
    shape(256, 128, (2, 1), 4, 1),
    shape(128, 192, (2, 1), 5, 1),
    shape(128, 128, (1, 1), 6, 1),
    shape(128, 128, (2, 1), 3, 2),
    shape(256, 64, (2, 1), 5, 1),
    shape(128, 64, (2, 1), 8, 1),
    shape(128, 64, (2, 1), 4, 2),
];

/// Shapes for bytes. Their end takes more registers than two large blocks of an SM have.
const BYTE_SHAPES: [Shape; 7] = [
    shape(256, 128, (2, 1), 4, 1),
    shape(128, 192, (2, 1), 5, 1),
    shape(128, 128, (1, 1), 6, 1),
    shape(128, 128, (2, 1), 6, 1),
    shape(128, 64, (1, 1), 8, 1),
    shape(128, 64, (2, 1), 8, 1),
    shape(128, 64, (2, 1), 4, 2),
];

/// Every shape as it appears in a kernel's type, for tests that all are tried.
pub fn shapes() -> Vec<String> {
    SHAPES.iter().map(Shape::parameters).collect()
}

impl Shape {
    fn parameters(&self) -> String {
        let Shape { bm, bn, groups, stages, blocks } = self;
        format!("{bm}, {bn}, {}, {}, {stages}, {blocks}", groups.0, groups.1)
    }

    fn alternates(&self) -> bool {
        self.groups == (1, 1)
    }

    /// Output tiles of a launch's tile.
    fn tiles(&self) -> usize {
        if self.alternates() { 2 } else { 1 }
    }

    fn threads(&self) -> usize {
        self.groups.0 * self.groups.1 * self.tiles() * 128 + 32
    }

    /// `kShared` of `HopperConfig`: stages, two barriers and a word for each and for the second
    /// tile, and what aligns them.
    fn shared_bytes(&self) -> usize {
        self.stages * (self.bm + self.bn) * DEPTH * 2 + (self.stages + 1) * 20 + 1024
    }

    /// Whether a thread has registers for its sums and for a residual of this many bytes an
    /// element, which is loaded before the sums are known: single bytes for two tiles.
    fn fits_residual(&self, bytes: usize) -> bool {
        const WORDS_MAX: usize = 124;
        let sums = self.bm * self.bn / (self.groups.0 * self.groups.1 * 128);
        let loaded = if bytes == 1 { 2 } else { bytes };
        bytes == 0 || sums + sums * loaded / 4 <= WORDS_MAX
    }

    fn name(&self) -> String {
        let how = match (self.alternates(), self.blocks) {
            (true, _) => "a",
            (false, 1) => "",
            (false, _) => "p",
        };
        format!("h{}x{}x{DEPTH}{how}", self.bm, self.bn)
    }

    fn kernel(&self, window: bool, act: i32) -> KernelText {
        KernelText {
            source: "#include \"hopper.cuh\"\n".to_string(),
            expression: format!(
                "tiles::HopperConv<tiles::HopperConfig<{}, {window}, {act}>>",
                self.parameters()
            ),
            threads: self.threads() as u32,
            shared_bytes: self.shared_bytes() as u32,
        }
    }

    /// The part of `ConvArgs` that depends on the tile.
    fn variant(&self) -> Variant {
        let Shape { bm, bn, stages, .. } = *self;
        let tile = Tile { bm, bn, bk: DEPTH, warps: (8, 1, 1), stages, vec: 8 };
        Variant { tile, splits: 1, reduction: SplitReduction::Whole }
    }
}

/// A variant for Hopper before its launch is written.
pub(super) struct Candidate<'a> {
    shape: &'a Shape,
    input: InputMap,
    multiprocessors: usize,
}

impl Candidate<'_> {
    /// Whether real-time blocks overlap the end of a tile with the next one.
    pub(super) fn overlaps(&self) -> bool {
        self.shape.alternates()
    }

    pub(super) fn shared_bytes(&self) -> usize {
        self.shape.shared_bytes()
    }

    /// Its launch.
    pub(super) fn draft(&self, product: &Product) -> LaunchDraft {
        product.hopper_draft(self.shape, &self.input, self.multiprocessors)
    }
}

/// The variants for Hopper with their estimates.
pub(super) fn candidates(product: &Product, target: &GpuTarget) -> Vec<(f64, Candidate<'static>)> {
    if target.capability != CAPABILITY {
        return Vec::new();
    }
    let Some(input) = InputMap::of(product) else { return Vec::new() };
    let multiprocessors = (target.multiprocessors as usize).max(1);
    let suited = SHAPES.iter().filter(|shape| product.suits(shape, multiprocessors));
    let candidate = |shape: &'static Shape| {
        let estimate = product.estimate_us(shape, multiprocessors);
        (estimate, Candidate { shape, input, multiprocessors })
    };
    suited.map(candidate).collect()
}

/// A product of bytes over packed images, or over the rows of a matrix: one pixel each.
pub(in crate::gpu) struct ByteImages {
    /// The activations; channels are adjacent.
    pub input: View,
    /// Rows and columns of an image, and of a result.
    pub in_size: [usize; 2],
    /// See above.
    pub out_size: [usize; 2],
    /// Bytes of a pixel that are multiplied, and from one pixel to the next.
    pub channels: usize,
    /// See above.
    pub pixel: usize,
    /// The window.
    pub window: Window2,
    /// Results, all images together.
    pub rows: usize,
    /// Columns of the product.
    pub columns: usize,
    /// Elements from one row of the output to the next.
    pub out_stride: usize,
    /// As above, of the residual.
    pub residual_stride: usize,
    /// Rows of the depth, of [`packing::weight_rows`] columns.
    pub weight: Address,
    /// Its bytes.
    pub weight_bytes: usize,
}

/// The end of a product of bytes.
pub(in crate::gpu) struct ByteEnding {
    /// The includes.
    pub source: String,
    /// `ByteEnding` of `kernels/byte_end.cuh`.
    pub name: String,
    /// `ByteEnd`.
    pub args: ArgsWriter,
    /// `ByteVectors`.
    pub vectors: usize,
    /// Bytes of an element of the residual, or zero.
    pub residual_bytes: usize,
    /// The output.
    pub output: View,
}

/// The variants of a product of bytes for Hopper (`kernels/hopper_bytes.cuh`) with their estimates.
/// Pairs of bytes are halves to the copy engine.
pub(in crate::gpu) fn byte_drafts(
    images: &ByteImages,
    ending: &ByteEnding,
    target: &GpuTarget,
) -> Vec<(f64, LaunchDraft)> {
    let even = images.channels.is_multiple_of(16) && images.pixel.is_multiple_of(16);
    if target.capability != CAPABILITY || !even || !images.input.offset.is_multiple_of(16) {
        return Vec::new();
    }
    let product = Product {
        name: "bytes",
        input: images.input.clone(),
        in_h: images.in_size[0],
        in_w: images.in_size[1],
        in_c: images.channels / 2,
        in_stride: images.pixel / 2,
        window: images.window,
        out_h: images.out_size[0],
        out_w: images.out_size[1],
        out_c: images.columns,
        out_stride: images.out_stride,
        output: ending.output.clone(),
        rows: images.rows,
        // Only its stride is used.
        residual: Some((ending.output.clone(), images.residual_stride)),
        weight: 0,
        weight_bytes: images.weight_bytes,
        bias: None,
        normalize: None,
        act: 0,
        vec: 8,
    };
    let Some(input) = InputMap::of(&product) else { return Vec::new() };
    let multiprocessors = (target.multiprocessors as usize).max(1);
    let suited = BYTE_SHAPES
        .iter()
        .filter(|shape| !product.wastes(shape) && shape.fits_residual(ending.residual_bytes));
    let draft = |shape: &Shape| {
        let estimate = product.estimate_us(shape, multiprocessors);
        (estimate, product.byte_draft(shape, &input, multiprocessors, images, ending))
    };
    suited.map(draft).collect()
}

/// How the copy engine reads the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InputMap {
    /// Rows of a matrix.
    Rows,
    /// Taps of a window: as in [`CopyShape::Pixels`].
    Window { first: [i32; 2], last: [i32; 2], steps: [u32; 2] },
}

impl InputMap {
    /// `None` where the copy engine cannot read it.
    fn of(product: &Product) -> Option<InputMap> {
        let flops = 2 * product.rows as u64 * product.out_c as u64 * product.depth() as u64;
        // A box of weights is 32 rows, all of which must exist.
        let weights = packing::weight_rows(product.out_c).is_multiple_of(32);
        if product.vec != 8 || product.normalize.is_some() || !weights || flops < FLOPS_MIN {
            return None;
        }
        let (input, output) = ([product.in_h, product.in_w], [product.out_h, product.out_w]);
        InputMap::of_window(&product.window, input, output)
    }

    /// Over `input` rows and columns, to `output` rows and columns. `None` beyond the limits of a
    /// map: corners are 8 bits with a sign, offsets of taps 8 bits without, steps at most eight.
    fn of_window(window: &Window2, input: [usize; 2], output: [usize; 2]) -> Option<InputMap> {
        let Window2 { kernel, stride, pad, dilation } = *window;
        if kernel == [1, 1] && stride == [1, 1] && pad == [0, 0] {
            return Some(InputMap::Rows);
        }
        let (mut first, mut last, mut steps) = ([0; 2], [0; 2], [0; 2]);
        // Columns come first.
        for (to, axis) in [(0, 1), (1, 0)] {
            let corner = |x: i64| i8::try_from(x).ok().map(i32::from);
            let before = i64::try_from(pad[axis]).ok()?;
            let end =
                i64::try_from(output[axis].checked_sub(1)?.checked_mul(stride[axis])?).ok()?;
            let size = i64::try_from(input[axis]).ok()?;
            first[to] = corner(-before)?;
            last[to] = corner(end - before - (size - 1))?;
            steps[to] = u32::try_from(stride[axis]).ok().filter(|step| *step <= 8)?;
            u8::try_from(kernel[axis].checked_sub(1)?.checked_mul(dilation[axis])?).ok()?;
        }
        Some(InputMap::Window { first, last, steps })
    }

    fn is_window(&self) -> bool {
        matches!(self, InputMap::Window { .. })
    }
}

impl Product {
    fn hopper_tiles(&self, shape: &Shape) -> usize {
        self.rows.div_ceil(shape.bm) * self.out_c.div_ceil(shape.bn)
    }

    /// Depth steps of a tile: each is within one tap.
    fn hopper_steps(&self) -> usize {
        self.window.kernel[0] * self.window.kernel[1] * self.in_c.div_ceil(DEPTH)
    }

    /// Whether a tile is not much larger than the output, nor narrow where there are enough wide
    /// ones.
    fn suits(&self, shape: &Shape, multiprocessors: usize) -> bool {
        let narrow = shape.bn <= 64 && self.out_c > 64;
        let many = self.hopper_tiles(shape) > 8 * multiprocessors;
        !(self.wastes(shape) || narrow && many)
    }

    fn wastes(&self, shape: &Shape) -> bool {
        self.hopper_tiles(shape) * shape.bm * shape.bn * 2 > self.rows * self.out_c * 3
    }

    /// An estimate of the time, comparable to those of the other variants: an SM computes its
    /// tiles one after another, at the rate of its tensor cores, of its share of L2, or of copies
    /// that wait for a free stage, unless the weights take longer from memory.
    fn estimate_us(&self, shape: &Shape, multiprocessors: usize) -> f64 {
        let rounds = self.hopper_tiles(shape).div_ceil(multiprocessors);
        let resident = rounds.min(shape.blocks);
        let step = ((2 * shape.bm * shape.bn * DEPTH) as f64 / fitted::HOPPER_FLOPS)
            .max(((shape.bm + shape.bn) * DEPTH * 2) as f64 / fitted::HOPPER_L2_BYTES)
            .max(fitted::HOPPER_LATENCY_US / (shape.stages * resident.max(1)) as f64);
        // An epilogue overlaps the products of another block or warpgroup.
        let overlapped = resident > 1 || (shape.alternates() && rounds > 1);
        let faster = if overlapped { fitted::HOPPER_OVERLAP } else { 1.0 };
        let epilogue = (shape.bm * shape.bn) as f64 / (fitted::HOPPER_OUTPUTS * faster);
        let work = rounds as f64 * (self.hopper_steps() as f64 * step + epilogue);
        let weights = weights_us(self.weight_bytes, self.hopper_tiles(shape), multiprocessors);
        fitted::HOPPER_LAUNCH_US + overlapped_us(work, weights)
    }

    fn hopper_draft(&self, shape: &Shape, input: &InputMap, multiprocessors: usize) -> LaunchDraft {
        let (args, at) = self.hopper_args(shape, self.args(&shape.variant()));
        let kernel = shape.kernel(input.is_window(), self.act);
        let weight = Lowering::weight_address(self.weight);
        self.mapped(shape, input, multiprocessors, (kernel, args), (weight, at))
    }

    /// `HopperArgs`, and where its maps are.
    fn hopper_args(&self, shape: &Shape, conv: ArgsWriter) -> (ArgsWriter, [u32; 2]) {
        let mut args = ArgsWriter::new();
        let at = [args.map(), args.map()];
        args.nested(conv);
        args.int(self.hopper_tiles(shape)).int(self.hopper_steps());
        (args, at)
    }

    /// A draft with its maps.
    fn mapped(
        &self,
        shape: &Shape,
        input: &InputMap,
        multiprocessors: usize,
        (kernel, args): (KernelText, ArgsWriter),
        (weight, at): (Address, [u32; 2]),
    ) -> LaunchDraft {
        let output_tiles = self.hopper_tiles(shape);
        let tiles = output_tiles.div_ceil(shape.tiles());
        let mut draft = LaunchDraft::plain(kernel, tiles, args);
        draft.variant = shape.name();
        draft.overlaps = shape.alternates();
        draft.rt_blocks = output_tiles.min(multiprocessors * shape.blocks);
        draft.maps = vec![
            (address(&self.input), self.input_map(at[0], shape, input)),
            (weight, self.weight_map(at[1], shape)),
        ];
        draft
    }

    fn byte_draft(
        &self,
        shape: &Shape,
        input: &InputMap,
        multiprocessors: usize,
        images: &ByteImages,
        ending: &ByteEnding,
    ) -> LaunchDraft {
        let mut conv = self.args(&shape.variant());
        // The copy engine reads the operands, the end has the other addresses.
        conv.forget_addresses();
        let (product, at) = self.hopper_args(shape, conv);
        let mut args = ArgsWriter::new();
        args.nested(product);
        args.nested(ending.args.clone());
        args.int(ending.vectors);
        let window = input.is_window();
        let kernel = KernelText {
            source: ending.source.clone(),
            expression: format!(
                "tiles::HopperBytes<tiles::HopperConfig<{}, {window}>, {}>",
                shape.parameters(),
                ending.name
            ),
            threads: shape.threads() as u32,
            shared_bytes: shape.shared_bytes() as u32,
        };
        self.mapped(shape, input, multiprocessors, (kernel, args), (images.weight, at))
    }

    fn input_map(&self, at: u32, shape: &Shape, input: &InputMap) -> TensorMap {
        let pixel = self.in_stride as u64 * 2;
        let (sizes, strides, copy) = match *input {
            InputMap::Rows => (
                vec![self.in_c as u64, self.rows as u64],
                vec![pixel],
                CopyShape::Box(vec![DEPTH as u32, shape.bm as u32]),
            ),
            InputMap::Window { first, last, steps } => {
                let (h, w) = (self.in_h as u64, self.in_w as u64);
                let images = self.rows / (self.out_h * self.out_w).max(1);
                (
                    vec![self.in_c as u64, w, h, images as u64],
                    vec![pixel, w * pixel, h * w * pixel],
                    CopyShape::Pixels { count: shape.bm as u32, first, last, steps },
                )
            }
        };
        TensorMap { at, to: MemoryLocation::Arrivals, sizes, strides, copy }
    }

    /// Rows in the order in which the sums of a thread are eight consecutive channels: of row
    /// `32 g + 8 q + 2 j + e`, the box has `e` fastest, then `q`, `j` and `g`.
    fn weight_map(&self, at: u32, shape: &Shape) -> TensorMap {
        let depth = self.depth() as u64;
        let row = depth.next_multiple_of(8) * 2;
        TensorMap {
            at,
            to: MemoryLocation::Arrivals,
            sizes: vec![depth, 2, 4, 4, self.out_c.div_ceil(32) as u64],
            strides: vec![row, 8 * row, 2 * row, 32 * row],
            copy: CopyShape::Box(vec![DEPTH as u32, 2, 4, 4, (shape.bn / 32) as u32]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(kernel: usize, stride: usize, pad: usize, dilation: usize) -> Window2 {
        Window2 { kernel: [kernel; 2], stride: [stride; 2], pad: [pad; 2], dilation: [dilation; 2] }
    }

    #[test]
    fn a_window_is_mapped_from_its_first_to_its_last_output_pixel() {
        let same = InputMap::of_window(&window(3, 1, 1, 1), [14, 20], [14, 20]);
        let (first, last) = ([-1, -1], [-1, -1]);
        assert_eq!(same, Some(InputMap::Window { first, last, steps: [1, 1] }));
        // The last of eight rows starts at 2 * 7 - 1 = 13 of 15, that of nine columns at 15 of 17.
        let halved = InputMap::of_window(&window(3, 2, 1, 1), [15, 17], [8, 9]);
        let (first, last) = ([-1, -1], [-1, -1]);
        assert_eq!(halved, Some(InputMap::Window { first, last, steps: [2, 2] }));
        let uneven = InputMap::of_window(&window(2, 2, 0, 1), [28, 31], [14, 15]);
        let (first, last) = ([0, 0], [-2, -1]);
        assert_eq!(uneven, Some(InputMap::Window { first, last, steps: [2, 2] }));
        assert_eq!(InputMap::of_window(&window(1, 1, 0, 1), [1, 9], [1, 9]), Some(InputMap::Rows));
    }

    #[test]
    fn windows_beyond_the_limits_of_a_map_have_none() {
        let mapped = |window: Window2, pixels: usize| {
            let reach = (window.kernel[0] - 1) * window.dilation[0];
            let output = (pixels + 2 * window.pad[0] - reach - 1) / window.stride[0] + 1;
            InputMap::of_window(&window, [pixels; 2], [output; 2]).is_some()
        };
        assert!(mapped(window(3, 1, 36, 36), 65));
        assert!(mapped(window(3, 8, 1, 1), 65) && !mapped(window(3, 9, 1, 1), 65));
        assert!(mapped(window(3, 1, 128, 120), 300) && !mapped(window(3, 1, 129, 120), 300));
        assert!(!mapped(window(3, 1, 128, 128), 300), "a tap 256 pixels away");
        assert!(!mapped(window(3, 1, 0, 100), 300), "the last corner is 200 pixels inside");
    }
}
