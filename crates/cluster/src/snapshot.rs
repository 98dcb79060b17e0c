//! All records of a cluster at one moment.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::query::spec::QuerySpec;
use crate::record::{
    Assignment, BackendRecord, BackendState, FrontendRecord, LoadReport, ModelRecord, PlanRecord,
    ProfileRecord, RecordKind, RouteRecord, ScalingRecord, SplitRecord, decode,
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
    /// Models.
    pub models: BTreeMap<String, ModelRecord>,
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
}

fn records<T: DeserializeOwned>(
    entries: &BTreeMap<String, Bytes>,
    kind: RecordKind,
) -> BTreeMap<String, T> {
    let prefix = kind.folder_prefix();
    let from = entries.range(prefix.to_string()..);
    let inside = from.map_while(|(key, value)| Some((key.strip_prefix(prefix)?, value)));
    inside.filter_map(|(name, value)| Some((name.to_string(), decode(name, value)?))).collect()
}

impl ClusterSnapshot {
    /// As [`ClusterSnapshot::read`], with only the records that routing needs.
    pub fn read_routes(entries: &BTreeMap<String, Bytes>) -> ClusterSnapshot {
        ClusterSnapshot {
            plan: entries.get("plan").and_then(|value| decode("plan", value)),
            scaling: entries.get("scaling").and_then(|value| decode("scaling", value)),
            backends: records(entries, RecordKind::Backend),
            frontends: records(entries, RecordKind::Frontend),
            models: records(entries, RecordKind::Model),
            routes: records(entries, RecordKind::Route),
            queries: records(entries, RecordKind::Query),
            splits: records(entries, RecordKind::Split),
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
            loads: records(entries, RecordKind::Load),
            models: records(entries, RecordKind::Model),
            profiles: profiles.into_iter().filter_map(split).collect(),
            assignments: records(entries, RecordKind::Assignment),
            routes: records(entries, RecordKind::Route),
            queries: records(entries, RecordKind::Query),
            splits: records(entries, RecordKind::Split),
        }
    }
}
