//! One run of a program.

use std::any::Any;
use std::sync::Arc;

use base::Nanos;
use bytes::Bytes;
use device::{DeviceError, Task};
use model::Tensor;

use crate::cargo::Cargo;
use crate::driver::{PinnedBuffer, Priority, Stream};
use crate::error::CudaError;
use crate::hub::Hub;
use crate::instance::Instance;
use crate::lowered::Lowered;
use crate::seats::Seat;

/// Inputs that are still to be copied when a task is announced: what takes about as long as best effort to leave.
const SOON_BYTES: usize = 256 << 10;

/// A run: inputs on the host, device memory from its first step to its last, outputs on the host.
pub(crate) struct CudaTask {
    pub(crate) hub: Arc<Hub>,
    pub(crate) lowered: Arc<Lowered>,
    staging: Option<PinnedBuffer>,
    inputs: Inputs,
    instance: Option<Instance>,
    /// What the instance was taken for.
    priority: Priority,
    next_step: usize,
    /// Inputs are on the device.
    pub(crate) uploaded: bool,
    pub(crate) words: ControlState,
    step_times: Option<Vec<Nanos>>,
    /// Time spent on the next step by tries that left.
    pub(crate) unfinished: Nanos,
}

/// Where the inputs of a run are, until it is over.
enum Inputs {
    /// In its staging buffer.
    Staged,
    /// In memory the device has lent.
    Lent(Vec<Bytes>),
    /// Several requests' of a batch.
    Batch(Cargo),
}

/// What is in the words that best-effort launches share with their queue.
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
        hub: Arc<Hub>,
        lowered: Arc<Lowered>,
        inputs: &[&Bytes],
        notify: &mut dyn FnMut(),
    ) -> Result<CudaTask, DeviceError> {
        for (slot, raw) in lowered.gpu.inputs.iter().zip(inputs) {
            if raw.len() as u64 != slot.bytes {
                let (name, want, got) = (&slot.name, slot.bytes, raw.len());
                let why = format!("input '{name}' has {got} bytes, the device expects {want}");
                return Err(DeviceError::BadInput(why));
            }
        }
        let mut staging = lowered.take_staging(&hub)?;
        if hub.takes_as_they_lie(inputs) {
            notify();
            let inputs = inputs.iter().copied().cloned().collect();
            return Ok(CudaTask::with(hub, lowered, staging, Inputs::Lent(inputs)));
        }
        let target = staging.as_mut_slice();
        let write = |index: usize, at: usize, part: &[u8]| {
            let at = lowered.layout.input(index) as usize + at;
            target[at..at + part.len()].copy_from_slice(part);
        };
        write_inputs(inputs, write, notify);
        Ok(CudaTask::with(hub, lowered, staging, Inputs::Staged))
    }

    /// A run of the inputs of several requests.
    pub(crate) fn of_batch(
        hub: Arc<Hub>,
        lowered: Arc<Lowered>,
        staging: PinnedBuffer,
        cargo: Cargo,
    ) -> CudaTask {
        CudaTask::with(hub, lowered, staging, Inputs::Batch(cargo))
    }

    fn with(
        hub: Arc<Hub>,
        lowered: Arc<Lowered>,
        mut staging: PinnedBuffer,
        inputs: Inputs,
    ) -> CudaTask {
        let (faults, outputs) = (lowered.layout.faults_at, lowered.layout.outputs_at);
        staging.as_mut_slice()[faults as usize..outputs as usize].fill(0);
        CudaTask {
            hub,
            lowered,
            staging: Some(staging),
            inputs,
            instance: None,
            priority: Priority::Low,
            next_step: 0,
            uploaded: false,
            words: ControlState::default(),
            step_times: None,
            unfinished: Nanos::ZERO,
        }
    }

    /// Queues the copy of inputs, and of the words behind them that launches of that kind look at.
    pub(crate) fn copy_in(&self, best_effort: bool, stream: &Stream) -> Result<(), CudaError> {
        let (Some(instance), Some(staging)) = (&self.instance, &self.staging) else {
            return Err(CudaError::Misuse("a run without memory was launched"));
        };
        let (hub, lowered) = (&self.hub, &self.lowered);
        // SAFETY: the task holds both sides and all inputs until the stream is drained or the mark behind is passed.
        unsafe {
            match &self.inputs {
                Inputs::Staged => {
                    return instance.copy_inputs(hub, lowered, staging, best_effort, stream);
                }
                Inputs::Lent(inputs) => {
                    for (index, raw) in inputs.iter().enumerate() {
                        let to = instance.address() + lowered.layout.input(index);
                        hub.carrier.copy_in(stream, to, raw.as_ptr(), raw.len())?;
                    }
                }
                Inputs::Batch(cargo) => {
                    cargo.copy_in(hub, lowered, instance.address(), staging, stream)?;
                }
            }
            instance.copy_behind_inputs(hub, lowered, staging, best_effort, stream)
        }
    }

    /// Bytes and shape of an output: of a batch's rows only, not of those its plan has beyond.
    fn output(&self, slot: &model::gpu::IoTensor) -> (usize, Vec<usize>) {
        let (mut bytes, mut shape) = (slot.bytes as usize, slot.shape.clone());
        if let (Inputs::Batch(cargo), Some(first)) = (&self.inputs, shape.first_mut())
            && *first == cargo.plan_rows
        {
            bytes = bytes / cargo.plan_rows.max(1) * cargo.rows;
            *first = cargo.rows;
        }
        (bytes, shape)
    }

    /// Takes device memory unless the run has it already; rather some that was last used at that priority.
    pub(crate) fn hold_memory(&mut self, priority: Priority) -> Result<(), DeviceError> {
        if self.instance.is_none() {
            self.instance = Some(self.lowered.take_instance(&self.hub, priority)?);
            self.priority = priority;
            self.uploaded = false;
        }
        Ok(())
    }

    /// The run's device memory and host buffer; both are there between [`Self::hold_memory`] and the last step.
    pub(crate) fn memory(&mut self) -> Result<(&mut Instance, &PinnedBuffer), CudaError> {
        match (&mut self.instance, &self.staging) {
            (Some(instance), Some(staging)) => Ok((instance, staging)),
            _ => Err(CudaError::Misuse("a run without memory was launched")),
        }
    }

    /// Where the run looks for orders to leave.
    pub(crate) fn seat(&self) -> Result<Arc<Seat>, CudaError> {
        let instance = self.instance.as_ref();
        let seat = instance.map(|instance| instance.seat().clone());
        seat.ok_or(CudaError::Misuse("a run without memory has no seat"))
    }

    /// Queues the copy of inputs and of fresh words for best-effort launches.
    pub(crate) fn upload(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.copy_in(true, stream)?;
        self.uploaded = true;
        self.words = ControlState { cleared: true, ..ControlState::default() };
        Ok(())
    }

    /// Queues the copy of fresh words alone.
    pub(crate) fn upload_words(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let (Some(instance), Some(staging)) = (&self.instance, &self.staging) else {
            return Err(CudaError::Misuse("a run without memory was launched"));
        };
        // SAFETY: the task holds both sides until the stream is drained.
        unsafe { instance.copy_words(&self.lowered, staging, stream) }
    }

    /// Notes that steps before `step` are done; after the last, the device memory goes back. Nothing of this run may be
    /// queued on the device any more.
    pub(crate) fn advance_to(&mut self, step: usize) {
        self.next_step = step;
        if step == self.step_count()
            && let Some(instance) = self.instance.take()
        {
            self.lowered.give_instance(instance, self.priority);
        }
    }

    /// Why a run that is done counts as failed; `None` when its outputs are good, or not there yet.
    pub(crate) fn fault(&self) -> Option<DeviceError> {
        if self.next_step < self.step_count() {
            return None;
        }
        let faulted = self.lowered.layout.faulted(self.staging.as_ref()?.as_slice())?;
        let step = &self.lowered.gpu.steps[faulted];
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
        self.lowered.gpu.steps.len()
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
        let slots = self.lowered.gpu.outputs.iter().enumerate();
        slots
            .map(|(index, slot)| {
                let at = self.lowered.layout.output(index) as usize;
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
            self.lowered.give_instance(instance, self.priority);
        }
        if let Some(staging) = self.staging.take() {
            self.lowered.give_staging(staging);
        }
    }
}

/// Hands all bytes of `inputs` to `write`, with the input's number and where in it they begin, and calls `notify` when only a moment
/// of that is left.
pub(crate) fn write_inputs(
    inputs: &[&Bytes],
    mut write: impl FnMut(usize, usize, &[u8]),
    notify: &mut dyn FnMut(),
) {
    let mut left: usize = inputs.iter().map(|raw| raw.len()).sum();
    let mut notify = Some(notify);
    for (index, raw) in inputs.iter().enumerate() {
        let (first, last) = raw.split_at(left.saturating_sub(SOON_BYTES).min(raw.len()));
        write(index, 0, first);
        if left - first.len() <= SOON_BYTES
            && let Some(notify) = notify.take()
        {
            notify();
        }
        write(index, first.len(), last);
        left -= raw.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_written_whole_and_announced_once_near_the_end() {
        for lengths in [&[0][..], &[1000], &[SOON_BYTES + 7], &[600_000, 5, 0, 300_000]] {
            let mut random = base::Random::new(3);
            let mut bytes =
                |length: &usize| (0..*length).map(|_| random.below(256) as u8).collect();
            let inputs: Vec<Bytes> = lengths.iter().map(&mut bytes).map(Vec::<u8>::into).collect();
            let written = std::cell::RefCell::new(vec![Vec::new(); inputs.len()]);
            let mut announced = Vec::new();
            write_inputs(
                &inputs.iter().collect::<Vec<_>>(),
                |index, at, part| {
                    let mut written = written.borrow_mut();
                    assert_eq!(written[index].len(), at);
                    written[index].extend_from_slice(part);
                },
                &mut || announced.push(written.borrow().iter().map(Vec::len).sum::<usize>()),
            );
            assert_eq!(written.into_inner(), inputs);
            let all: usize = lengths.iter().sum();
            assert_eq!(announced, [all.saturating_sub(SOON_BYTES)]);
        }
    }
}
