//! Settings of the whole process.

use std::io::Write;

use crate::driver::was_opened;

/// Allocations of at least this size are returned to the system when they are freed.
pub(crate) const LARGE_BYTES: usize = 4 << 20;

/// Free memory that an arena keeps at its end.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES: libc::c_int = 32 << 20;

/// Makes the allocator return large blocks, such as a model's weights, to the system when they are
/// freed, and keep small ones for later requests. Must be called before the first thread starts.
///
/// By default glibc raises its threshold with every large block that is freed and serves later
/// ones from its arenas, which keep them: a server that loads and unloads models grows to many
/// times what it holds. With a fixed threshold alone it trims its arenas eagerly, and every
/// request's tensors are on pages that must be mapped and cleared first.
pub fn tune_allocator() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: sets two numbers of the allocator; no other thread allocates yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES as libc::c_int);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
    }
}

/// Closes every descriptor but the standard ones when this process executes another program, also
/// those of libraries: a GPU keeps the memory of a process as long as one is open.
pub fn close_descriptors_on_exec() {
    #[cfg(target_os = "linux")]
    // SAFETY: sets a flag of descriptors. Where the system does not know the call, libraries have
    // set it themselves or not.
    let _ = unsafe {
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    };
}

/// Ends the process with `code` if a GPU was opened; returns otherwise. Threads may be inside the
/// driver or its compiler, and exit handlers of these libraries would free what they use, so no
/// exit handler runs. The caller has flushed and joined everything else.
pub fn end_process(code: u8) {
    if !was_opened() {
        return;
    }
    let _ = std::io::stdout().flush();
    let _ = std::io::stderr().flush();
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(i32::from(code)) }
}
