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

// What is added to the results of a thread. It is most of what a short product reads, and little of
// it is in flight if it is asked for only when the sums are known. Bytes are loaded a tile ahead;
// halves, which take twice the registers, with the first stage.
template <class C, class E, bool Loaded>
struct HopperByteResidual {
    static constexpr int kRows = C::kRows * 2, kGroups = C::kColumns / 32;
    ByteResidual<E> v[Loaded ? kRows : 1][Loaded ? kGroups : 1];
};

// How bytes are multiplied; see `HopperMethod`.
template <class C, class E>
struct HopperBytesMethod {
    static constexpr int kRows = C::kRows * 2, kGroups = C::kColumns / 32;
    static constexpr bool kAhead = E::kAdds && sizeof(typename E::Residual) == 1;
    static constexpr bool kBefore = E::kAdds && !kAhead;
    using Ahead = HopperByteResidual<C, E, kAhead>;
    struct Sums : HopperByteSums<C> {
        HopperByteResidual<C, E, kBefore> before;
    };
    const ByteEnd& end;
    int vectors;

    static __device__ __forceinline__ int row(const ThreadPlace<C>& p, int i)
    { return p.m + i / 2 * 64 + i % 2 * 8; }
    __device__ __forceinline__ BytePlace place(const ConvArgs& a, int row, int n) const
    {
        return {a.out_c - n, vectors, row * a.out_stride + n, 1, row * a.residual_stride + n, 1};
    }
    // Nothing of a tile that does not exist.
    template <bool Loaded>
    __device__ __forceinline__ void load(const ConvArgs& a, const OutputTile<C>& t,
        HopperByteResidual<C, E, Loaded>& residual) const
    {
        if constexpr (Loaded) {
            ThreadPlace<C> p(t);
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int i = 0; i < kRows; ++i) {
                    int n = p.n + g * 32;
                    if (n < a.out_c && row(p, i) < a.rows)
                        residual.v[i][g] = load_residual<E>(end, place(a, row(p, i), n));
                }
        }
    }

    __device__ __forceinline__ Ahead ahead(const ConvArgs& a, const OutputTile<C>& t) const
    {
        Ahead r;
        load(a, t, r);
        return r;
    }
    __device__ __forceinline__ void begin(
        const ConvArgs& a, const OutputTile<C>& t, Sums& sums) const
    {
        ThreadPlace<C> p(t);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            int n = p.n + g * 32, offset[8] = {};
            if (n < a.out_c) load_offsets<E>(end, n, a.out_c - n, vectors, offset);
#pragma unroll
            for (int i = 0; i < C::kRows; ++i)
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                    int& sum = sums.v[i][g * 16 + j];
                    sum = offset[j / 4 * 2 + j % 2];
                    // In a register of its own from here on: copies made between the first
                    // products would wait for them.
                    asm volatile("" : "+r"(sum));
                }
        }
        load(a, t, sums.before);
    }
    __device__ __forceinline__ void issue(Sums& sums, int i, u64 x, u64 w) const
    { ByteProducts<C::kColumns, typename E::T>::issue(sums.v[i], x, w); }
    static __device__ __forceinline__ const ByteResidual<E>& residual(
        const Sums& sums, const Ahead& ahead, int i, int g)
    {
        if constexpr (kAhead) return ahead.v[i][g];
        else return sums.before.v[kBefore ? i : 0][kBefore ? g : 0];
    }
    __device__ __forceinline__ void emit(
        const ConvArgs& a, const OutputTile<C>& t, const Sums& sums, const Ahead& ahead) const
    {
        ThreadPlace<C> p(t);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            int n = p.n + g * 32;
            if (n >= a.out_c) break;
            ByteColumns columns(end, n, a.out_c - n, vectors);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                if (row(p, i) >= a.rows) break;
                int s[8];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    s[j] = sums.v[i / 2][g * 16 + j / 2 * 4 + i % 2 * 2 + j % 2];
                end_of_bytes<E>(
                    end, columns, place(a, row(p, i), n), s, residual(sums, ahead, i, g));
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
