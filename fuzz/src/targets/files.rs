//! Files that describe models, queries and plans.

use std::path::Path;

use base::MonotonicClock;
use cluster::query::spec::QuerySpec;
use model::ModelConfig;
use model::config::{SettingsChange, pbtxt as pbtxt_format};
use planner::parvagpu::ParvaGpuVariant;
use planner::plan::GpuFile;
use planner::{
    Algorithm, GpuKind, Plan, PlanRules, Problem, ProfileTable, Profiles, SearchControl, Service,
    check, render,
};
use server::node::image;

/// Words of `config.pbtxt`.
pub(super) const PBTXT_WORDS: &[&str] = &[
    "name",
    "platform",
    "backend",
    "onnxruntime_onnx",
    "max_batch_size",
    "input",
    "output",
    "data_type",
    "TYPE_FP32",
    "dims",
    "reshape",
    "shape",
    "label_filename",
    "dynamic_batching",
    "preferred_batch_size",
    "max_queue_delay_microseconds",
    "instance_group",
    "count",
    "kind",
    "KIND_GPU",
    "parameters",
    "key",
    "value",
    "string_value",
    "version_policy",
    "optimization",
    "sequence_batching",
    "ensemble_scheduling",
    "priority_levels",
    "default_priority_level",
];

/// Words of a model's settings.
pub(super) const SETTINGS_WORDS: &[&str] = &[
    "class",
    "priority",
    "slo_ms",
    "timeout_ms",
    "max_batch_size",
    "labels",
    "pinned",
    "batching",
    "policy",
    "preprocessing",
    "width",
    "height",
    "mean",
    "std",
    "layout",
    "resize",
    "crop",
    "queue_capacity",
    "rt",
    "be",
    "auto",
    "window",
    "elastic",
    "none",
    "workers",
    "max_batch",
    "max_wait_us",
    "mix_lengths",
    "mask",
    "limits",
    "rate",
    "concurrency",
    "classes",
    "max_priority",
    "null",
];

/// Words of a query.
pub(super) const QUERY_WORDS: &[&str] = &[
    "name",
    "slo_ms",
    "stage",
    "stages",
    "model",
    "inputs",
    "outputs",
    "fan_out",
    "picture",
    "regions",
    "text",
    "labels",
    "each",
    "from",
    "threshold",
    "max",
    "min",
    "width",
    "height",
];

/// Words of plans and profiles.
pub(super) const PLAN_WORDS: &[&str] = &[
    "gpus",
    "slices",
    "profile",
    "size",
    "start",
    "services",
    "name",
    "batch",
    "processes",
    "rate",
    "cycle_ms",
    "1g.10gb",
    "2g.20gb",
    "3g.40gb",
    "7g.80gb",
    "bert",
    "resnet50",
    "model",
    "mig_gpcs",
    "procs",
    "throughput_total_rps",
    "latency_ms",
    "memory_mib",
    "status",
    "ok",
];

/// `config.pbtxt`, beside no label file.
pub(super) fn pbtxt(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = pbtxt_format::parse(text, Path::new("/nonexistent"));
    }
}

/// A model's settings in TOML, and as the registry and the cluster store them.
pub(super) fn settings(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(config) = toml::from_str::<ModelConfig>(text) {
        let _ = config.batching.check();
        // What a registration may bring; other settings are read from the same file every time.
        if config.preprocessing.as_ref().is_some_and(|one| image::check(one).is_err()) {
            return;
        }
        let stored = serde_json::to_string(&config).expect("settings have a JSON form");
        serde_json::from_str::<ModelConfig>(&stored).expect("stored settings can be read");
    }
}

/// A change to the settings of a model that is served. Made twice, it changes nothing more.
pub(super) fn settings_change(data: &[u8]) {
    let Ok(change) = SettingsChange::parse(data) else { return };
    let _ = change.class_and_priority();
    let base = ModelConfig::default();
    let Ok(config) = change.apply(&base, &base) else { return };
    let again = change.apply(&config, &base).expect("a change that was made can be made again");
    assert_eq!(again, config);
    let stored = serde_json::to_string(&config).expect("settings have a JSON form");
    serde_json::from_str::<ModelConfig>(&stored).expect("stored settings can be read");
}

/// A query in TOML or JSON.
pub(super) fn query(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(checked) = QuerySpec::read(text).and_then(QuerySpec::check) else { return };
    for stage in 0..checked.spec.stages.len() {
        let _ = (checked.next(stage), checked.needed_outputs(stage));
    }
}

/// A problem as small as that of a workstation.
fn problem(profiles: Profiles) -> Problem {
    let service = |name: &str, rate, slo_ms| Service {
        name: name.to_string(),
        model: name.to_string(),
        rate,
        slo_ms,
    };
    Problem {
        gpu: GpuKind::find("h100-80gb").expect("a known GPU"),
        services: vec![service("bert", 20.0, 300.0), service("resnet50", 100.0, 100.0)],
        profiles,
        rules: PlanRules::default(),
    }
}

const PROFILES: &str = "\
model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms
bert,1,1,1,10,90
bert,7,8,2,200,80
resnet50,1,4,1,100,35
resnet50,2,8,2,300,40
";

/// A plan file: read for a problem, checked, drawn and written again.
pub(super) fn plan(data: &[u8]) {
    let Ok(gpus) = serde_json::from_slice::<Vec<GpuFile>>(data) else { return };
    let problem = problem(Profiles::from_csv(PROFILES).expect("profiles"));
    let Ok(plan) = Plan::from_file(&problem, &gpus) else { return };
    let _ = check(&problem, &plan);
    let _ = render::picture(&problem, &plan, true);
    let _ = render::svg(&problem, &plan);
    let _ = render::mig_parted(&problem, &plan);
    let again = plan.to_file(&problem);
    Plan::from_file(&problem, &again).expect("a plan that was read can be read again");
}

/// Profiles in CSV or JSON, and a plan from them.
pub(super) fn profiles(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let table = match text.starts_with('{') {
        true => ProfileTable::from_json(text),
        false => ProfileTable::from_csv(text),
    };
    let Ok(profiles) = table.and_then(|table| table.of_one_gpu()) else { return };
    let Ok((problem, _)) = problem(profiles).without_faults() else { return };
    let clock = MonotonicClock::new();
    // Solvers report often; a few reports are enough to see that they start well.
    let mut left = 50;
    let mut report = |_| {
        left -= 1;
        left > 0
    };
    let mut control = SearchControl::new(&clock, &mut report);
    let algorithm = Algorithm::ParvaGpu(ParvaGpuVariant::Full);
    if let Ok(output) = planner::run(&problem, algorithm, &mut control) {
        let _ = check(&problem, &output.solution.plan);
    }
}
