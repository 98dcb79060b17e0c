//! Connects the scaler to the leading scheduler and to the scale target.
//!
//! It is a task of its own: planning never waits for a slow or broken target.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base::Clock;
use tokio::sync::watch;

use super::replica_estimate::{ScalingInput, estimate_replicas};
use super::scaler::{ReplicaState, Scaler, ScalerInput, ScalingDecision, ScalingSettings};
use super::target::{Scale, ScaleError, ScaleTarget};
use crate::record::ScalingRecord;

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum pause after failures.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Time limit of a call to the target.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// What a scheduler scales, and its settings.
#[derive(Clone)]
pub struct Scaling {
    /// The workload.
    pub target: Arc<dyn ScaleTarget>,
    /// The settings.
    pub settings: ScalingSettings,
    /// Time between two polls.
    pub poll: Duration,
}

impl Scaling {
    /// Scales `target`, with the default time between polls.
    pub fn new(target: Arc<dyn ScaleTarget>, settings: ScalingSettings) -> Scaling {
        Scaling { target, settings, poll: POLL_INTERVAL }
    }
}

/// What the driver reports to the scheduler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScalingReport {
    /// Backends to plan without.
    pub draining: BTreeSet<String>,
    /// The record to publish; `None` until the first poll.
    pub record: Option<ScalingRecord>,
}

/// The driver of one term of leadership.
pub struct Driver {
    scaling: Scaling,
    clock: Arc<dyn Clock>,
    scaler: Scaler,
    record: ScalingRecord,
    last_error: Option<ScaleError>,
    failures: u32,
}

impl Driver {
    /// Creates a driver that continues the error count of an earlier leader's record.
    pub fn new(scaling: Scaling, clock: Arc<dyn Clock>, before: Option<ScalingRecord>) -> Driver {
        let scaler = Scaler::new(scaling.settings.clone(), clock.now());
        let errors = before.map_or(0, |record| record.errors);
        let target = scaling.target.name();
        let record = ScalingRecord { target, errors, ..ScalingRecord::default() };
        Driver { scaling, clock, scaler, record, last_error: None, failures: 0 }
    }

    /// Polls until the receiver of its reports is dropped.
    pub async fn run(
        mut self,
        input: watch::Receiver<Option<Arc<ScalingInput>>>,
        report: watch::Sender<ScalingReport>,
    ) {
        loop {
            let current = input.borrow().clone();
            if let Some(current) = current {
                if let Err(error) = self.poll(current, &report).await {
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

    /// The pause, doubled with every failure.
    fn pause(&self) -> Duration {
        let factor = 1 << self.failures.min(8);
        (self.scaling.poll * factor).min(PAUSE_MAX.max(self.scaling.poll))
    }

    async fn poll(
        &mut self,
        input: Arc<ScalingInput>,
        report: &watch::Sender<ScalingReport>,
    ) -> Result<(), ScaleError> {
        let target = self.scaling.target.clone();
        let scale = with_timeout(target.read()).await?;
        let estimated = self.estimated(input.clone(), &scale).await;
        let replicas_present = replicas_present(&scale, &input);
        let input = ScalerInput {
            replicas: scale.replicas,
            need: estimated,
            removal: target.removal(),
            replicas_present: &replicas_present,
        };
        let decision = self.scaler.step(self.clock.now(), &input);
        for backend in &decision.stuck {
            tracing::warn!(backend, "drain timed out; see atoll cluster status");
        }
        self.record.replicas = scale.replicas;
        self.record.wanted = decision.wanted;
        self.record.present = replicas_present.iter().filter(|member| member.joined).count();
        self.record.draining = decision.draining.iter().cloned().collect();
        report.send_modify(|report| {
            report.draining.clone_from(&decision.draining);
            report.record = Some(self.record.clone());
        });
        self.mark(&*target, &scale, &decision).await?;
        self.write(&*target, &scale, &decision).await
    }

    async fn estimated(&self, input: Arc<ScalingInput>, scale: &Scale) -> Option<u32> {
        let names = scale.members.iter().map(|member| member.name.clone()).collect();
        let max = self.scaling.settings.replicas_max;
        let work = tokio::task::spawn_blocking(move || estimate_replicas(&input, &names, max));
        work.await.unwrap_or_else(|error| {
            tracing::error!(%error, "cannot estimate replicas");
            None
        })
    }

    /// Marks replicas that are removed, before the number of replicas is lowered, and clears the
    /// marks of others.
    async fn mark(
        &self,
        target: &dyn ScaleTarget,
        scale: &Scale,
        decision: &ScalingDecision,
    ) -> Result<(), ScaleError> {
        for replica in scale.members.iter().filter(|replica| !replica.ending) {
            let leaves = decision.removing.contains(&replica.name);
            // A replica that an earlier change removes keeps its mark until it is gone.
            let stays = !decision.draining.contains(&replica.name);
            if (leaves && !replica.marked) || (replica.marked && stays) {
                with_timeout(target.mark(&replica.name, leaves)).await?;
            }
        }
        Ok(())
    }

    async fn write(
        &mut self,
        target: &dyn ScaleTarget,
        scale: &Scale,
        decision: &ScalingDecision,
    ) -> Result<(), ScaleError> {
        let Some(replicas) = decision.replicas else { return Ok(()) };
        with_timeout(target.write(&scale.version, replicas)).await?;
        self.scaler.applied(self.clock.now(), decision);
        self.record.replicas = replicas;
        let (from, wanted) = (scale.replicas, decision.wanted);
        tracing::info!(target = target.name(), from, to = replicas, wanted, "replicas changed");
        Ok(())
    }

    fn succeed(&mut self) {
        if self.last_error.take().is_some() {
            tracing::info!(target = self.record.target, "scaling recovered");
        }
        self.failures = 0;
        self.record.error = None;
    }

    /// Counts a failure, and logs it where it is a new one.
    fn fail(&mut self, error: ScaleError, report: &watch::Sender<ScalingReport>) {
        self.record.errors += 1;
        // A conflict is resolved by the next poll. After any other failure it is unknown when a
        // backend can be removed: the plan gets its backends back.
        if !matches!(error, ScaleError::Conflict(_)) {
            self.failures = self.failures.saturating_add(1);
            let draining = self.scaler.stop_draining(self.clock.now());
            self.record.draining = draining.iter().cloned().collect();
            report.send_modify(|report| report.draining = draining);
        }
        if self.last_error.as_ref().is_none_or(|before| !before.is_like(&error)) {
            let target = &self.record.target;
            tracing::warn!(target, %error, advice = error.advice(), "scaling failed");
        }
        self.record.error = Some(format!("{error}; {}", error.advice()));
        self.last_error = Some(error);
    }
}

async fn with_timeout<T>(
    call: impl Future<Output = Result<T, ScaleError>>,
) -> Result<T, ScaleError> {
    let late = |_| ScaleError::Unreachable(format!("no reply within {CALL_TIMEOUT:?}"));
    tokio::time::timeout(CALL_TIMEOUT, call).await.map_err(late)?
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
