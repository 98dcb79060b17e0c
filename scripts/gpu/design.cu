// Measurements that decide how a network is launched and what preemption costs.
//   design OUT.json
//   1. a step's cost beyond its work: graph nodes, programmatic dependent launch, a grid barrier in one persistent launch
//   2. best-effort kernels against real-time ones with nothing to preempt
//   3. eviction: decision to first real-time block, decision to last best-effort block gone, and exactness after restores
#include <cuda.h>

#include <chrono>
#include <random>
#include <thread>

#define HARNESS_BE
#include "networks.cuh"

using namespace harness;

static std::string g_json;
static void record(const std::string& name, double value)
{
    g_json += format("%s\n\"%s\":%.3f", g_json.empty() ? "" : ",", name.c_str(), value);
    printf("%-64s %10.3f\n", name.c_str(), value);
    fflush(stdout);
}

// ---- 1. the cost of a step --------------------------------------------------------------------------------------------

// A step of `chunks` 16-byte loads a thread of what other blocks wrote in the previous step, and as many stores.
__device__ __forceinline__ void small_step(const uint4* from, uint4* to, int chunks, int block, int blocks)
{
    int other = (block + 37) % blocks;
    for (int i = 0; i < chunks; ++i) {
        uint4 v = __ldcg(from + (size_t)(other * chunks + i) * blockDim.x + threadIdx.x);
        v.x += 1;
        __stcg(to + (size_t)(block * chunks + i) * blockDim.x + threadIdx.x, v);
    }
}

__global__ void chain_node(const uint4* from, uint4* to, int chunks)
{
    LaunchGate::release_next();
    LaunchGate().wait();
    small_step(from, to, chunks, blockIdx.x, gridDim.x);
}

__global__ void chain_persistent(uint4* a, uint4* b, int chunks, int steps, u32* arrived)
{
    for (int s = 0; s < steps; ++s) {
        if (s && threadIdx.x == 0) {
            u32 v;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(arrived) : "memory");
            while (v < gridDim.x * s);
        }
        __syncthreads();
        small_step(s % 2 ? b : a, s % 2 ? a : b, chunks, blockIdx.x, gridDim.x);
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
    }
}

static void measure_steps(cudaStream_t stream)
{
    const int steps = 200;
    uint4* a = device_alloc<uint4>(1 << 22);
    uint4* b = device_alloc<uint4>(1 << 22);
    u32* arrived = device_alloc<u32>(1);
    CHECK(cudaMemset(a, 1, 16 << 22));
    for (int blocks : {1, 132, 264, 528})
        for (int chunks : {0, 4}) {
            auto chain = [&](bool dependent) {
                Graph graph(stream, [&](cudaStream_t s) {
                    for (int i = 0; i < steps; ++i) {
                        const uint4* from = i % 2 ? b : a;
                        uint4* to = i % 2 ? a : b;
                        cudaLaunchAttribute attribute;
                        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
                        attribute.val.programmaticStreamSerializationAllowed = 1;
                        cudaLaunchConfig_t config = {};
                        config.gridDim = blocks, config.blockDim = 128, config.stream = s;
                        config.attrs = &attribute, config.numAttrs = dependent;
                        CHECK(cudaLaunchKernelEx(&config, chain_node, from, to, chunks));
                    }
                });
                return graph.median(20) / steps;
            };
            std::string what = format("us a step, %d blocks, %d KB a block: ", blocks, chunks * 2);
            record(what + "graph node", chain(false));
            record(what + "dependent launch", chain(true));
            if (blocks > 264) continue;
            Graph graph(stream, [&](cudaStream_t s) {
                CHECK(cudaMemsetAsync(arrived, 0, 4, s));
                chain_persistent<<<blocks, 128, 0, s>>>(a, b, chunks, steps, arrived);
            });
            record(what + "barrier in one launch", graph.median(20) / steps);
        }
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
}

// ---- best-effort launches ---------------------------------------------------------------------------------------------

struct BestEffort {
    u32* epoch = device_alloc<u32>(4); // the watch copies 16 bytes
    u32* budget = device_alloc<u32>(4);
    u32* state = device_alloc<u32>(1 << 16); // the tile counter, the done bits, the arrivals: one memset starts a launch

    BestEffort()
    {
        u32 all = ~0u;
        CHECK(cudaMemset(epoch, 0, 4));
        CHECK(cudaMemcpy(budget, &all, 4, cudaMemcpyHostToDevice));
    }
    static size_t state_bytes(u32 tiles) { return (1 + (tiles + 31) / 32 + tiles) * 4; }

    void enqueue(const Step& step, const Variant& v, u32 launched, bool restored, cudaStream_t stream, bool loop = true) const
    {
        const ConvKernel& k = conv_kernels()[v.kernel];
        Launch l;
        ConvArgs a = step.conv;
        u32 tiles = specialize(a, v);
        a.arrivals = state + 1 + (tiles + 31) / 32;
        BeControl control = {epoch, budget, state, state + 1, launched, (int)tiles, restored};
        int resident = 0;
        CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, k.be, k.threads, k.shared));
        CHECK(cudaMemsetAsync(state, 0, restored ? 4 : state_bytes(tiles), stream));
        l.kernel = loop ? k.be : k.be_grid;
        l.grid = loop ? std::min<u32>(tiles, resident * multiprocessors()) : tiles;
        l.threads = k.threads, l.shared = k.shared;
        l.set(a);
        l.control.assign((unsigned char*)&control, (unsigned char*)(&control + 1));
        l.enqueue(stream, false);
    }
};

static Variant variant_named(const char* name, const Step& step, int splits)
{
    for (int i = 0; i < (int)conv_kernels().size(); ++i)
        if (!strcmp(conv_kernels()[i].name, name) && walks(conv_kernels()[i], step.conv))
            return {i, splits, splits > 1 ? kWorkspace : kWhole};
    fprintf(stderr, "no kernel %s\n", name);
    exit(1);
}

struct Case {
    const char* name;
    int batch, size, in_c, out_c, ker;
    const char* kernel;
    int splits;
};

static const Case kCases[] = {
    {"vgg 56x56x256 3x3, batch 8", 8, 56, 256, 256, 3, "128x128x32", 1},
    {"vgg 56x56x256 3x3, batch 8, 64-wide tiles", 8, 56, 256, 256, 3, "64x64x64", 1},
    {"vgg 112x112x128 3x3, batch 8", 8, 112, 128, 128, 3, "128x128x64", 1},
    {"resnet 14x14x256 3x3, batch 8", 8, 14, 256, 256, 3, "64x64x64", 1},
    {"resnet 14x14x256->1024 1x1, batch 32", 32, 14, 256, 1024, 1, "64x128x64", 1},
    {"resnet 56x56x64->256 1x1, batch 8", 8, 56, 64, 256, 1, "64x64x64", 1},
    {"resnet 7x7x512 3x3, batch 1, split 8", 1, 7, 512, 512, 3, "64x64x64", 8},
};

static Step make_case(Net& net, const Case& c)
{
    Tensor in = net.alloc(c.size, c.size, c.in_c);
    fill(in.data, (size_t)c.batch * c.size * c.size * c.in_c, 1.f);
    net.conv(c.name, in, c.out_c, {c.ker, c.ker, 1, c.ker / 2, c.ker / 2}, kRelu);
    CHECK(cudaDeviceSynchronize());
    return net.steps.back();
}

static void measure_best_effort(cudaStream_t stream)
{
    BestEffort be;
    for (const Case& c : kCases) {
        Net net(c.name, c.batch, 64 << 20, (size_t)512 << 20);
        Step step = make_case(net, c);
        Variant v = variant_named(c.kernel, step, c.splits);
        const int copies = 10;
        size_t bytes = BestEffort::state_bytes(conv_launch(step, v).grid);
        // All carry the memset a best-effort launch needs, so that the difference is the kernel's.
        Graph plain(stream, [&](cudaStream_t s) {
            for (int i = 0; i < copies; ++i) {
                CHECK(cudaMemsetAsync(be.state, 0, bytes, s));
                conv_launch(step, v).enqueue(s, false);
            }
        });
        Graph loop(stream, [&](cudaStream_t s) {
            for (int i = 0; i < copies; ++i) be.enqueue(step, v, 0, false, s);
        });
        Graph grid(stream, [&](cudaStream_t s) {
            for (int i = 0; i < copies; ++i) be.enqueue(step, v, 0, false, s, false);
        });
        double a = 1e30, b = 1e30, g = 1e30;
        for (int round = 0; round < 3; ++round)
            a = std::min(a, plain.median(15)), b = std::min(b, loop.median(15)), g = std::min(g, grid.median(15));
        record(format("us rt: %s", c.name), a / copies);
        record(format("be over rt, %%: %s", c.name), (b / a - 1) * 100);
        record(format("be_grid over rt, %%: %s", c.name), (g / a - 1) * 100);
    }
}

// ---- 3. eviction ------------------------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;
static double since(Clock::time_point t) { return std::chrono::duration<double, std::micro>(Clock::now() - t).count(); }

// Stands for the first kernel of a real-time graph: as much shared memory as a convolution, a block an SM.
__global__ void __launch_bounds__(128) announce(volatile u32* seen, u32 value)
{
    if (threadIdx.x == 0) *seen = value;
}

static double percentile(std::vector<double> v, double p)
{
    std::sort(v.begin(), v.end());
    return v[std::min(v.size() - 1, (size_t)(p * v.size()))];
}

typedef CUresult (*WriteValue)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

static WriteValue write_value_entry()
{
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &p, 12000, cudaEnableDefault, &found));
    if (!p || found != cudaDriverEntryPointSuccess) {
        fprintf(stderr, "the driver has no cuStreamWriteValue32\n");
        exit(1);
    }
    return (WriteValue)p;
}

// How the epoch is raised: by a write in the real-time stream ahead of its first kernel, by a write in a stream of its own while
// the kernel is launched, or by a kernel of one thread ahead of it.
enum class Bump { Ahead, Aside, Kernel };
static const char* kBumps[] = {"write ahead", "write aside", "kernel ahead"};

__global__ void raise(u32* word, u32 value) { *(volatile u32*)word = value; }

struct Eviction {
    WriteValue write_value = write_value_entry();
    BestEffort be;
    cudaStream_t high, low, aside;
    volatile u32* seen;
    u32 epoch = 0, mark = 0;
    Bump bump = Bump::Ahead;

    Eviction()
    {
        int least, greatest;
        CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CHECK(cudaStreamCreateWithPriority(&high, cudaStreamNonBlocking, greatest));
        CHECK(cudaStreamCreateWithPriority(&low, cudaStreamNonBlocking, least));
        CHECK(cudaStreamCreateWithPriority(&aside, cudaStreamNonBlocking, greatest));
        CHECK(cudaHostAlloc((void**)&seen, 64, cudaHostAllocMapped));
        CHECK(cudaFuncSetAttribute(announce, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    }
    void raise_epoch()
    {
        ++epoch;
        if (bump == Bump::Kernel) {
            raise<<<1, 1, 0, high>>>(be.epoch, epoch);
        } else if (write_value(bump == Bump::Aside ? aside : high, (CUdeviceptr)be.epoch, epoch, 0) != CUDA_SUCCESS) {
            fprintf(stderr, "cuStreamWriteValue32 failed\n");
            exit(1);
        }
    }
    // One real-time arrival; returns microseconds until the host sees its first block.
    double arrive(bool evict)
    {
        auto start = Clock::now();
        ++mark;
        if (evict) raise_epoch();
        announce<<<multiprocessors(), 128, 64 << 10, high>>>(seen, mark);
        CHECK(cudaGetLastError());
        while (*seen != mark) {
        }
        return since(start);
    }
};

static void record_latency(const std::string& what, const std::vector<double>& v)
{
    record(what + " p50", percentile(v, 0.5));
    record(what + " p99", percentile(v, 0.99));
}

// `queued` copies of the case behind each other; after each eviction they are restored to the end and compared with the
// real-time kernel's output, which must be the same to the bit.
static void evict_case(Eviction& e, const Case& c, int queued, bool evict, int rounds)
{
    Net net(c.name, c.batch, 64 << 20, (size_t)512 << 20);
    Step step = make_case(net, c);
    Variant v = variant_named(c.kernel, step, c.splits);
    size_t count = (size_t)step.rows * step.stride;
    conv_launch(step, v).enqueue(e.low, false);
    std::vector<half> want(count), got(count);
    CHECK(cudaStreamSynchronize(e.low));
    CHECK(cudaMemcpy(want.data(), step.conv.output, count * 2, cudaMemcpyDeviceToHost));
    std::mt19937 random(7);
    std::vector<double> first, gone;
    int restores = 0, differ = 0;
    for (int round = 0; round < rounds; ++round) {
        poison(step.conv.output, count);
        for (int i = 0; i < queued; ++i) e.be.enqueue(step, v, e.epoch, false, e.low);
        auto wait = Clock::now();
        double until = 60 + random() % 100;
        while (since(wait) < until) {
        }
        auto start = Clock::now();
        first.push_back(e.arrive(evict));
        CHECK(cudaStreamSynchronize(e.low));
        gone.push_back(since(start));
        CHECK(cudaStreamSynchronize(e.high));
        if (!evict) continue;
        e.be.enqueue(step, v, e.epoch, true, e.low);
        CHECK(cudaStreamSynchronize(e.low));
        ++restores;
        CHECK(cudaMemcpy(got.data(), step.conv.output, count * 2, cudaMemcpyDeviceToHost));
        differ += memcmp(got.data(), want.data(), count * 2) != 0;
    }
    std::string what = format("us %s, %d queued, %s: ", c.name, queued, evict ? kBumps[(int)e.bump] : "priority only");
    record_latency(what + "first rt block", first);
    record_latency(what + "last be block gone", gone);
    if (evict) record(what + format("outputs that differ after %d restores", restores), differ);
}

static void measure_eviction()
{
    Eviction e;
    for (Bump bump : {Bump::Ahead, Bump::Aside, Bump::Kernel}) {
        std::vector<double> idle;
        e.bump = bump;
        for (int i = 0; i < 200; ++i) {
            idle.push_back(e.arrive(true));
            CHECK(cudaDeviceSynchronize());
        }
        record_latency(format("us idle device, %s: first rt block", kBumps[(int)bump]), idle);
    }
    Case large = {"vgg 112x112x128 3x3, batch 32", 32, 112, 128, 128, 3, "128x128x64", 1};
    Case narrow = {"vgg 112x112x128 3x3, batch 32, 64-wide tiles", 32, 112, 128, 128, 3, "64x64x64", 1};
    Case split = {"resnet 14x14x512 3x3, batch 8, split 4", 8, 14, 512, 512, 3, "64x64x64", 4};
    for (Bump bump : {Bump::Ahead, Bump::Aside, Bump::Kernel}) {
        e.bump = bump;
        evict_case(e, large, 4, true, 150);
        evict_case(e, narrow, 4, true, 150);
        evict_case(e, split, 16, true, 150);
    }
    evict_case(e, large, 4, false, 30);
}

int main(int argc, char** argv)
{
    if (argc < 2) return fprintf(stderr, "usage: design OUT.json\n"), 2;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    measure_steps(stream);
    measure_best_effort(stream);
    measure_eviction();
    FILE* file = fopen(argv[1], "w");
    fprintf(file, "{%s\n}\n", g_json.c_str());
    fclose(file);
    return 0;
}
