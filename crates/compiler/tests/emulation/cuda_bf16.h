// Emulates CUDA's header: see cuda_fp16.h.
#pragma once
#include "cuda_fp16.h"

struct __nv_bfloat16 { uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16 v) { return __int_as_float((unsigned)v.bits << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f)
{
    unsigned v = __float_as_uint(f);
    if (f != f) return {0x7fc0};
    return {(uint16_t)(v + 0x7fff + (v >> 16 & 1) >> 16)};
}
