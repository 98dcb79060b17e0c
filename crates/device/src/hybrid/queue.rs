//! Queues that run segments of the accelerator and of programs in sections.
//!
//! A segment of the accelerator goes straight to its queue. A segment of a program in sections
//! belongs to the queue's *driver*, a thread that exists once there was one: it prepares a section,
//! launches it on the accelerator's queue or on a queue of the host, waits for it, and goes on.
//! Segments that are launched meanwhile wait behind it, so that order and capacity are those of one
//! queue. Every queue has its own driver: what best effort prepares delays no real time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use base::Nanos;

use super::program::HybridTask;
use super::section::Side;
use crate::{
    Completion, CompletionSink, Device, DeviceError, Outcome, Queue, QueueOptions, Segment, Task,
};

/// The token of segments that the driver launches. A segment of a caller with this token is
/// launched by the driver too, which waits for it.
const DRIVER_TOKEN: u64 = u64::MAX;

/// Pause before the driver tries again to launch on a queue that is full of earlier segments.
const FULL_PAUSE: Duration = Duration::from_micros(50);

/// A queue of a [`HybridDevice`](super::HybridDevice).
pub(super) struct HybridQueue {
    shared: Arc<Shared>,
}

/// What the queue shares with its driver.
struct Shared {
    options: QueueOptions,
    accelerator: Box<dyn Queue>,
    host_device: Arc<dyn Device>,
    host: OnceLock<Result<Box<dyn Queue>, DeviceError>>,
    sink: Arc<dyn CompletionSink>,
    /// Ends of segments that the driver launched. It launches one at a time.
    ended: SyncSender<Completion>,
    state: Mutex<State>,
    changed: Condvar,
    /// A section runs on the host, and how often that was seen.
    on_host: AtomicBool,
    seen_on_host: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Segments for the driver, with the epoch they were launched in.
    waiting: VecDeque<(Segment, u64)>,
    /// The driver has a segment.
    busy: bool,
    closed: bool,
    /// Incremented by each preemption.
    epoch: u64,
    /// The driver's end of [`Shared::ended`], until it starts.
    receiver: Option<Receiver<Completion>>,
    started: bool,
}

/// Sorts the completions of the accelerator's queue.
struct SortingSink {
    sink: Arc<dyn CompletionSink>,
    ended: SyncSender<Completion>,
}

impl CompletionSink for SortingSink {
    fn complete(&self, completion: Completion) {
        if completion.token == DRIVER_TOKEN {
            // The channel holds one and the driver launches one at a time. It fails only when the
            // driver has ended with its queue.
            let _ = self.ended.send(completion);
        } else {
            self.sink.complete(completion);
        }
    }
}

/// Sends all completions to the driver.
struct DriverSink(SyncSender<Completion>);

impl CompletionSink for DriverSink {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

impl HybridQueue {
    pub(super) fn open(
        accelerator: &dyn Device,
        host_device: Arc<dyn Device>,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<HybridQueue, DeviceError> {
        let (ended, receiver) = sync_channel(1);
        let sorting = Arc::new(SortingSink { sink: sink.clone(), ended: ended.clone() });
        let accelerator = accelerator.open_queue(options, sorting)?;
        let state = State { receiver: Some(receiver), ..State::default() };
        let shared = Arc::new(Shared {
            options,
            accelerator,
            host_device,
            host: OnceLock::new(),
            sink,
            ended,
            state: Mutex::new(state),
            changed: Condvar::new(),
            on_host: AtomicBool::new(false),
            seen_on_host: AtomicU64::new(0),
        });
        Ok(HybridQueue { shared })
    }
}

impl Queue for HybridQueue {
    fn launch(&self, mut segment: Segment) -> Result<(), Segment> {
        let shared = &self.shared;
        let in_sections = segment.task.as_any_mut().is::<HybridTask>();
        // Held while the accelerator takes a segment: one that is launched later stays behind it.
        let mut state = shared.lock();
        let is_idle = !state.busy && state.waiting.is_empty();
        if is_idle && !in_sections && segment.token != DRIVER_TOKEN {
            return shared.accelerator.launch(segment);
        }
        if state.closed || state.waiting.len() >= shared.options.capacity.max(1) {
            return Err(segment);
        }
        if !shared.start_driver(&mut state) {
            return Err(segment);
        }
        let epoch = state.epoch;
        state.waiting.push_back((segment, epoch));
        drop(state);
        shared.changed.notify_one();
        Ok(())
    }

    fn preempt(&self) {
        let shared = &self.shared;
        // The driver launches a section under the same lock, so it launches before this or sees it.
        shared.lock().epoch += 1;
        shared.accelerator.preempt();
        if let Some(Ok(host)) = shared.host.get() {
            host.preempt();
        }
    }

    fn confine(&self, confined: bool) {
        self.shared.accelerator.confine(confined);
    }

    /// A section on the host may take as long as it likes: only the accelerator can hang.
    fn progress(&self) -> u64 {
        let shared = &self.shared;
        if shared.on_host.load(Ordering::SeqCst) {
            shared.seen_on_host.fetch_add(1, Ordering::SeqCst);
        }
        shared.accelerator.progress().wrapping_add(shared.seen_on_host.load(Ordering::SeqCst))
    }
}

impl Drop for HybridQueue {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the driver unless it runs; false when the system gives no thread.
    fn start_driver(self: &Arc<Shared>, state: &mut State) -> bool {
        if state.started {
            return true;
        }
        let Some(receiver) = state.receiver.take() else { return false };
        let shared = self.clone();
        let name = format!("sections-{}", self.options.id);
        let spawned = std::thread::Builder::new().name(name).spawn(move || shared.drive(&receiver));
        state.started = spawned.is_ok();
        state.started
    }

    /// Runs waiting segments until the queue is closed and empty.
    fn drive(&self, ended: &Receiver<Completion>) {
        loop {
            let mut state = self.lock();
            state.busy = false;
            let (segment, epoch) = loop {
                match state.waiting.pop_front() {
                    Some(first) => break first,
                    None if state.closed => return,
                    None => {
                        let wait = self.changed.wait(state);
                        state = wait.unwrap_or_else(PoisonError::into_inner);
                    }
                }
            };
            state.busy = true;
            let is_late = state.epoch > epoch;
            drop(state);
            let Segment { token, mut task, steps } = segment;
            let (outcome, busy) = if is_late {
                (Outcome::Preempted, Nanos::ZERO)
            } else if let Some(own) = task.as_any_mut().downcast_mut::<HybridTask>() {
                match own.next_step() == steps.start {
                    true => self.run_sections(own, steps.end, epoch, ended),
                    false => (wrong_start(steps.start, own.next_step()), Nanos::ZERO),
                }
            } else {
                let segment = Segment { token: DRIVER_TOKEN, task, steps };
                match self.run_plain(segment, epoch, ended) {
                    Some(completion) => {
                        task = completion.task;
                        (completion.outcome, completion.busy)
                    }
                    None => return,
                }
            };
            let queue = self.options.id;
            self.sink.complete(Completion { queue, token, task, outcome, busy });
        }
    }

    /// Runs sections of `task` before section `end`.
    fn run_sections(
        &self,
        task: &mut HybridTask,
        end: usize,
        epoch: u64,
        ended: &Receiver<Completion>,
    ) -> (Outcome, Nanos) {
        let end = end.min(task.step_count());
        let mut busy = Nanos::ZERO;
        while task.next_step() < end {
            if let Err(err) = task.start_section(true) {
                return (Outcome::Failed(err), busy);
            }
            let Some((side, inner)) = task.take_running() else { break };
            let steps = inner.next_step()..inner.step_count();
            if steps.is_empty() {
                // All of its outputs are empty.
                if let Err(err) = task.finish_section(inner, Nanos::ZERO) {
                    return (Outcome::Failed(err), busy);
                }
                continue;
            }
            let segment = Segment { token: DRIVER_TOKEN, task: inner, steps };
            self.on_host.store(side == Side::Host, Ordering::SeqCst);
            let launched = self.launch_own(side, segment, epoch);
            let completion = match launched {
                Launched::Running => match ended.recv() {
                    Ok(completion) => completion,
                    Err(_) => return (Outcome::Failed(self.closed()), busy),
                },
                Launched::Preempted(segment) => {
                    task.put_back(side, segment.task, Nanos::ZERO);
                    return (Outcome::Preempted, busy);
                }
                Launched::Failed(err) => return (Outcome::Failed(err), busy),
            };
            // The next section begins to make progress from here.
            self.seen_on_host.fetch_add(1, Ordering::SeqCst);
            self.on_host.store(false, Ordering::SeqCst);
            busy += completion.busy;
            match completion.outcome {
                Outcome::Done => {
                    if let Err(err) = task.finish_section(completion.task, completion.busy) {
                        return (Outcome::Failed(err), busy);
                    }
                }
                Outcome::Preempted => {
                    task.put_back(side, completion.task, completion.busy);
                    // A queue that is not preemptible goes on with what has begun.
                    if self.options.preemptible {
                        return (Outcome::Preempted, busy);
                    }
                }
                Outcome::Failed(err) => return (Outcome::Failed(err), busy),
            }
        }
        (Outcome::Done, busy)
    }

    /// Runs a segment of the accelerator and waits for it; `None` when its queue has gone.
    fn run_plain(
        &self,
        segment: Segment,
        epoch: u64,
        ended: &Receiver<Completion>,
    ) -> Option<Completion> {
        let queue = self.options.id;
        let stop = |segment: Segment, outcome: Outcome| {
            let Segment { token, task, .. } = segment;
            Some(Completion { queue, token, task, outcome, busy: Nanos::ZERO })
        };
        match self.launch_own(Side::Accelerator, segment, epoch) {
            Launched::Running => ended.recv().ok(),
            Launched::Preempted(segment) => stop(segment, Outcome::Preempted),
            Launched::Failed(_) => None,
        }
    }

    /// Launches a segment of the driver, unless all that was launched in `epoch` is preempted.
    fn launch_own(&self, side: Side, mut segment: Segment, epoch: u64) -> Launched {
        let queue: &dyn Queue = match side {
            Side::Accelerator => &*self.accelerator,
            Side::Host => match self.host() {
                Ok(host) => host,
                Err(err) => return Launched::Failed(err.clone()),
            },
        };
        loop {
            let state = self.lock();
            // What has begun on a queue that is not preemptible is not preempted.
            if state.epoch > epoch && self.options.preemptible {
                return Launched::Preempted(segment);
            }
            match queue.launch(segment) {
                Ok(()) => return Launched::Running,
                Err(back) => segment = back,
            }
            drop(state);
            std::thread::sleep(FULL_PAUSE);
        }
    }

    /// The host's queue, opened with the first section that needs it.
    fn host(&self) -> Result<&dyn Queue, &DeviceError> {
        let open = || {
            let sink = Arc::new(DriverSink(self.ended.clone()));
            self.host_device.open_queue(QueueOptions { capacity: 1, ..self.options }, sink)
        };
        self.host.get_or_init(open).as_ref().map(|queue| &**queue)
    }

    fn closed(&self) -> DeviceError {
        let (device, reason) = ("host".to_string(), "its queue is closed".to_string());
        DeviceError::Faulted { device, reason }
    }
}

/// What became of a segment that the driver launched.
enum Launched {
    Running,
    /// Not launched: preempted before.
    Preempted(Segment),
    Failed(DeviceError),
}

fn wrong_start(start: usize, next: usize) -> Outcome {
    let why = format!("a segment starts at section {start}, the task is at {next}");
    Outcome::Failed(DeviceError::BadPlan(why))
}
