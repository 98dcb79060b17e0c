//! `atoll bench swap --soak N`: a whole server under random orders, and whether everything comes back.
//!
//! Clients load, unload, register and ask at random, models that others just unloaded included. An order may be answered with the
//! errors that say so; anything else is a failure. In the end every model is unloaded and memory must be as it was.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use api::{
    ApiError, ErrorKind, InferOptions, InferRequest, InferenceService, Inputs, ModelRef,
    NamedTensor, RegisterRequest, RequestContext,
};
use base::{Bytes, Random};
use bytes::Bytes as RawBytes;
use device::Device;
use model::Tensor;
use model::repository::Repository;
use model::store::Store;
use runtime::NodeOptions;
use serde::Serialize;
use server::LocalNode;

use crate::demo_command::DIGITS_ONNX;
use crate::devices::fleet_on;
use crate::failure::Failure;
use crate::loader::DiskLoader;
use crate::serve_command::tokio_runtime;
use crate::swap_command::{SwapArgs, SwappingDevice, inputs};
use crate::{engine, sim_command};

/// Clients at once.
const CLIENTS: u64 = 64;

/// Names that clients register under.
const REGISTERED: u64 = 4;

/// How long memory may take to come back.
const SETTLE: Duration = Duration::from_secs(10);

/// What the driver itself may hold more of after than before: it frees in pages of its own, and kernels stay loaded.
const SYSTEM_SLACK: u64 = 64 << 20;

/// What became of it.
#[derive(Debug, Default, Serialize)]
struct SoakReport {
    operations: u64,
    seconds: f64,
    /// Operations by kind that were done.
    done: BTreeMap<&'static str, u64>,
    /// Answers that say that a model is not there at the moment.
    documented_errors: BTreeMap<String, u64>,
    /// All other errors.
    failures: u64,
    first_failure: Option<String>,
    /// Answers that differ from those of the same model undisturbed.
    wrong: u64,
    budget_bytes: u64,
    most_held_bytes: u64,
    loads: u64,
    evictions: u64,
    /// Weights on the device before and after.
    weights_bytes: [u64; 2],
    /// Memory used by everybody as the GPU's own tools count, before and after.
    system_bytes: [Option<u64>; 2],
}

/// A model of the repository and what it answers.
struct Known {
    name: String,
    inputs: Vec<NamedTensor>,
    expected: Vec<Tensor>,
}

struct Soak {
    service: LocalNode,
    device: Arc<dyn Device>,
    models: Vec<Known>,
    left: AtomicU64,
}

#[derive(Default)]
struct Tally {
    done: BTreeMap<&'static str, u64>,
    documented: BTreeMap<String, u64>,
    failures: u64,
    first_failure: Option<String>,
    wrong: u64,
}

impl Tally {
    fn note(&mut self, what: &'static str, result: Result<(), ApiError>) {
        match result {
            Ok(()) => *self.done.entry(what).or_default() += 1,
            Err(err) if matches!(err.kind, ErrorKind::NotFound | ErrorKind::Unavailable) => {
                let kind = format!("{what}: {:?}", err.kind);
                *self.documented.entry(kind).or_default() += 1;
            }
            Err(err) => {
                self.failures += 1;
                self.first_failure.get_or_insert_with(|| format!("{what}: {err}"));
            }
        }
    }
}

/// Runs `operations` and says what became of them.
pub(crate) fn run(
    args: &SwapArgs,
    opened: &SwappingDevice,
    operations: u64,
) -> Result<(), Failure> {
    let folder = tempfile::tempdir().map_err(Failure::failed)?;
    let store = Store::open(folder.path()).map_err(Failure::failed)?;
    let repository = Repository::open(&args.models).map_err(Failure::usage)?;
    let device = opened.device.clone();
    let room = args.room.first().copied().map_or(4, u64::from);
    let budget = largest(args, &*device)? * room;
    let options = NodeOptions { memory: Some(Bytes(budget)), ..NodeOptions::default() };
    let fleet = fleet_on(device.clone(), options)?;
    let loader = Arc::new(DiskLoader::new(fleet.clone(), vec![repository], Ok(store)));
    let service = LocalNode::new(fleet, loader);
    let report = tokio_runtime()?.block_on(soak(args, service, device, operations))?;
    let report = SoakReport { budget_bytes: budget, ..report };
    finish(args, &report)
}

/// Bytes of the largest model's weights.
fn largest(args: &SwapArgs, device: &dyn Device) -> Result<u64, Failure> {
    let mut most = 0;
    for name in &args.network {
        let path = args.models.join(format!("{name}.onnx"));
        let failed = |err: String| Failure::failed(format!("{}: {err}", path.display()));
        let plan = engine::compile_file(&path).map_err(|err| failed(err.to_string()))?;
        let program = device.load(Arc::new(plan)).map_err(|err| failed(err.to_string()))?;
        most = most.max(program.residency().map_or(0, |weights| weights.bytes().0));
    }
    Ok(most)
}

async fn soak(
    args: &SwapArgs,
    service: LocalNode,
    device: Arc<dyn Device>,
    operations: u64,
) -> Result<SoakReport, Failure> {
    service.set_started();
    let mut random = Random::new(args.seed);
    let mut models = Vec::new();
    for name in &args.network {
        models.push(known(args, &service, name, &mut random).await?);
    }
    // Once round before anything is counted: what is made only once is made now.
    let first = RawBytes::from_static(DIGITS_ONNX);
    register(&service, 0, first).await.map_err(Failure::failed)?;
    unload_all(&service, &models).await;
    settle(&*device);
    let before = used(&*device);
    let soak = Arc::new(Soak { service, device, models, left: AtomicU64::new(operations) });
    let began = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| tokio::spawn(soak.clone().client(args.seed ^ (client << 32))))
        .collect();
    let mut report = SoakReport { operations, ..SoakReport::default() };
    for client in clients {
        let tally = client.await.map_err(Failure::failed)?;
        tally.done.into_iter().for_each(|(k, n)| *report.done.entry(k).or_default() += n);
        let documented = &mut report.documented_errors;
        tally.documented.into_iter().for_each(|(k, n)| *documented.entry(k).or_default() += n);
        report.failures += tally.failures;
        report.wrong += tally.wrong;
        report.first_failure = report.first_failure.or(tally.first_failure);
    }
    report.seconds = began.elapsed().as_secs_f64();
    unload_all(&soak.service, &soak.models).await;
    settle(&*soak.device);
    let swaps = soak.service.fleet().nodes()[0].memory().swaps;
    (report.loads, report.evictions) = (swaps.loads, swaps.evictions);
    report.most_held_bytes = soak.device.memory_use().map_or(0, |used| used.most_weights.0);
    let after = used(&*soak.device);
    report.weights_bytes = [before.0, after.0];
    report.system_bytes = [before.1, after.1];
    Ok(report)
}

async fn known(
    args: &SwapArgs,
    service: &LocalNode,
    name: &str,
    random: &mut Random,
) -> Result<Known, Failure> {
    let path = args.models.join(format!("{name}.onnx"));
    let plan = engine::compile_file(&path).map_err(Failure::failed)?;
    let tensors = inputs(&plan, random).map_err(Failure::failed)?;
    let names = plan.inputs.iter().map(|id| plan.value(*id).name.as_str().into());
    let inputs = names.zip(tensors).map(|(name, tensor)| NamedTensor { name, tensor }).collect();
    service.load_model(name).await.map_err(Failure::failed)?;
    let mut known = Known { name: name.to_string(), inputs, expected: Vec::new() };
    known.expected = known.ask(service).await.map_err(Failure::failed)?;
    Ok(known)
}

/// How far an answer may be from that of the same model undisturbed, as a share of its size: requests that run together round
/// differently. Another model's answer is far away.
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

impl Known {
    async fn ask(&self, service: &LocalNode) -> Result<Vec<Tensor>, ApiError> {
        let request = InferRequest {
            id: String::new(),
            options: InferOptions::default(),
            inputs: Inputs::Named(self.inputs.clone()),
            outputs: Vec::new(),
        };
        let model = ModelRef { name: &self.name, version: None };
        let response = service.infer(model, request, RequestContext::default()).await?;
        Ok(response.outputs.into_iter().map(|output| output.tensor).collect())
    }
}

async fn register(service: &LocalNode, number: u64, onnx: RawBytes) -> Result<(), ApiError> {
    let request = RegisterRequest {
        name: format!("registered-{number}"),
        onnx,
        labels: Vec::new(),
        preprocessing: None,
        class: None,
        slo_ms: None,
    };
    service.register(request).await.map(|_| ())
}

async fn unload_all(service: &LocalNode, models: &[Known]) {
    for model in models {
        // One that is not loaded is what is wanted.
        let _ = service.unload_model(&model.name).await;
    }
    for number in 0..REGISTERED {
        let _ = service.unload_model(&format!("registered-{number}")).await;
    }
}

/// Weights on the device, and what its own tools say.
fn used(device: &dyn Device) -> (u64, Option<u64>) {
    let used = device.memory_use().unwrap_or_default();
    (used.weights.0, used.system.map(|bytes| bytes.0))
}

/// Waits for memory to come back: models are taken apart behind the last answer.
fn settle(device: &dyn Device) {
    let since = Instant::now();
    while used(device).0 > 0 && since.elapsed() < SETTLE {
        std::thread::sleep(Duration::from_millis(5));
    }
    // What was unmapped is released a moment later.
    std::thread::sleep(Duration::from_millis(200));
}

impl Soak {
    async fn client(self: Arc<Self>, seed: u64) -> Tally {
        let mut random = Random::new(seed);
        let mut tally = Tally::default();
        let take = |left: u64| left.checked_sub(1);
        while self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            let model = &self.models[random.below(self.models.len() as u64) as usize];
            match random.below(100) {
                0..94 => {
                    let answer = model.ask(&self.service).await;
                    tally.wrong +=
                        u64::from(answer.as_ref().is_ok_and(|got| !is_close(got, &model.expected)));
                    tally.note("infer", answer.map(|_| ()));
                }
                94..97 => {
                    tally.note("load", self.service.load_model(&model.name).await.map(|_| ()))
                }
                97..99 => tally.note("unload", self.service.unload_model(&model.name).await),
                _ => {
                    let onnx = RawBytes::from_static(DIGITS_ONNX);
                    let number = random.below(REGISTERED);
                    tally.note("register", register(&self.service, number, onnx).await);
                }
            }
        }
        tally
    }
}

fn finish(args: &SwapArgs, report: &SoakReport) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(report).map_err(Failure::failed)? + "\n";
    match &args.json {
        Some(Some(path)) => sim_command::write(path, &text)?,
        _ => print!("{text}"),
    }
    let SoakReport { failures, wrong, first_failure, .. } = report;
    if *failures + *wrong > 0 {
        let why = first_failure.as_deref().unwrap_or("answers differ");
        return Err(Failure::failed(format!("{failures} failures, {wrong} wrong answers: {why}")));
    }
    if report.most_held_bytes > report.budget_bytes {
        let (most, budget) = (Bytes(report.most_held_bytes), Bytes(report.budget_bytes));
        return Err(Failure::failed(format!("{most} of weights were held, {budget} are allowed")));
    }
    if report.weights_bytes[1] != report.weights_bytes[0] {
        let left = Bytes(report.weights_bytes[1]);
        return Err(Failure::failed(format!("{left} of weights did not come back")));
    }
    match report.system_bytes {
        [Some(before), Some(after)] if after > before + SYSTEM_SLACK => {
            let more = Bytes(after - before);
            Err(Failure::failed(format!("the GPU's tools count {more} more than before")))
        }
        _ => Ok(()),
    }
}
