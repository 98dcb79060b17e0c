//! Counts and times calls to a store, for metrics.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use base::Clock;

use super::{
    Condition, Entry, LeaseId, Listing, Revision, Store, StoreError, StoreFuture, StoreHealth,
    StoreSpace, Watch, Write,
};

/// Kinds of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallKind {
    Get,
    List,
    Transact,
    Watch,
    Grant,
    Renew,
    Revoke,
    Compact,
    Space,
    Reclaim,
}

impl CallKind {
    /// All of them, in the order of their numbers, with their names in metrics.
    const ALL: [(CallKind, &str); 10] = [
        (CallKind::Get, "get"),
        (CallKind::List, "list"),
        (CallKind::Transact, "transact"),
        (CallKind::Watch, "watch"),
        (CallKind::Grant, "grant"),
        (CallKind::Renew, "renew"),
        (CallKind::Revoke, "revoke"),
        (CallKind::Compact, "compact"),
        (CallKind::Space, "space"),
        (CallKind::Reclaim, "reclaim"),
    ];
}

/// What one kind of call came to.
#[derive(Debug, Default)]
struct CallCount {
    calls: AtomicU64,
    failures: AtomicU64,
    time_ns: AtomicU64,
}

/// Calls of this process to its store.
#[derive(Debug, Default)]
pub struct StoreCalls {
    counts: [CallCount; CallKind::ALL.len()],
}

/// A metric of calls: its name, its help and its value.
type CallMetric = (&'static str, &'static str, fn(&CallCount) -> String);

impl StoreCalls {
    fn record(&self, kind: CallKind, took: Duration, failed: bool) {
        let count = &self.counts[kind as usize];
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        count.calls.fetch_add(1, Relaxed);
        count.failures.fetch_add(u64::from(failed), Relaxed);
        count.time_ns.fetch_add(nanos, Relaxed);
    }

    /// Writes them for Prometheus.
    pub fn write_metrics(&self, text: &mut String) {
        let metrics: [CallMetric; 3] = [
            ("calls_total", "Calls to the store that have ended", |count| {
                count.calls.load(Relaxed).to_string()
            }),
            ("call_failures_total", "Calls to the store that failed", |count| {
                count.failures.load(Relaxed).to_string()
            }),
            ("call_seconds_total", "Time that calls to the store took", |count| {
                Duration::from_nanos(count.time_ns.load(Relaxed)).as_secs_f64().to_string()
            }),
        ];
        for (name, help, value) in metrics {
            let name = format!("atoll_cluster_store_{name}");
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
            for ((_, call), count) in CallKind::ALL.iter().zip(&self.counts) {
                let _ = writeln!(text, "{name}{{call=\"{call}\"}} {}", value(count));
            }
        }
    }
}

/// A store whose calls are counted and timed.
pub(super) struct CountedStore {
    inner: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    calls: StoreCalls,
}

impl CountedStore {
    pub(super) fn new(inner: Arc<dyn Store>, clock: Arc<dyn Clock>) -> CountedStore {
        CountedStore { inner, clock, calls: StoreCalls::default() }
    }

    fn count<'a, T: Send + 'a>(
        &'a self,
        kind: CallKind,
        call: impl FnOnce(&'a dyn Store) -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        Box::pin(async move {
            let began = self.clock.now();
            let result = call(&*self.inner).await;
            let took = Duration::from(self.clock.now() - began);
            // That a watch fell behind or a lease ended is an answer.
            let failed = matches!(
                result,
                Err(StoreError::Unreachable(_) | StoreError::Full(_) | StoreError::Refused(_))
            );
            self.calls.record(kind, took, failed);
            result
        })
    }
}

impl Store for CountedStore {
    fn get<'a>(&'a self, key: &'a str) -> StoreFuture<'a, Option<Entry>> {
        self.count(CallKind::Get, move |store| store.get(key))
    }

    fn list<'a>(&'a self, prefix: &'a str) -> StoreFuture<'a, Listing> {
        self.count(CallKind::List, move |store| store.list(prefix))
    }

    fn transact(
        &self,
        conditions: Vec<Condition>,
        writes: Vec<Write>,
    ) -> StoreFuture<'_, Option<Revision>> {
        self.count(CallKind::Transact, move |store| store.transact(conditions, writes))
    }

    fn watch<'a>(&'a self, prefix: &'a str, since: Revision) -> StoreFuture<'a, Watch> {
        self.count(CallKind::Watch, move |store| store.watch(prefix, since))
    }

    fn grant(&self, span: Duration) -> StoreFuture<'_, LeaseId> {
        self.count(CallKind::Grant, move |store| store.grant(span))
    }

    fn renew(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        self.count(CallKind::Renew, move |store| store.renew(lease))
    }

    fn revoke(&self, lease: LeaseId) -> StoreFuture<'_, ()> {
        self.count(CallKind::Revoke, move |store| store.revoke(lease))
    }

    fn compact(&self, revision: Revision) -> StoreFuture<'_, ()> {
        self.count(CallKind::Compact, move |store| store.compact(revision))
    }

    fn space(&self) -> StoreFuture<'_, StoreSpace> {
        self.count(CallKind::Space, |store| store.space())
    }

    fn reclaim(&self) -> StoreFuture<'_, ()> {
        self.count(CallKind::Reclaim, |store| store.reclaim())
    }

    fn health(&self) -> StoreHealth {
        self.inner.health()
    }

    fn calls(&self) -> Option<&StoreCalls> {
        Some(&self.calls)
    }
}

#[cfg(test)]
mod tests {
    use base::MonotonicClock;

    use super::*;
    use crate::store::{etcd::EtcdAccess, health, open};

    #[test]
    fn kinds_are_in_the_order_of_their_numbers() {
        for (index, (kind, _)) in CallKind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, index);
        }
    }

    #[tokio::test]
    async fn calls_failures_and_their_time_are_counted_by_kind() {
        let clock = Arc::new(MonotonicClock::new());
        let store = open("memory", EtcdAccess::default(), clock).expect("a store");
        store.put("k", "v", None).await.expect("there is space");
        store.get("k").await.expect("it is reachable");
        let gone = store.put("k", "v", Some(LeaseId(99))).await;
        assert_eq!(gone, Err(StoreError::NoLease));
        let large = vec![0u8; crate::store::VALUE_MAX + 1];
        assert!(matches!(store.put("k", large, None).await, Err(StoreError::Refused(_))));
        let mut text = String::new();
        health::write_metrics(&mut text, &*store);
        for row in [
            "calls_total{call=\"transact\"} 3",
            "calls_total{call=\"get\"} 1",
            "calls_total{call=\"list\"} 0",
            "call_failures_total{call=\"transact\"} 1",
            "call_failures_total{call=\"get\"} 0",
        ] {
            assert!(text.contains(&format!("atoll_cluster_store_{row}\n")), "{row}: {text}");
        }
        assert!(text.contains("# TYPE atoll_cluster_store_call_seconds_total counter"), "{text}");
    }
}
