//! Element-wise operators: kept as expressions until their values are needed in memory, so that a
//! chain of them becomes one kernel.

use graph::ir::GraphNode;
use model::op::{Activation, Op};
use model::{DataType, Tensor, ValueId};

use super::elementwise::{Expr, MAX_INPUTS};
use super::lowering::{DeferredValue, Lowering, UnsupportedReason};
use super::view::{Element, View};

/// An expression is stored once it has this many operators.
const OPERATORS_MAX: usize = 48;

/// An expression under construction.
#[derive(Default)]
pub(super) struct Chain {
    /// Its operands.
    pub(super) inputs: Vec<View>,
    operators: usize,
}

impl Chain {
    /// An operand as an expression.
    pub(super) fn input(&mut self, view: View) -> Expr {
        let index = self.inputs.iter().position(|other| *other == view);
        let index = index.unwrap_or_else(|| {
            self.inputs.push(view);
            self.inputs.len() - 1
        });
        Expr::Input(index)
    }
}

/// The expression with every input renumbered.
fn renumbered(expr: Expr, numbers: &[usize]) -> Expr {
    let one = |expr: Box<Expr>| Box::new(renumbered(*expr, numbers));
    match expr {
        Expr::Input(index) => Expr::Input(numbers[index]),
        Expr::Unary(op, x) => Expr::Unary(op, one(x)),
        Expr::Cast(to, x) => Expr::Cast(to, one(x)),
        Expr::Activation(kind, x) => Expr::Activation(kind, one(x)),
        Expr::Binary(op, a, b) => Expr::Binary(op, one(a), one(b)),
        Expr::Compare(op, a, b) => Expr::Compare(op, one(a), one(b)),
        Expr::PRelu(a, b) => Expr::PRelu(one(a), one(b)),
        Expr::Variadic(op, all) => {
            Expr::Variadic(op, all.into_iter().map(|x| renumbered(x, numbers)).collect())
        }
        Expr::Where(a, b, c) => Expr::Where(one(a), one(b), one(c)),
        Expr::ScaleShift(kind, a, b, c) => Expr::ScaleShift(kind, one(a), one(b), one(c)),
        Expr::Clip(x, low, high) => Expr::Clip(one(x), low.map(one), high.map(one)),
        leaf => leaf,
    }
}

fn operators(expr: &Expr) -> usize {
    match expr {
        Expr::Unary(_, x) | Expr::Cast(_, x) | Expr::Activation(_, x) => 1 + operators(x),
        Expr::Binary(_, a, b) | Expr::Compare(_, a, b) | Expr::PRelu(a, b) => {
            1 + operators(a) + operators(b)
        }
        Expr::Variadic(_, all) => 1 + all.iter().map(operators).sum::<usize>(),
        Expr::Where(a, b, c) | Expr::ScaleShift(_, a, b, c) => {
            1 + operators(a) + operators(b) + operators(c)
        }
        Expr::Clip(x, low, high) => {
            let bounds = [low, high].into_iter().flatten().map(|bound| operators(bound));
            1 + operators(x) + bounds.sum::<usize>()
        }
        _ => 0,
    }
}

impl Lowering<'_> {
    /// An element-wise operator; false when `node` is none.
    pub fn elementwise(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        if let Op::QuantizeLinear { axis, .. } | Op::DequantizeLinear { axis } = node.op {
            self.quantization(node, axis)?;
            return Ok(true);
        }
        let is_one = matches!(
            node.op,
            Op::Unary(_)
                | Op::Binary(_)
                | Op::Compare(_)
                | Op::Variadic(_)
                | Op::Where
                | Op::Clip
                | Op::PRelu
                | Op::Cast(_)
                | Op::ScaleShift { .. }
        );
        if !is_one {
            return Ok(false);
        }
        let output = node.outputs.first().copied().flatten().ok_or("no output")?;
        let (shape, element) = (self.shape(output)?, self.element(output)?);
        let mut chain = Chain::default();
        let mut operands = Vec::new();
        for (index, id) in node.inputs.iter().enumerate() {
            operands.push(match id {
                Some(id) => Some(self.expression(&mut chain, node, index, *id, &shape)?),
                None => None,
            });
        }
        let expr = expression_of(&node.op, operands, element)?;
        self.defer(output, DeferredValue { expr, inputs: chain.inputs, shape, element });
        Ok(true)
    }

    /// Defines `output` as `activation` of the value in `view`.
    pub fn activate(&mut self, view: View, activation: Activation, output: ValueId) {
        let (shape, element) = (view.shape.clone(), view.element);
        let expr = Expr::Activation(activation, Box::new(Expr::Input(0)));
        self.defer(output, DeferredValue { expr, inputs: vec![view], shape, element });
    }

    /// The value `id` as part of a chain: its own expression when it has no other reader, else an
    /// input.
    pub(super) fn expression(
        &mut self,
        chain: &mut Chain,
        node: &GraphNode,
        index: usize,
        id: ValueId,
        shape: &[usize],
    ) -> Result<Expr, UnsupportedReason> {
        if let Some(constant) = self.graph.constant(id).filter(|tensor| tensor.len() == 1)
            && let Some(expr) = scalar(constant, self.element(id)?)
        {
            return Ok(expr);
        }
        if self.reads[id.index()] == 1
            && let Some(value) = self.take_deferred(id)
        {
            let room = chain.operators + operators(&value.expr) < OPERATORS_MAX
                && chain.inputs.len() + value.inputs.len() + node.inputs.len() <= MAX_INPUTS;
            let inputs = broadcast_all(&value.inputs, &value.shape);
            if let Some(inputs) = inputs.filter(|_| room && value.shape == shape) {
                let stored = value.element;
                let numbers: Vec<usize> = inputs
                    .into_iter()
                    .map(|view| match chain.input(view) {
                        Expr::Input(number) => number,
                        _ => 0,
                    })
                    .collect();
                chain.operators += operators(&value.expr);
                let expr = renumbered(value.expr, &numbers);
                // Integers and booleans are exact; storing a float would only round it.
                let same = stored.is_float() || matches!(expr, Expr::Input(_) | Expr::Cast(..));
                let expr = if same { expr } else { Expr::Cast(stored, Box::new(expr)) };
                return Ok(expr);
            }
            self.defer(id, value);
        }
        let mut view = self.operand(id)?;
        if matches!(node.op, Op::ScaleShift { .. }) && index > 0 {
            // One factor per channel; channels are dimension 1.
            view = channel_row(view, shape.len()).ok_or("the scales are not one per channel")?;
        }
        if view.broadcast(shape).is_none() {
            return Err(format!("shape {:?} does not broadcast to {shape:?}", view.shape));
        }
        chain.operators += 1;
        Ok(chain.input(view))
    }
}

/// A row as a tensor of `rank` dimensions that varies along dimension 1.
pub fn channel_row(view: View, rank: usize) -> Option<View> {
    let count = view.len();
    let mut shape = vec![1; rank];
    *shape.get_mut(1)? = count;
    view.reshaped(&shape)
}

fn broadcast_all(views: &[View], shape: &[usize]) -> Option<Vec<View>> {
    views.iter().map(|view| view.broadcast(shape).map(|_| view.clone())).collect()
}

/// A constant of one element as kernel text.
pub(super) fn scalar(tensor: &Tensor, element: Element) -> Option<Expr> {
    Some(match (tensor.dtype(), element.is_float()) {
        (DataType::F64, _) => Expr::Double(tensor.to_vec::<f64>()?[0]),
        (_, true) => Expr::Float(graph::content::floats(tensor)?[0]),
        (DataType::U64, _) => return None,
        _ => Expr::Integer(element, graph::content::ints(tensor)?[0]),
    })
}

fn expression_of(
    op: &Op,
    operands: Vec<Option<Expr>>,
    element: Element,
) -> Result<Expr, UnsupportedReason> {
    let mut operands = operands.into_iter();
    let mut next = || operands.next().flatten().map(Box::new);
    let missing = "an operand is absent";
    Ok(match op {
        Op::Unary(unary) => Expr::Unary(*unary, next().ok_or(missing)?),
        Op::Binary(binary) => Expr::Binary(*binary, next().ok_or(missing)?, next().ok_or(missing)?),
        Op::Compare(compare) => {
            Expr::Compare(*compare, next().ok_or(missing)?, next().ok_or(missing)?)
        }
        Op::Where => {
            Expr::Where(next().ok_or(missing)?, next().ok_or(missing)?, next().ok_or(missing)?)
        }
        Op::Clip => Expr::Clip(next().ok_or(missing)?, next(), next()),
        Op::PRelu => Expr::PRelu(next().ok_or(missing)?, next().ok_or(missing)?),
        Op::Cast(_) => Expr::Cast(element, next().ok_or(missing)?),
        Op::ScaleShift { activation } => Expr::ScaleShift(
            *activation,
            next().ok_or(missing)?,
            next().ok_or(missing)?,
            next().ok_or(missing)?,
        ),
        Op::Variadic(variadic) => Expr::Variadic(*variadic, operands.flatten().collect()),
        other => return Err(format!("{} is not an element-wise operator", other.name())),
    })
}
