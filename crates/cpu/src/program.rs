//! Loaded plans and their tasks.

use std::any::Any;
use std::sync::Arc;

use base::{Bytes, Nanos};
use device::{DeviceError, Program, RecordedStep, Task, check_inputs};
use model::plan::PeakMemory;
use model::{DataType, HostMemory, LaunchPlan, MemoryError, Step, Tensor};

use crate::bound_plan::{BindError, BoundPlan};
use crate::buffer;
use crate::buffer_pool::BufferPool;
use crate::byte_steps::ByteSteps;
use crate::channel_blocks::ChannelBlocks;
use crate::kernel::{self, Context, Inputs, Kernel, KernelError, Operand, StepFacts};
use crate::step_work;
use crate::suspended_task::SuspendedTask;
use crate::value::Value;
use crate::wide_numbers::{in_single_precision, is_half};

/// A loaded plan as a [`Program`].
pub(crate) struct CpuProgram {
    loaded: Arc<LoadedPlan>,
}

/// A plan with its constants, and with every step bound to a kernel.
struct LoadedPlan {
    /// As it was given: what others read.
    source: Arc<LaunchPlan>,
    /// As it runs: the same values and as many steps, some of which may have nothing to do.
    plan: LaunchPlan,
    constants: Vec<Option<Value>>,
    kernels: Vec<Kernel>,
    /// Steps that neither compute bytes instead nor have nothing to do.
    of_floats: Vec<bool>,
    resident: Bytes,
    memory: &'static HostMemory,
    peak: PeakMemory,
}

/// The steps of `plan` that have no kernel, with reasons.
pub(crate) fn unsupported_steps(plan: &LaunchPlan) -> Vec<DeviceError> {
    match constants_of(plan) {
        Err(err) => vec![err],
        Ok(constants) => plan
            .steps
            .iter()
            .filter_map(|step| {
                kernel::build(&StepFacts { plan, step, constants: &constants })
                    .err()
                    .map(|error| unsupported(step, error))
            })
            .collect(),
    }
}

fn unsupported(step: &Step, error: KernelError) -> DeviceError {
    match error {
        KernelError::Memory(error) => DeviceError::HostMemory(error),
        KernelError::Invalid(reason) => {
            DeviceError::Unsupported { step: step.name.clone(), op: step.op.name(), reason }
        }
    }
}

fn constants_of(plan: &LaunchPlan) -> Result<Vec<Option<Value>>, DeviceError> {
    plan.check().map_err(|err| DeviceError::BadPlan(err.to_string()))?;
    let mut constants: Vec<Option<Value>> = Vec::new();
    constants.resize_with(plan.values.len(), || None);
    for (id, tensor) in &plan.constants {
        constants[id.index()] = Some(Value::from_host(tensor).map_err(constant_error)?);
    }
    Ok(constants)
}

fn constant_error(error: KernelError) -> DeviceError {
    match error {
        KernelError::Invalid(reason) => DeviceError::BadPlan(reason),
        KernelError::Memory(error) => DeviceError::HostMemory(error),
    }
}

impl CpuProgram {
    pub(crate) fn load(
        plan: Arc<LaunchPlan>,
        memory: &'static HostMemory,
    ) -> Result<CpuProgram, DeviceError> {
        CpuProgram::load_with(plan, memory, ChannelBlocks::find)
    }

    /// Loads `plan` with the steps over channel blocks that `find` chooses.
    pub(crate) fn load_with(
        plan: Arc<LaunchPlan>,
        memory: &'static HostMemory,
        find: impl Fn(&LaunchPlan, &ByteSteps) -> ChannelBlocks,
    ) -> Result<CpuProgram, DeviceError> {
        plan.check().map_err(|err| DeviceError::BadPlan(err.to_string()))?;
        let source = plan.clone();
        let bound =
            BoundPlan::new(in_single_precision(plan), find).map_err(|error| match error {
                BindError::Step(index, error) => unsupported(&source.steps[index], error),
                BindError::Constant(error) => constant_error(error),
            })?;
        let resident = Bytes(bound.resident_bytes() as u64);
        let BoundPlan { plan, constants, kernels, of_floats } = bound;
        let peak = PeakMemory::default();
        let loaded =
            LoadedPlan { source, plan, constants, kernels, of_floats, resident, memory, peak };
        Ok(CpuProgram { loaded: Arc::new(loaded) })
    }
}

impl Program for CpuProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.loaded.source
    }

    fn resident(&self) -> Bytes {
        self.loaded.resident
    }

    fn recorded_steps(&self, shapes: &[Vec<usize>]) -> Vec<RecordedStep> {
        let plan = &self.loaded.plan;
        let bound = plan.bound_symbols(shapes.iter().map(Vec::as_slice));
        let recorded = |(step, of_floats): (&Step, &bool)| RecordedStep {
            work: of_floats.then(|| step_work::of(plan, step, &bound)).flatten(),
            ..RecordedStep::named(&step.name, step.op.name())
        };
        plan.steps.iter().zip(&self.loaded.of_floats).map(recorded).collect()
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        let plan = &self.loaded.plan;
        check_inputs(&self.loaded.source, &inputs)?;
        let memory = self.loaded.memory;
        // What cannot fit is refused before anything is allocated for it.
        let bytes = self.loaded.peak.of(plan, &inputs);
        memory.check(bytes).map_err(DeviceError::HostMemory)?;
        let mut slots: Vec<Option<Value>> = Vec::new();
        slots.resize_with(plan.values.len(), || None);
        for (id, tensor) in plan.inputs.iter().zip(&inputs) {
            let wide = is_half(tensor.dtype()) && plan.value(*id).dtype == DataType::F32;
            let value = buffer::with_memory(memory, || {
                let value = Value::from_host(tensor)?;
                if wide { kernel::convert(&value, DataType::F32) } else { Ok(value) }
            });
            slots[id.index()] = Some(value.map_err(|err| match err {
                KernelError::Invalid(reason) => DeviceError::BadInput(reason),
                KernelError::Memory(err) => DeviceError::HostMemory(err),
            })?);
        }
        let values = TaskValues { program: self.loaded.clone(), slots };
        Ok(Box::new(CpuTask {
            program: self.loaded.clone(),
            state: TaskState::Ready(values),
            next_step: 0,
            step_times: None,
        }))
    }
}

/// One execution of a program.
pub(crate) struct CpuTask {
    program: Arc<LoadedPlan>,
    state: TaskState,
    next_step: usize,
    step_times: Option<Vec<Nanos>>,
}

/// Where a task's values are.
enum TaskState {
    Ready(TaskValues),
    /// On the stacks of threads that are parked inside a step.
    Suspended(SuspendedTask),
    /// With the threads that run it.
    Running,
}

/// How a launched task starts.
pub(crate) enum TaskStart {
    /// With these values, at the beginning of a step.
    Fresh(TaskValues),
    /// On its parked threads, inside a step.
    Suspended(SuspendedTask),
}

impl CpuTask {
    /// Moves the values to the threads that run the task; `None` if it is running already.
    pub(crate) fn start(&mut self) -> Option<TaskStart> {
        match std::mem::replace(&mut self.state, TaskState::Running) {
            TaskState::Ready(values) => Some(TaskStart::Fresh(values)),
            TaskState::Suspended(suspended) => Some(TaskStart::Suspended(suspended)),
            TaskState::Running => None,
        }
    }

    /// Runs the next step on the calling thread.
    #[cfg(test)]
    pub(crate) fn run_step(&mut self, pool: &BufferPool) -> Result<(), DeviceError> {
        if let TaskState::Ready(values) = &mut self.state {
            values.run_step(self.next_step, pool)?;
            self.next_step += 1;
        }
        Ok(())
    }

    /// Takes the values back from the threads that ran the task.
    pub(crate) fn finish(&mut self, values: TaskValues) {
        self.state = TaskState::Ready(values);
    }

    /// Records that the task's threads are parked inside a step.
    pub(crate) fn suspend(&mut self, suspended: SuspendedTask) {
        self.state = TaskState::Suspended(suspended);
    }

    /// Counts a step that took `time`.
    pub(crate) fn advance(&mut self, time: Nanos) {
        self.next_step += 1;
        if let Some(times) = &mut self.step_times {
            times.push(time);
        }
    }
}

/// The values a task has computed so far.
pub(crate) struct TaskValues {
    program: Arc<LoadedPlan>,
    slots: Vec<Option<Value>>,
}

impl TaskValues {
    /// Runs step `index`, which is the next one.
    pub(crate) fn run_step(&mut self, index: usize, pool: &BufferPool) -> Result<(), DeviceError> {
        let program = self.program.clone();
        let (Some(step), Some(kernel)) =
            (program.plan.steps.get(index), program.kernels.get(index))
        else {
            return Err(DeviceError::BadPlan("a segment extends past the last step".to_string()));
        };
        let outputs = {
            let inputs = self.operands(&program, step, pool);
            kernel.run.run(&Context { pool }, inputs)
        }
        .map_err(|err| self.step_error(step, err))?;
        for (id, value) in step.outputs.iter().zip(outputs) {
            if let Some(id) = id {
                self.slots[id.index()] = Some(value);
            }
        }
        for id in &step.last_uses {
            if let Some(value) = self.slots[id.index()].take() {
                value.recycle(pool);
            }
        }
        Ok(())
    }

    /// `error` of `step` as an error of the task.
    fn step_error(&self, step: &Step, error: KernelError) -> DeviceError {
        match error {
            KernelError::Invalid(reason) => {
                DeviceError::StepFailed { step: step.name.clone(), op: step.op.name(), reason }
            }
            KernelError::Memory(
                MemoryError::Busy { bytes, .. } | MemoryError::TooLarge { bytes, .. },
            ) => {
                // Together with what the task holds already it may be more than there will ever be.
                let held = self.slots.iter().flatten().map(Value::size_bytes).sum();
                DeviceError::HostMemory(self.program.memory.refusal(bytes, held))
            }
        }
    }

    /// The operands of `step`. Values that no other operand or later step reads are moved.
    fn operands<'a>(
        &'a mut self,
        program: &'a LoadedPlan,
        step: &Step,
        pool: &'a BufferPool,
    ) -> Inputs<'a> {
        let is_last = |id: &model::ValueId| {
            step.last_uses.contains(id)
                && step.inputs.iter().flatten().filter(|other| *other == id).count() == 1
        };
        let mut taken: Vec<Option<Value>> = Vec::with_capacity(step.inputs.len());
        for input in &step.inputs {
            taken.push(input.filter(is_last).and_then(|id| self.slots[id.index()].take()));
        }
        let operands = step.inputs.iter().zip(taken).map(|(input, taken)| match (input, taken) {
            (None, _) => Operand::Absent,
            (Some(_), Some(value)) => Operand::Owned(value),
            (Some(id), None) => {
                let value =
                    self.slots[id.index()].as_ref().or(program.constants[id.index()].as_ref());
                value.map_or(Operand::Absent, Operand::Shared)
            }
        });
        Inputs::new(operands.collect(), pool)
    }
}

/// A copy of an output that is needed again, or that is a constant.
fn copy_of(value: Option<&Value>, id: model::ValueId) -> Result<Value, DeviceError> {
    let missing = || DeviceError::BadPlan(format!("output {} is missing", id.0));
    value.ok_or_else(missing)?.try_clone().map_err(output_error)
}

fn output_error(error: KernelError) -> DeviceError {
    match error {
        KernelError::Invalid(reason) => DeviceError::BadPlan(reason),
        KernelError::Memory(err) => DeviceError::HostMemory(err),
    }
}

impl Task for CpuTask {
    fn step_count(&self) -> usize {
        self.program.plan.steps.len()
    }

    fn next_step(&self) -> usize {
        self.next_step
    }

    fn record_step_times(&mut self) {
        self.step_times = Some(Vec::with_capacity(self.step_count()));
    }

    fn step_times(&self) -> Option<&[Nanos]> {
        self.step_times.as_deref()
    }

    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError> {
        let memory = self.program.memory;
        buffer::with_memory(memory, || self.outputs())
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl CpuTask {
    fn outputs(self) -> Result<Vec<Tensor>, DeviceError> {
        if self.next_step < self.step_count() {
            return Err(DeviceError::BadPlan(
                "outputs requested before the last step ended".to_string(),
            ));
        }
        let program = self.program.clone();
        let TaskState::Ready(mut values) = self.state else {
            return Err(DeviceError::BadPlan("outputs requested while the task runs".to_string()));
        };
        let ids = &program.plan.outputs;
        let mut outputs = Vec::with_capacity(ids.len());
        for (position, id) in ids.iter().enumerate() {
            // An output that is listed twice is moved only for its last occurrence.
            let again = ids[position + 1..].contains(id);
            let slot = &mut values.slots[id.index()];
            let owned = if again { None } else { slot.take() };
            let value = match owned {
                Some(value) => value,
                None => copy_of(slot.as_ref().or(program.constants[id.index()].as_ref()), *id)?,
            };
            let dtype = program.source.value(*id).dtype;
            let value = match &value {
                Value::F32(_) if is_half(dtype) => {
                    kernel::convert(&value, dtype).map_err(output_error)?
                }
                _ => value,
            };
            outputs.push(value.into_host().map_err(DeviceError::BadPlan)?);
        }
        Ok(outputs)
    }
}
