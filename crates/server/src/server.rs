//! Lifecycle of the server: bind, serve, drain without losing requests.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use api::error::ApiResult;
use api::{ApiError, ErrorKind, InferenceService};
use model::{HostMemory, Reservation};
use serde_json::Value;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::admin::{AdminHandler, AdminRuntime};
use crate::auth::{Access, AccessOptions};
use crate::body_buffers::BodyBuffers;
use crate::connection::{ConnectionLimits, ConnectionTable, DrainDeadline, Windows};
use crate::listener::{Listener, Respond, Stop};
use crate::request_tracker::RequestTracker;
use crate::rest::Viewers;
use crate::telemetry::{Telemetry, TelemetryOptions};
use crate::tls::{Tls, TlsOptions, TlsUse};
use crate::{admin, descriptors, grpc, rest};

/// How often files of credentials and certificates are checked for changes.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);
/// How often the health service asks whether the server is ready.
const READINESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long a server that stops waits for request bodies that are still arriving; at most half of
/// the time it has.
const BODY_DRAIN_TIME: Duration = Duration::from_secs(10);

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
    /// Metrics, health and the routes that manage models: the admin port.
    pub metrics: Option<SocketAddr>,
    /// Maximum size of an inference request after decompression.
    pub max_body_bytes: usize,
    /// Maximum size of a model to register.
    pub max_model_bytes: usize,
    /// The budget of bodies, decoded requests and encoded responses.
    pub memory: &'static HostMemory,
    /// Limits on connections, for each of REST and gRPC.
    pub connections: ConnectionLimits,
    /// Who may do what.
    pub access: AccessOptions,
    /// TLS, for all addresses.
    pub tls: Option<TlsOptions>,
    /// Listen on addresses other than loopback without TLS.
    pub insecure: bool,
    /// Maximum time of one execution, whatever its deadline.
    pub max_execution: Option<Duration>,
    /// After the signal to stop, how long the server still serves while it is not ready and tells
    /// its clients to go away.
    pub lame_duck: Duration,
    /// Plans GPUs, for the console.
    pub planner: Option<PlanFn>,
    /// Where spans of requests are sent.
    pub telemetry: Option<TelemetryOptions>,
    /// Sockets that listen already, which another process has bound: used instead of the addresses.
    pub inherited: InheritedSockets,
}

/// Sockets that another process has bound.
#[derive(Clone, Debug, Default)]
pub struct InheritedSockets {
    /// REST.
    pub http: Option<Arc<std::net::TcpListener>>,
    /// gRPC.
    pub grpc: Option<Arc<std::net::TcpListener>>,
    /// Metrics and management.
    pub metrics: Option<Arc<std::net::TcpListener>>,
}

/// Plans GPUs: takes and returns what `POST /v2/atoll/plan` does. It may take seconds.
#[derive(Clone)]
pub struct PlanFn(pub Arc<dyn Fn(Value) -> ApiResult<Value> + Send + Sync>);

impl std::fmt::Debug for PlanFn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PlanFn")
    }
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
            memory: HostMemory::process(),
            connections: ConnectionLimits::default(),
            access: AccessOptions::default(),
            tls: None,
            insecure: false,
            max_execution: Some(Duration::from_secs(300)),
            lame_duck: Duration::ZERO,
            planner: None,
            telemetry: None,
            inherited: InheritedSockets::default(),
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
    /// Other machines could reach the address, and nothing would protect what they send.
    #[error(
        "{address} can be reached from other machines: use --tls-cert and --tls-key, or --insecure \
         where the network is trusted"
    )]
    Insecure {
        /// The address.
        address: SocketAddr,
    },
    /// A file of credentials or certificates cannot be used.
    #[error("{0}")]
    Credentials(String),
    /// Spans cannot be sent.
    #[error("{0}")]
    Telemetry(String),
    /// The thread of the admin port does not start.
    #[error("cannot start the admin port: {0}")]
    Admin(std::io::Error),
    /// The gRPC descriptors are broken.
    #[error("cannot start gRPC: {0}")]
    Grpc(String),
}

/// How far a server has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StopPhase {
    /// It has not.
    Serving,
    /// It is not ready and tells clients to go away, but still serves them.
    LameDuck,
    /// It refuses new requests and ends streams.
    Draining,
}

/// State shared by all handlers.
pub(crate) struct AppState {
    pub(crate) service: Arc<dyn InferenceService>,
    pub(crate) requests: RequestTracker,
    pub(crate) max_model_bytes: usize,
    pub(crate) bodies: BodyLimits,
    pub(crate) windows: Arc<Windows>,
    pub(crate) access: Arc<Access>,
    pub(crate) drain: DrainDeadline,
    pub(crate) tables: Vec<Arc<ConnectionTable>>,
    pub(crate) viewers: Viewers,
    pub(crate) planner: Option<PlanFn>,
    pub(crate) phase: watch::Sender<StopPhase>,
    /// Whether connections are accepted; not when another process has the sockets.
    pub(crate) accepting: watch::Sender<bool>,
    pub(crate) telemetry: Option<Telemetry>,
    max_execution: Option<Duration>,
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
        *self.phase.borrow() == StopPhase::Serving && self.service.ready()
    }

    /// Returns when streams have to end because the server stops.
    pub(crate) async fn draining(&self) {
        // The sender lives as long as this state does.
        let _ = self.phase.subscribe().wait_for(|phase| *phase == StopPhase::Draining).await;
    }

    /// Runs `work` for at most the maximum time of an execution; giving it up cancels it.
    pub(crate) async fn limited<T>(
        &self,
        work: impl Future<Output = ApiResult<T>>,
    ) -> ApiResult<T> {
        let Some(limit) = self.max_execution else { return work.await };
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
            Err(ApiError::new(
                ErrorKind::DeadlineExceeded,
                format!("the execution exceeds the server's limit of {} s", limit.as_secs_f64()),
            ))
        })
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
        let addresses = [options.http, options.grpc, options.metrics];
        for address in addresses.into_iter().flatten() {
            let local = address.ip().to_canonical().is_loopback();
            if !local && options.tls.is_none() && !options.insecure {
                return Err(ServerError::Insecure { address });
            }
        }
        let tls = options.tls.clone().map(Tls::open).transpose();
        let inherited = &options.inherited;
        let bound = [
            bind(options.http, inherited.http.as_deref()).await?,
            bind(options.grpc, inherited.grpc.as_deref()).await?,
            bind(options.metrics, inherited.metrics.as_deref()).await?,
        ];
        let addresses: Vec<SocketAddr> = bound.iter().flatten().map(|bound| bound.1).collect();
        let certificates = options.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
        let access = Access::open(&options.access, &addresses, certificates);
        let [http, grpc, metrics] = bound;
        Ok(BoundServer {
            http,
            metrics,
            grpc,
            access: access.map_err(ServerError::Credentials)?,
            tls: tls.map_err(ServerError::Credentials)?,
            options,
        })
    }
}

/// A server that is bound and does not accept connections yet.
pub struct BoundServer {
    http: Option<Bound>,
    metrics: Option<Bound>,
    grpc: Option<Bound>,
    access: Arc<Access>,
    tls: Option<Arc<Tls>>,
    options: ServerOptions,
}

/// The limits of each of REST and gRPC: as configured, within the descriptors there are.
fn connection_limits(options: &ServerOptions) -> ConnectionLimits {
    let wanted = &options.connections;
    let descriptors = descriptors::raise();
    let max_connections = wanted.max_connections.min(descriptors::share(descriptors, 2));
    if max_connections < wanted.max_connections {
        tracing::warn!(
            wanted = wanted.max_connections,
            max_connections,
            descriptors,
            "fewer connections than configured: raise the limit on open files (ulimit -n)"
        );
    }
    let max_per_address = wanted.max_per_address.min(max_connections);
    ConnectionLimits { max_connections, max_per_address, ..wanted.clone() }
}

impl BoundServer {
    /// Serves `service`.
    pub async fn serve(
        self,
        service: Arc<dyn InferenceService>,
    ) -> Result<RunningServer, ServerError> {
        let limits = connection_limits(&self.options);
        let telemetry = self.options.telemetry.clone().map(Telemetry::start).transpose();
        let telemetry = telemetry.map_err(ServerError::Telemetry)?;
        if let Some(telemetry) = &telemetry {
            service.record_spans(telemetry.sink());
        }
        let [http, grpc, admin] = [
            ConnectionTable::new("rest", limits.clone()),
            ConnectionTable::new("grpc", limits.clone()),
            ConnectionTable::new("admin", admin::limits(&limits)),
        ];
        let app = Arc::new(AppState {
            bodies: BodyLimits {
                max_bytes: self.options.max_body_bytes,
                buffers: Arc::new(BodyBuffers::new(service.host_pool())),
                memory: self.options.memory,
            },
            windows: Arc::default(),
            service,
            requests: RequestTracker::default(),
            max_model_bytes: self.options.max_model_bytes,
            access: self.access.clone(),
            drain: DrainDeadline::default(),
            tables: vec![http.clone(), grpc.clone(), admin.clone()],
            viewers: Viewers::default(),
            planner: self.options.planner.clone(),
            phase: watch::Sender::new(StopPhase::Serving),
            accepting: watch::Sender::new(true),
            telemetry,
            max_execution: self.options.max_execution,
        });
        let cache: Weak<BodyBuffers> = Arc::downgrade(&app.bodies.buffers);
        app.bodies.memory.add_cache(cache);
        let (stop, stopped) = watch::channel(None);
        let reload = tokio::spawn(reload(self.access.clone(), self.tls.clone()));
        let sockets = InheritedSockets {
            http: duplicate(&self.http),
            grpc: duplicate(&self.grpc),
            metrics: duplicate(&self.metrics),
        };
        let mut server = RunningServer {
            sockets,
            http_addr: self.http.as_ref().map(|bound| bound.1),
            grpc_addr: self.grpc.as_ref().map(|bound| bound.1),
            metrics_addr: self.metrics.as_ref().map(|bound| bound.1),
            app: app.clone(),
            health: None,
            stop,
            tasks: Vec::new(),
            reload,
            lame_duck: self.options.lame_duck,
            admin: None,
        };
        let tls = |usage| self.tls.clone().map(|tls| (tls, usage));
        if let Some((socket, _)) = self.http {
            let responder = rest::RestHandler::new(app.clone());
            server.spawn(
                Listener { socket, responder, table: http, tls: tls(TlsUse::Rest) },
                &stopped,
            );
        }
        if let Some((socket, _)) = self.grpc {
            let responder = grpc::handler(app.clone()).await?;
            let health = responder.health.clone();
            server.health = Some(tokio::spawn(follow_readiness(health, app.clone())));
            server.spawn(
                Listener { socket, responder, table: grpc, tls: tls(TlsUse::Grpc) },
                &stopped,
            );
        }
        if let Some((socket, _)) = self.metrics {
            let responder = AdminHandler::new(app, tokio::runtime::Handle::current());
            let tls = tls(TlsUse::Admin);
            server.serve_admin(socket, responder, admin, tls, stopped)?;
        }
        Ok(server)
    }
}

/// Tells clients that watch the health service when readiness changes, until the server stops.
async fn follow_readiness(health: Arc<grpc::GrpcHealth>, app: Arc<AppState>) {
    let mut phases = app.phase.subscribe();
    loop {
        health.update().await;
        if *phases.borrow_and_update() != StopPhase::Serving {
            return;
        }
        tokio::select! {
            _ = phases.changed() => {}
            () = tokio::time::sleep(READINESS_INTERVAL) => {}
        }
    }
}

/// Reads files of credentials and certificates again when they change.
async fn reload(access: Arc<Access>, tls: Option<Arc<Tls>>) {
    loop {
        tokio::time::sleep(RELOAD_INTERVAL).await;
        let (access, tls) = (access.clone(), tls.clone());
        let work = move || {
            access.reload();
            match tls.as_ref().and_then(|tls| tls.reload()) {
                None => {}
                Some(Ok(())) => {
                    access.audit.reloaded("certificates");
                    tracing::info!("certificates read again");
                }
                Some(Err(why)) => {
                    tracing::error!("{why}; the previous certificates stay in use");
                }
            }
        };
        let _ = tokio::task::spawn_blocking(work).await;
    }
}

type Bound = (TcpListener, SocketAddr);

async fn bind(
    address: Option<SocketAddr>,
    inherited: Option<&std::net::TcpListener>,
) -> Result<Option<Bound>, ServerError> {
    let Some(address) = address else { return Ok(None) };
    let failed = |source| ServerError::Bind { address, source };
    let listener = match inherited {
        Some(socket) => {
            let socket = socket.try_clone().map_err(failed)?;
            socket.set_nonblocking(true).map_err(failed)?;
            TcpListener::from_std(socket).map_err(failed)?
        }
        None => TcpListener::bind(address).await.map_err(failed)?,
    };
    let address = listener.local_addr().map_err(failed)?;
    Ok(Some((listener, address)))
}

/// Another handle of a listening socket.
fn duplicate(bound: &Option<Bound>) -> Option<Arc<std::net::TcpListener>> {
    let (listener, address) = bound.as_ref()?;
    match listener.as_fd().try_clone_to_owned() {
        Ok(socket) => Some(Arc::new(socket.into())),
        Err(err) => {
            tracing::warn!(%address, %err, "this socket cannot be handed on");
            None
        }
    }
}

/// A running server. Dropping it closes the listeners without waiting for requests.
pub struct RunningServer {
    /// Where REST listens.
    pub http_addr: Option<SocketAddr>,
    /// Where gRPC listens.
    pub grpc_addr: Option<SocketAddr>,
    /// Where metrics listen.
    pub metrics_addr: Option<SocketAddr>,
    /// Handles of the listening sockets, for another process.
    sockets: InheritedSockets,
    app: Arc<AppState>,
    /// Follows readiness until the server stops.
    health: Option<JoinHandle<()>>,
    stop: watch::Sender<Option<Instant>>,
    tasks: Vec<JoinHandle<()>>,
    reload: JoinHandle<()>,
    lame_duck: Duration,
    admin: Option<AdminRuntime>,
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.reload.abort();
        if let Some(health) = &self.health {
            health.abort();
        }
    }
}

impl RunningServer {
    fn spawn(&mut self, listener: Listener<impl Respond>, stop: &Stop) {
        self.tasks.push(tokio::spawn(listener.serve(stop.clone())));
    }

    /// Serves the admin port on a thread of its own.
    fn serve_admin(
        &mut self,
        socket: TcpListener,
        responder: AdminHandler,
        table: Arc<ConnectionTable>,
        tls: Option<(Arc<Tls>, TlsUse)>,
        stop: Stop,
    ) -> Result<(), ServerError> {
        let runtime = AdminRuntime::start().map_err(ServerError::Admin)?;
        if let Some(handle) = runtime.handle() {
            let socket = socket.into_std().map_err(ServerError::Admin)?;
            let entered = handle.enter();
            let socket = TcpListener::from_std(socket).map_err(ServerError::Admin)?;
            drop(entered);
            let listener = Listener { socket, responder, table, tls };
            self.tasks.push(handle.spawn(listener.serve(stop)));
        }
        self.admin = Some(runtime);
        Ok(())
    }

    /// Number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.app.requests.in_flight()
    }

    /// The listening sockets: as long as they are held, connections wait in them instead of being
    /// refused.
    pub fn take_sockets(&mut self) -> InheritedSockets {
        std::mem::take(&mut self.sockets)
    }

    /// Serves for `period` after the signal to stop while it is not ready.
    pub fn set_lame_duck(&mut self, period: Duration) {
        self.lame_duck = period;
    }

    /// Reports not ready and tells clients to go away, but serves them until the lame-duck period
    /// ends. Then refuses new requests, ends streams, waits for requests in flight and closes the
    /// listeners. `false` if requests were still running after `limit` and were dropped. Clients
    /// that do not finish sending a request, or do not take a response, only lose their own.
    pub async fn shutdown(mut self, limit: Duration) -> bool {
        if !self.lame_duck.is_zero() {
            self.app.phase.send_replace(StopPhase::LameDuck);
            tokio::time::sleep(self.lame_duck.min(limit)).await;
        }
        self.app.requests.close();
        self.app.phase.send_replace(StopPhase::Draining);
        if let Some(health) = self.health.take() {
            // It ends by itself now.
            let _ = health.await;
        }
        let deadline = Instant::now() + limit;
        self.app.drain.set(Instant::now() + BODY_DRAIN_TIME.min(limit / 2));
        let idle = tokio::time::timeout_at(deadline, self.app.requests.wait_idle()).await.is_ok();
        let remaining = deadline.saturating_duration_since(Instant::now());
        let drained = self.app.service.drain(remaining).await;
        self.sockets = InheritedSockets::default();
        self.close_connections(deadline).await;
        if let Some(telemetry) = &self.app.telemetry {
            telemetry.close().await;
        }
        idle && drained
    }

    /// As [`RunningServer::shutdown`], where another process goes on with the sockets of
    /// [`RunningServer::take_sockets`]: new connections wait in them. No request is refused that
    /// arrives on a connection which was accepted; its reply closes the connection. Idle
    /// connections are closed after the lame-duck period.
    pub async fn hand_over(mut self, limit: Duration) -> bool {
        self.app.accepting.send_replace(false);
        self.app.phase.send_replace(StopPhase::LameDuck);
        tokio::time::sleep(self.lame_duck.min(limit)).await;
        self.app.phase.send_replace(StopPhase::Draining);
        if let Some(health) = self.health.take() {
            let _ = health.await;
        }
        let deadline = Instant::now() + limit;
        self.app.drain.set(Instant::now() + BODY_DRAIN_TIME.min(limit / 2));
        self.close_connections(deadline).await;
        let idle = self.app.requests.in_flight() == 0;
        self.app.requests.close();
        let remaining = deadline.saturating_duration_since(Instant::now());
        let drained = self.app.service.drain(remaining).await;
        if let Some(telemetry) = &self.app.telemetry {
            telemetry.close().await;
        }
        idle && drained
    }

    /// Lets the listeners close their connections when their requests have ended, until the
    /// deadline.
    async fn close_connections(&mut self, deadline: Instant) {
        // Finished responses still have to be written, even after the deadline.
        let written = deadline.max(Instant::now() + Duration::from_millis(500));
        let _ = self.stop.send(Some(written));
        for task in &mut self.tasks {
            // Listeners close their connections at the deadline themselves.
            let late = written + Duration::from_secs(1);
            if tokio::time::timeout_at(late, &mut *task).await.is_err() {
                task.abort();
            }
        }
    }
}
