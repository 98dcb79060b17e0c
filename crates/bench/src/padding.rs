//! Padding on a real GPU, compared: which best-effort tiles go with which real-time kernel when both are one launch (REEF, section
//! 5.2), and what that gives beside other ways of running both.
//!
//! Who goes with whom is the node's own choice, `runtime::policy::padding`, made from steps as a GPU measured them.

mod report;

use std::collections::BTreeSet;

use base::Nanos;
use device::sim::KernelProfile;
use runtime::policy::padding::{Candidate, Host, PaddingRules, Room, Slowdowns, select};

pub use report::{
    FusedKernelReport, FusionReport, MethodReport, MethodSummary, PaddingReport, PairReport,
    SlowdownRatios, TimingSummary, summaries, table,
};

/// One launch of a network's step, as it was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredStep {
    /// Its kernel, among all there are.
    pub kernel: usize,
    /// Blocks, one a tile.
    pub tiles: u32,
    /// Blocks that must run together; 1 for none.
    pub cluster: u32,
    /// Microseconds alone.
    pub us: f64,
    /// Blocks a multiprocessor holds.
    pub blocks_per_multiprocessor: u32,
}

/// Tiles of a best-effort step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileRange {
    /// The step.
    pub step: usize,
    /// The first of them.
    pub first_tile: u32,
    /// How many.
    pub tiles: u32,
}

/// How much is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedRoundLimits {
    /// Multiprocessors of the GPU.
    pub multiprocessors: u32,
    /// Replays of the real-time network before best effort begins anew.
    pub replays_max: usize,
    /// Kernels made of two; steps that would need another are launched alone.
    pub kernels_max: usize,
}

/// Replays of the real-time network with best effort going on from each to the next.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FusedRound {
    /// For every replay and each step of it, what is launched with it.
    pub replays: Vec<Vec<Option<TileRange>>>,
    /// The first tile that is missing behind the last replay, unless a run has just ended.
    pub unfinished: Option<TileRange>,
    /// Best effort of each replay in runs of the network, steps weighted by their time alone.
    pub progress: Vec<f64>,
    /// Kernels that are made of two: real time's and best effort's.
    pub kernels: BTreeSet<(usize, usize)>,
    /// Choices that were not made for want of a kernel.
    pub kernels_refused: usize,
}

/// Where best effort stands.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Position {
    step: usize,
    tile: u32,
}

/// The start of a run.
const START: Position = Position { step: 0, tile: 0 };

/// Pads replays of `real_time` with tiles of `best_effort` until a run of it ends with a replay, none of its tiles fits any
/// more, or there are enough.
pub fn round(
    real_time: &[MeasuredStep],
    best_effort: &[MeasuredStep],
    limits: FusedRoundLimits,
) -> FusedRound {
    let mut padder = Padder {
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

struct Padder<'a> {
    real_time: &'a [MeasuredStep],
    hosts: Vec<KernelProfile>,
    best_effort: &'a [MeasuredStep],
    limits: FusedRoundLimits,
    at: Position,
    round: FusedRound,
}

impl Padder<'_> {
    /// What goes with step `step` of real time.
    fn pad(&mut self, step: usize) -> Option<TileRange> {
        let host = &self.real_time[step];
        let guest = self.best_effort.get(self.at.step)?;
        // Blocks of a cluster are launched together, and so would best effort's be.
        if host.cluster > 1 || guest.cluster > 1 {
            return None;
        }
        let left = guest.tiles - self.at.tile;
        let tiles = self.choose(step, guest, left).min(left);
        if tiles == 0 {
            return None;
        }
        let kernels = (host.kernel, guest.kernel);
        let room = self.round.kernels.len() < self.limits.kernels_max;
        if !room && !self.round.kernels.contains(&kernels) {
            self.round.kernels_refused += 1;
            return None;
        }
        self.round.kernels.insert(kernels);
        let slice = TileRange { step: self.at.step, first_tile: self.at.tile, tiles };
        self.at.tile += tiles;
        if self.at.tile == guest.tiles {
            let next = self.at.step + 1;
            self.at = Position { step: next % self.best_effort.len(), tile: 0 };
        }
        Some(slice)
    }

    /// Tiles of `guest` that the node's policy would give, of which `left` are to be done.
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
            let Position { step, tile } = self.at;
            let tiles = self.best_effort[step].tiles - tile;
            self.round.unfinished = Some(TileRange { step, first_tile: tile, tiles });
        }
        self.round
    }
}

/// `left` tiles of `step` as the policy sees them. A step's time is that of as many blocks in a row as a multiprocessor has to do.
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

/// How much of a run of `best_effort` the slices are.
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
