//! Priorities of threads, for work that real time must not wait for.

/// How much lower the priority of heavy work for requests is, as for `nice`: a tenth of the weight
/// of other threads.
pub const LOW: i32 = 10;

/// The lowest priority, for what nobody waits for: loads, compilations, measurements.
pub const LOWEST: i32 = 19;

/// Lowers the calling thread's priority by `by`, and with it that of threads it starts. Does
/// nothing on systems without priorities of single threads.
pub fn lower(by: i32) {
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
            lower(LOW);
            (own(), std::thread::spawn(own).join().expect("a thread"))
        });
        let lowered = lowered.join().expect("a thread");
        let expected = (before + LOW).min(19);
        assert_eq!((lowered, own()), ((expected, expected), before));
    }
}
