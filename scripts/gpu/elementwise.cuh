// Elementwise operators that are not fused into a product, and the conversion of an image to the
// layout that the first convolution reads.
#pragma once
#include "base.cuh"

namespace tiles {

// y = act(a * scale[c] + shift[c] + b); scale/shift and b are optional. Rows may be slices of wider
// buffers.
struct MapArgs {
    const half* a;
    const half* b;
    const float* scale;
    const float* shift;
    half* output;
    int a_stride, b_stride, out_stride;
    int items; // rows * channels / 8
    int act;
    FastDiv by_chunks;
};

struct Map {
    using Args = MapArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, chunk;
        int row = a.by_chunks.split(item, chunk);
        dependency.wait();
        if (item >= a.items) return true;
        float v[8], w[8];
        unpack(load_activations(a.a + (size_t)row * a.a_stride + chunk * 8), v);
        if (a.scale) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                v[i] = fmaf(v[i], a.scale[chunk * 8 + i], a.shift[chunk * 8 + i]);
        }
        if (a.b) {
            unpack(load_activations(a.b + (size_t)row * a.b_stride + chunk * 8), w);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += w[i];
        }
        activate(v, a.act);
        *(uint4*)(a.output + (size_t)row * a.out_stride + chunk * 8) = pack(v);
        return true;
    }
};

// fp32 NCHW with three channels to fp16 NHWC with four, the last one zero.
struct ImageArgs {
    const float* input;
    half* output;
    int pixels; // batch * plane
    FastDiv by_plane;
};

struct Image {
    using Args = ImageArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int i = t * kThreads + threadIdx.x, at;
        int image = a.by_plane.split(i, at);
        int plane = (int)a.by_plane.divisor;
        dependency.wait();
        if (i >= a.pixels) return true;
        const float* p = a.input + (size_t)image * 3 * plane + at;
        half2 lo = __floats2half2_rn(__ldcg(p), __ldcg(p + plane)),
              hi = __floats2half2_rn(__ldcg(p + 2 * plane), 0.f);
        *(uint2*)(a.output + (size_t)i * 4) = make_uint2(*(u32*)&lo, *(u32*)&hi);
        return true;
    }
};

} // namespace tiles
