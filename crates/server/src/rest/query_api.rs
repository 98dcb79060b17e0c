//! Queries: models that feed each other, under one objective.

use std::sync::Arc;

use api::ApiError;
use api::codec::{HEADER_LENGTH, OutputEncoding};
use api::error::ApiResult;
use axum::body::Body;
use axum::extract::{Path, State};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, StatusCode};

use super::answer::{self, Answer};
use super::{body, infer_api};
use crate::server::App;

/// The most bytes of a query's text.
const TEXT_MAX: usize = 256 << 10;

pub(super) async fn list(State(app): State<Arc<App>>) -> Answer {
    answer::json(&app.service.queries().await?)
}

pub(super) async fn one(State(app): State<Arc<App>>, Path(query): Path<String>) -> Answer {
    answer::json(&app.service.query(&query).await?)
}

pub(super) async fn put(
    State(app): State<Arc<App>>,
    Path(query): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let _pass = app.gate.enter()?;
    let text = body::read(&app, &headers, body, TEXT_MAX).await?;
    let text = std::str::from_utf8(&text)
        .map_err(|_| ApiError::invalid("a query is text: TOML or JSON"))?;
    answer::json(&app.service.put_query(&query, text).await?)
}

pub(super) async fn delete(State(app): State<Arc<App>>, Path(query): Path<String>) -> Answer {
    let _pass = app.gate.enter()?;
    app.service.delete_query(&query).await?;
    Ok(answer::empty(StatusCode::OK))
}

/// As an inference of a model; a picture may also come as the whole body.
pub(super) async fn infer(
    State(app): State<Arc<App>>,
    Path(query): Path<String>,
    mut headers: HeaderMap,
    body: Body,
) -> Answer {
    let _pass = app.gate.enter()?;
    let body: Bytes = body::read(&app, &headers, body, app.max_body_bytes).await?;
    if is_picture(&headers) {
        headers.insert(HEADER_LENGTH, HeaderValue::from_static("0"));
    }
    Ok(ask(&app, &query, &headers, body).await?.map(Body::new))
}

fn is_picture(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("image/"))
}

async fn ask(
    app: &App,
    query: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> ApiResult<http::Response<answer::Parts>> {
    let decoded = infer_api::decode(headers, body).await?;
    let (request, mut encoding) = (decoded.request, decoded.encoding);
    if is_picture(headers) {
        // Whoever sends nothing but a picture reads the answer as text.
        encoding = OutputEncoding::default();
    }
    let context = infer_api::context(headers);
    let span = infer_api::span(query, &request.id, &context);
    let work = app.service.query_infer(query, request, context);
    let response = tracing::Instrument::instrument(work, span).await?;
    infer_api::encode(headers, response, encoding).await
}
