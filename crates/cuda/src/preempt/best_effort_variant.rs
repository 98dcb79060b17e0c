//! How a step runs as best effort, by how long it is.

use model::gpu::GpuStep;

/// A best-effort step estimated to be shorter than this polls whether it shall leave at the beginning of its tiles only.
const SHORT_STEP_US: f64 = 8.0;

/// One estimated to be longer than this runs as a loop: counting and marking tiles costs less than doing all of them again when
/// it is left.
const LONG_STEP_US: f64 = 120.0;

/// The form of a best-effort launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BestEffortVariant {
    /// Blocks fetch tiles until none is left, and look on the way whether they shall leave; a restore computes the tiles that are missing.
    Loop,
    /// A block a tile, which polls on the way; a restore computes all of them.
    CheckedGrid,
    /// A block a tile, which polls when it begins.
    Grid,
}

/// Whether blocks fetch tiles or are one each.
pub(crate) fn variant_of(step: &GpuStep) -> BestEffortVariant {
    let micros = (step.flops as f64 / 200e6).max(step.bytes as f64 / 2e6);
    match micros {
        micros if micros < SHORT_STEP_US => BestEffortVariant::Grid,
        micros if micros < LONG_STEP_US => BestEffortVariant::CheckedGrid,
        _ => BestEffortVariant::Loop,
    }
}

/// Which of the step's choices it takes as best effort: as a plain grid the one real time takes, whose blocks leave together
/// where they are a cluster; as a loop one without clusters, because blocks fetch tiles each for itself.
pub(crate) fn best_effort_choice(step: &GpuStep) -> usize {
    match variant_of(step) {
        BestEffortVariant::Grid | BestEffortVariant::CheckedGrid => step.rt,
        BestEffortVariant::Loop => step.be,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::layout::tests::{launch, step};

    #[test]
    fn only_long_steps_are_loops() {
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
