//! Samples the memory, threads and files of the process and its device, and detects growth.

use std::time::Duration;

use device::Device;
use serde::Serialize;

/// Min samples of a soak, if it is long enough for one per second.
const SAMPLES_MIN: f64 = 80.0;

/// Max samples; a longer soak samples less often.
const SAMPLES_MAX: f64 = 20_000.0;

/// Resources at one moment; `None` for those that are not reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ResourceReading {
    /// In the order of [`LIMITS`].
    values: [Option<u64>; 4],
}

/// A resource, and how much more of it may be in use at the end than after the warm-up.
struct ResourceLimit {
    what: &'static str,
    percent: u64,
    more: u64,
}

const LIMITS: [ResourceLimit; 4] = [
    ResourceLimit { what: "device bytes", percent: 2, more: 16 << 20 },
    ResourceLimit { what: "process bytes", percent: 5, more: 64 << 20 },
    ResourceLimit { what: "threads", percent: 0, more: 8 },
    ResourceLimit { what: "open files", percent: 0, more: 16 },
];

/// How the use of a resource changed.
#[derive(Clone, Debug, Serialize)]
pub struct ResourceGrowth {
    /// The resource.
    pub what: &'static str,
    /// Number of samples.
    pub samples: usize,
    /// Median in the first tenth, which is the warm-up.
    pub first_tenth: u64,
    /// Median in the second tenth, which the end is compared with.
    pub warm_tenth: u64,
    /// Median in the last tenth.
    pub last_tenth: u64,
    /// Maximum.
    #[serde(rename = "most")]
    pub max: u64,
    /// Max allowed median of the last tenth.
    pub allowed: u64,
    /// Whether it grew beyond that; `None` if a tenth has no sample.
    pub grown: Option<bool>,
}

/// Samples over time.
pub(super) struct ResourceSeries {
    every: Duration,
    /// Each with the share of the soak that had passed.
    readings: Vec<(f64, ResourceReading)>,
}

impl ResourceSeries {
    pub(super) fn new(seconds: f64) -> ResourceSeries {
        let every = (seconds / SAMPLES_MIN).min(1.0).max(seconds / SAMPLES_MAX);
        ResourceSeries { every: Duration::from_secs_f64(every), readings: Vec::new() }
    }

    /// Interval between two samples.
    pub(super) fn every(&self) -> Duration {
        self.every
    }

    pub(super) fn push(&mut self, share: f64, reading: ResourceReading) {
        self.readings.push((share, reading));
    }

    /// The latest sample of a resource.
    pub(super) fn latest(&self, what: &str) -> Option<u64> {
        let at = LIMITS.iter().position(|limit| limit.what == what)?;
        self.readings.last()?.1.values[at]
    }

    /// Growth of every resource that was sampled.
    pub(super) fn growth(&self) -> Vec<ResourceGrowth> {
        LIMITS.iter().enumerate().filter_map(|(at, limit)| self.growth_of(at, limit)).collect()
    }

    fn growth_of(&self, at: usize, limit: &ResourceLimit) -> Option<ResourceGrowth> {
        let read = |(share, reading): &(f64, ResourceReading)| Some((*share, reading.values[at]?));
        let values: Vec<(f64, u64)> = self.readings.iter().filter_map(read).collect();
        let max = values.iter().map(|(_, value)| *value).max()?;
        let tenth = |number: u32| {
            let tenth = |share: f64| (share * 10.0).floor().clamp(0.0, 9.0) as u32;
            let mine = values.iter().filter(|(share, _)| tenth(*share) == number);
            median(mine.map(|(_, value)| *value).collect())
        };
        let (first, warm, last) = (tenth(0), tenth(1), tenth(9));
        let allowed = warm.map(|warm| warm + warm / 100 * limit.percent + limit.more);
        Some(ResourceGrowth {
            what: limit.what,
            samples: values.len(),
            first_tenth: first.unwrap_or(0),
            warm_tenth: warm.unwrap_or(0),
            last_tenth: last.unwrap_or(0),
            max,
            allowed: allowed.unwrap_or(0),
            grown: allowed.and_then(|allowed| Some(last? > allowed)),
        })
    }
}

fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

/// Samples all resources. Device memory is what the system's tools report, or else what the device
/// reports.
pub(super) fn read(device: &dyn Device) -> ResourceReading {
    let on_device = device.memory_use().map(|used| match used.system {
        Some(bytes) => bytes.0,
        None => used.weights.0 + used.spare.0,
    });
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let files = std::fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as u64);
    let process = field("VmRSS:").map(|kib| kib << 10);
    ResourceReading { values: [on_device, process, field("Threads:"), files] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Growth of a soak in which device and process use these amounts at each of 100 moments.
    fn series(device: impl Fn(u64) -> u64, process: impl Fn(u64) -> u64) -> Vec<ResourceGrowth> {
        let mut series = ResourceSeries::new(480.0);
        for moment in 0..100 {
            let values = [Some(device(moment)), Some(process(moment)), Some(12), None];
            series.push(moment as f64 / 100.0, ResourceReading { values });
        }
        series.growth()
    }

    fn grown(growth: &[ResourceGrowth]) -> Vec<Option<bool>> {
        growth.iter().map(|growth| growth.grown).collect()
    }

    #[test]
    fn growth_is_distinguished_from_warm_up_and_noise() {
        const MIB: u64 = 1 << 20;
        let still = series(|_| 4_000 * MIB, |at| (900 + at % 7) * MIB);
        assert_eq!(grown(&still), [Some(false); 3], "open files were never read");
        // Growth in the first tenth is allowed.
        let warming = series(|at| (at.min(9) * 400) * MIB, |_| 900 * MIB);
        assert_eq!((warming[0].first_tenth, warming[0].last_tenth), (1_600 * MIB, 3_600 * MIB));
        assert_eq!(grown(&warming), [Some(false); 3]);
        // A leak of 2 MiB per moment is 180 MiB of a device that holds 4,000.
        let leak = series(|at| (4_000 + 2 * at) * MIB, |_| 900 * MIB);
        assert_eq!(grown(&leak), [Some(true), Some(false), Some(false)], "{leak:?}");
        let leak = series(|_| 4_000 * MIB, |at| (900 + 2 * at) * MIB);
        assert_eq!(grown(&leak), [Some(false), Some(true), Some(false)], "{leak:?}");
        // A single peak is no growth.
        let peak = series(|at| if at == 95 { 9_000 * MIB } else { 4_000 * MIB }, |_| 900 * MIB);
        assert_eq!((grown(&peak)[0], peak[0].max), (Some(false), 9_000 * MIB));
    }

    #[test]
    fn without_samples_no_growth_is_reported() {
        let mut series = ResourceSeries::new(10.0);
        assert!(series.growth().is_empty());
        series.push(0.5, ResourceReading { values: [Some(1), None, None, None] });
        assert_eq!(grown(&series.growth()), [None]);
    }
}
