//! Quantised operators that ONNX Runtime adds: dequantised, computed and quantised again, or as
//! products of bytes.

use model::op::{Binary, Cast, Gemm, GlobalPool, MatMul, Op, RnnCell, Softmax, SoftmaxKind, Unary};
use model::{DataType, Tensor, ValueId};

use super::super::context::{Context, MapError, Mapped, invalid, unsupported};
use super::super::narrow::as_type;
use super::super::{recurrent, window};

pub(super) fn map(cx: &mut Context, op: &str) -> Mapped {
    match op {
        "DequantizeLinear" => {
            let axis = cx.attributes.int_or("axis", 1)?;
            cx.emit_all(Op::DequantizeLinear { axis }, 3)
        }
        "QuantizeLinear" => {
            let axis = cx.attributes.int_or("axis", 1)?;
            cx.emit_all(Op::QuantizeLinear { axis, dtype: DataType::U8 }, 3)
        }
        "QLinearAdd" => add(cx),
        "QLinearMul" => multiply(cx),
        "QLinearSigmoid" => unary(cx, Op::Unary(Unary::Sigmoid)),
        "QLinearLeakyRelu" => {
            let alpha = cx.attributes.float_or("alpha", 0.01)?;
            unary(cx, Op::Unary(Unary::LeakyRelu { alpha }))
        }
        "QLinearSoftmax" => {
            let axis = cx.attributes.int_or("axis", -1)?;
            let flatten = cx.attributes.int_or("opset", 13)? < 13;
            let softmax = Softmax { kind: SoftmaxKind::Softmax, axis, flatten };
            unary(cx, Op::Softmax(softmax))
        }
        "QLinearAveragePool" => {
            let channels_last = cx.attributes.flag("channels_last", false)?;
            let pool = window::average_pool(cx)?;
            pooled(cx, Op::Pool(pool), channels_last)
        }
        "QLinearGlobalAveragePool" => {
            let channels_last = cx.attributes.flag("channels_last", false)?;
            pooled(cx, Op::GlobalPool(GlobalPool::Average), channels_last)
        }
        "QLinearConcat" => concat(cx),
        "QGemm" => gemm(cx),
        "DynamicQuantizeMatMul" => dynamic_matmul(cx),
        "MatMulIntegerToFloat" => integer_to_float(cx),
        "MatMulNBits" => few_bits(cx),
        "DynamicQuantizeLSTM" => lstm(cx),
        _ => Ok(false),
    }
}

/// Bytes as numbers: operands `at`, scale and zero point behind it.
fn real(cx: &mut Context, x: ValueId, at: usize) -> Result<ValueId, MapError> {
    let mut inputs = vec![Some(x), Some(cx.input(at)?)];
    inputs.extend(cx.optional(at + 1).map(Some));
    Ok(cx.parts(Op::DequantizeLinear { axis: 1 }, inputs, 1)?[0])
}

/// Makes numbers the node's result, with scale and zero point at operand `at`.
fn quantized(cx: &mut Context, y: ValueId, at: usize, dtype: DataType) -> Mapped {
    let inputs = vec![Some(y), Some(cx.input(at)?), cx.optional(at + 1)];
    cx.emit(Op::QuantizeLinear { axis: 1, dtype }, inputs)
}

fn unary(cx: &mut Context, op: Op) -> Mapped {
    cx.at_most(5)?;
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let number = real(cx, x, 1)?;
    let y = cx.part(op, &[number])?;
    quantized(cx, y, 3, dtype)
}

/// A sum in steps of the result, as ONNX Runtime adds. Sums of numbers that are divided afterwards
/// round differently, which shows where the scales of an operand and of the result are equal: then
/// every sum may lie between two steps.
fn add(cx: &mut Context) -> Mapped {
    cx.at_most(8)?;
    let (a, b, scale) = (cx.input(0)?, cx.input(3)?, cx.input(6)?);
    let dtype = cx.dtype(a);
    let (a, b) = (in_steps(cx, a, 1, scale)?, in_steps(cx, b, 4, scale)?);
    let y = cx.part(Op::Binary(Binary::Add), &[a, b])?;
    let one = cx.part(Op::Binary(Binary::Div), &[scale, scale])?;
    let inputs = vec![Some(y), Some(one), cx.optional(7)];
    cx.emit(Op::QuantizeLinear { axis: 1, dtype }, inputs)
}

/// Bytes as multiples of `scale`: operands `at`, scale and zero point behind it.
fn in_steps(cx: &mut Context, x: ValueId, at: usize, scale: ValueId) -> Result<ValueId, MapError> {
    let own = cx.input(at)?;
    let ratio = cx.part(Op::Binary(Binary::Div), &[own, scale])?;
    let mut inputs = vec![Some(x), Some(ratio)];
    inputs.extend(cx.optional(at + 1).map(Some));
    Ok(cx.parts(Op::DequantizeLinear { axis: 1 }, inputs, 1)?[0])
}

fn multiply(cx: &mut Context) -> Mapped {
    cx.at_most(8)?;
    let (a, b) = (cx.input(0)?, cx.input(3)?);
    let dtype = cx.dtype(a);
    let (a, b) = (real(cx, a, 1)?, real(cx, b, 4)?);
    let y = cx.part(Op::Binary(Binary::Mul), &[a, b])?;
    quantized(cx, y, 6, dtype)
}

fn pooled(cx: &mut Context, op: Op, channels_last: bool) -> Mapped {
    cx.at_most(5)?;
    let x = cx.input(0)?;
    let (dtype, rank) = (cx.dtype(x), cx.rank(x)?);
    let mut number = real(cx, x, 1)?;
    let to_first: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
    let to_last: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
    if channels_last {
        number = cx.part(Op::Transpose { perm: Some(to_first) }, &[number])?;
    }
    let mut y = cx.part(op, &[number])?;
    if channels_last {
        y = cx.part(Op::Transpose { perm: Some(to_last) }, &[y])?;
    }
    quantized(cx, y, 3, dtype)
}

fn concat(cx: &mut Context) -> Mapped {
    let Some(axis) = cx.attributes.int("axis")? else { return invalid("no axis") };
    let count = cx.inputs.len().saturating_sub(2) / 3;
    if cx.inputs.len() != 2 + 3 * count || count == 0 {
        return invalid(format!("{} operands", cx.inputs.len()));
    }
    let mut parts = Vec::with_capacity(count);
    let dtype = cx.dtype(cx.input(2)?);
    for index in 0..count {
        let x = cx.input(2 + 3 * index)?;
        parts.push(real(cx, x, 3 + 3 * index)?);
    }
    let y = match parts[..] {
        [only] => only,
        _ => cx.part(Op::Concat { axis }, &parts)?,
    };
    quantized(cx, y, 0, dtype)
}

/// `a @ b`, with scales and zero points, a bias in the scale of the product, and a result of bytes
/// or numbers.
fn gemm(cx: &mut Context) -> Mapped {
    cx.at_most(9)?;
    let transpose_a = cx.attributes.flag("transA", false)?;
    let transpose_b = cx.attributes.flag("transB", false)?;
    let alpha = cx.attributes.float_or("alpha", 1.0)?;
    let (a, b) = (cx.input(0)?, cx.input(3)?);
    let dtype = cx.dtype(a);
    let number_a = real(cx, a, 1)?;
    // A scale for each column of the product is one for each row of a transposed matrix.
    let axis = if transpose_b { 0 } else { 1 };
    let mut inputs = vec![Some(b), Some(cx.input(4)?)];
    inputs.extend(cx.optional(5).map(Some));
    let number_b = cx.parts(Op::DequantizeLinear { axis }, inputs, 1)?[0];
    let activation = model::op::Activation::None;
    let op = Gemm { transpose_a, transpose_b, alpha, beta: 1.0, activation };
    let mut y = cx.part(Op::Gemm(op), &[number_a, number_b])?;
    if let Some(bias) = cx.optional(6) {
        let (scale_a, scale_b) = (cx.input(1)?, cx.input(4)?);
        let scale = cx.part(Op::Binary(Binary::Mul), &[scale_a, scale_b])?;
        let factor = cx.scalar(DataType::F32, f64::from(alpha))?;
        let scale = cx.part(Op::Binary(Binary::Mul), &[scale, factor])?;
        let bias = as_type(cx, bias, DataType::F32)?;
        let bias = cx.part(Op::Binary(Binary::Mul), &[bias, scale])?;
        y = cx.part(Op::Binary(Binary::Add), &[y, bias])?;
    }
    match cx.has(7) {
        true => quantized(cx, y, 7, dtype),
        false => cx.emit_identity(0, y),
    }
}

/// The product of bytes as numbers: times both scales, plus a bias.
fn scaled(
    cx: &mut Context,
    operands: Vec<Option<ValueId>>,
    [scale_a, scale_b]: [ValueId; 2],
    bias: Option<ValueId>,
) -> Mapped {
    let sums = cx.parts(Op::MatMulInteger, operands, 1)?[0];
    let sums = cx.part(Op::Cast(Cast { to: DataType::F32 }), &[sums])?;
    let scale = cx.part(Op::Binary(Binary::Mul), &[scale_a, scale_b])?;
    let mut y = cx.part(Op::Binary(Binary::Mul), &[sums, scale])?;
    if let Some(bias) = bias {
        y = cx.part(Op::Binary(Binary::Add), &[y, bias])?;
    }
    cx.emit_identity(0, y)
}

fn dynamic_matmul(cx: &mut Context) -> Mapped {
    cx.at_most(5)?;
    let (a, b, scale_b) = (cx.input(0)?, cx.input(1)?, cx.input(2)?);
    let parts = cx.parts(Op::DynamicQuantizeLinear, vec![Some(a)], 3)?;
    let operands = vec![Some(parts[0]), Some(b), Some(parts[2]), cx.optional(3)];
    let bias = cx.optional(4);
    scaled(cx, operands, [parts[1], scale_b], bias)
}

fn integer_to_float(cx: &mut Context) -> Mapped {
    cx.at_most(7)?;
    let operands = vec![Some(cx.input(0)?), Some(cx.input(1)?), cx.optional(4), cx.optional(5)];
    let (scales, bias) = ([cx.input(2)?, cx.input(3)?], cx.optional(6));
    scaled(cx, operands, scales, bias)
}

/// `a @ b^T` with the rows of `b` in blocks of a few bits.
fn few_bits(cx: &mut Context) -> Mapped {
    cx.at_most(6)?;
    cx.attributes.ignore(&["accuracy_level"]);
    let size = |name: &str| cx.attributes.size_or(name, 0);
    let (inner, rows, block) = (size("K")?, size("N")?, size("block_size")?);
    let bits = cx.attributes.size_or("bits", 4)?;
    if cx.has(4) {
        return unsupported("an order of groups");
    }
    if !matches!(bits, 2 | 4 | 8) || inner == 0 || rows == 0 || block == 0 {
        return unsupported(format!("{rows} rows of {inner} in blocks of {block} at {bits} bits"));
    }
    let x = cx.input(0)?;
    let dtype = cx.dtype(x);
    let blocks = inner.div_ceil(block);
    let packed = constant_bytes(cx, 1)?;
    let bytes = unpacked(&packed, bits);
    if bytes.len() != rows * blocks * block {
        return invalid(format!("{} elements instead of {rows} x {blocks} x {block}", bytes.len()));
    }
    let middle = 1u8 << (bits - 1);
    let zeros = match cx.optional(3) {
        None => vec![middle; rows * blocks],
        Some(id) if cx.dtype(id) != DataType::U8 => return unsupported("zero points of numbers"),
        Some(_) => {
            let packed = constant_bytes(cx, 3)?;
            let per_row = packed.len() / rows.max(1);
            let row = |at: usize| unpacked(&packed[at * per_row..][..per_row], bits);
            (0..rows).flat_map(|at| row(at).into_iter().take(blocks)).collect()
        }
    };
    if zeros.len() != rows * blocks {
        return invalid("zero points of another number of blocks");
    }
    let shape = vec![rows * blocks, block];
    let (Ok(bytes), Ok(zeros)) =
        (Tensor::from_vec(shape, bytes), Tensor::from_vec(vec![rows * blocks], zeros))
    else {
        return invalid("too many elements");
    };
    let (bytes, zeros) = (cx.constant(bytes), cx.constant(zeros));
    let flat = cx.ints(&[-1])?;
    let scales = cx.input(2)?;
    let scales = cx.part(Op::Reshape { allow_zero: false }, &[scales, flat])?;
    let weights = cx.part(Op::DequantizeLinear { axis: 0 }, &[bytes, scales, zeros])?;
    let target = cx.ints(&[rows as i64, (blocks * block) as i64])?;
    let mut weights = cx.part(Op::Reshape { allow_zero: false }, &[weights, target])?;
    if blocks * block != inner {
        let (start, end, axis) = (cx.ints(&[0])?, cx.ints(&[inner as i64])?, cx.ints(&[1])?);
        weights = cx.part(Op::Slice, &[weights, start, end, axis])?;
    }
    let weights = as_type(cx, weights, dtype)?;
    let matmul = MatMul { transpose_b: true, ..MatMul::default() };
    let y = cx.part(Op::MatMul(matmul), &[x, weights])?;
    let y = match cx.optional(5) {
        Some(bias) => cx.part(Op::Binary(Binary::Add), &[y, bias])?,
        None => y,
    };
    cx.emit_identity(0, y)
}

/// The bytes of a constant operand.
fn constant_bytes(cx: &Context, index: usize) -> Result<Vec<u8>, MapError> {
    let tensor = cx.graph.constant(cx.input(index)?);
    match tensor.and_then(|tensor| tensor.raw()) {
        Some(raw) => Ok(raw.to_vec()),
        None => unsupported(format!("operand {index} is not a constant")),
    }
}

/// Elements of a few bits, the first in the low bits of a byte.
fn unpacked(packed: &[u8], bits: usize) -> Vec<u8> {
    let per_byte = 8 / bits;
    let mask = ((1u16 << bits) - 1) as u8;
    packed
        .iter()
        .flat_map(|byte| (0..per_byte).map(move |at| (byte >> (at * bits)) & mask))
        .collect()
}

/// A recurrent layer with weights of bytes, which are dequantised once. ONNX Runtime quantises the
/// other side of each product too, so that its results are less exact.
fn lstm(cx: &mut Context) -> Mapped {
    cx.at_most(12)?;
    let input_forget = cx.attributes.flag("input_forget", false)?;
    let rnn = recurrent::rnn_of(cx, RnnCell::Lstm { input_forget }, 1)?;
    let mut inputs = cx.inputs.clone();
    inputs.resize(12, None);
    // Weights are stored transposed: directions, inputs, gates.
    for (at, scale, zero) in [(1, 8, 9), (2, 10, 11)] {
        let (bytes, scale) = (cx.input(at)?, cx.input(scale)?);
        let zero = cx.optional(zero);
        let number = dequantized_gates(cx, bytes, scale, zero)?;
        let perm = Some(vec![0, 2, 1]);
        inputs[at] = Some(cx.part(Op::Transpose { perm }, &[number])?);
    }
    inputs.truncate(8);
    cx.emit(Op::Rnn(rnn), inputs)
}

/// `(x - zero) * scale`, with one scale for each direction or one for each of its gates.
fn dequantized_gates(
    cx: &mut Context,
    bytes: ValueId,
    scale: ValueId,
    zero: Option<ValueId>,
) -> Result<ValueId, MapError> {
    let wide = |cx: &mut Context, x: ValueId| -> Result<ValueId, MapError> {
        match cx.rank(x)? {
            0 => Ok(x),
            1 => {
                let target = cx.ints(&[-1, 1, 1])?;
                cx.part(Op::Reshape { allow_zero: false }, &[x, target])
            }
            2 => {
                let axis = cx.ints(&[1])?;
                cx.part(Op::Unsqueeze, &[x, axis])
            }
            rank => invalid(format!("scales of rank {rank}")),
        }
    };
    let mut number = as_type(cx, bytes, DataType::F32)?;
    if let Some(zero) = zero {
        let zero = as_type(cx, zero, DataType::F32)?;
        let zero = wide(cx, zero)?;
        number = cx.part(Op::Binary(Binary::Sub), &[number, zero])?;
    }
    let scale = wide(cx, scale)?;
    cx.part(Op::Binary(Binary::Mul), &[number, scale])
}
