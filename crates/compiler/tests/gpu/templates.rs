//! What a template makes of a plan for sizes is what lowering the plan from the beginning makes of
//! it, step by step, whichever sizes came before.

use std::collections::HashMap;
use std::sync::Arc;

use base::Random;
use compiler::gpu::template::PlanTemplate;
use compiler::gpu::{GpuCompiler, SharedEvaluator};
use device::{DeviceError, KernelCompiler, LaunchChoices};
use graph::SymDim;
use model::gpu::{GpuPlan, GpuTarget, Precision};
use model::op::{Binary, Cast, Compare, MatMul, Op, Softmax, SoftmaxKind, Unary};
use model::{DataType, Dim, LaunchPlan, Tensor, ValueId};

use super::sections::weight;
use super::shapes::{Builder, CpuEvaluator};
use super::{layouts, models, sections, shapes};

type Lowered = Result<GpuPlan, Vec<DeviceError>>;

fn target(precision: Precision) -> GpuTarget {
    GpuTarget { capability: 90, multiprocessors: 132, precision }
}

/// Sizes of all symbols of `plan`'s inputs; the symbols `ones` are one.
fn draw(
    plan: &LaunchPlan,
    (most, ones): (u64, &[&str]),
    random: &mut Random,
) -> Vec<(String, usize)> {
    let mut sizes: Vec<(String, usize)> = Vec::new();
    for dim in plan.inputs.iter().filter_map(|id| plan.value(*id).shape.as_ref()).flatten() {
        if let Dim::Symbol(name) = dim
            && !sizes.iter().any(|(known, _)| known == name)
        {
            let most = if ones.contains(&name.as_str()) { 1 } else { most };
            sizes.push((name.clone(), 1 + random.below(most) as usize));
        }
    }
    sizes
}

/// Every field as text; and what packs the weights, once for each key.
fn check_equal(
    what: &str,
    made: &Lowered,
    wanted: &Lowered,
    packed: &mut HashMap<String, Vec<u8>>,
) {
    assert_eq!(format!("{made:#?}"), format!("{wanted:#?}"), "{what}");
    let (Ok(made), Ok(wanted)) = (made, wanted) else { return };
    for (made, wanted) in made.weights.iter().zip(&wanted.weights) {
        let first = packed.entry(made.key.0.clone()).or_insert_with(|| (wanted.pack.0)());
        assert_eq!((made.pack.0)(), *first, "{what}: {:?}", made.key);
    }
}

/// Returns how many of the sizes have a plan.
fn check(
    name: &str,
    plan: &LaunchPlan,
    most: (u64, &[&str]),
    count: usize,
    precision: Precision,
) -> usize {
    let evaluator: SharedEvaluator = Arc::new(CpuEvaluator);
    let compiler = GpuCompiler::new(Some(evaluator.clone()));
    let target = target(precision);
    let template = compiler.template(plan, &target).expect("a sound plan");
    let mut random = Random::new(plan.steps.len() as u64);
    let (mut packed, mut made_plans) = (HashMap::new(), 0);
    for number in 0..count {
        let sizes = draw(plan, most, &mut random);
        let choices = [LaunchChoices::Fastest, LaunchChoices::All][usize::from(number % 4 == 3)];
        let made = template.lower_with(&sizes, choices);
        let fresh = PlanTemplate::new(plan, &target, Some(evaluator.clone())).expect("sound");
        let wanted = fresh.lower_step_by_step(&sizes, choices);
        let what = format!("{name} {sizes:?} {choices:?} {precision:?}");
        check_equal(&what, &made, &wanted, &mut packed);
        check_equal(
            &what,
            &made,
            &compiler.lower_with(plan, &sizes, &target, choices),
            &mut packed,
        );
        made_plans += usize::from(made.is_ok());
    }
    made_plans
}

#[test]
fn images_text_and_recurrent_layers_are_lowered_as_from_the_beginning() {
    let networks: [(&str, LaunchPlan, u64); 10] = [
        ("dense", models::dense(), 40),
        ("stages", models::stages(), 40),
        ("odd", models::odd(), 40),
        ("encoder", models::encoder(), 40),
        ("hard", models::hard(), 40),
        ("transformer", layouts::transformer(), 40),
        ("image", layouts::image(), 40),
        ("heads", layouts::two_heads(), 40),
        ("expressions", layouts::expressions(), 40),
        ("recurrent", sections::recurrent(), 60),
    ];
    for (name, plan, most) in networks {
        for precision in [Precision::F16, Precision::F32] {
            assert!(check(name, &plan, (most, &[]), 8, precision) > 0, "{name} has no plan at all");
        }
    }
}

/// Steps that run on the host make the same refusals, sizes that depend on data too.
#[test]
fn refusals_are_those_of_lowering_from_the_beginning() {
    assert_eq!(check("chosen rows", &sections::chosen_rows(), (50, &[]), 8, Precision::F16), 0);
}

#[test]
fn arithmetic_on_shapes_is_done_again_for_every_size() {
    assert!(check("windows", &shapes::shifted_windows(), (70, &["n"]), 24, Precision::F16) > 9);
}

/// A mask of positions and lengths, as exporters write it: `Range`, `Shape`, comparisons.
fn mask(b: &mut Builder, x: ValueId) -> ValueId {
    let tokens = b.size(x, 1);
    let axis = b.ints(&[0]);
    let scalar = b.node(Op::Squeeze, &[tokens, axis]);
    let zero = b.graph.add_constant("0", Tensor::from_vec(vec![], vec![0i64]).unwrap());
    let one = b.graph.add_constant("1", Tensor::from_vec(vec![], vec![1i64]).unwrap());
    let positions = b.node(Op::Range, &[zero, scalar, one]);
    let row = b.node(Op::Unsqueeze, &[positions, axis]);
    let second = b.ints(&[1]);
    let column = b.node(Op::Unsqueeze, &[positions, second]);
    let visible = b.node(Op::Compare(Compare::LessOrEqual), &[row, column]);
    let numbers = b.node(Op::Cast(Cast { to: DataType::F32 }), &[visible]);
    let far = b.number(-10_000.0);
    let full = b.number(1.0);
    let hidden = b.node(Op::Binary(Binary::Sub), &[full, numbers]);
    b.node(Op::Binary(Binary::Mul), &[hidden, far])
}

/// Equal and different layers of products, attention, normalisations and expressions in any order,
/// with sizes taken from shapes.
fn random_text(seed: u64) -> LaunchPlan {
    let (mut b, mut random) = (Builder::default(), Random::new(seed));
    let width = 32;
    let x = b.input(&[SymDim::symbol("n"), SymDim::symbol("t"), width.into()]);
    let table = weight(&mut b, &mut random, &[64, width]);
    let (zero, first) = (b.ints(&[0]), b.ints(&[0]));
    let tokens = b.size(x, 1);
    let rows = b.node(Op::Slice, &[table, zero, tokens, first]);
    let mut y = b.node(Op::Binary(Binary::Add), &[x, rows]);
    let shared = weight(&mut b, &mut random, &[width, width]);
    for _ in 0..2 + random.below(5) {
        y = match random.below(6) {
            0 => attention(&mut b, &mut random, y, width),
            1 => {
                let own = weight(&mut b, &mut random, &[width, width]);
                b.node(Op::MatMul(MatMul::default()), &[y, own])
            }
            2 => b.node(Op::MatMul(MatMul::default()), &[y, shared]),
            3 => {
                let scale = weight(&mut b, &mut random, &[width]);
                let shift = weight(&mut b, &mut random, &[width]);
                b.node(Op::LayerNorm { axis: -1, epsilon: 1e-5 }, &[y, scale, shift])
            }
            4 => {
                let flat = b.ints(&[-1, width as i64]);
                let rows = b.reshape(y, flat);
                let rows = b.node(Op::Unary(Unary::Tanh), &[rows]);
                let shape = b.node(Op::Shape { start: 0, end: None }, &[y]);
                b.reshape(rows, shape)
            }
            _ => {
                let number = b.number(random.symmetric_f32());
                let twice = b.node(Op::Binary(Binary::Mul), &[y, number]);
                b.node(Op::Binary(Binary::Add), &[twice, x])
            }
        };
    }
    b.finish(&[y])
}

fn attention(b: &mut Builder, random: &mut Random, x: ValueId, width: usize) -> ValueId {
    let [q, k, v] = [(); 3].map(|()| {
        let own = weight(b, random, &[width, width]);
        let y = b.node(Op::MatMul(MatMul::default()), &[x, own]);
        let heads = b.ints(&[0, 0, 4, width as i64 / 4]);
        let y = b.reshape(y, heads);
        b.node(Op::Transpose { perm: Some(vec![0, 2, 1, 3]) }, &[y])
    });
    let k = b.node(Op::Transpose { perm: Some(vec![0, 1, 3, 2]) }, &[k]);
    let scores = b.node(Op::MatMul(MatMul::default()), &[q, k]);
    let hidden = mask(b, x);
    let scores = b.node(Op::Binary(Binary::Add), &[scores, hidden]);
    let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
    let weights = b.node(Op::Softmax(softmax), &[scores]);
    let y = b.node(Op::MatMul(MatMul::default()), &[weights, v]);
    let y = b.node(Op::Transpose { perm: Some(vec![0, 2, 1, 3]) }, &[y]);
    let rows = b.ints(&[0, 0, width as i64]);
    let y = b.reshape(y, rows);
    b.node(Op::Binary(Binary::Add), &[y, x])
}

#[test]
fn random_networks_are_lowered_as_from_the_beginning() {
    for seed in 0..12 {
        let plan = random_text(seed);
        let made = check(&format!("seed {seed}"), &plan, (60, &[]), 6, Precision::F16);
        assert!(made > 0, "seed {seed} has no plan at all");
    }
}
