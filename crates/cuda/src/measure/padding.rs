//! Real time beside best effort on the device, by every way of running both: fused into common
//! launches as REEF does, in streams of two priorities, in a partition of the SMs.
//!
//! Best effort is the same in every way, so that ways differ in where it runs and not in what: the
//! launches a step has as best effort, without clusters, that never look whether they shall leave.
//! Who is fused with whom is decided elsewhere, from the steps as they are measured here.

mod co_runner;
mod measurement;
mod network;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use device::DeviceError;
use model::gpu::Kernel;
use model::{LaunchPlan, Tensor};

use crate::compile::kernel_cache::{CompileProgress, KernelRequest, LoadedKernel};
use crate::compile::kernel_text::KernelClass;
use crate::device::CudaDevice;
use crate::driver::SmPartition;
use crate::measure::fused::fuse;
use crate::services::DeviceServices;
use measurement::PairMeasurement;
use network::Network;

/// One launch of a step, measured.
#[derive(Clone, Debug, PartialEq)]
pub struct PaddingLaunch {
    /// Its name within the step.
    pub variant: String,
    /// Index of its kernel in the bench.
    pub kernel: usize,
    /// Blocks, one per tile.
    pub tiles: u32,
    /// Blocks per cluster; 1 for none.
    pub cluster: u32,
    /// Microseconds, measured in a sequence of copies of itself.
    pub us: f64,
    /// Registers of a thread.
    pub registers: u32,
    /// Blocks an SM holds.
    pub blocks_per_multiprocessor: u32,
}

/// A step as real time and as best effort.
#[derive(Clone, Debug, PartialEq)]
pub struct PaddingStep {
    /// The step's name.
    pub name: String,
    /// As in serving.
    pub real_time: PaddingLaunch,
    /// Never a cluster.
    pub best_effort: PaddingLaunch,
}

/// Tiles of a best-effort step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingSlice {
    /// The step.
    pub step: usize,
    /// The first of them.
    pub first_tile: u32,
    /// How many.
    pub tiles: u32,
}

/// Two networks, and which tiles of the one are launched with which step of the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PaddingPair {
    /// Index of the RT network.
    pub real_time: usize,
    /// Index of the best-effort network.
    pub best_effort: usize,
    /// For every replay and each real-time step; best effort begins anew behind the last.
    pub replays: Vec<Vec<Option<PaddingSlice>>>,
    /// What of best effort is done behind the last replay, untimed: these tiles, and all steps
    /// behind.
    pub unfinished: Option<PaddingSlice>,
    /// Runs of best effort in each replay.
    pub progress: Vec<f64>,
}

/// A method of running both networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaddingWay {
    /// Real time only.
    Alone,
    /// Launches that do tiles of both.
    Fused,
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
    pub ways: Vec<PaddingWay>,
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
pub struct WayTiming {
    /// The method.
    pub way: PaddingWay,
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
    pub ways: Vec<WayTiming>,
}

/// What two kernels became as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingKernel {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes a thread spills.
    pub spilled_bytes: u32,
    /// Blocks an SM holds.
    pub blocks_per_multiprocessor: u32,
}

/// Networks on a device that can co-run.
pub struct PaddingBench {
    services: DeviceServices,
    networks: Vec<Network>,
    /// Kernels of all networks.
    kernels: Vec<Kernel>,
    /// KernelCache made of two of them.
    fused: HashMap<(usize, usize), Arc<LoadedKernel>>,
    /// Partitions by the method that needs them.
    partitions: Vec<(PaddingWay, Partition)>,
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
        let (networks, kernels, partitions) = (Vec::new(), Vec::new(), Vec::new());
        PaddingBench { services, networks, kernels, fused: HashMap::new(), partitions }
    }
}

impl PaddingBench {
    /// Loads `plan`, with `inputs` for every run, and measures its steps; returns its index.
    pub fn add(
        &mut self,
        plan: &LaunchPlan,
        inputs: &[Tensor],
        progress: CompileProgress<'_>,
    ) -> Result<usize, DeviceError> {
        self.services.device.check_healthy()?;
        let network = Network::new(&self.services, plan, inputs, &mut self.kernels, progress)?;
        self.networks.push(network);
        Ok(self.networks.len() - 1)
    }

    /// The steps of network `number`.
    pub fn steps(&self, number: usize) -> &[PaddingStep] {
        self.networks.get(number).map_or(&[], |network| &network.steps)
    }

    /// What kernel `number` computes, as a C++ type.
    pub fn kernel_name(&self, number: usize) -> &str {
        self.kernels.get(number).map_or("", |kernel| &kernel.expression)
    }

    /// SMs of the device.
    pub fn multiprocessors(&self) -> u32 {
        self.services.device.target().multiprocessors
    }

    /// Makes kernels of two each, real time's and best effort's, side by side.
    pub fn fuse(
        &mut self,
        pairs: &BTreeSet<(usize, usize)>,
        progress: CompileProgress<'_>,
    ) -> Result<(), DeviceError> {
        self.services.device.check_healthy()?;
        let unknown = || DeviceError::BadPlan("a pair of kernels that are not there".to_string());
        let headers = self.services.compile.compiler.headers();
        let request = |&(rt, be): &(usize, usize)| -> Result<KernelRequest, DeviceError> {
            let kernel = |number: usize| self.kernels.get(number).ok_or_else(unknown);
            Ok((fuse(kernel(rt)?, kernel(be)?, headers), KernelClass::Fused))
        };
        let all = pairs.iter().map(request).collect::<Result<Vec<_>, _>>()?;
        let made = self.services.compile.kernels.get(&all, progress)?;
        for (pair, request) in pairs.iter().zip(&all) {
            let kernel = made.get(request).ok_or_else(unknown)?;
            if kernel.function(0).blocks == 0 {
                let why = "no multiprocessor holds a block of both".to_string();
                let (step, op) = (request.0.expression.clone(), "kernel".to_string());
                return Err(DeviceError::Unsupported { step, op, reason: why });
            }
            self.fused.insert(*pair, kernel.clone());
        }
        Ok(())
    }

    /// What kernels of this pair became, if it was made.
    pub fn fused(&self, pair: (usize, usize)) -> Option<PaddingKernel> {
        let function = self.fused.get(&pair)?.function(0);
        Some(PaddingKernel {
            registers: function.registers,
            spilled_bytes: function.local_bytes,
            blocks_per_multiprocessor: function.blocks,
        })
    }

    /// Runs both networks of `pair` with every method, in turns.
    pub fn measure(
        &mut self,
        pair: &PaddingPair,
        options: &PaddingOptions,
    ) -> Result<PairTiming, DeviceError> {
        self.services.device.check_healthy()?;
        for way in &options.ways {
            self.open_partition(*way)?;
        }
        let error = |err| self.services.device.error(err);
        PairMeasurement::new(self, pair, options).map_err(error)?.run(options).map_err(error)
    }
}

impl PaddingBench {
    /// Opens the partition that `way` needs, if any.
    fn open_partition(&mut self, way: PaddingWay) -> Result<(), DeviceError> {
        let (PaddingWay::Partition(count) | PaddingWay::Apart(count)) = way else { return Ok(()) };
        if self.partition(way).is_some() {
            return Ok(());
        }
        let refused = |reason: String| DeviceError::Unsupported {
            step: format!("a partition of {count} multiprocessors"),
            op: "partition".to_string(),
            reason,
        };
        let context = self.services.device.context();
        let made = match way {
            PaddingWay::Apart(_) => context
                .apart(count)
                .map(|made| made.map(|[part, rest]| Partition { part, rest: Some(rest) })),
            _ => {
                context.partition(count).map(|made| made.map(|part| Partition { part, rest: None }))
            }
        };
        let none = || refused("the device is itself a part of a GPU".to_string());
        let partition = made.map_err(|err| refused(err.to_string()))?.ok_or_else(none)?;
        self.partitions.push((way, partition));
        Ok(())
    }

    /// The partition of `way`.
    fn partition(&self, way: PaddingWay) -> Option<&Partition> {
        self.partitions.iter().find(|(known, _)| *known == way).map(|(_, partition)| partition)
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
