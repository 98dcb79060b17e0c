//! The registry: deletes models and rolls them back. `classify_api` registers them.

use std::sync::Arc;

use axum::extract::State;
use serde_json::json;

use super::model_api::ModelPath;
use super::response::{self, HandlerResult};
use crate::server::AppState;

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
