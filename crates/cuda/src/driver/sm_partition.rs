//! SM partitions: green contexts, each with SMs that no other partition uses. Memory, its bandwidth
//! and the L2 cache stay shared.

use cudarc::driver::sys::{
    self, CUcontext, CUdevResource, CUdevResourceDesc, CUdevResourceType, CUdevice, CUgreenCtx,
    CUgreenCtxCreate_flags, CUstream, CUstream_flags,
};

use super::call::check;
use super::facts::DriverFacts;
use crate::error::{CudaError, OpenError};

/// From compute capability 9.0 on, SMs are assigned in groups of this size, and the driver rounds
/// up.
const GROUP: u32 = 8;

/// SMs of each of `parts` parts of equal size.
fn share(multiprocessors: u32, parts: usize) -> Option<u32> {
    let each = multiprocessors.checked_div(u32::try_from(parts).ok()?)?;
    Some(each - each % GROUP).filter(|share| *share > 0)
}

/// A partition of at least `least` SMs, which the rest of the GPU uses as well.
pub(super) fn partition(device: CUdevice, least: u32) -> Result<SmPartition, OpenError> {
    let (groups, _) = divide(device, 1, least)?;
    let none = OpenError::Partition { multiprocessors: least };
    SmPartition::open(device, *groups.first().ok_or(none)?)
}

/// Whether the driver said that these SMs cannot be divided.
pub(super) fn is_indivisible(err: &OpenError) -> bool {
    let refused = sys::CUresult::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION as u32;
    matches!(err, OpenError::Call(CudaError::Call { code, .. }) if *code == refused)
}

/// A partition of at least `least` SMs, and one of all others.
pub(super) fn apart(device: CUdevice, least: u32) -> Result<[SmPartition; 2], OpenError> {
    let (groups, rest) = divide(device, 1, least)?;
    let none = OpenError::Partition { multiprocessors: least };
    let first = *groups.first().ok_or(none)?;
    Ok([SmPartition::open(device, first)?, SmPartition::open(device, rest)?])
}

/// Divides the GPU into `parts` parts that share no SM.
pub(super) fn split(
    device: CUdevice,
    facts: &DriverFacts,
    parts: usize,
) -> Result<Vec<CUdevResource>, OpenError> {
    let all = facts.multiprocessors;
    let too_many = OpenError::Parts { parts, multiprocessors: all, group: GROUP };
    let least = share(all, parts).ok_or_else(|| too_many.clone())?;
    let (groups, _) = divide(device, parts, least)?;
    match groups.len() == parts {
        true => Ok(groups),
        false => Err(too_many),
    }
}

/// Up to `most` disjoint groups of at least `least` SMs, and the remaining SMs.
fn divide(
    device: CUdevice,
    most: usize,
    least: u32,
) -> Result<(Vec<CUdevResource>, CUdevResource), OpenError> {
    // SAFETY: plain numbers, for which zeros are valid; the driver fills them in.
    let mut whole: CUdevResource = unsafe { std::mem::zeroed() };
    let kind = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    // SAFETY: `device` came from the driver and `whole` receives the result.
    let code = unsafe { sys::cuDeviceGetDevResource(device, &mut whole, kind) };
    check("cuDeviceGetDevResource", code)?;
    // SAFETY: as above.
    let mut groups: Vec<CUdevResource> = vec![unsafe { std::mem::zeroed() }; most];
    let mut count = u32::try_from(most).unwrap_or(u32::MAX);
    // SAFETY: as above.
    let mut rest: CUdevResource = unsafe { std::mem::zeroed() };
    // SAFETY: `groups` has space for `count` results, and `rest` for one.
    let code = unsafe {
        let groups = groups.as_mut_ptr();
        sys::cuDevSmResourceSplitByCount(groups, &mut count, &whole, &mut rest, 0, least)
    };
    check("cuDevSmResourceSplitByCount", code)?;
    groups.truncate(count as usize);
    Ok((groups, rest))
}

/// One SM partition.
pub(crate) struct SmPartition {
    raw: CUgreenCtx,
    multiprocessors: u32,
}

// SAFETY: the handle of a green context may be used from any thread.
unsafe impl Send for SmPartition {}
// SAFETY: as above; the driver locks its own state.
unsafe impl Sync for SmPartition {}

impl SmPartition {
    pub(super) fn open(
        device: CUdevice,
        mut resource: CUdevResource,
    ) -> Result<SmPartition, OpenError> {
        // SAFETY: it came from a split of SMs, so this is the field that is set.
        let multiprocessors = unsafe { resource.__bindgen_anon_1.sm.smCount };
        let mut desc: CUdevResourceDesc = std::ptr::null_mut();
        // SAFETY: one resource of the driver's own, and receives the result.
        let code = unsafe { sys::cuDevResourceGenerateDesc(&mut desc, &mut resource, 1) };
        check("cuDevResourceGenerateDesc", code)?;
        let mut raw: CUgreenCtx = std::ptr::null_mut();
        let flags = CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: the description is of this device; destroyed when this value is dropped.
        let code = unsafe { sys::cuGreenCtxCreate(&mut raw, desc, device, flags) };
        check("cuGreenCtxCreate", code)?;
        Ok(SmPartition { raw, multiprocessors })
    }

    pub(crate) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The context that threads make current to use this partition.
    pub(super) fn context(&self) -> Result<CUcontext, OpenError> {
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the part is alive and `context` receives the result.
        let code = unsafe { sys::cuCtxFromGreenCtx(&mut context, self.raw) };
        check("cuCtxFromGreenCtx", code)?;
        Ok(context)
    }

    /// A stream whose kernels run in this partition only.
    pub(super) fn stream(&self, priority: i32) -> Result<CUstream, CudaError> {
        let mut stream: CUstream = std::ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the part is alive and `stream` receives the result, which its owner destroys.
        let code = unsafe { sys::cuGreenCtxStreamCreate(&mut stream, self.raw, flags, priority) };
        check("cuGreenCtxStreamCreate", code)?;
        Ok(stream)
    }
}

impl Drop for SmPartition {
    fn drop(&mut self) {
        // Also of a faulted GPU: the primary context cannot be reset before.
        // SAFETY: made in `open` and not used after this; an error cannot be reported.
        let _ = unsafe { sys::cuGreenCtxDestroy(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_whole_groups_of_sms() {
        assert_eq!(share(132, 2), Some(64));
        assert_eq!(share(132, 3), Some(40));
        assert_eq!(share(132, 16), Some(8));
        assert_eq!(share(132, 17), None, "less than a group each");
        assert_eq!(share(132, 0), None);
    }
}
