//! Products on tensor cores: convolutions and matrix products with constant weights, half
//! precision.

pub mod hopper;

use std::sync::Arc;

use device::LaunchChoices;
use graph::ir::GraphNode;
use model::gpu::{GpuTarget, Packer, WeightKey};
use model::op::{self, Activation, Padding, Window};
use model::{Tensor, ValueId};

use super::args::{Address, ArgsWriter};
use super::draft::{LaunchDraft, StepDraft};
use super::loop_nest::address;
use super::lowering::{Lowering, UnsupportedReason};
use super::memo::{StepKey, StepOperands};
use super::packing;
use super::tile::{InputAccess, NORMALIZED_DEPTH_MAX, Problem, SplitReduction, Variant};
use super::view::{Element, View};

/// The kernels' number of an activation, if they have it; see `Activation` in `kernels/base.cuh`.
pub fn activation_code(activation: Activation) -> Option<i32> {
    Some(match activation {
        Activation::None => 0,
        Activation::Relu => 1,
        Activation::Clip { low: 0.0, high: 6.0 } => 2,
        Activation::Gelu { tanh: false } => 3,
        Activation::Silu => 4,
        Activation::Sigmoid => 5,
        Activation::Tanh => 6,
        Activation::Gelu { tanh: true } => 7,
        _ => return None,
    })
}

/// The number of the activation that a product's kernel applies, and the activation that remains
/// for the next step.
pub fn fused(activation: Activation) -> (i32, Option<Activation>) {
    match activation_code(activation) {
        Some(code) => (code, None),
        None => (0, Some(activation)),
    }
}

/// A window over two spatial dimensions with all defaults resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window2 {
    /// Extent.
    pub kernel: [usize; 2],
    /// Step.
    pub stride: [usize; 2],
    /// Padding before the first row and column.
    pub pad: [usize; 2],
    /// Distance of the taps.
    pub dilation: [usize; 2],
}

impl Window2 {
    /// One pixel.
    pub fn point() -> Window2 {
        Window2 { kernel: [1; 2], stride: [1; 2], pad: [0; 2], dilation: [1; 2] }
    }

    /// The geometry of `window`; `None` unless it is two-dimensional. `kernel` is the extent where
    /// only the weight gives it, `input` is the spatial extent.
    pub fn of(window: &Window, kernel: &[usize], input: &[usize]) -> Option<Window2> {
        let two = |values: &[usize], default: usize| -> Option<[usize; 2]> {
            if values.is_empty() { Some([default; 2]) } else { values.try_into().ok() }
        };
        let kernel = two(if window.kernel.is_empty() { kernel } else { &window.kernel }, 0)?;
        let (stride, dilation) = (two(&window.strides, 1)?, two(&window.dilations, 1)?);
        let input: [usize; 2] = input.try_into().ok()?;
        let same = |axis: usize| {
            let output = input[axis].div_ceil(stride[axis]);
            let reach = (output - 1) * stride[axis] + (kernel[axis] - 1) * dilation[axis] + 1;
            reach.saturating_sub(input[axis])
        };
        let pad = match &window.padding {
            Padding::Explicit(pads) if pads.is_empty() => [0, 0],
            Padding::Explicit(pads) => [*pads.first()?, *pads.get(1)?],
            Padding::SameUpper => [same(0) / 2, same(1) / 2],
            Padding::SameLower => [same(0).div_ceil(2), same(1).div_ceil(2)],
        };
        Some(Window2 { kernel, stride, pad, dilation })
    }
}

/// The stride of pixels of an image with channels fastest; `None` for another order, or one that
/// vector loads of `vec` elements cannot read.
pub fn pixel_stride(view: &View, vec: usize) -> Option<usize> {
    stride_of_pixels(view, vec).filter(|_| view.element == Element::F16)
}

/// As [`pixel_stride`], of any elements.
pub fn stride_of_pixels(view: &View, vec: usize) -> Option<usize> {
    let [n, c, h, w] = view.shape[..] else { return None };
    let strides = &view.strides;
    let pixel = match (w > 1, h > 1, n > 1) {
        (true, ..) => strides[3],
        (false, true, _) => strides[2],
        (false, false, true) => strides[0],
        _ => c.next_multiple_of(vec),
    };
    let ordered = (c == 1 || strides[1] == 1)
        && (h == 1 || strides[2] == w * pixel)
        && (n == 1 || strides[0] == h * w * pixel);
    let aligned = pixel % vec == 0 && view.offset.is_multiple_of(vec) && pixel >= c;
    (ordered && aligned).then_some(pixel)
}

/// A product as its kernel computes it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Product {
    name: &'static str,
    input: View,
    in_h: usize,
    in_w: usize,
    in_c: usize,
    in_stride: usize,
    window: Window2,
    out_h: usize,
    out_w: usize,
    out_c: usize,
    out_stride: usize,
    output: View,
    rows: usize,
    residual: Option<(View, usize)>,
    weight: u32,
    weight_bytes: usize,
    bias: Option<u32>,
    normalize: Option<u32>,
    act: i32,
    vec: usize,
}

impl Product {
    fn depth(&self) -> usize {
        self.window.kernel[0] * self.window.kernel[1] * self.in_c
    }

    fn access(&self) -> InputAccess {
        let Window2 { kernel, pad, dilation, .. } = self.window;
        if self.vec == 4 {
            return InputAccess::General;
        }
        if kernel == [1, 1] && pad == [0, 0] {
            return InputAccess::Point;
        }
        let taps = self.in_c.is_multiple_of(64)
            && dilation == [1, 1]
            && kernel[0] <= 16
            && kernel[1] <= 16;
        if taps { InputAccess::Taps } else { InputAccess::General }
    }

    fn problem(&self, target: &GpuTarget) -> Problem {
        Problem {
            rows: self.rows,
            columns: self.out_c,
            depth: self.depth(),
            parts: 1,
            weight_bytes: self.weight_bytes,
            vec: self.vec,
            access: self.access(),
            normalizes: self.normalize.is_some(),
            multiprocessors: target.multiprocessors as usize,
            clusters: target.capability >= 90,
        }
    }

    fn signature(&self) -> String {
        let Window2 { kernel: k, stride: s, pad: p, dilation: d } = self.window;
        format!(
            "{} {}: {}x{}x{}/{} -> {}x{}x{}/{} k{}x{} s{}x{} p{}x{} d{}x{}{}{} a{}",
            self.name,
            self.rows,
            self.in_h,
            self.in_w,
            self.in_c,
            self.in_stride,
            self.out_h,
            self.out_w,
            self.out_c,
            self.out_stride,
            k[0],
            k[1],
            s[0],
            s[1],
            p[0],
            p[1],
            d[0],
            d[1],
            if self.residual.is_some() { " residual" } else { "" },
            if self.normalize.is_some() { " normalizing" } else { "" },
            self.act,
        )
    }

    /// `ConvArgs` of `kernels/conv_load.cuh`, field by field.
    fn args(&self, variant: &Variant) -> ArgsWriter {
        let mut args = ArgsWriter::new();
        let weight = |number: Option<u32>| number.map_or(Address::Null, Lowering::weight_address);
        let split = variant.reduction == SplitReduction::Workspace;
        let when = |location| if split { Address::Fixed(location) } else { Address::Null };
        args.address(address(&self.input))
            .address(weight(Some(self.weight)))
            .address(weight(self.bias))
            .address(self.residual.as_ref().map_or(Address::Null, |(view, _)| address(view)))
            .address(address(&self.output))
            .address(weight(self.normalize))
            .address(when(model::gpu::MemoryLocation::Workspace(0)))
            .address(when(model::gpu::MemoryLocation::Arrivals));
        args.int(self.in_h).int(self.in_w).int(self.in_c).int(self.in_stride);
        args.int(self.out_c).int(self.out_stride);
        args.int(self.residual.as_ref().map_or(0, |(_, stride)| *stride));
        let Window2 { kernel, stride, pad, dilation } = self.window;
        for pair in [kernel, stride, pad, dilation] {
            args.int(pair[0]).int(pair[1]);
        }
        let depth = self.depth();
        args.int(self.rows).int(depth).int(depth.next_multiple_of(8));
        args.int(variant.splits).signed(variant.reduction.code()).signed(self.act);
        args.fast_div(variant.splits)
            .fast_div(self.out_c.div_ceil(variant.tile.bn))
            .fast_div(self.out_h * self.out_w)
            .fast_div(self.out_w)
            .fast_div(self.in_c)
            .fast_div(kernel[1]);
        args
    }

    /// What most products differ in.
    pub(super) fn sizes(&self) -> [usize; 8] {
        let Product { rows, in_h, in_w, in_c, out_c, in_stride, out_stride, .. } = *self;
        [rows, in_h, in_w, in_c, in_stride, out_c, out_stride, self.window.kernel[0]]
    }

    /// The product with its buffers and weights numbered.
    fn numbered(self, operands: &mut StepOperands) -> Product {
        Product {
            input: operands.view(self.input),
            output: operands.view(self.output),
            residual: self.residual.map(|(view, stride)| (operands.view(view), stride)),
            weight: operands.weight(self.weight),
            bias: self.bias.map(|number| operands.weight(number)),
            normalize: self.normalize.map(|number| operands.weight(number)),
            ..self
        }
    }

    fn work(
        &self,
        target: &GpuTarget,
        choices: LaunchChoices,
    ) -> Result<StepDraft, UnsupportedReason> {
        let drafts = self.drafts(target, choices);
        if self.input.extent().end.max(self.output.extent().end) > i32::MAX as usize {
            return Err("larger than the kernels' index range".to_string());
        }
        let flops = 2 * self.rows as u64 * self.out_c as u64 * self.depth() as u64;
        let signature = self.signature();
        let mut reads = vec![self.input.clone()];
        reads.extend(self.residual.as_ref().map(|(view, _)| view.clone()));
        Ok(StepDraft {
            op: self.name,
            signature,
            drafts,
            reads,
            writes: vec![self.output.clone()],
            flops,
            weight_bytes: self.weight_bytes as u64,
            finish_tiles: None,
        })
    }
}

/// A variant of a product before its launch is written.
enum Candidate<'a> {
    Tile(Variant),
    Hopper(hopper::Candidate<'a>),
}

impl Candidate<'_> {
    fn suits_best_effort(&self) -> bool {
        match self {
            Candidate::Tile(variant) => variant.reduction != SplitReduction::Cluster,
            Candidate::Hopper(candidate) => !candidate.overlaps(),
        }
    }

    fn shared_bytes(&self, normalizes: bool) -> usize {
        match self {
            Candidate::Tile(variant) => variant.tile.shared_bytes(normalizes),
            Candidate::Hopper(candidate) => candidate.shared_bytes(),
        }
    }
}

impl Product {
    /// The launches of `choices`, the fastest by estimate first.
    fn drafts(&self, target: &GpuTarget, choices: LaunchChoices) -> Vec<LaunchDraft> {
        let problem = self.problem(target);
        let tiles = problem.estimated().map(|(us, variant)| (us, Candidate::Tile(variant)));
        let mut candidates: Vec<(f64, Candidate)> = tiles.collect();
        let hopper = hopper::candidates(self, target).into_iter();
        candidates.extend(hopper.map(|(estimate, each)| (estimate, Candidate::Hopper(each))));
        let draft = |(_, candidate): &(f64, Candidate)| match candidate {
            Candidate::Tile(variant) => self.tile_draft(&problem, variant),
            Candidate::Hopper(candidate) => candidate.draft(self),
        };
        if choices == LaunchChoices::All {
            candidates.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            return candidates.iter().map(draft).collect();
        }
        let most = target.block_shared_bytes() as usize;
        let fits = |candidate: &Candidate| candidate.shared_bytes(problem.normalizes) <= most;
        if candidates.iter().any(|(_, candidate)| fits(candidate)) {
            candidates.retain(|(_, candidate)| fits(candidate));
        }
        // Of equal estimates the first, as if they were sorted.
        let fastest = |usable: &dyn Fn(&Candidate) -> bool| {
            let usable = candidates.iter().enumerate().filter(|(_, (_, each))| usable(each));
            usable.min_by(|(_, (a, _)), (_, (b, _))| a.total_cmp(b)).map(|(index, _)| index)
        };
        let first = fastest(&|_| true);
        let best_effort = fastest(&|each| each.suits_best_effort()).filter(|at| Some(*at) != first);
        [first, best_effort].into_iter().flatten().map(|index| draft(&candidates[index])).collect()
    }

    fn tile_draft(&self, problem: &Problem, variant: &Variant) -> LaunchDraft {
        let kernel = variant.tile.kernel(problem.access, problem.normalizes);
        let mut draft = LaunchDraft::plain(kernel, variant.tiles(problem), self.args(variant));
        draft.variant = variant.name();
        draft.cluster =
            if variant.reduction == SplitReduction::Cluster { variant.splits } else { 1 };
        draft.arrivals = variant.arrivals(problem);
        draft.workspace_bytes = variant.workspace_bytes(problem);
        draft
    }
}

/// An image of one dimension as one of two, the first of extent one.
pub fn planar_view(mut view: View) -> View {
    if view.shape.len() == 3 {
        view.shape.insert(2, 1);
        view.strides.insert(2, 0);
    }
    view
}

/// A window over one dimension as one over two.
pub fn two_dimensional(window: &Window, kernel: &[usize]) -> (Window, Vec<usize>) {
    if kernel.len() != 1 {
        return (window.clone(), kernel.to_vec());
    }
    let wide = |list: &[usize], fill: usize| match list {
        [] => vec![],
        list => [&[fill], list].concat(),
    };
    let padding = match &window.padding {
        Padding::Explicit(pads) if !pads.is_empty() => {
            let (begin, end) = (pads[0], pads.get(1).copied().unwrap_or(0));
            Padding::Explicit(vec![0, begin, 0, end])
        }
        other => other.clone(),
    };
    let planar = Window {
        kernel: wide(&window.kernel, 1),
        strides: wide(&window.strides, 1),
        dilations: wide(&window.dilations, 1),
        padding,
    };
    (planar, wide(kernel, 1))
}

/// Whether a window of one tap stays inside the image.
fn has_no_border(window: &Window) -> bool {
    match &window.padding {
        Padding::Explicit(pads) => pads.iter().all(|pad| *pad == 0),
        _ => true,
    }
}

impl Lowering<'_> {
    /// `view` as an image with channels fastest that kernels may read in vectors: itself or a copy,
    /// with its pixel stride and its channels rounded up to `vec`. The padding of a pixel holds
    /// finite numbers.
    pub fn as_image(
        &mut self,
        view: View,
        vec: usize,
    ) -> Result<(View, usize, usize), UnsupportedReason> {
        let channels = view.shape[1];
        let rounded = channels.next_multiple_of(vec);
        let readable = |view: &View| channels + view.slack >= rounded;
        if let Some(pixel) = pixel_stride(&view, vec).filter(|_| readable(&view)) {
            return Ok((view, pixel, rounded));
        }
        let mut image = self.image(&view.shape, vec, Element::F16);
        image.slack = rounded - channels;
        self.copy_into(&view, &image)?;
        Ok((image, rounded, rounded))
    }

    /// The value `id` as an image; an expression is computed into one.
    fn image_operand(
        &mut self,
        id: ValueId,
        vec: usize,
    ) -> Result<(View, usize, usize), UnsupportedReason> {
        if let Some(value) = self.take_deferred(id) {
            if self.placement(id).is_none() && matches!(value.shape.len(), 3 | 4) {
                let mut image = self.image(&value.shape, vec, value.element);
                image.slack = image.shape[1].next_multiple_of(vec) - image.shape[1];
                self.compute_into(&value, &image)?;
                self.define(id, image);
            } else {
                self.defer(id, value);
            }
        }
        let view = self.operand(id)?;
        self.as_image(planar_view(view), vec)
    }

    /// A constant row of floats for a kernel's epilogue.
    pub fn float_weight(&mut self, tensor: &Tensor, factor: f32) -> Result<u32, UnsupportedReason> {
        let bytes = tensor.len().next_multiple_of(8) * 4;
        if !packing::converts(tensor, Element::F32) {
            return Err("the bias is not a row of numbers".to_string());
        }
        let how = format!("row*{factor}");
        let pack = move |tensor: &Tensor| packing::float_row(tensor, factor).unwrap_or_default();
        Ok(self.weight(tensor, &how, bytes, pack))
    }

    fn constant(&self, node: &GraphNode, index: usize) -> Option<Tensor> {
        let id = node.inputs.get(index).copied().flatten()?;
        self.graph.constant(id).cloned()
    }

    /// A residual as an image of the output's sizes, readable in vectors of eight.
    fn residual(
        &mut self,
        id: Option<ValueId>,
    ) -> Result<Option<(View, usize)>, UnsupportedReason> {
        let Some(id) = id else { return Ok(None) };
        let view = self.operand(id)?;
        let (view, stride, _) = self.as_image(planar_view(view), 8)?;
        Ok(Some((view, stride)))
    }

    /// Whether the tensor-core kernels support this convolution as it is.
    pub fn conv_is_fast(&self, node: &GraphNode, conv: &op::Conv) -> bool {
        let constant = |index| self.constant(node, index).is_some();
        let bias = node.inputs.get(2).copied().flatten().is_none() || constant(2);
        let rank = self.constant(node, 1).map_or(0, |weight| weight.shape().len());
        let residual = node.inputs.get(3).copied().flatten();
        let same_shape = residual.is_none_or(|id| {
            let output = node.outputs.first().copied().flatten();
            output.is_some_and(|output| self.shape(output).ok() == self.shape(id).ok())
        });
        let placed = node.outputs.first().copied().flatten().and_then(|id| self.placement(id));
        // One dimension is two, the first of extent one.
        let planar = rank == 4 || (rank == 3 && placed.is_none());
        self.float() == Element::F16 && conv.groups == 1 && planar && bias && same_shape
    }

    /// A convolution over one or two dimensions, one group.
    pub fn fast_conv(
        &mut self,
        node: &GraphNode,
        conv: &op::Conv,
    ) -> Result<(), UnsupportedReason> {
        let output_id = node.outputs.first().copied().flatten().ok_or("no output")?;
        let weight = self.constant(node, 1).ok_or("the weight is not constant")?;
        let x = node.inputs.first().copied().flatten().ok_or("no input")?;
        // Only the access without padding can normalise its input.
        let point =
            weight.shape()[2..].iter().all(|size| *size == 1) && has_no_border(&conv.window);
        let shallow = weight.shape()[1] <= NORMALIZED_DEPTH_MAX;
        let normalized = self.normalized(x).filter(|_| point && shallow);
        // Images of up to four channels have specialised kernels.
        let vec = if weight.shape()[1] <= 4 && !point { 4 } else { 8 };
        let (source, normalize) = match normalized {
            Some((source, scale, shift)) => (source, Some(self.scale_weight(&scale, &shift))),
            None => (x, None),
        };
        let (input, in_stride, in_c) = self.image_operand(source, vec)?;
        let spatial = &input.shape[2..];
        let (planar, kernel) = two_dimensional(&conv.window, &weight.shape()[2..]);
        let window = Window2::of(&planar, &kernel, spatial).ok_or("not 2-D")?;
        let bytes = packing::weight_rows(weight.shape()[0])
            * (window.kernel[0] * window.kernel[1] * in_c).next_multiple_of(8)
            * 2;
        let pack = move |tensor: &Tensor| {
            let mut packed = packing::filter(tensor, in_c).unwrap_or_default();
            packed.resize(bytes, 0);
            packed
        };
        let weight_number = self.weight(&weight, &format!("filter{in_c}"), bytes, pack);
        let bias = match self.constant(node, 2) {
            Some(bias) => Some(self.float_weight(&bias, 1.0)?),
            None => None,
        };
        let residual = self.residual(node.inputs.get(3).copied().flatten())?;
        let (act, rest) = fused(conv.activation);
        let mut result = self.product_image(output_id, rest)?;
        let out_c = result.shape[1].next_multiple_of(8);
        result.slack = out_c - result.shape[1];
        let output = planar_view(result.clone());
        let out_stride = pixel_stride(&output, 8).ok_or("the output is not an image")?;
        let product = Product {
            name: "Conv",
            in_h: input.shape[2],
            in_w: input.shape[3],
            in_c,
            in_stride,
            window,
            out_h: output.shape[2],
            out_w: output.shape[3],
            out_c,
            out_stride,
            rows: output.shape[0] * output.shape[2] * output.shape[3],
            input,
            output,
            residual,
            weight: weight_number,
            weight_bytes: bytes,
            bias,
            normalize,
            act,
            vec,
        };
        self.push_product(product)?;
        self.define_product(output_id, result, rest);
        Ok(())
    }

    /// Memory for a product: that of the output, unless the next step writes it.
    pub fn product_image(
        &mut self,
        output: ValueId,
        rest: Option<Activation>,
    ) -> Result<View, UnsupportedReason> {
        if rest.is_none() {
            return self.output_image(output);
        }
        let (shape, element) = (self.shape(output)?, self.element(output)?);
        Ok(self.image(&shape, 8, element))
    }

    /// Defines `output` as `view` with the activation that its kernel did not apply.
    pub fn define_product(&mut self, output: ValueId, view: View, rest: Option<Activation>) {
        match rest {
            None => self.define(output, view),
            Some(activation) => self.activate(view, activation, output),
        }
    }

    /// Scales and shifts that a kernel applies to its input.
    pub fn scale_weight(&mut self, scale: &Tensor, shift: &Tensor) -> u32 {
        let bytes = (scale.len() + shift.len()) * 2;
        let how = format!("scale+{}", self.identity(shift));
        let shift = shift.clone();
        let pack =
            move |scale: &Tensor| packing::scales_and_shifts(scale, &shift).unwrap_or_default();
        self.weight(scale, &how, bytes, pack)
    }

    /// `activation(alpha * x @ weight + bias + residual)` on the rows of `x`; false when the
    /// kernels cannot read it in its layout.
    pub fn fast_matrix(&mut self, matrix: &Matrix) -> Result<bool, UnsupportedReason> {
        if self.float() != Element::F16 {
            return Ok(false);
        }
        let (act, rest) = fused(matrix.activation);
        let depth = matrix.depth();
        let columns: usize = matrix.parts.iter().map(|part| part.columns).sum();
        let first = self.shape(matrix.parts[0].output)?;
        let rows = first.iter().product::<usize>() / matrix.parts[0].columns.max(1);
        let input = self.operand(matrix.input)?;
        // Rows may be in any order: the output then has the same.
        let order = row_order(&input, &first);
        let Some(input) = rows_of(&input.permuted(&order), rows, depth) else { return Ok(false) };
        let residual = match &matrix.residual {
            None => None,
            Some(view) if view.shape != first => return Ok(false),
            Some(view) => {
                let view = view.permuted(&row_order_of(&order, first.len()));
                let view = match rows_of(&view, rows, columns) {
                    Some(view) => view,
                    // Another order of rows: a copy costs less than another kernel.
                    None => {
                        let copy = self.packed(&view.shape, Element::F16);
                        let Some(rows) = rows_of(&copy, rows, columns) else { return Ok(false) };
                        self.copy_into(&view, &copy)?;
                        rows
                    }
                };
                let stride = view.strides[0];
                Some((view, stride))
            }
        };
        let (weight, weight_bytes) = self.matrix_weight(matrix);
        let bias = self.matrix_bias(matrix);
        let flat = self.push_rows(Rows {
            input,
            depth,
            weight: (weight, weight_bytes),
            columns,
            bias,
            residual,
            act,
        })?;
        let mut column = 0;
        for part in &matrix.parts {
            let shape = self.shape(part.output)?;
            let mut slice = flat.sliced(1, column, part.columns, 1);
            slice.slack = if matrix.parts.len() == 1 { flat.slack } else { 0 };
            let order = row_order_of(&order, shape.len());
            let ordered: Vec<usize> = order.iter().map(|axis| shape[*axis]).collect();
            let view = slice.reshaped(&ordered).ok_or("the output's rows cannot be split")?;
            let view = view.permuted(&inverse(&order));
            self.define_product(part.output, view, rest);
            column += part.columns;
        }
        Ok(true)
    }

    /// The products of the rows of `input`, which vectors can read up to `depth`, with a packed
    /// weight: a number and its bytes.
    pub fn rows_product(
        &mut self,
        input: View,
        depth: usize,
        weight: (u32, usize),
        columns: usize,
    ) -> Result<View, UnsupportedReason> {
        let (bias, residual, act) = (None, None, 0);
        self.push_rows(Rows { input, depth, weight, columns, bias, residual, act })
    }

    /// Adds a product.
    fn push_product(&mut self, product: Product) -> Result<(), UnsupportedReason> {
        let (target, choices) = (self.target, self.choices);
        let mut operands = StepOperands::default();
        let key = StepKey::Product(Box::new(product.numbered(&mut operands)));
        let work = self.memo.step(key, &operands, |key| match key {
            StepKey::Product(product) => product.work(&target, choices),
            _ => Err("no product".to_string()),
        })?;
        self.push(work);
        Ok(())
    }

    /// Adds a product of rows and returns its result.
    fn push_rows(&mut self, product: Rows) -> Result<View, UnsupportedReason> {
        let Rows { input, depth, weight, columns, bias, residual, act } = product;
        let rows = input.shape[0];
        let stride = columns.next_multiple_of(8);
        let mut flat = self.packed(&[rows, stride], Element::F16);
        (flat.shape[1], flat.slack) = (columns, stride - columns);
        let product = Product {
            name: "MatMul",
            in_h: 1,
            in_w: rows,
            in_c: depth,
            in_stride: input.strides[0],
            window: Window2 { kernel: [1, 1], stride: [1, 1], pad: [0, 0], dilation: [1, 1] },
            out_h: 1,
            out_w: rows,
            out_c: stride,
            out_stride: stride,
            rows,
            input,
            output: flat.clone(),
            residual,
            weight: weight.0,
            weight_bytes: weight.1,
            bias,
            normalize: None,
            act,
            vec: 8,
        };
        self.push_product(product)?;
        Ok(flat)
    }

    fn matrix_weight(&mut self, matrix: &Matrix) -> (u32, usize) {
        let row = matrix.depth().next_multiple_of(8) * 2;
        let rows: usize = matrix.parts.iter().map(|part| part.columns.next_multiple_of(8)).sum();
        let bytes = packing::weight_rows(rows) * row;
        let names: Vec<String> =
            matrix.parts.iter().map(|part| self.identity(&part.weight)).collect();
        let (transposed, alpha) = (matrix.transposed, matrix.alpha);
        let key = WeightKey(format!("{}:matrix{transposed}*{alpha}", names.join("+")));
        let tensors: Vec<Tensor> = matrix.parts.iter().map(|part| part.weight.clone()).collect();
        let pack = move || {
            let one =
                |tensor: &Tensor| packing::matrix(tensor, transposed, alpha).unwrap_or_default();
            let mut packed: Vec<u8> = tensors.iter().flat_map(one).collect();
            packed.resize(bytes, 0);
            packed
        };
        (self.keyed_weight(key, bytes, Packer(Arc::new(pack))), bytes)
    }

    /// The biases of all parts in one row; zeros for a part without bias.
    fn matrix_bias(&mut self, matrix: &Matrix) -> Option<u32> {
        if matrix.parts.iter().all(|part| part.bias.is_none()) {
            return None;
        }
        let name = |part: &MatrixPart| match &part.bias {
            Some(bias) => self.identity(bias),
            None => format!("zeros{}", part.columns),
        };
        let names: Vec<String> = matrix.parts.iter().map(name).collect();
        let beta = matrix.beta;
        let key = WeightKey(format!("{}:row*{beta}", names.join("+")));
        let parts: Vec<(Option<Tensor>, usize)> =
            matrix.parts.iter().map(|part| (part.bias.clone(), part.columns)).collect();
        let bytes: usize = parts.iter().map(|(_, columns)| columns.next_multiple_of(8) * 4).sum();
        let pack = move || {
            let one = |(bias, columns): &(Option<Tensor>, usize)| match bias {
                Some(bias) => packing::float_row(bias, beta).unwrap_or_default(),
                None => vec![0; columns.next_multiple_of(8) * 4],
            };
            parts.iter().flat_map(one).collect()
        };
        Some(self.keyed_weight(key, bytes, Packer(Arc::new(pack))))
    }
}

/// A product of rows with constant weights.
struct Rows {
    input: View,
    depth: usize,
    /// Its number and bytes.
    weight: (u32, usize),
    columns: usize,
    bias: Option<u32>,
    residual: Option<(View, usize)>,
    act: i32,
}

/// Matrix products of one left operand with several constant right operands, computed as one.
pub struct Matrix {
    /// The left operand.
    pub input: ValueId,
    /// The right operands. If there are several, each has columns in multiples of eight.
    pub parts: Vec<MatrixPart>,
    /// Whether the right operands are transposed.
    pub transposed: bool,
    /// Factor on the products.
    pub alpha: f32,
    /// Factor on the biases.
    pub beta: f32,
    /// Added last, in the sizes of the output; only to a single part.
    pub residual: Option<View>,
    /// Applied to the sum.
    pub activation: Activation,
}

/// One right operand.
pub struct MatrixPart {
    /// The matrix; leading dimensions are ones.
    pub weight: Tensor,
    /// A row added to every row.
    pub bias: Option<Tensor>,
    /// Columns of the result.
    pub columns: usize,
    /// The result.
    pub output: ValueId,
}

impl Matrix {
    /// Elements of a row of the left operand.
    pub fn depth(&self) -> usize {
        let shape = self.parts[0].weight.shape();
        if self.transposed { shape[shape.len() - 1] } else { shape[shape.len() - 2] }
    }
}

/// The dimensions of `input` with those of its rows in memory order, if the output's rows are the
/// same; as they are otherwise, and where that is possible.
pub fn row_order(input: &View, output: &[usize]) -> Vec<usize> {
    let rank = input.shape.len();
    let plain: Vec<usize> = (0..rank).collect();
    let same = rank == output.len() && rank > 1 && input.shape[..rank - 1] == output[..rank - 1];
    let (rows, depth) = (input.shape.iter().rev().skip(1).product(), input.shape.last().copied());
    let readable = |view: &View| rows_of(view, rows, depth.unwrap_or(1)).is_some();
    if !same || readable(input) {
        return plain;
    }
    let mut order: Vec<usize> =
        input.memory_order().into_iter().filter(|axis| *axis != rank - 1).collect();
    order.push(rank - 1);
    if readable(&input.permuted(&order)) { order } else { plain }
}

/// `order` for a value of `rank` dimensions: the same, or that of the dimensions.
pub fn row_order_of(order: &[usize], rank: usize) -> Vec<usize> {
    if order.len() == rank { order.to_vec() } else { (0..rank).collect() }
}

/// The order that undoes `order`.
pub fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (position, axis) in order.iter().enumerate() {
        inverse[*axis] = position;
    }
    inverse
}

/// `view` as `rows` rows of `columns` adjacent halves that vector loads can read.
pub fn rows_of(view: &View, rows: usize, columns: usize) -> Option<View> {
    let mut flat = view.reshaped(&[rows, columns])?;
    if rows == 1 {
        flat.strides[0] = columns.next_multiple_of(8);
    }
    let aligned = flat.strides[0] % 8 == 0 && flat.offset % 8 == 0 && columns.is_multiple_of(8);
    let neighbours = columns == 1 || flat.strides[1] == 1;
    (flat.element == Element::F16 && aligned && neighbours && flat.strides[0] >= columns)
        .then_some(flat)
}
