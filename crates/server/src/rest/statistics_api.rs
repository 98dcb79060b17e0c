//! Statistics of one model or all.

use std::sync::Arc;

use api::ModelRef;
use api::metadata::StatisticsResponse;
use axum::extract::State;

use super::answer::{self, Answer};
use super::model_api::ModelPath;
use crate::server::App;

pub(super) async fn all(State(app): State<Arc<App>>) -> Answer {
    statistics(&app, None).await
}

pub(super) async fn one(State(app): State<Arc<App>>, path: ModelPath) -> Answer {
    statistics(&app, Some(path.model()?)).await
}

async fn statistics(app: &App, model: Option<ModelRef<'_>>) -> Answer {
    answer::json(&StatisticsResponse { model_stats: app.service.statistics(model).await? })
}
