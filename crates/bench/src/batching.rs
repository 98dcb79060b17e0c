//! Published batching experiments in virtual time: Nexus's drop policies (figures 5 and 9) and
//! Ebird's step load.

use std::collections::VecDeque;

use base::{Histogram, Nanos, Random};
use runtime::batching::{
    BatchPolicy, BatchProfile, Decision, Deferred, EarlyDrop, Elastic, LazyDrop, ModelView,
    WaitingRequest, Window, Worker,
};
use serde::Serialize;

/// The result of a simulation.
#[derive(Clone, Debug, Default)]
pub struct BatchOutcome {
    /// Number of requests.
    pub requests: usize,
    /// Requests dropped.
    pub dropped: usize,
    /// Replies after the deadline.
    pub late: usize,
    /// Latency of replies.
    pub latency: Histogram,
    /// Arrival and latency of each reply.
    pub replies: Vec<(Nanos, Nanos)>,
}

/// Runs `policy` over arrivals; a batch takes the time of the profile.
pub fn simulate(
    policy: &mut dyn BatchPolicy,
    profile: &BatchProfile,
    worker_batches: &[usize],
    arrivals: &[Nanos],
    slo: Nanos,
) -> BatchOutcome {
    let mut bench = BatchSimulation {
        workers: worker_batches.iter().map(|batch| Worker { batch: *batch, busy: false }).collect(),
        ends: vec![None; worker_batches.len()],
        waiting: VecDeque::new(),
        wake: None,
        outcome: BatchOutcome { requests: arrivals.len(), ..BatchOutcome::default() },
    };
    let mut next = 0;
    let mut decisions = Vec::new();
    loop {
        let end = bench.ends.iter().flatten().map(|(at, _)| *at).min();
        let arrival = arrivals.get(next).copied();
        let Some(now) = [end, arrival, bench.wake].into_iter().flatten().min() else { break };
        bench.wake = bench.wake.filter(|at| *at > now);
        bench.finish_batches(now);
        while arrivals.get(next).is_some_and(|at| *at <= now) {
            let arrived = arrivals[next];
            bench.waiting.push_back(WaitingRequest { arrived, deadline: arrived + slo });
            next += 1;
        }
        let running = bench.ends.iter().flatten().map(|(_, batch)| batch.len()).sum();
        let (waiting, workers) = (&bench.waiting, bench.workers.as_slice());
        policy.decide(now, &ModelView { waiting, workers, profile, running }, &mut decisions);
        for decision in decisions.drain(..) {
            bench.carry_out(now, decision, profile);
        }
    }
    bench.outcome.dropped += bench.waiting.len();
    bench.outcome
}

struct BatchSimulation {
    workers: Vec<Worker>,
    ends: Vec<Option<(Nanos, Vec<WaitingRequest>)>>,
    waiting: VecDeque<WaitingRequest>,
    wake: Option<Nanos>,
    outcome: BatchOutcome,
}

impl BatchSimulation {
    fn finish_batches(&mut self, now: Nanos) {
        for (worker, slot) in self.ends.iter_mut().enumerate() {
            let Some((_, batch)) = slot.take_if(|(at, _)| *at <= now) else { continue };
            self.workers[worker].busy = false;
            for request in batch {
                self.outcome.late += usize::from(now > request.deadline);
                self.outcome.latency.record(now - request.arrived);
                self.outcome.replies.push((request.arrived, now - request.arrived));
            }
        }
    }

    fn carry_out(&mut self, now: Nanos, decision: Decision, profile: &BatchProfile) {
        match decision {
            Decision::Drop { count } => self.outcome.dropped += self.waiting.drain(..count).count(),
            Decision::Launch { worker, count } => {
                self.workers[worker].busy = true;
                let batch = self.waiting.drain(..count).collect();
                self.ends[worker] = Some((now + profile.latency(count), batch));
            }
            Decision::WakeAt(at) => self.wake = Some(self.wake.map_or(at, |other| other.min(at))),
        }
    }
}

fn uniform(count: usize, gap: Nanos) -> Vec<Nanos> {
    (1..=count as u64).map(|index| Nanos(gap.0 * index)).collect()
}

fn poisson(count: usize, mean_gap: Nanos, seed: u64) -> Vec<Nanos> {
    let mut random = Random::new(seed);
    let mut now = 0.0;
    let mut draw = |_| {
        now += random.exponential(mean_gap.0 as f64);
        Nanos(now as u64)
    };
    (0..count).map(&mut draw).collect()
}

const SLO: Nanos = Nanos::from_millis(100);

/// Resolution of the search for a rate.
const STEP_RPS: f64 = 0.5;

/// A point of Nexus's curves: an SLO of 100 ms and an optimum of 500 requests per second.
#[derive(Clone, Debug, Serialize)]
pub struct DropPoint {
    /// Milliseconds that one request adds to a batch.
    pub alpha_ms: f64,
    /// `uniform` or `poisson`.
    pub arrivals: &'static str,
    /// Percent of requests without reply in time under lazy drop, at 90 % of the optimum (figure
    /// 5).
    pub lazy_bad_pct: f64,
    /// The same for early drop.
    pub early_bad_pct: f64,
    /// Highest rate with 99 % of replies in time under lazy drop (figure 9).
    pub lazy_rps: f64,
    /// The same for early drop.
    pub early_rps: f64,
    /// The same for deferred batching.
    pub deferred_rps: f64,
}

/// The curves of figures 5 and 9 over `alpha`.
pub fn nexus(requests: usize) -> Vec<DropPoint> {
    let alphas = [200, 600, 1_000, 1_200, 1_400, 1_600, 1_800];
    let points = alphas.into_iter().flat_map(|alpha| [(alpha, false), (alpha, true)]);
    points.map(|(alpha, random)| drop_point(alpha, random, requests)).collect()
}

fn drop_point(alpha_us: u64, random: bool, requests: usize) -> DropPoint {
    // Batches of 25 in 50 ms are 500 per second, and two of them fit into the SLO.
    let beta = Nanos::from_millis(50) - Nanos::from_micros(alpha_us * 25);
    let profile = BatchProfile::linear(Nanos::from_micros(alpha_us), beta, 64);
    let batch = profile.batch_for_objective(SLO);
    let seeds = if random { 1..=4 } else { 1..=1 };
    let bad = |make: &dyn Fn() -> Box<dyn BatchPolicy>, rate: f64| {
        let gap = Nanos((1e9 / rate) as u64);
        let of = |seed: u64| {
            let arrivals =
                if random { poisson(requests, gap, seed) } else { uniform(requests, gap) };
            let outcome = simulate(make().as_mut(), &profile, &[64], &arrivals, SLO);
            (outcome.dropped + outcome.late) as f64 / outcome.requests as f64
        };
        seeds.clone().map(of).sum::<f64>() / seeds.clone().count() as f64
    };
    let goodput = |make: &dyn Fn() -> Box<dyn BatchPolicy>| {
        let (mut low, mut high) = (50.0, 600.0);
        while high - low > STEP_RPS {
            let rate = (low + high) / 2.0;
            if bad(make, rate) <= 0.01 { low = rate } else { high = rate }
        }
        f64::round(low * 10.0) / 10.0
    };
    let lazy = || Box::new(LazyDrop { batch_max: 64 }) as Box<dyn BatchPolicy>;
    let early = || Box::new(EarlyDrop { batch }) as Box<dyn BatchPolicy>;
    let percent = |share: f64| (share * 1e4).round() / 100.0;
    DropPoint {
        alpha_ms: alpha_us as f64 / 1e3,
        arrivals: if random { "poisson" } else { "uniform" },
        lazy_bad_pct: percent(bad(&lazy, 450.0)),
        early_bad_pct: percent(bad(&early, 450.0)),
        lazy_rps: goodput(&lazy),
        early_rps: goodput(&early),
        deferred_rps: goodput(&|| Box::new(Deferred { batch, margin: Nanos::ZERO })),
    }
}

/// Mean latency of Ebird's step load: 150 requests slowly, then 250 fast.
#[derive(Clone, Debug, Serialize)]
pub struct StepLoad {
    /// The policy.
    pub policy: String,
    /// Mean milliseconds of the slow requests.
    pub slow_ms: f64,
    /// Mean milliseconds of the fast requests.
    pub fast_ms: f64,
}

/// Elastic batching and windows of several lengths, on a profile like ResNet-50's on the H200.
pub fn ebird() -> Vec<StepLoad> {
    // Batches of 1, 8 and 32 take 0.93, 1.21 and 2.39 ms.
    let profile = BatchProfile::linear(Nanos::from_micros(47), Nanos::from_micros(880), 32);
    let slow = uniform(150, Nanos::from_millis(10));
    let start = slow.last().copied().unwrap_or_default();
    let mut arrivals = slow.clone();
    arrivals.extend(uniform(250, Nanos::from_micros(250)).into_iter().map(|at| at + start));
    let run = |policy: &mut dyn BatchPolicy, workers: &[usize], name: String| {
        let outcome = simulate(policy, &profile, workers, &arrivals, Nanos::MAX);
        let mean = |early: bool| {
            let of = outcome.replies.iter().filter(|(at, _)| (*at <= start) == early);
            let (count, sum) = of.fold((0u64, 0u64), |(n, sum), (_, l)| (n + 1, sum + l.0));
            (sum as f64 / count.max(1) as f64 / 1e3).round() / 1e3
        };
        StepLoad { policy: name, slow_ms: mean(true), fast_ms: mean(false) }
    };
    let mut rows =
        vec![run(&mut Elastic { inferences_max: 32 }, &Elastic::WORKERS, "elastic".to_string())];
    for wait_ms in [1, 2, 5] {
        let mut window = Window { batch_max: 32, wait_max: Nanos::from_millis(wait_ms) };
        rows.push(run(&mut window, &[32], format!("window {wait_ms} ms")));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_drop_beats_lazy_and_deferred_is_no_worse() {
        for point in nexus(10_000) {
            assert!(point.early_rps >= point.lazy_rps * 0.99, "{point:?}");
            assert!(point.deferred_rps >= point.early_rps * 0.995, "{point:?}");
        }
    }

    #[test]
    fn elastic_beats_every_window_at_both_loads() {
        let rows = ebird();
        for window in &rows[1..] {
            assert!(
                rows[0].slow_ms < window.slow_ms && rows[0].fast_ms < window.fast_ms,
                "{rows:?}"
            );
        }
    }
}
