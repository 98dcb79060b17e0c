//! Row independence: whether requests of a model can be batched. Each row of the outputs must
//! depend on the same row of the inputs only, not on other rows and not on their number.

use crate::dim::SymDim;
use crate::op::{Ml, Op, PoolKind, Signal, Text};
use crate::{Dim, LaunchPlan, Step, ValueId};

mod control;

/// The symbol that is the first dimension of every input and output, and occurs in no other
/// dimension of theirs.
pub fn batch_symbol(plan: &LaunchPlan) -> Option<&str> {
    let dims = |id: &ValueId| plan.value(*id).shape.as_deref();
    let Some([Dim::Symbol(batch), ..]) = plan.inputs.first().and_then(dims) else { return None };
    let leads = |id: &ValueId| match dims(id) {
        Some([Dim::Symbol(first), rest @ ..]) => {
            first == batch && !rest.iter().any(|dim| dim.has_symbol(batch))
        }
        _ => false,
    };
    let all = plan.inputs.iter().chain(&plan.outputs).all(leads) && !plan.outputs.is_empty();
    all.then_some(batch)
}

/// The first step after which rows may depend on each other or on their number.
pub fn mixing_step<'a>(plan: &'a LaunchPlan, batch: &'a str) -> Option<&'a Step> {
    let mut analysis = RowAnalysis::new(plan, batch);
    for id in &plan.inputs {
        analysis.states[id.index()] = RowState::Rows(0);
    }
    if let Some(step) = analysis.run() {
        return Some(step);
    }
    let rows = |id: &ValueId| analysis.state(*id) == RowState::Rows(0);
    if plan.outputs.iter().all(rows) { None } else { plan.steps.last() }
}

/// The state of output `index` of a step whose first output has `state`. Of a recurrent layer the
/// last states have no dimension of time.
fn of_output(step: &Step, index: usize, state: RowState) -> RowState {
    match (&step.op, state) {
        (Op::Rnn(rnn), RowState::Rows(_)) if !rnn.batch_first => {
            RowState::Rows(if index == 0 { 2 } else { 1 })
        }
        _ => state,
    }
}

/// How a value depends on rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowState {
    /// It does not depend on the inputs.
    Free,
    /// It depends on the number of rows, not on their content.
    Count,
    /// A list of sizes: those whose bit is set depend on the number of rows, the others on nothing
    /// that differs within a batch.
    Sizes(u64),
    /// Its entries along this dimension belong to one row each, in order, the same number to each.
    /// No other size of it depends on the number of rows, also where no size is known.
    Rows(usize),
}

struct RowAnalysis<'a> {
    plan: &'a LaunchPlan,
    batch: &'a str,
    states: Vec<RowState>,
    /// Constants that a body captures.
    captured: Vec<(ValueId, Vec<i64>)>,
    /// How many bodies this plan lies in.
    depth: usize,
}

impl<'a> RowAnalysis<'a> {
    fn new(plan: &'a LaunchPlan, batch: &'a str) -> RowAnalysis<'a> {
        let states = vec![RowState::Free; plan.values.len()];
        RowAnalysis { plan, batch, states, captured: Vec::new(), depth: 0 }
    }

    /// The first step that may mix rows; all steps before it have states.
    fn run(&mut self) -> Option<&'a Step> {
        let plan = self.plan;
        plan.steps.iter().find(|step| {
            let Some(states) = self.of_step(step) else { return true };
            for (id, state) in step.outputs.iter().zip(states) {
                if let Some(id) = id {
                    self.states[id.index()] = state;
                }
            }
            false
        })
    }

    /// The states of the outputs of `step`; `None` when it may mix rows.
    fn of_step(&self, step: &Step) -> Option<Vec<RowState>> {
        if let Op::Control(control) = &step.op {
            return self.of_control(step, control);
        }
        let state = self.after(step)?;
        Some((0..step.outputs.len()).map(|index| of_output(step, index, state)).collect())
    }

    fn state(&self, id: ValueId) -> RowState {
        self.states[id.index()]
    }

    fn dims(&self, id: ValueId) -> Option<&[Dim]> {
        self.plan.value(id).shape.as_deref()
    }

    fn rank(&self, id: ValueId) -> Option<usize> {
        self.dims(id).map(<[Dim]>::len)
    }

    /// A constant's integers.
    fn numbers(&self, id: ValueId) -> Option<Vec<i64>> {
        if let Some((_, numbers)) = self.captured.iter().find(|(constant, _)| *constant == id) {
            return Some(numbers.clone());
        }
        self.plan.constants.iter().find(|(constant, _)| *constant == id)?.1.to_vec::<i64>()
    }

    /// How the outputs of `step` depend on rows; `None` when it may mix them.
    fn after(&self, step: &Step) -> Option<RowState> {
        let mut states = step.inputs.iter().flatten().map(|id| self.state(*id));
        if states.all(|state| state == RowState::Free) {
            return Some(RowState::Free);
        }
        let rows = |id: &ValueId| matches!(self.state(*id), RowState::Rows(_));
        if step.inputs.iter().flatten().any(rows) {
            self.of_rows(step)
        } else {
            self.of_count(step)
        }
    }

    /// The result of a step that reads no rows but their number.
    fn of_count(&self, step: &Step) -> Option<RowState> {
        if let Some(state) = self.of_sizes(step) {
            return Some(state);
        }
        match step.op {
            Op::ConstantOfShape { .. } => self.by_shape(step),
            // What is repeated must not depend on the number of rows itself.
            Op::Expand | Op::Tile if self.state(input(step, 0)?) == RowState::Free => {
                self.by_shape(step)
            }
            Op::Gather { .. } | Op::Concat { .. } | Op::Slice | Op::Squeeze | Op::Unsqueeze => {
                Some(RowState::Count)
            }
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Cast(_) | Op::Identity => {
                Some(RowState::Count)
            }
            Op::Where | Op::Reduce(_) | Op::Reshape { .. } => Some(RowState::Count),
            _ => None,
        }
    }

    /// The result of a step that moves sizes.
    fn of_sizes(&self, step: &Step) -> Option<RowState> {
        match &step.op {
            Op::Identity | Op::Cast(_) => Some(self.state(input(step, 0)?)),
            Op::Gather { axis: 0 } => {
                let RowState::Sizes(bits) = self.state(input(step, 0)?) else { return None };
                let (indices, length) = (input(step, 1)?, self.length(input(step, 0)?)?);
                let bit = |index: &i64| {
                    let at = if *index < 0 { index + length as i64 } else { *index };
                    Some(bits >> u32::try_from(at).ok()? & 1)
                };
                let picked = self.numbers(indices)?.iter().map(bit).collect::<Option<Vec<_>>>()?;
                match (self.rank(indices)?, &picked[..]) {
                    (0, [0]) => Some(RowState::Free),
                    (0, [_]) => Some(RowState::Count),
                    (1, picked) => Some(sizes(picked)),
                    _ => None,
                }
            }
            Op::Slice => self.sliced_sizes(step),
            Op::Concat { axis: 0 } => {
                let mut bits = Vec::new();
                for id in step.inputs.iter().flatten() {
                    let length = self.length(*id)?;
                    match self.state(*id) {
                        RowState::Free => bits.resize(bits.len() + length, 0),
                        RowState::Count => bits.resize(bits.len() + length, 1),
                        RowState::Sizes(own) => bits.extend((0..length).map(|at| own >> at & 1)),
                        RowState::Rows(_) => return None,
                    }
                    if bits.len() > 64 {
                        return None;
                    }
                }
                Some(sizes(&bits))
            }
            _ => None,
        }
    }

    /// The number of elements of a list.
    fn length(&self, id: ValueId) -> Option<usize> {
        match self.dims(id)? {
            [Dim::Fixed(length)] if *length <= 64 => Some(*length),
            _ => None,
        }
    }

    /// A part of a list of sizes.
    fn sliced_sizes(&self, step: &Step) -> Option<RowState> {
        let x = input(step, 0)?;
        let RowState::Sizes(bits) = self.state(x) else { return None };
        let length = self.length(x)? as i64;
        let one = |index: usize| match self.numbers(input(step, index)?)?[..] {
            [only] => Some(only),
            _ => None,
        };
        if input(step, 4).is_some() && one(4) != Some(1) {
            return None;
        }
        let place =
            |at: i64| (if at < 0 { at.saturating_add(length) } else { at }).clamp(0, length);
        let (start, end) = (place(one(1)?), place(one(2)?));
        let picked: Vec<u64> = (start..end.max(start)).map(|at| bits >> at & 1).collect();
        Some(sizes(&picked))
    }

    /// All rows of the output, if it has any, are equal.
    fn by_shape(&self, step: &Step) -> Option<RowState> {
        let output = first_output(step)?;
        match self.row_axis(output)? {
            Some(axis) => self.each_row(output, axis).map(|_| RowState::Rows(axis)),
            None => Some(RowState::Free),
        }
    }

    /// How many entries along `axis` belong to each row; `None` unless every row has as many.
    fn each_row(&self, id: ValueId, axis: usize) -> Option<SymDim> {
        let (size, rows) = (SymDim::from(&self.dims(id)?[axis]), SymDim::symbol(self.batch));
        let each = size.div(&rows);
        let exact = each.mul(&rows).is_same(&size) && !Dim::from(&each).has_symbol(self.batch);
        exact.then_some(each)
    }

    /// The one dimension in which the number of rows occurs; `None` when that cannot be determined.
    fn row_axis(&self, id: ValueId) -> Option<Option<usize>> {
        let dims = self.dims(id)?;
        if dims.contains(&Dim::Unknown) {
            return None;
        }
        let mut at = (0..dims.len()).filter(|axis| dims[*axis].has_symbol(self.batch));
        let first = at.next();
        at.next().is_none().then_some(first)
    }

    fn of_rows(&self, step: &Step) -> Option<RowState> {
        let x = input(step, 0)?;
        match &step.op {
            Op::Unary(_) | Op::Cast(_) | Op::Identity => Some(self.state(x)),
            Op::Decode { .. } | Op::Encode(_) | Op::BitCast { .. } => {
                self.others_free(step, 1).then(|| self.state(x))
            }
            Op::Binary(_) | Op::Compare(_) | Op::Variadic(_) | Op::Where | Op::PRelu => {
                self.broadcast(step)
            }
            Op::Clip | Op::QuantizeLinear { .. } | Op::DequantizeLinear { .. } => {
                self.others_free(step, 1).then(|| self.state(x))
            }
            Op::MatMul(_)
            | Op::MatMulInteger
            | Op::QLinearMatMul
            | Op::Gemm(_)
            | Op::Attention { .. } => self.products(step, x),
            Op::LayerNorm { .. }
            | Op::RmsNorm { .. }
            | Op::Softmax(_)
            | Op::LpNorm { .. }
            | Op::TopK { .. }
            | Op::Split { .. }
            | Op::Concat { .. }
            | Op::ArgReduce(_)
            | Op::Reduce(_)
            | Op::Slice
            | Op::Pad { .. }
            | Op::Gather { .. } => self.along(step, x),
            Op::CumSum { .. }
            | Op::CumProd { .. }
            | Op::Trilu { .. }
            | Op::Tile
            | Op::OneHot { .. }
            | Op::GatherElements { .. }
            | Op::GatherNd { .. }
            | Op::ScatterElements { .. }
            | Op::ReverseSequence { .. } => self.beside(step, x),
            Op::Ml(_) | Op::Text(_) | Op::Signal(_) => self.of_records(step, x),
            Op::Shape { .. }
            | Op::Size
            | Op::Transpose { .. }
            | Op::Flatten { .. }
            | Op::Squeeze
            | Op::Unsqueeze
            | Op::Reshape { .. }
            | Op::Expand => self.rearranged(step, x),
            _ => self.images(step, x),
        }
    }

    /// Operators on images, which process each row separately.
    fn images(&self, step: &Step, x: ValueId) -> Option<RowState> {
        let alone = self.state(x) == RowState::Rows(0) && self.others_free(step, 1);
        let kept = match &step.op {
            Op::Conv(_) => {
                let residual = input(step, 3).is_none_or(|id| self.state(id) == RowState::Rows(0));
                let operands = [1, 2].into_iter().filter_map(|index| input(step, index));
                let free = operands.into_iter().all(|id| self.state(id) == RowState::Free);
                self.state(x) == RowState::Rows(0) && residual && free
            }
            // Indices count from the first row.
            Op::Pool(pool) if matches!(pool.kind, PoolKind::MaxWithIndices { .. }) => false,
            Op::BatchNorm { .. } if !alone => return self.normalized_channels(step, x),
            Op::ConvTranspose(_) | Op::Pool(_) | Op::GlobalPool(_) | Op::BatchNorm { .. } => alone,
            Op::InstanceNorm { .. } | Op::GroupNorm { .. } | Op::Lrn { .. } => alone,
            Op::ScaleShift { .. } | Op::DepthToSpace { .. } | Op::SpaceToDepth { .. } => alone,
            Op::ConvInteger(_) | Op::QLinearConv(_) => alone,
            Op::Resize(_) => self.resized(step, x)?,
            Op::GridSample { .. } => self.aligned(x, input(step, 1)?, 0),
            Op::Rnn(rnn) => return self.recurrent(step, x, rnn.batch_first),
            _ => false,
        };
        kept.then_some(RowState::Rows(0))
    }

    /// Layer normalization as TensorFlow writes it: rows are channels, each with its own numbers.
    fn normalized_channels(&self, step: &Step, x: ValueId) -> Option<RowState> {
        let size = |id: ValueId, axis: usize| Some(SymDim::from(self.dims(id)?.get(axis)?));
        let own = |index: usize| {
            input(step, index).is_some_and(|id| {
                let rows = self.state(id) == RowState::Rows(0);
                let aligned = size(x, 1).zip(size(id, 0)).is_some_and(|(a, b)| a.is_same(&b));
                rows && aligned || self.same_for_all(id, 1)
            })
        };
        let kept = self.state(x) == RowState::Rows(1) && (1..=4).all(own);
        kept.then_some(RowState::Rows(1))
    }

    /// Whether a step resamples each row by itself.
    fn resized(&self, step: &Step, x: ValueId) -> Option<bool> {
        let dims = self.dims(first_output(step)?)?;
        let first = matches!(dims.first(), Some(Dim::Symbol(name)) if name == self.batch);
        let own = |id: &ValueId| match self.state(*id) {
            // Only the number of rows itself follows the number of rows.
            RowState::Sizes(bits) => bits & !1 == 0,
            state => state == RowState::Free,
        };
        let others = dims.iter().skip(1).all(|dim| !dim.has_symbol(self.batch));
        let operands = step.inputs.iter().skip(1).flatten().all(own);
        Some(self.state(x) == RowState::Rows(0) && first && others && operands)
    }

    /// A recurrent layer runs along time: rows stay beside each other.
    fn recurrent(&self, step: &Step, x: ValueId, batch_first: bool) -> Option<RowState> {
        let at = usize::from(!batch_first);
        let is = |index: usize, axis: usize| {
            input(step, index).is_none_or(|id| self.state(id) == RowState::Rows(axis))
        };
        let free =
            |index: usize| input(step, index).is_none_or(|id| self.state(id) == RowState::Free);
        let kept = self.state(x) == RowState::Rows(at)
            && [1, 2, 3, 7].into_iter().all(free)
            && is(4, 0)
            && is(5, at)
            && is(6, at);
        kept.then_some(RowState::Rows(if batch_first { 0 } else { 2 }))
    }

    fn products(&self, step: &Step, x: ValueId) -> Option<RowState> {
        match &step.op {
            Op::MatMul(op) => self.product(step, op.transpose_a, op.transpose_b),
            Op::MatMulInteger => self.product(step, false, false),
            Op::QLinearMatMul => {
                // Scales and zero points of all rows.
                let free = |at| input(step, at).is_none_or(|id| self.state(id) == RowState::Free);
                let at = self.product_rows(x, input(step, 3)?, false, false)?;
                let rank = self.rank(first_output(step)?)?;
                let rows = RowState::Rows(rank.checked_sub(at)?);
                [1, 2, 4, 5, 6, 7].into_iter().all(free).then_some(rows)
            }
            Op::Gemm(op) => {
                let rows = RowState::Rows(usize::from(op.transpose_a));
                let fits = |c| self.same_for_all(c, 2) || self.state(c) == RowState::Rows(0);
                let kept = self.state(x) == rows
                    && self.state(input(step, 1)?) == RowState::Free
                    && input(step, 2).is_none_or(fits);
                kept.then_some(RowState::Rows(0))
            }
            _ => self.attention(step),
        }
    }

    /// Operators along dimensions, which must not be the rows'.
    fn along(&self, step: &Step, x: ValueId) -> Option<RowState> {
        match &step.op {
            Op::LayerNorm { axis, .. } | Op::RmsNorm { axis, .. } => {
                let from = self.axis(x, *axis)?;
                (self.others_free(step, 1) && self.rows_of(x)? < from).then(|| self.state(x))
            }
            Op::Softmax(op) => {
                let (at, rows) = (self.axis(x, op.axis)?, self.rows_of(x)?);
                (if op.flatten { rows < at } else { rows != at }).then(|| self.state(x))
            }
            Op::LpNorm { axis, .. } | Op::TopK { axis, .. } | Op::Split { axis } => {
                let kept = self.axis(x, *axis)? != self.rows_of(x)? && self.others_free(step, 1);
                kept.then(|| self.state(x))
            }
            Op::Concat { axis } => {
                let same = step.inputs.iter().flatten().all(|id| self.state(*id) == self.state(x));
                (same && self.axis(x, *axis)? != self.rows_of(x)?).then(|| self.state(x))
            }
            Op::ArgReduce(op) => self.reduced(x, &[op.axis], op.keep_dims),
            Op::Reduce(op) => {
                let axes = input(step, 1).map(|axes| self.numbers(axes));
                match axes {
                    Some(axes) if !axes.as_ref()?.is_empty() => {
                        self.reduced(x, &axes?, op.keep_dims)
                    }
                    _ => op.noop_with_empty_axes.then(|| self.state(x)),
                }
            }
            Op::Slice => {
                let axes = match input(step, 3) {
                    Some(axes) => self.numbers(axes)?,
                    None => (0..self.numbers(input(step, 1)?)?.len() as i64).collect(),
                };
                let rows = self.rows_of(x)?;
                let cut = axes.iter().filter(|axis| self.axis(x, **axis) == Some(rows));
                let whole = cut.count() == 0 || self.all_rows(step, x, rows, &axes);
                (whole && self.others_free(step, 1)).then(|| self.state(x))
            }
            Op::Pad { .. } => {
                let (rows, rank) = (self.rows_of(x)?, self.rank(x)?);
                let pads = self.numbers(input(step, 1)?)?;
                let none = pads.get(rows) == Some(&0) && pads.get(rank + rows) == Some(&0);
                let kept = none && input(step, 3).is_none() && self.others_free(step, 1);
                kept.then(|| self.state(x))
            }
            Op::Gather { axis } => self.gathered(x, input(step, 1)?, *axis),
            _ => None,
        }
    }

    /// Operators along dimensions whose operands may hold rows beside each other.
    fn beside(&self, step: &Step, x: ValueId) -> Option<RowState> {
        let rows = self.rows_of(x);
        let kept = match &step.op {
            Op::CumSum { .. } | Op::CumProd { .. } => {
                let axis = self.numbers(input(step, 1)?)?;
                let [axis] = axis[..] else { return None };
                self.axis(x, axis)? != rows?
            }
            Op::Trilu { .. } => self.others_free(step, 1) && rows? + 2 < self.rank(x)?,
            Op::Tile => self.numbers(input(step, 1)?)?.get(rows?) == Some(&1),
            Op::OneHot { axis } => {
                let new = if *axis < 0 { axis + self.rank(x)? as i64 + 1 } else { *axis };
                let after = usize::try_from(new).ok()? <= rows?;
                return self
                    .others_free(step, 1)
                    .then_some(RowState::Rows(rows? + usize::from(after)));
            }
            Op::GatherElements { axis } => {
                let indices = input(step, 1)?;
                self.axis(x, *axis)? != rows? && self.aligned(x, indices, rows?)
            }
            // An update lands in the row in which its index stands.
            Op::ScatterElements { axis, .. } => {
                let (indices, updates) = (input(step, 1)?, input(step, 2)?);
                let beside = self.aligned(x, indices, rows?) && self.aligned(x, updates, rows?);
                self.axis(x, *axis)? != rows? && beside
            }
            Op::GatherNd { batch_dims } => {
                let indices = input(step, 1)?;
                rows? < *batch_dims && self.aligned(x, indices, rows?)
            }
            Op::ReverseSequence { batch_axis, time_axis } => {
                let lengths = self.state(input(step, 1)?);
                let own = rows? == *batch_axis && lengths == RowState::Rows(0);
                own && rows? != *time_axis
            }
            _ => false,
        };
        kept.then(|| self.state(x))
    }

    /// Whether `other` has the rows of `x` at the same places along dimension `rows`.
    fn aligned(&self, x: ValueId, other: ValueId, rows: usize) -> bool {
        let size = |id: ValueId| self.dims(id).and_then(|dims| dims.get(rows)).map(SymDim::from);
        let same = size(x).zip(size(other)).is_some_and(|(a, b)| a.is_same(&b));
        same && self.rows_of(x) == Some(rows) && self.rows_of(other) == Some(rows)
    }

    /// Operators on records, texts and signals, which process each row separately.
    fn of_records(&self, step: &Step, x: ValueId) -> Option<RowState> {
        let first = self.state(x) == RowState::Rows(0) && self.others_free(step, 1);
        let table = first && self.rank(x)? == 2;
        let kept = match &step.op {
            Op::Ml(Ml::MapLabels | Ml::OneHotLabels { .. }) => {
                return self.others_free(step, 1).then(|| self.state(x));
            }
            Op::Ml(_) => table,
            Op::Text(Text::Join) => return self.broadcast(step),
            Op::Text(Text::Match { .. }) => return Some(self.state(x)),
            Op::Text(Text::Normalize { stopwords, .. }) if stopwords.is_empty() => {
                return Some(self.state(x));
            }
            Op::Text(Text::TfIdf(_)) => table,
            // Parts and tokens are padded to the longest of all rows.
            Op::Text(_) => false,
            Op::Signal(Signal::Dft { axis, .. }) => {
                let along = match input(step, 2) {
                    Some(axis) => self.numbers(axis)?.first().copied(),
                    None => Some(*axis),
                };
                let last = self.rank(x)?.checked_sub(1)?;
                first && self.axis(x, along?)? != 0 && last != 0
            }
            Op::Signal(Signal::Stft { .. }) => first && self.rank(x)? >= 2,
            _ => false,
        };
        kept.then_some(RowState::Rows(0))
    }

    /// Operators that move dimensions.
    fn rearranged(&self, step: &Step, x: ValueId) -> Option<RowState> {
        match &step.op {
            Op::Shape { start, end } => Some(self.shape_of(x, *start, *end)),
            Op::Size => Some(RowState::Count),
            Op::Transpose { perm } => {
                let (rank, rows) = (self.rank(x)?, self.rows_of(x)?);
                let at = match perm {
                    Some(perm) => perm.iter().position(|from| *from == rows)?,
                    None => rank - 1 - rows,
                };
                Some(RowState::Rows(at))
            }
            Op::Flatten { axis } => {
                let kept = self.axis_or_end(x, *axis)? > 0 && self.state(x) == RowState::Rows(0);
                kept.then_some(RowState::Rows(0))
            }
            Op::Squeeze | Op::Unsqueeze => {
                let rows = self.rows_of(x)?;
                let adds = matches!(step.op, Op::Unsqueeze);
                let moved = input(step, 1).and_then(|axes| self.numbers(axes));
                let at = match moved {
                    Some(axes) => self.after_ones(x, rows, &axes, adds)?,
                    None => self.row_axis(first_output(step)?)??,
                };
                self.others_free(step, 1).then_some(RowState::Rows(at))
            }
            Op::Reshape { .. } => self.reshaped(step, x),
            Op::Expand => {
                let output = first_output(step)?;
                let aligned = self.rows_of(x)? + self.rank(output)?.checked_sub(self.rank(x)?)?;
                let kept = self.row_axis(output)? == Some(aligned) && self.no_rows(step, 1);
                kept.then_some(RowState::Rows(aligned))
            }
            _ => None,
        }
    }

    /// Where dimension `rows` of `x` is after dimensions of one were added or taken away.
    fn after_ones(&self, x: ValueId, rows: usize, axes: &[i64], adds: bool) -> Option<usize> {
        let rank = self.rank(x)? + if adds { axes.len() } else { 0 };
        let place = |axis: &i64| {
            let at = if *axis < 0 { axis.checked_add(rank as i64)? } else { *axis };
            usize::try_from(at).ok().filter(|at| *at < rank)
        };
        let ones = axes.iter().map(place).collect::<Option<Vec<usize>>>()?;
        if adds {
            return (0..rank).filter(|at| !ones.contains(at)).nth(rows);
        }
        let before = ones.iter().filter(|at| **at < rows).count();
        (!ones.contains(&rows)).then(|| rows - before)
    }

    /// Rows stay together where as many elements come before them as before, in equal parts.
    fn reshaped(&self, step: &Step, x: ValueId) -> Option<RowState> {
        let output = first_output(step)?;
        let (before, to) = (product(&self.dims(x)?[..self.rows_of(x)?])?, self.dims(output)?);
        let at = (0..to.len()).find(|at| {
            let same = product(&to[..*at]).is_some_and(|size| size.is_same(&before));
            same && self.each_row(output, *at).is_some()
        })?;
        let fixed = |dim: &Dim| *dim != Dim::Unknown && !dim.has_symbol(self.batch);
        let known = to.iter().enumerate().all(|(axis, dim)| axis == at || fixed(dim));
        let kept = match input(step, 1).map(|id| self.state(id)) {
            None | Some(RowState::Free) => true,
            // Only the size of the rows themselves follows their number.
            Some(RowState::Sizes(bits)) => known || bits & !(1 << at) == 0,
            Some(RowState::Count) => known,
            Some(RowState::Rows(_)) => false,
        };
        kept.then_some(RowState::Rows(at))
    }

    /// The sizes of dimensions `start..end` of rows.
    fn shape_of(&self, x: ValueId, start: i64, end: Option<i64>) -> RowState {
        let Some(dims) = self.dims(x).filter(|dims| dims.len() <= 64) else {
            return RowState::Count;
        };
        let rank = dims.len() as i64;
        let place = |at: i64| (if at < 0 { at.saturating_add(rank) } else { at }).clamp(0, rank);
        let (start, end) = (place(start), place(end.unwrap_or(rank)));
        let rows = self.rows_of(x);
        let counts = |at: i64| {
            let dim = &dims[at as usize];
            // Of a value without rows, a size that nobody knows may depend on anything.
            let open = *dim == Dim::Unknown && rows.is_none() || dim.has_symbol(self.batch);
            u64::from(open || rows == Some(at as usize))
        };
        let bits: Vec<u64> = (start..end.max(start)).map(counts).collect();
        sizes(&bits)
    }

    fn rows_of(&self, id: ValueId) -> Option<usize> {
        match self.state(id) {
            RowState::Rows(axis) => Some(axis),
            _ => None,
        }
    }

    /// `axis` of `id`, counted from the front.
    fn axis(&self, id: ValueId, axis: i64) -> Option<usize> {
        self.axis_or_end(id, axis).filter(|at| Some(*at) < self.rank(id))
    }

    fn axis_or_end(&self, id: ValueId, axis: i64) -> Option<usize> {
        let rank = i64::try_from(self.rank(id)?).ok()?;
        let at = if axis < 0 { axis + rank } else { axis };
        usize::try_from(at).ok().filter(|_| at <= rank)
    }

    /// Whether inputs from `first` on do not depend on the inputs of the model.
    fn others_free(&self, step: &Step, first: usize) -> bool {
        let others = step.inputs.iter().skip(first).flatten();
        others.into_iter().all(|id| self.state(*id) == RowState::Free)
    }

    /// Whether inputs from `first` on hold no rows; they may depend on how many there are.
    fn no_rows(&self, step: &Step, first: usize) -> bool {
        let others = step.inputs.iter().skip(first).flatten();
        others.into_iter().all(|id| self.rows_of(*id).is_none())
    }

    /// Whether `id` is free and constant along the dimension `from_end`, counted from 1 at the end.
    fn same_for_all(&self, id: ValueId, from_end: usize) -> bool {
        let Some(dims) = self.dims(id) else { return false };
        let at = dims.len().checked_sub(from_end).map(|at| &dims[at]);
        self.state(id) == RowState::Free && matches!(at, None | Some(Dim::Fixed(1)))
    }

    /// Whether a slice along the rows takes all of them.
    fn all_rows(&self, step: &Step, x: ValueId, rows: usize, axes: &[i64]) -> bool {
        let size = |id: ValueId| self.dims(id).and_then(|dims| dims.get(rows)).map(SymDim::from);
        let same = size(x)
            .zip(first_output(step).and_then(size))
            .is_some_and(|(before, after)| before.is_same(&after));
        let at = axes.iter().position(|axis| self.axis(x, *axis) == Some(rows));
        let number = |index: usize| {
            let numbers = input(step, index).and_then(|id| self.numbers(id))?;
            numbers.get(at?).copied()
        };
        let forwards = input(step, 4).is_none() || number(4) == Some(1);
        same && number(1) == Some(0) && forwards
    }

    fn reduced(&self, x: ValueId, axes: &[i64], keep_dims: bool) -> Option<RowState> {
        let rows = self.rows_of(x)?;
        let axes = axes.iter().map(|axis| self.axis(x, *axis)).collect::<Option<Vec<_>>>()?;
        if axes.contains(&rows) {
            return None;
        }
        let before = axes.iter().filter(|axis| **axis < rows).count();
        Some(RowState::Rows(if keep_dims { rows } else { rows - before }))
    }

    fn broadcast(&self, step: &Step) -> Option<RowState> {
        let operands: Vec<ValueId> = step.inputs.iter().flatten().copied().collect();
        let mut from_end = None;
        for id in &operands {
            let RowState::Rows(axis) = self.state(*id) else { continue };
            let at = self.rank(*id)? - axis;
            if from_end.is_some_and(|other| other != at) {
                return None;
            }
            from_end = Some(at);
        }
        let from_end = from_end?;
        let fits = |id: &ValueId| self.rows_of(*id).is_some() || self.same_for_all(*id, from_end);
        let rank = self.rank(first_output(step)?)?;
        operands.iter().all(fits).then_some(RowState::Rows(rank.checked_sub(from_end)?))
    }

    fn product(&self, step: &Step, transpose_a: bool, transpose_b: bool) -> Option<RowState> {
        let (a, b, output) = (input(step, 0)?, input(step, 1)?, first_output(step)?);
        if let (RowState::Rows(axis), Some(1)) = (self.state(a), self.rank(b)) {
            // A vector of weights: the last dimension goes.
            let alone = (2..step.inputs.len()).all(|at| input(step, at).is_none());
            let kept = !transpose_a && axis + 1 < self.rank(a)? && self.others_free(step, 1);
            return (alone && kept).then_some(RowState::Rows(axis));
        }
        let at = self.product_rows(a, b, transpose_a, transpose_b)?;
        let rank = self.rank(output)?;
        let aligned = |id: ValueId| {
            let rows =
                self.rows_of(id).zip(self.rank(id)).is_some_and(|(axis, rank)| rank - axis == at);
            rows || self.same_for_all(id, at)
        };
        [2, 3]
            .into_iter()
            .filter_map(|index| input(step, index))
            .all(aligned)
            .then_some(RowState::Rows(rank.checked_sub(at)?))
    }

    /// Where the rows of a product of `a` and `b` are, counted from 1 at the end of its shape.
    fn product_rows(
        &self,
        a: ValueId,
        b: ValueId,
        transpose_a: bool,
        transpose_b: bool,
    ) -> Option<usize> {
        let place = |id: ValueId, transposed: bool| -> Option<Option<usize>> {
            let rank = self.rank(id).filter(|rank| *rank >= 2)?;
            match self.state(id) {
                RowState::Free => Some(None),
                RowState::Count | RowState::Sizes(_) => None,
                RowState::Rows(axis) => Some(Some(match (rank - axis, transposed) {
                    (1, true) => 2,
                    (2, true) => 1,
                    (at, _) => at,
                })),
            }
        };
        match (place(a, transpose_a)?, place(b, transpose_b)?) {
            (Some(at), Some(other)) if at == other && at >= 3 => Some(at),
            (Some(2), None) => Some(2),
            (Some(at), None) if at >= 3 && self.same_for_all(b, at) => Some(at),
            (None, Some(1)) => Some(1),
            (None, Some(at)) if at >= 3 && self.same_for_all(a, at) => Some(at),
            _ => None,
        }
    }

    fn attention(&self, step: &Step) -> Option<RowState> {
        let q = step.inputs.first().copied().flatten()?;
        let at = self.rank(q)? - self.rows_of(q)?;
        let aligned = |id: &ValueId| {
            let rows = self.rows_of(*id).zip(self.rank(*id));
            rows.is_some_and(|(axis, rank)| rank - axis == at) || self.same_for_all(*id, at)
        };
        (at >= 3 && step.inputs.iter().flatten().all(aligned)).then(|| self.state(q))
    }

    fn gathered(&self, x: ValueId, indices: ValueId, axis: i64) -> Option<RowState> {
        let axis = self.axis(x, axis)?;
        match (self.state(x), self.state(indices)) {
            (RowState::Free, RowState::Rows(rows)) => Some(RowState::Rows(axis + rows)),
            (RowState::Rows(rows), RowState::Free) if rows < axis => Some(RowState::Rows(rows)),
            (RowState::Rows(rows), RowState::Free) if rows > axis => {
                Some(RowState::Rows(rows + self.rank(indices)? - 1))
            }
            _ => None,
        }
    }
}

/// The product of sizes, if all are known.
fn product(dims: &[Dim]) -> Option<SymDim> {
    let known = dims.iter().all(|dim| *dim != Dim::Unknown);
    known
        .then(|| dims.iter().map(SymDim::from).fold(SymDim::from(&Dim::Fixed(1)), |a, b| a.mul(&b)))
}

/// A list of sizes from one bit for each.
fn sizes(bits: &[u64]) -> RowState {
    let all = bits.iter().enumerate().fold(0, |all, (at, bit)| all | bit << at);
    if all == 0 { RowState::Free } else { RowState::Sizes(all) }
}

fn input(step: &Step, index: usize) -> Option<ValueId> {
    step.inputs.get(index).copied().flatten()
}

fn first_output(step: &Step) -> Option<ValueId> {
    step.outputs.iter().flatten().next().copied()
}

#[cfg(test)]
mod tests;
