// Reference operators: one thread per output element, no optimization. They take the argument
// structs of the kernels and share no other code with them except the activation.
#pragma once
#include "attention.cuh"
#include "depthwise.cuh"
#include "elementwise.cuh"
#include "norm.cuh"
#include "pool.cuh"
#include "support.cuh"

namespace harness {

template <class T>
__global__ void conv_reference(ConvArgs a, bool pre, T* out, int stride)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= (size_t)a.rows * a.out_c) return;
    int n = (int)(i % a.out_c), m = (int)(i / a.out_c);
    int out_w = (int)a.by_out_w.divisor, plane = (int)a.by_out_hw.divisor;
    int image = m / plane, y = m % plane / out_w * a.stride_h - a.pad_h;
    int x = m % plane % out_w * a.stride_w - a.pad_w;
    float sum = 0.f;
    for (int k = 0; k < a.depth; k += a.in_c) {
        int ky = k / a.in_c / a.ker_w, kx = k / a.in_c % a.ker_w;
        int iy = y + ky * a.dil_h, ix = x + kx * a.dil_w;
        if (iy < 0 || iy >= a.in_h || ix < 0 || ix >= a.in_w) continue;
        const half* in = a.input + (size_t)((image * a.in_h + iy) * a.in_w + ix) * a.in_stride;
        const half* w = a.weight + (size_t)n * a.weight_stride + k;
        for (int c = 0; c < a.in_c; ++c) {
            float v = (float)in[c];
            if (pre) v = fmaxf(v * (float)a.pre[c] + (float)a.pre[a.depth + c], 0.f);
            sum += v * (float)w[c];
        }
    }
    if (a.bias) sum += a.bias[n];
    if (a.residual) sum += (float)a.residual[(size_t)m * a.residual_stride + n];
    out[(size_t)m * stride + n] = (T)activate(sum, a.act);
}

template <class T>
__global__ void depthwise_reference(DepthwiseArgs a, int rows, int channels, T* out, int stride)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= (size_t)rows * channels) return;
    int c = (int)(i % channels), m = (int)(i / channels);
    int out_h = (int)a.by_out_h.divisor, x = m % a.out_w, y = m / a.out_w % out_h,
        image = m / a.out_w / out_h;
    float sum = a.bias ? a.bias[c] : 0.f;
    for (int ky = 0; ky < a.ker_h; ++ky)
        for (int kx = 0; kx < a.ker_w; ++kx) {
            int iy = y * a.stride_h - a.pad_h + ky * a.dil_h,
                ix = x * a.stride_w - a.pad_w + kx * a.dil_w;
            if (iy < 0 || iy >= a.in_h || ix < 0 || ix >= a.in_w) continue;
            sum += (float)a.input[(size_t)((image * a.in_h + iy) * a.in_w + ix) * a.in_stride + c] *
                   (float)a.weight[(ky * a.ker_w + kx) * channels + c];
        }
    if (a.residual) sum += (float)a.residual[(size_t)m * a.residual_stride + c];
    out[(size_t)m * stride + c] = (T)activate(sum, a.act);
}

template <class T>
__global__ void pool_reference(PoolArgs a, bool max, int rows, int channels, T* out, int stride)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= (size_t)rows * channels) return;
    int c = (int)(i % channels), m = (int)(i / channels), out_w = (int)a.by_out_w.divisor,
        out_h = (int)a.by_out_h.divisor;
    int x = m % out_w, y = m / out_w % out_h, image = m / out_w / out_h, inside = 0;
    float best = max ? -1e30f : 0.f;
    for (int ky = 0; ky < a.ker_h; ++ky)
        for (int kx = 0; kx < a.ker_w; ++kx) {
            int iy = y * a.stride_h - a.pad_h + ky, ix = x * a.stride_w - a.pad_w + kx;
            if (iy < 0 || iy >= a.in_h || ix < 0 || ix >= a.in_w) continue;
            float v =
                (float)a.input[(size_t)((image * a.in_h + iy) * a.in_w + ix) * a.in_stride + c];
            best = max ? fmaxf(best, v) : best + v;
            ++inside;
        }
    out[(size_t)m * stride + c] =
        (T)(max ? best : best / (float)(a.count_padding ? a.ker_h * a.ker_w : inside));
}

template <class T>
__global__ void global_pool_reference(GlobalPoolArgs a, int images, T* out, int stride)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= (size_t)images * a.channels) return;
    int c = (int)(i % a.channels), image = (int)(i / a.channels);
    float sum = 0.f;
    for (int p = 0; p < a.pixels; ++p) {
        float v = (float)((const half*)a.input)[((size_t)image * a.pixels + p) * a.in_stride + c];
        sum += a.pre ? fmaxf(v * (float)a.pre[c] + (float)a.pre[a.channels + c], 0.f) : v;
    }
    out[(size_t)image * stride + c] = (T)(sum / (float)a.pixels);
}

// One block of one thread per row.
template <class T>
__global__ void norm_reference(NormArgs a, bool embed, T* out)
{
    int row = blockIdx.x, position = row % (int)a.by_tokens.divisor;
    auto value = [&](int c) {
        return embed ? (float)a.word[(size_t)a.token[row] * a.width + c] +
                           (float)a.position[(size_t)position * a.width + c]
                     : (float)a.input[(size_t)row * a.width + c];
    };
    float mean = 0.f, square = 0.f;
    for (int c = 0; c < a.width; ++c) mean += value(c);
    mean /= (float)a.width;
    for (int c = 0; c < a.width; ++c) square += (value(c) - mean) * (value(c) - mean);
    float scale = 1.f / sqrtf(square / (float)a.width + a.epsilon);
    for (int c = 0; c < a.width; ++c)
        out[(size_t)row * a.width + c] = (T)((value(c) - mean) * scale * a.gamma[c] + a.beta[c]);
}

template <class T>
__global__ void softmax_reference(SoftmaxArgs a, T* out)
{
    const half* in = a.input + (size_t)blockIdx.x * a.width;
    float top = -1e30f, sum = 0.f;
    for (int c = 0; c < a.width; ++c) top = fmaxf(top, (float)in[c]);
    for (int c = 0; c < a.width; ++c) sum += expf((float)in[c] - top);
    for (int c = 0; c < a.width; ++c)
        out[(size_t)blockIdx.x * a.width + c] = (T)(expf((float)in[c] - top) / sum);
}

// One block of 64 threads per (sequence, head, query): scores in shared memory, then one thread per
// dimension.
template <class T>
__global__ void attention_reference(AttentionArgs a, T* out)
{
    extern __shared__ float score[];
    int heads = a.by_outer[2].divisor;
    int query = blockIdx.x % a.queries, head = blockIdx.x / a.queries % heads,
        image = blockIdx.x / a.queries / heads;
    const half* q = a.query + (size_t)image * a.query_outer[2] + head * 64;
    const half* keys = a.key + (size_t)image * a.key_outer[2] + head * 64;
    const half* values = a.value + (size_t)image * a.value_outer[2] + head * 64;
    const half* mask = (const half*)a.bias;
    for (int k = threadIdx.x; k < a.keys; k += 64) {
        float s = 0.f;
        for (int d = 0; d < 64; ++d)
            s += (float)q[(size_t)query * a.query_row + d] *
                 (float)keys[(size_t)k * a.key_row + d];
        score[k] = s / 8.f + (mask ? (float)mask[image * a.keys + k] : 0.f);
    }
    __syncthreads();
    float top = -1e30f, sum = 0.f, value = 0.f;
    for (int k = 0; k < a.keys; ++k) top = fmaxf(top, score[k]);
    for (int k = 0; k < a.keys; ++k) {
        float p = expf(score[k] - top);
        sum += p;
        value += p * (float)values[(size_t)k * a.value_row + threadIdx.x];
    }
    out[((size_t)image * a.queries + query) * a.output_row + head * 64 + threadIdx.x] =
        (T)(value / sum);
}

template <class T>
__global__ void map_reference(MapArgs a, int rows, int channels, T* out, int stride)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= (size_t)rows * channels) return;
    int c = (int)(i % channels), m = (int)(i / channels);
    float v = (float)a.a[(size_t)m * a.a_stride + c];
    if (a.scale) v = v * a.scale[c] + a.shift[c];
    if (a.b) v += (float)a.b[(size_t)m * a.b_stride + c];
    out[(size_t)m * stride + c] = (T)activate(v, a.act);
}

template <class T>
__global__ void image_reference(ImageArgs a, T* out)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x, plane = (int)a.by_plane.divisor;
    if (i >= a.pixels) return;
    for (int c = 0; c < 4; ++c)
        out[(size_t)i * 4 + c] =
            c < 3 ? (T)a.input[((size_t)(i / plane) * 3 + c) * plane + i % plane] : (T)0.f;
}

} // namespace harness
