//! All records of a cluster at one moment.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use serde::Serialize;

use model::repository::is_valid_name;

use crate::load_reports::apply;
use crate::query::spec::QuerySpec;
use crate::record::canary::{CanaryProgress, is_served_name, with_canaries};
use crate::record::signature::SignatureRecord;
use crate::record::validation::{RECORDS_MAX, StoredRecord, read};
use crate::record::{
    Assignment, BackendRecord, BackendState, FrontendRecord, LoadReport, ModelRecord, PlanRecord,
    ProfileRecord, RecordKind, RouteRecord, ScalingRecord, SplitRecord, decode, is_tombstone,
};

/// The records, by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClusterSnapshot {
    /// The leader's name.
    pub leader: Option<String>,
    /// The plan's summary.
    pub plan: Option<PlanRecord>,
    /// The scaling record, where backends are scaled.
    pub scaling: Option<ScalingRecord>,
    /// Backends that have joined.
    pub backends: BTreeMap<String, BackendRecord>,
    /// Models they have loaded.
    pub states: BTreeMap<String, BackendState>,
    /// Frontends that have joined.
    pub frontends: BTreeMap<String, FrontendRecord>,
    /// Load they observe.
    pub loads: BTreeMap<String, LoadReport>,
    /// Models, and canaries under the names that backends serve them by.
    pub models: BTreeMap<String, ModelRecord>,
    /// Models that were deleted. One that is in neither is not known, or its record is lost.
    #[serde(skip)]
    pub deleted: BTreeSet<String>,
    /// Profiles, by device kind and digest.
    #[serde(skip)]
    pub profiles: HashMap<(String, String), ProfileRecord>,
    /// Models assigned to backends.
    pub assignments: BTreeMap<String, Assignment>,
    /// Routes of requests.
    pub routes: BTreeMap<String, RouteRecord>,
    /// Queries.
    pub queries: BTreeMap<String, QuerySpec>,
    /// Budgets of the queries' stages.
    pub splits: BTreeMap<String, SplitRecord>,
    /// Inputs and outputs of models, by digest.
    #[serde(skip)]
    pub signatures: BTreeMap<String, SignatureRecord>,
    /// Versions that wait to be checked by a backend.
    #[serde(skip)]
    pub candidates: usize,
    /// What the leader knows of canaries, by model.
    pub canaries: BTreeMap<String, CanaryProgress>,
}

fn records<T: StoredRecord>(
    entries: &BTreeMap<String, Bytes>,
    kind: RecordKind,
) -> BTreeMap<String, T> {
    let prefix = kind.folder_prefix();
    let from = entries.range(prefix.to_string()..);
    let inside = from.map_while(|(key, value)| Some((key.strip_prefix(prefix)?, value)));
    // Some names have two parts; the first of a profile's is any text.
    let is_name = |name: &str| match kind {
        RecordKind::Profile => name.len() < 512,
        RecordKind::Route => is_served_name(name),
        RecordKind::LoadDelta => name.len() < 512 && name.split('/').all(is_valid_name),
        _ => is_valid_name(name),
    };
    let named = inside.filter(|(name, _)| is_name(name)).take(RECORDS_MAX);
    named.filter_map(|(name, value)| Some((name.to_string(), decode(name, value)?))).collect()
}

/// The damaged values of one kind, with the reason.
fn damaged<T: StoredRecord>(
    entries: &BTreeMap<String, Bytes>,
    prefix: &str,
    found: &mut BTreeMap<String, String>,
) {
    let from = entries.range(prefix.to_string()..);
    for (key, value) in from.take_while(|(key, _)| key.starts_with(prefix)).take(RECORDS_MAX) {
        if let Err(error) = read::<T>(value) {
            found.insert(key.clone(), error);
        }
    }
}

/// All damaged values of a cluster, by key, with the reason.
pub fn damaged_records(entries: &BTreeMap<String, Bytes>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let prefix = RecordKind::folder_prefix;
    damaged::<BackendRecord>(entries, prefix(RecordKind::Backend), &mut found);
    damaged::<BackendState>(entries, prefix(RecordKind::State), &mut found);
    damaged::<FrontendRecord>(entries, prefix(RecordKind::Frontend), &mut found);
    damaged::<LoadReport>(entries, prefix(RecordKind::Load), &mut found);
    damaged::<LoadReport>(entries, prefix(RecordKind::LoadDelta), &mut found);
    damaged::<ModelRecord>(entries, prefix(RecordKind::Model), &mut found);
    damaged::<ProfileRecord>(entries, prefix(RecordKind::Profile), &mut found);
    damaged::<Assignment>(entries, prefix(RecordKind::Assignment), &mut found);
    damaged::<RouteRecord>(entries, prefix(RecordKind::Route), &mut found);
    damaged::<QuerySpec>(entries, prefix(RecordKind::Query), &mut found);
    damaged::<SplitRecord>(entries, prefix(RecordKind::Split), &mut found);
    damaged::<CanaryProgress>(entries, prefix(RecordKind::Canary), &mut found);
    damaged::<PlanRecord>(entries, "plan", &mut found);
    damaged::<ScalingRecord>(entries, "scaling", &mut found);
    damaged::<SignatureRecord>(entries, prefix(RecordKind::Signature), &mut found);
    found
}

/// The number of records of one kind.
fn count(entries: &BTreeMap<String, Bytes>, kind: RecordKind) -> usize {
    let prefix = kind.folder_prefix();
    let from = entries.range(prefix.to_string()..);
    from.take_while(|(key, _)| key.starts_with(prefix)).count()
}

/// The models that have a tombstone in place of their record.
fn deleted(entries: &BTreeMap<String, Bytes>) -> BTreeSet<String> {
    let prefix = RecordKind::Model.folder_prefix();
    let from = entries.range(prefix.to_string()..);
    let inside = from.map_while(|(key, value)| Some((key.strip_prefix(prefix)?, value)));
    inside.filter(|(_, value)| is_tombstone(value)).map(|(name, _)| name.to_string()).collect()
}

/// The load of each frontend: its report, and what has changed since.
fn loads(entries: &BTreeMap<String, Bytes>) -> BTreeMap<String, LoadReport> {
    let mut loads: BTreeMap<String, LoadReport> = records(entries, RecordKind::Load);
    for (name, delta) in records::<LoadReport>(entries, RecordKind::LoadDelta) {
        if let Some((frontend, name)) = name.split_once('/')
            && let Some(report) = loads.get_mut(frontend)
        {
            apply(report, name, delta);
        }
    }
    loads
}

impl ClusterSnapshot {
    /// As [`ClusterSnapshot::read`], with only the records that a frontend needs.
    pub fn read_routes(entries: &BTreeMap<String, Bytes>) -> ClusterSnapshot {
        ClusterSnapshot {
            leader: entries.get("leader").map(|name| String::from_utf8_lossy(name).into_owned()),
            backends: records(entries, RecordKind::Backend),
            states: records(entries, RecordKind::State),
            plan: entries.get("plan").and_then(|value| decode("plan", value)),
            scaling: entries.get("scaling").and_then(|value| decode("scaling", value)),
            frontends: records(entries, RecordKind::Frontend),
            models: with_canaries(records(entries, RecordKind::Model)),
            routes: records(entries, RecordKind::Route),
            queries: records(entries, RecordKind::Query),
            splits: records(entries, RecordKind::Split),
            signatures: records(entries, RecordKind::Signature),
            canaries: records(entries, RecordKind::Canary),
            ..ClusterSnapshot::default()
        }
    }

    /// Decodes all entries of a cluster; keys come without the cluster's prefix.
    pub fn read(entries: &BTreeMap<String, Bytes>) -> ClusterSnapshot {
        let profiles: BTreeMap<String, ProfileRecord> = records(entries, RecordKind::Profile);
        let split = |(name, profile): (String, ProfileRecord)| {
            let (device, digest) = name.split_once('/')?;
            Some(((device.to_string(), digest.to_string()), profile))
        };
        ClusterSnapshot {
            leader: entries.get("leader").map(|name| String::from_utf8_lossy(name).into_owned()),
            plan: entries.get("plan").and_then(|value| decode("plan", value)),
            scaling: entries.get("scaling").and_then(|value| decode("scaling", value)),
            backends: records(entries, RecordKind::Backend),
            states: records(entries, RecordKind::State),
            frontends: records(entries, RecordKind::Frontend),
            loads: loads(entries),
            models: with_canaries(records(entries, RecordKind::Model)),
            deleted: deleted(entries),
            profiles: profiles.into_iter().filter_map(split).collect(),
            assignments: records(entries, RecordKind::Assignment),
            routes: records(entries, RecordKind::Route),
            queries: records(entries, RecordKind::Query),
            splits: records(entries, RecordKind::Split),
            signatures: BTreeMap::new(),
            candidates: count(entries, RecordKind::Candidate),
            canaries: records(entries, RecordKind::Canary),
        }
    }
}
