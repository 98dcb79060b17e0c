//! Convolutions as products, and direct convolutions for groups of few channels.

use model::gpu::GpuTarget;
use model::op::{Activation, Conv, ConvTranspose, Padding, Window};

use super::super::args::ArgsWriter;
use super::super::draft::{LaunchDraft, StepDraft};
use super::super::loop_nest::{LoopNest, describe_all, kernel, single};
use super::super::view::{Element, View};
use super::{Epilogue, Extra, Kind, Picture, Problem, Views, check, drop_ref, write_activation};

/// With fewer output channels per group, most of a product's tile would be unused.
const FEW_CHANNELS: usize = 8;

/// `output = activation(conv(x, weight) + bias + residual)`: `x` is `[N, C, ..]`, `weight` `[O, C /
/// groups, ..]`, `bias` `[O]`.
pub fn conv(
    target: &GpuTarget,
    spec: &Conv,
    (x, weight): (&View, &View),
    (bias, residual): (Option<&View>, Option<&View>),
    output: &View,
) -> Result<StepDraft, String> {
    let (sizes, pads) = checked(spec, &x.shape, &weight.shape, &output.shape)?;
    let (groups, channels, columns) = (spec.groups, weight.shape[1], output.shape[1]);
    let layer = ConvolutionProblem {
        kind: Kind::Convolution,
        groups,
        channels,
        columns: columns / groups,
        sizes,
        pads,
    };
    let strides_of_weight = WeightStrides {
        channel: weight.strides[1],
        column: weight.strides[0],
        group: columns / groups * weight.strides[0],
    };
    layer.work(
        target,
        "Conv",
        spec.activation,
        &Operands { x, weight, bias, residual, output },
        strides_of_weight,
    )
}

/// `output = transposed conv(x, weight) + bias`: `x` is `[N, C, ..]`, `weight` `[C, O / groups,
/// ..]`, `bias` `[O]`.
pub fn conv_transpose(
    target: &GpuTarget,
    spec: &ConvTranspose,
    (x, weight): (&View, &View),
    bias: Option<&View>,
    output: &View,
) -> Result<StepDraft, String> {
    let (sizes, pads) = checked_transposed(spec, &x.shape, &weight.shape, &output.shape)?;
    let (groups, columns) = (spec.groups, weight.shape[1]);
    let channels = x.shape[1] / groups;
    let layer =
        ConvolutionProblem { kind: Kind::Transposed, groups, channels, columns, sizes, pads };
    let strides_of_weight = WeightStrides {
        channel: weight.strides[0],
        column: weight.strides[1],
        group: channels * weight.strides[0],
    };
    layer.work(
        target,
        "ConvTranspose",
        Activation::None,
        &Operands { x, weight, bias, residual: None, output },
        strides_of_weight,
    )
}

/// The sizes and the padding at the beginning of a convolution of these shapes.
pub(super) fn checked(
    spec: &Conv,
    x: &[usize],
    weight: &[usize],
    output: &[usize],
) -> Result<(Sizes, [i32; 3]), String> {
    let groups = spec.groups;
    let sizes = Sizes::of(&spec.window, x, weight, output)?;
    let columns = output[1];
    if groups == 0
        || weight[1] * groups != x[1]
        || weight[0] != columns
        || !columns.is_multiple_of(groups)
    {
        return Err(format!("weights {weight:?} in {groups} groups on {x:?} as {output:?}"));
    }
    let pads = begins(&spec.window, &sizes, |i| {
        let reach = (sizes.output[i] - 1) * sizes.strides[i]
            + sizes.dilations[i] * (sizes.kernel[i] - 1)
            + 1;
        reach.saturating_sub(sizes.input[i])
    });
    Ok((sizes, pads))
}

/// As [`checked`], of a transposed convolution.
pub(super) fn checked_transposed(
    spec: &ConvTranspose,
    x: &[usize],
    weight: &[usize],
    output: &[usize],
) -> Result<(Sizes, [i32; 3]), String> {
    let groups = spec.groups;
    let sizes = Sizes::of(&spec.window, x, weight, output)?;
    if groups == 0
        || weight[0] != x[1]
        || weight[1] * groups != output[1]
        || !x[1].is_multiple_of(groups)
    {
        return Err(format!("weights {weight:?} in {groups} groups on {x:?} as {output:?}"));
    }
    // The padding that gives the output its size.
    let total = |i: usize| {
        let place = (i + sizes.rank).checked_sub(3);
        let extra = place.and_then(|at| spec.output_padding.get(at)).copied().unwrap_or(0);
        let whole = sizes.strides[i] * (sizes.input[i] - 1)
            + extra
            + sizes.dilations[i] * (sizes.kernel[i] - 1)
            + 1;
        whole.saturating_sub(sizes.output[i])
    };
    let pads = match (&spec.output_shape, &spec.window.padding) {
        (Some(_), Padding::Explicit(_)) => {
            let lower = Window { padding: Padding::SameLower, ..spec.window.clone() };
            begins(&lower, &sizes, total)
        }
        _ => begins(&spec.window, &sizes, total),
    };
    Ok((sizes, pads))
}

/// The operands of a convolution.
struct Operands<'a> {
    x: &'a View,
    weight: &'a View,
    bias: Option<&'a View>,
    residual: Option<&'a View>,
    output: &'a View,
}

/// Strides of the weights: along input channels, output channels, and from group to group.
#[derive(Clone, Copy)]
struct WeightStrides {
    channel: usize,
    column: usize,
    group: usize,
}

/// Spatial sizes, three of each: missing ones come first and are one.
#[derive(Clone, Debug)]
pub(in crate::gpu) struct Sizes {
    pub input: [usize; 3],
    pub output: [usize; 3],
    pub kernel: [usize; 3],
    pub strides: [usize; 3],
    pub dilations: [usize; 3],
    /// The number of spatial dimensions.
    pub rank: usize,
}

impl Sizes {
    fn of(
        window: &Window,
        x: &[usize],
        weight: &[usize],
        output: &[usize],
    ) -> Result<Sizes, String> {
        if weight.len() != x.len() || weight.len() < 3 {
            return Err(format!("weights {weight:?} on {x:?}"));
        }
        Sizes::new(window, x, &weight[2..], output)
    }

    /// Of a window of `kernel` from `x` to `output`, both with two dimensions before the spatial
    /// ones.
    pub(in crate::gpu) fn new(
        window: &Window,
        x: &[usize],
        kernel: &[usize],
        output: &[usize],
    ) -> Result<Sizes, String> {
        let rank = x.len().checked_sub(2).filter(|rank| (1..=3).contains(rank));
        let rank =
            rank.ok_or_else(|| format!("windows over {x:?}: one to three spatial dimensions"))?;
        let fits = output.len() == x.len() && output[0] == x[0] && kernel.len() == rank;
        let lists = [&window.strides, &window.dilations];
        let lists_fit =
            lists.iter().all(|list| list.is_empty() || (list.len() == rank && !list.contains(&0)));
        if !fits || !lists_fit || x.contains(&0) || kernel.contains(&0) || output.contains(&0) {
            return Err(format!("a window of {kernel:?} over {x:?} as {output:?}"));
        }
        let large = [&window.strides, &window.dilations]
            .into_iter()
            .flatten()
            .chain(kernel)
            .any(|v| *v > 1 << 20);
        if large {
            return Err(format!("a window of {kernel:?} with steps beyond a million"));
        }
        Ok(Sizes {
            input: three(&x[2..], 1),
            output: three(&output[2..], 1),
            kernel: three(kernel, 1),
            strides: three(&window.strides, 1),
            dilations: three(&window.dilations, 1),
            rank,
        })
    }
}

/// The values at the end of three, `fill` before them.
pub(in crate::gpu) fn three(list: &[usize], fill: usize) -> [usize; 3] {
    let mut all = [fill; 3];
    let missing = 3usize.saturating_sub(list.len());
    for (to, from) in all[missing..].iter_mut().zip(list) {
        *to = *from;
    }
    all
}

/// The padding at the beginning of each dimension; `total` is that of both ends where the window
/// gives an output size.
pub(in crate::gpu) fn begins(
    window: &Window,
    sizes: &Sizes,
    total: impl Fn(usize) -> usize,
) -> [i32; 3] {
    let mut pads = [0; 3];
    for (i, pad) in pads.iter_mut().enumerate() {
        let begin = match &window.padding {
            Padding::Explicit(list) => {
                let place = (i + sizes.rank).checked_sub(3);
                place.and_then(|at| list.get(at)).copied().unwrap_or(0)
            }
            Padding::SameUpper => total(i) / 2,
            Padding::SameLower => total(i) - total(i) / 2,
        };
        *pad = i32::try_from(begin).unwrap_or(i32::MAX / 4).min(i32::MAX / 4);
    }
    pads
}

struct ConvolutionProblem {
    kind: Kind,
    groups: usize,
    /// Input channels of a group.
    channels: usize,
    /// Output channels of a group.
    columns: usize,
    sizes: Sizes,
    pads: [i32; 3],
}

impl ConvolutionProblem {
    fn work(
        &self,
        target: &GpuTarget,
        op: &'static str,
        activation: Activation,
        operands: &Operands,
        strides_of_weight: WeightStrides,
    ) -> Result<StepDraft, String> {
        let Operands { x, weight, bias, residual, output } = *operands;
        check(x, weight, Extra { bias, residual }, output)?;
        let total = self.groups * self.columns;
        let bias_fits = bias.is_none_or(|bias| bias.shape == [total]);
        let residual_fits = residual.is_none_or(|residual| residual.shape == output.shape);
        if !bias_fits || !residual_fits {
            return Err(format!("a bias or residual that does not fit {:?}", output.shape));
        }
        let views = Views { a: x, b: weight, bias, residual, output };
        if self.columns < FEW_CHANNELS {
            return self.direct(op, activation, &views, strides_of_weight);
        }
        let epilogue = Epilogue { alpha: 1.0, beta: 1.0, activation };
        self.problem(&views, strides_of_weight).work(target, op, &views, epilogue)
    }

    fn picture(&self, x: &View) -> Picture {
        let stride = three(&x.strides[2..], 0);
        let step = if self.kind == Kind::Transposed { self.sizes.strides } else { [1; 3] };
        Picture { size: self.sizes.input, stride, pad: self.pads, step }
    }

    /// The stride in the image of one step of the output.
    fn pace(&self) -> [usize; 3] {
        if self.kind == Kind::Transposed { [1; 3] } else { self.sizes.strides }
    }

    fn problem(&self, views: &Views, strides_of_weight: WeightStrides) -> Problem {
        let Views { a: x, b: weight, bias, residual, output } = *views;
        let bias_stride = bias.map_or(0, |bias| bias.strides[0]);
        let residual_channel = residual.map_or(0, |residual| residual.strides[1]);
        let group = LoopNest::new(
            &[self.groups],
            &[
                vec![self.channels * x.strides[1]],
                vec![strides_of_weight.group],
                vec![self.columns * bias_stride],
                vec![self.columns * output.strides[1]],
                vec![self.columns * residual_channel],
            ],
        );
        let sizes = &self.sizes;
        let column = [strides_of_weight.column, bias_stride, output.strides[1], residual_channel];
        let depth = self.channels * sizes.kernel.iter().product::<usize>();
        let plain = self.kind == Kind::Convolution && sizes.kernel == [1; 3] && self.pads == [0; 3];
        let kind = if plain { Kind::Matrix } else { self.kind };
        let row = self.rows(views, plain);
        let inner = self.inner(x, weight, strides_of_weight, plain);
        let picture = if plain { Picture::default() } else { self.picture(x) };
        Problem { kind, group, row, inner, columns: self.columns, depth, column, picture }
    }

    /// The loops over pixels. A `plain` one needs no coordinates: a kernel of one tap without
    /// padding never leaves the image.
    fn rows(&self, views: &Views, plain: bool) -> LoopNest {
        let Views { a: x, residual, output, .. } = *views;
        let of = |view: &View| {
            let spatial = three(&view.strides[2..], 0);
            vec![view.strides[0], spatial[0], spatial[1], spatial[2]]
        };
        let pace = self.pace();
        let [d, h, w] = self.sizes.output;
        let mut input = vec![x.strides[0], 0, 0, 0];
        if plain {
            let spatial = three(&x.strides[2..], 0);
            (0..3).for_each(|i| input[i + 1] = spatial[i] * pace[i]);
        }
        let mut operands = vec![input, vec![0; 4], of(output), residual.map_or(vec![0; 4], of)];
        if !plain {
            operands.extend([
                vec![0, pace[0], 0, 0],
                vec![0, 0, pace[1], 0],
                vec![0, 0, 0, pace[2]],
            ]);
        }
        LoopNest::new(&[x.shape[0], d, h, w], &operands).merged()
    }

    /// The loops over input channels and taps; channels are innermost if they are fastest in the
    /// input.
    fn inner(
        &self,
        x: &View,
        weight: &View,
        strides_of_weight: WeightStrides,
        plain: bool,
    ) -> LoopNest {
        let [d, h, w] = self.sizes.kernel;
        let taps = three(&weight.strides[2..], 0);
        let dilations = self.sizes.dilations;
        let mut operands = vec![
            vec![x.strides[1], 0, 0, 0],
            vec![strides_of_weight.channel, taps[0], taps[1], taps[2]],
        ];
        if !plain {
            operands.extend([
                vec![0, dilations[0], 0, 0],
                vec![0, 0, dilations[1], 0],
                vec![0, 0, 0, dilations[2]],
            ]);
        }
        let mut shape = vec![self.channels, d, h, w];
        if x.strides[1] == 1 {
            shape.rotate_left(1);
            operands.iter_mut().for_each(|strides| strides.rotate_left(1));
        }
        LoopNest::new(&shape, &operands).merged()
    }

    fn direct(
        &self,
        op: &'static str,
        activation: Activation,
        views: &Views,
        strides_of_weight: WeightStrides,
    ) -> Result<StepDraft, String> {
        let nest = self.outputs(views, strides_of_weight);
        nest.check()?;
        let Views { a: x, b: weight, output, .. } = *views;
        let mut args = ArgsWriter::new();
        views.addresses(&mut args);
        args.int(nest.len()).int(self.channels);
        let taps = three(&weight.strides[2..], 0);
        self.sizes.kernel.iter().for_each(|size| drop_ref(args.int(*size)));
        args.int(x.strides[1]).int(strides_of_weight.channel);
        taps.iter().chain(&self.sizes.dilations).for_each(|value| drop_ref(args.int(*value)));
        write_activation(activation, &mut args);
        nest.write(&mut args);
        self.picture(x).write(&mut args);
        let elements = views.elements();
        let names = elements.map(Element::cuda_name).join(", ");
        let expression =
            format!("tiles::Direct<tiles::k{:?}, {names}, {}>", self.kind, nest.rank());
        let text = kernel("product.cuh", &elements, expression, 128);
        let draft = LaunchDraft::plain(text, nest.len().div_ceil(128), args);
        let reads = views.reads();
        let signature = format!(
            "direct {op} {} {activation:?} {:?} {:?} {:?} {} to {}",
            self.groups,
            self.picture(x),
            self.sizes.kernel,
            self.sizes.dilations,
            describe_all(&reads),
            describe_all(&[output])
        );
        let depth = self.channels * self.sizes.kernel.iter().product::<usize>();
        let flops = (output.len() as u64).saturating_mul(2 * depth as u64);
        Ok(StepDraft { flops, ..single(op, signature, draft, &reads, output) })
    }

    /// The loops over all outputs, in the output's memory order: a, b, bias, output, residual, the
    /// position in the image.
    fn outputs(&self, views: &Views, strides_of_weight: WeightStrides) -> LoopNest {
        let Views { a: x, bias, residual, output, .. } = *views;
        let pace = self.pace();
        let [d, h, w] = self.sizes.output;
        let bias = bias.map_or(0, |bias| bias.strides[0]);
        let of = |view: &View| {
            let spatial = three(&view.strides[2..], 0);
            let channel = view.strides[1];
            vec![
                view.strides[0],
                channel * self.columns,
                channel,
                spatial[0],
                spatial[1],
                spatial[2],
            ]
        };
        let operands = [
            vec![x.strides[0], self.channels * x.strides[1], 0, 0, 0, 0],
            vec![0, strides_of_weight.group, strides_of_weight.column, 0, 0, 0],
            vec![0, bias * self.columns, bias, 0, 0, 0],
            of(output),
            residual.map_or(vec![0; 6], of),
            vec![0, 0, 0, pace[0], 0, 0],
            vec![0, 0, 0, 0, pace[1], 0],
            vec![0, 0, 0, 0, 0, pace[2]],
        ];
        let shape = [x.shape[0], self.groups, self.columns, d, h, w];
        LoopNest::new(&shape, &operands).ordered_by(3).merged()
    }
}
