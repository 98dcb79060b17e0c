//! When a client sends its next request.

use base::{Nanos, Random};
use serde::{Deserialize, Serialize};

use crate::scenario_check::ValueChecks;

/// An arrival process. Rates are requests per second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Arrival {
    /// Sends the next request with the reply to the last.
    ClosedLoop {
        /// Microseconds between a reply and the next request.
        #[serde(default)]
        think_us: u64,
    },
    /// Evenly spaced.
    Uniform {
        /// Rate.
        rate: f64,
        /// Microseconds before the first.
        #[serde(default)]
        phase_us: u64,
    },
    /// Independent of each other.
    Poisson {
        /// Mean rate.
        rate: f64,
    },
    /// At given times.
    Trace {
        /// Milliseconds from the start.
        times_ms: Vec<f64>,
    },
    /// Poisson with a rate that follows a daily curve.
    Diurnal {
        /// Mean rate.
        rate: f64,
        /// Amplitude as a share of the mean, 0 to 1.
        swing: f64,
        /// Seconds of a day.
        day_s: f64,
    },
    /// Poisson bursts with pauses between them.
    OnOff {
        /// Rate inside a burst.
        rate: f64,
        /// Milliseconds of a burst.
        on_ms: f64,
        /// Milliseconds of a pause.
        off_ms: f64,
    },
}

/// Rates of a client, in requests per second.
const RATES: (f64, f64) = (1e-3, 1e7);
/// Most arrivals of a client in one run.
const ARRIVALS_MAX: f64 = 1e9;
/// Longest time in a process, in microseconds.
const MICROS_MAX: u64 = 1_000_000_000_000;

impl Arrival {
    /// Checks its values; `field` is its place in a scenario of that many seconds.
    pub fn check(&self, field: &str, seconds: f64, checks: &mut ValueChecks) {
        let at = |name: &str| format!("{field}.{name}");
        if let Some(rate) = self.rate() {
            checks.number(at("rate"), rate, RATES);
            let all = rate * seconds;
            checks.holds(
                all <= ARRIVALS_MAX,
                at("rate"),
                format_args!("= {rate} in {seconds} s are more than {ARRIVALS_MAX:e} requests"),
            );
        }
        match self {
            Arrival::ClosedLoop { think_us } => {
                checks.count(at("think_us"), *think_us, (0, MICROS_MAX));
            }
            Arrival::Uniform { phase_us, .. } => {
                checks.count(at("phase_us"), *phase_us, (0, MICROS_MAX));
            }
            Arrival::Poisson { .. } => {}
            Arrival::Trace { times_ms } => {
                let mut last = 0.0;
                for (index, time_ms) in times_ms.iter().enumerate() {
                    checks.number(at(&format!("times_ms[{index}]")), *time_ms, (last, 1e9));
                    last = *time_ms;
                }
            }
            Arrival::Diurnal { swing, day_s, .. } => {
                checks.number(at("swing"), *swing, (0.0, 1.0));
                checks.number(at("day_s"), *day_s, (1e-6, 1e9));
            }
            Arrival::OnOff { on_ms, off_ms, .. } => {
                checks.number(at("on_ms"), *on_ms, (1e-6, 1e9));
                checks.number(at("off_ms"), *off_ms, (0.0, 1e9));
            }
        }
    }

    fn rate(&self) -> Option<f64> {
        match self {
            Arrival::Uniform { rate, .. }
            | Arrival::Poisson { rate }
            | Arrival::Diurnal { rate, .. }
            | Arrival::OnOff { rate, .. } => Some(*rate),
            Arrival::ClosedLoop { .. } | Arrival::Trace { .. } => None,
        }
    }
}

/// Draws the arrival times of one client.
#[derive(Clone, Debug)]
pub struct ArrivalTimes {
    arrival: Arrival,
    random: Random,
    sent: u64,
    /// Time of the last open-loop arrival, in nanoseconds.
    last: f64,
}

impl ArrivalTimes {
    /// The times depend only on the process and the seed.
    pub fn new(arrival: Arrival, seed: u64) -> ArrivalTimes {
        ArrivalTimes { arrival, random: Random::new(seed), sent: 0, last: 0.0 }
    }

    /// Whether the next request waits for the reply to the last.
    pub fn is_closed(&self) -> bool {
        matches!(self.arrival, Arrival::ClosedLoop { .. })
    }

    /// The next arrival; `now` is the time of the last reply, for a closed loop.
    pub fn next(&mut self, now: Nanos) -> Option<Nanos> {
        self.sent += 1;
        match &self.arrival {
            Arrival::ClosedLoop { think_us } => {
                let think = if self.sent == 1 { 0 } else { *think_us };
                Some(now + Nanos::from_micros(think))
            }
            Arrival::Uniform { rate, phase_us } => {
                let index = (self.sent - 1) as f64;
                Some(Nanos::from_micros(*phase_us) + Nanos((index * 1e9 / rate) as u64))
            }
            Arrival::Poisson { rate } => {
                self.last += self.random.exponential(1e9 / rate);
                Some(Nanos(self.last as u64))
            }
            Arrival::Trace { times_ms } => {
                times_ms.get(self.sent as usize - 1).map(|ms| Nanos((ms * 1e6) as u64))
            }
            Arrival::Diurnal { rate, swing, day_s } => {
                // Thinning: draws at the highest rate, and keeps an arrival with the rate at its
                // time of day.
                let (rate, swing, day) = (*rate, swing.clamp(0.0, 1.0), day_s * 1e9);
                loop {
                    self.last += self.random.exponential(1e9 / (rate * (1.0 + swing)));
                    let angle = self.last / day * std::f64::consts::TAU;
                    let keep = (1.0 + swing * angle.sin()) / (1.0 + swing);
                    if self.random.unit_f64() < keep {
                        return Some(Nanos(self.last as u64));
                    }
                }
            }
            Arrival::OnOff { rate, on_ms, off_ms } => {
                // Drawn on a clock that stops during pauses.
                let (on, off) = (on_ms * 1e6, off_ms * 1e6);
                self.last += self.random.exponential(1e9 / rate);
                let silences = (self.last / on).floor();
                Some(Nanos((self.last + silences * off) as u64))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(arrival: Arrival, seconds: u64) -> usize {
        let mut arrivals = ArrivalTimes::new(arrival, 3);
        let end = Nanos::from_millis(seconds * 1_000);
        std::iter::from_fn(|| arrivals.next(Nanos::ZERO)).take_while(|at| *at < end).count()
    }

    #[test]
    fn arrival_rates_match() {
        assert_eq!(count(Arrival::Uniform { rate: 100.0, phase_us: 0 }, 2), 200);
        assert_eq!(count(Arrival::Trace { times_ms: vec![0.0, 5.0, 2_500.0] }, 2), 2);
        let poisson = count(Arrival::Poisson { rate: 100.0 }, 100);
        assert!((9_600..10_400).contains(&poisson), "{poisson}");
        let day = count(Arrival::Diurnal { rate: 100.0, swing: 0.8, day_s: 10.0 }, 100);
        assert!((9_500..10_500).contains(&day), "{day}");
        let bursts = count(Arrival::OnOff { rate: 100.0, on_ms: 100.0, off_ms: 300.0 }, 100);
        assert!((2_300..2_700).contains(&bursts), "{bursts}");
    }
}
