//! How batches of a model's requests are formed.

use serde::{Deserialize, Serialize};

/// The largest batch that may be set.
const BATCH_MOST: usize = 1024;

/// The largest number of workers that may be set.
const WORKERS_MOST: usize = 64;

/// When a batch starts and how large it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchingPolicy {
    /// As soon as the device is free, as large as measurements show to pay off; as `Elastic` on a
    /// device that runs several batches at the same time.
    #[default]
    Auto,
    /// Ebird: workers of several batch sizes, each started as soon as its batch is full.
    Elastic,
    /// Rafiqi: a batch size threshold that follows the load.
    Adaptive,
    /// TensorFlow Serving and Triton: a full batch, or the maximum wait.
    Window,
    /// Nexus: drops requests that would force small batches.
    EarlyDrop,
    /// Clipper: as large as the deadline of the oldest request allows.
    LazyDrop,
    /// Symphony: starts as late as deadlines allow.
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

/// When inputs are copied to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyTime {
    /// On arrival, while earlier batches compute.
    #[default]
    Early,
    /// With their batch, directly before it computes.
    Late,
}

/// How batches of a model's requests are formed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Batching {
    /// When a batch starts.
    pub policy: BatchingPolicy,
    /// Batch sizes of the workers that run at the same time; those of the policy when empty.
    pub workers: Vec<usize>,
    /// The largest batch; 32 when 0.
    pub max_batch: usize,
    /// How long a request waits for others at most, in microseconds.
    pub max_wait_us: u64,
    /// When inputs are copied to the device.
    pub copy: CopyTime,
    /// Whether requests of different lengths share a batch where the model has a mask.
    pub mix_lengths: bool,
    /// The input that is the mask; found by its name when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<String>,
}

impl Default for Batching {
    fn default() -> Self {
        Batching {
            policy: BatchingPolicy::Auto,
            workers: Vec::new(),
            max_batch: 0,
            max_wait_us: 2_000,
            copy: CopyTime::Early,
            mix_lengths: true,
            mask: None,
        }
    }
}

impl Batching {
    /// The largest batch by default.
    pub const MAX_BATCH: usize = 32;

    /// Fails for values out of range.
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
