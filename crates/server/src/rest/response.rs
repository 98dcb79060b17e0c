//! Responses: JSON bodies, errors, and bodies in several segments.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use api::{ApiError, ErrorKind};
use axum::body::Body;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Method, Response, StatusCode, Uri};
use hyper::body::{Frame, SizeHint};
use model::Reservation;
use serde::Serialize;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Return type of handlers.
pub(crate) type HandlerResult = Result<Response<Body>, ErrorResponse>;

/// An error that becomes a response.
pub(crate) struct ErrorResponse(pub(crate) ApiError);

impl From<ApiError> for ErrorResponse {
    fn from(error: ApiError) -> ErrorResponse {
        ErrorResponse(error)
    }
}

impl axum::response::IntoResponse for ErrorResponse {
    fn into_response(self) -> Response<Body> {
        error(&self.0)
    }
}

/// A response of `status` with a JSON body.
pub(crate) fn json_bytes(status: StatusCode, body: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

/// A response with `value` as JSON.
pub(crate) fn json(value: &impl Serialize) -> HandlerResult {
    let body = serde_json::to_vec(value)
        .map_err(|error| ApiError::internal(format!("cannot write the response: {error}")))?;
    Ok(json_bytes(StatusCode::OK, body))
}

/// A response without a body.
pub(crate) fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// A response for `error`, with `Retry-After` if a retry helps.
pub(crate) fn error(error: &ApiError) -> Response<Body> {
    let status =
        StatusCode::from_u16(error.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_bytes(status, error.to_json());
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// The response for unknown routes.
pub(crate) async fn no_route(uri: Uri) -> Response<Body> {
    error(&ApiError::not_found(format!("there is no route {}", uri.path())))
}

/// The response for extensions of the protocol that are not supported.
pub(crate) async fn unsupported(uri: Uri) -> Response<Body> {
    error(&ApiError::unsupported(format!("{} is not supported by this server", uri.path())))
}

/// The response for a method that a route does not support.
pub(crate) async fn wrong_method(method: Method, uri: Uri) -> Response<Body> {
    error(&ApiError::new(
        ErrorKind::MethodNotAllowed,
        format!("{} does not take {method}", uri.path()),
    ))
}

/// A body in several segments, so that large tensors are not copied.
pub(crate) struct SegmentedBody {
    parts: VecDeque<Bytes>,
    remaining: u64,
    /// Of parts that were made for this response.
    _memory: Reservation,
}

impl SegmentedBody {
    pub(crate) fn new(parts: Vec<Bytes>, memory: Reservation) -> SegmentedBody {
        let remaining = parts.iter().map(|part| part.len() as u64).sum();
        SegmentedBody { parts: parts.into(), remaining, _memory: memory }
    }
}

impl hyper::body::Body for SegmentedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let part = self.parts.pop_front();
        if let Some(part) = &part {
            self.remaining -= part.len() as u64;
        }
        Poll::Ready(part.map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.parts.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.remaining)
    }
}

/// A response body: of the fast path for inference, of a route, or of a gRPC call.
pub(crate) enum ResponseBody {
    SegmentedBody(SegmentedBody),
    Routed(Body),
    Grpc(tonic::body::Body),
}

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match &mut *self {
            ResponseBody::SegmentedBody(parts) => {
                Pin::new(parts).poll_frame(context).map_err(|never| match never {})
            }
            ResponseBody::Routed(body) => Pin::new(body).poll_frame(context),
            ResponseBody::Grpc(body) => {
                Pin::new(body).poll_frame(context).map_err(axum::Error::new)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            ResponseBody::SegmentedBody(parts) => parts.is_end_stream(),
            ResponseBody::Routed(body) => body.is_end_stream(),
            ResponseBody::Grpc(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseBody::SegmentedBody(parts) => parts.size_hint(),
            ResponseBody::Routed(body) => body.size_hint(),
            ResponseBody::Grpc(body) => body.size_hint(),
        }
    }
}
