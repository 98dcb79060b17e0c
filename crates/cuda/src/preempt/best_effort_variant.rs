//! The best-effort variant of a step, chosen by its estimated time.

use model::gpu::GpuStep;

/// A step estimated to be shorter than this checks the epoch only at the start of its tiles.
const SHORT_STEP_US: f64 = 8.0;

/// A step estimated to be longer than this runs as a tile loop: counting and marking tiles costs
/// less than computing all of them again after a preemption.
const LONG_STEP_US: f64 = 120.0;

/// How a step is launched as best effort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum BestEffortVariant {
    /// Blocks fetch tiles until none remain and check the epoch inside a tile. A resumed step
    /// computes only the tiles that are not done.
    Loop,
    /// One block per tile, which checks the epoch inside the tile. A resumed step computes all
    /// tiles.
    CheckedGrid,
    /// One block per tile, which checks the epoch when it starts.
    Grid,
}

/// The variant of `step`.
pub(crate) fn variant_of(step: &GpuStep) -> BestEffortVariant {
    let micros = (step.flops as f64 / 200e6).max(step.bytes as f64 / 2e6);
    match micros {
        micros if micros < SHORT_STEP_US => BestEffortVariant::Grid,
        micros if micros < LONG_STEP_US => BestEffortVariant::CheckedGrid,
        _ => BestEffortVariant::Loop,
    }
}

/// The choice of the step that best effort launches. A grid takes the one that real time takes,
/// unless it gains from overlapping tiles; blocks of a cluster exit together. A tile loop takes one
/// without clusters, because each block fetches tiles on its own.
pub(crate) fn best_effort_choice(step: &GpuStep) -> usize {
    let overlaps = step.choices.get(step.rt).is_some_and(|launch| launch.overlaps);
    match variant_of(step) {
        BestEffortVariant::Grid | BestEffortVariant::CheckedGrid if !overlaps => step.rt,
        BestEffortVariant::Grid | BestEffortVariant::CheckedGrid => step.be,
        BestEffortVariant::Loop => step.be,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::layout::tests::{launch, step};

    #[test]
    fn a_grid_avoids_what_gains_from_overlapping_tiles() {
        let mut short = GpuStep { flops: 1_000_000_000, bytes: 1_000_000, ..step(launch(100, 0)) };
        short.choices.push(launch(100, 0));
        (short.rt, short.be) = (0, 1);
        assert_eq!(best_effort_choice(&short), 0);
        short.choices[0].overlaps = true;
        assert_eq!(best_effort_choice(&short), 1);
        assert!(!short.choices[0].suits_best_effort() && short.choices[1].suits_best_effort());
    }

    #[test]
    fn only_long_steps_are_tile_loops() {
        let short = GpuStep { flops: 1_000_000_000, bytes: 1_000_000, ..step(launch(100, 0)) };
        assert_eq!(variant_of(&short), BestEffortVariant::Grid);
        let long = GpuStep { flops: 6_000_000_000, ..short.clone() };
        assert_eq!(variant_of(&long), BestEffortVariant::CheckedGrid);
        let longer = GpuStep { flops: 60_000_000_000, ..short.clone() };
        assert_eq!(variant_of(&longer), BestEffortVariant::Loop);
        let wide = GpuStep { bytes: 1_000_000_000, ..short };
        assert_eq!(variant_of(&wide), BestEffortVariant::Loop);
    }
}
