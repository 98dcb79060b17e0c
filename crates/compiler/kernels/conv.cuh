// Convolution as an implicit matrix product, NHWC, fp16 operands, fp32 accumulation. A matrix
// product is the 1x1 case.
//
//   rows  = batch * out_h * out_w      (a row is an output pixel)
//   depth = ker_h * ker_w * in_c       (in that order; weights are [out_c][depth])
//   y = act(sum + bias + residual)     with its own pixel stride: a slice of a wider buffer
//
// Requirements: in_c a multiple of Config::kVec (8; 4 for an image padded to four channels), out_c
// and every stride a multiple of 8, pointers 16-byte aligned, weight rows padded with zeros to a
// multiple of 8.
#pragma once
#include "base.cuh"
#include "conv_load.cuh"

// Devices before 9.0 have no clusters; no plan for them uses one. The host emulates none.
#if (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900) && !defined(TILES_EMULATED)
#define TILES_CLUSTERS
#endif

namespace tiles {

// relu(x * scale + shift) on one fragment register: two neighbouring depths of one row.
__device__ __forceinline__ u32 preactivate(u32 x, u32 scale, u32 shift)
{
    half2 y = __hfma2(*(half2*)&x, *(half2*)&scale, *(half2*)&shift);
    y = __hmax2(y, __float2half2_rn(0.f));
    return *(u32*)&y;
}

template <class C>
struct Accumulators {
    float v[C::kFragM][C::kFragN][4];
};

// The addresses of a thread's operands within a stage at the first of its k16 steps. The chunk
// number of a later step differs in bits that the swizzle only flips, so its address is one
// exclusive-or away.
template <class C>
struct FragmentPlace {
    u32 x, w, pre; // bytes into the stage, and into its scales

    __device__ __forceinline__ FragmentPlace()
    {
        int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
        int m = warp % (C::WM * C::WN) / C::WN * C::kWarpM + lane % 16;
        int n = warp % C::WN * C::kWarpN + lane % 8 + lane / 16 * 8;
        u32 k = warp / (C::WM * C::WN);
        x = kept(swizzled<C::BK>(m, lane / 16) ^ k * 32);
        w = kept((swizzled<C::BK>(n, lane / 8 % 2) ^ k * 32) + C::BM * C::BK * 2);
        pre = k * 32 + lane % 4 * 4;
    }
};

// The operands of one k16 step of one warp.
template <class C>
struct Fragments {
    u32 x[C::kFragM][4], w[C::kFragN / 2][4];

    // `pre` points at the stage's scales; the shifts are kPreDepth halves after them.
    __device__ __forceinline__ void load(
        u32 stage, const FragmentPlace<C>& at, int step, const unsigned char* pre)
    {
        u32 flip = step * C::WK * 32;
#pragma unroll
        for (int i = 0; i < C::kFragM; ++i)
            load_matrices(x[i], stage + (at.x ^ flip) + i * 16 * C::BK * 2);
#pragma unroll
        for (int j = 0; j < C::kFragN / 2; ++j)
            load_matrices(w[j], stage + (at.w ^ flip) + j * 16 * C::BK * 2);
        if constexpr (C::kPre) {
            const u32* scale = (const u32*)(pre + at.pre + flip);
            const u32* shift = scale + C::kPreDepth / 2;
            u32 s0 = scale[0], s1 = scale[4], t0 = shift[0], t1 = shift[4];
#pragma unroll
            for (int i = 0; i < C::kFragM; ++i) {
                x[i][0] = preactivate(x[i][0], s0, t0);
                x[i][1] = preactivate(x[i][1], s0, t0);
                x[i][2] = preactivate(x[i][2], s1, t1);
                x[i][3] = preactivate(x[i][3], s1, t1);
            }
        }
    }
    __device__ __forceinline__ void multiply(Accumulators<C>& acc) const
    {
#pragma unroll
        for (int i = 0; i < C::kFragM; ++i)
#pragma unroll
            for (int j = 0; j < C::kFragN; ++j)
                multiply_add(acc.v[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
    }
};

// One stage of the ring. Warps that share an output tile take different k16 steps of it: at batch 1
// tiles are small, and the products of one warp then do not wait for each other. `between` runs
// while the first operands are loaded.
template <class C, class Between>
__device__ __forceinline__ void multiply_stage(u32 stage, const FragmentPlace<C>& at,
    const unsigned char* pre, Accumulators<C>& acc, const Between& between)
{
    constexpr int kSteps = C::BK / 16 / C::WK;
    Fragments<C> f[2];
    f[0].load(stage, at, 0, pre);
    between();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        if (i + 1 < kSteps) f[(i + 1) % 2].load(stage, at, i + 1, pre);
        f[i % 2].multiply(acc);
    }
}

// This tile's scales and shifts, zero beyond the depth so that the padding of the last step adds
// nothing.
template <class C>
__device__ __forceinline__ void load_pre(const ConvArgs& a, const ConvPlace& p, half* to)
{
    for (int k = threadIdx.x * 8; k < p.steps * C::BK; k += C::kThreads * 8) {
        int depth = p.first * C::BK + k;
        uint4 zero = make_uint4(0, 0, 0, 0);
        *(uint4*)(to + k) = depth < a.depth ? load_weights(a.pre + depth) : zero;
        *(uint4*)(to + C::kPreDepth + k) =
            depth < a.depth ? load_weights(a.pre + a.depth + depth) : zero;
    }
}

template <class C>
__device__ __forceinline__ void load_bias(
    const ConvArgs& a, const ConvPlace& p, unsigned char* shared)
{
    int n = threadIdx.x * 4;
    bool inside = a.bias && p.n + n < a.out_c;
    if (n < C::BN)
        copy_async<16>(shared_address(shared + C::kBias + n * 4),
            inside ? a.bias + p.n + n : (const float*)a.weight, inside);
}

// The main loop. Weights of the first stages are loaded before the dependency: they do not depend
// on the previous step, and at batch 1 their latency is most of a layer's time.
template <class C, class YieldPoint, class Dependency>
__device__ __forceinline__ bool accumulate(const ConvArgs& a, const ConvPlace& p,
    unsigned char* shared, YieldPoint& yield_point, const Dependency& dependency,
    Accumulators<C>& acc)
{
    u32 ring = kept(shared_address(shared));
    unsigned char* pre = shared + C::kPreAt;
    WeightLoader<C> weights(a, p);
#pragma unroll
    for (int s = 0; s < C::kStages - 1; ++s)
        if (s < p.steps) weights.load(a, ring + s * C::kStageBytes);
    load_bias<C>(a, p, shared);
    if constexpr (C::kPre) load_pre<C>(a, p, (half*)pre);
    InputLoader<C, C::kAddressing> input(a, p);
    dependency.wait();
    yield_point.poll_for_block();
#pragma unroll
    for (int s = 0; s < C::kStages - 1; ++s) {
        if (s < p.steps) input.load(a, ring + s * C::kStageBytes);
        copy_commit();
    }
    FragmentPlace<C> at;
    int stage = 0;
    if (yield_point.block_is_preempted()) return false;
    for (int step = 0; step < p.steps; ++step) {
        copy_wait<C::kStages - 2>();
        if (yield_point.template due<C::kWatchPeriod>(step)) {
            if (yield_point.verdict()) return false;
        } else {
            __syncthreads();
        }
        multiply_stage<C>(ring + stage * C::kStageBytes, at, pre + step * C::BK * 2, acc, [&] {
            int free = stage == 0 ? C::kStages - 1 : stage - 1;
            if (step + C::kStages - 1 < p.steps) {
                input.load(a, ring + free * C::kStageBytes);
                weights.load(a, ring + free * C::kStageBytes);
            }
            copy_commit();
        });
        stage = stage == C::kStages - 1 ? 0 : stage + 1;
    }
    copy_wait<0>();
    return !yield_point.last();
}

// Writes the block's sums to shared memory, row after row; warps that split the depth have a copy
// each.
template <class C>
__device__ __forceinline__ void stage_sums(float* staged, const Accumulators<C>& acc)
{
    int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int m = warp % (C::WM * C::WN) / C::WN * C::kWarpM + lane / 4;
    int n = warp % C::WN * C::kWarpN + lane % 4 * 2;
    staged += warp / (C::WM * C::WN) * C::kPart;
#pragma unroll
    for (int i = 0; i < C::kFragM; ++i)
#pragma unroll
        for (int j = 0; j < C::kFragN; ++j) {
            float* at = staged + (m + i * 16) * C::kStaged + n + j * 8;
            *(float2*)at = make_float2(acc.v[i][j][0], acc.v[i][j][1]);
            *(float2*)(at + 8 * C::kStaged) = make_float2(acc.v[i][j][2], acc.v[i][j][3]);
        }
}

// The locations of the partial sums: own shared memory, that of the cluster's blocks, or the
// workspace. Generic addresses make them equal to the code below, which then exists once.
struct Parts {
    const float* first;
    size_t stride; // floats from one part to the next within a block
    int inner, outer;
    bool cluster;

    __device__ __forceinline__ const float* block(int i) const
    {
#ifdef TILES_CLUSTERS
        if (cluster) {
            u64 remote;
            asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(first), "r"(i));
            return (const float*)remote;
        }
#endif
        return first;
    }
    // Nothing is cached in L1: other SMs write the parts in the workspace.
    static __device__ __forceinline__ void add(float (&v)[8], const float* at)
    {
        float f[8];
#ifdef TILES_EMULATED
        for (int i = 0; i < 8; ++i) f[i] = at[i];
#else
        asm volatile("ld.volatile.v4.f32 {%0,%1,%2,%3}, [%4];"
            : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])
            : "l"(at));
        asm volatile("ld.volatile.v4.f32 {%0,%1,%2,%3}, [%4];"
            : "=f"(f[4]), "=f"(f[5]), "=f"(f[6]), "=f"(f[7])
            : "l"(at + 4));
#endif
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] += f[i];
    }
    __device__ __forceinline__ void sum(float (&v)[8], int offset) const
    {
        for (int o = 0; o < outer; ++o) {
            const float* at = block(o) + offset;
#pragma unroll 4
            for (int i = 0; i < inner; ++i) add(v, at + i * stride);
        }
    }
};

// Rows [first, last) of the tile: bias, residual, activation, eight channels per store.
template <class C>
__device__ __forceinline__ void emit(const ConvArgs& a, const ConvPlace& p, const Parts& parts,
    const float* bias, int first, int last)
{
    constexpr int kChunks = C::BN / 8;
    for (int i = first * kChunks + threadIdx.x; i < last * kChunks; i += C::kThreads) {
        int row = i / kChunks, column = i % kChunks * 8;
        int m = p.m + row, n = p.n + column;
        if (m >= a.rows || n >= a.out_c) continue;
        uint4 residual = make_uint4(0, 0, 0, 0);
        if (a.residual) residual = load_activations(a.residual + (size_t)m * a.residual_stride + n);
        float v[8], r[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = bias[column + j];
        parts.sum(v, row * C::kStaged + column);
        unpack(residual, r);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += r[j];
        activate(v, a.act);
        *(uint4*)(a.output + (size_t)m * a.out_stride + n) = pack(v);
    }
}

__device__ __forceinline__ void cluster_arrive()
{
#ifdef TILES_CLUSTERS
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait()
{
#ifdef TILES_CLUSTERS
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_barrier()
{
    cluster_arrive();
    cluster_wait();
}

// A cluster is preempted as a whole: a block that exits writes so into the shared memory of all its
// peers before their common barrier. All of them have started by then and have cleared the word:
// the first arrival ensures it.
template <class YieldPoint>
__device__ __forceinline__ void tell_cluster(const YieldPoint& yield_point, int splits)
{
#ifdef TILES_CLUSTERS
    if constexpr (YieldPoint::kPreemptible) {
        if ((int)threadIdx.x >= splits) return;
        asm volatile(
            "{\n.reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "st.shared::cluster.u32 [remote], %2;\n}" ::"r"(shared_address(yield_point.words + 1)),
            "r"(threadIdx.x), "r"(1u)
            : "memory");
    }
#endif
}

// A part announces itself with a bit, not a count: a part that is computed twice announces the
// same. True for the block that completes the set; it adds all parts in order, so that the result
// does not depend on timing.
template <class C, class Args, class Place>
__device__ __forceinline__ bool deliver(
    const Args& a, const Place& p, const float* staged, float* partial)
{
    float* own = partial + (size_t)p.split * C::WK * C::kPart;
    for (int i = threadIdx.x * 4; i < C::WK * C::kPart; i += C::kThreads * 4)
        __stcg((float4*)(own + i), *(float4*)(staged + i));
    __threadfence();
    __syncthreads();
    u32 all = a.splits == 32 ? ~0u : (1u << a.splits) - 1;
    bool last = false;
    if (threadIdx.x == 0) {
        u32* arrivals = a.arrivals + p.output_tile;
        last = (atomicOr(arrivals, 1u << p.split) | 1u << p.split) == all;
        // Ready for the next launch. A resume finds the parts' done bits, or computes every missing
        // part again.
        if (last) *arrivals = 0;
    }
    if (!__syncthreads_or(last)) return false;
    __threadfence();
    return true;
}

template <class C, class YieldPoint, class Dependency>
__device__ __forceinline__ bool conv_tile(const ConvArgs& a, int tile, unsigned char* shared,
    YieldPoint& yield_point, const Dependency& dependency)
{
    ConvPlace p = locate<C>(a, tile);
    Accumulators<C> acc = {};
    bool cluster = a.reduce == kCluster;
    if (YieldPoint::kPreemptible && cluster) cluster_arrive();
    bool stay = accumulate<C>(a, p, shared, yield_point, dependency, acc);
    if (YieldPoint::kPreemptible && cluster) {
        cluster_wait();
        if (!stay) tell_cluster(yield_point, a.splits);
    } else if (!stay) {
        return false;
    }
    yield_point.finishing();
    float* staged = (float*)shared;
    stage_sums<C>(staged, acc);
    Parts parts = {staged, C::kPart, C::WK, 1, false};
    int first = 0, last = C::BM;
    if (cluster) {
        // Every block of the cluster finishes its share of the rows.
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
    emit<C>(a, p, parts, (const float*)(shared + C::kBias), first, last);
    // No block exits while another may still read its sums.
    if (cluster) cluster_barrier();
    return true;
}

template <class C>
struct Conv {
    using Args = ConvArgs;
    using Config = C;
    static constexpr int kThreads = C::kThreads, kShared = C::kShared, kBlocks = C::kBlocks;
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char* shared,
        YieldPoint& yield_point, const Dependency& dependency)
    { return conv_tile<C>(a, t, shared, yield_point, dependency); }
};

} // namespace tiles
