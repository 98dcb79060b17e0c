//! A minimal HTTP client that exposes every byte of a response.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A response.
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    /// The header `name`, in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {}", self.text()))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The message of an error, after checking the status.
    pub fn error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"));
        self.json()["error"].as_str().expect("an error message").to_string()
    }
}

/// A persistent connection.
pub struct Client {
    stream: TcpStream,
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Client { stream }
    }

    /// The connection, which has to be read to the end of a reply.
    pub fn into_std(self) -> std::net::TcpStream {
        self.stream.into_std().unwrap()
    }

    pub async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
        if !headers.iter().any(|(name, _)| *name == "content-length") {
            head += &format!("content-length: {}\r\n", body.len());
        }
        headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
        head += "\r\n";
        self.stream.write_all(&[head.as_bytes(), body].concat()).await.unwrap();
    }

    pub async fn receive(&mut self) -> Reply {
        let mut data = Vec::new();
        let end = loop {
            if let Some(at) = data.windows(4).position(|window| window == b"\r\n\r\n") {
                break at;
            }
            assert!(self.stream.read_buf(&mut data).await.unwrap() > 0, "closed early");
        };
        let head = String::from_utf8(data[..end].to_vec()).unwrap();
        let mut lines = head.lines();
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let pair = |line: &str| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_lowercase(), value.trim().to_string())
        };
        let mut reply =
            Reply { status, headers: lines.map(pair).collect(), body: data[end + 4..].to_vec() };
        let length = reply.header("content-length").map_or(0, |text| text.parse().unwrap());
        while reply.body.len() < length {
            assert!(self.stream.read_buf(&mut reply.body).await.unwrap() > 0, "closed early");
        }
        reply
    }

    pub async fn call(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Reply {
        self.send(method, path, headers, body).await;
        self.receive().await
    }

    pub async fn get(&mut self, path: &str) -> Reply {
        self.call("GET", path, &[], b"").await
    }

    pub async fn post(&mut self, path: &str, body: &str) -> Reply {
        self.call("POST", path, &[], body.as_bytes()).await
    }
}
