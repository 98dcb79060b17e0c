//! Passes: each rewrites the graph in place and says how often.

use model::Tensor;
use model::op::Op;

use crate::ir::Graph;

pub mod dead;

/// Runs one operator on constants, so that passes can fold them. A device lends its kernels.
pub trait Evaluator {
    /// The outputs of `op` on `inputs`, or `None` when it cannot tell.
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], outputs: usize) -> Option<Vec<Tensor>>;
}

/// What the passes did, by pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Pass name and how many rewrites it made, in the order the passes first ran.
    pub rewrites: Vec<(&'static str, usize)>,
}

impl Report {
    /// How many rewrites `pass` made.
    pub fn count(&self, pass: &str) -> usize {
        self.rewrites.iter().filter(|(name, _)| *name == pass).map(|(_, count)| count).sum()
    }
}

/// Rewrites `graph` into an equal one that is faster to run.
pub fn optimize(graph: &mut Graph, _evaluator: Option<&dyn Evaluator>) -> Report {
    let count = dead::run(graph);
    Report { rewrites: vec![("dead", count)] }
}
