//! Newer versions of a backend's folders: each replaces the version in force only when enough
//! backends can load it. Until then, and where others do not have it, the old one serves.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::candidate::CandidateError;
use crate::model_store::ModelRecords;
use crate::record::{Keys, RecordKind, VersionRecord};
use crate::store::{Store, StoreError, mirror};

/// Time limit of one check by the other backends.
const CHECK_TIMEOUT: Duration = Duration::from_secs(300);
/// Pause before a version that could not replace another is offered again, if nothing changes.
const PAUSE: Duration = Duration::from_secs(60);
/// Pause after a failure of the store.
const RETRY: Duration = Duration::from_secs(2);

/// A version of a model in a folder of this backend.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderVersion {
    /// The model.
    pub model: String,
    /// The version.
    pub version: VersionRecord,
}

/// What became of an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// It is in force, or never will be.
    Settled,
    /// It waits for other backends.
    Waits(String),
}

/// Offers `versions`, once they are known, until each is in force or refused, for as long as the
/// sender of `stop` lives and is not true. `backend` must have joined before others can check.
pub async fn offer_versions(
    store: Arc<dyn Store>,
    keys: Keys,
    backend: String,
    mut versions: watch::Receiver<Option<Vec<FolderVersion>>>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), StoreError> {
    let versions = match versions.wait_for(Option::is_some).await {
        Ok(known) => known.clone().unwrap_or_default(),
        Err(_) => return Ok(()),
    };
    let records = ModelRecords::new(store.clone(), keys.clone());
    let prefix = keys.of(RecordKind::Backend);
    let mut present = mirror::follow_when_reachable(store, &prefix).await?;
    let mut open: Vec<(FolderVersion, String)> =
        versions.into_iter().map(|version| (version, String::new())).collect();
    while !open.is_empty() {
        let mut pause = PAUSE;
        if present.borrow_and_update().contains_key(&backend) {
            let mut left = Vec::new();
            for (version, before) in open {
                match offer(&records, &version).await {
                    Ok(Outcome::Settled) => {}
                    Ok(Outcome::Waits(why)) => {
                        log_waiting(&version, &why, &before);
                        left.push((version, why));
                    }
                    Err(error) => {
                        tracing::debug!(model = version.model, %error, "cannot offer a version");
                        left.push((version, before));
                        pause = RETRY;
                    }
                }
            }
            open = left;
        }
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            changed = present.changed() => if changed.is_err() { return Ok(()) },
            () = tokio::time::sleep(pause) => {}
        }
    }
    Ok(())
}

/// Logs why a version waits, once for each reason.
fn log_waiting(version: &FolderVersion, why: &str, before: &str) {
    if why != before {
        let (model, version) = (&version.model, version.version.version);
        tracing::warn!(model, version, why, "version of the folder waits; the older one serves");
    }
}

async fn offer(records: &ModelRecords, offered: &FolderVersion) -> Result<Outcome, StoreError> {
    let FolderVersion { model, version } = offered;
    if !records.publish(model, version, false).await? {
        return Ok(Outcome::Settled);
    }
    let candidate = (model.as_str(), version.digest.as_str(), version.bytes);
    match records.propose(candidate, &version.config, CHECK_TIMEOUT).await {
        Ok((passed, wanted)) if passed >= wanted => {
            records.publish(model, version, true).await?;
            tracing::info!(model, version = version.version, "version of the folder in force");
            Ok(Outcome::Settled)
        }
        Ok((passed, wanted)) => {
            let why = format!("{passed} of {wanted} backends have it and can load it");
            Ok(Outcome::Waits(why))
        }
        Err(CandidateError::Refused(why) | CandidateError::Unsupported(why)) => {
            tracing::error!(model, version = version.version, why, "version of the folder refused");
            Ok(Outcome::Settled)
        }
        Err(CandidateError::Unchecked(why)) => Ok(Outcome::Waits(why)),
        Err(CandidateError::Store(error)) => Err(error),
    }
}
