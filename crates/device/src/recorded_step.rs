//! What is known of a program's steps beside their times.

/// A step whose time a task records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedStep {
    /// Its name.
    pub name: String,
    /// What it computes, in one word.
    pub op: String,
    /// What it has to do, where that is known.
    pub work: Option<StepWork>,
}

impl RecordedStep {
    /// A step of which no more is known.
    pub fn named(name: &str, op: String) -> RecordedStep {
        RecordedStep { name: name.to_string(), op, work: None }
    }
}

/// What a step has to do, whatever its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepWork {
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes that must be moved: every operand once.
    pub bytes: u64,
}

/// Most caches of a device.
pub const CACHES: usize = 3;

/// A cache: what it holds is moved faster than from memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheLimit {
    /// The most operands of a step that are all in it, in bytes; zero for no cache.
    pub bytes: u64,
    /// Bytes moved in a microsecond.
    pub bytes_per_us: f64,
}

/// What bounds a step from below on a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLimits {
    /// Bytes moved in a microsecond, from memory.
    pub bytes_per_us: f64,
    /// Caches, the smallest first.
    pub caches: [CacheLimit; CACHES],
    /// Floating-point operations in a microsecond.
    pub flops_per_us: f64,
    /// The shortest launch.
    pub launch_us: f64,
}

impl MachineLimits {
    /// Measured on an H200 (see `crates/compiler/kernels/README.md`).
    pub const H200: MachineLimits = MachineLimits {
        bytes_per_us: 4.3e6,
        caches: [CacheLimit { bytes: 0, bytes_per_us: 0.0 }; CACHES],
        flops_per_us: 790e6,
        launch_us: 1.6,
    };

    /// Those of a GPU by its name, if they were measured.
    pub fn of_gpu(name: &str) -> Option<MachineLimits> {
        name.contains("H200").then_some(MachineLimits::H200)
    }

    /// The shortest time in which the device can do `work`, in microseconds.
    pub fn shortest_us(&self, work: StepWork) -> f64 {
        self.moving_us(work).max(work.flops as f64 / self.flops_per_us).max(self.launch_us)
    }

    /// The shortest time in which the operands can be moved: from the smallest cache that holds all
    /// of them.
    fn moving_us(&self, work: StepWork) -> f64 {
        let cache = self.caches.iter().find(|cache| work.bytes <= cache.bytes);
        work.bytes as f64 / cache.map_or(self.bytes_per_us, |cache| cache.bytes_per_us)
    }

    /// Whether computing takes longer than moving the operands.
    pub fn is_compute_bound(&self, work: StepWork) -> bool {
        work.flops as f64 / self.flops_per_us > self.moving_us(work)
    }
}

/// How far the variants of a program's steps are measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TuningProgress {
    /// Steps for which the fastest variant was measured.
    pub tuned: usize,
    /// All steps.
    pub steps: usize,
}

impl std::iter::Sum for TuningProgress {
    fn sum<I: Iterator<Item = TuningProgress>>(all: I) -> TuningProgress {
        all.fold(TuningProgress::default(), |sum, one| TuningProgress {
            tuned: sum.tuned + one.tuned,
            steps: sum.steps + one.steps,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_bound_by_what_takes_longest() {
        let mut limits = MachineLimits {
            bytes_per_us: 100.0,
            caches: [CacheLimit::default(); CACHES],
            flops_per_us: 1000.0,
            launch_us: 2.0,
        };
        let work = |flops, bytes| StepWork { flops, bytes };
        assert_eq!(limits.shortest_us(work(10, 10)), 2.0);
        assert_eq!(limits.shortest_us(work(10, 1000)), 10.0);
        assert_eq!(limits.shortest_us(work(20_000, 1000)), 20.0);
        assert!(limits.is_compute_bound(work(20_000, 1000)));
        assert!(!limits.is_compute_bound(work(10, 1000)));
        // What a cache holds comes from there, and from the smallest.
        limits.caches[0] = CacheLimit { bytes: 500, bytes_per_us: 250.0 };
        limits.caches[1] = CacheLimit { bytes: 2000, bytes_per_us: 200.0 };
        assert_eq!(limits.shortest_us(work(10, 500)), 2.0);
        assert_eq!(limits.shortest_us(work(10, 1000)), 5.0);
        assert_eq!(limits.shortest_us(work(10, 4000)), 40.0);
        assert!(limits.is_compute_bound(work(6_000, 1000)));
        assert_eq!(MachineLimits::of_gpu("NVIDIA H200"), Some(MachineLimits::H200));
        assert_eq!(MachineLimits::of_gpu("NVIDIA T4"), None);
    }
}
