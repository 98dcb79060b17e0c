//! `atoll plan`: the fewest GPUs, their slices, and the steps from the current plan.

mod inputs;
mod mix;
mod modes;
pub(crate) mod plan_service;
mod prometheus;
mod verification;
mod what_if;

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use assembly::progress::Progress;
use assembly::{Failure, write_file};
use base::MonotonicClock;
use planner::certified::Solution;
use planner::json_file::JsonStep::{Index, Key};
use planner::json_file::line_of;
use planner::plan::GpuFile;
use planner::replan::steps::{TransitionStep, steps};
use planner::replan::{ChangeCosts, replanned};
use planner::verify::Certificate;
use planner::{
    Algorithm, Plan, PlanError, PlannerOutput, Problem, SearchControl, SearchProgress, check,
    render,
};
use serde::{Deserialize, Serialize};

use self::inputs::PlanInputs;
pub(crate) use self::inputs::{gpu_kind, read_input};
use crate::args::PlanArgs;

/// Exit code after Ctrl-C, as in shells.
const INTERRUPTED: i32 = 130;

/// Max names that a message lists.
const NAMED_MAX: usize = 12;

/// What `--json` prints, and `--from` and `atoll apply` read.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PlanFile {
    #[serde(default)]
    pub(crate) gpu_kind: String,
    gpus: usize,
    lower_bound: usize,
    #[serde(default)]
    bound: f64,
    seconds: f64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    faults: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    steps: Vec<String>,
    pub(crate) plan: Vec<GpuFile>,
    /// What `--verify` needs; plans of other programs have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    certificate: Option<Certificate>,
}

impl PlanFile {
    /// The file of a plan, and of the steps to it.
    fn new(problem: &Problem, solution: &Solution, steps: &[TransitionStep]) -> PlanFile {
        let lines = render::steps(problem, steps);
        PlanFile {
            gpu_kind: problem.gpu.name.to_string(),
            gpus: solution.plan.used_gpus(),
            lower_bound: solution.lower_bound,
            bound: solution.bound,
            seconds: solution.seconds,
            faults: Vec::new(),
            steps: lines.lines().map(|line| line.trim().to_string()).collect(),
            plan: solution.plan.to_file(problem),
            certificate: Some(Certificate::new(problem, solution)),
        }
    }
}

/// A plan and what is reported about it.
struct PlanOutcome {
    problem: Problem,
    faults: Vec<PlanError>,
    answer: PlannerOutput,
    steps: Option<Vec<TransitionStep>>,
}

/// Runs the command.
pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    modes::check(args)?;
    if let Some(path) = &args.verify {
        return verification::run(args, path);
    }
    if args.from.is_some() && args.algorithm != Algorithm::Certified {
        return Err(Failure::usage(
            "--from changes today's plan by the certified planner; leave --algorithm out",
        ));
    }
    if let Some(path) = &args.stock {
        return mix::run(args, path);
    }
    let inputs = inputs::read(args)?;
    if let Some(sweep) = &args.sweep {
        return what_if::run_sweep(args, &inputs.problem, sweep);
    }
    if args.traffic.is_some() || args.prometheus.is_some() {
        return what_if::run_traffic(args, &inputs.problem);
    }
    if args.mig_parted.is_some() && !inputs.problem.gpu.has_mig() {
        return Err(Failure::usage(format!("{} has no MIG to configure", inputs.problem.gpu.name)));
    }
    let outcome = solve(args, inputs)?;
    let PlanOutcome { problem, answer, .. } = &outcome;
    let plan = &answer.solution.plan;
    if has_plan(args) {
        let violations = check(problem, plan);
        if let Some(first) = violations.first() {
            return Err(Failure::failed(format!("the checker rejects the plan: {first}")));
        }
    }
    if let Some(path) = &args.svg {
        write_file(path, &render::svg(problem, plan))?;
    }
    if let Some(path) = &args.mig_parted {
        write_file(path, &render::mig_parted(problem, plan))?;
    }
    if args.json {
        return print_json(args, &outcome);
    }
    print_text(args, &outcome)
}

/// Whether the algorithm makes a plan; some only count GPUs.
fn has_plan(args: &PlanArgs) -> bool {
    !matches!(args.algorithm, Algorithm::GpuletLike | Algorithm::IgniterLike)
}

fn solve(args: &PlanArgs, inputs: PlanInputs) -> Result<PlanOutcome, Failure> {
    let PlanInputs { problem, faults } = inputs;
    let stop = stop_on_interrupt();
    // How long a search takes cannot be known; the bound says how much better a plan may become.
    let shown = Progress::endless("searching; Ctrl-C ends with the best plan so far");
    let mut report = |progress: SearchProgress| {
        let gpus = progress.gpus.map_or("no plan yet".to_string(), |gpus| format!("{gpus} GPUs"));
        let (phase, bound) = (progress.phase, progress.bound);
        shown.describe(&format!("{phase}: {gpus}, bound {bound:.2}; Ctrl-C ends with the best"));
        !stop.load(Ordering::Relaxed)
    };
    let clock = MonotonicClock::new();
    let mut control = SearchControl::new(&clock, &mut report);
    let (answer, steps) = match &args.from {
        Some(path) => {
            let (answer, steps) = from_current(&problem, path, args.max_moves, &mut control)?;
            (answer, Some(steps))
        }
        None => {
            (planner::run(&problem, args.algorithm, &mut control).map_err(Failure::failed)?, None)
        }
    };
    drop(shown);
    Ok(PlanOutcome { problem, faults, answer, steps })
}

fn not_a_plan(path: &Path, error: &serde_json::Error) -> Failure {
    let path = path.display();
    Failure::usage(format!("{path} is not a plan as atoll plan --json writes it: {error}"))
}

/// The error of a plan that was read, with its line.
fn misplaced(path: &Path, text: &str, error: &PlanError) -> Failure {
    let path = path.display();
    let PlanError::BadSlice { gpu, place, .. } = *error else {
        return Failure::usage(format!("{path}: {error}"));
    };
    let slice = [Key("plan"), Index(gpu), Key("slices"), Index(place)];
    Failure::usage(format!("{path}: line {}: {error}", line_of(text, &slice)))
}

fn from_current(
    problem: &Problem,
    path: &Path,
    moves_max: Option<usize>,
    control: &mut SearchControl<'_>,
) -> Result<(PlannerOutput, Vec<TransitionStep>), Failure> {
    let text = read_input(path)?;
    let file: PlanFile = serde_json::from_str(&text).map_err(|error| not_a_plan(path, &error))?;
    let kind = problem.gpu.name;
    if !file.gpu_kind.is_empty() && file.gpu_kind != kind {
        let (path, other) = (path.display(), &file.gpu_kind);
        return Err(Failure::usage(format!("{path} is a plan for {other}, not for --gpu {kind}")));
    }
    let current = Plan::from_file(problem, &file.plan);
    let current = current.map_err(|error| misplaced(path, &text, &error))?;
    let costs = ChangeCosts { moves_max, ..ChangeCosts::default() };
    let solution = replanned(problem, &current, costs, control).map_err(Failure::failed)?;
    let steps = steps(problem, &current, &solution.plan);
    Ok((PlannerOutput { gpus: solution.plan.used_gpus(), solution }, steps))
}

fn print_json(args: &PlanArgs, outcome: &PlanOutcome) -> Result<(), Failure> {
    let PlanOutcome { problem, faults, answer, steps } = outcome;
    let mut file = PlanFile::new(problem, &answer.solution, steps.as_deref().unwrap_or_default());
    file.gpus = answer.gpus;
    file.faults = faults.iter().map(PlanError::to_string).collect();
    if !has_plan(args) {
        file.certificate = None;
    }
    let text = serde_json::to_string_pretty(&file).map_err(Failure::failed)?;
    println!("{text}");
    Ok(())
}

fn print_text(args: &PlanArgs, outcome: &PlanOutcome) -> Result<(), Failure> {
    let PlanOutcome { problem, answer, steps, .. } = outcome;
    let solution = &answer.solution;
    if let Some(name) = &args.explain {
        let found = problem.services.iter().position(|service| service.name == *name);
        let service = found.ok_or_else(|| Failure::usage(unknown(name, problem)))?;
        print!("{}", render::explain(problem, &solution.plan, &solution.prices, service));
        return Ok(());
    }
    print!("{}", render::picture(problem, &solution.plan, std::io::stdout().is_terminal()));
    if let Some(steps) = steps {
        println!("{} steps:", steps.len());
        print!("{}", render::steps(problem, steps));
    }
    if args.commands {
        print!("{}", render::commands(problem, &solution.plan));
    }
    let gap = answer.gpus.saturating_sub(solution.lower_bound);
    println!(
        "{} gpu{}, at least {} needed (bound {:.3}{}), {:.3} s{}",
        answer.gpus,
        if answer.gpus == 1 { "" } else { "s" },
        solution.lower_bound,
        solution.bound,
        if gap == 0 { ", proven best".to_string() } else { format!(", {gap} above it") },
        solution.seconds,
        if solution.stopped { ", stopped early" } else { "" }
    );
    Ok(())
}

/// Message that a service is not in the plan, and which are.
fn unknown(name: &str, problem: &Problem) -> String {
    let names: Vec<&str> = problem.services.iter().map(|service| service.name.as_str()).collect();
    format!("no service '{name}' is planned; there are {}", few(&names))
}

/// The first of these names, and how many more there are.
fn few(names: &[&str]) -> String {
    let first = names[..names.len().min(NAMED_MAX)].join(", ");
    match names.len().saturating_sub(NAMED_MAX) {
        0 => first,
        count => format!("{first} and {count} more"),
    }
}

/// Set by Ctrl-C; the planner then returns the best plan so far, and a second Ctrl-C exits at once.
/// Without a handler the search runs to its end.
fn stop_on_interrupt() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        if let Ok(runtime) = runtime
            && runtime.block_on(tokio::signal::ctrl_c()).is_ok()
        {
            flag.store(true, Ordering::Relaxed);
            eprintln!("ending with the best plan so far; Ctrl-C again ends without one");
            if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
                std::process::exit(INTERRUPTED);
            }
        }
    });
    stop
}
