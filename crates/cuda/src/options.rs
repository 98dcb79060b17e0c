//! Options of a GPU.

use std::path::PathBuf;
use std::time::Duration;

use model::gpu::Precision;

/// How a GPU is used.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Data type of activations and weights on the device.
    pub precision: Precision,
    /// Folder of compiled kernels and tuned variants; nothing is kept when absent.
    pub cache_dir: Option<PathBuf>,
    /// File of kernels compiled ahead, which are used before the compiler; none when absent or not
    /// readable.
    pub kernel_library: Option<PathBuf>,
    /// Folder of a CUDA toolkit, tried before `CUDA_HOME`, `CUDA_PATH` and the usual folders.
    pub toolkit: Option<PathBuf>,
    /// Number of queues that the device reports as useful to run at the same time.
    pub queues: usize,
    /// Best-effort steps per chain. Two chains are in flight on a queue, so that the device has
    /// work while the host processes a completion. Every step adds the time of one kernel that
    /// exits at once to the time that a preemption takes.
    pub chain_length: usize,
    /// Specializations that a program keeps; the least recently used one is dropped first.
    pub max_specializations: usize,
    /// Sizes to specialize for when a model is loaded, by symbol; other symbols are guessed.
    pub sizes: Vec<(String, usize)>,
    /// Kernels for other sizes are compiled in the background once a model is loaded.
    pub sizes_ahead: bool,
    /// Freed device memory that is kept for the next allocation.
    pub spare_bytes: u64,
    /// Weights are loaded and evicted on request ([`device::residency`]). Otherwise they are
    /// loaded together with the model and stay resident.
    pub weights_on_demand: bool,
    /// Bytes of weights per copy. Other copies can run between two of them.
    pub weights_chunk_bytes: u64,
    /// How queues wait for the device.
    pub polling: Polling,
    /// SMs of the partition that co-running best effort is confined to; 0 for no partition.
    pub partition_multiprocessors: u32,
    /// Driver calls that take this long are logged, with their thread; zero for none.
    pub slow_call: Duration,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        CudaOptions {
            precision: Precision::default(),
            cache_dir: None,
            kernel_library: None,
            toolkit: None,
            queues: 6,
            chain_length: 16,
            max_specializations: 512,
            sizes: Vec::new(),
            sizes_ahead: false,
            spare_bytes: 1 << 30,
            weights_on_demand: false,
            weights_chunk_bytes: 2 << 20,
            polling: Polling::default(),
            partition_multiprocessors: 16,
            slow_call: Duration::ZERO,
        }
    }
}

/// How a queue's thread waits for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Polling {
    /// Polls without pause for this long.
    pub spin: Duration,
    /// Then sleeps this long between two polls; zero only yields to other threads.
    pub pause: Duration,
    /// How long an idle queue polls for work before its thread sleeps: the request that wakes it
    /// pays for the wake-up.
    pub idle: Duration,
}

impl Default for Polling {
    fn default() -> Polling {
        Polling {
            spin: Duration::from_millis(5),
            pause: Duration::ZERO,
            idle: Duration::from_millis(20),
        }
    }
}
