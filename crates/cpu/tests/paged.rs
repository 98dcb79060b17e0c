//! The CPU device with weights that come and go passes what such devices promise.

use std::sync::Arc;

use base::Bytes;
use cpu::{CpuDevice, CpuOptions};
use device::conformance::{self, Verdict};
use device::paged::{PagedDevice, PagedDeviceOptions};

#[test]
fn weights_come_and_go() {
    let inner = Arc::new(CpuDevice::new(CpuOptions { threads: 2, queues: 2 }));
    let options = PagedDeviceOptions {
        memory: Bytes(1 << 30),
        bytes_per_second: 2_000_000_000,
        runnable_percent: 60,
        added: Bytes(0),
    };
    let device = PagedDevice::new(inner, options).expect("a thread");
    let report = conformance::run_residency(&device);
    assert!(report.cases.iter().all(|case| case.verdict == Verdict::Passed), "{report}");
    // Two runs without weights are part of the suite, and nothing else breaks a rule.
    assert_eq!(device.violations(), 2);
}
