//! Requests and responses of the REST protocol: JSON, and tensors as raw bytes after the JSON.
//!
//! Every length that a client states is checked against the received bytes before memory is
//! allocated, and the bytes of binary tensors are shared with the body, not copied.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use model::excerpt::{excerpt, one_line};
use model::{DataType, Tensor, tensor};
use serde::Deserialize;

use crate::error::{ApiError, ApiResult};
use crate::fallible::{OUT_OF_MEMORY, with_room};
use crate::infer::{InferOptions, InferRequest, Inputs, NamedTensor, RequestedOutput};
use crate::parameters::{Parameters, infer_options};

pub mod json_data;
pub mod response;
pub mod strings;

use json_data::JsonData;
pub use response::{EncodedResponse, encode};

/// Header with the length of the JSON before binary tensors.
pub const HEADER_LENGTH: &str = "inference-header-content-length";
/// Maximum number of inputs, and of outputs, of a request.
pub const MAX_TENSORS: usize = 1024;
/// Maximum length of a tensor's name.
pub const MAX_NAME: usize = 1024;
/// Maximum number of dimensions, and of nesting of JSON data.
pub const MAX_RANK: usize = 32;
/// Maximum length of a request's id.
pub const MAX_ID: usize = 1024;

/// Maximum length of what is said about invalid JSON.
const MAX_JSON_ERROR: usize = 500;

/// Which outputs are encoded as binary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputEncoding {
    /// Default for outputs that are not listed.
    pub binary: bool,
    /// Outputs by name.
    pub exceptions: Vec<(String, bool)>,
}

impl OutputEncoding {
    /// Whether the output `name` is encoded as binary.
    pub fn is_binary(&self, name: &str) -> bool {
        let exception = self.exceptions.iter().find(|(output, _)| output == name);
        exception.map_or(self.binary, |(_, binary)| *binary)
    }
}

/// A request and the encoding of its response.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded {
    /// The request.
    pub request: InferRequest,
    /// Encoding of the response.
    pub encoding: OutputEncoding,
}

#[derive(Deserialize)]
struct JsonRequest<'a> {
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(borrow)]
    inputs: Vec<JsonInput<'a>>,
    #[serde(default)]
    outputs: Option<Vec<JsonOutput>>,
}

#[derive(Deserialize)]
struct JsonInput<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    shape: Vec<i64>,
    #[serde(borrow)]
    datatype: Cow<'a, str>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(default)]
    data: Option<JsonData>,
}

#[derive(Deserialize)]
struct JsonOutput {
    name: String,
    #[serde(default)]
    parameters: Parameters,
}

/// Decodes an inference request. `header_length` is the value of [`HEADER_LENGTH`]: if absent, the
/// body is all JSON; if 0, the body is the raw data of the model's only input.
pub fn decode(body: Bytes, header_length: Option<usize>) -> ApiResult<Decoded> {
    let split = match header_length {
        Some(0) => return Ok(raw_request(body)),
        Some(length) if length > body.len() => {
            return Err(ApiError::invalid(format!(
                "{HEADER_LENGTH} is {length}, but the body has {} bytes",
                body.len()
            )));
        }
        Some(length) => length,
        None => body.len(),
    };
    let json: JsonRequest<'_> = serde_json::from_slice(&body[..split]).map_err(json_error)?;
    check_counts(&json)?;
    let options = infer_options(&json.parameters)?;
    let mut rest = BinarySection { bytes: body.slice(split..), taken: 0 };
    let mut inputs = with_room(json.inputs.len())?;
    for input in json.inputs {
        inputs.push(read_input(input, &mut rest)?);
    }
    rest.check_empty()?;
    let (outputs, encoding) = read_outputs(json.outputs.unwrap_or_default(), &options)?;
    let id = json.id.unwrap_or_default();
    let request = InferRequest { id, options, inputs: Inputs::Named(inputs), outputs };
    Ok(Decoded { request, encoding })
}

fn json_error(error: serde_json::Error) -> ApiError {
    let text = error.to_string();
    match text.starts_with(OUT_OF_MEMORY) {
        true => ApiError::unavailable(OUT_OF_MEMORY).retry_after(1),
        // The text may quote a value of any length.
        false => {
            let text = one_line(&text, MAX_JSON_ERROR);
            ApiError::invalid(format!("the request is not valid JSON: {text}"))
        }
    }
}

/// Decodes a request from one byte string: the header length as 4 little-endian bytes (all ones for
/// none), then the body. For fuzzing.
pub fn decode_binary_request(data: &[u8]) -> ApiResult<Decoded> {
    let Some((length, body)) = data.split_first_chunk::<4>() else {
        return Err(ApiError::invalid("no header length"));
    };
    let length = u32::from_le_bytes(*length);
    let length = (length != u32::MAX).then_some(length as usize);
    decode(Bytes::copy_from_slice(body), length)
}

fn raw_request(body: Bytes) -> Decoded {
    Decoded {
        request: InferRequest {
            id: String::new(),
            options: InferOptions { binary_output: true, ..InferOptions::default() },
            inputs: Inputs::Raw(body),
            outputs: Vec::new(),
        },
        encoding: OutputEncoding { binary: true, exceptions: Vec::new() },
    }
}

fn check_counts(json: &JsonRequest<'_>) -> ApiResult<()> {
    let outputs = json.outputs.as_ref().map_or(0, Vec::len);
    if json.inputs.len() > MAX_TENSORS || outputs > MAX_TENSORS {
        return Err(ApiError::invalid(format!("more than {MAX_TENSORS} inputs or outputs")));
    }
    if json.id.as_ref().is_some_and(|id| id.len() > MAX_ID) {
        return Err(ApiError::invalid(format!("the id is longer than {MAX_ID} bytes")));
    }
    Ok(())
}

/// The bytes after the JSON, consumed tensor by tensor.
struct BinarySection {
    bytes: Bytes,
    taken: usize,
}

impl BinarySection {
    fn take(&mut self, name: &str, size: u64) -> ApiResult<Bytes> {
        let left = self.bytes.len() - self.taken;
        match usize::try_from(size).ok().filter(|&size| size <= left) {
            Some(size) => {
                let start = self.taken;
                self.taken += size;
                Ok(self.bytes.slice(start..start + size))
            }
            None => Err(ApiError::invalid(format!(
                "input '{name}' claims {size} bytes of binary data, {left} are left in the body; \
                 is {HEADER_LENGTH} the length of the JSON?"
            ))),
        }
    }

    fn check_empty(&self) -> ApiResult<()> {
        match self.bytes.len() - self.taken {
            0 => Ok(()),
            left => Err(ApiError::invalid(format!("{left} bytes follow the last binary tensor"))),
        }
    }
}

fn read_input(input: JsonInput<'_>, rest: &mut BinarySection) -> ApiResult<NamedTensor> {
    let name = input.name;
    check_name(&name)?;
    let dtype = parse_dtype(&name, &input.datatype)?;
    let shape = parse_shape(&name, &input.shape)?;
    let size = input.parameters.unsigned("binary_data_size").map_err(|e| in_input(&name, e))?;
    let tensor = match (size, input.data) {
        (Some(size), None) => {
            let bytes = rest.take(&name, size)?;
            tensor_from_bytes(dtype, shape, bytes)
        }
        (None, Some(data)) => data.into_tensor(dtype, shape),
        (Some(_), Some(_)) => Err(ApiError::invalid("has both 'data' and 'binary_data_size'")),
        (None, None) => Err(missing_data(&input.parameters)),
    };
    Ok(NamedTensor { tensor: tensor.map_err(|e| in_input(&name, e))?, name: Arc::from(&*name) })
}

fn missing_data(parameters: &Parameters) -> ApiError {
    if parameters.get("shared_memory_region").is_some() {
        return ApiError::unsupported("shared memory is not supported; send the data in the body");
    }
    ApiError::invalid("has neither 'data' nor 'binary_data_size'")
}

pub(crate) fn check_name(name: &str) -> ApiResult<()> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(ApiError::invalid(format!("tensor names have 1 to {MAX_NAME} bytes")));
    }
    Ok(())
}

/// The element type named `datatype` in the protocol.
pub(crate) fn parse_dtype(name: &str, datatype: &str) -> ApiResult<DataType> {
    DataType::from_wire_name(datatype).ok_or_else(|| {
        let known = DataType::ALL.map(DataType::wire_name).join(", ");
        let datatype = excerpt(datatype);
        ApiError::invalid(format!(
            "input '{name}' has the unknown datatype '{datatype}'; known are {known}"
        ))
    })
}

/// Checks a shape and the number of its elements.
pub(crate) fn parse_shape(name: &str, shape: &[i64]) -> ApiResult<Vec<usize>> {
    if shape.len() > MAX_RANK {
        return Err(ApiError::invalid(format!(
            "input '{name}' has {} dimensions, at most {MAX_RANK} are possible",
            shape.len()
        )));
    }
    let dims = shape.iter().map(|&dim| usize::try_from(dim)).collect::<Result<Vec<_>, _>>();
    let dims = dims.map_err(|_| {
        ApiError::invalid(format!(
            "input '{name}' has the shape {shape:?}; no dimension may be negative"
        ))
    })?;
    tensor::element_count(&dims).map_err(|e| in_input(name, e.into()))?;
    Ok(dims)
}

/// Decodes a tensor.
pub(crate) fn tensor_from_bytes(
    dtype: DataType,
    shape: Vec<usize>,
    bytes: Bytes,
) -> ApiResult<Tensor> {
    if dtype != DataType::String {
        return Ok(Tensor::from_raw(dtype, shape, bytes)?);
    }
    let count = tensor::element_count(&shape)?;
    let strings = strings::decode(bytes, count)?;
    Ok(Tensor::from_strings(shape, strings)?)
}

/// Adds the name of the input to an error.
pub(crate) fn in_input(name: &str, error: ApiError) -> ApiError {
    ApiError { message: format!("input '{name}': {}", error.message).into(), ..error }
}

fn read_outputs(
    outputs: Vec<JsonOutput>,
    options: &InferOptions,
) -> ApiResult<(Vec<RequestedOutput>, OutputEncoding)> {
    let mut encoding = OutputEncoding { binary: options.binary_output, exceptions: Vec::new() };
    let mut requested = Vec::with_capacity(outputs.len());
    for output in outputs {
        check_name(&output.name)?;
        let classes = output_classes(&output.parameters)?;
        if let Some(binary) = output.parameters.bool("binary_data")?
            && binary != encoding.binary
        {
            encoding.exceptions.push((output.name.clone(), binary));
        }
        requested.push(RequestedOutput { name: output.name, classes });
    }
    Ok((requested, encoding))
}

/// Number of classes of a requested output.
pub(crate) fn output_classes(parameters: &Parameters) -> ApiResult<usize> {
    if parameters.get("shared_memory_region").is_some() {
        return Err(ApiError::unsupported("shared memory is not supported"));
    }
    let classes = parameters.unsigned("classification")?.unwrap_or(0);
    usize::try_from(classes).map_err(|_| ApiError::invalid("'classification' is too large"))
}

#[cfg(test)]
mod tests;
