//! Watches the canaries of all models and decides on them. Pure, with time as a parameter.
//!
//! What frontends count, and for how long a canary was served, is in the store, so that the next
//! leader goes on where this one stopped. A decision is a change of the model's record that is made
//! only while the record has the canary that was judged: two leaders cannot both decide.

use std::collections::BTreeMap;

use base::Nanos;

use super::canary_rule::{Judgement, judge};
use crate::record::ModelRecord;
use crate::record::canary::{
    CanaryLoad, CanaryOutcome, CanaryProgress, CanaryRecord, VersionCounts, served_name,
};
use crate::snapshot::ClusterSnapshot;

/// The most that one step adds to the time of a canary: a leader that stood still has seen nothing.
const STEP_MAX: Nanos = Nanos::from_millis(5000);
/// How long a canary may be without a backend while its model has some.
const ABSENT_MAX: Nanos = Nanos::from_millis(180_000);
/// Shortest time between two writes of a canary's progress, at first and later, unless something is
/// decided: a twentieth of the time that it is served.
const WRITE_INTERVAL_MS: u64 = 10_000;
const WRITE_INTERVAL_MAX_MS: u64 = 60_000;
const WRITE_SHARE: u64 = 20;
/// Canaries that are written so often; more of them are written less often each.
const WRITTEN_AT_ONCE: u64 = 4;

/// What is to happen with a canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CanaryChange {
    /// It is put in force.
    Promote,
    /// The version in force gets all requests again.
    RollBack,
    /// It was promoted, and every backend serves it under the model's own name.
    Settle,
}

/// A decision on one canary.
#[derive(Clone, Debug, PartialEq)]
pub struct CanaryDecision {
    /// The model.
    pub model: String,
    /// The canary that it is about.
    pub canary: CanaryRecord,
    /// What is to happen.
    pub change: CanaryChange,
    /// Why.
    pub reason: String,
}

impl CanaryDecision {
    /// The record after the decision; `None` where it has another canary by now, or other rules.
    pub fn apply(&self, record: &ModelRecord) -> Option<ModelRecord> {
        if record.canary.as_ref() != Some(&self.canary) {
            return None;
        }
        match self.change {
            CanaryChange::Promote => record.with_promoted_canary(&self.reason),
            CanaryChange::RollBack => {
                Some(record.without_canary(CanaryOutcome::RolledBack, &self.reason))
            }
            CanaryChange::Settle => {
                Some(record.without_canary(CanaryOutcome::Promoted, &self.reason))
            }
        }
    }
}

/// Result of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CanaryStep {
    /// Decisions, one for a canary at most.
    pub decisions: Vec<CanaryDecision>,
    /// What the store is to contain, by model.
    pub progress: BTreeMap<String, CanaryProgress>,
}

/// A canary that is watched.
#[derive(Clone, Debug)]
struct Watched {
    number: u64,
    elapsed: Nanos,
    absent: Nanos,
    at: Nanos,
    written: Option<CanaryProgress>,
}

/// Watches canaries for as long as this process leads.
#[derive(Clone, Debug, Default)]
pub struct CanaryJudge {
    watched: BTreeMap<String, Watched>,
}

impl CanaryJudge {
    /// What follows from `snapshot` at `now`.
    pub fn step(&mut self, now: Nanos, snapshot: &ClusterSnapshot) -> CanaryStep {
        let mut step = CanaryStep::default();
        let canaries: BTreeMap<&String, (&ModelRecord, &CanaryRecord)> = snapshot
            .models
            .iter()
            .filter_map(|(name, record)| Some((name, (record, record.canary.as_ref()?))))
            .collect();
        self.watched.retain(|name, watched| {
            canaries.get(name).is_some_and(|(_, canary)| canary.number == watched.number)
        });
        let count = canaries.len() as u64;
        for (name, (record, canary)) in canaries {
            let decided = match canary.promoted {
                true => is_settled(snapshot, name, record)
                    .then(|| (CanaryChange::Settle, "every backend serves it".to_string())),
                false => self.watch(now, snapshot, (name, count), canary, &mut step),
            };
            if let Some((change, reason)) = decided {
                let (model, canary) = (name.clone(), canary.clone());
                step.decisions.push(CanaryDecision { model, canary, change, reason });
            }
        }
        step
    }

    /// Looks at one canary, of `count`, that is not decided.
    fn watch(
        &mut self,
        now: Nanos,
        snapshot: &ClusterSnapshot,
        (name, count): (&str, u64),
        canary: &CanaryRecord,
        step: &mut CanaryStep,
    ) -> Option<(CanaryChange, String)> {
        let watched = self.watched.entry(name.to_string()).or_insert_with(|| {
            let known = snapshot.canaries.get(name).filter(|known| known.number == canary.number);
            Watched {
                number: canary.number,
                elapsed: Nanos::from_millis(known.map_or(0, |known| known.elapsed_ms)),
                absent: Nanos::ZERO,
                at: now,
                written: known.cloned(),
            }
        });
        let span = (now - watched.at).min(STEP_MAX);
        watched.at = now;
        let is_routed =
            |name: &str| snapshot.routes.get(name).is_some_and(|route| !route.targets.is_empty());
        match (is_routed(&served_name(name, canary.version)), is_routed(name)) {
            (true, _) => {
                watched.elapsed += span;
                watched.absent = Nanos::ZERO;
            }
            (false, true) => watched.absent += span,
            // Nothing is served: that says nothing about the canary.
            (false, false) => {}
        }
        let elapsed_ms = watched.elapsed.0 / 1_000_000;
        let (stable, counts) = sums(snapshot, name, canary.number);
        let judgement = if watched.absent >= ABSENT_MAX {
            let seconds = ABSENT_MAX.0 / 1_000_000_000;
            Judgement::Bad(format!("no backend has served it for {seconds} s"))
        } else if canary.share <= 0.0 {
            Judgement::Wait("without a share of the requests, an operator decides".to_string())
        } else {
            judge(canary, elapsed_ms, &stable, &counts)
        };
        let (decided, why) = match judgement {
            Judgement::Wait(why) => (None, why),
            Judgement::Good(why) => (Some((CanaryChange::Promote, why.clone())), why),
            Judgement::Bad(why) => (Some((CanaryChange::RollBack, why.clone())), why),
        };
        let number = canary.number;
        let fresh = CanaryProgress { number, elapsed_ms, stable, canary: counts, why };
        let is_due = |written: &CanaryProgress| {
            elapsed_ms.saturating_sub(written.elapsed_ms) >= write_interval_ms(elapsed_ms, count)
                || fresh.canary.requests >= 2 * written.canary.requests.max(1)
        };
        if watched.written.as_ref().is_none_or(is_due) {
            watched.written = Some(fresh);
        }
        if let Some(written) = &watched.written {
            step.progress.insert(name.to_string(), written.clone());
        }
        decided
    }
}

/// Time between two writes of the progress of one of `count` canaries.
fn write_interval_ms(elapsed_ms: u64, count: u64) -> u64 {
    let interval = (elapsed_ms / WRITE_SHARE).clamp(WRITE_INTERVAL_MS, WRITE_INTERVAL_MAX_MS);
    interval * count.div_ceil(WRITTEN_AT_ONCE).max(1)
}

/// What all frontends counted of both versions.
fn sums(snapshot: &ClusterSnapshot, model: &str, number: u64) -> (VersionCounts, VersionCounts) {
    let (mut stable, mut canary) = (VersionCounts::default(), VersionCounts::default());
    let loads = snapshot.loads.values().filter_map(|report| report.canaries.get(model));
    for CanaryLoad { stable: old, canary: new, .. } in loads.filter(|load| load.number == number) {
        stable.add(old);
        canary.add(new);
    }
    (stable, canary)
}

/// Whether all backends that get the model's requests have the version in force.
fn is_settled(snapshot: &ClusterSnapshot, model: &str, record: &ModelRecord) -> bool {
    if !record.enabled {
        return true;
    }
    let targets = snapshot.routes.get(model).map_or(&[][..], |route| &route.targets);
    !targets.is_empty() && targets.iter().all(|target| target.version == record.version)
}

#[cfg(test)]
mod tests {
    use api::CanaryOptions;
    use base::Random;

    use super::*;
    use crate::record::canary::with_canaries;
    use crate::record::{LoadReport, RouteRecord, TargetRecord, VersionRecord};

    fn at(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    fn record(promote_after_ms: Option<u64>) -> ModelRecord {
        let (digest, enabled) = ("old".to_string(), true);
        let record = ModelRecord { version: 1, digest, enabled, ..ModelRecord::default() };
        let digest = "new".to_string();
        let version = VersionRecord { version: 2, digest, bytes: 1, config: Default::default() };
        let options = CanaryOptions { promote_after_ms, ..CanaryOptions::with_share(10.0) };
        record.with_canary(version, &options)
    }

    fn route(version: u64) -> RouteRecord {
        let target = TargetRecord {
            backend: "b".to_string(),
            grpc: String::new(),
            http: String::new(),
            weight: 1.0,
            batch: 1,
            batch_ms: 1.0,
            cycle_ms: 1.0,
            min_batch: 0,
            version,
        };
        RouteRecord { targets: vec![target], ..RouteRecord::default() }
    }

    /// A cluster whose store is this snapshot, with frontends that serve requests.
    struct Simulation {
        snapshot: ClusterSnapshot,
        record: ModelRecord,
        random: Random,
    }

    impl Simulation {
        fn new(record: ModelRecord, seed: u64) -> Simulation {
            let random = Random::new(seed);
            let mut simulation = Simulation { snapshot: Default::default(), record, random };
            simulation.write();
            simulation
        }

        /// Brings models and routes in line with the record.
        fn write(&mut self) {
            let models = with_canaries([("m".to_string(), self.record.clone())].into());
            let routes = models.iter().map(|(name, record)| (name.clone(), route(record.version)));
            self.snapshot.routes = routes.collect();
            self.snapshot.models = models;
        }

        /// Requests at one of two frontends; the canary fails with `failing`.
        fn serve(&mut self, requests: u64, failing: f64) {
            let Some(canary) = self.record.running_canary().cloned() else { return };
            for _ in 0..requests {
                let frontend = format!("f{}", self.random.below(2));
                let report: &mut LoadReport = self.snapshot.loads.entry(frontend).or_default();
                let load = report.canaries.entry("m".to_string()).or_default();
                load.number = canary.number;
                let latency = Nanos::from_micros(4000 + self.random.below(2000));
                let drawn = self.random.unit_f64() < canary.share;
                let fails = self.random.unit_f64() < failing;
                match (drawn, fails) {
                    (true, true) => load.canary.fail(),
                    (true, false) => load.canary.reply(latency, false),
                    (false, _) => load.stable.reply(latency, false),
                }
            }
        }

        /// Stores what a leader decides; returns how many decisions had an effect.
        fn apply(&mut self, step: CanaryStep) -> usize {
            self.snapshot.canaries = step.progress;
            let mut effects = 0;
            for decision in step.decisions {
                if let Some(after) = decision.apply(&self.record) {
                    self.record = after;
                    effects += 1;
                }
            }
            self.write();
            effects
        }
    }

    /// Random leader changes, two leaders at once, lost progress: one decision, and the right one.
    #[test]
    fn a_canary_is_decided_once_by_all_leaders_together() {
        for seed in 0..60 {
            let is_good = seed % 2 == 0;
            let mut simulation = Simulation::new(record(Some(60_000)), seed);
            let mut random = Random::new(1000 + seed);
            let mut leaders = vec![CanaryJudge::default()];
            let (mut effects, mut decided_at) = (0, None);
            for step in 0..1000u64 {
                let now = at(500 * step);
                simulation.serve(30, if is_good { 0.0 } else { 0.3 });
                if random.below(60) == 0 {
                    leaders.push(CanaryJudge::default());
                }
                // The one before does not know yet that it leads no more.
                if leaders.len() > 1 && random.below(4) == 0 {
                    leaders.remove(0);
                }
                if random.below(50) == 0 {
                    simulation.snapshot.canaries.clear();
                }
                let snapshot = simulation.snapshot.clone();
                for leader in &mut leaders {
                    let decided = leader.step(now, &snapshot);
                    effects += simulation.apply(decided);
                }
                if simulation.record.canary.is_none() && decided_at.is_none() {
                    decided_at = Some(now);
                }
            }
            let ended = simulation.record.ended_canary.clone().expect("decided");
            let expected = match is_good {
                // It is promoted, and settled once.
                true => (CanaryOutcome::Promoted, 2, 2),
                false => (CanaryOutcome::RolledBack, 1, 1),
            };
            assert_eq!((ended.outcome, simulation.record.version, effects), expected, "{seed}");
            let took = decided_at.expect("decided");
            match is_good {
                true => assert!(took >= at(60_000), "promoted after {took:?}"),
                false => assert!(took <= at(10_000), "rolled back after {took:?}"),
            }
        }
    }

    #[test]
    fn the_next_leader_goes_on_with_the_time_of_the_one_before() {
        let mut simulation = Simulation::new(record(Some(60_000)), 1);
        let mut leader = CanaryJudge::default();
        simulation.serve(5000, 0.0);
        let mut now = 0;
        while now < 50_000 {
            let step = leader.step(at(now), &simulation.snapshot);
            assert_eq!(simulation.apply(step), 0);
            now += 500;
        }
        let mut next = CanaryJudge::default();
        // Its clock has another origin.
        let step = next.step(at(7_000_000), &simulation.snapshot);
        assert_eq!(simulation.apply(step), 0);
        let mut waited = 0;
        while simulation.record.running_canary().is_some() {
            waited += 500;
            let step = next.step(at(7_000_000 + waited), &simulation.snapshot);
            simulation.apply(step);
        }
        assert!((10_000..=21_000).contains(&waited), "{waited} ms");
        // A leader that stood still has seen nothing meanwhile.
        let mut simulation = Simulation::new(record(Some(60_000)), 1);
        simulation.serve(5000, 0.0);
        let mut leader = CanaryJudge::default();
        leader.step(at(0), &simulation.snapshot);
        let step = leader.step(at(600_000), &simulation.snapshot);
        assert!(step.decisions.is_empty(), "{step:?}");
    }

    #[test]
    fn a_canary_without_backends_ends_and_a_cluster_without_any_does_not_end_it() {
        let mut simulation = Simulation::new(record(None), 1);
        let mut leader = CanaryJudge::default();
        simulation.snapshot.routes.clear();
        let mut step = CanaryStep::default();
        for second in 0..600 {
            step = leader.step(at(1000 * second), &simulation.snapshot);
            assert!(step.decisions.is_empty(), "{step:?}");
        }
        assert_eq!(step.progress["m"].elapsed_ms, 0);
        simulation.snapshot.routes.insert("m".to_string(), route(1));
        let ended = (600..1000).find(|second| {
            let step = leader.step(at(1000 * second), &simulation.snapshot);
            simulation.apply(step);
            simulation.snapshot.routes.remove("m@2");
            simulation.record.canary.is_none()
        });
        assert!((770..=790).contains(&ended.expect("ended")), "{ended:?}");
        assert_eq!(simulation.record.version, 1);
    }

    #[test]
    fn a_promoted_canary_stays_until_every_backend_has_its_version() {
        let mut simulation = Simulation::new(record(None), 1);
        simulation.record = simulation.record.with_promoted_canary("by hand").unwrap();
        simulation.write();
        simulation.snapshot.routes.insert("m".to_string(), route(1));
        let mut leader = CanaryJudge::default();
        assert!(leader.step(at(0), &simulation.snapshot).decisions.is_empty());
        simulation.snapshot.routes.insert("m".to_string(), route(2));
        let step = leader.step(at(1), &simulation.snapshot);
        assert_eq!(step.decisions[0].change, CanaryChange::Settle);
        assert_eq!(simulation.apply(step), 1);
        assert_eq!((simulation.record.version, simulation.record.canary.clone()), (2, None));
    }

    #[test]
    fn a_decision_is_only_about_the_canary_that_was_judged() {
        let judged = record(None);
        let decision = CanaryDecision {
            model: "m".to_string(),
            canary: judged.canary.clone().unwrap(),
            change: CanaryChange::RollBack,
            reason: String::new(),
        };
        assert!(decision.apply(&judged).is_some());
        let mut wider = judged.clone();
        wider.canary.as_mut().unwrap().share = 0.5;
        assert_eq!(decision.apply(&wider), None, "an operator has changed it");
        let again =
            judged.with_canary(judged.canary_version().unwrap(), &CanaryOptions::with_share(1.0));
        assert_eq!(decision.apply(&again), None);
    }
}
