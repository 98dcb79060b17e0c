//! A node's metrics.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use device::{DeviceReadings, thread_watch};
use runtime::device_group::router::ReplicaState;
use runtime::node::PREEMPTION_BOUNDS_US;
use runtime::{DeviceGroup, NodeMemory, PreemptionStats};

use crate::metrics::{Exposition, MetricKind};

use super::counters::{BOUNDS_US, Counters, DurationHistogram};
use super::prefix_batching::PrefixModel;
use super::served_model::ServedModel;

/// A metric with one sample per model.
struct PerModel {
    name: &'static str,
    kind: MetricKind,
    help: &'static str,
    value: fn(&Counters) -> u64,
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

const MODEL_METRICS: [PerModel; 12] = [
    PerModel {
        name: "nv_inference_request_success",
        kind: MetricKind::Counter,
        help: "Requests with outputs",
        value: |c| c.success.read().count,
    },
    PerModel {
        name: "nv_inference_count",
        kind: MetricKind::Counter,
        help: "Inferences; a batch of n counts n",
        value: |c| load(&c.inferences),
    },
    PerModel {
        name: "nv_inference_exec_count",
        kind: MetricKind::Counter,
        help: "Executions; a batch counts once",
        value: |c| load(&c.executions),
    },
    PerModel {
        name: "nv_inference_pending_request_count",
        kind: MetricKind::Gauge,
        help: "Requests waiting or running",
        value: |c| load(&c.pending),
    },
    PerModel {
        name: "nv_inference_request_duration_us",
        kind: MetricKind::Counter,
        help: "Time of successful requests",
        value: |c| c.success.read().ns / 1000,
    },
    PerModel {
        name: "nv_inference_queue_duration_us",
        kind: MetricKind::Counter,
        help: "Time that successful requests waited",
        value: |c| c.queue.read().ns / 1000,
    },
    PerModel {
        name: "nv_inference_compute_input_duration_us",
        kind: MetricKind::Counter,
        help: "Time in which inputs were checked and staged",
        value: |c| c.input.read().ns / 1000,
    },
    PerModel {
        name: "nv_inference_compute_infer_duration_us",
        kind: MetricKind::Counter,
        help: "Time of successful requests on the device",
        value: |c| c.infer.read().ns / 1000,
    },
    PerModel {
        name: "nv_inference_compute_output_duration_us",
        kind: MetricKind::Counter,
        help: "Time from the end of the last step until the outputs were ready to be sent",
        value: |c| c.output.read().ns / 1000,
    },
    PerModel {
        name: "atoll_preemptions_total",
        kind: MetricKind::Counter,
        help: "Times work was preempted",
        value: |c| load(&c.preemptions),
    },
    PerModel {
        name: "atoll_deadline_misses_total",
        kind: MetricKind::Counter,
        help: "Requests that missed their deadline",
        value: |c| load(&c.deadline_misses),
    },
    PerModel {
        name: "atoll_bad_inputs_total",
        kind: MetricKind::Counter,
        help: "Requests with inputs that the device refused",
        value: |c| load(&c.bad_input),
    },
];

/// Writes the metrics of `models`, of `prefixes` and of `device_group`.
pub(super) fn write(
    text: &mut String,
    models: &[Arc<ServedModel>],
    prefixes: &[Arc<PrefixModel>],
    device_group: &DeviceGroup,
) {
    let mut out = Exposition::new(text);
    for family in &MODEL_METRICS {
        out.family(family.name, family.kind, family.help);
        for model in models {
            out.sample(family.name, &labels(model), (family.value)(&model.counters));
        }
    }
    write_failures(&mut out, models);
    write_drops(&mut out, models);
    write_slo(&mut out, models);
    write_histograms(&mut out, models);
    write_preemption_times(&mut out, models, device_group);
    write_replicas(&mut out, models, device_group);
    out.family("atoll_resident_bytes", MetricKind::Gauge, "Device memory of all loaded models");
    for (node, device) in device_group.nodes().iter().zip(device_group.names()) {
        out.sample("atoll_resident_bytes", &[("device", device)], node.resident().0);
    }
    write_memory(&mut out, device_group);
    write_faults(&mut out, device_group);
    write_gpus(&mut out, device_group);
    write_co_runs(&mut out, device_group);
    write_turns(&mut out);
    write_prefixes(&mut out, prefixes, device_group);
}

/// How long threads that real time needs were away, while that is measured.
fn write_turns(out: &mut Exposition<'_>) {
    if !thread_watch::is_on() {
        return;
    }
    let turns = thread_watch::longest_turns();
    let name = "atoll_thread_away_max_seconds";
    out.family(name, MetricKind::Gauge, "Longest time that a thread worked while others waited");
    for turn in &turns {
        out.sample(name, &[("thread", turn.thread.as_str())], turn.longest.as_secs_f64());
    }
    let name = "atoll_thread_away_total";
    out.family(name, MetricKind::Counter, "Times that a thread was away beyond the limit");
    for turn in &turns {
        out.sample(name, &[("thread", turn.thread.as_str())], turn.over_limit);
    }
}

/// Faults of devices, and how long they kept them out of service.
fn write_faults(out: &mut Exposition<'_>, device_group: &DeviceGroup) {
    let counts: Vec<_> = (0..device_group.device_count())
        .map(|device| (&device_group.names()[device], device_group.recoveries(device)))
        .collect();
    let name = "atoll_device_faults_total";
    out.family(name, MetricKind::Counter, "Faults after which a device was given up");
    for (device, counts) in &counts {
        out.sample(name, &[("device", device.as_str())], counts.faults);
    }
    let name = "atoll_device_recoveries_total";
    out.family(name, MetricKind::Counter, "Faults after which a device served again");
    for (device, counts) in &counts {
        out.sample(name, &[("device", device.as_str())], counts.recovered);
    }
    let name = "atoll_device_in_service";
    out.family(name, MetricKind::Gauge, "1 if a device serves, 0 while it is opened again");
    for (device, counts) in &counts {
        out.sample(name, &[("device", device.as_str())], u64::from(counts.since.is_none()));
    }
    let name = "atoll_device_out_of_service_seconds_total";
    out.family(name, MetricKind::Counter, "Time that devices were out of service after faults");
    for (device, counts) in &counts {
        let seconds = counts.out_of_service.0 as f64 / 1e9;
        out.sample(name, &[("device", device.as_str())], seconds);
    }
}

/// Prefixes that several models share.
fn write_prefixes(
    out: &mut Exposition<'_>,
    prefixes: &[Arc<PrefixModel>],
    device_group: &DeviceGroup,
) {
    let stats = |prefix: &Arc<PrefixModel>| {
        let (mut success, mut executions) = (0, 0);
        for (view, key) in device_group.replicas(prefix.key) {
            let stats = device_group.node(view.device).stats(key).unwrap_or_default();
            success += stats.success;
            executions += stats.executions;
        }
        (success, executions)
    };
    let stats: Vec<_> = prefixes.iter().map(|prefix| (prefix, stats(prefix))).collect();
    let name = "atoll_prefix_requests_total";
    out.family(name, MetricKind::Counter, "Requests that ran a shared prefix");
    stats.iter().for_each(|(p, (success, _))| out.sample(name, &[("prefix", &p.name)], *success));
    let name = "atoll_prefix_executions_total";
    out.family(name, MetricKind::Counter, "Executions of a shared prefix; a batch counts once");
    stats.iter().for_each(|(p, (_, runs))| out.sample(name, &[("prefix", &p.name)], *runs));
}

/// Replicas of models and their requests by device.
fn write_replicas(
    out: &mut Exposition<'_>,
    models: &[Arc<ServedModel>],
    device_group: &DeviceGroup,
) {
    let name = "atoll_model_resident_bytes";
    out.family(name, MetricKind::Gauge, "Device memory of a loaded model");
    let replicas: Vec<_> = models
        .iter()
        .flat_map(|model| {
            device_group.replicas(model.key).into_iter().map(move |held| (model, held))
        })
        .collect();
    for (model, (view, key)) in &replicas {
        let bytes = device_group.node(view.device).resident_of(*key).unwrap_or_default().0;
        out.sample(name, &with(model, "device", &device_group.names()[view.device]), bytes);
    }
    if device_group.device_count() == 1 {
        return;
    }
    let name = "atoll_replica_ready";
    out.family(
        name,
        MetricKind::Gauge,
        "1 if a replica accepts requests, 0 while it is being removed",
    );
    for (model, (view, _)) in &replicas {
        let ready = u8::from(view.state == ReplicaState::Serving);
        out.sample(name, &with(model, "device", &device_group.names()[view.device]), ready);
    }
    let name = "atoll_replica_requests_total";
    out.family(name, MetricKind::Counter, "Requests with outputs, by device");
    for (model, (view, _)) in &replicas {
        out.sample(
            name,
            &with(model, "device", &device_group.names()[view.device]),
            view.completed,
        );
    }
    let name = "atoll_replica_pending";
    out.family(name, MetricKind::Gauge, "Requests waiting or running, by device");
    for (model, (view, _)) in &replicas {
        out.sample(name, &with(model, "device", &device_group.names()[view.device]), view.pending);
    }
    let changes = device_group.changes();
    let name = "atoll_replica_changes_total";
    out.family(name, MetricKind::Counter, "Replicas added, removed, and refused by a device");
    for (what, count) in
        [("made", changes.added), ("taken", changes.removed), ("refused", changes.failed)]
    {
        out.sample(name, &[("change", what)], count);
    }
}

/// A metric with one sample per device.
type PerDevice = (&'static str, MetricKind, &'static str, fn(&NodeMemory) -> Option<u64>);

const MEMORY: [PerDevice; 9] = [
    ("atoll_weights_budget_bytes", MetricKind::Gauge, "Memory budget for weights", |m| {
        Some(m.budget.0)
    }),
    ("atoll_weights_bytes", MetricKind::Gauge, "Weights that are resident or loading", |m| {
        Some(m.device?.weights.0)
    }),
    ("atoll_weights_pinned_bytes", MetricKind::Gauge, "Weights of pinned models", |m| {
        Some(m.pinned.0)
    }),
    ("atoll_device_used_bytes", MetricKind::Gauge, "Device memory in use by all processes", |m| {
        Some(m.device?.system?.0)
    }),
    ("atoll_loads_waiting", MetricKind::Gauge, "Models waiting to be loaded", |m| {
        Some(m.pending_loads as u64)
    }),
    ("atoll_loads_total", MetricKind::Counter, "Loads of weights", |m| Some(m.swaps.loads)),
    ("atoll_loaded_bytes_total", MetricKind::Counter, "Bytes of weights loaded", |m| {
        Some(m.swaps.loaded.0)
    }),
    (
        "atoll_loads_refused_total",
        MetricKind::Counter,
        "Loads refused because device memory was exhausted",
        |m| Some(m.swaps.refused),
    ),
    ("atoll_evictions_total", MetricKind::Counter, "Evictions of weights", |m| {
        Some(m.swaps.evictions)
    }),
];

/// Weights: budget, resident bytes, loads and evictions.
fn write_memory(out: &mut Exposition<'_>, device_group: &DeviceGroup) {
    let nodes = device_group.nodes();
    let devices = nodes.iter().zip(device_group.names());
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

fn labels(model: &ServedModel) -> [(&str, &str); 2] {
    [("model", &model.name), ("version", &model.version_text)]
}

fn with<'a>(model: &'a ServedModel, key: &'a str, value: &'a str) -> [(&'a str, &'a str); 3] {
    let [name, version] = labels(model);
    [name, version, (key, value)]
}

fn write_failures(out: &mut Exposition<'_>, models: &[Arc<ServedModel>]) {
    let name = "nv_inference_request_failure";
    out.family(name, MetricKind::Counter, "Failed requests by reason");
    for model in models {
        let c = &model.counters;
        let rejected = [&c.queue_full, &c.deadline, &c.draining, &c.not_run, &c.limited];
        let rejected = rejected.into_iter().map(load).sum::<u64>();
        out.sample(name, &with(model, "reason", "REJECTED"), rejected);
        out.sample(name, &with(model, "reason", "CANCELED"), load(&c.cancelled));
        out.sample(name, &with(model, "reason", "BACKEND"), load(&c.backend));
        out.sample(name, &with(model, "reason", "OTHER"), load(&c.bad_input));
    }
}

fn write_drops(out: &mut Exposition<'_>, models: &[Arc<ServedModel>]) {
    let name = "atoll_drops_total";
    out.family(name, MetricKind::Counter, "Requests dropped before a reply, by reason");
    for model in models {
        let c = &model.counters;
        for (reason, counter) in [
            ("queue_full", &c.queue_full),
            ("deadline", &c.deadline),
            ("cancelled", &c.cancelled),
            ("draining", &c.draining),
            ("policy", &c.not_run),
            ("limit", &c.limited),
        ] {
            out.sample(name, &with(model, "reason", reason), load(counter));
        }
    }
}

fn write_slo(out: &mut Exposition<'_>, models: &[Arc<ServedModel>]) {
    let name = "atoll_slo_requests_total";
    let help = "Requests with an SLO or a deadline, by whether they were answered within it";
    out.family(name, MetricKind::Counter, help);
    for model in models {
        let c = &model.counters;
        for (result, counter) in [("kept", &c.slo_kept), ("missed", &c.slo_missed)] {
            out.sample(name, &with(model, "result", result), load(counter));
        }
    }
}

/// A histogram with one series per model.
type PerModelHistogram = (&'static str, &'static str, fn(&Counters) -> &DurationHistogram);

const HISTOGRAMS: [PerModelHistogram; 5] = [
    ("nv_inference_request_duration_histogram_us", "Time of successful requests", |c| &c.success),
    ("nv_inference_queue_duration_histogram_us", "Time that successful requests waited", |c| {
        &c.queue
    }),
    (
        "nv_inference_compute_input_duration_histogram_us",
        "Time in which inputs were checked and staged",
        |c| &c.input,
    ),
    (
        "nv_inference_compute_infer_duration_histogram_us",
        "Time of successful requests on the device",
        |c| &c.infer,
    ),
    (
        "nv_inference_compute_output_duration_histogram_us",
        "Time from the end of the last step until the outputs were ready to be sent",
        |c| &c.output,
    ),
];

fn write_histograms(out: &mut Exposition<'_>, models: &[Arc<ServedModel>]) {
    for (name, help, histogram) in HISTOGRAMS {
        out.family(name, MetricKind::Histogram, help);
        let (bucket, sum, count) =
            (format!("{name}_bucket"), format!("{name}_sum"), format!("{name}_count"));
        for model in models {
            let histogram = histogram(&model.counters);
            let counts = histogram.cumulative();
            for (bound, count) in BOUNDS_US.iter().zip(counts) {
                out.sample(&bucket, &with(model, "le", &bound.to_string()), count);
            }
            let all = counts[counts.len() - 1];
            out.sample(&bucket, &with(model, "le", "+Inf"), all);
            out.sample(&sum, &labels(model), histogram.read().ns / 1000);
            out.sample(&count, &labels(model), all);
        }
    }
}

/// A metric of a GPU.
type PerGpu = (&'static str, MetricKind, &'static str, fn(&DeviceReadings) -> Option<f64>);

const GPU: [PerGpu; 6] = [
    ("nv_gpu_utilization", MetricKind::Gauge, "Share of time in which a kernel ran", |r| {
        Some(f64::from(r.utilization_percent?) / 100.0)
    }),
    ("nv_gpu_power_usage", MetricKind::Gauge, "Power drawn, in watts", |r| {
        Some(f64::from(r.power_milliwatts?) / 1e3)
    }),
    ("nv_gpu_power_limit", MetricKind::Gauge, "Power that may be drawn, in watts", |r| {
        Some(f64::from(r.power_limit_milliwatts?) / 1e3)
    }),
    ("nv_gpu_memory_total_bytes", MetricKind::Gauge, "Size of the GPU's memory", |r| {
        Some(r.memory_total?.0 as f64)
    }),
    ("nv_gpu_memory_used_bytes", MetricKind::Gauge, "GPU memory in use by all processes", |r| {
        Some(r.memory_used?.0 as f64)
    }),
    ("nv_energy_consumption", MetricKind::Counter, "Joules since the server opened the GPU", |r| {
        Some(r.energy_millijoules? as f64 / 1e3)
    }),
];

/// What NVML reports. Several devices may be parts of one GPU, which is written once.
fn write_gpus(out: &mut Exposition<'_>, device_group: &DeviceGroup) {
    let mut seen = BTreeSet::new();
    let mut gpus: Vec<(&String, String, DeviceReadings)> = Vec::new();
    let mut tuned: Vec<(&String, u64)> = Vec::new();
    for (node, name) in device_group.nodes().iter().zip(device_group.names()) {
        let Some(readings) = node.device().readings() else { continue };
        tuned.extend(readings.tuned_steps.map(|steps| (name, steps)));
        if let Some(uuid) = readings.uuid.clone()
            && seen.insert(uuid.clone())
        {
            gpus.push((name, uuid, readings));
        }
    }
    for (metric, kind, help, value) in GPU {
        let samples: Vec<_> = gpus
            .iter()
            .filter_map(|(device, uuid, readings)| Some((device, uuid, value(readings)?)))
            .collect();
        if samples.is_empty() {
            continue;
        }
        out.family(metric, kind, help);
        for (device, uuid, value) in samples {
            out.sample(metric, &[("gpu_uuid", uuid.as_str()), ("device", device)], value);
        }
    }
    if !tuned.is_empty() {
        let name = "atoll_tuned_steps";
        out.family(name, MetricKind::Gauge, "Steps whose fastest variant was measured");
        tuned.iter().for_each(|(device, steps)| out.sample(name, &[("device", device)], steps));
    }
}

/// Runs of real time beside best effort, where the policy allows them.
fn write_co_runs(out: &mut Exposition<'_>, device_group: &DeviceGroup) {
    let nodes = device_group.nodes();
    let devices = nodes.iter().zip(device_group.names());
    let counts: Vec<_> = devices.map(|(node, name)| (name, node.co_run_counts())).collect();
    let name = "atoll_real_time_runs_total";
    out.family(name, MetricKind::Counter, "Undisturbed runs of real time, by what ran beside them");
    for (device, counts) in &counts {
        for (beside, count) in [("none", counts.alone), ("best_effort", counts.beside)] {
            out.sample(name, &[("device", device.as_str()), ("beside", beside)], count);
        }
    }
    let name = "atoll_co_run_pairs";
    out.family(name, MetricKind::Gauge, "Co-run pairs by decision");
    for (device, counts) in &counts {
        for (decision, count) in [("admitted", counts.admitted), ("rejected", counts.rejected)] {
            out.sample(name, &[("device", device.as_str()), ("decision", decision)], count);
        }
    }
}

/// Time until models were preempted for real time, and preemptions by cause. It ends when the
/// device has returned the work; the SMs are free earlier.
fn write_preemption_times(
    out: &mut Exposition<'_>,
    models: &[Arc<ServedModel>],
    device_group: &DeviceGroup,
) {
    const NAME: &str = "atoll_preemption_seconds";
    let mut preempted: Vec<(&ServedModel, &str, PreemptionStats)> = Vec::new();
    for model in models {
        for (view, key) in device_group.replicas(model.key) {
            let times = device_group.node(view.device).preemption_stats(key).unwrap_or_default();
            preempted.push((model, &device_group.names()[view.device], times));
        }
    }
    out.family(
        NAME,
        MetricKind::Histogram,
        "Time from a preemption for real time until the work was returned",
    );
    let (bucket, sum, count) =
        (format!("{NAME}_bucket"), format!("{NAME}_sum"), format!("{NAME}_count"));
    for (model, device, times) in &preempted {
        let [name, version, device] = with(model, "device", device);
        let mut so_far = 0;
        for (bound, count) in PREEMPTION_BOUNDS_US.iter().zip(times.counts) {
            so_far += count;
            let seconds = (*bound as f64 / 1e6).to_string();
            out.sample(&bucket, &[name, version, device, ("le", &seconds)], so_far);
        }
        let all: u64 = times.counts.iter().sum();
        out.sample(&bucket, &[name, version, device, ("le", "+Inf")], all);
        out.sample(&sum, &[name, version, device], times.sum.0 as f64 / 1e9);
        out.sample(&count, &[name, version, device], all);
    }
    let name = "atoll_preemptions_caused_total";
    out.family(
        name,
        MetricKind::Counter,
        "Preemptions of other work for real-time requests of the model",
    );
    for (model, device, times) in &preempted {
        out.sample(name, &with(model, "device", device), times.caused);
    }
}
