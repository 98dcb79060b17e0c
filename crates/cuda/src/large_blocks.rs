//! The allocator of the process: large blocks are kept for a while when they are freed.
//!
//! Loading a model allocates its file, its constants and its packed weights, and frees most of it
//! soon after. Mapped for each of them, that is hundreds of thousands of page faults a second while
//! models come and go. All of them, and every call that maps or unmaps memory, take the lock of the
//! process' address space; a thread that serves real time and pins, maps or grows memory waits for
//! it, for milliseconds. Blocks that are used again need neither, and those that are new are on
//! large pages, one fault instead of 512.
//!
//! Smaller blocks are the system allocator's. Nothing is kept until [`keep_large_blocks`] says how
//! much may be: until then a large block is mapped, and returned at once when it is freed.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use device::thread_placement::{self, ThreadRole};

/// Blocks of at least this size are mapped here: those that the system's allocator, as it is tuned,
/// would map for each allocation. It serves smaller ones from memory that it keeps.
const LARGE_BYTES: usize = crate::driver::process::LARGE_BYTES;

/// Size of a large page.
const LARGE_PAGE: usize = 2 << 20;

/// Classes of sizes: four per power of two. The last one has 56 GiB.
const CLASSES: usize = 64;

/// Blocks that nobody took for this long are returned to the system.
const KEPT_FOR: Duration = Duration::from_secs(5);

/// Time between two looks for such blocks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The smallest class that holds `bytes`; `None` where the system allocator serves them.
fn class_of(bytes: usize) -> Option<usize> {
    if bytes < LARGE_BYTES {
        return None;
    }
    let power = (bytes - 1).ilog2() as usize;
    // Quarters of a power of two above it, rounded up.
    let step = (bytes - (1 << power)).div_ceil(1 << (power - 2));
    Some((power - 20) * 4 + step).filter(|class| *class < CLASSES)
}

/// Bytes of the blocks of a class.
const fn class_bytes(class: usize) -> usize {
    (4 + class % 4) << (18 + class / 4)
}

/// What a free block holds at its beginning.
struct FreeBlock {
    next: Option<NonNull<FreeBlock>>,
    freed: Instant,
}

/// Free blocks by class, the one that was freed last first.
struct FreeBlocks {
    first: [Option<NonNull<FreeBlock>>; CLASSES],
    bytes: usize,
}

// SAFETY: a free block has no other owner than the list.
unsafe impl Send for FreeBlocks {}

impl FreeBlocks {
    fn take(&mut self, class: usize) -> Option<*mut u8> {
        let block = self.first[class]?;
        // SAFETY: blocks in the list were initialised by `give` and belong to it.
        self.first[class] = unsafe { block.as_ref() }.next;
        self.bytes -= class_bytes(class);
        Some(block.as_ptr().cast())
    }

    /// # Safety
    /// The block is of this class, and nobody uses it any more.
    unsafe fn give(&mut self, class: usize, block: NonNull<FreeBlock>, freed: Instant) {
        let free = FreeBlock { next: self.first[class], freed };
        // SAFETY: a block is larger than this and aligned to pages.
        unsafe { block.write(free) };
        self.first[class] = Some(block);
        self.bytes += class_bytes(class);
    }

    /// Takes the blocks of `class` that were freed before `until` out of the list: the first of
    /// them, which lists the others.
    fn cut(&mut self, class: usize, until: Instant) -> Option<NonNull<FreeBlock>> {
        let mut link: *mut Option<NonNull<FreeBlock>> = &raw mut self.first[class];
        // SAFETY: `link` points to the head or into a block of the list, all of which `self` owns.
        unsafe {
            while let Some(block) = *link {
                if (*block.as_ptr()).freed < until {
                    break;
                }
                link = &raw mut (*block.as_ptr()).next;
            }
            let cut = (*link).take();
            let mut count = 0;
            let mut at = cut;
            while let Some(block) = at {
                count += 1;
                at = (*block.as_ptr()).next;
            }
            self.bytes -= count * class_bytes(class);
            cut
        }
    }
}

/// The allocator. A program makes it its global one.
pub struct LargeBlocks {
    free: Mutex<FreeBlocks>,
    /// Bytes of free blocks that may be kept; 0 until the program says so.
    limit: AtomicUsize,
}

/// The one of this process.
static OWN: LargeBlocks = LargeBlocks::new();

/// Keeps up to `bytes` of freed large blocks for some seconds from now on. Starts a thread that
/// returns them to the system then.
pub fn keep_large_blocks(bytes: usize) {
    if !cfg!(target_os = "linux") {
        return;
    }
    let looks = || {
        loop {
            std::thread::sleep(LOOK_EVERY);
            // The placement begins when a device is opened.
            thread_placement::enter(ThreadRole::Background);
            if let Some(until) = Instant::now().checked_sub(KEPT_FOR) {
                OWN.release(until);
            }
        }
    };
    let named = std::thread::Builder::new().name("memory-release".to_string());
    if OWN.limit.load(Ordering::Relaxed) == 0 && named.spawn(looks).is_ok() {
        OWN.limit.store(bytes, Ordering::Relaxed);
    }
}

/// Delegates to the one list of the process.
pub struct Allocator;

// SAFETY: what `OWN` returns is memory of its own for every layout.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as asked.
        unsafe { OWN.allocate(layout, false) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as asked.
        unsafe { OWN.allocate(layout, true) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as asked.
        unsafe { OWN.free(block, layout) }
    }
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as asked.
        unsafe { OWN.resize(block, layout, bytes) }
    }
}

impl LargeBlocks {
    const fn new() -> LargeBlocks {
        let free = FreeBlocks { first: [None; CLASSES], bytes: 0 };
        LargeBlocks { free: Mutex::new(free), limit: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, FreeBlocks> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The class of a layout; the same for the whole life of a block, whatever the limit.
    fn class(layout: Layout) -> Option<usize> {
        class_of(layout.size()).filter(|_| cfg!(target_os = "linux") && layout.align() <= PAGE)
    }

    unsafe fn allocate(&self, layout: Layout, zeroed: bool) -> *mut u8 {
        let Some(class) = LargeBlocks::class(layout) else {
            return match zeroed {
                // SAFETY: the caller's layout.
                true => unsafe { System.alloc_zeroed(layout) },
                // SAFETY: the caller's layout.
                false => unsafe { System.alloc(layout) },
            };
        };
        let known = self.lock().take(class);
        let Some(block) = known else { return map(class_bytes(class)) };
        if zeroed {
            // SAFETY: the block is at least that large and has no other owner.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn free(&self, block: *mut u8, layout: Layout) {
        let Some(class) = LargeBlocks::class(layout) else {
            // SAFETY: `allocate` took it from there.
            return unsafe { System.dealloc(block, layout) };
        };
        let limit = self.limit.load(Ordering::Relaxed);
        if let Some(block) = NonNull::new(block.cast::<FreeBlock>())
            && class_bytes(class) <= limit
        {
            let freed = Instant::now();
            let mut free = self.lock();
            if free.bytes + class_bytes(class) <= limit {
                // SAFETY: of this class by its layout, and the caller does not use it any more.
                return unsafe { free.give(class, block, freed) };
            }
        }
        unmap(block, class_bytes(class));
    }

    unsafe fn resize(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's size, which does not overflow with this alignment.
        let wanted = unsafe { Layout::from_size_align_unchecked(bytes, layout.align()) };
        let classes = (LargeBlocks::class(layout), LargeBlocks::class(wanted));
        match classes {
            // SAFETY: the system's block, which stays one.
            (None, None) => unsafe { System.realloc(block, layout, bytes) },
            (Some(had), Some(needs)) if had == needs => block,
            // SAFETY: two blocks of at least the bytes that are copied, the old one with its
            // layout.
            _ => unsafe {
                let moved = self.allocate(wanted, false);
                if !moved.is_null() {
                    moved.copy_from_nonoverlapping(block, layout.size().min(bytes));
                    self.free(block, layout);
                }
                moved
            },
        }
    }

    /// Returns the blocks that were freed before `until` to the system.
    fn release(&self, until: Instant) {
        for class in 0..CLASSES {
            let mut cut = self.lock().cut(class, until);
            while let Some(block) = cut {
                // SAFETY: out of the list, so nobody else has it; read before it is unmapped.
                cut = unsafe { block.as_ref() }.next;
                unmap(block.as_ptr().cast(), class_bytes(class));
            }
        }
    }
}

/// Size of the smallest page, or a divisor of it.
const PAGE: usize = 4096;

/// New memory of zeros, on large pages where there are any; null when there is none.
#[cfg(target_os = "linux")]
fn map(bytes: usize) -> *mut u8 {
    let reserve = |bytes: usize| {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory at an address of the system's choice.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) };
        (address != libc::MAP_FAILED).then_some(address.cast::<u8>())
    };
    let Some(mut block) = reserve(bytes) else { return std::ptr::null_mut() };
    if bytes < LARGE_PAGE {
        return block;
    }
    if !block.addr().is_multiple_of(LARGE_PAGE) {
        // Systems before Linux 6.7 do not align it themselves.
        unmap(block, bytes);
        let Some(wide) = reserve(bytes + LARGE_PAGE) else { return std::ptr::null_mut() };
        let before = wide.addr().next_multiple_of(LARGE_PAGE) - wide.addr();
        block = wide.wrapping_add(before);
        unmap(wide, before);
        unmap(block.wrapping_add(bytes), LARGE_PAGE - before);
    }
    // SAFETY: a hint about memory that was just mapped.
    let _ = unsafe { libc::madvise(block.cast(), bytes, libc::MADV_HUGEPAGE) };
    block
}

#[cfg(target_os = "linux")]
fn unmap(block: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: callers unmap what `map` made and nobody uses.
        let _ = unsafe { libc::munmap(block.cast(), bytes) };
    }
}

#[cfg(not(target_os = "linux"))]
fn map(_: usize) -> *mut u8 {
    std::ptr::null_mut()
}

#[cfg(not(target_os = "linux"))]
fn unmap(_: *mut u8, _: usize) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, 64).unwrap()
    }

    fn keeping(limit: usize) -> LargeBlocks {
        let blocks = LargeBlocks::new();
        blocks.limit.store(limit, Ordering::Relaxed);
        blocks
    }

    fn kept(blocks: &LargeBlocks) -> usize {
        blocks.lock().bytes
    }

    #[test]
    fn classes_hold_their_sizes_and_waste_little() {
        assert_eq!(class_of(LARGE_BYTES - 1), None);
        let mut random = base::Random::new(1);
        let sizes = (0..20_000).map(|_| LARGE_BYTES + random.below(1 << 36) as usize);
        let borders = (20..35usize).flat_map(|power| {
            let quarters = move |quarter: usize| (1 << power) + quarter * (1 << (power - 2));
            (0..4).flat_map(move |q| [quarters(q), quarters(q) + 1, quarters(q + 1) - 1])
        });
        for bytes in sizes.chain(borders) {
            let Some(class) = class_of(bytes) else { continue };
            assert!(class_bytes(class) >= bytes, "{bytes}");
            assert!(class == 0 || class_bytes(class - 1) < bytes, "{bytes}: a smaller class");
            assert!(class_bytes(class) <= bytes + bytes / 4 + 1, "{bytes}");
        }
        assert_eq!(class_of(class_bytes(CLASSES - 1)), Some(CLASSES - 1));
        assert_eq!(class_of(class_bytes(CLASSES - 1) + 1), None);
    }

    #[test]
    fn a_freed_block_is_used_again_and_zeroed_when_asked() {
        let blocks = keeping(64 << 20);
        let bytes = 5_000_000;
        // SAFETY: the block is used within its size and freed with its layout.
        unsafe {
            let first = blocks.allocate(layout(bytes), true);
            assert_eq!(std::slice::from_raw_parts(first, bytes).iter().max(), Some(&0));
            first.write_bytes(7, bytes);
            blocks.free(first, layout(bytes));
            assert_eq!(kept(&blocks), class_bytes(class_of(bytes).unwrap()));
            let again = blocks.allocate(layout(bytes - 1000), true);
            assert_eq!((again, kept(&blocks)), (first, 0));
            let all = std::slice::from_raw_parts(again, bytes - 1000);
            assert_eq!(all.iter().max(), Some(&0), "it was in use before");
            blocks.free(again, layout(bytes - 1000));
            blocks.release(Instant::now() + KEPT_FOR);
            assert_eq!(kept(&blocks), 0);
        }
    }

    #[test]
    fn no_more_is_kept_than_allowed_and_nothing_for_long() {
        let blocks = keeping(10 << 20);
        // SAFETY: blocks are freed once, with their layouts.
        unsafe {
            let made = [(); 4].map(|()| blocks.allocate(layout(4 << 20), false));
            for block in made {
                assert!(!block.is_null());
                block.write(1);
                blocks.free(block, layout(4 << 20));
            }
            assert_eq!(kept(&blocks), 8 << 20);
            let between = Instant::now();
            let newer = blocks.allocate(layout(4 << 20), false);
            blocks.free(newer, layout(4 << 20));
            blocks.release(between);
            assert_eq!(kept(&blocks), 4 << 20, "the one that was freed since");
            blocks.release(Instant::now());
            assert_eq!(kept(&blocks), 0);
        }
    }

    #[test]
    fn blocks_keep_their_content_when_they_grow_and_shrink() {
        let blocks = keeping(256 << 20);
        let mut random = base::Random::new(2);
        // SAFETY: every block is used within its size and moved with the layout it has.
        unsafe {
            let mut bytes = 1000;
            let mut block = blocks.allocate(layout(bytes), false);
            block.write_bytes(3, bytes);
            for _ in 0..60 {
                let next = 1 + random.below(12 << 20) as usize;
                block = blocks.resize(block, layout(bytes), next);
                let whole = std::slice::from_raw_parts(block, next.min(bytes));
                assert!(whole.iter().all(|byte| *byte == 3), "{bytes} to {next}");
                block.write_bytes(3, next);
                bytes = next;
            }
            blocks.free(block, layout(bytes));
            blocks.release(Instant::now());
        }
    }

    #[test]
    fn threads_never_share_a_block() {
        let blocks = keeping(64 << 20);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let blocks = &blocks;
                scope.spawn(move || {
                    let mut random = base::Random::new(u64::from(thread));
                    for _ in 0..200 {
                        let bytes = LARGE_BYTES + random.below(3 << 20) as usize;
                        // SAFETY: used within its size, freed once with its layout.
                        unsafe {
                            let block = blocks.allocate(layout(bytes), false);
                            block.write_bytes(thread, bytes);
                            let whole = std::slice::from_raw_parts(block, bytes);
                            assert!(whole.iter().all(|byte| *byte == thread));
                            blocks.free(block, layout(bytes));
                        }
                    }
                });
            }
        });
        blocks.release(Instant::now());
        assert_eq!(kept(&blocks), 0);
    }
}
