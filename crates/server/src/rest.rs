//! REST: the Open Inference Protocol, Triton's extensions and our own, one module per area. To add
//! a route, add it to `router` and its handler to the module of its area.

use std::sync::Arc;

use api::{ApiError, ModelRef};
use axum::Router;
use axum::body::Body;
use axum::extract::DefaultBodyLimit;
use axum::routing::{any, delete, get, post, put};

use http::{Method, Request, Response};
use tower::Service;

use crate::auth::Caller;
use crate::auth::routes::{self, Need};
use crate::connection::RequestBody;
use crate::console;
use crate::listener::Respond;
use crate::server::AppState;
use response::ResponseBody;

mod body;
mod classify_api;
mod health_api;
mod infer_api;
mod model_api;
mod monitor_api;
mod plan_api;
mod query_api;
mod registry_api;
mod repository_api;
pub(crate) mod response;
mod statistics_api;

#[cfg(test)]
pub(crate) use body::compress;
pub(crate) use body::{Coding, MAX_EXPANSION, decompress, reserve_received};
pub(crate) use infer_api::span as infer_span;
pub(crate) use monitor_api::Viewers;
pub(crate) use repository_api::check_load_parameters;

/// Handles requests: inferences directly, all others through the router.
#[derive(Clone)]
pub(crate) struct RestHandler {
    app: Arc<AppState>,
    router: Router,
}

impl RestHandler {
    pub(crate) fn new(app: Arc<AppState>) -> RestHandler {
        RestHandler { router: with_inference(management(&app), &app).with_state(app.clone()), app }
    }
}

impl Respond for RestHandler {
    const GRPC: bool = false;

    fn app(&self) -> &Arc<AppState> {
        &self.app
    }

    fn need(&self, method: &Method, path: &str) -> Need {
        routes::rest(method, path)
    }

    fn error(&self, error: ApiError) -> Response<ResponseBody> {
        response::error(&error).map(ResponseBody::Routed)
    }

    async fn respond(
        &self,
        request: Request<RequestBody>,
        caller: Arc<Caller>,
    ) -> Response<ResponseBody> {
        if request.method() == Method::POST
            && let Some((name, version)) = infer_api::fast_path(request.uri().path())
            && let Ok(model) = ModelRef::parse(name, version)
        {
            // The path belongs to the head, which outlives the body.
            let (name, version) = (name.to_string(), model.version);
            let model = ModelRef { name: &name, version };
            let (head, body) = request.into_parts();
            let result = infer_api::infer(&self.app, &caller, model, &head.headers, body).await;
            return match result {
                Ok(response) => response.map(ResponseBody::SegmentedBody),
                Err(error) => response::error(&error).map(ResponseBody::Routed),
            };
        }
        routed(self.router.clone(), request, caller).await
    }
}

/// Sends a request through a router, with its caller for the handlers.
pub(crate) async fn routed(
    mut router: Router,
    mut request: Request<RequestBody>,
    caller: Arc<Caller>,
) -> Response<ResponseBody> {
    request.extensions_mut().insert(caller);
    match router.call(request.map(Body::new)).await {
        Ok(response) => response.map(ResponseBody::Routed),
        Err(never) => match never {},
    }
}

/// What is not inference: health, models, repository, registry. The admin port has it too.
pub(crate) fn management(app: &AppState) -> Router<Arc<AppState>> {
    let models = DefaultBodyLimit::max(app.max_model_bytes);
    Router::new()
        .route("/v2", get(health_api::server_metadata))
        .route("/v2/", get(health_api::server_metadata))
        .route("/v2/health/live", get(health_api::live))
        .route("/v2/health/ready", get(health_api::ready))
        .route("/v2/atoll/status", get(health_api::status))
        .route("/v2/atoll/live", get(monitor_api::live))
        .route("/v2/atoll/trace", get(monitor_api::trace))
        .route("/v2/atoll/trace/devices/{device}/requests/{request}", get(monitor_api::explain))
        .route("/v2/atoll/cluster", get(monitor_api::cluster))
        .route("/v2/atoll/plan", post(plan_api::plan))
        .route("/v2/models/stats", get(statistics_api::all))
        .route("/v2/models/{model}", get(model_api::metadata))
        .route("/v2/models/{model}/ready", get(model_api::ready))
        .route("/v2/models/{model}/config", get(model_api::config))
        .route("/v2/models/{model}/stats", get(statistics_api::one))
        .route("/v2/models/{model}/versions/{version}", get(model_api::metadata))
        .route("/v2/models/{model}/versions/{version}/ready", get(model_api::ready))
        .route("/v2/models/{model}/versions/{version}/config", get(model_api::config))
        .route("/v2/models/{model}/versions/{version}/stats", get(statistics_api::one))
        .route("/v2/repository/index", post(repository_api::index))
        .route("/v2/repository/models/{model}/load", post(repository_api::load))
        .route("/v2/repository/models/{model}/unload", post(repository_api::unload))
        .route("/register", post(classify_api::register).layer(models))
        .route("/v2/atoll/register", post(classify_api::register).layer(models))
        .route("/v2/atoll/models/{model}", get(model_api::details).delete(registry_api::delete))
        .route("/v2/atoll/models/{model}/versions/{version}", delete(registry_api::delete))
        .route("/v2/atoll/models/{model}/rollback", post(registry_api::roll_back))
        .route(
            "/v2/atoll/models/{model}/versions/{version}/rollback",
            post(registry_api::roll_back),
        )
        .route("/v2/atoll/queries", get(query_api::list))
        .route("/v2/atoll/queries/{query}", get(query_api::one))
        .route("/v2/atoll/queries/{query}", put(query_api::put))
        .route("/v2/atoll/queries/{query}", delete(query_api::delete))
        .route("/v2/systemsharedmemory/{*rest}", any(response::unsupported))
        .route("/v2/cudasharedmemory/{*rest}", any(response::unsupported))
        .route("/v2/trace/setting", any(response::unsupported))
        .route("/v2/logging", any(response::unsupported))
        .fallback(response::no_route)
        .method_not_allowed_fallback(response::wrong_method)
}

fn with_inference(router: Router<Arc<AppState>>, app: &AppState) -> Router<Arc<AppState>> {
    let images = DefaultBodyLimit::max(app.bodies.max_bytes);
    console::with_console(router)
        .route("/v2/models/{model}/infer", post(infer_api::route))
        .route("/v2/models/{model}/versions/{version}/infer", post(infer_api::route))
        .route("/classify", post(classify_api::classify).layer(images))
        .route("/v2/atoll/classify", post(classify_api::classify).layer(images))
        .route("/v2/atoll/queries/{query}/infer", post(query_api::infer))
        .method_not_allowed_fallback(response::wrong_method)
}
