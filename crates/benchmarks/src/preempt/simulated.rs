//! `atoll bench preempt --device sim`: preemption latency in virtual time.

use assembly::Failure;
use bench::preemption;

/// Runs the benchmark.
pub(crate) fn run(json: bool) -> Result<(), Failure> {
    let models = preemption::by_model().map_err(Failure::failed)?;
    let shapes = preemption::by_shape().map_err(Failure::failed)?;
    if json {
        println!("{:#}", serde_json::json!({ "by_model": models, "by_shape": shapes }));
        return Ok(());
    }
    println!(
        "{:<24}{:>10}{:>10}{:>10}{:>10}",
        "preempted, mean us", "atoll", "reef", "reef_n", "wait"
    );
    for point in models.iter().chain(&shapes) {
        let (name, atoll, reef) = (&point.preempted, point.atoll_us, point.reef_us);
        println!("{name:<24}{atoll:>10}{reef:>10}{:>10}{:>10}", point.reef_n_us, point.wait_us);
    }
    Ok(())
}
