//! Real time next to co-running best effort, by method: streams of two priorities, or an SM
//! partition.
//!
//! Best effort is the same launches with every method, so that methods differ only in where it
//! runs: the best-effort choice of each step, without clusters and without yield points.

mod co_runner;
mod measurement;
mod network;

use std::sync::Arc;
use std::time::Duration;

use device::DeviceError;
use model::{LaunchPlan, Tensor};

use crate::compile::kernel_cache::CompileProgress;
use crate::device::CudaDevice;
use crate::driver::SmPartition;
use crate::services::DeviceServices;
use measurement::PairMeasurement;
use network::Network;

/// A real-time and a best-effort network, by their indices in the bench.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PaddingPair {
    /// Index of the RT network.
    pub real_time: usize,
    /// Index of the best-effort network.
    pub best_effort: usize,
}

/// A method of running both networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoRunMethod {
    /// Real time only.
    Alone,
    /// Best effort runs continuously in a stream of low priority.
    Free,
    /// The same in a partition of that many SMs.
    Partition(u32),
    /// The same, with real time confined to all other SMs.
    Apart(u32),
}

/// How to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct PaddingOptions {
    /// The methods, alone first; they take turns.
    pub methods: Vec<CoRunMethod>,
    /// Turns of each method.
    pub turns: usize,
    /// The minimum duration of a turn.
    pub turn: Duration,
}

/// Microseconds over many replays.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PaddingTiming {
    /// Number of replays.
    pub replays: usize,
    /// Median.
    pub median_us: f64,
    /// Mean.
    pub mean_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
}

/// One method, measured.
#[derive(Clone, Debug, PartialEq)]
pub struct MethodTiming {
    /// The method.
    pub method: CoRunMethod,
    /// SMs of the partition, as the driver made it.
    pub multiprocessors: Option<u32>,
    /// Real time.
    pub real_time: PaddingTiming,
    /// Completed runs of best effort.
    pub best_effort_runs: f64,
    /// Seconds in which they completed.
    pub seconds: f64,
    /// Checks of both networks' outputs.
    pub checks: usize,
    /// Checks in which outputs of real time differed from those alone.
    pub wrong_real_time: usize,
    /// The same for best effort.
    pub wrong_best_effort: usize,
}

/// A pair, measured.
#[derive(Clone, Debug, PartialEq)]
pub struct PairTiming {
    /// Best effort without real time.
    pub best_effort_alone: PaddingTiming,
    /// All methods.
    pub methods: Vec<MethodTiming>,
}

/// Networks on a device that can co-run.
pub struct PaddingBench {
    services: DeviceServices,
    networks: Vec<Network>,
    /// Partitions by the method that needs them.
    partitions: Vec<(CoRunMethod, Partition)>,
}

/// SMs that best effort is confined to.
struct Partition {
    part: Arc<SmPartition>,
    /// SMs that real time is confined to, all others.
    rest: Option<Arc<SmPartition>>,
}

impl CudaDevice {
    /// A bench without networks. Nothing else may use the device meanwhile.
    pub fn padding_bench(&self) -> PaddingBench {
        let services = self.services().clone();
        PaddingBench { services, networks: Vec::new(), partitions: Vec::new() }
    }
}

impl PaddingBench {
    /// Loads `plan`, with `inputs` for every run; returns its index.
    pub fn add(
        &mut self,
        plan: &LaunchPlan,
        inputs: &[Tensor],
        progress: CompileProgress<'_>,
    ) -> Result<usize, DeviceError> {
        self.services.device.check_healthy()?;
        let network = Network::new(&self.services, plan, inputs, progress)?;
        self.networks.push(network);
        Ok(self.networks.len() - 1)
    }

    /// Runs both networks of `pair` with every method, in turns.
    pub fn measure(
        &mut self,
        pair: &PaddingPair,
        options: &PaddingOptions,
    ) -> Result<PairTiming, DeviceError> {
        self.services.device.check_healthy()?;
        for method in &options.methods {
            self.open_partition(*method)?;
        }
        let error = |err| self.services.device.error(err);
        PairMeasurement::new(self, pair, options).map_err(error)?.run(options).map_err(error)
    }
}

impl PaddingBench {
    /// Opens the partition that `method` needs, if any.
    fn open_partition(&mut self, method: CoRunMethod) -> Result<(), DeviceError> {
        let (CoRunMethod::Partition(count) | CoRunMethod::Apart(count)) = method else {
            return Ok(());
        };
        if self.partition(method).is_some() {
            return Ok(());
        }
        let refused = |reason: String| DeviceError::Unsupported {
            step: format!("a partition of {count} multiprocessors"),
            op: "partition".to_string(),
            reason,
        };
        let context = self.services.device.context();
        let made = match method {
            CoRunMethod::Apart(_) => context
                .apart(count)
                .map(|made| made.map(|[part, rest]| Partition { part, rest: Some(rest) })),
            _ => {
                context.partition(count).map(|made| made.map(|part| Partition { part, rest: None }))
            }
        };
        let none = || refused("the device is itself a part of a GPU".to_string());
        let partition = made.map_err(|err| refused(err.to_string()))?.ok_or_else(none)?;
        self.partitions.push((method, partition));
        Ok(())
    }

    /// The partition of `method`.
    fn partition(&self, method: CoRunMethod) -> Option<&Partition> {
        self.partitions.iter().find(|(known, _)| *known == method).map(|(_, partition)| partition)
    }
}

/// The timing of `all`, in microseconds.
fn timing(mut all: Vec<f64>) -> PaddingTiming {
    let replays = all.len();
    if replays == 0 {
        return PaddingTiming::default();
    }
    all.sort_by(f64::total_cmp);
    let at = |share: f64| all[((replays as f64 * share) as usize).min(replays - 1)];
    let mean_us = all.iter().sum::<f64>() / replays as f64;
    PaddingTiming { replays, median_us: at(0.5), mean_us, p99_us: at(0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timing_of_many_replays() {
        let timed = timing((1..=100).rev().map(f64::from).collect());
        assert_eq!((timed.median_us, timed.p99_us, timed.mean_us), (51.0, 100.0, 50.5));
        assert_eq!(timing(vec![]), PaddingTiming::default());
    }
}
