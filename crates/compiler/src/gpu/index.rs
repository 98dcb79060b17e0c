//! Operators that move elements: gather, scatter, padding, slices, repetition, and those computed
//! from indices alone (`kernels/index.cuh`).
//!
//! Outputs whose size depends on data (`NonZero`, `Compress`, `NonMaxSuppression`) have no kernel:
//! a plan's sizes are fixed.

mod gather;
mod pattern;

pub use gather::{gather, gather_elements, gather_nd, scatter_elements, scatter_nd};
pub use pattern::{eye_like, one_hot, range, trilu};

use model::op::PadMode;

use super::args::ArgsWriter;
use super::draft::{LaunchDraft, StepDraft};
use super::elementwise::{bits, copy};
use super::loop_nest::{
    LoopNest, MAX_RANK, address, check_output, check_view, computed_name, describe_all, kernel,
    single,
};
use super::view::{Element, View};

/// `y` is `x` with padding; negative `begins` remove elements. The shape of `y` gives the padding
/// at the ends.
pub fn pad(
    mode: PadMode,
    begins: &[i64],
    value: f64,
    x: &View,
    y: &View,
) -> Result<StepDraft, String> {
    let steps = vec![1; x.shape.len()];
    moved("Pad", mode, begins, &steps, value, x, y)
}

/// `y[i] = x[start + i * step]` along every dimension; steps may be negative. If all are positive,
/// a view of `x` suffices.
pub fn slice(starts: &[i64], steps: &[i64], x: &View, y: &View) -> Result<StepDraft, String> {
    let begins: Vec<i64> = starts.iter().map(|start| -start).collect();
    moved("Slice", PadMode::Constant, &begins, steps, 0.0, x, y)
}

/// `y` repeats `x` along every dimension.
pub fn tile(repeats: &[usize], x: &View, y: &View) -> Result<StepDraft, String> {
    let agrees = repeats.len() == x.shape.len()
        && y.shape.len() == x.shape.len()
        && (0..x.shape.len())
            .all(|axis| x.shape[axis].checked_mul(repeats[axis]) == Some(y.shape[axis]));
    if !agrees {
        return Err(format!("no {repeats:?} times {:?} as {:?}", x.shape, y.shape));
    }
    let (mut from, mut to) = (x.clone(), View { slack: 0, ..y.clone() });
    for axis in (0..x.shape.len()).rev() {
        from.shape.insert(axis, repeats[axis]);
        from.strides.insert(axis, 0);
        to.shape[axis] = x.shape[axis];
        to.shape.insert(axis, repeats[axis]);
        to.strides.insert(axis, y.strides[axis] * x.shape[axis]);
    }
    named("Tile", x, y, copy(&from, &to)?)
}

/// Copies every input to its part of `y` along `axis`.
pub fn concat(axis: usize, inputs: &[View], y: &View) -> Result<Vec<StepDraft>, String> {
    let mut start = 0;
    let mut works = Vec::with_capacity(inputs.len());
    for input in inputs {
        let length =
            input.shape.get(axis).copied().ok_or_else(|| format!("no dimension {axis}"))?;
        if start + length > y.shape.get(axis).copied().unwrap_or(0) {
            return Err(format!("parts longer than {:?} along {axis}", y.shape));
        }
        let part = y.sliced(axis, start, length, 1);
        if part.shape != input.shape {
            return Err(format!("{:?} is not a part of {:?} along {axis}", input.shape, y.shape));
        }
        if length > 0 {
            works.push(copy(input, &part)?);
        }
        start += length;
    }
    Ok(works)
}

/// Channels to blocks of pixels.
pub fn depth_to_space(block: usize, crd: bool, x: &View, y: &View) -> Result<StepDraft, String> {
    let [n, c, h, w] = four(x)?;
    let fits = block > 0
        && c.is_multiple_of(block * block)
        && y.shape == [n, c / (block * block), h * block, w * block];
    if !fits {
        return Err(format!(
            "moving blocks of {block} from {:?} to {:?} is not supported",
            x.shape, y.shape
        ));
    }
    let inner = c / (block * block);
    let (split, order) = if crd {
        ([n, inner, block, block, h, w], [0, 1, 4, 2, 5, 3])
    } else {
        ([n, block, block, inner, h, w], [0, 3, 4, 1, 5, 2])
    };
    let from = split_view(x, &split)?.permuted(&order);
    let to = split_view(y, &[n, inner, h, block, w, block])?;
    named("DepthToSpace", x, y, copy(&from, &to)?)
}

/// Blocks of pixels to channels.
pub fn space_to_depth(block: usize, x: &View, y: &View) -> Result<StepDraft, String> {
    let [n, c, h, w] = four(x)?;
    let whole = block > 0 && h.is_multiple_of(block) && w.is_multiple_of(block);
    if !whole || y.shape != [n, c * block * block, h / block, w / block] {
        return Err(format!(
            "moving blocks of {block} from {:?} to {:?} is not supported",
            x.shape, y.shape
        ));
    }
    let from =
        split_view(x, &[n, c, h / block, block, w / block, block])?.permuted(&[0, 3, 5, 1, 2, 4]);
    let to = split_view(y, &[n, block, block, c, h / block, w / block])?;
    named("SpaceToDepth", x, y, copy(&from, &to)?)
}

/// Reverses the first `lengths` elements of each sequence.
pub fn reverse_sequence(
    (batch_axis, time_axis): (usize, usize),
    x: &View,
    lengths: &View,
    y: &View,
) -> Result<StepDraft, String> {
    check_view(x)?;
    check_output(y)?;
    let rank = x.shape.len();
    let fits =
        x.shape == y.shape && x.element == y.element && batch_axis < rank && time_axis < rank;
    if !fits
        || batch_axis == time_axis
        || lengths.shape != [x.shape[batch_axis]]
        || !is_index(lengths.element)
    {
        return Err(format!(
            "reversing sequences of {:?} with lengths {:?} is not supported",
            x.shape, lengths.shape
        ));
    }
    let only = |at: usize, stride: usize| {
        (0..rank).map(|axis| if axis == at { stride } else { 0 }).collect()
    };
    let mut input = x.strides.clone();
    input[time_axis] = 0;
    let operands =
        [y.strides.clone(), input, only(batch_axis, lengths.strides[0]), only(time_axis, 1)];
    let nest = LoopNest::new(&y.shape, &operands).ordered_by(0).merged();
    nest.check()?;
    let mut args = ArgsWriter::new();
    args.address(address(x)).address(address(lengths)).address(address(y));
    args.int(nest.len()).int(x.shape[time_axis]).int(x.strides[time_axis]);
    nest.write(&mut args);
    let expression = format!(
        "tiles::Reverse<{}, {}, {}>",
        bits(x.element).cuda_name(),
        lengths.element.cuda_name(),
        nest.rank()
    );
    let draft = LaunchDraft::plain(
        kernel("index.cuh", &[], expression, 128),
        nest.len().div_ceil(128),
        args,
    );
    let signature = format!("reverse {batch_axis} {time_axis} {}", describe_all(&[x, lengths, y]));
    Ok(single("ReverseSequence", signature, draft, &[x, lengths], y))
}

/// Whether an element can be an index.
fn is_index(element: Element) -> bool {
    !element.is_float() && element != Element::Bool
}

/// A copy under the name of its operator, with the original views.
fn named(op: &'static str, x: &View, y: &View, work: StepDraft) -> Result<StepDraft, String> {
    Ok(StepDraft { op, reads: vec![x.clone()], writes: vec![y.clone()], ..work })
}

fn four(view: &View) -> Result<[usize; 4], String> {
    view.shape.clone().try_into().map_err(|shape| format!("{shape:?} is not a batch of images"))
}

/// Dimensions split into parts, which never requires a copy.
fn split_view(view: &View, shape: &[usize]) -> Result<View, String> {
    let view = View { slack: 0, ..view.clone() };
    view.reshaped(shape).ok_or_else(|| format!("{:?} does not split into {shape:?}", view.shape))
}

/// `y[i] = x[i * step - begin]`, padded by `mode`.
fn moved(
    op: &'static str,
    mode: PadMode,
    begins: &[i64],
    steps: &[i64],
    value: f64,
    x: &View,
    y: &View,
) -> Result<StepDraft, String> {
    check_view(x)?;
    check_output(y)?;
    let rank = x.shape.len();
    let fits = y.shape.len() == rank && begins.len() == rank && steps.len() == rank;
    if !fits || x.element != y.element || (x.is_empty() && mode != PadMode::Constant) {
        return Err(format!(
            "{op} of {:?} {:?} as {:?} {:?} is not supported",
            x.element, x.shape, y.element, y.shape
        ));
    }
    let reach = |axis: usize| {
        let far = (y.shape[axis] as i128) * i128::from(steps[axis]).abs()
            + i128::from(begins[axis]).abs();
        far + x.shape[axis] as i128 <= i128::from(i32::MAX / 2)
    };
    if !(0..rank).all(reach) {
        return Err(format!("a {op} of {begins:?} and {steps:?} reaches too far"));
    }
    let mut axes: Vec<usize> = (0..rank)
        .filter(|&axis| y.shape[axis] != 1 || x.shape[axis] != 1 || begins[axis] != 0)
        .collect();
    axes.sort_by_key(|axis| std::cmp::Reverse(y.strides[*axis]));
    if axes.len() > MAX_RANK {
        return Err(format!("a {op} of {} dimensions, at most {MAX_RANK}", axes.len()));
    }
    let mut args = ArgsWriter::new();
    let items = y.len();
    args.address(address(x)).address(address(y)).int(items);
    let border = value.to_bits();
    args.signed(border as u32 as i32).signed((border >> 32) as u32 as i32);
    write_moves(&mut args, &axes, begins, steps, x, y);
    let expression = format!(
        "tiles::Pad<tiles::kPad{mode:?}, {}, {}, {}>",
        x.element.cuda_name(),
        computed_name(x.element),
        axes.len().max(1)
    );
    let text = kernel("index.cuh", &[x.element], expression, 128);
    let draft = LaunchDraft::plain(text, items.div_ceil(128), args);
    let signature = format!("{op} {mode:?} {begins:?} {steps:?} {value} {}", describe_all(&[x, y]));
    Ok(single(op, signature, draft, &[x], y))
}

/// The fields of `PadArgs` that have one number per dimension.
fn write_moves(
    args: &mut ArgsWriter,
    axes: &[usize],
    begins: &[i64],
    steps: &[i64],
    x: &View,
    y: &View,
) {
    // A scalar has one dimension of one element.
    let size = |view: &View, at: usize| axes.get(at).map_or(1, |axis| view.shape[*axis]);
    let stride = |view: &View, at: usize| axes.get(at).map_or(0, |axis| view.strides[*axis]);
    let of = |list: &[i64], at: usize, otherwise: i64| {
        axes.get(at).map_or(otherwise, |axis| list[*axis]) as i32
    };
    let all = 0..axes.len().max(1);
    for at in all.clone() {
        args.fast_div(size(y, at));
    }
    for view in [y, x] {
        for at in all.clone() {
            args.int(stride(view, at));
        }
    }
    for at in all.clone() {
        args.int(size(x, at));
    }
    for at in all.clone() {
        args.signed(of(begins, at, 0));
    }
    for at in all {
        args.signed(of(steps, at, 1));
    }
}
