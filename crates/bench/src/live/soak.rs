//! A workload for a long time, its trace repeated, with models that come and go and clients that go away beside it.
//!
//! What grows with time is booked in histograms and counts, and the recorded trace is checked and forgotten in slices: a soak
//! of hours takes as much memory as one of minutes, so what grows is somebody's leak.

mod disturber;
mod memory;
mod report;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::{Histogram, Nanos};
use model::config::Class;
use runtime::Rejection;

use self::disturber::{Disturbance, Disturber, Subject};
pub use self::memory::Growth;
use self::memory::{Series, read};
pub use self::report::SoakReport;
use super::client::{Answer, Ledger};
use super::observer::TraceCheck;
use super::{Asking, DRAIN, Live, LiveError, Rates, Stage, StageOptions, Workload};
use crate::disb;

/// Preemptions the node remembers; they are only counted here.
const PREEMPTIONS_KEPT: usize = 1_024;

/// Models a node has at once at most: those of the workload, and what the disturber brings.
const MODELS_MOST: usize = 256;

/// How often the recorded trace is checked and forgotten.
const SLICE: Duration = Duration::from_millis(250);

/// How often the soak looks after itself.
const LOOK: Duration = Duration::from_millis(10);

/// How often it says how it is going.
const PROGRESS: Duration = Duration::from_secs(10);

/// How a soak is run.
#[derive(Clone, Debug)]
pub struct SoakOptions {
    /// How long.
    pub seconds: f64,
    /// The execution policy; one that runs best effort.
    pub policy: String,
    /// Seed of what disturbs.
    pub seed: u64,
}

/// What became of a client's requests, in bounded memory.
#[derive(Debug, Default)]
struct Booked {
    start: Nanos,
    length: Nanos,
    /// Latencies of what was asked in the first tenth, in the last, and at any time.
    first: Histogram,
    last: Histogram,
    all: Histogram,
    late: u64,
    dropped: u64,
    wrong: u64,
    errors: BTreeMap<&'static str, u64>,
    first_error: Option<String>,
}

impl Ledger for Booked {
    fn begin(warm: Booked, start: Nanos, length: Nanos) -> Booked {
        let Booked { wrong, errors, first_error, .. } = warm;
        Booked { start, length, wrong, errors, first_error, ..Booked::default() }
    }

    fn answered(&mut self, answer: Answer, right: bool) {
        self.wrong += u64::from(!right);
        self.all.record(answer.latency);
        let (since, tenth) = (answer.asked.since(self.start), Nanos(self.length.0 / 10));
        if since < tenth {
            self.first.record(answer.latency);
        } else if since >= self.length - tenth {
            self.last.record(answer.latency);
        }
    }

    fn refused(&mut self, why: &Rejection) {
        *self.errors.entry(kind(why)).or_default() += 1;
        self.first_error.get_or_insert_with(|| why.to_string());
    }

    fn late(&mut self) {
        self.late += 1;
    }

    fn dropped(&mut self) {
        self.dropped += 1;
    }
}

/// A rejection's name in reports.
fn kind(why: &Rejection) -> &'static str {
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

/// What a soak has seen so far.
struct Watched {
    check: TraceCheck,
    series: Series,
}

impl Live {
    /// Runs `workload` for a long time under one policy while models come and go and clients go away. Lets go of its own
    /// programs, so that memory is that of the node alone.
    pub fn soak(
        self,
        workload: &Workload,
        rates: Rates,
        options: &SoakOptions,
        progress: &dyn Fn(&str),
    ) -> Result<SoakReport, LiveError> {
        let Asking { mut clients, trace_seconds, share } = self.clients(workload, rates);
        if let Some(period) = trace_seconds {
            disb::repeat(&mut clients, period, options.seconds);
        }
        let names: Vec<&str> = clients.iter().map(|client| client.model.as_str()).collect();
        let asked = StageOptions::of(&clients, PREEMPTIONS_KEPT);
        let stage = self.stage(&options.policy, &names, asked)?;
        let targets = stage.targets(&workload.name, &clients)?;
        let subjects = stage.subjects()?;
        self.models.iter().for_each(super::KeptModel::let_go);
        let window = self.window(&stage, clients.len(), options.seconds);
        let watched = Mutex::new(Watched {
            check: TraceCheck::new(MODELS_MOST),
            series: Series::new(options.seconds),
        });
        let disturber = Disturber {
            device: &*self.device,
            stage: &stage,
            subjects,
            stop: AtomicBool::new(false),
            calm: Mutex::default(),
            done: Mutex::default(),
            pause_s: (options.seconds / 50.0).min(0.3),
        };
        let meanwhile = |start| {
            std::thread::scope(|scope| {
                scope.spawn(|| disturber.come_and_go(options.seed));
                scope.spawn(|| disturber.go_away(options.seed.rotate_left(32)));
                self.watch(&stage, &disturber, &watched, (start, options.seconds), progress);
                disturber.stop.store(true, Ordering::Release);
            });
        };
        let (ledgers, _): (Vec<Booked>, f64) =
            self.drive(&stage, &clients, targets, &window, &meanwhile);
        if !stage.node.drain(DRAIN) {
            return Err(LiveError::Stuck(workload.name.clone(), options.policy.clone()));
        }
        let mut watched = watched.into_inner().unwrap_or_else(PoisonError::into_inner);
        watched.check.feed(stage.recorder.take());
        let mut report = SoakReport::new(&watched.series);
        (report.workload, report.rates) = (workload.name.clone(), rates.name().to_string());
        (report.policy, report.seconds) = (options.policy.clone(), options.seconds);
        report.rt_share_pct = super::round(share * 100.0);
        report.trace_repetitions = trace_seconds.map(|period| options.seconds / period);
        report.preemptions = stage.node.preemptions().total;
        for (client, ledger) in clients.iter().zip(ledgers) {
            report.book(client.class, &ledger);
        }
        let done = disturber.done.into_inner().unwrap_or_else(PoisonError::into_inner);
        report.disturbed(done);
        report.checked(&mut watched.check);
        Ok(report)
    }

    /// Checks the trace slice by slice, reads memory and says how it is going, until the end.
    fn watch(
        &self,
        stage: &Stage<'_>,
        disturber: &Disturber<'_>,
        watched: &Mutex<Watched>,
        (start, seconds): (Nanos, f64),
        progress: &dyn Fn(&str),
    ) {
        let mut watched = locked(watched);
        let (began, every) = (Instant::now(), watched.series.every());
        let (mut checked, mut sampled, mut told) = (began, began, began);
        let elapsed = || (stage.clock.now() - start).0 as f64 / 1e9;
        while elapsed() < seconds {
            std::thread::sleep(LOOK);
            if checked.elapsed() >= SLICE {
                checked = Instant::now();
                watched.check.feed(stage.recorder.take());
            }
            // Only between two loads, so that what is there for a moment is not taken for growth.
            if sampled.elapsed() >= every
                && let Ok(_calm) = disturber.calm.try_lock()
            {
                sampled = Instant::now();
                let reading = read(&*self.device);
                watched.series.push(elapsed() / seconds, reading);
            }
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                let line = report::line(elapsed(), &watched, &locked(&disturber.done));
                progress(&line);
            }
        }
    }
}

impl Stage<'_> {
    /// What can be disturbed: every model, with what it answers as best effort.
    fn subjects(&self) -> Result<Vec<Subject<'_>>, LiveError> {
        let mut subjects = Vec::new();
        for (model, key) in &self.models {
            let began = self.clock.now();
            let expected = self.once(model, *key.hold(), Class::BestEffort)?.outputs;
            let took = self.clock.now() - began;
            subjects.push(Subject { model, key: key.clone(), expected, took });
        }
        Ok(subjects)
    }
}

impl Disturbance {
    /// Books something that did not end with outputs.
    fn note(&mut self, expected: bool, why: &'static str, words: impl ToString) {
        if expected {
            *self.expected.entry(why).or_default() += 1;
            return;
        }
        *self.unexpected.entry(why).or_default() += 1;
        self.first_unexpected.get_or_insert_with(|| words.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_booked_by_the_tenth_they_were_asked_in() {
        let mut booked =
            Booked::begin(Booked::default(), Nanos::from_millis(50), Nanos::from_millis(1_000));
        for asked in [50, 149, 150, 700, 949, 950, 1_049] {
            let (asked, latency) = (Nanos::from_millis(asked), Nanos::from_micros(asked));
            let timing = runtime::Timing::default();
            booked.answered(Answer { asked, latency, timing }, asked != Nanos::from_millis(700));
        }
        booked.refused(&Rejection::NoSuchModel);
        let counts = (booked.first.count(), booked.last.count(), booked.all.count());
        assert_eq!((counts, booked.wrong), ((2, 2, 7), 1));
        assert_eq!(booked.errors, BTreeMap::from([("unloaded", 1)]));
    }
}
