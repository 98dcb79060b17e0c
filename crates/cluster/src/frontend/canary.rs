//! Which version a request gets where a model has a canary, and what is counted of both.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use api::canary::{CanaryState, RunningCanary};
use api::error::ApiResult;
use api::{
    ApiError, CanaryChoice, CanaryOptions, CanaryStatus, ErrorKind, InferRequest, InferResponse,
    ModelRef, Registered,
};
use base::Nanos;

use super::attempts::RETRY_TIME_MIN;
use super::canary_entry::{CanaryEntry, Drawn};
use super::routing_table::{ModelEntry, RoutingTable};
use super::service::{LOAD_TIMEOUT, candidate_error, store_error};
use super::{Call, Inner, is_overload};
use crate::record::canary::{CanaryLoad, CanaryOutcome, CanaryRecord};
use crate::record::{ModelRecord, VersionRecord};

/// A number in [0, 1) that is always the same for a key and a canary. Another canary of the model
/// gets other keys.
fn unit_of(key: u64, number: u64) -> f64 {
    // The finalizer of SplitMix64.
    let mut mixed = key ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    (mixed >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws the version of a request; `random` gives a number in [0, 1). Also says whether the request
/// counts for the judgement.
pub fn draw(
    canary: &CanaryRecord,
    choice: CanaryChoice,
    random: impl FnOnce() -> f64,
) -> (Drawn, bool) {
    let unit = match choice {
        CanaryChoice::Always => return (Drawn::Canary, false),
        CanaryChoice::Never => return (Drawn::Stable, false),
        CanaryChoice::ByShare => random(),
        CanaryChoice::ByKey(key) => unit_of(key, canary.number),
    };
    let drawn = if unit < canary.share { Drawn::Canary } else { Drawn::Stable };
    (drawn, !canary.promoted && canary.share > 0.0)
}

/// How often the typical latency of the version in force a canary may take before that version gets
/// the request, and the least time.
const PATIENCE_FACTOR: u64 = 20;
const PATIENCE_MIN: Nanos = Nanos::from_millis(1000);
/// The same where a deadline leaves less time: half of it, and at least so often.
const PATIENCE_FACTOR_MIN: u64 = 3;

/// How long a request waits for a canary, of `left` until its deadline: one that hangs does not
/// cost clients their replies. `typical` is in nanoseconds, 0 where it is not known.
fn patience(typical: u64, left: Option<Nanos>, timeout: Duration) -> Nanos {
    if typical == 0 {
        return timeout.into();
    }
    let patience = Nanos(typical.saturating_mul(PATIENCE_FACTOR)).max(PATIENCE_MIN);
    let least = Nanos(typical.saturating_mul(PATIENCE_FACTOR_MIN));
    let allowed = left.map_or(patience, |left| Nanos(left.0 / 2).max(least));
    patience.min(allowed).min(timeout.into())
}

/// Whether a failure may be the fault of the version, and not of the client or of this frontend.
fn is_fault(error: &ApiError) -> bool {
    use ErrorKind::{BadGateway, DeadlineExceeded, Internal, Unavailable};
    let kinds = [Internal, BadGateway, Unavailable, DeadlineExceeded];
    kinds.contains(&error.kind) && !is_overload(error)
}

impl ModelEntry {
    /// The canary, if it serves.
    pub fn serving_canary(&self) -> Option<&CanaryEntry> {
        self.canary.as_ref().filter(|canary| !canary.entry.targets.is_empty())
    }

    /// Whether it has a canary that no backend serves yet, as far as is known.
    pub fn awaits_canary(&self) -> bool {
        self.canary.as_ref().is_some_and(|canary| {
            let entry = &canary.entry;
            !canary.record.promoted && entry.targets.is_empty() && entry.failure.is_none()
        })
    }
}

impl RoutingTable {
    /// The canary of a model, or the last one.
    pub fn canary(&self, name: &str) -> ApiResult<CanaryStatus> {
        let entry = self.known(ModelRef { name, version: None })?;
        let record = &entry.record;
        let status = |version: u64, state, why: &str| CanaryStatus {
            name: name.to_string(),
            version: version.to_string(),
            in_force: record.version.to_string(),
            state,
            why: why.to_string(),
            running: None,
        };
        match (&entry.canary, &record.ended_canary) {
            (Some(canary), _) if !canary.record.promoted => {
                let why = match canary.entry.targets.is_empty() {
                    true => "no backend serves it now",
                    false => &canary.progress.why,
                };
                let running = Some(running(canary));
                Ok(CanaryStatus {
                    running,
                    ..status(canary.record.version, CanaryState::Running, why)
                })
            }
            (Some(canary), ended) => {
                let why = ended.as_ref().map_or("", |ended| &ended.reason);
                Ok(status(canary.record.version, CanaryState::Promoting, why))
            }
            (None, Some(ended)) => Ok(status(ended.version, ended.outcome.state(), &ended.reason)),
            (None, None) => Err(ApiError::not_found(format!("model '{name}' has no canary"))),
        }
    }
}

fn running(canary: &CanaryEntry) -> RunningCanary {
    let CanaryRecord { share, promote_after_ms, max_errors, max_slowdown, .. } = canary.record;
    let percent = |share: f64| (share * 1e6).round() / 1e4;
    RunningCanary {
        share_percent: percent(share),
        promote_after_ms,
        max_errors_percent: percent(max_errors),
        max_slowdown_percent: percent(max_slowdown),
        elapsed_ms: canary.progress.elapsed_ms,
        stable: canary.progress.stable.figures(),
        canary: canary.progress.canary.figures(),
    }
}

/// The version that an operator wants as canary.
fn wanted_version(
    record: &ModelRecord,
    name: &str,
    version: Option<u64>,
) -> ApiResult<VersionRecord> {
    let found = match version {
        Some(version) if version == record.version => {
            return Err(ApiError::invalid(format!("version {version} of '{name}' is in force")));
        }
        Some(version) => record.others.iter().find(|other| other.version == version),
        None => record.others.iter().rfind(|other| other.version > record.version),
    };
    found.cloned().ok_or_else(|| {
        ApiError::not_found(match version {
            Some(version) => format!("there is no version {version} of '{name}'"),
            None => format!(
                "there is no version of '{name}' after {}: register one with a field 'canary', or \
                 name an older one",
                record.version
            ),
        })
    })
}

/// Whether these are the same canary with the same rules. A number that was written and read may
/// differ in its last digit.
fn is_same(a: &CanaryRecord, b: &CanaryRecord) -> bool {
    let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * (1.0 + a.abs());
    (a.version, a.number, a.promote_after_ms) == (b.version, b.number, b.promote_after_ms)
        && close(a.share, b.share)
        && close(a.max_errors, b.max_errors)
        && close(a.max_slowdown, b.max_slowdown)
}

/// A reply or error of a version under the name of its model.
pub(super) fn under_its_name(
    name: &str,
    entry: &ModelEntry,
    reply: ApiResult<InferResponse>,
) -> ApiResult<InferResponse> {
    if entry.served == name {
        return reply;
    }
    match reply {
        Ok(reply) => Ok(InferResponse { model_name: name.into(), ..reply }),
        Err(error) => Err(error_under_its_name(name, entry, error)),
    }
}

fn error_under_its_name(name: &str, entry: &ModelEntry, error: ApiError) -> ApiError {
    let own = format!("'{}'", entry.served);
    let message =
        error.message.replace(&own, &format!("'{name}' version {}", entry.record.version));
    ApiError { message: message.into(), ..error }
}

impl Inner {
    /// Sends a request to the version that is drawn for it. What the canary does not answer, the
    /// version in force does, if time and the budget of retries allow: a client need not know that
    /// there is a canary. `times` are those of its arrival and its deadline.
    pub(super) async fn with_canary<'a, T, F>(
        &self,
        entry: &'a ModelEntry,
        choice: CanaryChoice,
        (arrived, deadline): (Nanos, Option<Nanos>),
        attempt: impl Fn(&'a ModelEntry) -> F,
    ) -> ApiResult<T>
    where
        F: Future<Output = ApiResult<T>>,
    {
        let Some(canary) = entry.serving_canary() else { return attempt(entry).await };
        let (drawn, is_judged) = draw(&canary.record, choice, || self.unit());
        let meter = is_judged.then_some(&canary.meter);
        // Both are held to the same objective.
        let objective_ms = [entry, &*canary.entry].into_iter().find_map(|version| {
            let config = &version.record.config;
            config.slo_ms.or(config.timeout_ms)
        });
        let objective = objective_ms.map(Nanos::from_millis);
        let count = |drawn, reply: &ApiResult<T>| match (meter, reply) {
            (Some(meter), Ok(_)) => meter.reply(drawn, self.clock.now() - arrived, objective),
            (Some(meter), Err(error)) if is_fault(error) => meter.fail(drawn),
            _ => {}
        };
        if drawn == Drawn::Stable {
            let reply = attempt(entry).await;
            count(Drawn::Stable, &reply);
            return reply;
        }
        let left = deadline.map(|deadline| deadline.since(self.clock.now()));
        let patience = patience(entry.meter.typical().as_nanos(), left, self.settings.timeout);
        let mut first = Box::pin(attempt(&canary.entry));
        let reply = match tokio::time::timeout(patience.into(), &mut first).await {
            Ok(reply) => reply,
            Err(_) if self.take_retry() => {
                // Cancels it.
                drop(first);
                if let Some(meter) = meter {
                    meter.fail(Drawn::Canary);
                }
                canary.meter.fall_back();
                return attempt(entry).await;
            }
            Err(_) => first.await,
        };
        count(Drawn::Canary, &reply);
        let error = match reply {
            Err(error) if error.kind != ErrorKind::Cancelled => error,
            reply => return reply,
        };
        let now = self.clock.now();
        let in_time = deadline.is_none_or(|deadline| now + RETRY_TIME_MIN <= deadline);
        if !in_time || !self.take_retry() {
            return Err(error);
        }
        canary.meter.fall_back();
        let reply = attempt(entry).await;
        // What only the canary refuses is the canary's failure, whatever it says of the client.
        if let (Some(meter), Ok(_)) = (meter, &reply)
            && !is_fault(&error)
            && !is_overload(&error)
        {
            meter.fail(Drawn::Canary);
        }
        reply
    }

    /// Sends a request that names its version. A canary that has just been promoted is served under
    /// the model's own name.
    pub(super) async fn dispatch_to_version(
        &self,
        call: Call<'_>,
        request: InferRequest,
        table: &RoutingTable,
        entry: &ModelEntry,
    ) -> ApiResult<InferResponse> {
        if entry.served == call.model.name {
            return self.dispatch_to(call, request, table, entry).await;
        }
        let reply = self.dispatch_to(call, request.clone(), table, entry).await;
        match reply {
            Err(error) if error.kind == ErrorKind::Unavailable => {
                let table = self.table();
                match table.serving(call.model) {
                    Ok(fresh) if fresh.served != entry.served => {
                        self.dispatch_to(call, request, &table, fresh).await
                    }
                    _ => Err(error),
                }
            }
            reply => reply,
        }
    }

    /// A number in [0, 1).
    pub(super) fn unit(&self) -> f64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).unit_f64()
    }

    async fn registered(&self, name: &str) -> ApiResult<ModelRecord> {
        let record = self.records.find(name).await.map_err(store_error)?;
        record.ok_or_else(|| ApiError::not_found(format!("there is no registered model '{name}'")))
    }

    /// Registers a version as canary: the version in force serves on.
    pub(super) async fn register_canary(
        &self,
        name: &str,
        (digest, bytes): (&str, u64),
        config: model::ModelConfig,
        options: &CanaryOptions,
    ) -> ApiResult<Registered> {
        let before = self.records.find(name).await.map_err(store_error)?;
        if before.is_none_or(|before| !before.enabled) {
            return Err(ApiError::invalid(format!(
                "no version of '{name}' is in force: a canary is served beside one"
            )));
        }
        self.check_candidate(name, digest, bytes, &config).await?;
        let change = |before: Option<&ModelRecord>, _| {
            let before = before?;
            let fresh = VersionRecord {
                version: before.highest_version() + 1,
                digest: digest.to_string(),
                bytes,
                config: config.clone(),
            };
            Some(before.with_canary(fresh, options))
        };
        let after = self.records.change(name, change).await.map_err(store_error)?;
        let status = self.wait_until_canary(name, after).await?;
        let state = api::ModelState::Ready;
        Ok(Registered { name: name.to_string(), version: status.version, state })
    }

    async fn check_candidate(
        &self,
        name: &str,
        digest: &str,
        bytes: u64,
        config: &model::ModelConfig,
    ) -> ApiResult<()> {
        let checked = self.records.propose((name, digest, bytes), config, LOAD_TIMEOUT).await;
        checked.map(|_| ()).map_err(candidate_error)
    }

    /// Starts a canary, or changes the share and rules of the running one.
    pub(super) async fn start_canary(
        &self,
        name: &str,
        version: Option<u64>,
        options: &CanaryOptions,
    ) -> ApiResult<CanaryStatus> {
        let before = self.registered(name).await?;
        let runs = |record: &ModelRecord| {
            let running = record.running_canary()?;
            version.is_none_or(|version| version == running.version).then(|| running.clone())
        };
        if runs(&before).is_none() {
            let wanted = wanted_version(&before, name, version)?;
            self.check_candidate(name, &wanted.digest, wanted.bytes, &wanted.config).await?;
        }
        let change = |before: Option<&ModelRecord>, _| match runs(before?) {
            Some(CanaryRecord { version, number, .. }) => {
                let canary = Some(CanaryRecord::new(version, number, options));
                Some(ModelRecord { canary, ..before?.clone() })
            }
            None => {
                let wanted = wanted_version(before?, name, version).ok()?;
                Some(before?.with_canary(wanted, options))
            }
        };
        let after = self.records.change(name, change).await.map_err(store_error)?;
        self.wait_until_canary(name, after).await
    }

    /// Waits until a backend serves the canary of `after`; ends it where none can.
    async fn wait_until_canary(
        &self,
        name: &str,
        after: Option<ModelRecord>,
    ) -> ApiResult<CanaryStatus> {
        let canary = after.and_then(|after| after.running_canary().cloned());
        let changed = || ApiError::unavailable(format!("'{name}' was changed meanwhile"));
        let canary = canary.ok_or_else(changed)?;
        let seen = std::sync::atomic::AtomicBool::new(false);
        let waited = self.wait_for(name, |entry| {
            let found = entry.and_then(|entry| entry.canary.as_ref());
            let Some(found) = found.filter(|found| is_same(&found.record, &canary)) else {
                return if seen.load(Relaxed) { Err(changed()) } else { Ok(false) };
            };
            seen.store(true, Relaxed);
            match &found.entry.failure {
                _ if !found.entry.targets.is_empty() => Ok(true),
                Some(why) => Err(ApiError::invalid(format!("the canary cannot be loaded: {why}"))),
                None => Ok(false),
            }
        });
        if let Err(error) = waited.await {
            let end = |before: Option<&ModelRecord>, _| {
                let running = before?.running_canary()?;
                let before = before.filter(|_| running.number == canary.number)?;
                Some(before.without_canary(CanaryOutcome::Aborted, &error.message))
            };
            self.records.change(name, end).await.map_err(store_error)?;
            return Err(error);
        }
        let CanaryRecord { version, share, .. } = canary;
        tracing::info!(model = name, version, share, "canary started");
        self.table().canary(name)
    }

    /// Ends a canary as an operator wants.
    pub(super) async fn end_canary(&self, name: &str, promote: bool) -> ApiResult<CanaryStatus> {
        self.registered(name).await?;
        let change = |before: Option<&ModelRecord>, _| match promote {
            true => before?.with_promoted_canary("an operator promoted it"),
            false => {
                before?.running_canary()?;
                Some(before?.without_canary(CanaryOutcome::Aborted, "an operator ended it"))
            }
        };
        let ended = std::sync::Mutex::new(None);
        let change = |before: Option<&ModelRecord>, highest| {
            let after = change(before, highest);
            let version = before.and_then(|before| Some(before.running_canary()?.version));
            *ended.lock().unwrap_or_else(PoisonError::into_inner) = after.as_ref().and(version);
            after
        };
        self.records.change(name, change).await.map_err(store_error)?;
        let ended = *ended.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(version) = ended else {
            return Err(ApiError::not_found(format!("model '{name}' has no running canary")));
        };
        tracing::info!(model = name, version, promote, "canary ended by an operator");
        self.wait_for(name, |entry| {
            Ok(entry.is_none_or(|entry| entry.record.running_canary().is_none()))
        })
        .await?;
        self.table().canary(name)
    }

    /// What was counted of each model with a canary.
    pub(super) fn canary_loads(
        &self,
        table: &RoutingTable,
    ) -> std::collections::BTreeMap<String, CanaryLoad> {
        let load = |(name, entry): (&String, &Arc<ModelEntry>)| {
            let canary = entry.canary.as_ref().filter(|canary| !canary.record.promoted)?;
            Some((name.clone(), canary.meter.load()))
        };
        table.models.iter().filter_map(load).collect()
    }

    /// Canaries for Prometheus.
    pub(super) fn write_canary_metrics(&self, text: &mut String) {
        use std::fmt::Write;
        let table = self.table();
        let mut rows: Vec<(&String, &CanaryEntry)> = table
            .models
            .iter()
            .filter_map(|(name, entry)| Some((name, entry.canary.as_ref()?)))
            .collect();
        if rows.is_empty() {
            return;
        }
        rows.sort_by_key(|(name, _)| *name);
        let mut metric = |name: &str, kind: &str, help: &str, of: &dyn Fn(&CanaryEntry) -> f64| {
            let name = format!("atoll_cluster_canary_{name}");
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (model, canary) in &rows {
                let version = canary.record.version;
                let labels = format!("model=\"{model}\",version=\"{version}\"");
                let _ = writeln!(text, "{name}{{{labels}}} {}", of(canary));
            }
        };
        metric("share", "gauge", "Share of the requests that a canary gets", &|canary| {
            canary.record.share
        });
        metric("requests", "counter", "Requests that were drawn for a canary", &|canary| {
            canary.meter.load().canary.requests as f64
        });
        metric("failures", "counter", "Those that failed or were late", &|canary| {
            canary.meter.load().canary.failures as f64
        });
        let help = "Requests that the version in force answered because the canary did not";
        metric("fallbacks", "counter", help, &|canary| canary.meter.fallbacks() as f64);
    }
}

#[cfg(test)]
mod tests {
    use base::Random;

    use super::*;

    fn canary(share: f64, number: u64) -> CanaryRecord {
        CanaryRecord { version: 2, number, share, ..CanaryRecord::default() }
    }

    #[test]
    fn shares_are_kept_and_requests_that_choose_are_not_judged() {
        let mut random = Random::new(3);
        for share in [0.0, 0.01, 0.05, 0.5, 0.9] {
            let record = canary(share, 1);
            let count = 40_000;
            let mut drawn = (0, 0);
            for key in 0..count {
                let is_canary = |choice, unit| draw(&record, choice, || unit).0 == Drawn::Canary;
                drawn.0 += u64::from(is_canary(CanaryChoice::ByShare, random.unit_f64()));
                let key = CanaryChoice::by_key(format!("user-{key}").as_bytes());
                drawn.1 += u64::from(is_canary(key, 0.0));
            }
            let deviation = (share * (1.0 - share) * f64::from(count)).sqrt();
            for drawn in [drawn.0, drawn.1] {
                let off = (drawn as f64 - share * f64::from(count)).abs();
                assert!(off <= 4.0 * deviation, "{drawn} of {count} for {share}");
            }
        }
        let never = || unreachable!("nothing is drawn");
        let record = canary(0.5, 1);
        assert_eq!(draw(&record, CanaryChoice::Always, never), (Drawn::Canary, false));
        assert_eq!(draw(&record, CanaryChoice::Never, never), (Drawn::Stable, false));
        assert!(draw(&record, CanaryChoice::ByShare, || 0.7).1);
        let promoted = CanaryRecord { promoted: true, ..record };
        assert!(!draw(&promoted, CanaryChoice::ByShare, || 0.7).1);
    }

    #[test]
    fn a_request_waits_for_a_canary_as_long_as_the_version_in_force_can_still_reply() {
        let ms = Nanos::from_millis;
        let timeout = Duration::from_secs(30);
        let of = |typical_ms, left: Option<u64>| patience(ms(typical_ms).0, left.map(ms), timeout);
        assert_eq!(of(0, None), ms(30_000));
        assert_eq!(of(2, None), ms(1000));
        assert_eq!(of(200, None), ms(4000));
        assert_eq!(of(9000, None), ms(30_000));
        assert_eq!(of(2, Some(100)), ms(50));
        assert_eq!(of(30, Some(100)), ms(90));
        assert_eq!(of(2, Some(60_000)), ms(1000));
    }

    #[test]
    fn a_key_keeps_its_version_and_gets_another_chance_with_the_next_canary() {
        let key = |user: u64| CanaryChoice::by_key(format!("user-{user}").as_bytes());
        let drawn = |user, number, share| draw(&canary(share, number), key(user), || 0.0).0;
        let mut differ = 0;
        for user in 0..1000 {
            assert_eq!(drawn(user, 1, 0.3), drawn(user, 1, 0.3));
            // Who has the canary keeps it when its share grows.
            if drawn(user, 1, 0.1) == Drawn::Canary {
                assert_eq!(drawn(user, 1, 0.5), Drawn::Canary);
            }
            differ += u32::from(drawn(user, 1, 0.5) != drawn(user, 2, 0.5));
        }
        assert!((400..600).contains(&differ), "{differ}");
    }
}
