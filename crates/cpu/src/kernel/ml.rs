//! Trees, support vectors and labels.

mod labels;
#[cfg(test)]
mod tests;
mod trees;
mod vectors;

use model::DataType;
use model::op::{ClassRule, Classify, Ml, PostTransform, SecondScore};

use super::operand::{dtype_of, elements, output_len};
use super::wide::{from_singles, singles};
use super::{Inputs, Kernel, KernelResult, Outputs, StepFacts, no_kernel};
use crate::buffer::Buffer;
use crate::kernel::operand::{Element, one};
use crate::kernel::{KernelError, invalid};
use crate::value::{TypedTensor, Value, with_value};
use crate::yield_point;

pub(crate) fn build(facts: &StepFacts, ml: Ml) -> Result<Kernel, KernelError> {
    let dtype = dtype_of(facts, 0)?;
    let real = matches!(dtype, DataType::F32 | DataType::F64);
    match ml {
        Ml::Trees(op) if dtype == DataType::F32 => trees::build::<f32>(facts, op),
        Ml::Trees(op) if dtype == DataType::F64 => trees::build::<f64>(facts, op),
        Ml::Classify(op) if real => Ok(Kernel::new(move |_, inputs| classify(&inputs, op))),
        Ml::MapLabels => labels::map(facts),
        Ml::OneHotLabels { strict } => labels::one_hot(facts, strict),
        Ml::PostTransform(to) if real => Ok(Kernel::new(move |_, inputs| transform(&inputs, to))),
        Ml::Svm(svm) if real => vectors::build(facts, svm),
        _ => Err(no_kernel(facts)),
    }
}

/// Rows and columns of a table of scores; one row when there is one dimension.
fn table(value: &Value) -> Result<(usize, usize), KernelError> {
    match *value.shape() {
        [columns] => Ok((1, columns)),
        [rows, columns] => Ok((rows, columns)),
        ref other => Err(invalid!("shape {other:?} is not of rows and columns")),
    }
}

fn logistic(x: f32) -> f32 {
    let small = 1.0 / (1.0 + (-x.abs()).exp());
    if x < 0.0 { 1.0 - small } else { small }
}

/// Giles' approximation of the inverse error function, as ONNX Runtime computes a probit.
fn probit(x: f32) -> f32 {
    let x = 2.0 * x - 1.0;
    let sign = if x < 0.0 { -1.0 } else { 1.0 };
    let log = ((1.0 - x) * (1.0 + x)).ln();
    let v = 2.0 / (std::f32::consts::PI * 0.147) + 0.5 * log;
    let v2 = 1.0 / 0.147 * log;
    std::f32::consts::SQRT_2 * sign * ((v * v - v2).sqrt() - v).sqrt()
}

/// Softmax; elements of zero may stay out of it.
fn soften(row: &mut [f32], keep_zeros: bool) {
    let counted = |x: f32| !keep_zeros || !(-1e-7..=1e-7).contains(&x);
    let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in row.iter_mut() {
        *x = match counted(*x) {
            true => (*x - highest).exp(),
            false => *x * (-highest).exp(),
        };
        sum += *x;
    }
    row.iter_mut().for_each(|x| *x /= sum);
}

fn transform_row(row: &mut [f32], to: PostTransform) {
    match to {
        PostTransform::None => {}
        PostTransform::Softmax => soften(row, false),
        PostTransform::SoftmaxZero => soften(row, true),
        PostTransform::Logistic => row.iter_mut().for_each(|x| *x = logistic(*x)),
        PostTransform::Probit => row.iter_mut().for_each(|x| *x = probit(*x)),
    }
}

fn transform(inputs: &Inputs, to: PostTransform) -> KernelResult {
    let value = inputs.get(0)?;
    let (_, columns) = table(value)?;
    let mut data = singles(value)?;
    for row in data.chunks_mut(columns.max(1)) {
        yield_point::did_work(columns * 10);
        transform_row(row, to);
    }
    one(from_singles(value.shape(), data, value.dtype())?)
}

/// The position of the largest score; of equal ones the first.
fn largest(row: &[f32]) -> usize {
    (1..row.len()).fold(0, |best, at| if row[at] > row[best] { at } else { best })
}

/// The labels at `winners`.
fn picked<T: Element + Clone>(
    labels: &TypedTensor<T>,
    winners: &[usize],
) -> Result<Value, KernelError> {
    let labels = elements(labels);
    let picked = Buffer::collect(winners.iter().map(|at| labels[*at].clone()))?;
    Ok(T::wrap(&[winners.len()], picked))
}

fn classify(inputs: &Inputs, op: Classify) -> KernelResult {
    let (value, labels) = (inputs.get(0)?, inputs.get(1)?);
    let (rows, columns) = table(value)?;
    let count: usize = labels.shape().iter().product();
    let scores = singles(value)?;
    let alone = columns == 1 && count == 2;
    let needed = match op.rule {
        ClassRule::Above { column, .. } => column < columns && count == 2,
        ClassRule::Largest => columns >= 1 && columns <= count,
    };
    if !needed && rows > 0 {
        return Err(invalid!("{columns} scores for {count} labels"));
    }
    let width = if alone { 2 } else { columns };
    let mut winners: Buffer<usize> = Buffer::with_capacity(rows)?;
    let mut out: Buffer<f32> = Buffer::with_capacity(output_len(&[rows, width])?)?;
    for row in scores.chunks_exact(columns.max(1)).take(rows) {
        yield_point::did_work(columns * 12);
        winners.extend([match op.rule {
            ClassRule::Largest => largest(row),
            ClassRule::Above { column, threshold } => usize::from(row[column] > threshold),
        }]);
        let start = out.len();
        match (alone, op.transform, op.second) {
            (true, PostTransform::Logistic, _) => out.extend([logistic(-row[0]), logistic(row[0])]),
            (true, _, SecondScore::Complement) => out.extend([1.0 - row[0], row[0]]),
            (true, _, SecondScore::Negated) => out.extend([-row[0], row[0]]),
            (false, to, _) => {
                out.extend_from_slice(row);
                transform_row(&mut out[start..], to);
            }
        }
    }
    let names = with_value!(labels, tensor => picked(tensor, &winners))?;
    Ok(Outputs::from_iter([names, from_singles(&[rows, width], out, value.dtype())?]))
}
