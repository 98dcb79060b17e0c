//! Imports ONNX models into a typed IR with symbolic shapes, and optimises it. The IR is
//! independent of devices; the `compiler` crate lowers it.
//!
//! A graph is built by [`import`] or by hand. Its shapes may contain symbols, which [`bind()`]
//! replaces by sizes:
//!
//! ```
//! use graph::infer::Fact;
//! use graph::{Graph, GraphNode, SymDim};
//! use model::DataType;
//! use model::op::{Op, Unary};
//!
//! // y = relu(x) with x: FP32[batch,4]
//! let shape = Some(vec![SymDim::symbol("batch"), SymDim::Fixed(4)]);
//! let mut graph = Graph::default();
//! let x = graph.add_value("x".to_string(), Fact::new(DataType::F32, shape));
//! graph.inputs.push(x);
//! let op = Op::Unary(Unary::Relu);
//! let facts = graph.infer(&op, &[Some(x)], 1).expect("the operand fits");
//! let y = graph.add_value("y".to_string(), facts.into_iter().next().expect("one output"));
//! graph.nodes.push(GraphNode {
//!     name: "relu".to_string(),
//!     op,
//!     inputs: vec![Some(x)],
//!     outputs: vec![Some(y)],
//! });
//! graph.outputs.push(y);
//! assert_eq!(graph.symbols(), ["batch"]);
//!
//! // The passes find nothing to rewrite here.
//! let report = graph::optimize(&mut graph, None);
//! assert!(report.rewrites.iter().all(|(_, count)| *count == 0));
//!
//! let bound = graph::bind(&graph, &[("batch", 8)]).expect("shapes fit");
//! assert_eq!(bound.shape(y), Some([SymDim::Fixed(8), SymDim::Fixed(4)].as_slice()));
//! ```
//!
//! Untrusted bytes give an error, never a panic:
//!
//! ```
//! use graph::ExternalData;
//!
//! assert!(graph::import(b"not a model", &ExternalData::none()).is_err());
//! ```

pub mod bind;
pub mod constants;
pub mod content;
pub mod dump;
pub mod hash;
pub mod infer;
pub mod ir;
pub mod onnx;
pub mod pass;

pub use bind::bind;
pub use constants::Constants;
pub use hash::{plan_hashes, subgraph_hashes};
pub use ir::{Graph, GraphNode, Value};
pub use model::dim::SymDim;
pub use onnx::{
    ExternalData, ImportError, Limits, import, import_file, import_shared, parse_tensor_proto,
};
pub use pass::{Evaluator, PassReport, optimize};
