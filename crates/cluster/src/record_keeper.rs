//! Writes records again that the store has lost or holds damaged, from what this process has seen.
//!
//! Records of models, queries and profiles have no owner that lives: who registered a model has
//! long gone. Backends remember the last good value of each and put it back. A record that was
//! deleted on purpose has a [`Tombstone`](crate::record::Tombstone) in its place.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use crate::query::spec::QuerySpec;
use crate::record::signature::SignatureRecord;
use crate::record::validation::{StoredRecord, read};
use crate::record::{Keys, ModelRecord, ProfileRecord, RecordKind, is_tombstone};
use crate::store::mirror::{self, KeyValues};
use crate::store::{Store, StoreError};

/// Pause before records that could not be written are tried again.
const RETRY: Duration = Duration::from_millis(500);

/// Keeps the records of models, queries and profiles for as long as the sender of `stop` lives and
/// is not true.
pub async fn keep_records(
    store: Arc<dyn Store>,
    keys: Keys,
    name: String,
    stop: watch::Receiver<bool>,
) -> Result<(), StoreError> {
    let keep = |kind| (store.clone(), keys.of(kind), name.clone(), stop.clone());
    tokio::try_join!(
        keep_kind::<ModelRecord>(keep(RecordKind::Model)),
        keep_kind::<QuerySpec>(keep(RecordKind::Query)),
        keep_kind::<ProfileRecord>(keep(RecordKind::Profile)),
        keep_kind::<SignatureRecord>(keep(RecordKind::Signature)),
    )?;
    Ok(())
}

async fn keep_kind<T: StoredRecord>(
    (store, prefix, name, mut stop): (Arc<dyn Store>, String, String, watch::Receiver<bool>),
) -> Result<(), StoreError> {
    let mut entries = mirror::follow_when_reachable(store.clone(), &prefix).await?;
    let mut known = BTreeMap::new();
    loop {
        let seen = entries.borrow_and_update().clone();
        let mut complete = true;
        for (suffix, value) in lost::<T>(&mut known, &seen, &name) {
            let key = format!("{prefix}{suffix}");
            let is_same = entries.borrow().get(&suffix) == seen.get(&suffix);
            let written = match is_same {
                true => restore::<T>(&*store, &key, value).await,
                // Another backend was faster.
                false => Ok(()),
            };
            if let Err(error) = written {
                tracing::debug!(key, %error, "cannot restore the record");
                complete = false;
                break;
            }
        }
        let pause = if complete { Duration::MAX } else { RETRY };
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            changed = entries.changed() => if changed.is_err() { return Ok(()) },
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Remembers the good records, and returns those that are missing or damaged. Backends start at
/// different ones.
fn lost<T: StoredRecord>(
    known: &mut BTreeMap<String, Bytes>,
    seen: &KeyValues,
    name: &str,
) -> Vec<(String, Bytes)> {
    for (suffix, value) in seen.iter() {
        if known.get(suffix) == Some(value) {
            continue;
        }
        match read::<T>(value) {
            Ok(Some(_)) => {
                known.insert(suffix.clone(), value.clone());
            }
            Ok(None) => {
                known.remove(suffix);
            }
            Err(_) => {}
        }
    }
    let lost = known.iter().filter(|(suffix, value)| seen.get(*suffix) != Some(value));
    let mut lost: Vec<(String, Bytes)> = lost.map(|(s, v)| (s.clone(), v.clone())).collect();
    if !lost.is_empty() {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        let start = hasher.finish() as usize % lost.len();
        lost.rotate_left(start);
    }
    lost
}

/// Writes a record, unless there is a good one, or a tombstone, by now.
async fn restore<T: StoredRecord>(
    store: &dyn Store,
    key: &str,
    value: Bytes,
) -> Result<(), StoreError> {
    let entry = store.get(key).await?;
    if entry
        .as_ref()
        .is_some_and(|entry| is_tombstone(&entry.value) || read::<T>(&entry.value).is_ok())
    {
        return Ok(());
    }
    let revision = entry.map_or(0, |entry| entry.revision);
    if store.compare_and_put(key, revision, value, None).await?.is_some() {
        tracing::warn!(kind = T::KIND, key, "lost or damaged record written again");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use base::MonotonicClock;
    use model::ModelConfig;

    use super::*;
    use crate::model_store::ModelRecords;
    use crate::record::encode;
    use crate::store::memory::MemoryStore;

    async fn until<F: Future<Output = bool>>(what: &str, holds: impl Fn() -> F) {
        for _ in 0..2000 {
            if holds().await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("{what}");
    }

    #[tokio::test]
    async fn lost_and_damaged_records_are_written_again_and_deleted_ones_are_not() {
        let memory = MemoryStore::start(Arc::new(MonotonicClock::new()));
        let (store, keys): (Arc<dyn Store>, Keys) = (memory.clone(), Keys::new("test"));
        let records = ModelRecords::new(store.clone(), keys.clone());
        let config = ModelConfig::default();
        for model in ["a", "b", "c"] {
            records.register(model, "sha", 1, &config).await.unwrap();
        }
        records.register("a", "newer", 1, &config).await.unwrap();
        let profile = keys.one(RecordKind::Profile, "cpu/sha");
        store.put(&profile, encode(&ProfileRecord::default()), None).await.unwrap();
        let (_stop, stopped) = watch::channel(false);
        for name in ["b1", "b2", "b3"] {
            let name = name.to_string();
            tokio::spawn(keep_records(store.clone(), keys.clone(), name, stopped.clone()));
        }
        // They have seen everything once they repair a damaged value.
        let version = |model: &'static str| {
            let records = records.clone();
            async move { records.find(model).await.unwrap().map(|record| record.version) }
        };
        let key = keys.one(RecordKind::Model, "a");
        let good = store.get(&key).await.unwrap().unwrap().value;
        until("a damaged record stays", || async {
            store.put(&key, good.clone(), None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(20)).await;
            store.put(&key, "garbage", None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
            version("a").await == Some(2)
        })
        .await;

        memory.lose_everything();
        until("a lost store is not rebuilt", || async {
            let there = [version("a").await, version("b").await, version("c").await];
            there == [Some(2), Some(1), Some(1)] && store.get(&profile).await.unwrap().is_some()
        })
        .await;

        assert_eq!(records.delete("b", None).await.unwrap().0, 1);
        tokio::time::sleep(Duration::from_millis(100)).await;
        memory.lose_everything();
        until("the others are not rebuilt", || async { version("c").await == Some(1) }).await;
        assert_eq!(version("b").await, None, "a deleted model returned");
    }
}
