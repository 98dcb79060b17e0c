//! Memory for request bodies: what the service lends, or some that is used again.
//!
//! A body of some hundred kilobytes is more than the allocator keeps: its pages would be given back to the kernel with every
//! request, and fetched and cleared again for the next one, which takes longer than filling them. Where the service lends memory that a
//! device takes inputs from as they lie, they need not be copied there either.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use model::{HostPool, HostPoolBuffer};

/// What is kept at most while nobody uses it.
const KEPT_BYTES: usize = 128 << 20;
/// Shorter buffers are left to the allocator, which keeps them anyway.
const LEAST_BYTES: usize = 64 << 10;
/// Made at once for whoever claims more; the rest is made as it comes.
const FIRST_BYTES: usize = 4 << 20;
/// Where lent memory is used, a body ends at a multiple of this: the tensors are its end, and so most of them begin at one.
const ALIGNED_BYTES: usize = 64;

/// Buffers nobody uses at the moment, and where others are to be had.
#[derive(Default)]
pub(crate) struct Buffers {
    host_pool: Option<Arc<dyn HostPool>>,
    free: Mutex<Free>,
}

#[derive(Debug, Default)]
struct Free {
    /// The one given back last is taken first: it may still be in a cache.
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// A buffer that goes back when it is dropped.
pub(crate) struct Buffer {
    memory: Memory,
    home: Arc<Buffers>,
}

enum Memory {
    /// The allocator's.
    Own(Vec<u8>),
    /// The service's, used from `first` to `end`.
    Lent { loan: Box<dyn HostPoolBuffer>, first: usize, end: usize },
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("length", &self.len()).finish_non_exhaustive()
    }
}

impl Buffers {
    pub(crate) fn new(host_pool: Option<Arc<dyn HostPool>>) -> Buffers {
        Buffers { host_pool, free: Mutex::default() }
    }

    /// An empty buffer for about `length` bytes.
    pub(crate) fn take(self: &Arc<Buffers>, length: usize) -> Buffer {
        let memory = self.lent(length).unwrap_or_else(|| Memory::Own(self.own(length)));
        Buffer { memory, home: self.clone() }
    }

    /// Nobody is lent more on his word than is made at once for others.
    fn lent(&self, length: usize) -> Option<Memory> {
        let host_pool = self.host_pool.as_ref()?;
        if !(LEAST_BYTES..=FIRST_BYTES).contains(&length) {
            return None;
        }
        let first = length.next_multiple_of(ALIGNED_BYTES) - length;
        let loan = host_pool.lend(first + length)?;
        Some(Memory::Lent { loan, first, end: first })
    }

    fn own(&self, length: usize) -> Vec<u8> {
        let fits =
            |buffer: &Vec<u8>| (length..=length.saturating_mul(2)).contains(&buffer.capacity());
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let found = free.buffers.iter().rposition(fits).map(|at| free.buffers.remove(at));
        free.bytes -= found.as_ref().map_or(0, Vec::capacity);
        drop(free);
        found.unwrap_or_else(|| Vec::with_capacity(length.min(FIRST_BYTES)))
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
    /// Appends `bytes`. A body that is longer than was said moves to memory that grows.
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        match &mut self.memory {
            Memory::Own(own) => own.extend_from_slice(bytes),
            Memory::Lent { loan, end, .. } => {
                let room = (**loan).as_mut().get_mut(*end..*end + bytes.len());
                match room {
                    Some(room) => {
                        room.copy_from_slice(bytes);
                        *end += bytes.len();
                    }
                    None => self.memory = Memory::Own([self.as_ref(), bytes].concat()),
                }
            }
        }
    }

    /// How much is in it.
    pub(crate) fn len(&self) -> usize {
        match &self.memory {
            Memory::Own(own) => own.len(),
            Memory::Lent { first, end, .. } => end - first,
        }
    }

    /// What is in it; the buffer goes back when nobody holds a part of that any more.
    pub(crate) fn freeze(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        match &self.memory {
            Memory::Own(own) => own,
            Memory::Lent { loan, first, end } => (**loan).as_ref().get(*first..*end).unwrap_or(&[]),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Memory::Own(own) = &mut self.memory {
            self.home.give(std::mem::take(own));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

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
        assert!(home.own(1 << 40).capacity() <= 2 * FIRST_BYTES);
    }

    /// Lends so many pieces at once and knows where the last one began.
    #[derive(Default)]
    struct Few {
        left: Arc<AtomicUsize>,
        began: AtomicUsize,
    }

    struct Piece(Vec<u8>, Arc<AtomicUsize>);

    impl AsRef<[u8]> for Piece {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl AsMut<[u8]> for Piece {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }

    impl Drop for Piece {
        fn drop(&mut self) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl HostPool for Few {
        fn lend(&self, bytes: usize) -> Option<Box<dyn HostPoolBuffer>> {
            self.left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                .ok()?;
            let piece = Piece(vec![9; bytes], self.left.clone());
            self.began.store(piece.0.as_ptr() as usize, Ordering::Relaxed);
            Some(Box::new(piece))
        }
    }

    fn lending(pieces: usize) -> (Arc<Few>, Arc<Buffers>) {
        let few = Arc::new(Few { left: Arc::new(pieces.into()), ..Few::default() });
        (few.clone(), Arc::new(Buffers::new(Some(few))))
    }

    #[test]
    fn a_body_ends_where_lent_memory_is_aligned_and_goes_back() {
        for length in [65_536, 100_001, 602_112 + 77] {
            let (few, home) = lending(1);
            let mut buffer = home.take(length);
            let body: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            body.chunks(16_384).for_each(|part| buffer.extend(part));
            assert_eq!(buffer.len(), length);
            let end = buffer.as_ref().as_ptr_range().end as usize;
            assert!((end - few.began.load(Ordering::Relaxed)).is_multiple_of(ALIGNED_BYTES));
            let bytes = buffer.freeze();
            assert_eq!(bytes, body);
            let part = bytes.slice(5..9);
            drop(bytes);
            assert_eq!(few.left.load(Ordering::Relaxed), 0, "a part is still held");
            drop(part);
            assert_eq!((few.left.load(Ordering::Relaxed), kept(&home).0), (1, 0));
        }
    }

    #[test]
    fn who_is_lent_nothing_has_memory_all_the_same() {
        let (few, home) = lending(1);
        let held = home.take(70_000);
        let mut second = home.take(70_000);
        second.extend(&[1; 70_000]);
        drop(held);
        assert_eq!((second.len(), few.left.load(Ordering::Relaxed)), (70_000, 1));
        for length in [LEAST_BYTES - 1, FIRST_BYTES + 1] {
            let _other = home.take(length);
            assert_eq!(few.left.load(Ordering::Relaxed), 1, "neither short nor very long ones");
        }
        let mut longer = home.take(70_000);
        assert_eq!(few.left.load(Ordering::Relaxed), 0);
        longer.extend(&[2; 70_000]);
        longer.extend(&[3; 1]);
        assert_eq!(few.left.load(Ordering::Relaxed), 1, "it moved");
        assert_eq!(longer.as_ref(), [&[2; 70_000][..], &[3]].concat());
    }
}
