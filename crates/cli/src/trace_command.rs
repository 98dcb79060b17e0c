//! `atoll trace`: what a running server did in the last seconds.

use std::path::PathBuf;
use std::time::Duration;

use assembly::{Failure, tokio_runtime, write_file};
use clap::Args;

use crate::server_client::ServerClientArgs;

/// The server needs a moment to write a long trace.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll trace --perfetto out.json                  the last 5 seconds of the server on port 8000
  atoll trace --perfetto out.json --seconds 30 --url https://host:8000 --token-file token

Open the file at https://ui.perfetto.dev or chrome://tracing.
atoll sim --perfetto writes the same of a simulation.")]
pub(crate) struct TraceArgs {
    /// Write the trace to this file
    #[arg(long, value_name = "FILE.json")]
    pub(crate) perfetto: PathBuf,

    /// Seconds up to now; what the server no longer records is left out
    #[arg(long, default_value_t = 5.0)]
    pub(crate) seconds: f64,

    #[command(flatten)]
    pub(crate) server: ServerClientArgs,
}

/// Runs the command.
pub(crate) fn run(args: &TraceArgs) -> Result<(), Failure> {
    let text = tokio_runtime()?.block_on(async {
        let path = format!("/v2/atoll/trace?seconds={}", args.seconds);
        let response = args.server.get(&path, Some(TIMEOUT)).await?;
        response.text().await.map_err(|error| args.server.failed(&error))
    })?;
    write_file(&args.perfetto, &text)?;
    let trace: serde_json::Value = serde_json::from_str(&text).map_err(Failure::failed)?;
    let events = trace["traceEvents"].as_array().map_or(0, Vec::len);
    let lost = trace["otherData"]["lost_spans"].as_u64().unwrap_or(0);
    println!("{events} events in {}", args.perfetto.display());
    if lost > 0 {
        eprintln!("{lost} older spans are no longer recorded");
    }
    Ok(())
}
