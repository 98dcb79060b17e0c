//! Fused attention in half precision: operands of any outer strides, heads of up to 256.

use graph::ir::GraphNode;
use model::gpu::{GpuTarget, MemoryLocation};
use model::op::Op;
use model::{DataType, Tensor, ValueId};

use super::args::{Address, ArgsWriter};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::factored::{FactoredView, refined};
use super::loop_nest::address;
use super::lowering::{Lowering, UnsupportedReason};
use super::memo::{StepKey, StepOperands};
use super::tile::{ARRIVALS_MAX, WORKSPACE_BYTES_MAX};
use super::view::{Element, View, packed_in};

mod mask;
mod variant;

use mask::Visible;
use variant::{Extent, Variant};

/// The widest head of the kernel.
const WIDTH_MAX: usize = 256;

/// Outer dimensions of the kernel.
const OUTER: usize = 4;

/// Elements of a 16-byte copy: rows begin at multiples of it.
const CHUNK: usize = 8;

/// Operands of an attention. Queries, keys and values are `[.., tokens, width]`, the bias
/// broadcasts to the scores, the output has the full batch.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Queries.
    pub q: &'a View,
    /// Keys.
    pub k: &'a View,
    /// Values.
    pub v: &'a View,
    /// Added to the scores, or boolean: false excludes a key.
    pub bias: Option<&'a View>,
    /// The result.
    pub y: &'a View,
}

/// One outer dimension: its size, and the strides of queries, keys, values, output and bias.
type Outer = (usize, [usize; 5]);

/// The launch in the kernel's terms.
struct Problem {
    scale: f32,
    /// Query `i` sees the keys up to `i + offset`.
    causal: Option<usize>,
    extent: Extent,
    bias: Option<Element>,
    /// Whether the bias of two neighbouring keys is one aligned word.
    pairs: bool,
    outer: Vec<Outer>,
    rows: [usize; 5],
    bias_column: usize,
    addresses: [Address; 5],
}

/// Whether the kernel can copy rows of `view`: adjacent elements, beginning at multiples of 16
/// bytes.
fn has_aligned_rows(view: &View) -> bool {
    let last = view.shape.len() - 1;
    let outer = || view.shape.iter().zip(&view.strides).take(last);
    (view.strides[last] == 1 || view.shape[last] == 1)
        && view.offset.is_multiple_of(CHUNK)
        && outer().all(|(size, stride)| *size == 1 || stride.is_multiple_of(CHUNK))
}

impl Problem {
    /// `None` when the kernel does not support it.
    fn new(scale: f32, causal: Option<usize>, operands: &Operands) -> Option<Problem> {
        let Operands { q, k, v, bias, y } = *operands;
        let [batch @ .., queries, value_width] = &y.shape[..] else { return None };
        let (queries, value_width) = (*queries, *value_width);
        let (width, keys) = (*q.shape.last()?, k.shape[k.shape.len().checked_sub(2)?]);
        let shape = |rows: usize, columns: usize| [batch, &[rows, columns]].concat();
        let wide = [
            q.broadcast(&shape(queries, width))?,
            k.broadcast(&shape(keys, width))?,
            v.broadcast(&shape(keys, value_width))?,
            y.clone(),
        ];
        let bias = match bias {
            Some(bias) => Some(bias.broadcast(&shape(queries, keys))?),
            None => None,
        };
        let half = wide.iter().all(|view| view.element == Element::F16);
        let sizes = (1..=WIDTH_MAX).contains(&width) && (1..=WIDTH_MAX).contains(&value_width);
        let known = bias
            .as_ref()
            .is_none_or(|bias| matches!(bias.element, Element::F16 | Element::F32 | Element::Bool));
        let contiguous = value_width == 1 || y.strides[y.strides.len() - 1] == 1;
        let fits = wide.iter().chain(&bias).all(|view| view.extent().end <= i32::MAX as usize);
        let ready = half && sizes && known && contiguous && fits && queries > 0 && keys > 0;
        let usable_scale = scale > 0.0 && scale.is_finite();
        if !ready || !usable_scale || !wide[..3].iter().all(has_aligned_rows) {
            return None;
        }
        let rank = batch.len();
        let strides = |axis: usize| {
            let of = |view: &View| view.strides[axis];
            let bias = bias.as_ref().map_or(0, of);
            [of(&wide[0]), of(&wide[1]), of(&wide[2]), of(&wide[3]), bias]
        };
        let mut outer = merged((0..rank).map(|axis| (batch[axis], strides(axis))));
        let mut rows = strides(rank);
        let mut queries = queries;
        // One query each for several heads that share their keys: the heads become the rows.
        if queries == 1 && causal.is_none() {
            let shared = |(_, strides): &Outer| strides[1] == 0 && strides[2] == 0;
            if let Some(at) = outer.iter().position(shared) {
                let (count, [q, _, _, o, b]) = outer.remove(at);
                queries = count;
                (rows[0], rows[3], rows[4]) = (q, o, b);
            }
        }
        if outer.len() > OUTER {
            return None;
        }
        let bias_column = bias.as_ref().map_or(0, |bias| bias.strides[rank + 1]);
        let even = |stride: usize| stride.is_multiple_of(2);
        let pairs = bias.as_ref().is_some_and(|bias| {
            bias.element == Element::F16 && bias_column == 1 && even(keys) && even(bias.offset)
        }) && even(rows[4])
            && outer.iter().all(|(_, strides)| even(strides[4]));
        let count = outer.iter().map(|(size, _)| size).product();
        let extent = Extent { outer: count, queries, keys, width, value_width };
        let at = |view: &View| address(view);
        let addresses = [
            at(&wide[0]),
            at(&wide[1]),
            at(&wide[2]),
            at(&wide[3]),
            bias.as_ref().map_or(Address::Null, at),
        ];
        let bias = bias.map(|bias| bias.element);
        Some(Problem { scale, causal, extent, bias, pairs, outer, rows, bias_column, addresses })
    }

    /// `AttentionBias` of the kernel.
    fn bias_kind(&self) -> u32 {
        match self.bias {
            None => 0,
            Some(Element::F16) if self.pairs => 1,
            Some(Element::F16) => 2,
            Some(Element::F32) => 3,
            Some(_) => 4,
        }
    }

    fn args(&self, variant: &Variant) -> ArgsWriter {
        let Extent { queries, keys, .. } = self.extent;
        let blocks = queries.div_ceil(variant.queries());
        let split_keys = variant.split_keys(&self.extent);
        let splits = variant.splits(&self.extent);
        let when = |location| if splits > 1 { Address::Fixed(location) } else { Address::Null };
        let mut args = ArgsWriter::new();
        for address in self.addresses {
            args.address(address);
        }
        args.address(when(MemoryLocation::Workspace(0))).address(when(MemoryLocation::Arrivals));
        args.int(queries).int(keys);
        self.rows.iter().for_each(|stride| {
            args.int(*stride);
        });
        args.int(self.bias_column);
        // Missing dimensions have the size one, in front.
        let missing = OUTER - self.outer.len();
        for operand in 0..5 {
            for axis in 0..OUTER {
                let dimension = axis.checked_sub(missing).map(|axis| self.outer[axis]);
                args.int(dimension.map_or(0, |(_, strides)| strides[operand]));
            }
        }
        args.float(self.scale * std::f32::consts::LOG2_E);
        args.int(usize::from(self.causal.is_some())).int(self.causal.unwrap_or(0));
        args.int(splits).int(split_keys);
        args.fast_div(splits).fast_div(blocks);
        for axis in 1..OUTER {
            let size = axis.checked_sub(missing).map_or(1, |axis| self.outer[axis].0);
            args.fast_div(size);
        }
        args
    }

    fn draft(&self, variant: &Variant) -> LaunchDraft {
        let Extent { width, value_width, .. } = self.extent;
        let Variant { row_warps, key_warps, row_tiles, keys, .. } = variant;
        let kernel = KernelText {
            source: "#include \"attention.cuh\"\n".to_string(),
            expression: format!(
                "tiles::Attention<{width}, {value_width}, {row_warps}, {key_warps}, {row_tiles}, \
                 {keys}, {}>",
                self.bias_kind()
            ),
            threads: variant.threads() as u32,
            shared_bytes: variant.shared_bytes(&self.extent) as u32,
        };
        let mut draft = LaunchDraft::plain(kernel, variant.tiles(&self.extent), self.args(variant));
        draft.variant = variant.name(&self.extent);
        if variant.splits(&self.extent) > 1 {
            draft.arrivals = variant.output_tiles(&self.extent);
            draft.workspace_bytes = variant.workspace_bytes(&self.extent);
        }
        draft
    }

    fn signature(&self) -> String {
        let Extent { queries, keys, width, value_width, .. } = self.extent;
        let outer: Vec<String> =
            self.outer.iter().map(|(size, strides)| format!("{size}{strides:?}")).collect();
        format!(
            "Attention {queries}x{keys}x{width}x{value_width} {:?} {} {} causal {:?} bias {}",
            self.rows,
            self.bias_column,
            outer.join(" "),
            self.causal,
            self.bias_kind()
        )
    }
}

/// Dimensions without those of size one, neighbours joined where all operands allow it.
fn merged(dimensions: impl Iterator<Item = Outer>) -> Vec<Outer> {
    let mut out: Vec<Outer> = Vec::new();
    for (size, strides) in dimensions.filter(|(size, _)| *size != 1) {
        match out.last_mut() {
            Some((total, outer)) if (0..5).all(|i| outer[i] == strides[i] * size) => {
                (*total, *outer) = (*total * size, strides);
            }
            _ => out.push((size, strides)),
        }
    }
    out
}

/// The outer dimensions of queries, keys and values of the same rank, joined where possible.
fn merged_batch(views: &[View]) -> Vec<Outer> {
    let rank = views.iter().map(|view| view.shape.len()).min().unwrap_or(0).saturating_sub(2);
    let strides = |axis: usize| [0, 1, 2, 0, 0].map(|at: usize| views[at].strides[axis]);
    let size = |axis: usize| views.iter().map(|view| view.shape[axis]).max().unwrap_or(1);
    merged((0..rank).map(|axis| (size(axis), strides(axis))))
}

/// `softmax(scale * q @ k^T + bias) @ v` in one launch; `None` when the kernel does not support it.
/// With `causal`, query `i` sees the keys up to `i + causal`.
pub fn work(
    scale: f32,
    causal: Option<usize>,
    operands: &Operands,
    target: &GpuTarget,
) -> Option<StepDraft> {
    let problem = Problem::new(scale, causal, operands)?;
    let variants = variant::variants(&problem.extent, target);
    let possible = |variant: &&Variant| {
        variant.splits(&problem.extent) == 1
            || (variant.workspace_bytes(&problem.extent) <= WORKSPACE_BYTES_MAX
                && variant.output_tiles(&problem.extent) <= ARRIVALS_MAX)
    };
    let drafts: Vec<LaunchDraft> =
        variants.iter().filter(possible).map(|variant| problem.draft(variant)).collect();
    if drafts.is_empty() || drafts.iter().any(|draft| draft.tiles > i32::MAX as usize) {
        return None;
    }
    let Extent { outer, queries, keys, width, value_width } = problem.extent;
    let flops = 2 * (outer * queries) as u64 * (keys * (width + value_width)) as u64;
    let mut reads = vec![operands.q.clone(), operands.k.clone(), operands.v.clone()];
    reads.extend(operands.bias.cloned());
    Some(StepDraft {
        op: "Attention",
        signature: problem.signature(),
        drafts,
        reads,
        writes: vec![operands.y.clone()],
        flops: if causal.is_some() { flops / 2 } else { flops },
        weight_bytes: 0,
        finish_tiles: None,
    })
}

impl Lowering<'_> {
    /// `softmax(scale * q @ k^T + mask) @ v`; false when the kernel does not support it.
    pub fn fast_attention(
        &mut self,
        node: &GraphNode,
        scale: f32,
    ) -> Result<bool, UnsupportedReason> {
        let output = node.outputs.first().copied().flatten().ok_or("no output")?;
        let shape = self.shape(output)?;
        if self.float() != Element::F16 || shape.len() < 2 {
            return Ok(false);
        }
        let parts = self.attention_operands(node)?;
        let [q, k, v] = &parts;
        let matrices = parts.iter().all(|view| view.counts.len() >= 2);
        if !matrices || parts.iter().any(|view| view.factors.element != Element::F16) {
            return Ok(false);
        }
        let keys = k.shape()[k.counts.len() - 2];
        let (mask, causal) = match self.visible(node, shape[shape.len() - 2], keys) {
            Visible::All => (None, None),
            Visible::Causal(offset) => (None, Some(offset)),
            Visible::Unknown => (self.optional(node, 3)?, None),
        };
        let result = self.for_the_reader(output)?;
        let mut all = vec![q.clone(), k.clone(), v.clone(), FactoredView::new(&result)];
        if let Some(mask) = &mask {
            let last = shape.len() - 1;
            let scores = [&shape[..last], &[keys]].concat();
            let Some(mask) = mask.broadcast(&scores) else { return Ok(false) };
            all.push(FactoredView::new(&mask));
        }
        // Batches and heads that are apart in memory become outer dimensions of their own.
        let Some(views) = refined(&all, 2) else { return Ok(false) };
        let [q, k, v, y, mask @ ..] = &views[..] else { return Ok(false) };
        let (y, mask) = (y.clone(), mask.first().cloned());
        let q = self.aligned_rows(q.clone())?;
        let k = self.aligned_rows(k.clone())?;
        let v = self.aligned_rows(v.clone())?;
        let Some(work) = self.attention_step(scale, causal, [q, k, v, y], mask) else {
            return Ok(false);
        };
        self.push(work);
        self.define(output, result);
        Ok(true)
    }

    /// [`work`] on queries, keys, values and the result.
    fn attention_step(
        &mut self,
        scale: f32,
        causal: Option<usize>,
        views: [View; 4],
        bias: Option<View>,
    ) -> Option<StepDraft> {
        let mut operands = StepOperands::default();
        let views = views.into_iter().chain(bias).map(|view| operands.view(view)).collect();
        let target = self.target;
        let key = StepKey::Attention(scale, causal, views);
        let made = self.memo.step(key, &operands, |key| match key {
            StepKey::Attention(scale, causal, views) => {
                let [q, k, v, y, bias @ ..] = &views[..] else { return Err(()) };
                let operands = Operands { q, k, v, bias: bias.first(), y };
                work(*scale, *causal, &operands, &target).ok_or(())
            }
            _ => Err(()),
        });
        made.ok()
    }

    /// Queries, keys and values; joined dimensions are kept apart if the kernel can walk them.
    fn attention_operands(
        &mut self,
        node: &GraphNode,
    ) -> Result<[FactoredView; 3], UnsupportedReason> {
        let parts = [self.factored(node, 0)?, self.factored(node, 1)?, self.factored(node, 2)?];
        let walkable = |view: &FactoredView| {
            let tokens = view.counts.len().saturating_sub(2);
            let outer = view.dimensions().into_iter().take(tokens).flatten();
            view.last_are_plain(2) && outer.filter(|(size, _)| *size != 1).count() <= OUTER
        };
        let common = || refined(&parts, 2).map(|views| merged_batch(&views).len());
        if parts.iter().all(walkable) && common().is_some_and(|outer| outer <= OUTER) {
            return Ok(parts);
        }
        let plain = |view: View| FactoredView::new(&view);
        Ok([plain(self.input(node, 0)?), plain(self.input(node, 1)?), plain(self.input(node, 2)?)])
    }

    /// What a constant mask lets every query see.
    fn visible(&self, node: &GraphNode, queries: usize, keys: usize) -> Visible {
        let id = node.inputs.get(3).copied().flatten();
        let Some(id) = id else { return Visible::All };
        match self.graph.constant(id) {
            Some(mask) => mask::visible(mask, queries, keys),
            None => Visible::Unknown,
        }
    }

    /// `view`, or a copy whose rows the kernel can read.
    fn aligned_rows(&mut self, view: View) -> Result<View, UnsupportedReason> {
        if view.is_empty() || has_aligned_rows(&view) {
            return Ok(view);
        }
        let last = view.shape.len() - 1;
        let mut rounded = view.shape.clone();
        rounded[last] = rounded[last].next_multiple_of(CHUNK);
        let mut copy = self.packed(&rounded, view.element);
        copy.shape[last] = view.shape[last];
        self.copy_into(&view, &copy)?;
        Ok(copy)
    }

    /// Memory for `id`, `[.., tokens, width]`, in the order in which its reader has it packed: the
    /// transposition after an attention is then a view.
    pub fn for_the_reader(&mut self, id: ValueId) -> Result<View, UnsupportedReason> {
        let (shape, element) = (self.shape(id)?, self.element(id)?);
        let order = self.readers_order(id, &shape).unwrap_or_else(|| (0..shape.len()).collect());
        Ok(self.ordered(&shape, &order, element))
    }

    /// The order of dimensions in which the views that follow `id` end packed.
    fn readers_order(&self, id: ValueId, shape: &[usize]) -> Option<Vec<usize>> {
        let rank = shape.len();
        let chain = self.views_behind(id);
        if chain.is_empty() || !(3..=5).contains(&rank) {
            return None;
        }
        permutations(rank - 1).into_iter().find_map(|mut order| {
            order.push(rank - 1);
            let mut view = packed_in(shape, &order, Element::F16);
            for (op, after, _) in &chain {
                view = match op {
                    Op::Transpose { perm: Some(perm) } if perm.len() == view.shape.len() => {
                        view.permuted(perm)
                    }
                    Op::Transpose { .. } => return None,
                    _ => view.reshaped(after)?,
                };
            }
            view.is_packed().then_some(order)
        })
    }

    /// The chain of operators behind `id` that only change its view, with the sizes and the value
    /// after each.
    pub fn views_behind(&self, id: ValueId) -> Vec<(&Op, Vec<usize>, ValueId)> {
        let mut chain = Vec::new();
        let mut id = id;
        while self.reads[id.index()] == 1 && chain.len() < 8 {
            let reader = self.reader(id).filter(|node| node.inputs.first() == Some(&Some(id)));
            let Some(node) = reader.filter(|node| node.op.only_moves()) else { break };
            let Some(next) = node.outputs.first().copied().flatten() else { break };
            let Ok(shape) = self.shape(next) else { break };
            chain.push((&node.op, shape, next));
            id = next;
        }
        chain
    }
}

/// Every order of `0..count`, the natural one first.
fn permutations(count: usize) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for _ in 0..count {
        let longer = |head: &Vec<usize>| -> Vec<Vec<usize>> {
            let free = (0..count).filter(|axis| !head.contains(axis));
            free.map(|axis| [head.as_slice(), &[axis]].concat()).collect()
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

/// The numbers of a mask: zero or less.
fn numbers(tensor: &Tensor) -> Option<Vec<f32>> {
    match tensor.dtype() {
        DataType::Bool => {
            let keep = |byte: &u8| if *byte != 0 { 0.0 } else { f32::NEG_INFINITY };
            Some(tensor.raw()?.iter().map(keep).collect())
        }
        DataType::F32 => tensor.to_vec::<f32>(),
        DataType::F16 => {
            let wide = |pair: &[u8]| half::f16::from_le_bytes([pair[0], pair[1]]).to_f32();
            Some(tensor.raw()?.chunks_exact(2).map(wide).collect())
        }
        _ => None,
    }
}
