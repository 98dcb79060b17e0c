use base::Random;
use model::op::{Op, TreeAggregate, TreeMode, Trees};

use super::super::testing::*;
use super::*;
use crate::evaluate;
use model::Tensor;

/// A random tree as rows of a plan; returns the root. Leaves are numbered from `-1` down.
fn grow(
    random: &mut Random,
    depth: usize,
    features: usize,
    nodes: &mut Vec<[i64; 7]>,
    thresholds: &mut Vec<f32>,
    leaves: &mut i64,
) -> i64 {
    if depth == 0 || random.below(6) == 0 {
        *leaves += 1;
        return -*leaves;
    }
    let at = nodes.len();
    let mode = random.below(6) as i64;
    let flags = [random.below(features as u64) as i64, mode, 0, 0, random.below(2) as i64, 0, 0];
    nodes.push(flags);
    thresholds.push((random.symmetric_f32() * 4.0).round());
    for side in [2, 3] {
        let child = grow(random, depth - 1, features, nodes, thresholds, leaves);
        nodes[at][side] = child;
    }
    at as i64
}

fn slow(row: &[f32], nodes: &[[i64; 7]], thresholds: &[f32], root: i64) -> usize {
    let mut at = root;
    while at >= 0 {
        let [feature, mode, yes, no, missing, ..] = nodes[at as usize];
        let (x, t) = (row[feature as usize], thresholds[at as usize]);
        let taken = match TreeMode::ALL[mode as usize] {
            _ if x.is_nan() => missing != 0,
            TreeMode::LessOrEqual => x <= t,
            TreeMode::Less => x < t,
            TreeMode::GreaterOrEqual => x >= t,
            TreeMode::Greater => x > t,
            TreeMode::Equal => x == t,
            _ => x != t,
        };
        at = if taken { yes } else { no };
    }
    (-1 - at) as usize
}

#[test]
fn trees_agree_with_a_slow_reference() {
    let mut random = Random::new(21);
    for case in 0..60 {
        let (features, targets) = (1 + random.below(5) as usize, 1 + random.below(3) as usize);
        let (mut nodes, mut thresholds, mut leaves) = (Vec::new(), Vec::new(), 0);
        let trees = 1 + random.below(20);
        let roots: Vec<i64> = (0..trees)
            .map(|_| grow(&mut random, 5, features, &mut nodes, &mut thresholds, &mut leaves))
            .collect();
        let target: Vec<i64> = (0..leaves).map(|_| random.below(targets as u64) as i64).collect();
        let weights: Vec<f32> = (0..leaves).map(|_| random.symmetric_f32()).collect();
        let entries: Vec<i64> = (0..leaves).flat_map(|leaf| [leaf, 1]).collect();
        let rows = [1, 3, 8, 21, 300][case % 5];
        let x: Vec<f32> = (0..rows * features)
            .map(|_| match random.below(12) {
                0 => f32::NAN,
                _ => (random.symmetric_f32() * 4.0).round(),
            })
            .collect();
        let flat: Vec<i64> = nodes.iter().flatten().copied().collect();
        let inputs = [
            floats(&[rows, features], &x),
            integers(&[nodes.len(), 7], &flat),
            floats(&[thresholds.len()], &thresholds),
            integers(&[leaves as usize, 2], &entries),
            integers(&[target.len()], &target),
            floats(&[weights.len()], &weights),
            integers(&[roots.len()], &roots),
        ];
        let op = Trees { targets, aggregate: TreeAggregate::Sum };
        let inputs: Vec<Option<Tensor>> = inputs.into_iter().map(Some).collect();
        let got = evaluate(&Op::Ml(Ml::Trees(op)), &inputs, 1).unwrap().remove(0);
        let got: Vec<f32> = values(&got);
        for (row, got) in x.chunks(features).zip(got.chunks(targets)) {
            let mut want = vec![0f64; targets];
            for root in &roots {
                let leaf = slow(row, &nodes, &thresholds, *root);
                want[target[leaf] as usize] += f64::from(weights[leaf]);
            }
            let close = got.iter().zip(&want).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-4);
            assert!(close, "case {case}: {got:?} {want:?}");
        }
    }
}

/// The error of a plan with one tree of these nodes.
fn refused(nodes: &[[i64; 7]], root: i64) -> String {
    let flat: Vec<i64> = nodes.iter().flatten().copied().collect();
    let inputs = [
        floats(&[1, 1], &[0.0]),
        integers(&[nodes.len(), 7], &flat),
        floats(&[nodes.len()], &vec![0.0; nodes.len()]),
        integers(&[1, 2], &[0, 1]),
        integers(&[1], &[0]),
        floats(&[1], &[1.0]),
        integers(&[1], &[root]),
    ];
    let values: Vec<Option<Value>> =
        inputs.iter().map(|tensor| Some(Value::from_host(tensor).unwrap())).collect();
    let op = Op::Ml(Ml::Trees(Trees { targets: 1, aggregate: TreeAggregate::Sum }));
    let info = |tensor: &Tensor| model::ValueInfo {
        name: String::new(),
        dtype: tensor.dtype(),
        shape: None,
    };
    let step = model::Step {
        name: "trees".to_string(),
        op: op.clone(),
        inputs: (0..7).map(|id| Some(model::ValueId(id))).collect(),
        outputs: vec![],
        last_uses: vec![],
    };
    let plan = model::LaunchPlan {
        values: inputs.iter().map(info).collect(),
        ..model::LaunchPlan::default()
    };
    let facts = StepFacts { plan: &plan, step: &step, constants: &values };
    let Op::Ml(ml) = op else { return String::new() };
    build(&facts, ml).err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn hostile_trees_are_refused() {
    let node = |yes: i64, no: i64| [0, 0, yes, no, 0, 0, 0];
    assert!(refused(&[node(0, -1)], 0).contains("twice"));
    assert!(refused(&[node(1, -1), node(0, -1)], 0).contains("twice"));
    assert!(refused(&[node(7, -1)], 0).contains("no node"));
    assert!(refused(&[node(-1, -5)], 0).contains("no leaf"));
    assert!(refused(&[node(-1, i64::MIN)], 0).contains("no leaf"));
    assert!(refused(&[[-3, 0, -1, -1, 0, 0, 0]], 0).contains("feature"));
    assert!(refused(&[[0, 99, -1, -1, 0, 0, 0]], 0).contains("mode"));
    let deep: Vec<[i64; 7]> = (0..1_000_000).map(|at| node(at + 1, -1)).collect();
    let text = refused(&deep[..], 0);
    assert!(text.contains("deeper"), "{text}");
}

#[test]
fn labels_are_looked_up() {
    let inputs = [
        strings(&[3], &["b", "x", "a"]),
        strings(&[2], &["a", "b"]),
        integers(&[2], &[10, 20]),
        integers(&[], &[-1]),
    ];
    assert_eq!(values::<i64>(&run(Op::Ml(Ml::MapLabels), &inputs)[0]), [20, -1, 10]);
    let nan = f32::NAN;
    let inputs = [
        floats(&[3], &[nan, -0.0, 2.0]),
        floats(&[2], &[nan, 0.0]),
        strings(&[2], &["n", "z"]),
        strings(&[], &["d"]),
    ];
    assert_eq!(run(Op::Ml(Ml::MapLabels), &inputs)[0], strings(&[3], &["n", "z", "d"]));
    let hot = |strict| {
        let inputs = [integers(&[2], &[5, 9]), integers(&[2], &[9, 3])];
        try_run(Op::Ml(Ml::OneHotLabels { strict }), &inputs.map(Some), 1)
    };
    assert_eq!(values::<f32>(&hot(false).unwrap()[0]), [0.0, 0.0, 1.0, 0.0]);
    assert!(hot(true).unwrap_err().contains("no category"));
}
