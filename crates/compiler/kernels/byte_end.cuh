// The end of a product of bytes: eight sums become results.
//
//   real   = (sum + offset[column]) * scale[column] + bias[column]
//   output = quantize(act2(requantize(act1(real)) + residual)), each part of it where there is one
//
// `offset` holds what the zero point of the activations adds: minus the zero point times the sum of
// a column of weights. The zero point of dynamically quantized activations is known only when the
// step runs; then `weight_sums` holds these sums.
#pragma once
#include "base.cuh"
#include "number.cuh"

namespace tiles {

struct ByteEnd {
    const int* offset; // or null
    const float* scale; // or null: one
    const float* bias; // or null
    const int* weight_sums; // with `zero`, or null
    const void* zero; // the zero point of the activations, if it is known only now
    const float* factor; // of every scale, if it is known only now
    const void* residual; // or null
    void* output;
    float first, second, third, fourth; // of the first and of the second activation
    // Bounds are distances from the zero point.
    float between_inverse, between_scale, between_low, between_high;
    float residual_scale, residual_zero;
    float out_inverse;
    int out_zero;
};

// What of it is known at compile time. `T`: the activations; `Act1`, `Between`, `Adds`, `Act2`: the
// activation function of the product, whether it is quantized then, whether a residual is added,
// and the function of that sum. Results are quantized if `Out` is a byte, and plain sums if it is
// an int.
template <class T_, class Residual_, class Out_, int Act1, bool Between, bool Adds, int Act2>
struct ByteEnding {
    using T = T_;
    using Residual = Residual_;
    using Out = Out_;
    static constexpr int kAct1 = Act1, kAct2 = Act2;
    static constexpr bool kBetween = Between, kAdds = Adds;
    // Relu is the last of it.
    static constexpr bool kPositive = Act2 == 1 || (Act2 == 0 && !Adds && Act1 == 1);
};

// What of a row of the arguments may be moved at once (`vectors`).
enum ByteVectors : int { kOutputAtOnce = 1, kResidualAtOnce = 2, kColumnsAtOnce = 4 };

// Where eight columns of one row are.
struct BytePlace {
    int count; // columns that exist; may be more than eight
    int vectors; // of `ByteVectors`
    int output, out_column; // offset and stride
    int residual, residual_column;
};

template <class Out>
struct IsSum {
    static constexpr bool kValue = false;
};
template <>
struct IsSum<int> {
    static constexpr bool kValue = true;
};

// An integer between -2^22 and 2^22 plus this is a float whose bits end in the integer's: adding it
// rounds to the nearest integer, halves to even, without the slow units for conversions.
constexpr float kRounds = 12582912.f; // 3 * 2^22
constexpr int kRoundsBits = 0x4b400000;

// The nearest integer within bounds that are integers themselves.
__device__ __forceinline__ float nearest(float v, float low, float high)
{ return number::between(v, low, high) + kRounds - kRounds; }

// Epilogue::of, with the formulas of base.cuh where they take fewer instructions.
template <int Kind>
__device__ __forceinline__ float activated(float x, float first, float second)
{
    if constexpr (Kind == 4) return activate(x, kSigmoid);
    else if constexpr (Kind == 6) return activate(x, kSilu);
    else if constexpr (Kind == 7) return activate(x, kGelu);
    else if constexpr (Kind == 8) return activate(x, kGeluTanh);
    else return Epilogue{Kind, first, second}.of(x);
}

// Four integers as bytes, those beyond the bounds of a byte as the bounds.
template <class Out>
__device__ __forceinline__ u32 saturated(int a, int b, int c, int d)
{
#ifdef TILES_EMULATED
    int v[4] = {a, b, c, d};
    u32 r = 0;
    int low = (Out)-1 < 0 ? -128 : 0, high = low + 255;
    for (int i = 0; i < 4; ++i) r |= (u32)(unsigned char)min(max(v[i], low), high) << i * 8;
    return r;
#else
    u32 r;
    if constexpr ((Out)-1 < 0)
        asm("{.reg .u32 t; cvt.pack.sat.s8.s32.b32 t, %4, %3, 0;"
            " cvt.pack.sat.s8.s32.b32 %0, %2, %1, t;}"
            : "=r"(r)
            : "r"(a), "r"(b), "r"(c), "r"(d));
    else
        asm("{.reg .u32 t; cvt.pack.sat.u8.s32.b32 t, %4, %3, 0;"
            " cvt.pack.sat.u8.s32.b32 %0, %2, %1, t;}"
            : "=r"(r)
            : "r"(a), "r"(b), "r"(c), "r"(d));
    return r;
#endif
}

// Eight numbers as bytes.
template <class E>
__device__ __forceinline__ Pack<typename E::Out, 8> quantized(const ByteEnd& e, const float (&v)[8])
{
    int q[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float scaled = v[j] * e.out_inverse;
        // Large positive numbers have bits beyond all bytes, negative ones do not.
        if constexpr (!E::kPositive) scaled = fmaxf(scaled, -4194304.f);
        q[j] = (int)__float_as_uint(scaled + kRounds) + (e.out_zero - kRoundsBits);
    }
    Pack<typename E::Out, 8> result;
    u32* words = (u32*)&result;
    words[0] = saturated<typename E::Out>(q[0], q[1], q[2], q[3]);
    words[1] = saturated<typename E::Out>(q[4], q[5], q[6], q[7]);
    return result;
}

template <class T>
__device__ __forceinline__ void load_columns(const T* from, int count, bool at_once, T (&v)[8])
{
    if (at_once && count >= 8) {
        *(uint4*)v = __ldg((const uint4*)from);
        *(uint4*)(v + 4) = __ldg((const uint4*)from + 1);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldg(from + min(j, count - 1));
    }
}

// What is added to the sums of eight columns.
template <class E>
__device__ __forceinline__ void load_offsets(
    const ByteEnd& e, int column, int count, int vectors, int (&v)[8])
{
    bool at_once = vectors & kColumnsAtOnce;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = 0;
    if (e.offset) load_columns(e.offset + column, count, at_once, v);
    if (e.zero) {
        int zero = (int)load_one((const typename E::T*)e.zero), sums[8];
        load_columns(e.weight_sums + column, count, at_once, sums);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] -= zero * sums[j];
    }
}

// The other parameters of eight columns, which all rows share.
struct ByteColumns {
    float scale[8], bias[8];

    __device__ __forceinline__ ByteColumns(const ByteEnd& e, int column, int count, int vectors)
    {
        bool at_once = vectors & kColumnsAtOnce;
#pragma unroll
        for (int j = 0; j < 8; ++j) scale[j] = 1.f, bias[j] = 0.f;
        if (e.scale) load_columns(e.scale + column, count, at_once, scale);
        if (e.bias) load_columns(e.bias + column, count, at_once, bias);
        if (!e.factor) return;
        float factor = load_one(e.factor);
#pragma unroll
        for (int j = 0; j < 8; ++j) scale[j] *= factor;
    }
};

// What is added to eight columns of a row, in words: bytes would take a register each.
template <class E>
using ByteResidual = Pack<u32, (int)sizeof(typename E::Residual) * 2>;

template <class E>
__device__ __forceinline__ ByteResidual<E> load_residual(const ByteEnd& e, const BytePlace& at)
{
    using R = typename E::Residual;
    const R* from = (const R*)e.residual + at.residual;
    constexpr int kWords = (int)sizeof(R) * 2;
    if (at.count >= 8 && (at.vectors & kResidualAtOnce))
        return load_pack<u32, kWords>((const u32*)from);
    Pack<R, 8> raw = {};
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < at.count) raw.v[j] = load_one(from + j * at.residual_column);
    return *(const ByteResidual<E>*)&raw;
}

// Sums, offsets included, become results.
template <class E>
__device__ __forceinline__ void end_of_bytes(const ByteEnd& e, const ByteColumns& columns,
    const BytePlace& at, const int (&s)[8], const ByteResidual<E>& residual)
{
    using Out = typename E::Out;
    Pack<Out, 8> result;
    if constexpr (IsSum<Out>::kValue) {
#pragma unroll
        for (int j = 0; j < 8; ++j) result.v[j] = s[j];
    } else {
        const Pack<typename E::Residual, 8>& added =
            *(const Pack<typename E::Residual, 8>*)&residual;
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = (float)s[j] * columns.scale[j] + columns.bias[j];
            v[j] = activated<E::kAct1>(v[j], e.first, e.second);
            if constexpr (E::kBetween)
                v[j] = nearest(v[j] * e.between_inverse, e.between_low, e.between_high) *
                       e.between_scale;
            if constexpr (E::kAdds)
                v[j] += ((float)computed(added.v[j]) - e.residual_zero) * e.residual_scale;
            v[j] = activated<E::kAct2>(v[j], e.third, e.fourth);
        }
        if constexpr (sizeof(Out) == 1) {
            result = quantized<E>(e, v);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) result.v[j] = Stored<Out>::of(v[j]);
        }
    }
    Out* to = (Out*)e.output + at.output;
    if (at.count >= 8 && (at.vectors & kOutputAtOnce)) return store_pack<Out, 8>(to, result);
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < at.count) to[j * at.out_column] = result.v[j];
}

} // namespace tiles
