//! Types that all crates share: data types, tensors, operators, launch plans, GPU plans, model
//! settings, model repositories, the registry and the budget of host memory.

pub mod config;
pub mod dim;
pub mod dtype;
pub mod durable;
pub mod excerpt;
pub mod gpu;
pub mod host_pool;
pub mod length_padding;
pub mod memory;
pub mod narrow;
pub mod op;
pub mod plan;
pub mod repository;
pub mod row_independence;
pub mod sample;
pub mod store;
mod strings;
pub mod tensor;

pub use config::ModelConfig;
pub use dtype::DataType;
pub use host_pool::{HostPool, HostPoolBuffer};
pub use memory::{HostMemory, MemoryError, Reservation};
pub use narrow::NarrowType;
pub use plan::{Dim, LaunchPlan, PlanError, Step, ValueId, ValueInfo};
pub use tensor::{Tensor, TensorData, TensorError};
