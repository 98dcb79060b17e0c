//! Rows in the bodies of control flow.

use super::{RowAnalysis, RowState, input};
use crate::op::{Body, Control, ControlKind, Scan};
use crate::{Step, ValueId};

/// Bodies in bodies beyond this depth are taken to mix rows.
const MAX_DEPTH: usize = 8;

impl RowAnalysis<'_> {
    /// The states of what control flow gives; `None` when it may mix rows.
    pub(super) fn of_control(&self, step: &Step, control: &Control) -> Option<Vec<RowState>> {
        if self.depth >= MAX_DEPTH {
            return None;
        }
        match &control.kind {
            ControlKind::If => self.of_branches(step, &control.bodies),
            ControlKind::Loop { carried } => self.of_loop(step, control.bodies.first()?, *carried),
            ControlKind::Scan(scan) => self.of_scan(step, control.bodies.first()?, scan),
        }
    }

    /// The condition is one for all rows, so it must not depend on any.
    fn of_branches(&self, step: &Step, bodies: &[Body]) -> Option<Vec<RowState>> {
        if self.state(input(step, 0)?) != RowState::Free {
            return None;
        }
        let (first, others) = bodies.split_first()?;
        let states = self.of_body(step, first, &[])?;
        let same = |body: &Body| self.of_body(step, body, &[]).as_ref() == Some(&states);
        others.iter().all(same).then_some(states)
    }

    fn of_loop(&self, step: &Step, body: &Body, carried: usize) -> Option<Vec<RowState>> {
        let free = |index| input(step, index).is_none_or(|id| self.state(id) == RowState::Free);
        if !free(0) || !free(1) {
            return None;
        }
        let state = self.operands(step, 2..2 + carried)?;
        let arguments = [&[RowState::Free, RowState::Free], &state[..]].concat();
        let results = self.of_body(step, body, &arguments)?;
        let (condition, results) = results.split_first()?;
        let (after, collected) = results.split_at_checked(carried)?;
        if *condition != RowState::Free || after != state {
            return None;
        }
        let collected = collected.iter().map(|state| stacked(*state, 0));
        state.iter().copied().map(Some).chain(collected).collect()
    }

    fn of_scan(&self, step: &Step, body: &Body, scan: &Scan) -> Option<Vec<RowState>> {
        let state = self.operands(step, 0..scan.carried)?;
        let mut arguments = state.clone();
        for (index, (axis, _)) in scan.inputs.iter().enumerate() {
            let id = input(step, scan.carried + index)?;
            let along = self.axis(id, *axis)?;
            arguments.push(match self.state(id) {
                RowState::Free => RowState::Free,
                RowState::Rows(rows) if rows == along => return None,
                RowState::Rows(rows) => RowState::Rows(rows - usize::from(along < rows)),
                RowState::Count | RowState::Sizes(_) => return None,
            });
        }
        let results = self.of_body(step, body, &arguments)?;
        let (after, collected) = results.split_at_checked(scan.carried)?;
        if after != state || collected.len() != scan.outputs.len() {
            return None;
        }
        let collected = collected.iter().zip(&scan.outputs).enumerate();
        let collected = collected.map(|(index, (state, (axis, _)))| {
            let along = match (usize::try_from(*axis), state) {
                (Ok(along), _) => along,
                // Counted from the end of what the step gives.
                (Err(_), RowState::Free) => 0,
                (Err(_), _) => {
                    let id = step.outputs.get(scan.carried + index).copied().flatten()?;
                    self.axis(id, *axis)?
                }
            };
            stacked(*state, along)
        });
        state.iter().copied().map(Some).chain(collected).collect()
    }

    /// The states of some operands, which all have to be there.
    fn operands(&self, step: &Step, range: std::ops::Range<usize>) -> Option<Vec<RowState>> {
        range.map(|index| Some(self.state(input(step, index)?))).collect()
    }

    /// The states of what a body gives, if it does not mix rows.
    fn of_body(&self, step: &Step, body: &Body, arguments: &[RowState]) -> Option<Vec<RowState>> {
        let plan = &*body.plan;
        let mut inner = RowAnalysis::new(plan, self.batch);
        inner.depth = self.depth + 1;
        let (own, captured) = plan.inputs.split_at_checked(arguments.len())?;
        if captured.len() != body.operands.len() {
            return None;
        }
        for (id, state) in own.iter().zip(arguments) {
            inner.states[id.index()] = *state;
        }
        for (id, operand) in captured.iter().zip(&body.operands) {
            let outer: ValueId = input(step, *operand)?;
            inner.states[id.index()] = self.state(outer);
            if let Some(numbers) = self.numbers(outer) {
                inner.captured.push((*id, numbers));
            }
        }
        if inner.run().is_some() {
            return None;
        }
        Some(plan.outputs.iter().map(|id| inner.state(*id)).collect())
    }
}

/// Where rows are in values that are stacked along a new dimension `along`.
fn stacked(state: RowState, along: usize) -> Option<RowState> {
    match state {
        RowState::Free => Some(RowState::Free),
        RowState::Rows(rows) => Some(RowState::Rows(rows + usize::from(along <= rows))),
        RowState::Count | RowState::Sizes(_) => None,
    }
}

#[cfg(test)]
mod tests;
