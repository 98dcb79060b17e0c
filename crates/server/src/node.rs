//! The service of one node: models on the devices of a [`runtime::DeviceGroup`].

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::error::ApiResult;
use api::monitor::Monitor;
use api::picture;
use api::{
    ApiError, Classification, ClassifyRequest, ErrorKind, IndexEntry, InferOptions, InferRequest,
    InferResponse, InferenceService, ModelMetadata, ModelRef, ModelStatistics, RegisterRequest,
    Registered, RequestContext, RequestTiming, ServerMetadata, ServiceFuture, proto,
};
use base::{Clock, Nanos};
use device::DeviceError;
use model::config::{Class, ModelConfig, SettingsChange};
use model::{HostMemory, Tensor};
use runtime::batching::StaggeredBatch;
use runtime::device_group::router::GroupModelId;
use runtime::{BatchTime, DeviceGroup, Rejection, Reply, Request, RequestHandle, Timing};
use serde_json::Value;
use tokio::sync::{Semaphore, oneshot};

pub mod classification;
pub mod counters;
mod exposition;
pub mod image;
mod limits;
pub mod loader;
mod model_details;
pub mod model_table;
mod monitor;
pub mod prefix_batching;
mod registration;
pub mod served_model;
mod settings;
mod step_report;

use crate::heavy_work::{LARGE_BYTES, heavy, in_background};
use crate::telemetry::unix_ns;
use counters::{PendingRequest, RequestLimits};
use loader::{LoadError, ModelLoader};
use model_table::ModelTable;
use monitor::NodeMonitor;
use prefix_batching::PrefixBatching;
use registration::SetOnDrop;
use served_model::ServedModel;

/// Time limit for profiling one model.
const PROFILE_LIMIT: Duration = Duration::from_secs(5);
/// How long it may take to find out whether lengths share batches.
const PADDING_LIMIT: Duration = Duration::from_secs(5);

/// How long an unload waits until its memory is free.
const DISCARD_LIMIT: Duration = Duration::from_secs(10);

/// Supported extensions of the protocol.
pub const EXTENSIONS: [&str; 8] = [
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
];

/// A node and its models as a service. Clones share it.
#[derive(Clone)]
pub struct LocalNode {
    inner: Arc<Inner>,
}

struct Inner {
    device_group: Arc<DeviceGroup>,
    loader: Arc<dyn ModelLoader>,
    models: ModelTable,
    prefix_batching: PrefixBatching,
    started: AtomicBool,
    draining: AtomicBool,
    /// Whether clients may load and unload models.
    control: AtomicBool,
    /// One model is profiled at a time.
    profiling: Arc<Semaphore>,
}

impl LocalNode {
    /// A service over `device_group` whose models come from `loader`. It is not ready before
    /// [`LocalNode::set_started`].
    pub fn new(device_group: Arc<DeviceGroup>, loader: Arc<dyn ModelLoader>) -> LocalNode {
        LocalNode {
            inner: Arc::new(Inner {
                device_group,
                loader,
                models: ModelTable::default(),
                prefix_batching: PrefixBatching::default(),
                started: AtomicBool::new(false),
                draining: AtomicBool::new(false),
                control: AtomicBool::new(true),
                profiling: Arc::new(Semaphore::new(1)),
            }),
        }
    }

    /// Requests for these models get 503 with `Retry-After` until they are loaded, or could not be.
    pub fn announce(&self, names: &[String]) {
        self.inner.models.announce(names);
    }

    /// Declares that the initial models have been loaded or have failed to load.
    pub fn set_started(&self) {
        self.inner.started.store(true, Ordering::SeqCst);
    }

    /// Refuses requests of clients to load or unload models; the owner of this service still can,
    /// through [`LocalNode::load_model`] and [`LocalNode::unload_model`].
    pub fn forbid_control(&self) {
        self.inner.control.store(false, Ordering::SeqCst);
    }

    /// Loads the newest version of `model` and returns its number.
    pub async fn load_model(&self, model: &str) -> ApiResult<u64> {
        run_detached(self.inner.clone().load(model.to_string(), Arc::default())).await
    }

    /// Unloads `model`; returns when its last request is done.
    pub async fn unload_model(&self, model: &str) -> ApiResult<()> {
        run_detached(self.inner.clone().unload(model.to_string())).await
    }

    fn check_control(&self) -> ApiResult<()> {
        if self.inner.control.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(ApiError::unavailable(
            "models are not loaded, unloaded or changed by clients in this --model-control-mode",
        ))
    }

    /// Loads the newest version of every model of the repository but those already `loaded`, and
    /// returns those that failed. Calls `progress` before each with the number of those done, the
    /// number of all, and its name.
    pub async fn load_all(
        &self,
        loaded: &[String],
        mut progress: impl FnMut(usize, usize, &str),
    ) -> ApiResult<Vec<(String, ApiError)>> {
        let loader = self.inner.loader.clone();
        let entries = blocking(move || loader.index()).await?;
        let mut names: Vec<String> = entries.into_iter().map(|entry| entry.name).collect();
        names.sort_unstable();
        names.dedup();
        names.retain(|name| !loaded.contains(name));
        self.announce(&names);
        let mut failed = Vec::new();
        let count = names.len();
        for (done, name) in names.into_iter().enumerate() {
            progress(done, count, &name);
            if let Err(error) = self.load_model(&name).await {
                failed.push((name, error));
            }
        }
        Ok(failed)
    }

    /// Loads weights onto the devices while they fit: first of the models in `order`, then of the
    /// others by name.
    pub fn preload(&self, order: &[String]) {
        let mut models = self.inner.models.all();
        let position = |served: &ServedModel| order.iter().position(|name| **name == *served.name);
        models.sort_by_key(|served| {
            (position(served).unwrap_or(usize::MAX), served.name.clone(), served.version)
        });
        models.iter().for_each(|served| self.inner.preload(served));
    }

    /// Expensive steps of a model that other models may share: hashes and shares of the work.
    pub async fn marks(&self, model: &str) -> ApiResult<Vec<(String, f64)>> {
        let served = self.inner.models.find(ModelRef { name: model, version: None })?;
        blocking_api(move || Ok(served.fingerprint().marks())).await
    }

    /// Sets the duty-cycle turn of a model, or `None` to batch as configured. Ignored for models
    /// under prefix batching.
    pub fn set_staggered_batch(&self, model: &str, turn: Option<StaggeredBatch>) {
        let all = self.inner.models.all();
        let served = all.iter().find(|served| &*served.name == model && served.split.is_none());
        if let Some(served) = served {
            self.inner.device_group.set_staggered_batch(served.key, turn);
        }
    }

    /// Number of inferences of each model.
    pub fn inference_counts(&self) -> Vec<(String, u64)> {
        let models = self.inner.models.all();
        let count = |served: &Arc<ServedModel>| served.counters.inferences.load(Ordering::Relaxed);
        models.iter().map(|served| (served.name.to_string(), count(served))).collect()
    }

    /// Names of the models that are served, those first that are needed most: real time, then by
    /// the number of inferences.
    pub fn served_models(&self) -> Vec<String> {
        let mut models = self.inner.models.all();
        let count = |served: &Arc<ServedModel>| served.counters.inferences.load(Ordering::Relaxed);
        models.sort_by_key(|served| {
            let best_effort = served.config.class == Class::BestEffort;
            (best_effort, std::cmp::Reverse(count(served)), served.name.clone())
        });
        let mut names: Vec<String> = models.iter().map(|served| served.name.to_string()).collect();
        names.dedup();
        names
    }

    /// The devices.
    pub fn device_group(&self) -> &Arc<DeviceGroup> {
        &self.inner.device_group
    }
}

/// Batch times in microseconds by rows, as `1:130,2:200`.
fn profile_text(times: &[BatchTime]) -> String {
    let one = |(rows, time): &BatchTime| format!("{rows}:{}", time.as_micros());
    times.iter().map(one).collect::<Vec<_>>().join(",")
}

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> ApiResult<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(ApiError::from),
        Err(_) => Err(ApiError::internal("the model could not be read: the loader failed")),
    }
}

/// Like [`blocking`], for work that takes many cycles, which real time needs more.
async fn loading<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> ApiResult<T> {
    match in_background(work).await {
        Some(result) => result.map_err(ApiError::from),
        None => Err(ApiError::internal("the model could not be read: the loader failed")),
    }
}

/// Cancels a request when its client disconnects.
struct CancelOnDrop(Option<RequestHandle>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(handle) = &self.0 {
            handle.cancel();
        }
    }
}

fn rejection(model: &ServedModel, rejection: Rejection) -> ApiError {
    let message = || format!("model '{}': {rejection}", model.name);
    match &rejection {
        Rejection::NoSuchModel => ApiError::unavailable(message()),
        Rejection::QueueFull { .. } => ApiError::unavailable(message()).retry_after(1),
        Rejection::DeadlineExceeded => ApiError::new(ErrorKind::DeadlineExceeded, message()),
        Rejection::Cancelled => ApiError::new(ErrorKind::Cancelled, message()),
        Rejection::RealTimeOnly => ApiError::unsupported(message()),
        Rejection::ShuttingDown => ApiError::shutting_down(),
        Rejection::Device(DeviceError::BadInput(why)) => ApiError::invalid(why.clone()),
        Rejection::Device(DeviceError::StepFailed { .. }) => ApiError::invalid(message()),
        Rejection::Device(DeviceError::HostMemory(error)) => {
            ApiError { message: message().into(), ..ApiError::from(*error) }
        }
        Rejection::Device(DeviceError::TooLarge { .. }) => {
            ApiError::new(ErrorKind::TooLarge, message())
        }
        Rejection::Device(DeviceError::Unsupported { .. } | DeviceError::NoCompiler(_)) => {
            ApiError::unsupported(message())
        }
        Rejection::Device(DeviceError::OutOfMemory { .. } | DeviceError::Faulted { .. }) => {
            ApiError::unavailable(message()).retry_after(1)
        }
        Rejection::Device(_) => ApiError::internal(message()),
    }
}

impl Inner {
    fn find(&self, model: ModelRef<'_>) -> ApiResult<Arc<ServedModel>> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::shutting_down());
        }
        self.models.find(model)
    }

    /// Loads the weights of `served` onto its device if they fit.
    fn preload(&self, served: &ServedModel) {
        if let Some(split) = &served.split {
            self.device_group.preload(split.prefix.key);
        }
        self.device_group.preload(served.key);
    }

    /// Runs `served` on validated inputs.
    async fn run(
        &self,
        served: &ServedModel,
        inputs: Vec<Tensor>,
        batch: usize,
        options: &InferOptions,
    ) -> ApiResult<(Vec<Tensor>, PendingRequest)> {
        let _slot = limits::admit(served, options)?;
        let default = served.config.timeout_ms.map(Nanos::from_millis);
        let timeout = options.timeout.or(default);
        let slo = served.config.slo_ms.map(Nanos::from_millis);
        let limits = RequestLimits { timeout, slo };
        let pending =
            PendingRequest::begin(served.counters.clone(), self.clock().clone(), batch, limits);
        let Some(split) = &served.split else {
            let InferOptions { class, priority, .. } = *options;
            let request = Request { model: served.key, inputs, class, priority, timeout };
            return self.submit(served, request, pending).await;
        };
        let clock = self.clock();
        let start = clock.now();
        let class = Some(options.class.unwrap_or(served.config.class));
        let priority = Some(options.priority.unwrap_or(served.config.priority));
        let model = split.prefix.key;
        let prefix = Request { model, inputs: inputs.clone(), class, priority, timeout };
        let (outputs, pending) = self.submit(served, prefix, pending.with_suffix()).await?;
        let lost = || ApiError::internal("a value is lost between prefix and suffix");
        let inputs =
            prefix_batching::suffix_inputs(&split.sources, &inputs, &outputs).ok_or_else(lost)?;
        let timeout = timeout.map(|timeout| timeout - (clock.now() - start));
        let InferOptions { class, priority, .. } = *options;
        let request = Request { model: served.key, inputs, class, priority, timeout };
        self.submit(served, request, pending).await
    }

    /// The clock of all nodes.
    fn clock(&self) -> &Arc<dyn Clock> {
        self.device_group.clock()
    }

    /// Submits one request to the device group; dropping the future cancels it. The request is
    /// counted once its outputs are ready, or its suffix has run.
    async fn submit(
        &self,
        served: &ServedModel,
        request: Request<GroupModelId>,
        pending: PendingRequest,
    ) -> ApiResult<(Vec<Tensor>, PendingRequest)> {
        let (sender, receiver) = oneshot::channel();
        let on_reply = move |reply: Reply| {
            // The receiver is dropped if the client disconnected.
            let _ = sender.send(pending.reply(reply));
        };
        let handle = self.device_group.submit(request, Box::new(on_reply));
        let mut guard = CancelOnDrop(Some(handle));
        let result = receiver.await;
        guard.0 = None;
        match result {
            Ok(Ok(replied)) => Ok(replied),
            Ok(Err(why)) => Err(rejection(served, why)),
            Err(_) => Err(ApiError::internal("the node sent no reply")),
        }
    }

    async fn infer(&self, model: ModelRef<'_>, request: InferRequest) -> ApiResult<InferResponse> {
        let served = self.find(model)?;
        served.check_outputs(&request.outputs)?;
        let (inputs, batch) = served.match_inputs(request.inputs)?;
        let (outputs, pending) = self.run(&served, inputs, batch, &request.options).await?;
        let outputs = served.select_outputs(&request.outputs, outputs, batch)?;
        let ready = self.clock().now();
        let timing = timing_of(&pending.finish(ready), ready);
        Ok(InferResponse {
            model_name: served.name.clone(),
            model_version: served.version_text.clone(),
            id: request.id,
            outputs,
            timing: Some(timing),
        })
    }

    async fn classify(&self, request: ClassifyRequest) -> ApiResult<Classification> {
        let served = self.find(ModelRef { name: &request.model, version: None })?;
        let plan_inputs = &served.plan().inputs;
        let [input] = plan_inputs[..] else {
            return Err(ApiError::invalid(format!(
                "model '{}' takes {} inputs; only models of one image can classify",
                served.name,
                plan_inputs.len()
            )));
        };
        let (image, holder) = (request.image, served.clone());
        let decoded_bytes = picture::decoded_size_bytes(&image);
        let read = move || {
            let info = holder.plan().value(input);
            let preprocessing = holder.config.preprocessing.clone().unwrap_or_default();
            let mut memory = HostMemory::process().empty();
            let tensor = image::to_tensor(&image, &preprocessing, info, &mut memory)?;
            // Only the tensor is left of it.
            memory.shrink_to(tensor.size_bytes());
            Ok((tensor, memory))
        };
        let (tensor, _memory) = match decoded_bytes >= LARGE_BYTES {
            true => heavy(decoded_bytes, read).await?,
            false => blocking_api(read).await?,
        };
        let inputs = vec![tensor];
        device::check_inputs(served.plan(), &inputs)
            .map_err(|error| ApiError::invalid(format!("the image does not fit: {error}")))?;
        let (outputs, pending) = self.run(&served, inputs, 1, &InferOptions::default()).await?;
        let scores = outputs.first().ok_or_else(|| ApiError::internal("no output came back"))?;
        let scores = classification::scores(scores)?;
        let predictions = classification::predictions(scores, &served.config.labels, request.k);
        pending.finish(self.clock().now());
        Ok(Classification {
            model: served.name.to_string(),
            version: served.version_text.to_string(),
            predictions,
        })
    }

    /// Loads the newest version of a model. Ends early, without a change, once `cancelled` is set.
    async fn load(self: Arc<Inner>, name: String, cancelled: Arc<AtomicBool>) -> ApiResult<u64> {
        self.load_version(name, cancelled, None).await
    }

    /// Loads a model again, with these settings instead of its own.
    async fn load_with(self: Arc<Inner>, name: String, config: ModelConfig) -> ApiResult<u64> {
        self.load_version(name, Arc::default(), Some(config)).await
    }

    async fn load_version(
        self: Arc<Inner>,
        name: String,
        cancelled: Arc<AtomicBool>,
        config: Option<ModelConfig>,
    ) -> ApiResult<u64> {
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
            return Err(ApiError::not_found("there is no model of this name"));
        }
        let lock = self.models.lock(&name).await;
        self.models.begin_load(&name, cancelled.clone());
        let (loader, wanted) = (self.loader.clone(), name.clone());
        let loaded = loading(move || {
            let loaded = loader.load(&wanted, None, &cancelled)?;
            // From here on nothing takes long.
            loader::check_cancelled(&cancelled)?;
            Ok(loaded)
        })
        .await;
        match loaded {
            Ok(loaded) => {
                let version = loaded.version;
                if let Some(why) = self.device_group.cannot_fit(&loaded.placed) {
                    return Err(self.too_large(&name, &why));
                }
                let (served, released) = ServedModel::start(
                    self.device_group.clone(),
                    &name,
                    version,
                    loaded.placed,
                    settings::of_file(loaded.config, config),
                );
                let has_slo = served.config.slo_ms.is_some();
                self.models.finish_load(served.clone(), released);
                // Prefix batching takes the locks of other models.
                drop(lock);
                self.prefix_batching.join(&self.device_group, &self.models, served).await;
                // Only models with an SLO use the measured batch times.
                if has_slo {
                    self.profile(name.clone());
                }
                self.check_padding(name.clone());
                // At the start the owner preloads in its own order.
                if self.started.load(Ordering::SeqCst)
                    && let Ok(served) = self.models.find(ModelRef { name: &name, version: None })
                {
                    self.preload(&served);
                }
                tracing::info!(model = name, version, "model ready");
                Ok(version)
            }
            Err(error) => {
                tracing::warn!(model = name, %error, "model not loaded");
                let known = error.kind != ErrorKind::NotFound;
                self.models.fail_load(&name, error.message.to_string(), known);
                let message = format!("cannot load model '{name}': {}", error.message);
                Err(ApiError { message: message.into(), ..error })
            }
        }
    }

    /// Profiles a model in the background as best effort.
    fn profile(self: &Arc<Inner>, name: String) {
        let inner = self.clone();
        tokio::spawn(async move {
            let Ok(_permit) = inner.profiling.clone().acquire_owned().await else { return };
            let Ok(served) = inner.models.find(ModelRef { name: &name, version: None }) else {
                return;
            };
            let (key, device_group) = (served.key, inner.device_group.clone());
            let (loader, measured, version) = (inner.loader.clone(), name.clone(), served.version);
            // An unload does not wait for the profiling.
            drop(served);
            let measured = in_background(move || {
                let _mark = loader.begin_measuring(&measured, version);
                device_group.profile(key, PROFILE_LIMIT)
            });
            match measured.await {
                Some(times) if !times.is_empty() => {
                    tracing::info!(model = name, times = profile_text(&times), "model profiled");
                }
                _ => tracing::info!(model = name, "model not profiled"),
            }
        });
    }

    /// Finds out in the background, as best effort, whether requests of different lengths may share
    /// a batch.
    fn check_padding(self: &Arc<Inner>, name: String) {
        let inner = self.clone();
        tokio::spawn(async move {
            let Ok(_permit) = inner.profiling.clone().acquire_owned().await else { return };
            let Ok(served) = inner.models.find(ModelRef { name: &name, version: None }) else {
                return;
            };
            let (key, device_group) = (served.key, inner.device_group.clone());
            if !device_group.may_pad(key) {
                return;
            }
            let (loader, checked, version) = (inner.loader.clone(), name.clone(), served.version);
            // An unload does not wait for it.
            drop(served);
            let checked = in_background(move || {
                let _mark = loader.begin_measuring(&checked, version);
                device_group.check_padding(key, PADDING_LIMIT)
            });
            match checked.await {
                Some(Some(Ok(max_length))) => {
                    tracing::info!(model = name, max_length, "lengths share batches");
                }
                Some(Some(Err(reason))) => {
                    tracing::info!(model = name, reason, "lengths do not share batches");
                }
                _ => {}
            }
        });
    }

    /// Records that a model's weights never fit on the device.
    fn too_large(&self, name: &str, why: &DeviceError) -> ApiError {
        let help = "give weights more memory with --gpu-memory, or pin fewer models";
        let why = format!("its weights do not fit: {why}; {help}");
        tracing::warn!(model = name, reason = why, "model not loaded");
        self.models.fail_load(name, why.clone(), true);
        ApiError::unavailable(format!("cannot load model '{name}': {why}"))
    }

    async fn unload(self: Arc<Inner>, name: String) -> ApiResult<()> {
        self.models.cancel_load(&name);
        let _lock = self.models.lock(&name).await;
        if let Some(released) = self.models.begin_unload(&name)? {
            // Resolves with an error once the sender is dropped.
            let _ = released.await;
            let device_group = self.device_group.clone();
            // The unload returns only when the memory is free.
            let _ = tokio::task::spawn_blocking(move || device_group.wait_discarded(DISCARD_LIMIT))
                .await;
        }
        self.models.finish_unload(&name);
        tracing::info!(model = name, "model unloaded");
        Ok(())
    }

    fn statistics(&self, model: Option<ModelRef<'_>>) -> ApiResult<Vec<ModelStatistics>> {
        let models = match model {
            Some(model) => vec![self.models.find(model)?],
            None => self.models.all(),
        };
        let statistics = |served: &Arc<ServedModel>| {
            let counters = &served.counters;
            ModelStatistics {
                name: served.name.to_string(),
                version: served.version_text.to_string(),
                last_inference: counters.last_ms.load(Ordering::Relaxed),
                inference_count: counters.inferences.load(Ordering::Relaxed),
                execution_count: counters.executions.load(Ordering::Relaxed),
                inference_stats: counters.inference_stats(),
                batch_stats: counters.batch_stats(),
            }
        };
        Ok(models.iter().map(statistics).collect())
    }
}

fn timing_of(timing: &Timing, ready: Nanos) -> RequestTiming {
    RequestTiming {
        arrived: timing.arrived,
        staged: timing.prepared,
        started: timing.started,
        finished: timing.finished,
        ready,
        ready_unix_ns: unix_ns(),
        busy: timing.busy,
        preemptions: timing.preemptions,
        rows: timing.rows,
    }
}

/// Like [`blocking`], for work that fails with an [`ApiError`].
async fn blocking_api<T: Send + 'static>(
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::internal("the server failed on this request")),
    }
}

/// Runs `work` to its end even if the client disconnects: a model is never half loaded. What takes
/// long ends early by a flag of its own.
async fn run_detached<T: Send + 'static>(
    work: impl Future<Output = ApiResult<T>> + Send + 'static,
) -> ApiResult<T> {
    match tokio::spawn(work).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::internal("the server failed on this request")),
    }
}

impl InferenceService for LocalNode {
    fn server_metadata(&self) -> ServerMetadata {
        ServerMetadata {
            name: "atoll".to_string(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            extensions: EXTENSIONS.map(str::to_string).to_vec(),
        }
    }

    fn host_pool(&self) -> Option<Arc<dyn model::HostPool>> {
        self.inner.device_group.host_pool()
    }

    fn ready(&self) -> bool {
        // While one of several devices is opened again, the others serve.
        let works = self.inner.device_group.nodes().iter().any(|node| node.fault().is_none());
        self.inner.started.load(Ordering::SeqCst)
            && !self.inner.draining.load(Ordering::SeqCst)
            && works
    }

    fn model_ready<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, bool> {
        let inner = &self.inner;
        // After a fault of its device a model is loaded again.
        let loaded = |served: Arc<ServedModel>| inner.device_group.is_loaded(served.key);
        let ready = match inner.models.is_ready(model) {
            Ok(true) => Ok(inner.models.find(model).is_ok_and(loaded)),
            other => other,
        };
        Box::pin(std::future::ready(ready))
    }

    fn model_metadata<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, ModelMetadata> {
        let metadata = self.inner.models.find(model).map(|served| served.metadata());
        Box::pin(std::future::ready(metadata))
    }

    fn model_config<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, proto::ModelConfig> {
        let config = self.inner.models.find(model).map(|served| served.wire_config());
        Box::pin(std::future::ready(config))
    }

    fn infer<'a>(
        &'a self,
        model: ModelRef<'a>,
        request: InferRequest,
        _: RequestContext,
    ) -> ServiceFuture<'a, InferResponse> {
        Box::pin(self.inner.infer(model, request))
    }

    fn statistics<'a>(
        &'a self,
        model: Option<ModelRef<'a>>,
    ) -> ServiceFuture<'a, Vec<ModelStatistics>> {
        Box::pin(std::future::ready(self.inner.statistics(model)))
    }

    fn index(&self, only_ready: bool) -> ServiceFuture<'_, Vec<IndexEntry>> {
        Box::pin(async move {
            let loader = self.inner.loader.clone();
            let entries = blocking(move || loader.index()).await?;
            Ok(self.inner.models.index(entries, only_ready))
        })
    }

    fn load<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()> {
        Box::pin(async move {
            self.check_control()?;
            let cancelled = Arc::new(AtomicBool::new(false));
            let _guard = SetOnDrop(cancelled.clone());
            run_detached(self.inner.clone().load(model.to_string(), cancelled)).await.map(|_| ())
        })
    }

    fn unload<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()> {
        Box::pin(async move {
            self.check_control()?;
            self.unload_model(model).await
        })
    }

    fn register(&self, request: RegisterRequest) -> ServiceFuture<'_, Registered> {
        Box::pin(async move {
            self.check_control()?;
            if request.canary.is_some() {
                return Err(ApiError::unsupported("only frontends of a cluster have canaries"));
            }
            self.inner.check(&request).await?;
            run_detached(self.inner.clone().register(request)).await
        })
    }

    fn delete_model<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, usize> {
        Box::pin(async move {
            self.check_control()?;
            let (name, version) = (model.name.to_string(), model.version);
            run_detached(self.inner.clone().delete(name, version)).await
        })
    }

    fn roll_back_model<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, Registered> {
        Box::pin(async move {
            self.check_control()?;
            let (name, version) = (model.name.to_string(), model.version);
            run_detached(self.inner.clone().roll_back(name, version)).await
        })
    }

    fn change_settings<'a>(
        &'a self,
        model: ModelRef<'a>,
        change: SettingsChange,
    ) -> ServiceFuture<'a, Value> {
        Box::pin(async move {
            self.check_control()?;
            let (name, version) = (model.name.to_string(), model.version);
            run_detached(self.inner.clone().change_settings(name, version, change)).await
        })
    }

    fn classify(
        &self,
        request: ClassifyRequest,
        _: RequestContext,
    ) -> ServiceFuture<'_, Classification> {
        Box::pin(self.inner.classify(request))
    }

    fn monitor(&self) -> Option<Arc<dyn Monitor>> {
        Some(Arc::new(NodeMonitor(self.inner.clone())))
    }

    fn model_details<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, Value> {
        let served = self.inner.models.find(model);
        Box::pin(async move {
            let (served, group) = (served?, self.inner.device_group.clone());
            blocking_api(move || Ok(model_details::details(&served, &group))).await
        })
    }

    fn model_steps<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, Value> {
        Box::pin(self.inner.model_steps(model))
    }

    fn write_metrics(&self, text: &mut String) {
        let models = self.inner.models.all();
        exposition::write(
            text,
            &models,
            &self.inner.prefix_batching.prefixes(),
            &self.inner.device_group,
        );
        self.inner.loader.write_metrics(text);
    }

    fn drain(&self, limit: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        self.inner.draining.store(true, Ordering::SeqCst);
        let device_group = self.inner.device_group.clone();
        Box::pin(async move {
            tokio::task::spawn_blocking(move || device_group.drain(limit)).await.unwrap_or(false)
        })
    }
}
