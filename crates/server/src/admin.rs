//! The admin port: health, metrics, models, repository and registry, without inference.
//!
//! It has a thread and connections of its own, so that load on the other ports does not delay it:
//! health is answered there whatever else happens. Work of other routes runs where it would run for
//! a request over REST.

use std::sync::Arc;

use api::ApiError;
use axum::Router;
use http::{Method, Request, Response};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinHandle;

use crate::auth::Caller;
use crate::auth::routes::{self, Need};
use crate::connection::{ConnectionLimits, RequestBody};
use crate::listener::Respond;
use crate::rest::response::{self, ResponseBody};
use crate::server::AppState;
use crate::{metrics, rest};

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 256;

/// The limits of the admin port: those of the others, with fewer connections.
pub(crate) fn limits(limits: &ConnectionLimits) -> ConnectionLimits {
    let max_connections = MAX_CONNECTIONS.min(limits.max_connections);
    ConnectionLimits { max_connections, max_per_address: max_connections, ..limits.clone() }
}

/// Handles requests on the admin port.
#[derive(Clone)]
pub(crate) struct AdminHandler {
    app: Arc<AppState>,
    router: Router,
    /// Where the work of routes runs that may take long.
    workers: Handle,
}

impl AdminHandler {
    pub(crate) fn new(app: Arc<AppState>, workers: Handle) -> AdminHandler {
        let routes = metrics::with_metrics(rest::management(app.max_model_bytes));
        let router = routes.into_router(&app);
        AdminHandler { app, router, workers }
    }
}

impl Respond for AdminHandler {
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
        let path = request.uri().path();
        let here = path == "/metrics" || path.starts_with("/v2/health/");
        let work = rest::routed(self.router.clone(), request, caller);
        if here {
            return work.await;
        }
        let mut work = AbortOnDrop(self.workers.spawn(work));
        match (&mut work.0).await {
            Ok(response) => response,
            Err(_) => self.error(ApiError::internal("the server failed on this request")),
        }
    }
}

/// A task that ends when its request is given up.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The thread of the admin port.
pub(crate) struct AdminRuntime(Option<Runtime>);

impl AdminRuntime {
    pub(crate) fn start() -> std::io::Result<AdminRuntime> {
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).max_blocking_threads(1).thread_name("admin").enable_all();
        Ok(AdminRuntime(Some(builder.build()?)))
    }

    pub(crate) fn handle(&self) -> Option<&Handle> {
        self.0.as_ref().map(Runtime::handle)
    }
}

impl Drop for AdminRuntime {
    fn drop(&mut self) {
        // Waiting for its thread is not allowed where the server is dropped.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
