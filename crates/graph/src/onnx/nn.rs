//! Attention and rotary embeddings, made of simpler operators.

use model::op::{
    Binary, Compare, MatMul, Op, Reduce, ReduceKind, Softmax, SoftmaxKind, Spatial, Unary,
};
use model::{DataType, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::tensor::data_type;
use model::dim::SymDim;

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "Attention" => attention(cx),
        "RotaryEmbedding" => rotary_embedding(cx),
        "CenterCropPad" => center_crop_pad(cx),
        _ => Ok(false),
    }
}

pub(super) fn swap_heads() -> Op {
    Op::Transpose { perm: Some(vec![0, 2, 1, 3]) }
}

/// `[batch, tokens, heads * width]` as `[batch, heads, tokens, width]`.
pub(super) fn split_heads(cx: &mut Context, x: ValueId, heads: i64) -> Result<ValueId, MapError> {
    let target = cx.ints(&[0, 0, heads, -1])?;
    let split = cx.part(Op::Reshape { allow_zero: false }, &[x, target])?;
    cx.part(swap_heads(), &[split])
}

/// The size of dimension `axis` of `id`, which the mapping requires to be a number.
pub(super) fn dimension(cx: &Context, id: ValueId, axis: usize) -> Result<i64, MapError> {
    match cx.shape(id).and_then(|shape| shape.get(axis)).and_then(SymDim::fixed) {
        Some(size) if size > 0 => Ok(size),
        _ => unsupported(format!("dimension {axis} of '{}' is not known", cx.graph.value(id).name)),
    }
}

fn attention(cx: &mut Context) -> Mapped {
    cx.at_most(6).or_else(|_| unsupported("nonpad_kv_seqlen"))?;
    let a = &cx.attributes;
    let (q_heads, kv_heads) = (a.int_or("q_num_heads", 0)?, a.int_or("kv_num_heads", 0)?);
    let (softcap, scale) = (a.float_or("softcap", 0.0)?, a.float("scale")?);
    let causal = a.flag("is_causal", false)?;
    let mode = a.int_or("qk_matmul_output_mode", 0)?;
    if a.int_or("left_window_size", -1)? >= 0 || a.int_or("right_window_size", -1)? >= 0 {
        return unsupported("a sliding window");
    }
    let precision = a.int_or("softmax_precision", 0)?;
    let (mut q, mut k, mut v) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let dtype = cx.dtype(q);
    if precision != 0 && precision != 1 && data_type(precision) != Some(dtype) {
        return unsupported("softmax_precision");
    }
    let flat = cx.rank(q)? == 3;
    if flat {
        if q_heads <= 0 || kv_heads <= 0 {
            return invalid("three dimensions without a number of heads");
        }
        q = split_heads(cx, q, q_heads)?;
        k = split_heads(cx, k, kv_heads)?;
        v = split_heads(cx, v, kv_heads)?;
    }
    let past = cx.optional(4).map(|key| (key, cx.optional(5)));
    let past_tokens = match past {
        None => None,
        Some((past_key, Some(past_value))) => {
            k = cx.part(Op::Concat { axis: 2 }, &[past_key, k])?;
            v = cx.part(Op::Concat { axis: 2 }, &[past_value, v])?;
            Some(past_key)
        }
        Some((_, None)) => return invalid("past_key without past_value"),
    };
    if cx.wants(1) {
        cx.emit_identity(1, k)?;
    }
    if cx.wants(2) {
        cx.emit_identity(2, v)?;
    }
    let width = dimension(cx, q, 3)?;
    let scale = scale.unwrap_or(1.0 / (width as f32).sqrt());
    let (heads, key_heads) = (dimension(cx, q, 1)?, dimension(cx, k, 1)?);
    if heads != key_heads {
        k = repeat_heads(cx, k, heads, key_heads)?;
        v = repeat_heads(cx, v, heads, key_heads)?;
    }
    let spelled = softcap > 0.0 || cx.wants(3);
    // The operator itself takes a condition.
    let condition = cx.optional(3).filter(|id| cx.dtype(*id) == DataType::Bool);
    let bias = match condition.filter(|_| !causal && !spelled) {
        Some(condition) => {
            covers_all_keys(cx, condition, k)?;
            Some(condition)
        }
        None => bias(cx, q, k, causal, past_tokens)?,
    };
    let masked = cx.has(3);
    let mut y = if spelled {
        if !(0..=3).contains(&mode) {
            return invalid(format!("qk_matmul_output_mode {mode}"));
        }
        spelled_out(cx, [q, k, v], bias, scale, softcap, mode)?
    } else {
        let inputs = [Some(q), Some(k), Some(v), bias];
        let count = if bias.is_some() { 4 } else { 3 };
        cx.parts(Op::Attention { scale }, inputs[..count].to_vec(), 1)?[0]
    };
    if let Some(bias) = bias.filter(|_| masked && spelled) {
        y = zero_masked_rows(cx, y, bias)?;
    }
    if flat {
        y = cx.part(swap_heads(), &[y])?;
        let target = cx.ints(&[0, 0, -1])?;
        y = cx.part(Op::Reshape { allow_zero: false }, &[y, target])?;
    }
    cx.emit_identity(0, y)
}

/// Keys or values of each group repeated for its queries: `[h0, h0, h1, h1, ..]`.
pub(super) fn repeat_heads(
    cx: &mut Context,
    x: ValueId,
    heads: i64,
    key_heads: i64,
) -> Result<ValueId, MapError> {
    if heads % key_heads != 0 {
        return invalid(format!("{heads} heads over {key_heads}"));
    }
    let width = dimension(cx, x, 3)?;
    let axis = cx.ints(&[2])?;
    let times = cx.ints(&[1, 1, heads / key_heads, 1, 1])?;
    let target = cx.ints(&[0, heads, -1, width])?;
    let wide = cx.part(Op::Unsqueeze, &[x, axis])?;
    let repeated = cx.part(Op::Expand, &[wide, times])?;
    cx.part(Op::Reshape { allow_zero: false }, &[repeated, target])
}

/// What is added to the scores: the mask, and minus infinity where a query must not attend to later
/// tokens.
fn bias(
    cx: &mut Context,
    q: ValueId,
    k: ValueId,
    causal: bool,
    past: Option<ValueId>,
) -> Result<Option<ValueId>, MapError> {
    let dtype = cx.dtype(q);
    let mut bias = match cx.optional(3) {
        None => None,
        Some(mask) => {
            covers_all_keys(cx, mask, k)?;
            Some(match cx.dtype(mask) {
                DataType::Bool => hide(cx, mask, dtype)?,
                _ => mask,
            })
        }
    };
    if causal {
        let ahead = causal_bias(cx, q, k, past)?;
        bias = Some(match bias {
            Some(mask) => cx.part(Op::Binary(Binary::Add), &[mask, ahead])?,
            None => ahead,
        });
    }
    Ok(bias)
}

/// Minus infinity where a query must not attend to a later token; `past` holds earlier keys.
pub(super) fn causal_bias(
    cx: &mut Context,
    q: ValueId,
    k: ValueId,
    past: Option<ValueId>,
) -> Result<ValueId, MapError> {
    let rows = count(cx, q)?;
    let columns = count(cx, k)?;
    let mut rows = range(cx, rows)?;
    if let Some(past) = past {
        let offset = count(cx, past)?;
        rows = cx.part(Op::Binary(Binary::Add), &[rows, offset])?;
    }
    let columns = range(cx, columns)?;
    let axis = cx.ints(&[1])?;
    let rows = cx.part(Op::Unsqueeze, &[rows, axis])?;
    let seen = cx.part(Op::Compare(Compare::LessOrEqual), &[columns, rows])?;
    let dtype = cx.dtype(q);
    hide(cx, seen, dtype)
}

fn covers_all_keys(cx: &Context, mask: ValueId, k: ValueId) -> Result<(), MapError> {
    let last = |id: ValueId, axis: usize| cx.shape(id).and_then(|shape| shape.get(axis)?.fixed());
    let width = cx.rank(mask)?.checked_sub(1).and_then(|axis| last(mask, axis));
    match (width, last(k, 2)) {
        (Some(width), Some(tokens)) if width < tokens && width != 1 => {
            unsupported("a mask shorter than the keys")
        }
        _ => Ok(()),
    }
}

/// Zero where `mask` is true, minus infinity elsewhere.
pub(super) fn hide(cx: &mut Context, mask: ValueId, dtype: DataType) -> Result<ValueId, MapError> {
    let (zero, never) = (cx.scalar(dtype, 0.0)?, cx.scalar(dtype, f64::NEG_INFINITY)?);
    cx.part(Op::Where, &[mask, zero, never])
}

/// The number of tokens of `[batch, heads, tokens, width]`, as a scalar.
pub(super) fn count(cx: &mut Context, x: ValueId) -> Result<ValueId, MapError> {
    let vector = cx.part(Op::Shape { start: 2, end: Some(3) }, &[x])?;
    let axis = cx.ints(&[0])?;
    cx.part(Op::Squeeze, &[vector, axis])
}

pub(super) fn range(cx: &mut Context, limit: ValueId) -> Result<ValueId, MapError> {
    let (zero, one) = (cx.scalar(DataType::I64, 0.0)?, cx.scalar(DataType::I64, 1.0)?);
    cx.part(Op::Range, &[zero, limit, one])
}

/// Attention whose scores are capped or have other readers.
fn spelled_out(
    cx: &mut Context,
    [q, k, v]: [ValueId; 3],
    bias: Option<ValueId>,
    scale: f32,
    softcap: f32,
    mode: i64,
) -> Result<ValueId, MapError> {
    let dtype = cx.dtype(q);
    let matmul = MatMul { transpose_b: true, alpha: scale, ..MatMul::default() };
    let mut scores = cx.part(Op::MatMul(matmul), &[q, k])?;
    if softcap > 0.0 {
        let cap = cx.scalar(dtype, f64::from(softcap))?;
        scores = cx.part(Op::Binary(Binary::Div), &[scores, cap])?;
        scores = cx.part(Op::Unary(Unary::Tanh), &[scores])?;
        scores = cx.part(Op::Binary(Binary::Mul), &[scores, cap])?;
    }
    // Capped scores are both the first and the second form.
    if cx.wants(3) && mode <= 1 {
        cx.emit_identity(3, scores)?;
    }
    if let Some(bias) = bias {
        scores = cx.part(Op::Binary(Binary::Add), &[scores, bias])?;
    }
    if cx.wants(3) && mode == 2 {
        cx.emit_identity(3, scores)?;
    }
    let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: -1, flatten: false };
    let weights = cx.part(Op::Softmax(softmax), &[scores])?;
    if cx.wants(3) && mode == 3 {
        cx.emit_identity(3, weights)?;
    }
    cx.part(Op::MatMul(MatMul::default()), &[weights, v])
}

/// A query without any key gets zeros, not NaN.
fn zero_masked_rows(cx: &mut Context, y: ValueId, bias: ValueId) -> Result<ValueId, MapError> {
    let dtype = cx.dtype(y);
    let reduce = Reduce { kind: ReduceKind::Max, keep_dims: true, noop_with_empty_axes: false };
    let axis = cx.ints(&[-1])?;
    let (zero, never) = (cx.scalar(dtype, 0.0)?, cx.scalar(dtype, f64::NEG_INFINITY)?);
    let best = cx.part(Op::Reduce(reduce), &[bias, axis])?;
    let hidden = cx.part(Op::Compare(Compare::Equal), &[best, never])?;
    cx.part(Op::Where, &[hidden, zero, y])
}

fn rotary_embedding(cx: &mut Context) -> Mapped {
    cx.at_most(4)?;
    let interleaved = cx.attributes.flag("interleaved", false)?;
    let heads = cx.attributes.int_or("num_heads", 0)?;
    let turned = cx.attributes.int_or("rotary_embedding_dim", 0)?;
    let (mut x, mut cos, mut sin) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let flat = cx.rank(x)? == 3;
    // [batch, tokens, heads, width] either way.
    if flat {
        if heads <= 0 {
            return invalid("three dimensions without a number of heads");
        }
        let target = cx.ints(&[0, 0, heads, -1])?;
        x = cx.part(Op::Reshape { allow_zero: false }, &[x, target])?;
    } else {
        x = cx.part(swap_heads(), &[x])?;
    }
    if let Some(positions) = cx.optional(3) {
        cos = cx.part(Op::Gather { axis: 0 }, &[cos, positions])?;
        sin = cx.part(Op::Gather { axis: 0 }, &[sin, positions])?;
    }
    let axis = cx.ints(&[2])?;
    cos = cx.part(Op::Unsqueeze, &[cos, axis])?;
    sin = cx.part(Op::Unsqueeze, &[sin, axis])?;
    let y = rotated(cx, x, (cos, sin), turned, interleaved)?;
    if flat {
        let target = cx.ints(&[0, 0, -1])?;
        return cx.emit(Op::Reshape { allow_zero: false }, vec![Some(y), Some(target)]);
    }
    cx.emit(swap_heads(), vec![Some(y)])
}

/// `x`, `[batch, tokens, heads, width]`, with its first `turned` elements rotated in pairs; all of
/// them when that is zero. The tables have half as many columns and broadcast to `x`.
pub(super) fn rotated(
    cx: &mut Context,
    x: ValueId,
    (cos, sin): (ValueId, ValueId),
    turned: i64,
    interleaved: bool,
) -> Result<ValueId, MapError> {
    let width = dimension(cx, x, 3)?;
    let turned = if turned == 0 { width } else { turned };
    if turned <= 0 || turned > width || turned % 2 != 0 {
        return invalid(format!("{turned} of {width} elements rotated"));
    }
    let turning = slice(cx, x, 0, turned, 1)?;
    let (first, second) = match interleaved {
        true => (slice(cx, turning, 0, turned, 2)?, slice(cx, turning, 1, turned, 2)?),
        false => {
            (slice(cx, turning, 0, turned / 2, 1)?, slice(cx, turning, turned / 2, turned, 1)?)
        }
    };
    let real = rotate(cx, Binary::Sub, [cos, first], [sin, second])?;
    let imaginary = rotate(cx, Binary::Add, [sin, first], [cos, second])?;
    let mut y = match interleaved {
        false => cx.part(Op::Concat { axis: -1 }, &[real, imaginary])?,
        true => {
            let last = cx.ints(&[-1])?;
            let real = cx.part(Op::Unsqueeze, &[real, last])?;
            let imaginary = cx.part(Op::Unsqueeze, &[imaginary, last])?;
            let pairs = cx.part(Op::Concat { axis: -1 }, &[real, imaginary])?;
            let target = cx.ints(&[0, 0, 0, turned])?;
            cx.part(Op::Reshape { allow_zero: false }, &[pairs, target])?
        }
    };
    if turned < width {
        let rest = slice(cx, x, turned, width, 1)?;
        y = cx.part(Op::Concat { axis: -1 }, &[y, rest])?;
    }
    Ok(y)
}

fn rotate(
    cx: &mut Context,
    op: Binary,
    left: [ValueId; 2],
    right: [ValueId; 2],
) -> Result<ValueId, MapError> {
    let left = cx.part(Op::Binary(Binary::Mul), &left)?;
    let right = cx.part(Op::Binary(Binary::Mul), &right)?;
    cx.part(Op::Binary(op), &[left, right])
}

/// A slice of the last dimension.
fn slice(
    cx: &mut Context,
    x: ValueId,
    start: i64,
    end: i64,
    step: i64,
) -> Result<ValueId, MapError> {
    let (start, end) = (cx.ints(&[start])?, cx.ints(&[end])?);
    let (axis, step) = (cx.ints(&[-1])?, cx.ints(&[step])?);
    cx.part(Op::Slice, &[x, start, end, axis, step])
}

fn center_crop_pad(cx: &mut Context) -> Mapped {
    cx.at_most(2)?;
    let (x, target) = (cx.input(0)?, cx.input(1)?);
    let rank = cx.rank(x)? as i64;
    let axes: Vec<i64> = match cx.attributes.ints("axes") {
        Some(axes) => axes.iter().map(|axis| if *axis < 0 { axis + rank } else { *axis }).collect(),
        None => (0..rank).collect(),
    };
    let content = cx.graph.value(target).content.as_deref();
    let sizes: Option<Vec<i64>> = content.and_then(|c| c.iter().map(SymDim::fixed).collect());
    let known = axes.iter().all(|axis| {
        let dim = usize::try_from(*axis).ok().and_then(|axis| cx.shape(x)?.get(axis)?.fixed());
        dim.is_some_and(|size| size > 0)
    });
    let Some(sizes) = sizes.filter(|_| known) else {
        let axes = Some(axes);
        return cx.emit(Op::Spatial(Spatial::CenterCropPad { axes }), vec![Some(x), Some(target)]);
    };
    if sizes.len() != axes.len() {
        return invalid(format!("{} sizes for {} axes", sizes.len(), axes.len()));
    }
    let (mut starts, mut ends) = (Vec::new(), Vec::new());
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for (axis, size) in axes.iter().zip(&sizes) {
        let own = match usize::try_from(*axis) {
            Ok(axis) => dimension(cx, x, axis)?,
            Err(_) => return invalid(format!("axis {axis}")),
        };
        if *size < 0 {
            return invalid(format!("a size of {size}"));
        }
        let (crop, pad) = ((own - size).max(0), (size - own).max(0));
        starts.push(crop / 2);
        ends.push(crop / 2 + own.min(*size));
        before.push(pad / 2);
        after.push(pad - pad / 2);
    }
    let axes = cx.ints(&axes)?;
    let (starts, ends) = (cx.ints(&starts)?, cx.ints(&ends)?);
    let pads = cx.ints(&[before, after].concat())?;
    let cropped = cx.part(Op::Slice, &[x, starts, ends, axes])?;
    let inputs = vec![Some(cropped), Some(pads), None, Some(axes)];
    cx.emit(Op::Pad { mode: model::op::PadMode::Constant }, inputs)
}
