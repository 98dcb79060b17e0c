// Windows over one to three spatial dimensions of any strides: pooling, resizing, sampling at the
// points of a grid, and response normalization over adjacent channels. A thread computes one
// output.
#pragma once
#include "number.cuh"

namespace tiles {

// ---- pooling ------------------------------------------------------------------------------------

enum Pooling : int { kPoolMax, kPoolPlace, kPoolAverage, kPoolNorm };

template <int Rank>
struct PoolWindowArgs {
    const void* input;
    void* output;
    long long* places; // null unless the indices of the largest are an output
    int items;
    int size[3], stride[3], kernel[3], dilation[3], pad[3];
    int counted[3]; // average: the extent that counts, including counted padding
    int place[3]; // strides for the index of an element
    float order; // of a norm
    // output, indices, input, the index of a plane's first element, the start of the window
    StridedLoop<Rank, 7> loop;
};

template <int Kind, class T, class C, int Rank>
struct PoolWindow {
    using Args = PoolWindowArgs<Rank>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    struct Result {
        C v;
        int place, taps;
    };
    static __device__ __forceinline__ void fold(const Args& a, Result& r, C x, int place)
    {
        if (Kind == kPoolMax || Kind == kPoolPlace) {
            if (r.taps == 0 || x > r.v) r.v = x, r.place = place;
        } else if (Kind == kPoolNorm) {
            r.v += (C)number::power((float)number::abs(x), a.order);
        } else {
            r.v += x;
        }
        ++r.taps;
    }
    static __device__ __forceinline__ Result visit(const Args& a, const int (&at)[7])
    {
        Result r = {C(0), 0, 0};
        const T* input = (const T*)a.input + at[2];
        for (int i = 0; i < a.kernel[0]; ++i) {
            int z = at[4] - a.pad[0] + i * a.dilation[0];
            if ((u32)z >= (u32)a.size[0]) continue;
            for (int j = 0; j < a.kernel[1]; ++j) {
                int y = at[5] - a.pad[1] + j * a.dilation[1];
                if ((u32)y >= (u32)a.size[1]) continue;
                for (int k = 0; k < a.kernel[2]; ++k) {
                    int x = at[6] - a.pad[2] + k * a.dilation[2];
                    if ((u32)x >= (u32)a.size[2]) continue;
                    C v = (C)computed(
                        load_one(input + z * a.stride[0] + y * a.stride[1] + x * a.stride[2]));
                    fold(a, r, v, z * a.place[0] + y * a.place[1] + x * a.place[2]);
                }
            }
        }
        return r;
    }
    // Taps of a window that count towards its mean.
    static __device__ __forceinline__ int taps(const Args& a, const int (&at)[7], int inside)
    {
        if (a.counted[0] < 0) return inside;
        int all = 1;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            int room = max(a.counted[i] - at[4 + i], 0);
            all *= min((room + a.dilation[i] - 1) / a.dilation[i], a.kernel[i]);
        }
        return all;
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, at[7];
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        a.loop.offsets(item, at);
        Result r = visit(a, at);
        if (Kind == kPoolAverage) {
            int count = taps(a, at, r.taps);
            r.v = count ? (C)(r.v / (C)count) : C(0);
        }
        if (Kind == kPoolNorm) r.v = (C)number::power((float)r.v, 1.f / a.order);
        if (yield_point.is_preempted()) return false;
        ((T*)a.output)[at[0]] = Stored<T>::of(r.v);
        if (Kind == kPoolPlace) a.places[at[1]] = (long long)at[3] + r.place;
        return true;
    }
};

// ---- sampling between pixels --------------------------------------------------------------------

enum Sampling : int { kSampleNearest, kSampleLinear, kSampleCubic };

__device__ __forceinline__ float cubic_weight(float x, float a)
{
    x = fabsf(x);
    if (x <= 1.f) return ((a + 2.f) * x - (a + 3.f)) * x * x + 1.f;
    return x < 2.f ? ((x - 5.f) * x + 8.f) * x * a - 4.f * a : 0.f;
}

// The pixels that a point along one dimension is interpolated from; positions below zero read
// nothing.
template <int Mode>
struct Taps {
    static constexpr int kCount = Mode == kSampleCubic ? 4 : Mode == kSampleLinear ? 2 : 1;
    int at[kCount];
    float weight[kCount];
};

// The weighted sums of the taps of `Axes` dimensions, for `Vec` adjacent elements.
template <int Mode, int Axes, class T, class C, int Vec>
__device__ __forceinline__ void blend(
    const T* input, const Taps<Mode> (&taps)[Axes], const int (&stride)[Axes], C (&sum)[Vec])
{
    constexpr int kCount = Taps<Mode>::kCount;
#pragma unroll
    for (int v = 0; v < Vec; ++v) sum[v] = C(0);
    for (int i = 0; i < kCount; ++i) {
        if (taps[0].at[i] < 0) continue;
        for (int j = 0; j < (Axes > 1 ? kCount : 1); ++j) {
            int y = Axes > 1 ? taps[Axes > 1].at[j] : 0;
            if (y < 0) continue;
            for (int k = 0; k < (Axes > 2 ? kCount : 1); ++k) {
                int x = Axes > 2 ? taps[Axes > 2 ? 2 : 0].at[k] : 0;
                if (x < 0) continue;
                int offset = taps[0].at[i] * stride[0];
                if (Axes > 1) offset += y * stride[Axes > 1];
                if (Axes > 2) offset += x * stride[Axes > 2 ? 2 : 0];
                Pack<T, Vec> pixel = load_pack<T, Vec>(input + offset);
                float weight = taps[0].weight[i];
                if (Axes > 1) weight *= taps[Axes > 1].weight[j];
                if (Axes > 2) weight *= taps[Axes > 2 ? 2 : 0].weight[k];
#pragma unroll
                for (int v = 0; v < Vec; ++v) {
                    C value = (C)computed(pixel.v[v]);
                    if (Mode == kSampleNearest) sum[v] = value;
                    else sum[v] += (C)(weight * (float)value);
                }
            }
        }
    }
}

// ---- resizing -----------------------------------------------------------------------------------

// In declaration order of model::op::CoordinateMode and NearestMode.
enum Coordinates : int {
    kHalfPixel,
    kHalfPixelSymmetric,
    kPytorchHalfPixel,
    kAlignCorners,
    kAsymmetric,
    kCropAndResize
};
enum NearestPixel : int { kPreferFloor, kPreferCeil, kFloor, kCeil };

// Coordinates are computed in double precision: an error of a pixel is visible, and positions are
// often on an edge.
struct Twice {
    int low, high;
    __device__ __forceinline__ double value() const { return __hiloint2double(high, low); }
};

struct ResizeAxis {
    int input, output, stride;
    Twice scale, begin, end; // output per input; the region of CropAndResize

    __device__ __forceinline__ double coordinate(int mode, int position) const
    {
        double x = position, last = input - 1.0, by = scale.value(), width = by * input;
        switch (mode) {
        case kAlignCorners: return width == 1.0 ? 0.0 : x * last / (width - 1.0);
        case kAsymmetric: return x / by;
        case kPytorchHalfPixel: return width == 1.0 ? -0.5 : (x + 0.5) / by - 0.5;
        case kHalfPixelSymmetric:
            return input / 2.0 * (1.0 - output / width) + (x + 0.5) / by - 0.5;
        case kCropAndResize: {
            double part = end.value() - begin.value();
            return (width == 1.0 ? part * last / 2.0 : x * part * last / (width - 1.0)) +
                   begin.value() * last;
        }
        default: return (x + 0.5) / by - 0.5;
        }
    }
};

template <int Rank, int Axes>
struct ResizeArgs {
    const void* input;
    void* output;
    int items;
    int coordinates, nearest, exclude_outside;
    float cubic, extrapolation;
    ResizeAxis axis[Axes];
    // Output, input, position along each resized dimension. The fastest counts vectors.
    StridedLoop<Rank, 2 + Axes> loop;
};

template <int Mode, class T, class C, int Rank, int Axes, int Vec>
struct Resize {
    using Args = ResizeArgs<Rank, Axes>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    static __device__ __forceinline__ int pick(int mode, double ratio)
    {
        if (ratio == 1.0 || mode == kCeil) return 1;
        return mode == kPreferFloor ? ratio > 0.5 : mode == kPreferCeil ? ratio >= 0.5 : 0;
    }
    // The pixel on the left is preferred: on a pixel the ratio is one, not zero.
    static __device__ __forceinline__ Taps<Mode> taps(
        const Args& a, const ResizeAxis& axis, double x)
    {
        Taps<Mode> r;
        x = fmin(fmax(x, -1e9), 1e9);
        int below = (int)ceil(x) - 1;
        double ratio = x - below;
        float f = (float)ratio, sum = 0.f;
        constexpr int kCount = Taps<Mode>::kCount;
        int first = Mode == kSampleNearest  ? below + pick(a.nearest, ratio)
                    : Mode == kSampleLinear ? below
                                            : below - 1;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            float weight = Mode == kSampleNearest  ? 1.f
                           : Mode == kSampleLinear ? (i ? f : 1.f - f)
                                                   : cubic_weight((float)(i - 1) - f, a.cubic);
            if (a.exclude_outside && (u32)(first + i) >= (u32)axis.input) weight = 0.f;
            r.at[i] = min(max(first + i, 0), axis.input - 1);
            r.weight[i] = weight;
            sum += weight;
        }
        if (a.exclude_outside && sum != 0.f)
#pragma unroll
            for (int i = 0; i < kCount; ++i) r.weight[i] /= sum;
        return r;
    }
    template <class YieldPoint, class Dependency>
    static __device__ __forceinline__ bool tile(
        const Args& a, int t, unsigned char*, YieldPoint& yield_point, const Dependency& dependency)
    {
        yield_point.finishing();
        int item = t * kThreads + threadIdx.x, at[2 + Axes], stride[Axes];
        dependency.wait();
        yield_point.poll();
        if (item >= a.items) return true;
        a.loop.offsets(item, at);
        Taps<Mode> all[Axes];
        bool outside = false;
#pragma unroll
        for (int i = 0; i < Axes; ++i) {
            double x = a.axis[i].coordinate(a.coordinates, at[2 + i]);
            outside |= a.coordinates == kCropAndResize && (x < 0.0 || x > a.axis[i].input - 1.0);
            all[i] = taps(a, a.axis[i], x);
            stride[i] = a.axis[i].stride;
        }
        C y[Vec];
        blend<Mode, Axes, T, C, Vec>((const T*)a.input + at[1], all, stride, y);
        Pack<T, Vec> out;
#pragma unroll
        for (int v = 0; v < Vec; ++v)
            out.v[v] = Stored<T>::of(outside ? (C)a.extrapolation : y[v]);
        if (yield_point.is_preempted()) return false;
        store_pack((T*)a.output + at[0], out);
        return true;
    }
};

// ---- sampling at the points of a grid -----------------------------------------------------------

// In declaration order of model::op::GridPadding.
enum GridBorder : int { kZeros, kBorder, kReflection };

template <int Rank, int Axes>
struct GridArgs {
    const void* input;
    const void* grid;
    void* output;
    int items, padding, align_corners;
    int component; // elements between the coordinates of a point, the innermost dimension first
    int size[Axes], stride[Axes];
    StridedLoop<Rank, 3> loop; // output, input, grid
};

template <int Mode, class T, class G, int Rank, int Axes>
struct GridSample {
    using Args = GridArgs<Rank, Axes>;
    static constexpr int kThreads = 128, kShared = 0, kBlocks = 1;

    static __device__ __forceinline__ double reflected(double x, double low, double high)
    {
        double range = high - low;
        if (range <= 0.0 || x - x != 0.0) return fmax(low, 0.0);
        if (x >= low && x <= high) return x;
        double over = x < low ? low - x : x - high, rest = fmod(over, range);
        bool even = fmod(trunc(over / range), 2.0) == 0.0;
        return (x < low) == even ? low + rest : high - rest;
    }
    static __device__ __forceinline__ int pixel(
        const Args& a, int index, int size, double low, double high)
    {
        if (a.padding == kZeros) return (u32)index < (u32)size ? index : -1;
        if (a.padding == kReflection) index = (int)reflected(index, low, high);
        return min(max(index, 0), size - 1);
    }
    static __device__ __forceinline__ Taps<Mode> taps(const Args& a, float point, int size)
    {
        double low = a.align_corners ? 0.0 : -0.5, high = a.align_corners ? size - 1.0 : size - 0.5;
        double x = a.align_corners ? (point + 1.f) / 2.f * ((float)size - 1.f)
                                   : ((point + 1.f) * (float)size - 1.f) / 2.f;
        if (Mode == kSampleNearest) x = rint(x);
        if (x < low || x > high)
            x = a.padding == kZeros    ? x
                : a.padding == kBorder ? fmin(fmax(x, 0.0), size - 1.0)
                                       : reflected(x, low, high);
        x = x == x ? fmin(fmax(x, -1e9), 1e9) : -1e9;
        int first = Mode == kSampleNearest ? (int)x : (int)floor(x) - (Mode == kSampleCubic);
        float ratio = (float)(x - floor(x));
        Taps<Mode> r;
#pragma unroll
        for (int i = 0; i < Taps<Mode>::kCount; ++i) {
            r.at[i] = pixel(a, first + i, size, low, high);
            r.weight[i] = Mode == kSampleNearest  ? 1.f
                          : Mode == kSampleLinear ? (i ? ratio : 1.f - ratio)
                                                  : cubic_weight((float)(i - 1) - ratio, -0.75f);
        }
        return r;
    }
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
        Taps<Mode> all[Axes];
#pragma unroll
        for (int i = 0; i < Axes; ++i)
            all[i] =
                taps(a, computed(load_one((const G*)a.grid + at[2] + (Axes - 1 - i) * a.component)),
                    a.size[i]);
        float y[1];
        blend<Mode, Axes, T, float, 1>((const T*)a.input + at[1], all, a.stride, y);
        if (yield_point.is_preempted()) return false;
        ((T*)a.output)[at[0]] = Stored<T>::of(y[0]);
        return true;
    }
};

// ---- response normalization ---------------------------------------------------------------------

template <int Rank>
struct ResponseArgs {
    const void* input;
    void* output;
    int items, channels, channel_stride, before, after;
    float alpha, beta, bias; // alpha already divided by the window
    StridedLoop<Rank, 3> loop; // output, input at channel 0, channel
};

template <class T, int Rank>
struct Response {
    using Args = ResponseArgs<Rank>;
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
        const T* input = (const T*)a.input + at[1];
        float sum = 0.f;
        for (int c = max(at[2] - a.before, 0); c <= min(at[2] + a.after, a.channels - 1); ++c) {
            float x = computed(load_one(input + c * a.channel_stride));
            sum = fmaf(x, x, sum);
        }
        float x = computed(load_one(input + at[2] * a.channel_stride));
        if (yield_point.is_preempted()) return false;
        ((T*)a.output)[at[0]] = Stored<T>::of(x / number::power(a.bias + a.alpha * sum, a.beta));
        return true;
    }
};

} // namespace tiles
