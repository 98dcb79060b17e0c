// What it costs to launch a recorded graph, to change it, and to launch it from the device.
//
//   nvcc -std=c++17 -O2 -arch=sm_90 -rdc=true launch_paths.cu -o launch_paths -lcudadevrt
//   ./launch_paths > launch_paths.json
//
// Questions: (1) what a new size of a model costs if its graph is patched instead of recorded, (2)
// what a launch costs after the launch path has left the core's caches, (3) whether a kernel that
// waits on the device for a word of the host launches a graph sooner than the host does.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                                               \
    do {                                                                                          \
        cudaError_t code_ = (call);                                                               \
        if (code_ != cudaSuccess) {                                                               \
            std::fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(code_));    \
            std::exit(1);                                                                         \
        }                                                                                         \
    } while (0)

using Clock = std::chrono::steady_clock;

static double micros(Clock::time_point from) {
    return std::chrono::duration<double, std::micro>(Clock::now() - from).count();
}

struct Spread {
    double p50, p99, max;
};

static Spread spread(std::vector<double> times) {
    std::sort(times.begin(), times.end());
    size_t n = times.size();
    return {times[n / 2], times[std::min(n - 1, n * 99 / 100)], times[n - 1]};
}

static void print(const char* name, int nodes, std::vector<double> times, bool last = false) {
    Spread s = spread(times);
    std::printf("  {\"what\": \"%s\", \"nodes\": %d, \"p50_us\": %.2f, \"p99_us\": %.2f, "
                "\"max_us\": %.2f}%s\n",
                name, nodes, s.p50, s.p99, s.max, last ? "" : ",");
}

// Sixteen words of arguments, as a step of a network has.
struct Args {
    float* out;
    unsigned value;
    unsigned rest[13];
};

__global__ void step(Args args) {
    if (threadIdx.x == 0) args.out[blockIdx.x] = args.value + args.rest[3];
}

// The first step of a graph: tells the host that it runs.
__global__ void first_step(volatile unsigned* seen, const volatile unsigned* number) {
    *seen = *number;
    __threadfence_system();
}

struct Recorded {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    std::vector<cudaGraphNode_t> kernels;
};

static float* out_buffer;
static unsigned* seen_host;
static unsigned* seen_device;
static unsigned* number_host;
static unsigned* number_device;

static cudaGraph_t capture(cudaStream_t stream, int nodes, unsigned grid, bool signals) {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    if (signals) first_step<<<1, 1, 0, stream>>>(seen_device, number_device);
    for (int i = 0; i < nodes; i++) {
        Args args{out_buffer, unsigned(i), {}};
        step<<<grid, 128, 0, stream>>>(args);
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    return graph;
}

static Recorded record(cudaStream_t stream, int nodes, unsigned grid, unsigned flags,
                       bool signals) {
    Recorded r;
    r.graph = capture(stream, nodes, grid, signals);
    CHECK(cudaGraphInstantiate(&r.exec, r.graph, flags));
    size_t count = 0;
    CHECK(cudaGraphGetNodes(r.graph, nullptr, &count));
    r.kernels.resize(count);
    CHECK(cudaGraphGetNodes(r.graph, r.kernels.data(), &count));
    return r;
}

static void wait_seen(unsigned number) {
    while (*(volatile unsigned*)seen_host != number) {
    }
}

static std::vector<char> trash(64 << 20);
static void thrash_caches() {
    for (size_t i = 0; i < trash.size(); i += 64) trash[i]++;
}

// (1) Recording, patching and updating graphs of `nodes` kernels.
static void measure_updates(cudaStream_t stream, int nodes) {
    std::vector<double> capturing, instantiating, patching, after, warm, updating, uploading;
    for (int i = 0; i < 20; i++) {
        auto t = Clock::now();
        cudaGraph_t graph = capture(stream, nodes, 1, false);
        capturing.push_back(micros(t));
        cudaGraphExec_t exec;
        t = Clock::now();
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        instantiating.push_back(micros(t));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
    Recorded r = record(stream, nodes, 1, 0, false);
    for (int i = 0; i < 300; i++) {
        auto t = Clock::now();
        CHECK(cudaGraphLaunch(r.exec, stream));
        warm.push_back(micros(t));
        CHECK(cudaStreamSynchronize(stream));
    }
    for (int i = 0; i < 100; i++) {
        Args args{out_buffer, unsigned(i), {}};
        void* pointers[] = {&args};
        cudaKernelNodeParams params{};
        params.func = (void*)step;
        params.gridDim = dim3(1 + i % 7);
        params.blockDim = dim3(128);
        params.kernelParams = pointers;
        auto t = Clock::now();
        for (cudaGraphNode_t node : r.kernels)
            CHECK(cudaGraphExecKernelNodeSetParams(r.exec, node, &params));
        patching.push_back(micros(t));
        t = Clock::now();
        CHECK(cudaGraphLaunch(r.exec, stream));
        after.push_back(micros(t));
        CHECK(cudaStreamSynchronize(stream));
    }
    for (int i = 0; i < 30; i++) {
        cudaGraph_t graph = capture(stream, nodes, 2 + i % 5, false);
        cudaGraphExecUpdateResultInfo info{};
        auto t = Clock::now();
        CHECK(cudaGraphExecUpdate(r.exec, graph, &info));
        updating.push_back(micros(t));
        t = Clock::now();
        CHECK(cudaGraphUpload(r.exec, stream));
        uploading.push_back(micros(t));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphDestroy(graph));
    }
    print("capture", nodes, capturing);
    print("instantiate", nodes, instantiating);
    print("launch call, warm", nodes, warm);
    print("set parameters of every node", nodes, patching);
    print("launch call right after that", nodes, after);
    print("update from a captured graph", nodes, updating);
    print("upload after an update", nodes, uploading);
    CHECK(cudaGraphExecDestroy(r.exec));
    CHECK(cudaGraphDestroy(r.graph));
}

// (2) A launch after the launch path has left the caches, to the first kernel's store.
static void measure_cold(cudaStream_t stream, int nodes) {
    Recorded own = record(stream, nodes, 1, 0, true);
    std::vector<Recorded> others;
    for (int i = 0; i < 5; i++) others.push_back(record(stream, 100 + 60 * i, 1, 0, false));
    const char* names[] = {"idle", "after thrashing the core's caches",
                           "after one other graph", "after five other graphs"};
    unsigned number = 0;
    for (int way = 0; way < 4; way++) {
        std::vector<double> calls, firsts;
        for (int i = 0; i < 400; i++) {
            if (way == 1) thrash_caches();
            for (int other = 0; other < (way == 2 ? 1 : way == 3 ? 5 : 0); other++)
                CHECK(cudaGraphLaunch(others[other].exec, stream));
            CHECK(cudaStreamSynchronize(stream));
            auto pause = Clock::now();
            while (micros(pause) < 50) {
            }
            *number_host = ++number;
            auto t = Clock::now();
            CHECK(cudaGraphLaunch(own.exec, stream));
            calls.push_back(micros(t));
            wait_seen(number);
            firsts.push_back(micros(t));
            CHECK(cudaStreamSynchronize(stream));
        }
        print((std::string("launch call, ") + names[way]).c_str(), nodes, calls);
        print((std::string("launch to first kernel seen, ") + names[way]).c_str(), nodes, firsts);
    }
}

// (3) A kernel on the device waits for a word and launches the graph.
__global__ void launcher(cudaGraphExec_t exec, const volatile unsigned* bell, unsigned last,
                         volatile unsigned* ready) {
    unsigned expected = *ready + 1;
    *ready = expected;
    __threadfence_system();
    for (;;) {
        unsigned rung = *bell;
        if (rung >= expected) {
            cudaGraphLaunch(exec, cudaStreamGraphFireAndForget);
            expected = rung + 1;
            if (rung >= last) break;
        }
    }
}

static void measure_device_launch(cudaStream_t stream, int nodes) {
    Recorded own = record(stream, nodes, 1, cudaGraphInstantiateFlagDeviceLaunch, true);
    CHECK(cudaGraphUpload(own.exec, stream));
    CHECK(cudaStreamSynchronize(stream));
    unsigned *bell_host, *bell_device, *ready_host, *ready_device;
    CHECK(cudaHostAlloc(&bell_host, 4096, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&bell_device, bell_host, 0));
    CHECK(cudaHostAlloc(&ready_host, 4096, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&ready_device, ready_host, 0));
    std::vector<double> firsts;
    const int rings = 80, rounds = 6;
    for (int round = 0; round < rounds; round++) {
        *bell_host = 0;
        *ready_host = 0;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        launcher<<<1, 1, 0, stream>>>(own.exec, bell_device, rings, ready_device);
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, cudaGraphInstantiateFlagDeviceLaunch));
        CHECK(cudaGraphUpload(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphLaunch(exec, stream));
        while (*(volatile unsigned*)ready_host == 0) {
        }
        for (int i = 1; i <= rings; i++) {
            auto pause = Clock::now();
            while (micros(pause) < 400) {
            }
            *number_host = 1000000 + round * 1000 + i;
            auto t = Clock::now();
            *(volatile unsigned*)bell_host = i;
            wait_seen(1000000 + round * 1000 + i);
            firsts.push_back(micros(t));
        }
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
    print("host store to first kernel seen, launched by the device", nodes, firsts);
}

int main() {
    CHECK(cudaSetDevice(0));
    CHECK(cudaSetDeviceFlags(cudaDeviceScheduleSpin));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&out_buffer, 1 << 20));
    CHECK(cudaHostAlloc(&seen_host, 4096, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&seen_device, seen_host, 0));
    CHECK(cudaHostAlloc(&number_host, 4096, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&number_device, number_host, 0));
    std::printf("{\"rows\": [\n");
    for (int nodes : {50, 150, 400}) measure_updates(stream, nodes);
    for (int nodes : {50, 150, 400}) measure_cold(stream, nodes);
    std::vector<double> plain;
    for (unsigned i = 1; i <= 500; i++) {
        CHECK(cudaStreamSynchronize(stream));
        *number_host = 2000000 + i;
        auto t = Clock::now();
        first_step<<<1, 1, 0, stream>>>(seen_device, number_device);
        wait_seen(2000000 + i);
        plain.push_back(micros(t));
    }
    print("launch to seen, one plain kernel", 1, plain);
    for (int nodes : {50, 150}) measure_device_launch(stream, nodes);
    print("end", 0, {0}, true);
    std::printf("]}\n");
    return 0;
}
