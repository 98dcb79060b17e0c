//! Runs a workload for a long time, repeating its trace, while models are loaded, replaced and
//! unloaded and requests are cancelled.
//!
//! The soak records into histograms and counters and checks the trace in slices, so that its own
//! memory does not grow with time: what grows is a leak.

mod churn;
mod memory;
mod report;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::{Histogram, Nanos};
use model::config::Class;
use runtime::Rejection;

use self::churn::{ChurnInjector, ChurnModel, ChurnStats};
pub use self::memory::ResourceGrowth;
use self::memory::{ResourceSeries, read};
pub use self::report::SoakReport;
use super::client::{ClientLog, TimedReply};
use super::observer::TraceChecker;
use super::{
    DRAIN, LiveBenchmark, LiveError, RatedClients, Rates, TestNode, TestNodeOptions, Workload,
};
use crate::disb;

/// Preemptions that the node records; the soak only counts them.
const PREEMPTIONS_KEPT: usize = 1_024;

/// Max models of a node: those of the workload and temporary copies.
const MODELS_MAX: usize = 256;

/// Interval in which the recorded trace is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Interval in which the soak polls.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Interval of progress lines.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// How a soak is run.
#[derive(Clone, Debug)]
pub struct SoakOptions {
    /// Length in seconds.
    pub seconds: f64,
    /// The execution policy; it must run best effort.
    pub policy: String,
    /// Seed of loads and cancellations.
    pub seed: u64,
}

/// Records a client's requests in bounded memory.
#[derive(Debug, Default)]
struct SoakLog {
    start: Nanos,
    length: Nanos,
    /// Latencies of requests sent in the first tenth, in the last, and at any time.
    first: Histogram,
    last: Histogram,
    all: Histogram,
    late: u64,
    dropped: u64,
    wrong: u64,
    errors: BTreeMap<&'static str, u64>,
    first_error: Option<String>,
}

impl ClientLog for SoakLog {
    fn begin(warm: SoakLog, start: Nanos, length: Nanos) -> SoakLog {
        let SoakLog { wrong, errors, first_error, .. } = warm;
        SoakLog { start, length, wrong, errors, first_error, ..SoakLog::default() }
    }

    fn replied(&mut self, reply: TimedReply, right: bool) {
        self.wrong += u64::from(!right);
        self.all.record(reply.latency);
        let (since, tenth) = (reply.sent.since(self.start), Nanos(self.length.0 / 10));
        if since < tenth {
            self.first.record(reply.latency);
        } else if since >= self.length - tenth {
            self.last.record(reply.latency);
        }
    }

    fn refused(&mut self, why: &Rejection) {
        *self.errors.entry(rejection_name(why)).or_default() += 1;
        self.first_error.get_or_insert_with(|| why.to_string());
    }

    fn late(&mut self) {
        self.late += 1;
    }

    fn dropped(&mut self) {
        self.dropped += 1;
    }
}

/// Name of a rejection in reports.
fn rejection_name(why: &Rejection) -> &'static str {
    match why {
        Rejection::NoSuchModel => "unloaded",
        Rejection::QueueFull { .. } => "queue full",
        Rejection::DeadlineExceeded => "deadline",
        Rejection::Cancelled => "cancelled",
        Rejection::RealTimeOnly => "real time only",
        Rejection::ShuttingDown => "shutting down",
        Rejection::Device(_) => "device",
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the soak has observed so far.
struct SoakObservations {
    check: TraceChecker,
    series: ResourceSeries,
}

impl LiveBenchmark {
    /// Runs `workload` for a long time under one policy, with churn. It drops its own programs, so
    /// that it measures the memory of the node alone.
    pub fn soak(
        self,
        workload: &Workload,
        rates: Rates,
        options: &SoakOptions,
        progress: &dyn Fn(&str),
    ) -> Result<SoakReport, LiveError> {
        let RatedClients { mut clients, trace_seconds, share } = self.clients(workload, rates);
        if let Some(period) = trace_seconds {
            disb::repeat(&mut clients, period, options.seconds);
        }
        let names: Vec<&str> = clients.iter().map(|client| client.model.as_str()).collect();
        let node_options = TestNodeOptions::of(&clients, PREEMPTIONS_KEPT);
        let test_node = self.test_node(&options.policy, &names, node_options)?;
        let targets = test_node.targets(&workload.name, &clients)?;
        let churn_models = test_node.churn_models()?;
        self.models.iter().for_each(super::CellModel::release_program);
        let window = self.window(&test_node, clients.len(), options.seconds);
        let observations = Mutex::new(SoakObservations {
            check: TraceChecker::new(MODELS_MAX),
            series: ResourceSeries::new(options.seconds),
        });
        let churn = ChurnInjector {
            device: &*self.device,
            test_node: &test_node,
            churn_models,
            stop: AtomicBool::new(false),
            temporary_models: Mutex::default(),
            stats: Mutex::default(),
            pause_s: (options.seconds / 50.0).min(0.3),
        };
        let meanwhile = |start| {
            std::thread::scope(|scope| {
                scope.spawn(|| churn.load_and_unload(options.seed));
                scope.spawn(|| churn.cancel_requests(options.seed.rotate_left(32)));
                self.watch(&test_node, &churn, &observations, (start, options.seconds), progress);
                churn.stop.store(true, Ordering::Release);
            });
        };
        let (logs, _): (Vec<SoakLog>, f64) =
            self.drive(&test_node, &clients, targets, &window, &meanwhile);
        if !test_node.node.drain(DRAIN) {
            return Err(LiveError::Stuck(workload.name.clone(), options.policy.clone()));
        }
        let mut observations = observations.into_inner().unwrap_or_else(PoisonError::into_inner);
        observations.check.feed(test_node.recorder.take());
        let mut report = SoakReport::new(&observations.series);
        (report.workload, report.rates) = (workload.name.clone(), rates.name().to_string());
        (report.policy, report.seconds) = (options.policy.clone(), options.seconds);
        report.rt_share_pct = super::round(share * 100.0);
        report.trace_repetitions = trace_seconds.map(|period| options.seconds / period);
        report.preemptions = test_node.node.preemptions().total;
        for (client, log) in clients.iter().zip(logs) {
            report.add_client(client.class, &log);
        }
        let done = churn.stats.into_inner().unwrap_or_else(PoisonError::into_inner);
        report.add_churn(done);
        report.add_check(&mut observations.check);
        Ok(report)
    }

    /// Checks the trace slice by slice, samples memory and reports progress, until the end.
    fn watch(
        &self,
        test_node: &TestNode<'_>,
        churn: &ChurnInjector<'_>,
        observations: &Mutex<SoakObservations>,
        (start, seconds): (Nanos, f64),
        progress: &dyn Fn(&str),
    ) {
        let mut observations = locked(observations);
        let (began, every) = (Instant::now(), observations.series.every());
        let (mut checked, mut sampled, mut reported) = (began, began, began);
        let elapsed = || (test_node.clock.now() - start).0 as f64 / 1e9;
        while elapsed() < seconds {
            std::thread::sleep(POLL_INTERVAL);
            if checked.elapsed() >= CHECK_INTERVAL {
                checked = Instant::now();
                observations.check.feed(test_node.recorder.take());
            }
            // Not while temporary copies are loaded, which are no growth.
            if sampled.elapsed() >= every
                && let Ok(_calm) = churn.temporary_models.try_lock()
            {
                sampled = Instant::now();
                let reading = read(&*self.device);
                observations.series.push(elapsed() / seconds, reading);
            }
            if reported.elapsed() >= PROGRESS_INTERVAL {
                reported = Instant::now();
                let line = report::line(elapsed(), &observations, &locked(&churn.stats));
                progress(&line);
            }
        }
    }
}

impl TestNode<'_> {
    /// The models that churn copies, with their replies as best effort.
    fn churn_models(&self) -> Result<Vec<ChurnModel<'_>>, LiveError> {
        let mut churn_models = Vec::new();
        for (model, key) in &self.models {
            let began = self.clock.now();
            let expected = self.request_once(model, *key.read(), Class::BestEffort)?.outputs;
            let took = self.clock.now() - began;
            churn_models.push(ChurnModel { model, key: key.clone(), expected, took });
        }
        Ok(churn_models)
    }
}

impl ChurnStats {
    /// Records a request or load that failed.
    fn record_failure(&mut self, expected: bool, why: &'static str, message: impl ToString) {
        if expected {
            *self.expected.entry(why).or_default() += 1;
            return;
        }
        *self.unexpected.entry(why).or_default() += 1;
        self.first_unexpected.get_or_insert_with(|| message.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_recorded_by_the_tenth_they_were_sent_in() {
        let mut log =
            SoakLog::begin(SoakLog::default(), Nanos::from_millis(50), Nanos::from_millis(1_000));
        for at in [50, 149, 150, 700, 949, 950, 1_049] {
            let (sent, latency) = (Nanos::from_millis(at), Nanos::from_micros(at));
            let timing = runtime::Timing::default();
            log.replied(TimedReply { sent, latency, timing }, sent != Nanos::from_millis(700));
        }
        log.refused(&Rejection::NoSuchModel);
        let counts = (log.first.count(), log.last.count(), log.all.count());
        assert_eq!((counts, log.wrong), ((2, 2, 7), 1));
        assert_eq!(log.errors, BTreeMap::from([("unloaded", 1)]));
    }
}
