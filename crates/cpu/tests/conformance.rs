//! The CPU device passes the conformance suite.

use cpu::{CpuDevice, CpuOptions};
use device::conformance::{self, Verdict};

fn check(options: CpuOptions) {
    let report = conformance::run(&CpuDevice::new(options));
    println!("{report}");
    assert_eq!(report.failures().count(), 0, "{report}");
    // The CPU device supports all plans of the suite.
    assert!(report.cases.iter().all(|case| case.verdict == Verdict::Passed), "{report}");
}

#[test]
fn with_one_thread() {
    check(CpuOptions { threads: 1, queues: 1, ..CpuOptions::default() });
}

#[test]
fn with_several_threads_and_queues() {
    check(CpuOptions { threads: 3, queues: 2, ..CpuOptions::default() });
}
