//! The service behind every protocol: a node, a cluster, or a fake in tests.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use model::config::{Class, ModelConfig, Preprocessing, SettingsChange};
use serde::Serialize;
use serde_json::Value;

use crate::canary::{CanaryChoice, CanaryOptions, CanaryStatus};
use crate::error::{ApiError, ApiResult, ErrorKind};
use crate::infer::{InferRequest, InferResponse};
use crate::metadata::{
    IndexEntry, ModelMetadata, ModelState, ModelStatistics, QueryMetadata, ServerMetadata,
};
use crate::monitor::Monitor;
use crate::proto;
use crate::trace::{SpanSink, TraceContext};

/// Maximum length of a model's name.
pub const MAX_MODEL_NAME: usize = 128;

/// A model and optionally a version; by default the newest that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelRef<'a> {
    /// The model's name.
    pub name: &'a str,
    /// The version.
    pub version: Option<u64>,
}

impl<'a> ModelRef<'a> {
    /// Parses `name` and `version` of a request; an empty version means the default.
    pub fn parse(name: &'a str, version: &str) -> ApiResult<ModelRef<'a>> {
        if version.is_empty() {
            return Ok(ModelRef { name, version: None });
        }
        match version.parse() {
            Ok(number) if number > 0 => Ok(ModelRef { name, version: Some(number) }),
            _ => Err(ApiError::invalid(format!(
                "'{}' is not a model version; versions are numbers from 1",
                version.escape_debug()
            ))),
        }
    }
}

/// Checks the name of a model to register: it becomes part of paths and URLs.
pub fn check_model_name(name: &str) -> ApiResult<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if name.is_empty() || name.len() > MAX_MODEL_NAME || !name.chars().all(plain) {
        return Err(ApiError::invalid(format!(
            "model names have 1 to {MAX_MODEL_NAME} characters out of A-Z a-z 0-9 _ . -"
        )));
    }
    if name.starts_with('.') || name.starts_with('-') {
        return Err(ApiError::invalid("model names start with a letter, a digit or _"));
    }
    Ok(())
}

/// Context of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestContext {
    /// The caller's trace context, or the server's where that records the trace.
    pub trace: Option<TraceContext>,
    /// Whether the server records the trace, so that parts of the request may become spans.
    pub is_recorded: bool,
    /// Which version it wants where the model has a canary.
    pub canary: CanaryChoice,
}

/// A request to register a model.
#[derive(Clone, Debug)]
pub struct RegisterRequest {
    /// Its name; checked by [`check_model_name`].
    pub name: String,
    /// The ONNX file.
    pub onnx: Bytes,
    /// Labels of its classes, in the order of its scores.
    pub labels: Vec<String>,
    /// Pre-processing of images.
    pub preprocessing: Option<Preprocessing>,
    /// The class of its requests.
    pub class: Option<Class>,
    /// Its SLO in milliseconds.
    pub slo_ms: Option<u64>,
    /// Further settings, over the defaults.
    pub settings: Option<SettingsChange>,
    /// Serve it as a canary beside the version in force.
    pub canary: Option<CanaryOptions>,
}

impl RegisterRequest {
    /// Takes the settings with which the model is registered.
    ///
    /// # Errors
    /// For impossible values; the text names the setting.
    pub fn take_config(&mut self) -> ApiResult<ModelConfig> {
        let config = ModelConfig {
            class: self.class.unwrap_or_default(),
            slo_ms: self.slo_ms,
            ..ModelConfig::default()
        };
        let config = match &self.settings {
            Some(settings) => settings.apply(&config, &config).map_err(ApiError::invalid)?,
            None => config,
        };
        let (labels, preprocessing) = (std::mem::take(&mut self.labels), self.preprocessing.take());
        Ok(ModelConfig { labels, preprocessing, ..config })
    }
}

/// The response to a [`RegisterRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Registered {
    /// The model.
    pub name: String,
    /// The registered version.
    pub version: String,
    /// Its state.
    pub state: ModelState,
}

/// An image to classify.
#[derive(Clone, Debug)]
pub struct ClassifyRequest {
    /// The model.
    pub model: String,
    /// A JPEG or PNG file.
    pub image: Bytes,
    /// Number of classes to return.
    pub k: usize,
}

/// One class and its score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The class's label; its number if the model has no labels.
    pub label: String,
    /// The class's number.
    pub index: usize,
    /// Its probability.
    pub score: f32,
}

/// The response to a [`ClassifyRequest`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Classification {
    /// The model.
    pub model: String,
    /// The version that ran.
    pub version: String,
    /// The best classes, best first.
    pub predictions: Vec<Prediction>,
}

/// The result of a service call. Dropping the future cancels the work.
pub type ServiceFuture<'a, T> = Pin<Box<dyn Future<Output = ApiResult<T>> + Send + 'a>>;

/// The error of a service without queries.
fn no_queries<'a, T: Send + 'a>() -> ServiceFuture<'a, T> {
    let why = "only frontends run queries: start with atoll serve --cluster, or atoll cluster \
               frontend";
    Box::pin(std::future::ready(Err(ApiError::new(ErrorKind::Unsupported, why))))
}

/// The error of a service without a registry.
fn no_registry<'a, T: Send + 'a>() -> ServiceFuture<'a, T> {
    let why = "this server has no registry of its own to delete from or to roll back in";
    Box::pin(std::future::ready(Err(ApiError::new(ErrorKind::Unsupported, why))))
}

/// The error of a service without canaries.
fn no_canaries<'a, T: Send + 'a>() -> ServiceFuture<'a, T> {
    let why = "only frontends of a cluster have canaries: start with atoll serve --cluster, or \
               atoll cluster frontend";
    Box::pin(std::future::ready(Err(ApiError::new(ErrorKind::Unsupported, why))))
}

/// The error of a service whose models keep their settings.
fn fixed_settings<'a, T: Send + 'a>() -> ServiceFuture<'a, T> {
    let why = "settings of a cluster's models are given when they are registered, or in the \
               repositories of its backends: register the model again with its class and SLO, or \
               change its file and restart the backends";
    Box::pin(std::future::ready(Err(ApiError::new(ErrorKind::Unsupported, why))))
}

/// All operations of REST and gRPC.
pub trait InferenceService: Send + Sync + 'static {
    /// Takes the place to which spans of parts of requests go. Called at most once, before any
    /// request, where spans are recorded.
    fn record_spans(&self, _sink: Arc<dyn SpanSink>) {}

    /// Name, version and supported extensions.
    fn server_metadata(&self) -> ServerMetadata;

    /// The pinned host pool for request bodies, if there is one.
    fn host_pool(&self) -> Option<Arc<dyn model::HostPool>> {
        None
    }

    /// Whether inference requests are accepted.
    fn ready(&self) -> bool;

    /// Whether `model` is ready. An error if it is unknown.
    fn model_ready<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, bool>;

    /// The inputs and outputs of `model`.
    fn model_metadata<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, ModelMetadata>;

    /// The configuration of `model` in the form Triton's clients read.
    fn model_config<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, proto::ModelConfig>;

    /// Runs `model` once. Dropping the future cancels the request.
    fn infer<'a>(
        &'a self,
        model: ModelRef<'a>,
        request: InferRequest,
        context: RequestContext,
    ) -> ServiceFuture<'a, InferResponse>;

    /// Statistics of `model`, or of all models.
    fn statistics<'a>(
        &'a self,
        model: Option<ModelRef<'a>>,
    ) -> ServiceFuture<'a, Vec<ModelStatistics>>;

    /// Every model of the repository, or only those that are ready.
    fn index(&self, only_ready: bool) -> ServiceFuture<'_, Vec<IndexEntry>>;

    /// Loads the newest version of `model`; returns when it is ready.
    fn load<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()>;

    /// Unloads `model`; returns when its last request is done.
    fn unload<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()>;

    /// Registers and loads a model.
    fn register(&self, request: RegisterRequest) -> ServiceFuture<'_, Registered>;

    /// Deletes a registered version of `model`, or all of them; returns how many there were.
    fn delete_model<'a>(&'a self, _model: ModelRef<'a>) -> ServiceFuture<'a, usize> {
        no_registry()
    }

    /// Puts an older registered version of `model` in service: the given one, or the one before.
    fn roll_back_model<'a>(&'a self, _model: ModelRef<'a>) -> ServiceFuture<'a, Registered> {
        no_registry()
    }

    /// Serves a registered version of `model` as a canary, the newest where none is given; or gives
    /// the running one another share and other rules.
    fn start_canary<'a>(
        &'a self,
        _model: ModelRef<'a>,
        _options: CanaryOptions,
    ) -> ServiceFuture<'a, CanaryStatus> {
        no_canaries()
    }

    /// Ends the canary of `model`: puts it in force, or gives all requests to the stable version.
    fn end_canary<'a>(
        &'a self,
        _model: &'a str,
        _promote: bool,
    ) -> ServiceFuture<'a, CanaryStatus> {
        no_canaries()
    }

    /// The canary of `model`, or the last one.
    fn canary<'a>(&'a self, _model: &'a str) -> ServiceFuture<'a, CanaryStatus> {
        no_canaries()
    }

    /// Changes settings of `model` while it is served; replies with all of them and with how long
    /// they are kept.
    fn change_settings<'a>(
        &'a self,
        _model: ModelRef<'a>,
        _change: SettingsChange,
    ) -> ServiceFuture<'a, Value> {
        fixed_settings()
    }

    /// Classifies an image.
    fn classify(
        &self,
        request: ClassifyRequest,
        context: RequestContext,
    ) -> ServiceFuture<'_, Classification>;

    /// Runs the models of a query once, one stage after another. Dropping the future cancels the
    /// request.
    fn query_infer<'a>(
        &'a self,
        _query: &'a str,
        _request: InferRequest,
        _context: RequestContext,
    ) -> ServiceFuture<'a, InferResponse> {
        no_queries()
    }

    /// All queries.
    fn queries(&self) -> ServiceFuture<'_, Vec<QueryMetadata>> {
        no_queries()
    }

    /// One query: its stages, latency split and statistics.
    fn query<'a>(&'a self, _query: &'a str) -> ServiceFuture<'a, QueryMetadata> {
        no_queries()
    }

    /// Stores a query, written in TOML or JSON.
    fn put_query<'a>(
        &'a self,
        _query: &'a str,
        _text: &'a str,
    ) -> ServiceFuture<'a, QueryMetadata> {
        no_queries()
    }

    /// Deletes a query.
    fn delete_query<'a>(&'a self, _query: &'a str) -> ServiceFuture<'a, ()> {
        no_queries()
    }

    /// Its figures and spans; `None` where nothing is recorded.
    fn monitor(&self) -> Option<Arc<dyn Monitor>> {
        None
    }

    /// Settings of `model`, and what its launch plan consists of.
    fn model_details<'a>(&'a self, _model: ModelRef<'a>) -> ServiceFuture<'a, Value> {
        let why = "only servers with devices have details of models: ask a backend";
        Box::pin(std::future::ready(Err(ApiError::unsupported(why))))
    }

    /// Measures the steps of `model` and reports the slowest.
    fn model_steps<'a>(&'a self, _model: ModelRef<'a>) -> ServiceFuture<'a, Value> {
        let why = "only servers with devices measure the steps of models: ask a backend";
        Box::pin(std::future::ready(Err(ApiError::unsupported(why))))
    }

    /// Machines, routes and the current plan of a cluster; `null` where there is none.
    fn cluster_status(&self) -> ServiceFuture<'_, Value> {
        Box::pin(std::future::ready(Ok(Value::Null)))
    }

    /// Appends its metrics in the Prometheus text format.
    fn write_metrics(&self, text: &mut String);

    /// Refuses new requests and waits until none is in flight; `false` after `limit`.
    fn drain(&self, limit: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside_their_folder() {
        assert!(check_model_name("resnet-50_v1.5").is_ok());
        let long = "a".repeat(129);
        for bad in
            ["", ".", "..", "a/b", "../a", "a\\b", ".hidden", "-rf", "a b", "é", "a\0", &long]
        {
            assert!(check_model_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn versions_are_numbers_from_one() {
        assert_eq!(ModelRef::parse("m", "").unwrap().version, None);
        assert_eq!(ModelRef::parse("m", "3").unwrap().version, Some(3));
        for bad in ["0", "-1", "x", "1.0", "99999999999999999999"] {
            assert!(ModelRef::parse("m", bad).is_err(), "{bad}");
        }
    }
}
