//! Opens faulted devices again.
//!
//! A fault ends everything on a device: its context, its memory and what runs. The node of such a
//! device is abandoned, which answers every pending request, and dropped. A node on an absent
//! device takes its place until the device is open again; then the models that were there are
//! loaded, those first that are needed most. Other devices go on meanwhile. A driver may refuse the
//! device to this process for ever; then only another process can open it.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use base::Nanos;
use device::{
    CompletionSink, Device, DeviceError, DeviceInfo, Program, Queue, QueueOptions, Segment,
};
use model::LaunchPlan;
use model::config::{Class, ModelConfig};

use super::router::{GroupModelId, ReplicaState};
use super::{Entry, Shared};
use crate::batching::StaggeredBatch;
use crate::node::{BatchTime, CheckedPadding, ModelKey, ModelStats, Node, NodeOptions, Rejection};

/// How often a domain is examined.
const POLL: Duration = Duration::from_millis(50);
/// The first pause between two attempts to open a device, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(10));
/// Pause before a model that could not be loaded is tried again.
const LOAD_PAUSE: Nanos = Nanos::from_millis(5_000);

/// Why faulted devices were not opened again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReopenError {
    /// Something of them is still in use: it is tried again.
    NotYet(DeviceError),
    /// This process cannot open them any more.
    OnlyNewProcess(String),
}

/// Starts the nodes of a domain, in the order of its devices.
pub type NodeOpener = Box<dyn Fn() -> Result<Vec<Node>, ReopenError> + Send>;

/// Devices that fault together, such as the parts of one GPU.
pub struct FaultDomain {
    /// Their indices in the group.
    pub devices: Range<usize>,
    /// Opens them again.
    pub open: NodeOpener,
}

/// Faults of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryCounts {
    /// Faults.
    pub faults: u64,
    /// Faults after which its models served again.
    pub recovered: u64,
    /// Time without service of all recovered faults.
    pub out_of_service: Nanos,
    /// Out of service since then.
    pub since: Option<Nanos>,
    /// Only another process can open it.
    pub lost: bool,
}

/// A model that a device must load again.
struct LostModel {
    model: GroupModelId,
    plan: Arc<LaunchPlan>,
    config: ModelConfig,
    profile: Option<(String, Vec<BatchTime>)>,
    staggered: Option<StaggeredBatch>,
    padding: Option<(String, Arc<CheckedPadding>)>,
}

/// What is known of the models of a domain from before its fault.
#[derive(Default)]
struct Kept {
    stats: Vec<(GroupModelId, usize, ModelStats)>,
    /// Models that could not be loaded, and when they are tried again.
    refused: Vec<(GroupModelId, usize, Nanos)>,
}

impl Kept {
    fn take_stats(&mut self, model: GroupModelId, device: usize) -> ModelStats {
        let at = self.stats.iter().position(|(m, d, _)| (*m, *d) == (model, device));
        at.map(|at| self.stats.swap_remove(at).2).unwrap_or_default()
    }

    fn is_refused(&self, now: Nanos, model: GroupModelId, device: usize) -> bool {
        self.refused.iter().any(|(m, d, until)| (*m, *d) == (model, device) && *until > now)
    }
}

impl Shared {
    /// Recovers a domain whenever one of its devices is faulted, until the group stops.
    pub(super) fn watch(&self, domain: &FaultDomain) {
        let mut kept = Kept::default();
        while !self.pause(POLL) {
            let mut faults = domain.devices.clone().filter_map(|device| self.node(device).fault());
            if let Some(fault) = faults.next() {
                drop(faults);
                if !self.recover(domain, &fault, &mut kept) {
                    return;
                }
            }
            for device in domain.devices.clone() {
                self.reload(device, &mut kept);
            }
        }
    }

    /// Waits; true when the group stops.
    fn pause(&self, limit: Duration) -> bool {
        let state = self.lock();
        let stopping = |state: &mut super::State| !state.stopping;
        let waited = self.changed.wait_timeout_while(state, limit, stopping);
        waited.unwrap_or_else(PoisonError::into_inner).0.stopping
    }

    /// Opens the devices again; false when they stay out of service, or when the group stops.
    fn recover(&self, domain: &FaultDomain, fault: &DeviceError, kept: &mut Kept) -> bool {
        let device = &self.names[domain.devices.start];
        tracing::error!(device, %fault, "device is given up and opened again");
        for device in domain.devices.clone() {
            if let Err(err) = self.take_out(device, fault, kept) {
                tracing::error!(error = %err, "cannot replace the node of a faulted device");
                return false;
            }
        }
        let (mut wait, longest) = PAUSES;
        let mut logged = String::new();
        let nodes = loop {
            match (domain.open)() {
                Ok(nodes) if nodes.len() == domain.devices.len() => break nodes,
                Ok(_) => tracing::error!(device, "wrong number of devices"),
                Err(ReopenError::OnlyNewProcess(reason)) => {
                    tracing::error!(device, reason, "only a new process can open the device");
                    let mut state = self.lock();
                    domain.devices.clone().for_each(|device| state.recoveries[device].lost = true);
                    return false;
                }
                Err(ReopenError::NotYet(err)) => {
                    let text = err.to_string();
                    if text != logged {
                        tracing::warn!(device, error = %text, "cannot open the device yet");
                        logged = text;
                    }
                }
            }
            if self.pause(wait) {
                return false;
            }
            wait = (wait * 2).min(longest);
        };
        for (device, node) in domain.devices.clone().zip(nodes) {
            self.put_in(device, Arc::new(node));
        }
        tracing::info!(device, "device is open again");
        true
    }

    /// Replaces the node of a faulted device; what was pending is answered.
    fn take_out(
        &self,
        device: usize,
        fault: &DeviceError,
        kept: &mut Kept,
    ) -> Result<(), DeviceError> {
        let old = self.node(device);
        let info = old.device().info().clone();
        let absent = Arc::new(AbsentDevice { info, fault: fault.clone() });
        let options = NodeOptions { memory: Some(old.budget()), ..NodeOptions::default() };
        let node = Node::start(absent, options, self.clock.clone()).map_err(|err| match err {
            crate::NodeError::Device(err) => err,
            other => DeviceError::BadPlan(other.to_string()),
        })?;
        let lost: Vec<(GroupModelId, ModelKey)> = {
            let mut state = self.lock();
            self.put_node(device, Arc::new(node));
            let counts = &mut state.recoveries[device];
            counts.faults += 1;
            counts.since.get_or_insert(self.clock.now());
            let entries = state.entries.iter_mut().flatten();
            entries.filter_map(|entry| Some((entry.model, entry.keys[device].take()?))).collect()
        };
        old.abandon(fault);
        for (model, key) in lost {
            let stats = old.stats(key).unwrap_or_default();
            kept.stats.push((model, device, ModelStats { pending: 0, ..stats }));
        }
        drop_aside(old);
        Ok(())
    }

    pub(super) fn lose(&self, device: usize, fault: &DeviceError) -> Result<(), DeviceError> {
        self.take_out(device, fault, &mut Kept::default())?;
        self.lock().recoveries[device].lost = true;
        Ok(())
    }

    fn put_node(&self, device: usize, node: Arc<Node>) {
        self.nodes.write().unwrap_or_else(PoisonError::into_inner)[device] = node;
    }

    fn put_in(&self, device: usize, node: Arc<Node>) {
        let _state = self.lock();
        self.put_node(device, node);
    }

    /// Loads what a device has lost.
    fn reload(&self, device: usize, kept: &mut Kept) {
        if self.lock().recoveries[device].faults == 0 {
            return;
        }
        while let Some(lost) = self.next_lost(device, kept) {
            let node = self.node(device);
            if node.fault().is_some() || self.lock().stopping {
                return;
            }
            let model = lost.model;
            if let Err(err) = self.load_again(device, &node, lost, kept) {
                let name = &self.names[device];
                tracing::error!(device = name, error = %err, "cannot load a model again");
                kept.refused.retain(|(m, d, _)| (*m, *d) != (model, device));
                kept.refused.push((model, device, self.clock.now() + LOAD_PAUSE));
            }
        }
        if self.node(device).fault().is_some() {
            return;
        }
        let mut state = self.lock();
        let now = self.clock.now();
        let counts = &mut state.recoveries[device];
        if let Some(since) = counts.since.take() {
            counts.recovered += 1;
            counts.out_of_service += now - since;
            let millis = (now - since).0 / 1_000_000;
            tracing::info!(device = self.names[device], millis, "device serves again");
        }
        let entries = &state.entries;
        let exists = |model| entries.iter().flatten().any(|entry: &Entry| entry.model == model);
        kept.stats.retain(|(model, ..)| exists(*model));
        kept.refused.retain(|(model, ..)| exists(*model));
    }

    /// The model that the device needs most of those it has lost.
    fn next_lost(&self, device: usize, kept: &Kept) -> Option<LostModel> {
        let (state, now) = (self.lock(), self.clock.now());
        let is_lost = |entry: &&Entry| {
            let replicas = state.router.replicas(entry.model);
            let serving = |r: &super::ReplicaStatus| r.state == ReplicaState::Serving;
            let here = replicas.iter().any(|r| r.device == device && serving(r));
            here && entry.keys[device].is_none() && !kept.is_refused(now, entry.model, device)
        };
        let need = |entry: &&Entry| {
            let stats = kept.stats.iter().find(|(m, d, _)| (*m, *d) == (entry.model, device));
            let used = stats.map_or(0, |(.., stats)| stats.success);
            (entry.config.class == Class::RealTime, entry.config.pinned, used)
        };
        let entry = state.entries.iter().flatten().filter(is_lost).max_by_key(need)?;
        Some(LostModel {
            model: entry.model,
            plan: entry.plan.clone(),
            config: entry.config.clone(),
            profile: entry.profile.clone(),
            staggered: entry.staggered,
            padding: entry.padding.clone(),
        })
    }

    fn load_again(
        &self,
        device: usize,
        node: &Arc<Node>,
        lost: LostModel,
        kept: &mut Kept,
    ) -> Result<(), DeviceError> {
        let program = node.device().load(lost.plan)?;
        if let Some(why) = node.cannot_fit(&*program) {
            return Err(why);
        }
        let key = node.add_model(program, &lost.config);
        node.restore_stats(key, kept.take_stats(lost.model, device));
        if let Some((_, times)) = lost.profile.filter(|(kind, _)| *kind == self.kind(device)) {
            node.set_profile(key, &times);
        }
        if let Some((_, padding)) = lost.padding.filter(|(kind, _)| *kind == self.kind(device)) {
            node.set_padding(key, Some(padding));
        }
        if lost.staggered.is_some() {
            node.set_staggered_batch(key, lost.staggered);
        }
        node.preload(key);
        let mut state = self.lock();
        match state.entry_mut(lost.model) {
            Some(entry) => {
                entry.keys[device] = Some(key);
                let changed = (entry.config != lost.config).then(|| entry.config.clone());
                drop(state);
                if let Some(changed) = changed {
                    node.set_settings(key, &lost.config, &changed);
                }
            }
            // It was removed meanwhile.
            None => {
                drop(state);
                node.remove_model(key);
            }
        }
        Ok(())
    }

    /// Why a model is not on a device where it should be.
    pub(super) fn not_loaded(&self, device: usize) -> Rejection {
        let fault = self.node(device).fault();
        Rejection::Device(fault.unwrap_or_else(|| DeviceError::Faulted {
            device: self.names[device].clone(),
            reason: "the model is being loaded again after a fault".to_string(),
        }))
    }
}

/// Drops the node of a faulted device on a thread of its own: what it holds may wait for a kernel
/// that hangs, and nothing else is to wait for that.
fn drop_aside(node: Arc<Node>) {
    let named = std::thread::Builder::new().name("device-discard".to_string());
    if let Err(err) = named.spawn(move || drop(node)) {
        tracing::error!(%err, "no thread to close a faulted device");
    }
}

/// Stands for a device while it is opened again: it refuses everything.
struct AbsentDevice {
    info: DeviceInfo,
    fault: DeviceError,
}

struct AbsentQueue;

impl Queue for AbsentQueue {
    fn launch(&self, segment: Segment) -> Result<(), Segment> {
        Err(segment)
    }

    fn preempt(&self) {}
}

impl Device for AbsentDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn unsupported_steps(&self, _: &LaunchPlan) -> Vec<DeviceError> {
        Vec::new()
    }

    fn load(&self, _: Arc<LaunchPlan>) -> Result<Arc<dyn Program>, DeviceError> {
        Err(self.fault.clone())
    }

    fn open_queue(
        &self,
        _: QueueOptions,
        _: Arc<dyn CompletionSink>,
    ) -> Result<Box<dyn Queue>, DeviceError> {
        Ok(Box::new(AbsentQueue))
    }

    fn fault(&self) -> Option<DeviceError> {
        Some(self.fault.clone())
    }
}

#[cfg(test)]
mod tests;
