//! Admission of co-run pairs, learned from the latency of real time.
//!
//! Kernels of small batches leave much of a large device idle, and some pairs of models hardly
//! interfere. Each pair is tried now and then. While real time is within the allowed slowdown of
//! its latency alone, one task of that best-effort model continues and only the others are
//! preempted.

use base::Nanos;

use super::ModelId;

/// Default of the allowed slowdown.
pub(super) const MAX_RT_SLOWDOWN: f64 = 0.01;

/// Runs alone before the first pair is tried.
const MIN_RUNS_ALONE: u32 = 32;

/// Runs of a pair before it can be admitted.
const MIN_RUNS_ADMIT: u32 = 24;

/// Runs of a pair before it can be rejected; half as many when it is clearly too slow.
const MIN_RUNS_REJECT: u32 = 8;

/// A slowdown beyond the allowed one that is clearly too much.
const CLEAR_MARGIN: f64 = 0.09;

/// One of so many runs is alone, so that the baseline stays current.
const ALONE_EVERY: u64 = 16;

/// One of so many runs tries the pair with the fewest runs: few enough to stay out of the 99th
/// percentile.
const TRY_EVERY: u64 = 200;

/// The same with an SM partition: there few pairs interfere much, and unknown pairs are not used.
const TRY_EVERY_IN_PARTITION: u64 = 4;

/// A clearly rejected pair is undecided again after so many runs.
const RETRY_EVERY: u64 = 20_000;

/// The same for other rejected pairs, which may have been rejected by chance.
const RETRY_MILD_EVERY: u64 = 2_000;

/// Runs that a mean covers.
const WINDOW_RUNS: f64 = 256.0;

/// A run that takes longer than this multiple of the usual time is an outlier and counts as this.
const OUTLIER_FACTOR: f64 = 1.2;

/// Standard errors beyond which a difference is certain.
const CERTAIN_ERRORS: f64 = 3.0;

/// An exponentially forgetting mean and variance.
#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    count: u32,
    mean_ns: f64,
    variance: f64,
}

impl Estimate {
    /// Records a run that usually takes about `usual_ns`.
    fn record(&mut self, time: Nanos, usual_ns: f64) {
        let ns = (time.0 as f64).min(self.mean_ns.max(usual_ns) * OUTLIER_FACTOR);
        self.count = self.count.saturating_add(1);
        let weight = (1.0 / f64::from(self.count)).max(1.0 / WINDOW_RUNS);
        let deviation = ns - self.mean_ns;
        self.mean_ns += deviation * weight;
        self.variance = (1.0 - weight) * (self.variance + weight * deviation * deviation);
    }

    /// Variance of the mean. A forgetting mean is as good as one over twice its window.
    fn uncertainty(&self) -> f64 {
        self.variance / f64::from(self.count).clamp(1.0, 2.0 * WINDOW_RUNS)
    }
}

/// Admission of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PairStatus {
    /// Not enough runs.
    #[default]
    Undecided,
    /// Within the allowed slowdown.
    Admitted,
    /// Above the allowed slowdown.
    Rejected,
    /// Far above it.
    ClearlyRejected,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    time: Estimate,
    status: PairStatus,
}

impl Pair {
    /// Updates the admission. An admitted pair stays admitted until it is certainly too slow.
    fn update_status(&mut self, alone: &Estimate, max_rt_slowdown: f64) {
        if alone.count < MIN_RUNS_ALONE || alone.mean_ns <= 0.0 {
            return;
        }
        let count = self.time.count;
        let cost = self.time.mean_ns / alone.mean_ns - 1.0;
        let error = (self.time.uncertainty() + alone.uncertainty()).sqrt() / alone.mean_ns;
        // After a full window the estimate does not get better.
        let doubt = if f64::from(count) < WINDOW_RUNS { error } else { 0.0 };
        if count >= MIN_RUNS_REJECT / 2 && cost > max_rt_slowdown + CLEAR_MARGIN {
            self.status = PairStatus::ClearlyRejected;
        } else if count >= MIN_RUNS_REJECT && cost - CERTAIN_ERRORS * error > max_rt_slowdown {
            self.status = PairStatus::Rejected;
        } else if count >= MIN_RUNS_ADMIT && cost + doubt <= max_rt_slowdown {
            self.status = PairStatus::Admitted;
        }
    }
}

/// Runs of one real-time model.
#[derive(Clone, Debug, Default)]
struct RealTimeRuns {
    alone: Estimate,
    /// By best-effort model.
    pairs: Vec<Pair>,
    /// Runs so far.
    count: u64,
}

impl RealTimeRuns {
    fn pair(&self, co_runner: ModelId) -> Pair {
        self.pairs.get(co_runner.0 as usize).copied().unwrap_or_default()
    }

    /// Makes rejected pairs undecided again when it is time.
    fn reopen(&mut self) {
        let due = |pair: &Pair| match pair.status {
            PairStatus::Rejected => self.count.is_multiple_of(RETRY_MILD_EVERY),
            PairStatus::ClearlyRejected => self.count.is_multiple_of(RETRY_EVERY),
            PairStatus::Undecided | PairStatus::Admitted => false,
        };
        for pair in self.pairs.iter_mut().filter(|pair| due(pair)) {
            *pair = Pair::default();
        }
    }

    fn is(&self, co_runner: ModelId, status: PairStatus) -> bool {
        self.pair(co_runner).status == status
    }
}

/// How often real time ran beside best effort, and how many pairs are decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoRunCounts {
    /// Runs of real time alone.
    pub alone: u64,
    /// Runs of real time beside a co-runner.
    pub beside: u64,
    /// Pairs within the allowed slowdown.
    pub admitted: u64,
    /// Pairs above the allowed slowdown.
    pub rejected: u64,
}

/// The admission of all pairs.
#[derive(Clone, Debug)]
pub(super) struct CoRunAdmission {
    models: Vec<RealTimeRuns>,
    /// Runs alone, and beside a co-runner.
    runs: [u64; 2],
    max_rt_slowdown: f64,
    try_every: u64,
}

impl CoRunAdmission {
    /// No runs yet.
    pub(super) fn new(max_rt_slowdown: f64, partition: bool) -> CoRunAdmission {
        let try_every = if partition { TRY_EVERY_IN_PARTITION } else { TRY_EVERY };
        CoRunAdmission { models: Vec::new(), runs: [0; 2], max_rt_slowdown, try_every }
    }

    /// Runs so far, and pairs as they are now.
    pub(super) fn counts(&self) -> CoRunCounts {
        let [alone, beside] = self.runs;
        let mut counts = CoRunCounts { alone, beside, ..CoRunCounts::default() };
        for pair in self.models.iter().flat_map(|runs| &runs.pairs) {
            match pair.status {
                PairStatus::Undecided => {}
                PairStatus::Admitted => counts.admitted += 1,
                PairStatus::Rejected | PairStatus::ClearlyRejected => counts.rejected += 1,
            }
        }
        counts
    }

    /// Forgets all runs of a model number that is used again.
    pub(super) fn forget(&mut self, model: ModelId) {
        let index = model.0 as usize;
        if index >= self.models.len() {
            self.models.resize_with(index + 1, RealTimeRuns::default);
        }
        self.models[index] = RealTimeRuns::default();
        for runs in &mut self.models {
            if let Some(pair) = runs.pairs.get_mut(index) {
                *pair = Pair::default();
            }
        }
    }

    /// Records a run of `real_time` with this co-runner.
    pub(super) fn record(&mut self, real_time: ModelId, co_runner: Option<ModelId>, time: Nanos) {
        let Some(runs) = self.models.get_mut(real_time.0 as usize) else { return };
        self.runs[usize::from(co_runner.is_some())] += 1;
        match co_runner {
            None => {
                let usual_ns = if runs.alone.count < MIN_RUNS_REJECT { f64::INFINITY } else { 0.0 };
                runs.alone.record(time, usual_ns);
            }
            Some(co_runner) => {
                let index = co_runner.0 as usize;
                if index >= runs.pairs.len() {
                    runs.pairs.resize(index + 1, Pair::default());
                }
                runs.pairs[index].time.record(time, runs.alone.mean_ns);
                runs.pairs[index].update_status(&runs.alone, self.max_rt_slowdown);
            }
        }
    }

    /// Time of a run of `real_time` alone, once known.
    pub(super) fn alone(&self, real_time: ModelId) -> Option<Nanos> {
        let alone = self.models.get(real_time.0 as usize)?.alone;
        (alone.count >= MIN_RUNS_REJECT).then_some(Nanos(alone.mean_ns as u64))
    }

    /// The co-runner for the next run of `real_time`, of `candidates`. Prefers the `present` one,
    /// which would be preempted otherwise.
    pub(super) fn choose(
        &mut self,
        real_time: ModelId,
        present: Option<ModelId>,
        candidates: impl Iterator<Item = ModelId> + Clone,
    ) -> Option<ModelId> {
        let runs = self.models.get_mut(real_time.0 as usize)?;
        runs.count += 1;
        let count = runs.count;
        runs.reopen();
        if self.max_rt_slowdown <= 0.0
            || runs.alone.count < MIN_RUNS_ALONE
            || count.is_multiple_of(ALONE_EVERY)
        {
            return None;
        }
        if count % self.try_every == 1 {
            let open = candidates.clone().filter(|model| runs.is(*model, PairStatus::Undecided));
            if let Some(least) = open.min_by_key(|model| runs.pair(*model).time.count) {
                return Some(least);
            }
        }
        let admitted = candidates.filter(|model| runs.is(*model, PairStatus::Admitted));
        if present.is_some_and(|present| admitted.clone().any(|model| model == present)) {
            return present;
        }
        let time = |model: &ModelId| runs.pair(*model).time.mean_ns;
        admitted.min_by(|a, b| time(a).total_cmp(&time(b)))
    }
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;

    const REAL_TIME: ModelId = ModelId(0);
    const ROUNDS: usize = 40_000;

    fn co_run(partition: bool, models: u32) -> CoRunAdmission {
        let mut co_run = CoRunAdmission::new(MAX_RT_SLOWDOWN, partition);
        (0..=models).for_each(|model| co_run.forget(ModelId(model)));
        co_run
    }

    #[test]
    fn runs_and_decided_pairs_are_counted() {
        let mut co_run = co_run(false, 2);
        for _ in 0..200 {
            co_run.record(REAL_TIME, None, Nanos(1_000));
            co_run.record(REAL_TIME, Some(ModelId(1)), Nanos(1_000));
            co_run.record(REAL_TIME, Some(ModelId(2)), Nanos(3_000));
        }
        let counts = CoRunCounts { alone: 200, beside: 400, admitted: 1, rejected: 1 };
        assert_eq!(co_run.counts(), counts);
    }

    /// Time of a run: 5 % noise, and 1 % outliers.
    fn noisy(random: &mut Random, ns: f64) -> Nanos {
        let spread = ns * (1.0 + 0.05 * f64::from(random.symmetric_f32()));
        let held_up = if random.below(100) == 0 { 8.0 } else { 1.0 };
        Nanos((spread * held_up) as u64)
    }

    /// Runs of a model with co-runners of these slowdowns; how often each was chosen in the second
    /// half, and first how often none was.
    fn chosen(costs: &[f64], partition: bool, seed: u64) -> Vec<usize> {
        let mut random = Random::new(seed);
        let mut co_run = co_run(partition, costs.len() as u32);
        let mut counts = vec![0; costs.len() + 1];
        for round in 0..ROUNDS {
            let candidates = (1..=costs.len() as u32).map(ModelId);
            let co_runner = co_run.choose(REAL_TIME, None, candidates);
            let index = co_runner.map_or(0, |model| model.0 as usize);
            let cost = index.checked_sub(1).map_or(0.0, |index| costs[index]);
            co_run.record(REAL_TIME, co_runner, noisy(&mut random, 1e6 * (1.0 + cost)));
            counts[index] += usize::from(round * 2 >= ROUNDS);
        }
        counts
    }

    #[test]
    fn admits_mild_pairs_despite_noise() {
        for seed in 0..20 {
            for partition in [false, true] {
                let counts = chosen(&[0.002, 0.4], partition, seed);
                assert!(counts[1] > 18_000, "{counts:?} of 20000, seed {seed}");
                assert!(counts[2] <= 8, "{counts:?} of 20000, seed {seed}");
                assert!(counts[0] >= 20_000 / ALONE_EVERY as usize, "{counts:?}");
            }
        }
    }

    #[test]
    fn rejects_pairs_above_the_allowed_slowdown() {
        for seed in 0..20 {
            let counts = chosen(&[0.025, 0.06, 0.4], true, seed);
            assert!(counts[1] < 1_000, "{counts:?} of 20000, seed {seed}");
            assert!(counts[2] + counts[3] < 100, "{counts:?} of 20000, seed {seed}");
        }
    }

    #[test]
    fn learns_pairs_quickly_with_a_partition() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let mut co_run = co_run(true, 5);
            let mut beside = 0;
            for round in 0..1_500 {
                let co_runner = co_run.choose(REAL_TIME, None, (1..=5).map(ModelId));
                co_run.record(REAL_TIME, co_runner, noisy(&mut random, 1e6));
                beside += usize::from(round >= 1_000 && co_runner.is_some());
            }
            assert!(beside > 400, "{beside} of 500, seed {seed}");
        }
    }

    #[test]
    fn rejects_a_pair_that_becomes_slow_and_tries_it_again() {
        let mut random = Random::new(1);
        let mut co_run = co_run(true, 1);
        // The co-runner is mild, then harsh, then mild again.
        let mut phase = |cost: f64, rounds: u64| {
            let mut beside = 0;
            for round in 0..rounds {
                let co_runner = co_run.choose(REAL_TIME, None, [ModelId(1)].into_iter());
                let share = if co_runner.is_some() { 1.0 + cost } else { 1.0 };
                co_run.record(REAL_TIME, co_runner, noisy(&mut random, 1e6 * share));
                beside += u64::from(co_runner.is_some() && round * 2 >= rounds);
            }
            beside
        };
        assert!(phase(0.0, 4_000) > 1_800);
        assert!(phase(0.3, 4_000) <= 20);
        assert!(phase(0.0, 2 * RETRY_EVERY) > RETRY_EVERY / 2);
    }

    #[test]
    fn forgets_pairs_of_a_reused_model_number() {
        let mut co_run = co_run(false, 1);
        let mild = ModelId(1);
        for _ in 0..MIN_RUNS_ALONE {
            co_run.record(REAL_TIME, None, Nanos(100));
        }
        for _ in 0..MIN_RUNS_ADMIT {
            co_run.record(REAL_TIME, Some(mild), Nanos(100));
        }
        // The first run tries an undecided pair.
        assert_eq!(co_run.choose(REAL_TIME, None, [mild].into_iter()), Some(mild));
        assert_eq!(co_run.choose(REAL_TIME, None, [mild].into_iter()), Some(mild));
        co_run.forget(mild);
        assert_eq!(co_run.choose(REAL_TIME, None, [mild].into_iter()), None);
    }
}
