//! Control flow that keeps rows independent, and control flow that does not.

use std::sync::Arc;

use super::super::tests::PlanBuilder;
use super::*;
use crate::op::{Binary, Op, Reduce, ReduceKind, Unary};

/// A body with these inputs, a step for each output, and the first output repeated behind them.
fn body(inputs: &[&str], make: impl Fn(&mut PlanBuilder, &[ValueId]) -> Vec<ValueId>) -> Body {
    let mut maker = PlanBuilder::default();
    let ids: Vec<ValueId> = inputs.iter().map(|dims| maker.input(dims)).collect();
    maker.0.outputs = make(&mut maker, &ids);
    Body { plan: Arc::new(maker.0), operands: Vec::new() }
}

fn control(kind: ControlKind, bodies: Vec<Body>) -> Op {
    Op::Control(Control { kind, id: 0, bodies })
}

fn sum() -> Op {
    let reduce = Reduce { kind: ReduceKind::Sum, keep_dims: true, noop_with_empty_axes: false };
    Op::Reduce(reduce)
}

/// A scan along `axis` of `[n, t, 4]` that adds slices up, in a body that may add up rows.
fn scanned(axis: i64, mixes: bool) -> Option<String> {
    let slice = if axis == 0 { "t,4" } else { "n,4" };
    let made = body(&[slice, slice], |maker, ids| {
        let zero = maker.constant("1", vec![0]);
        let next = match mixes {
            true => maker.step(sum(), &[ids[1], zero], "1,4"),
            false => ids[1],
        };
        let state = maker.step(Op::Binary(Binary::Add), &[ids[0], next], slice);
        vec![state, state]
    });
    let scan = Scan { carried: 1, inputs: vec![(axis, false)], outputs: vec![(1, false)] };
    let mut maker = PlanBuilder::default();
    let (state, x) = (maker.input("n,4"), maker.input("n,t,4"));
    let last = maker.step(control(ControlKind::Scan(scan), vec![made]), &[state, x], "n,4");
    let all = maker.value("n,t,4");
    maker.0.steps.last_mut().expect("a step").outputs = vec![Some(last), Some(all)];
    maker.mixes(all)
}

#[test]
fn scans_along_time_keep_rows_and_along_rows_do_not() {
    assert_eq!(scanned(1, false), None);
    assert!(scanned(1, true).is_some());
    assert!(scanned(0, false).is_some());
}

/// A loop over `[n, 4]`, on whose rows it may depend how many rounds there are.
fn looped(rounds_of_rows: bool, condition_of_rows: bool) -> Option<String> {
    let made = body(&["1", "1", "n,4"], |maker, ids| {
        let state = maker.step(Op::Unary(Unary::Abs), &[ids[2]], "n,4");
        vec![if condition_of_rows { state } else { ids[1] }, state]
    });
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,4");
    let count = maker.step(Op::Size, &[x], "1");
    let (ten, on) = (maker.constant("1", vec![10]), maker.constant("1", vec![1]));
    let rounds = if rounds_of_rows { count } else { ten };
    let kind = ControlKind::Loop { carried: 1 };
    let y = maker.step(control(kind, vec![made]), &[rounds, on, x], "n,4");
    maker.mixes(y)
}

#[test]
fn loops_whose_rounds_are_the_same_for_all_rows_keep_them() {
    assert_eq!(looped(false, false), None);
    assert!(looped(true, false).is_some());
    assert!(looped(false, true).is_some());
}

/// A choice between two bodies that capture `[n, 4]`.
fn chosen(by_rows: bool, other_mixes: bool) -> Option<String> {
    let branch = |mixes: bool| {
        let mut made = body(&["n,4", "1"], |maker, ids| {
            // The axis is a constant that the body captures.
            let total = maker.step(sum(), &[ids[0], ids[1]], if mixes { "1,4" } else { "n,1" });
            vec![maker.step(Op::Binary(Binary::Add), &[ids[0], total], "n,4")]
        });
        made.operands = vec![1, if mixes { 2 } else { 3 }];
        made
    };
    let mut maker = PlanBuilder::default();
    let x = maker.input("n,4");
    let (on, zero, one) =
        (maker.constant("1", vec![1]), maker.constant("1", vec![0]), maker.constant("1", vec![1]));
    let bodies = vec![branch(false), branch(other_mixes)];
    let condition = if by_rows { x } else { on };
    let y = maker.step(control(ControlKind::If, bodies), &[condition, x, zero, one], "n,4");
    maker.mixes(y)
}

#[test]
fn branches_keep_rows_where_the_condition_is_the_same_for_all() {
    assert_eq!(chosen(false, false), None);
    assert!(chosen(true, false).is_some());
    assert!(chosen(false, true).is_some());
}
