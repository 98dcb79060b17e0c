//! The frontend: the same API as a single node, served by the cluster's backends.
//!
//! Requests are routed by a table in memory, so the data path needs neither the store nor the
//! scheduler. A request is one future from its arrival to its reply; whatever happens to backends,
//! it gives exactly one reply.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use api::client::{decode_response, encode_request, error_of};
use api::error::ApiResult;
use api::trace::SpanSink;
use api::{
    ApiError, CanaryChoice, ErrorKind, InferRequest, InferResponse, Inputs, ModelMetadata,
    ModelRef, RequestContext, ServerMetadata, proto,
};
use base::{Clock, Nanos, Random};
use model::HostMemory;
use model::store::RegistryLimits;
use tokio::sync::watch;

use crate::balance::backend_health::{Availability, EjectionReason};
use crate::load_reports::LoadReporter;
use crate::membership::Membership;
use crate::model_store::ownership::Owner;
use crate::model_store::{ModelRecords, ModelStore};
use crate::record::canary::split_served;
use crate::record::{AVOIDED_MAX, FrontendRecord, Keys, LoadReport, RecordKind, encode};
use crate::retention::Retention;
use crate::snapshot::ClusterSnapshot;
use crate::state_file::StateFile;
use crate::store::mirror::{self, KeyValues};
use crate::store::{Store, StoreError};
use crate::tls::ClientTls;

mod attempts;
pub mod backend_link;
pub mod canary;
pub mod canary_entry;
mod classify;
pub mod cold_start;
pub mod http2;
pub mod live_counts;
pub mod meter;
mod monitor;
mod queries;
mod query_executor;
mod raw_body;
mod registration;
pub mod routing_table;
mod service;
mod status;

use attempts::{AttemptBudgets, SentMessage};
use backend_link::{BackendLink, BackendLinks};
use cold_start::{ColdStartSettings, ColdStarts};
use routing_table::{ModelEntry, RouteTarget, RoutingTable};

/// How often load is measured. What is written of it, the reporter decides.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// Shortest time between two writes of the saved routes.
const SAVE_INTERVAL: Duration = Duration::from_millis(500);
/// Time for a backend to describe a model while there is another one that could.
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it is looked whether what the store has lost is still to be kept.
const RETENTION_LOOK: Duration = Duration::from_secs(1);
/// Models whose metadata is cached.
const METADATA_MAX: usize = 10_000;

/// Settings of a frontend.
#[derive(Clone, Debug)]
pub struct FrontendSettings {
    /// This frontend's name.
    pub name: String,
    /// Span of its lease: after this time without renewal it counts as lost.
    pub lease: Duration,
    /// What it reports about itself.
    pub metadata: ServerMetadata,
    /// Maximum number of requests in flight.
    pub requests_max: usize,
    /// Time after which a request without a deadline is cancelled.
    pub timeout: Duration,
    /// Where registered models are kept; without it, none can be registered.
    pub files: Option<ModelStore>,
    /// TLS of connections to backends.
    pub backend_tls: Option<ClientTls>,
    /// Where the last routes are kept, for a start without the store.
    pub saved: Option<StateFile>,
    /// Limits of requests that wait until a backend has their model.
    pub cold_start: ColdStartSettings,
    /// How much may be registered.
    pub limits: RegistryLimits,
    /// The budget of replies of backends, and of the pictures of queries.
    pub memory: &'static HostMemory,
}

/// A frontend, as a service. Cloning shares it.
#[derive(Clone)]
pub struct Frontend {
    inner: Arc<Inner>,
}

struct Inner {
    settings: FrontendSettings,
    clock: Arc<dyn Clock>,
    started_at: Nanos,
    records: ModelRecords,
    /// This cluster, as the owner of files in the model store.
    owner: Owner,
    /// Keeps what the store has lost.
    retention: Mutex<Retention>,
    table: RwLock<Arc<RoutingTable>>,
    /// Incremented with every new table.
    table_changed: watch::Sender<u64>,
    links: BackendLinks,
    random: Mutex<Random>,
    budgets: Mutex<AttemptBudgets>,
    in_flight: AtomicUsize,
    /// Changes of models that wait for backends: the frontend is not idle meanwhile.
    changes_waiting: AtomicUsize,
    /// When the last request came, in nanoseconds of the clock; 0 where none has.
    entered_at: AtomicU64,
    cold_starts: ColdStarts,
    draining: AtomicBool,
    /// Whether all models have been ready once.
    started: AtomicBool,
    metadata: Mutex<std::collections::HashMap<(String, u64), Arc<ModelMetadata>>>,
    /// Where stages of queries are recorded as spans.
    spans: OnceLock<Arc<dyn SpanSink>>,
}

/// Counts one request in flight while it lives.
struct InFlightGuard<'a>(&'a AtomicUsize);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Frontend {
    /// Starts a frontend on the state in `store`: [`Frontend::new`] and [`Frontend::connect`].
    pub async fn start(
        store: Arc<dyn Store>,
        keys: Keys,
        clock: Arc<dyn Clock>,
        settings: FrontendSettings,
    ) -> Result<Frontend, StoreError> {
        let frontend = Frontend::new(store.clone(), keys.clone(), clock, settings);
        frontend.connect(store, &keys).await?;
        Ok(frontend)
    }

    /// A frontend that knows what was saved when it last ran, or no model yet and is not ready: see
    /// [`Frontend::connect`].
    pub fn new(
        store: Arc<dyn Store>,
        keys: Keys,
        clock: Arc<dyn Clock>,
        settings: FrontendSettings,
    ) -> Frontend {
        let inner = Arc::new(Inner {
            owner: Owner::of(&keys),
            records: ModelRecords::new(store, keys),
            retention: Mutex::default(),
            table: RwLock::default(),
            table_changed: watch::Sender::new(0),
            links: BackendLinks::new(settings.backend_tls.clone(), settings.memory),
            random: Mutex::new(Random::new(clock.now().0 ^ u64::from(std::process::id()))),
            budgets: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            changes_waiting: AtomicUsize::new(0),
            entered_at: AtomicU64::new(0),
            cold_starts: ColdStarts::default(),
            draining: AtomicBool::new(false),
            started: AtomicBool::new(false),
            metadata: Mutex::default(),
            spans: OnceLock::new(),
            started_at: clock.now(),
            settings,
            clock,
        });
        let saved = inner.settings.saved.as_ref().map(StateFile::read).unwrap_or_default();
        if !saved.is_empty() {
            tracing::info!(entries = saved.len(), "routes of the last run in use");
            let saved = Arc::new(saved);
            inner.rebuild_table(&saved);
            // The store may have lost it, and be about to get it back.
            *inner.retention.lock().unwrap_or_else(PoisonError::into_inner) =
                Retention::after(saved);
        }
        Frontend { inner }
    }

    /// Follows the state in `store`, which must be reachable once; afterwards the frontend works
    /// without it.
    pub async fn connect(&self, store: Arc<dyn Store>, keys: &Keys) -> Result<(), StoreError> {
        let entries = mirror::follow(store, keys.all()).await?;
        let first = self.inner.retain(&routing_entries(&entries.borrow())).0;
        self.inner.rebuild_table(&first);
        let (saved, changes) = watch::channel(first);
        if let Some(file) = self.inner.settings.saved.clone() {
            tokio::spawn(save(file, changes));
        }
        tokio::spawn(follow(Arc::downgrade(&self.inner), entries, saved));
        Ok(())
    }

    /// Publishes its addresses and reports its load for as long as the membership lives.
    pub fn join(
        &self,
        store: Arc<dyn Store>,
        keys: &Keys,
        record: &FrontendRecord,
    ) -> Arc<Membership> {
        let settings = &self.inner.settings;
        let membership = Arc::new(Membership::start(store, settings.lease));
        membership.put(keys.one(RecordKind::Frontend, &settings.name), encode(record));
        let (inner, weak) = (Arc::downgrade(&self.inner), Arc::downgrade(&membership));
        let mut reporter = LoadReporter::new(keys, &settings.name);
        tokio::spawn(async move {
            let mut ticks = tokio::time::interval(REPORT_INTERVAL);
            loop {
                let (Some(inner), Some(membership)) = (inner.upgrade(), weak.upgrade()) else {
                    return;
                };
                let report = inner.report();
                membership.put_together(reporter.next(inner.clock.now(), &report));
                drop(membership);
                // A request that starts to wait is reported at once.
                tokio::select! {
                    _ = ticks.tick() => {}
                    () = inner.cold_starts.demand.notified() => {}
                }
            }
        });
        membership
    }
}

/// The entries that routing, metrics and the console need: most changes in a cluster do not concern
/// a frontend.
fn routing_entries(entries: &KeyValues) -> KeyValues {
    let kinds = [
        RecordKind::Backend,
        RecordKind::State,
        RecordKind::Frontend,
        RecordKind::Model,
        RecordKind::Route,
        RecordKind::Query,
        RecordKind::Split,
        RecordKind::Signature,
        RecordKind::Canary,
    ];
    let kinds = kinds.map(RecordKind::folder_prefix);
    let mine = |key: &str| {
        matches!(key, "leader" | "plan" | "scaling")
            || kinds.iter().any(|prefix| key.starts_with(prefix))
    };
    let mine = entries.iter().filter(|(key, _)| mine(key));
    Arc::new(mine.map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// Saves entries when they have changed, until their sender is dropped.
async fn save(file: StateFile, mut entries: watch::Receiver<KeyValues>) {
    loop {
        let (file, latest) = (file.clone(), entries.borrow_and_update().clone());
        let written = tokio::task::spawn_blocking(move || file.write(&latest)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!(%error, "cannot save the routes");
        }
        // Many changes in a short time are saved together.
        tokio::time::sleep(SAVE_INTERVAL).await;
        if entries.changed().await.is_err() {
            return;
        }
    }
}

/// Rebuilds the table after every relevant change of the store.
async fn follow(
    inner: std::sync::Weak<Inner>,
    mut entries: watch::Receiver<KeyValues>,
    saved: watch::Sender<KeyValues>,
) {
    let mut last = saved.borrow().clone();
    loop {
        let pause = {
            let Some(inner) = inner.upgrade() else { return };
            let (seen, keeps) = inner.retain(&routing_entries(&entries.borrow_and_update()));
            if seen != last {
                inner.rebuild_table(&seen);
                saved.send_replace(seen.clone());
                last = seen;
            }
            if keeps { RETENTION_LOOK } else { Duration::MAX }
        };
        tokio::select! {
            changed = entries.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(pause) => {}
        }
    }
}

impl Inner {
    fn table(&self) -> Arc<RoutingTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The entries with what the store has lost, and whether there is such.
    fn retain(&self, entries: &KeyValues) -> (KeyValues, bool) {
        let mut retention = self.retention.lock().unwrap_or_else(PoisonError::into_inner);
        let merged = retention.merge(self.clock.now(), entries);
        (merged, retention.is_active())
    }

    fn rebuild_table(&self, entries: &KeyValues) {
        let snapshot = ClusterSnapshot::read_routes(entries);
        let now = self.clock.now();
        let table = Arc::new(RoutingTable::build(&snapshot, &self.table(), &self.links, now));
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = table;
        self.links.prune();
        self.table_changed.send_modify(|version| *version += 1);
    }

    fn report(&self) -> LoadReport {
        let now = self.clock.now();
        let table = self.table();
        let models = table.models.iter();
        let queries = table.queries.iter();
        let mut report = LoadReport {
            number: 0,
            models: models.map(|(name, e)| (name.clone(), e.meter.report(now))).collect(),
            queries: queries.map(|(name, q)| (name.clone(), q.meter.report(now))).collect(),
            ejected: self.ejected(now),
            canaries: self.canary_loads(&table),
            ..LoadReport::default()
        };
        let busy = self.in_flight.load(Ordering::Relaxed) > 0
            || self.changes_waiting.load(Ordering::Relaxed) > 0;
        let entered_at = Some(self.entered_at.load(Ordering::Relaxed)).filter(|at| *at > 0);
        let entered_at = entered_at.map(Nanos);
        self.cold_starts.fill(&mut report, now, busy, entered_at);
        report
    }

    /// Addresses of the backends that are ejected, as far as a report has space for them.
    fn ejected(&self, now: Nanos) -> Vec<String> {
        let is_ejected = |link: &Arc<BackendLink>| link.service(now).0 != Availability::Serving;
        let links = self.links.all();
        let mut ejected: Vec<String> =
            links.iter().filter(|link| is_ejected(link)).map(|link| link.address.clone()).collect();
        ejected.sort_unstable();
        ejected.truncate(AVOIDED_MAX);
        ejected
    }

    /// Ejections of each backend by reason, and whether it is ejected, for metrics.
    fn ejections(&self) -> Vec<(String, [u64; EjectionReason::ALL.len()], bool)> {
        let now = self.clock.now();
        let row = |link: Arc<BackendLink>| {
            let health = link.health();
            let is_ejected = health.availability(now) != Availability::Serving;
            (link.address.clone(), health.ejections(), is_ejected)
        };
        let mut rows: Vec<_> = self.links.all().into_iter().map(row).collect();
        rows.sort_unstable();
        rows
    }

    fn enter(&self) -> ApiResult<InFlightGuard<'_>> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::shutting_down());
        }
        self.entered_at.store(self.clock.now().0, Ordering::Relaxed);
        let before = self.in_flight.fetch_add(1, Ordering::Relaxed);
        let in_flight = InFlightGuard(&self.in_flight);
        if before >= self.settings.requests_max {
            return Err(ApiError::unavailable("too many requests in flight").retry_after(1));
        }
        Ok(in_flight)
    }

    async fn infer(
        &self,
        model: ModelRef<'_>,
        mut request: InferRequest,
        context: RequestContext,
    ) -> ApiResult<InferResponse> {
        request.options.trace = context.trace;
        let choice = context.canary;
        let table = self.table();
        let entry = match table.serving(model) {
            Ok(entry) => entry,
            Err(_) if self.can_wait(&table, model) => {
                return self.infer_cold(model, request, &table, choice).await;
            }
            Err(error) => return Err(error),
        };
        match self.enter() {
            Ok(_in_flight) => {
                // Where backends come and go, the last one may go before it answers.
                let again = table.scaling.is_some().then(|| request.clone());
                let reply = self.dispatch(model, request, 1, &table, entry, choice).await;
                let is_lost = |error: &ApiError| error.kind == ErrorKind::Unavailable;
                match (&reply, again) {
                    (Err(error), Some(again))
                        if is_lost(error) && self.can_wait(&self.table(), model) =>
                    {
                        self.try_infer_cold(model, again, choice).await
                    }
                    _ => reply,
                }
            }
            Err(error) => {
                entry.meter.arrive(1);
                entry.refuse(request.options.timeout, 1);
                Err(error)
            }
        }
    }

    /// Sends a request that counts as `count` requests of the model to one of its versions.
    async fn dispatch(
        &self,
        model: ModelRef<'_>,
        request: InferRequest,
        count: u64,
        table: &RoutingTable,
        entry: &ModelEntry,
        choice: CanaryChoice,
    ) -> ApiResult<InferResponse> {
        let arrived = self.clock.now();
        let call = Call { model, count, arrived };
        if model.version.is_some() {
            return self.dispatch_to_version(call, request, table, entry).await;
        }
        if entry.serving_canary().is_none() {
            return self.dispatch_to(call, request, table, entry).await;
        }
        let default = entry.record.config.timeout_ms.map(Nanos::from_millis);
        let deadline = request.options.timeout.or(default).map(|timeout| arrived + timeout);
        let attempt = |version| self.dispatch_to(call, request.clone(), table, version);
        self.with_canary(entry, choice, (arrived, deadline), attempt).await
    }

    /// Sends a request to exactly one version, and records its result.
    async fn dispatch_to(
        &self,
        call: Call<'_>,
        request: InferRequest,
        table: &RoutingTable,
        entry: &ModelEntry,
    ) -> ApiResult<InferResponse> {
        let Call { model, count, arrived } = call;
        entry.meter.arrive(count);
        let own = request.options.timeout;
        let reply = self.try_infer(model, request, count, arrived, table, entry).await;
        let took = self.clock.now() - arrived;
        match &reply {
            Ok(_) => {
                let objective = entry.record.config.timeout_ms.map(Nanos::from_millis);
                entry.meter.answer(took, objective, count);
                entry.count_answered(took, own, count);
            }
            Err(error) if is_refusal(error.kind) => entry.refuse(own, count),
            Err(_) => {}
        }
        canary::under_its_name(model.name, entry, reply)
    }

    async fn try_infer(
        &self,
        model: ModelRef<'_>,
        mut request: InferRequest,
        count: u64,
        arrived: Nanos,
        table: &RoutingTable,
        entry: &ModelEntry,
    ) -> ApiResult<InferResponse> {
        let default = entry.record.config.timeout_ms.map(Nanos::from_millis);
        let timeout = request.options.timeout.or(default);
        let deadline = timeout.map(|timeout| arrived + timeout);
        // Without a deadline no request is too late, and the queue capacity of the backends
        // applies.
        if let (Some(rate), Some(timeout)) = (entry.rate_max, timeout)
            && !entry.limit.admit(
                arrived,
                rate / table.frontends as f64,
                count,
                entry.is_underloaded(timeout),
            )
        {
            return Err(overloaded(model.name));
        }
        request.options.timeout = timeout;
        if let Inputs::Raw(bytes) = &request.inputs {
            let metadata = self.metadata(entry).await?;
            request.inputs = raw_body::tensor_of(model.name, &metadata, bytes.clone())?;
        }
        // A canary is the only version of its name.
        let version = model.version.filter(|_| entry.served == model.name);
        let trace = request.options.trace;
        let body = encode_request(&entry.served, version, request)?;
        let message = SentMessage { body, trace };
        let reply = self.route(&entry.served, entry, message, deadline).await?;
        decode_response(reply)
    }

    /// The metadata of a model or canary, from one of its backends.
    async fn metadata(&self, entry: &ModelEntry) -> ApiResult<Arc<ModelMetadata>> {
        let model = entry.served.as_str();
        let key = (model.to_string(), entry.record.version);
        let known = self.metadata.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(metadata) = known {
            return Ok(metadata);
        }
        if let (true, Some(signature)) = (entry.targets.is_empty(), &entry.signature) {
            let name = split_served(model).0;
            return Ok(Arc::new(signature.metadata(name, entry.record.version)));
        }
        let request = proto::ModelMetadataRequest { name: model.to_string(), ..Default::default() };
        let reply = self
            .call_any_backend(model, entry, |mut client| {
                let request = request.clone();
                async move { client.model_metadata(request).await }
            })
            .await?;
        let metadata = ModelMetadata::from(reply);
        let name = split_served(model).0.to_string();
        let metadata = Arc::new(ModelMetadata { name, ..metadata });
        let mut all = self.metadata.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= METADATA_MAX {
            all.clear();
        }
        all.insert(key, metadata.clone());
        Ok(metadata)
    }

    /// Calls the model's backends one after another until one replies, those that serve first.
    async fn call_any_backend<T, F>(
        &self,
        model: &str,
        entry: &ModelEntry,
        call: impl Fn(GrpcClient) -> F,
    ) -> ApiResult<T>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let mut last = no_backend(model);
        let now = self.clock.now();
        let mut targets: Vec<&RouteTarget> = entry.targets.iter().collect();
        targets.sort_by_key(|target| target.link.service(now).0 != Availability::Serving);
        let others = targets.len();
        for (index, target) in targets.into_iter().enumerate() {
            let limit = match index + 1 == others {
                true => self.settings.timeout,
                false => self.settings.timeout.min(METADATA_TIMEOUT),
            };
            let reply = tokio::time::timeout(limit, call(target.link.client()));
            match reply.await {
                Ok(Ok(reply)) => return Ok(reply.into_inner()),
                Ok(Err(status)) => last = error_of(&status),
                Err(_) => last = deadline_exceeded(model),
            }
        }
        Err(last)
    }
}

type GrpcClient =
    api::proto::grpc_inference_service_client::GrpcInferenceServiceClient<http2::Http2Connection>;

fn is_refusal(kind: ErrorKind) -> bool {
    use ErrorKind::{BadGateway, DeadlineExceeded, Internal, Unavailable};
    matches!(kind, Unavailable | DeadlineExceeded | Internal | BadGateway)
}

fn no_backend(model: &str) -> ApiError {
    ApiError::unavailable(format!("no backend serves model '{model}' now")).retry_after(1)
}

/// How a request is refused that no backend has seen.
const OVERLOADED: &str = "gets more requests than the cluster can serve in time";

fn overloaded(model: &str) -> ApiError {
    ApiError::unavailable(format!("model '{model}' {OVERLOADED}")).retry_after(1)
}

/// Whether this frontend has refused a request: that says nothing about the version.
fn is_overload(error: &ApiError) -> bool {
    error.kind == ErrorKind::Unavailable && error.message.ends_with(OVERLOADED)
}

/// A request of a model as it arrived.
#[derive(Clone, Copy)]
struct Call<'a> {
    model: ModelRef<'a>,
    /// As how many requests it counts.
    count: u64,
    arrived: Nanos,
}

fn deadline_exceeded(model: &str) -> ApiError {
    let message = format!("model '{model}': the deadline passed before the reply");
    ApiError::new(ErrorKind::DeadlineExceeded, message)
}
