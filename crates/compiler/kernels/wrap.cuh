// The kernels made of every tile function.
//
// An operator is a struct with `Args`, `kThreads`, `kShared` (bytes of dynamic shared memory), `kBlocks` (how many blocks an SM
// shall hold: the best-effort loop must not cost a block by using a few registers more) and
//   template <class Watch, class Gate>
//   static __device__ bool tile(const Args&, int tile, unsigned char* shared, Watch&, const Gate&);
// which writes one tile of the output, calls watch.finishing() on the way and returns true, or writes nothing and returns false, with
// nothing in flight, when the watch told it to leave. A tile writes only its own part of the output and never reads it, so
// redoing it is harmless. Threads of a block may differ in what they return only where no barrier follows.
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

// What a best-effort launch shares with its scheduler. All of it is device memory. `left`, `next`, `done` and, for a product that is
// split through the workspace, its `arrivals` belong to this launch alone and are zero before a fresh one: arrivals of another launch would announce
// parts that this one has not computed.
struct BeControl {
    const Seat* seat; // of the run. In memory, so that recorded launches serve every number
    u32* left;        // not zero once a block has left: until then silence means that the launch is complete when it has ended
    u32* next;        // tiles handed out beyond the first one of each block
    u32* done;        // a bit a tile, kept like arrivals for a restore; loops only
    int tiles;
    int restored;     // nonzero when some done bits may be set
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
    // Skips finished tiles; -1 when none is left. Called by thread 0.
    __device__ __forceinline__ int settle(u32 tile)
    {
        while (tile < (u32)c.tiles && is_done(tile)) tile = gridDim.x + atomicAdd(c.next, 1);
        return tile >= (u32)c.tiles ? -1 : (int)tile;
    }
    // The first tile is the block's own number. A fresh launch starts on it at once.
    __device__ __forceinline__ int first()
    {
        if (threadIdx.x == 0) *slot = c.restored ? settle(blockIdx.x) : (int)blockIdx.x;
        if (!c.restored) return (int)blockIdx.x;
        __syncthreads();
        return *slot;
    }
    // Marks the tile at hand as done and returns the next. Its stores need no fence: what a restore finds is ordered by the
    // end of this kernel.
    __device__ __forceinline__ int next(const EpochWatch<true>& watch)
    {
        if (threadIdx.x == 0) atomicOr(c.done + *slot / 32, 1u << (*slot % 32));
        if (!watch.next) return -1;
        if (threadIdx.x == 0) *slot = settle(gridDim.x + watch.number);
        __syncthreads();
        return *slot;
    }
};

// Best effort: blocks take tiles until none is left or the run is told to leave; a restore computes the tiles that are not done. As many
// blocks as were launched hold as many SMs at most, so a small grid leaves the rest of the device alone.
template <class Op>
__device__ __forceinline__ void run_best_effort(const typename Op::Args& args, const BeControl& control)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint4 words[2];
    __shared__ int slot;
    LaunchGate::release_next();
    EpochWatch<true> watch = {control.seat, words, (int)gridDim.x < control.tiles ? control.next : nullptr};
    TileSource source = {control, &slot};
    watch.start();
    // What is done, and how many tiles were handed out, the previous step's end makes known.
    if (control.restored) LaunchGate().wait();
    for (int tile = source.first(); tile >= 0; tile = source.next(watch)) {
        bool finished = Op::tile(args, uniform(tile), shared, watch, LaunchGate());
        copy_wait<0>();
        if (__syncthreads_or(!finished)) {
            if (threadIdx.x == 0) *control.left = 1;
            return;
        }
    }
}

// Best effort without the loop: a block a tile, and a restore computes all of them again. Nothing is counted or marked, so with
// nothing to preempt the only cost is looking.
template <class Op, bool Long>
__device__ __forceinline__ void run_best_effort_grid(const typename Op::Args& args, const BeControl& control)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ uint4 words[2];
    LaunchGate::release_next();
    EpochWatch<Long> watch = {control.seat, words, nullptr};
    watch.start();
    if (!Op::tile(args, (int)blockIdx.x, shared, watch, LaunchGate())) *control.left = 1;
}

// The same as a kernel, for hosts that instantiate templates.
template <class Op>
__global__ void __launch_bounds__(Op::kThreads, Op::kBlocks) rt(const __grid_constant__ typename Op::Args args)
{
    run_real_time<Op>(args);
}

} // namespace tiles
