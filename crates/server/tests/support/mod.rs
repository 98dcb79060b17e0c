//! A service that echoes its inputs, for tests of the protocols.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::error::ApiResult;
use api::monitor::{LiveCursor, LiveUpdate, Monitor};
use api::*;
use base::Nanos;
use model::{HostPool, HostPoolBuffer};
use server::node::classification;

/// Echoes inputs as outputs: `INPUT0` becomes `OUTPUT0`, other names stay.
#[derive(Default)]
pub struct Echo {
    /// Requests whose future was dropped before it finished.
    pub given_up: AtomicUsize,
    /// Lets requests of `slow` finish, one for each `open`.
    pub slow: Latch,
    /// Number of replies.
    pub answered: AtomicUsize,
    /// Host pool for bodies.
    pub host_pool: Option<Arc<RecordingHostPool>>,
    /// What viewers read.
    pub monitor: Option<Arc<SlowTraces>>,
}

/// A monitor whose traces take until the test opens its latch.
#[derive(Default)]
pub struct SlowTraces {
    /// Traces that have begun.
    pub begun: AtomicUsize,
    /// Lets traces end.
    pub open: AtomicBool,
}

impl Monitor for SlowTraces {
    fn update(&self, _cursor: &mut LiveCursor, _with_spans: bool) -> LiveUpdate {
        LiveUpdate::default()
    }

    fn trace(&self, _window: Nanos) -> Option<String> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        while !self.open.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Some("{}".to_string())
    }

    fn explain(&self, _device: usize, request: u64) -> Option<serde_json::Value> {
        Some(serde_json::json!({ "request": request }))
    }
}

/// Closed until the test opens it.
pub struct Latch(tokio::sync::Semaphore);

impl Default for Latch {
    fn default() -> Latch {
        Latch(tokio::sync::Semaphore::new(0))
    }
}

impl Latch {
    /// Lets one request pass.
    pub fn open(&self) {
        self.0.add_permits(1);
    }

    async fn pass(&self) {
        self.0.acquire().await.unwrap().forget();
    }
}

impl Echo {
    /// A service with a host pool.
    pub fn with_host_pool() -> Echo {
        Echo { host_pool: Some(Arc::default()), ..Echo::default() }
    }
}

/// A host pool that records the addresses of its buffers.
#[derive(Default)]
pub struct RecordingHostPool {
    out: Arc<Mutex<Vec<Range<usize>>>>,
    /// Number of tensors found in the pool.
    pub found: AtomicUsize,
}

struct PoolBuffer(Vec<u8>, Arc<Mutex<Vec<Range<usize>>>>);

impl PoolBuffer {
    fn place(&self) -> Range<usize> {
        let place = self.0.as_ptr_range();
        place.start as usize..place.end as usize
    }
}

impl AsRef<[u8]> for PoolBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl AsMut<[u8]> for PoolBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for PoolBuffer {
    fn drop(&mut self) {
        let place = self.place();
        self.1.lock().unwrap().retain(|out| *out != place);
    }
}

impl HostPool for RecordingHostPool {
    fn allocate(&self, bytes: usize) -> Option<Box<dyn HostPoolBuffer>> {
        let buffer = PoolBuffer(vec![0xab; bytes], self.out.clone());
        self.out.lock().unwrap().push(buffer.place());
        Some(Box::new(buffer))
    }
}

impl RecordingHostPool {
    /// Number of buffers in use.
    pub fn buffers_in_use(&self) -> usize {
        self.out.lock().unwrap().len()
    }

    /// Counts the inputs that end where a buffer of the pool ends.
    fn count_inputs(&self, inputs: &Inputs) {
        let Inputs::Named(inputs) = inputs else { return };
        let out = self.out.lock().unwrap();
        let raws = inputs.iter().filter_map(|input| input.tensor.raw());
        let ends = raws.map(|raw| raw.as_ptr_range().end as usize);
        let found = ends.filter(|end| out.iter().any(|out| out.end == *end)).count();
        self.found.fetch_add(found, Ordering::SeqCst);
    }
}

struct Unfinished<'a>(&'a AtomicUsize);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn known(model: ModelRef<'_>) -> ApiResult<()> {
    match (model.name, model.version) {
        ("identity" | "slow" | "full" | "late" | "boom", None | Some(1)) => Ok(()),
        (name, _) => Err(ApiError::not_found(format!("there is no model '{name}'"))),
    }
}

fn echo(model: ModelRef<'_>, request: InferRequest) -> ApiResult<InferResponse> {
    let Inputs::Named(inputs) = request.inputs else {
        return Err(ApiError::invalid("raw bodies are not echoed"));
    };
    let renamed = |input: NamedTensor| NamedTensor {
        name: input.name.replace("INPUT", "OUTPUT").into(),
        tensor: input.tensor,
    };
    let mut outputs: Vec<NamedTensor> = inputs.into_iter().map(renamed).collect();
    for wanted in &request.outputs {
        let output = outputs.iter_mut().find(|output| *output.name == *wanted.name);
        let output = output.ok_or_else(|| ApiError::invalid("no such output"))?;
        if wanted.classes > 0 {
            let labels = ["zero".to_string(), "one".to_string()];
            output.tensor = classification::tensor(&output.tensor, &labels, wanted.classes, None)?;
        }
    }
    Ok(InferResponse {
        model_name: model.name.into(),
        model_version: "1".into(),
        id: request.id,
        outputs,
        timing: None,
    })
}

fn tensor(name: &str, shape: &[i64]) -> TensorMetadata {
    TensorMetadata { name: name.into(), datatype: "FP32".into(), shape: shape.into() }
}

impl InferenceService for Echo {
    fn server_metadata(&self) -> ServerMetadata {
        let extensions = server::node::EXTENSIONS.map(str::to_string).to_vec();
        ServerMetadata { name: "echo".into(), version: "0".into(), extensions }
    }

    fn host_pool(&self) -> Option<Arc<dyn HostPool>> {
        Some(self.host_pool.clone()?)
    }

    fn monitor(&self) -> Option<Arc<dyn Monitor>> {
        Some(self.monitor.clone()?)
    }

    fn ready(&self) -> bool {
        true
    }

    fn model_ready<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, bool> {
        Box::pin(async move { known(model).map(|()| model.name != "full") })
    }

    fn model_metadata<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, ModelMetadata> {
        Box::pin(async move {
            known(model)?;
            Ok(ModelMetadata {
                name: model.name.into(),
                versions: vec!["1".into()],
                platform: "echo".into(),
                inputs: vec![tensor("INPUT0", &[-1, 1])],
                outputs: vec![tensor("OUTPUT0", &[-1, 1])],
            })
        })
    }

    fn model_config<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, proto::ModelConfig> {
        Box::pin(async move {
            known(model)?;
            let data_type = proto::DataType::TypeFp32 as i32;
            let (input, output) = ("INPUT0".to_string(), "OUTPUT0".to_string());
            let dims = vec![1];
            Ok(proto::ModelConfig {
                name: model.name.into(),
                platform: "echo".into(),
                max_batch_size: 8,
                input: vec![proto::ModelInput {
                    name: input,
                    data_type,
                    dims: dims.clone(),
                    ..Default::default()
                }],
                output: vec![proto::ModelOutput {
                    name: output,
                    data_type,
                    dims,
                    ..Default::default()
                }],
                ..Default::default()
            })
        })
    }

    fn infer<'a>(
        &'a self,
        model: ModelRef<'a>,
        request: InferRequest,
        _: RequestContext,
    ) -> ServiceFuture<'a, InferResponse> {
        Box::pin(async move {
            known(model)?;
            if let Some(host_pool) = &self.host_pool {
                host_pool.count_inputs(&request.inputs);
            }
            match model.name {
                "slow" => {
                    let unfinished = Unfinished(&self.given_up);
                    self.slow.pass().await;
                    std::mem::forget(unfinished);
                }
                "full" => return Err(ApiError::unavailable("the queue is full").retry_after(1)),
                "late" => {
                    return Err(ApiError::new(ErrorKind::DeadlineExceeded, "the deadline passed"));
                }
                "boom" => panic!("boom"),
                _ => {}
            }
            self.answered.fetch_add(1, Ordering::Relaxed);
            echo(model, request)
        })
    }

    fn statistics<'a>(
        &'a self,
        model: Option<ModelRef<'a>>,
    ) -> ServiceFuture<'a, Vec<ModelStatistics>> {
        Box::pin(async move {
            model.map_or(Ok(()), known)?;
            let (name, version) = ("identity".into(), "1".into());
            let count = self.answered.load(Ordering::Relaxed) as u64;
            let spent = metadata::DurationStat { count, ns: 1000 * count };
            let inference_stats = metadata::InferenceStats {
                success: spent,
                queue: spent,
                compute_input: spent,
                compute_infer: spent,
                compute_output: spent,
                ..Default::default()
            };
            Ok(vec![ModelStatistics {
                name,
                version,
                inference_count: count,
                execution_count: count,
                inference_stats,
                ..Default::default()
            }])
        })
    }

    fn index(&self, _: bool) -> ServiceFuture<'_, Vec<IndexEntry>> {
        let (name, version) = ("identity".into(), "1".into());
        let state = Some(ModelState::Ready);
        let entry = IndexEntry { name, version, state, reason: String::new() };
        Box::pin(async move { Ok(vec![entry]) })
    }

    fn load<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()> {
        Box::pin(async move { known(ModelRef { name: model, version: None }) })
    }

    fn unload<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()> {
        self.load(model)
    }

    fn register(&self, request: RegisterRequest) -> ServiceFuture<'_, Registered> {
        Box::pin(async move {
            let version = request.labels.len().to_string();
            Ok(Registered { name: request.name, version, state: ModelState::Ready })
        })
    }

    fn classify(
        &self,
        request: ClassifyRequest,
        _: RequestContext,
    ) -> ServiceFuture<'_, Classification> {
        Box::pin(async move {
            let prediction = Prediction { label: "cat".into(), index: request.k, score: 1.0 };
            Ok(Classification {
                model: request.model,
                version: "1".into(),
                predictions: vec![prediction],
            })
        })
    }

    fn write_metrics(&self, text: &mut String) {
        text.push_str("echo 1\n");
    }

    fn drain(&self, _: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(async { true })
    }
}
