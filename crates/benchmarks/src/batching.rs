//! `atoll bench batching`: batching policies side by side, in virtual time or on a real device.

mod args;
mod on_device;
mod simulated;

use assembly::Failure;

pub(crate) use self::args::BatchingArgs;

/// Runs the benchmark.
pub(crate) fn run(args: &BatchingArgs) -> Result<(), Failure> {
    match args.device.as_str() {
        "sim" => simulated::run(args.json.is_some()),
        _ => on_device::run(args),
    }
}
