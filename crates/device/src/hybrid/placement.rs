//! Which steps of a plan run on the host: those that the accelerator refuses, and cheap ones whose
//! operands are on the host anyway.

use std::collections::{BTreeSet, HashSet};

use model::op::Op;
use model::{DataType, Dim, LaunchPlan, ValueId};

use super::section::{self, Section, Side, sizes_of};
use crate::{Device, DeviceError, HostSection, HostStep};

/// Elements up to which a value is small: copying it costs more than computing it.
const SMALL: usize = 16 * 1024;

/// The size that symbols count as when it is decided whether a value is small.
const TYPICAL_SIZE: usize = 32;

/// Why a step runs on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostReason {
    /// The accelerator has no kernel: its reason.
    Refused(String),
    /// It is cheap, and its operands are computed on the host.
    Cheap,
}

impl HostReason {
    fn text(&self) -> String {
        match self {
            HostReason::Refused(why) => why.clone(),
            HostReason::Cheap => {
                "cheap, and the host computes what it reads: copies would cost more".to_string()
            }
        }
    }
}

/// Where the steps of a plan run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// For every step why it runs on the host; `None` on the accelerator.
    pub host: Vec<Option<HostReason>>,
}

impl Placement {
    /// Why step `index` runs on the host; `None` on the accelerator.
    pub fn reason(&self, index: usize) -> Option<String> {
        self.host.get(index)?.as_ref().map(HostReason::text)
    }

    /// For every step whether it runs on the host.
    pub fn on_host(&self) -> Vec<bool> {
        self.host.iter().map(Option::is_some).collect()
    }
}

/// Places the steps of `plan`; `None` when `accelerator` runs all of them. Fails when neither
/// device runs a step.
///
/// What the accelerator refuses because of an earlier step is not known before the plan is cut
/// there: sizes that depend on data are numbers to the section behind. So sections are cut and
/// checked until all of them are accepted.
pub(super) fn place(
    accelerator: &dyn Device,
    host: &dyn Device,
    plan: &LaunchPlan,
) -> Result<Option<Placement>, DeviceError> {
    plan.check().map_err(|err| DeviceError::BadPlan(err.to_string()))?;
    let mut placement = Placement { host: vec![None; plan.steps.len()] };
    let mut accepted: HashSet<Vec<usize>> = HashSet::new();
    loop {
        let mut changed = false;
        for section in section::cut(plan, &placement.on_host()) {
            if section.side == Side::Host || accepted.contains(&section.steps) {
                continue;
            }
            let refused = accelerator.unsupported_steps(&with_numbers(&section));
            if refused.is_empty() {
                accepted.insert(section.steps);
                continue;
            }
            mark(plan, &section, &refused, &mut placement);
            changed = true;
        }
        if !changed {
            break;
        }
        keep_cheap_steps(plan, &mut placement);
    }
    if placement.host.iter().all(Option::is_none) {
        return Ok(None);
    }
    for section in section::cut(plan, &placement.on_host()) {
        if section.side == Side::Host
            && let Some(err) = host.unsupported_steps(&section.plan).into_iter().next()
        {
            return Err(err);
        }
    }
    Ok(Some(placement))
}

/// The section's plan with the numbers of its steps as their names: names need not be unique, and
/// refusals are matched by name.
fn with_numbers(section: &Section) -> LaunchPlan {
    let mut plan = (*section.plan).clone();
    for (step, index) in plan.steps.iter_mut().zip(&section.steps) {
        step.name = index.to_string();
    }
    plan
}

/// Moves steps of `section` to the host because of what was refused; at least one.
///
/// A step with refused ancestors is often refused only because of them: their results have no known
/// shape. It is moved only if the shapes of its operands are known in the plan.
fn mark(plan: &LaunchPlan, section: &Section, refused: &[DeviceError], placement: &mut Placement) {
    let mut reasons: Vec<(usize, &str)> = Vec::new();
    let mut of_section: Option<String> = None;
    for err in refused {
        match err {
            DeviceError::Unsupported { step, reason, .. } => match step.parse::<usize>() {
                Ok(index) if section.steps.contains(&index) => reasons.push((index, reason)),
                _ => of_section = Some(reason.clone()),
            },
            err => of_section = Some(err.to_string()),
        }
    }
    let named: BTreeSet<usize> = reasons.iter().map(|(index, _)| *index).collect();
    let behind = steps_behind(plan, section, &named);
    let known = |index: usize| {
        let shape = |id: &ValueId| plan.value(*id).shape.as_ref();
        let known = |id| shape(id).is_some_and(|dims| !dims.contains(&Dim::Unknown));
        plan.steps[index].inputs.iter().flatten().all(known)
    };
    let mut moved = false;
    for (index, reason) in reasons {
        if !behind.contains(&index) || known(index) {
            placement.host[index] = Some(HostReason::Refused(reason.to_string()));
            moved = true;
        }
    }
    let Some(reason) = of_section.filter(|_| !moved) else { return };
    // The section's inputs or outputs are refused: values that cannot be on the accelerator.
    let odd = |id: &ValueId| {
        let value = plan.value(*id);
        let outside = section.inputs.contains(id) || section.outputs.contains(id);
        outside && (value.dtype == DataType::String || value.shape.is_none())
    };
    let touches = |index: &&usize| {
        let step = &plan.steps[**index];
        step.inputs.iter().chain(&step.outputs).flatten().any(odd)
    };
    let mut steps: Vec<usize> = section.steps.iter().filter(touches).copied().collect();
    if steps.is_empty() {
        steps.clone_from(&section.steps);
    }
    for index in steps {
        placement.host[index] = Some(HostReason::Refused(reason.clone()));
    }
}

/// The steps of `section` that depend on one of `on`.
fn steps_behind(plan: &LaunchPlan, section: &Section, on: &BTreeSet<usize>) -> BTreeSet<usize> {
    let mut tainted: HashSet<ValueId> = HashSet::new();
    let mut behind = BTreeSet::new();
    for index in &section.steps {
        let step = &plan.steps[*index];
        let depends = step.inputs.iter().flatten().any(|id| tainted.contains(id));
        if depends {
            behind.insert(*index);
        }
        if depends || on.contains(index) {
            tainted.extend(step.outputs.iter().flatten());
        }
    }
    behind
}

/// Moves cheap steps to the host where the host computes what they read: shapes, indices, and
/// elements whose number depends on data.
fn keep_cheap_steps(plan: &LaunchPlan, placement: &mut Placement) {
    let mut of_host: HashSet<ValueId> = HashSet::new();
    let elsewhere: HashSet<ValueId> =
        plan.inputs.iter().chain(plan.constants.iter().map(|(id, _)| id)).copied().collect();
    for (index, step) in plan.steps.iter().enumerate() {
        let mut operands = step.inputs.iter().flatten();
        let reads_host = operands.clone().any(|id| of_host.contains(id));
        let only_host = operands.all(|id| of_host.contains(id) || elsewhere.contains(id));
        if placement.host[index].is_none() && reads_host && only_host && is_cheap(plan, index) {
            placement.host[index] = Some(HostReason::Cheap);
        }
        if placement.host[index].is_some() {
            of_host.extend(step.outputs.iter().flatten());
        }
    }
}

/// Whether a step costs less than the copy of its operands to an accelerator.
fn is_cheap(plan: &LaunchPlan, index: usize) -> bool {
    let step = &plan.steps[index];
    if !moves_or_maps(&step.op) {
        return false;
    }
    if matches!(step.op, Op::Shape { .. } | Op::Size) {
        return true;
    }
    let is_small = |id: &ValueId| {
        let Some(dims) = plan.value(*id).shape.as_ref() else { return true };
        if dims.contains(&Dim::Unknown) {
            return true;
        }
        let symbols = dims.iter().flat_map(|dim| model::dim::SymDim::from(dim).symbols());
        let typical: Vec<(String, usize)> = symbols.map(|name| (name, TYPICAL_SIZE)).collect();
        let count = sizes_of(dims, &typical);
        let count = count.and_then(|sizes| model::tensor::element_count(&sizes).ok());
        count.is_some_and(|count| count <= SMALL)
    };
    step.outputs.iter().flatten().all(is_small)
}

/// Whether an operator does a few operations per element.
fn moves_or_maps(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Variadic(_)
            | Op::Where
            | Op::Clip
            | Op::Cast(_)
            | Op::Identity
            | Op::Reduce(_)
            | Op::ArgReduce(_)
            | Op::CumSum { .. }
            | Op::TopK { .. }
            | Op::NonZero
            | Op::Shape { .. }
            | Op::Size
            | Op::Reshape { .. }
            | Op::Flatten { .. }
            | Op::Squeeze
            | Op::Unsqueeze
            | Op::Transpose { .. }
            | Op::Expand
            | Op::Tile
            | Op::Concat { .. }
            | Op::Split { .. }
            | Op::Slice
            | Op::Gather { .. }
            | Op::GatherElements { .. }
            | Op::GatherNd { .. }
            | Op::ScatterElements { .. }
            | Op::ScatterNd { .. }
            | Op::OneHot { .. }
            | Op::Range
            | Op::ConstantOfShape { .. }
            | Op::Compress { .. }
    )
}

/// The host's sections of `plan`, with the bytes copied for each.
pub(super) fn host_sections(
    plan: &LaunchPlan,
    placement: &Placement,
    sizes: &[(String, usize)],
) -> Vec<HostSection> {
    let mut sizes = sizes.to_vec();
    for dim in plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten() {
        if let Dim::Symbol(name) = dim
            && !sizes.iter().any(|(known, _)| known == name)
        {
            sizes.push((name.clone(), 1));
        }
    }
    let sections = section::cut(plan, &placement.on_host());
    let accelerated = |section: &&Section| section.side == Side::Accelerator;
    let given: HashSet<ValueId> =
        sections.iter().filter(accelerated).flat_map(|section| section.outputs.clone()).collect();
    let taken: HashSet<ValueId> =
        sections.iter().filter(accelerated).flat_map(|section| section.inputs.clone()).collect();
    let bytes = |ids: &[ValueId], crossing: &HashSet<ValueId>| {
        ids.iter()
            .filter(|id| crossing.contains(id))
            .map(|id| {
                let value = plan.value(*id);
                let sizes = sizes_of(value.shape.as_ref()?, &sizes)?;
                let count = model::tensor::element_count(&sizes).ok()?;
                Some((count * value.dtype.size_bytes()?) as u64)
            })
            .sum::<Option<u64>>()
    };
    let step = |index: &usize| HostStep {
        step: plan.steps[*index].name.clone(),
        op: plan.steps[*index].op.name(),
        reason: placement.reason(*index).unwrap_or_default(),
    };
    let host = sections.iter().filter(|section| section.side == Side::Host);
    host.map(|section| HostSection {
        steps: section.steps.iter().map(step).collect(),
        copied_in: bytes(&section.inputs, &given),
        copied_out: bytes(&section.outputs, &taken),
    })
    .collect()
}
