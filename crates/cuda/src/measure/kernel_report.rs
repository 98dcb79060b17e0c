//! Compiles kernels on a machine without a GPU and reports what the compiler says of them.

use std::collections::BTreeSet;
use std::path::Path;

use model::gpu::Kernel;

use crate::compile::cubin_cache::CacheKey;
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

    /// A digest of all that determines the facts of `kernel`: its text with the headers that it
    /// includes, less comments and layout, the architecture and the compiler's version.
    pub fn digest(&self, kernel: &Kernel) -> String {
        let mut lines = Vec::new();
        expand(&whole_text(kernel), &self.nvrtc, &mut BTreeSet::new(), &mut lines);
        let text = lines.join("\n").into_bytes();
        let mut parts = self.nvrtc.identity_without_headers();
        parts.push(text);
        CacheKey::of(parts.iter().map(Vec::as_slice)).hex()
    }
}

/// Appends the lines of `text` and of the headers that it includes, each header once.
fn expand<'a>(text: &str, nvrtc: &'a Nvrtc, seen: &mut BTreeSet<&'a str>, lines: &mut Vec<String>) {
    for line in text.lines() {
        let included = between(line, "#include \"", "\"").and_then(|name| nvrtc.header(name));
        if let Some((name, body)) = included {
            if seen.insert(name) {
                expand(body, nvrtc, seen, lines);
            }
            continue;
        }
        // A text in quotes may contain slashes.
        let code = if line.contains('"') { line } else { line.split("//").next().unwrap_or(line) };
        if !code.trim().is_empty() {
            lines.push(code.trim().to_string());
        }
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
