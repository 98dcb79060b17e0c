//! Result codes of driver calls.

use std::ffi::{CStr, c_char};

use base::Bytes;
use cudarc::driver::sys::{self, CUresult};

use crate::error::CudaError;

/// `code` as an error, with the driver's description.
pub(crate) fn describe(call: &'static str, code: CUresult) -> CudaError {
    if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return CudaError::OutOfMemory { call, bytes: Bytes(0) };
    }
    let mut name: *const c_char = std::ptr::null();
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: both receive the results, a static string or null.
    unsafe {
        let _ = sys::cuGetErrorName(code, &mut name);
        let _ = sys::cuGetErrorString(code, &mut text);
    }
    CudaError::Call { call, code: code as u32, name: static_text(name), text: static_text(text) }
}

fn static_text(text: *const c_char) -> String {
    if text.is_null() {
        return "unknown".to_string();
    }
    // SAFETY: the driver's error texts are static and is NUL-terminated.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

pub(super) fn check(call: &'static str, code: CUresult) -> Result<(), CudaError> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(describe(call, code)) }
}
