//! The connections to a backend, kept for as long as routes name it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use api::proto::grpc_inference_service_client::GrpcInferenceServiceClient;
use base::Nanos;
use http::Uri;
use model::HostMemory;

use super::http2::Http2Connection;
use super::live_counts::LiveCounts;
use crate::balance::backend_health::{Availability, BackendHealth};
use crate::tls::ClientTls;

/// Connections to one backend; each carries many requests.
const CONNECTIONS: usize = 2;

/// A backend.
pub struct BackendLink {
    /// Address of its gRPC server.
    pub address: String,
    origin: Uri,
    connections: Vec<Http2Connection>,
    next: AtomicUsize,
    health: Mutex<BackendHealth>,
    /// Whether it serves with its whole share: then its health need not be read to route.
    steady: AtomicBool,
    /// Requests in flight, over all models.
    pub outstanding: AtomicUsize,
    /// Requests that were sent to it, for viewers.
    pub live: LiveCounts,
}

impl BackendLink {
    fn new(
        address: &str,
        tls: Option<&ClientTls>,
        memory: &'static HostMemory,
        now: Nanos,
    ) -> Result<BackendLink, String> {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let origin: Uri = format!("{scheme}://{address}")
            .parse()
            .map_err(|error| format!("backend address '{address}': {error}"))?;
        Ok(BackendLink {
            address: address.to_string(),
            origin,
            connections: (0..CONNECTIONS)
                .map(|_| Http2Connection::new(address, tls.cloned(), memory))
                .collect(),
            next: AtomicUsize::new(0),
            health: Mutex::new(BackendHealth::new(now)),
            steady: AtomicBool::new(false),
            outstanding: AtomicUsize::new(0),
            live: LiveCounts::default(),
        })
    }

    /// A client over one of its connections.
    pub fn client(&self) -> GrpcInferenceServiceClient<Http2Connection> {
        let next = self.next.fetch_add(1, Relaxed) % self.connections.len();
        GrpcInferenceServiceClient::with_origin(self.connections[next].clone(), self.origin.clone())
            // The connection reserves what a message claims before it is read.
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX)
    }

    /// Its health, to read.
    pub fn health(&self) -> BackendHealth {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether it serves, and the share of its weight that counts.
    pub fn service(&self, now: Nanos) -> (Availability, f64) {
        if self.steady.load(Relaxed) {
            return (Availability::Serving, 1.0);
        }
        let health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        let (availability, share) = (health.availability(now), health.share(now));
        // Under the lock, so that an ejection is not overwritten.
        self.steady.store(availability == Availability::Serving && share >= 1.0, Relaxed);
        (availability, share)
    }

    /// Changes its health, and logs what follows from it.
    pub fn judge<T>(&self, now: Nanos, change: impl FnOnce(&mut BackendHealth) -> T) -> T {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        let before = (health.ejections(), health.availability(now));
        let result = change(&mut health);
        let after = (health.ejections(), health.availability(now));
        if before == after {
            return result;
        }
        self.steady.store(false, Relaxed);
        let level = health.level();
        drop(health);
        let address = self.address.as_str();
        if before.0 != after.0 {
            tracing::warn!(backend = address, level, "backend ejected");
        } else if after.1 == Availability::Serving {
            tracing::info!(backend = address, level, "backend returned");
        }
        result
    }
}

/// Backends by address.
#[derive(Default)]
pub struct BackendLinks {
    tls: Option<ClientTls>,
    memory: &'static HostMemory,
    links: Mutex<HashMap<String, Arc<BackendLink>>>,
}

impl BackendLinks {
    /// No backends yet; connections will use `tls`, and `memory` is the budget of their replies.
    pub fn new(tls: Option<ClientTls>, memory: &'static HostMemory) -> BackendLinks {
        BackendLinks { tls, memory, links: Mutex::default() }
    }

    /// The backend at `address`, which is new at `now` if it is not known; connections are opened
    /// on demand.
    pub fn get(&self, address: &str, now: Nanos) -> Result<Arc<BackendLink>, String> {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = links.get(address) {
            return Ok(link.clone());
        }
        let link = Arc::new(BackendLink::new(address, self.tls.as_ref(), self.memory, now)?);
        links.insert(address.to_string(), link.clone());
        Ok(link)
    }

    /// All backends.
    pub fn all(&self) -> Vec<Arc<BackendLink>> {
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.values().cloned().collect()
    }

    /// Drops backends that no route names.
    pub fn prune(&self) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.retain(|_, link| Arc::strong_count(link) > 1);
    }
}
