// Numbers of any stored type: conversion to the computed type and back, the ONNX functions on them,
// and loops over strided operands (`StridedLoop`). Floating-point numbers of 16 and 32 bits are
// computed in single precision, all others in their own type.
//
// Compiling <cuda_bf16.h> takes as long as all of this, so only kernels that define TILES_BF16
// include it.
#pragma once
#include "base.cuh"
#ifdef TILES_BF16
#include <cuda_bf16.h>
#endif

namespace tiles {

// ---- stored and computed ------------------------------------------------------------------------

template <class T>
struct Computed {
    using Type = T;
};
template <>
struct Computed<half> {
    using Type = float;
};
#ifdef TILES_BF16
template <>
struct Computed<__nv_bfloat16> {
    using Type = float;
};
#endif

template <class T>
__device__ __forceinline__ T computed(T v)
{ return v; }
__device__ __forceinline__ float computed(half v) { return __half2float(v); }
#ifdef TILES_BF16
__device__ __forceinline__ float computed(__nv_bfloat16 v) { return __bfloat162float(v); }
#endif

// Conversion between computed types: numbers are true when they are not zero; floating-point
// numbers lose their fraction and then, in a narrow integer, the upper bits, as in numpy.
template <class To>
struct Convert {
    template <class From>
    static __device__ __forceinline__ To of(From v)
    { return (To)v; }
    static __device__ __forceinline__ To of(float v) { return sizeof(To) < 4 ? (To)(int)v : (To)v; }
    static __device__ __forceinline__ To of(double v)
    { return sizeof(To) < 4 ? (To)(int)v : (To)v; }
};
template <>
struct Convert<bool> {
    template <class From>
    static __device__ __forceinline__ bool of(From v)
    { return v != From(0); }
};
template <>
struct Convert<float> {
    template <class From>
    static __device__ __forceinline__ float of(From v)
    { return (float)v; }
};
template <>
struct Convert<double> {
    template <class From>
    static __device__ __forceinline__ double of(From v)
    { return (double)v; }
};

// The stored form of a computed value of the same kind.
template <class T>
struct Stored {
    template <class C>
    static __device__ __forceinline__ T of(C v)
    { return (T)v; }
};
template <>
struct Stored<half> {
    static __device__ __forceinline__ half of(float v) { return __float2half_rn(v); }
};
#ifdef TILES_BF16
template <>
struct Stored<__nv_bfloat16> {
    static __device__ __forceinline__ __nv_bfloat16 of(float v) { return __float2bfloat16_rn(v); }
};
#endif

// ---- memory -------------------------------------------------------------------------------------

// Adjacent elements, moved at most 16 bytes at a time.
template <class T, int Count>
struct alignas(sizeof(T) * Count < 16 ? sizeof(T) * Count : 16) Pack {
    T v[Count];
};

// Everything is read past L1: see load_activations.
template <class T>
__device__ __forceinline__ T load_one(const T* p)
{ return __ldcg(p); }

template <class T, int Count>
__device__ __forceinline__ Pack<T, Count> load_pack(const T* p)
{
    constexpr int kBytes = (int)sizeof(T) * Count;
    Pack<T, Count> r;
    if constexpr (kBytes >= 16) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) ((uint4*)&r)[i] = __ldcg((const uint4*)p + i);
    } else if constexpr (kBytes == 8) {
        *(uint2*)&r = __ldcg((const uint2*)p);
    } else if constexpr (kBytes == 4) {
        *(u32*)&r = __ldcg((const u32*)p);
    } else {
#pragma unroll
        for (int i = 0; i < Count; ++i) r.v[i] = __ldcg(p + i);
    }
    return r;
}

template <class T, int Count>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, Count>& r)
{
    constexpr int kBytes = (int)sizeof(T) * Count;
    if constexpr (kBytes >= 16) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i) ((uint4*)p)[i] = ((const uint4*)&r)[i];
    } else {
        *(Pack<T, Count>*)p = r;
    }
}

// Nested loops over several operands: maps the number of an iteration to an offset into each
// operand. Dimensions are ordered from the slowest to the fastest; the first needs no division.
template <int Rank, int Operands>
struct StridedLoop {
    FastDiv by[Rank];
    int stride[Operands][Rank];

    __device__ __forceinline__ void offsets(int n, int (&to)[Operands]) const
    {
#pragma unroll
        for (int i = 0; i < Operands; ++i) to[i] = 0;
#pragma unroll
        for (int d = Rank - 1; d >= 0; --d) {
            int at = n;
            if (d > 0) n = by[d].split(n, at);
#pragma unroll
            for (int i = 0; i < Operands; ++i) to[i] += at * stride[i][d];
        }
    }
    __device__ __forceinline__ int offset(int n) const
    {
        int to[Operands];
        offsets(n, to);
        return to[0];
    }
};

// ---- functions ----------------------------------------------------------------------------------

namespace number {

#define TILES_MATH(name, single, twice) \
    __device__ __forceinline__ float name(float x) { return ::single(x); } \
    __device__ __forceinline__ double name(double x) { return ::twice(x); }
TILES_MATH(acos, acosf, acos)
TILES_MATH(acosh, acoshf, acosh)
TILES_MATH(asin, asinf, asin)
TILES_MATH(asinh, asinhf, asinh)
TILES_MATH(atan, atanf, atan)
TILES_MATH(atanh, atanhf, atanh)
TILES_MATH(ceil, ceilf, ceil)
TILES_MATH(cos, cosf, cos)
TILES_MATH(cosh, coshf, cosh)
TILES_MATH(erf, erff, erf)
TILES_MATH(exp, expf, exp)
TILES_MATH(expm1, expm1f, expm1)
TILES_MATH(floor, floorf, floor)
TILES_MATH(log, logf, log)
TILES_MATH(log1p, log1pf, log1p)
TILES_MATH(round, rintf, rint)
TILES_MATH(sin, sinf, sin)
TILES_MATH(sinh, sinhf, sinh)
TILES_MATH(sqrt, sqrtf, sqrt)
TILES_MATH(tan, tanf, tan)
TILES_MATH(tanh, tanhf, tanh)
#undef TILES_MATH

__device__ __forceinline__ float remainder(float a, float b) { return ::fmodf(a, b); }
__device__ __forceinline__ double remainder(double a, double b) { return ::fmod(a, b); }
__device__ __forceinline__ float power(float a, float b) { return ::powf(a, b); }
__device__ __forceinline__ double power(double a, double b) { return ::pow(a, b); }

template <class T>
__device__ __forceinline__ T abs(T x)
{ return x < T(0) ? (T)(T(0) - x) : x; }
__device__ __forceinline__ float abs(float x) { return ::fabsf(x); }
__device__ __forceinline__ double abs(double x) { return ::fabs(x); }
template <class T>
__device__ __forceinline__ T sign(T x)
{ return x > T(0) ? T(1) : x < T(0) ? (T)(T(0) - T(1)) : x; }
template <class T>
__device__ __forceinline__ T relu(T x)
{ return x < T(0) ? T(0) : x; }
// NaN if either is.
template <class T>
__device__ __forceinline__ T larger(T a, T b)
{ return a > b || a != a ? a : b; }
template <class T>
__device__ __forceinline__ T smaller(T a, T b)
{ return a < b || a != a ? a : b; }
// NaN is kept.
template <class T>
__device__ __forceinline__ T at_least(T x, T low)
{ return x < low ? low : x; }
template <class T>
__device__ __forceinline__ T at_most(T x, T high)
{ return x > high ? high : x; }
template <class T>
__device__ __forceinline__ T between(T x, T low, T high)
{ return at_most(at_least(x, low), high); }

template <class T>
__device__ __forceinline__ T sigmoid(T x)
{ return T(1) / (T(1) + exp(-x)); }
template <class T>
__device__ __forceinline__ T silu(T x, T alpha)
{ return x / (T(1) + exp(-alpha * x)); }
template <class T>
__device__ __forceinline__ T gelu(T x)
{ return T(0.5) * x * (T(1) + erf(x * T(0.70710678118654752))); }
template <class T>
__device__ __forceinline__ T gelu_tanh(T x)
{ return T(0.5) * x * (T(1) + tanh(T(0.79788456080286536) * (x + T(0.044715) * x * x * x))); }
template <class T>
__device__ __forceinline__ T hard_sigmoid(T x, T alpha, T beta)
{ return between(alpha * x + beta, T(0), T(1)); }
template <class T>
__device__ __forceinline__ T hard_swish(T x)
{ return x * hard_sigmoid(x, T(1) / T(6), T(0.5)); }
template <class T>
__device__ __forceinline__ T softplus(T x)
{ return at_least(x, T(0)) + log1p(exp(-abs(x))); }
template <class T>
__device__ __forceinline__ T softsign(T x)
{ return x / (T(1) + abs(x)); }
template <class T>
__device__ __forceinline__ T mish(T x)
{ return x * tanh(softplus(x)); }
template <class T>
__device__ __forceinline__ T celu(T x, T alpha)
{ return x < T(0) ? alpha * expm1(x / alpha) : x; }
template <class T>
__device__ __forceinline__ T elu(T x, T alpha)
{ return x < T(0) ? alpha * expm1(x) : x; }
template <class T>
__device__ __forceinline__ T selu(T x, T alpha, T gamma)
{ return gamma * (x > T(0) ? x : alpha * expm1(x)); }
template <class T>
__device__ __forceinline__ T leaky_relu(T x, T alpha)
{ return x < T(0) ? (T)(alpha * x) : x; }
template <class T>
__device__ __forceinline__ T shrink(T x, T bias, T lambda)
{ return x < -lambda ? x + bias : x > lambda ? x - bias : T(0); }
template <class T>
__device__ __forceinline__ T thresholded_relu(T x, T alpha)
{ return x > alpha ? x : T(0); }
template <class T>
__device__ __forceinline__ bool is_infinite(T x, bool positive, bool negative)
{
    bool infinite = x == x && x - x != x - x;
    return infinite && (x > T(0) ? positive : negative);
}

// Integers. A division by zero gives some value instead of a fault: a lane that is not stored may
// hold anything.
template <class T>
__device__ __forceinline__ T quotient(T a, T b)
{
    if (b == T(0)) return T(0);
    if (T(-1) < T(0) && b == T(-1)) return (T)(T(0) - a);
    return (T)(a / b);
}
__device__ __forceinline__ float quotient(float a, float b) { return a / b; }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }
template <class T>
__device__ __forceinline__ T remainder(T a, T b)
{
    if (b == T(0) || (T(-1) < T(0) && b == T(-1))) return T(0);
    return (T)(a % b);
}
// With the divisor's sign.
template <class T>
__device__ __forceinline__ T modulo(T a, T b)
{
    T rest = remainder(a, b);
    return rest != T(0) && (rest < T(0)) != (b < T(0)) ? (T)(rest + b) : rest;
}
// The result is zero when all bits are shifted out.
template <class T>
__device__ __forceinline__ T shift_left(T a, T b)
{ return (unsigned long long)b < sizeof(T) * 8 ? (T)((u64)a << b) : T(0); }
template <class T>
__device__ __forceinline__ T shift_right(T a, T b)
{ return (unsigned long long)b < sizeof(T) * 8 ? (T)(a >> b) : T(0); }
// By repeated squaring, with wrap-around; an inverse truncates.
template <class T>
__device__ __forceinline__ T integer_power(T base, long long exponent)
{
    if (exponent < 0)
        return base == T(1) ? T(1) : base == T(-1) ? (exponent & 1 ? base : T(1)) : T(0);
    u64 result = 1, square = (u64)(long long)base;
    for (; exponent; exponent >>= 1, square *= square)
        if (exponent & 1) result *= square;
    return (T)result;
}

} // namespace number

// A function fused into the end of a product or a normalization; the numbers are those of
// model::op::Activation in declaration order. The two parameters are its fields.
struct Epilogue {
    int kind;
    float first, second;

    __device__ __forceinline__ float of(float x) const
    {
        switch (kind) {
        case 1: return number::relu(x);
        case 2: return number::leaky_relu(x, first);
        case 3: return number::between(x, first, second);
        case 4: return number::sigmoid(x);
        case 5: return number::tanh(x);
        case 6: return number::silu(x, 1.f);
        case 7: return number::gelu(x);
        case 8: return number::gelu_tanh(x);
        case 9: return number::hard_swish(x);
        case 10: return number::hard_sigmoid(x, first, second);
        default: return x;
        }
    }
};

} // namespace tiles
