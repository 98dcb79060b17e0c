//! Figures of the last minute, from those that the server sends.

use std::collections::{BTreeMap, VecDeque};

use serde::Deserialize;
use serde_json::{Value, json};

/// Seconds that are kept.
const SECONDS: usize = 60;
/// The rate is that of the last seconds.
const RATE_SECONDS: usize = 6;
/// Use of a device is that of the last seconds.
const USE_SECONDS: usize = 3;

/// What the server sends; other fields are ignored.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Figures {
    interval_ns: u64,
    devices: Vec<DeviceFigures>,
    models: Vec<ModelFigures>,
    flows: Vec<Flow>,
    /// Of a frontend, which has no devices.
    #[serde(default)]
    backends: Vec<BackendFigures>,
}

impl Figures {
    /// The first figures of a frontend are those of no time.
    pub(super) fn are_empty(&self) -> bool {
        self.interval_ns == 0
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct BackendFigures {
    pub(super) name: String,
    pub(super) device: Option<String>,
    pub(super) state: String,
    pub(super) in_flight: u64,
    done: u64,
    failed: u64,
    latency: Vec<(u32, u64)>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct DeviceFigures {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) policy: String,
    pub(super) fault: Option<String>,
    busy_ns: BusyTimes,
    preemptions: u64,
    leaving: Vec<(u32, u64)>,
    pub(super) budget_bytes: u64,
    pub(super) resident_bytes: u64,
    pub(super) power_milliwatts: Option<u64>,
    pub(super) power_limit_milliwatts: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct BusyTimes {
    rt: u64,
    be: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct ModelFigures {
    name: String,
    class: String,
    pending: u64,
    /// Device and bytes of its weights there.
    resident: Vec<(usize, u64)>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Flow {
    model: String,
    class: String,
    done: u64,
    failed: u64,
    kept: u64,
    missed: u64,
    latency: Vec<(u32, u64)>,
    wait: Vec<(u32, u64)>,
    rows: Vec<(u32, u64)>,
}

/// Counts by bucket; bucket `n` begins at `2^(n/8)` microseconds.
#[derive(Clone, Debug, Default)]
struct Counts(BTreeMap<u32, u64>);

impl Counts {
    fn add(&mut self, counts: &[(u32, u64)]) {
        for (bucket, count) in counts {
            *self.0.entry(*bucket).or_default() += count;
        }
    }

    fn merge<'a>(all: impl Iterator<Item = &'a Counts>) -> Counts {
        let mut merged = Counts::default();
        for counts in all {
            counts.0.iter().for_each(|(bucket, count)| merged.add(&[(*bucket, *count)]));
        }
        merged
    }

    /// The microseconds that `share` of the counts do not exceed: the middle of a bucket.
    fn quantile_us(&self, share: f64) -> Option<f64> {
        let total: u64 = self.0.values().sum();
        let mut seen = 0;
        self.0.iter().find_map(|(bucket, count)| {
            seen += count;
            let reached = seen as f64 >= share * total as f64;
            reached.then(|| 2f64.powf((f64::from(*bucket) + 0.5) / 8.0))
        })
    }
}

/// What happened in one second.
#[derive(Clone, Debug, Default)]
struct Second {
    ns: u64,
    done: u64,
    failed: u64,
    kept: u64,
    missed: u64,
    latency: Counts,
    wait: Counts,
    rows: Counts,
    busy: [u64; 2],
    preemptions: u64,
    leaving: Counts,
}

/// The last seconds of a model or device, the current one last.
#[derive(Clone, Debug)]
struct History(VecDeque<Second>);

impl Default for History {
    fn default() -> Self {
        History(VecDeque::from([Second::default()]))
    }
}

impl History {
    fn turn(&mut self) {
        if self.0.len() == SECONDS {
            self.0.pop_front();
        }
        self.0.push_back(Second::default());
    }

    fn sum(&self, value: impl Fn(&Second) -> u64) -> u64 {
        self.0.iter().map(value).sum()
    }

    /// The latest `count` seconds.
    fn last(&self, count: usize) -> impl Iterator<Item = &Second> {
        self.0.iter().rev().take(count)
    }

    /// Events a second.
    fn rate(&self, value: impl Fn(&Second) -> u64) -> f64 {
        let ns: u64 = self.last(RATE_SECONDS).map(|second| second.ns).sum();
        let events: u64 = self.last(RATE_SECONDS).map(value).sum();
        if ns == 0 { 0.0 } else { events as f64 * 1e9 / ns as f64 }
    }

    fn share(&self, class: usize) -> f64 {
        let ns: u64 = self.last(USE_SECONDS).map(|second| second.ns).sum();
        let busy: u64 = self.last(USE_SECONDS).map(|second| second.busy[class]).sum();
        if ns == 0 { 0.0 } else { (busy as f64 / ns as f64).min(1.0) }
    }
}

/// A line of the table of models.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelRow {
    pub(super) name: String,
    /// `rt` or `be`.
    pub(super) class: String,
    pub(super) rate: f64,
    pub(super) p50_us: Option<f64>,
    pub(super) p99_us: Option<f64>,
    /// 99th percentile of the time until requests started.
    pub(super) wait_p99_us: Option<f64>,
    /// Waiting or running requests of the model.
    pub(super) pending: u64,
    pub(super) mean_rows: Option<f64>,
    /// Bytes of its weights, by device; on a frontend, which has no devices, none.
    pub(super) resident: Vec<(usize, u64)>,
    /// Share of requests that were answered within their SLO; `None` without one.
    pub(super) slo_kept: Option<f64>,
    pub(super) failed: u64,
    /// Requests of each second, oldest first.
    pub(super) history: Vec<u64>,
}

/// A device and what it did.
#[derive(Clone, Debug)]
pub(super) struct DeviceRow {
    pub(super) figures: DeviceFigures,
    /// Share of the time of real time and of best effort.
    pub(super) busy: [f64; 2],
    pub(super) preemption_rate: f64,
    pub(super) leaving_p99_us: Option<f64>,
}

/// A backend and what a frontend sent to it.
#[derive(Clone, Debug)]
pub(super) struct BackendRow {
    pub(super) figures: BackendFigures,
    pub(super) rate: f64,
    pub(super) p99_us: Option<f64>,
    pub(super) failed: u64,
}

/// The last minute.
#[derive(Clone, Debug, Default)]
pub(super) struct Minute {
    figures: Figures,
    /// By model and class.
    flows: BTreeMap<(String, String), History>,
    devices: Vec<History>,
    /// By name.
    backends: BTreeMap<String, History>,
    elapsed_ns: u64,
}

impl Minute {
    /// Adds what happened since the last figures.
    pub(super) fn add(&mut self, figures: Figures) {
        self.elapsed_ns += figures.interval_ns;
        if self.elapsed_ns >= 1_000_000_000 {
            self.elapsed_ns = 0;
            self.histories().for_each(History::turn);
        }
        for flow in &figures.flows {
            self.flows.entry((flow.model.clone(), flow.class.clone())).or_default();
        }
        self.devices.resize_with(figures.devices.len(), History::default);
        self.backends.retain(|name, _| figures.backends.iter().any(|b| b.name == *name));
        for backend in &figures.backends {
            self.backends.entry(backend.name.clone()).or_default();
        }
        for second in self.histories().filter_map(|history| history.0.back_mut()) {
            second.ns += figures.interval_ns;
        }
        for flow in &figures.flows {
            let history = self.flows.get_mut(&(flow.model.clone(), flow.class.clone()));
            let Some(second) = history.and_then(|history| history.0.back_mut()) else { continue };
            second.done += flow.done;
            second.failed += flow.failed;
            second.kept += flow.kept;
            second.missed += flow.missed;
            second.latency.add(&flow.latency);
            second.wait.add(&flow.wait);
            second.rows.add(&flow.rows);
        }
        for (device, history) in figures.devices.iter().zip(&mut self.devices) {
            let Some(second) = history.0.back_mut() else { continue };
            second.busy[0] += device.busy_ns.rt;
            second.busy[1] += device.busy_ns.be;
            second.preemptions += device.preemptions;
            second.leaving.add(&device.leaving);
        }
        for backend in &figures.backends {
            let history = self.backends.get_mut(&backend.name);
            let Some(second) = history.and_then(|history| history.0.back_mut()) else { continue };
            second.done += backend.done;
            second.failed += backend.failed;
            second.latency.add(&backend.latency);
        }
        // What a model did not do for a minute is no longer shown.
        self.flows.retain(|_, history| {
            history.0.len() < SECONDS || history.sum(|second| second.done + second.failed) > 0
        });
        self.figures = figures;
    }

    fn histories(&mut self) -> impl Iterator<Item = &mut History> {
        self.flows.values_mut().chain(&mut self.devices).chain(self.backends.values_mut())
    }

    /// Models by name and class; those without requests are there too.
    pub(super) fn models(&self) -> Vec<ModelRow> {
        let silent = History::default();
        let mut rows: Vec<ModelRow> = self
            .flows
            .iter()
            .map(|((name, class), history)| self.row(name, class, history))
            .collect();
        for model in &self.figures.models {
            if !self.flows.keys().any(|(name, _)| *name == model.name) {
                rows.push(self.row(&model.name, &model.class, &silent));
            }
        }
        rows
    }

    fn row(&self, name: &str, class: &str, history: &History) -> ModelRow {
        let model = self.figures.models.iter().find(|model| model.name == name);
        let latency = Counts::merge(history.0.iter().map(|second| &second.latency));
        let wait = Counts::merge(history.0.iter().map(|second| &second.wait));
        let rows = Counts::merge(history.0.iter().map(|second| &second.rows));
        let count: u64 = rows.0.values().sum();
        let total: u64 = rows.0.iter().map(|(rows, count)| u64::from(*rows) * count).sum();
        let (kept, missed) = (history.sum(|s| s.kept), history.sum(|s| s.missed));
        let judged = kept + missed;
        ModelRow {
            name: name.to_string(),
            class: class.to_string(),
            rate: history.rate(|second| second.done),
            p50_us: latency.quantile_us(0.5),
            p99_us: latency.quantile_us(0.99),
            wait_p99_us: wait.quantile_us(0.99),
            pending: model.map_or(0, |model| model.pending),
            mean_rows: (count > 0).then(|| total as f64 / count as f64),
            resident: model.map_or_else(Vec::new, |model| model.resident.clone()),
            slo_kept: (judged > 0).then(|| kept as f64 / judged as f64),
            failed: history.sum(|second| second.failed),
            history: history.0.iter().map(|second| second.done).collect(),
        }
    }

    pub(super) fn devices(&self) -> Vec<DeviceRow> {
        let row = |(figures, history): (&DeviceFigures, &History)| DeviceRow {
            figures: figures.clone(),
            busy: [history.share(0), history.share(1)],
            preemption_rate: history.rate(|second| second.preemptions),
            leaving_p99_us: Counts::merge(history.0.iter().map(|second| &second.leaving))
                .quantile_us(0.99),
        };
        self.figures.devices.iter().zip(&self.devices).map(row).collect()
    }

    pub(super) fn backends(&self) -> Vec<BackendRow> {
        let row = |figures: &BackendFigures| {
            let history = self.backends.get(&figures.name)?;
            Some(BackendRow {
                figures: figures.clone(),
                rate: history.rate(|second| second.done),
                p99_us: Counts::merge(history.0.iter().map(|second| &second.latency))
                    .quantile_us(0.99),
                failed: history.sum(|second| second.failed),
            })
        };
        self.figures.backends.iter().filter_map(row).collect()
    }

    /// The figures for other programs.
    pub(super) fn json(&self) -> Value {
        let model = |row: ModelRow| {
            json!({
                "name": row.name,
                "class": row.class,
                "requests_per_second": row.rate,
                "p50_us": row.p50_us,
                "p99_us": row.p99_us,
                "wait_p99_us": row.wait_p99_us,
                "pending": row.pending,
                "mean_batch_rows": row.mean_rows,
                "slo_kept": row.slo_kept,
                "resident_bytes": row.resident.iter().map(|(_, bytes)| bytes).sum::<u64>(),
                "failed": row.failed,
            })
        };
        let device = |row: DeviceRow| {
            json!({
                "name": row.figures.name,
                "policy": row.figures.policy,
                "fault": row.figures.fault,
                "busy": { "rt": row.busy[0], "be": row.busy[1] },
                "preemptions_per_second": row.preemption_rate,
                "leaving_p99_us": row.leaving_p99_us,
                "resident_bytes": row.figures.resident_bytes,
                "power_milliwatts": row.figures.power_milliwatts,
            })
        };
        let backend = |row: BackendRow| {
            json!({
                "name": row.figures.name,
                "state": row.figures.state,
                "in_flight": row.figures.in_flight,
                "requests_per_second": row.rate,
                "p99_us": row.p99_us,
                "failed": row.failed,
            })
        };
        let mut figures = json!({
            "models": self.models().into_iter().map(model).collect::<Vec<_>>(),
            "devices": self.devices().into_iter().map(device).collect::<Vec<_>>(),
        });
        let backends = self.backends();
        if !backends.is_empty() {
            figures["backends"] = backends.into_iter().map(backend).collect();
        }
        figures
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A server with a real-time and a best-effort model, a quarter second of each frame.
    pub(in crate::top_command) fn example() -> Figures {
        serde_json::from_value(json!({
            "now_ns": 1, "interval_ns": 250_000_000, "lost": 0, "names": [],
            "devices": [{
                "name": "cpu", "description": "CPU with 2 threads", "policy": "atoll",
                "preemption": "inside a tile", "fault": null,
                "busy_ns": { "rt": 50_000_000, "be": 100_000_000 },
                "preemptions": 5, "leaving": [[40, 5]], "budget_bytes": 0,
                "resident_bytes": 3 << 20, "used_bytes": null,
                "power_milliwatts": 70_500, "power_limit_milliwatts": 700_000,
            }],
            "models": [
                { "name": "resnet", "class": "rt", "slo_ms": 10, "pending": 3,
                  "resident": [[0, 2 << 20]] },
                { "name": "bert", "class": "be", "slo_ms": null, "pending": 1,
                  "resident": [[0, 1 << 20]] },
                { "name": "unused", "class": "be", "slo_ms": null, "pending": 0, "resident": [] },
            ],
            "flows": [
                { "model": "resnet", "class": "rt", "done": 25, "failed": 5,
                  "kept": 21, "missed": 9, "latency": [[80, 24], [96, 1]],
                  "wait": [[40, 20], [72, 5]], "rows": [[1, 20], [5, 5]] },
                { "model": "bert", "class": "be", "done": 2, "failed": 1, "kept": 0, "missed": 0,
                  "latency": [[120, 2]], "wait": [], "rows": [[1, 2]] },
            ],
        }))
        .expect("figures")
    }

    #[test]
    fn rates_and_quantiles_are_of_the_last_seconds() {
        let mut minute = Minute::default();
        (0..8).for_each(|_| minute.add(example()));
        let models = minute.models();
        let resnet = models.iter().find(|row| row.name == "resnet").expect("a row");
        assert!((resnet.rate - 100.0).abs() < 1e-9, "{}", resnet.rate);
        // 2^(80.5/8) and 2^(96.5/8) microseconds.
        assert_eq!(resnet.p50_us.map(|us| us.round()), Some(1069.0));
        assert_eq!(resnet.p99_us.map(|us| us.round()), Some(4277.0));
        assert_eq!((resnet.pending, resnet.mean_rows), (3, Some(1.8)));
        // 25 were answered, 4 of them late, and 5 were refused.
        assert!((resnet.slo_kept.expect("an SLO") - 0.7).abs() < 1e-9);
        assert_eq!(resnet.wait_p99_us.map(|us| us.round()), Some(535.0));
        assert_eq!(resnet.resident, [(0, 2 << 20)]);
        let bert = models.iter().find(|row| row.name == "bert").expect("a row");
        assert_eq!((bert.failed, bert.slo_kept), (8, None));
        assert!(models.iter().any(|row| row.name == "unused" && row.p50_us.is_none()));
        let device = &minute.devices()[0];
        assert!((device.busy[0] - 0.2).abs() < 1e-9 && (device.busy[1] - 0.4).abs() < 1e-9);
        assert!((device.preemption_rate - 20.0).abs() < 1e-9);
        let json = minute.json();
        assert_eq!(json["models"][1]["name"], "resnet");
        assert_eq!(json["models"][1]["resident_bytes"], 2 << 20);
        assert!(json["models"][1]["wait_p99_us"].as_f64().is_some_and(|us| us > 500.0));
    }

    /// A frontend of two backends, one of them ejected.
    pub(in crate::top_command) fn frontend_example() -> Figures {
        let backend = |name: &str, state: &str, done: u64| {
            json!({
                "name": name, "address": "10.0.0.1:1", "http": "", "device": "CPU, 2 threads",
                "models": ["resnet"], "state": state, "in_flight": 2, "done": done, "failed": 1,
                "kept": 0, "missed": 0, "latency": [[80, done]],
            })
        };
        let backends = [backend("b1", "serving", 20), backend("b2", "ejected", 5)];
        let mut figures = Figures { devices: Vec::new(), ..example() };
        figures.backends = backends
            .into_iter()
            .map(|backend| serde_json::from_value(backend).expect("a backend"))
            .collect();
        figures
    }

    #[test]
    fn a_frontend_has_backends_instead_of_devices() {
        let mut minute = Minute::default();
        (0..8).for_each(|_| minute.add(frontend_example()));
        assert!(minute.devices().is_empty());
        let backends = minute.backends();
        assert!((backends[0].rate - 80.0).abs() < 1e-9, "{}", backends[0].rate);
        assert_eq!(backends[0].p99_us.map(|us| us.round()), Some(1069.0));
        assert_eq!((backends[1].failed, backends[1].figures.in_flight), (8, 2));
        assert_eq!(minute.json()["backends"][1]["state"], "ejected");
        let gone = Figures { backends: Vec::new(), ..frontend_example() };
        minute.add(gone);
        assert!(minute.backends().is_empty() && minute.json().get("backends").is_none());
    }

    #[test]
    fn a_model_without_requests_for_a_minute_has_no_times() {
        let mut minute = Minute::default();
        minute.add(example());
        let silent = Figures { flows: Vec::new(), ..example() };
        (0..4 * SECONDS + 4).for_each(|_| minute.add(silent.clone()));
        assert!(minute.models().iter().all(|row| row.p99_us.is_none() && row.rate == 0.0));
        assert_eq!(minute.models().len(), 3);
        assert!(minute.flows.is_empty());
    }
}
