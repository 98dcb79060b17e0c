//! Inference.

use std::sync::Arc;

use api::codec::{self, Decoded, EncodedResponse, HEADER_LENGTH};
use api::error::ApiResult;
use api::trace::TRACEPARENT;
use api::{ApiError, InferResponse, RequestContext, TraceContext};
use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, HeaderName, Response};
use tracing::Instrument;

use super::answer::{Answer, Parts};
use super::body::{self, Coding};
use super::model_api::ModelPath;
use crate::server::App;

const HEADER_LENGTH_NAME: HeaderName = HeaderName::from_static(HEADER_LENGTH);
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Answers shorter than this are not worth compressing.
const COMPRESS_BYTES: usize = 1024;

pub(super) async fn infer(
    State(app): State<Arc<App>>,
    path: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> Answer {
    let model = path.model()?;
    let _pass = app.gate.enter()?;
    let body = body::read(&headers, body, app.max_body_bytes).await?;
    let Decoded { request, encoding } = decode(&headers, body).await?;
    let context = RequestContext { trace: trace_context(&headers) };
    let span = span(model.name, &request.id, &context);
    let response = app.service.infer(model, request, context).instrument(span).await?;
    let mut answer = encode(&headers, response, encoding).await?;
    if context.trace.is_some()
        && let Some(trace) = headers.get(TRACEPARENT)
    {
        answer.headers_mut().insert(TRACEPARENT, trace.clone());
    }
    Ok(answer)
}

/// The caller's place in a trace; a header that is not one is as good as none.
pub(crate) fn trace_context(headers: &HeaderMap) -> Option<TraceContext> {
    TraceContext::parse(headers.get(TRACEPARENT)?.to_str().ok()?)
}

/// A span for a request: always where the caller traces it, for debugging otherwise.
pub(crate) fn span(model: &str, id: &str, context: &RequestContext) -> tracing::Span {
    match context.trace {
        Some(trace) => tracing::info_span!(
            "infer",
            model,
            id,
            trace_id = %format_args!("{:032x}", trace.trace_id),
            parent_id = %format_args!("{:016x}", trace.parent_id),
        ),
        None => tracing::debug_span!("infer", model, id),
    }
}

fn header_length(headers: &HeaderMap) -> ApiResult<Option<usize>> {
    let Some(value) = headers.get(HEADER_LENGTH_NAME) else { return Ok(None) };
    let length = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    length.map(Some).ok_or_else(|| ApiError::invalid(format!("{HEADER_LENGTH} is not a length")))
}

async fn decode(headers: &HeaderMap, body: Bytes) -> ApiResult<Decoded> {
    let length = header_length(headers)?;
    // Only JSON takes time to read; binary tensors are slices.
    let json_bytes = length.unwrap_or(body.len());
    body::heavy(json_bytes, move || codec::decode(body, length)).await
}

async fn encode(
    headers: &HeaderMap,
    response: InferResponse,
    encoding: codec::OutputEncoding,
) -> ApiResult<Response<Body>> {
    let size: usize = response.outputs.iter().map(|output| output.tensor.size_bytes()).sum();
    let coding = body::response_coding(headers);
    let work = move || -> ApiResult<(EncodedResponse, Option<Coding>)> {
        let mut encoded = codec::encode(&response, &encoding)?;
        let coding = coding.filter(|_| encoded.len() >= COMPRESS_BYTES);
        if let Some(coding) = coding {
            let packed = body::compress(&encoded.parts, coding)
                .map_err(|error| ApiError::internal(format!("cannot compress: {error}")))?;
            encoded.parts = vec![packed.into()];
        }
        Ok((encoded, coding))
    };
    let (encoded, coding) = body::heavy(size, work).await?;
    let mut answer = Response::new(body_of(encoded.parts));
    let headers = answer.headers_mut();
    match encoded.header_length {
        None => headers.insert(CONTENT_TYPE, JSON),
        Some(length) => {
            headers.insert(HEADER_LENGTH_NAME, HeaderValue::from(length));
            headers.insert(CONTENT_TYPE, OCTETS)
        }
    };
    if let Some(coding) = coding {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static(coding.as_str()));
    }
    Ok(answer)
}

fn body_of(mut parts: Vec<Bytes>) -> Body {
    match parts.len() {
        1 => Body::from(parts.remove(0)),
        _ => Body::new(Parts::new(parts)),
    }
}
