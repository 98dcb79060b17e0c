//! Best effort that runs continuously next to real time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::network::Network;
use super::{CoRunMethod, Partition};
use crate::driver::{Graph, PinnedWord, Priority, Stream};
use crate::error::CudaError;
use crate::services::DeviceServices;

/// Runs enqueued: one that runs, and one that the device continues with.
const IN_FLIGHT: u32 = 2;

/// A run that takes longer counts as stuck.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A network as best effort, on its own stream.
pub(super) struct CoRunner {
    /// Declared before the stream it was recorded on.
    graph: Graph,
    stream: Stream,
    /// Number of runs that have ended, written by the stream.
    fence: PinnedWord,
    /// SMs of the partition, if it is confined to one.
    pub(super) multiprocessors: Option<u32>,
}

/// Ends of runs, in order.
#[derive(Default)]
struct Ends(Mutex<Vec<Instant>>);

impl Ends {
    fn add(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
    }

    /// Their number, and the last of them.
    fn last(&self) -> Option<(usize, Instant)> {
        let ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Some((ends.len(), *ends.last()?))
    }
}

/// Measurements of one turn.
pub(super) struct CoRunResult {
    /// Microseconds of the replays of real time.
    pub(super) micros: Vec<f64>,
    /// Runs of best effort that ended.
    pub(super) runs: f64,
    /// Seconds in which they ended.
    pub(super) seconds: f64,
}

impl CoRunner {
    /// `network` on the stream of `method`; `None` for a method without best effort.
    pub(super) fn new(
        services: &DeviceServices,
        network: &Network,
        method: CoRunMethod,
        partition: Option<&Partition>,
    ) -> Result<Option<CoRunner>, CudaError> {
        let (stream, multiprocessors) = match method {
            CoRunMethod::Alone => return Ok(None),
            CoRunMethod::Free => (Stream::new(services.device.context(), Priority::Low)?, None),
            CoRunMethod::Partition(_) | CoRunMethod::Apart(_) => {
                let partition =
                    partition.ok_or(CudaError::Misuse("the SM partition is not open"))?;
                let stream = Stream::in_partition(services.device.context(), &partition.part)?;
                (stream, Some(partition.part.multiprocessors()))
            }
        };
        let graph = stream.capture(|stream| {
            for index in 0..network.step_count() {
                // SAFETY: recorded only; the network outlives the graph.
                unsafe { network.launch_best_effort(services, index, index > 0, stream) }?;
            }
            Ok(())
        })?;
        let fence = PinnedWord::new(services.device.context())?;
        Ok(Some(CoRunner { graph, stream, fence, multiprocessors }))
    }

    /// Replays real time for at least `span` and until a run of best effort has ended, with best
    /// effort running all the time.
    pub(super) fn run_beside_rt(
        &mut self,
        services: &DeviceServices,
        span: Duration,
        replay: impl FnMut() -> Result<f64, CudaError>,
    ) -> Result<CoRunResult, CudaError> {
        let (stop, ends) = (AtomicBool::new(false), Ends::default());
        std::thread::scope(|scope| {
            let feeder = scope.spawn(|| self.feed(services, &stop, &ends));
            let seen = watch(span, &ends, replay, &|| feeder.is_finished());
            stop.store(true, Ordering::Release);
            let fed = feeder.join().map_err(|_| CudaError::Misuse("best effort panicked"))?;
            fed.and(seen)
        })
    }

    /// Keeps best effort running until `stop`, and waits for its last run.
    fn feed(
        &mut self,
        services: &DeviceServices,
        stop: &AtomicBool,
        ends: &Ends,
    ) -> Result<(), CudaError> {
        let fed = self.launch_on(services, stop, ends);
        // In any case: what was enqueued uses memory of the network.
        let idle = self.stream.synchronize();
        fed.and(idle)
    }

    fn launch_on(
        &mut self,
        services: &DeviceServices,
        stop: &AtomicBool,
        ends: &Ends,
    ) -> Result<(), CudaError> {
        // A word instead of an event: the stream of a partition belongs to another context.
        let (before, mut launched, mut ended) = (self.fence.load(), 0, 0);
        let mut heard = Instant::now();
        while !stop.load(Ordering::Acquire) {
            // As all best effort: driver calls of real time come first.
            if launched < ended + IN_FLIGHT && !services.preemption.driver_backoff.is_active() {
                launched += 1;
                let fence = before.wrapping_add(launched);
                // SAFETY: the network and the word live until the stream is waited for, and only
                // this stream uses the network as best effort.
                unsafe {
                    self.graph.launch(&self.stream)?;
                    self.stream.write_word(self.fence.device_address(), fence)?;
                }
            }
            let now = self.fence.load().wrapping_sub(before);
            if now != ended {
                (ended..now).for_each(|_| ends.add());
                (ended, heard) = (now, Instant::now());
            }
            // A kernel that failed writes no fence, and the driver reports why.
            if heard.elapsed() > TIMEOUT {
                self.stream.is_idle()?;
                return Err(CudaError::Misuse("co-running best effort makes no progress"));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

/// Counts replays after the first end of a run, and runs from that end to the last one.
fn watch(
    span: Duration,
    ends: &Ends,
    mut replay: impl FnMut() -> Result<f64, CudaError>,
    is_over: &dyn Fn() -> bool,
) -> Result<CoRunResult, CudaError> {
    let began = Instant::now();
    let stuck = CudaError::Misuse("co-running best effort does not end");
    let (ended, first) = loop {
        replay()?;
        match ends.last() {
            Some(end) => break end,
            None if is_over() || began.elapsed() > TIMEOUT => return Err(stuck),
            None => {}
        }
    };
    let (began, mut micros) = (Instant::now(), Vec::new());
    loop {
        micros.push(replay()?);
        let (count, last) = ends.last().unwrap_or((ended, first));
        if count > ended && began.elapsed() >= span {
            let runs = (count - ended) as f64;
            return Ok(CoRunResult { micros, runs, seconds: (last - first).as_secs_f64() });
        }
        if is_over() || began.elapsed() > span + TIMEOUT {
            return Err(stuck);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_between_two_ends() {
        let (ends, mut replays) = (Ends::default(), 0);
        let replay = || {
            replays += 1;
            std::thread::sleep(Duration::from_millis(1));
            // A run ends with every third replay.
            if replays % 3 == 0 {
                ends.add();
            }
            Ok(f64::from(replays))
        };
        let seen = watch(Duration::ZERO, &ends, replay, &|| false).expect("ends come");
        assert_eq!((seen.micros, seen.runs), (vec![4.0, 5.0, 6.0], 1.0));
        assert!(seen.seconds > 0.0);
    }

    #[test]
    fn reports_best_effort_that_stopped() {
        let ends = Ends::default();
        assert!(watch(Duration::ZERO, &ends, || Ok(1.0), &|| true).is_err());
        ends.add();
        assert!(watch(Duration::ZERO, &ends, || Ok(1.0), &|| true).is_err());
    }
}
