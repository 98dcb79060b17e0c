//! In which groups weights arrive, which part of a plan needs which of them, and when a run may
//! start before all have arrived.
//!
//! Bytes are counted in the order of arrival, which is the order in which steps first need them. A
//! run that starts while weights load is launched in parts, each waiting for its weights.

use std::ops::Range;
use std::time::Duration;

use model::gpu::{GpuPlan, GpuStep, MemoryLocation};

/// Parts of a plan that is launched while its weights load. More parts start a run earlier by less
/// and less, and each is a launch.
const PARTS: u64 = 4;

/// Arrival groups of a load.
pub(crate) const GROUPS: u64 = 8;

/// Weights up to this size are one group.
const SMALL: u64 = 4 << 20;

/// Steps that are launched together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlanPart {
    pub(crate) steps: Range<usize>,
    /// Bytes that must have arrived.
    pub(crate) needs: u64,
    /// Share of the run's time that passes before it begins.
    pub(crate) begins: f64,
}

/// Position in the order of arrival and size of each weight of a plan.
pub(crate) type Spans = Vec<(u64, u64)>;

/// The weights a step may read, by index.
fn weights_of(step: &GpuStep) -> impl Iterator<Item = usize> {
    let places = step.choices.iter().flat_map(|launch| {
        let maps = launch.maps.iter().map(|map| map.to);
        launch.patches.iter().map(|patch| patch.to).chain(maps)
    });
    places.filter_map(|place| match place {
        MemoryLocation::Weight(index, _) => Some(index as usize),
        _ => None,
    })
}

/// Indices of all weights in the order in which steps first need them; unused weights come last.
pub(crate) fn order_of_use(gpu: &GpuPlan) -> Vec<usize> {
    let mut first = vec![usize::MAX; gpu.weights.len()];
    for (index, step) in gpu.steps.iter().enumerate() {
        for weight in weights_of(step) {
            if let Some(place) = first.get_mut(weight) {
                *place = (*place).min(index);
            }
        }
    }
    let mut order: Vec<usize> = (0..first.len()).collect();
    order.sort_by_key(|weight| first[*weight]);
    order
}

/// For each step, bytes that must have arrived for it and all steps before it.
pub(crate) fn needs(steps: &[GpuStep], spans: &Spans) -> Vec<u64> {
    let mut max = 0;
    steps
        .iter()
        .map(|step| {
            let ends = weights_of(step).filter_map(|weight| spans.get(weight));
            max = ends.map(|(at, bytes)| at + bytes).fold(max, u64::max);
            max
        })
        .collect()
}

/// The plan in parts, each of which needs about as many additional bytes as the previous one.
pub(crate) fn parts(steps: &[GpuStep], needs: &[u64]) -> Vec<PlanPart> {
    let total = needs.last().copied().unwrap_or(0);
    let share = if total <= SMALL { total.max(1) } else { total.div_ceil(PARTS) };
    let work: Vec<u64> = steps.iter().map(|step| step.bytes.max(1)).collect();
    let all = work.iter().sum::<u64>().max(1) as f64;
    let mut parts: Vec<PlanPart> = Vec::new();
    let mut before = 0;
    for (index, &needed) in needs.iter().enumerate() {
        let group = |bytes: u64| bytes.div_ceil(share);
        match parts.last_mut() {
            Some(last) if group(needed) <= group(last.needs) => {
                last.steps.end = index + 1;
                last.needs = needed.max(last.needs);
            }
            _ => {
                let begins = before as f64 / all;
                parts.push(PlanPart { steps: index..index + 1, needs: needed, begins });
            }
        }
        before += work[index];
    }
    parts
}

/// Where groups of `total` bytes end, a multiple of `chunk` but for the last.
pub(crate) fn group_ends(total: u64, chunk: u64) -> Vec<u64> {
    let share = if total <= SMALL { total } else { total.div_ceil(GROUPS) };
    let share = share.next_multiple_of(chunk).max(chunk);
    let mut ends: Vec<u64> = (1..).map(|n| n * share).take_while(|end| *end < total).collect();
    ends.push(total);
    ends
}

/// The first group after which `bytes` have arrived.
pub(crate) fn group_of(ends: &[u64], bytes: u64) -> usize {
    ends.partition_point(|end| *end < bytes).min(ends.len().saturating_sub(1))
}

/// How long a run takes, and when in it which bytes are needed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RunTiming {
    pub(crate) run: Duration,
    /// Share of the run that passes before, and bytes needed then.
    pub(crate) needs: Vec<(f64, u64)>,
}

impl RunTiming {
    /// Whether a run that starts now never waits, if `arrives_in` says how long the arrival of a
    /// number of bytes takes.
    pub(crate) fn may_start(&self, arrives_in: impl Fn(u64) -> Duration) -> bool {
        self.needs.iter().all(|(begins, needed)| arrives_in(*needed) <= self.run.mul_f64(*begins))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::layout::tests::{launch, step};
    use base::Random;
    use model::gpu::{Launch, Patch};

    fn reading(weights: &[u32], bytes: u64) -> GpuStep {
        let patch = |weight: &u32| Patch { at: 0, to: MemoryLocation::Weight(*weight, 0) };
        let patches = weights.iter().map(patch).collect();
        GpuStep { bytes, ..step(Launch { patches, ..launch(1, 0) }) }
    }

    fn plan(steps: Vec<GpuStep>, weights: usize) -> GpuPlan {
        let weight = |index: usize| model::gpu::Weight {
            key: model::gpu::WeightKey(index.to_string()),
            bytes: 1,
            pack: model::gpu::Packer(std::sync::Arc::new(Vec::new)),
        };
        GpuPlan { steps, weights: (0..weights).map(weight).collect(), ..GpuPlan::default() }
    }

    #[test]
    fn weights_are_in_the_order_steps_need_them() {
        let steps = vec![reading(&[3, 1], 1), reading(&[0], 1), reading(&[1], 1)];
        assert_eq!(order_of_use(&plan(steps, 5)), [1, 3, 0, 2, 4]);
    }

    #[test]
    fn parts_cover_all_steps_and_their_weights() {
        let mut random = Random::new(7);
        for _ in 0..200 {
            let count = 1 + random.below(60) as usize;
            let mut spans: Spans = Vec::new();
            for _ in 0..count {
                let at = spans.last().map_or(0, |(at, bytes)| at + bytes);
                spans.push((at, random.below(6 << 20)));
            }
            let steps: Vec<GpuStep> =
                (0..count).map(|index| reading(&[index as u32], random.below(1000))).collect();
            let needed = needs(&steps, &spans);
            let parts = parts(&steps, &needed);
            assert!(parts.len() as u64 <= PARTS + 1, "{} parts", parts.len());
            let mut next = 0;
            for part in &parts {
                assert_eq!(part.steps.start, next);
                next = part.steps.end;
                let max = part.steps.clone().map(|index| spans[index].0 + spans[index].1).max();
                assert!(Some(part.needs) >= max, "a step would run before its weights arrive");
                assert!((0.0..=1.0).contains(&part.begins));
            }
            assert_eq!(next, count);
            assert!(parts.is_sorted_by(|a, b| a.needs < b.needs && a.begins <= b.begins));
        }
    }

    #[test]
    fn groups_cover_everything_once() {
        for (total, chunk) in [(1, 4), (4 << 20, 2 << 20), (100 << 20, 2 << 20), (12345678, 1000)] {
            let ends = group_ends(total, chunk);
            assert_eq!(ends.last(), Some(&total));
            assert!(ends.len() as u64 <= GROUPS && ends.is_sorted_by(|a, b| a < b));
            for bytes in [1, total / 3, total / 2, total] {
                let group = group_of(&ends, bytes);
                assert!(ends[group] >= bytes && (group == 0 || ends[group - 1] < bytes));
            }
        }
        assert_eq!(group_of(&[10, 20], 99), 1, "the last group is all there is");
    }

    #[test]
    fn run_may_start_when_it_would_never_wait() {
        let millis = Duration::from_millis;
        let pace = RunTiming { run: millis(10), needs: vec![(0.0, 10), (0.5, 50), (0.9, 100)] };
        // Microseconds per byte, and bytes that have arrived.
        let arrives = |micros: u64, there: u64| {
            move |bytes: u64| Duration::from_micros(bytes.saturating_sub(there) * micros)
        };
        assert!(!pace.may_start(arrives(1000, 0)));
        assert!(!pace.may_start(arrives(100, 9)), "the first part waits");
        assert!(pace.may_start(arrives(100, 10)), "the last ones arrive on time");
        assert!(
            !pace.may_start(arrives(1000, 90)),
            "ten bytes are missing, nine milliseconds away"
        );
        assert!(pace.may_start(arrives(1000, 91)));
    }
}
