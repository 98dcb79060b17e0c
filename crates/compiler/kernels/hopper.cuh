// Convolution and matrix product on Hopper (sm_90a only): the arguments and results of conv.cuh,
// for work that is limited by arithmetic.
//
// One warp copies operands through tensor maps into a ring of stages in shared memory; warpgroups
// multiply from there. Neither waits for the other's instructions: a stage has a barrier that says
// it is full and one that says it is empty.
//
//   input  a box of BM rows and 64 of depth: rows of a matrix, or one filter tap of BM consecutive
//          output pixels (im2col). Outside of the image the copy engine writes zeros.
//   weight a box of BN rows and 64 of depth, in an order in which a thread's sums are eight
//          consecutive output channels. Channels beyond the last may be anything that can be read.
//
// Requirements: as in conv.cuh with eight channels per copy; weights padded to 32 rows.
#pragma once
#include "base.cuh"
#include "conv_load.cuh"
#include "wgmma.cuh"

namespace tiles {

struct HopperArgs {
    TensorMap input, weight;
    ConvArgs conv; // input, weight, pre, workspace and arrivals are not used
    int tiles; // output tiles
    int steps; // depth steps of a tile
};

// BM x BN outputs per tile by GM x GN warpgroups, `Stages` steps of depth 64 in shared memory,
// `Blocks` per SM. One warpgroup per tile means that two of them alternate: one multiplies while
// the other one writes its tile, and the tile of a best-effort launch is two output tiles.
// The activation is a parameter: the text of all of them, unrolled over a tile, takes four times as
// long to compile. -1 reads it from the arguments.
template <int BM_, int BN_, int GM_, int GN_, int Stages_, int Blocks_, bool Window_, int Act_ = -1>
struct HopperConfig {
    static constexpr int kAct = Act_;
    static constexpr int BM = BM_, BN = BN_, BK = 64, GM = GM_, GN = GN_;
    static constexpr int kStages = Stages_, kBlocks = Blocks_;
    static constexpr bool kWindow = Window_; // the input's map is one of taps
    static constexpr bool kAlternate = GM * GN == 1;
    static constexpr int kTiles = kAlternate ? 2 : 1; // output tiles of a launch's tile
    static constexpr int kConsumers = GM * GN * kTiles * 4, kReaders = GM * GN * 4; // warps
    static constexpr int kThreads = (kConsumers + 1) * kWarp;
    static constexpr int kRows = BM / GM / 64, kColumns = BN / GN; // of a warpgroup
    static constexpr int kInputBytes = BM * BK * 2, kStageBytes = (BM + BN) * BK * 2;
    // Stages, their barriers (full, empty) and words that say to exit; 1024 to align the ring. One
    // pair of barriers and one word more are for warpgroups that alternate.
    static constexpr int kBarriers = kStageBytes * kStages;
    static constexpr int kExits = kBarriers + (kStages + 1) * 16;
    static constexpr int kShared = kExits + (kStages + 1) * 4 + 1024;
    // Steps between two checks of the epoch: about a microsecond. Consumers then still multiply the
    // stages that are full: two to three more.
    static constexpr int kWatchPeriod = BM * BN >= 128 * 256 ? 1 : 2;
    static_assert(BM % (GM * 64) == 0 && BN % (GN * 32) == 0, "whole products");
    static_assert(kStageBytes % 1024 == 0 && kInputBytes % 1024 == 0, "the swizzle repeats");
};

// The ring as one role sees it.
template <class C>
struct Ring {
    u32 base;
    int stage;
    u32 parity;

    __device__ __forceinline__ explicit Ring(u32 at)
        : base(at)
        , stage(0)
        , parity(0)
    {
    }
    __device__ __forceinline__ u32 full() const { return base + C::kBarriers + stage * 16; }
    __device__ __forceinline__ u32 empty() const { return full() + 8; }
    __device__ __forceinline__ u32 data() const { return base + stage * C::kStageBytes; }
    __device__ __forceinline__ u32 exits() const { return base + C::kExits + stage * 4; }
    __device__ __forceinline__ void advance()
    {
        if (++stage == C::kStages) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int steps)
    {
        stage += steps;
        parity ^= stage / C::kStages & 1;
        stage %= C::kStages;
    }
    // The barrier at which a warpgroup waits for its turn, and the word that the second one reads.
    __device__ __forceinline__ u32 turn(int group) const
    { return base + C::kBarriers + C::kStages * 16 + group * 8; }
    __device__ __forceinline__ u32 second_exits() const
    { return base + C::kExits + C::kStages * 4; }
};

__device__ __forceinline__ void set_word(u32 at, u32 value)
{ asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory"); }
__device__ __forceinline__ u32 get_word(u32 at)
{
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at) : "memory");
    return value;
}

template <class C>
struct OutputTile {
    int m, n;
    __device__ __forceinline__ OutputTile(const HopperArgs& a, int tile)
    {
        int column;
        m = a.conv.by_tiles_n.split(tile, column) * C::BM;
        n = column * C::BN;
    }
};

// The output tiles of a block. Real time: a grid with fewer blocks than tiles computes several per
// block, and copies of the next tile overlap the epilogue. Best effort: those of one launch's tile,
// so that a preemption loses no more.
struct TileRange {
    int first, step, end;
    template <class C, class YieldPoint>
    static __device__ __forceinline__ TileRange of(const HopperArgs& a, int number)
    {
        if (!YieldPoint::kPreemptible) return {number, (int)gridDim.x, a.tiles};
        return {number * C::kTiles, 1, min((number + 1) * C::kTiles, a.tiles)};
    }
};

// Copies the stages of tile after tile. One thread.
template <class C, class YieldPoint, class Dependency>
struct Producer {
    const HopperArgs& a;
    const YieldPoint& yield_point;
    const Dependency& dependency;
    Ring<C> ring;
    EpochCounter seen;

    __device__ __forceinline__ void poll()
    {
        if constexpr (YieldPoint::kPreemptible)
            seen = load_epoch_counter(yield_point.epoch_counter);
    }
    __device__ __forceinline__ bool is_preempted() const
    { return YieldPoint::kPreemptible && seen.counter > seen.epoch; }

    // The depth of one tile as the copies see it.
    struct Walk {
        int x, y, image; // first input pixel, or the row of a matrix
        int channel, ky, kx, depth;

        __device__ __forceinline__ Walk(const ConvArgs& c, int m)
            : x(0)
            , y(m)
            , image(0)
            , channel(0)
            , ky(0)
            , kx(0)
            , depth(0)
        {
            if constexpr (C::kWindow) {
                Corner corner(c, m);
                x = corner.x, y = corner.y, image = corner.image;
            }
        }
        // Depth of the weights at this step.
        __device__ __forceinline__ int at() const { return depth + channel; }
        __device__ __forceinline__ void advance(const ConvArgs& c)
        {
            channel += C::BK;
            if (!C::kWindow || channel < c.in_c) return;
            channel = 0, depth += c.in_c;
            if (++kx == c.ker_w) kx = 0, ++ky;
        }
    };

    __device__ __forceinline__ void copy_input(const Walk& w, const Ring<C>& r) const
    {
        if constexpr (C::kWindow)
            copy_pixels(r.data(), a.input, r.full(), w.channel, w.x, w.y, w.image,
                w.kx * a.conv.dil_w, w.ky * a.conv.dil_h);
        else
            copy_box(r.data(), a.input, r.full(), w.channel, w.y);
    }
    __device__ __forceinline__ void copy_weight(int depth, int n, const Ring<C>& r) const
    { copy_box5(r.data() + C::kInputBytes, a.weight, r.full(), depth, n / 32); }

    // Weights of the first stages do not depend on the previous step.
    __device__ __forceinline__ int start(int tile)
    {
        OutputTile<C> t(a, tile);
        Walk w(a.conv, t.m), v = w;
        Ring<C> first = ring;
        int steps = min(a.steps, C::kStages);
        for (int s = 0; s < steps; ++s, first.advance(), w.advance(a.conv)) {
            barrier_expect(first.full(), C::kStageBytes);
            copy_weight(w.at(), t.n, first);
        }
        dependency.wait();
        poll();
        first = ring;
        for (int s = 0; s < steps; ++s, first.advance(), v.advance(a.conv))
            copy_input(v, first);
        return steps;
    }

    // One output tile, of which `started` stages are copied. False when the run is preempted:
    // consumers are told so at a stage of their own.
    __device__ __forceinline__ bool copy_tile(int tile, int started)
    {
        OutputTile<C> t(a, tile);
        Walk w(a.conv, t.m);
        for (int s = 0; s < a.steps; ++s, ring.advance(), w.advance(a.conv)) {
            if (s < started) continue;
            barrier_wait(ring.empty(), ring.parity ^ 1);
            if (YieldPoint::kPreemptible && s > 0 && s % C::kWatchPeriod == 0) {
                if (is_preempted()) return exit();
                poll();
            }
            barrier_expect(ring.full(), C::kStageBytes);
            copy_input(w, ring);
            copy_weight(w.at(), t.n, ring);
        }
        if constexpr (YieldPoint::kPreemptible) {
            // The tile's last stage, without data, says whether to write it.
            barrier_wait(ring.empty(), ring.parity ^ 1);
            if (is_preempted()) return exit();
            barrier_arrive(ring.full());
            ring.advance();
        }
        return true;
    }
    __device__ __forceinline__ bool exit() const
    {
        set_word(ring.exits(), 1);
        barrier_arrive(ring.full());
        return false;
    }

    __device__ __forceinline__ bool run(const TileRange& tiles)
    {
        int started = start(tiles.first);
#pragma unroll 1
        for (int tile = tiles.first; tile < tiles.end; tile += tiles.step, started = 0)
            if (!copy_tile(tile, started)) return false;
        return true;
    }
};

template <class C>
struct HopperSums {
    float v[C::kRows][C::kColumns / 2];
};

// A thread's part of the output: two rows of every 64, and eight consecutive channels of every 32.
template <class C>
struct ThreadPlace {
    int m, n;
    // The thread's number is read again: values derived from it would occupy registers in the main
    // loop.
    __device__ __forceinline__ explicit ThreadPlace(const OutputTile<C>& t)
    {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        int lane = thread % kWarp, warp = thread / kWarp, group = C::kAlternate ? 0 : warp / 4;
        m = t.m + group / C::GN * (C::BM / C::GM) + warp % 4 * 16 + lane / 4;
        n = t.n + group % C::GN * C::kColumns + lane % 4 * 8;
    }
};

// Sums start with bias and residual, whose loads then overlap the copies of the first stages.
template <class C>
__device__ __forceinline__ void hopper_begin(
    const ConvArgs& a, const OutputTile<C>& t, HopperSums<C>& sums)
{
    ThreadPlace<C> p(t);
#pragma unroll
    for (int g = 0; g < C::kColumns / 32; ++g) {
        int column = p.n + g * 32;
        float bias[8] = {};
        if (a.bias && column < a.out_c) add_floats(bias, a.bias + column);
#pragma unroll
        for (int i = 0; i < C::kRows; ++i)
#pragma unroll
            for (int j = 0; j < 16; ++j) sums.v[i][g * 16 + j] = bias[j / 4 * 2 + j % 2];
    }
    if (!a.residual) return;
#pragma unroll
    for (int i = 0; i < C::kRows * 2; ++i) {
        int row = p.m + i / 2 * 64 + i % 2 * 8;
        if (row >= a.rows) break;
        const half* from = a.residual + (size_t)row * a.residual_stride + p.n;
#pragma unroll
        for (int g = 0; g < C::kColumns / 32; ++g) {
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (p.n + g * 32 < a.out_c) raw = load_activations(from + g * 32);
            float v[8];
            unpack(raw, v);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                sums.v[i / 2][g * 16 + j / 2 * 4 + i % 2 * 2 + j % 2] += v[j];
        }
    }
}

template <class C>
__device__ __forceinline__ void hopper_emit(
    const ConvArgs& a, const OutputTile<C>& t, const HopperSums<C>& sums)
{
    ThreadPlace<C> p(t);
#pragma unroll
    for (int i = 0; i < C::kRows * 2; ++i) {
        int row = p.m + i / 2 * 64 + i % 2 * 8;
        if (row >= a.rows) break;
        half* to = a.output + (size_t)row * a.out_stride + p.n;
#pragma unroll
        for (int g = 0; g < C::kColumns / 32; ++g) {
            if (p.n + g * 32 >= a.out_c) break;
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j)
                v[j] = sums.v[i / 2][g * 16 + j / 2 * 4 + i % 2 * 2 + j % 2];
            if constexpr (C::kAct < 0) activate(v, a.act);
            else activate_all<C::kAct>(v);
            *(uint4*)(to + g * 32) = pack(v);
        }
    }
}

// How halves are multiplied: sums, the instruction, and what comes before and after. `ahead` loads
// what the end of a tile needs, while the tile before it ends.
template <class C>
struct HopperMethod {
    using Sums = HopperSums<C>;
    struct Ahead {};
    static __device__ __forceinline__ Ahead ahead(const ConvArgs&, const OutputTile<C>&)
    { return {}; }
    static __device__ __forceinline__ void begin(
        const ConvArgs& a, const OutputTile<C>& t, Sums& sums)
    { hopper_begin<C>(a, t, sums); }
    static __device__ __forceinline__ void issue(Sums& sums, int i, u64 x, u64 w)
    { Products<C::kColumns>::issue(sums.v[i], x, w); }
    static __device__ __forceinline__ void emit(
        const ConvArgs& a, const OutputTile<C>& t, const Sums& sums, const Ahead&)
    { hopper_emit<C>(a, t, sums); }
};

// Multiplies the stages of one tile; false when the run is preempted. `own` is the warpgroup's
// number where they alternate.
template <class C, class YieldPoint, class Method>
__device__ __forceinline__ bool multiply_tile(
    const HopperArgs& a, Ring<C>& ring, int own, const Method& method, typename Method::Sums& sums)
{
    int group = C::kAlternate ? 0 : threadIdx.x / (4 * kWarp);
    u32 x = group / C::GN * (C::BM / C::GM) * 128;
    u32 w = C::kInputBytes + group % C::GN * C::kColumns * 128;
    bool releases = threadIdx.x % kWarp == 0;
    auto exits = [&] { return YieldPoint::kPreemptible && get_word(ring.exits()) != 0; };
    auto issue = [&] {
        u64 xs = operand(ring.data() + x), ws = operand(ring.data() + w);
        products_begin();
#pragma unroll
        for (int k = 0; k < C::BK / 16; ++k)
#pragma unroll
            for (int i = 0; i < C::kRows; ++i)
                method.issue(sums, i, xs + k * 2 + i * (64 * 128 >> 4), ws + k * 2);
        products_commit();
    };
    // The producer always copies the first stage.
    barrier_wait(ring.full(), ring.parity);
    issue();
    bool leave = false;
    u32 before = ring.empty();
    ring.advance();
    for (int s = 1; s < a.steps; ++s, ring.advance()) {
        barrier_wait(ring.full(), ring.parity);
        if (exits()) {
            leave = true;
            break;
        }
        issue();
        // The products of the previous step are done, and its stage is free.
        products_wait<1>();
        if (releases) barrier_arrive(before);
        before = ring.empty();
    }
    if (C::kAlternate && !YieldPoint::kPreemptible && releases) barrier_arrive(ring.turn(own ^ 1));
    products_wait<0>();
    if (releases) barrier_arrive(before);
    if constexpr (YieldPoint::kPreemptible) {
        if (!leave) {
            barrier_wait(ring.full(), ring.parity);
            leave = exits();
            if (releases) barrier_arrive(ring.empty());
            ring.advance();
        }
        if (C::kAlternate && releases) {
            if (leave) set_word(ring.second_exits(), 1);
            barrier_arrive(ring.turn(own ^ 1));
        }
    }
    return !leave;
}

// Multiplies and writes the tiles of one warpgroup, or of those that share its tiles. Warpgroups
// that alternate take turns: a barrier's parity tells only a phase from the one before it, so no
// warpgroup may wait for a stage before all stages of the other one's tile have been full.
template <class C, class YieldPoint, class Method>
__device__ __forceinline__ bool consume(const HopperArgs& a, const TileRange& tiles, u32 base,
    YieldPoint& yield_point, const Method& method)
{
    Ring<C> ring(base);
    int own = C::kAlternate ? uniform(threadIdx.x / (4 * kWarp)) : 0;
    int stages = a.steps + YieldPoint::kPreemptible; // of a tile
    if (own) ring.skip(stages);
    u32 turn = 0;
    int tile = tiles.first + own * tiles.step, step = tiles.step * C::kTiles;
    typename Method::Ahead ahead = method.ahead(a.conv, OutputTile<C>(a, tile));
    for (; tile < tiles.end; tile += step, ++turn) {
        OutputTile<C> t(a, tile);
        typename Method::Sums sums;
        method.begin(a.conv, t, sums);
        if (C::kAlternate && turn + own > 0) barrier_wait(ring.turn(own), (turn + own + 1) & 1);
        if (YieldPoint::kPreemptible && own && get_word(ring.second_exits())) return false;
        if (!multiply_tile<C, YieldPoint>(a, ring, own, method, sums)) return false;
        yield_point.finishing();
        typename Method::Ahead own_ahead = ahead;
        if (!YieldPoint::kPreemptible) ahead = method.ahead(a.conv, OutputTile<C>(a, tile + step));
        method.emit(a.conv, t, sums, own_ahead);
        if (YieldPoint::kPreemptible) break; // it has no other
        if (C::kAlternate) ring.skip(stages);
    }
    return true;
}

template <class C, class YieldPoint, class Dependency, class Method>
__device__ __forceinline__ bool hopper_tile(const HopperArgs& a, int number, unsigned char* shared,
    YieldPoint& yield_point, const Dependency& dependency, const Method& method)
{
    u32 base = (shared_address(shared) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        prefetch_map(a.input);
        prefetch_map(a.weight);
        for (int s = 0; s <= C::kStages; ++s) {
            u32 full = base + C::kBarriers + s * 16;
            barrier_init(full, s < C::kStages ? 1 : C::kReaders);
            barrier_init(full + 8, C::kReaders);
            set_word(base + C::kExits + s * 4, 0);
        }
        barrier_publish();
    }
    __syncthreads();
    TileRange tiles = TileRange::of<C, YieldPoint>(a, number);
    bool stay = true;
    if (uniform(threadIdx.x / kWarp) == C::kConsumers) {
        if (threadIdx.x % kWarp == 0) {
            Producer<C, YieldPoint, Dependency> producer = {
                a, yield_point, dependency, Ring<C>(base), {0, 0}};
            stay = producer.run(tiles);
        }
        __syncwarp();
    } else {
        // The residual is read and the output is written when the previous step has ended.
        dependency.wait();
        stay = consume<C>(a, tiles, base, yield_point, method);
    }
    if constexpr (YieldPoint::kPreemptible) {
        // Barriers end before the next tile initializes them.
        __syncthreads();
        if (threadIdx.x == 0)
            for (int s = 0; s < C::kStages * 2 + 2; ++s) barrier_end(base + C::kBarriers + s * 8);
    }
    return stay;
}

template <class C>
struct HopperConv {
    using Args = HopperArgs;
    using Config = C;
    static constexpr int kThreads = C::kThreads, kShared = C::kShared, kBlocks = C::kBlocks;
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(const Args& a, int t, unsigned char* shared,
        YieldPoint& yield_point, const Dependency& dependency)
    { return hopper_tile<C>(a, t, shared, yield_point, dependency, HopperMethod<C>()); }
};

} // namespace tiles
