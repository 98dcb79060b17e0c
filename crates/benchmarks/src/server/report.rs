//! Measurements, and their summaries.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::window::MeasuredWindow;

/// Processor time of process `pid`, or of this one, in seconds.
pub(super) fn process_seconds(pid: Option<u32>) -> f64 {
    let name = pid.map_or("self".to_string(), |pid| pid.to_string());
    let Ok(text) = std::fs::read_to_string(format!("/proc/{name}/stat")) else { return 0.0 };
    let after_name = text.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field = |index: usize| after_name.split_whitespace().nth(index)?.parse::<f64>().ok();
    // Linux reports hundredths of a second to user space on every architecture.
    (field(11).unwrap_or(0.0) + field(12).unwrap_or(0.0)) / 100.0
}

/// Statistics of replies.
#[derive(Debug)]
pub(super) struct ReplyStats {
    begin: Instant,
    counted: Duration,
    latencies: Vec<Duration>,
    replies: usize,
    checked: u64,
    wrong: u64,
    batches: u64,
    rows: u64,
    rows_max: usize,
}

impl ReplyStats {
    /// For a measurement that began at `start`.
    pub(super) fn new(start: Instant, window: MeasuredWindow) -> ReplyStats {
        ReplyStats {
            begin: start + window.ramp,
            counted: window.counted,
            latencies: Vec::new(),
            replies: 0,
            checked: 0,
            wrong: 0,
            batches: 0,
            rows: 0,
            rows_max: 0,
        }
    }

    fn counts(&self, at: Instant) -> bool {
        at.checked_duration_since(self.begin).is_some_and(|since| since < self.counted)
    }

    /// Whether the next reply is to be checked, one of `sample`.
    pub(super) fn due_for_check(&self, sample: usize) -> bool {
        self.replies.is_multiple_of(sample)
    }

    /// A reply came.
    pub(super) fn record(&mut self, sent: Instant, replied: Instant, checked: bool, right: bool) {
        self.replies += 1;
        self.checked += u64::from(checked);
        self.wrong += u64::from(!right);
        if self.counts(replied) {
            self.latencies.push(replied - sent);
        }
    }

    /// A batch of `rows` was done.
    pub(super) fn batch(&mut self, rows: usize, replied: Instant) {
        if self.counts(replied) {
            self.batches += 1;
            self.rows += rows as u64;
            self.rows_max = self.rows_max.max(rows);
        }
    }

    /// Adds the statistics of another client.
    pub(super) fn add(&mut self, mut other: ReplyStats) {
        self.latencies.append(&mut other.latencies);
        self.replies += other.replies;
        self.checked += other.checked;
        self.wrong += other.wrong;
        self.batches += other.batches;
        self.rows += other.rows;
        self.rows_max = self.rows_max.max(other.rows_max);
    }

    /// The result.
    pub(super) fn finish(mut self) -> Measurement {
        self.latencies.sort_unstable();
        let count = self.latencies.len();
        let quantile = |share: f64| {
            let at = ((count as f64 * share) as usize).min(count.saturating_sub(1));
            self.latencies.get(at).map_or(0.0, |time| thousandth(time.as_secs_f64() * 1e3))
        };
        Measurement {
            rps: tenth(count as f64 / self.counted.as_secs_f64()),
            p50_ms: quantile(0.5),
            p99_ms: quantile(0.99),
            mean_batch: (self.batches > 0).then(|| tenth(self.rows as f64 / self.batches as f64)),
            largest_batch: (self.batches > 0).then_some(self.rows_max),
            checked: self.checked,
            wrong: self.wrong,
            ..Measurement::default()
        }
    }
}

pub(super) fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn hundredth(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

pub(super) fn thousandth(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// One measurement.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Measurement {
    /// Replies per second.
    pub(super) rps: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    /// Cores that the server's process kept busy; for the engine alone those of this process,
    /// clients included.
    pub(super) server_cores: f64,
    /// Cores that the clients' process kept busy.
    pub(super) client_cores: f64,
    /// Mean rows of a batch.
    pub(super) mean_batch: Option<f64>,
    /// Max rows of a batch; only the engine alone reports it.
    pub(super) largest_batch: Option<usize>,
    /// Bytes of one request and its reply, without framing.
    pub(super) request_bytes: usize,
    pub(super) answer_bytes: usize,
    /// Gigabytes per second through loopback, in both directions.
    pub(super) gb_per_second: f64,
    /// Replies compared with the engine's outputs.
    pub(super) checked: u64,
    /// Replies that differed.
    pub(super) wrong: u64,
    /// Bytes that the viewer got which got least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) viewer_bytes: Option<u64>,
}

/// The engine alone, then every server.
#[derive(Clone, Debug, Serialize)]
pub(super) struct MeasurementRound {
    pub(super) engine: Measurement,
    pub(super) servers: Vec<Measurement>,
}

/// Medians of all rounds.
#[derive(Clone, Debug, Serialize)]
pub(super) struct MeasurementSummary {
    pub(super) name: String,
    pub(super) rps: f64,
    /// Share of the engine's rate in the same round, in percent.
    pub(super) of_engine_pct: f64,
    /// Rate with the first kind of protection, or number of viewers, in the same round: its share
    /// in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) of_first_pct: Option<f64>,
    /// The same of p99: above 100 it is longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) p99_of_first_pct: Option<f64>,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) server_cores: f64,
    pub(super) client_cores: f64,
    /// Replies per second for each core that the server keeps busy.
    pub(super) rps_per_core: f64,
    pub(super) mean_batch: Option<f64>,
    pub(super) largest_batch: Option<usize>,
    pub(super) gb_per_second: f64,
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        count if count % 2 == 1 => values[count / 2],
        count => (values[count / 2 - 1] + values[count / 2]) / 2.0,
    }
}

impl MeasurementSummary {
    /// Summaries of the engine and of servers with these names, and with the index of the server
    /// that each is compared with.
    pub(super) fn all<'a>(
        names: impl Iterator<Item = (&'a str, Option<usize>)>,
        rounds: &[MeasurementRound],
    ) -> Vec<MeasurementSummary> {
        let engine = |round: &MeasurementRound| round.engine.clone();
        let mut all = vec![MeasurementSummary::of("engine", rounds, engine)];
        for (index, (name, reference)) in names.enumerate() {
            let summary = MeasurementSummary::of(name, rounds, |r| r.servers[index].clone());
            let share = |first: usize, value: fn(&Measurement) -> f64| {
                let of_round = |round: &MeasurementRound| {
                    value(&round.servers[index]) / value(&round.servers[first]).max(1e-9)
                };
                hundredth(median(rounds.iter().map(of_round)) * 100.0)
            };
            let of_first_pct = reference.map(|first| share(first, |one| one.rps));
            let p99_of_first_pct = reference.map(|first| share(first, |one| one.p99_ms));
            all.push(MeasurementSummary { of_first_pct, p99_of_first_pct, ..summary });
        }
        all
    }

    fn of(
        name: &str,
        rounds: &[MeasurementRound],
        pick: impl Fn(&MeasurementRound) -> Measurement,
    ) -> MeasurementSummary {
        let of =
            |value: fn(&Measurement) -> f64| median(rounds.iter().map(|round| value(&pick(round))));
        let shares = rounds.iter().map(|round| pick(round).rps / round.engine.rps.max(1e-9));
        let per_core = rounds.iter().map(&pick).map(|s| s.rps / s.server_cores.max(0.01));
        let batches: Vec<f64> = rounds.iter().filter_map(|round| pick(round).mean_batch).collect();
        MeasurementSummary {
            name: name.to_string(),
            rps: tenth(of(|s| s.rps)),
            of_engine_pct: tenth(median(shares) * 100.0),
            of_first_pct: None,
            p99_of_first_pct: None,
            p50_ms: thousandth(of(|s| s.p50_ms)),
            p99_ms: thousandth(of(|s| s.p99_ms)),
            server_cores: thousandth(of(|s| s.server_cores)),
            client_cores: thousandth(of(|s| s.client_cores)),
            rps_per_core: tenth(median(per_core)),
            mean_batch: (!batches.is_empty()).then(|| tenth(median(batches.into_iter()))),
            largest_batch: rounds.iter().filter_map(|round| pick(round).largest_batch).max(),
            gb_per_second: thousandth(of(|s| s.gb_per_second)),
        }
    }
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ServerReport {
    pub(super) device: String,
    pub(super) driver: Option<String>,
    pub(super) date: String,
    pub(super) command: String,
    pub(super) cores: usize,
    pub(super) model: String,
    pub(super) inputs: Vec<String>,
    pub(super) clients: u16,
    pub(super) connections: u16,
    pub(super) seconds: f64,
    pub(super) summaries: Vec<MeasurementSummary>,
    pub(super) rounds: Vec<MeasurementRound>,
}

impl ServerReport {
    /// Replies that differ from the engine's.
    pub(super) fn wrong(&self) -> u64 {
        let measurements =
            self.rounds.iter().flat_map(|r| std::iter::once(&r.engine).chain(&r.servers));
        measurements.map(|measurement| measurement.wrong).sum()
    }
}

/// The medians as text.
pub(super) fn table(report: &ServerReport) -> String {
    let mut text = format!(
        "{} ({}) on {}\n{} requests outstanding, {} connections of gRPC, {} rounds of {} s; \
         medians\n",
        report.model,
        report.inputs.join(", "),
        report.device,
        report.clients,
        report.connections,
        report.rounds.len(),
        report.seconds
    );
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{:<20}{:>10}{:>10}{:>9}{:>9}{:>9}{:>9}{:>8}{:>9}{:>9}{:>7}{:>6}{:>7}",
        "",
        "/s",
        "% engine",
        "% first",
        "p50 ms",
        "p99 ms",
        "% first",
        "cores",
        "clients",
        "/s core",
        "batch",
        "max",
        "GB/s"
    );
    for s in &report.summaries {
        let batch = s.mean_batch.map_or("-".to_string(), |batch| batch.to_string());
        let max = s.largest_batch.map_or("-".to_string(), |max| max.to_string());
        let first =
            |share: Option<f64>| share.map_or("-".to_string(), |share| format!("{share:.2}"));
        let _ = writeln!(
            text,
            "{:<20}{:>10}{:>10}{:>9}{:>9}{:>9}{:>9}{:>8.2}{:>9.2}{:>9}{:>7}{:>6}{:>7.2}",
            s.name,
            s.rps,
            s.of_engine_pct,
            first(s.of_first_pct),
            s.p50_ms,
            s.p99_ms,
            first(s.p99_of_first_pct),
            s.server_cores,
            s.client_cores,
            s.rps_per_core,
            batch,
            max,
            s.gb_per_second
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_replies_inside_the_window_count() {
        let start = Instant::now();
        let (ramp, counted) = (Duration::from_millis(100), Duration::from_millis(1000));
        let mut stats = ReplyStats::new(start, MeasuredWindow { ramp, counted });
        let at = |ms: u64| start + Duration::from_millis(ms);
        for (sent, replied) in [(0, 50), (50, 150), (900, 1099), (1000, 1100)] {
            stats.record(at(sent), at(replied), true, replied != 50);
        }
        stats.batch(7, at(1100));
        stats.batch(3, at(500));
        let done = stats.finish();
        assert_eq!((done.rps, done.checked, done.wrong), (2.0, 4, 1));
        assert_eq!((done.p50_ms, done.p99_ms), (199.0, 199.0));
        assert_eq!((done.mean_batch, done.largest_batch), (Some(3.0), Some(3)));
    }

    #[test]
    fn shares_are_relative_to_the_same_round() {
        let measurement = |rps| Measurement { rps, ..Measurement::default() };
        let round = |engine, server| MeasurementRound {
            engine: measurement(engine),
            servers: vec![measurement(server)],
        };
        let rounds = [round(100.0, 90.0), round(200.0, 190.0), round(50.0, 10.0)];
        let all = MeasurementSummary::all([("gRPC", None)].into_iter(), &rounds);
        assert_eq!((all[0].rps, all[1].rps, all[1].of_engine_pct), (100.0, 90.0, 90.0));
    }

    #[test]
    fn protection_is_compared_within_a_round() {
        let measurement = |rps| Measurement { rps, ..Measurement::default() };
        let round = |plain, tls| MeasurementRound {
            engine: measurement(100.0),
            servers: vec![measurement(plain), measurement(tls)],
        };
        let rounds = [round(50.0, 45.0), round(100.0, 80.0), round(10.0, 10.0)];
        let names = [("plain", None), ("TLS", Some(0))];
        let all = MeasurementSummary::all(names.into_iter(), &rounds);
        assert_eq!((all[1].of_first_pct, all[2].of_first_pct), (None, Some(90.0)));
    }

    #[test]
    fn p99_is_compared_within_a_round_as_well() {
        let measurement = |p99_ms| Measurement { p99_ms, ..Measurement::default() };
        let round = |none, five| MeasurementRound {
            engine: measurement(1.0),
            servers: vec![measurement(none), measurement(five)],
        };
        let rounds = [round(1.0, 1.02), round(2.0, 2.0), round(4.0, 8.0)];
        let names = [("none", None), ("five", Some(0))];
        let all = MeasurementSummary::all(names.into_iter(), &rounds);
        assert_eq!((all[1].p99_of_first_pct, all[2].p99_of_first_pct), (None, Some(102.0)));
    }
}
