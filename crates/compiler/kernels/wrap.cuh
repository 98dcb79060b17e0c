// Wraps tile functions into kernels.
//
// An operator is a struct with `Args`, `kThreads`, `kShared` (bytes of dynamic shared memory),
// `kBlocks` (how many blocks an SM must hold: the best-effort loop must not cost a block by using a
// few more registers) and
//   template <class YieldPoint, class Dependency>
//   static __device__ bool tile(
//       const Args&, int tile, unsigned char* shared, YieldPoint&, const Dependency&);
// which writes one tile of the output, calls yield_point.finishing() before its epilogue and
// returns true; or writes nothing and returns false, with no copy in flight, when the run is
// preempted. A tile writes only its own part of the output and never reads it, so that it can be
// computed again. Threads of a block may return different values only where no barrier follows.
#pragma once
#include "base.cuh"

namespace tiles {

// Real time: one block per tile, no checks. The next step's blocks may become resident as soon as
// all of these have started; they load their weights and wait at their dependency.
template <class Op>
__device__ __forceinline__ void run_real_time(const typename Op::Args& args)
{
    extern __shared__ __align__(128) unsigned char shared[];
    LaunchDependency::release_next();
    NoYieldPoint yield_point;
    Op::tile(args, (int)blockIdx.x, shared, yield_point, LaunchDependency());
}

// What a best-effort launch shares with its scheduler, all in device memory. `left`, `next`, `done`
// and, for a product that is split through the workspace, its `arrivals` belong to this launch
// alone and are zero before a fresh one: arrivals of another launch would announce parts that this
// one has not computed.
struct BeControl {
    // Epoch counter of the run. It is in memory so that recorded launches work for every epoch.
    const EpochCounter* epoch_counter;
    // Not zero once a block was preempted; if it is zero when the launch ends, the launch is
    // complete.
    u32* left;
    u32* next; // tiles assigned beyond the first one of each block
    u32* done; // one bit per tile, kept like arrivals for a resume; loops only
    int tiles;
    int restored; // not zero when some done bits may be set
};

// Assigns tiles to a block, through thread 0. A number lost by a preemption does no harm: a resume
// starts the count again and skips tiles that are done. The current tile is in shared memory,
// because one more register can cost an SM a block.
struct TileSource {
    const BeControl& c;
    int* slot;

    __device__ __forceinline__ bool is_done(u32 tile) const
    { return c.restored && (__ldcg(c.done + tile / 32) >> (tile % 32) & 1); }
    // Skips finished tiles; -1 when none remains. Called by thread 0.
    __device__ __forceinline__ int settle(u32 tile)
    {
        while (tile < (u32)c.tiles && is_done(tile)) tile = gridDim.x + atomicAdd(c.next, 1);
        return tile >= (u32)c.tiles ? -1 : (int)tile;
    }
    // The first tile is the block's own number. A fresh launch starts on it immediately.
    __device__ __forceinline__ int first()
    {
        if (threadIdx.x == 0) *slot = c.restored ? settle(blockIdx.x) : (int)blockIdx.x;
        if (!c.restored) return (int)blockIdx.x;
        __syncthreads();
        return *slot;
    }
    // Marks the current tile as done and returns the next. Its stores need no fence: the end of
    // this kernel orders them before a resume.
    __device__ __forceinline__ int next(const EpochYieldPoint<true>& yield_point)
    {
        if (threadIdx.x == 0) atomicOr(c.done + *slot / 32, 1u << (*slot % 32));
        if (!yield_point.next) return -1;
        if (threadIdx.x == 0) *slot = settle(gridDim.x + yield_point.number);
        __syncthreads();
        return *slot;
    }
};

// Best effort: blocks take tiles until none remains or the run is preempted; a resume computes the
// tiles that are not done. The launched blocks occupy at most as many SMs, so a small grid uses
// only a part of the device.
template <class Op>
__device__ __forceinline__ void run_best_effort(
    const typename Op::Args& args, const BeControl& control)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint4 words[2];
    __shared__ int slot;
    LaunchDependency::release_next();
    EpochYieldPoint<true> yield_point = {
        control.epoch_counter, words, (int)gridDim.x < control.tiles ? control.next : nullptr};
    TileSource source = {control, &slot};
    yield_point.start();
    // The end of the previous step makes visible which tiles are done and how many are assigned.
    if (control.restored) LaunchDependency().wait();
    for (int tile = source.first(); tile >= 0; tile = source.next(yield_point)) {
        bool finished = Op::tile(args, uniform(tile), shared, yield_point, LaunchDependency());
        copy_wait<0>();
        if (__syncthreads_or(!finished)) {
            if (threadIdx.x == 0) *control.left = 1;
            return;
        }
    }
}

// Best effort without the loop: one block per tile, and a resume computes all tiles again. Nothing
// is counted or marked, so without preemption the only cost is the check.
template <class Op, bool Long>
__device__ __forceinline__ void run_best_effort_grid(
    const typename Op::Args& args, const BeControl& control)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint4 words[2];
    LaunchDependency::release_next();
    EpochYieldPoint<Long> yield_point = {control.epoch_counter, words, nullptr};
    yield_point.start();
    if (!Op::tile(args, (int)blockIdx.x, shared, yield_point, LaunchDependency()))
        *control.left = 1;
}

// The same as a kernel, for hosts that instantiate templates.
template <class Op>
__global__ void __launch_bounds__(Op::kThreads, Op::kBlocks)
    rt(const __grid_constant__ typename Op::Args args)
{ run_real_time<Op>(args); }

} // namespace tiles
