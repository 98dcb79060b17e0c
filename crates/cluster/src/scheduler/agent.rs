//! The scheduler as a process: stands for election, and while it leads, keeps the store as the core decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::Clock;
use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::{Core, Decision, SchedulerSettings};
use crate::election::{Candidate, Leader};
use crate::record::{Keys, Kind, encode};
use crate::scaling::driver::{Driver, Scaling, ScalingReport};
use crate::scaling::need::Outlook;
use crate::store::mirror::{self, Image};
use crate::store::{Store, StoreError, Write};
use crate::view::View;

/// The longest time between two looks.
const TICK: Duration = Duration::from_millis(500);
/// Changes that come together are looked at once.
const GATHER: Duration = Duration::from_millis(20);
/// Pause before the store is tried again.
const RETRY: Duration = Duration::from_millis(200);

/// A scheduler, leading or waiting to.
pub struct SchedulerAgent {
    /// Where the state lives.
    pub store: Arc<dyn Store>,
    /// Its keys.
    pub keys: Keys,
    /// This scheduler's name.
    pub name: String,
    /// How long it is missed before another one leads.
    pub lease: Duration,
    /// How it plans.
    pub settings: SchedulerSettings,
    /// What it scales while it leads.
    pub scaling: Option<Scaling>,
    /// Time.
    pub clock: Arc<dyn Clock>,
}

/// The driver of scaling while this scheduler leads, as the scheduler sees it.
struct ScalingLink {
    outlook: watch::Sender<Option<Arc<Outlook>>>,
    report: watch::Receiver<ScalingReport>,
    /// Ends with this.
    _task: JoinSet<()>,
}

impl ScalingLink {
    /// Waits for news.
    async fn changed(link: Option<&mut ScalingLink>) {
        let Some(link) = link else { return std::future::pending().await };
        if link.report.changed().await.is_err() {
            // The driver is gone, which only a fault of ours explains; plans go on.
            std::future::pending().await
        }
    }
}

/// Returns when `stop` turns true, or nobody is left to turn it.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

impl SchedulerAgent {
    /// Leads whenever it can, until `stop` turns true. Only a store that refuses ends it with an error.
    pub async fn run(self, mut stop: watch::Receiver<bool>) -> Result<(), StoreError> {
        let candidate =
            Candidate::new(self.store.clone(), &self.keys.leader(), &self.name, self.lease);
        loop {
            let leader = tokio::select! {
                () = stopped(&mut stop) => return Ok(()),
                leader = candidate.campaign() => leader?,
            };
            tracing::info!(name = self.name, "leading");
            match self.lead(leader, &mut stop).await {
                Ok(true) => return Ok(()),
                Ok(false) => tracing::warn!(name = self.name, "no longer leading"),
                Err(StoreError::Refused(why)) => return Err(StoreError::Refused(why)),
                Err(error) => {
                    tracing::warn!(%error, "gave the lead up");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    /// Leads until it is told to stop (`true`) or another one may (`false`).
    async fn lead(
        &self,
        mut leader: Leader,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<bool, StoreError> {
        let mut image = mirror::follow(self.store.clone(), self.keys.all()).await?;
        let first = View::read(&image.borrow_and_update());
        let mut core = Core::resume(self.settings.clone(), self.clock.now(), &first);
        let mut link = self.scaling.clone().map(|scaling| self.start_scaling(scaling, &first));
        loop {
            let seen: Image = image.borrow_and_update().clone();
            let report = link.as_mut().map(|link| link.report.borrow_and_update().clone());
            if let Some(report) = &report {
                core.drain(report.draining.clone());
            }
            // Plans of large clusters take long; leases and watches go on meanwhile.
            let (clock, scales) = (self.clock.clone(), link.is_some());
            let look = move || look(core, seen, &*clock, scales);
            let looked = match tokio::task::spawn_blocking(look).await {
                Ok(looked) => looked,
                Err(error) => {
                    tracing::error!(%error, "a plan failed");
                    return Ok(false);
                }
            };
            core = looked.core;
            if let (Some(link), Some(outlook)) = (&link, looked.outlook) {
                link.outlook.send_replace(Some(Arc::new(outlook)));
            }
            if let Some(decision) = looked.decision {
                let mut writes = self.writes(&looked.seen, &decision);
                self.write_scaling(&looked.seen, report, &mut writes);
                match leader.write(writes).await {
                    Ok(true) => {}
                    Ok(false) => return Ok(false),
                    // The plan stands where it stands; the store is tried again with the next look.
                    Err(StoreError::Unreachable(why)) => {
                        tracing::warn!(why, "cannot write the plan")
                    }
                    Err(error) => return Err(error),
                }
            }
            tokio::select! {
                () = stopped(stop) => {
                    leader.resign().await;
                    return Ok(true);
                }
                () = leader.deposed() => return Ok(false),
                changed = image.changed() => {
                    if changed.is_err() {
                        return Ok(false);
                    }
                    tokio::time::sleep(GATHER).await;
                }
                () = ScalingLink::changed(link.as_mut()) => {}
                () = tokio::time::sleep(TICK) => {}
            }
        }
    }

    fn start_scaling(&self, scaling: Scaling, view: &View) -> ScalingLink {
        let (outlook, seen) = watch::channel(None);
        let (told, report) = watch::channel(ScalingReport::default());
        let driver = Driver::new(scaling, self.clock.clone(), view.scaling.clone());
        let mut task = JoinSet::new();
        task.spawn(driver.run(seen, told));
        ScalingLink { outlook, report, _task: task }
    }

    /// What is known of scaling; nothing stays of a leader that did while this one does not.
    fn write_scaling(&self, seen: &Image, report: Option<ScalingReport>, writes: &mut Vec<Write>) {
        let record = report.map(|report| report.record);
        match record {
            Some(Some(record)) => {
                let value = encode(&record);
                if seen.get("scaling") != Some(&value) {
                    writes.push(Write::put(self.keys.scaling(), value));
                }
            }
            // It has not looked yet.
            Some(None) => {}
            None if seen.contains_key("scaling") => {
                writes.push(Write::delete(self.keys.scaling()));
            }
            None => {}
        }
    }

    /// What has to be written so that the store is as decided. Routes go last: whoever they name was told before.
    fn writes(&self, seen: &Image, decision: &Decision) -> Vec<Write> {
        let mut writes = Vec::new();
        let wanted = decision.assignments.iter().map(|(name, a)| (name, encode(a))).collect();
        self.differences(seen, Kind::Assignment, wanted, &mut writes);
        let wanted = decision.splits.iter().map(|(name, s)| (name, encode(s))).collect();
        self.differences(seen, Kind::Split, wanted, &mut writes);
        let wanted = decision.routes.iter().map(|(name, r)| (name, encode(r))).collect();
        self.differences(seen, Kind::Route, wanted, &mut writes);
        let plan = encode(&decision.plan);
        if seen.get("plan") != Some(&plan) {
            writes.push(Write::put(self.keys.plan(), plan));
        }
        writes
    }

    fn differences(
        &self,
        seen: &Image,
        kind: Kind,
        wanted: BTreeMap<&String, Bytes>,
        writes: &mut Vec<Write>,
    ) {
        let prefix = kind.folder_prefix();
        let there = seen.range(prefix.to_string()..);
        let there = there.map_while(|(key, _)| key.strip_prefix(prefix));
        for name in there.filter(|name| !wanted.contains_key(&name.to_string())) {
            writes.push(Write::delete(self.keys.one(kind, name)));
        }
        for (name, value) in wanted {
            if seen.get(&format!("{prefix}{name}")) != Some(&value) {
                writes.push(Write::put(self.keys.one(kind, name), value));
            }
        }
    }
}

/// What came of a look at the store.
struct Looked {
    core: Core,
    seen: Image,
    decision: Option<Decision>,
    /// For scaling; nothing while it is unclear who is there.
    outlook: Option<Outlook>,
}

fn look(mut core: Core, seen: Image, clock: &dyn Clock, scales: bool) -> Looked {
    let now = clock.now();
    let view = View::read(&seen);
    let epoch = core.plan.epoch;
    let decision = core.step(now, &view).map(|mut decision| {
        if decision.plan.epoch != epoch {
            core.plan.plan_ms = (clock.now() - now).0 as f64 / 1e6;
            decision.plan.plan_ms = core.plan.plan_ms;
        }
        decision
    });
    let outlook = (scales && decision.is_some()).then(|| core.outlook(&view));
    Looked { core, seen, decision, outlook }
}
