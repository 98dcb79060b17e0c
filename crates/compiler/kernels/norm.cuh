// Row operators: layer normalization, the sum of embeddings followed by one, and softmax. A warp
// holds a whole row in registers and reads it once.
#pragma once
#include "base.cuh"

namespace tiles {

__device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}
__device__ __forceinline__ float warp_max(float v)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

// A row of at most Chunks * 256 values; chunk i of a lane starts at (i * 32 + lane) * 8.
template <int Chunks>
struct WarpRow {
    float v[Chunks][8];

    static __device__ __forceinline__ int column(int i)
    { return (i * kWarp + (int)threadIdx.x % kWarp) * 8; }
    template <class YieldPoint>
    __device__ __forceinline__ bool normalize(int width, float epsilon, const float* gamma,
        const float* beta, half* to, const YieldPoint& yield_point)
    {
        float sum = 0.f, square = 0.f;
#pragma unroll
        for (int i = 0; i < Chunks; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += v[i][j];
        float mean = warp_sum(sum) / (float)width;
        // Deviations are squared after the mean is known: E[x^2] - mean^2 loses all digits of a
        // small variance.
#pragma unroll
        for (int i = 0; i < Chunks; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float d = column(i) < width ? v[i][j] - mean : 0.f;
                square += d * d;
            }
        float scale = rsqrtf(warp_sum(square) / (float)width + epsilon);
        if (yield_point.is_preempted()) return false;
#pragma unroll
        for (int i = 0; i < Chunks; ++i) {
            int c = column(i);
            if (c >= width) continue;
            float out[8] = {};
            add_floats(out, gamma + c);
#pragma unroll
            for (int j = 0; j < 8; ++j) out[j] *= (v[i][j] - mean) * scale;
            add_floats(out, beta + c);
            *(uint4*)(to + c) = pack(out);
        }
        return true;
    }
    __device__ __forceinline__ void load(const half* from, int width)
    {
#pragma unroll
        for (int i = 0; i < Chunks; ++i) {
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (column(i) < width) raw = load_activations(from + column(i));
            unpack(raw, v[i]);
        }
    }
    __device__ __forceinline__ void add(const half* from, int width)
    {
#pragma unroll
        for (int i = 0; i < Chunks; ++i) {
            if (column(i) >= width) continue;
            float f[8];
            unpack(load_weights(from + column(i)), f);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] += f[j];
        }
    }
};

struct NormArgs {
    const half* input;
    half* output;
    const float* gamma;
    const float* beta;
    int rows, width;
    float epsilon;
    // Embedding only: the row is word[token] + position[row % tokens].
    const int* token;
    const half* word;
    const half* position;
    FastDiv by_tokens;
};

template <bool Embed, int Chunks>
struct LayerNorm {
    using Args = NormArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;
    static constexpr int kRows = kThreads / kWarp;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int row = t * kRows + threadIdx.x / kWarp;
        WarpRow<Chunks> r;
        dependency.wait();
        yield_point.poll();
        if (row >= a.rows) return true;
        if constexpr (Embed) {
            int position;
            a.by_tokens.split(row, position);
            r.load(a.word + (size_t)a.token[row] * a.width, a.width);
            r.add(a.position + (size_t)position * a.width, a.width);
        } else {
            r.load(a.input + (size_t)row * a.width, a.width);
        }
        return r.normalize(
            a.width, a.epsilon, a.gamma, a.beta, a.output + (size_t)row * a.width, yield_point);
    }
};

struct SoftmaxArgs {
    const half* input;
    half* output;
    int rows, width;
};

template <int Chunks>
struct Softmax {
    using Args = SoftmaxArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;
    static constexpr int kRows = kThreads / kWarp;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int row = t * kRows + threadIdx.x / kWarp;
        dependency.wait();
        yield_point.poll();
        if (row >= a.rows) return true;
        WarpRow<Chunks> r;
        r.load(a.input + (size_t)row * a.width, a.width);
        float top = -65504.f, sum = 0.f;
#pragma unroll
        for (int i = 0; i < Chunks; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) top = r.column(i) < a.width ? fmaxf(top, r.v[i][j]) : top;
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < Chunks; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                r.v[i][j] = r.column(i) < a.width ? __expf(r.v[i][j] - top) : 0.f;
                sum += r.v[i][j];
            }
        float scale = 1.f / warp_sum(sum);
        if (yield_point.is_preempted()) return false;
#pragma unroll
        for (int i = 0; i < Chunks; ++i) {
            if (r.column(i) >= a.width) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) r.v[i][j] *= scale;
            *(uint4*)(a.output + (size_t)row * a.width + r.column(i)) = pack(r.v[i]);
        }
        return true;
    }
};

} // namespace tiles
