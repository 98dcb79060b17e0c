use std::sync::Arc;

use model::op::{Binary, Body, Compare, Control, ControlKind, Op, Scan};
use model::{DataType, HostMemory, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

use super::super::testing::*;
use crate::{buffer, yield_point};

fn step(op: Op, inputs: &[u32], output: u32) -> Step {
    let id = |at: &u32| Some(ValueId(*at));
    Step {
        name: format!("s{output}"),
        op,
        inputs: inputs.iter().map(id).collect(),
        outputs: vec![Some(ValueId(output))],
        last_uses: vec![],
    }
}

fn plan(types: &[DataType], inputs: &[u32], outputs: &[u32], steps: Vec<Step>) -> Arc<LaunchPlan> {
    let ids = |list: &[u32]| list.iter().map(|at| ValueId(*at)).collect();
    let value = |dtype: &DataType| ValueInfo { name: String::new(), dtype: *dtype, shape: None };
    let mut plan = LaunchPlan {
        values: types.iter().map(value).collect(),
        inputs: ids(inputs),
        outputs: ids(outputs),
        steps,
        constants: vec![],
        warnings: Vec::new(),
    };
    plan.plan_lifetimes();
    Arc::new(plan)
}

const I: DataType = DataType::I64;
const B: DataType = DataType::Bool;

/// Adds the captured value to the state; goes on below the captured limit; collects the state.
fn counting() -> Op {
    let add = step(Op::Binary(Binary::Add), &[2, 3], 5);
    let below = step(Op::Compare(Compare::Less), &[5, 4], 6);
    let copy = step(Op::Identity, &[5], 7);
    let plan =
        plan(&[I, B, I, I, I, I, B, I], &[0, 1, 2, 3, 4], &[6, 5, 7], vec![add, below, copy]);
    let bodies = vec![Body { plan, operands: vec![3, 4] }];
    Op::Control(Control { kind: ControlKind::Loop { carried: 1 }, id: 0, bodies })
}

fn counted(rounds: Option<i64>, go: bool, limit: i64) -> Result<Vec<Tensor>, String> {
    let one = |x: i64| Some(integers(&[], &[x]));
    let rounds = rounds.map(|rounds| integers(&[], &[rounds]));
    let inputs = [rounds, Some(bools(&[], &[go])), one(1), one(3), one(limit)];
    try_run(counting(), &inputs, 2)
}

#[test]
fn loops_end_by_rounds_or_condition() {
    let of = |result: Result<Vec<Tensor>, String>| {
        let outputs = result.unwrap();
        (values::<i64>(&outputs[0]), values::<i64>(&outputs[1]))
    };
    assert_eq!(of(counted(Some(3), true, 100)), (vec![10], vec![4, 7, 10]));
    assert_eq!(of(counted(None, true, 9)), (vec![10], vec![4, 7, 10]));
    assert_eq!(of(counted(Some(3), false, 100)), (vec![1], vec![]));
    assert_eq!(of(counted(Some(-5), true, 100)), (vec![1], vec![]));
}

#[test]
fn loops_without_an_end_are_stopped() {
    let endless = plan(&[I, B], &[0, 1], &[1], vec![]);
    let bodies = vec![Body { plan: endless, operands: vec![] }];
    let op = Op::Control(Control { kind: ControlKind::Loop { carried: 0 }, id: 0, bodies });
    for rounds in [Some(integers(&[], &[1_000_000_000])), None] {
        let error = try_run(op.clone(), &[rounds, Some(bools(&[], &[true]))], 0).unwrap_err();
        assert!(error.contains("more than 1000000 rounds"), "{error}");
    }
}

#[test]
fn what_rounds_collect_is_counted_before_the_last_round() {
    let memory = HostMemory::leaked(100_000);
    let before = yield_point::checks();
    let run = || counted(Some(500_000), true, i64::MAX);
    let error = buffer::with_memory(memory, run).unwrap_err();
    assert!(error.contains("bytes of memory are needed"), "{error}");
    let steps = yield_point::checks() - before;
    assert!(steps < 300_000, "the loop ends where memory does, not after {steps} steps");
    assert_eq!(memory.used(), 0);
}

/// Each step of a body is short, so a task is preempted within one of them.
#[test]
fn every_step_of_a_body_begins_with_a_yield_point() {
    let before = yield_point::checks();
    let outputs = counted(Some(1000), true, i64::MAX).unwrap();
    assert_eq!(values::<i64>(&outputs[0]), [3001]);
    assert!(yield_point::checks() - before >= 3 * 1000);
}

/// A loop of 2,000 rounds around one of 2,000: neither is too long by itself.
#[test]
fn rounds_of_loops_inside_of_loops_are_counted_together() {
    let looped = |id: u32, plan, operands| {
        let bodies = vec![Body { plan, operands }];
        Op::Control(Control { kind: ControlKind::Loop { carried: 0 }, id, bodies })
    };
    let inner = looped(0, plan(&[I, B], &[0, 1], &[1], vec![]), vec![]);
    let inner = Step { outputs: vec![], ..step(inner, &[2, 1], 0) };
    let op = looped(1, plan(&[I, B, I], &[0, 1, 2], &[1], vec![inner]), vec![2]);
    for (rounds, fits) in [(300, true), (2000, false), (300, true)] {
        let (most, inner) = (integers(&[], &[rounds]), integers(&[], &[2000]));
        let inputs = [Some(most), Some(bools(&[], &[true])), Some(inner)];
        let result = try_run(op.clone(), &inputs, 0);
        assert_eq!(result.is_ok(), fits, "{rounds}");
    }
}

#[test]
fn one_branch_runs() {
    // The second branch would divide by zero.
    let types = [I, I, I];
    let on = plan(&types, &[0, 1], &[2], vec![step(Op::Binary(Binary::Add), &[0, 1], 2)]);
    let off = plan(&types, &[0, 1], &[2], vec![step(Op::Binary(Binary::Div), &[0, 1], 2)]);
    let body = |plan| Body { plan, operands: vec![1, 2] };
    let bodies = vec![body(on), body(off)];
    let op = Op::Control(Control { kind: ControlKind::If, id: 0, bodies });
    let inputs = |go| [bools(&[], &[go]), integers(&[1], &[5]), integers(&[1], &[0])].map(Some);
    let got = try_run(op.clone(), &inputs(true), 1).unwrap();
    assert_eq!(values::<i64>(&got[0]), [5]);
    assert!(try_run(op, &inputs(false), 1).unwrap_err().contains("Div"));
}

#[test]
fn slices_are_read_and_written_along_their_dimensions() {
    let add = step(Op::Binary(Binary::Add), &[0, 1], 2);
    let copy = step(Op::Identity, &[2], 3);
    let plan = plan(&[I, I, I, I], &[0, 1], &[2, 3], vec![add, copy]);
    let x = integers(&[2, 3], &[1, 2, 3, 10, 20, 30]);
    for backwards in [false, true] {
        let scan = Scan { carried: 1, inputs: vec![(1, backwards)], outputs: vec![(1, false)] };
        let bodies = vec![Body { plan: plan.clone(), operands: vec![] }];
        let op = Op::Control(Control { kind: ControlKind::Scan(scan), id: 0, bodies });
        let inputs = [integers(&[2], &[0, 0]), x.clone()].map(Some);
        let got = try_run(op, &inputs, 2).unwrap();
        assert_eq!(values::<i64>(&got[0]), [6, 60]);
        let want: [i64; 6] = match backwards {
            false => [1, 3, 6, 10, 30, 60],
            true => [3, 5, 6, 30, 50, 60],
        };
        assert_eq!(values::<i64>(&got[1]), want);
        assert_eq!(got[1].shape(), [2, 3]);
    }
}

#[test]
fn outputs_are_collected_from_the_last_round_on() {
    let copies = plan(&[I], &[0], &[0], vec![]);
    for (rows, want) in [(2, vec![3, 4, 1, 2]), (3, vec![5, 6, 3, 4, 1, 2]), (1, vec![1, 2])] {
        let scan = Scan { carried: 0, inputs: vec![(0, false)], outputs: vec![(0, true)] };
        let bodies = vec![Body { plan: copies.clone(), operands: vec![] }];
        let op = Op::Control(Control { kind: ControlKind::Scan(scan), id: 0, bodies });
        let x = integers(&[rows, 2], &[1, 2, 3, 4, 5, 6][..2 * rows]);
        let got = try_run(op, &[Some(x)], 1).unwrap();
        assert_eq!((values::<i64>(&got[0]), got[0].shape()), (want, &[rows, 2][..]));
    }
}
