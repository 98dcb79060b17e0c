//! The measured part of a measurement.

use std::time::Duration;

/// When replies begin to count, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeasuredWindow {
    pub(crate) ramp: Duration,
    pub(crate) counted: Duration,
}

impl MeasuredWindow {
    pub(crate) fn of(seconds: f64) -> MeasuredWindow {
        let counted = Duration::from_secs_f64(seconds);
        MeasuredWindow { ramp: (counted / 4).min(Duration::from_millis(300)), counted }
    }
}
