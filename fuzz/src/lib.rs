//! Fuzzing: one function per target, called by two drivers.
//!
//! `fuzz_driver` runs on any toolchain and edits the corpus at random; `./test` runs every target
//! for seconds with it. `cargo xtask fuzz` builds the same targets with coverage counters and
//! libFuzzer, and runs them for hours. [`targets::TARGETS`] lists them.

pub mod allocations;
#[allow(unsafe_code)]
pub mod allocator;
pub mod driver;
pub mod generate;
#[cfg(feature = "libfuzzer")]
pub mod libfuzzer;
pub mod mutate;
pub mod protobuf;
pub mod supervisor;
pub mod targets;
pub mod watch;
