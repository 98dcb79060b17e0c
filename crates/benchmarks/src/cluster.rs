//! `atoll bench cluster`: Nexus's case studies on simulated GPUs.

use assembly::Failure;
use bench::cluster_sim::study;
use clap::Args;

#[derive(Clone, Debug, Args)]
pub(crate) struct ClusterStudyArgs {
    /// Print as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Runs the benchmark.
pub(crate) fn run(args: &ClusterStudyArgs) -> Result<(), Failure> {
    let studies = [
        ("game, figure 10", study::figure_10()),
        ("traffic, figure 11", study::figure_11(false)),
        ("traffic in rush hour, figure 12", study::figure_11(true)),
    ];
    if args.json {
        let rows: serde_json::Map<String, serde_json::Value> = studies
            .into_iter()
            .map(|(title, rows)| (title.to_string(), serde_json::json!(rows)))
            .collect();
        println!("{:#}", serde_json::Value::Object(rows));
        return Ok(());
    }
    studies.iter().for_each(|(title, rows)| println!("{}", study::text(title, rows)));
    Ok(())
}
