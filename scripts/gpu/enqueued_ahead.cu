// Real time that the host launches when a request comes, against real time that is enqueued ahead
// behind a wait for a word of the host, which the request only has to write. Both beside calls of
// another thread that hold the driver's lock.
//
//   nvcc -std=c++17 -O2 -arch=sm_90 enqueued_ahead.cu -o enqueued_ahead -lcuda
//   ./enqueued_ahead [SECONDS_PER_ROW]
//
// A request is a word (an epoch), a copy of 602,112 bytes and a graph of 60 dependent kernels.
// Prints, in microseconds: how long the request's own calls took, when the device had written its
// first word, and when all was done. ADR 91 has the figures.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#define CHECK(call)                                                                    \
    do {                                                                               \
        CUresult code = (call);                                                        \
        if (code != CUDA_SUCCESS) {                                                    \
            fprintf(stderr, "line %d: %s: error %d\n", __LINE__, #call, int(code));    \
            exit(1);                                                                   \
        }                                                                              \
    } while (0)

using Clock = std::chrono::steady_clock;

constexpr size_t kInputBytes = 602112;
constexpr int kKernels = 60, kBlocks = 132, kThreads = 256;

// Words of the host, each in a line of its own: go, first, done.
constexpr int kGo = 0, kFirst = 32, kDone = 16;

__global__ void busy(float* values, int cycles)
{
    long long began = clock64();
    float value = values[threadIdx.x];
    while (clock64() - began < cycles) value = value * 1.0001f + 1e-6f;
    if (value == 12345.f) values[0] = value;
}

static double micros(Clock::time_point from, Clock::time_point to)
{
    return std::chrono::duration<double, std::micro>(to - from).count();
}

struct Times {
    std::vector<double> values;
    void print(const char* name)
    {
        std::sort(values.begin(), values.end());
        auto at = [&](double share) { return values[size_t(share * (values.size() - 1))]; };
        printf("  %s %.1f %.1f %.1f", name, at(0.5), at(0.99), values.back());
    }
};

struct Gpu {
    CUcontext context;
    CUstream real_time, best_effort;
    CUdeviceptr memory, epoch, words_on_device;
    void* input;
    volatile unsigned* words;
    cudaGraphExec_t graph;
    unsigned sequence = 0;

    Gpu()
    {
        CUdevice device;
        int low, high;
        CHECK(cuInit(0));
        CHECK(cuDeviceGet(&device, 0));
        CHECK(cuDevicePrimaryCtxRetain(&context, device));
        CHECK(cuCtxSetCurrent(context));
        CHECK(cuCtxGetStreamPriorityRange(&low, &high));
        CHECK(cuStreamCreateWithPriority(&real_time, CU_STREAM_NON_BLOCKING, high));
        CHECK(cuStreamCreateWithPriority(&best_effort, CU_STREAM_NON_BLOCKING, low));
        CHECK(cuMemAlloc(&memory, 4 << 20));
        CHECK(cuMemAlloc(&epoch, 256));
        CHECK(cuMemHostAlloc(&input, kInputBytes, CU_MEMHOSTALLOC_DEVICEMAP));
        CHECK(cuMemHostAlloc((void**)&words, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
        memset((void*)words, 0, 4096);
        CHECK(cuMemHostGetDevicePointer(&words_on_device, (void*)words, 0));
        cudaStream_t stream;
        cudaGraph_t captured;
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        for (int i = 0; i < kKernels; ++i) busy<<<kBlocks, kThreads, 0, stream>>>(values(), 8000);
        cudaStreamEndCapture(stream, &captured);
        cudaGraphInstantiate(&graph, captured, 0);
        cudaGraphUpload(graph, stream);
        cudaStreamSynchronize(stream);
    }

    float* values() { return (float*)memory; }

    void enqueue(bool ahead)
    {
        unsigned number = ++sequence;
        if (ahead) {
            auto rule = CU_STREAM_WAIT_VALUE_GEQ;
            CHECK(cuStreamWaitValue32(real_time, words_on_device + 4 * kGo, number, rule));
        }
        CHECK(cuStreamWriteValue32(real_time, epoch, number, 0));
        CHECK(cuStreamWriteValue32(real_time, words_on_device + 4 * kFirst, number, 0));
        CHECK(cuMemcpyHtoDAsync(memory + (1 << 20), input, kInputBytes, real_time));
        CHECK(cuGraphLaunch((CUgraphExec)graph, real_time));
        CHECK(cuStreamWriteValue32(real_time, words_on_device + 4 * kDone, number, 0));
    }
};

static void measure(Gpu& gpu, const char* load, bool ahead, double seconds)
{
    Times calls, first, done;
    auto until = Clock::now() + std::chrono::duration<double>(seconds);
    auto due = Clock::now();
    unsigned random = 12345;
    if (ahead) gpu.enqueue(true);
    while (Clock::now() < until) {
        random = random * 1664525u + 1013904223u;
        due = std::max(due, Clock::now()) + std::chrono::microseconds(700 + random % 600);
        while (Clock::now() < due) {}
        auto began = Clock::now();
        if (ahead) {
            gpu.words[kGo] = gpu.sequence;
        } else {
            gpu.enqueue(false);
        }
        calls.values.push_back(micros(began, Clock::now()));
        while (gpu.words[kFirst] != gpu.sequence) {}
        first.values.push_back(micros(began, Clock::now()));
        while (gpu.words[kDone] != gpu.sequence) {}
        done.values.push_back(micros(began, Clock::now()));
        if (ahead && Clock::now() < until) gpu.enqueue(true);
    }
    gpu.words[kGo] = gpu.sequence;
    CHECK(cuStreamSynchronize(gpu.real_time));
    printf("%-6s %-16s %5zu requests:", ahead ? "ahead" : "host", load, done.values.size());
    calls.print("calls");
    first.print(" first");
    done.print(" done");
    printf("\n");
    fflush(stdout);
}

struct Load {
    const char* name;
    // Waits for everything enqueued: nothing may be enqueued ahead meanwhile.
    bool waits;
    std::function<void()> call;
};

static std::vector<Load> loads(Gpu& gpu)
{
    static CUmemAllocationProp property = {};
    property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    static CUmemAccessDesc access = {};
    access.location = property.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    static CUmemGenericAllocationHandle piece;
    static CUdeviceptr range;
    constexpr size_t bytes = 256 << 20, block = 2 << 20;
    CHECK(cuMemCreate(&piece, bytes, &property, 0));
    CHECK(cuMemAddressReserve(&range, bytes, 0, 0, 0));
    static void* pages = aligned_alloc(block, block);
    memset(pages, 1, block);
    auto map = [] {
        CHECK(cuMemMap(range, bytes, 0, piece, 0));
        CHECK(cuMemSetAccess(range, bytes, &access, 1));
        CHECK(cuMemUnmap(range, bytes));
    };
    auto create = [] {
        CUmemGenericAllocationHandle made;
        CHECK(cuMemCreate(&made, bytes, &property, 0));
        CHECK(cuMemRelease(made));
    };
    auto pin = [] {
        CHECK(cuMemHostRegister(pages, block, 0));
        CHECK(cuMemHostUnregister(pages));
    };
    auto launch = [&gpu] {
        busy<<<2 * kBlocks, kThreads, 0, (cudaStream_t)gpu.best_effort>>>(gpu.values(), 100000);
        CHECK(cuStreamSynchronize(gpu.best_effort));
    };
    return {{"nothing", false, nullptr},
            {"map 256 MiB", false, map},
            {"create 256 MiB", false, create},
            {"pin 2 MiB", true, pin},
            {"best effort", false, launch}};
}

int main(int count, char** arguments)
{
    double seconds = count > 1 ? atof(arguments[1]) : 1.0;
    Gpu gpu;
    printf("microseconds: median, 99th percentile, maximum\n");
    for (auto& load : loads(gpu)) {
        for (bool ahead : {false, true}) {
            if (ahead && load.waits) continue;
            std::atomic<bool> ended{false};
            std::thread other([&] {
                CHECK(cuCtxSetCurrent(gpu.context));
                while (load.call && !ended) {
                    load.call();
                    std::this_thread::sleep_for(std::chrono::microseconds(300));
                }
            });
            measure(gpu, load.name, ahead, seconds);
            ended = true;
            other.join();
        }
    }
    return 0;
}
