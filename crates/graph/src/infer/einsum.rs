//! Shapes of products in Einstein notation.

use std::collections::BTreeMap;

use super::shape::{broadcast, broadcast_dim};
use super::{Fact, Inferred, Operands, fail};
use model::dim::SymDim;

/// The labels of one operand: those before the ellipsis, and those behind it when there is one.
struct Term {
    before: Vec<char>,
    after: Option<Vec<char>>,
}

impl Term {
    fn parse(text: &str) -> Inferred<Term> {
        let mut parts = text.splitn(2, "...");
        let labels = |part: &str| -> Inferred<Vec<char>> {
            match part.chars().find(|c| !c.is_ascii_alphabetic()) {
                None => Ok(part.chars().collect()),
                Some(other) => fail(format!("'{other}' in an einsum equation")),
            }
        };
        let before = labels(parts.next().unwrap_or_default())?;
        let after = parts.next().map(labels).transpose()?;
        Ok(Term { before, after })
    }

    fn labels(&self) -> impl Iterator<Item = char> + '_ {
        self.before.iter().chain(self.after.iter().flatten()).copied()
    }
}

/// The operands and the result of an equation.
fn parse(equation: &str) -> Inferred<(Vec<Term>, Term)> {
    let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation.as_str(), None),
    };
    let terms: Vec<Term> = left.split(',').map(Term::parse).collect::<Inferred<_>>()?;
    let out = match right {
        Some(text) => Term::parse(text)?,
        None => implicit_output(&terms),
    };
    Ok((terms, out))
}

/// The labels of every dimension of operands of these ranks, and of the result. The dimensions of
/// an ellipsis get labels that no equation can contain.
pub fn labels(equation: &str, ranks: &[usize]) -> Option<(Vec<Vec<char>>, Vec<char>)> {
    let (terms, out) = parse(equation).ok()?;
    if terms.len() != ranks.len() {
        return None;
    }
    let unnamed = |term: &Term, rank: usize| match term.after {
        Some(_) => rank.checked_sub(term.labels().count()),
        None => (term.labels().count() == rank).then_some(0),
    };
    let counts: Vec<usize> =
        terms.iter().zip(ranks).map(|(term, rank)| unnamed(term, *rank)).collect::<Option<_>>()?;
    let most = counts.iter().copied().max().unwrap_or(0);
    let all = |term: &Term, count: usize| {
        // They are aligned at their ends.
        let unnamed = (most - count..most).filter_map(|i| char::from_u32(0xe000 + i as u32));
        let (before, after) = (term.before.iter(), term.after.iter().flatten());
        before.copied().chain(unnamed).chain(after.copied()).collect::<Vec<char>>()
    };
    let operands = terms.iter().zip(counts).map(|(term, count)| all(term, count)).collect();
    let result = all(&out, if out.after.is_some() { most } else { 0 });
    Some((operands, result))
}

pub fn einsum(equation: &str, x: &Operands) -> Inferred<Fact> {
    x.require(x.count().max(1))?;
    let dtype = x.same_type(0..x.count())?;
    let (terms, out) = parse(equation)?;
    if terms.len() != x.count() {
        return fail(format!("the equation has {} operands, the node {}", terms.len(), x.count()));
    }
    let mut sizes: BTreeMap<char, SymDim> = BTreeMap::new();
    let mut ellipsis = Vec::new();
    for (index, term) in terms.iter().enumerate() {
        let Some(shape) = x.shape(index) else { return Ok(Fact::new(dtype, None)) };
        bind(term, shape, &mut sizes, &mut ellipsis)?;
    }
    let mut dims = Vec::new();
    let size = |label: &char| match sizes.get(label) {
        Some(dim) => Ok(dim.clone()),
        None => fail(format!("label '{label}' occurs only in the output")),
    };
    for label in &out.before {
        dims.push(size(label)?);
    }
    if let Some(after) = &out.after {
        dims.extend(ellipsis);
        for label in after {
            dims.push(size(label)?);
        }
    }
    Ok(Fact::new(dtype, Some(dims)))
}

fn bind(
    term: &Term,
    shape: &[SymDim],
    sizes: &mut BTreeMap<char, SymDim>,
    ellipsis: &mut Vec<SymDim>,
) -> Inferred<()> {
    let after = term.after.as_deref().unwrap_or_default();
    let named = term.before.len() + after.len();
    if shape.len() < named || (term.after.is_none() && shape.len() != named) {
        return fail(format!("{named} labels for an operand of rank {}", shape.len()));
    }
    let (front, rest) = shape.split_at(term.before.len());
    let (middle, back) = rest.split_at(rest.len() - after.len());
    for (label, dim) in term.before.iter().zip(front).chain(after.iter().zip(back)) {
        let known = sizes.get(label).cloned().unwrap_or(SymDim::Fixed(1));
        match broadcast_dim(&known, dim) {
            Some(common) => sizes.insert(*label, common),
            None => return fail(format!("label '{label}' is both {known} and {dim}")),
        };
    }
    *ellipsis = broadcast(ellipsis, middle)?;
    Ok(())
}

/// Without an arrow: the labels that occur once, in alphabetical order.
fn implicit_output(terms: &[Term]) -> Term {
    let mut counts: BTreeMap<char, usize> = BTreeMap::new();
    for label in terms.iter().flat_map(Term::labels) {
        *counts.entry(label).or_default() += 1;
    }
    let once: Vec<char> =
        counts.into_iter().filter(|(_, count)| *count == 1).map(|(label, _)| label).collect();
    match terms.iter().any(|term| term.after.is_some()) {
        true => Term { before: vec![], after: Some(once) },
        false => Term { before: once, after: None },
    }
}
