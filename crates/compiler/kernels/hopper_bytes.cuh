// Products of bytes on Hopper (sm_90a only): the copies, stages and barriers of hopper.cuh, whose
// halves are pairs of bytes, with the instruction for bytes and the end of byte_end.cuh.
//
// The input has an even number of channels, and what is outside the image is zero: the zero point
// of the activations is zero, or the window never leaves the image.
#pragma once
#include "byte_end.cuh"
#include "hopper.cuh"

namespace tiles {

struct HopperBytesArgs {
    HopperArgs product; // channels and depth are pairs of bytes
    ByteEnd end;
    int vectors; // as in BytesArgs
};

#define TILES_SUMS4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define TILES_SUMS16(i) TILES_SUMS4(i), TILES_SUMS4(i + 4), TILES_SUMS4(i + 8), TILES_SUMS4(i + 12)

// d += a * b: 64 rows, N columns, 32 of depth. Sums are where `Products` has them.
template <int N, class T>
struct ByteProducts;

template <>
struct ByteProducts<64, signed char> {
    static __device__ __forceinline__ void issue(int (&d)[32], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"
                     "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                     "%32, %33, 1;"
            : TILES_SUMS16(0), TILES_SUMS16(16)
            : "l"(a), "l"(b));
    }
};
template <>
struct ByteProducts<64, unsigned char> {
    static __device__ __forceinline__ void issue(int (&d)[32], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"
                     "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                     "%32, %33, 1;"
            : TILES_SUMS16(0), TILES_SUMS16(16)
            : "l"(a), "l"(b));
    }
};
template <>
struct ByteProducts<128, signed char> {
    static __device__ __forceinline__ void issue(int (&d)[64], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"
                     "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
                     "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"
                     "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                     "%64, %65, 1;"
            : TILES_SUMS16(0), TILES_SUMS16(16), TILES_SUMS16(32), TILES_SUMS16(48)
            : "l"(a), "l"(b));
    }
};
template <>
struct ByteProducts<128, unsigned char> {
    static __device__ __forceinline__ void issue(int (&d)[64], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"
                     "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
                     "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"
                     "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                     "%64, %65, 1;"
            : TILES_SUMS16(0), TILES_SUMS16(16), TILES_SUMS16(32), TILES_SUMS16(48)
            : "l"(a), "l"(b));
    }
};
template <>
struct ByteProducts<192, signed char> {
    static __device__ __forceinline__ void issue(int (&d)[96], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n192k32.s32.s8.s8 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"
                     "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
                     "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"
                     "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
                     "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,"
                     "%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95},"
                     "%96, %97, 1;"
            : TILES_SUMS16(0), TILES_SUMS16(16), TILES_SUMS16(32), TILES_SUMS16(48),
              TILES_SUMS16(64), TILES_SUMS16(80)
            : "l"(a), "l"(b));
    }
};
template <>
struct ByteProducts<192, unsigned char> {
    static __device__ __forceinline__ void issue(int (&d)[96], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n192k32.s32.u8.s8 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,"
                     "%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,"
                     "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"
                     "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,"
                     "%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,"
                     "%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95},"
                     "%96, %97, 1;"
            : TILES_SUMS16(0), TILES_SUMS16(16), TILES_SUMS16(32), TILES_SUMS16(48),
              TILES_SUMS16(64), TILES_SUMS16(80)
            : "l"(a), "l"(b));
    }
};

#undef TILES_SUMS16
#undef TILES_SUMS4

template <class C>
struct HopperByteSums {
    int v[C::kRows][C::kColumns / 2];
};

// How bytes are multiplied; see `HopperMethod`.
template <class C, class E>
struct HopperBytesMethod {
    using Sums = HopperByteSums<C>;
    const ByteEnd& end;
    int vectors;

    __device__ __forceinline__ void begin(
        const ConvArgs&, const OutputTile<C>&, Sums& sums) const
    {
#pragma unroll
        for (int i = 0; i < C::kRows; ++i)
#pragma unroll
            for (int j = 0; j < C::kColumns / 2; ++j) sums.v[i][j] = 0;
    }
    __device__ __forceinline__ void issue(Sums& sums, int i, u64 x, u64 w) const
    { ByteProducts<C::kColumns, typename E::T>::issue(sums.v[i], x, w); }
    __device__ __forceinline__ void emit(
        const ConvArgs& a, const OutputTile<C>& t, const Sums& sums) const
    {
        ThreadPlace<C> p(t);
#pragma unroll
        for (int g = 0; g < C::kColumns / 32; ++g) {
            int n = p.n + g * 32, count = a.out_c - n;
            if (count <= 0) break;
            ByteColumns columns = ByteColumns::of<E>(end, n, count);
#pragma unroll
            for (int i = 0; i < C::kRows * 2; ++i) {
                int row = p.m + i / 2 * 64 + i % 2 * 8;
                if (row >= a.rows) break;
                int s[8];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    s[j] = sums.v[i / 2][g * 16 + j / 2 * 4 + i % 2 * 2 + j % 2];
                BytePlace at = {count, vectors, row * a.out_stride + n, 1,
                    row * a.residual_stride + n, 1};
                end_of_bytes<E>(end, columns, at, s);
            }
        }
    }
};

template <class C, class E>
struct HopperBytes {
    using Args = HopperBytesArgs;
    using Config = C;
    static constexpr int kThreads = C::kThreads, kShared = C::kShared, kBlocks = C::kBlocks;
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char* shared,
        YieldPoint& yield_point, const Dependency& dependency)
    {
        HopperBytesMethod<C, E> method = {a.end, a.vectors};
        return hopper_tile<C>(a.product, t, shared, yield_point, dependency, method);
    }
};

} // namespace tiles
