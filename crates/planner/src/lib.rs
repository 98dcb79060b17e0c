//! Plans how services run on few GPUs: slices, batches and processes. Pure solvers and an
//! independent checker.
//!
//! The crate does no IO and reads no clock; time comes in through [`SearchControl`].
//!
//! [`certified::plan`] makes a plan and proves a lower bound on the number of GPUs; [`check()`]
//! validates a plan independently; [`run`] runs any of the algorithms.
//!
//! ```
//! use base::ManualClock;
//! use planner::{GpuKind, Problem, Profiles, PlanRules, SearchControl, Service, certified, check};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Measured: on one or two compute slices, with batches of 4 in one process.
//! let profiles = Profiles::from_csv(
//!     "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n\
//!      resnet,1,4,1,200,20\n\
//!      resnet,2,4,1,380,10.5\n",
//! )?;
//! let service = Service {
//!     name: "photos".to_string(),
//!     model: "resnet".to_string(),
//!     rate: 1300.0,
//!     slo_ms: 100.0,
//! };
//! let gpu = GpuKind::find("a100-80gb")?;
//! let problem = Problem { gpu, services: vec![service], profiles, rules: PlanRules::default() };
//!
//! let clock = ManualClock::default();
//! let mut report = |_progress| true; // `false` would stop the search.
//! let solution = certified::plan(&problem, &mut SearchControl::new(&clock, &mut report))?;
//! assert_eq!(solution.plan.gpus.len(), 1);
//! assert_eq!(solution.lower_bound, 1);
//! assert!(check(&problem, &solution.plan).is_empty());
//!
//! // The certificate can be verified without a plan.
//! assert!((certified::bound_at(&problem, &solution.prices) - solution.bound).abs() < 1e-6);
//! # Ok(())
//! # }
//! ```

pub mod algorithm;
pub mod apply;
pub mod baseline;
pub mod certified;
pub mod check;
mod error;
pub mod gpu;
pub mod gpu_mix;
pub mod json_file;
pub mod parvagpu;
pub mod plan;
pub mod problem;
pub mod profile;
pub mod query;
pub mod render;
pub mod replan;
pub mod scenario;
pub mod search_control;
pub mod service_file;
mod simplex;
pub mod squishy;
pub mod sweep;
mod toml_file;
pub mod traffic;
pub mod verify;

pub use algorithm::{Algorithm, PlannerOutput, run};
pub use check::{Violation, check};
pub use error::PlanError;
pub use gpu::GpuKind;
pub use plan::Plan;
pub use problem::{PlanRules, Problem, Service, Sharing};
pub use profile::{OperatingPoint, ProfileTable, Profiles};
pub use search_control::{SearchControl, SearchProgress};
pub use service_file::{ServiceList, ServiceTerms};
