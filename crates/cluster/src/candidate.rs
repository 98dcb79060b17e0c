//! A version of a model before it replaces anything.
//!
//! A frontend, or a backend whose folder has it, proposes it in the store. One backend after the
//! other takes it on, compiles and loads it, until enough of them could, or one finds that the
//! model is wrong. Only then is the model's record changed. The record of a version that cannot be
//! loaded never exists.

use std::sync::Arc;
use std::time::Duration;

use model::ModelConfig;
use serde::{Deserialize, Serialize};

use crate::record::{Keys, RecordKind, decode, encode};
use crate::store::{LeaseId, Store, StoreError};

/// Backends that may be lost with a candidate before it is given up.
const LOST_MAX: usize = 2;
/// Interval in which a frontend looks for the verdict.
const POLL: Duration = Duration::from_millis(50);
/// How long a candidate outlives a frontend that is lost.
const LEASE: Duration = Duration::from_secs(600);

/// A candidate as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CandidateRecord {
    /// Name of the model.
    pub model: String,
    /// SHA-256 of its file in the model store.
    pub digest: String,
    /// Size of its file.
    pub bytes: u64,
    /// Its settings.
    pub config: ModelConfig,
    /// The lease that ends it.
    pub lease: i64,
    /// The backend that checks it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Backends that were lost with it, or could not check it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tried: Vec<String>,
    /// Number of those that were lost.
    #[serde(default)]
    pub lost: usize,
    /// Backends that must be able to load it.
    #[serde(default = "one_backend")]
    pub wanted: usize,
    /// Backends that were.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passed: Vec<String>,
    /// Why the last of the others could not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
    /// The result, once there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
}

fn one_backend() -> usize {
    1
}

impl CandidateRecord {
    /// Whether a backend has nothing more to say about it.
    pub fn is_known_to(&self, backend: &str) -> bool {
        self.tried.iter().chain(&self.passed).any(|name| name == backend)
    }
}

/// What a backend found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "lowercase")]
pub enum Verdict {
    /// It compiles, loads and runs, on as many backends as wanted.
    Passed,
    /// The model is wrong.
    Refused {
        /// Why.
        reason: String,
    },
    /// The model needs something that is not supported.
    Unsupported {
        /// Why.
        reason: String,
    },
}

/// Why a candidate has not passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CandidateError {
    /// The model's fault.
    Refused(String),
    /// Something in it is not supported.
    Unsupported(String),
    /// Nobody's fault, at least not known.
    Unchecked(String),
    /// The store's fault.
    Store(StoreError),
}

impl From<StoreError> for CandidateError {
    fn from(error: StoreError) -> CandidateError {
        CandidateError::Store(error)
    }
}

/// Backends that can load a version before it replaces another, where there are so many.
pub const BACKENDS_WANTED: usize = 2;

/// Proposes a candidate and waits until `wanted` backends can load it, at most for `limit`. Returns
/// the number of backends that can, which is less where the others cannot for reasons of their own.
///
/// # Errors
/// When it does not pass, or is not checked in time.
pub async fn propose(
    store: &Arc<dyn Store>,
    keys: &Keys,
    (model, digest, bytes): (&str, &str, u64),
    config: &ModelConfig,
    limit: Duration,
    wanted: usize,
) -> Result<usize, CandidateError> {
    let lease = store.grant(LEASE).await?;
    // The lease's number is unique, so two candidates of one name do not meet.
    let key = keys.one(RecordKind::Candidate, &format!("{model}/{}", lease.0));
    let record = CandidateRecord {
        model: model.to_string(),
        digest: digest.to_string(),
        bytes,
        config: config.clone(),
        lease: lease.0,
        backend: None,
        tried: Vec::new(),
        lost: 0,
        wanted,
        passed: Vec::new(),
        obstacle: None,
        verdict: None,
    };
    let result = match store.compare_and_put(&key, 0, encode(&record), Some(lease)).await {
        Ok(_) => tokio::time::timeout(limit, wait(store, keys, &key)).await.unwrap_or_else(|_| {
            let why = format!("no backend has checked it within {} s", limit.as_secs());
            Err(CandidateError::Unchecked(why))
        }),
        Err(error) => Err(error.into()),
    };
    // The candidate goes with its lease, now or by itself.
    let _ = store.revoke(lease).await;
    result
}

async fn wait(store: &Arc<dyn Store>, keys: &Keys, key: &str) -> Result<usize, CandidateError> {
    let gone = || CandidateError::Unchecked("its candidate was removed".to_string());
    loop {
        let (record, revision) = match store.get(key).await {
            Ok(Some(entry)) => {
                let record: CandidateRecord = decode(key, &entry.value).ok_or_else(gone)?;
                (record, entry.revision)
            }
            Ok(None) => return Err(gone()),
            Err(StoreError::Unreachable(_)) => {
                tokio::time::sleep(POLL).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        match &record.verdict {
            Some(Verdict::Passed) => return Ok(record.passed.len().max(1)),
            Some(Verdict::Refused { reason }) => {
                return Err(CandidateError::Refused(reason.clone()));
            }
            Some(Verdict::Unsupported { reason }) => {
                return Err(CandidateError::Unsupported(reason.clone()));
            }
            None => {}
        }
        match &record.backend {
            Some(backend) => {
                let present = store.get(&keys.one(RecordKind::Backend, backend)).await;
                if matches!(present, Ok(None)) {
                    release_lost(store, key, revision, &record, backend).await?;
                }
            }
            None if is_exhausted(store, keys, &record).await => {
                let why = record.obstacle.unwrap_or_default();
                return match record.passed.len() {
                    0 => Err(CandidateError::Unchecked(why)),
                    passed => {
                        let model = record.model;
                        tracing::warn!(model, passed, why, "not every backend can load it");
                        Ok(passed)
                    }
                };
            }
            None => {}
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Whether every backend has tried, and some in vain.
async fn is_exhausted(store: &Arc<dyn Store>, keys: &Keys, record: &CandidateRecord) -> bool {
    if record.obstacle.is_none() && record.passed.is_empty() {
        return false;
    }
    let prefix = keys.of(RecordKind::Backend);
    let Ok(present) = store.list(&prefix).await else { return false };
    let is_tried =
        |key: &str| key.strip_prefix(&prefix).is_some_and(|name| record.is_known_to(name));
    present.entries.iter().all(|entry| is_tried(&entry.key))
}

/// Offers a candidate whose backend is lost to the others.
async fn release_lost(
    store: &Arc<dyn Store>,
    key: &str,
    revision: u64,
    record: &CandidateRecord,
    backend: &str,
) -> Result<(), CandidateError> {
    let mut freed = record.clone();
    freed.backend = None;
    freed.tried.push(backend.to_string());
    freed.lost += 1;
    if freed.lost >= LOST_MAX {
        let why = format!("{LOST_MAX} backends were lost while they checked it, last {backend}");
        return Err(CandidateError::Refused(why));
    }
    let lease = Some(LeaseId(record.lease));
    store.compare_and_put(key, revision, encode(&freed), lease).await?;
    Ok(())
}
