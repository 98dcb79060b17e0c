//! The suite every device passes.
