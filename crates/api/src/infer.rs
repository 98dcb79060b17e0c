//! One inference as it crosses the service boundary, whatever wire it came over.

use std::sync::Arc;

use base::Nanos;
use bytes::Bytes;
use model::Tensor;
use model::config::Class;

/// A tensor and what the model calls it.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// The name of the model's input or output.
    pub name: Arc<str>,
    /// Its value.
    pub tensor: Tensor,
}

/// The inputs of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Inputs {
    /// Named tensors, in the order the client sent them.
    Named(Vec<NamedTensor>),
    /// The bytes of the model's only input; type and shape are the model's to know.
    Raw(Bytes),
}

/// An output the client asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedOutput {
    /// The model's name of it.
    pub name: String,
    /// When not 0, this many best classes as text instead of the tensor.
    pub classes: usize,
}

/// How a request wants to be treated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InferOptions {
    /// The class; the model's default when absent.
    pub class: Option<Class>,
    /// The priority, 1 the highest; the model's default when absent.
    pub priority: Option<u32>,
    /// Time until the answer is of no use; the model's default when absent.
    pub timeout: Option<Nanos>,
    /// Whether outputs travel as binary unless said otherwise for one of them.
    pub binary_output: bool,
}

impl InferOptions {
    /// Keeps the shorter of the present timeout and `timeout`.
    pub fn limit_timeout(&mut self, timeout: Option<Nanos>) {
        self.timeout = match (self.timeout, timeout) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}

/// A request to run a model once.
#[derive(Clone, Debug, PartialEq)]
pub struct InferRequest {
    /// The client's own id; returned as it came. Empty when there is none.
    pub id: String,
    /// How it wants to be treated.
    pub options: InferOptions,
    /// The inputs.
    pub inputs: Inputs,
    /// The outputs wanted, in this order; all of the model's when empty.
    pub outputs: Vec<RequestedOutput>,
}

/// The answer to an [`InferRequest`].
#[derive(Clone, Debug, PartialEq)]
pub struct InferResponse {
    /// The model.
    pub model_name: Arc<str>,
    /// The version that answered.
    pub model_version: Arc<str>,
    /// The request's id.
    pub id: String,
    /// The outputs in the order they were asked for.
    pub outputs: Vec<NamedTensor>,
}
