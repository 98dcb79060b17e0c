//! The engine alone: the server's device group in this process, with requests from threads.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use assembly::device_group::OnFault;
use assembly::{DeviceArgs, Failure, device_group, sample_inputs};
use base::Bytes;
use model::repository::Repository;
use model::{LaunchPlan, Tensor};
use runtime::device_group::router::GroupModelId;
use runtime::{DeviceGroup, NodeOptions, Reply, Request};

use super::report::{Measurement, ReplyStats, process_seconds};
use super::test_model::TestModel;
use super::window::MeasuredWindow;

/// One reply of so many is compared.
const SAMPLE: usize = 16;

/// What the arguments of `atoll serve` mean for the engine.
pub struct ServeSettings {
    /// The devices.
    pub device: DeviceArgs,
    /// GPU memory for weights, on each device.
    pub gpu_memory: Option<Bytes>,
    /// Options of each device's node.
    pub node: NodeOptions,
}

/// Parses arguments of `atoll serve`, without the name of the binary.
pub type ParseServeArguments = fn(&[String]) -> Result<ServeSettings, Failure>;

/// A model on the devices that a server would open.
pub(super) struct EngineUnderTest {
    pub(super) name: String,
    device_group: Arc<DeviceGroup>,
    key: GroupModelId,
    plan: Arc<LaunchPlan>,
}

impl EngineUnderTest {
    /// Loads the model in `path` as `atoll serve` with these settings would.
    pub(super) fn start(settings: &ServeSettings, path: &Path) -> Result<EngineUnderTest, Failure> {
        let repository = Repository::open(path).map_err(Failure::usage)?;
        let entries = repository.list().map_err(Failure::usage)?;
        let entry = entries.into_iter().next();
        let entry = entry.ok_or_else(|| Failure::usage("there is no model in this file"))?;
        let config = entry.config().map_err(Failure::usage)?;
        let ServeSettings { device, gpu_memory, node } = settings;
        let device_group =
            device_group::open_device_group(device, *gpu_memory, node, OnFault::Reopen)?;
        let placed = assembly::load_file(&device_group, path, &AtomicBool::new(false))
            .map_err(Failure::failed)?;
        let plan = placed.program.plan().clone();
        let key = device_group.add_model(placed, &config);
        device_group.preload(key);
        Ok(EngineUnderTest { name: entry.name, device_group, key, plan })
    }

    pub(super) fn plan(&self) -> &LaunchPlan {
        &self.plan
    }

    pub(super) fn description(&self) -> String {
        device_group::describe(&self.device_group)
    }

    /// Copies inputs to where the server would receive them.
    pub(super) fn in_host_pool(&self, inputs: Vec<Tensor>) -> Vec<Tensor> {
        sample_inputs::in_host_pool(self.device_group.host_pool(), inputs)
    }

    fn submit(&self, inputs: &[Tensor], reply: Box<dyn FnOnce(Reply) + Send>) {
        let (model, inputs) = (self.key, inputs.to_vec());
        let request = Request { model, inputs, class: None, priority: None, timeout: None };
        self.device_group.submit(request, reply);
    }

    /// The outputs of one request alone.
    pub(super) fn once(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, Failure> {
        let (sender, receiver) = channel();
        // The receiver waits below.
        self.submit(inputs, Box::new(move |reply| drop(sender.send(reply))));
        receiver.recv().map_err(Failure::failed)?.result.map_err(Failure::failed)
    }

    /// Keeps `clients` requests in flight from `threads` threads.
    pub(super) fn run(
        &self,
        test_model: &TestModel,
        window: MeasuredWindow,
        clients: usize,
        threads: usize,
    ) -> Result<Measurement, Failure> {
        let threads = threads.min(clients);
        let start = Instant::now();
        let share = |thread: usize| clients / threads + usize::from(thread < clients % threads);
        std::thread::scope(|scope| {
            let spawn = |thread| {
                let max = share(thread);
                scope.spawn(move || self.keep_busy(test_model, (start, window), max, thread))
            };
            let sending: Vec<_> = (0..threads).map(spawn).collect();
            std::thread::sleep(window.ramp);
            let (used, began) = (process_seconds(None), Instant::now());
            std::thread::sleep(window.counted);
            let cores = (process_seconds(None) - used) / began.elapsed().as_secs_f64();
            let mut stats = ReplyStats::new(start, window);
            for thread in sending {
                let done = thread.join().map_err(|_| Failure::failed("a client panicked"))?;
                stats.add(done?);
            }
            Ok(Measurement { server_cores: cores, ..stats.finish() })
        })
    }

    fn keep_busy(
        &self,
        test_model: &TestModel,
        (start, window): (Instant, MeasuredWindow),
        max: usize,
        first: usize,
    ) -> Result<ReplyStats, Failure> {
        let end = start + window.ramp + window.counted;
        let (sender, receiver) = channel();
        let mut stats = ReplyStats::new(start, window);
        let (mut next, mut in_flight) = (first, 0);
        while in_flight > 0 || Instant::now() < end {
            while in_flight < max && Instant::now() < end {
                self.send(test_model, next % test_model.inputs.len(), &sender);
                (next, in_flight) = (next + 1, in_flight + 1);
            }
            let received: EngineReply = receiver.recv().map_err(Failure::failed)?;
            in_flight -= 1;
            let EngineReply { index, sent, replied, reply } = received;
            let outputs = reply.result.map_err(Failure::failed)?;
            if reply.timing.first {
                stats.batch(reply.timing.rows.max(1), replied);
            }
            let raw: Vec<&[u8]> =
                outputs.iter().flat_map(|o| o.raw()).map(|raw| &raw[..]).collect();
            let checked = stats.due_for_check(SAMPLE);
            let right = !checked || test_model.is_expected(index, &raw);
            stats.record(sent, replied, checked, right);
        }
        Ok(stats)
    }

    fn send(&self, test_model: &TestModel, index: usize, sender: &Sender<EngineReply>) {
        let (sender, sent) = (sender.clone(), Instant::now());
        let reply = move |reply: Reply| {
            // The receiver is gone only when the run has failed.
            let _ = sender.send(EngineReply { index, sent, replied: Instant::now(), reply });
        };
        self.submit(&test_model.inputs[index], Box::new(reply));
    }
}

struct EngineReply {
    index: usize,
    sent: Instant,
    replied: Instant,
    reply: Reply,
}
