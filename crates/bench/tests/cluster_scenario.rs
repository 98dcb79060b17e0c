//! Cluster scenarios: lost machines, whole runs, counted requests, checked files.

use bench::cluster_sim::scenario::{ClusterScenario, GpuLoss, run, text};

fn scenario() -> ClusterScenario {
    let text = "
        kind = 'cluster'
        gpus = 12
        seconds = 40
        [[sessions]]
        name = 'a'
        count = 6
        alpha_ms = 1.0
        beta_ms = 6.0
        batch_max = 32
        slo_ms = 100
        rate = 1500.0
        zipf = 0.9
        [[steps]]
        at_s = 15
        factor = 1.6
        [[losses]]
        at_s = 30
        gpus = 1
        for_s = 5
    ";
    assert!(ClusterScenario::is_one(text));
    toml::from_str(text).unwrap()
}

#[test]
fn all_machines_lost_means_no_reply() {
    let mut scenario = scenario();
    (scenario.gpus, scenario.seconds, scenario.steps) = (10, 20, Vec::new());
    scenario.losses = vec![GpuLoss { at_s: 10, gpus: 10, for_s: 100 }];
    let report = run(&scenario).unwrap();
    // Six or seven were lost, and those served on.
    let lost = report.seconds[11..20].iter().map(|(_, bad)| *bad).fold(100.0, f64::min);
    assert_eq!(lost, 100.0, "{:?}", report.seconds);
    assert_eq!(report.outcomes.violation(report.outcomes.pending), None);
    assert!(report.outcomes.refused + report.outcomes.failed > 10_000, "{}", text(&report));
}

#[test]
fn a_machine_returns_after_a_loss_shorter_than_its_lease() {
    let mut scenario = scenario();
    (scenario.seconds, scenario.steps) = (40, Vec::new());
    scenario.losses = vec![GpuLoss { at_s: 10, gpus: 12, for_s: 1 }];
    let report = run(&scenario).unwrap();
    // Every machine was removed for ever when its old lease expired.
    let late: f64 = report.seconds[25..40].iter().map(|(_, bad)| *bad).sum();
    assert!(late < 1.0, "{:?}", report.seconds);
}

#[test]
fn a_run_lasts_as_long_as_it_says() {
    let mut scenario = scenario();
    (scenario.seconds, scenario.steps, scenario.losses) = (8, Vec::new(), Vec::new());
    let report = run(&scenario).unwrap();
    assert_eq!(report.seconds.len(), 8);
    // The last half second had no arrivals.
    assert!(report.seconds[7].0 > 1.3, "{:?}", report.seconds);
    assert_eq!(report.outcomes.arrivals, report.outcomes.good + report.bad);
}

#[test]
fn every_bad_value_is_named_with_its_line() {
    let good = "kind = 'cluster'\ngpus = 4\nseconds = 5\n[[sessions]]\nname = 'a'\n\
                count = 1\nalpha_ms = 1.0\nbeta_ms = 6.0\nbatch_max = 32\nslo_ms = 100\n\
                rate = 150.0\n[[steps]]\nat_s = 1\nfactor = 1.0\n[[losses]]\nat_s = 2\n\
                gpus = 1\nfor_s = 3\n";
    assert!(ClusterScenario::from_toml("f", good).is_ok());
    for (old, new, line) in [
        ("rate = 150.0", "rate = 0.0", 11),
        ("rate = 150.0", "rate = nan", 11),
        ("rate = 150.0", "rate = -1.0", 11),
        ("alpha_ms = 1.0", "alpha_ms = inf", 7),
        ("batch_max = 32", "batch_max = 0", 9),
        ("slo_ms = 100", "slo_ms = 0", 10),
        ("count = 1", "count = 0", 6),
        ("gpus = 4", "gpus = 0", 2),
        ("gpus = 4", "wave_s = 0.0", 2),
        ("gpus = 4", "wave = nan", 2),
        ("gpus = 4", "packer = 'x'", 2),
        ("gpus = 4", "lease_ms = 0", 2),
        ("seconds = 5", "seconds = 0", 3),
        ("factor = 1.0", "factor = -1.0", 14),
        ("factor = 1.0", "factor = 1.0\nname = 'b'", 15),
        ("gpus = 1", "gpus = 5", 17),
        ("for_s = 3", "for_s = 0", 18),
    ] {
        let error = ClusterScenario::from_toml("f.toml", &good.replace(old, new)).unwrap_err();
        let (error, wanted) = (error.to_string(), format!("f.toml, line {line}: "));
        let field = new.rsplit_once(" =").map_or("", |(field, _)| field);
        let field = field.rsplit('\n').next().unwrap_or_default();
        assert!(error.contains(&wanted) && error.contains(field), "{error}");
    }
}
