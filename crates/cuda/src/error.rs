//! Errors of the driver and of opening a device.

use base::Bytes;
use cudarc::driver::sys::CUresult;
use device::DeviceError;
use thiserror::Error;

/// Why a device could not be opened. Each message says what to do.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OpenError {
    /// There is no driver on this machine, or it does not start.
    #[error("no CUDA driver: {0}")]
    NoDriver(String),
    /// The driver is older than this crate needs.
    #[error(
        "the CUDA driver supports CUDA {found}, at least {needed} is needed; update the driver"
    )]
    OldDriver {
        /// The driver's version.
        found: String,
        /// The oldest supported version.
        needed: String,
    },
    /// There is no GPU of this number.
    #[error("there is no cuda:{ordinal}: the driver knows {count} GPUs, counted from 0")]
    NoSuchDevice {
        /// The requested number.
        ordinal: usize,
        /// Number of GPUs.
        count: usize,
    },
    /// The GPU has faulted, and something of it is not dropped yet.
    #[error("cuda:{ordinal} has faulted and is still in use; it can be opened when it is not")]
    Faulted {
        /// The number of the GPU.
        ordinal: usize,
    },
    /// The GPU is too old for the kernels.
    #[error("{device} has compute capability {capability}, the kernels need {needed} or higher")]
    OldDevice {
        /// The requested device.
        device: String,
        /// Its compute capability, 75 for 7.5.
        capability: u32,
        /// The lowest supported capability.
        needed: u32,
    },
    /// The GPU cannot be divided into that many parts.
    #[error(
        "{multiprocessors} multiprocessors do not make {parts} parts of at least {group}; \
         request fewer parts"
    )]
    Parts {
        /// The requested number of parts.
        parts: usize,
        /// SMs of the GPU.
        multiprocessors: u32,
        /// SMs are assigned in groups of this size.
        group: u32,
    },
    /// The GPU has no partition of that size.
    #[error(
        "the GPU has no partition of {multiprocessors} multiprocessors; \
         request fewer, or 0 for none"
    )]
    Partition {
        /// The requested number of SMs.
        multiprocessors: u32,
    },
    /// The run-time compiler or its headers are missing.
    #[error("{0}")]
    NoCompiler(String),
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CudaError),
    /// The folder of compiled kernels cannot be used.
    #[error("{0}")]
    Cache(String),
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CudaError {
    /// The driver refused.
    #[error("{call}: {name} ({code}): {text}")]
    Call {
        /// The function.
        call: &'static str,
        /// Its result code.
        code: u32,
        /// The name of the code.
        name: String,
        /// The driver's description of it.
        text: String,
    },
    /// No memory is free, on the device or pinned on the host.
    #[error("{call}: out of memory, {bytes} were requested")]
    OutOfMemory {
        /// The function.
        call: &'static str,
        /// The requested size.
        bytes: Bytes,
    },
    /// An earlier call met an error that the context does not recover from.
    #[error("faulted: {0}")]
    Faulted(String),
    /// A request that makes no sense; no call was made.
    #[error("{0}")]
    Misuse(&'static str),
}

impl CudaError {
    /// The same error; one about memory says how much was requested.
    pub(crate) fn with_bytes(self, bytes: u64) -> CudaError {
        match self {
            CudaError::OutOfMemory { call, .. } => {
                CudaError::OutOfMemory { call, bytes: Bytes(bytes) }
            }
            other => other,
        }
    }

    /// The error as one of `device`, which has at most `memory`. `free` is called only when memory
    /// ran out.
    pub(crate) fn into_device_error(
        self,
        device: &str,
        memory: Bytes,
        free: impl FnOnce() -> u64,
    ) -> DeviceError {
        let device = device.to_string();
        match self {
            // What it uses itself makes the limit lower, but not by a known amount.
            CudaError::OutOfMemory { bytes: needed, .. } if needed > memory && memory.0 > 0 => {
                DeviceError::TooLarge { device, needed, memory }
            }
            CudaError::OutOfMemory { bytes, .. } => {
                DeviceError::OutOfMemory { device, needed: bytes, available: Bytes(free()) }
            }
            CudaError::Faulted(reason) => DeviceError::Faulted { device, reason },
            CudaError::Misuse(why) => DeviceError::BadPlan(why.to_string()),
            CudaError::Call { .. } => DeviceError::Faulted { device, reason: self.to_string() },
        }
    }
}

/// Whether `code` is sticky: every later call of the context fails too.
pub(crate) fn is_sticky(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_CONTAINED
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
            | CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | CUresult::CUDA_ERROR_DEINITIALIZED
            | CUresult::CUDA_ERROR_UNKNOWN
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lasting_errors_are_sticky() {
        assert!(is_sticky(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        assert!(is_sticky(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        assert!(!is_sticky(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert!(!is_sticky(CUresult::CUDA_ERROR_INVALID_VALUE));
        assert!(!is_sticky(CUresult::CUDA_ERROR_NOT_READY));
    }

    #[test]
    fn out_of_memory_reports_needed_and_available_bytes() {
        let err = CudaError::OutOfMemory { call: "cuMemAlloc", bytes: Bytes(2048) };
        let text = err.into_device_error("cuda:0", Bytes(4096), || 1024).to_string();
        assert_eq!(text, "2.0 KiB needed, 1.0 KiB available on cuda:0");
    }

    #[test]
    fn what_exceeds_the_whole_memory_never_fits() {
        for (memory, never) in [(2047, true), (2048, false), (0, false)] {
            let err = CudaError::OutOfMemory { call: "cuMemAlloc", bytes: Bytes(2048) };
            let err = err.into_device_error("cuda:0", Bytes(memory), || 0);
            assert_eq!(matches!(err, DeviceError::TooLarge { .. }), never, "{err}");
        }
    }
}
