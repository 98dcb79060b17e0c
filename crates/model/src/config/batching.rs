//! How requests of a model are put together.

use serde::{Deserialize, Serialize};

/// The largest batch that may be set.
const BATCH_MOST: usize = 1024;

/// The most workers that may be set.
const WORKERS_MOST: usize = 64;

/// When requests of a model run together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchingPolicy {
    /// As soon as the device has room, as many as were seen to be worth it; on a device that runs batches side by side, as
    /// elastic.
    #[default]
    Auto,
    /// Ebird: workers of several sizes, each woken as soon as it can be filled.
    Elastic,
    /// Rafiqi: a threshold that follows the load.
    Adaptive,
    /// TensorFlow Serving and Triton: a full batch, or the longest wait.
    Window,
    /// Nexus: requests that would force small batches are given up.
    EarlyDrop,
    /// Clipper: as many as the oldest request has time for.
    LazyDrop,
    /// Symphony: as late as deadlines allow.
    Deferred,
    /// Each request runs on its own.
    None,
}

impl BatchingPolicy {
    /// The name in settings and reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            BatchingPolicy::Auto => "auto",
            BatchingPolicy::Elastic => "elastic",
            BatchingPolicy::Adaptive => "adaptive",
            BatchingPolicy::Window => "window",
            BatchingPolicy::EarlyDrop => "early_drop",
            BatchingPolicy::LazyDrop => "lazy_drop",
            BatchingPolicy::Deferred => "deferred",
            BatchingPolicy::None => "none",
        }
    }
}

/// When inputs go to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyTime {
    /// The moment they arrive, while earlier batches compute.
    #[default]
    Early,
    /// With the batch they are of, in front of its computation.
    Late,
}

/// How requests of a model are put together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Batching {
    /// When they run together.
    pub policy: BatchingPolicy,
    /// Batch sizes of the workers that run side by side; the policy's own when empty.
    pub workers: Vec<usize>,
    /// The largest batch; 32 when 0.
    pub max_batch: usize,
    /// The longest wait for others, in microseconds.
    pub max_wait_us: u64,
    /// When inputs go to the device.
    pub copy: CopyTime,
}

impl Default for Batching {
    fn default() -> Self {
        Batching {
            policy: BatchingPolicy::Auto,
            workers: Vec::new(),
            max_batch: 0,
            max_wait_us: 2_000,
            copy: CopyTime::Early,
        }
    }
}

impl Batching {
    /// The largest batch where nothing is said.
    pub const MAX_BATCH: usize = 32;

    /// What of it makes no sense, if anything.
    pub fn check(&self) -> Result<(), String> {
        let fits = |size: &usize| (1..=BATCH_MOST).contains(size);
        if let Some(bad) = self.workers.iter().find(|size| !fits(size)) {
            return Err(format!("batching.workers has {bad}: a batch is of 1 to {BATCH_MOST}"));
        }
        if self.workers.len() > WORKERS_MOST {
            let count = self.workers.len();
            return Err(format!("batching.workers has {count} entries, at most {WORKERS_MOST}"));
        }
        if self.max_batch > BATCH_MOST {
            return Err(format!("batching.max_batch is {}, at most {BATCH_MOST}", self.max_batch));
        }
        Ok(())
    }
}
