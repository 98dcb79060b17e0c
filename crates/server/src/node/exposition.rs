//! A node's metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use runtime::node::LEAVE_BOUNDS_US;
use runtime::{Leaving, Node, NodeMemory};

use crate::metrics::{Exposition, Kind};

use super::counters::{Counters, LATENCY_BOUNDS_US};
use super::families::Trunk;
use super::served::Served;

/// A family with one sample per model.
struct PerModel {
    name: &'static str,
    kind: Kind,
    help: &'static str,
    value: fn(&Counters) -> u64,
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

const FAMILIES: [PerModel; 12] = [
    PerModel {
        name: "nv_inference_request_success",
        kind: Kind::Counter,
        help: "Requests answered with outputs",
        value: |c| c.success.read().count,
    },
    PerModel {
        name: "nv_inference_count",
        kind: Kind::Counter,
        help: "Inferences done; a batch of n counts n",
        value: |c| load(&c.inferences),
    },
    PerModel {
        name: "nv_inference_exec_count",
        kind: Kind::Counter,
        help: "Executions done; a batch counts once",
        value: |c| load(&c.executions),
    },
    PerModel {
        name: "nv_inference_pending_request_count",
        kind: Kind::Gauge,
        help: "Requests waiting or running",
        value: |c| load(&c.pending),
    },
    PerModel {
        name: "nv_inference_request_duration_us",
        kind: Kind::Counter,
        help: "Time of successful requests",
        value: |c| c.success.read().ns / 1000,
    },
    PerModel {
        name: "nv_inference_queue_duration_us",
        kind: Kind::Counter,
        help: "Time of successful requests off the device",
        value: |c| c.queue.read().ns / 1000,
    },
    PerModel {
        name: "nv_inference_compute_input_duration_us",
        kind: Kind::Counter,
        help: "Time spent making inputs ready",
        value: |_| 0,
    },
    PerModel {
        name: "nv_inference_compute_infer_duration_us",
        kind: Kind::Counter,
        help: "Time of successful requests on the device",
        value: |c| c.compute.read().ns / 1000,
    },
    PerModel {
        name: "nv_inference_compute_output_duration_us",
        kind: Kind::Counter,
        help: "Time spent making outputs ready",
        value: |_| 0,
    },
    PerModel {
        name: "atoll_preemptions_total",
        kind: Kind::Counter,
        help: "Times work was made to leave for other work",
        value: |c| load(&c.preemptions),
    },
    PerModel {
        name: "atoll_deadline_misses_total",
        kind: Kind::Counter,
        help: "Requests not answered before their deadline",
        value: |c| load(&c.deadline_misses),
    },
    PerModel {
        name: "atoll_bad_inputs_total",
        kind: Kind::Counter,
        help: "Requests whose inputs the device refused",
        value: |c| load(&c.bad_input),
    },
];

/// Writes the metrics of `models` of `node` on `device`.
pub(super) fn write(
    text: &mut String,
    models: &[Arc<Served>],
    trunks: &[Arc<Trunk>],
    device: &str,
    node: &Node,
) {
    let mut out = Exposition::new(text);
    for family in &FAMILIES {
        out.family(family.name, family.kind, family.help);
        for model in models {
            out.sample(family.name, &labels(model), (family.value)(&model.counters));
        }
    }
    write_failures(&mut out, models);
    write_drops(&mut out, models);
    write_latency(&mut out, models);
    write_leaving(&mut out, models, node);
    out.family("atoll_model_resident_bytes", Kind::Gauge, "Device memory a loaded model holds");
    for model in models {
        let bytes = node.resident_of(model.key).unwrap_or_default().0;
        out.sample("atoll_model_resident_bytes", &labels(model), bytes);
    }
    out.family("atoll_resident_bytes", Kind::Gauge, "Device memory all loaded models hold");
    out.sample("atoll_resident_bytes", &[("device", device)], node.resident().0);
    write_memory(&mut out, device, &node.memory());
    write_trunks(&mut out, trunks, node);
}

/// Beginnings that several models share.
fn write_trunks(out: &mut Exposition<'_>, trunks: &[Arc<Trunk>], node: &Node) {
    let stats: Vec<_> = trunks.iter().map(|t| (t, node.stats(t.key).unwrap_or_default())).collect();
    let name = "atoll_trunk_requests_total";
    out.family(name, Kind::Counter, "Requests that a beginning shared by models was run for");
    stats.iter().for_each(|(t, stats)| out.sample(name, &[("trunk", &t.name)], stats.success));
    let name = "atoll_trunk_executions_total";
    out.family(name, Kind::Counter, "Executions of such a beginning; a batch counts once");
    stats.iter().for_each(|(t, stats)| out.sample(name, &[("trunk", &t.name)], stats.executions));
}

/// Weights that come and go: what there is room for, what is there, and what was moved.
fn write_memory(out: &mut Exposition<'_>, device: &str, memory: &NodeMemory) {
    let Some(used) = memory.device else { return };
    let device = [("device", device)];
    let mut one = |name: &'static str, kind: Kind, help: &'static str, value: u64| {
        out.family(name, kind, help);
        out.sample(name, &device, value);
    };
    let swaps = &memory.swaps;
    one("atoll_weights_budget_bytes", Kind::Gauge, "What weights may take", memory.budget.0);
    one("atoll_weights_bytes", Kind::Gauge, "Weights on the device or arriving", used.weights.0);
    one("atoll_weights_pinned_bytes", Kind::Gauge, "Weights that stay", memory.pinned.0);
    if let Some(system) = used.system {
        let help = "Memory used on the device by everybody, as its own tools count";
        one("atoll_device_used_bytes", Kind::Gauge, help, system.0);
    }
    let help = "Models that wait to be loaded";
    one("atoll_loads_waiting", Kind::Gauge, help, memory.wanted as u64);
    one("atoll_loads_total", Kind::Counter, "Times a model's weights were loaded", swaps.loads);
    let help = "Bytes of weights that were loaded";
    one("atoll_loaded_bytes_total", Kind::Counter, help, swaps.loaded.0);
    let help = "Times the device had no room for weights after all";
    one("atoll_loads_refused_total", Kind::Counter, help, swaps.refused);
    one("atoll_evictions_total", Kind::Counter, "Times weights were evicted", swaps.evictions);
}

fn labels(model: &Served) -> [(&str, &str); 2] {
    [("model", &model.name), ("version", &model.version_text)]
}

fn with<'a>(model: &'a Served, key: &'a str, value: &'a str) -> [(&'a str, &'a str); 3] {
    let [name, version] = labels(model);
    [name, version, (key, value)]
}

fn write_failures(out: &mut Exposition<'_>, models: &[Arc<Served>]) {
    let name = "nv_inference_request_failure";
    out.family(name, Kind::Counter, "Requests answered with an error, by reason");
    for model in models {
        let c = &model.counters;
        let rejected =
            load(&c.queue_full) + load(&c.deadline) + load(&c.draining) + load(&c.not_run);
        out.sample(name, &with(model, "reason", "REJECTED"), rejected);
        out.sample(name, &with(model, "reason", "CANCELED"), load(&c.cancelled));
        out.sample(name, &with(model, "reason", "BACKEND"), load(&c.backend));
        out.sample(name, &with(model, "reason", "OTHER"), load(&c.bad_input));
    }
}

fn write_drops(out: &mut Exposition<'_>, models: &[Arc<Served>]) {
    let name = "atoll_drops_total";
    out.family(name, Kind::Counter, "Requests given up before an answer, by reason");
    for model in models {
        let c = &model.counters;
        for (reason, counter) in [
            ("queue_full", &c.queue_full),
            ("deadline", &c.deadline),
            ("cancelled", &c.cancelled),
            ("draining", &c.draining),
            ("policy", &c.not_run),
        ] {
            out.sample(name, &with(model, "reason", reason), load(counter));
        }
    }
}

fn write_latency(out: &mut Exposition<'_>, models: &[Arc<Served>]) {
    const BUCKET: &str = "nv_inference_request_duration_histogram_us_bucket";
    const SUM: &str = "nv_inference_request_duration_histogram_us_sum";
    const COUNT: &str = "nv_inference_request_duration_histogram_us_count";
    let help = "Time of successful requests";
    out.family("nv_inference_request_duration_histogram_us", Kind::Histogram, help);
    for model in models {
        let counts = model.counters.latency();
        for (bound, count) in LATENCY_BOUNDS_US.iter().zip(counts) {
            out.sample(BUCKET, &with(model, "le", &bound.to_string()), count);
        }
        let all = counts[counts.len() - 1];
        out.sample(BUCKET, &with(model, "le", "+Inf"), all);
        out.sample(SUM, &labels(model), model.counters.success.read().ns / 1000);
        out.sample(COUNT, &labels(model), all);
    }
}

/// How long models took to leave for real time, and for whom others left. Until the device had given the work back: the
/// multiprocessors are free sooner.
fn write_leaving(out: &mut Exposition<'_>, models: &[Arc<Served>], node: &Node) {
    const NAME: &str = "atoll_preemption_leave_seconds";
    let leaving: Vec<Leaving> =
        models.iter().map(|model| node.leaving(model.key).unwrap_or_default()).collect();
    out.family(
        NAME,
        Kind::Histogram,
        "From the order to leave for real time until the work was back",
    );
    let (bucket, sum, count) =
        (format!("{NAME}_bucket"), format!("{NAME}_sum"), format!("{NAME}_count"));
    for (model, leaving) in models.iter().zip(&leaving) {
        let mut so_far = 0;
        for (bound, times) in LEAVE_BOUNDS_US.iter().zip(leaving.counts) {
            so_far += times;
            let seconds = (*bound as f64 / 1e6).to_string();
            out.sample(&bucket, &with(model, "le", &seconds), so_far);
        }
        let all: u64 = leaving.counts.iter().sum();
        out.sample(&bucket, &with(model, "le", "+Inf"), all);
        out.sample(&sum, &labels(model), leaving.sum.0 as f64 / 1e9);
        out.sample(&count, &labels(model), all);
    }
    let name = "atoll_preemptions_caused_total";
    out.family(name, Kind::Counter, "Times other work left for real-time requests of the model");
    for (model, leaving) in models.iter().zip(&leaving) {
        out.sample(name, &labels(model), leaving.caused);
    }
}
