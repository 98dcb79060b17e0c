//! Not there yet.

use super::{Kernel, StepFacts, no_kernel};

pub(crate) fn build(facts: &StepFacts, _unary: model::op::Unary) -> Result<Kernel, String> {
    Err(no_kernel(facts))
}
