//! A router that knows its routes.

use std::sync::Arc;

use axum::Router;
use axum::handler::Handler;
use axum::routing::{MethodRouter, any, delete, get, patch, post, put};
use http::Method;

use super::response;
use crate::server::AppState;

/// Routes with their handlers. The list of them is compared with the description of the API.
pub(crate) struct Routes {
    router: Router<Arc<AppState>>,
    list: Vec<(Method, &'static str)>,
}

impl Routes {
    pub(super) fn new() -> Routes {
        Routes { router: Router::new(), list: Vec::new() }
    }

    fn add(
        mut self,
        method: Method,
        path: &'static str,
        handler: MethodRouter<Arc<AppState>>,
    ) -> Routes {
        self.list.push((method, path));
        Routes { router: self.router.route(path, handler), list: self.list }
    }

    pub(crate) fn get<H, T>(self, path: &'static str, handler: H) -> Routes
    where
        H: Handler<T, Arc<AppState>>,
        T: 'static,
    {
        self.add(Method::GET, path, get(handler))
    }

    pub(super) fn post<H, T>(self, path: &'static str, handler: H) -> Routes
    where
        H: Handler<T, Arc<AppState>>,
        T: 'static,
    {
        self.add(Method::POST, path, post(handler))
    }

    pub(super) fn put<H, T>(self, path: &'static str, handler: H) -> Routes
    where
        H: Handler<T, Arc<AppState>>,
        T: 'static,
    {
        self.add(Method::PUT, path, put(handler))
    }

    pub(super) fn patch<H, T>(self, path: &'static str, handler: H) -> Routes
    where
        H: Handler<T, Arc<AppState>>,
        T: 'static,
    {
        self.add(Method::PATCH, path, patch(handler))
    }

    pub(super) fn delete<H, T>(self, path: &'static str, handler: H) -> Routes
    where
        H: Handler<T, Arc<AppState>>,
        T: 'static,
    {
        self.add(Method::DELETE, path, delete(handler))
    }

    /// A route of the protocol that no method of is supported; it is not described.
    pub(super) fn unsupported(self, path: &'static str) -> Routes {
        Routes { router: self.router.route(path, any(response::unsupported)), ..self }
    }

    /// The router; other paths and methods get errors.
    pub(crate) fn into_router(self, app: &Arc<AppState>) -> Router {
        self.router
            .fallback(response::no_route)
            .method_not_allowed_fallback(response::wrong_method)
            .with_state(app.clone())
    }

    /// Methods and paths.
    #[cfg(test)]
    pub(crate) fn list(&self) -> impl Iterator<Item = (String, &'static str)> {
        self.list.iter().map(|(method, path)| (method.to_string(), *path))
    }
}
