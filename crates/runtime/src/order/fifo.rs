//! First in, first out.

use super::{ExecutionOrder, OrderedRequest};

/// By arrival alone.
#[derive(Clone, Copy, Debug)]
pub struct Fifo;

impl ExecutionOrder for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn key(&self, _request: &OrderedRequest) -> u64 {
        0
    }
}
