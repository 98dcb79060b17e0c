//! What is fixed about a GPU and its driver.

use std::ffi::{c_char, c_int};

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};

use super::call::check;
use crate::error::OpenError;

/// What is fixed about a GPU and its driver.
#[derive(Clone, Debug)]
pub(crate) struct DriverFacts {
    /// The product's name.
    pub(crate) name: String,
    /// The driver's CUDA version, 13000 for 13.0.
    pub(crate) driver_version: i32,
    /// Compute capability, 90 for 9.0.
    pub(crate) capability: u32,
    pub(crate) multiprocessors: u32,
    /// Address on the PCI bus, by which NVML knows the GPU.
    pub(crate) pci_bus_id: String,
}

pub(super) fn read_facts(device: CUdevice) -> Result<DriverFacts, OpenError> {
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: `device` came from the driver and `value` receives the result.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&mut value, which, device)
        })?;
        Ok::<u32, OpenError>(u32::try_from(value).unwrap_or(0))
    };
    use CUdevice_attribute as A;
    let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let mut driver_version = 0;
    // SAFETY: receives the result.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut driver_version) })?;
    Ok(DriverFacts {
        name: read_text("cuDeviceGetName", |text, len| {
            // SAFETY: `text` has room for `len` characters.
            unsafe { sys::cuDeviceGetName(text, len, device) }
        })?,
        driver_version,
        capability: major * 10 + minor,
        multiprocessors: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        pci_bus_id: read_text("cuDeviceGetPCIBusId", |text, len| {
            // SAFETY: `text` has room for `len` characters.
            unsafe { sys::cuDeviceGetPCIBusId(text, len, device) }
        })?,
    })
}

fn read_text(
    call: &'static str,
    read: impl FnOnce(*mut c_char, c_int) -> CUresult,
) -> Result<String, OpenError> {
    let mut text = [0u8; 128];
    check(call, read(text.as_mut_ptr().cast(), text.len() as c_int))?;
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..end]).into_owned())
}
