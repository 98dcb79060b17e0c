//! Makes a library of kernels on a machine with a compiler; no GPU is needed.

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use device::{DeviceError, KernelCompiler, LaunchChoices, thread_priority};
use model::LaunchPlan;
use model::gpu::{GpuTarget, Precision};

use crate::compile::cubin_cache::KeyBase;
use crate::compile::kernel_cache::{CompileProgress, KernelRequest};
use crate::compile::kernel_library::LibraryContents;
use crate::compile::kernel_text::{KernelClass, architecture, module_text};
use crate::compile::nvrtc::{self, Nvrtc};
use crate::compile::toolkit::Toolkit;
use crate::error::OpenError;
use crate::fault_injection;
use crate::measure::kernel_report::builtin_kernels;
use crate::program::lowering::{Sizes, example, first_of};
use crate::program::sizes_ahead::spread_sizes;
use crate::program::specialization::requests_of;

/// Numbers of SMs of usual GPUs, by capability: which variant is selected depends on it.
const MULTIPROCESSORS: [(u32, &[u32]); 6] = [
    (80, &[108]),
    (86, &[72, 82, 84]),
    (89, &[58, 128, 142]),
    (90, &[114, 132]),
    (100, &[148]),
    (120, &[170, 188]),
];

/// For capabilities that are not listed.
const OTHER_MULTIPROCESSORS: &[u32] = &[132];

/// A library that is being made, for GPUs of one capability after another.
pub struct LibraryBuilder<'a> {
    toolkit: Toolkit,
    compiler: &'a dyn KernelCompiler,
    contents: LibraryContents,
}

/// Kernels for one capability, in the order they were asked for.
pub struct KernelList {
    capability: u32,
    requests: Vec<KernelRequest>,
    known: HashSet<KernelRequest>,
}

/// The capability that NVRTC's name of an architecture stands for: 90 for `sm_90a`.
pub fn capability_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix("sm_")?.trim_end_matches('a');
    let capability = digits.parse().ok()?;
    (name == architecture(capability) || digits == &name[3..]).then_some(capability)
}

/// The targets that plans for GPUs of `capability` are lowered for.
pub fn usual_targets(capability: u32, precision: Precision) -> Vec<GpuTarget> {
    let listed = MULTIPROCESSORS.iter().find(|(known, _)| *known == capability);
    let counts = listed.map_or(OTHER_MULTIPROCESSORS, |(_, counts)| counts);
    let target = |multiprocessors: &u32| GpuTarget {
        capability,
        multiprocessors: *multiprocessors,
        precision,
    };
    counts.iter().map(target).collect()
}

impl KernelList {
    /// A list for GPUs of `capability`, with the kernels of the device itself.
    pub fn new(capability: u32) -> KernelList {
        let mut list = KernelList { capability, requests: Vec::new(), known: HashSet::new() };
        let own = builtin_kernels().into_iter().chain([fault_injection::kernel()]);
        list.add(own.map(|kernel| (kernel, KernelClass::RealTime)));
        list
    }

    /// Number of kernels.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds the kernels that `plan` selects on `target`: at the sizes `set`, at those that are
    /// guessed for symbols without one when a model is loaded, and at sizes that are spread over
    /// what requests may bring. Fails with the first step that has no kernel.
    pub fn add_plan(
        &mut self,
        compiler: &dyn KernelCompiler,
        plan: &LaunchPlan,
        target: &GpuTarget,
        set: &[Sizes],
    ) -> Result<(), DeviceError> {
        let none = [Sizes::new()];
        for set in if set.is_empty() { &none } else { set } {
            if let Some((_, gpu)) = example(compiler, target, plan, set).map_err(first_of)? {
                self.add(requests_of(&gpu).into_iter());
            }
        }
        let Some(template) = compiler.template(plan, target) else { return Ok(()) };
        for sizes in spread_sizes(plan) {
            // Sizes beyond what the model was made for are refused, and so are too small ones.
            if let Ok(gpu) = template.lower_with(&sizes, LaunchChoices::Fastest) {
                self.add(requests_of(&gpu).into_iter());
            }
        }
        Ok(())
    }

    fn add(&mut self, requests: impl Iterator<Item = KernelRequest>) {
        for request in requests {
            if self.known.insert(request.clone()) {
                self.requests.push(request);
            }
        }
    }
}

impl<'a> LibraryBuilder<'a> {
    /// An empty library of kernels that `compiler` writes; `toolkit` is tried before the usual
    /// folders.
    pub fn new(
        toolkit: Option<&Path>,
        compiler: &'a dyn KernelCompiler,
    ) -> Result<LibraryBuilder<'a>, OpenError> {
        let toolkit = Toolkit::find(toolkit)?;
        let version = nvrtc::version().map_err(OpenError::NoCompiler)?;
        Ok(LibraryBuilder { toolkit, compiler, contents: LibraryContents::new(version) })
    }

    /// Compiles all kernels of `list` on several threads. The first one that the compiler refuses
    /// ends it.
    pub fn compile(
        &mut self,
        list: &KernelList,
        progress: CompileProgress<'_>,
    ) -> Result<(), String> {
        let (architecture, headers) = (architecture(list.capability), self.compiler.headers());
        let nvrtc = Nvrtc::new(&self.toolkit, architecture.clone(), headers)?;
        let parts = nvrtc::identity(nvrtc.version(), &architecture, headers);
        let keys = KeyBase::of(parts.iter().map(Vec::as_slice));
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let result = Mutex::new(Ok(&mut self.contents));
        let one = |(kernel, class): &KernelRequest| -> Result<(), String> {
            let text = module_text(kernel, *class);
            let compiled = nvrtc.compile(&text);
            let failed = |why: String| format!("{} for {architecture}: {why}", kernel.expression);
            let cubin = compiled.map_err(failed)?.cubin;
            let mut result = result.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *result {
                Ok(contents) => contents.add(keys.key(&[text.as_bytes()]), &cubin).map_err(failed),
                Err(_) => Ok(()),
            }
        };
        let work = || {
            thread_priority::lower_computation();
            while let Some(request) = list.requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(why) = one(request) {
                    next.store(list.requests.len(), Ordering::Relaxed);
                    let mut result = result.lock().unwrap_or_else(PoisonError::into_inner);
                    if result.is_ok() {
                        *result = Err(why);
                    }
                }
                progress(done.fetch_add(1, Ordering::Relaxed) + 1, list.requests.len());
            }
        };
        std::thread::scope(|scope| {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            (0..threads.min(list.requests.len())).for_each(|_| drop(scope.spawn(work)));
        });
        result.into_inner().unwrap_or_else(PoisonError::into_inner).map(|_| ())
    }

    /// Number of kernels, and bytes of the file.
    pub fn size(&self) -> (usize, u64) {
        (self.contents.len(), self.contents.stored_bytes())
    }

    /// Writes the library.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        self.contents.write(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::kernel_sources::{KernelSources, Source};
    use crate::options::CudaOptions;
    use crate::toy::{Chain, ToyCompiler};

    #[test]
    fn architectures_are_named_as_nvrtc_does() {
        assert_eq!(capability_of("sm_90a"), Some(90));
        assert_eq!(capability_of("sm_90"), Some(90));
        assert_eq!(capability_of("sm_80"), Some(80));
        assert_eq!(capability_of("sm_120a"), Some(120));
        for wrong in ["sm_80a", "90", "sm_", "sm_9x", "compute_90", "sm_90aa"] {
            assert_eq!(capability_of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn usual_gpus_of_a_capability_are_targets() {
        let counts = |capability| -> Vec<u32> {
            let targets = usual_targets(capability, Precision::F16);
            targets.iter().map(|target| target.multiprocessors).collect()
        };
        assert_eq!(counts(90), [114, 132]);
        assert_eq!(counts(103), [132]);
    }

    #[test]
    fn a_plan_adds_each_of_its_kernels_once() {
        let plan = Chain::default().plan();
        let target = usual_targets(90, Precision::F32)[0];
        let mut list = KernelList::new(90);
        let own = list.len();
        list.add_plan(&ToyCompiler, &plan, &target, &[]).expect("it has kernels");
        let all = list.len();
        assert!(all > own, "a kernel for real time and one for best effort");
        list.add_plan(&ToyCompiler, &plan, &target, &[]).expect("it has kernels");
        assert_eq!(list.len(), all);
    }

    /// Needs NVRTC: the library that it makes has what a device without NVRTC asks for.
    #[test]
    fn a_library_has_the_kernels_of_its_list() {
        let mut builder = match LibraryBuilder::new(None, &ToyCompiler) {
            Ok(builder) => builder,
            Err(err) => return println!("skipped: {err}"),
        };
        let mut list = KernelList::new(90);
        let target = usual_targets(90, Precision::F32)[0];
        let plan = Chain::default().plan();
        list.add_plan(&ToyCompiler, &plan, &target, &[]).expect("it has kernels");
        builder.compile(&list, &|_, _| {}).expect("cubins");
        assert_eq!(builder.size().0, list.len());
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("kernels.bin");
        builder.write(&path).expect("a write");
        let options = CudaOptions { kernel_library: Some(path), ..CudaOptions::default() };
        let headers = ToyCompiler.headers();
        let missing = Err(OpenError::NoCompiler("no NVRTC".to_string()));
        let sources = KernelSources::with_toolkit(missing, &options, "sm_90a".to_string(), headers)
            .expect("a library");
        for (kernel, class) in &list.requests {
            let cubin = sources.stored(Source::Library, &module_text(kernel, *class));
            assert_eq!(cubin.expect("it is there")[..4], *b"\x7fELF");
        }
    }
}
