//! Serves models that echo their inputs, to try clients without a model.
//!
//! `cargo run -p server --example echo` listens on 8000 (REST), 8001 (gRPC) and 8002 (metrics).

use std::sync::Arc;
use std::time::Duration;

use server::{Server, ServerOptions};

// Only tests use the rest.
#[allow(dead_code)]
#[path = "../tests/support/mod.rs"]
mod support;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = ServerOptions::default();
    let running = Server::start(options, Arc::new(support::Echo::default())).await?;
    println!(
        "listening on {:?}, {:?}, {:?}",
        running.http_addr, running.grpc_addr, running.metrics_addr
    );
    tokio::signal::ctrl_c().await?;
    running.shutdown(Duration::from_secs(5)).await;
    Ok(())
}
