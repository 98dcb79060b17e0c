//! Priorities of threads, for work that real time must not wait for.

use crate::thread_placement::{self, ThreadRole};

/// How much lower the priority of heavy work for requests is, as for `nice`: a tenth of the weight
/// of other threads.
pub const LOW: i32 = 10;

/// The lowest priority, for what nobody waits for: loads, compilations, measurements.
pub const LOWEST: i32 = 19;

/// Lowers the calling thread's priority by `by`, as for `nice`, and with it that of threads it
/// starts. Where background work has processors of its own it is moved there instead: a thread of
/// low priority keeps locks of the system and of drivers while it is descheduled. Does nothing on
/// systems without priorities of single threads.
pub fn lower(by: i32) {
    thread_placement::enter(ThreadRole::Background);
    if !thread_placement::sets_background_apart() {
        nice(by);
    }
}

/// As [`lower`], in any case, for threads that only compute.
pub fn lower_computation() {
    thread_placement::enter(ThreadRole::Background);
    nice(if thread_placement::sets_background_apart() { LOW } else { LOWEST });
}

fn nice(by: i32) {
    // Fails only where a sandbox forbids it; the thread then keeps its priority.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(by);
    #[cfg(not(target_os = "linux"))]
    let _ = by;
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_the_calling_thread_and_what_it_starts_is_slower() {
        let own = || rustix::process::getpriority_process(None).expect("a priority");
        let before = own();
        let lowered = std::thread::spawn(move || {
            nice(LOW);
            (own(), std::thread::spawn(own).join().expect("a thread"))
        });
        let lowered = lowered.join().expect("a thread");
        let expected = (before + LOW).min(19);
        assert_eq!((lowered, own()), ((expected, expected), before));
    }
}
