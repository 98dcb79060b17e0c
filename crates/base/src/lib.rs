//! The substrate every other crate stands on: units, time, randomness, bounds and histograms.
//!
//! Nothing here knows of models, devices or requests.

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
