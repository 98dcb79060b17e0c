use std::any::Any;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use base::{Bytes, Clock, MonotonicClock, Random};
use device::{Completion, Outcome, PreemptionLevel, Task};
use model::{DataType, Tensor, ValueInfo};

use super::super::{DeviceGroup, DeviceGroupOptions};
use super::*;
use crate::node::{Reply, Request};

/// Much longer than a recovery takes, and much shorter than a test may.
const LONG: Duration = Duration::from_secs(20);

/// What survives when a device is opened again.
#[derive(Default)]
struct Hardware {
    /// Segments never end.
    hangs: AtomicBool,
    /// They make progress all the same.
    progresses: AtomicBool,
    progress: AtomicUsize,
    /// Only a new process could open it.
    refused: AtomicBool,
    /// Attempts to open it that fail.
    closed: AtomicUsize,
    opened: AtomicUsize,
    /// Devices that were not dropped.
    alive: AtomicUsize,
    /// A device cannot be dropped meanwhile, as one whose kernel hangs.
    held: AtomicBool,
    loads: Mutex<Vec<String>>,
}

/// A device that returns its inputs, until it breaks.
struct Breakable {
    info: DeviceInfo,
    hardware: Arc<Hardware>,
    broken: Arc<Mutex<Option<String>>>,
}

impl Drop for Breakable {
    fn drop(&mut self) {
        while self.hardware.held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.hardware.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Breakable {
    fn error(&self) -> Option<DeviceError> {
        faulted(&self.broken)
    }
}

fn faulted(broken: &Mutex<Option<String>>) -> Option<DeviceError> {
    let reason = broken.lock().unwrap().clone()?;
    Some(DeviceError::Faulted { device: "breakable".to_string(), reason })
}

struct Copy {
    inputs: Vec<Tensor>,
    next: usize,
}

impl Task for Copy {
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
        Ok(self.inputs)
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

struct CopyProgram {
    plan: Arc<LaunchPlan>,
    broken: Arc<Mutex<Option<String>>>,
}

impl Program for CopyProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.plan
    }

    fn resident(&self) -> Bytes {
        Bytes(0)
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        match faulted(&self.broken) {
            Some(fault) => Err(fault),
            None => Ok(Box::new(Copy { inputs, next: 0 })),
        }
    }
}

struct CopyQueue {
    work: Sender<Segment>,
    hardware: Arc<Hardware>,
}

impl Queue for CopyQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        self.work.send(segment).map_err(|unsent| unsent.0)
    }

    fn preempt(&self) {}

    fn progress(&self) -> u64 {
        let steps = usize::from(self.hardware.progresses.load(Ordering::SeqCst));
        self.hardware.progress.fetch_add(steps, Ordering::SeqCst) as u64
    }
}

impl Device for Breakable {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn unsupported_steps(&self, _: &LaunchPlan) -> Vec<DeviceError> {
        Vec::new()
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        if let Some(fault) = self.error() {
            return Err(fault);
        }
        self.hardware
            .loads
            .lock()
            .unwrap()
            .push(plan.values.first().map_or_else(String::new, |value| value.name.clone()));
        Ok(Arc::new(CopyProgram { plan, broken: self.broken.clone() }))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        let (work, segments) = channel::<Segment>();
        let (hardware, broken) = (self.hardware.clone(), self.broken.clone());
        std::thread::spawn(move || {
            while let Ok(Segment { token, mut task, .. }) = segments.recv() {
                while hardware.hangs.load(Ordering::SeqCst) && faulted(&broken).is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let outcome = match faulted(&broken) {
                    Some(fault) => Outcome::Failed(fault),
                    None => Outcome::Done,
                };
                task.as_any_mut().downcast_mut::<Copy>().unwrap().next = 1;
                let (queue, busy) = (options.id, Nanos(1));
                sink.complete(Completion { queue, token, task, outcome, busy });
            }
        });
        Ok(Box::new(CopyQueue { work, hardware: self.hardware.clone() }))
    }

    fn fault(&self) -> Option<DeviceError> {
        self.error()
    }

    fn give_up(&self, reason: &str) {
        self.broken.lock().unwrap().get_or_insert_with(|| reason.to_string());
    }
}

fn open(
    hardware: &Arc<Hardware>,
    clock: &Arc<MonotonicClock>,
    options: &NodeOptions,
) -> Result<Node, DeviceError> {
    let closed = hardware
        .closed
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(1)));
    let device = "breakable".to_string();
    if closed.unwrap() > 0 || hardware.alive.load(Ordering::SeqCst) > 0 {
        let reason = "it is still closed".to_string();
        return Err(DeviceError::Faulted { device, reason });
    }
    hardware.alive.fetch_add(1, Ordering::SeqCst);
    hardware.opened.fetch_add(1, Ordering::SeqCst);
    let info = DeviceInfo {
        name: device.clone(),
        description: device,
        preemption: PreemptionLevel::BetweenLaunches,
        memory: Bytes(1 << 30),
        queues: 2,
        rounding: 0.0,
    };
    let (hardware, broken) = (hardware.clone(), Arc::default());
    let device = Arc::new(Breakable { info, hardware, broken });
    Node::start(device, options.clone(), clock.clone()).map_err(|err| match err {
        crate::NodeError::Device(err) => err,
        other => panic!("{other}"),
    })
}

struct Bench {
    group: DeviceGroup,
    hardware: Vec<Arc<Hardware>>,
}

impl Bench {
    /// A group of `count` devices, each a fault domain of its own.
    fn new(count: usize, options: &NodeOptions) -> Bench {
        let clock = Arc::new(MonotonicClock::new());
        let hardware: Vec<Arc<Hardware>> = (0..count).map(|_| Arc::default()).collect();
        let start = |h: &Arc<Hardware>| Arc::new(open(h, &clock, options).unwrap());
        let nodes = hardware.iter().map(start).collect();
        let domain = |(index, hardware): (usize, &Arc<Hardware>)| {
            let (hardware, clock, options) = (hardware.clone(), clock.clone(), options.clone());
            let open = move || {
                if hardware.refused.load(Ordering::SeqCst) {
                    return Err(ReopenError::OnlyNewProcess("on purpose".to_string()));
                }
                let opened = open(&hardware, &clock, &options).map(|node| vec![node]);
                opened.map_err(ReopenError::NotYet)
            };
            FaultDomain { devices: index..index + 1, open: Box::new(open) }
        };
        let domains = hardware.iter().enumerate().map(domain).collect();
        let group = DeviceGroup::start_with(nodes, DeviceGroupOptions::default(), domains);
        Bench { group: group.unwrap(), hardware }
    }

    fn wait_lost(&self, device: usize) {
        let clock = MonotonicClock::new();
        while !self.group.recoveries(device).lost {
            assert!(clock.now() < Nanos::from_millis(10_000), "the device is not given up");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn add(&self, name: &str, class: Class) -> GroupModelId {
        // A plan has no name; its first value tells it from others.
        let (name, dtype, shape) = (name.to_string(), DataType::F32, None);
        let values = vec![ValueInfo { name, dtype, shape }];
        let plan = Arc::new(LaunchPlan { values, ..LaunchPlan::default() });
        let placed = self.group.load(plan).unwrap();
        self.group.add_model(placed, &ModelConfig { class, ..ModelConfig::default() })
    }

    fn submit(&self, model: GroupModelId, value: f32) -> Receiver<Reply> {
        let (sender, receiver) = channel();
        let inputs = vec![Tensor::from_vec(vec![1], vec![value]).unwrap()];
        let request = Request { model, inputs, class: None, priority: None, timeout: None };
        self.group.submit(request, Box::new(move |reply| sender.send(reply).unwrap()));
        receiver
    }

    /// Submits until an answer comes that is no fault; how many were refused.
    fn until_served(&self, model: GroupModelId, value: f32) -> usize {
        let clock = MonotonicClock::new();
        for refused in 0.. {
            let reply = self.submit(model, value).recv_timeout(LONG).expect("an answer");
            match reply.result {
                Ok(outputs) => {
                    assert_eq!(outputs[0].to_vec::<f32>().unwrap(), [value]);
                    return refused;
                }
                Err(Rejection::Device(DeviceError::Faulted { .. })) => {}
                Err(other) => panic!("{other}"),
            }
            assert!(clock.now() < Nanos::from(LONG), "the device did not come back");
            std::thread::sleep(Duration::from_millis(5));
        }
        unreachable!()
    }

    fn break_device(&self, device: usize) {
        self.group.node(device).device().give_up("broken by the test");
    }

    fn wait_recovered(&self, device: usize, times: u64) {
        let clock = MonotonicClock::new();
        while self.group.recoveries(device).recovered < times {
            assert!(clock.now() < Nanos::from(LONG), "{:?}", self.group.recoveries(device));
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn a_faulted_device_serves_again_with_all_its_models() {
    let bench = Bench::new(1, &NodeOptions::default());
    let background = bench.add("background", Class::BestEffort);
    let idle = bench.add("idle", Class::BestEffort);
    let urgent = bench.add("urgent", Class::RealTime);
    for value in 0..10 {
        assert_eq!(bench.until_served(background, value as f32), 0);
    }
    bench.hardware[0].closed.store(3, Ordering::SeqCst);
    bench.hardware[0].loads.lock().unwrap().clear();
    bench.break_device(0);
    bench.until_served(urgent, 1.0);
    bench.until_served(background, 2.0);
    bench.until_served(idle, 3.0);
    // Real time first, then what was used most.
    assert_eq!(*bench.hardware[0].loads.lock().unwrap(), ["urgent", "background", "idle"]);
    assert_eq!(bench.hardware[0].opened.load(Ordering::SeqCst), 2);
    bench.wait_recovered(0, 1);
    let counts = bench.group.recoveries(0);
    assert_eq!((counts.faults, counts.recovered, counts.since), (1, 1, None));
    assert!(counts.out_of_service > Nanos::ZERO);
    // Counters go on.
    let (view, key) = bench.group.replicas(background)[0];
    assert_eq!(bench.group.node(view.device).stats(key).unwrap().success, 11);
}

#[test]
fn a_device_that_only_a_new_process_can_open_stays_out_of_service() {
    let bench = Bench::new(2, &NodeOptions::default());
    let model = bench.add("model", Class::RealTime);
    let home = bench.until_served(model, 1.0);
    let other = 1 - home;
    bench.hardware[home].refused.store(true, Ordering::SeqCst);
    bench.break_device(home);
    bench.wait_lost(home);
    assert!(!bench.group.is_lost(), "another device is left");
    let earlier = RecoveryCounts { faults: 4, recovered: 3, ..RecoveryCounts::default() };
    bench.group.restore_recoveries(other, earlier);
    bench.hardware[other].refused.store(true, Ordering::SeqCst);
    bench.break_device(other);
    bench.wait_lost(other);
    assert!(bench.group.is_lost());
    let counts = bench.group.recoveries(other);
    assert_eq!((counts.faults, counts.recovered, counts.lost), (5, 3, true));
    let reply = bench.submit(model, 2.0).recv_timeout(LONG).expect("an answer").result;
    assert!(matches!(reply, Err(Rejection::Device(DeviceError::Faulted { .. }))));
}

#[test]
fn nothing_waits_for_a_device_that_cannot_be_closed() {
    let bench = Bench::new(1, &NodeOptions::default());
    let model = bench.add("model", Class::RealTime);
    bench.until_served(model, 1.0);
    let hardware = &bench.hardware[0];
    hardware.held.store(true, Ordering::SeqCst);
    hardware.refused.store(true, Ordering::SeqCst);
    bench.break_device(0);
    bench.wait_lost(0);
    assert_eq!(hardware.alive.load(Ordering::SeqCst), 1, "it is still being closed");
    hardware.held.store(false, Ordering::SeqCst);
}

#[test]
fn a_device_that_hangs_is_given_up_and_all_pending_requests_are_answered() {
    let watchdog = Some(Nanos::from_millis(100));
    let bench = Bench::new(1, &NodeOptions { watchdog, ..NodeOptions::default() });
    let model = bench.add("model", Class::RealTime);
    bench.hardware[0].hangs.store(true, Ordering::SeqCst);
    let pending: Vec<_> = (0..50).map(|value| bench.submit(model, value as f32)).collect();
    for reply in pending {
        let reply = reply.recv_timeout(LONG).expect("an answer").result;
        assert!(matches!(reply, Err(Rejection::Device(DeviceError::Faulted { .. }))), "{reply:?}");
    }
    bench.hardware[0].hangs.store(false, Ordering::SeqCst);
    bench.until_served(model, 7.0);
}

#[test]
fn a_run_that_makes_progress_may_take_long() {
    let watchdog = Some(Nanos::from_millis(20));
    let bench = Bench::new(1, &NodeOptions { watchdog, ..NodeOptions::default() });
    let model = bench.add("model", Class::BestEffort);
    bench.hardware[0].progresses.store(true, Ordering::SeqCst);
    bench.hardware[0].hangs.store(true, Ordering::SeqCst);
    let answer = bench.submit(model, 5.0);
    // Many times the limit.
    assert!(answer.recv_timeout(Duration::from_millis(400)).is_err());
    bench.hardware[0].hangs.store(false, Ordering::SeqCst);
    let outputs = answer.recv_timeout(LONG).unwrap().result.unwrap();
    assert_eq!(outputs[0].to_vec::<f32>().unwrap(), [5.0]);
    assert_eq!(bench.group.recoveries(0).faults, 0);
}

#[test]
fn faults_in_a_row_lose_no_request_and_answer_none_twice() {
    let bench = Arc::new(Bench::new(1, &NodeOptions::default()));
    let models = [bench.add("a", Class::RealTime), bench.add("b", Class::BestEffort)];
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = models
        .into_iter()
        .map(|model| {
            let (bench, stop) = (bench.clone(), stop.clone());
            std::thread::spawn(move || {
                let mut served = 0u32;
                while !stop.load(Ordering::SeqCst) {
                    let answer = bench.submit(model, served as f32);
                    let reply = answer.recv_timeout(LONG).expect("an answer");
                    if let Ok(outputs) = reply.result {
                        assert_eq!(outputs[0].to_vec::<f32>().unwrap(), [served as f32]);
                        served += 1;
                    }
                    // A second answer would have been sent, and its sender is gone.
                    assert!(answer.recv().is_err());
                }
                served
            })
        })
        .collect();
    let mut random = Random::new(11);
    for fault in 1..=10 {
        std::thread::sleep(Duration::from_millis(random.below(20)));
        bench.break_device(0);
        bench.wait_recovered(0, fault);
    }
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        assert!(client.join().unwrap() > 10);
    }
}

#[test]
fn a_fault_does_not_touch_other_devices() {
    let bench = Bench::new(2, &NodeOptions::default());
    let models = [bench.add("first", Class::RealTime), bench.add("second", Class::RealTime)];
    let home = |model| bench.group.replicas(model)[0].0.device;
    assert_ne!(home(models[0]), home(models[1]));
    let broken = home(models[0]);
    let other = bench.group.node(home(models[1]));
    bench.hardware[broken].closed.store(5, Ordering::SeqCst);
    bench.break_device(broken);
    for value in 0..100 {
        let reply = bench.submit(models[1], value as f32).recv_timeout(LONG).unwrap();
        assert!(reply.result.is_ok(), "{:?}", reply.result);
    }
    bench.until_served(models[0], 1.0);
    assert!(Arc::ptr_eq(&other, &bench.group.node(home(models[1]))));
    assert_eq!(bench.group.recoveries(home(models[1])).faults, 0);
}

#[test]
fn a_model_that_was_loaded_before_the_fault_is_loaded_again() {
    let bench = Bench::new(1, &NodeOptions::default());
    let placed = bench.group.load(Arc::default()).unwrap();
    bench.break_device(0);
    bench.wait_recovered(0, 1);
    let model = bench.group.add_model(placed, &ModelConfig::default());
    bench.until_served(model, 4.0);
}

#[test]
fn a_model_removed_during_the_recovery_stays_away() {
    let bench = Bench::new(1, &NodeOptions::default());
    let (gone, kept) = (bench.add("gone", Class::RealTime), bench.add("kept", Class::RealTime));
    bench.hardware[0].closed.store(4, Ordering::SeqCst);
    bench.break_device(0);
    let clock = MonotonicClock::new();
    while bench.group.recoveries(0).faults == 0 {
        assert!(clock.now() < Nanos::from(LONG));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!bench.group.is_loaded(gone));
    assert!(bench.group.remove_model(gone));
    bench.until_served(kept, 1.0);
    let reply = bench.submit(gone, 1.0).recv_timeout(LONG).unwrap();
    assert!(matches!(reply.result, Err(Rejection::NoSuchModel)));
}
