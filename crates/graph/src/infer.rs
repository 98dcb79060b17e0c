//! Shape inference: types, shapes and small contents of every operator's outputs.

use std::fmt;

use model::op::Op;
use model::{DataType, NarrowType, Tensor, ValueId};

use crate::content;
use crate::ir::Graph;
use model::dim::{SymDim, shape_text};

mod control;
mod einsum;
mod elementwise;
mod index;
mod layout;
mod matrix;
mod ml;
mod narrow;
mod reduce;
mod shape;
mod signal;
mod spatial;
mod text;
mod tracked;
mod window;

/// Why operands do not fit an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferError(pub String);

impl fmt::Display for InferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InferError {}

pub(crate) type Inferred<T> = Result<T, InferError>;

pub(crate) fn fail<T>(message: impl Into<String>) -> Inferred<T> {
    Err(InferError(message.into()))
}

pub(crate) use control::common;
pub(crate) use einsum::labels as einsum_labels;

/// A shape whose rank may be unknown.
pub type Shape = Option<Vec<SymDim>>;

/// Whether a value is a tensor or several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ValueKind {
    /// One tensor.
    #[default]
    Tensor,
    /// Any number of tensors.
    Sequence,
    /// A tensor or none.
    Optional,
    /// A sequence or none.
    OptionalSequence,
}

/// The inferred properties of one value. Of a sequence, type and shape are those of its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// Element type.
    pub dtype: DataType,
    /// Dimensions, when the rank is known.
    pub shape: Shape,
    /// The elements, when they are few and integers.
    pub content: Option<Vec<SymDim>>,
    /// What the bytes are, when they are not themselves.
    pub narrow: Option<NarrowType>,
    /// A tensor, or tensors.
    pub kind: ValueKind,
}

impl Fact {
    /// A value whose elements are not tracked.
    pub fn new(dtype: DataType, shape: Shape) -> Fact {
        Fact { dtype, shape, content: None, narrow: None, kind: ValueKind::Tensor }
    }

    /// The properties of a constant.
    pub fn of_tensor(tensor: &Tensor) -> Fact {
        Fact {
            dtype: tensor.dtype(),
            shape: Some(tensor.shape().iter().map(|dim| SymDim::from(*dim)).collect()),
            content: content::of_tensor(tensor),
            narrow: None,
            kind: ValueKind::Tensor,
        }
    }

    pub(crate) fn with_content(mut self, content: Option<Vec<SymDim>>) -> Fact {
        let count = self.shape.as_deref().and_then(content::fixed_count);
        self.content =
            content.filter(|c| c.len() <= content::MAX_CONTENT && count == Some(c.len()));
        self
    }
}

/// The operands of a node that is being inferred.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    graph: &'a Graph,
    inputs: &'a [Option<ValueId>],
}

impl<'a> Operands<'a> {
    pub fn id(&self, index: usize) -> Option<ValueId> {
        self.inputs.get(index).copied().flatten()
    }

    pub fn has(&self, index: usize) -> bool {
        self.id(index).is_some()
    }

    pub fn count(&self) -> usize {
        self.inputs.len()
    }

    pub fn dtype(&self, index: usize) -> Inferred<DataType> {
        match self.id(index) {
            Some(id) => Ok(self.graph.value(id).dtype),
            None => fail(format!("operand {index} is missing")),
        }
    }

    pub fn shape(&self, index: usize) -> Option<&'a [SymDim]> {
        self.id(index).and_then(|id| self.graph.shape(id))
    }

    pub fn owned_shape(&self, index: usize) -> Shape {
        self.shape(index).map(<[SymDim]>::to_vec)
    }

    pub fn rank(&self, index: usize) -> Option<usize> {
        self.shape(index).map(<[SymDim]>::len)
    }

    pub fn content(&self, index: usize) -> Option<&'a [SymDim]> {
        self.id(index).and_then(|id| self.graph.value(id).content.as_deref())
    }

    /// The elements, when all are numbers.
    pub fn ints(&self, index: usize) -> Option<Vec<i64>> {
        match self.content(index) {
            Some(content) => content.iter().map(SymDim::fixed).collect(),
            None => self.id(index).and_then(|id| self.graph.constant_ints(id)),
        }
    }

    /// The elements, when this is a constant of floating-point numbers.
    pub fn floats(&self, index: usize) -> Option<Vec<f32>> {
        self.id(index).and_then(|id| self.graph.constant(id)).and_then(content::floats)
    }

    pub fn require(&self, count: usize) -> Inferred<()> {
        match (0..count).find(|index| !self.has(*index)) {
            None => Ok(()),
            Some(index) => fail(format!("operand {index} is missing")),
        }
    }

    /// Fails unless the present operands at `indices` have one type.
    pub fn same_type(&self, indices: impl IntoIterator<Item = usize>) -> Inferred<DataType> {
        let mut first = None;
        for index in indices.into_iter().filter(|index| self.has(*index)) {
            let dtype = self.dtype(index)?;
            if *first.get_or_insert(dtype) != dtype {
                return fail(format!("operands of different types: {}", self.describe()));
            }
        }
        first.ok_or_else(|| InferError("no operands".to_string()))
    }

    /// Fails unless operand `index` has rank `rank` or an unknown one.
    pub fn expect_rank(&self, index: usize, rank: usize) -> Inferred<()> {
        match self.rank(index) {
            Some(other) if other != rank => {
                fail(format!("operand {index} has rank {other} instead of {rank}"))
            }
            _ => Ok(()),
        }
    }

    pub fn describe(&self) -> String {
        describe(self.graph, self.inputs)
    }
}

/// Operands as text for messages: `x: FP32[1,3,224,224], w: FP32[64,3,7,7]`.
pub fn describe(graph: &Graph, inputs: &[Option<ValueId>]) -> String {
    let one = |id: &Option<ValueId>| match id {
        None => "-".to_string(),
        Some(id) => {
            let value = graph.value(*id);
            format!("{}: {}{}", value.name, value.dtype, shape_text(value.shape.as_deref()))
        }
    };
    inputs.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// The inferred properties of the outputs of `op` on `inputs`.
pub(crate) fn infer(
    graph: &Graph,
    op: &Op,
    inputs: &[Option<ValueId>],
    outputs: usize,
) -> Inferred<Vec<Fact>> {
    let operands = Operands { graph, inputs };
    let mut facts = dispatch(op, &operands, outputs)?;
    narrow::mark(op, &operands, &mut facts)?;
    for fact in &mut facts {
        check(fact)?;
        tracked::limit(fact);
    }
    if facts.len() < outputs {
        return fail(format!("{} has no output {}", op.name(), facts.len()));
    }
    facts.truncate(outputs);
    Ok(facts)
}

/// Fails for negative dimensions and huge shapes.
fn check(fact: &Fact) -> Inferred<()> {
    let Some(shape) = &fact.shape else { return Ok(()) };
    if shape.iter().any(|dim| dim.fixed().is_some_and(|size| size < 0)) {
        return fail(format!("the output would have shape {}", shape_text(Some(shape))));
    }
    let known: Vec<usize> = shape.iter().filter_map(SymDim::size).collect();
    match model::tensor::element_count(&known) {
        Ok(_) => Ok(()),
        Err(_) => fail(format!("the output would have shape {}", shape_text(Some(shape)))),
    }
}

fn dispatch(op: &Op, x: &Operands, outputs: usize) -> Inferred<Vec<Fact>> {
    let one = |fact: Inferred<Fact>| fact.map(|fact| vec![fact]);
    match op {
        Op::Unary(unary) => one(elementwise::unary(*unary, x)),
        Op::Binary(binary) => one(elementwise::binary(*binary, x)),
        Op::Compare(compare) => one(elementwise::compare(*compare, x)),
        Op::Variadic(variadic) => one(elementwise::variadic(*variadic, x)),
        Op::Where => one(elementwise::select(x)),
        Op::Clip => one(elementwise::clip(x)),
        Op::PRelu => one(elementwise::prelu(x)),
        Op::Cast(cast) => one(elementwise::cast(*cast, x)),
        Op::Decode { .. } => one(narrow::decode(x)),
        Op::Encode(encode) => one(narrow::encode(encode, x)),
        Op::BitCast { to } => one(narrow::bit_cast(*to, x)),
        Op::Identity => one(elementwise::identity(x)),
        Op::ScaleShift { .. } => one(elementwise::scale_shift(x)),
        Op::Conv(conv) => one(window::conv(conv, x)),
        Op::ConvTranspose(conv) => one(window::conv_transpose(conv, x)),
        Op::MatMul(matmul) => one(matrix::matmul(matmul, x)),
        Op::Gemm(gemm) => one(matrix::gemm(gemm, x)),
        Op::Attention { .. } => one(matrix::attention(x)),
        Op::Einsum { equation } => one(einsum::einsum(equation, x)),
        Op::Pool(pool) => window::pool(pool, x),
        Op::GlobalPool(_) => one(window::global_pool(x)),
        Op::BatchNorm { .. } => one(reduce::batch_norm(x)),
        Op::LayerNorm { axis, .. } => reduce::layer_norm(*axis, x),
        Op::RmsNorm { axis, .. } => one(reduce::rms_norm(*axis, x)),
        Op::InstanceNorm { .. } => one(reduce::channel_norm(x)),
        Op::GroupNorm { groups, .. } => one(reduce::group_norm(*groups, x)),
        Op::Lrn { .. } => one(elementwise::same_float(x)),
        Op::LpNorm { axis, .. } => one(reduce::along(*axis, x)),
        Op::Softmax(softmax) => one(reduce::softmax(softmax, x)),
        Op::Reduce(reduction) => one(reduce::reduce(reduction, x)),
        Op::ArgReduce(arg) => one(reduce::arg_reduce(arg, x)),
        Op::CumSum { .. } | Op::CumProd { .. } => {
            one(elementwise::identity(x).map(|f| Fact::new(f.dtype, f.shape)))
        }
        Op::Det => one(matrix::det(x)),
        Op::Unique { axis, .. } => index::unique(*axis, x),
        Op::TensorScatter { .. } => one(index::tensor_scatter(x)),
        Op::LinearAttention(attention) => matrix::linear_attention(attention, x),
        Op::Signal(signal) => one(signal::signal(signal, x)),
        Op::Spatial(spatial) => one(spatial::spatial(spatial, x)),
        Op::Draw(draw) => one(signal::draw(draw, x)),
        Op::Ml(ml) => ml::ml(ml, x),
        Op::Text(text) => text::text(text, x),
        Op::Control(op) => control::control(op, x),
        Op::TopK { axis, .. } => reduce::top_k(*axis, x),
        Op::NonZero => one(index::non_zero(x)),
        Op::Shape { start, end } => one(layout::shape_of(*start, *end, x)),
        Op::Size => one(layout::size(x)),
        Op::Reshape { allow_zero } => one(layout::reshape(*allow_zero, x)),
        Op::Flatten { axis } => one(layout::flatten(*axis, x)),
        Op::Squeeze => one(layout::squeeze(x)),
        Op::Unsqueeze => one(layout::unsqueeze(x)),
        Op::Transpose { perm } => one(layout::transpose(perm.as_deref(), x)),
        Op::Expand => one(layout::expand(x)),
        Op::Tile => one(layout::tile(x)),
        Op::Concat { axis } => one(layout::concat(*axis, x)),
        Op::Split { axis } => layout::split(*axis, outputs, x),
        Op::Slice => one(index::slice(x)),
        Op::Pad { .. } => one(layout::pad(x)),
        Op::Gather { axis } => one(index::gather(*axis, x)),
        Op::GatherElements { axis } => one(index::gather_elements(*axis, x)),
        Op::GatherNd { batch_dims } => one(index::gather_nd(*batch_dims, x)),
        Op::ScatterElements { axis, .. } => one(index::scatter_elements(*axis, x)),
        Op::ScatterNd { .. } => one(index::scatter_nd(x)),
        Op::OneHot { axis } => one(index::one_hot(*axis, x)),
        Op::Range => one(layout::range(x)),
        Op::ConstantOfShape { dtype, value } => one(layout::constant_of_shape(*dtype, value, x)),
        Op::EyeLike { dtype, .. } => one(layout::eye_like(*dtype, x)),
        Op::Trilu { .. } => one(elementwise::identity(x).map(|f| Fact::new(f.dtype, f.shape))),
        Op::DepthToSpace { block, .. } => one(layout::depth_to_space(*block, x)),
        Op::SpaceToDepth { block } => one(layout::space_to_depth(*block, x)),
        Op::ReverseSequence { batch_axis, time_axis } => {
            one(index::reverse_sequence(*batch_axis, *time_axis, x))
        }
        Op::Compress { axis } => one(index::compress(*axis, x)),
        Op::Resize(resize) => one(window::resize(resize, x)),
        Op::GridSample { .. } => one(window::grid_sample(x)),
        Op::QuantizeLinear { dtype, .. } => one(elementwise::quantize(*dtype, x)),
        Op::DequantizeLinear { .. } => one(elementwise::dequantize(x)),
        Op::DynamicQuantizeLinear => elementwise::dynamic_quantize(x),
        Op::MatMulInteger => one(matrix::matmul_integer(x)),
        Op::ConvInteger(conv) => one(window::conv_integer(conv, x)),
        Op::QLinearMatMul => one(matrix::qlinear_matmul(x)),
        Op::QLinearConv(conv) => one(window::qlinear_conv(conv, x)),
        Op::Rnn(rnn) => reduce::rnn(rnn, x),
        Op::NonMaxSuppression { .. } => one(index::non_max_suppression(x)),
    }
}
