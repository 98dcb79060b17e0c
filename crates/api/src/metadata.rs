//! Metadata, statistics and index of a server and its models.

use serde::Serialize;

/// The response to `GET /v2`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ServerMetadata {
    /// The server's name.
    pub name: String,
    /// The server's version.
    pub version: String,
    /// Supported extensions.
    pub extensions: Vec<String>,
}

/// An input or an output of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorMetadata {
    /// Its name.
    pub name: String,
    /// The protocol's name of the element type.
    pub datatype: String,
    /// Its dimensions; -1 if the request decides.
    pub shape: Vec<i64>,
}

/// The response to `GET /v2/models/M`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelMetadata {
    /// The model.
    pub name: String,
    /// The versions in service.
    pub versions: Vec<String>,
    /// The platform.
    pub platform: String,
    /// Its inputs.
    pub inputs: Vec<TensorMetadata>,
    /// Its outputs.
    pub outputs: Vec<TensorMetadata>,
}

/// State of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ModelState {
    /// Being loaded.
    Loading,
    /// Ready for requests.
    Ready,
    /// Finishing its requests in flight.
    Unloading,
    /// Not in service.
    Unavailable,
}

impl ModelState {
    /// The protocol's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            ModelState::Loading => "LOADING",
            ModelState::Ready => "READY",
            ModelState::Unloading => "UNLOADING",
            ModelState::Unavailable => "UNAVAILABLE",
        }
    }
}

/// An entry of the repository index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IndexEntry {
    /// The model.
    pub name: String,
    /// The version; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Its state; absent if it was never loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<ModelState>,
    /// Reason of the state; may be empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// Number of events and their total duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DurationStat {
    /// Number of events.
    pub count: u64,
    /// Total nanoseconds.
    pub ns: u64,
}

/// Durations of a model's requests by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InferenceStats {
    /// Requests with outputs.
    pub success: DurationStat,
    /// Failed requests.
    pub fail: DurationStat,
    /// Waiting for the device.
    pub queue: DurationStat,
    /// Preparing inputs.
    pub compute_input: DurationStat,
    /// On the device.
    pub compute_infer: DurationStat,
    /// Preparing outputs.
    pub compute_output: DurationStat,
    /// Responses from a cache.
    pub cache_hit: DurationStat,
    /// Responses that were not cached.
    pub cache_miss: DurationStat,
}

/// The time of executions of one batch size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BatchStats {
    /// The batch size.
    pub batch_size: u64,
    /// Preparing inputs.
    pub compute_input: DurationStat,
    /// On the device.
    pub compute_infer: DurationStat,
    /// Preparing outputs.
    pub compute_output: DurationStat,
}

/// Statistics of one model version.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelStatistics {
    /// The model.
    pub name: String,
    /// The version.
    pub version: String,
    /// Unix time of the last reply in milliseconds.
    pub last_inference: u64,
    /// Inferences; a batch of n counts n.
    pub inference_count: u64,
    /// Executions; a batch counts once.
    pub execution_count: u64,
    /// Durations by phase.
    pub inference_stats: InferenceStats,
    /// Statistics per batch size.
    pub batch_stats: Vec<BatchStats>,
}

/// The response to `GET /v2/models/stats`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StatisticsResponse {
    /// One entry per model and version.
    pub model_stats: Vec<ModelStatistics>,
}

/// A stage of a query.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueryStageMetadata {
    /// Its name.
    pub name: String,
    /// Its model.
    pub model: String,
    /// Positions of the stages whose outputs it reads.
    pub after: Vec<usize>,
    /// Whether a backend serves the model.
    pub ready: bool,
    /// Its latency budget in milliseconds, once it is known.
    pub budget_ms: Option<f64>,
    /// Requests to the stage per request to the query.
    pub fan_out: Option<f64>,
    /// 99th percentile of the recent time in the stage, in milliseconds.
    pub p99_ms: f64,
}

/// A query: models that feed each other, under one SLO.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueryMetadata {
    /// Its name.
    pub name: String,
    /// Its SLO in milliseconds.
    pub slo_ms: f64,
    /// Its inputs.
    pub inputs: Vec<String>,
    /// Its outputs.
    pub outputs: Vec<String>,
    /// Its stages.
    pub stages: Vec<QueryStageMetadata>,
    /// Why the SLO is split evenly, if it is.
    pub even_because: Option<String>,
    /// Whether the split is proven optimal.
    pub exact: bool,
    /// Requests received.
    pub requests: u64,
    /// Requests with outputs.
    pub answered: u64,
    /// Requests with outputs that missed the SLO.
    pub late: u64,
    /// Requests refused or cancelled.
    pub refused: u64,
    /// 99th percentile of the recent latency in milliseconds.
    pub p99_ms: f64,
    /// Share of that spent outside of models.
    pub between_p99_ms: f64,
}
