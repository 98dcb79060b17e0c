//! The repository: its index, loading and unloading.

use std::sync::Arc;

use api::ApiError;
use api::error::ApiResult;
use axum::body::Body;
use axum::extract::State;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::body;
use super::model_api::ModelPath;
use super::response::{self, HandlerResult};
use crate::server::AppState;

/// Maximum size of a body with settings.
const MAX_SETTINGS_BYTES: usize = 1 << 20;

#[derive(Default, Deserialize)]
struct IndexRequest {
    #[serde(default)]
    ready: bool,
}

#[derive(Default, Deserialize)]
struct LoadRequest {
    #[serde(default)]
    parameters: Map<String, Value>,
}

async fn settings<T: Default + DeserializeOwned>(
    app: &AppState,
    headers: &HeaderMap,
    body: Body,
) -> ApiResult<T> {
    let (bytes, _memory) = body::read(app, headers, body, MAX_SETTINGS_BYTES).await?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::invalid(format!("the request is not valid JSON: {error}")))
}

pub(super) async fn index(
    State(app): State<Arc<AppState>>,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let request: IndexRequest = settings(&app, &headers, body).await?;
    response::json(&app.service.index(request.ready).await?)
}

pub(super) async fn load(
    State(app): State<Arc<AppState>>,
    path: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let request: LoadRequest = settings(&app, &headers, body).await?;
    check_load_parameters(request.parameters.keys().map(String::as_str))?;
    let _guard = app.requests.admit()?;
    app.service.load(path.name()).await?;
    Ok(response::empty(StatusCode::OK))
}

/// Triton's loads may carry a configuration or files; silently ignoring them would load the wrong
/// model.
pub(crate) fn check_load_parameters<'a>(names: impl Iterator<Item = &'a str>) -> ApiResult<()> {
    for name in names {
        if name == "config" || name.starts_with("file:") {
            return Err(ApiError::unsupported(format!(
                "loading with parameter '{name}' is not supported; put the file in the repository \
                 or POST it to /register"
            )));
        }
    }
    Ok(())
}

pub(super) async fn unload(
    State(app): State<Arc<AppState>>,
    path: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let request: LoadRequest = settings(&app, &headers, body).await?;
    if request.parameters.contains_key("atoll_delete") {
        let name = path.name();
        return Err(ApiError::invalid(format!(
            "atoll_delete is for gRPC; send DELETE /v2/atoll/models/{name}"
        ))
        .into());
    }
    app.service.unload(path.name()).await?;
    Ok(response::empty(StatusCode::OK))
}
