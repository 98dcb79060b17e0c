//! What the roles tell each other through the store: keys, and values as JSON.

use std::collections::BTreeMap;

use bytes::Bytes;
use model::ModelConfig;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Names of keys. All of a cluster's begin alike, so that clusters can share a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    root: String,
}

impl Keys {
    /// The keys of the cluster `name`.
    pub fn new(name: &str) -> Keys {
        Keys { root: format!("/atoll/{name}/") }
    }

    /// Everything.
    pub fn all(&self) -> &str {
        &self.root
    }

    /// Who leads.
    pub fn leader(&self) -> String {
        format!("{}leader", self.root)
    }

    /// The plan in short.
    pub fn plan(&self) -> String {
        format!("{}plan", self.root)
    }

    /// How many backends there are to be.
    pub fn scaling(&self) -> String {
        format!("{}scaling", self.root)
    }

    /// All keys of one kind.
    pub fn of(&self, kind: RecordKind) -> String {
        format!("{}{}", self.root, kind.folder_prefix())
    }

    /// One key of a kind.
    pub fn one(&self, kind: RecordKind, name: &str) -> String {
        format!("{}{}{name}", self.root, kind.folder_prefix())
    }
}

/// Kinds of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Backends that are there ([`BackendRecord`]), by lease.
    Backend,
    /// What backends have loaded ([`BackendState`]), by lease.
    State,
    /// Frontends that are there ([`FrontendRecord`]), by lease.
    Frontend,
    /// What frontends see ([`LoadReport`]), by lease.
    Load,
    /// Models ([`ModelRecord`]).
    Model,
    /// Measured models ([`ProfileRecord`]), by device kind and content.
    Profile,
    /// What backends are to hold ([`Assignment`]).
    Assignment,
    /// Where requests go ([`RouteRecord`]), by model.
    Route,
    /// Queries ([`crate::query::spec::QuerySpec`]).
    Query,
    /// Budgets of queries' stages ([`SplitRecord`]), by query.
    Split,
}

impl RecordKind {
    /// How keys of this kind begin, after what all keys begin with.
    pub fn folder_prefix(self) -> &'static str {
        match self {
            RecordKind::Backend => "backends/",
            RecordKind::State => "states/",
            RecordKind::Frontend => "frontends/",
            RecordKind::Load => "loads/",
            RecordKind::Model => "models/",
            RecordKind::Profile => "profiles/",
            RecordKind::Assignment => "assignments/",
            RecordKind::Route => "routes/",
            RecordKind::Query => "queries/",
            RecordKind::Split => "splits/",
        }
    }
}

/// The key of a profile inside its kind.
pub fn profile_name(device: &str, digest: &str) -> String {
    format!("{device}/{digest}")
}

/// `record` as it is stored.
pub fn encode(record: &impl Serialize) -> Bytes {
    // Maps with text keys and plain structs always have a JSON form.
    serde_json::to_vec(record).unwrap_or_default().into()
}

/// What is stored; a record that cannot be read is reported and left out, for one writer of another
/// release must not stop everybody.
pub fn decode<T: DeserializeOwned>(key: &str, value: &[u8]) -> Option<T> {
    match serde_json::from_slice(value) {
        Ok(record) => Some(record),
        Err(error) => {
            tracing::warn!(key, %error, "cannot decode record");
            None
        }
    }
}

/// A machine that runs models.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BackendRecord {
    /// Where its gRPC listens, `HOST:PORT`.
    pub grpc: String,
    /// Where its REST listens.
    pub http: String,
    /// Backends of one kind run a model equally fast.
    pub device: String,
    /// Memory for models; 0 when it has no bound that matters.
    #[serde(default)]
    pub memory_bytes: u64,
}

/// Where a model stands on a backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum LoadState {
    /// Being loaded.
    Loading,
    /// Answers.
    Ready {
        /// The version that does.
        version: u64,
    },
    /// Cannot be loaded.
    Failed {
        /// The version that cannot.
        version: u64,
        /// Why.
        reason: String,
    },
}

/// What a backend has loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendState {
    /// By model.
    pub models: BTreeMap<String, LoadState>,
}

/// A process that takes requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendRecord {
    /// Where its gRPC listens.
    pub grpc: String,
    /// Where its REST listens.
    pub http: String,
}

/// What a frontend sees of one model. Counts are since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelLoad {
    /// Requests a second over the last seconds.
    pub fast: f64,
    /// Seconds that `fast` speaks of.
    pub window: f64,
    /// Requests a second over a longer time.
    pub slow: f64,
    /// Requests that came.
    pub arrived: u64,
    /// Requests answered with outputs.
    pub answered: u64,
    /// Of those, answered after their objective.
    pub late: u64,
    /// Requests refused or given up.
    pub refused: u64,
    /// Requests sent to a second backend.
    pub retried: u64,
    /// 99 of 100 recent answers took at most this, in milliseconds.
    pub p99_ms: f64,
}

/// What a frontend sees of one stage of a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageLoad {
    /// Requests a second over a longer time.
    pub slow: f64,
    /// 99 of 100 recent questions spent at most this here, in milliseconds.
    pub p99_ms: f64,
}

/// What a frontend sees of one query.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueryLoad {
    /// Questions, as requests of a model are seen.
    #[serde(rename = "questions")]
    pub requests: ModelLoad,
    /// Questions a second that came through all stages, over a longer time: what fan-outs are measured against.
    #[serde(rename = "walked")]
    pub completed: f64,
    /// 99 of 100 recent questions spent at most this between stages, in milliseconds.
    pub between_ms: f64,
    /// By stage.
    pub stages: BTreeMap<String, StageLoad>,
}

/// What a frontend sees.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// By model.
    pub models: BTreeMap<String, ModelLoad>,
    /// By query.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub queries: BTreeMap<String, QueryLoad>,
}

/// A stage's part of its query's objective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageBudget {
    /// Milliseconds it may take.
    pub budget_ms: f64,
    /// Milliseconds that stages after it need at the very least.
    pub reserve_ms: f64,
    /// Requests a question makes of it.
    pub fan_out: f64,
}

/// How a query's objective is split.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SplitRecord {
    /// By stage.
    pub stages: BTreeMap<String, StageBudget>,
    /// Machines that a question a second takes, over all stages; 0 where unknown.
    pub cost: f64,
    /// Whether no other split at this resolution costs less.
    pub exact: bool,
    /// Why the objective is only divided evenly, where that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub even_because: Option<String>,
}

/// A model of the cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Its version, from 1.
    pub version: u64,
    /// SHA-256 of its file: its name in the model store.
    pub digest: String,
    /// Bytes of its file.
    pub bytes: u64,
    /// Whether it is to be served.
    pub enabled: bool,
    /// Its settings.
    #[serde(default)]
    pub config: ModelConfig,
}

/// A model as measured on one kind of device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProfileRecord {
    /// Milliseconds of each batch size, batches rising.
    pub curve: Vec<(u32, f64)>,
    /// Memory it takes, 0 when unknown.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Steps that do much of its work, in order: hashes of all that each is computed from, and shares of the work. Models
    /// with the same ones begin alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<(String, f64)>,
}

/// Why a backend holds a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AssignmentRole {
    /// It serves a part of the model's rate.
    Serving,
    /// It is there for when another one is lost.
    Standby,
    /// It stays until others have taken over.
    Shadow,
}

/// A model that a backend is to hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AssignedModel {
    /// The model.
    pub model: String,
    /// The version.
    pub version: u64,
    /// Why.
    #[serde(rename = "part")]
    pub role: AssignmentRole,
    /// Requests that one turn takes.
    pub batch: u32,
    /// Requests a second that are planned to come.
    pub rate: f64,
    /// Requests that a turn begins with, where the backend is one of a pool; else 0.
    #[serde(rename = "least", default, skip_serializing_if = "is_zero")]
    pub min_batch: u32,
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// What a backend is to hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The epoch that decided it.
    pub epoch: u64,
    /// Length of the duty cycle in milliseconds; 0 when nothing is served.
    pub cycle_ms: f64,
    /// What.
    #[serde(rename = "shares")]
    pub models: Vec<AssignedModel>,
}

/// A backend that answers for a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// The backend.
    pub backend: String,
    /// Where its gRPC listens.
    pub grpc: String,
    /// Where its REST listens.
    pub http: String,
    /// Its part of the requests; 0 for one that only helps out.
    pub weight: f64,
    /// Requests that one turn takes.
    pub batch: u32,
    /// Milliseconds that a turn of a full batch takes; 0 when unknown.
    pub batch_ms: f64,
    /// Length of its duty cycle in milliseconds.
    pub cycle_ms: f64,
    /// Requests that a turn begins with, where it is one of a pool that does nothing else; else 0.
    #[serde(rename = "least", default, skip_serializing_if = "is_zero")]
    pub min_batch: u32,
}

/// Where requests for a model go.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RouteRecord {
    /// The epoch that decided it.
    pub epoch: u64,
    /// To whom.
    pub targets: Vec<TargetRecord>,
    /// Requests a second that all frontends together let in, where the cluster is too small for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_max: Option<f64>,
}

/// How many backends there are to be, and who sees to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalingRecord {
    /// What is scaled, such as `deployment/atoll-backend`.
    pub target: String,
    /// Replicas that the load takes, within the bounds.
    pub wanted: u32,
    /// Replicas asked for.
    pub replicas: u32,
    /// Replicas that are backends of the cluster.
    pub present: usize,
    /// Backends that are being emptied so that they can go.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub draining: Vec<String>,
    /// Failures to read or change it, under all leaders.
    pub errors: u64,
    /// The latest one, while it lasts, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The plan in short.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// Counts plans.
    pub epoch: u64,
    /// Why it was made.
    pub reason: String,
    /// Backends that serve something.
    pub used: usize,
    /// Backends there are.
    pub backends: usize,
    /// Fewer backends cannot do.
    pub bound: f64,
    /// Planned rates over observed ones: above 1 there is room, below 1 the cluster is too small.
    pub scale: f64,
    /// Loads of models that plans have caused so far.
    pub moves: u64,
    /// Models whose objective no batch meets.
    pub unattainable: Vec<String>,
    /// Models that begin alike and are planned as one.
    #[serde(alias = "families", default, skip_serializing_if = "Vec::is_empty")]
    pub prefix_groups: Vec<Vec<String>>,
    /// Models that every backend failed to load, and why.
    pub failed: BTreeMap<String, String>,
    /// Milliseconds that planning took.
    pub plan_ms: f64,
}
