//! Tile shapes of the attention kernel, and which of them suit a problem.

use model::gpu::GpuTarget;

/// The sizes that determine the choice.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Heads of all sequences.
    pub outer: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head.
    pub keys: usize,
    /// Elements of a query and a key.
    pub width: usize,
    /// Elements of a value.
    pub value_width: usize,
}

impl Extent {
    fn padded(&self) -> (usize, usize) {
        (self.width.next_multiple_of(16), self.value_width.next_multiple_of(16))
    }
}

/// A tile shape, and in how many parts the keys are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Warps that divide the queries of a tile.
    pub row_warps: usize,
    /// Warps that divide a block of keys.
    pub key_warps: usize,
    /// Times 16 queries of a warp.
    pub row_tiles: usize,
    /// Keys of a block.
    pub keys: usize,
    /// Parts that were asked for; [`Variant::splits`] are not empty.
    parts: usize,
}

const fn shape(row_warps: usize, key_warps: usize, row_tiles: usize, keys: usize) -> Variant {
    Variant { row_warps, key_warps, row_tiles, keys, parts: 1 }
}

/// Heads of up to 128.
const NARROW: [Variant; 4] =
    [shape(4, 1, 2, 64), shape(4, 1, 1, 64), shape(2, 2, 1, 64), shape(1, 4, 1, 64)];

/// Wider heads: fewer scores beside more sums in registers, smaller blocks in shared memory.
const WIDE: [Variant; 3] = [shape(4, 1, 1, 32), shape(2, 2, 1, 32), shape(1, 2, 1, 32)];

/// The maximum number of parts: arrival bits of a word.
const SPLITS_MAX: usize = 32;

impl Variant {
    /// Queries of a tile.
    pub fn queries(&self) -> usize {
        self.row_warps * self.row_tiles * 16
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.row_warps * self.key_warps * 32
    }

    fn key_blocks(&self, extent: &Extent) -> usize {
        extent.keys.div_ceil(self.keys)
    }

    /// Keys of a part.
    pub fn split_keys(&self, extent: &Extent) -> usize {
        self.key_blocks(extent).div_ceil(self.parts) * self.keys
    }

    /// Parts of the keys.
    pub fn splits(&self, extent: &Extent) -> usize {
        extent.keys.div_ceil(self.split_keys(extent))
    }

    /// Tiles without the split.
    pub fn output_tiles(&self, extent: &Extent) -> usize {
        extent.outer * extent.queries.div_ceil(self.queries())
    }

    /// Blocks of the launch.
    pub fn tiles(&self, extent: &Extent) -> usize {
        self.output_tiles(extent) * self.splits(extent)
    }

    /// Floats of one part of a tile: `kPart` of the kernel.
    fn part_floats(&self, extent: &Extent) -> usize {
        self.queries() * (extent.padded().1 + 4)
    }

    /// `kShared` of the kernel.
    pub fn shared_bytes(&self, extent: &Extent) -> usize {
        let (dim, values) = extent.padded();
        let (pitch, value_pitch) = (dim * 2 + 16, values * 2 + 16);
        let ring = self.queries() * pitch + 2 * self.keys * (pitch + value_pitch);
        ring.max(self.key_warps * self.part_floats(extent) * 4)
    }

    /// Memory for the parts of all tiles.
    pub fn workspace_bytes(&self, extent: &Extent) -> usize {
        self.tiles(extent) * self.part_floats(extent) * 4
    }

    /// A name that is unique within a step.
    pub fn name(&self, extent: &Extent) -> String {
        let warps = if self.key_warps > 1 { format!("k{}", self.key_warps) } else { String::new() };
        let split = match self.splits(extent) {
            1 => String::new(),
            splits => format!("/w{splits}"),
        };
        format!("{}x{}{warps}{split}", self.queries(), self.keys)
    }

    /// What its name is made of.
    fn label(&self, extent: &Extent) -> [usize; 4] {
        [self.queries(), self.keys, self.key_warps, self.splits(extent)]
    }

    /// An estimate in cycles: waves of blocks, each a start and a step per block of keys. A step
    /// takes as long as a warp for its own part, or as the tensor cores and the shared memory need
    /// for all resident warps. The numbers are fitted to measurements on an H200.
    fn cost(&self, extent: &Extent, target: &GpuTarget) -> f64 {
        let (dim, values) = extent.padded();
        let warp_keys = self.keys / self.key_warps;
        let products = (self.row_tiles * warp_keys * (dim + values)) as f64 / 128.0;
        let loads = (warp_keys * (dim + values)) as f64 / 256.0;
        let scores = (self.row_tiles * warp_keys) as f64 / 2.0;
        let warps = self.row_warps * self.key_warps;
        let multiprocessors = target.multiprocessors.max(1) as usize;
        let memory = shared_limit(target) / (self.shared_bytes(extent) + 1024);
        let registers = if self.row_tiles > 1 { 2 } else { (16 / warps).max(1) };
        let resident = memory.clamp(1, registers);
        let tiles = self.tiles(extent);
        let beside = tiles.div_ceil(multiprocessors).min(resident);
        let latency = 770.0 + 10.0 * products;
        let throughput =
            (beside * warps) as f64 * (2.3 * products + 1.06 * scores + 1.5 * loads + 49.0);
        let steps = self.split_keys(extent).min(extent.keys).div_ceil(self.keys);
        let combine = match self.splits(extent) {
            1 => 0.0,
            splits => 1000.0 + 220.0 * splits as f64,
        };
        let waves = tiles as f64 / (resident * multiprocessors) as f64;
        let block = 5800.0 + combine + steps as f64 * latency.max(throughput);
        block * if waves > 4.0 { waves } else { waves.ceil() }
    }
}

/// A shape that wastes less than tiles of 64 by 64, for lengths a little above a multiple of it;
/// `None` when it saves less than a tenth. Narrow heads only: the scores take registers.
fn fitted(extent: &Extent) -> Option<Variant> {
    if extent.width.max(extent.value_width) > 64 || extent.queries <= 64 {
        return None;
    }
    let padded = |length: usize, block: usize| length.div_ceil(block) * block;
    let area = |variant: &Variant| {
        padded(extent.queries, variant.queries()) * padded(extent.keys, variant.keys)
    };
    let shapes = (4..=8).flat_map(|warps| (4..=8).map(move |n| shape(warps, 1, 1, n * 16)));
    // Of equal ones the largest, which takes the fewest steps.
    let best = shapes.min_by_key(|v| (area(v), std::cmp::Reverse(v.queries() * v.keys)))?;
    (area(&best) * 10 <= area(&shape(4, 1, 1, 64)) * 9).then_some(best)
}

/// Shared memory that one block may have, less what a best-effort kernel needs itself.
fn shared_limit(target: &GpuTarget) -> usize {
    target.block_shared_bytes() as usize - 128
}

/// The variants for a problem, the one with the lowest estimate first.
pub fn variants(extent: &Extent, target: &GpuTarget) -> Vec<Variant> {
    let wide = extent.width.max(extent.value_width) > 128;
    let shapes: &[Variant] = if wide { &WIDE } else { &NARROW };
    let limit = shared_limit(target);
    let fits = |variant: &&Variant| variant.shared_bytes(extent) <= limit;
    let useful = |variant: &&Variant| {
        // A tile of which more than half is empty: the next smaller one does the same.
        extent.queries > variant.queries() / 2 || variant.queries() == 16
    };
    let extra = fitted(extent)
        .filter(|fitted| shapes.iter().all(|shape| shape.label(extent) != fitted.label(extent)));
    let mut variants: Vec<Variant> =
        shapes.iter().chain(&extra).filter(fits).filter(useful).copied().collect();
    for variant in variants.clone() {
        let (tiles, blocks) = (variant.tiles(extent), variant.key_blocks(extent));
        let wanted = (2 * target.multiprocessors as usize).div_ceil(tiles.max(1));
        for parts in [wanted, wanted.div_ceil(2)] {
            let split = Variant { parts: parts.min(blocks / 2).clamp(1, SPLITS_MAX), ..variant };
            let known = |other: &Variant| other.label(extent) == split.label(extent);
            if split.splits(extent) > 1 && !variants.iter().any(known) {
                variants.push(split);
            }
        }
    }
    let cost = |variant: Variant| (variant.cost(extent, target), variant);
    let mut costs: Vec<(f64, Variant)> = variants.into_iter().map(cost).collect();
    costs.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    costs.into_iter().map(|(_, variant)| variant).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::gpu::Precision;

    fn target(capability: u32) -> GpuTarget {
        GpuTarget { capability, multiprocessors: 132, precision: Precision::F16 }
    }

    fn extent(outer: usize, queries: usize, keys: usize, width: usize) -> Extent {
        Extent { outer, queries, keys, width, value_width: width }
    }

    #[test]
    fn every_size_has_variants_that_fit_every_device() {
        for capability in [80, 86, 89, 90, 100, 120] {
            for width in (1..=256).step_by(5) {
                for (queries, keys) in [(1, 1), (1, 9000), (49, 49), (2000, 77), (4096, 4096)] {
                    let extent = extent(12, queries, keys, width);
                    let variants = variants(&extent, &target(capability));
                    assert!(variants.iter().any(|v| v.splits(&extent) == 1), "{extent:?}");
                    let names: std::collections::HashSet<String> =
                        variants.iter().map(|variant| variant.name(&extent)).collect();
                    assert_eq!(names.len(), variants.len(), "{extent:?}");
                    for variant in variants {
                        let limit = shared_limit(&target(capability));
                        assert!(variant.shared_bytes(&extent) <= limit);
                        let (splits, part) = (variant.splits(&extent), variant.split_keys(&extent));
                        assert!(splits <= 32 && (splits - 1) * part < keys, "{variant:?}");
                        assert!(splits * part >= keys, "{variant:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn few_queries_split_the_keys_and_many_take_large_tiles() {
        let decode = extent(8, 4, 4096, 128);
        assert!(variants(&decode, &target(90))[0].splits(&decode) > 4);
        let long = extent(32, 4096, 4096, 64);
        assert_eq!(variants(&long, &target(90))[0].queries(), 128);
        let short = extent(12, 128, 128, 64);
        assert!(variants(&short, &target(90))[0].queries() <= 32);
        let uneven = extent(192, 197, 197, 64);
        let best = variants(&uneven, &target(90))[0];
        assert_eq!((best.queries(), best.keys), (112, 112));
    }
}
