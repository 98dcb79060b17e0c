//! Batch inputs: staged inputs of several requests as the inputs of one run.

use std::any::Any;
use std::sync::Arc;

use device::batch::HostStagedInputs;
use device::{DeviceError, StagedInputs};
use model::Tensor;

use crate::driver::{PinnedBuffer, Stream};
use crate::error::CudaError;
use crate::memory::input_copier::InputCopier;
use crate::memory::input_pool::PoolSlot;
use crate::program::lowering::Sizes;
use crate::program::specialization::Specialization;

/// The staged inputs of one request: in the input pool, or on the host when the pool is full.
pub(crate) struct CudaStaged {
    /// Sizes of all symbols except the batch.
    pub(crate) sizes: Sizes,
    pub(crate) rows: usize,
    pub(crate) storage: StagedStorage,
    /// A specialization for at least these rows, and its number of rows.
    pub(crate) fitting: (Arc<Specialization>, usize),
}

pub(crate) enum StagedStorage {
    Pool(PoolSlot),
    Host(Vec<Tensor>),
}

impl StagedInputs for CudaStaged {
    fn rows(&self) -> usize {
        self.rows
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Staged inputs by where they were staged.
pub(crate) enum StagingLocation {
    Device(CudaStaged),
    Host(Vec<Tensor>),
}

pub(crate) fn unstage(staged: Box<dyn StagedInputs>) -> Result<StagingLocation, DeviceError> {
    let other = |_| DeviceError::BadPlan("staged inputs belong to another device".to_string());
    match staged.into_any().downcast::<CudaStaged>() {
        Ok(own) => Ok(StagingLocation::Device(*own)),
        Err(staged) => {
            let host = staged.downcast::<HostStagedInputs>().map_err(other)?;
            Ok(StagingLocation::Host(host.into_inputs()))
        }
    }
}

/// The inputs of one run, from wherever they are.
pub(crate) struct BatchInputs {
    ranges: Vec<RowRange>,
    /// Rows of all requests.
    pub(crate) rows: usize,
    /// Rows of the specialization, which may be more.
    pub(crate) plan_rows: usize,
    /// Pool slots, held until the run has ended.
    slots: Vec<PoolSlot>,
}

/// Adjacent rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowRange {
    /// The first of them in the run.
    at: usize,
    rows: usize,
    from: RowSource,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowSource {
    /// From this slot on, on the device.
    Device(usize),
    /// From this slot on, on the host.
    Pinned(usize),
    /// In the run's staging buffer.
    Staging,
}

impl BatchInputs {
    /// The rows of all `requests` in order. Those that are in no pool are written to `staging`.
    pub(crate) fn new(
        specialization: &Specialization,
        plan_rows: usize,
        requests: Vec<CudaStaged>,
        staging: &mut PinnedBuffer,
    ) -> Result<BatchInputs, DeviceError> {
        let mut batch_inputs =
            BatchInputs { ranges: Vec::new(), rows: 0, plan_rows, slots: Vec::new() };
        for request in requests {
            let (at, rows) = (batch_inputs.rows, request.rows);
            batch_inputs.rows += rows;
            match request.storage {
                StagedStorage::Pool(slot) => batch_inputs.add(at, slot),
                StagedStorage::Host(inputs) => {
                    write(specialization, plan_rows, (at, rows), &inputs, staging)?;
                    batch_inputs.ranges.push(RowRange { at, rows, from: RowSource::Staging });
                }
            }
        }
        Ok(batch_inputs)
    }

    fn add(&mut self, at: usize, slot: PoolSlot) {
        let (rows, index) = (slot.rows(), self.slots.len());
        let follows = self.slots.last().is_some_and(|last| last.is_before(&slot));
        let adjacent = self
            .ranges
            .last()
            .is_some_and(|range| range.at + range.rows == at && range.from != RowSource::Staging);
        match self.ranges.last_mut() {
            Some(range) if follows && adjacent => range.rows += rows,
            _ => {
                let from = if slot.copy().is_some() {
                    RowSource::Device(index)
                } else {
                    RowSource::Pinned(index)
                };
                self.ranges.push(RowRange { at, rows, from });
            }
        }
        self.slots.push(slot);
    }

    /// Enqueues the copies to the run's inputs at `block`, behind the copies to the pool. Further
    /// rows of the specialization are cleared.
    ///
    /// # Safety
    /// The block, `staging` and these inputs live until it is done, and the block belongs to this
    /// run alone.
    pub(crate) unsafe fn copy_in(
        &self,
        copier: &InputCopier,
        specialization: &Specialization,
        block: u64,
        staging: &PinnedBuffer,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        // One stream copies all inputs in order, so the copy with the highest number ends last.
        let copied = self.slots.iter().filter(|slot| slot.copy().is_some());
        if let Some(last) = copied.max_by_key(|slot| slot.copy()) {
            last.copy_event().block_stream(stream)?;
        }
        for (index, slot) in specialization.gpu.inputs.iter().enumerate() {
            let row = slot.bytes as usize / self.plan_rows.max(1);
            let offset = specialization.layout.input(index);
            for range in &self.ranges {
                let (to, bytes) = (block + offset + (range.at * row) as u64, range.rows * row);
                // SAFETY: the rows are inside the run's input, the input pool or the staging
                // buffer; the caller and the slots guarantee the lifetimes.
                unsafe {
                    match range.from {
                        RowSource::Device(slot) => {
                            stream.copy_within(to, self.slots[slot].ring(index), bytes)
                        }
                        RowSource::Pinned(slot) => {
                            copier.copy_in(stream, to, self.slots[slot].host(index), bytes)
                        }
                        RowSource::Staging => {
                            let at = offset as usize + range.at * row;
                            copier.copy_in(stream, to, staging.as_ptr().add(at), bytes)
                        }
                    }
                }?;
            }
            let beyond = (self.plan_rows - self.rows) * row;
            // SAFETY: the last rows of the run's input.
            unsafe { stream.clear_bytes(block + offset + (self.rows * row) as u64, beyond) }?;
        }
        Ok(())
    }
}

/// Writes a request's inputs to their rows in `staging`.
fn write(
    specialization: &Specialization,
    plan_rows: usize,
    (at, rows): (usize, usize),
    inputs: &[Tensor],
    staging: &mut PinnedBuffer,
) -> Result<(), DeviceError> {
    for (index, (slot, tensor)) in specialization.gpu.inputs.iter().zip(inputs).enumerate() {
        let row = slot.bytes as usize / plan_rows.max(1);
        let raw = tensor.raw().filter(|raw| raw.len() == row * rows).ok_or_else(|| {
            DeviceError::BadInput(format!("input '{}' does not fit its batch", slot.name))
        })?;
        let begin = specialization.layout.input(index) as usize + at * row;
        staging.as_mut_slice()[begin..begin + raw.len()].copy_from_slice(raw);
    }
    Ok(())
}

/// Input pools of a model, one per list of row sizes.
pub(crate) type InputPools = Vec<(Vec<usize>, Option<Arc<crate::memory::input_pool::InputPool>>)>;
