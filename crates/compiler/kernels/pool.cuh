// Pooling, NHWC. Windows: a thread computes 16 bytes of one output pixel: eight channels in half
// precision, or the largest bytes of sixteen. Global average: a
// block adds 64 channels of one image or of a part of it, optionally of relu(x * scale + shift),
// which precedes the last pooling of a pre-activation network.
#pragma once
#include "base.cuh"

namespace tiles {

struct PoolArgs {
    const void* input;
    void* output;
    int in_h, in_w, in_stride;
    int out_stride;
    int ker_h, ker_w, stride_h, stride_w, pad_h, pad_w;
    int items; // batch * out_h * out_w * channels / those of a thread
    int count_padding; // average: divide by the whole window, not by the part inside the image
    FastDiv by_chunks, by_out_w, by_out_h;
};

// Largest or mean halves.
template <bool Max>
struct HalfWindow {
    using T = half;
    float acc[8];

    __device__ __forceinline__ void begin()
    {
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] = Max ? -65504.f : 0.f;
    }
    __device__ __forceinline__ void fold(uint4 raw)
    {
        float v[8];
        unpack(raw, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] = Max ? fmaxf(acc[i], v[i]) : acc[i] + v[i];
    }
    __device__ __forceinline__ uint4 end(int count)
    {
        if (!Max) {
            float scale = 1.f / (float)count;
#pragma unroll
            for (int i = 0; i < 8; ++i) acc[i] *= scale;
        }
        return pack(acc);
    }
};

// The larger of two pairs of unsigned 16-bit numbers.
__device__ __forceinline__ u32 larger_pairs(u32 a, u32 b)
{
#ifdef TILES_EMULATED
    return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#else
    return __vmaxu2(a, b);
#endif
}

// Largest bytes. Every other byte of a word is one of a pair; signed bytes are moved by 128, which
// keeps their order.
template <class Byte>
struct ByteWindow {
    using T = Byte;
    static constexpr u32 kMoved = (Byte)-1 < 0 ? 0x80808080u : 0u;
    u32 even[4], odd[4];

    __device__ __forceinline__ void begin()
    {
#pragma unroll
        for (int i = 0; i < 4; ++i) even[i] = odd[i] = 0;
    }
    __device__ __forceinline__ void fold(uint4 raw)
    {
        u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 word = words[i] ^ kMoved;
            even[i] = larger_pairs(even[i], word & 0x00ff00ffu);
            odd[i] = larger_pairs(odd[i], word >> 8 & 0x00ff00ffu);
        }
    }
    __device__ __forceinline__ uint4 end(int)
    {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = (even[i] | odd[i] << 8) ^ kMoved;
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

template <class Window>
struct Pool {
    using Args = PoolArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        using T = typename Window::T;
        constexpr int kChannels = 16 / (int)sizeof(T);
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, channel, x, y;
        int pixel = a.by_chunks.split(item, channel);
        int image = a.by_out_h.split(a.by_out_w.split(pixel, x), y);
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        const T* input = (const T*)a.input + channel * kChannels;
        Window window;
        window.begin();
        int inside = 0;
        for (int ky = 0; ky < a.ker_h; ++ky)
            for (int kx = 0; kx < a.ker_w; ++kx) {
                int iy = y * a.stride_h - a.pad_h + ky, ix = x * a.stride_w - a.pad_w + kx;
                if ((u32)iy >= (u32)a.in_h || (u32)ix >= (u32)a.in_w) continue;
                size_t from = (size_t)((image * a.in_h + iy) * a.in_w + ix) * a.in_stride;
                window.fold(__ldcg((const uint4*)(input + from)));
                ++inside;
            }
        uint4 result = window.end(a.count_padding ? a.ker_h * a.ker_w : inside);
        if (yield_point.is_preempted()) return false;
        T* output = (T*)a.output + (size_t)pixel * a.out_stride + channel * kChannels;
        *(uint4*)output = result;
        return true;
    }
};

struct GlobalPoolArgs {
    const void* input;
    void* output;
    const half* pre; // channels scales, then channels shifts; or null
    int pixels, in_stride, out_stride, channels;
    int part_pixels; // pixels that a tile adds
    float scale; // of the sum
    FastDiv by_groups; // ceil(channels / 64)
    FastDiv by_parts; // ceil(pixels / part_pixels)
};

__device__ __forceinline__ void load_eight(const half* p, float (&v)[8])
{ unpack(load_activations(p), v); }
__device__ __forceinline__ void load_eight(const float* p, float (&v)[8])
{
    float4 lo = __ldcg((const float4*)p), hi = __ldcg((const float4*)p + 1);
    v[0] = lo.x, v[1] = lo.y, v[2] = lo.z, v[3] = lo.w;
    v[4] = hi.x, v[5] = hi.y, v[6] = hi.z, v[7] = hi.w;
}
__device__ __forceinline__ void store_one(half* p, float v) { *p = __float2half(v); }
__device__ __forceinline__ void store_one(float* p, float v) { *p = v; }

// Sums of pixels. An image with too few channels to occupy the device is added in parts: a launch
// from half to float writes the sum of every part, and a launch from float to half adds them.
template <class In, class Out>
struct GlobalPool {
    using Args = GlobalPoolArgs;
    static constexpr int kThreads = 256, kShared = 0, kBlocks = 1;
    static constexpr int kLanes = kThreads / 8; // threads that share eight channels

    static __device__ __forceinline__ void sum_pixels(
        const Args& a, int image, int part, int channel, float (&sum)[8])
    {
        float scale[8], shift[8], v[8];
        if (a.pre) {
            unpack(load_weights(a.pre + channel), scale);
            unpack(load_weights(a.pre + a.channels + channel), shift);
        }
        const In* base = (const In*)a.input + (size_t)image * a.pixels * a.in_stride + channel;
        int begin = part * a.part_pixels, end = min(a.pixels, begin + a.part_pixels);
        for (int pixel = begin + threadIdx.x / 8; pixel < end; pixel += kLanes) {
            load_eight(base + (size_t)pixel * a.in_stride, v);
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
        __shared__ float shared_sums[kThreads / kWarp][64];
        int group, part, row = a.by_groups.split(t, group);
        int image = a.by_parts.split(row, part);
        int channel = group * 64 + threadIdx.x % 8 * 8;
        float sum[8] = {};
        dependency.wait();
        yield_point.poll();
        if (channel < a.channels) sum_pixels(a, image, part, channel, sum);
        // Lanes with a distance of eight hold the same channels.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], 8);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 16);
        }
        if (threadIdx.x % kWarp < 8)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                shared_sums[threadIdx.x / kWarp][threadIdx.x % 8 * 8 + i] = sum[i];
        __syncthreads();
        if (yield_point.is_preempted()) return false;
        int c = threadIdx.x;
        if (c < 64 && group * 64 + c < a.channels) {
            float total = 0.f;
            for (int w = 0; w < kThreads / kWarp; ++w) total += shared_sums[w][c];
            store_one(
                (Out*)a.output + (size_t)row * a.out_stride + group * 64 + c, total * a.scale);
        }
        return true;
    }
};

} // namespace tiles
