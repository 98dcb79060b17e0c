//! The backend's agent: loads and unloads models on its node as the plan assigns them, and
//! publishes what is loaded.
//!
//! Without an assignment, or without the store, a backend keeps its models: the last plan stays in
//! force.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use api::InferenceService;
use api::error::ApiResult;
use base::Clock;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::candidate::CandidateRecord;
use crate::membership::Membership;
use crate::record::canary::{split_served, with_canaries};
use crate::record::{
    AssignedModel, Assignment, BackendRecord, BackendState, FailedUpdate, Keys, LoadState,
    ModelRecord, ProfileRecord, RecordKind, decode, encode, is_tombstone, profile_name,
};
use crate::record_keeper::keep_records;
use crate::state_file::{self, StateFile};
use crate::store::mirror;
use crate::store::{Store, StoreError};

use signatures::PublishedSignatures;
use version_offer::{FolderVersion, offer_versions};

pub mod candidates;
pub mod profiling;
mod signatures;
pub mod version_offer;

/// A call to the node.
pub type HostFuture<'a, T> = Pin<Box<dyn Future<Output = ApiResult<T>> + Send + 'a>>;

/// Batch sizes of a model on a backend that belongs to a backend pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBatch {
    /// Maximum number of requests in a batch.
    pub max: usize,
    /// Number of requests at which a batch starts without waiting for more.
    pub min: usize,
}

/// The node that runs models.
pub trait Host: Send + Sync + 'static {
    /// Loads the model of this name, as the [`ModelCatalog`] describes it.
    fn load<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()>;

    /// Unloads a model.
    fn unload<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()>;

    /// Uses the batch sizes of a backend pool for the model, or with `None` those of its settings.
    fn set_pool_batch(&self, model: &str, pool_batch: Option<PoolBatch>);

    /// The model's most expensive steps, which other models may share: see
    /// [`ProfileRecord::marks`].
    fn marks<'a>(&'a self, model: &'a str) -> HostFuture<'a, Vec<(String, f64)>>;

    /// Compiles and loads a candidate, without serving it.
    fn check<'a>(&'a self, candidate: &'a CandidateRecord) -> HostFuture<'a, ()>;

    /// Notes that a version is being measured, until the result is dropped. If the process ends
    /// meanwhile, the next one knows.
    fn begin_measuring(&self, _model: &str, _version: u64) -> Option<Box<dyn Send>> {
        None
    }

    /// The service that runs requests on this node.
    fn service(&self) -> Arc<dyn InferenceService>;
}

/// The records of all models of the cluster, kept up to date. The backend's loader reads them.
#[derive(Clone, Default)]
pub struct ModelCatalog {
    models: Arc<RwLock<BTreeMap<String, ModelRecord>>>,
    /// Models whose record is lost: not deleted, and not there.
    lost: Arc<RwLock<BTreeSet<String>>>,
}

impl ModelCatalog {
    /// The record of a model, or what there is of its canary under the name of that.
    pub fn find(&self, served: &str) -> Option<ModelRecord> {
        let record = self.record(split_served(served).0)?;
        record.served(served).map(Cow::into_owned)
    }

    /// All models and canaries.
    pub fn all(&self) -> BTreeMap<String, ModelRecord> {
        with_canaries(self.records())
    }

    /// The record that a model has in the store.
    fn record(&self, model: &str) -> Option<ModelRecord> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).get(model).cloned()
    }

    fn records(&self) -> BTreeMap<String, ModelRecord> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the record of a model or canary that was known is lost.
    fn is_lost(&self, served: &str) -> bool {
        let lost = self.lost.read().unwrap_or_else(PoisonError::into_inner);
        // A canary that its model does not have any more has ended.
        lost.contains(split_served(served).0) && self.find(served).is_some()
    }

    /// Takes the records that are there; the last known ones of those that are lost stay.
    fn set(&self, entries: &mirror::KeyValues) {
        let read = |(name, value): (&String, &bytes::Bytes)| {
            Some((name.clone(), decode::<ModelRecord>(name, value)?))
        };
        let mut models: BTreeMap<String, ModelRecord> = entries.iter().filter_map(read).collect();
        let is_deleted = |name: &str| entries.get(name).is_some_and(|value| is_tombstone(value));
        let mut lost = BTreeSet::new();
        for (name, record) in self.records() {
            if !models.contains_key(&name) && !is_deleted(&name) {
                lost.insert(name.clone());
                models.insert(name, record);
            }
        }
        *self.models.write().unwrap_or_else(PoisonError::into_inner) = models;
        *self.lost.write().unwrap_or_else(PoisonError::into_inner) = lost;
    }
}

/// A backend.
pub struct BackendAgent {
    /// Where the cluster's state is.
    pub store: Arc<dyn Store>,
    /// The keys of the cluster.
    pub keys: Keys,
    /// This backend's name.
    pub name: String,
    /// Span of its lease: after this time without renewal it counts as lost.
    pub lease: Duration,
    /// What it publishes about itself.
    pub record: BackendRecord,
    /// The node.
    pub host: Arc<dyn Host>,
    /// The records that its loader reads.
    pub catalog: ModelCatalog,
    /// Versions of its folders that are newer than those in force, once they are known.
    pub offered: watch::Receiver<Option<Vec<FolderVersion>>>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// Where the last assignment is kept, for a start without the store.
    pub saved: Option<StateFile>,
}

/// Pause before a failed load is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Name of the assignment in the saved state.
const SAVED_ASSIGNMENT: &str = "assignment";

/// What this backend has loaded and measured.
#[derive(Default)]
struct LocalState {
    state: BackendState,
    /// Digests whose profile is in the store.
    measured: BTreeSet<String>,
    signatures: PublishedSignatures,
    /// What was saved last.
    saved: state_file::Entries,
}

impl BackendAgent {
    /// Follows the plan until `stop` is true, then leaves the cluster. Waits for a store that
    /// cannot be reached.
    pub async fn run(self, mut stop: watch::Receiver<bool>) -> Result<(), StoreError> {
        let membership = Membership::start(self.store.clone(), self.lease);
        membership.put(self.keys.one(RecordKind::Backend, &self.name), encode(&self.record));
        let mut local = LocalState::default();
        self.load_saved(&mut local, &membership).await;
        let own = self.keys.one(RecordKind::Assignment, &self.name);
        let follow = async {
            let prefix = self.keys.of(RecordKind::Model);
            let models = mirror::follow_when_reachable(self.store.clone(), &prefix).await?;
            let own = mirror::follow_when_reachable(self.store.clone(), &own).await?;
            Ok::<_, StoreError>((models, own))
        };
        let (mut models, mut assignments) = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            followed = follow => followed?,
        };
        self.publish(&membership, &local);
        // Beside the loop: a candidate does not wait for loads, nor they for it.
        let mut checks = JoinSet::new();
        checks.spawn(candidates::check_candidates(
            self.store.clone(),
            self.keys.clone(),
            self.name.clone(),
            self.host.clone(),
            stop.clone(),
        ));
        let (store, keys, name) = (self.store.clone(), self.keys.clone(), self.name.clone());
        checks.spawn(keep_records(store, keys, name, stop.clone()));
        let (store, keys, name) = (self.store.clone(), self.keys.clone(), self.name.clone());
        let offered = self.offered.clone();
        checks.spawn(offer_versions(store, keys, name, offered, stop.clone()));
        loop {
            self.catalog.set(&models.borrow_and_update());
            let assignment: Option<Assignment> =
                assignments.borrow_and_update().get("").and_then(|value| decode(&own, value));
            self.save(assignment.as_ref(), &mut local).await;
            let settled = match &assignment {
                None => true,
                Some(assignment) => self.follow(assignment, &mut local, &membership).await,
            };
            let pause = if settled { Duration::MAX } else { RETRY };
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => break,
                changed = assignments.changed() => if changed.is_err() { break },
                changed = models.changed() => if changed.is_err() { break },
                () = tokio::time::sleep(pause) => {}
            }
        }
        membership.leave().await;
        Ok(())
    }

    /// Loads what was assigned when the backend last ran: most likely it still is, and requests
    /// may arrive before the store can be reached.
    async fn load_saved(&self, local: &mut LocalState, membership: &Membership) {
        let Some(file) = &self.saved else { return };
        let entries = file.read();
        let Some(assignment) = entries.get(SAVED_ASSIGNMENT) else { return };
        let Some(assignment) = decode::<Assignment>(SAVED_ASSIGNMENT, assignment) else { return };
        let prefix = RecordKind::Model.folder_prefix();
        let models = entries.iter().filter_map(|(key, value)| {
            Some((key.strip_prefix(prefix)?.to_string(), value.clone()))
        });
        self.catalog.set(&Arc::new(models.collect()));
        for assigned in &assignment.models {
            self.load(assigned, local, membership).await;
        }
        tracing::info!(models = assignment.models.len(), "models of the last run loaded");
    }

    /// Saves an assignment with the records of its models, where it has changed.
    async fn save(&self, assignment: Option<&Assignment>, local: &mut LocalState) {
        let (Some(file), Some(assignment)) = (&self.saved, assignment) else { return };
        let prefix = RecordKind::Model.folder_prefix();
        let record = |assigned: &AssignedModel| {
            let model = split_served(&assigned.model).0;
            Some((format!("{prefix}{model}"), encode(&self.catalog.record(model)?)))
        };
        let mut entries: state_file::Entries =
            assignment.models.iter().filter_map(record).collect();
        entries.insert(SAVED_ASSIGNMENT.to_string(), encode(assignment));
        if local.saved == entries {
            return;
        }
        local.saved.clone_from(&entries);
        let file = file.clone();
        let written = tokio::task::spawn_blocking(move || file.write(&entries)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!(%error, "cannot save the assignment");
        }
    }

    fn publish(&self, membership: &Membership, local: &LocalState) {
        membership.put(self.keys.one(RecordKind::State, &self.name), encode(&local.state));
    }

    /// Carries out an assignment: unloads, then loads, then measures. Returns `false` when
    /// something failed and is worth another attempt.
    async fn follow(
        &self,
        assignment: &Assignment,
        local: &mut LocalState,
        membership: &Membership,
    ) -> bool {
        self.unload_others(assignment, local, membership).await;
        let mut settled = true;
        for assigned in &assignment.models {
            settled &= self.load(assigned, local, membership).await;
            let gathers = assigned.min_batch > 1;
            let pool_batch =
                PoolBatch { max: assigned.batch as usize, min: assigned.min_batch as usize };
            self.host.set_pool_batch(&assigned.model, gathers.then_some(pool_batch));
        }
        for assigned in &assignment.models {
            self.describe(assigned, local).await;
            self.measure(assigned, local).await;
        }
        settled
    }

    async fn unload_others(
        &self,
        assignment: &Assignment,
        local: &mut LocalState,
        membership: &Membership,
    ) {
        let planned: BTreeSet<&str> = assignment.models.iter().map(|s| s.model.as_str()).collect();
        // A plan without a model whose record is lost does not mean it.
        let is_other = |m: &&String| !planned.contains(m.as_str()) && !self.catalog.is_lost(m);
        let others: Vec<String> = local.state.models.keys().filter(is_other).cloned().collect();
        for model in others {
            let load_state = local.state.models.remove(&model);
            local.state.failed.remove(&model);
            // Published first: the scheduler stops routing requests here before the model is
            // unloaded.
            self.publish(membership, local);
            if matches!(load_state, Some(LoadState::Ready { .. }))
                && let Err(error) = self.host.unload(&model).await
            {
                tracing::warn!(model, %error, "cannot unload model");
            }
        }
    }

    async fn load(
        &self,
        assigned: &AssignedModel,
        local: &mut LocalState,
        membership: &Membership,
    ) -> bool {
        let model = &assigned.model;
        // Records and assignments are followed apart: a record may be seen after the assignment
        // that was made for it, which is no failure.
        let Some(ModelRecord { version, .. }) = self.catalog.find(model) else {
            if !local.state.models.contains_key(model) {
                local.state.models.insert(model.clone(), LoadState::Loading);
                self.publish(membership, local);
            }
            return false;
        };
        let serving = match local.state.models.get(model) {
            // The record is the truth, also where it was set back to an older version.
            Some(LoadState::Ready { version: served }) if *served == version => {
                if local.state.failed.remove(model).is_some() {
                    self.publish(membership, local);
                }
                return true;
            }
            Some(LoadState::Ready { .. }) => true,
            _ => {
                local.state.models.insert(model.clone(), LoadState::Loading);
                self.publish(membership, local);
                false
            }
        };
        let result = self.host.load(model).await;
        let loaded = result.is_ok();
        match result {
            Ok(()) => {
                local.state.failed.remove(model);
                local.state.models.insert(model.clone(), LoadState::Ready { version });
            }
            // The version that was in service still is.
            Err(error) if serving => {
                let failed = FailedUpdate { version, reason: error.message.to_string() };
                local.state.failed.insert(model.clone(), failed);
            }
            Err(error) => {
                let failed = LoadState::Failed { version, reason: error.message.to_string() };
                local.state.models.insert(model.clone(), failed);
            }
        }
        self.publish(membership, local);
        loaded
    }

    /// Publishes what a model takes and returns.
    async fn describe(&self, assigned: &AssignedModel, local: &mut LocalState) {
        let model = assigned.model.as_str();
        let Some(record) = self.catalog.find(model) else { return };
        let state = local.state.models.get(model);
        let Some(LoadState::Ready { version }) = state else { return };
        if *version == record.version {
            let (store, service) = (&*self.store, self.host.service());
            local.signatures.publish(store, &self.keys, service, model, &record.digest).await;
        }
    }

    /// Measures a model that has no profile for this kind of device.
    async fn measure(&self, assigned: &AssignedModel, local: &mut LocalState) {
        let Some(record) = self.catalog.find(&assigned.model) else { return };
        let ready = matches!(
            local.state.models.get(&assigned.model),
            Some(LoadState::Ready { version }) if *version == record.version
        );
        if !ready || local.measured.contains(&record.digest) {
            return;
        }
        let name = profile_name(&self.record.device, &record.digest);
        let key = self.keys.one(RecordKind::Profile, &name);
        match self.store.get(&key).await {
            Ok(Some(_)) => {}
            Ok(None) => {
                let limit_ms = record.config.timeout_ms.map_or(f64::INFINITY, |ms| ms as f64);
                let service = self.host.service();
                // Until it is measured: if the process ends, the next one knows which model it was.
                let _mark = self.host.begin_measuring(&assigned.model, record.version);
                let curve =
                    profiling::measure(&*service, &*self.clock, &assigned.model, limit_ms).await;
                let curve = match curve {
                    Ok(curve) => curve,
                    Err(error) => {
                        tracing::warn!(model = assigned.model, %error, "cannot measure model");
                        Vec::new()
                    }
                };
                tracing::info!(model = assigned.model, ?curve, "model measured");
                let marks = self.host.marks(&assigned.model).await.unwrap_or_default();
                let profile = ProfileRecord { curve, memory_bytes: record.bytes, marks };
                if self.store.compare_and_put(&key, 0, encode(&profile), None).await.is_err() {
                    return;
                }
            }
            // The store is unreachable; the next change of the assignment tries again.
            Err(_) => return,
        }
        local.measured.insert(record.digest);
    }
}

#[cfg(test)]
mod tests {
    use base::MonotonicClock;
    use tokio::sync::mpsc;

    use super::*;
    use crate::record::AssignmentRole;
    use crate::store::{self, Write, etcd::EtcdAccess};

    /// A node that refuses what the catalog does not have, and never ends loading the rest.
    struct Node {
        catalog: ModelCatalog,
        loads: mpsc::UnboundedSender<String>,
    }

    impl Host for Node {
        fn load<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()> {
            Box::pin(async move {
                match self.catalog.find(model) {
                    None => Err(api::ApiError::not_found("the cluster has no such model")),
                    Some(_) => {
                        let _ = self.loads.send(model.to_string());
                        std::future::pending().await
                    }
                }
            })
        }

        fn unload<'a>(&'a self, _: &'a str) -> HostFuture<'a, ()> {
            Box::pin(async { Ok(()) })
        }

        fn set_pool_batch(&self, _: &str, _: Option<PoolBatch>) {}

        fn marks<'a>(&'a self, _: &'a str) -> HostFuture<'a, Vec<(String, f64)>> {
            Box::pin(async { Ok(Vec::new()) })
        }

        fn check<'a>(&'a self, _: &'a CandidateRecord) -> HostFuture<'a, ()> {
            Box::pin(std::future::pending())
        }

        fn service(&self) -> Arc<dyn InferenceService> {
            unreachable!("nothing is loaded to its end")
        }
    }

    #[tokio::test]
    async fn an_assignment_that_is_seen_before_its_record_is_no_failure() {
        let clock = Arc::new(MonotonicClock::new());
        let store = store::open("memory", EtcdAccess::default(), clock.clone()).unwrap();
        let keys = Keys::new("test");
        let (loads, mut loaded) = mpsc::unbounded_channel();
        let catalog = ModelCatalog::default();
        let agent = BackendAgent {
            store: store.clone(),
            keys: keys.clone(),
            name: "b".to_string(),
            lease: Duration::from_secs(60),
            record: BackendRecord::default(),
            host: Arc::new(Node { catalog: catalog.clone(), loads }),
            catalog,
            offered: watch::channel(None).1,
            clock,
            saved: None,
        };
        let (_stop, stopped) = watch::channel(false);
        tokio::spawn(agent.run(stopped));
        let put = async |key: String, value: bytes::Bytes| {
            store.transact(vec![], vec![Write::put(key, value)]).await.unwrap();
        };
        let assigned = AssignedModel {
            model: "m@2".to_string(),
            version: 2,
            role: AssignmentRole::Serving,
            batch: 1,
            rate: 1.0,
            min_batch: 0,
        };
        let assignment = Assignment { epoch: 1, cycle_ms: 1.0, models: vec![assigned] };
        put(keys.one(RecordKind::Assignment, "b"), encode(&assignment)).await;
        let state = keys.one(RecordKind::State, "b");
        let seen = loop {
            let entry = store.get(&state).await.unwrap();
            let found = entry.and_then(|entry| decode::<BackendState>("state", &entry.value));
            if let Some(seen) = found.and_then(|found| found.models.get("m@2").cloned()) {
                break seen;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        assert_eq!(seen, LoadState::Loading);
        let record = ModelRecord { version: 1, enabled: true, ..ModelRecord::default() };
        let (digest, config) = ("two".to_string(), Default::default());
        let canary = crate::record::VersionRecord { version: 2, digest, bytes: 1, config };
        let record = record.with_canary(canary, &api::CanaryOptions::with_share(5.0));
        put(keys.one(RecordKind::Model, "m"), encode(&record)).await;
        assert_eq!(loaded.recv().await.as_deref(), Some("m@2"));
    }
}
