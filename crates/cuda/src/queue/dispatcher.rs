//! The thread that polls after every best-effort queue of a device.
//!
//! One thread is enough: it queues launches ahead and polls at words, and what several threads would gain they would lose to
//! each other, and take from real time, inside the driver.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Instant;

use super::executor::QueueExecutor;
use crate::options::Polling;
use crate::preempt::driver_backoff::DriverBackoff;
use crate::preempt::epoch_counters::EpochCounters;

/// Rounds over all executors between two polls at the clock.
const ROUNDS_PER_CLOCK_READ: u32 = 32;

/// The thread, which is there as long as there are executors.
#[derive(Default)]
pub(crate) struct Dispatcher {
    shared: Arc<DispatcherShared>,
}

#[derive(Default)]
struct DispatcherShared {
    state: Mutex<DispatcherState>,
    /// The thread sleeps and must be woken.
    asleep: AtomicBool,
}

#[derive(Default)]
struct DispatcherState {
    /// Lanes the thread has not taken over yet.
    arriving: Vec<QueueExecutor>,
    thread: Option<Thread>,
}

/// What the thread minds besides its executors.
pub(super) struct DispatcherContext {
    pub(super) polling: Polling,
    /// KernelRequest by real time.
    pub(super) driver_backoff: Arc<DriverBackoff>,
    /// Whose orders it sends.
    pub(super) epoch_counters: Arc<EpochCounters>,
}

/// Wakes the thread.
#[derive(Clone)]
pub(super) struct DispatcherWaker {
    shared: Arc<DispatcherShared>,
}

impl DispatcherWaker {
    /// Something was put into a executor.
    pub(super) fn wake(&self) {
        if self.shared.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = &self.shared.lock().thread
        {
            thread.unpark();
        }
    }
}

impl DispatcherShared {
    fn lock(&self) -> MutexGuard<'_, DispatcherState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dispatcher {
    pub(super) fn waker(&self) -> DispatcherWaker {
        DispatcherWaker { shared: self.shared.clone() }
    }

    /// Hands a executor to the thread, which is started for the first.
    pub(super) fn add(
        &self,
        executor: QueueExecutor,
        context: DispatcherContext,
    ) -> std::io::Result<()> {
        let mut state = self.shared.lock();
        if state.thread.is_none() {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new()
                .name("cuda-be".to_string())
                .spawn(move || run(&shared, &context))?;
            state.thread = Some(thread.thread().clone());
        }
        state.arriving.push(executor);
        drop(state);
        self.waker().wake();
        Ok(())
    }
}

/// Goes over the executors until the last one is closed.
fn run(shared: &DispatcherShared, context: &DispatcherContext) {
    let polling = context.polling;
    let mut executors: Vec<QueueExecutor> = Vec::new();
    let (mut rounds, mut idle_since): (u32, Option<Instant>) = (0, None);
    loop {
        let mut moved = false;
        for executor in &mut executors {
            context.epoch_counters.flush();
            while context.driver_backoff.is_active() {
                std::hint::spin_loop();
                context.epoch_counters.flush();
            }
            moved |= executor.poll();
        }
        if moved {
            idle_since = None;
            continue;
        }
        rounds = rounds.wrapping_add(1);
        if !rounds.is_multiple_of(ROUNDS_PER_CLOCK_READ) {
            std::hint::spin_loop();
            continue;
        }
        if !take_over(shared, &mut executors) {
            return;
        }
        let waited = idle_since.get_or_insert_with(Instant::now).elapsed();
        if executors.iter().any(QueueExecutor::is_busy) {
            rest(polling, waited);
        } else if waited > polling.idle {
            sleep(shared, &executors);
            idle_since = None;
        }
    }
}

/// Takes new executors over and lets go of closed ones; false when none is left.
fn take_over(shared: &DispatcherShared, executors: &mut Vec<QueueExecutor>) -> bool {
    let mut state = shared.lock();
    executors.append(&mut state.arriving);
    executors.retain(|executor| !executor.is_finished());
    if executors.is_empty() {
        // Whoever adds a executor from here on starts another thread.
        state.thread = None;
    }
    !executors.is_empty()
}

/// Lets others run while the device works.
fn rest(polling: Polling, waited: std::time::Duration) {
    match (waited > polling.spin, polling.pause.is_zero()) {
        (false, _) => {}
        (true, true) => std::thread::yield_now(),
        (true, false) => std::thread::sleep(polling.pause),
    }
}

/// Sleeps until something is put into a executor.
fn sleep(shared: &DispatcherShared, executors: &[QueueExecutor]) {
    shared.asleep.store(true, Ordering::SeqCst);
    // What came before the word was written did not see it.
    let has_work =
        || !shared.lock().arriving.is_empty() || executors.iter().any(QueueExecutor::has_work);
    while shared.asleep.load(Ordering::SeqCst) && !has_work() {
        std::thread::park();
    }
    shared.asleep.store(false, Ordering::SeqCst);
}
