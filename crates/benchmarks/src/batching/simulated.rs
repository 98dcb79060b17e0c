//! `atoll bench batching --device sim`: Nexus's drop curves and Ebird's step load in virtual time.

use assembly::Failure;
use bench::batching;

/// Runs the benchmark.
pub(crate) fn run(json: bool) -> Result<(), Failure> {
    let (drops, steps) = (batching::nexus(20_000), batching::ebird());
    if json {
        println!("{:#}", serde_json::json!({ "nexus": drops, "ebird": steps }));
        return Ok(());
    }
    println!("Nexus: SLO 100 ms, optimum 500/s; share without reply in time at 450/s, and the");
    println!("highest rate with 99 % of replies in time");
    println!(
        "{:>9}{:>10}{:>12}{:>13}{:>9}{:>9}{:>12}",
        "alpha ms", "arrivals", "lazy bad %", "early bad %", "lazy/s", "early/s", "deferred/s"
    );
    for p in &drops {
        println!(
            "{:>9}{:>10}{:>12}{:>13}{:>9}{:>9}{:>12}",
            p.alpha_ms,
            p.arrivals,
            p.lazy_bad_pct,
            p.early_bad_pct,
            p.lazy_rps,
            p.early_rps,
            p.deferred_rps
        );
    }
    println!("\nEbird: 150 requests 10 ms apart, then 250 requests 0.25 ms apart; mean latency");
    println!("{:<14}{:>10}{:>10}", "policy", "slow ms", "fast ms");
    for row in &steps {
        println!("{:<14}{:>10}{:>10}", row.policy, row.slow_ms, row.fast_ms);
    }
    Ok(())
}
