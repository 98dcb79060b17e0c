//! What a server says about itself and its models.

use serde::Serialize;

/// The answer to `GET /v2`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ServerMetadata {
    /// The server's name.
    pub name: String,
    /// The server's version.
    pub version: String,
    /// The extensions that work.
    pub extensions: Vec<String>,
}

/// An input or an output of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorMetadata {
    /// Its name.
    pub name: String,
    /// The protocol's name of the element type.
    pub datatype: String,
    /// Its dimensions; -1 where a request decides.
    pub shape: Vec<i64>,
}

/// The answer to `GET /v2/models/M`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelMetadata {
    /// The model.
    pub name: String,
    /// The versions that answer.
    pub versions: Vec<String>,
    /// What kind of model it is.
    pub platform: String,
    /// Its inputs.
    pub inputs: Vec<TensorMetadata>,
    /// Its outputs.
    pub outputs: Vec<TensorMetadata>,
}

/// Where a model stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ModelState {
    /// Being made ready.
    Loading,
    /// Answers requests.
    Ready,
    /// Finishes what is under way.
    Unloading,
    /// Does not answer.
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

/// A row of the repository's index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IndexEntry {
    /// The model.
    pub name: String,
    /// The version; empty when not even that is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Where it stands; absent when nobody asked for it so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<ModelState>,
    /// Why it stands there, when there is something to say.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// How often something happened and how long it took in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DurationStat {
    /// How often.
    pub count: u64,
    /// Nanoseconds in all.
    pub ns: u64,
}

/// Where the time of a model's requests went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InferenceStats {
    /// Requests answered with outputs.
    pub success: DurationStat,
    /// Requests answered with an error.
    pub fail: DurationStat,
    /// Waiting for the device.
    pub queue: DurationStat,
    /// Making inputs ready.
    pub compute_input: DurationStat,
    /// On the device.
    pub compute_infer: DurationStat,
    /// Making outputs ready.
    pub compute_output: DurationStat,
    /// Answers from a cache.
    pub cache_hit: DurationStat,
    /// Answers that a cache did not have.
    pub cache_miss: DurationStat,
}

/// The time of executions of one batch size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BatchStats {
    /// The batch size.
    pub batch_size: u64,
    /// Making inputs ready.
    pub compute_input: DurationStat,
    /// On the device.
    pub compute_infer: DurationStat,
    /// Making outputs ready.
    pub compute_output: DurationStat,
}

/// What one version of a model has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelStatistics {
    /// The model.
    pub name: String,
    /// The version.
    pub version: String,
    /// Milliseconds since the epoch of the last answer.
    pub last_inference: u64,
    /// Inferences done; a batch of n counts n.
    pub inference_count: u64,
    /// Executions done; a batch counts once.
    pub execution_count: u64,
    /// Where the time went.
    pub inference_stats: InferenceStats,
    /// The same by batch size.
    pub batch_stats: Vec<BatchStats>,
}

/// The answer to `GET /v2/models/stats`.
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
    /// Whether somebody answers for the model.
    pub ready: bool,
    /// Its part of the objective in milliseconds, once that is decided.
    pub budget_ms: Option<f64>,
    /// Requests that a question makes of it.
    pub fan_out: Option<f64>,
    /// 99 of 100 recent questions spent at most this there, in milliseconds.
    pub p99_ms: f64,
}

/// A query: models that feed each other, under one objective.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueryMetadata {
    /// Its name.
    pub name: String,
    /// Its objective in milliseconds.
    pub slo_ms: f64,
    /// What it takes.
    pub inputs: Vec<String>,
    /// What it answers.
    pub outputs: Vec<String>,
    /// Its stages.
    pub stages: Vec<QueryStageMetadata>,
    /// Why the objective is only divided evenly, where that is so.
    pub even_because: Option<String>,
    /// Whether the split is proven best.
    pub exact: bool,
    /// Questions that came here.
    pub requests: u64,
    /// Questions answered.
    pub answered: u64,
    /// Of those, after the objective.
    pub late: u64,
    /// Questions refused or given up.
    pub refused: u64,
    /// 99 of 100 recent answers took at most this, in milliseconds.
    pub p99_ms: f64,
    /// Of that, outside of models.
    pub between_p99_ms: f64,
}
