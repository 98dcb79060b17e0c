use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::{Bytes, MonotonicClock, Nanos};
use device::{
    Completion, CompletionSink, Device, DeviceError, DeviceInfo, Outcome, PreemptionLevel, Program,
    Queue, QueueOptions, Segment, Task, heavy_threads,
};
use model::config::{Class, ModelConfig};
use model::{LaunchPlan, Tensor};

use super::super::{Node, NodeOptions, Rejection, Reply, Request};

/// Much longer than a request takes, and much shorter than a test may.
const LONG: Duration = Duration::from_secs(20);

/// A device that runs every segment at once.
struct Immediate {
    info: DeviceInfo,
}

struct ImmediateQueue {
    id: u32,
    sink: Arc<dyn CompletionSink>,
    done: Sender<(Segment, Arc<dyn CompletionSink>, u32)>,
}

struct ImmediateTask(usize);

impl Task for ImmediateTask {
    fn step_count(&self) -> usize {
        1
    }

    fn next_step(&self) -> usize {
        self.0
    }

    fn record_step_times(&mut self) {}

    fn step_times(&self) -> Option<&[Nanos]> {
        None
    }

    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError> {
        Ok(Vec::new())
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl Device for Immediate {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn unsupported_steps(&self, _: &LaunchPlan) -> Vec<DeviceError> {
        Vec::new()
    }

    fn load(&self, _: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        Err(DeviceError::BadPlan("programs are made by hand".to_string()))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        let (done, segments) = channel::<(Segment, Arc<dyn CompletionSink>, u32)>();
        std::thread::spawn(move || {
            while let Ok((segment, sink, queue)) = segments.recv() {
                let Segment { token, mut task, .. } = segment;
                task.as_any_mut().downcast_mut::<ImmediateTask>().expect("its own").0 = 1;
                let (outcome, busy) = (Outcome::Done, Nanos(1));
                sink.complete(Completion { queue, token, task, outcome, busy });
            }
        });
        Ok(Box::new(ImmediateQueue { id: options.id, sink, done }))
    }
}

impl Queue for ImmediateQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.done.send((segment, self.sink.clone(), self.id)).map_err(|sent| sent.0.0)
    }

    fn preempt(&self) {}
}

/// A program whose compiler takes until the test says so.
struct Compiled {
    plan: Arc<LaunchPlan>,
    ready: AtomicBool,
    begun: Sender<()>,
    go_on: Mutex<Receiver<Result<(), DeviceError>>>,
    compiled: AtomicUsize,
    /// The names of the threads that copied inputs.
    copied_on: Mutex<Vec<String>>,
    /// The device copies inputs itself.
    device_copies: AtomicBool,
}

impl Program for Compiled {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.plan
    }

    fn resident(&self) -> Bytes {
        Bytes(0)
    }

    fn is_prepared(&self, _: &[Tensor]) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    fn specialize(&self, _: &[Vec<usize>]) -> Result<(), DeviceError> {
        self.compiled.fetch_add(1, Ordering::SeqCst);
        self.begun.send(()).expect("the test listens");
        let result = self.go_on.lock().expect("one at a time").recv_timeout(LONG);
        let result = result.unwrap_or(Ok(()));
        self.ready.store(result.is_ok(), Ordering::SeqCst);
        result
    }

    fn prepare(&self, _: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        let name = std::thread::current().name().unwrap_or_default().to_string();
        self.copied_on.lock().expect("no panic").push(name);
        Ok(Box::new(ImmediateTask(0)))
    }

    fn copies_on_caller(&self, _: &[Tensor]) -> bool {
        !self.device_copies.load(Ordering::SeqCst)
    }
}

struct Bench {
    node: Node,
}

struct SlowModel {
    model: super::super::ModelKey,
    program: Arc<Compiled>,
    begun: Receiver<()>,
    go_on: Sender<Result<(), DeviceError>>,
}

impl Bench {
    fn new() -> Bench {
        let info = DeviceInfo {
            name: "immediate".to_string(),
            description: String::new(),
            preemption: PreemptionLevel::InsideTile,
            memory: Bytes(0),
            queues: 2,
            rounding: 0.0,
        };
        let clock = Arc::new(MonotonicClock::new());
        let node = Node::start(Arc::new(Immediate { info }), NodeOptions::default(), clock);
        Bench { node: node.expect("a node") }
    }

    fn model(&self, class: Class, ready: bool) -> SlowModel {
        let ((began, begun), (go_on, goes_on)) = (channel(), channel());
        let program = Arc::new(Compiled {
            plan: Arc::default(),
            ready: AtomicBool::new(ready),
            begun: began,
            go_on: Mutex::new(goes_on),
            compiled: AtomicUsize::new(0),
            copied_on: Mutex::default(),
            device_copies: AtomicBool::new(false),
        });
        let config = ModelConfig { class, ..ModelConfig::default() };
        SlowModel { model: self.node.add_model(program.clone(), &config), program, begun, go_on }
    }

    fn submit(
        &self,
        model: &SlowModel,
        timeout: Option<Nanos>,
    ) -> (super::super::RequestHandle, Receiver<Reply>) {
        self.submit_inputs(model, timeout, Vec::new())
    }

    fn submit_bytes(
        &self,
        model: &SlowModel,
        bytes: u64,
    ) -> (super::super::RequestHandle, Receiver<Reply>) {
        let input = Tensor::from_vec(vec![bytes as usize], vec![0u8; bytes as usize]);
        self.submit_inputs(model, None, vec![input.expect("a tensor")])
    }

    fn submit_inputs(
        &self,
        model: &SlowModel,
        timeout: Option<Nanos>,
        inputs: Vec<Tensor>,
    ) -> (super::super::RequestHandle, Receiver<Reply>) {
        let (sender, receiver) = channel();
        let request = Request { model: model.model, inputs, class: None, priority: None, timeout };
        let reply = Box::new(move |reply| sender.send(reply).expect("one reply"));
        (self.node.submit(request, reply), receiver)
    }
}

#[test]
fn real_time_does_not_wait_for_the_compiler_of_another_model() {
    let bench = Bench::new();
    let real_time = bench.model(Class::RealTime, true);
    for class in [Class::BestEffort, Class::RealTime] {
        let slow = bench.model(class, false);
        let (_, waits) = bench.submit(&slow, None);
        slow.begun.recv_timeout(LONG).expect("it is compiled");
        for _ in 0..100 {
            let (_, answered) = bench.submit(&real_time, None);
            assert!(answered.recv_timeout(LONG).expect("an answer").result.is_ok());
        }
        assert!(waits.try_recv().is_err(), "its sizes are not prepared");
        slow.go_on.send(Ok(())).expect("it waits");
        assert!(waits.recv_timeout(LONG).expect("an answer").result.is_ok());
        // Now it is prepared, and nothing is compiled.
        let (_, answered) = bench.submit(&slow, None);
        assert!(answered.recv_timeout(LONG).expect("an answer").result.is_ok());
        assert_eq!(slow.program.compiled.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn a_request_is_answered_once_whenever_it_is_cancelled() {
    let bench = Bench::new();
    let slow = bench.model(Class::BestEffort, false);
    let (first, first_reply) = bench.submit(&slow, None);
    slow.begun.recv_timeout(LONG).expect("it is compiled");
    let (second, second_reply) = bench.submit(&slow, None);
    second.cancel();
    second.cancel();
    let why = second_reply.recv_timeout(LONG).expect("an answer").result;
    assert!(matches!(why, Err(Rejection::Cancelled)), "one that waits ends at once: {why:?}");
    first.cancel();
    slow.go_on.send(Ok(())).expect("it waits");
    let why = first_reply.recv_timeout(LONG).expect("an answer").result;
    assert!(matches!(why, Err(Rejection::Cancelled)), "{why:?}");
    assert!(first_reply.recv_timeout(Duration::from_millis(20)).is_err(), "one answer");
    let (third, third_reply) = bench.submit(&slow, None);
    assert!(third_reply.recv_timeout(LONG).expect("an answer").result.is_ok());
    third.cancel();
}

#[test]
fn a_refused_size_and_a_missed_deadline_are_answered() {
    let bench = Bench::new();
    let slow = bench.model(Class::BestEffort, false);
    let (_, refused) = bench.submit(&slow, None);
    slow.begun.recv_timeout(LONG).expect("it is compiled");
    let (_, late) = bench.submit(&slow, Some(Nanos::from_millis(1)));
    std::thread::sleep(Duration::from_millis(5));
    slow.go_on.send(Err(DeviceError::BadPlan("no such size".to_string()))).expect("it waits");
    let why = refused.recv_timeout(LONG).expect("an answer").result;
    assert!(matches!(why, Err(Rejection::Device(_))), "{why:?}");
    let why = late.recv_timeout(LONG).expect("an answer").result;
    assert!(matches!(why, Err(Rejection::DeadlineExceeded)), "{why:?}");
}

#[test]
fn the_queue_is_bounded_and_a_drain_waits_for_it() {
    let bench = Bench::new();
    let slow = bench.model(Class::BestEffort, false);
    let (_, first) = bench.submit(&slow, None);
    slow.begun.recv_timeout(LONG).expect("it is compiled");
    let waiting: Vec<_> = (0..super::MAX_WAITING).map(|_| bench.submit(&slow, None)).collect();
    let (_, refused) = bench.submit(&slow, None);
    let why = refused.recv_timeout(LONG).expect("an answer").result;
    assert!(matches!(why, Err(Rejection::QueueFull { .. })), "{why:?}");
    assert!(!bench.node.drain(Duration::from_millis(20)), "requests wait");
    slow.go_on.send(Ok(())).expect("it waits");
    // The drain may begin before the first of them is in the core: answered, one way or the other.
    for reply in [first].iter().chain(waiting.iter().map(|(_, reply)| reply)) {
        // Those behind the first find the size prepared or ask the compiler, which then goes on.
        let _ = slow.go_on.send(Ok(()));
        reply.recv_timeout(LONG).expect("an answer");
    }
    assert!(bench.node.drain(LONG));
}

#[test]
fn large_inputs_of_best_effort_are_copied_on_threads_for_heavy_work() {
    let bench = Bench::new();
    let large = super::LARGE_INPUT_BYTES;
    let cases = [
        (Class::BestEffort, large, false, true),
        (Class::BestEffort, large - 1, false, false),
        (Class::BestEffort, large, true, false),
        (Class::RealTime, large, false, false),
    ];
    for (class, bytes, device_copies, apart) in cases {
        let model = bench.model(class, true);
        model.program.device_copies.store(device_copies, Ordering::SeqCst);
        let (_, answered) = bench.submit_bytes(&model, bytes);
        assert!(answered.recv_timeout(LONG).expect("an answer").result.is_ok());
        let names = model.program.copied_on.lock().expect("no panic").clone();
        assert_eq!(names.len(), 1, "{names:?}");
        assert_eq!(names[0].starts_with("heavy-"), apart, "{class:?}, {bytes} bytes: {names:?}");
        assert_eq!(model.program.compiled.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn large_inputs_that_wait_for_their_copy_can_be_cancelled() {
    let bench = Bench::new();
    let model = bench.model(Class::BestEffort, true);
    // All threads are busy until the test says so.
    let (go, wait) = channel::<()>();
    let wait = Arc::new(Mutex::new(wait));
    for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
        let wait = wait.clone();
        heavy_threads::run(Box::new(move || drop(wait.lock().map(|wait| wait.recv()))));
    }
    let (cancelled, refused) = bench.submit_bytes(&model, super::LARGE_INPUT_BYTES);
    let (_, waits) = bench.submit_bytes(&model, super::LARGE_INPUT_BYTES);
    cancelled.cancel();
    let why = refused.recv_timeout(LONG).expect("an answer").result;
    assert!(matches!(why, Err(Rejection::Cancelled)), "{why:?}");
    assert!(!bench.node.drain(Duration::from_millis(20)), "a request waits");
    assert!(waits.try_recv().is_err(), "no thread has copied its inputs");
    drop(go);
    // It was not admitted when the drain began: answered, one way or the other.
    waits.recv_timeout(LONG).expect("an answer");
    assert!(bench.node.drain(LONG));
    assert!(refused.try_recv().is_err(), "one answer");
}
