//! All records of a cluster at one moment.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::query::spec::QuerySpec;
use crate::record::{
    Assignment, BackendRecord, BackendState, FrontendRecord, Kind, LoadReport, ModelRecord,
    PlanRecord, ProfileRecord, RouteRecord, ScalingRecord, SplitRecord, decode,
};

/// The records, by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct View {
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

fn folder<T: DeserializeOwned>(image: &BTreeMap<String, Bytes>, kind: Kind) -> BTreeMap<String, T> {
    let prefix = kind.folder_prefix();
    let from = image.range(prefix.to_string()..);
    let inside = from.map_while(|(key, value)| Some((key.strip_prefix(prefix)?, value)));
    inside.filter_map(|(name, value)| Some((name.to_string(), decode(name, value)?))).collect()
}

impl View {
    /// As [`View::read`], with only what routing needs.
    pub fn read_routes(image: &BTreeMap<String, Bytes>) -> View {
        View {
            plan: image.get("plan").and_then(|value| decode("plan", value)),
            scaling: image.get("scaling").and_then(|value| decode("scaling", value)),
            frontends: folder(image, Kind::Frontend),
            models: folder(image, Kind::Model),
            routes: folder(image, Kind::Route),
            queries: folder(image, Kind::Query),
            splits: folder(image, Kind::Split),
            ..View::default()
        }
    }

    /// Reads all keys of a cluster, without their common beginning.
    pub fn read(image: &BTreeMap<String, Bytes>) -> View {
        let profiles: BTreeMap<String, ProfileRecord> = folder(image, Kind::Profile);
        let split = |(name, profile): (String, ProfileRecord)| {
            let (device, digest) = name.split_once('/')?;
            Some(((device.to_string(), digest.to_string()), profile))
        };
        View {
            leader: image.get("leader").map(|name| String::from_utf8_lossy(name).into_owned()),
            plan: image.get("plan").and_then(|value| decode("plan", value)),
            scaling: image.get("scaling").and_then(|value| decode("scaling", value)),
            backends: folder(image, Kind::Backend),
            states: folder(image, Kind::State),
            frontends: folder(image, Kind::Frontend),
            loads: folder(image, Kind::Load),
            models: folder(image, Kind::Model),
            profiles: profiles.into_iter().filter_map(split).collect(),
            assignments: folder(image, Kind::Assignment),
            routes: folder(image, Kind::Route),
            queries: folder(image, Kind::Query),
            splits: folder(image, Kind::Split),
        }
    }
}
