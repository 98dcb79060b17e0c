//! The dispatcher: the thread that serves all best-effort queues of a device.
//!
//! One thread is enough: it enqueues launches ahead and polls words. Several threads would wait
//! for each other, and delay real time, inside the driver.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::Instant;

use device::thread_placement::{self, LoneThread};
use device::thread_watch;

use super::executor::QueueExecutor;
use crate::options::Polling;
use crate::preempt::driver_backoff::DriverBackoff;
use crate::preempt::epoch_counters::EpochCounters;

/// Rounds over all queues between two reads of the clock.
const ROUNDS_PER_CLOCK_READ: u32 = 32;

/// Starts and wakes the thread, which runs while there are queues.
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
    /// Queues that the thread has not taken over yet.
    arriving: Vec<QueueExecutor>,
    thread: Option<Thread>,
}

/// What the thread needs besides its queues.
pub(super) struct DispatcherContext {
    pub(super) polling: Polling,
    /// While it is active the thread makes no call for its queues.
    pub(super) driver_backoff: Arc<DriverBackoff>,
    /// Counters whose preemptions the thread writes to the device.
    pub(super) epoch_counters: Arc<EpochCounters>,
}

/// Wakes the thread.
#[derive(Clone)]
pub(super) struct DispatcherWaker {
    shared: Arc<DispatcherShared>,
}

impl DispatcherWaker {
    /// A segment was pushed, or a queue was closed.
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

    /// Hands a queue to the thread; the first one starts it.
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

/// Polls the queues until the last one is closed.
fn run(shared: &DispatcherShared, context: &DispatcherContext) {
    let polling = context.polling;
    let _processor = thread_placement::enter_alone(LoneThread::Polling);
    let mut executors: Vec<QueueExecutor> = Vec::new();
    let (mut rounds, mut idle_since): (u32, Option<Instant>) = (0, None);
    loop {
        let mut moved = false;
        let turn = thread_watch::is_on().then(thread_watch::turn);
        for executor in &mut executors {
            context.epoch_counters.flush();
            while context.driver_backoff.is_active() {
                std::hint::spin_loop();
                context.epoch_counters.flush();
            }
            moved |= executor.poll();
        }
        drop(turn);
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
            yield_while_busy(polling, waited);
        } else if waited > polling.idle {
            sleep(shared, &executors);
            idle_since = None;
        }
    }
}

/// Takes over new queues and drops finished ones; false when none remain.
fn take_over(shared: &DispatcherShared, executors: &mut Vec<QueueExecutor>) -> bool {
    let mut state = shared.lock();
    executors.append(&mut state.arriving);
    executors.retain(|executor| !executor.is_finished());
    if executors.is_empty() {
        // The next queue starts another thread.
        state.thread = None;
    }
    !executors.is_empty()
}

/// Yields to other threads while the device works.
fn yield_while_busy(polling: Polling, waited: std::time::Duration) {
    match (waited > polling.spin, polling.pause.is_zero()) {
        (false, _) => {}
        (true, true) => std::thread::yield_now(),
        (true, false) => std::thread::sleep(polling.pause),
    }
}

/// Sleeps until a queue has work.
fn sleep(shared: &DispatcherShared, executors: &[QueueExecutor]) {
    shared.asleep.store(true, Ordering::SeqCst);
    // What was pushed before `asleep` was set did not wake the thread.
    let has_work =
        || !shared.lock().arriving.is_empty() || executors.iter().any(QueueExecutor::has_work);
    while shared.asleep.load(Ordering::SeqCst) && !has_work() {
        std::thread::park();
    }
    shared.asleep.store(false, Ordering::SeqCst);
}
