// Operators that move elements to positions given by other elements: gather, scatter, padding and
// slices, reversed sequences. A thread moves one unit. Indices are not trusted: a gather reads the
// nearest valid element, a scatter skips invalid positions, and both report it in their fault word.
#pragma once
#include "number.cuh"

namespace tiles {

// An index counted from either end.
__device__ __forceinline__ long long from_start(long long index, int size)
{ return index < 0 ? index + size : index; }

// Whether an index counted from the start is valid; if not, marks the run as failed. All threads
// that mark it write the same value.
__device__ __forceinline__ bool in_range(long long index, int size, u32* fault)
{
    if (index >= 0 && index < size) return true;
    *fault = 1;
    return false;
}

// ---- gather -------------------------------------------------------------------------------------

template <int Rank, int Parts>
struct GatherArgs {
    const void* data;
    const void* indices;
    void* output;
    u32* fault;
    int items;
    int part; // elements between the parts of an index
    int size[Parts]; // of the dimensions that an index addresses
    int stride[Parts]; // in units
    StridedLoop<Rank, 3> loop; // output, data, indices
};

// A unit is one element or several adjacent ones.
template <class Unit, class I, int Rank, int Parts>
struct Gather {
    using Args = GatherArgs<Rank, Parts>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, at[3];
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        a.loop.offsets(item, at);
        int offset = at[1];
#pragma unroll
        for (int i = 0; i < Parts; ++i) {
            long long index = from_start(
                (long long)load_one((const I*)a.indices + at[2] + i * a.part), a.size[i]);
            if (!in_range(index, a.size[i], a.fault)) index = index < 0 ? 0 : a.size[i] - 1;
            offset += (int)index * a.stride[i];
        }
        Unit unit = load_one((const Unit*)a.data + offset);
        if (yield_point.is_preempted()) return false;
        ((Unit*)a.output)[at[0]] = unit;
        return true;
    }
};

// ---- scatter ------------------------------------------------------------------------------------

template <int Rank, int Parts>
struct ScatterArgs {
    const void* updates;
    const void* indices;
    void* output;
    u32* fault;
    int items;
    int part;
    int size[Parts];
    int stride[Parts];
    StridedLoop<Rank, 3> loop; // updates, indices, output
};

// Writes updates over the existing elements; of several with one position, any may win.
template <class T, class I, int Rank, int Parts>
struct Scatter {
    using Args = ScatterArgs<Rank, Parts>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, at[3];
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        a.loop.offsets(item, at);
        int offset = at[2];
#pragma unroll
        for (int i = 0; i < Parts; ++i) {
            long long index = from_start(
                (long long)load_one((const I*)a.indices + at[1] + i * a.part), a.size[i]);
            if (!in_range(index, a.size[i], a.fault)) return true;
            offset += (int)index * a.stride[i];
        }
        T update = load_one((const T*)a.updates + at[0]);
        if (yield_point.is_preempted()) return false;
        ((T*)a.output)[offset] = update;
        return true;
    }
};

// In declaration order of model::op::ScatterReduction.
enum ScatterFoldKind : int { kReplace, kAdd, kMultiply, kLargest, kSmallest };

template <int Rank, int Along, int Parts>
struct ScatterFoldArgs {
    const void* data;
    const void* updates;
    const void* indices;
    void* output;
    u32* fault;
    int items, candidates;
    int part;
    int size[Parts];
    // output, data, updates, indices, index along each dimension that an index addresses
    StridedLoop<Rank, 4 + Parts> loop;
    StridedLoop<Along, 2> along; // over the candidate updates: updates, indices
};

// Every output searches the updates that address it, in their order: the result does not depend on
// timing, and nothing that is written is read.
template <int Kind, class T, class C, class I, int Rank, int Along, int Parts>
struct ScatterFold {
    using Args = ScatterFoldArgs<Rank, Along, Parts>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    static __device__ __forceinline__ bool meant(
        const Args& a, const int (&at)[4 + Parts], int indices)
    {
        bool all = true;
#pragma unroll
        for (int i = 0; i < Parts; ++i) {
            long long index = from_start(
                (long long)load_one((const I*)a.indices + indices + i * a.part), a.size[i]);
            all &= in_range(index, a.size[i], a.fault) && index == at[4 + i];
        }
        return all;
    }
    static __device__ __forceinline__ C fold(C v, C x)
    {
        if (Kind == kAdd) return (C)(v + x);
        if (Kind == kMultiply) return (C)(v * x);
        if (Kind == kLargest) return number::larger(v, x);
        return Kind == kSmallest ? number::smaller(v, x) : x;
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, at[4 + Parts], next[2];
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        a.loop.offsets(item, at);
        C v = (C)computed(load_one((const T*)a.data + at[1]));
        for (int i = 0; i < a.candidates; ++i) {
            a.along.offsets(i, next);
            if (meant(a, at, at[3] + next[1]))
                v = fold(v, (C)computed(load_one((const T*)a.updates + at[2] + next[0])));
        }
        if (yield_point.is_preempted()) return false;
        ((T*)a.output)[at[0]] = Stored<T>::of(v);
        return true;
    }
};

// ---- padding and slices -------------------------------------------------------------------------

// In declaration order of model::op::PadMode.
enum PadMode : int { kPadConstant, kPadReflect, kPadEdge, kPadWrap };

template <int Rank>
struct PadArgs {
    const void* input;
    void* output;
    int items;
    int value_low, value_high; // of the padding, a double
    FastDiv by[Rank];
    int out_stride[Rank], in_stride[Rank];
    int size[Rank]; // of the input
    int begin[Rank]; // output index i is input index i * step - begin
    int step[Rank];
};

template <int Mode, class T, class C, int Rank>
struct Pad {
    using Args = PadArgs<Rank>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    // The input index that `at` maps to, or -1.
    static __device__ __forceinline__ int source(int at, int size)
    {
        if ((u32)at < (u32)size) return at;
        if (Mode == kPadConstant) return -1;
        if (Mode == kPadEdge || size == 1) return at < 0 ? 0 : size - 1;
        int period = Mode == kPadReflect ? 2 * (size - 1) : size, rest = at % period;
        rest = rest < 0 ? rest + period : rest;
        return rest < size ? rest : period - rest;
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x;
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        int to = 0, from = 0;
        bool inside = true;
#pragma unroll
        for (int d = Rank - 1; d >= 0; --d) {
            int at = item;
            if (d > 0) item = a.by[d].split(item, at);
            int place = source(at * a.step[d] - a.begin[d], a.size[d]);
            inside &= place >= 0;
            to += at * a.out_stride[d];
            from += place * a.in_stride[d];
        }
        T y = inside ? load_one((const T*)a.input + from)
                     : Stored<T>::of(Convert<C>::of(__hiloint2double(a.value_high, a.value_low)));
        if (yield_point.is_preempted()) return false;
        ((T*)a.output)[to] = y;
        return true;
    }
};

// ---- sequences ----------------------------------------------------------------------------------

template <int Rank>
struct ReverseArgs {
    const void* input;
    const void* lengths;
    void* output;
    int items, size, stride; // of the time dimension
    StridedLoop<Rank, 4> loop; // output, input without time, lengths, time
};

// Reverses the first elements of each sequence.
template <class T, class I, int Rank>
struct Reverse {
    using Args = ReverseArgs<Rank>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, at[4];
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        a.loop.offsets(item, at);
        long long given = (long long)load_one((const I*)a.lengths + at[2]);
        int length = (int)(given < 0 ? 0 : given > a.size ? a.size : given);
        int time = at[3] < length ? length - 1 - at[3] : at[3];
        T y = load_one((const T*)a.input + at[1] + time * a.stride);
        if (yield_point.is_preempted()) return false;
        ((T*)a.output)[at[0]] = y;
        return true;
    }
};

} // namespace tiles
