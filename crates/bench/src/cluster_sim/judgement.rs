//! What a run is judged by: how many GPUs its plans use beyond what any could do with, and how soon
//! answers are good again after the load has risen. Both know nothing of the scheduler.

use super::PeriodCounts;
use super::scenario::{ClusterScenario, SessionGroup};

/// Tenths of a second over which the share of bad answers is taken.
const WINDOW: usize = 10;
/// Tenths of a second for which it has to stay low: more than a step's plan takes to be loaded.
const SETTLED: usize = 50;

impl SessionGroup {
    /// Good answers that a GPU can give in a second at most: batches of the best size that fits
    /// into the whole SLO, one after the other. A request that waits, a batch that is not full and
    /// a GPU that does anything else can only cost.
    fn best_throughput(&self) -> Option<f64> {
        let ms = |batch: u32| self.alpha_ms * f64::from(batch) + self.beta_ms;
        let fits = (1..=self.batch_max).filter(|batch| ms(*batch) <= self.slo_ms as f64);
        fits.map(|batch| f64::from(batch) / ms(batch) * 1e3).reduce(f64::max)
    }
}

/// GPUs that good answers to these rates need at least, given by session as its group and its rate:
/// no packing, no batching and no order of requests does with fewer.
pub fn gpus_needed(groups: &[SessionGroup], rates: impl Iterator<Item = (usize, f64)>) -> f64 {
    let best: Vec<Option<f64>> = groups.iter().map(SessionGroup::best_throughput).collect();
    // Where no batch fits, nothing that a GPU does makes an answer good.
    rates.filter_map(|(group, rate)| Some(rate / best[group]?)).sum()
}

/// The seconds in which a scenario's load rises by a step, each with the second until which the
/// step can be judged.
pub fn rises(scenario: &ClusterScenario, offered: impl Fn(u64) -> f64) -> Vec<(u64, u64)> {
    let mut times: Vec<u64> = scenario.steps.iter().map(|step| step.at_s).collect();
    times.dedup();
    let end = |index: usize| times.get(index + 1).copied().unwrap_or(u64::MAX);
    let all = times.iter().enumerate();
    let inside = all.filter(|(_, at)| **at > 0 && **at < scenario.seconds);
    let rising = inside.filter(|(_, at)| offered(**at) > offered(**at - 1) * (1.0 + 1e-9));
    rising.map(|(index, at)| (*at, end(index).min(scenario.seconds))).collect()
}

/// Seconds from `from` until at most `target` percent of the requests sent within a second are
/// answered badly, and stay so for five seconds or until `to`. `None` if that is never so.
pub fn reaction(tenths: &[PeriodCounts], from: u64, to: u64, target: f64) -> Option<f64> {
    let (from, to) = ((from * 10) as usize, ((to * 10) as usize).min(tenths.len()));
    if from >= to {
        return None;
    }
    let is_good = |start: usize| {
        let counts: PeriodCounts = tenths[start..(start + WINDOW).min(to)].iter().copied().sum();
        counts.bad as f64 * 100.0 <= target * counts.sent_queries as f64
    };
    let mut good_since = None;
    // Whole windows, if there is time for one.
    for start in from..(to + 1).saturating_sub(WINDOW).max(from + 1) {
        match is_good(start) {
            false => good_since = None,
            true => {
                let since = *good_since.get_or_insert(start);
                if start + 1 - since >= SETTLED {
                    break;
                }
            }
        }
    }
    good_since.map(|since| (since - from) as f64 / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hundred requests in each tenth of a second, with so many bad ones in each.
    fn tenths(bad: impl Fn(usize) -> u64) -> Vec<PeriodCounts> {
        (0..300).map(|index| PeriodCounts { sent_queries: 100, bad: bad(index) }).collect()
    }

    #[test]
    fn a_reaction_ends_when_answers_are_good_and_stay_so() {
        assert_eq!(reaction(&tenths(|_| 0), 10, 30, 1.0), Some(0.0));
        // Bad before the step does not count.
        assert_eq!(reaction(&tenths(|at| u64::from(at < 100) * 50), 10, 30, 1.0), Some(0.0));
        // All bad for 1.7 s.
        let burst = tenths(|at| u64::from((100..117).contains(&at)) * 100);
        assert_eq!(reaction(&burst, 10, 30, 1.0), Some(1.7));
        // Good for two seconds, then bad again: the plan that takes over is a part of it.
        let again = tenths(|at| u64::from([105, 131].contains(&at)) * 80);
        assert_eq!(reaction(&again, 10, 30, 1.0), Some(3.2));
        // So late that it is another matter.
        let later = tenths(|at| u64::from([105, 175].contains(&at)) * 80);
        assert_eq!(reaction(&later, 10, 30, 1.0), Some(0.6));
        assert_eq!(reaction(&tenths(|_| 2), 10, 30, 1.0), None);
        assert_eq!(reaction(&tenths(|_| 1), 10, 30, 1.0), Some(0.0), "at the target");
    }

    #[test]
    fn few_requests_are_judged_by_the_second() {
        // One request in each tenth: one bad one in a second is a tenth of them.
        let few: Vec<PeriodCounts> =
            (0..100).map(|at| PeriodCounts { sent_queries: 1, bad: u64::from(at == 20) }).collect();
        assert_eq!(reaction(&few, 1, 10, 10.0), Some(0.0));
        assert_eq!(reaction(&few, 1, 10, 5.0), Some(1.1));
        assert_eq!(reaction(&few, 9, 30, 5.0), Some(0.0), "one window");
        assert_eq!(reaction(&few, 10, 30, 5.0), None, "no time");
        assert_eq!(reaction(&[], 1, 10, 5.0), None);
    }

    fn group(alpha_ms: f64, beta_ms: f64, batch_max: u32, slo_ms: u64) -> SessionGroup {
        let (name, count, rate, zipf) = (String::new(), 1, 1.0, 0.0);
        SessionGroup { name, count, alpha_ms, beta_ms, batch_max, slo_ms, rate, zipf }
    }

    #[test]
    fn the_bound_is_that_of_the_best_batch_within_the_slo() {
        // 2 ms a request and 10 ms a batch: 20 of them take 50 ms, which is the SLO.
        let groups = [group(2.0, 10.0, 64, 50), group(2.0, 10.0, 8, 50), group(9.0, 9.0, 8, 10)];
        let needed = |index, rate| gpus_needed(&groups, [(index, rate)].into_iter());
        assert!((needed(0, 800.0) - 2.0).abs() < 1e-9);
        assert!((needed(1, 800.0) - 800.0 * 26.0 / 8000.0).abs() < 1e-9);
        assert_eq!(needed(2, 800.0), 0.0, "no answer can be good");
        let both = gpus_needed(&groups, [(0, 400.0), (1, 400.0)].into_iter());
        assert!((both - 1.0 - 1.3).abs() < 1e-9);
    }

    #[test]
    fn every_rise_is_judged_until_the_next_step() {
        let text = "kind = 'cluster'\nseconds = 90\n[[sessions]]\nname = 'a'\ncount = 1\n\
                    alpha_ms = 1.0\nbeta_ms = 1.0\nbatch_max = 4\nslo_ms = 50\nrate = 9.0\n";
        let steps = [(0, 2.0), (10, 0.5), (20, 1.0), (40, 3.0), (60, 3.0), (90, 9.0)];
        let steps =
            steps.map(|(at, factor)| format!("[[steps]]\nat_s = {at}\nfactor = {factor}\n"));
        let scenario: ClusterScenario =
            toml::from_str(&(text.to_string() + &steps.concat())).expect("a scenario");
        let offered = |second: u64| {
            let step = scenario.steps.iter().rfind(|step| step.at_s <= second);
            step.map_or(1.0, |step| step.factor)
        };
        assert_eq!(rises(&scenario, offered), [(20, 40), (40, 60)]);
    }
}
