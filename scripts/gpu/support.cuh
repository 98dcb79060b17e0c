// Host side of the kernel harness: error checks, random data, comparison with a reference, timing.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base.cuh"

namespace harness {

using namespace tiles;

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t status = (call);                                                               \
        if (status != cudaSuccess) {                                                               \
            const char* why = cudaGetErrorString(status);                                          \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, why);                    \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

template <class T>
T* device_alloc(size_t count)
{
    T* p = nullptr;
    CHECK(cudaMalloc(&p, count * sizeof(T)));
    return p;
}

// ---- random data -------------------------------------------------------------------------------

__device__ inline float hashed(u64 i, u32 seed)
{
    u64 z = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (float)((z ^ z >> 31) >> 40) * (1.f / 8388608.f) - 1.f;
}

// offset + a uniform value in [-scale, scale).
template <class T>
__global__ void fill_kernel(T* to, size_t count, float scale, float offset, u32 seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x)
        to[i] = (T)(offset + scale * hashed(i, seed));
}

template <class T>
void fill(T* to, size_t count, float scale, float offset = 0.f)
{
    static u32 seed = 1;
    if (count) fill_kernel<T><<<1024, 256>>>(to, count, scale, offset, seed++);
    CHECK(cudaGetLastError());
}

// ---- comparison --------------------------------------------------------------------------------

constexpr unsigned short kPoison = 0xfe5a; // a NaN that no kernel computes

struct Difference {
    double error, norm;
    u64 bad; // NaN inside the slice, or a store outside of it
};

template <class T>
__global__ void compare_kernel(const half* got, const T* want, size_t rows, int columns, int stride,
                               Difference* out)
{
    double error = 0, norm = 0;
    u64 bad = 0;
    size_t count = rows * (size_t)stride;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        if ((int)(i % stride) >= columns) {
            bad += __half_as_ushort(got[i]) != kPoison;
            continue;
        }
        double g = (double)(float)got[i],
               w = (double)(float)want[i / stride * columns + i % stride];
        bad += isnan(g) || isnan(w);
        error += (g - w) * (g - w);
        norm += w * w;
    }
    for (int d = 16; d > 0; d /= 2) {
        error += __shfl_xor_sync(~0u, error, d);
        norm += __shfl_xor_sync(~0u, norm, d);
        bad += __shfl_xor_sync(~0u, bad, d);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&out->error, error);
        atomicAdd(&out->norm, norm);
        atomicAdd(&out->bad, bad);
    }
}

inline void poison(half* p, size_t count)
{
    std::vector<unsigned short> block(1 << 16, kPoison);
    size_t done = std::min(count, block.size());
    CHECK(cudaMemcpy(p, block.data(), done * 2, cudaMemcpyHostToDevice));
    for (; done < count; done += std::min(done, count - done))
        CHECK(cudaMemcpy(p + done, p, std::min(done, count - done) * 2, cudaMemcpyDeviceToDevice));
    // Device copies are asynchronous, and kernels run in another stream.
    CHECK(cudaDeviceSynchronize());
}

// Relative error, in the Euclidean norm, of a slice against a dense reference; 1e30 if a value is
// missing, NaN or outside its slice.
template <class T>
double relative_error(const half* got, const T* want, size_t rows, int columns, int stride)
{
    static Difference* d = device_alloc<Difference>(1);
    CHECK(cudaMemset(d, 0, sizeof *d));
    compare_kernel<T><<<512, 256>>>(got, want, rows, columns, stride, d);
    Difference h;
    CHECK(cudaMemcpy(&h, d, sizeof h, cudaMemcpyDeviceToHost));
    return h.bad || !(h.norm > 0) ? 1e30 : sqrt(h.error / h.norm);
}

// ---- launches and graphs -----------------------------------------------------------------------

// A kernel with its launch parameters; the argument struct is kept as bytes.
struct Launch {
    const void* kernel = nullptr;
    u32 grid = 0, threads = 0, shared = 0, cluster = 1;
    std::vector<unsigned char> args;

    template <class A>
    void set(const A& a) { args.assign((const unsigned char*)&a, (const unsigned char*)(&a + 1)); }

    void enqueue(cudaStream_t stream, bool dependent) const
    {
        cudaLaunchAttribute attribute[2];
        cudaLaunchConfig_t config = {};
        config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared,
        config.stream = stream;
        config.attrs = attribute;
        if (cluster > 1) {
            attribute[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
            attribute[config.numAttrs].val.clusterDim = {cluster, 1, 1};
            ++config.numAttrs;
        }
        if (dependent) {
            attribute[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
            ++config.numAttrs;
        }
        void* list[1] = {(void*)args.data()};
        CHECK(cudaLaunchKernelExC(&config, kernel, list));
    }
};

struct Graph {
    cudaGraphExec_t exec = nullptr;
    cudaStream_t stream;
    cudaEvent_t from, to;

    Graph(cudaStream_t s, const std::function<void(cudaStream_t)>& record) : stream(s)
    {
        cudaGraph_t graph;
        CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        record(s);
        CHECK(cudaStreamEndCapture(s, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaEventCreate(&from));
        CHECK(cudaEventCreate(&to));
    }
    ~Graph()
    {
        cudaGraphExecDestroy(exec);
        cudaEventDestroy(from);
        cudaEventDestroy(to);
    }
    double once() // microseconds
    {
        float ms;
        CHECK(cudaEventRecord(from, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(to, stream));
        CHECK(cudaEventSynchronize(to));
        CHECK(cudaEventElapsedTime(&ms, from, to));
        return ms * 1e3;
    }
    double minimum(int times)
    {
        double best = 1e30;
        once();
        for (int i = 0; i < times; ++i) best = std::min(best, once());
        return best;
    }
    double median(int times)
    {
        std::vector<double> all;
        for (int i = 0; i < 3; ++i) once();
        for (int i = 0; i < times; ++i) all.push_back(once());
        std::sort(all.begin(), all.end());
        return all[all.size() / 2];
    }
};

inline int multiprocessors()
{
    static int count = 0;
    if (!count) CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
    return count;
}

inline std::string format(const char* f, ...)
{
    char text[1024];
    va_list list;
    va_start(list, f);
    vsnprintf(text, sizeof text, f, list);
    va_end(list);
    return text;
}

} // namespace harness
