//! Batches end to end on the CPU device: each request gets its own reply, once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use base::{MonotonicClock, Nanos, Random};
use bench::load::{LoadBenchmark, LoadModel, LoadOptions, PhaseResult, charts, settings, table};
use cpu::{CpuDevice, CpuOptions};
use device::{Device, Program};
use model::Tensor;
use model::config::{Batching, BatchingPolicy, ModelConfig};
use runtime::{ModelKey, Node, NodeOptions, Rejection, Reply, Request};

const DIGITS: &[u8] = include_bytes!("../../../assets/digits.onnx");

fn device() -> Arc<dyn Device> {
    Arc::new(CpuDevice::new(CpuOptions { threads: 1, queues: 1, ..CpuOptions::default() }))
}

fn program(device: &dyn Device) -> Arc<dyn Program> {
    let plan = Arc::new(compiler::compile_onnx(DIGITS, None).unwrap());
    assert_eq!(
        model::row_independence::mixing_step(
            &plan,
            model::row_independence::batch_symbol(&plan).unwrap()
        ),
        None
    );
    device.load(plan).unwrap()
}

/// Random pictures of `rows` rows.
fn picture(program: &dyn Program, random: &mut Random, rows: usize) -> Vec<Tensor> {
    let dims = program.plan().value(program.plan().inputs[0]).shape.clone().unwrap();
    let size = |dim: &model::Dim| if let model::Dim::Fixed(n) = dim { *n } else { rows };
    let shape: Vec<usize> = dims.iter().map(size).collect();
    let values = (0..shape.iter().product()).map(|_| random.symmetric_f32()).collect();
    vec![Tensor::from_vec(shape, values).unwrap()]
}

struct TestNode {
    node: Node,
    key: ModelKey,
    program: Arc<dyn Program>,
}

impl TestNode {
    fn new(batching: Batching, queue_capacity: usize) -> TestNode {
        let device = device();
        let program = program(&*device);
        let clock = Arc::new(MonotonicClock::new());
        let node = Node::start(device, NodeOptions::default(), clock).unwrap();
        let config = ModelConfig { batching, queue_capacity, ..ModelConfig::default() };
        let key = node.add_model(program.clone(), &config);
        TestNode { node, key, program }
    }

    fn send(
        &self,
        inputs: Vec<Tensor>,
        timeout: Option<Nanos>,
        reply: impl FnOnce(Reply) + Send + 'static,
    ) -> runtime::RequestHandle {
        let request = Request { model: self.key, inputs, class: None, priority: None, timeout };
        self.node.submit(request, Box::new(reply))
    }
}

fn window(max_batch: usize, wait_us: u64) -> Batching {
    let policy = BatchingPolicy::Window;
    Batching { policy, max_batch, max_wait_us: wait_us, ..Batching::default() }
}

#[test]
fn each_request_of_a_batch_gets_its_own_reply() {
    let bench = TestNode::new(window(16, 500_000), 1024);
    assert!(bench.node.is_batched(bench.key));
    let single =
        TestNode::new(Batching { policy: BatchingPolicy::None, ..Batching::default() }, 1024);
    assert!(!single.node.is_batched(single.key));
    let mut random = Random::new(1);
    let mut replies = Vec::new();
    let mut rows_in_all = 0;
    for index in 0..60 {
        // The last is larger than any batch and runs alone.
        let rows = if index == 59 { 20 } else { 1 + index % 3 };
        rows_in_all += rows;
        let inputs = picture(&*bench.program, &mut random, rows);
        let (together, alone) = (mpsc::sync_channel(1), mpsc::sync_channel(1));
        bench.send(inputs.clone(), None, move |reply| together.0.send(reply).unwrap());
        single.send(inputs, None, move |reply| alone.0.send(reply).unwrap());
        replies.push((together.1, alone.1, rows));
    }
    for (together, alone, rows) in replies {
        let (got, want) = (together.recv().unwrap(), alone.recv().unwrap());
        assert!(got.timing.rows <= 16 && got.timing.started >= got.timing.arrived);
        let (got, want) = (got.result.unwrap(), want.result.unwrap());
        assert_eq!((got[0].shape(), got[0].shape()[0]), (want[0].shape(), rows));
        let (got, want) = (got[0].to_vec::<f32>().unwrap(), want[0].to_vec::<f32>().unwrap());
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-3));
    }
    let stats = bench.node.stats(bench.key).unwrap();
    assert_eq!((stats.success, stats.pending), (60, 0));
    let least = (rows_in_all - 20usize).div_ceil(16) as u64 + 1;
    assert!((least..30).contains(&stats.executions), "{} executions", stats.executions);
}

#[test]
fn cancelled_requests_end_once_and_do_not_affect_others() {
    let bench = TestNode::new(window(8, 2_000), 1024);
    let mut random = Random::new(2);
    let counts: Vec<Arc<AtomicUsize>> = (0..300).map(|_| Arc::default()).collect();
    let good = Arc::new(AtomicUsize::new(0));
    for (index, count) in counts.iter().enumerate() {
        let inputs = picture(&*bench.program, &mut random, 1);
        let timeout = (index % 5 == 0).then_some(Nanos::from_micros(50 * (index as u64 % 40)));
        let (count, good) = (count.clone(), good.clone());
        let handle = bench.send(inputs, timeout, move |reply| {
            count.fetch_add(1, Ordering::SeqCst);
            let expected = [Rejection::Cancelled, Rejection::DeadlineExceeded];
            match reply.result {
                Ok(outputs) => {
                    assert_eq!(outputs[0].shape()[0], 1);
                    good.fetch_add(1, Ordering::SeqCst);
                }
                Err(why) => assert!(expected.contains(&why), "{why}"),
            }
        });
        if index % 7 == 0 {
            handle.cancel();
            handle.cancel();
        }
    }
    assert!(bench.node.drain(Duration::from_secs(30)));
    assert!(counts.iter().all(|count| count.load(Ordering::SeqCst) == 1));
    assert!(good.load(Ordering::SeqCst) >= 200);
    let (sender, receiver) = mpsc::sync_channel(1);
    let inputs = picture(&*bench.program, &mut random, 1);
    bench.send(inputs, None, move |reply| sender.send(reply).unwrap());
    assert_eq!(receiver.recv().unwrap().result, Err(Rejection::ShuttingDown));
}

#[test]
fn the_queue_is_bounded_and_a_removed_model_drains() {
    let bench = TestNode::new(window(32, 3_000_000), 10);
    let mut random = Random::new(3);
    let (sender, receiver) = mpsc::channel();
    for _ in 0..14 {
        let sender = sender.clone();
        let inputs = picture(&*bench.program, &mut random, 1);
        bench.send(inputs, None, move |reply| sender.send(reply.result.map(|_| ())).unwrap());
    }
    let refused: Vec<_> = (0..4).map(|_| receiver.recv().unwrap()).collect();
    assert!(
        refused.iter().all(|r| *r == Err(Rejection::QueueFull { capacity: 10 })),
        "{refused:?}"
    );
    assert_eq!(bench.node.stats(bench.key).unwrap().pending, 10);
    assert!(bench.node.remove_model(bench.key));
    let late = sender.clone();
    let inputs = picture(&*bench.program, &mut random, 1);
    bench.send(inputs, None, move |reply| late.send(reply.result.map(|_| ())).unwrap());
    assert_eq!(receiver.recv().unwrap(), Err(Rejection::NoSuchModel));
    assert!((0..10).all(|_| receiver.recv().unwrap().is_ok()));
    assert!(bench.node.drain(Duration::from_secs(60)));
    assert!(bench.node.stats(bench.key).is_none(), "the model is gone");
}

#[test]
fn policies_are_compared_under_load() {
    let device = device();
    let program = program(&*device);
    let mut random = Random::new(4);
    let inputs = (0..4).map(|_| picture(&*program, &mut random, 1)).collect();
    let model = LoadModel { name: "digits".to_string(), program, inputs };
    let options = LoadOptions {
        seconds: 0.1,
        seed: 1,
        slo_ms: Some(20.0),
        probes: 2,
        shares: (0.05, 0.3),
        concurrent_batches: 1,
    };
    let results: Vec<_> =
        ["window", "elastic", "auto"].iter().flat_map(|n| settings(n, &[500]).unwrap()).collect();
    let load = LoadBenchmark::new(device, options, None);
    let mut reported = 0;
    let network = load.run(&model, &results, |_| reported += 1).unwrap();
    assert_eq!((reported, network.results.len()), (3, 3));
    for c in &network.results {
        let wrong = [&c.low, &c.high, &c.best].map(|phase| phase.wrong + phase.errors);
        assert_eq!(wrong, [0; 3], "{}", c.policy);
        // On a machine that stalled while its rate was measured, a load may have no request.
        let has_replies = |phase: &PhaseResult| phase.latency.count > 0 && phase.batches > 0;
        let mut phases = [&c.low, &c.high].into_iter().filter(|phase| phase.offered_rps > 0.0);
        assert!(phases.all(has_replies), "{c:?}");
    }
    assert_eq!(network.tuned.as_deref(), Some("window 500 us"));
    print!("{}", table(std::slice::from_ref(&network)));
    assert!(charts(&[network]).iter().all(|chart| chart.bars.len() == 3));
}
