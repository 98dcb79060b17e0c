//! Carries the scaler between the leading scheduler and whoever runs the machines.
//!
//! It is a task of its own: however slow or broken the other side is, plans do not wait for it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base::Clock;
use tokio::sync::watch;

use super::need::{Outlook, need};
use super::scaler::{Member, Orders, Scaler, ScalingSettings, Situation};
use super::target::{Scale, Target, TargetError};
use crate::record::ScalingRecord;

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// The longest pause after failures.
const PAUSE_MOST: Duration = Duration::from_secs(60);
/// A call that takes longer has failed.
const CALL_MOST: Duration = Duration::from_secs(10);

/// What a scheduler scales, and how.
#[derive(Clone)]
pub struct Scaling {
    /// What.
    pub target: Arc<dyn Target>,
    /// How.
    pub settings: ScalingSettings,
    /// Time between two looks.
    pub look: Duration,
}

impl Scaling {
    /// Scales `target`, with the usual time between two looks.
    pub fn new(target: Arc<dyn Target>, settings: ScalingSettings) -> Scaling {
        Scaling { target, settings, look: LOOK }
    }
}

/// What the driver tells the scheduler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScalingReport {
    /// Backends that the plan is to do without.
    pub draining: BTreeSet<String>,
    /// For everybody to see; `None` until the first look.
    pub record: Option<ScalingRecord>,
}

/// The driver of one term of leadership.
pub struct Driver {
    scaling: Scaling,
    clock: Arc<dyn Clock>,
    scaler: Scaler,
    record: ScalingRecord,
    failing: Option<TargetError>,
    failures: u32,
}

impl Driver {
    /// A driver that goes on counting where an earlier leader's record ends.
    pub fn new(scaling: Scaling, clock: Arc<dyn Clock>, before: Option<ScalingRecord>) -> Driver {
        let scaler = Scaler::new(scaling.settings.clone(), clock.now());
        let errors = before.map_or(0, |record| record.errors);
        let target = scaling.target.name();
        let record = ScalingRecord { target, errors, ..ScalingRecord::default() };
        Driver { scaling, clock, scaler, record, failing: None, failures: 0 }
    }

    /// Looks again and again, until nobody listens.
    pub async fn run(
        mut self,
        outlook: watch::Receiver<Option<Arc<Outlook>>>,
        report: watch::Sender<ScalingReport>,
    ) {
        loop {
            let seen = outlook.borrow().clone();
            if let Some(seen) = seen {
                if let Err(error) = self.look(seen, &report).await {
                    self.fail(error, &report);
                } else {
                    self.succeed();
                }
                report.send_modify(|report| report.record = Some(self.record.clone()));
            }
            tokio::select! {
                () = tokio::time::sleep(self.pause()) => {}
                () = report.closed() => return,
            }
        }
    }

    /// A pause that doubles with every failure.
    fn pause(&self) -> Duration {
        let factor = 1 << self.failures.min(8);
        (self.scaling.look * factor).min(PAUSE_MOST.max(self.scaling.look))
    }

    async fn look(
        &mut self,
        outlook: Arc<Outlook>,
        report: &watch::Sender<ScalingReport>,
    ) -> Result<(), TargetError> {
        let target = self.scaling.target.clone();
        let scale = within(target.read()).await?;
        let needed = self.needed(outlook.clone(), &scale).await;
        let members = members(&scale, &outlook);
        let situation = Situation {
            replicas: scale.replicas,
            need: needed,
            removal: target.removal(),
            members: &members,
        };
        let orders = self.scaler.step(self.clock.now(), &situation);
        for backend in &orders.stuck {
            tracing::warn!(backend, "not emptied in time, so it stays; see atoll cluster status");
        }
        self.record.replicas = scale.replicas;
        self.record.wanted = orders.wanted;
        self.record.present = members.iter().filter(|member| member.joined).count();
        self.record.draining = orders.draining.iter().cloned().collect();
        report.send_modify(|report| {
            report.draining.clone_from(&orders.draining);
            report.record = Some(self.record.clone());
        });
        self.mark(&*target, &scale, &orders).await?;
        self.write(&*target, &scale, &orders).await
    }

    async fn needed(&self, outlook: Arc<Outlook>, scale: &Scale) -> Option<u32> {
        let names = scale.members.iter().map(|member| member.name.clone()).collect();
        let most = self.scaling.settings.replicas_most;
        let work = tokio::task::spawn_blocking(move || need(&outlook, &names, most));
        work.await.unwrap_or_else(|error| {
            tracing::error!(%error, "what the load takes cannot be said");
            None
        })
    }

    /// Marks those who are to go, before there are to be fewer, and takes marks from those who are not.
    async fn mark(
        &self,
        target: &dyn Target,
        scale: &Scale,
        orders: &Orders,
    ) -> Result<(), TargetError> {
        for replica in scale.members.iter().filter(|replica| !replica.ending) {
            let leaves = orders.leaving.contains(&replica.name);
            // One whose turn came with an earlier change keeps its mark until it is gone.
            let stays = !orders.draining.contains(&replica.name);
            if (leaves && !replica.marked) || (replica.marked && stays) {
                within(target.mark(&replica.name, leaves)).await?;
            }
        }
        Ok(())
    }

    async fn write(
        &mut self,
        target: &dyn Target,
        scale: &Scale,
        orders: &Orders,
    ) -> Result<(), TargetError> {
        let Some(replicas) = orders.replicas else { return Ok(()) };
        within(target.write(&scale.version, replicas)).await?;
        self.scaler.written(self.clock.now(), orders);
        self.record.replicas = replicas;
        let (from, wanted) = (scale.replicas, orders.wanted);
        tracing::info!(target = target.name(), from, to = replicas, wanted, "replicas changed");
        Ok(())
    }

    fn succeed(&mut self) {
        if self.failing.take().is_some() {
            tracing::info!(target = self.record.target, "can be scaled again");
        }
        self.failures = 0;
        self.record.error = None;
    }

    /// Counts a failure, and says it where it is a new one.
    fn fail(&mut self, error: TargetError, report: &watch::Sender<ScalingReport>) {
        self.record.errors += 1;
        // What changed meanwhile is read again at the usual time. After anything else nobody knows when one can go: the
        // plan gets its backends back.
        if !matches!(error, TargetError::Conflict(_)) {
            self.failures = self.failures.saturating_add(1);
            let draining = self.scaler.release(self.clock.now());
            self.record.draining = draining.iter().cloned().collect();
            report.send_modify(|report| report.draining = draining);
        }
        if self.failing.as_ref().is_none_or(|before| !before.is_like(&error)) {
            let target = &self.record.target;
            tracing::warn!(target, %error, advice = error.advice(), "cannot be scaled");
        }
        self.record.error = Some(format!("{error}; {}", error.advice()));
        self.failing = Some(error);
    }
}

async fn within<T>(call: impl Future<Output = Result<T, TargetError>>) -> Result<T, TargetError> {
    let late = |_| TargetError::Unreachable(format!("no answer within {CALL_MOST:?}"));
    tokio::time::timeout(CALL_MOST, call).await.map_err(late)?
}

/// Replicas with what their backends do.
fn members(scale: &Scale, outlook: &Outlook) -> Vec<Member> {
    let member = |replica: &super::target::Replica| {
        let duty = outlook.duties.get(&replica.name);
        Member {
            name: replica.name.clone(),
            ordinal: replica.ordinal,
            joined: duty.is_some(),
            ready: replica.ready,
            ending: replica.ending,
            empty: duty.is_some_and(|duty| duty.empty),
            busy: duty.map_or(0.0, |duty| duty.busy),
        }
    };
    scale.members.iter().map(member).collect()
}
