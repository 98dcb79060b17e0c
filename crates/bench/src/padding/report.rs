//! What was measured of every pair, and what follows over all of them.

use std::fmt::Write;

use serde::Serialize;

/// Real time may take so much longer and still counts as undisturbed.
const MAX_RT_SLOWDOWN: f64 = 1.01;

/// Microseconds of one network over many replays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimingSummary {
    /// Replays that were timed.
    pub replays: usize,
    /// Half took no longer.
    pub median_us: f64,
    /// All of them by their number.
    pub mean_us: f64,
    /// Of a hundred, 99 took no longer.
    pub p99_us: f64,
}

/// Real time in one way over real time alone.
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

/// A pair of networks in one way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MethodReport {
    /// `alone`, `fused`, `free`, `partition 16`, `apart 16`.
    pub way: String,
    /// Multiprocessors of the partition, as the driver made it.
    pub multiprocessors: Option<u32>,
    /// The real-time network.
    pub real_time: TimingSummary,
    /// The same over its own times alone.
    pub ratio: SlowdownRatios,
    /// What best effort got done, as a share of what it does alone in the same time.
    pub best_effort_share: f64,
    /// Runs of best effort, in parts where some were not finished.
    pub best_effort_runs: f64,
    /// Checks after which outputs of the real-time network were others than alone.
    pub wrong_real_time: usize,
    /// The same of the best-effort network.
    pub wrong_best_effort: usize,
    /// Checks that were made of both.
    pub checks: usize,
}

/// What two kernels became as one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FusedKernelReport {
    /// Real time's.
    pub real_time: String,
    /// Best effort's.
    pub best_effort: String,
    /// Launches of it in a round.
    pub launches: usize,
    /// Registers of a thread: of both as one, of real time's alone, of best effort's alone.
    pub registers: [u32; 3],
    /// Bytes a thread spills.
    pub spilled_bytes: u32,
    /// Blocks a multiprocessor holds: of both as one, of real time's alone, of best effort's alone.
    pub blocks_per_multiprocessor: [u32; 3],
}

/// How a pair was fused.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FusionReport {
    /// Graphs until best effort begins anew.
    pub graphs: usize,
    /// Launches in all of them.
    pub launches: usize,
    /// Those that do tiles of both.
    pub fused_launches: usize,
    /// Those of them whose kernel holds fewer blocks on a multiprocessor than real time's alone.
    pub launches_of_lower_occupancy: usize,
    /// Runs of best effort in a round, without what is done behind its last graph.
    pub best_effort_runs: f64,
    /// The step that no real-time kernel had room for, or where the graphs ended; its run is finished untimed.
    pub finished_apart_from: Option<String>,
    /// Launches left alone because there would have been too many kernels.
    pub kernels_refused: usize,
    /// Every kernel made of two.
    pub kernels: Vec<FusedKernelReport>,
}

/// One pair in all ways.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairReport {
    /// The real-time network.
    pub real_time: String,
    /// The best-effort network.
    pub best_effort: String,
    /// The best-effort network alone, in the launches it has in every way.
    pub best_effort_alone: TimingSummary,
    /// How they were fused, where that was asked for.
    pub fused: Option<FusionReport>,
    /// Every way, alone first.
    pub ways: Vec<MethodReport>,
}

/// One way over all pairs, by the medians of real time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MethodSummary {
    /// The way.
    pub way: String,
    /// Pairs.
    pub pairs: usize,
    /// Real time over real time alone, on average.
    pub mean_ratio: f64,
    /// The same at worst.
    pub worst_ratio: f64,
    /// Where that was.
    pub worst_pair: String,
    /// The worst ratio of 99th percentiles.
    pub worst_p99_ratio: f64,
    /// Pairs in which real time took at most one percent longer.
    pub within_one_percent: usize,
    /// What best effort got, on average.
    pub mean_share: f64,
    /// What it got where it got least.
    pub least_share: f64,
    /// What it got on average in pairs with real time within one percent; none without such pairs.
    pub mean_share_within_one_percent: Option<f64>,
}

/// All of it, with where and when it was.
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
    /// Seconds of each way of a pair.
    pub seconds: f64,
    /// Seconds until all kernels were there.
    pub compile_seconds: f64,
    /// Kernels made of two.
    pub fused_kernels: usize,
    /// Every way over all pairs.
    pub summaries: Vec<MethodSummary>,
    /// Every pair.
    pub pairs: Vec<PairReport>,
}

impl PaddingReport {
    /// Pairs and ways after which outputs were others than alone.
    pub fn wrong(&self) -> Vec<String> {
        let of = |pair: &PairReport| {
            let name = format!("{}+{}", pair.real_time, pair.best_effort);
            let wrong =
                pair.ways.iter().filter(|way| way.wrong_real_time + way.wrong_best_effort > 0);
            wrong.map(|way| format!("{name} {}", way.way)).collect::<Vec<_>>()
        };
        self.pairs.iter().flat_map(of).collect()
    }
}

/// Every way that occurs over the pairs that have it, in the order of the first pair.
pub fn summaries(pairs: &[PairReport]) -> Vec<MethodSummary> {
    let mut names: Vec<&str> = Vec::new();
    for way in pairs.iter().flat_map(|pair| &pair.ways) {
        if !names.contains(&way.way.as_str()) {
            names.push(&way.way);
        }
    }
    names.into_iter().filter_map(|name| summary(name, pairs)).collect()
}

fn summary(name: &str, pairs: &[PairReport]) -> Option<MethodSummary> {
    let cells: Vec<(&PairReport, &MethodReport)> = pairs
        .iter()
        .flat_map(|pair| pair.ways.iter().map(move |way| (pair, way)))
        .filter(|(_, way)| way.way == name)
        .collect();
    let worst = cells.iter().max_by(|(_, a), (_, b)| a.ratio.median.total_cmp(&b.ratio.median))?;
    let mean = |values: Vec<f64>| match values.len() {
        0 => None,
        count => Some(values.iter().sum::<f64>() / count as f64),
    };
    let all =
        |of: fn(&MethodReport) -> f64| cells.iter().map(|(_, way)| of(way)).collect::<Vec<_>>();
    let calm = cells.iter().filter(|(_, way)| way.ratio.median <= MAX_RT_SLOWDOWN);
    let calm: Vec<f64> = calm.map(|(_, way)| way.best_effort_share).collect();
    let shares = all(|way| way.best_effort_share);
    Some(MethodSummary {
        way: name.to_string(),
        pairs: cells.len(),
        mean_ratio: mean(all(|way| way.ratio.median))?,
        worst_ratio: worst.1.ratio.median,
        worst_pair: format!("{}+{}", worst.0.real_time, worst.0.best_effort),
        worst_p99_ratio: all(|way| way.ratio.p99).into_iter().fold(0.0, f64::max),
        within_one_percent: calm.len(),
        least_share: shares.iter().copied().fold(f64::INFINITY, f64::min),
        mean_share: mean(shares)?,
        mean_share_within_one_percent: mean(calm),
    })
}

/// Pairs and summaries for people.
pub fn table(pairs: &[PairReport], summaries: &[MethodSummary]) -> String {
    let mut text = String::new();
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    let _ = writeln!(
        text,
        "{:<26} {:<10} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "pair", "way", "median us", "mean us", "p99 us", "median", "best eff."
    );
    for pair in pairs {
        let name = format!("{}+{}", pair.real_time, pair.best_effort);
        for way in &pair.ways {
            let TimingSummary { median_us, mean_us, p99_us, .. } = way.real_time;
            let wrong = way.wrong_real_time + way.wrong_best_effort;
            let _ = writeln!(
                text,
                "{name:<26} {:<10} {median_us:>9.1} {mean_us:>9.1} {p99_us:>9.1} {:>+7.1}% {:>7.1}%{}",
                way.way,
                percent(way.ratio.median),
                way.best_effort_share * 100.0,
                if wrong > 0 { "  WRONG OUTPUTS" } else { "" },
            );
        }
    }
    let _ = writeln!(
        text,
        "\n{:<10} {:>5} {:>8} {:>8} {:>9} {:>6} {:>9} {:>16}  worst pair",
        "way", "pairs", "mean", "worst", "worst p99", "<=1%", "best eff.", "best eff. <=1%"
    );
    for way in summaries {
        let calm = way.mean_share_within_one_percent;
        let _ = writeln!(
            text,
            "{:<10} {:>5} {:>+7.1}% {:>+7.1}% {:>+8.1}% {:>6} {:>8.1}% {:>16}  {}",
            way.way,
            way.pairs,
            percent(way.mean_ratio),
            percent(way.worst_ratio),
            percent(way.worst_p99_ratio),
            way.within_one_percent,
            way.mean_share * 100.0,
            calm.map_or("-".to_string(), |share| format!("{:.1}%", share * 100.0)),
            way.worst_pair,
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(name: &str, median: f64, share: f64) -> MethodReport {
        let spread = |median_us| TimingSummary {
            replays: 10,
            median_us,
            mean_us: median_us,
            p99_us: 2.0 * median_us,
        };
        let (alone, real_time) = (spread(100.0), spread(median));
        MethodReport {
            way: name.to_string(),
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

    fn pair(best_effort: &str, ways: Vec<MethodReport>) -> PairReport {
        PairReport {
            real_time: "vgg19".to_string(),
            best_effort: best_effort.to_string(),
            best_effort_alone: TimingSummary::default(),
            fused: Some(FusionReport::default()),
            ways,
        }
    }

    #[test]
    fn summaries_go_over_pairs() {
        let pairs = [
            pair("a", vec![way("alone", 100.0, 0.0), way("fused", 101.0, 0.2)]),
            pair("b", vec![way("alone", 100.0, 0.0), way("fused", 120.0, 0.4)]),
        ];
        let all = summaries(&pairs);
        assert_eq!(all.iter().map(|way| way.way.as_str()).collect::<Vec<_>>(), ["alone", "fused"]);
        let fused = &all[1];
        assert!((fused.mean_ratio - 1.105).abs() < 1e-9 && (fused.worst_ratio - 1.2).abs() < 1e-9);
        assert_eq!((fused.worst_pair.as_str(), fused.within_one_percent), ("vgg19+b", 1));
        assert!((fused.mean_share - 0.3).abs() < 1e-9 && fused.least_share == 0.2);
        assert_eq!(fused.mean_share_within_one_percent, Some(0.2));
        let text = table(&pairs, &all);
        assert!(text.contains("vgg19+b") && text.contains("+20.0%"), "{text}");
        assert!(summaries(&[]).is_empty());
    }

    #[test]
    fn machines_find_what_they_look_for() {
        let mut broken = way("fused", 100.0, 0.1);
        broken.wrong_best_effort = 1;
        let pairs = vec![pair("a", vec![way("alone", 100.0, 0.0), broken])];
        let report = PaddingReport {
            device: "a GPU".to_string(),
            driver: None,
            date: "2026-01-01".to_string(),
            command: "atoll bench padding".to_string(),
            seed: 1,
            seconds: 0.2,
            compile_seconds: 1.0,
            fused_kernels: 3,
            summaries: summaries(&pairs),
            pairs,
        };
        assert_eq!(report.wrong(), ["vgg19+a fused"]);
        let json = serde_json::to_value(&report).expect("plain data");
        for path in [
            "/pairs/0/ways/1/ratio/median",
            "/pairs/0/ways/1/best_effort_share",
            "/pairs/0/fused/graphs",
            "/summaries/1/within_one_percent",
            "/command",
        ] {
            assert!(json.pointer(path).is_some_and(|value| !value.is_null()), "{path}");
        }
    }
}
