//! Products of bytes: the innermost loop, with the dot products of the processor.
//!
//! The only `unsafe` code is the call of a function that is compiled for an instruction set, after
//! the processor was asked whether it has it ([`InstructionSet::detected`]).

mod blocks;
mod plain;
#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
mod x86_blocks;

use std::sync::OnceLock;

pub use blocks::{BLOCK, BlockFinish, BlockRun, MAX_BLOCKS, ROUND};

/// Columns of a vector: each is 32 bits with the bytes of four depths.
pub const LANES: usize = 16;

/// The most rows that [`dot`] computes at a time.
pub const MAX_ROWS: usize = 8;

/// The most vectors of columns that [`dot`] computes at a time.
pub const MAX_VECTORS: usize = 3;

/// Depths in one word.
pub const WORD_DEPTH: usize = 4;

/// Sums by row and vector.
pub type Sums = [[[i32; LANES]; MAX_VECTORS]; MAX_ROWS];

/// Which operand's bytes are unsigned. The other's are signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsigned {
    /// That with rows.
    Left,
    /// That with columns.
    Right,
}

/// How dot products are computed. All compute the same sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// Whatever the compiler makes of it.
    Plain,
    /// Pairs of 16-bit products, 256 bits at a time.
    Avx2,
    /// Pairs of 16-bit products, 512 bits at a time.
    Avx512,
    /// Dot products of four bytes, 512 bits at a time.
    Avx512Vnni,
}

impl InstructionSet {
    /// Every one.
    pub const ALL: [InstructionSet; 4] = [
        InstructionSet::Plain,
        InstructionSet::Avx2,
        InstructionSet::Avx512,
        InstructionSet::Avx512Vnni,
    ];

    /// Its name in reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            InstructionSet::Plain => "plain",
            InstructionSet::Avx2 => "AVX2",
            InstructionSet::Avx512 => "AVX-512",
            InstructionSet::Avx512Vnni => "AVX-512 VNNI",
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            InstructionSet::Plain => true,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
            }
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Vnni => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The fastest one that this processor has.
    pub fn detected() -> InstructionSet {
        static DETECTED: OnceLock<InstructionSet> = OnceLock::new();
        *DETECTED.get_or_init(|| {
            let available = InstructionSet::ALL.into_iter().rev().find(|set| set.is_available());
            available.unwrap_or(InstructionSet::Plain)
        })
    }
}

/// `sums[row][vector][lane]` = the sum over all depths of the products of a row's bytes and a
/// column's.
///
/// `left` holds, for each four depths, a word for each of `rows` rows; `right`, for each four
/// depths, `vectors` vectors of [`LANES`] words. `rows` is 1, 2, 4 or 8, `vectors` is 1, 2 or 3;
/// other sums are not written. Sums beyond 32 bits wrap around.
pub fn dot(
    rows: usize,
    vectors: usize,
    unsigned: Unsigned,
    left: &[u32],
    right: &[u32],
    sums: &mut Sums,
) {
    dot_with(InstructionSet::detected(), rows, vectors, unsigned, left, right, sums);
}

/// Like [`dot`], with the instruction set `set`, or the plain one where the processor lacks it.
pub fn dot_with(
    set: InstructionSet,
    rows: usize,
    vectors: usize,
    unsigned: Unsigned,
    left: &[u32],
    right: &[u32],
    sums: &mut Sums,
) {
    let tile = Tile { left, right, sums };
    match (rows, vectors) {
        (8, 3) => tile.run::<8, 3>(set, unsigned),
        (8, 2) => tile.run::<8, 2>(set, unsigned),
        (8, _) => tile.run::<8, 1>(set, unsigned),
        (4, 3) => tile.run::<4, 3>(set, unsigned),
        (4, 2) => tile.run::<4, 2>(set, unsigned),
        (4, _) => tile.run::<4, 1>(set, unsigned),
        (2, 3) => tile.run::<2, 3>(set, unsigned),
        (2, 2) => tile.run::<2, 2>(set, unsigned),
        (2, _) => tile.run::<2, 1>(set, unsigned),
        (_, 3) => tile.run::<1, 3>(set, unsigned),
        (_, 2) => tile.run::<1, 2>(set, unsigned),
        (_, _) => tile.run::<1, 1>(set, unsigned),
    }
}

/// Computes the convolution `run`.
pub fn convolve(run: BlockRun) {
    convolve_with(InstructionSet::detected(), run);
}

/// Like [`convolve`], with the instruction set `set`, or the plain one where the processor lacks
/// it.
#[allow(unsafe_code)]
pub fn convolve_with(set: InstructionSet, run: BlockRun) {
    match set {
        // SAFETY: the processor has what the functions are compiled for, and they need nothing
        // else.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Vnni if set.is_available() => unsafe {
            x86_blocks::vnni::convolve(run);
        },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 if set.is_available() => unsafe {
            x86_blocks::pairs::convolve(run);
        },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 if set.is_available() => unsafe { x86_blocks::convolve_avx2(run) },
        _ => plain::convolve(run),
    }
}

/// The operands of one call.
struct Tile<'a> {
    left: &'a [u32],
    right: &'a [u32],
    sums: &'a mut Sums,
}

impl Tile<'_> {
    fn run<const ROWS: usize, const VECTORS: usize>(self, set: InstructionSet, signs: Unsigned) {
        match signs {
            Unsigned::Left => self.signed::<ROWS, VECTORS, true>(set),
            Unsigned::Right => self.signed::<ROWS, VECTORS, false>(set),
        }
    }

    #[allow(unsafe_code)]
    fn signed<const ROWS: usize, const VECTORS: usize, const LEFT: bool>(
        self,
        set: InstructionSet,
    ) {
        match set {
            // SAFETY: the processor has what the functions are compiled for, and they need nothing
            // else.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Vnni if set.is_available() => unsafe {
                x86::dot_vnni::<ROWS, VECTORS, LEFT>(self);
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 if set.is_available() => unsafe {
                x86::dot_pairs::<ROWS, VECTORS, LEFT>(self);
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 if set.is_available() => unsafe {
                x86::dot_avx2::<ROWS, VECTORS, LEFT>(self);
            },
            _ => plain::dot::<ROWS, VECTORS, LEFT>(self),
        }
    }
}

#[cfg(test)]
mod tests;
