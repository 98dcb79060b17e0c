//! HTTP/2 to one backend with the least overhead: the sender writes frames itself and is woken by
//! the task that reads the socket. There is no task, queue or buffer in between, because each of
//! them adds a wake-up to every request.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Ping, PingPong, RecvStream};
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use model::{HostMemory, MemoryError, Reservation};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tower::Service;

use crate::tls::ClientTls;

/// Time limit of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);
/// How often a connection is pinged; the reply must arrive within the same time.
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// Bytes that a backend may send ahead, per reply and in total.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;

/// Why a backend did not reply.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// The connection cannot be opened.
    #[error("cannot connect to {address}: {reason}")]
    Connect {
        /// The backend's address.
        address: String,
        /// The reason.
        reason: String,
    },
    /// The connection or the stream broke.
    #[error("the connection broke: {0}")]
    Broken(#[from] h2::Error),
    /// The request's body cannot be read.
    #[error("the request could not be sent: {0}")]
    Request(String),
    /// There is no memory for the reply.
    #[error("the reply does not fit: {0}")]
    Memory(#[from] MemoryError),
}

/// A connection to a backend, opened on demand and again after it broke. Cloning shares it.
#[derive(Clone)]
pub struct Http2Connection {
    state: Arc<ConnectionState>,
}

struct ConnectionState {
    address: String,
    tls: Option<ClientTls>,
    memory: &'static HostMemory,
    open: Mutex<Option<SendRequest<Bytes>>>,
    /// Serialises connection attempts.
    connecting: tokio::sync::Mutex<()>,
}

impl Http2Connection {
    /// A connection to `address`, `HOST:PORT`. `memory` is the budget of its replies.
    pub fn new(
        address: &str,
        tls: Option<ClientTls>,
        memory: &'static HostMemory,
    ) -> Http2Connection {
        let (open, connecting) = (Mutex::default(), tokio::sync::Mutex::default());
        let address = address.to_string();
        let state = ConnectionState { address, tls, memory, open, connecting };
        Http2Connection { state: Arc::new(state) }
    }
}

impl ConnectionState {
    fn current(&self) -> Option<SendRequest<Bytes>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A sender whose connection accepts one more stream.
    async fn sender(&self) -> Result<SendRequest<Bytes>, ConnectionError> {
        if let Some(sender) = self.current()
            && let Ok(sender) = sender.ready().await
        {
            return Ok(sender);
        }
        let _lock = self.connecting.lock().await;
        // Another request may have connected in the meantime.
        if let Some(sender) = self.current()
            && let Ok(sender) = sender.ready().await
        {
            return Ok(sender);
        }
        let sender = self.connect().await?;
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender.clone());
        Ok(sender.ready().await?)
    }

    async fn connect(&self) -> Result<SendRequest<Bytes>, ConnectionError> {
        let fail =
            |reason: String| ConnectionError::Connect { address: self.address.clone(), reason };
        let connect = async {
            let stream =
                TcpStream::connect(&self.address).await.map_err(|e| fail(e.to_string()))?;
            stream.set_nodelay(true).map_err(|error| fail(error.to_string()))?;
            let Some(tls) = &self.tls else {
                return handshake(stream).await.map_err(|error| fail(error.to_string()));
            };
            let stream = tls.connect(stream, &self.address, b"h2").await.map_err(fail)?;
            handshake(stream).await.map_err(|error| fail(error.to_string()))
        };
        let late = |_| fail("it takes too long".to_string());
        tokio::time::timeout(CONNECT_TIMEOUT, connect).await.map_err(late)?
    }
}

/// Begins HTTP/2 on a stream, which a task then reads.
async fn handshake<S>(stream: S) -> Result<SendRequest<Bytes>, h2::Error>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .enable_push(false);
    let (sender, mut connection) = builder.handshake(stream).await?;
    let pings = connection.ping_pong();
    tokio::spawn(async move {
        // The first to end closes the connection and fails every request on it. The next request
        // connects again.
        tokio::select! {
            _ = connection => {}
            () = watch_pings(pings) => {}
        }
    });
    Ok(sender)
}

/// Returns when a ping gets no reply in time.
async fn watch_pings(pings: Option<PingPong>) {
    let Some(mut pings) = pings else { return std::future::pending().await };
    loop {
        tokio::time::sleep(PING_INTERVAL).await;
        match tokio::time::timeout(PING_INTERVAL, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            _ => return,
        }
    }
}

impl<B> Service<Request<B>> for Http2Connection
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: std::fmt::Display,
{
    type Response = Response<ReplyBody>;
    type Error = ConnectionError;
    type Future =
        Pin<Box<dyn Future<Output = Result<Response<ReplyBody>, ConnectionError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectionError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let state = self.state.clone();
        Box::pin(async move {
            let mut sender = state.sender().await?;
            let (head, mut body) = request.into_parts();
            let empty = body.is_end_stream();
            let (reply, mut stream) = sender.send_request(Request::from_parts(head, ()), empty)?;
            let mut last: Option<Bytes> = None;
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|error| ConnectionError::Request(error.to_string()))?;
                if let Ok(data) = frame.into_data()
                    && let Some(before) = last.replace(data)
                {
                    stream.send_data(before, false)?;
                }
            }
            if !empty {
                // The end of the stream is part of the last frame.
                stream.send_data(last.unwrap_or_default(), true)?;
            }
            let (mut head, stream) = reply.await?.into_parts();
            let memory = ReplyMemory::new(state.memory);
            head.extensions.insert(memory.clone());
            let messages = MessageReader::default();
            Ok(Response::from_parts(head, ReplyBody { stream, messages, memory }))
        })
    }
}

/// The reservation of a reply's memory. The response has it among its extensions, and what is made
/// of the response keeps it.
#[derive(Clone, Debug)]
pub struct ReplyMemory(Arc<Mutex<Reservation>>);

impl ReplyMemory {
    fn new(memory: &'static HostMemory) -> ReplyMemory {
        ReplyMemory(Arc::new(Mutex::new(memory.empty())))
    }

    fn grow(&self, bytes: usize) -> Result<(), MemoryError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).grow(bytes)
    }

    /// The same bytes, which hold the reservation.
    pub fn hold(&self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(HeldBytes { bytes, _memory: self.clone() })
    }
}

/// Bytes of a reply.
struct HeldBytes {
    bytes: Bytes,
    _memory: ReplyMemory,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A flag and the length of a message.
const PREFIX: usize = 5;

/// Finds the messages of a reply: a client allocates what their prefixes claim.
#[derive(Default)]
struct MessageReader {
    prefix: [u8; PREFIX],
    /// Bytes of a prefix that have arrived.
    seen: usize,
    /// Bytes of the message that have not.
    left: usize,
}

impl MessageReader {
    /// Bytes of the messages whose prefix ends in `data`.
    fn claimed(&mut self, mut data: &[u8]) -> usize {
        let mut claimed: usize = 0;
        while !data.is_empty() {
            let skipped = self.left.min(data.len());
            self.left -= skipped;
            data = &data[skipped..];
            let (own, rest) = data.split_at((PREFIX - self.seen).min(data.len()));
            self.prefix[self.seen..][..own.len()].copy_from_slice(own);
            self.seen += own.len();
            data = rest;
            if self.seen == PREFIX {
                let [_, length @ ..] = self.prefix;
                (self.seen, self.left) = (0, u32::from_be_bytes(length) as usize);
                claimed = claimed.saturating_add(self.left);
            }
        }
        claimed
    }
}

/// The body of a reply. Memory for a message is reserved before anything of it is passed on.
pub struct ReplyBody {
    stream: RecvStream,
    messages: MessageReader,
    memory: ReplyMemory,
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = ConnectionError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ConnectionError>>> {
        let ReplyBody { stream, messages, memory } = self.get_mut();
        if let Some(data) = ready!(stream.poll_data(context)) {
            let data = data?;
            memory.grow(messages.claimed(&data))?;
            stream.flow_control().release_capacity(data.len())?;
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let trailers = ready!(stream.poll_trailers(context))?;
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;
    use tokio::net::TcpListener;

    use super::*;

    fn unlimited(address: &str) -> Http2Connection {
        Http2Connection::new(address, None, HostMemory::leaked(usize::MAX))
    }

    #[test]
    fn messages_are_found_in_frames_of_any_size() {
        let message =
            |length: u32| [&[0][..], &length.to_be_bytes(), &vec![7; length as usize][..]].concat();
        let all = [message(3), message(0), message(1000)].concat();
        for size in [1, 2, 4, 5, 7, 1000, all.len()] {
            let mut messages = MessageReader::default();
            let claimed: usize = all.chunks(size).map(|part| messages.claimed(part)).sum();
            assert_eq!((claimed, messages.left, messages.seen), (1003, 0, 0), "{size}");
        }
        // What is claimed counts, not what arrives.
        assert_eq!(
            MessageReader::default().claimed(&[0, 0xff, 0xff, 0xff, 0xff]),
            u32::MAX as usize
        );
    }

    #[tokio::test]
    async fn replies_are_reserved_before_they_are_read() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(echo(listener, 100));
        let memory = HostMemory::leaked(1 << 20);
        let connection = Http2Connection::new(&address, None, memory);
        // A reply that claims 4 GiB, whatever it has.
        let text = Bytes::from_static(&[0, 0xff, 0xff, 0xff, 0xff, 1, 2, 3]);
        let error = send(&connection, &address, text).await.unwrap_err();
        assert!(matches!(error, ConnectionError::Memory(MemoryError::TooLarge { .. })), "{error}");
        assert_eq!(memory.used(), 0);
        let message = [&[0, 0, 0, 0x10, 0][..], &[7; 4096]].concat();
        let request = Request::post(format!("http://{address}/"));
        let request = request.body(Full::new(Bytes::from(message))).unwrap();
        let reply = connection.clone().call(request).await.unwrap();
        let kept = reply.extensions().get::<ReplyMemory>().unwrap().clone();
        let body = reply.into_body().collect().await.unwrap().to_bytes();
        let part = kept.hold(body.slice(5..10));
        drop(kept);
        assert_eq!((memory.used(), &part[..]), (4096, &[7; 5][..]));
        drop(part);
        assert_eq!(memory.used(), 0);
    }

    /// Replies to every request with its own body and a trailer; accepts `each` requests per
    /// connection.
    async fn echo(listener: TcpListener, each: usize) {
        while let Ok((stream, _)) = listener.accept().await {
            let mut connection = h2::server::handshake(stream).await.unwrap();
            for _ in 0..each {
                let Some(Ok((request, mut respond))) = connection.accept().await else { break };
                let mut body = request.into_body();
                let reply = async {
                    let mut received = Vec::new();
                    while let Some(data) = body.data().await {
                        let data = data.unwrap();
                        body.flow_control().release_capacity(data.len()).unwrap();
                        received.extend_from_slice(&data);
                    }
                    let mut send = respond.send_response(Response::new(()), false).unwrap();
                    send.send_data(received.into(), false).unwrap();
                    let trailers = http::HeaderMap::from_iter([(
                        http::HeaderName::from_static("grpc-status"),
                        http::HeaderValue::from_static("0"),
                    )]);
                    send.send_trailers(trailers).unwrap();
                };
                // Frames are only sent while the connection is polled.
                let closed = async { while connection.accept().await.is_some() {} };
                tokio::select! { () = reply => {}, () = closed => {} }
                let _ = tokio::time::timeout(Duration::from_millis(50), async {
                    std::future::poll_fn(|context| connection.poll_closed(context)).await
                })
                .await;
            }
        }
    }

    async fn send(
        connection: &Http2Connection,
        address: &str,
        text: Bytes,
    ) -> Result<(Bytes, bool), ConnectionError> {
        let request = Request::post(format!("http://{address}/")).body(Full::new(text)).unwrap();
        let reply = connection.clone().call(request).await?;
        let body = reply.into_body().collect().await?;
        let trailed = body.trailers().is_some_and(|trailers| trailers.contains_key("grpc-status"));
        Ok((body.to_bytes(), trailed))
    }

    #[tokio::test]
    async fn transfers_bodies_larger_than_a_window() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(echo(listener, 1));
        let connection = unlimited(&address);
        for size in [0, 5, 3 << 20] {
            // Every connection ends after one request: the next request connects again.
            let text = Bytes::from(vec![7u8; size]);
            let mut reply = send(&connection, &address, text.clone()).await;
            for _ in 0..20 {
                if reply.is_ok() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
                reply = send(&connection, &address, text.clone()).await;
            }
            let (received, trailed) = reply.unwrap();
            assert!(received == text && trailed, "{size}");
        }
    }

    #[tokio::test]
    async fn refused_connection_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let error = send(&unlimited(&address), &address, Bytes::new()).await.unwrap_err();
        assert!(matches!(error, ConnectionError::Connect { .. }), "{error}");
    }

    #[tokio::test]
    async fn closes_a_connection_whose_ping_gets_no_reply() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let _connection = h2::server::handshake(stream).await.unwrap();
            // The socket is never read again.
            std::future::pending::<()>().await;
        });
        let error = send(&unlimited(&address), &address, Bytes::from("x")).await.unwrap_err();
        assert!(matches!(error, ConnectionError::Broken(_)), "{error}");
    }
}
