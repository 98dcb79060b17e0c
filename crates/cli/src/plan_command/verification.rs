//! `atoll plan --verify`: verifies a plan from its file alone.

use std::path::Path;

use assembly::Failure;
use planner::gpu_mix::{FailureDomain, MixObjective};
use planner::verify::mix::{MixFile, MixVerified};
use planner::verify::{Claims, Verified, verify};
use serde_json::{Value, json};

use super::{PlanFile, not_a_plan, read_input};
use crate::args::PlanArgs;

/// Verifies the plan of a file, of one kind of GPUs or of several.
pub(super) fn run(args: &PlanArgs, path: &Path) -> Result<(), Failure> {
    let text = read_input(path)?;
    let value: Value = serde_json::from_str(&text).map_err(|error| not_a_plan(path, &error))?;
    let found = match value.get("kinds").is_some() {
        true => {
            let file: MixFile =
                serde_json::from_str(&text).map_err(|error| not_a_plan(path, &error))?;
            file.verify().map(|verified| mix_report(&file, &verified))
        }
        false => {
            let file: PlanFile =
                serde_json::from_str(&text).map_err(|error| not_a_plan(path, &error))?;
            let Some(certificate) = &file.certificate else {
                let path = path.display();
                return Err(Failure::usage(format!(
                    "{path} carries no certificate: write it with atoll plan --json"
                )));
            };
            let PlanFile { gpu_kind, gpus, lower_bound, bound, plan, .. } = &file;
            let (gpus, lower_bound, bound) = (*gpus, *lower_bound, *bound);
            let claims = Claims { gpu_kind, gpus, lower_bound, bound, plan };
            verify(&claims, certificate).map(|verified| plan_report(&verified))
        }
    };
    match found {
        Ok((report, line)) => {
            match args.json {
                true => println!("{report:#}"),
                false => println!("{line}"),
            }
            Ok(())
        }
        Err(wrong) => {
            if args.json {
                println!("{:#}", json!({ "verified": false, "wrong": wrong }));
            }
            Err(Failure::failed(format!("{}: {}", path.display(), wrong.join("\n  "))))
        }
    }
}

fn plan_report(verified: &Verified) -> (Value, String) {
    let Verified { gpus, lower_bound, bound } = *verified;
    let proven_best = gpus == lower_bound;
    let report = json!({
        "verified": true,
        "gpus": gpus,
        "lower_bound": lower_bound,
        "bound": bound,
        "proven_best": proven_best,
    });
    let best = if proven_best { ", proven best" } else { "" };
    let line = format!(
        "verified: {gpus} gpus, legal, within every rate and slo; at least {lower_bound} needed \
         (bound {bound:.6}{best})"
    );
    (report, line)
}

fn mix_report(file: &MixFile, verified: &MixVerified) -> (Value, String) {
    let MixVerified { gpus, total, bound, unserved, survives } = *verified;
    let report = json!({
        "verified": true,
        "gpus": gpus,
        "total": total,
        "objective": file.objective,
        "bound": bound,
        "unserved": unserved,
        "survives": survives.map(|(domain, _)| domain),
        "domain_gpus": survives.map(|(_, gpus)| gpus),
    });
    let failing = match survives {
        None => String::new(),
        Some((FailureDomain::Gpu, _)) => ", also without any one gpu".to_string(),
        Some((domain, count)) => {
            format!(", also without any one {} of {count} gpus", domain.name())
        }
    };
    let left_out = if unserved == 0 { String::new() } else { format!(", {unserved} not served") };
    let unit = unit(file.objective);
    let line = format!(
        "verified: {gpus} gpus, {total:.2} {unit}, legal, within every rate and slo{failing}\
         {left_out}; at least {bound:.2} without spare capacity"
    );
    (report, line)
}

/// What the total of a plan over several kinds counts.
pub(super) fn unit(objective: MixObjective) -> &'static str {
    match objective {
        MixObjective::Cost => "an hour",
        MixObjective::Gpus => "gpus",
        MixObjective::Energy => "watts",
    }
}
