//! Basics that all other crates use: units, clocks, random numbers, bounded queues and histograms.
//!
//! Nothing here depends on models, devices or requests.

pub mod clock;
pub mod histogram;
pub mod queue;
pub mod random;
pub mod units;

pub use clock::{Clock, ManualClock, MonotonicClock};
pub use histogram::Histogram;
pub use queue::BoundedQueue;
pub use random::Random;
pub use units::{Bytes, Nanos};
