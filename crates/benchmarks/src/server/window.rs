//! The measured part of a turn.

use std::time::Duration;

/// When answers of a turn begin to count, and for how long they do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) ramp: Duration,
    pub(crate) counted: Duration,
}

impl Window {
    pub(crate) fn of(seconds: f64) -> Window {
        let counted = Duration::from_secs_f64(seconds);
        Window { ramp: (counted / 4).min(Duration::from_millis(300)), counted }
    }
}
