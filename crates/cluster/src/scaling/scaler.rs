//! Decides on replicas over time: up as soon as the load needs it, down when it has not needed them
//! for a while and the backends to remove are drained.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::Nanos;

/// Settings of the scaler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalingSettings {
    /// Minimum number of replicas.
    pub replicas_min: u32,
    /// Maximum number of replicas.
    pub replicas_max: u32,
    /// Maximum number of replicas that one change adds.
    pub step_up: u32,
    /// Maximum number of replicas that one change removes.
    pub step_down: u32,
    /// Replicas are removed only when the load has not needed them for this long.
    pub window: Nanos,
    /// Minimum time between two changes.
    pub cooldown: Nanos,
    /// A backend that is not drained after this time stays, and is tried again a window later.
    pub drain_timeout: Nanos,
}

impl Default for ScalingSettings {
    fn default() -> Self {
        ScalingSettings {
            replicas_min: 1,
            replicas_max: 10,
            step_up: 4,
            step_down: 1,
            window: Nanos::from_millis(300_000),
            cooldown: Nanos::from_millis(30_000),
            drain_timeout: Nanos::from_millis(300_000),
        }
    }
}

/// Which replicas are removed when their number is lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Those marked as cheap to remove, after those that are not ready (Deployment).
    Marked,
    /// Those with the highest ordinals (StatefulSet).
    Ordinal,
}

/// A replica, with the state of its backend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplicaState {
    /// Its name, which is also its backend's name.
    pub name: String,
    /// Its ordinal, where replicas have one.
    pub ordinal: u64,
    /// Whether it has joined the cluster.
    pub joined: bool,
    /// Whether its pod is ready.
    pub ready: bool,
    /// Whether its pod is terminating.
    pub ending: bool,
    /// Whether it holds no model and is assigned none.
    pub empty: bool,
    /// Share of its time that the plan uses.
    pub busy: f64,
}

/// Input of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalerInput<'a> {
    /// Replicas requested now.
    pub replicas: u32,
    /// Replicas that the load needs; `None` while no load is reported.
    pub need: Option<u32>,
    /// Which replicas are removed first.
    pub removal: Removal,
    /// The replicas that exist.
    pub replicas_present: &'a [ReplicaState],
    /// Requests wait and no backend serves: replicas are added without a pause.
    pub urgent: bool,
    /// Nothing is removed now: other replicas that are to take over have not come yet.
    pub hold: bool,
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScalingDecision {
    /// Replicas that the load needs, within the bounds.
    pub wanted: u32,
    /// Replicas to request now, where that is a change.
    pub replicas: Option<u32>,
    /// The replicas that this change removes.
    pub removing: BTreeSet<String>,
    /// Backends to plan without.
    pub draining: BTreeSet<String>,
    /// Backends whose drain timed out.
    pub stuck: Vec<String>,
}

/// Decides how many replicas to request and which backends to drain.
#[derive(Clone, Debug)]
pub struct Scaler {
    settings: ScalingSettings,
    started_at: Nanos,
    /// Needs over the window, with their times; later ones are smaller.
    desired: VecDeque<(Nanos, u32)>,
    changed_at: Option<Nanos>,
    /// Backends that are draining, and since when.
    draining: BTreeMap<String, Nanos>,
    /// Replicas that a change removes, and since when.
    removing: BTreeMap<String, Nanos>,
    /// Nothing is removed before this time.
    held_until: Nanos,
}

impl Scaler {
    /// Creates a scaler without history: it removes nothing for a window.
    pub fn new(settings: ScalingSettings, now: Nanos) -> Scaler {
        Scaler {
            settings,
            started_at: now,
            desired: VecDeque::new(),
            changed_at: None,
            draining: BTreeMap::new(),
            removing: BTreeMap::new(),
            held_until: now,
        }
    }

    /// Decides what to do now. [`Scaler::applied`] has to be called when it was done.
    pub fn step(&mut self, now: Nanos, input: &ScalerInput<'_>) -> ScalingDecision {
        let bounds = self.settings.replicas_min..=self.settings.replicas_max;
        // Without load reports all replicas stay.
        let need = input.need.unwrap_or(input.replicas);
        let desired = need.clamp(*bounds.start(), *bounds.end());
        let floor = self.floor(now, desired, input.replicas);
        let floor = if input.hold { floor.max(input.replicas) } else { floor };
        self.forget(now, input.replicas_present);
        let mut decision = ScalingDecision { wanted: desired, ..ScalingDecision::default() };
        if desired > input.replicas {
            self.draining.clear();
            if input.removal == Removal::Ordinal {
                // New replicas get these names again.
                self.removing.clear();
            }
            let max = input.replicas.saturating_add(self.settings.step_up);
            let may_grow = input.urgent || self.cooldown_passed(now);
            decision.replicas = may_grow.then(|| desired.min(max));
        } else {
            self.scale_down(now, floor, input, &mut decision);
        }
        let ending = input.replicas_present.iter().filter(|member| member.ending);
        decision.draining = ending.map(|member| member.name.clone()).collect();
        decision.draining.extend(self.draining.keys().chain(self.removing.keys()).cloned());
        decision
    }

    /// Records that the change of [`Scaler::step`] was made.
    pub fn applied(&mut self, now: Nanos, decision: &ScalingDecision) {
        self.changed_at = Some(now);
        for name in &decision.removing {
            self.draining.remove(name);
            self.removing.insert(name.clone(), now);
        }
    }

    /// Stops draining backends, for a window at least, and returns those that are being removed
    /// already. Called while the target cannot be changed.
    pub fn stop_draining(&mut self, now: Nanos) -> BTreeSet<String> {
        self.draining.clear();
        self.held_until = now + self.settings.window;
        self.removing.keys().cloned().collect()
    }

    fn cooldown_passed(&self, now: Nanos) -> bool {
        self.changed_at.is_none_or(|at| now - at >= self.settings.cooldown)
    }

    /// The maximum need within the window; at least the current replicas until a whole window was
    /// observed.
    fn floor(&mut self, now: Nanos, desired: u32, replicas: u32) -> u32 {
        while self.desired.back().is_some_and(|(_, before)| *before <= desired) {
            self.desired.pop_back();
        }
        self.desired.push_back((now, desired));
        while self.desired.front().is_some_and(|(at, _)| now - *at >= self.settings.window) {
            self.desired.pop_front();
        }
        let max = self.desired.front().map_or(desired, |(_, max)| *max).max(desired);
        let seen = now - self.started_at >= self.settings.window && now >= self.held_until;
        if seen { max } else { max.max(replicas) }
    }

    /// Forgets replicas that are gone, and those in whose place others were removed.
    fn forget(&mut self, now: Nanos, replicas_present: &[ReplicaState]) {
        let there = |name: &String| replicas_present.iter().any(|member| member.name == *name);
        self.draining.retain(|name, _| there(name));
        let limit = self.settings.drain_timeout;
        self.removing.retain(|name, since| there(name) && now - *since < limit);
    }

    fn scale_down(
        &mut self,
        now: Nanos,
        floor: u32,
        input: &ScalerInput<'_>,
        decision: &mut ScalingDecision,
    ) {
        let surplus = input.replicas.saturating_sub(floor).min(self.settings.step_down);
        let is_removed = |member: &ReplicaState| match input.removal {
            Removal::Marked => self.removing.contains_key(&member.name),
            // Ordinals are reused: the name may belong to a new replica by now.
            Removal::Ordinal => false,
        };
        let replicas_present = input.replicas_present.iter();
        let remaining: Vec<&ReplicaState> =
            replicas_present.filter(|member| !member.ending && !is_removed(member)).collect();
        // While more replicas exist than requested, it is unknown which ones are removed.
        let settled = remaining.len() <= input.replicas as usize;
        if surplus == 0 || !settled {
            self.draining.clear();
            return;
        }
        // A serving replica that is not ready would be removed before any marked one.
        let is_unsafe = input.removal == Removal::Marked
            && remaining.iter().any(|member| member.joined && !member.ready);
        // Requested replicas that do not exist are taken back first: nothing has to be drained.
        let missing = (input.replicas as usize).saturating_sub(remaining.len());
        let vacant = u32::try_from(missing).unwrap_or(surplus).min(surplus);
        if vacant > 0 {
            self.draining.clear();
            let may_write = !is_unsafe && self.cooldown_passed(now);
            decision.replicas = may_write.then(|| input.replicas - vacant);
            return;
        }
        let candidates = self.candidates(&remaining, input.removal);
        let selected = &candidates[..candidates.len().min(surplus as usize)];
        self.drain(now, selected, decision);
        let removable = |member: &&&ReplicaState| !member.joined || member.empty;
        let removed: Vec<&ReplicaState> = match input.removal {
            Removal::Ordinal => selected.iter().take_while(removable).copied().collect(),
            Removal::Marked if is_unsafe => Vec::new(),
            Removal::Marked => selected.iter().filter(removable).copied().collect(),
        };
        if !removed.is_empty() && decision.stuck.is_empty() && self.cooldown_passed(now) {
            let count = u32::try_from(removed.len()).unwrap_or(surplus);
            decision.replicas = Some(input.replicas - count);
            decision.removing = removed.iter().map(|member| member.name.clone()).collect();
        }
    }

    /// Replicas in the order in which they are to be removed.
    fn candidates<'a>(
        &self,
        remaining: &[&'a ReplicaState],
        removal: Removal,
    ) -> Vec<&'a ReplicaState> {
        let mut order = remaining.to_vec();
        match removal {
            Removal::Ordinal => order.sort_by_key(|member| std::cmp::Reverse(member.ordinal)),
            Removal::Marked => order.sort_by(|a, b| {
                let first = |member: &ReplicaState| {
                    let draining = self.draining.contains_key(&member.name);
                    (member.joined, member.ready, !draining, !member.empty)
                };
                let busy = a.busy.total_cmp(&b.busy);
                first(a).cmp(&first(b)).then(busy).then(a.name.cmp(&b.name))
            }),
        }
        order
    }

    /// Drains `selected` and no others; gives up on timeout.
    fn drain(&mut self, now: Nanos, selected: &[&ReplicaState], decision: &mut ScalingDecision) {
        let joined = selected.iter().filter(|member| member.joined);
        let names: BTreeSet<&str> = joined.map(|member| member.name.as_str()).collect();
        self.draining.retain(|name, _| names.contains(name.as_str()));
        for name in names {
            self.draining.entry(name.to_string()).or_insert(now);
        }
        let full = |name: &String| selected.iter().any(|m| m.name == *name && !m.empty);
        let late = self
            .draining
            .iter()
            .filter(|(name, since)| now - **since >= self.settings.drain_timeout && full(name));
        decision.stuck = late.map(|(name, _)| name.clone()).collect();
        if !decision.stuck.is_empty() {
            self.draining.clear();
            self.held_until = now + self.settings.window;
        }
    }
}

#[cfg(test)]
#[path = "scaler_tests.rs"]
mod tests;
