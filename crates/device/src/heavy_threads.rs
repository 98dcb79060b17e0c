//! Threads for work that processes many bytes: decoding bodies and pictures, copying the inputs of
//! best effort to where a device reads them.
//!
//! They have a lower priority than the threads that serve connections and run models, and there are
//! as many as cores, for the whole process. On the serving threads such work would make every other
//! client wait, and on threads without a limit many such bodies at once would take the processors
//! from real time.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::thread_priority;

/// Work for one of the threads.
pub type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct HeavyThreads {
    waiting: Mutex<VecDeque<Work>>,
    changed: Condvar,
}

/// Whether the threads exist. Without any, because none can be started, work runs where it is
/// asked for.
pub fn exist() -> bool {
    HeavyThreads::process().is_some()
}

/// Runs `work` on one of the threads, behind what waits there; on this thread where there are none.
/// The caller bounds what waits.
pub fn run(work: Work) {
    let Some(threads) = HeavyThreads::process() else { return work() };
    threads.lock().push_back(work);
    threads.changed.notify_one();
}

impl HeavyThreads {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Work>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The threads of this process.
    fn process() -> Option<&'static Arc<HeavyThreads>> {
        static THREADS: OnceLock<Option<Arc<HeavyThreads>>> = OnceLock::new();
        THREADS.get_or_init(HeavyThreads::start).as_ref()
    }

    fn start() -> Option<Arc<HeavyThreads>> {
        let threads = Arc::new(HeavyThreads::default());
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let started = (0..count).filter(|number| {
            let threads = threads.clone();
            let named = std::thread::Builder::new().name(format!("heavy-{number}"));
            named.spawn(move || threads.work()).is_ok()
        });
        (started.count() > 0).then_some(threads)
    }

    fn work(&self) {
        thread_priority::lower(thread_priority::LOW);
        loop {
            let mut waiting = self.lock();
            let work = loop {
                match waiting.pop_front() {
                    Some(work) => break work,
                    None => {
                        waiting =
                            self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            drop(waiting);
            // The thread goes on; the result that does not come is an error of its request.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn work_runs_on_threads_of_its_own_also_after_a_panic() {
        let (sender, receiver) = channel();
        for _ in 0..100 {
            run(Box::new(|| panic!("on purpose")));
        }
        run(Box::new(move || {
            let name = std::thread::current().name().unwrap_or_default().to_string();
            sender.send(name).expect("the test listens");
        }));
        assert!(exist());
        assert!(receiver.recv().expect("a name").starts_with("heavy-"));
    }
}
