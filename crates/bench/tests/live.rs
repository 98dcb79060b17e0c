//! DISB in real time on the CPU device, with a tiny model under every name.

use std::sync::Arc;

use bench::arrival::Arrival;
use bench::disb;
use bench::live::{
    CellReport, LiveBenchmark, LiveError, LiveModel, LiveOptions, Rates, SoakOptions, SoakReport,
    Workload, charts, table,
};
use bench::recorded_run;
use cpu::{CpuDevice, CpuOptions};
use device::Device;
use model::Tensor;
use runtime::NodeError;
use runtime::policy::NAMES;
use runtime::spans::Span;

const DIGITS: &[u8] = include_bytes!("../../../assets/digits.onnx");

/// Spans of a cell that are recorded.
const RECORDED_SPANS: usize = 50;

fn live() -> LiveBenchmark {
    let device: Arc<dyn Device> =
        Arc::new(CpuDevice::new(CpuOptions { threads: 1, queues: 1, ..CpuOptions::default() }));
    let plan = Arc::new(compiler::compile_onnx(DIGITS, None).unwrap());
    let program = device.load(plan.clone()).unwrap();
    let input = |id: &model::ValueId| {
        let dims = plan.value(*id).shape.clone().unwrap();
        let shape: Vec<usize> =
            dims.iter().map(|dim| if let model::Dim::Fixed(n) = dim { *n } else { 1 }).collect();
        let count = shape.iter().product();
        Tensor::from_vec(shape, vec![0.5f32; count]).unwrap()
    };
    let inputs: Vec<Tensor> = plan.inputs.iter().map(input).collect();
    let model = |name: &str| LiveModel {
        name: name.to_string(),
        program: program.clone(),
        inputs: inputs.clone(),
    };
    let options = LiveOptions {
        seconds: 0.3,
        warm_seconds: 0.05,
        seed: 1,
        max_rt_slowdown_percent: 1.0,
        recorded_spans: RECORDED_SPANS,
    };
    LiveBenchmark::new(device, disb::MODELS.map(model).into(), options).unwrap()
}

fn workload(name: &str) -> Workload {
    Workload { name: name.to_string(), clients: disb::clients(name).unwrap(), seconds: None }
}

/// Attempts of a run in which too little may happen on a machine that stalls.
const ATTEMPTS: usize = 5;

/// A cell with real-time replies; no reply of the attempts before it was wrong.
fn run_until_replied(live: &LiveBenchmark, name: &str, rates: Rates, policy: &str) -> CellReport {
    for _ in 0..ATTEMPTS {
        let (cell, _) = live.run(&workload(name), rates, policy).unwrap();
        assert_eq!((cell.errors, cell.wrong_outputs), (0, 0), "{cell:?}");
        assert_eq!(cell.violations, Vec::<String>::new(), "{name} under {policy}");
        if cell.rt.count > 0 && cell.throughput_rps > 0.0 {
            return cell;
        }
    }
    panic!("{name} under {policy}: no request got a reply");
}

#[test]
fn every_policy_replies_with_equal_outputs() {
    let live = live();
    let mut cells = Vec::new();
    for (name, rates) in [("A", Rates::Literal), ("E", Rates::Scaled)] {
        for policy in NAMES.into_iter().rev().filter(|policy| *policy != "reef") {
            let cell = run_until_replied(&live, name, rates, policy);
            assert_eq!(cell.be_models.is_empty(), policy == "rt_only");
            let leaves = ["atoll", "atoll_alone", "reef_n"].contains(&policy);
            assert!(leaves || cell.preempted.count == 0, "{cell:?}");
            cells.push(cell);
        }
    }
    live.finish(&mut cells);
    print!("{}", table(&cells));
    let alone = cells.iter().filter(|cell| cell.policy == "rt_only");
    assert!(alone.clone().all(|cell| cell.over_rt_only == 1.0 && cell.rt_increase.mean_pct == 0.0));
    assert!(cells.iter().all(|cell| cell.over_free_streams.is_some()));
    let groups: Vec<usize> = charts(&cells).iter().map(|chart| chart.groups.len()).collect();
    assert!(!groups.is_empty() && groups.iter().all(|count| *count == 1));
}

#[test]
fn scaled_rates_use_the_published_share() {
    let live = live();
    let (cell, _) = live.run(&workload("D"), Rates::Scaled, "rt_only").unwrap();
    assert_eq!(cell.rt_share_pct, 70.0);
    let of = |name: &str| live.alone().iter().find(|a| a.model == name).unwrap().latency.mean_us;
    let used: f64 =
        cell.rt_models.iter().map(|model| model.offered_rps * of(&model.model) / 1e6).sum();
    // Reports round rates to hundredths.
    let rounding: f64 = cell.rt_models.iter().map(|model| 0.005 * of(&model.model) / 1e6).sum();
    assert!((used - 0.7).abs() < 1e-3 + rounding, "{used}");
}

#[test]
fn unsupported_policies_and_unknown_models_are_refused() {
    let live = live();
    let refused = live.run(&workload("A"), Rates::Literal, "reef").unwrap_err();
    assert!(matches!(refused, LiveError::Node(NodeError::PolicyNotSupported(_))), "{refused}");
    let mut other = workload("A");
    other.clients[0].model = "unknown".to_string();
    let refused = live.run(&other, Rates::Literal, "atoll").unwrap_err().to_string();
    assert!(refused.contains("unknown"), "{refused}");
}

#[test]
fn a_soak_repeats_the_trace_and_finds_no_fault() {
    let mut real = workload("D");
    for client in real.clients.iter_mut().take(5) {
        client.arrival = Arrival::Trace { times_ms: (0..10).map(|n| n as f64 * 20.0).collect() };
    }
    (real.name, real.seconds) = ("REAL".to_string(), Some(0.2));
    let options = SoakOptions { seconds: 2.0, policy: "atoll".to_string(), seed: 3 };
    let full = (0..ATTEMPTS).any(|_| {
        let report = live().soak(&real, Rates::Literal, &options, &|_| {}).unwrap();
        println!("{}", serde_json::to_string_pretty(&report).unwrap());
        check(&report);
        let tenths = [&report.rt_first_tenth, &report.rt_last_tenth];
        // More than a single trace has.
        report.rt_answers + report.rt_dropped > 50
            && report.be_answers > 0
            && report.loads > 0
            && report.reloads > 0
            && report.cancellations > 0
            && tenths.iter().all(|tenth| tenth.count > 0)
    });
    assert!(full, "not everything came about");
}

/// Checks what must hold however much happened.
fn check(report: &SoakReport) {
    assert!(report.unexpected_errors.is_empty(), "{report:?}");
    assert_eq!((report.wrong_outputs, report.violations.len()), (0, 0), "{report:?}");
    assert_eq!(report.trace_repetitions, Some(10.0));
    assert!(report.checked_entries > 0 && report.loads == report.unloads, "{report:?}");
    let unloaded = report.expected_errors.get("unloaded").copied().unwrap_or(0);
    assert_eq!(unloaded, report.unloads, "{report:?}");
    let read: Vec<&str> = report.memory.iter().map(|growth| growth.what).collect();
    assert_eq!(read, ["process bytes", "threads", "open files"], "{report:?}");
}

#[test]
fn the_latest_spans_of_a_cell_are_recorded() {
    let live = live();
    for _ in 0..ATTEMPTS {
        let (cell, recorded) = live.run(&workload("A"), Rates::Literal, "atoll").unwrap();
        let run = recorded.unwrap();
        assert!(run.name.starts_with("A under atoll, literal"), "{}", run.name);
        assert!(run.spans.len() <= RECORDED_SPANS);
        let requests = run.spans.iter().filter_map(|span| match span {
            Span::Request(request) => Some(run.models[&request.model].as_str()),
            _ => None,
        });
        let models: Vec<&str> = requests.collect();
        assert!(models.iter().all(|model| disb::MODELS.contains(model)));
        // A cell without replies may come of a machine that stalls.
        if cell.rt.count > 0 && run.lost > 0 && !models.is_empty() {
            let trace = recorded_run::trace(&[run]);
            let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
            assert!(trace["otherData"]["lost_spans"].as_u64() > Some(0));
            return;
        }
    }
    panic!("no cell had more spans than are recorded");
}
