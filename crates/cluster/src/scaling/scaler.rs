//! Replicas over time: up as soon as the load asks for it, down when it has not for a while and the backends that go hold
//! nothing any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use base::Nanos;

/// How replicas follow the load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalingSettings {
    /// Fewer are never asked for.
    pub replicas_least: u32,
    /// More are never asked for.
    pub replicas_most: u32,
    /// Replicas that one change adds at most.
    pub step_up: u32,
    /// Replicas that one change takes away at most.
    pub step_down: u32,
    /// Replicas go only when the load has not asked for them for so long.
    pub window: Nanos,
    /// Least time between two changes.
    pub cooldown: Nanos,
    /// A backend that is not empty after so long stays, and is tried again a window later.
    pub drain_most: Nanos,
}

impl Default for ScalingSettings {
    fn default() -> Self {
        ScalingSettings {
            replicas_least: 1,
            replicas_most: 10,
            step_up: 4,
            step_down: 1,
            window: Nanos::from_millis(300_000),
            cooldown: Nanos::from_millis(30_000),
            drain_most: Nanos::from_millis(300_000),
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
pub struct Member {
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
pub struct Situation<'a> {
    /// Replicas asked for now.
    pub replicas: u32,
    /// Replicas that the load takes; `None` while nobody reports any.
    pub need: Option<u32>,
    /// Which replicas go first.
    pub removal: Removal,
    /// Those that are there.
    pub members: &'a [Member],
}

/// What is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Replicas that the load asks for, within the bounds.
    pub wanted: u32,
    /// Replicas to ask for now, where that is a change.
    pub replicas: Option<u32>,
    /// With it: the replicas that are to go.
    pub leaving: BTreeSet<String>,
    /// Backends that the plan is to do without.
    pub draining: BTreeSet<String>,
    /// Backends that were to be emptied and are not, after all the time they had.
    pub stuck: Vec<String>,
}

/// Decides.
#[derive(Clone, Debug)]
pub struct Scaler {
    settings: ScalingSettings,
    began_at: Nanos,
    /// What was wanted when, over the window; later ones are smaller.
    wanted: VecDeque<(Nanos, u32)>,
    changed_at: Option<Nanos>,
    /// Backends being emptied, since when.
    draining: BTreeMap<String, Nanos>,
    /// Those that were told to go, since when.
    leaving: BTreeMap<String, Nanos>,
    /// Nothing goes before.
    held_until: Nanos,
}

impl Scaler {
    /// A scaler that has seen nothing yet: it takes nothing away for a window.
    pub fn new(settings: ScalingSettings, now: Nanos) -> Scaler {
        Scaler {
            settings,
            began_at: now,
            wanted: VecDeque::new(),
            changed_at: None,
            draining: BTreeMap::new(),
            leaving: BTreeMap::new(),
            held_until: now,
        }
    }

    /// What to do now. [`Scaler::written`] says when it was done.
    pub fn step(&mut self, now: Nanos, situation: &Situation<'_>) -> Orders {
        let bounds = self.settings.replicas_least..=self.settings.replicas_most;
        // Without a word about load all stay.
        let need = situation.need.unwrap_or(situation.replicas);
        let wanted = need.clamp(*bounds.start(), *bounds.end());
        let floor = self.floor(now, wanted, situation.replicas);
        self.forget(now, situation.members);
        let mut orders = Orders { wanted, ..Orders::default() };
        if wanted > situation.replicas {
            self.draining.clear();
            if situation.removal == Removal::Ordinal {
                // Those that come next have these names.
                self.leaving.clear();
            }
            let most = situation.replicas.saturating_add(self.settings.step_up);
            orders.replicas = self.is_rested(now).then(|| wanted.min(most));
        } else {
            self.shrink(now, floor, situation, &mut orders);
        }
        let ending = situation.members.iter().filter(|member| member.ending);
        orders.draining = ending.map(|member| member.name.clone()).collect();
        orders.draining.extend(self.draining.keys().chain(self.leaving.keys()).cloned());
        orders
    }

    /// The change that [`Scaler::step`] ordered was made.
    pub fn written(&mut self, now: Nanos, orders: &Orders) {
        self.changed_at = Some(now);
        for name in &orders.leaving {
            self.draining.remove(name);
            self.leaving.insert(name.clone(), now);
        }
    }

    /// Stops emptying backends, for a window at least, and returns those that were told to go already: what is done while
    /// nobody can be told.
    pub fn release(&mut self, now: Nanos) -> BTreeSet<String> {
        self.draining.clear();
        self.held_until = now + self.settings.window;
        self.leaving.keys().cloned().collect()
    }

    fn is_rested(&self, now: Nanos) -> bool {
        self.changed_at.is_none_or(|at| now - at >= self.settings.cooldown)
    }

    /// The most that was wanted within the window; no less than what is there until a whole window was seen.
    fn floor(&mut self, now: Nanos, wanted: u32, replicas: u32) -> u32 {
        while self.wanted.back().is_some_and(|(_, before)| *before <= wanted) {
            self.wanted.pop_back();
        }
        self.wanted.push_back((now, wanted));
        while self.wanted.front().is_some_and(|(at, _)| now - *at >= self.settings.window) {
            self.wanted.pop_front();
        }
        let most = self.wanted.front().map_or(wanted, |(_, most)| *most).max(wanted);
        let seen = now - self.began_at >= self.settings.window && now >= self.held_until;
        if seen { most } else { most.max(replicas) }
    }

    /// Names that are gone are no longer kept; nor are those that others went instead of.
    fn forget(&mut self, now: Nanos, members: &[Member]) {
        let there = |name: &String| members.iter().any(|member| member.name == *name);
        self.draining.retain(|name, _| there(name));
        let limit = self.settings.drain_most;
        self.leaving.retain(|name, since| there(name) && now - *since < limit);
    }

    fn shrink(&mut self, now: Nanos, floor: u32, situation: &Situation<'_>, orders: &mut Orders) {
        let surplus = situation.replicas.saturating_sub(floor).min(self.settings.step_down);
        let left = |member: &Member| match situation.removal {
            Removal::Marked => self.leaving.contains_key(&member.name),
            // Ordinals are used again: a name that went may be somebody else's by now.
            Removal::Ordinal => false,
        };
        let members = situation.members.iter();
        let staying: Vec<&Member> =
            members.filter(|member| !member.ending && !left(member)).collect();
        // While more are there than were asked for, it is not known who goes.
        let caught_up = staying.len() <= situation.replicas as usize;
        if surplus == 0 || !caught_up {
            self.draining.clear();
            return;
        }
        let candidates = self.candidates(&staying, situation.removal);
        let chosen = &candidates[..candidates.len().min(surplus as usize)];
        self.drain(now, chosen, orders);
        let may_go = |member: &&&Member| !member.joined || member.empty;
        let going: Vec<&Member> = match situation.removal {
            Removal::Ordinal => chosen.iter().take_while(may_go).copied().collect(),
            // One that serves and is not ready would go before any that is marked.
            Removal::Marked if staying.iter().any(|member| member.joined && !member.ready) => {
                Vec::new()
            }
            Removal::Marked => chosen.iter().filter(may_go).copied().collect(),
        };
        if !going.is_empty() && orders.stuck.is_empty() && self.is_rested(now) {
            let count = u32::try_from(going.len()).unwrap_or(surplus);
            orders.replicas = Some(situation.replicas - count);
            orders.leaving = going.iter().map(|member| member.name.clone()).collect();
        }
    }

    /// Members in the order in which they are to go.
    fn candidates<'a>(&self, staying: &[&'a Member], removal: Removal) -> Vec<&'a Member> {
        let mut order = staying.to_vec();
        match removal {
            Removal::Ordinal => order.sort_by_key(|member| std::cmp::Reverse(member.ordinal)),
            Removal::Marked => order.sort_by(|a, b| {
                let first = |member: &Member| {
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
    fn drain(&mut self, now: Nanos, chosen: &[&Member], orders: &mut Orders) {
        let joined = chosen.iter().filter(|member| member.joined);
        let names: BTreeSet<&str> = joined.map(|member| member.name.as_str()).collect();
        self.draining.retain(|name, _| names.contains(name.as_str()));
        for name in names {
            self.draining.entry(name.to_string()).or_insert(now);
        }
        let full = |name: &String| chosen.iter().any(|m| m.name == *name && !m.empty);
        let late = self
            .draining
            .iter()
            .filter(|(name, since)| now - **since >= self.settings.drain_most && full(name));
        orders.stuck = late.map(|(name, _)| name.clone()).collect();
        if !orders.stuck.is_empty() {
            self.draining.clear();
            self.held_until = now + self.settings.window;
        }
    }
}

#[cfg(test)]
#[path = "scaler_tests.rs"]
mod tests;
