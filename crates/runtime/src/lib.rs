//! One node: what runs next on its devices, decided by a pure core and carried out by a thin driver.

pub mod batching;
pub mod core;
pub mod device_group;
pub mod node;
pub mod order;
pub mod policy;

pub use device_group::{DeviceGroup, DeviceGroupOptions, PlacedProgram};
pub use node::{
    BatchTime, LockContention, ModelKey, ModelStats, Node, NodeError, NodeMemory, NodeOptions,
    Observer, Preemption, PreemptionLog, PreemptionStats, Rejection, Reply, ReplyResult, Request,
    RequestHandle, SwapStats, Timing,
};
