//! Statistics of one model or all.

use std::sync::Arc;

use api::ModelRef;
use api::metadata::StatisticsResponse;
use axum::extract::State;

use super::model_api::ModelPath;
use super::response::{self, HandlerResult};
use crate::server::AppState;

pub(super) async fn all(State(app): State<Arc<AppState>>) -> HandlerResult {
    statistics(&app, None).await
}

pub(super) async fn one(State(app): State<Arc<AppState>>, path: ModelPath) -> HandlerResult {
    statistics(&app, Some(path.model()?)).await
}

async fn statistics(app: &AppState, model: Option<ModelRef<'_>>) -> HandlerResult {
    response::json(&StatisticsResponse { model_stats: app.service.statistics(model).await? })
}
