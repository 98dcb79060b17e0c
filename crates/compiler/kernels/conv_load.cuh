// The arguments and tile shapes of a convolution, and the copies of its operands into shared
// memory.
#pragma once
#include "base.cuh"

namespace tiles {

// How the parts of a product whose depth is split over blocks are added.
enum SplitReduction : int {
    kWhole = 0, // not split
    // fp32 partial sums in memory; the last part to arrive adds them in a fixed order
    kWorkspace = 1,
    kCluster = 2, // the parts are one cluster and add through distributed shared memory
};

// How a thread addresses the input as the depth advances. Index arithmetic is a large part of a
// small layer's instructions, so the common cases are specialised.
enum InputAddressing : int {
    kGeneral = 0, // any window, two divisions by multiplication per step
    kPoint = 1, // 1x1 without padding: pointers that only advance
    // in_c a multiple of BK, no dilation, at most 16 x 16: a whole step is in one filter tap
    kTaps = 2,
};

struct ConvArgs {
    const half* input;
    const half* weight;
    const float* bias; // out_c values, or null
    const half* residual; // or null
    half* output;
    // Config::kPre (1x1 only): depth scales, then depth shifts, applied to the input before a relu
    const half* pre;
    float* workspace; // kWorkspace: WK * BM * (BN + 8) floats per tile
    // kWorkspace: one word per output tile, zero before a launch and after it
    u32* arrivals;
    int in_h, in_w, in_c, in_stride;
    int out_c, out_stride, residual_stride;
    int ker_h, ker_w, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w;
    int rows, depth, weight_stride;
    int splits, reduce, act;
    FastDiv by_splits, by_tiles_n, by_out_hw, by_out_w, by_in_c, by_ker_w;
};

// BM x BN outputs per block, BK of depth per step, WM x WN warps over the tile times WK over the
// depth of a step, a ring of `Stages` steps in shared memory.
template <int BM_, int BN_, int BK_, int WM_, int WN_, int WK_, int Stages_, int Addressing_,
    int Vec_ = 8, bool Pre_ = false>
struct ConvConfig {
    static constexpr int BM = BM_, BN = BN_, BK = BK_, WM = WM_, WN = WN_, WK = WK_;
    static constexpr int kStages = Stages_, kAddressing = Addressing_, kVec = Vec_;
    static constexpr bool kPre = Pre_;
    static constexpr int kThreads = WM * WN * WK * kWarp;
    static constexpr int kWarpM = BM / WM, kWarpN = BN / WN;
    static constexpr int kFragM = kWarpM / 16, kFragN = kWarpN / 8;
    static constexpr int kStageBytes = (BM + BN) * BK * 2;
    // Rows of the staged sums are 8 floats longer than the tile, which spreads fragment stores over
    // all banks.
    static constexpr int kStaged = BN + 8, kPart = BM * kStaged;
    static constexpr int kRing = kStageBytes * kStages;
    // The ring is free when sums are staged.
    static constexpr int kBias = kRing > WK * kPart * 4 ? kRing : WK * kPart * 4;
    static constexpr int kPreAt = kBias + BN * 4;
    static constexpr int kPreDepth = kPre ? 2560 : 0;
    static constexpr int kShared = kPreAt + kPreDepth * 4;
    // Blocks that an SM can hold: by its shared memory, and by its registers when a thread needs 64
    // besides its sums.
    static constexpr int kBySharedMemory = (226 << 10) / (kShared + 1024);
    static constexpr int kByRegisters = 65536 / (kThreads * (kFragM * kFragN * 4 + 64));
    static constexpr int kBlocks = kBySharedMemory < kByRegisters ? kBySharedMemory : kByRegisters;
    // Steps between two checks of the epoch: about the same work, one to three microseconds, for
    // all but the smallest tiles.
    static constexpr int kWork = BM * BN * BK;
    static constexpr int kWatchPeriod = kWork >= 128 * 128 * 64   ? 2
                                        : kWork >= 128 * 128 * 32 ? 4
                                                                  : 8;
    static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "a warp's tile is made of 16x16 pieces");
    static_assert(BK == 32 || BK == 64, "the swizzle knows rows of 64 and 128 bytes");
    static_assert(BK / 16 % WK == 0, "every warp has the same number of k16 steps");
};

// Byte offset of 16-byte chunk `chunk` of `row`. The exclusive-or puts the eight rows that one
// ldmatrix reads into eight different bank groups.
template <int BK>
__device__ __forceinline__ u32 swizzled(int row, int chunk)
{
    int key = BK == 64 ? row & 7 : row >> 1 & 3;
    return (u32)(row * BK * 2 + (chunk ^ key) * 16);
}

// The part of the output and of the depth that a tile number denotes.
struct ConvPlace {
    int m, n, split, output_tile, first, steps;
};

template <class C>
__device__ __forceinline__ ConvPlace locate(const ConvArgs& a, int tile)
{
    ConvPlace p;
    p.output_tile = a.by_splits.split(tile, p.split);
    int column;
    p.m = a.by_tiles_n.split(p.output_tile, column) * C::BM;
    p.n = column * C::BN;
    int total = (a.depth + C::BK - 1) / C::BK;
    p.first = a.by_splits.quotient(total * p.split);
    p.steps = a.by_splits.quotient(total * (p.split + 1)) - p.first;
    return p;
}

// Which chunks of a stage a thread copies: one column of chunks, every kRows-th row.
template <class C, int Rows, int Vec>
struct Share {
    static constexpr int kChunks = C::BK / Vec;
    static constexpr int kRows = C::kThreads / kChunks;
    static constexpr int kPasses = Rows / kRows;
    static constexpr int kPassBytes = kRows * C::BK * 2;
    static_assert(kPasses >= 1 && Rows % kRows == 0 && kRows % 8 == 0,
        "every thread copies whole rows of chunks");
    static __device__ __forceinline__ int chunk() { return (int)threadIdx.x % kChunks; }
    static __device__ __forceinline__ int row() { return (int)threadIdx.x / kChunks; }
    static __device__ __forceinline__ u32 slot()
    { return swizzled<C::BK>(row(), chunk() * Vec / 8) + chunk() * Vec % 8 * 2; }
};

// Output pixel m: its image and the input pixel of the filter's first tap.
struct Corner {
    int image, y, x;
    __device__ __forceinline__ Corner(const ConvArgs& a, int m)
    {
        int pixel;
        image = a.by_out_hw.split(m, pixel);
        y = a.by_out_w.split(pixel, x) * a.stride_h - a.pad_h;
        x = x * a.stride_w - a.pad_w;
    }
    __device__ __forceinline__ int offset(const ConvArgs& a) const
    { return ((image * a.in_h + y) * a.in_w + x) * a.in_stride; }
};

template <class C, int InputAddressing>
struct InputLoader;

template <class C>
struct InputLoader<C, kGeneral> {
    using S = Share<C, C::BM, C::kVec>;
    int offset[S::kPasses];
    int corner[S::kPasses]; // row in the high half, column in the low half, both signed
    int depth;
    u32 slot;

    __device__ __forceinline__ InputLoader(const ConvArgs& a, const ConvPlace& p)
    {
        depth = p.first * C::BK + S::chunk() * C::kVec;
        slot = S::slot();
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i) {
            int m = p.m + S::row() + i * S::kRows;
            Corner c(a, m);
            offset[i] = c.offset(a);
            // A row beyond the last is never inside.
            corner[i] = m < a.rows ? c.y * 65536 + (c.x & 0xffff) : -32768 * 65536;
        }
    }
    __device__ __forceinline__ void load(const ConvArgs& a, u32 stage)
    {
        int channel, kx;
        int ky = a.by_ker_w.split(a.by_in_c.split(depth, channel), kx) * a.dil_h;
        kx *= a.dil_w;
        int shift = (ky * a.in_w + kx) * a.in_stride + channel;
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i) {
            int y = (corner[i] >> 16) + ky, x = (int)(short)corner[i] + kx;
            bool inside = (u32)y < (u32)a.in_h && (u32)x < (u32)a.in_w && depth < a.depth;
            copy_async<C::kVec * 2>(stage + slot + i * S::kPassBytes,
                inside ? a.input + (offset[i] + shift) : a.input, inside);
        }
        depth += C::BK;
    }
};

template <class C>
struct InputLoader<C, kPoint> {
    using S = Share<C, C::BM, 8>;
    const half* pixel[S::kPasses];
    u32 inside; // one bit per pass
    int left; // depth from this thread's chunk to the end
    u32 slot;

    __device__ __forceinline__ InputLoader(const ConvArgs& a, const ConvPlace& p)
        : inside(0)
    {
        int depth = p.first * C::BK + S::chunk() * 8;
        left = a.depth - depth;
        slot = S::slot();
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i) {
            int m = p.m + S::row() + i * S::kRows;
            bool valid = m < a.rows;
            inside |= (u32)valid << i;
            pixel[i] = a.input + (valid ? Corner(a, m).offset(a) + depth : 0);
        }
    }
    __device__ __forceinline__ void load(const ConvArgs&, u32 stage)
    {
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i) {
            copy_async<16>(
                stage + slot + i * S::kPassBytes, pixel[i], (inside >> i & 1) && left > 0);
            pixel[i] += C::BK;
        }
        left -= C::BK;
    }
};

template <class C>
struct InputLoader<C, kTaps> {
    using S = Share<C, C::BM, 8>;
    const half* corner[S::kPasses];
    u32 inside[S::kPasses]; // bit ky: the tap's row is in the image; bit 16 + kx: its column is
    int channel, ky, kx; // the same for all threads
    u32 slot;

    __device__ __forceinline__ InputLoader(const ConvArgs& a, const ConvPlace& p)
    {
        slot = S::slot();
        ky = a.by_ker_w.split(a.by_in_c.split(p.first * C::BK, channel), kx);
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i) {
            int m = p.m + S::row() + i * S::kRows;
            Corner c(a, m);
            corner[i] = a.input + c.offset(a) + S::chunk() * 8;
            inside[i] = m < a.rows ? taps(c.y, a.in_h) | taps(c.x, a.in_w) << 16 : 0;
        }
    }
    // Bit t: position first + t is one of the `size` that exist.
    static __device__ __forceinline__ u32 taps(int first, int size)
    {
        int low = max(-first, 0), high = min(size - first, 16);
        return high > low ? (1u << high) - (1u << low) : 0;
    }
    __device__ __forceinline__ void load(const ConvArgs& a, u32 stage)
    {
        int shift = (ky * a.in_w + kx) * a.in_stride + channel;
        u32 tap = 1u << ky | 65536u << kx;
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i)
            copy_async<16>(
                stage + slot + i * S::kPassBytes, corner[i] + shift, (inside[i] & tap) == tap);
        channel += C::BK;
        if (channel == a.in_c) {
            channel = 0;
            if (++kx == a.ker_w) kx = 0, ++ky;
        }
    }
};

template <class C>
struct WeightLoader {
    using S = Share<C, C::BN, 8>;
    const half* row;
    int left; // depth from this thread's chunk to the end
    u32 inside; // one bit per pass: the output channel exists
    u32 slot;

    __device__ __forceinline__ WeightLoader(const ConvArgs& a, const ConvPlace& p)
        : inside(0)
    {
        int depth = p.first * C::BK + S::chunk() * 8, n = p.n + S::row();
        left = a.weight_stride - depth;
        row = a.weight + (size_t)n * a.weight_stride + depth;
        slot = C::BM * C::BK * 2 + S::slot();
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i) inside |= (u32)(n + i * S::kRows < a.out_c) << i;
    }
    __device__ __forceinline__ void load(const ConvArgs& a, u32 stage)
    {
        const half* from = row;
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i) {
            copy_async<16>(stage + slot + i * S::kPassBytes, from, (inside >> i & 1) && left > 0);
            from += (size_t)S::kRows * a.weight_stride;
        }
        row += C::BK;
        left -= C::BK;
    }
};

} // namespace tiles
