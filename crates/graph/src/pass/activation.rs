//! Recognises activations that exporters write as several operators: GELU in both forms, SiLU, hard
//! swish, Mish.

use model::ValueId;
use model::op::{Binary, Op, Softmax, Unary};

use super::editor::{Editor, first, pair};
use crate::ir::Graph;

const HALF_SQRT_2: f32 = std::f32::consts::FRAC_1_SQRT_2;
const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// Replaces written-out activations by one operator each. Returns how many.
pub fn run(graph: &mut Graph) -> usize {
    let mut editor = Editor::new(graph);
    for index in 0..editor.len() {
        let found = match editor.node(index).map(|node| &node.op) {
            Some(Op::Binary(Binary::Mul | Binary::Div)) => recognise(&editor, index),
            Some(Op::Softmax(softmax)) if softmax.flatten => {
                plain_softmax(&editor, index, *softmax).map(|op| (op.0, op.1))
            }
            _ => None,
        };
        if let Some((op, x)) = found {
            editor.replace(index, op, vec![Some(x)]);
        }
    }
    editor.finish()
}

/// A flattened softmax over the last dimension alone is a plain one.
fn plain_softmax(editor: &Editor, index: usize, softmax: Softmax) -> Option<(Op, ValueId)> {
    let x = first(&editor.node(index)?.inputs)?;
    let rank = editor.graph.shape(x)?.len() as i64;
    let last = softmax.axis == -1 || softmax.axis == rank - 1;
    last.then_some((Op::Softmax(Softmax { axis: -1, flatten: false, ..softmax }), x))
}

/// Factors of a product: values and a number.
struct Product {
    number: f32,
    values: Vec<ValueId>,
}

/// Expands a product through inner products that have no other reader.
fn product(editor: &Editor, index: usize) -> Option<Product> {
    let mut factors = Product { number: 1.0, values: Vec::new() };
    let mut open = vec![index];
    while let Some(index) = open.pop() {
        let node = editor.node(index)?;
        let (a, b) = pair(&node.inputs)?;
        let divides = node.op == Op::Binary(Binary::Div);
        for (id, inverse) in [(a, false), (b, divides)] {
            if let Some(number) = editor.number(id) {
                factors.number =
                    if inverse { factors.number / number } else { factors.number * number };
                continue;
            }
            if inverse {
                return None;
            }
            let inner = editor.producer(id).filter(|(_, node)| {
                editor.is_private(id) && matches!(node.op, Op::Binary(Binary::Mul | Binary::Div))
            });
            match inner {
                Some((index, _)) if open.len() < 4 => open.push(index),
                _ => factors.values.push(id),
            }
        }
    }
    Some(factors)
}

fn near(a: f32, b: f32) -> bool {
    (a - b).abs() <= 1e-5 * b.abs()
}

/// The activation that the product at node `index` computes.
fn recognise(editor: &Editor, index: usize) -> Option<(Op, ValueId)> {
    let factors = product(editor, index)?;
    let output = editor.node(index)?.outputs.first().copied().flatten()?;
    let [a, b] = factors.values.as_slice() else { return None };
    for (x, gate) in [(*a, *b), (*b, *a)] {
        // A scalar factor with more dimensions than `x` would change the shape.
        if !editor.same_rank(x, output)
            || editor.graph.value(x).dtype != editor.graph.value(gate).dtype
        {
            continue;
        }
        if let Some(unary) = gated(editor, x, gate, factors.number) {
            return Some((Op::Unary(unary), x));
        }
    }
    None
}

/// The function `number * x * gate(x)`.
fn gated(editor: &Editor, x: ValueId, gate: ValueId, number: f32) -> Option<Unary> {
    let (op, inputs) = editor.op(gate)?;
    match op {
        Op::Unary(Unary::Sigmoid) if near(number, 1.0) => {
            let argument = first(inputs)?;
            if argument == x {
                return Some(Unary::Silu { alpha: 1.0 });
            }
            scaled(editor, argument, x).map(|alpha| Unary::Silu { alpha })
        }
        Op::Unary(Unary::HardSigmoid { alpha, beta }) if near(number, 1.0) => {
            let fits = first(inputs)? == x && near(*alpha, 1.0 / 6.0) && near(*beta, 0.5);
            fits.then_some(Unary::HardSwish)
        }
        Op::Unary(Unary::Tanh) if near(number, 1.0) => {
            let (inner, inputs) = editor.op(first(inputs)?)?;
            let fits = *inner == Op::Unary(Unary::Softplus) && first(inputs)? == x;
            fits.then_some(Unary::Mish)
        }
        Op::Binary(Binary::Add) if near(number, 0.5) => {
            let (a, b) = pair(inputs)?;
            let inner = match (editor.is_number(a, 1.0), editor.is_number(b, 1.0)) {
                (true, _) => b,
                (_, true) => a,
                _ => return None,
            };
            match editor.op(inner)? {
                (Op::Unary(Unary::Erf), inputs) => {
                    let factor = scaled(editor, first(inputs)?, x)?;
                    near(factor, HALF_SQRT_2).then_some(Unary::Gelu { tanh: false })
                }
                (Op::Unary(Unary::Tanh), inputs) => is_gelu_argument(editor, first(inputs)?, x)
                    .then_some(Unary::Gelu { tanh: true }),
                _ => None,
            }
        }
        // min(max(x + 3, 0), 6) / 6
        Op::Clip if near(number, 1.0 / 6.0) => {
            let [Some(shifted), Some(low), Some(high)] = inputs else { return None };
            let (Op::Binary(Binary::Add), inputs) = editor.op(*shifted)? else { return None };
            let (a, b) = pair(inputs)?;
            let sum = (a == x && editor.is_number(b, 3.0)) || (b == x && editor.is_number(a, 3.0));
            let bounds = editor.number(*low) == Some(0.0) && editor.is_number(*high, 6.0);
            (sum && bounds).then_some(Unary::HardSwish)
        }
        _ => None,
    }
}

/// The number `n` when `id` is `n * x`.
fn scaled(editor: &Editor, id: ValueId, x: ValueId) -> Option<f32> {
    let (op, inputs) = editor.op(id)?;
    let (a, b) = pair(inputs)?;
    match op {
        Op::Binary(Binary::Mul) if a == x => editor.number(b),
        Op::Binary(Binary::Mul) if b == x => editor.number(a),
        Op::Binary(Binary::Div) if a == x => editor.number(b).map(f32::recip),
        _ => None,
    }
}

/// Whether `id` is `sqrt(2/pi) * (x + 0.044715 * x^3)`, in any order of factors.
fn is_gelu_argument(editor: &Editor, id: ValueId, x: ValueId) -> bool {
    let Some(terms) = polynomial(editor, id, x, 0) else { return false };
    let expected = [0.0, SQRT_2_OVER_PI, 0.0, SQRT_2_OVER_PI * CUBIC];
    terms.iter().zip(expected).all(|(term, expected)| (term - expected).abs() <= 1e-5)
}

/// `id` as a cubic polynomial in `x`, lowest power first.
fn polynomial(editor: &Editor, id: ValueId, x: ValueId, depth: usize) -> Option<[f32; 4]> {
    if id == x {
        return Some([0.0, 1.0, 0.0, 0.0]);
    }
    if let Some(number) = editor.number(id) {
        return Some([number, 0.0, 0.0, 0.0]);
    }
    if depth > 8 {
        return None;
    }
    let (op, inputs) = editor.op(id)?;
    let (a, b) = pair(inputs)?;
    let left = polynomial(editor, a, x, depth + 1)?;
    let right = polynomial(editor, b, x, depth + 1)?;
    match op {
        Op::Binary(Binary::Add) => Some(std::array::from_fn(|power| left[power] + right[power])),
        Op::Binary(Binary::Mul) => multiply(&left, &right),
        Op::Binary(Binary::Pow) => {
            let exponent = right[0];
            let whole = right[1..] == [0.0; 3]
                && (1.0..=3.0).contains(&exponent)
                && exponent.fract() == 0.0;
            let mut power = left;
            for _ in 1..if whole { exponent as usize } else { return None } {
                power = multiply(&power, &left)?;
            }
            Some(power)
        }
        _ => None,
    }
}

fn multiply(a: &[f32; 4], b: &[f32; 4]) -> Option<[f32; 4]> {
    let mut product = [0.0; 4];
    for (i, x) in a.iter().enumerate() {
        for (j, y) in b.iter().enumerate() {
            if x * y != 0.0 {
                *product.get_mut(i + j)? += x * y;
            }
        }
    }
    Some(product)
}
