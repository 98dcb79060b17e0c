//! Operators of classical machine learning: trees, support vectors, labels.

use serde::{Deserialize, Serialize};

/// Operators of `ai.onnx.ml` that are not made of simpler ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Ml {
    /// `x, nodes, thresholds, leaves, targets, weights, roots, [members]`: the sums of the leaves
    /// that a row reaches in every tree. All but `x` are constants.
    ///
    /// A row of `nodes` is: feature, [`TreeMode`], true child, false child, whether a missing
    /// feature goes to the true child, first member, number of members. A child from 0 on is a
    /// node; `-1` is the first leaf, `-2` the second. A row of `leaves` is the first entry and the
    /// number of entries in `targets` and `weights`. Roots are children.
    Trees(Trees),
    /// `scores, labels`; outputs the label of each row and its scores.
    Classify(Classify),
    /// `x, keys, values, default`: each element's value, or the default.
    MapLabels,
    /// `x, categories`: a one for each element's category, `F32`.
    OneHotLabels {
        /// An element without a category is an error rather than all zeros.
        strict: bool,
    },
    /// `x`: a function of the scores of each row.
    PostTransform(PostTransform),
    /// `x, support vectors, coefficients, rho, [probability a], [probability b], [vectors of each
    /// class]`: one score per row, or one per class or pair of classes; then the votes of each
    /// class.
    Svm(Svm),
}

/// Trees and what becomes of their leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trees {
    /// Columns of the output.
    pub targets: usize,
    /// How leaves are combined.
    pub aggregate: TreeAggregate,
}

/// How the leaves of several trees are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX function of the same name.
pub enum TreeAggregate {
    Sum,
    Average,
    Min,
    Max,
}

/// When a node's true child is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX mode of the same name.
pub enum TreeMode {
    LessOrEqual,
    Less,
    GreaterOrEqual,
    Greater,
    Equal,
    NotEqual,
    Member,
}

impl TreeMode {
    /// Every mode; its position is its number in a plan.
    pub const ALL: [TreeMode; 7] = [
        TreeMode::LessOrEqual,
        TreeMode::Less,
        TreeMode::GreaterOrEqual,
        TreeMode::Greater,
        TreeMode::Equal,
        TreeMode::NotEqual,
        TreeMode::Member,
    ];
}

/// From scores to labels.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Classify {
    /// Applied to the scores.
    pub transform: PostTransform,
    /// Which label wins.
    pub rule: ClassRule,
    /// What one score says of the other of two classes.
    pub second: SecondScore,
}

/// Which label wins.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum ClassRule {
    /// That of the largest score.
    Largest,
    /// The second of two if this column's score is above the threshold.
    Above {
        /// The column.
        column: usize,
        /// The threshold.
        threshold: f32,
    },
}

/// The score of the first class, where only the second has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SecondScore {
    /// What is left to one.
    Complement,
    /// The same with the other sign.
    Negated,
}

/// A function of the scores of each row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX transform of the same name.
pub enum PostTransform {
    None,
    Softmax,
    Logistic,
    SoftmaxZero,
    Probit,
}

/// A support vector machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Svm {
    /// How two vectors are compared.
    pub kernel: SvmKernel,
    /// The sign of the result rather than the result.
    pub one_class: bool,
    /// Classes; 0 for a regression.
    pub classes: usize,
}

/// How two vectors are compared.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum SvmKernel {
    /// Their product.
    Linear,
    /// A power of it.
    Polynomial {
        /// Factor on the product.
        gamma: f32,
        /// Added to it.
        offset: f32,
        /// The power.
        degree: f32,
    },
    /// By their distance.
    Radial {
        /// Factor on the squared distance.
        gamma: f32,
    },
    /// The hyperbolic tangent of their product.
    Sigmoid {
        /// Factor on the product.
        gamma: f32,
        /// Added to it.
        offset: f32,
    },
}
