//! State of the GPU from NVML, where it is installed: clocks, power, temperature.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use libloading::Library;
use serde::Serialize;

/// NVML's result code of success.
const SUCCESS: c_int = 0;

/// NVML's numbers of the SM clock and the memory clock.
const CLOCK_SM: c_uint = 1;
const CLOCK_MEMORY: c_uint = 2;

/// NVML's number of the chip's temperature sensor.
const TEMPERATURE_GPU: c_uint = 0;

/// The current state of a GPU. Absent values are not reported by the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Health {
    /// Clock of the SMs.
    pub sm_mhz: Option<u32>,
    /// Clock of the memory.
    pub memory_mhz: Option<u32>,
    /// Power drawn.
    pub milliwatts: Option<u32>,
    /// Temperature of the chip.
    pub celsius: Option<u32>,
    /// Why clocks are reduced, as NVML's bits.
    pub throttle_reasons: Option<u64>,
}

/// NVML and one of its GPUs.
pub(crate) struct Nvml {
    library: Library,
    device: *mut c_void,
}

// SAFETY: NVML may be called from any thread, and its handles are only names.
unsafe impl Send for Nvml {}
// SAFETY: as above.
unsafe impl Sync for Nvml {}

type Handle = *mut c_void;

impl Nvml {
    /// The GPU at `pci_bus_id`, or why NVML does not provide it.
    pub(crate) fn open(pci_bus_id: &str) -> Result<Nvml, String> {
        // SAFETY: NVIDIA's library has no unsound start-up code.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }
            .map_err(|err| format!("no NVML (libnvidia-ml.so.1): {err}"))?;
        let bus = CString::new(pci_bus_id).map_err(|err| err.to_string())?;
        let mut device: Handle = std::ptr::null_mut();
        // SAFETY: both symbols have these types in every NVML since 5; `device` receives the
        // result.
        unsafe {
            let init = library
                .get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0")
                .map_err(|err| err.to_string())?;
            check("nvmlInit_v2", init())?;
            let find = library
                .get::<unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int>(
                    b"nvmlDeviceGetHandleByPciBusId_v2\0",
                )
                .map_err(|err| err.to_string())?;
            check("nvmlDeviceGetHandleByPciBusId_v2", find(bus.as_ptr(), &mut device))?;
        }
        Ok(Nvml { library, device })
    }

    pub(crate) fn health(&self) -> Health {
        Health {
            sm_mhz: self.numbered(b"nvmlDeviceGetClockInfo\0", CLOCK_SM),
            memory_mhz: self.numbered(b"nvmlDeviceGetClockInfo\0", CLOCK_MEMORY),
            milliwatts: self.number(b"nvmlDeviceGetPowerUsage\0"),
            celsius: self.numbered(b"nvmlDeviceGetTemperature\0", TEMPERATURE_GPU),
            throttle_reasons: self.long(b"nvmlDeviceGetCurrentClocksThrottleReasons\0"),
        }
    }

    /// Memory in use on the GPU by all processes, in bytes.
    pub(crate) fn memory_used(&self) -> Option<u64> {
        /// What `nvmlDeviceGetMemoryInfo` fills in.
        #[repr(C)]
        #[derive(Default)]
        struct Memory {
            total: u64,
            free: u64,
            used: u64,
        }
        let mut memory = Memory::default();
        // SAFETY: the symbol has this type, and `memory` has the layout it fills in.
        let code = unsafe {
            let call = self
                .library
                .get::<unsafe extern "C" fn(Handle, *mut Memory) -> c_int>(
                    b"nvmlDeviceGetMemoryInfo\0",
                )
                .ok()?;
            call(self.device, &mut memory)
        };
        (code == SUCCESS && memory.total > 0)
            .then_some(memory.total - memory.free.min(memory.total))
    }

    /// Calls a function that returns one number for a selector.
    fn numbered(&self, name: &[u8], which: c_uint) -> Option<u32> {
        let mut value: c_uint = 0;
        // SAFETY: only called for functions of this type; `value` receives the result.
        let code = unsafe {
            let call = self
                .library
                .get::<unsafe extern "C" fn(Handle, c_uint, *mut c_uint) -> c_int>(name)
                .ok()?;
            call(self.device, which, &mut value)
        };
        (code == SUCCESS).then_some(value)
    }

    /// Calls a function that returns one number.
    fn number(&self, name: &[u8]) -> Option<u32> {
        let mut value: c_uint = 0;
        // SAFETY: only called for functions of this type; `value` receives the result.
        let code = unsafe {
            let call = self
                .library
                .get::<unsafe extern "C" fn(Handle, *mut c_uint) -> c_int>(name)
                .ok()?;
            call(self.device, &mut value)
        };
        (code == SUCCESS).then_some(value)
    }

    /// Calls a function that returns one 64-bit number.
    fn long(&self, name: &[u8]) -> Option<u64> {
        let mut value = 0u64;
        // SAFETY: only called for functions of this type; `value` receives the result.
        let code = unsafe {
            let call =
                self.library.get::<unsafe extern "C" fn(Handle, *mut u64) -> c_int>(name).ok()?;
            call(self.device, &mut value)
        };
        (code == SUCCESS).then_some(value)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the symbol has this type; it was started in `open` and counts its users.
        unsafe {
            if let Ok(stop) = self.library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown\0")
            {
                let _ = stop();
            }
        }
    }
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    if code == SUCCESS { Ok(()) } else { Err(format!("{call} failed with code {code}")) }
}
