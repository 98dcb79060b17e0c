//! A real-time model that is asked for regularly, with and without something beside it that loads.
//!
//! Quiet and noisy stretches take turns, so that whatever drifts drifts for both.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use base::Nanos;
use model::config::Class;
use serde::Serialize;

use super::{Stage, Swap, SwapError, report};
use crate::live::Latency;

/// Length of a stretch, quiet or noisy.
const STRETCH: Nanos = Nanos::from_millis(500);

/// What goes on beside the real-time model.
pub enum Noise<'a> {
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
    /// Something else, again and again; says when it went wrong.
    Other {
        /// What it is, for the report.
        name: String,
        /// One round of it.
        round: &'a (dyn Fn(&runtime::Node) -> Result<(), String> + Sync),
    },
}

/// What became of it.
#[derive(Clone, Debug, Serialize)]
pub struct Beside {
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
    /// Requests or rounds of the noise.
    pub events: u64,
    /// Weights loaded in the noisy stretches.
    pub loads: u64,
    /// Requests without an answer, and rounds that went wrong.
    pub errors: u64,
    /// What the first of them said.
    pub first_error: Option<String>,
}

struct Counters {
    on: AtomicBool,
    stop: AtomicBool,
    events: AtomicU64,
    errors: AtomicU64,
    first_error: std::sync::Mutex<Option<String>>,
}

impl Counters {
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
        noise: &Noise<'_>,
        load_pct: f64,
        seconds: f64,
    ) -> Result<Beside, SwapError> {
        let (name, count, room) = match noise {
            Noise::Swapping { count, room, clients } => (
                format!("{clients} clients swapping {count} models, room for {room}"),
                *count,
                *room,
            ),
            Noise::Serving { count, clients } => {
                (format!("{clients} clients of {count} models that are there"), *count, *count)
            }
            Noise::Other { name, .. } => (name.clone(), 0, self.models.len()),
        };
        let stage = self.stage(count + 1, room + 1, Some(0))?;
        let counters = Counters {
            on: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            events: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            first_error: std::sync::Mutex::default(),
        };
        let (mut quiet, mut noisy) = std::thread::scope(|scope| {
            match noise {
                Noise::Swapping { clients, .. } | Noise::Serving { clients, .. } => {
                    for client in 0..*clients {
                        let (stage, counters) = (&stage, &counters);
                        scope.spawn(move || stage.make_noise(counters, client, count));
                    }
                }
                Noise::Other { round, .. } => {
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
        let loads = stage.node.memory().swaps.loads;
        stage.end()?;
        let (quiet, noisy) = (Latency::of(&mut quiet), Latency::of(&mut noisy));
        let change =
            |noisy: f64, quiet: f64| report::round((noisy / quiet.max(1e-9) - 1.0) * 100.0);
        Ok(Beside {
            noise: name,
            load_pct,
            quiet,
            noisy,
            p50_change_pct: change(noisy.p50_us, quiet.p50_us),
            p99_change_pct: change(noisy.p99_us, quiet.p99_us),
            events: counters.events.into_inner(),
            loads,
            errors: counters.errors.into_inner(),
            first_error: counters.first_error.into_inner().unwrap_or_default(),
        })
    }
}

impl Counters {
    /// Does `round` again and again in the noisy stretches.
    fn while_on(&self, mut round: impl FnMut(u64) -> Result<(), String>) {
        let mut number = 0;
        while !self.stop.load(Ordering::Acquire) {
            if !self.on.load(Ordering::Acquire) {
                std::thread::sleep(std::time::Duration::from_micros(200));
                continue;
            }
            if let Err(why) = round(number) {
                self.failed(why);
            }
            number += 1;
            self.events.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Stage<'_> {
    fn make_noise(&self, counters: &Counters, client: usize, count: usize) {
        counters.while_on(|round| {
            let model = 1 + (round as usize + client * (count / 2)) % count.max(1);
            let answer =
                self.ask(model, Class::BestEffort, false).map_err(|why| why.to_string())?;
            match answer.outputs == self.swap.expected[model] {
                true => Ok(()),
                false => Err(format!("an answer of model {model} is wrong")),
            }
        });
    }

    /// Latencies of the first model in quiet and in noisy stretches.
    fn real_time(
        &self,
        counters: &Counters,
        load_pct: f64,
        seconds: f64,
    ) -> (Vec<Nanos>, Vec<Nanos>) {
        let period = Nanos((self.swap.warm.p50_us * 1e3 / (load_pct / 100.0)) as u64);
        let start = self.clock.now();
        let end = start + Nanos((seconds * 1e9) as u64);
        let (mut quiet, mut noisy) = (Vec::new(), Vec::new());
        let mut next = start;
        while next < end {
            while self.clock.now() < next {
                std::hint::spin_loop();
            }
            let stretch = (next - start).0 / STRETCH.0;
            let loud = stretch % 2 == 1;
            counters.on.store(loud, Ordering::Release);
            match self.ask(0, Class::RealTime, true) {
                Ok(answer) => {
                    if answer.outputs != self.swap.expected[0] {
                        counters.failed("an answer of the real-time model is wrong".to_string());
                    }
                    // The first requests of a stretch still feel the one before.
                    let settled = (next - start).0 % STRETCH.0 > STRETCH.0 / 10;
                    if settled && stretch > 1 {
                        let kind = if loud { &mut noisy } else { &mut quiet };
                        kind.push(answer.latency);
                    }
                }
                Err(why) => counters.failed(why.to_string()),
            }
            // A period that has passed is dropped.
            next += period;
            let now = self.clock.now();
            if next < now {
                next = now;
            }
        }
        (quiet, noisy)
    }
}
