//! REST: the Open Inference Protocol, Triton's extensions and our own, one module per area.

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};

use crate::server::App;

pub(crate) mod answer;
mod body;
mod classify_api;
mod health_api;
mod infer_api;
mod model_api;
mod repository_api;
mod statistics_api;

pub(crate) use infer_api::span as infer_span;
pub(crate) use repository_api::check_load_parameters;

pub(crate) fn router(app: Arc<App>) -> Router {
    let images = DefaultBodyLimit::max(app.max_body_bytes);
    let models = DefaultBodyLimit::max(app.max_model_bytes);
    Router::new()
        .route("/v2", get(health_api::server_metadata))
        .route("/v2/", get(health_api::server_metadata))
        .route("/v2/health/live", get(health_api::live))
        .route("/v2/health/ready", get(health_api::ready))
        .route("/v2/atoll/status", get(health_api::status))
        .route("/v2/models/stats", get(statistics_api::all))
        .route("/v2/models/{model}", get(model_api::metadata))
        .route("/v2/models/{model}/ready", get(model_api::ready))
        .route("/v2/models/{model}/config", get(model_api::config))
        .route("/v2/models/{model}/stats", get(statistics_api::one))
        .route("/v2/models/{model}/infer", post(infer_api::infer))
        .route("/v2/models/{model}/versions/{version}", get(model_api::metadata))
        .route("/v2/models/{model}/versions/{version}/ready", get(model_api::ready))
        .route("/v2/models/{model}/versions/{version}/config", get(model_api::config))
        .route("/v2/models/{model}/versions/{version}/stats", get(statistics_api::one))
        .route("/v2/models/{model}/versions/{version}/infer", post(infer_api::infer))
        .route("/v2/repository/index", post(repository_api::index))
        .route("/v2/repository/models/{model}/load", post(repository_api::load))
        .route("/v2/repository/models/{model}/unload", post(repository_api::unload))
        .route("/register", post(classify_api::register).layer(models))
        .route("/v2/atoll/register", post(classify_api::register).layer(models))
        .route("/classify", post(classify_api::classify).layer(images))
        .route("/v2/atoll/classify", post(classify_api::classify).layer(images))
        .fallback(answer::no_route)
        .method_not_allowed_fallback(answer::wrong_method)
        .with_state(app)
}
