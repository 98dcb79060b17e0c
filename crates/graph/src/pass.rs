//! Passes: each rewrites the graph in place and returns the number of rewrites.

use model::Tensor;
use model::op::Op;

use crate::ir::Graph;

pub mod activation;
pub mod attention;
pub mod batch_norm;
pub mod control;
pub mod dead;
pub mod editor;
pub mod einsum;
pub mod epilogue;
pub mod fold;
pub mod gather;
pub mod group_norm;
pub mod identity;
pub mod norm;
pub mod padding;
pub mod product;
pub mod quantization;
pub mod reshape;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

/// The maximum number of rounds over all passes; a round without changes ends earlier.
const MAX_ROUNDS: usize = 8;

/// Runs one operator on constants, so that passes can fold them. A device provides its kernels.
pub trait Evaluator {
    /// The outputs of `op` on `inputs`, or `None` when it is not supported.
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>>;
}

/// The number of rewrites by pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassReport {
    /// Pass name and how many rewrites it made, in the order the passes run.
    pub rewrites: Vec<(&'static str, usize)>,
}

impl PassReport {
    /// How many rewrites `pass` made.
    pub fn count(&self, pass: &str) -> usize {
        self.rewrites.iter().filter(|(name, _)| *name == pass).map(|(_, count)| count).sum()
    }

    fn add(&mut self, pass: &'static str, count: usize) {
        match self.rewrites.iter_mut().find(|(name, _)| *name == pass) {
            Some((_, total)) => *total += count,
            None => self.rewrites.push((pass, count)),
        }
    }

    fn total(&self) -> usize {
        self.rewrites.iter().map(|(_, count)| count).sum()
    }
}

type Pass = fn(&mut Graph) -> usize;

/// In this order: simple shapes first, then patterns that later fusions would hide, then fusions.
const PASSES: [(&str, Pass); 14] = [
    ("identity", identity::run),
    ("gather", gather::run),
    ("reshape", reshape::run),
    ("dead", dead::run),
    ("quantization", quantization::run),
    ("norm", norm::run),
    ("group_norm", group_norm::run),
    ("activation", activation::run),
    ("einsum", einsum::run),
    ("attention", attention::run),
    ("product", product::run),
    ("padding", padding::run),
    ("batch_norm", batch_norm::run),
    ("epilogue", epilogue::run),
];

/// Rewrites `graph` into an equivalent one that runs faster, until nothing changes. With an
/// `evaluator`, everything that depends only on constants is computed now.
pub fn optimize(graph: &mut Graph, evaluator: Option<&dyn Evaluator>) -> PassReport {
    let mut report = PassReport::default();
    let mut budget = fold::FoldBudget::new(graph);
    for _ in 0..MAX_ROUNDS {
        let before = report.total();
        report.add("fold", fold::run(graph, evaluator, &mut budget));
        report.add("control", control::run(graph, evaluator));
        for (name, pass) in PASSES {
            report.add(name, pass(graph));
        }
        report.add("dead", dead::run(graph));
        if report.total() == before {
            break;
        }
    }
    report
}
