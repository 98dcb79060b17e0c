//! Lifecycle of the server: bind, serve, drain without losing requests.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use api::error::ApiResult;
use api::{ApiError, ErrorKind, InferenceService};
use model::{HostMemory, Reservation};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::body_buffers::BodyBuffers;
use crate::request_tracker::RequestTracker;
use crate::{grpc, listener, metrics, rest};

/// A decoded request may take this many times the maximum size of its body: arrays of short numbers
/// take 13 times their JSON.
const MAX_DECODED: usize = 16;

/// Where and how a server listens. A port of 0 picks a free one; `None` disables a protocol.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// REST.
    pub http: Option<SocketAddr>,
    /// gRPC.
    pub grpc: Option<SocketAddr>,
    /// Metrics.
    pub metrics: Option<SocketAddr>,
    /// Maximum size of an inference request after decompression.
    pub max_body_bytes: usize,
    /// Maximum size of a model to register.
    pub max_model_bytes: usize,
    /// Maximum number of connections per protocol.
    pub max_connections: usize,
    /// The budget of bodies, decoded requests and encoded responses.
    pub memory: &'static HostMemory,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let address = |port| Some(SocketAddr::from(([127, 0, 0, 1], port)));
        ServerOptions {
            http: address(8000),
            grpc: address(8001),
            metrics: address(8002),
            max_body_bytes: 64 << 20,
            max_model_bytes: 2 << 30,
            max_connections: 10_000,
            memory: HostMemory::process(),
        }
    }
}

/// Why a server did not start.
#[derive(Debug, Error)]
pub enum ServerError {
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The gRPC descriptors are broken.
    #[error("cannot start gRPC: {0}")]
    Grpc(String),
}

/// State shared by all handlers.
pub(crate) struct AppState {
    pub(crate) service: Arc<dyn InferenceService>,
    pub(crate) requests: RequestTracker,
    pub(crate) max_model_bytes: usize,
    pub(crate) bodies: BodyLimits,
}

/// Where request bodies are read to, and how much memory they may take.
pub(crate) struct BodyLimits {
    /// Maximum size of a body after decompression.
    pub(crate) max_bytes: usize,
    pub(crate) buffers: Arc<BodyBuffers>,
    pub(crate) memory: &'static HostMemory,
}

impl BodyLimits {
    /// Reserves the memory that decoding takes, which is at most `bytes`.
    pub(crate) fn reserve_decoding(&self, bytes: usize, memory: &mut Reservation) -> ApiResult<()> {
        let limit = self.max_bytes.saturating_mul(MAX_DECODED);
        if bytes > limit {
            return Err(ApiError::new(
                ErrorKind::TooLarge,
                format!("the request takes {bytes} bytes when decoded, the limit is {limit}"),
            ));
        }
        Ok(memory.grow(bytes)?)
    }
}

impl AppState {
    pub(crate) fn ready(&self) -> bool {
        !self.requests.is_closed() && self.service.ready()
    }
}

/// Starts servers.
pub struct Server;

impl Server {
    /// Binds and serves `service`. Must run inside a tokio runtime.
    pub async fn start(
        options: ServerOptions,
        service: Arc<dyn InferenceService>,
    ) -> Result<RunningServer, ServerError> {
        Server::bind(options).await?.serve(service).await
    }

    /// Binds the addresses of `options` before the service exists: connections wait.
    pub async fn bind(options: ServerOptions) -> Result<BoundServer, ServerError> {
        Ok(BoundServer {
            http: bind(options.http).await?,
            metrics: bind(options.metrics).await?,
            grpc: bind(options.grpc).await?,
            options,
        })
    }
}

/// A server that is bound and does not accept connections yet.
pub struct BoundServer {
    http: Option<Bound>,
    metrics: Option<Bound>,
    grpc: Option<Bound>,
    options: ServerOptions,
}

impl BoundServer {
    /// Serves `service`.
    pub async fn serve(
        self,
        service: Arc<dyn InferenceService>,
    ) -> Result<RunningServer, ServerError> {
        let app = Arc::new(AppState {
            bodies: BodyLimits {
                max_bytes: self.options.max_body_bytes,
                buffers: Arc::new(BodyBuffers::new(service.host_pool())),
                memory: self.options.memory,
            },
            service,
            requests: RequestTracker::default(),
            max_model_bytes: self.options.max_model_bytes,
        });
        let cache: Weak<BodyBuffers> = Arc::downgrade(&app.bodies.buffers);
        app.bodies.memory.add_cache(cache);
        let (stop, stopped) = watch::channel(false);
        let mut server = RunningServer {
            http_addr: None,
            grpc_addr: None,
            metrics_addr: None,
            app: app.clone(),
            health: None,
            stop,
            tasks: Vec::new(),
        };
        let connections = self.options.max_connections;
        if let Some((listener, address)) = self.http {
            server.http_addr = Some(address);
            let rest = rest::RestHandler::new(app.clone());
            let task = listener::serve(listener, rest, connections, stopped.clone());
            server.tasks.push(tokio::spawn(task));
        }
        if let Some((listener, address)) = self.metrics {
            server.metrics_addr = Some(address);
            let router = metrics::router(app.clone());
            let task = listener::serve(listener, router, connections, stopped.clone());
            server.tasks.push(tokio::spawn(task));
        }
        if let Some((listener, address)) = self.grpc {
            server.grpc_addr = Some(address);
            let (health, task) = grpc::serve(listener, app, stopped).await?;
            server.health = Some(health);
            server.tasks.push(tokio::spawn(task));
        }
        Ok(server)
    }
}

type Bound = (TcpListener, SocketAddr);

async fn bind(address: Option<SocketAddr>) -> Result<Option<Bound>, ServerError> {
    let Some(address) = address else { return Ok(None) };
    let failed = |source| ServerError::Bind { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Some((listener, address)))
}

/// A running server. Dropping it closes the listeners without waiting for requests.
pub struct RunningServer {
    /// Where REST listens.
    pub http_addr: Option<SocketAddr>,
    /// Where gRPC listens.
    pub grpc_addr: Option<SocketAddr>,
    /// Where metrics listen.
    pub metrics_addr: Option<SocketAddr>,
    app: Arc<AppState>,
    health: Option<grpc::GrpcHealth>,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl RunningServer {
    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.app.requests.in_flight()
    }

    /// Reports not ready, refuses new requests, waits for requests in flight and closes the
    /// listeners. `false` if requests were still running after `limit` and were dropped.
    pub async fn shutdown(mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        self.app.requests.close();
        if let Some(health) = self.health.take() {
            health.not_serving().await;
        }
        let idle = tokio::time::timeout_at(deadline, self.app.requests.wait_idle()).await.is_ok();
        let remaining = deadline.saturating_duration_since(Instant::now());
        let drained = self.app.service.drain(remaining).await;
        let _ = self.stop.send(true);
        // Finished responses still have to be written, even after the deadline.
        let written = deadline.max(Instant::now() + Duration::from_millis(500));
        let mut closed = true;
        for mut task in self.tasks {
            if tokio::time::timeout_at(written, &mut task).await.is_err() {
                task.abort();
                closed = false;
            }
        }
        idle && drained && closed
    }
}
