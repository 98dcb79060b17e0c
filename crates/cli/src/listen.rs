//! Listens where the arguments say.

use std::net::SocketAddr;
use std::sync::Arc;

use api::InferenceService;
use assembly::Failure;
use server::{BoundServer, RunningServer, Server, ServerOptions};

use crate::args::ListenArgs;

/// Listens where `args` say.
pub(crate) async fn listen(
    args: &ListenArgs,
    max_body_bytes: usize,
    service: Arc<dyn InferenceService>,
) -> Result<RunningServer, Failure> {
    bind(args, max_body_bytes).await?.serve(service).await.map_err(Failure::failed)
}

/// Takes the addresses in `args` for a service that is still to come.
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
