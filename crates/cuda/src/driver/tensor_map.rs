//! Tensor maps: how the copy engine (TMA) reads a tensor.

use std::ffi::c_int;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType as DataType, CUtensorMapFloatOOBfill as OutsideFill,
    CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as L2Promotion,
    CUtensorMapSwizzle as Swizzle,
};
use model::gpu::{CopyShape, TensorMap};

use super::call::check;
use crate::error::CudaError;

/// Dimensions of a tensor, at most.
const RANK_MAX: usize = 5;

/// Channels of one copy: 128 bytes of halves, the row that is swizzled.
const CHANNELS: u32 = 64;

/// `map` of the tensor at `address`, as kernels expect it among their arguments. Needs a loaded
/// driver and no context.
pub(crate) fn encode_map(
    map: &TensorMap,
    address: u64,
) -> Result<[u8; TensorMap::BYTES], CudaError> {
    let rank = map.sizes.len();
    if !(2..=RANK_MAX).contains(&rank) || map.strides.len() != rank - 1 {
        return Err(CudaError::Misuse("a tensor map needs a stride for every size but the first"));
    }
    let mut raw = CUtensorMap { opaque: [0; 16] };
    let (sizes, strides) = (map.sizes.as_ptr(), map.strides.as_ptr());
    let at = address as *mut std::ffi::c_void;
    let code = match &map.copy {
        CopyShape::Box(extents) if extents.len() == rank => {
            let ones = [1u32; RANK_MAX];
            // SAFETY: all arrays have as many elements as the rank says (strides: one less), and
            // `raw` receives the result. The address is only encoded.
            unsafe {
                sys::cuTensorMapEncodeTiled(
                    &mut raw,
                    DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                    rank as u32,
                    at,
                    sizes,
                    strides,
                    extents.as_ptr(),
                    ones.as_ptr(),
                    Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                    L2Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    OutsideFill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                )
            }
        }
        CopyShape::Pixels { count, first, last, steps } if rank == 4 => {
            let (lower, upper): ([c_int; 2], [c_int; 2]) = (*first, *last);
            let steps = [1, steps[0], steps[1], 1];
            // SAFETY: as above; corners have two elements, one for each spatial dimension.
            unsafe {
                sys::cuTensorMapEncodeIm2col(
                    &mut raw,
                    DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                    rank as u32,
                    at,
                    sizes,
                    strides,
                    lower.as_ptr(),
                    upper.as_ptr(),
                    CHANNELS,
                    *count,
                    steps.as_ptr(),
                    Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                    L2Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    OutsideFill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                )
            }
        }
        _ => return Err(CudaError::Misuse("a tensor map's copy has another rank than its tensor")),
    };
    check("cuTensorMapEncode", code)?;
    let mut bytes = [0; TensorMap::BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(raw.opaque) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::gpu::MemoryLocation;

    #[test]
    fn inconsistent_ranks_are_refused_before_the_driver_is_called() {
        let map = |sizes: &[u64], strides: &[u64], copy| TensorMap {
            at: 0,
            to: MemoryLocation::Arena(0),
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
            copy,
        };
        let pixels = CopyShape::Pixels { count: 128, first: [0; 2], last: [0; 2], steps: [1; 2] };
        let wrong = [
            map(&[64], &[], CopyShape::Box(vec![64])),
            map(&[64, 8], &[], CopyShape::Box(vec![64, 8])),
            map(&[64, 8], &[128], CopyShape::Box(vec![64])),
            map(&[1; 6], &[16; 5], CopyShape::Box(vec![1; 6])),
            map(&[64, 8], &[128], pixels),
        ];
        for map in wrong {
            assert!(matches!(encode_map(&map, 256), Err(CudaError::Misuse(_))), "{map:?}");
        }
    }
}
