//! The server's clients: they send messages over loopback that were encoded once.
//!
//! gRPC connections use the `h2` crate directly, so that a client costs little: it writes frames
//! into the connection's buffer, and never copies the bytes of a message.

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use api::proto;
use assembly::Failure;
use bytes::{Bytes, BytesMut};
use h2::client::SendRequest;
use http::Request;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::args::{Protocol, ServerBenchArgs};
use super::child::ServerProcess;
use super::report::{Measurement, ReplyStats, process_seconds, thousandth};
use super::test_model::TestModel;
use super::transport::{Stream, Transport};
use super::window::MeasuredWindow;

/// One reply of so many is compared.
const SAMPLE: usize = 16;
/// Flow control windows of one reply and of a connection, in bytes.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Max bytes of a REST reply.
const REPLY_BYTES_MAX: usize = 64 << 20;

const METHOD: &str = "/inference.GRPCInferenceService/ModelInfer";

/// The requests of a client, and the expected replies.
struct RequestScript {
    protocol: Protocol,
    messages: Vec<Bytes>,
    test_model: Arc<TestModel>,
    address: SocketAddr,
    transport: Transport,
    /// Bytes of the latest reply.
    answer_bytes: AtomicUsize,
}

/// Clients of one server over one protocol.
pub(super) struct ProtocolClients {
    script: Arc<RequestScript>,
    clients: usize,
    threads: usize,
}

impl ProtocolClients {
    pub(super) fn new(
        protocol: Protocol,
        args: &ServerBenchArgs,
        test_model: &Arc<TestModel>,
        server: &ServerProcess,
    ) -> ProtocolClients {
        let (address, messages) = match protocol {
            Protocol::Grpc => (server.grpc, test_model.grpc_messages()),
            Protocol::Rest => (server.http, test_model.rest_messages(&server.transport.header())),
        };
        let clients = usize::from(args.clients);
        let (test_model, answer_bytes) = (test_model.clone(), AtomicUsize::new(0));
        let script = Arc::new(RequestScript {
            protocol,
            messages,
            test_model,
            address,
            transport: server.transport.clone(),
            answer_bytes,
        });
        ProtocolClients { script, clients, threads: usize::from(args.connections).min(clients) }
    }

    /// Measures `server` once.
    pub(super) fn run(
        &self,
        window: MeasuredWindow,
        server: &ServerProcess,
    ) -> Result<Measurement, Failure> {
        let (clients, threads) = (self.clients, self.threads);
        let share = |thread: usize| clients / threads + usize::from(thread < clients % threads);
        let start = Instant::now();
        std::thread::scope(|scope| {
            let spawn = |thread| {
                let (script, count) = (self.script.clone(), share(thread));
                scope.spawn(move || run_thread(script, (start, window), count, thread))
            };
            let sending: Vec<_> = (0..threads).map(spawn).collect();
            std::thread::sleep(window.ramp);
            let before =
                (server.cpu_seconds(), process_seconds(None), server.counts(), Instant::now());
            std::thread::sleep(window.counted);
            let spent = before.3.elapsed().as_secs_f64();
            let server_cores = thousandth((server.cpu_seconds() - before.0) / spent);
            let client_cores = thousandth((process_seconds(None) - before.1) / spent);
            let mut stats = ReplyStats::new(start, window);
            for thread in sending {
                let done = thread.join().map_err(|_| Failure::failed("a client panicked"))?;
                stats.add(done?);
            }
            let (counts, after) = (before.2?, server.counts()?);
            let executions = after.executions - counts.executions;
            let rows = (after.inferences - counts.inferences) / executions.max(1.0);
            let measurement = stats.finish();
            let request_bytes = self.script.messages.first().map_or(0, Bytes::len);
            let answer_bytes = self.script.answer_bytes.load(Ordering::Relaxed);
            Ok(Measurement {
                server_cores,
                client_cores,
                mean_batch: (executions > 0.0).then(|| (rows * 10.0).round() / 10.0),
                request_bytes,
                answer_bytes,
                gb_per_second: thousandth(
                    measurement.rps * (request_bytes + answer_bytes) as f64 / 1e9,
                ),
                ..measurement
            })
        })
    }
}

fn broken(why: impl std::fmt::Display) -> Failure {
    Failure::failed(format!("a client: {why}"))
}

/// Keeps `count` requests in flight on this thread.
fn run_thread(
    script: Arc<RequestScript>,
    (start, window): (Instant, MeasuredWindow),
    count: usize,
    thread: usize,
) -> Result<ReplyStats, Failure> {
    let runtime: Runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(broken)?;
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        let sender = match script.protocol {
            Protocol::Grpc => Some(connect(&script).await?),
            Protocol::Rest => None,
        };
        for client in 0..count {
            let (script, sender, first) = (script.clone(), sender.clone(), thread + client);
            tasks.spawn(async move {
                match sender {
                    Some(sender) => send_grpc(&script, sender, (start, window), first).await,
                    None => send_rest(&script, (start, window), first).await,
                }
            });
        }
        let mut stats = ReplyStats::new(start, window);
        while let Some(done) = tasks.join_next().await {
            stats.add(done.map_err(broken)??);
        }
        Ok(stats)
    })
}

async fn connect(script: &RequestScript) -> Result<SendRequest<Bytes>, Failure> {
    let stream = script.transport.connect(script.address, b"h2").await.map_err(broken)?;
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .enable_push(false);
    let (sender, connection) = builder.handshake(stream).await.map_err(broken)?;
    // Requests on the connection report its errors.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}

async fn send_grpc(
    script: &RequestScript,
    mut sender: SendRequest<Bytes>,
    (start, window): (Instant, MeasuredWindow),
    first: usize,
) -> Result<ReplyStats, Failure> {
    let uri = format!("{}://{}{METHOD}", script.transport.scheme(), script.address);
    let end = start + window.ramp + window.counted;
    let (mut stats, mut next) = (ReplyStats::new(start, window), first);
    while Instant::now() < end {
        let index = next % script.messages.len();
        next += 1;
        let mut head = Request::post(&uri).header("content-type", "application/grpc");
        if let Some(authorization) = &script.transport.authorization {
            head = head.header("authorization", authorization);
        }
        let head = head.header("te", "trailers").body(()).map_err(broken)?;
        sender = sender.ready().await.map_err(broken)?;
        let sent = Instant::now();
        let (reply, mut stream) = sender.send_request(head, false).map_err(broken)?;
        stream.send_data(script.messages[index].clone(), true).map_err(broken)?;
        let body = grpc_reply(reply.await.map_err(broken)?).await?;
        let replied = Instant::now();
        script.answer_bytes.store(body.len(), Ordering::Relaxed);
        let checked = stats.due_for_check(SAMPLE);
        let right = !checked || is_right(script, index, body)?;
        stats.record(sent, replied, checked, right);
    }
    Ok(stats)
}

/// The body of the reply, if the call succeeded.
async fn grpc_reply(reply: http::Response<h2::RecvStream>) -> Result<Bytes, Failure> {
    let (head, mut body) = reply.into_parts();
    let mut got = BytesMut::new();
    while let Some(data) = body.data().await {
        let data = data.map_err(broken)?;
        body.flow_control().release_capacity(data.len()).map_err(broken)?;
        got.extend_from_slice(&data);
    }
    let trailers = body.trailers().await.map_err(broken)?.unwrap_or(head.headers);
    let text = |name: &str| trailers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    match text("grpc-status") {
        "0" => Ok(got.freeze()),
        code => Err(broken(format!("status {code}: {}", text("grpc-message")))),
    }
}

fn is_right(script: &RequestScript, index: usize, body: Bytes) -> Result<bool, Failure> {
    // The message follows a flag and its length.
    let message = body.get(5..).unwrap_or_default();
    let message = proto::ModelInferResponse::decode(message).map_err(broken)?;
    let outputs: Vec<&[u8]> = message.raw_output_contents.iter().map(|raw| &raw[..]).collect();
    Ok(script.test_model.is_expected(index, &outputs))
}

async fn send_rest(
    script: &RequestScript,
    (start, window): (Instant, MeasuredWindow),
    first: usize,
) -> Result<ReplyStats, Failure> {
    let mut stream = script.transport.connect(script.address, b"http/1.1").await.map_err(broken)?;
    let end = start + window.ramp + window.counted;
    let (mut stats, mut next, mut buffer) =
        (ReplyStats::new(start, window), first, BytesMut::new());
    while Instant::now() < end {
        let index = next % script.messages.len();
        next += 1;
        let sent = Instant::now();
        stream.write_all(&script.messages[index]).await.map_err(broken)?;
        // TLS keeps what the socket did not take.
        stream.flush().await.map_err(broken)?;
        let (json, body) = rest_reply(&mut stream, &mut buffer).await.map_err(broken)?;
        let replied = Instant::now();
        script.answer_bytes.store(body.len(), Ordering::Relaxed);
        let checked = stats.due_for_check(SAMPLE);
        let outputs = body.get(json..).unwrap_or_default();
        let right = !checked || script.test_model.is_expected(index, &[outputs]);
        stats.record(sent, replied, checked, right);
    }
    Ok(stats)
}

/// The body of the next reply, and the offset of its binary part.
async fn rest_reply(
    stream: &mut Box<dyn Stream>,
    buffer: &mut BytesMut,
) -> std::io::Result<(usize, BytesMut)> {
    loop {
        if stream.read_buf(buffer).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let Some(end) = buffer.windows(4).position(|part| part == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&buffer[..end]).to_ascii_lowercase();
        let number = |name: &str| -> usize {
            let value = head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
        };
        let (length, json) = (number("content-length"), number("inference-header-content-length"));
        if head.get(9..12) != Some("200") || length > REPLY_BYTES_MAX {
            return Err(Error::other(format!(
                "replied with {}",
                head.lines().next().unwrap_or("")
            )));
        }
        if buffer.len() >= end + 4 + length {
            let mut reply = buffer.split_to(end + 4 + length);
            return Ok((json, reply.split_off(end + 4)));
        }
    }
}
