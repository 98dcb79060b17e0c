//! The runtime of a server: what runs next on each of its devices.
//!
//! - [`core`] decides, as a pure state machine without device, thread or clock;
//! - [`policy`] holds the rules by which real time and best effort share a device;
//! - [`order`] holds the execution orders of real time;
//! - [`batching`] holds the batching policies;
//! - [`node`] drives a core with a device and a clock;
//! - [`device_group`] routes requests to the nodes of a server;
//! - [`spans`] records what became of requests, and explains it.
//!
//! The core takes events and returns actions. Here real time preempts best effort:
//!
//! ```
//! use base::Nanos;
//! use model::config::Class;
//! use runtime::core::{Action, Core, CoreOptions, Event, ModelId, QueueLayout};
//!
//! // Queue 0 is for real time, queue 1 for best effort.
//! let queues = QueueLayout { shared: 0, real_time: 1, best_effort: 1, yielding: 0 };
//! let mut core = Core::new(CoreOptions { queues, ..CoreOptions::default() });
//! let model = ModelId(0);
//! let mut actions = Vec::new();
//! core.step(Nanos(0), Event::ModelAdded { model, steps: 4, queue_capacity: 16 }, &mut actions);
//!
//! let mut arrive = |class: Class| {
//!     let request = core.next_request_id().expect("below the limit");
//!     let (priority, deadline) = (1, Nanos::MAX);
//!     let arrival = Event::Arrival { request, model, class, priority, deadline };
//!     let mut actions = Vec::new();
//!     core.step(Nanos(1), arrival, &mut actions);
//!     actions
//! };
//! let best_effort = arrive(Class::BestEffort);
//! assert!(matches!(best_effort[..], [Action::Launch { queue: 1, .. }]));
//! let real_time = arrive(Class::RealTime);
//! assert!(matches!(
//!     real_time[..],
//!     [Action::Preempt { queue: 1, .. }, Action::Launch { queue: 0, .. }]
//! ));
//! ```

pub mod batching;
pub mod core;
pub mod device_group;
pub mod node;
pub mod order;
pub mod policy;
pub mod spans;

pub use device_group::{DeviceGroup, DeviceGroupOptions, PlacedProgram};
pub use node::{
    BatchTime, DeviceTotals, LockContention, ModelKey, ModelStats, Node, NodeError, NodeMemory,
    NodeOptions, Observer, Preemption, PreemptionLog, PreemptionStats, Rejection, Reply,
    ReplyResult, Request, RequestHandle, RequestTotals, StepTimes, StepTimesError, SwapStats,
    Timing,
};
