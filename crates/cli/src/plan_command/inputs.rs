//! The inputs of `atoll plan`: services, profiles and GPU kinds, with errors that name file, line
//! and field.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use assembly::Failure;
use planner::service_file::ServiceLines;
use planner::{
    Algorithm, GpuKind, PlanError, PlanRules, Problem, ProfileTable, Profiles, ServiceList, Sharing,
};

use crate::args::PlanArgs;

/// Max bytes of an input: more than the largest recording of traffic that is planned.
const INPUT_BYTES_MAX: u64 = 1 << 30;
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
    planner::gpu::file::from_toml(&read_input(path)?).map_err(|error| at(path, &error))
}

/// The text of a file that the user names. What cannot be read is a mistake of the command line,
/// so the exit code is 2.
pub(crate) fn read_input(path: &Path) -> Result<String, Failure> {
    let named =
        |what: &dyn std::fmt::Display| Failure::usage(format!("{}: {what}", path.display()));
    let file = File::open(path).map_err(|error| named(&error))?;
    let mut bytes = Vec::new();
    file.take(INPUT_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| named(&error))?;
    if bytes.len() as u64 > INPUT_BYTES_MAX {
        return Err(named(&format!("it has more than {} MiB", INPUT_BYTES_MAX >> 20)));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count();
        named(&format!("line {line}: this is not text in UTF-8"))
    })?;
    // Some editors put a mark at the start.
    match text.strip_prefix('\u{feff}') {
        Some(rest) => Ok(rest.to_string()),
        None => Ok(text),
    }
}

/// Exit code 2: the input of the user is wrong.
fn at(path: &Path, error: &PlanError) -> Failure {
    Failure::usage(format!("{}: {error}", path.display()))
}

/// The table of profiles, CSV or JSON by the file's name.
fn profile_table(path: &Path) -> Result<ProfileTable, Failure> {
    let text = read_input(path)?;
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
        ServiceList::from_toml(&read_input(path)?).map_err(|error| at(path, &error))?;
    let name = path.display();
    if !faults.is_empty() && (!args.keep_going || list.services.is_empty()) {
        let lines: Vec<String> = faults.iter().map(PlanError::to_string).collect();
        return Err(Failure::usage(format!("{name}: {}", listed(lines, args.keep_going))));
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
fn listed(mut lines: Vec<String>, all_faulty: bool) -> String {
    let count = lines.len().saturating_sub(FAULTS_MAX);
    lines.truncate(FAULTS_MAX);
    if count > 0 {
        lines.push(format!("and {count} more"));
    }
    if !all_faulty {
        lines.push("--keep-going plans the others".to_string());
    }
    lines.join("\n  ")
}

/// The error that services cannot be planned, with the line of the field that says why.
pub(super) fn infeasible(
    args: &PlanArgs,
    lines: &[ServiceLines],
    faults: &[(usize, PlanError)],
    all_faulty: bool,
) -> Failure {
    let line = |(service, fault): &(usize, PlanError)| {
        let line = lines.get(*service).copied().unwrap_or_default().of(fault);
        format!("line {line}: {fault}")
    };
    let listed = listed(faults.iter().map(line).collect(), all_faulty);
    let path = args.services.as_deref().unwrap_or(Path::new("--services"));
    Failure::usage(format!("{}: {listed}", path.display()))
}

/// The profiles of a kind, or why the table has none.
pub(super) fn profiles_of(
    args: &PlanArgs,
    path: &Path,
    table: &ProfileTable,
    gpu: &GpuKind,
) -> Result<Profiles, Failure> {
    table.of_kind(gpu, args.foreign_profiles).map_err(|error| match error {
        PlanError::ForeignProfiles { .. } => {
            let hint = "--foreign-profiles plans with them all the same";
            Failure::usage(format!("{}: {error}; {hint}", path.display()))
        }
        error => at(path, &error),
    })
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
    let profiles = profiles_of(args, path, &table, gpu)?;
    let rules = rules(args, &list)?;
    let problem = Problem { gpu, services: list.services, profiles, rules };
    let unfit = problem.faults();
    let nothing_left = unfit.len() == problem.services.len();
    if nothing_left || (!unfit.is_empty() && !args.keep_going) {
        return Err(infeasible(args, &list.lines, &unfit, nothing_left));
    }
    let (rest, more) = problem.without_faults().map_err(Failure::failed)?;
    faults.extend(more);
    faults.iter().for_each(|fault| tracing::warn!(%fault, "service skipped"));
    Ok(PlanInputs { problem: rest, faults })
}
