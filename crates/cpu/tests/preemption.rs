//! Tasks that are preempted inside their steps resume there and compute the same bits.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use base::Random;
use cpu::{CpuDevice, CpuOptions};
use device::{
    Completion, CompletionSink, Device, Outcome, Program, Queue, QueueOptions, Segment, Task,
};
use model::op::{
    Activation, Binary, Body, Control, ControlKind, Conv, GlobalPool, MatMul, Op, Padding, Pool,
    PoolKind, Reduce, ReduceKind, Scan, Softmax, SoftmaxKind, Unary, Window,
};
use model::{DataType, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

/// Time after which a test counts as hung.
const TIMEOUT: Duration = Duration::from_secs(60);

struct ChannelSink(Sender<Completion>);

impl CompletionSink for ChannelSink {
    fn complete(&self, completion: Completion) {
        // The receiver is gone when a test has ended early.
        let _ = self.0.send(completion);
    }
}

struct TestQueue {
    queue: Box<dyn Queue>,
    completions: Receiver<Completion>,
}

impl TestQueue {
    fn open(device: &CpuDevice, id: u32, high_priority: bool) -> TestQueue {
        let (sender, completions) = channel();
        let preemptible = !high_priority;
        let options = QueueOptions { id, capacity: 2, high_priority, preemptible };
        let queue =
            device.open_queue(options, Arc::new(ChannelSink(sender))).expect("the threads start");
        TestQueue { queue, completions }
    }

    fn launch(&self, task: Box<dyn Task>) {
        let steps = task.next_step()..task.step_count();
        assert!(self.queue.launch(Segment { token: 1, task, steps }).is_ok(), "the queue is full");
    }

    fn wait(&self) -> Completion {
        self.completions.recv_timeout(TIMEOUT).expect("the segment completes")
    }

    fn outputs(&self, task: Box<dyn Task>) -> Vec<Tensor> {
        self.launch(task);
        outputs(self.wait())
    }

    /// Runs `task` and preempts it at random moments, at most `max_gap` apart. Returns the outputs
    /// and how long each preemption took.
    fn outputs_with_preemptions(
        &self,
        mut task: Box<dyn Task>,
        random: &mut Random,
        max_gap: Duration,
    ) -> (Vec<Tensor>, Vec<Duration>) {
        let mut times = Vec::new();
        loop {
            self.launch(task);
            pause(max_gap.mul_f64(random.unit_f64()));
            let requested = Instant::now();
            self.queue.preempt();
            let completion = self.wait();
            if completion.outcome != Outcome::Preempted {
                return (outputs(completion), times);
            }
            times.push(requested.elapsed());
            task = completion.task;
        }
    }
}

/// Waits `span`, to the microsecond: a sleep is too coarse for short operators.
fn pause(span: Duration) {
    let began = Instant::now();
    while began.elapsed() < span {
        std::thread::yield_now();
    }
}

fn outputs(completion: Completion) -> Vec<Tensor> {
    assert_eq!(completion.outcome, Outcome::Done);
    completion.task.into_outputs().expect("all steps are done")
}

fn noise(random: &mut Random, shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| random.symmetric_f32()).collect();
    Tensor::from_vec(shape.to_vec(), values).expect("shape and count agree")
}

/// A plan of consecutive `steps`: operators with the constants after their first operand.
fn chain(steps: Vec<(Op, Vec<Tensor>)>) -> LaunchPlan {
    let mut plan = LaunchPlan::default();
    let value = |plan: &mut LaunchPlan, dtype| {
        let id = ValueId(plan.values.len() as u32);
        plan.values.push(ValueInfo { name: format!("v{}", id.0), dtype, shape: None });
        id
    };
    let mut x = value(&mut plan, DataType::F32);
    plan.inputs = vec![x];
    for (op, constants) in steps {
        let mut inputs = vec![Some(x)];
        for tensor in constants {
            let id = value(&mut plan, tensor.dtype());
            plan.constants.push((id, tensor));
            inputs.push(Some(id));
        }
        let y = value(&mut plan, DataType::F32);
        let name = op.name();
        plan.steps.push(Step { name, op, inputs, outputs: vec![Some(y)], last_uses: vec![x] });
        x = y;
    }
    plan.outputs = vec![x];
    plan
}

fn window(kernel: usize, stride: usize, pad: usize) -> Window {
    Window {
        kernel: vec![kernel; 2],
        strides: vec![stride; 2],
        dilations: Vec::new(),
        padding: Padding::Explicit(vec![pad; 4]),
    }
}

/// An operator with yield points, its input's shape and its constants; it runs for milliseconds.
struct Case {
    name: &'static str,
    shape: Vec<usize>,
    op: Op,
    constants: Vec<Tensor>,
}

fn convolutions(random: &mut Random) -> Vec<Case> {
    let conv = |groups| {
        let activation = Activation::Relu;
        Op::Conv(Conv { window: window(3, 1, 1), groups, activation })
    };
    vec![
        Case {
            name: "convolution of many images",
            shape: vec![512, 16, 8, 8],
            op: conv(1),
            constants: vec![noise(random, &[32, 16, 3, 3]), noise(random, &[32])],
        },
        Case {
            name: "convolution of one image",
            shape: vec![1, 64, 64, 64],
            op: conv(1),
            constants: vec![noise(random, &[64, 64, 3, 3]), noise(random, &[64])],
        },
        Case {
            name: "depthwise convolution",
            shape: vec![8, 64, 48, 48],
            op: conv(64),
            constants: vec![noise(random, &[64, 1, 3, 3]), noise(random, &[64])],
        },
    ]
}

fn products(random: &mut Random) -> Vec<Case> {
    let op = || Op::MatMul(MatMul::default());
    vec![
        Case {
            name: "product of many rows",
            shape: vec![2048, 300],
            op: op(),
            constants: vec![noise(random, &[300, 301])],
        },
        Case {
            name: "deep product of few rows",
            shape: vec![9, 3000],
            op: op(),
            constants: vec![noise(random, &[3000, 2000])],
        },
        Case {
            name: "products side by side",
            shape: vec![40, 64, 100],
            op: op(),
            constants: vec![noise(random, &[40, 100, 120])],
        },
    ]
}

fn others(random: &mut Random) -> Vec<Case> {
    let large = vec![64, 32, 32, 32];
    let pool = |kind| Op::Pool(Pool { kind, window: window(3, 2, 1), ceil_mode: false });
    let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
    let mean = Reduce { kind: ReduceKind::Mean, keep_dims: true, noop_with_empty_axes: false };
    let axes = |axes: Vec<i64>| Tensor::from_vec(vec![axes.len()], axes).expect("they agree");
    let plain = |name, op| Case { name, shape: large.clone(), op, constants: Vec::new() };
    let with = |name, op, constants| Case { name, shape: large.clone(), op, constants };
    vec![
        plain("largest of windows", pool(PoolKind::Max)),
        plain("mean of windows", pool(PoolKind::Average { count_include_pad: false })),
        Case {
            name: "mean of planes",
            shape: vec![128, 64, 32, 32],
            op: Op::GlobalPool(GlobalPool::Average),
            constants: Vec::new(),
        },
        plain("function of each", Op::Unary(Unary::Erf)),
        plain("slow function of each", Op::Unary(Unary::Softplus)),
        plain("softmax", Op::Softmax(softmax)),
        plain("transposition", Op::Transpose { perm: Some(vec![0, 2, 3, 1]) }),
        with("sum with a broadcast", Op::Binary(Binary::Add), vec![noise(random, &[32, 1, 32])]),
        with("power", Op::Binary(Binary::Pow), vec![noise(random, &[32])]),
        with("mean along columns", Op::Reduce(mean), vec![axes(vec![1])]),
        with(
            "layer norm",
            Op::LayerNorm { axis: -1, epsilon: 1e-5 },
            vec![noise(random, &[32]), noise(random, &[32])],
        ),
        with(
            "scale and shift",
            Op::ScaleShift { activation: Activation::Gelu { tanh: false } },
            vec![noise(random, &[32]), noise(random, &[32])],
        ),
        with("local response", Op::Lrn { alpha: 0.1, beta: 0.75, bias: 1.0, size: 5 }, vec![]),
    ]
}

/// A thousand rounds of a body with two short steps.
fn rounds(random: &mut Random) -> Vec<Case> {
    let id = |at: u32| Some(ValueId(at));
    let step = |op: Op, inputs: Vec<Option<ValueId>>, output: u32| Step {
        name: op.name(),
        op,
        inputs,
        outputs: vec![id(output)],
        last_uses: Vec::new(),
    };
    let value = |_| ValueInfo { name: String::new(), dtype: DataType::F32, shape: None };
    let mut plan = LaunchPlan {
        values: (0..4).map(value).collect(),
        inputs: vec![ValueId(0), ValueId(1)],
        outputs: vec![ValueId(3)],
        steps: vec![
            step(Op::Binary(Binary::Add), vec![id(0), id(1)], 2),
            step(Op::Unary(Unary::Tanh), vec![id(2)], 3),
        ],
        constants: Vec::new(),
        warnings: Vec::new(),
    };
    plan.plan_lifetimes();
    let bodies = vec![Body { plan: Arc::new(plan), operands: Vec::new() }];
    let scan = Scan { carried: 1, inputs: vec![(0, false)], outputs: Vec::new() };
    vec![Case {
        name: "a thousand rounds",
        shape: vec![64],
        op: Op::Control(Control { kind: ControlKind::Scan(scan), id: 0, bodies }),
        constants: vec![noise(random, &[1000])],
    }]
}

/// Preempts runs of each case until that happened inside a step, and compares every result.
fn check(device: &CpuDevice, queue: &TestQueue, cases: Vec<Case>, random: &mut Random) {
    for case in cases {
        let Case { name, shape, op, constants } = case;
        let plan = chain(vec![(op, constants)]);
        let program = device.load(Arc::new(plan)).expect("the CPU runs it");
        let mut times = Vec::new();
        // Preemptions are spread over the fastest run seen; slower ones show other load.
        let mut fastest = Duration::MAX;
        let (began, before) = (Instant::now(), device.preemption_counts().inside_step);
        while device.preemption_counts().inside_step < before + 2 {
            assert!(began.elapsed() < TIMEOUT, "{name} was never preempted inside a step");
            let input = noise(random, &shape);
            let prepare = || program.prepare(vec![input.clone()]).expect("it fits");
            let launched = Instant::now();
            let want = queue.outputs(prepare());
            fastest = fastest.min(launched.elapsed());
            for _ in 0..4 {
                let (got, preemptions) = queue.outputs_with_preemptions(prepare(), random, fastest);
                times.extend(preemptions);
                assert!(got == want, "{name}: the bits differ");
            }
        }
        // Printed and not checked: it depends on other load on the machine.
        times.sort();
        println!(
            "{name}: preempted {} times within {:?} to {:?}",
            times.len(),
            times[0],
            times[times.len() - 1]
        );
    }
}

fn all(threads: usize, seed: u64) {
    let mut random = Random::new(seed);
    let device = CpuDevice::new(CpuOptions { threads, queues: 1, ..CpuOptions::default() });
    let queue = TestQueue::open(&device, 0, false);
    let cases = [convolutions, products, others, rounds];
    for cases in cases {
        let cases = cases(&mut random);
        check(&device, &queue, cases, &mut random);
    }
}

#[test]
fn preempts_operators_inside_steps_on_one_thread() {
    all(1, 71);
}

#[test]
fn preempts_operators_inside_steps_on_several_threads() {
    all(3, 72);
}

/// Convolutions with functions between them, some in place.
fn network(device: &CpuDevice, random: &mut Random) -> Arc<dyn Program> {
    let mut steps = Vec::new();
    for layer in 0..3 {
        let channels = if layer == 0 { 4 } else { 24 };
        let conv = Conv { window: window(3, 1, 1), groups: 1, activation: Activation::None };
        steps.push((
            Op::Conv(conv),
            vec![noise(random, &[24, channels, 3, 3]), noise(random, &[24])],
        ));
        steps.push((Op::Unary(Unary::Tanh), vec![]));
        steps.push((Op::Binary(Binary::Mul), vec![noise(random, &[24, 1, 1])]));
    }
    device.load(Arc::new(chain(steps))).expect("the CPU runs it")
}

fn image(random: &mut Random) -> Tensor {
    noise(random, &[96, 4, 12, 12])
}

/// More tasks than may be suspended at once, on two queues and in any order, beside a real-time
/// queue.
#[test]
fn suspended_tasks_resume_on_any_queue() {
    let mut random = Random::new(73);
    let device = CpuDevice::new(CpuOptions { threads: 2, queues: 2, ..CpuOptions::default() });
    let queues = [TestQueue::open(&device, 0, false), TestQueue::open(&device, 1, false)];
    let real_time = TestQueue::open(&device, 2, true);
    let program = network(&device, &mut random);
    let inputs: Vec<Tensor> = (0..9).map(|_| image(&mut random)).collect();
    let prepare = |input: &Tensor| program.prepare(vec![input.clone()]).expect("it fits");
    let wants: Vec<Vec<Tensor>> =
        inputs.iter().map(|input| real_time.outputs(prepare(input))).collect();
    let began = Instant::now();
    let mut open: Vec<(usize, Box<dyn Task>)> = Vec::new();
    // Preemptions may come too late, so tasks are added until enough were preempted inside a step.
    while !open.is_empty() || device.preemption_counts().inside_step <= 4 {
        if open.is_empty() {
            assert!(began.elapsed() < TIMEOUT, "{:?}", device.preemption_counts());
            open.extend(inputs.iter().map(prepare).enumerate());
        }
        let chosen = random.below(open.len() as u64) as usize;
        let (number, task) = open.swap_remove(chosen);
        let queue = &queues[random.below(2) as usize];
        queue.launch(task);
        std::thread::sleep(Duration::from_micros(random.below(3_000)));
        // Real time runs meanwhile and computes the right outputs.
        queue.queue.preempt();
        assert_eq!(real_time.outputs(prepare(&inputs[0])), wants[0]);
        let completion = queue.wait();
        match completion.outcome {
            Outcome::Preempted => open.push((number, completion.task)),
            _ => assert!(outputs(completion) == wants[number], "task {number}: the bits differ"),
        }
    }
}

/// Dropped tasks return their threads: others are preempted inside steps as before.
#[test]
fn suspended_tasks_may_be_dropped() {
    let mut random = Random::new(74);
    let device = CpuDevice::new(CpuOptions { threads: 2, queues: 1, ..CpuOptions::default() });
    let queue = TestQueue::open(&device, 0, false);
    let program = network(&device, &mut random);
    let mut dropped = 0;
    let began = Instant::now();
    while dropped < 20 {
        assert!(began.elapsed() < TIMEOUT, "only {dropped} were suspended");
        let input = image(&mut random);
        let before = device.preemption_counts().inside_step;
        queue.launch(program.prepare(vec![input]).expect("it fits"));
        std::thread::sleep(Duration::from_micros(random.below(3_000)));
        queue.queue.preempt();
        drop(queue.wait());
        dropped += device.preemption_counts().inside_step - before;
    }
    let input = image(&mut random);
    let prepare = || program.prepare(vec![input.clone()]).expect("it fits");
    let want = queue.outputs(prepare());
    assert!(
        queue.outputs_with_preemptions(prepare(), &mut random, Duration::from_millis(2)).0 == want
    );
}

/// A queue closes while one of its tasks is suspended; another queue finishes it.
#[test]
fn suspended_task_outlives_its_queue() {
    let mut random = Random::new(75);
    let device = CpuDevice::new(CpuOptions { threads: 2, queues: 2, ..CpuOptions::default() });
    let program = network(&device, &mut random);
    let input = image(&mut random);
    let prepare = || program.prepare(vec![input.clone()]).expect("it fits");
    let other = TestQueue::open(&device, 1, false);
    let want = other.outputs(prepare());
    let began = Instant::now();
    while device.preemption_counts().inside_step == 0 {
        assert!(began.elapsed() < TIMEOUT, "no task was suspended");
        let queue = TestQueue::open(&device, 0, false);
        queue.launch(prepare());
        std::thread::sleep(Duration::from_micros(random.below(3_000)));
        queue.queue.preempt();
        let completion = queue.wait();
        drop(queue);
        match completion.outcome {
            Outcome::Preempted => {
                assert!(other.outputs(completion.task) == want, "the bits differ")
            }
            _ => assert!(outputs(completion) == want, "the bits differ"),
        }
    }
}
