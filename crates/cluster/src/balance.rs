//! Selects the backend of a request. Pure, so that the simulator routes exactly as production does.

pub mod backend_health;
pub mod batch_progress;
pub mod budget;
pub mod patience;

use std::cmp::Reverse;

use base::{Nanos, Random};

use self::batch_progress::{BatchPlan, BatchProgress};

/// A backend that a request could go to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BackendCandidate {
    /// Its share of the requests; 0 for a standby.
    pub weight: f64,
    /// Requests sent to it and not replied to.
    pub outstanding: usize,
    /// Requests it can have in flight and still reply in time; 0 when unknown.
    pub depth: usize,
    /// Whether it failed a moment ago.
    pub down: bool,
    /// Progress of its batches, where it belongs to a backend pool.
    pub progress: Option<(BatchProgress, BatchPlan)>,
}

/// Requests that a backend with batches of `batch` can have in flight: one batch running, and half
/// of the next one waiting. With more, a backend that drops early starts to drop.
pub fn depth(batch: usize) -> usize {
    batch + batch.div_ceil(2)
}

impl BackendCandidate {
    fn is_full(&self) -> bool {
        match self.progress {
            Some((progress, plan)) => progress.waiting() >= plan.batch.max(1),
            None => self.depth > 0 && self.outstanding >= self.depth,
        }
    }

    fn serves(&self) -> bool {
        !self.down && self.weight > 0.0
    }
}

/// Up to this many candidates all are compared; of longer lists two are drawn at random.
const ALL: usize = 4;

/// The candidate to send to: the least loaded by weight of those that serve and are up. Where that
/// one is full, a standby with capacity; without serving candidates, any standby; else one that was
/// down, because it may be back. `None` when there are no candidates.
///
/// Candidates of a backend pool count as one: of them the one whose next batch starts soonest gets
/// requests until that batch is full. A request then waits for the next batch of the whole pool
/// instead of the next batch of one backend.
///
/// A standby may serve several models: `busy` returns the requests sent to a candidate for all of
/// them.
pub fn choose(
    candidates: &[BackendCandidate],
    now: Nanos,
    busy: impl Fn(usize) -> usize,
    random: &mut Random,
) -> Option<usize> {
    let single = least_loaded(candidates, |c| c.serves() && c.progress.is_none(), random);
    let chosen = match (single, BackendPool::of(candidates, now)) {
        (single, None) => single,
        (None, Some(pool)) => Some(pool.next),
        (Some(single), Some(pool)) => {
            let pooled = load(pool.outstanding, pool.weight);
            let alone = load(candidates[single].outstanding, candidates[single].weight);
            Some(if alone < pooled { single } else { pool.next })
        }
    };
    if let Some(chosen) = chosen.filter(|chosen| candidates[*chosen].is_full()) {
        let is_standby = |c: &BackendCandidate| !c.down && c.weight <= 0.0;
        let standbys = candidates.iter().enumerate().filter(|(_, candidate)| is_standby(candidate));
        let standbys = standbys.map(|(index, candidate)| (busy(index), candidate.depth, index));
        let standby = standbys.filter(|(busy, depth, _)| *depth == 0 || busy < depth).min();
        return Some(standby.map_or(chosen, |(_, _, index)| index));
    }
    chosen
        .or_else(|| least_loaded(candidates, |candidate| !candidate.down, random))
        .or_else(|| least_loaded(candidates, |_| true, random))
}

/// An idle candidate, for a request that another backend dropped while there was still time: alone
/// it may still finish in time. The caller excludes the backend that dropped it.
pub fn spare(candidates: &[BackendCandidate], busy: impl Fn(usize) -> usize) -> Option<usize> {
    (0..candidates.len()).find(|&index| !candidates[index].down && busy(index) == 0)
}

/// Seconds until one more request completes, after all that are in flight.
fn load(outstanding: usize, weight: f64) -> f64 {
    (outstanding + 1) as f64 / weight.max(1e-9)
}

/// The serving candidates of a backend pool.
struct BackendPool {
    weight: f64,
    outstanding: usize,
    /// The candidate for the next request: the first whose next batch is not full, else the first
    /// of all.
    next: usize,
}

impl BackendPool {
    fn of(candidates: &[BackendCandidate], now: Nanos) -> Option<BackendPool> {
        let mut pool = BackendPool { weight: 0.0, outstanding: 0, next: 0 };
        let mut best: Option<(bool, Nanos, Reverse<usize>)> = None;
        for (index, candidate) in candidates.iter().enumerate() {
            let Some((progress, plan)) = candidate.progress.filter(|_| candidate.serves()) else {
                continue;
            };
            pool.weight += candidate.weight;
            pool.outstanding += candidate.outstanding;
            let key =
                (candidate.is_full(), progress.next_start(now, plan), Reverse(progress.waiting()));
            if best.is_none_or(|best| key < best) {
                (best, pool.next) = (Some(key), index);
            }
        }
        best.map(|_| pool)
    }
}

fn least_loaded(
    candidates: &[BackendCandidate],
    fits: impl Fn(&BackendCandidate) -> bool,
    random: &mut Random,
) -> Option<usize> {
    let load = |index: usize| load(candidates[index].outstanding, candidates[index].weight);
    if candidates.len() > ALL {
        let first = draw(candidates, &fits, random)?;
        let second = draw(candidates, &fits, random)?;
        return Some(if load(second) < load(first) { second } else { first });
    }
    // Starts at a random index so that equal candidates alternate.
    let start = random.below(candidates.len() as u64) as usize;
    let order = (0..candidates.len()).map(|step| (start + step) % candidates.len());
    order.filter(|&index| fits(&candidates[index])).min_by(|&a, &b| load(a).total_cmp(&load(b)))
}

/// Draws one by weight.
fn draw(
    candidates: &[BackendCandidate],
    fits: &impl Fn(&BackendCandidate) -> bool,
    random: &mut Random,
) -> Option<usize> {
    let weight = |candidate: &BackendCandidate| {
        if fits(candidate) { candidate.weight.max(1e-9) } else { 0.0 }
    };
    let total: f64 = candidates.iter().map(weight).sum();
    let mut left = random.unit_f64() * total;
    let mut last = None;
    for (index, candidate) in candidates.iter().enumerate().filter(|(_, c)| fits(c)) {
        last = Some(index);
        left -= weight(candidate);
        if left < 0.0 {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_attempt_goes_to_an_idle_backend() {
        let up =
            BackendCandidate { weight: 0.0, outstanding: 0, depth: 4, down: false, progress: None };
        let list = [up, BackendCandidate { down: true, ..up }, up];
        assert_eq!(spare(&list, |index| [1, 0, 0][index]), Some(2));
        assert_eq!(spare(&list, |index| [1, 0, 1][index]), None);
        assert_eq!(spare(&[], |_| 0), None);
    }

    fn candidate(weight: f64, outstanding: usize, down: bool) -> BackendCandidate {
        BackendCandidate { weight, outstanding, depth: 60, down, progress: None }
    }

    #[test]
    fn prefers_serving_then_standby_then_down() {
        let mut random = Random::new(1);
        let mut pick = |list: &[BackendCandidate]| {
            choose(list, Nanos(0), |index| list[index].outstanding, &mut random)
        };
        assert_eq!(pick(&[]), None);
        assert_eq!(pick(&[candidate(0.0, 0, false), candidate(1.0, 50, false)]), Some(1));
        assert_eq!(pick(&[candidate(0.0, 0, false), candidate(1.0, 0, true)]), Some(0));
        assert_eq!(pick(&[candidate(1.0, 0, true)]), Some(0));
        assert_eq!(pick(&[candidate(1.0, 3, false), candidate(1.0, 1, false)]), Some(1));
        assert_eq!(pick(&[candidate(0.0, 5, false), candidate(1.0, 60, false)]), Some(0));
        assert_eq!(pick(&[candidate(0.0, 60, false), candidate(1.0, 60, false)]), Some(1));
    }

    /// Four machines in a pool, full batches of 40 ns: each batch is filled before the next one
    /// gets requests, and running machines are selected in the order in which they complete.
    #[test]
    fn fills_the_batches_of_a_pool_one_after_another() {
        let plan = BatchPlan { batch: 8, min_batch: 4, full_time: Nanos(40) };
        let idle = BackendCandidate {
            progress: Some((BatchProgress::default(), plan)),
            ..candidate(1.0, 0, false)
        };
        let mut list = [idle; 4];
        let mut random = Random::new(3);
        let mut order = Vec::new();
        for at in 0..20 {
            let now = Nanos(at);
            let chosen = choose(&list, now, |_| 0, &mut random).unwrap();
            list[chosen].outstanding += 1;
            list[chosen].progress.as_mut().unwrap().0.sent(now, plan);
            order.push(chosen);
        }
        assert_eq!(order, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 0, 0, 0, 0]);
        list[0].down = true;
        assert_eq!(choose(&list, Nanos(20), |_| 0, &mut random), Some(1));
        list.iter_mut().for_each(|candidate| candidate.weight = 0.0);
        assert_ne!(choose(&list, Nanos(20), |_| 0, &mut random), Some(0));
    }

    #[test]
    fn pool_and_single_backend_share_by_weight() {
        let plan = BatchPlan { batch: 8, min_batch: 1, full_time: Nanos(40) };
        let pooled = BackendCandidate {
            progress: Some((BatchProgress::default(), plan)),
            ..candidate(1.0, 0, false)
        };
        let mut list = [pooled, pooled, pooled, candidate(1.0, 0, false)];
        let mut random = Random::new(3);
        for at in 0..400 {
            let chosen = choose(&list, Nanos(at), |_| 0, &mut random).unwrap();
            list[chosen].outstanding += 1;
        }
        assert_eq!(list[3].outstanding, 100);
    }

    #[test]
    fn routes_requests_by_weight() {
        for count in [2, 40] {
            let mut random = Random::new(2);
            let mut list: Vec<BackendCandidate> =
                (0..count).map(|i| candidate(1.0 + (i % 2) as f64 * 2.0, 0, false)).collect();
            list.iter_mut().for_each(|candidate| candidate.depth = 0);
            for _ in 0..40_000 {
                let chosen = choose(&list, Nanos(0), |_| 0, &mut random).unwrap();
                list[chosen].outstanding += 1;
            }
            let odd: usize = list.iter().skip(1).step_by(2).map(|c| c.outstanding).sum();
            assert!((odd as f64 / 40_000.0 - 0.75).abs() < 0.02, "{odd}");
        }
    }
}
