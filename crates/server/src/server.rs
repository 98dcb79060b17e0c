//! The server's life: listeners up, requests answered, then a drain that loses none.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use api::InferenceService;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::buffers::Buffers;
use crate::gate::Gate;
use crate::{grpc, listener, metrics, rest};

/// Where and how a server listens. A port of 0 picks a free one; `None` leaves a wire out.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// REST.
    pub http: Option<SocketAddr>,
    /// gRPC.
    pub grpc: Option<SocketAddr>,
    /// Metrics.
    pub metrics: Option<SocketAddr>,
    /// The most bytes of an inference request, after decompression.
    pub max_body_bytes: usize,
    /// The most bytes of a model to register.
    pub max_model_bytes: usize,
    /// The most connections per wire.
    pub max_connections: usize,
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

/// What every handler sees.
pub(crate) struct App {
    pub(crate) service: Arc<dyn InferenceService>,
    pub(crate) gate: Gate,
    pub(crate) max_body_bytes: usize,
    pub(crate) max_model_bytes: usize,
    pub(crate) buffers: Arc<Buffers>,
}

impl App {
    pub(crate) fn ready(&self) -> bool {
        !self.gate.is_closed() && self.service.ready()
    }
}

/// Starts servers.
pub struct Server;

impl Server {
    /// Listens as `options` say and answers with `service`. Must run inside a tokio runtime.
    pub async fn start(
        options: ServerOptions,
        service: Arc<dyn InferenceService>,
    ) -> Result<RunningServer, ServerError> {
        Server::bind(options).await?.serve(service).await
    }

    /// Takes the addresses in `options`, for a service that is not there yet: who connects waits.
    pub async fn bind(options: ServerOptions) -> Result<BoundServer, ServerError> {
        Ok(BoundServer {
            http: bind(options.http).await?,
            metrics: bind(options.metrics).await?,
            grpc: bind(options.grpc).await?,
            options,
        })
    }
}

/// A server whose addresses are taken and that answers nobody yet.
pub struct BoundServer {
    http: Option<Bound>,
    metrics: Option<Bound>,
    grpc: Option<Bound>,
    options: ServerOptions,
}

impl BoundServer {
    /// Answers with `service`.
    pub async fn serve(
        self,
        service: Arc<dyn InferenceService>,
    ) -> Result<RunningServer, ServerError> {
        let app = Arc::new(App {
            buffers: Arc::new(Buffers::new(service.host_pool())),
            service,
            gate: Gate::default(),
            max_body_bytes: self.options.max_body_bytes,
            max_model_bytes: self.options.max_model_bytes,
        });
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
            let rest = rest::Rest::new(app.clone());
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

/// A server that answers. Dropping it closes the listeners without waiting for anybody.
pub struct RunningServer {
    /// Where REST listens.
    pub http_addr: Option<SocketAddr>,
    /// Where gRPC listens.
    pub grpc_addr: Option<SocketAddr>,
    /// Where metrics are.
    pub metrics_addr: Option<SocketAddr>,
    app: Arc<App>,
    health: Option<grpc::Health>,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl RunningServer {
    /// Inference requests under way.
    pub fn in_flight(&self) -> usize {
        self.app.gate.inside()
    }

    /// Says at once that it is no longer ready, refuses new work, lets running work finish and closes
    /// the listeners. `false` when work was still running after `limit` and was given up.
    pub async fn shutdown(mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        self.app.gate.close();
        if let Some(health) = self.health.take() {
            health.not_serving().await;
        }
        let empty = tokio::time::timeout_at(deadline, self.app.gate.empty()).await.is_ok();
        let left = deadline.saturating_duration_since(Instant::now());
        let drained = self.app.service.drain(left).await;
        let _ = self.stop.send(true);
        // Answers that are ready still have to be written, even when the time is up.
        let written = deadline.max(Instant::now() + Duration::from_millis(500));
        let mut closed = true;
        for mut task in self.tasks {
            if tokio::time::timeout_at(written, &mut task).await.is_err() {
                task.abort();
                closed = false;
            }
        }
        empty && drained && closed
    }
}
