//! The connections to a backend, kept for as long as routes name it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use api::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use base::Nanos;
use http::Uri;

use super::http2::Http2Connection;
use crate::tls::ClientTls;

/// How long a backend that failed is avoided.
const PAUSE: Nanos = Nanos::from_millis(500);
/// Connections to one backend; each carries many requests.
const CONNECTIONS: usize = 2;

/// A backend.
pub struct BackendLink {
    /// Address of its gRPC server.
    pub address: String,
    origin: Uri,
    connections: Vec<Http2Connection>,
    next: AtomicUsize,
    down_until: AtomicU64,
    /// Requests in flight, over all models.
    pub outstanding: AtomicUsize,
}

impl BackendLink {
    fn new(address: &str, tls: Option<&ClientTls>) -> Result<BackendLink, String> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let origin: Uri = format!("{scheme}://{address}")
            .parse()
            .map_err(|error| format!("backend address '{address}': {error}"))?;
        Ok(BackendLink {
            address: address.to_string(),
            origin,
            connections: (0..CONNECTIONS)
                .map(|_| Http2Connection::new(address, tls.cloned()))
                .collect(),
            next: AtomicUsize::new(0),
            down_until: AtomicU64::new(0),
            outstanding: AtomicUsize::new(0),
        })
    }

    /// A client over one of its connections.
    pub fn client(&self) -> GrpcInferenceServiceClient<Http2Connection> {
        let next = self.next.fetch_add(1, Relaxed) % self.connections.len();
        GrpcInferenceServiceClient::with_origin(self.connections[next].clone(), self.origin.clone())
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX)
    }

    /// Whether it failed a moment ago.
    pub fn is_down(&self, now: Nanos) -> bool {
        now.0 < self.down_until.load(Relaxed)
    }

    /// Records a failure.
    pub fn fail(&self, now: Nanos) {
        self.down_until.store((now + PAUSE).0, Relaxed);
    }

    /// Records a reply.
    pub fn recover(&self) {
        if self.down_until.load(Relaxed) != 0 {
            self.down_until.store(0, Relaxed);
        }
    }
}

/// Backends by address.
#[derive(Default)]
pub struct BackendLinks {
    tls: Option<ClientTls>,
    links: Mutex<HashMap<String, Arc<BackendLink>>>,
}

impl BackendLinks {
    /// No backends yet; connections will use `tls`.
    pub fn new(tls: Option<ClientTls>) -> BackendLinks {
        BackendLinks { tls, links: Mutex::default() }
    }

    /// The backend at `address`; connections are opened on demand.
    pub fn get(&self, address: &str) -> Result<Arc<BackendLink>, String> {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = links.get(address) {
            return Ok(link.clone());
        }
        let link = Arc::new(BackendLink::new(address, self.tls.as_ref())?);
        links.insert(address.to_string(), link.clone());
        Ok(link)
    }

    /// Drops backends that no route names.
    pub fn prune(&self) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.retain(|_, link| Arc::strong_count(link) > 1);
    }
}
