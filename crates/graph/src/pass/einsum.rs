//! Writes products in Einstein notation as matrix products, so that everything that is known about
//! matrix products applies to them: constant weights, fusion, attention.
//!
//! Labels of two operands are of four kinds: *batch* is in both and in the result, *rows* only in
//! the first and *columns* only in the second of them, and *depth* is summed. Other equations stay.

use model::ValueId;
use model::dim::SymDim;
use model::op::{MatMul, Op};

use super::attention::level;
use super::editor::{Editor, pair};
use crate::infer;
use crate::ir::Graph;

/// Rewrites what it can. Returns how many products were rewritten.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        rewrite(&mut editor, index);
    }
    editor.finish()
}

/// An operand: its value and the label of each dimension.
#[derive(Clone)]
struct Operand {
    value: ValueId,
    labels: Vec<char>,
}

/// The labels of a product by kind, each in the order of the result.
struct Kinds {
    batch: Vec<char>,
    rows: Vec<char>,
    columns: Vec<char>,
    depth: Vec<char>,
}

impl Kinds {
    /// `None` when some label is of no kind, or a kind that a matrix needs is missing.
    fn of(a: &[char], b: &[char], out: &[char]) -> Option<Kinds> {
        let unique = |labels: &[char]| {
            labels.iter().enumerate().all(|(at, label)| !labels[..at].contains(label))
        };
        let pick = |from: &[char], keep: &dyn Fn(&char) -> bool| -> Vec<char> {
            from.iter().copied().filter(keep).collect()
        };
        let kinds = Kinds {
            batch: pick(out, &|label| a.contains(label) && b.contains(label)),
            rows: pick(out, &|label| a.contains(label) && !b.contains(label)),
            columns: pick(out, &|label| !a.contains(label) && b.contains(label)),
            depth: pick(a, &|label| b.contains(label) && !out.contains(label)),
        };
        let Kinds { batch, rows, columns, depth } = &kinds;
        let complete = a.len() == batch.len() + rows.len() + depth.len()
            && b.len() == batch.len() + columns.len() + depth.len()
            && [a, b, out].into_iter().all(unique);
        let matrices = !rows.is_empty() && !columns.is_empty() && !depth.is_empty();
        (complete && matrices).then_some(kinds)
    }
}

fn rewrite(editor: &mut Editor, index: usize) -> Option<()> {
    let node = editor.node(index)?;
    let Op::Einsum { equation } = &node.op else { return None };
    let (a, b) = pair(&node.inputs).filter(|_| node.inputs.len() == 2)?;
    let shape = |id: ValueId| editor.graph.shape(id).map(<[SymDim]>::to_vec);
    let (mut terms, out) = infer::einsum_labels(equation, &[shape(a)?.len(), shape(b)?.len()])?;
    if !editor.graph.value(a).dtype.is_float() {
        return None;
    }
    let (second, first) = (terms.pop()?, terms.pop()?);
    let mut a = Operand { value: a, labels: first };
    let mut b = Operand { value: b, labels: second };
    // The last dimension of the result is one of columns.
    if out.last().is_some_and(|label| a.labels.contains(label) && !b.labels.contains(label)) {
        std::mem::swap(&mut a, &mut b);
    }
    let kinds = Kinds::of(&a.labels, &b.labels, &out)?;
    let size = |operand: &Operand, label: &char| {
        let axis = operand.labels.iter().position(|own| own == label)?;
        shape(operand.value)?.get(axis).cloned()
    };
    let same_depth = kinds.depth.iter().all(
        |label| matches!((size(&a, label), size(&b, label)), (Some(x), Some(y)) if x.is_same(&y)),
    );
    let (columns_merge, depth_merges) = (kinds.columns.len() > 1, kinds.depth.len() > 1);
    // Without batches the rows are what a product repeats its second matrix for; they are merged
    // together with the depth all the same.
    let rows_merge = kinds.rows.len() > 1 && (!kinds.batch.is_empty() || depth_merges);
    let merges = [rows_merge || depth_merges, columns_merge || depth_merges];
    let plans = [plan(&a, &kinds, true), plan(&b, &kinds, false)];
    // Merging dimensions that are not adjacent would copy the operand; the notation does not.
    let free = |(merge, (operand, plan)): (bool, (&Operand, &Plan))| {
        !merge || plan.is_plain() || editor.graph.constant(operand.value).is_some()
    };
    if !same_depth || !merges.into_iter().zip([&a, &b].into_iter().zip(&plans)).all(free) {
        return None;
    }
    let sizes = |operand: &Operand, labels: &[char]| -> Option<Vec<SymDim>> {
        labels.iter().map(|label| size(operand, label)).collect()
    };
    let (rows, columns) = (sizes(&a, &kinds.rows)?, sizes(&b, &kinds.columns)?);
    let batch: Vec<SymDim> = (kinds.batch.iter())
        .map(|label| size(&a, label).filter(|dim| !dim.is(1)).or_else(|| size(&b, label)))
        .collect::<Option<_>>()?;
    let mut writer = Writer { name: node.name.clone(), editor, index };
    let [left, right] = &plans;
    let x = writer.operand("a", &a, left, merges[0].then_some(&kinds))?;
    let y = writer.operand("b", &b, right, merges[1].then_some(&kinds))?;
    let product =
        MatMul { transpose_a: left.transposed, transpose_b: right.transposed, ..MatMul::default() };
    let written = [&kinds.batch[..], &kinds.rows, &kinds.columns].concat();
    let whole = (rows_merge || columns_merge).then(|| [batch, rows, columns].concat());
    writer.finish(product, (x, y), whole, (&written, &out))
}

/// How an operand becomes matrices.
struct Plan {
    /// The permutation; as it is when `None`.
    perm: Option<Vec<usize>>,
    /// Whether the product swaps its last two dimensions.
    transposed: bool,
}

impl Plan {
    fn is_plain(&self) -> bool {
        self.perm.is_none()
    }
}

/// As batches, rows and depth (or depth and columns, unless `of_a`), in the order that needs no
/// permutation if there is one.
fn plan(operand: &Operand, kinds: &Kinds, of_a: bool) -> Plan {
    let edge = if of_a { &kinds.rows } else { &kinds.columns };
    let deep_last = [&kinds.batch[..], edge, &kinds.depth].concat();
    let deep_first = [&kinds.batch[..], &kinds.depth, edge].concat();
    let perm_to = |order: &[char]| -> Vec<usize> {
        order.iter().filter_map(|l| operand.labels.iter().position(|own| own == l)).collect()
    };
    // Several rows beside no batch are batches of the product: the depth must be last.
    let swaps = edge.len() == 1 || !kinds.batch.is_empty() || !of_a;
    if operand.labels == deep_last {
        return Plan { perm: None, transposed: !of_a };
    }
    if operand.labels == deep_first && swaps {
        return Plan { perm: None, transposed: of_a };
    }
    let last_is_depth = operand.labels.last().is_some_and(|label| kinds.depth.contains(label));
    match last_is_depth || !swaps {
        true => Plan { perm: Some(perm_to(&deep_last)), transposed: !of_a },
        false => Plan { perm: Some(perm_to(&deep_first)), transposed: of_a },
    }
}

/// Nodes that are inserted before node `index`.
struct Writer<'e, 'g> {
    name: String,
    editor: &'e mut Editor<'g>,
    index: usize,
}

impl Writer<'_, '_> {
    fn insert(&mut self, part: &str, op: Op, inputs: &[ValueId]) -> Option<ValueId> {
        let name = format!("{}/{part}", self.name);
        let inputs = inputs.iter().map(|id| Some(*id)).collect();
        self.editor.insert(self.index, &name, op, inputs)
    }

    fn target(&mut self, x: ValueId, dims: &[SymDim]) -> Option<ValueId> {
        let target = level::target(self.editor.graph.shape(x)?, dims)?;
        self.editor.ints(&format!("{}/shape", self.name), &target)
    }

    /// The operand as matrices; with `merged`, its edge and its depth are one dimension each.
    fn operand(
        &mut self,
        part: &str,
        operand: &Operand,
        plan: &Plan,
        merged: Option<&Kinds>,
    ) -> Option<ValueId> {
        let (mut x, mut labels) = (operand.value, operand.labels.clone());
        if let Some(perm) = &plan.perm {
            x = self.insert(part, Op::Transpose { perm: Some(perm.clone()) }, &[x])?;
            labels = perm.iter().map(|axis| operand.labels[*axis]).collect();
        }
        let Some(kinds) = merged else { return Some(x) };
        let shape = self.editor.graph.shape(x)?.to_vec();
        let batch = kinds.batch.len();
        let is_depth = |at: usize| kinds.depth.contains(&labels[at]);
        let change = (batch + 1..labels.len()).find(|at| is_depth(*at) != is_depth(at - 1))?;
        let product = |dims: &[SymDim]| {
            dims.iter().skip(1).fold(dims[0].clone(), |product, dim| product.mul(dim))
        };
        let mut dims = shape[..batch].to_vec();
        dims.push(product(&shape[batch..change]));
        dims.push(product(&shape[change..]));
        let target = self.target(x, &dims)?;
        self.insert(&format!("{part}/merged"), Op::Reshape { allow_zero: false }, &[x, target])
    }

    /// The product in place of the node. `whole` are its dimensions where some were merged,
    /// `written` their labels and `out` those of the result.
    fn finish(
        mut self,
        product: MatMul,
        (x, y): (ValueId, ValueId),
        whole: Option<Vec<SymDim>>,
        (written, out): (&[char], &[char]),
    ) -> Option<()> {
        let perm: Vec<usize> =
            out.iter().map(|l| written.iter().position(|own| own == l)).collect::<Option<_>>()?;
        let ordered = perm.iter().copied().eq(0..perm.len());
        let mut last = (Op::MatMul(product), vec![x, y]);
        if let Some(dims) = whole {
            let z = self.insert("product", last.0, &last.1)?;
            let target = self.target(z, &dims)?;
            last = (Op::Reshape { allow_zero: false }, vec![z, target]);
        }
        if !ordered {
            let z = self.insert("ordered", last.0, &last.1)?;
            last = (Op::Transpose { perm: Some(perm) }, vec![z]);
        }
        let inputs = last.1.into_iter().map(Some).collect();
        self.editor.replace(self.index, last.0, inputs);
        Some(())
    }
}
