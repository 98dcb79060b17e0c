//! Replicas over time: up as soon as the load asks for it, down when it has not for a while and the backends that go hold
//! nothing any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::Nanos;

/// How replicas follow the load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalingSettings {
    /// Fewer are never asked for.
    pub replicas_min: u32,
    /// More are never asked for.
    pub replicas_max: u32,
    /// Replicas that one change adds at most.
    pub step_up: u32,
    /// Replicas that one change takes away at most.
    pub step_down: u32,
    /// Replicas go only when the load has not asked for them for so long.
    pub window: Nanos,
    /// Least time between two changes.
    pub cooldown: Nanos,
    /// A backend that is not empty after so long stays, and is tried again a window later.
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

/// Which replicas go when there are to be fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Those marked as cheap to remove, after those that are not ready (a Deployment).
    Marked,
    /// Those with the highest ordinals (a StatefulSet).
    Ordinal,
}

/// One replica.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplicaState {
    /// Its name, which is its backend's name too.
    pub name: String,
    /// Its number, where replicas have one.
    pub ordinal: u64,
    /// Whether it is a backend of the cluster now.
    pub joined: bool,
    /// Whether whoever runs it thinks it ready.
    pub ready: bool,
    /// Whether it is on its way out already.
    pub ending: bool,
    /// Whether it holds no model and is to hold none.
    pub empty: bool,
    /// Share of its time that the plan uses.
    pub busy: f64,
}

/// What is the case.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalerInput<'a> {
    /// Replicas asked for now.
    pub replicas: u32,
    /// Replicas that the load takes; `None` while nobody reports any.
    pub need: Option<u32>,
    /// Which replicas go first.
    pub removal: Removal,
    /// Those that are there.
    pub replicas_present: &'a [ReplicaState],
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScalingDecision {
    /// Replicas that the load asks for, within the bounds.
    pub wanted: u32,
    /// Replicas to ask for now, where that is a change.
    pub replicas: Option<u32>,
    /// With it: the replicas that are to go.
    pub removing: BTreeSet<String>,
    /// Backends that the plan is to do without.
    pub draining: BTreeSet<String>,
    /// Backends that were to be emptied and are not, after all the time they had.
    pub stuck: Vec<String>,
}

/// Decides.
#[derive(Clone, Debug)]
pub struct Scaler {
    settings: ScalingSettings,
    started_at: Nanos,
    /// What was wanted when, over the window; later ones are smaller.
    desired: VecDeque<(Nanos, u32)>,
    changed_at: Option<Nanos>,
    /// Backends being emptied, since when.
    draining: BTreeMap<String, Nanos>,
    /// Those that were told to go, since when.
    removing: BTreeMap<String, Nanos>,
    /// Nothing goes before.
    held_until: Nanos,
}

impl Scaler {
    /// A scaler that has seen nothing yet: it takes nothing away for a window.
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

    /// What to do now. [`Scaler::applied`] says when it was done.
    pub fn step(&mut self, now: Nanos, input: &ScalerInput<'_>) -> ScalingDecision {
        let bounds = self.settings.replicas_min..=self.settings.replicas_max;
        // Without a word about load all stay.
        let need = input.need.unwrap_or(input.replicas);
        let desired = need.clamp(*bounds.start(), *bounds.end());
        let floor = self.floor(now, desired, input.replicas);
        self.forget(now, input.replicas_present);
        let mut decision = ScalingDecision { wanted: desired, ..ScalingDecision::default() };
        if desired > input.replicas {
            self.draining.clear();
            if input.removal == Removal::Ordinal {
                // Those that come next have these names.
                self.removing.clear();
            }
            let most = input.replicas.saturating_add(self.settings.step_up);
            decision.replicas = self.cooldown_passed(now).then(|| desired.min(most));
        } else {
            self.scale_down(now, floor, input, &mut decision);
        }
        let ending = input.replicas_present.iter().filter(|member| member.ending);
        decision.draining = ending.map(|member| member.name.clone()).collect();
        decision.draining.extend(self.draining.keys().chain(self.removing.keys()).cloned());
        decision
    }

    /// The change that [`Scaler::step`] ordered was made.
    pub fn applied(&mut self, now: Nanos, decision: &ScalingDecision) {
        self.changed_at = Some(now);
        for name in &decision.removing {
            self.draining.remove(name);
            self.removing.insert(name.clone(), now);
        }
    }

    /// Stops emptying backends, for a window at least, and returns those that were told to go already: what is done while
    /// nobody can be told.
    pub fn stop_draining(&mut self, now: Nanos) -> BTreeSet<String> {
        self.draining.clear();
        self.held_until = now + self.settings.window;
        self.removing.keys().cloned().collect()
    }

    fn cooldown_passed(&self, now: Nanos) -> bool {
        self.changed_at.is_none_or(|at| now - at >= self.settings.cooldown)
    }

    /// The most that was wanted within the window; no less than what is there until a whole window was seen.
    fn floor(&mut self, now: Nanos, desired: u32, replicas: u32) -> u32 {
        while self.desired.back().is_some_and(|(_, before)| *before <= desired) {
            self.desired.pop_back();
        }
        self.desired.push_back((now, desired));
        while self.desired.front().is_some_and(|(at, _)| now - *at >= self.settings.window) {
            self.desired.pop_front();
        }
        let most = self.desired.front().map_or(desired, |(_, most)| *most).max(desired);
        let seen = now - self.started_at >= self.settings.window && now >= self.held_until;
        if seen { most } else { most.max(replicas) }
    }

    /// Names that are gone are no longer kept; nor are those that others went instead of.
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
            // Ordinals are used again: a name that went may be somebody else's by now.
            Removal::Ordinal => false,
        };
        let replicas_present = input.replicas_present.iter();
        let remaining: Vec<&ReplicaState> =
            replicas_present.filter(|member| !member.ending && !is_removed(member)).collect();
        // While more are there than were asked for, it is not known who goes.
        let caught_up = remaining.len() <= input.replicas as usize;
        if surplus == 0 || !caught_up {
            self.draining.clear();
            return;
        }
        let candidates = self.candidates(&remaining, input.removal);
        let selected = &candidates[..candidates.len().min(surplus as usize)];
        self.drain(now, selected, decision);
        let removable = |member: &&&ReplicaState| !member.joined || member.empty;
        let removed: Vec<&ReplicaState> = match input.removal {
            Removal::Ordinal => selected.iter().take_while(removable).copied().collect(),
            // One that serves and is not ready would go before any that is marked.
            Removal::Marked if remaining.iter().any(|member| member.joined && !member.ready) => {
                Vec::new()
            }
            Removal::Marked => selected.iter().filter(removable).copied().collect(),
        };
        if !removed.is_empty() && decision.stuck.is_empty() && self.cooldown_passed(now) {
            let count = u32::try_from(removed.len()).unwrap_or(surplus);
            decision.replicas = Some(input.replicas - count);
            decision.removing = removed.iter().map(|member| member.name.clone()).collect();
        }
    }

    /// Members in the order in which they are to go.
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

    /// Keeps `chosen` and nobody else being emptied; gives up where that takes too long.
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
