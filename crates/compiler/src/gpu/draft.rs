//! Launches before memory is planned.

use model::gpu::{Kernel, KernelFacts, TensorMap};

use super::args::{Address, ArgsWriter};
use super::view::View;

/// One variant of a step. Addresses still refer to buffers.
#[derive(Clone, Debug)]
pub struct LaunchDraft {
    /// A short name of the variant, unique within the step.
    pub variant: String,
    /// The kernel.
    pub kernel: Kernel,
    /// Tiles.
    pub tiles: usize,
    /// Blocks of the real-time grid: one per tile, unless the kernel divides the work itself.
    pub rt_blocks: usize,
    /// Whether real-time blocks overlap the end of a tile with the next one.
    pub overlaps: bool,
    /// Blocks of a cluster, which run at the same time; 1 for none.
    pub cluster: usize,
    /// Arrival words of a product split through the workspace.
    pub arrivals: usize,
    /// Workspace it needs.
    pub workspace_bytes: usize,
    /// The argument struct and the addresses within.
    pub args: (Vec<u8>, Vec<(u32, Address)>),
    /// The tensor maps within the arguments, with what they describe.
    pub maps: Vec<(Address, TensorMap)>,
}

impl LaunchDraft {
    /// The only variant: a plain launch of `tiles` tiles.
    pub fn plain(kernel: KernelText, tiles: usize, args: ArgsWriter) -> LaunchDraft {
        let args = args.finish();
        let KernelText { source, expression, threads, shared_bytes } = kernel;
        let args_bytes = args.0.len() as u32;
        let facts = KernelFacts { source, expression, threads, shared_bytes, args_bytes };
        let kernel = Kernel::new(facts);
        let variant = "only".to_string();
        LaunchDraft {
            variant,
            kernel,
            tiles,
            rt_blocks: tiles,
            overlaps: false,
            cluster: 1,
            arrivals: 0,
            workspace_bytes: 0,
            args,
            maps: Vec::new(),
        }
    }
}

/// A kernel without the size of its arguments.
#[derive(Clone, Debug)]
pub struct KernelText {
    /// Includes of `kernels/` and generated operators.
    pub source: String,
    /// The operator as a C++ type.
    pub expression: String,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// A step before memory is planned.
#[derive(Clone, Debug)]
pub struct StepDraft {
    /// The operator in one word.
    pub op: &'static str,
    /// Equal problems have equal signatures: sizes, strides, element types, attributes; no
    /// addresses.
    pub signature: String,
    /// The variants; the first is the default without measurements.
    pub drafts: Vec<LaunchDraft>,
    /// What is read, without weights.
    pub reads: Vec<View>,
    /// What is written.
    pub writes: Vec<View>,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes of weights read.
    pub weight_bytes: u64,
    /// Why a started tile must finish; `None` when it may be preempted.
    pub finish_tiles: Option<String>,
}
