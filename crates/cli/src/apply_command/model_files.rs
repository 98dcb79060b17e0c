//! Checks the models of a plan before anything changes: each is there, its settings take the plan's
//! batches, and it compiles.

use std::collections::{BTreeMap, BTreeSet};

use assembly::Failure;
use planner::apply::Change;

use super::servers::{PlannedBatches, find_model, planned_batches, with_plan};
use crate::apply_args::ApplyArgs;

/// Max faults that a message lists.
const FAULTS_MAX: usize = 10;

/// Refuses a plan with models that its servers could not load.
pub(super) fn check(args: &ApplyArgs, list: &[Change]) -> Result<(), Failure> {
    let mut wanted: BTreeMap<String, Vec<PlannedBatches>> = BTreeMap::new();
    for change in list {
        let Change::StartServer(spec) = change else { continue };
        for (model, planned) in planned_batches(spec) {
            wanted.entry(model).or_default().push(planned);
        }
    }
    let mut faults: BTreeSet<String> = BTreeSet::new();
    for (model, planned) in &wanted {
        if let Err(failure) = check_one(args, model, planned) {
            faults.insert(format!("model '{model}': {}", failure.message()));
        }
    }
    if faults.is_empty() {
        return Ok(());
    }
    let more = faults.len().saturating_sub(FAULTS_MAX);
    let mut lines: Vec<String> = faults.into_iter().take(FAULTS_MAX).collect();
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    Err(Failure::usage(format!("nothing was changed: {}", lines.join("\n  "))))
}

fn check_one(args: &ApplyArgs, model: &str, planned: &[PlannedBatches]) -> Result<(), Failure> {
    let entry = find_model(&args.model_repository, model)?;
    let config = entry.config().map_err(Failure::failed)?;
    for one in planned {
        with_plan(config.clone(), *one).batching.check().map_err(Failure::failed)?;
    }
    let named = |error| Failure::failed(format!("{}: {error}", entry.path.display()));
    assembly::compile_file(&entry.path).map(drop).map_err(named)
}
