//! Each pass on small graphs: the rewritten structure, and that the results are unchanged.

use model::op::{
    Activation, Binary, Conv, Gemm, MatMul, Op, PadMode, Padding, Reduce, ReduceKind, Softmax,
    SoftmaxKind, Unary, Window,
};

use model::{Tensor, ValueId};

use super::testing::{Builder, check, evaluate, names, noise};
use super::*;
use model::dim::SymDim;

fn conv(pads: usize, groups: usize) -> Op {
    Op::Conv(Conv {
        window: Window {
            kernel: vec![],
            strides: vec![],
            dilations: vec![],
            padding: Padding::Explicit(vec![pads; 4]),
        },
        groups,
        activation: Activation::None,
    })
}

fn binary(op: Binary) -> Op {
    Op::Binary(op)
}

fn mean() -> Op {
    Op::Reduce(Reduce { kind: ReduceKind::Mean, keep_dims: true, noop_with_empty_axes: false })
}

fn everything(graph: &mut Graph) -> usize {
    optimize(graph, None).total()
}

#[test]
fn a_residual_block_is_convolutions_only() {
    let mut b = Builder::default();
    let x = b.input("x", &[SymDim::symbol("n"), 4.into(), 5.into(), 5.into()]);
    let mut y = x;
    for last in [false, true] {
        let weight = b.weight(&[4, 4, 3, 3]);
        y = b.node(conv(1, 1), &[y, weight]);
        let statistics = [b.positive(&[4]), b.weight(&[4]), b.weight(&[4]), b.positive(&[4])];
        let [scale, bias, mean, variance] = statistics;
        y = b.node(Op::BatchNorm { epsilon: 1e-5 }, &[y, scale, bias, mean, variance]);
        if last {
            y = b.node(binary(Binary::Add), &[x, y]);
        }
        y = b.node(Op::Unary(Unary::Relu), &[y]);
    }
    let (graph, _) = check(&b.output(y), everything);
    assert_eq!(names(&graph), ["Conv", "Conv"]);
    assert!(matches!(&graph.nodes[1].op, Op::Conv(conv) if conv.activation == Activation::Relu));
    assert_eq!(graph.nodes[1].inputs[3], Some(graph.inputs[0]));
    let first = graph.nodes[1].inputs[0];
    assert_eq!(graph.nodes[0].outputs[0], first);
}

#[test]
fn values_with_other_readers_are_not_fused_away() {
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[1, 2, 4, 4]);
    let weight = b.weight(&[2, 2, 1, 1]);
    let y = b.node(conv(0, 1), &[x, weight]);
    let z = b.node(Op::Unary(Unary::Relu), &[y]);
    let mut graph = b.output(z);
    graph.outputs.push(y);
    let (graph, count) = check(&graph, epilogue::run);
    assert_eq!((count, names(&graph).len()), (0, 2));
}

#[test]
fn normalisation_without_a_convolution_is_one_multiply_add() {
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[2, 3, 4]);
    let statistics = [b.positive(&[3]), b.weight(&[3]), b.weight(&[3]), b.positive(&[3])];
    let [scale, bias, mean, variance] = statistics;
    let y = b.node(Op::BatchNorm { epsilon: 1e-3 }, &[x, scale, bias, mean, variance]);
    let (low, high) = (b.number(-0.25), b.number(0.5));
    let y = b.node(Op::Clip, &[y, low, high]);
    let (graph, _) = check(&b.output(y), everything);
    assert_eq!(names(&graph), ["ScaleShift"]);
    let clip = Activation::Clip { low: -0.25, high: 0.5 };
    assert_eq!(graph.nodes[0].op, Op::ScaleShift { activation: clip });
}

#[test]
fn normalisation_folds_into_general_products_and_groups() {
    for transpose_b in [false, true] {
        let mut b = Builder::default();
        let x = b.fixed_input("x", &[3, 4]);
        let weight = b.weight(if transpose_b { &[5, 4] } else { &[4, 5] });
        let c = b.weight(&[5]);
        let gemm = Gemm {
            transpose_a: false,
            transpose_b,
            alpha: 0.5,
            beta: 2.0,
            activation: Activation::None,
        };
        let y = b.node(Op::Gemm(gemm), &[x, weight, c]);
        let statistics = [b.positive(&[5]), b.weight(&[5]), b.weight(&[5]), b.positive(&[5])];
        let [scale, bias, mean, variance] = statistics;
        let y = b.node(Op::BatchNorm { epsilon: 1e-5 }, &[y, scale, bias, mean, variance]);
        let (graph, _) = check(&b.output(y), everything);
        assert_eq!(names(&graph), ["Gemm"]);
    }
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[1, 4, 3, 3]);
    let (weight, factor) = (b.weight(&[4, 1, 3, 3]), b.weight(&[1, 4, 1, 1]));
    let y = b.node(conv(1, 4), &[x, weight]);
    let y = b.node(binary(Binary::Mul), &[y, factor]);
    let (graph, _) = check(&b.output(y), everything);
    assert_eq!(names(&graph), ["Conv"]);
}

#[test]
fn biases_add_up() {
    let mut b = Builder::default();
    let x = b.input("x", &[SymDim::symbol("n"), 3.into(), 4.into()]);
    let (weight, first, second) = (b.weight(&[4, 6]), b.weight(&[6]), b.weight(&[1, 1, 6]));
    let y = b.node(Op::MatMul(MatMul::default()), &[x, weight]);
    let y = b.node(binary(Binary::Add), &[first, y]);
    let y = b.node(binary(Binary::Add), &[y, second]);
    let y = b.node(Op::Unary(Unary::Tanh), &[y]);
    let (graph, count) = check(&b.output(y), epilogue::run);
    assert_eq!((count, names(&graph)), (3, vec!["MatMul".to_string()]));
}

#[test]
fn a_bias_along_another_dimension_is_not_fused() {
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[6, 6]);
    let (weight, column) = (b.weight(&[6, 6]), b.weight(&[6, 1]));
    let y = b.node(Op::MatMul(MatMul::default()), &[x, weight]);
    let y = b.node(binary(Binary::Add), &[y, column]);
    let (_, count) = check(&b.output(y), epilogue::run);
    assert_eq!(count, 0);
}

/// `0.5 * x * (1 + erf(x / sqrt(2)))` in the orders exporters write it.
fn erf_gelu(b: &mut Builder, x: ValueId, order: usize) -> ValueId {
    let (half, one, root) = (b.number(0.5), b.number(1.0), b.number(std::f32::consts::SQRT_2));
    let scaled = b.node(binary(Binary::Div), &[x, root]);
    let erf = b.node(Op::Unary(Unary::Erf), &[scaled]);
    let gate = b.node(binary(Binary::Add), &[erf, one]);
    match order {
        0 => {
            let y = b.node(binary(Binary::Mul), &[x, gate]);
            b.node(binary(Binary::Mul), &[y, half])
        }
        1 => {
            let y = b.node(binary(Binary::Mul), &[half, x]);
            b.node(binary(Binary::Mul), &[y, gate])
        }
        _ => {
            let y = b.node(binary(Binary::Mul), &[gate, half]);
            b.node(binary(Binary::Mul), &[y, x])
        }
    }
}

#[test]
fn gelu_is_recognised_in_every_order() {
    for order in 0..3 {
        let mut b = Builder::default();
        let x = b.input("x", &[SymDim::symbol("n"), 4.into()]);
        let y = erf_gelu(&mut b, x, order);
        let (graph, _) = check(&b.output(y), everything);
        assert_eq!(names(&graph), ["Gelu"], "order {order}");
    }
}

#[test]
fn tanh_gelu_is_recognised() {
    for powers in [false, true] {
        let mut b = Builder::default();
        let x = b.fixed_input("x", &[3, 4]);
        let [cubic, root, half, one, three] =
            [0.044_715, 0.797_884_6, 0.5, 1.0, 3.0].map(|value| b.number(value));
        let cube = match powers {
            true => b.node(binary(Binary::Pow), &[x, three]),
            false => {
                let square = b.node(binary(Binary::Mul), &[x, x]);
                b.node(binary(Binary::Mul), &[square, x])
            }
        };
        let term = b.node(binary(Binary::Mul), &[cubic, cube]);
        let sum = b.node(binary(Binary::Add), &[x, term]);
        let argument = b.node(binary(Binary::Mul), &[root, sum]);
        let tanh = b.node(Op::Unary(Unary::Tanh), &[argument]);
        let gate = b.node(binary(Binary::Add), &[one, tanh]);
        let y = b.node(binary(Binary::Mul), &[half, x]);
        let y = b.node(binary(Binary::Mul), &[y, gate]);
        let graph = b.output(y);
        // The interpreter has no powers of negative numbers; only the structure is checked.
        let mut rewritten = graph.clone();
        optimize(&mut rewritten, None);
        assert_eq!(rewritten.nodes[0].op, Op::Unary(Unary::Gelu { tanh: true }));
        if !powers {
            check(&graph, everything);
        }
    }
}

#[test]
fn gelu_with_a_wrong_constant_is_not_recognised() {
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[3, 4]);
    let (half, one, root) = (b.number(0.5), b.number(1.0), b.number(1.5));
    let scaled = b.node(binary(Binary::Div), &[x, root]);
    let erf = b.node(Op::Unary(Unary::Erf), &[scaled]);
    let gate = b.node(binary(Binary::Add), &[erf, one]);
    let y = b.node(binary(Binary::Mul), &[x, gate]);
    let y = b.node(binary(Binary::Mul), &[y, half]);
    let (graph, _) = check(&b.output(y), everything);
    assert!(!names(&graph).contains(&"Gelu".to_string()));
}

#[test]
fn gates_become_silu_and_hard_swish() {
    let gates = [
        (Unary::Sigmoid, "Silu"),
        (Unary::HardSigmoid { alpha: 1.0 / 6.0, beta: 0.5 }, "HardSwish"),
    ];
    for (gate, name) in gates {
        let mut b = Builder::default();
        let x = b.fixed_input("x", &[3, 4]);
        let opened = b.node(Op::Unary(gate), &[x]);
        let y = b.node(binary(Binary::Mul), &[opened, x]);
        let (graph, _) = check(&b.output(y), everything);
        assert_eq!(names(&graph), [name]);
    }
}

fn spelled_norm(b: &mut Builder, x: ValueId, centred: bool) -> ValueId {
    let axes = b.ints(&[-1]);
    let (two, epsilon) = (b.number(2.0), b.number(1e-5));
    let base = match centred {
        true => {
            let average = b.node(mean(), &[x, axes]);
            b.node(binary(Binary::Sub), &[x, average])
        }
        false => x,
    };
    let _ = two;
    let square = b.node(binary(Binary::Mul), &[base, base]);
    let variance = b.node(mean(), &[square, axes]);
    let sum = b.node(binary(Binary::Add), &[variance, epsilon]);
    let root = b.node(Op::Unary(Unary::Sqrt), &[sum]);
    b.node(binary(Binary::Div), &[base, root])
}

#[test]
fn layer_norm_is_recognised_with_scale_and_bias() {
    let mut b = Builder::default();
    let x = b.input("x", &[SymDim::symbol("n"), 5.into(), 8.into()]);
    let normed = spelled_norm(&mut b, x, true);
    let (scale, bias) = (b.weight(&[8]), b.weight(&[8]));
    let y = b.node(binary(Binary::Mul), &[normed, scale]);
    let y = b.node(binary(Binary::Add), &[y, bias]);
    let (graph, _) = check(&b.output(y), everything);
    assert_eq!(names(&graph), ["LayerNorm"]);
    assert_eq!(graph.nodes[0].inputs.len(), 3);
}

#[test]
fn root_mean_square_norm_is_recognised() {
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[2, 5, 8]);
    let normed = spelled_norm(&mut b, x, false);
    let scale = b.weight(&[8]);
    let y = b.node(binary(Binary::Mul), &[scale, normed]);
    let (graph, _) = check(&b.output(y), everything);
    assert_eq!(names(&graph), ["RmsNorm"]);
}

#[test]
fn an_activation_behind_reshapes_belongs_to_the_product() {
    let build = |second_reader: bool| {
        let mut b = Builder::default();
        let x = b.fixed_input("x", &[6, 4]);
        let weight = b.weight(&[4, 8]);
        let y = b.node(Op::MatMul(MatMul::default()), &[x, weight]);
        let shape = b.ints(&[2, 3, 8]);
        let wide = b.node(Op::Reshape { allow_zero: false }, &[y, shape]);
        let turned = b.node(Op::Transpose { perm: Some(vec![1, 0, 2]) }, &[wide]);
        let z = b.node(Op::Unary(Unary::Gelu { tanh: true }), &[turned]);
        let mut graph = b.output(z);
        if second_reader {
            graph.outputs.push(wide);
        }
        graph
    };
    let (graph, _) = check(&build(false), everything);
    assert_eq!(names(&graph), ["MatMul", "Reshape", "Transpose"]);
    let (graph, _) = check(&build(true), everything);
    assert_eq!(names(&graph), ["MatMul", "Reshape", "Transpose", "Gelu"]);
}

/// `InstanceNorm` between reshapes, with a factor and a summand per channel of these shapes.
fn spelled_group_norm(split: &[i64], factor: &[usize], extra_reader: bool) -> Graph {
    let mut b = Builder::default();
    let x = b.input("x", &[SymDim::symbol("n"), 6.into(), 4.into(), 5.into()]);
    let reshape = Op::Reshape { allow_zero: false };
    let (parts, whole) = (b.ints(split), b.ints(&[0, 6, 4, 5]));
    let rows = b.node(reshape.clone(), &[x, parts]);
    let groups = split[1] as usize;
    let (scale, bias) = (b.positive(&[groups]), b.weight(&[groups]));
    let normed = b.node(Op::InstanceNorm { epsilon: 1e-3 }, &[rows, scale, bias]);
    let y = b.node(reshape, &[normed, whole]);
    let (factor, summand) = (b.weight(factor), b.weight(&[1, 6, 1, 1]));
    let y = b.node(binary(Binary::Mul), &[factor, y]);
    let y = b.node(binary(Binary::Add), &[y, summand]);
    let mut graph = b.output(y);
    if extra_reader {
        graph.outputs.push(normed);
    }
    graph
}

#[test]
fn group_norm_is_recognised_with_scale_and_bias() {
    for split in [[0, 3, -1], [0, 2, 60], [0, 6, 20]] {
        let (graph, _) = check(&spelled_group_norm(&split, &[6, 1, 1], false), everything);
        assert_eq!(names(&graph), ["GroupNorm"], "{split:?}");
    }
    let (graph, _) = check(&spelled_group_norm(&[0, 3, -1], &[1], false), everything);
    assert_eq!(names(&graph), ["GroupNorm"], "a factor for all channels");
}

#[test]
fn instance_norm_of_other_pieces_stays() {
    // Four groups of six channels end inside a channel; a factor per pixel is not one per channel.
    let (graph, _) = check(&spelled_group_norm(&[0, 4, 30], &[6, 1, 1], false), everything);
    assert!(names(&graph).contains(&"InstanceNorm".to_string()));
    let (graph, _) = check(&spelled_group_norm(&[0, 3, -1], &[4, 5], false), everything);
    assert_eq!(names(&graph), ["GroupNorm", "Mul", "Add"]);
    let (graph, _) = check(&spelled_group_norm(&[0, 3, -1], &[6, 1, 1], true), everything);
    assert!(names(&graph).contains(&"InstanceNorm".to_string()), "its result has a reader");
}

/// How the scale of an attention is written.
#[derive(Clone, Copy, Debug)]
enum Scale {
    Behind,
    OnBoth,
}

fn spelled_attention(scale: Scale, masked: bool, key_perm: [usize; 4]) -> Graph {
    let mut b = Builder::default();
    let n = SymDim::symbol("n");
    let [q, k, v] = ["q", "k", "v"]
        .map(|name| b.input(name, &[n.clone(), SymDim::symbol("t"), 2.into(), 4.into()]));
    let heads = |perm: [usize; 4]| Op::Transpose { perm: Some(perm.to_vec()) };
    let mut q = b.node(heads([0, 2, 1, 3]), &[q]);
    let mut k = b.node(heads(key_perm), &[k]);
    let v = b.node(heads([0, 2, 1, 3]), &[v]);
    if matches!(scale, Scale::OnBoth) {
        let root = b.number(0.5f32.sqrt());
        q = b.node(binary(Binary::Mul), &[q, root]);
        k = b.node(binary(Binary::Mul), &[k, root]);
    }
    if key_perm == [0, 2, 1, 3] {
        k = b.node(heads([0, 1, 3, 2]), &[k]);
    }
    let mut scores = b.node(Op::MatMul(MatMul::default()), &[q, k]);
    if matches!(scale, Scale::Behind) {
        let root = b.number(2.0);
        scores = b.node(binary(Binary::Div), &[scores, root]);
    }
    if masked {
        let mask = b.input("mask", &[n, 1.into(), 1.into(), SymDim::symbol("t")]);
        scores = b.node(binary(Binary::Add), &[scores, mask]);
    }
    let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
    let weights = b.node(Op::Softmax(softmax), &[scores]);
    let y = b.node(Op::MatMul(MatMul::default()), &[weights, v]);
    b.output(y)
}

#[test]
fn attention_is_recognised_in_the_forms_exporters_write() {
    for scale in [Scale::Behind, Scale::OnBoth] {
        for masked in [false, true] {
            for key_perm in [[0, 2, 3, 1], [0, 2, 1, 3]] {
                let graph = spelled_attention(scale, masked, key_perm);
                let (graph, _) = check(&graph, everything);
                let found = names(&graph);
                let case = format!("{scale:?} {masked} {key_perm:?}\n{graph}");
                assert_eq!(found.iter().filter(|n| *n == "Attention").count(), 1, "{case}");
                assert_eq!(found.iter().filter(|n| *n == "Transpose").count(), 3, "{case}");
                assert_eq!(found.len(), 4, "{case}");
            }
        }
    }
}

#[test]
fn attention_with_other_readers_is_not_fused() {
    let mut graph = spelled_attention(Scale::Behind, false, [0, 2, 3, 1]);
    let softmax = graph.nodes.iter().find(|node| matches!(node.op, Op::Softmax(_))).unwrap();
    let weights = softmax.outputs[0].unwrap();
    graph.outputs.push(weights);
    let (graph, _) = check(&graph, everything);
    assert!(!names(&graph).contains(&"Attention".to_string()));
}

#[test]
fn transposes_and_factors_fold_into_products() {
    let mut b = Builder::default();
    let (x, y) = (b.fixed_input("x", &[2, 3, 4]), b.fixed_input("y", &[2, 5, 4]));
    let swapped = b.node(Op::Transpose { perm: Some(vec![0, 2, 1]) }, &[y]);
    let z = b.node(Op::MatMul(MatMul::default()), &[x, swapped]);
    let quarter = b.number(0.25);
    let z = b.node(binary(Binary::Mul), &[z, quarter]);
    let (graph, _) = check(&b.output(z), everything);
    assert_eq!(names(&graph), ["MatMul"]);
    assert!(matches!(&graph.nodes[0].op, Op::MatMul(m) if m.transpose_b && m.alpha == 0.25));
}

#[test]
fn zero_padding_moves_into_convolutions() {
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[1, 2, 4, 4]);
    let pads = b.ints(&[0, 0, 1, 0, 0, 0, 2, 1]);
    let weight = b.weight(&[3, 2, 3, 3]);
    let padded = b.node(Op::Pad { mode: PadMode::Constant }, &[x, pads]);
    let y = b.node(conv(1, 1), &[padded, weight]);
    let (graph, _) = check(&b.output(y), everything);
    assert_eq!(names(&graph), ["Conv"]);
}

#[test]
fn computed_shapes_become_constant() {
    let mut b = Builder::default();
    let x = b.input("x", &[SymDim::symbol("n"), SymDim::symbol("t"), 8.into()]);
    let shape = b.node(Op::Shape { start: 0, end: None }, &[x]);
    let (zero, one, rest) = (b.ints(&[0]), b.ints(&[1]), b.ints(&[-1, 4]));
    let (n, t) = (
        b.node(Op::Gather { axis: 0 }, &[shape, zero]),
        b.node(Op::Gather { axis: 0 }, &[shape, one]),
    );
    let target = b.node(Op::Concat { axis: 0 }, &[n, t, rest]);
    let y = b.node(Op::Reshape { allow_zero: false }, &[x, target]);
    let (graph, _) = check(&b.output(y), everything);
    assert_eq!(names(&graph), ["Reshape"]);
    let target = graph.nodes[0].inputs[1].unwrap();
    assert_eq!(graph.constant_ints(target), Some(vec![0, 0, 2, 4]));
    let shape = graph.shape(graph.outputs[0]).unwrap();
    assert_eq!(model::dim::shape_text(Some(shape)), "[n,t,2,4]");
}

#[test]
fn no_ops_vanish_and_outputs_keep_their_names() {
    let mut b = Builder::default();
    let x = b.input("x", &[SymDim::symbol("n"), 8.into()]);
    let same = b.ints(&[-1, 8]);
    let y = b.node(Op::Unary(Unary::Relu), &[x]);
    let z = b.node(Op::Reshape { allow_zero: false }, &[y, same]);
    let z = b.node(Op::Transpose { perm: Some(vec![1, 0]) }, &[z]);
    let z = b.node(Op::Transpose { perm: Some(vec![1, 0]) }, &[z]);
    let last = b.node(Op::Identity, &[z]);
    b.graph.values[last.index()].name = "answer".to_string();
    let (graph, _) = check(&b.output(last), everything);
    assert_eq!(names(&graph), ["Relu"]);
    assert_eq!(graph.value(graph.outputs[0]).name, "answer");
    // An input that is also an output cannot be renamed: the operator stays.
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[8]);
    let y = b.node(Op::Identity, &[x]);
    let (graph, _) = check(&b.output(y), everything);
    assert_eq!(names(&graph), ["Identity"]);
}

#[test]
fn constants_are_computed_by_the_evaluator_within_limits() {
    struct Relu;
    impl Evaluator for Relu {
        fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], _: usize) -> Option<Vec<Tensor>> {
            let x = inputs[0].as_ref()?;
            let data = x.to_vec::<f32>()?.into_iter().map(|x| x.max(0.0)).collect();
            let relu = *op == Op::Unary(Unary::Relu);
            relu.then(|| vec![Tensor::from_vec(x.shape().to_vec(), data).unwrap()])
        }
    }
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[3]);
    let weight = b.weight(&[3]);
    let folded = b.node(Op::Unary(Unary::Relu), &[weight]);
    let y = b.node(binary(Binary::Mul), &[x, folded]);
    let graph = b.output(y);
    let expected = evaluate(&graph);
    let mut rewritten = graph.clone();
    assert_eq!(optimize(&mut rewritten, Some(&Relu)).count("fold"), 1);
    assert_eq!(names(&rewritten), ["Mul"]);
    assert_eq!(evaluate(&rewritten)[0].data, expected[0].data);
}

#[test]
fn dead_nodes_are_removed() {
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[3]);
    let weight = b.weight(&[3]);
    b.node(binary(Binary::Mul), &[x, weight]);
    let y = b.node(Op::Unary(Unary::Relu), &[x]);
    let (graph, count) = check(&b.output(y), dead::run);
    assert_eq!((count, graph.constants.iter().count()), (1, 0));
}

/// Computes running sums, which shape inference does not follow, and the places of non-zeros.
struct SumsAndPlaces;

impl Evaluator for SumsAndPlaces {
    fn evaluate(&self, op: &Op, inputs: &[Option<Tensor>], _: usize) -> Option<Vec<Tensor>> {
        let x = inputs.first()?.as_ref()?.to_vec::<i64>()?;
        let values: Vec<i64> = match op {
            Op::CumSum { .. } => x
                .iter()
                .scan(0, |sum, x| {
                    *sum += x;
                    Some(*sum)
                })
                .collect(),
            Op::NonZero => {
                let at = x.iter().enumerate().filter(|(_, x)| **x != 0).map(|(at, _)| at as i64);
                let at: Vec<i64> = at.collect();
                return Some(vec![Tensor::from_vec(vec![1, at.len()], at).ok()?]);
            }
            _ => return None,
        };
        Some(vec![Tensor::from_vec(vec![values.len()], values).ok()?])
    }
}

/// The shape of a reshaped value is known only once the target of the reshape is folded, and so is
/// the target of the next one: a chain of any length folds in one pass.
#[test]
fn shapes_that_depend_on_folded_constants_fold() {
    let mut b = Builder::default();
    let mut x = b.fixed_input("x", &[24]);
    let axis = b.ints(&[0]);
    let mut parts = b.ints(&[2, 1, 5]);
    // The sums of 2, 1, 5 are 2, 3, 8; those of a shape 2, 3, 4 are 2, 5, 9.
    for _ in 0..12 {
        let sums = b.node(Op::CumSum { exclusive: false, reverse: false }, &[parts, axis]);
        let target = match x == b.graph.inputs[0] {
            true => {
                let less = b.ints(&[0, 0, 4]);
                b.node(binary(Binary::Sub), &[sums, less])
            }
            false => {
                let less = b.ints(&[0, 2, 5]);
                b.node(binary(Binary::Sub), &[sums, less])
            }
        };
        let moved = b.node(Op::Reshape { allow_zero: false }, &[x, target]);
        x = b.node(Op::Unary(Unary::Relu), &[moved]);
        parts = b.node(Op::Shape { start: 0, end: None }, &[x]);
    }
    let mut graph = b.output(x);
    graph.outputs.push(parts);
    let mut budget = fold::FoldBudget::new(&graph);
    let folded = fold::run(&mut graph, Some(&SumsAndPlaces), &mut budget);
    // Sums, differences and shapes: only reshapes and activations remain.
    assert_eq!((folded, graph.nodes.len()), (36, 24));
    assert_eq!(graph.constant_ints(parts), Some(vec![2, 3, 4]));
}

#[test]
fn constants_of_unknown_size_fold() {
    let mut b = Builder::default();
    let x = b.fixed_input("x", &[3]);
    let mask = b.ints(&[0, 3, 0, 4]);
    let places = b.node(Op::NonZero, &[mask]);
    let flat = b.ints(&[-1]);
    let target = b.node(Op::Reshape { allow_zero: false }, &[places, flat]);
    let last = b.node(Op::Reshape { allow_zero: false }, &[x, target]);
    let mut graph = b.output(last);
    optimize(&mut graph, Some(&SumsAndPlaces));
    assert!(names(&graph).iter().all(|name| name == "Reshape"), "{:?}", names(&graph));
}

/// Without an evaluator only rows that share the table's memory fold.
fn folded_rows(graph: &mut Graph, output: ValueId) -> Option<Tensor> {
    let mut budget = fold::FoldBudget::new(graph);
    fold::run(graph, None, &mut budget);
    graph.constant(output).cloned()
}

/// Reproducible numbers.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

#[test]
fn neighbouring_rows_of_a_constant_share_its_memory() {
    let mut random = Draws(7);
    let mut shared = 0;
    for _ in 0..500 {
        let mut b = Builder::default();
        let (rows, columns) = (1 + random.below(9) as usize, 1 + random.below(4) as usize);
        let leading = random.below(2) as usize;
        let shape: Vec<usize> = [vec![1; leading], vec![rows, columns]].concat();
        let table = b.weight(&shape);
        let mut end = || random.below(2 * rows as u64 + 4) as i64 - rows as i64 - 2;
        let (from, to) = (end(), end());
        let axis = if random.below(2) == 0 { leading as i64 } else { -2 };
        let (starts, ends, axes) = (b.ints(&[from]), b.ints(&[to]), b.ints(&[axis]));
        let y = b.node(Op::Slice, &[table, starts, ends, axes]);
        let mut graph = b.output(y);
        let whole = graph.constant(table).cloned().unwrap();
        let bound = |at: i64| (if at < 0 { at + rows as i64 } else { at }).clamp(0, rows as i64);
        let wanted = bound(from) as usize..bound(to).max(bound(from)) as usize;
        let Some(folded) = folded_rows(&mut graph, y) else {
            assert!(wanted.is_empty() || wanted == (0..rows), "{wanted:?} of {rows} rows");
            continue;
        };
        shared += 1;
        let all = whole.to_vec::<f32>().unwrap();
        let part = &all[wanted.start * columns..wanted.end * columns];
        assert_eq!(folded.to_vec::<f32>().unwrap(), part);
        let at = folded.raw().unwrap().as_ptr() as usize - whole.raw().unwrap().as_ptr() as usize;
        assert_eq!(at, wanted.start * columns * 4, "the same memory");
    }
    assert!(shared > 100, "{shared} shared");
}

#[test]
fn consecutive_rows_are_gathered_without_a_copy_and_others_are_not() {
    let gathered = |rows: &[i64]| {
        let mut b = Builder::default();
        let table = b.weight(&[6, 3]);
        let rows = b.ints(rows);
        let y = b.node(Op::Gather { axis: 0 }, &[table, rows]);
        let mut graph = b.output(y);
        let whole = graph.constant(table).cloned().unwrap().to_vec::<f32>().unwrap();
        (folded_rows(&mut graph, y).map(|rows| rows.to_vec::<f32>().unwrap()), whole)
    };
    let (rows, whole) = gathered(&[2, 3, 4]);
    assert_eq!(rows.unwrap(), whole[6..15]);
    for other in [&[0, 2][..], &[3, 2], &[-1, 0], &[5, 6], &[4, 4]] {
        assert_eq!(gathered(other).0, None, "{other:?}");
    }
}

/// Every pass in every round, until a round rewrites nothing.
fn without_shortcuts(graph: &mut Graph) {
    let mut budget = fold::FoldBudget::new(graph);
    for _ in 0..MAX_ROUNDS {
        let mut rewrites = fold::run(graph, None, &mut budget) + control::run(graph, None);
        rewrites += PASSES.iter().map(|pass| (pass.run)(graph).rewrites).sum::<usize>();
        if rewrites + dead::run(graph) == 0 {
            break;
        }
    }
}

/// Operators that passes look for, on matrices of one size, in any order.
fn any_graph(seed: u64) -> Graph {
    let mut draws = noise(seed, 256).into_iter();
    let mut below = |bound: usize| ((draws.next().unwrap() + 1.0) / 2.0 * bound as f32) as usize;
    let mut b = Builder::default();
    let mut values = vec![b.input("x", &[SymDim::symbol("n"), 4.into(), 4.into()])];
    for _ in 0..4 + below(16) {
        let (x, y) = (values[below(values.len())], values[below(values.len())]);
        let number = [0.0, 1.0, 0.5, -2.0][below(4)];
        values.push(match below(10) {
            0 => b.node(Op::MatMul(MatMul::default()), &[x, y]),
            1 => {
                let weight = b.weight(&[4, 4]);
                b.node(Op::MatMul(MatMul::default()), &[x, weight])
            }
            2 => b.node(Op::Transpose { perm: Some(vec![0, 2, 1]) }, &[x]),
            3 => {
                let number = b.number(number);
                b.node(binary(Binary::Mul), &[x, number])
            }
            4 => {
                let number = b.number(number);
                b.node(binary(Binary::Add), &[x, number])
            }
            5 => b.node(binary(Binary::Add), &[x, y]),
            6 => b.node(Op::Unary(Unary::Sigmoid), &[x]),
            7 => {
                let flat = b.ints(&[-1, 16]);
                let flat = b.node(Op::Reshape { allow_zero: false }, &[x, flat]);
                let shape = b.node(Op::Shape { start: 0, end: None }, &[y]);
                b.node(Op::Reshape { allow_zero: false }, &[flat, shape])
            }
            8 => {
                let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
                b.node(Op::Softmax(softmax), &[x])
            }
            _ => b.node(Op::Transpose { perm: None }, &[x]),
        });
        // Only matrices of the one size go on.
        let last = *values.last().unwrap();
        let sizes: Vec<SymDim> = vec![SymDim::symbol("n"), 4.into(), 4.into()];
        if b.graph.shape(last) != Some(&sizes[..]) {
            values.pop();
        }
    }
    let last = *values.last().unwrap();
    b.output(last)
}

#[test]
fn passes_that_are_left_out_would_have_done_nothing() {
    let mut rewritten = 0;
    for seed in 1..300 {
        let graph = any_graph(seed);
        for sizes in [&[][..], &[("n", 1)], &[("n", 4)]] {
            let mut graph = crate::bind(&graph, sizes).unwrap();
            let mut plain = graph.clone();
            without_shortcuts(&mut plain);
            rewritten += usize::from(optimize(&mut graph, None).total() > 0);
            assert_eq!(graph.to_string(), plain.to_string());
        }
    }
    assert!(rewritten > 500, "{rewritten} rewritten");
}
