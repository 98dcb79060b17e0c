// The entry points of a module: one operator, real time or best effort, under fixed names.
#pragma once
#include "wrap.cuh"

// Checks what the host assumes about the operator: a struct or a tile shape that changes on one
// side only does not compile.
#define TILES_EXPECT(Op, threads, shared, args) \
    static_assert(Op::kThreads == (threads), "threads of a block"); \
    static_assert(Op::kShared == (shared), "dynamic shared memory of a block"); \
    static_assert(sizeof(Op::Args) == (args), "size of the arguments")

#define TILES_REAL_TIME(Op) \
    extern "C" __global__ void __launch_bounds__(Op::kThreads, Op::kBlocks) \
        rt(const __grid_constant__ Op::Args args) \
    { tiles::run_real_time<Op>(args); }

#define TILES_LOOP(Op) \
    extern "C" __global__ void __launch_bounds__(Op::kThreads, Op::kBlocks) be( \
        const __grid_constant__ Op::Args args, const __grid_constant__ tiles::BeControl control) \
    { tiles::run_best_effort<Op>(args, control); }

#define TILES_GRID(Op) \
    extern "C" __global__ void __launch_bounds__(Op::kThreads, Op::kBlocks) be_grid( \
        const __grid_constant__ Op::Args args, const __grid_constant__ tiles::BeControl control) \
    { tiles::run_best_effort_grid<Op, false>(args, control); }

#define TILES_CHECKED_GRID(Op) \
    extern "C" __global__ void __launch_bounds__(Op::kThreads, Op::kBlocks) be_long( \
        const __grid_constant__ Op::Args args, const __grid_constant__ tiles::BeControl control) \
    { tiles::run_best_effort_grid<Op, true>(args, control); }

// All entry points of best effort; a step uses one of them.
#define TILES_BEST_EFFORT(Op) TILES_LOOP(Op) TILES_GRID(Op) TILES_CHECKED_GRID(Op)
