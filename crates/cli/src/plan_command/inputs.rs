//! The inputs of `atoll plan`: services, profiles and GPU kinds, with errors that name file, line
//! and field.

use std::path::Path;

use assembly::{Failure, read_file};
use planner::{
    Algorithm, GpuKind, PlanError, PlanRules, Problem, ProfileTable, ServiceList, Sharing,
};

use crate::args::PlanArgs;

/// Max faults that a message lists.
const FAULTS_MAX: usize = 10;

/// What is planned, and what was left out with `--keep-going`.
pub(super) struct PlanInputs {
    pub(super) problem: Problem,
    pub(super) faults: Vec<PlanError>,
}

/// What is planned on several kinds of GPUs.
pub(super) struct MixInputs {
    pub(super) list: ServiceList,
    pub(super) table: ProfileTable,
    pub(super) rules: PlanRules,
    /// GPU kinds of the user's table.
    pub(super) own: Vec<&'static GpuKind>,
}

/// The kind of that name: a known one, or one of the user's table.
pub(crate) fn gpu_kind(name: &str, table: Option<&Path>) -> Result<&'static GpuKind, Failure> {
    let Some(path) = table else { return GpuKind::find(name).map_err(Failure::usage) };
    let own = own_kinds(path)?;
    match own.iter().copied().find(|kind| kind.name.eq_ignore_ascii_case(name)) {
        Some(kind) => Ok(kind),
        None => GpuKind::find(name).map_err(|error| {
            let names: Vec<&str> = own.iter().map(|kind| kind.name).collect();
            Failure::usage(format!("{error}; {} has {}", path.display(), names.join(", ")))
        }),
    }
}

fn own_kinds(path: &Path) -> Result<Vec<&'static GpuKind>, Failure> {
    planner::gpu::file::from_toml(&read_file(path)?).map_err(|error| at(path, &error))
}

/// Exit code 2: the input of the user is wrong.
fn at(path: &Path, error: &PlanError) -> Failure {
    Failure::usage(format!("{}: {error}", path.display()))
}

/// The table of profiles, CSV or JSON by the file's name.
fn profile_table(path: &Path) -> Result<ProfileTable, Failure> {
    let text = read_file(path)?;
    let table = match path.extension().is_some_and(|name| name == "json") {
        true => ProfileTable::from_json(&text),
        false => ProfileTable::from_csv(&text),
    };
    table.map_err(|error| at(path, &error))
}

/// A file that only `--verify` does without.
pub(super) fn needed<'a>(path: Option<&'a Path>, flag: &str) -> Result<&'a Path, Failure> {
    path.ok_or_else(|| Failure::usage(format!("{flag} FILE is needed")))
}

fn services(args: &PlanArgs) -> Result<(ServiceList, Vec<PlanError>), Failure> {
    let path = needed(args.services.as_deref(), "--services")?;
    let (list, faults) =
        ServiceList::from_toml(&read_file(path)?).map_err(|error| at(path, &error))?;
    let name = path.display();
    if !faults.is_empty() && (!args.keep_going || list.services.is_empty()) {
        return Err(Failure::usage(format!("{name}: {}", listed(&faults, args.keep_going))));
    }
    if list.services.is_empty() {
        return Err(Failure::usage(format!(
            "{name}: there are no services to plan; each is a [[service]] table with name, model, \
             rate and slo_ms"
        )));
    }
    Ok((list, faults))
}

/// The first faults, one on each line.
fn listed(faults: &[PlanError], all_faulty: bool) -> String {
    let few = faults.iter().take(FAULTS_MAX);
    let mut lines: Vec<String> = few.map(PlanError::to_string).collect();
    match faults.len().saturating_sub(FAULTS_MAX) {
        0 => {}
        count => lines.push(format!("and {count} more")),
    }
    if !all_faulty {
        lines.push("--keep-going plans the others".to_string());
    }
    lines.join("\n  ")
}

fn rules(args: &PlanArgs, list: &ServiceList) -> Result<PlanRules, Failure> {
    if !(0.0..=10.0).contains(&args.headroom) {
        return Err(Failure::usage(format!("--headroom {} is not from 0 to 10", args.headroom)));
    }
    // Squishy packing always shares.
    let shares = args.sharing == "time" || args.algorithm == Algorithm::Squishy;
    Ok(PlanRules {
        sharing: if shares { Sharing::Time } else { Sharing::None },
        headroom: args.headroom,
        own_headroom: list.own_headroom.clone(),
        ..PlanRules::default()
    })
}

/// Reads what a plan of several kinds is given, apart from the offers.
pub(super) fn read_mix(args: &PlanArgs) -> Result<MixInputs, Failure> {
    let (list, faults) = services(args)?;
    faults.iter().for_each(|fault| tracing::warn!(%fault, "service skipped"));
    let rules = rules(args, &list)?;
    let own = args.gpu_table.as_deref().map(own_kinds).transpose()?.unwrap_or_default();
    let path = needed(args.profiles.as_deref(), "--profiles")?;
    let table = profile_table(path)?;
    if table.gpus().is_empty() {
        let path = path.display();
        tracing::warn!("{path} does not say on which gpu it was measured; taken for every kind");
    }
    Ok(MixInputs { list, table, rules, own })
}

/// Reads and checks everything that `atoll plan` is given.
pub(super) fn read(args: &PlanArgs) -> Result<PlanInputs, Failure> {
    let gpu = gpu_kind(&args.gpu, args.gpu_table.as_deref())?;
    let (list, mut faults) = services(args)?;
    let path = needed(args.profiles.as_deref(), "--profiles")?;
    let table = profile_table(path)?;
    if table.gpus().is_empty() {
        let path = path.display();
        tracing::warn!("{path} does not say on which gpu it was measured; taken for {}", gpu.name);
    }
    let profiles = table.of_kind(gpu, args.foreign_profiles).map_err(|error| {
        let hint = "--foreign-profiles plans with them all the same";
        Failure::usage(format!("{}: {error}; {hint}", path.display()))
    })?;
    let rules = rules(args, &list)?;
    let problem = Problem { gpu, services: list.services, profiles, rules };
    let infeasible = problem.faults();
    let nothing_left = infeasible.len() == problem.services.len();
    if nothing_left || (!infeasible.is_empty() && !args.keep_going) {
        let errors: Vec<PlanError> = infeasible.into_iter().map(|(_, fault)| fault).collect();
        return Err(Failure::failed(listed(&errors, nothing_left)));
    }
    let (rest, more) = problem.without_faults().map_err(Failure::failed)?;
    faults.extend(more);
    faults.iter().for_each(|fault| tracing::warn!(%fault, "service skipped"));
    Ok(PlanInputs { problem: rest, faults })
}
