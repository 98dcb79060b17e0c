//! Weights that were packed together: addresses on the device for life, a copy on the host, memory behind the addresses when
//! somebody says so.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{AddressRange, Context, PinnedBuffer};
use crate::error::CudaError;

/// Host memory is pinned in blocks of this size: a call that pins much at once holds up other threads' calls.
pub(crate) const BLOCK: u64 = 2 << 20;

/// Weights of one plan that no earlier plan had.
pub(crate) struct Slab {
    pub(crate) range: AddressRange,
    /// Where it lies in the order of arrival, counted over all slabs of its program.
    pub(crate) begins: u64,
    /// Bytes that mean something; the range is rounded up to whole pieces.
    pub(crate) used: u64,
    host: Mutex<Vec<PinnedBuffer>>,
}

impl Slab {
    /// Room for `used` bytes.
    pub(crate) fn new(
        context: &Arc<Context>,
        begins: u64,
        used: u64,
        granularity: u64,
    ) -> Result<Slab, CudaError> {
        let range = AddressRange::reserve(context, used.max(1).next_multiple_of(granularity))?;
        let mut host = Vec::new();
        for at in (0..used).step_by(BLOCK as usize) {
            host.push(PinnedBuffer::fetched(context, (used - at).min(BLOCK) as usize)?);
        }
        Ok(Slab { range, begins, used, host: Mutex::new(host) })
    }

    fn host(&self) -> MutexGuard<'_, Vec<PinnedBuffer>> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `data` at `at` of the host's copy. Nothing of it may be on its way to the device.
    pub(crate) fn write(&self, at: u64, data: &[u8]) {
        let mut host = self.host();
        for (block, within, span) in spans(at, data.len() as u64) {
            let part = &data[span.start as usize..span.end as usize];
            host[block].as_mut_slice()[within as usize..within as usize + part.len()]
                .copy_from_slice(part);
        }
    }

    /// Host addresses of `bytes` at `at`, piece by piece: where, how many, and where they go. Alive as long as the slab and
    /// its host copy.
    pub(crate) fn sources(&self, at: u64, bytes: u64) -> Vec<(*const u8, u64, u64)> {
        let host = self.host();
        let address = self.range.address();
        spans(at, bytes)
            .filter_map(|(block, within, span)| {
                let block = host.get(block)?;
                // A span never leaves its block, so this stays inside or at the end of the buffer.
                let from = block.as_ptr().wrapping_add(within as usize).cast_const();
                Some((from, span.end - span.start, address + at + span.start))
            })
            .collect()
    }

    /// Lets go of the host's copy. Nothing of it may be on its way to the device.
    pub(crate) fn forget_host(&self) {
        self.host().clear();
    }
}

/// `bytes` at `at` as block, offset within it, and the range of the bytes that lie there.
fn spans(at: u64, bytes: u64) -> impl Iterator<Item = (usize, u64, std::ops::Range<u64>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let (block, within) = ((at + done) / BLOCK, (at + done) % BLOCK);
        let count = (bytes - done).min(BLOCK - within);
        let span = (block as usize, within, done..done + count);
        done += count;
        (count > 0).then_some(span)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_stay_in_their_blocks() {
        let all: Vec<_> = spans(BLOCK - 10, BLOCK + 30).collect();
        assert_eq!(
            all,
            [(0, BLOCK - 10, 0..10), (1, 0, 10..BLOCK + 10), (2, 0, BLOCK + 10..BLOCK + 30)]
        );
        assert_eq!(spans(5, 0).count(), 0);
        assert_eq!(spans(BLOCK, 1).collect::<Vec<_>>(), [(1, 0, 0..1)]);
    }
}
