//! Measurements and checks on a GPU.

pub(crate) mod conformance;
mod copy_speed;
pub(crate) mod kernel_report;
pub(crate) mod padding;
pub(crate) mod profile;
pub(crate) mod start_probe;
pub(crate) mod timeline;
