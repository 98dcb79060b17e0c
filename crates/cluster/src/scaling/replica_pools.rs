//! Decides on all replica pools together: how many replicas each needs, when the cluster is scaled
//! to zero and from zero, and which pools are not asked because theirs do not come. Pure.

use std::collections::BTreeSet;

use base::Nanos;

use super::growth::Growth;
use super::replica_estimate::{PoolOffer, ScalingInput, estimate};
use super::scaler::{ReplicaState, Scaler, ScalerInput, ScalingDecision, ScalingSettings};
use super::target::Scale;
use crate::record::ReplicaPoolRecord;
use crate::scheduler::plan::Machine;

/// Settings of one pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSettings {
    /// Its limits and times.
    pub scaling: ScalingSettings,
    /// The kind of device of its backends; that of its first replica, where it is not given.
    pub kind: Option<String>,
    /// Price of a replica.
    pub price: f64,
    /// Time without a request after which the last replicas are removed, where the minimum is 0.
    pub zero_after: Nanos,
    /// Time without a new replica after which missing ones count as not coming.
    pub pending_limit: Nanos,
}

impl Default for PoolSettings {
    fn default() -> Self {
        PoolSettings {
            scaling: ScalingSettings::default(),
            kind: None,
            price: 1.0,
            zero_after: Nanos::from_millis(300_000),
            pending_limit: Nanos::from_millis(300_000),
        }
    }
}

/// One pool over time.
#[derive(Clone, Debug)]
struct PoolState {
    settings: PoolSettings,
    scaler: Scaler,
    growth: Growth,
    /// What its replicas are like, once one has joined.
    seen: Option<Machine>,
    stalled: Option<String>,
}

/// What is known of one pool now; `None` where it cannot be read.
pub type PoolView<'a> = Option<(&'a Scale, super::scaler::Removal)>;

/// What to do with one pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolDecision {
    /// The decision of its scaler.
    pub scaling: ScalingDecision,
    /// Replicas that have joined.
    pub present: usize,
    /// Why it has just stalled.
    pub newly_stalled: Option<String>,
    /// The kind that its replicas have, where it is not the one that was given.
    pub other_kind: Option<String>,
}

/// What to do with all pools.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolsDecision {
    /// By pool; `None` where it could not be read.
    pub pools: Vec<Option<PoolDecision>>,
    /// Nothing is needed: the last backends may be emptied.
    pub may_empty: bool,
}

/// All replica pools of a cluster.
#[derive(Clone, Debug)]
pub struct ReplicaPools {
    pools: Vec<PoolState>,
}

impl ReplicaPools {
    /// Pools without history, except for what an earlier leader knew of their machines.
    pub fn new(
        settings: Vec<PoolSettings>,
        before: &[Option<ReplicaPoolRecord>],
        now: Nanos,
    ) -> ReplicaPools {
        let pool = |(index, settings): (usize, PoolSettings)| {
            let known = before.get(index).and_then(Option::as_ref);
            let kind = known.map(|known| known.kind.clone()).filter(|kind| !kind.is_empty());
            let memory_bytes = known.map_or(0, |known| known.memory_bytes);
            let device = settings.kind.clone().or(kind);
            PoolState {
                scaler: Scaler::new(settings.scaling.clone(), now),
                growth: Growth::new(settings.pending_limit),
                seen: device.map(|device| Machine { name: String::new(), device, memory_bytes }),
                stalled: None,
                settings,
            }
        };
        ReplicaPools { pools: settings.into_iter().enumerate().map(pool).collect() }
    }

    /// Decides what to do now. [`ReplicaPools::applied`] has to be called for each change that was
    /// made. The estimate may take long.
    pub fn step(
        &mut self,
        now: Nanos,
        input: &ScalingInput,
        views: &[PoolView<'_>],
    ) -> PoolsDecision {
        let present: Vec<Vec<ReplicaState>> = views
            .iter()
            .map(|view| view.map_or_else(Vec::new, |(scale, _)| replicas_present(scale, input)))
            .collect();
        let newly_stalled = self.observe(now, input, views, &present);
        let offers = self.offers(now, views, &present);
        let mut needs: Vec<Option<u32>> = match estimate(input, &offers) {
            Some(counts) => counts.into_iter().map(Some).collect(),
            None => vec![None; self.pools.len()],
        };
        self.scale_to_zero(input, views, &present, &mut needs);
        let is_pool = |name: &String| offers.iter().any(|offer| offer.own.contains(name));
        let has_others = input.machines.iter().any(|machine| !is_pool(&machine.name));
        let may_empty = !has_others
            && needs.iter().all(|need| *need == Some(0))
            && views.iter().all(Option::is_some)
            && self.pools.iter().all(|pool| pool.settings.scaling.replicas_min == 0);
        let ending: BTreeSet<&str> = present
            .iter()
            .flatten()
            .filter(|member| member.ending)
            .map(|member| member.name.as_str())
            .collect();
        let is_served = input.machines.iter().any(|m| !ending.contains(m.name.as_str()));
        let urgent = input.activity.waiting > 0 && !is_served;
        let unread = views.iter().any(Option::is_none);
        let mut pools = Vec::with_capacity(views.len());
        for (index, view) in views.iter().enumerate() {
            let Some((scale, removal)) = view else {
                pools.push(None);
                continue;
            };
            let scaler_input = ScalerInput {
                replicas: scale.replicas,
                need: needs[index],
                removal: *removal,
                replicas_present: &present[index],
                urgent,
                hold: unread || input.activity.waiting > 0 || self.others_wait(now, index),
            };
            pools.push(Some(PoolDecision {
                scaling: self.pools[index].scaler.step(now, &scaler_input),
                present: present[index].iter().filter(|member| member.joined).count(),
                newly_stalled: newly_stalled[index].clone(),
                other_kind: self.other_kind(index, input, &present[index]),
            }));
        }
        PoolsDecision { pools, may_empty }
    }

    /// Records that the change of a pool was made.
    pub fn applied(&mut self, now: Nanos, pool: usize, decision: &ScalingDecision) {
        self.pools[pool].scaler.applied(now, decision);
    }

    /// Stops draining the backends of a pool that cannot be changed; returns those that are being
    /// removed already.
    pub fn stop_draining(&mut self, now: Nanos, pool: usize) -> BTreeSet<String> {
        self.pools[pool].scaler.stop_draining(now)
    }

    /// Why a pool's replicas do not come.
    pub fn stalled(&self, pool: usize) -> Option<&String> {
        self.pools[pool].stalled.as_ref()
    }

    /// What the replicas of a pool are like, where that is known.
    pub fn like(&self, pool: usize) -> Option<&Machine> {
        self.pools[pool].seen.as_ref()
    }

    /// Takes note of what has joined. Returns why pools have just stalled.
    fn observe(
        &mut self,
        now: Nanos,
        input: &ScalingInput,
        views: &[PoolView<'_>],
        present: &[Vec<ReplicaState>],
    ) -> Vec<Option<String>> {
        let mut reasons = Vec::with_capacity(views.len());
        for ((pool, view), present) in self.pools.iter_mut().zip(views).zip(present) {
            let Some((scale, _)) = view else {
                reasons.push(None);
                continue;
            };
            let joins = |member: &&ReplicaState| member.joined && !member.ending;
            let joined = u32::try_from(present.iter().filter(joins).count()).unwrap_or(u32::MAX);
            let own = present.iter().find(|member| member.joined);
            let own = own.and_then(|own| input.machines.iter().find(|m| m.name == own.name));
            if let Some(machine) = own {
                pool.seen = Some(machine.clone());
            }
            let fresh = pool.growth.update(now, scale.replicas, joined);
            if fresh {
                pool.stalled = Some(missing_because(scale, joined));
            } else if !pool.growth.is_stalled(now) {
                pool.stalled = None;
            }
            reasons.push(pool.stalled.clone().filter(|_| fresh));
        }
        reasons
    }

    fn offers(
        &self,
        now: Nanos,
        views: &[PoolView<'_>],
        present: &[Vec<ReplicaState>],
    ) -> Vec<PoolOffer> {
        let offer = |((pool, view), present): ((&PoolState, &PoolView<'_>), &Vec<_>)| {
            let settings = &pool.settings.scaling;
            let joined: BTreeSet<String> = present
                .iter()
                .filter(|member: &&ReplicaState| member.joined)
                .map(|member| member.name.clone())
                .collect();
            let count = u32::try_from(joined.len()).unwrap_or(u32::MAX);
            let max = match (view, pool.growth.is_stalled(now)) {
                // Those that serve are used on; a pool that cannot be read cannot be changed.
                (None, _) => 0,
                (_, true) => settings.replicas_max.min(count),
                (_, false) => settings.replicas_max,
            };
            PoolOffer {
                own: joined,
                like: pool.seen.clone(),
                bounds: (settings.replicas_min.min(max), max),
                price: pool.settings.price,
                current: view.map_or(0, |(scale, _)| scale.replicas),
            }
        };
        self.pools.iter().zip(views).zip(present).map(offer).collect()
    }

    /// Sets the needs of pools to 0 that may have no replica, because no request came for their
    /// time; or because they have none and none is needed.
    fn scale_to_zero(
        &self,
        input: &ScalingInput,
        views: &[PoolView<'_>],
        present: &[Vec<ReplicaState>],
        needs: &mut [Option<u32>],
    ) {
        let idle_for = input.activity.idle_for;
        let nothing_requested = views.iter().flatten().all(|(scale, _)| scale.replicas == 0);
        let is_at_zero = nothing_requested && present.iter().flatten().all(|member| member.ending);
        for (pool, need) in self.pools.iter().zip(needs) {
            let settings = &pool.settings;
            let is_unused = is_at_zero && !input.activity.active;
            let is_due = is_unused || idle_for.is_some_and(|idle| idle >= settings.zero_after);
            if settings.scaling.replicas_min == 0 && is_due {
                *need = Some(0);
            }
        }
    }

    /// Whether another pool waits for replicas that may still come.
    fn others_wait(&self, now: Nanos, index: usize) -> bool {
        let mut pools = self.pools.iter().enumerate();
        pools.any(|(other, pool)| other != index && pool.growth.is_waiting(now))
    }

    /// The kind that a pool's replicas have, where another one was given.
    fn other_kind(
        &self,
        index: usize,
        input: &ScalingInput,
        present: &[ReplicaState],
    ) -> Option<String> {
        let given = self.pools[index].settings.kind.as_ref()?;
        let joined = present.iter().filter(|member| member.joined);
        let mut machines = joined
            .filter_map(|member| input.machines.iter().find(|machine| machine.name == member.name));
        machines.find(|machine| machine.device != *given).map(|machine| machine.device.clone())
    }
}

/// Replicas, with the state of their backends.
fn replicas_present(scale: &Scale, input: &ScalingInput) -> Vec<ReplicaState> {
    let member = |replica: &super::target::Replica| {
        let usage = input.usage.get(&replica.name);
        ReplicaState {
            name: replica.name.clone(),
            ordinal: replica.ordinal,
            joined: usage.is_some(),
            ready: replica.ready,
            ending: replica.ending,
            empty: usage.is_some_and(|usage| usage.empty),
            busy: usage.map_or(0.0, |usage| usage.busy),
        }
    };
    scale.members.iter().map(member).collect()
}

/// Why requested replicas have not joined, as far as their pods show it.
fn missing_because(scale: &Scale, joined: u32) -> String {
    let alive = scale.members.iter().filter(|member| !member.ending);
    let (pods, requested) = (alive.clone().count(), scale.replicas);
    let head = format!("{joined} of {requested} replicas have joined");
    let unscheduled = alive.clone().find_map(|member| member.unscheduled.as_ref());
    let waiting = alive.filter(|member| !member.ready).map(|member| &member.name).next();
    match (unscheduled, waiting) {
        (Some(why), _) => format!("{head}: a pod has no node: {why}"),
        _ if pods < requested as usize => {
            format!("{head}: only {pods} pods exist; is there a quota?")
        }
        (None, Some(name)) => format!("{head}: pod {name} is not ready"),
        (None, None) => format!("{head}: pods are ready, but no backends of the cluster"),
    }
}

#[cfg(test)]
#[path = "replica_pools_tests.rs"]
mod tests;
#[cfg(test)]
#[path = "zero_tests.rs"]
mod zero_tests;
