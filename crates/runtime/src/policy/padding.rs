//! Padding: which best-effort kernels run beside a real-time kernel, on how many multiprocessors.

use base::Nanos;
use device::sim::KernelProfile;

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
    /// Whole kernels are fused with the real-time kernel, which ends when they do: they must be shorter (rule 1)
    /// and of no lower occupancy (rule 2). Otherwise best effort keeps running inside a budget.
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
pub struct Room {
    /// Multiprocessors.
    pub sms: u32,
    /// Between two kernels of a stream.
    pub gap: Nanos,
    /// Whether running blocks can leave in the middle.
    pub inside_tile: bool,
}

/// The real-time task.
#[derive(Clone, Copy, Debug)]
pub struct Host<'a> {
    /// Its model.
    pub model: usize,
    /// Its kernels.
    pub kernels: &'a [KernelProfile],
    /// The one that runs.
    pub step: usize,
    /// For how long it has.
    pub elapsed: Nanos,
}

/// A best-effort kernel that could run beside it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
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
pub struct Grant {
    /// The queue.
    pub queue: usize,
    /// Multiprocessors it may hold.
    pub hold: u32,
    /// Multiprocessors up to which it may place new blocks.
    pub take: u32,
}

/// Chooses for one real-time kernel. Appends one grant per candidate.
pub fn select(
    rules: PaddingRules,
    room: Room,
    host: Host<'_>,
    candidates: &[Candidate],
    slowdowns: &Slowdowns,
    grants: &mut Vec<Grant>,
) {
    let Some(real_time) = host.kernels.get(host.step) else { return };
    let mut left = room.sms.saturating_sub(real_time.sms());
    for candidate in candidates {
        let refused = (rules.mind_memory && memory_conflict(real_time, &candidate.kernel))
            || (rules.learn && slowdowns.banned(host.model, host.step, candidate.model));
        let grant = if refused {
            Grant { queue: candidate.queue, hold: 0, take: 0 }
        } else if rules.fused {
            fused(room, real_time, candidate, left)
        } else {
            budgeted(room, host, candidate, left, slowdowns)
        };
        left -= grant.hold;
        grants.push(grant);
    }
}

fn memory_conflict(a: &KernelProfile, b: &KernelProfile) -> bool {
    let both = a.memory_share >= MEMORY_BOUND && b.memory_share >= MEMORY_BOUND;
    both || a.memory_share + b.memory_share > MEMORY_MAX
}

/// Rules 1 and 2: a whole kernel that ends sooner and needs no more registers.
fn fused(room: Room, real_time: &KernelProfile, candidate: &Candidate, left: u32) -> Grant {
    let kernel = &candidate.kernel;
    let sms = kernel.sms().min(left);
    let fits = sms > 0
        && kernel.occupancy >= real_time.occupancy
        && kernel.time_on(sms) < real_time.time_on(room.sms);
    let sms = if fits { sms } else { 0 };
    Grant { queue: candidate.queue, hold: sms, take: sms }
}

/// As much as real time leaves for as long as a block takes, looking ahead over its coming kernels; blocks
/// that run already stay as long as there is room now.
fn budgeted(
    room: Room,
    host: Host<'_>,
    candidate: &Candidate,
    left: u32,
    slowdowns: &Slowdowns,
) -> Grant {
    let kernel = &candidate.kernel;
    let horizon = Nanos(kernel.block_ns);
    let current = &host.kernels[host.step];
    let mut free = left;
    let used_by_others = room.sms.saturating_sub(current.sms()) - left;
    let mut until = current.time_on(room.sms).since(host.elapsed) + room.gap;
    for (step, next) in host.kernels.iter().enumerate().skip(host.step + 1) {
        if until >= horizon {
            break;
        }
        let banned = slowdowns.banned(host.model, step, candidate.model);
        if !room.inside_tile || banned || memory_conflict(next, kernel) {
            free = 0;
            break;
        }
        let coming = room.sms.saturating_sub(next.sms()).saturating_sub(used_by_others);
        free = free.min(coming);
        until += next.time_on(room.sms) + room.gap;
    }
    let take = kernel.sms().min(free);
    let hold = take.max(candidate.taken.min(left));
    Grant { queue: candidate.queue, hold, take }
}

/// How much slower real-time kernels were seen to run beside which models.
#[derive(Clone, Debug, Default)]
pub struct Slowdowns {
    /// By real-time model, then kernel and best-effort model; averages that start at 1.
    rows: Vec<Vec<f32>>,
}

impl Slowdowns {
    /// Makes room for a model of `steps` kernels, with nothing known of it.
    pub fn ensure(&mut self, model: usize, steps: usize) {
        if model >= self.rows.len() {
            self.rows.resize(model + 1, Vec::new());
        }
        self.rows[model] = vec![1.0; steps * MODELS];
    }

    /// Kernel `step` of `host` took `ratio` times as long as alone beside the models in the bit set `beside`.
    pub fn record(&mut self, host: usize, step: usize, beside: u64, ratio: f32) {
        let Some(row) = self.rows.get_mut(host) else { return };
        let Some(cells) = row.get_mut(step * MODELS..(step + 1) * MODELS) else { return };
        // One stray measurement is not enough for a ban.
        let ratio = ratio.clamp(1.0, 1.03);
        for (model, cell) in cells.iter_mut().enumerate() {
            if beside & (1 << model) != 0 {
                *cell = 0.7 * *cell + 0.3 * ratio;
            }
        }
    }

    /// Whether the pair has cost real time too much.
    pub fn banned(&self, host: usize, step: usize, model: usize) -> bool {
        let cell = self.rows.get(host).and_then(|row| row.get(step * MODELS + model % MODELS));
        cell.is_some_and(|ratio| *ratio > SLOWDOWN_MAX)
    }

    /// The bit that stands for a model in [`Slowdowns::record`].
    pub fn bit(model: usize) -> u64 {
        1 << (model % MODELS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room { sms: 60, gap: Nanos(0), inside_tile: true };

    fn kernel(sms: u32, block_ns: u64, occupancy: u32, memory_share: f32) -> KernelProfile {
        let blocks = sms * occupancy;
        KernelProfile { blocks, block_ns, occupancy, memory_share, idempotent: true }
    }

    fn choose(
        rules: PaddingRules,
        real_time: &[KernelProfile],
        best_effort: &[KernelProfile],
    ) -> Vec<u32> {
        let host = Host { model: 0, kernels: real_time, step: 0, elapsed: Nanos::ZERO };
        let of = |(queue, kernel): (usize, &KernelProfile)| Candidate {
            queue,
            model: 1 + queue,
            kernel: *kernel,
            taken: 0,
        };
        let candidates: Vec<Candidate> = best_effort.iter().enumerate().map(of).collect();
        let mut grants = Vec::new();
        select(rules, ROOM, host, &candidates, &Slowdowns::default(), &mut grants);
        grants.iter().map(|grant| grant.take).collect()
    }

    #[test]
    fn fused_kernels_are_shorter_of_higher_occupancy_and_fit() {
        let real_time = [kernel(40, 100, 4, 0.2)];
        let candidates = [
            kernel(10, 120, 4, 0.1),
            kernel(10, 50, 2, 0.1),
            kernel(15, 50, 4, 0.1),
            kernel(5, 90, 8, 0.9),
            kernel(5, 90, 8, 0.1),
        ];
        assert_eq!(choose(PaddingRules::REEF, &real_time, &candidates), [0, 0, 15, 5, 0]);
    }

    #[test]
    fn budgets_look_ahead_and_mind_memory() {
        let real_time = [kernel(40, 100, 4, 0.6), kernel(55, 100, 4, 0.2), kernel(10, 100, 4, 0.2)];
        // Short: all that is free now. Longer: what stays free. Memory-bound beside memory-bound: nothing.
        let candidates = [kernel(12, 90, 4, 0.1), kernel(20, 150, 1, 0.1), kernel(5, 10, 4, 0.6)];
        assert_eq!(choose(PaddingRules::ATOLL, &real_time, &candidates), [12, 0, 0]);
        assert_eq!(choose(PaddingRules::ATOLL, &real_time, &candidates[1..]), [5, 0]);
    }

    #[test]
    fn pairs_that_cost_real_time_are_banned() {
        let mut slowdowns = Slowdowns::default();
        slowdowns.ensure(0, 3);
        slowdowns.record(0, 2, Slowdowns::bit(7), 40.0);
        assert!(!slowdowns.banned(0, 2, 7), "one stray measurement");
        slowdowns.record(0, 2, Slowdowns::bit(7), 1.5);
        assert!(slowdowns.banned(0, 2, 7));
        assert!(!slowdowns.banned(0, 1, 7) && !slowdowns.banned(0, 2, 8));
    }
}
