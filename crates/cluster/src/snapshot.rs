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
    /// Who leads.
    pub leader: Option<String>,
    /// The plan in short.
    pub plan: Option<PlanRecord>,
    /// How many backends there are to be, where somebody sees to it.
    pub scaling: Option<ScalingRecord>,
    /// Backends that are there.
    pub backends: BTreeMap<String, BackendRecord>,
    /// What they hold.
    pub states: BTreeMap<String, BackendState>,
    /// Frontends that are there.
    pub frontends: BTreeMap<String, FrontendRecord>,
    /// What they see.
    pub loads: BTreeMap<String, LoadReport>,
    /// Models.
    pub models: BTreeMap<String, ModelRecord>,
    /// Profiles, by device kind and digest.
    #[serde(skip)]
    pub profiles: HashMap<(String, String), ProfileRecord>,
    /// What backends are to hold.
    pub assignments: BTreeMap<String, Assignment>,
    /// Where requests go.
    pub routes: BTreeMap<String, RouteRecord>,
    /// Queries.
    pub queries: BTreeMap<String, QuerySpec>,
    /// Their budgets.
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
    /// As [`ClusterSnapshot::read`], with only what routing needs.
    pub fn read_routes(entries: &BTreeMap<String, Bytes>) -> ClusterSnapshot {
        ClusterSnapshot {
            plan: entries.get("plan").and_then(|value| decode("plan", value)),
            scaling: entries.get("scaling").and_then(|value| decode("scaling", value)),
            frontends: records(entries, RecordKind::Frontend),
            models: records(entries, RecordKind::Model),
            routes: records(entries, RecordKind::Route),
            queries: records(entries, RecordKind::Query),
            splits: records(entries, RecordKind::Split),
            ..ClusterSnapshot::default()
        }
    }

    /// Reads all keys of a cluster, without their common beginning.
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
