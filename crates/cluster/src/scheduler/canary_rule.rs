//! When a canary is good, and when it is bad. Pure.
//!
//! Requests are drawn for the canary or for the version in force at random, in the same minutes and
//! by the same frontends, so any difference that chance does not explain is the canary's. The rule
//! is applied after every report. It may therefore not take what is only likely by chance for
//! evidence because it looked often enough: a bound that holds for all looks together is used to
//! roll back.

use crate::record::canary::{CanaryRecord, VersionCounts};

/// What follows from the counts.
#[derive(Clone, Debug, PartialEq)]
pub enum Judgement {
    /// Not enough is known; the text says what is missing.
    Wait(String),
    /// It is as good as the version in force.
    Good(String),
    /// It is worse.
    Bad(String),
}

/// Failures that are needed to roll back: fewer may have one cause outside of the canary.
const FAILURES_MIN: u64 = 5;
/// Replies of both versions from which latencies are compared.
const REPLIES_MIN: u64 = 100;
/// Evidence that ends a canary, as logarithm: one in ten thousand good ones, however often the rule
/// is applied.
const BAD_EVIDENCE: f64 = 9.21;
/// Evidence that its failures are few enough, as logarithm: one in twenty that are not.
const GOOD_EVIDENCE: f64 = 3.0;
/// Quantiles that are compared, and the share of the canary's replies that may be slower than the
/// allowed multiple of that quantile. At the higher one, twice as many as of the version in force:
/// few requests that waited together do not end a canary.
const QUANTILES: [(f64, f64); 2] = [(0.5, 0.5), (0.95, 0.1)];

/// Relative entropy of a coin that shows `seen` to one of `expected`, in nats.
fn divergence(seen: f64, expected: f64) -> f64 {
    let expected = expected.clamp(1e-9, 1.0 - 1e-9);
    let part = |a: f64, b: f64| if a > 0.0 { a * (a / b).ln() } else { 0.0 };
    part(seen, expected) + part(1.0 - seen, 1.0 - expected)
}

/// Evidence that more than `allowed` of all requests are as `count` of `of` were: the logarithm of
/// a bet that, for a share of `allowed`, ever reaches `x` with a probability of less than `1/x`
/// (the mixture of all likelihood ratios; Robbins 1970).
fn evidence_above(count: f64, of: f64, allowed: f64) -> f64 {
    if of <= 0.0 || count / of <= allowed {
        return 0.0;
    }
    (of * divergence(count / of, allowed) - (of + 1.0).ln()).max(0.0)
}

/// Evidence that fewer are, from this one look.
fn evidence_below(count: f64, of: f64, allowed: f64) -> f64 {
    if of <= 0.0 || count / of >= allowed { 0.0 } else { of * divergence(count / of, allowed) }
}

/// Twice the standard deviation of a share.
fn deviation(share: f64, of: u64) -> f64 {
    2.0 * (share * (1.0 - share) / of.max(1) as f64).sqrt()
}

/// Judges a canary that was served for `elapsed_ms`.
pub fn judge(
    rules: &CanaryRecord,
    elapsed_ms: u64,
    stable: &VersionCounts,
    canary: &VersionCounts,
) -> Judgement {
    let base = stable.failure_share();
    let allowed = (base + deviation(base, stable.requests) + rules.max_errors).min(1.0);
    let (failures, requests) = (canary.failures as f64, canary.requests as f64);
    let figures = figures(stable, canary);
    if canary.failures >= FAILURES_MIN
        && evidence_above(failures, requests, allowed) >= BAD_EVIDENCE
    {
        let limit = 100.0 * rules.max_errors;
        return Judgement::Bad(format!("more than {limit:.1} % more failures: {figures}"));
    }
    let compared = stable.replies() >= REPLIES_MIN && canary.replies() >= REPLIES_MIN;
    if compared && let Some(quantile) = slower(rules, stable, canary) {
        let limit = 100.0 * rules.max_slowdown;
        let which = if quantile == 0.5 { "median" } else { "95th percentile" };
        return Judgement::Bad(format!("more than {limit:.0} % slower by {which}: {figures}"));
    }
    if let Some(why) = missing(rules, elapsed_ms, stable, canary, allowed) {
        return Judgement::Wait(format!("{why}; {figures}"));
    }
    Judgement::Good(figures)
}

/// The quantile by which the canary is too slow, if it is.
fn slower(rules: &CanaryRecord, stable: &VersionCounts, canary: &VersionCounts) -> Option<f64> {
    let (replies, of) = (canary.replies(), stable.replies());
    let is_slower = |(quantile, allowed): &(f64, f64)| {
        let limit_ms = stable.quantile_ms(*quantile) * (1.0 + rules.max_slowdown);
        let above = canary.replies_above(limit_ms);
        // What is known of the quantile itself is a sample, too.
        let allowed = allowed + deviation(*quantile, of);
        evidence_above(above, replies as f64, allowed) >= BAD_EVIDENCE
    };
    QUANTILES.iter().find(|row| is_slower(row)).map(|(quantile, _)| *quantile)
}

/// What is missing for a promotion.
fn missing(
    rules: &CanaryRecord,
    elapsed_ms: u64,
    stable: &VersionCounts,
    canary: &VersionCounts,
    allowed: f64,
) -> Option<String> {
    let Some(after_ms) = rules.promote_after_ms else {
        return Some("an operator promotes it".to_string());
    };
    if elapsed_ms < after_ms {
        let seconds = (after_ms - elapsed_ms).div_ceil(1000);
        return Some(format!("{seconds} s are missing"));
    }
    let replies = stable.replies().min(canary.replies());
    if replies < REPLIES_MIN {
        return Some(format!("{} more replies of each version are needed", REPLIES_MIN - replies));
    }
    let (failures, requests) = (canary.failures as f64, canary.requests as f64);
    if evidence_below(failures, requests, allowed) < GOOD_EVIDENCE {
        return Some("more requests are needed to tell its failures from chance".to_string());
    }
    for (quantile, _) in QUANTILES {
        let limit_ms = stable.quantile_ms(quantile) * (1.0 + rules.max_slowdown);
        if canary.quantile_ms(quantile) > limit_ms {
            return Some("it is slower than allowed, as far as can be told".to_string());
        }
    }
    None
}

/// What is known of both versions, in words.
fn figures(stable: &VersionCounts, canary: &VersionCounts) -> String {
    let of = |counts: &VersionCounts| {
        let (median, p95) = (counts.quantile_ms(0.5), counts.quantile_ms(0.95));
        let (failures, requests) = (counts.failures, counts.requests);
        format!("{failures} of {requests} failed, median {median:.2} ms, 95 % {p95:.2} ms")
    };
    format!("canary {}; in force {}", of(canary), of(stable))
}

#[cfg(test)]
mod tests {
    use base::{Nanos, Random};

    use super::*;

    fn rules() -> CanaryRecord {
        CanaryRecord {
            version: 2,
            number: 1,
            share: 0.2,
            promote_after_ms: Some(60_000),
            max_errors: 0.01,
            max_slowdown: 0.2,
            promoted: false,
        }
    }

    /// A version that fails with `failing`, and else replies after about `ms`.
    #[derive(Clone, Copy)]
    struct Version {
        failing: f64,
        ms: f64,
    }

    impl Version {
        fn serve(self, counts: &mut VersionCounts, random: &mut Random) {
            if random.unit_f64() < self.failing {
                return counts.fail();
            }
            let ms = self.ms * (0.7 * (random.unit_f64() + random.unit_f64())).exp();
            counts.reply(Nanos((ms * 1e6) as u64), false);
        }
    }

    /// Serves until the rule decides, or `most` requests; it is applied after every tenth. Returns
    /// the judgement and the canary's requests.
    fn run(stable: Version, canary: Version, most: u64, seed: u64) -> (Judgement, u64) {
        let mut random = Random::new(seed);
        let (mut old, mut new) = (VersionCounts::default(), VersionCounts::default());
        let mut last = Judgement::Wait(String::new());
        for request in 0..most {
            match random.unit_f64() < rules().share {
                true => canary.serve(&mut new, &mut random),
                false => stable.serve(&mut old, &mut random),
            }
            if request % 10 == 9 {
                last = judge(&rules(), 60_000, &old, &new);
                if !matches!(last, Judgement::Wait(_)) {
                    break;
                }
            }
        }
        (last, new.requests)
    }

    const GOOD: Version = Version { failing: 0.001, ms: 5.0 };

    #[test]
    fn good_canaries_are_promoted_and_hardly_ever_rolled_back() {
        let faster = Version { ms: 2.0, ..GOOD };
        let failing_less = Version { failing: 0.0, ..GOOD };
        for (stable, canary) in [(GOOD, GOOD), (GOOD, faster), (GOOD, failing_less)] {
            for seed in 0..100 {
                let (judgement, requests) = run(stable, canary, 30_000, seed);
                assert!(matches!(judgement, Judgement::Good(_)), "{seed}: {judgement:?}");
                assert!(requests >= REPLIES_MIN, "{requests}");
            }
        }
        // Where the version in force fails as well, that is not the canary's fault.
        let ill = Version { failing: 0.2, ms: 5.0 };
        let bad = (0..100).filter(|s| matches!(run(ill, ill, 5000, *s).0, Judgement::Bad(_)));
        assert_eq!(bad.count(), 0);
    }

    #[test]
    fn bad_canaries_are_rolled_back_and_clear_failures_fast() {
        let (broken, failing) =
            (Version { failing: 1.0, ms: 5.0 }, Version { failing: 0.05, ..GOOD });
        let (slow, crawling) = (Version { ms: 7.5, ..GOOD }, Version { ms: 50.0, ..GOOD });
        for (canary, at_most) in [(broken, 10), (failing, 1500), (slow, 3000), (crawling, 130)] {
            for seed in 0..50 {
                let (judgement, requests) = run(GOOD, canary, 100_000, seed);
                assert!(matches!(judgement, Judgement::Bad(_)), "{seed}: {judgement:?}");
                assert!(requests <= at_most, "{requests} requests of {at_most}");
            }
        }
    }

    #[test]
    fn a_rule_that_is_applied_again_and_again_does_not_wear_a_good_canary_down() {
        // At the limit of what is allowed, for as long as it takes: no promotion is in reach before
        // its time, so only a wrong rollback could end it.
        let mut rolled_back = 0;
        for seed in 0..100 {
            let mut random = Random::new(seed);
            let (mut old, mut new) = (VersionCounts::default(), VersionCounts::default());
            (0..3000).for_each(|_| GOOD.serve(&mut old, &mut random));
            let limit = Version { failing: 0.01, ms: 5.0 * 1.15 };
            for _ in 0..3000 {
                limit.serve(&mut new, &mut random);
                if matches!(judge(&rules(), 0, &old, &new), Judgement::Bad(_)) {
                    rolled_back += 1;
                    break;
                }
            }
        }
        assert_eq!(rolled_back, 0);
    }

    #[test]
    fn few_requests_decide_nothing() {
        let mut random = Random::new(1);
        let (mut old, mut new) = (VersionCounts::default(), VersionCounts::default());
        assert!(matches!(judge(&rules(), u64::MAX, &old, &new), Judgement::Wait(_)));
        (0..1000).for_each(|_| GOOD.serve(&mut old, &mut random));
        for _ in 0..3 {
            new.reply(Nanos::from_millis(5), false);
        }
        assert!(matches!(judge(&rules(), u64::MAX, &old, &new), Judgement::Wait(_)));
        let mut failing = new.clone();
        (0..FAILURES_MIN - 1).for_each(|_| failing.fail());
        assert!(matches!(judge(&rules(), 0, &old, &failing), Judgement::Wait(_)));
        failing.fail();
        assert!(matches!(judge(&rules(), 0, &old, &failing), Judgement::Bad(_)));
        // Without a time, an operator decides, however good it is.
        (0..5000).for_each(|_| GOOD.serve(&mut new, &mut random));
        let by_hand = CanaryRecord { promote_after_ms: None, ..rules() };
        assert!(matches!(judge(&by_hand, u64::MAX, &old, &new), Judgement::Wait(_)));
        assert!(matches!(judge(&rules(), u64::MAX, &old, &new), Judgement::Good(_)));
        assert!(matches!(judge(&rules(), 59_999, &old, &new), Judgement::Wait(_)));
    }
}
