//! Fast path for `ModelInfer`: this module reads the message; tonic handles all other calls.
//!
//! tonic copies every body into a new buffer. Here a message of one frame is not copied, and one of
//! several frames is collected in a reused buffer.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use api::proto;
use bytes::{BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use super::{Service, caller_of, context_of, infer, with_trace};
use crate::body_buffers::{BodyBuffer, BodyBuffers};
use crate::server::AppState;

const METHOD: &str = "/inference.GRPCInferenceService/ModelInfer";
/// A flag and the length of the message.
const PREFIX: usize = 5;

/// The gRPC service with the fast path for `ModelInfer`.
#[derive(Clone)]
pub(super) struct FastInfer {
    pub(super) app: Arc<AppState>,
    pub(super) others: Service,
}

impl NamedService for FastInfer {
    const NAME: &'static str = <Service as NamedService>::NAME;
}

impl tower::Service<Request<Body>> for FastInfer {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // tonic's service is always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.uri().path() != METHOD || is_compressed(request.headers()) {
            return self.others.call(request);
        }
        let app = self.app.clone();
        Box::pin(async move { Ok(respond(&app, request).await.unwrap_or_else(Status::into_http)) })
    }
}

fn is_compressed(headers: &HeaderMap) -> bool {
    headers.get("grpc-encoding").is_some_and(|coding| coding != "identity")
}

async fn respond(app: &AppState, request: Request<Body>) -> Result<Response<Body>, Status> {
    let (head, body) = request.into_parts();
    let message = read(&app.buffers, app.max_body_bytes, body).await?;
    let message = proto::ModelInferRequest::decode(message)
        .map_err(|error| Status::internal(error.to_string()))?;
    let context = context_of(&head.headers);
    let caller = caller_of(&head.extensions)?;
    let message = infer(app, &caller, message, context).await?;
    let length = message.encoded_len();
    let claimed = u32::try_from(length)
        .map_err(|_| Status::resource_exhausted("the response exceeds the maximum gRPC message"))?;
    let mut framed = BytesMut::with_capacity(PREFIX + length);
    framed.put_u8(0);
    framed.put_u32(claimed);
    message.encode(&mut framed).map_err(|error| Status::internal(error.to_string()))?;
    let body = Body::new(UnaryBody { message: Some(framed.freeze()), ended: false });
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    with_trace(response.headers_mut(), context);
    Ok(response)
}

/// The one message of a call.
async fn read(buffers: &Arc<BodyBuffers>, limit: usize, mut body: Body) -> Result<Bytes, Status> {
    let mut first = Bytes::new();
    while first.len() < PREFIX {
        let Some(data) = next(&mut body).await? else {
            return Err(Status::internal("Missing request message."));
        };
        first = if first.is_empty() { data } else { [first, data].concat().into() };
    }
    let length = length_of(&first, limit)?;
    let mut message = first.slice(PREFIX..);
    if message.len() < length {
        message = gather(buffers.take(length), &mut body, &message, length).await?.freeze();
    }
    // The end of the stream may arrive in an empty frame.
    let mut more = message.len() > length;
    while let Some(data) = next(&mut body).await? {
        more |= !data.is_empty();
        if more {
            break;
        }
    }
    match more {
        false => Ok(message),
        true => Err(Status::internal("ModelInfer takes one message, got more")),
    }
}

/// Length of the message after this prefix.
fn length_of(first: &Bytes, limit: usize) -> Result<usize, Status> {
    match first[0] {
        0 => {}
        1 => {
            return Err(Status::internal("the message is compressed but its call is not"));
        }
        flag => return Err(Status::internal(format!("unknown message flag {flag}"))),
    }
    let length = u32::from_be_bytes([first[1], first[2], first[3], first[4]]) as usize;
    if length > limit {
        return Err(Status::out_of_range(format!(
            "Error, decoded message length too large: found {length} bytes, the limit is: {limit} \
             bytes"
        )));
    }
    Ok(length)
}

/// Collects a message of several frames.
async fn gather(
    mut buffer: BodyBuffer,
    body: &mut Body,
    first: &Bytes,
    length: usize,
) -> Result<BodyBuffer, Status> {
    buffer.extend(first);
    while buffer.len() < length {
        let Some(data) = next(body).await? else {
            return Err(Status::internal("Unexpected EOF decoding stream."));
        };
        buffer.extend(&data);
    }
    Ok(buffer)
}

/// The next bytes of a body.
async fn next(body: &mut Body) -> Result<Option<Bytes>, Status> {
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

/// The body of a response: one message and an OK status.
struct UnaryBody {
    message: Option<Bytes>,
    ended: bool,
}

impl hyper::body::Body for UnaryBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(message) = self.message.take() {
            return Poll::Ready(Some(Ok(Frame::data(message))));
        }
        if std::mem::replace(&mut self.ended, true) {
            return Poll::Ready(None);
        }
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.message.as_ref().map_or(0, Bytes::len) as u64)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use http_body_util::StreamBody;
    use tonic::Code;

    use super::*;

    fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[flag][..], &length.to_be_bytes(), message].concat()
    }

    /// Reads a body that arrives in these frames.
    async fn read_frames(pieces: &[&[u8]], limit: usize) -> Result<Bytes, Code> {
        let frame = |piece: &&[u8]| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(piece)));
        let frames: Vec<_> = pieces.iter().map(frame).collect();
        let body = Body::new(StreamBody::new(stream::iter(frames)));
        let read = read(&Arc::default(), limit, body).await;
        read.map_err(|status| status.code())
    }

    #[tokio::test]
    async fn reassembles_messages_of_any_framing() {
        let message: Vec<u8> = (0..300_000u32).map(|index| (index * 7) as u8).collect();
        let whole = framed(0, &message);
        for cut in [1, 3, 4, 5, 6, 1_000, 16_384, 150_000, whole.len() - 1, whole.len()] {
            let pieces: Vec<&[u8]> = whole.chunks(cut).chain([&[][..]]).collect();
            // Very short frames only at the beginning, to keep the test fast.
            let pieces = if cut < 1_000 {
                vec![&whole[..cut], &whole[cut..cut + 1], &whole[cut + 1..]]
            } else {
                pieces
            };
            let got = read_frames(&pieces, 300_000).await;
            assert!(got.is_ok_and(|got| got == message), "{cut}");
        }
        assert_eq!(read_frames(&[&framed(0, b"")], 0).await, Ok(Bytes::new()));
    }

    #[tokio::test]
    async fn refuses_anything_but_one_message() {
        let good = framed(0, b"message");
        let twice = [good.clone(), good.clone()].concat();
        let cases: [(&[&[u8]], Code); 8] = [
            (&[], Code::Internal),
            (&[b"\0\0"], Code::Internal),
            (&[&good[..8]], Code::Internal),
            (&[&good, &good], Code::Internal),
            (&[&twice], Code::Internal),
            (&[&twice[..9], &twice[9..]], Code::Internal),
            (&[&framed(1, b"message")], Code::Internal),
            (&[&framed(0, b"longer than allowed")], Code::OutOfRange),
        ];
        for (pieces, code) in cases {
            assert_eq!(read_frames(pieces, 10).await, Err(code), "{pieces:?}");
        }
        // A message that is too long is refused before it is read.
        assert_eq!(read_frames(&[&[0, 255, 255, 255, 255]], 10).await, Err(Code::OutOfRange));
    }
}
