//! Products in Einstein notation, written as matrix products, and attention made of them.

use model::op::{Binary, Op, Unary};
use model::{DataType, Tensor};

use crate::bench::Random;
use crate::dress::{Net, count, optimized};

fn einsum(equation: &str) -> Op {
    Op::Einsum { equation: equation.to_string() }
}

/// An equation with labels of every kind in any order.
struct Equation {
    a: String,
    b: String,
    out: String,
}

fn shuffled(random: &mut Random, mut labels: Vec<char>) -> String {
    for at in (1..labels.len()).rev() {
        labels.swap(at, random.below(at + 1));
    }
    labels.into_iter().collect()
}

fn equation(random: &mut Random) -> Equation {
    let mut take = |from: &str, most: usize| -> Vec<char> {
        from.chars().take(random.below(most + 1)).collect()
    };
    let (batch, rows) = (take("uv", 2), take("mn", 2));
    let (columns, depth) = (take("pq", 2), take("xy", 2));
    let (mut a, mut b) = (batch.clone(), batch.clone());
    let mut out = batch;
    a.extend(rows.iter().chain(&depth));
    b.extend(depth.iter().chain(&columns));
    out.extend(rows.iter().chain(&columns));
    let mut order = |labels: Vec<char>| match random.below(3) {
        0 => labels.into_iter().collect(),
        _ => shuffled(random, labels),
    };
    Equation { a: order(a), b: order(b), out: order(out) }
}

fn sizes(labels: &str) -> Vec<usize> {
    let size = |label: char| match label {
        'u' => 2,
        'v' => 3,
        'm' => 5,
        'n' => 1,
        'p' => 4,
        'q' => 3,
        'x' => 6,
        _ => 2,
    };
    labels.chars().map(size).collect()
}

#[test]
fn every_equation_computes_the_same() {
    let (mut products, mut cases) = (0, 0);
    for seed in 0..300 {
        let mut random = Random::new(900 + seed);
        let Equation { a, b, out } = equation(&mut random);
        if a.is_empty() || b.is_empty() {
            continue;
        }
        let mut net = Net::new(seed, DataType::F32);
        let x = net.input(&sizes(&a));
        let weight = net.random.floats(&sizes(&b));
        let y = if random.below(2) == 0 { net.constant(weight) } else { net.feed(weight) };
        let text = format!("{a},{b}->{out}");
        let z = net.node(einsum(&text), &[x, y]);
        // A reader, so that the product is not the model's output itself.
        let z = net.node(Op::Unary(Unary::Relu), &[z]);
        let (graph, feeds) = net.finish(z);
        let after = optimized(&graph, &feeds, &text);
        cases += 1;
        products += usize::from(count(&after, "Einsum") == 0);
        let all = format!("{a}{b}");
        let one_each = |from: &str| all.chars().filter(|c| from.contains(*c)).count();
        let single = one_each("mn") == 1 && one_each("pq") == 1 && one_each("xy") == 2;
        assert!(!single || count(&after, "Einsum") == 0, "{text}\n{after}");
    }
    // Most random equations sum over one operand alone or have no rows, and stay as they are.
    assert!(products > 20, "{products} of {cases}");
}

#[test]
fn an_ellipsis_and_other_equations_compute_the_same() {
    let cases: [(&str, &[usize], &[usize], bool); 8] = [
        ("...ij,jk->...ik", &[2, 3, 5, 7], &[7, 9], true),
        ("...qd,...kd->...qk", &[2, 3, 5, 7], &[2, 3, 4, 7], true),
        ("...qd,...kd->...qk", &[2, 1, 5, 7], &[2, 3, 4, 7], true),
        ("b...i,ij->b...j", &[2, 3, 5, 7], &[7, 4], true),
        // The first ellipsis is longer: its front dimension is one of rows, and not beside them.
        ("...qd,...kd->...qk", &[2, 3, 5, 7], &[3, 4, 7], false),
        ("ij,ij->i", &[5, 7], &[5, 7], false),
        ("i,j->ij", &[5], &[7], false),
        ("ij,jk->", &[5, 7], &[7, 3], false),
    ];
    for (equation, left, right, product) in cases {
        let mut net = Net::new(77, DataType::F32);
        let (a, b) = (net.input(left), net.input(right));
        let z = net.node(einsum(equation), &[a, b]);
        let z = net.node(Op::Unary(Unary::Relu), &[z]);
        let (graph, feeds) = net.finish(z);
        let after = optimized(&graph, &feeds, equation);
        assert_eq!(count(&after, "Einsum") == 0, product, "{equation}\n{after}");
    }
}

/// Windows of an image, as MaxViT has them, and heads that are not in front.
#[test]
fn attention_in_einstein_notation_is_recognised() {
    let forms: [(&str, &str, &[usize], &[usize]); 3] = [
        ("bghid,bghjd->bghij", "bghij,bghjd->bghid", &[2, 3, 4, 6, 8], &[2, 3, 4, 5, 8]),
        ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", &[2, 6, 4, 8], &[2, 5, 4, 8]),
        ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd", &[2, 4, 1, 8], &[2, 4, 5, 8]),
    ];
    for (seed, (scores, values, q, kv)) in forms.into_iter().enumerate() {
        for bias in [false, true] {
            let mut net = Net::new(500 + seed as u64, DataType::F32);
            let (q, k, v) = (net.input(q), net.input(kv), net.input(kv));
            let factor = net.number(0.35);
            let q = net.binary(Binary::Mul, q, factor);
            let mut s = net.node(einsum(scores), &[q, k]);
            if bias {
                let keys = 5;
                let bias = net.input(&[4, 1, keys]);
                s = net.binary(Binary::Add, s, bias);
            }
            let weights = net.softmax(s, -1);
            let y = net.node(einsum(values), &[weights, v]);
            let (graph, feeds) = net.finish(y);
            let after = optimized(&graph, &feeds, scores);
            assert_eq!(count(&after, "Attention"), 1, "{scores}\n{after}");
            let left = ["Einsum", "MatMul", "Softmax"].map(|name| count(&after, name));
            assert_eq!(left, [0; 3], "{scores}\n{after}");
        }
    }
}

/// Cosine attention (Swin v2): every head, or every query, has a scale of its own.
#[test]
fn scales_that_differ_between_heads_are_factors_of_the_queries() {
    let shapes: [&[usize]; 5] = [&[4, 1, 1], &[2, 1, 1, 1], &[6, 1], &[1], &[4, 6, 1]];
    for (seed, shape) in shapes.into_iter().enumerate() {
        for (before, constant) in [(false, true), (false, false), (true, true)] {
            let mut net = Net::new(600 + seed as u64, DataType::F32);
            let [q, k, v] = [0; 3].map(|_| net.input(&[2, 4, 6, 8]));
            let kt = net.transpose(k, &[0, 1, 3, 2]);
            let mut s = net.matmul(q, kt);
            let bias = net.input(&[1, 4, 6, 6]);
            if before {
                s = net.binary(Binary::Add, s, bias);
            }
            let scale = net.random.floats(shape);
            let scale = if constant { net.constant(scale) } else { net.feed(scale) };
            s = net.binary(Binary::Mul, s, scale);
            if !before {
                s = net.binary(Binary::Add, s, bias);
            }
            let weights = net.softmax(s, -1);
            let y = net.matmul(weights, v);
            let (graph, feeds) = net.finish(y);
            let case = format!("{shape:?}, bias before: {before}");
            let after = optimized(&graph, &feeds, &case);
            // A bias that is scaled too stays outside, unless the scale is one number.
            let one = constant && shape == [1];
            let found = usize::from(!before || one);
            assert_eq!(count(&after, "Attention"), found, "{case}\n{after}");
        }
    }
}

/// A scale of its own for every key is none of the queries'.
#[test]
fn scales_that_differ_between_keys_stay() {
    let mut net = Net::new(700, DataType::F32);
    let [q, k, v] = [0; 3].map(|_| net.input(&[2, 4, 6, 8]));
    let kt = net.transpose(k, &[0, 1, 3, 2]);
    let s = net.matmul(q, kt);
    let scale: Tensor = net.random.floats(&[6]);
    let scale = net.constant(scale);
    let s = net.binary(Binary::Mul, s, scale);
    let weights = net.softmax(s, -1);
    let y = net.matmul(weights, v);
    let (graph, feeds) = net.finish(y);
    let after = optimized(&graph, &feeds, "keys");
    assert_eq!(count(&after, "Attention"), 0, "{after}");
}
