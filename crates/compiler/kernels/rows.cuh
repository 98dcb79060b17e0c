// Softmax and normalizations of rows whose elements are adjacent: `Normalize` of reduce.cuh with
// vector loads, for any strides between the vectors and between the rows. The threads of a row keep
// it in registers where it fits, and read it again otherwise.
#pragma once
#include "reduce.cuh"

namespace tiles {

// `Along` threads share a row; those of a warp are adjacent.
template <int Along>
struct RowThreads {
    static constexpr int kRows = kReduceThreads / Along;
    static __device__ __forceinline__ int along() { return threadIdx.x % Along; }
    static __device__ __forceinline__ int row() { return threadIdx.x / Along; }

    // The fold of the values of all threads of a row, in an order that does not depend on timing.
    template <class Join>
    static __device__ __forceinline__ float join(float v, Join fold)
    {
#pragma unroll
        for (int d = (Along < kWarp ? Along : kWarp) / 2; d > 0; d /= 2)
            v = fold(v, __shfl_xor_sync(~0u, v, d));
        if constexpr (Along > kWarp) {
            constexpr int kWarps = Along / kWarp;
            __shared__ float part[kReduceThreads / kWarp];
            int warp = threadIdx.x / kWarp, first = warp / kWarps * kWarps;
            __syncthreads(); // the previous values have been read
            if (threadIdx.x % kWarp == 0) part[warp] = v;
            __syncthreads();
            v = part[first];
#pragma unroll
            for (int i = 1; i < kWarps; ++i) v = fold(v, part[first + i]);
        }
        return v;
    }
};

// The inner loops of the arguments count vectors of `Vec` elements. Scales and biases have `WVec`
// elements per vector: as many, or one. `Held` vectors of a thread stay in registers; 0: none.
template <int Kind, class T, class Out, class W, class M, int Outer, int Inner, int Along, int Vec,
    int WVec, int Held>
struct NormalizeRows {
    using Args = NormalizeArgs<Outer, Inner>;
    using Threads = RowThreads<Along>;
    using Vector = Pack<T, Vec>;
    static constexpr int kThreads = kReduceThreads, kShared = 0, kBlocks = 1;

    struct Row {
        const Args& a;
        const T* from;
        int vectors; // none for a row that does not exist
        Vector held[Held ? Held : 1];

        __device__ __forceinline__ Row(const Args& a, const T* from, bool live)
            : a(a), from(from), vectors(live ? a.length / Vec : 0)
        {
            if constexpr (Held > 0) {
#pragma unroll
                for (int k = 0; k < Held; ++k) {
                    int i = Threads::along() + k * Along;
                    if (i < vectors) held[k] = load_pack<T, Vec>(from + a.inner.offset(i));
                }
            }
        }
        // Calls `f` with every vector of this thread and its number.
        template <class F>
        __device__ __forceinline__ void each(F f) const
        {
            if constexpr (Held > 0) {
#pragma unroll
                for (int k = 0; k < Held; ++k) {
                    int i = Threads::along() + k * Along;
                    if (i < vectors) f(held[k], i);
                }
            } else {
#pragma unroll 4
                for (int i = Threads::along(); i < vectors; i += Along)
                    f(load_pack<T, Vec>(from + a.inner.offset(i)), i);
            }
        }
        template <class Map>
        __device__ __forceinline__ float sum(Map map) const
        {
            float all = 0.f;
            each([&](const Vector& x, int) {
#pragma unroll
                for (int j = 0; j < Vec; ++j) all += map(computed(x.v[j]));
            });
            return Threads::join(all, [](float a, float b) { return a + b; });
        }
        __device__ __forceinline__ float largest() const
        {
            float top = -__int_as_float(0x7f800000);
            each([&](const Vector& x, int) {
#pragma unroll
                for (int j = 0; j < Vec; ++j) top = number::larger(top, computed(x.v[j]));
            });
            return Threads::join(top, [](float a, float b) { return number::larger(a, b); });
        }
    };

    static __device__ __forceinline__ RowMap measure(const Args& a, const Row& row)
    {
        float length = (float)a.length;
        if constexpr (Kind == kSoftmax || Kind == kLogSoftmax) {
            float top = row.largest();
            float sum = row.sum([=](float x) { return number::exp(x - top); });
            return {top, Kind == kSoftmax ? 1.f / sum : number::log(sum), 0};
        } else if constexpr (Kind == kLayer) {
            // Deviations are squared after the mean is known: E[x^2] - mean^2 loses all digits of a
            // small variance.
            float mean = row.sum([](float x) { return x; }) / length;
            float square = row.sum([=](float x) { return (x - mean) * (x - mean); });
            return {mean, 1.f / sqrtf(square / length + a.epsilon), 0};
        } else if constexpr (Kind == kRootMeanSquare) {
            float square = row.sum([](float x) { return x * x; });
            return {0.f, 1.f / sqrtf(square / length + a.epsilon), 0};
        } else {
            static_assert(Kind == kNorm1 || Kind == kNorm2, "no normalization of rows");
            float sum = row.sum([](float x) { return Kind == kNorm1 ? fabsf(x) : x * x; });
            float norm = Kind == kNorm1 ? sum : sqrtf(sum);
            return {0.f, norm == 0.f ? 0.f : 1.f / norm, 0};
        }
    }
    static __device__ __forceinline__ float apply(const RowMap& map, float x)
    {
        if (Kind == kSoftmax) return number::exp(x - map.shift) * map.factor;
        if (Kind == kLogSoftmax) return x - map.shift - map.factor;
        return (x - map.shift) * map.factor;
    }
    static __device__ __forceinline__ void write(
        const Args& a, const Row& row, const RowMap& map, const int (&base)[6])
    {
        row.each([&](const Vector& x, int i) {
            int at[4];
            a.inner.offsets(i, at);
            float y[Vec];
#pragma unroll
            for (int j = 0; j < Vec; ++j) y[j] = apply(map, computed(x.v[j]));
            if (a.scale) {
                auto scale = load_pack<W, WVec>((const W*)a.scale + base[2] + at[2]);
#pragma unroll
                for (int j = 0; j < Vec; ++j) y[j] *= computed(scale.v[WVec == 1 ? 0 : j]);
            }
            if (a.bias) {
                auto bias = load_pack<W, WVec>((const W*)a.bias + base[3] + at[3]);
#pragma unroll
                for (int j = 0; j < Vec; ++j) y[j] += computed(bias.v[WVec == 1 ? 0 : j]);
            }
            Pack<Out, Vec> out;
#pragma unroll
            for (int j = 0; j < Vec; ++j) out.v[j] = Stored<Out>::of(y[j]);
            store_pack((Out*)a.output + base[1] + at[1], out);
        });
        if (Threads::along() != 0) return;
        if (a.mean) ((M*)a.mean)[base[4]] = Stored<M>::of(map.shift);
        if (a.deviation) ((M*)a.deviation)[base[5]] = Stored<M>::of(map.factor);
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int result = t * Threads::kRows + Threads::row(), base[6];
        bool live = result < a.results;
        a.outer.offsets(live ? result : 0, base);
        dependency.wait();
        yield_point.poll();
        Row row(a, (const T*)a.input + base[0], live);
        RowMap map = measure(a, row);
        if (yield_point.is_preempted()) return false;
        if (live) write(a, row, map, base);
        return true;
    }
};

} // namespace tiles
