//! One run of a program.

use std::any::Any;
use std::sync::Arc;

use base::Nanos;
use bytes::Bytes;
use device::{DeviceError, Task};
use model::Tensor;

use crate::driver::{PinnedBuffer, Priority, Stream};
use crate::error::CudaError;
use crate::memory::write_inputs;
use crate::preempt::epoch_counters::EpochCounter;
use crate::program::batch_inputs::BatchInputs;
use crate::program::instance::Instance;
use crate::program::specialization::Specialization;

/// A run: inputs on the host, device memory from its first step to its last, outputs on the host.
pub(crate) struct CudaTask {
    pub(crate) specialization: Arc<Specialization>,
    staging: Option<PinnedBuffer>,
    inputs: Inputs,
    instance: Option<Instance>,
    /// The priority that the instance was taken with.
    priority: Priority,
    next_step: usize,
    /// Inputs are on the device.
    pub(crate) uploaded: bool,
    pub(crate) control: ControlState,
    step_times: Option<Vec<Nanos>>,
    /// Time spent on the next step by launches that were preempted.
    pub(crate) unfinished: Nanos,
}

/// Where the inputs of a run are, until it has ended.
enum Inputs {
    /// In its staging buffer.
    Staged,
    /// In the pinned host pool.
    Pooled(Vec<Bytes>),
    /// Those of a batch's members.
    Batch(BatchInputs),
}

/// State of the control words, which best-effort launches share with their queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ControlState {
    /// All of them have been cleared for this run.
    pub(crate) cleared: bool,
    /// Steps before this one have been launched since.
    pub(crate) used_to: usize,
    /// Done bits of the next step are those of a preempted launch: only the other tiles are
    /// computed.
    pub(crate) partly_done: bool,
}

impl CudaTask {
    pub(crate) fn new(
        specialization: Arc<Specialization>,
        inputs: &[&Bytes],
        notify: &mut dyn FnMut(),
    ) -> Result<CudaTask, DeviceError> {
        for (slot, raw) in specialization.gpu.inputs.iter().zip(inputs) {
            if raw.len() as u64 != slot.bytes {
                let (name, want, got) = (&slot.name, slot.bytes, raw.len());
                let why = format!("input '{name}' has {got} bytes, the device expects {want}");
                return Err(DeviceError::BadInput(why));
            }
        }
        let mut staging = specialization.take_staging()?;
        if specialization.memory.are_in_host_pool(inputs) {
            notify();
            let inputs = inputs.iter().copied().cloned().collect();
            return Ok(CudaTask::with(specialization, staging, Inputs::Pooled(inputs)));
        }
        let target = staging.as_mut_slice();
        let write = |index: usize, at: usize, part: &[u8]| {
            let at = specialization.layout.input(index) as usize + at;
            target[at..at + part.len()].copy_from_slice(part);
        };
        write_inputs(inputs, write, notify);
        Ok(CudaTask::with(specialization, staging, Inputs::Staged))
    }

    /// A run of a batch.
    pub(crate) fn of_batch(
        specialization: Arc<Specialization>,
        staging: PinnedBuffer,
        batch_inputs: BatchInputs,
    ) -> CudaTask {
        CudaTask::with(specialization, staging, Inputs::Batch(batch_inputs))
    }

    fn with(
        specialization: Arc<Specialization>,
        mut staging: PinnedBuffer,
        inputs: Inputs,
    ) -> CudaTask {
        let (faults, outputs) = (specialization.layout.faults_at, specialization.layout.outputs_at);
        staging.as_mut_slice()[faults as usize..outputs as usize].fill(0);
        CudaTask {
            specialization,
            staging: Some(staging),
            inputs,
            instance: None,
            priority: Priority::Low,
            next_step: 0,
            uploaded: false,
            control: ControlState::default(),
            step_times: None,
            unfinished: Nanos::ZERO,
        }
    }

    /// Enqueues the copy of inputs, and of the fault and control words behind them.
    pub(crate) fn copy_in(&self, best_effort: bool, stream: &Stream) -> Result<(), CudaError> {
        let (Some(instance), Some(staging)) = (&self.instance, &self.staging) else {
            return Err(CudaError::Misuse("a run without memory was launched"));
        };
        let specialization = &self.specialization;
        let copier = &specialization.memory.input_copier;
        // SAFETY: the task holds both sides and all inputs until the stream is drained or the fence
        // behind the copy is reached.
        unsafe {
            match &self.inputs {
                Inputs::Staged => {
                    return instance.copy_inputs(specialization, staging, best_effort, stream);
                }
                Inputs::Pooled(inputs) => {
                    for (index, raw) in inputs.iter().enumerate() {
                        let to = instance.address() + specialization.layout.input(index);
                        copier.copy_in(stream, to, raw.as_ptr(), raw.len())?;
                    }
                }
                Inputs::Batch(batch_inputs) => {
                    batch_inputs.copy_in(
                        copier,
                        specialization,
                        instance.address(),
                        staging,
                        stream,
                    )?;
                }
            }
            instance.copy_words_after_inputs(specialization, staging, best_effort, stream)
        }
    }

    /// Bytes and shape of an output: the rows of the batch, without further rows of the
    /// specialization.
    fn output(&self, slot: &model::gpu::IoTensor) -> (usize, Vec<usize>) {
        let (mut bytes, mut shape) = (slot.bytes as usize, slot.shape.clone());
        if let (Inputs::Batch(batch_inputs), Some(first)) = (&self.inputs, shape.first_mut())
            && *first == batch_inputs.plan_rows
        {
            bytes = bytes / batch_inputs.plan_rows.max(1) * batch_inputs.rows;
            *first = batch_inputs.rows;
        }
        (bytes, shape)
    }

    /// Takes device memory unless the run has it already, preferably last used with that priority.
    pub(crate) fn acquire_memory(&mut self, priority: Priority) -> Result<(), DeviceError> {
        if self.instance.is_none() {
            self.instance = Some(self.specialization.take_instance(priority)?);
            self.priority = priority;
            self.uploaded = false;
        }
        Ok(())
    }

    /// The run's instance and staging buffer; both exist between [`Self::acquire_memory`] and the
    /// last step.
    pub(crate) fn memory(&mut self) -> Result<(&mut Instance, &PinnedBuffer), CudaError> {
        match (&mut self.instance, &self.staging) {
            (Some(instance), Some(staging)) => Ok((instance, staging)),
            _ => Err(CudaError::Misuse("a run without memory was launched")),
        }
    }

    /// The run's epoch counter.
    pub(crate) fn epoch_counter(&self) -> Result<Arc<EpochCounter>, CudaError> {
        let instance = self.instance.as_ref();
        let epoch_counter = instance.map(|instance| instance.epoch_counter().clone());
        epoch_counter.ok_or(CudaError::Misuse("a run without memory has no epoch counter"))
    }

    /// Enqueues the copy of inputs and of cleared control words.
    pub(crate) fn upload(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.copy_in(true, stream)?;
        self.uploaded = true;
        self.control = ControlState { cleared: true, ..ControlState::default() };
        Ok(())
    }

    /// Enqueues the copy of cleared control words alone.
    pub(crate) fn upload_words(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let (Some(instance), Some(staging)) = (&self.instance, &self.staging) else {
            return Err(CudaError::Misuse("a run without memory was launched"));
        };
        // SAFETY: the task holds both sides until the stream is drained.
        unsafe { instance.copy_words(&self.specialization, staging, stream) }
    }

    /// Steps before `step` are done. After the last one the instance is returned. Nothing of this
    /// run may be enqueued any more.
    pub(crate) fn advance_to(&mut self, step: usize) {
        self.next_step = step;
        if step == self.step_count()
            && let Some(mut instance) = self.instance.take()
        {
            instance.end_run();
            self.specialization.return_instance(instance, self.priority);
        }
    }

    /// Why a run that is done counts as failed; `None` when its outputs are good or not computed
    /// yet.
    pub(crate) fn fault(&self) -> Option<DeviceError> {
        if self.next_step < self.step_count() {
            return None;
        }
        let faulted = self.specialization.layout.faulted(self.staging.as_ref()?.as_slice())?;
        let step = &self.specialization.gpu.steps[faulted];
        let (step, op) = (step.name.clone(), step.op.clone());
        Some(DeviceError::StepFailed { step, op, reason: "an index is out of range".to_string() })
    }

    /// Drops the instance of a run that failed: its content is not known.
    pub(crate) fn abandon(&mut self) {
        self.instance = None;
    }

    /// Whether step times are recorded.
    pub(crate) fn is_timed(&self) -> bool {
        self.step_times.is_some()
    }

    /// Records the time of the step that was just done.
    pub(crate) fn push_time(&mut self, micros: f64) {
        let spent = Nanos((micros.max(0.0) * 1e3) as u64) + self.unfinished;
        self.unfinished = Nanos::ZERO;
        if let Some(times) = &mut self.step_times {
            times.push(spent);
        }
    }
}

impl Task for CudaTask {
    fn step_count(&self) -> usize {
        self.specialization.gpu.steps.len()
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
        if self.next_step < self.step_count() {
            return Err(DeviceError::BadPlan(
                "outputs were requested before the last step".to_string(),
            ));
        }
        let Some(staging) = &self.staging else {
            return Err(DeviceError::BadPlan("the run has no outputs".to_string()));
        };
        let slots = self.specialization.gpu.outputs.iter().enumerate();
        slots
            .map(|(index, slot)| {
                let at = self.specialization.layout.output(index) as usize;
                let (bytes, shape) = self.output(slot);
                let raw = &staging.as_slice()[at..at + bytes];
                Tensor::from_raw(slot.dtype, shape, Bytes::copy_from_slice(raw))
                    .map_err(|err| DeviceError::BadPlan(format!("output '{}': {err}", slot.name)))
            })
            .collect()
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl Drop for CudaTask {
    fn drop(&mut self) {
        // A run that ends early returns its instance too: its completion said that nothing of it is
        // enqueued any more.
        if let Some(mut instance) = self.instance.take() {
            instance.end_run();
            self.specialization.return_instance(instance, self.priority);
        }
        if let Some(staging) = self.staging.take() {
            self.specialization.return_staging(staging);
        }
    }
}
