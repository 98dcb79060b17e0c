//! What follows a product of bytes and becomes part of it.

use graph::ir::GraphNode;
use model::op::{Activation, Binary, Op, Variadic};
use model::{DataType, ValueId};

use super::source::{ByteSource, Scope};
use crate::gpu::lowering::Lowering;
use crate::gpu::product::Quantum;

/// What is added to a product.
#[derive(Clone, Copy, Debug)]
pub(super) enum Summand {
    Bytes(ValueId, Quantum),
    Real(ValueId),
}

/// Operators behind a product.
#[derive(Clone, Debug)]
pub(super) struct Behind {
    /// The value that the product then computes.
    pub last: ValueId,
    /// Those between, which nothing computes.
    pub covered: Vec<ValueId>,
    pub scale: Option<Vec<f32>>,
    /// A factor that is known only when the step runs.
    pub factor: Option<ValueId>,
    pub bias: Option<Vec<f32>>,
    pub activation: Activation,
    pub between: Option<Quantum>,
    pub residual: Option<Summand>,
    pub after: Activation,
    pub output: Option<Quantum>,
}

impl Behind {
    fn advance(&mut self, to: ValueId) {
        self.covered.push(self.last);
        self.last = to;
    }
}

impl Lowering<'_> {
    /// What follows `source`, whose result is `first`.
    pub(super) fn behind(&self, source: &ByteSource, first: ValueId) -> Behind {
        let mut behind = Behind {
            last: first,
            covered: Vec::new(),
            scale: source.scale.clone(),
            factor: None,
            bias: source.bias.clone(),
            activation: source.activation,
            between: None,
            residual: None,
            after: Activation::None,
            output: source.output,
        };
        if source.output.is_some() {
            return behind;
        }
        if source.scale.is_none() {
            if !self.scaled_behind(source, &mut behind) {
                return behind;
            }
            self.bias_behind(source, &mut behind);
            self.activation_behind(&mut behind, false);
        }
        if let Some(residual) = source.residual {
            behind.residual = self.byte_summand(residual).or(Some(Summand::Real(residual)));
            (behind.activation, behind.after) = (Activation::None, source.activation);
        } else {
            self.sum_behind_bytes(&mut behind);
        }
        if let Some((quantum, output)) = self.quantizer(behind.last) {
            behind.advance(output);
            behind.output = Some(quantum);
        }
        behind
    }

    /// The only reader of `id`.
    fn only_reader(&self, id: ValueId) -> Option<(&GraphNode, ValueId)> {
        let single = self.reads[id.index()] == 1;
        let node = self.reader(id).filter(|_| single)?;
        Some((node, node.outputs.first().copied().flatten()?))
    }

    fn scope(&self) -> Scope<'_> {
        Scope { graph: self.graph, producers: self.producers() }
    }

    fn quantizer(&self, id: ValueId) -> Option<(Quantum, ValueId)> {
        let (node, output) = self.only_reader(id)?;
        (node.inputs.first() == Some(&Some(id)))
            .then(|| Some((self.scope().quantizes(node)?, output)))?
    }

    /// Sums as real numbers: a cast, and a product with scales.
    fn scaled_behind(&self, source: &ByteSource, behind: &mut Behind) -> bool {
        let Some((cast, real)) = self.only_reader(behind.last) else { return false };
        let is_cast = matches!(&cast.op, Op::Cast(cast) if cast.to == DataType::F32);
        let Some((node, output)) = self.only_reader(real).filter(|_| is_cast) else {
            return false;
        };
        let (Op::Binary(Binary::Mul), [Some(a), Some(b)]) = (&node.op, &node.inputs[..]) else {
            return false;
        };
        let other = if *a == real { *b } else { *a };
        if *a == *b || self.shape(output).ok() != self.shape(real).ok() {
            return false;
        }
        let Some((scale, factor)) = self.scale_of(source, other, output) else { return false };
        behind.advance(real);
        behind.advance(output);
        (behind.scale, behind.factor) = (Some(scale), factor);
        true
    }

    /// The scales of the columns in `id`, and a factor that is known only when the step runs.
    fn scale_of(
        &self,
        source: &ByteSource,
        id: ValueId,
        output: ValueId,
    ) -> Option<(Vec<f32>, Option<ValueId>)> {
        if let Some(scale) = self.column_values(source, id, output) {
            return Some((scale, None));
        }
        let single = |id: ValueId| {
            let one = self.shape(id).ok()?.iter().product::<usize>() == 1;
            (one && self.graph.value(id).dtype == DataType::F32).then_some(id)
        };
        if let Some(node) = self.producer(id)
            && let (Op::Binary(Binary::Mul), [Some(a), Some(b)]) = (&node.op, &node.inputs[..])
        {
            for (factor, scale) in [(*a, *b), (*b, *a)] {
                let known = self.column_values(source, scale, output);
                if let (Some(factor), Some(scale)) = (single(factor), known) {
                    return Some((scale, Some(factor)));
                }
            }
        }
        Some((vec![1.0; source.columns], Some(single(id)?)))
    }

    /// A constant that varies along the columns only.
    fn column_values(&self, source: &ByteSource, id: ValueId, output: ValueId) -> Option<Vec<f32>> {
        let tensor = self.graph.constant(id)?;
        let rank = self.shape(output).ok()?.len();
        let axis = if source.is_convolution() { 1 } else { rank - 1 };
        let own = tensor.shape();
        let missing = rank.checked_sub(own.len())?;
        let flat = (0..own.len()).all(|at| at + missing == axis || own[at] == 1);
        let values = graph::content::floats(tensor).filter(|_| flat)?;
        match values.len() {
            1 => Some(vec![values[0]; source.columns]),
            len => (len == source.columns).then_some(values),
        }
    }

    fn bias_behind(&self, source: &ByteSource, behind: &mut Behind) {
        let Some((node, output)) = self.only_reader(behind.last) else { return };
        let (Op::Binary(Binary::Add), [Some(a), Some(b)]) = (&node.op, &node.inputs[..]) else {
            return;
        };
        let other = if *a == behind.last { *b } else { *a };
        let same = self.shape(output).ok() == self.shape(behind.last).ok();
        if let Some(bias) = self.column_values(source, other, output).filter(|_| same) {
            behind.advance(output);
            behind.bias = Some(bias);
        }
    }

    /// An activation of the product, or of its sum with the residual.
    fn activation_behind(&self, behind: &mut Behind, after: bool) {
        let Some((node, output)) = self.only_reader(behind.last) else { return };
        let activation = match &node.op {
            Op::Unary(unary) => graph::pass::epilogue::activation(*unary),
            _ => None,
        };
        let Some(activation) = activation else { return };
        behind.advance(output);
        if after {
            behind.after = activation;
        } else {
            behind.activation = activation;
        }
    }

    /// A sum with a value that is known already; the product may be quantized before.
    fn sum_behind_bytes(&self, behind: &mut Behind) {
        let mut trial = behind.clone();
        if let Some((quantum, bytes)) = self.quantizer(trial.last) {
            let Some((node, real)) = self.only_reader(bytes) else { return };
            let same = self.scope().dequantized_tensor(real);
            if !matches!(node.op, Op::DequantizeLinear { .. }) || same != Some((bytes, quantum)) {
                return;
            }
            trial.advance(bytes);
            trial.advance(real);
            trial.between = Some(quantum);
        }
        let Some((node, output)) = self.only_reader(trial.last) else { return };
        let adds = matches!(node.op, Op::Binary(Binary::Add) | Op::Variadic(Variadic::Sum));
        let [Some(a), Some(b)] = node.inputs[..] else { return };
        let other = if a == trial.last { b } else { a };
        let shape = |id: ValueId| self.shape(id).ok();
        let same = shape(other) == shape(output) && shape(trial.last) == shape(output);
        if !adds || a == b || !same {
            return;
        }
        let Some(summand) = self.byte_summand(other) else { return };
        trial.advance(output);
        trial.residual = Some(summand);
        self.activation_behind(&mut trial, true);
        *behind = trial;
    }

    /// A summand that is in memory.
    fn byte_summand(&self, id: ValueId) -> Option<Summand> {
        if let Some((bytes, quantum)) = self.scope().dequantized_tensor(id)
            && (self.is_defined(bytes) || self.graph.constant(bytes).is_some())
        {
            return Some(Summand::Bytes(bytes, quantum));
        }
        let real = self.graph.value(id).dtype.is_float();
        (self.is_in_memory(id) && real).then_some(Summand::Real(id))
    }
}
