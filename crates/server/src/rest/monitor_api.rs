//! What viewers read: live figures and spans, traces, why a request took long, and the steps of a
//! model.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use api::monitor::{LiveCursor, Monitor};
use api::{ApiError, ErrorKind};
use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use base::Nanos;
use bytes::Bytes;
use futures_util::stream;
use http::header::{CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::model_api::ModelPath;
use super::response::{self, HandlerResult};
use crate::server::AppState;

/// Maximum number of viewers at once.
const MAX_VIEWERS: usize = 16;
/// Traces that are written at once; each takes tens of megabytes.
const MAX_TRACES: usize = 1;
/// Requests that are explained at once; each reads the spans of a device.
const MAX_EXPLANATIONS: usize = 4;
/// Longest position that a viewer gives.
const MAX_POSITION: usize = 4_096;
/// Models whose steps are measured at once.
const MAX_MEASUREMENTS: usize = 1;
/// Maximum seconds of a trace.
const MAX_TRACE_SECONDS: f64 = 600.0;
/// Time between two updates of a viewer.
const INTERVALS_MS: std::ops::RangeInclusive<u64> = 50..=10_000;
const DEFAULT_INTERVAL_MS: u64 = 250;

/// First byte of a frame's kind: figures as JSON.
const FIGURES: u8 = b'J';
/// Spans as numbers.
const SPANS: u8 = b'S';

/// How many viewers, traces and measurements there may be.
pub(crate) struct Viewers {
    live: Arc<Semaphore>,
    traces: Arc<Semaphore>,
    explanations: Arc<Semaphore>,
    measurements: Arc<Semaphore>,
}

impl Default for Viewers {
    fn default() -> Self {
        let of = |count| Arc::new(Semaphore::new(count));
        Viewers {
            live: of(MAX_VIEWERS),
            traces: of(MAX_TRACES),
            explanations: of(MAX_EXPLANATIONS),
            measurements: of(MAX_MEASUREMENTS),
        }
    }
}

fn take(places: &Arc<Semaphore>, what: &str) -> Result<OwnedSemaphorePermit, ApiError> {
    places.clone().try_acquire_owned().map_err(|_| {
        ApiError::new(ErrorKind::TooManyRequests, format!("too many {what}")).retry_after(1)
    })
}

fn monitor(app: &AppState) -> Result<Arc<dyn Monitor>, ApiError> {
    app.service.monitor().ok_or_else(|| {
        ApiError::unsupported("this server has no devices to watch: ask one that runs models")
    })
}

/// The options of a viewer.
#[derive(Deserialize)]
pub(super) struct LiveOptions {
    /// Send spans too.
    #[serde(default)]
    spans: bool,
    interval_ms: Option<u64>,
    /// The position in the last figures of an earlier stream, whose spans this one continues.
    position: Option<String>,
}

/// A viewer: its next update is made when its connection takes the last one.
struct Viewer {
    app: Arc<AppState>,
    monitor: Arc<dyn Monitor>,
    cursor: LiveCursor,
    with_spans: bool,
    interval: Duration,
    first: bool,
    _place: OwnedSemaphorePermit,
}

impl Viewer {
    /// The next frames; `None` when the server shuts down.
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Viewer)> {
        if !std::mem::take(&mut self.first) {
            tokio::time::sleep(self.interval).await;
        }
        if self.app.requests.is_closed() {
            return None;
        }
        let work = tokio::task::spawn_blocking(move || {
            let update = self.monitor.update(&mut self.cursor, self.with_spans);
            let mut frames = Vec::new();
            let figures = serde_json::to_vec(&update.figures).unwrap_or_default();
            write_frame(&mut frames, FIGURES, &figures);
            // Also without spans: the frame ends what the figures' position covers.
            if self.with_spans {
                write_frame(&mut frames, SPANS, &update.spans);
            }
            (Ok(Bytes::from(frames)), self)
        });
        work.await.ok()
    }
}

/// A frame: its length without these eight bytes, its kind, three zeros, its content.
fn write_frame(frames: &mut Vec<u8>, kind: u8, content: &[u8]) {
    let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
    frames.reserve(content.len() + 8);
    frames.extend_from_slice(&length.to_le_bytes());
    frames.extend_from_slice(&[kind, 0, 0, 0]);
    frames.extend_from_slice(&content[..length as usize]);
}

pub(super) async fn live(
    State(app): State<Arc<AppState>>,
    options: Result<Query<LiveOptions>, QueryRejection>,
) -> HandlerResult {
    let Query(options) = options.map_err(|error| ApiError::invalid(error.body_text()))?;
    let interval = options.interval_ms.unwrap_or(DEFAULT_INTERVAL_MS);
    if !INTERVALS_MS.contains(&interval) {
        let (from, to) = (INTERVALS_MS.start(), INTERVALS_MS.end());
        return Err(ApiError::invalid(format!("interval_ms must be in {from}..={to}")).into());
    }
    let position = options.position.unwrap_or_default();
    if position.len() > MAX_POSITION {
        let message = format!("position must be at most {MAX_POSITION} bytes");
        return Err(ApiError::invalid(message).into());
    }
    let monitor = monitor(&app)?;
    let viewer = Viewer {
        _place: take(&app.viewers.live, "viewers")?,
        app,
        cursor: monitor.cursor(&position),
        monitor,
        with_spans: options.spans,
        interval: Duration::from_millis(interval),
        first: true,
    };
    let mut response = Response::new(Body::from_stream(stream::unfold(viewer, Viewer::next)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// The options of a trace.
#[derive(Deserialize)]
pub(super) struct TraceOptions {
    seconds: Option<f64>,
}

pub(super) async fn trace(
    State(app): State<Arc<AppState>>,
    options: Result<Query<TraceOptions>, QueryRejection>,
) -> HandlerResult {
    let Query(options) = options.map_err(|error| ApiError::invalid(error.body_text()))?;
    let seconds = options.seconds.unwrap_or(5.0);
    if !(seconds > 0.0 && seconds <= MAX_TRACE_SECONDS) {
        let message = format!("seconds must be above 0 and at most {MAX_TRACE_SECONDS}");
        return Err(ApiError::invalid(message).into());
    }
    let monitor = monitor(&app)?;
    let place = take(&app.viewers.traces, "traces at once")?;
    let window = Nanos((seconds * 1e9) as u64);
    let text = tokio::task::spawn_blocking(move || {
        let _place = place;
        monitor.trace(window)
    });
    let text = text.await.map_err(|_| ApiError::internal("the trace could not be written"))?;
    let none = "a frontend runs no models and has no traces: ask a backend for its own";
    let text = text.ok_or_else(|| ApiError::unsupported(none))?;
    let mut response = response::json_bytes(StatusCode::OK, text.into_bytes());
    let file = HeaderValue::from_static("attachment; filename=\"atoll-trace.json\"");
    response.headers_mut().insert(CONTENT_DISPOSITION, file);
    Ok(response)
}

pub(super) async fn explain(
    State(app): State<Arc<AppState>>,
    path: Result<Path<(usize, u64)>, PathRejection>,
) -> HandlerResult {
    let Path((device, request)) = path.map_err(|error| ApiError::invalid(error.body_text()))?;
    let monitor = monitor(&app)?;
    let place = take(&app.viewers.explanations, "explanations at once")?;
    let found = tokio::task::spawn_blocking(move || {
        let _place = place;
        monitor.explain(device, request)
    });
    let found = found.await.map_err(|_| ApiError::internal("the request cannot be explained"))?;
    let gone = || ApiError::not_found(format!("request {request} is no longer recorded"));
    response::json(&found.ok_or_else(gone)?)
}

pub(super) async fn steps(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    let model = path.model()?;
    let _guard = app.requests.admit()?;
    let _place = take(&app.viewers.measurements, "measurements at once")?;
    response::json(&app.service.model_steps(model).await?)
}

pub(super) async fn cluster(State(app): State<Arc<AppState>>) -> HandlerResult {
    response::json(&app.service.cluster_status().await?)
}
