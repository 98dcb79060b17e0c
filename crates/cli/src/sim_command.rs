//! `atoll sim`: simulates a scenario in virtual time and checks it.

use std::path::PathBuf;

use assembly::{Failure, write_file};
use base::Nanos;
use bench::cluster_sim::scenario::{self as cluster_scenario, ClusterScenario};
use bench::recorded_run;
use bench::report::{SimulationReport, outcome_table, table};
use bench::scenario::Scenario;
use bench::simulation::{self, Simulation, SimulationOptions};
use bench::timeline;
use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll sim scenarios/two_classes.toml
  atoll sim scenarios/two_classes.toml --policy reef --seed 7 --json
  atoll sim scenarios/two_classes.toml --perfetto out.json     open it at ui.perfetto.dev
  atoll sim scenarios/faults.toml --timeline out.svg --from-ms 10 --to-ms 30
  atoll sim scenarios/cluster-100.toml       the scheduler of a cluster over 100 simulated GPUs

Exit code 1 when the checker finds a violation.")]
pub(crate) struct SimArgs {
    /// The scenario, a TOML file
    pub(crate) scenario: PathBuf,

    /// Seed instead of the scenario's
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Execution policy instead of the scenario's
    #[arg(long)]
    pub(crate) policy: Option<String>,

    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,

    /// Write every event and action to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,

    /// Write requests and runs in the trace event format, for ui.perfetto.dev
    #[arg(long, value_name = "FILE.json")]
    pub(crate) perfetto: Option<PathBuf>,

    /// Draw a timeline of the device
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) timeline: Option<PathBuf>,

    /// Where the timeline begins
    #[arg(long, default_value_t = 0.0)]
    pub(crate) from_ms: f64,

    /// Where the timeline ends
    #[arg(long, default_value_t = 50.0)]
    pub(crate) to_ms: f64,
}

/// Runs the command.
pub(crate) fn run(args: &SimArgs) -> Result<(), Failure> {
    let text = std::fs::read_to_string(&args.scenario).unwrap_or_default();
    if ClusterScenario::is_one(&text) {
        return run_cluster(args);
    }
    let mut scenario = Scenario::read(&args.scenario).map_err(Failure::usage)?;
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    if let Some(policy) = &args.policy {
        scenario.policy.clone_from(policy);
    }
    let options = SimulationOptions {
        check: true,
        trace: args.trace.is_some(),
        spans: args.timeline.is_some(),
        recorded_spans: args.perfetto.as_ref().map_or(0, |_| recorded_run::MAX_SPANS),
        planted_bug: None,
    };
    let alone = SimulationOptions::default();
    let alone = simulation::run(&scenario.real_time_alone(), alone).map_err(Failure::usage)?;
    let simulation = Simulation::new(&scenario, options).map_err(Failure::usage)?;
    let (outcome, gpu, real_time) = simulation.finish_with_gpu();
    let report = SimulationReport::new(&scenario.name, &scenario.policy, &outcome, &alone);
    if let Some(path) = &args.trace {
        write_file(path, &outcome.trace)?;
    }
    if let Some(path) = &args.perfetto {
        write_file(path, &recorded_run::trace(outcome.recorded.as_slice()))?;
    }
    if let Some(path) = &args.timeline {
        let at = |ms: f64| Nanos((ms * 1e6) as u64);
        write_file(path, &timeline::svg(&gpu, &real_time, at(args.from_ms)..at(args.to_ms)))?;
    }
    if args.json {
        let result = serde_json::json!({ "report": report, "violations": outcome.violations });
        println!("{result:#}");
    } else {
        let reports = [report];
        print!("{}\n{}", table(&reports), outcome_table(&reports));
        outcome.violations.iter().for_each(|violation| println!("violation at {violation}"));
    }
    match outcome.violations.len() {
        0 => Ok(()),
        count => Err(Failure::failed(format!("{count} violations"))),
    }
}

/// A cluster scenario: the real scheduler over simulated GPUs.
fn run_cluster(args: &SimArgs) -> Result<(), Failure> {
    let files = [&args.trace, &args.perfetto, &args.timeline];
    if args.policy.is_some() || files.iter().any(|file| file.is_some()) {
        let message = "--policy, --trace, --perfetto and --timeline are of scenarios of one GPU";
        return Err(Failure::usage(message));
    }
    let mut scenario = ClusterScenario::read(&args.scenario).map_err(Failure::usage)?;
    scenario.seed = args.seed.unwrap_or(scenario.seed);
    let report = cluster_scenario::run(&scenario).map_err(Failure::usage)?;
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?),
        false => print!("{}", cluster_scenario::text(&report)),
    }
    match report.violations.first() {
        None => Ok(()),
        Some(violation) => Err(Failure::failed(violation)),
    }
}
