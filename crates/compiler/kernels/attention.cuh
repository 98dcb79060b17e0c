// Fused attention for heads of 64: softmax(q k^T / 8 + mask) v with the scores in registers only. A
// tile is one head of one sequence and 16 * Warps queries; keys come in blocks of 64 through two
// buffers, with a running maximum.
#pragma once
#include "base.cuh"
#include "conv.cuh"

namespace tiles {

struct AttentionArgs {
    // [batch * tokens][stride], the 64 values of a head are adjacent; the same for key and value
    const half* query;
    const half* key;
    const half* value;
    half* output; // [batch * tokens][out_stride]
    const half* mask; // [batch][tokens], added to the scaled scores; or null
    int tokens, heads, stride, out_stride;
    FastDiv by_blocks, by_heads; // query blocks per head, heads
};

template <int Warps>
struct Attention {
    using Args = AttentionArgs;
    static constexpr int kThreads = Warps * kWarp, kBlocks = 1;
    static constexpr int kQueries = Warps * 16, kKeys = 64, kDim = 64;
    static constexpr int kBlock = kKeys * kDim * 2; // bytes of a block of keys or values
    // Queries, then two of (keys, values).
    static constexpr int kShared = kQueries * kDim * 2 + 4 * kBlock;

    // `count` rows of 64 halves; rows beyond `rows` become zero.
    static __device__ __forceinline__ void copy_rows(
        u32 to, const half* from, int stride, int count, int rows)
    {
        for (int i = threadIdx.x; i < count * 8; i += kThreads) {
            int row = i / 8, chunk = i % 8;
            bool inside = row < rows;
            copy_async<16>(to + swizzled<64>(row, chunk),
                inside ? from + (size_t)row * stride + chunk * 8 : from, inside);
        }
    }
    // One warp's state: 16 queries against all keys so far.
    struct State {
        u32 q[4][4];
        float out[8][4];
        float top[2], sum[2];
    };
    static __device__ __forceinline__ void scores(const State& s, u32 keys, float (&p)[8][4])
    {
        int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 b[4];
                load_matrices(b,
                    keys + swizzled<64>(j * 16 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
                multiply_add(p[2 * j], s.q[k], b[0], b[1]);
                multiply_add(p[2 * j + 1], s.q[k], b[2], b[3]);
            }
    }
    // Scales, masks, and converts scores to weights; rescales the sums of an older maximum.
    static __device__ __forceinline__ void soften(
        State& s, float (&p)[8][4], const half* mask, int first, int tokens)
    {
        int column = threadIdx.x % 4 * 2;
        float top[2] = {s.top[0], s.top[1]};
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int key = first + j * 8 + column + e % 2;
                float bias = key >= tokens ? -1e30f : mask ? __half2float(mask[key]) : 0.f;
                p[j][e] = p[j][e] * 0.125f + bias;
                top[e / 2] = fmaxf(top[e / 2], p[j][e]);
            }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
            float scale = __expf(s.top[r] - top[r]);
            s.top[r] = top[r];
            s.sum[r] *= scale;
#pragma unroll
            for (int j = 0; j < 8; ++j) s.out[j][2 * r] *= scale, s.out[j][2 * r + 1] *= scale;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                p[j][e] = __expf(p[j][e] - top[e / 2]);
                s.sum[e / 2] += p[j][e];
            }
    }
    // The accumulator layout of the scores is the operand layout of the weights.
    static __device__ __forceinline__ void weigh(State& s, const float (&p)[8][4], u32 values)
    {
        int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                half2 h =
                    __floats2half2_rn(p[2 * k + i / 2][i % 2 * 2], p[2 * k + i / 2][i % 2 * 2 + 1]);
                w[i] = *(u32*)&h;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 b[4];
                load_matrices_transposed(
                    b, values + swizzled<64>(k * 16 + lane % 16, j * 2 + lane / 16));
                multiply_add(s.out[2 * j], w, b[0], b[1]);
                multiply_add(s.out[2 * j + 1], w, b[2], b[3]);
            }
        }
    }
    static __device__ __forceinline__ void emit(const Args& a, State& s, half* to, int rows)
    {
        int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            s.sum[r] += __shfl_xor_sync(~0u, s.sum[r], 1);
            s.sum[r] += __shfl_xor_sync(~0u, s.sum[r], 2);
            int row = threadIdx.x / kWarp * 16 + lane / 4 + r * 8;
            if (row >= rows) continue;
            float scale = 1.f / s.sum[r];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                *(half2*)(to + (size_t)row * a.out_stride + j * 8 + lane % 4 * 2) =
                    __floats2half2_rn(s.out[j][2 * r] * scale, s.out[j][2 * r + 1] * scale);
        }
    }
    static __device__ __forceinline__ void copy_keys(const Args& a, u32 to, size_t base, int block)
    {
        size_t from = base + (size_t)block * kKeys * a.stride;
        int rows = a.tokens - block * kKeys;
        copy_rows(to, a.key + from, a.stride, kKeys, rows);
        copy_rows(to + kBlock, a.value + from, a.stride, kKeys, rows);
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char* shared,
        YieldPoint& yield_point, const Dependency& dependency)
    {
        int block, head, lane = threadIdx.x % kWarp;
        int image = a.by_heads.split(a.by_blocks.split(t, block), head);
        size_t base = (size_t)image * a.tokens * a.stride + head * kDim;
        int first = block * kQueries, blocks = (a.tokens + kKeys - 1) / kKeys;
        const half* mask = a.mask ? a.mask + image * a.tokens : nullptr;
        u32 queries = shared_address(shared), ring = queries + kQueries * kDim * 2;
        State s = {};
        s.top[0] = s.top[1] = -1e30f;
        dependency.wait();
        yield_point.poll_for_block();
        copy_rows(queries, a.query + base + (size_t)first * a.stride, a.stride, kQueries,
            a.tokens - first);
        copy_keys(a, ring, base, 0);
        copy_commit();
        for (int i = 0; i < blocks; ++i) {
            if (i + 1 < blocks) copy_keys(a, ring + (i + 1) % 2 * 2 * kBlock, base, i + 1);
            copy_commit();
            copy_wait<1>();
            if (YieldPoint::kPreemptible && i == 0) {
                if (yield_point.block_is_preempted()) return false;
            } else if (yield_point.template due<1>(i)) {
                if (yield_point.verdict()) return false;
            } else {
                __syncthreads();
            }
            if (i == 0)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    load_matrices(s.q[k],
                        queries +
                            swizzled<64>(threadIdx.x / kWarp * 16 + lane % 16, k * 2 + lane / 16));
            u32 keys = ring + i % 2 * 2 * kBlock;
            float p[8][4] = {};
            scores(s, keys, p);
            soften(s, p, mask, i * kKeys, a.tokens);
            weigh(s, p, keys + kBlock);
            __syncthreads();
        }
        if constexpr (YieldPoint::kPreemptible)
            if (yield_point.last()) return false;
        yield_point.finishing();
        half* to = a.output + ((size_t)image * a.tokens + first) * a.out_stride + head * kDim;
        emit(a, s, to, a.tokens - first);
        return true;
    }
};

} // namespace tiles
