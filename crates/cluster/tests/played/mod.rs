//! Backends that are played by a test: they speak HTTP/2 as backends do, and do what they are told.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use api::{InferResponse, proto};
use bytes::{BufMut, Bytes, BytesMut};
use cluster::record::canary::served_name;
use http::{HeaderMap, HeaderValue, Response};
use prost::Message;
use tokio::net::TcpListener;

/// What a played backend does with requests of the canary; it always serves the stable version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Good,
    /// A status of gRPC.
    Fails(u32),
    /// It breaks the connection.
    Breaks,
    /// It never replies.
    Hangs,
}

pub const INVALID_ARGUMENT: u32 = 3;
pub const INTERNAL: u32 = 13;
pub const UNAVAILABLE: u32 = 14;

pub struct Backend {
    pub address: String,
    pub mood: Mutex<Mood>,
    /// Requests for the canary that it has seen, and those that it answered.
    pub seen: AtomicU64,
    pub answered: AtomicU64,
}

impl Backend {
    pub async fn start() -> Arc<Backend> {
        Backend::start_at("127.0.0.1:0").await
    }

    pub async fn start_at(address: &str) -> Arc<Backend> {
        let listener = TcpListener::bind(address).await.unwrap();
        let backend = Arc::new(Backend {
            address: listener.local_addr().unwrap().to_string(),
            mood: Mutex::new(Mood::Good),
            seen: AtomicU64::new(0),
            answered: AtomicU64::new(0),
        });
        let played = backend.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(played.clone().connection(stream));
            }
        });
        backend
    }

    async fn connection(self: Arc<Backend>, stream: tokio::net::TcpStream) {
        let Ok(mut connection) = h2::server::handshake(stream).await else { return };
        let broken = Arc::new(AtomicBool::new(false));
        while let Some(Ok((request, respond))) = connection.accept().await {
            let (backend, broken) = (self.clone(), broken.clone());
            if broken.load(SeqCst) {
                return;
            }
            tokio::spawn(async move {
                if backend.reply(request, respond).await.is_none() {
                    broken.store(true, SeqCst);
                }
            });
        }
    }

    /// `None` where the connection is to break.
    async fn reply(
        &self,
        request: http::Request<h2::RecvStream>,
        mut respond: h2::server::SendResponse<Bytes>,
    ) -> Option<()> {
        let mut body = request.into_body();
        let mut bytes = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data.ok()?;
            let _ = body.flow_control().release_capacity(data.len());
            bytes.extend_from_slice(&data);
        }
        let message = proto::ModelInferRequest::decode(bytes.get(5..)?).ok()?;
        let is_canary = message.model_name == served_name("m", 2);
        let mood = if is_canary { *self.mood.lock().unwrap() } else { Mood::Good };
        if is_canary {
            self.seen.fetch_add(1, SeqCst);
        }
        let head = |status: u32| {
            let head = Response::builder().header("content-type", "application/grpc");
            match status {
                0 => head.body(()).unwrap(),
                status => head.header("grpc-status", status).body(()).unwrap(),
            }
        };
        match mood {
            Mood::Breaks => {
                respond.send_reset(h2::Reason::INTERNAL_ERROR);
                return None;
            }
            Mood::Fails(status) => {
                respond.send_response(head(status), true).ok()?;
                return Some(());
            }
            Mood::Hangs => std::future::pending().await,
            Mood::Good => {}
        }
        let version: f32 = if is_canary { 2.0 } else { 1.0 };
        let reply = proto::ModelInferResponse {
            model_name: message.model_name,
            model_version: format!("{version}"),
            id: message.id,
            outputs: vec![proto::model_infer_response::InferOutputTensor {
                name: "y".to_string(),
                datatype: "FP32".to_string(),
                shape: vec![1],
                ..Default::default()
            }],
            raw_output_contents: vec![version.to_le_bytes().to_vec().into()],
            ..Default::default()
        };
        let mut framed = BytesMut::new();
        framed.put_u8(0);
        framed.put_u32(reply.encoded_len() as u32);
        reply.encode(&mut framed).ok()?;
        let mut stream = respond.send_response(head(0), false).ok()?;
        stream.send_data(framed.freeze(), false).ok()?;
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        stream.send_trailers(trailers).ok()?;
        if is_canary {
            self.answered.fetch_add(1, SeqCst);
        }
        Some(())
    }
}

pub async fn until<F: Future<Output = bool>>(what: &str, holds: impl Fn() -> F) {
    for _ in 0..4000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what}");
}

/// The version that a reply is from, by its output and by its name, which must agree.
pub fn version_of(reply: &InferResponse) -> u64 {
    assert_eq!((&*reply.model_name, reply.id.as_str()), ("m", "7"));
    let value = reply.outputs[0].tensor.to_vec::<f32>().unwrap()[0];
    assert_eq!(reply.model_version.parse::<f32>().unwrap(), value, "two versions in one reply");
    value as u64
}
