// The end of a product of bytes: eight sums become results.
//
//   real   = (sum + offset[column]) * scale[column] + bias[column]
//   output = quantize(act2(requantize(act1(real)) + residual)), each part of it where there is one
//
// `offset` holds what the zero point of the activations adds: minus the zero point times the sum of
// a column of weights. The zero point of dynamically quantized activations is known only when the
// step runs; then `weight_sums` holds these sums.
#pragma once
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
    float between_inverse, between_scale, between_zero, between_low, between_high;
    float residual_scale, residual_zero;
    float out_inverse, out_zero, out_low, out_high;
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
};

// Where eight columns of one row are.
struct BytePlace {
    int count; // columns that exist; may be more than eight
    int vectors; // bits: output, residual may be moved at once
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

// The nearest integer, halves to even, within the bounds of a byte.
__device__ __forceinline__ float nearest(float v, float zero, float low, float high)
{ return number::between(rintf(v) + zero, low, high); }

template <class R>
__device__ __forceinline__ void add_bytes(
    const ByteEnd& e, const BytePlace& at, float (&v)[8])
{
    const R* from = (const R*)e.residual + at.residual;
    Pack<R, 8> raw = {};
    if (at.count >= 8 && (at.vectors & 2)) {
        raw = load_pack<R, 8>(from);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (j < at.count) raw.v[j] = load_one(from + j * at.residual_column);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
        v[j] += ((float)computed(raw.v[j]) - e.residual_zero) * e.residual_scale;
}

// The parameters of eight columns, which all rows share.
struct ByteColumns {
    int offset[8];
    float scale[8], bias[8];

    template <class E>
    static __device__ __forceinline__ ByteColumns of(const ByteEnd& e, int column, int count)
    {
        int zero = e.zero ? (int)load_one((const typename E::T*)e.zero) : 0;
        float factor = e.factor ? load_one(e.factor) : 1.f;
        ByteColumns r;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            int c = column + min(j, count - 1);
            r.offset[j] = e.offset ? __ldg(e.offset + c) : 0;
            if (e.zero) r.offset[j] -= zero * __ldg(e.weight_sums + c);
            r.scale[j] = e.scale ? __ldg(e.scale + c) * factor : 1.f;
            r.bias[j] = e.bias ? __ldg(e.bias + c) : 0.f;
        }
        return r;
    }
};

template <class E>
__device__ __forceinline__ void end_of_bytes(
    const ByteEnd& e, const ByteColumns& columns, const BytePlace& at, int (&s)[8])
{
    using Out = typename E::Out;
    Pack<Out, 8> result;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        s[j] += columns.offset[j];
        v[j] = (float)s[j] * columns.scale[j] + columns.bias[j];
    }
    if constexpr (IsSum<Out>::kValue) {
#pragma unroll
        for (int j = 0; j < 8; ++j) result.v[j] = s[j];
    } else {
        Epilogue act1 = {E::kAct1, e.first, e.second}, act2 = {E::kAct2, e.third, e.fourth};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = act1.of(v[j]);
            if constexpr (E::kBetween) {
                float q = nearest(
                    v[j] * e.between_inverse, e.between_zero, e.between_low, e.between_high);
                v[j] = (q - e.between_zero) * e.between_scale;
            }
        }
        if constexpr (E::kAdds) add_bytes<typename E::Residual>(e, at, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = act2.of(v[j]);
            if constexpr (sizeof(Out) == 1)
                result.v[j] =
                    (Out)(int)nearest(v[j] * e.out_inverse, e.out_zero, e.out_low, e.out_high);
            else
                result.v[j] = Stored<Out>::of(v[j]);
        }
    }
    Out* to = (Out*)e.output + at.output;
    if (at.count >= 8 && (at.vectors & 1)) return store_pack<Out, 8>(to, result);
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < at.count) to[j * at.out_column] = result.v[j];
}

} // namespace tiles
