//! `atoll cluster canary`: starts, shows and ends canaries over a frontend's REST API.

use std::time::Duration;

use assembly::Failure;
use serde_json::{Value, json};

use crate::cluster_args::{CanaryAction, CanaryArgs};

/// Time limit: backends compile and load the version first.
const START_TIMEOUT: Duration = Duration::from_secs(300);
/// Time limit of what a frontend knows.
const SHOW_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs the command.
pub(crate) async fn run(args: &CanaryArgs) -> Result<(), Failure> {
    if !model::repository::is_valid_name(&args.model) {
        return Err(Failure::usage(format!("'{}' is not the name of a model", args.model)));
    }
    let model = format!("/v2/atoll/models/{}", args.model);
    let server = &args.server;
    let reply = match (args.share, args.action) {
        (Some(share), _) => {
            let version = args.version.map(|version| format!("/versions/{version}"));
            let path = format!("{model}{}/canary", version.unwrap_or_default());
            server.post_json(&path, &options(args, share)?, START_TIMEOUT).await?
        }
        (None, Some(CanaryAction::Promote)) => {
            server.post(&format!("{model}/canary/promote"), START_TIMEOUT).await?
        }
        (None, Some(CanaryAction::Abort)) => {
            server.post(&format!("{model}/canary/abort"), START_TIMEOUT).await?
        }
        (None, Some(CanaryAction::Show) | None) => {
            server.get(&format!("{model}/canary"), Some(SHOW_TIMEOUT)).await?
        }
    };
    let text = reply.text().await.map_err(|error| server.failed(&error))?;
    let status: Value = serde_json::from_str(&text).map_err(Failure::failed)?;
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(&status).map_err(Failure::failed)?),
        false => print!("{}", describe(&status)),
    }
    Ok(())
}

fn options(args: &CanaryArgs, share: f64) -> Result<Value, Failure> {
    let options = api::CanaryOptions {
        share_percent: share,
        promote_after_ms: args.promote_after,
        max_errors_percent: args.max_errors,
        max_slowdown_percent: args.max_slowdown,
    };
    options.check().map_err(|error| Failure::usage(error.message))?;
    Ok(json!({
        "share_percent": options.share_percent,
        "promote_after_ms": options.promote_after_ms,
        "max_errors_percent": options.max_errors_percent,
        "max_slowdown_percent": options.max_slowdown_percent,
    }))
}

/// The state of a canary in words.
fn describe(status: &Value) -> String {
    let word = |key: &str| status[key].as_str().unwrap_or("?").to_string();
    let (name, version, in_force) = (word("name"), word("version"), word("in_force"));
    let state = word("state").replace('_', " ");
    let mut text = format!("{name} version {version}: {state}; version {in_force} is in force\n");
    if let Some(why) = status["why"].as_str().filter(|why| !why.is_empty()) {
        text += &format!("  {why}\n");
    }
    let running = &status["running"];
    if running.is_object() {
        let seconds = running["elapsed_ms"].as_u64().unwrap_or(0) / 1000;
        text += &format!("  share {} %, served for {seconds} s\n", running["share_percent"]);
        for which in ["canary", "stable"] {
            let of = &running[which];
            text += &format!(
                "  {which:<7} {} requests, {} failed, median {} ms, 95 % {} ms\n",
                of["requests"], of["failures"], of["median_ms"], of["p95_ms"]
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_canary_is_described_with_its_figures_and_an_ended_one_with_its_reason() {
        let figures = json!({"requests": 7, "failures": 1, "median_ms": 2.5, "p95_ms": 4.0});
        let running = json!({
            "name": "m", "version": "2", "in_force": "1", "state": "running", "why": "9 s missing",
            "running": {"share_percent": 5.0, "elapsed_ms": 1500, "stable": figures,
                        "canary": figures},
        });
        let text = describe(&running);
        for part in ["m version 2: running", "9 s missing", "share 5.0 %", "7 requests, 1 failed"] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
        let ended = json!({
            "name": "m", "version": "2", "in_force": "1", "state": "rolled_back", "why": "slow",
        });
        assert_eq!(describe(&ended), "m version 2: rolled back; version 1 is in force\n  slow\n");
    }
}
