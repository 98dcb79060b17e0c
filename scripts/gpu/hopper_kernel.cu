// One wgmma kernel in all its forms: CONFIG is the list of HopperConfig's arguments.
#include "hopper_harness.cuh"

using namespace harness;
using Config = HopperConfig<CONFIG>;
using Op = HopperConv<Config>;

static __global__ void __launch_bounds__(Op::kThreads, Op::kBlocks)
    real_time(const __grid_constant__ Op::Args args)
{ run_real_time<Op>(args); }

static __global__ void __launch_bounds__(Op::kThreads, Op::kBlocks)
    tile_loop(const __grid_constant__ Op::Args args, const __grid_constant__ BeControl control)
{ run_best_effort<Op>(args, control); }

template <bool Long>
static __global__ void __launch_bounds__(Op::kThreads, Op::kBlocks)
    grid(const __grid_constant__ Op::Args args, const __grid_constant__ BeControl control)
{ run_best_effort_grid<Op, Long>(args, control); }

#define TEXT_OF(...) #__VA_ARGS__
#define TEXT(...) TEXT_OF(__VA_ARGS__)

static int add()
{
    HopperKernel kernel = {TEXT(CONFIG), Config::BM, Config::BN, Config::kThreads, Config::kShared,
        Config::kBlocks, Config::kTiles, Config::kWindow, (const void*)real_time,
        (const void*)tile_loop, (const void*)grid<false>, (const void*)grid<true>};
    hopper_kernels().push_back(kernel);
    return 0;
}
static int added = add();
