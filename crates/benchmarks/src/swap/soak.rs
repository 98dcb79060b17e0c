//! `atoll bench swap --soak N`: a whole server under random operations, and whether it releases all
//! memory.
//!
//! Clients load, unload, register and send requests at random. A load or registration waits until
//! the model is ready. Most requests are for loaded models; the others must be refused with the
//! documented error. After every round all models are unloaded and the device's memory is recorded
//! by kind: what grows from round to round is a leak.

mod model_states;
mod report;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use api::{
    ApiError, ErrorKind, InferOptions, InferRequest, InferenceService, Inputs, ModelRef,
    NamedTensor, RegisterRequest, RequestContext,
};
use assembly::demo_model::DIGITS_ONNX;
use assembly::device_group::device_group_on;
use assembly::progress::{self, Progress};
use assembly::{DiskLoader, Failure, tokio_runtime, write_file};
use base::{Bytes, Nanos, Random};
use bytes::Bytes as RawBytes;
use device::Device;
use model::Tensor;
use model::repository::Repository;
use model::store::Store;
use runtime::NodeOptions;
use server::LocalNode;

use self::model_states::{ModelName, ModelSource, ModelStates};
use self::report::{ExpectedResult, MemorySample, OperationStats, SoakReport};
use super::args::SwapArgs;
use super::device::SwappingDevice;
use crate::{environment, models};

/// Number of clients.
const CLIENTS: u64 = 64;

/// Rounds after the warm-up; all models are unloaded after each.
const ROUNDS: u64 = 4;

/// One of so many operations is warm-up.
const WARM_OF: u64 = 10;

/// Max time of one operation.
const LIMIT: Duration = Duration::from_secs(120);

/// Interval in which a client polls for a loaded model.
const WAIT: Duration = Duration::from_millis(1);

/// How long memory may take to be released.
const SETTLE: Duration = Duration::from_secs(10);

/// Inputs of a model, and its outputs.
struct ExpectedReply {
    inputs: Vec<NamedTensor>,
    expected: Vec<Tensor>,
}

struct SoakRun {
    service: LocalNode,
    networks: Vec<ExpectedReply>,
    digits: ExpectedReply,
    states: ModelStates,
    remaining: AtomicU64,
}

/// Runs `operations` and reports them.
pub(crate) fn run(
    args: &SwapArgs,
    opened: &SwappingDevice,
    operations: u64,
) -> Result<(), Failure> {
    let start = sample_memory(opened, "at the start");
    let folder = tempfile::tempdir().map_err(Failure::failed)?;
    let store = Store::open(folder.path()).map_err(Failure::failed)?;
    let repository = Repository::open(&args.models).map_err(Failure::usage)?;
    let device = opened.device.clone();
    let resident = args.resident.first().copied().map_or(4, u64::from);
    let budget = largest(args, &*device)? * resident;
    let options = NodeOptions { memory: Some(Bytes(budget)), ..NodeOptions::default() };
    let device_group = device_group_on(device, options)?;
    let loader = Arc::new(DiskLoader::new(device_group.clone(), vec![repository], Ok(store)));
    let service = LocalNode::new(device_group, loader);
    let mut report = SoakReport {
        device: opened.device.info().description.clone(),
        driver: environment::driver(&args.device),
        date: environment::today(),
        command: environment::command(),
        operations,
        clients: CLIENTS,
        budget_bytes: budget,
        rests: vec![start],
        ..SoakReport::default()
    };
    tokio_runtime()?.block_on(soak(args, opened, service, &mut report))?;
    let text = serde_json::to_string_pretty(&report).map_err(Failure::failed)? + "\n";
    match &args.json {
        Some(Some(path)) => write_file(path, &text)?,
        _ => print!("{text}"),
    }
    report.verdict().map_err(Failure::failed)
}

/// Bytes of the largest model's weights.
fn largest(args: &SwapArgs, device: &dyn Device) -> Result<u64, Failure> {
    let mut largest_bytes = 0;
    for name in &args.network {
        let path = args.models.join(format!("{name}.onnx"));
        let failed = |err: String| Failure::failed(format!("{}: {err}", path.display()));
        let plan = assembly::compile_file(&path).map_err(|err| failed(err.to_string()))?;
        let program = device.load(Arc::new(plan)).map_err(|err| failed(err.to_string()))?;
        largest_bytes =
            largest_bytes.max(program.residency().map_or(0, |weights| weights.bytes().0));
    }
    Ok(largest_bytes)
}

async fn soak(
    args: &SwapArgs,
    opened: &SwappingDevice,
    service: LocalNode,
    report: &mut SoakReport,
) -> Result<(), Failure> {
    service.set_started();
    let mut random = Random::new(args.seed);
    let mut networks = Vec::new();
    for name in &args.network {
        let path = args.models.join(format!("{name}.onnx"));
        let plan = assembly::compile_file(&path).map_err(Failure::failed)?;
        service.load_model(name).await.map_err(Failure::failed)?;
        networks.push(ExpectedReply::of(&service, name, &plan, &mut random).await?);
        service.unload_model(name).await.map_err(Failure::failed)?;
    }
    let plan = assembly::compile_bytes(DIGITS_ONNX).map_err(Failure::failed)?;
    register(&service, "registered-0").await.map_err(Failure::failed)?;
    let digits = ExpectedReply::of(&service, "registered-0", &plan, &mut random).await?;
    service.unload_model("registered-0").await.map_err(Failure::failed)?;
    let states = ModelStates::new(&args.network);
    let soak =
        Arc::new(SoakRun { service, networks, digits, states, remaining: AtomicU64::new(0) });
    let mut all = OperationStats::default();
    let began = Instant::now();
    let warm = report.operations / WARM_OF;
    let progress = Progress::new(ROUNDS + 1, "rounds");
    for round in 0..=ROUNDS {
        let done = warm + (report.operations - warm) * round / ROUNDS;
        let before =
            if round == 0 { 0 } else { warm + (report.operations - warm) * (round - 1) / ROUNDS };
        all.merge(soak.clone().round(args.seed ^ (round << 16), done - before).await?);
        let when = match round {
            0 => format!("after {done} operations of warm-up"),
            _ => format!("after {done} operations"),
        };
        report.rests.push(sample_memory(opened, &when));
        progress::note(&format!(
            "{when}: {:.0} s, {} wrong",
            began.elapsed().as_secs_f64(),
            all.wrong
        ));
        progress.advance();
    }
    report.seconds = began.elapsed().as_secs_f64();
    report.add(all);
    let swaps = soak.service.device_group().node(0).memory().swaps;
    (report.loads, report.evictions) = (swaps.loads, swaps.evictions);
    report.most_held_bytes = opened.device.memory_use().map_or(0, |used| used.max_weights.0);
    report.most_registered = soak.states.most_registered();
    opened.trim()?;
    report.rests.push(sample_memory(opened, "after what was kept for later was given back"));
    Ok(())
}

/// Memory in use while no model is loaded. Waits for memory to be released, because models are
/// freed after their last reply.
fn sample_memory(opened: &SwappingDevice, when: &str) -> MemorySample {
    let used = || opened.device.memory_use().unwrap_or_default();
    let since = Instant::now();
    while used().weights > Bytes(0) && since.elapsed() < SETTLE {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Unmapped memory is released a moment later.
    std::thread::sleep(Duration::from_millis(200));
    MemorySample {
        when: when.to_string(),
        weights_bytes: used().weights.0,
        system_bytes: used().system.map(|bytes| bytes.0),
        process_bytes: environment::process_bytes(),
        holdings: opened.memory_report(),
    }
}

/// How far outputs may differ from those of the same model undisturbed, relative to their norm:
/// batches round differently. Outputs of other models differ far more.
const ROUNDING: f64 = 0.05;

fn is_close(got: &[Tensor], want: &[Tensor]) -> bool {
    let numbers = |tensors: &[Tensor]| -> Vec<f32> {
        tensors.iter().filter_map(Tensor::to_vec::<f32>).flatten().collect()
    };
    let (got, want) = (numbers(got), numbers(want));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let pairs = got.iter().zip(&want);
    let apart = norm(&mut pairs.map(|(got, want)| f64::from(*got) - f64::from(*want)));
    let size = norm(&mut want.iter().map(|want| f64::from(*want)));
    got.len() == want.len() && apart <= ROUNDING * size
}

impl ExpectedReply {
    /// The outputs of a loaded model.
    async fn of(
        service: &LocalNode,
        name: &str,
        plan: &model::LaunchPlan,
        random: &mut Random,
    ) -> Result<ExpectedReply, Failure> {
        let tensors = models::random_inputs(plan, random).map_err(Failure::failed)?;
        let names = plan.inputs.iter().map(|id| plan.value(*id).name.as_str().into());
        let inputs =
            names.zip(tensors).map(|(name, tensor)| NamedTensor { name, tensor }).collect();
        let mut expected_reply = ExpectedReply { inputs, expected: Vec::new() };
        expected_reply.expected =
            expected_reply.request_reply(service, name).await.map_err(Failure::failed)?;
        Ok(expected_reply)
    }

    async fn request_reply(
        &self,
        service: &LocalNode,
        name: &str,
    ) -> Result<Vec<Tensor>, ApiError> {
        let request = InferRequest {
            id: String::new(),
            options: InferOptions::default(),
            inputs: Inputs::Named(self.inputs.clone()),
            outputs: Vec::new(),
        };
        let model = ModelRef { name, version: None };
        let response = service.infer(model, request, RequestContext::default()).await?;
        Ok(response.outputs.into_iter().map(|output| output.tensor).collect())
    }
}

async fn register(service: &LocalNode, name: &str) -> Result<(), ApiError> {
    let request = RegisterRequest {
        name: name.to_string(),
        onnx: RawBytes::from_static(DIGITS_ONNX),
        labels: Vec::new(),
        preprocessing: None,
        class: None,
        slo_ms: None,
        settings: None,
        canary: None,
    };
    service.register(request).await.map(|_| ())
}

/// Runs `operation` with a timeout, and measures it.
async fn timed<T>(
    operation: impl Future<Output = Result<T, ApiError>>,
) -> (Nanos, Result<T, ApiError>) {
    let began = Instant::now();
    let result = tokio::time::timeout(LIMIT, operation).await.unwrap_or_else(|_| {
        Err(ApiError::internal(format!("no reply in {} seconds", LIMIT.as_secs())))
    });
    (Nanos::from(began.elapsed()), result)
}

impl SoakRun {
    /// Loads every network, runs `operations` operations from all clients, then unloads everything.
    async fn round(self: Arc<Self>, seed: u64, operations: u64) -> Result<OperationStats, Failure> {
        self.remaining.store(operations, Ordering::Release);
        let mut all = OperationStats::default();
        let mut random = Random::new(seed);
        for _ in &self.networks {
            self.load(&mut random, &mut all).await;
        }
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| tokio::spawn(self.clone().client(seed ^ ((client + 1) << 32))))
            .collect();
        for client in clients {
            all.merge(client.await.map_err(Failure::failed)?);
        }
        for model in self.states.take_all() {
            self.unload(&model, &mut all).await;
        }
        Ok(all)
    }

    async fn client(self: Arc<Self>, seed: u64) -> OperationStats {
        let mut random = Random::new(seed);
        let mut stats = OperationStats::default();
        let take = |remaining: u64| remaining.checked_sub(1);
        while self.remaining.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok() {
            match random.below(100) {
                0..85 => self.request_loaded(&mut random, &mut stats).await,
                85..94 => self.request_absent(&mut random, &mut stats).await,
                94..96 => self.load(&mut random, &mut stats).await,
                96..98 => match self.states.begin_unload(&mut random) {
                    Some(model) => self.unload(&model, &mut stats).await,
                    None => self.request_loaded(&mut random, &mut stats).await,
                },
                _ => self.register(&mut random, &mut stats).await,
            }
        }
        stats
    }

    fn expected_reply(&self, source: ModelSource) -> &ExpectedReply {
        match source {
            ModelSource::Network(index) => &self.networks[index],
            ModelSource::Registered => &self.digits,
        }
    }

    /// A request to a loaded model; another client may unload it meanwhile.
    async fn request_loaded(&self, random: &mut Random, stats: &mut OperationStats) {
        let began = Instant::now();
        let model = loop {
            if let Some(model) = self.states.loaded(random) {
                break model;
            }
            if began.elapsed() > LIMIT {
                let none = ApiError::internal("no model came into service");
                return stats.record(
                    "wait",
                    ExpectedResult::Done,
                    began.elapsed().into(),
                    Err(none),
                );
            }
            tokio::time::sleep(WAIT).await;
        };
        let expected_reply = self.expected_reply(model.source);
        let (elapsed, reply) =
            timed(expected_reply.request_reply(&self.service, &model.name)).await;
        stats.wrong +=
            u64::from(reply.as_ref().is_ok_and(|got| !is_close(got, &expected_reply.expected)));
        stats.record("infer of a loaded model", ExpectedResult::Done, elapsed, reply.map(|_| ()));
    }

    /// A request that must be refused.
    async fn request_absent(&self, random: &mut Random, stats: &mut OperationStats) {
        let (name, never) = self.states.absent(random);
        let (what, kind) = match never {
            true => ("infer of a model that never was", ErrorKind::NotFound),
            false => ("infer of an unloaded model", ErrorKind::Unavailable),
        };
        let (elapsed, reply) = timed(self.digits.request_reply(&self.service, &name)).await;
        stats.record(what, ExpectedResult::Refused(kind), elapsed, reply.map(|_| ()));
    }

    /// Loads a network, preferably one that is not loaded; returns when it is ready.
    async fn load(&self, random: &mut Random, stats: &mut OperationStats) {
        let Some((model, fresh)) = self.states.begin_load(random) else {
            // All of them are being loaded or unloaded.
            return self.request_loaded(random, stats).await;
        };
        let (elapsed, result) = timed(self.service.load_model(&model.name)).await;
        if fresh {
            self.states.finish(&model, result.is_ok());
        }
        stats.record("load", ExpectedResult::Done, elapsed, result.map(|_| ()));
    }

    /// Unloads a model and waits for its last reply and its memory.
    async fn unload(&self, model: &ModelName, stats: &mut OperationStats) {
        let (elapsed, result) = timed(self.service.unload_model(&model.name)).await;
        self.states.finish(model, false);
        stats.record("unload", ExpectedResult::Done, elapsed, result);
    }

    /// Registers a model under a new name, or unloads the oldest if there are too many.
    async fn register(&self, random: &mut Random, stats: &mut OperationStats) {
        let model = match self.states.begin_register() {
            Ok(model) => model,
            Err(Some(oldest)) => return self.unload(&oldest, stats).await,
            Err(None) => return self.request_loaded(random, stats).await,
        };
        let (elapsed, result) = timed(register(&self.service, &model.name)).await;
        self.states.finish(&model, result.is_ok());
        stats.record("register", ExpectedResult::Done, elapsed, result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        swap: SwapArgs,
    }

    #[test]
    fn a_small_server_handles_all_operations_and_releases_memory() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["one", "other"] {
            std::fs::write(folder.path().join(format!("{name}.onnx")), DIGITS_ONNX).unwrap();
        }
        let (models, json) = (folder.path(), folder.path().join("soak.json"));
        let (models, json) = (models.to_str().unwrap(), json.to_str().unwrap());
        let line = ["swap", "--models", models, "--network", "one,other", "--resident", "1"];
        let line = line.into_iter().chain(["--threads", "1", "--json", json]);
        let args = Line::parse_from(line).swap;
        let opened = SwappingDevice::open(&args).unwrap_or_else(|err| panic!("{}", err.message()));
        run(&args, &opened, 1_000).unwrap_or_else(|err| panic!("{}", err.message()));
        let report: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
        let kinds = report["kinds"].as_object().unwrap();
        let done = |what: &str| kinds[what]["done"].as_u64().unwrap();
        let asked = |what: &str| kinds[what]["asked"].as_u64().unwrap();
        assert!(done("infer of a loaded model") > 500, "{report:#}");
        // An unload cancels the load of the same model.
        let cancelled = kinds["load"]["documented"]["Cancelled"].as_u64().unwrap_or(0);
        for (what, cancelled) in [("load", cancelled), ("unload", 0), ("register", 0)] {
            assert!(done(what) > 0 && done(what) + cancelled == asked(what), "{report:#}");
        }
        for what in ["infer of an unloaded model", "infer of a model that never was"] {
            assert!(asked(what) > 0 && done(what) == 0, "{report:#}");
        }
        assert_eq!(report["rests"].as_array().unwrap().len(), 7, "{report:#}");
    }
}
