//! `atoll bench disb`: the policies on the workloads of DISB, in virtual time or on a real device.

mod args;
mod on_device;
mod simulated;

use assembly::Failure;

pub(crate) use self::args::DisbArgs;

/// Runs the benchmark.
pub(crate) fn run(args: &DisbArgs) -> Result<(), Failure> {
    match args.device.as_str() {
        "sim" => simulated::run(args),
        _ => on_device::run(args),
    }
}
