//! Compiled kernels on the device.

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule};

use super::call_thread::at_normal_priority;
use super::slow_calls;
use super::{Context, CountedResource, ResourceKind};
use crate::error::CudaError;

/// A loaded cubin.
pub(crate) struct Module {
    raw: CUmodule,
    context: Arc<Context>,
    _counted: CountedResource,
}

// SAFETY: a module handle may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Module {}

/// A kernel of a module, with the resources it needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    raw: CUfunction,
    pub(crate) registers: u32,
    /// Bytes a thread spills to memory.
    pub(crate) local_bytes: u32,
    /// Blocks an SM holds at once.
    pub(crate) blocks: u32,
}

// SAFETY: a function handle may be used from any thread; its module outlives it by the structure
// that holds both.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    /// Loads `image` onto the device now: a lazy load between requests would wait for running
    /// kernels.
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Module, CudaError> {
        at_normal_priority(|| Module::load_here(context, image))
    }

    fn load_here(context: &Arc<Context>, image: &[u8]) -> Result<Module, CudaError> {
        context.may_allocate("cuModuleLoadData", image.len() as u64)?;
        let mut raw: CUmodule = std::ptr::null_mut();
        // SAFETY: `image` is a cubin as NVRTC made it (the cache checks its digest); the driver
        // copies it.
        let code = unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) };
        context.check("cuModuleLoadData", code)?;
        let counted = context.resource_counts().count(ResourceKind::Module, image.len() as u64);
        Ok(Module { raw, context: context.clone(), _counted: counted })
    }

    /// The kernel `name` for blocks of `threads` with `shared` bytes of dynamic shared memory.
    pub(crate) fn function(
        &self,
        name: &CStr,
        threads: u32,
        shared: u32,
    ) -> Result<Function, CudaError> {
        at_normal_priority(|| self.function_here(name, threads, shared))
    }

    fn function_here(&self, name: &CStr, threads: u32, shared: u32) -> Result<Function, CudaError> {
        use CUfunction_attribute as A;
        let context = &self.context;
        context.enter()?;
        let mut raw: CUfunction = std::ptr::null_mut();
        // SAFETY: the module is alive, `name` is NUL-terminated.
        let code = unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, name.as_ptr()) };
        context.check("cuModuleGetFunction", code)?;
        // SAFETY: the function is of a module that is alive.
        context.check("cuFuncLoad", unsafe { sys::cuFuncLoad(raw) })?;
        let most = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: as above.
        let code = unsafe { sys::cuFuncSetAttribute(raw, most, shared as c_int) };
        context.check("cuFuncSetAttribute", code)?;
        let read = |which| {
            let mut value = 0;
            // SAFETY: as above, and `value` receives the result.
            let code = unsafe { sys::cuFuncGetAttribute(&mut value, which, raw) };
            context.check("cuFuncGetAttribute", code)?;
            Ok::<u32, CudaError>(u32::try_from(value).unwrap_or(0))
        };
        let mut blocks = 0;
        // SAFETY: as above.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                raw,
                threads as c_int,
                shared as usize,
            )
        };
        context.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        let local_bytes = read(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        context.resource_counts().record_local_bytes(local_bytes);
        Ok(Function {
            raw,
            registers: read(A::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes,
            blocks: u32::try_from(blocks).unwrap_or(0),
        })
    }
}

impl Function {
    pub(super) fn raw(&self) -> CUfunction {
        self.raw
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let module = &*self;
        at_normal_priority(|| {
            if module.context.enter().is_ok() {
                // SAFETY: loaded in `load` and not used after this: users have waited for its
                // kernels.
                let _ = unsafe { sys::cuModuleUnload(module.raw) };
                slow_calls::end("cuModuleUnload");
            }
        });
    }
}
