//! Requests that wait until a backend has their model, where backends are scaled to zero.
//!
//! [`WaitingRequests`] is the pure part: who waits, what is reported, and how long cold starts
//! take. A request waits in its own future, within its deadline and the limits, and every waiting
//! request ends in one place: `Inner::wait_for_backend`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::error::ApiResult;
use api::{ApiError, CanaryChoice, ErrorKind, InferRequest, InferResponse, ModelRef};
use base::{Clock, Nanos};

use super::Inner;
use super::routing_table::{ModelEntry, RoutingTable};
use crate::record::{ColdStartLoad, LoadReport};

/// How long a model counts as waited for after its last request gave up: the scheduler notices
/// also those with short deadlines.
const LINGER: Nanos = Nanos::from_millis(2000);
/// Time without a request after which a frontend is idle.
const IDLE_AFTER: Nanos = Nanos::from_millis(8000);
/// How often a waiting request looks for what does not change the routing table.
const LOOK: Duration = Duration::from_millis(500);
/// A store that cannot be reached for this long starts no backend.
const STORE_PATIENCE: Nanos = Nanos::from_millis(10_000);
/// Times that a request waits again because its backend went away before it answered.
const ATTEMPTS_MAX: usize = 3;
/// Least time that a request waits for the canary it chose, once the version in force is there.
const CANARY_WAIT: Nanos = Nanos::from_millis(5000);
/// Seconds after which a client should retry, and the limits where a cold start was measured.
const RETRY_SECONDS: u32 = 10;
const RETRY_SECONDS_MAX: f64 = 60.0;
/// Upper bounds of the histogram of cold starts, in seconds.
const BOUNDS: [f64; 11] = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0];

/// Limits of waiting requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColdStartSettings {
    /// How long a request waits at most; zero to refuse at once.
    pub wait: Duration,
    /// Requests of one model that wait at most.
    pub model_max: usize,
    /// Requests that wait at most, over all models.
    pub total_max: usize,
}

impl Default for ColdStartSettings {
    fn default() -> Self {
        ColdStartSettings { wait: Duration::from_secs(120), model_max: 256, total_max: 4096 }
    }
}

/// Why a request stopped waiting without a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdRefusal {
    /// Too many wait.
    Full,
    /// No backend had the model in time.
    Late,
    /// The store cannot be reached, so that nothing starts a backend.
    Store,
    /// The frontend stops.
    Stopping,
}

impl ColdRefusal {
    /// All of them.
    pub const ALL: [ColdRefusal; 4] =
        [ColdRefusal::Full, ColdRefusal::Late, ColdRefusal::Store, ColdRefusal::Stopping];

    /// The name in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            ColdRefusal::Full => "full",
            ColdRefusal::Late => "late",
            ColdRefusal::Store => "store",
            ColdRefusal::Stopping => "stopping",
        }
    }
}

/// Requests of one model.
#[derive(Debug, Default)]
struct ModelWait {
    count: usize,
    /// When the first of them began to wait, until one is answered.
    first: Option<Nanos>,
    /// Requests that began to wait since then.
    requests: u64,
    left_at: Nanos,
}

/// Who waits, and how long it took. Pure.
#[derive(Debug, Default)]
pub struct WaitingRequests {
    models: BTreeMap<String, ModelWait>,
    total: usize,
    load: ColdStartLoad,
    sum_seconds: f64,
    /// Cold starts by the first bound that they do not exceed.
    buckets: [u64; BOUNDS.len() + 1],
    refusals: [u64; ColdRefusal::ALL.len()],
}

impl WaitingRequests {
    /// Lets a request wait; `false` if too many do. [`WaitingRequests::leave`] has to follow.
    pub fn enter(&mut self, now: Nanos, model: &str, settings: &ColdStartSettings) -> bool {
        self.forget(now);
        let waiting = self.models.get(model).map_or(0, |model| model.count);
        if waiting >= settings.model_max || self.total >= settings.total_max {
            return false;
        }
        let entry = self.models.entry(model.to_string()).or_default();
        entry.count += 1;
        entry.requests += 1;
        entry.first.get_or_insert(now);
        self.total += 1;
        true
    }

    /// A request waits no more.
    pub fn leave(&mut self, now: Nanos, model: &str) {
        let Some(entry) = self.models.get_mut(model) else { return };
        entry.count = entry.count.saturating_sub(1);
        entry.left_at = now;
        self.total = self.total.saturating_sub(1);
    }

    /// A request that had waited was answered. Where it is the first of its model, returns the time
    /// since the first one began to wait, and how many have waited.
    pub fn answered(&mut self, now: Nanos, model: &str) -> Option<(Nanos, u64)> {
        let entry = self.models.get_mut(model)?;
        let took = now - entry.first.take()?;
        let requests = std::mem::take(&mut entry.requests);
        let seconds = took.0 as f64 / 1e9;
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket] += 1;
        self.sum_seconds += seconds;
        self.load.count += 1;
        self.load.last_ms = seconds * 1e3;
        self.load.max_ms = self.load.max_ms.max(seconds * 1e3);
        Some((took, requests))
    }

    /// Counts a refusal.
    pub fn refuse(&mut self, reason: ColdRefusal) {
        let index = ColdRefusal::ALL.iter().position(|other| *other == reason);
        if let Some(count) = index.and_then(|index| self.refusals.get_mut(index)) {
            *count += 1;
        }
    }

    /// Requests that wait, by model, rounded up to powers of two so that reports seldom change;
    /// models whose requests have just given up count as well.
    pub fn report(&mut self, now: Nanos) -> BTreeMap<String, u64> {
        self.forget(now);
        let is_reported = |entry: &ModelWait| entry.count > 0 || now - entry.left_at < LINGER;
        let waiting = self.models.iter().filter(|(_, entry)| is_reported(entry));
        let round = |count: usize| (count as u64).max(1).next_power_of_two();
        waiting.map(|(model, entry)| (model.clone(), round(entry.count))).collect()
    }

    /// Adds what waits to a frontend's report, and whether it is idle: it is not `busy`, and its
    /// `last` request, if there was one, came a while ago.
    pub fn fill(&mut self, report: &mut LoadReport, now: Nanos, busy: bool, last: Option<Nanos>) {
        report.waiting = self.report(now);
        let is_old = last.is_none_or(|last| now - last >= IDLE_AFTER);
        report.idle = !busy && report.waiting.is_empty() && is_old;
        report.cold_starts = (self.load.count > 0).then_some(self.load);
    }

    /// Requests that wait.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Forgets models for which nobody waits any more, and whose cold start, if any, has ended.
    fn forget(&mut self, now: Nanos) {
        // A request that left to be served may still be in flight.
        let is_over = |entry: &ModelWait| match entry.first {
            None => now - entry.left_at >= LINGER,
            Some(_) => now - entry.left_at >= Nanos(60 * LINGER.0),
        };
        self.models.retain(|_, entry| entry.count > 0 || !is_over(entry));
    }

    /// Seconds after which a refused client should try again.
    fn retry_after(&self) -> u32 {
        match self.load.count {
            0 => RETRY_SECONDS,
            _ => (self.load.last_ms / 1e3).clamp(1.0, RETRY_SECONDS_MAX).ceil() as u32,
        }
    }

    fn write_metrics(&self, text: &mut String) {
        let name = "atoll_cluster_cold_start_seconds";
        let help = "Time from the first request for a model that no backend had to its first reply";
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut sum = 0;
        for (bound, count) in BOUNDS.iter().zip(self.buckets) {
            sum += count;
            let _ = writeln!(text, "{name}_bucket{{le=\"{bound}\"}} {sum}");
        }
        let (count, seconds) = (self.load.count, self.sum_seconds);
        let _ = writeln!(text, "{name}_bucket{{le=\"+Inf\"}} {count}");
        let _ = writeln!(text, "{name}_sum {seconds}\n{name}_count {count}");
        let name = "atoll_cluster_waiting";
        let help = "Requests that wait until a backend has their model";
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {}", self.total);
        let name = "atoll_cluster_cold_refused_total";
        let help = "Requests that waited, or were to wait, for a backend and were refused";
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for (reason, count) in ColdRefusal::ALL.iter().zip(self.refusals) {
            let _ = writeln!(text, "{name}{{reason=\"{}\"}} {count}", reason.as_str());
        }
    }
}

/// The waiting requests of a frontend.
#[derive(Default)]
pub(super) struct ColdStarts {
    requests: Mutex<WaitingRequests>,
    /// Notified when a request starts to wait for a model that none waited for.
    pub(super) demand: tokio::sync::Notify,
}

impl ColdStarts {
    fn lock(&self) -> std::sync::MutexGuard<'_, WaitingRequests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write_metrics(&self, text: &mut String) {
        self.lock().write_metrics(text);
    }

    /// Adds what waits, and whether the frontend is idle, to its report.
    pub(super) fn fill(
        &self,
        report: &mut LoadReport,
        now: Nanos,
        busy: bool,
        last: Option<Nanos>,
    ) {
        self.lock().fill(report, now, busy, last);
    }
}

/// A request that waits; it leaves when this is dropped, for whatever reason.
struct WaitGuard<'a> {
    starts: &'a ColdStarts,
    clock: &'a dyn Clock,
    model: &'a str,
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        self.starts.lock().leave(self.clock.now(), self.model);
    }
}

impl Inner {
    /// Whether requests for a model wait because no backend has it yet: it is to be served, can be
    /// as far as is known, and the scheduler scales backends.
    pub(super) fn can_wait(&self, table: &RoutingTable, model: ModelRef<'_>) -> bool {
        let waits = |entry: &Arc<ModelEntry>| {
            entry.record.enabled && entry.targets.is_empty() && entry.failure.is_none()
        };
        let limits = self.settings.cold_start;
        let is_on = !limits.wait.is_zero() && limits.model_max > 0 && table.scaling.is_some();
        is_on && table.known(model).is_ok_and(waits)
    }

    /// Serves a request whose model no backend has: it waits until one does. Its own deadline
    /// counts from its arrival; the model's, which is a promise about serving, from the end of
    /// the wait.
    pub(super) async fn infer_cold(
        &self,
        model: ModelRef<'_>,
        request: InferRequest,
        table: &RoutingTable,
        choice: CanaryChoice,
    ) -> ApiResult<InferResponse> {
        let entry = table.known(model)?.clone();
        let own = request.options.timeout;
        entry.meter.arrive(1);
        let reply = self.try_infer_cold(model, request, choice).await;
        if reply.as_ref().is_err_and(|error| super::is_refusal(error.kind)) {
            entry.refuse(own, 1);
        }
        reply
    }

    /// As [`Inner::infer_cold`], for a request that was counted.
    pub(super) async fn try_infer_cold(
        &self,
        model: ModelRef<'_>,
        request: InferRequest,
        choice: CanaryChoice,
    ) -> ApiResult<InferResponse> {
        let _in_flight = self.enter()?;
        let arrived = self.clock.now();
        let own = request.options.timeout;
        let mut last = None;
        for _ in 0..ATTEMPTS_MAX {
            let table = self.wait_for_choice(model, choice, arrived, own).await?;
            let entry = table.serving(model)?;
            let now = self.clock.now();
            let mut attempt = request.clone();
            attempt.options.timeout = own.map(|own| own.since(now - arrived));
            let deadline = attempt.options.timeout.map(|left| now + left);
            let send = async |version: &ModelEntry| {
                let reply = self.try_infer(model, attempt.clone(), 1, now, &table, version).await;
                super::canary::under_its_name(model.name, version, reply)
            };
            let reply = match model.version {
                Some(_) => send(entry).await,
                None => self.with_canary(entry, choice, (now, deadline), send).await,
            };
            match reply {
                Ok(reply) => {
                    let now = self.clock.now();
                    self.note_answered(now, model.name);
                    entry.meter.answer(now - arrived, own, 1);
                    entry.count_answered(now - arrived, own, 1);
                    return Ok(reply);
                }
                // The backend went away again before it answered.
                Err(error) if error.kind == ErrorKind::Unavailable => {
                    let waits = self.can_wait(&self.table(), model);
                    last = Some(error);
                    if !waits {
                        break;
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(last.unwrap_or_else(|| super::no_backend(model.name)))
    }

    /// Notes that a request which had waited was answered.
    pub(super) fn note_answered(&self, now: Nanos, model: &str) {
        if let Some((took, requests)) = self.cold_starts.lock().answered(now, model) {
            let seconds = took.0 as f64 / 1e9;
            tracing::info!(model, seconds, requests, "cold start answered");
        }
    }

    /// As [`Inner::wait_for_backend`]. A request that had to wait, and chose the canary, waits for
    /// that too, as long again as for the version in force; after that it is answered by it.
    pub(super) async fn wait_for_choice(
        &self,
        model: ModelRef<'_>,
        choice: CanaryChoice,
        arrived: Nanos,
        own: Option<Nanos>,
    ) -> ApiResult<Arc<RoutingTable>> {
        let mut changes = self.table_changed.subscribe();
        let was_served = self.table().serving(model).is_ok();
        let table = self.wait_for_backend(model, arrived, own).await?;
        if was_served || choice != CanaryChoice::Always || model.version.is_some() {
            return Ok(table);
        }
        let now = self.clock.now();
        let (waited, half) = (now - arrived, |own: Nanos| Nanos(own.since(now - arrived).0 / 2));
        let until = now + own.map_or(Nanos::MAX, half).min(waited.max(CANARY_WAIT));
        loop {
            let (table, now) = (self.table(), self.clock.now());
            let draining = self.draining.load(std::sync::atomic::Ordering::SeqCst);
            let comes = table.serving(model).is_ok_and(|entry| entry.awaits_canary());
            if !comes || draining || now >= until {
                return Ok(table);
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    return Err(ApiError::shutting_down());
                },
                () = tokio::time::sleep(Duration::from(until - now).min(LOOK)) => {}
            }
        }
    }

    /// Waits until a backend has the model; returns the table in which it does. The limits are
    /// those of the request that arrived at `arrived` with the deadline `own`.
    pub(super) async fn wait_for_backend(
        &self,
        model: ModelRef<'_>,
        arrived: Nanos,
        own: Option<Nanos>,
    ) -> ApiResult<Arc<RoutingTable>> {
        let limits = self.settings.cold_start;
        let mut changes = self.table_changed.subscribe();
        let wait = own.map_or(Nanos::from(limits.wait), |own| own.min(limits.wait.into()));
        let (until, mut guard, mut unreachable_since) = (arrived + wait, None, None);
        loop {
            let table = self.table();
            match table.serving(model) {
                Ok(_) => return Ok(table),
                Err(error) if !self.can_wait(&table, model) => return Err(error),
                Err(_) => {}
            }
            let now = self.clock.now();
            if guard.is_none() {
                if !self.cold_starts.lock().enter(now, model.name, &limits) {
                    return Err(self.refuse_cold(ColdRefusal::Full, model.name, &table));
                }
                let (starts, clock) = (&self.cold_starts, &*self.clock);
                guard = Some(WaitGuard { starts, clock, model: model.name });
                // The scheduler learns of it at once.
                self.cold_starts.demand.notify_one();
            }
            if self.draining.load(std::sync::atomic::Ordering::SeqCst) {
                return Err(self.refuse_cold(ColdRefusal::Stopping, model.name, &table));
            }
            let unreachable = self.records.store().health().unreachable;
            unreachable_since = unreachable.then(|| unreachable_since.unwrap_or(now));
            if unreachable_since.is_some_and(|since| now - since >= STORE_PATIENCE) {
                return Err(self.refuse_cold(ColdRefusal::Store, model.name, &table));
            }
            if now >= until {
                return Err(self.refuse_cold(ColdRefusal::Late, model.name, &table));
            }
            let left = Duration::from(until - now).min(LOOK);
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    return Err(ApiError::shutting_down());
                },
                () = tokio::time::sleep(left) => {}
            }
        }
    }

    /// Counts a refusal, and says why.
    fn refuse_cold(&self, reason: ColdRefusal, model: &str, table: &RoutingTable) -> ApiError {
        let mut requests = self.cold_starts.lock();
        requests.refuse(reason);
        let retry = requests.retry_after();
        drop(requests);
        let stalled = table.scaling.iter().flat_map(|scaling| &scaling.pools);
        let stalled = stalled.filter_map(|pool| pool.stalled.as_ref().or(pool.error.as_ref()));
        let why = match reason {
            ColdRefusal::Full => "too many requests wait for a backend".to_string(),
            ColdRefusal::Store => {
                "the cluster's store cannot be reached, so no backend is started".to_string()
            }
            ColdRefusal::Stopping => return ApiError::shutting_down(),
            ColdRefusal::Late => match stalled.map(String::as_str).next() {
                Some(why) => format!("no backend has started in time: {why}"),
                None => "no backend has started and loaded it in time".to_string(),
            },
        };
        ApiError::unavailable(format!("model '{model}' is not loaded: {why}")).retry_after(retry)
    }
}

#[cfg(test)]
#[path = "cold_start_tests.rs"]
mod tests;
