//! Plans that keep rows independent, and plans that do not.

use super::*;
use crate::dim::SymDim;
use crate::op::{
    Activation, Binary, Conv, MatMul, Padding, Reduce, ReduceKind, Softmax, SoftmaxKind, Unary,
    Window,
};
use crate::{DataType, Tensor, ValueInfo};

/// Dimensions as text: `n,3,?`.
fn shape(text: &str) -> Option<Vec<Dim>> {
    let dim = |text: &str| Dim::from(&SymDim::parse(text).unwrap());
    Some(text.split(',').map(dim).collect())
}

#[derive(Default)]
pub(super) struct PlanBuilder(pub(super) LaunchPlan);

impl PlanBuilder {
    pub(super) fn value(&mut self, dims: &str) -> ValueId {
        let (name, dtype) = (format!("v{}", self.0.values.len()), DataType::F32);
        self.0.values.push(ValueInfo { name, dtype, shape: shape(dims) });
        ValueId(self.0.values.len() as u32 - 1)
    }

    pub(super) fn input(&mut self, dims: &str) -> ValueId {
        let id = self.value(dims);
        self.0.inputs.push(id);
        id
    }

    pub(super) fn constant(&mut self, dims: &str, numbers: Vec<i64>) -> ValueId {
        let id = self.value(dims);
        let tensor = Tensor::from_vec(vec![numbers.len()], numbers).expect("a vector");
        self.0.constants.push((id, tensor));
        id
    }

    pub(super) fn step(&mut self, op: Op, inputs: &[ValueId], dims: &str) -> ValueId {
        let output = self.value(dims);
        let inputs = inputs.iter().copied().map(Some).collect();
        let name = op.name().to_lowercase();
        self.0.steps.push(Step {
            name,
            op,
            inputs,
            outputs: vec![Some(output)],
            last_uses: vec![],
        });
        output
    }

    /// The step that mixes rows, by its name.
    pub(super) fn mixes(mut self, output: ValueId) -> Option<String> {
        self.0.outputs = vec![output];
        mixing_step(&self.0, "n").map(|step| step.name.clone())
    }
}

fn after(op: Op, dims: &str, out: &str) -> Option<String> {
    let mut maker = PlanBuilder::default();
    let x = maker.input(dims);
    let y = maker.step(op, &[x], out);
    maker.mixes(y)
}

fn softmax(axis: i64) -> Op {
    Op::Softmax(Softmax { kind: SoftmaxKind::Softmax, axis, flatten: false })
}

#[test]
fn batch_symbol_is_the_first_dimension_everywhere_and_no_other() {
    let symbol = |input: &str, output: &str| {
        let mut maker = PlanBuilder::default();
        let x = maker.input(input);
        let y = maker.step(Op::Unary(Unary::Abs), &[x], output);
        maker.0.outputs = vec![y];
        batch_symbol(&maker.0).map(str::to_string)
    };
    assert_eq!(symbol("n,3", "n,3"), Some("n".to_string()));
    assert_eq!(symbol("n,3", "m,3"), None);
    assert_eq!(symbol("n,3", "3,n"), None);
    assert_eq!(symbol("n,n", "n"), None);
    assert_eq!(symbol("n,3", "n,2*n"), None);
    assert_eq!(symbol("1,3", "1,3"), None);
}

/// The size of dimension `axis` of `x`, as a list of one.
fn size_of(maker: &mut PlanBuilder, x: ValueId, axis: i64, rank: usize) -> ValueId {
    let all = maker.step(Op::Shape { start: 0, end: None }, &[x], &rank.to_string());
    let at = maker.constant("1", vec![axis]);
    maker.step(Op::Gather { axis: 0 }, &[all, at], "1")
}

#[test]
fn positions_up_to_the_length_keep_rows_independent() {
    for (axis, mixed) in [(1, None), (0, Some("slice"))] {
        let mut maker = PlanBuilder::default();
        let x = maker.input("n,t,8");
        let length = size_of(&mut maker, x, axis, 3);
        let table = maker.constant("1,512,8", vec![0]);
        let (start, along) = (maker.constant("1", vec![0]), maker.constant("1", vec![1]));
        let rows = maker.step(Op::Slice, &[table, start, length, along], "1,t,8");
        let y = maker.step(Op::Binary(Binary::Add), &[x, rows], "n,t,8");
        // Positions up to the number of rows depend on it.
        let got = maker.mixes(y);
        assert_eq!(got.is_none(), mixed.is_none(), "{got:?}");
    }
}

#[test]
fn ranges_over_the_length_are_free() {
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,t");
    let length = size_of(&mut maker, x, 1, 2);
    let (zero, one) = (maker.constant("1", vec![0]), maker.constant("1", vec![1]));
    let range = maker.step(Op::Range, &[zero, length, one], "t");
    let y = maker.step(Op::Binary(Binary::Add), &[x, range], "n,t");
    assert_eq!(maker.mixes(y), None);
}

#[test]
fn images_resized_to_other_images_keep_rows_independent() {
    use crate::op::{AspectPolicy, CoordinateMode, NearestMode, Resize, ResizeMode};
    let resize = Op::Resize(Resize {
        mode: ResizeMode::Linear,
        coordinates: CoordinateMode::HalfPixel,
        nearest: NearestMode::Floor,
        cubic_coefficient: -0.75,
        exclude_outside: false,
        extrapolation_value: 0.0,
        antialias: false,
        axes: None,
        keep_aspect: AspectPolicy::Stretch,
    });
    for (from, mixed) in [(2, false), (0, true)] {
        let mut maker = PlanBuilder::default();
        let x = maker.input("n,3,h,w");
        let all = maker.step(Op::Shape { start: 0, end: None }, &[x], "4");
        let (zero, two) = (maker.constant("1", vec![0]), maker.constant("1", vec![2]));
        let head = maker.step(Op::Slice, &[all, zero, two, zero], "2");
        let (start, end) = (maker.constant("1", vec![from]), maker.constant("1", vec![from + 2]));
        let tail = maker.step(Op::Slice, &[all, start, end, zero], "2");
        let sizes = maker.step(Op::Concat { axis: 0 }, &[head, tail], "4");
        let none = maker.constant("0", vec![]);
        let y = maker.step(resize.clone(), &[x, none, none, sizes], "n,3,?,?");
        assert_eq!(maker.mixes(y).is_some(), mixed);
    }
}

#[test]
fn recurrent_layers_keep_rows_beside_each_other() {
    use crate::op::{Rnn, RnnCell, RnnDirection};
    let layer = |maker: &mut PlanBuilder, x: ValueId, state: Option<ValueId>, out: &str| {
        let (w, r) = (maker.constant("1,16,8", vec![0]), maker.constant("1,16,4", vec![0]));
        let y = maker.step(
            Op::Rnn(Rnn {
                cell: RnnCell::Lstm { input_forget: false },
                direction: RnnDirection::Forward,
                hidden_size: 4,
                batch_first: false,
                clip: None,
                activations: vec![],
            }),
            &[x, w, r],
            out,
        );
        let step = maker.0.steps.last_mut().expect("a step");
        step.inputs.extend([None, None, state]);
        y
    };
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,t,8");
    let turned = maker.step(Op::Transpose { perm: Some(vec![1, 0, 2]) }, &[x], "t,n,8");
    let y = layer(&mut maker, turned, None, "t,1,n,4");
    let y = maker.step(Op::Transpose { perm: Some(vec![2, 0, 1, 3]) }, &[y], "n,t,1,4");
    assert_eq!(maker.mixes(y), None);
    // Time along the rows mixes them.
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,t,8");
    let y = layer(&mut maker, x, None, "n,1,t,4");
    assert_eq!(maker.mixes(y), Some("lstm".to_string()));
    // One state for all rows has no row of its own.
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,t,8");
    let turned = maker.step(Op::Transpose { perm: Some(vec![1, 0, 2]) }, &[x], "t,n,8");
    let state = maker.constant("1,1,4", vec![0]);
    let y = layer(&mut maker, turned, Some(state), "t,1,n,4");
    assert_eq!(maker.mixes(y), Some("lstm".to_string()));
}

#[test]
fn convolutional_networks_keep_rows_independent() {
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,3,8,8");
    let weight = maker.constant("4,3,3,3", vec![0]);
    let window = Window {
        kernel: vec![3; 2],
        strides: vec![1; 2],
        dilations: vec![],
        padding: Padding::Explicit(vec![1; 4]),
    };
    let conv = Conv { window, groups: 1, activation: Activation::None };
    let y = maker.step(Op::Conv(conv), &[x, weight], "n,4,8,8");
    let y = maker.step(Op::Flatten { axis: 1 }, &[y], "n,256");
    let weight = maker.constant("256,10", vec![0]);
    let y = maker.step(Op::MatMul(MatMul::default()), &[y, weight], "n,10");
    let bias = maker.constant("10", vec![0]);
    let y = maker.step(Op::Binary(Binary::Add), &[y, bias], "n,10");
    let y = maker.step(softmax(-1), &[y], "n,10");
    assert_eq!(maker.mixes(y), None);
}

#[test]
fn rows_may_be_merged_with_tokens_temporarily() {
    let mut maker = PlanBuilder::default();
    let ids = maker.input("n,tokens");
    let table = maker.constant("100,8", vec![0]);
    let x = maker.step(Op::Gather { axis: 0 }, &[table, ids], "n,tokens,8");
    let whole = maker.step(Op::Shape { start: 0, end: None }, &[x], "3");
    let flat = maker.constant("2", vec![-1, 8]);
    let y = maker.step(Op::Reshape { allow_zero: false }, &[x, flat], "n*tokens,8");
    let weight = maker.constant("8,8", vec![0]);
    let y = maker.step(Op::MatMul(MatMul::default()), &[y, weight], "n*tokens,8");
    let y = maker.step(Op::Reshape { allow_zero: false }, &[y, whole], "n,tokens,8");
    let y = maker.step(Op::Transpose { perm: Some(vec![0, 2, 1]) }, &[y], "n,8,tokens");
    assert_eq!(maker.mixes(y), None);
}

#[test]
fn steps_that_mix_rows_are_found() {
    assert_eq!(after(softmax(1), "n,5", "n,5"), None);
    assert_eq!(after(softmax(0), "n,5", "n,5").as_deref(), Some("softmax"));
    let perm = Op::Transpose { perm: Some(vec![1, 0]) };
    assert_eq!(after(perm, "n,5", "5,n").as_deref(), Some("transpose"), "rows must come out first");
    assert_eq!(after(Op::NonZero, "n,5", "2,?").as_deref(), Some("nonzero"));
    assert!(after(Op::DynamicQuantizeLinear, "n,5", "n,5").is_some());
    let reduce = |axes: Vec<i64>| {
        let mut maker = PlanBuilder::default();
        let x = maker.input("n,5,7");
        let axes = maker.constant("1", axes);
        let op = Reduce { kind: ReduceKind::Mean, keep_dims: false, noop_with_empty_axes: false };
        let mean = maker.step(Op::Reduce(op), &[x, axes], "n,5");
        maker.mixes(mean)
    };
    assert_eq!(reduce(vec![-1]), None);
    assert_eq!(reduce(vec![0]).as_deref(), Some("reducemean"));
}

#[test]
fn steps_that_depend_on_the_number_of_rows_are_found() {
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,5");
    let count = maker.step(Op::Size, &[x], "1");
    let y = maker.step(Op::Binary(Binary::Div), &[x, count], "n,5");
    assert_eq!(maker.mixes(y).as_deref(), Some("div"));
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,5");
    let weight = maker.constant("5,n", vec![0]);
    let product = maker.step(Op::MatMul(MatMul::default()), &[weight, x], "5,5");
    assert_eq!(maker.mixes(product).as_deref(), Some("matmul"));
}

/// Products of quantized rows with rows, as attention has them, and with a vector.
#[test]
fn products_of_rows_with_rows_keep_them_apart() {
    let quantized = |x: &str, other: &str, out: &str, of_rows: bool| {
        let mut maker = PlanBuilder::default();
        let x = maker.input(x);
        let b = if of_rows { maker.input(other) } else { maker.constant(other, vec![0]) };
        let [a, c, d, e, f, g] = std::array::from_fn(|_| maker.constant("1", vec![1]));
        let y = maker.step(Op::QLinearMatMul, &[x, a, c, b, d, e, f, g], out);
        maker.mixes(y)
    };
    assert_eq!(quantized("n,4,t,8", "n,4,8,t", "n,4,t,t", true), None);
    assert_eq!(quantized("n,5", "5,3", "n,3", false), None);
    assert_eq!(quantized("n,4,8", "1,8,3", "n,4,3", false), None);
    // Matrices of other numbers than rows.
    assert!(quantized("n,4,8", "7,8,3", "7,4,3", false).is_some());
    // Rows are summed over.
    assert!(quantized("n,5", "5,n", "n,n", true).is_some());
    let vector = |x: &str, out: &str| {
        let mut maker = PlanBuilder::default();
        let x = maker.input(x);
        let b = maker.constant("5", vec![0]);
        let y = maker.step(Op::MatMul(MatMul::default()), &[x, b], out);
        maker.mixes(y)
    };
    assert_eq!(vector("n,5", "n"), None);
    assert_eq!(vector("n,4,5", "n,4"), None);
    assert!(vector("n", "1").is_some());
}

/// The mixing step of a plan with one input and one step, whose further operands are constants.
fn with_constants(op: Op, dims: &str, constants: &[(&str, Vec<i64>)], out: &str) -> Option<String> {
    let mut maker = PlanBuilder::default();
    let mut operands = vec![maker.input(dims)];
    for (dims, numbers) in constants {
        operands.push(maker.constant(dims, numbers.clone()));
    }
    let y = maker.step(op, &operands, out);
    maker.mixes(y)
}

#[test]
fn a_number_of_rows_that_is_repeated_still_depends_on_them() {
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,5");
    let count = maker.step(Op::Size, &[x], "1");
    let whole = maker.step(Op::Shape { start: 0, end: None }, &[x], "2");
    let wide = maker.step(Op::Expand, &[count, whole], "n,5");
    let y = maker.step(Op::Binary(Binary::Div), &[x, wide], "n,5");
    assert_eq!(maker.mixes(y).as_deref(), Some("expand"));
}

#[test]
fn rows_that_are_merged_in_pairs_are_found() {
    for (dims, mixed) in [("n/2,8", true), ("2*n,2", false)] {
        let mut maker = PlanBuilder::default();
        let x = maker.input("n,4");
        let target = maker.constant("2", vec![-1, 8]);
        let y = maker.step(Op::Reshape { allow_zero: false }, &[x, target], dims);
        let y = maker.step(softmax(1), &[y], dims);
        let target = maker.constant("2", vec![-1, 4]);
        let y = maker.step(Op::Reshape { allow_zero: false }, &[y, target], "n,4");
        assert_eq!(maker.mixes(y).is_some(), mixed, "{dims}");
    }
}

#[test]
fn repeated_constants_are_the_same_for_all_rows() {
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,t,8");
    let rows = size_of(&mut maker, x, 0, 3);
    let ones = maker.constant("2", vec![1, 1]);
    let repeats = maker.step(Op::Concat { axis: 0 }, &[rows, ones], "3");
    let token = maker.constant("1,1,8", vec![0]);
    let tokens = maker.step(Op::Tile, &[token, repeats], "n,1,8");
    let y = maker.step(Op::Concat { axis: 1 }, &[tokens, x], "n,t+1,8");
    assert_eq!(maker.mixes(y), None);
}

#[test]
fn operators_along_other_dimensions_keep_rows_independent() {
    let sum = || Op::CumSum { exclusive: false, reverse: false };
    let is_mixed = |op: Op, dims: &str, constants: &[(&str, Vec<i64>)], out: &str| {
        with_constants(op, dims, constants, out).is_some()
    };
    assert!(!is_mixed(sum(), "n,5", &[("1", vec![1])], "n,5"));
    assert!(is_mixed(sum(), "n,5", &[("1", vec![0])], "n,5"));
    assert!(!is_mixed(Op::Tile, "n,5", &[("2", vec![1, 2])], "n,10"));
    assert!(is_mixed(Op::Tile, "n,5", &[("2", vec![2, 1])], "2*n,5"));
    let one_hot = |axis| Op::OneHot { axis };
    let (depth, values) = (("1", vec![3]), ("2", vec![0, 1]));
    assert!(!is_mixed(one_hot(-1), "n,5", &[depth.clone(), values.clone()], "n,5,3"));
    assert!(is_mixed(one_hot(0), "n,5", &[depth, values], "3,n,5"), "rows must come out first");
    assert!(!is_mixed(Op::Trilu { upper: true }, "n,5,5", &[], "n,5,5"));
    assert!(is_mixed(Op::Trilu { upper: true }, "n,5", &[], "n,5"));
}

#[test]
fn elements_are_gathered_within_rows_only() {
    let gathered = |axis: i64, indices: &str| {
        let mut maker = PlanBuilder::default();
        let (x, at) = (maker.input("n,5"), maker.input(indices));
        let y = maker.step(Op::GatherElements { axis }, &[x, at], indices);
        maker.mixes(y)
    };
    assert_eq!(gathered(1, "n,2"), None);
    assert_eq!(gathered(0, "n,2").as_deref(), Some("gatherelements"));
    // Two rows of indices for each row: they reach into the rows of others.
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,5");
    let target = maker.constant("2", vec![-1, 1]);
    let flat = maker.step(Op::Reshape { allow_zero: false }, &[x, target], "5*n,1");
    let y = maker.step(Op::GatherElements { axis: 1 }, &[flat, x], "n,5");
    assert_eq!(maker.mixes(y).as_deref(), Some("gatherelements"));
}

#[test]
fn records_are_classified_one_by_one() {
    use crate::op::{PostTransform, Tokenize};
    let transform = || Op::Ml(Ml::PostTransform(PostTransform::Softmax));
    assert_eq!(after(transform(), "n,5", "n,5"), None);
    // A list is one record.
    assert!(after(transform(), "n", "n").is_some());
    let labels = [("3", vec![0]), ("3", vec![0]), ("1", vec![0])];
    assert_eq!(with_constants(Op::Ml(Ml::MapLabels), "n,2", &labels, "n,2"), None);
    // Tokens are padded to the longest text of the batch.
    let tokenize = Op::Text(Text::Tokenize(Tokenize {
        mark: false,
        pad: String::new(),
        separators: vec![" ".to_string()],
        expression: None,
        min_chars: 1,
    }));
    assert!(after(tokenize, "n,1", "n,1,?").is_some());
}

#[test]
fn spectra_are_computed_row_by_row() {
    let dft = |axis| Op::Signal(Signal::Dft { inverse: false, onesided: false, axis });
    assert_eq!(after(dft(1), "n,16,1", "n,16,2"), None);
    assert!(after(dft(0), "n,16,1", "n,16,2").is_some());
}

#[test]
fn rows_between_other_dimensions_survive_a_reshape() {
    let reshaped = |dims: &str, perm: Option<Vec<usize>>, turned: &str, out: &str| {
        let mut maker = PlanBuilder::default();
        let x = maker.input(dims);
        let back = perm.clone();
        let y = maker.step(Op::Transpose { perm }, &[x], turned);
        let target = maker.constant("3", vec![0, 0, -1]);
        let y = maker.step(Op::Reshape { allow_zero: false }, &[y, target], out);
        let perm = back.map(|_| vec![1, 0, 2]);
        let y = maker.step(Op::Transpose { perm }, &[y], "n,t,8");
        maker.mixes(y)
    };
    // What a recurrent layer gives in two directions.
    assert_eq!(reshaped("n,t,2,4", Some(vec![1, 0, 2, 3]), "t,n,2,4", "t,n,8"), None);
    // The time of a row is torn apart.
    let torn = reshaped("n,t,2,4", Some(vec![1, 0, 2, 3]), "t,n,2,4", "n,t,8");
    assert_eq!(torn.as_deref(), Some("reshape"));
    let flat = |first: &str, axis: &str| {
        let mut maker = PlanBuilder::default();
        let x = maker.input("n,6,4");
        let target = maker.constant("3", vec![0, 0, 0]);
        let y = maker.step(Op::Reshape { allow_zero: false }, &[x, target], first);
        let y = maker.step(Op::Reshape { allow_zero: false }, &[y, target], axis);
        maker.mixes(y)
    };
    assert_eq!(flat("1,6*n,4", "n,24"), None);
    assert_eq!(flat("2,3*n,4", "n,24").as_deref(), Some("reshape"));
}

#[test]
fn lengths_that_nobody_knows_do_not_depend_on_rows() {
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,t");
    let one = maker.constant("1", vec![1]);
    let y = maker.step(Op::Unsqueeze, &[x, one], "n,1,?");
    let length = size_of(&mut maker, y, 2, 3);
    let zero = maker.constant("1", vec![0]);
    let range = maker.step(Op::Range, &[zero, length, one], "?");
    let y = maker.step(Op::Binary(Binary::Add), &[y, range], "n,1,?");
    let y = maker.step(Op::Squeeze, &[y, one], "n,?");
    assert_eq!(maker.mixes(y), None);
    // Nor may rows disappear with dimensions of one.
    assert!(with_constants(Op::Squeeze, "n,1", &[("1", vec![0])], "1").is_some());
    // Of the number of rows alone nobody knows which sizes follow it.
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,5");
    let count = maker.step(Op::Size, &[x], "1");
    let table = maker.constant("9", vec![0]);
    let (zero, one) = (maker.constant("1", vec![0]), maker.constant("1", vec![1]));
    let cut = maker.step(Op::Slice, &[table, zero, count], "?");
    let length = maker.step(Op::Shape { start: 0, end: None }, &[cut], "1");
    let range = maker.step(Op::Range, &[zero, length, one], "?");
    let y = maker.step(Op::Binary(Binary::Add), &[x, range], "n,5");
    assert!(maker.mixes(y).is_some());
}

#[test]
fn slices_of_all_rows_keep_them() {
    let cut = |starts: Vec<i64>, steps: Vec<i64>, out: &str| {
        let both = || ("2", vec![0, 1]);
        let constants = [("2", starts), ("2", vec![i64::MAX, 4]), both(), ("2", steps)];
        with_constants(Op::Slice, "n,5", &constants, out)
    };
    assert_eq!(cut(vec![0, 0], vec![1, 1], "n,4"), None);
    assert_eq!(cut(vec![1, 0], vec![1, 1], "n-1,4").as_deref(), Some("slice"));
    assert_eq!(cut(vec![0, 0], vec![-1, 1], "n,4").as_deref(), Some("slice"), "backwards");
}

#[test]
fn updates_land_in_their_own_rows_only() {
    let scattered = |axis: i64| {
        let mut maker = PlanBuilder::default();
        let (x, at, with) = (maker.input("n,5"), maker.input("n,2"), maker.input("n,2"));
        let op = Op::ScatterElements { axis, reduction: crate::op::ScatterReduction::None };
        let y = maker.step(op, &[x, at, with], "n,5");
        maker.mixes(y)
    };
    assert_eq!(scattered(1), None);
    assert_eq!(scattered(0).as_deref(), Some("scatterelements"));
}

#[test]
fn rows_as_channels_are_normalized_one_by_one() {
    let normalized = |own: bool| {
        let mut maker = PlanBuilder::default();
        let x = maker.input("n,6");
        let rows = size_of(&mut maker, x, 0, 2);
        let one = maker.constant("1", vec![1]);
        let ones = maker.step(Op::Expand, &[one, rows], "n");
        let other = maker.constant("n", vec![1]);
        let target = maker.constant("3", vec![1, -1, 6]);
        let y = maker.step(Op::Reshape { allow_zero: false }, &[x, target], "1,n,6");
        let scale = if own { ones } else { other };
        let op = Op::BatchNorm { epsilon: 1e-5 };
        let y = maker.step(op, &[y, scale, ones, ones, ones], "1,n,6");
        let target = maker.constant("2", vec![-1, 6]);
        let y = maker.step(Op::Reshape { allow_zero: false }, &[y, target], "n,6");
        maker.mixes(y)
    };
    assert_eq!(normalized(true), None);
    assert_eq!(normalized(false).as_deref(), Some("batchnorm"));
}
