//! Raw request bodies: the model's metadata gives their type and shape.

use api::error::ApiResult;
use api::{ApiError, Inputs, ModelMetadata, NamedTensor};
use bytes::Bytes;
use model::{DataType, Tensor};

/// A body as the only input of a model.
pub(super) fn tensor_of(model: &str, metadata: &ModelMetadata, bytes: Bytes) -> ApiResult<Inputs> {
    let [input] = &metadata.inputs[..] else {
        return Err(ApiError::invalid(format!(
            "a raw body needs a model with one input, '{model}' has {}",
            metadata.inputs.len()
        )));
    };
    let length = bytes.len();
    let refuse = |why: &str| {
        let (name, datatype, shape) = (&input.name, &input.datatype, &input.shape);
        ApiError::invalid(format!(
            "a raw body of {length} bytes does not match '{name}' ({datatype}{shape:?}): {why}"
        ))
    };
    let dtype = DataType::from_wire_name(&input.datatype).ok_or_else(|| refuse("unknown type"))?;
    let tensor = if dtype == DataType::String {
        Tensor::from_strings(vec![1; input.shape.len()], vec![bytes])?
    } else {
        let size = dtype.size_bytes().unwrap_or(1);
        let fixed = input.shape.iter().filter_map(|&dim| usize::try_from(dim).ok());
        let known = fixed.into_iter().try_fold(size, usize::checked_mul);
        let known = known.ok_or_else(|| refuse("the model's shape is too large"))?;
        let rest = match input.shape.iter().filter(|dim| **dim < 0).count() {
            0 => 1,
            1 if known > 0 && length.is_multiple_of(known) => length / known,
            1 => return Err(refuse("the length is not a multiple of one element of the batch")),
            _ => return Err(refuse("more than one dimension is symbolic")),
        };
        let dims = input.shape.iter().map(|&dim| usize::try_from(dim).unwrap_or(rest)).collect();
        Tensor::from_raw(dtype, dims, bytes)?
    };
    Ok(Inputs::Named(vec![NamedTensor { name: input.name.as_str().into(), tensor }]))
}

#[cfg(test)]
mod tests {
    use api::TensorMetadata;

    use super::*;

    #[test]
    fn derives_the_symbolic_dimension_from_the_length() {
        let input = TensorMetadata {
            name: "x".to_string(),
            datatype: "FP32".to_string(),
            shape: vec![-1, 2],
        };
        let metadata = ModelMetadata {
            name: "m".to_string(),
            versions: vec![],
            platform: String::new(),
            inputs: vec![input],
            outputs: vec![],
        };
        let Ok(Inputs::Named(inputs)) = tensor_of("m", &metadata, Bytes::from(vec![0; 24])) else {
            panic!("a good body was refused")
        };
        assert_eq!(inputs[0].tensor.shape(), [3, 2]);
        assert!(tensor_of("m", &metadata, Bytes::from(vec![0; 23])).is_err());
    }
}
