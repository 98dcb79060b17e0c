//! REST, gRPC and metrics on top of one service, and the service of a single node.
//!
//! Handlers only translate: `api` decodes and validates, an [`api::InferenceService`] does the
//! work. REST routes are in `rest.rs`.

mod body_buffers;
mod grpc;
mod listener;
pub mod metrics;
pub mod node;
pub mod request_tracker;
mod rest;
pub mod server;

pub use node::LocalNode;
pub use node::loader::{LoadError, LoadedModel, ModelLoader, RepositoryEntry};
pub use server::{BoundServer, RunningServer, Server, ServerError, ServerOptions};
