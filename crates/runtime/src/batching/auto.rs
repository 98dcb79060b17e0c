//! Atoll's own batching policy: no request waits while a worker is idle, and batches are as large
//! as measured times justify.

use base::Nanos;

use super::{BatchPolicy, BatchProfile, Decision, ModelView};

/// A batch twice as large pays off if it takes at most this share of the time of two.
const PAYS_OFF: f64 = 0.9;

/// One of so many decisions tries the next larger size, since times change.
const TRY_EVERY: u32 = 64;

/// Batches that run at once while the device is saturated: one computes, the next one is ready.
pub(crate) const SATURATED_WORKERS: usize = 2;

/// The device is saturated when it had no batch for less than this share of the last time.
const SATURATED_IDLE_SHARE: f64 = 0.05;

/// That time, in batches of one.
const IDLE_BATCHES: u64 = 32;

/// Rows of equal batches that run at once, at most, where more than two do.
const ROWS_BESIDE: usize = 8;

/// Gives each idle worker the largest batch that can be filled, pays off and fits the SLO. Requests
/// that find all workers busy make the next batch larger, so batches grow with the load.
///
/// Where there are more than two workers, all of them are used while the device is idle
/// now and then: a request starts at once, beside others. Once it is not, small batches beside each
/// other would keep it saturated at a lower rate than large ones, so only two are used.
#[derive(Clone, Debug)]
pub struct Auto {
    /// Batch sizes, ascending.
    pub sizes: Vec<usize>,
    /// The SLO. A batch takes at most half of it: a request that just missed a batch waits for it
    /// and runs in the next.
    pub objective: Option<Nanos>,
    /// Batches that run at once under saturation, each then slower by this factor.
    pub concurrent: usize,
    idle: IdleShare,
    decided: u32,
}

/// Share of the last time in which no batch ran, with exponential forgetting.
#[derive(Clone, Debug)]
struct IdleShare {
    share: f64,
    counted_until: Nanos,
    busy: bool,
}

impl IdleShare {
    /// Counts the time until `now`, and whether a batch runs from then on.
    fn count(&mut self, now: Nanos, span: Nanos, busy: bool) {
        let passed = now.since(self.counted_until).0 as f64;
        let kept = (-passed / span.0.max(1) as f64).exp();
        let idle = if self.busy { 0.0 } else { 1.0 };
        self.share = self.share * kept + idle * (1.0 - kept);
        (self.counted_until, self.busy) = (now, busy);
    }
}

impl Auto {
    /// A policy with powers of two up to `batch_max` for `workers`.
    pub fn new(batch_max: usize, objective: Option<Nanos>, workers: usize) -> Auto {
        let doubled = |size: &usize| size.checked_mul(2).filter(|size| *size <= batch_max);
        let mut sizes: Vec<usize> = std::iter::successors(Some(1), doubled).collect();
        if sizes.last() != Some(&batch_max) && batch_max > 1 {
            sizes.push(batch_max);
        }
        let concurrent = workers.min(SATURATED_WORKERS);
        let idle = IdleShare { share: 1.0, counted_until: Nanos::ZERO, busy: false };
        Auto { sizes, objective, concurrent, idle, decided: 0 }
    }

    /// Sizes of batches up to `batch_max`, each as often as `workers` may run it at once.
    pub fn batches(batch_max: usize, workers: usize) -> Vec<usize> {
        let at_once = |size: usize| {
            (ROWS_BESIDE / size).clamp(workers.min(SATURATED_WORKERS), workers.max(1))
        };
        let sizes = Auto::new(batch_max, None, workers).sizes;
        sizes.into_iter().flat_map(|size| std::iter::repeat_n(size, at_once(size))).collect()
    }

    /// How many batches may run at once.
    fn workers_allowed(&self, model: &ModelView<'_>) -> usize {
        match self.idle.share < SATURATED_IDLE_SHARE {
            true => self.concurrent,
            false => model.workers.len(),
        }
    }

    /// The largest batch that pays off. Unknown sizes count as free, so that they are tried.
    fn largest(&self, profile: &BatchProfile, further: bool) -> usize {
        let worth = |small: usize, large: usize| {
            let (one, other) = (profile.latency(small).0 as f64, profile.latency(large).0 as f64);
            let taken = profile.latency(large).0.saturating_mul(self.concurrent as u64);
            let fits = self.objective.is_none_or(|objective| taken <= objective.0 / 2);
            (fits, other <= one * (large as f64 / small as f64) * PAYS_OFF)
        };
        let mut largest = self.sizes[0];
        let mut further = further;
        for pair in self.sizes.windows(2) {
            let (fits, worth) = worth(pair[0], pair[1]);
            if !fits || (!worth && !std::mem::take(&mut further)) {
                break;
            }
            largest = pair[1];
        }
        largest
    }
}

impl BatchPolicy for Auto {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn decide(&mut self, now: Nanos, model: &ModelView<'_>, decisions: &mut Vec<Decision>) {
        let busy = model.workers.iter().filter(|worker| worker.busy).count();
        let span = Nanos(model.profile.latency(1).0.saturating_mul(IDLE_BATCHES));
        let mut remaining = model.waiting.len();
        self.idle.count(now, span, busy > 0 || remaining > 0);
        let allowed = self.workers_allowed(model);
        let idle = model.workers.iter().enumerate().filter(|(_, worker)| !worker.busy);
        for (busy, (worker, facts)) in (busy..).zip(idle) {
            if remaining == 0 || busy >= allowed {
                return;
            }
            self.decided = self.decided.wrapping_add(1);
            let largest = self.largest(model.profile, self.decided.is_multiple_of(TRY_EVERY));
            let beside = match busy < self.concurrent {
                true => usize::MAX,
                false => ROWS_BESIDE / (busy + 1),
            };
            let most = remaining.min(largest).min(facts.batch).min(beside.max(1));
            let fits = |size: &&usize| **size <= most;
            let count = self.sizes.iter().rev().find(fits).copied().unwrap_or(1);
            decisions.push(Decision::Launch { worker, count });
            remaining -= count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batching::{WaitingRequest, Worker};

    fn counts(profile: &BatchProfile, waiting: usize, objective: Option<Nanos>) -> Vec<usize> {
        let waiting =
            vec![WaitingRequest { arrived: Nanos(0), deadline: Nanos::MAX }; waiting].into();
        let workers = [Worker { batch: 32, busy: false }; 2];
        let view = ModelView { waiting: &waiting, workers: &workers, profile, running: 0 };
        let mut decisions = Vec::new();
        Auto::new(32, objective, 2).decide(Nanos(0), &view, &mut decisions);
        let count = |decision: &Decision| match decision {
            Decision::Launch { count, .. } => *count,
            other => panic!("{other:?}"),
        };
        decisions.iter().map(count).collect()
    }

    #[test]
    fn batches_are_as_large_as_times_justify() {
        let flat = BatchProfile::linear(Nanos(10), Nanos(1_000), 32);
        assert_eq!(counts(&flat, 1, None), [1]);
        assert_eq!(counts(&flat, 7, None), [4, 2]);
        assert_eq!(counts(&flat, 100, None), [32, 32]);
        // On a device where two take as long as one after another, batches do not pay off.
        let steep = BatchProfile::linear(Nanos(1_000), Nanos(10), 32);
        assert_eq!(counts(&steep, 100, None), [1, 1]);
    }

    #[test]
    fn the_slo_bounds_batches() {
        let profile = BatchProfile::linear(Nanos(100), Nanos(1_000), 32);
        assert_eq!(counts(&profile, 100, Some(Nanos(8_000))), [8, 8]);
        assert_eq!(counts(&profile, 100, Some(Nanos(10))), [1, 1], "no request is refused");
    }

    /// Requests a second of `clients` that send their next request when they get a reply, and the
    /// mean batch, on a device that batches share: `together` times as fast with two or more.
    fn closed_loop(
        policy: &mut dyn BatchPolicy,
        worker_batches: &[usize],
        (profile, together): (&BatchProfile, f64),
        clients: usize,
    ) -> (f64, f64) {
        let worker = |batch: &usize| Worker { batch: *batch, busy: false };
        let mut workers: Vec<Worker> = worker_batches.iter().map(worker).collect();
        let mut running: Vec<Option<(f64, usize)>> = vec![None; workers.len()];
        let mut waiting: std::collections::VecDeque<_> =
            vec![WaitingRequest { arrived: Nanos(0), deadline: Nanos::MAX }; clients].into();
        let (mut now, mut ended, mut batches) = (0.0f64, 0usize, 0usize);
        while ended < 40_000 {
            let at = Nanos(now as u64);
            let inside = running.iter().flatten().map(|(_, count)| count).sum();
            let view = ModelView { waiting: &waiting, workers: &workers, profile, running: inside };
            let mut decisions = Vec::new();
            policy.decide(at, &view, &mut decisions);
            for decision in decisions {
                let Decision::Launch { worker, count } = decision else { continue };
                waiting.drain(..count);
                workers[worker].busy = true;
                running[worker] = Some((profile.latency(count).0 as f64, count));
            }
            let active = running.iter().flatten().count() as f64;
            let speed = if active > 1.0 { together / active } else { 1.0 };
            let next = running.iter().flatten().map(|(work, _)| *work).fold(f64::MAX, f64::min);
            now += next / speed;
            for (worker, slot) in running.iter_mut().enumerate() {
                let Some((work, count)) = slot else { continue };
                *work -= next;
                if *work <= 0.5 {
                    let request =
                        WaitingRequest { arrived: Nanos(now as u64), deadline: Nanos::MAX };
                    waiting.extend(vec![request; *count]);
                    (ended, batches) = (ended + *count, batches + 1);
                    (*slot, workers[worker].busy) = (None, false);
                }
            }
        }
        (ended as f64 / now * 1e9, ended as f64 / batches as f64)
    }

    /// Batch times of ResNet-50 on an H200 in microseconds, from `evidence/latency.json`.
    fn resnet50() -> BatchProfile {
        let at = |batch: u64| match batch {
            ..=8 => 231 + (395 - 231) * (batch - 1) / 7,
            _ => 395 + (923 - 395) * (batch - 8) / 24,
        };
        BatchProfile::from_latencies((1..=32).map(|batch| Nanos::from_micros(at(batch))).collect())
            .unwrap()
    }

    #[test]
    fn a_saturated_device_runs_large_batches() {
        let profile = resnet50();
        let best = 32.0 / profile.latency(32).0 as f64 * 1e9;
        for together in [1.0, 1.2] {
            let (rate, mean) =
                closed_loop(&mut Auto::new(32, None, 6), &[32; 6], (&profile, together), 128);
            assert!(rate > 0.95 * best * together, "{rate:.0} of {best:.0} with {mean:.1}");
            let mut elastic = super::super::Elastic { inferences_max: 32 };
            let workers = super::super::Elastic::WORKERS;
            let (small, _) = closed_loop(&mut elastic, &workers, (&profile, together), 128);
            assert!(rate > 1.5 * small, "{rate:.0} instead of {small:.0}");
        }
    }

    #[test]
    fn requests_start_at_once_while_the_device_has_time() {
        let profile = resnet50();
        let mut policy = Auto::new(32, None, 6);
        let mut workers = [Worker { batch: 32, busy: false }; 6];
        // Bursts of five, with a pause of ten times their time in between.
        for burst in 1..50u64 {
            for number in 0..5 {
                let now = Nanos::from_millis(20 * burst) + Nanos(number);
                let waiting = vec![WaitingRequest { arrived: now, deadline: Nanos::MAX }].into();
                let running = number as usize;
                let view =
                    ModelView { waiting: &waiting, workers: &workers, profile: &profile, running };
                let mut decisions = Vec::new();
                policy.decide(now, &view, &mut decisions);
                let worker = number as usize;
                assert_eq!(decisions, [Decision::Launch { worker, count: 1 }]);
                workers[worker].busy = true;
            }
            workers.iter_mut().for_each(|worker| worker.busy = false);
            let ended = Nanos::from_millis(20 * burst + 2);
            let view = ModelView {
                waiting: &Default::default(),
                workers: &workers,
                profile: &profile,
                running: 0,
            };
            policy.decide(ended, &view, &mut Vec::new());
        }
    }

    #[test]
    fn no_size_runs_more_often_at_once_than_it_is_prepared() {
        assert_eq!(Auto::batches(4, 2), [1, 1, 2, 2, 4, 4]);
        assert_eq!(Auto::batches(4, 1), [1, 2, 4]);
        let prepared = Auto::batches(32, 6);
        let mut random = base::Random::new(9);
        let profile = resnet50();
        for _ in 0..2_000 {
            let mut policy = Auto::new(32, None, 6);
            let mut workers = [Worker { batch: 32, busy: false }; 6];
            let mut running: Vec<usize> = Vec::new();
            while running.len() < 6 {
                let count = 1 + random.below(40) as usize;
                let one = WaitingRequest { arrived: Nanos(0), deadline: Nanos::MAX };
                let waiting = vec![one; count].into();
                let view = ModelView {
                    waiting: &waiting,
                    workers: &workers,
                    profile: &profile,
                    running: 0,
                };
                let mut decisions = Vec::new();
                policy.decide(Nanos(0), &view, &mut decisions);
                for decision in decisions {
                    let Decision::Launch { worker, count } = decision else { panic!("no launch") };
                    workers[worker].busy = true;
                    running.push(count);
                }
            }
            for size in &running {
                let now = running.iter().filter(|other| *other == size).count();
                let there = prepared.iter().filter(|other| *other == size).count();
                assert!(now <= there, "{running:?}, prepared {prepared:?}");
            }
        }
    }

    #[test]
    fn tries_larger_batches_again() {
        let steep = BatchProfile::linear(Nanos(1_000), Nanos(10), 32);
        let waiting = vec![WaitingRequest { arrived: Nanos(0), deadline: Nanos::MAX }; 8].into();
        let workers = [Worker { batch: 32, busy: false }];
        let view = ModelView { waiting: &waiting, workers: &workers, profile: &steep, running: 0 };
        let (mut policy, mut decisions) = (Auto::new(32, None, 1), Vec::new());
        (0..2 * TRY_EVERY).for_each(|_| policy.decide(Nanos(0), &view, &mut decisions));
        let larger = decisions.iter().filter(|d| matches!(d, Decision::Launch { count: 2, .. }));
        assert_eq!(larger.count(), 2);
    }
}
