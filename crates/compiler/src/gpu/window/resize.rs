//! Resizing, and sampling at the points of a grid.

use model::op::{AspectPolicy, CoordinateMode, GridPadding, Resize, ResizeMode};

use super::super::args::ArgsWriter;
use super::super::draft::{LaunchDraft, StepDraft};
use super::super::loop_nest::{
    LoopNest, address, check_output, check_view, computed_name, describe_all, kernel, single,
};
use super::super::reduce::axis;
use super::super::view::{Element, View};
use super::end;

/// The maximum number of dimensions that change at once.
const MAX_AXES: usize = 3;

/// How a dimension is resized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResizeAxis {
    /// Output extent per input extent, before rounding.
    pub scale: f64,
    /// The part of the image that `CropAndResize` reads.
    pub region: (f64, f64),
}

/// The resizing of every dimension of `shape`, from the operands of the operator: exactly one of
/// `scales` and `sizes`.
pub fn resize_axes(
    spec: &Resize,
    shape: &[usize],
    region: Option<&[f32]>,
    scales: Option<&[f32]>,
    sizes: Option<&[i64]>,
) -> Result<Vec<ResizeAxis>, String> {
    let axes = match &spec.axes {
        Some(axes) => {
            axes.iter().map(|at| axis(*at, shape.len())).collect::<Result<Vec<_>, _>>()?
        }
        None => (0..shape.len()).collect(),
    };
    let factors: Vec<f64> = match (scales, sizes) {
        (Some(scales), None) => scales.iter().map(|scale| f64::from(*scale)).collect(),
        (None, Some(sizes)) if sizes.len() == axes.len() => {
            axes.iter().zip(sizes).map(|(axis, size)| *size as f64 / shape[*axis] as f64).collect()
        }
        _ => {
            return Err(
                "exactly one of scales and sizes must be given, one number a dimension".to_string()
            );
        }
    };
    let common = match spec.keep_aspect {
        _ if scales.is_some() => None,
        AspectPolicy::Stretch => None,
        AspectPolicy::NotLarger => Some(factors.iter().copied().fold(f64::INFINITY, f64::min)),
        AspectPolicy::NotSmaller => Some(factors.iter().copied().fold(0.0, f64::max)),
    };
    let region = region.filter(|_| spec.coordinates == CoordinateMode::CropAndResize);
    let fits =
        factors.len() == axes.len() && region.is_none_or(|region| region.len() == 2 * axes.len());
    if !fits || !factors.iter().all(|factor| *factor > 0.0 && factor.is_finite()) {
        return Err(format!("scales {factors:?} for {} dimensions", axes.len()));
    }
    let mut all = vec![ResizeAxis { scale: 1.0, region: (0.0, 1.0) }; shape.len()];
    for (i, &axis) in axes.iter().enumerate() {
        all[axis].scale = common.unwrap_or(factors[i]);
        if let Some(region) = region {
            all[axis].region = (f64::from(region[i]), f64::from(region[axes.len() + i]));
        }
    }
    Ok(all)
}

/// `y` is `x` resampled, each dimension by its scale.
pub fn resize(
    spec: &Resize,
    resize_axes: &[ResizeAxis],
    x: &View,
    y: &View,
) -> Result<StepDraft, String> {
    check_resize(spec, resize_axes, x, y)?;
    let rank = x.shape.len();
    let axes = changing(spec, resize_axes, x, y);
    if axes.len() > MAX_AXES {
        return Err(format!("resizing of {} dimensions at once, at most {MAX_AXES}", axes.len()));
    }
    let kept = |axis: usize| if axes.contains(&axis) { 0 } else { x.strides[axis] };
    let mut operands = vec![y.strides.clone(), (0..rank).map(kept).collect()];
    operands.extend(axes.iter().map(|at| (0..rank).map(|axis| usize::from(axis == *at)).collect()));
    let mut nest = LoopNest::new(&y.shape, &operands).ordered_by(0).merged();
    let resized: Vec<usize> = axes.iter().map(|axis| x.strides[*axis]).collect();
    let vec = vector(&nest, &resized, x, y);
    if let Some(fast) = nest.loops.last_mut().filter(|_| vec > 1) {
        fast.size /= vec;
        fast.strides.iter_mut().for_each(|stride| *stride *= vec);
        nest.loops.retain(|each| each.size > 1);
    }
    nest.check()?;
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(y)).int(nest.len());
    args.int(spec.coordinates as usize)
        .int(spec.nearest as usize)
        .int(usize::from(spec.exclude_outside));
    args.float(spec.cubic_coefficient).float(spec.extrapolation_value);
    for &axis in &axes {
        args.int(x.shape[axis]).int(y.shape[axis]).int(x.strides[axis]);
        let ResizeAxis { scale, region: (begin, end) } = resize_axes[axis];
        [scale, begin, end].into_iter().for_each(|value| twice(&mut args, value));
    }
    nest.write(&mut args);
    let expression = format!(
        "tiles::Resize<tiles::kSample{:?}, {}, {}, {}, {}, {vec}>",
        spec.mode,
        x.element.cuda_name(),
        computed_name(x.element),
        nest.rank(),
        axes.len()
    );
    let draft = LaunchDraft::plain(
        kernel("window.cuh", &[x.element], expression, 128),
        nest.len().div_ceil(128),
        args,
    );
    let signature = format!("{spec:?} {resize_axes:?} {}", describe_all(&[x, y]));
    let taps = match spec.mode {
        ResizeMode::Nearest => 1u64,
        ResizeMode::Linear => 2,
        ResizeMode::Cubic => 4,
    };
    let flops = y.len() as u64 * 2 * taps.pow(axes.len() as u32);
    Ok(StepDraft { flops, ..single("Resize", signature, draft, &[x], y) })
}

/// Elements that a thread copies or blends at once: adjacent ones of a dimension that keeps its
/// size. `resized` are the strides of the input along the others.
fn vector(nest: &LoopNest, resized: &[usize], x: &View, y: &View) -> usize {
    let Some((fast, slower)) = nest.loops.split_last() else { return 1 };
    // A resized dimension does not move the input, but its own position.
    let kept = fast.strides[0] == 1 && fast.strides[1] == 1;
    let fits = |vec: &usize| {
        let even = |elements: &usize| elements.is_multiple_of(*vec);
        let apart = slower.iter().all(|each| even(&each.strides[0]) && even(&each.strides[1]));
        vec * x.element.size() <= 16
            && [fast.size, x.offset, y.offset].iter().chain(resized).all(even)
            && apart
    };
    [8, 4, 2].into_iter().find(|vec| kept && fits(vec)).unwrap_or(1)
}

/// Fails for what the kernel does not support.
fn check_resize(
    spec: &Resize,
    resize_axes: &[ResizeAxis],
    x: &View,
    y: &View,
) -> Result<(), String> {
    check_view(x)?;
    check_output(y)?;
    let rank = x.shape.len();
    if y.shape.len() != rank || resize_axes.len() != rank || x.element != y.element || x.is_empty()
    {
        return Err(format!(
            "resizing of {:?} {:?} as {:?} {:?} is not supported",
            x.element, x.shape, y.element, y.shape
        ));
    }
    if spec.antialias {
        return Err("resizing with an antialiasing filter".to_string());
    }
    let is_small = x.element.is_float() && x.element != Element::F64;
    if spec.mode == ResizeMode::Nearest && spec.exclude_outside
        || spec.mode != ResizeMode::Nearest && !is_small
    {
        return Err(format!("{:?} resizing of {:?}", spec.mode, x.element));
    }
    Ok(())
}

/// The dimensions that are not merely copied; at least one, as the kernel requires.
fn changing(spec: &Resize, resize_axes: &[ResizeAxis], x: &View, y: &View) -> Vec<usize> {
    let changes = |axis: &usize| {
        let ResizeAxis { scale, region } = resize_axes[*axis];
        let cropped = spec.coordinates == CoordinateMode::CropAndResize && region != (0.0, 1.0);
        x.shape[*axis] != y.shape[*axis] || (scale - 1.0).abs() >= 1e-9 || cropped
    };
    let axes: Vec<usize> = (0..x.shape.len()).filter(changes).collect();
    if axes.is_empty() && !x.shape.is_empty() { vec![x.shape.len() - 1] } else { axes }
}

/// `Twice` of `kernels/window.cuh`.
fn twice(args: &mut ArgsWriter, value: f64) {
    let bits = value.to_bits();
    args.signed(bits as u32 as i32).signed((bits >> 32) as u32 as i32);
}

/// `x`, `[N, C, ..]`, sampled at the points of `grid`, `[N, .., spatial dimensions]`.
pub fn grid_sample(
    mode: ResizeMode,
    padding: GridPadding,
    align_corners: bool,
    (x, grid): (&View, &View),
    y: &View,
) -> Result<StepDraft, String> {
    check_view(x)?;
    check_view(grid)?;
    check_output(y)?;
    let rank = x.shape.len();
    let spatial = rank.saturating_sub(2);
    let is_small = |view: &View| view.element.is_float() && view.element != Element::F64;
    let fits = (1..=MAX_AXES).contains(&spatial)
        && grid.shape.len() == rank
        && y.shape.len() == rank
        && grid.shape[0] == x.shape[0]
        && grid.shape[rank - 1] == spatial
        && y.shape[..2] == x.shape[..2]
        && y.shape[2..] == grid.shape[1..rank - 1];
    if !fits || !is_small(x) || !is_small(grid) || x.element != y.element || x.is_empty() {
        return Err(format!("sampling of {:?} at {:?} is not supported", x.shape, grid.shape));
    }
    let mut input = vec![0; rank];
    input[..2].copy_from_slice(&x.strides[..2]);
    let points = [&[grid.strides[0], 0], &grid.strides[1..rank - 1]].concat();
    let nest = LoopNest::new(&y.shape, &[y.strides.clone(), input, points]).ordered_by(0).merged();
    nest.check()?;
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(grid)).address(address(y)).int(nest.len());
    args.int(padding as usize).int(usize::from(align_corners)).int(grid.strides[rank - 1]);
    x.shape[2..].iter().chain(&x.strides[2..]).for_each(|value| end(args.int(*value)));
    nest.write(&mut args);
    let (element, of_grid) = (x.element.cuda_name(), grid.element.cuda_name());
    let expression = format!(
        "tiles::GridSample<tiles::kSample{mode:?}, {element}, {of_grid}, {}, {spatial}>",
        nest.rank()
    );
    let text = kernel("window.cuh", &[x.element, grid.element], expression, 128);
    let draft = LaunchDraft::plain(text, nest.len().div_ceil(128), args);
    let signature =
        format!("grid {mode:?} {padding:?} {align_corners} {}", describe_all(&[x, grid, y]));
    let flops = y.len() as u64 * 2 * 4u64.pow(spatial as u32);
    Ok(StepDraft { flops, ..single("GridSample", signature, draft, &[x, grid], y) })
}
