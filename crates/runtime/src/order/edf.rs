//! Earliest deadline first.

use super::{ExecutionOrder, OrderedRequest};

/// By deadline; requests without one start last.
#[derive(Clone, Copy, Debug)]
pub struct Edf;

impl ExecutionOrder for Edf {
    fn name(&self) -> &'static str {
        "edf"
    }

    fn key(&self, request: &OrderedRequest) -> u64 {
        request.deadline.0
    }
}
