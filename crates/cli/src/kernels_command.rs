//! `atoll kernels`: makes libraries of GPU kernels that are compiled ahead.

use std::path::{Path, PathBuf};

use assembly::kernel_library::{self, LibraryOptions};
use assembly::{Failure, PrecisionArg, sample_inputs};
use base::Bytes;
use clap::{Args, Subcommand};
use serde::Serialize;

/// How deep folders are searched for models.
const MAX_DEPTH: usize = 4;

#[derive(Clone, Debug, Args)]
pub(crate) struct KernelsArgs {
    #[command(subcommand)]
    command: KernelsCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum KernelsCommand {
    /// Compile the kernels of models into a library, for machines without NVRTC
    Build(BuildArgs),
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  atoll kernels build --output atoll-kernels.bin --arch sm_90a models
  atoll kernels build --output k.bin --arch sm_80,sm_86,sm_89 --batches 1,8,32 resnet50.onnx
  atoll serve --device cuda:0 --kernel-library k.bin

It needs NVRTC and its headers, and no GPU: the PyPI packages nvidia-cuda-nvrtc,
nvidia-cuda-runtime and nvidia-cuda-crt will do. A library called atoll-kernels.bin beside the
binary is found without a flag. It belongs to this version of atoll: others ignore its kernels.")]
struct BuildArgs {
    /// ONNX files, and folders that are searched for them
    models: Vec<PathBuf>,

    /// The library to write
    #[arg(long, value_name = "FILE")]
    output: PathBuf,

    /// Architectures of GPUs, such as sm_90a
    #[arg(long, value_name = "ARCH", value_delimiter = ',', required = true)]
    #[arg(value_parser = architecture)]
    arch: Vec<u32>,

    /// Number format in which GPUs store and multiply
    #[arg(long, env = "ATOLL_PRECISION", value_enum, default_value_t)]
    precision: PrecisionArg,

    /// Batches that models are loaded for. Kernels of other usual batches and lengths are added
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_values_t = [1u32])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    batches: Vec<u32>,

    /// Size of another symbolic dimension, as SYMBOL=SIZE; may be given several times
    #[arg(long, value_name = "SYMBOL=SIZE")]
    bind: Vec<String>,

    /// CUDA toolkit with NVRTC and its headers [default: searched for in the usual folders]
    #[arg(long, env = "ATOLL_CUDA_TOOLKIT", value_name = "FOLDER")]
    cuda_toolkit: Option<PathBuf>,

    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct BuildReport {
    output: String,
    kernels: usize,
    bytes: u64,
    /// Models whose kernels are not in the library, and why.
    refused: Vec<String>,
}

/// The capability of an architecture.
fn architecture(name: &str) -> Result<u32, String> {
    cuda::capability_of(name)
        .ok_or_else(|| format!("'{name}' is no architecture; write it like sm_80 or sm_90a"))
}

/// Runs the command.
pub(crate) fn run(args: &KernelsArgs) -> Result<(), Failure> {
    let KernelsCommand::Build(args) = &args.command;
    let mut models = Vec::new();
    for path in &args.models {
        collect(path, MAX_DEPTH, &mut models)
            .map_err(|err| Failure::usage(format!("{}: {err}", path.display())))?;
    }
    let options = LibraryOptions {
        models,
        capabilities: args.arch.clone(),
        precision: args.precision.into(),
        batches: args.batches.iter().map(|batch| *batch as usize).collect(),
        bindings: sample_inputs::parse_bindings(&args.bind)?,
        toolkit: args.cuda_toolkit.clone(),
    };
    let made = kernel_library::build(&options, &args.output)?;
    let report = BuildReport {
        output: args.output.display().to_string(),
        kernels: made.kernels,
        bytes: made.bytes,
        refused: made.refused,
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).map_err(Failure::failed)?);
    } else {
        println!("{}: {} kernels, {}", report.output, report.kernels, Bytes(report.bytes));
        report.refused.iter().for_each(|why| println!("left out: {why}"));
    }
    match report.refused.is_empty() {
        true => Ok(()),
        false => Err(Failure::failed(format!("{} models were left out", report.refused.len()))),
    }
}

/// Adds `path`, or the ONNX files below it in the order of their names.
fn collect(path: &Path, depth: usize, models: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if !path.is_dir() {
        std::fs::metadata(path)?;
        models.push(path.to_path_buf());
        return Ok(());
    }
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(path)? {
        entries.push(entry?.path());
    }
    entries.sort();
    for entry in entries {
        let is_model = entry.extension().is_some_and(|extension| extension == "onnx");
        if is_model || (entry.is_dir() && depth > 0) {
            collect(&entry, depth.saturating_sub(1), models)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_searched_for_onnx_files() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let deep = folder.path().join("b/1");
        std::fs::create_dir_all(&deep).expect("a folder");
        for file in ["b/1/model.onnx", "a.onnx", "a.txt"] {
            std::fs::write(folder.path().join(file), "").expect("a file");
        }
        let mut models = Vec::new();
        collect(folder.path(), MAX_DEPTH, &mut models).expect("readable");
        assert_eq!(models, [folder.path().join("a.onnx"), deep.join("model.onnx")]);
        assert!(collect(&folder.path().join("missing.onnx"), MAX_DEPTH, &mut models).is_err());
    }

    #[test]
    fn architectures_are_checked() {
        assert_eq!(architecture("sm_90a"), Ok(90));
        assert!(architecture("hopper").is_err_and(|err| err.contains("sm_90a")));
    }
}
