//! From the IR to a launch plan.
