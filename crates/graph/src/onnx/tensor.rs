//! Decodes tensors.

use std::fmt::Display;

use bytes::Bytes;
use half::f16;
use model::tensor::element_count;
use model::{DataType, NarrowType, Tensor, TensorError};

use super::ImportError;
use super::external::ExternalData;
use super::proto::{Message, TensorProto};

/// The type with this number in ONNX; `None` for unsupported types.
pub(crate) fn data_type(number: i64) -> Option<DataType> {
    Some(match number {
        1 => DataType::F32,
        2 => DataType::U8,
        3 => DataType::I8,
        4 => DataType::U16,
        5 => DataType::I16,
        6 => DataType::I32,
        7 => DataType::I64,
        8 => DataType::String,
        9 => DataType::Bool,
        10 => DataType::F16,
        11 => DataType::F64,
        12 => DataType::U32,
        13 => DataType::U64,
        16 => DataType::BF16,
        _ => return None,
    })
}

/// The narrow type with this number in ONNX.
pub(crate) fn narrow_type(number: i64) -> Option<NarrowType> {
    Some(match number {
        17 => NarrowType::F8E4M3Fn,
        18 => NarrowType::F8E4M3FnUz,
        19 => NarrowType::F8E5M2,
        20 => NarrowType::F8E5M2FnUz,
        21 => NarrowType::U4,
        22 => NarrowType::I4,
        23 => NarrowType::F4E2M1,
        24 => NarrowType::F8E8M0,
        25 => NarrowType::U2,
        26 => NarrowType::I2,
        _ => return None,
    })
}

/// The type in which elements with this number are held, and what its bytes are.
pub(crate) fn held_type(number: i64) -> Option<(DataType, Option<NarrowType>)> {
    match narrow_type(number) {
        Some(narrow) => Some((narrow.storage(), Some(narrow))),
        None => data_type(number).map(|dtype| (dtype, None)),
    }
}

/// ONNX's name of a type number, for messages.
pub(crate) fn data_type_name(number: i64) -> String {
    match held_type(number) {
        Some((_, Some(narrow))) => narrow.name().to_string(),
        Some((dtype, None)) => dtype.to_string(),
        None => match number {
            0 => "no type".to_string(),
            14 => "COMPLEX64".to_string(),
            15 => "COMPLEX128".to_string(),
            other => format!("type {other}"),
        },
    }
}

/// The tensor in a serialized `TensorProto` with its name, as ONNX test data holds it.
pub fn parse_tensor_proto(bytes: &[u8]) -> Result<(String, Tensor), ImportError> {
    let proto = TensorProto::decode(Bytes::copy_from_slice(bytes)).map_err(ImportError::Format)?;
    let tensor = to_tensor(&proto, &ExternalData::none())?;
    Ok((proto.name, tensor))
}

pub(crate) fn to_tensor(
    proto: &TensorProto,
    external: &ExternalData,
) -> Result<Tensor, ImportError> {
    build(proto, external)
        .map_err(|reason| ImportError::Tensor { name: proto.name.clone(), reason })
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn build(proto: &TensorProto, external: &ExternalData) -> Result<Tensor, String> {
    let (dtype, narrow) = held_type(proto.data_type)
        .ok_or_else(|| format!("{} is not supported", data_type_name(proto.data_type)))?;
    let shape: Vec<usize> = proto
        .dims
        .iter()
        .map(|dim| usize::try_from(*dim).map_err(|_| format!("negative dimension {dim}")))
        .collect::<Result<_, _>>()?;
    let count = element_count(&shape).map_err(text)?;
    if proto.is_segment {
        return Err("segmented tensors are not supported".to_string());
    }
    if let Some(narrow) = narrow {
        return unpacked(proto, external, narrow, shape, count);
    }
    let Some(size) = dtype.size_bytes() else {
        if proto.is_external || proto.raw.is_some() {
            return Err("strings must stand in string_data".to_string());
        }
        return Tensor::from_strings(shape, proto.strings.clone()).map_err(text);
    };
    let expected = count
        .checked_mul(size)
        .ok_or_else(|| text(TensorError::TooLarge { shape: shape.clone() }))?;
    if proto.is_external {
        let raw = external.read(&proto.external, expected)?;
        return finish(dtype, shape, raw);
    }
    match &proto.raw {
        Some(raw) => finish(dtype, shape, raw.clone()),
        None => typed(proto, dtype, shape, count),
    }
}

/// The bytes of a narrow type: in a file several elements share a byte, the first in its low bits.
fn unpacked(
    proto: &TensorProto,
    external: &ExternalData,
    narrow: NarrowType,
    shape: Vec<usize>,
    count: usize,
) -> Result<Tensor, String> {
    let per_byte = 8 / narrow.bits();
    let expected = count.div_ceil(per_byte);
    let packed: Bytes = match &proto.raw {
        _ if proto.is_external => external.read(&proto.external, expected)?,
        Some(raw) => raw.clone(),
        None => proto.ints.iter().map(|byte| *byte as u8).collect::<Vec<u8>>().into(),
    };
    if packed.len() != expected {
        return Err(format!("{count} elements need {expected} bytes, got {}", packed.len()));
    }
    if per_byte == 1 {
        return Tensor::from_raw(narrow.storage(), shape, packed).map_err(text);
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(count).map_err(text)?;
    let element = |index: usize| {
        let shift = index % per_byte * narrow.bits();
        narrow.low_bits(i64::from(packed[index / per_byte] >> shift))
    };
    bytes.extend((0..count).map(element));
    Tensor::from_raw(narrow.storage(), shape, bytes.into()).map_err(text)
}

fn finish(dtype: DataType, shape: Vec<usize>, mut raw: Bytes) -> Result<Tensor, String> {
    if dtype == DataType::Bool && raw.iter().any(|byte| *byte > 1) {
        raw = raw.iter().map(|byte| u8::from(*byte != 0)).collect::<Vec<u8>>().into();
    }
    Tensor::from_raw(dtype, shape, raw).map_err(text)
}

/// From the typed fields. `int32_data` holds everything of up to 32 bits, halves as their bits.
fn typed(
    proto: &TensorProto,
    dtype: DataType,
    shape: Vec<usize>,
    count: usize,
) -> Result<Tensor, String> {
    fn converted<T: model::tensor::Element, S: Copy>(
        shape: Vec<usize>,
        values: &[S],
        convert: impl Fn(S) -> T,
    ) -> Result<Tensor, String> {
        Tensor::from_vec(shape, values.iter().map(|value| convert(*value)).collect()).map_err(text)
    }
    let present = match dtype {
        DataType::F32 => proto.floats.len(),
        DataType::F64 => proto.doubles.len(),
        DataType::I64 => proto.longs.len(),
        DataType::U32 | DataType::U64 => proto.unsigneds.len(),
        _ => proto.ints.len(),
    };
    if present != count {
        return Err(format!("shape {shape:?} needs {count} elements, got {present}"));
    }
    match dtype {
        DataType::F32 => converted(shape, &proto.floats, |x| x),
        DataType::F64 => converted(shape, &proto.doubles, |x| x),
        DataType::I64 => converted(shape, &proto.longs, |x| x),
        DataType::U64 => converted(shape, &proto.unsigneds, |x| x as u64),
        DataType::U32 => converted(shape, &proto.unsigneds, |x| x as u32),
        DataType::I32 => converted(shape, &proto.ints, |x| x as i32),
        DataType::I16 => converted(shape, &proto.ints, |x| x as i16),
        DataType::I8 => converted(shape, &proto.ints, |x| x as i8),
        DataType::U16 => converted(shape, &proto.ints, |x| x as u16),
        DataType::U8 => converted(shape, &proto.ints, |x| x as u8),
        DataType::F16 => converted(shape, &proto.ints, |x| f16::from_bits(x as u16)),
        DataType::BF16 => converted(shape, &proto.ints, |x| half::bf16::from_bits(x as u16)),
        DataType::Bool => {
            let raw: Vec<u8> = proto.ints.iter().map(|x| u8::from(*x != 0)).collect();
            Tensor::from_raw(dtype, shape, raw.into()).map_err(text)
        }
        DataType::String => Err("strings have no numeric data".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `TensorProto` fields by hand: tag, payload.
    fn proto(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    #[test]
    fn strings_and_unsigned_fields_are_read() {
        let strings = proto(&[&[0x08, 2], &[0x10, 8], &[0x32, 2, b'h', b'i'], &[0x32, 0]]);
        let (_, tensor) = parse_tensor_proto(&strings).unwrap();
        assert_eq!(tensor.shape(), &[2]);
        assert!(matches!(tensor.data(), model::TensorData::Strings(s) if s[0] == "hi"));
        let unsigned = proto(&[&[0x08, 2], &[0x10, 13], &[0x5a, 2, 7, 9], &[0x42, 1, b'u']]);
        let (name, tensor) = parse_tensor_proto(&unsigned).unwrap();
        assert_eq!((name.as_str(), tensor.to_vec::<u64>()), ("u", Some(vec![7, 9])));
    }

    #[test]
    fn lengths_are_compared_with_the_data() {
        // [2^31] floats, four bytes of data.
        let huge =
            proto(&[&[0x08, 0x80, 0x80, 0x80, 0x80, 0x08], &[0x10, 1], &[0x4a, 4, 0, 0, 0, 0]]);
        assert!(matches!(parse_tensor_proto(&huge), Err(ImportError::Tensor { .. })));
        let negative = proto(&[
            &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
            &[0x10, 1],
        ]);
        let error = parse_tensor_proto(&negative).unwrap_err().to_string();
        assert!(error.contains("negative dimension -1"), "{error}");
    }

    #[test]
    fn unsupported_types_are_named() {
        let error = parse_tensor_proto(&[0x10, 14]).unwrap_err().to_string();
        assert!(error.contains("COMPLEX64 is not supported"), "{error}");
    }

    #[test]
    fn elements_that_share_a_byte_are_unpacked() {
        let signed = proto(&[&[0x08, 3], &[0x10, 22], &[0x4a, 2, 0x7f, 0x08]]);
        let (_, tensor) = parse_tensor_proto(&signed).unwrap();
        assert_eq!(tensor.to_vec::<i8>(), Some(vec![-1, 7, -8]));
        let pairs = proto(&[&[0x08, 5], &[0x10, 25], &[0x4a, 2, 0b1110_0100, 2]]);
        assert_eq!(parse_tensor_proto(&pairs).unwrap().1.to_vec::<u8>(), Some(vec![0, 1, 2, 3, 2]));
        let short = proto(&[&[0x08, 5], &[0x10, 25], &[0x4a, 1, 0]]);
        assert!(parse_tensor_proto(&short).is_err());
    }
}
