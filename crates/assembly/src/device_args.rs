//! The arguments of all commands that use a device.

use std::path::PathBuf;

use clap::Args;
use model::gpu::Precision;

/// The device that models run on.
#[derive(Clone, Debug, Args)]
pub struct DeviceArgs {
    /// Device: cpu, or cuda:N for the N-th GPU. A server takes several, as cuda:0,cuda:1, and
    /// parts of a GPU, as cuda:0/2
    #[arg(long, env = "ATOLL_DEVICE", default_value = "cpu")]
    pub device: String,

    /// How it is used.
    #[command(flatten)]
    pub settings: DeviceSettings,
}

/// How a device is used.
#[derive(Clone, Debug, Args)]
pub struct DeviceSettings {
    /// Number format in which a GPU stores and multiplies; it always sums in single precision
    #[arg(long, env = "ATOLL_PRECISION", value_enum, default_value_t)]
    pub precision: PrecisionArg,

    /// Folder for compiled GPU kernels and tuned choices [default: atoll in the user's cache
    /// folder]
    #[arg(long, env = "ATOLL_KERNEL_CACHE", value_name = "FOLDER")]
    pub kernel_cache: Option<PathBuf>,

    /// File of GPU kernels compiled ahead by atoll kernels build, used before NVRTC [default:
    /// atoll-kernels.bin beside the binary, if it is there]
    #[arg(long, env = "ATOLL_KERNEL_LIBRARY", value_name = "FILE")]
    pub kernel_library: Option<PathBuf>,

    /// CUDA toolkit with NVRTC and its headers [default: searched for in the usual folders]
    #[arg(long, env = "ATOLL_CUDA_TOOLKIT", value_name = "FOLDER")]
    pub cuda_toolkit: Option<PathBuf>,

    /// Best-effort steps that a GPU gets as one launch: longer chains run faster and are preempted
    /// a little later
    #[arg(
        long,
        env = "ATOLL_CHAIN",
        value_name = "STEPS",
        default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    pub best_effort_chain: u16,

    /// SMs of a GPU that best effort is confined to while it co-runs with real time, a multiple of
    /// 8; 0 for the whole device
    #[arg(
        long,
        alias = "corner",
        env = "ATOLL_BEST_EFFORT_SMS",
        value_name = "COUNT",
        default_value_t = 16,
        value_parser = clap::value_parser!(u32).range(0..=64)
    )]
    pub best_effort_sms: u32,

    /// A GPU on which a run makes no progress for this time is given up and opened again, in
    /// milliseconds; 0 for never
    #[arg(long, env = "ATOLL_WATCHDOG_MS", value_name = "MS", default_value_t = 10_000)]
    pub watchdog_ms: u64,

    /// Log every driver call of a GPU that takes this long, with its thread, in microseconds; 0 for
    /// none. For finding out what stalls real time
    #[arg(long, env = "ATOLL_SLOW_CALL_US", value_name = "US", default_value_t = 0)]
    pub slow_call_us: u64,

    /// Time how long threads that real time needs work for one request or queue while others wait,
    /// and log every time that is this long, with the thread and its last call, in microseconds; 0
    /// for none. For finding out what stalls real time
    #[arg(long, env = "ATOLL_THREAD_WATCH_US", value_name = "US", default_value_t = 0)]
    pub thread_watch_us: u64,

    /// Processors of a GPU server's threads: real time's launches and best effort's have one each,
    /// loads and compilations a part of the others. Nothing is placed on fewer than 4 processors
    #[arg(long, env = "ATOLL_THREAD_PLACEMENT", value_enum, value_name = "MODE", default_value_t)]
    pub thread_placement: ThreadPlacementArg,

    /// Threads of a CPU queue; 0 for all cores divided by the best-effort queues, and all cores for
    /// real time
    #[arg(long, env = "ATOLL_THREADS", default_value_t = 0)]
    pub threads: usize,

    /// CPU queues that run best-effort requests in parallel; real time has a queue of its own
    #[arg(
        long,
        env = "ATOLL_CPU_QUEUES",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=256)
    )]
    pub cpu_queues: u16,
}

/// Who decides on which processors threads run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ThreadPlacementArg {
    /// Atoll, by what they do
    #[default]
    Auto,
    /// The system
    Off,
}

/// Number format in which a GPU stores values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PrecisionArg {
    /// Half precision, on tensor cores
    #[default]
    F16,
    /// Brain float
    Bf16,
    /// Single precision, without tensor cores
    F32,
    /// Single precision, whose products run on tensor cores with operands of ten bits of mantissa
    Tf32,
}

impl PrecisionArg {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        Precision::from(self).name()
    }
}

impl From<PrecisionArg> for Precision {
    fn from(precision: PrecisionArg) -> Precision {
        match precision {
            PrecisionArg::F16 => Precision::F16,
            PrecisionArg::Bf16 => Precision::BF16,
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Tf32 => Precision::TF32,
        }
    }
}
