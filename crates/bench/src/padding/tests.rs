use super::*;
use base::Random;

const H200: FusedRoundLimits =
    FusedRoundLimits { multiprocessors: 132, replays_max: 8, kernels_max: 1000 };

fn step(kernel: usize, tiles: u32, us: f64, blocks: u32) -> MeasuredStep {
    MeasuredStep { kernel, tiles, cluster: 1, us, blocks_per_multiprocessor: blocks }
}

/// Faults of a round, found without knowing how it was made.
fn faults(
    round: &FusedRound,
    real_time: &[MeasuredStep],
    best_effort: &[MeasuredStep],
    limits: FusedRoundLimits,
) -> Vec<String> {
    let mut faults = Vec::new();
    let mut fault = |text: String| faults.push(text);
    // Tiles in the order in which they must be done: all of a step, then all of the next, over and
    // over.
    let mut expected = (0..best_effort.len())
        .cycle()
        .flat_map(|step| (0..best_effort[step].tiles).map(move |tile| (step, tile)))
        .peekable();
    let mut kernels = BTreeSet::new();
    for (number, replay) in round.replays.iter().enumerate() {
        if replay.len() != real_time.len() {
            fault(format!("replay {number} has {} steps", replay.len()));
        }
        for (host, slice) in real_time.iter().zip(replay) {
            let Some(slice) = slice else { continue };
            let guest = &best_effort[slice.step];
            for tile in 0..slice.tiles {
                let done = (slice.step, slice.first_tile + tile);
                if expected.next() != Some(done) {
                    fault(format!("replay {number}: {done:?} is not the next tile"));
                }
            }
            kernels.insert((host.kernel, guest.kernel));
            if slice.tiles == 0 || host.cluster > 1 || guest.cluster > 1 {
                fault(format!("replay {number}: nothing, or a cluster"));
            }
            if guest.blocks_per_multiprocessor < host.blocks_per_multiprocessor {
                fault(format!("replay {number}: rule 2"));
            }
            if !fits(host, guest, slice.tiles, limits) {
                fault(format!("replay {number}: rule 1"));
            }
        }
    }
    let next = expected.next().expect("tiles without end");
    let stands = round.unfinished.map_or((0, 0), |slice| (slice.step, slice.first_tile));
    let left = round.unfinished.map(|slice| best_effort[slice.step].tiles - slice.first_tile);
    if stands != next || left != round.unfinished.map(|slice| slice.tiles) {
        fault(format!("it stands at {stands:?} and not at {next:?}"));
    }
    if kernels != round.kernels || kernels.len() > limits.kernels_max {
        fault("other kernels than the slices need".to_string());
    }
    if round.replays.len() > limits.replays_max || round.progress.len() != round.replays.len() {
        fault("too many replays".to_string());
    }
    faults
}

/// Whether `tiles` of `guest`, in waves on the SMs that `host` leaves idle, end before `host` does.
fn fits(host: &MeasuredStep, guest: &MeasuredStep, tiles: u32, limits: FusedRoundLimits) -> bool {
    let held = f64::from(host.tiles) / f64::from(host.blocks_per_multiprocessor);
    let free = f64::from(limits.multiprocessors) - held.ceil();
    let a_wave = f64::from(limits.multiprocessors * guest.blocks_per_multiprocessor);
    let block_us = guest.us / (f64::from(guest.tiles) / a_wave).ceil();
    let waves = (f64::from(tiles) / (free * f64::from(guest.blocks_per_multiprocessor))).ceil();
    // The policy counts in whole nanoseconds.
    free > 0.0 && waves * block_us <= host.us + waves * 0.001
}

fn network(random: &mut Random, steps: usize) -> Vec<MeasuredStep> {
    let mut one = || {
        let mut below = |most: u64| random.below(most);
        let (kernel, tiles) = (below(12) as usize, 1 + below(400) as u32);
        let (us, blocks) = (1.5 + below(300) as f64 / 10.0, 1 + below(6) as u32);
        let cluster = if below(5) == 0 { 4 } else { 1 };
        MeasuredStep { cluster, ..step(kernel, tiles, us, blocks) }
    };
    (0..steps).map(|_| one()).collect()
}

#[test]
fn rounds_follow_the_rules() {
    let mut random = Random::new(7);
    let (mut slices, mut restarts, mut refused) = (0, 0, 0);
    for case in 0..400 {
        let (hosts, guests) = (1 + case % 40, 1 + case % 17);
        let real_time = network(&mut random, hosts);
        let mut best_effort = network(&mut random, guests);
        best_effort.iter_mut().for_each(|step| step.cluster = 1);
        let kernels_max = if case % 3 == 0 { 5 } else { 1000 };
        let limits = FusedRoundLimits { kernels_max, ..H200 };
        let round = round(&real_time, &best_effort, limits);
        assert_eq!(
            faults(&round, &real_time, &best_effort, limits),
            Vec::<String>::new(),
            "{case}"
        );
        let all = || round.replays.iter().flatten().flatten();
        slices += all().count();
        restarts += all().filter(|slice| slice.step == 0 && slice.first_tile == 0).count();
        refused += round.kernels_refused;
    }
    assert!(slices > 2000 && restarts > 300 && refused > 100, "{slices} {restarts} {refused}");
}

#[test]
fn checker_finds_planted_faults() {
    let real_time = [step(0, 66, 10.0, 2), step(1, 40, 20.0, 1)];
    let best_effort = [step(2, 300, 6.0, 4), step(3, 900, 9.0, 2)];
    let sound = round(&real_time, &best_effort, H200);
    assert_eq!(faults(&sound, &real_time, &best_effort, H200), Vec::<String>::new());
    let broken = |change: fn(&mut TileRange)| {
        let mut round = sound.clone();
        let first = round.replays[0].iter_mut().flatten().next().expect("a slice");
        change(first);
        !faults(&round, &real_time, &best_effort, H200).is_empty()
    };
    assert!(broken(|slice| slice.tiles += 1), "a tile twice");
    assert!(broken(|slice| slice.tiles -= 1), "a tile never");
    assert!(broken(|slice| slice.step = 1), "two steps at once");
    let faster = [step(0, 66, 1.0, 2), real_time[1]];
    assert!(!faults(&sound, &faster, &best_effort, H200).is_empty(), "rule 1");
    let denser = [step(0, 66, 10.0, 5), real_time[1]];
    assert!(!faults(&sound, &denser, &best_effort, H200).is_empty(), "rule 2");
}

#[test]
fn best_effort_continues_across_replays() {
    // Ten SMs are idle for one wave of four blocks each.
    let real_time = [step(0, 122, 5.0, 1)];
    let best_effort = [step(1, 100, 5.0, 4), step(2, 40, 5.0, 4)];
    let round = round(&real_time, &best_effort, H200);
    let slices: Vec<TileRange> = round.replays.iter().flatten().flatten().copied().collect();
    let of = |step, first_tile, tiles| TileRange { step, first_tile, tiles };
    assert_eq!(slices, [of(0, 0, 40), of(0, 40, 40), of(0, 80, 20), of(1, 0, 40)]);
    assert_eq!((round.unfinished, round.replays.len()), (None, 4));
    let want = [0.2, 0.2, 0.1, 0.5];
    assert!(round.progress.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-9));
}

#[test]
fn a_step_that_fits_nowhere_ends_the_round() {
    let real_time = [step(0, 122, 5.0, 1)];
    let long = [step(1, 40, 5.0, 4), step(2, 40, 50.0, 4)];
    let round = round(&real_time, &long, H200);
    assert_eq!(round.replays.len(), 1);
    assert_eq!(round.unfinished, Some(TileRange { step: 1, first_tile: 0, tiles: 40 }));
    let none = super::round(&real_time, &long[1..], H200);
    assert_eq!((none.replays, none.unfinished), (vec![vec![None]], None));
    assert_eq!(super::round(&real_time, &[], H200).replays, [[None]]);
}
