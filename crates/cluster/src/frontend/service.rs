//! The inference API, served by the cluster.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::error::ApiResult;
use api::metadata::{BatchStats, DurationStat};
use api::monitor::Monitor;
use api::trace::SpanSink;
use api::{
    ApiError, CanaryChoice, CanaryOptions, CanaryStatus, Classification, ClassifyRequest,
    ErrorKind, IndexEntry, InferRequest, InferResponse, InferenceService, ModelMetadata, ModelRef,
    ModelState, ModelStatistics, QueryMetadata, RegisterRequest, Registered, RequestContext,
    ServerMetadata, ServiceFuture, proto,
};
use base::Nanos;

use super::monitor::FrontendMonitor;
use super::routing_table::{ModelEntry, RoutingTable};
use super::status;
use super::{Frontend, InFlightGuard, Inner, classify, deadline_exceeded, no_backend};
use crate::balance::backend_health::EjectionReason;
use crate::candidate::CandidateError;
use crate::record::canary::split_served;
use crate::record::{LoadReport, ModelLoad, ScalingRecord, validation};
use crate::store::{StoreError, health};

/// Time limit for backends to load or unload a model.
pub(super) const LOAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How often the end of a drain is checked.
const DRAIN_POLL: Duration = Duration::from_millis(10);

/// What the index says of a model while there are no backends.
const AT_ZERO: &str = "scaled to zero: the first request starts a backend";

pub(super) fn store_error(error: StoreError) -> ApiError {
    match error {
        StoreError::Refused(why) => {
            ApiError::internal(format!("the cluster's store refuses: {why}"))
        }
        error => ApiError::unavailable(error.to_string()).retry_after(1),
    }
}

pub(super) fn candidate_error(error: CandidateError) -> ApiError {
    let text = |why: String| format!("the model is not registered: {why}");
    match error {
        CandidateError::Refused(why) => ApiError::invalid(text(why)),
        CandidateError::Unsupported(why) => ApiError::unsupported(text(why)),
        CandidateError::Unchecked(why) => ApiError::unavailable(text(why)).retry_after(10),
        CandidateError::Store(error) => store_error(error),
    }
}

impl Inner {
    /// Waits until `done` holds for the model `name`; an error from it ends the wait.
    pub(super) async fn wait_for(
        &self,
        name: &str,
        done: impl Fn(Option<&ModelEntry>) -> ApiResult<bool>,
    ) -> ApiResult<()> {
        self.wait_while(name, |table| done(table.models.get(name).map(|entry| &**entry))).await
    }

    /// Waits until `done` holds for the table; `name` is for the error message.
    pub(super) async fn wait_for_table(
        &self,
        name: &str,
        done: impl Fn(&RoutingTable) -> bool,
    ) -> ApiResult<()> {
        self.wait_while(name, |table| Ok(done(table))).await
    }

    async fn wait_while(
        &self,
        name: &str,
        done: impl Fn(&RoutingTable) -> ApiResult<bool>,
    ) -> ApiResult<()> {
        let mut table_changes = self.table_changed.subscribe();
        // A registered model needs a backend, and then some time until it is requested.
        self.changes_waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = InFlightGuard(&self.changes_waiting);
        self.entered_at.store(self.clock.now().0, Ordering::Relaxed);
        let wait = async {
            loop {
                if done(&self.table())? {
                    return Ok(());
                }
                if table_changes.changed().await.is_err() {
                    return Err(ApiError::shutting_down());
                }
            }
        };
        let slow = || ApiError::unavailable(format!("'{name}' takes too long")).retry_after(10);
        tokio::time::timeout(LOAD_TIMEOUT, wait).await.unwrap_or_else(|_| Err(slow()))
    }

    pub(super) async fn wait_until_ready(&self, name: &str, version: u64) -> ApiResult<()> {
        self.wait_for(name, |entry| {
            let Some(entry) = entry.filter(|entry| entry.record.version >= version) else {
                return Ok(false);
            };
            match &entry.failure {
                Some(why) if !entry.serves(version) => {
                    Err(ApiError::unavailable(format!("cannot load model '{name}': {why}")))
                }
                _ => Ok(entry.state().0 == ModelState::Ready && entry.serves(version)),
            }
        })
        .await
    }

    async fn load(&self, name: &str) -> ApiResult<()> {
        let record = self.records.enable(name, true).await.map_err(store_error)?;
        let record = record.ok_or_else(|| {
            ApiError::not_found(format!("cannot load model '{name}': it is not registered"))
        })?;
        self.wait_until_ready(name, record.version).await
    }

    async fn unload(&self, name: &str) -> ApiResult<()> {
        let record = self.records.enable(name, false).await.map_err(store_error)?;
        if record.is_none() {
            return Err(ApiError::not_found(format!("model '{name}' is not loaded")));
        }
        self.wait_for(name, |entry| Ok(entry.is_none_or(|entry| entry.targets.is_empty()))).await
    }

    /// Waits until a backend serves exactly `version`, to which the record was set.
    pub(super) async fn wait_until_served(&self, name: &str, version: u64) -> ApiResult<()> {
        let seen = AtomicBool::new(false);
        self.wait_for(name, |entry| {
            let Some(entry) = entry.filter(|entry| entry.record.version == version) else {
                return match seen.load(Ordering::Relaxed) {
                    true => Err(ApiError::unavailable(format!("'{name}' was changed meanwhile"))),
                    false => Ok(false),
                };
            };
            seen.store(true, Ordering::Relaxed);
            // Schedulers of an older release do not say which version.
            let is_served = |v: u64| v == version || v == 0;
            let served = entry.targets.iter().any(|target| is_served(target.version));
            match &entry.failure {
                Some(why) if !served => {
                    Err(ApiError::unavailable(format!("cannot load model '{name}': {why}")))
                }
                _ => Ok(served || !entry.record.enabled),
            }
        })
        .await
    }

    /// Puts an older version of a model in service. A backend compiles and loads it first, and if
    /// that fails, the newer one stays.
    async fn roll_back(&self, name: &str, version: Option<u64>) -> ApiResult<Registered> {
        let before = self.records.find(name).await.map_err(store_error)?;
        let before = before
            .ok_or_else(|| ApiError::not_found(format!("there is no registered model '{name}'")))?;
        let missing = || {
            ApiError::not_found(match version {
                Some(version) => format!("there is no version {version} of '{name}'"),
                None => format!("there is no version of '{name}' before {}", before.version),
            })
        };
        let target = match version == Some(before.version) {
            true => None,
            false => Some(before.rollback_target(version).ok_or_else(missing)?),
        };
        let version = target.map_or(before.version, |target| target.version);
        if let Some(target) = target {
            let candidate = (name, target.digest.as_str(), target.bytes);
            self.records
                .propose(candidate, &target.config, LOAD_TIMEOUT)
                .await
                .map_err(candidate_error)?;
            let changed = self.records.roll_back(name, version).await.map_err(store_error)?;
            changed.ok_or_else(missing)?;
        }
        if let Err(error) = self.wait_until_served(name, version).await {
            self.records.restore(name, version, Some(before)).await.map_err(store_error)?;
            return Err(error);
        }
        Ok(Registered {
            name: name.to_string(),
            version: version.to_string(),
            state: ModelState::Ready,
        })
    }

    async fn classify(
        &self,
        request: ClassifyRequest,
        choice: CanaryChoice,
    ) -> ApiResult<Classification> {
        let model = ModelRef { name: &request.model, version: None };
        let table = self.table();
        if let Err(error) = table.serving(model)
            && !self.can_wait(&table, model)
        {
            return Err(error);
        }
        let _in_flight = self.enter()?;
        let arrived = self.clock.now();
        let table = self.wait_for_choice(model, choice, arrived, None).await?;
        let entry = table.serving(model)?;
        let attempt = |version| self.classify_with(version, &request, arrived);
        self.with_canary(entry, choice, (arrived, None), attempt).await
    }

    /// Classifies with exactly one version.
    async fn classify_with(
        &self,
        entry: &ModelEntry,
        request: &ClassifyRequest,
        arrived: Nanos,
    ) -> ApiResult<Classification> {
        entry.meter.arrive(1);
        let mut last = no_backend(&request.model);
        let mut tried: Option<String> = None;
        let named = ClassifyRequest { model: entry.served.clone(), ..request.clone() };
        for _ in 0..2 {
            let Some(chosen) = self.choose_serving(entry, tried.as_deref()) else { break };
            let target = &entry.targets[chosen];
            let reply = classify::send(&target.http, self.settings.backend_tls.as_ref(), &named);
            match tokio::time::timeout(self.settings.timeout, reply).await {
                Ok(Ok(reply)) => {
                    let now = self.clock.now();
                    self.note_answered(now, &request.model);
                    entry.meter.answer(now - arrived, None, 1);
                    entry.count_answered(now - arrived, None, 1);
                    return Ok(Classification { model: request.model.clone(), ..reply });
                }
                Ok(Err(error)) if error.kind == ErrorKind::Unavailable => last = error,
                Ok(Err(error)) => return Err(error),
                Err(_) => last = deadline_exceeded(&request.model),
            }
            tried = Some(target.link.address.clone());
        }
        entry.refuse(None, 1);
        Err(last)
    }

    async fn statistics(&self, model: Option<ModelRef<'_>>) -> ApiResult<Vec<ModelStatistics>> {
        let table = self.table();
        let entries: Vec<&Arc<ModelEntry>> = match model {
            // A version alone, or all versions of the model.
            Some(model) => {
                let entry = table.serving(model)?;
                let canary = entry.canary.as_ref().filter(|_| model.version.is_none());
                [entry].into_iter().chain(canary.map(|canary| &canary.entry)).collect()
            }
            None => table.models.values().collect(),
        };
        let mut all: BTreeMap<(String, String), ModelStatistics> = BTreeMap::new();
        for entry in entries {
            let name = split_served(&entry.served).0;
            for target in &entry.targets {
                let request = proto::ModelStatisticsRequest {
                    name: entry.served.clone(),
                    ..Default::default()
                };
                let mut client = target.link.client();
                let reply = client.model_statistics(request);
                // A backend that does not reply is skipped.
                let Ok(Ok(reply)) = tokio::time::timeout(Duration::from_secs(2), reply).await
                else {
                    continue;
                };
                for stats in reply.into_inner().model_stats {
                    let stats =
                        ModelStatistics { name: name.to_string(), ..ModelStatistics::from(stats) };
                    let key = (stats.name.clone(), stats.version.clone());
                    match all.get_mut(&key) {
                        Some(sum) => add(sum, &stats),
                        None => {
                            all.insert(key, stats);
                        }
                    }
                }
            }
        }
        Ok(all.into_values().collect())
    }

    fn index(&self, only_ready: bool) -> Vec<IndexEntry> {
        let table = self.table();
        let row = |(name, entry): (&String, &Arc<ModelEntry>)| {
            let (state, reason) = match table.is_at_zero(entry) {
                true => (ModelState::Ready, AT_ZERO.to_string()),
                false => entry.state(),
            };
            let version = entry.record.version;
            let (name, canary) = split_served(name);
            let reason = match (canary, reason.is_empty()) {
                // What is promoted has a row already.
                (Some(_), _) if table.is_in_force(name, version) => return None,
                (Some(_), true) => "canary".to_string(),
                (Some(_), false) => format!("canary: {reason}"),
                (None, _) => reason,
            };
            let (name, version) = (name.to_string(), version.to_string());
            Some(IndexEntry { name, version, state: Some(state), reason })
        };
        let mut rows: Vec<IndexEntry> = table.models.iter().filter_map(row).collect();
        rows.retain(|row| !only_ready || row.state == Some(ModelState::Ready));
        // The version in force comes first.
        let order = |row: &IndexEntry| (row.name.clone(), row.reason.starts_with("canary"));
        rows.sort_by_key(order);
        rows
    }
}

/// Scaling metrics, where the leading scheduler scales backends; every frontend exports the same.
fn write_scaling_metrics(text: &mut String, scaling: Option<&ScalingRecord>) {
    let Some(scaling) = scaling else { return };
    let (wanted, present) = (f64::from(scaling.wanted), scaling.present as f64);
    let values = [
        ("backends_wanted", "gauge", "Backends that the load needs", wanted),
        ("backends_present", "gauge", "Scaled backends that have joined", present),
        ("scale_errors_total", "counter", "Failures to scale backends", scaling.errors as f64),
    ];
    for (name, kind, help, value) in values {
        let name = format!("atoll_cluster_{name}");
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
    }
}

/// The labels of a model, or of its canary, which has the version as well.
fn labels(served: &str) -> String {
    match split_served(served) {
        (model, None) => format!("model=\"{model}\""),
        (model, Some(version)) => format!("model=\"{model}\",version=\"{version}\""),
    }
}

/// Requests with an SLO or a deadline, by whether they were answered within it.
fn write_slo_metrics(text: &mut String, table: &RoutingTable) {
    let name = "atoll_slo_requests_total";
    let help = "Requests with an SLO or a deadline, by whether they were answered within it";
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
    let models: BTreeMap<_, _> = table.models.iter().collect();
    for (model, entry) in models {
        let counts = entry.meter.live.read();
        for (result, count) in [("kept", counts.kept), ("missed", counts.missed)] {
            let _ = writeln!(text, "{name}{{{},result=\"{result}\"}} {count}", labels(model));
        }
    }
}

/// Hedges of each model, and ejections of each backend.
fn write_attempt_metrics(text: &mut String, frontend: &Inner) {
    let name = "atoll_cluster_hedges";
    let help = "Requests that a second backend got before the first one replied";
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
    let table = frontend.table();
    let models: BTreeMap<_, _> = table.models.iter().collect();
    for (model, entry) in models {
        let _ = writeln!(text, "{name}{{{}}} {}", labels(model), entry.meter.hedged());
    }
    let rows = frontend.ejections();
    let name = "atoll_cluster_ejections";
    let help = "Times that requests avoided a backend because of its replies";
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
    for (backend, ejections, _) in &rows {
        for (reason, count) in EjectionReason::ALL.iter().zip(ejections) {
            let reason = reason.as_str();
            let labels = format!("backend=\"{backend}\",reason=\"{reason}\"");
            let _ = writeln!(text, "{name}{{{labels}}} {count}");
        }
    }
    let name = "atoll_cluster_backend_ejected";
    let _ = writeln!(text, "# HELP {name} Whether a backend is ejected\n# TYPE {name} gauge");
    for (backend, _, ejected) in &rows {
        let _ = writeln!(text, "{name}{{backend=\"{backend}\"}} {}", u8::from(*ejected));
    }
}

/// Metrics of the plan in effect, once there is one; every frontend exports the same.
fn write_plan_metrics(text: &mut String, summary: &serde_json::Value) {
    let values = [
        ("epoch", "atoll_cluster_plan_epoch", "Number of the plan in effect"),
        ("used", "atoll_cluster_plan_backends", "Backends that serve a model"),
        ("bound", "atoll_cluster_plan_backends_bound", "Lower bound on the number of backends"),
        ("scale", "atoll_cluster_plan_scale", "Planned rates over observed ones"),
    ];
    for (key, name, help) in values {
        if let Some(value) = summary[key].as_f64() {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        }
    }
}

fn write_query_metrics(text: &mut String, report: &LoadReport) {
    let metrics: [MetricFamily; 5] = [
        ("atoll_query_requests", "counter", "Query requests received", |l| l.arrived as f64),
        ("atoll_query_success", "counter", "Query requests answered with outputs", |l| {
            l.answered as f64
        }),
        ("atoll_query_late", "counter", "Replies after the SLO", |l| l.late as f64),
        ("atoll_query_refused", "counter", "Query requests refused or cancelled", |l| {
            l.refused as f64
        }),
        ("atoll_query_p99_seconds", "gauge", "99th percentile of recent latencies", |l| {
            l.p99_ms / 1e3
        }),
    ];
    if report.queries.is_empty() {
        return;
    }
    for (name, kind, help, value) in metrics {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (query, load) in &report.queries {
            let _ = writeln!(text, "{name}{{query=\"{query}\"}} {}", value(&load.requests));
        }
    }
    let name = "atoll_query_stage_p99_seconds";
    let _ = writeln!(text, "# HELP {name} 99th percentile of a stage\n# TYPE {name} gauge");
    for (query, load) in &report.queries {
        for (stage, times) in &load.stages {
            let seconds = times.p99_ms / 1e3;
            let _ = writeln!(text, "{name}{{query=\"{query}\",stage=\"{stage}\"}} {seconds}");
        }
    }
}

/// A metric: its name, kind and help, and its value for a model.
type MetricFamily = (&'static str, &'static str, &'static str, fn(&ModelLoad) -> f64);

fn add(sum: &mut ModelStatistics, other: &ModelStatistics) {
    let plus = |a: &mut DurationStat, b: DurationStat| {
        a.count += b.count;
        a.ns += b.ns;
    };
    sum.last_inference = sum.last_inference.max(other.last_inference);
    sum.inference_count += other.inference_count;
    sum.execution_count += other.execution_count;
    let (a, b) = (&mut sum.inference_stats, &other.inference_stats);
    for (a, b) in [
        (&mut a.success, b.success),
        (&mut a.fail, b.fail),
        (&mut a.queue, b.queue),
        (&mut a.compute_input, b.compute_input),
        (&mut a.compute_infer, b.compute_infer),
        (&mut a.compute_output, b.compute_output),
        (&mut a.cache_hit, b.cache_hit),
        (&mut a.cache_miss, b.cache_miss),
    ] {
        plus(a, b);
    }
    for batch in &other.batch_stats {
        let same = |mine: &&mut BatchStats| mine.batch_size == batch.batch_size;
        match sum.batch_stats.iter_mut().find(same) {
            None => sum.batch_stats.push(*batch),
            Some(mine) => {
                plus(&mut mine.compute_input, batch.compute_input);
                plus(&mut mine.compute_infer, batch.compute_infer);
                plus(&mut mine.compute_output, batch.compute_output);
            }
        }
    }
}

impl InferenceService for Frontend {
    fn record_spans(&self, sink: Arc<dyn SpanSink>) {
        // Servers of the same frontend, such as its admin port, have the same sink.
        let _ = self.inner.spans.set(sink);
    }

    fn server_metadata(&self) -> ServerMetadata {
        self.inner.settings.metadata.clone()
    }

    fn monitor(&self) -> Option<Arc<dyn Monitor>> {
        Some(Arc::new(FrontendMonitor(self.inner.clone())))
    }

    fn cluster_status(&self) -> ServiceFuture<'_, serde_json::Value> {
        let status = status::status(&self.inner.table(), self.inner.clock.now());
        Box::pin(std::future::ready(Ok(status)))
    }

    fn ready(&self) -> bool {
        if self.inner.draining.load(Ordering::SeqCst) {
            return false;
        }
        // Ready once all models are; models that are added later do not make the frontend unready.
        // Without models it is ready when one can be registered, and at zero when one is started.
        let table = self.inner.table();
        let settled = |entry: &Arc<ModelEntry>| {
            // Without its canary a model is served, too.
            split_served(&entry.served).1.is_some()
                || !entry.record.enabled
                || !entry.targets.is_empty()
                || entry.failure.is_some()
                || table.is_at_zero(entry)
        };
        let may_have_models = table.known && (table.backends > 0 || table.scaling.is_some());
        let is_settled = match table.models.is_empty() {
            true => may_have_models,
            false => table.models.values().all(settled),
        };
        if is_settled {
            self.inner.started.store(true, Ordering::SeqCst);
        }
        self.inner.started.load(Ordering::SeqCst)
    }

    fn model_ready<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, bool> {
        let table = self.inner.table();
        let ready = match table.available(model) {
            Ok(_) => Ok(true),
            Err(error) if error.kind == ErrorKind::Unavailable => Ok(false),
            Err(error) => Err(error),
        };
        Box::pin(std::future::ready(ready))
    }

    fn model_metadata<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, ModelMetadata> {
        Box::pin(async move {
            let table = self.inner.table();
            let entry = table.available(model)?;
            let metadata = self.inner.metadata(entry).await?;
            let mut metadata = (*metadata).clone();
            if let Some(canary) = entry.serving_canary()
                && model.version.is_none()
                && !canary.record.promoted
            {
                metadata.versions.push(canary.record.version.to_string());
            }
            Ok(metadata)
        })
    }

    fn model_config<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, proto::ModelConfig> {
        Box::pin(async move {
            let table = self.inner.table();
            let entry = table.serving(model)?;
            let request =
                proto::ModelConfigRequest { name: entry.served.clone(), ..Default::default() };
            let reply = self
                .inner
                .call_any_backend(model.name, entry, |mut client| {
                    let request = request.clone();
                    async move { client.model_config(request).await }
                })
                .await?;
            let missing = || ApiError::internal("a backend sent no configuration");
            let config = reply.config.ok_or_else(missing)?;
            Ok(proto::ModelConfig { name: model.name.to_string(), ..config })
        })
    }

    fn infer<'a>(
        &'a self,
        model: ModelRef<'a>,
        request: InferRequest,
        context: RequestContext,
    ) -> ServiceFuture<'a, InferResponse> {
        Box::pin(self.inner.infer(model, request, context))
    }

    fn statistics<'a>(
        &'a self,
        model: Option<ModelRef<'a>>,
    ) -> ServiceFuture<'a, Vec<ModelStatistics>> {
        Box::pin(self.inner.statistics(model))
    }

    fn index(&self, only_ready: bool) -> ServiceFuture<'_, Vec<IndexEntry>> {
        Box::pin(std::future::ready(Ok(self.inner.index(only_ready))))
    }

    fn load<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()> {
        Box::pin(self.inner.load(model))
    }

    fn unload<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, ()> {
        Box::pin(self.inner.unload(model))
    }

    fn register(&self, request: RegisterRequest) -> ServiceFuture<'_, Registered> {
        let inner = self.inner.clone();
        // Runs to its end even when the client disconnects: a model is never half registered.
        Box::pin(async move {
            let work = tokio::spawn(async move { inner.register(request).await });
            work.await.unwrap_or_else(|_| Err(ApiError::internal("the registration failed")))
        })
    }

    fn delete_model<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, usize> {
        Box::pin(self.inner.delete(model))
    }

    fn roll_back_model<'a>(&'a self, model: ModelRef<'a>) -> ServiceFuture<'a, Registered> {
        let (inner, name, version) = (self.inner.clone(), model.name.to_string(), model.version);
        // Runs to its end even when the client disconnects, so that a failure is undone.
        Box::pin(async move {
            let work = tokio::spawn(async move { inner.roll_back(&name, version).await });
            work.await.unwrap_or_else(|_| Err(ApiError::internal("the rollback failed")))
        })
    }

    fn start_canary<'a>(
        &'a self,
        model: ModelRef<'a>,
        options: CanaryOptions,
    ) -> ServiceFuture<'a, CanaryStatus> {
        let (inner, name, version) = (self.inner.clone(), model.name.to_string(), model.version);
        // Runs to its end even when the client disconnects, so that a failure is undone.
        Box::pin(async move {
            let work =
                tokio::spawn(async move { inner.start_canary(&name, version, &options).await });
            work.await.unwrap_or_else(|_| Err(ApiError::internal("the canary failed")))
        })
    }

    fn end_canary<'a>(&'a self, model: &'a str, promote: bool) -> ServiceFuture<'a, CanaryStatus> {
        Box::pin(self.inner.end_canary(model, promote))
    }

    fn canary<'a>(&'a self, model: &'a str) -> ServiceFuture<'a, CanaryStatus> {
        Box::pin(std::future::ready(self.inner.table().canary(model)))
    }

    fn classify(
        &self,
        request: ClassifyRequest,
        context: RequestContext,
    ) -> ServiceFuture<'_, Classification> {
        Box::pin(self.inner.classify(request, context.canary))
    }

    fn query_infer<'a>(
        &'a self,
        query: &'a str,
        request: InferRequest,
        context: RequestContext,
    ) -> ServiceFuture<'a, InferResponse> {
        Box::pin(self.inner.infer_query(query, request, context))
    }

    fn queries(&self) -> ServiceFuture<'_, Vec<QueryMetadata>> {
        let table = self.inner.table();
        let mut names: Vec<&String> = table.queries.keys().collect();
        names.sort();
        let all = names.into_iter().map(|name| self.inner.describe(&table, name)).collect();
        Box::pin(std::future::ready(all))
    }

    fn query<'a>(&'a self, query: &'a str) -> ServiceFuture<'a, QueryMetadata> {
        let described = self.inner.describe(&self.inner.table(), query);
        Box::pin(std::future::ready(described))
    }

    fn put_query<'a>(&'a self, query: &'a str, text: &'a str) -> ServiceFuture<'a, QueryMetadata> {
        Box::pin(self.inner.put_query(query, text))
    }

    fn delete_query<'a>(&'a self, query: &'a str) -> ServiceFuture<'a, ()> {
        Box::pin(self.inner.delete_query(query))
    }

    fn write_metrics(&self, text: &mut String) {
        let report = self.inner.report();
        let metrics: [MetricFamily; 7] = [
            ("nv_inference_request_success", "counter", "Requests answered with outputs", |l| {
                l.answered as f64
            }),
            ("nv_inference_request_failure", "counter", "Requests refused or cancelled", |l| {
                l.refused as f64
            }),
            ("atoll_cluster_requests", "counter", "Requests received", |l| l.arrived as f64),
            ("atoll_cluster_late", "counter", "Replies after the SLO", |l| l.late as f64),
            ("atoll_cluster_retries", "counter", "Requests sent to a second backend", |l| {
                l.retried as f64
            }),
            ("atoll_cluster_rate", "gauge", "Requests per second", |l| l.fast),
            ("atoll_cluster_p99_seconds", "gauge", "99th percentile of recent latencies", |l| {
                l.p99_ms / 1e3
            }),
        ];
        for (name, kind, help, value) in metrics {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (model, load) in &report.models {
                let _ = writeln!(text, "{name}{{{}}} {}", labels(model), value(load));
            }
        }
        write_slo_metrics(text, &self.inner.table());
        write_attempt_metrics(text, &self.inner);
        self.inner.cold_starts.write_metrics(text);
        write_query_metrics(text, &report);
        self.inner.write_canary_metrics(text);
        let table = self.inner.table();
        write_scaling_metrics(text, table.scaling.as_ref());
        write_plan_metrics(text, &table.summary);
        health::write_metrics(text, self.inner.records.store());
        validation::write_metrics(text);
    }

    fn drain(&self, limit: Duration) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        self.inner.draining.store(true, Ordering::SeqCst);
        Box::pin(async move {
            let empty = async {
                while self.inner.in_flight.load(Ordering::Relaxed) > 0 {
                    tokio::time::sleep(DRAIN_POLL).await;
                }
            };
            tokio::time::timeout(limit, empty).await.is_ok()
        })
    }
}
