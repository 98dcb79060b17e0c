// The common basis of all tile functions: index arithmetic without division, tensor-core and
// asynchronous-copy instructions, activations, and the two policies that a wrapper passes to a
// tile: the dependency (when to wait for the previous step) and the yield point (when to exit
// because the run is preempted).
//
// Only <cuda_fp16.h> is included, so the same text compiles under NVRTC and nvcc. Argument structs
// have plain 32-bit and pointer fields in declaration order: the host fills them byte for byte.
#pragma once
#include <cuda_fp16.h>

namespace tiles {

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int kWarp = 32;

// ---- index arithmetic ---------------------------------------------------------------------------

// Quotient by a divisor fixed at launch, exact for 0 <= n < 2^31. A hardware division costs tens of
// instructions, and a tile of a small layer has only a few hundred.
struct FastDiv {
    u32 divisor;
    u32 multiplier;
    u32 shift;

    __host__ __device__ static FastDiv of(u32 d)
    {
        FastDiv f = {d, 0, 0};
        u32 log = 0;
        while ((1ull << log) < d) ++log;
        f.multiplier = d == 1 ? 0 : (u32)(((1ull << (31 + log)) + d - 1) / d);
        f.shift = log == 0 ? 0 : log - 1;
        return f;
    }
    __device__ __forceinline__ int quotient(int n) const
    { return divisor == 1 ? n : (int)(__umulhi((u32)n, multiplier) >> shift); }
    __device__ __forceinline__ int split(int n, int& remainder) const
    {
        int q = quotient(n);
        remainder = n - q * (int)divisor;
        return q;
    }
};

#ifndef TILES_EMULATED
// A value the compiler keeps in a register instead of computing it again inside a loop.
__device__ __forceinline__ u32 kept(u32 v)
{
    asm volatile("" : "+r"(v));
    return v;
}
#endif

// A value that is the same in every thread of a warp, in a form that the compiler recognises:
// derived values are kept in uniform registers, and branches on it need no reconvergence.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(~0u, v, 0); }

// ---- activations --------------------------------------------------------------------------------

enum Activation : int {
    kLinear = 0,
    kRelu = 1,
    kRelu6 = 2,
    kGelu = 3,
    kSilu = 4,
    kSigmoid = 5,
    kTanh = 6,
    kGeluTanh = 7
};

// x * (1 + erf(x / sqrt 2)) / 2 as relu(x) - |x| erfc(|x| / sqrt 2) / 2, with Hastings' formula of
// erfc, whose error is 3e-7: a third of the instructions of erff, which epilogues wait for.
__device__ __forceinline__ float gelu(float x)
{
    float z = fabsf(x) > 16.f ? 16.f : fabsf(x); // NaN is kept
    float sum = fmaf(5.3829750e-6f, z, 4.8890636e-5f);
    sum = fmaf(sum, z, 3.8003575e-5f);
    sum = fmaf(sum, z, 3.2776263e-3f);
    sum = fmaf(sum, z, 2.1141006e-2f);
    sum = fmaf(sum, z, 4.9867347e-2f);
    float r = __fdividef(1.f, fmaf(sum, z, 1.f));
    r *= r;
    r *= r;
    r *= r;
    r *= r;
    return fmaxf(x, 0.f) - 0.5f * z * r;
}
// Half of 1 + tanh is a sigmoid of twice the argument.
__device__ __forceinline__ float gelu_tanh(float x)
{ return __fdividef(x, 1.f + __expf(-1.5957691f * fmaf(0.044715f * x * x, x, x))); }

__device__ __forceinline__ float activate(float x, int kind)
{
    switch (kind) {
    case kRelu: return fmaxf(x, 0.f);
    case kRelu6: return fminf(fmaxf(x, 0.f), 6.f);
    case kGelu: return gelu(x);
    case kSilu: return __fdividef(x, 1.f + __expf(-x));
    case kSigmoid: return __fdividef(1.f, 1.f + __expf(-x));
    case kTanh: return tanhf(x);
    case kGeluTanh: return gelu_tanh(x);
    default: return x;
    }
}

// Eight values at once, with one branch: fetching code is a notable cost of a kernel of a few
// microseconds.
template <int Kind>
__device__ __forceinline__ void activate_all(float (&v)[8])
{
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = activate(v[i], Kind);
}
__device__ __forceinline__ void activate(float (&v)[8], int kind)
{
    if (kind == kLinear) return;
    if (kind <= kRelu6) {
        float high = kind == kRelu ? 3e38f : 6.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = fminf(fmaxf(v[i], 0.f), high);
    } else if (kind == kGelu) {
        activate_all<kGelu>(v);
    } else if (kind == kSilu) {
        activate_all<kSilu>(v);
    } else if (kind == kSigmoid) {
        activate_all<kSigmoid>(v);
    } else if (kind == kGeluTanh) {
        activate_all<kGeluTanh>(v);
    } else {
        activate_all<kTanh>(v);
    }
}

// ---- eight halves at a time ---------------------------------------------------------------------

// Activations are read past L1 (`cg`): a persistent kernel may read a buffer that another SM has
// rewritten.
__device__ __forceinline__ uint4 load_activations(const half* p) { return __ldcg((const uint4*)p); }
__device__ __forceinline__ uint4 load_weights(const half* p) { return __ldg((const uint4*)p); }

__device__ __forceinline__ void unpack(uint4 raw, float (&v)[8])
{
    const half2* h = (const half2*)&raw;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 f = __half22float2(h[i]);
        v[2 * i] = f.x;
        v[2 * i + 1] = f.y;
    }
}

__device__ __forceinline__ uint4 pack(const float (&v)[8])
{
    uint4 raw;
    half2* h = (half2*)&raw;
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    return raw;
}

__device__ __forceinline__ void add_floats(float (&v)[8], const float* p)
{
    float4 lo = __ldg((const float4*)p), hi = __ldg((const float4*)p + 1);
    v[0] += lo.x, v[1] += lo.y, v[2] += lo.z, v[3] += lo.w;
    v[4] += hi.x, v[5] += hi.y, v[6] += hi.z, v[7] += hi.w;
}

// ---- asynchronous copies ------------------------------------------------------------------------

// Tests that run on the host bring their own version of what is not C++.
#ifndef TILES_EMULATED

__device__ __forceinline__ u32 shared_address(const void* p)
{ return (u32)__cvta_generic_to_shared(p); }

// Writes `Bytes` (4, 8 or 16) to shared memory: the first `bytes` are copied, the others are zeros.
template <int Bytes>
__device__ __forceinline__ void copy_async_part(u32 to, const void* from, int bytes)
{
    if constexpr (Bytes == 16)
        asm volatile(
            "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from),
            "r"(bytes), "n"(Bytes));
}
// All of them, or zeros when `valid` is false (then nothing is read).
template <int Bytes>
__device__ __forceinline__ void copy_async(u32 to, const void* from, bool valid)
{ copy_async_part<Bytes>(to, from, valid ? Bytes : 0); }
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int Pending>
__device__ __forceinline__ void copy_wait()
{ asm volatile("cp.async.wait_group %0;" ::"n"(Pending)); }
__device__ __forceinline__ void store_shared(u32 to, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
        "r"(v.w)
        : "memory");
}
// Includes copies that are in no group.
__device__ __forceinline__ void copy_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- tensor cores -------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(address));
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add_brain(
    float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float power_of_two(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif // TILES_EMULATED

// ---- launch dependencies: when a tile may read what the previous step wrote ---------------------

// Programmatic dependent launch. A tile issues its weight loads, then waits. Without the launch
// attribute both are no-ops, and devices before 9.0 have neither.
struct LaunchDependency {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    __device__ __forceinline__ static void release_next()
    { asm volatile("griddepcontrol.launch_dependents;"); }
    __device__ __forceinline__ void wait() const
    { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
    __device__ __forceinline__ static void release_next() {}
    __device__ __forceinline__ void wait() const {}
#endif
};
struct NoDependency {
    __device__ __forceinline__ void wait() const {}
};

// ---- yield points: when a tile must exit --------------------------------------------------------

// A tile loads the epoch counter of its run directly after the dependency, with its operands, and
// decides before it writes anything. So a launch that starts after the preemption writes nothing:
// launches queued after a preempted step cannot corrupt what that step still reads or has written,
// even if they share memory.

// Real-time work is never preempted and has no checks.
struct NoYieldPoint {
    static constexpr bool kPreemptible = false;
    __device__ __forceinline__ void poll() const {}
    __device__ __forceinline__ bool is_preempted() const { return false; }
    __device__ __forceinline__ void poll_for_block() const {}
    __device__ __forceinline__ bool block_is_preempted() const { return false; }
    template <int Period>
    __device__ __forceinline__ bool due(int) const
    { return false; }
    __device__ __forceinline__ bool verdict() const { return false; }
    __device__ __forceinline__ bool last() const
    {
        __syncthreads();
        return false;
    }
    __device__ __forceinline__ bool peer_is_preempted() const { return false; }
    __device__ __forceinline__ void finishing() const {}
};

// The epoch counter of a run and the epoch of its launches: the run is preempted once the counter
// exceeds the epoch. Both are words of one load; 16 bytes are reserved (`EpochYieldPoint::ask`
// copies as many).
struct EpochCounter {
    u32 counter; // the epoch counter; preempting the run increments it
    u32 epoch; // the epoch of the run's launches
};

__device__ __forceinline__ EpochCounter load_epoch_counter(const EpochCounter* p)
{
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return {(u32)v, (u32)(v >> 32)};
}

// Best-effort work exits when its run is preempted.
//
// Tiles without a loop call `poll`: every thread loads the epoch counter with its operands and
// decides by itself before it stores. Threads of a block may disagree; the tile then counts as not
// done.
//
// Tiles with a loop call `poll_for_block`: one thread loads the counter, and the barrier that the
// first operands need anyway distributes the result to the block. Short tiles do no more: a branch
// in the loop costs a small layer more than the rest of the tile. Long ones continue with `ask`:
// the counter is copied into shared memory asynchronously, with the copies of the pipeline, so that
// no thread waits for it. The value that has arrived when the next check is due decides, and a
// barrier that the loop has anyway makes the decision the same for the whole block. `cg` copies
// come from L2, where the host's writes arrive.
template <bool Long>
struct EpochYieldPoint {
    static constexpr bool kPreemptible = true;
    const EpochCounter* epoch_counter;
    // Shared memory: the epoch counter as last read; whether another block of the cluster exits.
    uint4* words;
    u32* next; // the launch's tile counter; null when every block has one tile
    u32 number; // the value that thread 0 got from it
    EpochCounter seen;

    // A tile calls this once, before its epilogue, so that the next tile's number arrives during
    // the epilogue. Requesting it earlier would assign the last tiles to the blocks that started
    // first: two to one SM and none to another.
    __device__ __forceinline__ void finishing()
    {
        if (next && threadIdx.x == 0) number = atomicAdd(next, 1);
    }

    // Before the first tile: an epoch that no counter exceeds, whichever half of a copy arrives
    // first. A barrier follows before anything is read.
    __device__ __forceinline__ void start() const
    {
        if (threadIdx.x < 2) words[threadIdx.x] = make_uint4(0, ~0u, 0, 0);
    }

    __device__ __forceinline__ void poll() { seen = load_epoch_counter(epoch_counter); }
    __device__ __forceinline__ bool is_preempted() const { return seen.counter > seen.epoch; }

    __device__ __forceinline__ void poll_for_block()
    {
        seen = {0, 0};
        if (threadIdx.x == 0) poll();
    }
    // A barrier. Returns true, with no copy in flight, when the block must exit. The result is the
    // same for all threads; `__any_sync` lets the compiler know, so that what follows stays
    // uniform.
    __device__ __forceinline__ bool block_is_preempted() const
    {
        bool leave = __any_sync(~0u, __syncthreads_or(is_preempted()));
        if (leave) copy_wait_all();
        else if (Long) ask();
        return leave;
    }

    __device__ __forceinline__ void ask() const
    {
        if (threadIdx.x == 0) copy_async<16>(shared_address(words), epoch_counter, true);
    }
    __device__ __forceinline__ bool arrived() const
    {
        const volatile uint4* w = words;
        return w->x > w->y;
    }
    // Whether step `step` checks: every Period-th of a long tile, because steps of small tiles are
    // too short to check each.
    template <int Period>
    __device__ __forceinline__ bool due(int step) const
    { return Long && step > 0 && step % Period == 0; }
    // Replaces the barrier of a step that checks. Returns true, with no copy in flight, when the
    // block must exit. Threads may have read different words, so one positive result decides.
    __device__ __forceinline__ bool verdict() const
    {
        bool leave = __any_sync(~0u, __syncthreads_or(arrived()));
        if (leave) copy_wait_all();
        else ask();
        return leave;
    }
    // After the barrier of a cluster: whether any of its blocks exits.
    __device__ __forceinline__ bool peer_is_preempted() const
    { return ((const volatile uint4*)words)[1].x != 0; }
    // Replaces the barrier before a tile is written, when all copies have arrived.
    __device__ __forceinline__ bool last() const
    {
        if (!Long) {
            __syncthreads();
            return false;
        }
        copy_wait_all();
        return __any_sync(~0u, __syncthreads_or(arrived()));
    }
};

} // namespace tiles
