//! Writes the operator for an attention that was found.

use model::op::{Binary, Cast, Op, Unary};
use model::{DataType, ValueId};

use super::level::{self, Level, batch_of, broadcasts_alike, keeps_matrices};
use super::{Found, Matrix, Term, TermKind};
use crate::content;
use crate::ir::Graph;
use crate::pass::editor::{Editor, first};

/// Nodes that are inserted before node `index`.
struct Writer<'e, 'g> {
    editor: &'e mut Editor<'g>,
    index: usize,
    name: String,
    dtype: DataType,
    fine: Level,
}

/// Replaces node `index`, the product with the values. Nothing but unused nodes is added when some
/// shape cannot be written.
pub fn replace(editor: &mut Editor, index: usize, found: Found) -> Option<()> {
    let Found { mut scores, v, swapped, level } = found;
    let graph = &*editor.graph;
    let k = unexpanded(editor, scores.k);
    let v = unexpanded(editor, v);
    let levels = [&scores.q.level, &k.level, &v.level, &level];
    let others = scores.terms.iter().map(|term| &term.level);
    let others = others.chain(scores.row_factors.iter().map(|(_, level)| level));
    let fine = finest(levels.into_iter().chain(others))?;
    let types = [scores.q.value, k.value, v.value].map(|id| graph.value(id).dtype);
    let dtype = types.into_iter().reduce(wider)?;
    let node = editor.node(index)?;
    let (name, output) = (node.name.clone(), first(&node.outputs)?);
    let mut writer = Writer { editor: &mut *editor, index, name, dtype, fine };
    let mut q = writer.operand("q", &scores.q, true)?;
    for (value, level) in &scores.row_factors {
        q = writer.multiplied(q, *value, level)?;
    }
    let k = writer.operand("k", &k, false)?;
    let v = writer.operand("v", &v, false)?;
    let terms = std::mem::take(&mut scores.terms);
    let mask = writer.mask(&terms)?;
    let mut inputs = vec![Some(q), Some(k), Some(v)];
    inputs.extend(mask.map(Some));
    let op = Op::Attention { scale: scores.scale };
    writer.finish(op, inputs, output, swapped)?;
    for (at, x) in scores.factors {
        editor.replace(at, Op::Identity, vec![Some(x)]);
    }
    Some(())
}

/// The type that holds the numbers of both.
fn wider(a: DataType, b: DataType) -> DataType {
    match (a, b) {
        _ if a == b => a,
        (DataType::F64, _) | (_, DataType::F64) => DataType::F64,
        _ => DataType::F32,
    }
}

/// The level into which all others split; ones are dropped where that is necessary.
fn finest<'a>(levels: impl Iterator<Item = &'a Level>) -> Option<Level> {
    let levels: Vec<&Level> = levels.collect();
    let mut order: Vec<Level> = levels.iter().map(|level| (*level).clone()).collect();
    order.extend(levels.iter().map(|level| level.without_ones()));
    let fits = |fine: &Level| levels.iter().all(|level| level.split(fine).is_some());
    let longest = |order: &[Level]| {
        let fitting = order.iter().filter(|fine| fits(fine));
        fitting.max_by_key(|level| level.0.len()).cloned()
    };
    let (plain, shorter) = order.split_at(levels.len());
    longest(plain).or_else(|| longest(shorter))
}

/// The source of an operand that was repeated along batch dimensions: the operator broadcasts. A
/// repetition that was merged into another dimension (groups of heads) makes the level finer.
fn unexpanded(editor: &Editor, matrix: Matrix) -> Matrix {
    match source_of(editor, &matrix) {
        Some((value, level)) => unexpanded(editor, Matrix { value, perm: None, level }),
        None => matrix,
    }
}

/// Whether the operand was repeated along batch dimensions.
pub fn is_repeated(editor: &Editor, matrix: &Matrix) -> bool {
    source_of(editor, matrix).is_some()
}

fn source_of(editor: &Editor, matrix: &Matrix) -> Option<(ValueId, Level)> {
    if matrix.perm.is_some() {
        return None;
    }
    let graph = &*editor.graph;
    if let Some(source) = repeated(editor, matrix.value) {
        return Some((source, matrix.level.clone()));
    }
    let (op, inputs) = editor.op(matrix.value)?;
    let x = first(inputs).filter(|x| op.is_reshape() && keeps_matrices(graph, *x, matrix.value))?;
    let source = repeated(editor, x)?;
    let finer = batch_of(graph, x)?;
    let whole = matrix.level.is_same(&batch_of(graph, matrix.value)?);
    (whole && matrix.level.split(&finer).is_some()).then_some((source, finer))
}

/// The operand of a repetition along batch dimensions of size one.
fn repeated(editor: &Editor, id: ValueId) -> Option<ValueId> {
    let (op, inputs) = editor.op(id)?;
    let x = first(inputs).filter(|_| matches!(op, Op::Expand | Op::Tile))?;
    let (from, to) = (editor.graph.shape(x)?, editor.graph.shape(id)?);
    let missing = to.len().checked_sub(from.len())?;
    let broadcast = from.iter().zip(&to[missing..]).all(|(a, b)| a.is(1) || a.is_same(b));
    (broadcast && keeps_matrices(editor.graph, x, id)).then_some(x)
}

impl Writer<'_, '_> {
    fn graph(&self) -> &Graph {
        self.editor.graph
    }

    fn insert(&mut self, part: &str, op: Op, inputs: &[ValueId]) -> Option<ValueId> {
        let name = format!("{}/{part}", self.name);
        let inputs = inputs.iter().map(|id| Some(*id)).collect();
        self.editor.insert(self.index, &name, op, inputs)
    }

    fn number(&mut self, value: f32) -> Option<ValueId> {
        let value = match self.dtype {
            DataType::F16 if value.is_finite() => value.clamp(-65504.0, 65504.0),
            _ => value,
        };
        let tensor = content::scalar(self.dtype, f64::from(value))?;
        Some(self.editor.constant(&format!("{}/number", self.name), tensor))
    }

    fn cast(&mut self, part: &str, x: ValueId, to: DataType) -> Option<ValueId> {
        if self.graph().value(x).dtype == to {
            return Some(x);
        }
        self.insert(part, Op::Cast(Cast { to }), &[x])
    }

    fn reshape(&mut self, part: &str, x: ValueId, to: &[model::dim::SymDim]) -> Option<ValueId> {
        let target = level::target(self.graph().shape(x)?, to)?;
        let target = self.editor.ints(&format!("{}/shape", self.name), &target)?;
        self.insert(part, Op::Reshape { allow_zero: false }, &[x, target])
    }

    /// `x`, which broadcasts to `level`, at the finest level; with all dimensions if `whole`.
    fn at_fine(&mut self, part: &str, x: ValueId, level: &Level, whole: bool) -> Option<ValueId> {
        let shape = self.graph().shape(x)?.to_vec();
        let mut padded = vec![model::dim::SymDim::from(1usize); 2usize.saturating_sub(shape.len())];
        padded.extend(shape.iter().cloned());
        let dims = level.reshaped(&self.fine, &padded)?;
        let alike = broadcasts_alike(&shape, &dims) && shape.len() <= dims.len();
        if alike && (!whole || shape.len() == dims.len()) {
            return Some(x);
        }
        self.reshape(part, x, &dims)
    }

    /// An operand as `[.., rows, width]`.
    fn operand(&mut self, part: &str, matrix: &Matrix, whole: bool) -> Option<ValueId> {
        let mut x = matrix.value;
        if let Some(perm) = &matrix.perm {
            x = self.insert(part, Op::Transpose { perm: Some(perm.clone()) }, &[x])?;
        }
        x = self.at_fine(&format!("{part}/level"), x, &matrix.level, whole)?;
        self.cast(&format!("{part}/cast"), x, self.dtype)
    }

    /// The queries with a factor for each of their rows.
    fn multiplied(&mut self, q: ValueId, factor: ValueId, level: &Level) -> Option<ValueId> {
        let factor = self.at_fine("factor", factor, level, false)?;
        let factor = self.cast("factor/cast", factor, self.dtype)?;
        self.insert("q/factor", Op::Binary(Binary::Mul), &[q, factor])
    }

    /// The sum of all terms: nothing, one condition, or numbers.
    fn mask(&mut self, terms: &[Term]) -> Option<Option<ValueId>> {
        if let [Term { value, kind: TermKind::Choose { keep, low }, level }] = terms
            && *low == f32::NEG_INFINITY
        {
            let mut condition = self.at_fine("mask", *value, level, false)?;
            if !keep {
                condition = self.insert("not", Op::Unary(Unary::Not), &[condition])?;
            }
            return Some(Some(condition));
        }
        let mut sum = None;
        for term in terms {
            let x = self.at_fine("mask", term.value, &term.level, false)?;
            let number = match term.kind {
                TermKind::Add { factor } => {
                    let x = self.cast("mask/cast", x, self.dtype)?;
                    match factor {
                        1.0 => x,
                        _ => {
                            let factor = self.number(factor)?;
                            self.insert("mask/scaled", Op::Binary(Binary::Mul), &[x, factor])?
                        }
                    }
                }
                TermKind::Choose { keep, low } => {
                    let (zero, low) = (self.number(0.0)?, self.number(low)?);
                    let (a, b) = if keep { (zero, low) } else { (low, zero) };
                    self.insert("mask/numbers", Op::Where, &[x, a, b])?
                }
            };
            sum = Some(match sum {
                None => number,
                Some(sum) => self.insert("mask/sum", Op::Binary(Binary::Add), &[sum, number])?,
            });
        }
        Some(sum)
    }

    /// The operator, and what makes its result the value `output`.
    fn finish(
        mut self,
        op: Op,
        inputs: Vec<Option<ValueId>>,
        output: ValueId,
        swapped: bool,
    ) -> Option<()> {
        let fact = self.graph().infer(&op, &inputs, 1).ok()?.into_iter().next()?;
        let (shape, dtype) = (fact.shape?, fact.dtype);
        // Where only a repetition gave some dimension its size, it is needed.
        let batch = Level(shape[..shape.len().checked_sub(2)?].to_vec());
        if !batch.is_same(&self.fine) {
            return None;
        }
        let wanted = self.graph().shape(output)?.to_vec();
        let wanted_type = self.graph().value(output).dtype;
        let same = |a: &[model::dim::SymDim]| {
            a.len() == wanted.len() && a.iter().zip(&wanted).all(|(a, b)| a.is_same(b))
        };
        if !swapped && same(&shape) && dtype == wanted_type {
            self.editor.replace(self.index, op, inputs);
            return Some(());
        }
        let inputs: Vec<ValueId> = inputs.into_iter().flatten().collect();
        let mut y = self.insert("attention", op, &inputs)?;
        if swapped {
            let perm = Some(level::swapped(shape.len())?);
            y = self.insert("swapped", Op::Transpose { perm }, &[y])?;
        }
        if !same(self.graph().shape(y)?) {
            y = self.reshape("merged", y, &wanted)?;
        }
        y = self.cast("result", y, wanted_type)?;
        self.editor.replace(self.index, Op::Identity, vec![Some(y)]);
        Some(())
    }
}
