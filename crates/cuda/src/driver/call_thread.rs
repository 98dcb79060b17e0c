//! The thread that makes slow driver calls for threads in the background.
//!
//! Calls of one context wait for each other inside the driver. A thread of low priority that is
//! descheduled in such a call keeps real time waiting until it gets a processor again, which takes
//! milliseconds while compilers occupy them. So its calls are made by a thread of normal priority.

use std::sync::OnceLock;

use device::thread_placement::{self, LoneThread};
use rayon::{ThreadPool, ThreadPoolBuilder};

static THREAD: OnceLock<Option<ThreadPool>> = OnceLock::new();

/// Starts the thread. The first to open a device does; its priority is the thread's.
pub(super) fn start() {
    THREAD.get_or_init(|| {
        let name = |_| "cuda-calls".to_string();
        // Until the process ends.
        let alone = |_| std::mem::forget(thread_placement::enter_alone(LoneThread::Driver));
        let pool = ThreadPoolBuilder::new().num_threads(1).thread_name(name).start_handler(alone);
        let reason = "slow driver calls have their callers' priority";
        pool.build().inspect_err(|err| tracing::warn!(%err, reason)).ok()
    });
}

/// Makes a call that blocks others, where this thread is in the background on a thread that is not.
/// `call` enters the context itself: the other thread may have none.
pub(crate) fn at_normal_priority<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    let in_background = thread_placement::is_in_background();
    match THREAD.get().and_then(Option::as_ref).filter(|_| in_background) {
        Some(thread) => thread.install(call),
        None => call(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> String {
        std::thread::current().name().unwrap_or_default().to_string()
    }

    #[test]
    fn only_threads_of_low_priority_leave_their_calls_to_another() {
        start();
        let own = name();
        assert_eq!(at_normal_priority(name), own);
        let lowered = std::thread::spawn(|| {
            device::thread_priority::lower(device::thread_priority::LOW);
            at_normal_priority(name)
        });
        assert_eq!(lowered.join().unwrap(), "cuda-calls");
        let lowest = std::thread::spawn(|| {
            device::thread_priority::lower_computation();
            let inner = || at_normal_priority(name);
            at_normal_priority(|| (name(), inner()))
        });
        let calls = "cuda-calls".to_string();
        assert_eq!(lowest.join().unwrap(), (calls.clone(), calls), "also from the thread itself");
    }

    #[test]
    fn a_call_borrows_from_its_caller_and_returns_a_value() {
        start();
        let numbers = [1, 2, 3];
        let sum = std::thread::scope(|scope| {
            let lowered = scope.spawn(|| {
                device::thread_priority::lower(device::thread_priority::LOW);
                at_normal_priority(|| numbers.iter().sum::<i32>())
            });
            lowered.join().unwrap()
        });
        assert_eq!(sum, 6);
    }
}
