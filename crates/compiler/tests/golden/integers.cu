#include "chain.cuh"
namespace tiles {
struct Function {
    static constexpr int kInputs = 2, kRank = 2, kCount = 1;
    template <class YieldPoint>
    static __device__ __forceinline__ bool apply(const ChainPlace<kInputs, kRank, kCount>& place, const YieldPoint& yield_point)
    {
        long long x0[kCount];
        place.load<long long, kRow>(0, x0);
        long long x1[kCount];
        place.load<long long, kRow>(1, x1);
        Pack<long long, kCount> y;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const long long t0 = number::modulo<long long>(x0[i], (long long)(-3ll));
            const long long t1 = number::quotient(t0, x1[i]);
            y.v[i] = Stored<long long>::of(t1);
        }
        if (yield_point.is_preempted()) return false;
        place.store(y);
        return true;
    }
};
} // namespace tiles
