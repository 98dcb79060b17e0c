// Chains of element-wise operators as one kernel, over broadcast operands of any strides; and
// copies that change the fastest dimension, through shared memory. The compiler generates the
// function of a chain; this is its basis.
#pragma once
#include "number.cuh"

namespace tiles {

// The layout of an operand along the rows of the output: adjacent, one element for the whole row,
// strided, or none (its value is its offset: a coordinate of the output).
enum Access : int { kRow, kOne, kApart, kPlace };

template <int Inputs, int Rank>
struct ChainArgs {
    void* output;
    const void* input[Inputs ? Inputs : 1];
    int items; // vectors of all rows
    int width; // elements of a row
    int padded; // and of its slack, which is set to zero
    int apart[Inputs ? Inputs : 1]; // elements between neighbours in a row
    // The fastest dimension counts the vectors of a row. Operands: the output, the position in the
    // row, the inputs.
    StridedLoop<Rank, Inputs + 2> loop;
};

// The position at which a thread computes one vector.
template <int Inputs, int Rank, int Count>
struct ChainPlace {
    const ChainArgs<Inputs, Rank>& args;
    int offset[Inputs + 2];
    int left; // elements from here to the end of the row

    __device__ __forceinline__ ChainPlace(const ChainArgs<Inputs, Rank>& args, int item)
        : args(args)
    {
        args.loop.offsets(item, offset);
        left = args.width - offset[1];
    }
    // `Inputs` values of input `i`; zeros beyond the row.
    template <class T, int Access, class C>
    __device__ __forceinline__ void load(int i, C (&x)[Count]) const
    {
        const T* p = (const T*)args.input[i] + offset[i + 2];
        if constexpr (Access == kPlace) {
#pragma unroll
            for (int j = 0; j < Count; ++j) x[j] = (C)(offset[i + 2] + j * args.apart[i]);
        } else if constexpr (Access == kOne) {
            C v = (C)computed(load_one(p));
#pragma unroll
            for (int j = 0; j < Count; ++j) x[j] = v;
        } else {
            if (Access == kRow && left >= Count) {
                Pack<T, Count> r = load_pack<T, Count>(p);
#pragma unroll
                for (int j = 0; j < Count; ++j) x[j] = (C)computed(r.v[j]);
                return;
            }
            int apart = Access == kRow ? 1 : args.apart[i];
#pragma unroll
            for (int j = 0; j < Count; ++j)
                x[j] = j < left ? (C)computed(load_one(p + j * apart)) : C(0);
        }
    }
    template <class T>
    __device__ __forceinline__ void store(Pack<T, Count>& y) const
    {
        T* p = (T*)args.output + offset[0];
        int room = args.padded - offset[1];
#pragma unroll
        for (int j = 0; j < Count; ++j)
            if (j >= left) y.v[j] = Stored<T>::of((typename Computed<T>::Type)0);
        if (room >= Count) {
            store_pack(p, y);
            return;
        }
#pragma unroll
        for (int j = 0; j < Count; ++j)
            if (j < room) p[j] = y.v[j];
    }
};

// `Function` has kInputs, kRank, kCount (elements of a vector), and `apply(place, yield_point)`,
// which loads, computes and stores. A thread computes `Items` vectors: where they are short, the
// start of a block costs more than one of them.
template <class Function, int Items = 1>
struct Chain {
    using Args = ChainArgs<Function::kInputs, Function::kRank>;
    using Place = ChainPlace<Function::kInputs, Function::kRank, Function::kCount>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int first = t * (kThreads * Items) + threadIdx.x;
        dependency.wait();
        yield_point.poll();
#pragma unroll
        for (int item = first; item < first + kThreads * Items; item += kThreads)
            if (item < a.items && !Function::apply(Place(a, item), yield_point)) return false;
        return true;
    }
};

// ---- copies that change the fastest dimension ---------------------------------------------------

constexpr int kTurn = 32; // edge of a square

template <int Rank>
struct TurnArgs {
    const void* input;
    void* output;
    // Adjacent in the input; their stride in the output.
    int columns, column_stride;
    // Adjacent in the output; their stride in the input.
    int rows, row_stride;
    int padded; // rows and slack, which is set to zero
    FastDiv by_columns, by_rows; // squares along each
    StridedLoop<Rank, 2> loop; // all other dimensions, into input and output
};

// To[outer][column][row] = From[outer][row][column].
template <class From, class To, class C, int Rank>
struct Turn {
    using Args = TurnArgs<Rank>;
    static constexpr int kThreads = 256, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        __shared__ To square[kTurn][kTurn + 1];
        yield_point.finishing();
        int column, row, base[2];
        a.loop.offsets(a.by_rows.split(a.by_columns.split(t, column), row), base);
        column *= kTurn, row *= kTurn;
        int fast = threadIdx.x % kTurn, slow = threadIdx.x / kTurn;
        const From* from = (const From*)a.input + base[0];
        To* to = (To*)a.output + base[1];
        dependency.wait();
        yield_point.poll();
#pragma unroll
        for (int i = slow; i < kTurn; i += kThreads / kTurn) {
            C v = C(0);
            if (row + i < a.rows && column + fast < a.columns)
                v = Convert<C>::of(
                    computed(load_one(from + (row + i) * a.row_stride + column + fast)));
            square[i][fast] = Stored<To>::of(v);
        }
        __syncthreads();
        if (yield_point.is_preempted()) return false;
#pragma unroll
        for (int i = slow; i < kTurn; i += kThreads / kTurn)
            if (row + fast < a.padded && column + i < a.columns)
                to[(column + i) * a.column_stride + row + fast] = square[fast][i];
        return true;
    }
};

} // namespace tiles
