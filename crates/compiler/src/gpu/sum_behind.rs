//! A sum behind a product, with only changes of view between, as part of the product.

use model::ValueId;
use model::op::{Activation, Binary, Op};

use super::conv::{Matrix, inverse, row_order, row_order_of, rows_of};
use super::factored::FactoredView;
use super::lowering::{Lowering, UnsupportedReason};
use super::view::{Element, View};

/// A sum that a product can compute.
struct SumBehind {
    /// The other summand in the sizes of the product.
    summand: View,
    output: ValueId,
}

impl Lowering<'_> {
    /// As [`Lowering::fast_matrix`], with the sum behind the product if there is one.
    pub fn matrix_and_sum(&mut self, mut matrix: Matrix) -> Result<bool, UnsupportedReason> {
        let sum = self.sum_behind(&matrix)?;
        if let Some(sum) = &sum {
            matrix.residual = Some(sum.summand.clone());
        }
        if !self.fast_matrix(&matrix)? {
            return Ok(false);
        }
        if let Some(sum) = sum {
            self.define_sum(matrix.parts[0].output, sum.output)?;
        }
        Ok(true)
    }

    /// The sum of the product and a value that is in memory already, if rows of both are in the
    /// same order there.
    fn sum_behind(&mut self, matrix: &Matrix) -> Result<Option<SumBehind>, UnsupportedReason> {
        let plain = matrix.residual.is_none() && matrix.activation == Activation::None;
        let [part] = &matrix.parts[..] else { return Ok(None) };
        if !plain || self.float() != Element::F16 {
            return Ok(None);
        }
        let Some((other, output)) = self.summand(part.output) else { return Ok(None) };
        let view = self.operand(other)?;
        let shape = self.shape(part.output)?;
        let Some(summand) = self.before_views(part.output, &view, &shape) else { return Ok(None) };
        let input = self.operand(matrix.input)?;
        let rows = shape.iter().product::<usize>() / part.columns.max(1);
        let order = row_order(&input, &shape);
        let ordered = summand.permuted(&row_order_of(&order, shape.len()));
        let readable = rows_of(&input.permuted(&order), rows, matrix.depth()).is_some()
            && rows_of(&ordered, rows, part.columns).is_some();
        Ok(readable.then_some(SumBehind { summand, output }))
    }

    /// The other summand and the result of the sum behind `id`, with only views between.
    fn summand(&self, id: ValueId) -> Option<(ValueId, ValueId)> {
        let last = self.views_behind(id).last().map_or(id, |(.., last)| *last);
        if self.reads[last.index()] != 1 {
            return None;
        }
        let node = self.reader(last)?;
        let (Op::Binary(Binary::Add), [Some(a), Some(b)]) = (&node.op, &node.inputs[..]) else {
            return None;
        };
        let (other, output) = (if *a == last { *b } else { *a }, node.outputs.first().copied()??);
        // An expression that nothing else reads is better computed together with the sum.
        let known =
            self.is_in_memory(other) || (self.is_defined(other) && self.reads[other.index()] > 1);
        let same = self.shape(other).ok()? == self.shape(last).ok()?;
        let free = self.placement(output).is_none();
        (other != last && known && same && free).then_some((other, output))
    }

    /// `view`, which has the sizes behind the views that follow `id`, in those of `id`.
    fn before_views(&self, id: ValueId, view: &View, shape: &[usize]) -> Option<View> {
        let chain = self.views_behind(id);
        let mut view = FactoredView::new(view);
        for (at, (op, ..)) in chain.iter().enumerate().rev() {
            let before = if at == 0 { shape } else { &chain[at - 1].1[..] };
            view = match op {
                Op::Transpose { perm } => view.permuted(&inverse(&order_of(perm, before.len()))),
                _ => view.reshaped(before)?,
            };
        }
        view.plain().filter(|view| view.element == Element::F16)
    }

    /// Defines the sum `output` as the product `id` behind the views that follow it.
    fn define_sum(&mut self, id: ValueId, output: ValueId) -> Result<(), UnsupportedReason> {
        let chain: Vec<(Op, Vec<usize>, ValueId)> = self
            .views_behind(id)
            .into_iter()
            .map(|(op, shape, id)| (op.clone(), shape, id))
            .collect();
        let mut view = FactoredView::new(&self.operand(id)?);
        for (op, shape, id) in chain {
            view = match op {
                Op::Transpose { perm } => view.permuted(&order_of(&perm, shape.len())),
                _ => view.reshaped(&shape).ok_or("the product cannot be given these sizes")?,
            };
            self.define_factored(id, view.clone());
        }
        self.define_factored(output, view);
        Ok(())
    }
}

/// The order of a transposition, which is reversed by default.
fn order_of(perm: &Option<Vec<usize>>, rank: usize) -> Vec<usize> {
    perm.clone().unwrap_or_else(|| (0..rank).rev().collect())
}
