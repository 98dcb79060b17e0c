//! Row operators on packed halves: layer normalisation and softmax.

use graph::ir::GraphNode;
use model::Tensor;

use super::args::{Address, ArgsWriter};
use super::conv::{row_order, rows_of};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::loop_nest::address;
use super::lowering::{Lowering, UnsupportedReason};
use super::view::{Element, View};

const THREADS: usize = 128;
const ROWS_PER_TILE: usize = 4;

/// The widest row a warp holds in registers.
const WIDTH_MAX: usize = 2048;

/// `view` as packed rows, if a warp can hold one, and the order of the dimensions in which they are
/// rows: that of the memory if necessary.
fn warp_rows(view: &View, width: usize) -> Option<(View, Vec<usize>)> {
    let rows = view.len() / width.max(1);
    let order = row_order(view, &view.shape);
    let flat = rows_of(&view.permuted(&order), rows, width)?;
    let packed = width <= WIDTH_MAX && (rows == 1 || flat.strides[0] == width);
    packed.then_some((flat, order))
}

fn row_kernel(expression: String) -> KernelText {
    KernelText {
        source: "#include \"norm.cuh\"\n".to_string(),
        expression,
        threads: THREADS as u32,
        shared_bytes: 0,
    }
}

impl Lowering<'_> {
    /// Layer normalisation over the last dimension; false when the kernel does not support it.
    pub fn fast_layer_norm(
        &mut self,
        node: &GraphNode,
        axis: i64,
        epsilon: f32,
    ) -> Result<bool, UnsupportedReason> {
        let output_id = node.outputs.first().copied().flatten().ok_or("no output")?;
        let shape = self.shape(output_id)?;
        let last = axis == -1 || usize::try_from(axis).is_ok_and(|axis| axis + 1 == shape.len());
        let constant = |index: usize| {
            let id = node.inputs.get(index).copied().flatten();
            id.and_then(|id| self.graph.constant(id)).cloned()
        };
        let (scale, bias) = (constant(1), constant(2));
        let has_bias = node.inputs.get(2).copied().flatten().is_some();
        let alone = node.outputs[1..].iter().all(Option::is_none);
        let (Some(scale), true) = (scale, last && alone && (!has_bias || bias.is_some())) else {
            return Ok(false);
        };
        let width = shape.last().copied().unwrap_or(0);
        let input = self.input(node, 0)?;
        let rows = warp_rows(&input, width).filter(|_| scale.len() == width);
        let Some((input, order)) = rows else { return Ok(false) };
        let rows = input.shape[0];
        let gamma = self.float_weight(&scale, 1.0)?;
        let beta = match bias {
            Some(bias) => self.float_weight(&bias, 1.0)?,
            None => {
                let zeros = |scale: &Tensor| vec![0; scale.len() * 4];
                self.weight(&scale, "zeros", width * 4, zeros)
            }
        };
        let output = self.ordered(&shape, &order, Element::F16);
        let mut args = ArgsWriter::new();
        args.address(address(&input)).address(address(&output));
        args.address(Lowering::weight_address(gamma)).address(Lowering::weight_address(beta));
        args.int(rows).int(width).float(epsilon);
        args.address(Address::Null).address(Address::Null).address(Address::Null).fast_div(1);
        let kernel = row_kernel(format!("tiles::LayerNorm<false, {}>", width.div_ceil(256)));
        self.push(StepDraft {
            op: "LayerNorm",
            signature: format!("LayerNorm {rows}x{width}"),
            drafts: vec![LaunchDraft::plain(kernel, rows.div_ceil(ROWS_PER_TILE), args)],
            flops: 8 * input.len() as u64,
            reads: vec![input],
            writes: vec![output.clone()],
            weight_bytes: 8 * width as u64,
            finish_tiles: None,
        });
        self.define(output_id, output);
        Ok(true)
    }

    /// Softmax over the last dimension; false when the kernel does not support it.
    pub fn fast_softmax(&mut self, node: &GraphNode) -> Result<bool, UnsupportedReason> {
        let output_id = node.outputs.first().copied().flatten().ok_or("no output")?;
        let shape = self.shape(output_id)?;
        let width = shape.last().copied().unwrap_or(0);
        let input = self.input(node, 0)?;
        let Some((input, order)) = warp_rows(&input, width) else { return Ok(false) };
        let rows = input.shape[0];
        let output = self.ordered(&shape, &order, Element::F16);
        let mut args = ArgsWriter::new();
        args.address(address(&input)).address(address(&output)).int(rows).int(width);
        let kernel = row_kernel(format!("tiles::Softmax<{}>", width.div_ceil(256)));
        self.push(StepDraft {
            op: "Softmax",
            signature: format!("Softmax {rows}x{width}"),
            drafts: vec![LaunchDraft::plain(kernel, rows.div_ceil(ROWS_PER_TILE), args)],
            flops: 5 * input.len() as u64,
            reads: vec![input],
            writes: vec![output.clone()],
            weight_bytes: 0,
            finish_tiles: None,
        });
        self.define(output_id, output);
        Ok(true)
    }
}
