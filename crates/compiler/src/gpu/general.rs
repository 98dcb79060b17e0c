//! Operators with general kernels: any sizes, strides and precision.

mod movement;
mod product;
mod reduction;

use graph::ir::GraphNode;
use model::op::Op;
use model::{DataType, ValueId};

use super::elementwise::{self, Expr};
use super::lowering::{Lowering, UnsupportedReason};
use super::view::{Element, View};
use super::{quantize, window};

impl Lowering<'_> {
    /// Lowers `node` to general kernels.
    pub fn general(&mut self, node: &GraphNode) -> Result<(), UnsupportedReason> {
        if self.general_product(node)? || self.general_reduction(node)? || self.movement(node)? {
            return Ok(());
        }
        match &node.op {
            Op::Pool(pool) => {
                let x = self.input(node, 0)?;
                let y = self.picture(Self::output(node)?)?;
                let places = match node.outputs.get(1).copied().flatten() {
                    Some(id) => Some(self.like(id, &y)?),
                    None => None,
                };
                let work = window::pool(pool, &x, &y, places.as_ref())?;
                self.finish(node, work, vec![Some(y), places])
            }
            Op::GlobalPool(pool) => {
                let x = self.input(node, 0)?;
                let y = self.new_output(node)?;
                let work = window::global_pool(*pool, &x, &y)?;
                self.finish(node, work, vec![Some(y)])
            }
            Op::Lrn { alpha, beta, bias, size } => {
                let x = self.input(node, 0)?;
                let y = self.like(Self::output(node)?, &x)?;
                let work = window::lrn(*size, (*alpha, *beta, *bias), &x, &y)?;
                self.finish(node, work, vec![Some(y)])
            }
            Op::Resize(resize) => {
                let x = self.input(node, 0)?;
                let floats = |index: usize| self.floats(node, index);
                let (region, scales) = (floats(1)?, floats(2)?);
                let sizes = self.ints(node, 3)?;
                let (region, scales) = (given(&region), given(&scales));
                let sizes = sizes.as_deref().filter(|sizes| !sizes.is_empty());
                let resize_axes = window::resize_axes(resize, &x.shape, region, scales, sizes)?;
                let y = self.picture(Self::output(node)?)?;
                let work = window::resize(resize, &resize_axes, &x, &y)?;
                self.finish(node, work, vec![Some(y)])
            }
            Op::GridSample { mode, padding, align_corners } => {
                let (x, grid) = (self.input(node, 0)?, self.input(node, 1)?);
                let y = self.picture(Self::output(node)?)?;
                let work = window::grid_sample(*mode, *padding, *align_corners, (&x, &grid), &y)?;
                self.finish(node, work, vec![Some(y)])
            }
            Op::ConstantOfShape { dtype, value } => {
                let y = self.new_output(node)?;
                let work = elementwise::fill(fill_value(*dtype, value)?, &y)?;
                self.finish(node, work, vec![Some(y)])
            }
            Op::BatchNorm { epsilon } => {
                let x = self.input(node, 0)?;
                let mut rows = Vec::new();
                for index in 1..5 {
                    rows.push(self.input(node, index)?);
                }
                let y = self.like(Self::output(node)?, &x)?;
                let rows = [&rows[0], &rows[1], &rows[2], &rows[3]];
                let work = quantize::batch_norm(*epsilon, &x, rows, &y)?;
                self.finish(node, work, vec![Some(y)])
            }
            Op::DynamicQuantizeLinear => self.dynamic_quantization(node),
            Op::Rnn(rnn) => self.recurrent(node, rnn),
            other => Err(format!("{} has no GPU kernel; --device cpu has one", other.name())),
        }
    }

    /// The id of the first output.
    pub(super) fn output(node: &GraphNode) -> Result<ValueId, UnsupportedReason> {
        node.outputs.first().copied().flatten().ok_or_else(|| "no output".to_string())
    }

    /// Memory for the first output, packed in row-major order.
    pub(super) fn new_output(&mut self, node: &GraphNode) -> Result<View, UnsupportedReason> {
        let id = Self::output(node)?;
        let (shape, element) = (self.shape(id)?, self.element(id)?);
        Ok(self.packed(&shape, element))
    }

    /// Memory for an image: channels fastest, or where a concatenation needs it.
    pub(super) fn picture(&mut self, id: ValueId) -> Result<View, UnsupportedReason> {
        if let Some(image) = self.byte_picture(id)? {
            return Ok(image);
        }
        let (shape, element) = (self.shape(id)?, self.element(id)?);
        if shape.len() == 4 && element.is_float() {
            return self.output_image(id);
        }
        if shape.len() < 2 {
            return Ok(self.packed(&shape, element));
        }
        Ok(self.image(&shape, 1, element))
    }

    /// Memory for `id` in the dimension order of `view`.
    pub(super) fn like(&mut self, id: ValueId, view: &View) -> Result<View, UnsupportedReason> {
        let (shape, element) = (self.shape(id)?, self.element(id)?);
        if shape.len() != view.shape.len() {
            return Ok(self.packed(&shape, element));
        }
        Ok(self.ordered(&shape, &view.memory_order(), element))
    }

    /// Adds the step and defines its outputs.
    pub(super) fn finish(
        &mut self,
        node: &GraphNode,
        work: super::draft::StepDraft,
        outputs: Vec<Option<View>>,
    ) -> Result<(), UnsupportedReason> {
        self.push(work);
        for (id, view) in node.outputs.iter().zip(outputs) {
            if let (Some(id), Some(view)) = (id, view) {
                self.define(*id, view);
            }
        }
        Ok(())
    }

    /// The constant floats of operand `index`, if present.
    fn floats(
        &self,
        node: &GraphNode,
        index: usize,
    ) -> Result<Option<Vec<f32>>, UnsupportedReason> {
        let Some(id) = node.inputs.get(index).copied().flatten() else { return Ok(None) };
        let constant = self.graph.constant(id).and_then(graph::content::floats);
        let name = &self.graph.value(id).name;
        constant.map(Some).ok_or_else(|| format!("'{name}' is only known when the model runs"))
    }

    /// Defines values that are known at compile time; false when one is not.
    pub(super) fn known_outputs(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let mut known = Vec::new();
        for id in node.outputs.iter().flatten() {
            let value = self.graph.value(*id);
            let content: Option<Vec<i64>> = value
                .content
                .as_ref()
                .filter(|_| value.dtype.is_integer())
                .and_then(|content| content.iter().map(graph::SymDim::fixed).collect());
            let Some(content) = content else { return Ok(false) };
            let shape = self.shape(*id)?;
            let Some(tensor) = graph::content::tensor_of(value.dtype, shape, &content) else {
                return Ok(false);
            };
            known.push((*id, tensor));
        }
        for (id, tensor) in &known {
            let element = self.element(*id)?;
            let view = self.constant_view(*id, tensor, element)?;
            self.define(*id, view);
        }
        Ok(!known.is_empty())
    }

    /// Gives the outputs of an unsupported node some memory, so that later nodes can be checked
    /// too.
    pub fn add_placeholder(&mut self, node: &GraphNode) {
        for id in node.outputs.iter().flatten() {
            if let (Ok(shape), Ok(element)) = (self.shape(*id), self.element(*id)) {
                let view = self.packed(&shape, element);
                self.define(*id, view);
            }
        }
    }
}

/// The operands that are present and not empty.
fn given(values: &Option<Vec<f32>>) -> Option<&[f32]> {
    values.as_deref().filter(|values| !values.is_empty())
}

/// The element a constant tensor is filled with.
fn fill_value(dtype: DataType, value: &[u8; 8]) -> Result<Expr, UnsupportedReason> {
    let size = dtype.size_bytes().ok_or("strings do not go onto a GPU")?;
    let raw = bytes(value, size);
    let tensor = model::Tensor::from_raw(dtype, vec![], raw).map_err(|err| err.to_string())?;
    if dtype == DataType::F64 {
        return Ok(Expr::Double(f64::from_le_bytes(*value)));
    }
    if let Some(floats) = graph::content::floats(&tensor) {
        return Ok(Expr::Float(floats[0]));
    }
    let element = Element::exact(dtype).ok_or("strings do not go onto a GPU")?;
    let number = graph::content::ints(&tensor).ok_or("a number beyond 64 bits")?;
    Ok(Expr::Integer(element, number[0]))
}

fn bytes(value: &[u8; 8], size: usize) -> bytes::Bytes {
    bytes::Bytes::copy_from_slice(&value[..size])
}
