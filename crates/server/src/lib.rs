//! REST, gRPC and metrics on top of one service, and the service of a single node.
//!
//! Handlers only translate: `api` decodes and validates, an [`api::InferenceService`] does the
//! work. REST routes are in `rest.rs`.

mod admin;
pub mod auth;
mod body_buffers;
pub mod connection;
mod console;
mod descriptors;
mod grpc;
mod heavy_work;
mod listener;
pub mod metrics;
pub mod node;
mod openapi;
pub mod request_tracker;
mod rest;
pub mod server;
mod telemetry;
pub mod tls;
mod watched_task;

pub use auth::{AccessOptions, JwtOptions};
pub use connection::ConnectionLimits;
pub use node::LocalNode;
pub use node::loader::{
    KeptSettings, LoadError, LoadedModel, ModelLoader, RepositoryEntry, check_cancelled,
};
pub use server::{
    BoundServer, InheritedSockets, PlanFn, RunningServer, Server, ServerError, ServerOptions,
};
pub use telemetry::{Sampler, TelemetryOptions};
pub use tls::{TlsIdentity, TlsOptions, write_self_signed};
