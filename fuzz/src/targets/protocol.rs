//! Inference requests as clients send them.

use api::codec::{self, Decoded, OutputEncoding};
use api::{ApiError, InferResponse, Inputs, NamedTensor, decoded_size, grpc as grpc_codec};
use bytes::Bytes;
use model::tensor::element_count;

use crate::allocator;

/// Words of requests.
pub(super) const WORDS: &[&str] = &[
    "id",
    "inputs",
    "outputs",
    "name",
    "shape",
    "datatype",
    "data",
    "parameters",
    "binary_data_size",
    "binary_data",
    "binary_data_output",
    "classification",
    "priority",
    "timeout",
    "atoll_class",
    "rt",
    "be",
    "sequence_id",
    "shared_memory_region",
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
    "BYTES",
    "INPUT0",
    "OUTPUT0",
    "unload_dependents",
    "ready",
    "identity",
];

/// Memory of an error's text, which may quote names from the request.
const MESSAGE: usize = 16 << 10;

/// Decodes with `work`, and checks that it stays within the memory that was to be reserved.
fn bounded<T>(bound: usize, length: usize, work: impl FnOnce() -> T) -> T {
    let before = allocator::reset_peak();
    let result = work();
    let taken = allocator::peak().saturating_sub(before);
    let allowed = bound + MESSAGE + 4 * length;
    assert!(taken <= allowed, "decoding took {taken} bytes, {bound} were to be reserved");
    result
}

/// What holds for every request that is accepted; then its response is encoded.
fn check_inputs(inputs: Inputs, encoding: &OutputEncoding) {
    let Inputs::Named(inputs) = inputs else { return };
    for NamedTensor { name, tensor } in &inputs {
        assert!(!name.is_empty() && name.len() <= codec::MAX_NAME);
        let count = element_count(tensor.shape()).expect("a shape whose elements can be counted");
        assert_eq!(tensor.len(), count, "{name}");
    }
    let response = InferResponse {
        model_name: "m".into(),
        model_version: "1".into(),
        id: String::new(),
        outputs: inputs,
        timing: None,
    };
    let _ = codec::encode(&response, encoding);
}

fn decoded(result: Result<Decoded, ApiError>) {
    if let Ok(Decoded { request, encoding }) = result {
        check_inputs(request.inputs, &encoding);
    }
}

/// An inference request in JSON.
pub(super) fn json(data: &[u8]) {
    let body = Bytes::copy_from_slice(data);
    let bound = decoded_size::of_request(&body, 0);
    decoded(bounded(bound, data.len(), || codec::decode(body, None)));
}

/// A header length, or all ones for none, and an inference request with binary tensors.
pub(super) fn binary(data: &[u8]) {
    let Some((length, body)) = data.split_first_chunk::<4>() else { return };
    let length = u32::from_le_bytes(*length);
    let length = (length != u32::MAX).then_some(length as usize);
    let body = Bytes::copy_from_slice(body);
    let split = length.unwrap_or(body.len()).min(body.len());
    let bound = decoded_size::of_request(&body[..split], body.len() - split);
    decoded(bounded(bound, data.len(), || codec::decode(body, length)));
}

/// A `ModelInferRequest`.
pub(super) fn grpc(data: &[u8]) {
    let Ok(bound) = decoded_size::of_message(data) else { return };
    let body = Bytes::copy_from_slice(data);
    let request = bounded(bound, data.len(), || {
        let message = grpc_codec::decode_message(body).ok()?;
        grpc_codec::decode_infer(message).ok()
    });
    if let Some(request) = request {
        check_inputs(request.inputs, &OutputEncoding::default());
    }
}
