//! The device memory of one run, with every launch's arguments ready.

use device::DeviceError;

use crate::control::NEVER;
use crate::driver::{Chain, ChainLink, DeviceBuffer, Graph, PinnedBuffer, Stream};
use crate::error::CudaError;
use crate::hub::Hub;
use crate::layout::Addresses;
use crate::lowered::Lowered;

/// Bytes of `BeControl` in `wrap.cuh`.
const CONTROL_BYTES: usize = 48;

/// One run's memory.
pub(crate) struct Instance {
    /// Before the memory it points to, so that it is dropped first.
    graph: Option<Graph>,
    /// Best-effort steps in sets that are launched as one, as far as they have been asked for, with the epoch they
    /// were made for last.
    chains: Vec<Option<(Chain, u32)>>,
    memory: DeviceBuffer,
    real_time: Vec<Vec<u8>>,
    best_effort: Vec<Vec<u8>>,
}

/// What one best-effort launch is told beside its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ControlBlock {
    pub(crate) epoch: u64,
    pub(crate) next: u64,
    pub(crate) done: u64,
    pub(crate) launched: u32,
    pub(crate) tiles: u32,
    pub(crate) restored: bool,
}

impl ControlBlock {
    /// As the kernel reads it: four addresses, of which the budget's is absent, and three words.
    pub(crate) fn to_bytes(self) -> [u8; CONTROL_BYTES] {
        let mut bytes = [0; CONTROL_BYTES];
        bytes[0..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.next.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.done.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.launched.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.tiles.to_le_bytes());
        bytes[40..44].copy_from_slice(&u32::from(self.restored).to_le_bytes());
        bytes
    }
}

impl Instance {
    pub(crate) fn new(hub: &Hub, lowered: &Lowered) -> Result<Instance, DeviceError> {
        let memory = DeviceBuffer::zeroed(hub.memory_stream(), lowered.layout.bytes)
            .map_err(|err| hub.error(err))?;
        let addresses = Addresses {
            block: memory.address(),
            layout: &lowered.layout,
            weights: &lowered.weights,
        };
        let (mut real_time, mut best_effort) = (Vec::new(), Vec::new());
        for (index, step) in lowered.gpu.steps.iter().enumerate() {
            let layout = &lowered.layout;
            let bad = |why| DeviceError::BadPlan(format!("step '{}': {why}", step.name));
            let (rt, be) = (&step.choices[step.rt], &step.choices[step.be]);
            real_time.push(addresses.patch(rt, layout.real_time_own(index)).map_err(bad)?);
            best_effort.push(addresses.patch(be, layout.best_effort_own(index)).map_err(bad)?);
        }
        let chains = lowered.chains.iter().map(|_| None).collect();
        Ok(Instance { graph: None, chains, memory, real_time, best_effort })
    }

    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Queues the copy of all inputs, and of zeros to the fault words.
    ///
    /// # Safety
    /// `staging` and this instance live until it is done, and `staging` is not written.
    pub(crate) unsafe fn copy_inputs(
        &self,
        lowered: &Lowered,
        staging: &PinnedBuffer,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let bytes = lowered.layout.outputs_at as usize;
        debug_assert!(bytes <= staging.len(), "staging holds inputs and outputs");
        // SAFETY: inputs and fault words lie first on both sides, each at least this long; the caller answers for the time.
        unsafe { stream.copy_in(self.memory.address(), staging.as_ptr(), bytes) }
    }

    /// Queues the copy of all outputs and fault words.
    ///
    /// # Safety
    /// `staging` and this instance live until it is done, and nobody else uses `staging`.
    pub(crate) unsafe fn copy_outputs(
        &self,
        lowered: &Lowered,
        staging: &PinnedBuffer,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let (from, to) = (lowered.layout.faults_at, lowered.layout.staged_bytes);
        debug_assert!(to as usize <= staging.len(), "staging holds inputs and outputs");
        // SAFETY: outputs and fault words lie at the same offsets on both sides; the caller answers for the time.
        unsafe {
            let target = staging.as_ptr().add(from as usize);
            stream.copy_out(target, self.memory.address() + from, (to - from) as usize)
        }
    }

    /// Queues zeros to the fault words of steps from `first` on: a step that ran behind one that left may have read
    /// indices that were not there yet.
    ///
    /// # Safety
    /// This instance lives until it is done, and belongs to this run alone.
    pub(crate) unsafe fn clear_faults(
        &self,
        lowered: &Lowered,
        first: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let (at, count) = lowered.layout.fault_words(first);
        // SAFETY: words of this instance; the caller answers for the time.
        unsafe { stream.clear(self.address() + at, count) }
    }

    /// Queues step `index` as real time.
    ///
    /// # Safety
    /// This instance and `lowered` live until it is done, and the instance belongs to this run alone.
    pub(crate) unsafe fn launch_real_time(
        &self,
        hub: &Hub,
        lowered: &Lowered,
        index: usize,
        dependent: bool,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let bound = &lowered.kernels[index].real_time;
        let mut shape = bound.shape;
        shape.dependent = dependent && hub.has_dependent_launches();
        // SAFETY: the arguments were checked against the kernel's size, and every address in them is of this
        // instance or of weights that `lowered` holds.
        unsafe {
            stream.launch(bound.kernel.function(bound.entry), shape, &[&self.real_time[index]])
        }
    }

    /// Queues step `index` as best effort, for work of epoch `launched`.
    ///
    /// # Safety
    /// As for real time; and the step's control words are zero, or those of this run's last try when `restored`.
    pub(crate) unsafe fn launch_best_effort(
        &self,
        hub: &Hub,
        lowered: &Lowered,
        index: usize,
        launched: u32,
        restored: bool,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let block = self.control(hub, lowered, index, launched, restored).to_bytes();
        let bound = &lowered.kernels[index].best_effort;
        let function = bound.kernel.function(bound.entry);
        // SAFETY: as for real time; the block has the layout of the kernel's second parameter.
        unsafe { stream.launch(function, bound.shape, &[&self.best_effort[index], &block]) }
    }

    fn control(
        &self,
        hub: &Hub,
        lowered: &Lowered,
        index: usize,
        launched: u32,
        restored: bool,
    ) -> ControlBlock {
        let control = &lowered.layout.controls[index];
        ControlBlock {
            epoch: hub.epoch().address(),
            next: self.address() + control.next,
            done: self.address() + control.done,
            launched: if lowered.kernels[index].finishes { NEVER } else { launched },
            tiles: control.tiles,
            restored,
        }
    }

    /// Queues the steps of chain `number` as best effort, none of them begun before, for work of epoch `launched`.
    ///
    /// # Safety
    /// As for one step.
    pub(crate) unsafe fn launch_chain(
        &mut self,
        hub: &Hub,
        lowered: &Lowered,
        number: usize,
        launched: u32,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let known = self.chains[number].take();
        let chain = match known {
            Some((chain, epoch)) if epoch == launched => chain,
            other => self.make_chain(hub, lowered, number, launched, other.map(|known| known.0))?,
        };
        // SAFETY: every address in the arguments is of this instance or of weights that `lowered` holds.
        let queued = unsafe { chain.launch(stream) };
        self.chains[number] = Some((chain, launched));
        queued
    }

    /// Chain `number` for work of epoch `launched`; of `known` where it was made before.
    fn make_chain(
        &self,
        hub: &Hub,
        lowered: &Lowered,
        number: usize,
        launched: u32,
        known: Option<Chain>,
    ) -> Result<Chain, CudaError> {
        let steps = lowered.chains[number].clone();
        let blocks: Vec<_> = steps
            .clone()
            .map(|index| self.control(hub, lowered, index, launched, false).to_bytes())
            .collect();
        let links: Vec<ChainLink<'_>> = steps
            .zip(&blocks)
            .map(|(index, block)| {
                let bound = &lowered.kernels[index].best_effort;
                ChainLink {
                    function: bound.kernel.function(bound.entry),
                    shape: bound.shape,
                    params: [&self.best_effort[index], block],
                }
            })
            .collect();
        match known {
            None => Chain::new(hub.context(), &links),
            Some(mut chain) => chain.update(&links).map(|()| chain),
        }
    }

    /// The whole plan as real time in one launch; made when it is first asked for.
    pub(crate) fn graph(&mut self, hub: &Hub, lowered: &Lowered) -> Result<&Graph, CudaError> {
        if self.graph.is_none() {
            let graph = hub.capture(|stream| {
                for index in 0..lowered.kernels.len() {
                    // SAFETY: only recorded here; whoever launches the graph answers for the time.
                    unsafe { self.launch_real_time(hub, lowered, index, index > 0, stream) }?;
                }
                Ok(())
            })?;
            self.graph = Some(graph);
        }
        Ok(self.graph.as_ref().expect("it was made above"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_block_is_laid_out_as_the_kernel_reads_it() {
        let block = ControlBlock {
            epoch: 0x1111,
            next: 0x2222,
            done: 0x3333,
            launched: 4,
            tiles: 5,
            restored: true,
        };
        let bytes = block.to_bytes();
        let address =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        assert_eq!([address(0), address(8), address(16), address(24)], [0x1111, 0, 0x2222, 0x3333]);
        assert_eq!([word(32), word(36), word(40), word(44)], [4, 5, 1, 0]);
    }
}
