//! What every device is to the rest of the system: programs that are loaded, tasks that are prepared
//! from inputs, and queues that run segments of a task and can be asked to leave early.
//!
//! A device never decides what runs next. It reports what happened through a [`CompletionSink`], and
//! the runtime's core decides.

pub mod batch;
pub mod conformance;
pub mod paged;
pub mod residency;
pub mod sim;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use base::{Bytes, Nanos};
pub use batch::StagedInputs;
use model::config::CopyTime;
use model::gpu::{GpuPlan, GpuTarget};
use model::{DataType, LaunchPlan, Tensor};
use thiserror::Error;

/// How finely running work can be made to leave a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PreemptionLevel {
    /// A launched segment runs to its end.
    None,
    /// Left between two steps.
    BetweenLaunches,
    /// Left between two tiles of a step.
    TileBoundaries,
    /// Left inside a tile.
    InsideTile,
}

/// How work is made to leave a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PreemptMode {
    /// A flag at kernel entry: what runs finishes, what is queued exits at once.
    BetweenLaunches,
    /// Running blocks finish, no new one starts.
    TileBoundary,
    /// Running blocks leave in the middle; finished ones stay finished.
    InsideTile,
    /// Queues are reset and running kernels killed; how far they got is not known.
    Kill,
}

/// A device's fixed properties.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// How a user names it: `cpu`, `cuda:0`.
    pub name: String,
    /// What it is, in words.
    pub description: String,
    /// How finely work can be made to leave.
    pub preemption: PreemptionLevel,
    /// Memory for weights and activations.
    pub memory: Bytes,
    /// Queues it can run at the same time with profit.
    pub queues: usize,
    /// How far a single-precision number may be off, relatively, after it was stored; 0 when it is kept.
    pub rounding: f64,
}

/// What a device says of a failure.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DeviceError {
    /// An input is missing, superfluous, or of another type or shape than the model's.
    #[error("{0}")]
    BadInput(String),
    /// A step cannot run on this device; found when loading.
    #[error("step '{step}' ({op}) is not supported: {reason}")]
    Unsupported {
        /// The step's name.
        step: String,
        /// The operator.
        op: String,
        /// What about it, and what would help.
        reason: String,
    },
    /// A step failed while running.
    #[error("step '{step}' ({op}) failed: {reason}")]
    StepFailed {
        /// The step's name.
        step: String,
        /// The operator.
        op: String,
        /// Why.
        reason: String,
    },
    /// The plan contradicts itself.
    #[error("the plan is broken: {0}")]
    BadPlan(String),
    /// The device has not enough memory.
    #[error("{needed} needed, {available} available on {device}")]
    OutOfMemory {
        /// The device.
        device: String,
        /// What the load or the task needs.
        needed: Bytes,
        /// What is free.
        available: Bytes,
    },
    /// The device itself is broken; nothing will work until it is reset.
    #[error("{device} is faulted: {reason}")]
    Faulted {
        /// The device.
        device: String,
        /// Why.
        reason: String,
    },
}

/// A place where plans run.
pub trait Device: Send + Sync {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// The steps of `plan` that cannot run here, with reasons; empty when all can.
    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError>;

    /// Makes `plan` ready: weights in place and packed. Fails when a step is unsupported.
    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError>;

    /// A queue whose completions go to `sink`. Queues of one device run concurrently.
    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError>;

    /// Multiprocessors of the partition that queues can be held to, if it has one.
    fn best_effort_sms(&self) -> Option<u32> {
        None
    }

    /// Gives `orders` to queues, which are this device's: at one go where that is cheaper than one by one.
    fn command(&self, commands: &[(&dyn Queue, QueueCommand)]) {
        for (queue, command) in commands {
            queue.command(*command);
        }
    }

    /// Lends memory on the host from which the device takes inputs as they lie, without a copy of them before.
    fn host_pool(&self) -> Option<Arc<dyn model::HostPool>> {
        None
    }

    /// What its memory is used for, if it keeps count.
    fn memory_use(&self) -> Option<residency::MemoryUse> {
        None
    }
}

/// Turns plans into kernels. A GPU device is given one by whoever puts the parts together, and asks it
/// again for every set of sizes that requests bring.
pub trait KernelCompiler: Send + Sync {
    /// `plan` as kernels for these sizes of its symbols; or every step that has none, with the reason.
    fn lower(
        &self,
        plan: &LaunchPlan,
        sizes: &[(String, usize)],
        target: &GpuTarget,
    ) -> Result<GpuPlan, Vec<DeviceError>>;

    /// The files that a kernel's module includes: names and texts.
    fn headers(&self) -> &'static [(&'static str, &'static str)];
}

/// A loaded model. Dropping the last reference returns its memory.
pub trait Program: Send + Sync {
    /// The plan it was made of.
    fn plan(&self) -> &Arc<LaunchPlan>;

    /// Memory held on the device for as long as the program lives.
    fn resident(&self) -> Bytes;

    /// Starts a task on `inputs`, one per plan input and in that order. Checks types and shapes.
    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError>;

    /// The same, and calls `notify` once when only a moment is left: so late that nothing is lost, and early enough for others
    /// to have made room when the task is launched. Not called where the inputs are refused.
    fn prepare_with_notice(
        &self,
        inputs: Vec<Tensor>,
        notify: &mut dyn FnMut(),
    ) -> Result<Box<dyn Task>, DeviceError> {
        let task = self.prepare(inputs)?;
        notify();
        Ok(task)
    }

    /// Checks the inputs of one request and lets them wait for others of the same sizes, on the device where it has room and
    /// `copy` is early. The plan has a batch. Calls `notify` as [`Program::prepare_with_notice`] does.
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

    /// One task of the rows of several requests that this program staged, in this order.
    fn gather(&self, staged: Vec<Box<dyn StagedInputs>>) -> Result<Box<dyn Task>, DeviceError> {
        self.prepare(batch::join(staged)?)
    }

    /// Numbers of rows that run without further preparation when other symbols have `sizes`; `None` when all do. Others than
    /// these may be gathered up to the largest of them.
    fn prepared_batches(&self, _sizes: &[(String, usize)]) -> Option<Vec<usize>> {
        None
    }

    /// Prepares for batches of these numbers of rows, and for as many of the same at once as it is listed. May take long.
    fn prepare_batches(
        &self,
        _sizes: &[(String, usize)],
        _batches: &[usize],
    ) -> Result<(), DeviceError> {
        Ok(())
    }
    /// Its weights, where they come and go; `None` when they are there for as long as the program is.
    fn residency(&self) -> Option<Arc<dyn residency::Residency>> {
        None
    }
}

/// One run of a program: its values so far and the next step to do.
///
/// Tasks are opaque to everyone but the device that prepared them.
pub trait Task: Send {
    /// Steps in all.
    fn step_count(&self) -> usize;

    /// The first step that is not yet done.
    fn next_step(&self) -> usize;

    /// Keeps the time each step takes from here on.
    fn record_step_times(&mut self);

    /// The times of the steps done so far, if they were asked for.
    fn step_times(&self) -> Option<&[Nanos]>;

    /// The outputs in the plan's order. Fails unless every step is done.
    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError>;

    /// For the device to get its own type back.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// How a queue is meant to be used.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Number the queue reports completions under.
    pub id: u32,
    /// Segments that may be enqueued at once.
    pub capacity: usize,
    /// Goes before queues without it where the device can tell.
    pub high_priority: bool,
    /// Its work can be told to leave early. A queue whose work never is may run tasks in a faster form.
    pub preemptible: bool,
}

/// A run of steps of one task, for one queue.
pub struct Segment {
    /// Returned with the completion; the device does not look at it.
    pub token: u64,
    /// The task. It comes back in the completion.
    pub task: Box<dyn Task>,
    /// Steps to do; starts at the task's next step.
    pub steps: Range<usize>,
}

/// What a queue can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueCommand {
    /// See [`Queue::preempt`].
    Preempt,
    /// See [`Queue::confine`].
    Confine(bool),
}

/// Runs segments in order.
pub trait Queue: Send + Sync {
    /// Enqueues `segment` without waiting. A full queue gives it back.
    fn launch(&self, segment: Segment) -> Result<(), Segment>;

    /// Makes everything launched so far leave as soon as the device's level allows. What is launched
    /// afterwards is not concerned. Segments that left come back as [`Outcome::Preempted`]. On a queue that is not
    /// preemptible only segments leave that have not begun.
    fn preempt(&self);

    /// Holds the queue's work to the device's partition, or lets it out. What runs elsewhere leaves and goes on in the partition by
    /// itself; what runs in the partition comes out when it next can without preempting. Nothing happens where there is no
    /// [`Device::best_effort_sms`], or on a queue that is not preemptible.
    fn confine(&self, _confined: bool) {}

    /// Carries out an order.
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
    /// All of its steps are done.
    Done,
    /// Left early; the task's next step says where.
    Preempted,
    /// A step failed; the task is of no further use.
    Failed(DeviceError),
}

/// A segment that is no longer running.
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

/// Where completions go. Called from a device's own thread, once per launched segment.
pub trait CompletionSink: Send + Sync {
    /// Takes one completion.
    fn complete(&self, completion: Completion);
}

/// Checks `inputs` against what `plan` says of its inputs: how many, of which type, of which shape,
/// and the same extent wherever the same symbol stands.
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
