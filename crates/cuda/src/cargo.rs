//! Inputs of several requests as those of one run.

use std::any::Any;
use std::sync::Arc;

use device::batch::HostStagedInputs;
use device::{DeviceError, StagedInputs};
use model::Tensor;

use crate::driver::{PinnedBuffer, Stream};
use crate::error::CudaError;
use crate::hub::Hub;
use crate::lowered::Lowered;
use crate::pool::Berth;
use crate::program::Sizes;

/// One request's inputs, in a pool or on the host where there was no room.
pub(crate) struct CudaStaged {
    /// Sizes of all symbols but the batch.
    pub(crate) sizes: Sizes,
    pub(crate) rows: usize,
    pub(crate) storage: Storage,
}

pub(crate) enum Storage {
    Pool(Berth),
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

/// What a device's own staging is, whichever way it was done.
pub(crate) enum Unstaged {
    Own(CudaStaged),
    Plain(Vec<Tensor>),
}

pub(crate) fn unstage(staged: Box<dyn StagedInputs>) -> Result<Unstaged, DeviceError> {
    let other = |_| DeviceError::BadPlan("staged inputs belong to another device".to_string());
    match staged.into_any().downcast::<CudaStaged>() {
        Ok(own) => Ok(Unstaged::Own(*own)),
        Err(staged) => {
            let host = staged.downcast::<HostStagedInputs>().map_err(other)?;
            Ok(Unstaged::Plain(host.into_inputs()))
        }
    }
}

/// The inputs of one run, from wherever they are.
pub(crate) struct Cargo {
    parts: Vec<Part>,
    /// Rows in all.
    pub(crate) rows: usize,
    /// Rows of the plan, which may have more.
    pub(crate) plan_rows: usize,
    /// The pool's rows it holds until the run is over.
    berths: Vec<Berth>,
}

/// Rows that lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    /// The first of them in the run.
    at: usize,
    rows: usize,
    from: From,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    /// Of this berth and those behind it, on the device.
    Ring(usize),
    /// The same on the host.
    Pinned(usize),
    /// At its place in the run's own staging.
    Staging,
}

impl Cargo {
    /// The rows of all `requests` in order. Those that are in no pool are written to `staging`.
    pub(crate) fn new(
        lowered: &Lowered,
        plan_rows: usize,
        requests: Vec<CudaStaged>,
        staging: &mut PinnedBuffer,
    ) -> Result<Cargo, DeviceError> {
        let mut cargo = Cargo { parts: Vec::new(), rows: 0, plan_rows, berths: Vec::new() };
        for request in requests {
            let (at, rows) = (cargo.rows, request.rows);
            cargo.rows += rows;
            match request.storage {
                Storage::Pool(berth) => cargo.add(at, berth),
                Storage::Host(inputs) => {
                    write(lowered, plan_rows, (at, rows), &inputs, staging)?;
                    cargo.parts.push(Part { at, rows, from: From::Staging });
                }
            }
        }
        Ok(cargo)
    }

    fn add(&mut self, at: usize, berth: Berth) {
        let (rows, index) = (berth.rows(), self.berths.len());
        let follows = self.berths.last().is_some_and(|last| last.is_before(&berth));
        let adjacent = self
            .parts
            .last()
            .is_some_and(|part| part.at + part.rows == at && part.from != From::Staging);
        match self.parts.last_mut() {
            Some(part) if follows && adjacent => part.rows += rows,
            _ => {
                let from =
                    if berth.copy().is_some() { From::Ring(index) } else { From::Pinned(index) };
                self.parts.push(Part { at, rows, from });
            }
        }
        self.berths.push(berth);
    }

    /// Queues everything into the run's inputs at `block`, behind the copies to the pool. Rows that the plan has beyond are
    /// zero.
    ///
    /// # Safety
    /// The block, `staging` and this cargo live until it is done, and the block belongs to this run alone.
    pub(crate) unsafe fn copy_in(
        &self,
        hub: &Hub,
        lowered: &Lowered,
        block: u64,
        staging: &PinnedBuffer,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        // One stream copies all inputs in order: whoever was copied last is there last.
        let copied = self.berths.iter().filter(|berth| berth.copy().is_some());
        if let Some(last) = copied.max_by_key(|berth| berth.copy()) {
            last.copied().hold(stream)?;
        }
        for (index, slot) in lowered.gpu.inputs.iter().enumerate() {
            let row = slot.bytes as usize / self.plan_rows.max(1);
            let offset = lowered.layout.input(index);
            for part in &self.parts {
                let (to, bytes) = (block + offset + (part.at * row) as u64, part.rows * row);
                // SAFETY: the rows lie inside the run's input, the pool's ring or the staging buffer; the caller and the
                // berths answer for the time.
                unsafe {
                    match part.from {
                        From::Ring(berth) => {
                            stream.copy_within(to, self.berths[berth].ring(index), bytes)
                        }
                        From::Pinned(berth) => {
                            hub.carrier.copy_in(stream, to, self.berths[berth].host(index), bytes)
                        }
                        From::Staging => {
                            let at = offset as usize + part.at * row;
                            hub.carrier.copy_in(stream, to, staging.as_ptr().add(at), bytes)
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
    lowered: &Lowered,
    plan_rows: usize,
    (at, rows): (usize, usize),
    inputs: &[Tensor],
    staging: &mut PinnedBuffer,
) -> Result<(), DeviceError> {
    for (index, (slot, tensor)) in lowered.gpu.inputs.iter().zip(inputs).enumerate() {
        let row = slot.bytes as usize / plan_rows.max(1);
        let raw = tensor.raw().filter(|raw| raw.len() == row * rows).ok_or_else(|| {
            DeviceError::BadInput(format!("input '{}' does not fit its batch", slot.name))
        })?;
        let begin = lowered.layout.input(index) as usize + at * row;
        staging.as_mut_slice()[begin..begin + raw.len()].copy_from_slice(raw);
    }
    Ok(())
}

/// Pools of a model, one for each size of row.
pub(crate) type Pools = Vec<(Vec<usize>, Option<Arc<crate::pool::Pool>>)>;
