//! A device with queues, for tests.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use cuda::{CudaDevice, CudaOptions, OpenError};
use device::{
    Completion, CompletionSink, Device, Outcome, Program, Queue, QueueOptions, Segment, Task,
};
use model::Tensor;

use super::toy::ToyCompiler;

/// The GPU, or `None` with the reason printed.
pub fn open() -> Option<CudaDevice> {
    open_with(CudaOptions::default())
}

pub fn open_with(options: CudaOptions) -> Option<CudaDevice> {
    let cache_dir = std::env::var_os("ATOLL_TEST_CACHE").map(PathBuf::from);
    match CudaDevice::open(0, CudaOptions { cache_dir, ..options }, Arc::new(ToyCompiler)) {
        Ok(device) => Some(device),
        Err(err @ (OpenError::NoDriver(_) | OpenError::NoSuchDevice { .. })) => {
            println!("skipped: {err}");
            None
        }
        Err(err) => panic!("there is a GPU, but: {err}"),
    }
}

struct CompletionChannel(Sender<Completion>);

impl CompletionSink for CompletionChannel {
    fn complete(&self, completion: Completion) {
        let _ = self.0.send(completion);
    }
}

/// A queue and its completions.
pub struct TestQueue {
    pub queue: Arc<dyn Queue>,
    pub completions: Receiver<Completion>,
}

impl TestQueue {
    pub fn open(device: &CudaDevice, id: u32, high_priority: bool, capacity: usize) -> TestQueue {
        let (sender, completions) = channel();
        let options = QueueOptions { id, capacity, high_priority, preemptible: !high_priority };
        let queue =
            device.open_queue(options, Arc::new(CompletionChannel(sender))).expect("a queue");
        TestQueue { queue: Arc::from(queue), completions }
    }

    pub fn launch(&self, task: Box<dyn Task>, token: u64) {
        let steps = task.next_step()..task.step_count();
        let launched = self.queue.launch(Segment { token, task, steps });
        assert!(launched.is_ok(), "the queue is full");
    }

    pub fn wait(&self) -> Completion {
        self.completions.recv_timeout(Duration::from_secs(30)).expect("a completion")
    }

    /// Runs all of `task` at once.
    pub fn run(&self, task: Box<dyn Task>) -> Vec<f32> {
        self.launch(task, 1);
        outputs(self.wait())
    }
}

/// The only output of a task that is done.
pub fn outputs(completion: Completion) -> Vec<f32> {
    assert_eq!(completion.outcome, Outcome::Done);
    let outputs = completion.task.into_outputs().expect("outputs");
    outputs[0].to_vec::<f32>().expect("numbers")
}

/// `count` numbers.
pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut random = base::Random::new(seed);
    (0..count).map(|_| (random.next_u64() % 1000) as f32 / 64.0 - 8.0).collect()
}

pub fn start(program: &Arc<dyn Program>, numbers: &[f32]) -> Box<dyn Task> {
    let input = Tensor::from_vec(vec![numbers.len()], numbers.to_vec()).expect("a tensor");
    program.prepare(vec![input]).expect("a task")
}

/// The median and the 99th percentile, in microseconds.
pub fn percentiles(mut all: Vec<f64>) -> (f64, f64) {
    all.sort_by(f64::total_cmp);
    (all[all.len() / 2], all[(all.len() * 99 / 100).min(all.len() - 1)])
}
