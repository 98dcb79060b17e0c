//! The interface between the runtime and a device: programs that are loaded, tasks that are
//! prepared from inputs, and queues that run segments of a task and preempt them.
//!
//! A device never decides what runs next. It reports what happened through a [`CompletionSink`],
//! and the core of the runtime decides.
//!
//! How a plan runs, from loading to outputs:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::mpsc::{Sender, channel};
//!
//! use device::{Completion, CompletionSink, Device, DeviceError, Outcome, QueueOptions, Segment};
//! use model::{LaunchPlan, Tensor};
//!
//! struct Completions(Sender<Completion>);
//!
//! impl CompletionSink for Completions {
//!     fn complete(&self, completion: Completion) {
//!         let _ = self.0.send(completion);
//!     }
//! }
//!
//! fn infer(
//!     device: &dyn Device,
//!     plan: Arc<LaunchPlan>,
//!     inputs: Vec<Tensor>,
//! ) -> Result<Vec<Tensor>, DeviceError> {
//!     let program = device.load(plan)?;
//!     let task = program.prepare(inputs)?;
//!     let (sender, completions) = channel();
//!     let options = QueueOptions { id: 0, capacity: 1, high_priority: true, preemptible: false };
//!     let queue = device.open_queue(options, Arc::new(Completions(sender)))?;
//!     let steps = task.next_step()..task.step_count();
//!     assert!(queue.launch(Segment { token: 7, task, steps }).is_ok(), "the queue is empty");
//!     let done = completions.recv().expect("one completion for every segment");
//!     assert_eq!((done.token, &done.outcome), (7, &Outcome::Done));
//!     done.task.into_outputs()
//! }
//! ```

pub mod batch;
pub mod conformance;
pub mod heavy_threads;
pub mod hybrid;
pub mod paged;
pub mod profile;
pub mod recorded_step;
pub mod residency;
pub mod sim;
pub mod thread_placement;
pub mod thread_priority;
pub mod thread_watch;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use base::{Bytes, Nanos};
pub use batch::StagedInputs;
use model::config::CopyTime;
use model::gpu::{GpuPlan, GpuTarget};
use model::{DataType, LaunchPlan, MemoryError, Tensor};
pub use recorded_step::{
    CACHES, CacheLimit, MachineLimits, RecordedStep, StepWork, TuningProgress,
};
use thiserror::Error;

/// How finely a device preempts running work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PreemptionLevel {
    /// A launched segment runs to its end.
    None,
    /// Preempted between two steps.
    BetweenLaunches,
    /// Preempted between two tiles of a step.
    TileBoundaries,
    /// Preempted inside a tile.
    InsideTile,
}

/// How the work on a queue is preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PreemptMode {
    /// A flag at kernel entry: the running kernel finishes, queued kernels exit at once.
    BetweenLaunches,
    /// Running blocks finish, no new one starts.
    TileBoundary,
    /// Running blocks exit inside their tiles; finished tiles stay finished.
    InsideTile,
    /// The queue is reset and its running kernel killed; its progress is unknown.
    Kill,
}

/// What a device can do beyond running and preempting segments. A policy declares its rules by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCapabilities {
    /// Limits how many SMs the blocks of a queue hold while its kernels run, and fuses blocks of
    /// one queue with a kernel of another. Kernel padding needs it.
    pub block_budgets: bool,
    /// Resets queues and kills what runs on them ([`PreemptMode::Kill`]).
    pub queue_reset: bool,
    /// Copies the inputs of a request on command. Other devices have the inputs before the request
    /// arrives at the core.
    pub input_copies: bool,
    /// Confines queues to an SM partition ([`Queue::confine`]).
    pub sm_partition: bool,
}

/// A device's fixed properties.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// The name users know it by: `cpu`, `cuda:0`.
    pub name: String,
    /// A description for people.
    pub description: String,
    /// How finely it preempts.
    pub preemption: PreemptionLevel,
    /// Memory for weights and activations.
    pub memory: Bytes,
    /// Queues that it runs concurrently with benefit.
    pub queues: usize,
    /// Relative error of a single-precision number after it is stored; 0 when it is exact.
    pub rounding: f64,
}

/// Why a device cannot do what was requested.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DeviceError {
    /// An input is missing or superfluous, or its type or shape differs from the model's.
    #[error("{0}")]
    BadInput(String),
    /// A step cannot run on this device; found when loading.
    #[error("step '{step}' ({op}) is not supported: {reason}")]
    Unsupported {
        /// The step's name.
        step: String,
        /// The operator.
        op: String,
        /// Why, and what would help.
        reason: String,
    },
    /// A step refused its operands while running: the request's values do not fit the model.
    #[error("step '{step}' ({op}) failed: {reason}")]
    StepFailed {
        /// The step's name.
        step: String,
        /// The operator.
        op: String,
        /// Why.
        reason: String,
    },
    /// The plan is inconsistent.
    #[error("the plan is broken: {0}")]
    BadPlan(String),
    /// A defect of a kernel, which no request should be able to cause.
    #[error("a kernel failed: {0}")]
    Defect(String),
    /// The host does not have enough memory.
    #[error("{0}")]
    HostMemory(MemoryError),
    /// A kernel was not compiled ahead, and there is no compiler.
    #[error("{0}")]
    NoCompiler(String),
    /// The device does not have enough memory.
    #[error("{needed} needed, {available} available on {device}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes that the load or the task needs.
        needed: Bytes,
        /// Bytes that are free.
        available: Bytes,
    },
    /// The device had less memory when it was opened: it never has enough for this.
    #[error("{needed} needed, {device} has at most {memory}")]
    TooLarge {
        /// The device.
        device: String,
        /// Bytes that the load or the task needs.
        needed: Bytes,
        /// Bytes that there were.
        memory: Bytes,
    },
    /// The device is faulted; nothing works until it is reset.
    #[error("{device} is faulted: {reason}")]
    Faulted {
        /// The device.
        device: String,
        /// Why.
        reason: String,
    },
}

/// A fault that is made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// A kernel writes where nothing is mapped.
    IllegalAddress,
    /// A kernel writes a word to an odd address.
    MisalignedAddress,
    /// A kernel traps.
    Trap,
    /// An assertion in a kernel fails.
    Assert,
    /// Kernels occupy the whole device and end by themselves after this time.
    Hang {
        /// The time in milliseconds.
        millis: u64,
    },
    /// The driver reports that the device is lost.
    Lost,
    /// The allocation after `after` others fails.
    OutOfMemory {
        /// Allocations that succeed before it.
        after: u64,
    },
}

impl InjectedFault {
    /// A fault by its name; `number` is its time in milliseconds, or how many allocations succeed.
    pub fn named(name: &str, number: u64) -> Option<InjectedFault> {
        Some(match name {
            "illegal_address" => InjectedFault::IllegalAddress,
            "misaligned_address" => InjectedFault::MisalignedAddress,
            "trap" => InjectedFault::Trap,
            "assert" => InjectedFault::Assert,
            "hang" => InjectedFault::Hang { millis: number },
            "lost" => InjectedFault::Lost,
            "out_of_memory" => InjectedFault::OutOfMemory { after: number },
            _ => return None,
        })
    }
}

/// Runs launch plans.
pub trait Device: Send + Sync {
    /// Its fixed properties.
    fn info(&self) -> &DeviceInfo;

    /// The steps of `plan` that it cannot run, with reasons; empty when it can run all.
    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError>;

    /// The steps of `plan` that run on the host because this device has no kernel for them, and
    /// what is copied for them when symbolic dimensions have `sizes`; others count as 1.
    fn host_sections(&self, _plan: &LaunchPlan, _sizes: &[(String, usize)]) -> Vec<HostSection> {
        Vec::new()
    }

    /// Loads `plan`: its weights are packed and in place. Fails when a step is unsupported.
    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError>;

    /// Opens a queue whose completions go to `sink`. The queues of a device run concurrently.
    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError>;

    /// Why it can run nothing any more, if so. It can be opened again once everything of it is
    /// dropped.
    fn fault(&self) -> Option<DeviceError> {
        None
    }

    /// Makes it faulted for `reason`, so that every wait for it ends.
    fn give_up(&self, _reason: &str) {}

    /// Makes `fault` happen, to test how it is survived. Fails on devices that cannot.
    fn inject(&self, _fault: InjectedFault) -> Result<(), DeviceError> {
        let device = &self.info().name;
        Err(DeviceError::BadInput(format!("{device} has no faults that can be injected")))
    }

    /// SMs of the partition that queues can be confined to, if there is one.
    fn best_effort_sms(&self) -> Option<u32> {
        None
    }

    /// What policies may require of it. Only the simulated GPU declares more than this.
    fn capabilities(&self) -> DeviceCapabilities {
        DeviceCapabilities {
            sm_partition: self.best_effort_sms().is_some(),
            ..DeviceCapabilities::default()
        }
    }

    /// Sends `commands` to queues of this device, in one call where that is cheaper.
    fn command(&self, commands: &[(&dyn Queue, QueueCommand)]) {
        for (queue, command) in commands {
            queue.command(*command);
        }
    }

    /// The pinned host pool: memory that the device reads inputs from without another copy.
    fn host_pool(&self) -> Option<Arc<dyn model::HostPool>> {
        None
    }

    /// Use of its memory, if it keeps count.
    fn memory_use(&self) -> Option<residency::MemoryUse> {
        None
    }

    /// What bounds its steps from below, if that is known. A device may measure it when it is first
    /// asked, in a fraction of a second.
    fn limits(&self) -> Option<MachineLimits> {
        None
    }

    /// What the tools of its maker report of it now, if there are any. May take milliseconds.
    fn readings(&self) -> Option<DeviceReadings> {
        None
    }
}

/// What the tools of its maker report of a device. Absent values are not reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReadings {
    /// A name of the hardware that is unique everywhere.
    pub uuid: Option<String>,
    /// Share of the last moments in which a kernel ran, in percent.
    pub utilization_percent: Option<u32>,
    /// Power drawn.
    pub power_milliwatts: Option<u32>,
    /// Power that may be drawn.
    pub power_limit_milliwatts: Option<u32>,
    /// Energy used since the process opened the device.
    pub energy_millijoules: Option<u64>,
    /// Size of its memory.
    pub memory_total: Option<base::Bytes>,
    /// Memory in use by all processes.
    pub memory_used: Option<base::Bytes>,
    /// Steps for which the fastest variant was measured.
    pub tuned_steps: Option<u64>,
}

/// Steps that run on the host, one after another, between two parts of the work of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSection {
    /// Its steps.
    pub steps: Vec<HostStep>,
    /// Bytes copied from the device before it; `None` when they depend on data.
    pub copied_in: Option<u64>,
    /// Bytes copied to the device after it; `None` when they depend on data.
    pub copied_out: Option<u64>,
}

/// A step that runs on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostStep {
    /// The step's name.
    pub step: String,
    /// The operator.
    pub op: String,
    /// Why it does not run on the device.
    pub reason: String,
}

/// The variants of its launch that a step of a GPU plan gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaunchChoices {
    /// All that are worth measuring.
    All,
    /// Those estimated to be the fastest, for real time and for best effort: several times less
    /// work for sizes that a request brings.
    Fastest,
}

/// A launch plan of which everything is prepared that does not depend on sizes.
pub trait LoweringTemplate: Send + Sync {
    /// The plan as kernels for these sizes of its symbolic dimensions: what
    /// [`KernelCompiler::lower_with`] makes of it.
    fn lower_with(
        &self,
        sizes: &[(String, usize)],
        choices: LaunchChoices,
    ) -> Result<GpuPlan, Vec<DeviceError>>;
}

/// Lowers launch plans to kernels. A GPU device calls it once for every set of sizes that requests
/// have.
pub trait KernelCompiler: Send + Sync {
    /// `plan` as kernels for these sizes of its symbolic dimensions; or every step that has no
    /// kernel, with the reason.
    fn lower_with(
        &self,
        plan: &LaunchPlan,
        sizes: &[(String, usize)],
        target: &GpuTarget,
        choices: LaunchChoices,
    ) -> Result<GpuPlan, Vec<DeviceError>>;

    /// [`KernelCompiler::lower_with`] all variants.
    fn lower(
        &self,
        plan: &LaunchPlan,
        sizes: &[(String, usize)],
        target: &GpuTarget,
    ) -> Result<GpuPlan, Vec<DeviceError>> {
        self.lower_with(plan, sizes, target, LaunchChoices::All)
    }

    /// `plan` ready to be lowered for many sizes; `None` where it cannot be lowered, or is no less
    /// work than before.
    fn template(&self, plan: &LaunchPlan, target: &GpuTarget) -> Option<Arc<dyn LoweringTemplate>> {
        let _ = (plan, target);
        None
    }

    /// The files that the module of a kernel includes: names and contents.
    fn headers(&self) -> &'static [(&'static str, &'static str)];
}

/// A loaded model. Dropping the last reference frees its memory.
pub trait Program: Send + Sync {
    /// The launch plan it was loaded from.
    fn plan(&self) -> &Arc<LaunchPlan>;

    /// Device memory that it holds now.
    fn resident(&self) -> Bytes;

    /// The steps whose times a task for inputs of these shapes records, in this order. A device may
    /// run others than the plan's.
    fn recorded_steps(&self, _shapes: &[Vec<usize>]) -> Vec<RecordedStep> {
        let steps = self.plan().steps.iter();
        steps.map(|step| RecordedStep::named(&step.name, step.op.name())).collect()
    }

    /// How far its steps are tuned; `None` where there is nothing to tune.
    fn tuning(&self) -> Option<TuningProgress> {
        None
    }

    /// Creates a task for `inputs`: one tensor per plan input, in the plan's order. Checks types
    /// and shapes.
    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError>;

    /// As [`Program::prepare`]; calls `notify` once shortly before it returns. Best effort is
    /// preempted on this notice, so that the device is free when the task is launched. Not called
    /// when the inputs are refused.
    fn prepare_with_notice(
        &self,
        inputs: Vec<Tensor>,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn Task>, DeviceError> {
        let task = self.prepare(inputs)?;
        notify();
        Ok(task)
    }

    /// Whether [`Program::prepare`] and [`Program::stage`] of such inputs take no longer than a
    /// copy. Otherwise [`Program::specialize`] is called first, where nothing else waits for it.
    fn is_prepared(&self, _inputs: &[Tensor]) -> bool {
        true
    }

    /// Whether [`Program::prepare`] and [`Program::stage`] copy `inputs` on the calling thread, and
    /// do not leave that to the device.
    fn copies_on_caller(&self, _inputs: &[Tensor]) -> bool {
        true
    }

    /// Makes the program ready for inputs of these shapes, one per plan input, so that
    /// [`Program::prepare`] takes no longer than a copy. May take long.
    fn specialize(&self, _shapes: &[Vec<usize>]) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Checks the inputs of one request and stages them until a batch is formed: on the device
    /// where it has free memory and `copy` is early. The plan must have a batch dimension. Calls
    /// `notify` as [`Program::prepare_with_notice`] does.
    fn stage(
        &self,
        inputs: Vec<Tensor>,
        _copy: CopyTime,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn StagedInputs>, DeviceError> {
        check_inputs(self.plan(), &inputs)?;
        notify();
        Ok(Box::new(batch::HostStagedInputs::new(inputs)))
    }

    /// One task for the rows of several requests that this program staged, in this order.
    fn gather(&self, staged: Vec<Box<dyn StagedInputs>>) -> Result<Box<dyn Task>, DeviceError> {
        self.prepare(batch::join(staged)?)
    }

    /// Batch sizes that run without further preparation when the other symbolic dimensions have
    /// `sizes`; `None` when all do. Batches of other sizes are possible up to the largest of them.
    fn prepared_batches(&self, _sizes: &[(String, usize)]) -> Option<Vec<usize>> {
        None
    }

    /// Prepares batches of these sizes. A size that is listed several times may run as often at
    /// once. May take long.
    fn prepare_batches(
        &self,
        _sizes: &[(String, usize)],
        _batches: &[usize],
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Load and eviction of its weights; `None` when they stay on the device as long as the
    /// program.
    fn residency(&self) -> Option<Arc<dyn residency::Residency>> {
        None
    }
}

/// One execution of a program: its intermediate values and the next step.
///
/// Only the device that prepared a task knows its contents.
pub trait Task: Send {
    /// Number of steps.
    fn step_count(&self) -> usize;

    /// The first step that has not run.
    fn next_step(&self) -> usize;

    /// Records the time of each step from now on.
    fn record_step_times(&mut self);

    /// The recorded times of the steps that have run.
    fn step_times(&self) -> Option<&[Nanos]>;

    /// The outputs in the plan's order. Fails unless every step has run.
    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError>;

    /// Gives the device its own type back.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// Settings of a queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// The number that its completions carry.
    pub id: u32,
    /// Segments that may be enqueued at once.
    pub capacity: usize,
    /// Its work goes before that of other queues where the device supports it.
    pub high_priority: bool,
    /// Its work can be preempted inside steps. Other queues may run faster kernels.
    pub preemptible: bool,
}

/// Consecutive steps of one task, for one queue.
pub struct Segment {
    /// Returned with the completion; opaque to the device.
    pub token: u64,
    /// The task. It comes back in the completion.
    pub task: Box<dyn Task>,
    /// Steps to run; starts at the task's next step.
    pub steps: Range<usize>,
}

/// A command to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueCommand {
    /// See [`Queue::preempt`].
    Preempt,
    /// See [`Queue::confine`].
    Confine(bool),
}

/// Runs segments one after another.
pub trait Queue: Send + Sync {
    /// Enqueues `segment` without waiting. Returns it when the queue is full.
    fn launch(&self, segment: Segment) -> Result<(), Segment>;

    /// Preempts everything launched so far, as finely as the device can. Later launches are not
    /// affected. Preempted segments complete with [`Outcome::Preempted`]. On a queue that is not
    /// preemptible, only segments that have not begun are preempted.
    fn preempt(&self);

    /// Confines the queue to the SM partition, or ends that. Running work moves into the partition
    /// by itself: it is preempted and resumes there. It moves out at its next preemption point. Has
    /// no effect without [`Device::best_effort_sms`] or on a queue that is not preemptible.
    fn confine(&self, _confined: bool) {}

    /// A number that changes while a segment makes progress, if the device can tell. A segment
    /// whose time is up and whose number stays the same hangs.
    fn progress(&self) -> u64 {
        0
    }

    /// Carries out `command`.
    fn command(&self, command: QueueCommand) {
        match command {
            QueueCommand::Preempt => self.preempt(),
            QueueCommand::Confine(confined) => self.confine(confined),
        }
    }
}

/// How a segment ended.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// All of its steps have run.
    Done,
    /// Preempted; the task's next step is where it resumes.
    Preempted,
    /// A step failed; the task cannot be used any more.
    Failed(DeviceError),
}

/// A segment that has ended.
pub struct Completion {
    /// The queue's number.
    pub queue: u32,
    /// The segment's token.
    pub token: u64,
    /// The segment's task.
    pub task: Box<dyn Task>,
    /// How it ended.
    pub outcome: Outcome,
    /// Time the device spent on it.
    pub busy: Nanos,
}

/// Receives completions: one per launched segment, on a thread of the device.
pub trait CompletionSink: Send + Sync {
    /// Called once per segment.
    fn complete(&self, completion: Completion);
}

/// Checks `inputs` against the inputs of `plan`: number, types, shapes, and equal sizes for equal
/// symbolic dimensions.
pub fn check_inputs(plan: &LaunchPlan, inputs: &[Tensor]) -> Result<(), DeviceError> {
    if inputs.len() != plan.inputs.len() {
        let (want, got) = (plan.inputs.len(), inputs.len());
        return Err(DeviceError::BadInput(format!("the model takes {want} inputs, got {got}")));
    }
    let mut bound: Vec<(&str, usize)> = Vec::new();
    for (id, tensor) in plan.inputs.iter().zip(inputs) {
        let info = plan.value(*id);
        check_dtype(&info.name, info.dtype, tensor.dtype())?;
        if let Some(dims) = &info.shape {
            check_shape(&info.name, dims, tensor.shape(), &mut bound)?;
        }
    }
    Ok(())
}

fn check_dtype(name: &str, want: DataType, got: DataType) -> Result<(), DeviceError> {
    if want == got {
        return Ok(());
    }
    Err(DeviceError::BadInput(format!(
        "input '{name}' is {want} in the model, the request has {got}"
    )))
}

fn check_shape<'plan>(
    name: &str,
    dims: &'plan [model::Dim],
    shape: &[usize],
    bound: &mut Vec<(&'plan str, usize)>,
) -> Result<(), DeviceError> {
    let bad = |why: String| {
        let want = dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        Err(DeviceError::BadInput(format!(
            "input '{name}' has shape [{want}] in the model, the request has {shape:?}: {why}"
        )))
    };
    if dims.len() != shape.len() {
        return bad(format!("{} dimensions instead of {}", shape.len(), dims.len()));
    }
    for (axis, (dim, &size)) in dims.iter().zip(shape).enumerate() {
        match dim {
            model::Dim::Fixed(want) if *want != size => {
                return bad(format!("dimension {axis} must be {want}"));
            }
            model::Dim::Symbol(symbol) => match bound.iter().find(|(s, _)| s == symbol) {
                Some((_, want)) if *want != size => {
                    return bad(format!("'{symbol}' is {want} in another input"));
                }
                Some(_) => {}
                None => bound.push((symbol, size)),
            },
            _ => {}
        }
    }
    Ok(())
}
