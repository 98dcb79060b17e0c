//! What is asked of each model, from what frontends report.

use std::collections::BTreeMap;

use crate::record::LoadReport;

/// Standard deviations by which recent arrivals must exceed the longer average to be believed at once.
const SURPRISE: f64 = 3.0;

/// Requests a second by model, over all frontends. A rise counts at once where it is too large for chance; a fall
/// only as the longer average follows.
pub fn rates<'a>(reports: impl Iterator<Item = &'a LoadReport>) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, (f64, f64, f64)> = BTreeMap::new();
    for (model, load) in reports.flat_map(|report| &report.models) {
        let (fast, slow, window) = sums.entry(model.clone()).or_default();
        *fast += load.fast;
        *slow += load.slow;
        *window = window.max(load.window);
    }
    let rate = |(fast, slow, window): (f64, f64, f64)| {
        // Arrivals of a Poisson process spread by the root of their number.
        let spread = (fast.max(slow) / window.max(1e-3)).sqrt();
        slow.max(fast - SURPRISE * spread)
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
    fn chance_is_not_a_rise_and_a_step_is() {
        let rate = |fast, slow| rates([report(fast, slow)].iter())["m"];
        assert_eq!(rate(12.0, 10.0), 10.0);
        assert!(rate(2000.0, 1000.0) > 1900.0);
        assert_eq!(rate(0.0, 50.0), 50.0);
    }

    #[test]
    fn frontends_add_up() {
        assert_eq!(rates([report(10.0, 10.0), report(5.0, 5.0)].iter())["m"], 15.0);
    }
}
