// Recurrent layers (RNN, LSTM, GRU): the part that depends on the previous time step. The products
// with the inputs of all time steps are computed before, as one matrix product.
//
// A tile is one direction of `kRows` batch items, over all time steps. A cluster of `Blocks` blocks
// computes it; each block owns 16 * Groups hidden units with all their gates. The weights of these
// units stay in registers and shared memory for the whole sequence as far as they fit; the rest is
// read from L2 every step. Every block has the state of all units in shared memory, twice: a step
// reads one copy while the blocks write their new values into the other copy of all their peers. A
// block begins a step when all bytes of the state have arrived. Devices without clusters have one
// block per tile.
//
//   sums[gate][unit][item] = R[gate][unit][:] . h[item][:]     (rows of 16 units x 8 items x 16)
//
// `Split` warps share a group of 16 units and take different parts of the depth. With Tensor the
// weights are packed in the order of the tensor cores' registers (see `gpu/recurrent.rs`); without,
// they may have any strides, and each thread multiplies and adds by itself.
#pragma once
#include "number.cuh"

namespace tiles {

// ---- functions of gates -------------------------------------------------------------------------

enum GateFunctionKind : int {
    kGateRelu = 0,
    kGateTanh = 1,
    kGateSigmoid = 2,
    kGateLeakyRelu = 3,
    kGateHardSigmoid = 4,
    kGateElu = 5,
    kGateSoftplus = 6,
    kGateSoftsign = 7,
    kGateThresholdedRelu = 8
};

struct GateFunction {
    int kind;
    float alpha, beta;
};

// The quotient of two positive numbers with an error of two units in the last place; 0 for a
// divisor beyond 2^126.
__device__ __forceinline__ float quick_quotient(float a, float b)
{
#ifdef __CUDACC__
    return __fdividef(a, b);
#else
    return a / b;
#endif
}

// The error of __expf is far below that of the stored state, also in single precision, because the
// functions are flat where it is large.
__device__ __forceinline__ float gate_sigmoid(float x)
{ return quick_quotient(1.f, 1.f + __expf(-x)); }
__device__ __forceinline__ float gate_tanh(float x)
{ return 1.f - quick_quotient(2.f, 1.f + __expf(2.f * x)); }

__device__ __forceinline__ float gate_function(float x, int kind, const GateFunction& f)
{
    if (kind == kGateSigmoid) return gate_sigmoid(x);
    if (kind == kGateTanh) return gate_tanh(x);
    switch (kind) {
    case kGateRelu: return x > 0.f ? x : x != x ? x : 0.f;
    case kGateLeakyRelu: return x < 0.f ? f.alpha * x : x;
    case kGateHardSigmoid: return fminf(fmaxf(f.alpha * x + f.beta, 0.f), 1.f);
    case kGateElu: return x < 0.f ? f.alpha * expm1f(x) : x;
    case kGateSoftplus: return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x)));
    case kGateSoftsign: return x / (1.f + fabsf(x));
    default: return x > f.alpha ? x : 0.f;
    }
}

// ---- clusters -----------------------------------------------------------------------------------

// The blocks that compute one tile. With one block everything is local.
template <int Blocks>
struct BlockCluster {
    static __device__ __forceinline__ void arrive()
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if constexpr (Blocks > 1)
            asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
    }
    static __device__ __forceinline__ void wait()
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if constexpr (Blocks > 1) {
            asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
            return;
        }
#endif
        __syncthreads();
    }
    // The address of `p`, which is in shared memory, in block `peer`.
    static __device__ __forceinline__ u32 at(u32 p, int peer)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        u32 remote;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(p), "r"(peer));
        return remote;
#else
        return p;
#endif
    }
    static __device__ __forceinline__ void store(u32 to, u32 v)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
#endif
    }
    // Stores that also count their bytes at a barrier in the same block.
    static __device__ __forceinline__ void send(u32 to, u32 barrier, uint4 v)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                     "[%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
            "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
            : "memory");
#endif
    }
    static __device__ __forceinline__ void send(u32 to, u32 barrier, u32 v)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
            "r"(v), "r"(barrier)
            : "memory");
#endif
    }
    // A barrier that one thread announces bytes to; it completes when these have arrived.
    static __device__ __forceinline__ void create(u32 barrier)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    static __device__ __forceinline__ void expect(u32 barrier, u32 bytes)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
            : "memory");
#endif
    }
    static __device__ __forceinline__ void receive(u32 barrier, u32 parity)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("{\n.reg .pred done;\n"
                     "again:\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again;\n}" ::"r"(barrier),
            "r"(parity)
            : "memory");
#endif
    }
};

// ---- tensor cores -------------------------------------------------------------------------------

template <class T>
struct IsHalf {
    static constexpr bool kValue = false;
};
template <>
struct IsHalf<half> {
    static constexpr bool kValue = true;
};

// d += a * b of 16 x 16 and 16 x 8 elements, half or bf16.
template <class T>
__device__ __forceinline__ void recurrent_product(float (&d)[4], uint4 a, u32 b0, u32 b1)
{
#ifdef __CUDACC__
    if constexpr (IsHalf<T>::kValue)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#else
    // Tests on a host: the same distribution of elements over the lanes, by shuffles.
    const u32 own[6] = {a.x, a.y, a.z, a.w, b0, b1};
    int lane = threadIdx.x % kWarp;
    for (int q = 0; q < 4; ++q)
        for (int i = 0; i < 2; ++i) {
            u32 left[2], right[2];
            for (int j = 0; j < 2; ++j)
                left[j] = __shfl_sync(~0u, own[i * 2 + j], lane / 4 * 4 + q);
            for (int j = 0; j < 2; ++j)
                right[j] = __shfl_sync(~0u, own[4 + i], (lane % 4 * 2 + j) * 4 + q);
            for (int out = 0; out < 4; ++out) {
                const T* x = (const T*)&left[out / 2];
                const T* y = (const T*)&right[out % 2];
                d[out] += computed(x[0]) * computed(y[0]) + computed(x[1]) * computed(y[1]);
            }
        }
#endif
}

// ---- arguments ----------------------------------------------------------------------------------

enum RecurrentCell : int {
    kSimpleCell = 0,
    kLstmCell = 1, // gates: input, output, forget, candidate
    kGruCell = 2, // gates: update, reset, candidate; the reset acts after the product
    kGruEarlyCell = 3 // the reset acts before the product
};

// Strides are in elements.
struct RecurrentArgs {
    const void* x; // products with the inputs, without bias; null for zeros
    const void* r; // packed for tensor cores, or strided
    const float* bias; // per direction: of the inputs' gates, of the states' gates; or null
    const float* peepholes; // per direction: of input, output, forget gate; or null
    const void* h0; // null for zeros
    const void* c0; // null for zeros
    const int* lengths; // null when every item has all time steps
    void* y; // each of the outputs may be null
    void* y_h;
    void* y_c;
    float* cell; // memory for cell states that do not fit into shared memory
    u32* fault; // set when a length is out of range
    int hidden, batch, time, directions, backward; // backward: one bit per direction
    int x_time, x_item, x_direction; // gates are `hidden` apart
    int r_direction, r_row, r_depth; // without tensor cores
    int h0_direction, h0_item, h0_unit, c0_direction, c0_item, c0_unit, length;
    int y_time, y_direction, y_item, state_direction, state_item;
    int coupled; // the forget gate is one minus the input gate
    int clips;
    float clip;
    GateFunction functions[2][3]; // per direction: of gates, candidate, output
};

// ---- the layer ----------------------------------------------------------------------------------

// Chunks: the depth in units of 32. Held, Kept: how many of a warp's chunks are in registers and in
// shared memory. Passes: a block with many groups computes them one part after another. Plain: the
// functions are those of ONNX's defaults, without clipping, peepholes and coupled gates. This makes
// a cell free of branches.
template <class T, int Cell, int Blocks, int Groups, int Chunks, int RowTiles, int Split,
    int Passes, int Held, int Kept, bool Tensor, bool CellInMemory, bool Plain>
struct Recurrent {
    using Args = RecurrentArgs;
    using Cluster = BlockCluster<Blocks>;
    static constexpr int kGates = Cell == kSimpleCell ? 1 : Cell == kLstmCell ? 4 : 3;
    static constexpr bool kEarly = Cell == kGruEarlyCell;
    static constexpr int kRows = RowTiles * 8, kUnits = Groups * 16, kDepth = Chunks * 32;
    static constexpr int kPart = (Groups + Passes - 1) / Passes; // groups of a pass
    static constexpr int kPartUnits = kPart * 16;
    static constexpr int kThreads = kPart * Split * kWarp, kBlocks = 1;
    static constexpr int kCells = (kRows * kPartUnits + kThreads - 1) / kThreads;
    static constexpr int kWarpChunks = (Chunks + Split - 1) / Split;
    // Rows of the state begin in different halves of the banks.
    static constexpr int kStride =
        kDepth + (kDepth * (int)sizeof(T) % 128 == 0 ? 64 : 0) / (int)sizeof(T);
    static constexpr int kSumStride = kPartUnits + 4;
    static constexpr int kBiases = kGates + (Cell == kGruCell ? 1 : 0);
    static constexpr bool kHasCell = Cell == kLstmCell || kEarly;

    static constexpr int kStateBytes = kRows * kStride * (int)sizeof(T);
    static constexpr int kSumsAt = (kEarly ? 3 : 2) * kStateBytes;
    static constexpr int kBiasAt = kSumsAt + Split * kGates * kRows * kSumStride * 4;
    static constexpr int kCellAt = kBiasAt + (Passes == 1 ? kBiases * kUnits * 4 : 0);
    static constexpr int kLengthsAt =
        kCellAt + (kHasCell && !CellInMemory ? kRows * kUnits * 4 : 0);
    static constexpr int kBarriersAt = kLengthsAt + (kRows * 4 + 15) / 16 * 16;
    static constexpr int kWeightsAt = kBarriersAt + 32;
    static constexpr int kShared = kWeightsAt + kPart * Split * kGates * Kept * 2 * kWarp * 16;

    static_assert(Passes == 1 || Held + Kept == 0, "weights stay only when a warp has one group");
    static_assert(Held + Kept <= kWarpChunks, "more weights than there are");
    static_assert(!Tensor || sizeof(T) == 2, "tensor cores multiply halves");

    // What a step needs besides the arguments.
    struct Place {
        int tile, rank, direction, first; // first: item
        bool backward;
        unsigned char* shared;
        int kinds[3]; // of functions: reading the arguments in every step would take longer

        __device__ __forceinline__ T* state(int copy) const
        { return (T*)(shared + copy * kStateBytes); }
        // Counts the bytes that arrive in a copy.
        __device__ __forceinline__ u32 barrier(int copy) const
        { return shared_address(shared + kBarriersAt + copy * 8); }
        __device__ __forceinline__ float* sums() const { return (float*)(shared + kSumsAt); }
        __device__ __forceinline__ float* bias() const { return (float*)(shared + kBiasAt); }
        __device__ __forceinline__ int* lengths() const { return (int*)(shared + kLengthsAt); }
        __device__ __forceinline__ float& cell(const Args& a, int item, int unit) const
        {
            int at = item * kUnits + unit;
            if constexpr (CellInMemory) return a.cell[(size_t)tile * kRows * kUnits + at];
            return ((float*)(shared + kCellAt))[at];
        }
    };

    // ---- weights

    // Eight registers' worth of weights, of 16 units and 32 depths of one gate: two products.
    static __device__ __forceinline__ uint4 packed(
        const Args& a, const Place& p, int group, int gate, int chunk, int half_chunk)
    {
        int all = (a.hidden + 15) / 16;
        group += p.rank * Groups;
        if (group >= all) return make_uint4(0, 0, 0, 0);
        size_t at = (((size_t)p.direction * all + group) * kGates + gate) * Chunks + chunk;
        return __ldg((const uint4*)a.r + (at * 2 + half_chunk) * kWarp + threadIdx.x % kWarp);
    }
    static __device__ __forceinline__ uint4& kept(
        const Place& p, int gate, int chunk, int half_chunk)
    {
        int warp = threadIdx.x / kWarp;
        int at = ((warp * kGates + gate) * Kept + chunk) * 2 + half_chunk;
        return ((uint4*)(p.shared + kWeightsAt))[at * kWarp + threadIdx.x % kWarp];
    }
    struct Weights {
        uint4 held[Held == 0 ? 1 : Held][kGates][2];
    };
    static __device__ __forceinline__ void load_weights(const Args& a, const Place& p, Weights& w)
    {
        if constexpr (Tensor && Held + Kept > 0) {
            int warp = threadIdx.x / kWarp, group = warp / Split;
#pragma unroll
            for (int i = 0; i < Held + Kept; ++i) {
                int chunk = warp % Split + i * Split;
#pragma unroll
                for (int g = 0; g < kGates; ++g)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        uint4 v = make_uint4(0, 0, 0, 0);
                        if (chunk < Chunks) v = packed(a, p, group, g, chunk, j);
                        if (i < Held) w.held[i < Held ? i : 0][g][j] = v;
                        else kept(p, g, i - Held, j) = v;
                    }
            }
        }
    }

    // ---- products with the state

    static __device__ __forceinline__ float& sum(
        const Place& p, int part, int gate, int item, int unit)
    { return p.sums()[((part * kGates + gate) * kRows + item) * kSumStride + unit]; }

    // Gates [From, To) of the groups of one pass, into `sums`.
    template <int From, int To>
    static __device__ __forceinline__ void multiply(
        const Args& a, const Place& p, const Weights& w, int copy, int pass)
    {
        if constexpr (Tensor) multiply_tensor<From, To>(a, p, w, copy, pass);
        else multiply_plain<From, To>(a, p, copy, pass);
    }

    // Adds the products of one chunk of the depth.
    template <int Count>
    static __device__ __forceinline__ void add_chunk(
        float (&acc)[Count][RowTiles][4], const T* state, int chunk, const uint4 (&r)[Count][2])
    {
        if (Chunks % Split != 0 && chunk >= Chunks) return;
        uint4 h[RowTiles];
#pragma unroll
        for (int n = 0; n < RowTiles; ++n)
            h[n] = *(const uint4*)(state + n * 8 * kStride + chunk * 32);
#pragma unroll
        for (int g = 0; g < Count; ++g)
#pragma unroll
            for (int n = 0; n < RowTiles; ++n) {
                recurrent_product<T>(acc[g][n], r[g][0], h[n].x, h[n].y);
                recurrent_product<T>(acc[g][n], r[g][1], h[n].z, h[n].w);
            }
    }

    template <int From, int To>
    static __device__ __forceinline__ void multiply_tensor(
        const Args& a, const Place& p, const Weights& w, int copy, int pass)
    {
        int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
        int group = pass * kPart + warp / Split;
        const T* state = p.state(copy) + lane / 4 * kStride + lane % 4 * 8;
        constexpr int kCount = To - From;
        float acc[kCount][RowTiles][4] = {};
        uint4 r[kCount][2];
#pragma unroll
        for (int i = 0; i < Held; ++i) {
#pragma unroll
            for (int g = 0; g < kCount * 2; ++g) r[g / 2][g % 2] = w.held[i][From + g / 2][g % 2];
            add_chunk(acc, state, warp % Split + i * Split, r);
        }
#pragma unroll 4
        for (int i = Held; i < Held + Kept; ++i) {
#pragma unroll
            for (int g = 0; g < kCount * 2; ++g)
                r[g / 2][g % 2] = kept(p, From + g / 2, i - Held, g % 2);
            add_chunk(acc, state, warp % Split + i * Split, r);
        }
#pragma unroll 2
        for (int i = Held + Kept; i < kWarpChunks; ++i) {
            int chunk = warp % Split + i * Split;
            if (chunk >= Chunks) break;
#pragma unroll
            for (int g = 0; g < kCount * 2; ++g)
                r[g / 2][g % 2] = packed(a, p, group, From + g / 2, chunk, g % 2);
            add_chunk(acc, state, chunk, r);
        }
        int unit = warp / Split * 16 + lane / 4, item = lane % 4 * 2;
#pragma unroll
        for (int g = From; g < To; ++g)
#pragma unroll
            for (int n = 0; n < RowTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sum(p, warp % Split, g, n * 8 + item + i % 2, unit + i / 2 * 8) =
                        acc[g - From][n][i];
    }

    // A thread adds up a part of one row of the weights with all items.
    template <int From, int To>
    static __device__ __forceinline__ void multiply_plain(
        const Args& a, const Place& p, int copy, int pass)
    {
        constexpr int kLines = (To - From) * kPartUnits;
        int share = (a.hidden + Split - 1) / Split;
        for (int line = threadIdx.x; line < kLines * Split; line += kThreads) {
            int part = line / kLines, gate = From + line % kLines / kPartUnits;
            int local = line % kPartUnits;
            int unit = p.rank * kUnits + pass * kPartUnits + local;
            float acc[kRows] = {};
            int last = unit < a.hidden ? min((part + 1) * share, a.hidden) : 0;
            const T* r = (const T*)a.r + (size_t)p.direction * a.r_direction +
                         (size_t)(gate * a.hidden + unit) * a.r_row;
            for (int k = part * share; k < last; ++k) {
                float weight = computed(__ldcg(r + (size_t)k * a.r_depth));
#pragma unroll
                for (int n = 0; n < kRows; ++n)
                    acc[n] += weight * computed(p.state(copy)[n * kStride + k]);
            }
#pragma unroll
            for (int n = 0; n < kRows; ++n) sum(p, part, gate, n, local) = acc[n];
        }
    }

    // ---- cells

    // The cells of a thread in one pass: the same in every step.
    struct CellPlace {
        int item, local, unit; // within the rows, within the part's units, of the layer
        int slot; // within the block's units
        bool valid; // exists, beyond the padding of rows and units

        __device__ __forceinline__ CellPlace(const Args& a, const Place& p, int pass, int i)
        {
            int at = threadIdx.x + i * kThreads;
            local = at % kPartUnits, item = at / kPartUnits;
            slot = pass * kPartUnits + local, unit = p.rank * kUnits + slot;
            valid = slot < kUnits && unit < a.hidden && p.first + item < a.batch;
        }
        // Threads of a warp agree.
        static __device__ __forceinline__ bool exists(int i)
        { return (int)threadIdx.x + i * kThreads < kRows * kPartUnits; }
    };
    // As stored: a conversion would wait for the load.
    struct InputSums {
        T v[kCells][kGates];
    };

    static __device__ __forceinline__ int time_of(const Place& p, int length, int step)
    { return step < length && p.backward ? length - 1 - step : step; }

    // The products with the inputs of one step, which arrive while the state is multiplied.
    static __device__ __forceinline__ void load_inputs(
        const Args& a, const Place& p, int pass, int step, InputSums& x)
    {
#pragma unroll
        for (int i = 0; i < kCells; ++i) {
            CellPlace c(a, p, pass, i);
            bool moves = CellPlace::exists(i) && c.valid && a.x;
            int length = moves ? p.lengths()[c.item] : 0;
            moves = moves && step < length;
            size_t at = (size_t)time_of(p, length, step) * a.x_time +
                        (size_t)(p.first + c.item) * a.x_item + p.direction * a.x_direction +
                        c.unit;
#pragma unroll
            for (int g = 0; g < kGates; ++g)
                x.v[i][g] =
                    moves ? __ldcg((const T*)a.x + at + (size_t)g * a.hidden) : Stored<T>::of(0.f);
        }
    }

    static __device__ __forceinline__ float total(const Place& p, const CellPlace& c, int gate)
    {
        float v = 0.f;
#pragma unroll
        for (int s = 0; s < Split; ++s) v += sum(p, s, gate, c.item, c.local);
        return v;
    }
    // The bias of a gate; a reset that acts late has the state's bias of the candidate in row 3.
    static __device__ __forceinline__ float load_bias(
        const Args& a, const Place& p, int unit, int row)
    {
        if (!a.bias || unit >= a.hidden) return 0.f;
        const float* of_input = a.bias + (size_t)p.direction * 2 * kGates * a.hidden + unit;
        const float* of_state = of_input + (size_t)kGates * a.hidden;
        bool apart = Cell == kGruCell && row >= 2;
        float v = row < kGates ? __ldcg(of_input + (size_t)row * a.hidden) : 0.f;
        if (!apart || row == 3) v += __ldcg(of_state + (size_t)min(row, kGates - 1) * a.hidden);
        return v;
    }
    static __device__ __forceinline__ float bias(
        const Args& a, const Place& p, const CellPlace& c, int row)
    {
        if constexpr (Passes > 1) return load_bias(a, p, c.unit, row);
        return p.bias()[row * kUnits + c.slot];
    }

    static __device__ __forceinline__ float apply(const Args& a, const Place& p, float x, int which)
    {
        if constexpr (Plain)
            return which == 0 && Cell != kSimpleCell ? gate_sigmoid(x) : gate_tanh(x);
        return gate_function(x, p.kinds[which], a.functions[p.direction][which]);
    }
    // Clips a gate's input and applies its function.
    static __device__ __forceinline__ float gate(const Args& a, const Place& p, float x, int which)
    {
        if (!Plain && a.clips) x = fminf(fmaxf(x, -a.clip), a.clip);
        return apply(a, p, x, which);
    }

    static __device__ __forceinline__ float lstm(
        const Args& a, const Place& p, const CellPlace& c, const float (&v)[kGates])
    {
        float before = p.cell(a, c.item, c.slot), peep[3] = {};
        if (!Plain && a.peepholes) {
            const float* from = a.peepholes + (size_t)p.direction * 3 * a.hidden + c.unit;
            for (int i = 0; i < 3; ++i) peep[i] = __ldcg(from + (size_t)i * a.hidden);
        }
        float input = gate(a, p, v[0] + peep[0] * before, 0);
        float forget = !Plain && a.coupled ? 1.f - input : gate(a, p, v[2] + peep[2] * before, 0);
        float after = forget * before + input * gate(a, p, v[3], 1);
        float output = gate(a, p, v[1] + peep[1] * after, 0);
        p.cell(a, c.item, c.slot) = after;
        return output * apply(a, p, after, 2);
    }

    // The new state of one cell; of a GRU whose reset acts early, in phase 0 the operand of the
    // candidate's product.
    template <int Phase>
    static __device__ __forceinline__ float advance(
        const Args& a, const Place& p, const CellPlace& c, const T (&x)[kGates], float h)
    {
        float v[kGates];
#pragma unroll
        for (int g = 0; g < kGates; ++g) v[g] = computed(x[g]) + bias(a, p, c, g);
        if constexpr (Cell == kSimpleCell) return gate(a, p, v[0] + total(p, c, 0), 0);
        if constexpr (Cell == kLstmCell) {
#pragma unroll
            for (int g = 0; g < kGates; ++g) v[g] += total(p, c, g);
            return lstm(a, p, c, v);
        }
        if constexpr (Cell == kGruCell) {
            float update = gate(a, p, v[0] + total(p, c, 0), 0);
            float reset = gate(a, p, v[1] + total(p, c, 1), 0);
            float next = gate(a, p, v[2] + reset * (total(p, c, 2) + bias(a, p, c, 3)), 1);
            return (1.f - update) * next + update * h;
        }
        if constexpr (kEarly && Phase == 0) {
            p.cell(a, c.item, c.slot) = gate(a, p, v[0] + total(p, c, 0), 0);
            return gate(a, p, v[1] + total(p, c, 1), 0) * h;
        }
        if constexpr (kEarly && Phase == 1) {
            float update = p.cell(a, c.item, c.slot);
            float next = gate(a, p, v[kGates - 1] + total(p, c, kGates - 1), 1);
            return (1.f - update) * next + update * h;
        }
        return 0.f;
    }

    // Writes a value into copy `copy` of the state of every block. Neighbouring threads have
    // neighbouring units: eight of them gather 16 bytes, and each sends these to another block.
    static __device__ __forceinline__ void publish(
        const Place& p, const CellPlace& c, int copy, float value)
    {
        T stored = Stored<T>::of(value);
        int lane = threadIdx.x % kWarp;
        bool inside = c.slot < kUnits && c.unit < kDepth;
        if constexpr (Blocks == 1) {
            if (inside) p.state(copy)[c.item * kStride + c.unit] = stored;
        } else if constexpr (sizeof(T) == 2) {
            u32 own = *(unsigned short*)&stored, other = __shfl_xor_sync(~0u, own, 1);
            u32 pair = lane & 1 ? own << 16 | other : other << 16 | own;
            other = __shfl_xor_sync(~0u, pair, 2);
            u32 low = lane & 2 ? other : pair, high = lane & 2 ? pair : other;
            u32 low2 = __shfl_xor_sync(~0u, low, 4), high2 = __shfl_xor_sync(~0u, high, 4);
            uint4 all =
                lane & 4 ? make_uint4(low2, high2, low, high) : make_uint4(low, high, low2, high2);
            u32 to = shared_address(p.state(copy) + c.item * kStride + c.unit / 8 * 8);
            if (inside)
#pragma unroll
                for (int peer = lane % 8; peer < Blocks; peer += 8)
                    Cluster::send(Cluster::at(to, peer), Cluster::at(p.barrier(copy), peer), all);
        } else {
            u32 to = shared_address(p.state(copy) + c.item * kStride + c.unit);
            if (inside)
#pragma unroll
                for (int peer = 0; peer < Blocks; ++peer)
                    Cluster::send(
                        Cluster::at(to, peer), Cluster::at(p.barrier(copy), peer), *(u32*)&stored);
        }
    }
    // Waits until all blocks have written a copy. A block writes a copy again only after it has
    // received what this block computed from it, so that no copy is overwritten while it is read.
    static __device__ __forceinline__ void receive(const Place& p, int copy, int step)
    {
        if constexpr (Blocks == 1) {
            __syncthreads();
        } else {
            constexpr int kUnitsOfAll = Blocks * kUnits < kDepth ? Blocks * kUnits : kDepth;
            if (threadIdx.x == 0)
                Cluster::expect(p.barrier(copy), kRows * kUnitsOfAll * (int)sizeof(T));
            Cluster::receive(p.barrier(copy), (copy == 2 ? step : step / 2) & 1);
        }
    }

    // All cells of one pass; `y` are the values that the sequence's output gets.
    template <int Phase>
    static __device__ __forceinline__ void cells(const Args& a, const Place& p, const InputSums& x,
        int pass, int step, int from, int to, float (&y)[kCells])
    {
#pragma unroll
        for (int i = 0; i < kCells; ++i) {
            if (!CellPlace::exists(i)) break;
            CellPlace c(a, p, pass, i);
            float h = 0.f;
            y[i] = 0.f;
            if (c.valid) {
                h = computed(p.state(from)[c.item * kStride + c.unit]);
                if (step < p.lengths()[c.item]) y[i] = h = advance<Phase>(a, p, c, x.v[i], h);
            }
            publish(p, c, to, h);
        }
    }

    static __device__ __forceinline__ void store_outputs(
        const Args& a, const Place& p, int pass, int step, const float (&y)[kCells])
    {
        if (!a.y) return;
#pragma unroll
        for (int i = 0; i < kCells; ++i) {
            if (!CellPlace::exists(i)) break;
            CellPlace c(a, p, pass, i);
            if (!c.valid) continue;
            size_t at = (size_t)time_of(p, p.lengths()[c.item], step) * a.y_time +
                        (size_t)(p.first + c.item) * a.y_item + p.direction * a.y_direction +
                        c.unit;
            ((T*)a.y)[at] = Stored<T>::of(y[i]);
        }
    }

    // ---- a step

    // One time step from copy `step % 2` of the state to the other. Returns false when the run is
    // preempted.
    template <class YieldPoint>
    static __device__ __forceinline__ bool run_step(const Args& a, const Place& p, const Weights& w,
        int step, int steps, InputSums& x, YieldPoint& yield_point)
    {
        int from = step % 2, to = 1 - from;
        float y[kCells];
        if constexpr (kEarly) {
            for (int pass = 0; pass < Passes; ++pass) {
                if (Passes > 1) load_inputs(a, p, pass, step, x);
                multiply<0, 2>(a, p, w, from, pass);
                __syncthreads();
                cells<0>(a, p, x, pass, step, from, 2, y);
                if (Passes > 1) __syncthreads();
            }
            receive(p, 2, step);
        }
        for (int pass = 0; pass < Passes; ++pass) {
            if (Passes > 1) load_inputs(a, p, pass, step, x);
            multiply<kEarly ? 2 : 0, kGates>(a, p, w, kEarly ? 2 : from, pass);
            __syncthreads();
            cells<1>(a, p, x, pass, step, from, to, y);
            if (pass + 1 == Passes) break;
            store_outputs(a, p, pass, step, y);
            __syncthreads();
        }
        // While the state is on its way.
        store_outputs(a, p, Passes - 1, step, y);
        if (Passes == 1 && step + 1 < steps) load_inputs(a, p, 0, step + 1, x);
        if (YieldPoint::kPreemptible && step % kCheckPeriod == kCheckPeriod - 2)
            yield_point.poll_for_block();
        receive(p, to, step);
        if (YieldPoint::kPreemptible && step % kCheckPeriod == kCheckPeriod - 1)
            return !is_preempted(yield_point);
        return true;
    }

    // ---- preemption

    // Steps between two looks at the epoch counter, which is loaded one step before.
    static constexpr int kCheckPeriod = 8;

    // Blocks of a cluster exit together: one that is preempted tells all before a common barrier.
    // The flag is read directly after it and written only every kCheckPeriod steps, so that all of
    // them read the same.
    template <class YieldPoint>
    static __device__ __forceinline__ bool is_preempted(const YieldPoint& yield_point)
    {
        if constexpr (!YieldPoint::kPreemptible) {
            return false;
        } else if constexpr (Blocks == 1) {
            return __any_sync(~0u, __syncthreads_or(yield_point.is_preempted()));
        } else {
            u32 flag = shared_address(yield_point.words + 1);
            if (yield_point.is_preempted())
                for (int peer = 0; peer < Blocks; ++peer)
                    Cluster::store(Cluster::at(flag, peer), 1u);
            Cluster::arrive();
            Cluster::wait();
            return yield_point.peer_is_preempted();
        }
    }

    // ---- beginning and end

    static __device__ __forceinline__ void clear_states(const Place& p)
    {
        for (int i = threadIdx.x; i < kSumsAt / 16; i += kThreads)
            ((uint4*)p.shared)[i] = make_uint4(0, 0, 0, 0);
    }

    static __device__ __forceinline__ void load_biases(const Args& a, const Place& p)
    {
        for (int i = threadIdx.x; Passes == 1 && i < kBiases * kUnits; i += kThreads)
            p.bias()[i] = load_bias(a, p, p.rank * kUnits + i % kUnits, i / kUnits);
    }

    // Returns the number of steps: the length of the longest item.
    static __device__ __forceinline__ int load_lengths(const Args& a, const Place& p)
    {
        for (int i = threadIdx.x; i < kRows; i += kThreads) {
            int item = p.first + i, length = item < a.batch ? a.time : 0;
            if (a.lengths && item < a.batch) {
                length = __ldcg(a.lengths + (size_t)item * a.length);
                if (length < 0 || length > a.time) {
                    *a.fault = 1;
                    length = min(max(length, 0), a.time);
                }
            }
            p.lengths()[i] = length;
        }
        __syncthreads();
        int steps = 0;
        for (int i = 0; i < kRows; ++i) steps = max(steps, p.lengths()[i]);
        return uniform(steps);
    }

    // The state of all units, and the cell states of the own ones.
    static __device__ __forceinline__ void load_states(const Args& a, const Place& p)
    {
        for (int i = threadIdx.x; a.h0 && i < kRows * a.hidden; i += kThreads) {
            int item = i / a.hidden, unit = i - item * a.hidden;
            if (p.first + item >= a.batch) break;
            p.state(0)[item * kStride + unit] =
                __ldcg((const T*)a.h0 + (size_t)p.direction * a.h0_direction +
                       (size_t)(p.first + item) * a.h0_item + (size_t)unit * a.h0_unit);
        }
        if constexpr (kHasCell)
            for (int i = threadIdx.x; i < kRows * kUnits; i += kThreads) {
                int item = i / kUnits, slot = i % kUnits, unit = p.rank * kUnits + slot;
                bool valid = a.c0 && p.first + item < a.batch && unit < a.hidden;
                p.cell(a, item, slot) =
                    valid ? computed(__ldcg((const T*)a.c0 + (size_t)p.direction * a.c0_direction +
                                            (size_t)(p.first + item) * a.c0_item +
                                            (size_t)unit * a.c0_unit))
                          : 0.f;
            }
    }

    static __device__ __forceinline__ void store_states(const Args& a, const Place& p, int copy)
    {
        for (int i = threadIdx.x; i < kRows * kUnits; i += kThreads) {
            int item = i / kUnits, slot = i % kUnits, unit = p.rank * kUnits + slot;
            if (p.first + item >= a.batch || unit >= a.hidden) continue;
            size_t at = (size_t)p.direction * a.state_direction +
                        (size_t)(p.first + item) * a.state_item + unit;
            if (a.y_h) ((T*)a.y_h)[at] = p.state(copy)[item * kStride + unit];
            if (a.y_c)
                ((T*)a.y_c)[at] = Stored<T>::of(Cell == kLstmCell ? p.cell(a, item, slot) : 0.f);
        }
    }

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char* shared,
        YieldPoint& yield_point, const Dependency& dependency)
    {
        int team = t / Blocks;
        Place p = {t, t % Blocks, team % a.directions, team / a.directions * kRows, false, shared};
        p.backward = a.backward >> p.direction & 1;
        for (int i = 0; i < 3; ++i) p.kinds[i] = a.functions[p.direction][i].kind;
        Weights w;
        load_weights(a, p, w);
        clear_states(p);
        if (Blocks > 1 && threadIdx.x < 3) Cluster::create(p.barrier(threadIdx.x));
        dependency.wait();
        yield_point.poll_for_block();
        // All blocks have started and have cleared their states before one writes to another.
        Cluster::arrive();
        Cluster::wait();
        if (is_preempted(yield_point)) return false;
        load_biases(a, p);
        load_states(a, p);
        int steps = load_lengths(a, p);
        InputSums x;
        if (Passes == 1) load_inputs(a, p, 0, 0, x);
        for (int step = 0; step < steps; ++step)
            if (!run_step(a, p, w, step, steps, x, yield_point)) return false;
        // No block ends while another may still send to it.
        Cluster::arrive();
        Cluster::wait();
        yield_point.finishing();
        store_states(a, p, steps % 2);
        float zeros[kCells] = {};
        for (int step = steps; step < a.time; ++step)
            for (int pass = 0; pass < Passes; ++pass) store_outputs(a, p, pass, step, zeros);
        return true;
    }
};

} // namespace tiles
