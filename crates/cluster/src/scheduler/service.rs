//! Health and metrics of a scheduler, for its admin port.

use std::fmt::Write;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::{
    ApiError, Classification, ClassifyRequest, IndexEntry, InferRequest, InferResponse,
    InferenceService, ModelMetadata, ModelRef, ModelStatistics, RegisterRequest, Registered,
    RequestContext, ServerMetadata, ServiceFuture, proto,
};
use base::{Clock, Nanos};

use super::maintenance::SpaceGauges;
use crate::record::canary::CanaryOutcome;
use crate::record::{PlanRecord, ReplicaPoolRecord, ScalingRecord, validation};
use crate::store::{Store, health};

/// What a scheduler is doing, shared by its agent and its admin port.
#[derive(Debug, Default)]
pub struct SchedulerState {
    /// It leads.
    pub leading: AtomicBool,
    /// Number of the last plan that it published.
    pub epoch: AtomicU64,
    /// Backends that this plan does without because frontends avoid them.
    avoided: AtomicU64,
    /// When it last wrote the plan, in nanoseconds of the process's clock; 0 for never.
    written_at: AtomicU64,
    /// The store's space; only the leader looks at it.
    pub space: Arc<SpaceGauges>,
    /// The replica pools that it scales while it leads.
    pools: Mutex<Vec<ReplicaPoolRecord>>,
    /// Canaries that it decided on, by outcome.
    canaries: [AtomicU64; CanaryOutcome::ALL.len()],
}

impl SchedulerState {
    /// Notes that the plan is in the store at `now`.
    pub fn written(&self, now: Nanos, plan: &PlanRecord) {
        self.epoch.store(plan.epoch, Relaxed);
        self.avoided.store(plan.avoided.len() as u64, Relaxed);
        self.written_at.store(now.0.max(1), Relaxed);
    }

    /// Notes the replica pools, for metrics; `None` while none are scaled here.
    pub fn note_pools(&self, record: Option<&ScalingRecord>) {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        match record {
            Some(record) => pools.clone_from(&record.pools),
            None => pools.clear(),
        }
    }

    /// Counts a decision on a canary.
    pub fn count_canary(&self, outcome: CanaryOutcome) {
        if let Some(index) = CanaryOutcome::ALL.iter().position(|other| *other == outcome) {
            self.canaries[index].fetch_add(1, Relaxed);
        }
    }

    /// Starts a term of leadership: the plan in the store is as old as the term.
    pub fn lead(&self, now: Nanos) {
        self.written_at.store(now.0.max(1), Relaxed);
        self.leading.store(true, Relaxed);
    }
}

/// A scheduler as a service that has no models.
pub struct SchedulerService {
    /// What it is doing.
    pub state: Arc<SchedulerState>,
    /// Its store.
    pub store: Arc<dyn Store>,
    /// Bytes from which the store refuses writes.
    pub quota_bytes: u64,
    /// What it reports about itself.
    pub metadata: ServerMetadata,
    /// The clock.
    pub clock: Arc<dyn Clock>,
}

fn no_models<'a, T: Send + 'a>() -> ServiceFuture<'a, T> {
    let error = "a scheduler serves no models; send requests to a frontend of the cluster";
    Box::pin(std::future::ready(Err(ApiError::not_found(error))))
}

impl InferenceService for SchedulerService {
    fn server_metadata(&self) -> ServerMetadata {
        self.metadata.clone()
    }

    /// Also one that does not lead is ready, to follow the leader.
    fn ready(&self) -> bool {
        !self.store.health().unreachable
    }

    fn model_ready<'a>(&'a self, _: ModelRef<'a>) -> ServiceFuture<'a, bool> {
        no_models()
    }

    fn model_metadata<'a>(&'a self, _: ModelRef<'a>) -> ServiceFuture<'a, ModelMetadata> {
        no_models()
    }

    fn model_config<'a>(&'a self, _: ModelRef<'a>) -> ServiceFuture<'a, proto::ModelConfig> {
        no_models()
    }

    fn infer<'a>(
        &'a self,
        _: ModelRef<'a>,
        _: InferRequest,
        _: RequestContext,
    ) -> ServiceFuture<'a, InferResponse> {
        no_models()
    }

    fn statistics<'a>(
        &'a self,
        _: Option<ModelRef<'a>>,
    ) -> ServiceFuture<'a, Vec<ModelStatistics>> {
        no_models()
    }

    fn index(&self, _: bool) -> ServiceFuture<'_, Vec<IndexEntry>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn load<'a>(&'a self, _: &'a str) -> ServiceFuture<'a, ()> {
        no_models()
    }

    fn unload<'a>(&'a self, _: &'a str) -> ServiceFuture<'a, ()> {
        no_models()
    }

    fn register(&self, _: RegisterRequest) -> ServiceFuture<'_, Registered> {
        no_models()
    }

    fn classify(&self, _: ClassifyRequest, _: RequestContext) -> ServiceFuture<'_, Classification> {
        no_models()
    }

    fn write_metrics(&self, text: &mut String) {
        let state = &self.state;
        let leading = state.leading.load(Relaxed);
        let mut gauge = |name: &str, help: &str, value: f64| {
            let name = format!("atoll_cluster_{name}");
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        };
        gauge("leading", "Whether this scheduler leads", f64::from(u8::from(leading)));
        let age = Nanos(self.clock.now().0.saturating_sub(state.written_at.load(Relaxed)));
        let age = if leading { Duration::from(age).as_secs_f64() } else { 0.0 };
        gauge("plan_age_seconds", "Since the leader last wrote the plan; 0 elsewhere", age);
        gauge(
            "plan_epoch",
            "Number of the last plan of this leader",
            state.epoch.load(Relaxed) as f64,
        );
        let avoided = if leading { state.avoided.load(Relaxed) } else { 0 };
        gauge(
            "backends_avoided",
            "Backends that the leader's plan does without because frontends avoid them",
            avoided as f64,
        );
        let space = &state.space;
        let bytes = space.bytes.load(Relaxed) as f64;
        gauge("store_bytes", "Bytes of the store's files, as the leader sees them", bytes);
        let used = space.used_bytes.load(Relaxed) as f64;
        gauge("store_used_bytes", "Bytes of the store in use, as the leader sees them", used);
        gauge(
            "store_quota_bytes",
            "Bytes from which the store refuses writes",
            self.quota_bytes as f64,
        );
        write_pool_metrics(text, &state.pools.lock().unwrap_or_else(PoisonError::into_inner));
        let name = "atoll_cluster_canaries_total";
        let help = "Canaries that this scheduler decided on";
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        // What operators and registrations end is not its decision.
        for (outcome, count) in CanaryOutcome::ALL.iter().zip(&state.canaries).take(2) {
            let (outcome, count) = (outcome.as_str(), count.load(Relaxed));
            let _ = writeln!(text, "{name}{{outcome=\"{outcome}\"}} {count}");
        }
        health::write_metrics(text, &*self.store);
        validation::write_metrics(text);
    }

    fn drain(&self, _: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(std::future::ready(true))
    }
}

/// A gauge of replica pools: its name, its help and its value.
type PoolGauge = (&'static str, &'static str, fn(&ReplicaPoolRecord) -> f64);

/// Metrics of the replica pools that the leader scales.
fn write_pool_metrics(text: &mut String, pools: &[ReplicaPoolRecord]) {
    let gauges: [PoolGauge; 4] = [
        ("pool_wanted", "Replicas that the load needs", |pool| f64::from(pool.wanted)),
        ("pool_replicas", "Replicas requested", |pool| f64::from(pool.replicas)),
        ("pool_present", "Replicas that have joined", |pool| pool.present as f64),
        ("pool_stalled", "Whether requested replicas do not come", |pool| {
            f64::from(u8::from(pool.stalled.is_some()))
        }),
    ];
    for (name, help, value) in gauges {
        let name = format!("atoll_cluster_{name}");
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
        for pool in pools {
            // The kind is what a backend says of itself.
            let kind = pool.kind.replace(['"', '\\'], "_");
            let labels = format!("pool=\"{}\",kind=\"{kind}\"", pool.target);
            let _ = writeln!(text, "{name}{{{labels}}} {}", value(pool));
        }
    }
}

#[cfg(test)]
mod tests {
    use base::MonotonicClock;

    use super::*;
    use crate::store::memory::MemoryStore;

    const RULES: &str = include_str!("../../../../deploy/prometheus/atoll-cluster-rules.yml");
    const RUNBOOK: &str = include_str!("../../../../docs/book/src/runbook.md");

    fn page(state: Arc<SchedulerState>) -> String {
        let store = MemoryStore::start(Arc::new(MonotonicClock::new()));
        let service = SchedulerService {
            state,
            store,
            quota_bytes: 1 << 30,
            metadata: ServerMetadata {
                name: String::new(),
                version: String::new(),
                extensions: Vec::new(),
            },
            clock: Arc::new(MonotonicClock::new()),
        };
        let mut text = String::new();
        service.write_metrics(&mut text);
        text
    }

    #[tokio::test]
    async fn backends_that_the_plan_does_without_are_counted_while_it_leads() {
        let state = Arc::new(SchedulerState::default());
        let avoided = vec!["b1".to_string(), "b2".to_string()];
        state.lead(Nanos::from_millis(1));
        state.written(Nanos::from_millis(2), &PlanRecord { avoided, ..PlanRecord::default() });
        assert!(page(state.clone()).contains("\natoll_cluster_backends_avoided 2\n"));
        state.leading.store(false, Relaxed);
        assert!(page(state).contains("\natoll_cluster_backends_avoided 0\n"));
    }

    #[tokio::test]
    async fn the_rules_read_metrics_that_exist_and_have_a_runbook() {
        let page = page(Arc::default());
        let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
        let words = RULES.split(|c| !is_part(c)).filter(|word| word.starts_with("atoll_cluster_"));
        let mut found = 0;
        for word in words {
            assert!(page.contains(&format!("# TYPE {word} ")), "{word} is not on {page}");
            found += 1;
        }
        let alerts: Vec<&str> =
            RULES.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
        assert!(found >= alerts.len() && alerts.len() >= 6, "{alerts:?}");
        for alert in alerts {
            assert!(RUNBOOK.contains(&format!("## {alert}\n")), "{alert} is not in the runbook");
        }
    }
}
