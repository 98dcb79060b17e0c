// An experiment that decides a design: a whole network in one persistent launch. Every block walks the list of steps, computes
// its tiles, and a grid-wide barrier stands where a graph would have an edge. It uses the same tile functions, with a gate that
// waits at the barrier, so weight loads cross it just as they cross a programmatic launch.
#pragma once
#include "steps.cuh"

namespace harness {

struct MegaStep {
    int kind, tiles;
    union {
        ConvArgs conv;
        PoolArgs pool;
        GlobalPoolArgs global;
        ImageArgs image;
    };
};

struct BarrierGate {
    const u32* arrived;
    u32 target;
    bool* passed; // of this thread

    __device__ __forceinline__ void wait() const
    {
        if (*passed) return;
        *passed = true;
        if (threadIdx.x == 0) {
            u32 v;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(arrived) : "memory");
            while (v < target);
        }
        __syncthreads();
    }
};

// The shapes it holds, each with both walks. All have the same number of threads.
template <int Walk>
using MegaWide = ConvConfig<64, 64, 64, 2, 2, 1, 4, Walk>;
template <int Walk>
using MegaSquare = ConvConfig<32, 32, 64, 1, 1, 4, 6, Walk>;
template <int Walk>
using MegaFlat = ConvConfig<16, 64, 64, 1, 1, 4, 6, Walk>;
using MegaImage = ConvConfig<64, 64, 32, 2, 2, 1, 4, kGeneral, 4>;
constexpr int kMegaThreads = 128, kMegaShared = 66 << 10;
enum { kMegaImageConv = 6, kMegaMaxPool, kMegaGlobalPool, kMegaImage };

template <class Op>
__device__ __forceinline__ void mega_tiles(const typename Op::Args& a, int tiles, unsigned char* shared, const BarrierGate& gate)
{
    NoWatch watch;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        Op::tile(a, t, shared, watch, gate);
        __syncthreads();
    }
}

// Global pooling wants 256 threads as a graph node; here every operator has the block it is given.
__device__ __forceinline__ void mega_global_pool(const GlobalPoolArgs& a, int tiles, const BarrierGate& gate)
{
    gate.wait();
    int images = tiles / (int)a.by_groups.divisor;
    for (int i = blockIdx.x * kMegaThreads + threadIdx.x; i < images * a.channels; i += gridDim.x * kMegaThreads) {
        int c = i % a.channels, image = i / a.channels;
        float sum = 0.f;
        for (int p = 0; p < a.pixels; ++p) {
            unsigned short h = __ldcg((const unsigned short*)a.input + ((size_t)image * a.pixels + p) * a.in_stride + c);
            sum += __half2float(__ushort_as_half(h));
        }
        a.output[(size_t)image * a.out_stride + c] = __float2half(sum / (float)a.pixels);
    }
}

__global__ void __launch_bounds__(kMegaThreads, 2) mega(const MegaStep* steps, int count, u32* arrived)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ MegaStep step;
    for (int i = 0; i < count; ++i) {
        for (int w = threadIdx.x; w < (int)(sizeof step / 4); w += kMegaThreads) ((u32*)&step)[w] = ((const u32*)(steps + i))[w];
        __syncthreads();
        bool passed = false;
        BarrierGate gate = {arrived, gridDim.x * i, &passed};
        switch (step.kind) {
        case 0: mega_tiles<Conv<MegaWide<kPoint>>>(step.conv, step.tiles, shared, gate); break;
        case 1: mega_tiles<Conv<MegaWide<kTaps>>>(step.conv, step.tiles, shared, gate); break;
        case 2: mega_tiles<Conv<MegaSquare<kPoint>>>(step.conv, step.tiles, shared, gate); break;
        case 3: mega_tiles<Conv<MegaSquare<kTaps>>>(step.conv, step.tiles, shared, gate); break;
        case 4: mega_tiles<Conv<MegaFlat<kPoint>>>(step.conv, step.tiles, shared, gate); break;
        case 5: mega_tiles<Conv<MegaFlat<kTaps>>>(step.conv, step.tiles, shared, gate); break;
        case kMegaImageConv: mega_tiles<Conv<MegaImage>>(step.conv, step.tiles, shared, gate); break;
        case kMegaMaxPool: mega_tiles<Pool<true>>(step.pool, step.tiles, shared, gate); break;
        case kMegaGlobalPool: mega_global_pool(step.global, step.tiles, gate); break;
        case kMegaImage: mega_tiles<Image>(step.image, step.tiles, shared, gate); break;
        }
        // A block without a tile must not run ahead: its count would stand for an earlier step.
        gate.wait();
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
    }
}

// Which case of the persistent kernel computes a variant; negative when none does.
inline int mega_case(const Variant& v)
{
    if (v.kernel < 0 || v.reduce == kCluster) return -1;
    const ConvKernel& k = conv_kernels()[v.kernel];
    const char* names[] = {"64x64x64", "32x32x64k4", "16x64x64k4"};
    for (int i = 0; i < 3; ++i)
        if (!strcmp(k.name, names[i])) return 2 * i + (k.walk == kTaps);
    return strcmp(k.name, "64x64x32i") ? -1 : (int)kMegaImageConv;
}
inline bool fits_mega(const Step& s, const Variant& v) { return s.kind != Kind::Conv || mega_case(v) >= 0; }

inline bool mega_step(const Step& s, const Variant& v, MegaStep& m)
{
    memset(&m, 0, sizeof m);
    switch (s.kind) {
    case Kind::Conv:
        if (mega_case(v) < 0) return false;
        m.kind = mega_case(v);
        m.conv = s.conv;
        m.tiles = specialize(m.conv, v);
        return true;
    case Kind::MaxPool: m.kind = kMegaMaxPool, m.pool = s.pool, m.tiles = ceil_div(s.pool.items, kMegaThreads); return true;
    case Kind::GlobalPool:
        m.kind = kMegaGlobalPool, m.global = s.global, m.tiles = s.batch * (int)s.global.by_groups.divisor;
        return !s.global.pre;
    case Kind::Image: m.kind = kMegaImage, m.image = s.image, m.tiles = ceil_div(s.image.pixels, kMegaThreads); return true;
    default: return false;
    }
}

// Microseconds of the network as one launch on `blocks` blocks an SM, or a negative number when it has steps this cannot run.
inline double time_mega(const std::vector<Step>& steps, const std::vector<Variant>& choice, int blocks, cudaStream_t stream)
{
    std::vector<MegaStep> list(steps.size());
    for (size_t i = 0; i < steps.size(); ++i)
        if (!mega_step(steps[i], choice[i], list[i])) return -1;
    MegaStep* device = device_alloc<MegaStep>(list.size());
    u32* arrived = device_alloc<u32>(1);
    CHECK(cudaMemcpy(device, list.data(), list.size() * sizeof(MegaStep), cudaMemcpyHostToDevice));
    CHECK(cudaFuncSetAttribute(mega, cudaFuncAttributeMaxDynamicSharedMemorySize, kMegaShared));
    int resident = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, mega, kMegaThreads, kMegaShared));
    if (resident < blocks) return -1;
    Graph graph(stream, [&](cudaStream_t s) {
        CHECK(cudaMemsetAsync(arrived, 0, 4, s));
        mega<<<multiprocessors() * blocks, kMegaThreads, kMegaShared, s>>>(device, (int)list.size(), arrived);
    });
    double us = graph.median(50);
    CHECK(cudaFree(device));
    CHECK(cudaFree(arrived));
    return us;
}

} // namespace harness
