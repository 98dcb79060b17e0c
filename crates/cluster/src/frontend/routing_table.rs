//! The routing table of a frontend: models, and the backends that serve them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use api::error::ApiResult;
use api::{ApiError, ModelRef, ModelState};
use base::Nanos;

use super::backend_link::{BackendLink, BackendLinks};
use super::canary_entry::{CanaryEntry, CanaryMeter};
use super::meter::{Meter, QueryMeter, RateLimit};
use super::status;
use crate::balance::backend_health::ReplyLatency;
use crate::balance::batch_progress::{BatchPlan, BatchProgress};
use crate::query::spec::{Checked, QuerySpec};
use crate::record::canary::{served_name, split_served};
use crate::record::signature::SignatureRecord;
use crate::record::{BackendRecord, ModelRecord, RouteRecord, ScalingRecord, SplitRecord};
use crate::snapshot::ClusterSnapshot;

/// A backend that serves a model.
pub struct RouteTarget {
    /// The connection.
    pub link: Arc<BackendLink>,
    /// Address of its REST server.
    pub http: String,
    /// Its share of the requests.
    pub weight: f64,
    /// Requests per batch.
    pub batch: u32,
    /// Milliseconds that a full batch runs; 0 when unknown.
    pub batch_ms: f64,
    /// Length of its duty cycle in milliseconds.
    pub cycle_ms: f64,
    /// Requests at which a batch starts where it belongs to a backend pool; else 0.
    pub min_batch: u32,
    /// The version it serves; 0 when unknown.
    pub version: u64,
    /// Requests of this frontend for this model that are in flight there.
    pub outstanding: Arc<OutstandingRequests>,
}

/// Requests in flight of one frontend for one model at one backend, and how long they took.
#[derive(Default)]
pub struct OutstandingRequests {
    count: AtomicUsize,
    progress: Mutex<BatchProgress>,
    latency: Mutex<ReplyLatency>,
}

impl OutstandingRequests {
    /// Number of requests in flight.
    pub fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Latency of its replies.
    pub fn latency(&self) -> ReplyLatency {
        *self.latency.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the latency of a reply, and returns the new average.
    pub fn record_latency(&self, latency: Nanos) -> ReplyLatency {
        let mut average = self.latency.lock().unwrap_or_else(PoisonError::into_inner);
        average.record(latency);
        *average
    }

    /// Forgets the latency of replies: the backend gets another chance.
    pub fn forget_latency(&self) {
        *self.latency.lock().unwrap_or_else(PoisonError::into_inner) = ReplyLatency::default();
    }

    /// Progress of the backend's batches.
    pub fn progress(&self) -> BatchProgress {
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a request is sent.
    pub fn send(&self, now: Nanos, plan: BatchPlan) {
        self.count.fetch_add(1, Relaxed);
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).sent(now, plan);
    }

    /// Records that a request ended: with a reply, or dropped before its batch started.
    pub fn settle(&self, now: Nanos, plan: BatchPlan, given_up: bool) {
        self.count.fetch_sub(1, Relaxed);
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        match given_up {
            true => progress.dropped(now, plan),
            false => progress.completed(now, plan),
        }
    }
}

impl RouteTarget {
    /// A batch, as far as one of `frontends` fills it.
    pub fn plan(&self, frontends: usize) -> BatchPlan {
        let share = |requests: u32| (requests as usize).div_ceil(frontends.max(1));
        let full_time = Nanos((self.batch_ms * 1e6) as u64);
        BatchPlan { batch: share(self.batch), min_batch: share(self.min_batch), full_time }
    }

    /// Progress of its batches, where it belongs to a backend pool and the time of a batch is
    /// known.
    pub fn progress(&self, frontends: usize) -> Option<(BatchProgress, BatchPlan)> {
        let known = self.min_batch > 0 && self.batch_ms > 0.0;
        known.then(|| (self.outstanding.progress(), self.plan(frontends)))
    }
}

/// A model.
pub struct ModelEntry {
    /// The name under which backends serve it.
    pub served: String,
    /// Its record.
    pub record: ModelRecord,
    /// The canary beside it.
    pub canary: Option<CanaryEntry>,
    /// Backends that serve it.
    pub targets: Vec<RouteTarget>,
    /// Requests per second that all frontends together admit.
    pub rate_max: Option<f64>,
    /// Why no backend can load it, where that is so.
    pub failure: Option<String>,
    /// Its inputs and outputs, once a backend has loaded it.
    pub signature: Option<SignatureRecord>,
    /// Counts of its requests.
    pub meter: Arc<Meter>,
    /// Limits its rate.
    pub limit: Arc<RateLimit>,
}

impl ModelEntry {
    /// How long requests may take, as viewers judge them; `own` is the timeout of a request.
    fn objective(&self, own: Option<Nanos>) -> Option<Nanos> {
        let config = &self.record.config;
        let timeout = own.or(config.timeout_ms.map(Nanos::from_millis));
        [config.slo_ms.map(Nanos::from_millis), timeout].into_iter().flatten().min()
    }

    /// Counts whether requests with the timeout `own` that were answered after `took` kept their
    /// SLO.
    pub fn count_answered(&self, took: Nanos, own: Option<Nanos>, count: u64) {
        match self.objective(own) {
            Some(objective) if took <= objective => self.meter.live.keep(count),
            Some(_) => self.meter.live.miss(count),
            None => {}
        }
    }

    /// Counts requests that were refused, or failed: those with an SLO missed it.
    pub fn refuse(&self, own: Option<Nanos>, count: u64) {
        self.meter.refuse(count);
        if self.objective(own).is_some() {
            self.meter.live.miss(count);
        }
    }
}

/// A query.
pub struct QueryEntry {
    /// The checked query.
    pub query: Arc<Checked>,
    /// The budgets of its stages, once the scheduler has computed them.
    pub split: Option<SplitRecord>,
    /// Counts of its requests.
    pub meter: Arc<QueryMeter>,
}

/// All models and queries.
#[derive(Default)]
pub struct RoutingTable {
    /// By name; canaries by the names under which backends serve them.
    pub models: HashMap<String, Arc<ModelEntry>>,
    /// By name.
    pub queries: HashMap<String, Arc<QueryEntry>>,
    /// Whether it was built from the cluster's state; a new frontend has not read that yet.
    pub known: bool,
    /// Frontends that share the load.
    pub frontends: usize,
    /// Backends that have joined.
    pub backends: usize,
    /// The scaling record, where backends are scaled.
    pub scaling: Option<ScalingRecord>,
    /// Backends, routes and the plan, for the console.
    pub summary: serde_json::Value,
}

/// Share of a deadline that waiting may take before the planned rate is enforced.
const UNDERLOADED: f64 = 0.5;

impl ModelEntry {
    /// Requests of this frontend in flight at a target's backend, over all models.
    pub fn busy(&self, target: usize) -> usize {
        self.targets.get(target).map_or(0, |target| target.link.outstanding.load(Relaxed))
    }

    /// Whether a request with this much time would complete long before its deadline, whatever the
    /// plan says: few requests are in flight, or none.
    pub fn is_underloaded(&self, timeout: Nanos) -> bool {
        let sum = |of: fn(&RouteTarget) -> usize| self.targets.iter().map(of).sum::<usize>();
        let in_flight = sum(|target| target.outstanding.count());
        let plan = sum(|target| target.batch as usize).max(1);
        let cycle_ms = |target: &RouteTarget| target.cycle_ms.max(target.batch_ms);
        let cycle_ms = self.targets.iter().map(cycle_ms).fold(0.0, f64::max);
        let wait_ms = (in_flight / plan + 1) as f64 * cycle_ms;
        in_flight == 0 || (cycle_ms > 0.0 && wait_ms < UNDERLOADED * timeout.0 as f64 / 1e6)
    }

    /// Whether a backend serves `version` or a newer one.
    pub fn serves(&self, version: u64) -> bool {
        // Schedulers of an older release do not say which version.
        self.targets.iter().any(|target| target.version >= version || target.version == 0)
    }

    /// State of the model.
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

impl RoutingTable {
    /// Builds the table that `snapshot` describes. Counts and connections of `before` are kept.
    pub fn build(
        snapshot: &ClusterSnapshot,
        before: &RoutingTable,
        links: &BackendLinks,
        now: Nanos,
    ) -> RoutingTable {
        let entry = |(name, record): (&String, &ModelRecord)| {
            let old = before.models.get(name);
            let route = snapshot.routes.get(name);
            let entry = ModelEntry {
                served: name.clone(),
                record: record.clone(),
                canary: None,
                targets: route
                    .map(|route| targets(route, &snapshot.backends, old, links, now))
                    .unwrap_or_default(),
                rate_max: route.and_then(|route| route.rate_max),
                failure: failure(snapshot, name, record),
                signature: snapshot.signatures.get(&record.digest).cloned(),
                meter: old.map(|old| old.meter.clone()).unwrap_or_default(),
                limit: old.map(|old| old.limit.clone()).unwrap_or_default(),
            };
            (name.clone(), entry)
        };
        let query = |(name, spec): (&String, &QuerySpec)| {
            let split = snapshot.splits.get(name).cloned();
            Some((name.clone(), Arc::new(query_entry(name, spec, split, before)?)))
        };
        RoutingTable {
            models: with_canaries(snapshot, snapshot.models.iter().map(entry).collect(), before),
            queries: snapshot.queries.iter().filter_map(query).collect(),
            known: true,
            frontends: snapshot.frontends.len().max(1),
            backends: snapshot.backends.len(),
            scaling: snapshot.scaling.clone(),
            summary: status::summary(snapshot),
        }
    }

    /// The query.
    pub fn query(&self, name: &str) -> ApiResult<&Arc<QueryEntry>> {
        self.queries.get(name).ok_or_else(|| {
            if !self.known {
                return starting();
            }
            let name: String = name.chars().take(128).collect();
            ApiError::not_found(format!("there is no query '{name}'"))
        })
    }

    /// The model, whatever its state.
    pub fn known(&self, model: ModelRef<'_>) -> ApiResult<&Arc<ModelEntry>> {
        let name = model.name;
        // Canaries are versions of their models, and not models of their own.
        let entry = self.models.get(name).filter(|_| split_served(name).1.is_none());
        let entry = entry.ok_or_else(|| {
            if !self.known {
                return starting();
            }
            let name: String = name.chars().take(128).collect();
            ApiError::not_found(format!("there is no model '{name}'"))
        })?;
        let canary = entry.canary.as_ref().filter(|canary| {
            let is_wanted = model.version == Some(canary.record.version);
            // What is promoted is also served under the model's own name, or soon.
            is_wanted && (!canary.record.promoted || !canary.entry.targets.is_empty())
        });
        if let Some(canary) = canary {
            return Ok(&canary.entry);
        }
        match model.version {
            Some(version) if version != entry.record.version => Err(ApiError::not_found(format!(
                "model '{name}' has no version {version} in service; version {} is",
                entry.record.version
            ))),
            _ => Ok(entry),
        }
    }

    /// Whether a model has no backend because the cluster is scaled to zero: a request for it
    /// starts one.
    pub fn is_at_zero(&self, entry: &ModelEntry) -> bool {
        let is_off = self.scaling.is_some() && self.backends == 0;
        is_off && entry.record.enabled && entry.targets.is_empty() && entry.failure.is_none()
    }

    /// The model, if a backend serves it, or one is started when it is requested.
    pub fn available(&self, model: ModelRef<'_>) -> ApiResult<&Arc<ModelEntry>> {
        match self.known(model) {
            Ok(entry) if self.is_at_zero(entry) => Ok(entry),
            _ => self.serving(model),
        }
    }

    /// Whether this version of a model is in force.
    pub fn is_in_force(&self, name: &str, version: u64) -> bool {
        self.models.get(name).is_some_and(|entry| entry.record.version == version)
    }

    /// The model, if a backend serves it.
    pub fn serving(&self, model: ModelRef<'_>) -> ApiResult<&Arc<ModelEntry>> {
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

/// Gives each model the entry of its canary, which is in the table under its own name, too.
fn with_canaries(
    snapshot: &ClusterSnapshot,
    entries: Vec<(String, ModelEntry)>,
    before: &RoutingTable,
) -> HashMap<String, Arc<ModelEntry>> {
    let is_canary = |(name, _): &(String, ModelEntry)| split_served(name).1.is_some();
    let (canaries, models): (Vec<_>, Vec<_>) = entries.into_iter().partition(is_canary);
    let arc = |(name, entry): (String, ModelEntry)| (name, Arc::new(entry));
    let mut all: HashMap<String, Arc<ModelEntry>> = canaries.into_iter().map(arc).collect();
    for (name, mut entry) in models {
        let found = entry
            .record
            .canary
            .as_ref()
            .and_then(|record| Some((record, all.get(&served_name(&name, record.version))?)));
        entry.canary = found.map(|(record, canary)| {
            let old = before.models.get(&name).and_then(|old| old.canary.as_ref());
            let old = old.filter(|old| old.meter.number() == record.number);
            let meter = old.map(|old| old.meter.clone());
            let progress = snapshot.canaries.get(&name);
            CanaryEntry {
                record: record.clone(),
                entry: canary.clone(),
                meter: meter.unwrap_or_else(|| Arc::new(CanaryMeter::new(record.number))),
                progress: progress
                    .filter(|p| p.number == record.number)
                    .cloned()
                    .unwrap_or_default(),
            }
        });
        all.insert(name, Arc::new(entry));
    }
    all
}

/// A frontend that has not read the cluster's state cannot say what is missing.
fn starting() -> ApiError {
    ApiError::unavailable("the frontend has not read the cluster's state yet").retry_after(1)
}

/// Why no backend can load this version. A plan for another version says nothing about it.
fn failure(snapshot: &ClusterSnapshot, name: &str, record: &ModelRecord) -> Option<String> {
    let plan = snapshot.plan.as_ref()?;
    let version = plan.failed_versions.get(name).copied();
    plan.failed.get(name).filter(|_| version.is_none_or(|v| v == record.version)).cloned()
}

fn query_entry(
    name: &str,
    spec: &QuerySpec,
    split: Option<SplitRecord>,
    before: &RoutingTable,
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
            tracing::warn!(query = name, %error, "query ignored");
            None
        }
    }
}

/// The targets of a route. A backend's own record knows its address first: after a restart it may
/// be another one, and the next plan may be seconds away.
fn targets(
    route: &RouteRecord,
    backends: &BTreeMap<String, BackendRecord>,
    old: Option<&Arc<ModelEntry>>,
    links: &BackendLinks,
    now: Nanos,
) -> Vec<RouteTarget> {
    let target = |record: &crate::record::TargetRecord| {
        let current = backends.get(&record.backend);
        let address = current.map_or(&record.grpc, |backend| &backend.grpc);
        let link = match links.get(address, now) {
            Ok(link) => link,
            Err(error) => {
                tracing::warn!(backend = record.backend, error, "route ignored");
                return None;
            }
        };
        let same = |target: &&RouteTarget| target.link.address == *address;
        let before = old.and_then(|old| old.targets.iter().find(same));
        Some(RouteTarget {
            link,
            http: current.map_or(&record.http, |backend| &backend.http).clone(),
            weight: record.weight,
            batch: record.batch,
            batch_ms: record.batch_ms,
            cycle_ms: record.cycle_ms,
            min_batch: record.min_batch,
            version: record.version,
            outstanding: before.map(|target| target.outstanding.clone()).unwrap_or_default(),
        })
    };
    route.targets.iter().filter_map(target).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::TargetRecord;

    #[test]
    fn a_backend_that_restarts_elsewhere_is_found_without_a_new_plan() {
        let mut snapshot = ClusterSnapshot::default();
        let record = ModelRecord { version: 1, enabled: true, ..ModelRecord::default() };
        snapshot.models.insert("m".to_string(), record);
        let target = |backend: &str, port: u16| TargetRecord {
            backend: backend.to_string(),
            grpc: format!("10.0.0.1:{port}"),
            http: String::new(),
            weight: 1.0,
            batch: 1,
            batch_ms: 1.0,
            cycle_ms: 1.0,
            min_batch: 0,
            version: 1,
        };
        let targets = vec![target("a", 1), target("b", 2)];
        snapshot.routes.insert("m".to_string(), RouteRecord { targets, ..RouteRecord::default() });
        let moved = BackendRecord { grpc: "10.0.0.1:9".to_string(), ..BackendRecord::default() };
        snapshot.backends.insert("a".to_string(), moved);
        let links = BackendLinks::default();
        let now = Nanos::from_millis(5);
        let table = RoutingTable::build(&snapshot, &RoutingTable::default(), &links, now);
        let targets = table.models["m"].targets.iter();
        let addresses: Vec<&str> = targets.map(|target| target.link.address.as_str()).collect();
        assert_eq!(addresses, ["10.0.0.1:9", "10.0.0.1:2"]);
    }

    #[test]
    fn a_frontend_without_state_does_not_claim_that_a_model_is_unknown() {
        let model = ModelRef { name: "m", version: None };
        let kind = |table: &RoutingTable| table.known(model).err().unwrap().kind;
        assert_eq!(kind(&RoutingTable::default()), api::ErrorKind::Unavailable);
        let known = RoutingTable { known: true, ..RoutingTable::default() };
        assert_eq!(kind(&known), api::ErrorKind::NotFound);
    }
}
