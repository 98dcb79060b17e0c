// The networks of the harness, layer by layer, with their real shapes and random weights. Batch
// normalization after a convolution is folded, as the compiler does; before one (DenseNet) the
// convolution applies it to its input.
#pragma once
#include "steps.cuh"

namespace harness {

struct Tensor {
    half* data = nullptr;
    int n = 0, h = 0, w = 0, c = 0, stride = 0;
    size_t offset = 0, size = 0; // in the arena; size 0 for a slice

    Tensor slice(int channel, int channels) const
    {
        Tensor t = *this;
        t.data += channel, t.c = channels, t.size = 0;
        return t;
    }
};

class Net {
public:
    std::string name;
    int batch;
    std::vector<Step> steps;
    Tensor output;

    Net(std::string n, int b, size_t weight_bytes, size_t arena_bytes)
        : name(std::move(n)), batch(b), weights_(device_alloc<char>(weight_bytes)),
          arena_(device_alloc<char>(arena_bytes)), weight_limit_(weight_bytes)
    {
        free_.push_back({0, arena_bytes});
    }
    Net(const Net&) = delete;
    ~Net()
    {
        cudaFree(weights_);
        cudaFree(arena_);
    }
    size_t weight_bytes() const { return used_; }

    // First fit over a sorted free list, so that activations stay in a small part of memory.
    Tensor alloc(int h, int w, int c)
    {
        Tensor t;
        t.n = batch, t.h = h, t.w = w, t.c = t.stride = c;
        t.size = ((size_t)batch * h * w * c * 2 + 255) & ~(size_t)255;
        for (size_t i = 0; i < free_.size(); ++i) {
            if (free_[i].second < t.size) continue;
            t.offset = free_[i].first;
            free_[i].first += t.size, free_[i].second -= t.size;
            t.data = (half*)(arena_ + t.offset);
            return t;
        }
        fprintf(stderr, "%s: the activation arena is too small\n", name.c_str());
        exit(1);
    }
    void release(const Tensor& t)
    {
        free_.push_back({t.offset, t.size});
        std::sort(free_.begin(), free_.end());
        for (size_t i = 0; i + 1 < free_.size();)
            if (free_[i].first + free_[i].second == free_[i + 1].first) {
                free_[i].second += free_[i + 1].second;
                free_.erase(free_.begin() + i + 1);
            } else {
                ++i;
            }
    }
    template <class T>
    T* random(size_t count, float scale, float offset = 0.f)
    {
        T* p = (T*)(weights_ + used_);
        used_ += (count * sizeof(T) + 255) & ~(size_t)255;
        if (used_ > weight_limit_) {
            fprintf(stderr, "%s: the weight arena is too small\n", name.c_str());
            exit(1);
        }
        fill(p, count, scale, offset);
        return p;
    }

    struct Filter {
        int h = 1, w = 1, stride = 1, pad_h = 0, pad_w = 0;
    };
    struct Extras {
        const Tensor* residual = nullptr;
        const Tensor* into = nullptr; // a slice to write instead of a new tensor
        bool pre = false;
        float gain = 1.4f;
    };

    Tensor conv(const char* layer, const Tensor& in, int channels, Filter f, int act, Extras e)
    {
        Step s;
        int oh = (in.h + 2 * f.pad_h - f.h) / f.stride + 1,
            ow = (in.w + 2 * f.pad_w - f.w) / f.stride + 1;
        Tensor out = e.into ? *e.into : alloc(oh, ow, channels);
        describe(s, Kind::Conv, layer, out, batch * oh * ow, channels);
        ConvArgs& a = s.conv;
        s.pre = e.pre;
        a.input = in.data, a.output = out.data, a.act = act;
        a.in_h = in.h, a.in_w = in.w, a.in_c = in.c, a.in_stride = in.stride;
        a.out_c = channels, a.out_stride = out.stride;
        a.ker_h = f.h, a.ker_w = f.w, a.stride_h = a.stride_w = f.stride, a.pad_h = f.pad_h,
        a.pad_w = f.pad_w, a.dil_h = a.dil_w = 1;
        a.rows = s.rows, a.depth = f.h * f.w * in.c, a.weight_stride = (a.depth + 7) / 8 * 8;
        a.weight =
            random<half>((size_t)channels * a.weight_stride, e.gain * sqrtf(3.f / (float)a.depth));
        a.bias = random<float>(channels, 0.1f);
        if (e.residual) a.residual = e.residual->data, a.residual_stride = e.residual->stride;
        if (e.pre) a.pre = random<half>(2 * a.depth, 0.5f, 0.5f);
        a.by_out_hw = FastDiv::of(oh * ow), a.by_out_w = FastDiv::of(ow);
        a.by_in_c = FastDiv::of(in.c), a.by_ker_w = FastDiv::of(f.w);
        s.flops = 2.0 * s.rows * channels * a.depth;
        s.weight_bytes = 2.0 * channels * a.weight_stride;
        s.bytes = s.weight_bytes + 2.0 * batch * in.h * in.w * in.c +
                  2.0 * s.rows * channels * (e.residual ? 2 : 1);
        steps.push_back(s);
        return out;
    }
    Tensor conv(const char* layer, const Tensor& in, int channels, Filter f, int act)
    {
        return conv(layer, in, channels, f, act, Extras());
    }
    Tensor depthwise(const char* layer, const Tensor& in, int stride, int act)
    {
        Step s;
        int oh = (in.h + 2 - 3) / stride + 1, ow = (in.w + 2 - 3) / stride + 1;
        Tensor out = alloc(oh, ow, in.c);
        describe(s, Kind::Depthwise, layer, out, batch * oh * ow, in.c);
        DepthwiseArgs& a = s.depthwise;
        a.input = in.data, a.output = out.data, a.act = act;
        a.in_h = in.h, a.in_w = in.w, a.in_stride = in.stride, a.out_h = oh, a.out_w = ow,
        a.out_stride = out.stride;
        a.ker_h = a.ker_w = 3, a.stride_h = a.stride_w = stride, a.pad_h = a.pad_w = 1,
        a.dil_h = a.dil_w = 1;
        a.weight = random<half>(9 * in.c, 0.8f);
        a.bias = random<float>(in.c, 0.1f);
        a.by_chunks = FastDiv::of(in.c / 8), a.by_out_h = FastDiv::of(oh);
        s.flops = 18.0 * s.rows * in.c;
        s.bytes = 2.0 * batch * in.h * in.w * in.c + 2.0 * s.rows * in.c;
        steps.push_back(s);
        return out;
    }
    Tensor pool(const char* layer, const Tensor& in, bool max, Filter f,
                const Tensor* into = nullptr)
    {
        Step s;
        int oh = (in.h + 2 * f.pad_h - f.h) / f.stride + 1,
            ow = (in.w + 2 * f.pad_w - f.w) / f.stride + 1;
        Tensor out = into ? *into : alloc(oh, ow, in.c);
        describe(s, max ? Kind::MaxPool : Kind::AveragePool, layer, out, batch * oh * ow, in.c);
        PoolArgs& a = s.pool;
        a.input = in.data, a.output = out.data, a.in_h = in.h, a.in_w = in.w,
        a.in_stride = in.stride, a.out_stride = out.stride;
        a.ker_h = f.h, a.ker_h = f.h, a.ker_w = f.w, a.stride_h = a.stride_w = f.stride,
        a.pad_h = f.pad_h, a.pad_w = f.pad_w;
        a.items = s.rows * in.c / 8;
        a.by_chunks = FastDiv::of(in.c / 8), a.by_out_w = FastDiv::of(ow),
        a.by_out_h = FastDiv::of(oh);
        s.bytes = 2.0 * batch * in.h * in.w * in.c + 2.0 * s.rows * in.c;
        steps.push_back(s);
        return out;
    }
    Tensor global_pool(const char* layer, const Tensor& in, bool pre)
    {
        Step s;
        Tensor out = alloc(1, 1, in.c);
        describe(s, Kind::GlobalPool, layer, out, batch, in.c);
        s.global = {in.data,
                    out.data,
                    pre ? random<half>(2 * in.c, 0.5f, 0.5f) : nullptr,
                    in.h * in.w,
                    in.stride,
                    out.stride,
                    in.c,
                    in.h * in.w,
                    1.f / (float)(in.h * in.w),
                    FastDiv::of(ceil_div(in.c, 64)),
                    FastDiv::of(1)};
        s.bytes = 2.0 * batch * in.h * in.w * in.c;
        steps.push_back(s);
        return out;
    }
    Tensor image(int size)
    {
        Step s;
        Tensor out = alloc(size, size, 4);
        describe(s, Kind::Image, "image", out, batch * size * size, 4);
        s.image = {random<float>((size_t)batch * 3 * size * size, 1.7f), out.data, s.rows,
                   FastDiv::of(size * size)};
        s.bytes = s.rows * 20.0;
        steps.push_back(s);
        return out;
    }
    Tensor norm(const char* layer, const Tensor* in, int tokens, int width)
    {
        Step s;
        Tensor out = alloc(1, tokens, width);
        describe(s, in ? Kind::Norm : Kind::Embed, layer, out, batch * tokens, width);
        NormArgs& a = s.norm;
        a.input = in ? in->data : nullptr, a.output = out.data, a.rows = s.rows, a.width = width,
        a.epsilon = 1e-12f;
        a.gamma = random<float>(width, 0.3f, 1.f), a.beta = random<float>(width, 0.3f);
        a.by_tokens = FastDiv::of(tokens);
        if (!in) {
            std::vector<int> token(s.rows);
            for (int i = 0; i < s.rows; ++i) token[i] = (int)((u64)i * 7919 % 30522);
            int* t = random<int>(s.rows, 0.f);
            CHECK(cudaMemcpy(t, token.data(), token.size() * 4, cudaMemcpyHostToDevice));
            a.token = t, a.word = random<half>((size_t)30522 * width, 1.f),
            a.position = random<half>((size_t)512 * width, 1.f);
        }
        s.bytes = 4.0 * s.rows * width;
        steps.push_back(s);
        return out;
    }
    Tensor attention(const char* layer, const Tensor& qkv, int heads)
    {
        Step s;
        Tensor out = alloc(1, qkv.w, heads * 64);
        describe(s, Kind::Attention, layer, out, batch * qkv.w, heads * 64);
        const half* first = qkv.data;
        s.attention = self_attention(first, first + heads * 64, first + 2 * heads * 64, out.data,
                                     nullptr, batch, qkv.w, heads, qkv.stride, out.stride);
        s.flops = 4.0 * batch * heads * qkv.w * qkv.w * 64;
        s.bytes = 8.0 * s.rows * heads * 64;
        steps.push_back(s);
        return out;
    }

private:
    void describe(Step& s, Kind kind, const char* layer, const Tensor& out, int rows, int columns)
    {
        s.kind = kind, s.name = layer, s.batch = batch, s.rows = rows, s.columns = columns,
        s.stride = out.stride;
    }
    char* weights_;
    char* arena_;
    size_t weight_limit_, used_ = 0;
    std::vector<std::pair<size_t, size_t>> free_; // (offset, size), sorted
};

constexpr size_t kMebibyte = 1 << 20;

inline void resnet(Net& net, const std::vector<int>& depths)
{
    Tensor x = net.image(224);
    Tensor y = net.conv("stem", x, 64, {7, 7, 2, 3, 3}, kRelu);
    net.release(x);
    x = net.pool("maxpool", y, true, {3, 3, 2, 1, 1});
    net.release(y);
    for (int stage = 0; stage < 4; ++stage)
        for (int i = 0; i < depths[stage]; ++i) {
            int width = 64 << stage, stride = stage > 0 && i == 0 ? 2 : 1;
            Tensor shortcut = i ? x
                                : net.conv("shortcut", x, width * 4, {1, 1, stride}, kLinear,
                                           {nullptr, nullptr, false, 1.f});
            Tensor a = net.conv("reduce", x, width, {}, kRelu);
            Tensor b = net.conv("spatial", a, width, {3, 3, stride, 1, 1}, kRelu);
            net.release(a);
            y = net.conv("expand", b, width * 4, {}, kRelu, {&shortcut, nullptr, false, 0.5f});
            net.release(b);
            net.release(x);
            if (!i) net.release(shortcut);
            x = y;
        }
    net.output = net.conv("classifier", net.global_pool("average", x, false), 1000, {}, kLinear);
}

inline void vgg19(Net& net)
{
    Tensor x = net.image(224);
    for (int stage = 0; stage < 5; ++stage) {
        for (int i = 0; i < (stage < 2 ? 2 : 4); ++i) {
            Tensor y = net.conv("conv", x, std::min(64 << stage, 512), {3, 3, 1, 1, 1}, kRelu);
            net.release(x);
            x = y;
        }
        Tensor y = net.pool("maxpool", x, true, {2, 2, 2});
        net.release(x);
        x = y;
    }
    x.c = x.stride = x.h * x.w * x.c, x.h = x.w = 1;
    x = net.conv("fc", x, 4096, {}, kRelu);
    x = net.conv("fc", x, 4096, {}, kRelu);
    net.output = net.conv("fc", x, 1000, {}, kLinear);
}

inline void densenet201(Net& net)
{
    const int depths[4] = {6, 12, 48, 32};
    Tensor x = net.image(224);
    Tensor y = net.conv("stem", x, 64, {7, 7, 2, 3, 3}, kRelu);
    int channels = 64, size = 56;
    Tensor block;
    for (int stage = 0; stage < 4; ++stage) {
        int total = channels + 32 * depths[stage];
        Tensor next = net.alloc(size, size, total);
        Tensor head = next.slice(0, channels);
        if (stage == 0)
            net.pool("maxpool", y, true, {3, 3, 2, 1, 1}, &head);
        else
            net.pool("avgpool", y, false, {2, 2, 2}, &head);
        net.release(y);
        block = next;
        for (int i = 0; i < depths[stage]; ++i, channels += 32) {
            Tensor a = net.conv("bottleneck", block.slice(0, channels), 128, {}, kRelu,
                                {nullptr, nullptr, true});
            Tensor grown = block.slice(channels, 32);
            net.conv("grow", a, 32, {3, 3, 1, 1, 1}, kLinear, {nullptr, &grown});
            net.release(a);
        }
        if (stage == 3) break;
        channels /= 2, size /= 2;
        y = net.conv("transition", block, channels, {}, kLinear, {nullptr, nullptr, true});
        net.release(block);
    }
    net.output = net.conv("classifier", net.global_pool("average", block, true), 1000, {}, kLinear);
}

inline void mobilenet_v2(Net& net)
{
    const int table[7][4] = {{1, 16, 1, 1}, {6, 24, 2, 2},  {6, 32, 3, 2}, {6, 64, 4, 2},
                             {6, 96, 3, 1}, {6, 160, 3, 2}, {6, 320, 1, 1}};
    Tensor x = net.conv("stem", net.image(224), 32, {3, 3, 2, 1, 1}, kRelu6);
    for (auto [expand, channels, count, stride] : table)
        for (int i = 0; i < count; ++i) {
            int step = i ? 1 : stride;
            bool keeps = step == 1 && x.c == channels;
            Tensor a = expand == 1 ? x : net.conv("expand", x, x.c * expand, {}, kRelu6);
            Tensor b = net.depthwise("depthwise", a, step, kRelu6);
            Tensor y = net.conv("project", b, channels, {}, kLinear,
                                {keeps ? &x : nullptr, nullptr, false, 0.7f});
            net.release(b);
            if (expand != 1) net.release(a);
            net.release(x);
            x = y;
        }
    x = net.conv("head", x, 1280, {}, kRelu6);
    net.output = net.conv("classifier", net.global_pool("average", x, false), 1000, {}, kLinear);
}

inline void distilbert(Net& net)
{
    Tensor x = net.norm("embed", nullptr, 128, 768);
    for (int layer = 0; layer < 6; ++layer) {
        Tensor qkv = net.conv("qkv", x, 2304, {}, kLinear, {nullptr, nullptr, false, 1.f});
        Tensor mixed = net.attention("attention", qkv, 12);
        Tensor y = net.conv("project", mixed, 768, {}, kLinear, {&x, nullptr, false, 1.f});
        net.release(qkv), net.release(mixed), net.release(x);
        x = net.norm("norm", &y, 128, 768);
        net.release(y);
        Tensor wide = net.conv("ffn1", x, 3072, {}, kGelu, {nullptr, nullptr, false, 1.f});
        y = net.conv("ffn2", wide, 768, {}, kLinear, {&x, nullptr, false, 1.f});
        net.release(wide), net.release(x);
        x = net.norm("norm", &y, 128, 768);
        net.release(y);
    }
    net.output = x;
}

inline std::unique_ptr<Net> make_network(const std::string& name, int batch)
{
    size_t weights = name == "vgg19"        ? 340
                     : name == "resnet152"  ? 160
                     : name == "distilbert" ? 160
                                            : 100;
    size_t arena = name == "vgg19" ? 20 * batch : name == "mobilenet_v2" ? 12 * batch : 12 * batch;
    auto net =
        std::make_unique<Net>(name, batch, (weights + batch) * kMebibyte, (arena + 4) * kMebibyte);
    if (name == "resnet50") resnet(*net, {3, 4, 6, 3});
    if (name == "resnet152") resnet(*net, {3, 8, 36, 3});
    if (name == "vgg19") vgg19(*net);
    if (name == "densenet201") densenet201(*net);
    if (name == "mobilenet_v2") mobilenet_v2(*net);
    if (name == "distilbert") distilbert(*net);
    CHECK(cudaDeviceSynchronize());
    return net;
}

} // namespace harness
