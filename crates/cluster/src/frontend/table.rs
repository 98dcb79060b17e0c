//! The routing table a frontend holds: models, and who answers for each.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use api::error::ApiResult;
use api::{ApiError, ModelRef, ModelState};
use base::Nanos;

use super::link::{Link, Links};
use super::meter::{Meter, QueryMeter, RateLimit};
use crate::balance::pace::{Pace, Turn};
use crate::query::spec::{Checked, QuerySpec};
use crate::record::{ModelRecord, RouteRecord, ScalingRecord, SplitRecord};
use crate::view::View;

/// A backend that answers for a model.
pub struct Target {
    /// The connection.
    pub link: Arc<Link>,
    /// Where its REST listens.
    pub http: String,
    /// Its part of the requests.
    pub weight: f64,
    /// Requests that one turn takes.
    pub batch: u32,
    /// Milliseconds of a turn; 0 when unknown.
    pub batch_ms: f64,
    /// Length of its duty cycle in milliseconds.
    pub cycle_ms: f64,
    /// Requests that a turn begins with, where it is one of a pool that does nothing else; else 0.
    pub least: u32,
    /// What this frontend has under way there for this model.
    pub traffic: Arc<Traffic>,
}

/// Requests of one frontend for one model at one backend.
#[derive(Default)]
pub struct Traffic {
    outstanding: AtomicUsize,
    pace: Mutex<Pace>,
}

impl Traffic {
    /// Requests that were sent and are not answered.
    pub fn outstanding(&self) -> usize {
        self.outstanding.load(Relaxed)
    }

    /// How far the backend is with its turns.
    pub fn pace(&self) -> Pace {
        *self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request goes out.
    pub fn send(&self, now: Nanos, turn: Turn) {
        self.outstanding.fetch_add(1, Relaxed);
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).sent(now, turn);
    }

    /// A request is over: answered, or given up before its turn.
    pub fn settle(&self, now: Nanos, turn: Turn, given_up: bool) {
        self.outstanding.fetch_sub(1, Relaxed);
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        match given_up {
            true => pace.dropped(now, turn),
            false => pace.answered(now, turn),
        }
    }
}

impl Target {
    /// A turn, as far as one of `frontends` fills it.
    pub fn turn(&self, frontends: usize) -> Turn {
        let share = |requests: u32| (requests as usize).div_ceil(frontends.max(1));
        let full = Nanos((self.batch_ms * 1e6) as u64);
        Turn { batch: share(self.batch), least: share(self.least), full }
    }

    /// How far it is with its turns, where it is one of a pool and a turn's time is known.
    pub fn pace(&self, frontends: usize) -> Option<(Pace, Turn)> {
        let known = self.least > 0 && self.batch_ms > 0.0;
        known.then(|| (self.traffic.pace(), self.turn(frontends)))
    }
}

/// A model.
pub struct Entry {
    /// Its record.
    pub record: ModelRecord,
    /// Who answers.
    pub targets: Vec<Target>,
    /// Requests a second that all frontends may let in.
    pub rate_max: Option<f64>,
    /// Why nobody can load it, where that is so.
    pub failure: Option<String>,
    /// Its counts.
    pub meter: Arc<Meter>,
    /// Holds back what is too much.
    pub limit: Arc<RateLimit>,
}

/// A query.
pub struct QueryEntry {
    /// What it is.
    pub query: Arc<Checked>,
    /// Its budgets, once the scheduler has made them.
    pub split: Option<SplitRecord>,
    /// Its counts.
    pub meter: Arc<QueryMeter>,
}

/// All models and queries.
#[derive(Default)]
pub struct Table {
    /// By name.
    pub models: HashMap<String, Arc<Entry>>,
    /// By name.
    pub queries: HashMap<String, Arc<QueryEntry>>,
    /// Frontends that share the load.
    pub frontends: usize,
    /// How many backends there are to be, where the scheduler sees to it.
    pub scaling: Option<ScalingRecord>,
}

/// Share of a deadline that waiting may take before the planned rate counts.
const AT_EASE: f64 = 0.5;

impl Entry {
    /// Requests that this frontend sent to a target's backend, for all models, and that are not answered.
    pub fn busy(&self, target: usize) -> usize {
        self.targets.get(target).map_or(0, |target| target.link.outstanding.load(Relaxed))
    }

    /// Whether a request with this much time would be through long before it is late, whatever the plan says: what
    /// is under way leaves room, or nothing is.
    pub fn is_at_ease(&self, timeout: Nanos) -> bool {
        let sum = |of: fn(&Target) -> usize| self.targets.iter().map(of).sum::<usize>();
        let under_way = sum(|target| target.traffic.outstanding());
        let turn = sum(|target| target.batch as usize).max(1);
        let turn_ms = |target: &Target| target.cycle_ms.max(target.batch_ms);
        let turn_ms = self.targets.iter().map(turn_ms).fold(0.0, f64::max);
        let wait_ms = (under_way / turn + 1) as f64 * turn_ms;
        under_way == 0 || (turn_ms > 0.0 && wait_ms < AT_EASE * timeout.0 as f64 / 1e6)
    }

    /// Where the model stands.
    pub fn state(&self) -> (ModelState, String) {
        match (&self.failure, self.record.enabled, self.targets.is_empty()) {
            (_, true, false) => (ModelState::Ready, String::new()),
            (_, false, false) => (ModelState::Unloading, String::new()),
            (_, false, true) => (ModelState::Unavailable, "unloaded".to_string()),
            (Some(reason), true, true) => (ModelState::Unavailable, reason.clone()),
            (None, true, true) => (ModelState::Loading, String::new()),
        }
    }
}

impl Table {
    /// The table that `view` describes. Counts and connections of `before` go on.
    pub fn build(view: &View, before: &Table, links: &Links) -> Table {
        let failed = view.plan.as_ref().map(|plan| &plan.failed);
        let entry = |(name, record): (&String, &ModelRecord)| {
            let old = before.models.get(name);
            let route = view.routes.get(name);
            let entry = Entry {
                record: record.clone(),
                targets: route.map(|route| targets(route, old, links)).unwrap_or_default(),
                rate_max: route.and_then(|route| route.rate_max),
                failure: failed.and_then(|failed| failed.get(name).cloned()),
                meter: old.map(|old| old.meter.clone()).unwrap_or_default(),
                limit: old.map(|old| old.limit.clone()).unwrap_or_default(),
            };
            (name.clone(), Arc::new(entry))
        };
        let query = |(name, spec): (&String, &QuerySpec)| {
            let split = view.splits.get(name).cloned();
            Some((name.clone(), Arc::new(query_entry(name, spec, split, before)?)))
        };
        Table {
            models: view.models.iter().map(entry).collect(),
            queries: view.queries.iter().filter_map(query).collect(),
            frontends: view.frontends.len().max(1),
            scaling: view.scaling.clone(),
        }
    }

    /// The query.
    pub fn query(&self, name: &str) -> ApiResult<&Arc<QueryEntry>> {
        self.queries.get(name).ok_or_else(|| {
            let name: String = name.chars().take(128).collect();
            ApiError::not_found(format!("there is no query '{name}'"))
        })
    }

    /// The model, whatever its state.
    pub fn known(&self, model: ModelRef<'_>) -> ApiResult<&Arc<Entry>> {
        let name = model.name;
        let entry = self.models.get(name).ok_or_else(|| {
            let name: String = name.chars().take(128).collect();
            ApiError::not_found(format!("there is no model '{name}'"))
        })?;
        match model.version {
            Some(version) if version != entry.record.version => Err(ApiError::not_found(format!(
                "model '{name}' has no version {version} in service; version {} is",
                entry.record.version
            ))),
            _ => Ok(entry),
        }
    }

    /// The model, if somebody answers for it.
    pub fn serving(&self, model: ModelRef<'_>) -> ApiResult<&Arc<Entry>> {
        let entry = self.known(model)?;
        if !entry.targets.is_empty() && entry.record.enabled {
            return Ok(entry);
        }
        let name = model.name;
        let (state, reason) = entry.state();
        Err(match state {
            ModelState::Loading => {
                ApiError::unavailable(format!("model '{name}' is loading")).retry_after(1)
            }
            _ if reason.is_empty() => ApiError::unavailable(format!("model '{name}' is not ready")),
            _ => ApiError::unavailable(format!("model '{name}' is not ready: {reason}")),
        })
    }
}

fn query_entry(
    name: &str,
    spec: &QuerySpec,
    split: Option<SplitRecord>,
    before: &Table,
) -> Option<QueryEntry> {
    if let Some(old) = before.queries.get(name).filter(|old| old.query.spec == *spec) {
        return Some(QueryEntry { query: old.query.clone(), split, meter: old.meter.clone() });
    }
    match spec.clone().check() {
        Ok(query) => {
            let names = spec.stages.iter().map(|stage| stage.name.clone()).collect();
            let meter = Arc::new(QueryMeter::new(names));
            Some(QueryEntry { query: Arc::new(query), split, meter })
        }
        Err(error) => {
            tracing::warn!(query = name, %error, "a query cannot be used");
            None
        }
    }
}

fn targets(route: &RouteRecord, old: Option<&Arc<Entry>>, links: &Links) -> Vec<Target> {
    let target = |record: &crate::record::TargetRecord| {
        let link = match links.get(&record.grpc) {
            Ok(link) => link,
            Err(error) => {
                tracing::warn!(error, "a route cannot be used");
                return None;
            }
        };
        let same = |target: &&Target| target.link.address == record.grpc;
        let before = old.and_then(|old| old.targets.iter().find(same));
        Some(Target {
            link,
            http: record.http.clone(),
            weight: record.weight,
            batch: record.batch,
            batch_ms: record.batch_ms,
            cycle_ms: record.cycle_ms,
            least: record.least,
            traffic: before.map(|target| target.traffic.clone()).unwrap_or_default(),
        })
    };
    route.targets.iter().filter_map(target).collect()
}
