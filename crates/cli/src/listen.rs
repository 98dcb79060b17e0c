//! Listens on the addresses of the arguments.

use std::net::SocketAddr;
use std::sync::Arc;

use api::InferenceService;
use assembly::Failure;
use server::{BoundServer, RunningServer, Server, ServerOptions};

use crate::args::ListenArgs;

/// Listens and serves.
pub(crate) async fn listen(
    args: &ListenArgs,
    max_body_bytes: usize,
    service: Arc<dyn InferenceService>,
) -> Result<RunningServer, Failure> {
    bind(args, max_body_bytes).await?.serve(service).await.map_err(Failure::failed)
}

/// Binds the addresses for a service that starts later.
pub(crate) async fn bind(args: &ListenArgs, max_body_bytes: usize) -> Result<BoundServer, Failure> {
    let address = |port| Some(SocketAddr::new(args.host, port));
    let options = ServerOptions {
        http: address(args.http_port),
        grpc: address(args.grpc_port),
        metrics: address(args.metrics_port),
        max_body_bytes,
        ..ServerOptions::default()
    };
    Server::bind(options).await.map_err(Failure::failed)
}
