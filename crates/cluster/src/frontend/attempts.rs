//! The attempts of one request: which backends get it, and which reply is used.
//!
//! A request goes to one backend. Where that one fails, or does not reply for longer than it
//! should, another one gets the request, within budgets. The first reply is the request's; the
//! other attempt is cancelled. What backends do with their requests decides who gets the next ones.

use std::pin::pin;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::client::{error_of, set_deadline};
use api::error::ApiResult;
use api::trace::TRACEPARENT;
use api::{ApiError, ErrorKind, TraceContext, proto};
use base::{Clock, Nanos};
use model::MemoryError;
use model::config::Class;

use super::http2::ReplyMemory;
use super::routing_table::{ModelEntry, RouteTarget};
use super::{InFlightGuard, Inner, deadline_exceeded, is_overload, no_backend, overloaded};
use crate::balance::backend_health::{Availability, is_outlier, limit_ejections};
use crate::balance::batch_progress::BatchPlan;
use crate::balance::budget::AttemptBudget;
use crate::balance::patience::patience;
use crate::balance::{BackendCandidate, choose, depth, spare};
use crate::record::canary::split_served;

/// Time beyond the deadline in which a backend may report that it missed it.
const GRACE: Duration = Duration::from_millis(50);
/// A second attempt needs at least this much remaining time.
pub(super) const RETRY_TIME_MIN: Nanos = Nanos::from_micros(500);
/// How long after its start a frontend waits for the first reply of a model's backends.
const START_WAIT: Nanos = Nanos::from_millis(3000);
/// Pause before it tries again.
const START_PAUSE: Nanos = Nanos::from_millis(20);
/// Share of the requests that are sent a second time because the first backend takes long, and how
/// many of those may be kept for later.
const HEDGE_SHARE: f64 = 0.05;
const HEDGES_KEPT: f64 = 10.0;
/// The same for requests whose first backend failed or is silent.
const RETRY_SHARE: f64 = 0.2;
const RETRIES_KEPT: f64 = 1000.0;

/// What a frontend may send beyond its requests.
pub(super) struct AttemptBudgets {
    hedges: AttemptBudget,
    retries: AttemptBudget,
}

impl Default for AttemptBudgets {
    fn default() -> AttemptBudgets {
        AttemptBudgets {
            hedges: AttemptBudget::new(HEDGE_SHARE, HEDGES_KEPT),
            retries: AttemptBudget::new(RETRY_SHARE, RETRIES_KEPT),
        }
    }
}

/// One request at a backend. Dropping it records that the request has ended, for whatever reason.
struct SentRequest<'a> {
    target: &'a RouteTarget,
    plan: BatchPlan,
    clock: &'a dyn Clock,
    sent: Nanos,
    given_up: bool,
}

impl<'a> SentRequest<'a> {
    fn new(
        target: &'a RouteTarget,
        frontends: usize,
        clock: &'a dyn Clock,
        sent: Nanos,
    ) -> SentRequest<'a> {
        let plan = target.plan(frontends);
        target.outstanding.send(sent, plan);
        SentRequest { target, plan, clock, sent, given_up: false }
    }
}

impl Drop for SentRequest<'_> {
    fn drop(&mut self) {
        let (now, sent) = (self.clock.now(), self.sent);
        self.target.outstanding.settle(now, self.plan, self.given_up);
        // A request that was decided is the probe no more.
        self.target.link.judge(now, |health| health.abandon_probe(now, sent));
    }
}

/// Result of one attempt.
#[derive(Debug)]
pub(super) enum Attempt<T> {
    Done(T),
    /// Another backend may succeed.
    RetryElsewhere(ApiError),
    /// The backend dropped it early in favour of other requests; an idle one may still reply in
    /// time.
    GivenUp(ApiError),
    Final(ApiError),
}

impl<T> Attempt<T> {
    /// The reply of the request if no other backend is tried.
    fn reply(self) -> ApiResult<T> {
        match self {
            Attempt::Done(reply) => Ok(reply),
            Attempt::RetryElsewhere(error) | Attempt::GivenUp(error) | Attempt::Final(error) => {
                Err(error)
            }
        }
    }

    fn is_decided(&self) -> bool {
        matches!(self, Attempt::Done(_) | Attempt::Final(_))
    }
}

/// Waits for the first of two attempts that decides the request. One that does not leaves it to the
/// other. The attempt that is not needed is dropped by the caller, which cancels it.
async fn first_decided<T>(
    first: impl Future<Output = Attempt<T>>,
    second: impl Future<Output = Attempt<T>>,
) -> Attempt<T> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    tokio::select! {
        biased;
        attempt = &mut first => match attempt.is_decided() {
            true => attempt,
            false => second.await,
        },
        attempt = &mut second => match attempt.is_decided() {
            true => attempt,
            false => first.await,
        },
    }
}

type Reply = Box<proto::ModelInferResponse>;

/// A request as it is sent to backends.
#[derive(Clone)]
pub(super) struct SentMessage {
    pub(super) body: proto::ModelInferRequest,
    /// The trace that it belongs to, which the backend continues.
    pub(super) trace: Option<TraceContext>,
}

impl SentMessage {
    fn into_request(self) -> tonic::Request<proto::ModelInferRequest> {
        let mut request = tonic::Request::new(self.body);
        // The header has only digits.
        if let Some(trace) = self.trace
            && let Ok(value) = trace.to_string().parse()
        {
            request.metadata_mut().insert(TRACEPARENT, value);
        }
        request
    }
}

/// A target that was chosen for a request.
#[derive(Clone, Copy)]
struct Chosen {
    index: usize,
    /// When it was; the health of backends knows requests by this time.
    sent: Nanos,
    probes: bool,
}

impl Inner {
    /// Sends to a backend, and to a second one where the first fails or takes too long and time
    /// remains. After a restart of everything frontends are there before the backends: until one
    /// has replied for the model, requests wait for a moment, and one after the other tries again.
    pub(super) async fn route(
        &self,
        model: &str,
        entry: &ModelEntry,
        message: SentMessage,
        deadline: Option<Nanos>,
    ) -> ApiResult<proto::ModelInferResponse> {
        if !self.is_starting(entry) {
            return self.send(model, entry, message, deadline).await;
        }
        let until = deadline.unwrap_or(Nanos::MAX).min(self.started_at + START_WAIT);
        let mut reply = self.send(model, entry, message.clone(), deadline).await;
        loop {
            let left = until.since(self.clock.now());
            match &reply {
                Err(error) if error.kind == ErrorKind::Unavailable && !is_overload(error) => {}
                _ => return reply,
            }
            if left < RETRY_TIME_MIN {
                return reply;
            }
            let turn = tokio::time::timeout(left.into(), entry.meter.start_turn.lock()).await;
            let Ok(turn) = turn else { return reply };
            let turn = self.is_starting(entry).then_some(turn);
            if turn.is_some() {
                tokio::time::sleep(START_PAUSE.min(left).into()).await;
            }
            // The backends may have other addresses by now.
            let table = self.table();
            let fresh = table.models.get(model).map_or(entry, |entry| entry);
            reply = self.send(model, fresh, message.clone(), deadline).await;
        }
    }

    /// Whether this frontend has just started, and no backend has replied for the model yet.
    fn is_starting(&self, entry: &ModelEntry) -> bool {
        let is_new = self.clock.now() - self.started_at < START_WAIT;
        is_new && entry.meter.typical().as_nanos() == 0
    }

    async fn send(
        &self,
        model: &str,
        entry: &ModelEntry,
        message: SentMessage,
        deadline: Option<Nanos>,
    ) -> ApiResult<proto::ModelInferResponse> {
        self.budgets(|budgets| {
            budgets.hedges.earn(1);
            budgets.retries.earn(1);
        });
        let first = self.choose(entry).ok_or_else(|| no_backend(model))?;
        if !first.probes {
            self.check_wait(model, entry, first.index, deadline)?;
        }
        let target = &entry.targets[first.index];
        let mut attempt = pin!(self.attempt(entry, target, message.clone(), deadline, first.sent));
        let patience = self.patience(entry, target);
        let overdue = tokio::select! {
            biased;
            attempt = &mut attempt => Err(attempt),
            () = tokio::time::sleep(patience.into()) => Ok(()),
        };
        match overdue {
            Err(failed) if !failed.is_decided() => {
                self.retry(model, entry, target, message, deadline, failed).await
            }
            Err(decided) => decided.reply(),
            Ok(()) => {
                let now = self.clock.now();
                let silent = target.link.judge(now, |health| health.overdue(now, first.sent));
                // The table may have changed, and name other backends.
                let table = self.table();
                let fresh = table.models.get(model).map_or(entry, |entry| entry);
                match self.hedge(fresh, target, silent) {
                    None => match attempt.await {
                        decided if decided.is_decided() => decided.reply(),
                        failed => self.retry(model, entry, target, message, deadline, failed).await,
                    },
                    Some(second) => {
                        entry.meter.hedge();
                        let second = &fresh.targets[second];
                        let second = self.attempt(fresh, second, message, deadline, now);
                        first_decided(attempt, second).await.reply()
                    }
                }
            }
        }
        .map(|reply| *reply)
    }

    /// Takes one retry out of the budget, if there is one left.
    pub(super) fn take_retry(&self) -> bool {
        self.budgets(|budgets| budgets.retries.take())
    }

    fn budgets<T>(&self, change: impl FnOnce(&mut AttemptBudgets) -> T) -> T {
        change(&mut self.budgets.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How long a request waits at `target` before another backend gets it, too.
    fn patience(&self, entry: &ModelEntry, target: &RouteTarget) -> Nanos {
        let expected = Nanos(((target.batch_ms + target.cycle_ms).clamp(0.0, 1e9) * 1e6) as u64);
        let objective = entry.record.config.timeout_ms.map(Nanos::from_millis);
        let best_effort = entry.record.config.class == Class::BestEffort;
        patience(entry.meter.typical(), expected, objective, best_effort)
    }

    /// The backend that gets a request which waits at `first` for too long, if one may. Requests of
    /// best effort are only sent again where the first backend is silent.
    fn hedge(&self, entry: &ModelEntry, first: &RouteTarget, silent: bool) -> Option<usize> {
        if !silent && entry.record.config.class == Class::BestEffort {
            return None;
        }
        let second = self.choose_serving(entry, Some(&first.link.address))?;
        // One that is ejected as well would not help.
        let (availability, _) = entry.targets[second].link.service(self.clock.now());
        let allowed = availability == Availability::Serving
            && self.budgets(|budgets| match silent {
                true => budgets.retries.take(),
                false => budgets.hedges.take(),
            });
        allowed.then_some(second)
    }

    /// Sends a request that `first` did not answer to another backend, if there is one and time
    /// remains. The budget of retries keeps a failing cluster from getting every request twice.
    async fn retry(
        &self,
        model: &str,
        entry: &ModelEntry,
        first: &RouteTarget,
        message: SentMessage,
        deadline: Option<Nanos>,
        failed: Attempt<Reply>,
    ) -> ApiResult<Reply> {
        let now = self.clock.now();
        let left = deadline.map(|deadline| Nanos(deadline.0.saturating_sub(now.0)));
        if left.is_some_and(|left| left < RETRY_TIME_MIN) {
            return Err(deadline_exceeded(model));
        }
        let table = self.table();
        let fresh = table.models.get(model).map_or(entry, |entry| entry);
        let tried = &first.link.address;
        let second = match &failed {
            Attempt::GivenUp(_) => self.spare(fresh, tried),
            _ => self.choose_serving(fresh, Some(tried)),
        };
        let Some(second) = second else { return failed.reply() };
        if !self.take_retry() {
            return failed.reply();
        }
        entry.meter.retry();
        self.attempt(fresh, &fresh.targets[second], message, deadline, now).await.reply()
    }

    /// The model's backends as candidates, without the one that was tried.
    fn candidates(
        &self,
        entry: &ModelEntry,
        tried: Option<&str>,
    ) -> (Vec<usize>, Vec<BackendCandidate>) {
        let now = self.clock.now();
        // Other frontends send their share.
        let frontends = self.table().frontends.max(1);
        let depth = |target: &RouteTarget| depth(target.batch as usize).div_ceil(frontends);
        let candidate = |target: &RouteTarget| {
            let (availability, share) = target.link.service(now);
            BackendCandidate {
                weight: target.weight * share,
                outstanding: target.outstanding.count(),
                depth: depth(target),
                down: availability != Availability::Serving,
                progress: target.progress(frontends),
            }
        };
        let mut candidates: Vec<BackendCandidate> = entry.targets.iter().map(candidate).collect();
        if candidates.iter().any(|candidate| candidate.down) {
            limit_ejections(&mut candidates, |index| {
                let health = entry.targets[index].link.health();
                (!health.is_lost()).then_some(health.level())
            });
        }
        let untried = |(index, _): &(usize, BackendCandidate)| {
            tried != Some(entry.targets[*index].link.address.as_str())
        };
        candidates.into_iter().enumerate().filter(untried).unzip()
    }

    /// The backend of a new request: one whose probe is due, or else one that serves.
    fn choose(&self, entry: &ModelEntry) -> Option<Chosen> {
        let sent = self.clock.now();
        let probes = |target: &RouteTarget| {
            target.link.service(sent).0 == Availability::ProbeDue
                && target.link.judge(sent, |health| health.begin_probe(sent))
        };
        if let Some(index) = entry.targets.iter().position(probes) {
            return Some(Chosen { index, sent, probes: true });
        }
        let index = self.choose_serving(entry, None)?;
        Some(Chosen { index, sent, probes: false })
    }

    /// A backend that serves, other than the one that was tried.
    pub(super) fn choose_serving(&self, entry: &ModelEntry, tried: Option<&str>) -> Option<usize> {
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

    /// Sends a request to a backend. The deadline travels with it as the time that is left.
    async fn attempt(
        &self,
        entry: &ModelEntry,
        target: &RouteTarget,
        mut message: SentMessage,
        deadline: Option<Nanos>,
        sent: Nanos,
    ) -> Attempt<Reply> {
        target.link.outstanding.fetch_add(1, Ordering::Relaxed);
        let _in_flight = InFlightGuard(&target.link.outstanding);
        let frontends = self.table().frontends;
        let mut plan = SentRequest::new(target, frontends, self.clock.as_ref(), sent);
        let limit = match deadline {
            Some(deadline) => {
                let left = Nanos(deadline.0.saturating_sub(sent.0));
                set_deadline(&mut message.body, left);
                Duration::from(left) + GRACE
            }
            None => self.settings.timeout,
        };
        let name = message.body.model_name.clone();
        // What a canary does wrong is no fault of the backend, which serves others as well.
        let is_canary = split_served(&entry.served).1.is_some();
        let mut client = target.link.client();
        let reply = tokio::time::timeout(limit, client.model_infer(message.into_request())).await;
        let now = self.clock.now();
        match &reply {
            Ok(Ok(_)) => target.link.live.answer(now - sent, 1),
            _ => target.link.live.fail(1),
        }
        let status = match reply {
            Ok(Ok(reply)) => {
                self.judge_reply(entry, target, now, sent);
                return Attempt::Done(Box::new(with_memory(reply)));
            }
            Ok(Err(status)) => status,
            Err(_) => {
                if !is_canary {
                    target.link.judge(now, |health| health.failed(now, sent, false));
                }
                return Attempt::Final(deadline_exceeded(&name));
            }
        };
        if let Some(refused) = refused_memory(&status) {
            target.link.judge(now, |health| health.replied(now, sent));
            return Attempt::Final(unfit_reply(&name, refused));
        }
        // A status with a source was created on this side: the backend did not reply.
        if std::error::Error::source(&status).is_some() {
            target.link.judge(now, |health| health.failed(now, sent, true));
            let message = format!("model '{name}': its backend was lost: {}", status.message());
            return Attempt::RetryElsewhere(ApiError::unavailable(message).retry_after(1));
        }
        let error = error_of(&status);
        target.link.judge(now, |health| match error.kind {
            ErrorKind::Internal if !is_canary => health.failed(now, sent, false),
            _ => health.replied(now, sent),
        });
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

    /// Judges a backend by a reply: one that takes far longer than its peers is ejected.
    fn judge_reply(&self, entry: &ModelEntry, target: &RouteTarget, now: Nanos, sent: Nanos) {
        let latency = now - sent;
        entry.meter.replied(latency);
        let own = target.outstanding.record_latency(latency);
        let objective = entry.record.config.timeout_ms.map(Nanos::from_millis);
        let is_peer = |peer: &&RouteTarget| peer.link.address != target.link.address;
        // The reply itself has to be slow, so that peers are only compared where it matters.
        let slow = Nanos(entry.meter.typical().as_nanos().saturating_mul(2)) < latency && {
            let peers = entry.targets.iter().filter(is_peer);
            let peers: Vec<_> = peers.map(|peer| peer.outstanding.latency()).collect();
            is_outlier(own, &peers, objective)
        };
        if slow {
            target.outstanding.forget_latency();
        }
        target.link.judge(now, |health| {
            health.replied(now, sent);
            if slow {
                health.slow(now);
            }
        });
    }
}

/// A reply whose outputs hold the reservation of its memory.
fn with_memory(mut reply: tonic::Response<proto::ModelInferResponse>) -> proto::ModelInferResponse {
    let memory = reply.extensions_mut().remove::<ReplyMemory>();
    let mut reply = reply.into_inner();
    for raw in &mut reply.raw_output_contents {
        if let Some(memory) = &memory {
            *raw = memory.hold(std::mem::take(raw));
        }
    }
    reply
}

/// Why there was no memory for a reply, if that is what the status is about.
fn refused_memory(status: &tonic::Status) -> Option<MemoryError> {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if let Some(refused) = error.downcast_ref::<MemoryError>() {
            return Some(*refused);
        }
        cause = error.source();
    }
    None
}

/// The error of a reply that this frontend has no memory for. Another backend would send the same.
fn unfit_reply(model: &str, refused: MemoryError) -> ApiError {
    let message = format!("model '{model}': the reply of its backend does not fit: {refused}");
    match refused {
        MemoryError::TooLarge { .. } => ApiError::new(ErrorKind::BadGateway, message),
        MemoryError::Busy { .. } => ApiError::unavailable(message).retry_after(1),
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::sync::Arc;

    use super::*;

    fn failed() -> Attempt<u32> {
        Attempt::RetryElsewhere(ApiError::unavailable("lost"))
    }

    /// Drops its half of the reference when the attempt is cancelled.
    async fn endless(_held: Arc<()>) -> Attempt<u32> {
        pending().await
    }

    #[tokio::test]
    async fn of_two_attempts_one_reply_is_used_and_the_other_cancelled() {
        let held = Arc::new(());
        let reply = first_decided(endless(held.clone()), ready(Attempt::Done(2))).await;
        assert_eq!((reply.reply().unwrap(), Arc::strong_count(&held)), (2, 1));
        let reply = first_decided(ready(Attempt::Done(1)), endless(held.clone())).await;
        assert_eq!((reply.reply().unwrap(), Arc::strong_count(&held)), (1, 1));
        let reply = first_decided(ready(Attempt::Done(1)), ready(Attempt::Done(2))).await;
        assert_eq!(reply.reply().unwrap(), 1);
    }

    #[tokio::test]
    async fn an_attempt_that_fails_leaves_the_request_to_the_other() {
        let late = || async {
            tokio::task::yield_now().await;
            Attempt::Done(7)
        };
        assert_eq!(first_decided(ready(failed()), late()).await.reply().unwrap(), 7);
        assert_eq!(first_decided(late(), ready(failed())).await.reply().unwrap(), 7);
        assert!(first_decided(ready(failed()), ready(failed())).await.reply().is_err());
        let invalid = || ready(Attempt::<u32>::Final(ApiError::invalid("no")));
        let error = first_decided(invalid(), late()).await.reply().unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidArgument);
    }
}
