//! The driver without coverage, and the requests with failing allocations.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use fuzz::driver::{self, Run, RunReport};
use fuzz::supervisor::Supervisor;
use fuzz::targets::{self, TARGETS, Target};
use fuzz::{allocations, allocator};
use serde_json::json;

const HELP: &str = "\
usage: fuzz_driver COMMAND

commands:
  run [--seconds N] [--jobs N] [--seed N] [--target NAME] [--json FILE]
                 run all targets, or one, N seconds each; --json writes what they did
  replay TARGET FILE...
                 run a target on inputs
  allocations [--min BYTES] [--case NAME] [--json FILE]
                 fail every allocation of at least BYTES of a request's way
  list           print the targets";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["run", options @ ..] => run(&Options(options)),
        ["replay", target, files @ ..] => replay(target, files),
        ["allocations", options @ ..] => run_allocations(&Options(options)),
        ["list"] => {
            TARGETS.iter().for_each(|target| println!("{}", target.name));
            ExitCode::SUCCESS
        }
        ["child", target, seed, from, seconds] => child(target, seed, from, seconds),
        ["allocations-child", case, from, min] => {
            let number = |text: &str| text.parse().expect("a number");
            allocator::set_tracing(std::env::var_os("ATOLL_FUZZ_TRACE").is_some());
            allocations::run_child(case, number(from), number(min) as usize);
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{HELP}");
            ExitCode::from(2)
        }
    }
}

/// Options as `--name value`.
struct Options<'a>(&'a [&'a str]);

impl<'a> Options<'a> {
    fn get(&self, name: &str) -> Option<&'a str> {
        let at = self.0.iter().position(|word| *word == name)?;
        self.0.get(at + 1).copied()
    }

    fn number(&self, name: &str, default: f64) -> f64 {
        self.get(name).map_or(default, |text| text.parse().expect("a number"))
    }
}

fn artifacts() -> PathBuf {
    let folder = std::env::var_os("ATOLL_FUZZ_ARTIFACTS").map(PathBuf::from);
    folder.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/artifacts").into())
}

/// One target in this process, for the supervisor.
fn child(name: &str, seed: &str, from: &str, seconds: &str) -> ExitCode {
    let run = Run {
        target: targets::find(name).expect("a target"),
        seed: seed.parse().expect("a seed"),
        from: from.parse().expect("a number"),
        time: Duration::from_secs_f64(seconds.parse().expect("seconds")),
        progress: std::env::var_os("ATOLL_FUZZ_PROGRESS").map(PathBuf::from),
        save: std::env::var_os("ATOLL_FUZZ_SAVE").map(PathBuf::from),
        artifacts: artifacts(),
    };
    println!("{}", driver::run(&run).to_line());
    // Threads of devices are not waited for.
    std::process::exit(0)
}

fn run(options: &Options<'_>) -> ExitCode {
    let supervisor = Supervisor {
        program: std::env::current_exe().expect("this program has a path"),
        seed: options.number("--seed", 1.0) as u64,
        time: Duration::from_secs_f64(options.number("--seconds", 2.0)),
        artifacts: artifacts(),
    };
    let wanted = |target: &&Target| options.get("--target").is_none_or(|name| name == target.name);
    let selected: Vec<&Target> = TARGETS.iter().filter(wanted).collect();
    let reports: Mutex<Vec<(&str, RunReport)>> = Mutex::default();
    let next = AtomicUsize::new(0);
    let worker = || {
        while let Some(target) = selected.get(next.fetch_add(1, Relaxed)) {
            let report = supervisor.run(target);
            print_report(target.name, &report);
            reports.lock().expect("no worker panics").push((target.name, report));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..options.number("--jobs", 1.0) as usize {
            scope.spawn(worker);
        }
    });
    let reports = reports.into_inner().expect("no worker panics");
    if let Some(path) = options.get("--json") {
        let one = |(name, report): &(&str, RunReport)| {
            let RunReport { inputs, seconds, peak, finds } = report;
            let finds = json!(finds);
            json!({"target": name, "inputs": inputs, "seconds": seconds, "peak": peak,
                   "finds": finds})
        };
        let list: Vec<_> = reports.iter().map(one).collect();
        std::fs::write(path, json!(list).to_string()).expect("the report can be written");
    }
    let clean = !reports.is_empty() && reports.iter().all(|(_, report)| report.finds.is_empty());
    if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print_report(name: &str, report: &RunReport) {
    let RunReport { inputs, seconds, peak, finds } = report;
    let rate = *inputs as f64 / seconds.max(1e-9);
    println!("{name}: {inputs} inputs, {seconds:.1} s, {rate:.0}/s, peak {} KiB", peak >> 10);
    finds.iter().for_each(|find| println!("{name}: FOUND {find}"));
}

fn replay(name: &str, files: &[&str]) -> ExitCode {
    let target = targets::find(name).expect("a target");
    for file in files {
        let data = std::fs::read(file).expect("the input can be read");
        let begin = std::time::Instant::now();
        let taken = targets::execute(target, &data);
        println!("{file}: {taken} bytes, {:?}", begin.elapsed());
    }
    ExitCode::SUCCESS
}

fn run_allocations(options: &Options<'_>) -> ExitCode {
    let program = std::env::current_exe().expect("this program has a path");
    let min = options.number("--min", 0.0) as usize;
    let wanted = |case: &&&str| options.get("--case").is_none_or(|name| name == **case);
    let mut list = Vec::new();
    let mut clean = true;
    for case in allocations::CASES.iter().filter(wanted) {
        let report = allocations::run_case(&program, case, min);
        let aborts = report.aborts.len();
        println!(
            "{case}: {} allocations of {min} bytes or more; {} refused, {} survived, {aborts} \
             aborted",
            report.allocations, report.refused, report.survived
        );
        let largest = report.aborts.iter().max().copied().unwrap_or_default();
        if aborts > 0 {
            println!("{case}: largest allocation that aborts: {largest} bytes");
        }
        report.faults.iter().for_each(|fault| println!("{case}: {fault}"));
        clean &= report.faults.is_empty() && (min == 0 || aborts == 0);
        list.push(json!({"case": case, "min": min, "allocations": report.allocations,
            "refused": report.refused, "survived": report.survived, "aborts": aborts,
            "largest_abort": largest}));
    }
    if let Some(path) = options.get("--json") {
        std::fs::write(path, json!(list).to_string()).expect("the report can be written");
    }
    if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
