//! `atoll conformance`: the tests that every device passes, on this machine's device.

use assembly::Failure;
use device::conformance::{self, Verdict};
use serde::Serialize;

use crate::args::ConformanceArgs;

#[derive(Debug, Serialize)]
struct ConformanceReport {
    device: String,
    passed: usize,
    failed: usize,
    skipped: usize,
    cases: Vec<CaseReport>,
}

#[derive(Debug, Serialize)]
struct CaseReport {
    name: String,
    verdict: &'static str,
    reason: Option<String>,
}

/// Runs the command.
pub(crate) fn run(args: &ConformanceArgs) -> Result<(), Failure> {
    let device = assembly::open_device(&args.device)?;
    let mut report = conformance::run(&*device);
    if args.device.device.starts_with("cuda") {
        let swapping =
            assembly::open_gpu_with(&args.device, |options| options.weights_on_demand = true)?;
        report.cases.extend(conformance::run_residency(&swapping).cases);
        report.cases.extend(swapping.conformance_cases());
    }
    let failed = report.failures().count();
    if args.json {
        let cases: Vec<CaseReport> = report.cases.iter().map(case).collect();
        let count = |verdict: &str| cases.iter().filter(|case| case.verdict == verdict).count();
        let report = ConformanceReport {
            device: device.info().description.clone(),
            passed: count("passed"),
            failed,
            skipped: count("skipped"),
            cases,
        };
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        println!("{}\n{report}", device.info().description);
    }
    if failed == 0 {
        Ok(())
    } else {
        Err(Failure::failed(format!("{failed} conformance tests failed")))
    }
}

fn case(case: &conformance::Case) -> CaseReport {
    let (verdict, reason) = match &case.verdict {
        Verdict::Passed => ("passed", None),
        Verdict::Failed(why) => ("failed", Some(why.clone())),
        Verdict::Skipped(why) => ("skipped", Some(why.clone())),
    };
    CaseReport { name: case.name.clone(), verdict, reason }
}
