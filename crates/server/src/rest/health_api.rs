//! The server itself: health, metadata, status.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use http::{Response, StatusCode};
use serde::Serialize;

use super::response::{self, HandlerResult};
use crate::server::AppState;

pub(super) async fn live() -> Response<Body> {
    response::empty(StatusCode::OK)
}

pub(super) async fn ready(State(app): State<Arc<AppState>>) -> Response<Body> {
    response::empty(match app.ready() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    })
}

pub(super) async fn server_metadata(State(app): State<Arc<AppState>>) -> HandlerResult {
    response::json(&app.service.server_metadata())
}

#[derive(Serialize)]
struct Status {
    ready: bool,
    draining: bool,
    requests_in_flight: usize,
    models: Vec<api::IndexEntry>,
}

pub(super) async fn status(State(app): State<Arc<AppState>>) -> HandlerResult {
    response::json(&Status {
        ready: app.ready(),
        draining: app.requests.is_closed(),
        requests_in_flight: app.requests.in_flight(),
        models: app.service.index(false).await?,
    })
}
