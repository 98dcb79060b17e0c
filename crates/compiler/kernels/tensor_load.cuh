// Operands of any strides, and their copies into shared memory for products on tensor cores.
//
// An operand has an edge (rows of `a`, columns of `b`) and a depth. Its stage is one of two forms:
//   deep: Edge rows of BK halves, as the convolution has it; neighbours in depth are adjacent in
//         memory, or nothing is
//   wide: BK rows of Edge halves; neighbours along the edge are adjacent in memory, and fragments
//         are read with a transposing ldmatrix
// Either is copied 16 bytes at a time where alignment allows (Vec = 8 elements), else 8 or 4 bytes
// at a time, else element by element through registers (Vec = 1).
#pragma once
#include "conv_load.cuh"
#include "number.cuh"

namespace tiles {

// The coordinates of a convolution's rows and depth: a position in the image is a row's plus a
// tap's, and elements outside are zero. With phases (transposed convolutions) the position of an
// output is row * step + phase - before, and only positions in the output are written.
template <int Axes>
struct TensorImage {
    static constexpr int kLength = Axes > 0 ? Axes : 1;
    int size[kLength], pad[kLength];
    int out_size[kLength], step[kLength], before[kLength];
};

template <int PartRank, int RowRank, int DepthRank, int Axes>
struct TensorArgs {
    const void* a;
    const void* b;
    const void* bias; // or null
    const void* residual; // or null
    void* output;
    float* workspace; // kWorkspace: WK * BM * (BN + 8) floats per tile
    u32* arrivals; // kWorkspace: one word per output tile, zero before a launch and after it
    int rows, columns, depth;
    int splits, reduce;
    int a_shift, out_shift; // from the address to the element of the first position; signed
    int b_column, bias_column, out_column, residual_column;
    int vectors; // bits: output, residual, bias may be moved eight columns at a time
    float alpha, beta, first, second; // the last two belong to the activation
    FastDiv by_splits, by_columns, by_rows; // tiles
    FastDiv by_phase; // with phases: columns of one phase, if those of the last axis are adjacent
    StridedLoop<PartRank, 5 + Axes> part; // a, b, bias, output, residual; phases
    StridedLoop<RowRank, 4 + Axes> row; // a, bias, output, residual; the image
    StridedLoop<DepthRank, 2 + Axes> inner; // a, b; the image
    TensorImage<Axes> image;
};

// What of a product is known at compile time. `Constant`: `b` is a packed weight, that is, adjacent
// along the whole depth, and does not depend on the previous step.
template <class T_, class Bias_, class Out_, int PartRank, int RowRank, int DepthRank, int Axes,
    bool Phases, bool ADeep, int AVec, bool BDeep, int BVec, bool Constant, int Act>
struct TensorProblem {
    using T = T_;
    using Bias = Bias_;
    using Out = Out_;
    using Args = TensorArgs<PartRank, RowRank, DepthRank, Axes>;
    static constexpr int kAxes = Axes, kAct = Act;
    static constexpr bool kPhases = Phases, kConstant = Constant;
    static constexpr bool kADeep = ADeep, kBDeep = BDeep;
    static constexpr int kAVec = AVec, kBVec = BVec;
};

template <int Axes>
struct TensorPlace {
    int m, n, split, output_tile, first, steps;
    int part[5 + Axes];
};

// Byte offset of 16-byte chunk `chunk` of row `k` of a wide stage. The eight rows that one ldmatrix
// reads are in eight different bank groups.
template <int Edge>
__device__ __forceinline__ u32 swizzled_wide(int k, int chunk)
{
    static_assert(Edge % 16 == 0, "rows of 32 bytes or more");
    int key = Edge >= 64 ? k & 7 : Edge == 32 ? k >> 1 & 3 : k >> 2 & 1;
    return (u32)(k * Edge * 2 + (chunk ^ key) * 16);
}

// One edge element: its offset, how many follow until the end, and a row's position in the image.
template <class P, bool IsA>
struct TensorEdge {
    static constexpr int kAxes = IsA ? P::kAxes : 0;
    int offset;
    int left; // not positive where it does not exist
    int corner[kAxes > 0 ? kAxes : 1];

    __device__ __forceinline__ TensorEdge() {}
    __device__ __forceinline__ TensorEdge(const typename P::Args& a, int at)
    {
        if constexpr (IsA) {
            left = a.rows - at;
            int to[4 + P::kAxes];
            a.row.offsets(left > 0 ? at : 0, to);
            offset = to[0];
#pragma unroll
            for (int i = 0; i < kAxes; ++i) corner[i] = to[4 + i] - a.image.pad[i];
        } else {
            left = a.columns - at;
            offset = left > 0 ? at * a.b_column : 0;
        }
    }
};

// One depth: its offset, how many follow until the end, and its position in the window.
template <class P, bool IsA>
struct TensorDepth {
    static constexpr int kAxes = IsA ? P::kAxes : 0;
    int offset;
    int left; // not positive where it does not exist
    int tap[kAxes > 0 ? kAxes : 1];

    __device__ __forceinline__ TensorDepth() {}
    __device__ __forceinline__ TensorDepth(const typename P::Args& a, int at)
    {
        left = a.depth - at;
        if constexpr (!IsA && P::kConstant) {
            offset = at;
            return;
        }
        int to[2 + P::kAxes];
        a.inner.offsets(left > 0 ? at : 0, to);
        offset = to[IsA ? 0 : 1];
#pragma unroll
        for (int i = 0; i < kAxes; ++i) tap[i] = to[2 + i];
    }
    __device__ __forceinline__ bool meets(
        const typename P::Args& a, const TensorEdge<P, IsA>& edge) const
    {
        bool both = left > 0 && edge.left > 0;
#pragma unroll
        for (int i = 0; i < kAxes; ++i)
            both = both && (u32)(edge.corner[i] + tap[i]) < (u32)a.image.size[i];
        return both;
    }
};

// Eight elements of a chunk, `Vec` at a time: `from(j)` is the offset of piece j, `count(j)` how
// many of its elements exist; the others become zeros.
template <class T, int Vec, class From, class Count>
__device__ __forceinline__ void copy_chunk(
    u32 to, const T* base, const From& from, const Count& count)
{
    if constexpr (Vec > 1) {
#pragma unroll
        for (int j = 0; j < 8 / Vec; ++j) {
            int bytes = min(count(j), Vec) * 2;
            copy_async_part<Vec * 2>(
                to + j * Vec * 2, bytes > 0 ? base + from(j) : base, max(bytes, 0));
        }
    } else {
        Pack<unsigned short, 8> v;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            v.v[j] = count(j) > 0 ? load_one((const unsigned short*)(base + from(j))) : 0;
        store_shared(to, *(const uint4*)&v);
    }
}

template <class C, class P, bool IsA, bool Deep>
struct TensorLoader;

template <class C, class P, bool IsA>
struct TensorLoader<C, P, IsA, true> {
    static constexpr int kEdge = IsA ? C::BM : C::BN, kVec = IsA ? P::kAVec : P::kBVec;
    using T = typename P::T;
    using S = Share<C, kEdge, 8>;
    const T* base;
    TensorEdge<P, IsA> edge[S::kPasses];
    int depth;
    u32 slot;

    template <class Place>
    __device__ __forceinline__ TensorLoader(const typename P::Args& a, const Place& p)
    {
        base = IsA ? (const T*)a.a + p.part[0] + a.a_shift : (const T*)a.b + p.part[1];
        depth = p.first * C::BK + S::chunk() * 8;
        slot = S::slot() + (IsA ? 0 : C::BM * C::BK * 2);
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i)
            edge[i] = TensorEdge<P, IsA>(a, (IsA ? p.m : p.n) + S::row() + i * S::kRows);
    }
    __device__ __forceinline__ void load(const typename P::Args& a, u32 stage)
    {
        TensorDepth<P, IsA> k[8 / kVec];
#pragma unroll
        for (int j = 0; j < 8 / kVec; ++j) k[j] = TensorDepth<P, IsA>(a, depth + j * kVec);
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i)
            copy_chunk<T, kVec>(
                stage + slot + i * S::kPassBytes, base,
                [&](int j) { return edge[i].offset + k[j].offset; },
                [&](int j) { return k[j].meets(a, edge[i]) ? k[j].left : 0; });
        depth += C::BK;
    }
};

template <class C, class P, bool IsA>
struct TensorLoader<C, P, IsA, false> {
    static constexpr int kEdge = IsA ? C::BM : C::BN, kVec = IsA ? P::kAVec : P::kBVec;
    static constexpr int kChunks = kEdge / 8;
    static constexpr int kByThreads = C::kThreads / kChunks;
    static constexpr int kRows = kByThreads < C::BK ? kByThreads : C::BK;
    static constexpr int kPasses = C::BK / kRows;
    static_assert(C::kThreads % kChunks == 0 && C::BK % kRows == 0, "whole rows of chunks");
    using T = typename P::T;
    const T* base;
    TensorEdge<P, IsA> edge[8 / kVec];
    int depth;

    static __device__ __forceinline__ int chunk() { return (int)threadIdx.x % kChunks; }
    static __device__ __forceinline__ int row() { return (int)threadIdx.x / kChunks; }

    template <class Place>
    __device__ __forceinline__ TensorLoader(const typename P::Args& a, const Place& p)
    {
        base = IsA ? (const T*)a.a + p.part[0] + a.a_shift : (const T*)a.b + p.part[1];
        depth = p.first * C::BK + row();
#pragma unroll
        for (int j = 0; j < 8 / kVec; ++j)
            edge[j] = TensorEdge<P, IsA>(a, (IsA ? p.m : p.n) + chunk() * 8 + j * kVec);
    }
    __device__ __forceinline__ void load(const typename P::Args& a, u32 stage)
    {
        if (kByThreads > C::BK && row() >= C::BK) return;
        stage += IsA ? 0 : C::BM * C::BK * 2;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            TensorDepth<P, IsA> k(a, depth + i * kRows);
            copy_chunk<T, kVec>(
                stage + swizzled_wide<kEdge>(row() + i * kRows, chunk()), base,
                [&](int j) { return edge[j].offset + k.offset; },
                [&](int j) { return k.meets(a, edge[j]) ? edge[j].left : 0; });
        }
        depth += C::BK;
    }
};

} // namespace tiles
