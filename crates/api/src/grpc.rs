//! Conversion between protobuf messages and the service's types.

use std::sync::Arc;

use bytes::Bytes;
use half::{bf16, f16};
use model::{DataType, Tensor};

use crate::codec::response::tensor_bytes;
use crate::codec::{
    MAX_ID, MAX_TENSORS, check_name, in_input, output_classes, parse_dtype, parse_shape,
    tensor_from_bytes,
};
use crate::error::{ApiError, ApiResult};
use crate::fallible::converted;
use crate::infer::{InferRequest, InferResponse, Inputs, NamedTensor, RequestedOutput};
use crate::metadata::{
    BatchStats, DurationStat, IndexEntry, InferenceStats, ModelMetadata, ModelStatistics,
    ServerMetadata, TensorMetadata,
};
use crate::parameters::{MAX_PARAMETERS, ParameterValue, Parameters, infer_options};
use crate::proto;
use proto::infer_parameter::ParameterChoice;
use proto::model_infer_request::InferInputTensor;
use proto::model_infer_response::InferOutputTensor;

mod message;

pub use message::decode_message;

type ParameterMap = std::collections::BTreeMap<String, proto::InferParameter>;

fn parameters(map: ParameterMap) -> ApiResult<Parameters> {
    if map.len() > MAX_PARAMETERS {
        return Err(ApiError::invalid("too many parameters"));
    }
    let value = |parameter: proto::InferParameter| match parameter.parameter_choice {
        None => ParameterValue::Null,
        Some(ParameterChoice::BoolParam(value)) => ParameterValue::Bool(value),
        Some(ParameterChoice::Int64Param(value)) => {
            u64::try_from(value).map_or(ParameterValue::Signed(value), ParameterValue::Unsigned)
        }
        Some(ParameterChoice::Uint64Param(value)) => ParameterValue::Unsigned(value),
        Some(ParameterChoice::DoubleParam(value)) => ParameterValue::Float(value),
        Some(ParameterChoice::StringParam(value)) => ParameterValue::Text(value),
    };
    Ok(Parameters(map.into_iter().map(|(key, parameter)| (key, value(parameter))).collect()))
}

/// Decodes an inference request; the caller handles the model's name and version.
pub fn decode_infer(message: proto::ModelInferRequest) -> ApiResult<InferRequest> {
    if message.inputs.len() > MAX_TENSORS || message.outputs.len() > MAX_TENSORS {
        return Err(ApiError::invalid(format!("more than {MAX_TENSORS} inputs or outputs")));
    }
    if message.id.len() > MAX_ID {
        return Err(ApiError::invalid(format!("the id is longer than {MAX_ID} bytes")));
    }
    let inputs = read_inputs(message.inputs, message.raw_input_contents)?;
    let output = |output: proto::model_infer_request::InferRequestedOutputTensor| {
        check_name(&output.name)?;
        let classes = output_classes(&parameters(output.parameters)?)?;
        Ok(RequestedOutput { name: output.name, classes })
    };
    Ok(InferRequest {
        id: message.id,
        options: infer_options(&parameters(message.parameters)?)?,
        inputs: Inputs::Named(inputs),
        outputs: message.outputs.into_iter().map(output).collect::<ApiResult<_>>()?,
    })
}

fn read_inputs(inputs: Vec<InferInputTensor>, raw: Vec<Bytes>) -> ApiResult<Vec<NamedTensor>> {
    if raw.is_empty() {
        return inputs.into_iter().map(|input| read_input(input, None)).collect();
    }
    if raw.len() != inputs.len() {
        return Err(ApiError::invalid(format!(
            "{} inputs, but {} raw_input_contents",
            inputs.len(),
            raw.len()
        )));
    }
    inputs.into_iter().zip(raw).map(|(input, raw)| read_input(input, Some(raw))).collect()
}

fn read_input(input: InferInputTensor, raw: Option<Bytes>) -> ApiResult<NamedTensor> {
    let name = input.name;
    check_name(&name)?;
    if input.parameters.contains_key("shared_memory_region") {
        return Err(in_input(&name, ApiError::unsupported("shared memory is not supported")));
    }
    let dtype = parse_dtype(&name, &input.datatype)?;
    let shape = parse_shape(&name, &input.shape)?;
    let tensor = match (raw, input.contents) {
        (Some(raw), None) => tensor_from_bytes(dtype, shape, raw),
        (None, Some(contents)) => tensor_from_contents(dtype, shape, contents),
        (None, None) => tensor_from_contents(dtype, shape, Default::default()),
        (Some(_), Some(_)) => Err(ApiError::invalid("has both contents and raw_input_contents")),
    };
    Ok(NamedTensor { tensor: tensor.map_err(|e| in_input(&name, e))?, name: Arc::from(name) })
}

fn tensor_from_contents(
    dtype: DataType,
    shape: Vec<usize>,
    contents: proto::InferTensorContents,
) -> ApiResult<Tensor> {
    fn narrow<V: Copy + std::fmt::Display, T: TryFrom<V>>(
        values: Vec<V>,
        dtype: DataType,
    ) -> ApiResult<Vec<T>> {
        let fits = |value: V| {
            T::try_from(value)
                .map_err(|_| ApiError::invalid(format!("{value} does not fit {dtype}")))
        };
        converted(values.into_iter(), fits)
    }
    let tensor = match dtype {
        DataType::Bool => {
            let bytes = converted(contents.bool_contents.into_iter(), |v| Ok(u8::from(v)))?;
            Tensor::from_raw(dtype, shape, bytes.into())
        }
        DataType::I8 => Tensor::from_vec(shape, narrow::<_, i8>(contents.int_contents, dtype)?),
        DataType::I16 => Tensor::from_vec(shape, narrow::<_, i16>(contents.int_contents, dtype)?),
        DataType::I32 => Tensor::from_vec(shape, contents.int_contents),
        DataType::I64 => Tensor::from_vec(shape, contents.int64_contents),
        DataType::U8 => Tensor::from_vec(shape, narrow::<_, u8>(contents.uint_contents, dtype)?),
        DataType::U16 => Tensor::from_vec(shape, narrow::<_, u16>(contents.uint_contents, dtype)?),
        DataType::U32 => Tensor::from_vec(shape, contents.uint_contents),
        DataType::U64 => Tensor::from_vec(shape, contents.uint64_contents),
        DataType::F32 => Tensor::from_vec(shape, contents.fp32_contents),
        DataType::F64 => Tensor::from_vec(shape, contents.fp64_contents),
        DataType::F16 => {
            let values = contents.fp32_contents.into_iter();
            let halves = converted(values, |value| Ok(f16::from_f32(value)))?;
            Tensor::from_vec(shape, halves)
        }
        DataType::BF16 => {
            let values = contents.fp32_contents.into_iter();
            let halves = converted(values, |value| Ok(bf16::from_f32(value)))?;
            Tensor::from_vec(shape, halves)
        }
        DataType::String => Tensor::from_strings(shape, contents.bytes_contents),
    };
    Ok(tensor?)
}

/// Encodes an inference response, with every output as raw bytes.
///
/// # Errors
/// When there is not enough memory for outputs of text.
pub fn encode_infer(response: InferResponse) -> ApiResult<proto::ModelInferResponse> {
    let mut outputs = Vec::with_capacity(response.outputs.len());
    let mut raw_output_contents = Vec::with_capacity(response.outputs.len());
    for NamedTensor { name, tensor } in response.outputs {
        raw_output_contents.push(tensor_bytes(&tensor)?);
        outputs.push(InferOutputTensor {
            name: name.to_string(),
            datatype: tensor.dtype().wire_name().to_string(),
            shape: tensor.shape().iter().map(|&dim| dim as i64).collect(),
            ..Default::default()
        });
    }
    Ok(proto::ModelInferResponse {
        model_name: response.model_name.to_string(),
        model_version: response.model_version.to_string(),
        id: response.id,
        outputs,
        raw_output_contents,
        ..Default::default()
    })
}

impl From<ServerMetadata> for proto::ServerMetadataResponse {
    fn from(server: ServerMetadata) -> Self {
        let ServerMetadata { name, version, extensions } = server;
        proto::ServerMetadataResponse { name, version, extensions }
    }
}

impl From<ModelMetadata> for proto::ModelMetadataResponse {
    fn from(model: ModelMetadata) -> Self {
        let tensor = |TensorMetadata { name, datatype, shape }: TensorMetadata| {
            proto::model_metadata_response::TensorMetadata { name, datatype, shape }
        };
        proto::ModelMetadataResponse {
            name: model.name,
            versions: model.versions,
            platform: model.platform,
            inputs: model.inputs.into_iter().map(tensor).collect(),
            outputs: model.outputs.into_iter().map(tensor).collect(),
        }
    }
}

impl From<IndexEntry> for proto::repository_index_response::ModelIndex {
    fn from(entry: IndexEntry) -> Self {
        proto::repository_index_response::ModelIndex {
            name: entry.name,
            version: entry.version,
            state: entry.state.map(|state| state.as_str().to_string()).unwrap_or_default(),
            reason: entry.reason,
        }
    }
}

fn duration(stat: DurationStat) -> Option<proto::StatisticDuration> {
    Some(proto::StatisticDuration { count: stat.count, ns: stat.ns })
}

fn inference_stats(stats: InferenceStats) -> proto::InferStatistics {
    proto::InferStatistics {
        success: duration(stats.success),
        fail: duration(stats.fail),
        queue: duration(stats.queue),
        compute_input: duration(stats.compute_input),
        compute_infer: duration(stats.compute_infer),
        compute_output: duration(stats.compute_output),
        cache_hit: duration(stats.cache_hit),
        cache_miss: duration(stats.cache_miss),
    }
}

impl From<ModelStatistics> for proto::ModelStatistics {
    fn from(stats: ModelStatistics) -> Self {
        let batch = |batch: BatchStats| proto::InferBatchStatistics {
            batch_size: batch.batch_size,
            compute_input: duration(batch.compute_input),
            compute_infer: duration(batch.compute_infer),
            compute_output: duration(batch.compute_output),
        };
        proto::ModelStatistics {
            name: stats.name,
            version: stats.version,
            last_inference: stats.last_inference,
            inference_count: stats.inference_count,
            execution_count: stats.execution_count,
            inference_stats: Some(inference_stats(stats.inference_stats)),
            batch_stats: stats.batch_stats.into_iter().map(batch).collect(),
        }
    }
}
