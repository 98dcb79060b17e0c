// Fused attention: softmax(scale * q k^T + bias) v with the scores in registers only, for any
// lengths, strides and head sizes up to 256.
//
// A tile is one head of one sequence and some queries, against all keys or, where there are few
// queries, one part of them; parts are combined through the workspace. Keys and values come in
// blocks through two buffers, with a running maximum. Warps divide the queries (`RowWarps`), and
// each block of keys (`KeyWarps`): the latter only meet when their sums are combined.
//
// Exponentials are powers of two: `scale` contains log2(e). A query that may see no key gets zeros.
#pragma once
#include "base.cuh"

namespace tiles {

// What is added to the scores.
enum AttentionBias : int {
    kNoBias = 0,
    kHalfPairs = 1, // halves, the bias of two neighbouring keys in one aligned word
    kHalf = 2,
    kFloat = 3,
    kKeep = 4 // bytes: zero excludes the key
};

struct AttentionArgs {
    const half* query;
    const half* key;
    const half* value;
    half* output;
    const void* bias;
    // Split keys: [tile][split][queries][values, maximum, sum], and a word of arrival bits per tile
    float* workspace;
    u32* arrivals;
    int queries, keys;
    // Elements between rows; the elements of a row are adjacent. Rows of the bias are queries.
    int query_row, key_row, value_row, output_row, bias_row, bias_column;
    // Elements between neighbours along four outer dimensions, slowest first; 0 repeats
    int query_outer[4], key_outer[4], value_outer[4], output_outer[4], bias_outer[4];
    float scale; // on the scores, times log2(e); positive
    int causal, offset; // causal: query i sees keys 0 to i + offset
    int splits, split_keys; // parts of the keys, and keys of a part (a multiple of the block)
    FastDiv by_splits, by_blocks; // blocks of queries
    FastDiv by_outer[3]; // sizes of the outer dimensions but the first
};

template <int Width, int ValueWidth, int RowWarps, int KeyWarps, int RowTiles, int Keys, int Bias>
struct Attention {
    using Args = AttentionArgs;
    static constexpr int kThreads = RowWarps * KeyWarps * kWarp;
    // Widths rounded up to what a tensor-core instruction takes; the rest is zero.
    static constexpr int kDim = (Width + 15) / 16 * 16, kValues = (ValueWidth + 15) / 16 * 16;
    static constexpr int kQueries = RowWarps * RowTiles * 16, kWarpKeys = Keys / KeyWarps;
    // Bytes of a row. An odd number of 16-byte chunks: eight rows lie in different banks.
    static constexpr int kPitch = kDim * 2 + 16, kValuePitch = kValues * 2 + 16;
    static constexpr int kStage = Keys * (kPitch + kValuePitch);
    // Floats of a row of a part: values, then maximum and sum.
    static constexpr int kRow = kValues + 4, kPart = kQueries * kRow;
    static constexpr int kChunks = kValues / 4;
    static constexpr int kRing = kQueries * kPitch + 2 * kStage;
    static constexpr int kStaged = KeyWarps * kPart * 4;
    static constexpr int kShared = kRing > kStaged ? kRing : kStaged;
    // Scores, sums and queries of a thread leave room for a second block.
    static constexpr bool kSmall = RowTiles * (kDim + kValues + Keys) <= 256 && kThreads <= 256;
    static constexpr int kBlocks = (kSmall || kThreads <= 128) && kShared <= 112 * 1024 ? 2 : 1;
    // Queries stay in registers where these suffice.
    static constexpr bool kKept = RowTiles * kDim <= 128;
    static_assert(kWarpKeys % 16 == 0, "keys of a warp");

    // Minus infinity: the score of a key that a query must not see.
    static __device__ __forceinline__ float lowest() { return __int_as_float(0xff800000u); }

    struct Place {
        const half *query, *key, *value;
        half* output;
        const unsigned char* bias;
        int first, rows; // queries
        int begin, end; // blocks of keys
        int split, output_tile;
    };
    // One warp's state: its queries against all its keys so far.
    struct State {
        u32 q[kKept ? RowTiles : 1][kKept ? kDim / 16 : 1][4];
        float out[RowTiles][kValues / 8][4];
        float top[RowTiles][2], sum[RowTiles][2];
    };

    static __device__ __forceinline__ int row_warp() { return threadIdx.x / kWarp % RowWarps; }
    static __device__ __forceinline__ int key_warp() { return threadIdx.x / kWarp / RowWarps; }
    // The tile's row of accumulator row `r` (0 or 1) of the warp's row tile `m`.
    static __device__ __forceinline__ int row_of(int m, int r)
    { return (row_warp() * RowTiles + m) * 16 + threadIdx.x % kWarp / 4 + r * 8; }

    static __device__ __forceinline__ Place locate(const Args& a, int t)
    {
        constexpr int kBiasSize = Bias == kKeep ? 1 : Bias == kFloat ? 4 : 2;
        Place p;
        int block, at[4];
        p.output_tile = a.by_splits.split(t, p.split);
        at[0] = a.by_blocks.split(p.output_tile, block);
#pragma unroll
        for (int i = 3; i > 0; --i) at[0] = a.by_outer[i - 1].split(at[0], at[i]);
        // The longest rows of a causal mask first: the last blocks to start are then short.
        if (a.causal) block = (int)a.by_blocks.divisor - 1 - block;
        p.first = block * kQueries;
        p.rows = min(a.queries - p.first, kQueries);
        size_t q = 0, k = 0, v = 0, o = 0, b = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            q += (size_t)at[i] * a.query_outer[i], k += (size_t)at[i] * a.key_outer[i];
            v += (size_t)at[i] * a.value_outer[i], o += (size_t)at[i] * a.output_outer[i];
            if (Bias != kNoBias) b += (size_t)at[i] * a.bias_outer[i];
        }
        p.query = a.query + q + (size_t)p.first * a.query_row;
        p.key = a.key + k, p.value = a.value + v;
        p.output = a.output + o + (size_t)p.first * a.output_row;
        p.bias = (const unsigned char*)a.bias;
        if (Bias != kNoBias) p.bias += b * kBiasSize;
        int keys = a.keys;
        if (a.causal) keys = max(min(keys, p.first + p.rows + a.offset), 0);
        int from = p.split * a.split_keys, to = min(keys, from + a.split_keys);
        p.begin = from / Keys, p.end = (to + Keys - 1) / Keys;
        return p;
    }

    // `Count` rows of `Columns` halves, padded with zeros; rows beyond `rows` become zero.
    template <int Count, int Columns>
    static __device__ __forceinline__ void copy_rows(u32 to, const half* from, int stride, int rows)
    {
        constexpr int kChunks = (Columns + 15) / 16 * 2, kBytes = kChunks * 16 + 16;
#pragma unroll
        for (int i = 0; i < (Count * kChunks + kThreads - 1) / kThreads; ++i) {
            int at = i * kThreads + (int)threadIdx.x;
            if (Count * kChunks % kThreads && at >= Count * kChunks) break;
            int row = at / kChunks, chunk = at % kChunks;
            int bytes = row < rows ? min(max(Columns - chunk * 8, 0), 8) * 2 : 0;
            copy_async_part<16>(to + row * kBytes + chunk * 16,
                bytes ? from + (size_t)row * stride + chunk * 8 : from, bytes);
        }
    }
    static __device__ __forceinline__ void copy_block(
        const Args& a, const Place& p, u32 ring, int block)
    {
        u32 to = ring + (block - p.begin) % 2 * kStage;
        int first = block * Keys;
        copy_rows<Keys, Width>(
            to, p.key + (size_t)first * a.key_row, a.key_row, a.keys - first);
        copy_rows<Keys, ValueWidth>(to + Keys * kPitch, p.value + (size_t)first * a.value_row,
            a.value_row, a.keys - first);
    }

    static __device__ __forceinline__ void load_query(u32 (&q)[4], u32 queries, int m, int k)
    {
        int lane = threadIdx.x % kWarp, row = (row_warp() * RowTiles + m) * 16 + lane % 16;
        load_matrices(q, queries + row * kPitch + (k * 2 + lane / 16) * 16);
    }
    static __device__ __forceinline__ void scores(
        const State& s, u32 queries, u32 keys, float (&p)[RowTiles][kWarpKeys / 8][4])
    {
        int lane = threadIdx.x % kWarp;
        u32 from = keys + (key_warp() * kWarpKeys + lane % 8 + lane / 16 * 8) * kPitch +
                   lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            u32 q[RowTiles][4];
#pragma unroll
            for (int m = 0; m < RowTiles; ++m) {
                if constexpr (kKept)
#pragma unroll
                    for (int i = 0; i < 4; ++i) q[m][i] = s.q[m][k][i];
                else
                    load_query(q[m], queries, m, k);
            }
#pragma unroll
            for (int j = 0; j < kWarpKeys / 16; ++j) {
                u32 b[4];
                load_matrices(b, from + j * 16 * kPitch + k * 32);
#pragma unroll
                for (int m = 0; m < RowTiles; ++m) {
                    multiply_add(p[m][2 * j], q[m], b[0], b[1]);
                    multiply_add(p[m][2 * j + 1], q[m], b[2], b[3]);
                }
            }
        }
    }

    // Scales and adds the bias; minus infinity for keys that a query must not see.
    static __device__ __forceinline__ void add_bias(const Args& a, const Place& place, int first,
        float (&p)[RowTiles][kWarpKeys / 8][4])
    {
        constexpr float kLog2e = 1.4426950408889634f;
        // Without a bias, only the last blocks have such keys, and the scale comes later.
        bool edge = first + kWarpKeys > a.keys ||
                    (a.causal && first + kWarpKeys > place.first + a.offset + 1);
        if (Bias == kNoBias && !edge) return;
        int column = first + threadIdx.x % 4 * 2;
#pragma unroll
        for (int m = 0; m < RowTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int query = place.first + row_of(m, r);
                int limit = a.causal ? min(a.keys, query + a.offset + 1) : a.keys;
                size_t row = Bias == kNoBias ? 0 : (size_t)min(query, a.queries - 1) * a.bias_row;
#pragma unroll
                for (int j = 0; j < kWarpKeys / 8; ++j) {
                    int key = column + j * 8;
                    float bias[2] = {};
                    if constexpr (Bias == kHalfPairs) {
                        if (key < limit) {
                            half2 h = *(const half2*)((const half*)place.bias + row + key);
                            float2 f = __half22float2(h);
                            bias[0] = f.x, bias[1] = f.y;
                        }
                    } else if constexpr (Bias != kNoBias) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            if (key + e >= limit) continue;
                            size_t at = row + (size_t)(key + e) * a.bias_column;
                            if constexpr (Bias == kHalf)
                                bias[e] = __half2float(((const half*)place.bias)[at]);
                            else if constexpr (Bias == kFloat)
                                bias[e] = ((const float*)place.bias)[at];
                            else
                                bias[e] = place.bias[at] ? 0.f : lowest();
                        }
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = p[m][j][2 * r + e];
                        if constexpr (Bias != kNoBias) x = x * a.scale + bias[e] * kLog2e;
                        if (key + e >= limit) x = lowest();
                    }
                }
            }
    }

    // Converts scores to weights; rescales the sums of an older maximum.
    static __device__ __forceinline__ void soften(
        State& s, float (&p)[RowTiles][kWarpKeys / 8][4], float scale)
    {
        float factor = Bias == kNoBias ? scale : 1.f;
#pragma unroll
        for (int m = 0; m < RowTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float top = s.top[m][r];
#pragma unroll
                for (int j = 0; j < kWarpKeys / 8; ++j)
                    top = fmaxf(top, fmaxf(p[m][j][2 * r], p[m][j][2 * r + 1]));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                // While no key was visible, any finite number gives zeros.
                float base = top == lowest() ? 0.f : top * factor;
                float old = power_of_two(s.top[m][r] * factor - base), sum = 0.f;
                s.top[m][r] = top;
#pragma unroll
                for (int j = 0; j < kWarpKeys / 8; ++j)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e) {
                        p[m][j][e] = power_of_two(p[m][j][e] * factor - base);
                        sum += p[m][j][e];
                    }
                s.sum[m][r] = s.sum[m][r] * old + sum;
#pragma unroll
                for (int j = 0; j < kValues / 8; ++j)
                    s.out[m][j][2 * r] *= old, s.out[m][j][2 * r + 1] *= old;
            }
    }

    // The accumulator layout of the scores is the operand layout of the weights.
    static __device__ __forceinline__ void weigh(
        State& s, const float (&p)[RowTiles][kWarpKeys / 8][4], u32 values)
    {
        int lane = threadIdx.x % kWarp;
        u32 from = values + (key_warp() * kWarpKeys + lane % 16) * kValuePitch + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < kWarpKeys / 16; ++k) {
            u32 w[RowTiles][4];
#pragma unroll
            for (int m = 0; m < RowTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* x = &p[m][2 * k + i / 2][i % 2 * 2];
                    half2 h = __floats2half2_rn(x[0], x[1]);
                    w[m][i] = *(u32*)&h;
                }
#pragma unroll
            for (int j = 0; j < kValues / 16; ++j) {
                u32 b[4];
                load_matrices_transposed(b, from + k * 16 * kValuePitch + j * 32);
#pragma unroll
                for (int m = 0; m < RowTiles; ++m) {
                    multiply_add(s.out[m][2 * j], w[m], b[0], b[1]);
                    multiply_add(s.out[m][2 * j + 1], w[m], b[2], b[3]);
                }
            }
        }
    }

    static __device__ __forceinline__ void store(half* to, float x, float y, int column)
    {
        if constexpr (ValueWidth % 2 == 0) {
            if (column < ValueWidth) *(half2*)(to + column) = __floats2half2_rn(x, y);
        } else {
            if (column < ValueWidth) to[column] = __float2half_rn(x);
            if (column + 1 < ValueWidth) to[column + 1] = __float2half_rn(y);
        }
    }
    // Directly from registers: this warp saw all keys.
    static __device__ __forceinline__ void emit(const Args& a, const Place& p, const State& s)
    {
#pragma unroll
        for (int m = 0; m < RowTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int row = row_of(m, r);
                float scale = s.sum[m][r] > 0.f ? 1.f / s.sum[m][r] : s.sum[m][r];
                if (row >= p.rows) continue;
                half* to = p.output + (size_t)row * a.output_row;
#pragma unroll
                for (int j = 0; j < kValues / 8; ++j)
                    store(to, s.out[m][j][2 * r] * scale, s.out[m][j][2 * r + 1] * scale,
                        j * 8 + threadIdx.x % 4 * 2);
            }
    }

    // Writes this warp's sums to its part in shared memory.
    static __device__ __forceinline__ void stage(float* parts, const State& s, float scale)
    {
        float factor = Bias == kNoBias ? scale : 1.f;
#pragma unroll
        for (int m = 0; m < RowTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float* to = parts + key_warp() * kPart + row_of(m, r) * kRow;
#pragma unroll
                for (int j = 0; j < kValues / 8; ++j)
                    *(float2*)(to + j * 8 + threadIdx.x % 4 * 2) =
                        make_float2(s.out[m][j][2 * r], s.out[m][j][2 * r + 1]);
                if (threadIdx.x % 4 == 0)
                    *(float2*)(to + kValues) = make_float2(s.top[m][r] * factor, s.sum[m][r]);
            }
    }
    // Four values of a row, its maximum and its sum, over `count` parts.
    struct Combined {
        float4 v;
        float top, sum;
    };
    // Parts in the workspace were written by other SMs: they are read past L1.
    template <bool InShared, class T>
    static __device__ __forceinline__ T read(const T* p)
    {
        if constexpr (InShared) return *p;
        else return __ldcg(p);
    }
    template <bool InShared>
    static __device__ __forceinline__ Combined combine(
        const float* parts, int count, int row, int column)
    {
        Combined c = {{0.f, 0.f, 0.f, 0.f}, lowest(), 0.f};
        const float* from = parts + row * kRow;
        for (int i = 0; i < count; ++i)
            c.top = fmaxf(c.top, read<InShared>(from + (size_t)i * kPart + kValues));
        float base = c.top == lowest() ? 0.f : c.top;
        for (int i = 0; i < count; ++i) {
            const float* part = from + (size_t)i * kPart;
            float2 last = read<InShared>((const float2*)(part + kValues));
            float4 v = read<InShared>((const float4*)(part + column));
            float weight = power_of_two(last.x - base);
            c.v.x += weight * v.x, c.v.y += weight * v.y;
            c.v.z += weight * v.z, c.v.w += weight * v.w;
            c.sum += weight * last.y;
        }
        return c;
    }
    static __device__ __forceinline__ void finish(
        const Args& a, const Place& p, const Combined& c, int row, int column)
    {
        float scale = c.sum > 0.f ? 1.f / c.sum : c.sum;
        half* to = p.output + (size_t)row * a.output_row;
        store(to, c.v.x * scale, c.v.y * scale, column);
        store(to, c.v.z * scale, c.v.w * scale, column + 2);
    }
    // Writes the part of this block. It announces itself with a bit, not a count: a part that is
    // computed twice announces the same. True for the block that completes the set.
    static __device__ __forceinline__ bool deliver(
        const Args& a, const Place& p, const float* staged, float* all)
    {
        float* own = all + (size_t)p.split * kPart;
        for (int i = threadIdx.x; i < p.rows * kChunks; i += kThreads) {
            int row = i / kChunks, column = i % kChunks * 4;
            Combined c = combine<true>(staged, KeyWarps, row, column);
            __stcg((float4*)(own + row * kRow + column), c.v);
            if (column == 0)
                __stcg((float2*)(own + row * kRow + kValues), make_float2(c.top, c.sum));
        }
        __threadfence();
        __syncthreads();
        u32 full = a.splits == 32 ? ~0u : (1u << a.splits) - 1;
        bool last = false;
        if (threadIdx.x == 0) {
            u32* arrivals = a.arrivals + p.output_tile;
            last = (atomicOr(arrivals, 1u << p.split) | 1u << p.split) == full;
            if (last) *arrivals = 0; // ready for the next launch
        }
        if (!__syncthreads_or(last)) return false;
        __threadfence();
        return true;
    }
    // Adds the parts of the warps, and those of the blocks that share these queries, in order.
    static __device__ __forceinline__ void combine_parts(
        const Args& a, const Place& p, const float* staged)
    {
        float* all = a.workspace + (size_t)p.output_tile * a.splits * kPart;
        bool split = a.splits > 1;
        if (split && !deliver(a, p, staged, all)) return;
        for (int i = threadIdx.x; i < p.rows * kChunks; i += kThreads) {
            int row = i / kChunks, column = i % kChunks * 4;
            if (split)
                finish(a, p, combine<false>(all, a.splits, row, column), row, column);
            else
                finish(a, p, combine<true>(staged, KeyWarps, row, column), row, column);
        }
    }

    static __device__ __forceinline__ void start(State& s, u32 queries)
    {
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
            s.top[m][0] = s.top[m][1] = lowest();
            if constexpr (kKept)
#pragma unroll
                for (int k = 0; k < kDim / 16; ++k) load_query(s.q[m][k], queries, m, k);
        }
    }
    static __device__ __forceinline__ void step(
        const Args& a, const Place& p, State& s, u32 queries, u32 ring, int i)
    {
        u32 keys = ring + (i - p.begin) % 2 * kStage;
        float weights[RowTiles][kWarpKeys / 8][4] = {};
        scores(s, queries, keys, weights);
        add_bias(a, p, i * Keys + key_warp() * kWarpKeys, weights);
        soften(s, weights, a.scale);
        weigh(s, weights, keys + Keys * kPitch);
    }

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char* shared,
        YieldPoint& yield_point, const Dependency& dependency)
    {
        Place p = locate(a, t);
        u32 queries = shared_address(shared), ring = queries + kQueries * kPitch;
        State s = {};
        dependency.wait();
        yield_point.poll_for_block();
        copy_rows<kQueries, Width>(queries, p.query, a.query_row, p.rows);
        if (p.begin < p.end) copy_block(a, p, ring, p.begin);
        copy_commit();
        copy_wait<0>();
        if (YieldPoint::kPreemptible) {
            if (yield_point.block_is_preempted()) return false;
        } else {
            __syncthreads();
        }
        start(s, queries);
        for (int i = p.begin; i < p.end; ++i) {
            if (i > p.begin) {
                copy_wait<0>();
                if (yield_point.template due<1>(i - p.begin)) {
                    if (yield_point.verdict()) return false;
                } else {
                    __syncthreads();
                }
            }
            // Every warp has left the other buffer: its last step ended before this barrier.
            if (i + 1 < p.end) copy_block(a, p, ring, i + 1);
            copy_commit();
            step(a, p, s, queries, ring, i);
        }
#pragma unroll
        for (int m = 0; m < RowTiles; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                s.sum[m][r] += __shfl_xor_sync(~0u, s.sum[m][r], 1);
                s.sum[m][r] += __shfl_xor_sync(~0u, s.sum[m][r], 2);
            }
        bool direct = KeyWarps == 1 && a.splits == 1;
        if (YieldPoint::kPreemptible || !direct)
            if (yield_point.last()) return false;
        yield_point.finishing();
        if (direct) {
            emit(a, p, s);
            return true;
        }
        stage((float*)shared, s, a.scale);
        __syncthreads();
        combine_parts(a, p, (const float*)shared);
        return true;
    }
};

} // namespace tiles
