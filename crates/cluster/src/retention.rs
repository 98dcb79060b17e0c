//! Keeps what the store has lost in the picture that a process has of it, until it is restored.
//!
//! A record of a model or query without a tombstone was not deleted but lost, and a route of a
//! model that is to be served is about to be written again. A process that dropped them at once
//! would refuse requests that backends can serve. It waits for those who write them again to be
//! there, and only then for a while: backends for records, a leader's plan for routes.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::Nanos;
use bytes::Bytes;

use crate::query::spec::QuerySpec;
use crate::record::canary::split_served;
use crate::record::validation::{StoredRecord, read};
use crate::record::{ModelRecord, RecordKind, RouteRecord, SplitRecord};
use crate::store::mirror::KeyValues;

/// How long a lost record of a model or query is kept while there are backends.
const RECORD_TIME: Nanos = Nanos::from_millis(60_000);
/// How long a lost route or split is kept while there is a plan.
const ROUTE_TIME: Nanos = Nanos::from_millis(10_000);
/// The keys of the plan's summary and of the scaling record, without the cluster's prefix.
const PLAN: &str = "plan";
const SCALING: &str = "scaling";

/// The last good entries, and since when some are lost although they could be there again.
#[derive(Debug, Default)]
pub struct Retention {
    last: KeyValues,
    lost: BTreeMap<String, Nanos>,
}

impl Retention {
    /// Starts with what was there before, of which nothing is lost yet.
    pub fn after(last: KeyValues) -> Retention {
        Retention { last, lost: BTreeMap::new() }
    }

    /// The entries, with what was lost less than a while ago.
    pub fn merge(&mut self, now: Nanos, entries: &KeyValues) -> KeyValues {
        let mut merged: BTreeMap<String, Bytes> = BTreeMap::clone(entries);
        let mut lost = BTreeMap::new();
        self.keep::<ModelRecord>(now, RecordKind::Model, &mut merged, &mut lost);
        self.keep::<QuerySpec>(now, RecordKind::Query, &mut merged, &mut lost);
        self.keep::<RouteRecord>(now, RecordKind::Route, &mut merged, &mut lost);
        self.keep::<SplitRecord>(now, RecordKind::Split, &mut merged, &mut lost);
        self.keep_scaling(now, &mut merged, &mut lost);
        self.lost = lost;
        self.last = if merged == **entries { entries.clone() } else { Arc::new(merged) };
        self.last.clone()
    }

    /// Whether something lost is kept: it has to be looked at again, also without a change.
    pub fn is_active(&self) -> bool {
        !self.lost.is_empty()
    }

    /// That backends are scaled: requests go on waiting for one.
    fn keep_scaling(
        &self,
        now: Nanos,
        merged: &mut BTreeMap<String, Bytes>,
        lost: &mut BTreeMap<String, Nanos>,
    ) {
        let Some(value) = self.last.get(SCALING) else { return };
        let restorable = merged.contains_key(PLAN);
        let since = self.lost.get(SCALING).copied().filter(|_| restorable).unwrap_or(now);
        if !merged.contains_key(SCALING) && now - since < ROUTE_TIME {
            merged.insert(SCALING.to_string(), value.clone());
            lost.insert(SCALING.to_string(), since);
        }
    }

    fn keep<T: StoredRecord>(
        &self,
        now: Nanos,
        kind: RecordKind,
        merged: &mut BTreeMap<String, Bytes>,
        lost: &mut BTreeMap<String, Nanos>,
    ) {
        let prefix = kind.folder_prefix();
        let (time, restorable) = match kind {
            RecordKind::Model | RecordKind::Query => (RECORD_TIME, has_backend(merged)),
            _ => (ROUTE_TIME, merged.contains_key(PLAN)),
        };
        let before = self.last.range(prefix.to_string()..);
        for (key, value) in before.take_while(|(key, _)| key.starts_with(prefix)) {
            let seen = merged.get(key);
            if seen == Some(value) && !self.lost.contains_key(key) {
                continue;
            }
            let is_good = seen.is_some_and(|seen| read::<T>(seen).is_ok());
            let name = &key[prefix.len()..];
            let since = self.lost.get(key).copied().filter(|_| restorable).unwrap_or(now);
            if is_good || now - since >= time || !is_wanted(kind, name, merged) {
                continue;
            }
            merged.insert(key.clone(), value.clone());
            lost.insert(key.clone(), since);
        }
    }
}

/// Whether a backend has joined.
fn has_backend(entries: &BTreeMap<String, Bytes>) -> bool {
    let prefix = RecordKind::Backend.folder_prefix();
    let first = entries.range(prefix.to_string()..).next();
    first.is_some_and(|(key, _)| key.starts_with(prefix))
}

/// Whether the record that a route or split belongs to is there.
fn is_wanted(kind: RecordKind, name: &str, merged: &BTreeMap<String, Bytes>) -> bool {
    let of = |kind: RecordKind, name: &str| merged.get(&format!("{}{name}", kind.folder_prefix()));
    match kind {
        RecordKind::Route => {
            let model = of(RecordKind::Model, split_served(name).0);
            let model = model.and_then(|value| read::<ModelRecord>(value).ok()?);
            // The route of a canary goes with the canary.
            model.is_some_and(|model| model.served(name).is_some_and(|served| served.enabled))
        }
        RecordKind::Split => {
            let query =
                of(RecordKind::Query, name).and_then(|value| read::<QuerySpec>(value).ok()?);
            query.is_some()
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Tombstone, encode};

    fn seconds(count: u64) -> Nanos {
        Nanos::from_millis(1000 * count)
    }

    fn model(enabled: bool) -> Bytes {
        let digest = "sha".to_string();
        encode(&ModelRecord { version: 1, digest, enabled, ..ModelRecord::default() })
    }

    fn entries(pairs: &[(&str, Bytes)]) -> KeyValues {
        Arc::new(pairs.iter().map(|(key, value)| (key.to_string(), value.clone())).collect())
    }

    #[test]
    fn a_lost_store_changes_nothing_for_a_while() {
        let route = encode(&RouteRecord::default());
        let all = entries(&[("models/a", model(true)), ("routes/a", route.clone())]);
        let mut retention = Retention::default();
        assert_eq!(retention.merge(seconds(0), &all), all);
        assert!(!retention.is_active());
        assert_eq!(retention.merge(seconds(1), &entries(&[])), all);
        assert_eq!(retention.merge(seconds(9), &entries(&[("models/a", "x".into())])), all);
        // The route stays a while after there is a plan without it.
        let plan = ("plan", Bytes::from("{}"));
        let back = entries(&[("models/a", model(true)), plan.clone()]);
        assert_eq!(retention.merge(seconds(10), &back).len(), 3);
        assert_eq!(retention.merge(seconds(18), &back).len(), 3);
        assert!(retention.is_active());
        assert_eq!(retention.merge(seconds(19), &back), back, "ten seconds without it");
        assert!(!retention.is_active());
        assert_eq!(retention.merge(seconds(20), &all), all);
        // There are backends, and none of them restores it.
        let joined = entries(&[("backends/b", "{}".into()), plan]);
        assert_eq!(retention.merge(seconds(30), &joined).len(), 4);
        assert_eq!(retention.merge(seconds(40), &joined).len(), 3);
        assert_eq!(retention.merge(seconds(89), &joined).len(), 3);
        assert_eq!(retention.merge(seconds(90), &joined), joined);
    }

    #[test]
    fn an_empty_store_changes_nothing_however_long_it_takes() {
        let route = encode(&RouteRecord::default());
        let all = entries(&[("models/a", model(true)), ("routes/a", route)]);
        let mut retention = Retention::after(all.clone());
        for second in 0..1000 {
            assert_eq!(retention.merge(seconds(second), &entries(&[])), all);
        }
        // A backend is back, and then the record, before the next leader has planned.
        let joined = entries(&[("backends/b", "{}".into())]);
        assert_eq!(retention.merge(seconds(1000), &joined).len(), 3);
        let restored = entries(&[("backends/b", "{}".into()), ("models/a", model(true))]);
        assert_eq!(retention.merge(seconds(1100), &restored).len(), 3);
    }

    #[test]
    fn requests_go_on_waiting_for_a_backend_while_the_store_is_lost() {
        let all = entries(&[("scaling", "{}".into()), ("plan", "{}".into())]);
        let mut retention = Retention::after(all);
        let scales = |merged: KeyValues| merged.contains_key("scaling");
        assert!(scales(retention.merge(seconds(0), &entries(&[]))));
        assert!(scales(retention.merge(seconds(50), &entries(&[]))));
        // The next leader does not scale.
        let plan = entries(&[("plan", "{}".into())]);
        assert!(scales(retention.merge(seconds(51), &plan)));
        assert!(scales(retention.merge(seconds(59), &plan)));
        assert!(!scales(retention.merge(seconds(61), &plan)));
        assert!(!retention.is_active());
    }

    #[test]
    fn what_is_deleted_or_unloaded_is_gone_at_once() {
        let route = encode(&RouteRecord::default());
        let all = entries(&[("models/a", model(true)), ("routes/a", route)]);
        for record in [encode(&Tombstone::new(1)), model(false)] {
            let mut retention = Retention::default();
            retention.merge(seconds(0), &all);
            let now = entries(&[("models/a", record)]);
            assert_eq!(retention.merge(seconds(1), &now), now);
        }
    }
}
