//! Depthwise convolutions with a specialised kernel, half precision.

use graph::ir::GraphNode;
use model::Tensor;
use model::op;

use super::args::{Address, ArgsWriter};
use super::conv::{Window2, fused, pixel_stride, planar_view, two_dimensional};
use super::draft::{KernelText, LaunchDraft, StepDraft};
use super::loop_nest::address;
use super::lowering::{Lowering, UnsupportedReason};
use super::packing;
use super::view::Element;

const THREADS: usize = 128;

impl Lowering<'_> {
    /// Whether the depthwise kernel supports this convolution.
    pub fn depthwise_is_fast(&self, node: &GraphNode, conv: &op::Conv) -> bool {
        let constant = |index: usize| {
            let id = node.inputs.get(index).copied().flatten();
            id.and_then(|id| self.graph.constant(id))
        };
        let Some(weight) = constant(1) else { return false };
        let channels = weight.shape()[0];
        let bias = node.inputs.get(2).copied().flatten().is_none() || constant(2).is_some();
        let placed = node.outputs.first().copied().flatten().and_then(|id| self.placement(id));
        self.float() == Element::F16
            && (weight.shape().len() == 4 || (weight.shape().len() == 3 && placed.is_none()))
            && weight.shape()[1] == 1
            && conv.groups == channels
            && channels % 8 == 0
            && bias
    }

    /// A convolution with one filter per channel, over one or two dimensions.
    pub fn fast_depthwise(
        &mut self,
        node: &GraphNode,
        conv: &op::Conv,
    ) -> Result<(), UnsupportedReason> {
        let output_id = node.outputs.first().copied().flatten().ok_or("no output")?;
        let id = node.inputs.get(1).copied().flatten().ok_or("no weight")?;
        let weight = self.graph.constant(id).cloned().ok_or("the weight is not constant")?;
        let input = self.input(node, 0)?;
        let (input, in_stride, channels) = self.as_image(planar_view(input), 8)?;
        let (planar, kernel) = two_dimensional(&conv.window, &weight.shape()[2..]);
        let window = Window2::of(&planar, &kernel, &input.shape[2..]);
        let window = window.ok_or("not 2-D")?;
        let pack = |tensor: &Tensor| packing::depthwise(tensor).unwrap_or_default();
        let weight_bytes = weight.len() * 2;
        let number = self.weight(&weight, "depthwise", weight_bytes, pack);
        let bias = match node.inputs.get(2).copied().flatten() {
            Some(id) => {
                let tensor = self.graph.constant(id).cloned().ok_or("the bias is not constant")?;
                Lowering::weight_address(self.float_weight(&tensor, 1.0)?)
            }
            None => Address::Null,
        };
        let residual = match self.optional(node, 3)? {
            Some(view) => Some(self.as_image(planar_view(view), 8)?),
            None => None,
        };
        let (act, rest) = fused(conv.activation);
        let result = self.product_image(output_id, rest)?;
        let output = planar_view(result.clone());
        let out_stride = pixel_stride(&output, 8).ok_or("the output is not an image")?;
        let [batch, _, out_h, out_w] = output.shape[..] else { return Err("not 2-D".into()) };
        let Window2 { kernel, stride, pad, dilation } = window;
        let draft = |shape: ThreadShape| {
            let ThreadShape { wide, tall, channels: each } = shape;
            let (groups, strips) = (out_w.div_ceil(wide), out_h.div_ceil(tall));
            let items = batch * strips * groups * (channels / each);
            let mut args = ArgsWriter::new();
            args.address(address(&input)).address(Lowering::weight_address(number)).address(bias);
            args.address(residual.as_ref().map_or(Address::Null, |(view, ..)| address(view)));
            args.address(address(&output));
            args.int(input.shape[2]).int(input.shape[3]).int(in_stride);
            args.int(out_h).int(out_w).int(out_stride);
            args.int(residual.as_ref().map_or(0, |(_, stride, _)| *stride));
            for pair in [kernel, stride, pad, dilation] {
                args.int(pair[0]).int(pair[1]);
            }
            args.int(items).signed(act);
            args.fast_div(channels / each).fast_div(groups).fast_div(strips);
            let kernel = kernel_text(&window, shape);
            let mut draft = LaunchDraft::plain(kernel, items.div_ceil(THREADS), args);
            draft.variant = match tall {
                1 if each == 8 => format!("wide{wide}"),
                _ => format!("strip{wide}x{tall}"),
            };
            draft
        };
        let drafts: Vec<LaunchDraft> =
            shapes(&window, [batch, out_h, out_w, channels]).into_iter().map(draft).collect();
        let taps = kernel[0] * kernel[1];
        let mut reads = vec![input.clone()];
        reads.extend(residual.iter().map(|(view, ..)| view.clone()));
        let signature = format!(
            "Depthwise {batch}x{:?}/{in_stride} -> {out_h}x{out_w}x{channels}/{out_stride} \
             {window:?} a{act} {}",
            &input.shape[2..],
            residual.is_some()
        );
        let flops = 2 * (output.len() * taps) as u64;
        self.push(StepDraft {
            op: "Depthwise",
            signature,
            drafts,
            reads,
            writes: vec![output.clone()],
            flops,
            weight_bytes: weight_bytes as u64,
            finish_tiles: None,
        });
        self.define_product(output_id, result, rest);
        Ok(())
    }
}

/// What one thread computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ThreadShape {
    /// Adjacent output pixels of a row.
    wide: usize,
    /// Output rows.
    tall: usize,
    channels: usize,
}

/// Widest filter whose taps a thread holds in registers.
const WIDEST_STRIP: usize = 32;

/// Threads that occupy a large device: smaller outputs per thread pay only below it.
const THREADS_OF_DEVICE: usize = 132 * 512;

/// The variants for an output of `batch` x `height` x `width` x `channels`, the most promising
/// first.
fn shapes(window: &Window2, [batch, height, width, channels]: [usize; 4]) -> Vec<ThreadShape> {
    let pixels = |wide: usize| ThreadShape { wide, tall: 1, channels: 8 };
    if is_fixed(window) {
        return [2, 1, 4].map(pixels).to_vec();
    }
    if !is_strip(window) {
        return vec![pixels(1)];
    }
    let strip = |(wide, tall): (usize, usize)| ThreadShape { wide, tall, channels: 2 };
    let mut all: Vec<ThreadShape> = [(8, 2), (4, 2), (4, 1), (2, 1)].map(strip).to_vec();
    // A filter of few rows gains nothing from tall strips.
    all.retain(|shape| shape.tall == 1 || shape.tall <= window.kernel[0]);
    let threads = |shape: &ThreadShape| {
        batch * height.div_ceil(shape.tall) * width.div_ceil(shape.wide) * channels / 2
    };
    let first = all.iter().position(|shape| threads(shape) >= THREADS_OF_DEVICE);
    let first = first.unwrap_or(all.len() - 1);
    all.swap(0, first);
    all.push(pixels(1));
    all
}

/// Whether the filter's extent is a compile-time constant of the kernel.
fn is_fixed(window: &Window2) -> bool {
    let square = window.stride[0] == window.stride[1] && matches!(window.stride[0], 1 | 2);
    window.kernel == [3, 3] && window.dilation == [1, 1] && square
}

/// Whether a strip of outputs can share its inputs.
fn is_strip(window: &Window2) -> bool {
    let width = window.kernel[1];
    (2..=WIDEST_STRIP).contains(&width)
        && window.dilation[1] == 1
        && matches!(window.stride[1], 1 | 2)
        && window.stride[1] <= width
}

fn kernel_text(window: &Window2, shape: ThreadShape) -> KernelText {
    let ThreadShape { wide, tall, channels } = shape;
    let expression = if channels == 2 {
        let (kernel, stride) = (window.kernel[1], window.stride[1]);
        format!("tiles::DepthwiseStrip<{kernel}, {stride}, {wide}, {tall}>")
    } else {
        let (kernel, stride) = if is_fixed(window) { (3, window.stride[0]) } else { (0, 0) };
        format!("tiles::Depthwise<{kernel}, {stride}, {wide}>")
    };
    KernelText {
        source: "#include \"depthwise.cuh\"\n".to_string(),
        expression,
        threads: THREADS as u32,
        shared_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::{Window2, shapes};

    fn window(kernel: [usize; 2], stride: [usize; 2], dilation: [usize; 2]) -> Window2 {
        Window2 { kernel, stride, pad: [0, 0], dilation }
    }

    #[test]
    fn every_filter_has_a_variant_and_large_outputs_start_with_large_strips() {
        let size = |n| [n, 56, 56, 96];
        assert_eq!(shapes(&window([3, 3], [1, 1], [1, 1]), size(1)).len(), 3);
        assert_eq!(shapes(&window([7, 7], [1, 1], [1, 2]), size(1)).len(), 1);
        let small = shapes(&window([7, 7], [1, 1], [1, 1]), size(1))[0];
        let large = shapes(&window([7, 7], [1, 1], [1, 1]), size(32))[0];
        assert!(small.wide * small.tall < large.wide * large.tall, "{small:?} {large:?}");
        assert!(shapes(&window([1, 31], [1, 1], [1, 1]), size(8)).iter().all(|s| s.tall == 1));
    }
}
