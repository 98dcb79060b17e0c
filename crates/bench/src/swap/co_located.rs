//! A real-time model with regular requests, co-located with a background load and without it.
//!
//! Idle and loaded phases alternate, so that drift affects both. A loaded phase ends when the last
//! round that began in it has ended, and the idle phase after it lasts as long.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use base::{Bytes, Nanos};
use model::config::Class;
use serde::Serialize;

use super::{SwapBenchmark, SwapError, TestNode, report};
use crate::live::Latency;

/// Min length of a phase.
const PHASE: Nanos = Nanos::from_millis(500);

/// Max length of an idle phase.
const IDLE_PHASE_MAX: Nanos = Nanos::from_millis(5_000);

/// How long requests at the start of a phase still depend on the phase before.
const SETTLING: Nanos = Nanos(PHASE.0 / 10);

/// The load beside the real-time model.
pub enum BackgroundLoad<'a> {
    /// Best-effort requests to other models, of which only some fit into memory.
    Swapping {
        /// Models.
        count: usize,
        /// How many of them fit into memory.
        resident: usize,
        /// Clients.
        clients: usize,
    },
    /// The same with enough memory for all: the cost of the requests themselves.
    Serving {
        /// Models.
        count: usize,
        /// Clients.
        clients: usize,
    },
    /// Another load, round after round.
    Other {
        /// Name for the report.
        name: String,
        /// One round: the bytes of weights it loaded, or an error.
        round: &'a (dyn Fn(&runtime::Node) -> Result<u64, String> + Sync),
        /// Bytes of weights that it needs.
        resident: u64,
    },
}

/// Latency of the real-time model with and without the background load.
#[derive(Clone, Debug, Serialize)]
pub struct CoLocatedReport {
    /// The background load.
    #[serde(rename = "noise")]
    pub background: String,
    /// Share of the device that the real-time model uses.
    pub load_pct: f64,
    /// In idle phases.
    #[serde(rename = "quiet")]
    pub without_background: Latency,
    /// In loaded phases.
    #[serde(rename = "noisy")]
    pub with_background: Latency,
    /// Change of the median.
    pub p50_change_pct: f64,
    /// Change of the 99th percentile.
    pub p99_change_pct: f64,
    /// Ratio of the 99th percentiles.
    pub p99_ratio: f64,
    /// Requests or rounds of the background load.
    pub events: u64,
    /// Models that the node loaded.
    pub loads: u64,
    /// Seconds of idle and of loaded phases.
    pub seconds: [f64; 2],
    /// Weights loaded, over the time of loaded phases.
    pub gigabytes_per_second: f64,
    /// Periods of the real-time model that were dropped.
    pub dropped: u64,
    /// Requests without reply, and rounds that failed.
    pub errors: u64,
    /// Message of the first error.
    pub first_error: Option<String>,
}

#[derive(Default)]
struct BackgroundCounters {
    on: AtomicBool,
    stop: AtomicBool,
    /// Rounds in flight.
    busy: AtomicUsize,
    events: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    first_error: std::sync::Mutex<Option<String>>,
}

impl BackgroundCounters {
    fn failed(&self, why: String) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        let mut first = self.first_error.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        first.get_or_insert(why);
    }
}

impl SwapBenchmark {
    /// Runs the first model, pinned, as real time at `load_pct` of its throughput for `seconds`
    /// seconds.
    pub fn co_located(
        &self,
        background: &BackgroundLoad<'_>,
        load_pct: f64,
        seconds: f64,
    ) -> Result<CoLocatedReport, SwapError> {
        let (name, count, resident, more) = match background {
            BackgroundLoad::Swapping { count, resident, clients } => (
                format!("{clients} clients swapping {count} models, {resident} of them resident"),
                *count,
                *resident,
                0,
            ),
            BackgroundLoad::Serving { count, clients } => {
                (format!("{clients} clients of {count} models that are there"), *count, *count, 0)
            }
            BackgroundLoad::Other { name, resident, .. } => {
                (name.clone(), 0, self.models.len(), *resident)
            }
        };
        let memory = Bytes(self.bytes * (resident as u64 + 1) + more);
        let test_node = self.test_node(count + 1, memory, Some(0))?;
        let counters = BackgroundCounters::default();
        let mut served = std::thread::scope(|scope| {
            match background {
                BackgroundLoad::Swapping { clients, .. }
                | BackgroundLoad::Serving { clients, .. } => {
                    for client in 0..*clients {
                        let (test_node, counters) = (&test_node, &counters);
                        scope.spawn(move || test_node.send_background(counters, client, count));
                    }
                }
                BackgroundLoad::Other { round, .. } => {
                    let (test_node, counters) = (&test_node, &counters);
                    scope.spawn(move || {
                        counters.run_while_on(|_| round(&test_node.node));
                    });
                }
            }
            let samples = test_node.real_time(&counters, load_pct, seconds);
            counters.stop.store(true, Ordering::Release);
            samples
        });
        let swaps = test_node.node.memory().swaps;
        test_node.end()?;
        let bytes = counters.bytes.into_inner().max(swaps.loaded.0);
        let (without, with) = (Latency::of(&mut served.without), Latency::of(&mut served.with));
        let [_, noisy_seconds] = served.seconds;
        let change =
            |with: f64, without: f64| report::round((with / without.max(1e-9) - 1.0) * 100.0);
        Ok(CoLocatedReport {
            background: name,
            load_pct,
            without_background: without,
            with_background: with,
            p50_change_pct: change(with.p50_us, without.p50_us),
            p99_change_pct: change(with.p99_us, without.p99_us),
            p99_ratio: report::round(with.p99_us / without.p99_us.max(1e-9)),
            events: counters.events.into_inner(),
            loads: swaps.loads,
            seconds: served.seconds.map(report::round),
            gigabytes_per_second: report::round(bytes as f64 / noisy_seconds.max(1e-9) / 1e9),
            dropped: served.dropped,
            errors: counters.errors.into_inner(),
            first_error: counters.first_error.into_inner().unwrap_or_default(),
        })
    }
}

impl BackgroundCounters {
    /// Runs `round` again and again in loaded phases; it returns the bytes that it loaded.
    fn run_while_on(&self, mut round: impl FnMut(u64) -> Result<u64, String>) {
        let mut number = 0;
        while !self.stop.load(Ordering::Acquire) {
            // Incremented before `on` is read: when `on` is false and `busy` is 0, no round can
            // begin.
            self.busy.fetch_add(1, Ordering::SeqCst);
            if !self.on.load(Ordering::SeqCst) {
                self.busy.fetch_sub(1, Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_micros(200));
                continue;
            }
            match round(number) {
                Ok(bytes) => drop(self.bytes.fetch_add(bytes, Ordering::Relaxed)),
                Err(why) => self.failed(why),
            }
            self.busy.fetch_sub(1, Ordering::SeqCst);
            number += 1;
            self.events.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl TestNode<'_> {
    fn send_background(&self, counters: &BackgroundCounters, client: usize, count: usize) {
        counters.run_while_on(|round| {
            let model = 1 + (round as usize + client * (count / 2)) % count.max(1);
            let reply = self
                .send_request(model, Class::BestEffort, false)
                .map_err(|why| why.to_string())?;
            match reply.outputs == self.swap.expected[model] {
                true => Ok(0),
                false => Err(format!("a reply of model {model} is wrong")),
            }
        });
    }

    /// Sends the requests of the real-time model in idle and in loaded phases.
    fn real_time(
        &self,
        counters: &BackgroundCounters,
        load_pct: f64,
        seconds: f64,
    ) -> RealTimeSamples {
        let period = Nanos((self.swap.warm.p50_us * 1e3 / (load_pct / 100.0)) as u64);
        let start = self.clock.now();
        let end = start + Nanos((seconds * 1e9) as u64);
        let mut served = RealTimeSamples::default();
        let mut phases = PhaseSchedule::new(start);
        let mut next = start;
        while next < end {
            while self.clock.now() < next {
                std::hint::spin_loop();
            }
            if phases.advance(next, || counters.busy.load(Ordering::SeqCst)) {
                counters.on.store(phases.on, Ordering::SeqCst);
            }
            match self.send_request(0, Class::RealTime, true) {
                Ok(reply) => {
                    if reply.outputs != self.swap.expected[0] {
                        counters.failed("a reply of the real-time model is wrong".to_string());
                    }
                    // The first two phases are warm-up.
                    if phases.number > 1 && next - phases.since > SETTLING {
                        let with = phases.is_loaded();
                        let kind = if with { &mut served.with } else { &mut served.without };
                        kind.push(reply.latency);
                    }
                }
                Err(why) => counters.failed(why.to_string()),
            }
            let last = next;
            // A period that has passed is dropped.
            next += period;
            let now = self.clock.now();
            if next < now {
                served.dropped += (now - next).0 / period.0.max(1);
                next = now;
            }
            served.seconds[usize::from(phases.is_loaded())] += (next - last).0 as f64 / 1e9;
        }
        counters.on.store(false, Ordering::SeqCst);
        served
    }
}

/// Latencies of the real-time model.
#[derive(Default)]
struct RealTimeSamples {
    without: Vec<Nanos>,
    with: Vec<Nanos>,
    dropped: u64,
    /// Of idle and of loaded phases.
    seconds: [f64; 2],
}

/// Alternates idle and loaded phases.
struct PhaseSchedule {
    /// The background load may begin a round.
    on: bool,
    /// It may not, and its last rounds are still in flight.
    ending: bool,
    since: Nanos,
    /// Min length of this phase.
    length: Nanos,
    number: u64,
}

impl PhaseSchedule {
    /// Begins with an idle phase.
    fn new(now: Nanos) -> PhaseSchedule {
        PhaseSchedule { on: false, ending: false, since: now, length: PHASE, number: 0 }
    }

    fn is_loaded(&self) -> bool {
        self.on || self.ending
    }

    /// Begins the next phase when it is due; returns whether `on` may have changed.
    fn advance(&mut self, now: Nanos, busy: impl Fn() -> usize) -> bool {
        if now - self.since < self.length {
            return false;
        }
        if self.on {
            (self.on, self.ending) = (false, true);
            return true;
        }
        if self.ending && busy() > 0 {
            return false;
        }
        let lasted = now - self.since;
        self.number += 1;
        (self.on, self.since) = (!self.ending, now);
        self.length = match self.ending {
            true => lasted.min(IDLE_PHASE_MAX),
            false => PHASE,
        };
        self.ending = false;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_phases_last_as_long_as_loaded_ones() {
        let at = Nanos::from_millis;
        let mut phases = PhaseSchedule::new(at(0));
        assert!(!phases.advance(at(499), || 0) && !phases.is_loaded());
        assert!(phases.advance(at(500), || 0) && phases.on);
        assert!(!phases.advance(at(900), || 1));
        assert!(phases.advance(at(1_000), || 1) && !phases.on && phases.is_loaded());
        assert!(!phases.advance(at(1_700), || 1) && phases.is_loaded(), "a round is in flight");
        assert!(phases.advance(at(1_800), || 0) && !phases.is_loaded());
        assert!(!phases.advance(at(3_000), || 0), "idle for 1.3 seconds, too");
        assert!(phases.advance(at(3_100), || 0) && phases.on);
        assert_eq!(phases.number, 3);
    }
}
