//! A client of the server's REST interface: one connection, one request at a time.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use model::{LaunchPlan, Tensor};
use serde_json::{Value, json};

/// The largest reply that is read.
const MAX_REPLY_BYTES: usize = 1 << 30;

/// How long a reply may take.
const REPLY_LIMIT: Duration = Duration::from_secs(120);

/// A reply.
pub(crate) struct HttpReply {
    pub(crate) status: u16,
    /// It says when to try again.
    pub(crate) retry_after: bool,
    /// Length of the JSON before binary tensors.
    header_bytes: Option<usize>,
    pub(crate) body: Vec<u8>,
    /// No request may follow on its connection.
    closes: bool,
}

impl HttpReply {
    /// The JSON, and the bytes behind it.
    pub(crate) fn parts(&self) -> Option<(Value, &[u8])> {
        let at = self.header_bytes.unwrap_or(self.body.len());
        let (head, data) = self.body.split_at_checked(at)?;
        Some((serde_json::from_slice(head).ok()?, data))
    }

    /// The beginning of the body, for messages.
    pub(crate) fn text(&self) -> String {
        let shown = &self.body[..self.body.len().min(200)];
        format!("{} {}", self.status, String::from_utf8_lossy(shown))
    }
}

/// A connection.
pub(crate) struct Connection {
    address: SocketAddr,
    stream: Option<BufReader<TcpStream>>,
}

impl Connection {
    pub(crate) fn new(address: SocketAddr) -> Connection {
        Connection { address, stream: None }
    }

    fn stream(&mut self) -> Result<&mut BufReader<TcpStream>, String> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(self.address).map_err(|err| err.to_string())?;
            stream.set_nodelay(true).map_err(|err| err.to_string())?;
            stream.set_read_timeout(Some(REPLY_LIMIT)).map_err(|err| err.to_string())?;
            self.stream = Some(BufReader::new(stream));
        }
        self.stream.as_mut().ok_or_else(|| "no connection".to_string())
    }

    /// Closes the connection, whatever is outstanding on it.
    pub(crate) fn close(&mut self) {
        self.stream = None;
    }

    /// Sends a request.
    pub(crate) fn send(&mut self, message: &[u8]) -> Result<(), String> {
        let sent = self.stream()?.get_mut().write_all(message).map_err(|err| err.to_string());
        if sent.is_err() {
            self.close();
        }
        sent
    }

    /// The reply to the request that was sent.
    pub(crate) fn receive(&mut self) -> Result<HttpReply, String> {
        let reply = read_reply(self.stream()?);
        if reply.as_ref().map_or(true, |reply| reply.closes) {
            self.close();
        }
        reply
    }

    /// Sends a request and waits for its reply.
    pub(crate) fn exchange(&mut self, message: &[u8]) -> Result<HttpReply, String> {
        self.send(message)?;
        self.receive()
    }
}

fn read_reply(stream: &mut impl BufRead) -> Result<HttpReply, String> {
    let failed = |err: std::io::Error| err.to_string();
    let mut line = String::new();
    stream.read_line(&mut line).map_err(failed)?;
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.ok_or_else(|| format!("no status in '{}'", line.trim()))?;
    let (mut length, mut header_bytes) = (0, None);
    let (mut retry_after, mut closes) = (false, false);
    loop {
        line.clear();
        stream.read_line(&mut line).map_err(failed)?;
        let Some((name, value)) = line.trim().split_once(':') else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().map_err(|_| "a bad length")?,
            "inference-header-content-length" => header_bytes = value.trim().parse().ok(),
            "retry-after" => retry_after = true,
            "connection" => closes = value.trim().eq_ignore_ascii_case("close"),
            _ => {}
        }
    }
    if length > MAX_REPLY_BYTES {
        return Err(format!("a reply of {length} bytes"));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).map_err(failed)?;
    Ok(HttpReply { status, retry_after, closes, header_bytes, body })
}

/// A request without a body.
pub(crate) fn plain(method: &str, path: &str) -> Vec<u8> {
    format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n").into_bytes()
}

/// The inference request of these inputs, with binary tensors.
pub(crate) fn inference(
    model: &str,
    plan: &LaunchPlan,
    inputs: &[Tensor],
    class: &str,
) -> Result<Vec<u8>, String> {
    let (mut described, mut data) = (Vec::new(), Vec::new());
    for (id, tensor) in plan.inputs.iter().zip(inputs) {
        let raw = tensor.raw().ok_or("models with string tensors are not supported here")?;
        described.push(json!({
            "name": plan.value(*id).name,
            "shape": tensor.shape(),
            "datatype": tensor.dtype().wire_name(),
            "parameters": { "binary_data_size": raw.len() },
        }));
        data.extend_from_slice(raw);
    }
    let parameters = json!({ "atoll_class": class, "binary_data_output": true });
    let head = json!({ "inputs": described, "parameters": parameters }).to_string();
    let mut message = format!(
        "POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n\
         Inference-Header-Content-Length: {}\r\nContent-Length: {}\r\n\r\n",
        head.len(),
        head.len() + data.len()
    )
    .into_bytes();
    message.extend_from_slice(head.as_bytes());
    message.extend_from_slice(&data);
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_to_their_end_and_no_further() {
        let two = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 2\r\ncontent-length: 5\r\n\
            \r\n{}abcHTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
        let mut stream = BufReader::new(&two[..]);
        let first = read_reply(&mut stream).expect("a reply");
        assert_eq!(first.parts(), Some((json!({}), &b"abc"[..])));
        assert_eq!(read_reply(&mut stream).expect("a reply").status, 404);
        assert!(read_reply(&mut stream).is_err(), "nothing more");
        let cut = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc";
        assert!(read_reply(&mut BufReader::new(&cut[..])).is_err());
    }
}
