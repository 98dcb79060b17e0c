//! REST: the Open Inference Protocol, Triton's extensions and our own, one module per area. To add
//! a route, add it to [`management`] or [`with_inference`], its handler to the module of its area,
//! and its description to `openapi/operations.rs`.

use std::sync::Arc;

use api::{ApiError, ModelRef};
use axum::Router;
use axum::body::Body;
use axum::extract::DefaultBodyLimit;
use axum::handler::Handler;
use http::{Method, Request, Response};
use tower::Service;

use crate::auth::Caller;
use crate::auth::routes::{self, Need};
use crate::connection::RequestBody;
use crate::console;
use crate::listener::Respond;
use crate::openapi;
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
mod routes_list;
mod statistics_api;

#[cfg(test)]
pub(crate) use body::compress;
pub(crate) use body::{Coding, MAX_EXPANSION, decompress, reserve_received};
pub(crate) use infer_api::{canary_choice, span as infer_span};
pub(crate) use monitor_api::Viewers;
pub(crate) use repository_api::check_load_parameters;
pub(crate) use routes_list::Routes;

/// Handles requests: inferences directly, all others through the router.
#[derive(Clone)]
pub(crate) struct RestHandler {
    app: Arc<AppState>,
    router: Router,
}

impl RestHandler {
    pub(crate) fn new(app: Arc<AppState>) -> RestHandler {
        let routes = with_inference(management(app.max_model_bytes), app.bodies.max_bytes);
        RestHandler { router: routes.into_router(&app), app }
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
pub(crate) fn management(max_model_bytes: usize) -> Routes {
    let models = DefaultBodyLimit::max(max_model_bytes);
    Routes::new()
        .get("/v2", health_api::server_metadata)
        .get("/v2/", health_api::server_metadata)
        .get("/v2/health/live", health_api::live)
        .get("/v2/health/ready", health_api::ready)
        .get("/v2/atoll/status", health_api::status)
        .get("/v2/atoll/live", monitor_api::live)
        .get("/v2/atoll/trace", monitor_api::trace)
        .get("/v2/atoll/trace/devices/{device}/requests/{request}", monitor_api::explain)
        .get("/v2/atoll/cluster", monitor_api::cluster)
        .post("/v2/atoll/plan", plan_api::plan)
        .get("/v2/models/stats", statistics_api::all)
        .get("/v2/models/{model}", model_api::metadata)
        .get("/v2/models/{model}/ready", model_api::ready)
        .get("/v2/models/{model}/config", model_api::config)
        .get("/v2/models/{model}/stats", statistics_api::one)
        .get("/v2/models/{model}/versions/{version}", model_api::metadata)
        .get("/v2/models/{model}/versions/{version}/ready", model_api::ready)
        .get("/v2/models/{model}/versions/{version}/config", model_api::config)
        .get("/v2/models/{model}/versions/{version}/stats", statistics_api::one)
        .post("/v2/repository/index", repository_api::index)
        .post("/v2/repository/models/{model}/load", repository_api::load)
        .post("/v2/repository/models/{model}/unload", repository_api::unload)
        .post("/register", classify_api::register.layer(models))
        .post("/v2/atoll/register", classify_api::register.layer(models))
        .get("/v2/atoll/models/{model}", model_api::details)
        .patch("/v2/atoll/models/{model}", registry_api::change_settings)
        .delete("/v2/atoll/models/{model}", registry_api::delete)
        .delete("/v2/atoll/models/{model}/versions/{version}", registry_api::delete)
        .post("/v2/atoll/models/{model}/rollback", registry_api::roll_back)
        .post("/v2/atoll/models/{model}/versions/{version}/rollback", registry_api::roll_back)
        .post("/v2/atoll/models/{model}/steps", monitor_api::steps)
        .get("/v2/atoll/models/{model}/canary", registry_api::canary)
        .post("/v2/atoll/models/{model}/canary", registry_api::start_canary)
        .post("/v2/atoll/models/{model}/versions/{version}/canary", registry_api::start_canary)
        .post("/v2/atoll/models/{model}/canary/promote", registry_api::promote_canary)
        .post("/v2/atoll/models/{model}/canary/abort", registry_api::abort_canary)
        .get("/v2/atoll/queries", query_api::list)
        .get("/v2/atoll/queries/{query}", query_api::one)
        .put("/v2/atoll/queries/{query}", query_api::put)
        .delete("/v2/atoll/queries/{query}", query_api::delete)
        .get("/openapi.json", openapi::document)
        .unsupported("/v2/systemsharedmemory/{*rest}")
        .unsupported("/v2/cudasharedmemory/{*rest}")
        .unsupported("/v2/trace/setting")
        .unsupported("/v2/logging")
}

fn with_inference(routes: Routes, max_body_bytes: usize) -> Routes {
    let images = DefaultBodyLimit::max(max_body_bytes);
    console::with_console(routes)
        .post("/v2/models/{model}/infer", infer_api::route)
        .post("/v2/models/{model}/versions/{version}/infer", infer_api::route)
        .post("/classify", classify_api::classify.layer(images))
        .post("/v2/atoll/classify", classify_api::classify.layer(images))
        .post("/v2/atoll/queries/{query}/infer", query_api::infer)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::metrics;

    #[test]
    fn every_route_is_described_and_nothing_else() {
        let routes = metrics::with_metrics(with_inference(management(1), 1));
        let routes: BTreeSet<_> = routes.list().collect();
        let described = openapi::described();
        let missing: Vec<_> = routes.difference(&described).collect();
        let absent: Vec<_> = described.difference(&routes).collect();
        assert!(missing.is_empty(), "without a description in operations.rs: {missing:?}");
        assert!(absent.is_empty(), "described, but no route: {absent:?}");
    }
}
