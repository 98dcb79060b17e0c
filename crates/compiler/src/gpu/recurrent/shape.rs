//! How a recurrent layer is divided into blocks and warps.

use model::gpu::GpuTarget;

use crate::gpu::view::Element;

/// A layer as its kernel sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Problem {
    pub(super) element: Element,
    pub(super) cell: usize,
    pub(super) gates: usize,
    pub(super) hidden: usize,
    pub(super) batch: usize,
    pub(super) directions: usize,
    pub(super) tensor: bool,
    /// Whether its cells are those of the kernel's branch-free version.
    pub(super) plain: bool,
}

/// The parameters of `Recurrent` in `kernels/recurrent.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Blocks of a cluster.
    pub(super) blocks: usize,
    /// Groups of 16 units of a block.
    groups: usize,
    /// The depth in units of 32.
    chunks: usize,
    /// Batch items of a tile in units of 8.
    row_tiles: usize,
    /// Warps that share the depth of a group.
    split: usize,
    /// Parts of a block's groups that are computed one after another.
    passes: usize,
    /// Chunks of a warp whose weights are in registers.
    held: usize,
    /// Chunks of a warp whose weights are in shared memory.
    kept: usize,
    /// Whether cell states are in global memory.
    pub(super) cell_in_memory: bool,
}

/// Warps of a block.
const WARPS: usize = 16;

impl Shape {
    fn new(
        problem: &Problem,
        target: &GpuTarget,
        blocks: usize,
        row_tiles: usize,
    ) -> Option<Shape> {
        let (all, chunks) = (problem.hidden.div_ceil(16), problem.hidden.div_ceil(32));
        let groups = all.div_ceil(blocks);
        // Every block has units, and none is left without a warp.
        if (blocks - 1) * groups >= all {
            return None;
        }
        let passes = groups.div_ceil(WARPS);
        let part = groups.div_ceil(passes);
        let most = if chunks > 16 { 8 } else { 4 };
        let mut split = 1;
        while split * 2 <= most.min(chunks) && part * split * 2 <= WARPS {
            split *= 2;
        }
        let plain = Shape {
            blocks,
            groups,
            chunks,
            row_tiles,
            split,
            passes,
            held: 0,
            kept: 0,
            cell_in_memory: false,
        };
        // Some is left for the static part of a kernel.
        let limit = target.block_shared_bytes() as usize - 512;
        let in_memory = Shape { cell_in_memory: problem.has_cell(), ..plain };
        let fits = |shape: &Shape| shape.shared_bytes(problem) <= limit;
        let mut shape = [plain, in_memory].into_iter().find(fits)?;
        if problem.tensor && passes == 1 {
            let chunks = shape.warp_chunks();
            let registers = if shape.threads() > 256 { 128 } else { 224 };
            let sums = problem.gates * row_tiles * 4;
            let spare = (registers as usize).saturating_sub(48 + sums);
            shape.held = chunks.min(spare / (problem.gates * 8));
            let each = shape.warps() * problem.gates * 1024;
            let room = (limit - shape.shared_bytes(problem)) / each;
            shape.kept = (chunks - shape.held).min(room);
        }
        Some(shape)
    }

    fn part(&self) -> usize {
        self.groups.div_ceil(self.passes)
    }

    fn warps(&self) -> usize {
        self.part() * self.split
    }

    fn warp_chunks(&self) -> usize {
        self.chunks.div_ceil(self.split)
    }

    fn rows(&self) -> usize {
        self.row_tiles * 8
    }

    /// Threads of a block.
    pub(super) fn threads(&self) -> usize {
        self.warps() * 32
    }

    /// `kShared` of the kernel.
    pub(super) fn shared_bytes(&self, problem: &Problem) -> usize {
        let (rows, units, size) = (self.rows(), self.groups * 16, problem.element.size());
        let depth = self.chunks * 32;
        let stride = depth + if (depth * size).is_multiple_of(128) { 64 / size } else { 0 };
        let states = if problem.cell == 3 { 3 } else { 2 } * rows * stride * size;
        let sums = self.split * problem.gates * rows * (self.part() * 16 + 4) * 4;
        let biases = problem.gates + usize::from(problem.cell == 2);
        let bias = if self.passes == 1 { biases * units * 4 } else { 0 };
        let in_shared = problem.has_cell() && !self.cell_in_memory;
        let cell = if in_shared { rows * units * 4 } else { 0 };
        let weights = self.warps() * problem.gates * self.kept * 1024;
        states + sums + bias + cell + (rows * 4).next_multiple_of(16) + 32 + weights
    }

    /// Workspace for cell states.
    pub(super) fn cell_bytes(&self, tiles: usize) -> usize {
        if self.cell_in_memory { tiles * self.rows() * self.groups * 16 * 4 } else { 0 }
    }

    /// The operator as a C++ type.
    pub(super) fn expression(&self, problem: &Problem) -> String {
        format!(
            "tiles::Recurrent<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
            problem.element.cuda_name(),
            problem.cell,
            self.blocks,
            self.groups,
            self.chunks,
            self.row_tiles,
            self.split,
            self.passes,
            self.held,
            self.kept,
            problem.tensor,
            self.cell_in_memory,
            problem.plain,
        )
    }

    /// A name that is unique among the shapes of a problem.
    pub(super) fn name(&self) -> String {
        format!("{}x{}r{}", self.blocks, self.groups * 16, self.rows())
    }
}

impl Problem {
    fn has_cell(&self) -> bool {
        self.cell == 1 || self.cell == 3
    }

    /// Tiles of a shape, in clusters.
    pub(super) fn teams(&self, shape: &Shape) -> usize {
        self.directions * self.batch.div_ceil(shape.rows())
    }

    /// Cycles of one time step, times the number of rounds in which the clusters run. Rough: it
    /// orders the variants until they are measured.
    fn cost(&self, shape: &Shape, multiprocessors: usize) -> usize {
        let rounds = self.teams(shape).div_ceil((multiprocessors / shape.blocks).max(1));
        let barrier = if shape.blocks > 1 { 450 } else { 50 };
        let products = shape.groups * self.gates * shape.chunks;
        let multiply = if self.tensor {
            let kept = shape.warps() * self.gates * shape.kept * 1024 / 128;
            let held = shape.split * shape.groups * (shape.held + shape.kept) * self.gates;
            let streamed = products.saturating_sub(held) * 1024 / 30;
            products * 2 * shape.row_tiles * 8 / 4 + kept + streamed
        } else {
            // Every weight comes from L2, and 128 lanes multiply.
            products * 512 * (self.element.size() * 128 / 40 + shape.rows()) / 128
        };
        let cells = (shape.rows() * shape.part() * 16).div_ceil(shape.threads()) * shape.passes;
        rounds * (500 + 400 * cells + barrier * if self.cell == 3 { 2 } else { 1 } + multiply)
    }

    /// The shapes to choose from, the best first as far as one can tell without measuring.
    /// No clusters of more than 8 blocks: a partition of a device may not hold them.
    pub(super) fn shapes(&self, target: &GpuTarget) -> Vec<Shape> {
        let sizes: &[usize] = if target.capability >= 90 { &[8, 4, 2, 1] } else { &[1] };
        let multiprocessors = target.multiprocessors as usize;
        let cost = |shape: &Shape| self.cost(shape, multiprocessors);
        let best = |blocks: &usize| {
            let rows = [1, 2, 4]
                .into_iter()
                .take_while(|tiles| *tiles == 1 || (tiles / 2) * 8 < self.batch);
            let shapes = rows.filter_map(|tiles| Shape::new(self, target, *blocks, tiles));
            shapes.min_by_key(cost)
        };
        let mut shapes: Vec<Shape> = sizes.iter().filter_map(best).collect();
        shapes.sort_by_key(cost);
        shapes
    }
}
