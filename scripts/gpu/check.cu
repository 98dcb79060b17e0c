// Checks what the networks of bench do not cover: softmax, elementwise maps, general input loading
// (dilation, odd filters, channels that are no multiple of 64), general depthwise filters, padded
// averages, attention with a mask and a number of tokens that is no multiple of the tile.
#define HARNESS_CHECK
#include "networks.cuh"

using namespace harness;

static int g_wrong = 0;

template <class Reference>
void expect(const char* what, const Launch& launch, half* out, size_t rows, int columns, int stride,
            const Reference& reference)
{
    float* want = device_alloc<float>(rows * columns);
    reference(want);
    poison(out, rows * stride);
    launch.enqueue(0, false);
    CHECK(cudaDeviceSynchronize());
    double error = relative_error(out, want, rows, columns, stride);
    bool fine = error <= 1e-2;
    g_wrong += !fine;
    printf("%-60s %.2e%s\n", what, error, fine ? "" : "  WRONG");
    CHECK(cudaFree(want));
}

static void check_conv(const char* what, int size, int in_c, int out_c, int ker_h, int ker_w,
                       int stride, int dilation)
{
    Net net(what, 2, 64 << 20, 64 << 20);
    Tensor in = net.alloc(size, size, in_c);
    fill(in.data, (size_t)2 * size * size * in_c, 1.f);
    int extent_h = (ker_h - 1) * dilation + 1, extent_w = (ker_w - 1) * dilation + 1;
    net.conv(what, in, out_c, {extent_h, extent_w, stride, extent_h / 2, extent_w / 2}, kSilu);
    Step s = net.steps.back();
    // The same output size, with a dilated filter instead of a dense one of its extent.
    s.conv.ker_h = ker_h, s.conv.ker_w = ker_w, s.conv.dil_h = s.conv.dil_w = dilation;
    s.conv.depth = s.conv.weight_stride = ker_h * ker_w * in_c;
    s.conv.by_ker_w = FastDiv::of(ker_w);
    for (const Variant& v : conv_variants(s)) {
        if (v.reduce == kCluster && v.splits > 8) continue;
        std::string name = std::string(what) + " " + v.name(Kind::Conv);
        expect(name.c_str(), conv_launch(s, v), s.conv.output, s.rows, s.columns, s.stride,
               [&](float* want) { reference(s, want, s.columns); });
    }
}

static void check_rows()
{
    const int rows = 77, width = 1000;
    half* in = device_alloc<half>(rows * width);
    half* other = device_alloc<half>(rows * width);
    half* out = device_alloc<half>(rows * width);
    float* scale = device_alloc<float>(width);
    fill(in, rows * width, 4.f), fill(other, rows * width, 1.f), fill(scale, width, 1.f);
    SoftmaxArgs soft = {in, out, rows, width};
    expect("softmax 77x1000", op_launch<Softmax<4>>(soft, ceil_div(rows, 4)), out, rows, width,
           width, [&](float* want) { softmax_reference<float><<<rows, 1>>>(soft, want); });
    for (int act : {kLinear, kRelu, kRelu6, kGelu, kSilu, kSigmoid, kTanh}) {
        MapArgs map = {in,
                       other,
                       scale,
                       scale,
                       out,
                       width,
                       width,
                       width,
                       rows * width / 8,
                       act,
                       FastDiv::of(width / 8)};
        expect(format("map, activation %d", act).c_str(),
               op_launch<Map>(map, ceil_div(map.items, 128)), out, rows, width, width,
               [&](float* want) {
                   map_reference<float>
                       <<<ceil_div(rows * width, 256), 256>>>(map, rows, width, want, width);
               });
    }
}

static void check_windows()
{
    Net net("windows", 2, 16 << 20, 64 << 20);
    Tensor in = net.alloc(19, 19, 48);
    fill(in.data, (size_t)2 * 19 * 19 * 48, 1.f);
    net.pool("average", in, false, {3, 3, 1, 1, 1});
    net.depthwise("depthwise", in, 1, kRelu6);
    for (Step s : net.steps) {
        if (s.kind == Kind::Depthwise) { // 5x5 with stride 2 over the same buffers
            DepthwiseArgs& a = s.depthwise;
            a.ker_h = a.ker_w = 5, a.pad_h = a.pad_w = 2, a.stride_h = a.stride_w = 2;
            a.weight = net.random<half>(25 * 48, 0.3f);
            a.out_w = 10, a.by_out_h = FastDiv::of(10), s.rows = 200;
        }
        expect(s.kind == Kind::Depthwise ? "depthwise 5x5 stride 2" : "average 3x3, padded",
               prepare(s, {1}), output_of(s), s.rows, s.columns, s.stride,
               [&](float* want) { reference(s, want, s.columns); });
    }
}

static void check_attention()
{
    const int tokens = 100, heads = 3, batch = 2, width = heads * 64;
    half* qkv = device_alloc<half>(batch * tokens * 3 * width);
    half* out = device_alloc<half>(batch * tokens * width);
    half* mask = device_alloc<half>(batch * tokens);
    fill(qkv, batch * tokens * 3 * width, 1.5f), fill(mask, batch * tokens, 5.f);
    Step s;
    s.kind = Kind::Attention, s.batch = batch;
    s.rows = batch * tokens;
    s.attention = self_attention(qkv, qkv + width, qkv + 2 * width, out, mask, batch, tokens, heads,
                                 3 * width, width);
    for (int warps : {1, 2, 4})
        expect(format("attention, 100 tokens, mask, %d warps", warps).c_str(),
               attention_launch(s, warps), out, batch * tokens, width, width,
               [&](float* want) { reference(s, want, width); });
}

int main()
{
    check_rows();
    check_windows();
    check_attention();
    check_conv("5x5 of 48 channels", 17, 48, 64, 5, 5, 1, 1);
    check_conv("1x7 of 80 channels", 17, 80, 192, 1, 7, 1, 1);
    check_conv("3x3 of 64, dilation 2", 23, 64, 72, 3, 3, 1, 2);
    check_conv("7x1 of 128", 17, 128, 136, 7, 1, 1, 1);
    check_conv("3x3 of 64, stride 2, no round tile", 35, 64, 40, 3, 3, 2, 1);
    printf("%d wrong\n", g_wrong);
    return g_wrong != 0;
}
