//! Compiles kernels on a machine without a GPU and reports what the compiler says of them.

use std::path::Path;

use model::gpu::Kernel;

use crate::compile::kernel_text::{architecture, whole_text};
use crate::compile::nvrtc::Nvrtc;
use crate::compile::toolkit::Toolkit;
use crate::error::OpenError;
use crate::measure::{conformance, start_probe};
use crate::memory::input_copier;

/// What one entry point of a kernel's module needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryFacts {
    /// `rt`, `be`, `be_grid` or `be_long`.
    pub entry: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes a thread spills.
    pub spilled_bytes: u32,
}

/// Kernels of the device itself, which belong to no plan.
pub fn builtin_kernels() -> Vec<Kernel> {
    vec![input_copier::kernel(), start_probe::kernel(), conformance::kernel()]
}

/// Compiles kernels and discards the cubins.
pub struct KernelReport {
    nvrtc: Nvrtc,
}

impl KernelReport {
    /// For GPUs of `capability`, 90 for 9.0. `toolkit` is tried before the usual folders.
    pub fn new(
        toolkit: Option<&Path>,
        capability: u32,
        headers: &[(&str, &str)],
    ) -> Result<KernelReport, OpenError> {
        let toolkit = Toolkit::find(toolkit)?;
        let nvrtc = Nvrtc::new(&toolkit, architecture(capability), headers)
            .and_then(|nvrtc| nvrtc.with_option("--ptxas-options=-v"))
            .map_err(OpenError::NoCompiler)?;
        Ok(KernelReport { nvrtc })
    }

    /// Both classes of `kernel`; the error is the compiler's message.
    pub fn facts(&self, kernel: &Kernel) -> Result<Vec<EntryFacts>, String> {
        Ok(parse(&self.nvrtc.compile(&whole_text(kernel))?.log))
    }
}

/// Parses the assembler's lines: entry point, spills, registers.
fn parse(log: &str) -> Vec<EntryFacts> {
    let mut facts: Vec<EntryFacts> = Vec::new();
    for line in log.lines() {
        if let Some(name) = between(line, "Compiling entry function '", "'") {
            let entry = name.to_string();
            facts.push(EntryFacts { entry, registers: 0, spilled_bytes: 0 });
        }
        let Some(last) = facts.last_mut() else { continue };
        if let Some(bytes) = between(line, "stack frame, ", " bytes spill stores") {
            last.spilled_bytes = bytes.parse().unwrap_or(u32::MAX);
        }
        if let Some(registers) = between(line, "Used ", " registers") {
            last.registers = registers.parse().unwrap_or(u32::MAX);
        }
    }
    facts
}

fn between<'a>(line: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let rest = &line[line.find(before)? + before.len()..];
    Some(&rest[..rest.find(after)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_assemblers_lines() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'be' for 'sm_90a'\n\
            ptxas info    : Function properties for be\n    \
            16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 168 registers, used 1 barriers, 64 bytes smem\n";
        let want = EntryFacts { entry: "be".to_string(), registers: 168, spilled_bytes: 12 };
        assert_eq!(parse(log), [want]);
    }
}
