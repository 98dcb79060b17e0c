//! Steps over images in channel blocks, chosen when a plan is loaded.
//!
//! Convolutions read and write images in blocks, and so do the steps between them that can. A step
//! that cannot reads plain images: operands are converted before it, results after it. Values that
//! leave the plan are plain. Blocks of numbers and of bytes differ in their channels.

mod bytes;

use std::collections::HashMap;

use model::op::{Activation, Conv, GlobalPool, Op, Pool, Unary};
use model::plan::Dim;
use model::{DataType, LaunchPlan, Step, Tensor, ValueId};

use self::bytes::BlockedBytes;
use crate::byte_steps::{ByteStep, ByteSteps};
use crate::kernel::blocks::{self, DenseConv, DepthwiseConv, ImageForm};
use crate::kernel::bytes::blocks as byte_blocks;
use crate::kernel::invalid;
use crate::kernel::{self, Context, Inputs, Kernel, KernelError, KernelResult, Operand, StepFacts};
use crate::value::{Typed, Value};

/// How a step over blocks is computed.
enum BlockedKernel {
    Conv(Conv),
    Depthwise(Conv),
    Window(Pool),
    Global(GlobalPool),
    Scale {
        activation: Activation,
        channels: usize,
    },
    /// By the kernel of plain images: one element of the result depends on one of each operand.
    Elementwise,
    Concat,
    Bytes(BlockedBytes),
}

/// What is known of an image in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Blocked {
    channels: usize,
    /// Dimensions of the plain image.
    rank: usize,
    content: Content,
}

/// What the elements of an image are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    Numbers,
    /// Bytes, of which `lanes` lie side by side in a block.
    Bytes {
        /// Of the plain image.
        signed: bool,
        lanes: usize,
    },
}

/// A change of an operand before a step, or of a result after it.
#[derive(Clone, Copy, Debug)]
enum Conversion {
    ToBlocks(Blocked),
    ToPlain(Blocked),
}

/// A step that reads or writes images in blocks.
#[derive(Default)]
struct StepForm {
    /// `None` for the kernel of plain images.
    kernel: Option<BlockedKernel>,
    /// By the operand's position.
    operands: Vec<(usize, Conversion)>,
    result: Option<Conversion>,
}

/// The steps of a plan that read or write images in blocks.
#[derive(Default)]
pub(crate) struct ChannelBlocks {
    steps: HashMap<usize, StepForm>,
}

impl ChannelBlocks {
    /// Those of `plan`, apart from `byte_steps`.
    pub(crate) fn find(plan: &LaunchPlan, byte_steps: &ByteSteps) -> ChannelBlocks {
        let is_conv = |step: &Step| matches!(step.op, Op::Conv(_));
        let some = plan.steps.iter().filter(|step| is_conv(step)).nth(1).is_some()
            && blocks::channels_per_block().is_some();
        if !(some || byte_steps.values().any(bytes::is_convolution)) || plan.check().is_err() {
            return ChannelBlocks::default();
        }
        Finder::new(plan, byte_steps).found()
    }

    /// How many steps compute in blocks.
    #[cfg(test)]
    fn count(&self) -> usize {
        self.steps.values().filter(|form| form.kernel.is_some()).count()
    }

    /// The kernel of step `index`, if it is one of these.
    pub(crate) fn build(
        &self,
        index: usize,
        facts: &StepFacts,
        byte_step: Option<&ByteStep>,
    ) -> Option<Result<Kernel, KernelError>> {
        self.steps.get(&index).map(|form| form.build(facts, byte_step))
    }
}

impl StepForm {
    fn build(
        &self,
        facts: &StepFacts,
        byte_step: Option<&ByteStep>,
    ) -> Result<Kernel, KernelError> {
        let kernel = match &self.kernel {
            None | Some(BlockedKernel::Elementwise) => match byte_step {
                Some(byte_step) => byte_step.build()?,
                None => kernel::build(facts)?,
            },
            Some(BlockedKernel::Bytes(kernel)) => kernel.build(byte_step)?,
            Some(BlockedKernel::Conv(conv)) => {
                DenseConv::new(conv.clone(), weight_of(facts)?)?.into_kernel()
            }
            Some(BlockedKernel::Depthwise(conv)) => {
                DepthwiseConv::new(conv.clone(), weight_of(facts)?)?.into_kernel()
            }
            Some(BlockedKernel::Window(pool)) => blocks::build_window(pool.clone()),
            Some(BlockedKernel::Global(kind)) => blocks::build_global(*kind),
            Some(BlockedKernel::Scale { activation, channels }) => {
                blocks::build_scale(*activation, *channels)
            }
            Some(BlockedKernel::Concat) => {
                let step = Step { op: Op::Concat { axis: 1 }, ..facts.step.clone() };
                kernel::build(&StepFacts { step: &step, ..*facts })?
            }
        };
        Ok(self.converting(kernel))
    }

    /// `kernel` with the conversions before and after it.
    fn converting(&self, kernel: Kernel) -> Kernel {
        let (operands, result) = (self.operands.clone(), self.result);
        if operands.is_empty() && result.is_none() {
            return kernel;
        }
        let Kernel { run, resident_bytes, packed_inputs } = kernel;
        let converting = move |context: &Context, mut inputs: Inputs| -> KernelResult {
            for (position, conversion) in &operands {
                if inputs.optional(*position).is_some() {
                    let converted = conversion.apply(context, inputs.get(*position)?)?;
                    // Returns the memory of the former one, if nothing reads it later.
                    let former = inputs.take_operand(*position)?;
                    if let Operand::Owned(value) = former {
                        value.recycle(context.pool);
                    }
                    inputs.replace(*position, converted);
                }
            }
            let mut outputs = run.run(context, inputs)?;
            if let (Some(conversion), Some(output)) = (result, outputs.first_mut()) {
                let converted = conversion.apply(context, output)?;
                std::mem::replace(output, converted).recycle(context.pool);
            }
            Ok(outputs)
        };
        Kernel { run: Box::new(converting), resident_bytes, packed_inputs }
    }
}

impl Conversion {
    fn apply(self, context: &Context, value: &Value) -> Result<Value, KernelError> {
        let numbers = || f32::get(value).ok_or_else(|| invalid!("an image is {}", value.dtype()));
        let (Conversion::ToBlocks(form) | Conversion::ToPlain(form)) = self;
        let Blocked { channels, rank, content } = form;
        match (self, content) {
            (Conversion::ToBlocks(_), Content::Numbers) => {
                blocks::to_blocks(context, numbers()?, rank, channels)
            }
            (Conversion::ToPlain(_), Content::Numbers) => {
                blocks::to_plain(context, numbers()?, channels)
            }
            (Conversion::ToBlocks(_), Content::Bytes { lanes, .. }) => {
                byte_blocks::to_blocks(context, value, channels, lanes)
            }
            (Conversion::ToPlain(_), Content::Bytes { signed, .. }) => {
                byte_blocks::to_plain(context, value, channels, signed)
            }
        }
    }
}

fn weight_of<'a>(facts: &StepFacts<'a>) -> Result<&'a crate::value::TypedTensor<f32>, KernelError> {
    let id = facts.step.inputs.get(1).copied().flatten().ok_or("there are no weights")?;
    let value = facts.constants[id.index()].as_ref().ok_or("weights are not constant")?;
    f32::get(value).ok_or_else(|| "weights are no numbers".into())
}

/// Chooses the steps.
struct Finder<'a> {
    plan: &'a LaunchPlan,
    byte_steps: &'a ByteSteps,
    constants: HashMap<ValueId, &'a Tensor>,
    /// Values that are computed in blocks.
    forms: Vec<Option<Blocked>>,
    /// Steps over blocks.
    chosen: Vec<Option<BlockedKernel>>,
}

impl<'a> Finder<'a> {
    fn new(plan: &'a LaunchPlan, byte_steps: &'a ByteSteps) -> Finder<'a> {
        Finder {
            plan,
            byte_steps,
            constants: plan.constants.iter().map(|(id, tensor)| (*id, tensor)).collect(),
            forms: vec![None; plan.values.len()],
            chosen: plan.steps.iter().map(|_| None).collect(),
        }
    }

    fn found(mut self) -> ChannelBlocks {
        for index in 0..self.plan.steps.len() {
            self.choose(index);
        }
        self.leave_single_convolutions();
        self.with_conversions()
    }

    /// Chooses the form of step `index`, given those of the steps before it.
    fn choose(&mut self, index: usize) {
        let step = &self.plan.steps[index];
        let [Some(output)] = step.outputs[..] else { return };
        let byte_step = self.byte_steps.get(&output);
        let found = match self.plan.value(output).dtype {
            DataType::F32 if byte_step.is_some() => None,
            DataType::F32 => self.form_of(step),
            DataType::U8 | DataType::I8 => self.form_of_bytes(step, byte_step),
            _ => None,
        };
        if let Some((kernel, form)) = found {
            self.forms[output.index()] = Some(form);
            self.chosen[index] = Some(kernel);
        }
    }

    fn input(&self, step: &Step, position: usize) -> Option<ValueId> {
        step.inputs.get(position).copied().flatten()
    }

    /// The form of an operand of numbers.
    fn form(&self, step: &Step, position: usize) -> Option<Blocked> {
        self.forms[self.input(step, position)?.index()]
            .filter(|form| form.content == Content::Numbers)
    }

    fn form_of(&self, step: &Step) -> Option<(BlockedKernel, Blocked)> {
        match &step.op {
            Op::Conv(conv) => self.convolution(step, conv),
            Op::Pool(pool) if blocks::supports_window(pool) => {
                Some((BlockedKernel::Window(pool.clone()), self.form(step, 0)?))
            }
            Op::GlobalPool(kind) if blocks::supports_global(*kind) => {
                Some((BlockedKernel::Global(*kind), self.form(step, 0)?))
            }
            Op::ScaleShift { activation } => {
                let form = self.form(step, 0)?;
                let (activation, channels) = (*activation, form.channels);
                Some((BlockedKernel::Scale { activation, channels }, form))
            }
            Op::Unary(Unary::IsInf { .. } | Unary::IsNan | Unary::Not) => None,
            Op::Unary(_) | Op::Identity => Some((BlockedKernel::Elementwise, self.form(step, 0)?)),
            Op::Clip => {
                let limits = [1, 2].map(|at| self.input(step, at));
                let single = |id: &ValueId| self.is_single(*id);
                let form = self.form(step, 0)?;
                limits.iter().flatten().all(single).then_some((BlockedKernel::Elementwise, form))
            }
            Op::Binary(_) | Op::Variadic(_) | Op::PRelu => self.combination(step),
            Op::Concat { axis } => self.concatenation(step, *axis),
            _ => None,
        }
    }

    /// Whether `id` is a constant of one element.
    fn is_single(&self, id: ValueId) -> bool {
        self.constants.get(&id).is_some_and(|tensor| tensor.len() == 1)
    }

    fn rank(&self, id: ValueId) -> Option<usize> {
        match self.constants.get(&id) {
            Some(tensor) => Some(tensor.shape().len()),
            None => self.plan.value(id).shape.as_ref().map(Vec::len),
        }
    }

    fn convolution(&self, step: &Step, conv: &Conv) -> Option<(BlockedKernel, Blocked)> {
        let x = self.input(step, 0)?;
        let weight = self.constants.get(&self.input(step, 1)?)?;
        let numbers = weight.dtype() == DataType::F32 && self.plan.value(x).dtype == DataType::F32;
        let shape = weight.shape();
        let content = Content::Numbers;
        let form = Blocked { channels: *shape.first()?, rank: shape.len(), content };
        let (kernel, reads) = if blocks::supports_depthwise(conv, shape) {
            let reads = Blocked { channels: conv.groups, ..form };
            (BlockedKernel::Depthwise(conv.clone()), Some(reads))
        } else {
            let reads = match blocks::image_form(conv, shape)? {
                ImageForm::Blocks => Some(Blocked { channels: shape[1], ..form }),
                ImageForm::Plain => None,
            };
            (BlockedKernel::Conv(conv.clone()), reads)
        };
        let image_fits = self.forms[x.index()].is_none_or(|given| Some(given) == reads);
        let residual_fits = match self.input(step, 3) {
            None => true,
            Some(id) => self.combines(id, form),
        };
        (numbers && image_fits && residual_fits).then_some((kernel, form))
    }

    /// Whether operand `id` can be combined with an image of `form`, element by element.
    fn combines(&self, id: ValueId, form: Blocked) -> bool {
        self.plan.value(id).dtype == DataType::F32
            && match self.forms[id.index()] {
                Some(other) => other == form,
                None => self.rank(id).is_some_and(|rank| rank <= form.rank),
            }
    }

    /// A function of operands that are broadcast against each other.
    fn combination(&self, step: &Step) -> Option<(BlockedKernel, Blocked)> {
        let form = (0..step.inputs.len()).find_map(|at| self.form(step, at))?;
        let ids = || step.inputs.iter().flatten();
        if !ids().all(|id| self.combines(*id, form)) {
            return None;
        }
        // Where one number a channel meets a plain image, the image stays as it is.
        let computed = |id: &&ValueId| !self.constants.contains_key(id);
        let mut plain = ids().filter(computed).filter(|id| self.forms[id.index()].is_none());
        let small = |id: &ValueId| {
            let dims = self.plan.value(*id).shape.as_ref();
            dims.is_some_and(|dims| dims.iter().skip(2).all(|dim| *dim == Dim::Fixed(1)))
        };
        let all_small = ids().filter(|id| self.forms[id.index()].is_some()).all(small);
        if all_small && plain.any(|id| !small(id)) {
            return None;
        }
        Some((BlockedKernel::Elementwise, form))
    }

    /// Images one after the other along their channels.
    fn concatenation(&self, step: &Step, axis: i64) -> Option<(BlockedKernel, Blocked)> {
        let lanes = blocks::channels_per_block()?;
        let given: Vec<ValueId> = step.inputs.iter().copied().collect::<Option<_>>()?;
        let Blocked { rank, content, .. } = given.iter().find_map(|id| self.forms[id.index()])?;
        let axis = if axis < 0 { axis + rank as i64 } else { axis };
        let mut channels = 0;
        let mut blocked = 0;
        for (index, id) in given.iter().enumerate() {
            let own = match self.forms[id.index()] {
                Some(form) if form.rank == rank => {
                    blocked += 1;
                    form.channels
                }
                Some(_) => return None,
                None => self.channels(*id, rank)?,
            };
            // Blocks stay as they are, so that only the last one may be filled up.
            if own % lanes != 0 && index + 1 < given.len() {
                return None;
            }
            channels += own;
        }
        let form = Blocked { channels, rank, content };
        (axis == 1 && 2 * blocked >= given.len()).then_some((BlockedKernel::Concat, form))
    }

    /// The channels of a plain image, if they are known.
    fn channels(&self, id: ValueId, rank: usize) -> Option<usize> {
        let value = self.plan.value(id);
        let dims = value.shape.as_ref().filter(|dims| dims.len() == rank && rank >= 3)?;
        let is_image = matches!(value.dtype, DataType::F32 | DataType::U8 | DataType::I8);
        match dims[1] {
            Dim::Fixed(channels) if is_image && channels > 1 => Some(channels),
            _ => None,
        }
    }

    /// A convolution without another one beside it gains less than conversions cost.
    fn leave_single_convolutions(&mut self) {
        let count = self.plan.steps.len();
        let mut parents: Vec<usize> = (0..count).collect();
        fn root(parents: &mut [usize], mut at: usize) -> usize {
            while parents[at] != at {
                parents[at] = parents[parents[at]];
                at = parents[at];
            }
            at
        }
        let mut producers = HashMap::new();
        for (index, step) in self.plan.steps.iter().enumerate() {
            if self.chosen[index].is_none() {
                continue;
            }
            for id in step.inputs.iter().flatten() {
                if let Some(producer) = producers.get(id) {
                    let (a, b) = (root(&mut parents, *producer), root(&mut parents, index));
                    parents[a] = b;
                }
            }
            producers.extend(step.outputs.iter().flatten().map(|id| (*id, index)));
        }
        let mut convolutions = vec![0; count];
        for index in 0..count {
            let own = matches!(
                self.chosen[index],
                Some(BlockedKernel::Conv(_) | BlockedKernel::Depthwise(_))
            );
            // Of bytes, a single one gains more.
            let of_bytes = matches!(&self.chosen[index], Some(BlockedKernel::Bytes(kernel))
                if kernel.is_convolution());
            convolutions[root(&mut parents, index)] += usize::from(own) + 2 * usize::from(of_bytes);
        }
        for index in 0..count {
            if convolutions[root(&mut parents, index)] < 2 && self.chosen[index].take().is_some() {
                for id in self.plan.steps[index].outputs.iter().flatten() {
                    self.forms[id.index()] = None;
                }
            }
        }
    }

    /// The form in which step `index` reads operand `position`; `None` for a plain image.
    fn read_as(&self, index: usize, position: usize) -> Option<Blocked> {
        let step = &self.plan.steps[index];
        let kernel = self.chosen[index].as_ref()?;
        let form = self.forms[step.outputs.first().copied().flatten()?.index()]?;
        let id = self.input(step, position)?;
        match (kernel, position) {
            (BlockedKernel::Conv(conv), 0) => {
                let shape = self.constants.get(&self.input(step, 1)?)?.shape();
                let blocks = blocks::image_form(conv, shape)? == ImageForm::Blocks;
                blocks.then_some(Blocked { channels: *shape.get(1)?, ..form })
            }
            (BlockedKernel::Conv(_) | BlockedKernel::Depthwise(_), 0 | 3) => Some(form),
            (BlockedKernel::Conv(_) | BlockedKernel::Depthwise(_), _) => None,
            (BlockedKernel::Scale { .. }, _) => (position == 0).then_some(form),
            (BlockedKernel::Window(_) | BlockedKernel::Global(_), _) => Some(form),
            (BlockedKernel::Concat, _) => match self.forms[id.index()] {
                Some(own) => Some(own),
                None => Some(Blocked { channels: self.channels(id, form.rank)?, ..form }),
            },
            (BlockedKernel::Elementwise, _) => (!self.is_single(id)).then_some(form),
            (BlockedKernel::Bytes(kernel), _) => kernel.reads(position),
        }
    }

    /// The form that each value has between the steps that write and read it.
    fn stored_forms(&self) -> Vec<Option<Blocked>> {
        let mut readers: Vec<Vec<Option<Blocked>>> = vec![Vec::new(); self.plan.values.len()];
        for (index, step) in self.plan.steps.iter().enumerate() {
            for (position, id) in step.inputs.iter().enumerate() {
                if let Some(id) = id {
                    readers[id.index()].push(self.read_as(index, position));
                }
            }
        }
        let mut stored = vec![None; self.plan.values.len()];
        for step in &self.plan.steps {
            // Only the first result is converted.
            let Some(id) = step.outputs.first().copied().flatten() else { continue };
            let readers = &readers[id.index()];
            let computed = self.forms[id.index()];
            stored[id.index()] = match computed {
                Some(_) => computed.filter(|_| readers.contains(&computed)),
                // Converted once instead of by each of its readers.
                None => readers.first().copied().flatten().filter(|form| {
                    let all = readers.iter().all(|reader| *reader == Some(*form));
                    all && readers.len() > 1 && self.channels(id, form.rank) == Some(form.channels)
                }),
            };
        }
        for id in &self.plan.outputs {
            stored[id.index()] = None;
        }
        stored
    }

    fn with_conversions(mut self) -> ChannelBlocks {
        let stored = self.stored_forms();
        let conversion = |from: Option<Blocked>, to: Option<Blocked>| match (from, to) {
            (None, Some(form)) => Some(Conversion::ToBlocks(form)),
            (Some(form), None) => Some(Conversion::ToPlain(form)),
            _ => None,
        };
        let mut steps = HashMap::new();
        for (index, step) in self.plan.steps.iter().enumerate() {
            let mut form = StepForm::default();
            for (position, id) in step.inputs.iter().enumerate() {
                let Some(id) = id else { continue };
                let change = conversion(stored[id.index()], self.read_as(index, position));
                form.operands.extend(change.map(|change| (position, change)));
            }
            if let Some(id) = step.outputs.first().copied().flatten() {
                form.result = conversion(self.forms[id.index()], stored[id.index()]);
            }
            let touched = !form.operands.is_empty() || form.result.is_some();
            if touched || self.chosen[index].is_some() {
                steps.insert(index, form);
            }
        }
        for (index, form) in &mut steps {
            form.kernel = self.chosen[*index].take();
        }
        ChannelBlocks { steps }
    }
}

#[cfg(test)]
mod tests;
