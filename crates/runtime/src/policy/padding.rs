//! Padding: which best-effort kernels run beside a real-time kernel, on how many multiprocessors.

use base::Nanos;
use device::profile::KernelProfile;

/// Models the table of slowdowns tells apart; more of them share rows.
const MODELS: usize = 64;

/// A pair that costs real time more than this is not made again.
const SLOWDOWN_MAX: f32 = 1.01;

/// Above this share of the bandwidth a kernel counts as memory-bound.
const MEMORY_BOUND: f32 = 0.5;

/// Two kernels may ask for this much of the bandwidth together.
const MEMORY_MAX: f32 = 0.95;

/// What may be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingRules {
    /// Blocks are fused with the real-time kernel, which ends when they do: they must be shorter (rule 1) and of no
    /// lower occupancy (rule 2). Otherwise best effort keeps running inside a budget.
    pub fused: bool,
    /// Pairs of memory-bound kernels are refused.
    pub mind_memory: bool,
    /// Pairs that were seen to cost real time are refused.
    pub learn: bool,
}

impl PaddingRules {
    /// Section 5.2 of the paper.
    pub const REEF: PaddingRules = PaddingRules { fused: true, mind_memory: false, learn: false };
    /// Budgets, with memory and experience taken into account.
    pub const ATOLL: PaddingRules = PaddingRules { fused: false, mind_memory: true, learn: true };
}

/// The device as padding sees it.
#[derive(Clone, Copy, Debug)]
pub struct PaddingDevice {
    /// Multiprocessors.
    pub sms: u32,
    /// From a launch to its first kernel.
    pub launch: Nanos,
    /// Between two kernels of a stream.
    pub gap: Nanos,
    /// Whether running blocks can leave in the middle.
    pub inside_tile: bool,
}

/// The real-time task.
#[derive(Clone, Copy, Debug)]
pub struct PaddedTask<'a> {
    /// Its model.
    pub model: usize,
    /// Its kernels.
    pub kernels: &'a [KernelProfile],
    /// The one that runs, or comes first.
    pub step: usize,
    /// Whether it runs.
    pub ready: bool,
    /// For how long it has, or since when the task has been launched.
    pub elapsed: Nanos,
}

/// A best-effort kernel that could run beside it.
#[derive(Clone, Copy, Debug)]
pub struct PaddingCandidate {
    /// Its queue.
    pub queue: usize,
    /// Its model.
    pub model: usize,
    /// The kernel.
    pub kernel: KernelProfile,
    /// Multiprocessors it was given before.
    pub taken: u32,
}

/// What a queue is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingGrant {
    /// The queue.
    pub queue: usize,
    /// Multiprocessors it may hold.
    pub hold: u32,
    /// Multiprocessors up to which it may place new blocks.
    pub take: u32,
    /// Blocks it may place.
    pub blocks: u32,
    /// After which time that shrinks by itself, and to how many multiprocessors.
    pub expiry: Option<(Nanos, u32)>,
}

impl PaddingGrant {
    fn none(queue: usize) -> PaddingGrant {
        PaddingGrant { queue, hold: 0, take: 0, blocks: 0, expiry: None }
    }
}

/// Chooses for one real-time kernel. Appends one grant per candidate.
pub fn select(
    rules: PaddingRules,
    room: PaddingDevice,
    host: PaddedTask<'_>,
    candidates: &[PaddingCandidate],
    slowdowns: &PairSlowdowns,
    grants: &mut Vec<PaddingGrant>,
) {
    let Some(real_time) = host.kernels.get(host.step) else { return };
    if rules.fused {
        let mut left = room.sms.saturating_sub(real_time.sms());
        for candidate in candidates {
            let grant = fused(room, real_time, candidate, left);
            // The fused kernel has room for one function beside real time's.
            left = if grant.hold > 0 { 0 } else { left };
            grants.push(grant);
        }
        return;
    }
    let first = grants.len();
    // Until a budget is made of them, `blocks` holds the multiprocessors a candidate can use.
    let usable = |kernel: &KernelProfile| kernel.sms().clamp(1, room.sms.max(1));
    grants.extend(candidates.iter().map(|candidate| PaddingGrant {
        blocks: usable(&candidate.kernel),
        ..PaddingGrant::none(candidate.queue)
    }));
    let grants = &mut grants[first..];
    let beside = |step: usize| {
        let seen = if rules.learn { slowdowns.row(host.model, step) } else { &[] };
        host.kernels.get(step).map(|kernel| Space::beside(kernel, room, seen))
    };
    let mut now = beside(host.step).filter(|_| host.ready);
    let mut then = beside(host.step + usize::from(host.ready));
    // What runs stays where there is room for it; only then does anybody get more.
    for more in [false, true] {
        for (candidate, grant) in candidates.iter().zip(&mut *grants) {
            let most = if more { grant.blocks } else { candidate.taken.min(grant.blocks) };
            if most > 0 {
                let each = candidate.kernel.memory_share / grant.blocks as f32;
                now.iter_mut().for_each(|space| space.give(candidate, each, most, &mut grant.take));
                then.iter_mut()
                    .for_each(|space| space.give(candidate, each, most, &mut grant.hold));
            }
        }
    }
    let lasts = match host.ready {
        true => real_time.time_on(room.sms) + room.gap,
        false => room.launch,
    };
    let remaining = lasts.since(host.elapsed);
    for (candidate, grant) in candidates.iter().zip(grants) {
        budget(room, host, candidate, remaining, grant);
    }
}

/// What a real-time kernel leaves to others.
struct Space<'a> {
    sms: u32,
    bandwidth: f32,
    memory_bound: bool,
    /// What was seen beside it, by model.
    seen: &'a [f32],
}

impl<'a> Space<'a> {
    fn beside(kernel: &KernelProfile, room: PaddingDevice, seen: &'a [f32]) -> Space<'a> {
        Space {
            sms: room.sms.saturating_sub(kernel.sms()),
            bandwidth: MEMORY_MAX - kernel.memory_share,
            memory_bound: kernel.memory_share >= MEMORY_BOUND,
            seen,
        }
    }

    /// Raises what a candidate is given to at most `most` multiprocessors. What it draws from memory goes with how
    /// many it runs on: `each` on every one.
    fn give(&mut self, candidate: &PaddingCandidate, each: f32, most: u32, given: &mut u32) {
        let both = self.memory_bound && candidate.kernel.memory_share >= MEMORY_BOUND;
        if self.sms == 0 || both || banned(self.seen, candidate.model) {
            return;
        }
        let mut more = most.saturating_sub(*given).min(self.sms);
        if each * more as f32 > self.bandwidth {
            more = (self.bandwidth.max(0.0) / each) as u32;
        }
        self.bandwidth -= each * more as f32;
        self.sms -= more;
        *given += more;
    }
}

/// Rules 1 and 2: as many rounds of blocks as end before the real-time kernel does, of a kernel that needs no
/// more registers.
fn fused(
    room: PaddingDevice,
    real_time: &KernelProfile,
    candidate: &PaddingCandidate,
    left: u32,
) -> PaddingGrant {
    let kernel = &candidate.kernel;
    let rounds = real_time.time_on(room.sms).0 / kernel.block_ns.max(1);
    let blocks_each = u32::try_from(rounds).unwrap_or(u32::MAX).saturating_mul(kernel.occupancy);
    if blocks_each == 0 || kernel.occupancy < real_time.occupancy {
        return PaddingGrant::none(candidate.queue);
    }
    let sms = kernel.blocks.div_ceil(blocks_each).min(left);
    let blocks = sms.saturating_mul(blocks_each).min(kernel.blocks);
    PaddingGrant { queue: candidate.queue, hold: sms, take: sms, blocks, expiry: None }
}

/// From what there is room for now (`take`) and beside the next real-time kernel (`hold`) to a budget: all of the
/// first until that kernel comes, then the second. Before real time begins, everybody keeps what he has. Where blocks cannot stop in the middle, only those begin that
/// end in time, and those that run stay while there is room.
fn budget(
    room: PaddingDevice,
    host: PaddedTask<'_>,
    candidate: &PaddingCandidate,
    remaining: Nanos,
    grant: &mut PaddingGrant,
) {
    let coming = grant.hold;
    let left = if host.ready { grant.take } else { candidate.taken };
    grant.blocks = u32::MAX;
    if room.inside_tile {
        let last = host.ready && host.step + 1 == host.kernels.len();
        (grant.hold, grant.take) = (left, left);
        grant.expiry = (!last && coming < left).then_some((remaining, coming));
        return;
    }
    grant.take = if Nanos(candidate.kernel.block_ns) <= remaining { left } else { 0 };
    grant.hold = grant.take.max(candidate.taken.min(left));
}

/// How much slower real-time kernels were seen to run beside which models.
#[derive(Clone, Debug, Default)]
pub struct PairSlowdowns {
    /// By real-time model, then kernel and best-effort model; averages that start at 1.
    rows: Vec<Vec<f32>>,
}

impl PairSlowdowns {
    /// Makes room for a model of `steps` kernels, with nothing known of it.
    pub fn ensure(&mut self, model: usize, steps: usize) {
        if model >= self.rows.len() {
            self.rows.resize(model + 1, Vec::new());
        }
        self.rows[model] = vec![1.0; steps * MODELS];
    }

    /// Kernel `step` of `host` took `ratio` times as long as alone beside the models in the bit set `co_run`.
    pub fn record(&mut self, host: usize, step: usize, co_run: u64, ratio: f32) {
        let Some(row) = self.rows.get_mut(host) else { return };
        let Some(cells) = row.get_mut(step * MODELS..(step + 1) * MODELS) else { return };
        // One stray measurement is not enough for a ban.
        let ratio = ratio.clamp(1.0, 1.03);
        for (model, cell) in cells.iter_mut().enumerate() {
            if co_run & (1 << model) != 0 {
                *cell = 0.7 * *cell + 0.3 * ratio;
            }
        }
    }

    /// What was seen beside kernel `step` of `host`, by model; empty when nothing is known of it.
    fn row(&self, host: usize, step: usize) -> &[f32] {
        let cells = step * MODELS..(step + 1) * MODELS;
        self.rows.get(host).and_then(|row| row.get(cells)).unwrap_or_default()
    }

    /// Whether the pair has cost real time too much.
    pub fn banned(&self, host: usize, step: usize, model: usize) -> bool {
        banned(self.row(host, step), model)
    }

    /// The bit that stands for a model in [`PairSlowdowns::record`].
    pub fn bit(model: usize) -> u64 {
        1 << (model % MODELS)
    }
}

fn banned(row: &[f32], model: usize) -> bool {
    row.get(model % MODELS).is_some_and(|ratio| *ratio > SLOWDOWN_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: PaddingDevice =
        PaddingDevice { sms: 60, launch: Nanos(20), gap: Nanos(0), inside_tile: true };

    fn kernel(sms: u32, block_ns: u64, occupancy: u32, memory_share: f32) -> KernelProfile {
        let blocks = sms * occupancy;
        KernelProfile { blocks, block_ns, occupancy, memory_share, idempotent: true }
    }

    fn choose(
        rules: PaddingRules,
        host: PaddedTask<'_>,
        best_effort: &[(KernelProfile, u32)],
    ) -> Vec<PaddingGrant> {
        let of = |(queue, (kernel, taken)): (usize, &(KernelProfile, u32))| PaddingCandidate {
            queue,
            model: 1 + queue,
            kernel: *kernel,
            taken: *taken,
        };
        let candidates: Vec<PaddingCandidate> = best_effort.iter().enumerate().map(of).collect();
        let mut grants = Vec::new();
        select(rules, ROOM, host, &candidates, &PairSlowdowns::default(), &mut grants);
        grants
    }

    fn running(kernels: &[KernelProfile]) -> PaddedTask<'_> {
        PaddedTask { model: 0, kernels, step: 0, ready: true, elapsed: Nanos(40) }
    }

    #[test]
    fn one_kernel_of_shorter_blocks_and_higher_occupancy_is_fused() {
        let real_time = [kernel(40, 100, 4, 0.2)];
        let candidates = [
            (kernel(10, 120, 4, 0.1), 0),
            (kernel(10, 50, 2, 0.1), 0),
            (kernel(15, 50, 4, 0.1), 0),
            (kernel(5, 90, 8, 0.9), 0),
        ];
        let grants = choose(PaddingRules::REEF, running(&real_time), &candidates);
        // Two rounds of its blocks end in time, so half the multiprocessors will do.
        let given: Vec<(u32, u32)> =
            grants.iter().map(|grant| (grant.take, grant.blocks)).collect();
        assert_eq!(given, [(0, 0), (0, 0), (8, 60), (0, 0)]);
    }

    #[test]
    fn budgets_shrink_when_the_next_kernel_comes_and_mind_memory() {
        let real_time = [kernel(40, 100, 4, 0.6), kernel(55, 100, 4, 0.2)];
        let (short, long) = (kernel(12, 90, 4, 0.1), kernel(20, 150, 1, 0.1));
        let hungry = kernel(5, 10, 4, 0.6);
        let given = |best_effort: &[(KernelProfile, u32)]| -> Vec<(u32, Option<(Nanos, u32)>)> {
            let grants = choose(PaddingRules::ATOLL, running(&real_time), best_effort);
            grants.iter().map(|grant| (grant.take, grant.expiry)).collect()
        };
        let until = |sms: u32| Some((Nanos(60), sms));
        // Memory-bound beside memory-bound gets nothing now, and the multiprocessors are gone then.
        assert_eq!(
            given(&[(short, 0), (long, 0), (hungry, 0)]),
            [(12, until(5)), (8, until(0)), (0, None)]
        );
        // Who runs already keeps what he has before others get more.
        assert_eq!(given(&[(short, 0), (long, 15)]), [(5, until(0)), (15, until(5))]);
        // A kernel's share of the bandwidth goes with its multiprocessors: of 0.35 that are left, 0.3 are 10.
        assert_eq!(given(&[(kernel(15, 90, 4, 0.45), 0)]), [(11, until(5))]);
    }

    #[test]
    fn before_real_time_begins_budgets_end_with_its_launch() {
        let real_time = [kernel(50, 100, 4, 0.1)];
        let host = PaddedTask { ready: false, elapsed: Nanos(5), ..running(&real_time) };
        let grants = choose(PaddingRules::ATOLL, host, &[(kernel(30, 100, 4, 0.1), 25)]);
        assert_eq!((grants[0].take, grants[0].expiry), (25, Some((Nanos(15), 10))));
    }

    #[test]
    fn pairs_that_cost_real_time_are_banned() {
        let mut slowdowns = PairSlowdowns::default();
        slowdowns.ensure(0, 3);
        slowdowns.record(0, 2, PairSlowdowns::bit(7), 40.0);
        assert!(!slowdowns.banned(0, 2, 7), "one stray measurement");
        slowdowns.record(0, 2, PairSlowdowns::bit(7), 1.5);
        assert!(slowdowns.banned(0, 2, 7));
        assert!(!slowdowns.banned(0, 1, 7) && !slowdowns.banned(0, 2, 8));
    }
}
