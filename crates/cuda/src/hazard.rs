//! Which best-effort launches may be in flight together.
//!
//! A launch that is queued behind one that left early still starts: its blocks may compute a tile of what is not there
//! yet, before they look at the epoch. That tile is thrown away, but it was written. It must not have been written over
//! what the step that left still reads or has already finished, or that step could not be resumed.
//!
//! A step that runs to its end whatever happens is alone in flight: leaving takes as long as it does, and not longer.

use std::ops::Range;

use model::gpu::{GpuPlan, GpuStep, Leavable, Place, Span};

/// For each step, how many steps from the first must be known to be done before it is queued, when up to `window` steps
/// are in flight and take `workspaces` in turn.
pub(crate) fn barriers(plan: &GpuPlan, window: usize, workspaces: usize) -> Vec<usize> {
    let must_wait = |later: usize, earlier: usize| {
        let (one, other) = (&plan.steps[later], &plan.steps[earlier]);
        let same_workspace = (later - earlier).is_multiple_of(workspaces.max(1));
        stays(one) || stays(other) || spoils(one, other, same_workspace)
    };
    (0..plan.steps.len())
        .map(|later| {
            ((later + 1).saturating_sub(window)..later)
                .rev()
                .find(|&earlier| must_wait(later, earlier))
                .map_or(0, |earlier| earlier + 1)
        })
        .collect()
}

/// Whether the step runs to its end whatever happens.
fn stays(step: &GpuStep) -> bool {
    step.leave != Leavable::InsideTile
}

/// Runs of up to `length` steps, none of which has to wait for another of its run; what is left over is launched alone.
pub(crate) fn chains(barriers: &[usize], length: usize) -> Vec<Range<usize>> {
    let mut chains = Vec::new();
    let mut start = 0;
    while start < barriers.len() {
        let free = barriers[start + 1..].iter().take_while(|&&barrier| barrier <= start);
        let count = 1 + free.take(length.saturating_sub(1)).count();
        if count > 1 {
            chains.push(start..start + count);
        }
        start += count;
    }
    chains
}

/// Whether `later`, run too early, could make it impossible to resume `earlier`.
fn spoils(later: &GpuStep, earlier: &GpuStep, same_workspace: bool) -> bool {
    // A step that does not say what it writes may write anything.
    if later.writes.is_empty() || earlier.writes.is_empty() {
        return true;
    }
    let over = |spans: &[Span]| {
        later.writes.iter().any(|write| spans.iter().any(|span| overlap(write, span)))
    };
    let parts = same_workspace && splits(later) && splits(earlier);
    over(&earlier.reads) || over(&earlier.writes) || parts
}

/// Whether the step's best-effort launch keeps parts of products in a workspace.
fn splits(step: &GpuStep) -> bool {
    let launch = &step.choices[step.be];
    launch.patches.iter().any(|patch| matches!(patch.to, Place::Workspace(_)))
}

/// Whether two spans share a byte. Workspaces are told apart by who takes which.
fn overlap(one: &Span, other: &Span) -> bool {
    if matches!(one.place, Place::Workspace(_)) {
        return false;
    }
    let ((kind, index, start), (other_kind, other_index, other_start)) =
        (key(one.place), key(other.place));
    (kind, index) == (other_kind, other_index)
        && start < other_start.saturating_add(other.bytes)
        && other_start < start.saturating_add(one.bytes)
}

/// What memory a place is in, which one of its kind, and where.
fn key(place: Place) -> (u8, u32, u64) {
    match place {
        Place::Arena(at) => (0, 0, at),
        Place::Workspace(at) => (1, 0, at),
        Place::Arrivals => (2, 0, 0),
        Place::Weight(index, at) => (3, index, at),
        Place::Input(index, at) => (4, index, at),
        Place::Output(index, at) => (5, index, at),
        Place::Fault => (6, 0, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::tests::{launch, step};
    use model::gpu::Patch;

    fn moving(from: u64, to: u64) -> GpuStep {
        let span = |at| vec![Span { place: Place::Arena(at), bytes: 100 }];
        GpuStep { reads: span(from), writes: span(to), ..step(launch(4, 0)) }
    }

    fn plan(steps: Vec<GpuStep>) -> GpuPlan {
        GpuPlan { steps, ..GpuPlan::default() }
    }

    #[test]
    fn steps_that_never_meet_need_no_wait() {
        let chain = plan((0..6).map(|i| moving(i * 100, (i + 1) * 100)).collect());
        assert_eq!(barriers(&chain, 4, 1), [0; 6]);
    }

    #[test]
    fn two_buffers_in_turns_wait_for_the_step_before() {
        let turns = plan(vec![moving(0, 100), moving(100, 0), moving(0, 100)]);
        assert_eq!(barriers(&turns, 4, 1), [0, 1, 2]);
    }

    #[test]
    fn what_is_out_of_the_window_is_done_anyway() {
        let three = |i: u64| moving(i % 3 * 100, (i + 1) % 3 * 100);
        let rounds = plan((0..5).map(three).collect());
        // Step 2 writes what step 0 reads.
        assert_eq!(barriers(&rounds, 4, 1), [0, 0, 1, 2, 3]);
        assert_eq!(barriers(&rounds, 2, 1), [0; 5]);
    }

    #[test]
    fn split_products_take_workspaces_in_turn() {
        let mut steps: Vec<GpuStep> = (0..3).map(|i| moving(i * 100, (i + 1) * 100)).collect();
        for index in [0, 2] {
            steps[index].choices[0].patches = vec![Patch { at: 0, to: Place::Workspace(0) }];
        }
        let steps = plan(steps);
        assert_eq!(barriers(&steps, 4, 1), [0, 0, 1]);
        assert_eq!(barriers(&steps, 4, 2), [0, 0, 1], "the first one's turn again");
        assert_eq!(barriers(&steps, 4, 4), [0, 0, 0]);
    }

    #[test]
    fn chains_end_where_a_step_must_wait() {
        assert_eq!(chains(&[0; 10], 4), [0..4, 4..8, 8..10]);
        assert_eq!(chains(&[0, 0, 1, 2, 3], 4), [0..2, 2..4]);
        assert_eq!(chains(&[0, 1, 2], 4), []);
        assert_eq!(chains(&[0; 3], 1), []);
    }

    #[test]
    fn a_step_that_is_never_left_is_alone() {
        let mut steps: Vec<GpuStep> = (0..4).map(|i| moving(i * 100, (i + 1) * 100)).collect();
        steps[1].leave = Leavable::AtTileBoundary("in place".to_string());
        assert_eq!(barriers(&plan(steps), 4, 1), [0, 1, 2, 2]);
    }

    #[test]
    fn a_step_that_says_nothing_waits() {
        let silent = GpuStep { writes: vec![], ..moving(0, 100) };
        assert_eq!(barriers(&plan(vec![moving(0, 100), silent]), 4, 1), [0, 1]);
    }
}
