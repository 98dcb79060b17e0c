//! Tile shapes of the tensor-core product (`kernels/conv.cuh`), and the selection of those to try.

use super::draft::KernelText;

/// How a tile addresses its input as the depth advances; see `Walk` in `kernels/conv_load.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InputAccess {
    /// Any window.
    General,
    /// 1x1 without padding.
    Point,
    /// Depth a multiple of the step, no dilation.
    Taps,
    /// Operands of any strides (`kernels/tensor.cuh`).
    Strided,
    /// Bytes (`kernels/bytes.cuh`); depths count in pairs of them.
    Bytes,
}

/// How the partial sums of a split product are added; see `SplitReduction` in
/// `kernels/conv_load.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitReduction {
    /// Not split.
    Whole,
    /// Through the workspace.
    Workspace,
    /// Through the shared memory of a cluster.
    Cluster,
}

impl SplitReduction {
    /// Its number in the kernels.
    pub fn code(self) -> i32 {
        match self {
            SplitReduction::Whole => 0,
            SplitReduction::Workspace => 1,
            SplitReduction::Cluster => 2,
        }
    }
}

/// `BM x BN` outputs and `BK` depth per step, `WM x WN x WK` warps, a ring of `stages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows of the output.
    pub bm: usize,
    /// Columns of the output.
    pub bn: usize,
    /// Depth of a step.
    pub bk: usize,
    /// Warps along rows, columns and depth.
    pub warps: (usize, usize, usize),
    /// Steps in flight.
    pub stages: usize,
    /// Channels of a copy: 8, or 4 for an image.
    pub vec: usize,
}

const fn tile(
    bm: usize,
    bn: usize,
    bk: usize,
    warps: (usize, usize, usize),
    stages: usize,
    vec: usize,
) -> Tile {
    Tile { bm, bn, bk, warps, stages, vec }
}

/// Shapes for inputs of at least eight channels.
const PLAIN: [Tile; 18] = [
    tile(64, 64, 64, (2, 2, 1), 4, 8),
    tile(128, 128, 32, (2, 4, 1), 4, 8),
    tile(128, 128, 64, (2, 4, 1), 3, 8),
    tile(64, 128, 64, (2, 2, 1), 3, 8),
    tile(16, 64, 64, (1, 1, 4), 6, 8),
    tile(16, 64, 64, (1, 4, 1), 6, 8),
    tile(16, 128, 64, (1, 2, 2), 4, 8),
    tile(32, 32, 64, (1, 1, 4), 6, 8),
    tile(32, 64, 64, (1, 2, 2), 4, 8),
    tile(64, 32, 64, (2, 1, 2), 4, 8),
    tile(64, 64, 64, (2, 2, 2), 4, 8),
    tile(128, 64, 64, (2, 2, 1), 3, 8),
    tile(128, 32, 64, (4, 1, 1), 3, 8),
    tile(128, 16, 64, (4, 1, 1), 4, 8),
    tile(256, 32, 64, (8, 1, 1), 3, 8),
    tile(256, 64, 32, (4, 2, 1), 4, 8),
    tile(128, 256, 32, (2, 4, 1), 4, 8),
    tile(256, 128, 32, (4, 2, 1), 4, 8),
];

/// Shapes that normalise their input while loading it.
const NORMALIZING: [Tile; 6] = [
    tile(16, 64, 64, (1, 1, 4), 6, 8),
    tile(32, 32, 64, (1, 1, 4), 6, 8),
    tile(32, 64, 64, (1, 2, 2), 4, 8),
    tile(64, 64, 64, (2, 2, 1), 4, 8),
    tile(64, 128, 64, (2, 2, 1), 3, 8),
    tile(128, 128, 32, (2, 4, 1), 4, 8),
];

/// Shapes for images of four channels.
const IMAGE: [Tile; 3] = [
    tile(64, 64, 32, (2, 2, 1), 4, 4),
    tile(64, 32, 32, (2, 2, 1), 4, 4),
    tile(128, 64, 32, (4, 2, 1), 4, 4),
];

/// Shapes for any window.
const GENERAL: [Tile; 2] = [tile(64, 64, 64, (2, 2, 1), 4, 8), tile(32, 32, 64, (1, 1, 4), 6, 8)];

/// Shapes for operands of any strides.
const STRIDED: [Tile; 11] = [
    tile(64, 64, 64, (2, 2, 1), 4, 8),
    tile(128, 128, 32, (2, 4, 1), 4, 8),
    tile(64, 128, 64, (2, 2, 1), 3, 8),
    tile(128, 64, 64, (2, 2, 1), 3, 8),
    tile(16, 64, 64, (1, 1, 4), 6, 8),
    tile(32, 32, 64, (1, 1, 4), 6, 8),
    tile(32, 64, 64, (1, 2, 2), 4, 8),
    tile(64, 32, 64, (2, 1, 2), 4, 8),
    tile(128, 32, 64, (4, 1, 1), 3, 8),
    tile(128, 16, 64, (4, 1, 1), 4, 8),
    tile(256, 32, 64, (8, 1, 1), 3, 8),
];

/// Shapes for bytes. A step of them has twice the depth, and the same bytes and instructions.
const BYTES: [Tile; 12] = [
    tile(64, 64, 64, (2, 2, 1), 4, 8),
    tile(128, 128, 32, (2, 4, 1), 4, 8),
    tile(128, 128, 64, (2, 4, 1), 3, 8),
    tile(64, 128, 64, (2, 2, 1), 3, 8),
    tile(128, 64, 64, (2, 2, 1), 3, 8),
    tile(256, 64, 32, (4, 2, 1), 4, 8),
    tile(16, 64, 64, (1, 1, 4), 6, 8),
    tile(16, 128, 64, (1, 2, 2), 4, 8),
    tile(32, 32, 64, (1, 1, 4), 6, 8),
    tile(32, 64, 64, (1, 2, 2), 4, 8),
    tile(64, 32, 64, (2, 1, 2), 4, 8),
    tile(128, 32, 64, (4, 1, 1), 3, 8),
];

/// Every shape as it appears in a kernel's type, for tests that all are tried.
pub fn shapes() -> Vec<String> {
    let all = PLAIN.iter().chain(&NORMALIZING).chain(&IMAGE).chain(&GENERAL);
    all.map(|tile| {
        let (wm, wn, wk) = tile.warps;
        let Tile { bm, bn, bk, stages, .. } = tile;
        format!("{bm}, {bn}, {bk}, {wm}, {wn}, {wk}, {stages}")
    })
    .collect()
}

/// The maximum depth of a normalising tile; `kPreDepth` of `ConvConfig`.
pub const NORMALIZED_DEPTH_MAX: usize = 2560;

/// The maximum number of arrival words of a split product.
pub const ARRIVALS_MAX: usize = 1 << 16;

/// The maximum workspace of a split product.
pub const WORKSPACE_BYTES_MAX: usize = 64 << 20;

/// The properties of a product that the selection of tiles uses.
#[derive(Clone, Copy, Debug)]
pub struct Problem {
    /// Output pixels.
    pub rows: usize,
    /// Output channels, rounded up to eight.
    pub columns: usize,
    /// Taps times channels.
    pub depth: usize,
    /// Products of these sizes: batches, groups, phases.
    pub parts: usize,
    /// Bytes of constant weights.
    pub weight_bytes: usize,
    /// Channels of a copy: 8, or 4 for an image.
    pub vec: usize,
    /// The access to the input.
    pub access: InputAccess,
    /// Whether the input is normalised while it is loaded.
    pub normalizes: bool,
    /// Multiprocessors of the device.
    pub multiprocessors: usize,
    /// Whether the device runs blocks in clusters.
    pub clusters: bool,
}

/// A tile with a split of the depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The shape.
    pub tile: Tile,
    /// Parts that the depth is split into.
    pub splits: usize,
    /// How their sums are added.
    pub reduction: SplitReduction,
}

impl Tile {
    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.warps.0 * self.warps.1 * self.warps.2 * 32
    }

    /// Floats of one warp group's partial sums.
    pub fn part_floats(&self) -> usize {
        self.bm * (self.bn + 8)
    }

    /// Dynamic shared memory; `kShared` of `ConvConfig`.
    pub fn shared_bytes(&self, normalizes: bool) -> usize {
        let ring = (self.bm + self.bn) * self.bk * 2 * self.stages;
        let sums = self.warps.2 * self.part_floats() * 4;
        let scales = if normalizes { NORMALIZED_DEPTH_MAX * 4 } else { 0 };
        ring.max(sums) + self.bn * 4 + scales
    }

    /// The kernel for `access`.
    pub fn kernel(&self, access: InputAccess, normalizes: bool) -> KernelText {
        let (wm, wn, wk) = self.warps;
        let access = match access {
            InputAccess::General | InputAccess::Strided | InputAccess::Bytes => "tiles::kGeneral",
            InputAccess::Point => "tiles::kPoint",
            InputAccess::Taps => "tiles::kTaps",
        };
        let Tile { bm, bn, bk, stages, vec, .. } = self;
        KernelText {
            source: "#include \"conv.cuh\"\n".to_string(),
            expression: format!(
                "tiles::Conv<tiles::ConvConfig<{bm}, {bn}, {bk}, {wm}, {wn}, {wk}, {stages}, \
                 {access}, {vec}, {normalizes}>>"
            ),
            threads: self.threads() as u32,
            shared_bytes: self.shared_bytes(normalizes) as u32,
        }
    }

    fn blocks_per_multiprocessor(&self, normalizes: bool) -> usize {
        let by_memory = (226 << 10) / (self.shared_bytes(normalizes) + 1024);
        let fragments = (self.bm / self.warps.0 / 16) * (self.bn / self.warps.1 / 8);
        let by_registers = 65536 / (self.threads() * (fragments * 4 + 64));
        by_memory.min(by_registers).max(1)
    }
}

impl Problem {
    /// Every variant worth measuring, the one with the lowest estimate first.
    pub fn variants(&self) -> Vec<Variant> {
        self.estimated_variants().into_iter().map(|(_, variant)| variant).collect()
    }

    /// The same with their estimates in microseconds.
    pub fn estimated_variants(&self) -> Vec<(f64, Variant)> {
        let mut all: Vec<(f64, Variant)> = self.estimated().collect();
        all.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        all
    }

    /// The same in no order.
    pub fn estimated(&self) -> impl Iterator<Item = (f64, Variant)> + '_ {
        let all = self.tiles().into_iter().flat_map(|tile| self.splits_of(tile));
        all.map(|variant| (self.estimate_us(&variant), variant))
    }

    fn tiles(&self) -> Vec<Tile> {
        let candidates: &[Tile] = match (self.vec, self.normalizes, self.access) {
            (4, ..) => &IMAGE,
            (_, true, _) => &NORMALIZING,
            (_, _, InputAccess::General) => &GENERAL,
            (_, _, InputAccess::Strided) => &STRIDED,
            (_, _, InputAccess::Bytes) => &BYTES,
            _ => &PLAIN,
        };
        let fitting: Vec<Tile> =
            candidates.iter().copied().filter(|tile| !self.wastes(tile)).collect();
        let larger = |tile: &Tile| {
            fitting.iter().any(|other| {
                other.bm * other.bn > tile.bm * tile.bn
                    && self.covered(other) <= self.covered(tile) * 11 / 10
            })
        };
        let kept: Vec<Tile> = fitting
            .iter()
            .copied()
            .filter(|tile| !(self.vec == 8 && self.has_far_too_many(tile) && larger(tile)))
            .collect();
        if kept.is_empty() { vec![candidates[0]] } else { kept }
    }

    fn tile_count(&self, tile: &Tile) -> usize {
        self.parts * self.rows.div_ceil(tile.bm) * self.columns.div_ceil(tile.bn)
    }

    /// Outputs of all tiles, those that do not exist included.
    fn covered(&self, tile: &Tile) -> usize {
        self.tile_count(tile) * tile.bm * tile.bn
    }

    /// Whether tiles are much larger than the problem.
    fn wastes(&self, tile: &Tile) -> bool {
        let waste = self.covered(tile) as f64 / (self.parts * self.rows * self.columns) as f64;
        let smallest = tile.bm * tile.bn <= 16 * 64 || (self.rows < 16 && tile.bm == 16);
        waste > 2.5 && !smallest
    }

    /// Whether tiles are far too small for the problem.
    fn has_far_too_many(&self, tile: &Tile) -> bool {
        let tiles = self.tile_count(tile);
        let small = tile.bm * tile.bn <= 2048;
        tiles > 48 * self.multiprocessors || (small && tiles > 8 * self.multiprocessors)
    }

    fn splits_of(&self, tile: Tile) -> Vec<Variant> {
        let tiles = self.tile_count(&tile);
        let steps = self.depth.div_ceil(tile.bk);
        let mut variants = vec![Variant { tile, splits: 1, reduction: SplitReduction::Whole }];
        for splits in [2, 3, 4, 6, 8, 12, 16] {
            if tiles * splits > 4 * self.multiprocessors || steps < splits * 2 {
                break;
            }
            // Clusters beyond eight blocks are not portable.
            if splits <= 8 && self.clusters {
                variants.push(Variant { tile, splits, reduction: SplitReduction::Cluster });
            }
            let variant = Variant { tile, splits, reduction: SplitReduction::Workspace };
            let fits =
                variant.workspace_bytes(self) <= WORKSPACE_BYTES_MAX && tiles <= ARRIVALS_MAX;
            if fits && splits.is_power_of_two() {
                variants.push(variant);
            }
        }
        variants
    }

    /// An estimate of the time, to sort variants without measurements: the start of the launch,
    /// then the blocks of an SM, as many at a time as it holds, or the weights from memory, and the
    /// sum of the parts. `scripts/gpu/calibrate.py` has the same lines and fits the constants.
    pub fn estimate_us(&self, variant: &Variant) -> f64 {
        let tile = variant.tile;
        let blocks = (self.tile_count(&tile) * variant.splits).div_ceil(self.multiprocessors);
        let steps = self.depth.div_ceil(tile.bk).div_ceil(variant.splits) as f64;
        let resident = tile.blocks_per_multiprocessor(self.normalizes);
        let mut step = ((2 * tile.bm * tile.bn * tile.bk) as f64 / fitted::FLOPS)
            .max(((tile.bm + tile.bn) * tile.bk * 2) as f64 / fitted::L2_BYTES);
        if self.access == InputAccess::Strided {
            step *= fitted::STRIDED;
        }
        let wait = fitted::LATENCY_US / (tile.stages - 1) as f64;
        let outputs = (blocks * tile.bm * tile.bn) as f64 / variant.splits as f64;
        let work = rounds_us(blocks, resident, steps, step, wait)
            + blocks.div_ceil(resident) as f64 * fitted::BLOCK_US
            + outputs / fitted::OUTPUTS;
        let joining = match variant.reduction {
            SplitReduction::Whole => 0.0,
            SplitReduction::Cluster => fitted::CLUSTER_US + fitted::PART_US * variant.splits as f64,
            SplitReduction::Workspace => {
                fitted::WORKSPACE_US + fitted::PART_US * variant.splits as f64
            }
        };
        let all = self.tile_count(&tile) * variant.splits;
        let weights = weights_us(self.weight_bytes, all, self.multiprocessors);
        fitted::LAUNCH_US + overlapped_us(work, weights) + joining
    }
}

/// The time of weights from memory; SMs without a block do not read.
pub fn weights_us(bytes: usize, blocks: usize, multiprocessors: usize) -> f64 {
    let busy = (blocks as f64 / multiprocessors as f64).min(1.0);
    bytes as f64 / (fitted::DRAM_BYTES * busy)
}

/// The longer of both; of equal ones, the variant with less of the other is better.
pub fn overlapped_us(work: f64, weights: f64) -> f64 {
    work.max(weights) + 0.05 * work.min(weights)
}

/// The time of an SM's `blocks`, `resident` at a time: each step takes as long as all of them
/// compute, or as one waits for its copies.
fn rounds_us(blocks: usize, resident: usize, steps: f64, step: f64, wait: f64) -> f64 {
    let at_once = |blocks: usize| steps * (blocks as f64 * step).max(wait);
    let rest = match blocks % resident {
        0 => 0.0,
        rest => at_once(rest),
    };
    (blocks / resident) as f64 * at_once(resident) + rest
}

/// Fitted to the fastest variants of the products and convolutions of 13 networks at three batches
/// on an H200: these must take the estimated time, and no other variant may seem faster.
pub mod fitted {
    /// From the launch until its first block runs.
    pub const LAUNCH_US: f64 = 0.777;
    /// The start and the end of a block.
    pub const BLOCK_US: f64 = 0.975;
    /// From the start of a copy until its data is there.
    pub const LATENCY_US: f64 = 0.653;
    /// Operations per microsecond and SM, with `mma.sync`.
    pub const FLOPS: f64 = 1.2e6;
    /// Bytes from L2 per microsecond and SM.
    pub const L2_BYTES: f64 = 302e3;
    /// Bytes of weights from memory per microsecond; that of the device, not fitted.
    pub const DRAM_BYTES: f64 = 3.4e6;
    /// Outputs written per microsecond and SM.
    pub const OUTPUTS: f64 = 13.1e3;
    /// The sum of parts in a cluster, and through memory; and for each of them.
    pub const CLUSTER_US: f64 = 1.45;
    /// See above.
    pub const WORKSPACE_US: f64 = 1.41;
    /// See above.
    pub const PART_US: f64 = 0.115;
    /// A step with operands of any strides.
    pub const STRIDED: f64 = 1.3;
    /// As above, of the kernels for Hopper.
    pub const HOPPER_LAUNCH_US: f64 = 0.711;
    /// See above.
    pub const HOPPER_LATENCY_US: f64 = 0.442;
    /// Operations per microsecond and SM, with `wgmma`.
    pub const HOPPER_FLOPS: f64 = 6e6;
    /// See above.
    pub const HOPPER_L2_BYTES: f64 = 110e3;
    /// See above.
    pub const HOPPER_OUTPUTS: f64 = 7.24e3;
    /// How much faster an epilogue is beside the products of another block or warpgroup.
    pub const HOPPER_OVERLAP: f64 = 1.28;
}

impl Variant {
    /// A name for tables and the tuning cache.
    pub fn name(&self) -> String {
        let Tile { bm, bn, bk, warps, .. } = self.tile;
        let depth = if warps.2 > 1 { format!("k{}", warps.2) } else { String::new() };
        let split = match self.reduction {
            SplitReduction::Whole => String::new(),
            SplitReduction::Workspace => format!("/w{}", self.splits),
            SplitReduction::Cluster => format!("/c{}", self.splits),
        };
        format!("{bm}x{bn}x{bk}{depth}{split}")
    }

    /// Blocks.
    pub fn tiles(&self, problem: &Problem) -> usize {
        problem.tile_count(&self.tile) * self.splits
    }

    /// Output tiles, each with an arrival word when split through the workspace.
    pub fn arrivals(&self, problem: &Problem) -> usize {
        if self.reduction == SplitReduction::Workspace { problem.tile_count(&self.tile) } else { 0 }
    }

    /// Memory for the partial sums.
    pub fn workspace_bytes(&self, problem: &Problem) -> usize {
        if self.reduction != SplitReduction::Workspace {
            return 0;
        }
        self.tiles(problem) * self.tile.warps.2 * self.tile.part_floats() * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(rows: usize, columns: usize, depth: usize) -> Problem {
        let access = InputAccess::Point;
        Problem {
            rows,
            columns,
            depth,
            parts: 1,
            weight_bytes: 2 * columns * depth,
            vec: 8,
            access,
            normalizes: false,
            multiprocessors: 132,
            clusters: true,
        }
    }

    #[test]
    fn every_problem_has_a_variant_without_a_cluster() {
        for rows in [1, 7, 49, 196, 3136, 401_408] {
            for (columns, depth) in [(8, 8), (64, 576), (1000, 2048), (4096, 25088)] {
                let variants = problem(rows, columns, depth).variants();
                assert!(
                    variants.iter().any(|variant| variant.reduction != SplitReduction::Cluster)
                );
                let names: std::collections::HashSet<String> =
                    variants.iter().map(Variant::name).collect();
                assert_eq!(names.len(), variants.len(), "{rows} {columns} {depth}");
            }
        }
    }

    /// Narrow results of many rows have many tiles of any shape: the widest that is not half empty
    /// must remain.
    #[test]
    fn results_of_many_rows_and_few_columns_have_narrow_tiles() {
        for (columns, widest) in [(8, 16), (16, 16), (32, 32), (48, 64), (64, 64)] {
            for rows in [614_400, 2_457_600, 4_194_304] {
                let variants = problem(rows, columns, 576).variants();
                let fitting = variants.iter().any(|v| v.tile.bn <= widest && v.tile.bm >= 128);
                assert!(fitting, "{rows}x{columns}");
            }
        }
    }

    #[test]
    fn small_problems_are_split_and_large_ones_get_large_tiles() {
        let fc = problem(1, 4096, 25088).variants()[0];
        assert!(fc.tile.bm == 16, "{}", fc.name());
        let large = problem(100_352, 512, 1152).variants()[0];
        assert!(large.tile.bm * large.tile.bn >= 64 * 128, "{}", large.name());
        let deep = problem(49, 512, 4608).variants()[0];
        assert!(deep.splits > 1, "{}", deep.name());
    }
}
