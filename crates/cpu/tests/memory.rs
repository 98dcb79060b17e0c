//! A device whose memory is short refuses requests, and serves the next one.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use cpu::{CpuDevice, CpuOptions};
use device::{
    Completion, CompletionSink, Device, DeviceError, Outcome, Program, Queue, QueueOptions, Segment,
};
use model::op::{MatMul, Op, Softmax, SoftmaxKind, Unary};
use model::{DataType, Dim, HostMemory, LaunchPlan, MemoryError, Step, Tensor, ValueId, ValueInfo};

struct Sink(Sender<Completion>);

impl CompletionSink for Sink {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

struct Runner {
    program: Arc<dyn Program>,
    queue: Box<dyn Queue>,
    completions: Receiver<Completion>,
    _device: CpuDevice,
}

impl Runner {
    fn new(plan: LaunchPlan, memory: &'static HostMemory) -> Result<Runner, DeviceError> {
        let device = CpuDevice::new(CpuOptions { threads: 2, queues: 1, memory });
        let program = device.load(Arc::new(plan))?;
        let (sender, completions) = channel();
        let options = QueueOptions { id: 0, capacity: 1, high_priority: true, preemptible: false };
        let queue = device.open_queue(options, Arc::new(Sink(sender)))?;
        Ok(Runner { program, queue, completions, _device: device })
    }

    fn run(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, DeviceError> {
        let task = self.program.prepare(inputs)?;
        let steps = 0..task.step_count();
        assert!(self.queue.launch(Segment { token: 1, task, steps }).is_ok());
        let done = self.completions.recv_timeout(Duration::from_secs(60)).unwrap();
        match done.outcome {
            Outcome::Done => done.task.into_outputs(),
            Outcome::Failed(err) => Err(err),
            other => panic!("{other:?}"),
        }
    }
}

/// `softmax(a @ b)`, then `exp`, for `a` of `[m, 8]` and `b` of `[8, n]`. Where `known` is false,
/// the plan does not tell the sizes between them.
fn plan(known: bool) -> LaunchPlan {
    let value = |name: &str, dims: [Dim; 2]| ValueInfo {
        name: name.to_string(),
        dtype: DataType::F32,
        shape: Some(dims.to_vec()),
    };
    let inner = || match known {
        true => [Dim::symbol("m"), Dim::symbol("n")],
        false => [Dim::Unknown, Dim::Unknown],
    };
    let step = |op: Op, inputs: &[u32], output: u32| Step {
        name: format!("step{output}"),
        op,
        inputs: inputs.iter().map(|&id| Some(ValueId(id))).collect(),
        outputs: vec![Some(ValueId(output))],
        last_uses: Vec::new(),
    };
    let softmax = Softmax { axis: -1, kind: SoftmaxKind::Softmax, flatten: false };
    let mut plan = LaunchPlan {
        values: vec![
            value("a", [Dim::symbol("m"), Dim::Fixed(8)]),
            value("b", [Dim::Fixed(8), Dim::symbol("n")]),
            value("c", inner()),
            value("d", inner()),
            value("y", inner()),
        ],
        inputs: vec![ValueId(0), ValueId(1)],
        outputs: vec![ValueId(4)],
        steps: vec![
            step(Op::MatMul(MatMul::default()), &[0, 1], 2),
            step(Op::Softmax(softmax), &[2], 3),
            step(Op::Unary(Unary::Exp), &[3], 4),
        ],
        ..LaunchPlan::default()
    };
    plan.plan_lifetimes();
    plan
}

fn inputs(m: usize, n: usize) -> Vec<Tensor> {
    let of = |shape: [usize; 2]| {
        let data = (0..shape[0] * shape[1]).map(|i| (i % 7) as f32 * 0.1).collect();
        Tensor::from_vec(shape.to_vec(), data).unwrap()
    };
    vec![of([m, 8]), of([8, n])]
}

#[test]
fn what_can_never_fit_is_refused_before_it_runs() {
    for known in [true, false] {
        let memory = HostMemory::leaked(4 << 20);
        let runner = Runner::new(plan(known), memory).unwrap();
        let error = runner.run(inputs(5000, 5000)).unwrap_err();
        let never = matches!(error, DeviceError::HostMemory(MemoryError::TooLarge { .. }));
        assert!(never, "{error:?}");
        if known {
            assert!(runner.program.prepare(inputs(5000, 5000)).is_err());
        }
        assert_eq!(runner.run(inputs(100, 100)).unwrap()[0].shape(), [100, 100]);
    }
}

#[test]
fn others_make_a_request_wait() {
    let memory = HostMemory::leaked(4 << 20);
    let runner = Runner::new(plan(true), memory).unwrap();
    let held = memory.reserve(7 << 19).unwrap();
    let error = runner.run(inputs(500, 500)).unwrap_err();
    let later = matches!(error, DeviceError::HostMemory(MemoryError::Busy { .. }));
    assert!(later, "{error:?}");
    drop(held);
    assert!(runner.run(inputs(500, 500)).is_ok());
}

#[test]
fn outputs_stay_reserved_until_they_are_dropped() {
    let memory = HostMemory::leaked(64 << 20);
    let runner = Runner::new(plan(true), memory).unwrap();
    let outputs = runner.run(inputs(300, 300)).unwrap();
    assert!(memory.used() >= 300 * 300 * 4);
    drop(outputs);
    // What is kept for the next request is freed when another request needs it.
    // The last part of a budget is for small requests.
    assert!(memory.reserve(61 << 20).is_ok(), "{}", memory.used());
}

#[test]
fn every_refused_reservation_is_an_error_and_the_next_request_succeeds() {
    let memory = HostMemory::leaked_with_faults(1 << 30);
    let runner = Runner::new(plan(true), memory).unwrap();
    let expected = runner.run(inputs(90, 70)).unwrap();
    let mut refused = 0;
    loop {
        // Other sizes each time, so that buffers of the last request are not reused.
        let (m, n) = (90 + refused as usize * 97, 70 + refused as usize * 89);
        memory.fail_at(refused);
        let result = runner.run(inputs(m, n));
        let failed = memory.has_failed();
        memory.fail_at(u64::MAX);
        assert_eq!(runner.run(inputs(90, 70)).unwrap(), expected);
        if !failed {
            assert_eq!(result.unwrap()[0].shape(), [m, n]);
            break;
        }
        assert!(matches!(result.unwrap_err(), DeviceError::HostMemory(_)));
        refused += 1;
    }
    assert!(refused >= 4, "the check, two inputs and an output: {refused}");
}
