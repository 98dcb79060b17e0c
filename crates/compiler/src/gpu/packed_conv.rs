//! Convolutions on tensor cores that `fast_conv` does not cover: grouped, transposed, of one or
//! three dimensions, in any 16-bit precision.

use graph::ir::GraphNode;
use model::Tensor;
use model::gpu::MemoryLocation;
use model::op::Op;

use super::lowering::{BufferLocation, Lowering, UnsupportedReason};
use super::packing;
use super::product::PackedConv;
use super::view::{Element, View};

impl Lowering<'_> {
    /// A convolution with constant weights, plain or transposed; false when `node` is none, or its
    /// operands are not for tensor cores.
    pub fn packed_conv(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let Some((conv, weight)) = self.packed_shape(node)? else { return Ok(false) };
        let element = self.float();
        let output_id = Self::output(node)?;
        let x = self.pixels(node, &conv)?;
        let residual = self.optional(node, 3)?;
        let bias_id = node.inputs.get(2).copied().flatten();
        let constant_bias = bias_id.is_none_or(|id| self.graph.constant(id).is_some());
        // Channels rounded up to eight: the next step then reads whole pixels.
        let columns = self.shape(output_id)?[1];
        let room = columns.next_multiple_of(8) - columns;
        let rounded = constant_bias
            && conv.is_single()
            && self.placement(output_id).is_none()
            && residual.as_ref().is_none_or(|view| view.slack >= room);
        let bias = match bias_id.and_then(|id| self.graph.constant(id).cloned()) {
            Some(bias) => Some(self.float_row_view(&bias)?),
            None => self.optional(node, 2)?,
        };
        let mut output = match self.placement(output_id) {
            Some(view) => view.clone(),
            None => {
                let shape = self.shape(output_id)?;
                self.image(&shape, 8, element)
            }
        };
        let bytes = conv.weight_len() * element.size();
        let how = format!("{} {element:?}", conv.packing());
        let packed = conv.clone();
        let pack = move |tensor: &Tensor| packed.pack(tensor, element).unwrap_or_default();
        let number = self.weight(&weight, &how, bytes, pack);
        let packed = self.weight_view(number, vec![conv.weight_len()], element);
        let extra = (bias.as_ref(), residual.as_ref());
        let work = conv.work(&self.target, (&x, &packed), extra, &output, rounded)?;
        self.push(work);
        output.slack = if rounded { room } else { 0 };
        self.define(output_id, output);
        Ok(true)
    }

    /// The convolution of `node` and its weights.
    fn packed_shape(
        &mut self,
        node: &GraphNode,
    ) -> Result<Option<(PackedConv, Tensor)>, UnsupportedReason> {
        let weight = node.inputs.get(1).copied().flatten();
        let Some(weight) = weight.and_then(|id| self.graph.constant(id).cloned()) else {
            return Ok(None);
        };
        let x = node.inputs.first().copied().flatten().ok_or("no input")?;
        let (x, output) = (self.shape(x)?, self.shape(Self::output(node)?)?);
        let conv = match &node.op {
            Op::Conv(spec) => PackedConv::conv(spec, &x, weight.shape(), &output),
            Op::ConvTranspose(spec) => PackedConv::transposed(spec, &x, weight.shape(), &output),
            _ => return Ok(None),
        };
        let residual = node.inputs.get(3).copied().flatten();
        if residual.is_some_and(|id| self.shape(id).ok().as_ref() != Some(&output)) {
            return Ok(None);
        }
        let half = matches!(self.float(), Element::F16 | Element::BF16);
        let element = self.element(Self::output(node)?)? == self.float();
        let fits = half && element && packing::converts(&weight, Element::F32);
        // What it cannot do, the general kernels report or compute.
        Ok(conv.ok().filter(|conv| fits && !conv.is_depthwise()).map(|conv| (conv, weight)))
    }

    /// The input with channels fastest, as the convolution reads it: itself or a copy.
    fn pixels(&mut self, node: &GraphNode, conv: &PackedConv) -> Result<View, UnsupportedReason> {
        let x = node.inputs.first().copied().flatten().ok_or("no input")?;
        let element = self.float();
        let room = |image: &mut View| {
            image.slack = image.shape[1].next_multiple_of(conv.rounding()) - image.shape[1];
        };
        if let Some(value) = self.take_deferred(x) {
            if self.placement(x).is_none() {
                let mut image = self.image(&value.shape, conv.rounding(), value.element);
                room(&mut image);
                self.compute_into(&value, &image)?;
                self.define(x, image);
            } else {
                self.defer(x, value);
            }
        }
        let view = self.operand(x)?;
        if view.element == element && conv.reads(&view) {
            return Ok(view);
        }
        let mut image = self.image(&view.shape, conv.rounding(), element);
        room(&mut image);
        self.copy_into(&view, &image)?;
        Ok(image)
    }

    /// A constant row of floats, rounded up to eight with zeros.
    fn float_row_view(&mut self, tensor: &Tensor) -> Result<View, UnsupportedReason> {
        let number = self.float_weight(tensor, 1.0)?;
        let mut view =
            self.weight_view(number, vec![tensor.len().next_multiple_of(8)], Element::F32);
        view.shape = vec![tensor.len()];
        Ok(view)
    }

    /// A weight as a packed view.
    fn weight_view(&mut self, number: u32, shape: Vec<usize>, element: Element) -> View {
        let bytes = shape.iter().product::<usize>() * element.size();
        let location = BufferLocation::Fixed(MemoryLocation::Weight(number, 0));
        let buffer = self.buffer(bytes, location);
        let strides = super::view::packed_strides(&shape);
        View { buffer, offset: 0, shape, strides, element, slack: 0 }
    }
}
