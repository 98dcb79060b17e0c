//! Sections: consecutive steps of a plan that run on one side, each as a plan of its own.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use model::dim::SymDim;
use model::{Dim, LaunchPlan, Step, ValueId};

/// Where a section runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// On the accelerator.
    Accelerator,
    /// On the host.
    Host,
}

/// Steps of a plan that run on one side without a break.
#[derive(Clone, Debug)]
pub struct Section {
    /// Where it runs.
    pub side: Side,
    /// Its steps: indices into the plan's, ascending.
    pub steps: Vec<usize>,
    /// The values of the plan that it takes, in the order of its own plan's inputs.
    pub inputs: Vec<ValueId>,
    /// The values of the plan that it gives, in the order of its own plan's outputs.
    pub outputs: Vec<ValueId>,
    /// The section as a plan. Sizes that depend on data are symbols of its inputs.
    pub plan: Arc<LaunchPlan>,
}

/// Cuts `plan` into sections in the order they run. `on_host` says of every step whether it runs on
/// the host.
///
/// A step runs in the earliest section of its side that has its operands, so there are as few
/// sections as the dependencies allow.
pub fn cut(plan: &LaunchPlan, on_host: &[bool]) -> Vec<Section> {
    let [device_first, host_first] =
        [Side::Accelerator, Side::Host].map(|first| levels(plan, on_host, first));
    let count = |levels: &[usize]| levels.iter().collect::<BTreeSet<_>>().len();
    let levels = match count(&host_first) < count(&device_first) {
        true => host_first,
        false => device_first,
    };
    let distinct: BTreeSet<usize> = levels.iter().copied().collect();
    let groups: Vec<Vec<usize>> = distinct
        .into_iter()
        .map(|level| (0..levels.len()).filter(|step| levels[*step] == level).collect())
        .collect();
    let mut readers: HashMap<ValueId, BTreeSet<usize>> = HashMap::new();
    for (number, steps) in groups.iter().enumerate() {
        for id in steps.iter().flat_map(|step| plan.steps[*step].inputs.iter().flatten()) {
            readers.entry(*id).or_default().insert(number);
        }
    }
    let made = groups.into_iter().enumerate().map(|(number, steps)| {
        let is_read = |id: &ValueId| {
            let elsewhere = |all: &BTreeSet<usize>| all.iter().any(|other| *other != number);
            plan.outputs.contains(id) || readers.get(id).is_some_and(elsewhere)
        };
        let side = if on_host[steps[0]] { Side::Host } else { Side::Accelerator };
        section(plan, side, steps, is_read)
    });
    made.collect()
}

/// For every step the number of its section, before empty ones are left out: sections of `first`
/// have even numbers, the others odd ones.
fn levels(plan: &LaunchPlan, on_host: &[bool], first: Side) -> Vec<usize> {
    let mut of_value: Vec<Option<usize>> = vec![None; plan.values.len()];
    let mut levels = Vec::with_capacity(plan.steps.len());
    for (index, step) in plan.steps.iter().enumerate() {
        let parity = usize::from(on_host[index] != (first == Side::Host));
        let ready = step.inputs.iter().flatten().filter_map(|id| of_value[id.index()]).max();
        let ready = ready.unwrap_or(0);
        let level = if ready % 2 == parity { ready } else { ready + 1 };
        for id in step.outputs.iter().flatten() {
            of_value[id.index()] = Some(level);
        }
        levels.push(level);
    }
    levels
}

/// The section of `steps`; it gives the values it computes for which `is_read` holds.
fn section(
    plan: &LaunchPlan,
    side: Side,
    steps: Vec<usize>,
    is_read: impl Fn(&ValueId) -> bool,
) -> Section {
    let own: BTreeSet<ValueId> =
        steps.iter().flat_map(|step| plan.steps[*step].outputs.iter().flatten().copied()).collect();
    let constants: HashMap<ValueId, usize> =
        plan.constants.iter().enumerate().map(|(at, (id, _))| (*id, at)).collect();
    let mut inputs: Vec<ValueId> = Vec::new();
    for id in steps.iter().flat_map(|step| plan.steps[*step].inputs.iter().flatten()) {
        if !own.contains(id) && !constants.contains_key(id) && !inputs.contains(id) {
            inputs.push(*id);
        }
    }
    let outputs: Vec<ValueId> = own.iter().copied().filter(|id| is_read(id)).collect();
    let mut numbering = Numbering { plan, made: LaunchPlan::default(), ids: HashMap::new() };
    for (id, shape) in inputs.iter().zip(input_shapes(plan, &inputs)) {
        let new = numbering.id(*id);
        numbering.made.values[new.index()].shape = shape;
        numbering.made.inputs.push(new);
    }
    for index in &steps {
        let step = &plan.steps[*index];
        for id in step.inputs.iter().flatten() {
            if let Some(at) = constants.get(id).filter(|_| !numbering.ids.contains_key(id)) {
                let new = numbering.id(*id);
                numbering.made.constants.push((new, plan.constants[*at].1.clone()));
            }
        }
        let mut map = |ids: &[Option<ValueId>]| -> Vec<Option<ValueId>> {
            ids.iter().map(|id| id.map(|id| numbering.id(id))).collect()
        };
        let (inputs, outputs) = (map(&step.inputs), map(&step.outputs));
        let (name, op) = (step.name.clone(), step.op.clone());
        numbering.made.steps.push(Step { name, op, inputs, outputs, last_uses: Vec::new() });
    }
    numbering.made.outputs = outputs.iter().map(|id| numbering.ids[id]).collect();
    numbering.made.plan_lifetimes();
    Section { side, steps, inputs, outputs, plan: Arc::new(numbering.made) }
}

/// Values of a section's plan by those of the whole plan.
struct Numbering<'a> {
    plan: &'a LaunchPlan,
    made: LaunchPlan,
    ids: HashMap<ValueId, ValueId>,
}

impl Numbering<'_> {
    fn id(&mut self, id: ValueId) -> ValueId {
        let new = ValueId(self.made.values.len() as u32);
        let known = *self.ids.entry(id).or_insert(new);
        if known == new {
            self.made.values.push(self.plan.value(id).clone());
        }
        known
    }
}

/// The shapes of a section's inputs. The tensors of a task must determine all symbols, so an
/// expression whose symbols are not dimensions of another input becomes a symbol, and so does a
/// size that depends on data.
fn input_shapes(plan: &LaunchPlan, inputs: &[ValueId]) -> Vec<Option<Vec<Dim>>> {
    let dims = || inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten();
    let plain: BTreeSet<&str> = dims()
        .filter_map(|dim| match dim {
            Dim::Symbol(name) => Some(name.as_str()),
            _ => None,
        })
        .collect();
    let shape = |id: &ValueId| -> Option<Vec<Dim>> {
        let dims = plan.value(*id).shape.as_ref()?.iter().enumerate();
        let own = |(axis, dim): (usize, &Dim)| match dim {
            Dim::Unknown => Dim::Symbol(format!("value{}.{axis}", id.0)),
            Dim::Expr(_) if !SymDim::from(dim).symbols().iter().all(|s| plain.contains(&**s)) => {
                Dim::Symbol(format!("({dim})"))
            }
            dim => dim.clone(),
        };
        Some(dims.map(own).collect())
    };
    inputs.iter().map(shape).collect()
}

/// The sizes of `dims` when the symbols have `sizes`; `None` when one is not determined by them.
pub(super) fn sizes_of(dims: &[Dim], sizes: &[(String, usize)]) -> Option<Vec<usize>> {
    let lookup = |name: &str| {
        let found = sizes.iter().find(|(symbol, _)| symbol == name);
        found.and_then(|(_, size)| i64::try_from(*size).ok())
    };
    dims.iter().map(|dim| SymDim::from(dim).substitute(&lookup).size()).collect()
}
