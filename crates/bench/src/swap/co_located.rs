//! A real-time model that is asked for regularly, with and without something beside it that loads.
//!
//! Quiet and noisy stretches take phases, so that whatever drifts drifts for both. A noisy stretch ends when the last of what
//! began in it is over, and the quiet one behind it lasts as long.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use base::{Bytes, Nanos};
use model::config::Class;
use serde::Serialize;

use super::{Swap, SwapError, TestNode, report};
use crate::live::Latency;

/// Least length of a stretch, quiet or noisy.
const STRETCH: Nanos = Nanos::from_millis(500);

/// The longest quiet stretch.
const QUIET_MOST: Nanos = Nanos::from_millis(5_000);

/// How long behind the beginning of a stretch requests still feel the one before.
const SETTLING: Nanos = Nanos(STRETCH.0 / 10);

/// What goes on beside the real-time model.
pub enum BackgroundLoad<'a> {
    /// Best-effort requests of so many other models that have room for some, from so many clients.
    Swapping {
        /// Models.
        count: usize,
        /// Models of these that have room.
        room: usize,
        /// Clients.
        clients: usize,
    },
    /// The same with room for all: what the requests themselves cost.
    Serving {
        /// Models.
        count: usize,
        /// Clients.
        clients: usize,
    },
    /// Something else, again and again.
    Other {
        /// What it is, for the report.
        name: String,
        /// One round of it: the bytes of weights it brought, or what went wrong.
        round: &'a (dyn Fn(&runtime::Node) -> Result<u64, String> + Sync),
        /// Bytes of weights that it needs room for.
        room: u64,
    },
}

/// What became of it.
#[derive(Clone, Debug, Serialize)]
pub struct CoLocatedReport {
    /// What went on.
    pub noise: String,
    /// Share of the device the real-time model asks for.
    pub load_pct: f64,
    /// Without it.
    pub quiet: Latency,
    /// With it.
    pub noisy: Latency,
    /// By how much the median differs.
    pub p50_change_pct: f64,
    /// By how much the 99th percentile differs.
    pub p99_change_pct: f64,
    /// Noisy over quiet 99th percentile.
    pub p99_ratio: f64,
    /// Requests or rounds of the noise.
    pub events: u64,
    /// Weights the node loaded in the noisy stretches.
    pub loads: u64,
    /// Seconds of quiet and of noisy stretches.
    pub seconds: [f64; 2],
    /// Weights brought in the noisy stretches, over their time.
    pub gigabytes_per_second: f64,
    /// Periods of the real-time model that had passed and were dropped.
    pub dropped: u64,
    /// Requests without an answer, and rounds that went wrong.
    pub errors: u64,
    /// What the first of them said.
    pub first_error: Option<String>,
}

#[derive(Default)]
struct BackgroundCounters {
    on: AtomicBool,
    stop: AtomicBool,
    /// Rounds of the noise under way.
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

impl Swap {
    /// The first model at `load_pct` of what it can do, as real time and pinned, for so many seconds.
    pub fn beside(
        &self,
        noise: &BackgroundLoad<'_>,
        load_pct: f64,
        seconds: f64,
    ) -> Result<CoLocatedReport, SwapError> {
        let (name, count, room, more) = match noise {
            BackgroundLoad::Swapping { count, room, clients } => (
                format!("{clients} clients swapping {count} models, room for {room}"),
                *count,
                *room,
                0,
            ),
            BackgroundLoad::Serving { count, clients } => {
                (format!("{clients} clients of {count} models that are there"), *count, *count, 0)
            }
            BackgroundLoad::Other { name, room, .. } => (name.clone(), 0, self.models.len(), *room),
        };
        let memory = Bytes(self.bytes * (room as u64 + 1) + more);
        let stage = self.stage(count + 1, memory, Some(0))?;
        let counters = BackgroundCounters::default();
        let mut served = std::thread::scope(|scope| {
            match noise {
                BackgroundLoad::Swapping { clients, .. }
                | BackgroundLoad::Serving { clients, .. } => {
                    for client in 0..*clients {
                        let (stage, counters) = (&stage, &counters);
                        scope.spawn(move || stage.make_noise(counters, client, count));
                    }
                }
                BackgroundLoad::Other { round, .. } => {
                    let (stage, counters) = (&stage, &counters);
                    scope.spawn(move || {
                        counters.while_on(|_| round(&stage.node));
                    });
                }
            }
            let samples = stage.real_time(&counters, load_pct, seconds);
            counters.stop.store(true, Ordering::Release);
            samples
        });
        let swaps = stage.node.memory().swaps;
        stage.end()?;
        let bytes = counters.bytes.into_inner().max(swaps.loaded.0);
        let (quiet, noisy) = (Latency::of(&mut served.quiet), Latency::of(&mut served.noisy));
        let [_, noisy_seconds] = served.seconds;
        let change =
            |noisy: f64, quiet: f64| report::round((noisy / quiet.max(1e-9) - 1.0) * 100.0);
        Ok(CoLocatedReport {
            noise: name,
            load_pct,
            quiet,
            noisy,
            p50_change_pct: change(noisy.p50_us, quiet.p50_us),
            p99_change_pct: change(noisy.p99_us, quiet.p99_us),
            p99_ratio: report::round(noisy.p99_us / quiet.p99_us.max(1e-9)),
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
    /// Does `round` again and again in the noisy stretches; it says how many bytes it brought.
    fn while_on(&self, mut round: impl FnMut(u64) -> Result<u64, String>) {
        let mut number = 0;
        while !self.stop.load(Ordering::Acquire) {
            // Said before it is looked: whoever sees nobody busy after having said stop sees no one begin.
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
    fn make_noise(&self, counters: &BackgroundCounters, client: usize, count: usize) {
        counters.while_on(|round| {
            let model = 1 + (round as usize + client * (count / 2)) % count.max(1);
            let answer =
                self.ask(model, Class::BestEffort, false).map_err(|why| why.to_string())?;
            match answer.outputs == self.swap.expected[model] {
                true => Ok(0),
                false => Err(format!("an answer of model {model} is wrong")),
            }
        });
    }

    /// The first model in quiet and in noisy stretches.
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
            if phases.look(next, || counters.busy.load(Ordering::SeqCst)) {
                counters.on.store(phases.on, Ordering::SeqCst);
            }
            match self.ask(0, Class::RealTime, true) {
                Ok(answer) => {
                    if answer.outputs != self.swap.expected[0] {
                        counters.failed("an answer of the real-time model is wrong".to_string());
                    }
                    // What is made only once is made in the first two stretches.
                    if phases.number > 1 && next - phases.since > SETTLING {
                        let noisy = phases.is_noisy();
                        let kind = if noisy { &mut served.noisy } else { &mut served.quiet };
                        kind.push(answer.latency);
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
            served.seconds[usize::from(phases.is_noisy())] += (next - last).0 as f64 / 1e9;
        }
        counters.on.store(false, Ordering::SeqCst);
        served
    }
}

/// What became of the real-time model's requests.
#[derive(Default)]
struct RealTimeSamples {
    quiet: Vec<Nanos>,
    noisy: Vec<Nanos>,
    dropped: u64,
    /// Of quiet and of noisy stretches.
    seconds: [f64; 2],
}

/// Whose turn it is.
struct PhaseSchedule {
    /// The noise may begin something.
    on: bool,
    /// It may not any more, and what it began goes on.
    ending: bool,
    since: Nanos,
    /// How long this stretch lasts at least.
    length: Nanos,
    number: u64,
}

impl PhaseSchedule {
    /// Quiet first.
    fn new(now: Nanos) -> PhaseSchedule {
        PhaseSchedule { on: false, ending: false, since: now, length: STRETCH, number: 0 }
    }

    fn is_noisy(&self) -> bool {
        self.on || self.ending
    }

    /// Goes on to the next stretch when it is time; whether `on` may have changed.
    fn look(&mut self, now: Nanos, busy: impl Fn() -> usize) -> bool {
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
            true => lasted.min(QUIET_MOST),
            false => STRETCH,
        };
        self.ending = false;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_noisy_stretch_lasts_until_the_noise_is_over_and_the_quiet_one_as_long() {
        let at = Nanos::from_millis;
        let mut phases = PhaseSchedule::new(at(0));
        assert!(!phases.look(at(499), || 0) && !phases.is_noisy());
        assert!(phases.look(at(500), || 0) && phases.on);
        assert!(!phases.look(at(900), || 1));
        assert!(phases.look(at(1_000), || 1) && !phases.on && phases.is_noisy());
        assert!(!phases.look(at(1_700), || 1) && phases.is_noisy(), "it still goes on");
        assert!(phases.look(at(1_800), || 0) && !phases.is_noisy());
        assert!(!phases.look(at(3_000), || 0), "quiet for 1.3 seconds, too");
        assert!(phases.look(at(3_100), || 0) && phases.on);
        assert_eq!(phases.number, 3);
    }
}
