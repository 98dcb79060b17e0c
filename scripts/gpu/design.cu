// Measures what decides how a network is launched: a step's cost beyond its work, as graph nodes, with programmatic dependent
// launch, and with a grid barrier in one persistent launch.
//   design OUT.json
#include "networks.cuh"

using namespace harness;

static std::string g_json;
static void record(const std::string& name, double value)
{
    g_json += format("%s\n\"%s\":%.3f", g_json.empty() ? "" : ",", name.c_str(), value);
    printf("%-64s %10.3f\n", name.c_str(), value);
    fflush(stdout);
}

// ---- the cost of a step -----------------------------------------------------------------------------------------------

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

int main(int argc, char** argv)
{
    if (argc < 2) return fprintf(stderr, "usage: design OUT.json\n"), 2;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    measure_steps(stream);
    FILE* file = fopen(argv[1], "w");
    fprintf(file, "{%s\n}\n", g_json.c_str());
    fclose(file);
    return 0;
}
