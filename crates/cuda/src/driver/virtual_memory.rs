//! Virtual memory: an address range is reserved once, and physical memory is mapped into it and
//! unmapped again. One allocation may be mapped at several addresses at once.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemLocationType,
};

use super::call_thread::at_normal_priority;
use super::gpu_use::Leftover;
use super::slow_calls;
use super::{Context, CountedResource, ResourceKind};
use crate::error::CudaError;

/// The location of `context`'s memory.
fn location(context: &Context) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device() }
}

fn properties(context: &Context) -> CUmemAllocationProp {
    // SAFETY: a plain C structure of numbers and pointers, for which zero is the default.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(context);
    properties
}

/// The granularity of physical allocations and of offsets in ranges.
pub(crate) fn granularity(context: &Context) -> Result<u64, CudaError> {
    context.enter()?;
    let mut bytes = 0usize;
    let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: `bytes` receives the result and the properties outlive the call.
    let code =
        unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, &properties(context), least) };
    context.check("cuMemGetAllocationGranularity", code)?;
    Ok(bytes.max(1) as u64)
}

/// A physical allocation without an address.
pub(crate) struct PhysicalMemory {
    handle: CUmemGenericAllocationHandle,
    bytes: u64,
    context: Arc<Context>,
    _counted: CountedResource,
}

impl PhysicalMemory {
    /// An allocation of `bytes`, a multiple of the [`granularity`]. Its content is not defined.
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<PhysicalMemory, CudaError> {
        context.may_allocate("cuMemCreate", bytes)?;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut handle: CUmemGenericAllocationHandle = 0;
        // SAFETY: `handle` receives the result; released when this value is dropped.
        let code = unsafe { sys::cuMemCreate(&mut handle, size, &properties(context), 0) };
        context.check("cuMemCreate", code).map_err(|err| err.with_bytes(bytes))?;
        let counted = context.resource_counts().count(ResourceKind::PhysicalMemory, bytes);
        Ok(PhysicalMemory { handle, bytes, context: context.clone(), _counted: counted })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created in `new` and not used after this. The driver keeps the memory while
            // it is mapped.
            let _ = unsafe { sys::cuMemRelease(self.handle) };
            slow_calls::end("cuMemRelease");
        } else {
            self.context.keep(Leftover::Physical(self.handle));
        }
    }
}

/// A reserved address range. Nothing is mapped at first.
pub(crate) struct AddressRange {
    address: CUdeviceptr,
    bytes: u64,
    /// Offsets and sizes of what is mapped, in no order.
    mapped: Mutex<Vec<(u64, u64)>>,
    context: Arc<Context>,
    _counted: CountedResource,
}

impl AddressRange {
    /// A range of `bytes`, a multiple of the [`granularity`].
    pub(crate) fn reserve(context: &Arc<Context>, bytes: u64) -> Result<AddressRange, CudaError> {
        at_normal_priority(|| AddressRange::reserve_here(context, bytes))
    }

    fn reserve_here(context: &Arc<Context>, bytes: u64) -> Result<AddressRange, CudaError> {
        context.may_allocate("cuMemAddressReserve", bytes)?;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut address: CUdeviceptr = 0;
        // SAFETY: `address` receives the result; freed when this value is dropped.
        let code = unsafe { sys::cuMemAddressReserve(&mut address, size, 0, 0, 0) };
        context.check("cuMemAddressReserve", code)?;
        let (mapped, context) = (Mutex::default(), context.clone());
        let counted = context.resource_counts().count(ResourceKind::Range, bytes);
        Ok(AddressRange { address, bytes, mapped, context, _counted: counted })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maps all of `piece` at `offset`, where nothing is mapped. The device may not access it
    /// before [`AddressRange::open`]. The memory stays until it is unmapped, even when `piece` is
    /// dropped before.
    pub(crate) fn map(&self, offset: u64, piece: &PhysicalMemory) -> Result<(), CudaError> {
        if offset.checked_add(piece.bytes).is_none_or(|end| end > self.bytes) {
            return Err(CudaError::Misuse("mapped past the end of the address range"));
        }
        self.context.enter()?;
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: inside the reserved range by the lines above, and the handle is alive; the driver
        // refuses an overlap.
        let code = unsafe {
            sys::cuMemMap(self.address + offset, piece.bytes as usize, 0, piece.handle, 0)
        };
        self.context.check("cuMemMap", code)?;
        mapped.push((offset, piece.bytes));
        Ok(())
    }

    /// Lets the device read and write `bytes` at `offset`, all of which are mapped.
    pub(crate) fn open(&self, offset: u64, bytes: u64) -> Result<(), CudaError> {
        self.context.enter()?;
        let access = CUmemAccessDesc {
            location: location(&self.context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the driver refuses what is not mapped, and `access` outlives the call.
        let code = unsafe {
            sys::cuMemSetAccess(self.address + offset, bytes as usize, &raw const access, 1)
        };
        self.context.check("cuMemSetAccess", code)
    }

    /// Unmaps every allocation that begins in `bytes` at `offset`. Nothing in flight on the device
    /// may access them: the driver does not wait.
    pub(crate) fn unmap(&self, offset: u64, bytes: u64) -> Result<(), CudaError> {
        self.context.enter()?;
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let end = offset.saturating_add(bytes);
        while let Some(at) = mapped.iter().position(|(at, _)| (offset..end).contains(at)) {
            let (at, bytes) = mapped.swap_remove(at);
            // SAFETY: exactly one allocation that was mapped here, and the caller waited for
            // everything that uses it.
            let code = unsafe { sys::cuMemUnmap(self.address + at, bytes as usize) };
            self.context.check("cuMemUnmap", code)?;
        }
        Ok(())
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let range = &*self;
        let freed = at_normal_priority(|| {
            let entered = range.context.enter().is_ok();
            if entered {
                let _ = range.unmap(0, range.bytes);
                // SAFETY: reserved in `reserve`, unmapped by the line above, not used after this.
                let _ = unsafe { sys::cuMemAddressFree(range.address, range.bytes as usize) };
                slow_calls::end("cuMemAddressFree");
            }
            entered
        });
        if !freed {
            let mapped = self.mapped.get_mut().unwrap_or_else(PoisonError::into_inner);
            let (address, mapped) = (self.address, std::mem::take(mapped));
            self.context.keep(Leftover::Range { address, bytes: self.bytes, mapped });
        }
    }
}
