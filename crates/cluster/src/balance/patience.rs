//! How long a request waits at one backend before another one gets it, too. Pure.

use base::Nanos;

/// Shortest wait: less is noise of the network and of other processes.
const PATIENCE_MIN: Nanos = Nanos::from_millis(50);
/// The same of best effort, which also waits for real time.
const PATIENCE_BEST_EFFORT: Nanos = Nanos::from_millis(250);
/// Wait while nothing is known.
const PATIENCE_UNKNOWN: Nanos = Nanos::from_millis(1000);
/// Ratio to the typical latency, and to what the plan expects.
const TYPICAL_RATIO: u64 = 4;
const EXPECTED_RATIO: u64 = 2;

/// The typical latency of a model: its median, which a few slow replies do not move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TypicalLatency(Nanos);

impl TypicalLatency {
    /// The estimate as a number, 0 for none, so that it can be kept in an atomic.
    pub fn as_nanos(self) -> u64 {
        self.0.0
    }

    /// The estimate of [`TypicalLatency::as_nanos`].
    pub fn from_nanos(nanos: u64) -> TypicalLatency {
        TypicalLatency(Nanos(nanos))
    }

    /// The estimate after one more reply: a twentieth up or down.
    #[must_use]
    pub fn after(self, latency: Nanos) -> TypicalLatency {
        let (old, step) = (self.0.0, self.0.0 / 20 + 1);
        TypicalLatency(Nanos(match latency.0.max(1) {
            first if old == 0 => first,
            latency if latency > old => (old + step).min(latency),
            latency => old.saturating_sub(step).max(latency),
        }))
    }
}

/// How long a request may wait at a backend whose plan expects `expected`, under `objective`.
pub fn patience(
    typical: TypicalLatency,
    expected: Nanos,
    objective: Option<Nanos>,
    best_effort: bool,
) -> Nanos {
    if typical.0 == Nanos::ZERO && expected == Nanos::ZERO {
        return PATIENCE_UNKNOWN;
    }
    let usual = |ratio: u64| {
        Nanos(typical.0.0.saturating_mul(ratio).max(expected.0.saturating_mul(EXPECTED_RATIO)))
    };
    let patience = usual(TYPICAL_RATIO).max(PATIENCE_MIN);
    if best_effort {
        return patience.max(PATIENCE_BEST_EFFORT);
    }
    match objective {
        // The other backend needs time, too.
        Some(objective) => patience.min(usual(EXPECTED_RATIO).max(Nanos(objective.0 / 2))),
        None => patience,
    }
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;

    fn ms(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    #[test]
    fn typical_latency_follows_the_median_and_not_the_mean() {
        let mut random = Random::new(3);
        let mut typical = TypicalLatency::default();
        for _ in 0..2000 {
            let slow = random.below(4) == 0;
            typical = typical.after(if slow { ms(300) } else { Nanos(4_000_000) });
        }
        assert!(typical.0 >= ms(3) && typical.0 < ms(8), "{typical:?}");
        for _ in 0..200 {
            typical = typical.after(ms(100));
        }
        assert_eq!(typical.0, ms(100));
        assert_eq!(TypicalLatency::from_nanos(typical.as_nanos()), typical);
    }

    #[test]
    fn patience_is_a_multiple_of_what_is_usual_within_the_objective() {
        let typical = TypicalLatency(ms(20));
        let of = |expected, objective| patience(typical, ms(expected), objective, false);
        assert_eq!(of(0, None), ms(80));
        assert_eq!(of(90, None), ms(180));
        assert_eq!(of(0, Some(ms(100))), ms(50), "half of the objective");
        assert_eq!(of(0, Some(ms(30))), ms(40), "never less than twice the usual");
        assert_eq!(patience(TypicalLatency(Nanos(1000)), ms(0), None, false), PATIENCE_MIN);
        assert_eq!(patience(typical, ms(0), None, true), PATIENCE_BEST_EFFORT);
        assert_eq!(patience(TypicalLatency::default(), ms(0), None, false), PATIENCE_UNKNOWN);
    }
}
