//! A node's metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use runtime::device_group::router::ReplicaState;
use runtime::node::PREEMPTION_BOUNDS_US;
use runtime::{DeviceGroup, NodeMemory, PreemptionStats};

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

/// Writes the metrics of `models` and of the beginnings they share, of `device_group`.
pub(super) fn write(
    text: &mut String,
    models: &[Arc<Served>],
    trunks: &[Arc<Trunk>],
    device_group: &DeviceGroup,
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
    write_leaving(&mut out, models, device_group);
    write_replicas(&mut out, models, device_group);
    out.family("atoll_resident_bytes", Kind::Gauge, "Device memory all loaded models hold");
    for (node, device) in device_group.nodes().iter().zip(device_group.names()) {
        out.sample("atoll_resident_bytes", &[("device", device)], node.resident().0);
    }
    write_memory(&mut out, device_group);
    write_trunks(&mut out, trunks, device_group);
}

/// Beginnings that several models share.
fn write_trunks(out: &mut Exposition<'_>, trunks: &[Arc<Trunk>], device_group: &DeviceGroup) {
    let stats = |trunk: &Arc<Trunk>| {
        let (mut success, mut executions) = (0, 0);
        for (view, key) in device_group.replicas(trunk.key) {
            let stats = device_group.nodes()[view.device].stats(key).unwrap_or_default();
            success += stats.success;
            executions += stats.executions;
        }
        (success, executions)
    };
    let stats: Vec<_> = trunks.iter().map(|trunk| (trunk, stats(trunk))).collect();
    let name = "atoll_trunk_requests_total";
    out.family(name, Kind::Counter, "Requests that a beginning shared by models was run for");
    stats.iter().for_each(|(t, (success, _))| out.sample(name, &[("trunk", &t.name)], *success));
    let name = "atoll_trunk_executions_total";
    out.family(name, Kind::Counter, "Executions of such a beginning; a batch counts once");
    stats.iter().for_each(|(t, (_, runs))| out.sample(name, &[("trunk", &t.name)], *runs));
}

/// Where models are, and what each device does of them.
fn write_replicas(out: &mut Exposition<'_>, models: &[Arc<Served>], device_group: &DeviceGroup) {
    let name = "atoll_model_resident_bytes";
    out.family(name, Kind::Gauge, "Device memory a loaded model holds");
    let replicas: Vec<_> = models
        .iter()
        .flat_map(|model| {
            device_group.replicas(model.key).into_iter().map(move |held| (model, held))
        })
        .collect();
    for (model, (view, key)) in &replicas {
        let bytes = device_group.nodes()[view.device].resident_of(*key).unwrap_or_default().0;
        out.sample(name, &with(model, "device", &device_group.names()[view.device]), bytes);
    }
    if device_group.nodes().len() == 1 {
        return;
    }
    let name = "atoll_replica_ready";
    out.family(
        name,
        Kind::Gauge,
        "1 where a device takes requests of a model, 0 while it lets it go",
    );
    for (model, (view, _)) in &replicas {
        let ready = u8::from(view.state == ReplicaState::Serving);
        out.sample(name, &with(model, "device", &device_group.names()[view.device]), ready);
    }
    let name = "atoll_replica_requests_total";
    out.family(name, Kind::Counter, "Requests answered with outputs, by device");
    for (model, (view, _)) in &replicas {
        out.sample(
            name,
            &with(model, "device", &device_group.names()[view.device]),
            view.completed,
        );
    }
    let name = "atoll_replica_pending";
    out.family(name, Kind::Gauge, "Requests waiting or running, by device");
    for (model, (view, _)) in &replicas {
        out.sample(name, &with(model, "device", &device_group.names()[view.device]), view.pending);
    }
    let changes = device_group.changes();
    let name = "atoll_replica_changes_total";
    out.family(name, Kind::Counter, "Replicas made for load, taken away, and refused by a device");
    for (what, count) in
        [("made", changes.added), ("taken", changes.removed), ("refused", changes.failed)]
    {
        out.sample(name, &[("change", what)], count);
    }
}

/// A family with one sample per device.
type PerDevice = (&'static str, Kind, &'static str, fn(&NodeMemory) -> Option<u64>);

const MEMORY: [PerDevice; 9] = [
    ("atoll_weights_budget_bytes", Kind::Gauge, "What weights may take", |m| Some(m.budget.0)),
    ("atoll_weights_bytes", Kind::Gauge, "Weights on the device or arriving", |m| {
        Some(m.device?.weights.0)
    }),
    ("atoll_weights_pinned_bytes", Kind::Gauge, "Weights that stay", |m| Some(m.pinned.0)),
    (
        "atoll_device_used_bytes",
        Kind::Gauge,
        "Memory used on the device by everybody, as its own tools count",
        |m| Some(m.device?.system?.0),
    ),
    ("atoll_loads_waiting", Kind::Gauge, "Models that wait to be loaded", |m| {
        Some(m.pending_loads as u64)
    }),
    ("atoll_loads_total", Kind::Counter, "Times a model's weights were loaded", |m| {
        Some(m.swaps.loads)
    }),
    ("atoll_loaded_bytes_total", Kind::Counter, "Bytes of weights that were loaded", |m| {
        Some(m.swaps.loaded.0)
    }),
    (
        "atoll_loads_refused_total",
        Kind::Counter,
        "Times the device had no room for weights after all",
        |m| Some(m.swaps.refused),
    ),
    ("atoll_evictions_total", Kind::Counter, "Times weights were evicted", |m| {
        Some(m.swaps.evictions)
    }),
];

/// Weights that come and go: what there is room for, what is there, and what was moved.
fn write_memory(out: &mut Exposition<'_>, device_group: &DeviceGroup) {
    let devices = device_group.nodes().iter().zip(device_group.names());
    let memories: Vec<(NodeMemory, &String)> = devices
        .map(|(node, name)| (node.memory(), name))
        .filter(|(memory, _)| memory.device.is_some())
        .collect();
    for (name, kind, help, value) in MEMORY {
        let samples: Vec<_> =
            memories.iter().filter_map(|(memory, device)| Some((device, value(memory)?))).collect();
        if samples.is_empty() {
            continue;
        }
        out.family(name, kind, help);
        for (device, value) in samples {
            out.sample(name, &[("device", device.as_str())], value);
        }
    }
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
fn write_leaving(out: &mut Exposition<'_>, models: &[Arc<Served>], device_group: &DeviceGroup) {
    const NAME: &str = "atoll_preemption_leave_seconds";
    let mut leaving: Vec<(&Served, &str, PreemptionStats)> = Vec::new();
    for model in models {
        for (view, key) in device_group.replicas(model.key) {
            let seen = device_group.nodes()[view.device].preemption_stats(key).unwrap_or_default();
            leaving.push((model, &device_group.names()[view.device], seen));
        }
    }
    out.family(
        NAME,
        Kind::Histogram,
        "From the order to leave for real time until the work was back",
    );
    let (bucket, sum, count) =
        (format!("{NAME}_bucket"), format!("{NAME}_sum"), format!("{NAME}_count"));
    for (model, device, leaving) in &leaving {
        let [name, version, device] = with(model, "device", device);
        let mut so_far = 0;
        for (bound, times) in PREEMPTION_BOUNDS_US.iter().zip(leaving.counts) {
            so_far += times;
            let seconds = (*bound as f64 / 1e6).to_string();
            out.sample(&bucket, &[name, version, device, ("le", &seconds)], so_far);
        }
        let all: u64 = leaving.counts.iter().sum();
        out.sample(&bucket, &[name, version, device, ("le", "+Inf")], all);
        out.sample(&sum, &[name, version, device], leaving.sum.0 as f64 / 1e9);
        out.sample(&count, &[name, version, device], all);
    }
    let name = "atoll_preemptions_caused_total";
    out.family(name, Kind::Counter, "Times other work left for real-time requests of the model");
    for (model, device, leaving) in &leaving {
        out.sample(name, &with(model, "device", device), leaving.caused);
    }
}
