// Reductions over any dimensions of any strides, and operators based on them: softmax,
// normalizations, cumulative sums, top-k.
//
// A block computes `Across` results with 256 / Across threads each. If the reduced dimensions are
// the fastest in memory, adjacent threads share a result (Rows), otherwise they have adjacent
// results, so that both read whole lines.
#pragma once
#include "number.cuh"

namespace tiles {

constexpr int kReduceThreads = 256;

template <int Across, bool Rows>
struct Team {
    static constexpr int kAlong = kReduceThreads / Across;
    static __device__ __forceinline__ int along()
    { return Rows ? threadIdx.x % kAlong : threadIdx.x / Across; }
    static __device__ __forceinline__ int across()
    { return Rows ? threadIdx.x / kAlong : threadIdx.x % Across; }

    // The fold of the values of all threads of a result, in an order that does not depend on
    // timing.
    template <class Fold>
    static __device__ __forceinline__ typename Fold::State join(typename Fold::State mine)
    {
        __shared__ typename Fold::State part[kAlong][Across];
        part[along()][across()] = mine;
        for (int s = kAlong / 2; s > 0; s /= 2) {
            __syncthreads();
            if (along() < s) Fold::join(part[along()][across()], part[along() + s][across()]);
        }
        __syncthreads();
        typename Fold::State all = part[0][across()];
        __syncthreads();
        return all;
    }
};

// ---- folds --------------------------------------------------------------------------------------

// In declaration order of model::op::ReduceKind.
enum Reduction : int { kL1, kL2, kLogSum, kLogSumExp, kMax, kMean, kMin, kProd, kSum, kSumSquare };

template <class C, int Kind>
struct Fold {
    struct State {
        C v;
        int count; // nothing has been folded yet
    };
    static __device__ __forceinline__ State start() { return {Kind == kProd ? C(1) : C(0), 0}; }
    static __device__ __forceinline__ void combine(State& s, C v, int count)
    {
        if (count == 0) return;
        if (s.count == 0) s.v = v;
        else if (Kind == kMax) s.v = number::larger(s.v, v);
        else if (Kind == kMin) s.v = number::smaller(s.v, v);
        else if (Kind == kProd) s.v *= v;
        else s.v += v;
        s.count += count;
    }
    static __device__ __forceinline__ void add(State& s, C x, int)
    {
        if (Kind == kL1) x = number::abs(x);
        if (Kind == kL2 || Kind == kSumSquare) x = x * x;
        combine(s, x, 1);
    }
    static __device__ __forceinline__ void join(State& s, const State& other)
    { combine(s, other.v, other.count); }
    static __device__ __forceinline__ C finish(const State& s)
    {
        if constexpr (Kind == kL2) return (C)number::sqrt(s.v);
        if constexpr (Kind == kLogSum) return (C)number::log(s.v);
        if (Kind == kMean) return s.count ? s.v / (C)s.count : C(0);
        return s.v;
    }
};

// The largest value and the sum of exponentials relative to it.
template <class C>
struct ExponentialFold {
    struct State {
        C top, sum;
        int count;
    };
    static __device__ __forceinline__ State start() { return {C(0), C(0), 0}; }
    static __device__ __forceinline__ void add(State& s, C x, int)
    {
        State other = {x, C(1), 1};
        join(s, other);
    }
    static __device__ __forceinline__ void join(State& s, const State& other)
    {
        if (other.count == 0) return;
        if (s.count == 0) {
            s = other;
            return;
        }
        C top = number::larger(s.top, other.top);
        // Equal maxima are the normal case for infinities, whose difference is NaN.
        C mine = s.top == top ? C(1) : number::exp(s.top - top),
          theirs = other.top == top ? C(1) : number::exp(other.top - top);
        s = {top, s.sum * mine + other.sum * theirs, s.count + other.count};
    }
    static __device__ __forceinline__ C finish(const State& s)
    { return s.top + number::log(s.sum); }
};
template <class C>
struct Fold<C, kLogSumExp> : ExponentialFold<C> {};

// The extreme value and its index; of equal ones the first or the last.
template <class C, bool Largest, bool Last>
struct PlaceFold {
    struct State {
        C v;
        int at; // -1 before the first
    };
    static __device__ __forceinline__ State start() { return {C(0), -1}; }
    static __device__ __forceinline__ bool better(const State& a, const State& b)
    {
        if (a.at < 0 || b.at < 0) return b.at < 0 && a.at >= 0;
        if (a.v != b.v) return Largest ? a.v > b.v : a.v < b.v;
        return Last ? a.at > b.at : a.at < b.at;
    }
    static __device__ __forceinline__ void add(State& s, C x, int at)
    {
        State other = {x, at};
        join(s, other);
    }
    static __device__ __forceinline__ void join(State& s, const State& other)
    {
        if (better(other, s)) s = other;
    }
    static __device__ __forceinline__ long long finish(const State& s)
    { return s.at < 0 ? 0 : s.at; }
};

// ---- reductions ---------------------------------------------------------------------------------

template <int Outer, int Inner>
struct ReduceArgs {
    const void* input;
    void* output;
    int results, length;
    StridedLoop<Outer, 2> outer; // into input and output
    StridedLoop<Inner, 1> inner; // into the input
};

template <class T, class Out, class C, class F, int Outer, int Inner, int Across, bool Rows>
struct Reduce {
    using Args = ReduceArgs<Outer, Inner>;
    using Threads = Team<Across, Rows>;
    static constexpr int kThreads = kReduceThreads, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int result = t * Across + Threads::across(), at[2];
        bool live = result < a.results;
        a.outer.offsets(live ? result : 0, at);
        typename F::State state = F::start();
        dependency.wait();
        yield_point.poll();
        if (live)
#pragma unroll 4
            for (int i = Threads::along(); i < a.length; i += Threads::kAlong)
                F::add(
                    state, (C)computed(load_one((const T*)a.input + at[0] + a.inner.offset(i))), i);
        state = Threads::template join<F>(state);
        if (yield_point.is_preempted()) return false;
        if (live && Threads::along() == 0)
            ((Out*)a.output)[at[1]] =
                Stored<Out>::of(Convert<typename Computed<Out>::Type>::of(F::finish(state)));
        return true;
    }
};

// ---- softmax and normalizations -----------------------------------------------------------------

enum Normalization : int {
    kSoftmax,
    kLogSoftmax,
    kHardmax,
    kLayer,
    kRootMeanSquare,
    kNorm1,
    kNorm2
};

template <int Outer, int Inner>
struct NormalizeArgs {
    const void* input;
    void* output;
    const void* scale; // null for ones
    const void* bias; // null for zeros
    void* mean; // null if not requested
    void* deviation; // its inverse, likewise
    int results, length;
    float epsilon;
    StridedLoop<Outer, 6> outer; // in the order of the pointers
    StridedLoop<Inner, 4> inner; // without mean and deviation
};

// The map of every element of a row: (x - shift) * factor, of its exponential if requested.
struct RowMap {
    float shift, factor;
    int place;
};

template <int Kind, class T, class Out, class W, class M, int Outer, int Inner, int Across,
    bool Rows>
struct Normalize {
    using Args = NormalizeArgs<Outer, Inner>;
    using Threads = Team<Across, Rows>;
    static constexpr int kThreads = kReduceThreads, kShared = 0, kBlocks = 1;

    template <class F, class Map>
    static __device__ __forceinline__ typename F::State fold(
        const Args& a, const T* row, bool live, Map map)
    {
        typename F::State state = F::start();
        if (live)
#pragma unroll 4
            for (int i = Threads::along(); i < a.length; i += Threads::kAlong)
                F::add(state, map(computed(load_one(row + a.inner.offset(i)))), i);
        return Threads::template join<F>(state);
    }
    static __device__ __forceinline__ RowMap measure(const Args& a, const T* row, bool live)
    {
        auto same = [](float x) { return x; };
        if constexpr (Kind == kSoftmax || Kind == kLogSoftmax) {
            auto s = fold<ExponentialFold<float>>(a, row, live, same);
            return {s.top, Kind == kSoftmax ? 1.f / s.sum : number::log(s.sum), 0};
        } else if constexpr (Kind == kHardmax) {
            return {0.f, 0.f, fold<PlaceFold<float, true, false>>(a, row, live, same).at};
        } else if constexpr (Kind == kLayer) {
            // Deviations are squared after the mean is known: E[x^2] - mean^2 loses all digits of a
            // small variance.
            float mean = fold<Fold<float, kMean>>(a, row, live, same).v / (float)a.length;
            auto square =
                fold<Fold<float, kSumSquare>>(a, row, live, [=](float x) { return x - mean; });
            return {mean, 1.f / sqrtf(square.v / (float)a.length + a.epsilon), 0};
        } else if constexpr (Kind == kRootMeanSquare) {
            auto square = fold<Fold<float, kSumSquare>>(a, row, live, same);
            return {0.f, 1.f / sqrtf(square.v / (float)a.length + a.epsilon), 0};
        } else {
            float sum = fold<Fold<float, Kind == kNorm1 ? kL1 : kSumSquare>>(a, row, live, same).v;
            float norm = Kind == kNorm1 ? sum : sqrtf(sum);
            return {0.f, norm == 0.f ? 0.f : 1.f / norm, 0};
        }
    }
    static __device__ __forceinline__ float apply(const RowMap& map, float x, int i)
    {
        if (Kind == kSoftmax) return number::exp(x - map.shift) * map.factor;
        if (Kind == kLogSoftmax) return x - map.shift - map.factor;
        if (Kind == kHardmax) return i == map.place ? 1.f : 0.f;
        return (x - map.shift) * map.factor;
    }
    static __device__ __forceinline__ void write(
        const Args& a, const RowMap& map, const int (&base)[6])
    {
#pragma unroll 4
        for (int i = Threads::along(); i < a.length; i += Threads::kAlong) {
            int at[4];
            a.inner.offsets(i, at);
            float y = apply(map, computed(load_one((const T*)a.input + base[0] + at[0])), i);
            if (a.scale) y *= computed(load_one((const W*)a.scale + base[2] + at[2]));
            if (a.bias) y += computed(load_one((const W*)a.bias + base[3] + at[3]));
            ((Out*)a.output)[base[1] + at[1]] = Stored<Out>::of(y);
        }
        if (Threads::along() != 0) return;
        if (a.mean) ((M*)a.mean)[base[4]] = Stored<M>::of(map.shift);
        if (a.deviation) ((M*)a.deviation)[base[5]] = Stored<M>::of(map.factor);
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int result = t * Across + Threads::across(), base[6];
        bool live = result < a.results;
        a.outer.offsets(live ? result : 0, base);
        dependency.wait();
        yield_point.poll();
        RowMap map = measure(a, (const T*)a.input + base[0], live);
        if (yield_point.is_preempted()) return false;
        if (live) write(a, map, base);
        return true;
    }
};

// ---- cumulative sums ----------------------------------------------------------------------------

template <int Outer>
struct RunningArgs {
    const void* input;
    void* output;
    int lines, length;
    int in_stride, out_stride; // along the line
    int exclusive, reverse;
    StridedLoop<Outer, 2> outer;
};

// A warp sums a line.
template <class T, class C, int Outer>
struct RunningSum {
    using Args = RunningArgs<Outer>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int line = t * (kThreads / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
            base[2];
        dependency.wait();
        yield_point.poll();
        if (line >= a.lines) return true;
        a.outer.offsets(line, base);
        if (__any_sync(~0u, yield_point.is_preempted())) return false;
        C carry = C(0);
        for (int first = 0; first < a.length; first += kWarp) {
            int place = first + lane, at = a.reverse ? a.length - 1 - place : place;
            bool inside = place < a.length;
            C sum = inside ? (C)computed(load_one((const T*)a.input + base[0] + at * a.in_stride))
                           : C(0);
#pragma unroll
            for (int d = 1; d < kWarp; d *= 2) {
                C before = __shfl_up_sync(~0u, sum, d);
                if (lane >= d) sum += before;
            }
            C before = __shfl_up_sync(~0u, sum, 1);
            C y = carry + (a.exclusive ? (lane ? before : C(0)) : sum);
            if (inside)
                ((T*)a.output)[base[1] + at * a.out_stride] =
                    Stored<T>::of(Convert<typename Computed<T>::Type>::of(y));
            carry += __shfl_sync(~0u, sum, kWarp - 1);
        }
        return true;
    }
};

// ---- top-k --------------------------------------------------------------------------------------

template <int Outer>
struct TopArgs {
    const void* input;
    void* values;
    void* places;
    int length, count;
    int in_stride, value_stride, place_stride; // along the dimension
    StridedLoop<Outer, 3> outer;
};

// A block repeatedly takes the best element of a row after the previous one: nothing is stored or
// moved.
template <class T, class C, bool Largest, int Outer>
struct Top {
    using Args = TopArgs<Outer>;
    using Threads = Team<1, true>;
    using F = PlaceFold<C, Largest, false>;
    static constexpr int kThreads = kReduceThreads, kShared = 0, kBlocks = 1;

    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        int base[3];
        a.outer.offsets(t, base);
        const T* row = (const T*)a.input + base[0];
        dependency.wait();
        yield_point.poll();
        if (__syncthreads_or(yield_point.is_preempted())) return false;
        typename F::State last = F::start();
        for (int k = 0; k < a.count; ++k) {
            typename F::State best = F::start();
            for (int i = threadIdx.x; i < a.length; i += kThreads) {
                typename F::State next = {(C)computed(load_one(row + i * a.in_stride)), i};
                if (k == 0 || F::better(last, next)) F::join(best, next);
            }
            last = Threads::template join<F>(best);
            if (threadIdx.x == 0) {
                int at = last.at < 0 ? 0 : last.at;
                ((T*)a.values)[base[1] + k * a.value_stride] = load_one(row + at * a.in_stride);
                ((long long*)a.places)[base[2] + k * a.place_stride] = at;
            }
        }
        yield_point.finishing();
        return true;
    }
};

} // namespace tiles
