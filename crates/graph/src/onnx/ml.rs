//! Operators of `ai.onnx.ml`, made of simpler ones where that is possible.

mod trees;
mod vectors;

use bytes::Bytes;
use model::op::{
    Binary, Cast, ClassRule, Classify, Compare, MatMul, Ml, Op, PostTransform, Reduce, ReduceKind,
    SecondScore, Unary,
};
use model::{DataType, Tensor, ValueId};

use super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::narrow::as_type;
use super::tensor::to_tensor;

pub(crate) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "ArrayFeatureExtractor" => array_feature_extractor(cx),
        "Binarizer" => binarizer(cx),
        "CategoryMapper" => category_mapper(cx),
        "FeatureVectorizer" => feature_vectorizer(cx),
        "Imputer" => imputer(cx),
        "LabelEncoder" => label_encoder(cx),
        "LinearClassifier" => linear_classifier(cx),
        "LinearRegressor" => linear_regressor(cx),
        "Normalizer" => normalizer(cx),
        "OneHotEncoder" => one_hot(cx),
        "Scaler" => scaler(cx),
        "SVMClassifier" => vectors::classifier(cx),
        "SVMRegressor" => vectors::regressor(cx),
        "TreeEnsemble" => trees::ensemble(cx),
        "TreeEnsembleClassifier" => trees::classifier(cx),
        "TreeEnsembleRegressor" => trees::regressor(cx),
        "ZipMap" => zip_map(cx),
        _ => Ok(false),
    }
}

fn vector<T: model::tensor::Element>(cx: &mut Context, data: &[T]) -> Result<ValueId, MapError> {
    match Tensor::from_vec(vec![data.len()], data.to_vec()) {
        Ok(tensor) => Ok(cx.constant(tensor)),
        Err(error) => invalid(error.to_string()),
    }
}

fn strings(cx: &mut Context, data: &[Bytes]) -> Result<ValueId, MapError> {
    match Tensor::from_strings(vec![data.len()], data.to_vec()) {
        Ok(tensor) => Ok(cx.constant(tensor)),
        Err(error) => invalid(error.to_string()),
    }
}

/// The floats in an attribute.
fn floats<'a>(cx: &Context<'a>, name: &str) -> &'a [f32] {
    cx.attributes.floats(name).unwrap_or_default()
}

fn post_transform(cx: &Context) -> Result<PostTransform, MapError> {
    Ok(match cx.attributes.string("post_transform")?.as_deref() {
        None | Some("NONE") => PostTransform::None,
        Some("SOFTMAX") => PostTransform::Softmax,
        Some("LOGISTIC") => PostTransform::Logistic,
        Some("SOFTMAX_ZERO") => PostTransform::SoftmaxZero,
        Some("PROBIT") => PostTransform::Probit,
        Some(other) => return unsupported(format!("post_transform '{other}'")),
    })
}

/// `x` through a function of each row's scores.
fn transformed(cx: &mut Context, x: ValueId, to: PostTransform) -> Result<ValueId, MapError> {
    match to {
        PostTransform::None => Ok(x),
        to => cx.part(Op::Ml(Ml::PostTransform(to)), &[x]),
    }
}

/// The suffix of the output with the keys of a sequence of maps.
pub(super) const KEYS: &str = ".keys";

/// A sequence of maps as two tensors of rows: the values, and their keys in an output of their own.
fn zip_map(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    let (keys, _) = class_labels(cx, ["classlabels_int64s", "classlabels_strings"])?;
    if cx.rank(x)? != 2 {
        return invalid("values that are not rows and columns");
    }
    let axis = cx.ints(&[0])?;
    let keys = cx.part(Op::Unsqueeze, &[keys, axis])?;
    let shape = cx.part(Op::Shape { start: 0, end: None }, &[x])?;
    let keys = cx.part(Op::Expand, &[keys, shape])?;
    if let Some(name) = cx.node.outputs.first() {
        cx.graph.values[keys.index()].name = format!("{name}{KEYS}");
    }
    cx.emit_identity(0, x)
}

/// The labels of a classifier, from one of two attributes.
fn class_labels(cx: &mut Context, names: [&str; 2]) -> Result<(ValueId, usize), MapError> {
    let (ints, texts) = (cx.attributes.ints(names[0]), cx.attributes.strings(names[1]));
    match (ints.filter(|list| !list.is_empty()), texts.filter(|list| !list.is_empty())) {
        (Some(labels), None) => Ok((vector(cx, labels)?, labels.len())),
        (None, Some(labels)) => Ok((strings(cx, labels)?, labels.len())),
        _ => invalid("labels must be either integers or strings"),
    }
}

/// Numbers in single precision, as rows and columns.
fn rows(cx: &mut Context) -> Result<ValueId, MapError> {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    if cx.dtype(x) == DataType::String {
        return invalid("strings where numbers are expected");
    }
    let x = as_type(cx, x, DataType::F32)?;
    match cx.rank(x)? {
        1 => {
            let axis = cx.ints(&[0])?;
            cx.part(Op::Unsqueeze, &[x, axis])
        }
        2 => Ok(x),
        rank => invalid(format!("{rank} dimensions instead of rows and columns")),
    }
}

fn array_feature_extractor(cx: &mut Context) -> Mapped {
    cx.at_most(2)?;
    let (mut x, y) = (cx.input(0)?, cx.input(1)?);
    if cx.rank(x)? == 1 {
        let axis = cx.ints(&[0])?;
        x = cx.part(Op::Unsqueeze, &[x, axis])?;
    }
    let flat = cx.ints(&[-1])?;
    let y = cx.part(Op::Reshape { allow_zero: false }, &[y, flat])?;
    let y = as_type(cx, y, DataType::I64)?;
    cx.emit(Op::Gather { axis: -1 }, vec![Some(x), Some(y)])
}

fn binarizer(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let threshold = cx.attributes.float_or("threshold", 0.0)?;
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let wide = if dtype.is_float() { dtype } else { DataType::F64 };
    let number = as_type(cx, x, wide)?;
    let threshold = cx.scalar(wide, f64::from(threshold))?;
    let above = cx.part(Op::Compare(Compare::Greater), &[number, threshold])?;
    cx.emit(Op::Cast(Cast { to: dtype }), vec![Some(above)])
}

fn scaler(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let (offset, scale) = (floats(cx, "offset"), floats(cx, "scale"));
    let x = cx.input(0)?;
    let mut x = as_type(cx, x, DataType::F32)?;
    if !offset.is_empty() {
        let offset = vector(cx, offset)?;
        x = cx.part(Op::Binary(Binary::Sub), &[x, offset])?;
    }
    if !scale.is_empty() {
        let scale = vector(cx, scale)?;
        x = cx.part(Op::Binary(Binary::Mul), &[x, scale])?;
    }
    cx.emit_identity(0, x)
}

fn imputer(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let (values, replaced) = if dtype.is_integer() {
        let values = cx.attributes.ints("imputed_value_int64s").unwrap_or_default();
        let replaced = cx.attributes.int_or("replaced_value_int64", 0)?;
        (vector(cx, values)?, Some(cx.scalar(DataType::I64, replaced as f64)?))
    } else {
        let values = floats(cx, "imputed_value_floats");
        let replaced = cx.attributes.float_or("replaced_value_float", 0.0)?;
        let replaced = match replaced.is_nan() {
            true => None,
            false => Some(cx.scalar(DataType::F32, f64::from(replaced))?),
        };
        (vector(cx, values)?, replaced)
    };
    cx.attributes.ignore(&["replaced_value_float", "replaced_value_int64"]);
    let values = as_type(cx, values, dtype)?;
    let missing = match replaced {
        None => cx.part(Op::Unary(Unary::IsNan), &[x])?,
        Some(replaced) => {
            let replaced = as_type(cx, replaced, dtype)?;
            cx.part(Op::Compare(Compare::Equal), &[x, replaced])?
        }
    };
    cx.emit(Op::Where, vec![Some(missing), Some(values), Some(x)])
}

fn normalizer(cx: &mut Context) -> Mapped {
    let x = rows(cx)?;
    let kind = match cx.attributes.string("norm")?.as_deref() {
        None | Some("MAX") => ReduceKind::Max,
        Some("L1") => ReduceKind::L1,
        Some("L2") => ReduceKind::L2,
        Some(other) => return unsupported(format!("norm '{other}'")),
    };
    let axis = cx.ints(&[1])?;
    let reduce = Reduce { kind, keep_dims: true, noop_with_empty_axes: false };
    let norm = cx.part(Op::Reduce(reduce), &[x, axis])?;
    let (zero, one) = (cx.scalar(DataType::F32, 0.0)?, cx.scalar(DataType::F32, 1.0)?);
    // A row of zeros stays.
    let none = cx.part(Op::Compare(Compare::Equal), &[norm, zero])?;
    let divisor = cx.part(Op::Where, &[none, one, norm])?;
    cx.emit(Op::Binary(Binary::Div), vec![Some(x), Some(divisor)])
}

fn feature_vectorizer(cx: &mut Context) -> Mapped {
    let widths = cx.attributes.sizes("inputdimensions")?.unwrap_or_default();
    let mut parts = Vec::with_capacity(cx.inputs.len());
    for index in 0..cx.inputs.len() {
        let x = cx.input(index)?;
        let x = as_type(cx, x, DataType::F32)?;
        let width = widths.get(index).map_or(-1, |width| *width as i64);
        let target = match cx.rank(x)? {
            1 => cx.ints(&[1, width])?,
            _ => cx.ints(&[0, width])?,
        };
        parts.push(cx.part(Op::Reshape { allow_zero: false }, &[x, target])?);
    }
    match parts.len() {
        0 => invalid("no inputs"),
        1 => cx.emit_identity(0, parts[0]),
        _ => cx.emit(Op::Concat { axis: 1 }, parts.into_iter().map(Some).collect()),
    }
}

/// One list of keys or values of an encoder.
fn side(cx: &mut Context, name: &str) -> Result<Option<ValueId>, MapError> {
    let tensor = cx.attributes.tensor(&format!("{name}_tensor"))?;
    if let Some(proto) = tensor {
        return match to_tensor(proto, cx.external) {
            Ok(tensor) => Ok(Some(cx.constant(tensor))),
            Err(error) => invalid(error.to_string()),
        };
    }
    if let Some(list) = cx.attributes.strings(&format!("{name}_strings")) {
        return Ok(Some(strings(cx, list)?));
    }
    if let Some(list) = cx.attributes.ints(&format!("{name}_int64s")) {
        return Ok(Some(vector(cx, list)?));
    }
    match cx.attributes.floats(&format!("{name}_floats")) {
        Some(list) => Ok(Some(vector(cx, list)?)),
        None => Ok(None),
    }
}

fn label_encoder(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    if cx.opset < 2 {
        return first_label_encoder(cx, x);
    }
    let (Some(keys), Some(values)) = (side(cx, "keys")?, side(cx, "values")?) else {
        return invalid("keys or values are missing");
    };
    let default = default_label(cx, cx.dtype(values))?;
    let x = as_type(cx, x, cx.dtype(keys))?;
    cx.emit(Op::Ml(Ml::MapLabels), vec![Some(x), Some(keys), Some(values), Some(default)])
}

/// What elements without a key become.
fn default_label(cx: &mut Context, dtype: DataType) -> Result<ValueId, MapError> {
    if let Some(proto) = cx.attributes.tensor("default_tensor")? {
        let tensor = match to_tensor(proto, cx.external) {
            Ok(tensor) => cx.constant(tensor),
            Err(error) => return invalid(error.to_string()),
        };
        let target = cx.ints(&[])?;
        cx.attributes.ignore(&["default_float", "default_int64", "default_string"]);
        let target = if cx.rank(tensor)? == 0 { return Ok(tensor) } else { target };
        return cx.part(Op::Reshape { allow_zero: false }, &[tensor, target]);
    }
    let text = cx.attributes.bytes("default_string").unwrap_or(Bytes::from_static(b"_Unused"));
    let float = cx.attributes.float_or("default_float", -0.0)?;
    let int = cx.attributes.int_or("default_int64", -1)?;
    match dtype {
        DataType::String => match Tensor::from_strings(vec![], vec![text]) {
            Ok(tensor) => Ok(cx.constant(tensor)),
            Err(error) => invalid(error.to_string()),
        },
        dtype if dtype.is_float() => cx.scalar(dtype, f64::from(float)),
        dtype => cx.scalar(dtype, int as f64),
    }
}

/// Strings to their positions in a list, or back.
fn first_label_encoder(cx: &mut Context, x: ValueId) -> Mapped {
    let classes = cx.attributes.strings("classes_strings").unwrap_or_default();
    let positions: Vec<i64> = (0..classes.len() as i64).collect();
    let (classes, positions) = (strings(cx, classes)?, vector(cx, &positions)?);
    let (keys, values) = match cx.dtype(x) {
        DataType::String => (classes, positions),
        _ => (positions, classes),
    };
    let default = default_label(cx, cx.dtype(values))?;
    let x = as_type(cx, x, cx.dtype(keys))?;
    cx.emit(Op::Ml(Ml::MapLabels), vec![Some(x), Some(keys), Some(values), Some(default)])
}

fn category_mapper(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let x = cx.input(0)?;
    let texts = cx.attributes.strings("cats_strings").unwrap_or_default();
    let numbers = cx.attributes.ints("cats_int64s").unwrap_or_default();
    if texts.len() != numbers.len() {
        return invalid(format!("{} strings for {} integers", texts.len(), numbers.len()));
    }
    let (texts, numbers) = (strings(cx, texts)?, vector(cx, numbers)?);
    let (keys, values) = match cx.dtype(x) {
        DataType::String => (texts, numbers),
        _ => (numbers, texts),
    };
    let default = default_label(cx, cx.dtype(values))?;
    let x = as_type(cx, x, cx.dtype(keys))?;
    cx.emit(Op::Ml(Ml::MapLabels), vec![Some(x), Some(keys), Some(values), Some(default)])
}

fn one_hot(cx: &mut Context) -> Mapped {
    cx.at_most(1)?;
    let strict = !cx.attributes.flag("zeros", true)?;
    let x = cx.input(0)?;
    let (categories, _) = class_labels(cx, ["cats_int64s", "cats_strings"])?;
    let x = as_type(cx, x, cx.dtype(categories))?;
    cx.emit(Op::Ml(Ml::OneHotLabels { strict }), vec![Some(x), Some(categories)])
}

/// `x @ coefficients^T + intercepts`, with one row of coefficients for each of `targets`.
fn linear(cx: &mut Context, targets: usize) -> Result<ValueId, MapError> {
    let x = rows(cx)?;
    let (coefficients, intercepts) = (floats(cx, "coefficients"), floats(cx, "intercepts"));
    if targets == 0 || coefficients.len() % targets != 0 {
        return invalid(format!("{} coefficients for {targets} targets", coefficients.len()));
    }
    let shape = vec![targets, coefficients.len() / targets];
    let weights = match Tensor::from_vec(shape, coefficients.to_vec()) {
        Ok(tensor) => cx.constant(tensor),
        Err(error) => return invalid(error.to_string()),
    };
    let matmul = MatMul { transpose_b: true, ..MatMul::default() };
    let y = cx.part(Op::MatMul(matmul), &[x, weights])?;
    if intercepts.is_empty() {
        return Ok(y);
    }
    if intercepts.len() != targets && intercepts.len() != 1 {
        return invalid(format!("{} intercepts for {targets} targets", intercepts.len()));
    }
    let bias = vector(cx, intercepts)?;
    cx.part(Op::Binary(Binary::Add), &[y, bias])
}

fn linear_regressor(cx: &mut Context) -> Mapped {
    let targets = cx.attributes.size_or("targets", 1)?;
    let transform = post_transform(cx)?;
    let y = linear(cx, targets)?;
    let y = transformed(cx, y, transform)?;
    cx.emit_identity(0, y)
}

fn linear_classifier(cx: &mut Context) -> Mapped {
    cx.attributes.ignore(&["multi_class"]);
    let transform = post_transform(cx)?;
    let (labels, count) = class_labels(cx, ["classlabels_ints", "classlabels_strings"])?;
    let targets = floats(cx, "intercepts").len();
    let targets = if targets == 0 { count } else { targets };
    let scores = linear(cx, targets)?;
    let rule = match targets {
        1 => ClassRule::Above { column: 0, threshold: 0.0 },
        _ => ClassRule::Largest,
    };
    let classify = Classify { transform, rule, second: SecondScore::Complement };
    classified(cx, classify, scores, labels)
}

/// The label of each row and its scores.
fn classified(cx: &mut Context, op: Classify, scores: ValueId, labels: ValueId) -> Mapped {
    cx.emit(Op::Ml(Ml::Classify(op)), vec![Some(scores), Some(labels)])
}
