//! Inference over gRPC: this module reads the messages; tonic handles all other calls.
//!
//! tonic copies every body into a new buffer, and decodes a message before anybody knows how large
//! it becomes. Here a message of one frame is not copied, one of several frames is collected in a
//! reused buffer, and memory is reserved before a message is decompressed and before it is decoded.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use api::fallible::{out_of_memory, with_room};
use api::grpc::decode_message;
use api::{RequestContext, decoded_size, proto};
use bytes::{BufMut, Bytes};
use futures_util::stream;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, SizeHint};
use model::{MemoryError, Reservation};
use prost::Message;
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use super::{Service, caller_of, context_of, infer, stream_response, with_trace};
use crate::auth::Caller;
use crate::heavy_work::{LARGE_BYTES, heavy};
use crate::rest::{Coding, MAX_EXPANSION, decompress, reserve_received};
use crate::server::{AppState, BodyLimits};

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const STREAM_INFER: &str = "/inference.GRPCInferenceService/ModelStreamInfer";
/// A flag and the length of the message.
const PREFIX: usize = 5;

/// The gRPC service with inference of its own.
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
        let app = self.app.clone();
        match request.uri().path() {
            INFER => Box::pin(async move {
                Ok(respond(&app, request).await.unwrap_or_else(Status::into_http))
            }),
            STREAM_INFER => Box::pin(async move {
                Ok(respond_to_stream(app, request).unwrap_or_else(Status::into_http))
            }),
            _ => self.others.call(request),
        }
    }
}

/// The compression of a call's messages.
fn coding_of(headers: &HeaderMap) -> Result<Option<Coding>, Status> {
    let Some(name) = headers.get("grpc-encoding").filter(|name| *name != "identity") else {
        return Ok(None);
    };
    let coding = name.to_str().ok().and_then(Coding::parse);
    coding.map(Some).ok_or_else(|| {
        let mut status = Status::unimplemented("messages may be compressed with gzip or deflate");
        let accepted = "identity,gzip,deflate".parse().expect("plain text");
        status.metadata_mut().insert("grpc-accept-encoding", accepted);
        status
    })
}

async fn respond(app: &AppState, request: Request<Body>) -> Result<Response<Body>, Status> {
    let (head, body) = request.into_parts();
    let mut reader = MessageReader::new(body, coding_of(&head.headers)?);
    let (message, _memory) = reader.only(&app.bodies).await?;
    let context = context_of(&head.headers);
    let caller = caller_of(&head.extensions)?;
    let (message, _copies) = infer(app, &caller, message, context).await?;
    let (framed, memory) = frame(app, &message)?;
    let body = Body::new(UnaryBody { message: Some(framed), ended: false, _memory: memory });
    Ok(response(body, context))
}

fn response(body: Body, context: RequestContext) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    with_trace(response.headers_mut(), context);
    response
}

/// A message with its prefix, and the reservation of its memory.
fn frame(app: &AppState, message: &impl Message) -> Result<(Bytes, Reservation), Status> {
    let length = message.encoded_len();
    let claimed = u32::try_from(length)
        .map_err(|_| Status::resource_exhausted("the response exceeds the maximum gRPC message"))?;
    let memory = app.bodies.memory.reserve(PREFIX + length).map_err(refused)?;
    let mut framed: Vec<u8> = with_room(PREFIX + length)?;
    framed.put_u8(0);
    framed.put_u32(claimed);
    message.encode(&mut framed).map_err(|error| Status::internal(error.to_string()))?;
    Ok((framed.into(), memory))
}

fn refused(error: MemoryError) -> Status {
    api::ApiError::from(error).into()
}

/// Replies to the messages of a stream, one after the other.
fn respond_to_stream(app: Arc<AppState>, request: Request<Body>) -> Result<Response<Body>, Status> {
    let (head, body) = request.into_parts();
    let context = context_of(&head.headers);
    let caller = caller_of(&head.extensions)?;
    let reader = MessageReader::new(body, coding_of(&head.headers)?);
    let frames = stream::unfold(Some((app, caller, reader)), move |state| async move {
        let (app, caller, mut reader) = state?;
        match next_reply(&app, &caller, &mut reader, context).await {
            Ok(Some(framed)) => {
                Some((Ok::<_, Infallible>(Frame::data(framed)), Some((app, caller, reader))))
            }
            Ok(None) => Some((Ok(Frame::trailers(trailers(&Status::ok("")))), None)),
            Err(status) => Some((Ok(Frame::trailers(trailers(&status))), None)),
        }
    });
    Ok(response(Body::new(StreamBody::new(frames)), context))
}

/// The reply to the next message of a stream.
async fn next_reply(
    app: &AppState,
    caller: &Caller,
    reader: &mut MessageReader,
    context: RequestContext,
) -> Result<Option<Bytes>, Status> {
    let next = tokio::select! {
        // A message that has arrived is still answered.
        biased;
        next = reader.next(&app.bodies) => next?,
        () = app.draining() => return Err(api::ApiError::shutting_down().into()),
    };
    let Some((message, memory)) = next else { return Ok(None) };
    let id = message.id.clone();
    let (result, _copies) = match infer(app, caller, message, context).await {
        Ok((reply, copies)) => (Ok(reply), Some(copies)),
        Err(error) => (Err(error), None),
    };
    let reply = stream_response(id, result);
    drop(memory);
    // Counted while it is made; afterwards flow control allows only a few of them.
    let (framed, _memory) = frame(app, &reply)?;
    Ok(Some(framed))
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    if status.add_header(&mut trailers).is_err() {
        trailers.insert("grpc-status", HeaderValue::from_static("13"));
    }
    trailers
}

/// Reads the messages of a call.
struct MessageReader {
    body: Body,
    coding: Option<Coding>,
    /// Bytes that were read and belong to the next messages.
    rest: Bytes,
}

type Decoded = (proto::ModelInferRequest, Reservation);

impl MessageReader {
    fn new(body: Body, coding: Option<Coding>) -> MessageReader {
        MessageReader { body, coding, rest: Bytes::new() }
    }

    /// The one message of a call, and the reservation of its memory.
    async fn only(&mut self, bodies: &BodyLimits) -> Result<Decoded, Status> {
        let Some(message) = self.read(bodies).await? else {
            return Err(Status::internal("Missing request message."));
        };
        // The end of the stream may arrive in an empty frame.
        let mut more = !self.rest.is_empty();
        while !more && let Some(data) = next(&mut self.body).await? {
            more = !data.is_empty();
        }
        match more {
            false => decode(bodies, message).await,
            true => Err(Status::internal("ModelInfer takes one message, got more")),
        }
    }

    /// The next message; `None` at the end of the stream.
    async fn next(&mut self, bodies: &BodyLimits) -> Result<Option<Decoded>, Status> {
        match self.read(bodies).await? {
            Some(message) => decode(bodies, message).await.map(Some),
            None => Ok(None),
        }
    }

    /// The bytes of the next message, decompressed.
    async fn read(&mut self, bodies: &BodyLimits) -> Result<Option<(Bytes, Reservation)>, Status> {
        while self.rest.len() < PREFIX {
            let Some(data) = next(&mut self.body).await? else {
                return match self.rest.is_empty() {
                    true => Ok(None),
                    false => Err(Status::internal("Unexpected EOF decoding stream.")),
                };
            };
            self.rest = if self.rest.is_empty() {
                data
            } else {
                [&self.rest[..], &data[..]].concat().into()
            };
        }
        let limit = bodies.max_bytes;
        let (compressed, length) = prefix_of(&self.rest, limit)?;
        self.rest = self.rest.slice(PREFIX..);
        let mut memory = bodies.memory.empty();
        let message = self.collect(bodies, length, &mut memory).await?;
        match (compressed, self.coding) {
            (false, _) => Ok(Some((message, memory))),
            (true, None) => Err(Status::internal("the message is compressed but its call is not")),
            (true, Some(coding)) => {
                let expanded = message.len().saturating_mul(MAX_EXPANSION);
                let work = move || Ok((decompress(&message, coding, limit, &mut memory)?, memory));
                Ok(Some(heavy(expanded, work).await?))
            }
        }
    }

    /// The next `length` bytes.
    async fn collect(
        &mut self,
        bodies: &BodyLimits,
        length: usize,
        memory: &mut Reservation,
    ) -> Result<Bytes, Status> {
        reserve_received(memory, self.rest.len().min(length), length).map_err(refused)?;
        if self.rest.len() >= length {
            return Ok(self.rest.split_to(length));
        }
        let mut buffer = bodies.buffers.take(length);
        buffer.extend(&std::mem::take(&mut self.rest)).map_err(out_of_memory)?;
        while buffer.len() < length {
            let Some(mut data) = next(&mut self.body).await? else {
                return Err(Status::internal("Unexpected EOF decoding stream."));
            };
            let own = data.split_to(data.len().min(length - buffer.len()));
            reserve_received(memory, buffer.len() + own.len(), length).map_err(refused)?;
            buffer.extend(&own).map_err(out_of_memory)?;
            self.rest = data;
        }
        Ok(buffer.freeze())
    }
}

/// Decodes a message after the memory for it is reserved.
async fn decode(
    bodies: &BodyLimits,
    (bytes, mut memory): (Bytes, Reservation),
) -> Result<Decoded, Status> {
    // Raw tensors are slices; only what is around them takes time.
    let weight = if decoded_size::is_wide(&bytes) { bytes.len().max(LARGE_BYTES) } else { 0 };
    let measure = move || {
        let size = decoded_size::of_message(&bytes)?;
        Ok((bytes, size))
    };
    let (bytes, size) = heavy(weight, measure).await?;
    bodies.reserve_decoding(size, &mut memory)?;
    let message = heavy(weight, move || Ok(decode_message(bytes))).await??;
    Ok((message, memory))
}

/// Whether the message after this prefix is compressed, and its length.
fn prefix_of(prefix: &Bytes, limit: usize) -> Result<(bool, usize), Status> {
    let compressed = match prefix[0] {
        0 => false,
        1 => true,
        flag => return Err(Status::internal(format!("unknown message flag {flag}"))),
    };
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if length > limit {
        return Err(Status::out_of_range(format!(
            "Error, decoded message length too large: found {length} bytes, the limit is: {limit} \
             bytes"
        )));
    }
    Ok((compressed, length))
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
    _memory: Reservation,
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
    use model::HostMemory;
    use tonic::Code;

    use super::*;
    use crate::rest::compress;

    fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[flag][..], &length.to_be_bytes(), message].concat()
    }

    fn body_of(pieces: &[&[u8]]) -> Body {
        let frame = |piece: &&[u8]| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(piece)));
        let frames: Vec<_> = pieces.iter().map(frame).collect();
        Body::new(StreamBody::new(stream::iter(frames)))
    }

    fn bodies(max_bytes: usize, memory: &'static HostMemory) -> BodyLimits {
        BodyLimits { max_bytes, buffers: Arc::default(), memory }
    }

    /// Reads a body of one message that arrives in these frames; its content, undecoded.
    async fn read_frames(pieces: &[&[u8]], limit: usize) -> Result<Bytes, Code> {
        let bodies = bodies(limit, HostMemory::leaked(1 << 30));
        let mut reader = MessageReader::new(body_of(pieces), None);
        let code = |status: Status| status.code();
        let (bytes, _memory) = reader.read(&bodies).await.map_err(code)?.ok_or(Code::Internal)?;
        match reader.read(&bodies).await {
            Ok(None) => Ok(bytes),
            Ok(Some(_)) => Err(Code::Internal),
            Err(status) => Err(status.code()),
        }
    }

    /// Decodes the one message of a body.
    async fn decode_one(
        body: &[u8],
        coding: Option<Coding>,
        limit: usize,
        memory: &'static HostMemory,
    ) -> Result<Decoded, Status> {
        MessageReader::new(body_of(&[body]), coding).only(&bodies(limit, memory)).await
    }

    #[tokio::test]
    async fn bombs_are_refused_before_they_are_decoded() {
        let memory = HostMemory::leaked(64 << 20);
        let limit = 8 << 20;
        // Empty inputs and raw contents: two bytes each of a repeated field.
        for tag in [0x2a, 0x32, 0x3a] {
            let message = [tag, 0].repeat(1 << 20);
            let body = framed(0, &message);
            let error = decode_one(&body, None, limit, memory).await.unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument);
            let packed = compress(&[message.into()], Coding::Gzip).unwrap();
            assert!(packed.len() < 10_000, "{}", packed.len());
            let body = framed(1, &packed);
            let error = decode_one(&body, Some(Coding::Gzip), limit, memory).await.unwrap_err();
            assert_eq!((error.code(), memory.used()), (Code::InvalidArgument, 0));
        }
        // Strings of no bytes in the contents of one input: 2 bytes become 32.
        let contents = [0x42, 0].repeat(3 << 20);
        let contents = delimited(0x2a, &delimited(0x2a, &contents));
        let error = decode_one(&framed(0, &contents), None, limit, memory).await.unwrap_err();
        assert_eq!(error.code(), Code::OutOfRange, "{error}");
        // A message that decompresses to more than is allowed.
        let packed = compress(&[vec![0; limit + 1].into()], Coding::Gzip).unwrap();
        let body = framed(1, &packed);
        let error = decode_one(&body, Some(Coding::Gzip), limit, memory).await.unwrap_err();
        assert_eq!(error.code(), Code::OutOfRange, "{error}");
        assert_eq!(memory.used(), 0);
    }

    #[tokio::test]
    async fn memory_in_use_by_others_makes_a_message_wait() {
        let memory = HostMemory::leaked(1 << 20);
        let message = proto::ModelInferRequest {
            raw_input_contents: vec![vec![0; 300_000].into()],
            ..Default::default()
        };
        let body = framed(0, &message.encode_to_vec());
        let held = memory.reserve(900_000).unwrap();
        let error = decode_one(&body, None, 1 << 20, memory).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        drop(held);
        let (decoded, reservation) = decode_one(&body, None, 1 << 20, memory).await.unwrap();
        assert_eq!(decoded, message);
        assert!(reservation.bytes() >= 300_000 && memory.used() == reservation.bytes());
    }

    #[tokio::test]
    async fn every_refused_reservation_is_an_error() {
        let memory = HostMemory::leaked_with_faults(usize::MAX);
        let message = proto::ModelInferRequest {
            raw_input_contents: vec![vec![1; 500_000].into()],
            ..Default::default()
        };
        let packed = compress(&[message.encode_to_vec().into()], Coding::Gzip).unwrap();
        let plain = framed(0, &message.encode_to_vec());
        for (body, coding) in [(plain, None), (framed(1, &packed), Some(Coding::Gzip))] {
            for refused in 0.. {
                memory.fail_at(refused);
                let pieces: Vec<&[u8]> = body.chunks(90_000).collect();
                let mut reader = MessageReader::new(body_of(&pieces), coding);
                let result = reader.only(&bodies(1 << 20, memory)).await;
                let failed = memory.has_failed();
                memory.fail_at(u64::MAX);
                if !failed {
                    assert_eq!(result.unwrap().0, message);
                    assert!(refused > 1);
                    break;
                }
                assert_eq!(result.unwrap_err().code(), Code::Unavailable);
                assert_eq!(memory.used(), 0);
            }
        }
    }

    /// A field of `bytes`.
    fn delimited(tag: u8, bytes: &[u8]) -> Vec<u8> {
        let mut field = vec![tag];
        prost::encoding::encode_varint(bytes.len() as u64, &mut field);
        field.extend_from_slice(bytes);
        field
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
