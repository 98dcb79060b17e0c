//! Not there yet.

use super::{Kernel, StepFacts, no_kernel};

pub(crate) fn build(facts: &StepFacts) -> Result<Kernel, String> {
    Err(no_kernel(facts))
}
