//! The innermost loops of convolutions in channel blocks: a few adjacent positions times a few
//! blocks of the result, held in registers.

use rten_simd::Isa;
use rten_simd::ops::{BitOps, NumOps};

/// Blocks of the result that one pass computes.
pub(super) const MAX_BLOCKS: usize = 3;

/// Positions of the result that one pass computes for `blocks` blocks: as many as there are
/// registers for, beside those of weights and of an element of the image.
pub(super) fn most_positions(lanes: usize, blocks: usize) -> usize {
    match (lanes, blocks) {
        (16, 3) => 7,
        (16, _) => 8,
        _ => 4,
    }
}

/// Stands for a stride where the image is plain: that stride is no constant.
const PLAIN: usize = 0;

/// A multiple of what tiles have.
pub(super) const UNIT: usize = 56;

/// Operations on a tile beside the product.
#[derive(Clone, Copy)]
pub(super) struct Finish<'a> {
    /// Adds the present content of the result's memory.
    pub(super) add: bool,
    /// Whether nothing is added to the result later.
    pub(super) last: bool,
    /// One element per channel of the tile's blocks.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) clamp: Option<(f32, f32)>,
}

/// One tile and its operands.
pub(super) struct Tile<'a, 'b> {
    /// The result's blocks from the tile's first position on, with a residual to add for each.
    pub(super) out: &'a mut [&'b mut [f32]],
    pub(super) residual: Option<[&'a [f32]; MAX_BLOCKS]>,
    /// The image from the window of the first position on.
    pub(super) image: &'a [f32],
    /// Where each block and tap begins in the image.
    pub(super) offsets: &'a [usize],
    /// For each of them and each channel that lies there, the factors of the result's channels.
    pub(super) weights: &'a [f32],
    pub(super) positions: usize,
    /// Whether a place of the image holds one channel instead of a block of them.
    pub(super) is_plain: bool,
    pub(super) stride: usize,
    pub(super) finish: Finish<'a>,
}

impl Tile<'_, '_> {
    /// Computes the tile.
    #[inline(always)]
    pub(super) fn compute<I: Isa>(self, isa: I) {
        match self.out.len() {
            1 => self.of_blocks::<I, 1>(isa),
            2 => self.of_blocks::<I, 2>(isa),
            _ => self.of_blocks::<I, 3>(isa),
        }
    }

    #[inline(always)]
    fn of_blocks<I: Isa, const BLOCKS: usize>(self, isa: I) {
        match (self.is_plain, self.stride) {
            (true, _) => self.of_form::<I, BLOCKS, PLAIN>(isa),
            (_, 1) => self.of_form::<I, BLOCKS, 1>(isa),
            _ => self.of_form::<I, BLOCKS, 2>(isa),
        }
    }

    #[inline(always)]
    fn of_form<I: Isa, const BLOCKS: usize, const STRIDE: usize>(self, isa: I) {
        match self.positions {
            1 => self.sized::<I, BLOCKS, STRIDE, 1>(isa),
            2 => self.sized::<I, BLOCKS, STRIDE, 2>(isa),
            3 => self.sized::<I, BLOCKS, STRIDE, 3>(isa),
            4 => self.sized::<I, BLOCKS, STRIDE, 4>(isa),
            5 => self.sized::<I, BLOCKS, STRIDE, 5>(isa),
            6 => self.sized::<I, BLOCKS, STRIDE, 6>(isa),
            7 => self.sized::<I, BLOCKS, STRIDE, 7>(isa),
            _ => self.sized::<I, BLOCKS, STRIDE, 8>(isa),
        }
    }

    #[inline(always)]
    fn sized<I: Isa, const BLOCKS: usize, const STRIDE: usize, const POSITIONS: usize>(
        self,
        isa: I,
    ) {
        let sums = match STRIDE {
            PLAIN => self.sums_of_plain::<I, BLOCKS, POSITIONS>(isa),
            _ => self.sums_of_blocks::<I, BLOCKS, STRIDE, POSITIONS>(isa),
        };
        self.write(isa, &sums);
    }

    /// Of an image whose places hold one channel.
    #[inline(always)]
    fn sums_of_plain<I: Isa, const BLOCKS: usize, const POSITIONS: usize>(
        &self,
        isa: I,
    ) -> [[I::F32; BLOCKS]; POSITIONS] {
        let ops = isa.f32();
        let mut sums = [[ops.zero(); BLOCKS]; POSITIONS];
        let stride = self.stride;
        let reach = (POSITIONS - 1) * stride + 1;
        let weights = self.weights.chunks_exact(BLOCKS * ops.len());
        for (&offset, weights) in self.offsets.iter().zip(weights) {
            let image = &self.image[offset..][..reach];
            let weights: [I::F32; BLOCKS] = ops.load_many::<BLOCKS>(weights);
            for position in 0..POSITIONS {
                let x = ops.splat(image[position * stride]);
                for block in 0..BLOCKS {
                    sums[position][block] = ops.mul_add(x, weights[block], sums[position][block]);
                }
            }
        }
        sums
    }

    /// Of an image whose places hold a block of channels.
    #[inline(always)]
    fn sums_of_blocks<I: Isa, const BLOCKS: usize, const STRIDE: usize, const POSITIONS: usize>(
        &self,
        isa: I,
    ) -> [[I::F32; BLOCKS]; POSITIONS] {
        let ops = isa.f32();
        let lanes = ops.len();
        let mut sums = [[ops.zero(); BLOCKS]; POSITIONS];
        let reach = ((POSITIONS - 1) * STRIDE + 1) * lanes;
        let weights = self.weights.chunks_exact(lanes * BLOCKS * lanes);
        for (&offset, weights) in self.offsets.iter().zip(weights) {
            let image = &self.image[offset..][..reach];
            for (lane, weights) in weights.chunks_exact(BLOCKS * lanes).enumerate() {
                let weights: [I::F32; BLOCKS] = ops.load_many::<BLOCKS>(weights);
                for position in 0..POSITIONS {
                    let x = ops.splat(image[position * STRIDE * lanes + lane]);
                    for block in 0..BLOCKS {
                        sums[position][block] =
                            ops.mul_add(x, weights[block], sums[position][block]);
                    }
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn write<I: Isa, const BLOCKS: usize, const POSITIONS: usize>(
        self,
        isa: I,
        sums: &[[I::F32; BLOCKS]; POSITIONS],
    ) {
        let ops = isa.f32();
        let lanes = ops.len();
        let finish = self.finish;
        let (low, high) = finish.clamp.unwrap_or_default();
        let (low, high) = (ops.splat(low), ops.splat(high));
        for (block, out) in self.out.iter_mut().enumerate().take(BLOCKS) {
            let out = &mut out[..POSITIONS * lanes];
            let bias = match finish.bias {
                Some(bias) if finish.last => ops.load(&bias[block * lanes..]),
                _ => ops.zero(),
            };
            let residual = match self.residual {
                Some(residual) if finish.last => Some(&residual[block][..POSITIONS * lanes]),
                _ => None,
            };
            for (position, out) in out.chunks_exact_mut(lanes).enumerate() {
                let mut value = ops.add(sums[position][block], bias);
                if finish.add {
                    value = ops.add(value, ops.load(out));
                }
                if let Some(residual) = residual {
                    value = ops.add(value, ops.load(&residual[position * lanes..]));
                }
                if finish.last && finish.clamp.is_some() {
                    value = ops.min(high, ops.max(low, value));
                }
                ops.store(value, out);
            }
        }
    }
}
