//! Reductions over any dimensions, softmax, normalizations, cumulative sums and top-k:
//! `kernels/reduce.cuh`.

mod rows;

use model::op::{ArgReduce, ReduceKind, Softmax, SoftmaxKind};

use super::args::{Address, ArgsWriter};
use super::draft::{LaunchDraft, StepDraft};
use super::loop_nest::{
    LoopNest, address, check_output, check_view, computed, computed_name, describe_all, kernel,
    single,
};
use super::view::{Element, View};
use rows::RowVectors;

/// `y = kind(x)` over `axes`; `y` has them with size one or not at all.
pub fn reduce(kind: ReduceKind, x: &View, axes: &[usize], y: &View) -> Result<StepDraft, String> {
    let exact = !matches!(kind, ReduceKind::L2 | ReduceKind::LogSum | ReduceKind::LogSumExp);
    if x.element == Element::Bool || !(exact || x.element.is_float()) {
        return Err(format!("reduction {kind:?} of {:?} is not supported", x.element));
    }
    let sums = sums(x.element);
    let fold = format!("tiles::Fold<{sums}, {}>", kind as u32);
    let work = folded("Reduce", &fold, sums, x, axes, y)?;
    Ok(StepDraft { signature: format!("{kind:?} {}", work.signature), ..work })
}

/// The index of the largest or smallest element along a dimension; `y` is `I64`.
pub fn arg_reduce(arg: &ArgReduce, x: &View, y: &View) -> Result<StepDraft, String> {
    let axis = axis(arg.axis, x.shape.len())?;
    if y.element != Element::I64 || x.element == Element::Bool {
        return Err(format!(
            "index reduction of {:?} to {:?} is not supported",
            x.element, y.element
        ));
    }
    let kind = computed_name(x.element);
    let fold = format!("tiles::PlaceFold<{kind}, {}, {}>", arg.max, arg.select_last);
    let work = folded("ArgReduce", &fold, kind, x, &[axis], y)?;
    Ok(StepDraft { signature: format!("{fold} {}", work.signature), ..work })
}

/// `y` is softmax of `x` or a similar operator.
pub fn softmax(softmax: &Softmax, x: &View, y: &View) -> Result<StepDraft, String> {
    let first = axis(softmax.axis, x.shape.len())?;
    let last = if softmax.flatten { x.shape.len() } else { first + 1 };
    let kind = match softmax.kind {
        SoftmaxKind::Softmax => "Softmax",
        SoftmaxKind::LogSoftmax => "LogSoftmax",
        SoftmaxKind::Hardmax => "Hardmax",
    };
    let axes: Vec<usize> = (first..last).collect();
    normalized(kind, 0.0, &Operands::of(x, y), &axes)
}

/// `y = (x - mean) / deviation * scale + bias` over the dimensions from `axis_from` on; also writes
/// mean and deviation if they are outputs.
pub fn layer_norm(
    axis_from: i64,
    epsilon: f32,
    (x, scale, bias): (&View, &View, Option<&View>),
    (y, mean, deviation): (&View, Option<&View>, Option<&View>),
) -> Result<StepDraft, String> {
    let first = axis(axis_from, x.shape.len())?;
    let axes: Vec<usize> = (first..x.shape.len()).collect();
    let operands = Operands { x, y, scale: Some(scale), bias, mean, deviation };
    normalized("Layer", epsilon, &operands, &axes)
}

/// `y = x / root mean square * scale` over the dimensions from `axis_from` on.
pub fn rms_norm(
    axis_from: i64,
    epsilon: f32,
    x: &View,
    scale: &View,
    y: &View,
) -> Result<StepDraft, String> {
    let first = axis(axis_from, x.shape.len())?;
    let axes: Vec<usize> = (first..x.shape.len()).collect();
    let operands = Operands { scale: Some(scale), ..Operands::of(x, y) };
    normalized("RootMeanSquare", epsilon, &operands, &axes)
}

/// Normalization of every image and channel; `scale` and `bias` are per channel.
pub fn instance_norm(
    epsilon: f32,
    x: &View,
    scale: &View,
    bias: &View,
    y: &View,
) -> Result<StepDraft, String> {
    group_norm(x.shape.get(1).copied().unwrap_or(0), epsilon, x, scale, bias, y)
}

/// Normalization of groups of channels; `scale` and `bias` are per channel.
pub fn group_norm(
    groups: usize,
    epsilon: f32,
    x: &View,
    scale: &View,
    bias: &View,
    y: &View,
) -> Result<StepDraft, String> {
    let channels = *x.shape.get(1).ok_or("an operand of group normalization has no channels")?;
    if groups == 0
        || !channels.is_multiple_of(groups)
        || scale.len() != channels
        || bias.len() != channels
    {
        return Err(format!("{channels} channels in {groups} groups with {} scales", scale.len()));
    }
    let (x, y) = (split_channels(x, groups), split_channels(y, groups));
    let parameter = |view: &View| {
        let view = view.reshaped(&[groups, channels / groups]);
        let view = view.ok_or("the scale or bias is not one run of elements")?;
        let mut spread =
            View { shape: x.shape.clone(), strides: vec![0; x.shape.len()], ..view.clone() };
        spread.strides[1] = view.strides[0];
        spread.strides[2] = view.strides[1];
        Ok::<View, String>(spread)
    };
    let (scale, bias) = (parameter(scale)?, parameter(bias)?);
    let axes: Vec<usize> = (2..x.shape.len()).collect();
    let operands = Operands { scale: Some(&scale), bias: Some(&bias), ..Operands::of(&x, &y) };
    normalized("Layer", epsilon, &operands, &axes)
}

/// `y = x / norm` with the 1- or 2-norm along a dimension.
pub fn lp_norm(along: i64, p: u8, x: &View, y: &View) -> Result<StepDraft, String> {
    let axis = axis(along, x.shape.len())?;
    match p {
        1 => normalized("Norm1", 0.0, &Operands::of(x, y), &[axis]),
        2 => normalized("Norm2", 0.0, &Operands::of(x, y), &[axis]),
        _ => Err(format!("norm of order {p} is not supported")),
    }
}

/// Cumulative sums along a dimension.
pub fn cum_sum(
    along: usize,
    exclusive: bool,
    reverse: bool,
    x: &View,
    y: &View,
) -> Result<StepDraft, String> {
    check_view(x)?;
    check_output(y)?;
    if along >= x.shape.len()
        || x.shape != y.shape
        || x.element != y.element
        || x.element == Element::Bool
    {
        return Err(format!(
            "cumulative sum along {along} of {:?} to {:?} is not supported",
            x.shape, y.shape
        ));
    }
    let outer = outer_nest(x.shape.len(), &[along], &[x, y])?;
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(y));
    args.int(outer.len()).int(x.shape[along]).int(x.strides[along]).int(y.strides[along]);
    args.int(usize::from(exclusive)).int(usize::from(reverse));
    outer.write(&mut args);
    let (element, sums) = (x.element.cuda_name(), sums(x.element));
    let expression = format!("tiles::RunningSum<{element}, {sums}, {}>", outer.rank());
    let draft = LaunchDraft::plain(
        kernel("reduce.cuh", &[x.element], expression, 128),
        outer.len().div_ceil(4),
        args,
    );
    let signature = format!("running sum {along} {exclusive} {reverse} {}", describe_all(&[x, y]));
    Ok(StepDraft { flops: x.len() as u64, ..single("CumSum", signature, draft, &[x], y) })
}

/// The maximum `k` of top-k: each element costs a pass over the row.
pub const MAX_TOP: usize = 4096;

/// The largest or smallest elements along a dimension, in order, and their indices. The shape of
/// `values` gives their number.
pub fn top_k(
    along: i64,
    largest: bool,
    x: &View,
    values: &View,
    places: &View,
) -> Result<StepDraft, String> {
    let axis = axis(along, x.shape.len())?;
    check_view(x)?;
    check_output(values)?;
    check_output(places)?;
    let count = values.shape.get(axis).copied().unwrap_or(0);
    let fits = values.shape == places.shape
        && values.shape.len() == x.shape.len()
        && count <= x.shape[axis];
    if !fits || count > MAX_TOP || places.element != Element::I64 || values.element != x.element {
        return Err(format!("top {count} of {:?} is not supported (at most {MAX_TOP})", x.shape));
    }
    let outer = outer_nest(x.shape.len(), &[axis], &[x, values, places])?;
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(values)).address(address(places));
    args.int(x.shape[axis]).int(count);
    args.int(x.strides[axis]).int(values.strides[axis]).int(places.strides[axis]);
    outer.write(&mut args);
    let (element, kind) = (x.element.cuda_name(), computed_name(x.element));
    let expression = format!("tiles::Top<{element}, {kind}, {largest}, {}>", outer.rank());
    let draft =
        LaunchDraft::plain(kernel("reduce.cuh", &[x.element], expression, 256), outer.len(), args);
    let signature = format!("top {axis} {largest} {}", describe_all(&[x, values, places]));
    let mut work = single("TopK", signature, draft, &[x], values);
    work.writes.push(places.clone());
    work.flops = (x.len() as u64).saturating_mul(count as u64);
    Ok(work)
}

/// A dimension that may be counted from the end.
pub fn axis(axis: i64, rank: usize) -> Result<usize, String> {
    let counted = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(counted)
        .ok()
        .filter(|at| *at < rank)
        .ok_or_else(|| format!("dimension {axis} of {rank} dimensions"))
}

/// The type in which elements are summed.
fn sums(element: Element) -> &'static str {
    match computed(element) {
        Element::F32 => "float",
        Element::F64 => "double",
        _ => "long long",
    }
}

/// `[N, C, ..]` as `[N, G, C / G, ..]`.
fn split_channels(view: &View, groups: usize) -> View {
    let mut split = view.clone();
    let within = view.shape[1] / groups;
    split.shape[1] = groups;
    split.shape.insert(2, within);
    split.strides[1] = view.strides[1] * within;
    split.strides.insert(2, view.strides[1]);
    split
}

/// The loops over all dimensions but `axes`, in memory order of the first operand.
fn outer_nest(rank: usize, axes: &[usize], operands: &[&View]) -> Result<LoopNest, String> {
    let kept: Vec<usize> = (0..rank).filter(|axis| !axes.contains(axis)).collect();
    let nest = nest_over(&kept, operands);
    nest.check()?;
    Ok(nest)
}

fn nest_over(axes: &[usize], operands: &[&View]) -> LoopNest {
    let shape: Vec<usize> = axes.iter().map(|axis| operands[0].shape[*axis]).collect();
    let strides: Vec<Vec<usize>> =
        operands.iter().map(|view| axes.iter().map(|axis| view.strides[*axis]).collect()).collect();
    LoopNest::new(&shape, &strides).ordered_by(0).merged()
}

/// How threads share the results of a block: `Team` of `kernels/reduce.cuh`.
struct Team {
    across: usize,
    rows: bool,
}

impl Team {
    fn of(outer: &LoopNest, inner: &LoopNest) -> Team {
        let fastest =
            |nest: &LoopNest| nest.loops.iter().map(|dim| dim.strides[0]).filter(|s| *s > 0).min();
        let rows = match (fastest(inner), fastest(outer)) {
            (Some(inner), Some(outer)) => inner < outer,
            (None, Some(_)) => false,
            _ => true,
        };
        // One warp per result, unless results are few or long.
        let long = inner.len() > 2048 || (outer.len() < 256 && inner.len() > 128);
        let across = if !rows {
            32
        } else if long {
            1
        } else {
            8
        };
        Team { across, rows }
    }

    fn text(&self) -> String {
        format!("{}, {}", self.across, self.rows)
    }
}

/// One result of `fold` for every index outside `axes`.
fn folded(
    op: &'static str,
    fold: &str,
    kind: &str,
    x: &View,
    axes: &[usize],
    y: &View,
) -> Result<StepDraft, String> {
    check_view(x)?;
    check_output(y)?;
    let rank = x.shape.len();
    if x.is_empty() || axes.iter().any(|axis| *axis >= rank) {
        return Err(format!("reduction of {:?} over {axes:?} is not supported", x.shape));
    }
    let result = spread(y, &x.shape, axes)?;
    let outer = outer_nest(rank, axes, &[x, &result])?;
    let reduced: Vec<usize> = (0..rank).filter(|axis| axes.contains(axis)).collect();
    let inner = nest_over(&reduced, &[x]);
    inner.check()?;
    let team = Team::of(&outer, &inner);
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(y)).int(outer.len()).int(inner.len());
    outer.write(&mut args);
    inner.write(&mut args);
    let expression = format!(
        "tiles::Reduce<{}, {}, {kind}, {fold}, {}, {}, {}>",
        x.element.cuda_name(),
        y.element.cuda_name(),
        outer.rank(),
        inner.rank(),
        team.text()
    );
    let text = kernel("reduce.cuh", &[x.element, y.element], expression, 256);
    let draft = LaunchDraft::plain(text, outer.len().div_ceil(team.across), args);
    let signature = format!("reduce {axes:?} {}", describe_all(&[x, y]));
    Ok(StepDraft { flops: x.len() as u64, ..single(op, signature, draft, &[x], y) })
}

/// `view`, which has `axes` with size one or not at all, with the rank of `shape`.
fn spread(view: &View, shape: &[usize], axes: &[usize]) -> Result<View, String> {
    let kept = |axis: &usize| !axes.contains(axis);
    let mut wide = view.clone();
    if view.shape.len() != shape.len() {
        (wide.shape, wide.strides) = (vec![1; shape.len()], vec![0; shape.len()]);
        let places: Vec<usize> = (0..shape.len()).filter(kept).collect();
        if places.len() != view.shape.len() {
            return Err(format!("a result of shape {:?} of {shape:?}", view.shape));
        }
        for (from, to) in places.into_iter().enumerate() {
            wide.shape[to] = view.shape[from];
            wide.strides[to] = view.strides[from];
        }
    }
    let agrees =
        (0..shape.len()).all(|axis| wide.shape[axis] == if kept(&axis) { shape[axis] } else { 1 });
    if agrees { Ok(wide) } else { Err(format!("a result of shape {:?} of {shape:?}", view.shape)) }
}

/// The operands of a normalization.
struct Operands<'a> {
    x: &'a View,
    y: &'a View,
    scale: Option<&'a View>,
    bias: Option<&'a View>,
    mean: Option<&'a View>,
    deviation: Option<&'a View>,
}

impl<'a> Operands<'a> {
    fn of(x: &'a View, y: &'a View) -> Operands<'a> {
        Operands { x, y, scale: None, bias: None, mean: None, deviation: None }
    }

    fn check(&self) -> Result<(), String> {
        check_view(self.x)?;
        check_output(self.y)?;
        let is_small = |view: &View| view.element.is_float() && view.element != Element::F64;
        let all = [self.scale, self.bias, self.mean, self.deviation];
        let known = all.into_iter().flatten().chain([self.x, self.y]).all(is_small);
        let pairs = [(self.scale, self.bias), (self.mean, self.deviation)];
        let alike = |pair: &(Option<&View>, Option<&View>)| match pair {
            (Some(first), Some(second)) => first.element == second.element,
            _ => true,
        };
        if self.x.shape != self.y.shape || !known || !pairs.iter().all(alike) {
            return Err(format!(
                "normalization of {:?} as {:?} is not supported",
                self.x.shape, self.y.shape
            ));
        }
        Ok(())
    }
}

/// `kind` names a member of `Normalization` of `kernels/reduce.cuh`.
fn normalized(
    kind: &str,
    epsilon: f32,
    operands: &Operands,
    axes: &[usize],
) -> Result<StepDraft, String> {
    operands.check()?;
    let Operands { x, y, .. } = *operands;
    let parameter = |view: Option<&View>| match view {
        Some(view) => view
            .broadcast(&x.shape)
            .ok_or_else(|| format!("shape {:?} does not broadcast to {:?}", view.shape, x.shape)),
        None => Ok(View { strides: vec![0; x.shape.len()], ..x.clone() }),
    };
    let statistic = |view: Option<&View>| match view {
        Some(view) => spread(view, &x.shape, axes),
        None => Ok(View { strides: vec![0; x.shape.len()], ..x.clone() }),
    };
    let all = [
        x.clone(),
        y.clone(),
        parameter(operands.scale)?,
        parameter(operands.bias)?,
        statistic(operands.mean)?,
        statistic(operands.deviation)?,
    ];
    let views: Vec<&View> = all.iter().collect();
    let outer = outer_nest(x.shape.len(), axes, &views)?;
    let inner = nest_over(axes, &views[..4]);
    inner.check()?;
    Ok(launch(kind, epsilon, operands, &outer, &inner))
}

fn launch(
    kind: &str,
    epsilon: f32,
    operands: &Operands,
    outer: &LoopNest,
    inner: &LoopNest,
) -> StepDraft {
    let Operands { x, y, scale, bias, mean, deviation } = *operands;
    let element =
        |views: [Option<&View>; 2]| views.into_iter().flatten().next().unwrap_or(x).element;
    let elements = [x.element, y.element, element([scale, bias]), element([mean, deviation])];
    let names = elements.map(Element::cuda_name).join(", ");
    let vectors = RowVectors::of(outer, inner, [Some(x), Some(y), scale, bias])
        .filter(|_| rows::supports(kind, x.element));
    let loops = vectors.map_or(inner.clone(), |vectors| vectors.nest(inner));
    let ranks = format!("{}, {}", outer.rank(), loops.rank());
    let (header, expression, results) = match vectors {
        Some(vectors) => {
            let text = vectors.text();
            let name = format!("tiles::NormalizeRows<tiles::k{kind}, {names}, {ranks}, {text}>");
            ("rows.cuh", name, vectors.rows())
        }
        None => {
            let team = Team::of(outer, inner);
            let text = team.text();
            let name = format!("tiles::Normalize<tiles::k{kind}, {names}, {ranks}, {text}>");
            ("reduce.cuh", name, team.across)
        }
    };
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(y));
    for view in [scale, bias, mean, deviation] {
        args.address(view.map_or(Address::Null, address));
    }
    args.int(outer.len()).int(inner.len()).float(epsilon);
    outer.write(&mut args);
    loops.write(&mut args);
    let text = kernel(header, &elements, expression, 256);
    let draft = LaunchDraft::plain(text, outer.len().div_ceil(results), args);
    let reads: Vec<&View> = [Some(x), scale, bias].into_iter().flatten().collect();
    let writes: Vec<&View> = [Some(y), mean, deviation].into_iter().flatten().collect();
    let signature =
        format!("{kind} {epsilon} {} to {}", describe_all(&reads), describe_all(&writes));
    let op = if kind.ends_with("max") { "Softmax" } else { "Normalize" };
    let mut work = single(op, signature, draft, &reads, y);
    work.writes = writes.into_iter().cloned().collect();
    work.flops = 5 * x.len() as u64;
    work
}
