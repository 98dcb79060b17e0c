//! `atoll bench disb --device sim`: the policies in virtual time.

use assembly::{Failure, write_file};
use bench::disb::{self, DisbOptions};
use bench::plot::{self, Chart};
use bench::recorded_run;
use bench::report::{SimulationReport, table};
use runtime::policy::NAMES;

use super::args::DisbArgs;

/// Runs the benchmark.
pub(crate) fn run(args: &DisbArgs) -> Result<(), Failure> {
    if args.soak.is_some() {
        return Err(Failure::usage("--soak needs a real device: --device cpu or cuda:N"));
    }
    let policies: Vec<String> = match args.policy.as_str() {
        "ALL" => NAMES.map(str::to_string).into(),
        list => list.split(',').map(|name| name.trim().to_string()).collect(),
    };
    let pairs = disb::pairs();
    let mut workloads: Vec<&str> = match args.workload.as_str() {
        "ALL" => disb::WORKLOADS.into(),
        "PAIRS" => pairs.iter().map(String::as_str).collect(),
        list => list.split(',').map(str::trim).collect(),
    };
    if args.workload == "ALL" && args.trace.is_some() {
        workloads.push("REAL");
    }
    let each = recorded_run::spans_of_each(workloads.len() * policies.len());
    let recorded_spans = args.perfetto.as_ref().map_or(0, |_| each);
    let (mut reports, mut recorded) = (Vec::new(), Vec::new());
    for workload in workloads {
        let scenario = scenario(args, workload)?;
        let compared = disb::compare(workload, &scenario, &policies, recorded_spans);
        for (report, run) in compared.map_err(Failure::usage)? {
            reports.push(report);
            recorded.extend(run);
        }
    }
    if let Some(path) = &args.perfetto {
        write_file(path, &recorded_run::trace(&recorded))?;
    }
    if let Some(path) = &args.plot {
        write_file(path, &plot::svg(&charts(&reports)))?;
    }
    match &args.json {
        None => print!("{}", table(&reports)),
        Some(file) => {
            let text = serde_json::to_string_pretty(&reports).map_err(Failure::failed)? + "\n";
            match file {
                Some(path) => write_file(path, &text)?,
                None => print!("{text}"),
            }
        }
    }
    Ok(())
}

fn scenario(args: &DisbArgs, workload: &str) -> Result<bench::scenario::Scenario, Failure> {
    let scaled = args.scaled || args.rates.as_deref() == Some("scaled");
    let (gpu, seed) = (args.gpu.clone(), args.seed);
    let options = DisbOptions { gpu, seconds: args.seconds, seed, scaled };
    if workload == "REAL" {
        let path = args.trace.as_ref().ok_or_else(|| {
            Failure::usage("REAL is read from DISB's own file: give it with --trace")
        })?;
        return disb::read(path, workload, &options).map_err(Failure::usage);
    }
    disb::workload(workload, &options).ok_or_else(|| {
        Failure::usage(format!(
            "there is no workload '{workload}'; known: A, B, C, D, E, REAL, ALL, PAIRS, \
             or one pair like vgg19+resnet152"
        ))
    })
}

fn charts(reports: &[SimulationReport]) -> Vec<Chart> {
    let distinct = |name: fn(&SimulationReport) -> &String| {
        let mut names: Vec<String> = Vec::new();
        for report in reports {
            if !names.contains(name(report)) {
                names.push(name(report).clone());
            }
        }
        names
    };
    let (groups, policies) = (distinct(|r| &r.workload), distinct(|r| &r.policy));
    let chart = |title: &str, unit: &str, value: fn(&SimulationReport) -> f64| {
        let of = |policy: &String| {
            let mine = reports.iter().filter(|report| report.policy == *policy);
            (policy.clone(), mine.map(value).collect())
        };
        Chart {
            title: title.to_string(),
            unit: unit.to_string(),
            groups: groups.clone(),
            bars: policies.iter().map(of).collect(),
        }
    };
    vec![
        chart("Mean real-time latency", "ms", |r| r.rt_mean_us / 1e3),
        chart("Overall throughput", "requests/s", |r| r.throughput_rps),
        chart("Preemption, median", "us", |r| r.preempt_p50_us),
    ]
}
