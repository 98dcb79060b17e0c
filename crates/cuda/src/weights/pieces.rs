//! Device memory in pieces of two sizes, kept when weights leave so that the next ones find them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::{Context, Piece};
use crate::error::CudaError;

/// The large size. Fewer pieces mean fewer calls when weights come and go; the rest is made of pieces as small as the driver
/// has them, so that no more is taken than needed.
const LARGE: u64 = 16 << 20;

/// How many bytes are in use and kept, for whoever asks.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) used: AtomicU64,
    /// The most that was in use at once.
    pub(crate) most_used: AtomicU64,
    pub(crate) kept: AtomicU64,
}

/// Pieces nobody uses.
pub(crate) struct Pieces {
    context: Arc<Context>,
    small: u64,
    free_large: Vec<Piece>,
    free_small: Vec<Piece>,
    counts: Arc<Counts>,
}

/// How `bytes`, a multiple of `small`, are put together: large pieces first.
pub(crate) fn sizes(bytes: u64, small: u64) -> impl Iterator<Item = u64> {
    let large = if LARGE.is_multiple_of(small) { bytes / LARGE } else { 0 };
    let rest = (bytes - large * LARGE) / small;
    std::iter::repeat_n(LARGE, large as usize).chain(std::iter::repeat_n(small, rest as usize))
}

impl Pieces {
    pub(crate) fn new(context: Arc<Context>, small: u64, counts: Arc<Counts>) -> Pieces {
        Pieces { context, small, free_large: Vec::new(), free_small: Vec::new(), counts }
    }

    pub(crate) fn small(&self) -> u64 {
        self.small
    }

    fn kept(&self) -> u64 {
        (self.free_large.len() as u64) * LARGE + self.free_small.len() as u64 * self.small
    }

    fn count(&self) {
        self.counts.kept.store(self.kept(), Ordering::Relaxed);
    }

    /// Pieces of `bytes` together, one of [`sizes`]: kept ones as they are or small ones for a large one.
    /// `None` when a new one must be made.
    fn reuse(&mut self, bytes: u64) -> Option<Vec<Piece>> {
        if bytes == self.small {
            return self.free_small.pop().map(|piece| vec![piece]);
        }
        if let Some(piece) = self.free_large.pop() {
            return Some(vec![piece]);
        }
        let count = (bytes / self.small) as usize;
        (self.free_small.len() >= count)
            .then(|| self.free_small.split_off(self.free_small.len() - count))
    }

    /// Memory of `bytes`, one of [`sizes`]. `unmap` is called before kept pieces go back to the driver, which frees none that is
    /// mapped somewhere. No more is held than before where kept pieces could go instead.
    pub(crate) fn take(
        &mut self,
        bytes: u64,
        unmap: &mut dyn FnMut() -> Result<(), CudaError>,
    ) -> Result<Vec<Piece>, CudaError> {
        let pieces = match self.reuse(bytes) {
            Some(pieces) => pieces,
            None => {
                self.release(bytes, unmap)?;
                vec![Piece::new(&self.context, bytes)?]
            }
        };
        let used = self.counts.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.counts.most_used.fetch_max(used, Ordering::Relaxed);
        self.count();
        Ok(pieces)
    }

    /// Gives kept pieces back to the driver until that is at least `bytes`, or none is left.
    pub(crate) fn release(
        &mut self,
        bytes: u64,
        unmap: &mut dyn FnMut() -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut released = 0;
        while released < bytes {
            let Some(piece) = self.free_small.pop().or_else(|| self.free_large.pop()) else {
                break;
            };
            if released == 0 {
                unmap()?;
            }
            released += piece.bytes();
        }
        self.count();
        Ok(())
    }

    /// Takes pieces back, to keep them.
    pub(crate) fn give(&mut self, pieces: impl IntoIterator<Item = Piece>) {
        for piece in pieces {
            self.counts.used.fetch_sub(piece.bytes(), Ordering::Relaxed);
            match piece.bytes() == self.small {
                true => self.free_small.push(piece),
                false => self.free_large.push(piece),
            }
        }
        self.count();
    }

    /// Takes pieces back that are not mapped anywhere, and gives them to the driver.
    pub(crate) fn discard(&mut self, pieces: impl IntoIterator<Item = Piece>) {
        for piece in pieces {
            self.counts.used.fetch_sub(piece.bytes(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_exactly_what_is_needed() {
        let small = 2 << 20;
        for count in [0, 1, 7, 8, 9, 25, 512] {
            let bytes = count * small;
            let all: Vec<u64> = sizes(bytes, small).collect();
            assert_eq!(all.iter().sum::<u64>(), bytes);
            assert!(all.len() as u64 <= bytes / LARGE + LARGE / small);
            assert!(all.is_sorted_by(|a, b| a >= b), "large ones first");
        }
        // A driver whose pieces do not divide ours gets its own size only.
        assert!(sizes(9 * (3 << 20), 3 << 20).all(|size| size == 3 << 20));
    }
}
