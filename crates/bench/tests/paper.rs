//! The results of REEF's evaluation on the MI50-like GPU, and Atoll's.

use std::path::Path;

use bench::disb::{self, DisbOptions};
use bench::preemption;
use bench::report::{SimulationReport, table};
use bench::scenario::Scenario;

/// All workloads; REAL if its file is available.
fn workloads() -> Vec<(&'static str, Scenario)> {
    let options = DisbOptions { gpu: "mi50".into(), seconds: 2.0, seed: 1, scaled: false };
    let named = |name: &'static str| (name, disb::workload(name, &options).unwrap());
    let real = std::env::var_os("ATOLL_DISB_REAL")
        .map(|path| ("REAL", disb::read(Path::new(&path), "REAL", &options).unwrap()));
    disb::WORKLOADS.into_iter().map(named).chain(real).collect()
}

fn compare(workload: &str, scenario: &Scenario) -> Vec<SimulationReport> {
    let policies = runtime::policy::NAMES.map(str::to_string);
    let compared = disb::compare(workload, scenario, &policies, 0).unwrap();
    let reports: Vec<_> = compared.into_iter().map(|(report, _)| report).collect();
    print!("{}", table(&reports));
    reports
}

fn of<'a>(reports: &'a [SimulationReport], policy: &str) -> &'a SimulationReport {
    reports.iter().find(|report| report.policy == policy).unwrap()
}

#[test]
fn results_match_the_paper_and_atoll_is_better() {
    let mut broken = Vec::new();
    for (workload, scenario) in workloads() {
        let reports = compare(workload, &scenario);
        let mut expect = |holds: bool, what: &str| {
            if !holds {
                broken.push(format!("{workload}: {what}"));
            }
        };
        let increase = |policy| of(&reports, policy).rt_increase_pct;
        expect(increase("reef") < 2.0, "reef stays under 2 %");
        expect(increase("sequential") > 5.0, "waiting for a whole task costs");
        expect(increase("free_streams") > 30.0, "sharing freely costs");
        let gain =
            |policy| of(&reports, policy).throughput_rps / of(&reports, "rt_only").throughput_rps;
        expect(gain("reef") >= 1.5 || workload == "B", "reef gains half of real time alone");
        expect(gain("reef") > 1.05, "reef gains where real time fills the device");
        let (atoll, reef) = (of(&reports, "atoll"), of(&reports, "reef"));
        expect(atoll.rt_increase_pct <= reef.rt_increase_pct, "atoll costs no more than reef");
        expect(atoll.throughput_rps > reef.throughput_rps, "atoll does more than reef");
        // On D real time has few gaps, so REEF discards little.
        let part = if workload == "D" { 8.0 } else { 10.0 };
        expect(atoll.be_redone_pct <= reef.be_redone_pct / part, "atoll redoes a tenth");
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn reset_latency_is_constant_and_wait_latency_grows() {
    let points = preemption::by_shape().unwrap();
    for point in &points {
        println!("{point:?}");
        assert!(point.reef_us < 40.0 && point.atoll_us < point.reef_us, "{point:?}");
    }
    // By the number of kernels, then by their length.
    assert!(points[..5].windows(2).all(|pair| pair[0].wait_us < pair[1].wait_us), "{points:?}");
    assert!(points[5].wait_us < points[8].wait_us, "{points:?}");
    for point in preemption::by_model().unwrap() {
        println!("{point:?}");
        assert!(point.reef_us < 40.0 && point.wait_us > 3.0 * point.reef_us, "{point:?}");
    }
}
