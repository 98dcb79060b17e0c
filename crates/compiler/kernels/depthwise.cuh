// Depthwise convolution, NHWC: one filter per channel, weights [ker_h][ker_w][channels]. A thread
// computes eight channels of `Wide` adjacent output pixels, so that shared inputs are read once. It
// is limited by bandwidth, not by arithmetic.
#pragma once
#include "base.cuh"

namespace tiles {

struct DepthwiseArgs {
    const half* input;
    const half* weight;
    const float* bias;
    const half* residual;
    half* output;
    int in_h, in_w, in_stride;
    int out_w, out_stride, residual_stride;
    int ker_h, ker_w, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w;
    int items; // threads of work: batch * out_h * ceil(out_w / Wide) * channels / 8
    int act;
    FastDiv by_chunks, by_groups, by_out_h; // channels / 8, ceil(out_w / Wide), out_h
};

// Ker and Stride are the square filter and its stride, both fixed for the common 3x3 cases; with 0
// they are arguments.
template <int Ker, int Stride, int Wide>
struct Depthwise {
    using Args = DepthwiseArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;
    // Input columns of `Wide` outputs.
    static constexpr int kSpan = Ker == 0 ? 1 : (Wide - 1) * Stride + Ker;
    static_assert(Ker > 0 || Wide == 1, "a filter of unknown width computes one pixel a thread");

    struct Place {
        int image, y, x, channel;
    };
    static __device__ __forceinline__ Place locate(const Args& a, int item)
    {
        Place p;
        int group, row;
        int pixel = a.by_chunks.split(item, p.channel);
        p.channel *= 8;
        row = a.by_groups.split(pixel, group);
        p.image = a.by_out_h.split(row, p.y);
        p.x = group * Wide;
        return p;
    }
    static __device__ __forceinline__ void multiply_add8(float (&acc)[8], uint4 x, uint4 w)
    {
        float fx[8], fw[8];
        unpack(x, fx);
        unpack(w, fw);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i] = fmaf(fx[i], fw[i], acc[i]);
    }
    // Iterates over the filter's rows: the input columns of a row are loaded together, then used by
    // every output.
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ void fixed_filter(const Args& a, const Place& p,
        YieldPoint& yield_point, const Dependency& dependency, float (&acc)[Wide][8])
    {
        uint4 w[Ker == 0 ? 1 : Ker * Ker];
#pragma unroll
        for (int k = 0; k < Ker * Ker; ++k)
            w[k] = load_weights(a.weight + k * (int)a.by_chunks.divisor * 8 + p.channel);
        dependency.wait();
        yield_point.poll();
#pragma unroll
        for (int ky = 0; ky < Ker; ++ky) {
            int y = p.y * Stride - a.pad_h + ky;
            uint4 row[kSpan];
#pragma unroll
            for (int s = 0; s < kSpan; ++s) {
                int x = p.x * Stride - a.pad_w + s;
                bool inside = (u32)y < (u32)a.in_h && (u32)x < (u32)a.in_w;
                row[s] = make_uint4(0, 0, 0, 0);
                if (inside) row[s] = load_activations(at(a, p, y, x));
            }
#pragma unroll
            for (int o = 0; o < Wide; ++o)
#pragma unroll
                for (int kx = 0; kx < Ker; ++kx)
                    multiply_add8(acc[o], row[o * Stride + kx], w[ky * Ker + kx]);
        }
    }
    static __device__ __forceinline__ const half* at(const Args& a, const Place& p, int y, int x)
    { return a.input + (size_t)((p.image * a.in_h + y) * a.in_w + x) * a.in_stride + p.channel; }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ void any_filter(const Args& a, const Place& p,
        YieldPoint& yield_point, const Dependency& dependency, float (&acc)[Wide][8])
    {
        dependency.wait();
        yield_point.poll();
        for (int ky = 0; ky < a.ker_h; ++ky)
            for (int kx = 0; kx < a.ker_w; ++kx) {
                int y = p.y * a.stride_h - a.pad_h + ky * a.dil_h,
                    x = p.x * a.stride_w - a.pad_w + kx * a.dil_w;
                if ((u32)y >= (u32)a.in_h || (u32)x >= (u32)a.in_w) continue;
                int tap = (ky * a.ker_w + kx) * (int)a.by_chunks.divisor * 8;
                multiply_add8(acc[0], load_activations(at(a, p, y, x)),
                    load_weights(a.weight + tap + p.channel));
            }
    }
    static __device__ __forceinline__ void emit(const Args& a, const Place& p, int x, float (&v)[8])
    {
        size_t m = (size_t)(p.image * (int)a.by_out_h.divisor + p.y) * a.out_w + x;
        if (a.bias) add_floats(v, a.bias + p.channel);
        if (a.residual) {
            float r[8];
            unpack(load_activations(a.residual + m * a.residual_stride + p.channel), r);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += r[i];
        }
        activate(v, a.act);
        *(uint4*)(a.output + m * a.out_stride + p.channel) = pack(v);
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x;
        if (item >= a.items) {
            dependency.wait();
            return true;
        }
        Place p = locate(a, item);
        float acc[Wide][8] = {};
        if constexpr (Ker > 0) fixed_filter(a, p, yield_point, dependency, acc);
        else any_filter(a, p, yield_point, dependency, acc);
        if (yield_point.is_preempted()) return false;
#pragma unroll
        for (int o = 0; o < Wide; ++o)
            if (p.x + o < a.out_w) emit(a, p, p.x + o, acc[o]);
        return true;
    }
};

} // namespace tiles
