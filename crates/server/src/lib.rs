//! REST, gRPC and metrics over one service, and the service of a single node.
//!
//! Handlers only translate: what is read is checked by `api`, what is done is done by an
//! [`api::InferenceService`].

mod buffers;
pub mod gate;
mod grpc;
mod listener;
pub mod metrics;
pub mod node;
mod rest;
pub mod server;

pub use node::LocalNode;
pub use node::loader::{LoadError, LoadedModel, ModelLoader, RepositoryEntry};
pub use server::{BoundServer, RunningServer, Server, ServerError, ServerOptions};
