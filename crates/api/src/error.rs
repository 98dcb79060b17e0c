//! Errors as clients see them: one kind, one HTTP code, one gRPC code.

use std::borrow::Cow;

use model::excerpt::one_line;
use thiserror::Error;

/// Length of a message in bytes. Clients of gRPC take 8 KiB of metadata, with escapes.
const MAX_MESSAGE: usize = 2048;

/// Kind of an error, by what a client can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request contradicts the protocol or the model.
    InvalidArgument,
    /// The credentials are absent or not valid.
    Unauthenticated,
    /// The credentials do not allow this, or nobody may do it.
    Forbidden,
    /// There is no such model, version or route.
    NotFound,
    /// The route exists, but not with this method.
    MethodNotAllowed,
    /// The client did not send its request in time.
    RequestTimeout,
    /// The body, or the memory that the request needs, exceeds the limit of the server.
    TooLarge,
    /// The caller exceeds its rate or its number of concurrent requests.
    TooManyRequests,
    /// The server does not support the request.
    Unsupported,
    /// Temporarily unavailable: overloaded, draining, or the model is not ready.
    Unavailable,
    /// Another server's reply cannot be used.
    BadGateway,
    /// The deadline passed before the reply.
    DeadlineExceeded,
    /// The client cancelled the request.
    Cancelled,
    /// An internal error.
    Internal,
}

impl ErrorKind {
    /// The HTTP status.
    pub const fn http_status(self) -> u16 {
        match self {
            ErrorKind::InvalidArgument => 400,
            ErrorKind::Unauthenticated => 401,
            ErrorKind::Forbidden => 403,
            ErrorKind::NotFound => 404,
            ErrorKind::MethodNotAllowed => 405,
            ErrorKind::RequestTimeout => 408,
            ErrorKind::TooLarge => 413,
            ErrorKind::TooManyRequests => 429,
            ErrorKind::Cancelled => 499,
            ErrorKind::Internal => 500,
            ErrorKind::Unsupported => 501,
            ErrorKind::BadGateway => 502,
            ErrorKind::Unavailable => 503,
            ErrorKind::DeadlineExceeded => 504,
        }
    }

    /// The gRPC code.
    pub const fn grpc_code(self) -> tonic::Code {
        match self {
            ErrorKind::InvalidArgument => tonic::Code::InvalidArgument,
            ErrorKind::Unauthenticated => tonic::Code::Unauthenticated,
            ErrorKind::Forbidden => tonic::Code::PermissionDenied,
            ErrorKind::NotFound => tonic::Code::NotFound,
            ErrorKind::MethodNotAllowed | ErrorKind::Unsupported => tonic::Code::Unimplemented,
            ErrorKind::TooLarge => tonic::Code::OutOfRange,
            ErrorKind::TooManyRequests => tonic::Code::ResourceExhausted,
            ErrorKind::RequestTimeout | ErrorKind::Cancelled => tonic::Code::Cancelled,
            ErrorKind::Internal | ErrorKind::BadGateway => tonic::Code::Internal,
            ErrorKind::Unavailable => tonic::Code::Unavailable,
            ErrorKind::DeadlineExceeded => tonic::Code::DeadlineExceeded,
        }
    }
}

/// An error reply.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct ApiError {
    /// Kind of the error.
    pub kind: ErrorKind,
    /// Message for the client: lowercase, one line, with a hint.
    pub message: Cow<'static, str>,
    /// Seconds after which the client should retry.
    pub retry_after: Option<u32>,
}

/// A result whose error can be sent to a client.
pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    /// An error of `kind`.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError { kind, message: message.into(), retry_after: None }
    }

    /// The request is invalid.
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::InvalidArgument, message)
    }

    /// The model, version or route does not exist.
    pub fn not_found(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::NotFound, message)
    }

    /// Temporarily unavailable.
    pub fn unavailable(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::Unavailable, message)
    }

    /// Not supported.
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::Unsupported, message)
    }

    /// An internal error.
    pub fn internal(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::Internal, message)
    }

    /// The reply to requests while the server drains.
    pub fn shutting_down() -> ApiError {
        ApiError::unavailable("the server is shutting down").retry_after(1)
    }

    /// Adds a retry hint.
    pub fn retry_after(self, seconds: u32) -> ApiError {
        ApiError { retry_after: Some(seconds), ..self }
    }

    /// The message as clients get it: names in it may be a client's or a model's.
    pub fn line(&self) -> Cow<'_, str> {
        one_line(&self.message, MAX_MESSAGE)
    }

    /// The body of an HTTP response.
    pub fn to_json(&self) -> Vec<u8> {
        let mut body = b"{\"error\":".to_vec();
        crate::codec::response::write_json_string(&mut body, &self.line());
        body.push(b'}');
        body
    }
}

impl From<model::TensorError> for ApiError {
    fn from(error: model::TensorError) -> ApiError {
        ApiError::invalid(error.to_string())
    }
}

impl From<model::MemoryError> for ApiError {
    fn from(error: model::MemoryError) -> ApiError {
        match error {
            model::MemoryError::TooLarge { .. } => {
                ApiError::new(ErrorKind::TooLarge, error.to_string())
            }
            model::MemoryError::Busy { .. } => {
                ApiError::unavailable(error.to_string()).retry_after(1)
            }
        }
    }
}

impl From<ApiError> for tonic::Status {
    fn from(error: ApiError) -> tonic::Status {
        let mut status = tonic::Status::new(error.kind.grpc_code(), error.line());
        if let Some(seconds) = error.retry_after {
            status.metadata_mut().insert(crate::client::RETRY_AFTER, seconds.into());
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_json_whatever_the_message() {
        let error = ApiError::invalid("a \"quoted\"\nname \u{1}");
        let value: serde_json::Value = serde_json::from_slice(&error.to_json()).unwrap();
        assert_eq!(value["error"], "a \"quoted\"\\nname \\u{1}");
    }

    #[test]
    fn messages_are_lines_of_limited_length() {
        let name = "\n\u{1b}[2J".repeat(1 << 20);
        let error = ApiError::invalid(format!("there is no '{name}'; known are a, b"));
        assert!(error.to_json().len() < 6 * MAX_MESSAGE);
        let status = tonic::Status::from(error.clone());
        for text in [error.line().into_owned(), status.message().to_string()] {
            assert!(text.starts_with("there is no '\\n") && text.ends_with("known are a, b"));
            assert!(!text.contains(char::is_control) && text.len() < 6 * MAX_MESSAGE);
        }
    }
}
