//! Pooling over images with channels fastest, of halves and of bytes.

use graph::ir::GraphNode;
use model::ValueId;
use model::op::{self, PoolKind};

use super::args::{Address, ArgsWriter};
use super::conv::{Window2, stride_of_pixels};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::loop_nest::address;
use super::lowering::{Lowering, UnsupportedReason};
use super::view::{Element, View};

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
        let (window_type, at_once) = match self.element(output_id)? {
            Element::F16 => (format!("HalfWindow<{max}>"), 8),
            Element::U8 if max => ("ByteWindow<unsigned char>".to_string(), 16),
            Element::I8 if max => ("ByteWindow<signed char>".to_string(), 16),
            _ => return Ok(false),
        };
        let whole = out_shape.len() == 4 && out_shape[1].is_multiple_of(at_once);
        if !whole || !plain {
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
        let (input, in_stride, channels) = match stride_of_pixels(&input, at_once) {
            Some(stride) if at_once == 16 => (input, stride, out_shape[1]),
            None if at_once == 16 => return Ok(false),
            _ => self.as_image(input, at_once)?,
        };
        let output = self.output_image(output_id)?;
        let out_stride = match stride_of_pixels(&output, at_once) {
            Some(stride) => stride,
            None if at_once == 16 => return Ok(false),
            None => return Err("the output is not an image".to_string()),
        };
        let [batch, _, out_h, out_w] = out_shape[..] else { return Ok(false) };
        let items = batch * out_h * out_w * channels / at_once;
        let mut args = ArgsWriter::new();
        args.address(address(&input)).address(address(&output));
        args.int(input.shape[2]).int(input.shape[3]).int(in_stride).int(out_stride);
        for pair in [window.kernel, window.stride, window.pad] {
            args.int(pair[0]).int(pair[1]);
        }
        args.int(items).signed(i32::from(count_padding));
        args.fast_div(channels / at_once).fast_div(out_w).fast_div(out_h);
        let kernel = KernelText {
            source: "#include \"pool.cuh\"\n".to_string(),
            expression: format!("tiles::Pool<tiles::{window_type}>"),
            threads: THREADS as u32,
            shared_bytes: 0,
        };
        let signature = format!(
            "Pool {window_type} {batch}x{:?}/{in_stride} -> {out_h}x{out_w}x{channels}/\
             {out_stride} {window:?}",
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
        let pixels = h * w;
        let whole = PixelSum { pixels, in_stride, parts: 1, scale: 1.0 / pixels as f32 };
        let parts = pool_parts(batch * channels.div_ceil(64), pixels);
        if parts > 1 {
            let sums = self.packed(&[batch, parts, channels], Element::F32);
            self.pixel_sum((&input, &sums), pre, &PixelSum { parts, scale: 1.0, ..whole });
            let rest = PixelSum { pixels: parts, in_stride: channels, ..whole };
            self.pixel_sum((&sums, &flat), None, &rest);
        } else {
            self.pixel_sum((&input, &flat), pre, &whole);
        }
        let view = flat.reshaped(&out_shape).ok_or("an unexpected shape")?;
        self.define(output_id, view);
        Ok(true)
    }

    /// Adds the pixels of every image, or of every part of one, for all channels.
    fn pixel_sum(&mut self, (input, output): (&View, &View), pre: Option<u32>, sum: &PixelSum) {
        let [batch, channels] = [output.shape[0], output.shape[output.shape.len() - 1]];
        let groups = channels.div_ceil(64);
        let part_pixels = sum.pixels.div_ceil(sum.parts);
        let mut args = ArgsWriter::new();
        args.address(address(input)).address(address(output));
        args.address(pre.map_or(Address::Null, Lowering::weight_address));
        args.int(sum.pixels).int(sum.in_stride).int(channels).int(channels).int(part_pixels);
        args.float(sum.scale).fast_div(groups).fast_div(sum.parts);
        let text = |element: Element| if element == Element::F32 { "float" } else { "half" };
        let types = format!("{}, {}", text(input.element), text(output.element));
        let kernel = KernelText {
            source: "#include \"pool.cuh\"\n".to_string(),
            expression: format!("tiles::GlobalPool<{types}>"),
            threads: 256,
            shared_bytes: 0,
        };
        self.push(StepDraft {
            op: "GlobalAveragePool",
            signature: format!(
                "GlobalPool<{types}> {batch}x{}x{channels}/{} {} in {}",
                sum.pixels,
                sum.in_stride,
                pre.is_some(),
                sum.parts
            ),
            drafts: vec![LaunchDraft::plain(kernel, batch * sum.parts * groups, args)],
            flops: (batch * sum.pixels * channels) as u64,
            reads: vec![input.clone()],
            writes: vec![output.clone()],
            weight_bytes: 0,
            finish_tiles: None,
        });
    }
}

/// The pixels of an image that a launch adds.
#[derive(Clone, Copy)]
struct PixelSum {
    pixels: usize,
    /// Elements between two pixels.
    in_stride: usize,
    parts: usize,
    scale: f32,
}

/// Parts in which a global average adds the pixels of an image. A second launch costs about 2 us:
/// as long as a block needs for a few hundred pixels.
fn pool_parts(tiles: usize, pixels: usize) -> usize {
    const LEAST_PIXELS: usize = 64;
    const TILES_OF_DEVICE: usize = 256;
    if pixels < 8 * LEAST_PIXELS || tiles >= TILES_OF_DEVICE / 2 {
        return 1;
    }
    let wanted = (TILES_OF_DEVICE / tiles.max(1)).min(pixels / LEAST_PIXELS);
    // No part is empty.
    pixels.div_ceil(pixels.div_ceil(wanted.max(1)))
}

#[cfg(test)]
mod tests {
    use super::pool_parts;

    #[test]
    fn no_part_of_an_image_is_empty() {
        for tiles in [1, 2, 3, 17, 100, 128, 1000] {
            for pixels in (1..700).chain([3136, 12544, 12545, 50176]) {
                let parts = pool_parts(tiles, pixels);
                let part_pixels = pixels.div_ceil(parts);
                assert!((parts - 1) * part_pixels < pixels && pixels <= parts * part_pixels);
            }
        }
        assert_eq!(pool_parts(1, 49), 1);
        assert!(pool_parts(1, 12544) > 100);
    }
}
