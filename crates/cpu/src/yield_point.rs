//! Points in kernels where threads check whether their task is preempted, and park if it is.
//!
//! A step that is preempted stops where it is: each of its threads parks at its next yield point,
//! in the middle of its loops, and continues from there when the task resumes. Nothing is computed
//! twice, and nothing is saved but the threads themselves. A kernel takes part by reporting how
//! much work it did ([`did_work`]) and, on the other threads of its pool, that it is working
//! ([`start_work`]). A kernel that reports nothing is preempted when it ends.

use std::cell::{Cell, OnceCell};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Work between two checks, in nanoseconds of one core as kernels estimate them. An estimate may be
/// off by several times before real-time latency shows it.
const CHECK_INTERVAL_NS: usize = 20_000;

/// Multiplications of a matrix product that take about a nanosecond.
const MULTIPLICATIONS_PER_NS: usize = 16;

/// Elements that are filled between two checks.
const FILLED_PER_CHECK: usize = 16 * 1024;

/// How long a thread looks for work after a loop before it sleeps. To wake it takes about as long
/// as a small convolution.
const AWAKE_FOR: Duration = Duration::from_micros(150);

/// How long a thread waits for others without sleeping.
const MAX_WAIT: Duration = Duration::from_millis(1);

/// States of a thread.
const IDLE: u8 = 0;
const WORKING: u8 = 1;
const PARKED: u8 = 2;

thread_local! {
    static WORK_NS: Cell<usize> = const { Cell::new(0) };
    static REGISTRATION: OnceCell<Registration> = const { OnceCell::new() };
    /// Whether this thread looks for work instead of sleeping, or never sleeps between loops.
    static AWAKE: Cell<bool> = const { Cell::new(false) };
    #[cfg(test)]
    static CHECKS: Cell<usize> = const { Cell::new(0) };
}

/// How often the calling thread was at a yield point.
#[cfg(test)]
pub(crate) fn checks() -> usize {
    CHECKS.get()
}

/// The worker pool that a thread belongs to.
struct Registration {
    control: Arc<YieldControl>,
    worker: usize,
}

/// The panic payload of a thread whose suspended task was dropped.
pub(crate) struct TaskDropped;

/// A thread's state, on a cache line of its own.
#[repr(align(128))]
struct WorkerState(AtomicU8);

/// The preemption request to the threads of a worker pool, and their states.
pub(crate) struct YieldControl {
    suspend: AtomicBool,
    workers: Box<[WorkerState]>,
    request: Mutex<Request>,
    changed: Condvar,
    /// Called once per request, by one of the threads, when the last of them is parked.
    on_suspended: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct Request {
    /// `on_suspended` was called.
    reported: bool,
    /// The task was dropped while it was suspended.
    dropped: bool,
}

impl YieldControl {
    pub(crate) fn new(threads: usize) -> YieldControl {
        YieldControl {
            suspend: AtomicBool::new(false),
            workers: (0..threads).map(|_| WorkerState(AtomicU8::new(IDLE))).collect(),
            request: Mutex::default(),
            changed: Condvar::new(),
            on_suspended: OnceLock::new(),
        }
    }

    /// Sets the callback for when all threads are parked. Called once, before any work.
    pub(crate) fn on_suspended(&self, callback: impl Fn() + Send + Sync + 'static) {
        // A second call would be a defect, and has no effect.
        let _ = self.on_suspended.set(Box::new(callback));
    }

    /// Makes the calling thread worker number `worker` of this pool.
    pub(crate) fn register(self: &Arc<YieldControl>, worker: usize) {
        REGISTRATION.with(|registration| {
            let _ = registration.set(Registration { control: self.clone(), worker });
        });
    }

    /// Makes all threads park at their next yield point.
    pub(crate) fn request_suspend(&self) {
        let mut request = self.lock();
        request.reported = false;
        self.suspend.store(true, Ordering::SeqCst);
    }

    /// Lets parked threads continue and withdraws the request.
    pub(crate) fn resume(&self) {
        let mut request = self.lock();
        *request = Request::default();
        self.suspend.store(false, Ordering::SeqCst);
        drop(request);
        self.changed.notify_all();
    }

    /// Unwinds the threads with [`TaskDropped`]: parked ones at once, others at their next yield
    /// point.
    pub(crate) fn drop_task(&self) {
        self.lock().dropped = true;
        self.suspend.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Request> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn none_working(&self) -> bool {
        self.workers.iter().all(|worker| worker.0.load(Ordering::SeqCst) != WORKING)
    }

    #[cold]
    fn park(&self, worker: usize) {
        let state = &self.workers[worker].0;
        let before = state.swap(PARKED, Ordering::SeqCst);
        let mut request = self.lock();
        while self.suspend.load(Ordering::SeqCst) {
            if request.dropped {
                state.store(IDLE, Ordering::SeqCst);
                drop(request);
                resume_unwind(Box::new(TaskDropped));
            }
            if !request.reported && self.none_working() {
                request.reported = true;
                drop(request);
                if let Some(callback) = self.on_suspended.get() {
                    callback();
                }
                request = self.lock();
                continue;
            }
            request = self.changed.wait(request).unwrap_or_else(PoisonError::into_inner);
        }
        state.store(before, Ordering::SeqCst);
    }
}

/// A yield point: parks the calling thread if its task is preempted.
pub(crate) fn check() {
    #[cfg(test)]
    CHECKS.set(CHECKS.get() + 1);
    REGISTRATION.with(|registration| {
        if let Some(registration) = registration.get()
            && registration.control.suspend.load(Ordering::SeqCst)
        {
            registration.control.park(registration.worker);
        }
    });
}

/// Reports about `nanoseconds` of work since the last call. A yield point when they add up.
#[inline]
pub(crate) fn did_work(nanoseconds: usize) {
    WORK_NS.with(|work| {
        let sum = work.get().saturating_add(nanoseconds);
        if sum < CHECK_INTERVAL_NS {
            work.set(sum);
            return;
        }
        work.set(0);
        check();
    });
}

/// [`did_work`] for multiplications of a matrix product.
#[inline]
pub(crate) fn did_multiplications(count: usize) {
    did_work(count / MULTIPLICATIONS_PER_NS);
}

/// `buffer.resize(count, value)` with yield points: much memory takes long to fill.
pub(crate) fn resize<T: Clone>(buffer: &mut Vec<T>, count: usize, value: T) {
    buffer.truncate(count);
    buffer.reserve(count - buffer.len());
    while count - buffer.len() > FILLED_PER_CHECK {
        buffer.resize(buffer.len() + FILLED_PER_CHECK, value.clone());
        check();
    }
    buffer.resize(count, value);
}

/// While it lives, its thread must park before the task counts as suspended. Parallel loops make
/// one on each thread they run on.
pub(crate) struct WorkGuard {
    before: u8,
}

/// Starts work on a thread of a pool; also a yield point.
pub(crate) fn start_work() -> WorkGuard {
    let before = REGISTRATION.with(|registration| {
        registration.get().map_or(IDLE, |registration| {
            let state = &registration.control.workers[registration.worker].0;
            state.swap(WORKING, Ordering::SeqCst)
        })
    });
    check();
    WorkGuard { before }
}

/// Waits until other threads have ended their parts of a loop. They began together, so that it is
/// soon: to sleep, or to leave the core to another process, would take longer.
pub(crate) fn wait_for(is_done: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_done() && began.elapsed() < MAX_WAIT {
        check();
        // A part that no thread has begun is run here; what others left for themselves is not.
        if rayon::yield_local() != Some(rayon::Yield::Executed) {
            std::hint::spin_loop();
        }
    }
}

/// Makes the calling thread one that starts loops: it has no reason to look for their parts.
pub(crate) fn starts_loops() {
    AWAKE.set(true);
}

/// Looks for work of the next loop for a while, unless the task is preempted.
fn stay_awake() {
    if AWAKE.replace(true) {
        return;
    }
    let is_preempted = || {
        let suspends = |own: &Registration| own.control.suspend.load(Ordering::Relaxed);
        REGISTRATION.with(|registration| registration.get().is_none_or(suspends))
    };
    let mut worked = Instant::now();
    while !is_preempted() && worked.elapsed() < AWAKE_FOR {
        match rayon::yield_now() {
            Some(rayon::Yield::Executed) => worked = Instant::now(),
            _ => std::hint::spin_loop(),
        }
    }
    AWAKE.set(false);
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        REGISTRATION.with(|registration| {
            let Some(Registration { control, worker }) = registration.get() else { return };
            // The thread runs this when it has reported the end of its part.
            if !AWAKE.get() && rayon::current_thread_index().is_some() {
                rayon::spawn(stay_awake);
            }
            control.workers[*worker].0.store(self.before, Ordering::SeqCst);
            if control.suspend.load(Ordering::SeqCst) {
                // Parked threads may have waited for this one only.
                let _request = control.lock();
                control.changed.notify_all();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;
    use std::thread;

    #[test]
    fn all_threads_park_before_the_report_and_all_resume() {
        let control = Arc::new(YieldControl::new(2));
        let (sender, suspended) = channel();
        control.on_suspended(move || sender.send(()).expect("the test listens"));
        let counts: Arc<[AtomicUsize; 2]> = Arc::default();
        let end = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..2)
            .map(|worker| {
                let (control, counts, end) = (control.clone(), counts.clone(), end.clone());
                thread::spawn(move || {
                    control.register(worker);
                    while !end.load(Ordering::SeqCst) {
                        let _working = start_work();
                        for _ in 0..50 {
                            counts[worker].fetch_add(1, Ordering::SeqCst);
                            did_work(CHECK_INTERVAL_NS / 3);
                        }
                    }
                })
            })
            .collect();
        let read = || [0, 1].map(|worker| counts[worker].load(Ordering::SeqCst));
        for _ in 0..200 {
            control.request_suspend();
            suspended.recv().expect("both threads park");
            let before = read();
            thread::yield_now();
            assert_eq!(read(), before);
            control.resume();
        }
        end.store(true, Ordering::SeqCst);
        for thread in threads {
            thread.join().expect("the thread ends");
        }
        assert!(suspended.try_recv().is_err());
    }

    #[test]
    fn dropping_a_suspended_task_unwinds_its_threads() {
        let control = Arc::new(YieldControl::new(1));
        let (sender, suspended) = channel();
        control.on_suspended(move || sender.send(()).expect("the test listens"));
        control.request_suspend();
        let same = control.clone();
        let thread = thread::spawn(move || {
            same.register(0);
            let run = || loop {
                did_work(CHECK_INTERVAL_NS);
            };
            let ended: Result<(), _> = std::panic::catch_unwind(run);
            ended.is_err_and(|payload| payload.is::<TaskDropped>())
        });
        suspended.recv().expect("the thread parks");
        control.drop_task();
        assert!(thread.join().expect("the thread ends"));
    }
}
