//! Common prefixes of models: the steps that two plans share from the input on, as a plan of its
//! own, and the suffix of each.
//!
//! A [`CommonPrefix`] is found between two plans by the hashes of their steps. Any plan that
//! contains all of its steps can be split at it. Steps that write a model's outputs are never
//! common, so that every model has a suffix.

use std::collections::{BTreeMap, BTreeSet};

use graph::hash::{Hash, plan_hashes};
use model::op::Op;
use model::{Dim, LaunchPlan, PlanError, Step, Tensor, ValueId};

/// Share of a model's work that must be common to justify two launches instead of one.
pub const MIN_PREFIX_SHARE: f64 = 0.5;
/// [`Fingerprint::marks`] omits steps below this share of a model's work.
const MIN_MARKED_SHARE: f64 = 0.01;
/// Assumed size of unknown dimensions, except the first one: that is the batch and counts 1.
const UNKNOWN_SIZE: f64 = 64.0;

/// Hashes and costs of a plan's steps, to compare it with other plans.
#[derive(Clone, Debug)]
pub struct Fingerprint {
    hashes: Vec<Hash>,
    /// Share of the plan's work that each step does, estimated from shapes.
    shares: Vec<f64>,
    /// Whether a step writes an output of the model.
    last: Vec<bool>,
}

impl Fingerprint {
    /// The fingerprint of `plan`. Reads all its constants.
    pub fn of(plan: &LaunchPlan) -> Fingerprint {
        let constants: BTreeMap<ValueId, &Tensor> =
            plan.constants.iter().map(|(id, tensor)| (*id, tensor)).collect();
        let work: Vec<f64> = plan.steps.iter().map(|step| work(plan, &constants, step)).collect();
        let all = work.iter().sum::<f64>().max(1.0);
        let ends = |step: &Step| step.outputs.iter().flatten().any(|id| plan.outputs.contains(id));
        Fingerprint {
            hashes: plan_hashes(plan),
            shares: work.into_iter().map(|work| work / all).collect(),
            last: plan.steps.iter().map(ends).collect(),
        }
    }

    /// Steps that do a large share of the work and could be common with other models: the first
    /// digits of their hash in hexadecimal, and the share.
    pub fn marks(&self) -> Vec<(String, f64)> {
        let steps = self.hashes.iter().zip(&self.shares).zip(&self.last);
        let notable = steps.filter(|((_, share), last)| **share >= MIN_MARKED_SHARE && !**last);
        notable.map(|((hash, share), _)| (short(hash), (share * 1e4).round() / 1e4)).collect()
    }
}

fn short(hash: &Hash) -> String {
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Estimated multiplications of a step.
fn work(plan: &LaunchPlan, constants: &BTreeMap<ValueId, &Tensor>, step: &Step) -> f64 {
    let dims = |id: ValueId| plan.value(id).shape.as_deref().unwrap_or(&[]);
    let elements = |id: ValueId| -> f64 {
        let size = |(axis, dim): (usize, &Dim)| match dim {
            Dim::Fixed(size) => *size as f64,
            _ if axis == 0 => 1.0,
            _ => UNKNOWN_SIZE,
        };
        dims(id).iter().enumerate().map(size).product()
    };
    let written = step.outputs.iter().flatten().next().map_or(0.0, |id| elements(*id));
    let weights = step.inputs.iter().flatten().filter_map(|id| constants.get(id));
    let weight = weights.filter(|tensor| tensor.shape().len() > 1).max_by_key(|t| t.len());
    let each = match (&step.op, weight) {
        (Op::Conv(_) | Op::ConvInteger(_) | Op::QLinearConv(_), Some(weight)) => {
            weight.len() as f64 / weight.shape()[0].max(1) as f64
        }
        (Op::MatMul(_) | Op::Gemm(_) | Op::MatMulInteger | Op::QLinearMatMul, Some(weight)) => {
            let column = step.outputs.iter().flatten().next().and_then(|id| dims(*id).last());
            match column {
                Some(Dim::Fixed(columns)) => weight.len() as f64 / (*columns).max(1) as f64,
                _ => UNKNOWN_SIZE,
            }
        }
        (Op::MatMul(_) | Op::Gemm(_) | Op::MatMulInteger | Op::QLinearMatMul, None) => UNKNOWN_SIZE,
        _ => 1.0,
    };
    written * each.max(1.0)
}

/// The source of a suffix's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuffixInput {
    /// An output of the prefix.
    Prefix(usize),
    /// An input of the model.
    Model(usize),
}

/// The steps of a model after a common prefix.
#[derive(Clone, Debug)]
pub struct Suffix {
    /// Its plan; its outputs are the model's.
    pub plan: LaunchPlan,
    /// The sources of its inputs.
    pub sources: Vec<SuffixInput>,
    /// Share of the model's work that the prefix does.
    pub prefix_share: f64,
}

/// The steps that several plans have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommonPrefix {
    steps: BTreeSet<Hash>,
    /// The values that suffixes read: the hash of the step that writes it, and its index among that
    /// step's outputs.
    values: Vec<(Hash, usize)>,
}

impl CommonPrefix {
    /// What `a` and `b` have in common, where that is at least [`MIN_PREFIX_SHARE`] of each.
    pub fn between(
        (a, of_a): (&LaunchPlan, &Fingerprint),
        (b, of_b): (&LaunchPlan, &Fingerprint),
    ) -> Option<CommonPrefix> {
        let hashes = |of: &Fingerprint, last: bool| -> BTreeSet<Hash> {
            let steps = of.hashes.iter().zip(&of.last);
            steps.filter(|(_, is)| !last || **is).map(|(hash, _)| *hash).collect()
        };
        let ends = &hashes(of_a, true) | &hashes(of_b, true);
        let common = &(&hashes(of_a, false) & &hashes(of_b, false)) - &ends;
        let (in_a, in_b) = (members(a, of_a, &common), members(b, of_b, &common));
        if share(of_a, &in_a).min(share(of_b, &in_b)) < MIN_PREFIX_SHARE {
            return None;
        }
        let kept = of_a.hashes.iter().zip(&in_a).filter(|(_, is)| **is).map(|(hash, _)| *hash);
        let values = &frontier(a, of_a, &in_a) | &frontier(b, of_b, &in_b);
        let common = CommonPrefix { steps: kept.collect(), values: values.into_iter().collect() };
        (common.prefix(a, of_a).is_some()
            && common.suffix(a, of_a).is_some()
            && common.suffix(b, of_b).is_some())
        .then_some(common)
    }

    /// A short name; equal prefixes have equal names.
    pub fn name(&self) -> String {
        // The values suffice: a hash covers everything before it.
        let mixed = self.values.iter().fold([0u8; 32], |mut mixed, (hash, index)| {
            mixed.iter_mut().zip(hash).for_each(|(mixed, byte)| *mixed ^= byte);
            mixed[0] = mixed[0].wrapping_add(*index as u8);
            mixed
        });
        short(&mixed)
    }

    /// The common steps as a plan, extracted from `plan`; `None` if `plan` lacks some.
    pub fn prefix(&self, plan: &LaunchPlan, of: &Fingerprint) -> Option<LaunchPlan> {
        let inside = self.inside(plan, of)?;
        let outputs = self.values.iter().map(|value| find(plan, of, value));
        let outputs: Vec<ValueId> = outputs.collect::<Option<_>>()?;
        let steps = plan.steps.iter().zip(&inside).filter(|(_, is)| **is).map(|(step, _)| step);
        extract(plan, &plan.inputs, steps, &outputs).ok()
    }

    /// The suffix of `plan`; `None` if it lacks some of the common steps, or if the prefix's
    /// outputs have sizes other than numbers and the model's own symbols.
    pub fn suffix(&self, plan: &LaunchPlan, of: &Fingerprint) -> Option<Suffix> {
        let inside = self.inside(plan, of)?;
        let read = frontier(plan, of, &inside);
        if !read.iter().all(|value| self.values.contains(value)) {
            return None;
        }
        let rest: Vec<&Step> =
            plan.steps.iter().zip(&inside).filter(|(_, is)| !**is).map(|(step, _)| step).collect();
        let reads: BTreeSet<ValueId> =
            rest.iter().flat_map(|step| step.inputs.iter().flatten()).copied().collect();
        let mut inputs = Vec::new();
        let mut sources = Vec::new();
        for (index, value) in self.values.iter().enumerate() {
            // Equal steps may occur in one plan more than once; each gets the same value.
            for id in all(plan, of, value).filter(|id| reads.contains(id)) {
                inputs.push(id);
                sources.push(SuffixInput::Prefix(index));
            }
        }
        for (index, id) in plan.inputs.iter().enumerate() {
            if reads.contains(id) || plan.outputs.contains(id) {
                inputs.push(*id);
                sources.push(SuffixInput::Model(index));
            }
        }
        let mut suffix = extract(plan, &inputs, rest.into_iter(), &plan.outputs).ok()?;
        close_symbols(plan, &mut suffix)?;
        Some(Suffix { plan: suffix, sources, prefix_share: share(of, &inside) })
    }

    /// Which steps of `plan` are common; `None` unless all common steps are present.
    fn inside(&self, plan: &LaunchPlan, of: &Fingerprint) -> Option<Vec<bool>> {
        let inside = members(plan, of, &self.steps);
        let found = of.hashes.iter().zip(&inside).filter(|(_, is)| **is).map(|(hash, _)| hash);
        let found: BTreeSet<&Hash> = found.collect();
        (found.len() == self.steps.len()).then_some(inside)
    }
}

/// Marks the steps of `plan` that are in `common` with all steps they depend on.
fn members(plan: &LaunchPlan, of: &Fingerprint, common: &BTreeSet<Hash>) -> Vec<bool> {
    let mut outside: BTreeSet<ValueId> = BTreeSet::new();
    let steps = plan.steps.iter().zip(&of.hashes);
    steps
        .map(|(step, hash)| {
            let mut operands = step.inputs.iter().flatten();
            let inside = common.contains(hash) && operands.all(|id| !outside.contains(id));
            if !inside {
                outside.extend(step.outputs.iter().flatten());
            }
            inside
        })
        .collect()
}

fn share(of: &Fingerprint, inside: &[bool]) -> f64 {
    of.shares.iter().zip(inside).filter(|(_, is)| **is).map(|(share, _)| share).sum()
}

/// Values of steps inside that steps outside read.
fn frontier(plan: &LaunchPlan, of: &Fingerprint, inside: &[bool]) -> BTreeSet<(Hash, usize)> {
    let outside = plan.steps.iter().zip(inside).filter(|(_, is)| !**is);
    let reads: BTreeSet<ValueId> =
        outside.flat_map(|(step, _)| step.inputs.iter().flatten()).copied().collect();
    let mut values = BTreeSet::new();
    for ((step, hash), _) in plan.steps.iter().zip(&of.hashes).zip(inside).filter(|(_, is)| **is) {
        let outputs = step.outputs.iter().enumerate();
        let read = outputs.filter(|(_, id)| id.is_some_and(|id| reads.contains(&id)));
        values.extend(read.map(|(index, _)| (*hash, index)));
    }
    values
}

fn all<'a>(
    plan: &'a LaunchPlan,
    of: &'a Fingerprint,
    (hash, index): &'a (Hash, usize),
) -> impl Iterator<Item = ValueId> + 'a {
    let steps = plan.steps.iter().zip(&of.hashes).filter(move |(_, own)| *own == hash);
    steps.filter_map(move |(step, _)| step.outputs.get(*index).copied().flatten())
}

fn find(plan: &LaunchPlan, of: &Fingerprint, value: &(Hash, usize)) -> Option<ValueId> {
    all(plan, of, value).next()
}

/// A plan of `steps` alone, values renumbered.
fn extract<'a>(
    plan: &LaunchPlan,
    inputs: &[ValueId],
    steps: impl Iterator<Item = &'a Step>,
    outputs: &[ValueId],
) -> Result<LaunchPlan, PlanError> {
    let mut part = LaunchPlan::default();
    let mut ids: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut number = |part: &mut LaunchPlan, id: ValueId| {
        *ids.entry(id).or_insert_with(|| {
            part.values.push(plan.value(id).clone());
            ValueId(part.values.len() as u32 - 1)
        })
    };
    let numbered = inputs.iter().map(|id| number(&mut part, *id)).collect();
    part.inputs = numbered;
    for step in steps {
        let mut renumber = |ids: &[Option<ValueId>]| -> Vec<Option<ValueId>> {
            ids.iter().map(|id| id.map(|id| number(&mut part, id))).collect()
        };
        let (inputs, outputs) = (renumber(&step.inputs), renumber(&step.outputs));
        part.steps.push(Step { inputs, outputs, last_uses: Vec::new(), ..step.clone() });
    }
    part.outputs = outputs.iter().map(|id| number(&mut part, *id)).collect();
    let constants = plan.constants.iter();
    let used = constants.filter_map(|(id, tensor)| Some((*ids.get(id)?, tensor.clone())));
    part.constants = used.collect();
    part.plan_lifetimes();
    part.check()?;
    Ok(part)
}

/// Restricts a part's sizes to symbols that its own inputs bind. `None` if an input has a size that
/// is neither a number nor one of the model's own symbols.
fn close_symbols(plan: &LaunchPlan, part: &mut LaunchPlan) -> Option<()> {
    let symbols = |plan: &LaunchPlan| -> BTreeSet<String> {
        let dims = plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten();
        let symbol =
            |dim: &Dim| if let Dim::Symbol(name) = dim { Some(name.clone()) } else { None };
        dims.filter_map(symbol).collect()
    };
    let known = symbols(plan);
    for id in &part.inputs {
        let dims = part.value(*id).shape.as_ref()?;
        let plain = |dim: &Dim| match dim {
            Dim::Fixed(_) => true,
            Dim::Symbol(name) => known.contains(name),
            Dim::Expr(_) | Dim::Unknown => false,
        };
        if !dims.iter().all(plain) {
            return None;
        }
    }
    let bound = symbols(part);
    let unbound: Vec<&String> = known.difference(&bound).collect();
    for dim in part.values.iter_mut().filter_map(|value| value.shape.as_mut()).flatten() {
        if unbound.iter().any(|name| dim.has_symbol(name)) {
            *dim = Dim::Unknown;
        }
    }
    Some(())
}

#[cfg(test)]
#[path = "prefix/tests.rs"]
mod tests;
