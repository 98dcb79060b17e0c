//! State of the GPU from NVML, where it is installed: clocks, power, temperature, memory.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use base::Bytes;
use device::DeviceReadings;
use libloading::Library;
use serde::Serialize;

/// NVML's result code of success.
pub(super) const SUCCESS: c_int = 0;

/// NVML's numbers of the SM clock and the memory clock.
const CLOCK_SM: c_uint = 1;
const CLOCK_MEMORY: c_uint = 2;

/// NVML's number of the chip's temperature sensor.
const TEMPERATURE_GPU: c_uint = 0;

/// The file of NVML.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Bytes of a UUID as text, its end included.
const UUID_BYTES: usize = 96;

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
    pub(super) library: Library,
    pub(super) device: *mut c_void,
    /// Energy that the GPU had used before.
    energy_before: u64,
}

/// What `nvmlDeviceGetMemoryInfo` fills in.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// What `nvmlDeviceGetUtilizationRates` fills in: percent of the last sample.
#[repr(C)]
#[derive(Default)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

// SAFETY: NVML may be called from any thread, and its handles are only names.
unsafe impl Send for Nvml {}
// SAFETY: as above.
unsafe impl Sync for Nvml {}

pub(super) type Handle = *mut c_void;

impl Nvml {
    /// The GPU at `pci_bus_id`, or why NVML does not provide it.
    pub(crate) fn open(pci_bus_id: &str) -> Result<Nvml, String> {
        Nvml::open_file(LIBRARY, pci_bus_id)
    }

    pub(super) fn open_file(file: &str, pci_bus_id: &str) -> Result<Nvml, String> {
        // SAFETY: NVIDIA's library has no unsound start-up code.
        let library =
            unsafe { Library::new(file) }.map_err(|err| format!("no NVML ({file}): {err}"))?;
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
        let mut nvml = Nvml { library, device, energy_before: 0 };
        nvml.energy_before = nvml.energy().unwrap_or_default();
        Ok(nvml)
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

    /// Everything that metrics report.
    pub(crate) fn readings(&self) -> DeviceReadings {
        let memory = self.memory();
        DeviceReadings {
            uuid: self.uuid(),
            utilization_percent: self.utilization(),
            power_milliwatts: self.number(b"nvmlDeviceGetPowerUsage\0"),
            power_limit_milliwatts: self.number(b"nvmlDeviceGetEnforcedPowerLimit\0"),
            energy_millijoules: self
                .energy()
                .map(|energy| energy.saturating_sub(self.energy_before)),
            memory_total: memory.as_ref().map(|memory| Bytes(memory.total)),
            memory_used: memory.as_ref().map(|memory| Bytes(memory.in_use())),
            tuned_steps: None,
        }
    }

    /// Memory in use on the GPU by all processes, in bytes.
    pub(crate) fn memory_used(&self) -> Option<u64> {
        self.memory().map(|memory| memory.in_use())
    }

    fn energy(&self) -> Option<u64> {
        self.long(b"nvmlDeviceGetTotalEnergyConsumption\0")
    }

    fn memory(&self) -> Option<Memory> {
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
        (code == SUCCESS && memory.total > 0).then_some(memory)
    }

    fn utilization(&self) -> Option<u32> {
        let mut utilization = Utilization::default();
        // SAFETY: the symbol has this type, and `utilization` has the layout it fills in.
        let code = unsafe {
            let call = self
                .library
                .get::<unsafe extern "C" fn(Handle, *mut Utilization) -> c_int>(
                    b"nvmlDeviceGetUtilizationRates\0",
                )
                .ok()?;
            call(self.device, &mut utilization)
        };
        (code == SUCCESS).then_some(utilization.gpu)
    }

    fn uuid(&self) -> Option<String> {
        let mut text = [0u8; UUID_BYTES];
        // SAFETY: the symbol has this type; it writes at most as many bytes as it is told.
        let code = unsafe {
            let call = self
                .library
                .get::<unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> c_int>(
                    b"nvmlDeviceGetUUID\0",
                )
                .ok()?;
            call(self.device, text.as_mut_ptr().cast(), UUID_BYTES as c_uint)
        };
        if code != SUCCESS {
            return None;
        }
        Some(CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?.to_string())
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

impl Memory {
    /// What all processes use; NVML's own count excludes what the driver reserves.
    fn in_use(&self) -> u64 {
        self.total - self.free.min(self.total)
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

pub(super) fn check(call: &str, code: c_int) -> Result<(), String> {
    if code == SUCCESS { Ok(()) } else { Err(format!("{call} failed with code {code}")) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// A library with NVML's functions; a GPU without a limit of power, as some are.
    const FAKE: &str = r#"
        #include <string.h>
        typedef struct { unsigned long long total, free, used; } Memory;
        typedef struct { unsigned int gpu, memory; } Utilization;
        static unsigned long long energy = 5000;
        extern "C" {
        int nvmlInit_v2(void) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
            if (strcmp(bus, "0000:01:00.0") != 0) return 6;
            *device = &energy;
            return 0;
        }
        int nvmlDeviceGetPowerUsage(void *, unsigned int *value) { *value = 70500; return 0; }
        int nvmlDeviceGetEnforcedPowerLimit(void *, unsigned int *) { return 3; }
        int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *value) {
            *value = *(unsigned long long *)device;
            *(unsigned long long *)device += 250;
            return 0;
        }
        int nvmlDeviceGetMemoryInfo(void *, Memory *memory) {
            memory->total = 1000; memory->free = 300; memory->used = 600;
            return 0;
        }
        int nvmlDeviceGetUtilizationRates(void *, Utilization *value) {
            value->gpu = 42; value->memory = 7;
            return 0;
        }
        int nvmlDeviceGetUUID(void *, char *text, unsigned int length) {
            strncpy(text, "GPU-1234", length);
            return 0;
        }
        }
    "#;

    fn fake(folder: &Path) -> String {
        let (source, library) = (folder.join("nvml.cpp"), folder.join("libfake-nvml.so"));
        std::fs::write(&source, FAKE).expect("a folder to write to");
        let built = Command::new("g++")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status()
            .expect("g++ is installed");
        assert!(built.success());
        library.to_str().expect("text").to_string()
    }

    #[test]
    fn readings_are_those_of_the_library() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = fake(folder.path());
        let refused = Nvml::open_file(&file, "0000:02:00.0").err().expect("no such GPU");
        assert!(refused.contains("code 6"), "{refused}");
        let nvml = Nvml::open_file(&file, "0000:01:00.0").expect("the GPU");
        let readings = nvml.readings();
        let expected = DeviceReadings {
            uuid: Some("GPU-1234".to_string()),
            utilization_percent: Some(42),
            power_milliwatts: Some(70_500),
            power_limit_milliwatts: None,
            energy_millijoules: Some(250),
            memory_total: Some(Bytes(1000)),
            memory_used: Some(Bytes(700)),
            tuned_steps: None,
        };
        assert_eq!(readings, expected);
        assert_eq!(nvml.readings().energy_millijoules, Some(500));
        // It has no function for clocks.
        assert_eq!(nvml.health().sm_mhz, None);
    }

    #[test]
    fn a_missing_library_is_named() {
        let error = Nvml::open_file("libabsent-nvml.so", "0").err().expect("no library");
        assert!(error.contains("libabsent-nvml.so"), "{error}");
    }
}
