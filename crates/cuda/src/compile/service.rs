//! Everything that turns a launch plan into kernels on one device.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use device::KernelCompiler;

use super::kernel_cache::KernelCache;
use super::tuning::Tuning;

/// The compiler of GPU plans, the kernels they share, and the variants they use.
pub(crate) struct CompileService {
    pub(crate) compiler: Arc<dyn KernelCompiler>,
    pub(crate) kernels: KernelCache,
    tuning: RwLock<Tuning>,
}

impl CompileService {
    pub(crate) fn new(compiler: Arc<dyn KernelCompiler>, kernels: KernelCache) -> CompileService {
        CompileService { compiler, kernels, tuning: RwLock::default() }
    }

    /// The variants that plans made from now on use.
    pub(crate) fn tuning(&self) -> RwLockReadGuard<'_, Tuning> {
        self.tuning.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn replace_tuning(&self, tuning: Tuning) {
        *self.tuning.write().unwrap_or_else(PoisonError::into_inner) = tuning;
    }
}
