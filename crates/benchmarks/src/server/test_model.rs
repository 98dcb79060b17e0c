//! The model under test: inputs, the messages that carry them, and the expected outputs.

use api::proto;
use assembly::{Failure, sample_inputs};
use base::Random;
use bytes::{BufMut, Bytes, BytesMut};
use model::{DataType, Tensor};
use prost::Message;

use super::engine_load::EngineUnderTest;

/// Number of different inputs.
const INPUTS: usize = 8;

/// How far an output may differ from that of the same input alone, relative to its largest value:
/// other batches use other kernels.
const TOLERANCE: f32 = 0.05;

/// A model with inputs for its requests.
pub(super) struct TestModel {
    pub(super) name: String,
    names: Vec<String>,
    /// One tensor per input of the model, for each request.
    pub(super) inputs: Vec<Vec<Tensor>>,
    expected: Vec<Vec<Tensor>>,
}

impl TestModel {
    /// Random inputs, and the engine's outputs of each alone.
    pub(super) fn new(
        engine: &EngineUnderTest,
        bind: &[String],
        seed: u64,
    ) -> Result<TestModel, Failure> {
        let plan = engine.plan();
        let bindings = sample_inputs::parse_bindings(bind)?;
        sample_inputs::check_known(plan, &bindings)?;
        let mut random = Random::new(seed);
        let mut one = |_| {
            let inputs = sample_inputs::random_inputs(plan, &bindings, &mut random);
            inputs.map(|inputs| engine.in_host_pool(inputs)).map_err(Failure::failed)
        };
        let inputs = (0..INPUTS).map(&mut one).collect::<Result<Vec<_>, _>>()?;
        if inputs.iter().flatten().any(|tensor| tensor.raw().is_none()) {
            return Err(Failure::usage("models with string tensors are not supported here"));
        }
        let expected = inputs.iter().map(|inputs| engine.once(inputs)).collect::<Result<_, _>>()?;
        let names = plan.inputs.iter().map(|id| plan.value(*id).name.clone()).collect();
        Ok(TestModel { name: engine.name.clone(), names, inputs, expected })
    }

    /// Types and shapes of the inputs.
    pub(super) fn shapes(&self) -> Vec<String> {
        let arguments =
            |tensor: &Tensor| format!("{}{:?}", tensor.dtype().wire_name(), tensor.shape());
        self.inputs.first().into_iter().flatten().map(arguments).collect()
    }

    /// The gRPC message of each input, with its length prefix.
    pub(super) fn grpc_messages(&self) -> Vec<Bytes> {
        self.inputs.iter().map(|inputs| self.grpc_message(inputs)).collect()
    }

    fn grpc_message(&self, inputs: &[Tensor]) -> Bytes {
        let described =
            |(name, tensor): (&String, &Tensor)| proto::model_infer_request::InferInputTensor {
                name: name.clone(),
                datatype: tensor.dtype().wire_name().to_string(),
                shape: tensor.shape().iter().map(|&dim| dim as i64).collect(),
                ..Default::default()
            };
        let message = proto::ModelInferRequest {
            model_name: self.name.clone(),
            inputs: self.names.iter().zip(inputs).map(described).collect(),
            raw_input_contents: inputs.iter().filter_map(|tensor| tensor.raw().cloned()).collect(),
            ..Default::default()
        };
        let mut framed = BytesMut::with_capacity(5 + message.encoded_len());
        framed.put_u8(0);
        framed.put_u32(message.encoded_len() as u32);
        framed.put_slice(&message.encode_to_vec());
        framed.freeze()
    }

    /// The REST request of each input, with its HTTP head, in which `header` is a line or nothing.
    pub(super) fn rest_messages(&self, header: &str) -> Vec<Bytes> {
        self.inputs.iter().map(|inputs| self.rest_message(inputs, header)).collect()
    }

    fn rest_message(&self, inputs: &[Tensor], header: &str) -> Bytes {
        let described = |(name, tensor): (&String, &Tensor)| {
            serde_json::json!({
                "name": name,
                "shape": tensor.shape(),
                "datatype": tensor.dtype().wire_name(),
                "parameters": { "binary_data_size": tensor.size_bytes() },
            })
        };
        let described: Vec<_> = self.names.iter().zip(inputs).map(described).collect();
        let parameters = serde_json::json!({ "binary_data_output": true });
        let json = serde_json::json!({ "inputs": described, "parameters": parameters }).to_string();
        let raw: Vec<&Bytes> = inputs.iter().filter_map(Tensor::raw).collect();
        let head = format!(
            "POST /v2/models/{}/infer HTTP/1.1\r\nHost: localhost\r\n{header}\
             Inference-Header-Content-Length: \
             {}\r\nContent-Length: {}\r\n\r\n",
            self.name,
            json.len(),
            json.len() + raw.iter().map(|raw| raw.len()).sum::<usize>()
        );
        let mut message = BytesMut::from(head.as_bytes());
        message.put_slice(json.as_bytes());
        raw.into_iter().for_each(|raw| message.put_slice(raw));
        message.freeze()
    }

    /// Whether `outputs`, one after another, are those of input `index`.
    pub(super) fn is_expected(&self, index: usize, outputs: &[&[u8]]) -> bool {
        let expected = &self.expected[index];
        let mut rest = outputs.concat();
        for tensor in expected {
            let Some(want) = tensor.raw().filter(|want| want.len() <= rest.len()) else {
                return false;
            };
            let behind = rest.split_off(want.len());
            if !is_close(tensor, rest.into()) {
                return false;
            }
            rest = behind;
        }
        rest.is_empty()
    }
}

fn is_close(want: &Tensor, got: Bytes) -> bool {
    if want.dtype() != DataType::F32 {
        return want.raw() == Some(&got);
    }
    let got = Tensor::from_raw(DataType::F32, want.shape().to_vec(), got).ok();
    let (Some(got), Some(want)) = (got.and_then(|got| got.to_vec::<f32>()), want.to_vec::<f32>())
    else {
        return false;
    };
    let largest = want.iter().fold(0f32, |most, value| most.max(value.abs())).max(1e-3);
    let near = |(got, want): (&f32, &f32)| (got - want).abs() <= TOLERANCE * largest;
    got.iter().zip(&want).all(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_distinguished() {
        let tensor =
            |values: &[f32]| Tensor::from_vec(vec![values.len()], values.to_vec()).unwrap();
        let (first, second) = (tensor(&[1.0, -2.0]), tensor(&[3.0]));
        let test_model = TestModel {
            name: "m".to_string(),
            names: Vec::new(),
            inputs: Vec::new(),
            expected: vec![vec![first.clone(), second.clone()]],
        };
        let raw = |tensor: &Tensor| tensor.raw().unwrap().clone();
        assert!(test_model.is_expected(0, &[&raw(&first), &raw(&second)]));
        assert!(test_model.is_expected(0, &[&[raw(&first), raw(&second)].concat()]));
        assert!(test_model.is_expected(0, &[&raw(&tensor(&[1.01, -2.0])), &raw(&second)]));
        assert!(!test_model.is_expected(0, &[&raw(&second), &raw(&first)]));
        assert!(!test_model.is_expected(0, &[&raw(&first)]));
        assert!(!test_model.is_expected(0, &[&raw(&first), &raw(&second), &raw(&second)]));
    }
}
