//! The protocol: the Open Inference Protocol v2 as JSON, binary tensors and protobuf, its errors,
//! and the service trait behind both REST and gRPC.
//!
//! Nothing here opens a socket or runs a model.

pub mod canary;
pub mod client;
pub mod codec;
pub mod decoded_size;
pub mod error;
pub mod fallible;
pub mod grpc;
pub mod infer;
pub mod metadata;
pub mod monitor;
pub mod parameters;
pub mod picture;
pub mod proto;
pub mod service;
pub mod trace;

pub use canary::{CanaryChoice, CanaryOptions, CanaryStatus};
pub use error::{ApiError, ErrorKind};
pub use infer::{
    InferOptions, InferRequest, InferResponse, Inputs, NamedTensor, RequestTiming, RequestedOutput,
};
pub use metadata::{
    IndexEntry, ModelMetadata, ModelState, ModelStatistics, QueryMetadata, QueryStageMetadata,
    ServerMetadata, TensorMetadata,
};
pub use parameters::ParameterValue;
pub use service::{
    Classification, ClassifyRequest, InferenceService, ModelRef, Prediction, RegisterRequest,
    Registered, RequestContext, ServiceFuture, check_model_name,
};
pub use trace::TraceContext;
