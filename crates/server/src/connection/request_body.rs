//! Request bodies that end when their client stops sending.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use thiserror::Error;
use tokio::time::{Instant, Sleep, sleep_until};

use super::slowest;

/// Why a body ended early.
#[derive(Debug, Error)]
pub(crate) enum BodyError {
    /// The client stopped sending, or sends too slowly.
    #[error("the body did not arrive in time")]
    Timeout,
    /// The server stops and does not wait longer for it.
    #[error("the server is shutting down")]
    Draining,
    /// The connection broke.
    #[error(transparent)]
    Broken(#[from] hyper::Error),
}

/// When a server that drains gives up bodies that are still arriving.
#[derive(Clone, Debug, Default)]
pub(crate) struct DrainDeadline(Arc<OnceLock<Instant>>);

impl DrainDeadline {
    /// Starts the drain.
    pub(crate) fn set(&self, deadline: Instant) {
        let _ = self.0.set(deadline);
    }

    fn passed(&self, now: Instant) -> bool {
        self.0.get().is_some_and(|deadline| *deadline <= now)
    }
}

/// Limits on one body.
#[derive(Clone, Debug)]
pub(crate) struct BodyRules {
    /// Time without a byte.
    pub(crate) timeout: Duration,
    /// Whether the whole body has to arrive at a minimum rate. Calls whose client sends messages
    /// when it has some have no rate.
    pub(crate) whole: bool,
    pub(crate) drain: DrainDeadline,
}

/// How often a body that does not arrive is checked.
const CHECK: Duration = Duration::from_millis(500);

/// A request body under [`BodyRules`].
pub(crate) struct RequestBody<B = Incoming> {
    inner: B,
    rules: BodyRules,
    began: Option<Instant>,
    received: u64,
    /// While nothing arrives: since when, and the next check.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl<B> RequestBody<B> {
    pub(crate) fn new(inner: B, rules: BodyRules) -> RequestBody<B> {
        RequestBody { inner, rules, began: None, received: 0, waiting: None }
    }

    /// Why the body is given up, after waiting since `since`.
    fn overdue(&self, since: Instant, now: Instant) -> Option<BodyError> {
        if now - since >= self.rules.timeout {
            return Some(BodyError::Timeout);
        }
        let allowed = self.rules.timeout + slowest(self.received);
        if self.rules.whole && self.began.is_some_and(|began| now - began >= allowed) {
            return Some(BodyError::Timeout);
        }
        self.rules.drain.passed(now).then_some(BodyError::Draining)
    }

    fn wait(&mut self, context: &mut Context<'_>) -> Poll<BodyError> {
        loop {
            let now = Instant::now();
            self.began.get_or_insert(now);
            let period = CHECK.min(self.rules.timeout);
            let (since, check) =
                self.waiting.get_or_insert_with(|| (now, Box::pin(sleep_until(now + period))));
            if check.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            let since = *since;
            check.as_mut().reset(now + period);
            if let Some(error) = self.overdue(since, now) {
                return Poll::Ready(error);
            }
        }
    }
}

impl<B: Body<Data = Bytes, Error = hyper::Error> + Unpin> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match Pin::new(&mut self.inner).poll_frame(context) {
            Poll::Ready(frame) => {
                if self.waiting.take().is_some() && matches!(frame, Some(Ok(_))) {
                    // A byte now and then is no progress.
                    let now = Instant::now();
                    if let Some(error) = self.overdue(now, now) {
                        return Poll::Ready(Some(Err(error)));
                    }
                }
                if let Some(Ok(frame)) = &frame
                    && let Some(data) = frame.data_ref()
                {
                    self.received += data.len() as u64;
                }
                Poll::Ready(frame.map(|frame| frame.map_err(BodyError::Broken)))
            }
            Poll::Pending => self.wait(context).map(|error| Some(Err(error))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt, stream};
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    fn rules(whole: bool) -> BodyRules {
        BodyRules { timeout: Duration::from_secs(1), whole, drain: DrainDeadline::default() }
    }

    /// A byte every `pause`, for ever.
    fn trickle(pause: Duration) -> impl Body<Data = Bytes, Error = hyper::Error> + Unpin {
        let frames = stream::unfold((), move |()| async move {
            tokio::time::sleep(pause).await;
            Some((Ok(Frame::data(Bytes::from_static(b"x"))), ()))
        });
        StreamBody::new(frames.boxed())
    }

    async fn error_of(mut body: impl Body<Data = Bytes, Error = BodyError> + Unpin) -> BodyError {
        loop {
            if let Some(Err(error)) = body.frame().await {
                return error;
            }
        }
    }

    #[tokio::test]
    async fn silent_and_slow_bodies_end() {
        for pause in [Duration::from_secs(3600), Duration::from_millis(700)] {
            let start = Instant::now();
            let body = RequestBody::new(trickle(pause), rules(true));
            assert!(matches!(error_of(body).await, BodyError::Timeout));
            let ended = start.elapsed();
            assert!(ended >= Duration::from_millis(990), "{ended:?}");
            assert!(ended < Duration::from_secs(3), "{ended:?}");
        }
    }

    #[tokio::test]
    async fn a_byte_now_and_then_is_no_progress() {
        let start = Instant::now();
        let body = RequestBody::new(trickle(Duration::from_millis(20)), rules(true));
        assert!(matches!(error_of(body).await, BodyError::Timeout));
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn streams_of_messages_may_pause_until_the_server_drains() {
        let rules = rules(false);
        let start = Instant::now();
        rules.drain.set(start + Duration::from_secs(2));
        let body = RequestBody::new(trickle(Duration::from_millis(300)), rules);
        assert!(matches!(error_of(body).await, BodyError::Draining));
        let ended = start.elapsed();
        assert!(ended >= Duration::from_secs(2), "{ended:?}");
        assert!(ended < Duration::from_secs(4), "{ended:?}");
    }
}
