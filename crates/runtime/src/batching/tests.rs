//! The policies in virtual time, on a device that runs batches one after another or concurrently.

use std::collections::VecDeque;

use base::{Histogram, Random};

use super::*;

/// Results of a run.
#[derive(Debug, Default)]
struct Outcome {
    requests: usize,
    dropped: usize,
    late: usize,
    latency: Histogram,
}

impl Outcome {
    fn bad_rate(&self) -> f64 {
        (self.dropped + self.late) as f64 / self.requests as f64
    }
}

/// Runs `policy` on arrivals; a worker takes the profile's time for its batch.
fn simulate(
    policy: &mut dyn BatchPolicy,
    profile: &BatchProfile,
    worker_batches: &[usize],
    arrivals: &[Nanos],
    objective: Nanos,
) -> Outcome {
    let mut workers: Vec<Worker> =
        worker_batches.iter().map(|batch| Worker { batch: *batch, busy: false }).collect();
    let mut ends: Vec<Option<(Nanos, Vec<WaitingRequest>)>> = vec![None; workers.len()];
    let mut waiting: VecDeque<WaitingRequest> = VecDeque::new();
    let mut outcome = Outcome { requests: arrivals.len(), ..Outcome::default() };
    let mut next = 0;
    let mut wake: Option<Nanos> = None;
    loop {
        let end = ends.iter().flatten().map(|(at, _)| *at).min();
        let arrival = arrivals.get(next).copied();
        let Some(now) = [end, arrival, wake].into_iter().flatten().min() else { break };
        wake = wake.filter(|at| *at > now);
        for (worker, slot) in ends.iter_mut().enumerate() {
            if slot.as_ref().is_some_and(|(at, _)| *at <= now) {
                let (_, batch) = slot.take().unwrap();
                workers[worker].busy = false;
                for request in batch {
                    outcome.late += usize::from(now > request.deadline);
                    outcome.latency.record(now - request.arrived);
                }
            }
        }
        while arrivals.get(next).is_some_and(|at| *at <= now) {
            waiting.push_back(WaitingRequest {
                arrived: arrivals[next],
                deadline: arrivals[next] + objective,
            });
            next += 1;
        }
        let running = ends.iter().flatten().map(|(_, batch)| batch.len()).sum();
        let view = ModelView { waiting: &waiting, workers: &workers, profile, running };
        let mut decisions = Vec::new();
        policy.decide(now, &view, &mut decisions);
        for decision in decisions {
            match decision {
                Decision::Drop { count } => {
                    assert!(count <= waiting.len());
                    outcome.dropped += waiting.drain(..count).count();
                }
                Decision::Launch { worker, count } => {
                    assert!(count > 0 && count <= waiting.len(), "an empty batch");
                    assert!(!workers[worker].busy, "a busy worker");
                    assert!(count <= workers[worker].batch, "more than the worker fits");
                    workers[worker].busy = true;
                    let batch: Vec<WaitingRequest> = waiting.drain(..count).collect();
                    ends[worker] = Some((now + profile.latency(count), batch));
                }
                Decision::WakeAt(at) => {
                    assert!(at > now, "a wake-up that is due already");
                    wake = Some(wake.map_or(at, |other| other.min(at)));
                }
            }
        }
    }
    assert!(waiting.is_empty(), "{} requests were lost by {}", waiting.len(), policy.name());
    outcome
}

fn uniform(count: usize, gap: Nanos) -> Vec<Nanos> {
    (1..=count as u64).map(|index| Nanos(gap.0 * index)).collect()
}

fn poisson(count: usize, mean_gap: Nanos, seed: u64) -> Vec<Nanos> {
    let mut random = Random::new(seed);
    let mut now = 0.0;
    (0..count)
        .map(|_| {
            now += random.exponential(mean_gap.0 as f64);
            Nanos(now as u64)
        })
        .collect()
}

const OBJECTIVE: Nanos = Nanos::from_millis(100);

/// The model of the paper: the optimum, the throughput of the largest batch of which two fit into
/// the SLO, is 500 requests per second; `alpha` is the time per request.
fn nexus_profile(alpha_us: u64) -> BatchProfile {
    // batch / latency(batch) = 500/s with latency(batch) = 50 ms gives a batch of 25.
    let beta = Nanos::from_millis(50) - Nanos::from_micros(alpha_us * 25);
    BatchProfile::linear(Nanos::from_micros(alpha_us), beta, 64)
}

/// The highest rate of which at least 99 % is in time.
fn goodput(
    make: &dyn Fn(&BatchProfile) -> Box<dyn BatchPolicy>,
    alpha_us: u64,
    random: bool,
) -> f64 {
    let profile = nexus_profile(alpha_us);
    let (mut low, mut high) = (50.0f64, 600.0f64);
    while high - low > 5.0 {
        let rate = (low + high) / 2.0;
        let gap = Nanos((1e9 / rate) as u64);
        let arrivals = if random { poisson(20_000, gap, 7) } else { uniform(20_000, gap) };
        let mut policy = make(&profile);
        let outcome = simulate(policy.as_mut(), &profile, &[64], &arrivals, OBJECTIVE);
        if outcome.bad_rate() <= 0.01 { low = rate } else { high = rate }
    }
    low
}

fn lazy(_: &BatchProfile) -> Box<dyn BatchPolicy> {
    Box::new(LazyDrop { batch_max: 64 })
}

fn early(profile: &BatchProfile) -> Box<dyn BatchPolicy> {
    Box::new(EarlyDrop { batch: profile.batch_for_objective(OBJECTIVE) })
}

fn deferred(profile: &BatchProfile) -> Box<dyn BatchPolicy> {
    let batch = profile.batch_for_objective(OBJECTIVE);
    Box::new(Deferred { batch, margin: Nanos::ZERO })
}

#[test]
fn early_drop_serves_more_than_lazy_drop_where_the_fixed_cost_is_high() {
    for (alpha_us, random) in [(1000, true), (1400, true), (1800, true), (1000, false)] {
        let [lazy, early, deferred] = [lazy, early, deferred]
            .map(|make| goodput(&move |profile: &BatchProfile| make(profile), alpha_us, random));
        println!(
            "alpha {alpha_us} us, poisson {random}: lazy {lazy:.0}, early {early:.0}, \
             deferred {deferred:.0}"
        );
        assert!(early >= lazy, "alpha {alpha_us}: {early} < {lazy}");
        assert!(deferred >= early * 0.995, "alpha {alpha_us}: {deferred} < {early}");
    }
}

#[test]
fn window_waits_no_longer_than_configured() {
    let profile = BatchProfile::linear(Nanos(1), Nanos(10), 32);
    let mut policy = Window { batch_max: 4, wait_max: Nanos(100) };
    let arrivals = [Nanos(0), Nanos(10), Nanos(500), Nanos(501), Nanos(502), Nanos(503)];
    let outcome = simulate(&mut policy, &profile, &[4], &arrivals, Nanos::MAX);
    assert_eq!(outcome.dropped, 0);
    // The first two start at 100 as a pair; the last four fill the batch at 503.
    assert_eq!(outcome.latency.max(), Nanos(112));
}

#[test]
fn elastic_fills_the_largest_workers_first() {
    let profile = BatchProfile::linear(Nanos(1), Nanos(10), 32);
    let workers: Vec<Worker> =
        Elastic::WORKERS.iter().map(|batch| Worker { batch: *batch, busy: false }).collect();
    let waiting: VecDeque<WaitingRequest> =
        (0..13).map(|i| WaitingRequest { arrived: Nanos(i), deadline: Nanos::MAX }).collect();
    let view = ModelView { waiting: &waiting, workers: &workers, profile: &profile, running: 0 };
    let mut decisions = Vec::new();
    Elastic { inferences_max: 32 }.decide(Nanos(20), &view, &mut decisions);
    let counts: Vec<usize> = decisions
        .iter()
        .map(|decision| match decision {
            Decision::Launch { count, .. } => *count,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(counts, [8, 4, 1]);
    decisions.clear();
    Elastic { inferences_max: 6 }.decide(Nanos(20), &view, &mut decisions);
    assert_eq!(decisions.len(), 2, "4 and 2: {decisions:?}");
}

#[test]
fn elastic_is_faster_than_a_window_at_low_and_high_load() {
    let profile = BatchProfile::linear(Nanos::from_micros(300), Nanos::from_millis(3), 32);
    let mut arrivals = uniform(150, Nanos::from_millis(20));
    let start = *arrivals.last().unwrap();
    arrivals.extend(uniform(250, Nanos::from_millis(1)).into_iter().map(|at| at + start));
    let mut elastic = Elastic { inferences_max: 32 };
    let elastic = simulate(&mut elastic, &profile, &Elastic::WORKERS, &arrivals, Nanos::MAX);
    let mut window = Window { batch_max: 32, wait_max: Nanos::from_millis(5) };
    let window = simulate(&mut window, &profile, &[32], &arrivals, Nanos::MAX);
    assert!(elastic.latency.mean() < window.latency.mean());
}

#[test]
fn the_adaptive_threshold_grows_slowly_and_falls_fast() {
    let profile = BatchProfile::linear(Nanos::from_micros(100), Nanos::from_millis(1), 128);
    let mut policy = Adaptive::new(AdaptiveOptions::default());
    let workers = [Worker { batch: 128, busy: true }];
    let mut now = Nanos::from_millis(5);
    let mut decide = |policy: &mut Adaptive, came: u64| {
        let waiting: VecDeque<WaitingRequest> =
            (0..came).map(|_| WaitingRequest { arrived: now, deadline: Nanos::MAX }).collect();
        let view =
            ModelView { waiting: &waiting, workers: &workers, profile: &profile, running: 0 };
        policy.decide(now, &view, &mut Vec::new());
        now += Nanos::from_millis(5);
        policy.threshold()
    };
    assert_eq!(decide(&mut policy, 100), 50.0);
    assert_eq!(decide(&mut policy, 100), 75.0);
    assert_eq!(decide(&mut policy, 0), 37.5);
    let halvings = (0..10).take_while(|_| decide(&mut policy, 0) > 0.0).count();
    assert_eq!(halvings, 5);
}

/// Every policy on random loads: no request is lost, launched twice or given to a busy worker.
#[test]
fn every_policy_ends_every_request() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let profile = BatchProfile::linear(
            Nanos::from_micros(100 + random.below(2000)),
            Nanos::from_micros(random.below(20_000)),
            64,
        );
        let objective = Nanos::from_millis(20 + random.below(100));
        let arrivals = poisson(2000, Nanos::from_micros(500 + random.below(5000)), seed);
        let batch = profile.batch_for_objective(objective);
        let policies: Vec<(Box<dyn BatchPolicy>, Vec<usize>)> = vec![
            (Box::new(Window { batch_max: 32, wait_max: Nanos::from_millis(2) }), vec![32, 32]),
            (Box::new(Elastic { inferences_max: 32 }), Elastic::WORKERS.to_vec()),
            (Box::new(Adaptive::new(AdaptiveOptions::default())), vec![128]),
            (Box::new(LazyDrop { batch_max: 64 }), vec![64]),
            (Box::new(EarlyDrop { batch }), vec![64]),
            (Box::new(Deferred { batch, margin: Nanos::ZERO }), vec![64]),
        ];
        for (mut policy, workers) in policies {
            let outcome = simulate(policy.as_mut(), &profile, &workers, &arrivals, objective);
            assert_eq!(outcome.dropped as u64 + outcome.latency.count(), 2000, "{}", policy.name());
        }
    }
}
