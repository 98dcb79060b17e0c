// Products of single-precision operands on tensor cores: operands are rounded to tf32 (ten bits of
// mantissa), products and sums are single precision. Operands are addressed as in `product.cuh`, so
// all strides, convolutions and transposed convolutions are supported.
#pragma once
#include "product.cuh"

namespace tiles {

#ifndef TILES_EMULATED
__device__ __forceinline__ u32 rounded_to_tf32(float x)
{
    u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ void multiply_add_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Where element `edge` of depth `k` is in a stage whose rows have `Pitch` words. A row is eight
// banks further than the previous one, so the eight rows and four depths that a fragment reads are
// in 32 banks. Exchanging neighbours by depth lets the 16 depths of two rows be written in as many.
template <int Pitch>
__device__ __forceinline__ int staged_at(int k, int edge)
{ return k * Pitch + (edge ^ (k >> 2 & 3) * 2); }

// `WM` x `WN` warps share a tile of BM x BN sums. `TM` and `TN` only say how many threads there
// are: they load as those of `Product` do.
template <int Kind, class A, class B, class Bias, class Out, int GroupRank, int RowRank,
    int DepthRank, int BM, int BN, int TM, int TN, int WM, int WN, bool ADeep, bool BDeep>
struct TensorFloat {
    using Tile = Product<Kind, A, B, Bias, Out, GroupRank, RowRank, DepthRank, BM, BN, TM, TN,
        ADeep, BDeep>;
    using Args = typename Tile::Args;
    static constexpr int kThreads = Tile::kThreads, kShared = 0, kBlocks = 1, BK = Tile::BK;
    static constexpr int kWarpM = BM / WM, kWarpN = BN / WN;
    static constexpr int kFragM = kWarpM / 16, kFragN = kWarpN / 8;
    static constexpr int kPitchA = BM + 8, kPitchB = BN + 8;
    static_assert(kThreads == WM * WN * kWarp, "one warp per part of the tile");
    static_assert(BK == 16 && kPitchA % 32 == 8 && kPitchB % 32 == 8, "banks");

    // Where this thread is in its warp's part of the tile.
    struct Lane {
        int row, depth, m, n;
        __device__ __forceinline__ Lane()
        {
            int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
            row = lane / 4, depth = lane % 4;
            m = warp / WN * kWarpM, n = warp % WN * kWarpN;
        }
    };
    using Sums = float[kFragM][kFragN][4];

    static __device__ __forceinline__ void stage(u32* sa, u32* sb,
        const float (&ra)[Tile::kALoads], const float (&rb)[Tile::kBLoads])
    {
#pragma unroll
        for (int i = 0; i < Tile::kALoads; ++i)
            sa[staged_at<kPitchA>(Tile::template deep<ADeep, BM>(i),
                Tile::template edge<ADeep, BM>(i))] = rounded_to_tf32(ra[i]);
#pragma unroll
        for (int i = 0; i < Tile::kBLoads; ++i)
            sb[staged_at<kPitchB>(Tile::template deep<BDeep, BN>(i),
                Tile::template edge<BDeep, BN>(i))] = rounded_to_tf32(rb[i]);
    }
    static __device__ __forceinline__ void multiply(
        const u32* sa, const u32* sb, const Lane& lane, Sums& sum)
    {
#pragma unroll
        for (int k = 0; k < BK; k += 8) {
            int near = k + lane.depth, far = near + 4;
            u32 x[kFragM][4], y[kFragN][2];
#pragma unroll
            for (int i = 0; i < kFragM; ++i) {
                int m = lane.m + i * 16 + lane.row;
                x[i][0] = sa[staged_at<kPitchA>(near, m)];
                x[i][1] = sa[staged_at<kPitchA>(near, m + 8)];
                x[i][2] = sa[staged_at<kPitchA>(far, m)];
                x[i][3] = sa[staged_at<kPitchA>(far, m + 8)];
            }
#pragma unroll
            for (int j = 0; j < kFragN; ++j) {
                int n = lane.n + j * 8 + lane.row;
                y[j][0] = sb[staged_at<kPitchB>(near, n)];
                y[j][1] = sb[staged_at<kPitchB>(far, n)];
            }
#pragma unroll
            for (int i = 0; i < kFragM; ++i)
#pragma unroll
                for (int j = 0; j < kFragN; ++j)
                    multiply_add_tf32(sum[i][j], x[i], y[j][0], y[j][1]);
        }
    }
    static __device__ __forceinline__ void finish(
        const Args& a, const typename Tile::Place& p, const Lane& lane, const Sums& sum)
    {
#pragma unroll
        for (int i = 0; i < kFragM * 2; ++i) {
            typename Tile::Row r = Tile::row_at(a, p.row + lane.m + i * 8 + lane.row);
#pragma unroll
            for (int j = 0; j < kFragN * 2; ++j) {
                int column = p.column + lane.n + j / 2 * 8 + lane.depth * 2 + j % 2;
                if (r.inside && column < a.columns)
                    Tile::store(a, p.group, r, column, sum[i / 2][j / 2][i % 2 * 2 + j % 2]);
            }
        }
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        __shared__ __align__(16) u32 sa[2][BK * kPitchA], sb[2][BK * kPitchB];
        typename Tile::Place place = Tile::locate(a, t);
        typename Tile::Loader loader(a, place);
        Lane lane;
        float ra[Tile::kALoads], rb[Tile::kBLoads];
        Sums sum = {};
        dependency.wait();
        yield_point.poll_for_block();
        loader.load(0, ra, rb);
        if (yield_point.block_is_preempted()) return false;
        int steps = (a.depth + BK - 1) / BK;
        for (int step = 0; step < steps; ++step) {
            stage(sa[step % 2], sb[step % 2], ra, rb);
            if (Tile::leave(step, yield_point)) return false;
            if (step + 1 < steps) loader.load((step + 1) * BK, ra, rb);
            multiply(sa[step % 2], sb[step % 2], lane, sum);
        }
        if constexpr (YieldPoint::kPreemptible) {
            if (yield_point.last()) return false;
        }
        yield_point.finishing();
        finish(a, place, lane, sum);
        return true;
    }
};

} // namespace tiles
