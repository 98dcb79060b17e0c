//! Memory of a plan's values while it runs.

use graph::SymDim;
use model::{LaunchPlan, ValueId};

/// The peak bytes of inputs, outputs and intermediate values, with these sizes of the symbols.
/// `None` when the size of some value depends on data or on a symbol without a size.
pub fn peak_activation_bytes(plan: &LaunchPlan, bindings: &[(&str, usize)]) -> Option<u64> {
    let lookup = |name: &str| {
        let found = bindings.iter().find(|(symbol, _)| *symbol == name);
        found.and_then(|(_, size)| i64::try_from(*size).ok())
    };
    let constants: Vec<ValueId> = plan.constants.iter().map(|(id, _)| *id).collect();
    let bytes = |id: ValueId| value_bytes(plan, id, &lookup);
    let mut alive: u64 = 0;
    for id in &plan.inputs {
        alive = alive.checked_add(bytes(*id)?)?;
    }
    let mut peak = alive;
    for step in &plan.steps {
        for id in step.outputs.iter().flatten() {
            alive = alive.checked_add(bytes(*id)?)?;
        }
        peak = peak.max(alive);
        for id in step.last_uses.iter().filter(|id| !constants.contains(id)) {
            alive = alive.saturating_sub(bytes(*id)?);
        }
    }
    Some(peak)
}

fn value_bytes(
    plan: &LaunchPlan,
    id: ValueId,
    lookup: &dyn Fn(&str) -> Option<i64>,
) -> Option<u64> {
    let info = plan.value(id);
    let mut total = info.dtype.size_bytes()? as u64;
    for dim in info.shape.as_ref()? {
        let size = u64::try_from(SymDim::from(dim).substitute(lookup).fixed()?).ok()?;
        total = total.checked_mul(size)?;
    }
    Some(total)
}
