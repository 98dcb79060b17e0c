//! The registry: deletes models, rolls them back, and serves versions as canaries. `classify_api`
//! registers them. Settings change here too, also of models in a repository.

use std::sync::Arc;

use api::{ApiError, CanaryOptions, InferOptions};
use axum::body::Body;
use axum::extract::{Extension, State};
use http::HeaderMap;
use model::config::SettingsChange;
use serde_json::json;

use super::body;
use super::model_api::ModelPath;
use super::response::{self, HandlerResult};
use crate::auth::Caller;
use crate::server::AppState;

/// Maximum size of a canary's options.
const MAX_CANARY_BYTES: usize = 1 << 16;
/// Maximum size of a change of settings.
const MAX_CHANGE_BYTES: usize = 1 << 16;

pub(super) async fn delete(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    let model = path.model()?;
    let _guard = app.requests.admit()?;
    let count = app.service.delete_model(model).await?;
    response::json(&json!({ "name": model.name, "deleted_versions": count }))
}

pub(super) async fn change_settings(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Arc<Caller>>,
    path: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let model = path.model()?;
    let _guard = app.requests.admit()?;
    let (bytes, _memory) = body::read(&app, &headers, body, MAX_CHANGE_BYTES).await?;
    let change = SettingsChange::parse(&bytes).map_err(ApiError::invalid)?;
    // A caller gives a model no class and no priority that its own requests could not have.
    let (class, priority) = change.class_and_priority().map_err(ApiError::invalid)?;
    caller.limit(&mut InferOptions { class, priority, ..InferOptions::default() })?;
    response::json(&app.service.change_settings(model, change).await?)
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
