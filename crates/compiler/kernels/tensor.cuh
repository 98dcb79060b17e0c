// Products of any strides on tensor cores, 16-bit operands and fp32 accumulation: matrix products,
// also batched, and convolutions of one to three dimensions, also grouped and transposed.
//
//   output(part, row, column) =
//     act(alpha * sum over depth of a(part, row, depth) * b(part, depth, column)
//         + beta * bias + residual)
//
// Parts are batches, groups of channels, or the phases of a transposed convolution: outputs whose
// position has the same remainder by the stride are an ordinary convolution with every
// stride-th tap. `conv.cuh` has the pieces that do not depend on how operands are addressed.
#pragma once
#include "conv.cuh"
#include "tensor_load.cuh"

namespace tiles {

template <class T>
struct MultiplyAdd;
template <>
struct MultiplyAdd<half> {
    static __device__ __forceinline__ void of(
        float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)
    { multiply_add(d, a, b0, b1); }
};
#ifdef TILES_BF16
template <>
struct MultiplyAdd<__nv_bfloat16> {
    static __device__ __forceinline__ void of(
        float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)
    { multiply_add_brain(d, a, b0, b1); }
};
#endif

// Bytes into a stage of the fragments of one operand, for a warp's fragment and k16 step.
template <class C, bool IsA, bool Deep>
struct TensorFragments {
    static constexpr int kCount = IsA ? C::kFragM : C::kFragN / 2;
    static constexpr int kEdge = IsA ? C::BM : C::BN;
    u32 at[Deep ? 1 : kCount];

    __device__ __forceinline__ TensorFragments()
    {
        int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
        int m = warp % (C::WM * C::WN) / C::WN * C::kWarpM, n = warp % C::WN * C::kWarpN;
        int k = warp / (C::WM * C::WN), edge = IsA ? m : n;
        u32 first = IsA ? 0 : C::BM * C::BK * 2;
        // Of the four matrices of an ldmatrix, `a` has its rows first, `b` its depth.
        int low = lane / 8 % 2, high = lane / 16;
        if constexpr (Deep) {
            int row = edge + lane % 8 + (IsA ? low : high) * 8;
            at[0] = kept((swizzled<C::BK>(row, IsA ? high : low) ^ k * 32) + first);
        } else {
            int row = k * 16 + lane % 8 + (IsA ? high : low) * 8;
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                at[i] = first +
                        swizzled_wide<kEdge>(row, edge / 8 + i * 2 + (IsA ? low : high));
        }
    }
    __device__ __forceinline__ void load(u32 (&to)[4], u32 stage, int i, int step) const
    {
        if constexpr (Deep)
            load_matrices(to, stage + (at[0] ^ step * C::WK * 32) + i * 16 * C::BK * 2);
        else
            load_matrices_transposed(to, stage + at[i] + step * C::WK * 16 * kEdge * 2);
    }
};

template <class C, class P>
struct TensorStage {
    TensorFragments<C, true, P::kADeep> a;
    TensorFragments<C, false, P::kBDeep> b;

    __device__ __forceinline__ void load(Fragments<C>& f, u32 stage, int step) const
    {
#pragma unroll
        for (int i = 0; i < C::kFragM; ++i) a.load(f.x[i], stage, i, step);
#pragma unroll
        for (int j = 0; j < C::kFragN / 2; ++j) b.load(f.w[j], stage, j, step);
    }
    static __device__ __forceinline__ void multiply(const Fragments<C>& f, Accumulators<C>& acc)
    {
#pragma unroll
        for (int i = 0; i < C::kFragM; ++i)
#pragma unroll
            for (int j = 0; j < C::kFragN; ++j)
                MultiplyAdd<typename P::T>::of(
                    acc.v[i][j], f.x[i], f.w[j / 2][j % 2 * 2], f.w[j / 2][j % 2 * 2 + 1]);
    }
    template <class Between>
    __device__ __forceinline__ void run(
        u32 stage, Accumulators<C>& acc, const Between& between) const
    {
        constexpr int kSteps = C::BK / 16 / C::WK;
        Fragments<C> f[2];
        load(f[0], stage, 0);
        between();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (i + 1 < kSteps) load(f[(i + 1) % 2], stage, i + 1);
            multiply(f[i % 2], acc);
        }
    }
};

// The main loop; see `accumulate` of conv.cuh. `Method` says how operands are copied and
// multiplied.
template <class C, class Method, class Place, class YieldPoint, class Dependency>
__device__ __forceinline__ bool accumulate_tensor(const typename Method::Args& a, const Place& p,
    unsigned char* shared, YieldPoint& yield_point, const Dependency& dependency,
    typename Method::Sums& acc)
{
    u32 ring = kept(shared_address(shared));
    typename Method::Columns columns(a, p);
    if constexpr (Method::kConstant) {
#pragma unroll
        for (int s = 0; s < C::kStages - 1; ++s)
            if (s < p.steps) columns.load(a, ring + s * C::kStageBytes);
    }
    typename Method::Rows rows(a, p);
    dependency.wait();
    yield_point.poll_for_block();
#pragma unroll
    for (int s = 0; s < C::kStages - 1; ++s) {
        if (s < p.steps) {
            rows.load(a, ring + s * C::kStageBytes);
            if constexpr (!Method::kConstant) columns.load(a, ring + s * C::kStageBytes);
        }
        copy_commit();
    }
    typename Method::Stage place;
    int stage = 0;
    if (yield_point.block_is_preempted()) return false;
    for (int step = 0; step < p.steps; ++step) {
        copy_wait<C::kStages - 2>();
        if (yield_point.template due<C::kWatchPeriod>(step)) {
            if (yield_point.verdict()) return false;
        } else {
            __syncthreads();
        }
        place.run(ring + stage * C::kStageBytes, acc, [&] {
            int free = stage == 0 ? C::kStages - 1 : stage - 1;
            if (step + C::kStages - 1 < p.steps) {
                rows.load(a, ring + free * C::kStageBytes);
                columns.load(a, ring + free * C::kStageBytes);
            }
            copy_commit();
        });
        stage = stage == C::kStages - 1 ? 0 : stage + 1;
    }
    copy_wait<0>();
    return !yield_point.last();
}

template <class T>
__device__ __forceinline__ void add_pack(
    float (&v)[8], const T* from, int stride, float factor, bool whole, int count)
{
    if (whole) {
        Pack<T, 8> raw = load_pack<T, 8>(from);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += factor * computed(raw.v[j]);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < count) v[j] += factor * computed(load_one(from + j * stride));
}

// Eight columns of one row: bias, residual, activation.
template <class P, class Place>
__device__ __forceinline__ void emit_columns(
    const typename P::Args& a, const Place& p, const int (&at)[4 + P::kAxes], int n, int channel,
    float (&v)[8])
{
    using Bias = typename P::Bias;
    using Out = typename P::Out;
    int count = a.columns - n;
    bool all = count >= 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= a.alpha;
    if (a.bias)
        add_pack(v, (const Bias*)a.bias + (p.part[2] + at[1] + channel * a.bias_column),
            a.bias_column, a.beta, all && (a.vectors & 4), count);
    int shifted = at[2] + a.out_shift;
    if (a.residual)
        add_pack(v,
            (const Out*)a.residual + (p.part[4] + at[3] + n * a.residual_column),
            a.residual_column, 1.f, all && (a.vectors & 2), count);
    Epilogue act = {P::kAct, a.first, a.second};
    Out* to = (Out*)a.output + (p.part[3] + shifted + n * a.out_column);
    Pack<Out, 8> result;
#pragma unroll
    for (int j = 0; j < 8; ++j) result.v[j] = Stored<Out>::of(act.of(v[j]));
    if (all && (a.vectors & 1)) return store_pack<Out, 8>(to, result);
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < count) to[j * a.out_column] = result.v[j];
}

// Rows [first, last) of the tile.
template <class C, class P, class Place>
__device__ __forceinline__ void emit_tensor(
    const typename P::Args& a, const Place& p, const Parts& parts, int first, int last)
{
    constexpr int kChunks = C::BN / 8;
    for (int i = first * kChunks + threadIdx.x; i < last * kChunks; i += C::kThreads) {
        int row = i / kChunks, column = i % kChunks * 8;
        int m = p.m + row, n = p.n + column, at[4 + P::kAxes];
        if (m >= a.rows || n >= a.columns) continue;
        a.row.offsets(m, at);
        bool inside = true;
        int channel = n;
        if constexpr (P::kPhases) {
            int phase = a.by_phase.split(n, channel);
#pragma unroll
            for (int x = 0; x < P::kAxes; ++x) {
                int position = at[4 + x] * a.image.step[x] + p.part[5 + x] - a.image.before[x];
                if (x == P::kAxes - 1) position += phase;
                inside = inside && (u32)position < (u32)a.image.out_size[x];
            }
        }
        if (!inside) continue;
        float v[8] = {};
        parts.sum(v, row * C::kStaged + column);
        emit_columns<P>(a, p, at, n, channel, v);
    }
}

// How 16-bit operands are multiplied.
template <class C, class P>
struct TensorMethod {
    using Args = typename P::Args;
    using Sums = Accumulators<C>;
    using Rows = TensorLoader<C, P, true, P::kADeep>;
    using Columns = TensorLoader<C, P, false, P::kBDeep>;
    using Stage = TensorStage<C, P>;
    static constexpr int kAxes = P::kAxes, kDepth = C::BK; // depths of a step
    static constexpr bool kConstant = P::kConstant;

    static __device__ __forceinline__ void stage(unsigned char* shared, const Sums& acc)
    { stage_sums<C>((float*)shared, acc); }
    template <class Place>
    static __device__ __forceinline__ void emit(
        const Args& a, const Place& p, const Parts& parts, int first, int last)
    { emit_tensor<C, P>(a, p, parts, first, last); }
};

template <class C, class Method, class YieldPoint, class Dependency>
__device__ __forceinline__ bool tensor_tile(const typename Method::Args& a, int tile,
    unsigned char* shared, YieldPoint& yield_point, const Dependency& dependency)
{
    TensorPlace<Method::kAxes> p;
    p.output_tile = a.by_splits.split(tile, p.split);
    int column, row;
    int part = a.by_rows.split(a.by_columns.split(p.output_tile, column), row);
    p.m = row * C::BM, p.n = column * C::BN;
    a.part.offsets(part, p.part);
    int total = (a.depth + Method::kDepth - 1) / Method::kDepth;
    p.first = a.by_splits.quotient(total * p.split);
    p.steps = a.by_splits.quotient(total * (p.split + 1)) - p.first;

    typename Method::Sums acc = {};
    bool cluster = a.reduce == kCluster;
    if (YieldPoint::kPreemptible && cluster) cluster_arrive();
    bool stay = accumulate_tensor<C, Method>(a, p, shared, yield_point, dependency, acc);
    if (YieldPoint::kPreemptible && cluster) {
        cluster_wait();
        if (!stay) tell_cluster(yield_point, a.splits);
    } else if (!stay) {
        return false;
    }
    yield_point.finishing();
    float* staged = (float*)shared;
    Method::stage(shared, acc);
    Parts parts = {staged, C::kPart, C::WK, 1, false};
    int first = 0, last = C::BM;
    if (cluster) {
        cluster_barrier();
        if (yield_point.peer_is_preempted()) return false;
        parts.outer = a.splits, parts.cluster = true;
        int share = (C::BM + a.splits - 1) / a.splits;
        first = p.split * share, last = min(first + share, C::BM);
    } else {
        __syncthreads();
    }
    if (a.reduce == kWorkspace) {
        float* partial = a.workspace + (size_t)p.output_tile * a.splits * C::WK * C::kPart;
        if (!deliver<C>(a, p, staged, partial)) return true;
        parts.first = partial, parts.inner = C::WK * a.splits;
    }
    Method::emit(a, p, parts, first, last);
    if (cluster) cluster_barrier();
    return true;
}

template <class C, class P>
struct Tensor {
    using Args = typename P::Args;
    using Config = C;
    static constexpr int kThreads = C::kThreads, kShared = C::kShared;
    // Elements that are gathered one by one take more registers than copies.
    static constexpr int kBesides = P::kAVec >= 4 && P::kBVec >= 4 ? 64 : 104;
    static constexpr int kByRegisters =
        65536 / (kThreads * (C::kFragM * C::kFragN * 4 + kBesides));
    static constexpr int kFitting = kByRegisters < C::kBlocks ? kByRegisters : C::kBlocks;
    static constexpr int kBlocks = kFitting < 1 ? 1 : kFitting;
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char* shared,
        YieldPoint& yield_point, const Dependency& dependency)
    { return tensor_tile<C, TensorMethod<C, P>>(a, t, shared, yield_point, dependency); }
};

} // namespace tiles
