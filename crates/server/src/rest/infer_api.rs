//! Inference.

use std::sync::Arc;

use api::canary::{CANARY, CANARY_KEY};
use api::codec::response::{copied_bytes, text_bytes};
use api::codec::{self, Decoded, EncodedResponse, HEADER_LENGTH};
use api::error::ApiResult;
use api::trace::TRACEPARENT;
use api::{
    ApiError, CanaryChoice, InferResponse, ModelRef, NamedTensor, RequestContext, TraceContext,
    decoded_size,
};
use axum::BoxError;
use axum::body::Body;
use axum::extract::{Extension, State};
use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, HeaderName, Response};
use model::Reservation;
use tracing::Instrument;

use super::body::{self, Coding};
use super::model_api::ModelPath;
use super::response::{HandlerResult, SegmentedBody};
use crate::auth::Caller;
use crate::heavy_work::heavy;
use crate::server::AppState;
use crate::telemetry::{RequestName, traced};

const HEADER_LENGTH_NAME: HeaderName = HeaderName::from_static(HEADER_LENGTH);
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Minimum size of compressed responses.
const COMPRESS_BYTES: usize = 1024;

/// The route, for names that need decoding; others use [`fast_path`].
pub(super) async fn route(
    State(app): State<Arc<AppState>>,
    Extension(caller): Extension<Arc<Caller>>,
    path: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> HandlerResult {
    Ok(infer(&app, &caller, path.model()?, &headers, body).await?.map(Body::new))
}

/// Model and version of an inference path without escapes. Most requests are inferences, and the
/// router costs as much as the rest of the handling.
pub(crate) fn fast_path(path: &str) -> Option<(&str, &str)> {
    let middle = path.strip_prefix("/v2/models/")?.strip_suffix("/infer")?;
    let (name, version) = match middle.split_once('/') {
        None => (middle, ""),
        Some((name, rest)) => (name, rest.strip_prefix("versions/")?),
    };
    let plain = |text: &str| !text.bytes().any(|byte| matches!(byte, b'/' | b'%'));
    let complete = !name.is_empty() && (!version.is_empty() || !middle.contains('/'));
    (complete && plain(name) && plain(version)).then_some((name, version))
}

/// Handles one inference request.
pub(crate) async fn infer<B>(
    app: &AppState,
    caller: &Caller,
    model: ModelRef<'_>,
    headers: &HeaderMap,
    body: B,
) -> ApiResult<Response<SegmentedBody>>
where
    B: hyper::body::Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let _guard = app.requests.admit()?;
    let own = context(headers);
    let name = RequestName { name: "infer", model: model.name, protocol: "rest" };
    let work = |context| async move {
        let (body, memory) = body::read(app, headers, body, app.bodies.max_bytes).await?;
        let (decoded, _memory) = decode(app, headers, body, memory).await?;
        let Decoded { mut request, encoding } = decoded;
        caller.limit(&mut request.options)?;
        let span = span(model.name, &request.id, &own);
        let work = app.limited(app.service.infer(model, request, context));
        let response = work.instrument(span).await?;
        let timing = response.timing;
        Ok((encode(app, headers, response, encoding).await?, timing))
    };
    let mut reply = traced(app.telemetry.as_ref(), own, name, work).await?;
    if own.trace.is_some()
        && let Some(trace) = headers.get(TRACEPARENT)
    {
        reply.headers_mut().insert(TRACEPARENT, trace.clone());
    }
    Ok(reply)
}

/// Context of a request.
pub(super) fn context(headers: &HeaderMap) -> RequestContext {
    RequestContext {
        trace: trace_context(headers),
        canary: canary_choice(headers),
        ..RequestContext::default()
    }
}

/// Which version the caller wants where a model has a canary.
pub(crate) fn canary_choice(headers: &HeaderMap) -> CanaryChoice {
    let value = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    CanaryChoice::read(value(CANARY), value(CANARY_KEY))
}

/// The caller's trace context; an invalid header is ignored.
pub(crate) fn trace_context(headers: &HeaderMap) -> Option<TraceContext> {
    TraceContext::parse(headers.get(TRACEPARENT)?.to_str().ok()?)
}

/// A span for a request: at info level if the caller traces it, otherwise at debug level.
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

/// Decodes a request. The returned reservation is that of the body and of what it became.
pub(super) async fn decode(
    app: &AppState,
    headers: &HeaderMap,
    body: Bytes,
    mut memory: Reservation,
) -> ApiResult<(Decoded, Reservation)> {
    let length = header_length(headers)?;
    // Only JSON takes time and memory to decode; binary tensors are slices.
    let json_bytes = length.unwrap_or(body.len()).min(body.len());
    let measure = move || {
        let bound = decoded_size::of_request(&body[..json_bytes], body.len() - json_bytes);
        Ok((body, bound))
    };
    let (body, bound) = heavy(json_bytes, measure).await?;
    app.bodies.reserve_decoding(bound, &mut memory)?;
    heavy(json_bytes, move || Ok((codec::decode(body, length)?, memory))).await
}

pub(super) async fn encode(
    app: &AppState,
    headers: &HeaderMap,
    response: InferResponse,
    encoding: codec::OutputEncoding,
) -> ApiResult<Response<SegmentedBody>> {
    let coding = body::response_coding(headers);
    let size: usize = response.outputs.iter().map(|output| output.tensor.size_bytes()).sum();
    let own = |output: &NamedTensor| match encoding.is_binary(&output.name) {
        true => copied_bytes(&output.tensor),
        false => text_bytes(&output.tensor),
    };
    // Strings and what is encoded as text or compressed are copies; others are sent as they are.
    let packed = if coding.is_some() { size } else { 0 };
    let copied = response.outputs.iter().map(own).fold(packed, usize::saturating_add);
    let memory = app.bodies.memory.reserve(copied)?;
    let work = move || -> ApiResult<(EncodedResponse, Option<Coding>)> {
        let mut encoded = codec::encode(&response, &encoding)?;
        let coding = coding.filter(|_| encoded.len() >= COMPRESS_BYTES);
        if let Some(coding) = coding {
            let packed = body::compress(&encoded.parts, coding)?;
            encoded.parts = vec![packed.into()];
        }
        Ok((encoded, coding))
    };
    let (encoded, coding) = heavy(size, work).await?;
    let mut reply = Response::new(SegmentedBody::new(encoded.parts, memory));
    let headers = reply.headers_mut();
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
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_path_accepts_only_plain_paths() {
        assert_eq!(fast_path("/v2/models/m/infer"), Some(("m", "")));
        assert_eq!(fast_path("/v2/models/m/versions/1/infer"), Some(("m", "1")));
        for other in [
            "/v2/models//infer",
            "/v2/models/infer",
            "/v2/models/m%20/infer",
            "/v2/models/m/versions//infer",
            "/v2/models/m/versions/1/2/infer",
            "/v2/models/m/ready",
            "/v2/models/m/x/infer",
        ] {
            assert_eq!(fast_path(other), None, "{other}");
        }
    }
}
