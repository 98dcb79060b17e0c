//! Accepts connections and serves them until stopped, whatever their clients do.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use api::{ApiError, ErrorKind};
use futures_util::FutureExt;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    CONNECTION, HeaderValue, VARY, WWW_AUTHENTICATE,
};
use http::{Method, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::auth::Caller;
use crate::auth::routes::{self, Need, REQUEST_ID};
use crate::connection::{
    BodyRules, CloseReason, Connection, ConnectionTable, GuardedIo, OverSocket, ReadAhead,
    RequestBody, TrackedBody,
};
use crate::rest::response::ResponseBody;
use crate::server::{AppState, StopPhase};
use crate::tls::{Tls, TlsUse, fingerprint};
use crate::watched_task::{WatchedExecutor, watched};

/// Until when connections may finish after a stop; `None` before it.
pub(crate) type Stop = watch::Receiver<Option<Instant>>;

/// Time for connections whose client has just connected, or begun a request, after a stop.
const CLOSE_TIME: Duration = Duration::from_millis(500);
/// Connections that are taken out of a socket before it is closed, so that clients who go on
/// connecting cannot hold up the stop: as many as wait in a socket by tokio's default.
const LATE_CONNECTIONS: usize = 1024;
/// How often a connection that is to be closed is looked at.
const CLOSE_INTERVAL: Duration = Duration::from_millis(20);
/// Shortest and longest pause after a failure to accept.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often such failures are logged.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum size of the headers of a request over HTTP/2.
const HEADERS_MAX: u32 = 64 << 10;

/// A listener and how it serves.
pub(crate) struct Listener<R> {
    pub(crate) socket: TcpListener,
    pub(crate) responder: R,
    pub(crate) table: Arc<ConnectionTable>,
    pub(crate) tls: Option<(Arc<Tls>, TlsUse)>,
}

/// What the connections of a listener share.
struct Shared<R> {
    responder: R,
    table: Arc<ConnectionTable>,
    tls: Option<(Arc<Tls>, TlsUse)>,
}

/// Responds to the requests of a connection.
pub(crate) trait Respond: Clone + Send + Sync + 'static {
    /// Whether only HTTP/2 is spoken, and bodies are messages that may come late.
    const GRPC: bool;

    fn app(&self) -> &Arc<AppState>;

    /// What a request needs.
    fn need(&self, method: &Method, path: &str) -> Need;

    /// The response that reports an error.
    fn error(&self, error: ApiError) -> Response<ResponseBody>;

    fn respond(
        &self,
        request: Request<RequestBody>,
        caller: Arc<Caller>,
    ) -> impl Future<Output = Response<ResponseBody>> + Send;
}

/// Returns the deadline of `stop` when it is set; at once if its sender is dropped.
pub(crate) async fn stopped(stop: &mut Stop) -> Instant {
    let deadline = stop.wait_for(Option::is_some).await;
    deadline.ok().and_then(|deadline| *deadline).unwrap_or_else(Instant::now)
}

/// Returns when connections are left to another process.
async fn handed_over(accepting: &mut watch::Receiver<bool>) {
    if accepting.wait_for(|accepting| !*accepting).await.is_err() {
        std::future::pending().await
    }
}

/// Returns when clients are to be told to go away.
async fn lame_duck(phases: &mut watch::Receiver<StopPhase>) {
    if phases.wait_for(|phase| *phase == StopPhase::LameDuck).await.is_err() {
        std::future::pending().await
    }
}

impl<R: Respond> Listener<R> {
    /// Serves until `stop`, then lets connections finish their requests until its deadline.
    /// Dropping the future closes them immediately.
    pub(crate) async fn serve(self, mut stop: Stop) {
        let (socket, table) = (self.socket, self.table.clone());
        let shared =
            Arc::new(Shared { responder: self.responder, table: self.table, tls: self.tls });
        let mut connections = JoinSet::new();
        let mut failures = AcceptFailures::default();
        let mut accepting = shared.responder.app().accepting.subscribe();
        let mut accepts = true;
        let begin =
            |stream: TcpStream, peer: SocketAddr, stop: &Stop, all: &mut JoinSet<()>| match shared
                .table
                .admit(peer)
            {
                Ok(open) => {
                    let (shared, stop) = (shared.clone(), stop.clone());
                    all.spawn(watched(async move {
                        serve_stream(stream, &open.0, &shared, stop).await;
                    }));
                }
                Err(reason) => refuse(&shared, &stream, reason),
            };
        let deadline = loop {
            let accepted = tokio::select! {
                biased;
                deadline = stopped(&mut stop) => break deadline,
                () = handed_over(&mut accepting), if accepts => {
                    accepts = false;
                    continue;
                }
                Some(_) = connections.join_next() => continue,
                accepted = socket.accept(), if accepts => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    failures.pause = PAUSE_MIN;
                    begin(stream, peer, &stop, &mut connections);
                }
                Err(error) => {
                    tokio::select! {
                        deadline = stopped(&mut stop) => break deadline,
                        () = failures.wait(&error, &table) => {}
                    }
                }
            }
        };
        // Closing the socket would cut off those that wait in it, unless another process has it.
        let late = if *accepting.borrow() { LATE_CONNECTIONS } else { 0 };
        for _ in 0..late {
            let Some(Ok((stream, peer))) = socket.accept().now_or_never() else { break };
            begin(stream, peer, &stop, &mut connections);
        }
        drop(socket);
        let finished = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout_at(deadline, finished).await.is_err() {
            for _ in 0..connections.len() {
                table.count(CloseReason::Stopped);
            }
            connections.shutdown().await;
        }
    }
}

/// Failures to accept, usually for lack of file descriptors.
struct AcceptFailures {
    pause: Duration,
    warned: Option<Instant>,
}

impl Default for AcceptFailures {
    fn default() -> Self {
        AcceptFailures { pause: PAUSE_MIN, warned: None }
    }
}

impl AcceptFailures {
    /// Makes room if connections are idle, and pauses: a connection that cannot be accepted stays
    /// in the queue, and accepting again at once would fail again at once.
    async fn wait(&mut self, error: &std::io::Error, table: &ConnectionTable) {
        let exhausted = matches!(
            error.raw_os_error().map(rustix::io::Errno::from_raw_os_error),
            Some(
                rustix::io::Errno::MFILE
                    | rustix::io::Errno::NFILE
                    | rustix::io::Errno::NOBUFS
                    | rustix::io::Errno::NOMEM
            )
        );
        if !exhausted {
            // The client is gone.
            return tokio::task::yield_now().await;
        }
        let freed = table.free_descriptor();
        if self.warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL) {
            self.warned = Some(Instant::now());
            let (listener, open) = (table.listener, table.len());
            tracing::warn!(listener, open, %error, "cannot accept connections");
        }
        tokio::time::sleep(if freed { PAUSE_MIN } else { self.pause }).await;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }
}

/// Closes a connection that has no place. Where that can be told in HTTP/1, it is.
fn refuse<R: Respond>(shared: &Shared<R>, stream: &TcpStream, reason: CloseReason) {
    shared.table.count(reason);
    if shared.tls.is_none() && !R::GRPC {
        let reply = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\n\
                      connection: close\r\n\r\n";
        let _ = stream.try_write(reply);
    }
}

async fn serve_stream<R: Respond>(
    stream: TcpStream,
    connection: &Arc<Connection>,
    shared: &Shared<R>,
    stop: Stop,
) {
    // Without this a response can wait for the client's delayed acknowledgement.
    let _ = stream.set_nodelay(true);
    let Some((tls, usage)) = &shared.tls else {
        return serve_connection(stream, None, connection, shared, stop).await;
    };
    let limit = shared.table.limits.head_timeout;
    let handshake =
        tokio::time::timeout(limit, tls.acceptor(*usage).accept(ReadAhead::new(stream)));
    let result = tokio::select! {
        result = handshake => result,
        () = connection.close.notified() => return,
    };
    let stream = match result {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            shared.table.count(CloseReason::Handshake);
            if is_certificate_error(&error) {
                let access = &shared.responder.app().access;
                access.refuse_certificate(connection.peer, &error.to_string());
            }
            tracing::debug!(peer = %connection.peer, %error, "TLS handshake failed");
            return;
        }
        Err(_) => return shared.table.count(CloseReason::Head),
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let certificate = certificate.map(|certificate| {
        let name = fingerprint(certificate);
        Arc::from(format!("certificate:{}", &name[..32]))
    });
    serve_connection(stream, certificate, connection, shared, stop).await;
}

/// Whether a handshake failed because of the client's certificate.
fn is_certificate_error(error: &std::io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    matches!(
        error,
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented)
    )
}

async fn serve_connection<R, S>(
    stream: S,
    certificate: Option<Arc<str>>,
    connection: &Arc<Connection>,
    shared: &Shared<R>,
    mut stop: Stop,
) where
    R: Respond,
    S: AsyncRead + AsyncWrite + OverSocket + Send + Unpin + 'static,
{
    let limits = connection.limits();
    let app = shared.responder.app();
    let mut window = app.windows.take(app.bodies.memory.limit());
    let mut builder = Builder::new(WatchedExecutor);
    // The head's timeout of hyper would also end idle connections; those are checked below.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None);
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(window.stream)
        .initial_connection_window_size(window.connection)
        .max_frame_size(window.frame)
        .max_header_list_size(HEADERS_MAX)
        .max_concurrent_streams(limits.max_streams)
        .keep_alive_interval(limits.ping_interval)
        .keep_alive_timeout(limits.ping_interval);
    if R::GRPC {
        builder = builder.http2_only();
    }
    let service = service_fn(|request: Request<Incoming>| {
        let (responder, certificate) = (shared.responder.clone(), certificate.clone());
        handle(responder, connection.clone(), certificate, request)
    });
    let io = TokioIo::new(GuardedIo::new(stream, connection.clone()));
    let mut served = std::pin::pin!(builder.serve_connection(io, service));
    let mut checks = tokio::time::interval(limits.check_interval());
    checks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // When the connection ends even if it does not close by itself.
    let mut end: Option<Instant> = None;
    let mut stopping: Option<Instant> = None;
    // A connection that begins in the lame-duck period still gets its replies.
    let mut phases = shared.responder.app().phase.subscribe();
    let mut going_away = *phases.borrow_and_update() != StopPhase::Serving;
    let mut said_goaway = false;
    let result = loop {
        if going_away && !said_goaway && (R::GRPC || connection.is_http2()) {
            // The client learns which of its requests were not begun. Replies over HTTP/1 say
            // `connection: close`; hyper would also close a connection whose request has arrived
            // and was not read.
            said_goaway = true;
            served.as_mut().graceful_shutdown();
        }
        tokio::select! {
            result = served.as_mut() => break result,
            () = connection.close.notified() => return,
            () = lame_duck(&mut phases), if !going_away => going_away = true,
            _ = stopped(&mut stop), if stopping.is_none() => {
                going_away = true;
                stopping = Some(Instant::now());
                checks = tokio::time::interval(CLOSE_INTERVAL);
            }
            _ = checks.tick() => {
                if connection.is_http1() {
                    window.release();
                }
                if end.is_some_and(|end| end <= Instant::now()) {
                    return;
                }
                if stopping.is_some_and(|since| may_close(connection, since)) {
                    connection.begin_closing();
                    let polled = poll_fn(|context| Poll::Ready(served.as_mut().poll(context)));
                    if let Poll::Ready(result) = polled.await {
                        break result;
                    }
                    // A request that has arrived meanwhile still gets its reply.
                    let since = stopping.unwrap_or_else(Instant::now);
                    if !connection.has_unread() && may_close(connection, since) {
                        return;
                    }
                    continue;
                }
                match connection.overdue() {
                    None => {}
                    Some(CloseReason::Idle) if end.is_none() && connection.is_http2() => {
                        // The client of HTTP/2 is told which of its requests were not begun.
                        shared.table.count(CloseReason::Idle);
                        served.as_mut().graceful_shutdown();
                        end = Some(Instant::now() + CLOSE_TIME);
                    }
                    Some(CloseReason::Idle) if end.is_some() => {}
                    Some(reason) => return shared.table.count(reason),
                }
            }
        }
    };
    if let Err(error) = result {
        if is_timeout(&*error) {
            shared.table.count(CloseReason::Write);
        }
        tracing::debug!(peer = %connection.peer, %error, "connection closed early");
    }
}

/// Whether a server that has stopped at `since` may close a connection.
fn may_close(connection: &Connection, since: Instant) -> bool {
    let is_over = since.elapsed() >= CLOSE_TIME;
    connection.is_between_requests() || (is_over && connection.is_finished())
}

fn is_timeout(mut error: &(dyn std::error::Error + 'static)) -> bool {
    loop {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return io.kind() == std::io::ErrorKind::TimedOut;
        }
        match error.source() {
            Some(source) => error = source,
            None => return false,
        }
    }
}

/// Handles one request. A panic becomes an error response, not a closed connection.
fn handle<R: Respond>(
    responder: R,
    connection: Arc<Connection>,
    certificate: Option<Arc<str>>,
    request: Request<Incoming>,
) -> impl Future<Output = Result<Response<TrackedBody<ResponseBody>>, Infallible>> + Send {
    // From now on the connection is in use, not when the future is polled.
    let in_flight = connection.begin();
    let is_http1 = request.version() < Version::HTTP_2;
    let endless = routes::is_endless(request.uri().path()).then(|| connection.begin_endless());
    async move {
        let work = admit_and_respond(&responder, &connection, certificate, request);
        let response = AssertUnwindSafe(work).catch_unwind().await;
        let mut response = response.unwrap_or_else(|_| {
            responder.error(ApiError::internal("the server failed on this request"))
        });
        if is_http1 && *responder.app().phase.borrow() != StopPhase::Serving {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response.map(|body| TrackedBody::new(body, in_flight, endless)))
    }
}

async fn admit_and_respond<R: Respond>(
    responder: &R,
    connection: &Connection,
    certificate: Option<Arc<str>>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let app = responder.app();
    let (head, body) = request.into_parts();
    let origin = app.access.allowed_origin(&head.headers);
    if let Some(origin) = &origin
        && head.method == Method::OPTIONS
    {
        // Browsers ask without credentials.
        return preflight(origin.clone());
    }
    let need = responder.need(&head.method, head.uri.path());
    let caller = match app.access.admit(&need, &head, connection.peer, certificate.as_ref()) {
        Ok(caller) => caller,
        Err((error, id)) => return refusal(responder, error, &id),
    };
    let whole = !R::GRPC || head.uri.path().ends_with("/ModelInfer");
    let limits = connection.limits();
    let timeout = if whole { limits.body_timeout } else { limits.idle_timeout };
    let rules = BodyRules { timeout, whole, drain: app.drain.clone() };
    let path = need.change.map(|_| head.uri.path().to_string());
    let request = Request::from_parts(head, RequestBody::new(body, rules));
    let mut response = responder.respond(request, caller.clone()).await;
    if let (Some(change), Some(path)) = (need.change, path) {
        caller.changed(change, &path, response.status().as_u16());
    }
    if let Some(origin) = origin {
        response.headers_mut().insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        response.headers_mut().append(VARY, HeaderValue::from_static("origin"));
    }
    response
}

fn refusal<R: Respond>(responder: &R, error: ApiError, id: &str) -> Response<ResponseBody> {
    let absent = error.kind == ErrorKind::Unauthenticated;
    let mut response = responder.error(error);
    let headers = response.headers_mut();
    if absent && !R::GRPC {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, id);
    }
    response
}

/// The response to a browser that asks whether a page of `origin` may send a request.
fn preflight(origin: HeaderValue) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::Routed(axum::body::Body::empty()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    let methods = HeaderValue::from_static("GET, POST, PUT, PATCH, DELETE");
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, methods);
    let names = "authorization, content-type, content-encoding, inference-header-content-length, \
                 traceparent, x-request-id";
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static(names));
    headers.insert(VARY, HeaderValue::from_static("origin"));
    response
}
