//! The state of a lowering: views of values, steps so far, weights in use.

use std::collections::HashMap;
use std::sync::Arc;

use graph::Graph;
use graph::ir::GraphNode;
use model::gpu::{GpuTarget, IoTensor, MemoryLocation, Packer, Precision, Weight, WeightKey};
use model::{Tensor, ValueId};

use device::LaunchChoices;

use super::PlanConstants;
use super::args::Address;
use super::bytes::ByteClaims;
use super::draft::StepDraft;
use super::elementwise;
use super::factored::FactoredView;
use super::memo::{StepKey, StepMemo, StepOperands};
use super::view::{BufferId, Element, View, packed_strides};

/// Why a node cannot be lowered.
pub type UnsupportedReason = String;

/// Every buffer begins at a multiple of this, so that vector loads of any kernel are aligned.
pub const ALIGNMENT: usize = 256;

/// The location of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BufferLocation {
    /// In the arena of intermediate values; the offset follows from its lifetime.
    Arena,
    /// A fixed location.
    Fixed(MemoryLocation),
}

/// A range of device memory.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Bytes.
    pub bytes: usize,
    /// Its location.
    pub location: BufferLocation,
}

/// A step whose buffers have no addresses yet.
#[derive(Clone, Debug)]
pub struct PendingStep {
    /// The source node's name.
    pub name: String,
    /// Its variants and operands.
    pub work: StepDraft,
}

/// A lowering in progress.
pub struct Lowering<'a> {
    /// The model; every size is a number.
    pub graph: &'a Graph,
    /// The device.
    pub target: GpuTarget,
    /// The variants that steps get.
    pub choices: LaunchChoices,
    /// Buffers by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Steps so far.
    pub steps: Vec<PendingStep>,
    /// Weights so far.
    pub weights: Vec<Weight>,
    /// How often each value is read.
    pub reads: Vec<usize>,
    /// The nodes that read each value.
    readers: Readers,
    views: Vec<Option<View>>,
    deferred: HashMap<ValueId, DeferredValue>,
    /// Values whose dimensions are joined from dimensions apart in memory, not copied yet.
    joined: HashMap<ValueId, FactoredView>,
    placements: HashMap<ValueId, View>,
    /// Which products are products of bytes.
    pub(super) bytes: ByteClaims,
    /// The node that writes each value.
    producers: Vec<Option<usize>>,
    weight_numbers: HashMap<WeightKey, u32>,
    /// Steps by what they compute.
    pub(super) memo: StepMemo,
    constants: &'a PlanConstants,
    node: String,
}

/// A value that is not computed until it is needed in memory: an expression over views.
#[derive(Clone, Debug)]
pub struct DeferredValue {
    /// The expression; inputs are indices into `inputs`.
    pub expr: elementwise::Expr,
    /// Its operands.
    pub inputs: Vec<View>,
    /// Sizes of the result.
    pub shape: Vec<usize>,
    /// How the result is stored.
    pub element: Element,
}

impl DeferredValue {
    /// The order of dimensions of its largest operand, the slowest first; of several, that of the
    /// one computed last, which following layers have too. Rows of matrices stay contiguous if they
    /// are in one operand: products and normalisations read them.
    fn natural_order(&self, buffers: &[Buffer]) -> Vec<usize> {
        let whole = self.inputs.iter().filter(|view| view.shape == self.shape);
        let computed = |view: &View| {
            let buffer = buffers.get(view.buffer.0 as usize);
            buffer.is_some_and(|buffer| buffer.location == BufferLocation::Arena)
        };
        let rows = |view: &View| {
            let rank = view.shape.len();
            rank <= 3 && view.memory_order().last() == rank.checked_sub(1).as_ref()
        };
        match whole.max_by_key(|view| (computed(view), rows(view), view.buffer)) {
            Some(view) => view.memory_order(),
            None => (0..self.shape.len()).collect(),
        }
    }

    /// A view of these sizes that is packed in the order of its largest operand.
    pub fn natural_view(&self, buffers: &[Buffer]) -> View {
        super::view::packed_in(&self.shape, &self.natural_order(buffers), self.element)
    }
}

impl<'a> Lowering<'a> {
    /// A lowering of `graph`. `constants` are those of the launch plan, the same in every lowering
    /// of it.
    pub fn new(
        graph: &'a Graph,
        (target, choices): (GpuTarget, LaunchChoices),
        constants: &'a PlanConstants,
    ) -> Lowering<'a> {
        Lowering {
            graph,
            target,
            choices,
            buffers: Vec::new(),
            steps: Vec::new(),
            weights: Vec::new(),
            reads: graph.reads(),
            readers: Readers::of(graph),
            views: vec![None; graph.values.len()],
            deferred: HashMap::new(),
            joined: HashMap::new(),
            placements: HashMap::new(),
            bytes: ByteClaims::of(graph),
            producers: graph.producers(),
            weight_numbers: HashMap::new(),
            memo: StepMemo::default(),
            constants,
            node: String::new(),
        }
    }

    /// How floating-point values are stored.
    pub fn float(&self) -> Element {
        match self.target.precision {
            Precision::F16 => Element::F16,
            Precision::BF16 => Element::BF16,
            Precision::F32 | Precision::TF32 => Element::F32,
        }
    }

    /// Sets the node that the following steps belong to.
    pub fn begin(&mut self, node: &GraphNode) {
        self.node.clone_from(&node.name);
    }

    /// The sizes of a value.
    pub fn shape(&self, id: ValueId) -> Result<Vec<usize>, UnsupportedReason> {
        let value = self.graph.value(id);
        let fixed = |dim: &graph::SymDim| dim.fixed().and_then(|size| usize::try_from(size).ok());
        let shape: Option<Vec<usize>> =
            value.shape.as_ref().and_then(|dims| dims.iter().map(fixed).collect());
        shape.ok_or_else(|| format!("the shape of '{}' depends on data", value.name))
    }

    /// How a value is stored between steps.
    pub fn element(&self, id: ValueId) -> Result<Element, UnsupportedReason> {
        let value = self.graph.value(id);
        Element::stored(value.dtype, self.target.precision)
            .ok_or_else(|| format!("'{}' holds strings", value.name))
    }

    /// A new buffer.
    pub fn buffer(&mut self, bytes: usize, location: BufferLocation) -> BufferId {
        let id = BufferId(self.buffers.len() as u32);
        self.buffers.push(Buffer { bytes: bytes.max(1).next_multiple_of(ALIGNMENT), location });
        id
    }

    /// A packed view of a new buffer for intermediate values.
    pub fn packed(&mut self, shape: &[usize], element: Element) -> View {
        let order: Vec<usize> = (0..shape.len()).collect();
        self.ordered(shape, &order, element)
    }

    /// A view of a new buffer whose dimensions are in `order`, slowest first.
    pub fn ordered(&mut self, shape: &[usize], order: &[usize], element: Element) -> View {
        let sizes: Vec<usize> = order.iter().map(|axis| shape[*axis]).collect();
        let packed = packed_strides(&sizes);
        let mut strides = vec![0; shape.len()];
        for (position, axis) in order.iter().enumerate() {
            strides[*axis] = packed[position];
        }
        let bytes = shape.iter().product::<usize>() * element.size();
        let buffer = self.buffer(bytes, BufferLocation::Arena);
        View { buffer, offset: 0, shape: shape.to_vec(), strides, element, slack: 0 }
    }

    /// A view of a new buffer with channels (dimension 1) fastest, each pixel rounded up to a
    /// multiple of `round` channels.
    pub fn image(&mut self, shape: &[usize], round: usize, element: Element) -> View {
        let channels = shape[1];
        let pixel = channels.next_multiple_of(round);
        let mut rounded = shape.to_vec();
        rounded[1] = pixel;
        let mut order: Vec<usize> = (0..shape.len()).filter(|axis| *axis != 1).collect();
        order.push(1);
        let mut view = self.ordered(&rounded, &order, element);
        view.shape[1] = channels;
        view
    }

    /// The view that a concatenation reserved for the value `id`, if any.
    pub fn placement(&self, id: ValueId) -> Option<&View> {
        self.placements.get(&id)
    }

    /// Reserves `view` for the value `id`.
    pub fn place(&mut self, id: ValueId, view: View) {
        self.placements.insert(id, view);
    }

    /// An image for the output `id`: the reserved one, or a new one.
    pub fn output_image(&mut self, id: ValueId) -> Result<View, UnsupportedReason> {
        if let Some(view) = self.placements.get(&id) {
            return Ok(view.clone());
        }
        let (shape, element) = (self.shape(id)?, self.element(id)?);
        Ok(self.image(&shape, 8, element))
    }

    /// The view of a value that is in memory or a constant; its element is the stored one.
    pub fn operand(&mut self, id: ValueId) -> Result<View, UnsupportedReason> {
        if let Some(value) = self.deferred.remove(&id) {
            let view = self.materialize(id, value)?;
            self.views[id.index()] = Some(view);
        }
        if let Some(value) = self.joined.remove(&id) {
            let view = self.copied(&value)?;
            self.views[id.index()] = Some(view);
        }
        if let Some(view) = &self.views[id.index()] {
            return Ok(view.clone());
        }
        let Some(tensor) = self.graph.constant(id) else {
            return Err(format!("'{}' is not computed yet", self.graph.value(id).name));
        };
        let element = self.element(id)?;
        let view = self.constant_view(id, &tensor.clone(), element)?;
        self.views[id.index()] = Some(view.clone());
        Ok(view)
    }

    /// The operand at `index` of `node`.
    pub fn input(&mut self, node: &GraphNode, index: usize) -> Result<View, UnsupportedReason> {
        let id = node.inputs.get(index).copied().flatten();
        self.operand(id.ok_or_else(|| format!("operand {index} is absent"))?)
    }

    /// The operand at `index` of `node`, if present.
    pub fn optional(
        &mut self,
        node: &GraphNode,
        index: usize,
    ) -> Result<Option<View>, UnsupportedReason> {
        match node.inputs.get(index).copied().flatten() {
            Some(id) => self.operand(id).map(Some),
            None => Ok(None),
        }
    }

    /// Defines the value `id` as `view`. If another view is reserved for it, the concatenation
    /// copies.
    pub fn define(&mut self, id: ValueId, view: View) {
        self.views[id.index()] = Some(view);
    }

    /// The last node that reads the value `id`, which is the only one where there is one read.
    pub fn reader(&self, id: ValueId) -> Option<&'a GraphNode> {
        self.readers_of(id).next_back()
    }

    /// The nodes that read the value `id`, each once, in their order.
    pub fn readers_of(&self, id: ValueId) -> impl DoubleEndedIterator<Item = &'a GraphNode> + '_ {
        let graph: &'a Graph = self.graph;
        self.readers.of_value(id).iter().map(move |index| &graph.nodes[*index as usize])
    }

    /// The number of the node that writes each value.
    pub(super) fn producers(&self) -> &[Option<usize>] {
        &self.producers
    }

    /// The node that writes the value `id`.
    pub fn producer(&self, id: ValueId) -> Option<&'a GraphNode> {
        Some(&self.graph.nodes[self.producers[id.index()]?])
    }

    /// Whether the value `id` is in memory.
    pub fn is_in_memory(&self, id: ValueId) -> bool {
        self.views[id.index()].is_some()
    }

    /// Whether the value `id` is in memory or an expression.
    pub fn is_defined(&self, id: ValueId) -> bool {
        self.views[id.index()].is_some()
            || self.deferred.contains_key(&id)
            || self.joined.contains_key(&id)
    }

    /// The operand at `index` of `node` without the copy that its dimensions as views would take.
    pub fn factored(
        &mut self,
        node: &GraphNode,
        index: usize,
    ) -> Result<FactoredView, UnsupportedReason> {
        let id = node.inputs.get(index).copied().flatten();
        match id.and_then(|id| self.joined.get(&id)) {
            Some(view) => Ok(view.clone()),
            None => Ok(FactoredView::new(&self.input(node, index)?)),
        }
    }

    /// Defines the value `id` as `view`: as a plain view, or copied when a reader needs one.
    pub fn define_factored(&mut self, id: ValueId, view: FactoredView) {
        match view.plain() {
            Some(plain) => self.define(id, plain),
            None => drop(self.joined.insert(id, view)),
        }
    }

    /// A copy of `view` in which every dimension has one stride.
    fn copied(&mut self, view: &FactoredView) -> Result<View, UnsupportedReason> {
        let shape = view.shape();
        let order = view.copy_order();
        let copy = self.ordered(&shape, &order, view.factors.element);
        self.copy_factors(&view.permuted(&order), &copy.permuted(&order))?;
        Ok(copy)
    }

    /// The value `id` with its dimensions joined from others, if it is not copied yet.
    pub fn joined_value(&self, id: ValueId) -> Option<&FactoredView> {
        self.joined.get(&id)
    }

    /// Copies `from` to `to`, of the same sizes.
    pub fn copy_factors(
        &mut self,
        from: &FactoredView,
        to: &View,
    ) -> Result<(), UnsupportedReason> {
        let pieces = FactoredView::new(to).reshaped(&from.factors.shape);
        let to = pieces.and_then(|pieces| pieces.plain()).ok_or("a copy of other sizes")?;
        self.copy_into(&from.factors, &to)
    }

    /// Defines the value `id` as an expression that is computed when it is needed.
    pub fn defer(&mut self, id: ValueId, value: DeferredValue) {
        self.deferred.insert(id, value);
    }

    /// The expression of a value that is not in memory yet, and may never be.
    pub fn take_deferred(&mut self, id: ValueId) -> Option<DeferredValue> {
        self.deferred.remove(&id)
    }

    /// Computes an expression into memory, in the dimension order of its largest operand.
    pub fn materialize(
        &mut self,
        id: ValueId,
        value: DeferredValue,
    ) -> Result<View, UnsupportedReason> {
        let view = match self.placements.get(&id) {
            Some(view) => view.clone(),
            None => {
                let order = value.natural_order(&self.buffers);
                self.ordered(&value.shape, &order, value.element)
            }
        };
        self.compute_into(&value, &view)?;
        Ok(view)
    }

    /// Computes an expression into `view`.
    pub fn compute_into(
        &mut self,
        value: &DeferredValue,
        view: &View,
    ) -> Result<(), UnsupportedReason> {
        let plain = matches!(value.expr, elementwise::Expr::Input(0)) && value.inputs.len() == 1;
        let work = if plain {
            self.copy(&value.inputs[0], view)?
        } else {
            self.chain(&value.expr, &value.inputs, view)?
        };
        self.push(work);
        Ok(())
    }

    /// [`elementwise::copy`].
    pub(super) fn copy(&mut self, from: &View, to: &View) -> Result<StepDraft, UnsupportedReason> {
        let mut operands = StepOperands::default();
        let key = StepKey::Copy([from, to].map(|view| operands.view(view.clone())));
        self.memo.step(key, &operands, |key| match key {
            StepKey::Copy([from, to]) => elementwise::copy(from, to),
            _ => Err("no copy".to_string()),
        })
    }

    /// [`elementwise::work`].
    fn chain(
        &mut self,
        expr: &elementwise::Expr,
        inputs: &[View],
        output: &View,
    ) -> Result<StepDraft, UnsupportedReason> {
        let mut operands = StepOperands::default();
        let views = inputs.iter().chain([output]).map(|view| operands.view(view.clone())).collect();
        let key = StepKey::Chain(format!("{expr:?}"), expr.clone(), views);
        self.memo.step(key, &operands, |key| match key {
            StepKey::Chain(_, expr, views) => {
                let (output, inputs) = views.split_last().ok_or("no result")?;
                elementwise::work(expr, inputs, output)
            }
            _ => Err("no chain".to_string()),
        })
    }

    /// Copies `from` to `to`, of the same sizes.
    pub fn copy_into(&mut self, from: &View, to: &View) -> Result<(), UnsupportedReason> {
        let work = self.copy(from, to)?;
        self.push(work);
        Ok(())
    }

    /// `view` packed in row-major order: itself, or a copy.
    pub fn in_row_major(&mut self, view: View) -> Result<View, UnsupportedReason> {
        if view.is_packed() {
            return Ok(view);
        }
        let packed = self.packed(&view.shape, view.element);
        self.copy_into(&view, &packed)?;
        Ok(packed)
    }

    /// Adds a step.
    pub fn push(&mut self, work: StepDraft) {
        self.steps.push(PendingStep { name: self.node.clone(), work });
    }

    /// The index of the weight that `pack` makes of `tensor`. `how` names the packing.
    pub fn weight(
        &mut self,
        tensor: &Tensor,
        how: &str,
        bytes: usize,
        pack: impl Fn(&Tensor) -> Vec<u8> + Send + Sync + 'static,
    ) -> u32 {
        let key = WeightKey(format!("{}:{how}", self.identity(tensor)));
        let tensor = tensor.clone();
        self.keyed_weight(key, bytes, Packer(Arc::new(move || pack(&tensor))))
    }

    /// The index of the weight with `key`.
    pub fn keyed_weight(&mut self, key: WeightKey, bytes: usize, pack: Packer) -> u32 {
        if let Some(number) = self.weight_numbers.get(&key) {
            return *number;
        }
        let number = self.weights.len() as u32;
        self.weights.push(Weight { key: key.clone(), bytes: bytes as u64, pack });
        self.weight_numbers.insert(key, number);
        number
    }

    /// A name for the elements of `tensor` that is the same in every lowering of one launch plan.
    pub fn identity(&self, tensor: &Tensor) -> String {
        let raw = tensor.raw().map(|raw| raw.as_ref()).unwrap_or_default();
        match self.constants.containing(raw) {
            Some((id, whole, 0)) if whole.size_bytes() == raw.len() => format!("v{}", id.0),
            Some((id, _, offset)) => format!("v{}+{offset}:{}", id.0, raw.len()),
            None => super::packing::content_name(tensor),
        }
    }

    /// The address of weight `number`.
    pub fn weight_address(number: u32) -> Address {
        Address::Fixed(MemoryLocation::Weight(number, 0))
    }

    /// A constant as a packed view in `element`.
    pub fn constant_view(
        &mut self,
        id: ValueId,
        tensor: &Tensor,
        element: Element,
    ) -> Result<View, UnsupportedReason> {
        let how = format!("{element:?}");
        if !super::packing::converts(tensor, element) {
            let name = &self.graph.value(id).name;
            return Err(format!("constant '{name}' of {} cannot be stored", tensor.dtype()));
        }
        let pack =
            move |tensor: &Tensor| super::packing::convert(tensor, element).unwrap_or_default();
        let (whole, offset) = self.whole_constant(tensor, element);
        let bytes = whole.len() * element.size();
        let number = self.weight(whole, &how, bytes, pack);
        let buffer = self.buffer(bytes, BufferLocation::Fixed(MemoryLocation::Weight(number, 0)));
        let shape = tensor.shape().to_vec();
        let strides = packed_strides(&shape);
        Ok(View { buffer, offset, shape, strides, element, slack: 0 })
    }

    /// The constant that `tensor` is a part of, and the first element of it: parts of one table
    /// that differ from length to length are one weight. Alone where its first element would not
    /// be aligned for vector loads.
    fn whole_constant<'t>(&self, tensor: &'t Tensor, element: Element) -> (&'t Tensor, usize)
    where
        'a: 't,
    {
        let raw = tensor.raw().map(|raw| raw.as_ref()).unwrap_or_default();
        let size = tensor.dtype().size_bytes().unwrap_or(1).max(1);
        match self.constants.containing(raw) {
            Some((_, whole, at))
                if whole.dtype() == tensor.dtype()
                    && at % size == 0
                    && (at / size * element.size()).is_multiple_of(ALIGNMENT) =>
            {
                (whole, at / size)
            }
            _ => (tensor, 0),
        }
    }

    /// The model's inputs as views of the request's bytes.
    pub fn declare_inputs(&mut self) -> Result<Vec<IoTensor>, UnsupportedReason> {
        let mut slots = Vec::new();
        for (index, id) in self.graph.inputs.iter().enumerate() {
            let slot = self.slot(*id)?;
            let exact = Element::exact(slot.dtype).ok_or("strings do not go onto a GPU")?;
            let location = BufferLocation::Fixed(MemoryLocation::Input(index as u32, 0));
            let buffer = self.buffer(slot.bytes as usize, location);
            let strides = packed_strides(&slot.shape);
            let shape = slot.shape.clone();
            let view =
                View { buffer, offset: 0, shape: shape.clone(), strides, element: exact, slack: 0 };
            let stored = self.element(*id)?;
            if stored == exact {
                self.define(*id, view);
            } else {
                let expr = elementwise::Expr::Input(0);
                self.defer(*id, DeferredValue { expr, inputs: vec![view], shape, element: stored });
            }
            slots.push(slot);
        }
        Ok(slots)
    }

    /// Copies the model's outputs to where the reply is read from.
    pub fn declare_outputs(&mut self) -> Result<Vec<IoTensor>, UnsupportedReason> {
        let mut slots = Vec::new();
        for (index, id) in self.graph.outputs.clone().into_iter().enumerate() {
            let slot = self.slot(id)?;
            let element = Element::exact(slot.dtype).ok_or("strings do not come from a GPU")?;
            self.node = format!("output {}", slot.name);
            let location = BufferLocation::Fixed(MemoryLocation::Output(index as u32, 0));
            let buffer = self.buffer(slot.bytes as usize, location);
            let strides = packed_strides(&slot.shape);
            let to =
                View { buffer, offset: 0, shape: slot.shape.clone(), strides, element, slack: 0 };
            if let Some(view) = self.joined.get(&id).cloned() {
                self.copy_factors(&view, &to)?;
                slots.push(slot);
                continue;
            }
            // An expression without another reader is computed directly into the reply.
            let work = match self.take_deferred(id) {
                Some(value) if self.reads[id.index()] == 1 => {
                    self.chain(&value.expr, &value.inputs, &to)?
                }
                other => {
                    if let Some(value) = other {
                        self.defer(id, value);
                    }
                    let from = self.operand(id)?;
                    self.copy(&from, &to)?
                }
            };
            if !to.is_empty() {
                self.push(work);
            }
            slots.push(slot);
        }
        Ok(slots)
    }

    fn slot(&self, id: ValueId) -> Result<IoTensor, UnsupportedReason> {
        let value = self.graph.value(id);
        let shape = self.shape(id)?;
        let size = value.dtype.size_bytes().ok_or("strings do not go onto a GPU")?;
        let count = model::tensor::element_count(&shape).map_err(|err| err.to_string())?;
        let bytes = count.checked_mul(size).ok_or("too large")? as u64;
        Ok(IoTensor { name: value.name.clone(), dtype: value.dtype, shape, bytes })
    }
}

/// The nodes that read each value: one list for all values, and where the nodes of each begin.
struct Readers {
    begins: Vec<u32>,
    nodes: Vec<u32>,
}

impl Readers {
    fn of(graph: &Graph) -> Readers {
        let mut begins = vec![0u32; graph.values.len() + 1];
        let is_first = |node: &GraphNode, at: usize| !node.inputs[..at].contains(&node.inputs[at]);
        let reads = |each: &mut dyn FnMut(usize, ValueId)| {
            for (index, node) in graph.nodes.iter().enumerate() {
                for (at, id) in node.inputs.iter().enumerate() {
                    if let Some(id) = id.filter(|_| is_first(node, at)) {
                        each(index, id);
                    }
                }
            }
        };
        reads(&mut |_, id| begins[id.index() + 1] += 1);
        for value in 1..begins.len() {
            begins[value] += begins[value - 1];
        }
        let mut nodes = vec![0; begins.last().map_or(0, |end| *end as usize)];
        let mut next = begins.clone();
        reads(&mut |index, id| {
            nodes[next[id.index()] as usize] = index as u32;
            next[id.index()] += 1;
        });
        Readers { begins, nodes }
    }

    fn of_value(&self, id: ValueId) -> &[u32] {
        &self.nodes[self.begins[id.index()] as usize..self.begins[id.index() + 1] as usize]
    }
}
