use base::Random;
use model::Tensor;
use model::op::{ArgReduce, Op, Reduce, ReduceKind};

use super::super::testing::*;

fn op(kind: ReduceKind, keep_dims: bool) -> Op {
    Op::Reduce(Reduce { kind, keep_dims, noop_with_empty_axes: false })
}

/// Reduces in double precision, one output element after another.
fn naive(x: &Tensor, axes: &[usize], kind: ReduceKind) -> Vec<f64> {
    let (shape, data) = (x.shape(), values::<f32>(x));
    let kept: Vec<usize> = (0..shape.len()).filter(|axis| !axes.contains(axis)).collect();
    let count: usize = kept.iter().map(|&axis| shape[axis]).product();
    let mut groups: Vec<Vec<f64>> = vec![Vec::new(); count];
    for (position, &x) in data.iter().enumerate() {
        let mut rest = position;
        let mut index = vec![0; shape.len()];
        for axis in (0..shape.len()).rev() {
            index[axis] = rest % shape[axis];
            rest /= shape[axis];
        }
        let group = kept.iter().fold(0, |group, &axis| group * shape[axis] + index[axis]);
        groups[group].push(f64::from(x));
    }
    let sum = |group: &[f64], f: fn(f64) -> f64| group.iter().map(|&x| f(x)).sum::<f64>();
    groups
        .iter()
        .map(|group| match kind {
            ReduceKind::L1 => sum(group, f64::abs),
            ReduceKind::L2 => sum(group, |x| x * x).sqrt(),
            ReduceKind::LogSum => sum(group, |x| x).ln(),
            ReduceKind::LogSumExp => sum(group, f64::exp).ln(),
            ReduceKind::Max => group.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            ReduceKind::Min => group.iter().copied().fold(f64::INFINITY, f64::min),
            ReduceKind::Mean => sum(group, |x| x) / group.len() as f64,
            ReduceKind::Prod => group.iter().product(),
            ReduceKind::Sum => sum(group, |x| x),
            ReduceKind::SumSquare => sum(group, |x| x * x),
        })
        .collect()
}

#[test]
fn reductions_agree_with_a_naive_reference() {
    let mut random = Random::new(11);
    let cases: [(&[usize], &[i64]); 8] = [
        (&[2, 3, 7, 9], &[2, 3]),
        (&[2, 3, 7, 9], &[1]),
        (&[2, 3, 7, 9], &[0, 2]),
        (&[2, 3, 7, 9], &[-1, 0]),
        (&[5000], &[0]),
        (&[4, 1, 300], &[0, 1]),
        (&[3, 70000], &[1]),
        (&[70, 1000], &[0]),
    ];
    for (shape, axes) in cases {
        let x = random_floats(&mut random, shape);
        for kind in [
            ReduceKind::L1,
            ReduceKind::L2,
            ReduceKind::LogSumExp,
            ReduceKind::Max,
            ReduceKind::Mean,
            ReduceKind::Min,
            ReduceKind::Prod,
            ReduceKind::Sum,
            ReduceKind::SumSquare,
        ] {
            let got = &run(op(kind, false), &[x.clone(), integers(&[axes.len()], axes)])[0];
            let axes: Vec<usize> = axes
                .iter()
                .map(|&axis| (axis + shape.len() as i64) as usize % shape.len())
                .collect();
            for (got, want) in values::<f32>(got).into_iter().zip(naive(&x, &axes, kind)) {
                let error = (f64::from(got) - want).abs();
                assert!(error <= 1e-4 + 1e-5 * want.abs(), "{kind:?} {shape:?}: {got} {want}");
            }
        }
    }
}

#[test]
fn sums_of_many_floats_are_accurate() {
    let x = floats(&[1 << 20], &vec![0.1; 1 << 20]);
    let got: Vec<f32> = values(&run(op(ReduceKind::Mean, false), &[x])[0]);
    assert!((got[0] - 0.1).abs() < 1e-7, "{}", got[0]);
}

#[test]
fn integers_reduce_in_their_own_type() {
    let big = 1i64 << 60;
    let x = integers(&[3], &[big + 1, -1, 2]);
    let on = |kind| values::<i64>(&run(op(kind, false), std::slice::from_ref(&x))[0])[0];
    assert_eq!(on(ReduceKind::Sum), big + 2);
    assert_eq!(on(ReduceKind::Max), big + 1);
    assert_eq!(on(ReduceKind::L1), big + 4);
    assert_eq!(
        run(op(ReduceKind::Max, true), &[bools(&[2], &[false, true])])[0],
        bools(&[1], &[true])
    );
}

#[test]
fn empty_sets_have_neutral_values() {
    let x = floats(&[2, 0], &[]);
    let on = |kind| values::<f32>(&run(op(kind, false), &[x.clone(), integers(&[1], &[1])])[0])[0];
    assert_eq!(on(ReduceKind::Sum), 0.0);
    assert_eq!(on(ReduceKind::Prod), 1.0);
    assert_eq!(on(ReduceKind::Max), f32::NEG_INFINITY);
    assert_eq!(on(ReduceKind::Min), f32::INFINITY);
    assert_eq!(on(ReduceKind::LogSumExp), f32::NEG_INFINITY);
    assert!(on(ReduceKind::Mean).is_nan());
}

#[test]
fn no_axes_reduce_all_or_nothing() {
    let x = floats(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let all = run(op(ReduceKind::Sum, true), &[x.clone(), integers(&[0], &[])]);
    assert_eq!(all[0], floats(&[1, 1], &[10.0]));
    let reduce = |kind| Op::Reduce(Reduce { kind, keep_dims: true, noop_with_empty_axes: true });
    assert_eq!(run(reduce(ReduceKind::Sum), std::slice::from_ref(&x))[0], x);
    let squares = run(reduce(ReduceKind::SumSquare), &[x]);
    assert_eq!(squares[0], floats(&[2, 2], &[1.0, 4.0, 9.0, 16.0]));
}

#[test]
fn arg_reduce_matches_numpy() {
    let x = floats(&[2, 3], &[2.0, 5.0, 5.0, 1.0, f32::NAN, 0.0]);
    let on = |max, axis, select_last| {
        let arg = ArgReduce { max, axis, keep_dims: false, select_last };
        values::<i64>(&run(Op::ArgReduce(arg), std::slice::from_ref(&x))[0])
    };
    assert_eq!(on(true, 1, false), [1, 1]);
    assert_eq!(on(true, 1, true), [2, 1]);
    assert_eq!(on(false, -1, false), [0, 1]);
    assert_eq!(on(true, 0, false), [0, 1, 0]);
    let arg = ArgReduce { max: true, axis: 1, keep_dims: true, select_last: false };
    assert!(error(Op::ArgReduce(arg), &[floats(&[2, 0], &[])]).contains("empty"));
}

#[test]
fn cum_sum_supports_all_modes() {
    let x = integers(&[2, 3], &[1, 2, 3, 4, 5, 6]);
    let on = |axis, exclusive, reverse| {
        let op = Op::CumSum { exclusive, reverse };
        values::<i64>(&run(op, &[x.clone(), integers(&[], &[axis])])[0])
    };
    assert_eq!(on(1, false, false), [1, 3, 6, 4, 9, 15]);
    assert_eq!(on(-1, true, false), [0, 1, 3, 0, 4, 9]);
    assert_eq!(on(1, false, true), [6, 5, 3, 15, 11, 6]);
    assert_eq!(on(0, true, true), [4, 5, 6, 0, 0, 0]);
}
