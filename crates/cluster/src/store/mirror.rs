//! A prefix of the store as a map that follows it, for as long as somebody looks.
//!
//! While the store cannot be reached the map stays as it was: whoever lives by it goes on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::{Change, Store, StoreError};

/// Longest pause between two attempts to reach the store.
const RETRY: Duration = Duration::from_millis(200);

/// Keys without the prefix, and their values.
pub type KeyValues = Arc<BTreeMap<String, Bytes>>;

/// Lists `prefix` and follows its changes until the store is dropped by all others or nobody holds the
/// receiver any more. The first image is there when this returns.
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

async fn list(
    store: &dyn Store,
    prefix: &str,
) -> Result<(BTreeMap<String, Bytes>, super::Revision), StoreError> {
    let listing = store.list(prefix).await?;
    let strip =
        |entry: super::Entry| Some((entry.key.strip_prefix(prefix)?.to_string(), entry.value));
    Ok((listing.entries.into_iter().filter_map(strip).collect(), listing.revision))
}

/// Applies changes until the watch ends, and says why; `None` when nobody looks any more.
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
