//! HTTP/2 as gRPC needs it: one call after another, within the server's windows.
//!
//! Like the other client, it allocates nothing during a call.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{BUFFER, PATIENCE, connect};

/// Calls on one connection before a new one is opened.
const CALLS_MAX: u32 = 64;

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
/// A setting: the window of a new stream.
const STREAM_WINDOW: u16 = 4;
/// The windows before a server says more.
const FIRST_WINDOW: i64 = 65_535;
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

/// One connection: what has been read of it, and what may be sent.
struct Link {
    stream: TcpStream,
    buffer: Vec<u8>,
    start: usize,
    filled: usize,
    /// Bytes that may be sent on the connection.
    window: i64,
    /// Bytes that may be sent on a new stream.
    stream_window: i64,
}

/// What a frame says about the present call.
enum Event {
    /// Nothing that ends it.
    Other,
    /// The server takes this many bytes more of it.
    Window(i64),
    /// It has a message.
    Message,
    /// It ended; whether its last frame had a message.
    End(bool),
    /// The server reset it.
    Reset,
}

impl Link {
    /// Opens the connection, and waits for the server's settings.
    async fn open(address: SocketAddr, buffer: Vec<u8>, out: &mut Vec<u8>) -> Option<Link> {
        let stream = connect(address).await?;
        let (window, stream_window) = (FIRST_WINDOW, FIRST_WINDOW);
        let mut link = Link { stream, buffer, start: 0, filled: 0, window, stream_window };
        out.clear();
        out.extend_from_slice(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        // A window of 1 GiB for each response, and for all together.
        put_frame(SETTINGS, 0, 0, &[0, 4, 0x40, 0, 0, 0], out);
        put_frame(WINDOW, 0, 0, &(1u32 << 30).to_be_bytes(), out);
        link.stream.write_all(out).await.ok()?;
        link.event(0).await?;
        Some(link)
    }

    /// Reads one frame; what concerns the call `id` is returned. `None` when the connection ends.
    async fn event(&mut self, id: u32) -> Option<Event> {
        let (kind, flags, of, length) = loop {
            if let Some(frame) = first_frame(&self.buffer[self.start..self.filled]) {
                break frame;
            }
            self.buffer.copy_within(self.start..self.filled, 0);
            (self.filled, self.start) = (self.filled - self.start, 0);
            match self.stream.read(&mut self.buffer[self.filled..]).await {
                Ok(count) if count > 0 => self.filled += count,
                _ => return None,
            }
        };
        let payload = self.start + 9..self.start + 9 + length;
        self.start = payload.end;
        let payload = &self.buffer[payload];
        let ends = flags & END_STREAM != 0;
        Some(match kind {
            SETTINGS if flags & ACK == 0 => {
                if let Some(size) = stream_window(payload) {
                    self.stream_window = size;
                }
                self.stream.write_all(&[0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0]).await.ok()?;
                Event::Other
            }
            PING if flags & ACK == 0 => {
                let mut pong = [0, 0, 8, PING, ACK, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
                pong[9..].copy_from_slice(payload.first_chunk::<8>()?);
                self.stream.write_all(&pong).await.ok()?;
                Event::Other
            }
            WINDOW if of == 0 => {
                self.window += window_of(payload)?;
                Event::Other
            }
            WINDOW if of == id => Event::Window(window_of(payload)?),
            GO_AWAY => return None,
            RESET if of == id => Event::Reset,
            DATA if of == id && !ends && !payload.is_empty() => Event::Message,
            DATA if of == id && ends => Event::End(!payload.is_empty()),
            HEADERS if of == id && ends => Event::End(false),
            _ => Event::Other,
        })
    }

    /// Sends what `out` holds and then `body` as data of the call `id`, as its windows permit.
    /// Whether the call had a message when it ended; `None` when the connection ends.
    async fn call(&mut self, id: u32, out: &mut Vec<u8>, body: &[u8]) -> Option<bool> {
        let mut has_message = false;
        let mut stream_window = self.stream_window;
        let mut pieces = body.chunks(FRAME_MAX).peekable();
        loop {
            while let Some(piece) = pieces.peek().copied() {
                let size = piece.len();
                if size as i64 > self.window.min(stream_window) {
                    break;
                }
                let flags = if pieces.len() == 1 { END_STREAM } else { 0 };
                put_frame(DATA, flags, id, piece, out);
                self.stream.write_all(out).await.ok()?;
                out.clear();
                self.window -= size as i64;
                stream_window -= size as i64;
                pieces.next();
            }
            if !out.is_empty() {
                self.stream.write_all(out).await.ok()?;
                out.clear();
            }
            match self.event(id).await? {
                Event::Other => {}
                Event::Window(more) => stream_window += more,
                Event::Message => has_message = true,
                Event::End(message) => return Some(has_message || message),
                Event::Reset => return Some(false),
            }
        }
    }
}

/// The initial window of streams that a frame of settings has.
fn stream_window(payload: &[u8]) -> Option<i64> {
    let mut settings = payload.chunks_exact(6);
    let found = settings.rfind(|entry| entry[..2] == STREAM_WINDOW.to_be_bytes())?;
    Some(i64::from(u32::from_be_bytes(*found.last_chunk()?)))
}

fn window_of(payload: &[u8]) -> Option<i64> {
    Some(i64::from(u32::from_be_bytes(*payload.first_chunk()?)))
}

/// Calls one after another.
pub(super) struct GrpcClient {
    address: SocketAddr,
    link: Option<Link>,
    calls: u32,
    /// The buffer of the next connection.
    buffer: Vec<u8>,
    out: Vec<u8>,
    fields: Vec<u8>,
}

impl GrpcClient {
    pub(super) fn new(address: SocketAddr) -> GrpcClient {
        let (out, fields) = (Vec::with_capacity(2 * FRAME_MAX), Vec::with_capacity(1024));
        GrpcClient { address, link: None, calls: 0, buffer: vec![0; BUFFER], out, fields }
    }

    /// Calls `path`. Whether the call was served: a refused one has no message. `None` when the
    /// server closes the connection instead.
    pub(super) async fn call(&mut self, path: &str, encoding: &str, body: &[u8]) -> Option<bool> {
        if self.link.is_none() || self.calls >= CALLS_MAX {
            self.close();
            let buffer = std::mem::take(&mut self.buffer);
            self.link = Link::open(self.address, buffer, &mut self.out).await;
            self.calls = 0;
        }
        let id = 2 * self.calls + 1;
        self.calls += 1;
        self.write_head(id, path, encoding, body.is_empty());
        let call = self.link.as_mut()?.call(id, &mut self.out, body);
        let ended = tokio::time::timeout(PATIENCE, call).await.expect("the server does not answer");
        if ended.is_none() {
            self.close();
        }
        ended
    }

    fn close(&mut self) {
        if let Some(link) = self.link.take() {
            self.buffer = link.buffer;
        }
        // Where opening a connection failed.
        self.buffer.resize(BUFFER, 0);
    }

    fn write_head(&mut self, id: u32, path: &str, encoding: &str, ends: bool) {
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
        let flags = END_HEADERS | if ends { END_STREAM } else { 0 };
        put_frame(HEADERS, flags, id, fields, out);
    }
}

/// Kind, flags, stream and length of the payload of the first frame, if it is complete.
fn first_frame(bytes: &[u8]) -> Option<(u8, u8, u32, usize)> {
    let head = bytes.first_chunk::<9>()?;
    let payload = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    let of = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
    (bytes.len() >= 9 + payload).then_some((head[3], head[4], of, payload))
}
