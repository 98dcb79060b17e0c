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

    #[cfg(test)]
    fn total(&self) -> usize {
        self.rewrites.iter().map(|(_, count)| count).sum()
    }

    fn add(&mut self, pass: &'static str, count: usize) {
        match self.rewrites.iter_mut().find(|(name, _)| *name == pass) {
            Some((_, total)) => *total += count,
            None => self.rewrites.push((pass, count)),
        }
    }
}

/// How many rewrites a pass made, and whether it changed anything: what it notes down without a
/// rewrite may matter to other passes, too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassResult {
    pub(crate) rewrites: usize,
    pub(crate) changed: bool,
}

impl From<usize> for PassResult {
    fn from(rewrites: usize) -> PassResult {
        PassResult { rewrites, changed: rewrites > 0 }
    }
}

struct Pass {
    name: &'static str,
    run: fn(&mut Graph) -> PassResult,
    /// Operators of which it rewrites one at least: without them it has nothing to do.
    roots: fn(&Op) -> bool,
}

/// In this order: simple shapes first, then patterns that later fusions would hide, then fusions.
const PASSES: [Pass; 14] = [
    Pass { name: "identity", run: identity::noted, roots: |_| true },
    Pass {
        name: "gather",
        run: |graph| gather::run(graph).into(),
        roots: |op| matches!(op, Op::Gather { .. } | Op::GatherNd { .. }),
    },
    Pass {
        name: "reshape",
        run: |graph| reshape::run(graph).into(),
        roots: |op| matches!(op, Op::Reshape { .. }),
    },
    Pass { name: "dead", run: |graph| dead::run(graph).into(), roots: |_| true },
    Pass {
        name: "quantization",
        run: |graph| quantization::run(graph).into(),
        roots: |op| matches!(op, Op::QuantizeLinear { .. }),
    },
    Pass {
        name: "norm",
        run: |graph| norm::run(graph).into(),
        roots: |op| matches!(op, Op::Binary(_)),
    },
    Pass {
        name: "group_norm",
        run: |graph| group_norm::run(graph).into(),
        roots: |op| matches!(op, Op::InstanceNorm { .. } | Op::GroupNorm { .. }),
    },
    Pass {
        name: "activation",
        run: |graph| activation::run(graph).into(),
        roots: |op| matches!(op, Op::Binary(_) | Op::Softmax(_)),
    },
    Pass {
        name: "einsum",
        run: |graph| einsum::run(graph).into(),
        roots: |op| matches!(op, Op::Einsum { .. }),
    },
    Pass {
        name: "attention",
        run: |graph| attention::run(graph).into(),
        roots: |op| matches!(op, Op::MatMul(_) | Op::Attention { .. }),
    },
    Pass {
        name: "product",
        run: |graph| product::run(graph).into(),
        roots: |op| matches!(op, Op::MatMul(_) | Op::Gemm(_)),
    },
    Pass {
        name: "padding",
        run: |graph| padding::run(graph).into(),
        roots: |op| matches!(op, Op::Pad { .. }),
    },
    Pass {
        name: "batch_norm",
        run: |graph| batch_norm::run(graph).into(),
        roots: |op| matches!(op, Op::BatchNorm { .. } | Op::Conv(_) | Op::ConvTranspose(_)),
    },
    Pass {
        name: "epilogue",
        run: |graph| epilogue::run(graph).into(),
        roots: |op| matches!(op, Op::Binary(_) | Op::Variadic(_) | Op::Unary(_) | Op::Clip),
    },
];

/// Passes of a round: those above, and three that need more than the graph or end the round.
const PASSES_OF_A_ROUND: usize = PASSES.len() + 3;

/// Rewrites `graph` into an equivalent one that runs faster, until nothing changes. With an
/// `evaluator`, everything that depends only on constants is computed now.
pub fn optimize(graph: &mut Graph, evaluator: Option<&dyn Evaluator>) -> PassReport {
    let mut rounds = Rounds::default();
    let mut budget = fold::FoldBudget::new(graph);
    for _ in 0..MAX_ROUNDS {
        rounds.step("fold", || fold::noted(graph, evaluator, &mut budget));
        rounds.step("control", || control::run(graph, evaluator).into());
        for Pass { name, run, roots } in &PASSES {
            rounds.step(name, || match graph.nodes.iter().any(|node| roots(&node.op)) {
                true => run(graph),
                false => 0usize.into(),
            });
        }
        rounds.step("dead", || dead::run(graph).into());
        if rounds.are_done() {
            break;
        }
    }
    rounds.report
}

/// Rounds over all passes.
#[derive(Default)]
struct Rounds {
    report: PassReport,
    /// Passes since the last one that changed something. When they are all, each has seen the
    /// graph as it is and changed nothing: so would the next round.
    idle: usize,
}

impl Rounds {
    fn are_done(&self) -> bool {
        self.idle >= PASSES_OF_A_ROUND
    }

    fn step(&mut self, name: &'static str, run: impl FnOnce() -> PassResult) {
        if self.are_done() {
            return;
        }
        let PassResult { rewrites, changed } = run();
        self.report.add(name, rewrites);
        self.idle = if changed { 0 } else { self.idle + 1 };
    }
}
