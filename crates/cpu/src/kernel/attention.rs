//! Scaled dot-product attention, a block of queries at a time so that all scores stay in the cache.

use model::DataType;

use super::dense::{self, Real, elements};
use super::gemm::{self, Epilogue, Left, Matrix, Right};
use super::matmul::PlainNumber;
use super::parallel::try_for_each;
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value};
use crate::yield_point;

/// Queries whose scores are held at a time.
const QUERY_BLOCK: usize = 128;

pub(crate) fn build(facts: &StepFacts, scale: f32) -> Result<Kernel, KernelError> {
    let dtype = facts.input_dtype(0);
    let same = |index: usize| facts.input_dtype(index) == dtype;
    let mask = facts.input_dtype(3);
    if !(same(1) && same(2) && (mask.is_none() || mask == Some(DataType::Bool) || mask == dtype)) {
        return Err(no_kernel(facts));
    }
    match dtype {
        Some(DataType::F32) => Ok(Kernel::new(move |c, i| run::<f32>(c, &i, scale))),
        Some(DataType::F64) => Ok(Kernel::new(move |c, i| run::<f64>(c, &i, scale))),
        Some(DataType::F16 | DataType::BF16) => {
            let wide = Kernel::new(move |c, i| run::<f32>(c, &i, scale));
            Ok(dense::through_f32(facts, wide))
        }
        _ => Err(no_kernel(facts)),
    }
}

/// Extents of an attention and how its operands are batched.
struct Extents {
    queries: usize,
    keys: usize,
    width: usize,
    value_width: usize,
    batch: Vec<usize>,
    /// For each batch index, the index into each operand.
    indices: [Buffer<usize>; 3],
}

impl Extents {
    fn new(q: &[usize], k: &[usize], v: &[usize]) -> Result<Extents, KernelError> {
        let wrong = || invalid!("shapes {q:?}, {k:?} and {v:?} are no queries, keys and values");
        let (
            [q_batch @ .., queries, width],
            [k_batch @ .., keys, k_width],
            [v_batch @ .., values, value_width],
        ) = (q, k, v)
        else {
            return Err(wrong());
        };
        if width != k_width || keys != values {
            return Err(wrong());
        }
        let batch = dense::broadcast_shapes(&dense::broadcast_shapes(q_batch, k_batch)?, v_batch)?;
        let indices = [
            dense::broadcast_indices(q_batch, &batch)?,
            dense::broadcast_indices(k_batch, &batch)?,
            dense::broadcast_indices(v_batch, &batch)?,
        ];
        Ok(Extents {
            queries: *queries,
            keys: *keys,
            width: *width,
            value_width: *value_width,
            batch,
            indices,
        })
    }
}

/// The mask that is added to the scores.
struct Mask<T> {
    data: Buffer<T>,
    /// For each batch index, the index of the mask's matrix.
    indices: Buffer<usize>,
    rows: usize,
    columns: usize,
}

impl<T: Real> Mask<T>
where
    TypedTensor<T>: Into<Value>,
{
    fn new(value: &Value, extents: &Extents) -> Result<Mask<T>, KernelError> {
        let shape = value.shape();
        let (batch, rows, columns) = match shape {
            [] => (&shape[..0], 1, 1),
            [columns] => (&shape[..0], 1, *columns),
            [batch @ .., rows, columns] => (batch, *rows, *columns),
        };
        let fits = (rows == 1 || rows == extents.queries)
            && (columns == 1 || columns == extents.keys)
            && dense::broadcast_shapes(batch, &extents.batch).as_ref() == Ok(&extents.batch);
        if !fits {
            return Err(invalid!(
                "a mask of shape {shape:?} for {} queries, {} keys and batch {:?}",
                extents.queries,
                extents.keys,
                extents.batch
            ));
        }
        let data = match (value, T::get(value)) {
            (_, Some(tensor)) => Buffer::copy_of(elements(tensor))?,
            (Value::Bool(tensor), _) => {
                let shift = |&keep: &bool| if keep { T::zero() } else { T::neg_infinity() };
                Buffer::collect(elements(tensor).iter().map(shift))?
            }
            _ => return Err(invalid!("a mask of {}", value.dtype())),
        };
        let indices = dense::broadcast_indices(batch, &extents.batch)?;
        Ok(Mask { data, indices, rows, columns })
    }

    /// Adds the mask to the scores of `query` at batch index `index`.
    fn add(&self, scores: &mut [T], index: usize, query: usize) {
        let row = if self.rows == 1 { 0 } else { query };
        let start = (self.indices[index] * self.rows + row) * self.columns;
        let mask = &self.data[start..start + self.columns];
        if self.columns == 1 {
            scores.iter_mut().for_each(|score| *score = *score + mask[0]);
        } else {
            T::add_row(scores, mask);
        }
    }
}

/// Operations that differ between the element types.
trait Scores: Real + PlainNumber
where
    TypedTensor<Self>: Into<Value>,
{
    /// `scale * q @ k^T` for row-major `q` and `k`.
    fn score(
        out: &mut [Self],
        q: &[Self],
        k: &[Self],
        width: usize,
        scale: f32,
    ) -> Result<(), KernelError>;
    /// `scores @ v`.
    fn weigh(out: &mut [Self], scores: &[Self], v: &[Self], keys: usize)
    -> Result<(), KernelError>;
}

impl Scores for f32 {
    fn score(
        out: &mut [f32],
        q: &[f32],
        k: &[f32],
        width: usize,
        scale: f32,
    ) -> Result<(), KernelError> {
        let left = Matrix::new(q, q.len() / width, width);
        let right = Matrix::new(k, k.len() / width, width).transposed();
        let epilogue = Epilogue { alpha: scale, ..Epilogue::default() };
        gemm::product_here(out, Left::Plain(left), Right::Plain(right), epilogue)
    }

    fn weigh(out: &mut [f32], scores: &[f32], v: &[f32], keys: usize) -> Result<(), KernelError> {
        let left = Matrix::new(scores, scores.len() / keys, keys);
        let right = Matrix::new(v, keys, v.len() / keys);
        gemm::product_here(out, Left::Plain(left), Right::Plain(right), Epilogue::default())
    }
}

impl Scores for f64 {
    fn score(
        out: &mut [f64],
        q: &[f64],
        k: &[f64],
        width: usize,
        scale: f32,
    ) -> Result<(), KernelError> {
        let keys = k.len() / width;
        for (row, q) in out.chunks_exact_mut(keys).zip(q.chunks_exact(width)) {
            for (score, k) in row.iter_mut().zip(k.chunks_exact(width)) {
                *score = q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * f64::from(scale);
            }
        }
        Ok(())
    }

    fn weigh(out: &mut [f64], scores: &[f64], v: &[f64], keys: usize) -> Result<(), KernelError> {
        out.fill(0.0);
        dense::plain_product(out, scores, v, v.len() / keys, f64::multiply_add);
        Ok(())
    }
}

fn run<T: Scores>(context: &Context, inputs: &Inputs, scale: f32) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let [q, k, v] = [inputs.typed::<T>(0)?, inputs.typed::<T>(1)?, inputs.typed::<T>(2)?];
    let extents = Extents::new(q.shape(), k.shape(), v.shape())?;
    let mask = match inputs.optional(3) {
        Some(value) => Some(Mask::<T>::new(value, &extents)?),
        None => None,
    };
    let mut shape = extents.batch.clone();
    shape.extend([extents.queries, extents.value_width]);
    let mut out = context.pool.filled(dense::count(&shape)?, <T as PlainNumber>::zero())?;
    if out.is_empty() || extents.keys == 0 || extents.width == 0 {
        return if extents.keys == 0 || out.is_empty() {
            dense::output(&shape, out)
        } else {
            Err("queries and keys have no width".into())
        };
    }
    let (q, k, v) = (elements(q), elements(k), elements(v));
    let blocks = extents.queries.div_ceil(QUERY_BLOCK);
    let size = extents.queries * extents.value_width;
    let mut parts: Buffer<(usize, usize, &mut [T])> =
        Buffer::with_capacity(dense::count(&[out.len() / size, blocks])?)?;
    for (index, out) in out.chunks_exact_mut(size).enumerate() {
        let blocks = out.chunks_mut(QUERY_BLOCK * extents.value_width).enumerate();
        parts.extend(blocks.map(|(block, out)| (index, block, out)));
    }
    debug_assert_eq!(parts.len() % blocks, 0);
    try_for_each(parts.iter_mut(), &|(index, block, out)| {
        let index = *index;
        let first = *block * QUERY_BLOCK;
        let count = out.len() / extents.value_width;
        let part = |data: &'_ [T], operand: usize, rows: usize, width: usize| {
            let start = extents.indices[operand][index] * rows * width;
            start..(start + rows * width).min(data.len())
        };
        let (keys, width) = (extents.keys, extents.width);
        let queries = &q[part(q, 0, extents.queries, width)][first * width..][..count * width];
        let mut scores = Buffer::filled(count * keys, <T as PlainNumber>::zero())?;
        T::score(&mut scores, queries, &k[part(k, 1, keys, width)], width, scale)?;
        for (offset, row) in scores.chunks_exact_mut(keys).enumerate() {
            if let Some(mask) = &mask {
                mask.add(row, index, first + offset);
            }
            // A query without any key gets zeros, not NaN.
            if mask.is_some() && row.iter().all(|score| *score == T::neg_infinity()) {
                row.fill(<T as PlainNumber>::zero());
            } else {
                T::softmax(row, false);
            }
            yield_point::did_work(keys);
        }
        T::weigh(out, &scores, &v[part(v, 2, keys, extents.value_width)], keys)
    })?;
    dense::output(&shape, out)
}

#[cfg(test)]
mod tests;
