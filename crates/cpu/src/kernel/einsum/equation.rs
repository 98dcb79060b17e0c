//! Parser of einsum equations.

use super::Label;
use crate::kernel::{KernelError, invalid};

/// A parsed equation. `None` stands for `...`.
pub(super) struct Equation {
    terms: Vec<Vec<Option<char>>>,
    output: Option<Vec<Option<char>>>,
}

impl Equation {
    /// Parses `text`, which must have `operands` terms.
    pub(super) fn parse(text: &str, operands: usize) -> Result<Equation, KernelError> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = match text.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (text.as_str(), None),
        };
        let terms = left.split(',').map(parse_term).collect::<Result<Vec<_>, _>>()?;
        if terms.len() != operands {
            return Err(invalid!("'{text}' has {} terms for {operands} operands", terms.len()));
        }
        let output = right.map(parse_term).transpose()?;
        if let Some(output) = &output {
            for (index, label) in output.iter().enumerate() {
                let known = label.is_none() || terms.iter().any(|term| term.contains(label));
                if !known || output[..index].contains(label) {
                    return Err(invalid!(
                        "'{text}' repeats an output subscript or has one that no operand has"
                    ));
                }
            }
        }
        Ok(Equation { terms, output })
    }

    /// The labels of each operand and of the output, for operands of the given ranks.
    pub(super) fn labels(
        &self,
        ranks: &[usize],
    ) -> Result<(Vec<Vec<Label>>, Vec<Label>), KernelError> {
        let mut longest = 0;
        let mut terms = Vec::with_capacity(ranks.len());
        for (term, &rank) in self.terms.iter().zip(ranks) {
            let letters = term.iter().flatten().count();
            let hidden = rank.checked_sub(letters).filter(|&n| n == 0 || term.contains(&None));
            let hidden = hidden
                .ok_or_else(|| invalid!("an operand of rank {rank} has {letters} subscripts"))?;
            longest = longest.max(hidden);
            terms.push(expand(term, hidden));
        }
        let output = match &self.output {
            Some(output) => expand(output, longest),
            None => self.implied(longest),
        };
        Ok((terms, output))
    }

    /// The output of an equation without one: the dimensions of `...`, then letters that occur
    /// once, in alphabetical order.
    fn implied(&self, hidden: usize) -> Vec<Label> {
        let mut letters: Vec<char> = self.terms.iter().flatten().flatten().copied().collect();
        letters.sort_unstable();
        let once = letters
            .iter()
            .filter(|&letter| letters.iter().filter(|&other| other == letter).count() == 1);
        let hidden = (0..hidden).rev().map(Label::Ellipsis);
        hidden.chain(once.map(|&letter| Label::Letter(letter))).collect()
    }
}

fn parse_term(text: &str) -> Result<Vec<Option<char>>, KernelError> {
    let mut term = Vec::new();
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("...") {
            if term.contains(&None) {
                return Err(invalid!("'{text}' has two ellipses"));
            }
            term.push(None);
            rest = after;
        } else if letter.is_ascii_alphabetic() {
            term.push(Some(letter));
            rest = &rest[1..];
        } else {
            return Err(invalid!("'{letter}' is no subscript"));
        }
    }
    Ok(term)
}

fn expand(term: &[Option<char>], hidden: usize) -> Vec<Label> {
    let mut labels = Vec::with_capacity(term.len() + hidden);
    for label in term {
        match label {
            Some(letter) => labels.push(Label::Letter(*letter)),
            None => labels.extend((0..hidden).rev().map(Label::Ellipsis)),
        }
    }
    labels
}
