//! Chains of element-wise operators as one generated kernel, and copies between any two layouts.
//!
//! The generated text depends on the expression, the element types, and the operands' strides along
//! the output's rows. Sizes and strides are arguments, so that steps of other sizes share the
//! kernel.

mod text;
mod transpose;

use model::op::{Activation, Binary, Compare, Unary, Variadic};

use super::args::{Address, ArgsWriter};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::loop_nest::{LoopNest, address, check_output, check_view, describe, describe_all};
use super::view::{Element, View};

/// The maximum number of operands of a chain, coordinates included.
pub const MAX_INPUTS: usize = 16;

/// The maximum number of operators of a chain.
pub const MAX_NODES: usize = 256;

/// A function of one element of each input.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// The element of an input.
    Input(usize),
    /// The index along a dimension of the output, an `I64`.
    Coordinate(usize),
    /// A single-precision constant.
    Float(f32),
    /// A double-precision constant.
    Double(f64),
    /// An integer or boolean constant; `U64` by its bits.
    Integer(Element, i64),
    /// A function of one operand.
    Unary(Unary, Box<Expr>),
    /// A function of two operands of one type.
    Binary(Binary, Box<Expr>, Box<Expr>),
    /// A comparison of two operands of one type.
    Compare(Compare, Box<Expr>, Box<Expr>),
    /// A function of one or more operands of one type.
    Variadic(Variadic, Vec<Expr>),
    /// Condition, value where it holds, value where not.
    Where(Box<Expr>, Box<Expr>, Box<Expr>),
    /// A value between two bounds.
    Clip(Box<Expr>, Option<Box<Expr>>, Option<Box<Expr>>),
    /// A value and its slope below zero.
    PRelu(Box<Expr>, Box<Expr>),
    /// Conversion to another type.
    Cast(Element, Box<Expr>),
    /// A fused function.
    Activation(Activation, Box<Expr>),
    /// `activation(x * scale + shift)`.
    ScaleShift(Activation, Box<Expr>, Box<Expr>, Box<Expr>),
}

impl Expr {
    /// Its operands.
    fn children(&self) -> Vec<&Expr> {
        match self {
            Expr::Input(_) | Expr::Coordinate(_) => Vec::new(),
            Expr::Float(_) | Expr::Double(_) | Expr::Integer(..) => Vec::new(),
            Expr::Unary(_, x) | Expr::Cast(_, x) | Expr::Activation(_, x) => vec![x],
            Expr::Binary(_, a, b) | Expr::Compare(_, a, b) | Expr::PRelu(a, b) => vec![a, b],
            Expr::Variadic(_, all) => all.iter().collect(),
            Expr::Where(a, b, c) | Expr::ScaleShift(_, a, b, c) => vec![a, b, c],
            Expr::Clip(x, low, high) => {
                let bounds = [low, high].into_iter().flatten().map(|bound| &**bound);
                std::iter::once(&**x).chain(bounds).collect()
            }
        }
    }

    /// Every node; stops after one more than a chain may have.
    fn nodes(&self) -> Vec<&Expr> {
        let mut nodes = vec![self];
        let mut next = 0;
        while next < nodes.len() && nodes.len() <= MAX_NODES {
            let children = nodes[next].children();
            nodes.extend(children);
            next += 1;
        }
        nodes
    }
}

/// The stride of an operand along the rows of the output: `Access` of `kernels/chain.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Row,
    Point,
    Apart,
    Position,
}

/// Properties of an operand that the generated text depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Operand {
    element: Element,
    access: Access,
}

/// The loops of a chain. Operands of the nest: the output, the position in a row, the inputs.
#[derive(Debug)]
struct ChainLoops {
    nest: LoopNest,
    /// Elements a thread computes.
    count: usize,
    width: usize,
    padded: usize,
    /// Elements between neighbours of a row, per input.
    apart: Vec<usize>,
    access: Vec<Access>,
}

/// `output = expr(inputs)`, the inputs broadcast to the output's shape. The output's slack is set
/// to zero.
pub fn work(expr: &Expr, inputs: &[View], output: &View) -> Result<StepDraft, String> {
    check_output(output)?;
    let nodes = expr.nodes();
    if nodes.len() > MAX_NODES {
        return Err(format!("a chain of more than {MAX_NODES} operators"));
    }
    let operators = nodes.iter().filter(|node| !node.children().is_empty()).count();
    let axes = coordinates(&nodes, output)?;
    if inputs.len() + axes.len() > MAX_INPUTS {
        return Err(format!("a chain of more than {MAX_INPUTS} operands"));
    }
    let mut operands = Vec::with_capacity(inputs.len());
    for input in inputs {
        check_view(input)?;
        let view = input.broadcast(&output.shape);
        operands.push(view.ok_or_else(|| {
            format!("shape {:?} does not broadcast to {:?}", input.shape, output.shape)
        })?);
    }
    let plan = plan(&operands, &axes, output)?;
    plan.nest.check()?;
    let (args, items) = arguments(&plan, inputs, output);
    let mut kernel = kernel(expr, &axes, &plan, inputs, output)?;
    let each = vectors_of_a_thread(&plan, output);
    if each > 1 {
        kernel.expression = format!("tiles::Chain<tiles::Function, {each}>");
    }
    let draft = LaunchDraft::plain(kernel, items.div_ceil(128 * each), args);
    let reads: Vec<&View> = inputs.iter().collect();
    let signature =
        format!("elementwise {expr:?} {} of {}", describe(output), describe_all(&reads));
    let mut work = super::loop_nest::single("Elementwise", signature, draft, &reads, output);
    work.flops = (operators * output.len()) as u64;
    Ok(work)
}

/// `to = from`, elements converted where the types differ. The slack of `to` is set to zero.
pub fn copy(from: &View, to: &View) -> Result<StepDraft, String> {
    check_output(to)?;
    check_view(from)?;
    let source = from
        .broadcast(&to.shape)
        .ok_or_else(|| format!("shape {:?} does not broadcast to {:?}", from.shape, to.shape))?;
    let (mut source, mut target) = (source, to.clone());
    if from.element == to.element {
        // Bits are copied unchanged, so that types of one size share a kernel.
        let bits = bits(from.element);
        (source.element, target.element) = (bits, bits);
    }
    let moved = match transpose::work(&source, &target)? {
        Some(work) => work,
        None => work(&Expr::Input(0), std::slice::from_ref(&source), &target)?,
    };
    Ok(StepDraft {
        op: "Copy",
        reads: vec![from.clone()],
        writes: vec![to.clone()],
        flops: 0,
        ..moved
    })
}

/// `output = value` everywhere.
pub fn fill(value: Expr, output: &View) -> Result<StepDraft, String> {
    Ok(StepDraft { op: "Fill", flops: 0, ..work(&value, &[], output)? })
}

/// Sets the slack of `output` to zero; `None` when it has none.
///
/// Chains and copies do so themselves; a value of another step needs this one.
pub fn clear_slack(output: &View) -> Option<Result<StepDraft, String>> {
    if output.slack == 0 || output.is_empty() {
        return None;
    }
    let row = output
        .shape
        .iter()
        .zip(&output.strides)
        .position(|(&size, &stride)| size > 1 && stride == 1);
    let mut slack = View { slack: 0, ..output.clone() };
    match row {
        Some(axis) => {
            slack.offset += slack.shape[axis];
            slack.shape[axis] = output.slack;
        }
        None => {
            slack.offset += 1;
            slack.shape.push(output.slack);
            slack.strides.push(1);
        }
    }
    slack.element = bits(slack.element);
    Some(fill(Expr::Integer(slack.element, 0), &slack))
}

/// Unsigned integers of the same size.
pub(super) fn bits(element: Element) -> Element {
    match element.size() {
        1 => Element::U8,
        2 => Element::U16,
        4 => Element::U32,
        _ => Element::U64,
    }
}

/// The dimensions whose index the expression reads, in order.
fn coordinates(nodes: &[&Expr], output: &View) -> Result<Vec<usize>, String> {
    let axis = |node: &&Expr| if let Expr::Coordinate(axis) = node { Some(*axis) } else { None };
    let mut axes: Vec<usize> = nodes.iter().filter_map(axis).collect();
    axes.sort_unstable();
    axes.dedup();
    match axes.last() {
        Some(axis) if *axis >= output.shape.len() => {
            Err(format!("index along dimension {axis} of {} dimensions", output.shape.len()))
        }
        _ => Ok(axes),
    }
}

/// The loops over `inputs`, which have the output's shape, and the dimensions `axes` whose index is
/// read.
fn plan(inputs: &[View], axes: &[usize], output: &View) -> Result<ChainLoops, String> {
    let rank = output.shape.len();
    let mut strides = vec![output.strides.clone(), vec![0; rank]];
    strides.extend(inputs.iter().map(|view| view.strides.clone()));
    strides.extend(axes.iter().map(|axis| (0..rank).map(|i| usize::from(i == *axis)).collect()));
    let mut nest = LoopNest::new(&output.shape, &strides).ordered_by(0).merged();
    let row = match nest.loops.last() {
        Some(dim) if dim.strides[0] == 1 => nest.loops.pop(),
        _ => None,
    };
    let operands = inputs.len() + axes.len();
    let (width, apart) = match row {
        Some(row) => (row.size, row.strides[2..].to_vec()),
        None => (1, vec![0; operands]),
    };
    let padded = width + output.slack;
    let count = vector(&nest, inputs, output, &apart, padded);
    let step = |apart: usize| apart * count;
    let mut vectors = vec![count, count];
    vectors.extend(apart.iter().map(|apart| step(*apart)));
    if padded > count {
        nest.push(padded.div_ceil(count), vectors);
    }
    let access = (0..operands)
        .map(|i| match apart[i] {
            _ if i >= inputs.len() => Access::Position,
            0 => Access::Point,
            1 if aligned(&nest, i + 2, &inputs[i], count) => Access::Row,
            _ => Access::Apart,
        })
        .collect();
    Ok(ChainLoops { nest, count, width, padded, apart, access })
}

/// How many elements of a row a thread computes: 16 bytes of the smallest operand, as far as the
/// output and the inputs that vary along rows are aligned.
fn vector(
    nest: &LoopNest,
    inputs: &[View],
    output: &View,
    apart: &[usize],
    padded: usize,
) -> usize {
    let along = || inputs.iter().enumerate().filter(|(i, _)| apart[*i] == 1);
    let smallest =
        along().map(|(_, view)| view.element.size()).chain([output.element.size()]).min();
    let most = (16 / smallest.unwrap_or(16)).min(8);
    let mut count = most;
    while count > 1 {
        let fits = count <= padded
            && aligned(nest, 0, output, count)
            && along().all(|(i, view)| aligned(nest, i + 2, view, count));
        if fits {
            break;
        }
        count /= 2;
    }
    count
}

/// Whether every row of an operand is aligned for loads and stores of `count` elements.
fn aligned(nest: &LoopNest, operand: usize, view: &View, count: usize) -> bool {
    let unit = (16 / view.element.size()).min(count);
    let even = |elements: usize| elements.is_multiple_of(unit);
    even(view.offset) && nest.loops.iter().all(|dim| even(dim.strides[operand]))
}

/// Short vectors of a long value are computed several by one thread: blocks of few bytes take
/// longer to start than to run.
fn vectors_of_a_thread(plan: &ChainLoops, output: &View) -> usize {
    const MANY: usize = 1 << 19;
    let bytes = plan.count * output.element.size();
    if plan.nest.len() < MANY || bytes >= 16 { 1 } else { 4 }
}

fn arguments(plan: &ChainLoops, inputs: &[View], output: &View) -> (ArgsWriter, usize) {
    let items = plan.nest.len();
    let operands = plan.apart.len();
    let mut args = ArgsWriter::new();
    args.address(address(output));
    for input in inputs {
        args.address(address(input));
    }
    // Coordinates have no address; a struct without operands still has one entry.
    for _ in inputs.len()..operands.max(1) {
        args.address(Address::Null);
    }
    args.int(items).int(plan.width).int(plan.padded);
    for operand in 0..operands.max(1) {
        args.int(plan.apart.get(operand).copied().unwrap_or(0));
    }
    plan.nest.write(&mut args);
    (args, items)
}

fn kernel(
    expr: &Expr,
    axes: &[usize],
    plan: &ChainLoops,
    inputs: &[View],
    output: &View,
) -> Result<KernelText, String> {
    let elements = inputs.iter().map(|view| view.element).chain(axes.iter().map(|_| Element::I64));
    let operands: Vec<Operand> = elements
        .zip(&plan.access)
        .map(|(element, access)| Operand { element, access: *access })
        .collect();
    let shape = text::Shape { rank: plan.nest.rank(), count: plan.count };
    let source = text::source(expr, &operands, axes, output.element, shape)?;
    let expression = "tiles::Chain<tiles::Function>".to_string();
    Ok(KernelText { source, expression, threads: 128, shared_bytes: 0 })
}

#[cfg(test)]
mod tests;
