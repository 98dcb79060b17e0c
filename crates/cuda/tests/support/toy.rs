//! A compiler that turns any chain of steps into launches of one small kernel, to test the device
//! without the real compiler.

use std::sync::Arc;

use device::{DeviceError, KernelCompiler, LaunchChoices};
use model::gpu::{
    GpuPlan, GpuStep, GpuTarget, IoTensor, Kernel, KernelFacts, Launch, MemoryLocation,
    MemoryRange, Packer, Patch, TilePreemption, Weight, WeightKey,
};
use model::op::{Op, Unary};
use model::{DataType, Dim, LaunchPlan, Step, ValueId, ValueInfo};

/// Factor and summand of the kernel.
pub const SCALE: f32 = 0.5;
pub const SHIFT: f32 = 1.25;

/// Values a tile computes.
pub const TILE: usize = 128;

macro_rules! header {
    ($name:literal) => {
        ($name, include_str!(concat!("../../../compiler/kernels/", $name)))
    };
}

static HEADERS: &[(&str, &str)] = &[
    header!("base.cuh"),
    header!("wrap.cuh"),
    header!("entry.cuh"),
    ("toy.cuh", include_str!("toy.cuh")),
];

/// A chain to run: its steps, the work of each, and the number of buffers used in turn.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    pub steps: usize,
    pub rounds: i32,
    pub ring: usize,
    /// Steps must finish their tiles.
    pub finish: bool,
    /// The last step writes to an invalid address.
    pub wild: bool,
}

impl Default for Chain {
    fn default() -> Chain {
        Chain { steps: 8, rounds: 1, ring: 64, finish: false, wild: false }
    }
}

impl Chain {
    /// A plan of this chain over a vector whose length a request binds.
    pub fn plan(&self) -> Arc<LaunchPlan> {
        let info = |index: usize| ValueInfo {
            name: format!("v{index}"),
            dtype: DataType::F32,
            shape: (index == 0).then(|| vec![Dim::Symbol("n".to_string())]),
        };
        let Chain { rounds, ring, finish, wild, .. } = self;
        let step = |index: usize| Step {
            name: format!("toy {rounds} {ring} {finish} {wild}"),
            op: Op::Unary(Unary::Tanh),
            inputs: vec![Some(ValueId(index as u32))],
            outputs: vec![Some(ValueId(index as u32 + 1))],
            last_uses: vec![],
        };
        let mut plan = LaunchPlan {
            values: (0..=self.steps).map(info).collect(),
            constants: vec![],
            inputs: vec![ValueId(0)],
            outputs: vec![ValueId(self.steps as u32)],
            steps: (0..self.steps).map(step).collect(),
            warnings: Vec::new(),
        };
        plan.plan_lifetimes();
        Arc::new(plan)
    }

    /// The chain of a plan: read from the names that [`Chain::plan`] gave its steps, or the
    /// default.
    fn of(plan: &LaunchPlan) -> Chain {
        let mut chain = Chain { steps: plan.steps.len(), rounds: 200, ..Chain::default() };
        let name = plan.steps.first().map(|step| step.name.clone()).unwrap_or_default();
        if let ["toy", rounds, ring, finish, wild] = name.split(' ').collect::<Vec<_>>()[..] {
            chain.rounds = rounds.parse().expect("rounds");
            chain.ring = ring.parse().expect("ring");
            chain.finish = finish == "true";
            chain.wild = wild == "true";
        }
        chain
    }

    /// What the chain computes.
    pub fn reference(&self, inputs: &[f32]) -> Vec<f32> {
        let one = |x: &f32| (0..self.steps).fold(*x, |x, _| x.mul_add(SCALE, SHIFT));
        inputs.iter().map(one).collect()
    }
}

/// The compiler of chains.
pub struct ToyCompiler;

impl KernelCompiler for ToyCompiler {
    fn lower_with(
        &self,
        plan: &LaunchPlan,
        sizes: &[(String, usize)],
        _: &GpuTarget,
        _: LaunchChoices,
    ) -> Result<GpuPlan, Vec<DeviceError>> {
        if let Some((step, reason)) = refusal(plan) {
            let (step, op) = (step.name.clone(), step.op.name());
            let reason = reason.to_string();
            return Err(vec![DeviceError::Unsupported { step, op, reason }]);
        }
        let dims = plan.value(plan.inputs[0]).shape.clone().unwrap_or_default();
        let shape: Vec<usize> = dims
            .iter()
            .map(|dim| match dim {
                Dim::Fixed(size) => *size,
                _ => sizes.iter().find(|(name, _)| dim.to_string() == *name).map_or(1, |s| s.1),
            })
            .collect();
        Ok(lower(plan, &Chain::of(plan), shape))
    }

    fn headers(&self) -> &'static [(&'static str, &'static str)] {
        HEADERS
    }
}

/// A step that is not part of a chain, and why. Products and sums are accepted where the result is
/// not checked.
fn refusal(plan: &LaunchPlan) -> Option<(&Step, &'static str)> {
    let last = plan.steps.last()?;
    let input = plan.value(*plan.inputs.first()?);
    if plan.inputs.len() != 1 || plan.outputs.len() != 1 || input.dtype != DataType::F32 {
        return Some((last, "a chain has one input and one output of numbers"));
    }
    let fixed = |size: usize| Dim::Fixed(size);
    let known = |step: &Step| match &step.op {
        Op::Unary(Unary::Tanh) => true,
        Op::MatMul(_) => input.shape == Some(vec![fixed(192), fixed(192)]),
        Op::Binary(_) => input.shape == Some(vec![fixed(1)]),
        _ => false,
    };
    let step = plan.steps.iter().find(|step| !known(step))?;
    Some((step, "a chain multiplies and adds"))
}

/// The kernels of chains: the one that computes, and the one that faults the device.
pub fn kernels() -> Vec<Kernel> {
    ["toy::Scale", "toy::Wild"]
        .map(|expression| {
            Kernel::new(KernelFacts {
                source: "#include \"toy.cuh\"".to_string(),
                expression: expression.to_string(),
                threads: 128,
                shared_bytes: 0,
                args_bytes: 32,
            })
        })
        .to_vec()
}

fn lower(plan: &LaunchPlan, chain: &Chain, shape: Vec<usize>) -> GpuPlan {
    let count: usize = shape.iter().product();
    let bytes = (count * 4) as u64;
    let stride = bytes.next_multiple_of(256);
    let slot = |name: &str| IoTensor {
        name: name.to_string(),
        dtype: DataType::F32,
        shape: shape.clone(),
        bytes,
    };
    let mut weights = vec![Weight {
        key: WeightKey("scale".to_string()),
        bytes: 8,
        pack: Packer(Arc::new(|| [SCALE.to_le_bytes(), SHIFT.to_le_bytes()].concat())),
    }];
    for (id, tensor) in &plan.constants {
        weights.push(Weight {
            key: WeightKey(format!("constant {}", id.0)),
            bytes: tensor.size_bytes() as u64,
            pack: Packer::raw(tensor.clone()),
        });
    }
    let place = |index: usize| match index {
        0 => MemoryLocation::Input(0, 0),
        last if last == chain.steps => MemoryLocation::Output(0, 0),
        inner => MemoryLocation::Arena((inner % chain.ring) as u64 * stride),
    };
    let span = |index: usize| vec![MemoryRange { start: place(index), bytes }];
    let step = |index: usize| GpuStep {
        name: format!("scale {index}"),
        op: "Scale".to_string(),
        signature: format!("scale {count} {}", chain.rounds),
        choices: vec![launch(chain, index, count, place(index), place(index + 1))],
        rt: 0,
        be: 0,
        preemption: match chain.finish {
            false => TilePreemption::InsideTile,
            true => TilePreemption::AtTileBoundary("the test says so".to_string()),
        },
        flops: (count as u64) * 128 * chain.rounds as u64,
        bytes: 2 * bytes,
        reads: span(index),
        writes: span(index + 1),
    };
    GpuPlan {
        kernels: kernels(),
        weights,
        inputs: vec![slot("x")],
        outputs: vec![slot("y")],
        steps: (0..chain.steps).map(step).collect(),
        arena_bytes: stride * chain.ring.min(chain.steps) as u64,
        workspace_bytes: 0,
    }
}

fn launch(
    chain: &Chain,
    index: usize,
    count: usize,
    from: MemoryLocation,
    to: MemoryLocation,
) -> Launch {
    let mut args = vec![0; 32];
    args[24..28].copy_from_slice(&(count as i32).to_le_bytes());
    args[28..32].copy_from_slice(&chain.rounds.to_le_bytes());
    Launch {
        variant: "only".to_string(),
        kernel: usize::from(chain.wild && index + 1 == chain.steps),
        tiles: count.div_ceil(TILE) as u32,
        rt_blocks: count.div_ceil(TILE) as u32,
        overlaps: false,
        cluster: 1,
        arrivals: 0,
        workspace_bytes: 0,
        args,
        patches: vec![
            Patch { at: 0, to: from },
            Patch { at: 8, to },
            Patch { at: 16, to: MemoryLocation::Weight(0, 0) },
        ],
        maps: vec![],
    }
}
