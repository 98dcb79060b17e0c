//! What a model takes and returns: frontends answer with it while no backend has the model.

use serde::{Deserialize, Serialize};

use api::{ModelMetadata, TensorMetadata};

use super::validation::{StoredRecord, check_text};

/// Inputs and outputs of one model, and dimensions of one of them.
const TENSORS_MAX: usize = 1024;
const DIMENSIONS_MAX: usize = 64;

/// An input or an output: name, type and dimensions, as the protocol has them.
pub type SignatureTensor = (String, String, Vec<i64>);

/// Inputs and outputs of a model, as the first backend that loaded its file describes them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignatureRecord {
    /// The platform.
    pub platform: String,
    /// Its inputs.
    pub inputs: Vec<SignatureTensor>,
    /// Its outputs.
    pub outputs: Vec<SignatureTensor>,
}

impl SignatureRecord {
    /// The signature that a backend reports.
    pub fn of(metadata: &ModelMetadata) -> SignatureRecord {
        let tensor = |tensor: &TensorMetadata| {
            (tensor.name.clone(), tensor.datatype.clone(), tensor.shape.clone())
        };
        SignatureRecord {
            platform: metadata.platform.clone(),
            inputs: metadata.inputs.iter().map(tensor).collect(),
            outputs: metadata.outputs.iter().map(tensor).collect(),
        }
    }

    /// The metadata of the model `name` in this version.
    pub fn metadata(&self, name: &str, version: u64) -> ModelMetadata {
        let tensor = |(name, datatype, shape): &SignatureTensor| TensorMetadata {
            name: name.clone(),
            datatype: datatype.clone(),
            shape: shape.clone(),
        };
        ModelMetadata {
            name: name.to_string(),
            versions: vec![version.to_string()],
            platform: self.platform.clone(),
            inputs: self.inputs.iter().map(tensor).collect(),
            outputs: self.outputs.iter().map(tensor).collect(),
        }
    }
}

impl StoredRecord for SignatureRecord {
    const KIND: &'static str = "signatures";

    fn limit(&mut self) -> Result<(), String> {
        check_text("the platform", &self.platform)?;
        for tensors in [&self.inputs, &self.outputs] {
            if tensors.len() > TENSORS_MAX {
                return Err(format!("it has {} tensors", tensors.len()));
            }
            for (name, datatype, shape) in tensors {
                check_text("the tensor", name)?;
                check_text("the type", datatype)?;
                if shape.len() > DIMENSIONS_MAX {
                    return Err(format!("a tensor has {} dimensions", shape.len()));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{decode, encode};

    #[test]
    fn metadata_survives_the_store() {
        let tensor = |name: &str, shape: &[i64]| TensorMetadata {
            name: name.to_string(),
            datatype: "FP32".to_string(),
            shape: shape.to_vec(),
        };
        let metadata = ModelMetadata {
            name: "m".to_string(),
            versions: vec!["3".to_string()],
            platform: "onnx".to_string(),
            inputs: vec![tensor("image", &[-1, 3, 8, 8])],
            outputs: vec![tensor("scores", &[-1, 10]), tensor("scalar", &[])],
        };
        let stored = encode(&SignatureRecord::of(&metadata));
        let read: SignatureRecord = decode("signatures/a", &stored).expect("it is valid");
        assert_eq!(read.metadata("m", 3), metadata);
        let deep = SignatureRecord {
            inputs: vec![("x".to_string(), "FP32".to_string(), vec![1; 65])],
            ..read
        };
        assert_eq!(decode::<SignatureRecord>("signatures/b", &encode(&deep)), None);
    }
}
