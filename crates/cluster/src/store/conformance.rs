//! Checks that every store must pass, run on a real one. A check that fails returns what it saw.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::{Clock, MonotonicClock};

use super::{Change, Condition, Store, StoreError, Write, mirror};
use crate::election::Candidate;

/// Span of leases that are to expire; etcd has none shorter than two seconds.
const SHORT: Duration = Duration::from_secs(2);
/// Time limit of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);
/// A wait that takes this much longer than requested means that the machine stalled: leases may
/// have expired that should not have.
const STALL_MS: u64 = 300;
/// How often stalls are checked for.
const TICK: Duration = Duration::from_millis(20);
/// Attempts at a check during which the machine stalls.
const ATTEMPTS: usize = 10;

type Outcome = Result<(), String>;

fn require(holds: bool, what: &str) -> Outcome {
    if holds { Ok(()) } else { Err(what.to_string()) }
}

fn text(error: StoreError) -> String {
    error.to_string()
}

/// Runs all checks under keys that begin with `prefix`, which must not be used otherwise. Returns
/// the first failure.
pub async fn run(store: Arc<dyn Store>, prefix: &str) -> Outcome {
    let named = |name: &str, outcome: Outcome| outcome.map_err(|what| format!("{name}: {what}"));
    named("values", values(&*store, &format!("{prefix}values/")).await)?;
    named("transactions", transactions(&*store, &format!("{prefix}txn/")).await)?;
    named("bounds", bounds(&*store, &format!("{prefix}bounds/")).await)?;
    named("watches", watches(&*store, &format!("{prefix}watch/")).await)?;
    let leases = async |attempt| leases(&*store, &format!("{prefix}lease{attempt}/")).await;
    named("leases", retry_on_stall(leases).await)?;
    named("mirror", mirrors(store.clone(), &format!("{prefix}mirror/")).await)?;
    named("many keys", many(&*store, &format!("{prefix}many/")).await)?;
    let election =
        async |attempt| election(store.clone(), &format!("{prefix}leader{attempt}")).await;
    named("election", retry_on_stall(election).await)
}

/// Runs a check that depends on leases not expiring too soon; again where it fails and the machine
/// stalled.
async fn retry_on_stall(check: impl AsyncFn(usize) -> Outcome) -> Outcome {
    let mut outcome = Ok(());
    for attempt in 0..ATTEMPTS {
        let longest_ms = Arc::new(AtomicU64::new(0));
        let watching = tokio::spawn(watch_delays(longest_ms.clone()));
        outcome = check(attempt).await;
        // The stall may not have been recorded yet.
        tokio::time::sleep(3 * TICK).await;
        watching.abort();
        if outcome.is_ok() || longest_ms.load(Ordering::Relaxed) < STALL_MS {
            break;
        }
    }
    outcome
}

/// Records by how much waits take longer than requested.
async fn watch_delays(longest_ms: Arc<AtomicU64>) {
    let clock = MonotonicClock::new();
    loop {
        let started = clock.now();
        tokio::time::sleep(TICK).await;
        let late = Duration::from(clock.now() - started).saturating_sub(TICK);
        longest_ms.fetch_max(late.as_millis() as u64, Ordering::Relaxed);
    }
}

async fn values(store: &dyn Store, prefix: &str) -> Outcome {
    let key = format!("{prefix}a");
    require(store.get(&key).await.map_err(text)?.is_none(), "a new key has a value")?;
    let first = store.put(&key, "1", None).await.map_err(text)?;
    let second = store.put(&key, "2", None).await.map_err(text)?;
    require(second > first, "revisions do not rise")?;
    let entry = store.get(&key).await.map_err(text)?.ok_or("a key that was put does not exist")?;
    require(
        entry.value == "2" && entry.revision == second,
        "a key does not have the value that was put",
    )?;
    store.put(&format!("{prefix}b"), "3", None).await.map_err(text)?;
    let listing = store.list(prefix).await.map_err(text)?;
    let keys: Vec<&str> = listing.entries.iter().map(|e| &e.key[prefix.len()..]).collect();
    require(keys == ["a", "b"], "a listing is not all keys in order")?;
    store.delete(&key).await.map_err(text)?;
    store.delete(&key).await.map_err(text)?;
    require(store.get(&key).await.map_err(text)?.is_none(), "a deleted key is still there")
}

async fn transactions(store: &dyn Store, prefix: &str) -> Outcome {
    let key = format!("{prefix}a");
    let put = |expected, value: &'static str| store.compare_and_put(&key, expected, value, None);
    let made = put(0, "1").await.map_err(text)?.ok_or("a new key cannot be made")?;
    require(put(0, "2").await.map_err(text)?.is_none(), "a key was made twice")?;
    let changed = put(made, "3").await.map_err(text)?.ok_or("a known key cannot be changed")?;
    require(put(made, "4").await.map_err(text)?.is_none(), "an old revision was accepted")?;
    let condition = Condition { key: key.clone(), revision: made };
    let writes = vec![Write::put(format!("{prefix}b"), "x"), Write::delete(key.clone())];
    let refused = store.transact(vec![condition], writes.clone()).await.map_err(text)?;
    require(refused.is_none(), "a transaction ran although its condition does not hold")?;
    let half = store.get(&format!("{prefix}b")).await.map_err(text)?;
    require(half.is_none(), "a refused transaction wrote something")?;
    let condition = Condition { key: key.clone(), revision: changed };
    let done = store.transact(vec![condition], writes).await.map_err(text)?;
    require(done.is_some(), "a transaction did not run although its condition holds")?;
    let left = store.list(prefix).await.map_err(text)?;
    let keys: Vec<&str> = left.entries.iter().map(|entry| &entry.key[prefix.len()..]).collect();
    require(keys == ["b"], "a transaction did not do all of its writes")
}

async fn bounds(store: &dyn Store, prefix: &str) -> Outcome {
    let many = (0..=super::OPERATIONS_MAX).map(|i| Write::put(format!("{prefix}{i}"), "x"));
    let many = store.transact(Vec::new(), many.collect()).await;
    require(
        matches!(many, Err(StoreError::Refused(_))),
        "a transaction beyond the limit was accepted",
    )?;
    let large = store.put(&format!("{prefix}large"), vec![7; 2 << 20], None).await;
    require(matches!(large, Err(StoreError::Refused(_))), "a value beyond the limit was accepted")?;
    let nothing = store.list(prefix).await.map_err(text)?;
    require(nothing.entries.is_empty(), "a refused write was not undone")
}

async fn next_changes(watch: &mut super::Watch, count: usize) -> Result<Vec<Change>, String> {
    let mut all = Vec::new();
    while all.len() < count {
        let next = tokio::time::timeout(TIMEOUT, watch.next()).await;
        match next.map_err(|_| format!("a watch reports {} of {count} changes", all.len()))? {
            Some(Ok(changes)) => all.extend(changes),
            Some(Err(error)) => return Err(error.to_string()),
            None => return Err("a watch ended".to_string()),
        }
    }
    Ok(all)
}

async fn watches(store: &dyn Store, prefix: &str) -> Outcome {
    let since = store.put(&format!("{prefix}a"), "1", None).await.map_err(text)?;
    store.put(&format!("{prefix}a"), "2", None).await.map_err(text)?;
    let mut watch = store.watch(prefix, since).await.map_err(text)?;
    store.put(&format!("{prefix}b"), "3", None).await.map_err(text)?;
    store.put(&format!("{}-not", &prefix[..prefix.len() - 1]), "4", None).await.map_err(text)?;
    store.delete(&format!("{prefix}a")).await.map_err(text)?;
    let changes = next_changes(&mut watch, 3).await?;
    let seen: Vec<(&str, Option<&[u8]>)> = changes
        .iter()
        .map(|change| match change {
            Change::Put(entry) => (&entry.key[prefix.len()..], Some(&entry.value[..])),
            Change::Delete { key, .. } => (&key[prefix.len()..], None),
        })
        .collect();
    let expected: [(&str, Option<&[u8]>); 3] = [("a", Some(b"2")), ("b", Some(b"3")), ("a", None)];
    require(seen == expected, &format!("a watch reports {seen:?}"))
}

async fn leases(store: &dyn Store, prefix: &str) -> Outcome {
    let (kept, left, ended) = (
        store.grant(SHORT).await.map_err(text)?,
        store.grant(SHORT).await.map_err(text)?,
        store.grant(TIMEOUT).await.map_err(text)?,
    );
    let key = |name: &str| format!("{prefix}{name}");
    store.put(&key("kept"), "1", Some(kept)).await.map_err(text)?;
    store.put(&key("left"), "2", Some(left)).await.map_err(text)?;
    store.put(&key("ended"), "3", Some(ended)).await.map_err(text)?;
    store.revoke(ended).await.map_err(text)?;
    let gone = store.get(&key("ended")).await.map_err(text)?;
    require(gone.is_none(), "a key outlived its revoked lease")?;
    let mut rounds = 0;
    while store.get(&key("left")).await.map_err(text)?.is_some() {
        rounds += 1;
        require(rounds < 30, "a key outlived its lease")?;
        tokio::time::sleep(Duration::from_millis(500)).await;
        store.renew(kept).await.map_err(text)?;
    }
    require(store.get(&key("kept")).await.map_err(text)?.is_some(), "a renewed lease ended")?;
    let late = store.renew(left).await;
    require(late == Err(StoreError::NoLease), "an ended lease was renewed")?;
    let late = store.put(&key("late"), "4", Some(left)).await;
    require(late == Err(StoreError::NoLease), "an ended lease took a key")?;
    store.revoke(kept).await.map_err(text)
}

async fn mirrors(store: Arc<dyn Store>, prefix: &str) -> Outcome {
    store.put(&format!("{prefix}a"), "1", None).await.map_err(text)?;
    let mut entries = mirror::follow(store.clone(), prefix).await.map_err(text)?;
    let first = entries.borrow().get("a").cloned();
    require(first.is_some_and(|value| value == "1"), "a mirror starts without existing keys")?;
    store.put(&format!("{prefix}b"), "2", None).await.map_err(text)?;
    store.delete(&format!("{prefix}a")).await.map_err(text)?;
    let there = entries.wait_for(|map| map.len() == 1 && map.get("b").is_some_and(|v| v == "2"));
    let there = tokio::time::timeout(TIMEOUT, there).await;
    require(matches!(there, Ok(Ok(_))), "a mirror does not follow")
}

/// Lists more keys than fit one page of any engine.
async fn many(store: &dyn Store, prefix: &str) -> Outcome {
    const COUNT: usize = 2500;
    let keys: Vec<String> = (0..COUNT).map(|index| format!("{prefix}{index:05}")).collect();
    for chunk in keys.chunks(super::OPERATIONS_MAX) {
        let writes = chunk.iter().map(|key| Write::put(key.clone(), key.clone())).collect();
        store.transact(Vec::new(), writes).await.map_err(text)?;
    }
    let listing = store.list(prefix).await.map_err(text)?;
    let same = listing.entries.iter().zip(&keys).all(|(entry, key)| entry.key == *key);
    require(listing.entries.len() == COUNT && same, "a long listing is not complete")
}

async fn election(store: Arc<dyn Store>, key: &str) -> Outcome {
    let stand = |name: &str| Candidate::new(store.clone(), key, name, SHORT);
    let (first, second) = (stand("first"), stand("second"));
    let mut leader = first.campaign().await.map_err(text)?;
    let waiting = tokio::spawn(async move { second.campaign().await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    require(!waiting.is_finished(), "there are two leaders")?;
    let write = Write::put(format!("{key}-work"), "by first");
    require(leader.write(vec![write]).await.map_err(text)?, "a leader cannot write")?;
    // The first leader crashes: its lease has to expire.
    leader.abandon();
    let next = tokio::time::timeout(TIMEOUT, waiting).await;
    let next = next.map_err(|_| "no candidate follows a crashed leader")?;
    let next = next.map_err(|error| error.to_string())?.map_err(text)?;
    let late = leader.write(vec![Write::put(format!("{key}-work"), "late")]).await;
    require(!late.map_err(text)?, "a leader that was replaced still writes")?;
    next.resign().await;
    let left = store.get(key).await.map_err(text)?;
    require(left.is_none(), "a leader that resigned is still there")
}
