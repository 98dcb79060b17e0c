//! A prefix of the store as a map that follows its changes.
//!
//! While the store is unreachable the map stays as it was, so that its users continue to work.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::{Change, Store, StoreError};

/// Pause between two attempts to reach the store.
const RETRY: Duration = Duration::from_millis(200);

/// Keys without the prefix, and their values.
pub type KeyValues = Arc<BTreeMap<String, Bytes>>;

/// Lists `prefix` and follows its changes until the receiver is dropped. The first state is there
/// when this returns.
pub async fn follow(
    store: Arc<dyn Store>,
    prefix: &str,
) -> Result<watch::Receiver<KeyValues>, StoreError> {
    let prefix = prefix.to_string();
    let listing = list(&*store, &prefix).await?;
    let (sender, receiver) = watch::channel(Arc::new(listing.0));
    tokio::spawn(async move {
        let mut since = listing.1;
        loop {
            match watch_from(&*store, &prefix, &mut since, &sender).await {
                None => return,
                Some(error) => tracing::debug!(prefix, %error, "store watch ended"),
            }
            since = loop {
                tokio::select! {
                    () = sender.closed() => return,
                    () = tokio::time::sleep(RETRY) => {}
                }
                if let Ok((entries, revision)) = list(&*store, &prefix).await {
                    sender.send_if_modified(|old| {
                        let changed = **old != entries;
                        if changed {
                            *old = Arc::new(entries);
                        }
                        changed
                    });
                    break revision;
                }
            };
        }
    });
    Ok(receiver)
}

/// As [`follow`], where an unreachable store is tried again until it can be reached.
pub async fn follow_when_reachable(
    store: Arc<dyn Store>,
    prefix: &str,
) -> Result<watch::Receiver<KeyValues>, StoreError> {
    loop {
        match follow(store.clone(), prefix).await {
            Err(error) if error.is_transient() => tokio::time::sleep(RETRY).await,
            result => return result,
        }
    }
}

async fn list(
    store: &dyn Store,
    prefix: &str,
) -> Result<(BTreeMap<String, Bytes>, super::Revision), StoreError> {
    let listing = store.list(prefix).await?;
    let strip =
        |entry: super::Entry| Some((entry.key.strip_prefix(prefix)?.to_string(), entry.value));
    Ok((listing.entries.into_iter().filter_map(strip).collect(), listing.revision))
}

/// Applies changes until the watch ends, and returns the reason; `None` when the receiver was
/// dropped.
async fn watch_from(
    store: &dyn Store,
    prefix: &str,
    since: &mut super::Revision,
    sender: &watch::Sender<KeyValues>,
) -> Option<StoreError> {
    let mut changes = match store.watch(prefix, *since).await {
        Ok(watch) => watch,
        Err(error) => return Some(error),
    };
    loop {
        let next = tokio::select! {
            () = sender.closed() => return None,
            next = changes.next() => next,
        };
        match next {
            Some(Ok(changes)) => sender.send_modify(|entries| {
                let map = Arc::make_mut(entries);
                changes.into_iter().for_each(|change| apply_change(map, prefix, change));
            }),
            Some(Err(error)) => return Some(error),
            None => return Some(StoreError::Behind),
        }
    }
}

fn apply_change(map: &mut BTreeMap<String, Bytes>, prefix: &str, change: Change) {
    match change {
        Change::Put(entry) => {
            if let Some(key) = entry.key.strip_prefix(prefix) {
                map.insert(key.to_string(), entry.value);
            }
        }
        Change::Delete { key, .. } => {
            if let Some(key) = key.strip_prefix(prefix) {
                map.remove(key);
            }
        }
    }
}
