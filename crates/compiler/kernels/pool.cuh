// Pooling, NHWC. Windows: a thread computes eight channels of one output pixel. Global average: a
// block computes 64 channels of one image, optionally of relu(x * scale + shift), which precedes
// the last pooling of a pre-activation network.
#pragma once
#include "base.cuh"

namespace tiles {

struct PoolArgs {
    const half* input;
    half* output;
    int in_h, in_w, in_stride;
    int out_stride;
    int ker_h, ker_w, stride_h, stride_w, pad_h, pad_w;
    int items; // batch * out_h * out_w * channels / 8
    int count_padding; // average: divide by the whole window, not by the part inside the image
    FastDiv by_chunks, by_out_w, by_out_h;
};

template <bool Max>
struct Pool {
    using Args = PoolArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    static __device__ __forceinline__ void fold(float (&acc)[8], uint4 raw)
    {
        float v[8];
        unpack(raw, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] = Max ? fmaxf(acc[i], v[i]) : acc[i] + v[i];
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, channel, x, y;
        int pixel = a.by_chunks.split(item, channel);
        int image = a.by_out_h.split(a.by_out_w.split(pixel, x), y);
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        float acc[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] = Max ? -65504.f : 0.f;
        int inside = 0;
        for (int ky = 0; ky < a.ker_h; ++ky)
            for (int kx = 0; kx < a.ker_w; ++kx) {
                int iy = y * a.stride_h - a.pad_h + ky, ix = x * a.stride_w - a.pad_w + kx;
                if ((u32)iy >= (u32)a.in_h || (u32)ix >= (u32)a.in_w) continue;
                fold(acc,
                    load_activations(a.input +
                                     (size_t)((image * a.in_h + iy) * a.in_w + ix) * a.in_stride +
                                     channel * 8));
                ++inside;
            }
        if (!Max) {
            float scale = 1.f / (float)(a.count_padding ? a.ker_h * a.ker_w : inside);
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[i] *= scale;
        }
        if (yield_point.is_preempted()) return false;
        *(uint4*)(a.output + (size_t)pixel * a.out_stride + channel * 8) = pack(acc);
        return true;
    }
};

struct GlobalPoolArgs {
    const half* input;
    half* output;
    const half* pre; // channels scales, then channels shifts; or null
    int pixels, in_stride, out_stride, channels;
    FastDiv by_groups; // ceil(channels / 64)
};

struct GlobalPool {
    using Args = GlobalPoolArgs;
    static constexpr int kThreads = 256, kShared = 0, kBlocks = 1;
    static constexpr int kLanes = kThreads / 8; // threads that share eight channels

    static __device__ __forceinline__ void sum_pixels(
        const Args& a, int image, int channel, float (&sum)[8])
    {
        float scale[8], shift[8], v[8];
        if (a.pre) {
            unpack(load_weights(a.pre + channel), scale);
            unpack(load_weights(a.pre + a.channels + channel), shift);
        }
        const half* base = a.input + (size_t)image * a.pixels * a.in_stride + channel;
        for (int pixel = threadIdx.x / 8; pixel < a.pixels; pixel += kLanes) {
            unpack(load_activations(base + (size_t)pixel * a.in_stride), v);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                sum[i] += a.pre ? fmaxf(fmaf(v[i], scale[i], shift[i]), 0.f) : v[i];
        }
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        __shared__ float part[kThreads / kWarp][64];
        int group, image = a.by_groups.split(t, group);
        int channel = group * 64 + threadIdx.x % 8 * 8;
        float sum[8] = {};
        dependency.wait();
        yield_point.poll();
        if (channel < a.channels) sum_pixels(a, image, channel, sum);
        // Lanes with a distance of eight hold the same channels.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], 8);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 16);
        }
        if (threadIdx.x % kWarp < 8)
#pragma unroll
            for (int i = 0; i < 8; ++i) part[threadIdx.x / kWarp][threadIdx.x % 8 * 8 + i] = sum[i];
        __syncthreads();
        if (yield_point.is_preempted()) return false;
        int c = threadIdx.x;
        if (c < 64 && group * 64 + c < a.channels) {
            float total = 0.f;
            for (int w = 0; w < kThreads / kWarp; ++w) total += part[w][c];
            a.output[(size_t)image * a.out_stride + group * 64 + c] =
                __float2half(total / (float)a.pixels);
        }
        return true;
    }
};

} // namespace tiles
