//! Reports of pairs, and summaries over all pairs.

use std::fmt::Write;

use serde::Serialize;

/// A slowdown up to this counts as none.
const MAX_RT_SLOWDOWN: f64 = 1.01;

/// Time of one network over many replays, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimingSummary {
    /// Number of replays.
    pub replays: usize,
    /// Median.
    pub median_us: f64,
    /// Mean.
    pub mean_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
}

/// Time of real time under a method over its time alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SlowdownRatios {
    /// Of medians.
    pub median: f64,
    /// Of means.
    pub mean: f64,
    /// Of 99th percentiles.
    pub p99: f64,
}

impl SlowdownRatios {
    /// `with` over `alone`.
    pub fn of(with: &TimingSummary, alone: &TimingSummary) -> SlowdownRatios {
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        SlowdownRatios {
            median: ratio(with.median_us, alone.median_us),
            mean: ratio(with.mean_us, alone.mean_us),
            p99: ratio(with.p99_us, alone.p99_us),
        }
    }
}

/// A pair of networks under one method.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MethodReport {
    /// `alone`, `free`, `partition 16`, `apart 16`.
    #[serde(rename = "way")]
    pub method: String,
    /// SMs of the partition, as the driver made it.
    pub multiprocessors: Option<u32>,
    /// The real-time network.
    pub real_time: TimingSummary,
    /// Its time over its time alone.
    pub ratio: SlowdownRatios,
    /// Work of best effort, as a share of what it does alone in the same time.
    pub best_effort_share: f64,
    /// Runs of best effort, unfinished ones in part.
    pub best_effort_runs: f64,
    /// Checks in which outputs of the real-time network differed from those alone.
    pub wrong_real_time: usize,
    /// The same of the best-effort network.
    pub wrong_best_effort: usize,
    /// Number of checks.
    pub checks: usize,
}

/// One pair under all methods.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairReport {
    /// The real-time network.
    pub real_time: String,
    /// The best-effort network.
    pub best_effort: String,
    /// The best-effort network alone, with the same launches.
    pub best_effort_alone: TimingSummary,
    /// All methods, alone first.
    #[serde(rename = "ways")]
    pub methods: Vec<MethodReport>,
}

/// One method over all pairs, by medians of real time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MethodSummary {
    /// The method.
    #[serde(rename = "way")]
    pub method: String,
    /// Pairs.
    pub pairs: usize,
    /// Mean of real time over real time alone.
    pub mean_ratio: f64,
    /// Maximum of the same.
    pub worst_ratio: f64,
    /// The pair with that maximum.
    pub worst_pair: String,
    /// Maximum over 99th percentiles.
    pub worst_p99_ratio: f64,
    /// Pairs with a slowdown of at most one percent.
    pub within_one_percent: usize,
    /// Mean share of best effort.
    pub mean_share: f64,
    /// Minimum share of best effort.
    pub least_share: f64,
    /// Mean share in pairs with a slowdown of at most one percent; `None` without such pairs.
    pub mean_share_within_one_percent: Option<f64>,
}

/// A whole run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PaddingReport {
    /// The GPU.
    pub device: String,
    /// Its driver.
    pub driver: Option<String>,
    /// The day.
    pub date: String,
    /// The command line.
    pub command: String,
    /// Seed of the inputs.
    pub seed: u64,
    /// Seconds per method and pair.
    pub seconds: f64,
    /// All methods over all pairs.
    pub summaries: Vec<MethodSummary>,
    /// Every pair.
    pub pairs: Vec<PairReport>,
}

impl PaddingReport {
    /// Pairs and methods with wrong outputs.
    pub fn wrong(&self) -> Vec<String> {
        let of = |pair: &PairReport| {
            let name = format!("{}+{}", pair.real_time, pair.best_effort);
            let wrong = pair
                .methods
                .iter()
                .filter(|method| method.wrong_real_time + method.wrong_best_effort > 0);
            wrong.map(|method| format!("{name} {}", method.method)).collect::<Vec<_>>()
        };
        self.pairs.iter().flat_map(of).collect()
    }
}

/// Summaries of all methods, in the order of the first pair.
pub fn summaries(pairs: &[PairReport]) -> Vec<MethodSummary> {
    let mut names: Vec<&str> = Vec::new();
    for method in pairs.iter().flat_map(|pair| &pair.methods) {
        if !names.contains(&method.method.as_str()) {
            names.push(&method.method);
        }
    }
    names.into_iter().filter_map(|name| summary(name, pairs)).collect()
}

fn summary(name: &str, pairs: &[PairReport]) -> Option<MethodSummary> {
    let cells: Vec<(&PairReport, &MethodReport)> = pairs
        .iter()
        .flat_map(|pair| pair.methods.iter().map(move |method| (pair, method)))
        .filter(|(_, method)| method.method == name)
        .collect();
    let worst = cells.iter().max_by(|(_, a), (_, b)| a.ratio.median.total_cmp(&b.ratio.median))?;
    let mean = |values: Vec<f64>| match values.len() {
        0 => None,
        count => Some(values.iter().sum::<f64>() / count as f64),
    };
    let all = |of: fn(&MethodReport) -> f64| {
        cells.iter().map(|(_, method)| of(method)).collect::<Vec<_>>()
    };
    let within = cells.iter().filter(|(_, method)| method.ratio.median <= MAX_RT_SLOWDOWN);
    let within: Vec<f64> = within.map(|(_, method)| method.best_effort_share).collect();
    let shares = all(|method| method.best_effort_share);
    Some(MethodSummary {
        method: name.to_string(),
        pairs: cells.len(),
        mean_ratio: mean(all(|method| method.ratio.median))?,
        worst_ratio: worst.1.ratio.median,
        worst_pair: format!("{}+{}", worst.0.real_time, worst.0.best_effort),
        worst_p99_ratio: all(|method| method.ratio.p99).into_iter().fold(0.0, f64::max),
        within_one_percent: within.len(),
        least_share: shares.iter().copied().fold(f64::INFINITY, f64::min),
        mean_share: mean(shares)?,
        mean_share_within_one_percent: mean(within),
    })
}

/// The report as text.
pub fn table(pairs: &[PairReport], summaries: &[MethodSummary]) -> String {
    let mut text = String::new();
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    let _ = writeln!(
        text,
        "{:<26} {:<10} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "pair", "method", "median us", "mean us", "p99 us", "median", "best eff."
    );
    for pair in pairs {
        let name = format!("{}+{}", pair.real_time, pair.best_effort);
        for method in &pair.methods {
            let TimingSummary { median_us, mean_us, p99_us, .. } = method.real_time;
            let wrong = method.wrong_real_time + method.wrong_best_effort;
            let _ = writeln!(
                text,
                "{name:<26} {:<10} {median_us:>9.1} {mean_us:>9.1} {p99_us:>9.1} {:>+7.1}% {:>7.1}\
                 %{}",
                method.method,
                percent(method.ratio.median),
                method.best_effort_share * 100.0,
                if wrong > 0 { "  WRONG OUTPUTS" } else { "" },
            );
        }
    }
    let _ = writeln!(
        text,
        "\n{:<10} {:>5} {:>8} {:>8} {:>9} {:>6} {:>9} {:>16}  worst pair",
        "method", "pairs", "mean", "worst", "worst p99", "<=1%", "best eff.", "best eff. <=1%"
    );
    for method in summaries {
        let within = method.mean_share_within_one_percent;
        let _ = writeln!(
            text,
            "{:<10} {:>5} {:>+7.1}% {:>+7.1}% {:>+8.1}% {:>6} {:>8.1}% {:>16}  {}",
            method.method,
            method.pairs,
            percent(method.mean_ratio),
            percent(method.worst_ratio),
            percent(method.worst_p99_ratio),
            method.within_one_percent,
            method.mean_share * 100.0,
            within.map_or("-".to_string(), |share| format!("{:.1}%", share * 100.0)),
            method.worst_pair,
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn method(name: &str, median: f64, share: f64) -> MethodReport {
        let spread = |median_us| TimingSummary {
            replays: 10,
            median_us,
            mean_us: median_us,
            p99_us: 2.0 * median_us,
        };
        let (alone, real_time) = (spread(100.0), spread(median));
        MethodReport {
            method: name.to_string(),
            multiprocessors: None,
            real_time,
            ratio: SlowdownRatios::of(&real_time, &alone),
            best_effort_share: share,
            best_effort_runs: 1.0,
            wrong_real_time: 0,
            wrong_best_effort: 0,
            checks: 3,
        }
    }

    fn pair(best_effort: &str, methods: Vec<MethodReport>) -> PairReport {
        PairReport {
            real_time: "vgg19".to_string(),
            best_effort: best_effort.to_string(),
            best_effort_alone: TimingSummary::default(),
            methods,
        }
    }

    #[test]
    fn summaries_cover_all_pairs() {
        let pairs = [
            pair("a", vec![method("alone", 100.0, 0.0), method("free", 101.0, 0.2)]),
            pair("b", vec![method("alone", 100.0, 0.0), method("free", 120.0, 0.4)]),
        ];
        let all = summaries(&pairs);
        assert_eq!(
            all.iter().map(|method| method.method.as_str()).collect::<Vec<_>>(),
            ["alone", "free"]
        );
        let free = &all[1];
        assert!((free.mean_ratio - 1.105).abs() < 1e-9 && (free.worst_ratio - 1.2).abs() < 1e-9);
        assert_eq!((free.worst_pair.as_str(), free.within_one_percent), ("vgg19+b", 1));
        assert!((free.mean_share - 0.3).abs() < 1e-9 && free.least_share == 0.2);
        assert_eq!(free.mean_share_within_one_percent, Some(0.2));
        let text = table(&pairs, &all);
        assert!(text.contains("vgg19+b") && text.contains("+20.0%"), "{text}");
        assert!(summaries(&[]).is_empty());
    }

    #[test]
    fn json_keys_are_stable() {
        let mut broken = method("free", 100.0, 0.1);
        broken.wrong_best_effort = 1;
        let pairs = vec![pair("a", vec![method("alone", 100.0, 0.0), broken])];
        let report = PaddingReport {
            device: "a GPU".to_string(),
            driver: None,
            date: "2026-01-01".to_string(),
            command: "atoll bench padding".to_string(),
            seed: 1,
            seconds: 0.2,
            summaries: summaries(&pairs),
            pairs,
        };
        assert_eq!(report.wrong(), ["vgg19+a free"]);
        let json = serde_json::to_value(&report).expect("plain data");
        for path in [
            "/pairs/0/ways/1/ratio/median",
            "/pairs/0/ways/1/best_effort_share",
            "/summaries/1/within_one_percent",
            "/command",
        ] {
            assert!(json.pointer(path).is_some_and(|value| !value.is_null()), "{path}");
        }
    }
}
