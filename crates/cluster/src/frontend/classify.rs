//! Forwards `/classify` to a backend's REST server, which has the image code.

use api::error::ApiResult;
use api::{ApiError, Classification, ClassifyRequest, ErrorKind, Prediction};
use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::tls::ClientTls;

/// Maximum size of a reply in bytes.
const REPLY_MAX: usize = 1 << 20;
const BOUNDARY: &str = "atoll-cluster-7d1f0a";

fn form(request: &ClassifyRequest) -> Bytes {
    let mut body = BytesMut::with_capacity(request.image.len() + 512);
    let head = |body: &mut BytesMut, name: &str, extra: &str| {
        let line =
            format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"{extra}");
        body.put_slice(line.as_bytes());
        body.put_slice(b"\r\n\r\n");
    };
    head(&mut body, "name", "");
    body.put_slice(request.model.as_bytes());
    body.put_slice(b"\r\n");
    head(&mut body, "k", "");
    body.put_slice(request.k.to_string().as_bytes());
    body.put_slice(b"\r\n");
    head(&mut body, "image", "; filename=\"image\"");
    body.put_slice(&request.image);
    body.put_slice(format!("\r\n--{BOUNDARY}--\r\n").as_bytes());
    body.freeze()
}

/// Sends an image to the backend whose REST server is at `address`. A backend that does not reply
/// is `Unavailable`.
pub(super) async fn send(
    address: &str,
    tls: Option<&ClientTls>,
    request: &ClassifyRequest,
) -> ApiResult<Classification> {
    let stream = TcpStream::connect(address).await.map_err(|error| lost(&error))?;
    let Some(tls) = tls else { return send_over(stream, address, request).await };
    let stream = tls.connect(stream, address, b"http/1.1").await.map_err(|error| lost(&error))?;
    send_over(stream, address, request).await
}

fn lost(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::unavailable(format!("its backend was lost: {error}")).retry_after(1)
}

async fn send_over<S>(
    stream: S,
    address: &str,
    request: &ClassifyRequest,
) -> ApiResult<Classification>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| lost(&error))?;
    let connection = tokio::spawn(connection);
    let http = Request::post("/v2/atoll/classify")
        .header("host", address)
        .header("content-type", format!("multipart/form-data; boundary={BOUNDARY}"))
        .body(Full::new(form(request)))
        .map_err(|error| ApiError::internal(error.to_string()))?;
    let reply = sender.send_request(http).await.map_err(|error| lost(&error))?;
    let status = reply.status().as_u16();
    let body = http_body_util::Limited::new(reply.into_body(), REPLY_MAX).collect().await;
    connection.abort();
    let body = body.map_err(|error| lost(&error))?.to_bytes();
    let json: Value = serde_json::from_slice(&body)
        .map_err(|_| ApiError::internal("the backend's reply is not JSON"))?;
    if status == 200 {
        return read(&json).ok_or_else(|| ApiError::internal("the backend's reply is incomplete"));
    }
    let message = json["error"].as_str().unwrap_or("the backend failed").to_string();
    Err(ApiError::new(kind_of(status), message))
}

fn kind_of(status: u16) -> ErrorKind {
    let kinds = [
        ErrorKind::InvalidArgument,
        ErrorKind::NotFound,
        ErrorKind::TooLarge,
        ErrorKind::Unsupported,
        ErrorKind::Unavailable,
        ErrorKind::DeadlineExceeded,
    ];
    kinds.into_iter().find(|kind| kind.http_status() == status).unwrap_or(ErrorKind::Internal)
}

fn read(json: &Value) -> Option<Classification> {
    let prediction = |value: &Value| {
        Some(Prediction {
            label: value["label"].as_str()?.to_string(),
            index: usize::try_from(value["index"].as_u64()?).ok()?,
            score: value["score"].as_f64()? as f32,
        })
    };
    Some(Classification {
        model: json["model"].as_str()?.to_string(),
        version: json["version"].as_str()?.to_string(),
        predictions: json["predictions"]
            .as_array()?
            .iter()
            .map(prediction)
            .collect::<Option<_>>()?,
    })
}
