//! The end of a process that used a GPU.

use std::io::Write;

use crate::driver::was_opened;

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
