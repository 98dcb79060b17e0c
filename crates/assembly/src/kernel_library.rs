//! Libraries of GPU kernels that are compiled ahead, and where a server finds one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compiler::gpu::GpuCompiler;
use cpu::{CpuDevice, CpuOptions};
use cuda::{AbsentGpu, KernelList, LibraryBuilder};
use device::hybrid::HybridDevice;
use device::hybrid::section::Side;
use device::{Device, KernelCompiler};
use model::LaunchPlan;
use model::gpu::{GpuTarget, Precision};

use crate::compile::CpuEvaluator;
use crate::failure::Failure;
use crate::progress::{self, Progress};
use crate::{compile_bytes, compile_file, demo_model, sample_inputs};

/// The library's name beside the binary.
pub const FILE_NAME: &str = "atoll-kernels.bin";

/// What a library is made of.
pub struct LibraryOptions {
    /// ONNX files; the demo's model is always added.
    pub models: Vec<PathBuf>,
    /// Compute capabilities, 90 for 9.0.
    pub capabilities: Vec<u32>,
    /// Storage of activations and weights.
    pub precision: Precision,
    /// Batches for which models are loaded.
    pub batches: Vec<usize>,
    /// Sizes of other symbolic dimensions.
    pub bindings: sample_inputs::Bindings,
    /// Folder of a CUDA toolkit.
    pub toolkit: Option<PathBuf>,
}

/// A library that was made.
pub struct LibraryReport {
    /// Kernels, for all architectures.
    pub kernels: usize,
    /// Their bytes in the file.
    pub bytes: u64,
    /// Models without kernels, and why.
    pub refused: Vec<String>,
}

/// [`FILE_NAME`] beside this binary, if it is there.
pub fn beside_binary() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name(FILE_NAME);
    path.is_file().then_some(path)
}

/// Compiles the kernels that models select and writes them to `output`. No GPU is needed. A model
/// that has none is left out and reported.
///
/// # Errors
/// When there is no compiler, a kernel is refused by it, or the file cannot be written.
pub fn build(options: &LibraryOptions, output: &Path) -> Result<LibraryReport, Failure> {
    let compiler = Arc::new(GpuCompiler::new(Some(Arc::new(CpuEvaluator::default()))));
    let mut builder = LibraryBuilder::new(options.toolkit.as_deref(), &*compiler)
        .map_err(|err| Failure::usage(err.to_string()))?;
    let mut lists: Vec<KernelList> =
        options.capabilities.iter().map(|capability| KernelList::new(*capability)).collect();
    let mut refused = Vec::new();
    for (name, plan) in plans(&options.models) {
        let added = plan.and_then(|plan| {
            let all = lists.iter_mut().zip(&options.capabilities);
            let mut each = all.map(|(list, capability)| {
                cuda::usual_targets(*capability, options.precision)
                    .into_iter()
                    .try_for_each(|target| add(list, &compiler, &plan, target, options))
            });
            each.try_for_each(|added| added)
        });
        match added {
            Ok(()) => progress::note(&format!("{name}: kernels selected")),
            Err(why) => refused.push(format!("{name}: {why}")),
        }
    }
    for (list, capability) in lists.iter().zip(&options.capabilities) {
        let bar = Progress::new(list.len() as u64, "kernels");
        bar.describe(&format!("compute capability {}.{} ", capability / 10, capability % 10));
        builder.compile(list, &|done, all| bar.set(done, all)).map_err(Failure::failed)?;
    }
    let failed = |err| Failure::failed(format!("{}: {err}", output.display()));
    builder.write(output).map_err(failed)?;
    let (kernels, bytes) = builder.size();
    Ok(LibraryReport { kernels, bytes, refused })
}

/// The models' plans one after another, by their names; first that of the demo.
fn plans(
    models: &[PathBuf],
) -> impl Iterator<Item = (String, Result<Arc<LaunchPlan>, String>)> + '_ {
    let demo = || compile_bytes(demo_model::DIGITS_ONNX).map_err(|err| err.to_string());
    let demo = std::iter::once_with(move || ("the demo's model".to_string(), demo()));
    let files = models.iter().map(|path| {
        (path.display().to_string(), compile_file(path).map_err(|err| err.to_string()))
    });
    demo.chain(files).map(|(name, plan)| (name, plan.map(Arc::new)))
}

/// Adds the kernels that `plan` selects on `target`; where steps run on the host, those of its
/// sections.
fn add(
    list: &mut KernelList,
    compiler: &Arc<GpuCompiler>,
    plan: &Arc<LaunchPlan>,
    target: GpuTarget,
    options: &LibraryOptions,
) -> Result<(), String> {
    let sets = sizes(plan, options);
    let absent =
        AbsentGpu::new(target, compiler.clone(), sets.first().cloned().unwrap_or_default());
    let host: Arc<dyn Device> = Arc::new(CpuDevice::new(CpuOptions::default()));
    let sections = HybridDevice::new(Arc::new(absent), host).sections(plan);
    let compiler: &dyn KernelCompiler = &**compiler;
    let added = match sections.map_err(|err| err.to_string())? {
        None => list.add_plan(compiler, plan, &target, &sets),
        Some(sections) => sections
            .iter()
            .filter(|section| section.side == Side::Accelerator)
            .try_for_each(|section| list.add_plan(compiler, &section.plan, &target, &sets)),
    };
    added.map_err(|err| err.to_string())
}

/// The sizes that `plan` is loaded for: every batch, with the bindings. Other symbols are guessed,
/// as when the model is loaded.
fn sizes(plan: &LaunchPlan, options: &LibraryOptions) -> Vec<Vec<(String, usize)>> {
    let symbols = sample_inputs::symbols(plan);
    let bound = |batch: Option<(String, usize)>| -> Vec<(String, usize)> {
        let known = options.bindings.iter().filter(|(name, _)| symbols.contains(&name.as_str()));
        let bound = known.map(|(name, size)| (name.clone(), *size));
        let is_bound = |name: &String| options.bindings.contains_key(name);
        bound.chain(batch.filter(|(name, _)| !is_bound(name))).collect()
    };
    match sample_inputs::batch_symbol(plan) {
        None => vec![bound(None)],
        Some(symbol) => {
            let batches = options.batches.iter();
            batches.map(|batch| bound(Some((symbol.clone(), *batch)))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(bindings: &[(&str, usize)]) -> LibraryOptions {
        LibraryOptions {
            models: Vec::new(),
            capabilities: vec![90],
            precision: Precision::F16,
            batches: vec![1, 8],
            bindings: bindings.iter().map(|(name, size)| ((*name).to_string(), *size)).collect(),
            toolkit: None,
        }
    }

    #[test]
    fn the_demos_model_is_lowered_for_every_batch() {
        let (name, plan) = plans(&[]).next().expect("the demo's model");
        assert_eq!(name, "the demo's model");
        let plan = plan.expect("a plan");
        let symbol = sample_inputs::batch_symbol(&plan).expect("a batch");
        assert_eq!(
            sizes(&plan, &options(&[("other", 3)])),
            [[(symbol.clone(), 1)], [(symbol.clone(), 8)]]
        );
        assert_eq!(sizes(&plan, &options(&[(symbol.as_str(), 3)]))[1], [(symbol.clone(), 3)]);
        let compiler = Arc::new(GpuCompiler::new(Some(Arc::new(CpuEvaluator::default()))));
        let mut list = KernelList::new(90);
        let own = list.len();
        let target = GpuTarget { capability: 90, multiprocessors: 132, precision: Precision::F16 };
        add(&mut list, &compiler, &plan, target, &options(&[])).expect("it has kernels");
        assert!(list.len() > own);
    }

    #[test]
    fn a_model_that_cannot_be_read_is_reported() {
        let missing = [PathBuf::from("missing.onnx")];
        let (name, plan) = plans(&missing).nth(1).expect("the file");
        assert_eq!(name, "missing.onnx");
        assert!(plan.is_err());
    }
}
