//! Kernels: operators bound to what is known when a plan is loaded.
//!
//! Each group of operators has a file with a `build` function. From the operator, the element types
//! and the constant operands, `build` returns a closure that computes the step, or the reason why
//! there is none. A kernel refuses as much as possible at load time rather than when it runs.

mod activation;
mod attention;
mod binary;
pub(crate) mod blocks;
pub(crate) mod bytes;
mod cast;
mod control;
mod conv;
mod conv_transpose;
mod dense;
mod distinct;
mod draw;
mod einsum;
mod elementwise;
mod gather;
pub(crate) mod gemm;
mod generate;
mod geometry;
mod integer;
mod layout;
mod linear_attention;
mod matmul;
#[cfg(test)]
mod memory_tests;
mod ml;
mod narrow;
mod norm;
mod operand;
mod parallel;
mod pool;
mod quantize;
mod reduce;
mod resample;
mod rnn;
mod select;
mod signal;
mod softmax;
mod spatial;
mod strided;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod testing_dense;
mod text;
mod unary;
mod wide;

pub(crate) use cast::convert;
use model::op::Op;
use model::{DataType, LaunchPlan, MemoryError, Step};
pub(crate) use pool::build_max_bytes;
use smallvec::SmallVec;
use thiserror::Error;

use crate::buffer_pool::BufferPool;
use crate::value::{Typed, TypedTensor, Value};

/// The outputs of a kernel in the operator's order, or the reason why it failed.
pub(crate) type KernelResult = Result<Outputs, KernelError>;

/// Why a kernel cannot be built or fails.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum KernelError {
    /// The operator does not accept its operands.
    #[error("{0}")]
    Invalid(String),
    /// There is not enough memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl From<String> for KernelError {
    fn from(reason: String) -> KernelError {
        KernelError::Invalid(reason)
    }
}

impl From<&str> for KernelError {
    fn from(reason: &str) -> KernelError {
        KernelError::Invalid(reason.to_string())
    }
}

/// A [`KernelError::Invalid`] with a formatted reason.
macro_rules! invalid {
    ($($argument:tt)*) => { $crate::kernel::KernelError::Invalid(format!($($argument)*)) };
}

pub(crate) use invalid;

/// A step's results, in the operator's order.
pub(crate) type Outputs = SmallVec<[Value; 1]>;

/// Computes a step from its operands. A trait of its own because a vtable of `Fn` also holds the
/// code for calls by value, which nothing needs.
pub(crate) trait KernelFn: Send + Sync {
    fn run(&self, context: &Context, inputs: Inputs) -> KernelResult;
}

impl<F: Fn(&Context, Inputs) -> KernelResult + Send + Sync> KernelFn for F {
    fn run(&self, context: &Context, inputs: Inputs) -> KernelResult {
        self(context, inputs)
    }
}

/// A step that can run any number of times.
pub(crate) struct Kernel {
    /// Computes the step.
    pub(crate) run: Box<dyn KernelFn>,
    /// Memory it holds for itself, such as packed weights.
    pub(crate) resident_bytes: usize,
    /// Constant operands it does not read when it runs: it holds them packed, or needs only their
    /// shape.
    pub(crate) packed_inputs: Vec<usize>,
}

impl Kernel {
    pub(crate) fn new(
        run: impl Fn(&Context, Inputs) -> KernelResult + Send + Sync + 'static,
    ) -> Kernel {
        Kernel { run: Box::new(run), resident_bytes: 0, packed_inputs: Vec::new() }
    }
}

/// Resources of a running kernel.
pub(crate) struct Context<'a> {
    /// Memory of values that are no longer needed.
    pub(crate) pool: &'a BufferPool,
}

/// One operand of a running step.
pub(crate) enum Operand<'a> {
    /// An optional operand that is missing.
    Absent,
    /// A later step reads it too.
    Shared(&'a Value),
    /// No later step reads it: it may be changed in place.
    Owned(Value),
}

/// A step's operands, in the operator's order. The memory of those that no later step reads and
/// that the kernel did not take returns to the pool when they are dropped.
pub(crate) struct Inputs<'a> {
    operands: SmallVec<[Operand<'a>; 4]>,
    pool: &'a BufferPool,
}

impl Drop for Inputs<'_> {
    fn drop(&mut self) {
        for operand in self.operands.drain(..) {
            if let Operand::Owned(value) = operand {
                value.recycle(self.pool);
            }
        }
    }
}

impl<'a> Inputs<'a> {
    pub(crate) fn new(operands: SmallVec<[Operand<'a>; 4]>, pool: &'a BufferPool) -> Inputs<'a> {
        Inputs { operands, pool }
    }

    /// How many operands there are, absent ones included.
    pub(crate) fn len(&self) -> usize {
        self.operands.len()
    }

    /// Operand `index`, if there is one.
    pub(crate) fn optional(&self, index: usize) -> Option<&Value> {
        match self.operands.get(index)? {
            Operand::Absent => None,
            Operand::Shared(value) => Some(value),
            Operand::Owned(value) => Some(value),
        }
    }

    /// Operand `index`.
    pub(crate) fn get(&self, index: usize) -> Result<&Value, KernelError> {
        self.optional(index).ok_or_else(|| invalid!("operand {index} is missing"))
    }

    /// Operand `index` as a tensor of `T`.
    pub(crate) fn typed<T: Typed>(&self, index: usize) -> Result<&TypedTensor<T>, KernelError> {
        let value = self.get(index)?;
        T::get(value).ok_or_else(|| invalid!("operand {index} is {}", value.dtype()))
    }

    /// Operand `index` as a tensor of `T`, if there is one.
    pub(crate) fn optional_typed<T: Typed>(
        &self,
        index: usize,
    ) -> Result<Option<&TypedTensor<T>>, KernelError> {
        self.optional(index).map(|_| self.typed(index)).transpose()
    }

    /// Operand `index` itself: moved if no later step reads it, copied otherwise.
    pub(crate) fn take(&mut self, index: usize) -> Result<Value, KernelError> {
        let slot =
            self.operands.get_mut(index).ok_or_else(|| invalid!("operand {index} is missing"))?;
        match std::mem::replace(slot, Operand::Absent) {
            Operand::Absent => Err(invalid!("operand {index} is missing")),
            Operand::Shared(value) => value.try_clone(),
            Operand::Owned(value) => Ok(value),
        }
    }

    /// Operand `index` as it is, to be an operand of another kernel.
    pub(crate) fn take_operand(&mut self, index: usize) -> Result<Operand<'a>, KernelError> {
        let slot =
            self.operands.get_mut(index).ok_or_else(|| invalid!("operand {index} is missing"))?;
        Ok(std::mem::replace(slot, Operand::Absent))
    }

    /// Replaces operand `index` by `value`.
    pub(crate) fn replace(&mut self, index: usize, value: Value) {
        if let Some(slot) = self.operands.get_mut(index) {
            *slot = Operand::Owned(value);
        }
    }

    /// Whether operand `index` may be changed in place.
    pub(crate) fn is_owned(&self, index: usize) -> bool {
        matches!(self.operands.get(index), Some(Operand::Owned(_)))
    }
}

/// What is known of a step when its plan is loaded.
pub(crate) struct StepFacts<'a> {
    pub(crate) plan: &'a LaunchPlan,
    pub(crate) step: &'a Step,
    /// Constant values by [`model::ValueId`].
    pub(crate) constants: &'a [Option<Value>],
}

impl StepFacts<'_> {
    /// The element type of operand `index`, if there is such an operand.
    pub(crate) fn input_dtype(&self, index: usize) -> Option<DataType> {
        let id = (*self.step.inputs.get(index)?)?;
        Some(self.plan.value(id).dtype)
    }

    /// The constant that operand `index` is, if it is one.
    pub(crate) fn constant(&self, index: usize) -> Option<&Value> {
        let id = (*self.step.inputs.get(index)?)?;
        self.constants[id.index()].as_ref()
    }

    /// The number of outputs up to the last one that is needed.
    pub(crate) fn output_count(&self) -> usize {
        self.step.outputs.iter().rposition(Option::is_some).map_or(0, |last| last + 1)
    }
}

/// The kernel of a step, or the reason why there is none.
pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    match &facts.step.op {
        Op::Identity => Ok(Kernel::new(|_, mut inputs| Ok(Outputs::from_iter([inputs.take(0)?])))),
        Op::Unary(unary) => unary::build(facts, *unary),
        Op::Binary(_) | Op::Compare(_) | Op::Variadic(_) | Op::Where => binary::build(facts),
        Op::Clip | Op::PRelu => binary::build(facts),
        Op::Cast(cast) => cast::build(facts, cast.to),
        Op::Decode { .. } | Op::Encode(_) | Op::BitCast { .. } => narrow::build(facts),
        Op::ScaleShift { .. } => norm::build(facts),
        Op::Conv(conv) => conv::build(facts, conv),
        Op::ConvTranspose(_) => conv_transpose::build(facts),
        Op::MatMul(_) | Op::Gemm(_) => matmul::build(facts),
        Op::Attention { scale } => attention::build(facts, *scale),
        Op::Einsum { equation } => einsum::build(facts, equation),
        Op::Pool(_) | Op::GlobalPool(_) => pool::build(facts),
        Op::BatchNorm { .. }
        | Op::LayerNorm { .. }
        | Op::RmsNorm { .. }
        | Op::InstanceNorm { .. }
        | Op::GroupNorm { .. }
        | Op::Lrn { .. }
        | Op::LpNorm { .. } => norm::build(facts),
        Op::Softmax(softmax) => softmax::build(facts, *softmax),
        Op::Reduce(_) | Op::ArgReduce(_) | Op::CumSum { .. } | Op::CumProd { .. } => {
            reduce::build(facts)
        }
        Op::Unique { .. } | Op::Det | Op::TensorScatter { .. } => distinct::build(facts),
        Op::LinearAttention(attention) => linear_attention::build(facts, *attention),
        Op::Signal(_) => signal::build(facts),
        Op::Spatial(_) => spatial::build(facts),
        Op::Draw(draw) => draw::build(facts, *draw),
        Op::Ml(ml) => ml::build(facts, *ml),
        Op::Text(_) => text::build(facts),
        Op::Control(control) => control::build(facts, control),
        Op::TopK { .. } | Op::NonZero | Op::Compress { .. } | Op::NonMaxSuppression { .. } => {
            select::build(facts)
        }
        Op::Shape { .. }
        | Op::Size
        | Op::Reshape { .. }
        | Op::Flatten { .. }
        | Op::Squeeze
        | Op::Unsqueeze
        | Op::Transpose { .. }
        | Op::Expand
        | Op::Tile
        | Op::Concat { .. }
        | Op::Split { .. }
        | Op::Slice
        | Op::Pad { .. }
        | Op::Trilu { .. }
        | Op::DepthToSpace { .. }
        | Op::SpaceToDepth { .. }
        | Op::ReverseSequence { .. } => layout::build(facts),
        Op::Gather { .. }
        | Op::GatherElements { .. }
        | Op::GatherNd { .. }
        | Op::ScatterElements { .. }
        | Op::ScatterNd { .. } => gather::build(facts),
        Op::OneHot { .. } | Op::Range | Op::ConstantOfShape { .. } | Op::EyeLike { .. } => {
            generate::build(facts)
        }
        Op::Resize(_) | Op::GridSample { .. } => resample::build(facts),
        Op::QuantizeLinear { .. } | Op::DequantizeLinear { .. } | Op::DynamicQuantizeLinear => {
            quantize::build(facts)
        }
        Op::MatMulInteger | Op::ConvInteger(_) | Op::QLinearMatMul | Op::QLinearConv(_) => {
            integer::build(facts)
        }
        Op::Rnn(rnn) => rnn::build(facts, rnn),
    }
}

/// The error of an operator without a kernel for its element types.
pub(crate) fn no_kernel(facts: &StepFacts) -> KernelError {
    let types: Vec<String> = (0..facts.step.inputs.len())
        .map(|index| facts.input_dtype(index).map_or("-".to_string(), |dtype| dtype.to_string()))
        .collect();
    invalid!("no kernel for element types ({})", types.join(", "))
}

/// Drops the constants that all kernels that read them hold in a packed form.
pub(crate) fn drop_packed(plan: &LaunchPlan, kernels: &[Kernel], constants: &mut [Option<Value>]) {
    let mut needed = vec![false; constants.len()];
    for id in &plan.outputs {
        needed[id.index()] = true;
    }
    for (step, kernel) in plan.steps.iter().zip(kernels) {
        for (position, id) in step.inputs.iter().enumerate() {
            if let Some(id) = id.filter(|_| !kernel.packed_inputs.contains(&position)) {
                needed[id.index()] = true;
            }
        }
    }
    for (constant, needed) in constants.iter_mut().zip(needed) {
        if !needed {
            *constant = None;
        }
    }
}
