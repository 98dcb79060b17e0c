// Checks and times the wgmma kernels (hopper.cuh) against a naive kernel: random inputs, odd sizes,
// poisoned outputs, repeated runs, preempted and resumed runs.
//   hopper [filter]
// HOPPER_CHECK=1 only checks; HOPPER_CHECK=2 checks without preemption, for compute-sanitizer.
#include "hopper_harness.cuh"

#include <chrono>
#include <dlfcn.h>
#include <thread>

using namespace harness;

template <class T>
__global__ void naive(ConvArgs a, T* out)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= (size_t)a.rows * a.out_c) return;
    int n = (int)(i % a.out_c), m = (int)(i / a.out_c);
    int out_w = (int)a.by_out_w.divisor, plane = (int)a.by_out_hw.divisor;
    int image = m / plane, y = m % plane / out_w * a.stride_h - a.pad_h;
    int x = m % plane % out_w * a.stride_w - a.pad_w;
    float sum = 0.f;
    for (int k = 0; k < a.depth; k += a.in_c) {
        int iy = y + k / a.in_c / a.ker_w * a.dil_h, ix = x + k / a.in_c % a.ker_w * a.dil_w;
        if (iy < 0 || iy >= a.in_h || ix < 0 || ix >= a.in_w) continue;
        const half* in = a.input + (size_t)((image * a.in_h + iy) * a.in_w + ix) * a.in_stride;
        const half* w = a.weight + (size_t)n * a.weight_stride + k;
        for (int c = 0; c < a.in_c; ++c) sum += (float)in[c] * (float)w[c];
    }
    if (a.bias) sum += a.bias[n];
    if (a.residual) sum += (float)a.residual[(size_t)m * a.residual_stride + n];
    out[i] = (T)activate(sum, a.act);
}

// ---- problems ----------------------------------------------------------------------------------

struct Problem {
    const char* name;
    int batch, h, w, in_c, out_c, ker, stride, pad, dilation;
    bool residual;
    int act;
    int slack; // channels between the pixels of input and output
    int ker_w() const { return ker; }
};

struct Setup {
    Problem p;
    ConvArgs a = {};
    size_t in_count, out_count;
    double flops;

    explicit Setup(const Problem& problem) : p(problem)
    {
        int extent = (p.ker - 1) * p.dilation + 1;
        int out_h = (p.h + 2 * p.pad - extent) / p.stride + 1;
        int out_w = (p.w + 2 * p.pad - extent) / p.stride + 1;
        a.in_h = p.h, a.in_w = p.w, a.in_c = p.in_c, a.in_stride = p.in_c + p.slack;
        a.out_c = p.out_c, a.out_stride = p.out_c + p.slack, a.residual_stride = a.out_stride;
        a.ker_h = a.ker_w = p.ker, a.stride_h = a.stride_w = p.stride;
        a.pad_h = a.pad_w = p.pad, a.dil_h = a.dil_w = p.dilation;
        a.rows = p.batch * out_h * out_w, a.depth = p.ker * p.ker * p.in_c;
        a.weight_stride = a.depth, a.splits = 1, a.act = p.act;
        a.by_splits = FastDiv::of(1), a.by_out_hw = FastDiv::of(out_h * out_w);
        a.by_out_w = FastDiv::of(out_w), a.by_in_c = FastDiv::of(p.in_c);
        a.by_ker_w = FastDiv::of(p.ker);
        in_count = (size_t)p.batch * p.h * p.w * a.in_stride;
        out_count = (size_t)a.rows * a.out_stride;
        size_t weights = (size_t)(p.out_c + 31) / 32 * 32 * a.depth;
        half* input = device_alloc<half>(in_count);
        half* weight = device_alloc<half>(weights);
        float* bias = device_alloc<float>(p.out_c);
        half* residual = p.residual ? device_alloc<half>(out_count) : nullptr;
        fill(input, in_count, 1.f), fill(weight, weights, 2.f / sqrtf((float)a.depth));
        fill(bias, p.out_c, 0.5f);
        if (residual) fill(residual, out_count, 1.f);
        a.input = input, a.weight = weight, a.bias = bias, a.residual = residual;
        a.output = device_alloc<half>(out_count);
        flops = 2.0 * a.rows * p.out_c * a.depth;
    }
    ~Setup()
    {
        for (const void* p : {(const void*)a.input, (const void*)a.weight, (const void*)a.bias,
                 (const void*)a.residual, (const void*)a.output})
            cudaFree((void*)p);
    }
    bool point() const { return p.ker == 1 && p.pad == 0 && p.stride == 1; }
};

// ---- tensor maps -------------------------------------------------------------------------------

static void* driver(const char* name)
{
    static void* library = dlopen("libcuda.so.1", RTLD_NOW);
    void* found = library ? dlsym(library, name) : nullptr;
    if (!found) fprintf(stderr, "no %s\n", name), exit(1);
    return found;
}

static void check_map(const char* what, CUresult code)
{
    if (code != CUDA_SUCCESS) fprintf(stderr, "%s: error %d\n", what, (int)code), exit(1);
}

static CUtensorMap tiled(const void* at, int rank, const cuuint64_t* dims,
                         const cuuint64_t* strides, const cuuint32_t* box)
{
    CUtensorMap map;
    cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    auto encode = (decltype(&cuTensorMapEncodeTiled))driver("cuTensorMapEncodeTiled");
    check_map("cuTensorMapEncodeTiled",
              encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, (void*)at, dims, strides, box,
                     ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

static CUtensorMap weight_map(const ConvArgs& a, int bn)
{
    cuuint64_t row = (cuuint64_t)a.weight_stride * 2;
    cuuint64_t dims[5] = {(cuuint64_t)a.depth, 2, 4, 4, (cuuint64_t)(a.out_c + 31) / 32};
    cuuint64_t strides[4] = {row, 8 * row, 2 * row, 32 * row};
    cuuint32_t box[5] = {64, 2, 4, 4, (cuuint32_t)bn / 32};
    return tiled(a.weight, 5, dims, strides, box);
}

static CUtensorMap input_map(const ConvArgs& a, int bm, bool window, int batch)
{
    cuuint64_t pixel = (cuuint64_t)a.in_stride * 2;
    if (!window) {
        cuuint64_t dims[2] = {(cuuint64_t)a.in_c, (cuuint64_t)a.rows};
        cuuint32_t box[2] = {64, (cuuint32_t)bm};
        return tiled(a.input, 2, dims, &pixel, box);
    }
    int out_w = (int)a.by_out_w.divisor, out_h = (int)a.by_out_hw.divisor / out_w;
    cuuint64_t dims[4] = {(cuuint64_t)a.in_c, (cuuint64_t)a.in_w, (cuuint64_t)a.in_h,
                          (cuuint64_t)batch};
    cuuint64_t strides[3] = {pixel, pixel * a.in_w, pixel * a.in_w * a.in_h};
    int lower[2] = {-a.pad_w, -a.pad_h};
    int upper[2] = {-a.pad_w + (out_w - 1) * a.stride_w - (a.in_w - 1),
                    -a.pad_h + (out_h - 1) * a.stride_h - (a.in_h - 1)};
    cuuint32_t steps[4] = {1, (cuuint32_t)a.stride_w, (cuuint32_t)a.stride_h, 1};
    CUtensorMap map;
    auto encode = (decltype(&cuTensorMapEncodeIm2col))driver("cuTensorMapEncodeIm2col");
    check_map("cuTensorMapEncodeIm2col",
              encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, (void*)a.input, dims, strides,
                     lower, upper, 64, bm, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

static HopperArgs args_of(const Setup& s, const HopperKernel& k)
{
    HopperArgs h;
    h.conv = s.a;
    int tiles_n = (s.a.out_c + k.bn - 1) / k.bn;
    h.conv.by_tiles_n = FastDiv::of(tiles_n);
    h.tiles = (s.a.rows + k.bm - 1) / k.bm * tiles_n;
    h.steps = s.a.ker_h * s.a.ker_w * ((s.a.in_c + 63) / 64);
    CUtensorMap input = input_map(s.a, k.bm, k.window, s.p.batch), weight = weight_map(s.a, k.bn);
    memcpy(&h.input, &input, sizeof input);
    memcpy(&h.weight, &weight, sizeof weight);
    return h;
}

// ---- checks ------------------------------------------------------------------------------------

static int g_wrong = 0;

static int launch_tiles(const HopperKernel& k, const HopperArgs& h)
{ return (h.tiles + k.tiles - 1) / k.tiles; }

static Launch rt_launch(const HopperKernel& k, const HopperArgs& h)
{
    Launch l;
    l.kernel = k.rt, l.threads = k.threads, l.shared = k.shared;
    l.grid = std::min(h.tiles, multiprocessors() * k.blocks);
    l.set(h);
    return l;
}

// Where values differ: the first few, and which rows and columns are affected.
static void explain(const Setup& s, const half* got, const float* want)
{
    std::vector<half> g(s.out_count);
    std::vector<float> w((size_t)s.a.rows * s.a.out_c);
    CHECK(cudaMemcpy(g.data(), got, g.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(w.data(), want, w.size() * 4, cudaMemcpyDeviceToHost));
    std::map<int, int> rows, columns;
    int shown = 0;
    size_t bad = 0;
    for (int m = 0; m < s.a.rows; ++m)
        for (int n = 0; n < s.a.out_c; ++n) {
            float a = (float)g[(size_t)m * s.a.out_stride + n], b = w[(size_t)m * s.a.out_c + n];
            if (fabsf(a - b) <= 0.02f + 0.02f * fabsf(b)) continue;
            ++bad, ++rows[m % 128], ++columns[n % 256];
            if (++shown <= 12) printf("      (%d, %d): %g instead of %g\n", m, n, a, b);
        }
    printf("      %zu wrong; rows %% 128:", bad);
    int i = 0;
    for (auto& r : rows) if (++i <= 20) printf(" %d:%d", r.first, r.second);
    printf("\n      columns %% 256:");
    i = 0;
    for (auto& c : columns) if (++i <= 40) printf(" %d:%d", c.first, c.second);
    printf("\n");
}

static std::vector<unsigned short> bits(const Setup& s)
{
    std::vector<unsigned short> all(s.out_count);
    CHECK(cudaMemcpy(all.data(), s.a.output, all.size() * 2, cudaMemcpyDeviceToHost));
    return all;
}

// A best-effort launch: its control words, and the epoch counter that a second stream raises.
struct BestEffort {
    u32* words; // counter, epoch, -, -, left, next, done...
    cudaStream_t stream, other;
    u32* raised;
    size_t count = 1 << 14;

    BestEffort()
    {
        words = device_alloc<u32>(count);
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        CHECK(cudaMallocHost(&raised, 64));
    }
    void launch(const HopperKernel& k, const HopperArgs& h, const void* kernel, bool restored)
    {
        int tiles = launch_tiles(k, h);
        BeControl control = {(const EpochCounter*)words, words + 4, words + 5, words + 8, tiles,
                             restored};
        bool loop = kernel == k.be;
        u32 grid = loop ? std::min(tiles, multiprocessors() * k.blocks) : tiles;
        if (loop) CHECK(cudaMemsetAsync(words + 5, 0, 4, stream));
        void* list[2] = {(void*)&h, &control};
        CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared));
        CHECK(cudaLaunchKernel(kernel, dim3(grid), dim3(k.threads), list, k.shared, stream));
    }
    u32 left()
    {
        u32 v;
        CHECK(cudaMemcpy(&v, words + 4, 4, cudaMemcpyDeviceToHost));
        return v;
    }
    // Runs, preempted after `delay_us` of every round; returns how often it was preempted.
    int run(const HopperKernel& k, const HopperArgs& h, const void* kernel, double delay_us)
    {
        CHECK(cudaMemset(words, 0, count * 4));
        CHECK(cudaDeviceSynchronize());
        int preempted = 0;
        for (u32 epoch = 0;; ++epoch) {
            u32 start[6] = {epoch, epoch, 0, 0, 0, 0};
            CHECK(cudaMemcpy(words, start, sizeof start, cudaMemcpyHostToDevice));
            CHECK(cudaDeviceSynchronize());
            launch(k, h, kernel, epoch > 0);
            bool raise = delay_us > 0 && epoch < 3;
            if (raise) {
                auto from = std::chrono::steady_clock::now();
                while (std::chrono::duration<double, std::micro>(
                           std::chrono::steady_clock::now() - from).count() < delay_us) {}
                *raised = epoch + 1;
                CHECK(cudaMemcpyAsync(words, raised, 4, cudaMemcpyHostToDevice, other));
            }
            CHECK(cudaStreamSynchronize(other));
            CHECK(cudaStreamSynchronize(stream));
            if (!left()) return preempted;
            if (!raise) return -1;
            ++preempted;
        }
    }
    // A launch that starts after the preemption writes nothing.
    bool starts_preempted(const HopperKernel& k, const HopperArgs& h, const void* kernel)
    {
        u32 start[6] = {1, 0, 0, 0, 0, 0};
        CHECK(cudaMemset(words, 0, count * 4));
        CHECK(cudaMemcpy(words, start, sizeof start, cudaMemcpyHostToDevice));
        CHECK(cudaDeviceSynchronize());
        launch(k, h, kernel, false);
        CHECK(cudaStreamSynchronize(stream));
        return left() != 0;
    }
};

static void check(const Problem& p, const std::string& filter, bool preempts)
{
    Setup s(p);
    size_t values = (size_t)s.a.rows * s.a.out_c;
    float* want = device_alloc<float>(values);
    naive<float><<<(unsigned)((values + 255) / 256), 256>>>(s.a, want);
    CHECK(cudaDeviceSynchronize());
    static BestEffort be;
    for (const HopperKernel& k : hopper_kernels()) {
        if (!k.window && !s.point()) continue;
        if (std::string(k.name).find(filter) == std::string::npos) continue;
        HopperArgs h = args_of(s, k);
        Launch l = rt_launch(k, h);
        poison(s.a.output, s.out_count);
        l.enqueue(0, false);
        CHECK(cudaDeviceSynchronize());
        double error = relative_error(s.a.output, want, s.a.rows, s.a.out_c, s.a.out_stride);
        bool fine = error < 2e-3;
        std::vector<unsigned short> first = bits(s);
        std::string notes;
        if (fine) {
            for (int i = 0; i < 3; ++i) {
                poison(s.a.output, s.out_count);
                l.enqueue(0, false);
                CHECK(cudaDeviceSynchronize());
                if (bits(s) != first) fine = false, notes += " differs-between-runs";
            }
        }
        if (fine && preempts) {
            const void* kernels[3] = {k.be, k.be_grid, k.be_long};
            const char* names[3] = {"be", "be_grid", "be_long"};
            for (int i = 0; i < 3; ++i)
                for (double delay : {0., 12., 20., 40.}) {
                    poison(s.a.output, s.out_count);
                    int times = be.run(k, h, kernels[i], delay);
                    if (times < 0 || bits(s) != first)
                        fine = false, notes += format(" %s-wrong(%d)", names[i], times);
                    else if (delay > 0)
                        notes += format(" %s%d", names[i], times);
                }
            for (int i = 0; i < 3; ++i) {
                poison(s.a.output, s.out_count);
                bool left = be.starts_preempted(k, h, kernels[i]);
                std::vector<unsigned short> all = bits(s);
                bool clean = true;
                for (unsigned short b : all) clean &= b == kPoison;
                if (!left || !clean) fine = false, notes += format(" %s-wrote", names[i]);
            }
        }
        g_wrong += !fine;
        printf("%-34s %-26s %.1e%s%s\n", p.name, k.name, error, notes.c_str(),
               fine ? "" : "  WRONG");
        if (!fine && notes.empty()) explain(s, s.a.output, want);
        fflush(stdout);
    }
    CHECK(cudaFree(want));
}

static void time(const Problem& p, const std::string& filter)
{
    Setup s(p);
    static BestEffort be;
    CHECK(cudaMemset(be.words, 0, be.count * 4));
    CHECK(cudaDeviceSynchronize());
    double best = 1e30;
    std::string line; // TFLOP/s of rt, be_long and be
    for (const HopperKernel& k : hopper_kernels()) {
        if (k.window == s.point()) continue;
        if (std::string(k.name).find(filter) == std::string::npos) continue;
        if (k.bn >= 2 * s.a.out_c && k.bn > 64) continue;
        HopperArgs h = args_of(s, k);
        Launch l = rt_launch(k, h);
        double us[3];
        for (int form = 0; form < 3; ++form) {
            Graph g(be.stream, [&](cudaStream_t to) {
                for (int i = 0; i < 5; ++i)
                    if (form == 0) l.enqueue(to, true);
                    else be.launch(k, h, form == 1 ? k.be_long : k.be, false);
            });
            us[form] = g.median(7) / 5;
        }
        if (us[0] < best) best = us[0];
        line += format(" %dx%d%s/%d:%.0f,%.0f,%.0f", k.bm, k.bn, k.tiles > 1 ? "a" : "", k.blocks,
                       s.flops / us[0] * 1e-6, s.flops / us[1] * 1e-6, s.flops / us[2] * 1e-6);
    }
    printf("%-28s %8.1f us %4.0f TFLOP/s |%s\n", p.name, best, s.flops / best * 1e-6, line.c_str());
    fflush(stdout);
}

static Problem product(const char* name, int rows, int columns, int depth, bool residual = false,
                       int act = kLinear, int slack = 0)
{ return {name, 1, 1, rows, depth, columns, 1, 1, 0, 1, residual, act, slack}; }

int main(int argc, char** argv)
{
    std::string filter = argc > 1 ? argv[1] : "";
    for (const HopperKernel& k : hopper_kernels()) {
        CHECK(cudaFuncSetAttribute(k.rt, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared));
        cudaFuncAttributes f;
        CHECK(cudaFuncGetAttributes(&f, k.rt));
        int blocks;
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, k.rt, k.threads, k.shared));
        printf("%s: %d registers, %zu local, %d shared, %d blocks\n", k.name, f.numRegs,
               f.localSizeBytes, k.shared, blocks);
    }
    check(product("product 256x256x64", 256, 256, 64), filter, false);
    check(product("product 300x264x200, slack", 300, 264, 200, true, kGelu, 24), filter, false);
    check(product("product 1x8x8", 1, 8, 8), filter, false);
    check(product("product 1000x1000x1000", 1000, 1000, 1000, false, kRelu), filter, false);
    check({"3x3 of 64", 3, 14, 14, 64, 128, 3, 1, 1, 1, false, kRelu, 0}, filter, false);
    check({"3x3 of 72 stride 2", 3, 15, 17, 72, 104, 3, 2, 1, 1, true, kSilu, 8}, filter, false);
    check({"5x5 of 48", 2, 17, 17, 48, 264, 5, 1, 2, 1, false, kLinear, 0}, filter, false);
    check({"3x3 of 256 dilation 12", 1, 33, 33, 256, 256, 3, 1, 12, 12, false, kRelu, 0}, filter,
          false);
    check({"1x1 of 256 stride 2", 2, 28, 28, 256, 512, 1, 2, 0, 1, false, kLinear, 0}, filter,
          false);
    check({"2x2 of 16 stride 2, no pad", 2, 28, 30, 16, 40, 2, 2, 0, 1, true, kLinear, 0}, filter,
          false);
    check(product("product 129x520x72, residual", 129, 520, 72, true, kTanh), filter, false);
    check({"3x3 of 8", 5, 9, 7, 8, 96, 3, 1, 1, 1, true, kRelu6, 16}, filter, false);
    check({"7x7 of 64 stride 8", 3, 67, 65, 64, 64, 7, 8, 3, 1, false, kSigmoid, 0}, filter, false);
    const char* only = getenv("HOPPER_CHECK");
    if (!only || only[0] != '2') {
        check(product("preempted 4096x2048x4096", 4096, 2048, 4096, true, kRelu), filter, true);
        check({"preempted 3x3 of 256", 8, 56, 56, 256, 256, 3, 1, 1, 1, true, kRelu, 0}, filter,
              true);
        check(product("preempted 2000x1096x2056", 2000, 1096, 2056, true, kRelu), filter, true);
    }
    printf("%d wrong\n", g_wrong);
    if (g_wrong || only) return g_wrong != 0;

    time(product("4096x4096x4096", 4096, 4096, 4096), filter);
    time(product("8192x4096x1024", 8192, 4096, 1024), filter);
    time(product("12608x768x3072", 12608, 768, 3072), filter);
    time(product("12608x3072x768", 12608, 3072, 768, false, kGelu), filter);
    time(product("12608x768x768 residual", 12608, 768, 768, true), filter);
    time(product("4096x768x768", 4096, 768, 768), filter);
    for (int c = 64, e = 56; c <= 512; c *= 2, e /= 2) {
        static char names[12][40];
        int i = c / 64;
        snprintf(names[i], 40, "resnet 3x3x%d b32", c);
        time({names[i], 32, e, e, c, c, 3, 1, 1, 1, false, kRelu, 0}, filter);
        static char more[12][40];
        snprintf(more[i], 40, "resnet 1x1 %d>%d b32", c, 4 * c);
        time(product(more[i], 32 * e * e, 4 * c, c, true, kRelu), filter);
        static char down[12][40];
        snprintf(down[i], 40, "resnet 1x1 %d>%d b32", 4 * c, c);
        time(product(down[i], 32 * e * e, c, 4 * c, false, kRelu), filter);
    }
    time({"vgg 3x3 64>64 224 b8", 8, 224, 224, 64, 64, 3, 1, 1, 1, false, kRelu, 0}, filter);
    time({"vgg 3x3 128>128 112 b8", 8, 112, 112, 128, 128, 3, 1, 1, 1, false, kRelu, 0}, filter);
    time({"vgg 3x3 256>256 56 b8", 8, 56, 56, 256, 256, 3, 1, 1, 1, false, kRelu, 0}, filter);
    time({"vgg 3x3 512>512 28 b8", 8, 28, 28, 512, 512, 3, 1, 1, 1, false, kRelu, 0}, filter);
    time({"vgg 3x3 512>512 14 b8", 8, 14, 14, 512, 512, 3, 1, 1, 1, false, kRelu, 0}, filter);
    time({"deeplab 3x3 2048>256 d12 b4", 4, 65, 65, 2048, 256, 3, 1, 12, 12, false, kRelu, 0},
         filter);
    time({"deeplab 3x3 512>512 d2 b4", 4, 65, 65, 512, 512, 3, 1, 2, 2, false, kRelu, 0}, filter);
    return 0;
}
