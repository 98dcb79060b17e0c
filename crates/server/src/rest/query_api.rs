//! Queries: models that feed each other, under one SLO.

use std::sync::Arc;

use api::ApiError;
use api::codec::{HEADER_LENGTH, OutputEncoding};
use api::error::ApiResult;
use axum::body::Body;
use axum::extract::{Extension, Path, State};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, StatusCode};
use model::Reservation;

use super::response::{self, HandlerResult};
use super::{body, infer_api};
use crate::auth::Caller;
use crate::server::AppState;
use crate::telemetry::{RequestName, traced};

/// Maximum size of a query's text.
const TEXT_MAX: usize = 256 << 10;

pub(super) async fn list(State(app): State<Arc<AppState>>) -> HandlerResult {
    response::json(&app.service.queries().await?)
}

pub(super) async fn one(
    State(app): State<Arc<AppState>>,
    Path(query): Path<String>,
) -> HandlerResult {
    response::json(&app.service.query(&query).await?)
}

pub(super) async fn put(
    State(app): State<Arc<AppState>>,
    Path(query): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let _guard = app.requests.admit()?;
    let (text, _memory) = body::read(&app, &headers, body, TEXT_MAX).await?;
    let text = std::str::from_utf8(&text)
        .map_err(|_| ApiError::invalid("a query is text: TOML or JSON"))?;
    response::json(&app.service.put_query(&query, text).await?)
}

pub(super) async fn delete(
    State(app): State<Arc<AppState>>,
    Path(query): Path<String>,
) -> HandlerResult {
    let _guard = app.requests.admit()?;
    app.service.delete_query(&query).await?;
    Ok(response::empty(StatusCode::OK))
}

/// Like an inference of a model; the body may also be a picture.
pub(super) async fn infer(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Arc<Caller>>,
    Path(query): Path<String>,
    mut headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    let _guard = app.requests.admit()?;
    let (body, memory) = body::read(&app, &headers, body, app.bodies.max_bytes).await?;
    if is_picture(&headers) {
        headers.insert(HEADER_LENGTH, HeaderValue::from_static("0"));
    }
    Ok(run(&app, &caller, &query, &headers, body, memory).await?.map(Body::new))
}

fn is_picture(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("image/"))
}

async fn run(
    app: &AppState,
    caller: &Caller,
    query: &str,
    headers: &HeaderMap,
    body: Bytes,
    memory: Reservation,
) -> ApiResult<http::Response<response::SegmentedBody>> {
    let own = infer_api::context(headers);
    let name = RequestName { name: "query", model: query, protocol: "rest" };
    let work = |context| async move {
        let (decoded, _memory) = infer_api::decode(app, headers, body, memory).await?;
        let (mut request, mut encoding) = (decoded.request, decoded.encoding);
        caller.limit(&mut request.options)?;
        if is_picture(headers) {
            // A client that sends only a picture expects JSON.
            encoding = OutputEncoding::default();
        }
        let span = infer_api::span(query, &request.id, &own);
        let work = app.limited(app.service.query_infer(query, request, context));
        let response = tracing::Instrument::instrument(work, span).await?;
        let timing = response.timing;
        Ok((infer_api::encode(app, headers, response, encoding).await?, timing))
    };
    traced(app.telemetry.as_ref(), own, name, work).await
}
