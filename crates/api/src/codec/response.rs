//! Inference responses as JSON with binary tensors after it.

use std::io::Write;

use bytes::Bytes;
use half::{bf16, f16};
use model::{DataType, Tensor, TensorData};

use super::{OutputEncoding, strings};
use crate::error::{ApiError, ApiResult};
use crate::fallible::{out_of_memory, with_room};
use crate::infer::{InferResponse, NamedTensor};

/// Binary outputs up to this many bytes are copied behind the JSON, so that the response is one
/// buffer.
const INLINE_BYTES: usize = 64 * 1024;

/// The body of a response.
#[derive(Clone, Debug, PartialEq)]
pub struct EncodedResponse {
    /// Length of the JSON if binary tensors follow it.
    pub header_length: Option<usize>,
    /// The body, in parts that are sent one after the other.
    pub parts: Vec<Bytes>,
}

impl EncodedResponse {
    /// Bytes of all parts.
    pub fn len(&self) -> usize {
        self.parts.iter().map(Bytes::len).sum()
    }

    /// Whether the body is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The body in one buffer.
    pub fn into_bytes(mut self) -> Bytes {
        match self.parts.len() {
            1 => self.parts.remove(0),
            _ => self.parts.concat().into(),
        }
    }
}

/// Encodes `response`. Fails if text that is not UTF-8 is to be encoded as JSON, and when there is
/// not enough memory.
pub fn encode(response: &InferResponse, encoding: &OutputEncoding) -> ApiResult<EncodedResponse> {
    let mut json = Vec::with_capacity(256);
    let mut binary = Vec::new();
    write_head(&mut json, response);
    for (index, output) in response.outputs.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        write_output_head(&mut json, output);
        if encoding.is_binary(&output.name) {
            let bytes = tensor_bytes(&output.tensor)?;
            write_fmt(
                &mut json,
                format_args!(",\"parameters\":{{\"binary_data_size\":{}}}}}", bytes.len()),
            );
            binary.push(bytes);
        } else {
            json.try_reserve(text_bytes(&output.tensor)).map_err(out_of_memory)?;
            json.extend_from_slice(b",\"data\":[");
            write_data(&mut json, output)?;
            json.extend_from_slice(b"]}");
        }
    }
    json.extend_from_slice(b"]}");
    Ok(join(json, binary))
}

fn join(mut json: Vec<u8>, binary: Vec<Bytes>) -> EncodedResponse {
    if binary.is_empty() {
        return EncodedResponse { header_length: None, parts: vec![json.into()] };
    }
    let header_length = Some(json.len());
    if binary.iter().map(Bytes::len).sum::<usize>() <= INLINE_BYTES {
        binary.iter().for_each(|bytes| json.extend_from_slice(bytes));
        return EncodedResponse { header_length, parts: vec![json.into()] };
    }
    let mut parts = vec![Bytes::from(json)];
    parts.extend(binary);
    EncodedResponse { header_length, parts }
}

/// The encoded bytes of a tensor; shared unless it holds text.
///
/// # Errors
/// When there is not enough memory.
pub fn tensor_bytes(tensor: &Tensor) -> ApiResult<Bytes> {
    match tensor.data() {
        TensorData::Raw(raw) => Ok(raw.clone()),
        TensorData::Strings(elements) => {
            let mut bytes = with_room(strings::encoded_len(elements))?;
            strings::encode(elements, &mut bytes);
            Ok(bytes.into())
        }
    }
}

/// Bytes that [`tensor_bytes`] copies.
pub fn copied_bytes(tensor: &Tensor) -> usize {
    match tensor.data() {
        TensorData::Raw(_) => 0,
        TensorData::Strings(elements) => strings::encoded_len(elements),
    }
}

/// The most bytes that the JSON of a tensor takes.
pub fn text_bytes(tensor: &Tensor) -> usize {
    let each = match tensor.dtype() {
        DataType::Bool => 6,
        DataType::U8 | DataType::I8 => 5,
        DataType::U16 | DataType::I16 => 7,
        DataType::U32 | DataType::I32 => 12,
        DataType::U64 | DataType::I64 => 21,
        DataType::F16 | DataType::BF16 | DataType::F32 => 18,
        DataType::F64 => 26,
        // Quotes and a comma; every byte may need an escape of six.
        DataType::String => 3,
    };
    let escapes = if tensor.dtype() == DataType::String { 6 * tensor.size_bytes() } else { 0 };
    tensor.len().saturating_mul(each).saturating_add(escapes)
}

fn write_head(json: &mut Vec<u8>, response: &InferResponse) {
    json.push(b'{');
    if !response.id.is_empty() {
        json.extend_from_slice(b"\"id\":");
        write_json_string(json, &response.id);
        json.push(b',');
    }
    json.extend_from_slice(b"\"model_name\":");
    write_json_string(json, &response.model_name);
    json.extend_from_slice(b",\"model_version\":");
    write_json_string(json, &response.model_version);
    json.extend_from_slice(b",\"outputs\":[");
}

fn write_output_head(json: &mut Vec<u8>, output: &NamedTensor) {
    json.extend_from_slice(b"{\"name\":");
    write_json_string(json, &output.name);
    json.extend_from_slice(b",\"datatype\":\"");
    json.extend_from_slice(output.tensor.dtype().wire_name().as_bytes());
    json.extend_from_slice(b"\",\"shape\":[");
    write_joined(json, output.tensor.shape().iter(), |json, dim| {
        write_fmt(json, format_args!("{dim}"));
    });
    json.push(b']');
}

/// Writes `text` as a JSON string.
pub(crate) fn write_json_string(json: &mut Vec<u8>, text: &str) {
    // Writing text to memory cannot fail.
    let _ = serde_json::to_writer(json, text);
}

fn write_fmt(json: &mut Vec<u8>, arguments: std::fmt::Arguments<'_>) {
    // Writing to memory cannot fail.
    let _ = json.write_fmt(arguments);
}

fn write_joined<T>(
    json: &mut Vec<u8>,
    values: impl Iterator<Item = T>,
    mut write: impl FnMut(&mut Vec<u8>, T),
) {
    for (index, value) in values.enumerate() {
        if index > 0 {
            json.push(b',');
        }
        write(json, value);
    }
}

fn write_data(json: &mut Vec<u8>, output: &NamedTensor) -> ApiResult<()> {
    let raw = match output.tensor.data() {
        TensorData::Strings(elements) => return write_strings(json, output, elements),
        TensorData::Raw(raw) => raw,
    };
    match output.tensor.dtype() {
        DataType::Bool => write_joined(json, raw.iter(), |json, &value| {
            json.extend_from_slice(if value == 0 { b"false" } else { b"true" });
        }),
        DataType::U8 => numbers(json, raw, u8::from_le_bytes),
        DataType::U16 => numbers(json, raw, u16::from_le_bytes),
        DataType::U32 => numbers(json, raw, u32::from_le_bytes),
        DataType::U64 => numbers(json, raw, u64::from_le_bytes),
        DataType::I8 => numbers(json, raw, i8::from_le_bytes),
        DataType::I16 => numbers(json, raw, i16::from_le_bytes),
        DataType::I32 => numbers(json, raw, i32::from_le_bytes),
        DataType::I64 => numbers(json, raw, i64::from_le_bytes),
        DataType::F16 => numbers(json, raw, |bytes| f16::from_le_bytes(bytes).to_f32()),
        DataType::BF16 => numbers(json, raw, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        DataType::F32 => numbers(json, raw, f32::from_le_bytes),
        DataType::F64 => numbers(json, raw, f64::from_le_bytes),
        DataType::String => {}
    }
    Ok(())
}

/// Writes packed numbers. JSON has no infinities and NaNs: these become `null`.
fn numbers<const N: usize, T: serde::Serialize>(
    json: &mut Vec<u8>,
    raw: &[u8],
    read: impl Fn([u8; N]) -> T,
) {
    let (elements, _) = raw.as_chunks::<N>();
    write_joined(json, elements.iter(), |json, element| {
        let _ = serde_json::to_writer(json, &read(*element));
    });
}

fn write_strings(json: &mut Vec<u8>, output: &NamedTensor, elements: &[Bytes]) -> ApiResult<()> {
    for (index, element) in elements.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        let text = std::str::from_utf8(element).map_err(|_| {
            ApiError::invalid(format!(
                "output '{}' holds bytes that are not text; ask for it with binary_data",
                output.name
            ))
        })?;
        write_json_string(json, text);
    }
    Ok(())
}
