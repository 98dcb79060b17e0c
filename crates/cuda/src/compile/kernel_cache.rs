//! The kernels of a device: loaded once, and taken from the device, from disk or from the compiler.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use device::thread_placement::{self, ThreadRole};
use device::{DeviceError, thread_priority};
use model::gpu::Kernel;

use crate::compile::kernel_sources::{KernelSources, Source, failed};
use crate::compile::kernel_text::{KernelClass, module_text};
use crate::driver::{Context, Function, Module};
use crate::error::CudaError;
use crate::preempt::rt_activity::RtActivity;

/// Compilations at the same time, at most; each takes a few hundred megabytes.
const MAX_COMPILERS: usize = 16;

/// How long the loading of a module waits for a gap in RT activity.
const GAP_WAIT: Duration = Duration::from_millis(20);

/// A kernel on the device.
pub(crate) struct LoadedKernel {
    /// Keeps the function loaded.
    _module: Module,
    function: Function,
}

impl LoadedKernel {
    /// The entry point of its class.
    pub(crate) fn function(&self) -> &Function {
        &self.function
    }
}

/// A kernel of one class.
pub(crate) type KernelRequest = (Kernel, KernelClass);

/// Receives how many kernels are compiled, and of how many.
pub type CompileProgress<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// All kernels of a device.
pub(crate) struct KernelCache {
    context: Arc<Context>,
    sources: KernelSources,
    threads: usize,
    rt_activity: Arc<RtActivity>,
    /// Kernels on the device, as long as a specialization uses them.
    loaded: Mutex<HashMap<KernelRequest, Weak<LoadedKernel>>>,
}

impl KernelCache {
    pub(crate) fn new(
        context: Arc<Context>,
        sources: KernelSources,
        rt_activity: Arc<RtActivity>,
    ) -> KernelCache {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let loaded = Mutex::new(HashMap::new());
        let threads = threads.min(MAX_COMPILERS);
        KernelCache { context, sources, threads, rt_activity, loaded }
    }

    pub(crate) fn compiler_version(&self) -> (i32, i32) {
        self.sources.compiler_version()
    }

    /// Whether every kernel can be had. Otherwise only those that are [at
    /// hand](KernelCache::is_at_hand).
    pub(crate) fn can_compile(&self) -> bool {
        self.sources.can_compile()
    }

    /// Whether the kernel is on the device or was compiled ahead.
    pub(crate) fn is_at_hand(&self, request: &KernelRequest) -> bool {
        self.is_loaded(request) || self.sources.has_ahead(&module_text(&request.0, request.1))
    }

    /// Whether the kernel is on the device.
    pub(crate) fn is_loaded(&self, request: &KernelRequest) -> bool {
        self.are_loaded(std::slice::from_ref(request))
    }

    /// Whether all of these kernels are on the device.
    pub(crate) fn are_loaded(&self, requests: &[KernelRequest]) -> bool {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let is_loaded =
            |request| loaded.get(request).is_some_and(|kernel| kernel.strong_count() > 0);
        requests.iter().all(is_loaded)
    }

    /// All kernels of `requests`, compiled on several threads where needed.
    pub(crate) fn get(
        &self,
        requests: &[KernelRequest],
        progress: CompileProgress<'_>,
    ) -> Result<HashMap<KernelRequest, Arc<LoadedKernel>>, DeviceError> {
        let mut found = HashMap::new();
        let mut missing: Vec<&KernelRequest> = Vec::new();
        {
            let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
            for request in requests {
                match loaded.get(request).and_then(Weak::upgrade) {
                    Some(kernel) => drop(found.insert(request.clone(), kernel)),
                    None if !missing.contains(&request) => missing.push(request),
                    None => {}
                }
            }
        }
        for (request, kernel) in self.make(&missing, progress)? {
            found.insert(request.clone(), kernel);
        }
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|_, kernel| kernel.strong_count() > 0);
        for (request, kernel) in &found {
            loaded.insert(request.clone(), Arc::downgrade(kernel));
        }
        Ok(found)
    }

    /// Compiles kernels on several threads; the first failure ends it.
    fn make<'a>(
        &self,
        missing: &[&'a KernelRequest],
        progress: CompileProgress<'_>,
    ) -> Result<Vec<(&'a KernelRequest, Arc<LoadedKernel>)>, DeviceError> {
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let made = Mutex::new(Vec::with_capacity(missing.len()));
        let failure: Mutex<Option<DeviceError>> = Mutex::new(None);
        // Beside real time half of the processors are enough: their neighbours share caches and
        // execution units with those that real time runs on.
        let may_take = |number: usize| {
            number == 0 || number < self.threads / 2 || !self.rt_activity.is_recent()
        };
        let work = |number: usize| {
            while may_take(number) {
                self.enter_processors();
                let Some(request) = missing.get(next.fetch_add(1, Ordering::Relaxed)) else {
                    return;
                };
                match self.make_one(request) {
                    Ok(kernel) => {
                        made.lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .push((*request, Arc::new(kernel)));
                    }
                    Err(err) => {
                        next.store(missing.len(), Ordering::Relaxed);
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(err);
                    }
                }
                progress(done.fetch_add(1, Ordering::Relaxed) + 1, missing.len());
            }
        };
        // All on threads of their own, the first as well: requests may wait for other work
        // of the calling thread, and its priority could not be raised again.
        std::thread::scope(|scope| {
            for number in 0..self.threads.min(missing.len()) {
                let work = &work;
                let named = std::thread::Builder::new().name("cuda-compile".to_string());
                let started = named.spawn_scoped(scope, move || {
                    thread_priority::lower_computation();
                    work(number);
                });
                if started.is_err() && number == 0 {
                    work(0);
                }
            }
        });
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(err) => Err(err),
            None => Ok(made.into_inner().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Moves the calling thread to the processors that compilers may use now.
    fn enter_processors(&self) {
        thread_placement::enter(match self.rt_activity.is_recent() {
            true => ThreadRole::Background,
            false => ThreadRole::BackgroundAlone,
        });
    }

    fn make_one(&self, (kernel, class): &KernelRequest) -> Result<LoadedKernel, DeviceError> {
        let text = module_text(kernel, *class);
        for source in [Source::Library, Source::Folder] {
            let Some(cubin) = self.sources.stored(source, &text) else { continue };
            match self.load(&cubin, kernel, *class) {
                Ok(loaded) => return Ok(loaded),
                Err(err) => tracing::warn!(?source, %err, "stored kernel not loaded"),
            }
        }
        let name = &kernel.expression;
        let cubin = self.sources.compile(name, &text)?;
        let loaded = self
            .load(&cubin, kernel, *class)
            .map_err(|err| failed(name, format!("the compiled kernel cannot be loaded: {err}")))?;
        self.sources.keep(&text, &cubin);
        Ok(loaded)
    }

    fn load(
        &self,
        cubin: &[u8],
        kernel: &Kernel,
        class: KernelClass,
    ) -> Result<LoadedKernel, CudaError> {
        // Loading a module blocks other calls of the driver.
        self.rt_activity.wait_for_gap(GAP_WAIT);
        let module = Module::load(&self.context, cubin)?;
        let function = module.function(class.entry(), kernel.threads, kernel.shared_bytes)?;
        Ok(LoadedKernel { _module: module, function })
    }
}
