//! Memory for request bodies that is used again.
//!
//! A body of some hundred kilobytes is more than the allocator keeps: its pages would be given back to the kernel with every
//! request, and fetched and cleared again for the next one, which takes longer than filling them.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// What is kept at most while nobody uses it.
const KEPT_BYTES: usize = 128 << 20;
/// Shorter buffers are left to the allocator, which keeps them anyway.
const LEAST_BYTES: usize = 64 << 10;
/// Made at once for whoever claims more; the rest is made as it comes.
const FIRST_BYTES: usize = 4 << 20;

/// Buffers nobody uses at the moment.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// The one given back last is taken first: it may still be in a cache.
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// A buffer that goes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    home: Arc<Buffers>,
}

impl Buffers {
    /// An empty buffer for about `length` bytes.
    pub(crate) fn take(self: &Arc<Buffers>, length: usize) -> Buffer {
        let fits =
            |buffer: &Vec<u8>| (length..=length.saturating_mul(2)).contains(&buffer.capacity());
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let found = free.buffers.iter().rposition(fits).map(|at| free.buffers.remove(at));
        free.bytes -= found.as_ref().map_or(0, Vec::capacity);
        drop(free);
        let bytes = found.unwrap_or_else(|| Vec::with_capacity(length.min(FIRST_BYTES)));
        Buffer { bytes, home: self.clone() }
    }

    fn give(&self, mut buffer: Vec<u8>) {
        let capacity = buffer.capacity();
        buffer.clear();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if capacity >= LEAST_BYTES && free.bytes + capacity <= KEPT_BYTES {
            free.bytes += capacity;
            free.buffers.push(buffer);
        }
    }
}

impl Buffer {
    /// Appends `bytes`.
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// How much is in it.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// What is in it; the buffer goes back when nobody holds a part of that any more.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.home.give(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(home: &Buffers) -> (usize, usize) {
        let free = home.free.lock().unwrap();
        assert_eq!(free.bytes, free.buffers.iter().map(Vec::capacity).sum::<usize>());
        (free.buffers.len(), free.bytes)
    }

    #[test]
    fn a_buffer_comes_back_when_its_last_part_is_dropped() {
        let home = Arc::new(Buffers::default());
        let mut buffer = home.take(100_000);
        buffer.extend(&[7; 100_000]);
        let address = buffer.as_ref().as_ptr();
        let bytes = buffer.freeze();
        let part = bytes.slice(10..20);
        drop(bytes);
        assert_eq!(kept(&home).0, 0, "a part is still held");
        drop(part);
        assert_eq!(kept(&home).0, 1);
        let mut again = home.take(90_000);
        assert_eq!((again.len(), kept(&home)), (0, (0, 0)));
        again.extend(&[8; 90_000]);
        assert_eq!(again.as_ref().as_ptr(), address);
    }

    #[test]
    fn only_so_much_is_kept_and_only_what_fits_is_taken() {
        let home = Arc::new(Buffers::default());
        let many: Vec<_> = (0..100).map(|_| home.take(FIRST_BYTES)).collect();
        drop(many);
        let (count, bytes) = kept(&home);
        assert!(bytes <= KEPT_BYTES && count < 100, "{count}, {bytes}");
        drop(home.take(10));
        assert_eq!(kept(&home).0, count, "short ones are not kept");
        let small = home.take(70_000);
        assert_eq!(kept(&home).0, count, "nobody gets far more than was asked for");
        drop(small);
        // A claim of much is not believed before it comes.
        assert!(home.take(1 << 40).bytes.capacity() <= 2 * FIRST_BYTES);
    }
}
