// A step of a network: its arguments, the variants that could compute it, and its reference.
#pragma once
#include "reference.cuh"
#include "wrap.cuh"

namespace harness {

enum class Kind {
    Conv,
    Depthwise,
    MaxPool,
    AveragePool,
    GlobalPool,
    Norm,
    Embed,
    Attention,
    Image
};

struct Step {
    Kind kind;
    std::string name;
    int batch = 1, rows = 0, columns = 0, stride = 0; // the output as a matrix
    bool pre = false; // Conv: normalizes its input first
    ConvArgs conv = {};
    DepthwiseArgs depthwise = {};
    PoolArgs pool = {};
    GlobalPoolArgs global = {};
    NormArgs norm = {};
    AttentionArgs attention = {};
    ImageArgs image = {};
    double flops = 0, weight_bytes = 0, bytes = 0; // bytes: each operand once, weights included

    // Steps with the same key are the same problem.
    std::string key() const
    {
        if (kind == Kind::Conv)
            return format("conv b%d %dx%dx%d/%d->%d/%d k%dx%d s%d p%d%d d%d%s%s a%d", batch,
                conv.in_h, conv.in_w, conv.in_c, conv.in_stride, conv.out_c, conv.out_stride,
                conv.ker_h, conv.ker_w, conv.stride_h, conv.pad_h, conv.pad_w, conv.dil_h,
                pre ? " pre" : "", conv.residual ? " res" : "", conv.act);
        if (kind == Kind::Depthwise)
            return format("depthwise b%d %dx%d x%d s%d", batch, depthwise.in_h, depthwise.in_w,
                columns, depthwise.stride_h);
        return format("%s b%d rows%d columns%d", name.c_str(), batch, rows, columns);
    }
};

// ---- convolution variants ----------------------------------------------------------------------

struct ConvKernel {
    const char* name;
    int bm, bn, bk, wk, threads, shared, loop, vec;
    bool pre;
    const void* rt;
};

template <class C>
ConvKernel conv_kernel(const char* name)
{
    ConvKernel k = {name, C::BM, C::BN, C::BK, C::WK, C::kThreads, C::kShared, C::kAddressing,
        C::kVec, C::kPre, (const void*)rt<Conv<C>>};
    CHECK(cudaFuncSetAttribute(k.rt, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared));
    CHECK(cudaFuncSetAttribute(k.rt, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    return k;
}

template <int BM, int BN, int BK, int WM, int WN, int WK, int S>
void add_plain(std::vector<ConvKernel>& to, const char* name)
{
    to.push_back(conv_kernel<ConvConfig<BM, BN, BK, WM, WN, WK, S, kPoint>>(name));
    to.push_back(conv_kernel<ConvConfig<BM, BN, BK, WM, WN, WK, S, kTaps>>(name));
}
template <int BM, int BN, int BK, int WM, int WN, int WK, int S>
void add_pre(std::vector<ConvKernel>& to, const char* name)
{ to.push_back(conv_kernel<ConvConfig<BM, BN, BK, WM, WN, WK, S, kPoint, 8, true>>(name)); }
template <int BM, int BN, int BK, int WM, int WN, int WK, int S, int Vec>
void add_general(std::vector<ConvKernel>& to, const char* name)
{ to.push_back(conv_kernel<ConvConfig<BM, BN, BK, WM, WN, WK, S, kGeneral, Vec>>(name)); }

inline std::vector<ConvKernel> make_conv_kernels()
{
    std::vector<ConvKernel> k;
    add_plain<64, 64, 64, 2, 2, 1, 4>(k, "64x64x64");
    add_plain<128, 128, 32, 2, 4, 1, 4>(k, "128x128x32");
    add_plain<128, 128, 64, 2, 4, 1, 3>(k, "128x128x64");
    add_plain<64, 128, 64, 2, 2, 1, 3>(k, "64x128x64");
#ifdef HARNESS_CHECK // a short build
    add_plain<32, 32, 64, 1, 1, 4, 6>(k, "32x32x64k4");
    add_general<64, 64, 64, 2, 2, 1, 4, 8>(k, "64x64x64g");
    add_general<32, 32, 64, 1, 1, 4, 6, 8>(k, "32x32x64k4g");
#else
    add_plain<16, 64, 64, 1, 1, 4, 6>(k, "16x64x64k4");
    add_plain<16, 64, 64, 1, 4, 1, 6>(k, "16x64x64");
    add_plain<16, 128, 64, 1, 2, 2, 4>(k, "16x128x64k2");
    add_plain<32, 32, 64, 1, 1, 4, 6>(k, "32x32x64k4");
    add_plain<32, 64, 64, 1, 2, 2, 4>(k, "32x64x64k2");
    add_plain<64, 32, 64, 2, 1, 2, 4>(k, "64x32x64k2");
    add_plain<64, 64, 64, 2, 2, 2, 4>(k, "64x64x64k2");
    add_plain<128, 64, 64, 2, 2, 1, 3>(k, "128x64x64");
    add_plain<128, 32, 64, 4, 1, 1, 3>(k, "128x32x64");
    add_plain<128, 256, 32, 2, 4, 1, 4>(k, "128x256x32");
    add_plain<256, 64, 32, 4, 2, 1, 4>(k, "256x64x32");
    add_plain<256, 128, 32, 4, 2, 1, 4>(k, "256x128x32");
    add_pre<16, 64, 64, 1, 1, 4, 6>(k, "16x64x64k4n");
    add_pre<32, 32, 64, 1, 1, 4, 6>(k, "32x32x64k4n");
    add_pre<32, 64, 64, 1, 2, 2, 4>(k, "32x64x64k2n");
    add_pre<64, 64, 64, 2, 2, 1, 4>(k, "64x64x64n");
    add_pre<64, 128, 64, 2, 2, 1, 3>(k, "64x128x64n");
    add_pre<128, 128, 32, 2, 4, 1, 4>(k, "128x128x32n");
    add_general<64, 64, 32, 2, 2, 1, 4, 4>(k, "64x64x32i");
    add_general<64, 32, 32, 2, 2, 1, 4, 4>(k, "64x32x32i");
    add_general<128, 64, 32, 4, 2, 1, 4, 4>(k, "128x64x32i");
    add_general<64, 64, 64, 2, 2, 1, 4, 8>(k, "64x64x64g");
    add_general<32, 32, 64, 1, 1, 4, 6, 8>(k, "32x32x64k4g");
#endif
    return k;
}

inline const std::vector<ConvKernel>& conv_kernels()
{
    static const std::vector<ConvKernel> all = make_conv_kernels();
    return all;
}

// Whether a kernel can load the input of a layer; a general kernel is timed only if no other fits.
inline bool can_load(const ConvKernel& k, const ConvArgs& a)
{
    bool point = a.ker_h == 1 && a.ker_w == 1 && a.pad_h == 0 && a.pad_w == 0;
    bool taps = a.in_c % 64 == 0 && a.dil_h == 1 && a.dil_w == 1;
    if (k.loop == kPoint) return point;
    if (k.loop == kTaps) return !point && taps;
    return !point && !taps;
}

struct Variant {
    // Conv: index into conv_kernels(); Depthwise: pixels per thread; Attention: warps
    // that divide the queries.
    int kernel = -1;
    int splits = 1, reduce = kWhole;

    std::string name(Kind kind) const
    {
        if (kind == Kind::Depthwise) return format("wide%d", kernel);
        if (kind == Kind::Attention) return format("warps%d", kernel);
        if (kind != Kind::Conv) return "only";
        const char* how = reduce == kCluster ? "c" : "w";
        return conv_kernels()[kernel].name +
               (splits > 1 ? format("/%s%d", how, splits) : std::string());
    }
};

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

constexpr size_t kWorkspaceFloats = 32 << 20;
constexpr int kArrivals = 1 << 16;

struct Scratch {
    float* workspace = device_alloc<float>(kWorkspaceFloats);
    u32* arrivals = device_alloc<u32>(kArrivals);
    Scratch() { CHECK(cudaMemset(arrivals, 0, kArrivals * 4)); }
    static Scratch& get()
    {
        static Scratch s;
        return s;
    }
};

// The arguments that depend on the variant; returns the number of tiles.
inline int specialize(ConvArgs& a, const Variant& v)
{
    const ConvKernel& k = conv_kernels()[v.kernel];
    int tiles_n = ceil_div(a.out_c, k.bn);
    a.splits = v.splits, a.reduce = v.reduce;
    a.by_splits = FastDiv::of(v.splits), a.by_tiles_n = FastDiv::of(tiles_n);
    a.workspace = Scratch::get().workspace, a.arrivals = Scratch::get().arrivals;
    return ceil_div(a.rows, k.bm) * tiles_n * v.splits;
}

inline Launch conv_launch(const Step& s, const Variant& v)
{
    Launch l;
    ConvArgs a = s.conv;
    const ConvKernel& k = conv_kernels()[v.kernel];
    l.grid = specialize(a, v);
    l.kernel = k.rt, l.threads = k.threads, l.shared = k.shared;
    l.cluster = v.reduce == kCluster ? v.splits : 1;
    l.set(a);
    return l;
}

// Shapes worth timing: tiles not much larger than the problem, splits only while SMs would idle.
inline std::vector<Variant> conv_variants(const Step& s)
{
    std::vector<Variant> out;
    const ConvArgs& a = s.conv;
    int vec = a.in_c % 8 ? 4 : 8, sms = multiprocessors();
    for (int i = 0; i < (int)conv_kernels().size(); ++i) {
        const ConvKernel& k = conv_kernels()[i];
        if (k.vec != vec || k.pre != s.pre || !can_load(k, a)) continue;
        int tiles = ceil_div(a.rows, k.bm) * ceil_div(a.out_c, k.bn),
            steps = ceil_div(a.depth, k.bk);
        double waste = (double)tiles * k.bm * k.bn / ((double)a.rows * a.out_c);
        if (waste > 2.5 && k.bm * k.bn > 16 * 64 && !(a.rows < 16 && k.bm == 16)) continue;
        if (vec == 8 && (tiles > 48 * sms || (tiles > 8 * sms && k.bm * k.bn <= 2048))) continue;
        out.push_back({i, 1, kWhole});
        for (int splits : {2, 3, 4, 6, 8, 12, 16}) {
            if (tiles * splits > 4 * sms || steps < splits * 2) break;
            out.push_back({i, splits, kCluster});
            bool fits = (size_t)tiles * splits * k.wk * k.bm * (k.bn + 8) <= kWorkspaceFloats &&
                        tiles <= kArrivals;
            if (fits && (splits == 2 || splits == 4 || splits == 8 || splits == 16))
                out.push_back({i, splits, kWorkspace});
        }
    }
    return out;
}

// ---- the other operators -----------------------------------------------------------------------

template <class Op>
Launch op_launch(const typename Op::Args& a, int tiles)
{
    Launch l;
    l.kernel = (const void*)rt<Op>, l.grid = tiles, l.threads = Op::kThreads,
    l.shared = Op::kShared;
    CHECK(cudaFuncSetAttribute(l.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Op::kShared));
    l.set(a);
    return l;
}

inline Launch depthwise_launch(const Step& s, int wide)
{
    DepthwiseArgs a = s.depthwise;
    int groups = ceil_div(a.out_w, wide), chunks = s.columns / 8;
    a.by_groups = FastDiv::of(groups);
    a.items = s.batch * (int)a.by_out_h.divisor * groups * chunks;
    int tiles = ceil_div(a.items, 128);
    bool three = a.ker_h == 3 && a.ker_w == 3 && a.dil_h == 1 && a.dil_w == 1;
    if (three && a.stride_h == 1)
        return wide == 4   ? op_launch<Depthwise<3, 1, 4>>(a, tiles)
               : wide == 2 ? op_launch<Depthwise<3, 1, 2>>(a, tiles)
                           : op_launch<Depthwise<3, 1, 1>>(a, tiles);
    if (three && a.stride_h == 2)
        return wide == 4   ? op_launch<Depthwise<3, 2, 4>>(a, tiles)
               : wide == 2 ? op_launch<Depthwise<3, 2, 2>>(a, tiles)
                           : op_launch<Depthwise<3, 2, 1>>(a, tiles);
    return op_launch<Depthwise<0, 0, 1>>(a, tiles);
}

// Self-attention with heads of 64 that are adjacent in a token's row. The mask, if any, has one
// row of keys per sequence.
inline AttentionArgs self_attention(const half* query, const half* key, const half* value,
                                    half* output, const half* mask, int batch, int tokens,
                                    int heads, int stride, int out_stride)
{
    AttentionArgs a = {};
    a.query = query, a.key = key, a.value = value, a.output = output, a.bias = mask;
    a.queries = a.keys = a.split_keys = tokens;
    a.query_row = a.key_row = a.value_row = stride, a.output_row = out_stride;
    a.query_outer[2] = a.key_outer[2] = a.value_outer[2] = tokens * stride;
    a.output_outer[2] = tokens * out_stride;
    a.query_outer[3] = a.key_outer[3] = a.value_outer[3] = a.output_outer[3] = 64;
    a.bias_column = 1, a.bias_outer[2] = tokens;
    a.scale = 0.125f * 1.4426950408889634f;
    a.splits = 1, a.by_splits = FastDiv::of(1);
    a.by_outer[0] = FastDiv::of(1), a.by_outer[1] = FastDiv::of(batch);
    a.by_outer[2] = FastDiv::of(heads);
    return a;
}

template <int Bias>
Launch attention_launch(AttentionArgs a, int warps)
{
    int blocks = ceil_div(a.queries, warps * 16);
    a.by_blocks = FastDiv::of(blocks);
    int tiles = a.by_outer[1].divisor * a.by_outer[2].divisor * blocks;
    return warps == 1   ? op_launch<Attention<64, 64, 1, 4, 1, 64, Bias>>(a, tiles)
           : warps == 2 ? op_launch<Attention<64, 64, 2, 2, 1, 64, Bias>>(a, tiles)
                        : op_launch<Attention<64, 64, 4, 1, 1, 64, Bias>>(a, tiles);
}
inline Launch attention_launch(const Step& s, int warps)
{
    return s.attention.bias ? attention_launch<kHalfPairs>(s.attention, warps)
                            : attention_launch<kNoBias>(s.attention, warps);
}

inline Launch prepare(const Step& s, const Variant& v)
{
    switch (s.kind) {
    case Kind::Conv: return conv_launch(s, v);
    case Kind::Depthwise: return depthwise_launch(s, v.kernel);
    case Kind::MaxPool:
        return op_launch<Pool<HalfWindow<true>>>(s.pool, ceil_div(s.pool.items, 128));
    case Kind::AveragePool:
        return op_launch<Pool<HalfWindow<false>>>(s.pool, ceil_div(s.pool.items, 128));
    case Kind::GlobalPool:
        return op_launch<GlobalPool<half, half>>(
            s.global, s.batch * (int)s.global.by_groups.divisor);
    case Kind::Norm: return op_launch<LayerNorm<false, 3>>(s.norm, ceil_div(s.rows, 4));
    case Kind::Embed: return op_launch<LayerNorm<true, 3>>(s.norm, ceil_div(s.rows, 4));
    case Kind::Attention: return attention_launch(s, v.kernel);
    case Kind::Image: return op_launch<Image>(s.image, ceil_div(s.image.pixels, 128));
    }
    return {};
}

inline std::vector<Variant> variants(const Step& s)
{
    if (s.kind == Kind::Conv) return conv_variants(s);
    if (s.kind == Kind::Depthwise || s.kind == Kind::Attention) return {{1}, {2}, {4}};
    return {{0}};
}

inline half* output_of(const Step& s)
{
    switch (s.kind) {
    case Kind::Conv: return s.conv.output;
    case Kind::Depthwise: return s.depthwise.output;
    case Kind::MaxPool:
    case Kind::AveragePool: return s.pool.output;
    case Kind::GlobalPool: return (half*)s.global.output;
    case Kind::Norm:
    case Kind::Embed: return s.norm.output;
    case Kind::Attention: return s.attention.output;
    case Kind::Image: return s.image.output;
    }
    return nullptr;
}

// Computes the reference of the step into `out` (rows of `stride` values).
template <class T>
void reference(const Step& s, T* out, int stride)
{
    size_t count = (size_t)s.rows * s.columns;
    u32 grid = (u32)((count + 255) / 256);
    switch (s.kind) {
    case Kind::Conv: conv_reference<T><<<grid, 256>>>(s.conv, s.pre, out, stride); break;
    case Kind::Depthwise:
        depthwise_reference<T><<<grid, 256>>>(s.depthwise, s.rows, s.columns, out, stride);
        break;
    case Kind::MaxPool:
        pool_reference<T><<<grid, 256>>>(s.pool, true, s.rows, s.columns, out, stride);
        break;
    case Kind::AveragePool:
        pool_reference<T><<<grid, 256>>>(s.pool, false, s.rows, s.columns, out, stride);
        break;
    case Kind::GlobalPool:
        global_pool_reference<T><<<grid, 256>>>(s.global, s.batch, out, stride);
        break;
    case Kind::Norm: norm_reference<T><<<s.rows, 1>>>(s.norm, false, out); break;
    case Kind::Embed: norm_reference<T><<<s.rows, 1>>>(s.norm, true, out); break;
    case Kind::Attention:
        attention_reference<T>
            <<<s.rows * s.attention.by_outer[2].divisor, 64, s.attention.keys * 4>>>(
                s.attention, out);
        break;
    case Kind::Image:
        image_reference<T><<<(s.image.pixels + 127) / 128, 128>>>(s.image, out);
        break;
    }
    CHECK(cudaGetLastError());
}

} // namespace harness
