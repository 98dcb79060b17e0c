//! Listens on the addresses of the arguments.

use std::path::Path;
use std::sync::Arc;

use api::InferenceService;
use assembly::Failure;
use server::{BoundServer, RunningServer, Server, ServerOptions};

use crate::args::ListenArgs;
use crate::process_replacement::take_sockets;

/// Listens and serves; `folder` may hold tokens.
pub(crate) async fn listen(
    args: &ListenArgs,
    folder: Option<&Path>,
    max_body_bytes: usize,
    service: Arc<dyn InferenceService>,
) -> Result<RunningServer, Failure> {
    bind(args, folder, max_body_bytes).await?.serve(service).await.map_err(Failure::failed)
}

/// Binds the addresses for a service that starts later.
pub(crate) async fn bind(
    args: &ListenArgs,
    folder: Option<&Path>,
    max_body_bytes: usize,
) -> Result<BoundServer, Failure> {
    let inherited = take_sockets();
    let options = ServerOptions { inherited, ..args.options(folder, max_body_bytes)? };
    Server::bind(options).await.map_err(Failure::failed)
}
