//! Threads that run a task's steps together and can be suspended inside one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::Nanos;
use device::{DeviceError, Outcome, Segment};

use crate::buffer;
use crate::buffer_pool::BufferPool;
use crate::device_state::{self, DeviceState};
use crate::program::{CpuTask, TaskStart, TaskValues};
use crate::run_queue::RunQueue;
use crate::suspended_task::SuspendedTask;
use crate::yield_point::{self, YieldControl};

/// A segment in flight.
pub(crate) struct RunningSegment {
    pub(crate) segment: Segment,
    /// The queue's epoch when the segment was launched.
    pub(crate) epoch: u64,
    pub(crate) queue: Arc<RunQueue>,
    pub(crate) started: Instant,
    /// Whether it may be preempted inside a step: only if other threads can take over the queue.
    pub(crate) preemptible_inside: bool,
}

impl RunningSegment {
    /// The task, which is of this device: others are refused before they start.
    fn task(&mut self) -> Option<&mut CpuTask> {
        self.segment.task.as_any_mut().downcast_mut::<CpuTask>()
    }
}

/// A thread pool whose first thread runs steps while the others help with parallel loops.
pub(crate) struct WorkerPool {
    inbox: Mutex<Inbox>,
    arrived: Condvar,
    /// The segment it runs, for the thread that preempts it.
    running: Mutex<Option<RunningSegment>>,
    yields: Arc<YieldControl>,
    state: Arc<DeviceState>,
    /// Whether its threads have a lower priority than those of real time.
    pub(crate) low_priority: bool,
    /// Nanoseconds it was suspended since it was started.
    suspended_ns: AtomicU64,
    suspended_at: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Inbox {
    next: Option<(RunningSegment, TaskValues)>,
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WorkerPool {
    /// Starts `threads` threads, named after queue `id`.
    pub(crate) fn start(
        id: u32,
        threads: usize,
        low_priority: bool,
        state: &Arc<DeviceState>,
    ) -> Result<Arc<WorkerPool>, String> {
        let threads = threads.max(1);
        let yields = Arc::new(YieldControl::new(threads));
        let registry = yields.clone();
        let memory = state.memory();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(move |worker| format!("cpu-q{id}-{worker}"))
            .start_handler(move |worker| {
                buffer::set_memory(memory);
                registry.register(worker);
                if low_priority {
                    device_state::lower_thread_priority();
                }
            })
            .build()
            .map_err(|err| format!("cannot start {threads} threads: {err}"))?;
        let workers = Arc::new(WorkerPool {
            inbox: Mutex::default(),
            arrived: Condvar::new(),
            running: Mutex::default(),
            yields,
            state: state.clone(),
            low_priority,
            suspended_ns: AtomicU64::new(0),
            suspended_at: Mutex::default(),
        });
        let weak = Arc::downgrade(&workers);
        workers.yields.on_suspended(move || {
            if let Some(workers) = weak.upgrade() {
                WorkerPool::suspended(&workers);
            }
        });
        let first = workers.clone();
        // The loop occupies one thread of the pool, so that a step's parallel loops start there and
        // find the other threads idle.
        pool.spawn(move || first.serve());
        Ok(workers)
    }

    pub(crate) fn state(&self) -> &DeviceState {
        &self.state
    }

    /// Gives an idle pool a segment to run.
    pub(crate) fn assign(&self, segment: RunningSegment, values: TaskValues) {
        lock(&self.inbox).next = Some((segment, values));
        self.arrived.notify_one();
    }

    /// Ends the threads when they are idle.
    pub(crate) fn close(&self) {
        lock(&self.inbox).closed = true;
        self.arrived.notify_one();
    }

    /// Preempts what it runs for `queue`.
    pub(crate) fn preempt(&self, queue: &RunQueue) {
        let running = lock(&self.running);
        let concerns = |running: &RunningSegment| {
            running.preemptible_inside && std::ptr::eq(&raw const *running.queue, queue)
        };
        if running.as_ref().is_some_and(concerns) {
            *lock(&self.suspended_at) = Some(Instant::now());
            self.yields.request_suspend();
        }
    }

    /// Lets the parked threads continue, now for `segment`.
    pub(crate) fn resume(&self, segment: RunningSegment) {
        if let Some(since) = lock(&self.suspended_at).take() {
            self.suspended_ns.fetch_add(Nanos::from(since.elapsed()).0, Ordering::Relaxed);
        }
        *lock(&self.running) = Some(segment);
        self.yields.resume();
    }

    /// Unwinds the parked threads: their task was dropped.
    pub(crate) fn drop_suspended(&self) {
        self.yields.drop_task();
    }

    /// Returns the task without its threads, all of which are parked inside its step.
    fn suspended(workers: &Arc<WorkerPool>) {
        let Some(mut running) = lock(&workers.running).take() else { return };
        let suspended = SuspendedTask::new(workers.clone());
        if let Some(task) = running.task() {
            task.suspend(suspended);
        }
        let queue = running.queue.clone();
        queue.complete(running, Outcome::Preempted);
        queue.replace_workers(workers);
    }

    fn serve(self: Arc<WorkerPool>) {
        yield_point::starts_loops();
        let buffers = BufferPool::new();
        while let Some((segment, values)) = self.wait_for_segment() {
            let mut next = Some((segment, values));
            while let Some((segment, values)) = next {
                next = self.run(segment, values, &buffers);
            }
        }
    }

    fn wait_for_segment(&self) -> Option<(RunningSegment, TaskValues)> {
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(next) = inbox.next.take() {
                return Some(next);
            }
            if inbox.closed {
                return None;
            }
            inbox = self.arrived.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs a segment to its end. Returns the queue's next segment if this pool is to run it.
    fn run(
        self: &Arc<WorkerPool>,
        mut running: RunningSegment,
        mut values: TaskValues,
        buffers: &BufferPool,
    ) -> Option<(RunningSegment, TaskValues)> {
        let queue = running.queue.clone();
        running.preemptible_inside = queue.can_preempt_inside_step();
        *lock(&self.running) = Some(running);
        // A kernel that panics is a defect, but it must cost its request and not the queue.
        let steps = AssertUnwindSafe(|| self.run_steps(&mut values, buffers));
        let outcome = catch_unwind(steps);
        let finished = {
            let mut running = lock(&self.running);
            // A preemption that came too late must not stop the next segment.
            self.yields.resume();
            *lock(&self.suspended_at) = None;
            running.take()
        };
        let Some(mut running) = finished else {
            // The task was dropped while it was suspended; the queue has other threads by now.
            queue.take_back(self);
            return None;
        };
        let outcome = outcome.unwrap_or_else(|_| {
            let step = running.segment.task.next_step();
            Outcome::Failed(DeviceError::Defect(format!("step #{step} panicked")))
        });
        if let Some(task) = running.task() {
            task.finish(values);
        }
        if outcome == Outcome::Preempted {
            self.state.count_preempted_between_steps();
        }
        let queue = running.queue.clone();
        queue.complete(running, outcome);
        queue.next(self)
    }

    /// Runs step after step. The segment may change in between: a suspended task may resume as part
    /// of another segment.
    fn run_steps(&self, values: &mut TaskValues, buffers: &BufferPool) -> Outcome {
        loop {
            let step = {
                let mut running = lock(&self.running);
                let Some(running) = running.as_mut() else { return Outcome::Preempted };
                let step = running.segment.task.next_step();
                if step >= running.segment.steps.end {
                    return Outcome::Done;
                }
                if running.queue.epoch() > running.epoch {
                    return Outcome::Preempted;
                }
                step
            };
            let started = Instant::now();
            let suspended_before = self.suspended_ns.load(Ordering::Relaxed);
            if let Err(err) = values.run_step(step, buffers) {
                return Outcome::Failed(err);
            }
            let suspended = self.suspended_ns.load(Ordering::Relaxed) - suspended_before;
            let time = Nanos(Nanos::from(started.elapsed()).0.saturating_sub(suspended));
            if let Some(task) = lock(&self.running).as_mut().and_then(RunningSegment::task) {
                task.advance(time);
            }
        }
    }
}

/// How the segment's task starts, or the reason why it cannot.
pub(crate) fn start_of(segment: &mut Segment) -> Result<TaskStart, DeviceError> {
    let Some(task) = segment.task.as_any_mut().downcast_mut::<CpuTask>() else {
        return Err(DeviceError::BadPlan("the task belongs to another device".to_string()));
    };
    task.start().ok_or_else(|| DeviceError::BadPlan("the task is running already".to_string()))
}
