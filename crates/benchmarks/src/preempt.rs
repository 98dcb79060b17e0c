//! `atoll bench preempt`: preemption latency, in virtual time or on a GPU.

mod args;
mod on_gpu;
mod simulated;

use assembly::Failure;

pub(crate) use self::args::PreemptArgs;

/// Runs the benchmark.
pub(crate) fn run(args: &PreemptArgs) -> Result<(), Failure> {
    match args.device.as_str() {
        "sim" => simulated::run(args.json.is_some()),
        _ => on_gpu::run(args),
    }
}
