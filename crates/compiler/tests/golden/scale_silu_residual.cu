#include "chain.cuh"
namespace tiles {
struct Function {
    static constexpr int kInputs = 4, kRank = 2, kCount = 8;
    template <class YieldPoint>
    static __device__ __forceinline__ bool apply(const ChainPlace<kInputs, kRank, kCount>& place, const YieldPoint& yield_point)
    {
        float x0[kCount];
        place.load<half, kRow>(0, x0);
        float x1[kCount];
        place.load<float, kRow>(1, x1);
        float x2[kCount];
        place.load<float, kRow>(2, x2);
        float x3[kCount];
        place.load<half, kRow>(3, x3);
        Pack<half, kCount> y;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float t0 = x0[i] * x1[i] + x2[i];
            const float t1 = number::silu<float>(t0, 1.0f);
            const float t2 = (float)(t1 + x3[i]);
            y.v[i] = Stored<half>::of(t2);
        }
        if (yield_point.is_preempted()) return false;
        place.store(y);
        return true;
    }
};
} // namespace tiles
