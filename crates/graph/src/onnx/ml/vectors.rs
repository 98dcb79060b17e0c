//! Support vector machines.

use model::op::{Binary, ClassRule, Classify, Ml, Op, PostTransform, SecondScore, Svm, SvmKernel};
use model::{DataType, Tensor, ValueId};

use super::super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::{class_labels, classified, floats, post_transform, rows, transformed, vector};

fn kernel(cx: &Context) -> Result<SvmKernel, MapError> {
    let (gamma, offset, degree) = match floats(cx, "kernel_params") {
        [gamma, offset, degree, ..] => (*gamma, *offset, *degree),
        _ => (0.0, 0.0, 0.0),
    };
    Ok(match cx.attributes.string("kernel_type")?.as_deref() {
        None | Some("LINEAR") => SvmKernel::Linear,
        Some("POLY") => SvmKernel::Polynomial { gamma, offset, degree },
        Some("RBF") => SvmKernel::Radial { gamma },
        Some("SIGMOID") => SvmKernel::Sigmoid { gamma, offset },
        Some(other) => return unsupported(format!("kernel_type '{other}'")),
    })
}

/// The rows of a matrix in an attribute.
fn matrix(cx: &mut Context, data: &[f32], rows: usize) -> Result<ValueId, MapError> {
    if rows == 0 || !data.len().is_multiple_of(rows) {
        return invalid(format!("{} numbers in {rows} rows", data.len()));
    }
    match Tensor::from_vec(vec![rows, data.len() / rows], data.to_vec()) {
        Ok(tensor) => Ok(cx.constant(tensor)),
        Err(error) => invalid(error.to_string()),
    }
}

pub(super) fn regressor(cx: &mut Context) -> Mapped {
    let kernel = kernel(cx)?;
    let transform = post_transform(cx)?;
    let one_class = cx.attributes.flag("one_class", false)?;
    let count = cx.attributes.size_or("n_supports", 0)?;
    let x = rows(cx)?;
    let (support, coefficients) = (floats(cx, "support_vectors"), floats(cx, "coefficients"));
    let rho = vector(cx, floats(cx, "rho"))?;
    // Without support vectors the coefficients are those of a plane.
    let (support, weights, kernel) = match count {
        0 => (matrix(cx, coefficients, 1)?, vec![1.0], SvmKernel::Linear),
        count => (matrix(cx, support, count)?, coefficients.to_vec(), kernel),
    };
    let weights = matrix(cx, &weights, 1)?;
    let svm = Svm { kernel, one_class, classes: 0 };
    let y = cx.part(Op::Ml(Ml::Svm(svm)), &[x, support, weights, rho])?;
    let y = transformed(cx, y, transform)?;
    cx.emit_identity(0, y)
}

pub(super) fn classifier(cx: &mut Context) -> Mapped {
    let kernel = kernel(cx)?;
    let transform = post_transform(cx)?;
    let (labels, classes) = class_labels(cx, ["classlabels_ints", "classlabels_strings"])?;
    let per_class = cx.attributes.ints("vectors_per_class").unwrap_or_default();
    let count: i64 = per_class.iter().sum();
    let x = rows(cx)?;
    let (support, coefficients) = (floats(cx, "support_vectors"), floats(cx, "coefficients"));
    let rho = vector(cx, floats(cx, "rho"))?;
    let (a, b) = (floats(cx, "prob_a"), floats(cx, "prob_b"));
    if count <= 0 || support.is_empty() {
        return planes(cx, x, classes, labels, transform);
    }
    if classes < 2 || per_class.len() != classes {
        return unsupported(format!("vectors of {} classes for {classes}", per_class.len()));
    }
    let support = matrix(cx, support, count as usize)?;
    let coefficients = matrix(cx, coefficients, classes - 1)?;
    let per_class = cx.ints(per_class)?;
    let svm = |classes| Svm { kernel, one_class: false, classes };
    let mut inputs = vec![Some(x), Some(support), Some(coefficients), Some(rho)];
    if !a.is_empty() && a.len() == b.len() {
        let (a, b) = (vector(cx, a)?, vector(cx, b)?);
        inputs.extend([Some(a), Some(b), Some(per_class)]);
    } else {
        inputs.extend([None, None, Some(per_class)]);
    }
    let results = cx.parts(Op::Ml(Ml::Svm(svm(classes))), inputs, 2)?;
    let (scores, votes) = (results[0], results[1]);
    // The label is that of the most votes, whatever the probabilities are.
    let rule = ClassRule::Largest;
    let none = PostTransform::None;
    let by_votes = Classify { transform: none, rule, second: SecondScore::Complement };
    let label = cx.parts(Op::Ml(Ml::Classify(by_votes)), vec![Some(votes), Some(labels)], 2)?[0];
    cx.emit_identity(0, label)?;
    let scores = match classes == 2 && a.is_empty() {
        false => transformed(cx, scores, transform)?,
        true => {
            let rule = ClassRule::Above { column: 0, threshold: 0.0 };
            let both = Classify { transform, rule, second: SecondScore::Negated };
            let inputs = vec![Some(scores), Some(labels)];
            cx.parts(Op::Ml(Ml::Classify(both)), inputs, 2)?[1]
        }
    };
    cx.emit_identity(1, scores)
}

/// A classifier without support vectors: a plane for each class.
fn planes(
    cx: &mut Context,
    x: ValueId,
    classes: usize,
    labels: ValueId,
    transform: PostTransform,
) -> Mapped {
    let weights = matrix(cx, floats(cx, "coefficients"), classes)?;
    let matmul = model::op::MatMul { transpose_b: true, ..model::op::MatMul::default() };
    let scores = cx.part(Op::MatMul(matmul), &[x, weights])?;
    let rho = match floats(cx, "rho") {
        [first, ..] => cx.scalar(DataType::F32, f64::from(*first))?,
        [] => cx.scalar(DataType::F32, 0.0)?,
    };
    let scores = cx.part(Op::Binary(Binary::Add), &[scores, rho])?;
    let rule = ClassRule::Largest;
    let classify = Classify { transform, rule, second: SecondScore::Complement };
    classified(cx, classify, scores, labels)
}
