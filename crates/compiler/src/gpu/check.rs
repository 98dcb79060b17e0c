//! Checker of GPU plans. It uses the plan only, not the code that made it.

use model::gpu::{
    GpuPlan, GpuStep, Launch, MemoryLocation, MemoryRange, TensorMap, TilePreemption,
};

/// All defects of `plan`; empty when it is valid.
pub fn faults(plan: &GpuPlan) -> Vec<String> {
    let mut faults = Vec::new();
    let mut written = WrittenRanges::default();
    for (index, step) in plan.steps.iter().enumerate() {
        let mut fault = |what: String| faults.push(format!("step {index} ({}): {what}", step.name));
        check_choices(plan, step, &mut fault);
        for range in step.reads.iter().chain(&step.writes) {
            if !is_inside(plan, range) {
                fault(format!("{range:?} reaches beyond its memory"));
            }
        }
        for range in &step.reads {
            if !written.covers(range) {
                fault(format!("{range:?} is read before it is written"));
            }
        }
        for range in &step.writes {
            if matches!(range.start, MemoryLocation::Input(..) | MemoryLocation::Weight(..)) {
                fault(format!("{range:?} is written and must not be"));
            }
            written.add(range);
        }
    }
    for (index, slot) in plan.outputs.iter().enumerate() {
        let range =
            MemoryRange { start: MemoryLocation::Output(index as u32, 0), bytes: slot.bytes };
        if slot.bytes > 0 && !written.covers(&range) {
            faults.push(format!("output '{}' is not written", slot.name));
        }
    }
    faults
}

fn check_choices(plan: &GpuPlan, step: &GpuStep, fault: &mut impl FnMut(String)) {
    if step.rt >= step.choices.len() || step.be >= step.choices.len() {
        return fault("its choice does not exist".to_string());
    }
    if step.choices[step.be].cluster > 1 {
        fault("best effort must not need blocks that run together".to_string());
    }
    if matches!(&step.preemption, TilePreemption::AtTileBoundary(why) if why.is_empty()) {
        fault("no reason why tiles must finish".to_string());
    }
    for launch in &step.choices {
        check_launch(plan, launch, fault);
    }
}

fn check_launch(plan: &GpuPlan, launch: &Launch, fault: &mut impl FnMut(String)) {
    let Some(kernel) = plan.kernels.get(launch.kernel) else {
        return fault(format!("{}: its kernel does not exist", launch.variant));
    };
    if launch.args.len() != kernel.args_bytes as usize {
        fault(format!("{}: arguments of another size than the kernel's", launch.variant));
    }
    if launch.tiles == 0 || launch.cluster == 0 || !launch.tiles.is_multiple_of(launch.cluster) {
        fault(format!(
            "{}: {} tiles in clusters of {}",
            launch.variant, launch.tiles, launch.cluster
        ));
    }
    if launch.rt_blocks == 0 || !launch.rt_blocks.is_multiple_of(launch.cluster.max(1)) {
        fault(format!("{}: a grid of {} blocks", launch.variant, launch.rt_blocks));
    }
    for map in &launch.maps {
        let at = map.at as usize;
        if at + TensorMap::BYTES > launch.args.len() || !at.is_multiple_of(TensorMap::BYTES) {
            fault(format!("{}: a tensor map at byte {}", launch.variant, map.at));
        }
        if !is_inside(plan, &MemoryRange { start: map.to, bytes: map.extent() }) {
            fault(format!("{}: {:?} is smaller than its tensor map", launch.variant, map.to));
        }
    }
    for patch in &launch.patches {
        if patch.at as usize + 8 > launch.args.len() || patch.at % 8 != 0 {
            fault(format!("{}: an address at byte {}", launch.variant, patch.at));
        }
        // A device provides only the workspace that launches declare.
        let bytes = match patch.to {
            MemoryLocation::Workspace(_) => launch.workspace_bytes,
            _ => 1,
        };
        if !is_inside(plan, &MemoryRange { start: patch.to, bytes }) {
            fault(format!("{}: {:?} does not exist", launch.variant, patch.to));
        }
    }
}

fn is_inside(plan: &GpuPlan, range: &MemoryRange) -> bool {
    let (offset, size) = match range.start {
        MemoryLocation::Arena(offset) => (offset, plan.arena_bytes),
        MemoryLocation::Workspace(offset) => (offset, plan.workspace_bytes),
        MemoryLocation::Arrivals | MemoryLocation::Fault => return true,
        MemoryLocation::Weight(index, offset) => {
            (offset, plan.weights.get(index as usize).map_or(0, |weight| weight.bytes))
        }
        MemoryLocation::Input(index, offset) => {
            (offset, plan.inputs.get(index as usize).map_or(0, |slot| slot.bytes))
        }
        MemoryLocation::Output(index, offset) => {
            (offset, plan.outputs.get(index as usize).map_or(0, |slot| slot.bytes))
        }
    };
    offset.checked_add(range.bytes).is_some_and(|end| end <= size)
}

/// The ranges of bytes written so far.
#[derive(Default)]
struct WrittenRanges {
    arena: Vec<(u64, u64)>,
    outputs: Vec<(u32, u64, u64)>,
}

impl WrittenRanges {
    fn add(&mut self, range: &MemoryRange) {
        match range.start {
            MemoryLocation::Arena(offset) => {
                let (mut start, mut end) = (offset, offset + range.bytes);
                self.arena.retain(|(from, to)| {
                    let apart = *to < start || end < *from;
                    if !apart {
                        (start, end) = (start.min(*from), end.max(*to));
                    }
                    apart
                });
                self.arena.push((start, end));
            }
            MemoryLocation::Output(index, offset) => {
                self.outputs.push((index, offset, offset + range.bytes));
            }
            _ => {}
        }
    }

    fn covers(&self, range: &MemoryRange) -> bool {
        match range.start {
            MemoryLocation::Arena(offset) => {
                let end = offset + range.bytes;
                self.arena.iter().any(|(from, to)| *from <= offset && end <= *to)
            }
            MemoryLocation::Output(index, offset) => {
                let end = offset + range.bytes;
                self.outputs
                    .iter()
                    .any(|(i, from, to)| *i == index && *from <= offset && end <= *to)
            }
            _ => true,
        }
    }
}
