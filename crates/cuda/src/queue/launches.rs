//! Launches of a best-effort run: what is enqueued, and what may be enqueued next.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;

use device::{Segment, Task};

use super::executor::{QueueResources, Run};
use crate::driver::Stream;
use crate::error::CudaError;
use crate::preempt::epoch_counters::EpochCounter;
use crate::program::instance::BestEffortLaunch;
use crate::program::specialization::Specialization;
use crate::program::task::CudaTask;

/// Launches, each with a fence behind it, in flight on a queue: one that runs and one that the
/// device continues with.
const MAX_IN_FLIGHT: usize = 2;

/// From this many queues with best effort on, each has one launch in flight: the other queues keep
/// the device busy while the host processes a completion, and RT has less to wait for.
const MANY_QUEUES: usize = 3;

/// Outputs up to this size are copied right behind the last step, whether or not it was preempted.
/// Larger ones are copied once the step is known to be done, because the copy would keep the queue
/// of a preempted step busy.
const EAGER_OUTPUT_BYTES: u64 = 128 << 10;

/// Launches in flight.
#[derive(Default)]
pub(super) struct LaunchesInFlight {
    /// Steps before this one are known to be done.
    pub(super) known: usize,
    /// Steps before this one are enqueued.
    pub(super) launched: usize,
    /// Fence values, oldest first, with the step that each is enqueued before.
    fences: VecDeque<(u32, usize)>,
    /// What was enqueued last is a kernel.
    behind_kernel: bool,
}

/// What is launched with one call.
enum NextLaunch {
    /// One step by its index.
    Step(usize),
    /// Several steps, none of them begun.
    Chain(Range<usize>),
}

impl LaunchesInFlight {
    /// None, the task being before `step`.
    pub(super) fn at(step: usize) -> LaunchesInFlight {
        LaunchesInFlight { known: step, launched: step, ..LaunchesInFlight::default() }
    }

    /// The fence behind the oldest launch.
    pub(super) fn oldest_fence(&self) -> Option<u32> {
        self.fences.front().map(|(fence, _)| *fence)
    }

    /// The oldest launch has ended and was not preempted.
    pub(super) fn oldest_ended(&mut self) {
        if let Some((_, step)) = self.fences.pop_front() {
            self.known = step;
        }
    }

    /// Enqueues launches that carry `epoch`, until no more may be in flight.
    pub(super) fn fill(
        &mut self,
        (counter, epoch): (&EpochCounter, u32),
        run: &mut Run,
        queue: &mut QueueResources,
    ) -> Result<(), CudaError> {
        loop {
            let preempted = counter.epoch() != epoch;
            let Some(next) = self.next_launch(preempted, run, queue)? else { break };
            let task = cuda_task(&mut run.segment)?;
            self.launch(next, task, queue)?;
            if task.is_timed() || self.launched == run.end || self.ends_chain(&task.specialization)
            {
                self.queue_fence(queue)?;
            }
        }
        if self.fences.is_empty() && self.launched > self.known {
            self.queue_fence(queue)?;
        }
        Ok(())
    }

    /// Whether a chain was completed, however many launches it took.
    fn ends_chain(&self, specialization: &Specialization) -> bool {
        let last = self.launched.checked_sub(1);
        last.is_some_and(|last| specialization.chain_of(last).end == self.launched)
    }

    fn queue_fence(&mut self, queue: &mut QueueResources) -> Result<(), CudaError> {
        let fence = queue.streams.queue_fence()?;
        self.fences.push_back((fence, self.launched));
        self.behind_kernel = false;
        Ok(())
    }

    /// What may be enqueued now: the next step, or as much of its chain as one launch takes.
    fn next_launch(
        &self,
        preempted: bool,
        run: &mut Run,
        queue: &QueueResources,
    ) -> Result<Option<NextLaunch>, CudaError> {
        let end = run.end;
        let task = cuda_task(&mut run.segment)?;
        let many = queue.preemption.best_effort_runs.load(Ordering::Relaxed) >= MANY_QUEUES;
        let max = if many || task.is_timed() { 1 } else { MAX_IN_FLIGHT };
        let (first, specialization) = (self.launched, &task.specialization);
        if first >= end || self.fences.len() >= max || preempted {
            return Ok(None);
        }
        // A step that always runs to its end must not start behind one that may be preempted, and
        // nothing may wait behind it.
        let to_end = |step: usize| specialization.kernels[step].runs_to_end;
        if (to_end(first) || (first > 0 && to_end(first - 1))) && self.known < first {
            return Ok(None);
        }
        // A graph starts its steps from the beginning and runs all of them: a step of which some
        // tiles are done, a timed step, or one whose chain exceeds the segment is launched alone.
        let alone = task.control.partly_done || task.is_timed();
        let steps = specialization.chain_part(first).filter(|steps| !alone && steps.end <= end);
        let Some(steps) = steps else { return Ok(Some(NextLaunch::Step(first))) };
        let (specialization, target) = (specialization.clone(), queue.streams.launch_target());
        let ready = task.memory()?.0.ensure_chain(&specialization, &steps, target)?;
        Ok(Some(if ready { NextLaunch::Chain(steps) } else { NextLaunch::Step(first) }))
    }

    /// Enqueues `next`, and the copy of small outputs behind the last step.
    fn launch(
        &mut self,
        next: NextLaunch,
        task: &mut CudaTask,
        queue: &QueueResources,
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
        let stream = queue.streams.current();
        let waits = specialization.wait_for_weights(stream, end)?;
        let (instance, staging) = task.memory()?;
        if timed {
            queue.stamps.0.record(stream)?;
        }
        // SAFETY: the task holds instance, staging buffer and specialization until the stream is
        // drained, and its control words are as `prepare_launches` left them.
        unsafe {
            match next {
                NextLaunch::Step(index) => {
                    let dependent = self.behind_kernel && !timed && !waits;
                    let how = BestEffortLaunch { restored, dependent };
                    instance.launch_best_effort(&specialization, index, how, stream)?;
                }
                NextLaunch::Chain(steps) => {
                    instance.launch_chain(&steps, queue.streams.launch_target(), stream)?;
                }
            }
            if timed {
                queue.stamps.1.record(stream)?;
            }
            if eager {
                instance.copy_outputs(&specialization, staging, stream)?;
            }
        }
        self.launched = end;
        self.behind_kernel = !eager;
        Ok(())
    }
}

/// The task of a segment that was found to be this device's when it began.
fn cuda_task(segment: &mut Segment) -> Result<&mut CudaTask, CudaError> {
    let task = segment.task.as_any_mut().downcast_mut::<CudaTask>();
    task.ok_or(CudaError::Misuse("the task belongs to another device"))
}

/// Enqueues what comes before the first launch: inputs, and control words of steps that start from
/// their beginning.
pub(super) fn prepare_launches(
    stream: &Stream,
    task: &mut CudaTask,
    from: usize,
) -> Result<(), CudaError> {
    if !task.uploaded {
        return task.upload(stream);
    }
    let specialization = task.specialization.clone();
    let control = task.control;
    let (instance, _) = task.memory()?;
    let block = instance.address();
    let layout = &specialization.layout;
    // A preempted step keeps its words along with the tiles it has done.
    let first = from + usize::from(control.partly_done);
    if control.used_to > from {
        // SAFETY: words of this run's own memory, which it holds until the stream is drained.
        unsafe { instance.clear_faults(&specialization, first, stream) }?;
    }
    if control.cleared && control.partly_done {
        let (at, count) = layout.control_words(first..control.used_to);
        // SAFETY: as above. Done bits and arrival counts of the preempted launch stay; the word
        // that says whether it was preempted and the tile counter, side by side, start from zero.
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

/// Whether outputs are copied right behind the last step.
pub(super) fn has_small_outputs(specialization: &Specialization) -> bool {
    specialization.layout.staged_bytes - specialization.layout.faults_at <= EAGER_OUTPUT_BYTES
}
