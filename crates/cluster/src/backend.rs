//! The backend's agent: holds what the plan says on a node, and says what it holds.
//!
//! Without an assignment, or without the store, a backend keeps what it has: the last plan goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use api::InferenceService;
use api::error::ApiResult;
use base::Clock;
use tokio::sync::watch;

use crate::membership::Membership;
use crate::record::{
    Assignment, BackendRecord, BackendState, Keys, Kind, ModelRecord, ProfileRecord, Share,
    Standing, decode, encode, profile_name,
};
use crate::store::mirror;
use crate::store::{Store, StoreError};

pub mod profiling;

/// A call to the node.
pub type HostFuture<'a, T> = Pin<Box<dyn Future<Output = ApiResult<T>> + Send + 'a>>;

/// What batches of a model are made of on a backend that shares its requests with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Requests of a batch at most.
    pub batch: usize,
    /// Requests that let one begin before it has to.
    pub least: usize,
}

/// The node that runs models.
pub trait Host: Send + Sync + 'static {
    /// Makes the model of this name ready, as the [`Shelf`] has it.
    fn load<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()>;

    /// Takes a model out of service.
    fn unload<'a>(&'a self, model: &'a str) -> HostFuture<'a, ()>;

    /// Makes batches of `turn` of requests for the model, or as its settings say.
    fn set_turn(&self, model: &str, turn: Option<Turn>);

    /// What of the model's work others may have in common with it: see [`ProfileRecord::marks`].
    fn marks<'a>(&'a self, model: &'a str) -> HostFuture<'a, Vec<(String, f64)>>;

    /// What it answers with.
    fn service(&self) -> Arc<dyn InferenceService>;
}

/// The models' records as the cluster has them now; what a backend's loader goes by.
#[derive(Clone, Default)]
pub struct Shelf {
    models: Arc<RwLock<BTreeMap<String, ModelRecord>>>,
}

impl Shelf {
    /// The record of a model.
    pub fn find(&self, model: &str) -> Option<ModelRecord> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).get(model).cloned()
    }

    /// All of them.
    pub fn all(&self) -> BTreeMap<String, ModelRecord> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, models: BTreeMap<String, ModelRecord>) {
        *self.models.write().unwrap_or_else(PoisonError::into_inner) = models;
    }
}

/// A backend.
pub struct BackendAgent {
    /// Where the state lives.
    pub store: Arc<dyn Store>,
    /// Its keys.
    pub keys: Keys,
    /// This backend's name.
    pub name: String,
    /// How long it is missed before others think it gone.
    pub lease: Duration,
    /// What it says about itself.
    pub record: BackendRecord,
    /// The node.
    pub host: Arc<dyn Host>,
    /// The records its loader goes by.
    pub shelf: Shelf,
    /// Time.
    pub clock: Arc<dyn Clock>,
}

/// Pause before a model that did not load is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// What a backend has and knows.
struct Held {
    state: BackendState,
    /// Digests that were measured or found measured.
    measured: BTreeSet<String>,
}

impl BackendAgent {
    /// Follows the plan until `stop` turns true, then leaves the cluster. The store must be reachable once.
    pub async fn run(self, mut stop: watch::Receiver<bool>) -> Result<(), StoreError> {
        let mut models = mirror::follow(self.store.clone(), &self.keys.of(Kind::Model)).await?;
        let own = self.keys.one(Kind::Assignment, &self.name);
        let mut assignments = mirror::follow(self.store.clone(), &own).await?;
        let membership = Membership::start(self.store.clone(), self.lease);
        membership.put(self.keys.one(Kind::Backend, &self.name), encode(&self.record));
        let mut held = Held { state: BackendState::default(), measured: BTreeSet::new() };
        self.publish(&membership, &held);
        loop {
            self.read_models(&models.borrow_and_update());
            let assignment: Option<Assignment> =
                assignments.borrow_and_update().get("").and_then(|value| decode(&own, value));
            let settled = match &assignment {
                None => true,
                Some(assignment) => self.follow(assignment, &mut held, &membership).await,
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

    fn read_models(&self, image: &mirror::Image) {
        let read = |(name, value): (&String, &bytes::Bytes)| {
            Some((name.clone(), decode::<ModelRecord>(name, value)?))
        };
        self.shelf.set(image.iter().filter_map(read).collect());
    }

    fn publish(&self, membership: &Membership, held: &Held) {
        membership.put(self.keys.one(Kind::State, &self.name), encode(&held.state));
    }

    /// Does one thing of what the assignment asks, then the next, until all is done; loads go before measuring.
    /// `false` when something failed and is worth another attempt.
    async fn follow(
        &self,
        assignment: &Assignment,
        held: &mut Held,
        membership: &Membership,
    ) -> bool {
        self.unload_others(assignment, held, membership).await;
        let mut settled = true;
        for share in &assignment.shares {
            settled &= self.load(share, held, membership).await;
            let gathers = share.least > 1;
            let turn = Turn { batch: share.batch as usize, least: share.least as usize };
            self.host.set_turn(&share.model, gathers.then_some(turn));
        }
        for share in &assignment.shares {
            self.measure(share, held).await;
        }
        settled
    }

    async fn unload_others(
        &self,
        assignment: &Assignment,
        held: &mut Held,
        membership: &Membership,
    ) {
        let wanted: BTreeSet<&str> = assignment.shares.iter().map(|s| s.model.as_str()).collect();
        let others: Vec<String> =
            held.state.models.keys().filter(|m| !wanted.contains(m.as_str())).cloned().collect();
        for model in others {
            let standing = held.state.models.remove(&model);
            // Said before it is done: the scheduler stops sending before the model goes.
            self.publish(membership, held);
            if matches!(standing, Some(Standing::Ready { .. }))
                && let Err(error) = self.host.unload(&model).await
            {
                tracing::warn!(model, %error, "not unloaded");
            }
        }
    }

    async fn load(&self, share: &Share, held: &mut Held, membership: &Membership) -> bool {
        let model = &share.model;
        match held.state.models.get(model) {
            Some(Standing::Ready { version }) if *version >= share.version => return true,
            Some(Standing::Ready { .. }) => {}
            _ => {
                held.state.models.insert(model.clone(), Standing::Loading);
                self.publish(membership, held);
            }
        }
        let version = self.shelf.find(model).map_or(share.version, |record| record.version);
        let standing = match self.host.load(model).await {
            Ok(()) => Standing::Ready { version },
            Err(error) => Standing::Failed { version, reason: error.message.to_string() },
        };
        let loaded = matches!(standing, Standing::Ready { .. });
        held.state.models.insert(model.clone(), standing);
        self.publish(membership, held);
        loaded
    }

    /// Measures a model that nobody has measured on this kind of device.
    async fn measure(&self, share: &Share, held: &mut Held) {
        let Some(record) = self.shelf.find(&share.model) else { return };
        let ready = matches!(held.state.models.get(&share.model), Some(Standing::Ready { .. }));
        if !ready || held.measured.contains(&record.digest) {
            return;
        }
        let name = profile_name(&self.record.device, &record.digest);
        let key = self.keys.one(Kind::Profile, &name);
        match self.store.get(&key).await {
            Ok(Some(_)) => {}
            Ok(None) => {
                let limit_ms = record.config.timeout_ms.map_or(f64::INFINITY, |ms| ms as f64);
                let service = self.host.service();
                let curve =
                    profiling::measure(&*service, &*self.clock, &share.model, limit_ms).await;
                let curve = match curve {
                    Ok(curve) => curve,
                    Err(error) => {
                        tracing::warn!(model = share.model, %error, "not measured");
                        Vec::new()
                    }
                };
                tracing::info!(model = share.model, ?curve, "measured");
                let marks = self.host.marks(&share.model).await.unwrap_or_default();
                let profile = ProfileRecord { curve, memory_bytes: record.bytes, marks };
                if self.store.compare_and_put(&key, 0, encode(&profile), None).await.is_err() {
                    return;
                }
            }
            // Without the store there is nobody to tell; another look comes with the next change.
            Err(_) => return,
        }
        held.measured.insert(record.digest);
    }
}
