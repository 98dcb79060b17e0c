//! `atoll bench disb` on a real device: loads the benchmark's models and runs every policy in real time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use base::Random;
use bench::disb;
use bench::live::{
    LeftOut, Live, LiveModel, LiveOptions, LiveReport, Rates, Workload, charts, table,
};
use bench::plot;
use device::Device;
use runtime::policy::NAMES;

use crate::args::DeviceArgs;
use crate::bench_command::DisbArgs;
use crate::failure::Failure;
use crate::sim_command::write;
use crate::{binding, engine};

/// Seconds of load before each cell, and of each model on its own.
const WARM_SECONDS: f64 = 0.4;

/// Tokens of a text where nothing else is said; as many as the benchmark's own requests have.
const SEQUENCE: usize = 128;

/// Why `reef` is left out of ALL.
const REEF: &str =
    "it kills and fuses kernels, which no device here can; it runs with --device sim";

/// Runs the command on the device that `args` name.
pub(crate) fn run(args: &DisbArgs) -> Result<(), Failure> {
    let (policies, left_out) = policies(&args.policy)?;
    let workloads = workloads(args)?;
    let named = DeviceArgs { device: args.device.clone(), settings: args.settings.clone() };
    let device = engine::open_device(&named)?;
    let mut names: Vec<&str> =
        workloads.iter().flat_map(|w| &w.clients).map(|client| client.model.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let models = load(args.models.as_deref(), args.seed, device.as_ref(), &names)?;
    let options =
        LiveOptions { seconds: args.seconds, warm_seconds: WARM_SECONDS, seed: args.seed };
    let description = device.info().description.clone();
    let live = Live::new(device, models, options).map_err(Failure::failed)?;
    for alone in live.alone() {
        let latency = &alone.latency;
        eprintln!("{} alone: mean {} us, p99 {} us", alone.model, latency.mean_us, latency.p99_us);
    }
    let mut report = LiveReport {
        device: description,
        driver: driver(&args.device),
        date: today(),
        command: std::env::args().collect::<Vec<_>>().join(" "),
        seed: args.seed,
        alone: live.alone().to_vec(),
        left_out,
        cells: Vec::new(),
    };
    for rates in rates(args)? {
        for workload in &workloads {
            for policy in &policies {
                let cell = live.run(workload, rates, policy).map_err(Failure::failed)?;
                eprintln!(
                    "{} {} {policy}: RT mean {} us, p99 {} us, {}/s in all, {} errors",
                    workload.name,
                    rates.name(),
                    cell.rt.mean_us,
                    cell.rt.p99_us,
                    cell.throughput_rps,
                    cell.errors
                );
                report.cells.push(cell);
                live.finish(&mut report.cells);
                // After every cell: a run that is cut short leaves what it has.
                if let Some(Some(path)) = &args.json {
                    write(path, &to_json(&report)?)?;
                }
            }
        }
    }
    finish(args, &report)
}

fn finish(args: &DisbArgs, report: &LiveReport) -> Result<(), Failure> {
    if let Some(path) = &args.plot {
        write(path, &plot::svg(&charts(&report.cells)))?;
    }
    match &args.json {
        Some(None) => println!("{}", to_json(report)?),
        _ => print!("{}", table(&report.cells)),
    }
    let broken = |cell: &&bench::live::Cell| cell.wrong_outputs > 0 || !cell.violations.is_empty();
    match report.cells.iter().find(broken) {
        None => Ok(()),
        Some(cell) => Err(Failure::failed(format!(
            "workload {} under {}: {} outputs differ from an undisturbed run's; {:?}",
            cell.workload, cell.policy, cell.wrong_outputs, cell.violations
        ))),
    }
}

fn to_json(report: &LiveReport) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(report).map_err(Failure::failed)?;
    Ok(text + "\n")
}

/// The policies to run, real time alone first as all others are compared with it, and those left out.
fn policies(asked: &str) -> Result<(Vec<String>, Vec<LeftOut>), Failure> {
    let (asked, left_out): (Vec<&str>, Vec<LeftOut>) = match asked {
        "ALL" => {
            let able = NAMES.into_iter().filter(|name| *name != "reef").collect();
            (able, vec![LeftOut { policy: "reef".to_string(), why: REEF.to_string() }])
        }
        list => (list.split(',').map(str::trim).collect(), Vec::new()),
    };
    for name in &asked {
        if !NAMES.contains(name) {
            let known = NAMES.join(", ");
            return Err(Failure::usage(format!("there is no policy '{name}'; known: {known}")));
        }
        if *name == "reef" {
            return Err(Failure::usage(format!("policy 'reef' cannot be run here: {REEF}")));
        }
    }
    let others = asked.into_iter().filter(|name| *name != "rt_only").map(str::to_string);
    Ok((["rt_only".to_string()].into_iter().chain(others).collect(), left_out))
}

fn rates(args: &DisbArgs) -> Result<Vec<Rates>, Failure> {
    match (args.rates.as_deref(), args.scaled) {
        (Some("literal"), false) | (None, false) => Ok(vec![Rates::Literal]),
        (Some("scaled"), _) | (None, true) => Ok(vec![Rates::Scaled]),
        (Some("both"), _) => Ok(vec![Rates::Scaled, Rates::Literal]),
        (Some(other), _) => Err(Failure::usage(format!(
            "--rates {other}: literal, scaled or both, and --scaled only with scaled rates"
        ))),
    }
}

fn workloads(args: &DisbArgs) -> Result<Vec<Workload>, Failure> {
    let names: Vec<&str> = match args.workload.as_str() {
        "ALL" if args.trace.is_some() => disb::WORKLOADS.into_iter().chain(["REAL"]).collect(),
        "ALL" => disb::WORKLOADS.into(),
        list => list.split(',').map(str::trim).collect(),
    };
    let workload = |name: &str| {
        if name == "REAL" {
            let path = args.trace.as_ref().ok_or_else(|| {
                Failure::usage("REAL is read from DISB's own file: give it with --trace")
            })?;
            let (clients, seconds) = disb::read_clients(path).map_err(Failure::usage)?;
            return Ok(Workload { name: name.to_string(), clients, seconds: Some(seconds) });
        }
        let clients = disb::clients(name).ok_or_else(|| {
            Failure::usage(format!(
                "there is no workload '{name}'; known: A, B, C, D, E, REAL, ALL"
            ))
        })?;
        Ok(Workload { name: name.to_string(), clients, seconds: None })
    };
    names.into_iter().map(workload).collect()
}

/// The models of these names from the folder that was given.
pub(crate) fn load(
    folder: Option<&Path>,
    seed: u64,
    device: &dyn Device,
    names: &[&str],
) -> Result<Vec<LiveModel>, Failure> {
    let folder = folder.ok_or_else(|| {
        Failure::usage("a real device runs real models: name their folder with --models")
    })?;
    let mut random = Random::new(seed);
    let mut one = |name: &&str| {
        let path = file(folder, name)?;
        let failed = |err: String| Failure::failed(format!("{}: {err}", path.display()));
        let plan = engine::compile_file(&path).map_err(|err| failed(err.to_string()))?;
        let mut bindings = binding::Bindings::new();
        bindings.insert("sequence".to_string(), SEQUENCE);
        let inputs = plan
            .inputs
            .iter()
            .map(|id| {
                let info = plan.value(*id);
                let shape = binding::shape_of(info, &bindings);
                binding::random_tensor(info.dtype, shape, &mut random).map_err(failed)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let program = device.load(Arc::new(plan)).map_err(|err| failed(err.to_string()))?;
        eprintln!("{name}: loaded, {} on the device", program.resident());
        Ok(LiveModel { name: (*name).to_string(), program, inputs })
    };
    names.iter().map(&mut one).collect()
}

/// The benchmark and the model zoo spell one name differently.
fn file(folder: &Path, name: &str) -> Result<PathBuf, Failure> {
    let spelled = if name == "inceptionv3" { "inception_v3" } else { name };
    let paths = [name, spelled].map(|stem| folder.join(format!("{stem}.onnx")));
    let found = paths.iter().find(|path| path.is_file());
    found.cloned().ok_or_else(|| {
        Failure::usage(format!("there is no {} for the workload's '{name}'", paths[1].display()))
    })
}

/// The version of the GPU's driver, where its kernel module tells.
pub(crate) fn driver(device: &str) -> Option<String> {
    if !device.starts_with("cuda") {
        return None;
    }
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let numbered =
        |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    text.lines().next()?.split_whitespace().find(numbered).map(str::to_string)
}

/// Today in Greenwich, as YYYY-MM-DD.
pub(crate) fn today() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (year, month, day) = civil((now.as_secs() / 86_400) as i64);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The date of a day counted from 1970-01-01 (Hinnant's `civil_from_days`, for days after it).
fn civil(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_454), (2026, 1, 1));
    }

    #[test]
    fn real_time_alone_is_first_and_reef_is_refused() {
        let (all, left_out) = policies("ALL").unwrap();
        assert_eq!((all[0].as_str(), all.len()), ("rt_only", 6));
        assert_eq!(left_out[0].policy, "reef");
        assert_eq!(policies("atoll").unwrap().0, ["rt_only", "atoll"]);
        assert!(policies("reef").is_err());
        assert!(policies("atoll,nobody").is_err());
    }
}
