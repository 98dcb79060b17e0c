//! Answers: JSON bodies, errors, and bodies in several pieces.

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
use serde::Serialize;

const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// What a handler returns.
pub(crate) type Answer = Result<Response<Body>, Failure>;

/// An error on its way out of a handler.
pub(crate) struct Failure(pub(crate) ApiError);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Failure {
        Failure(error)
    }
}

impl axum::response::IntoResponse for Failure {
    fn into_response(self) -> Response<Body> {
        error(&self.0)
    }
}

/// An answer of `status` with a JSON body.
pub(crate) fn json_bytes(status: StatusCode, body: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

/// `value` as JSON.
pub(crate) fn json(value: &impl Serialize) -> Answer {
    let body = serde_json::to_vec(value)
        .map_err(|error| ApiError::internal(format!("cannot write the answer: {error}")))?;
    Ok(json_bytes(StatusCode::OK, body))
}

/// An answer without a body.
pub(crate) fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// `error` with its status and, where a retry helps, when.
pub(crate) fn error(error: &ApiError) -> Response<Body> {
    let status =
        StatusCode::from_u16(error.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_bytes(status, error.to_json());
    if let Some(seconds) = error.retry_after {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// The answer where no route is.
pub(crate) async fn no_route(uri: Uri) -> Response<Body> {
    error(&ApiError::not_found(format!("there is no route {}", uri.path())))
}

/// The answer to extensions of the protocol that are not offered.
pub(crate) async fn unsupported(uri: Uri) -> Response<Body> {
    error(&ApiError::unsupported(format!("{} is not supported by this server", uri.path())))
}

/// The answer where a route is, but not for this method.
pub(crate) async fn wrong_method(method: Method, uri: Uri) -> Response<Body> {
    error(&ApiError::new(
        ErrorKind::MethodNotAllowed,
        format!("{} does not take {method}", uri.path()),
    ))
}

/// A body of pieces that are known beforehand, so that large tensors are not copied together.
pub(crate) struct Parts {
    parts: VecDeque<Bytes>,
    left: u64,
}

impl Parts {
    pub(crate) fn new(parts: Vec<Bytes>) -> Parts {
        let left = parts.iter().map(|part| part.len() as u64).sum();
        Parts { parts: parts.into(), left }
    }
}

impl hyper::body::Body for Parts {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let part = self.parts.pop_front();
        if let Some(part) = &part {
            self.left -= part.len() as u64;
        }
        Poll::Ready(part.map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.parts.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// A body as it goes out: of the quick way for inference, or of a route.
pub(crate) enum WireBody {
    Parts(Parts),
    Routed(Body),
}

impl hyper::body::Body for WireBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match &mut *self {
            WireBody::Parts(parts) => {
                Pin::new(parts).poll_frame(context).map_err(|never| match never {})
            }
            WireBody::Routed(body) => Pin::new(body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            WireBody::Parts(parts) => parts.is_end_stream(),
            WireBody::Routed(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            WireBody::Parts(parts) => parts.size_hint(),
            WireBody::Routed(body) => body.size_hint(),
        }
    }
}
