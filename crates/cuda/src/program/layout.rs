//! The memory layout of one run: one block of device memory, whose addresses are patched into
//! kernel arguments.

use model::gpu::{GpuPlan, GpuStep, Launch, MemoryLocation, Patch, TensorMap};

use crate::driver::encode_map;
use crate::preempt::best_effort_variant::best_effort_choice;

/// Alignment of whatever a kernel reads in vectors.
const ALIGN: u64 = 256;

/// Bytes of a fault word.
const WORD: u64 = 4;

/// Offsets into a run's block. The first part has the same layout in the staging buffer: inputs;
/// control words of best effort, which are always zero there, so that the copy of inputs clears
/// them; fault words; outputs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    inputs: Vec<u64>,
    inputs_end: u64,
    outputs: Vec<u64>,
    /// Steps with a fault word, in order; the words are adjacent.
    faults: Vec<usize>,
    /// Offset of the fault words: they are cleared with the copy of inputs and copied back with the
    /// outputs.
    pub(crate) faults_at: u64,
    /// Offset of the outputs; everything before is copied to the device.
    pub(crate) outputs_at: u64,
    /// End of the outputs: the size of the staging buffer.
    pub(crate) staged_bytes: u64,
    arena: u64,
    workspace: u64,
    /// Arrival words of each step's RT launch, always zero between launches.
    real_time_arrivals: Vec<u64>,
    /// Control words of each step, adjacent.
    pub(crate) controls: Vec<StepControl>,
    /// Size of the block.
    pub(crate) bytes: u64,
}

/// Control words of a best-effort launch: whether a block was preempted, the tile counter, a done
/// bit per tile, and arrival counts of split products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepControl {
    pub(crate) preempted: u64,
    pub(crate) next: u64,
    pub(crate) done: u64,
    pub(crate) arrivals: u64,
    /// Offset of the next step's words.
    pub(crate) end: u64,
    pub(crate) tiles: u32,
}

/// Whether `launch` may store to its step's fault word.
fn may_fault(launch: &Launch) -> bool {
    launch.patches.iter().any(|patch| patch.to == MemoryLocation::Fault)
}

/// Hands out aligned offsets.
struct OffsetAllocator(u64);

impl OffsetAllocator {
    fn take(&mut self, bytes: u64, align: u64) -> u64 {
        let at = self.0.next_multiple_of(align);
        self.0 = at + bytes;
        at
    }
}

/// The launches that a run's memory is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchSet {
    /// The launches that runs use.
    Selected,
    /// All variants, to compare them.
    All,
}

impl LaunchSet {
    /// The launches of `step` that may run.
    fn of(self, step: &GpuStep) -> Vec<&Launch> {
        match self {
            LaunchSet::Selected => {
                vec![&step.choices[step.rt], &step.choices[best_effort_choice(step)]]
            }
            LaunchSet::All => step.choices.iter().collect(),
        }
    }

    /// Workspace they need. A variant that is not selected may need more than all activations
    /// together.
    fn workspace_bytes(self, plan: &GpuPlan) -> u64 {
        let launches = plan.steps.iter().flat_map(|step| self.of(step));
        launches.map(|launch| launch.workspace_bytes).max().unwrap_or(0)
    }
}

/// Device memory of one run of `plan` with the variants selected in it.
pub fn run_bytes(plan: &GpuPlan) -> u64 {
    Layout::new(plan, LaunchSet::Selected).bytes
}

impl Layout {
    pub(crate) fn new(plan: &GpuPlan, choices: LaunchSet) -> Layout {
        let mut offsets = OffsetAllocator(0);
        let inputs = plan.inputs.iter().map(|slot| offsets.take(slot.bytes, ALIGN)).collect();
        let inputs_end = offsets.0;
        offsets.take(0, ALIGN);
        let words = |launch: &Launch| u64::from(launch.arrivals) * 4;
        let controls = plan
            .steps
            .iter()
            .map(|step| {
                let launch = &step.choices[best_effort_choice(step)];
                let preempted = offsets.take(WORD, WORD);
                let next = offsets.take(WORD, WORD);
                let done = offsets.take(u64::from(launch.tiles.div_ceil(32)) * 4, 4);
                let arrivals = offsets.take(words(launch), 4);
                StepControl { preempted, next, done, arrivals, end: offsets.0, tiles: launch.tiles }
            })
            .collect();
        let faults: Vec<usize> = (0..plan.steps.len())
            .filter(|index| plan.steps[*index].choices.iter().any(may_fault))
            .collect();
        let faults_at = offsets.take(faults.len() as u64 * WORD, ALIGN);
        let outputs_at = offsets.take(0, ALIGN);
        let outputs = plan.outputs.iter().map(|slot| offsets.take(slot.bytes, ALIGN)).collect();
        let staged_bytes = offsets.0;
        let arena = offsets.take(plan.arena_bytes, ALIGN);
        let workspace = offsets.take(choices.workspace_bytes(plan), ALIGN);
        offsets.take(0, ALIGN);
        let real_time_arrivals = plan
            .steps
            .iter()
            .map(|step| {
                offsets.take(choices.of(step).into_iter().map(words).max().unwrap_or(0), 16)
            })
            .collect();
        let bytes = offsets.take(0, ALIGN);
        Layout {
            inputs,
            inputs_end,
            outputs,
            faults,
            faults_at,
            outputs_at,
            staged_bytes,
            arena,
            workspace,
            real_time_arrivals,
            controls,
            bytes,
        }
    }

    /// Bytes from the beginning that are copied to the device before the first step, with or
    /// without control words.
    pub(crate) fn copied_in(&self, best_effort: bool) -> usize {
        let words = best_effort || !self.faults.is_empty();
        (if words { self.outputs_at } else { self.inputs_end }) as usize
    }

    /// End of the inputs.
    pub(crate) fn inputs_end(&self) -> u64 {
        self.inputs_end
    }

    /// The control words of all steps.
    pub(crate) fn words(&self) -> std::ops::Range<u64> {
        let end = self.controls.last().map_or(self.inputs_end, |control| control.end);
        self.controls.first().map_or(end, |control| control.preempted)..end
    }

    /// Offset of input `index`, on the device and in the staging buffer.
    pub(crate) fn input(&self, index: usize) -> u64 {
        self.inputs[index]
    }

    /// Offset of output `index`, on the device and in the staging buffer.
    pub(crate) fn output(&self, index: usize) -> u64 {
        self.outputs[index]
    }

    /// Words of step `index` as real time.
    pub(crate) fn real_time_words(&self, index: usize) -> StepWords {
        StepWords { arrivals: self.real_time_arrivals[index], fault: self.fault(index) }
    }

    /// Words of step `index` as best effort.
    pub(crate) fn best_effort_words(&self, index: usize) -> StepWords {
        StepWords { arrivals: self.controls[index].arrivals, fault: self.fault(index) }
    }

    /// Offset of the fault word of step `index`, if it has one.
    fn fault(&self, index: usize) -> Option<u64> {
        let place = self.faults.binary_search(&index).ok()?;
        Some(self.faults_at + place as u64 * WORD)
    }

    /// Offset and number of the fault words of steps from `first` on.
    pub(crate) fn fault_words(&self, first: usize) -> (u64, usize) {
        let before = self.faults.partition_point(|step| *step < first);
        (self.faults_at + before as u64 * WORD, self.faults.len() - before)
    }

    /// The first step that reported a fault, read from the staging buffer after the copy of
    /// outputs.
    pub(crate) fn faulted(&self, staging: &[u8]) -> Option<usize> {
        let words = staging.get(self.faults_at as usize..)?.chunks_exact(WORD as usize);
        let is_set = |(_, word): &(&usize, &[u8])| word.iter().any(|byte| *byte != 0);
        self.faults.iter().zip(words).find(is_set).map(|(step, _)| *step)
    }

    /// Offset and number of the control words of `steps`.
    pub(crate) fn control_words(&self, steps: std::ops::Range<usize>) -> (u64, usize) {
        match self.controls.get(steps.clone()) {
            None | Some([]) => (0, 0),
            Some(controls) => {
                let (begin, end) = (controls[0].preempted, controls[controls.len() - 1].end);
                (begin, ((end - begin) / 4) as usize)
            }
        }
    }
}

/// Words that belong to one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepWords {
    /// Offset of its arrival words.
    arrivals: u64,
    /// Offset of its fault word.
    fault: Option<u64>,
}

/// Addresses of one run.
pub(crate) struct Addresses<'a> {
    /// The run's block of memory.
    pub(crate) block: u64,
    pub(crate) layout: &'a Layout,
    /// Each weight's address and size.
    pub(crate) weights: &'a [(u64, u64)],
}

impl Addresses<'_> {
    fn resolve(&self, place: MemoryLocation, words: StepWords) -> Option<u64> {
        let at = |base: u64, offset: u64| self.block.checked_add(base)?.checked_add(offset);
        match place {
            MemoryLocation::Arena(offset) => at(self.layout.arena, offset),
            MemoryLocation::Workspace(offset) => at(self.layout.workspace, offset),
            MemoryLocation::Arrivals => at(words.arrivals, 0),
            MemoryLocation::Fault => at(words.fault?, 0),
            MemoryLocation::Weight(index, offset) => {
                let (address, bytes) = self.weights.get(index as usize)?;
                (offset <= *bytes).then(|| address + offset)
            }
            MemoryLocation::Input(index, offset) => {
                at(*self.layout.inputs.get(index as usize)?, offset)
            }
            MemoryLocation::Output(index, offset) => {
                at(*self.layout.outputs.get(index as usize)?, offset)
            }
        }
    }

    /// The arguments of `launch` with addresses patched in.
    pub(crate) fn patch(&self, launch: &Launch, words: StepWords) -> Result<Vec<u8>, String> {
        let mut args = launch.args.clone();
        for Patch { at, to } in &launch.patches {
            let address = self
                .resolve(*to, words)
                .ok_or_else(|| format!("{to:?} of variant '{}' does not exist", launch.variant))?;
            let at = *at as usize;
            let field = args.get_mut(at..at.saturating_add(8)).ok_or_else(|| {
                format!("an address at byte {at} is past the arguments of '{}'", launch.variant)
            })?;
            field.copy_from_slice(&address.to_le_bytes());
        }
        for map in &launch.maps {
            let (at, to) = (map.at as usize, map.to);
            let address = self
                .resolve(to, words)
                .ok_or_else(|| format!("{to:?} of variant '{}' does not exist", launch.variant))?;
            let field = args.get_mut(at..at.saturating_add(TensorMap::BYTES)).ok_or_else(|| {
                format!("a tensor map at byte {at} is past the arguments of '{}'", launch.variant)
            })?;
            let encoded = encode_map(map, address)
                .map_err(|err| format!("a tensor map of variant '{}': {err}", launch.variant))?;
            field.copy_from_slice(&encoded);
        }
        Ok(args)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use model::DataType;
    use model::gpu::{GpuStep, IoTensor, TilePreemption};

    pub(crate) fn slot(bytes: u64) -> IoTensor {
        IoTensor { name: "x".into(), dtype: DataType::U8, shape: vec![bytes as usize], bytes }
    }

    pub(crate) fn launch(tiles: u32, arrivals: u32) -> Launch {
        Launch {
            variant: "only".to_string(),
            kernel: 0,
            tiles,
            rt_blocks: tiles,
            overlaps: false,
            cluster: 1,
            arrivals,
            workspace_bytes: 0,
            args: vec![0; 24],
            patches: vec![],
            maps: vec![],
        }
    }

    pub(crate) fn step(launch: Launch) -> GpuStep {
        GpuStep {
            name: "s".into(),
            op: "Map".into(),
            signature: "map".into(),
            choices: vec![launch],
            rt: 0,
            be: 0,
            preemption: TilePreemption::InsideTile,
            flops: 0,
            bytes: 0,
            reads: vec![],
            writes: vec![],
        }
    }

    fn plan() -> GpuPlan {
        GpuPlan {
            inputs: vec![slot(10), slot(300)],
            outputs: vec![slot(5)],
            steps: vec![step(Launch { workspace_bytes: 64, ..launch(33, 2) }), step(launch(1, 0))],
            arena_bytes: 1000,
            workspace_bytes: 4096,
            ..GpuPlan::default()
        }
    }

    #[test]
    fn sections_are_aligned_and_disjoint() {
        let layout = Layout::new(&plan(), LaunchSet::Selected);
        assert_eq!(layout.inputs, [0, 256]);
        assert_eq!((layout.outputs_at, layout.outputs[0]), (1024, 1024));
        assert_eq!(layout.staged_bytes, 1029);
        assert_eq!((layout.arena, layout.workspace), (1280, 2304));
        assert_eq!((layout.copied_in(false), layout.copied_in(true)), (556, 1024));
        assert!(layout.real_time_arrivals[0] >= 2304 + 64);
        let [first, second] = layout.controls[..] else { panic!("two steps") };
        assert_eq!((first.preempted, layout.words().start), (768, 768));
        // The preempted word, the tile counter, two words for 33 tiles, two arrivals; then the next
        // step.
        assert_eq!((first.done - first.preempted, first.arrivals - first.preempted), (8, 16));
        assert_eq!(second.preempted, first.preempted + 24);
        assert_eq!(layout.control_words(0..2), (first.preempted, 9));
        assert_eq!(layout.control_words(1..2), (second.preempted, 3));
        assert_eq!(layout.control_words(2..2).1, 0);
        assert!(layout.outputs_at >= second.end);
    }

    #[test]
    fn only_selected_variants_have_a_workspace() {
        let split = Launch { workspace_bytes: 4096, ..launch(33, 300) };
        let mut plan = plan();
        plan.steps[1].choices.push(split);
        let offsets = |plan: &GpuPlan, choices| Layout::new(plan, choices).bytes;
        let plain = offsets(&plan, LaunchSet::Selected);
        assert_eq!(plain, run_bytes(&plan));
        // Workspaces of 4096 or 64 bytes, 1200 or 8 bytes of arrivals, each rounded up.
        assert_eq!(offsets(&plan, LaunchSet::All) - plain, (4096 - 256) + (1280 - 256));
        // Real time uses it; best effort of a short step uses the same.
        plan.steps[1].rt = 1;
        assert!(offsets(&plan, LaunchSet::Selected) >= offsets(&plan, LaunchSet::All));
        (plan.steps[1].rt, plan.steps[1].be) = (0, 1);
        assert_eq!(offsets(&plan, LaunchSet::Selected), plain, "a short step is no loop");
        plan.steps[1].flops = 60_000_000_000;
        assert!(offsets(&plan, LaunchSet::Selected) > plain + 4000, "a long one is");
    }

    #[test]
    fn addresses_are_patched_into_arguments() {
        let plan = plan();
        let layout = Layout::new(&plan, LaunchSet::Selected);
        let weights = [(0x5000, 100)];
        let addresses = Addresses { block: 0x10_0000, layout: &layout, weights: &weights };
        let words = StepWords { arrivals: 4096, fault: None };
        let mut launch = launch(1, 1);
        launch.patches = vec![
            Patch { at: 0, to: MemoryLocation::Weight(0, 16) },
            Patch { at: 8, to: MemoryLocation::Output(0, 4) },
            Patch { at: 16, to: MemoryLocation::Arrivals },
        ];
        let args = addresses.patch(&launch, words).expect("all addresses exist");
        let word =
            |at: usize| u64::from_le_bytes(args[at..at + 8].try_into().expect("eight bytes"));
        assert_eq!(word(0), 0x5010);
        assert_eq!(word(8), 0x10_0000 + 1024 + 4);
        assert_eq!(word(16), 0x10_0000 + 4096);
    }

    /// Four steps, of which the second and the last may fault.
    fn faulting() -> GpuPlan {
        let wary =
            Launch { patches: vec![Patch { at: 0, to: MemoryLocation::Fault }], ..launch(1, 0) };
        let steps = [launch(1, 0), wary.clone(), launch(1, 0), wary].map(step);
        GpuPlan { steps: steps.into(), ..plan() }
    }

    #[test]
    fn fault_words_are_between_inputs_and_outputs() {
        let (without, layout) = (
            Layout::new(&plan(), LaunchSet::Selected),
            Layout::new(&faulting(), LaunchSet::Selected),
        );
        assert_eq!(without.faults_at, without.outputs_at, "nothing is copied for nothing");
        assert_eq!((layout.inputs[1], layout.faults_at, layout.outputs_at), (256, 1024, 1280));
        for words in [Layout::real_time_words, Layout::best_effort_words] {
            let faults = [0, 1, 2, 3].map(|index| words(&layout, index).fault);
            assert_eq!(faults, [None, Some(1024), None, Some(1028)]);
        }
        let words = [0, 1, 2, 4].map(|first| layout.fault_words(first));
        assert_eq!(words, [(1024, 2), (1024, 2), (1028, 1), (1032, 0)]);
        let addresses = Addresses { block: 0x1000, layout: &layout, weights: &[] };
        let wary = &faulting().steps[3].choices[0];
        let args = addresses.patch(wary, layout.best_effort_words(3)).expect("it has a word");
        assert_eq!(args[..8], 0x1404u64.to_le_bytes());
        assert!(addresses.patch(wary, layout.best_effort_words(0)).is_err(), "it has none");
    }

    #[test]
    fn reports_the_first_step_that_faulted() {
        let layout = Layout::new(&faulting(), LaunchSet::Selected);
        let mut staging = vec![0; layout.staged_bytes as usize];
        // What surrounds the words is ignored.
        staging[..1024].fill(0xff);
        staging[1032..].fill(0xff);
        assert_eq!(layout.faulted(&staging), None);
        staging[1028] = 1;
        assert_eq!(layout.faulted(&staging), Some(3));
        staging[1024] = 1;
        assert_eq!(layout.faulted(&staging), Some(1));
        let without = Layout::new(&plan(), LaunchSet::Selected);
        assert_eq!(without.faulted(&vec![0xff; without.staged_bytes as usize]), None);
    }

    #[test]
    fn refuses_addresses_that_do_not_exist() {
        let plan = plan();
        let layout = Layout::new(&plan, LaunchSet::Selected);
        let addresses = Addresses { block: 0, layout: &layout, weights: &[(0, 8)] };
        let refuse = |patch: Patch| {
            let launch = Launch { patches: vec![patch], ..launch(1, 0) };
            addresses.patch(&launch, layout.real_time_words(0)).expect_err("an unknown address")
        };
        assert!(refuse(Patch { at: 20, to: MemoryLocation::Arena(0) }).contains("byte 20"));
        assert!(refuse(Patch { at: 0, to: MemoryLocation::Weight(1, 0) }).contains("Weight"));
        assert!(refuse(Patch { at: 0, to: MemoryLocation::Weight(0, 9) }).contains("Weight"));
        assert!(refuse(Patch { at: 0, to: MemoryLocation::Input(2, 0) }).contains("Input"));
    }
}
