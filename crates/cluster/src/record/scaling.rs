//! The records of scaling: replica pools, and the cold starts that frontends observe.

use serde::{Deserialize, Serialize};

use super::validation::{StoredRecord, check_text, clamp, truncate};

/// Replica pools of one cluster.
pub const POOLS_MAX: usize = 16;
/// Counts and times beyond these make no sense.
const COUNT_MAX: u64 = 1 << 53;
const TIME_MAX_MS: f64 = 2.6e9;
const MEMORY_MAX: u64 = 1 << 50;
/// Prices are relative to each other.
const PRICE_MAX: f64 = 1e9;

/// The number of backends, and what scales them, over all replica pools.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScalingRecord {
    /// The workload that is scaled, such as `deployment/atoll-backend`; how many, if several are.
    pub target: String,
    /// Replicas that the load needs, within the bounds.
    pub wanted: u32,
    /// Replicas requested.
    pub replicas: u32,
    /// Replicas that have joined the cluster.
    pub present: usize,
    /// Backends that are drained so that they can be removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub draining: Vec<String>,
    /// Failures to read or change the workloads, over all leaders.
    pub errors: u64,
    /// The latest failure, while it lasts, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The replica pools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<ReplicaPoolRecord>,
}

/// One replica pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplicaPoolRecord {
    /// Its workload.
    pub target: String,
    /// The kind of device of its backends; empty while it is not known.
    #[serde(default)]
    pub kind: String,
    /// Memory for models of each; 0 for no limit, or while it is not known.
    #[serde(default)]
    pub memory_bytes: u64,
    /// The fewest replicas.
    pub min: u32,
    /// The most replicas.
    pub max: u32,
    /// Price of a replica.
    pub price: f64,
    /// Replicas that the load needs of it, within the bounds.
    pub wanted: u32,
    /// Replicas requested.
    pub replicas: u32,
    /// Replicas that have joined the cluster.
    pub present: usize,
    /// Why requested replicas do not come, where they have not come for too long: other pools are
    /// used meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled: Option<String>,
    /// The latest failure to read or change it, while it lasts, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Cold starts that a frontend observed: requests that waited until a backend had their model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ColdStartLoad {
    /// Their number.
    pub count: u64,
    /// Milliseconds from the first request to the first reply of the latest.
    pub last_ms: f64,
    /// Of the longest.
    pub max_ms: f64,
}

impl ColdStartLoad {
    /// Moves numbers into their ranges.
    pub(super) fn limit(&mut self) {
        self.count = self.count.min(COUNT_MAX);
        clamp(&mut self.last_ms, 0.0, TIME_MAX_MS);
        clamp(&mut self.max_ms, 0.0, TIME_MAX_MS);
    }
}

impl StoredRecord for ScalingRecord {
    const KIND: &'static str = "scaling";

    fn limit(&mut self) -> Result<(), String> {
        self.errors = self.errors.min(COUNT_MAX);
        self.error.iter_mut().for_each(truncate);
        self.pools.truncate(POOLS_MAX);
        for pool in &mut self.pools {
            check_text("the target", &pool.target)?;
            check_text("the kind", &pool.kind)?;
            clamp(&mut pool.price, 0.0, PRICE_MAX);
            pool.memory_bytes = pool.memory_bytes.min(MEMORY_MAX);
            pool.stalled.iter_mut().chain(&mut pool.error).for_each(truncate);
        }
        check_text("the target", &self.target)
    }
}
