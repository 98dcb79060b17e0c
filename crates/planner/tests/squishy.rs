//! Exact squishy packing against brute force, against the greedy one, and at the size for which the
//! paper's solver took hours.

use base::{Clock, MonotonicClock, Random};
use planner::squishy::{Session, check, exact, pack};

/// Sessions of Nexus's kind: linear batching profiles, each below one GPU.
fn sessions(seed: u64, count: usize) -> Vec<Session> {
    let mut random = Random::new(seed);
    (0..count)
        .map(|index| {
            let fixed = 3.0 + 12.0 * random.unit_f64();
            let slope = 0.3 + 2.0 * random.unit_f64();
            let curve: Vec<(u32, f64)> =
                (1..=64).map(|batch| (batch, fixed + slope * f64::from(batch))).collect();
            let slo_ms = 60.0 + 200.0 * random.unit_f64();
            let mut session = Session { name: format!("s{index}"), rate: 1.0, slo_ms, curve };
            let max = session.throughput().unwrap();
            session.rate = max * (0.05 + 0.45 * random.unit_f64());
            session
        })
        .collect()
}

/// Whether the members fit one GPU, over a fine grid of cycles and every cycle at which a batch
/// fills up.
fn fits(sessions: &[&Session]) -> bool {
    let mut cycles: Vec<f64> = (1..2000).map(|tenth| f64::from(tenth) * 0.15).collect();
    for session in sessions {
        for &(batch, ms) in &session.curve {
            cycles.extend([f64::from(batch) / session.rate * 1000.0, session.slo_ms - ms]);
        }
    }
    cycles.into_iter().filter(|cycle| *cycle > 0.0).any(|cycle| {
        let turn = |session: &&Session| {
            let (_, ms) = session.latency_ms(session.rate * cycle / 1000.0)?;
            (cycle + ms <= session.slo_ms * (1.0 + 1e-9)).then_some(ms)
        };
        let turns: Option<Vec<f64>> = sessions.iter().map(turn).collect();
        turns.is_some_and(|turns| turns.iter().sum::<f64>() <= cycle * (1.0 + 1e-9))
    })
}

/// Fewest sets over all subsets.
fn brute(sessions: &[Session]) -> usize {
    let all = (1usize << sessions.len()) - 1;
    let members = |mask: usize| -> Vec<&Session> {
        (0..sessions.len()).filter(|i| mask >> i & 1 == 1).map(|i| &sessions[i]).collect()
    };
    let feasible: Vec<bool> = (0..=all).map(|mask| mask == 0 || fits(&members(mask))).collect();
    let mut fewest = vec![usize::MAX - 1; all + 1];
    fewest[0] = 0;
    for mask in 1..=all {
        let mut sub = mask;
        while sub > 0 {
            if feasible[sub] {
                fewest[mask] = fewest[mask].min(fewest[mask & !sub] + 1);
            }
            sub = (sub - 1) & mask;
        }
    }
    fewest[all]
}

#[test]
fn small_packings_equal_brute_force() {
    for seed in 0..60 {
        let sessions = sessions(seed, 6);
        let optimum = exact::solve(&sessions).unwrap();
        assert!(check(&sessions, &optimum.nodes).is_empty(), "seed {seed}");
        assert_eq!(optimum.nodes.len(), optimum.lower_bound);
        assert_eq!(optimum.nodes.len(), brute(&sessions), "seed {seed}");
    }
}

#[test]
fn twenty_five_sessions_are_solved_to_proven_optimum() {
    for seed in 0..5 {
        let sessions = sessions(1000 + seed, 25);
        let clock = MonotonicClock::new();
        let greedy = pack(&sessions).unwrap().len();
        let optimum = exact::solve(&sessions).unwrap();
        println!(
            "25 sessions: greedy {greedy}, optimum {}, bound {}, {:.3} s",
            optimum.nodes.len(),
            optimum.lower_bound,
            clock.now().0 as f64 / 1e9
        );
        assert!(check(&sessions, &optimum.nodes).is_empty());
        assert_eq!(optimum.nodes.len(), optimum.lower_bound);
    }
}

#[test]
fn the_loss_of_greedy_packing_over_a_thousand_instances() {
    let (mut greedy, mut best, mut worse) = (0, 0, 0);
    for seed in 0..1000 {
        let sessions = sessions(5000 + seed, 12);
        let nodes = pack(&sessions).unwrap();
        assert!(check(&sessions, &nodes).is_empty(), "seed {seed}");
        let optimum = exact::solve(&sessions).unwrap();
        assert_eq!(optimum.nodes.len(), optimum.lower_bound, "seed {seed}");
        greedy += nodes.len();
        best += optimum.nodes.len();
        worse += usize::from(nodes.len() > optimum.nodes.len());
    }
    println!(
        "greedy {greedy} gpus, optimal {best}: {:.1} % lost, worse in {worse} of 1000",
        (greedy as f64 / best as f64 - 1.0) * 100.0
    );
    assert!(greedy >= best);
}
