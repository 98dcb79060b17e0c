//! Einstein summation: operands are contracted two at a time, each contraction a batched product.

use model::DataType;

use super::dense::{self, elements};
use super::gemm::{self, Epilogue, Left, Matrix, Right};
use super::matmul::PlainNumber;
use super::{Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value};

mod equation;

use equation::Equation;

pub(crate) fn build(facts: &StepFacts, equation: &str) -> Result<Kernel, KernelError> {
    let equation = Equation::parse(equation, facts.step.inputs.len())?;
    let dtype = facts.input_dtype(0).unwrap_or(DataType::Bool);
    let same = dense::all_of_type(facts, dtype);
    match dtype {
        DataType::F16 | DataType::BF16 => {
            let wide = Kernel::new(move |_, inputs| run::<f32>(&inputs, &equation));
            Ok(dense::through_f32(facts, wide))
        }
        DataType::F32 if same => Ok(Kernel::new(move |_, i| run::<f32>(&i, &equation))),
        DataType::F64 if same => Ok(Kernel::new(move |_, i| run::<f64>(&i, &equation))),
        DataType::I32 if same => Ok(Kernel::new(move |_, i| run::<i32>(&i, &equation))),
        DataType::I64 if same => Ok(Kernel::new(move |_, i| run::<i64>(&i, &equation))),
        _ => Err(no_kernel(facts)),
    }
}

/// A dimension's name: a letter, or its position from the end of the dimensions of `...`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Label {
    Letter(char),
    Ellipsis(usize),
}

/// A tensor whose dimensions have names, each at most once.
struct Labelled<T> {
    labels: Vec<Label>,
    dims: Vec<usize>,
    data: Buffer<T>,
}

/// Numbers that can be contracted.
trait Contract: PlainNumber {
    /// `out += a @ b` for row-major matrices.
    fn contract(
        out: &mut [Self],
        a: &[Self],
        b: &[Self],
        k: usize,
        n: usize,
    ) -> Result<(), KernelError> {
        let _ = k;
        dense::plain_product(out, a, b, n, Self::multiply_add);
        Ok(())
    }
}

impl Contract for f64 {}
impl Contract for i32 {}
impl Contract for i64 {}

impl Contract for f32 {
    fn contract(
        out: &mut [f32],
        a: &[f32],
        b: &[f32],
        k: usize,
        n: usize,
    ) -> Result<(), KernelError> {
        let left = Matrix::new(a, out.len().checked_div(n).unwrap_or(0), k);
        let right = Matrix::new(b, k, n);
        gemm::product(out, Left::Plain(left), Right::Plain(right), Epilogue::default())
    }
}

impl<T: PlainNumber> Labelled<T> {
    /// Names the dimensions of `tensor`; a name that occurs twice takes the diagonal.
    fn new(tensor: &TypedTensor<T>, labels: Vec<Label>) -> Result<Labelled<T>, KernelError> {
        let shape = tensor.shape();
        if labels.len() != shape.len() {
            return Err(invalid!("an operand of shape {shape:?} has {} subscripts", labels.len()));
        }
        let mut strides = vec![1usize; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        let mut unique: Vec<(Label, usize, usize)> = Vec::new();
        for ((label, &dim), stride) in labels.into_iter().zip(shape).zip(strides) {
            match unique.iter_mut().find(|other| other.0 == label) {
                None => unique.push((label, dim, stride)),
                Some(other) if other.1 == dim => other.2 += stride,
                Some(_) => {
                    return Err(invalid!("a subscript repeats over other extents in {shape:?}"));
                }
            }
        }
        let data = elements(tensor);
        let dims: Vec<usize> = unique.iter().map(|other| other.1).collect();
        let strides: Vec<usize> = unique.iter().map(|other| other.2).collect();
        let gathered = gather(data, &dims, &strides)?;
        Ok(Labelled { labels: unique.iter().map(|other| other.0).collect(), dims, data: gathered })
    }

    fn dim(&self, label: Label) -> Option<usize> {
        self.labels.iter().position(|&other| other == label).map(|axis| self.dims[axis])
    }

    /// The same elements with the dimensions `order`; missing ones have extent 1.
    fn arranged(&self, order: &[Label]) -> Result<Buffer<T>, KernelError> {
        let (mut dims, mut strides) = (Vec::new(), Vec::new());
        for label in order {
            let axis = self.labels.iter().position(|other| other == label);
            dims.push(axis.map_or(1, |axis| self.dims[axis]));
            strides.push(axis.map_or(0, |axis| self.dims[axis + 1..].iter().product()));
        }
        gather(&self.data, &dims, &strides)
    }

    /// Sums over every dimension that is not in `keep`.
    fn summed(self, keep: &[Label]) -> Result<Labelled<T>, KernelError> {
        let (kept, gone): (Vec<Label>, Vec<Label>) =
            self.labels.iter().partition(|label| keep.contains(label));
        if gone.is_empty() {
            return Ok(self);
        }
        let order: Vec<Label> = kept.iter().chain(&gone).copied().collect();
        let data = self.arranged(&order)?;
        let dims: Vec<usize> = kept.iter().filter_map(|&label| self.dim(label)).collect();
        let count: usize = dims.iter().product();
        let width: usize = gone.iter().filter_map(|&label| self.dim(label)).product();
        let sum =
            |row: &[T]| row.iter().fold(T::zero(), |sum, &x| T::multiply_add(x, T::one(), sum));
        let data = match width {
            0 => Buffer::filled(count, T::zero())?,
            width => Buffer::collect(data.chunks_exact(width).map(sum))?,
        };
        Ok(Labelled { labels: kept, dims, data })
    }
}

/// The elements of a tensor of `dims` and `strides`, in row-major order.
fn gather<T: Copy>(
    data: &[T],
    dims: &[usize],
    strides: &[usize],
) -> Result<Buffer<T>, KernelError> {
    let count = dense::count(dims)?;
    let mut index = vec![0usize; dims.len()];
    let mut offset = 0;
    let mut gathered = Buffer::with_capacity(count)?;
    for _ in 0..count {
        gathered.push(data[offset])?;
        for axis in (0..dims.len()).rev() {
            index[axis] += 1;
            offset += strides[axis];
            if index[axis] < dims[axis] {
                break;
            }
            offset -= strides[axis] * index[axis];
            index[axis] = 0;
        }
    }
    Ok(gathered)
}

/// Repeats `operand`'s dimensions of extent 1 where `other` has more, as broadcasting requires.
fn stretched<T: PlainNumber>(
    operand: Labelled<T>,
    other: &Labelled<T>,
) -> Result<Labelled<T>, KernelError> {
    let mut dims = operand.dims.clone();
    let mut strides: Vec<usize> =
        (0..dims.len()).map(|axis| dims[axis + 1..].iter().product()).collect();
    for (axis, &label) in operand.labels.iter().enumerate() {
        match other.dim(label) {
            Some(wanted) if wanted != dims[axis] && dims[axis] == 1 => {
                (dims[axis], strides[axis]) = (wanted, 0);
            }
            Some(wanted) if wanted != dims[axis] && wanted != 1 => {
                return Err(invalid!("extents {} and {wanted} share a subscript", dims[axis]));
            }
            _ => {}
        }
    }
    if dims == operand.dims {
        return Ok(operand);
    }
    dense::count(&dims)?;
    let data = gather(&operand.data, &dims, &strides)?;
    Ok(Labelled { labels: operand.labels, dims, data })
}

/// Contracts two operands; dimensions that are not in `keep` are summed over.
fn contracted<T: Contract>(
    a: Labelled<T>,
    b: Labelled<T>,
    keep: &[Label],
) -> Result<Labelled<T>, KernelError> {
    // A dimension of only one operand that the result lacks is summed first, so that it does not
    // multiply the work.
    let needed =
        |other: &Labelled<T>| -> Vec<Label> { keep.iter().chain(&other.labels).copied().collect() };
    let (a_needed, b_needed) = (needed(&b), needed(&a));
    let (a, b) = (a.summed(&a_needed)?, b.summed(&b_needed)?);
    let a = stretched(a, &b)?;
    let b = stretched(b, &a)?;
    let shared = |label: &Label| b.labels.contains(label);
    let batch: Vec<Label> =
        a.labels.iter().copied().filter(|label| shared(label) && keep.contains(label)).collect();
    let inner: Vec<Label> =
        a.labels.iter().copied().filter(|label| shared(label) && !keep.contains(label)).collect();
    let rows: Vec<Label> = a.labels.iter().copied().filter(|label| !shared(label)).collect();
    let columns: Vec<Label> =
        b.labels.iter().copied().filter(|label| !a.labels.contains(label)).collect();
    let extent = |of: &Labelled<T>, labels: &[Label]| -> usize {
        labels.iter().filter_map(|&label| of.dim(label)).product()
    };
    let (count, m) = (extent(&a, &batch), extent(&a, &rows));
    let (k, n) = (extent(&a, &inner), extent(&b, &columns));
    let left = a.arranged(&[batch.as_slice(), &rows, &inner].concat())?;
    let right = b.arranged(&[batch.as_slice(), &inner, &columns].concat())?;
    let labels = [batch.as_slice(), &rows, &columns].concat();
    let dims: Vec<usize> =
        labels.iter().filter_map(|&label| a.dim(label).or_else(|| b.dim(label))).collect();
    let mut data = Buffer::filled(dense::count(&dims)?, T::zero())?;
    if k > 0 && !data.is_empty() {
        for index in 0..count {
            let out = &mut data[index * m * n..(index + 1) * m * n];
            let left = &left[index * m * k..(index + 1) * m * k];
            T::contract(out, left, &right[index * k * n..(index + 1) * k * n], k, n)?;
        }
    }
    Ok(Labelled { labels, dims, data })
}

fn run<T: Contract>(inputs: &Inputs, equation: &Equation) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let ranks: Vec<usize> = (0..inputs.len())
        .map(|index| Ok(inputs.get(index)?.shape().len()))
        .collect::<Result<_, KernelError>>()?;
    let (terms, output) = equation.labels(&ranks)?;
    let mut operands = Vec::with_capacity(terms.len());
    for (index, labels) in terms.iter().enumerate() {
        operands.push(Labelled::new(inputs.typed::<T>(index)?, labels.clone())?);
    }
    let mut operands = operands.into_iter();
    let mut result = operands.next().ok_or("an einsum needs an operand")?;
    for (index, operand) in operands.enumerate() {
        let later = terms[index + 2..].iter().flatten();
        let keep: Vec<Label> = output.iter().chain(later).copied().collect();
        result = contracted(result, operand, &keep)?;
    }
    let result = result.summed(&output)?;
    let shape: Vec<usize> = output
        .iter()
        .map(|&label| result.dim(label).ok_or("an output subscript is in no operand"))
        .collect::<Result<_, _>>()?;
    dense::count(&shape)?;
    let data = result.arranged(&output)?;
    dense::output(&shape, data)
}

#[cfg(test)]
mod tests;
