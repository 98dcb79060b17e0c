//! The scheduler process: takes part in the election and, while it leads, writes the core's
//! decisions to the store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use base::{Clock, Nanos};
use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::canary_judge::{CanaryChange, CanaryDecision, CanaryJudge, CanaryStep};
use super::maintenance::{Maintenance, MaintenanceSettings};
use super::service::SchedulerState;
use super::{Core, Decision, SchedulerSettings};
use crate::election::{Candidate, Leader};
use crate::record::canary::CanaryOutcome;
use crate::record::{Keys, ModelRecord, PlanRecord, RecordKind, decode, encode};
use crate::retention::Retention;
use crate::scaling::driver::{Driver, Scaling, ScalingReport};
use crate::scaling::replica_estimate::ScalingInput;
use crate::snapshot::ClusterSnapshot;
use crate::store::mirror::{self, KeyValues};
use crate::store::{Condition, Store, StoreError, Write};

/// Maximum time between two steps of the core.
const PLAN_INTERVAL: Duration = Duration::from_millis(500);
/// Changes within this time are handled together.
const COALESCE: Duration = Duration::from_millis(20);
/// Pause before the store is tried again.
const RETRY: Duration = Duration::from_millis(200);
/// A leader that publishes no plan for so many plan epochs, and at least so long, is replaced.
const STALE_EPOCHS: u32 = 4;
const STALE_MIN: Duration = Duration::from_secs(60);

/// A scheduler, leading or waiting to lead.
pub struct SchedulerAgent {
    /// Where the cluster's state is.
    pub store: Arc<dyn Store>,
    /// The keys of the cluster.
    pub keys: Keys,
    /// This scheduler's name.
    pub name: String,
    /// Span of its lease: after this time without renewal another scheduler leads.
    pub lease: Duration,
    /// Settings of its plans.
    pub settings: SchedulerSettings,
    /// What it scales while it leads.
    pub scaling: Option<Scaling>,
    /// How it keeps the store from filling up while it leads.
    pub maintenance: MaintenanceSettings,
    /// What it is doing.
    pub state: Arc<SchedulerState>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
}

/// The scaling driver of the current term of leadership.
struct ScalingTask {
    scaling_input: watch::Sender<Option<Arc<ScalingInput>>>,
    report: watch::Receiver<ScalingReport>,
    /// Aborted when this is dropped.
    _task: JoinSet<()>,
}

impl ScalingTask {
    /// Waits for a new report.
    async fn changed(task: Option<&mut ScalingTask>) {
        let Some(task) = task else { return std::future::pending().await };
        if task.report.changed().await.is_err() {
            // Only a bug ends the driver; planning continues without it.
            std::future::pending().await
        }
    }
}

/// Returns when `stop` is true or its sender is dropped.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

impl SchedulerAgent {
    /// Leads whenever it can, until `stop` is true. Only a store that refuses a call ends it with
    /// an error.
    pub async fn run(self, mut stop: watch::Receiver<bool>) -> Result<(), StoreError> {
        let stale = (Duration::from(self.settings.epoch) * STALE_EPOCHS).max(STALE_MIN);
        let candidate =
            Candidate::new(self.store.clone(), &self.keys.leader(), &self.name, self.lease)
                .expect_progress(&self.keys.plan(), stale);
        loop {
            let leader = tokio::select! {
                () = stopped(&mut stop) => return Ok(()),
                leader = candidate.campaign() => leader?,
            };
            tracing::info!(name = self.name, "leadership acquired");
            self.state.lead(self.clock.now());
            let result = self.lead(leader, &mut stop).await;
            self.state.leading.store(false, Relaxed);
            self.state.note_pools(None);
            match result {
                Ok(true) => return Ok(()),
                Ok(false) => tracing::warn!(name = self.name, "leadership lost"),
                Err(StoreError::Refused(why)) => return Err(StoreError::Refused(why)),
                Err(error) => {
                    tracing::warn!(name = self.name, %error, "leadership lost");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    /// Leads until it is stopped (`true`) or loses the leadership (`false`).
    async fn lead(
        &self,
        mut leader: Leader,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<bool, StoreError> {
        let mut mirror = mirror::follow(self.store.clone(), self.keys.all()).await?;
        let first = ClusterSnapshot::read(&mirror.borrow_and_update());
        let mut core = Core::resume(self.settings.clone(), self.clock.now(), &first);
        let mut judge = CanaryJudge::default();
        let mut published = PublishedPlan { epoch: core.plan.epoch, at: None };
        let mut retention = Retention::default();
        let mut task = self.scaling.clone().map(|scaling| self.start_scaling(scaling, &first));
        let space = self.state.space.clone();
        let maintenance = Maintenance::new(self.store.clone(), &self.keys, self.maintenance, space);
        // Ends with the leadership.
        let mut beside = JoinSet::new();
        beside.spawn(maintenance.run());
        loop {
            let entries: KeyValues = mirror.borrow_and_update().clone();
            let retained = retention.merge(self.clock.now(), &models_only(&entries));
            let report = task.as_mut().map(|task| task.report.borrow_and_update().clone());
            if let Some(report) = &report {
                core.drain(report.draining.clone(), report.may_empty);
                self.state.note_pools(report.record.as_ref());
            }
            // Plans of large clusters take long; leases and watches continue meanwhile.
            let (clock, scales) = (self.clock.clone(), task.is_some());
            let plan = move || plan(core, judge, entries, &retained, &*clock, scales);
            let planned = match tokio::task::spawn_blocking(plan).await {
                Ok(planned) => planned,
                Err(error) => {
                    tracing::error!(%error, "planning failed");
                    return Ok(false);
                }
            };
            (core, judge) = (planned.core, planned.judge);
            if let (Some(task), Some(scaling_input)) = (&task, planned.scaling_input) {
                task.scaling_input.send_replace(Some(Arc::new(scaling_input)));
            }
            if let Some(decision) = planned.decision {
                let now = self.clock.now();
                let mut writes = self.writes(&planned.entries, &decision, &planned.canaries);
                if published.is_due(now, &planned.entries, &decision.plan) {
                    writes.push(Write::put(self.keys.plan(), encode(&decision.plan)));
                }
                self.write_scaling(&planned.entries, report, &mut writes);
                match leader.write(writes).await {
                    Ok(true) => {
                        published.log(now, &decision.plan);
                        self.state.written(now, &decision.plan);
                        self.decide(&leader, &planned.canaries.decisions).await?;
                    }
                    Ok(false) => return Ok(false),
                    // The next step writes the plan again.
                    Err(error @ (StoreError::Unreachable(_) | StoreError::Full(_))) => {
                        tracing::debug!(%error, "cannot publish the plan");
                    }
                    Err(error) => return Err(error),
                }
            }
            tokio::select! {
                () = stopped(stop) => {
                    leader.resign().await;
                    return Ok(true);
                }
                () = leader.lost() => return Ok(false),
                changed = mirror.changed() => {
                    if changed.is_err() {
                        return Ok(false);
                    }
                    tokio::time::sleep(COALESCE).await;
                }
                () = ScalingTask::changed(task.as_mut()) => {}
                () = tokio::time::sleep(PLAN_INTERVAL) => {}
            }
        }
    }

    /// Carries out decisions on canaries. One that the store does not take now is made again.
    async fn decide(
        &self,
        leader: &Leader,
        decisions: &[CanaryDecision],
    ) -> Result<(), StoreError> {
        for decision in decisions {
            let key = self.keys.one(RecordKind::Model, &decision.model);
            let decided = async {
                let Some(entry) = self.store.get(&key).await? else { return Ok(false) };
                let record: Option<ModelRecord> = decode(&key, &entry.value);
                let Some(after) = record.and_then(|record| decision.apply(&record)) else {
                    return Ok(false);
                };
                let condition = Condition { key: key.clone(), revision: entry.revision };
                leader.write_if(condition, Write::put(key.clone(), encode(&after))).await
            };
            match decided.await {
                Ok(true) => self.log_decision(decision),
                // An operator or frontend has changed the record, or another scheduler leads.
                Ok(false) => {}
                Err(error @ (StoreError::Unreachable(_) | StoreError::Full(_))) => {
                    tracing::debug!(key, %error, "cannot decide on the canary");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn log_decision(&self, decision: &CanaryDecision) {
        let (model, version) = (&decision.model, decision.canary.version);
        let reason = &decision.reason;
        match decision.change {
            CanaryChange::Promote => {
                self.state.count_canary(CanaryOutcome::Promoted);
                tracing::info!(model, version, reason, "canary promoted");
            }
            CanaryChange::RollBack => {
                self.state.count_canary(CanaryOutcome::RolledBack);
                tracing::warn!(model, version, reason, "canary rolled back");
            }
            CanaryChange::Settle => tracing::info!(model, version, "canary replaced the version"),
        }
    }

    fn start_scaling(&self, scaling: Scaling, snapshot: &ClusterSnapshot) -> ScalingTask {
        let (scaling_input, inputs) = watch::channel(None);
        let (reports, report) = watch::channel(ScalingReport::default());
        let driver = Driver::new(scaling, self.clock.clone(), snapshot.scaling.clone());
        let mut task = JoinSet::new();
        task.spawn(driver.run(inputs, reports));
        ScalingTask { scaling_input, report, _task: task }
    }

    /// Writes the scaling record; removes one of an earlier leader where this one does not scale.
    fn write_scaling(
        &self,
        entries: &KeyValues,
        report: Option<ScalingReport>,
        writes: &mut Vec<Write>,
    ) {
        let record = report.map(|report| report.record);
        match record {
            Some(Some(record)) => {
                let value = encode(&record);
                if entries.get("scaling") != Some(&value) {
                    writes.push(Write::put(self.keys.scaling(), value));
                }
            }
            // The driver has not reported yet.
            Some(None) => {}
            None if entries.contains_key("scaling") => {
                writes.push(Write::delete(self.keys.scaling()));
            }
            None => {}
        }
    }

    /// The writes that bring the store to the decision. Routes come last: the backends they name
    /// have their assignments by then.
    fn writes(
        &self,
        entries: &KeyValues,
        decision: &Decision,
        canaries: &CanaryStep,
    ) -> Vec<Write> {
        let mut writes = Vec::new();
        let desired = canaries.progress.iter().map(|(name, p)| (name, encode(p))).collect();
        self.differences(entries, RecordKind::Canary, desired, &mut writes);
        let desired = decision.assignments.iter().map(|(name, a)| (name, encode(a))).collect();
        self.differences(entries, RecordKind::Assignment, desired, &mut writes);
        let desired = decision.splits.iter().map(|(name, s)| (name, encode(s))).collect();
        self.differences(entries, RecordKind::Split, desired, &mut writes);
        let desired = decision.routes.iter().map(|(name, r)| (name, encode(r))).collect();
        self.differences(entries, RecordKind::Route, desired, &mut writes);
        writes
    }

    fn differences(
        &self,
        entries: &KeyValues,
        kind: RecordKind,
        desired: BTreeMap<&String, Bytes>,
        writes: &mut Vec<Write>,
    ) {
        let prefix = kind.folder_prefix();
        let there = entries.range(prefix.to_string()..);
        let there = there.map_while(|(key, _)| key.strip_prefix(prefix));
        for name in there.filter(|name| !desired.contains_key(&name.to_string())) {
            writes.push(Write::delete(self.keys.one(kind, name)));
        }
        for (name, value) in desired {
            let there = entries.get(&format!("{prefix}{name}"));
            if there.is_none_or(|there| !is_same_but_epoch(there, &value)) {
                writes.push(Write::put(self.keys.one(kind, name), value));
            }
        }
    }
}

/// Whether two records differ in no more than the plan epoch that decided them: a new plan that
/// keeps an assignment does not write it again.
fn is_same_but_epoch(a: &[u8], b: &[u8]) -> bool {
    // Records with an epoch begin with it.
    let split = |value: &'_ [u8]| -> Option<usize> {
        let number = value.strip_prefix(b"{\"epoch\":")?;
        let digits = number.iter().take_while(|byte| byte.is_ascii_digit()).count();
        (1..=20).contains(&digits).then_some(value.len() - number.len() + digits)
    };
    a == b || matches!((split(a), split(b)), (Some(i), Some(j)) if a[i..] == b[j..])
}

/// The last plan that was written to the store.
struct PublishedPlan {
    epoch: u64,
    at: Option<Nanos>,
}

/// Shortest time between two writes of a summary in which only the capacity has changed.
const SUMMARY_INTERVAL: Nanos = Nanos::from_millis(10_000);

impl PublishedPlan {
    /// Whether the summary has to be written.
    fn is_due(&self, now: Nanos, entries: &KeyValues, plan: &PlanRecord) -> bool {
        let there: Option<PlanRecord> = entries.get("plan").and_then(|v| decode("plan", v));
        let Some(there) = there else { return true };
        let scaled = PlanRecord { scale: plan.scale, ..there.clone() };
        let is_old = self.at.is_none_or(|at| now - at >= SUMMARY_INTERVAL);
        there != *plan && (is_old || scaled != *plan)
    }

    /// Notes that a plan was written, and logs each once.
    fn log(&mut self, now: Nanos, plan: &PlanRecord) {
        self.at = Some(now);
        if plan.epoch != self.epoch {
            self.epoch = plan.epoch;
            tracing::info!(
                epoch = plan.epoch,
                reason = plan.reason,
                backends = plan.backends,
                used = plan.used,
                "plan published"
            );
        }
    }
}

/// Result of one step.
struct Planned {
    core: Core,
    judge: CanaryJudge,
    canaries: CanaryStep,
    entries: KeyValues,
    decision: Option<Decision>,
    /// For scaling; `None` while it is unclear which backends are present.
    scaling_input: Option<ScalingInput>,
}

/// The records that a plan is for, which are kept for a while when they are lost, and the backends
/// that write them again.
fn models_only(entries: &KeyValues) -> KeyValues {
    let kinds = [RecordKind::Model, RecordKind::Query, RecordKind::Backend];
    let kinds = kinds.map(RecordKind::folder_prefix);
    let mine = |key: &str| kinds.iter().any(|prefix| key.starts_with(prefix));
    let mine = entries.iter().filter(|(key, _)| mine(key));
    Arc::new(mine.map(|(key, value)| (key.clone(), value.clone())).collect())
}

fn plan(
    mut core: Core,
    mut judge: CanaryJudge,
    entries: KeyValues,
    retained: &KeyValues,
    clock: &dyn Clock,
    scales: bool,
) -> Planned {
    let now = clock.now();
    let mut snapshot = ClusterSnapshot::read(&entries);
    let kept = ClusterSnapshot::read_routes(retained);
    (snapshot.models, snapshot.queries) = (kept.models, kept.queries);
    let canaries = judge.step(now, &snapshot);
    let epoch = core.plan.epoch;
    let decision = core.step(now, &snapshot).map(|mut decision| {
        if decision.plan.epoch != epoch {
            core.plan.plan_ms = (clock.now() - now).0 as f64 / 1e6;
            decision.plan.plan_ms = core.plan.plan_ms;
        }
        decision
    });
    let scaling_input = (scales && decision.is_some()).then(|| core.scaling_input(&snapshot));
    Planned { core, judge, canaries, entries, decision, scaling_input }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Assignment, RouteRecord};

    #[test]
    fn a_new_epoch_alone_is_not_written() {
        let route = |epoch, rate_max| encode(&RouteRecord { epoch, rate_max, targets: Vec::new() });
        assert!(is_same_but_epoch(&route(1, None), &route(1, None)));
        assert!(is_same_but_epoch(&route(9, Some(2.5)), &route(10, Some(2.5))));
        assert!(!is_same_but_epoch(&route(9, Some(2.5)), &route(9, Some(3.5))));
        let assignment = |epoch| encode(&Assignment { epoch, ..Assignment::default() });
        assert!(is_same_but_epoch(&assignment(1), &assignment(12345)));
        for damaged in [&b"{\"epoch\":,"[..], b"", b"{\"epoch\":1", b"garbage"] {
            assert!(!is_same_but_epoch(damaged, &assignment(1)));
        }
    }

    #[test]
    fn the_summary_is_written_seldom_while_only_the_load_changes() {
        let plan = |epoch, scale| PlanRecord { epoch, scale, ..PlanRecord::default() };
        let entries = |plan: &PlanRecord| -> KeyValues {
            Arc::new([("plan".to_string(), encode(plan))].into())
        };
        let published = PublishedPlan { epoch: 1, at: Some(Nanos::from_millis(1000)) };
        let is_due = |ms, there: &PlanRecord, plan: &PlanRecord| {
            published.is_due(Nanos::from_millis(ms), &entries(there), plan)
        };
        assert!(!is_due(1500, &plan(1, 2.0), &plan(1, 2.5)));
        assert!(is_due(11_000, &plan(1, 2.0), &plan(1, 2.5)));
        assert!(is_due(1500, &plan(1, 2.0), &plan(2, 2.0)));
        assert!(!is_due(11_000, &plan(1, 2.0), &plan(1, 2.0)));
        let damaged: KeyValues = Arc::new([("plan".to_string(), "x".into())].into());
        assert!(published.is_due(Nanos::ZERO, &damaged, &plan(1, 2.0)));
    }
}
