//! Lowers ONNX models to GPU kernels and reports the result.
//!
//! `modules FILE SYMBOL=SIZE...` prints every step with its first variant; `--totals` only the
//! totals; `--sources=FOLDER` writes the text of every kernel there.

use std::hash::{Hash, Hasher};
use std::path::Path;

use compiler::gpu::GpuCompiler;
use device::KernelCompiler;
use model::gpu::{GpuTarget, Kernel, KernelFacts, Precision};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let totals_only = arguments.iter().any(|argument| argument == "--totals");
    let sources = arguments.iter().find_map(|argument| argument.strip_prefix("--sources="));
    let sizes: Vec<(String, usize)> = arguments
        .iter()
        .filter_map(|argument| argument.split_once('='))
        .filter_map(|(name, size)| Some((name.to_string(), size.parse().ok()?)))
        .collect();
    for file in arguments.iter().filter(|argument| argument.ends_with(".onnx")) {
        show(Path::new(file), &sizes, totals_only, sources.map(Path::new));
    }
}

fn show(path: &Path, sizes: &[(String, usize)], totals_only: bool, sources: Option<&Path>) {
    let plan = match compiler::compile_onnx_file(path, &graph::Limits::default(), None) {
        Ok(plan) => plan,
        Err(error) => return println!("{}: {error}", path.display()),
    };
    let precision = Precision::F16;
    let target = GpuTarget { capability: 90, multiprocessors: 132, precision };
    match GpuCompiler::default().lower(&plan, sizes, &target) {
        Err(errors) => {
            println!("{}: {} steps without kernels", path.display(), errors.len());
            for error in errors.iter().take(if totals_only { 5 } else { usize::MAX }) {
                println!("  {error}");
            }
        }
        Ok(gpu) => {
            for kernel in sources.iter().flat_map(|_| &gpu.kernels) {
                write_source(sources.unwrap_or(path), kernel);
            }
            for (index, step) in gpu.steps.iter().enumerate().filter(|_| !totals_only) {
                let launch = &step.choices[step.rt];
                println!(
                    "{index:4} {:18} {:16} {:6} tiles  {}",
                    step.op, launch.variant, launch.tiles, step.signature
                );
            }
            println!(
                "{}: {} steps, {} kernels, {} weights, arena {} KiB, workspace at most {} KiB, \
                 run {} KiB",
                path.display(),
                gpu.steps.len(),
                gpu.kernels.len(),
                gpu.weights.len(),
                gpu.arena_bytes >> 10,
                gpu.workspace_bytes >> 10,
                cuda::run_bytes(&gpu) >> 10
            );
        }
    }
}

/// One module with the real-time and best-effort entry points, named by its content.
fn write_source(folder: &Path, kernel: &Kernel) {
    let KernelFacts { source, expression, threads, shared_bytes, args_bytes } = &**kernel;
    let text = format!(
        "#include \"entry.cuh\"\n{source}\nusing Op = {expression};\n\
         TILES_EXPECT(Op, {threads}, {shared_bytes}, {args_bytes});\n\
         TILES_REAL_TIME(Op)\nTILES_BEST_EFFORT(Op)\n"
    );
    let mut hash = std::hash::DefaultHasher::new();
    text.hash(&mut hash);
    let name = folder.join(format!("{:016x}.cu", hash.finish()));
    if let Err(error) = std::fs::write(&name, text) {
        println!("{}: {error}", name.display());
    }
}
