//! Segments, queues, preemption and memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::Random;
use model::op::{self, Binary, MatMul, Op, Unary};
use model::{DataType, LaunchPlan, Tensor};

use super::plans::{Builder, integers, noise, reals};
use super::{ConformanceReport, Stop, TestQueue, ensure, finished, load};
use crate::{Completion, Device, DeviceError, Outcome, PreemptionLevel, Program, Segment, Task};

/// Side of the matrices that keep a device busy.
const SIDE: usize = 192;

/// Consecutive products: long enough that a preemption finds them running.
const PRODUCTS: usize = 60;

/// Preemptions that may come too late before they count as ignored.
const ATTEMPTS: usize = 10;

/// Segments that are launched on a queue of two.
const FLOOD: u64 = 16;

pub(super) fn run(device: &dyn Device, report: &mut ConformanceReport) {
    report.add("steps one by one give the same bits", one_by_one(device));
    report.add("outputs need every step", early_outputs(device));
    report.add("step times are recorded on request", step_times(device));
    report.add("a full queue returns the segment", full_queue(device));
    report.add("every launched segment completes once", all_complete(device));
    report.add("preempted work resumes with the same bits", preemption(device));
    report.add("work of unknown size resumes with the same bits", unknown_sizes(device));
    report.add("segments launched after a preemption run", after_preemption(device));
    report.add("confined work resumes with the same bits", confinement(device));
    report.add("work is preempted while it moves to the partition", preempts_confined(device));
    report.add("a failed step does not stop its queue", failure(device));
    report.add("queues run concurrently", concurrent(device));
    report.add("programs free their memory", memory(device));
}

/// Consecutive products, each followed by a function that keeps the values small.
fn long_plan() -> LaunchPlan {
    let mut builder = Builder::default();
    let mut x = builder.input(DataType::F32, &[SIDE, SIDE]);
    let weight = builder.constant(noise(&mut Random::new(1), &[SIDE, SIDE]));
    for _ in 0..PRODUCTS {
        let product = builder.real(Op::MatMul(MatMul::default()), &[x, weight]);
        x = builder.real(Op::Unary(Unary::Tanh), &[product]);
    }
    builder.finish(&[x])
}

fn start(program: &Arc<dyn Program>, seed: u64) -> Result<Box<dyn Task>, Stop> {
    let inputs = vec![noise(&mut Random::new(seed), &[SIDE, SIDE])];
    program.prepare(inputs).map_err(|err| Stop::Wrong(format!("not prepared: {err}")))
}

fn same_bits(got: &[Tensor], want: &[Tensor]) -> Result<(), Stop> {
    ensure(got == want, "the outputs differ from those of a run at once")
}

fn one_by_one(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let lane = TestQueue::open(device, 0, 1)?;
    let want = lane.outputs(start(&program, 2)?)?;
    let mut task = start(&program, 2)?;
    while task.next_step() + 1 < task.step_count() {
        let next = task.next_step();
        let completion = lane.run(task, next..next + 1)?;
        ensure(completion.outcome == Outcome::Done, "a single step was not done")?;
        ensure(completion.token == 1, "another token came back")?;
        task = completion.task;
        ensure(task.next_step() == next + 1, "a done step was not counted")?;
    }
    same_bits(&lane.outputs(task)?, &want)
}

fn early_outputs(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let lane = TestQueue::open(device, 0, 1)?;
    let completion = lane.run(start(&program, 2)?, 0..3)?;
    ensure(completion.task.into_outputs().is_err(), "outputs came before the end")
}

fn step_times(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let mut task = start(&program, 2)?;
    ensure(task.step_times().is_none(), "times were recorded without a request")?;
    task.record_step_times();
    let steps = task.step_count();
    let completion = TestQueue::open(device, 0, 1)?.run(task, 0..steps)?;
    let kept = completion.task.step_times().map(<[_]>::len);
    ensure(kept == Some(steps), format!("{kept:?} times of {steps} steps"))
}

fn segment(task: Box<dyn Task>, token: u64) -> Segment {
    let steps = task.next_step()..task.step_count();
    Segment { token, task, steps }
}

fn full_queue(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let lane = TestQueue::open(device, 0, 2)?;
    // One runs, two wait. A device that accepts many more has no limit, unless segments completed
    // while this thread was delayed.
    let mut refused = false;
    for _ in 0..ATTEMPTS {
        refused |= fill(&lane, &program)? < FLOOD;
        if refused {
            break;
        }
    }
    ensure(refused, format!("a queue of two takes {FLOOD} segments"))?;
    // The queue accepts segments again.
    finished(lane.run(start(&program, 1)?, 0..2 * PRODUCTS)?).map(drop)
}

/// Launches segments until one is refused; returns how many were accepted, all of which have ended.
fn fill(lane: &TestQueue, program: &Arc<dyn Program>) -> Result<u64, Stop> {
    let tasks: Result<Vec<_>, Stop> = (0..FLOOD).map(|token| start(program, token)).collect();
    let mut launched = 0;
    for (token, task) in (0..FLOOD).zip(tasks?) {
        if let Err(back) = lane.queue.launch(segment(task, token)) {
            ensure(back.token == token, "another segment came back")?;
            ensure(back.task.next_step() == 0, "a segment came back used")?;
            break;
        }
        launched += 1;
    }
    for _ in 0..launched {
        lane.wait()?;
    }
    Ok(launched)
}

fn all_complete(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let lane = TestQueue::open(device, 7, 32)?;
    for token in 0..12 {
        let mut segment = segment(start(&program, token)?, token);
        segment.steps = 0..4;
        lane.queue.launch(segment).map_err(|_| "a queue of 32 is full with 12")?;
    }
    // Half of the runs are preempted.
    lane.queue.preempt();
    let mut seen = Vec::new();
    for _ in 0..12 {
        let Completion { queue, token, .. } = lane.wait()?;
        ensure(queue == 7, "a completion names another queue")?;
        seen.push(token);
    }
    ensure(seen == (0..12).collect::<Vec<_>>(), format!("completed in the order {seen:?}"))?;
    ensure(lane.completions.try_recv().is_err(), "more completions than segments")
}

fn preemption(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let lane = TestQueue::open(device, 0, 2)?;
    let want = lane.outputs(start(&program, 3)?)?;
    let level = device.info().preemption;
    let mut left_early = false;
    for _ in 0..ATTEMPTS {
        let task = start(&program, 3)?;
        lane.queue.launch(segment(task, 1)).map_err(|_| "an idle queue is full")?;
        lane.queue.launch(segment(start(&program, 3)?, 2)).map_err(|_| "a queue of two is full")?;
        lane.queue.preempt();
        // Both complete before either is launched again.
        for (token, mut completion) in [(1, lane.wait()?), (2, lane.wait()?)] {
            ensure(completion.token == token, "segments overtook each other")?;
            if completion.outcome == Outcome::Preempted {
                let (done, steps) = (completion.task.next_step(), completion.task.step_count());
                ensure(done < steps, "preempted after its last step")?;
                left_early = true;
                completion = lane.run(completion.task, done..steps)?;
            }
            same_bits(&finished(completion)?, &want)?;
        }
        if left_early || level == PreemptionLevel::None {
            return Ok(());
        }
    }
    Err(Stop::Wrong(format!("nothing was preempted in {ATTEMPTS} attempts at level {level:?}")))
}

/// Products, each with a number added that depends on how many elements are positive: the places of
/// these are a value whose size depends on data.
fn counting_plan() -> LaunchPlan {
    let mut builder = Builder::default();
    let mut x = builder.input(DataType::F32, &[SIDE, SIDE]);
    let weight = builder.constant(noise(&mut Random::new(1), &[SIDE, SIDE]));
    let small = builder.constant(reals(&[], vec![1e-7]));
    let last = builder.constant(integers(&[1]));
    for _ in 0..4 {
        let product = builder.real(Op::MatMul(MatMul::default()), &[x, weight]);
        let bent = builder.real(Op::Unary(Unary::Tanh), &[product]);
        let positive = builder.real(Op::Unary(Unary::Relu), &[bent]);
        let places = builder.step(Op::NonZero, &[positive], DataType::I64);
        let shape = builder.step(Op::Shape { start: 0, end: None }, &[places], DataType::I64);
        let count = builder.step(Op::Gather { axis: 0 }, &[shape, last], DataType::I64);
        let cast = Op::Cast(op::Cast { to: DataType::F32 });
        let count = builder.real(cast, &[count]);
        let part = builder.real(Op::Binary(Binary::Mul), &[count, small]);
        x = builder.real(Op::Binary(Binary::Add), &[bent, part]);
    }
    builder.finish(&[x])
}

fn unknown_sizes(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, counting_plan())?;
    let lane = TestQueue::open(device, 0, 2)?;
    let want = lane.outputs(start(&program, 9)?)?;
    let mut random = Random::new(10);
    for _ in 0..ATTEMPTS {
        let mut task = start(&program, 9)?;
        loop {
            lane.queue.launch(segment(task, 1)).map_err(|_| "an idle queue is full")?;
            pause_us(random.below(3000));
            lane.queue.preempt();
            let completion = lane.wait()?;
            if completion.outcome != Outcome::Preempted {
                same_bits(&finished(completion)?, &want)?;
                break;
            }
            task = completion.task;
        }
    }
    Ok(())
}

fn after_preemption(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let lane = TestQueue::open(device, 0, 2)?;
    for _ in 0..3 {
        lane.queue.preempt();
    }
    finished(lane.run(start(&program, 1)?, 0..2 * PRODUCTS)?).map(drop)
}

/// Commands come at other moments in every attempt; confined work is never preempted, so it always
/// ends.
fn confinement(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let lane = TestQueue::open(device, 0, 2)?;
    let want = lane.outputs(start(&program, 5)?)?;
    let mut random = Random::new(6);
    for _ in 0..2 * ATTEMPTS {
        lane.queue.launch(segment(start(&program, 5)?, 1)).map_err(|_| "an idle queue is full")?;
        for confined in [true, true, false, true, false] {
            pause_us(random.below(300));
            lane.queue.confine(confined);
        }
        same_bits(&finished(lane.wait()?)?, &want)?;
    }
    // Started in the partition, and on a queue that was released.
    for confined in [true, false] {
        lane.queue.confine(confined);
        same_bits(&lane.outputs(start(&program, 5)?)?, &want)?;
    }
    Ok(())
}

fn preempts_confined(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let lane = TestQueue::open(device, 0, 2)?;
    let want = lane.outputs(start(&program, 7)?)?;
    let mut random = Random::new(8);
    for round in 0..2 * ATTEMPTS {
        lane.queue.launch(segment(start(&program, 7)?, 1)).map_err(|_| "an idle queue is full")?;
        pause_us(random.below(300));
        lane.queue.confine(true);
        pause_us(random.below(200));
        lane.queue.preempt();
        if round % 2 == 0 {
            lane.queue.confine(false);
        }
        let mut completion = lane.wait()?;
        if completion.outcome == Outcome::Preempted {
            let steps = completion.task.next_step()..completion.task.step_count();
            completion = lane.run(completion.task, steps)?;
        }
        same_bits(&finished(completion)?, &want)?;
        lane.queue.confine(false);
    }
    Ok(())
}

/// Sleeping would take longer than a step.
fn pause_us(micros: u64) {
    let since = Instant::now();
    while since.elapsed() < Duration::from_micros(micros) {
        std::hint::spin_loop();
    }
}

fn failure(device: &dyn Device) -> Result<(), Stop> {
    let mut builder = Builder::default();
    let table = builder.constant(reals(&[2], vec![1.0, 2.0]));
    let index = builder.input(DataType::I64, &[1]);
    let y = builder.real(Op::Gather { axis: 0 }, &[table, index]);
    let program = load(device, builder.finish(&[y]))?;
    let lane = TestQueue::open(device, 0, 1)?;
    let prepare = |index: i64| {
        program.prepare(vec![integers(&[index])]).map_err(|err| Stop::Wrong(err.to_string()))
    };
    let run = |task: Box<dyn Task>| {
        let steps = 0..task.step_count();
        lane.run(task, steps)
    };
    let completion = run(prepare(5)?)?;
    ensure(
        matches!(completion.outcome, Outcome::Failed(DeviceError::StepFailed { .. })),
        format!("an index out of range gives {:?}", completion.outcome),
    )?;
    for index in [-3, 2, i64::MAX, i64::MIN] {
        let outcome = run(prepare(index)?)?.outcome;
        ensure(outcome != Outcome::Done, format!("index {index} of two is taken"))?;
    }
    let outputs = finished(run(prepare(-2)?)?)?;
    ensure(outputs == [reals(&[1], vec![1.0])], "an index from the end is taken for another")?;
    let outputs = finished(run(prepare(1)?)?)?;
    ensure(outputs == [reals(&[1], vec![2.0])], "the queue computes wrongly after a failure")
}

fn concurrent(device: &dyn Device) -> Result<(), Stop> {
    let program = load(device, long_plan())?;
    let want = TestQueue::open(device, 0, 1)?.outputs(start(&program, 4)?)?;
    let lanes = (0..3).map(|id| TestQueue::open(device, id, 2)).collect::<Result<Vec<_>, _>>()?;
    for lane in &lanes {
        lane.queue.launch(segment(start(&program, 4)?, 1)).map_err(|_| "an idle queue is full")?;
        lane.queue.launch(segment(start(&program, 4)?, 2)).map_err(|_| "a queue of two is full")?;
    }
    for lane in &lanes {
        same_bits(&finished(lane.wait()?)?, &want)?;
        same_bits(&finished(lane.wait()?)?, &want)?;
    }
    Ok(())
}

fn memory(device: &dyn Device) -> Result<(), Stop> {
    let elements = 1 << 21;
    let mut builder = Builder::default();
    let x = builder.input(DataType::F32, &[1]);
    let weight = builder.constant(reals(&[elements], vec![1.0; elements]));
    let y = builder.real(Op::Binary(Binary::Add), &[x, weight]);
    let plan = Arc::new(builder.finish(&[y]));
    let bytes = elements as u64 * 4;
    // More in total than a device can hold.
    let rounds = (device.info().memory.0 / bytes).clamp(8, 64);
    let mut before = None;
    for _ in 0..rounds {
        let program = device.load(plan.clone()).map_err(|err| format!("not loaded: {err}"))?;
        let resident = program.resident();
        ensure(resident.0 >= bytes, format!("{resident} resident of {bytes} bytes of weights"))?;
        ensure(before.is_none_or(|before| before == resident), "the size of a program changes")?;
        before = Some(resident);
    }
    ensure(Arc::strong_count(&plan) == 1, "a dropped program still holds its plan")
}
