//! One best-effort queue as its thread sees it: work in in_flight, looked at without ever waiting.
//!
//! What is known of a step that ran: when the fence behind it is passed and its epoch_counter still has the epoch it was launched
//! with, it cannot have preempted, so it is done. Otherwise the words are read back in which blocks that preempted said so. What is
//! queued behind a step that preempted finds the preempt before it writes anything, so memory is as the step preempted it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use base::Nanos;
use device::{Completion, CompletionSink, DeviceError, Outcome, Segment, Task};

use super::{POLLS_PER_QUERY, device_task, failed, is_reached};
use crate::driver::{Event, PinnedBuffer, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::hub::{Hub, LaunchTarget};
use crate::preempt::epoch_counters::{EpochCounter, LaunchEpoch, QueuePreemption};
use crate::program::instance::BestEffortLaunch;
use crate::program::specialization::Specialization;
use crate::program::task::CudaTask;

/// Launches, each with a fence behind it, that are in in_flight on a queue: one that runs and one to go on with.
const LAUNCHES_IN_FLIGHT: usize = 2;

/// Queues that run best effort from which on each has one launch in in_flight: the others keep the device busy while it hears of
/// it, and real time has less to wait for.
const MANY_QUEUES: usize = 3;

/// Outputs up to this size are copied right behind the last step, wherever it got; larger ones only once it is known to be
/// done, since the copy of a step that preempted would keep its queue busy.
const EAGER_OUTPUT_BYTES: u64 = 128 << 10;

/// What waits for a executor.
pub(crate) struct SegmentQueue {
    waiting: Mutex<VecDeque<(Segment, u64)>>,
    /// How many, for a look without the lock.
    count: AtomicUsize,
    capacity: usize,
    closed: AtomicBool,
    pub(crate) preemption: QueuePreemption,
}

impl SegmentQueue {
    pub(crate) fn new(capacity: usize) -> SegmentQueue {
        SegmentQueue {
            waiting: Mutex::default(),
            count: AtomicUsize::new(0),
            capacity,
            closed: AtomicBool::new(false),
            preemption: QueuePreemption::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Segment, u64)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn put(&self, segment: Segment) -> Result<(), Segment> {
        let mut waiting = self.lock();
        if waiting.len() >= self.capacity {
            return Err(segment);
        }
        waiting.push_back((segment, self.preemption.next_sequence()));
        self.count.store(waiting.len(), Ordering::SeqCst);
        Ok(())
    }

    fn take(&self) -> Option<(Segment, u64)> {
        if self.is_empty() {
            return None;
        }
        let mut waiting = self.lock();
        let first = waiting.pop_front();
        self.count.store(waiting.len(), Ordering::SeqCst);
        first
    }

    fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}

/// A queue's streams, and what runs on one of them.
pub(crate) struct QueueExecutor {
    id: u32,
    hub: Arc<Hub>,
    streams: QueueStreams,
    /// The last fence that was passed.
    word: PinnedWord,
    /// The last fence that was queued.
    fences: u32,
    /// SmLocator words of launches are read to.
    readback: PinnedBuffer,
    stamps: (Event, Event),
    segments: Arc<SegmentQueue>,
    sink: Arc<dyn CompletionSink>,
    run: Option<ActiveRun>,
    /// Looks at a fence that was not passed yet.
    polls: u32,
}

/// SmLocator a executor's work is queued: on one of two streams at a time.
struct QueueStreams {
    priority: Priority,
    whole_device: Stream,
    partition: Option<Stream>,
    /// The work is in the partition.
    in_partition: bool,
}

impl QueueStreams {
    fn new(hub: &Hub, priority: Priority) -> Result<QueueStreams, CudaError> {
        let context = hub.context();
        let partition = hub.partition.as_ref().filter(|_| priority == Priority::Low);
        let partition =
            partition.map(|partition| Stream::in_partition(context, partition)).transpose()?;
        let whole_device = Stream::new(context, priority)?;
        Ok(QueueStreams { priority, whole_device, partition, in_partition: false })
    }

    fn current(&self) -> &Stream {
        match &self.partition {
            Some(partition) if self.in_partition => partition,
            _ => &self.whole_device,
        }
    }

    fn launch_target(&self) -> LaunchTarget {
        if self.in_partition { LaunchTarget::Partition } else { self.priority.into() }
    }
}

impl Drop for QueueStreams {
    fn drop(&mut self) {
        // The words and buffers of their executor must outlive what is queued.
        let _ = self.whole_device.synchronize();
        let _ = self.partition.as_ref().map(Stream::synchronize);
    }
}

/// A segment under way.
struct ActiveRun {
    segment: Segment,
    sequence: u64,
    started: Instant,
    epoch_counter: Option<Arc<EpochCounter>>,
    /// What its launches carry.
    epoch: u32,
    /// The step behind its last.
    end: usize,
    /// It is a whole run whose weights are there, so the time it takes, unless it leaves, says how long such runs take.
    paced: bool,
    in_flight: LaunchesInFlight,
    /// What was queued before its first launch is known to be done.
    settled: bool,
    stage: RunState,
}

/// What a run waits for.
#[derive(Clone, Copy)]
enum RunState {
    /// Its oldest launch.
    Running,
    /// Everything queued, and then the words that say how far it got.
    ReadingBack { fence: u32 },
    /// Its outputs.
    CopyingOutputs { fence: u32 },
}

/// Launches in in_flight.
#[derive(Default)]
struct LaunchesInFlight {
    /// Steps before this one are known to be done.
    known: usize,
    /// Steps before this one are queued.
    launched: usize,
    /// Marks, oldest first, with the step each stands before.
    fences: VecDeque<(u32, usize)>,
    /// What was queued last is a kernel.
    behind_kernel: bool,
}

/// What is queued at once.
enum NextLaunch {
    /// One step by its index.
    Step(usize),
    /// Several, none of them begun.
    Chain(Range<usize>),
}

impl LaunchesInFlight {
    fn at(step: usize) -> LaunchesInFlight {
        LaunchesInFlight { known: step, launched: step, ..LaunchesInFlight::default() }
    }

    /// Whether a fence is due: behind every chain, however many launches it took.
    fn is_due(&self, specialization: &Specialization) -> bool {
        let last = self.launched.checked_sub(1);
        last.is_some_and(|last| specialization.chain_of(last).end == self.launched)
    }
}

impl ActiveRun {
    fn is_preempted(&self) -> bool {
        self.epoch_counter.as_ref().is_some_and(|epoch_counter| epoch_counter.epoch() != self.epoch)
    }
}

impl QueueExecutor {
    pub(crate) fn new(
        hub: Arc<Hub>,
        id: u32,
        priority: Priority,
        segments: Arc<SegmentQueue>,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<QueueExecutor, CudaError> {
        let context = hub.context();
        Ok(QueueExecutor {
            id,
            streams: QueueStreams::new(&hub, priority)?,
            word: PinnedWord::new(context)?,
            fences: 0,
            readback: PinnedBuffer::zeroed(context, 4096)?,
            stamps: (Event::new(context)?, Event::new(context)?),
            hub,
            segments,
            sink,
            run: None,
            polls: 0,
        })
    }

    /// Counts what it takes up, or is done with.
    fn count(&self, begun: bool) {
        let Hub { rt_activity, best_effort, .. } = &*self.hub;
        match (self.streams.priority, begun) {
            (Priority::High, true) => rt_activity.segment_started(),
            (Priority::High, false) => rt_activity.segment_ended(),
            (Priority::Low, true) => drop(best_effort.fetch_add(1, Ordering::Relaxed)),
            (Priority::Low, false) => drop(best_effort.fetch_sub(1, Ordering::Relaxed)),
        }
    }

    /// Whether it runs something.
    pub(crate) fn is_busy(&self) -> bool {
        self.run.is_some()
    }

    /// Whether something waits for its thread.
    pub(crate) fn has_work(&self) -> bool {
        self.is_busy() || !self.segments.is_empty() || self.segments.closed.load(Ordering::SeqCst)
    }

    /// Whether nothing is to come and nothing is preempted.
    pub(crate) fn is_finished(&self) -> bool {
        self.segments.closed.load(Ordering::SeqCst) && !self.is_busy() && self.segments.is_empty()
    }

    /// Does what can be done without waiting; false when that is nothing.
    pub(crate) fn poll(&mut self) -> bool {
        // A panic here is a defect, but it must cost its request and not the device's queues.
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.advance()));
        let ended = match polled {
            Ok(Ok(PollResult::None)) => return false,
            Ok(Ok(PollResult::Some)) => return true,
            Ok(Ok(PollResult::Ended(outcome))) => outcome,
            Ok(Err(err)) => Outcome::Failed(err),
            Err(_) => Outcome::Failed(DeviceError::BadPlan("the queue panicked".to_string())),
        };
        self.finish(ended);
        true
    }

    /// The next thing there is to do.
    fn advance(&mut self) -> Result<PollResult, DeviceError> {
        let Some(run) = &self.run else {
            return match self.segments.take() {
                Some((segment, sequence)) => self.begin(segment, sequence),
                None => Ok(PollResult::None),
            };
        };
        let (stage, oldest) = (run.stage, run.in_flight.fences.front().copied());
        let fence = match (stage, oldest) {
            // Nothing is gained by waiting for the launch that leaves: the words can be asked for right behind it.
            (RunState::Running, _) if run.is_preempted() => return self.read_back(),
            (RunState::Running, Some((fence, _))) => fence,
            (RunState::Running, None) => {
                return Err(DeviceError::BadPlan("nothing is in in_flight".to_string()));
            }
            (RunState::ReadingBack { fence } | RunState::CopyingOutputs { fence }, _) => fence,
        };
        if !self.is_fence_reached(fence)? {
            return Ok(PollResult::None);
        }
        match (stage, oldest) {
            (RunState::Running, Some((_, step))) => self.launch_ended(step),
            (RunState::ReadingBack { .. }, _) => self.find_preemption_point(),
            _ => self.end_run(),
        }
    }

    /// Whether the device has written `fence`; now and then asks the driver whether it ever will.
    fn is_fence_reached(&mut self, fence: u32) -> Result<bool, DeviceError> {
        if is_reached(self.word.load(), fence) {
            self.polls = 0;
            return Ok(true);
        }
        self.polls = self.polls.wrapping_add(1);
        let pausing = !self.hub.options().polling.pause.is_zero();
        if pausing || self.polls.is_multiple_of(POLLS_PER_QUERY) {
            self.streams.current().is_idle().map_err(|err| self.hub.error(err))?;
        }
        Ok(false)
    }

    /// Tells the sink what became of the segment.
    fn finish(&mut self, outcome: Outcome) {
        self.segments.preemption.end_current();
        let Some(ActiveRun { mut segment, started, .. }) = self.run.take() else { return };
        self.count(false);
        if matches!(outcome, Outcome::Failed(_)) {
            // What it had queued may still run.
            if let Err(err) = self.streams.current().synchronize() {
                tracing::debug!("after a failure: {err}");
            }
            if let Some(task) = segment.task.as_any_mut().downcast_mut::<CudaTask>() {
                task.abandon();
            }
        }
        let Segment { token, task, .. } = segment;
        let busy = started.elapsed().into();
        self.sink.complete(Completion { queue: self.id, token, task, outcome, busy });
    }

    /// Takes a segment up and queues its first launches.
    fn begin(&mut self, segment: Segment, sequence: u64) -> Result<PollResult, DeviceError> {
        self.count(true);
        let run = self.run.insert(ActiveRun {
            segment,
            sequence,
            started: Instant::now(),
            epoch_counter: None,
            epoch: 0,
            end: 0,
            paced: false,
            in_flight: LaunchesInFlight::default(),
            settled: false,
            stage: RunState::Running,
        });
        self.hub.check_healthy()?;
        let (task, steps) = device_task(&self.hub, &mut run.segment)?;
        if steps.is_empty() {
            return Ok(PollResult::Ended(Outcome::Done));
        }
        if self.segments.preemption.is_preempted(sequence) {
            return Ok(PollResult::Ended(Outcome::Preempted));
        }
        task.acquire_memory(Priority::Low)?;
        let epoch_counter = task.epoch_counter().map_err(|err| self.hub.error(err))?;
        let first = steps.start;
        let there =
            task.specialization.arrival().map_err(|err| failed(task, first, err))?.is_none();
        run.paced = there && steps == (0..task.step_count());
        (run.epoch_counter, run.end) = (Some(epoch_counter.clone()), steps.end);
        match self.segments.preemption.begin_run(sequence, &epoch_counter) {
            Some(launch_epoch) => self.start(launch_epoch, first),
            None => Ok(PollResult::Ended(Outcome::Preempted)),
        }
    }

    /// Queues the first launches from step `first` on, which is the task's next, where the run is seated.
    fn start(
        &mut self,
        launch_epoch: LaunchEpoch,
        first: usize,
    ) -> Result<PollResult, DeviceError> {
        self.streams.in_partition = launch_epoch.in_partition;
        let Some(mut run) = self.run.take() else { return Ok(PollResult::None) };
        (run.epoch, run.stage, run.settled) = (launch_epoch.epoch, RunState::Running, false);
        // How long a run takes in the partition says nothing about others.
        run.paced &= !launch_epoch.in_partition;
        run.in_flight = LaunchesInFlight::at(first);
        let stream = self.streams.current();
        let ready = cuda_task(&mut run.segment).and_then(|task| {
            task.epoch_counter()?.set_launch_epoch(launch_epoch.epoch, stream)?;
            prepare_launches(stream, task, &task.specialization.clone(), first)
        });
        let run = self.run.insert(run);
        if let Err(err) = ready {
            let (task, _) = device_task(&self.hub, &mut run.segment)?;
            return Err(failed(task, first, err));
        }
        self.fill()
    }

    /// Queues what may be in in_flight.
    fn fill(&mut self) -> Result<PollResult, DeviceError> {
        let Some(mut run) = self.run.take() else { return Ok(PollResult::None) };
        let fill = std::panic::AssertUnwindSafe(|| self.fill_run(&mut run));
        let filled = std::panic::catch_unwind(fill);
        let (known, launched) = (run.in_flight.known, run.in_flight.launched);
        // Back in its launch_target first: whoever catches a panic answers for what it finds there.
        let at = self.run.insert(run);
        let filled = filled.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        if let Err(err) = filled {
            let (task, _) = device_task(&self.hub, &mut at.segment)?;
            return Err(failed(task, launched, err));
        }
        if launched > known {
            return Ok(PollResult::Some);
        }
        // Done; or preempted before anything was launched, when what made it ready may still be on its way.
        if known == at.end { self.end_run() } else { self.read_back() }
    }

    fn fill_run(&mut self, run: &mut ActiveRun) -> Result<(), CudaError> {
        let end = run.end;
        if !self.apply_confinement(run) {
            return Ok(());
        }
        while let Some(next) = self.next_launch(run)? {
            let task = cuda_task(&mut run.segment)?;
            self.launch(task, &mut run.in_flight, next)?;
            let (timed, in_flight) = (task.is_timed(), &mut run.in_flight);
            if timed || in_flight.launched == end || in_flight.is_due(&task.specialization) {
                self.fence(in_flight)?;
            }
        }
        let in_flight = &mut run.in_flight;
        if in_flight.fences.is_empty() && in_flight.launched > in_flight.known {
            self.fence(in_flight)?;
        }
        Ok(())
    }

    /// Goes to where the queue is held to as soon as nothing is in in_flight, and false until then: launches on two streams
    /// would not wait for each other.
    fn apply_confinement(&mut self, run: &ActiveRun) -> bool {
        if self.segments.preemption.is_confined() == self.streams.in_partition {
            return true;
        }
        if !run.in_flight.fences.is_empty() {
            return false;
        }
        if run.settled {
            self.streams.in_partition = self.segments.preemption.apply_confinement();
        }
        true
    }

    /// What may be queued now: the next step, or as much of its chain as is launched with it.
    fn next_launch(&self, run: &mut ActiveRun) -> Result<Option<NextLaunch>, CudaError> {
        let (preempted, end) = (run.is_preempted(), run.end);
        let task = cuda_task(&mut run.segment)?;
        let in_flight = &run.in_flight;
        let many = self.hub.best_effort.load(Ordering::Relaxed) >= MANY_QUEUES;
        let most = if many || task.is_timed() { 1 } else { LAUNCHES_IN_FLIGHT };
        let (first, specialization) = (in_flight.launched, &task.specialization);
        if first >= end || in_flight.fences.len() >= most || preempted {
            return Ok(None);
        }
        // A step that runs to its end whatever happens must not start behind one that may have preempted, nor be waited for by
        // others.
        let runs_to_end_step = |step: usize| specialization.kernels[step].runs_to_end;
        if (runs_to_end_step(first) || (first > 0 && runs_to_end_step(first - 1)))
            && in_flight.known < first
        {
            return Ok(None);
        }
        // What is recorded starts afresh and is done as a whole: a step of which tiles are done, or that is timed, or has others
        // beyond this segment, is launched alone.
        let alone = task.control.partly_done || task.is_timed();
        let steps = specialization.chain_part(first).filter(|steps| !alone && steps.end <= end);
        let Some(steps) = steps else { return Ok(Some(NextLaunch::Step(first))) };
        let (specialization, launch_target) =
            (specialization.clone(), self.streams.launch_target());
        let ready =
            task.memory()?.0.ensure_chain(&self.hub, &specialization, &steps, launch_target)?;
        Ok(Some(if ready { NextLaunch::Chain(steps) } else { NextLaunch::Step(first) }))
    }

    /// Queues `next`, and the copy of outputs behind the last step.
    fn launch(
        &self,
        task: &mut CudaTask,
        in_flight: &mut LaunchesInFlight,
        next: NextLaunch,
    ) -> Result<(), CudaError> {
        let specialization = task.specialization.clone();
        let restored = task.control.partly_done;
        let end = match &next {
            NextLaunch::Step(index) => index + 1,
            NextLaunch::Chain(steps) => steps.end,
        };
        task.control.partly_done = false;
        task.control.used_to = end;
        let timed = task.is_timed();
        let eager = end == task.step_count() && has_small_outputs(&specialization);
        let (hub, stream) = (&self.hub, self.streams.current());
        let held = specialization.wait_for_weights(stream, end)?;
        let (instance, staging) = task.memory()?;
        if timed {
            self.stamps.0.record(stream)?;
        }
        // SAFETY: the task holds instance, staging and plan until the stream is drained, and its words are as
        // `prepare_launches` preempted them.
        unsafe {
            match next {
                NextLaunch::Step(index) => {
                    let dependent = in_flight.behind_kernel && !timed && !held;
                    let how = BestEffortLaunch { restored, dependent };
                    instance.launch_best_effort(hub, &specialization, index, how, stream)?;
                }
                NextLaunch::Chain(steps) => {
                    instance.launch_chain(&steps, self.streams.launch_target(), stream)?;
                }
            }
            if timed {
                self.stamps.1.record(stream)?;
            }
            if eager {
                instance.copy_outputs(&specialization, staging, stream)?;
            }
        }
        in_flight.launched = end;
        in_flight.behind_kernel = !eager;
        Ok(())
    }

    fn fence(&mut self, in_flight: &mut LaunchesInFlight) -> Result<(), CudaError> {
        let fence = self.queue_fence()?;
        in_flight.fences.push_back((fence, in_flight.launched));
        in_flight.behind_kernel = false;
        Ok(())
    }

    fn queue_fence(&mut self) -> Result<u32, CudaError> {
        self.fences = self.fences.wrapping_add(1);
        // SAFETY: the word lives as long as this executor, which waits for its stream before it goes.
        unsafe { self.streams.current().write_word(self.word.device_address(), self.fences) }?;
        Ok(self.fences)
    }

    /// The oldest launch in in_flight has ended, and nobody had preempted it to leave: steps before `step` are done.
    fn launch_ended(&mut self, step: usize) -> Result<PollResult, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(PollResult::None) };
        // The preempt may have come between the fence and this look.
        if run.is_preempted() {
            return self.read_back();
        }
        run.in_flight.fences.pop_front();
        (run.in_flight.known, run.settled) = (step, true);
        let (task, _) = device_task(&self.hub, &mut run.segment)?;
        if task.is_timed() {
            let micros = self.stamps.1.micros_since(&self.stamps.0);
            task.push_time(micros.map_err(|err| self.hub.error(err))?);
        }
        self.fill()
    }

    /// Asks, behind everything in in_flight, for the words that say how far it got.
    fn read_back(&mut self) -> Result<PollResult, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(PollResult::None) };
        let (known, launched) = (run.in_flight.known, run.in_flight.launched);
        let (task, _) = device_task(&self.hub, &mut run.segment)?;
        let specialization = task.specialization.clone();
        let (at, count) = specialization.layout.control_words(known..launched);
        let mut ask = || {
            if self.readback.len() < count * 4 {
                self.readback = PinnedBuffer::zeroed(self.hub.context(), count * 4)?;
            }
            let (instance, _) = task.memory()?;
            let (stream, target) = (self.streams.current(), self.readback.as_ptr());
            // SAFETY: the words are of the run's own memory; the buffer has room and is read only behind the fence.
            unsafe { stream.copy_out(target, instance.address() + at, count * 4) }
        };
        let fence = ask().and_then(|()| self.queue_fence()).map_err(|err| self.hub.error(err))?;
        if let Some(run) = &mut self.run {
            run.stage = RunState::ReadingBack { fence };
        }
        Ok(PollResult::Some)
    }

    /// The words are there: finds the first step that a block has preempted.
    fn find_preemption_point(&mut self) -> Result<PollResult, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(PollResult::None) };
        let (known, launched) = (run.in_flight.known, run.in_flight.launched);
        let (task, _) = device_task(&self.hub, &mut run.segment)?;
        let specialization = task.specialization.clone();
        let (at, _) = specialization.layout.control_words(known..launched);
        let words = self.readback.as_slice();
        let was_preempted = |step: &usize| {
            let launch_target = (specialization.layout.controls[*step].preempted - at) as usize;
            words[launch_target..launch_target + 4].iter().any(|byte| *byte != 0)
        };
        let done = (known..launched).find(was_preempted).unwrap_or(launched);
        if task.is_timed() {
            let micros = self.stamps.1.micros_since(&self.stamps.0);
            let micros = micros.map_err(|err| self.hub.error(err))?;
            match done > known {
                true => task.push_time(micros),
                false => task.unfinished += Nanos((micros * 1e3) as u64),
            }
        }
        if launched > known {
            task.control.partly_done = done < launched && specialization.kernels[done].resumes;
        }
        run.in_flight = LaunchesInFlight::at(done);
        if done < run.end { self.resume(done) } else { self.end_run() }
    }

    /// The run has preempted before step `next`: it goes on from there, unless it was preempted to go.
    fn resume(&mut self, next: usize) -> Result<PollResult, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(PollResult::None) };
        let epoch_counter = run
            .epoch_counter
            .clone()
            .filter(|_| !self.segments.preemption.is_preempted(run.sequence));
        let launch_epoch = epoch_counter.and_then(|epoch_counter| {
            self.segments.preemption.begin_run(run.sequence, &epoch_counter)
        });
        let Some(launch_epoch) = launch_epoch else { return self.end_run() };
        let (task, _) = device_task(&self.hub, &mut run.segment)?;
        task.advance_to(next);
        (run.segment.steps.start, run.paced) = (next, false);
        self.start(launch_epoch, next)
    }

    /// Nothing is in in_flight: the segment ends where it got, once its outputs are on the host.
    fn end_run(&mut self) -> Result<PollResult, DeviceError> {
        let Some(run) = &mut self.run else { return Ok(PollResult::None) };
        let (reached, end, paced) = (run.in_flight.known, run.end, run.paced);
        let started = run.started;
        let copied = matches!(run.stage, RunState::CopyingOutputs { .. });
        let (task, _) = device_task(&self.hub, &mut run.segment)?;
        let specialization = task.specialization.clone();
        if reached == task.step_count() && !has_small_outputs(&specialization) && !copied {
            let copy = |task: &mut CudaTask, stream: &Stream| {
                let (instance, staging) = task.memory()?;
                // SAFETY: the task holds both sides until the fence behind the copy is passed.
                unsafe { instance.copy_outputs(&specialization, staging, stream) }
            };
            let copied = copy(task, self.streams.current());
            let fence =
                copied.and_then(|()| self.queue_fence()).map_err(|err| self.hub.error(err))?;
            if let Some(run) = &mut self.run {
                run.stage = RunState::CopyingOutputs { fence };
            }
            return Ok(PollResult::Some);
        }
        if paced && reached == end {
            specialization.program.record_run(&specialization.parts, started.elapsed());
        }
        task.advance_to(reached);
        let outcome = match task.fault() {
            _ if reached < end => Outcome::Preempted,
            Some(err) => Outcome::Failed(err),
            None => Outcome::Done,
        };
        Ok(PollResult::Ended(outcome))
    }
}

/// What a look at a executor came to.
enum PollResult {
    None,
    Some,
    Ended(Outcome),
}

/// The task of a segment that was found to be this device's when it began.
fn cuda_task(segment: &mut Segment) -> Result<&mut CudaTask, CudaError> {
    let task = segment.task.as_any_mut().downcast_mut::<CudaTask>();
    task.ok_or(CudaError::Misuse("the task belongs to another device"))
}

/// Queues what comes before the first launch: inputs, and the words of steps that start afresh.
fn prepare_launches(
    stream: &Stream,
    task: &mut CudaTask,
    specialization: &Specialization,
    from: usize,
) -> Result<(), CudaError> {
    if !task.uploaded {
        return task.upload(stream);
    }
    let words = task.control;
    let (instance, _) = task.memory()?;
    let block = instance.address();
    let layout = &specialization.layout;
    // A step that was preempted keeps its words along with the tiles it has done.
    let first = from + usize::from(words.partly_done);
    if words.used_to > from {
        // SAFETY: words of this run's own memory, which it holds until the stream is drained.
        unsafe { instance.clear_faults(specialization, first, stream) }?;
    }
    if words.cleared && words.partly_done {
        let (at, count) = layout.control_words(first..words.used_to);
        // SAFETY: as above. Done bits and arrivals of the try that preempted stay; tiles are counted anew by the two words side
        // by side.
        unsafe {
            stream.clear(block + layout.controls[from].preempted, 2)?;
            stream.clear(block + at, count)?;
        }
    } else {
        task.upload_words(stream)?;
    }
    task.control.cleared = true;
    task.control.used_to = from;
    Ok(())
}

fn has_small_outputs(specialization: &Specialization) -> bool {
    specialization.layout.staged_bytes - specialization.layout.faults_at <= EAGER_OUTPUT_BYTES
}
