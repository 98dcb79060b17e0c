//! Inference requests and responses, independent of the protocol.

use std::sync::Arc;

use base::Nanos;
use bytes::Bytes;
use model::Tensor;
use model::config::Class;

use crate::trace::TraceContext;

/// A tensor with its name.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// The name of the model's input or output.
    pub name: Arc<str>,
    /// The tensor.
    pub tensor: Tensor,
}

/// The inputs of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Inputs {
    /// Named tensors, in the order the client sent them.
    Named(Vec<NamedTensor>),
    /// The bytes of the model's only input; the model defines type and shape.
    Raw(Bytes),
}

/// A requested output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestedOutput {
    /// Name of the output.
    pub name: String,
    /// If not 0, this many top classes as text instead of the tensor.
    pub classes: usize,
}

/// Scheduling and encoding options of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InferOptions {
    /// The class; by default the model's.
    pub class: Option<Class>,
    /// The priority, 1 is the highest; by default the model's.
    pub priority: Option<u32>,
    /// Time from arrival to deadline; by default the model's.
    pub timeout: Option<Nanos>,
    /// Whether outputs are binary by default.
    pub binary_output: bool,
    /// The trace that it belongs to, for servers that it is sent on to.
    pub trace: Option<TraceContext>,
}

impl InferOptions {
    /// Sets the timeout to the minimum of the present one and `timeout`.
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
    /// The client's id, returned in the response. May be empty.
    pub id: String,
    /// Scheduling and encoding options.
    pub options: InferOptions,
    /// The inputs.
    pub inputs: Inputs,
    /// The requested outputs in order; empty means all.
    pub outputs: Vec<RequestedOutput>,
}

/// The response to an [`InferRequest`].
#[derive(Clone, Debug, PartialEq)]
pub struct InferResponse {
    /// The model.
    pub model_name: Arc<str>,
    /// The version that ran.
    pub model_version: Arc<str>,
    /// The request's id.
    pub id: String,
    /// The outputs in the requested order.
    pub outputs: Vec<NamedTensor>,
    /// When it passed which point; absent if another server ran it.
    pub timing: Option<RequestTiming>,
}

/// When a request passed which point, by a clock of the node that ran it. A point that it did not
/// pass is [`Nanos::ZERO`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestTiming {
    /// It arrived at the node.
    pub arrived: Nanos,
    /// Its inputs were staged.
    pub staged: Nanos,
    /// Its first step started.
    pub started: Nanos,
    /// Its last step ended.
    pub finished: Nanos,
    /// Its outputs were ready to be sent.
    pub ready: Nanos,
    /// The same in nanoseconds of Unix time.
    pub ready_unix_ns: u64,
    /// Its time on the device.
    pub busy: Nanos,
    /// How often it was preempted.
    pub preemptions: u32,
    /// Rows of its batch; 0 without one.
    pub rows: usize,
}
