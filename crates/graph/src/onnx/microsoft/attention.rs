//! Attention as ONNX Runtime's optimiser writes it, made of simpler operators.
//!
//! Masks are added: ONNX Runtime adds a number of its own where a key is masked, so that a row
//! without any key still has weights.

use model::op::{Binary, Cast, Compare, MatMul, Op, Variadic};
use model::{DataType, ValueId};

use super::super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::super::nn::{
    causal_bias, count, dimension, hide, range, repeat_heads, rotated, split_heads, swap_heads,
};

/// What ONNX Runtime adds to the scores of masked keys unless an attribute says otherwise.
const MASKED: f32 = -10_000.0;

/// Queries, keys and values as `[batch, heads, tokens, width]`, and what changes their scores.
struct Parts {
    q: ValueId,
    k: ValueId,
    v: ValueId,
    /// Added to the scores; broadcasts to `[batch, heads, queries, keys]`.
    biases: Vec<ValueId>,
    scale: Option<f32>,
}

impl Parts {
    /// The attention as `[batch, tokens, heads * width]`, as the node's first output.
    fn emit(self, cx: &mut Context) -> Mapped {
        let Parts { q, mut k, mut v, biases, scale } = self;
        let (heads, key_heads) = (dimension(cx, q, 1)?, dimension(cx, k, 1)?);
        if heads != key_heads {
            k = repeat_heads(cx, k, heads, key_heads)?;
            v = repeat_heads(cx, v, heads, key_heads)?;
        }
        let width = dimension(cx, q, 3)?;
        let scale = scale.filter(|scale| *scale != 0.0).unwrap_or(1.0 / (width as f32).sqrt());
        let mut inputs = vec![Some(q), Some(k), Some(v)];
        let mut biases = biases.into_iter();
        if let Some(first) = biases.next() {
            let mut sum = first;
            for bias in biases {
                sum = cx.part(Op::Binary(Binary::Add), &[sum, bias])?;
            }
            inputs.push(Some(sum));
        }
        let y = cx.parts(Op::Attention { scale }, inputs, 1)?[0];
        let y = cx.part(swap_heads(), &[y])?;
        let target = cx.ints(&[0, 0, -1])?;
        let y = cx.part(Op::Reshape { allow_zero: false }, &[y, target])?;
        cx.emit_identity(0, y)
    }
}

fn heads_of(cx: &Context, name: &str) -> Result<i64, MapError> {
    match cx.attributes.int_or(name, 0)? {
        heads if heads > 0 => Ok(heads),
        heads => invalid(format!("{heads} heads ('{name}')")),
    }
}

/// Input projection, attention and past in one operator.
pub(super) fn attention(cx: &mut Context) -> Mapped {
    cx.at_most(6).or_else(|_| unsupported("past_sequence_length"))?;
    let heads = heads_of(cx, "num_heads")?;
    let causal = cx.attributes.flag("unidirectional", false)?;
    let scale = cx.attributes.float("scale")?;
    let masked = cx.attributes.float_or("mask_filter_value", MASKED)?;
    if cx.attributes.int_or("do_rotary", 0)? != 0 {
        return unsupported("do_rotary");
    }
    if cx.attributes.int_or("past_present_share_buffer", 0)? != 0 {
        return unsupported("past_present_share_buffer");
    }
    cx.attributes.ignore(&["rotary_embedding_dim"]);
    let (x, weights) = (cx.input(0)?, cx.input(1)?);
    let columns = dimension(cx, weights, 1)?;
    let sizes = match cx.attributes.ints("qkv_hidden_sizes") {
        Some(sizes) if !sizes.is_empty() => sizes.to_vec(),
        _ => vec![columns / 3; 3],
    };
    let valid = sizes.len() == 3 && sizes.iter().all(|size| *size > 0 && size % heads == 0);
    if !valid || sizes.iter().sum::<i64>() != columns {
        return invalid(format!("{columns} columns of weights for sizes {sizes:?}"));
    }
    let mut product = cx.part(Op::MatMul(MatMul::default()), &[x, weights])?;
    if let Some(bias) = cx.optional(2) {
        product = cx.part(Op::Binary(Binary::Add), &[product, bias])?;
    }
    let sizes = cx.ints(&sizes)?;
    let split = cx.parts(Op::Split { axis: -1 }, vec![Some(product), Some(sizes)], 3)?;
    let q = split_heads(cx, split[0], heads)?;
    let mut k = split_heads(cx, split[1], heads)?;
    let mut v = split_heads(cx, split[2], heads)?;
    let past = cx.optional(4);
    if let Some(past) = past {
        let (past_key, past_value) = (part_of(cx, past, 0, 0)?, part_of(cx, past, 1, 0)?);
        k = cx.part(Op::Concat { axis: 2 }, &[past_key, k])?;
        v = cx.part(Op::Concat { axis: 2 }, &[past_value, v])?;
    }
    if cx.wants(1) {
        let axis = cx.ints(&[0])?;
        let both = [k, v].map(|x| cx.part(Op::Unsqueeze, &[x, axis]));
        let [key, value] = both;
        let present = cx.part(Op::Concat { axis: 0 }, &[key?, value?])?;
        cx.emit_identity(1, present)?;
    }
    let mut biases = Vec::new();
    if let Some(mask) = cx.optional(3) {
        biases.push(padding_bias(cx, mask, (q, k), masked)?);
    }
    biases.extend(cx.optional(5));
    if causal {
        let past_tokens = match past {
            Some(past) => Some(part_of(cx, past, 0, 0)?),
            None => None,
        };
        biases.push(causal_bias(cx, q, k, past_tokens)?);
    }
    Parts { q, k, v, biases, scale }.emit(cx)
}

/// Element `index` of dimension `axis`, without that dimension.
fn part_of(cx: &mut Context, x: ValueId, index: i64, axis: i64) -> Result<ValueId, MapError> {
    let index = cx.scalar(DataType::I64, index as f64)?;
    cx.part(Op::Gather { axis }, &[x, index])
}

/// What a mask of keys adds to the scores: `[batch]` counts the keys of each sequence,
/// `[batch, keys]` and `[batch, queries, keys]` are zero where a key is masked.
fn padding_bias(
    cx: &mut Context,
    mask: ValueId,
    (q, k): (ValueId, ValueId),
    masked: f32,
) -> Result<ValueId, MapError> {
    let dtype = cx.dtype(q);
    let rank = cx.rank(mask)?;
    let seen = match rank {
        1 => {
            let batch = |id: ValueId| cx.shape(id).and_then(|shape| shape.first()).cloned();
            match (batch(mask), batch(q)) {
                (Some(own), Some(batch)) if own.is_same(&batch) => {}
                _ => return unsupported("a mask of positions that are not one per sequence"),
            }
            let lengths = cx.part(Op::Cast(Cast { to: DataType::I64 }), &[mask])?;
            let axes = cx.ints(&[1])?;
            let lengths = cx.part(Op::Unsqueeze, &[lengths, axes])?;
            let keys = count(cx, k)?;
            let keys = range(cx, keys)?;
            cx.part(Op::Compare(Compare::Less), &[keys, lengths])?
        }
        2 | 3 if cx.dtype(mask) == DataType::Bool => mask,
        2 | 3 => {
            let zero = cx.scalar(cx.dtype(mask), 0.0)?;
            cx.part(Op::Compare(Compare::Greater), &[mask, zero])?
        }
        rank => return unsupported(format!("a mask of {rank} dimensions")),
    };
    let axes = if rank == 3 { cx.ints(&[1])? } else { cx.ints(&[1, 2])? };
    let seen = cx.part(Op::Unsqueeze, &[seen, axes])?;
    let (zero, low) = (cx.scalar(dtype, 0.0)?, cx.scalar(dtype, f64::from(masked))?);
    cx.part(Op::Where, &[seen, zero, low])
}

/// A part of a vector of biases.
fn bias_part(cx: &mut Context, bias: ValueId, from: i64, to: i64) -> Result<ValueId, MapError> {
    let (from, to) = (cx.ints(&[from])?, cx.ints(&[to])?);
    cx.part(Op::Slice, &[bias, from, to])
}

/// Queries, keys and values of a projection that is already done, in one of four forms.
pub(super) fn multi_head_attention(cx: &mut Context) -> Mapped {
    cx.at_most(8).or_else(|_| unsupported("a shared buffer of the past"))?;
    cx.no_output_from(3, "the scores are read")?;
    let heads = heads_of(cx, "num_heads")?;
    let causal = cx.attributes.flag("unidirectional", false)?;
    let scale = cx.attributes.float("scale")?;
    let masked = cx.attributes.float_or("mask_filter_value", MASKED)?;
    let (q, mut k, mut v) = projected(cx, heads)?;
    let past = match (cx.optional(6), cx.optional(7)) {
        (None, None) => None,
        (Some(key), Some(value)) => {
            k = cx.part(Op::Concat { axis: 2 }, &[key, k])?;
            v = cx.part(Op::Concat { axis: 2 }, &[value, v])?;
            Some(key)
        }
        _ => return invalid("past_key without past_value"),
    };
    if cx.wants(1) {
        cx.emit_identity(1, k)?;
    }
    if cx.wants(2) {
        cx.emit_identity(2, v)?;
    }
    let mut biases = Vec::new();
    if let Some(mask) = cx.optional(4) {
        biases.push(padding_bias(cx, mask, (q, k), masked)?);
    }
    biases.extend(cx.optional(5));
    if causal {
        biases.push(causal_bias(cx, q, k, past)?);
    }
    Parts { q, k, v, biases, scale }.emit(cx)
}

/// `[batch, tokens, heads, count, width]` at one of `count`, as `[batch, heads, tokens, width]`.
fn packed_part(cx: &mut Context, x: ValueId, index: i64) -> Result<ValueId, MapError> {
    let part = part_of(cx, x, index, 3)?;
    cx.part(swap_heads(), &[part])
}

/// Queries, keys and values of a multi-head attention, with their biases.
fn projected(cx: &mut Context, heads: i64) -> Result<(ValueId, ValueId, ValueId), MapError> {
    let (query, bias) = (cx.input(0)?, cx.optional(3));
    let rank = cx.rank(query)?;
    if rank == 5 {
        if bias.is_some() || cx.has(1) || cx.has(2) {
            return unsupported("packed queries, keys and values beside others");
        }
        let [q, k, v] = [0, 1, 2].map(|index| packed_part(cx, query, index));
        return Ok((q?, k?, v?));
    }
    if rank != 3 {
        return unsupported(format!("queries of {rank} dimensions"));
    }
    let key = cx.input(1).or_else(|_| unsupported("queries without keys"))?;
    let hidden = dimension(cx, query, 2)?;
    let with_bias = |cx: &mut Context, x: ValueId, from: i64| match bias {
        None => Ok(x),
        Some(bias) => {
            let to = from + dimension(cx, x, 2)?;
            let bias = bias_part(cx, bias, from, to)?;
            cx.part(Op::Binary(Binary::Add), &[x, bias])
        }
    };
    let q = with_bias(cx, query, 0)?;
    let q = split_heads(cx, q, heads)?;
    match (cx.rank(key)?, cx.optional(2)) {
        (5, None) if bias.is_none() => {
            let [k, v] = [0, 1].map(|index| packed_part(cx, key, index));
            Ok((q, k?, v?))
        }
        // Keys and values of an earlier run, without biases.
        (4, Some(value)) => Ok((q, key, value)),
        (3, Some(value)) => {
            let k = with_bias(cx, key, hidden)?;
            let v = with_bias(cx, value, 2 * hidden)?;
            Ok((q, split_heads(cx, k, heads)?, split_heads(cx, v, heads)?))
        }
        (rank, _) => unsupported(format!("keys of {rank} dimensions")),
    }
}

/// Attention of a language model: groups of heads share keys, sequences have their own lengths.
///
/// The past is `[batch, heads, tokens, width]`, of which every sequence uses its first tokens; new
/// keys and values follow directly behind those. The present has room for all of both.
pub(super) fn group_query_attention(cx: &mut Context) -> Mapped {
    cx.at_most(11).or_else(|_| unsupported("quantised keys or attention sinks"))?;
    cx.no_output_from(3, "the scores are read")?;
    let (heads, key_heads) = (heads_of(cx, "num_heads")?, heads_of(cx, "kv_num_heads")?);
    let a = &cx.attributes;
    let scale = a.float("scale")?;
    let rotates = a.flag("do_rotary", false)?;
    let interleaved = a.flag("rotary_interleaved", false)?;
    if a.float_or("softcap", 0.0)? != 0.0 {
        return unsupported("softcap");
    }
    if a.int_or("local_window_size", -1)? > 0 {
        return unsupported("local_window_size");
    }
    if a.int_or("smooth_softmax", 0)? > 0 || a.int_or("qk_output", 0)? > 0 {
        return unsupported("smooth_softmax or qk_output");
    }
    let [q, mut k, mut v] = grouped_projections(cx, heads, key_heads)?;
    let positions = Positions::new(cx, q)?;
    let mut q = q;
    if rotates {
        let ids = match cx.optional(9) {
            Some(ids) => ids,
            None => positions.queries,
        };
        let (cos, sin) = (cx.input(7)?, cx.input(8)?);
        let turned = 2 * dimension(cx, cos, 1)?;
        let tables = at_positions(cx, (cos, sin), ids)?;
        q = rotated(cx, q, tables, turned, interleaved)?;
        k = rotated(cx, k, tables, turned, interleaved)?;
    }
    let q = cx.part(swap_heads(), &[q])?;
    k = cx.part(swap_heads(), &[k])?;
    v = cx.part(swap_heads(), &[v])?;
    match (cx.optional(3), cx.optional(4)) {
        (None, None) => {}
        (Some(past_key), Some(past_value)) => {
            k = positions.appended(cx, past_key, k)?;
            v = positions.appended(cx, past_value, v)?;
        }
        _ => return invalid("past_key without past_value"),
    }
    if cx.wants(1) {
        cx.emit_identity(1, k)?;
    }
    if cx.wants(2) {
        cx.emit_identity(2, v)?;
    }
    let mut biases = vec![positions.bias(cx, k)?];
    biases.extend(cx.optional(10));
    Parts { q, k, v, biases, scale }.emit(cx)
}

/// Queries, keys and values as `[batch, tokens, heads, width]`.
fn grouped_projections(
    cx: &mut Context,
    heads: i64,
    key_heads: i64,
) -> Result<[ValueId; 3], MapError> {
    let query = cx.input(0)?;
    let parts = match (cx.optional(1), cx.optional(2)) {
        (Some(key), Some(value)) => [query, key, value],
        (None, None) => {
            let columns = dimension(cx, query, 2)?;
            let all = heads + 2 * key_heads;
            if columns % all != 0 {
                return invalid(format!("{columns} columns for {all} heads"));
            }
            let width = columns / all;
            let sizes = cx.ints(&[heads * width, key_heads * width, key_heads * width])?;
            let split = cx.parts(Op::Split { axis: -1 }, vec![Some(query), Some(sizes)], 3)?;
            [split[0], split[1], split[2]]
        }
        _ => return invalid("keys without values"),
    };
    let targets = [heads, key_heads, key_heads];
    let mut split = Vec::with_capacity(3);
    for (x, heads) in parts.into_iter().zip(targets) {
        let target = cx.ints(&[0, 0, heads, -1])?;
        split.push(cx.part(Op::Reshape { allow_zero: false }, &[x, target])?);
    }
    Ok([split[0], split[1], split[2]])
}

/// Where the tokens of each sequence are.
struct Positions {
    /// Tokens of the past, `[batch, 1]`.
    past: ValueId,
    /// The position of every query, `[batch, tokens]`.
    queries: ValueId,
}

impl Positions {
    /// From the last position of each sequence, input 5; `q` is `[batch, tokens, heads, width]`.
    fn new(cx: &mut Context, q: ValueId) -> Result<Positions, MapError> {
        let last = cx.input(5)?;
        let last = cx.part(Op::Cast(Cast { to: DataType::I64 }), &[last])?;
        let target = cx.ints(&[-1, 1])?;
        let last = cx.part(Op::Reshape { allow_zero: false }, &[last, target])?;
        let tokens = size_of(cx, q, 1)?;
        let (zero, one) = (cx.scalar(DataType::I64, 0.0)?, cx.scalar(DataType::I64, 1.0)?);
        let total = cx.part(Op::Binary(Binary::Add), &[last, one])?;
        let past = cx.part(Op::Binary(Binary::Sub), &[total, tokens])?;
        // A first sequence that is padded at its end has no past.
        let past = cx.part(Op::Variadic(Variadic::Max), &[past, zero])?;
        let steps = range(cx, tokens)?;
        let queries = cx.part(Op::Binary(Binary::Add), &[past, steps])?;
        Ok(Positions { past, queries })
    }

    /// `past` with `new` directly behind each sequence's own tokens.
    fn appended(&self, cx: &mut Context, past: ValueId, new: ValueId) -> Result<ValueId, MapError> {
        let all = cx.part(Op::Concat { axis: 2 }, &[past, new])?;
        let (room, total) = (size_of(cx, past, 2)?, size_of(cx, all, 2)?);
        let at = range(cx, total)?;
        let is_past = cx.part(Op::Compare(Compare::Less), &[at, self.past])?;
        let behind = cx.part(Op::Binary(Binary::Sub), &[room, self.past])?;
        let moved = cx.part(Op::Binary(Binary::Add), &[at, behind])?;
        // What is behind the new tokens is never read; the index must be valid.
        let one = cx.scalar(DataType::I64, 1.0)?;
        let last = cx.part(Op::Binary(Binary::Sub), &[total, one])?;
        let moved = cx.part(Op::Variadic(Variadic::Min), &[moved, last])?;
        let index = cx.part(Op::Where, &[is_past, at, moved])?;
        let axes = cx.ints(&[1, 3])?;
        let index = cx.part(Op::Unsqueeze, &[index, axes])?;
        let shape = cx.part(Op::Shape { start: 0, end: None }, &[all])?;
        let index = cx.part(Op::Expand, &[index, shape])?;
        cx.part(Op::GatherElements { axis: 2 }, &[all, index])
    }

    /// Minus infinity where a key is behind its query.
    fn bias(&self, cx: &mut Context, k: ValueId) -> Result<ValueId, MapError> {
        let keys = size_of(cx, k, 2)?;
        let keys = range(cx, keys)?;
        let axes = cx.ints(&[1, 3])?;
        let queries = cx.part(Op::Unsqueeze, &[self.queries, axes])?;
        let seen = cx.part(Op::Compare(Compare::LessOrEqual), &[keys, queries])?;
        let dtype = cx.dtype(k);
        hide(cx, seen, dtype)
    }
}

/// The size of dimension `axis`, as a scalar.
fn size_of(cx: &mut Context, x: ValueId, axis: i64) -> Result<ValueId, MapError> {
    let vector = cx.part(Op::Shape { start: axis, end: Some(axis + 1) }, &[x])?;
    let axis = cx.ints(&[0])?;
    cx.part(Op::Squeeze, &[vector, axis])
}

/// The rows of both tables at `ids`, `[batch, tokens]`, as factors of `[batch, tokens, heads, ..]`.
fn at_positions(
    cx: &mut Context,
    (cos, sin): (ValueId, ValueId),
    ids: ValueId,
) -> Result<(ValueId, ValueId), MapError> {
    let axis = cx.ints(&[2])?;
    let [cos, sin] = [cos, sin].map(|table| {
        let rows = cx.part(Op::Gather { axis: 0 }, &[table, ids])?;
        cx.part(Op::Unsqueeze, &[rows, axis])
    });
    Ok((cos?, sin?))
}

/// As the standard operator, with positions as the second input: one for each token, or the first.
pub(super) fn rotary_embedding(cx: &mut Context) -> Mapped {
    cx.at_most(4)?;
    let interleaved = cx.attributes.flag("interleaved", false)?;
    let heads = cx.attributes.int_or("num_heads", 0)?;
    let turned = cx.attributes.int_or("rotary_embedding_dim", 0)?;
    if cx.attributes.float_or("scale", 1.0)? != 1.0 {
        return unsupported("scale");
    }
    if cx.attributes.int_or("is_packed_batching", 0)? != 0 {
        return unsupported("is_packed_batching");
    }
    let (mut x, mut ids) = (cx.input(0)?, cx.input(1)?);
    let (cos, sin) = (cx.input(2)?, cx.input(3)?);
    let flat = cx.rank(x)? == 3;
    if flat {
        let heads = match heads {
            0 => dimension(cx, x, 2)? / (2 * dimension(cx, cos, 1)?),
            heads => heads,
        };
        let target = cx.ints(&[0, 0, heads, -1])?;
        x = cx.part(Op::Reshape { allow_zero: false }, &[x, target])?;
    } else {
        x = cx.part(swap_heads(), &[x])?;
    }
    if cx.rank(ids)? == 1 {
        let tokens = size_of(cx, x, 1)?;
        let steps = range(cx, tokens)?;
        ids = cx.part(Op::Binary(Binary::Add), &[ids, steps])?;
        let axis = cx.ints(&[0])?;
        ids = cx.part(Op::Unsqueeze, &[ids, axis])?;
    }
    let tables = at_positions(cx, (cos, sin), ids)?;
    let y = rotated(cx, x, tables, turned, interleaved)?;
    if flat {
        let target = cx.ints(&[0, 0, -1])?;
        return cx.emit(Op::Reshape { allow_zero: false }, vec![Some(y), Some(target)]);
    }
    cx.emit(swap_heads(), vec![Some(y)])
}
