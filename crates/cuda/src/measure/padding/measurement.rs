//! Two networks with every method, in turns.

use std::time::{Duration, Instant};

use super::co_runner::CoRunner;
use super::network::Network;
use super::{
    CoRunMethod, MethodTiming, PaddingBench, PaddingOptions, PaddingPair, PairTiming, timing,
};
use crate::driver::{Event, Graph, Priority, Stream};
use crate::error::CudaError;
use crate::program::graph_recorder::LaunchTarget;
use crate::services::DeviceServices;

/// Replays at the beginning of a turn that are not timed: the caches are cold.
const WARM_UP: usize = 3;

/// The device is kept busy this long before the first turn: its clocks fell while graphs were
/// recorded.
const WARM_CLOCKS: Duration = Duration::from_millis(50);

/// Replays of best effort alone in each turn.
const ALONE_REPLAYS: usize = 20;

/// One method and its measurements.
struct MethodMeasurement {
    method: CoRunMethod,
    /// Real time.
    graph: Graph,
    co_runner: Option<CoRunner>,
    micros: Vec<f64>,
    runs: f64,
    seconds: f64,
    checks: usize,
    wrong_real_time: usize,
    wrong_best_effort: usize,
}

/// Outputs of both networks alone.
#[derive(Default)]
struct Expected {
    real_time: Option<Vec<u8>>,
    best_effort: Option<Vec<u8>>,
}

/// The measurement of one pair.
pub(super) struct PairMeasurement<'a> {
    bench: &'a PaddingBench,
    real_time: &'a Network,
    best_effort: &'a Network,
    measurements: Vec<MethodMeasurement>,
    best_effort_alone: Graph,
    stream: Stream,
    from: Event,
    to: Event,
    expected: Expected,
}

impl<'a> PairMeasurement<'a> {
    pub(super) fn new(
        bench: &'a PaddingBench,
        pair: &PaddingPair,
        options: &PaddingOptions,
    ) -> Result<PairMeasurement<'a>, CudaError> {
        let services = &bench.services;
        let unknown = CudaError::Misuse("unknown network");
        let network = |number| bench.networks.get(number).ok_or_else(|| unknown.clone());
        let (real_time, best_effort) = (network(pair.real_time)?, network(pair.best_effort)?);
        if options.methods.first() != Some(&CoRunMethod::Alone) {
            return Err(CudaError::Misuse("real time alone must come first"));
        }
        let steps = best_effort.step_count();
        let mut pair_measurement = PairMeasurement {
            bench,
            real_time,
            best_effort,
            measurements: Vec::new(),
            best_effort_alone: services.recorder.capture(LaunchTarget::High, |stream| {
                (0..steps).try_for_each(|index| {
                    // SAFETY: recorded only; the network outlives the graph.
                    unsafe { best_effort.launch_best_effort(services, index, index > 0, stream) }
                })
            })?,
            stream: Stream::new(services.device.context(), Priority::High)?,
            from: Event::new(services.device.context())?,
            to: Event::new(services.device.context())?,
            expected: Expected::default(),
        };
        for method in &options.methods {
            let measurement = pair_measurement.measurement(*method)?;
            pair_measurement.measurements.push(measurement);
        }
        Ok(pair_measurement)
    }

    fn services(&self) -> &'a DeviceServices {
        &self.bench.services
    }

    fn measurement(&self, method: CoRunMethod) -> Result<MethodMeasurement, CudaError> {
        Ok(MethodMeasurement {
            method,
            graph: self.record(method)?,
            co_runner: CoRunner::new(
                self.services(),
                self.best_effort,
                method,
                self.bench.partition(method),
            )?,
            micros: Vec::new(),
            runs: 0.0,
            seconds: 0.0,
            checks: 0,
            wrong_real_time: 0,
            wrong_best_effort: 0,
        })
    }

    /// Real time in one graph for `method`.
    fn record(&self, method: CoRunMethod) -> Result<Graph, CudaError> {
        let rest = self.bench.partition(method).and_then(|partition| partition.rest.as_ref());
        let record = |stream: &Stream| {
            (0..self.real_time.step_count()).try_for_each(|index| {
                // SAFETY: recorded only; the network outlives the graph.
                unsafe { self.real_time.launch_real_time(index, stream) }
            })
        };
        match rest {
            None => self.services().recorder.capture(LaunchTarget::High, record),
            // Kernels stay in the partition of the stream they were recorded on, whichever stream
            // the graph is launched on.
            Some(rest) => Stream::in_part(self.services().device.context(), rest, Priority::High)?
                .capture(record),
        }
    }

    pub(super) fn run(mut self, options: &PaddingOptions) -> Result<PairTiming, CudaError> {
        let mut alone = Vec::new();
        let mut measurements = std::mem::take(&mut self.measurements);
        let began = Instant::now();
        while began.elapsed() < WARM_CLOCKS {
            self.replay(&self.best_effort_alone)?;
        }
        for _ in 0..options.turns.max(1) {
            self.best_effort_turn(&mut alone)?;
            for measurement in &mut measurements {
                self.turn(measurement, options.turn)?;
            }
        }
        let methods = measurements.into_iter().map(MethodMeasurement::into_timing).collect();
        Ok(PairTiming { best_effort_alone: timing(alone), methods })
    }

    /// Best effort alone.
    fn best_effort_turn(&mut self, micros: &mut Vec<f64>) -> Result<(), CudaError> {
        self.overwrite_outputs()?;
        for number in 0..WARM_UP + ALONE_REPLAYS {
            let took = self.replay(&self.best_effort_alone)?;
            if number >= WARM_UP {
                micros.push(took);
            }
        }
        let network = self.best_effort;
        let outputs = network.outputs(self.services(), &network.best_effort, &self.stream)?;
        match agrees(network, &mut self.expected.best_effort, outputs)? {
            true => Ok(()),
            false => Err(CudaError::Misuse("outputs of best effort alone differ between runs")),
        }
    }

    fn turn(
        &mut self,
        measurement: &mut MethodMeasurement,
        span: Duration,
    ) -> Result<(), CudaError> {
        self.overwrite_outputs()?;
        match &mut measurement.co_runner {
            None => self.replay_alone(measurement, span)?,
            Some(co_runner) => {
                let graph = &measurement.graph;
                let seen = co_runner.run_beside_rt(self.services(), span, || self.replay(graph))?;
                measurement.micros.extend(seen.micros);
                measurement.runs += seen.runs;
                measurement.seconds += seen.seconds;
            }
        }
        self.check(measurement)
    }

    /// Replays real time alone.
    fn replay_alone(
        &self,
        measurement: &mut MethodMeasurement,
        span: Duration,
    ) -> Result<(), CudaError> {
        for _ in 0..WARM_UP {
            self.replay(&measurement.graph)?;
        }
        let began = Instant::now();
        while began.elapsed() < span || measurement.micros.is_empty() {
            let since = Instant::now();
            let micros = self.replay(&measurement.graph)?;
            measurement.micros.push(micros);
            measurement.seconds += since.elapsed().as_secs_f64();
        }
        Ok(())
    }

    /// Microseconds of one replay on the device.
    fn replay(&self, graph: &Graph) -> Result<f64, CudaError> {
        let call = self.services().preemption.driver_backoff.enter_driver();
        self.from.record(&self.stream)?;
        // SAFETY: both networks outlive this measurement, and each replay is waited for; the
        // co-runner uses another instance.
        unsafe { graph.launch(&self.stream) }?;
        self.to.record(&self.stream)?;
        drop(call);
        self.to.wait()?;
        self.to.micros_since(&self.from)
    }

    /// Overwrites outputs of an earlier turn, so that they are not taken for this one's.
    fn overwrite_outputs(&self) -> Result<(), CudaError> {
        let (rt, be) = (self.real_time, self.best_effort);
        // SAFETY: nothing of either network is in flight, and the stream is waited for.
        unsafe {
            rt.overwrite_outputs(&rt.real_time, &self.stream)?;
            be.overwrite_outputs(&be.best_effort, &self.stream)?;
        }
        self.stream.synchronize()
    }

    /// Compares the outputs of both networks with those alone.
    fn check(&mut self, measurement: &mut MethodMeasurement) -> Result<(), CudaError> {
        let (rt, be) = (self.real_time, self.best_effort);
        measurement.checks += 1;
        let outputs = rt.outputs(self.services(), &rt.real_time, &self.stream)?;
        measurement.wrong_real_time +=
            usize::from(!agrees(rt, &mut self.expected.real_time, outputs)?);
        // Without a co-runner best effort computes nothing.
        if measurement.co_runner.is_some() {
            let outputs = be.outputs(self.services(), &be.best_effort, &self.stream)?;
            let wrong = !agrees(be, &mut self.expected.best_effort, outputs)?;
            measurement.wrong_best_effort += usize::from(wrong);
        }
        Ok(())
    }
}

impl MethodMeasurement {
    fn into_timing(self) -> MethodTiming {
        MethodTiming {
            method: self.method,
            multiprocessors: self
                .co_runner
                .as_ref()
                .and_then(|co_runner| co_runner.multiprocessors),
            real_time: timing(self.micros),
            best_effort_runs: self.runs,
            seconds: self.seconds,
            checks: self.checks,
            wrong_real_time: self.wrong_real_time,
            wrong_best_effort: self.wrong_best_effort,
        }
    }
}

/// Whether `outputs` are as expected. The first outputs are expected of all later runs.
fn agrees(
    network: &Network,
    expected: &mut Option<Vec<u8>>,
    outputs: Vec<u8>,
) -> Result<bool, CudaError> {
    match expected {
        Some(expected) => Ok(*expected == outputs),
        None if network.is_overwritten(&outputs) => {
            Err(CudaError::Misuse("a network ran and did not write its outputs"))
        }
        None => {
            *expected = Some(outputs);
            Ok(true)
        }
    }
}
