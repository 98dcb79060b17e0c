//! A device whose programs return their inputs after a delay or when allowed, and a repository of
//! such programs.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use api::RegisterRequest;
use base::{Bytes, Nanos};
use device::*;
use model::config::ModelConfig;
use model::op::{Op, Unary};
use model::{DataType, Dim, LaunchPlan, Step, Tensor, ValueId, ValueInfo};
use runtime::PlacedProgram;
use server::{KeptSettings, LoadError, LoadedModel, ModelLoader, RepositoryEntry};

/// A device on which every segment takes the same time and finishes only when allowed.
pub struct FakeDevice {
    info: DeviceInfo,
    delay: Duration,
    /// Whether segments may finish.
    open: Arc<AtomicBool>,
    /// Whether it is faulted.
    pub faulted: AtomicBool,
    /// What its tools report.
    pub readings: OnceLock<DeviceReadings>,
}

impl FakeDevice {
    pub fn new(delay: Duration) -> Arc<FakeDevice> {
        let info = DeviceInfo {
            name: "fake".into(),
            description: "waits".into(),
            preemption: PreemptionLevel::TileBoundaries,
            memory: Bytes(1 << 30),
            queues: 2,
            rounding: 0.0,
        };
        let open = Arc::new(AtomicBool::new(true));
        let faulted = AtomicBool::new(false);
        Arc::new(FakeDevice { info, delay, open, faulted, readings: OnceLock::new() })
    }

    /// A device on which segments finish only if preempted, until [`FakeDevice::open`] is called.
    pub fn closed() -> Arc<FakeDevice> {
        let device = FakeDevice::new(Duration::ZERO);
        device.open.store(false, Ordering::SeqCst);
        device
    }

    /// Lets segments finish.
    pub fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }
}

impl Device for FakeDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn fault(&self) -> Option<DeviceError> {
        let (device, reason) = ("fake".to_string(), "broken".to_string());
        let faulted = self.faulted.load(Ordering::SeqCst);
        faulted.then_some(DeviceError::Faulted { device, reason })
    }

    fn readings(&self) -> Option<DeviceReadings> {
        self.readings.get().cloned()
    }

    fn unsupported_steps(&self, _: &LaunchPlan) -> Vec<DeviceError> {
        Vec::new()
    }

    fn load(&self, plan: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        Ok(Arc::new(FakeProgram { plan, alive: Arc::default() }))
    }

    fn open_queue(
        &self,
        options: QueueOptions,
        sink: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        let (sender, receiver) = sync_channel(options.capacity.max(1));
        let preempted = Arc::new(AtomicU64::new(0));
        let end = End { delay: self.delay, open: self.open.clone(), preempted: preempted.clone() };
        std::thread::spawn(move || work(receiver, options.id, &end, sink));
        Ok(Box::new(FakeQueue { sender, preempted }))
    }
}

type Launched = (u64, Segment);

struct FakeQueue {
    sender: SyncSender<Launched>,
    preempted: Arc<AtomicU64>,
}

impl Queue for FakeQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        let epoch = self.preempted.load(Ordering::SeqCst);
        self.sender.try_send((epoch, segment)).map_err(|error| match error {
            TrySendError::Full((_, segment)) | TrySendError::Disconnected((_, segment)) => segment,
        })
    }

    fn preempt(&self) {
        self.preempted.fetch_add(1, Ordering::SeqCst);
    }
}

/// Conditions for a segment to finish.
struct End {
    delay: Duration,
    open: Arc<AtomicBool>,
    preempted: Arc<AtomicU64>,
}

fn work(receiver: Receiver<Launched>, queue: u32, end: &End, sink: Arc<dyn CompletionSink>) {
    for (epoch, Segment { token, mut task, steps }) in receiver {
        let started = Instant::now();
        let left = || end.preempted.load(Ordering::SeqCst) != epoch;
        let over = || started.elapsed() >= end.delay && end.open.load(Ordering::SeqCst);
        while !over() && !left() {
            std::thread::sleep(Duration::from_micros(200));
        }
        let done = over();
        if done && let Some(task) = task.as_any_mut().downcast_mut::<FakeTask>() {
            task.next = steps.end;
        }
        let outcome = if done { Outcome::Done } else { Outcome::Preempted };
        let busy = Nanos::from(started.elapsed());
        sink.complete(Completion { queue, token, task, outcome, busy });
    }
}

struct FakeProgram {
    plan: Arc<LaunchPlan>,
    alive: Arc<AtomicUsize>,
}

impl Drop for FakeProgram {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Program for FakeProgram {
    fn plan(&self) -> &Arc<LaunchPlan> {
        &self.plan
    }

    fn resident(&self) -> Bytes {
        Bytes(1000)
    }

    fn prepare(&self, inputs: Vec<Tensor>) -> Result<Box<dyn Task>, DeviceError> {
        check_inputs(&self.plan, &inputs)?;
        let (device, needed, memory) = ("fake".to_string(), Bytes(2 << 30), Bytes(1 << 30));
        match self.plan.steps[0].name.as_str() {
            "too_large" => return Err(DeviceError::TooLarge { device, needed, memory }),
            "no_room" => {
                let available = Bytes(1);
                return Err(DeviceError::OutOfMemory { device, needed, available });
            }
            _ => {}
        }
        Ok(Box::new(FakeTask { inputs, next: 0 }))
    }
}

struct FakeTask {
    inputs: Vec<Tensor>,
    next: usize,
}

impl Task for FakeTask {
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

fn plan(dims: &[Dim]) -> LaunchPlan {
    let value = |name: &str| ValueInfo {
        name: name.into(),
        dtype: DataType::F32,
        shape: Some(dims.to_vec()),
    };
    LaunchPlan {
        values: vec![value("x"), value("y")],
        constants: vec![],
        inputs: vec![ValueId(0)],
        outputs: vec![ValueId(1)],
        steps: vec![Step {
            name: "s".into(),
            op: Op::Unary(Unary::Relu),
            inputs: vec![Some(ValueId(0))],
            outputs: vec![Some(ValueId(1))],
            last_uses: vec![],
        }],
        warnings: Vec::new(),
    }
}

/// A repository in memory. `broken` never loads, `slow_to_load` only when allowed, `image` takes
/// images, `wide` long rows. Requests of `too_large` never fit the device, those of `no_room` not
/// now.
pub struct FakeLoader {
    models: Mutex<BTreeMap<(String, u64), ModelConfig>>,
    /// Number of programs in memory.
    pub programs_alive: Arc<AtomicUsize>,
    /// Whether `slow_to_load` may be loaded.
    pub open: AtomicBool,
}

impl FakeLoader {
    pub fn new(_: Arc<FakeDevice>) -> FakeLoader {
        FakeLoader {
            models: Mutex::default(),
            programs_alive: Arc::default(),
            open: AtomicBool::new(false),
        }
    }

    pub fn add(&self, name: &str, version: u64, config: ModelConfig) {
        self.models.lock().unwrap().insert((name.to_string(), version), config);
    }
}

impl ModelLoader for FakeLoader {
    fn load(
        &self,
        name: &str,
        version: Option<u64>,
        cancelled: &AtomicBool,
    ) -> Result<LoadedModel, LoadError> {
        let models = self.models.lock().unwrap().clone();
        let wanted = |(key, at): &&(String, u64)| key == name && version.is_none_or(|v| v == *at);
        let found = models.keys().rfind(wanted);
        let key = found.ok_or_else(|| LoadError::NotFound(format!("there is no '{name}'")))?;
        if name == "broken" {
            return Err(LoadError::Invalid("it is broken".into()));
        }
        while name == "slow_to_load" && !self.open.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
            server::check_cancelled(cancelled)?;
        }
        let dims = match name {
            "image" => [1, 3, 2, 2].map(Dim::Fixed).to_vec(),
            // A row of 256 KiB.
            "wide" => vec![Dim::Symbol("N".into()), Dim::Fixed(1 << 16)],
            _ => vec![Dim::Symbol("N".into()), Dim::Fixed(1)],
        };
        self.programs_alive.fetch_add(1, Ordering::SeqCst);
        let mut plan = plan(&dims);
        plan.steps[0].name = name.to_string();
        let program = FakeProgram { plan: plan.into(), alive: self.programs_alive.clone() };
        let config = models[key].clone();
        let placed = PlacedProgram { device: 0, program: Arc::new(program), faults: 0 };
        Ok(LoadedModel { placed, config, version: key.1 })
    }

    fn index(&self) -> Result<Vec<RepositoryEntry>, LoadError> {
        let models = self.models.lock().unwrap();
        let entry = |(name, version): &(String, u64)| RepositoryEntry {
            name: name.clone(),
            version: *version,
        };
        Ok(models.keys().map(entry).collect())
    }

    fn register(&self, request: RegisterRequest) -> Result<u64, LoadError> {
        let config = ModelConfig {
            labels: request.labels,
            preprocessing: request.preprocessing,
            slo_ms: request.slo_ms,
            ..ModelConfig::default()
        };
        self.add(&request.name, 1, config);
        Ok(1)
    }

    fn settings(&self, _: &str, _: u64) -> Result<ModelConfig, LoadError> {
        Ok(ModelConfig::default())
    }

    fn keep_settings(
        &self,
        name: &str,
        version: u64,
        config: &ModelConfig,
    ) -> Result<KeptSettings, LoadError> {
        self.add(name, version, config.clone());
        Ok(KeptSettings::InRegistry)
    }

    fn delete(&self, name: &str, version: Option<u64>) -> Result<usize, LoadError> {
        let mut models = self.models.lock().unwrap();
        let before = models.len();
        models.retain(|(key, at), _| key != name || version.is_some_and(|v| v != *at));
        Ok(before - models.len())
    }
}
