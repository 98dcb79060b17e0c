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
    int out_h, out_w, out_stride, residual_stride;
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

// Wide filters: a thread computes two channels of `Wide` x `Tall` outputs. It converts every input
// once for the taps of a filter row and uses it for `Tall` rows of outputs: with one pixel a
// thread, a filter of 7x7 converts each input 49 times, which takes longer than the products.
// KerW and StrideW are the filter's width and horizontal stride; the height is an argument.
template <int KerW, int StrideW, int Wide, int Tall>
struct DepthwiseStrip {
    using Args = DepthwiseArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;
    static constexpr int kSpan = (Wide - 1) * StrideW + KerW; // input columns of a row

    // One row of inputs into the outputs of one row, by the filter row at `weight`.
    static __device__ __forceinline__ void add_row(
        const half* weight, int channels, const float2 (&row)[kSpan], float2 (&acc)[Wide])
    {
#pragma unroll
        for (int kx = 0; kx < KerW; ++kx) {
            float2 w = __half22float2(__ldg((const half2*)(weight + kx * channels)));
#pragma unroll
            for (int o = 0; o < Wide; ++o) {
                acc[o].x = fmaf(row[o * StrideW + kx].x, w.x, acc[o].x);
                acc[o].y = fmaf(row[o * StrideW + kx].y, w.y, acc[o].y);
            }
        }
    }
    static __device__ __forceinline__ void load_row(
        const Args& a, const half* base, int x0, float2 (&row)[kSpan])
    {
        half2 raw[kSpan];
#pragma unroll
        for (int s = 0; s < kSpan; ++s) {
            raw[s] = __half2half2(__ushort_as_half(0));
            if ((u32)(x0 + s) < (u32)a.in_w)
                raw[s] = __ldcg((const half2*)(base + (long long)(x0 + s) * a.in_stride));
        }
#pragma unroll
        for (int s = 0; s < kSpan; ++s) row[s] = __half22float2(raw[s]);
    }
    static __device__ __forceinline__ void emit(
        const Args& a, size_t m, int channel, float2 v)
    {
        if (a.bias) v.x += __ldg(a.bias + channel), v.y += __ldg(a.bias + channel + 1);
        if (a.residual) {
            const half2* p = (const half2*)(a.residual + m * a.residual_stride + channel);
            float2 r = __half22float2(__ldcg(p));
            v.x += r.x, v.y += r.y;
        }
        v.x = activate(v.x, a.act), v.y = activate(v.y, a.act);
        *(half2*)(a.output + m * a.out_stride + channel) = __floats2half2_rn(v.x, v.y);
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        dependency.wait();
        yield_point.poll();
        int item = t * kThreads + threadIdx.x;
        if (item >= a.items) return true;
        // Here `by_chunks` counts pairs of channels and `by_out_h` groups of `Tall` rows.
        int channel, group, strip, channels = (int)a.by_chunks.divisor * 2;
        int row_number = a.by_groups.split(a.by_chunks.split(item, channel), group);
        int image = a.by_out_h.split(row_number, strip);
        channel *= 2;
        int x = group * Wide, y = strip * Tall;
        const half* base = a.input + (size_t)image * a.in_h * a.in_w * a.in_stride + channel;
        float2 acc[Tall][Wide] = {};
        int rows = (Tall - 1) * a.stride_h + (a.ker_h - 1) * a.dil_h + 1;
        for (int r = 0; r < rows; ++r) {
            int iy = y * a.stride_h - a.pad_h + r;
            if ((u32)iy >= (u32)a.in_h) continue;
            float2 row[kSpan];
            load_row(a, base + (size_t)iy * a.in_w * a.in_stride, x * StrideW - a.pad_w, row);
#pragma unroll
            for (int o = 0; o < Tall; ++o) {
                int tap = r - o * a.stride_h;
                // Division by a dilation of one is free, and others are rare.
                int ky = a.dil_h == 1 ? tap : tap / a.dil_h;
                if (tap < 0 || ky >= a.ker_h || (a.dil_h != 1 && ky * a.dil_h != tap)) continue;
                add_row(a.weight + (size_t)ky * KerW * channels + channel, channels, row, acc[o]);
            }
        }
        if (yield_point.is_preempted()) return false;
#pragma unroll
        for (int o = 0; o < Tall; ++o)
#pragma unroll
            for (int i = 0; i < Wide; ++i)
                if (y + o < a.out_h && x + i < a.out_w)
                    emit(a, (size_t)(image * a.out_h + y + o) * a.out_w + x + i, channel,
                        acc[o][i]);
        return true;
    }
};

} // namespace tiles
