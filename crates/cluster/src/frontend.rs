//! The frontend: the same API as a single node, served by the cluster's backends.
//!
//! Requests are routed by a table in memory, so the data path needs neither the store nor the
//! scheduler. A request is one future from its arrival to its reply; whatever happens to backends,
//! it gives exactly one reply.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use api::client::{decode_response, encode_request, error_of, set_deadline};
use api::error::ApiResult;
use api::{
    ApiError, ErrorKind, InferRequest, InferResponse, Inputs, ModelMetadata, ModelRef,
    ServerMetadata, proto,
};
use base::{Clock, Nanos, Random};
use tokio::sync::watch;

use crate::balance::batch_progress::BatchPlan;
use crate::balance::{BackendCandidate, choose, depth, spare};
use crate::load_reports::LoadReporter;
use crate::membership::Membership;
use crate::model_store::{ModelRecords, ModelStore};
use crate::record::{FrontendRecord, Keys, LoadReport, RecordKind, encode};
use crate::retention::Retention;
use crate::snapshot::ClusterSnapshot;
use crate::store::mirror::{self, KeyValues};
use crate::store::{Store, StoreError};
use crate::tls::ClientTls;

pub mod backend_link;
mod classify;
pub mod http2;
pub mod meter;
mod queries;
mod query_executor;
mod raw_body;
pub mod routing_table;
mod service;
mod status;

use backend_link::BackendLinks;
use routing_table::{ModelEntry, RouteTarget, RoutingTable};

/// How often load is reported.
const REPORT_INTERVAL: Duration = Duration::from_millis(1000);
/// Time beyond the deadline in which a backend may report that it missed it.
const GRACE: Duration = Duration::from_millis(50);
/// A second attempt needs at least this much remaining time.
const RETRY_TIME_MIN: Nanos = Nanos::from_micros(500);
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
}

/// A frontend, as a service. Cloning shares it.
#[derive(Clone)]
pub struct Frontend {
    inner: Arc<Inner>,
}

struct Inner {
    settings: FrontendSettings,
    clock: Arc<dyn Clock>,
    records: ModelRecords,
    table: RwLock<Arc<RoutingTable>>,
    /// Incremented with every new table.
    table_changed: watch::Sender<u64>,
    links: BackendLinks,
    random: Mutex<Random>,
    in_flight: AtomicUsize,
    draining: AtomicBool,
    /// Whether all models have been ready once.
    started: AtomicBool,
    metadata: Mutex<std::collections::HashMap<(String, u64), Arc<ModelMetadata>>>,
}

/// Counts one request in flight while it lives.
struct InFlightGuard<'a>(&'a AtomicUsize);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One request at a backend. Dropping it records that the request has ended, for whatever reason.
struct SentRequest<'a> {
    target: &'a RouteTarget,
    plan: BatchPlan,
    clock: &'a dyn Clock,
    given_up: bool,
}

impl<'a> SentRequest<'a> {
    fn new(target: &'a RouteTarget, frontends: usize, clock: &'a dyn Clock) -> SentRequest<'a> {
        let plan = target.plan(frontends);
        target.outstanding.send(clock.now(), plan);
        SentRequest { target, plan, clock, given_up: false }
    }
}

impl Drop for SentRequest<'_> {
    fn drop(&mut self) {
        self.target.outstanding.settle(self.clock.now(), self.plan, self.given_up);
    }
}

impl Frontend {
    /// Starts a frontend on the state in `store`, which must be reachable once; afterwards the
    /// frontend works without it.
    pub async fn start(
        store: Arc<dyn Store>,
        keys: Keys,
        clock: Arc<dyn Clock>,
        settings: FrontendSettings,
    ) -> Result<Frontend, StoreError> {
        let entries = mirror::follow(store.clone(), keys.all()).await?;
        let inner = Arc::new(Inner {
            records: ModelRecords::new(store, keys),
            table: RwLock::default(),
            table_changed: watch::Sender::new(0),
            links: BackendLinks::new(settings.backend_tls.clone()),
            random: Mutex::new(Random::new(clock.now().0 ^ u64::from(std::process::id()))),
            in_flight: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            started: AtomicBool::new(false),
            metadata: Mutex::default(),
            settings,
            clock,
        });
        inner.rebuild_table(&entries.borrow());
        tokio::spawn(follow(Arc::downgrade(&inner), entries));
        Ok(Frontend { inner })
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
                ticks.tick().await;
                let (Some(inner), Some(membership)) = (inner.upgrade(), weak.upgrade()) else {
                    return;
                };
                let report = inner.report();
                membership.put_together(reporter.next(inner.clock.now(), &report));
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
    ];
    let kinds = kinds.map(RecordKind::folder_prefix);
    let mine = |key: &str| {
        matches!(key, "leader" | "plan" | "scaling")
            || kinds.iter().any(|prefix| key.starts_with(prefix))
    };
    let mine = entries.iter().filter(|(key, _)| mine(key));
    Arc::new(mine.map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// Rebuilds the table after every relevant change of the store.
async fn follow(inner: std::sync::Weak<Inner>, mut entries: watch::Receiver<KeyValues>) {
    let mut retention = Retention::default();
    let mut last = routing_entries(&entries.borrow());
    loop {
        {
            let Some(inner) = inner.upgrade() else { return };
            let seen = routing_entries(&entries.borrow_and_update());
            let seen = retention.merge(inner.clock.now(), &seen);
            if seen != last {
                inner.rebuild_table(&seen);
                last = seen;
            }
        }
        let pause = if retention.is_active() { RETENTION_LOOK } else { Duration::MAX };
        tokio::select! {
            changed = entries.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Result of one attempt.
enum Attempt {
    Done(Box<proto::ModelInferResponse>),
    /// Another backend may succeed.
    RetryElsewhere(ApiError),
    /// The backend dropped it early in favour of other requests; an idle one may still reply in
    /// time.
    GivenUp(ApiError),
    Final(ApiError),
}

impl Inner {
    fn table(&self) -> Arc<RoutingTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn rebuild_table(&self, entries: &KeyValues) {
        let snapshot = ClusterSnapshot::read_routes(entries);
        let table = Arc::new(RoutingTable::build(&snapshot, &self.table(), &self.links));
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = table;
        self.links.prune();
        self.table_changed.send_modify(|version| *version += 1);
    }

    fn report(&self) -> LoadReport {
        let now = self.clock.now();
        let table = self.table();
        let models = table.models.iter();
        let queries = table.queries.iter();
        LoadReport {
            number: 0,
            models: models.map(|(name, e)| (name.clone(), e.meter.report(now))).collect(),
            queries: queries.map(|(name, q)| (name.clone(), q.meter.report(now))).collect(),
        }
    }

    fn enter(&self) -> ApiResult<InFlightGuard<'_>> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::shutting_down());
        }
        let before = self.in_flight.fetch_add(1, Ordering::Relaxed);
        let in_flight = InFlightGuard(&self.in_flight);
        if before >= self.settings.requests_max {
            return Err(ApiError::unavailable("too many requests in flight").retry_after(1));
        }
        Ok(in_flight)
    }

    async fn infer(&self, model: ModelRef<'_>, request: InferRequest) -> ApiResult<InferResponse> {
        let table = self.table();
        let entry = table.serving(model)?;
        match self.enter() {
            Ok(_in_flight) => self.dispatch(model, request, 1, &table, entry).await,
            Err(error) => {
                entry.meter.arrive(1);
                entry.meter.refuse(1);
                Err(error)
            }
        }
    }

    /// Sends a request that counts as `count` requests of the model, and records its result.
    async fn dispatch(
        &self,
        model: ModelRef<'_>,
        request: InferRequest,
        count: u64,
        table: &RoutingTable,
        entry: &ModelEntry,
    ) -> ApiResult<InferResponse> {
        let arrived = self.clock.now();
        entry.meter.arrive(count);
        let reply = self.try_infer(model, request, count, arrived, table, entry).await;
        match &reply {
            Ok(_) => {
                let objective = entry.record.config.timeout_ms.map(Nanos::from_millis);
                entry.meter.answer(self.clock.now() - arrived, objective, count);
            }
            Err(error) if is_refusal(error.kind) => entry.meter.refuse(count),
            Err(_) => {}
        }
        reply
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
            let metadata = self.metadata(model.name, entry).await?;
            request.inputs = raw_body::tensor_of(model.name, &metadata, bytes.clone())?;
        }
        let message = encode_request(model.name, model.version, request)?;
        let reply = self.route(model.name, entry, message, deadline).await?;
        decode_response(reply)
    }

    /// Sends to a backend, and to a second one where the first fails and time remains.
    async fn route(
        &self,
        model: &str,
        entry: &ModelEntry,
        mut message: proto::ModelInferRequest,
        deadline: Option<Nanos>,
    ) -> ApiResult<proto::ModelInferResponse> {
        let first = self.choose(entry, None).ok_or_else(|| no_backend(model))?;
        self.check_wait(model, entry, first, deadline)?;
        let (error, given_up) =
            match self.attempt(&entry.targets[first], message.clone(), deadline).await {
                Attempt::Done(reply) => return Ok(*reply),
                Attempt::Final(error) => return Err(error),
                Attempt::RetryElsewhere(error) => (error, false),
                Attempt::GivenUp(error) => (error, true),
            };
        let now = self.clock.now();
        let left = deadline.map(|deadline| Nanos(deadline.0.saturating_sub(now.0)));
        if left.is_some_and(|left| left < RETRY_TIME_MIN) {
            return Err(deadline_exceeded(model));
        }
        // The table may have changed, and name other backends.
        let table = self.table();
        let fresh = table.models.get(model).map_or(entry, |entry| entry);
        let tried = &entry.targets[first].link.address;
        let second = match given_up {
            true => self.spare(fresh, tried),
            false => self.choose(fresh, Some(tried)),
        };
        let Some(second) = second else { return Err(error) };
        entry.meter.retry();
        if let Some(left) = left {
            set_deadline(&mut message, left);
        }
        match self.attempt(&fresh.targets[second], message, deadline).await {
            Attempt::Done(reply) => Ok(*reply),
            Attempt::RetryElsewhere(error) | Attempt::GivenUp(error) | Attempt::Final(error) => {
                Err(error)
            }
        }
    }

    /// The model's backends as candidates, without the one that was tried.
    fn candidates(
        &self,
        entry: &ModelEntry,
        tried: Option<&str>,
    ) -> (Vec<usize>, Vec<BackendCandidate>) {
        let now = self.clock.now();
        // Other frontends send their share.
        let frontends = self.table().frontends;
        let depth = |target: &RouteTarget| depth(target.batch as usize).div_ceil(frontends);
        let untried =
            |(_, target): &(usize, &RouteTarget)| tried != Some(target.link.address.as_str());
        let candidate = |(index, target): (usize, &RouteTarget)| {
            let candidate = BackendCandidate {
                weight: target.weight,
                outstanding: target.outstanding.count(),
                depth: depth(target),
                down: target.link.is_down(now),
                progress: target.progress(frontends),
            };
            (index, candidate)
        };
        entry.targets.iter().enumerate().filter(untried).map(candidate).unzip()
    }

    fn choose(&self, entry: &ModelEntry, tried: Option<&str>) -> Option<usize> {
        let (indices, candidates) = self.candidates(entry, tried);
        let busy = |index: usize| entry.busy(indices[index]);
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        choose(&candidates, self.clock.now(), busy, &mut random).map(|chosen| indices[chosen])
    }

    /// A backend to which this frontend has sent nothing.
    fn spare(&self, entry: &ModelEntry, tried: &str) -> Option<usize> {
        let (indices, candidates) = self.candidates(entry, Some(tried));
        spare(&candidates, |index| entry.busy(indices[index])).map(|chosen| indices[chosen])
    }

    /// Refuses at once a request that would wait beyond its deadline behind those that this
    /// frontend has sent already.
    fn check_wait(
        &self,
        model: &str,
        entry: &ModelEntry,
        chosen: usize,
        deadline: Option<Nanos>,
    ) -> ApiResult<()> {
        let Some(deadline) = deadline else { return Ok(()) };
        let target = &entry.targets[chosen];
        let batches = target.outstanding.count() / target.batch.max(1) as usize;
        let cycle_ms = target.cycle_ms.max(target.batch_ms);
        let wait_ms = batches as f64 * cycle_ms;
        let left_ms = deadline.0.saturating_sub(self.clock.now().0) as f64 / 1e6;
        if target.batch_ms > 0.0 && batches > 0 && wait_ms > left_ms {
            return Err(overloaded(model));
        }
        Ok(())
    }

    async fn attempt(
        &self,
        target: &RouteTarget,
        message: proto::ModelInferRequest,
        deadline: Option<Nanos>,
    ) -> Attempt {
        target.link.outstanding.fetch_add(1, Ordering::Relaxed);
        let _sent = InFlightGuard(&target.link.outstanding);
        let mut plan = SentRequest::new(target, self.table().frontends, self.clock.as_ref());
        let now = self.clock.now();
        let left = match deadline {
            Some(deadline) => Duration::from(Nanos(deadline.0.saturating_sub(now.0))) + GRACE,
            None => self.settings.timeout,
        };
        let name = message.model_name.clone();
        let mut client = target.link.client();
        let status = match tokio::time::timeout(left, client.model_infer(message)).await {
            Ok(Ok(reply)) => {
                target.link.recover();
                return Attempt::Done(Box::new(reply.into_inner()));
            }
            Ok(Err(status)) => status,
            Err(_) => return Attempt::Final(deadline_exceeded(&name)),
        };
        // A status with a source was created on this side: the backend did not reply.
        if std::error::Error::source(&status).is_some() {
            target.link.fail(self.clock.now());
            let message = format!("model '{name}': its backend was lost: {}", status.message());
            return Attempt::RetryElsewhere(ApiError::unavailable(message).retry_after(1));
        }
        let error = error_of(&status);
        match error.kind {
            ErrorKind::Unavailable | ErrorKind::NotFound => {
                Attempt::RetryElsewhere(ApiError { kind: ErrorKind::Unavailable, ..error })
            }
            ErrorKind::DeadlineExceeded => {
                plan.given_up = true;
                Attempt::GivenUp(error)
            }
            _ => Attempt::Final(error),
        }
    }

    /// The metadata of a model, from one of its backends.
    async fn metadata(&self, model: &str, entry: &ModelEntry) -> ApiResult<Arc<ModelMetadata>> {
        let key = (model.to_string(), entry.record.version);
        let known = self.metadata.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        if let Some(metadata) = known {
            return Ok(metadata);
        }
        let request = proto::ModelMetadataRequest { name: model.to_string(), ..Default::default() };
        let reply = self
            .call_any_backend(model, entry, |mut client| {
                let request = request.clone();
                async move { client.model_metadata(request).await }
            })
            .await?;
        let metadata = Arc::new(ModelMetadata::from(reply));
        let mut all = self.metadata.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= METADATA_MAX {
            all.clear();
        }
        all.insert(key, metadata.clone());
        Ok(metadata)
    }

    /// Calls the model's backends one after another until one replies.
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
        for target in &entry.targets {
            let reply = tokio::time::timeout(self.settings.timeout, call(target.link.client()));
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
    matches!(kind, ErrorKind::Unavailable | ErrorKind::DeadlineExceeded | ErrorKind::Internal)
}

fn no_backend(model: &str) -> ApiError {
    ApiError::unavailable(format!("no backend serves model '{model}' now")).retry_after(1)
}

fn overloaded(model: &str) -> ApiError {
    ApiError::unavailable(format!(
        "model '{model}' gets more requests than the cluster can serve in time"
    ))
    .retry_after(1)
}

fn deadline_exceeded(model: &str) -> ApiError {
    let message = format!("model '{model}': the deadline passed before the reply");
    ApiError::new(ErrorKind::DeadlineExceeded, message)
}
