//! Attention with a state instead of a softmax.

use model::op::LinearAttention;

use super::operand::{dtype_of, output_len};
use super::wide::{from_singles, singles};
use super::{Inputs, Kernel, KernelResult, Outputs, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::yield_point;

pub(crate) fn build(facts: &StepFacts, attention: LinearAttention) -> Result<Kernel, KernelError> {
    if !dtype_of(facts, 0)?.is_float() {
        return Err(no_kernel(facts));
    }
    Ok(Kernel::new(move |_, inputs| run(&inputs, attention)))
}

/// One operand, `[batch, tokens, columns]`.
struct Tokens {
    data: Buffer<f32>,
    tokens: usize,
    columns: usize,
}

impl Tokens {
    fn new(inputs: &Inputs, index: usize) -> Result<Tokens, KernelError> {
        let value = inputs.get(index)?;
        let &[_, tokens, columns] = value.shape() else {
            return Err(invalid!("operand {index} has shape {:?}", value.shape()));
        };
        Ok(Tokens { data: singles(value)?, tokens, columns })
    }

    /// The columns of part `part` of `parts` of one token.
    fn part(&self, image: usize, token: usize, part: usize, parts: usize) -> &[f32] {
        let width = self.columns / parts;
        &self.data[(image * self.tokens + token) * self.columns + part * width..][..width]
    }
}

fn run(inputs: &Inputs, op: LinearAttention) -> KernelResult {
    let LinearAttention { heads, kv_heads, .. } = op;
    let dtype = inputs.get(0)?.dtype();
    let (q, k, v) = (Tokens::new(inputs, 0)?, Tokens::new(inputs, 1)?, Tokens::new(inputs, 2)?);
    let batch = inputs.get(0)?.shape()[0];
    if heads == 0 || kv_heads == 0 || heads % kv_heads != 0 {
        return Err(invalid!("{heads} heads over {kv_heads}"));
    }
    let (key, value) = (q.columns / heads, v.columns / kv_heads);
    let same = |index: usize| inputs.get(index).is_ok_and(|x| x.shape()[..2] == [batch, q.tokens]);
    if !same(1) || !same(2) || key * heads != q.columns || key * kv_heads != k.columns {
        return Err("queries, keys and values do not fit each other".into());
    }
    let side =
        |index: usize| inputs.optional(index).map(|_| Tokens::new(inputs, index)).transpose();
    let (decay, beta) = (side(4)?, side(5)?);
    let fits = |side: &Option<Tokens>, index: usize, widths: &[usize]| match side {
        None => true,
        Some(side) => same(index) && widths.contains(&side.columns),
    };
    if !fits(&decay, 4, &[kv_heads, kv_heads * key]) || !fits(&beta, 5, &[kv_heads, 1]) {
        return Err("decay or beta do not fit the keys".into());
    }
    let state_shape = [batch, kv_heads, key, value];
    let (state_dtype, mut state) = match inputs.optional(3) {
        Some(past) if past.shape() == state_shape => (past.dtype(), singles(past)?),
        Some(past) => return Err(invalid!("a state of shape {:?}", past.shape())),
        None => (dtype, Buffer::filled(output_len(&state_shape)?, 0f32)?),
    };
    let scale = op.scale.unwrap_or(1.0 / (key as f32).sqrt());
    let shape = [batch, q.tokens, heads * value];
    let mut out = Buffer::filled(output_len(&shape)?, 0f32)?;
    let mut change = Buffer::filled(value, 0f32)?;
    let group = heads / kv_heads;
    for image in 0..batch {
        for head in 0..kv_heads {
            let state = &mut state[(image * kv_heads + head) * key * value..][..key * value];
            for token in 0..q.tokens {
                yield_point::did_work(key * value / 2 * (2 + group));
                let keys = k.part(image, token, head, kv_heads);
                change.copy_from_slice(v.part(image, token, head, kv_heads));
                if let Some(decay) = &decay {
                    let rates = decay.part(image, token, head, kv_heads);
                    decay_state(state, rates, value);
                }
                if let Some(beta) = &beta {
                    let rates = beta.part(image, token, 0, 1);
                    let rate = rates[if rates.len() == 1 { 0 } else { head }];
                    correct(state, keys, &mut change, rate);
                }
                for (row, key) in state.chunks_exact_mut(value.max(1)).zip(keys) {
                    row.iter_mut().zip(&*change).for_each(|(slot, x)| *slot += key * x);
                }
                for query in head * group..(head + 1) * group {
                    let weights = q.part(image, token, query, heads);
                    let at = (image * q.tokens + token) * heads * value + query * value;
                    let target = &mut out[at..][..value];
                    for (row, weight) in state.chunks_exact(value.max(1)).zip(weights) {
                        let weight = weight * scale;
                        target.iter_mut().zip(row).for_each(|(slot, x)| *slot += weight * x);
                    }
                }
            }
        }
    }
    let y = from_singles(&shape, out, dtype)?;
    Ok(Outputs::from_iter([y, from_singles(&state_shape, state, state_dtype)?]))
}

fn decay_state(state: &mut [f32], rates: &[f32], value: usize) {
    for (index, row) in state.chunks_exact_mut(value.max(1)).enumerate() {
        let factor = rates[if rates.len() == 1 { 0 } else { index }].exp();
        row.iter_mut().for_each(|slot| *slot *= factor);
    }
}

/// Replaces `change` by its difference to what the state gives for `keys`, times `rate`.
fn correct(state: &[f32], keys: &[f32], change: &mut [f32], rate: f32) {
    for (row, key) in state.chunks_exact(change.len().max(1)).zip(keys) {
        change.iter_mut().zip(row).for_each(|(slot, x)| *slot -= key * x);
    }
    change.iter_mut().for_each(|slot| *slot *= rate);
}
