//! What concerns the process as a whole.

use std::io::Write;

use crate::driver::was_opened;

/// Pieces of memory from this size on are the system's again as soon as they are freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE_BYTES: libc::c_int = 4 << 20;

/// What an arena keeps at its end for the next pieces that are not large.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES: libc::c_int = 32 << 20;

/// Has large pieces given back when they are freed, weights of models above all, and smaller ones kept, which are those of
/// requests. To be called before the first thread is started.
///
/// Left to itself the C library takes every large piece that is freed as a sign that more such pieces will come, has them in its
/// arenas from then on, which keep them, and a server whose models come and go grows to many times what it holds. Told from
/// where on pieces are large, and nothing else, it gives back all but a little of what is free at an arena's end, and every
/// request's tensors are on pages that have to be fetched and cleared first.
pub fn tune_allocator() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets two numbers of the allocator's; no other thread allocates yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
    }
}

/// Ends the process with `code` where a GPU was opened; returns where none was. Threads may be inside the driver or its compiler at
/// that moment, and the libraries' own exit handlers would take from under them what they use, so those are not run. Whatever
/// is to be flushed or joined is so before this is called.
pub fn end_process(code: u8) {
    if !was_opened() {
        return;
    }
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // SAFETY: ends the process at once; nothing of it is used after this.
    unsafe { libc::_exit(i32::from(code)) }
}
