//! Errors as clients see them: one kind, one HTTP code, one gRPC code.

use std::borrow::Cow;

use thiserror::Error;

/// What went wrong, by what a client can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request contradicts the protocol or the model.
    InvalidArgument,
    /// There is no such model, version or route.
    NotFound,
    /// The route exists, but not with this method.
    MethodNotAllowed,
    /// The body is larger than the server takes.
    TooLarge,
    /// Understood, but not something this server does.
    Unsupported,
    /// Not now: shedding load, draining, or the model is not ready.
    Unavailable,
    /// The deadline passed before the answer.
    DeadlineExceeded,
    /// The client gave the request up.
    Cancelled,
    /// The server's fault.
    Internal,
}

impl ErrorKind {
    /// The HTTP status.
    pub const fn http_status(self) -> u16 {
        match self {
            ErrorKind::InvalidArgument => 400,
            ErrorKind::NotFound => 404,
            ErrorKind::MethodNotAllowed => 405,
            ErrorKind::TooLarge => 413,
            ErrorKind::Cancelled => 499,
            ErrorKind::Internal => 500,
            ErrorKind::Unsupported => 501,
            ErrorKind::Unavailable => 503,
            ErrorKind::DeadlineExceeded => 504,
        }
    }

    /// The gRPC code.
    pub const fn grpc_code(self) -> tonic::Code {
        match self {
            ErrorKind::InvalidArgument => tonic::Code::InvalidArgument,
            ErrorKind::NotFound => tonic::Code::NotFound,
            ErrorKind::MethodNotAllowed | ErrorKind::Unsupported => tonic::Code::Unimplemented,
            ErrorKind::TooLarge => tonic::Code::OutOfRange,
            ErrorKind::Cancelled => tonic::Code::Cancelled,
            ErrorKind::Internal => tonic::Code::Internal,
            ErrorKind::Unavailable => tonic::Code::Unavailable,
            ErrorKind::DeadlineExceeded => tonic::Code::DeadlineExceeded,
        }
    }
}

/// An answer that is not the one asked for.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct ApiError {
    /// What kind of failure.
    pub kind: ErrorKind,
    /// What to tell the client: lowercase, one line, with what would help.
    pub message: Cow<'static, str>,
    /// Seconds after which a retry has a chance.
    pub retry_after: Option<u32>,
}

/// A result whose failure can be sent to a client.
pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    /// An error of `kind`.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError { kind, message: message.into(), retry_after: None }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::InvalidArgument, message)
    }

    /// There is no such thing.
    pub fn not_found(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::NotFound, message)
    }

    /// Not now.
    pub fn unavailable(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::Unavailable, message)
    }

    /// Not here.
    pub fn unsupported(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::Unsupported, message)
    }

    /// The server's fault.
    pub fn internal(message: impl Into<Cow<'static, str>>) -> ApiError {
        ApiError::new(ErrorKind::Internal, message)
    }

    /// The answer to new work while the server drains.
    pub fn shutting_down() -> ApiError {
        ApiError::unavailable("the server is shutting down")
    }

    /// The same error with a hint when to retry.
    pub fn retry_after(self, seconds: u32) -> ApiError {
        ApiError { retry_after: Some(seconds), ..self }
    }

    /// The body of an HTTP answer.
    pub fn to_json(&self) -> Vec<u8> {
        let mut body = b"{\"error\":".to_vec();
        crate::codec::response::write_json_string(&mut body, &self.message);
        body.push(b'}');
        body
    }
}

impl From<model::TensorError> for ApiError {
    fn from(error: model::TensorError) -> ApiError {
        ApiError::invalid(error.to_string())
    }
}

impl From<ApiError> for tonic::Status {
    fn from(error: ApiError) -> tonic::Status {
        let mut status = tonic::Status::new(error.kind.grpc_code(), error.message.into_owned());
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
        assert_eq!(value["error"], "a \"quoted\"\nname \u{1}");
    }
}
