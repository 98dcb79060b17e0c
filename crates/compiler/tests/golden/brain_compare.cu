#define TILES_BF16
#include "chain.cuh"
namespace tiles {
struct Function {
    static constexpr int kInputs = 1, kRank = 1, kCount = 8;
    template <class YieldPoint>
    static __device__ __forceinline__ bool apply(const ChainPlace<kInputs, kRank, kCount>& place, const YieldPoint& yield_point)
    {
        float x0[kCount];
        place.load<__nv_bfloat16, kRow>(0, x0);
        Pack<unsigned char, kCount> y;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float t0 = number::abs(x0[i]);
            const bool t1 = t0 < 0.5f;
            y.v[i] = Stored<unsigned char>::of(t1);
        }
        if (yield_point.is_preempted()) return false;
        place.store(y);
        return true;
    }
};
} // namespace tiles
