// A tile function with as much work as a test wants: y = x * scale + shift after `rounds` of work.
#pragma once
#include "base.cuh"

namespace toy {

struct ScaleArgs {
    const float* input;
    float* output;
    const float* weight; // scale, shift
    int count;
    int rounds;
};

struct Scale {
    using Args = ScaleArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        float scale = __ldg(a.weight), shift = __ldg(a.weight + 1);
        int i = t * kThreads + threadIdx.x;
        dependency.wait();
        yield_point.poll_for_block();
        float v = i < a.count ? __ldcg(a.input + i) : 0.f;
        if (yield_point.block_is_preempted()) return false;
        float noise = v;
        for (int round = 0; round < a.rounds; ++round) {
            for (int k = 0; k < 64; ++k) noise = fmaf(noise, 0.9990234375f, 0.25f);
            if (yield_point.template due<4>(round)) {
                tiles::copy_wait_all();
                if (yield_point.verdict()) return false;
            }
        }
        if (YieldPoint::kPreemptible && yield_point.last()) return false;
        yield_point.finishing();
        // The work must not be optimized away, and must not change the result.
        if (i < a.count) a.output[i] = fmaf(v, scale, shift) + (noise > 1e30f ? 1.f : 0.f);
        return true;
    }
};

// Faults the device with a store to an invalid address.
struct Wild {
    using Args = ScaleArgs;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        dependency.wait();
        yield_point.finishing();
        *(volatile float*)(0x10ull + threadIdx.x * 16) = (float)a.count;
        return true;
    }
};

} // namespace toy
