//! Kernel padding: which best-effort kernels run beside a real-time kernel, on how many SMs.

use base::Nanos;
use device::profile::KernelProfile;

/// Models that the table of slowdowns distinguishes; more share rows.
const MODELS: usize = 64;

/// A pair that slows real time down by more is not used again.
const SLOWDOWN_MAX: f32 = 1.01;

/// Above this share of the bandwidth a kernel counts as memory-bound.
const MEMORY_BOUND: f32 = 0.5;

/// Share of the bandwidth that two kernels may use together.
const MEMORY_MAX: f32 = 0.95;

/// Which kernels may pad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingRules {
    /// Blocks are fused with the real-time kernel, which ends with them: they must be shorter (rule
    /// 1) and of no lower occupancy (rule 2). Otherwise best effort runs within a budget.
    pub fused: bool,
    /// Pairs of memory-bound kernels are refused.
    pub mind_memory: bool,
    /// Pairs that were measured to slow real time down are refused.
    pub learn: bool,
}

impl PaddingRules {
    /// Section 5.2 of the REEF paper.
    pub const REEF: PaddingRules = PaddingRules { fused: true, mind_memory: false, learn: false };
    /// Budgets that respect memory bandwidth and measured slowdowns.
    pub const ATOLL: PaddingRules = PaddingRules { fused: false, mind_memory: true, learn: true };
}

/// The device, for padding.
#[derive(Clone, Copy, Debug)]
pub struct PaddingDevice {
    /// Number of SMs.
    pub sms: u32,
    /// From a launch to its first kernel.
    pub launch: Nanos,
    /// Between two kernels of a stream.
    pub gap: Nanos,
    /// Whether running blocks are preempted inside tiles.
    pub inside_tile: bool,
}

/// The real-time task.
#[derive(Clone, Copy, Debug)]
pub struct PaddedTask<'a> {
    /// Its model.
    pub model: usize,
    /// Its kernels.
    pub kernels: &'a [KernelProfile],
    /// The running kernel, or the first one.
    pub step: usize,
    /// Whether it runs.
    pub ready: bool,
    /// Time since it started, or since the launch of the task.
    pub elapsed: Nanos,
}

/// A best-effort kernel that may run beside it.
#[derive(Clone, Copy, Debug)]
pub struct PaddingCandidate {
    /// Its queue.
    pub queue: usize,
    /// Its model.
    pub model: usize,
    /// The kernel.
    pub kernel: KernelProfile,
    /// SMs it had before.
    pub taken: u32,
}

/// What a queue gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddingGrant {
    /// The queue.
    pub queue: usize,
    /// SMs it may hold.
    pub hold: u32,
    /// SMs up to which it may place new blocks.
    pub take: u32,
    /// Blocks it may place.
    pub blocks: u32,
    /// After which time the budget shrinks, and to how many SMs.
    pub expiry: Option<(Nanos, u32)>,
}

impl PaddingGrant {
    fn none(queue: usize) -> PaddingGrant {
        PaddingGrant { queue, hold: 0, take: 0, blocks: 0, expiry: None }
    }
}

/// Selects for one real-time kernel. Appends one grant per candidate.
pub fn select(
    rules: PaddingRules,
    device: PaddingDevice,
    host: PaddedTask<'_>,
    candidates: &[PaddingCandidate],
    slowdowns: &PairSlowdowns,
    grants: &mut Vec<PaddingGrant>,
) {
    let Some(real_time) = host.kernels.get(host.step) else { return };
    if rules.fused {
        let mut idle_sms = device.sms.saturating_sub(real_time.sms());
        for candidate in candidates {
            let grant = fused(device, real_time, candidate, idle_sms);
            // A fused kernel has one other function beside the real-time one.
            idle_sms = if grant.hold > 0 { 0 } else { idle_sms };
            grants.push(grant);
        }
        return;
    }
    let first = grants.len();
    // Until the budget is computed, `blocks` holds the SMs that a candidate can use.
    let usable = |kernel: &KernelProfile| kernel.sms().clamp(1, device.sms.max(1));
    grants.extend(candidates.iter().map(|candidate| PaddingGrant {
        blocks: usable(&candidate.kernel),
        ..PaddingGrant::none(candidate.queue)
    }));
    let grants = &mut grants[first..];
    let beside = |step: usize| {
        let seen = if rules.learn { slowdowns.row(host.model, step) } else { &[] };
        host.kernels.get(step).map(|kernel| IdleResources::beside(kernel, device, seen))
    };
    let mut now = beside(host.step).filter(|_| host.ready);
    let mut then = beside(host.step + usize::from(host.ready));
    // Running kernels keep their SMs where possible; only then does any get more.
    for more in [false, true] {
        for (candidate, grant) in candidates.iter().zip(&mut *grants) {
            let max_sms = if more { grant.blocks } else { candidate.taken.min(grant.blocks) };
            if max_sms > 0 {
                let each = candidate.kernel.memory_share / grant.blocks as f32;
                now.iter_mut()
                    .for_each(|space| space.give(candidate, each, max_sms, &mut grant.take));
                then.iter_mut()
                    .for_each(|space| space.give(candidate, each, max_sms, &mut grant.hold));
            }
        }
    }
    let lasts = match host.ready {
        true => real_time.time_on(device.sms) + device.gap,
        false => device.launch,
    };
    let remaining = lasts.since(host.elapsed);
    for (candidate, grant) in candidates.iter().zip(grants) {
        budget(device, host, candidate, remaining, grant);
    }
}

/// Idle resources beside a real-time kernel.
struct IdleResources<'a> {
    sms: u32,
    bandwidth: f32,
    memory_bound: bool,
    /// Measured slowdowns beside it, by model.
    seen: &'a [f32],
}

impl<'a> IdleResources<'a> {
    fn beside(kernel: &KernelProfile, device: PaddingDevice, seen: &'a [f32]) -> IdleResources<'a> {
        IdleResources {
            sms: device.sms.saturating_sub(kernel.sms()),
            bandwidth: MEMORY_MAX - kernel.memory_share,
            memory_bound: kernel.memory_share >= MEMORY_BOUND,
            seen,
        }
    }

    /// Raises the SMs of a candidate to at most `max_sms`. Its bandwidth is proportional: `each`
    /// per SM.
    fn give(&mut self, candidate: &PaddingCandidate, each: f32, max_sms: u32, given: &mut u32) {
        let both = self.memory_bound && candidate.kernel.memory_share >= MEMORY_BOUND;
        if self.sms == 0 || both || banned(self.seen, candidate.model) {
            return;
        }
        let mut more = max_sms.saturating_sub(*given).min(self.sms);
        if each * more as f32 > self.bandwidth {
            more = (self.bandwidth.max(0.0) / each) as u32;
        }
        self.bandwidth -= each * more as f32;
        self.sms -= more;
        *given += more;
    }
}

/// Rules 1 and 2: as many waves of blocks as end before the real-time kernel, of a kernel that
/// needs no more registers.
fn fused(
    device: PaddingDevice,
    real_time: &KernelProfile,
    candidate: &PaddingCandidate,
    idle_sms: u32,
) -> PaddingGrant {
    let kernel = &candidate.kernel;
    let rounds = real_time.time_on(device.sms).0 / kernel.block_ns.max(1);
    let blocks_each = u32::try_from(rounds).unwrap_or(u32::MAX).saturating_mul(kernel.occupancy);
    if blocks_each == 0 || kernel.occupancy < real_time.occupancy {
        return PaddingGrant::none(candidate.queue);
    }
    let sms = kernel.blocks.div_ceil(blocks_each).min(idle_sms);
    let blocks = sms.saturating_mul(blocks_each).min(kernel.blocks);
    PaddingGrant { queue: candidate.queue, hold: sms, take: sms, blocks, expiry: None }
}

/// Computes the budget from the idle SMs now (`take`) and beside the next real-time kernel
/// (`hold`): all of the first until that kernel starts, then the second. Before real time starts,
/// all keep what they have. Where blocks are not preempted inside tiles, only blocks begin that end
/// in time, and running ones stay while there are idle SMs.
fn budget(
    device: PaddingDevice,
    host: PaddedTask<'_>,
    candidate: &PaddingCandidate,
    remaining: Nanos,
    grant: &mut PaddingGrant,
) {
    let sms_next = grant.hold;
    let sms_now = if host.ready { grant.take } else { candidate.taken };
    grant.blocks = u32::MAX;
    if device.inside_tile {
        let last = host.ready && host.step + 1 == host.kernels.len();
        (grant.hold, grant.take) = (sms_now, sms_now);
        grant.expiry = (!last && sms_next < sms_now).then_some((remaining, sms_next));
        return;
    }
    grant.take = if Nanos(candidate.kernel.block_ns) <= remaining { sms_now } else { 0 };
    grant.hold = grant.take.max(candidate.taken.min(sms_now));
}

/// Measured slowdowns of real-time kernels beside best-effort models.
#[derive(Clone, Debug, Default)]
pub struct PairSlowdowns {
    /// By real-time model, then kernel and best-effort model; means that start at 1.
    rows: Vec<Vec<f32>>,
}

impl PairSlowdowns {
    /// Adds a model of `steps` kernels without measurements.
    pub fn ensure(&mut self, model: usize, steps: usize) {
        if model >= self.rows.len() {
            self.rows.resize(model + 1, Vec::new());
        }
        self.rows[model] = vec![1.0; steps * MODELS];
    }

    /// Records that kernel `step` of `host` took `ratio` times its time alone, beside the models in
    /// the bit set `co_run`.
    pub fn record(&mut self, host: usize, step: usize, co_run: u64, ratio: f32) {
        let Some(row) = self.rows.get_mut(host) else { return };
        let Some(cells) = row.get_mut(step * MODELS..(step + 1) * MODELS) else { return };
        // One outlier is not enough for a ban.
        let ratio = ratio.clamp(1.0, 1.03);
        for (model, cell) in cells.iter_mut().enumerate() {
            if co_run & (1 << model) != 0 {
                *cell = 0.7 * *cell + 0.3 * ratio;
            }
        }
    }

    /// Slowdowns of kernel `step` of `host` by model; empty when unknown.
    fn row(&self, host: usize, step: usize) -> &[f32] {
        let cells = step * MODELS..(step + 1) * MODELS;
        self.rows.get(host).and_then(|row| row.get(cells)).unwrap_or_default()
    }

    /// Whether the pair is banned.
    pub fn banned(&self, host: usize, step: usize, model: usize) -> bool {
        banned(self.row(host, step), model)
    }

    /// The bit of a model in [`PairSlowdowns::record`].
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

    const DEVICE: PaddingDevice =
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
        select(rules, DEVICE, host, &candidates, &PairSlowdowns::default(), &mut grants);
        grants
    }

    fn running(kernels: &[KernelProfile]) -> PaddedTask<'_> {
        PaddedTask { model: 0, kernels, step: 0, ready: true, elapsed: Nanos(40) }
    }

    #[test]
    fn fuses_one_kernel_with_shorter_blocks_and_higher_occupancy() {
        let real_time = [kernel(40, 100, 4, 0.2)];
        let candidates = [
            (kernel(10, 120, 4, 0.1), 0),
            (kernel(10, 50, 2, 0.1), 0),
            (kernel(15, 50, 4, 0.1), 0),
            (kernel(5, 90, 8, 0.9), 0),
        ];
        let grants = choose(PaddingRules::REEF, running(&real_time), &candidates);
        // Two waves of its blocks end in time, so half of the SMs are enough.
        let given: Vec<(u32, u32)> =
            grants.iter().map(|grant| (grant.take, grant.blocks)).collect();
        assert_eq!(given, [(0, 0), (0, 0), (8, 60), (0, 0)]);
    }

    #[test]
    fn budgets_shrink_for_the_next_kernel_and_respect_bandwidth() {
        let real_time = [kernel(40, 100, 4, 0.6), kernel(55, 100, 4, 0.2)];
        let (short, long) = (kernel(12, 90, 4, 0.1), kernel(20, 150, 1, 0.1));
        let hungry = kernel(5, 10, 4, 0.6);
        let given = |best_effort: &[(KernelProfile, u32)]| -> Vec<(u32, Option<(Nanos, u32)>)> {
            let grants = choose(PaddingRules::ATOLL, running(&real_time), best_effort);
            grants.iter().map(|grant| (grant.take, grant.expiry)).collect()
        };
        let until = |sms: u32| Some((Nanos(60), sms));
        // A memory-bound kernel gets nothing beside another now, and no SMs are idle later.
        assert_eq!(
            given(&[(short, 0), (long, 0), (hungry, 0)]),
            [(12, until(5)), (8, until(0)), (0, None)]
        );
        // Running kernels keep their SMs before others get more.
        assert_eq!(given(&[(short, 0), (long, 15)]), [(5, until(0)), (15, until(5))]);
        // Bandwidth is proportional to SMs: of the remaining 0.35, 0.3 are 10.
        assert_eq!(given(&[(kernel(15, 90, 4, 0.45), 0)]), [(11, until(5))]);
    }

    #[test]
    fn budgets_before_real_time_end_with_its_launch() {
        let real_time = [kernel(50, 100, 4, 0.1)];
        let host = PaddedTask { ready: false, elapsed: Nanos(5), ..running(&real_time) };
        let grants = choose(PaddingRules::ATOLL, host, &[(kernel(30, 100, 4, 0.1), 25)]);
        assert_eq!((grants[0].take, grants[0].expiry), (25, Some((Nanos(15), 10))));
    }

    #[test]
    fn bans_pairs_that_slow_real_time_down() {
        let mut slowdowns = PairSlowdowns::default();
        slowdowns.ensure(0, 3);
        slowdowns.record(0, 2, PairSlowdowns::bit(7), 40.0);
        assert!(!slowdowns.banned(0, 2, 7), "one outlier");
        slowdowns.record(0, 2, PairSlowdowns::bit(7), 1.5);
        assert!(slowdowns.banned(0, 2, 7));
        assert!(!slowdowns.banned(0, 1, 7) && !slowdowns.banned(0, 2, 8));
    }
}
