//! Einstein notation of one or two operands.

use super::super::draft::StepDraft;
use super::super::elementwise::copy;
use super::super::loop_nest::LoopNest;
use super::super::reduce::reduce;
use super::super::view::View;
use super::{Epilogue, Extra, Kind, Picture, Problem, Views, check};
use model::gpu::GpuTarget;
use model::op::{Activation, ReduceKind};

/// The sum of products of `equation`. A label may occur only once per operand, and with two
/// operands every label must occur in the output or in both.
pub fn einsum(
    target: &GpuTarget,
    equation: &str,
    operands: &[&View],
    output: &View,
) -> Result<StepDraft, String> {
    let (inputs, result) = labels(equation, operands, output)?;
    match (operands, &inputs[..]) {
        ([x], [from]) => single_operand(x, from, output, &result),
        ([a, b], [left, right]) => two_operands(target, (a, left), (b, right), (output, &result)),
        _ => Err(format!("Einstein notation of {} operands, at most 2", operands.len())),
    }
}

/// A label of each dimension: of every operand, and of the output.
type Labels = Vec<char>;

fn labels(
    equation: &str,
    operands: &[&View],
    output: &View,
) -> Result<(Vec<Labels>, Labels), String> {
    let plain: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match plain.split_once("->") {
        Some((left, right)) => (left.to_string(), right.to_string()),
        None => {
            // Without an output, labels that occur once are kept, in order.
            let mut once: Vec<char> = plain.chars().filter(|c| c.is_alphabetic()).collect();
            once.sort_unstable();
            let all = once.clone();
            once.retain(|label| all.iter().filter(|other| *other == label).count() == 1);
            let dots = if plain.contains("...") { "..." } else { "" };
            (plain.clone(), dots.to_string() + &once.into_iter().collect::<String>())
        }
    };
    let terms: Vec<&str> = left.split(',').collect();
    if terms.len() != operands.len() {
        return Err(format!("{equation} has {} operands, not {}", terms.len(), operands.len()));
    }
    let inputs = terms.iter().zip(operands).map(|(term, view)| expand(term, view.shape.len()));
    let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
    Ok((inputs, expand(&right, output.shape.len())?))
}

/// The label of each of `rank` dimensions; those of an ellipsis count from its end, so that
/// operands share them.
fn expand(term: &str, rank: usize) -> Result<Labels, String> {
    let wrong = || format!("'{term}' for {rank} dimensions");
    let all: Labels = match term.split_once("...") {
        Some((before, after)) => {
            let dots = rank
                .checked_sub(before.chars().count() + after.chars().count())
                .ok_or_else(wrong)?;
            let digit =
                |place: usize| char::from_digit((dots - place) as u32, 10).ok_or_else(wrong);
            let middle = (0..dots).map(digit).collect::<Result<Vec<_>, _>>()?;
            before.chars().chain(middle).chain(after.chars()).collect()
        }
        None => term.chars().collect(),
    };
    let twice = (1..all.len()).any(|at| all[..at].contains(&all[at]));
    if all.len() == rank && !twice { Ok(all) } else { Err(wrong()) }
}

fn single_operand(
    x: &View,
    from: &Labels,
    output: &View,
    result: &Labels,
) -> Result<StepDraft, String> {
    let kept = |label: &&char| result.contains(*label);
    let order: Option<Vec<usize>> = from
        .iter()
        .filter(kept)
        .map(|label| result.iter().position(|other| other == label))
        .collect();
    let order = order.filter(|order| order.len() == result.len());
    let order = order.ok_or("a label of the output that no operand has")?;
    let target = View { slack: 0, ..output.permuted(&order) };
    let axes: Vec<usize> = (0..from.len()).filter(|at| !result.contains(&from[*at])).collect();
    if axes.is_empty() { copy(x, &target) } else { reduce(ReduceKind::Sum, x, &axes, &target) }
}

/// An operand with its labels.
#[derive(Clone, Copy)]
struct Term<'a> {
    view: &'a View,
    labels: &'a Labels,
}

impl Term<'_> {
    fn has(&self, label: char) -> bool {
        self.labels.contains(&label)
    }

    fn place(&self, label: char) -> Option<usize> {
        self.labels.iter().position(|other| *other == label)
    }

    fn size(&self, label: char) -> usize {
        self.place(label).map_or(1, |at| self.view.shape[at])
    }

    fn stride(&self, label: char) -> usize {
        self.place(label)
            .map_or(0, |at| if self.view.shape[at] == 1 { 0 } else { self.view.strides[at] })
    }
}

/// The loops over `labels`; an operand without the label has stride 0.
fn over(labels: &[char], size: &dyn Fn(char) -> usize, terms: &[Option<Term>]) -> LoopNest {
    let shape: Vec<usize> = labels.iter().map(|label| size(*label)).collect();
    let of = |term: &Option<Term>| {
        labels.iter().map(|label| term.map_or(0, |term| term.stride(*label))).collect()
    };
    let strides: Vec<Vec<usize>> = terms.iter().map(of).collect();
    LoopNest::new(&shape, &strides).merged()
}

fn two_operands(
    target: &GpuTarget,
    (a, left): (&View, &Labels),
    (b, right): (&View, &Labels),
    (output, result): (&View, &Labels),
) -> Result<StepDraft, String> {
    check(a, b, Extra { bias: None, residual: None }, output)?;
    let left = Term { view: a, labels: left };
    let right = Term { view: b, labels: right };
    let to = Term { view: output, labels: result };
    let size = |label: char| left.size(label).max(right.size(label));
    let known = |label: char| to.has(label) || (left.has(label) && right.has(label));
    let all_known = left.labels.iter().chain(right.labels).all(|label| known(*label));
    if !all_known || !result.iter().all(|label| size(*label) == to.size(*label)) {
        return Err("a label summed over in one operand only, or sizes that differ".to_string());
    }
    let summed: Labels = left.labels.iter().copied().filter(|label| !to.has(*label)).collect();
    let of = |in_left: bool, in_right: bool| -> Labels {
        let fits = |label: &char| left.has(*label) == in_left && right.has(*label) == in_right;
        result.iter().copied().filter(fits).collect()
    };
    let (rows, mut groups, mut columns) = (of(true, false), of(true, true), of(false, true));
    // The kernel has one dimension of columns: the longest; the others are groups.
    columns.sort_by_key(|label| size(*label));
    let column = columns.pop();
    groups.extend(columns);
    let along = |term: Term| column.map_or(0, |label| term.stride(label));
    let problem = Problem {
        kind: Kind::Matrix,
        group: over(&groups, &size, &[Some(left), Some(right), None, Some(to), None]),
        row: over(&rows, &size, &[Some(left), None, Some(to), None]),
        inner: over(&summed, &size, &[Some(left), Some(right)]),
        columns: column.map_or(1, size),
        depth: summed.iter().map(|label| size(*label)).product(),
        column: [along(right), 0, along(to), 0],
        picture: Picture::default(),
    };
    let views = Views { a, b, bias: None, residual: None, output };
    let epilogue = Epilogue { alpha: 1.0, beta: 1.0, activation: Activation::None };
    problem.work(target, "Einsum", &views, epilogue)
}
