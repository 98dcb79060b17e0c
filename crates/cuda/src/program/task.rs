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
    /// What the instance was taken for.
    priority: Priority,
    next_step: usize,
    /// Inputs are on the device.
    pub(crate) uploaded: bool,
    pub(crate) control: ControlState,
    step_times: Option<Vec<Nanos>>,
    /// Time spent on the next step by tries that left.
    pub(crate) unfinished: Nanos,
}

/// Where the inputs of a run are, until it is over.
enum Inputs {
    /// In its staging buffer.
    Staged,
    /// In memory the device has lent.
    Pooled(Vec<Bytes>),
    /// Several requests' of a batch.
    Batch(BatchInputs),
}

/// What is in the control that best-effort launches share with their queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ControlState {
    /// All of them have been cleared for this run.
    pub(crate) cleared: bool,
    /// Steps before this one have been launched since.
    pub(crate) used_to: usize,
    /// The next step's done bits are of a try that left: only the other tiles are missing.
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

    /// A run of the inputs of several requests.
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

    /// Queues the copy of inputs, and of the control behind them that launches of that kind look at.
    pub(crate) fn copy_in(&self, best_effort: bool, stream: &Stream) -> Result<(), CudaError> {
        let (Some(instance), Some(staging)) = (&self.instance, &self.staging) else {
            return Err(CudaError::Misuse("a run without memory was launched"));
        };
        let specialization = &self.specialization;
        let copier = &specialization.memory.input_copier;
        // SAFETY: the task holds both sides and all inputs until the stream is drained or the mark behind is passed.
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

    /// Bytes and shape of an output: of a batch's rows only, not of those its plan has beyond.
    fn output(&self, slot: &model::gpu::Slot) -> (usize, Vec<usize>) {
        let (mut bytes, mut shape) = (slot.bytes as usize, slot.shape.clone());
        if let (Inputs::Batch(batch_inputs), Some(first)) = (&self.inputs, shape.first_mut())
            && *first == batch_inputs.plan_rows
        {
            bytes = bytes / batch_inputs.plan_rows.max(1) * batch_inputs.rows;
            *first = batch_inputs.rows;
        }
        (bytes, shape)
    }

    /// Takes device memory unless the run has it already; rather some that was last used at that priority.
    pub(crate) fn acquire_memory(&mut self, priority: Priority) -> Result<(), DeviceError> {
        if self.instance.is_none() {
            self.instance = Some(self.specialization.take_instance(priority)?);
            self.priority = priority;
            self.uploaded = false;
        }
        Ok(())
    }

    /// The run's device memory and host buffer; both are there between [`Self::acquire_memory`] and the last step.
    pub(crate) fn memory(&mut self) -> Result<(&mut Instance, &PinnedBuffer), CudaError> {
        match (&mut self.instance, &self.staging) {
            (Some(instance), Some(staging)) => Ok((instance, staging)),
            _ => Err(CudaError::Misuse("a run without memory was launched")),
        }
    }

    /// Where the run polls for orders to leave.
    pub(crate) fn epoch_counter(&self) -> Result<Arc<EpochCounter>, CudaError> {
        let instance = self.instance.as_ref();
        let epoch_counter = instance.map(|instance| instance.epoch_counter().clone());
        epoch_counter.ok_or(CudaError::Misuse("a run without memory has no epoch_counter"))
    }

    /// Queues the copy of inputs and of fresh control for best-effort launches.
    pub(crate) fn upload(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.copy_in(true, stream)?;
        self.uploaded = true;
        self.control = ControlState { cleared: true, ..ControlState::default() };
        Ok(())
    }

    /// Queues the copy of fresh control alone.
    pub(crate) fn upload_words(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let (Some(instance), Some(staging)) = (&self.instance, &self.staging) else {
            return Err(CudaError::Misuse("a run without memory was launched"));
        };
        // SAFETY: the task holds both sides until the stream is drained.
        unsafe { instance.copy_words(&self.specialization, staging, stream) }
    }

    /// Notes that steps before `step` are done; after the last, the device memory goes back. Nothing of this run may be
    /// queued on the device any more.
    pub(crate) fn advance_to(&mut self, step: usize) {
        self.next_step = step;
        if step == self.step_count()
            && let Some(instance) = self.instance.take()
        {
            self.specialization.return_instance(instance, self.priority);
        }
    }

    /// Why a run that is done counts as failed; `None` when its outputs are good, or not there yet.
    pub(crate) fn fault(&self) -> Option<DeviceError> {
        if self.next_step < self.step_count() {
            return None;
        }
        let faulted = self.specialization.layout.faulted(self.staging.as_ref()?.as_slice())?;
        let step = &self.specialization.gpu.steps[faulted];
        let (step, op) = (step.name.clone(), step.op.clone());
        Some(DeviceError::StepFailed { step, op, reason: "an index is out of range".to_string() })
    }

    /// Forgets the device memory of a run that failed: what is in it is not known.
    pub(crate) fn abandon(&mut self) {
        self.instance = None;
    }

    /// Whether times are kept.
    pub(crate) fn is_timed(&self) -> bool {
        self.step_times.is_some()
    }

    /// Keeps the time of the step that was just done.
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
            return Err(DeviceError::BadPlan("outputs were asked for before the end".to_string()));
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
        // A run that ends early gives its memory back too: its completion said that nothing of it is queued any more.
        if let Some(instance) = self.instance.take() {
            self.specialization.return_instance(instance, self.priority);
        }
        if let Some(staging) = self.staging.take() {
            self.specialization.return_staging(staging);
        }
    }
}
