//! What a node's viewers see: figures of the last moments, spans, traces and explanations.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock};
use std::time::{SystemTime, UNIX_EPOCH};

use api::monitor::{
    Counts, DeviceCounts, LiveCursor, LiveUpdate, Monitor, RequestCounts, SPAN_NUMBERS,
};
use base::Nanos;
use device::PreemptionLevel;
use model::config::Class;
use runtime::spans::explanation::{Explanation, explain};
use runtime::spans::trace_events::{self, DeviceTrace, SpansByEnd};
use runtime::spans::{RequestSpan, RunEnd, RunSpan, Span, end_name};
use runtime::{DeviceTotals, ModelKey, Node, RequestTotals};
use serde_json::{Value, json};

use super::Inner;

/// Spans of one device that an update reads; a viewer loses the others.
const MAX_SPANS: usize = 8_192;
/// Spans of the past that a viewer gets first.
const MAX_HISTORY: usize = 20_000;
/// Maximum number of spans that are read for a trace or an explanation.
const MAX_READ: usize = 1 << 20;
/// Requests of a trace that say why they took as long as they did.
const MAX_EXPLAINED: usize = 5_000;

/// Names of the models of each device.
struct Names(Vec<BTreeMap<ModelKey, String>>);

impl Names {
    fn of(inner: &Inner) -> Names {
        let group = &inner.device_group;
        let mut names = vec![BTreeMap::new(); group.device_count()];
        let prefixes = inner.prefix_batching.prefixes();
        let prefixes = prefixes.iter().map(|prefix| (prefix.key, prefix.name.clone()));
        let models = inner.models.all();
        let models = models.iter().map(|served| (served.key, served.name.to_string()));
        for (model, name) in prefixes.chain(models) {
            for (replica, key) in group.replicas(model) {
                names[replica.device].insert(key, name.clone());
            }
        }
        Names(names)
    }

    fn name(&self, device: usize, model: ModelKey) -> String {
        match self.0.get(device).and_then(|names| names.get(&model)) {
            Some(name) => name.clone(),
            None => format!("model {} (removed)", model.number()),
        }
    }
}

fn preemption_text(level: PreemptionLevel) -> &'static str {
    match level {
        PreemptionLevel::None => "none",
        PreemptionLevel::BetweenLaunches => "between launches",
        PreemptionLevel::TileBoundaries => "at tile boundaries",
        PreemptionLevel::InsideTile => "inside a tile",
    }
}

fn class_index(class: Class) -> usize {
    match class {
        Class::RealTime => 0,
        Class::BestEffort => 1,
    }
}

fn pairs(counts: &Counts) -> Value {
    counts.iter().map(|(bucket, count)| json!([bucket, count])).collect()
}

/// Requests by model and class.
type Flows = BTreeMap<(String, usize), RequestCounts>;

fn flow_json(((model, class), counts): (&(String, usize), &RequestCounts)) -> Value {
    json!({
        "model": model,
        "class": if *class == 0 { "rt" } else { "be" },
        "done": counts.done(),
        "failed": counts.failed,
        "kept": counts.kept,
        "missed": counts.missed,
        "latency": pairs(&counts.latency),
        "wait": pairs(&counts.wait),
        "rows": pairs(&counts.rows),
    })
}

fn request_counts(totals: &RequestTotals) -> RequestCounts {
    RequestCounts {
        latency: totals.latency().collect(),
        wait: totals.wait().collect(),
        rows: totals.rows().collect(),
        failed: totals.failed(),
        kept: totals.kept(),
        missed: totals.missed(),
    }
}

fn device_counts(totals: &DeviceTotals) -> DeviceCounts {
    let DeviceTotals { busy, preemptions, .. } = *totals;
    DeviceCounts { busy, preemptions, leaving: totals.leaving().collect() }
}

/// Tells positions of this process from those of an earlier one.
static PROCESS: LazyLock<u64> = LazyLock::new(|| {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.as_micros() as u64
});

/// Where a viewer is, as text that [`positions_of`] reads.
fn position_text(positions: &[u64]) -> String {
    let all = std::iter::once(&*PROCESS).chain(positions);
    all.map(u64::to_string).collect::<Vec<_>>().join(".")
}

/// The positions in a text of this process for so many devices.
fn positions_of(text: &str, devices: usize) -> Option<Vec<u64>> {
    let mut numbers = text.split('.').map(|number| number.parse().ok());
    if numbers.next()? != Some(*PROCESS) {
        return None;
    }
    let positions: Vec<u64> = numbers.take(devices + 1).collect::<Option<_>>()?;
    (positions.len() == devices).then_some(positions)
}

/// The monitor of a node.
pub(super) struct NodeMonitor(pub(super) Arc<Inner>);

impl NodeMonitor {
    fn nodes(&self) -> Vec<Arc<Node>> {
        self.0.device_group.nodes()
    }

    fn now(&self) -> Nanos {
        self.nodes().first().map_or(Nanos::ZERO, |node| node.clock().now())
    }

    /// Appends the spans that are new to a viewer; returns how many it lost. What ended before it
    /// came counts as lost only if it was here before.
    fn new_spans(&self, cursor: &mut LiveCursor, encoded: &mut Vec<u8>) -> u64 {
        let nodes = self.nodes();
        let came = cursor.positions.len() != nodes.len();
        let first = came || cursor.at == Nanos::ZERO;
        let limit = if first { MAX_HISTORY } else { MAX_SPANS };
        if came {
            cursor.positions = vec![0; nodes.len()];
        }
        let (mut lost, mut spans) = (0, Vec::new());
        for (device, (node, position)) in nodes.iter().zip(&mut cursor.positions).enumerate() {
            spans.clear();
            let oldest = node.spans_end().saturating_sub(limit as u64);
            let skipped = oldest.saturating_sub(*position);
            let read = node.spans_since(*position + skipped, limit, &mut spans);
            *position = read.next;
            lost += read.lost + skipped;
            spans.iter().for_each(|span| encode(device, span, encoded));
        }
        if came { 0 } else { lost }
    }

    /// Requests that ended since the last update.
    fn flows(&self, cursor: &mut LiveCursor, names: &Names) -> Flows {
        let first = cursor.at == Nanos::ZERO;
        let mut before = std::mem::take(&mut cursor.counts);
        let mut flows = Flows::new();
        for (device, node) in self.nodes().iter().enumerate() {
            for (model, class, totals) in node.request_totals() {
                let class = class_index(class);
                let source = format!("{device}/{}/{class}", model.number());
                let seen = before.remove(&source);
                if let Some(seen) = &seen
                    && seen.done() + seen.failed == totals.ended()
                {
                    cursor.counts.insert(source, seen.clone());
                    continue;
                }
                let counts = request_counts(&totals);
                if !first {
                    let since = counts.since(&seen.unwrap_or_default());
                    flows.entry((names.name(device, model), class)).or_default().add(&since);
                }
                cursor.counts.insert(source, counts);
            }
        }
        flows
    }

    /// What devices did since the last update.
    fn device_flows(&self, cursor: &mut LiveCursor) -> Vec<DeviceCounts> {
        let first = cursor.at == Nanos::ZERO;
        let now: Vec<_> =
            self.nodes().iter().map(|node| device_counts(&node.device_totals())).collect();
        cursor.devices.resize_with(now.len(), DeviceCounts::default);
        let before = if first { now.clone() } else { cursor.devices.clone() };
        let since = now.iter().zip(&before).map(|(now, before)| now.since(before)).collect();
        cursor.devices = now;
        since
    }

    fn device_figures(&self, flows: &[DeviceCounts]) -> Vec<Value> {
        let group = &self.0.device_group;
        let one = |((node, name), flow): ((&Arc<Node>, &String), &DeviceCounts)| {
            let (info, memory) = (node.device().info(), node.memory());
            let readings = node.device().readings().unwrap_or_default();
            let used = memory.device.and_then(|used| used.system).or(readings.memory_used);
            json!({
                "name": name,
                "description": info.description,
                "policy": node.policy(),
                "preemption": preemption_text(info.preemption),
                "fault": node.fault().map(|fault| fault.to_string()),
                "busy_ns": { "rt": flow.busy[0].0, "be": flow.busy[1].0 },
                "preemptions": flow.preemptions,
                "leaving": pairs(&flow.leaving),
                "budget_bytes": memory.budget.0,
                "resident_bytes": node.resident().0,
                "used_bytes": used.map(|bytes| bytes.0),
                "memory_bytes": readings.memory_total.map(|bytes| bytes.0),
                "utilization_percent": readings.utilization_percent,
                "power_milliwatts": readings.power_milliwatts,
                "power_limit_milliwatts": readings.power_limit_milliwatts,
                "loads": memory.swaps.loads,
                "evictions": memory.swaps.evictions,
                "pending_loads": memory.pending_loads,
            })
        };
        group.nodes().iter().zip(group.names()).zip(flows).map(one).collect()
    }

    fn model_figures(&self) -> Vec<Value> {
        let group = &self.0.device_group;
        let models = self.0.models.all();
        let one = |served: &Arc<super::ServedModel>| {
            let resident: Vec<Value> = group
                .replicas(served.key)
                .into_iter()
                .map(|(replica, key)| {
                    let bytes = group.node(replica.device).resident_of(key);
                    json!([replica.device, bytes.unwrap_or_default().0])
                })
                .collect();
            let counters = &served.counters;
            json!({
                "name": *served.name,
                "version": *served.version_text,
                "class": served.config.class.as_str(),
                "priority": served.config.priority,
                "slo_ms": served.config.slo_ms,
                "pending": counters.pending.load(Relaxed),
                "inferences": counters.inferences.load(Relaxed),
                "executions": counters.executions.load(Relaxed),
                "resident": resident,
            })
        };
        models.iter().map(one).collect()
    }

    fn all_spans(&self, device: usize) -> (Vec<Span>, u64) {
        let mut spans = Vec::new();
        let read = self.0.device_group.node(device).spans_since(0, MAX_READ, &mut spans);
        (spans, read.lost)
    }
}

impl Monitor for NodeMonitor {
    fn cursor(&self, position: &str) -> LiveCursor {
        let positions = positions_of(position, self.nodes().len()).unwrap_or_default();
        LiveCursor { positions, ..LiveCursor::default() }
    }

    fn update(&self, cursor: &mut LiveCursor, with_spans: bool) -> LiveUpdate {
        let now = self.now().max(Nanos(1));
        // The first update has no begin.
        let since = if cursor.at == Nanos::ZERO { now } else { cursor.at };
        let resumed = !cursor.positions.is_empty();
        let names = Names::of(&self.0);
        let flows = self.flows(cursor, &names);
        let devices = self.device_flows(cursor);
        let (mut lost, mut spans) = (0, Vec::new());
        if with_spans {
            lost = self.new_spans(cursor, &mut spans);
        }
        cursor.at = now;
        let named = names.0.iter().enumerate().flat_map(|(device, names)| {
            names.iter().map(move |(key, name)| json!([device, key.number(), name]))
        });
        let figures = json!({
            "now_ns": now.0,
            "interval_ns": (now - since).0,
            "lost": lost,
            "resumed": resumed,
            "position": with_spans.then(|| position_text(&cursor.positions)),
            "devices": self.device_figures(&devices),
            "models": self.model_figures(),
            "names": named.collect::<Vec<_>>(),
            "flows": flows.iter().map(flow_json).collect::<Vec<_>>(),
        });
        LiveUpdate { figures, spans }
    }

    fn trace(&self, window: Nanos) -> Option<String> {
        let (names, since) = (Names::of(&self.0), self.now() - window);
        let read: Vec<(Vec<Span>, u64)> = (0..self.nodes().len())
            .map(|device| {
                let (mut spans, lost) = self.all_spans(device);
                // What was dropped matters only if it would be in the window.
                let complete = spans.first().is_some_and(|span| span.ended() < since);
                spans.retain(|span| span.ended() >= since);
                (spans, if complete { 0 } else { lost })
            })
            .collect();
        let model_names: Vec<_> = (0..read.len())
            .map(|device| {
                let names = &names;
                move |model: ModelKey| names.name(device, model)
            })
            .collect();
        let traces: Vec<DeviceTrace<'_>> = read
            .iter()
            .zip(&model_names)
            .zip(self.0.device_group.names())
            .map(|(((spans, lost), model_name), name)| DeviceTrace {
                name,
                spans,
                model_name,
                lost: *lost,
            })
            .collect();
        Some(trace_events::write(&traces, MAX_EXPLAINED))
    }

    fn explain(&self, device: usize, number: u64) -> Option<Value> {
        self.nodes().get(device)?;
        let (spans, _) = self.all_spans(device);
        let request = spans.iter().find_map(|span| match span {
            Span::Request(request) if request.number == number => Some(*request),
            _ => None,
        })?;
        let names = Names::of(&self.0);
        let name = |model: ModelKey| names.name(device, model);
        let by_end = SpansByEnd::new(&spans);
        let explanation = explain(&request, by_end.around(&request), &name);
        Some(explanation_json(&request, &explanation, &spans, &name))
    }
}

fn explanation_json(
    request: &RequestSpan,
    explanation: &Explanation,
    spans: &[Span],
    name: &dyn Fn(ModelKey) -> String,
) -> Value {
    let parts: Vec<Value> = explanation
        .parts
        .iter()
        .map(|part| json!({ "kind": part.kind.name(), "ns": part.time.0, "text": part.text }))
        .collect();
    let runs: Vec<Value> = explanation.runs.iter().map(|run| run_json(run, name)).collect();
    let model_of = |job: &u64| {
        spans.iter().find_map(|span| match span {
            Span::Run(run) if run.job == *job => Some(name(run.model)),
            _ => None,
        })
    };
    let preempted: Vec<Value> = explanation
        .preempted
        .iter()
        .map(|job| json!({ "job": job, "model": model_of(job) }))
        .collect();
    json!({
        "request": request.number,
        "job": request.job,
        "model": name(request.model),
        "class": request.class.as_str(),
        "priority": request.priority,
        "rows": request.rows,
        "end": end_name(request.end),
        "arrived_ns": request.arrived.0,
        "staged_ns": request.staged.0,
        "started_ns": (request.started > Nanos::ZERO).then_some(request.started.0),
        "answered_ns": request.answered.0,
        "total_ns": explanation.total.0,
        "parts": parts,
        "members": explanation.members,
        "preempted": preempted,
        "runs": runs,
        "sentence": explanation.sentence,
    })
}

fn run_json(run: &RunSpan, name: &dyn Fn(ModelKey) -> String) -> Value {
    json!({
        "queue": run.queue,
        "began_ns": run.began.0,
        "ended_ns": run.ended.0,
        "steps": [run.first_step, run.next_step, run.step_count],
        "end": match run.end {
            RunEnd::Done => "done",
            RunEnd::Preempted => "preempted",
            RunEnd::Failed => "failed",
        },
        "preempt_requested_ns":
            (run.preempt_requested > Nanos::ZERO).then_some(run.preempt_requested.0),
        "preempted_for": run.preempted_for.map(name),
    })
}

/// A span as [`SPAN_NUMBERS`] numbers. The first is its kind, the second its device, the third its
/// model, the last two are its begin and end.
fn encode(device: usize, span: &Span, out: &mut Vec<u8>) {
    let device = device as f64;
    let at = |at: Nanos| at.0 as f64;
    let number = |model: ModelKey| model.number() as f64;
    let numbers: [f64; SPAN_NUMBERS] = match span {
        Span::Request(span) => [
            0.0,
            device,
            number(span.model),
            class_index(span.class) as f64,
            span.number as f64,
            span.job as f64,
            f64::from(span.rows),
            f64::from(span.priority),
            if span.deadline == Nanos::MAX { 0.0 } else { at(span.deadline) },
            span.end as u8 as f64,
            at(span.staged),
            at(span.started),
            at(span.arrived),
            at(span.answered),
        ],
        Span::Run(span) => [
            1.0,
            device,
            number(span.model),
            class_index(span.class) as f64,
            span.job as f64,
            f64::from(span.queue),
            f64::from(span.rows),
            f64::from(span.first_step),
            f64::from(span.next_step),
            span.end as u8 as f64,
            at(span.preempt_requested),
            span.preempted_for.map_or(-1.0, number),
            at(span.began),
            at(span.ended),
        ],
        Span::Load(span) => [
            2.0,
            device,
            number(span.model),
            0.0,
            span.bytes as f64,
            f64::from(u8::from(span.urgent)),
            0.0,
            0.0,
            0.0,
            f64::from(u8::from(span.failed)),
            0.0,
            0.0,
            at(span.began),
            at(span.ended),
        ],
        Span::Copy(span) => [
            4.0,
            device,
            number(span.model),
            class_index(span.class) as f64,
            span.bytes as f64,
            f64::from(span.kind as u8),
            span.job as f64,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            at(span.began),
            at(span.ended),
        ],
        Span::Eviction(span) => {
            let mut numbers = [0.0; SPAN_NUMBERS];
            (numbers[0], numbers[1], numbers[2]) = (3.0, device, number(span.model));
            (numbers[12], numbers[13]) = (at(span.at), at(span.at));
            numbers
        }
    };
    numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
}
