// Products of bytes on tensor cores, 32-bit sums: quantized matrix products and convolutions.
//
//   output(part, row, column) =
//     end(sum over depth of a(part, row, depth) * b(part, depth, column))
//
// `a` is signed or unsigned, with one zero point; `b` is a packed weight, signed, with zero point
// zero. What lies outside an image is filled with the zero point. byte_end.cuh has the end.
//
// An operand in shared memory is addressed in bytes, and the fragments of a k32 step of bytes are
// laid out as those of a k16 step of halves. So stages, their swizzle and ldmatrix are those of
// tensor.cuh, with BK halves for 2 * BK bytes of depth.
#pragma once
#include "byte_end.cuh"
#include "tensor.cuh"

namespace tiles {

template <int PartRank, int RowRank, int DepthRank, int Axes>
struct BytesArgs {
    const void* a;
    const signed char* b;
    ByteEnd end;
    float* workspace; // kWorkspace: WK * BM * (BN + 8) sums per tile
    u32* arrivals; // kWorkspace: one word per output tile, zero before a launch and after it
    int rows, columns, depth;
    int splits, reduce;
    int a_shift, out_shift; // from the address to the element of the first position; signed
    int b_column, out_column, residual_column;
    int vectors; // of `ByteVectors`
    u32 fill; // four bytes from outside the image
    FastDiv by_splits, by_columns, by_rows; // tiles
    StridedLoop<PartRank, 5 + Axes> part; // a, b, column parameters, output, residual; not used
    StridedLoop<RowRank, 4 + Axes> row; // a, not used, output, residual; the image
    StridedLoop<DepthRank, 2 + Axes> inner; // a, b; the image
    TensorImage<Axes> image;
};

// What of a product is known at compile time. `Fill`: whether positions outside the image hold
// another byte than zero.
template <class End_, int PartRank, int RowRank, int DepthRank, int Axes, int AVec, bool Fill>
struct BytesProblem {
    using End = End_;
    using T = typename End::T;
    using Args = BytesArgs<PartRank, RowRank, DepthRank, Axes>;
    static constexpr int kAxes = Axes, kAVec = AVec, kBVec = 16;
    static constexpr bool kConstant = true, kFill = Fill;
};

#ifndef TILES_EMULATED
__device__ __forceinline__ void multiply_add_bytes(
    int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, signed char)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add_bytes(
    int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, unsigned char)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void store_shared_part(u32 to, u32 v)
{ asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
#endif

// Sixteen bytes of a chunk, `Vec` at a time. Where `inside(j)` is false and `Fill` is true, piece j
// is made of `fill`; elsewhere of `count(j)` bytes from memory, then zeros.
template <int Vec, bool Fill, class From, class Count, class Inside>
__device__ __forceinline__ void copy_bytes(u32 to, const unsigned char* base, u32 fill,
    const From& from, const Count& count, const Inside& inside)
{
    if constexpr (Vec > 1) {
#pragma unroll
        for (int j = 0; j < 16 / Vec; ++j) {
            if (Fill && !inside(j)) {
#pragma unroll
                for (int i = 0; i < Vec / 4; ++i) store_shared_part(to + j * Vec + i * 4, fill);
                continue;
            }
            int bytes = max(min(count(j), Vec), 0);
            copy_async_part<Vec>(to + j * Vec, bytes > 0 ? base + from(j) : base, bytes);
        }
    } else {
        Pack<unsigned char, 16> v;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            unsigned char outside = Fill && !inside(j) ? (unsigned char)fill : 0;
            v.v[j] = count(j) > 0 ? load_one(base + from(j)) : outside;
        }
        store_shared(to, *(const uint4*)&v);
    }
}

// Copies of one operand, adjacent along the depth.
template <class C, class P, bool IsA>
struct BytesLoader {
    static constexpr int kEdge = IsA ? C::BM : C::BN, kVec = IsA ? P::kAVec : P::kBVec;
    static constexpr bool kFill = IsA && P::kFill;
    using S = Share<C, kEdge, 8>;
    const unsigned char* base;
    TensorEdge<P, IsA> edge[S::kPasses];
    int depth;
    u32 slot;

    template <class Place>
    __device__ __forceinline__ BytesLoader(const typename P::Args& a, const Place& p)
    {
        base = IsA ? (const unsigned char*)a.a + p.part[0] + a.a_shift
                   : (const unsigned char*)a.b + p.part[1];
        depth = p.first * C::BK * 2 + S::chunk() * 16;
        slot = S::slot() + (IsA ? 0 : C::BM * C::BK * 2);
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i)
            edge[i] = TensorEdge<P, IsA>(a, (IsA ? p.m : p.n) + S::row() + i * S::kRows);
    }
    __device__ __forceinline__ void load(const typename P::Args& a, u32 stage)
    {
        TensorDepth<P, IsA> k[16 / kVec];
#pragma unroll
        for (int j = 0; j < 16 / kVec; ++j) k[j] = TensorDepth<P, IsA>(a, depth + j * kVec);
        u32 fill = 0;
        if constexpr (kFill) fill = a.fill;
#pragma unroll
        for (int i = 0; i < S::kPasses; ++i)
            copy_bytes<kVec, kFill>(
                stage + slot + i * S::kPassBytes, base, fill,
                [&](int j) { return edge[i].offset + k[j].offset; },
                [&](int j) { return k[j].meets(a, edge[i]) ? k[j].left : 0; },
                [&](int j) { return k[j].meets(a, edge[i]); });
        depth += C::BK * 2;
    }
};

template <class C>
struct ByteSums {
    int v[C::kFragM][C::kFragN][4];
};

template <class C, class P>
struct BytesStage {
    TensorFragments<C, true, true> a;
    TensorFragments<C, false, true> b;

    __device__ __forceinline__ void load(Fragments<C>& f, u32 stage, int step) const
    {
#pragma unroll
        for (int i = 0; i < C::kFragM; ++i) a.load(f.x[i], stage, i, step);
#pragma unroll
        for (int j = 0; j < C::kFragN / 2; ++j) b.load(f.w[j], stage, j, step);
    }
    static __device__ __forceinline__ void multiply(const Fragments<C>& f, ByteSums<C>& acc)
    {
#pragma unroll
        for (int i = 0; i < C::kFragM; ++i)
#pragma unroll
            for (int j = 0; j < C::kFragN; ++j)
                multiply_add_bytes(acc.v[i][j], f.x[i], f.w[j / 2][j % 2 * 2],
                    f.w[j / 2][j % 2 * 2 + 1], typename P::T());
    }
    template <class Between>
    __device__ __forceinline__ void run(u32 stage, ByteSums<C>& acc, const Between& between) const
    {
        constexpr int kSteps = C::BK / 16 / C::WK;
        Fragments<C> f[2];
        load(f[0], stage, 0);
        between();
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (i + 1 < kSteps) load(f[(i + 1) % 2], stage, i + 1);
            multiply(f[i % 2], acc);
        }
    }
};

// As `stage_sums` of conv.cuh.
template <class C>
__device__ __forceinline__ void stage_byte_sums(int* staged, const ByteSums<C>& acc)
{
    int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int m = warp % (C::WM * C::WN) / C::WN * C::kWarpM + lane / 4;
    int n = warp % C::WN * C::kWarpN + lane % 4 * 2;
    staged += warp / (C::WM * C::WN) * C::kPart;
#pragma unroll
    for (int i = 0; i < C::kFragM; ++i)
#pragma unroll
        for (int j = 0; j < C::kFragN; ++j) {
            int* at = staged + (m + i * 16) * C::kStaged + n + j * 8;
            *(uint2*)at = make_uint2((u32)acc.v[i][j][0], (u32)acc.v[i][j][1]);
            *(uint2*)(at + 8 * C::kStaged) =
                make_uint2((u32)acc.v[i][j][2], (u32)acc.v[i][j][3]);
        }
}

// As `Parts::sum` of conv.cuh.
__device__ __forceinline__ void sum_of_parts(const Parts& parts, int (&v)[8], int offset)
{
    for (int o = 0; o < parts.outer; ++o) {
        const float* at = parts.block(o) + offset;
#pragma unroll 4
        for (int i = 0; i < parts.inner; ++i) {
            const int* from = (const int*)(at + i * parts.stride);
            int s[8];
#ifdef TILES_EMULATED
            for (int j = 0; j < 8; ++j) s[j] = from[j];
#else
            asm volatile("ld.volatile.v4.s32 {%0,%1,%2,%3}, [%4];"
                : "=r"(s[0]), "=r"(s[1]), "=r"(s[2]), "=r"(s[3])
                : "l"(from));
            asm volatile("ld.volatile.v4.s32 {%0,%1,%2,%3}, [%4];"
                : "=r"(s[4]), "=r"(s[5]), "=r"(s[6]), "=r"(s[7])
                : "l"(from + 4));
#endif
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] += s[j];
        }
    }
}

// How bytes are multiplied; see `TensorMethod`.
template <class C, class P>
struct BytesMethod {
    using Args = typename P::Args;
    using Sums = ByteSums<C>;
    using Rows = BytesLoader<C, P, true>;
    using Columns = BytesLoader<C, P, false>;
    using Stage = BytesStage<C, P>;
    static constexpr int kAxes = P::kAxes, kDepth = C::BK * 2;
    static constexpr bool kConstant = true;

    static __device__ __forceinline__ void stage(unsigned char* shared, const Sums& acc)
    { stage_byte_sums<C>((int*)shared, acc); }
    template <class Place>
    static __device__ __forceinline__ void emit(
        const Args& a, const Place& p, const Parts& parts, int first, int last)
    {
        using End = typename P::End;
        constexpr int kChunks = C::BN / 8;
        static_assert(C::kThreads % kChunks == 0, "a thread always has the same columns");
        int column = threadIdx.x % kChunks * 8, n = p.n + column, count = a.columns - n;
        if (count <= 0) return;
        int offset[8];
        load_offsets<End>(a.end, p.part[2] + n, count, a.vectors, offset);
        ByteColumns columns(a.end, p.part[2] + n, count, a.vectors);
        for (int i = first * kChunks + threadIdx.x; i < last * kChunks; i += C::kThreads) {
            int row = i / kChunks, m = p.m + row, at[4 + P::kAxes];
            if (m >= a.rows) break;
            a.row.offsets(m, at);
            BytePlace to = {count, a.vectors,
                p.part[3] + at[2] + a.out_shift + n * a.out_column, a.out_column,
                p.part[4] + at[3] + n * a.residual_column, a.residual_column};
            ByteResidual<End> residual = {};
            if constexpr (End::kAdds) residual = load_residual<End>(a.end, to);
            int s[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) s[j] = offset[j];
            sum_of_parts(parts, s, row * C::kStaged + column);
            end_of_bytes<End>(a.end, columns, to, s, residual);
        }
    }
};

template <class C, class P>
struct Bytes {
    using Args = typename P::Args;
    using Config = C;
    static constexpr int kThreads = C::kThreads, kShared = C::kShared;
    // Elements that are gathered one by one take more registers than copies.
    static constexpr int kBesides = P::kAVec >= 8 ? 64 : 104;
    static constexpr int kByRegisters =
        65536 / (kThreads * (C::kFragM * C::kFragN * 4 + kBesides));
    static constexpr int kFitting = kByRegisters < C::kBlocks ? kByRegisters : C::kBlocks;
    static constexpr int kBlocks = kFitting < 1 ? 1 : kFitting;
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char* shared,
        YieldPoint& yield_point, const Dependency& dependency)
    { return tensor_tile<C, BytesMethod<C, P>>(a, t, shared, yield_point, dependency); }
};

} // namespace tiles
