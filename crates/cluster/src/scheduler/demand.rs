//! The rate of each model, from the reports of frontends.

use std::collections::BTreeMap;

use crate::record::LoadReport;

/// Standard deviations by which recent arrivals must exceed the slow average to count at once.
const SURPRISE: f64 = 3.0;

/// No frontend takes more requests per second. Reports come from the store, where anybody who has
/// its password can write.
const RATE_MAX: f64 = 1e9;

/// A rate as reported, or the nearest that is possible.
fn plausible(rate: f64) -> f64 {
    if rate.is_nan() { 0.0 } else { rate.clamp(0.0, RATE_MAX) }
}

/// Requests per second by model, over all frontends. A rise counts at once where it is too large
/// for chance; a fall counts only as the slow average follows. The rise of all models together is
/// significant sooner than that of one, so each model's rise counts at once up to that factor.
pub fn rates<'a>(reports: impl Iterator<Item = &'a LoadReport>) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, (f64, f64, f64)> = BTreeMap::new();
    for (model, load) in reports.flat_map(|report| &report.models) {
        let (fast, slow, window) = sums.entry(model.clone()).or_default();
        *fast += plausible(load.fast);
        *slow += plausible(load.slow);
        *window = window.max(load.window);
    }
    // The standard deviation of a Poisson process is the root of its count.
    let surely = |(fast, slow, window): (f64, f64, f64)| {
        fast - SURPRISE * (fast.max(slow) / window.max(1e-3)).sqrt()
    };
    let add = |a: (f64, f64, f64), b: &(f64, f64, f64)| (a.0 + b.0, a.1 + b.1, a.2.max(b.2));
    let all = sums.values().fold((0.0, 0.0, 0.0), add);
    let growth = surely(all) / all.1.max(1e-9);
    let rate = |sum: (f64, f64, f64)| {
        let (fast, slow, _) = sum;
        slow.max(fast.min(slow * growth)).max(surely(sum))
    };
    sums.into_iter().map(|(model, sum)| (model, rate(sum))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::ModelLoad;

    fn report(fast: f64, slow: f64) -> LoadReport {
        let load = ModelLoad { fast, slow, window: 2.0, ..ModelLoad::default() };
        LoadReport { models: [("m".to_string(), load)].into(), ..LoadReport::default() }
    }

    #[test]
    fn ignores_chance_and_follows_a_step() {
        let rate = |fast, slow| rates([report(fast, slow)].iter())["m"];
        assert_eq!(rate(12.0, 10.0), 10.0);
        assert!(rate(2000.0, 1000.0) > 1900.0);
        assert_eq!(rate(0.0, 50.0), 50.0);
    }

    #[test]
    fn common_rise_counts_for_each_model() {
        let load = |fast| ModelLoad { fast, slow: 10.0, window: 2.0, ..ModelLoad::default() };
        let models = |fast: f64| (0..100).map(|i| (format!("m{i}"), load(fast))).collect();
        let rate = |fast| rates([LoadReport { models: models(fast), ..Default::default() }].iter());
        assert!(rate(15.0)["m7"] > 14.0);
        assert_eq!(rate(10.0)["m7"], 10.0);
        // A model that did not rise with the others keeps its rate.
        let mut one = LoadReport { models: models(15.0), ..Default::default() };
        one.models.insert("m7".to_string(), load(9.0));
        assert_eq!(rates([one].iter())["m7"], 10.0);
    }

    #[test]
    fn rates_stay_finite() {
        for wrong in [1e308, f64::INFINITY, -1e308, f64::NAN] {
            let reports = [report(wrong, wrong), report(wrong, 1.0), report(2.0, 1.0)];
            let rate = rates(reports.iter())["m"];
            assert!((0.0..=3.0 * RATE_MAX).contains(&rate), "{wrong}: {rate}");
        }
    }

    #[test]
    fn adds_up_frontends() {
        assert_eq!(rates([report(10.0, 10.0), report(5.0, 5.0)].iter())["m"], 15.0);
    }
}
