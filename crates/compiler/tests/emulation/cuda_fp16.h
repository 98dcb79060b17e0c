// Emulates CUDA on a machine without it: the threads of a block are fibers that switch at barriers
// and shuffles, so that tile functions run unchanged, one tile after another, under the host's
// address sanitizer.
#pragma once
#define TILES_EMULATED
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

using std::max;
using std::min;

namespace emulation {
struct Index { unsigned x; };
void block_barrier();
void warp_barrier();
extern uint64_t lanes[1024]; // what each thread contributes to a shuffle
extern unsigned char* shared_memory; // of the running block
} // namespace emulation

extern emulation::Index threadIdx, blockIdx, gridDim;

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline float __int_as_float(unsigned v) { float f; std::memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned v; std::memcpy(&v, &f, 4); return v; }
inline double __hiloint2double(int high, int low)
{
    uint64_t v = (uint64_t)(uint32_t)high << 32 | (uint32_t)low;
    double f;
    std::memcpy(&f, &v, 8);
    return f;
}
inline double __longlong_as_double(long long v) { double f; std::memcpy(&f, &v, 8); return f; }

struct half { uint16_t bits; };
struct half2 { half x, y; };
inline float __half2float(half h)
{
    unsigned sign = (h.bits & 0x8000u) << 16;
    unsigned exponent = h.bits >> 10 & 31, fraction = h.bits & 1023;
    if (exponent == 31) return __int_as_float(sign | 0x7f800000u | fraction << 13);
    float f = exponent ? std::ldexp((float)(fraction | 1024), (int)exponent - 25)
                       : std::ldexp((float)fraction, -24);
    return sign ? -f : f;
}
inline half __float2half_rn(float f)
{
    unsigned sign = __float_as_uint(f) >> 16 & 0x8000u;
    float a = std::fabs(f);
    if (f != f) return {(uint16_t)(sign | 0x7e00u)};
    if (a >= 65520.f) return {(uint16_t)(sign | 0x7c00u)};
    int e;
    std::frexp(a, &e);
    if (a < 6.103515625e-05f)
        return {(uint16_t)(sign | (unsigned)std::nearbyint(std::ldexp(a, 24)))};
    unsigned m = (unsigned)std::nearbyint(std::ldexp(a, 11 - e));
    return {(uint16_t)(sign | ((e + 13u << 10) + m))};
}
inline half __float2half(float f) { return __float2half_rn(f); }
inline float2 __half22float2(half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline half2 __floats2half2_rn(float x, float y)
{
    return {__float2half_rn(x), __float2half_rn(y)};
}

template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T v) { *p = v; }
template <class T> T __ldg(const T* p) { return *p; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }
inline unsigned atomicAdd(unsigned* p, unsigned v) { unsigned old = *p; *p += v; return old; }

inline unsigned atomicOr(unsigned* p, unsigned v) { unsigned old = *p; *p |= v; return old; }
inline void __threadfence() {}

inline void __syncthreads() { emulation::block_barrier(); }
inline int __syncthreads_or(int v)
{
    static int any;
    any = 0;
    emulation::block_barrier();
    any |= v != 0;
    emulation::block_barrier();
    int seen = any;
    emulation::block_barrier();
    return seen;
}
template <class T> T exchange(T v, unsigned from)
{
    unsigned self = threadIdx.x;
    std::memcpy(&emulation::lanes[self], &v, sizeof(T));
    emulation::warp_barrier();
    T got;
    std::memcpy(&got, &emulation::lanes[(self & ~31u) | (from & 31u)], sizeof(T));
    emulation::warp_barrier();
    return got;
}
template <class T> T __shfl_sync(unsigned, T v, int from) { return exchange(v, from); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask)
{
    return exchange(v, (threadIdx.x ^ mask) & 31u);
}
template <class T> T __shfl_up_sync(unsigned, T v, int by)
{
    unsigned lane = threadIdx.x & 31u;
    return exchange(v, lane >= (unsigned)by ? lane - by : lane);
}
template <class T> T __shfl_down_sync(unsigned, T v, int by)
{
    unsigned lane = threadIdx.x & 31u;
    return exchange(v, lane + by < 32 ? lane + by : lane);
}
inline int __any_sync(unsigned, int v)
{
    int any = v;
    for (int d = 16; d; d /= 2) any |= __shfl_xor_sync(~0u, any, d);
    return any;
}
