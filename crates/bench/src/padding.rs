//! Kernel padding on a real GPU, compared with other methods: which best-effort tiles are fused
//! with which real-time kernel (REEF, section 5.2).
//!
//! The choice is that of `runtime::policy::padding`, made for steps as measured on the GPU.

mod report;

use std::collections::BTreeSet;

use base::Nanos;
use device::sim::KernelProfile;
use runtime::policy::padding::{Candidate, Host, PaddingRules, Room, Slowdowns, select};

pub use report::{
    FusedKernelReport, FusionReport, MethodReport, MethodSummary, PaddingReport, PairReport,
    SlowdownRatios, TimingSummary, summaries, table,
};

/// A measured launch of a network's step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredStep {
    /// Number of its kernel.
    pub kernel: usize,
    /// Blocks, one per tile.
    pub tiles: u32,
    /// Blocks of a thread block cluster; 1 for none.
    pub cluster: u32,
    /// Microseconds alone.
    pub us: f64,
    /// Blocks that fit on an SM.
    pub blocks_per_multiprocessor: u32,
}

/// Consecutive tiles of a best-effort step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileRange {
    /// The step.
    pub step: usize,
    /// The first tile.
    pub first_tile: u32,
    /// Number of tiles.
    pub tiles: u32,
}

/// Limits of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedRoundLimits {
    /// SMs of the GPU.
    pub multiprocessors: u32,
    /// Replays of the real-time network before best effort starts over.
    pub replays_max: usize,
    /// Fused kernels; a step that would need another one is launched alone.
    pub kernels_max: usize,
}

/// Replays of the real-time network; best effort continues from each to the next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FusedRound {
    /// For every replay and each of its steps, the tiles that are fused with it.
    pub replays: Vec<Vec<Option<TileRange>>>,
    /// The first tiles missing after the last replay, unless a run has just ended.
    pub unfinished: Option<TileRange>,
    /// Best-effort runs per replay, steps weighted by their time alone.
    pub progress: Vec<f64>,
    /// Fused kernels: numbers of the real-time and the best-effort kernel.
    pub kernels: BTreeSet<(usize, usize)>,
    /// Launches that are not fused because there are too many kernels.
    pub kernels_refused: usize,
}

/// The next tile of best effort.
#[derive(Clone, Copy, PartialEq, Eq)]
struct TilePosition {
    step: usize,
    tile: u32,
}

/// The start of a run.
const START: TilePosition = TilePosition { step: 0, tile: 0 };

/// Pads replays of `real_time` with tiles of `best_effort` until a run of it ends with a replay,
/// none of its tiles fits, or the limit is reached.
pub fn round(
    real_time: &[MeasuredStep],
    best_effort: &[MeasuredStep],
    limits: FusedRoundLimits,
) -> FusedRound {
    let mut padder = ReplayPadder {
        hosts: real_time.iter().map(|step| profile(step, step.tiles, limits)).collect(),
        real_time,
        best_effort,
        limits,
        at: START,
        round: FusedRound::default(),
    };
    loop {
        let before = padder.at;
        let replay: Vec<Option<TileRange>> =
            (0..real_time.len()).map(|step| padder.pad(step)).collect();
        let stuck = replay.iter().all(Option::is_none);
        if !stuck || padder.round.replays.is_empty() {
            padder.round.progress.push(progress(&replay, best_effort));
            padder.round.replays.push(replay);
        }
        debug_assert!(!stuck || before == padder.at, "nothing was chosen");
        let enough = padder.round.replays.len() >= limits.replays_max.max(1);
        if stuck || enough || padder.at == START {
            return padder.end();
        }
    }
}

struct ReplayPadder<'a> {
    real_time: &'a [MeasuredStep],
    hosts: Vec<KernelProfile>,
    best_effort: &'a [MeasuredStep],
    limits: FusedRoundLimits,
    at: TilePosition,
    round: FusedRound,
}

impl ReplayPadder<'_> {
    /// The tiles to fuse with step `step` of real time.
    fn pad(&mut self, step: usize) -> Option<TileRange> {
        let host = &self.real_time[step];
        let guest = self.best_effort.get(self.at.step)?;
        // A cluster's blocks are launched together, so a fused kernel cannot have one.
        if host.cluster > 1 || guest.cluster > 1 {
            return None;
        }
        let left = guest.tiles - self.at.tile;
        let tiles = self.choose(step, guest, left).min(left);
        if tiles == 0 {
            return None;
        }
        let kernels = (host.kernel, guest.kernel);
        let below_limit = self.round.kernels.len() < self.limits.kernels_max;
        if !below_limit && !self.round.kernels.contains(&kernels) {
            self.round.kernels_refused += 1;
            return None;
        }
        self.round.kernels.insert(kernels);
        let slice = TileRange { step: self.at.step, first_tile: self.at.tile, tiles };
        self.at.tile += tiles;
        if self.at.tile == guest.tiles {
            let next = self.at.step + 1;
            self.at = TilePosition { step: next % self.best_effort.len(), tile: 0 };
        }
        Some(slice)
    }

    /// The number of tiles of `guest` that the policy selects, of `left` remaining ones.
    fn choose(&self, step: usize, guest: &MeasuredStep, left: u32) -> u32 {
        let (sms, none) = (self.limits.multiprocessors, Nanos(0));
        let room = Room { sms, launch: none, gap: none, inside_tile: false };
        let host = Host { model: 0, kernels: &self.hosts, step, ready: true, elapsed: none };
        let kernel = profile(guest, left, self.limits);
        let candidate = Candidate { queue: 0, model: 1, kernel, taken: 0 };
        let mut grants = Vec::with_capacity(1);
        let known = Slowdowns::default();
        select(PaddingRules::REEF, room, host, &[candidate], &known, &mut grants);
        grants.first().map_or(0, |grant| grant.blocks)
    }

    fn end(mut self) -> FusedRound {
        if self.at != START {
            let TilePosition { step, tile } = self.at;
            let tiles = self.best_effort[step].tiles - tile;
            self.round.unfinished = Some(TileRange { step, first_tile: tile, tiles });
        }
        self.round
    }
}

/// The profile of `left` tiles of `step`. Its block time is the step's time over the number of
/// waves.
fn profile(step: &MeasuredStep, left: u32, limits: FusedRoundLimits) -> KernelProfile {
    let occupancy = step.blocks_per_multiprocessor.max(1);
    let at_once = limits.multiprocessors.max(1).saturating_mul(occupancy);
    let waves = step.tiles.div_ceil(at_once).max(1);
    KernelProfile {
        blocks: left,
        block_ns: (step.us * 1e3 / f64::from(waves)).max(1.0) as u64,
        occupancy,
        memory_share: 0.0,
        idempotent: true,
    }
}

/// The share of a run of `best_effort` that the tiles are.
fn progress(slices: &[Option<TileRange>], best_effort: &[MeasuredStep]) -> f64 {
    let whole: f64 = best_effort.iter().map(|step| step.us).sum();
    let of = |slice: &TileRange| {
        let step = &best_effort[slice.step];
        step.us * f64::from(slice.tiles) / f64::from(step.tiles.max(1))
    };
    slices.iter().flatten().map(of).sum::<f64>() / whole.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests;
