//! GPU plans: a model as kernels and launches, compiled and launched by a device.
//!
//! A [`GpuPlan`] is made for one set of sizes (a batch, a number of tokens). All plans of one model
//! use the same keys for the same weights, so that a device holds each weight once. A plan has no
//! pointers: a launch's arguments are bytes with [`Patch`]es that say which address to write at
//! which offset.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use crate::{DataType, Tensor};

/// How numbers are stored and multiplied. Sums are always single precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// IEEE half precision.
    #[default]
    F16,
    /// Brain float.
    BF16,
    /// Single precision, without tensor cores.
    F32,
    /// Stored in single precision; products round their operands to ten bits of mantissa and run
    /// on tensor cores.
    TF32,
}

impl Precision {
    /// The name on the command line and in file names.
    pub const fn name(self) -> &'static str {
        match self {
            Precision::F16 => "f16",
            Precision::BF16 => "bf16",
            Precision::F32 => "f32",
            Precision::TF32 => "tf32",
        }
    }

    /// The largest relative error of rounding to it. Single precision counts as none: it is what
    /// other devices compute in.
    pub const fn rounding(self) -> f64 {
        match self {
            Precision::F16 | Precision::TF32 => 1.0 / 2048.0,
            Precision::BF16 => 1.0 / 256.0,
            Precision::F32 => 0.0,
        }
    }
}

/// The device a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GpuTarget {
    /// Compute capability, 90 for 9.0.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Storage of activations and weights.
    pub precision: Precision,
}

impl GpuTarget {
    /// Shared memory that a block may use.
    pub const fn block_shared_bytes(&self) -> u32 {
        match self.capability {
            80 | 87 => 163 << 10,
            86 | 89 | 120 | 121 => 99 << 10,
            _ => 227 << 10,
        }
    }
}

/// A model compiled for one set of sizes.
#[derive(Clone, Debug, Default)]
pub struct GpuPlan {
    /// Every kernel that a launch uses.
    pub kernels: Vec<Kernel>,
    /// Every weight that a launch uses.
    pub weights: Vec<Weight>,
    /// The model's inputs, packed, as requests provide them.
    pub inputs: Vec<IoTensor>,
    /// The model's outputs, packed.
    pub outputs: Vec<IoTensor>,
    /// The steps; each depends on all previous ones.
    pub steps: Vec<GpuStep>,
    /// Memory for intermediate values.
    pub arena_bytes: u64,
    /// Memory for the partial sums of split products, sufficient for every variant. Its content is
    /// not used after the step.
    pub workspace_bytes: u64,
}

/// An input or output of the model.
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

/// A kernel: a tile function with its shape, compiled as a real-time or a best-effort launch.
///
/// The module's text is `#include "wrap.cuh"`, then `source`, then `using Op = expression;` and a
/// macro of `wrap.cuh` that makes the entry points `rt`, or `be` and `be_grid`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelFacts {
    /// Text before the operator: includes of `kernels/`, and generated operators.
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

/// [`KernelFacts`] that are cheap to copy, to hash and to compare: a plan of a new size asks for
/// its kernels by their text, and most of them every size has.
#[derive(Clone)]
pub struct Kernel(Arc<HashedFacts>);

struct HashedFacts {
    hash: u64,
    facts: KernelFacts,
}

impl Kernel {
    /// A kernel of these facts.
    pub fn new(facts: KernelFacts) -> Kernel {
        let mut hasher = DefaultHasher::new();
        facts.hash(&mut hasher);
        Kernel(Arc::new(HashedFacts { hash: hasher.finish(), facts }))
    }

    /// The facts as one number, the same in every run of this program. Another build may give other
    /// numbers, but hardly ever the same one for other facts.
    pub fn facts_hash(&self) -> u64 {
        self.0.hash
    }
}

impl Deref for Kernel {
    type Target = KernelFacts;

    fn deref(&self) -> &KernelFacts {
        &self.0.facts
    }
}

impl PartialEq for Kernel {
    fn eq(&self, other: &Kernel) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.0.hash == other.0.hash && self.0.facts == other.0.facts)
    }
}

impl Eq for Kernel {}

impl Hash for Kernel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.facts.fmt(f)
    }
}

/// Bytes that all plans of a model share.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Equal keys mean equal bytes, in all plans made of one launch plan.
    pub key: WeightKey,
    /// Bytes on the device.
    pub bytes: u64,
    /// Computes the bytes. Expensive: called once per key.
    pub pack: Packer,
}

/// Identity of a packed weight: the value it is made of, and the packing.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightKey(pub String);

/// Computes the bytes of a weight.
#[derive(Clone)]
pub struct Packer(pub Arc<dyn Fn() -> Vec<u8> + Send + Sync>);

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Packer")
    }
}

impl Packer {
    /// The unchanged bytes of `tensor`.
    pub fn raw(tensor: Tensor) -> Packer {
        Packer(Arc::new(move || tensor.raw().map(|raw| raw.to_vec()).unwrap_or_default()))
    }
}

/// One step: what it computes, and the variants of its launch.
#[derive(Clone, Debug)]
pub struct GpuStep {
    /// The source step's name, for messages and traces.
    pub name: String,
    /// The operator in one word: `Conv`, `Attention`.
    pub op: String,
    /// Steps with equal signatures are the same problem, so that tuning one tunes the other.
    pub signature: String,
    /// The variants; at least one.
    pub choices: Vec<Launch>,
    /// Index of the variant for real time.
    pub rt: usize,
    /// Index of the variant for best effort: never a cluster.
    pub be: usize,
    /// Whether a best-effort launch may be preempted inside a tile, and if not, why.
    pub preemption: TilePreemption,
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes that must be moved: every operand once.
    pub bytes: u64,
    /// Memory it reads, without weights.
    pub reads: Vec<MemoryRange>,
    /// Memory it writes.
    pub writes: Vec<MemoryRange>,
}

/// Whether a step may be preempted inside a tile, which is then computed again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TilePreemption {
    /// Computing a tile again gives the same output.
    InsideTile,
    /// A tile that started must finish: the reason.
    AtTileBoundary(String),
}

/// One variant of a step: the launch that computes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// A short name of the variant, unique within the step: `64x64x64/w4`.
    pub variant: String,
    /// Index into [`GpuPlan::kernels`].
    pub kernel: usize,
    /// Tiles, which best effort computes and counts one by one.
    pub tiles: u32,
    /// Blocks of the real-time grid: one per tile, unless the kernel divides the work itself.
    pub rt_blocks: u32,
    /// Whether real-time blocks overlap the end of a tile with the next one.
    pub overlaps: bool,
    /// Blocks of a cluster, which run at the same time; 1 for none.
    pub cluster: u32,
    /// Arrival words of split products: zero before the launch and after it.
    pub arrivals: u32,
    /// How much of the workspace it uses.
    pub workspace_bytes: u64,
    /// The argument struct, with zeros where addresses go.
    pub args: Vec<u8>,
    /// The addresses to write into `args`.
    pub patches: Vec<Patch>,
    /// The tensor maps to write into `args`.
    pub maps: Vec<TensorMap>,
}

impl Launch {
    /// Whether best effort may prefer it to others: no blocks that must run together, and no
    /// overlap of tiles, which it computes one by one.
    pub fn suits_best_effort(&self) -> bool {
        self.cluster <= 1 && !self.overlaps
    }
}

/// An address within a launch's arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patch {
    /// Byte offset into the argument struct.
    pub at: u32,
    /// The address to write.
    pub to: MemoryLocation,
}

/// A tensor of halves in device memory that the copy engine reads in boxes (TMA, from capability
/// 9.0 on). The device encodes it into [`TensorMap::BYTES`] bytes of a launch's arguments. Boxes
/// are swizzled in rows of 128 bytes; what a box reads outside of the tensor is zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Byte offset into the argument struct, a multiple of [`TensorMap::BYTES`].
    pub at: u32,
    /// The tensor's first byte.
    pub to: MemoryLocation,
    /// Sizes, the fastest dimension first.
    pub sizes: Vec<u64>,
    /// Bytes between neighbours of each dimension but the fastest, multiples of 16.
    pub strides: Vec<u64>,
    /// What one copy reads.
    pub copy: CopyShape,
}

/// What one copy through a [`TensorMap`] reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyShape {
    /// Neighbours in every dimension; the fastest has 64 of them.
    Box(Vec<u32>),
    /// 64 channels of consecutive output pixels of a window over `[channels, width, height,
    /// images]`, at one of its taps.
    Pixels {
        /// Output pixels.
        count: u32,
        /// Column and row of the first output pixel's first tap.
        first: [i32; 2],
        /// Column and row of the last output pixel's first tap, relative to the last input pixel.
        last: [i32; 2],
        /// Columns and rows from one output pixel to the next.
        steps: [u32; 2],
    },
}

impl TensorMap {
    /// Bytes of an encoded map.
    pub const BYTES: usize = 128;

    /// Bytes from the tensor's first to its last.
    pub fn extent(&self) -> u64 {
        let last = |(size, stride): (&u64, &u64)| size.saturating_sub(1).saturating_mul(*stride);
        let rows: u64 = self.sizes.iter().skip(1).zip(&self.strides).map(last).sum();
        rows.saturating_add(self.sizes.first().map_or(0, |size| size.saturating_mul(2)))
    }
}

/// An address in device memory, relative to an allocation of the run or the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryLocation {
    /// Byte offset into the arena of intermediate values.
    Arena(u64),
    /// Byte offset into the workspace.
    Workspace(u64),
    /// The arrival words of this launch.
    Arrivals,
    /// A word of this step, zero before a run. A launch that meets an index out of range stores a
    /// non-zero number there and continues with a valid index; the run then fails.
    Fault,
    /// Index into [`GpuPlan::weights`] and byte offset.
    Weight(u32, u64),
    /// Index into [`GpuPlan::inputs`] and byte offset.
    Input(u32, u64),
    /// Index into [`GpuPlan::outputs`] and byte offset.
    Output(u32, u64),
}

/// A range of bytes that a step reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryRange {
    /// Its first byte.
    pub start: MemoryLocation,
    /// Its length; a strided access counts from its first to its last byte.
    pub bytes: u64,
}
