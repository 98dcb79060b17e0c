//! Measures a plan: every variant of every step, and the whole plan as one graph.

mod classes;
mod whole_plan;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use device::DeviceError;
use model::LaunchPlan;
use model::gpu::{GpuPlan, GpuStep, Launch};
use serde::Serialize;

use crate::compile::kernel_cache::{CompileProgress, KernelRequest, LoadedKernel};
use crate::compile::kernel_text::KernelClass;
use crate::compile::tuning::{TunedVariant, TunedVariants, Tuning, kernel_text, pair};
use crate::device::CudaDevice;
use crate::driver::{DeviceBuffer, Event, Graph, Priority, Stream};
use crate::error::CudaError;
use crate::memory::weights::ProgramWeights;
use crate::program::graph_recorder::LaunchTarget;
use crate::program::instance::Instance;
use crate::program::layout::{Addresses, LaunchSet, run_bytes};
use crate::program::lowering::{first_of, lower};
use crate::program::specialization::{BoundKernel, Specialization, real_time};
use crate::services::DeviceServices;

pub use classes::ClassTiming;
use whole_plan::WholePlan;

/// Memory in which copies of a step have weights of their own, so that weights come from DRAM as in
/// a network larger than the cache.
const WEIGHT_POOL: u64 = 256 << 20;

/// Replays that are not timed.
const WARM_UP: usize = 3;

/// A variant that is this many times slower than the fastest during warm-up is not timed.
const GIVE_UP_RATIO: f64 = 1.25;

/// The time that copies of one launch take together: long compared to the start and end of a graph.
const GRAPH_US: f64 = 200.0;

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct ProfileOptions {
    /// Replays of the graph that times one variant.
    pub replays: usize,
    /// Replays of the whole plan.
    pub plan_replays: usize,
}

impl Default for ProfileOptions {
    fn default() -> ProfileOptions {
        ProfileOptions { replays: 12, plan_replays: 100 }
    }
}

/// Microseconds over many replays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timing {
    /// Median.
    pub median_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
}

/// One variant of a step.
#[derive(Clone, Debug, Serialize)]
pub struct ChoiceProfile {
    /// Its name within the step.
    pub variant: String,
    /// Stands for the text of its kernel.
    pub kernel: String,
    /// Time as real time, in a sequence with dependent launches; absent when the GPU refuses the
    /// launch.
    pub time: Option<Timing>,
    /// Blocks.
    pub tiles: u32,
    /// Blocks per cluster.
    pub cluster: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes a thread spills.
    pub spilled_bytes: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks an SM holds.
    pub blocks_per_multiprocessor: u32,
}

/// A step with all its variants.
#[derive(Clone, Debug, Serialize)]
pub struct StepProfile {
    /// The step's name.
    pub name: String,
    /// What it computes.
    pub op: String,
    /// Steps of one signature are the same problem.
    pub signature: String,
    /// Floating-point operations.
    pub flops: u64,
    /// Minimum of bytes moved.
    pub bytes: u64,
    /// All variants, in the plan's order.
    pub choices: Vec<ChoiceProfile>,
    /// The fastest for real time.
    pub rt: usize,
    /// The fastest for best effort.
    pub be: usize,
    /// The step and the previous one, by their signatures.
    pub pair: Option<String>,
    /// It is faster when it starts after the previous step has ended.
    pub apart: bool,
}

/// A plan, measured.
#[derive(Clone, Debug, Serialize)]
pub struct PlanProfile {
    /// The sizes of the plan.
    pub sizes: Vec<(String, usize)>,
    /// Every step.
    pub steps: Vec<StepProfile>,
    /// The whole plan with its fastest variants, as one graph with dependent launches.
    pub graph: Timing,
    /// The same without dependent launches.
    pub plain_graph: Timing,
    /// Device memory of the weights.
    pub weight_bytes: u64,
    /// Device memory of one run.
    pub run_bytes: u64,
    /// Seconds until all kernels were compiled or read from disk.
    pub compile_seconds: f64,
}

impl PlanProfile {
    /// All pairs of consecutive steps.
    pub(crate) fn pairs(&self) -> BTreeSet<String> {
        self.steps.iter().filter_map(|step| step.pair.clone()).collect()
    }

    /// The fastest variants.
    pub(crate) fn tuning(&self) -> Tuning {
        let tuned = |choice: &ChoiceProfile| TunedVariant {
            variant: choice.variant.clone(),
            kernel: choice.kernel.clone(),
        };
        let chosen = |step: &StepProfile| TunedVariants {
            rt: tuned(&step.choices[step.rt]),
            be: tuned(&step.choices[step.be]),
        };
        let choices = self.steps.iter().map(|step| (step.signature.clone(), chosen(step)));
        let apart =
            self.steps.iter().filter(|step| step.apart).filter_map(|step| step.pair.clone());
        Tuning { choices: choices.collect(), apart: apart.collect() }
    }
}

impl CudaDevice {
    /// Uses the variants of `profile` for programs loaded from now on, and stores them in the cache
    /// folder. Loaded programs do not change.
    pub fn set_choices(&self, profile: &PlanProfile) -> Result<(), String> {
        let mut all = self.tuning();
        all.extend(profile.tuning(), &profile.pairs());
        if let Some(path) = self.tuning_path() {
            all.write(&path).map_err(|err| format!("{}: {err}", path.display()))?;
        }
        self.services().compile.replace_tuning(all);
        Ok(())
    }

    /// Times every variant of every step of `plan` for `sizes`, and the plan made of the fastest.
    /// Steps of one signature are timed once. Nothing else may use the device meanwhile.
    pub fn profile(
        &self,
        plan: &LaunchPlan,
        sizes: &[(String, usize)],
        options: ProfileOptions,
        progress: CompileProgress<'_>,
    ) -> Result<PlanProfile, DeviceError> {
        let services = self.services();
        services.device.check_healthy()?;
        let gpu = lower(services, plan, sizes, device::LaunchChoices::All).map_err(first_of)?;
        Profiler::new(services, gpu, options, progress)?.run(sizes)
    }
}

pub(super) struct Profiler<'a> {
    services: &'a DeviceServices,
    options: ProfileOptions,
    progress: CompileProgress<'a>,
    pub(super) specialization: Specialization,
    weights: Arc<ProgramWeights>,
    kernels: HashMap<KernelRequest, Arc<LoadedKernel>>,
    instance: Instance,
    pool: DeviceBuffer,
    stream: Stream,
    compile_seconds: f64,
}

impl<'a> Profiler<'a> {
    pub(super) fn new(
        services: &'a DeviceServices,
        gpu: GpuPlan,
        options: ProfileOptions,
        progress: CompileProgress<'a>,
    ) -> Result<Profiler<'a>, DeviceError> {
        let cuda = |err: CudaError| services.device.error(err);
        let started = Instant::now();
        let requests: Vec<KernelRequest> = gpu
            .steps
            .iter()
            .flat_map(|step| &step.choices)
            .filter_map(|launch| gpu.kernels.get(launch.kernel))
            .map(|kernel| (kernel.clone(), KernelClass::RealTime))
            .collect();
        let kernels = services.compile.kernels.get(&requests, progress)?;
        let compile_seconds = started.elapsed().as_secs_f64();
        let weights = ProgramWeights::new(
            &services.device,
            &services.memory,
            &services.preemption.rt_activity,
            false,
        );
        let specialization =
            Specialization::with(services, gpu, &weights, LaunchSet::All, &|_, _| {})?;
        let instance = Instance::new(&specialization)?;
        let pool =
            DeviceBuffer::zeroed(&services.memory.memory_stream, WEIGHT_POOL).map_err(cuda)?;
        let stream = Stream::new(services.device.context(), Priority::High).map_err(cuda)?;
        Ok(Profiler {
            services,
            options,
            progress,
            specialization,
            weights,
            kernels,
            instance,
            pool,
            stream,
            compile_seconds,
        })
    }

    fn run(mut self, sizes: &[(String, usize)]) -> Result<PlanProfile, DeviceError> {
        let profiles = self.steps()?;
        let mut chosen = self.specialization.gpu.clone();
        for (step, profile) in chosen.steps.iter_mut().zip(&profiles) {
            (step.rt, step.be) = (profile.rt, profile.be);
        }
        let mut profile = PlanProfile {
            sizes: sizes.to_vec(),
            steps: profiles,
            graph: Timing::default(),
            plain_graph: Timing::default(),
            weight_bytes: self.weights.bytes(),
            run_bytes: run_bytes(&chosen),
            compile_seconds: self.compile_seconds,
        };
        let whole = WholePlan::new(&self, &profile)?;
        let replays = self.options.plan_replays;
        let apart = whole.best_apart(&profile).map_err(|err| self.services.device.error(err))?;
        for (step, apart) in profile.steps.iter_mut().zip(&apart) {
            step.apart = *apart;
        }
        let time = |apart: &[bool]| {
            whole.time(apart, replays).map_err(|err| self.services.device.error(err))
        };
        let (graph, plain_graph) = (time(&apart)?, time(&vec![true; apart.len()])?);
        drop(whole);
        Ok(PlanProfile { graph, plain_graph, ..profile })
    }

    /// All steps with their variants timed; steps of one signature once.
    pub(super) fn steps(&mut self) -> Result<Vec<StepProfile>, DeviceError> {
        let mut known: HashMap<String, StepProfile> = HashMap::new();
        let steps = self.specialization.gpu.steps.clone();
        let mut profiles = Vec::with_capacity(steps.len());
        for (index, step) in steps.iter().enumerate() {
            let profile = match known.get(&step.signature) {
                Some(same) => StepProfile { name: step.name.clone(), ..same.clone() },
                None => self.step(index, step)?,
            };
            known.insert(step.signature.clone(), profile.clone());
            let before = index.checked_sub(1).map(|before| pair(&steps[before], step));
            profiles.push(StepProfile { pair: before, ..profile });
            (self.progress)(index + 1, steps.len());
        }
        Ok(profiles)
    }

    fn step(&mut self, index: usize, step: &GpuStep) -> Result<StepProfile, DeviceError> {
        let mut choices = Vec::with_capacity(step.choices.len());
        let mut fastest_us = f64::INFINITY;
        for choice in 0..step.choices.len() {
            let timed = self.choice(index, step, choice, fastest_us * GIVE_UP_RATIO)?;
            fastest_us = timed.time.map_or(fastest_us, |time| fastest_us.min(time.median_us));
            choices.push(timed);
        }
        let fastest = |allowed: &dyn Fn(&Launch) -> bool, fallback: usize| {
            let timed = choices.iter().enumerate().filter(|(at, _)| allowed(&step.choices[*at]));
            let timed = timed.filter_map(|(at, choice)| Some((at, choice.time?.median_us)));
            timed.min_by(|(_, a), (_, b)| a.total_cmp(b)).map_or(fallback, |(at, _)| at)
        };
        let rt = fastest(&|_| true, step.rt);
        let be = fastest(&Launch::suits_best_effort, step.be);
        Ok(StepProfile {
            name: step.name.clone(),
            op: step.op.clone(),
            signature: step.signature.clone(),
            flops: step.flops,
            bytes: step.bytes,
            choices,
            rt,
            be,
            pair: None,
            apart: false,
        })
    }

    pub(super) fn bound(&self, step: &GpuStep, choice: usize) -> BoundKernel {
        let launch = &step.choices[choice];
        let requests =
            (self.specialization.gpu.kernels[launch.kernel].clone(), KernelClass::RealTime);
        real_time(&self.specialization.gpu, launch, self.kernels[&requests].clone())
    }

    fn choice(
        &mut self,
        index: usize,
        step: &GpuStep,
        choice: usize,
        give_up_us: f64,
    ) -> Result<ChoiceProfile, DeviceError> {
        let launch = &step.choices[choice];
        let bound = self.bound(step, choice);
        let time = match self.time_copies(index, step, choice, &bound, give_up_us) {
            Ok(time) => Some(time),
            Err(err @ CudaError::Faulted(_)) => return Err(self.services.device.error(err)),
            // For example a cluster that does not fit; other variants remain.
            Err(err) => {
                let (step, variant) = (&step.name, &launch.variant);
                tracing::debug!(step, variant, %err, "variant not timed");
                None
            }
        };
        let function = bound.kernel.function();
        Ok(ChoiceProfile {
            variant: launch.variant.clone(),
            kernel: kernel_text(&self.specialization.gpu.kernels[launch.kernel]),
            time,
            tiles: launch.tiles,
            cluster: launch.cluster,
            threads: bound.shape.threads,
            registers: function.registers,
            spilled_bytes: function.local_bytes,
            shared_bytes: bound.shape.shared,
            blocks_per_multiprocessor: function.blocks,
        })
    }

    /// The time of one launch in a sequence of copies of itself, each with other weights.
    fn time_copies(
        &mut self,
        index: usize,
        step: &GpuStep,
        choice: usize,
        bound: &BoundKernel,
        give_up_us: f64,
    ) -> Result<Timing, CudaError> {
        let guess = (step.flops as f64 / 200e6).max(step.bytes as f64 / 2e6).max(3.0);
        let copies = (GRAPH_US / guess).clamp(3.0, 24.0) as usize;
        let launch = &step.choices[choice];
        let mut all = Vec::with_capacity(copies);
        for copy in 0..copies {
            let weights = self.moved_weights(copy as u64);
            let addresses = Addresses {
                block: self.instance.address(),
                layout: &self.specialization.layout,
                weights: &weights,
            };
            let args = addresses
                .patch(launch, self.specialization.layout.real_time_words(index))
                .map_err(|_| {
                CudaError::Misuse("a launch has an address outside of its plan")
            })?;
            all.push(args);
        }
        let graph = self.services.recorder.capture(LaunchTarget::High, |stream| {
            for (copy, args) in all.iter().enumerate() {
                let mut shape = bound.shape;
                shape.dependent = copy > 0 && self.services.device.has_dependent_launches();
                // SAFETY: recorded only; the instance and the pool outlive the graph, which is
                // dropped when this returns.
                unsafe { stream.launch(bound.kernel.function(), shape, &[args]) }?;
            }
            Ok(())
        })?;
        let give_up_us = give_up_us * copies as f64;
        let timing = time(self.services, &graph, &self.stream, self.options.replays, give_up_us)?;
        let each = |micros: f64| micros / copies as f64;
        Ok(Timing { median_us: each(timing.median_us), p99_us: each(timing.p99_us) })
    }

    /// Addresses of all weights for copy `copy`, inside the pool where they fit.
    fn moved_weights(&self, copy: u64) -> Vec<(u64, u64)> {
        let places = &self.specialization.weights;
        let moved = |&(address, bytes): &(u64, u64)| {
            let stride = bytes.next_multiple_of(4096).max(4096);
            let slots = WEIGHT_POOL / stride;
            if slots < 2 {
                return (address, bytes);
            }
            (self.pool.address() + copy % slots * stride, bytes)
        };
        places.iter().map(moved).collect()
    }
}

/// Timing of `graph`, replayed one at a time; few times when even the fastest replay takes longer
/// than `give_up_us`.
fn time(
    services: &DeviceServices,
    graph: &Graph,
    stream: &Stream,
    replays: usize,
    give_up_us: f64,
) -> Result<Timing, CudaError> {
    let (from, to) =
        (Event::new(services.device.context())?, Event::new(services.device.context())?);
    let replay = || {
        from.record(stream)?;
        // SAFETY: the caller keeps what the graph points to, and each replay is waited for.
        unsafe { graph.launch(stream) }?;
        to.record(stream)?;
        to.wait()?;
        to.micros_since(&from)
    };
    // Caches and clocks are cold, but a variant that is far too slow is recognised.
    let mut quickest = f64::INFINITY;
    for _ in 0..WARM_UP {
        quickest = quickest.min(replay()?);
    }
    if quickest > give_up_us {
        return Ok(Timing { median_us: quickest, p99_us: quickest });
    }
    let all = (0..replays).map(|_| replay()).collect::<Result<_, _>>()?;
    Ok(summary(all))
}

fn summary(mut all: Vec<f64>) -> Timing {
    all.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let index = ((all.len() as f64 * share) as usize).min(all.len().saturating_sub(1));
        all.get(index).copied().unwrap_or(0.0)
    };
    Timing { median_us: at(0.5), p99_us: at(0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_many() {
        let timing = summary((1..=100).rev().map(f64::from).collect());
        assert_eq!(timing, Timing { median_us: 51.0, p99_us: 100.0 });
        assert_eq!(summary(vec![]), Timing::default());
    }
}
