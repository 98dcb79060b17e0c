//! The registry: deletes models, rolls them back, and serves versions as canaries. `classify_api`
//! registers them.

use std::sync::Arc;

use api::{ApiError, CanaryOptions};
use axum::body::Body;
use axum::extract::State;
use http::HeaderMap;
use serde_json::json;

use super::body;
use super::model_api::ModelPath;
use super::response::{self, HandlerResult};
use crate::server::AppState;

/// Maximum size of a canary's options.
const MAX_CANARY_BYTES: usize = 1 << 16;

pub(super) async fn delete(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    let model = path.model()?;
    let _guard = app.requests.admit()?;
    let count = app.service.delete_model(model).await?;
    response::json(&json!({ "name": model.name, "deleted_versions": count }))
}

pub(super) async fn roll_back(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    let model = path.model()?;
    let _guard = app.requests.admit()?;
    response::json(&app.service.roll_back_model(model).await?)
}

pub(super) async fn start_canary(
    State(app): State<Arc<AppState>>,
    path: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let model = path.model()?;
    let _guard = app.requests.admit()?;
    let (bytes, _memory) = body::read(&app, &headers, body, MAX_CANARY_BYTES).await?;
    let options: CanaryOptions = serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::invalid(format!("these are no options of a canary: {error}")))?;
    options.check()?;
    response::json(&app.service.start_canary(model, options).await?)
}

pub(super) async fn promote_canary(
    State(app): State<Arc<AppState>>,
    path: ModelPath,
) -> HandlerResult {
    let _guard = app.requests.admit()?;
    response::json(&app.service.end_canary(path.name(), true).await?)
}

pub(super) async fn abort_canary(
    State(app): State<Arc<AppState>>,
    path: ModelPath,
) -> HandlerResult {
    let _guard = app.requests.admit()?;
    response::json(&app.service.end_canary(path.name(), false).await?)
}

pub(super) async fn canary(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    response::json(&app.service.canary(path.name()).await?)
}
