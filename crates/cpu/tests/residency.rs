//! The CPU device with paged weights passes the residency suite.

use std::sync::Arc;

use base::Bytes;
use cpu::{CpuDevice, CpuOptions};
use device::conformance::{self, Verdict};
use device::paged::{PagedDevice, PagedDeviceOptions};

#[test]
fn passes_the_residency_suite() {
    let inner =
        Arc::new(CpuDevice::new(CpuOptions { threads: 2, queues: 2, ..CpuOptions::default() }));
    let options = PagedDeviceOptions {
        memory: Bytes(1 << 30),
        bytes_per_second: 2_000_000_000,
        runnable_percent: 60,
        added: Bytes(0),
    };
    let device = PagedDevice::new(inner, options).expect("the thread starts");
    let report = conformance::run_residency(&device);
    assert!(report.cases.iter().all(|case| case.verdict == Verdict::Passed), "{report}");
    // The suite contains two runs without weights; nothing else is a violation.
    assert_eq!(device.violations(), 2);
}
