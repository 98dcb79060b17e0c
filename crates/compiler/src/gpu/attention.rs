//! Fused attention with heads of 64, half precision.

use graph::ir::GraphNode;

use super::args::{Address, ArgsWriter};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::loop_nest::address;
use super::lowering::{Lowering, UnsupportedReason};
use super::view::{Element, View};

const WIDTH: usize = 64;

/// The stride of tokens when heads are adjacent in a token's row; `None` for another order.
fn token_stride(view: &View) -> Option<usize> {
    let [batch, heads, tokens, WIDTH] = view.shape[..] else { return None };
    let stride = view.strides[2];
    let ordered = view.strides[3] == 1
        && (heads == 1 || view.strides[1] == WIDTH)
        && (batch == 1 || view.strides[0] == tokens * stride);
    let aligned =
        stride.is_multiple_of(8) && view.offset.is_multiple_of(8) && view.element == Element::F16;
    (ordered && aligned).then_some(stride)
}

impl Lowering<'_> {
    /// `softmax(scale * q @ k^T + mask) @ v`; false when the kernel does not support it.
    pub fn fast_attention(
        &mut self,
        node: &GraphNode,
        scale: f32,
    ) -> Result<bool, UnsupportedReason> {
        let output_id = node.outputs.first().copied().flatten().ok_or("no output")?;
        let shape = self.shape(output_id)?;
        if self.float() != Element::F16 || shape.len() != 4 || (scale - 0.125).abs() > 1e-6 {
            return Ok(false);
        }
        let (q, k, v) = (self.input(node, 0)?, self.input(node, 1)?, self.input(node, 2)?);
        let strides = (token_stride(&q), token_stride(&k), token_stride(&v));
        let (Some(stride), true) = (strides.0, strides.0 == strides.1 && strides.0 == strides.2)
        else {
            return Ok(false);
        };
        if q.shape != k.shape || k.shape != v.shape {
            return Ok(false);
        }
        let [batch, heads, tokens, _] = shape[..] else { return Ok(false) };
        let mask = match self.optional(node, 3)? {
            None => None,
            Some(mask) => match mask_row(&mask, batch, tokens) {
                Some(mask) => Some(mask),
                None => return Ok(false),
            },
        };
        // Heads are adjacent again: the next step is a product over all of them.
        let rows = self.packed(&[batch, tokens, heads, WIDTH], Element::F16);
        let output = rows.permuted(&[0, 2, 1, 3]);
        let draft = |warps: usize| {
            let blocks = tokens.div_ceil(warps * 16);
            let mut args = ArgsWriter::new();
            args.address(address(&q)).address(address(&k)).address(address(&v));
            args.address(address(&output));
            args.address(mask.as_ref().map_or(Address::Null, address));
            args.int(tokens).int(heads).int(stride).int(heads * WIDTH);
            args.fast_div(blocks).fast_div(heads);
            let kernel = KernelText {
                source: "#include \"attention.cuh\"\n".to_string(),
                expression: format!("tiles::Attention<{warps}>"),
                threads: (warps * 32) as u32,
                shared_bytes: (warps * 16 * WIDTH * 2 + 4 * 64 * WIDTH * 2) as u32,
            };
            let mut draft = LaunchDraft::plain(kernel, batch * heads * blocks, args);
            draft.variant = format!("warps{warps}");
            draft
        };
        let drafts = [4, 2, 1].map(draft).to_vec();
        let signature = format!("Attention {batch}x{heads}x{tokens}/{stride} {}", mask.is_some());
        let flops = 4 * (batch * heads * tokens * tokens * WIDTH) as u64;
        let mut reads = vec![q, k, v];
        reads.extend(mask);
        self.push(StepDraft {
            op: "Attention",
            signature,
            drafts,
            reads,
            writes: vec![output.clone()],
            flops,
            weight_bytes: 0,
            finish_tiles: None,
        });
        self.define(output_id, output);
        Ok(true)
    }
}

/// A mask over keys that is the same for every head and query, as packed rows of `tokens`.
fn mask_row(mask: &View, batch: usize, tokens: usize) -> Option<View> {
    if mask.element != Element::F16 || mask.len() != batch * tokens {
        return None;
    }
    let flat = mask.reshaped(&[batch, tokens])?;
    flat.is_packed().then_some(flat)
}
