//! Pooling over images with channels fastest, half precision.

use graph::ir::GraphNode;
use model::ValueId;
use model::op::{self, PoolKind};

use super::args::{Address, ArgsWriter};
use super::conv::{Window2, pixel_stride};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::loop_nest::address;
use super::lowering::{Lowering, UnsupportedReason};
use super::view::Element;

const THREADS: usize = 128;

impl Lowering<'_> {
    /// Max or average windows; false when the kernel does not support them.
    pub fn fast_pool(
        &mut self,
        node: &GraphNode,
        pool: &op::Pool,
    ) -> Result<bool, UnsupportedReason> {
        let output_id = node.outputs.first().copied().flatten().ok_or("no output")?;
        let out_shape = self.shape(output_id)?;
        let (max, count_padding) = match pool.kind {
            PoolKind::Max => (true, false),
            PoolKind::Average { count_include_pad } => (false, count_include_pad),
            _ => return Ok(false),
        };
        // Average windows that exceed the input in ceil mode count only what the padding covers.
        let plain = !(pool.ceil_mode && !max && count_padding);
        if self.float() != Element::F16 || out_shape.len() != 4 || out_shape[1] % 8 != 0 || !plain {
            return Ok(false);
        }
        let input = self.input(node, 0)?;
        let window = Window2::of(&pool.window, &[], &input.shape[2..]).ok_or("not 2-D")?;
        if window.dilation != [1, 1] {
            return Ok(false);
        }
        if window.kernel == [1, 1] && window.stride == [1, 1] && input.shape == out_shape {
            self.define(output_id, input);
            return Ok(true);
        }
        let (input, in_stride, channels) = self.as_image(input, 8)?;
        let output = self.output_image(output_id)?;
        let out_stride = pixel_stride(&output, 8).ok_or("the output is not an image")?;
        let [batch, _, out_h, out_w] = out_shape[..] else { return Ok(false) };
        let items = batch * out_h * out_w * channels / 8;
        let mut args = ArgsWriter::new();
        args.address(address(&input)).address(address(&output));
        args.int(input.shape[2]).int(input.shape[3]).int(in_stride).int(out_stride);
        for pair in [window.kernel, window.stride, window.pad] {
            args.int(pair[0]).int(pair[1]);
        }
        args.int(items).signed(i32::from(count_padding));
        args.fast_div(channels / 8).fast_div(out_w).fast_div(out_h);
        let kernel = KernelText {
            source: "#include \"pool.cuh\"\n".to_string(),
            expression: format!("tiles::Pool<{max}>"),
            threads: THREADS as u32,
            shared_bytes: 0,
        };
        let signature = format!(
            "Pool {max} {batch}x{:?}/{in_stride} -> {out_h}x{out_w}x{channels}/{out_stride} \
             {window:?}",
            &input.shape[2..]
        );
        self.push(StepDraft {
            op: if max { "MaxPool" } else { "AveragePool" },
            signature,
            drafts: vec![LaunchDraft::plain(kernel, items.div_ceil(THREADS), args)],
            reads: vec![input],
            writes: vec![output.clone()],
            flops: (output.len() * window.kernel[0] * window.kernel[1]) as u64,
            weight_bytes: 0,
            finish_tiles: None,
        });
        self.define(output_id, output);
        Ok(true)
    }

    /// The mean of every channel; false when the kernel does not support it.
    pub fn fast_global_average(
        &mut self,
        x: ValueId,
        output_id: ValueId,
    ) -> Result<bool, UnsupportedReason> {
        let shape = self.shape(x)?;
        if self.float() != Element::F16 || shape.len() != 4 || shape[1] % 8 != 0 {
            return Ok(false);
        }
        let normalized = self.normalized(x);
        let (input, pre) = match normalized {
            Some((source, scale, shift)) => {
                let pre = self.scale_weight(&scale, &shift);
                (self.operand(source)?, Some(pre))
            }
            None => (self.operand(x)?, None),
        };
        let (input, in_stride, channels) = self.as_image(input, 8)?;
        let [batch, _, h, w] = input.shape[..] else { return Ok(false) };
        let out_shape = self.shape(output_id)?;
        let flat = self.packed(&[batch, channels], Element::F16);
        let groups = channels.div_ceil(64);
        let mut args = ArgsWriter::new();
        args.address(address(&input)).address(address(&flat));
        args.address(pre.map_or(Address::Null, Lowering::weight_address));
        args.int(h * w).int(in_stride).int(channels).int(channels).fast_div(groups);
        let kernel = KernelText {
            source: "#include \"pool.cuh\"\n".to_string(),
            expression: "tiles::GlobalPool".to_string(),
            threads: 256,
            shared_bytes: 0,
        };
        self.push(StepDraft {
            op: "GlobalAveragePool",
            signature: format!(
                "GlobalPool {batch}x{h}x{w}x{channels}/{in_stride} {}",
                pre.is_some()
            ),
            drafts: vec![LaunchDraft::plain(kernel, batch * groups, args)],
            flops: input.len() as u64,
            reads: vec![input],
            writes: vec![flat.clone()],
            weight_bytes: 0,
            finish_tiles: None,
        });
        let view = flat.reshaped(&out_shape).ok_or("an unexpected shape")?;
        self.define(output_id, view);
        Ok(true)
    }
}
