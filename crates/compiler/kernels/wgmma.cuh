// Hopper's own instructions (sm_90a): barriers in shared memory that count bytes, copies through
// tensor maps, and products of a warpgroup (four warps) whose operands are in shared memory.
#pragma once
#include "base.cuh"

namespace tiles {

// ---- barriers -----------------------------------------------------------------------------------

// An mbarrier: a phase ends when all arrivals and all announced bytes are in. `at` is an address in
// shared memory.
__device__ __forceinline__ void barrier_init(u32 at, u32 arrivals)
{ asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory"); }
__device__ __forceinline__ void barrier_end(u32 at)
{ asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at) : "memory"); }
// Makes initialized barriers known to the copy engine.
__device__ __forceinline__ void barrier_publish()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at)
{ asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
// Arrives and announces bytes that copies will deliver.
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity)
{
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
}

// ---- copies through tensor maps -----------------------------------------------------------------

// Encoded by the driver: address, sizes, strides, box and swizzle of a tensor.
struct alignas(128) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map)
{ asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// A box of a matrix at column x and row y.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, u32 barrier, int x, int y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}
// A box of five dimensions; the three in the middle are whole.
__device__ __forceinline__ void copy_box5(u32 to, const TensorMap& map, u32 barrier, int x, int y)
{
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %5, %5, %5, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(0)
        : "memory");
}
// One filter tap of consecutive output pixels: channels from `channel` on of the input pixels that
// start at (x, y) of `image`, moved by the tap's offset.
__device__ __forceinline__ void copy_pixels(u32 to, const TensorMap& map, u32 barrier, int channel,
    int x, int y, int image, int tap_x, int tap_y)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(channel), "r"(x), "r"(y), "r"(image), "h"((short)tap_x),
        "h"((short)tap_y)
        : "memory");
}

// ---- products of a warpgroup --------------------------------------------------------------------

// Describes an operand in shared memory whose rows are 128 bytes of depth, swizzled as the copy
// engine does: eight rows are 1024 bytes. Its address is a multiple of 1024, plus 32 per k16 step.
__device__ __forceinline__ u64 operand(u32 address)
{ return (u64)(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

__device__ __forceinline__ void products_begin()
{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit()
{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void products_wait()
{ asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory"); }

#define TILES_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TILES_SUMS16(i) TILES_SUMS4(i), TILES_SUMS4(i + 4), TILES_SUMS4(i + 8), TILES_SUMS4(i + 12)

// d += a * b: 64 rows, N columns, 16 of depth. Of a thread's sums, d[4 * j + 2 * h + e] is row
// warp % 4 * 16 + lane / 4 + 8 * h and column j * 8 + lane % 4 * 2 + e.
template <int N>
struct Products;

template <>
struct Products<64> {
    static __device__ __forceinline__ void issue(float (&d)[32], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                     "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                     "%32, %33, 1, 1, 1, 0, 0;"
            : TILES_SUMS16(0), TILES_SUMS16(16)
            : "l"(a), "l"(b));
    }
};
template <>
struct Products<96> {
    static __device__ __forceinline__ void issue(float (&d)[48], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                     "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,"
                     "%38,%39,%40,%41,%42,%43,%44,%45,%46,%47},"
                     "%48, %49, 1, 1, 1, 0, 0;"
            : TILES_SUMS16(0), TILES_SUMS16(16), TILES_SUMS16(32)
            : "l"(a), "l"(b));
    }
};
template <>
struct Products<128> {
    static __device__ __forceinline__ void issue(float (&d)[64], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                     "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,"
                     "%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
                     "%56,%57,%58,%59,%60,%61,%62,%63},"
                     "%64, %65, 1, 1, 1, 0, 0;"
            : TILES_SUMS16(0), TILES_SUMS16(16), TILES_SUMS16(32), TILES_SUMS16(48)
            : "l"(a), "l"(b));
    }
};
template <>
struct Products<192> {
    static __device__ __forceinline__ void issue(float (&d)[96], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                     "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,"
                     "%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
                     "%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,"
                     "%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,"
                     "%92,%93,%94,%95},"
                     "%96, %97, 1, 1, 1, 0, 0;"
            : TILES_SUMS16(0), TILES_SUMS16(16), TILES_SUMS16(32), TILES_SUMS16(48),
              TILES_SUMS16(64), TILES_SUMS16(80)
            : "l"(a), "l"(b));
    }
};
template <>
struct Products<256> {
    static __device__ __forceinline__ void issue(float (&d)[128], u64 a, u64 b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                     "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,"
                     "%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
                     "%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,"
                     "%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,"
                     "%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,"
                     "%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,"
                     "%122,%123,%124,%125,%126,%127},"
                     "%128, %129, 1, 1, 1, 0, 0;"
            : TILES_SUMS16(0), TILES_SUMS16(16), TILES_SUMS16(32), TILES_SUMS16(48),
              TILES_SUMS16(64), TILES_SUMS16(80), TILES_SUMS16(96), TILES_SUMS16(112)
            : "l"(a), "l"(b));
    }
};

#undef TILES_SUMS16
#undef TILES_SUMS4

} // namespace tiles
