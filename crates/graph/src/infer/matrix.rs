//! Matrix products and attention.

use model::DataType;
use model::op::{Gemm, LinearAttention, MatMul};

use super::shape::{broadcast, unify};
use super::{Fact, Inferred, Operands, Shape, fail};
use model::dim::SymDim;

/// The shape of a numpy-style product of operands `a` and `b`.
fn product_shape(
    x: &Operands,
    a: usize,
    b: usize,
    transpose_a: bool,
    transpose_b: bool,
) -> Inferred<Shape> {
    let (Some(left), Some(right)) = (x.shape(a), x.shape(b)) else { return Ok(None) };
    if left.is_empty() || right.is_empty() {
        return fail("a matrix product does not take scalars");
    }
    let (mut left, mut right) = (left.to_vec(), right.to_vec());
    let (row, column) = (left.len() == 1, right.len() == 1);
    if (row && transpose_a) || (column && transpose_b) {
        return fail("a vector cannot be transposed");
    }
    if row {
        left.insert(0, SymDim::Fixed(1));
    }
    if column {
        right.push(SymDim::Fixed(1));
    }
    let swap = |shape: &mut Vec<SymDim>, wanted: bool| {
        let rank = shape.len();
        if wanted {
            shape.swap(rank - 2, rank - 1);
        }
    };
    swap(&mut left, transpose_a);
    swap(&mut right, transpose_b);
    let (left_batch, left_matrix) = left.split_at(left.len() - 2);
    let (right_batch, right_matrix) = right.split_at(right.len() - 2);
    unify(&left_matrix[1], &right_matrix[0], "inner dimensions")?;
    let mut out = broadcast(left_batch, right_batch)?;
    if !row {
        out.push(left_matrix[0].clone());
    }
    if !column {
        out.push(right_matrix[1].clone());
    }
    Ok(Some(out))
}

pub fn matmul(op: &MatMul, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.same_type(0..x.count())?;
    let shape = product_shape(x, 0, 1, op.transpose_a, op.transpose_b)?;
    for extra in [2, 3] {
        if let (Some(shape), Some(other)) = (&shape, x.shape(extra))
            && broadcast(shape, other)?.len() != shape.len()
        {
            return fail("bias or residual has a higher rank than the product");
        }
    }
    Ok(Fact::new(dtype, shape))
}

pub fn gemm(op: &Gemm, x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    let dtype = x.same_type([0, 1, 2])?;
    x.expect_rank(0, 2)?;
    x.expect_rank(1, 2)?;
    let shape = product_shape(x, 0, 1, op.transpose_a, op.transpose_b)?;
    if let (Some(shape), Some(c)) = (&shape, x.shape(2))
        && broadcast(shape, c)?.len() != shape.len()
    {
        return fail("operand 2 has a higher rank than the product");
    }
    Ok(Fact::new(dtype, shape))
}

pub fn attention(x: &Operands) -> Inferred<Fact> {
    x.require(3)?;
    let dtype = x.same_type([0, 1, 2])?;
    if x.count() > 3 && !matches!(x.dtype(3), Ok(DataType::Bool)) {
        x.same_type([0, 3])?;
    }
    let shape = match (x.shape(0), x.shape(1), x.shape(2)) {
        (Some(q), Some(k), Some(v)) if q.len() >= 2 && k.len() >= 2 && v.len() >= 2 => {
            unify(&q[q.len() - 1], &k[k.len() - 1], "head widths")?;
            unify(&k[k.len() - 2], &v[v.len() - 2], "tokens of keys and values")?;
            let batch = broadcast(&q[..q.len() - 2], &k[..k.len() - 2])?;
            let mut out = broadcast(&batch, &v[..v.len() - 2])?;
            out.push(q[q.len() - 2].clone());
            out.push(v[v.len() - 1].clone());
            Some(out)
        }
        (Some(_), Some(_), Some(_)) => return fail("attention takes matrices"),
        _ => None,
    };
    Ok(Fact::new(dtype, shape))
}

fn expect_bytes(x: &Operands, index: usize) -> Inferred<()> {
    match x.dtype(index)? {
        DataType::U8 | DataType::I8 => Ok(()),
        dtype => fail(format!("operand {index} is {dtype} instead of 8-bit integers")),
    }
}

pub fn matmul_integer(x: &Operands) -> Inferred<Fact> {
    x.require(2)?;
    expect_bytes(x, 0)?;
    expect_bytes(x, 1)?;
    x.same_type([0, 2])?;
    x.same_type([1, 3])?;
    Ok(Fact::new(DataType::I32, product_shape(x, 0, 1, false, false)?))
}

pub fn qlinear_matmul(x: &Operands) -> Inferred<Fact> {
    x.require(8)?;
    expect_bytes(x, 0)?;
    expect_bytes(x, 3)?;
    Ok(Fact::new(x.dtype(7)?, product_shape(x, 0, 3, false, false)?))
}

pub fn det(x: &Operands) -> Inferred<Fact> {
    let dtype = super::elementwise::same_float(x)?.dtype;
    let Some(shape) = x.shape(0) else { return Ok(Fact::new(dtype, None)) };
    let [batch @ .., rows, columns] = shape else { return fail("determinants are of matrices") };
    unify(rows, columns, "rows and columns")?;
    Ok(Fact::new(dtype, Some(batch.to_vec())))
}

pub fn linear_attention(op: &LinearAttention, x: &Operands) -> Inferred<Vec<Fact>> {
    x.require(3)?;
    let dtype = x.same_type([0, 1, 2])?;
    if x.has(4) != op.gated || x.has(5) != op.delta {
        return fail("decay or beta do not fit the update rule");
    }
    if op.kv_heads == 0 || !op.heads.is_multiple_of(op.kv_heads) {
        return fail(format!("{} heads over {}", op.heads, op.kv_heads));
    }
    let (heads, kv_heads) = (SymDim::from(op.heads), SymDim::from(op.kv_heads));
    let state_dtype = if x.has(3) { x.dtype(3)? } else { dtype };
    let (y, state) = match (x.shape(0), x.shape(2)) {
        (Some([batch, tokens, q]), Some([_, _, v])) => {
            let (key, value) = (q.div(&heads), v.div(&kv_heads));
            let y = vec![batch.clone(), tokens.clone(), value.mul(&heads)];
            (Some(y), Some(vec![batch.clone(), kv_heads, key, value]))
        }
        (Some(_), Some(_)) => return fail("queries and values must have three dimensions"),
        _ => (None, None),
    };
    Ok(vec![Fact::new(dtype, y), Fact::new(state_dtype, state)])
}
