//! Plans of GPUs, for the console.

use std::sync::Arc;

use api::ApiError;
use axum::body::Body;
use axum::extract::State;
use http::HeaderMap;
use serde_json::Value;

use super::body;
use super::response::{self, HandlerResult};
use crate::heavy_work::{LARGE_BYTES, heavy};
use crate::server::AppState;

/// Maximum size of services and profiles.
const MAX_PLAN_BYTES: usize = 1 << 20;

pub(super) async fn plan(
    State(app): State<Arc<AppState>>,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let _guard = app.requests.admit()?;
    let planner = app.planner.clone();
    let planner = planner.ok_or_else(|| ApiError::unsupported("this server does not plan"))?;
    let (bytes, _memory) = body::read(&app, &headers, body, MAX_PLAN_BYTES).await?;
    let request: Value = serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::invalid(format!("the request is not valid JSON: {error}")))?;
    let plan = app.limited(heavy(LARGE_BYTES, move || (planner.0)(request))).await?;
    response::json(&plan)
}
