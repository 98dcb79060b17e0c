use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use base::{Bytes, MonotonicClock};
use device::{
    Completion, CompletionSink, Device, DeviceInfo, Outcome, PreemptionLevel, Queue, QueueOptions,
    Segment, Task,
};
use model::config::{Batching, BatchingPolicy, ModelConfig};
use model::{DataType, ValueId, ValueInfo};

use super::super::{NodeOptions, Request};
use super::*;

const LONG: Duration = Duration::from_secs(20);
/// Positions of the model; longer requests are refused.
const POSITIONS: usize = 70;

/// A device whose tasks are computed when they are prepared. It holds segments back while it is
/// told to.
struct Host {
    info: DeviceInfo,
    held: Arc<Mutex<()>>,
}

struct HostQueue(Sender<Segment>);

impl Device for Host {
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
        let (sender, segments) = channel::<Segment>();
        let held = self.held.clone();
        std::thread::spawn(move || {
            while let Ok(Segment { token, mut task, .. }) = segments.recv() {
                drop(held.lock().unwrap());
                let own = task.as_any_mut().downcast_mut::<Computed>().unwrap();
                own.next = 1;
                let (queue, busy, outcome) = (options.id, own.busy, Outcome::Done);
                sink.complete(Completion { queue, token, task, outcome, busy });
            }
        });
        Ok(Box::new(HostQueue(sender)))
    }
}

impl Queue for HostQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.0.send(segment).map_err(|unsent| unsent.0)
    }

    fn preempt(&self) {}
}

struct Computed {
    outputs: Vec<Tensor>,
    busy: Nanos,
    next: usize,
}

impl Task for Computed {
    fn step_count(&self) -> usize {
        1
    }

    fn next_step(&self) -> usize {
        self.next
    }

    fn record_step_times(&mut self) {}

    fn step_times(&self) -> Option<&[Nanos]> {
        None
    }

    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError> {
        Ok(self.outputs)
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// The mean of the tokens that count, and every token plus that mean.
struct MaskedMean {
    plan: Arc<LaunchPlan>,
    /// Whether it looks at its mask.
    masks: bool,
    /// Whether a batch takes as long as a row.
    pays: bool,
    /// Lengths that are prepared; all when absent.
    prepared: Option<BTreeSet<usize>>,
    /// Rows and length of every task.
    shapes: Mutex<Vec<(usize, usize)>>,
}

impl Program for MaskedMean {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.plan
    }

    fn resident(&self) -> Bytes {
        Bytes(0)
    }

    fn is_prepared(&self, inputs: &[Tensor]) -> bool {
        self.prepared.as_ref().is_none_or(|known| known.contains(&inputs[0].shape()[1]))
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        let (rows, length) = (inputs[0].shape()[0], inputs[0].shape()[1]);
        if length > POSITIONS {
            return Err(DeviceError::BadInput("too long".to_string()));
        }
        self.shapes.lock().unwrap().push((rows, length));
        let tokens = inputs[0].to_vec::<i64>().unwrap();
        let mask = inputs[1].to_vec::<i64>().unwrap();
        let (mut hidden, mut pooled) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let own = row * length..(row + 1) * length;
            let counts = |at: &usize| !self.masks || mask[*at] != 0;
            let counted: Vec<f32> =
                own.clone().filter(counts).map(|at| tokens[at] as f32).collect();
            let mean = counted.iter().sum::<f32>() / counted.len().max(1) as f32;
            pooled.push(mean);
            hidden.extend(own.map(|at| tokens[at] as f32 + mean));
        }
        let outputs = vec![
            Tensor::from_vec(vec![rows, length, 1], hidden).unwrap(),
            Tensor::from_vec(vec![rows, 1], pooled).unwrap(),
        ];
        let busy = Nanos(1_000 * if self.pays { 1 } else { rows as u64 });
        Ok(Box::new(Computed { outputs, busy, next: 0 }))
    }
}

fn plan() -> Arc<LaunchPlan> {
    let tokens = || vec![Dim::symbol("batch"), Dim::symbol("length")];
    let value = |(name, dtype, shape): (&str, DataType, Vec<Dim>)| ValueInfo {
        name: name.to_string(),
        dtype,
        shape: Some(shape),
    };
    let hidden = vec![Dim::symbol("batch"), Dim::symbol("length"), Dim::Fixed(1)];
    let values = [
        ("input_ids", DataType::I64, tokens()),
        ("attention_mask", DataType::I64, tokens()),
        ("hidden", DataType::F32, hidden),
        ("pooled", DataType::F32, vec![Dim::symbol("batch"), Dim::Fixed(1)]),
    ];
    Arc::new(LaunchPlan {
        values: values.into_iter().map(value).collect(),
        inputs: vec![ValueId(0), ValueId(1)],
        outputs: vec![ValueId(2), ValueId(3)],
        ..LaunchPlan::default()
    })
}

struct Bench {
    node: Node,
    model: ModelKey,
    program: Arc<MaskedMean>,
    held: Arc<Mutex<()>>,
}

impl Bench {
    fn new(masks: bool, pays: bool, prepared: Option<BTreeSet<usize>>) -> Bench {
        let info = DeviceInfo {
            name: "host".to_string(),
            description: "host".to_string(),
            preemption: PreemptionLevel::BetweenLaunches,
            memory: Bytes(1 << 30),
            queues: 1,
            rounding: 0.0,
        };
        let held = Arc::<Mutex<()>>::default();
        let device = Arc::new(Host { info, held: held.clone() });
        let clock = Arc::new(MonotonicClock::new());
        let node = Node::start(device, NodeOptions::default(), clock).unwrap();
        let (plan, shapes) = (plan(), Mutex::default());
        let program = Arc::new(MaskedMean { plan, masks, pays, prepared, shapes });
        let batching = Batching { policy: BatchingPolicy::Adaptive, ..Batching::default() };
        let config = ModelConfig { batching, ..ModelConfig::default() };
        let model = node.add_model(program.clone(), &config);
        Bench { node, model, program, held }
    }

    fn check(&self) -> Result<Arc<CheckedPadding>, String> {
        let checked = self.node.check_padding(self.model, LONG);
        self.program.shapes.lock().unwrap().clear();
        checked
    }

    fn submit(&self, tokens: &[i64]) -> Receiver<Reply> {
        let (sender, receiver) = channel();
        let shape = vec![1, tokens.len()];
        let ids = Tensor::from_vec(shape.clone(), tokens.to_vec()).unwrap();
        let mask = Tensor::from_vec(shape, vec![1i64; tokens.len()]).unwrap();
        let (model, inputs) = (self.model, vec![ids, mask]);
        let request = Request { model, inputs, class: None, priority: None, timeout: None };
        self.node.submit(request, Box::new(move |reply| sender.send(reply).unwrap()));
        receiver
    }
}

/// The outputs of a request alone.
fn expected(tokens: &[i64]) -> Vec<Tensor> {
    let mean = tokens.iter().sum::<i64>() as f32 / tokens.len() as f32;
    let hidden = tokens.iter().map(|token| *token as f32 + mean).collect();
    vec![
        Tensor::from_vec(vec![1, tokens.len(), 1], hidden).unwrap(),
        Tensor::from_vec(vec![1, 1], vec![mean]).unwrap(),
    ]
}

fn assert_right(reply: &Receiver<Reply>, tokens: &[i64]) {
    let outputs = reply.recv_timeout(LONG).unwrap().result.unwrap();
    for (expected, found) in expected(tokens).iter().zip(&outputs) {
        assert!(is_close(expected, found), "{expected:?}\n{found:?}");
    }
}

#[test]
fn a_model_that_ignores_its_mask_is_not_padded() {
    let why = Bench::new(false, true, None).check().expect_err("it depends on the padding");
    assert!(why.contains("behind the mask"), "{why}");
}

#[test]
fn a_model_whose_batches_do_not_pay_is_not_padded() {
    let why = Bench::new(true, false, None).check().expect_err("it gains nothing");
    assert!(why.contains("of a request alone"), "{why}");
}

#[test]
fn requests_of_different_lengths_share_a_batch_and_get_their_own_outputs() {
    let bench = Bench::new(true, true, None);
    let checked = bench.check().expect("it can be padded");
    assert_eq!(checked.max_length(), 64, "the model has {POSITIONS} positions");
    bench.node.set_padding(bench.model, Some(checked));
    let mut random = Random::new(9);
    let mut sentence =
        |length: u64| -> Vec<i64> { (0..length).map(|_| random.below(30_000) as i64).collect() };
    let held = bench.held.lock().unwrap();
    let sentences: Vec<Vec<i64>> = (0..40u64).map(|number| sentence(1 + number % 16)).collect();
    let replies: Vec<_> = sentences.iter().map(|tokens| bench.submit(tokens)).collect();
    drop(held);
    for (reply, tokens) in replies.iter().zip(&sentences) {
        assert_right(reply, tokens);
    }
    let shapes = bench.program.shapes.lock().unwrap().clone();
    // The first one found nobody to share with and ran at its own length.
    let own = shapes.iter().filter(|(_, length)| ![8, 16].contains(length)).count();
    assert!(own <= 1, "{shapes:?}");
    assert!(shapes.len() < 20, "40 requests ran as {} tasks: {shapes:?}", shapes.len());
}

#[test]
fn a_request_alone_is_padded_only_to_a_length_that_saves_preparation() {
    let bench = Bench::new(true, true, None);
    bench.node.set_padding(bench.model, Some(bench.check().unwrap()));
    assert_right(&bench.submit(&[5, 6, 7]), &[5, 6, 7]);
    assert_eq!(*bench.program.shapes.lock().unwrap(), [(1, 3)]);
    let all = (1..=128).filter(|length| length % 8 == 0 || *length < 80).collect();
    let full = Bench::new(true, true, Some(all));
    let checked = full.check().unwrap();
    let prepared = BTreeSet::from([8, 16, 24, 32]);
    let bench = Bench::new(true, true, Some(prepared));
    bench.node.set_padding(bench.model, Some(checked));
    assert_right(&bench.submit(&[5, 6, 7]), &[5, 6, 7]);
    assert_eq!(*bench.program.shapes.lock().unwrap(), [(1, 8)]);
    // Longer than what was checked: at its own length, whatever it costs.
    let long: Vec<i64> = (0..66).collect();
    assert_right(&bench.submit(&long), &long);
    assert_eq!(bench.program.shapes.lock().unwrap()[1], (1, 66));
}
