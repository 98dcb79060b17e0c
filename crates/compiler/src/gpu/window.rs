//! Pooling, resizing, sampling and response normalization over strided images:
//! `kernels/window.cuh`.

mod resize;

use model::op::{GlobalPool, Padding, Pool, PoolKind, ReduceKind, Window};

use super::args::{Address, ArgsWriter};
use super::draft::{LaunchDraft, StepDraft};
use super::loop_nest::{
    LoopNest, address, check_output, check_view, computed_name, describe_all, kernel, single,
};
use super::product::{Sizes, begins, three};
use super::reduce::reduce;
use super::view::{Element, View};

pub use resize::{ResizeAxis, grid_sample, resize, resize_axes};

/// Windows of `x`, `[N, C, ..]`, with up to three spatial dimensions. `places` is the second output
/// of [`PoolKind::MaxWithIndices`].
pub fn pool(spec: &Pool, x: &View, y: &View, places: Option<&View>) -> Result<StepDraft, String> {
    check_view(x)?;
    check_output(y)?;
    let sizes = Sizes::new(&spec.window, &x.shape, &spec.window.kernel, &y.shape)?;
    let is_max = matches!(spec.kind, PoolKind::Max | PoolKind::MaxWithIndices { .. });
    let types_fit =
        x.element == y.element && x.element != Element::Bool && (is_max || x.element.is_float());
    if !types_fit || x.shape[1] != y.shape[1] {
        return Err(format!(
            "pooling of {:?} {:?} as {:?} {:?} is not supported",
            x.element, x.shape, y.element, y.shape
        ));
    }
    let places = checked_places(spec.kind, y, places)?;
    let pads = begins(&spec.window, &sizes, |i| border(&sizes, i));
    let nest = pool_nest(x, y, places, &sizes);
    nest.check()?;
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(y)).address(places.map_or(Address::Null, address));
    args.int(nest.len());
    for list in [sizes.input, three(&x.strides[2..], 0), sizes.kernel, sizes.dilations] {
        list.iter().for_each(|value| end(args.int(*value)));
    }
    pads.iter().for_each(|pad| end(args.signed(*pad)));
    counted(spec, &sizes, pads).iter().for_each(|value| end(args.signed(*value)));
    place_strides(spec.kind, &sizes).iter().for_each(|value| end(args.int(*value)));
    args.float(if let PoolKind::Lp { p } = spec.kind { p.max(1) as f32 } else { 0.0 });
    nest.write(&mut args);
    let kind = match (spec.kind, places) {
        (_, Some(_)) => "Place",
        (PoolKind::Max | PoolKind::MaxWithIndices { .. }, None) => "Max",
        (PoolKind::Average { .. }, None) => "Average",
        (PoolKind::Lp { .. }, None) => "Norm",
    };
    let (stored, kind_of) = (x.element.cuda_name(), computed_name(x.element));
    let expression =
        format!("tiles::PoolWindow<tiles::kPool{kind}, {stored}, {kind_of}, {}>", nest.rank());
    let draft = LaunchDraft::plain(
        kernel("window.cuh", &[x.element], expression, 128),
        nest.len().div_ceil(128),
        args,
    );
    let signature = format!("{spec:?} {}", describe_all(&[x, y]));
    let mut work = single("Pool", signature, draft, &[x], y);
    work.writes.extend(places.cloned());
    work.flops = y.len() as u64 * sizes.kernel.iter().product::<usize>() as u64;
    Ok(work)
}

/// The view for the indices of the largest elements, if they are an output.
fn checked_places<'a>(
    kind: PoolKind,
    y: &View,
    places: Option<&'a View>,
) -> Result<Option<&'a View>, String> {
    let places = places.filter(|_| matches!(kind, PoolKind::MaxWithIndices { .. }));
    if let Some(places) = places {
        check_output(places)?;
        if places.element != Element::I64 || places.shape != y.shape {
            return Err(format!(
                "indices of type {:?} and shape {:?} are not supported",
                places.element, places.shape
            ));
        }
    }
    Ok(places)
}

/// One value for every image and channel; `y` has ones for the spatial dimensions.
pub fn global_pool(spec: GlobalPool, x: &View, y: &View) -> Result<StepDraft, String> {
    let axes: Vec<usize> = (2..x.shape.len()).collect();
    let kind = match spec {
        GlobalPool::Average => ReduceKind::Mean,
        GlobalPool::Max => ReduceKind::Max,
        GlobalPool::Lp { p: 1 } => ReduceKind::L1,
        GlobalPool::Lp { p: 2 } => ReduceKind::L2,
        GlobalPool::Lp { p } => {
            let kernel = x.shape.get(2..).unwrap_or_default().to_vec();
            let padding = Padding::Explicit(Vec::new());
            let window = Window { kernel, strides: Vec::new(), dilations: Vec::new(), padding };
            return pool(&Pool { kind: PoolKind::Lp { p }, window, ceil_mode: false }, x, y, None);
        }
    };
    Ok(StepDraft { op: "GlobalPool", ..reduce(kind, x, &axes, y)? })
}

/// `y = x / (bias + alpha / size * sum of squares over size channels) ^ beta`.
pub fn lrn(
    size: usize,
    (alpha, beta, bias): (f32, f32, f32),
    x: &View,
    y: &View,
) -> Result<StepDraft, String> {
    check_view(x)?;
    check_output(y)?;
    let is_small = x.element.is_float() && x.element != Element::F64;
    if x.shape != y.shape || x.shape.len() < 2 || x.element != y.element || !is_small || size == 0 {
        return Err(format!(
            "response normalization of {:?} {:?} is not supported",
            x.element, x.shape
        ));
    }
    let rank = x.shape.len();
    let mut input = x.strides.clone();
    input[1] = 0;
    let channel = (0..rank).map(|axis| usize::from(axis == 1)).collect();
    let nest = LoopNest::new(&x.shape, &[y.strides.clone(), input, channel]).ordered_by(0).merged();
    nest.check()?;
    let clamped = size.min(x.shape[1] * 2 + 1);
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(y));
    args.int(nest.len()).int(x.shape[1]).int(x.strides[1]);
    args.int((clamped - 1) / 2).int(clamped - 1 - (clamped - 1) / 2);
    args.float(alpha / size as f32).float(beta).float(bias);
    nest.write(&mut args);
    let expression = format!("tiles::Response<{}, {}>", x.element.cuda_name(), nest.rank());
    let draft = LaunchDraft::plain(
        kernel("window.cuh", &[x.element], expression, 128),
        nest.len().div_ceil(128),
        args,
    );
    let signature = format!("lrn {size} {alpha} {beta} {bias} {}", describe_all(&[x, y]));
    Ok(StepDraft {
        flops: (x.len() * (2 * clamped + 2)) as u64,
        ..single("Lrn", signature, draft, &[x], y)
    })
}

/// Ends a chain of writes.
fn end(_: &mut ArgsWriter) {}

/// The padding of both ends that gives the output its size.
fn border(sizes: &Sizes, i: usize) -> usize {
    let reach =
        (sizes.output[i] - 1) * sizes.strides[i] + sizes.dilations[i] * (sizes.kernel[i] - 1) + 1;
    reach.saturating_sub(sizes.input[i])
}

/// Where windows end that count towards a mean with their padding; -1 when only elements of the
/// image count.
fn counted(spec: &Pool, sizes: &Sizes, pads: [i32; 3]) -> [i32; 3] {
    if spec.kind != (PoolKind::Average { count_include_pad: true }) {
        return [-1; 3];
    }
    [0, 1, 2].map(|i| {
        let begin = usize::try_from(pads[i]).unwrap_or(0);
        let end = match &spec.window.padding {
            Padding::Explicit(list) => {
                let at = (i + sizes.rank).checked_sub(3).map(|at| at + sizes.rank);
                at.and_then(|at| list.get(at)).copied().unwrap_or(0)
            }
            Padding::SameUpper | Padding::SameLower => border(sizes, i).saturating_sub(begin),
        };
        i32::try_from(sizes.input[i].saturating_add(begin).saturating_add(end))
            .unwrap_or(i32::MAX / 4)
    })
}

/// How the index of an element is counted within its plane.
fn place_strides(kind: PoolKind, sizes: &Sizes) -> [usize; 3] {
    let [depth, height, width] = sizes.input;
    match kind {
        PoolKind::MaxWithIndices { column_major: true } => [1, depth, depth * height],
        _ => [height * width, width, 1],
    }
}

/// Over all outputs in memory order: output, indices, input, index of the plane, start of the
/// window.
fn pool_nest(x: &View, y: &View, places: Option<&View>, sizes: &Sizes) -> LoopNest {
    let of = |view: &View| {
        let spatial = three(&view.strides[2..], 0);
        vec![view.strides[0], view.strides[1], spatial[0], spatial[1], spatial[2]]
    };
    let [d, h, w] = sizes.output;
    let plane: usize = sizes.input.iter().product();
    let [pace_d, pace_h, pace_w] = sizes.strides;
    let operands = [
        of(y),
        places.map_or(vec![0; 5], of),
        vec![x.strides[0], x.strides[1], 0, 0, 0],
        vec![x.shape[1] * plane, plane, 0, 0, 0],
        vec![0, 0, pace_d, 0, 0],
        vec![0, 0, 0, pace_h, 0],
        vec![0, 0, 0, 0, pace_w],
    ];
    LoopNest::new(&[y.shape[0], y.shape[1], d, h, w], &operands).ordered_by(0).merged()
}
