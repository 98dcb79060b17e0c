//! Everything at once on streams of its own, as TensorRT runs them.

use super::{Beside, Policy, Rules, Start, Streams};

/// Nobody waits for anybody, and the hardware shares as it likes.
#[derive(Clone, Copy, Debug)]
pub struct FreeStreams;

impl Policy for FreeStreams {
    fn name(&self) -> &'static str {
        "free_streams"
    }

    fn rules(&self) -> Rules {
        Rules {
            streams: Streams::Many,
            leave: None,
            start: Start::AtOnce,
            beside: Beside::Everything,
            high_priority: false,
            best_effort: true,
        }
    }
}
