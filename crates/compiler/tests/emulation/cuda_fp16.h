// Emulates CUDA on a machine without it: the threads of a block are fibers that switch at barriers
// and shuffles, so that tile functions run unchanged, one tile after another, under the host's
// address sanitizer.
#pragma once
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

inline half2 __hfma2(half2 a, half2 b, half2 c)
{
    float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
    return __floats2half2_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline half2 __hmax2(half2 a, half2 b)
{
    float2 x = __half22float2(a), y = __half22float2(b);
    return __floats2half2_rn(std::fmax(x.x, y.x), std::fmax(x.y, y.y));
}
inline half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }

template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldg(const T* p) { return *p; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
template <class T> void __stcg(T* p, T v) { *p = v; }
inline void __threadfence() {}
inline unsigned atomicOr(unsigned* p, unsigned v) { unsigned old = *p; *p |= v; return old; }
inline unsigned atomicAdd(unsigned* p, unsigned v) { unsigned old = *p; *p += v; return old; }

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

// ---- what base.cuh writes in assembly -----------------------------------------------------------

#define TILES_EMULATED

namespace emulation {
extern unsigned char* shared; // addresses of shared memory count from here
// What each thread brings to a product of a warp: parts of two matrices, by turns, so that one
// barrier per product is enough.
struct Operands { float a[8], b[4]; };
extern Operands operands[2][1024];
extern unsigned turns[1024];

inline float bf16_value(uint16_t bits) { return __int_as_float((unsigned)bits << 16); }
inline float value(uint16_t bits, bool brain)
{
    return brain ? bf16_value(bits) : __half2float(half{bits});
}
inline void multiply_add(
    float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool brain)
{
    unsigned self = threadIdx.x, turn = turns[self]++ % 2, first = self & ~31u, lane = self & 31u;
    Operands& own = operands[turn][self];
    for (int i = 0; i < 8; ++i) own.a[i] = value(a[i / 2] >> i % 2 * 16 & 0xffff, brain);
    for (int i = 0; i < 4; ++i) own.b[i] = value((i < 2 ? b0 : b1) >> i % 2 * 16 & 0xffff, brain);
    warp_barrier();
    const Operands* all = operands[turn] + first;
    for (int out = 0; out < 4; ++out) {
        unsigned column = lane % 4 * 2 + out % 2;
        for (unsigned k = 0; k < 16; ++k) {
            // Registers 0 and 1 of `a` hold depths 0 to 7 of rows 0 to 7 and 8 to 15.
            unsigned slot = (k / 8 * 2 + out / 2) * 2 + k % 2;
            float x = all[lane / 4 * 4 + k % 8 / 2].a[slot];
            d[out] = std::fma(x, all[column * 4 + k % 8 / 2].b[k / 8 * 2 + k % 2], d[out]);
        }
    }
}
// The product of 16 rows, 8 columns and 8 depths of tf32.
inline void multiply_add_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    unsigned self = threadIdx.x, turn = turns[self]++ % 2, first = self & ~31u, lane = self & 31u;
    Operands& own = operands[turn][self];
    for (int i = 0; i < 4; ++i) own.a[i] = __int_as_float(a[i]);
    own.b[0] = __int_as_float(b0), own.b[1] = __int_as_float(b1);
    warp_barrier();
    const Operands* all = operands[turn] + first;
    for (int out = 0; out < 4; ++out) {
        unsigned column = lane % 4 * 2 + out % 2;
        for (unsigned k = 0; k < 8; ++k) {
            // Registers 0 and 1 of `a` hold depths 0 to 3 of rows 0 to 7 and 8 to 15.
            float x = all[lane / 4 * 4 + k % 4].a[k / 4 * 2 + out / 2];
            d[out] = std::fma(x, all[column * 4 + k % 4].b[k / 4], d[out]);
        }
    }
}
// The product of 16 rows, 8 columns and 32 depths of bytes; those of `b` are signed.
struct ByteOperands { unsigned a[4], b[2]; };
extern ByteOperands byte_operands[2][1024];
inline int byte_of(unsigned word, unsigned at, bool is_signed)
{
    unsigned byte = word >> at * 8 & 0xff;
    return is_signed ? (int)(int8_t)byte : (int)byte;
}
inline void multiply_add_bytes(
    int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool is_signed)
{
    unsigned self = threadIdx.x, turn = turns[self]++ % 2, first = self & ~31u, lane = self & 31u;
    ByteOperands& own = byte_operands[turn][self];
    for (int i = 0; i < 4; ++i) own.a[i] = a[i];
    own.b[0] = b0, own.b[1] = b1;
    warp_barrier();
    const ByteOperands* all = byte_operands[turn] + first;
    for (int out = 0; out < 4; ++out) {
        unsigned column = lane % 4 * 2 + out % 2;
        for (unsigned k = 0; k < 32; ++k) {
            // Registers 0 and 1 of `a` hold depths 0 to 15 of rows 0 to 7 and 8 to 15.
            unsigned x = all[lane / 4 * 4 + k % 16 / 4].a[k / 16 * 2 + out / 2];
            unsigned y = all[column * 4 + k % 16 / 4].b[k / 16];
            d[out] += byte_of(x, k % 4, is_signed) * byte_of(y, k % 4, true);
        }
    }
}
inline void load_matrices(unsigned (&r)[4], unsigned address, bool transposed)
{
    unsigned self = threadIdx.x, first = self & ~31u, lane = self & 31u;
    lanes[self] = address;
    warp_barrier();
    for (unsigned i = 0; i < 4; ++i) {
        const uint64_t* rows = lanes + first + i * 8;
        if (transposed) {
            uint16_t low, high;
            std::memcpy(&low, shared + rows[lane % 4 * 2] + lane / 4 * 2, 2);
            std::memcpy(&high, shared + rows[lane % 4 * 2 + 1] + lane / 4 * 2, 2);
            r[i] = low | (unsigned)high << 16;
        } else {
            std::memcpy(&r[i], shared + rows[lane / 4] + lane % 4 * 4, 4);
        }
    }
    warp_barrier();
}
} // namespace emulation

namespace tiles {
inline unsigned kept(unsigned v) { return v; }
inline unsigned shared_address(const void* p)
{
    return (unsigned)((const unsigned char*)p - emulation::shared);
}
// Reads must be aligned as on the device.
template <int Bytes> void copy_async_part(unsigned to, const void* from, int bytes)
{
    if ((size_t)from % Bytes || to % Bytes || bytes < 0 || bytes > Bytes) __builtin_trap();
    std::memset(emulation::shared + to, 0, Bytes);
    if (bytes) std::memcpy(emulation::shared + to, from, bytes);
}
template <int Bytes> void copy_async(unsigned to, const void* from, bool valid)
{
    copy_async_part<Bytes>(to, from, valid ? Bytes : 0);
}
inline void copy_commit() {}
template <int Pending> void copy_wait() {}
inline void copy_wait_all() {}
inline float power_of_two(float x) { return std::exp2(x); }
inline void store_shared(unsigned to, uint4 v) { std::memcpy(emulation::shared + to, &v, 16); }
inline void store_shared_part(unsigned to, unsigned v)
{
    if (to % 4) __builtin_trap();
    std::memcpy(emulation::shared + to, &v, 4);
}
inline void multiply_add_bytes(
    int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, signed char)
{
    emulation::multiply_add_bytes(d, a, b0, b1, true);
}
inline void multiply_add_bytes(
    int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, unsigned char)
{
    emulation::multiply_add_bytes(d, a, b0, b1, false);
}
inline void load_matrices(unsigned (&r)[4], unsigned address)
{
    emulation::load_matrices(r, address, false);
}
inline void load_matrices_transposed(unsigned (&r)[4], unsigned address)
{
    emulation::load_matrices(r, address, true);
}
inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    emulation::multiply_add(d, a, b0, b1, false);
}
inline void multiply_add_brain(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    emulation::multiply_add(d, a, b0, b1, true);
}
// To nearest, halves away from zero, as the device does; infinity and NaN stay what they are.
inline unsigned rounded_to_tf32(float x)
{
    unsigned bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : bits + 0x1000u & ~0x1fffu;
}
inline void multiply_add_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1)
{
    emulation::multiply_add_tf32(d, a, b0, b1);
}
} // namespace tiles
