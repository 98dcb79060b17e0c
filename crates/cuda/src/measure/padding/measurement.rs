//! Two networks in every way, in turns.

use std::time::{Duration, Instant};

use super::co_runner::CoRunner;
use super::network::Network;
use super::{
    PaddingBench, PaddingOptions, PaddingPair, PaddingSlice, PaddingWay, PairTiming, WayTiming,
    timing,
};
use crate::driver::{Event, Graph, LaunchShape, Priority, Stream};
use crate::error::CudaError;
use crate::program::graph_recorder::LaunchTarget;
use crate::services::DeviceServices;

/// Replays at the beginning of a turn that do not count: what ran before has the caches.
const WARM_UP: usize = 3;

/// Before the first turn the device is kept busy so long: its clocks fell while graphs were recorded.
const WARM_CLOCKS: Duration = Duration::from_millis(50);

/// Replays of best effort alone in each turn.
const ALONE_REPLAYS: usize = 20;

/// One way, and what was seen of it.
struct MethodMeasurement {
    way: PaddingWay,
    /// Real time, replayed in this order.
    graphs: Vec<Graph>,
    /// Best effort that each of them does.
    progress: Vec<f64>,
    /// What best effort has left to do behind the last.
    closing: Option<Graph>,
    co_runner: Option<CoRunner>,
    micros: Vec<f64>,
    runs: f64,
    seconds: f64,
    checks: usize,
    wrong_real_time: usize,
    wrong_best_effort: usize,
}

/// Outputs of both networks as they are alone.
#[derive(Default)]
struct Expected {
    real_time: Option<Vec<u8>>,
    best_effort: Option<Vec<u8>>,
}

/// A pair on the device.
pub(super) struct PairMeasurement<'a> {
    bench: &'a PaddingBench,
    pair: &'a PaddingPair,
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
        pair: &'a PaddingPair,
        options: &PaddingOptions,
    ) -> Result<PairMeasurement<'a>, CudaError> {
        let services = &bench.services;
        let unknown = CudaError::Misuse("unknown network");
        let network = |number| bench.networks.get(number).ok_or_else(|| unknown.clone());
        let (real_time, best_effort) = (network(pair.real_time)?, network(pair.best_effort)?);
        if options.ways.first() != Some(&PaddingWay::Alone) {
            return Err(CudaError::Misuse("real time alone must come first"));
        }
        let steps = best_effort.steps.len();
        let mut pair_measurement = PairMeasurement {
            bench,
            pair,
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
        for way in &options.ways {
            let measurement = pair_measurement.measurement(*way)?;
            pair_measurement.measurements.push(measurement);
        }
        Ok(pair_measurement)
    }

    fn services(&self) -> &'a DeviceServices {
        &self.bench.services
    }

    fn measurement(&self, way: PaddingWay) -> Result<MethodMeasurement, CudaError> {
        let fused = way == PaddingWay::Fused;
        let alone = vec![vec![None; self.real_time.steps.len()]];
        let (replays, progress) = match fused {
            true => (&self.pair.replays, self.pair.progress.clone()),
            false => (&alone, vec![0.0]),
        };
        if replays.is_empty() || replays.len() != progress.len() {
            return Err(CudaError::Misuse("replays without their progress"));
        }
        let unfinished = self.pair.unfinished.filter(|_| fused);
        Ok(MethodMeasurement {
            way,
            graphs: replays
                .iter()
                .map(|replay| self.record(replay, way))
                .collect::<Result<_, _>>()?,
            progress,
            closing: unfinished.map(|slice| self.record_rest(slice)).transpose()?,
            co_runner: CoRunner::new(
                self.services(),
                self.best_effort,
                way,
                self.bench.partition(way),
            )?,
            micros: Vec::new(),
            runs: 0.0,
            seconds: 0.0,
            checks: 0,
            wrong_real_time: 0,
            wrong_best_effort: 0,
        })
    }

    /// Real time in one graph for `way`, its steps with `slices` of best effort.
    fn record(&self, slices: &[Option<PaddingSlice>], way: PaddingWay) -> Result<Graph, CudaError> {
        if slices.len() != self.real_time.steps.len() {
            return Err(CudaError::Misuse("slices for another number of steps"));
        }
        let rest = self.bench.partition(way).and_then(|partition| partition.rest.as_ref());
        let record = |stream: &Stream| {
            for (index, slice) in slices.iter().enumerate() {
                match slice {
                    // SAFETY: recorded only; the network outlives the graph.
                    None => unsafe { self.real_time.launch_real_time(index, stream) }?,
                    Some(slice) => self.launch_fused(index, true, *slice, stream)?,
                }
            }
            Ok(())
        };
        match rest {
            None => self.services().recorder.capture(LaunchTarget::High, record),
            // KernelCache keep to the part of the stream they were recorded on, wherever the graph is launched.
            Some(rest) => Stream::in_part(self.services().device.context(), rest, Priority::High)?
                .capture(record),
        }
    }

    /// What of best effort is missing from `slice` on, without real time.
    fn record_rest(&self, slice: PaddingSlice) -> Result<Graph, CudaError> {
        let steps = self.best_effort.steps.len();
        // Of a step that was begun, tiles are left; no kernel but one of two does less than all of them.
        let begun = slice.first_tile > 0;
        let host = last_host(&self.pair.replays, slice.step);
        self.services().recorder.capture(LaunchTarget::High, |stream| {
            if begun {
                let host = host.ok_or(CudaError::Misuse("tiles of a step that nobody began"))?;
                self.launch_fused(host, false, slice, stream)?;
            }
            let first = slice.step + usize::from(begun);
            (first..steps).try_for_each(|index| {
                let behind = begun || index > first;
                // SAFETY: recorded only; the network outlives the graph.
                unsafe {
                    self.best_effort.launch_best_effort(self.services(), index, behind, stream)
                }
            })
        })
    }

    /// Records step `host` of real time and `slice` as one launch, or the slice alone.
    fn launch_fused(
        &self,
        host: usize,
        with_host: bool,
        slice: PaddingSlice,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let guest = self.best_effort.steps.get(slice.step).map(|step| &step.best_effort);
        let guest = guest.ok_or(CudaError::Misuse("a slice of a step that is not there"))?;
        let real_time = &self.real_time.steps[host].real_time;
        let end = slice.first_tile.checked_add(slice.tiles);
        if slice.tiles == 0 || end.is_none_or(|end| end > guest.tiles) {
            return Err(CudaError::Misuse("a slice of tiles that are not there"));
        }
        if real_time.cluster > 1 || guest.cluster > 1 {
            return Err(CudaError::Misuse("a cluster cannot be fused"));
        }
        let numbers = (real_time.kernel, guest.kernel);
        let kernel = self.bench.fused.get(&numbers);
        let kernel = kernel.ok_or(CudaError::Misuse("a pair of kernels was not fused"))?;
        let facts = [&self.bench.kernels[numbers.0], &self.bench.kernels[numbers.1]];
        let blocks = if with_host { real_time.tiles } else { 0 };
        let early = host > 0 && with_host && self.real_time.starts_early(self.services(), host);
        let shape = LaunchShape {
            grid: blocks + slice.tiles,
            threads: facts[0].threads.max(facts[1].threads),
            shared: facts[0].shared_bytes.max(facts[1].shared_bytes),
            cluster: 1,
            dependent: early,
        };
        let params: [&[u8]; 4] = [
            &self.real_time.real_time.args[host],
            &self.best_effort.best_effort.args[slice.step],
            &blocks.to_le_bytes(),
            &slice.first_tile.to_le_bytes(),
        ];
        // SAFETY: recorded only, into a graph that both networks outlive; the parameters are those of `dkp`: the arguments
        // of its two operators, as the plans say, and two words.
        unsafe { stream.launch(kernel.function(0), shape, &params) }
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
        let ways = measurements.into_iter().map(MethodMeasurement::into_timing).collect();
        Ok(PairTiming { best_effort_alone: timing(alone), ways })
    }

    /// Best effort with nothing beside it.
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
            None => self.replay_rounds(measurement, span)?,
            Some(co_runner) => {
                let graph = &measurement.graphs[0];
                let seen = co_runner.run_beside_rt(self.services(), span, || self.replay(graph))?;
                measurement.micros.extend(seen.micros);
                measurement.runs += seen.runs;
                measurement.seconds += seen.seconds;
            }
        }
        self.check(measurement)
    }

    /// Whole rounds of all graphs, so that best effort always ends as it began.
    fn replay_rounds(
        &self,
        measurement: &mut MethodMeasurement,
        span: Duration,
    ) -> Result<(), CudaError> {
        for _ in 0..WARM_UP.div_ceil(measurement.graphs.len()) {
            self.replay_round(measurement, false)?;
        }
        let began = Instant::now();
        while began.elapsed() < span || measurement.micros.is_empty() {
            self.replay_round(measurement, true)?;
        }
        Ok(())
    }

    fn replay_round(
        &self,
        measurement: &mut MethodMeasurement,
        counts: bool,
    ) -> Result<(), CudaError> {
        for (graph, progress) in measurement.graphs.iter().zip(&measurement.progress) {
            let began = Instant::now();
            let micros = self.replay(graph)?;
            if counts {
                measurement.micros.push(micros);
                measurement.runs += progress;
                measurement.seconds += began.elapsed().as_secs_f64();
            }
        }
        match &measurement.closing {
            None => Ok(()),
            Some(closing) => self.replay(closing).map(drop),
        }
    }

    /// Microseconds of one replay on the device.
    fn replay(&self, graph: &Graph) -> Result<f64, CudaError> {
        let call = self.services().preemption.driver_backoff.enter_driver();
        self.from.record(&self.stream)?;
        // SAFETY: both networks outlive this pair_measurement, and each replay is waited for; what runs beside it is another side's.
        unsafe { graph.launch(&self.stream) }?;
        self.to.record(&self.stream)?;
        drop(call);
        self.to.wait()?;
        self.to.micros_since(&self.from)
    }

    /// Makes sure that outputs of an earlier turn are not taken for this one's.
    fn overwrite_outputs(&self) -> Result<(), CudaError> {
        let (rt, be) = (self.real_time, self.best_effort);
        // SAFETY: nothing of either network is in flight, and the stream is waited for.
        unsafe {
            rt.overwrite_outputs(&rt.real_time, &self.stream)?;
            be.overwrite_outputs(&be.best_effort, &self.stream)?;
        }
        self.stream.synchronize()
    }

    /// Compares what both networks left with what they leave alone.
    fn check(&mut self, measurement: &mut MethodMeasurement) -> Result<(), CudaError> {
        let (rt, be) = (self.real_time, self.best_effort);
        measurement.checks += 1;
        let outputs = rt.outputs(self.services(), &rt.real_time, &self.stream)?;
        measurement.wrong_real_time +=
            usize::from(!agrees(rt, &mut self.expected.real_time, outputs)?);
        // Where best effort had no part nothing of it was computed.
        if measurement.co_runner.is_some()
            || measurement.closing.is_some()
            || measurement.runs > 0.0
        {
            let outputs = be.outputs(self.services(), &be.best_effort, &self.stream)?;
            let wrong = !agrees(be, &mut self.expected.best_effort, outputs)?;
            measurement.wrong_best_effort += usize::from(wrong);
        }
        Ok(())
    }
}

impl MethodMeasurement {
    fn into_timing(self) -> WayTiming {
        WayTiming {
            way: self.way,
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

/// The real-time step that was last launched with tiles of `step`.
fn last_host(replays: &[Vec<Option<PaddingSlice>>], step: usize) -> Option<usize> {
    let of = |slice: &Option<PaddingSlice>| slice.is_some_and(|slice| slice.step == step);
    replays.iter().rev().find_map(|replay| replay.iter().rposition(of))
}

/// Whether `outputs` are as expected. The first are what is expected of all others.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_begun_step_is_ended_with_the_kernel_it_was_last_in() {
        let slice = |step| Some(PaddingSlice { step, first_tile: 0, tiles: 1 });
        let replays = vec![vec![slice(0), slice(1), None], vec![slice(1), None, slice(2)]];
        assert_eq!(last_host(&replays, 1), Some(0));
        assert_eq!(last_host(&replays, 0), Some(0));
        assert_eq!(last_host(&replays, 2), Some(2));
        assert_eq!(last_host(&replays, 3), None);
    }
}
