//! Checks candidates on this backend, beside what it serves.

use std::sync::Arc;

use api::ErrorKind;
use tokio::sync::watch;

use super::Host;
use crate::candidate::{CandidateRecord, Verdict};
use crate::record::{Keys, RecordKind, decode, encode};
use crate::store::{LeaseId, Store, StoreError, mirror};

/// Checks candidates for as long as the sender of `stop` lives and is not true.
pub async fn check_candidates(
    store: Arc<dyn Store>,
    keys: Keys,
    name: String,
    host: Arc<dyn Host>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), StoreError> {
    let mut mirror = mirror::follow(store.clone(), &keys.of(RecordKind::Candidate)).await?;
    loop {
        let entries = mirror.borrow_and_update().clone();
        for suffix in entries.keys() {
            let key = keys.one(RecordKind::Candidate, suffix);
            if let Err(error) = check_one(&store, &key, &name, &*host).await {
                tracing::warn!(key, %error, "candidate not checked");
            }
        }
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            changed = mirror.changed() => if changed.is_err() { return Ok(()) },
        }
    }
}

/// Takes a candidate on, if nobody has, and writes its verdict.
async fn check_one(
    store: &Arc<dyn Store>,
    key: &str,
    name: &str,
    host: &dyn Host,
) -> Result<(), StoreError> {
    let Some(entry) = store.get(key).await? else { return Ok(()) };
    let Some(mut record) = decode::<CandidateRecord>(key, &entry.value) else { return Ok(()) };
    let open = record.verdict.is_none() && record.backend.is_none() && !record.is_known_to(name);
    if !open {
        return Ok(());
    }
    let lease = Some(LeaseId(record.lease));
    record.backend = Some(name.to_string());
    let Some(revision) = store.compare_and_put(key, entry.revision, encode(&record), lease).await?
    else {
        // Another backend was faster.
        return Ok(());
    };
    match host.check(&record).await {
        Ok(()) => {
            record.passed.push(name.to_string());
            match record.passed.len() >= record.wanted {
                true => record.verdict = Some(Verdict::Passed),
                false => record.backend = None,
            }
        }
        Err(error) => {
            let reason = error.message.to_string();
            match error.kind {
                ErrorKind::Unsupported => record.verdict = Some(Verdict::Unsupported { reason }),
                // Another backend may have more memory, or reach the model store.
                ErrorKind::Unavailable | ErrorKind::Internal | ErrorKind::NotFound => {
                    tracing::warn!(model = record.model, reason, "candidate not checked here");
                    record.backend = None;
                    record.tried.push(name.to_string());
                    record.obstacle = Some(reason);
                }
                _ => record.verdict = Some(Verdict::Refused { reason }),
            }
        }
    }
    // A candidate that was withdrawn meanwhile needs no verdict.
    store.compare_and_put(key, revision, encode(&record), lease).await?;
    Ok(())
}
