//! Operators: what one step of a plan computes.
//!
//! The graph's passes, the compiler and every device use the same operators. Similar ONNX operators
//! are one variant (`Unary`, `Binary`, `Reduce`, ...). What some opsets pass as an attribute and
//! others as an input is always an input here. The comment on a variant lists its inputs in order;
//! `[x]` marks an optional one.

use serde::{Deserialize, Serialize};

use crate::DataType;
use crate::narrow::{NarrowType, PowerRounding};

mod control;
mod ml;
mod random;
mod recurrent;
mod resize;
mod signal;
mod spatial;
mod text;
mod window;

pub use control::{Body, Control, ControlKind, Scan};
pub use ml::{
    ClassRule, Classify, Ml, PostTransform, SecondScore, Svm, SvmKernel, TreeAggregate, TreeMode,
    Trees,
};
pub use random::{Distribution, Draw};
pub use recurrent::{Rnn, RnnCell, RnnDirection};
pub use resize::{AspectPolicy, CoordinateMode, GridPadding, NearestMode, Resize, ResizeMode};
pub use signal::{Signal, WindowKind};
pub use spatial::{RoiAlign, Spatial};
pub use text::{LetterCase, Text, TfIdf, TfIdfMode, Tokenize};
pub use window::{Conv, ConvTranspose, GlobalPool, Padding, Pool, PoolKind, Window};

/// What a step computes. Shapes follow ONNX; see the comment of each variant for its inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// `x`: one output of the same shape.
    Unary(Unary),
    /// `a, b`, broadcast against each other.
    Binary(Binary),
    /// `a, b`, broadcast; the output is boolean.
    Compare(Compare),
    /// `x...`, one or more, broadcast.
    Variadic(Variadic),
    /// `condition, a, b`, broadcast.
    Where,
    /// `x, [low], [high]`.
    Clip,
    /// `x, slope`, the slope broadcast to `x`.
    PRelu,
    /// `x`: converts each element.
    Cast(Cast),
    /// `codes`, bytes: the numbers they stand for, `F32`.
    Decode {
        /// What the bytes are.
        from: NarrowType,
    },
    /// `x`, `F32` for floats and `I64` for integers: the bytes of a narrow type.
    Encode(Encode),
    /// `x`: the same bits as elements of another type of the same size.
    BitCast {
        /// The type of the output.
        to: DataType,
    },
    /// `x`, unchanged.
    Identity,
    /// `x, scale, shift`: `activation(x * scale[c] + shift[c])` with `c` the index along axis 1.
    ScaleShift {
        /// Applied to the result.
        activation: Activation,
    },

    /// `x, weight, [bias], [residual]`: `activation(conv(x) + bias + residual)`, any spatial rank.
    Conv(Conv),
    /// `x, weight, [bias]`.
    ConvTranspose(ConvTranspose),
    /// `a, b, [bias], [residual]`: `activation(alpha * a @ b + bias + residual)`, numpy batching.
    MatMul(MatMul),
    /// `a, b, [c]`: `activation(alpha * op(a) @ op(b) + beta * c)` on matrices.
    Gemm(Gemm),
    /// `q, k, v, [mask]`, each `[.., tokens, width]`: `softmax(scale * q @ k^T + mask) @ v`, numpy
    /// batching. The mask broadcasts to the scores; a boolean one excludes keys where it is false.
    /// A query without any key (all scores minus infinity) gets zeros.
    Attention {
        /// Factor on the scores.
        scale: f32,
    },
    /// Two or more operands in Einstein notation.
    Einsum {
        /// The equation, for example `bij,bjk->bik`.
        equation: String,
    },

    /// `x`: windows over the spatial dimensions. With [`PoolKind::MaxWithIndices`] two outputs.
    Pool(Pool),
    /// `x`: one value per channel, spatial dimensions kept as 1.
    GlobalPool(GlobalPool),
    /// `x, scale, bias, mean, variance`.
    BatchNorm {
        /// Added to the variance.
        epsilon: f32,
    },
    /// `x, scale, [bias]`, over the dimensions from `axis` on; outputs `y, [mean], [inverse
    /// deviation]`.
    LayerNorm {
        /// First normalised dimension; may be negative.
        axis: i64,
        /// Added to the variance.
        epsilon: f32,
    },
    /// `x, scale`, over the dimensions from `axis` on.
    RmsNorm {
        /// First normalised dimension; may be negative.
        axis: i64,
        /// Added to the mean square.
        epsilon: f32,
    },
    /// `x, scale, bias`: per image and channel.
    InstanceNorm {
        /// Added to the variance.
        epsilon: f32,
    },
    /// `x, scale, bias` with scale and bias per channel.
    GroupNorm {
        /// Number of channel groups.
        groups: usize,
        /// Added to the variance.
        epsilon: f32,
    },
    /// `x`: local response normalisation over channels.
    Lrn {
        /// Factor on the sum of squares.
        alpha: f32,
        /// Exponent.
        beta: f32,
        /// Offset.
        bias: f32,
        /// Channels summed over.
        size: usize,
    },
    /// `x`, divided by its 1- or 2-norm along `axis`.
    LpNorm {
        /// The dimension; may be negative.
        axis: i64,
        /// 1 or 2.
        p: u8,
    },
    /// `x`.
    Softmax(Softmax),

    /// `x, [axes]`.
    Reduce(Reduce),
    /// `x`; the output is `I64`.
    ArgReduce(ArgReduce),
    /// `x, axis`.
    CumSum {
        /// Exclude the element itself.
        exclusive: bool,
        /// Sum from the end.
        reverse: bool,
    },
    /// `x, axis`.
    CumProd {
        /// Exclude the element itself.
        exclusive: bool,
        /// Multiply from the end.
        reverse: bool,
    },
    /// `x`: the determinants of square matrices.
    Det,
    /// `x`; outputs the different elements or slices, and as `I64` the first position of each, the
    /// place of each position among them, and their counts.
    Unique {
        /// Flattened when absent; may be negative.
        axis: Option<i64>,
        /// In order rather than as they occur.
        sorted: bool,
    },
    /// `x, k`; outputs values and `I64` indices.
    TopK {
        /// The dimension; may be negative.
        axis: i64,
        /// Largest rather than smallest.
        largest: bool,
        /// In order.
        sorted: bool,
    },
    /// `x`; the output is `I64` of shape `[rank, hits]`.
    NonZero,

    /// `x`; the output is `I64`: the dimensions `start..end` of `x`.
    Shape {
        /// First dimension; may be negative.
        start: i64,
        /// One past the last; may be negative.
        end: Option<i64>,
    },
    /// `x`; the output is an `I64` scalar.
    Size,
    /// `x, shape`; `-1` infers one dimension.
    Reshape {
        /// A zero is a dimension of zero rather than a copy of the input's.
        allow_zero: bool,
    },
    /// `x`, as a matrix split before `axis`.
    Flatten {
        /// May be negative.
        axis: i64,
    },
    /// `x, [axes]`.
    Squeeze,
    /// `x, axes`.
    Unsqueeze,
    /// `x`; reversed dimensions without a permutation.
    Transpose {
        /// Input dimension of each output dimension.
        perm: Option<Vec<usize>>,
    },
    /// `x, shape`.
    Expand,
    /// `x, repeats`.
    Tile,
    /// `x...`, one or more.
    Concat {
        /// May be negative.
        axis: i64,
    },
    /// `x, [sizes]`: as many outputs as the step has, equal parts without sizes.
    Split {
        /// May be negative.
        axis: i64,
    },
    /// `x, starts, ends, [axes], [steps]`.
    Slice,
    /// `x, pads, [value], [axes]`.
    Pad {
        /// What fills the border.
        mode: PadMode,
    },
    /// `x, indices`.
    Gather {
        /// May be negative.
        axis: i64,
    },
    /// `x, indices`.
    GatherElements {
        /// May be negative.
        axis: i64,
    },
    /// `x, indices`.
    GatherNd {
        /// Leading dimensions shared by both.
        batch_dims: usize,
    },
    /// `x, indices, updates`.
    ScatterElements {
        /// May be negative.
        axis: i64,
        /// How an update is combined with the existing element.
        reduction: ScatterReduction,
    },
    /// `x, indices, updates`.
    ScatterNd {
        /// How an update is combined with the existing element.
        reduction: ScatterReduction,
    },
    /// `past, update, [first position of each row]`: rows overwritten along one dimension.
    TensorScatter {
        /// May be negative.
        axis: i64,
        /// Positions wrap around at the end.
        circular: bool,
    },
    /// `indices, depth, values`.
    OneHot {
        /// May be negative.
        axis: i64,
    },
    /// `start, limit, delta`.
    Range,
    /// `shape`: filled with one element of the constant.
    ConstantOfShape {
        /// Element type of the output.
        dtype: DataType,
        /// The element's little-endian bytes, as many as the type needs.
        value: [u8; 8],
    },
    /// `x`, of which only the shape is used; ones on diagonal `k`.
    EyeLike {
        /// Element type of the output; that of `x` when absent.
        dtype: Option<DataType>,
        /// Diagonal, 0 is the main one.
        k: i64,
    },
    /// `x, [k]`: upper or lower triangle.
    Trilu {
        /// Keep the upper triangle.
        upper: bool,
    },
    /// `x`, NCHW.
    DepthToSpace {
        /// Block edge.
        block: usize,
        /// Column-row-depth order instead of depth-column-row.
        crd: bool,
    },
    /// `x`, NCHW.
    SpaceToDepth {
        /// Block edge.
        block: usize,
    },
    /// `x, lengths`.
    ReverseSequence {
        /// Batch dimension.
        batch_axis: usize,
        /// Time dimension.
        time_axis: usize,
    },
    /// `x, condition`.
    Compress {
        /// Flattened when absent; may be negative.
        axis: Option<i64>,
    },
    /// `x, [roi], [scales], [sizes]`; exactly one of the last two.
    Resize(Resize),
    /// `x, grid`.
    GridSample {
        /// Sampling between pixels.
        mode: ResizeMode,
        /// Outside the image: zeros, border or reflection.
        padding: GridPadding,
        /// -1 and 1 are the centres of the corner pixels.
        align_corners: bool,
    },

    /// `x, scale, [zero point]`; per tensor or along `axis`.
    QuantizeLinear {
        /// May be negative.
        axis: i64,
        /// Output type when there is no zero point.
        dtype: DataType,
    },
    /// `x, scale, [zero point]`; per tensor or along `axis`.
    DequantizeLinear {
        /// May be negative.
        axis: i64,
    },
    /// `x`; outputs quantised `x`, scale and zero point.
    DynamicQuantizeLinear,
    /// `a, b, [a zero point], [b zero point]`; the output is `I32`.
    MatMulInteger,
    /// `x, weight, [x zero point], [weight zero point]`; the output is `I32`.
    ConvInteger(Conv),
    /// `a, a scale, a zero, b, b scale, b zero, y scale, y zero`.
    QLinearMatMul,
    /// `x, x scale, x zero, w, w scale, w zero, y scale, y zero, [bias]`.
    QLinearConv(Conv),

    /// `x, w, r, [b], [lengths], [initial h], [initial c], [peepholes]`; outputs `[y], [h], [c]`.
    Rnn(Rnn),
    /// `q, k, v, [state], [decay], [beta]`, heads side by side; outputs `y, state`.
    LinearAttention(LinearAttention),
    /// Spectra.
    Signal(Signal),
    /// Images.
    Spatial(Spatial),
    /// Random numbers.
    Draw(Draw),
    /// Trees, support vectors and labels.
    Ml(Ml),
    /// Strings.
    Text(Text),
    /// Branches and loops.
    Control(Control),
    /// `boxes, scores, [max per class], [iou threshold], [score threshold]`; the output is `I64`.
    NonMaxSuppression {
        /// Boxes are centre and size instead of two corners.
        center_point: bool,
    },
}

/// Element-wise functions of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX operator of the same name.
pub enum Unary {
    Abs,
    Acos,
    Acosh,
    Asin,
    Asinh,
    Atan,
    Atanh,
    BitNot,
    Ceil,
    Celu { alpha: f32 },
    Cos,
    Cosh,
    Elu { alpha: f32 },
    Erf,
    Exp,
    Floor,
    Gelu { tanh: bool },
    HardSigmoid { alpha: f32, beta: f32 },
    HardSwish,
    IsInf { positive: bool, negative: bool },
    IsNan,
    LeakyRelu { alpha: f32 },
    Log,
    Mish,
    Neg,
    Not,
    Reciprocal,
    Relu,
    Round,
    Selu { alpha: f32, gamma: f32 },
    Shrink { bias: f32, lambda: f32 },
    Sigmoid,
    Sign,
    Silu { alpha: f32 },
    Sin,
    Sinh,
    Softplus,
    Softsign,
    Sqrt,
    Tan,
    Tanh,
    ThresholdedRelu { alpha: f32 },
}

/// Element-wise functions of two broadcast operands of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX operator of the same name.
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    /// The exponent may have another type; the result has the base's.
    Pow,
    /// The sign follows the divisor, as in Python.
    Mod,
    /// The sign follows the dividend, as in C.
    Fmod,
    And,
    Or,
    Xor,
    BitAnd,
    BitOr,
    BitXor,
    ShiftLeft,
    ShiftRight,
}

/// Element-wise comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX operator of the same name.
pub enum Compare {
    Equal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// Element-wise functions of any number of broadcast operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX operator of the same name.
pub enum Variadic {
    Sum,
    Mean,
    Max,
    Min,
}

/// Conversion of elements to another type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cast {
    /// The type of the output.
    pub to: DataType,
}

/// Conversion of numbers to the bytes of a narrow type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Encode {
    /// What the bytes are.
    pub to: NarrowType,
    /// Numbers beyond the largest one become it.
    pub saturate: bool,
    /// Rounding to powers of two.
    pub rounding: PowerRounding,
}

/// Attention with a state instead of a softmax.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearAttention {
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values; each serves several of the queries.
    pub kv_heads: usize,
    /// Factor on the result; one over the root of a key's width when absent.
    pub scale: Option<f32>,
    /// The state decays before every token.
    pub gated: bool,
    /// Only the difference to what the state already gives is added to it.
    pub delta: bool,
}

/// A function fused into the end of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the function of the same name in [`Unary`].
pub enum Activation {
    #[default]
    None,
    Relu,
    LeakyRelu {
        alpha: f32,
    },
    Clip {
        low: f32,
        high: f32,
    },
    Sigmoid,
    Tanh,
    Silu,
    Gelu {
        tanh: bool,
    },
    HardSwish,
    HardSigmoid {
        alpha: f32,
        beta: f32,
    },
}

/// A batched matrix product with the operators fused into it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MatMul {
    /// Swap the last two dimensions of `a` first.
    pub transpose_a: bool,
    /// Swap the last two dimensions of `b` first.
    pub transpose_b: bool,
    /// Factor on the product.
    pub alpha: f32,
    /// Applied last, after bias and residual.
    pub activation: Activation,
}

impl Default for MatMul {
    fn default() -> Self {
        MatMul { transpose_a: false, transpose_b: false, alpha: 1.0, activation: Activation::None }
    }
}

/// ONNX `Gemm` with a fused activation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemm {
    /// Transpose `a` first.
    pub transpose_a: bool,
    /// Transpose `b` first.
    pub transpose_b: bool,
    /// Factor on the product.
    pub alpha: f32,
    /// Factor on `c`.
    pub beta: f32,
    /// Applied last.
    pub activation: Activation,
}

/// Softmax and similar operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Softmax {
    /// Which operator.
    pub kind: SoftmaxKind,
    /// The dimension; may be negative.
    pub axis: i64,
    /// Normalise over all dimensions from `axis` on, as opsets before 13 do.
    pub flatten: bool,
}

/// The softmax operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX operator of the same name.
pub enum SoftmaxKind {
    Softmax,
    LogSoftmax,
    Hardmax,
}

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduce {
    /// What is computed.
    pub kind: ReduceKind,
    /// Keep reduced dimensions as 1.
    pub keep_dims: bool,
    /// Without axes, return the input instead of reducing all dimensions.
    pub noop_with_empty_axes: bool,
}

/// What a reduction computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX operator of the same name.
pub enum ReduceKind {
    L1,
    L2,
    LogSum,
    LogSumExp,
    Max,
    Mean,
    Min,
    Prod,
    Sum,
    SumSquare,
}

/// Position of the largest or smallest element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgReduce {
    /// Largest rather than smallest.
    pub max: bool,
    /// The dimension; may be negative.
    pub axis: i64,
    /// Keep the reduced dimension as 1.
    pub keep_dims: bool,
    /// The last of equal elements rather than the first.
    pub select_last: bool,
}

/// What padding is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX mode of the same name.
pub enum PadMode {
    Constant,
    Reflect,
    Edge,
    Wrap,
}

/// How a scattered update is combined with the existing element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)] // Each is the ONNX reduction of the same name.
pub enum ScatterReduction {
    None,
    Add,
    Mul,
    Max,
    Min,
}

impl Op {
    /// Whether it gives the same elements in the same order other sizes.
    pub fn is_reshape(&self) -> bool {
        matches!(self, Op::Reshape { .. } | Op::Flatten { .. } | Op::Squeeze | Op::Unsqueeze)
    }

    /// Whether it changes only where elements are: a reshape, a transposition or nothing.
    pub fn only_moves(&self) -> bool {
        self.is_reshape() || matches!(self, Op::Identity | Op::Transpose { .. })
    }

    /// The operator's common name, for messages, tables and traces.
    pub fn name(&self) -> String {
        let variant_name = |value: &dyn std::fmt::Debug| {
            let text = format!("{value:?}");
            text.split([' ', '{', '(']).next().unwrap_or_default().to_string()
        };
        match self {
            Op::Unary(unary) => variant_name(unary),
            Op::Binary(binary) => variant_name(binary),
            Op::Compare(compare) => variant_name(compare),
            Op::Variadic(variadic) => variant_name(variadic),
            Op::Softmax(softmax) => variant_name(&softmax.kind),
            Op::Reduce(reduce) => format!("Reduce{:?}", reduce.kind),
            Op::ArgReduce(arg) => if arg.max { "ArgMax" } else { "ArgMin" }.to_string(),
            Op::Pool(pool) => {
                format!("{}Pool", variant_name(&pool.kind).replace("WithIndices", ""))
            }
            Op::GlobalPool(kind) => format!("Global{}Pool", variant_name(kind)),
            Op::Signal(signal) => variant_name(signal),
            Op::Spatial(spatial) => variant_name(spatial),
            Op::Control(control) => variant_name(&control.kind),
            Op::Ml(ml) => variant_name(ml),
            Op::Text(text) => format!("Text{}", variant_name(text)),
            Op::Draw(draw) => format!("Random{}", variant_name(&draw.distribution)),
            Op::Rnn(rnn) => match rnn.cell {
                RnnCell::Simple => "RNN".to_string(),
                RnnCell::Lstm { .. } => "LSTM".to_string(),
                RnnCell::Gru { .. } => "GRU".to_string(),
            },
            other => variant_name(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_onnx() {
        assert_eq!(Op::Unary(Unary::LeakyRelu { alpha: 0.1 }).name(), "LeakyRelu");
        assert_eq!(Op::Concat { axis: 1 }.name(), "Concat");
        assert_eq!(Op::MatMul(MatMul::default()).name(), "MatMul");
        assert_eq!(Op::GlobalPool(GlobalPool::Average).name(), "GlobalAveragePool");
    }
}
