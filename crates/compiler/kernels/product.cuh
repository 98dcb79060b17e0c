// Products of any strides and element types, with single-precision sums and without tensor cores:
// matrix products, convolutions and transposed convolutions of one to three dimensions. Used where
// no other kernel applies, and for all of single precision.
//
// output(g, row, column) =
//   act(alpha * sum over depth of a(g, row, depth) * b(g, depth, column)
//       + beta * bias + residual)
//
// The address of an operand is a sum of offsets: of groups (or batches), rows, columns and depth.
// The rows of a convolution are pixels, its columns are channels of the output, its depth is input
// channels and taps; rows and depth then also have coordinates in the image, and elements outside
// are zero.
#pragma once
#include "reduce.cuh"

namespace tiles {

enum ProductKind : int { kMatrix, kConvolution, kTransposed };

// Size, stride and padding at the beginning of the image; a transposed convolution also divides by
// its stride.
struct Picture {
    int size[3];
    int stride[3];
    int pad[3];
    FastDiv step[3];
};

// The offset of a position in the image, or -1 outside. `row` is the start of the window, `tap` the
// offset in it.
template <int Kind>
__device__ __forceinline__ int picture_offset(const Picture& p, const int* row, const int* tap)
{
    int offset = 0;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        int at;
        if (Kind == kConvolution) {
            at = row[i] + tap[i] - p.pad[i];
        } else {
            int rest, far = row[i] + p.pad[i] - tap[i];
            at = p.step[i].split(max(far, 0), rest);
            if (far < 0 || rest != 0) return -1;
        }
        if ((u32)at >= (u32)p.size[i]) return -1;
        offset += at * p.stride[i];
    }
    return offset;
}

template <int Kind, int GroupRank, int RowRank, int DepthRank>
struct ProductArgs {
    static constexpr int kAxes = Kind == kMatrix ? 0 : 3;
    const void* a;
    const void* b;
    const void* bias; // or null
    const void* residual; // or null
    void* output;
    int rows, columns, depth;
    float alpha, beta;
    Epilogue act;
    FastDiv by_columns, by_rows; // tiles
    int b_column, bias_column, out_column, residual_column;
    StridedLoop<GroupRank, 5> group; // a, b, bias, output, residual
    StridedLoop<RowRank, 4 + kAxes> row; // a, bias, output, residual; the image
    StridedLoop<DepthRank, 2 + kAxes> inner; // a, b; the image
    Picture picture;
};

// Tile of BM rows and BN columns; a thread holds TM x TN sums. `ADeep` and `BDeep`: adjacent
// threads load neighbours in depth rather than adjacent rows or columns.
template <int Kind, class A, class B, class Bias, class Out, int GroupRank, int RowRank,
    int DepthRank, int BM, int BN, int TM, int TN, bool ADeep, bool BDeep>
struct Product {
    using Args = ProductArgs<Kind, GroupRank, RowRank, DepthRank>;
    static constexpr int kAxes = Args::kAxes;
    static constexpr int BK = 16;
    static constexpr int kThreads = (BM / TM) * (BN / TN), kShared = 0, kBlocks = 1;
    static constexpr int kALoads = BM * BK / kThreads, kBLoads = BN * BK / kThreads;
    // Rows of shared memory, 16-byte aligned.
    static constexpr int kPitchA = BM + 4, kPitchB = BN + 4;

    struct Row {
        int at[4 + kAxes];
        bool inside;
    };
    struct Place {
        int group[5];
        int row, column; // the tile's first
    };

    static __device__ __forceinline__ Place locate(const Args& a, int t)
    {
        Place p;
        int column, row, group = a.by_rows.split(a.by_columns.split(t, column), row);
        a.group.offsets(group, p.group);
        p.row = row * BM, p.column = column * BN;
        return p;
    }
    static __device__ __forceinline__ Row row_at(const Args& a, int row)
    {
        Row r;
        r.inside = row < a.rows;
        a.row.offsets(r.inside ? row : 0, r.at);
        return r;
    }
    static __device__ __forceinline__ float load_a(
        const Args& a, const A* base, const Row& row, const int* depth, bool inside)
    {
        if (!inside || !row.inside) return 0.f;
        int offset = row.at[0] + depth[0];
        if constexpr (Kind != kMatrix) {
            int place = picture_offset<Kind>(a.picture, row.at + 4, depth + 2);
            if (place < 0) return 0.f;
            offset += place;
        }
        return computed(load_one(base + offset));
    }
    // A convolution's weights are constant and may be kept in L1.
    static __device__ __forceinline__ float load_b(const B* p)
    { return computed(Kind == kMatrix ? load_one(p) : __ldg(p)); }

    // The element that a thread loads: (along the tile's edge, in depth).
    template <bool Deep, int Edge>
    static __device__ __forceinline__ int edge(int i)
    { return Deep ? threadIdx.x / BK + i * (kThreads / BK) : (threadIdx.x + i * kThreads) % Edge; }
    template <bool Deep, int Edge>
    static __device__ __forceinline__ int deep(int i)
    { return Deep ? threadIdx.x % BK : (threadIdx.x + i * kThreads) / Edge; }

    static constexpr int kRowsHeld = ADeep ? kALoads : (BM >= kThreads ? BM / kThreads : 1);

    struct Loader {
        const Args& args;
        const A* a;
        const B* b;
        Row row[kRowsHeld];
        int column;

        __device__ __forceinline__ Loader(const Args& args, const Place& p)
            : args(args),
              column(p.column)
        {
            a = (const A*)args.a + p.group[0];
            b = (const B*)args.b + p.group[1];
#pragma unroll
            for (int i = 0; i < kRowsHeld; ++i) row[i] = row_at(args, p.row + edge<ADeep, BM>(i));
        }
        __device__ __forceinline__ void depth_at(int k, int (&to)[2 + kAxes]) const
        { args.inner.offsets(k < args.depth ? k : 0, to); }
        __device__ __forceinline__ void load(
            int first, float (&ra)[kALoads], float (&rb)[kBLoads]) const
        {
            int depth[2 + kAxes];
            if (ADeep) depth_at(first + deep<ADeep, BM>(0), depth);
#pragma unroll
            for (int i = 0; i < kALoads; ++i) {
                int k = first + deep<ADeep, BM>(i);
                if (!ADeep) depth_at(k, depth);
                ra[i] = load_a(args, a, row[i % kRowsHeld], depth, k < args.depth);
            }
            if (BDeep) depth_at(first + deep<BDeep, BN>(0), depth);
#pragma unroll
            for (int i = 0; i < kBLoads; ++i) {
                int k = first + deep<BDeep, BN>(i), n = column + edge<BDeep, BN>(i);
                if (!BDeep) depth_at(k, depth);
                rb[i] = k < args.depth && n < args.columns
                            ? load_b(b + depth[1] + n * args.b_column)
                            : 0.f;
            }
        }
    };

    static __device__ __forceinline__ void stage(
        float* sa, float* sb, const float (&ra)[kALoads], const float (&rb)[kBLoads])
    {
#pragma unroll
        for (int i = 0; i < kALoads; ++i)
            sa[deep<ADeep, BM>(i) * kPitchA + edge<ADeep, BM>(i)] = ra[i];
#pragma unroll
        for (int i = 0; i < kBLoads; ++i)
            sb[deep<BDeep, BN>(i) * kPitchB + edge<BDeep, BN>(i)] = rb[i];
    }
    static __device__ __forceinline__ void multiply(
        const float* sa, const float* sb, float (&sum)[TM][TN])
    {
        int row = threadIdx.x / (BN / TN) * TM, column = threadIdx.x % (BN / TN) * TN;
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            Pack<float, TM> x = *(const Pack<float, TM>*)(sa + k * kPitchA + row);
            Pack<float, TN> y = *(const Pack<float, TN>*)(sb + k * kPitchB + column);
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) sum[i][j] = fmaf(x.v[i], y.v[j], sum[i][j]);
        }
    }
    static __device__ __forceinline__ void store(
        const Args& a, const int (&group)[5], const Row& r, int n, float sum)
    {
        float v = a.alpha * sum;
        if (a.bias)
            v += a.beta *
                 computed(load_one((const Bias*)a.bias + group[2] + r.at[1] + n * a.bias_column));
        if (a.residual)
            v += computed(
                load_one((const Out*)a.residual + group[4] + r.at[3] + n * a.residual_column));
        ((Out*)a.output)[group[3] + r.at[2] + n * a.out_column] = Stored<Out>::of(a.act.of(v));
    }
    static __device__ __forceinline__ void finish(
        const Args& a, const Place& p, const float (&sum)[TM][TN])
    {
        int row = p.row + threadIdx.x / (BN / TN) * TM,
            column = p.column + threadIdx.x % (BN / TN) * TN;
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            Row r = row_at(a, row + i);
#pragma unroll
            for (int j = 0; j < TN; ++j)
                if (r.inside && column + j < a.columns) store(a, p.group, r, column + j, sum[i][j]);
        }
    }
    // The barrier of a step, which also preempts the block when it checks.
    template <class YieldPoint>
    static __device__ __forceinline__ bool leave(int step, YieldPoint& yield_point)
    {
        if constexpr (YieldPoint::kPreemptible) {
            if (yield_point.template due<8>(step)) return yield_point.verdict();
        }
        __syncthreads();
        return false;
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        __shared__ __align__(16) float sa[2][BK * kPitchA], sb[2][BK * kPitchB];
        Place place = locate(a, t);
        Loader loader(a, place);
        float ra[kALoads], rb[kBLoads], sum[TM][TN] = {};
        dependency.wait();
        yield_point.poll_for_block();
        loader.load(0, ra, rb);
        if (yield_point.block_is_preempted()) return false;
        int steps = (a.depth + BK - 1) / BK;
        for (int step = 0; step < steps; ++step) {
            stage(sa[step % 2], sb[step % 2], ra, rb);
            if (leave(step, yield_point)) return false;
            if (step + 1 < steps) loader.load((step + 1) * BK, ra, rb);
            multiply(sa[step % 2], sb[step % 2], sum);
        }
        if constexpr (YieldPoint::kPreemptible) {
            if (yield_point.last()) return false;
        }
        yield_point.finishing();
        finish(a, place, sum);
        return true;
    }
};

// ---- few rows: several threads per output -------------------------------------------------------

// A product of few rows reads `b` once: its tiles would leave most multiprocessors idle. Threads
// share the depth of `Across` adjacent columns of one row (see Team).
template <int Kind, class A, class B, class Bias, class Out, int GroupRank, int RowRank,
    int DepthRank, int Across, bool Rows>
struct Dots {
    using Tile =
        Product<Kind, A, B, Bias, Out, GroupRank, RowRank, DepthRank, 64, 64, 4, 4, true, true>;
    using Args = typename Tile::Args;
    using Threads = Team<Across, Rows>;
    static constexpr int kThreads = kReduceThreads, kShared = 0, kBlocks = 1;

    static __device__ __forceinline__ float sum(
        const Args& a, const int (&group)[5], const typename Tile::Row& row, int column)
    {
        const A* x = (const A*)a.a + group[0];
        const B* y = (const B*)a.b + group[1] + column * a.b_column;
        float sum = 0.f;
#pragma unroll 4
        for (int k = Threads::along(); k < a.depth; k += Threads::kAlong) {
            int depth[2 + Tile::kAxes];
            a.inner.offsets(k, depth);
            sum = fmaf(Tile::load_a(a, x, row, depth, true), Tile::load_b(y + depth[1]), sum);
        }
        return sum;
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int first, row, group[5], column = a.by_columns.split(t, first);
        a.group.offsets(a.by_rows.split(column, row), group);
        column = first * Across + Threads::across();
        bool live = column < a.columns;
        typename Tile::Row r = Tile::row_at(a, row);
        dependency.wait();
        yield_point.poll();
        typename Fold<float, kSum>::State state = {live ? sum(a, group, r, column) : 0.f, 1};
        state = Threads::template join<Fold<float, kSum>>(state);
        if (yield_point.is_preempted()) return false;
        if (live && Threads::along() == 0) Tile::store(a, group, r, column, state.v);
        return true;
    }
};

// ---- few channels per group: one thread per output ----------------------------------------------

template <int Rank>
struct DirectArgs {
    const void* a;
    const void* b;
    const void* bias;
    const void* residual;
    void* output;
    int items;
    int channels, taps[3];
    int a_channel, b_channel, b_tap[3], dilation[3];
    Epilogue act;
    StridedLoop<Rank, 8> loop; // a, b, bias, output, residual; the image
    Picture picture;
};

// Convolution, plain or transposed, for depthwise layers and groups of few channels.
template <int Kind, class A, class B, class Bias, class Out, int Rank>
struct Direct {
    using Args = DirectArgs<Rank>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    static __device__ __forceinline__ float sum(const Args& a, const int (&at)[8])
    {
        float sum = 0.f;
        int tap[3];
        const A* x = (const A*)a.a + at[0];
        const B* w = (const B*)a.b + at[1];
        for (int z = 0; z < a.taps[0]; ++z)
            for (int y = 0; y < a.taps[1]; ++y)
                for (int i = 0; i < a.taps[2]; ++i) {
                    tap[0] = z * a.dilation[0], tap[1] = y * a.dilation[1],
                    tap[2] = i * a.dilation[2];
                    int place = picture_offset<Kind>(a.picture, at + 5, tap);
                    if (place < 0) continue;
                    const B* weight = w + z * a.b_tap[0] + y * a.b_tap[1] + i * a.b_tap[2];
                    for (int c = 0; c < a.channels; ++c)
                        sum = fmaf(computed(load_one(x + place + c * a.a_channel)),
                            computed(__ldg(weight + c * a.b_channel)), sum);
                }
        return sum;
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, at[8];
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        a.loop.offsets(item, at);
        float v = sum(a, at);
        if (a.bias) v += computed(load_one((const Bias*)a.bias + at[2]));
        if (a.residual) v += computed(load_one((const Out*)a.residual + at[4]));
        if (yield_point.is_preempted()) return false;
        ((Out*)a.output)[at[3]] = Stored<Out>::of(a.act.of(v));
        return true;
    }
};

} // namespace tiles
