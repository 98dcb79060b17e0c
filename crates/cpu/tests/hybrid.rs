//! Programs in sections, with the CPU as host and a CPU that refuses operators as accelerator: the
//! outputs are those of the CPU device alone, bit by bit.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use base::{Bytes, Random};
use cpu::{CpuDevice, CpuOptions};
use device::conformance::{self, Verdict};
use device::hybrid::HybridDevice;
use device::hybrid::section::Side;
use device::paged::{PagedDevice, PagedDeviceOptions};
use device::{
    Completion, CompletionSink, Device, DeviceError, DeviceInfo, Outcome, Program, Queue,
    QueueOptions, Segment, Task,
};
use model::op::{Binary, Compare, MatMul, Op, Reduce, ReduceKind, Unary};
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId, ValueInfo};

/// Rows that the accelerator below has no kernels for.
const REFUSED_ROWS: usize = 13;

/// A CPU that refuses operators, and, as a GPU, all that depends on a size known only from data.
struct RefusingDevice {
    inner: CpuDevice,
    refuses: fn(&Op) -> bool,
}

fn refusing(refuses: fn(&Op) -> bool) -> Arc<RefusingDevice> {
    let inner = CpuDevice::new(CpuOptions { threads: 2, queues: 2, ..CpuOptions::default() });
    Arc::new(RefusingDevice { inner, refuses })
}

fn cpu() -> Arc<CpuDevice> {
    Arc::new(CpuDevice::new(CpuOptions { threads: 2, queues: 2, ..CpuOptions::default() }))
}

impl Device for RefusingDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn unsupported_steps(&self, plan: &LaunchPlan) -> Vec<DeviceError> {
        let mut unknown = vec![false; plan.values.len()];
        let mut refused = Vec::new();
        for step in &plan.steps {
            let behind = step.inputs.iter().flatten().any(|id| unknown[id.index()]);
            let depends = matches!(step.op, Op::NonZero | Op::Compress { .. });
            if behind || depends || (self.refuses)(&step.op) {
                let (step, op) = (step.name.clone(), step.op.name());
                let reason = "no kernel".to_string();
                refused.push(DeviceError::Unsupported { step, op, reason });
            }
            for id in step.outputs.iter().flatten() {
                unknown[id.index()] = behind || depends;
            }
        }
        refused
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        if let Some(err) = self.unsupported_steps(&plan).into_iter().next() {
            return Err(err);
        }
        Ok(Arc::new(RefusingProgram(self.inner.load(plan)?)))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        self.inner.open_queue(options, sink)
    }
}

/// A program that refuses some sizes, as one whose kernels are made for sizes.
struct RefusingProgram(Arc<dyn Program>);

impl Program for RefusingProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        self.0.plan()
    }

    fn resident(&self) -> Bytes {
        self.0.resident()
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        self.specialize(&inputs.iter().map(|x| x.shape().to_vec()).collect::<Vec<_>>())?;
        self.0.prepare(inputs)
    }

    fn specialize(&self, shapes: &[Vec<usize>]) -> Result<(), DeviceError> {
        if shapes.iter().any(|shape| shape.first() == Some(&REFUSED_ROWS)) {
            let (step, op, reason) = Default::default();
            return Err(DeviceError::Unsupported { step, op, reason });
        }
        Ok(())
    }

    fn prepared_batches(&self, _: &[(String, usize)]) -> Option<Vec<usize>> {
        Some(vec![1, 2, 4, 8])
    }
}

/// Makes plans with the shapes that an importer would infer.
#[derive(Default)]
struct Builder {
    plan: LaunchPlan,
}

impl Builder {
    fn value(&mut self, dtype: DataType, dims: Vec<Dim>) -> ValueId {
        let id = ValueId(self.plan.values.len() as u32);
        self.plan.values.push(ValueInfo { name: format!("v{}", id.0), dtype, shape: Some(dims) });
        id
    }

    fn input(&mut self, dims: Vec<Dim>) -> ValueId {
        let id = self.value(DataType::F32, dims);
        self.plan.inputs.push(id);
        id
    }

    fn constant(&mut self, tensor: Tensor) -> ValueId {
        let dims = tensor.shape().iter().map(|size| Dim::Fixed(*size)).collect();
        let id = self.value(tensor.dtype(), dims);
        self.plan.constants.push((id, tensor));
        id
    }

    fn step(&mut self, op: Op, inputs: &[ValueId], dtype: DataType, dims: Vec<Dim>) -> ValueId {
        let output = self.value(dtype, dims);
        self.plan.steps.push(Step {
            name: "same".to_string(),
            op,
            inputs: inputs.iter().copied().map(Some).collect(),
            outputs: vec![Some(output)],
            last_uses: vec![],
        });
        output
    }

    fn finish(mut self, outputs: Vec<ValueId>) -> Arc<LaunchPlan> {
        self.plan.outputs = outputs;
        self.plan.plan_lifetimes();
        self.plan.check().expect("a sound plan");
        Arc::new(self.plan)
    }
}

const WIDTH: usize = 5;

fn numbers(random: &mut Random, shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    let data: Vec<f32> = (0..count).map(|_| random.symmetric_f32()).collect();
    Tensor::from_vec(shape.to_vec(), data).expect("a tensor")
}

/// Random steps on rows of `n`, and on rows whose number depends on the data.
fn random_plan(random: &mut Random) -> Arc<LaunchPlan> {
    let mut b = Builder::default();
    let rows = || vec![Dim::symbol("n"), Dim::Fixed(WIDTH)];
    let mut groups: Vec<(Vec<Dim>, Vec<ValueId>)> = vec![(rows(), vec![])];
    for _ in 0..2 {
        let input = b.input(rows());
        groups[0].1.push(input);
    }
    let weight = b.constant(numbers(random, &[WIDTH, WIDTH]));
    let axes = b.constant(Tensor::from_vec(vec![1], vec![1i64]).expect("one axis"));
    let zero = b.constant(Tensor::from_vec(vec![], vec![0f32]).expect("a number"));
    for _ in 0..3 + random.below(30) {
        let at = random.below(groups.len() as u64) as usize;
        let (dims, members) = (groups[at].0.clone(), groups[at].1.clone());
        let mut pick = || members[random.below(members.len() as u64) as usize];
        let (x, y) = (pick(), pick());
        let real = DataType::F32;
        let new = match random.below(8) {
            0 => b.step(Op::Unary(Unary::Tanh), &[x], real, dims),
            1 => b.step(Op::Unary(Unary::Abs), &[x], real, dims),
            2 => b.step(Op::Unary(Unary::Relu), &[x], real, dims),
            3 => b.step(Op::MatMul(MatMul::default()), &[x, weight], real, dims),
            4 => {
                // Rows with a positive sum: their number depends on the data.
                let reduce =
                    Reduce { kind: ReduceKind::Sum, keep_dims: false, noop_with_empty_axes: false };
                let row = vec![dims[0].clone()];
                let sums = b.step(Op::Reduce(reduce), &[x, axes], real, row.clone());
                let mask =
                    b.step(Op::Compare(Compare::Greater), &[sums, zero], DataType::Bool, row);
                let kept = vec![Dim::Unknown, Dim::Fixed(WIDTH)];
                let few = b.step(Op::Compress { axis: Some(0) }, &[x, mask], real, kept.clone());
                groups.push((kept, vec![few]));
                continue;
            }
            _ => b.step(Op::Binary(Binary::Add), &[x, y], real, dims),
        };
        groups[at].1.push(new);
    }
    let mut outputs: Vec<ValueId> =
        groups.iter().filter_map(|(_, members)| members.last().copied()).collect();
    outputs.dedup();
    b.finish(outputs)
}

struct Completions(Sender<Completion>);

impl CompletionSink for Completions {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

struct TestQueue {
    queue: Box<dyn Queue>,
    completions: Receiver<Completion>,
}

impl TestQueue {
    fn open(device: &dyn Device, preemptible: bool, capacity: usize) -> TestQueue {
        let (sender, completions) = channel();
        let options = QueueOptions { id: 3, capacity, high_priority: !preemptible, preemptible };
        let queue = device.open_queue(options, Arc::new(Completions(sender))).expect("a queue");
        TestQueue { queue, completions }
    }

    fn launch(&self, task: Box<dyn Task>, token: u64) {
        let steps = task.next_step()..task.step_count();
        assert!(self.queue.launch(Segment { token, task, steps }).is_ok(), "the queue is full");
    }

    fn wait(&self) -> Completion {
        self.completions.recv_timeout(Duration::from_secs(60)).expect("a completion")
    }

    fn run(&self, task: Box<dyn Task>) -> Vec<Tensor> {
        self.launch(task, 1);
        outputs(self.wait())
    }
}

fn outputs(completion: Completion) -> Vec<Tensor> {
    assert_eq!(completion.outcome, Outcome::Done);
    completion.task.into_outputs().expect("outputs")
}

fn refuses_tanh(op: &Op) -> bool {
    *op == Op::Unary(Unary::Tanh)
}

fn refuses_some(op: &Op) -> bool {
    matches!(op, Op::Unary(Unary::Tanh | Unary::Abs) | Op::Reduce(_))
}

#[test]
fn sections_compute_what_the_host_alone_computes() {
    let (accelerator, host) = (refusing(refuses_some), cpu());
    let hybrid = HybridDevice::new(accelerator.clone(), host.clone());
    let queues = [true, false].map(|preemptible| TestQueue::open(&hybrid, preemptible, 2));
    let alone = TestQueue::open(&*host, true, 2);
    let (mut cuts, mut plain) = (0, 0);
    for seed in 0..120 {
        let mut random = Random::new(seed);
        let plan = random_plan(&mut random);
        assert_eq!(hybrid.unsupported_steps(&plan), [], "the host runs all");
        match hybrid.sections(&plan).expect("sections") {
            None => plain += 1,
            Some(sections) => {
                cuts += usize::from(sections.iter().any(|one| one.side == Side::Accelerator));
                for section in sections.iter().filter(|one| one.side == Side::Accelerator) {
                    assert_eq!(accelerator.unsupported_steps(&section.plan), []);
                }
            }
        }
        let program = hybrid.load(plan.clone()).expect("a program");
        let reference = host.load(plan).expect("a program");
        for rows in [1, 6, REFUSED_ROWS, 0] {
            let inputs: Vec<Tensor> =
                (0..2).map(|_| numbers(&mut random, &[rows, WIDTH])).collect();
            let want = alone.run(reference.prepare(inputs.clone()).expect("a task"));
            for queue in &queues {
                let got = queue.run(program.prepare(inputs.clone()).expect("a task"));
                assert_eq!(got, want, "seed {seed}, {rows} rows");
            }
        }
    }
    assert!(cuts > 40 && plain > 0, "{cuts} plans on both sides, {plain} on one");
}

#[test]
fn passes_the_conformance_suite() {
    let report = conformance::run(&HybridDevice::new(refusing(refuses_tanh), cpu()));
    assert!(report.cases.iter().all(|case| case.verdict == Verdict::Passed), "{report}");
    let plain = conformance::run(&HybridDevice::new(refusing(|_| false), cpu()));
    assert!(plain.cases.iter().all(|case| case.verdict == Verdict::Passed), "{plain}");
}

#[test]
fn passes_the_residency_suite() {
    let options = PagedDeviceOptions {
        memory: Bytes(1 << 30),
        bytes_per_second: 2_000_000_000,
        runnable_percent: 60,
        added: Bytes(0),
    };
    let paged = PagedDevice::new(refusing(refuses_tanh), options).expect("the thread starts");
    let report = conformance::run_residency(&HybridDevice::new(Arc::new(paged), cpu()));
    assert!(report.cases.iter().all(|case| case.verdict == Verdict::Passed), "{report}");
}

/// Alternating products and functions: half of the steps are refused.
fn long_plan(steps: usize) -> Arc<LaunchPlan> {
    let mut b = Builder::default();
    let rows = || vec![Dim::symbol("n"), Dim::Fixed(64)];
    let mut x = b.input(rows());
    let weight = b.constant(numbers(&mut Random::new(1), &[64, 64]));
    for _ in 0..steps {
        x = b.step(Op::MatMul(MatMul::default()), &[x, weight], DataType::F32, rows());
        x = b.step(Op::Unary(Unary::Tanh), &[x], DataType::F32, rows());
    }
    b.finish(vec![x])
}

#[test]
fn preempted_sections_resume_with_the_same_bits() {
    let hybrid = HybridDevice::new(refusing(refuses_tanh), cpu());
    let queue = TestQueue::open(&hybrid, true, 2);
    let program = hybrid.load(long_plan(20)).expect("a program");
    let mut random = Random::new(5);
    let input = numbers(&mut random, &[700, 64]);
    let want = queue.run(program.prepare(vec![input.clone()]).expect("a task"));
    let mut preempted = 0;
    for _ in 0..10 {
        let mut task = program.prepare(vec![input.clone()]).expect("a task");
        loop {
            let before = task.next_step();
            queue.launch(task, 7);
            std::thread::sleep(Duration::from_micros(50 + random.below(1500)));
            queue.queue.preempt();
            let completion = queue.wait();
            if completion.outcome == Outcome::Done {
                assert_eq!(outputs(completion), want);
                break;
            }
            assert_eq!(completion.outcome, Outcome::Preempted);
            assert!(completion.task.next_step() >= before);
            preempted += 1;
            task = completion.task;
        }
    }
    assert!(preempted > 3, "preempted {preempted} times");
    // A task that is given up while it is preempted leaves the queue usable.
    queue.launch(program.prepare(vec![input.clone()]).expect("a task"), 8);
    queue.queue.preempt();
    drop(queue.wait().task);
    assert_eq!(queue.run(program.prepare(vec![input]).expect("a task")), want);
}

#[test]
fn segments_of_both_kinds_keep_their_order() {
    let hybrid = HybridDevice::new(refusing(refuses_tanh), cpu());
    let (sectioned, plain) = (long_plan(4), {
        let mut b = Builder::default();
        let rows = vec![Dim::symbol("n"), Dim::Fixed(64)];
        let x = b.input(rows.clone());
        let y = b.step(Op::Unary(Unary::Relu), &[x], DataType::F32, rows);
        b.finish(vec![y])
    });
    let programs = [sectioned, plain].map(|plan| hybrid.load(plan).expect("a program"));
    let input = numbers(&mut Random::new(2), &[9, 64]);
    for preemptible in [true, false] {
        let queue = TestQueue::open(&hybrid, preemptible, 64);
        let mut random = Random::new(3);
        // The largest token is the driver's own.
        let tokens: Vec<u64> = (0..40).map(|index| u64::MAX - index % 5).collect();
        let mut launched = Vec::new();
        for token in &tokens {
            let which = random.below(2) as usize;
            let task = programs[which].prepare(vec![input.clone()]).expect("a task");
            queue.launch(task, *token);
            launched.push((*token, which));
        }
        for (token, which) in launched {
            let completion = queue.wait();
            assert_eq!((completion.token, completion.queue), (token, 3));
            assert_eq!(completion.task.step_count(), [8, 1][which]);
            outputs(completion);
        }
        assert!(queue.completions.try_recv().is_err(), "more completions than segments");
    }
}

#[test]
fn batches_are_as_large_as_a_prepared_one() {
    let hybrid = HybridDevice::new(refusing(refuses_tanh), cpu());
    let program = hybrid.load(long_plan(2)).expect("a program");
    assert_eq!(program.prepared_batches(&[]), Some(vec![1, 2, 4, 8]));
    let queue = TestQueue::open(&hybrid, true, 1);
    let mut random = Random::new(4);
    for rows in [vec![1], vec![1, 2], vec![3, 1, 1], vec![5, 6]] {
        let requests: Vec<Tensor> =
            rows.iter().map(|rows| numbers(&mut random, &[*rows, 64])).collect();
        let stage = |x: &Tensor| {
            let copy = model::config::CopyTime::Early;
            program.stage(vec![x.clone()], copy, &mut || {}).expect("staged")
        };
        let task = program.gather(requests.iter().map(stage).collect()).expect("a task");
        let got = device::batch::split(&queue.run(task), &rows).expect("rows of each");
        for (request, got) in requests.iter().zip(got) {
            let alone = queue.run(program.prepare(vec![request.clone()]).expect("a task"));
            let (got, alone) = (got[0].to_vec::<f32>(), alone[0].to_vec::<f32>());
            let pairs = got.expect("numbers").into_iter().zip(alone.expect("numbers"));
            assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-5));
        }
    }
}

#[test]
fn what_runs_on_the_host_is_reported() {
    let hybrid = HybridDevice::new(refusing(refuses_tanh), cpu());
    let sections = hybrid.host_sections(&long_plan(2), &[("n".to_string(), 10)]);
    assert_eq!(sections.len(), 2);
    assert_eq!(sections[0].steps[0].op, "Tanh");
    assert_eq!(sections[0].steps[0].reason, "no kernel");
    assert_eq!((sections[0].copied_in, sections[0].copied_out), (Some(2560), Some(2560)));
    assert_eq!(sections[1].copied_out, Some(0), "the last one's result is an output");
    let unsized_rows = hybrid.host_sections(&random_plan(&mut Random::new(3)), &[]);
    assert!(unsized_rows.iter().all(|section| !section.steps.is_empty()));
}
