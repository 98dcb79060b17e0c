//! Queues: real time launches whole graphs and never leaves; best effort launches chains of steps and does.

mod best_effort;
mod dispatcher;
mod executor;
mod real_time;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device::{DeviceError, Segment, Task};

pub(crate) use best_effort::BestEffortQueue;
pub(crate) use dispatcher::Dispatcher;
pub(crate) use real_time::RealTimeQueue;

use crate::driver::{PinnedWord, Stream};
use crate::error::CudaError;
use crate::hub::Hub;
use crate::program::task::CudaTask;

/// How a queue's thread waits for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polling {
    /// Looks without pause for this long.
    pub spin: Duration,
    /// Then sleeps so long between two polls; zero only lets other threads run.
    pub pause: Duration,
    /// How long a queue without work polls for some before its thread sleeps: waking it costs the request that comes next.
    pub idle: Duration,
}

impl Default for Polling {
    fn default() -> Polling {
        Polling {
            spin: Duration::from_millis(5),
            pause: Duration::ZERO,
            idle: Duration::from_millis(20),
        }
    }
}

/// Looks between two questions to the driver whether a kernel failed: a word that will never come polls like one that is
/// late.
const POLLS_PER_QUERY: u32 = 1 << 18;

/// Waits until the device has written `fence` or something later to `word`; calls `meanwhile` with every look.
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
        // A pause makes polls rare, so each of them asks.
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

/// Whether `now` is `fence` or was written after it; both count up and may wrap.
pub(crate) fn is_reached(now: u32, fence: u32) -> bool {
    now.wrapping_sub(fence) < u32::MAX / 2
}

/// The task of `segment` as this device's own, and the steps it shall do.
fn device_task<'a>(
    hub: &Arc<Hub>,
    segment: &'a mut Segment,
) -> Result<(&'a mut CudaTask, Range<usize>), DeviceError> {
    let steps = segment.steps.clone();
    let task = segment
        .task
        .as_any_mut()
        .downcast_mut::<CudaTask>()
        .filter(|task| Arc::ptr_eq(&task.hub, hub))
        .ok_or_else(|| DeviceError::BadPlan("the task belongs to another device".to_string()))?;
    if steps.start != task.next_step() {
        let (start, next) = (steps.start, task.next_step());
        let why = format!("a segment starts at step {start}, the task is at {next}");
        return Err(DeviceError::BadPlan(why));
    }
    let end = steps.end.clamp(steps.start, task.step_count());
    Ok((task, steps.start..end))
}

/// `err` with the name of step `index` of `task`.
fn failed(task: &CudaTask, index: usize, err: CudaError) -> DeviceError {
    match task.specialization.gpu.steps.get(index) {
        Some(step) => task.hub.step_error(&step.name, &step.op, err),
        None => task.hub.error(err),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fence_values_may_wrap() {
        assert!(is_reached(5, 5));
        assert!(is_reached(6, 5));
        assert!(!is_reached(4, 5));
        assert!(is_reached(2, u32::MAX));
        assert!(!is_reached(u32::MAX, 2));
    }
}
