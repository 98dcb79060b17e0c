//! Softmax, its logarithm and hardmax.

use model::DataType;
use model::op::{Softmax, SoftmaxKind};

use super::dense::{self, Real};
use super::parallel::{Failure, in_chunks};
use super::{Inputs, Kernel, KernelResult, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, into_elements};
use crate::yield_point;

/// Minimum elements per task.
const TASK_ELEMENTS: usize = 8 * 1024;

pub(crate) fn build(facts: &StepFacts, softmax: Softmax) -> Result<Kernel, KernelError> {
    match facts.input_dtype(0) {
        Some(DataType::F32) => Ok(Kernel::new(move |_, inputs| run::<f32>(inputs, softmax))),
        Some(DataType::F64) => Ok(Kernel::new(move |_, inputs| run::<f64>(inputs, softmax))),
        Some(DataType::F16 | DataType::BF16) => {
            let wide = Kernel::new(move |_, inputs| run::<f32>(inputs, softmax));
            Ok(dense::through_f32(facts, wide))
        }
        _ => Err(no_kernel(facts)),
    }
}

fn run<T: Real>(mut inputs: Inputs, softmax: Softmax) -> KernelResult
where
    TypedTensor<T>: Into<Value>,
{
    let value = inputs.take(0)?;
    let shape = value.shape().to_vec();
    let tensor = T::take(value).map_err(|value| invalid!("operand 0 is {}", value.dtype()))?;
    let mut data = into_elements(tensor);
    if shape.is_empty() && !softmax.flatten {
        normalize(softmax.kind, &mut data);
        return dense::output(&shape, data);
    }
    // The flattened form allows an axis just past the last dimension.
    let rank = shape.len() + usize::from(softmax.flatten && softmax.axis == shape.len() as i64);
    let axis = dense::resolve_axis(softmax.axis, rank)?;
    let (width, inner) = if softmax.flatten {
        (shape[axis..].iter().product(), 1)
    } else {
        (shape[axis], shape[axis + 1..].iter().product::<usize>())
    };
    if !data.is_empty() {
        normalize_all(softmax.kind, &mut data, width, inner)?;
    }
    dense::output(&shape, data)
}

/// Normalizes along the middle one of the dimensions `.. x width x inner`.
fn normalize_all<T: Real>(
    kind: SoftmaxKind,
    data: &mut [T],
    width: usize,
    inner: usize,
) -> Result<(), KernelError>
where
    TypedTensor<T>: Into<Value>,
{
    if inner == 1 {
        let rows = (TASK_ELEMENTS / width).max(1);
        in_chunks(data, width * rows, &|_: usize, chunk: &mut [T]| {
            yield_point::did_work(chunk.len());
            chunk.chunks_exact_mut(width).for_each(|row| normalize(kind, row));
        });
        return Ok(());
    }
    let failure = Failure::default();
    in_chunks(data, width * inner, &|_: usize, block: &mut [T]| {
        let Some(mut row) = failure.check(Buffer::filled(width, T::zero())) else { return };
        for column in 0..inner {
            for (x, y) in row.iter_mut().zip(block[column..].iter().step_by(inner)) {
                *x = *y;
            }
            normalize(kind, &mut row);
            yield_point::did_work(width * 2);
            for (y, x) in block[column..].iter_mut().step_by(inner).zip(&row) {
                *y = *x;
            }
        }
    });
    failure.result()
}

fn normalize<T: Real>(kind: SoftmaxKind, row: &mut [T])
where
    TypedTensor<T>: Into<Value>,
{
    match kind {
        SoftmaxKind::Softmax => T::softmax(row, false),
        SoftmaxKind::LogSoftmax => T::softmax(row, true),
        SoftmaxKind::Hardmax => {
            let mut best = 0;
            for (index, x) in row.iter().enumerate() {
                if *x > row[best] {
                    best = index;
                }
            }
            row.fill(T::zero());
            row[best] = T::one();
        }
    }
}

#[cfg(test)]
mod tests {
    use base::Random;
    use model::op::Op;

    use super::super::testing_dense::{TestOperand, assert_close, between, random, run_f32, wide};
    use super::*;

    fn reference(kind: SoftmaxKind, row: &[f64]) -> Vec<f64> {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        let first = row.iter().position(|x| *x == max);
        row.iter()
            .enumerate()
            .map(|(index, x)| match kind {
                SoftmaxKind::Softmax => (x - max).exp() / sum,
                SoftmaxKind::LogSoftmax => x - max - sum.ln(),
                SoftmaxKind::Hardmax => f64::from(u8::from(Some(index) == first)),
            })
            .collect()
    }

    #[test]
    fn all_kinds_match_the_reference() {
        let mut source = Random::new(11);
        for case in 0..60 {
            let rank = between(&mut source, 1, 4);
            let shape: Vec<usize> = (0..rank).map(|_| between(&mut source, 1, 9)).collect();
            let axis = between(&mut source, 0, rank - 1);
            let kinds = [SoftmaxKind::Softmax, SoftmaxKind::LogSoftmax, SoftmaxKind::Hardmax];
            let kind = kinds[case % 3];
            let flatten = source.below(2) == 0;
            let x = random(&mut source, &shape);
            let softmax = Softmax { kind, axis: axis as i64 - rank as i64, flatten };
            let (_, actual) =
                run_f32(Op::Softmax(softmax), &[TestOperand::Input(x.clone())]).unwrap();
            let (width, inner): (usize, usize) = if flatten {
                (shape[axis..].iter().product(), 1)
            } else {
                (shape[axis], shape[axis + 1..].iter().product())
            };
            let data = wide(&x);
            let mut expected = vec![0.0; data.len()];
            for start in 0..data.len() / width {
                let base = start / inner * width * inner + start % inner;
                let row: Vec<f64> = (0..width).map(|i| data[base + i * inner]).collect();
                for (i, y) in reference(kind, &row).into_iter().enumerate() {
                    expected[base + i * inner] = y;
                }
            }
            assert_close(&actual, &expected, 1e-5, &format!("{softmax:?} of {shape:?}"));
        }
    }

    #[test]
    fn bad_axes_are_refused() {
        let softmax = Softmax { kind: SoftmaxKind::Softmax, axis: 2, flatten: false };
        let x = random(&mut Random::new(1), &[2, 3]);
        assert!(
            run_f32(Op::Softmax(softmax), &[TestOperand::Input(x)]).unwrap_err().contains("axis 2")
        );
    }
}
