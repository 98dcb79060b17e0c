//! Clients that send prepared bytes and read just enough of the response.
//!
//! They allocate nothing during an exchange, so that the allocations that a run counts or fails
//! are the server's.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A response that takes longer does not come.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Room for a response; a longer one ends the connection.
pub(super) const BUFFER: usize = 8 << 20;

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
pub(super) async fn connect(address: SocketAddr) -> Option<TcpStream> {
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
