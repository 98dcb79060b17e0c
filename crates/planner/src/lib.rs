//! How few GPUs, in which slices, with which batches and processes: pure solvers, and a checker apart from them.
//!
//! The crate does no IO and reads no clock. What it needs to know of time comes in through [`Watch`].

pub mod algorithm;
pub mod apply;
pub mod baseline;
pub mod certified;
pub mod check;
mod error;
pub mod gpu;
pub mod parvagpu;
pub mod plan;
pub mod problem;
pub mod profile;
pub mod query;
pub mod render;
pub mod replan;
pub mod scenario;
mod simplex;
pub mod squishy;
pub mod watch;

pub use algorithm::{Algorithm, Answer, run};
pub use check::{Violation, check};
pub use error::PlanError;
pub use gpu::GpuKind;
pub use plan::Plan;
pub use problem::{Problem, Rules, Service, Sharing};
pub use profile::{Point, Profiles};
pub use watch::{Progress, Watch};
