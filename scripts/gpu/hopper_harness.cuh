// A wgmma kernel with its launch parameters, as one translation unit makes it (hopper_kernel.cu).
#pragma once
#include <cuda.h>

#include "hopper.cuh"
#include "support.cuh"
#include "wrap.cuh"

namespace harness {

struct HopperKernel {
    const char* name;
    int bm, bn, threads, shared, blocks, tiles; // output tiles of a best-effort tile
    bool window;
    const void *rt, *be, *be_grid, *be_long;
};

inline std::vector<HopperKernel>& hopper_kernels()
{
    static std::vector<HopperKernel> all;
    return all;
}

} // namespace harness
