//! The service behind every wire: one node, a fake in a test, or a whole cluster.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use model::config::{Class, Preprocessing};
use serde::Serialize;

use crate::error::{ApiError, ApiResult, ErrorKind};
use crate::infer::{InferRequest, InferResponse};
use crate::metadata::{
    IndexEntry, ModelMetadata, ModelState, ModelStatistics, QueryMetadata, ServerMetadata,
};
use crate::proto;
use crate::trace::TraceContext;

/// The most bytes of a model's name.
pub const MAX_MODEL_NAME: usize = 128;

/// A model, and perhaps one version of it; the newest one that is ready otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelRef<'a> {
    /// The model's name.
    pub name: &'a str,
    /// The version.
    pub version: Option<u64>,
}

impl<'a> ModelRef<'a> {
    /// The model `name` at `version` as the wire spells it; empty means the default.
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

/// Checks a name under which a model is to be kept: it becomes part of paths and of URLs.
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

/// What surrounds a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestContext {
    /// The caller's place in a trace.
    pub trace: Option<TraceContext>,
}

/// A model to keep from now on.
#[derive(Clone, Debug)]
pub struct RegisterRequest {
    /// Its name; checked by [`check_model_name`].
    pub name: String,
    /// The ONNX file.
    pub onnx: Bytes,
    /// Names of the classes it tells apart, in the order of its scores.
    pub labels: Vec<String>,
    /// How images become its input.
    pub preprocessing: Option<Preprocessing>,
    /// The class of its requests.
    pub class: Option<Class>,
    /// Time within which its requests shall be answered, in milliseconds.
    pub slo_ms: Option<u64>,
}

/// The answer to a [`RegisterRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Registered {
    /// The model.
    pub name: String,
    /// The version it got.
    pub version: String,
    /// Where it stands.
    pub state: ModelState,
}

/// An image to classify.
#[derive(Clone, Debug)]
pub struct ClassifyRequest {
    /// The model.
    pub model: String,
    /// A JPEG or PNG file.
    pub image: Bytes,
    /// How many of the best classes to return.
    pub k: usize,
}

/// One class and its score.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The class's name; its number when the model has no labels.
    pub label: String,
    /// The class's number.
    pub index: usize,
    /// Its probability.
    pub score: f32,
}

/// The answer to a [`ClassifyRequest`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Classification {
    /// The model.
    pub model: String,
    /// The version that answered.
    pub version: String,
    /// The best classes, best first.
    pub predictions: Vec<Prediction>,
}

/// What a service call returns: a future that may be dropped, which gives the work up.
pub type ServiceFuture<'a, T> = Pin<Box<dyn Future<Output = ApiResult<T>> + Send + 'a>>;

/// The answer of a service that walks no stages.
fn no_queries<'a, T: Send + 'a>() -> ServiceFuture<'a, T> {
    let why = "queries are answered by frontends: start with atoll serve --cluster, or atoll cluster frontend";
    Box::pin(std::future::ready(Err(ApiError::new(ErrorKind::Unsupported, why))))
}

/// Everything REST and gRPC offer.
pub trait InferenceService: Send + Sync + 'static {
    /// Name, version and the extensions that work.
    fn server_metadata(&self) -> ServerMetadata;

    /// Lends memory for the bodies of requests, where some is better than other.
    fn host_pool(&self) -> Option<std::sync::Arc<dyn model::HostPool>> {
        None
    }

    /// Whether inference requests are taken.
    fn ready(&self) -> bool;

    /// Whether `model` answers. Fails when there is no such model.
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

    /// What models have done; all of them when `model` is `None`.
    fn statistics<'a>(
        &'a self,
        model: Option<ModelRef<'a>>,
    ) -> ServiceFuture<'a, Vec<ModelStatistics>>;

    /// Every model of the repository, or only those that are ready.
    fn index(&self, only_ready: bool) -> ServiceFuture<'_, Vec<IndexEntry>>;

    /// Makes the newest version of `model` ready; returns when it is.
    fn load<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()>;

    /// Takes `model` out of service; returns when its last request is done.
    fn unload<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()>;

    /// Keeps a model and makes it ready.
    fn register(&self, request: RegisterRequest) -> ServiceFuture<'_, Registered>;

    /// Names what an image shows.
    fn classify(
        &self,
        request: ClassifyRequest,
        context: RequestContext,
    ) -> ServiceFuture<'_, Classification>;

    /// Runs the models of a query once, one stage after another. Dropping the future gives the question up.
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

    /// One query: its stages, how its objective is split, what was seen of it.
    fn query<'a>(&'a self, _query: &'a str) -> ServiceFuture<'a, QueryMetadata> {
        no_queries()
    }

    /// Keeps a query, written in TOML or JSON.
    fn put_query<'a>(
        &'a self,
        _query: &'a str,
        _text: &'a str,
    ) -> ServiceFuture<'a, QueryMetadata> {
        no_queries()
    }

    /// Forgets a query.
    fn delete_query<'a>(&'a self, _query: &'a str) -> ServiceFuture<'a, ()> {
        no_queries()
    }

    /// Appends its metrics in the Prometheus text format.
    fn write_metrics(&self, text: &mut String);

    /// Takes no more work and waits until none is under way, or `false` after `limit`.
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
