//! The records that the roles exchange through the store: keys, and values as JSON.
//! [`validation`] checks what is read.

use std::collections::BTreeMap;

use bytes::Bytes;
use model::ModelConfig;
use serde::ser::SerializeTuple;
use serde::{Deserialize, Serialize, Serializer};

pub mod canary;
pub mod scaling;
pub mod signature;
pub mod validation;

use canary::{CanaryLoad, CanaryOutcome, CanaryRecord, EndedCanary};
pub use scaling::{ColdStartLoad, ReplicaPoolRecord, ScalingRecord};
use validation::StoredRecord;

/// Names of keys. All keys of a cluster have one prefix, so that clusters can share a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    root: String,
}

impl Keys {
    /// The keys of the cluster `name`.
    pub fn new(name: &str) -> Keys {
        Keys { root: format!("/atoll/{name}/") }
    }

    /// The prefix of all keys.
    pub fn all(&self) -> &str {
        &self.root
    }

    /// The key of the leader's name.
    pub fn leader(&self) -> String {
        format!("{}leader", self.root)
    }

    /// The key of the plan's summary.
    pub fn plan(&self) -> String {
        format!("{}plan", self.root)
    }

    /// The key of the scaling record.
    pub fn scaling(&self) -> String {
        format!("{}scaling", self.root)
    }

    /// The prefix of all keys of one kind.
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
    /// Backends that have joined ([`BackendRecord`]); leased.
    Backend,
    /// Models that backends have loaded ([`BackendState`]); leased.
    State,
    /// Frontends that have joined ([`FrontendRecord`]); leased.
    Frontend,
    /// Load that frontends observe ([`LoadReport`]); leased.
    Load,
    /// What has changed since ([`LoadReport`] of these models), several by frontend; leased.
    LoadDelta,
    /// Models ([`ModelRecord`]).
    Model,
    /// Profiles of models ([`ProfileRecord`]), by device kind and digest.
    Profile,
    /// Models assigned to backends ([`Assignment`]).
    Assignment,
    /// Routes of requests ([`RouteRecord`]), by model.
    Route,
    /// Queries ([`crate::query::spec::QuerySpec`]).
    Query,
    /// Budgets of queries' stages ([`SplitRecord`]), by query.
    Split,
    /// Versions before they replace anything ([`crate::candidate::CandidateRecord`]); leased.
    Candidate,
    /// Inputs and outputs of models ([`signature::SignatureRecord`]), by digest.
    Signature,
    /// What the leader knows of canaries ([`canary::CanaryProgress`]), by model.
    Canary,
}

impl RecordKind {
    /// The prefix of this kind's keys, after the cluster's prefix.
    pub fn folder_prefix(self) -> &'static str {
        match self {
            RecordKind::Backend => "backends/",
            RecordKind::State => "states/",
            RecordKind::Frontend => "frontends/",
            RecordKind::Load => "loads/",
            RecordKind::LoadDelta => "load-deltas/",
            RecordKind::Model => "models/",
            RecordKind::Profile => "profiles/",
            RecordKind::Assignment => "assignments/",
            RecordKind::Route => "routes/",
            RecordKind::Query => "queries/",
            RecordKind::Split => "splits/",
            RecordKind::Candidate => "candidates/",
            RecordKind::Signature => "signatures/",
            RecordKind::Canary => "canaries/",
        }
    }
}

/// The name of a profile's key.
pub fn profile_name(device: &str, digest: &str) -> String {
    format!("{device}/{digest}")
}

/// Encodes a record as it is stored.
pub fn encode(record: &impl Serialize) -> Bytes {
    // Maps with text keys and plain structs always have a JSON form.
    serde_json::to_vec(record).unwrap_or_default().into()
}

/// Decodes a stored record, and moves its numbers into their ranges. One that is damaged is logged
/// and ignored: a hostile writer, or one of another release, must not stop the cluster. `None` also
/// for the tombstone of a deleted record.
pub fn decode<T: StoredRecord>(key: &str, value: &[u8]) -> Option<T> {
    validation::read(value).unwrap_or_else(|error| {
        validation::report(T::KIND, key, value, &error);
        None
    })
}

/// The value in place of a record that was deleted on purpose. A record that is missing without one
/// was lost, and is written again by those who know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// Always true.
    pub deleted: bool,
    /// The highest number that a version of the model ever had.
    #[serde(default)]
    pub highest: u64,
}

/// Tombstones are short.
const TOMBSTONE_BYTES_MAX: usize = 64;

impl Tombstone {
    /// Of a model whose versions had numbers up to `highest`.
    pub fn new(highest: u64) -> Tombstone {
        Tombstone { deleted: true, highest }
    }

    /// The tombstone that a value is, if it is one.
    pub fn read(value: &[u8]) -> Option<Tombstone> {
        if value.len() > TOMBSTONE_BYTES_MAX || !value.starts_with(b"{\"deleted\":true") {
            return None;
        }
        serde_json::from_slice(value).ok()
    }
}

/// Whether a value says that its record was deleted.
pub fn is_tombstone(value: &[u8]) -> bool {
    Tombstone::read(value).is_some()
}

/// A machine that runs models.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BackendRecord {
    /// Address of its gRPC server, `HOST:PORT`.
    pub grpc: String,
    /// Address of its REST server.
    pub http: String,
    /// Kind of device: backends of one kind run a model equally fast.
    pub device: String,
    /// Memory for models; 0 for no limit.
    #[serde(default)]
    pub memory_bytes: u64,
}

/// State of a model on a backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum LoadState {
    /// The model is loading.
    Loading,
    /// The model serves requests.
    Ready {
        /// The loaded version.
        version: u64,
    },
    /// The model cannot be loaded.
    Failed {
        /// The version that failed.
        version: u64,
        /// The reason.
        reason: String,
    },
}

/// The models of a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendState {
    /// State by model.
    pub models: BTreeMap<String, LoadState>,
    /// Versions that could not be loaded where an older one serves on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failed: BTreeMap<String, FailedUpdate>,
}

/// A version that could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedUpdate {
    /// The version.
    pub version: u64,
    /// Why.
    pub reason: String,
}

/// A process that receives requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendRecord {
    /// Address of its gRPC server.
    pub grpc: String,
    /// Address of its REST server.
    pub http: String,
}

/// What a frontend observes of one model. Counts start with the process. It is stored as the list
/// of its fields in this order, which older releases read as well as the map they write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct ModelLoad {
    /// Requests per second over the last seconds.
    pub fast: f64,
    /// Seconds that `fast` covers.
    pub window: f64,
    /// Requests per second over a longer time.
    pub slow: f64,
    /// Requests received.
    pub arrived: u64,
    /// Requests answered with outputs.
    pub answered: u64,
    /// Of those, answered after their SLO.
    pub late: u64,
    /// Requests refused or cancelled.
    pub refused: u64,
    /// Requests sent to a second backend.
    pub retried: u64,
    /// 99th percentile of recent latencies in milliseconds.
    pub p99_ms: f64,
}

impl Serialize for ModelLoad {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_tuple(9)?;
        for value in [self.fast, self.window, self.slow] {
            add_number(&mut fields, value)?;
        }
        for count in [self.arrived, self.answered, self.late, self.refused, self.retried] {
            fields.serialize_element(&count)?;
        }
        add_number(&mut fields, self.p99_ms)?;
        fields.end()
    }
}

/// Adds a number, without a fraction where it has none.
fn add_number<T: SerializeTuple>(fields: &mut T, value: f64) -> Result<(), T::Error> {
    match value.fract() == 0.0 && (0.0..1e15).contains(&value) {
        true => fields.serialize_element(&(value as u64)),
        false => fields.serialize_element(&value),
    }
}

/// What a frontend observes of one stage of a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageLoad {
    /// Requests per second over a longer time.
    pub slow: f64,
    /// 99th percentile of the time that recent query requests spent in it, in milliseconds.
    pub p99_ms: f64,
}

/// What a frontend observes of one query.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct QueryLoad {
    /// Its requests, counted as those of a model.
    #[serde(rename = "questions")]
    pub requests: ModelLoad,
    /// Requests per second that completed all stages, over a longer time: the base of measured
    /// fan-outs.
    #[serde(rename = "walked")]
    pub completed: f64,
    /// 99th percentile of the time that recent requests spent between stages, in milliseconds.
    pub between_ms: f64,
    /// By stage.
    pub stages: BTreeMap<String, StageLoad>,
}

/// What a frontend observes: a whole report, or what has changed since
/// ([`crate::load_reports`]).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Number of the whole report, also in its deltas.
    #[serde(default)]
    pub number: u64,
    /// By model.
    pub models: BTreeMap<String, ModelLoad>,
    /// By query.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub queries: BTreeMap<String, QueryLoad>,
    /// Addresses of backends that the frontend avoids because of their replies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ejected: Vec<String>,
    /// Models whose requests wait for a backend, and about how many of them do.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub waiting: BTreeMap<String, u64>,
    /// No request came for some seconds, and none is in flight or waits.
    #[serde(default, skip_serializing_if = "is_false")]
    pub idle: bool,
    /// Cold starts, once there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_starts: Option<ColdStartLoad>,
    /// Models with a canary: what was counted of both versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub canaries: BTreeMap<String, CanaryLoad>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// A stage's share of its query's SLO.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageBudget {
    /// Milliseconds it may take.
    pub budget_ms: f64,
    /// Milliseconds that later stages need at least.
    pub reserve_ms: f64,
    /// Requests to this stage per query request.
    pub fan_out: f64,
}

/// How a query's SLO is split.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SplitRecord {
    /// By stage.
    pub stages: BTreeMap<String, StageBudget>,
    /// Machines needed for one query request per second, over all stages; 0 when unknown.
    pub cost: f64,
    /// Whether no other split at this resolution costs less.
    pub exact: bool,
    /// Why the SLO is only divided evenly, where that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub even_because: Option<String>,
}

/// Backends that a report or a plan names as avoided, which bounds what is written of them.
pub const AVOIDED_MAX: usize = 1024;

/// Versions that a model's record keeps beside the one in force.
const OTHER_VERSIONS_MAX: usize = 4;

/// A version of a model that is not in force, and can be again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VersionRecord {
    /// Its number.
    pub version: u64,
    /// SHA-256 of its file.
    pub digest: String,
    /// Size of its file.
    pub bytes: u64,
    /// Its settings.
    #[serde(default)]
    pub config: ModelConfig,
}

/// A model of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelRecord {
    /// Its version, from 1.
    pub version: u64,
    /// SHA-256 of its file, which is its name in the model store.
    pub digest: String,
    /// Size of its file.
    pub bytes: u64,
    /// Whether it is served.
    pub enabled: bool,
    /// Its settings.
    #[serde(default)]
    pub config: ModelConfig,
    /// The highest number that a version ever had, if it is not the highest of those here.
    #[serde(default)]
    pub highest: u64,
    /// Other versions, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<VersionRecord>,
    /// The version that is served beside the one in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanaryRecord>,
    /// The last canary that was decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_canary: Option<EndedCanary>,
}

impl ModelRecord {
    /// The version in force.
    pub fn in_force(&self) -> VersionRecord {
        VersionRecord {
            version: self.version,
            digest: self.digest.clone(),
            bytes: self.bytes,
            config: self.config.clone(),
        }
    }

    /// Digest and size of the files of all versions.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        let others = self.others.iter().map(|other| (other.digest.as_str(), other.bytes));
        others.chain([(self.digest.as_str(), self.bytes)])
    }

    /// Adds a version to the others, of which the oldest go.
    fn add_other(&mut self, version: VersionRecord) {
        self.others.retain(|other| other.version != version.version);
        self.others.push(version);
        self.others.sort_by_key(|other| other.version);
        self.others.drain(..self.others.len().saturating_sub(OTHER_VERSIONS_MAX));
    }

    /// The highest number that a version ever had: no number is used twice.
    pub fn highest_version(&self) -> u64 {
        let others = self.others.iter().map(|other| other.version);
        others.chain([self.version, self.highest]).max().unwrap_or(0)
    }

    /// The record with `chosen` in force and enabled; the present version is one of the others. A
    /// canary ends.
    pub fn replaced_by(&self, chosen: VersionRecord) -> ModelRecord {
        let why = format!("version {} was put in force", chosen.version);
        let mut after = self.without_canary(CanaryOutcome::Replaced, &why);
        after.highest = self.highest_version().max(chosen.version);
        after.others.retain(|other| other.version != chosen.version);
        if chosen.version != self.version {
            after.add_other(self.in_force());
        }
        let VersionRecord { version, digest, bytes, config } = chosen;
        ModelRecord { version, digest, bytes, enabled: true, config, ..after }
    }

    /// The version to roll back to: the given one, or the newest before the one in force.
    pub fn rollback_target(&self, version: Option<u64>) -> Option<&VersionRecord> {
        match version {
            Some(version) => self.others.iter().find(|other| other.version == version),
            None => self.others.iter().rfind(|other| other.version < self.version),
        }
    }

    /// The record without a version; the newest of the others takes the place of the one in force.
    /// `None` if the record does not have it, or nothing else.
    pub fn without(&self, version: u64) -> Option<ModelRecord> {
        let mut left = match version == self.version {
            true => self.replaced_by(self.others.last()?.clone()),
            false => match self.canary.as_ref().is_some_and(|canary| canary.version == version) {
                true => self.without_canary(CanaryOutcome::Replaced, "its version was deleted"),
                false => self.clone(),
            },
        };
        let before = left.others.len();
        left.others.retain(|other| other.version != version);
        left.highest = self.highest_version();
        (left.others.len() < before).then_some(left)
    }
}

/// A model as measured on one kind of device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProfileRecord {
    /// Milliseconds by batch size, in ascending order of sizes.
    pub curve: Vec<(u32, f64)>,
    /// Memory it needs; 0 when unknown.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Its most expensive steps in order: a hash of everything that the step is computed from, and
    /// its share of the work. Models with equal hashes share a prefix.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<(String, f64)>,
}

/// Why a backend holds a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AssignmentRole {
    /// It serves a share of the model's requests.
    Serving,
    /// It replaces another backend that is lost.
    Standby,
    /// It stays loaded until other backends have taken over.
    Shadow,
}

/// A model that a backend is assigned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AssignedModel {
    /// The model.
    pub model: String,
    /// The version.
    pub version: u64,
    /// The reason.
    #[serde(rename = "part")]
    pub role: AssignmentRole,
    /// Requests per batch.
    pub batch: u32,
    /// Planned requests per second.
    pub rate: f64,
    /// Requests at which a batch starts where the backend belongs to a backend pool; else 0.
    #[serde(rename = "least", default, skip_serializing_if = "is_zero")]
    pub min_batch: u32,
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// The models that the plan gives one backend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The plan epoch that decided it.
    pub epoch: u64,
    /// Length of the duty cycle in milliseconds; 0 when nothing is served.
    pub cycle_ms: f64,
    /// The models.
    #[serde(rename = "shares")]
    pub models: Vec<AssignedModel>,
}

/// A backend that serves a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// The backend.
    pub backend: String,
    /// Address of its gRPC server.
    pub grpc: String,
    /// Address of its REST server.
    pub http: String,
    /// Its share of the requests; 0 for a standby.
    pub weight: f64,
    /// Requests per batch.
    pub batch: u32,
    /// Milliseconds that a full batch runs; 0 when unknown.
    pub batch_ms: f64,
    /// Length of its duty cycle in milliseconds.
    pub cycle_ms: f64,
    /// Requests at which a batch starts where it belongs to a backend pool; else 0.
    #[serde(rename = "least", default, skip_serializing_if = "is_zero")]
    pub min_batch: u32,
    /// The version it serves; 0 when unknown.
    #[serde(default)]
    pub version: u64,
}

/// The route of a model's requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RouteRecord {
    /// The plan epoch that decided it.
    pub epoch: u64,
    /// The backends.
    pub targets: Vec<TargetRecord>,
    /// Requests per second that all frontends together admit, where the cluster is too small for
    /// all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_max: Option<f64>,
}

/// A summary of the plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// Number of the plan.
    pub epoch: u64,
    /// Why it was made.
    pub reason: String,
    /// Backends that serve a model.
    pub used: usize,
    /// Backends that have joined.
    pub backends: usize,
    /// Lower bound on the number of backends.
    pub bound: f64,
    /// Planned rates over observed ones: above 1 there is spare capacity, below 1 the cluster is
    /// too small.
    pub scale: f64,
    /// Model loads that plans have caused so far.
    pub moves: u64,
    /// Models whose SLO no batch meets.
    pub unattainable: Vec<String>,
    /// Models under prefix batching, by group.
    #[serde(alias = "families", default, skip_serializing_if = "Vec::is_empty")]
    pub prefix_groups: Vec<Vec<String>>,
    /// Models that every backend failed to load, and the reason.
    pub failed: BTreeMap<String, String>,
    /// The versions of these.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failed_versions: BTreeMap<String, u64>,
    /// Milliseconds that planning took.
    pub plan_ms: f64,
    /// Backends that the plan does without because frontends avoid them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub avoided: Vec<String>,
}
