//! ONNX in, a small typed IR of our own out, and the passes over it. No word of any device.

pub mod bind;
pub mod content;
pub mod dump;
pub mod hash;
pub mod infer;
pub mod ir;
pub mod onnx;
pub mod pass;

pub use bind::bind;
pub use hash::{plan_hashes, subgraph_hashes};
pub use ir::{Graph, Node, Value};
pub use model::dim::SymDim;
pub use onnx::{ExternalData, ImportError, Limits, import, import_file, parse_tensor_proto};
pub use pass::{Evaluator, Report, optimize};
