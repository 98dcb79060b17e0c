//! Connects the decisions on replica pools to the leading scheduler and to the scale targets.
//!
//! It is a task of its own: planning never waits for a slow or broken target.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base::{Clock, Nanos};
use tokio::sync::watch;

use super::replica_estimate::ScalingInput;
use super::replica_pools::{PoolDecision, PoolSettings, PoolsDecision, ReplicaPools};
use super::scaler::{ScalingDecision, ScalingSettings};
use super::target::{Scale, ScaleError, ScaleTarget};
use crate::record::{ReplicaPoolRecord, ScalingRecord};

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum pause after failures.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Time limit of a call to a target.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Shortest time between a poll and one because requests wait.
const WAKE_PAUSE: Duration = Duration::from_millis(250);

/// One replica pool of a scheduler.
#[derive(Clone)]
pub struct ScaledPool {
    /// The workload.
    pub target: Arc<dyn ScaleTarget>,
    /// The settings.
    pub settings: PoolSettings,
}

/// What a scheduler scales.
#[derive(Clone)]
pub struct Scaling {
    /// The replica pools.
    pub pools: Vec<ScaledPool>,
    /// Time between two polls.
    pub poll: Duration,
}

impl Scaling {
    /// Scales one workload, with the default time between polls.
    pub fn new(target: Arc<dyn ScaleTarget>, settings: ScalingSettings) -> Scaling {
        let settings = PoolSettings { scaling: settings, ..PoolSettings::default() };
        Scaling::of_pools(vec![ScaledPool { target, settings }])
    }

    /// Scales several pools, with the default time between polls.
    pub fn of_pools(pools: Vec<ScaledPool>) -> Scaling {
        Scaling { pools, poll: POLL_INTERVAL }
    }
}

/// What the driver reports to the scheduler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScalingReport {
    /// Backends to plan without.
    pub draining: BTreeSet<String>,
    /// No backend is needed: the last ones may be emptied, too.
    pub may_empty: bool,
    /// The record to publish; `None` until the first poll.
    pub record: Option<ScalingRecord>,
}

/// One pool, and how calls to its target went.
struct PoolLink {
    target: Arc<dyn ScaleTarget>,
    settings: PoolSettings,
    record: ReplicaPoolRecord,
    draining: BTreeSet<String>,
    last_error: Option<ScaleError>,
    failures: u32,
    /// It is not called before this time.
    pause_until: Nanos,
    /// The kind that was reported as unexpected.
    other_kind: Option<String>,
}

/// The driver of one term of leadership.
pub struct Driver {
    poll: Duration,
    clock: Arc<dyn Clock>,
    /// Shared with the thread that estimates.
    pools: Option<ReplicaPools>,
    links: Vec<PoolLink>,
    may_empty: bool,
    errors: u64,
    /// The last wake-up was followed by a poll.
    woken: bool,
}

impl Driver {
    /// Creates a driver that continues with what an earlier leader's record knows: the count of
    /// errors, and what machines the pools have.
    pub fn new(scaling: Scaling, clock: Arc<dyn Clock>, before: Option<ScalingRecord>) -> Driver {
        let before = before.unwrap_or_default();
        let known = |pool: &ScaledPool| {
            let name = pool.target.name();
            before.pools.iter().find(|record| record.target == name).cloned()
        };
        let known: Vec<Option<ReplicaPoolRecord>> = scaling.pools.iter().map(known).collect();
        let settings = scaling.pools.iter().map(|pool| pool.settings.clone()).collect();
        let pools = ReplicaPools::new(settings, &known, clock.now());
        let links = scaling.pools.into_iter().map(PoolLink::new).collect();
        Driver {
            poll: scaling.poll,
            clock,
            pools: Some(pools),
            links,
            may_empty: false,
            errors: before.errors,
            woken: false,
        }
    }

    /// Polls until the receiver of its reports is dropped.
    pub async fn run(
        mut self,
        mut input: watch::Receiver<Option<Arc<ScalingInput>>>,
        report: watch::Sender<ScalingReport>,
    ) {
        // The first poll is made as soon as there is something to decide on.
        let first = async { input.wait_for(Option::is_some).await.map(|_| ()).is_ok() };
        let is_known = tokio::select! {
            is_known = first => is_known,
            () = report.closed() => false,
        };
        if !is_known {
            return;
        }
        loop {
            let current = input.borrow_and_update().clone();
            if let Some(current) = current {
                self.woken = current.activity.waiting > 0;
                self.round(current, &report).await;
            }
            tokio::select! {
                () = tokio::time::sleep(self.pause()) => {}
                () = woken(&mut input, self.woken) => tokio::time::sleep(WAKE_PAUSE).await,
                () = report.closed() => return,
            }
        }
    }

    /// Until a pool may be called again.
    fn pause(&self) -> Duration {
        let now = self.clock.now();
        let pause = |link: &PoolLink| Duration::from(link.pause_until.since(now)).max(self.poll);
        self.links.iter().map(pause).min().unwrap_or(self.poll)
    }

    /// One poll of all pools that may be called.
    async fn round(&mut self, input: Arc<ScalingInput>, report: &watch::Sender<ScalingReport>) {
        let mut scales = Vec::with_capacity(self.links.len());
        for index in 0..self.links.len() {
            let target = self.links[index].target.clone();
            if self.links[index].pause_until > self.clock.now() {
                scales.push(None);
                continue;
            }
            let scale = with_timeout(target.read()).await;
            let scale = scale.map_err(|error| self.fail(index, error)).ok();
            scales.push(scale);
        }
        let Some(decision) = self.decide(input.clone(), scales.clone()).await else {
            self.send(report);
            return;
        };
        self.may_empty = decision.may_empty;
        for (index, (scale, decision)) in scales.iter().zip(&decision.pools).enumerate() {
            if let (Some(scale), Some(decision)) = (scale, decision) {
                self.note(index, scale, decision);
            }
        }
        // What is drained is known before anything is removed.
        self.send(report);
        for (index, (scale, decision)) in scales.iter().zip(&decision.pools).enumerate() {
            let (Some(scale), Some(decision)) = (scale, decision) else { continue };
            match self.carry_out(index, scale, &decision.scaling).await {
                Ok(()) => self.links[index].succeed(),
                Err(error) => self.fail(index, error),
            }
        }
        self.send(report);
    }

    async fn decide(
        &mut self,
        input: Arc<ScalingInput>,
        scales: Vec<Option<Scale>>,
    ) -> Option<PoolsDecision> {
        let mut pools = self.pools.take()?;
        let removals: Vec<_> = self.links.iter().map(|link| link.target.removal()).collect();
        let (now, before) = (self.clock.now(), pools.clone());
        let work = tokio::task::spawn_blocking(move || {
            let views = scales.iter().zip(removals);
            let views: Vec<_> = views
                .map(|(scale, removal)| scale.as_ref().map(|scale| (scale, removal)))
                .collect();
            let decision = pools.step(now, &input, &views);
            (pools, decision)
        });
        match work.await {
            Ok((pools, decision)) => {
                self.pools = Some(pools);
                Some(decision)
            }
            Err(error) => {
                tracing::error!(%error, "cannot estimate replicas");
                self.pools = Some(before);
                None
            }
        }
    }

    /// Takes a decision into the record and the log.
    fn note(&mut self, index: usize, scale: &Scale, decision: &PoolDecision) {
        let link = &mut self.links[index];
        let target = link.record.target.as_str();
        for backend in &decision.scaling.stuck {
            tracing::warn!(backend, "drain timed out; see atoll cluster status");
        }
        if let Some(reason) = &decision.newly_stalled {
            tracing::warn!(target, reason, "replicas do not come; another pool is used");
        } else if link.record.stalled.is_some()
            && self.pools.as_ref().is_some_and(|pools| pools.stalled(index).is_none())
        {
            tracing::info!(target, "the pool is asked for replicas again");
        }
        if decision.other_kind != link.other_kind {
            link.other_kind.clone_from(&decision.other_kind);
            if let Some(kind) = &decision.other_kind {
                let given = &link.settings.kind;
                tracing::warn!(target, kind, ?given, "the replicas are of another kind");
            }
        }
        if let Some(pools) = &self.pools {
            link.record.stalled = pools.stalled(index).cloned();
            if let Some(like) = pools.like(index) {
                link.record.kind.clone_from(&like.device);
                link.record.memory_bytes = like.memory_bytes;
            }
        }
        link.record.replicas = scale.replicas;
        link.record.wanted = decision.scaling.wanted;
        link.record.present = decision.present;
        link.draining.clone_from(&decision.scaling.draining);
    }

    async fn carry_out(
        &mut self,
        index: usize,
        scale: &Scale,
        decision: &ScalingDecision,
    ) -> Result<(), ScaleError> {
        let target = self.links[index].target.clone();
        mark(&*target, scale, decision).await?;
        let Some(replicas) = decision.replicas else { return Ok(()) };
        with_timeout(target.write(&scale.version, replicas)).await?;
        if let Some(pools) = &mut self.pools {
            pools.applied(self.clock.now(), index, decision);
        }
        self.links[index].record.replicas = replicas;
        let (from, wanted) = (scale.replicas, decision.wanted);
        tracing::info!(target = target.name(), from, to = replicas, wanted, "replicas changed");
        Ok(())
    }

    /// Counts a failure, and logs it where it is a new one.
    fn fail(&mut self, index: usize, error: ScaleError) {
        self.errors += 1;
        let now = self.clock.now();
        let link = &mut self.links[index];
        // A conflict is resolved by the next poll. After any other failure it is unknown when a
        // backend can be removed: the plan gets its backends back.
        if !matches!(error, ScaleError::Conflict(_)) {
            link.failures = link.failures.saturating_add(1);
            let factor = 1 << link.failures.min(8);
            let pause = (self.poll * factor).min(PAUSE_MAX.max(self.poll));
            link.pause_until = now + Nanos::from(pause);
            if let Some(pools) = &mut self.pools {
                link.draining = pools.stop_draining(now, index);
            }
            self.may_empty = false;
        }
        if link.last_error.as_ref().is_none_or(|before| !before.is_like(&error)) {
            let target = &link.record.target;
            tracing::warn!(target, %error, advice = error.advice(), "scaling failed");
        }
        link.record.error = Some(format!("{error}; {}", error.advice()));
        link.last_error = Some(error);
    }

    fn send(&self, report: &watch::Sender<ScalingReport>) {
        let draining = self.links.iter().flat_map(|link| link.draining.iter().cloned()).collect();
        let report_now =
            ScalingReport { draining, may_empty: self.may_empty, record: Some(self.record()) };
        report.send_if_modified(|report| {
            let is_new = *report != report_now;
            *report = report_now;
            is_new
        });
    }

    /// The record over all pools.
    fn record(&self) -> ScalingRecord {
        let pools: Vec<ReplicaPoolRecord> =
            self.links.iter().map(|link| link.record.clone()).collect();
        let draining: BTreeSet<&String> =
            self.links.iter().flat_map(|link| &link.draining).collect();
        ScalingRecord {
            target: match &pools[..] {
                [one] => one.target.clone(),
                pools => format!("{} replica pools", pools.len()),
            },
            wanted: pools.iter().map(|pool| pool.wanted).sum(),
            replicas: pools.iter().map(|pool| pool.replicas).sum(),
            present: pools.iter().map(|pool| pool.present).sum(),
            draining: draining.into_iter().cloned().collect(),
            errors: self.errors,
            error: pools.iter().find_map(|pool| pool.error.clone()),
            pools,
        }
    }
}

impl PoolLink {
    fn new(pool: ScaledPool) -> PoolLink {
        let ScaledPool { target, settings } = pool;
        let record = ReplicaPoolRecord {
            target: target.name(),
            kind: settings.kind.clone().unwrap_or_default(),
            min: settings.scaling.replicas_min,
            max: settings.scaling.replicas_max,
            price: settings.price,
            ..ReplicaPoolRecord::default()
        };
        PoolLink {
            target,
            settings,
            record,
            draining: BTreeSet::new(),
            last_error: None,
            failures: 0,
            pause_until: Nanos::ZERO,
            other_kind: None,
        }
    }

    fn succeed(&mut self) {
        if self.last_error.take().is_some() {
            tracing::info!(target = self.record.target, "scaling recovered");
        }
        self.failures = 0;
        self.record.error = None;
    }
}

/// Waits until requests wait for a backend, if none did before.
async fn woken(input: &mut watch::Receiver<Option<Arc<ScalingInput>>>, before: bool) {
    let mut before = before;
    loop {
        if input.changed().await.is_err() {
            // The scheduler is gone, and with it the receiver of the reports.
            return std::future::pending().await;
        }
        let input = input.borrow_and_update();
        let waits = input.as_ref().is_some_and(|input| input.activity.waiting > 0);
        if waits && !before {
            return;
        }
        before = waits;
    }
}

/// Marks replicas that are removed, before the number of replicas is lowered, and clears the marks
/// of others.
async fn mark(
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

async fn with_timeout<T>(
    call: impl Future<Output = Result<T, ScaleError>>,
) -> Result<T, ScaleError> {
    let late = |_| ScaleError::Unreachable(format!("no reply within {CALL_TIMEOUT:?}"));
    tokio::time::timeout(CALL_TIMEOUT, call).await.map_err(late)?
}
