//! Imports ONNX files into the IR.
//!
//! A file is untrusted: lengths are compared with the available bytes, sizes are multiplied with
//! overflow checks, and what is not understood is refused with the node's name, never guessed.

use std::fmt;
use std::path::Path;

use bytes::Bytes;
use thiserror::Error;

use crate::ir::Graph;

mod attributes;
mod brevitas;
mod context;
mod elementwise;
mod external;
mod function;
mod importer;
mod index;
mod layout;
mod loss;
mod matrix;
mod microsoft;
mod ml;
mod narrow;
mod nchwc;
mod nn;
mod norm;
mod order;
mod proto;
mod quant;
mod quantizer;
mod random;
mod recurrent;
mod reduce;
mod signal;
mod spatial;
mod tensor;
mod text;
mod training;
mod window;
mod wire;

pub use external::ExternalData;
pub use quantizer::{
    ActivationBytes, ActivationRange, FloatNode, OutputError, QuantizableModel, RangeMethod,
    RangeObserver,
};
pub use tensor::parse_tensor_proto;
pub use wire::WireError;

/// The newest supported operator set.
pub const MAX_OPSET: i64 = 27;

/// How large a model may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of the model file, without external weights.
    pub file_bytes: u64,
    /// Nodes, after functions are expanded.
    pub nodes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        // Protobuf is limited to 2 GiB; larger weights are in external files.
        Limits { file_bytes: 2 << 30, nodes: proto::MAX_NODES }
    }
}

/// A node that is not supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedNode {
    /// The node's name, or one made from its outputs.
    pub node: String,
    /// The operator.
    pub op_type: String,
    /// The operator's domain; `ai.onnx` for the default one.
    pub domain: String,
    /// The operator set in effect.
    pub opset: i64,
    /// Names, types and shapes of the operands.
    pub inputs: String,
    /// The reason, when the operator itself is supported.
    pub reason: Option<String>,
}

impl fmt::Display for UnsupportedNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UnsupportedNode { node, op_type, domain, opset, inputs, reason } = self;
        write!(
            f,
            "unsupported operator '{op_type}' (domain '{domain}', opset {opset}) at node '{node}', \
             inputs {inputs}"
        )?;
        match reason {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

/// Why a model cannot be imported.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ImportError {
    /// The file cannot be read.
    #[error("cannot read '{path}': {reason}")]
    Io {
        /// The file.
        path: String,
        /// The system's error.
        reason: String,
    },
    /// The bytes are not an ONNX model.
    #[error("not an onnx model: {0}")]
    Format(WireError),
    /// The model has no graph, or is invalid as a whole.
    #[error("{0}")]
    Model(String),
    /// A limit is exceeded.
    #[error("the model has {actual} {what}, at most {limit} are allowed")]
    TooLarge {
        /// The quantity that is too large.
        what: &'static str,
        /// Its value.
        actual: u64,
        /// Its maximum.
        limit: u64,
    },
    /// A tensor in the file is inconsistent.
    #[error("tensor '{name}': {reason}")]
    Tensor {
        /// The tensor's name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// An input of the model is not supported.
    #[error("input '{name}': {reason}")]
    Input {
        /// The input's name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Two values have one name.
    #[error("value '{name}' is defined twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A node reads a value that nothing writes.
    #[error(
        "node '{node}' reads '{name}', which is not an input, an initializer or an output of a node"
    )]
    Missing {
        /// The node, or `outputs` for the model's.
        node: String,
        /// The value.
        name: String,
    },
    /// Nodes depend on each other in a cycle.
    #[error("the graph has a cycle through {}", .0.join(", "))]
    Cycle(Vec<String>),
    /// A node's operands or attributes do not fit its operator.
    #[error("node '{node}' ({op_type}, inputs {inputs}): {reason}")]
    Node {
        /// The node's name.
        node: String,
        /// The operator.
        op_type: String,
        /// Names, types and shapes of the operands.
        inputs: String,
        /// What is wrong.
        reason: String,
    },
    /// All nodes that are not supported.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Unsupported(Vec<UnsupportedNode>),
}

/// Imports a serialized model. External weights are read through `external`.
pub fn import(bytes: &[u8], external: &ExternalData) -> Result<Graph, ImportError> {
    import_shared(Bytes::copy_from_slice(bytes), external, &Limits::default())
}

/// Imports a serialized model; its weights share the memory of `bytes`.
pub fn import_shared(
    bytes: Bytes,
    external: &ExternalData,
    limits: &Limits,
) -> Result<Graph, ImportError> {
    check_size(bytes.len() as u64, limits)?;
    let model = proto::Message::decode(bytes).map_err(ImportError::Format)?;
    importer::run(model, external, limits)
}

/// Imports a model file. External weights must be in its folder or below.
pub fn import_file(path: &Path, limits: &Limits) -> Result<Graph, ImportError> {
    let io = |error: std::io::Error| ImportError::Io {
        path: path.display().to_string(),
        reason: error.to_string(),
    };
    check_size(std::fs::metadata(path).map_err(io)?.len(), limits)?;
    let bytes = std::fs::read(path).map_err(io)?;
    import_shared(Bytes::from(bytes), &ExternalData::beside(path), limits)
}

fn check_size(actual: u64, limits: &Limits) -> Result<(), ImportError> {
    if actual > limits.file_bytes {
        return Err(ImportError::TooLarge { what: "bytes", actual, limit: limits.file_bytes });
    }
    Ok(())
}
