//! A node with more models than memory, with threads: a device that sleeps, and weights that are
//! loaded and evicted.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::{Bytes, Clock, MonotonicClock, Nanos, Random};
use device::paged::{PagedDevice, PagedDeviceOptions};
use device::{
    Completion, CompletionSink, Device, DeviceError, DeviceInfo, Outcome, PreemptionLevel, Program,
    Queue, QueueOptions, Segment, Task,
};
use model::config::{Class, ModelConfig};
use model::{LaunchPlan, Tensor};

use crate::core::{Action, Event};
use crate::node::{ModelKey, Node, NodeOptions, Observer, Rejection, Request};

const STEPS: usize = 4;
const STEP: Duration = Duration::from_micros(50);
const MIB: u64 = 1 << 20;

/// Limit of every wait.
const LIMIT: Nanos = Nanos::from_millis(10_000);

/// A device that sleeps.
struct Sleeper(DeviceInfo);

struct SleeperQueue {
    segments: SyncSender<Segment>,
    preemptions: Arc<AtomicU64>,
}

struct SleeperProgram(Arc<LaunchPlan>);

struct SleeperTask(usize);

impl Device for Sleeper {
    fn info(&self) -> &DeviceInfo {
        &self.0
    }

    fn unsupported_steps(&self, _: &LaunchPlan) -> Vec<DeviceError> {
        Vec::new()
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        Ok(Arc::new(SleeperProgram(plan)))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        let (segments, receiver) = sync_channel(options.capacity.max(1));
        let preemptions = Arc::new(AtomicU64::new(0));
        let seen = preemptions.clone();
        std::thread::spawn(move || work(options.id, &receiver, &seen, &*sink));
        Ok(Box::new(SleeperQueue { segments, preemptions }))
    }
}

fn work(
    queue: u32,
    segments: &Receiver<Segment>,
    preemptions: &AtomicU64,
    sink: &dyn CompletionSink,
) {
    let clock = MonotonicClock::new();
    let mut heard = 0;
    for Segment { token, mut task, steps } in segments {
        let began = clock.now();
        let own = task.as_any_mut().downcast_mut::<SleeperTask>().expect("a task of this device");
        let mut outcome = Outcome::Done;
        while own.0 < steps.end {
            let now = preemptions.load(Ordering::SeqCst);
            if now != heard {
                heard = now;
                outcome = Outcome::Preempted;
                break;
            }
            std::thread::sleep(STEP);
            own.0 += 1;
        }
        let busy = clock.now() - began;
        sink.complete(Completion { queue, token, task, outcome, busy });
    }
}

impl Queue for SleeperQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.segments.try_send(segment).map_err(|err| match err {
            std::sync::mpsc::TrySendError::Full(segment)
            | std::sync::mpsc::TrySendError::Disconnected(segment) => segment,
        })
    }

    fn preempt(&self) {
        self.preemptions.fetch_add(1, Ordering::SeqCst);
    }
}

impl Program for SleeperProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.0
    }

    fn resident(&self) -> Bytes {
        Bytes(0)
    }

    fn prepare(&self, _: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        Ok(Box::new(SleeperTask(0)))
    }
}

impl Task for SleeperTask {
    fn step_count(&self) -> usize {
        STEPS
    }

    fn next_step(&self) -> usize {
        self.0
    }

    fn record_step_times(&mut self) {}

    fn step_times(&self) -> Option<&[Nanos]> {
        None
    }

    fn into_outputs(self: Box<Self>) -> Result<Vec<Tensor>, DeviceError> {
        match self.0 {
            STEPS => Ok(Vec::new()),
            step => Err(DeviceError::BadPlan(format!("outputs at step {step}"))),
        }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Counts loads and evictions.
#[derive(Default)]
struct Orders(Mutex<(u64, u64)>);

impl Observer for Orders {
    fn event(&self, _: Nanos, _: &Event) {}

    fn action(&self, _: Nanos, action: &Action) {
        let mut orders = self.0.lock().unwrap();
        match action {
            Action::Load { .. } => orders.0 += 1,
            Action::Evict { .. } => orders.1 += 1,
            _ => {}
        }
    }
}

struct Scene {
    device: Arc<PagedDevice>,
    node: Node,
    orders: Arc<Orders>,
}

impl Scene {
    /// A node with a budget of `budget` MiB on a device of `memory` MiB.
    fn new(budget: u64, memory: u64, preemption: PreemptionLevel, queues: usize) -> Scene {
        let info = DeviceInfo {
            name: "sleeper".to_string(),
            description: String::new(),
            preemption,
            memory: Bytes(memory * MIB),
            queues,
            rounding: 0.0,
        };
        let options = PagedDeviceOptions {
            memory: Bytes(memory * MIB),
            bytes_per_second: 20_000 * MIB,
            runnable_percent: 50,
            added: Bytes(0),
        };
        let device = Arc::new(PagedDevice::new(Arc::new(Sleeper(info)), options).unwrap());
        let orders = Arc::new(Orders::default());
        let node_options = NodeOptions {
            memory: Some(Bytes(budget * MIB)),
            observer: Some(orders.clone()),
            ..NodeOptions::default()
        };
        let clock = Arc::new(MonotonicClock::new());
        let node = Node::start(device.clone(), node_options, clock).unwrap();
        Scene { device, node, orders }
    }

    fn add(&self, mib: u64, config: &ModelConfig) -> ModelKey {
        let program = Arc::new(SleeperProgram(Arc::default()));
        self.node.add_model(self.device.wrap(program, Bytes(mib * MIB)), config)
    }

    fn infer(&self, model: ModelKey, class: Class) -> Result<Vec<Tensor>, Rejection> {
        let (sender, receiver) = sync_channel(1);
        let request = Request {
            model,
            inputs: Vec::new(),
            class: Some(class),
            priority: None,
            timeout: None,
        };
        self.node.submit(request, Box::new(move |reply| sender.send(reply).unwrap()));
        receiver.recv_timeout(Duration::from_secs(20)).expect("a reply").result
    }

    /// Removes all models and checks that the memory is free.
    fn finish(self, models: &[ModelKey]) {
        for model in models {
            self.node.remove_model(*model);
        }
        let clock = MonotonicClock::new();
        let used = || self.device.memory_use().unwrap().weights;
        while used() > Bytes(0) || self.node.memory().held > Bytes(0) {
            assert!(clock.now() < LIMIT, "{} are still there", used());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(self.device.violations(), 0);
    }
}

fn class_of(number: u64) -> Class {
    if number.is_multiple_of(3) { Class::RealTime } else { Class::BestEffort }
}

#[test]
fn many_models_share_little_memory() {
    for (preemption, queues) in
        [(PreemptionLevel::BetweenLaunches, 2), (PreemptionLevel::InsideTile, 4)]
    {
        let scene = Scene::new(40, 64, preemption, queues);
        let models: Vec<ModelKey> =
            (0..12).map(|n| scene.add(6 + n % 5, &ModelConfig::default())).collect();
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for client in 0..8 {
                let (scene, models, done) = (&scene, &models, &done);
                scope.spawn(move || {
                    let mut random = Random::new(client);
                    for _ in 0..100 {
                        let model = models[random.below(12) as usize];
                        let reply = scene.infer(model, class_of(random.below(9)));
                        assert_eq!(reply, Ok(Vec::new()));
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(done.into_inner(), 800);
        assert!(scene.device.max_held() <= Bytes(40 * MIB), "{}", scene.device.max_held());
        // The load may not be complete: a task starts before all weights are there.
        let clock = MonotonicClock::new();
        let orders = scene.orders.0.lock().unwrap().0;
        while scene.node.memory().swaps.loads < orders && clock.now() < LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
        let memory = scene.node.memory();
        assert!(memory.swaps.loads > 20 && memory.swaps.evictions > 10, "{:?}", memory.swaps);
        assert_eq!(memory.swaps.loads, orders);
        assert_eq!(memory.held, scene.device.memory_use().unwrap().weights);
        scene.finish(&models);
    }
}

#[test]
fn retries_loads_when_the_device_has_less_memory() {
    let scene = Scene::new(100, 20, PreemptionLevel::BetweenLaunches, 2);
    let models: Vec<ModelKey> = (0..6).map(|_| scene.add(8, &ModelConfig::default())).collect();
    for round in 0..12 {
        assert_eq!(scene.infer(models[round % 6], class_of(round as u64)), Ok(Vec::new()));
    }
    assert!(scene.node.memory().swaps.refused > 0, "it was never refused");
    scene.finish(&models);
}

#[test]
fn pinned_models_stay_and_oversized_models_are_refused() {
    let scene = Scene::new(40, 64, PreemptionLevel::BetweenLaunches, 2);
    let pinned = scene.add(20, &ModelConfig { pinned: true, ..ModelConfig::default() });
    let others: Vec<ModelKey> = (0..4).map(|_| scene.add(10, &ModelConfig::default())).collect();
    let large = scene.add(30, &ModelConfig::default());
    for round in 0..12 {
        assert_eq!(scene.infer(others[round % 4], Class::BestEffort), Ok(Vec::new()));
    }
    assert!(scene.node.is_resident(pinned));
    let refused = scene.infer(large, Class::RealTime);
    let device = "sleeper".to_string();
    let (needed, available) = (Bytes(30 * MIB), Bytes(20 * MIB));
    let why = DeviceError::OutOfMemory { device, needed, available };
    assert_eq!(refused, Err(Rejection::Device(why)));
    let mut all = others;
    all.extend([pinned, large]);
    scene.finish(&all);
}

#[test]
fn preload_stops_when_memory_is_full() {
    let scene = Scene::new(40, 64, PreemptionLevel::BetweenLaunches, 2);
    let models: Vec<ModelKey> = (0..6).map(|_| scene.add(12, &ModelConfig::default())).collect();
    models.iter().for_each(|model| scene.node.preload(*model));
    let clock = MonotonicClock::new();
    while !models[..3].iter().all(|model| scene.node.is_resident(*model)) {
        assert!(clock.now() < LIMIT, "they are not loaded");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!models[3..].iter().any(|model| scene.node.is_resident(*model)));
    assert_eq!(scene.node.memory().swaps.evictions, 0);
    scene.finish(&models);
}

#[test]
fn removes_a_model_while_it_loads() {
    let scene = Scene::new(200, 400, PreemptionLevel::BetweenLaunches, 2);
    let mut replies = Vec::new();
    for round in 0..30 {
        let model = scene.add(100, &ModelConfig::default());
        scene.node.preload(model);
        let (sender, receiver) = sync_channel(1);
        if round % 2 == 0 {
            let request = Request {
                model,
                inputs: Vec::new(),
                class: None,
                priority: None,
                timeout: Some(Nanos::from_millis(120_000)),
            };
            let handle =
                scene.node.submit(request, Box::new(move |reply| sender.send(reply).unwrap()));
            if round % 4 == 0 {
                handle.cancel();
            }
            replies.push(receiver);
        }
        scene.node.remove_model(model);
    }
    for reply in replies {
        let reply = reply.recv_timeout(Duration::from_secs(20)).expect("a reply");
        let fine = matches!(reply.result, Ok(_) | Err(Rejection::Cancelled));
        assert!(fine, "{:?}", reply.result);
    }
    scene.finish(&[]);
}
