//! Listens on the addresses of the arguments.

use std::path::Path;
use std::sync::Arc;

use api::InferenceService;
use assembly::Failure;
use server::{BoundServer, RunningServer, Server};

use crate::args::ListenArgs;

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
    Server::bind(args.options(folder, max_body_bytes)?).await.map_err(Failure::failed)
}
