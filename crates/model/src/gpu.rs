//! A model as kernels of a GPU: what the compiler hands to a device that compiles and launches.
//!
//! A [`GpuPlan`] is made for one set of sizes (a batch, a number of tokens). Plans of one model name the
//! same weights by the same keys, so that a device holds them once. Pointers are not in it: a launch's
//! arguments are bytes with [`Patch`]es that say where an address goes.

use std::sync::Arc;

use crate::{DataType, Tensor};

/// What numbers are stored and multiplied in. Sums are always single precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// IEEE half precision.
    #[default]
    F16,
    /// Brain float.
    BF16,
    /// Single precision, without tensor cores.
    F32,
}

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuTarget {
    /// Compute capability, 90 for 9.0.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Storage of activations and weights.
    pub precision: Precision,
}

/// A model for one set of sizes.
#[derive(Clone, Debug, Default)]
pub struct GpuPlan {
    /// Every kernel a launch may name.
    pub kernels: Vec<Kernel>,
    /// Every weight a launch may name.
    pub weights: Vec<Weight>,
    /// The model's inputs as they lie on the device: as the request brings them, packed.
    pub inputs: Vec<IoTensor>,
    /// The model's outputs, packed.
    pub outputs: Vec<IoTensor>,
    /// The launches, each dependent on all before it.
    pub steps: Vec<GpuStep>,
    /// Memory for intermediate values.
    pub arena_bytes: u64,
    /// Memory for the parts of split products, enough for any choice; what it holds is worth nothing after its step.
    pub workspace_bytes: u64,
}

/// A tensor at the border of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct IoTensor {
    /// The name in the source model.
    pub name: String,
    /// Element type.
    pub dtype: DataType,
    /// Sizes.
    pub shape: Vec<usize>,
    /// Bytes, without padding.
    pub bytes: u64,
}

/// A kernel: a tile function with its shape, to be compiled as real-time or best-effort launch.
///
/// The module's text is `#include "wrap.cuh"`, then `source`, then `using Op = expression;` and a macro of
/// `wrap.cuh` that makes the entry points `rt`, or `be` and `be_grid`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// What comes before the operator: includes of `kernels/`, and generated operators.
    pub source: String,
    /// The operator as a C++ type.
    pub expression: String,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Size of the argument struct.
    pub args_bytes: u32,
}

/// Bytes every plan of a model shares.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Equal keys mean equal bytes, in all plans made of one launch plan.
    pub key: WeightKey,
    /// Bytes on the device.
    pub bytes: u64,
    /// Makes them. Not cheap: asked for once per key.
    pub pack: Packer,
}

/// Identity of a packed weight: the value it is made of, and how.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightKey(pub String);

/// Makes the bytes of a weight.
#[derive(Clone)]
pub struct Packer(pub Arc<dyn Fn() -> Vec<u8> + Send + Sync>);

impl std::fmt::Debug for Packer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Packer")
    }
}

impl Packer {
    /// The bytes of `tensor` as they are.
    pub fn raw(tensor: Tensor) -> Packer {
        Packer(Arc::new(move || tensor.raw().map(|raw| raw.to_vec()).unwrap_or_default()))
    }
}

/// One step: what it computes, and the launches that could compute it.
#[derive(Clone, Debug)]
pub struct GpuStep {
    /// The source step's name, for messages and traces.
    pub name: String,
    /// What is computed, in a word: `Conv`, `Attention`.
    pub op: String,
    /// Steps with equal signatures are the same problem, so what is learned of one holds for the other.
    pub signature: String,
    /// Every launch that computes it; at least one.
    pub choices: Vec<Launch>,
    /// Index of the one for real time.
    pub rt: usize,
    /// Index of the one for best effort: never a cluster.
    pub be: usize,
    /// Whether a best-effort launch may be left inside a tile, and if not, why.
    pub preemption: TilePreemption,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes that must be moved: every operand once.
    pub bytes: u64,
    /// Memory it reads, weights apart.
    pub reads: Vec<MemoryRange>,
    /// Memory it writes.
    pub writes: Vec<MemoryRange>,
}

/// Whether a step may be left in the middle of a tile and redone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TilePreemption {
    /// Redoing a tile gives the same output.
    InsideTile,
    /// A tile that began must finish: the reason.
    AtTileBoundary(String),
}

/// A way to compute a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// A short name of the variant, unique within the step: `64x64x64/w4`.
    pub variant: String,
    /// Index into [`GpuPlan::kernels`].
    pub kernel: usize,
    /// Tiles: the real-time grid.
    pub tiles: u32,
    /// Blocks that must run together; 1 for none.
    pub cluster: u32,
    /// Words that must be zero before the launch and are zero after it: arrivals of split products.
    pub arrivals: u32,
    /// How much of the workspace it uses.
    pub workspace_bytes: u64,
    /// The argument struct, with zeros where addresses go.
    pub args: Vec<u8>,
    /// Where addresses go.
    pub patches: Vec<Patch>,
}

/// An address within a launch's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patch {
    /// Byte offset into the argument struct.
    pub at: u32,
    /// What is there.
    pub to: MemoryLocation,
}

/// A place in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryLocation {
    /// Byte offset into the arena of intermediate values.
    Arena(u64),
    /// Byte offset into the workspace.
    Workspace(u64),
    /// The arrival words of this launch.
    Arrivals,
    /// A word of this step, zero before a run. A launch that meets an index out of range stores another number there, goes on
    /// with something harmless, and the run ends as failed.
    Fault,
    /// Index into [`GpuPlan::weights`] and byte offset.
    Weight(u32, u64),
    /// Index into [`GpuPlan::inputs`] and byte offset.
    Input(u32, u64),
    /// Index into [`GpuPlan::outputs`] and byte offset.
    Output(u32, u64),
}

/// A run of bytes that a step reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryRange {
    /// Where it begins.
    pub start: MemoryLocation,
    /// How long it is; a strided access counts from its first to its last byte.
    pub bytes: u64,
}
