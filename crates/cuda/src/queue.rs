//! Queues: real time launches whole programs and is never preempted on the device; best effort
//! launches chains of steps and is.
//!
//! A best-effort queue is `best_effort` (what its owner calls), `segment_queue` (what waits), and
//! an `executor` that the `dispatcher` polls. A preemption arrives at `best_effort`, and
//! `run_state` finds out where it stopped the run.

mod best_effort;
mod dispatcher;
mod executor;
mod launches;
mod queue_streams;
mod real_time;
mod run_state;
mod segment_queue;

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use device::{DeviceError, Segment, Task};

pub(crate) use best_effort::BestEffortQueue;
pub(crate) use dispatcher::Dispatcher;
pub(crate) use real_time::RealTimeQueue;

use crate::device_context::DeviceContext;
use crate::driver::{PinnedWord, Stream, is_reached};
use crate::error::CudaError;
use crate::options::Polling;
use crate::program::task::CudaTask;

/// Polls between two queries of the stream: a fence that will never be reached, because a kernel
/// failed, looks like one that is late.
const POLLS_PER_QUERY: u32 = 1 << 18;

/// Waits until the device has written `fence` or a later value to `word`; calls `meanwhile` with
/// every poll.
fn wait_for(
    word: &PinnedWord,
    fence: u32,
    stream: &Stream,
    polling: Polling,
    meanwhile: impl Fn(),
) -> Result<(), CudaError> {
    let mut polls = 0u32;
    let mut spinning_since: Option<Instant> = None;
    while !is_reached(word.load(), fence) {
        polls = polls.wrapping_add(1);
        meanwhile();
        // Polls are rare while the thread pauses, so each of them queries the driver.
        let pausing = spinning_since.is_some_and(|since| since.elapsed() > polling.spin);
        if polls.is_multiple_of(POLLS_PER_QUERY) || (pausing && !polling.pause.is_zero()) {
            stream.is_idle()?;
        }
        if polls.is_multiple_of(64) {
            spinning_since.get_or_insert_with(Instant::now);
        }
        match (pausing, polling.pause.is_zero()) {
            (false, _) => std::hint::spin_loop(),
            (true, true) => std::thread::yield_now(),
            (true, false) => std::thread::sleep(polling.pause),
        }
    }
    Ok(())
}

/// The task of `segment`, if it is one of this device, and the steps to run.
fn device_task<'a>(
    device: &Arc<DeviceContext>,
    segment: &'a mut Segment,
) -> Result<(&'a mut CudaTask, Range<usize>), DeviceError> {
    let steps = segment.steps.clone();
    let task = segment
        .task
        .as_any_mut()
        .downcast_mut::<CudaTask>()
        .filter(|task| Arc::ptr_eq(&task.specialization.device, device))
        .ok_or_else(|| DeviceError::BadPlan("the task belongs to another device".to_string()))?;
    if steps.start != task.next_step() {
        let (start, next) = (steps.start, task.next_step());
        let why = format!("a segment starts at step {start}, the task is at {next}");
        return Err(DeviceError::BadPlan(why));
    }
    let end = steps.end.clamp(steps.start, task.step_count());
    Ok((task, steps.start..end))
}

/// `err` as the failure of step `index` of `task`.
fn failed(task: &CudaTask, index: usize, err: CudaError) -> DeviceError {
    match task.specialization.gpu.steps.get(index) {
        Some(step) => task.specialization.device.step_error(&step.name, &step.op, err),
        None => task.specialization.device.error(err),
    }
}
