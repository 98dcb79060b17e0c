//! The states of a best-effort run, each with the data it needs.
//!
//! ```text
//! start --> Running --> (end)                      all steps are done
//!             |  ^
//!   preempted |  | resumes: it was only moved to or from the SM partition
//!             v  |
//!         ReadingBack --> (end)                    preempted, or done after all
//!
//! (end) --> CopyingOutputs --> ended               where the outputs are large
//! (end) --> ended                                  otherwise
//! ```
//!
//! How the host knows which steps are done: when the fence behind a step is reached and the epoch
//! counter still has the value the step was launched with, no block of it exited early, so it is
//! done. Otherwise the control words are read back, in which blocks that exited early have said
//! so. Launches enqueued behind a preempted step see the new epoch before they write anything, so
//! memory is as that step left it.

use std::sync::Arc;

use base::Nanos;
use device::{DeviceError, Outcome, Task};

use super::executor::{QueueResources, Run};
use super::launches::{LaunchesInFlight, has_small_outputs, prepare_launches};
use super::{device_task, failed};
use crate::driver::PinnedBuffer;
use crate::preempt::epoch_counters::EpochCounter;
use crate::preempt::queue_preemption::LaunchEpoch;

/// What a run waits for.
pub(super) enum RunState {
    /// Its oldest launch.
    Running(Running),
    /// Everything enqueued, and then the control words.
    ReadingBack(ReadingBack),
    /// Its outputs.
    CopyingOutputs(CopyingOutputs),
}

/// The result of leaving a state.
pub(super) enum Transition {
    To(RunState),
    /// Nothing is in flight, and the task is where the segment ended.
    Ended(Outcome),
}

impl RunState {
    /// The fence the run waits for; `None` when it goes to its next state at once.
    pub(super) fn awaited_fence(&self) -> Result<Option<u32>, DeviceError> {
        match self {
            RunState::Running(running) => running.awaited_fence(),
            RunState::ReadingBack(ReadingBack { fence, .. })
            | RunState::CopyingOutputs(CopyingOutputs { fence, .. }) => Ok(Some(*fence)),
        }
    }

    /// Leaves the state, its fence being reached.
    pub(super) fn advance(
        self,
        run: &mut Run,
        queue: &mut QueueResources,
    ) -> Result<Transition, DeviceError> {
        match self {
            RunState::Running(running) => running.launch_ended(run, queue),
            RunState::ReadingBack(reading) => reading.find_preemption_point(run, queue),
            RunState::CopyingOutputs(copying) => end_run(copying.reached, true, run, queue),
        }
    }
}

/// Launches are in flight.
pub(super) struct Running {
    counter: Arc<EpochCounter>,
    /// The epoch that its launches carry.
    epoch: u32,
    launches: LaunchesInFlight,
    /// What was enqueued before the first launch is known to be done.
    settled: bool,
}

impl Running {
    /// Enqueues the first launches from step `first` on, which is the task's next one.
    pub(super) fn start(
        counter: Arc<EpochCounter>,
        launch_epoch: LaunchEpoch,
        first: usize,
        run: &mut Run,
        queue: &mut QueueResources,
    ) -> Result<Transition, DeviceError> {
        let LaunchEpoch { epoch, in_partition } = launch_epoch;
        queue.streams.in_partition = in_partition;
        // The time of a run in the partition is not that of others.
        run.measures_program &= !in_partition;
        let (task, _) = device_task(&queue.device, &mut run.segment)?;
        let stream = queue.streams.current();
        let prepared = counter
            .set_launch_epoch(epoch, stream)
            .and_then(|()| prepare_launches(stream, task, first));
        prepared.map_err(|err| failed(task, first, err))?;
        let launches = LaunchesInFlight::at(first);
        Running { counter, epoch, launches, settled: false }.fill(run, queue)
    }

    fn is_preempted(&self) -> bool {
        self.counter.epoch() != self.epoch
    }

    fn awaited_fence(&self) -> Result<Option<u32>, DeviceError> {
        // Waiting for a launch that exits early gains nothing: the copy of the control words can
        // be enqueued right behind it.
        if self.is_preempted() {
            return Ok(None);
        }
        match self.launches.oldest_fence() {
            Some(fence) => Ok(Some(fence)),
            None => Err(DeviceError::BadPlan("nothing is in flight".to_string())),
        }
    }

    /// The oldest launch has ended, or the run is preempted.
    fn launch_ended(
        mut self,
        run: &mut Run,
        queue: &mut QueueResources,
    ) -> Result<Transition, DeviceError> {
        // The preemption may have come after the fence was reached.
        if self.is_preempted() {
            return self.read_back(run, queue);
        }
        self.launches.oldest_ended();
        self.settled = true;
        let (task, _) = device_task(&queue.device, &mut run.segment)?;
        if task.is_timed() {
            let micros = queue.stamps.1.micros_since(&queue.stamps.0);
            task.push_time(micros.map_err(|err| queue.device.error(err))?);
        }
        self.fill(run, queue)
    }

    /// Enqueues as much as may be in flight.
    fn fill(
        mut self,
        run: &mut Run,
        queue: &mut QueueResources,
    ) -> Result<Transition, DeviceError> {
        if self.apply_confinement(queue) {
            let epoch = (&*self.counter, self.epoch);
            if let Err(err) = self.launches.fill(epoch, run, queue) {
                let (task, _) = device_task(&queue.device, &mut run.segment)?;
                return Err(failed(task, self.launches.launched, err));
            }
        }
        let LaunchesInFlight { known, launched, .. } = self.launches;
        if launched > known {
            return Ok(Transition::To(RunState::Running(self)));
        }
        // Done; or preempted before anything was launched, when what prepares the launches may
        // still be in flight.
        if known == run.end {
            end_run(known, false, run, queue)
        } else {
            self.read_back(run, queue)
        }
    }

    /// Moves the run to or from the SM partition as soon as nothing is in flight, because
    /// launches on two streams do not wait for each other. False while nothing may be launched.
    fn apply_confinement(&self, queue: &mut QueueResources) -> bool {
        let preemption = &queue.segments.preemption;
        if preemption.is_confined() == queue.streams.in_partition {
            return true;
        }
        if self.launches.oldest_fence().is_some() {
            return false;
        }
        if self.settled {
            queue.streams.in_partition = preemption.apply_confinement();
        }
        true
    }

    /// Enqueues, behind everything in flight, the copy of the control words.
    fn read_back(
        self,
        run: &mut Run,
        queue: &mut QueueResources,
    ) -> Result<Transition, DeviceError> {
        let LaunchesInFlight { known, launched, .. } = self.launches;
        let (task, _) = device_task(&queue.device, &mut run.segment)?;
        let (at, count) = task.specialization.layout.control_words(known..launched);
        let mut copy = || {
            if queue.readback.len() < count * 4 {
                queue.readback = PinnedBuffer::zeroed(queue.device.context(), count * 4)?;
            }
            let (instance, _) = task.memory()?;
            let (stream, target) = (queue.streams.current(), queue.readback.as_ptr());
            // SAFETY: the words are of the run's own memory; the buffer is large enough and is
            // read only once the fence behind the copy is reached.
            unsafe { stream.copy_out(target, instance.address() + at, count * 4) }
        };
        let copied = copy().and_then(|()| queue.streams.queue_fence());
        let fence = copied.map_err(|err| queue.device.error(err))?;
        let reading = ReadingBack { counter: self.counter, known, launched, fence };
        Ok(Transition::To(RunState::ReadingBack(reading)))
    }
}

/// The run is preempted, and its control words are being copied to the host.
pub(super) struct ReadingBack {
    counter: Arc<EpochCounter>,
    /// Steps before this one are known to be done.
    known: usize,
    /// Steps before this one were enqueued.
    launched: usize,
    fence: u32,
}

impl ReadingBack {
    /// The control words are on the host: finds the first step that was preempted.
    fn find_preemption_point(
        self,
        run: &mut Run,
        queue: &mut QueueResources,
    ) -> Result<Transition, DeviceError> {
        let (known, launched) = (self.known, self.launched);
        let (task, _) = device_task(&queue.device, &mut run.segment)?;
        let specialization = task.specialization.clone();
        let (at, _) = specialization.layout.control_words(known..launched);
        let words = queue.readback.as_slice();
        let was_preempted = |step: &usize| {
            let word = (specialization.layout.controls[*step].preempted - at) as usize;
            words[word..word + 4].iter().any(|byte| *byte != 0)
        };
        let reached = (known..launched).find(was_preempted).unwrap_or(launched);
        if task.is_timed() {
            let micros = queue.stamps.1.micros_since(&queue.stamps.0);
            let micros = micros.map_err(|err| queue.device.error(err))?;
            match reached > known {
                true => task.push_time(micros),
                false => task.unfinished += Nanos((micros * 1e3) as u64),
            }
        }
        if launched > known {
            task.control.partly_done =
                reached < launched && specialization.kernels[reached].resumes;
        }
        if reached < run.end {
            self.resume(reached, run, queue)
        } else {
            end_run(reached, false, run, queue)
        }
    }

    /// Continues from step `next`, unless it was the queue that was preempted.
    fn resume(
        self,
        next: usize,
        run: &mut Run,
        queue: &mut QueueResources,
    ) -> Result<Transition, DeviceError> {
        let preemption = &queue.segments.preemption;
        let launch_epoch = match preemption.is_preempted(run.sequence) {
            true => None,
            false => preemption.begin_run(run.sequence, &self.counter),
        };
        let Some(launch_epoch) = launch_epoch else { return end_run(next, false, run, queue) };
        let (task, _) = device_task(&queue.device, &mut run.segment)?;
        task.advance_to(next);
        (run.segment.steps.start, run.measures_program) = (next, false);
        Running::start(self.counter, launch_epoch, next, run, queue)
    }
}

/// All steps are done, and large outputs are being copied to the host.
pub(super) struct CopyingOutputs {
    /// The task's number of steps.
    reached: usize,
    fence: u32,
}

/// Nothing is in flight: the segment ends before step `reached`, once its outputs are on the host.
fn end_run(
    reached: usize,
    outputs_copied: bool,
    run: &mut Run,
    queue: &mut QueueResources,
) -> Result<Transition, DeviceError> {
    let (end, started) = (run.end, run.started);
    let (task, _) = device_task(&queue.device, &mut run.segment)?;
    let specialization = task.specialization.clone();
    if reached == task.step_count() && !has_small_outputs(&specialization) && !outputs_copied {
        let stream = queue.streams.current();
        let copied = task.memory().and_then(|(instance, staging)| {
            // SAFETY: the task holds both sides until the fence behind the copy is reached.
            unsafe { instance.copy_outputs(&specialization, staging, stream) }
        });
        let copied = copied.and_then(|()| queue.streams.queue_fence());
        let fence = copied.map_err(|err| queue.device.error(err))?;
        return Ok(Transition::To(RunState::CopyingOutputs(CopyingOutputs { reached, fence })));
    }
    if run.measures_program && reached == end {
        specialization.program.record_run(&specialization.parts, started.elapsed());
    }
    task.advance_to(reached);
    let outcome = match task.fault() {
        _ if reached < end => Outcome::Preempted,
        Some(err) => Outcome::Failed(err),
        None => Outcome::Done,
    };
    Ok(Transition::Ended(outcome))
}
