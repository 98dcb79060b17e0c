//! Which part of a plan file this call applies: of several kinds, that of the GPUs here.

use std::path::Path;

use assembly::Failure;
use planner::GpuKind;
use planner::apply::part::{PlanPart, mix_part, part_of};
use planner::verify::mix::MixFile;
use serde_json::Value;

use crate::apply_args::ApplyArgs;
use crate::nvidia::NvidiaTools;
use crate::plan_command::{PlanFile, gpu_kind};

/// The kind of the GPUs, and what is planned for them.
pub(super) fn read(args: &ApplyArgs, path: &Path) -> Result<(&'static GpuKind, PlanPart), Failure> {
    let named =
        |error: &dyn std::fmt::Display| Failure::usage(format!("{}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| named(&error))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| named(&error))?;
    if value.get("kinds").is_some() {
        let file: MixFile = serde_json::from_value(value).map_err(|error| named(&error))?;
        return of_mix(args, &file).map_err(|error| named(&error));
    }
    let file: PlanFile = serde_json::from_value(value).map_err(|error| named(&error))?;
    let kind = match (&args.gpu, file.gpu_kind.as_str()) {
        (Some(kind), _) => kind,
        (None, "") => return Err(Failure::usage("the plan does not name its gpu kind; use --gpu")),
        (None, kind) => kind,
    };
    let kind = gpu_kind(kind, args.gpu_table.as_deref())?;
    let part = part_of(kind.name, &file.plan, args.plan_gpus.as_ref());
    Ok((kind, part.map_err(|error| named(&error))?))
}

/// The part of the kind that is named or, without a name, found here.
fn of_mix(args: &ApplyArgs, file: &MixFile) -> Result<(&'static GpuKind, PlanPart), String> {
    let hint = |why: String| {
        format!("{why}; the plan has {}: name one of these kinds with --gpu", file.parts())
    };
    let (part, kind) = match &args.gpu {
        Some(name) => {
            let named = |kind: &GpuKind| kind.name.eq_ignore_ascii_case(name);
            file.kind_for(named).map_err(|_| hint(format!("'{name}' is not in it")))?
        }
        None => {
            let machine = NvidiaTools.inspect().map_err(|why| {
                hint(format!("the plan is for several kinds of gpus, and those here: {why}"))
            })?;
            let all =
                |kind: &GpuKind| args.gpus.iter().all(|&gpu| machine.is_of_kind(gpu, kind).is_ok());
            file.kind_for(all).map_err(hint)?
        }
    };
    let part = mix_part(file, part, args.plan_gpus.as_ref()).map_err(|error| error.to_string())?;
    Ok((kind, part))
}
