//! A compiler that takes long, beside real time on the CPU device: it runs on no thread that real
//! time needs.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use assembly::{compile_bytes, demo_model, sample_inputs};
use base::{Bytes, MonotonicClock, Random};
use cpu::{CpuDevice, CpuOptions};
use device::{Device, DeviceError, Program, Task, thread_watch};
use model::config::{Class, ModelConfig};
use model::{LaunchPlan, Tensor};
use runtime::{ModelKey, Node, NodeOptions, Reply, Request};

/// Much longer than a request takes, and much shorter than a test may.
const LONG: Duration = Duration::from_secs(60);

/// A program of the CPU whose sizes take as long to prepare as the test says.
struct SlowlyCompiled {
    inner: Arc<dyn Program>,
    prepared: Mutex<Vec<Vec<Vec<usize>>>>,
    /// Threads on which the compiler ran, and whether others waited for them.
    ran_on: Mutex<Vec<(String, bool)>>,
    begun: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl Program for SlowlyCompiled {
    fn plan(&self) -> &Arc<LaunchPlan> {
        self.inner.plan()
    }

    fn resident(&self) -> Bytes {
        self.inner.resident()
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        self.inner.prepare(inputs)
    }

    fn is_prepared(&self, inputs: &[Tensor]) -> bool {
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|input| input.shape().to_vec()).collect();
        self.prepared.lock().expect("no panic").contains(&shapes)
    }

    fn specialize(&self, shapes: &[Vec<usize>]) -> Result<(), DeviceError> {
        let name = std::thread::current().name().unwrap_or_default().to_string();
        self.ran_on.lock().expect("no panic").push((name, thread_watch::is_in_turn()));
        self.begun.send(()).expect("the test listens");
        let _ = self.go_on.lock().expect("one at a time").recv_timeout(LONG);
        self.prepared.lock().expect("no panic").push(shapes.to_vec());
        Ok(())
    }
}

fn inputs(plan: &LaunchPlan, rows: usize) -> Vec<Tensor> {
    let batch = sample_inputs::batch_symbol(plan).expect("a batch");
    let bindings = [(batch, rows)].into_iter().collect();
    sample_inputs::random_inputs(plan, &bindings, &mut Random::new(1)).expect("inputs")
}

/// Submits as a worker does that serves many connections: in a turn.
fn submit(node: &Node, model: ModelKey, inputs: Vec<Tensor>) -> Receiver<Reply> {
    let (sender, receiver) = channel();
    let request = Request { model, inputs, class: None, priority: None, timeout: None };
    let _turn = thread_watch::turn();
    node.submit(request, Box::new(move |reply| sender.send(reply).expect("the test listens")));
    receiver
}

#[test]
fn a_slow_compiler_runs_on_no_thread_that_real_time_needs() {
    let device = Arc::new(CpuDevice::new(CpuOptions::default()));
    let clock = Arc::new(MonotonicClock::new());
    let node = Node::start(device.clone(), NodeOptions::default(), clock).expect("a node");
    let plan = Arc::new(compile_bytes(demo_model::DIGITS_ONNX).expect("a plan"));
    let load = || device.load(plan.clone()).expect("a program");
    let config = |class| ModelConfig { class, ..ModelConfig::default() };
    let real_time = node.add_model(load(), &config(Class::RealTime));
    let answer = |replies: Receiver<Reply>| {
        assert!(replies.recv_timeout(LONG).expect("an answer").result.is_ok());
    };
    for class in [Class::BestEffort, Class::RealTime] {
        let ((begun, begins), (go, go_on)) = (channel(), channel());
        let slow = Arc::new(SlowlyCompiled {
            inner: load(),
            prepared: Mutex::default(),
            ran_on: Mutex::default(),
            begun,
            go_on: Mutex::new(go_on),
        });
        let model = node.add_model(slow.clone(), &config(class));
        for rows in [1, 3] {
            let waits = submit(&node, model, inputs(&plan, rows));
            begins.recv_timeout(LONG).expect("it is compiled");
            for _ in 0..20 {
                answer(submit(&node, real_time, inputs(&plan, 1)));
            }
            assert!(waits.try_recv().is_err(), "its sizes are not prepared");
            go.send(()).expect("it waits");
            answer(waits);
        }
        let ran_on = slow.ran_on.lock().expect("no panic").clone();
        assert_eq!(ran_on.len(), 2, "once for each size: {ran_on:?}");
        for (thread, in_turn) in ran_on {
            assert!(!in_turn && thread.starts_with("node-prepare"), "it ran on {thread}");
        }
    }
}
