// Copies to shared memory and tensor-core instructions on the host, as functions of `tiles`: lanes
// exchange their operands at the barriers of their warp. Addresses of shared memory are offsets, as
// on a device.
inline u32 shared_address(const void* p)
{ return (u32)((const unsigned char*)p - emulation::shared_memory); }

inline void copy_partly(u32 to, const void* from, int bytes)
{
    std::memset(emulation::shared_memory + to, 0, 16);
    std::memcpy(emulation::shared_memory + to, from, bytes);
}
template <int Bytes>
inline void copy_async(u32 to, const void* from, bool valid)
{
    std::memset(emulation::shared_memory + to, 0, Bytes);
    if (valid) std::memcpy(emulation::shared_memory + to, from, Bytes);
}
inline void copy_commit() {}
template <int Pending>
inline void copy_wait()
{}
inline void copy_wait_all() {}

// Row `row` of matrix `i` is at the address of lane 8 i + row.
inline void load_matrices(u32 (&r)[4], u32 address)
{
    unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; ++i) {
        u32 from = __shfl_sync(~0u, address, i * 8 + lane / 4);
        std::memcpy(&r[i], emulation::shared_memory + from + lane % 4 * 4, 4);
    }
}
inline void load_matrices_transposed(u32 (&r)[4], u32 address)
{
    unsigned lane = threadIdx.x % 32;
    for (unsigned i = 0; i < 4; ++i) {
        u32 value = 0;
        for (unsigned half = 0; half < 2; ++half) {
            u32 from = __shfl_sync(~0u, address, i * 8 + lane % 4 * 2 + half);
            uint16_t bits;
            std::memcpy(&bits, emulation::shared_memory + from + lane / 4 * 2, 2);
            value |= (u32)bits << 16 * half;
        }
        r[i] = value;
    }
}
inline float half_of(u32 pair, unsigned which)
{ return __half2float(half{(uint16_t)(pair >> 16 * which)}); }
// 16x8 sums of products of depth 16. A word of `a` holds two neighbours of row lane / 4 (+ 8 for
// odd words) from column lane % 4 * 2 (+ 8 for words 2 and 3), a word of `b` those of column
// lane / 4.
inline void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1)
{
    unsigned lane = threadIdx.x % 32;
    for (unsigned from = 0; from < 4; ++from) {
        unsigned row = lane / 4 * 4 + from;
        u32 w[4];
        for (int i = 0; i < 4; ++i) w[i] = __shfl_sync(~0u, a[i], row);
        for (unsigned column = 0; column < 2; ++column) {
            unsigned other = (lane % 4 * 2 + column) * 4 + from;
            u32 v[2] = {__shfl_sync(~0u, b0, other), __shfl_sync(~0u, b1, other)};
            for (unsigned r = 0; r < 2; ++r)
                for (unsigned k = 0; k < 2; ++k)
                    for (unsigned e = 0; e < 2; ++e)
                        d[2 * r + column] += half_of(w[r + 2 * k], e) * half_of(v[k], e);
        }
    }
}
inline float power_of_two(float x) { return std::exp2(x); }
