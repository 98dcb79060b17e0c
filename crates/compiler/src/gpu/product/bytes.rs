//! Products of bytes on tensor cores (`kernels/bytes.cuh`): matrix products with a packed weight,
//! and convolutions.

use model::gpu::{GpuTarget, MemoryLocation};
use model::op::Activation;

use super::super::args::{Address, ArgsWriter};
use super::super::conv::Window2;
use super::super::conv::hopper::{ByteEnding, ByteImages, byte_drafts};
use super::super::draft::{KernelText, LaunchDraft, StepDraft};
use super::super::loop_nest::{
    LoopNest, MAX_ITEMS, MAX_RANK, address, check_output, check_view, describe, describe_all,
    include,
};
use super::super::tile::{self, InputAccess, SplitReduction, Variant};
use super::super::view::{Element, View};
use super::packed::PackedConv;
use super::tensor::TensorLoops;
use super::{Views, activation_numbers};

/// Bytes that are copied at once; rows of packed weights are multiples of it.
pub const CHUNK: usize = 16;

/// How real numbers are bytes: `real = (byte - zero) * scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantum {
    /// The distance of two neighbours.
    pub scale: f32,
    /// The byte of zero.
    pub zero: i32,
    /// `U8` or `I8`.
    pub element: Element,
}

impl Quantum {
    fn bounds(&self) -> (f32, f32) {
        if self.element == Element::U8 { (0.0, 255.0) } else { (-128.0, 127.0) }
    }
}

/// Parameters of each column, and what is known only when the step runs.
#[derive(Clone, Debug, Default)]
pub struct ByteColumns {
    /// `I32`: what is added to the sums.
    pub offset: Option<View>,
    /// `F32`: what the sums are multiplied by.
    pub scale: Option<View>,
    /// `F32`: what is added then.
    pub bias: Option<View>,
    /// The zero point of `a` if it is known only now, with the sums of the weights as `I32`.
    pub zero: Option<(View, View)>,
    /// An `F32` that every scale is multiplied by.
    pub factor: Option<View>,
}

/// What follows a product of bytes.
#[derive(Clone, Debug)]
pub struct ByteEpilogue {
    /// Of the product.
    pub activation: Activation,
    /// The product is rounded to this before the residual is added.
    pub between: Option<Quantum>,
    /// What is added; with its quantum if it is bytes.
    pub residual: Option<(View, Option<Quantum>)>,
    /// Of the sum.
    pub after: Activation,
    /// How the result is stored, if it is bytes.
    pub output: Option<Quantum>,
}

impl Default for ByteEpilogue {
    fn default() -> Self {
        let (activation, after) = (Activation::None, Activation::None);
        ByteEpilogue { activation, between: None, residual: None, after, output: None }
    }
}

/// A product of bytes with its operands.
pub struct ByteProduct<'a> {
    /// `U8` or `I8`.
    pub a: &'a View,
    /// Packed, `I8`.
    pub weight: &'a View,
    /// Of the columns.
    pub columns: &'a ByteColumns,
    /// What follows.
    pub epilogue: &'a ByteEpilogue,
    /// Where the result goes: bytes, floats, or plain sums as `I32`.
    pub output: &'a View,
    /// The byte outside an image.
    pub outside: u8,
}

impl ByteProduct<'_> {
    /// `output = a @ weight`: rows of the weight are columns of the product, `repeats` times the
    /// depth of `a`, rounded up to [`CHUNK`].
    pub fn matmul(&self, target: &GpuTarget, repeats: usize) -> Result<StepDraft, String> {
        let (a, output) = (self.a, self.output);
        let wrong = || format!("a product of {:?} as {:?}", a.shape, output.shape);
        let (Some(depth), Some(columns)) = (a.shape.last(), output.shape.last()) else {
            return Err(wrong());
        };
        let rank = output.shape.len();
        if a.shape.len() != rank || a.shape[..rank - 1] != output.shape[..rank - 1] {
            return Err(wrong());
        }
        let residual = self.residual_strides()?;
        let outer = |strides: &[usize]| strides[..rank - 1].to_vec();
        let none = vec![0; rank - 1];
        let row = LoopNest::new(
            &output.shape[..rank - 1],
            &[outer(&a.strides), none, outer(&output.strides), outer(&residual)],
        );
        let mut inner = LoopNest { loops: Vec::new(), operands: 2 };
        if repeats > 1 {
            inner.push(repeats, vec![0, *depth]);
        }
        inner.push(*depth, vec![a.strides[rank - 1], 1]);
        let depth = repeats * depth;
        let loops = TensorLoops {
            part: LoopNest { loops: Vec::new(), operands: 5 },
            row: row.merged(),
            inner,
            columns: *columns,
            depth,
            column: [
                depth.next_multiple_of(CHUNK),
                1,
                output.strides[rank - 1],
                residual[rank - 1],
            ],
            axes: Vec::new(),
            a_shift: 0,
            out_shift: 0,
            phases: false,
            phase_columns: None,
            constant: true,
        };
        let images = self.rows_as_images(&loops);
        self.work(target, "MatMul", &loops, &format!("{columns}x{depth}"), images)
    }

    /// The convolution `conv`, whose weights are packed by it.
    pub fn conv(&self, target: &GpuTarget, conv: &PackedConv) -> Result<StepDraft, String> {
        self.residual_strides()?;
        let vector = View { shape: vec![1], strides: vec![1], ..self.weight.clone() };
        let views = Views {
            a: self.a,
            b: self.weight,
            bias: Some(&vector),
            residual: self.epilogue.residual.as_ref().map(|(view, _)| view),
            output: self.output,
        };
        let loops = conv.loops(&views, false);
        let images = self.packed_images(&loops, conv);
        self.work(target, "Conv", &loops, &conv.description(), images)
    }

    /// A matrix product as one of pixels; `None` where rows are not at even distances.
    fn rows_as_images(&self, loops: &TensorLoops) -> Option<ByteImages> {
        let stride = |operand: usize| match &loops.row.loops[..] {
            [] => Some(0),
            [each] => Some(each.strides[operand]),
            _ => None,
        };
        let [depth] = &loops.inner.loops[..] else { return None };
        // A depth that is not whole would be read from the next row.
        let whole = depth.strides[0] == 1 && depth.size.is_multiple_of(CHUNK);
        let rows = loops.row.len();
        self.images(loops, [[rows, 1]; 2], (depth.size, stride(0)?), Window2::point())
            .filter(|_| whole)
            .map(|images| ByteImages {
                out_stride: stride(2).unwrap_or(0),
                residual_stride: stride(3).unwrap_or(0),
                ..images
            })
    }

    /// A convolution over images without gaps; `None` for others.
    fn packed_images(&self, loops: &TensorLoops, conv: &PackedConv) -> Option<ByteImages> {
        let (sizes, window, channels) = conv.as_image()?;
        let distance = |view: &View| -> Option<usize> {
            let [n, _, h, w] = view.strides[..] else { return None };
            let [_, _, height, width] = view.shape[..] else { return None };
            let even = h == w * width && (view.shape[0] == 1 || n == h * height);
            (view.strides[1] == 1 && even).then_some(w)
        };
        let residual = match &self.epilogue.residual {
            Some((view, _)) => distance(view)?,
            None => 0,
        };
        let (pixel, out_stride) = (distance(self.a)?, distance(self.output)?);
        let images = self.images(loops, sizes, (channels, pixel), window)?;
        let fills = self.fills(loops);
        (!fills).then_some(ByteImages { out_stride, residual_stride: residual, ..images })
    }

    fn images(
        &self,
        loops: &TensorLoops,
        [in_size, out_size]: [[usize; 2]; 2],
        (channels, pixel): (usize, usize),
        window: Window2,
    ) -> Option<ByteImages> {
        let adjacent = loops.column[2] == 1 && (loops.column[3] == 1 || !self.adds());
        (loops.part.loops.is_empty() && adjacent).then(|| ByteImages {
            input: self.a.clone(),
            in_size,
            out_size,
            channels,
            pixel,
            window,
            rows: loops.row.len(),
            columns: loops.columns,
            out_stride: 0,
            residual_stride: 0,
            weight: address(self.weight),
            weight_bytes: self.weight.len(),
        })
    }

    fn adds(&self) -> bool {
        self.epilogue.residual.is_some()
    }

    /// Strides of the residual in the sizes of the output; zeros where there is none.
    fn residual_strides(&self) -> Result<Vec<usize>, String> {
        match &self.epilogue.residual {
            None => Ok(vec![0; self.output.shape.len()]),
            Some((view, _)) if view.shape == self.output.shape => Ok(view.strides.clone()),
            Some((view, _)) => Err(format!("{:?} onto {:?}", view.shape, self.output.shape)),
        }
    }

    fn check(&self) -> Result<(), String> {
        check_output(self.output)?;
        check_view(self.a)?;
        if let Some((view, quantum)) = &self.epilogue.residual {
            check_view(view)?;
            let bytes = matches!(view.element, Element::U8 | Element::I8);
            if bytes != quantum.is_some() || (!bytes && !view.element.is_float()) {
                return Err(format!("a residual of {:?}", view.element));
            }
        }
        let bytes = |element: Element| matches!(element, Element::U8 | Element::I8);
        let output = self.output.element;
        let stored = match self.epilogue.output {
            Some(quantum) => quantum.element == output && bytes(output),
            None => output == Element::I32 || (output.is_float() && output != Element::F64),
        };
        if !bytes(self.a.element) || self.weight.element != Element::I8 || !stored {
            return Err(format!("a product of {:?} as {output:?}", self.a.element));
        }
        Ok(())
    }

    fn work(
        &self,
        target: &GpuTarget,
        op: &'static str,
        loops: &TensorLoops,
        what: &str,
        images: Option<ByteImages>,
    ) -> Result<StepDraft, String> {
        self.check()?;
        for nest in [&loops.part, &loops.row] {
            nest.check()?;
        }
        if loops.depth == 0 || loops.inner.rank() > MAX_RANK {
            return Err(format!("a product over {} elements", loops.depth));
        }
        let problem = self.tiles(target, loops);
        let variants = problem.estimated_variants();
        let most = variants.iter().map(|(_, each)| each.tiles(&problem)).max().unwrap_or(0);
        if most > MAX_ITEMS {
            return Err(format!("a product of {most} tiles"));
        }
        let estimated =
            |(estimate, each): &(f64, Variant)| (*estimate, self.draft(each, &problem, loops));
        let mut drafts: Vec<(f64, LaunchDraft)> = variants.iter().map(estimated).collect();
        if let Some(images) = images {
            let ending = ByteEnding {
                source: include("hopper_bytes.cuh", &self.elements()),
                name: self.ending(),
                args: self.end(),
                vectors: self.vectors(loops),
                residual_bytes: self
                    .epilogue
                    .residual
                    .as_ref()
                    .map_or(0, |(view, _)| view.element.size()),
                output: self.output.clone(),
            };
            drafts.extend(byte_drafts(&images, &ending, target));
        }
        drafts.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let drafts = drafts.into_iter().map(|(_, draft)| draft).collect();
        let reads: Vec<&View> = self.reads();
        let signature = format!(
            "{op} of bytes {what} {:?} {} {} to {}",
            self.describe_epilogue(),
            self.fills(loops),
            describe_all(&reads),
            describe(self.output)
        );
        let sums = loops.part.len() as u64 * loops.row.len() as u64 * loops.columns as u64;
        Ok(StepDraft {
            op,
            signature,
            drafts,
            reads: reads.into_iter().cloned().collect(),
            writes: vec![self.output.clone()],
            flops: sums.saturating_mul(2 * loops.depth as u64),
            weight_bytes: self.weight.len() as u64,
            finish_tiles: None,
        })
    }

    fn reads(&self) -> Vec<&View> {
        let columns = self.columns;
        let residual = self.epilogue.residual.as_ref().map(|(view, _)| view);
        let zero = columns.zero.as_ref().map(|(zero, _)| zero);
        let all = [Some(self.a), residual, zero, columns.factor.as_ref()];
        all.into_iter().flatten().collect()
    }

    /// What the speed of the epilogue depends on.
    fn describe_epilogue(&self) -> String {
        let ByteEpilogue { activation, between, after, .. } = self.epilogue;
        let columns = self.columns;
        let given = [columns.offset.is_some(), columns.scale.is_some(), columns.bias.is_some()];
        format!("{activation:?} {} {after:?} {given:?}", between.is_some())
    }

    fn tiles(&self, target: &GpuTarget, loops: &TensorLoops) -> tile::Problem {
        tile::Problem {
            rows: loops.row.len(),
            columns: loops.columns.next_multiple_of(8),
            // A tile counts its depth in halves.
            depth: loops.depth.div_ceil(2),
            parts: loops.part.len(),
            weight_bytes: self.weight.len(),
            vec: 8,
            access: InputAccess::Bytes,
            normalizes: false,
            multiprocessors: target.multiprocessors as usize,
            clusters: target.capability >= 90,
        }
    }

    fn draft(
        &self,
        variant: &Variant,
        problem: &tile::Problem,
        loops: &TensorLoops,
    ) -> LaunchDraft {
        let kernel = self.kernel(variant, loops);
        let args = self.args(variant, loops);
        let mut draft = LaunchDraft::plain(kernel, variant.tiles(problem), args);
        draft.variant = variant.name();
        let clusters = variant.reduction == SplitReduction::Cluster;
        draft.cluster = if clusters { variant.splits } else { 1 };
        draft.arrivals = variant.arrivals(problem);
        draft.workspace_bytes = variant.workspace_bytes(problem);
        draft
    }

    /// Whether the byte outside an image is read and is not zero.
    fn fills(&self, loops: &TensorLoops) -> bool {
        !loops.axes.is_empty() && self.outside != 0
    }

    /// The types of activations, residual and output.
    fn elements(&self) -> [Element; 3] {
        let residual = self.epilogue.residual.as_ref().map(|(view, _)| view.element);
        [self.a.element, residual.unwrap_or(Element::I8), self.output.element]
    }

    /// `ByteEnding` of `kernels/byte_end.cuh`.
    fn ending(&self) -> String {
        let epilogue = self.epilogue;
        format!(
            "tiles::ByteEnding<{}, {}, {}, {}, {}>",
            self.elements().map(Element::cuda_name).join(", "),
            activation_numbers(epilogue.activation).0,
            epilogue.between.is_some(),
            epilogue.residual.is_some(),
            activation_numbers(epilogue.after).0,
        )
    }

    fn kernel(&self, variant: &Variant, loops: &TensorLoops) -> KernelText {
        let problem = format!(
            "tiles::BytesProblem<{}, {}, {}, {}, {}, {}, {}>",
            self.ending(),
            loops.part.rank(),
            loops.row.rank(),
            loops.inner.rank(),
            loops.axes.len(),
            loops.byte_vec(self.a.offset),
            self.fills(loops),
        );
        let tile = variant.tile;
        let (wm, wn, wk) = tile.warps;
        let shape = [tile.bm, tile.bn, tile.bk, wm, wn, wk, tile.stages];
        let shape = shape.map(|value| value.to_string()).join(", ");
        KernelText {
            source: include("bytes.cuh", &self.elements()),
            expression: format!(
                "tiles::Bytes<tiles::ConvConfig<{shape}, tiles::kGeneral>, {problem}>"
            ),
            threads: tile.threads() as u32,
            shared_bytes: tile.shared_bytes(false) as u32,
        }
    }

    /// `BytesArgs` of `kernels/bytes.cuh`, field by field.
    fn args(&self, variant: &Variant, loops: &TensorLoops) -> ArgsWriter {
        let mut args = ArgsWriter::new();
        args.address(address(self.a)).address(address(self.weight));
        args.nested(self.end());
        let split = variant.reduction == SplitReduction::Workspace;
        let when = |location| if split { Address::Fixed(location) } else { Address::Null };
        args.address(when(MemoryLocation::Workspace(0))).address(when(MemoryLocation::Arrivals));
        args.int(loops.row.len()).int(loops.columns).int(loops.depth);
        args.int(variant.splits).signed(variant.reduction.code());
        args.signed(loops.a_shift as i32).signed(loops.out_shift as i32);
        args.int(loops.column[0]).int(loops.column[2]).int(loops.column[3]);
        args.int(self.vectors(loops));
        args.signed(i32::from_le_bytes([self.outside; 4]));
        args.fast_div(variant.splits);
        args.fast_div(loops.columns.div_ceil(variant.tile.bn));
        args.fast_div(loops.row.len().div_ceil(variant.tile.bm));
        loops.part.write(&mut args);
        loops.row.write(&mut args);
        loops.inner.write(&mut args);
        loops.write_axes(&mut args);
        args
    }

    /// `ByteEnd` of `kernels/byte_end.cuh`, field by field.
    fn end(&self) -> ArgsWriter {
        let (columns, epilogue) = (self.columns, self.epilogue);
        let mut args = ArgsWriter::new();
        let place = |view: Option<&View>| view.map_or(Address::Null, address);
        args.address(place(columns.offset.as_ref())).address(place(columns.scale.as_ref()));
        args.address(place(columns.bias.as_ref()));
        args.address(place(columns.zero.as_ref().map(|(_, sums)| sums)));
        args.address(place(columns.zero.as_ref().map(|(zero, _)| zero)));
        args.address(place(columns.factor.as_ref()));
        args.address(place(epilogue.residual.as_ref().map(|(view, _)| view)));
        args.address(address(self.output));
        for activation in [epilogue.activation, epilogue.after] {
            let (_, first, second) = activation_numbers(activation);
            args.float(first).float(second);
        }
        let one = Quantum { scale: 1.0, zero: 0, element: Element::I8 };
        let between = epilogue.between.unwrap_or(one);
        let (low, high) = between.bounds();
        let zero = between.zero as f32;
        args.float(between.scale.recip()).float(between.scale);
        args.float(low - zero).float(high - zero);
        let residual = epilogue.residual.as_ref().and_then(|(_, quantum)| *quantum).unwrap_or(one);
        args.float(residual.scale).float(residual.zero as f32);
        let output = epilogue.output.unwrap_or(one);
        args.float(output.scale.recip()).signed(output.zero);
        args
    }

    /// `ByteVectors`: which of output, residual and parameters of columns may be moved eight
    /// columns at a time.
    fn vectors(&self, loops: &TensorLoops) -> usize {
        let even = |start: i64, column: usize, in_part: usize, in_row: usize| {
            let steps = |nest: &LoopNest, at: usize| {
                nest.loops.iter().all(|each| each.strides[at].is_multiple_of(8))
            };
            let aligned = start.rem_euclid(8) == 0;
            column == 1 && aligned && steps(&loops.part, in_part) && steps(&loops.row, in_row)
        };
        let output = even(self.output.offset as i64 + loops.out_shift, loops.column[2], 3, 2);
        let start = self.epilogue.residual.as_ref().map_or(1, |(view, _)| view.offset as i64);
        let residual = even(start, loops.column[3], 4, 3);
        let parameters = [&self.columns.offset, &self.columns.scale, &self.columns.bias];
        let sums = self.columns.zero.as_ref().map(|(_, sums)| sums);
        let mut parameters = parameters.into_iter().filter_map(Option::as_ref).chain(sums);
        let steps = loops.part.loops.iter().all(|each| each.strides[2].is_multiple_of(4));
        let columns = steps && parameters.all(|view| view.offset.is_multiple_of(4));
        usize::from(output) | usize::from(residual) << 1 | usize::from(columns) << 2
    }
}

impl TensorLoops {
    /// How many adjacent bytes of `a` are copied at once; it begins `offset` bytes after an aligned
    /// address. One: they are gathered one by one.
    pub fn byte_vec(&self, offset: usize) -> usize {
        let start = (offset as i64 + self.a_shift).rem_euclid(CHUNK as i64) as usize;
        let Some((fast, slower)) = self.inner.loops.split_last() else { return 1 };
        let others = slower.iter().chain(&self.row.loops).chain(&self.part.loops);
        let steps: Vec<usize> = others.map(|each| each.strides[0]).collect();
        let fits = |vec: &usize| {
            // Only where there is no slower loop may the last piece be incomplete.
            let whole = slower.is_empty() || fast.size.is_multiple_of(*vec);
            let even = steps.iter().all(|step| step.is_multiple_of(*vec));
            fast.strides[0] == 1 && whole && even && start.is_multiple_of(*vec)
        };
        [CHUNK, 8, 4].into_iter().find(fits).unwrap_or(1)
    }
}
