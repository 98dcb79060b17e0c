// The kernels made of every tile function.
//
// An operator is a struct with `Args`, `kThreads`, `kShared` (bytes of dynamic shared memory), `kBlocks` (how many blocks an SM
// shall hold: the best-effort loop must not cost a block by using a few registers more) and
//   template <class Watch, class Gate>
//   static __device__ bool tile(const Args&, int tile, unsigned char* shared, Watch&, const Gate&);
// which writes one tile of the output, calls watch.finishing() on the way and returns true, or returns false, uniformly over the block and with nothing in
// flight, when the watch told it to leave. A tile writes only its own part of the output and never reads it, so redoing it is
// harmless.
#pragma once
#include "base.cuh"

namespace tiles {

// Real time: one block a tile, no checks. The next step's blocks may become resident as soon as all of these have started;
// they load their weights and wait at their gate.
template <class Op>
__device__ __forceinline__ void run_real_time(const typename Op::Args& args)
{
    extern __shared__ __align__(128) unsigned char shared[];
    LaunchGate::release_next();
    NoWatch watch;
    Op::tile(args, (int)blockIdx.x, shared, watch, LaunchGate());
}

// What a best-effort launch shares with its scheduler. All of it is device memory. `next`, `done` and, for a product that is
// split through the workspace, its `arrivals` belong to this launch alone: left from another launch they would announce parts
// that this one has not computed. Side by side they are one memset.
struct BeControl {
    const u32* epoch;   // grows with every real-time arrival; one word for the whole device (see EpochWatch for alignment)
    const u32* budget;  // how many blocks of this launch may stay; aligned alike
    u32* next;          // tiles handed out beyond the first one of each block; zeroed before every launch
    u32* done;          // a bit a tile; like `arrivals` zeroed before a fresh launch and kept for a restore
    u32 launched;       // the epoch at launch
    int tiles;
    int restored;       // nonzero when some done bits may be set
};

// Hands tiles to a block; thread 0 does the asking. A number lost by leaving early does no harm: a restore starts the count
// again and skips what is done. The tile at hand lies in shared memory, because a register more can cost a block an SM.
struct TileSource {
    const BeControl& c;
    int* slot;

    __device__ __forceinline__ bool is_done(u32 tile) const
    {
        return c.restored && (__ldcg(c.done + tile / 32) >> (tile % 32) & 1);
    }
    // Skips finished tiles; -1 when the block should leave. Called by thread 0.
    __device__ __forceinline__ int settle(u32 tile, bool leave)
    {
        while (tile < (u32)c.tiles && is_done(tile)) tile = gridDim.x + atomicAdd(c.next, 1);
        return leave || tile >= (u32)c.tiles ? -1 : (int)tile;
    }
    // The first tile is the block's own number. A fresh launch starts on it at once: the tile's own watch is soon enough.
    __device__ __forceinline__ int first()
    {
        if (threadIdx.x == 0) *slot = c.restored ? settle(blockIdx.x, false) : (int)blockIdx.x;
        if (!c.restored) return (int)blockIdx.x;
        __syncthreads();
        return *slot;
    }
    // Marks the tile at hand as done and returns the next. Its stores need no fence: what a restore finds is ordered by the
    // end of this kernel.
    __device__ __forceinline__ int next(const EpochWatch& watch)
    {
        copy_wait<0>();
        __syncthreads();
        if (threadIdx.x == 0) atomicOr(c.done + *slot / 32, 1u << (*slot % 32));
        if (!watch.next) return -1;
        if (threadIdx.x == 0) *slot = settle(gridDim.x + watch.number, watch.told());
        __syncthreads();
        return *slot;
    }
};

// Best effort: blocks take tiles until none is left, the epoch moves on or the budget shrinks below the block's index.
// A block is on one SM, so a budget of k blocks holds at most k SMs.
template <class Op>
__device__ __forceinline__ void run_best_effort(const typename Op::Args& args, const BeControl& control)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint4 words[2];
    __shared__ int slot;
    EpochWatch watch = {control.epoch, control.budget, control.launched, words,
                        (int)gridDim.x < control.tiles ? control.next : nullptr, 0};
    TileSource source = {control, &slot};
    watch.start();
    for (int tile = source.first(); tile >= 0; tile = source.next(watch)) {
        watch.ask();
        if (!Op::tile(args, uniform(tile), shared, watch, NoGate())) return;
    }
}

// Best effort without the loop, for launches of many short tiles, whose fetch would cost more than a block's start. The
// hardware hands out the tiles, so there is no budget: a scheduler that pads launches `be`. A short tile that started is
// finished; the queue behind it drains at the pace of block starts unless its tiles look at the epoch.
template <class Op>
__device__ __forceinline__ void run_best_effort_grid(const typename Op::Args& args, const BeControl& control)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint4 words[2];
    int tile = (int)blockIdx.x;
    if (control.restored && (__ldcg(control.done + tile / 32) >> (tile % 32) & 1)) return;
    EpochWatch watch = {control.epoch, nullptr, control.launched, words, nullptr, 0};
    watch.start();
    watch.ask();
    if (!Op::tile(args, tile, shared, watch, NoGate())) return;
    __syncthreads();
    if (threadIdx.x == 0) atomicOr(control.done + tile / 32, 1u << (tile % 32));
}

// The same as kernels, for hosts that instantiate templates.
template <class Op>
__global__ void __launch_bounds__(Op::kThreads, Op::kBlocks) rt(const __grid_constant__ typename Op::Args args)
{
    run_real_time<Op>(args);
}
template <class Op>
__global__ void __launch_bounds__(Op::kThreads, Op::kBlocks) be(const __grid_constant__ typename Op::Args args,
                                                                const __grid_constant__ BeControl control)
{
    run_best_effort<Op>(args, control);
}
template <class Op>
__global__ void __launch_bounds__(Op::kThreads, Op::kBlocks) be_grid(const __grid_constant__ typename Op::Args args,
                                                                     const __grid_constant__ BeControl control)
{
    run_best_effort_grid<Op>(args, control);
}

} // namespace tiles
