//! The segments of a queue, one running and some waiting, and the worker pools that run them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::Nanos;
use device::{Completion, CompletionSink, DeviceError, Outcome, QueueOptions, Segment};

use crate::device_state::{DeviceState, MAX_SUSPENDED_TASKS};
use crate::program::{TaskStart, TaskValues};
use crate::worker_pool::{self, RunningSegment, WorkerPool};

/// One queue of the device.
pub(crate) struct RunQueue {
    options: QueueOptions,
    threads: usize,
    sink: Arc<dyn CompletionSink>,
    state: Arc<DeviceState>,
    /// Incremented by each preemption. Segments of an earlier epoch stop.
    epoch: AtomicU64,
    content: Mutex<QueueContent>,
}

#[derive(Default)]
struct QueueContent {
    waiting: VecDeque<QueuedSegment>,
    /// The worker pool that runs a segment or is about to.
    running: Option<Arc<WorkerPool>>,
    idle: Vec<Arc<WorkerPool>>,
    closed: bool,
}

/// A segment and the epoch it was launched in.
struct QueuedSegment {
    segment: Segment,
    epoch: u64,
}

/// How a segment proceeds when it reaches the front of the queue.
enum SegmentStart {
    /// The worker pool of its suspended task continues.
    Resumed(Arc<WorkerPool>),
    /// A worker pool must start it.
    Fresh(Box<(RunningSegment, TaskValues)>),
    /// It ends before it starts.
    Ended(Segment, Outcome),
}

impl RunQueue {
    pub(crate) fn open(
        options: QueueOptions,
        threads: usize,
        sink: Arc<dyn CompletionSink>,
        state: Arc<DeviceState>,
    ) -> Result<Arc<RunQueue>, String> {
        let queue = RunQueue {
            options,
            threads,
            sink,
            state,
            epoch: AtomicU64::new(0),
            content: Mutex::default(),
        };
        let workers = queue.start_workers()?;
        queue.lock().idle.push(workers);
        Ok(Arc::new(queue))
    }

    fn lock(&self) -> MutexGuard<'_, QueueContent> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Whether its threads need a low priority: a real-time queue exists, and this is none.
    fn needs_low_priority(&self) -> bool {
        !self.options.high_priority && self.state.real_time_seen()
    }

    fn start_workers(&self) -> Result<Arc<WorkerPool>, String> {
        WorkerPool::start(self.options.id, self.threads, self.needs_low_priority(), &self.state)
    }

    pub(crate) fn launch(self: &Arc<RunQueue>, segment: Segment) -> Result<(), Segment> {
        if self.options.high_priority {
            self.state.note_real_time();
        }
        let mut content = self.lock();
        let queued = QueuedSegment { segment, epoch: self.epoch() };
        if content.running.is_some() {
            if content.waiting.len() >= self.options.capacity.max(1) {
                return Err(queued.segment);
            }
            content.waiting.push_back(queued);
            return Ok(());
        }
        content.waiting.push_back(queued);
        if let Some((segment, outcome)) = self.start_first(&mut content) {
            drop(content);
            // The caller may hold locks that the sink needs.
            let completion = self.completion(segment, outcome, Nanos::ZERO);
            self.state.complete_elsewhere(completion, &self.sink);
        }
        Ok(())
    }

    /// Preempts all that was launched so far.
    pub(crate) fn preempt(&self) {
        let content = self.lock();
        self.epoch.fetch_add(1, Ordering::AcqRel);
        if let Some(workers) = &content.running {
            workers.preempt(self);
        }
    }

    /// Accepts no more segments; threads end when they are idle.
    pub(crate) fn close(&self) {
        let mut content = self.lock();
        content.closed = true;
        content.idle.drain(..).for_each(|workers| workers.close());
    }

    /// Whether a segment that starts may be preempted inside a step. Other threads must be there
    /// to take over the queue then; starts them if necessary.
    pub(crate) fn can_preempt_inside_step(&self) -> bool {
        if !self.options.preemptible || !self.state.may_suspend() {
            return false;
        }
        let low_priority = self.needs_low_priority();
        if self.lock().idle.iter().any(|workers| workers.low_priority == low_priority) {
            return true;
        }
        let Ok(workers) = self.start_workers() else { return !self.lock().idle.is_empty() };
        self.lock().idle.push(workers);
        true
    }

    /// Reports how a segment ended.
    pub(crate) fn complete(&self, running: RunningSegment, outcome: Outcome) {
        let busy = running.started.elapsed().into();
        self.sink.complete(self.completion(running.segment, outcome, busy));
    }

    fn completion(&self, segment: Segment, outcome: Outcome, busy: Nanos) -> Completion {
        let Segment { token, task, .. } = segment;
        Completion { queue: self.options.id, token, task, outcome, busy }
    }

    /// The next segment for `workers`, which finished one. They become idle if there is none.
    pub(crate) fn next(
        self: &Arc<RunQueue>,
        workers: &Arc<WorkerPool>,
    ) -> Option<(RunningSegment, TaskValues)> {
        let mut content = self.lock();
        loop {
            content.running = None;
            let Some(queued) = content.waiting.pop_front() else { break };
            match self.start(queued) {
                SegmentStart::Fresh(start) => {
                    content.running = Some(workers.clone());
                    return Some(*start);
                }
                SegmentStart::Resumed(other) => {
                    content.running = Some(other);
                    break;
                }
                SegmentStart::Ended(segment, outcome) => {
                    // Nothing else starts before this is reported.
                    content.running = Some(workers.clone());
                    drop(content);
                    self.sink.complete(self.completion(segment, outcome, Nanos::ZERO));
                    content = self.lock();
                }
            }
        }
        Self::make_idle(&mut content, workers, self.needs_low_priority());
        None
    }

    /// Starts the next segment on other threads: those of `workers` are parked.
    pub(crate) fn replace_workers(self: &Arc<RunQueue>, workers: &Arc<WorkerPool>) {
        let mut content = self.lock();
        loop {
            content.running = None;
            match self.start_first(&mut content) {
                None => return,
                Some((segment, outcome)) => {
                    content.running = Some(workers.clone());
                    drop(content);
                    self.sink.complete(self.completion(segment, outcome, Nanos::ZERO));
                    content = self.lock();
                }
            }
        }
    }

    /// Takes back `workers` whose suspended task was dropped.
    pub(crate) fn take_back(&self, workers: &Arc<WorkerPool>) {
        Self::make_idle(&mut self.lock(), workers, self.needs_low_priority());
    }

    /// Keeps `workers` as idle, or ends them if the queue is closed or has better ones.
    fn make_idle(content: &mut QueueContent, workers: &Arc<WorkerPool>, low_priority: bool) {
        let better = |idle: &Arc<WorkerPool>| idle.low_priority == low_priority;
        let outdated = workers.low_priority != low_priority && content.idle.iter().any(better);
        // Workers of dropped tasks come back in addition to those that replaced them.
        if content.closed || outdated || content.idle.len() > MAX_SUSPENDED_TASKS {
            workers.close();
        } else {
            content.idle.push(workers.clone());
        }
    }

    /// Starts the first waiting segment on an idle worker pool. Returns the segment if it ended
    /// before it started.
    fn start_first(self: &Arc<RunQueue>, content: &mut QueueContent) -> Option<(Segment, Outcome)> {
        match self.start(content.waiting.pop_front()?) {
            SegmentStart::Ended(segment, outcome) => Some((segment, outcome)),
            SegmentStart::Resumed(workers) => {
                content.running = Some(workers);
                None
            }
            SegmentStart::Fresh(start) => {
                let (running, values) = *start;
                match self.idle_workers(content) {
                    Ok(workers) => {
                        content.running = Some(workers.clone());
                        workers.assign(running, values);
                        None
                    }
                    Err(reason) => {
                        let err = DeviceError::Faulted { device: "cpu".to_string(), reason };
                        Some((running.segment, Outcome::Failed(err)))
                    }
                }
            }
        }
    }

    /// An idle worker pool, preferably of the right priority. A segment is preempted inside a step
    /// only if another pool is idle, so there is nearly always one.
    fn idle_workers(&self, content: &mut QueueContent) -> Result<Arc<WorkerPool>, String> {
        let low_priority = self.needs_low_priority();
        let best = content.idle.iter().rposition(|workers| workers.low_priority == low_priority);
        match best.or(content.idle.len().checked_sub(1)) {
            Some(best) => Ok(content.idle.swap_remove(best)),
            None => self.start_workers(),
        }
    }

    fn start(self: &Arc<RunQueue>, queued: QueuedSegment) -> SegmentStart {
        let QueuedSegment { mut segment, epoch } = queued;
        if self.epoch() > epoch {
            return SegmentStart::Ended(segment, Outcome::Preempted);
        }
        let start = match worker_pool::start_of(&mut segment) {
            Ok(start) => start,
            Err(err) => return SegmentStart::Ended(segment, Outcome::Failed(err)),
        };
        let running = RunningSegment {
            segment,
            epoch,
            queue: self.clone(),
            started: Instant::now(),
            preemptible_inside: self.options.preemptible,
        };
        match start {
            TaskStart::Fresh(values) => SegmentStart::Fresh(Box::new((running, values))),
            TaskStart::Suspended(task) => SegmentStart::Resumed(task.resume(running)),
        }
    }
}

impl Drop for RunQueue {
    fn drop(&mut self) {
        // Worker pools may have become idle after the queue was closed.
        self.close();
    }
}
