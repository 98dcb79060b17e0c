//! Products of 16-bit operands on tensor cores, of any strides (`kernels/tensor.cuh`).

use model::gpu::{GpuTarget, MemoryLocation};

use super::super::args::{Address, ArgsWriter};
use super::super::draft::{KernelText, LaunchDraft};
use super::super::loop_nest::{LoopNest, MAX_ITEMS, MAX_RANK, include};
use super::super::tile::{self, InputAccess, SplitReduction, Variant};
use super::super::view::Element;
use super::{Epilogue, Kind, Problem, Views, activation_numbers, drop_ref};

/// One axis of an image: `TensorImage` of `kernels/tensor_load.cuh`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    /// Extent and padding at the beginning.
    pub size: usize,
    pub pad: i32,
    /// With phases: the output's extent, the stride of a row, and the positions before the first.
    pub out_size: usize,
    pub step: usize,
    pub before: usize,
}

/// A product as the loops of the tensor-core kernel.
pub(super) struct TensorLoops {
    /// Operands: a, b, bias, output, residual; then a phase per axis.
    pub part: LoopNest,
    /// Operands: a, bias, output, residual; then a position per axis.
    pub row: LoopNest,
    /// Operands: a, b; then an offset in the window per axis.
    pub inner: LoopNest,
    pub columns: usize,
    pub depth: usize,
    /// Strides along the columns: b, bias, output, residual.
    pub column: [usize; 4],
    pub axes: Vec<Axis>,
    /// Elements from the address of `a` to that of the first position, and of the output.
    pub a_shift: i64,
    pub out_shift: i64,
    pub phases: bool,
    /// Columns of a phase, if the phases of the last axis are adjacent columns.
    pub phase_columns: Option<usize>,
    /// Whether `b` is a weight whose elements are adjacent along the whole depth, in aligned rows.
    pub constant: bool,
}

/// How an operand is read: along the depth or along its edge, and how many elements at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    pub deep: bool,
    pub vec: usize,
}

/// Whether tensor cores multiply these elements.
pub(super) fn multiplies(views: &Views) -> bool {
    let [a, b, _, output] = views.elements();
    matches!(a, Element::F16 | Element::BF16) && a == b && (output == a || output == Element::F32)
}

/// Loops with `extra` operands of stride zero at the end.
fn extended(nest: &LoopNest, extra: usize) -> LoopNest {
    let mut nest = nest.clone();
    nest.operands += extra;
    nest.loops.iter_mut().for_each(|each| each.strides.resize(nest.operands, 0));
    nest
}

impl TensorLoops {
    /// The loops of a matrix product or a convolution; `None` for another kind.
    pub fn of(problem: &Problem, constant: bool) -> Option<TensorLoops> {
        let picture = &problem.picture;
        let mut kept = Vec::new();
        let (mut row, mut inner) = (problem.row.clone(), problem.inner.clone());
        let mut a_shift = 0;
        match problem.kind {
            Kind::Matrix => {}
            Kind::Transposed => return None,
            Kind::Convolution => {
                kept = (0..3).filter(|axis| problem.leaves_image(*axis)).collect();
                row = linear(&row, 4, &picture.stride, &kept);
                inner = linear(&inner, 2, &picture.stride, &kept);
                let shift =
                    |axis: usize| i64::from(picture.pad[axis]) * picture.stride[axis] as i64;
                a_shift = -(0..3).map(shift).sum::<i64>();
            }
        }
        let axis = |axis: &usize| Axis {
            size: picture.size[*axis],
            pad: picture.pad[*axis],
            out_size: 0,
            step: 1,
            before: 0,
        };
        Some(TensorLoops {
            part: extended(&problem.group, kept.len()),
            row,
            inner,
            columns: problem.columns,
            depth: problem.depth,
            column: problem.column,
            axes: kept.iter().map(axis).collect(),
            a_shift,
            out_shift: 0,
            phases: false,
            phase_columns: None,
            constant,
        })
    }

    /// How the kernel reads `a` (0) or `b` (1), which begins `offset` elements after an aligned
    /// address.
    pub fn reading(&self, operand: usize, offset: usize) -> Reading {
        if operand == 1 && self.constant {
            return Reading { deep: true, vec: 8 };
        }
        let shift = if operand == 0 { self.a_shift } else { 0 };
        let start = (offset as i64 + shift).rem_euclid(8) as usize;
        let strides = |nest: &LoopNest| -> Vec<(usize, usize)> {
            nest.loops.iter().map(|each| (each.size, each.strides[operand])).collect()
        };
        let (part, inner) = (strides(&self.part), strides(&self.inner));
        let edge =
            if operand == 0 { strides(&self.row) } else { vec![(self.columns, self.column[0])] };
        // Neighbours along `fast` are adjacent, and every other step keeps the alignment. Only
        // where there is no slower loop may the last piece be incomplete.
        let fits = |fast: &[(usize, usize)], others: &[(usize, usize)], vec: usize| {
            let Some(((size, stride), slower)) = fast.split_last() else { return vec == 1 };
            let whole = slower.is_empty() || size.is_multiple_of(vec);
            let even = slower.iter().chain(others).chain(&part);
            vec == 1
                || (*stride == 1
                    && whole
                    && start.is_multiple_of(vec)
                    && even.into_iter().all(|(_, stride)| stride.is_multiple_of(vec)))
        };
        let best = |fast: &[(usize, usize)], others: &[(usize, usize)]| {
            [8, 4, 2, 1].into_iter().find(|vec| fits(fast, others, *vec)).unwrap_or(1)
        };
        let deep = best(&inner, &edge);
        // Along the edge of an image, neighbours are not in one piece of it.
        let images = operand == 0 && !self.axes.is_empty();
        let wide = if images { 1 } else { best(&edge, &inner) };
        let adjacent = |loops: &[(usize, usize)]| loops.last().is_some_and(|each| each.1 == 1);
        let edge_only = wide == deep && !images && adjacent(&edge) && !adjacent(&inner);
        if wide > deep || edge_only {
            Reading { deep: false, vec: wide }
        } else {
            Reading { deep: true, vec: deep }
        }
    }

    /// The microseconds that reading an operand in pieces of less than 16 bytes adds, roughly.
    pub fn reading_us(&self, operand: usize, views: &Views) -> f64 {
        const TILE: usize = 64;
        let (view, edge, other) = match operand {
            0 => (views.a, self.row.len(), self.columns),
            _ => (views.b, self.columns, self.row.len()),
        };
        // Elements per microsecond, all multiprocessors together.
        let rate = match self.reading(operand, view.offset).vec {
            8 => return 0.0,
            4 => 7e6,
            2 => 3.6e6,
            _ => 1.8e6,
        };
        let elements = self.part.len() as f64 * edge as f64 * self.depth as f64;
        elements * other.div_ceil(TILE) as f64 / rate
    }

    fn tiles(&self, target: &GpuTarget) -> tile::Problem {
        tile::Problem {
            rows: self.row.len(),
            columns: self.columns.next_multiple_of(8),
            depth: self.depth,
            parts: self.part.len(),
            weight_bytes: 0,
            vec: 8,
            access: InputAccess::Strided,
            normalizes: false,
            multiprocessors: target.multiprocessors as usize,
            clusters: target.capability >= 90,
        }
    }

    /// Every variant, the one with the lowest estimate first.
    pub fn drafts(
        &self,
        target: &GpuTarget,
        views: &Views,
        epilogue: Epilogue,
    ) -> Result<Vec<LaunchDraft>, String> {
        for nest in [&self.part, &self.row] {
            nest.check()?;
        }
        if self.depth == 0 || self.inner.rank() > MAX_RANK {
            return Err(format!("a product over {} elements", self.depth));
        }
        let problem = self.tiles(target);
        let variants = problem.variants();
        let most = variants.iter().map(|variant| variant.tiles(&problem)).max().unwrap_or(0);
        if most > MAX_ITEMS {
            return Err(format!("a product of {most} tiles"));
        }
        Ok(variants.iter().map(|each| self.draft(each, &problem, views, epilogue)).collect())
    }

    fn draft(
        &self,
        variant: &Variant,
        problem: &tile::Problem,
        views: &Views,
        epilogue: Epilogue,
    ) -> LaunchDraft {
        let kernel = self.kernel(variant, views, epilogue);
        let args = self.args(variant, views, epilogue);
        let mut draft = LaunchDraft::plain(kernel, variant.tiles(problem), args);
        draft.variant = variant.name();
        let clusters = variant.reduction == SplitReduction::Cluster;
        draft.cluster = if clusters { variant.splits } else { 1 };
        draft.arrivals = variant.arrivals(problem);
        draft.workspace_bytes = variant.workspace_bytes(problem);
        draft
    }

    fn kernel(&self, variant: &Variant, views: &Views, epilogue: Epilogue) -> KernelText {
        let [a, _, bias, output] = views.elements();
        let (left, right) = (self.reading(0, views.a.offset), self.reading(1, views.b.offset));
        let names = [a, bias, output].map(Element::cuda_name).join(", ");
        let problem = format!(
            "tiles::TensorProblem<{names}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
            self.part.rank(),
            self.row.rank(),
            self.inner.rank(),
            self.axes.len(),
            self.phases,
            left.deep,
            left.vec,
            right.deep,
            right.vec,
            self.constant,
            activation_numbers(epilogue.activation).0,
        );
        let tile = variant.tile;
        let (wm, wn, wk) = tile.warps;
        let shape = [tile.bm, tile.bn, tile.bk, wm, wn, wk, tile.stages];
        let shape = shape.map(|value| value.to_string()).join(", ");
        KernelText {
            source: include("tensor.cuh", &views.elements()),
            expression: format!(
                "tiles::Tensor<tiles::ConvConfig<{shape}, tiles::kGeneral>, {problem}>"
            ),
            threads: tile.threads() as u32,
            shared_bytes: tile.shared_bytes(false) as u32,
        }
    }

    /// `TensorArgs` of `kernels/tensor_load.cuh`, field by field.
    fn args(&self, variant: &Variant, views: &Views, epilogue: Epilogue) -> ArgsWriter {
        let mut args = ArgsWriter::new();
        views.addresses(&mut args);
        let split = variant.reduction == SplitReduction::Workspace;
        let when = |location| if split { Address::Fixed(location) } else { Address::Null };
        args.address(when(MemoryLocation::Workspace(0))).address(when(MemoryLocation::Arrivals));
        args.int(self.row.len()).int(self.columns).int(self.depth);
        args.int(variant.splits).signed(variant.reduction.code());
        args.signed(self.a_shift as i32).signed(self.out_shift as i32);
        self.column.iter().for_each(|stride| drop_ref(args.int(*stride)));
        args.int(self.vectors(views));
        let (_, first, second) = activation_numbers(epilogue.activation);
        args.float(epilogue.alpha).float(epilogue.beta).float(first).float(second);
        args.fast_div(variant.splits);
        args.fast_div(self.columns.div_ceil(variant.tile.bn));
        args.fast_div(self.row.len().div_ceil(variant.tile.bm));
        args.fast_div(self.phase_columns.unwrap_or(i32::MAX as usize));
        self.part.write(&mut args);
        self.row.write(&mut args);
        self.inner.write(&mut args);
        self.write_axes(&mut args);
        args
    }

    pub(super) fn write_axes(&self, args: &mut ArgsWriter) {
        let none = Axis { size: 1, pad: 0, out_size: 1, step: 1, before: 0 };
        let axes = if self.axes.is_empty() { vec![none] } else { self.axes.clone() };
        axes.iter().for_each(|axis| drop_ref(args.int(axis.size)));
        axes.iter().for_each(|axis| drop_ref(args.signed(axis.pad)));
        axes.iter().for_each(|axis| drop_ref(args.int(axis.out_size)));
        axes.iter().for_each(|axis| drop_ref(args.int(axis.step)));
        axes.iter().for_each(|axis| drop_ref(args.int(axis.before)));
    }

    /// Bits: eight columns of output, residual and bias may be moved at once.
    fn vectors(&self, views: &Views) -> usize {
        let even = |start: i64, column: usize, in_part: usize, in_row: usize| {
            let steps = |nest: &LoopNest, at: usize| {
                nest.loops.iter().all(|each| each.strides[at].is_multiple_of(8))
            };
            let aligned = start.rem_euclid(8) == 0;
            column == 1 && aligned && steps(&self.part, in_part) && steps(&self.row, in_row)
        };
        let output = even(views.output.offset as i64 + self.out_shift, self.column[2], 3, 2);
        let start = |view: Option<&super::View>| view.map_or(1, |view| view.offset as i64);
        let residual = even(start(views.residual), self.column[3], 4, 3);
        let bias = even(start(views.bias), self.column[1], 2, 1);
        usize::from(output) | usize::from(residual) << 1 | usize::from(bias) << 2
    }
}

/// Loops whose first operand includes the offset in the image; of the three coordinates behind
/// `operands`, those in `kept` remain.
fn linear(nest: &LoopNest, operands: usize, image: &[usize; 3], kept: &[usize]) -> LoopNest {
    let mut nest = nest.clone();
    for each in &mut nest.loops {
        let coordinates: Vec<usize> = each.strides.split_off(operands);
        each.strides[0] += (0..3).map(|axis| coordinates[axis] * image[axis]).sum::<usize>();
        each.strides.extend(kept.iter().map(|axis| coordinates[*axis]));
    }
    nest.operands = operands + kept.len();
    nest.merged()
}

impl Problem {
    /// Whether a position along `axis` can be outside the image.
    fn leaves_image(&self, axis: usize) -> bool {
        let reach = |nest: &LoopNest, operands: usize| -> usize {
            nest.loops.iter().map(|each| (each.size - 1) * each.strides[operands + axis]).sum()
        };
        let last = reach(&self.row, 4) + reach(&self.inner, 2);
        self.picture.pad[axis] != 0 || last >= self.picture.size[axis]
    }
}
