//! Matrix products: `MatMul` with numpy batching and `Gemm`.

use model::DataType;
use model::op::{Activation, Gemm, MatMul, Op};

use super::dense::{self, elements};
use super::gemm::{self, Epilogue, Left, Matrix, PackedRight, Right};
use super::parallel::{Failure, in_chunks, try_for_each};
use super::{Context, Inputs, Kernel, KernelResult, StepFacts, activation, no_kernel};
use crate::buffer::{Buffer, Data};
use crate::kernel::{KernelError, invalid};
use crate::spare_buffers;
use crate::value::{Typed, TypedTensor, Value};

/// The two operators as one: `activation(alpha * a @ b + beta * bias + residual)`.
#[derive(Clone, Copy)]
struct Product {
    transpose_a: bool,
    transpose_b: bool,
    alpha: f32,
    beta: f32,
    activation: Activation,
    /// Operands are matrices, without batches.
    plain: bool,
}

impl From<MatMul> for Product {
    fn from(op: MatMul) -> Product {
        let MatMul { transpose_a, transpose_b, alpha, activation } = op;
        Product { transpose_a, transpose_b, alpha, beta: 1.0, activation, plain: false }
    }
}

impl From<Gemm> for Product {
    fn from(op: Gemm) -> Product {
        let Gemm { transpose_a, transpose_b, alpha, beta, activation } = op;
        Product { transpose_a, transpose_b, alpha, beta, activation, plain: true }
    }
}

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, KernelError> {
    let product: Product = match &facts.step.op {
        Op::MatMul(op) => (*op).into(),
        Op::Gemm(op) => (*op).into(),
        other => return Err(invalid!("{} is not a matrix product", other.name())),
    };
    let dtype = facts.input_dtype(0).unwrap_or(DataType::Bool);
    match dtype {
        DataType::F32 if dense::all_of_type(facts, dtype) => build_f32(facts, product),
        DataType::F16 | DataType::BF16 => Ok(dense::through_f32(facts, build_f32(facts, product)?)),
        _ if !dense::all_of_type(facts, dtype) => Err(no_kernel(facts)),
        DataType::F64 => Ok(Kernel::new(move |_, inputs| run_plain::<f64>(&inputs, product))),
        DataType::I32 => Ok(Kernel::new(move |_, inputs| run_plain::<i32>(&inputs, product))),
        DataType::I64 => Ok(Kernel::new(move |_, inputs| run_plain::<i64>(&inputs, product))),
        DataType::U32 => Ok(Kernel::new(move |_, inputs| run_plain::<u32>(&inputs, product))),
        DataType::U64 => Ok(Kernel::new(move |_, inputs| run_plain::<u64>(&inputs, product))),
        _ => Err(no_kernel(facts)),
    }
}

/// A constant right operand: its original shape and its packed elements.
struct Weights {
    shape: Vec<usize>,
    packed: PackedRight,
}

fn build_f32(facts: &StepFacts, product: Product) -> Result<Kernel, KernelError> {
    let weights = match dense::constant_f32(facts, 1)?.filter(|b| b.shape().len() == 2) {
        None => None,
        Some(b) => {
            let data = elements(&b);
            let matrix =
                Matrix::new(data, b.shape()[0], b.shape()[1]).transposed_if(product.transpose_b);
            Some(Weights { shape: b.shape().to_vec(), packed: PackedRight::new(matrix)? })
        }
    };
    let resident_bytes = weights.as_ref().map_or(0, |weights| weights.packed.size_bytes());
    let packed_inputs = if weights.is_some() { vec![1] } else { vec![] };
    let run = move |context: &Context, inputs: Inputs| {
        run_f32(context, inputs, product, weights.as_ref())
    };
    Ok(Kernel { run: Box::new(run), resident_bytes, packed_inputs })
}

/// Extents of a product and how its operands are batched.
struct Extents {
    m: usize,
    k: usize,
    n: usize,
    a_batch: Vec<usize>,
    b_batch: Vec<usize>,
    /// Broadcast batch.
    batch: Vec<usize>,
    /// The result's shape, without the dimensions that vectors lack.
    shape: Vec<usize>,
}

impl Extents {
    fn new(a: &[usize], b: &[usize], product: &Product) -> Result<Extents, KernelError> {
        if a.is_empty() || b.is_empty() || (product.plain && (a.len() != 2 || b.len() != 2)) {
            return Err(invalid!("shapes {a:?} and {b:?} have no product"));
        }
        let (a_vector, b_vector) = (a.len() == 1, b.len() == 1);
        let (a_batch, m, k) = match a {
            [k] => (&a[..0], 1, *k),
            [batch @ .., k, m] if product.transpose_a => (batch, *m, *k),
            [batch @ .., m, k] => (batch, *m, *k),
            [] => (a, 1, 1),
        };
        let (b_batch, b_k, n) = match b {
            [k] => (&b[..0], *k, 1),
            [batch @ .., n, k] if product.transpose_b => (batch, *k, *n),
            [batch @ .., k, n] => (batch, *k, *n),
            [] => (b, 1, 1),
        };
        if k != b_k {
            return Err(invalid!(
                "shapes {a:?} and {b:?} disagree on the summed dimension: {k}, {b_k}"
            ));
        }
        let batch = dense::broadcast_shapes(a_batch, b_batch)?;
        let mut shape = batch.clone();
        shape.extend((!a_vector).then_some(m));
        shape.extend((!b_vector).then_some(n));
        dense::count(&shape)?;
        let (a_batch, b_batch) = (a_batch.to_vec(), b_batch.to_vec());
        Ok(Extents { m, k, n, a_batch, b_batch, batch, shape })
    }

    /// Whether the matrices of the left operand are contiguous, so that their rows form one matrix.
    fn is_flat(&self, product: &Product) -> bool {
        !product.transpose_a
            && self.b_batch.iter().all(|&dim| dim == 1)
            && self.a_batch.iter().product::<usize>() == self.batch.iter().product::<usize>()
    }
}

/// Tensors that are added to a product.
struct Addends<'a> {
    /// One element per column.
    columns: Option<Data<'a, f32>>,
    /// One element per element of the result.
    all: Option<Data<'a, f32>>,
}

/// Groups bias and residual by how they broadcast.
fn addends<'a>(
    inputs: &'a Inputs,
    extents: &Extents,
    beta: f32,
) -> Result<Addends<'a>, KernelError> {
    let mut addends = Addends { columns: None, all: None };
    for index in [2, 3] {
        let Some(tensor) = inputs.optional_typed::<f32>(index)? else { continue };
        let factor = if index == 2 { beta } else { 1.0 };
        let one_row = tensor.len() == extents.n && tensor.shape().last() == Some(&extents.n);
        let slot =
            if one_row && addends.columns.is_none() && extents.shape.last() == Some(&extents.n) {
                &mut addends.columns
            } else {
                &mut addends.all
            };
        let mut data: Data<f32> =
            if tensor.len() == extents.n && one_row || tensor.shape() == extents.shape {
                Data::Borrowed(elements(tensor))
            } else {
                Data::Owned(dense::broadcast(tensor, &extents.shape)?)
            };
        if factor != 1.0 {
            data.to_mut()?.iter_mut().for_each(|x| *x *= factor);
        }
        match slot {
            None => *slot = Some(data),
            Some(other) => {
                let data = if data.len() == other.len() {
                    data
                } else {
                    Data::Owned(dense::broadcast(tensor, &extents.shape)?)
                };
                activation::add(other.to_mut()?, &data);
            }
        }
    }
    Ok(addends)
}

fn run_f32(
    context: &Context,
    inputs: Inputs,
    product: Product,
    weights: Option<&Weights>,
) -> KernelResult {
    let a = inputs.typed::<f32>(0)?;
    let b_tensor = if weights.is_none() { Some(inputs.typed::<f32>(1)?) } else { None };
    let b_shape = match (weights, b_tensor) {
        (Some(weights), _) => weights.shape.as_slice(),
        (None, Some(b)) => b.shape(),
        (None, None) => return Err("operand 1 is missing".into()),
    };
    let extents = Extents::new(a.shape(), b_shape, &product)?;
    let addends = addends(&inputs, &extents, product.beta)?;
    let epilogue = Epilogue {
        alpha: product.alpha,
        column_bias: addends.columns.as_deref(),
        residual: addends.all.as_deref(),
        activation: product.activation,
        ..Epilogue::default()
    };
    let a_data = elements(a);
    let b_data = b_tensor.map(elements);
    let mut out = spare_buffers::take(context.pool, dense::count(&extents.shape)?)?;
    let right = |index: usize| match (weights, &b_data) {
        (Some(weights), _) => Right::Packed(&weights.packed),
        (None, data) => {
            let size = extents.k * extents.n;
            let data = data.as_deref().unwrap_or_default();
            let matrix = &data[index * size..(index + 1) * size];
            let transpose = product.transpose_b && b_shape.len() > 1;
            let (rows, columns) =
                if transpose { (extents.n, extents.k) } else { (extents.k, extents.n) };
            Right::Plain(Matrix::new(matrix, rows, columns).transposed_if(transpose))
        }
    };
    if out.is_empty() {
        return dense::output(&extents.shape, out);
    }
    let flat = extents.is_flat(&product);
    if flat || extents.batch.iter().product::<usize>() == 1 {
        let rows = if flat { out.len() / extents.n } else { extents.m };
        let left = left_matrix(a_data, rows, &extents, &product, a.shape().len());
        gemm::product(&mut out, Left::Plain(left), right(0), epilogue)?;
    } else {
        batched(&mut out, a_data, &extents, &product, a.shape().len(), right, epilogue)?;
    }
    let shape = extents.shape.clone();
    dense::output(&shape, out)
}

fn left_matrix<'a>(
    data: &'a [f32],
    rows: usize,
    extents: &Extents,
    product: &Product,
    rank: usize,
) -> Matrix<'a> {
    if product.transpose_a && rank > 1 {
        Matrix::new(data, extents.k, rows).transposed()
    } else {
        Matrix::new(data, rows, extents.k)
    }
}

/// One product per batch index; threads take different batches.
fn batched<'b>(
    out: &mut [f32],
    a: &[f32],
    extents: &Extents,
    product: &Product,
    rank: usize,
    right: impl Fn(usize) -> Right<'b> + Sync,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    let (a_size, size) = (extents.m * extents.k, extents.m * extents.n);
    let a_index = dense::broadcast_indices(&extents.a_batch, &extents.batch)?;
    let b_index = dense::broadcast_indices(&extents.b_batch, &extents.batch)?;
    let one = |(index, out): (usize, &mut [f32]), parallel: bool| {
        let start = a_index[index] * a_size;
        let left = left_matrix(&a[start..start + a_size], extents.m, extents, product, rank);
        let residual = epilogue.residual.map(|all| &all[index * size..(index + 1) * size]);
        let epilogue = Epilogue { residual, ..epilogue };
        let run = if parallel { gemm::product } else { gemm::product_here };
        run(out, Left::Plain(left), right(b_index[index]), epilogue)
    };
    let work = out.len().saturating_mul(extents.k);
    if work < gemm::MIN_PARALLEL_WORK || out.len() / size < rayon::current_num_threads() {
        out.chunks_exact_mut(size).enumerate().try_for_each(|item| one(item, true))
    } else {
        try_for_each(out.chunks_exact_mut(size).enumerate(), &|item| one(item, false))
    }
}

/// Element types without a fast path.
pub(super) trait PlainNumber: Copy + Send + Sync + Typed + 'static {
    fn zero() -> Self;
    fn one() -> Self;
    fn multiply_add(a: Self, b: Self, c: Self) -> Self;
    fn scaled(self, factor: f32) -> Self;
    fn activated(activation: Activation, row: &mut [Self]) -> Result<(), KernelError>;
}

impl PlainNumber for f32 {
    fn zero() -> f32 {
        0.0
    }

    fn one() -> f32 {
        1.0
    }

    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    fn scaled(self, factor: f32) -> f32 {
        self * factor
    }

    fn activated(activation: Activation, row: &mut [f32]) -> Result<(), KernelError> {
        activation::apply(activation, row);
        Ok(())
    }
}

impl PlainNumber for f64 {
    fn zero() -> f64 {
        0.0
    }

    fn one() -> f64 {
        1.0
    }

    fn multiply_add(a: f64, b: f64, c: f64) -> f64 {
        a * b + c
    }

    fn scaled(self, factor: f32) -> f64 {
        self * f64::from(factor)
    }

    fn activated(activation: Activation, row: &mut [f64]) -> Result<(), KernelError> {
        row.iter_mut().for_each(|x| *x = activation::scalar(activation, *x));
        Ok(())
    }
}

macro_rules! plain_integers {
    ($($rust:ty),+) => {
        $(impl PlainNumber for $rust {
            fn zero() -> $rust {
                0
            }

            fn one() -> $rust {
                1
            }

            fn multiply_add(a: $rust, b: $rust, c: $rust) -> $rust {
                a.wrapping_mul(b).wrapping_add(c)
            }

            fn scaled(self, factor: f32) -> $rust {
                if factor == 1.0 { self } else { (self as f64 * f64::from(factor)) as $rust }
            }

            fn activated(activation: Activation, row: &mut [$rust]) -> Result<(), KernelError> {
                match activation {
                    Activation::None => Ok(()),
                    #[allow(unused_comparisons)]
                    Activation::Relu => {
                        row.iter_mut().for_each(|x| *x = (*x).max(0));
                        Ok(())
                    }
                    other => Err(invalid!("{other:?} is not defined for integers")),
                }
            }
        })+
    };
}

plain_integers!(i32, i64, u32, u64);

fn run_plain<T: PlainNumber>(inputs: &Inputs, product: Product) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let (a, b) = (inputs.typed::<T>(0)?, inputs.typed::<T>(1)?);
    let a = (a.shape(), elements(a));
    let b = (b.shape(), elements(b));
    let (shape, mut out) = multiply(a, b, product)?;
    out.iter_mut().for_each(|x| *x = x.scaled(product.alpha));
    for index in [2, 3] {
        let Some(addend) = inputs.optional_typed::<T>(index)? else { continue };
        let factor = if index == 2 { product.beta } else { 1.0 };
        let addend = dense::broadcast(addend, &shape)?;
        for (y, &x) in out.iter_mut().zip(&addend) {
            *y = T::multiply_add(x.scaled(factor), T::one(), *y);
        }
    }
    T::activated(product.activation, &mut out)?;
    dense::output(&shape, out)
}

/// Shape and elements of the product of row-major operands with numpy batching, for any element
/// type.
pub(super) fn plain_matmul<T: PlainNumber>(
    a: (&[usize], &[T]),
    b: (&[usize], &[T]),
) -> Result<(Vec<usize>, Buffer<T>), KernelError> {
    multiply(a, b, MatMul::default().into())
}

fn multiply<T: PlainNumber>(
    (a_shape, a): (&[usize], &[T]),
    (b_shape, b): (&[usize], &[T]),
    product: Product,
) -> Result<(Vec<usize>, Buffer<T>), KernelError> {
    let extents = Extents::new(a_shape, b_shape, &product)?;
    let (m, k, n) = (extents.m, extents.k, extents.n);
    let mut out = Buffer::filled(dense::count(&extents.shape)?, T::zero())?;
    if !out.is_empty() && k > 0 {
        let a_index = dense::broadcast_indices(&extents.a_batch, &extents.batch)?;
        let b_index = dense::broadcast_indices(&extents.b_batch, &extents.batch)?;
        let failure = Failure::default();
        in_chunks(&mut out, m * n, &|index: usize, out: &mut [T]| {
            let left = &a[a_index[index] * m * k..][..m * k];
            let right = &b[b_index[index] * k * n..][..k * n];
            let left = row_major(left, m, k, product.transpose_a && a_shape.len() > 1);
            let right = row_major(right, k, n, product.transpose_b && b_shape.len() > 1);
            let (Some(left), Some(right)) = (failure.check(left), failure.check(right)) else {
                return;
            };
            dense::plain_product(out, &left, &right, n, T::multiply_add);
        });
        failure.result()?;
    }
    Ok((extents.shape, out))
}

/// `rows x columns` in row-major order, from a matrix that may be stored transposed.
pub(super) fn row_major<T: Copy>(
    data: &[T],
    rows: usize,
    columns: usize,
    transposed: bool,
) -> Result<Data<'_, T>, KernelError> {
    if !transposed {
        return Ok(Data::Borrowed(data));
    }
    let element = |index: usize| data[index % columns * rows + index / columns];
    Ok(Data::Owned(Buffer::collect((0..rows * columns).map(element))?))
}

#[cfg(test)]
mod tests;
