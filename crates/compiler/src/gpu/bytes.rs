//! Quantized products: operands of bytes, sums of 32 bits, and what follows them in one step
//! (`kernels/bytes.cuh`, [ADR 42](../../../../docs/adr/042-products-of-bytes.md)).
//!
//! The weight is constant. Its zero points are subtracted when it is packed; what does not fit into
//! a byte then is a sum of several bytes, at further depths that read the same activations. The
//! zero point of the activations is an offset of each column.

mod behind;
mod source;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use graph::Graph;
use graph::content;
use graph::ir::GraphNode;
use model::gpu::{MemoryLocation, Packer, WeightKey};
use model::op::{Activation, Op};
use model::{DataType, Tensor, ValueId};

use super::lowering::{BufferLocation, Lowering, UnsupportedReason};
use super::packing::{content_name, weight_rows};
use super::product::{ByteColumns, ByteEpilogue, ByteProduct, CHUNK, PackedConv};
use super::view::{Element, View, packed_strides};
use behind::{Behind, Summand};
use source::{ByteSource, Scope, WeightLayout, ZeroPoint};

impl ByteSource {
    fn is_convolution(&self) -> bool {
        matches!(self.layout, WeightLayout::Convolution(_))
    }
}

/// How a product of bytes wants its activations in memory.
#[derive(Clone, Copy, Debug)]
enum ByteOrder {
    /// Channels fastest, pixels rounded up to so many.
    Image(usize),
    /// Rows rounded up to [`CHUNK`].
    Rows,
}

/// The products of bytes of a graph.
#[derive(Default)]
pub(super) struct ByteClaims {
    /// Values that nothing computes: they are part of a product.
    covered: HashSet<ValueId>,
    /// How activations are read.
    orders: HashMap<ValueId, ByteOrder>,
}

impl ByteClaims {
    /// Those of `graph`.
    pub fn of(graph: &Graph) -> ByteClaims {
        let mut claims = ByteClaims::default();
        let producers = graph.producers();
        let scope = Scope { graph, producers: &producers };
        for node in &graph.nodes {
            let Some(source) = scope.source(node) else { continue };
            claims.covered.extend(source.dequantized_weight);
            let order = match &source.layout {
                WeightLayout::Convolution(_) => {
                    // The rounding does not depend on the number of repetitions.
                    packed(graph, node, &source, 1).map(|conv| ByteOrder::Image(conv.rounding()))
                }
                WeightLayout::Matrix { .. } => Some(ByteOrder::Rows),
            };
            if let Some(order) = order {
                claims.orders.entry(source.a).or_insert(order);
            }
        }
        claims
    }

    /// Whether the value `id` is part of a product.
    pub fn covers(&self, id: ValueId) -> bool {
        self.covered.contains(&id)
    }
}

fn fixed(graph: &Graph, id: ValueId) -> Option<Vec<usize>> {
    content::fixed_shape(graph.shape(id)?)
}

fn packed(
    graph: &Graph,
    node: &GraphNode,
    source: &ByteSource,
    repeats: usize,
) -> Option<PackedConv> {
    let WeightLayout::Convolution(conv) = &source.layout else { return None };
    let (x, weight) = (fixed(graph, source.a)?, graph.constant(source.weight)?.shape());
    let output = fixed(graph, node.outputs.first().copied().flatten()?)?;
    // The activation belongs to the epilogue.
    let conv = model::op::Conv { activation: Activation::None, ..conv.clone() };
    PackedConv::of_bytes(&conv, &x, weight, &output, repeats).ok()
}

/// `graph` with those quantized constants as numbers that are not the weight of a product of bytes;
/// `None` where there are none.
pub(super) fn folded(graph: &Graph) -> Option<Graph> {
    let producers = graph.producers();
    let scope = Scope { graph, producers: &producers };
    let mut unclaimed: HashMap<ValueId, usize> = HashMap::new();
    for node in &graph.nodes {
        let (Op::DequantizeLinear { .. }, Some(Some(x))) = (&node.op, node.inputs.first()) else {
            continue;
        };
        if graph.constant(*x).is_some() {
            unclaimed.extend(node.outputs.iter().flatten().map(|id| (*id, 0)));
        }
    }
    if unclaimed.is_empty() {
        return None;
    }
    let operands = graph.nodes.iter().flat_map(|node| node.inputs.iter().flatten());
    for id in operands.chain(&graph.outputs) {
        if let Some(reads) = unclaimed.get_mut(id) {
            *reads += 1;
        }
    }
    for weight in graph.nodes.iter().filter_map(|node| scope.source(node)?.dequantized_weight) {
        if let Some(reads) = unclaimed.get_mut(&weight) {
            *reads -= 1;
        }
    }
    let mut numbers = graph.clone();
    let mut removed = HashSet::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let Some(output) = node.outputs.first().copied().flatten() else { continue };
        if unclaimed.get(&output).is_some_and(|reads| *reads > 0)
            && let Some(tensor) = dequantized(graph, node)
        {
            numbers.set_constant(output, tensor);
            removed.insert(index);
        }
    }
    let mut index = 0;
    numbers.nodes.retain(|_| {
        index += 1;
        !removed.contains(&(index - 1))
    });
    (!removed.is_empty()).then_some(numbers)
}

/// The numbers of a quantized constant.
fn dequantized(graph: &Graph, node: &GraphNode) -> Option<Tensor> {
    let Op::DequantizeLinear { axis } = node.op else { return None };
    let operand = |index: usize| graph.constant(node.inputs.get(index).copied().flatten()?);
    let (x, scale) = (operand(0)?, content::floats(operand(1)?)?);
    let zero = match node.inputs.get(2).copied().flatten() {
        Some(_) => content::ints(operand(2)?)?,
        None => vec![0; scale.len()],
    };
    let rank = x.shape().len();
    let axis = usize::try_from(if axis < 0 { axis + rank as i64 } else { axis }).ok()?;
    let (along, inner) = match scale.len() {
        1 => (1, 1),
        len if x.shape().get(axis) == Some(&len) => (len, x.shape()[axis + 1..].iter().product()),
        _ => return None,
    };
    if zero.len() != scale.len() || operand(1)?.shape().len() > 1 {
        return None;
    }
    let each = |(index, value): (usize, i64)| {
        let group = index / inner % along;
        f64::from((value - zero[group]) as f32 * scale[group])
    };
    let numbers: Vec<f64> = content::ints(x)?.into_iter().enumerate().map(each).collect();
    content::float_tensor(operand(1)?.dtype(), x.shape().to_vec(), &numbers)
}

/// A weight without its zero points.
#[derive(Clone)]
struct Centred {
    zero: Vec<i32>,
    columns: usize,
    /// Whether neighbours in memory are neighbouring columns.
    columns_fastest: bool,
}

impl Centred {
    fn of(source: &ByteSource) -> Centred {
        let columns_fastest = matches!(source.layout, WeightLayout::Matrix { transposed: false });
        Centred { zero: source.weight_zero.clone(), columns: source.columns, columns_fastest }
    }

    fn column(&self, index: usize, len: usize) -> usize {
        if self.columns_fastest { index % self.columns } else { index / (len / self.columns) }
    }

    fn values(&self, tensor: &Tensor) -> Vec<i16> {
        let bytes = content::ints(tensor).unwrap_or_default();
        let len = bytes.len();
        let each = |(index, byte): (usize, i64)| {
            let zero = match &self.zero[..] {
                [zero] => *zero,
                all => all[self.column(index, len)],
            };
            (byte as i32 - zero) as i16
        };
        bytes.into_iter().enumerate().map(each).collect()
    }

    /// The sum of each column.
    fn sums(&self, tensor: &Tensor) -> Vec<i32> {
        let values = self.values(tensor);
        let mut sums = vec![0i32; self.columns];
        for (index, value) in values.iter().enumerate() {
            let sum = &mut sums[self.column(index, values.len())];
            *sum = sum.wrapping_add(i32::from(*value));
        }
        sums
    }

    /// How many bytes the largest weight is a sum of.
    fn repeats(&self, tensor: &Tensor) -> usize {
        if tensor.dtype() == DataType::I8 && self.zero.iter().all(|zero| *zero == 0) {
            return 1;
        }
        let bytes = |value: &i16| match *value {
            value @ 0.. => usize::from(value.unsigned_abs()).div_ceil(127),
            value => usize::from(value.unsigned_abs()).div_ceil(128),
        };
        self.values(tensor).iter().map(bytes).max().unwrap_or(1).max(1)
    }

    /// A matrix as rows of its columns: the bytes of each weight, `repeats` times the depth.
    fn pack_matrix(&self, tensor: &Tensor, repeats: usize) -> Vec<u8> {
        let values = self.values(tensor);
        let depth = values.len() / self.columns;
        let row = (depth * repeats).next_multiple_of(CHUNK);
        let mut packed = vec![0; row * weight_rows(self.columns)];
        for (index, value) in values.iter().enumerate() {
            let column = self.column(index, values.len());
            let at = if self.columns_fastest { index / self.columns } else { index % depth };
            let mut rest = *value;
            for repeat in 0..repeats {
                let byte = rest.clamp(i8::MIN.into(), i8::MAX.into());
                packed[column * row + repeat * depth + at] = byte as i8 as u8;
                rest -= byte;
            }
        }
        packed
    }

    /// A name of the zero points.
    fn name(&self) -> String {
        match &self.zero[..] {
            [zero] => zero.to_string(),
            all => {
                let tensor = Tensor::from_vec(vec![all.len()], all.to_vec());
                tensor.as_ref().map_or(String::new(), content_name)
            }
        }
    }
}

/// One right operand of a product of bytes, and what follows it.
struct BytePart {
    source: ByteSource,
    behind: Behind,
    tensor: Tensor,
    centred: Centred,
}

impl BytePart {
    /// Whether the product is rows of floats that depend on nothing else.
    fn is_plain(&self) -> bool {
        let Behind { scale, between, residual, after, output, .. } = &self.behind;
        let plain = between.is_none() && residual.is_none() && *after == Activation::None;
        let columns = self.source.columns;
        !self.source.is_convolution()
            && plain
            && output.is_none()
            && scale.is_some()
            && weight_rows(columns) == columns
            && self.centred.repeats(&self.tensor) == 1
    }

    /// Whether it multiplies the same operand in the same way.
    fn is_like(&self, other: &BytePart) -> bool {
        let transposed = |part: &BytePart| match part.source.layout {
            WeightLayout::Matrix { transposed } => Some(transposed),
            WeightLayout::Convolution(_) => None,
        };
        self.source.a == other.source.a
            && self.source.a_zero == other.source.a_zero
            && transposed(self) == transposed(other)
            && self.behind.factor == other.behind.factor
            && self.behind.activation == other.behind.activation
    }
}

impl Lowering<'_> {
    /// A product of bytes with what follows it; false when `node` is none.
    pub fn byte_product(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let Some(own) = self.byte_part(node)? else { return Ok(false) };
        let repeats = own.centred.repeats(&own.tensor);
        let conv = match own.source.is_convolution() {
            true => {
                let conv = packed(self.graph, node, &own.source, repeats);
                Some(conv.ok_or("not a convolution")?)
            }
            false => None,
        };
        let others = self.byte_siblings(node, &own)?;
        let parts: Vec<BytePart> = [own].into_iter().chain(others).collect();
        let BytePart { source, behind, .. } = &parts[0];
        let a = match &conv {
            Some(conv) => self.byte_image(source.a, conv)?,
            None => self.byte_rows(source.a)?,
        };
        let weight = self.byte_weight(&parts, conv.as_ref(), repeats);
        let columns = self.byte_columns(&parts)?;
        let epilogue = self.byte_epilogue(behind)?;
        let output = match &parts[..] {
            [_] => self.byte_output(behind.last, conv.is_some(), &epilogue)?,
            _ => self.byte_output_of(&parts)?,
        };
        let outside = match source.a_zero {
            ZeroPoint::Constant(zero) => zero.to_le_bytes()[0],
            ZeroPoint::Value(_) => 0,
        };
        let product = ByteProduct {
            a: &a,
            weight: &weight,
            columns: &columns,
            epilogue: &epilogue,
            output: &output,
            outside,
        };
        let work = match &conv {
            Some(conv) => product.conv(&self.target, conv)?,
            None => product.matmul(&self.target, repeats)?,
        };
        self.push(work);
        let (last, mut first_column) = (output.shape.len() - 1, 0);
        for part in &parts {
            self.bytes.covered.extend(&part.behind.covered);
            let own = match &parts[..] {
                [_] => output.clone(),
                _ => output.sliced(last, first_column, part.source.columns, 1),
            };
            self.define(part.behind.last, own);
            first_column += part.source.columns;
        }
        Ok(true)
    }

    fn byte_part(&self, node: &GraphNode) -> Result<Option<BytePart>, UnsupportedReason> {
        let scope = Scope { graph: self.graph, producers: self.producers() };
        let Some(source) = scope.source(node) else { return Ok(None) };
        let tensor = self.graph.constant(source.weight).cloned().ok_or("no weight")?;
        let (behind, centred) = (self.behind(&source, Self::output(node)?), Centred::of(&source));
        Ok(Some(BytePart { source, behind, tensor, centred }))
    }

    /// Products of the same operand with other constants, which are then part of the same launch.
    fn byte_siblings(
        &self,
        node: &GraphNode,
        own: &BytePart,
    ) -> Result<Vec<BytePart>, UnsupportedReason> {
        let mut found = Vec::new();
        let free = |part: &BytePart| {
            let last = part.behind.last;
            self.placement(last).is_none() && !self.is_defined(last)
        };
        if !own.is_plain() || !free(own) {
            return Ok(found);
        }
        let rows = |part: &BytePart| -> Result<Vec<usize>, UnsupportedReason> {
            let mut shape = self.shape(part.behind.last)?;
            shape.pop();
            Ok(shape)
        };
        for other in &self.graph.nodes {
            if std::ptr::eq(other, node) || other.op != node.op {
                continue;
            }
            let Some(part) = self.byte_part(other)? else { continue };
            if part.is_like(own) && part.is_plain() && free(&part) && rows(&part)? == rows(own)? {
                found.push(part);
            }
        }
        Ok(found)
    }

    /// Puts `id` into memory in the order that a product of bytes reads, if one does.
    pub(super) fn keep_bytes(&mut self, id: ValueId) -> Result<(), UnsupportedReason> {
        match self.bytes.orders.get(&id).copied() {
            Some(order) => self.store_bytes(id, order),
            None => Ok(()),
        }
    }

    /// Computes an expression of bytes into memory.
    fn store_bytes(&mut self, id: ValueId, order: ByteOrder) -> Result<(), UnsupportedReason> {
        let Some(value) = self.take_deferred(id) else { return Ok(()) };
        if self.placement(id).is_some() {
            self.defer(id, value);
            return Ok(());
        }
        let view = match order {
            ByteOrder::Image(round) => self.rounded_image(&value.shape, round, value.element),
            ByteOrder::Rows => self.rounded_rows(&value.shape, value.element),
        };
        self.compute_into(&value, &view)?;
        self.define(id, view);
        Ok(())
    }

    fn rounded_image(&mut self, shape: &[usize], round: usize, element: Element) -> View {
        let mut image = self.image(shape, round, element);
        image.slack = shape[1].next_multiple_of(round) - shape[1];
        image
    }

    /// Rows that begin at multiples of [`CHUNK`].
    fn rounded_rows(&mut self, shape: &[usize], element: Element) -> View {
        let mut rounded = shape.to_vec();
        if let Some(last) = rounded.last_mut() {
            *last = last.next_multiple_of(CHUNK);
        }
        let order: Vec<usize> = (0..shape.len()).collect();
        View { shape: shape.to_vec(), ..self.ordered(&rounded, &order, element) }
    }

    /// The activations of a convolution, as they are or copied.
    fn byte_image(&mut self, id: ValueId, conv: &PackedConv) -> Result<View, UnsupportedReason> {
        self.store_bytes(id, ByteOrder::Image(conv.rounding()))?;
        let view = self.operand(id)?;
        if conv.reads(&view) {
            return Ok(view);
        }
        let image = self.rounded_image(&view.shape, conv.rounding(), view.element);
        self.copy_into(&view, &image)?;
        // Other readers take the copy too.
        self.define(id, image.clone());
        Ok(image)
    }

    /// The activations of a matrix product, as they are or copied.
    fn byte_rows(&mut self, id: ValueId) -> Result<View, UnsupportedReason> {
        self.store_bytes(id, ByteOrder::Rows)?;
        let view = self.operand(id)?;
        let last = view.shape.len() - 1;
        let even = |axis: usize| view.shape[axis] == 1 || view.strides[axis].is_multiple_of(8);
        let adjacent = view.shape[last] == 1 || view.strides[last] == 1;
        if adjacent && view.offset.is_multiple_of(8) && (0..last).all(even) {
            return Ok(view);
        }
        let rows = self.rounded_rows(&view.shape, view.element);
        self.copy_into(&view, &rows)?;
        self.define(id, rows.clone());
        Ok(rows)
    }

    /// Memory for an image of bytes that a product reads; `None` where none does.
    pub(super) fn byte_picture(&mut self, id: ValueId) -> Result<Option<View>, UnsupportedReason> {
        let Some(ByteOrder::Image(round)) = self.bytes.orders.get(&id).copied() else {
            return Ok(None);
        };
        let (shape, element) = (self.shape(id)?, self.element(id)?);
        let free = self.placement(id).is_none();
        Ok(free.then(|| self.rounded_image(&shape, round, element)))
    }

    /// A weight as a view of `len` elements.
    fn weight_row(&mut self, number: u32, len: usize, element: Element) -> View {
        let location = BufferLocation::Fixed(MemoryLocation::Weight(number, 0));
        let buffer = self.buffer(len * element.size(), location);
        let shape = vec![len];
        let strides = packed_strides(&shape);
        View { buffer, offset: 0, shape, strides, element, slack: 0 }
    }

    /// The weights of all parts, one after another.
    fn byte_weight(
        &mut self,
        parts: &[BytePart],
        conv: Option<&PackedConv>,
        repeats: usize,
    ) -> View {
        let len = match conv {
            Some(conv) => conv.weight_len(),
            None => {
                let columns: usize = parts.iter().map(|part| part.source.columns).sum();
                let depth = parts[0].tensor.len() / parts[0].source.columns;
                (depth * repeats).next_multiple_of(CHUNK) * weight_rows(columns)
            }
        };
        let name = |part: &BytePart| {
            let BytePart { tensor, centred, .. } = part;
            let how = match conv {
                Some(conv) => conv.packing(),
                None => centred.columns_fastest.to_string(),
            };
            format!("{}:bytes {how} {}", self.identity(tensor), centred.name())
        };
        let key = WeightKey(parts.iter().map(name).collect::<Vec<_>>().join("+"));
        let (conv, factors) = (conv.cloned(), factors(parts));
        let pack = move || -> Vec<u8> {
            let one = |(tensor, centred): &(Tensor, Centred)| match &conv {
                Some(conv) => conv.pack_bytes(&centred.values(tensor)),
                None => centred.pack_matrix(tensor, repeats),
            };
            factors.iter().flat_map(one).collect()
        };
        let number = self.keyed_weight(key, len, Packer(Arc::new(pack)));
        self.weight_row(number, len, Element::I8)
    }

    /// A row of floats, one for each column.
    fn float_columns(&mut self, values: Vec<f32>) -> Result<View, UnsupportedReason> {
        let len = values.len();
        let tensor = Tensor::from_vec(vec![len], values).map_err(|err| err.to_string())?;
        let pack = |tensor: &Tensor| tensor.raw().map(|raw| raw.to_vec()).unwrap_or_default();
        let number = self.weight(&tensor, "columns", len * 4, pack);
        Ok(self.weight_row(number, len, Element::F32))
    }

    /// A row of integers, one for each column: `factor` times the sum of its weights, plus the
    /// bias of the sums.
    fn sum_columns(&mut self, parts: &[BytePart], factor: i32) -> View {
        let len = parts.iter().map(|part| part.source.columns).sum::<usize>();
        let name = |part: &BytePart| {
            let BytePart { source, tensor, centred, .. } = part;
            let bias = match &source.sum_bias {
                Some(bias) => Tensor::from_vec(vec![bias.len()], bias.clone())
                    .as_ref()
                    .map_or(String::new(), content_name),
                None => "none".to_string(),
            };
            let layout = centred.columns_fastest;
            format!("{}:sums {layout} {} {bias}", self.identity(tensor), centred.name())
        };
        let names: Vec<String> = parts.iter().map(name).collect();
        let key = WeightKey(format!("{}*{factor}", names.join("+")));
        let biases: Vec<Option<Vec<i32>>> =
            parts.iter().map(|part| part.source.sum_bias.clone()).collect();
        let factors = factors(parts);
        let pack = move || -> Vec<u8> {
            let one = |((tensor, centred), bias): (&(Tensor, Centred), &Option<Vec<i32>>)| {
                let mut sums = centred.sums(tensor);
                for (column, sum) in sums.iter_mut().enumerate() {
                    let own = bias.as_ref().map_or(0, |bias| bias[column]);
                    *sum = own.wrapping_add(factor.wrapping_mul(*sum));
                }
                sums
            };
            let sums = factors.iter().zip(&biases).flat_map(one);
            sums.flat_map(i32::to_le_bytes).collect()
        };
        let number = self.keyed_weight(key, len * 4, Packer(Arc::new(pack)));
        self.weight_row(number, len, Element::I32)
    }

    fn byte_columns(&mut self, parts: &[BytePart]) -> Result<ByteColumns, UnsupportedReason> {
        let mut columns = ByteColumns::default();
        match parts[0].source.a_zero {
            ZeroPoint::Constant(0) if parts.iter().all(|part| part.source.sum_bias.is_none()) => {}
            ZeroPoint::Constant(zero) => {
                columns.offset = Some(self.sum_columns(parts, zero.wrapping_neg()));
            }
            ZeroPoint::Value(id) => {
                let sums = self.sum_columns(parts, 1);
                columns.zero = Some((self.operand(id)?, sums));
            }
        }
        let row = |of: fn(&Behind) -> &Option<Vec<f32>>, none: f32| -> Option<Vec<f32>> {
            let given = parts.iter().any(|part| of(&part.behind).is_some());
            let one = |part: &BytePart| match of(&part.behind) {
                Some(values) => values.clone(),
                None => vec![none; part.source.columns],
            };
            given.then(|| parts.iter().flat_map(one).collect())
        };
        if let Some(scale) = row(|behind| &behind.scale, 1.0) {
            columns.scale = Some(self.float_columns(scale)?);
        }
        if let Some(bias) = row(|behind| &behind.bias, 0.0) {
            columns.bias = Some(self.float_columns(bias)?);
        }
        if let Some(factor) = parts[0].behind.factor {
            columns.factor = Some(self.single_float(factor)?);
        }
        Ok(columns)
    }

    /// A number in single precision.
    fn single_float(&mut self, id: ValueId) -> Result<View, UnsupportedReason> {
        let view = self.operand(id)?;
        if view.element == Element::F32 {
            return Ok(view);
        }
        let wide = self.packed(&view.shape, Element::F32);
        self.copy_into(&view, &wide)?;
        Ok(wide)
    }

    fn byte_epilogue(&mut self, behind: &Behind) -> Result<ByteEpilogue, UnsupportedReason> {
        let residual = match behind.residual {
            None => None,
            Some(Summand::Bytes(id, quantum)) => {
                self.keep_bytes(id)?;
                Some((self.operand(id)?, Some(quantum)))
            }
            Some(Summand::Real(id)) => Some((self.operand(id)?, None)),
        };
        Ok(ByteEpilogue {
            activation: behind.activation,
            between: behind.between,
            residual,
            after: behind.after,
            output: behind.output,
        })
    }

    fn byte_output(
        &mut self,
        id: ValueId,
        image: bool,
        epilogue: &ByteEpilogue,
    ) -> Result<View, UnsupportedReason> {
        if let Some(view) = self.placement(id) {
            return Ok(view.clone());
        }
        let (shape, element) = (self.shape(id)?, self.element(id)?);
        let bytes = epilogue.output.is_some();
        Ok(match (image, bytes) {
            (true, true) => self.rounded_image(&shape, CHUNK, element),
            (true, false) => self.image(&shape, 8, element),
            (false, true) => self.rounded_rows(&shape, element),
            (false, false) => self.packed(&shape, element),
        })
    }

    /// Rows of the results of several parts.
    fn byte_output_of(&mut self, parts: &[BytePart]) -> Result<View, UnsupportedReason> {
        let (mut shape, element) =
            (self.shape(parts[0].behind.last)?, self.element(parts[0].behind.last)?);
        let columns = shape.last_mut().ok_or("a product of no dimension")?;
        *columns = parts.iter().map(|part| part.source.columns).sum();
        Ok(self.packed(&shape, element))
    }
}

/// The weights of `parts` and their zero points.
fn factors(parts: &[BytePart]) -> Vec<(Tensor, Centred)> {
    parts.iter().map(|part| (part.tensor.clone(), part.centred.clone())).collect()
}
