//! What a process and its device hold over time, and whether that grows.

use std::time::Duration;

use device::Device;
use serde::Serialize;

/// Samples of a soak that is long enough for one a second, at least.
const SAMPLES_LEAST: f64 = 80.0;

/// Samples that are kept; a longer soak takes fewer.
const SAMPLES_MOST: f64 = 20_000.0;

/// What is held at one moment, as far as somebody tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    /// In the order of [`KINDS`].
    values: [Option<u64>; 4],
}

/// Something that is held, and by how much it may be more at the end than after the warm-up.
struct Kind {
    what: &'static str,
    percent: u64,
    more: u64,
}

const KINDS: [Kind; 4] = [
    Kind { what: "device bytes", percent: 2, more: 16 << 20 },
    Kind { what: "process bytes", percent: 5, more: 64 << 20 },
    Kind { what: "threads", percent: 0, more: 8 },
    Kind { what: "open files", percent: 0, more: 16 },
];

/// How something that is held changed.
#[derive(Clone, Debug, Serialize)]
pub struct Growth {
    /// What it is.
    pub what: &'static str,
    /// Readings of it.
    pub samples: usize,
    /// Median in the first tenth, which is the warm-up.
    pub first_tenth: u64,
    /// Median in the second tenth, which the end is compared with.
    pub warm_tenth: u64,
    /// Median in the last tenth.
    pub last_tenth: u64,
    /// The most that was read.
    pub most: u64,
    /// What the median of the last tenth may be.
    pub allowed: u64,
    /// Whether it is more than that; `None` where a tenth has no reading.
    pub grown: Option<bool>,
}

/// Readings over time.
pub(super) struct Series {
    every: Duration,
    /// By the share of the soak that had passed.
    readings: Vec<(f64, Reading)>,
}

impl Series {
    pub(super) fn new(seconds: f64) -> Series {
        let every = (seconds / SAMPLES_LEAST).min(1.0).max(seconds / SAMPLES_MOST);
        Series { every: Duration::from_secs_f64(every), readings: Vec::new() }
    }

    /// How often it wants a reading.
    pub(super) fn every(&self) -> Duration {
        self.every
    }

    pub(super) fn push(&mut self, share: f64, reading: Reading) {
        self.readings.push((share, reading));
    }

    /// The latest reading of something.
    pub(super) fn latest(&self, what: &str) -> Option<u64> {
        let at = KINDS.iter().position(|kind| kind.what == what)?;
        self.readings.last()?.1.values[at]
    }

    /// How everything changed that was ever read.
    pub(super) fn growth(&self) -> Vec<Growth> {
        KINDS.iter().enumerate().filter_map(|(at, kind)| self.growth_of(at, kind)).collect()
    }

    fn growth_of(&self, at: usize, kind: &Kind) -> Option<Growth> {
        let read = |(share, reading): &(f64, Reading)| Some((*share, reading.values[at]?));
        let values: Vec<(f64, u64)> = self.readings.iter().filter_map(read).collect();
        let most = values.iter().map(|(_, value)| *value).max()?;
        let tenth = |number: u32| {
            let tenth = |share: f64| (share * 10.0).floor().clamp(0.0, 9.0) as u32;
            let mine = values.iter().filter(|(share, _)| tenth(*share) == number);
            median(mine.map(|(_, value)| *value).collect())
        };
        let (first, warm, last) = (tenth(0), tenth(1), tenth(9));
        let allowed = warm.map(|warm| warm + warm / 100 * kind.percent + kind.more);
        Some(Growth {
            what: kind.what,
            samples: values.len(),
            first_tenth: first.unwrap_or(0),
            warm_tenth: warm.unwrap_or(0),
            last_tenth: last.unwrap_or(0),
            most,
            allowed: allowed.unwrap_or(0),
            grown: allowed.and_then(|allowed| Some(last? > allowed)),
        })
    }
}

fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len().checked_sub(1)? / 2).copied()
}

/// What is held now. Of a device, what its own tools count, or else what it counts itself.
pub(super) fn read(device: &dyn Device) -> Reading {
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
    Reading { values: [on_device, process, field("Threads:"), files] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A soak whose device and process hold so much at each of its hundred moments.
    fn series(device: impl Fn(u64) -> u64, process: impl Fn(u64) -> u64) -> Vec<Growth> {
        let mut series = Series::new(480.0);
        for moment in 0..100 {
            let values = [Some(device(moment)), Some(process(moment)), Some(12), None];
            series.push(moment as f64 / 100.0, Reading { values });
        }
        series.growth()
    }

    fn grown(growth: &[Growth]) -> Vec<Option<bool>> {
        growth.iter().map(|growth| growth.grown).collect()
    }

    #[test]
    fn growth_is_told_from_warming_up_and_from_noise() {
        const MIB: u64 = 1 << 20;
        let still = series(|_| 4_000 * MIB, |at| (900 + at % 7) * MIB);
        assert_eq!(grown(&still), [Some(false); 3], "open files were never read");
        // The first tenth may do what it likes.
        let warming = series(|at| (at.min(9) * 400) * MIB, |_| 900 * MIB);
        assert_eq!((warming[0].first_tenth, warming[0].last_tenth), (1_600 * MIB, 3_600 * MIB));
        assert_eq!(grown(&warming), [Some(false); 3]);
        // A leak of 2 MiB a moment is 180 MiB of a device that holds 4,000.
        let leak = series(|at| (4_000 + 2 * at) * MIB, |_| 900 * MIB);
        assert_eq!(grown(&leak), [Some(true), Some(false), Some(false)], "{leak:?}");
        let leak = series(|_| 4_000 * MIB, |at| (900 + 2 * at) * MIB);
        assert_eq!(grown(&leak), [Some(false), Some(true), Some(false)], "{leak:?}");
        // A single peak is none.
        let peak = series(|at| if at == 95 { 9_000 * MIB } else { 4_000 * MIB }, |_| 900 * MIB);
        assert_eq!((grown(&peak)[0], peak[0].most), (Some(false), 9_000 * MIB));
    }

    #[test]
    fn without_readings_nothing_is_claimed() {
        let mut series = Series::new(10.0);
        assert!(series.growth().is_empty());
        series.push(0.5, Reading { values: [Some(1), None, None, None] });
        assert_eq!(grown(&series.growth()), [None]);
    }
}
