//! Clients that send prepared bytes and read just enough of the response.
//!
//! They allocate nothing during an exchange, so that the allocations that a run counts or fails
//! are the server's.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A response that takes longer does not come.
const PATIENCE: Duration = Duration::from_secs(20);

/// Room for a response; a longer one ends the connection.
const BUFFER: usize = 8 << 20;

/// Calls on one connection before a new one is opened: fewer than its windows would end.
const CALLS_MAX: u32 = 64;

/// HTTP/1 with one connection.
pub(super) struct HttpClient {
    address: SocketAddr,
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl HttpClient {
    pub(super) fn new(address: SocketAddr) -> HttpClient {
        HttpClient { address, stream: None, buffer: vec![0; BUFFER] }
    }

    /// Sends `request` and returns the status of the response.
    pub(super) async fn exchange(&mut self, request: &[u8]) -> Option<u16> {
        if self.stream.is_none() {
            self.stream = connect(self.address).await;
        }
        let stream = self.stream.as_mut()?;
        let exchange = exchange(stream, request, &mut self.buffer);
        let result = tokio::time::timeout(PATIENCE, exchange).await;
        let (status, keeps) = result.expect("the server does not answer").unwrap_or((0, false));
        if !keeps {
            self.stream = None;
        }
        (status > 0).then_some(status)
    }
}

/// Resets the connection when it is dropped, so that its port is free at once.
async fn connect(address: SocketAddr) -> Option<TcpStream> {
    let stream = TcpStream::connect(address).await.expect("the server listens");
    let _ = stream.set_nodelay(true);
    let _ = stream.set_zero_linger();
    Some(stream)
}

/// The status of the response, and whether the connection can be used again.
async fn exchange(
    stream: &mut TcpStream,
    request: &[u8],
    buffer: &mut [u8],
) -> std::io::Result<(u16, bool)> {
    // The server may refuse a request before it has read all of it.
    let written = stream.write_all(request).await;
    let mut filled = 0;
    loop {
        if let Some((status, end, closes)) = response(&buffer[..filled]) {
            if filled >= end {
                return Ok((status, !closes && filled == end && written.is_ok()));
            }
            if end > buffer.len() {
                return Ok((status, false));
            }
        }
        match stream.read(&mut buffer[filled..]).await {
            Ok(count) if count > 0 => filled += count,
            // Closed within a response.
            _ => return Ok((response(&buffer[..filled]).map_or(0, |(status, ..)| status), false)),
        }
    }
}

/// Status, end and whether the connection closes, of the response whose head is in `bytes`.
fn response(bytes: &[u8]) -> Option<(u16, usize, bool)> {
    let head = bytes.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&bytes[..head]).ok()?;
    let status = text.get(9..12)?.parse().ok()?;
    let field = |wanted: &str| {
        let lines = text.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(name, _)| name.eq_ignore_ascii_case(wanted)).map(|(_, value)| value).next()
    };
    let closes = field("connection") == Some("close");
    let end = match field("content-length") {
        Some(length) => head + length.parse::<usize>().ok()?,
        None if field("transfer-encoding").is_some() => match bytes.ends_with(b"0\r\n\r\n") {
            true => bytes.len(),
            false => bytes.len() + 1,
        },
        None => head,
    };
    Some((status, end, closes))
}

/// HTTP/2 as gRPC needs it: one call after another.
pub(super) struct GrpcClient {
    address: SocketAddr,
    stream: Option<TcpStream>,
    calls: u32,
    out: Vec<u8>,
    fields: Vec<u8>,
    buffer: Vec<u8>,
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;
const WINDOW: u8 = 8;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
/// What every server accepts.
const FRAME_MAX: usize = 16_384;

fn put_frame(kind: u8, flags: u8, stream: u32, payload: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes()[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// A header that is not in HPACK's static table, or whose name is at `index` of it.
fn put_header(index: u8, name: &str, value: &str, out: &mut Vec<u8>) {
    match index {
        0 => out.extend_from_slice(&[0, name.len() as u8]),
        1..15 => out.push(index),
        _ => out.extend_from_slice(&[15, index - 15]),
    }
    if index == 0 {
        out.extend_from_slice(name.as_bytes());
    }
    out.push(value.len() as u8);
    out.extend_from_slice(value.as_bytes());
}

impl GrpcClient {
    pub(super) fn new(address: SocketAddr) -> GrpcClient {
        let (out, fields) = (Vec::with_capacity(BUFFER), Vec::with_capacity(1024));
        GrpcClient { address, stream: None, calls: 0, out, fields, buffer: vec![0; BUFFER] }
    }

    /// Calls `path`. Whether the call was served: a refused one has no message. `None` when the
    /// server closes the connection instead.
    pub(super) async fn call(&mut self, path: &str, encoding: &str, body: &[u8]) -> Option<bool> {
        if self.stream.is_none() || self.calls >= CALLS_MAX {
            self.stream = connect(self.address).await;
            self.calls = 0;
            self.open().await;
        }
        let id = 2 * self.calls + 1;
        self.calls += 1;
        self.write_call(id, path, encoding, body);
        let stream = self.stream.as_mut()?;
        let call = async {
            stream.write_all(&self.out).await.ok()?;
            end_of(stream, id, &mut self.buffer).await
        };
        let ended = tokio::time::timeout(PATIENCE, call).await.expect("the server does not answer");
        if ended.is_none() {
            self.stream = None;
        }
        ended
    }

    /// Opens the connection, and waits for the server's own settings and its windows.
    async fn open(&mut self) {
        self.out.clear();
        self.out.extend_from_slice(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        // A window of 1 GiB for each response, and for all together.
        put_frame(SETTINGS, 0, 0, &[0, 4, 0x40, 0, 0, 0], &mut self.out);
        put_frame(SETTINGS, ACK, 0, &[], &mut self.out);
        put_frame(WINDOW, 0, 0, &(1u32 << 30).to_be_bytes(), &mut self.out);
        if let Some(stream) = &mut self.stream {
            let _ = stream.write_all(&self.out).await;
            let _ = stream.read(&mut self.buffer).await;
        }
    }

    fn write_call(&mut self, id: u32, path: &str, encoding: &str, body: &[u8]) {
        let GrpcClient { out, fields, .. } = self;
        out.clear();
        fields.clear();
        // The method POST and the scheme http.
        fields.extend_from_slice(&[0x83, 0x86]);
        put_header(4, ":path", path, fields);
        put_header(1, ":authority", "localhost", fields);
        put_header(31, "content-type", "application/grpc", fields);
        put_header(0, "te", "trailers", fields);
        put_header(0, "grpc-encoding", encoding, fields);
        let flags = END_HEADERS | if body.is_empty() { END_STREAM } else { 0 };
        put_frame(HEADERS, flags, id, fields, out);
        let pieces = body.chunks(FRAME_MAX).len();
        for (index, piece) in body.chunks(FRAME_MAX).enumerate() {
            let last = if index + 1 == pieces { END_STREAM } else { 0 };
            put_frame(DATA, last, id, piece, out);
        }
    }
}

/// Reads frames until the call `id` ends, and says whether it had a message; `None` when the
/// connection ends.
async fn end_of(stream: &mut TcpStream, id: u32, buffer: &mut [u8]) -> Option<bool> {
    let (mut start, mut filled) = (0, 0);
    let mut has_message = false;
    loop {
        while let Some((kind, flags, of, payload)) = first_frame(&buffer[start..filled]) {
            start += 9 + payload;
            has_message |= kind == DATA && of == id && payload > 0;
            match kind {
                SETTINGS if flags & ACK == 0 => {
                    stream.write_all(&[0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0]).await.ok()?;
                }
                PING if flags & ACK == 0 => {
                    let mut pong = [0, 0, 8, PING, ACK, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
                    pong[9..].copy_from_slice(buffer.get(start - 8..start)?);
                    stream.write_all(&pong).await.ok()?;
                }
                GO_AWAY => return None,
                RESET if of == id => return Some(false),
                DATA | HEADERS if of == id && flags & END_STREAM != 0 => {
                    return Some(has_message);
                }
                _ => {}
            }
        }
        buffer.copy_within(start..filled, 0);
        (filled, start) = (filled - start, 0);
        match stream.read(&mut buffer[filled..]).await {
            Ok(count) if count > 0 => filled += count,
            _ => return None,
        }
    }
}

/// Kind, flags, stream and length of the payload of the first frame, if it is complete.
fn first_frame(bytes: &[u8]) -> Option<(u8, u8, u32, usize)> {
    let head = bytes.first_chunk::<9>()?;
    let payload = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    let of = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
    (bytes.len() >= 9 + payload).then_some((head[3], head[4], of, payload))
}
