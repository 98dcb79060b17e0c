//! The device memory of one run, with the arguments of every launch.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device::DeviceError;

use crate::driver::{CountedResource, Graph, PinnedBuffer, Priority, ResourceKind, Stream};
use crate::error::CudaError;
use crate::memory::Block;
use crate::memory::weights::WeightArrival;
use crate::memory::weights::arrival::PlanPart;
use crate::preempt::best_effort_variant::best_effort_choice;
use crate::preempt::epoch_counters::EpochCounter;
use crate::program::graph_recorder::LaunchTarget;
use crate::program::layout::Addresses;
use crate::program::specialization::Specialization;

/// Bytes of `BeControl` in `wrap.cuh`.
const CONTROL_BYTES: usize = 40;

/// How long the recording of a graph waits for a gap in RT activity.
const GAP_WAIT: Duration = Duration::from_millis(5);

/// How long `prepare_chains` waits for gaps in total. Graphs that are missing then are recorded
/// when they are needed.
const CHAINS_WAIT: Duration = Duration::from_millis(100);

/// The memory of one run.
pub(crate) struct Instance {
    /// The whole program as real time, of high and of low priority. Declared before the memory they
    /// point to, so that they are dropped first.
    graphs: [Option<Graph>; 2],
    /// Chains of best-effort steps, by first step and end, and by launch target, as far as they
    /// have been recorded.
    chains: BTreeMap<(usize, usize), [Option<Graph>; 3]>,
    /// The program as real time of high priority, in the parts that are launched while weights
    /// load; empty where weights are always resident.
    parts: Vec<Graph>,
    memory: Block,
    epoch_counter: Arc<EpochCounter>,
    real_time: Vec<Vec<u8>>,
    best_effort: Vec<Vec<u8>>,
    /// It has been used by a run that ended.
    has_run: bool,
    _counted: CountedResource,
}

/// The second parameter of a best-effort kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ControlBlock {
    pub(crate) epoch_counter: u64,
    pub(crate) preempted: u64,
    pub(crate) next: u64,
    pub(crate) done: u64,
    pub(crate) tiles: u32,
    pub(crate) restored: bool,
}

/// How one best-effort step is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BestEffortLaunch {
    /// Some of its tiles are done.
    pub(crate) restored: bool,
    /// It directly follows another kernel, whose end it waits for itself (dependent launch).
    pub(crate) dependent: bool,
}

impl ControlBlock {
    /// As the kernel reads it: four addresses and two words.
    pub(crate) fn to_bytes(self) -> [u8; CONTROL_BYTES] {
        let mut bytes = [0; CONTROL_BYTES];
        bytes[0..8].copy_from_slice(&self.epoch_counter.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.preempted.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.next.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.done.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.tiles.to_le_bytes());
        bytes[36..40].copy_from_slice(&u32::from(self.restored).to_le_bytes());
        bytes
    }
}

impl Instance {
    pub(crate) fn new(specialization: &Specialization) -> Result<Instance, DeviceError> {
        let memory = specialization
            .memory
            .blocks
            .take(specialization.layout.bytes)
            .map_err(|err| specialization.device.error(err))?;
        let epoch_counter = Arc::new(
            specialization
                .preemption
                .epoch_counters
                .take()
                .map_err(|err| specialization.device.error(err))?,
        );
        let addresses = Addresses {
            block: memory.address(),
            layout: &specialization.layout,
            weights: &specialization.weights,
        };
        let (mut real_time, mut best_effort) = (Vec::new(), Vec::new());
        for (index, step) in specialization.gpu.steps.iter().enumerate() {
            let layout = &specialization.layout;
            let bad = |why| DeviceError::BadPlan(format!("step '{}': {why}", step.name));
            let (rt, be) = (&step.choices[step.rt], &step.choices[best_effort_choice(step)]);
            real_time.push(addresses.patch(rt, layout.real_time_words(index)).map_err(bad)?);
            best_effort.push(addresses.patch(be, layout.best_effort_words(index)).map_err(bad)?);
        }
        let (graphs, chains, parts) = ([None, None], BTreeMap::new(), Vec::new());
        let counted = specialization
            .device
            .context()
            .resource_counts()
            .count(ResourceKind::Instance, specialization.layout.bytes);
        tracing::debug!(bytes = specialization.layout.bytes, "instance allocated");
        Ok(Instance {
            graphs,
            chains,
            parts,
            memory,
            epoch_counter,
            real_time,
            best_effort,
            has_run: false,
            _counted: counted,
        })
    }

    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// The run's epoch counter.
    pub(crate) fn epoch_counter(&self) -> &Arc<EpochCounter> {
        &self.epoch_counter
    }

    /// Enqueues the copy of all inputs, and of zeros to the fault words and, for best effort, to
    /// the control words.
    ///
    /// # Safety
    /// `staging` and this instance live until it is done, and `staging` is not written.
    pub(crate) unsafe fn copy_inputs(
        &self,
        specialization: &Specialization,
        staging: &PinnedBuffer,
        best_effort: bool,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let bytes = specialization.layout.copied_in(best_effort);
        debug_assert!(bytes <= staging.len(), "staging holds inputs and outputs");
        // SAFETY: inputs come first on both sides, each at least this long; the caller is
        // responsible for the lifetimes.
        unsafe {
            specialization.memory.input_copier.copy_in(
                stream,
                self.memory.address(),
                staging.as_ptr(),
                bytes,
            )
        }
    }

    /// Enqueues the copy of what is between inputs and outputs in `staging`, which
    /// [`Self::copy_inputs`] copies along with the inputs.
    ///
    /// # Safety
    /// As for [`Self::copy_inputs`].
    pub(crate) unsafe fn copy_words_after_inputs(
        &self,
        specialization: &Specialization,
        staging: &PinnedBuffer,
        best_effort: bool,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let at = specialization.layout.inputs_end();
        let bytes = specialization.layout.copied_in(best_effort) - at as usize;
        // SAFETY: the offset is the same on both sides; the caller is responsible for the
        // lifetimes.
        unsafe {
            let from = staging.as_ptr().add(at as usize);
            specialization.memory.input_copier.copy_in(stream, self.address() + at, from, bytes)
        }
    }

    /// Enqueues the copy of the control words, which are zero in `staging`.
    ///
    /// # Safety
    /// As for [`Self::copy_inputs`].
    pub(crate) unsafe fn copy_words(
        &self,
        specialization: &Specialization,
        staging: &PinnedBuffer,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let words = specialization.layout.words();
        let (at, bytes) = (words.start as usize, (words.end - words.start) as usize);
        debug_assert!(at + bytes <= staging.len(), "staging holds the words");
        // SAFETY: the offset is the same on both sides; the caller is responsible for the
        // lifetimes.
        unsafe {
            stream.copy_in(self.memory.address() + words.start, staging.as_ptr().add(at), bytes)
        }
    }

    /// Enqueues the copy of all outputs and fault words.
    ///
    /// # Safety
    /// `staging` and this instance live until it is done, and nothing else uses `staging`.
    pub(crate) unsafe fn copy_outputs(
        &self,
        specialization: &Specialization,
        staging: &PinnedBuffer,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let (from, to) = (specialization.layout.faults_at, specialization.layout.staged_bytes);
        debug_assert!(to as usize <= staging.len(), "staging holds inputs and outputs");
        // SAFETY: outputs and fault words have the same offsets on both sides; the caller is
        // responsible for the lifetimes.
        unsafe {
            let target = staging.as_ptr().add(from as usize);
            stream.copy_out(target, self.memory.address() + from, (to - from) as usize)
        }
    }

    /// Enqueues zeros to the fault words of steps from `first` on: a step that ran behind a
    /// preempted one may have read indices that were not computed yet.
    ///
    /// # Safety
    /// This instance lives until it is done, and belongs to this run alone.
    pub(crate) unsafe fn clear_faults(
        &self,
        specialization: &Specialization,
        first: usize,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let (at, count) = specialization.layout.fault_words(first);
        // SAFETY: words of this instance; the caller is responsible for the lifetimes.
        unsafe { stream.clear(self.address() + at, count) }
    }

    /// Enqueues step `index` as real time.
    ///
    /// # Safety
    /// This instance and `specialization` live until it is done, and the instance belongs to this
    /// run alone.
    pub(crate) unsafe fn launch_real_time(
        &self,
        specialization: &Specialization,
        index: usize,
        dependent: bool,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let bound = &specialization.kernels[index].real_time;
        let mut shape = bound.shape;
        let apart = specialization.kernels[index].apart;
        shape.dependent = dependent && !apart && specialization.device.has_dependent_launches();
        // SAFETY: the arguments were checked against the kernel's size, and every address in them
        // is of this instance or of weights that `specialization` holds.
        unsafe { stream.launch(bound.kernel.function(), shape, &[&self.real_time[index]]) }
    }

    /// Enqueues step `index` as best effort.
    ///
    /// # Safety
    /// As for real time; and the step's control words are zero, or those of this run's preempted
    /// launch when `restored`.
    pub(crate) unsafe fn launch_best_effort(
        &self,
        specialization: &Specialization,
        index: usize,
        how: BestEffortLaunch,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let block = self.control(specialization, index, how.restored).to_bytes();
        let bound = &specialization.kernels[index].best_effort;
        let function = bound.kernel.function();
        let mut shape = bound.shape;
        let apart = specialization.kernels[index].apart;
        shape.dependent = how.dependent && !apart && specialization.device.has_dependent_launches();
        // SAFETY: as for real time; the block has the layout of the kernel's second parameter.
        unsafe { stream.launch(function, shape, &[&self.best_effort[index], &block]) }
    }

    fn control(
        &self,
        specialization: &Specialization,
        index: usize,
        restored: bool,
    ) -> ControlBlock {
        let control = &specialization.layout.controls[index];
        let epoch_counter = match specialization.kernels[index].runs_to_end {
            true => specialization.preemption.epoch_counters.never_preempted_address(),
            false => self.epoch_counter.address(),
        };
        ControlBlock {
            epoch_counter,
            preempted: self.address() + control.preempted,
            next: self.address() + control.next,
            done: self.address() + control.done,
            tiles: control.tiles,
            restored,
        }
    }

    /// Enqueues `steps` as best effort with one launch on a stream of `target`, for which the chain
    /// is recorded; none of them was begun before.
    ///
    /// # Safety
    /// As for one step.
    pub(crate) unsafe fn launch_chain(
        &self,
        steps: &Range<usize>,
        target: LaunchTarget,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        match self.chain(steps, target) {
            // SAFETY: every address in the arguments is of this instance or of weights that
            // `specialization` holds.
            Some(graph) => unsafe { graph.launch(stream) },
            None => Err(CudaError::Misuse("the chain is not recorded")),
        }
    }

    fn chain(&self, steps: &Range<usize>, target: LaunchTarget) -> Option<&Graph> {
        let targets = self.chains.get(&(steps.start, steps.end));
        targets.and_then(|targets| targets[target as usize].as_ref())
    }

    /// Records the chain `steps` for `target`, unless it is recorded or RT activity leaves no time
    /// for it. Returns whether it is recorded.
    pub(crate) fn ensure_chain(
        &mut self,
        specialization: &Specialization,
        steps: &Range<usize>,
        target: LaunchTarget,
    ) -> Result<bool, CudaError> {
        // Recorded for the partition as well: a queue that is confined later does not run alone.
        let partition = (target == LaunchTarget::Low
            && specialization.recorder.partition.is_some())
        .then_some(LaunchTarget::Partition);
        for target in [Some(target), partition].into_iter().flatten() {
            let missing = self.chain(steps, target).is_none();
            // Sizes that come once are not worth a graph.
            if missing
                && self.has_run
                && (target == LaunchTarget::High
                    || specialization.preemption.rt_activity.may_record_graph())
            {
                self.record_chain(specialization, steps, target)?;
            }
        }
        Ok(self.chain(steps, target).is_some())
    }

    fn record_chain(
        &mut self,
        specialization: &Specialization,
        steps: &Range<usize>,
        target: LaunchTarget,
    ) -> Result<(), CudaError> {
        let graph = specialization.recorder.capture(target, |stream| {
            for index in steps.clone() {
                let how = BestEffortLaunch { restored: false, dependent: index > steps.start };
                // SAFETY: only recorded here; the launch of the graph is responsible for the
                // lifetimes.
                unsafe { self.launch_best_effort(specialization, index, how, stream) }?;
            }
            Ok(())
        })?;
        let targets = self.chains.entry((steps.start, steps.end)).or_default();
        targets[target as usize] = Some(graph);
        Ok(())
    }

    /// A run that used it has ended.
    pub(crate) fn end_run(&mut self) {
        self.has_run = true;
    }

    /// Enqueues the whole program as real time. It is one graph, unless the instance has neither
    /// that nor run before: instantiating one takes longer than to launch its kernels.
    ///
    /// # Safety
    /// As for one step.
    pub(crate) unsafe fn launch_whole(
        &mut self,
        specialization: &Specialization,
        priority: Priority,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        if self.has_run || self.graphs[priority as usize].is_some() {
            // SAFETY: the caller is responsible for the memory.
            return unsafe { self.graph(specialization, priority)?.launch(stream) };
        }
        for index in 0..specialization.kernels.len() {
            // SAFETY: as above.
            unsafe { self.launch_real_time(specialization, index, index > 0, stream) }?;
        }
        Ok(())
    }

    /// The whole program as real time in one graph of that priority, recorded on first use.
    pub(crate) fn graph(
        &mut self,
        specialization: &Specialization,
        priority: Priority,
    ) -> Result<&Graph, CudaError> {
        let target = priority as usize;
        if self.graphs[target].is_none() {
            let graph = self.record(specialization, 0..specialization.kernels.len(), priority)?;
            self.graphs[target] = Some(graph);
        }
        self.graphs[target].as_ref().ok_or(CudaError::Misuse("the graph is not recorded"))
    }

    /// `steps` as real time in one graph.
    fn record(
        &self,
        specialization: &Specialization,
        steps: Range<usize>,
        priority: Priority,
    ) -> Result<Graph, CudaError> {
        let first = steps.start;
        specialization.recorder.capture(priority.into(), |stream| {
            for index in steps {
                // SAFETY: only recorded here; the launch of the graph is responsible for the
                // lifetimes.
                unsafe { self.launch_real_time(specialization, index, index > first, stream) }?;
            }
            Ok(())
        })
    }

    /// Records the graph of real time ahead of its first use, in a gap of RT activity.
    pub(crate) fn prepare_graph(
        &mut self,
        specialization: &Specialization,
    ) -> Result<(), CudaError> {
        if self.graphs[Priority::High as usize].is_none() {
            specialization.preemption.rt_activity.wait_for_gap(GAP_WAIT);
        }
        self.graph(specialization, Priority::High).map(drop)
    }

    /// Records the chains of best effort in gaps, as far as there are gaps.
    pub(crate) fn prepare_chains(
        &mut self,
        specialization: &Specialization,
    ) -> Result<(), CudaError> {
        let began = Instant::now();
        let partition = specialization.recorder.partition.as_ref().map(|_| LaunchTarget::Partition);
        for steps in specialization.chain_parts() {
            for target in [Some(LaunchTarget::Low), partition].into_iter().flatten() {
                if self.chain(&steps, target).is_some() {
                    continue;
                }
                if !specialization.preemption.rt_activity.wait_for_gap(GAP_WAIT)
                    && began.elapsed() > CHAINS_WAIT
                {
                    return Ok(());
                }
                self.record_chain(specialization, &steps, target)?;
            }
        }
        Ok(())
    }

    /// Records what [`Instance::launch_arriving`] launches, in gaps.
    pub(crate) fn prepare_parts(
        &mut self,
        specialization: &Specialization,
    ) -> Result<(), CudaError> {
        let record = |part: &PlanPart| {
            specialization.preemption.rt_activity.wait_for_gap(GAP_WAIT);
            self.record(specialization, part.steps.clone(), Priority::High)
        };
        self.parts = specialization.parts.iter().map(record).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Enqueues the whole program as real time, each part behind the weights it needs.
    ///
    /// # Safety
    /// As for one step.
    pub(crate) unsafe fn launch_arriving(
        &mut self,
        specialization: &Specialization,
        arrival: &WeightArrival,
        priority: Priority,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let parted = priority == Priority::High && self.parts.len() == specialization.parts.len();
        if !parted {
            arrival.block_stream(stream, u64::MAX)?;
            // SAFETY: the caller is responsible for the memory.
            return unsafe { self.graph(specialization, priority)?.launch(stream) };
        }
        for (part, graph) in specialization.parts.iter().zip(&self.parts) {
            arrival.block_stream(stream, part.needs)?;
            // SAFETY: as above.
            unsafe { graph.launch(stream) }?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_block_has_the_layout_of_the_kernel() {
        let block = ControlBlock {
            epoch_counter: 0x1111,
            preempted: 0x5555,
            next: 0x2222,
            done: 0x3333,
            tiles: 5,
            restored: true,
        };
        let bytes = block.to_bytes();
        let address =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let addresses = [0, 8, 16, 24].map(address);
        assert_eq!(addresses, [0x1111, 0x5555, 0x2222, 0x3333]);
        assert_eq!([word(32), word(36)], [5, 1]);
    }
}
