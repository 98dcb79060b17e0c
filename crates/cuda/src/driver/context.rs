//! A GPU's primary context, and whether it has faulted.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use base::Bytes;
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUmemoryPool, CUresult};

use super::call::{check, describe};
use super::call_thread;
use super::facts::{DriverFacts, read_facts};
use super::gpu_use::{self, Leftover};
use super::pinned_blocks::SpareBlocks;
use super::pinned_pool::PinnedPool;
use super::resource_counts::ResourceCounts;
use super::slow_calls;
use super::sm_partition::{self, SmPartition};
use crate::error::{CudaError, OpenError, is_sticky};

/// The oldest driver that has every function used here, as `cuDriverGetVersion` reports it.
const DRIVER_NEEDED: i32 = 12_080;

/// An opened GPU.
pub(crate) struct Context {
    raw: CUcontext,
    /// From 1.
    number: u64,
    device: CUdevice,
    pool: CUmemoryPool,
    facts: DriverFacts,
    fault: OnceLock<String>,
    /// Allocations until one fails on purpose.
    allocations_left: AtomicU64,
    pinned: PinnedPool,
    spare_blocks: SpareBlocks,
    resource_counts: Arc<ResourceCounts>,
    part: Option<SmPartition>,
}

// SAFETY: a context handle may be used from any thread, and each thread makes it current before its
// calls.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for Context {}

thread_local! {
    /// Number of the context this thread made current last; nothing else in the process changes it.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Whether a GPU was opened in this process.
pub(crate) fn was_opened() -> bool {
    OPENED.load(Ordering::Relaxed) > 0
}

/// Contexts opened so far. The driver may hand out the same handle twice, and a thread must not
/// mistake the second for the first.
static OPENED: AtomicU64 = AtomicU64::new(0);

impl Context {
    /// Opens the GPU `ordinal`.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Context>, OpenError> {
        let device = find_device(ordinal)?;
        check_usable(device, ordinal)?;
        let raw = retain(device)?;
        Context::hold(device, read_facts(device)?, raw, None)
    }

    /// Opens the GPU `ordinal` in `parts` parts of equally many SMs; some SMs may remain unused.
    pub(crate) fn open_parts(ordinal: usize, parts: usize) -> Result<Vec<Arc<Context>>, OpenError> {
        let device = find_device(ordinal)?;
        check_usable(device, ordinal)?;
        let facts = read_facts(device)?;
        let mut contexts = Vec::with_capacity(parts);
        for resource in sm_partition::split(device, &facts, parts)? {
            // Retained once per part, so that memory and kernels outlive any of them.
            retain(device)?;
            let part = SmPartition::open(device, resource)?;
            let facts = DriverFacts { multiprocessors: part.multiprocessors(), ..facts.clone() };
            contexts.push(Context::hold(device, facts, part.context()?, Some(part))?);
        }
        Ok(contexts)
    }

    fn hold(
        device: CUdevice,
        facts: DriverFacts,
        raw: CUcontext,
        part: Option<SmPartition>,
    ) -> Result<Arc<Context>, OpenError> {
        let pool: CUmemoryPool = std::ptr::null_mut();
        let number = OPENED.fetch_add(1, Ordering::Relaxed) + 1;
        let (fault, pinned) = (OnceLock::new(), PinnedPool::default());
        gpu_use::begin(device);
        call_thread::start();
        let mut context = Context {
            raw,
            number,
            device,
            pool,
            facts,
            fault,
            allocations_left: AtomicU64::new(u64::MAX),
            pinned,
            spare_blocks: SpareBlocks::default(),
            resource_counts: Arc::new(ResourceCounts::default()),
            part,
        };
        context.enter()?;
        gpu_use::free_leftovers(device);
        // SAFETY: `device` came from the driver and `pool` receives the result.
        let code = unsafe { sys::cuDeviceGetDefaultMemPool(&mut context.pool, device) };
        context.check("cuDeviceGetDefaultMemPool", code)?;
        Ok(Arc::new(context))
    }

    /// A partition of at least `least` SMs that streams can be confined to, unless this is a part
    /// itself.
    pub(crate) fn partition(&self, least: u32) -> Result<Option<Arc<SmPartition>>, OpenError> {
        if self.part.is_some() || least == 0 {
            return Ok(None);
        }
        self.enter()?;
        match sm_partition::partition(self.device, least) {
            Ok(partition) => Ok(Some(Arc::new(partition))),
            // Under MPS with an active thread percentage the driver divides no GPU.
            Err(err) if sm_partition::is_indivisible(&err) => {
                tracing::warn!(%err, "no SM partition: best effort does not co-run with real time");
                Ok(None)
            }
            Err(err) => Err(err),
        }
    }

    /// The same, and a partition of all other SMs.
    pub(crate) fn apart(&self, least: u32) -> Result<Option<[Arc<SmPartition>; 2]>, OpenError> {
        if self.part.is_some() {
            return Ok(None);
        }
        self.enter()?;
        Ok(Some(sm_partition::apart(self.device, least)?.map(Arc::new)))
    }

    /// The part of the GPU, if it is not the whole GPU.
    pub(super) fn part(&self) -> Option<&SmPartition> {
        self.part.as_ref()
    }

    pub(crate) fn facts(&self) -> &DriverFacts {
        &self.facts
    }

    /// The driver's handle of the GPU.
    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// The memory pool of the device.
    pub(super) fn pool(&self) -> CUmemoryPool {
        self.pool
    }

    /// Pinned blocks that nothing uses.
    pub(super) fn spare_blocks(&self) -> &SpareBlocks {
        &self.spare_blocks
    }

    /// The pool of pinned host memory.
    pub(super) fn pinned(&self) -> &PinnedPool {
        &self.pinned
    }

    /// Counts of the resources held.
    pub(crate) fn resource_counts(&self) -> &Arc<ResourceCounts> {
        &self.resource_counts
    }

    /// Bytes that the memory pool has handed out, and bytes it has reserved.
    pub(crate) fn pool_bytes(&self) -> Result<(u64, u64), CudaError> {
        self.enter()?;
        let read = |attribute| {
            let mut bytes = 0u64;
            // SAFETY: both attributes are 64-bit numbers, and `bytes` receives the result.
            let code = unsafe {
                sys::cuMemPoolGetAttribute(self.pool, attribute, (&raw mut bytes).cast())
            };
            self.check("cuMemPoolGetAttribute", code).map(|()| bytes)
        };
        use sys::CUmemPool_attribute as A;
        let used = read(A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok((used, read(A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?))
    }

    /// Keeps up to `bytes` of freed memory for the next allocation.
    pub(crate) fn keep_freed(&self, bytes: u64) -> Result<(), CudaError> {
        self.enter()?;
        let mut threshold = bytes;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: this attribute is a 64-bit number, which `threshold` is.
        let code = unsafe {
            sys::cuMemPoolSetAttribute(self.pool, attribute, (&raw mut threshold).cast())
        };
        self.check("cuMemPoolSetAttribute", code)
    }

    /// Returns freed memory to the driver.
    pub(crate) fn trim(&self) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the pool belongs to the device and always exists.
        self.check("cuMemPoolTrimTo", unsafe { sys::cuMemPoolTrimTo(self.pool, 0) })
    }

    /// Why the device is faulted, if it is.
    pub(crate) fn fault(&self) -> Option<&str> {
        self.fault.get().map(String::as_str)
    }

    /// Makes this the calling thread's context; fails once the device is faulted.
    pub(crate) fn enter(&self) -> Result<(), CudaError> {
        if let Some(reason) = self.fault.get() {
            return Err(CudaError::Faulted(reason.clone()));
        }
        slow_calls::begin();
        if CURRENT.get() == self.number {
            return Ok(());
        }
        // SAFETY: the context is retained for as long as `self` lives.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })?;
        CURRENT.set(self.number);
        Ok(())
    }

    /// `code` as a result. A sticky error marks the device as faulted.
    pub(crate) fn check(&self, call: &'static str, code: CUresult) -> Result<(), CudaError> {
        slow_calls::end(call);
        if code == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let err = describe(call, code);
        if !is_sticky(code) {
            return Err(err);
        }
        gpu_use::set_refused(self.device);
        Err(CudaError::Faulted(self.set_faulted(&err.to_string()).to_string()))
    }

    /// Makes the device faulted, unless it is, and returns why it is.
    pub(crate) fn set_faulted(&self, reason: &str) -> &str {
        self.fault.get_or_init(|| {
            tracing::error!(gpu = %self.facts.name, reason, "device faulted");
            gpu_use::set_faulted(self.device);
            reason.to_string()
        })
    }

    /// Keeps what cannot be freed while the device is faulted.
    pub(super) fn keep(&self, leftover: Leftover) {
        gpu_use::keep(self.device, leftover);
    }

    /// Lets the allocation after `more` others fail.
    pub(crate) fn fail_allocation(&self, more: u64) {
        self.allocations_left.store(more, Ordering::SeqCst);
    }

    /// Called before every allocation: fails when a failure was requested.
    pub(super) fn may_allocate(&self, call: &'static str, bytes: u64) -> Result<(), CudaError> {
        self.enter()?;
        if self.allocations_left.load(Ordering::Relaxed) == u64::MAX {
            return Ok(());
        }
        let next = |left: u64| Some(if left == u64::MAX { left } else { left.wrapping_sub(1) });
        // Below zero is the largest number, which means that none fails.
        match self.allocations_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(0) => Err(CudaError::OutOfMemory { call, bytes: Bytes(bytes) }),
            _ => Ok(()),
        }
    }

    /// Free memory of the device.
    pub(crate) fn free_memory(&self) -> Result<Bytes, CudaError> {
        self.memory().map(|(free, _)| free)
    }

    /// Memory of the device in use by any process.
    pub(crate) fn used_memory(&self) -> Result<Bytes, CudaError> {
        self.memory().map(|(free, total)| Bytes(total.0.saturating_sub(free.0)))
    }

    fn memory(&self) -> Result<(Bytes, Bytes), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both receive the results.
        self.check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.spare_blocks.release(self);
        if self.enter().is_ok() {
            self.pinned.release();
        }
        // Streams and memory of the part are gone: they hold this context.
        drop(self.part.take());
        gpu_use::end(self.device, || {
            // SAFETY: nothing uses the primary context: everything of it holds a `Context`, and
            // this is the last.
            let code = unsafe { sys::cuDevicePrimaryCtxReset_v2(self.device) };
            let result = check("cuDevicePrimaryCtxReset", code).err();
            tracing::info!(gpu = %self.facts.name, error = ?result, "context destroyed");
        });
        // SAFETY: retained once when it was opened and not used after this; an error cannot be
        // reported.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Whether the driver refuses the GPU `ordinal` to this process since a kernel has faulted on it;
/// another process can use it.
pub fn is_refused(ordinal: usize) -> bool {
    was_opened() && find_device(ordinal).is_ok_and(gpu_use::is_refused)
}

/// Loads and initialises the driver, or says what is missing.
fn start_driver() -> Result<(), OpenError> {
    // SAFETY: asks the loader for the library by name. NVIDIA's driver library has no unsound
    // start-up code.
    if !unsafe { sys::is_culib_present() } {
        let help = "libcuda.so.1 is not on this machine; install NVIDIA's driver, or in a \
            container pass the GPU through";
        return Err(OpenError::NoDriver(help.to_string()));
    }
    // SAFETY: the library is there; flags must be 0.
    let code = unsafe { sys::cuInit(0) };
    if code != CUresult::CUDA_SUCCESS {
        let err = describe("cuInit", code);
        return Err(OpenError::NoDriver(format!("{err}; see whether nvidia-smi works")));
    }
    let mut version = 0;
    // SAFETY: receives the result.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    if version < DRIVER_NEEDED {
        let (found, needed) = (version_text(version), version_text(DRIVER_NEEDED));
        return Err(OpenError::OldDriver { found, needed });
    }
    Ok(())
}

/// 13.0 for 13000.
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The GPU of that number; initialises the driver.
fn find_device(ordinal: usize) -> Result<CUdevice, OpenError> {
    start_driver()?;
    let count = device_count()?;
    let no_such = OpenError::NoSuchDevice { ordinal, count };
    let number = c_int::try_from(ordinal).map_err(|_| no_such.clone())?;
    if ordinal >= count {
        return Err(no_such);
    }
    let mut device: CUdevice = 0;
    // SAFETY: the driver is started and `device` receives the result.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, number) })?;
    Ok(device)
}

/// Fails while a faulted context of the GPU is in use.
fn check_usable(device: CUdevice, ordinal: usize) -> Result<(), OpenError> {
    match gpu_use::is_faulted(device) {
        true => Err(OpenError::Faulted { ordinal }),
        false => Ok(()),
    }
}

/// Retains the GPU's primary context.
fn retain(device: CUdevice) -> Result<CUcontext, OpenError> {
    let mut raw: CUcontext = std::ptr::null_mut();
    // SAFETY: `device` came from the driver; a [`Context`] releases it when it is dropped.
    let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) };
    if is_sticky(code) {
        gpu_use::set_refused(device);
    }
    check("cuDevicePrimaryCtxRetain", code)?;
    Ok(raw)
}

fn device_count() -> Result<usize, OpenError> {
    let mut count = 0;
    // SAFETY: the driver is started and `count` receives the result.
    match unsafe { sys::cuDeviceGetCount(&mut count) } {
        CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
        code => {
            check("cuDeviceGetCount", code)?;
            Ok(usize::try_from(count).unwrap_or(0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_printed_with_a_dot() {
        assert_eq!(version_text(13_000), "13.0");
        assert_eq!(version_text(12_040), "12.4");
    }
}
