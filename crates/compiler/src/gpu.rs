//! Lowers a launch plan to a GPU plan.
//!
//! The plan is bound to sizes, folded again (all shapes are numbers now), and lowered node by node:
//! values get views of device memory, steps get all variants of their launch. Products, pooling and
//! attention in half precision have specialised kernels; everything else, and every other
//! precision, uses general ones.

pub mod args;
pub mod attention;
pub mod bytes;
pub mod chain;
pub mod check;
pub mod concat;
pub mod conv;
pub mod depthwise;
pub mod dispatch;
pub mod draft;
pub mod elementwise;
pub mod factored;
pub mod index;
pub mod loop_nest;
pub mod lowering;
pub mod memory;
pub mod norm;
pub mod packed_conv;
pub mod packing;
pub mod pool;
pub mod product;
pub mod quantize;
pub mod recurrent;
pub mod reduce;
pub mod shape;
pub mod sum_behind;
pub mod template;
pub mod tile;
pub mod view;

pub mod window;

mod general;
mod memo;

use std::collections::HashMap;
use std::sync::Arc;

use device::{DeviceError, KernelCompiler, LaunchChoices, LoweringTemplate};
use graph::{Evaluator, Graph};
use model::gpu::{
    GpuPlan, GpuStep, GpuTarget, IoTensor, Kernel, Launch, MemoryLocation, MemoryRange, Patch,
    TensorMap, TilePreemption,
};
use model::{LaunchPlan, Tensor, ValueId};

use args::Address;
use draft::LaunchDraft;
use lowering::{BufferLocation, Lowering, PendingStep};
use memo::StepMemo;
use memory::Arena;
use template::PlanTemplate;
use view::View;

/// The headers that a kernel's module may include.
const HEADERS: &[(&str, &str)] = &[
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
    ("base.cuh", include_str!("../kernels/base.cuh")),
    ("byte_end.cuh", include_str!("../kernels/byte_end.cuh")),
    ("bytes.cuh", include_str!("../kernels/bytes.cuh")),
    ("chain.cuh", include_str!("../kernels/chain.cuh")),
    ("conv.cuh", include_str!("../kernels/conv.cuh")),
    ("conv_load.cuh", include_str!("../kernels/conv_load.cuh")),
    ("depthwise.cuh", include_str!("../kernels/depthwise.cuh")),
    ("entry.cuh", include_str!("../kernels/entry.cuh")),
    ("hopper.cuh", include_str!("../kernels/hopper.cuh")),
    ("hopper_bytes.cuh", include_str!("../kernels/hopper_bytes.cuh")),
    ("index.cuh", include_str!("../kernels/index.cuh")),
    ("norm.cuh", include_str!("../kernels/norm.cuh")),
    ("number.cuh", include_str!("../kernels/number.cuh")),
    ("pool.cuh", include_str!("../kernels/pool.cuh")),
    ("product.cuh", include_str!("../kernels/product.cuh")),
    ("recurrent.cuh", include_str!("../kernels/recurrent.cuh")),
    ("reduce.cuh", include_str!("../kernels/reduce.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("tensor.cuh", include_str!("../kernels/tensor.cuh")),
    ("tensor_float.cuh", include_str!("../kernels/tensor_float.cuh")),
    ("tensor_load.cuh", include_str!("../kernels/tensor_load.cuh")),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
    ("window.cuh", include_str!("../kernels/window.cuh")),
    ("wrap.cuh", include_str!("../kernels/wrap.cuh")),
];

/// Folds what depends only on constants; shared with the importer of models.
pub type SharedEvaluator = Arc<dyn Evaluator + Send + Sync>;

/// The compiler of a GPU device.
#[derive(Clone, Default)]
pub struct GpuCompiler {
    evaluator: Option<SharedEvaluator>,
}

impl GpuCompiler {
    /// A compiler that folds constants with `evaluator`.
    pub fn new(evaluator: Option<SharedEvaluator>) -> GpuCompiler {
        GpuCompiler { evaluator }
    }
}

impl KernelCompiler for GpuCompiler {
    fn lower_with(
        &self,
        plan: &LaunchPlan,
        sizes: &[(String, usize)],
        target: &GpuTarget,
        choices: LaunchChoices,
    ) -> Result<GpuPlan, Vec<DeviceError>> {
        let template = PlanTemplate::new(plan, target, self.evaluator.clone())?;
        template.lower_with(sizes, choices)
    }

    fn template(&self, plan: &LaunchPlan, target: &GpuTarget) -> Option<Arc<dyn LoweringTemplate>> {
        Some(Arc::new(PlanTemplate::new(plan, target, self.evaluator.clone()).ok()?))
    }

    fn headers(&self) -> &'static [(&'static str, &'static str)] {
        HEADERS
    }
}

/// The constants of a launch plan, found by the address of their bytes.
#[derive(Default)]
pub struct PlanConstants {
    /// First address, number and content, by address.
    all: Vec<(usize, ValueId, Tensor)>,
}

impl PlanConstants {
    /// Those of `plan`, whose bytes they share.
    pub fn of(plan: &LaunchPlan) -> PlanConstants {
        let address = |(id, tensor): &(ValueId, Tensor)| {
            tensor.raw().map(|raw| (raw.as_ptr() as usize, *id, tensor.clone()))
        };
        let mut all: Vec<_> = plan.constants.iter().filter_map(address).collect();
        all.sort_by_key(|(start, ..)| *start);
        PlanConstants { all }
    }

    /// The constant whose bytes include all of `raw`, and where in them `raw` begins.
    fn containing(&self, raw: &[u8]) -> Option<(ValueId, &Tensor, usize)> {
        let start = raw.as_ptr() as usize;
        let at = self.all.partition_point(|(first, ..)| *first <= start).checked_sub(1)?;
        let (first, id, tensor) = &self.all[at];
        let inside = !raw.is_empty() && start - first + raw.len() <= tensor.raw()?.len();
        inside.then_some((*id, tensor, start - first))
    }
}

/// Lowers `graph`, whose sizes are all numbers; or returns every unsupported node with the reason.
fn lower(
    graph: &Graph,
    target: &GpuTarget,
    constants: &PlanConstants,
    (choices, memo): (LaunchChoices, StepMemo),
) -> Result<GpuPlan, Vec<DeviceError>> {
    let folded = bytes::folded(graph);
    let graph = folded.as_ref().unwrap_or(graph);
    let mut lowering = Lowering::new(graph, (*target, choices), constants);
    lowering.memo = memo;
    let boundary = |reason: String| {
        let (step, op) = ("the model".to_string(), "inputs and outputs".to_string());
        vec![DeviceError::Unsupported { step, op, reason }]
    };
    let inputs = lowering.declare_inputs().map_err(boundary)?;
    lowering.plan_concats();
    let mut refused = Vec::new();
    for node in &graph.nodes {
        if let Err(reason) = lowering.node(node) {
            let (step, op) = (node.name.clone(), node.op.name());
            refused.push(DeviceError::Unsupported { step, op, reason });
            lowering.add_placeholder(node);
        }
    }
    if !refused.is_empty() {
        return Err(refused);
    }
    let outputs = lowering.declare_outputs().map_err(boundary)?;
    Ok(finish(lowering, inputs, outputs))
}

/// Plans memory and resolves the addresses of all steps.
fn finish(mut lowering: Lowering<'_>, inputs: Vec<IoTensor>, outputs: Vec<IoTensor>) -> GpuPlan {
    let arena = memory::plan(&lowering.buffers, &lowering.steps);
    let mut kernels = Kernels::default();
    let mut workspace_bytes = 0;
    let pending = std::mem::take(&mut lowering.steps);
    let mut steps = Vec::with_capacity(pending.len());
    for pending in pending {
        for draft in &pending.work.drafts {
            workspace_bytes = workspace_bytes.max(draft.workspace_bytes as u64);
        }
        steps.push(step(pending, &lowering, &arena, &mut kernels));
    }
    GpuPlan {
        kernels: kernels.all,
        weights: lowering.weights,
        inputs,
        outputs,
        steps,
        arena_bytes: arena.bytes,
        workspace_bytes,
    }
}

/// Kernels without duplicates.
#[derive(Default)]
struct Kernels {
    all: Vec<Kernel>,
    numbers: HashMap<Kernel, usize>,
}

impl Kernels {
    fn number(&mut self, kernel: Kernel) -> usize {
        let next = self.all.len();
        *self.numbers.entry(kernel).or_insert_with_key(|kernel| {
            self.all.push(kernel.clone());
            next
        })
    }
}

fn step(
    pending: PendingStep,
    lowering: &Lowering<'_>,
    arena: &Arena,
    kernels: &mut Kernels,
) -> GpuStep {
    let preemption = preemption(&pending);
    let PendingStep { name, work } = pending;
    let location = |address: Address| location_of(address, lowering, arena);
    let launch = |draft: LaunchDraft| Launch {
        variant: draft.variant,
        kernel: kernels.number(draft.kernel),
        tiles: draft.tiles as u32,
        rt_blocks: draft.rt_blocks as u32,
        overlaps: draft.overlaps,
        cluster: draft.cluster as u32,
        arrivals: draft.arrivals as u32,
        workspace_bytes: draft.workspace_bytes as u64,
        args: draft.args.0,
        patches: draft
            .args
            .1
            .into_iter()
            .filter_map(|(at, address)| Some(Patch { at, to: location(address)? }))
            .collect(),
        maps: draft
            .maps
            .into_iter()
            .filter_map(|(address, map)| Some(TensorMap { to: location(address)?, ..map }))
            .collect(),
    };
    // GPUs of one generation differ in the shared memory of a block.
    let most = lowering.target.block_shared_bytes();
    let fits = |draft: &LaunchDraft| draft.kernel.shared_bytes <= most;
    let none_fits = !work.drafts.iter().any(fits);
    let drafts = work.drafts.into_iter().filter(|draft| none_fits || fits(draft));
    let choices: Vec<Launch> = drafts.map(launch).collect();
    let single = || choices.iter().position(|launch| launch.cluster == 1);
    let be = choices.iter().position(Launch::suits_best_effort).or_else(single).unwrap_or(0);
    let ranges =
        |views: &[View]| views.iter().filter_map(|view| range(view, lowering, arena)).collect();
    let moved: usize =
        work.reads.iter().chain(&work.writes).map(|v| v.len() * v.element.size()).sum();
    GpuStep {
        name,
        op: work.op.to_string(),
        signature: work.signature,
        choices,
        rt: 0,
        be,
        preemption,
        flops: work.flops,
        bytes: moved as u64 + work.weight_bytes,
        reads: ranges(&work.reads),
        writes: ranges(&work.writes),
    }
}

/// A step may be preempted inside a tile unless it reads memory that it writes: computing the tile
/// again would then give another result.
fn preemption(pending: &PendingStep) -> TilePreemption {
    let work = &pending.work;
    if let Some(why) = &work.finish_tiles {
        return TilePreemption::AtTileBoundary(why.clone());
    }
    let overlap =
        work.writes.iter().any(|write| work.reads.iter().any(|read| !read.is_apart(write)));
    if overlap {
        return TilePreemption::AtTileBoundary("it reads memory that it writes".to_string());
    }
    TilePreemption::InsideTile
}

fn location_of(address: Address, lowering: &Lowering<'_>, arena: &Arena) -> Option<MemoryLocation> {
    match address {
        Address::Null => None,
        Address::Fixed(location) => Some(location),
        Address::Buffer(id, offset) => Some(match lowering.buffers[id.0 as usize].location {
            BufferLocation::Arena => {
                MemoryLocation::Arena(arena.offsets[id.0 as usize].unwrap_or(0) + offset)
            }
            BufferLocation::Fixed(MemoryLocation::Weight(number, start)) => {
                MemoryLocation::Weight(number, start + offset)
            }
            BufferLocation::Fixed(MemoryLocation::Input(index, start)) => {
                MemoryLocation::Input(index, start + offset)
            }
            BufferLocation::Fixed(MemoryLocation::Output(index, start)) => {
                MemoryLocation::Output(index, start + offset)
            }
            BufferLocation::Fixed(other) => other,
        }),
    }
}

fn range(view: &View, lowering: &Lowering<'_>, arena: &Arena) -> Option<MemoryRange> {
    let extent = view.extent();
    let size = view.element.size();
    let address = Address::Buffer(view.buffer, (extent.start * size) as u64);
    match location_of(address, lowering, arena)? {
        MemoryLocation::Weight(..) => None,
        start => Some(MemoryRange { start, bytes: ((extent.end - extent.start) * size) as u64 }),
    }
}
