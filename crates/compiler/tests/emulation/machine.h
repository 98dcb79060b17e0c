// Runs launches written by the test: reads buffers and launches from one file, and writes the
// buffers to another.
#pragma once
#include "cuda_fp16.h"
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <ucontext.h>
#include <vector>

emulation::Index threadIdx, blockIdx, gridDim;

namespace emulation {

uint64_t lanes[1024];
unsigned char* shared;
Operands operands[2][1024];
ByteOperands byte_operands[2][1024];
unsigned turns[1024];

enum State { kReady, kAtBlock, kAtWarp, kGone };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(48 << 10);
    State state = kGone;
};
std::vector<Fiber> fibers(1024);
ucontext_t scheduler;
unsigned running;
std::function<void()> body;

void wait(State state)
{
    Fiber& fiber = fibers[running];
    fiber.state = state;
    swapcontext(&fiber.context, &scheduler);
}
void block_barrier() { wait(kAtBlock); }
void warp_barrier() { wait(kAtWarp); }
void enter()
{
    body();
    wait(kGone);
}

// Releases waiting threads if all running threads of their block or warp are waiting.
bool release(unsigned threads)
{
    bool any = false, block = true;
    for (unsigned i = 0; i < threads; ++i)
        block &= fibers[i].state == kAtBlock || fibers[i].state == kGone;
    for (unsigned first = 0; first < threads; first += 32) {
        unsigned last = std::min(first + 32, threads);
        bool warp = true;
        for (unsigned i = first; i < last; ++i)
            warp &= fibers[i].state == kAtWarp || fibers[i].state == kGone;
        for (unsigned i = first; i < last; ++i)
            if (fibers[i].state != kGone && (block || warp)) fibers[i].state = kReady, any = true;
    }
    return any;
}

// The yield_point of work that is preempted before it starts.
struct PreemptedWatch : tiles::NoYieldPoint {
    static constexpr bool kPreemptible = true;
    bool is_preempted() const { return true; }
    bool last() const
    {
        block_barrier();
        return true;
    }
};

template <class Op, class YieldPoint>
void run_tiles(const unsigned char* args, unsigned first, unsigned last)
{
    alignas(16) typename Op::Args a;
    std::memcpy(&a, args, sizeof a);
    std::vector<unsigned char> shared(Op::kShared + 128);
    unsigned char* aligned = (unsigned char*)(((size_t)shared.data() + 127) & ~(size_t)127);
    emulation::shared = aligned;
    for (unsigned tile = first; tile < last; ++tile) {
        blockIdx.x = tile;
        std::memset(turns, 0, sizeof turns);
        body = [&] {
            YieldPoint yield_point;
            Op::tile(a, (int)tile, aligned, yield_point, tiles::NoDependency());
        };
        for (unsigned i = 0; i < Op::kThreads; ++i) {
            Fiber& fiber = fibers[i];
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            makecontext(&fiber.context, enter, 0);
            fiber.state = kReady;
        }
        do {
            for (unsigned i = 0; i < Op::kThreads; ++i)
                while (fibers[i].state == kReady) {
                    running = threadIdx.x = i;
                    swapcontext(&scheduler, &fibers[i].context);
                }
        } while (release(Op::kThreads));
        for (unsigned i = 0; i < Op::kThreads; ++i)
            if (fibers[i].state != kGone)
                std::fprintf(stderr, "thread %u waits forever\n", i), std::exit(1);
    }
}

std::vector<unsigned char*> buffers;
std::vector<size_t> lengths;

// Preempted work must not write. Fault words are the exception: they are cleared before the work
// is repeated.
template <class Op>
void check_preempted(const unsigned char* args, unsigned tile)
{
    std::vector<std::vector<unsigned char>> before;
    for (size_t i = 0; i < buffers.size(); ++i)
        before.emplace_back(buffers[i], buffers[i] + lengths[i]);
    run_tiles<Op, PreemptedWatch>(args, tile, tile + 1);
    for (size_t i = 0; i < buffers.size(); ++i) {
        bool same = !lengths[i] || !std::memcmp(before[i].data(), buffers[i], lengths[i]);
        if (!same && lengths[i] != 4)
            std::fprintf(stderr, "tile %u was preempted and wrote\n", tile), std::exit(1);
        if (!same) std::memcpy(buffers[i], before[i].data(), lengths[i]);
    }
}

template <class Op>
void launch(const unsigned char* args, unsigned tiles)
{
    gridDim.x = tiles;
    check_preempted<Op>(args, 0);
    check_preempted<Op>(args, tiles - 1);
    run_tiles<Op, tiles::NoYieldPoint>(args, 0, tiles);
}

struct Reader {
    FILE* file;
    uint32_t word()
    {
        uint32_t v = 0;
        if (std::fread(&v, 4, 1, file) != 1) std::exit(2);
        return v;
    }
    void bytes(unsigned char* to, size_t count)
    {
        if (count && std::fread(to, 1, count, file) != count) std::exit(2);
    }
};

using Launcher = void (*)(const unsigned char*, unsigned);

// File: buffers (count, then length and bytes each), launches (count, then kernel, tiles, length of
// arguments, arguments, patches: count, then offset in the arguments, buffer, byte offset each).
int run(int, char** argv, const std::vector<Launcher>& kernels)
{
    Reader in = {std::fopen(argv[1], "rb")};
    for (uint32_t left = in.word(); left; --left) {
        lengths.push_back(in.word());
        void* p = nullptr;
        if (posix_memalign(&p, 16, lengths.back() ? lengths.back() : 1)) return 2;
        buffers.push_back((unsigned char*)p);
        in.bytes(buffers.back(), lengths.back());
    }
    for (uint32_t left = in.word(); left; --left) {
        uint32_t kernel = in.word(), tiles = in.word();
        std::vector<unsigned char> args(in.word());
        in.bytes(args.data(), args.size());
        for (uint32_t patches = in.word(); patches; --patches) {
            uint32_t at = in.word(), buffer = in.word(), offset = in.word();
            unsigned char* p = buffers[buffer] + offset;
            std::memcpy(args.data() + at, &p, 8);
        }
        std::fprintf(stderr, "launch of kernel %u\n", kernel);
        kernels[kernel](args.data(), tiles);
    }
    FILE* out = std::fopen(argv[2], "wb");
    for (size_t i = 0; i < buffers.size(); ++i) std::fwrite(buffers[i], 1, lengths[i], out);
    return std::fclose(out);
}

} // namespace emulation
