//! Client side of the gRPC protocol: encodes requests, decodes responses and errors.

use std::sync::Arc;

use base::Nanos;

use crate::codec::response::tensor_bytes;
use crate::codec::{parse_dtype, parse_shape, tensor_from_bytes};
use crate::error::{ApiError, ApiResult, ErrorKind};
use crate::infer::{InferOptions, InferRequest, InferResponse, Inputs, NamedTensor};
use crate::metadata::{
    BatchStats, DurationStat, InferenceStats, ModelMetadata, ModelStatistics, TensorMetadata,
};
use crate::proto;
use proto::infer_parameter::ParameterChoice;
use proto::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};

/// Metadata key of an error's retry hint.
pub const RETRY_AFTER: &str = "retry-after";

fn parameter(choice: ParameterChoice) -> proto::InferParameter {
    proto::InferParameter { parameter_choice: Some(choice) }
}

fn parameters(options: &InferOptions) -> std::collections::BTreeMap<String, proto::InferParameter> {
    let mut map = std::collections::BTreeMap::new();
    if let Some(class) = options.class {
        let text = ParameterChoice::StringParam(class.as_str().to_string());
        map.insert("atoll_class".to_string(), parameter(text));
    }
    if let Some(priority) = options.priority {
        let number = ParameterChoice::Uint64Param(priority.into());
        map.insert("priority".to_string(), parameter(number));
    }
    if let Some(timeout) = options.timeout {
        map.insert("atoll_deadline_ms".to_string(), deadline(timeout));
    }
    map
}

fn deadline(left: Nanos) -> proto::InferParameter {
    // A timeout of zero would mean no deadline.
    parameter(ParameterChoice::DoubleParam((left.0 as f64 / 1e6).max(1e-6)))
}

/// Sets the remaining time of an encoded request.
pub fn set_deadline(message: &mut proto::ModelInferRequest, left: Nanos) {
    message.parameters.insert("atoll_deadline_ms".to_string(), deadline(left));
}

/// Encodes an inference request, with every input as raw bytes. A raw body needs a name, type and
/// shape first.
pub fn encode_request(
    model: &str,
    version: Option<u64>,
    request: InferRequest,
) -> ApiResult<proto::ModelInferRequest> {
    let Inputs::Named(tensors) = request.inputs else {
        return Err(ApiError::internal("a raw body was not given a shape"));
    };
    let mut inputs = Vec::with_capacity(tensors.len());
    let mut raw_input_contents = Vec::with_capacity(tensors.len());
    for NamedTensor { name, tensor } in tensors {
        raw_input_contents.push(tensor_bytes(&tensor)?);
        inputs.push(InferInputTensor {
            name: name.to_string(),
            datatype: tensor.dtype().wire_name().to_string(),
            shape: tensor.shape().iter().map(|&dim| dim as i64).collect(),
            ..Default::default()
        });
    }
    let outputs = request.outputs.into_iter().map(|output| {
        let mut parameters = std::collections::BTreeMap::new();
        if output.classes > 0 {
            let classes = ParameterChoice::Uint64Param(output.classes as u64);
            parameters.insert("classification".to_string(), parameter(classes));
        }
        InferRequestedOutputTensor { name: output.name, parameters }
    });
    Ok(proto::ModelInferRequest {
        model_name: model.to_string(),
        model_version: version.map(|version| version.to_string()).unwrap_or_default(),
        id: request.id,
        parameters: parameters(&request.options),
        inputs,
        outputs: outputs.collect(),
        raw_input_contents,
    })
}

/// Decodes an inference response whose outputs are raw bytes.
pub fn decode_response(message: proto::ModelInferResponse) -> ApiResult<InferResponse> {
    if message.outputs.len() != message.raw_output_contents.len() {
        return Err(ApiError::internal("the response has outputs without data"));
    }
    let mut outputs = Vec::with_capacity(message.outputs.len());
    for (output, raw) in message.outputs.into_iter().zip(message.raw_output_contents) {
        let dtype = parse_dtype(&output.name, &output.datatype)?;
        let shape = parse_shape(&output.name, &output.shape)?;
        let tensor = tensor_from_bytes(dtype, shape, raw)?;
        outputs.push(NamedTensor { name: output.name.into(), tensor });
    }
    Ok(InferResponse {
        model_name: Arc::from(message.model_name),
        model_version: Arc::from(message.model_version),
        id: message.id,
        outputs,
        timing: None,
    })
}

/// The error of a gRPC status.
pub fn error_of(status: &tonic::Status) -> ApiError {
    let kind = match status.code() {
        tonic::Code::InvalidArgument => ErrorKind::InvalidArgument,
        tonic::Code::NotFound => ErrorKind::NotFound,
        tonic::Code::Unimplemented => ErrorKind::Unsupported,
        tonic::Code::Unauthenticated => ErrorKind::Unauthenticated,
        tonic::Code::PermissionDenied => ErrorKind::Forbidden,
        // With a hint when to retry it is a limit on requests, without one on their size.
        tonic::Code::ResourceExhausted if status.metadata().contains_key(RETRY_AFTER) => {
            ErrorKind::TooManyRequests
        }
        tonic::Code::OutOfRange | tonic::Code::ResourceExhausted => ErrorKind::TooLarge,
        tonic::Code::Cancelled => ErrorKind::Cancelled,
        tonic::Code::Unavailable => ErrorKind::Unavailable,
        tonic::Code::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        _ => ErrorKind::Internal,
    };
    let seconds = status.metadata().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
    let error = ApiError::new(kind, status.message().to_string());
    ApiError { retry_after: seconds.and_then(|text| text.parse().ok()), ..error }
}

impl From<proto::ModelMetadataResponse> for ModelMetadata {
    fn from(message: proto::ModelMetadataResponse) -> Self {
        let tensor = |tensor: proto::model_metadata_response::TensorMetadata| TensorMetadata {
            name: tensor.name,
            datatype: tensor.datatype,
            shape: tensor.shape,
        };
        ModelMetadata {
            name: message.name,
            versions: message.versions,
            platform: message.platform,
            inputs: message.inputs.into_iter().map(tensor).collect(),
            outputs: message.outputs.into_iter().map(tensor).collect(),
        }
    }
}

fn duration(message: Option<proto::StatisticDuration>) -> DurationStat {
    message.map_or_else(DurationStat::default, |m| DurationStat { count: m.count, ns: m.ns })
}

impl From<proto::ModelStatistics> for ModelStatistics {
    fn from(message: proto::ModelStatistics) -> Self {
        let stats = message.inference_stats.unwrap_or_default();
        let batch = |batch: proto::InferBatchStatistics| BatchStats {
            batch_size: batch.batch_size,
            compute_input: duration(batch.compute_input),
            compute_infer: duration(batch.compute_infer),
            compute_output: duration(batch.compute_output),
        };
        ModelStatistics {
            name: message.name,
            version: message.version,
            last_inference: message.last_inference,
            inference_count: message.inference_count,
            execution_count: message.execution_count,
            inference_stats: InferenceStats {
                success: duration(stats.success),
                fail: duration(stats.fail),
                queue: duration(stats.queue),
                compute_input: duration(stats.compute_input),
                compute_infer: duration(stats.compute_infer),
                compute_output: duration(stats.compute_output),
                cache_hit: duration(stats.cache_hit),
                cache_miss: duration(stats.cache_miss),
            },
            batch_stats: message.batch_stats.into_iter().map(batch).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use model::Tensor;
    use model::config::Class;

    use super::*;
    use crate::grpc::{decode_infer, encode_infer};
    use crate::infer::RequestedOutput;

    #[test]
    fn requests_and_responses_round_trip() {
        let text = vec![Bytes::from_static(b"a"), Bytes::from_static(b"\xff")];
        let tensors = [
            ("numbers", Tensor::from_vec(vec![2, 1], vec![1.5f32, -2.0]).unwrap()),
            ("texts", Tensor::from_strings(vec![2], text).unwrap()),
        ];
        let named = |(name, tensor): (&str, Tensor)| NamedTensor { name: name.into(), tensor };
        let inputs: Vec<NamedTensor> = tensors.into_iter().map(named).collect();
        let request = InferRequest {
            id: "7".to_string(),
            options: InferOptions {
                class: Some(Class::BestEffort),
                priority: Some(3),
                timeout: Some(Nanos::from_millis(20)),
                binary_output: false,
                trace: None,
            },
            inputs: Inputs::Named(inputs.clone()),
            outputs: vec![RequestedOutput { name: "out".to_string(), classes: 2 }],
        };
        let message = encode_request("m", Some(1), request.clone()).unwrap();
        assert_eq!((message.model_name.as_str(), message.model_version.as_str()), ("m", "1"));
        assert_eq!(decode_infer(message).unwrap(), request);
        let response = InferResponse {
            model_name: "m".into(),
            model_version: "1".into(),
            id: "7".to_string(),
            outputs: inputs,
            timing: None,
        };
        assert_eq!(decode_response(encode_infer(response.clone()).unwrap()).unwrap(), response);
    }

    #[test]
    fn errors_keep_their_kind_and_hint() {
        let error = ApiError::unavailable("full").retry_after(3);
        assert_eq!(error_of(&tonic::Status::from(error.clone())), error);
        let error = ApiError::new(ErrorKind::TooManyRequests, "rate").retry_after(1);
        assert_eq!(error_of(&tonic::Status::from(error.clone())), error);
        let error = ApiError::not_found("no such model");
        assert_eq!(error_of(&tonic::Status::from(error.clone())), error);
    }
}
