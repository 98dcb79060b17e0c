// Checks and times every kernel variant on the layers of real networks, then the networks.
//   bench OUT.json [--quick] [network ...]
// A layer is timed in a graph of launches whose weights have different addresses, so that weights
// come from memory, as in a network larger than the L2 cache, while activations stay in the cache.
#include "networks.cuh"

using namespace harness;

constexpr double kTolerance = 1e-2;
constexpr double kBandwidth = 4.3e12, kRate = 790e12; // limits measured on the device

struct Choice {
    Variant best, plain; // the fastest of all; the fastest without clusters
    double us = 1e30, plain_us = 1e30, error = 0;
    int tried = 0, wrong = 0;
    std::string table; // the times of all variants
};

class Tuner {
public:
    explicit Tuner(cudaStream_t stream) : stream_(stream)
    {
        fill(input_, kPool, 1.f);
        fill(weight_, kPool, 0.05f);
        fill(bias_, 1 << 16, 0.5f);
        fill(pre_, 1 << 14, 0.5f, 0.5f);
    }
    const Choice& choose(const Step& step)
    {
        auto found = known_.find(step.key());
        if (found != known_.end()) return found->second;
        Choice& c = known_[step.key()];
        Step s = bind(step, 0);
        reference(s, want_, s.columns);
        for (const Variant& v : variants(s)) consider(step, v, c);
        if (c.us > 1e29) {
            fprintf(stderr, "no variant computes %s\n", step.key().c_str());
            exit(1);
        }
        c.us = time(step, c.best, 9, true);
        return c;
    }
    int total_tried() const { return total_; }
    int total_wrong() const { return wrong_; }
    double worst() const { return worst_; }

private:
    static constexpr size_t kPool = 256 << 20; // halves

    // The step on the buffers of the tuner; `copy` selects the address of the weights.
    Step bind(const Step& step, int copy) const
    {
        Step s = step;
        size_t size = ((size_t)(s.weight_bytes / 2) + 127) & ~(size_t)127;
        size_t step_size = std::max<size_t>(size, 1 << 16);
        size_t copies = std::max<size_t>(1, kPool / step_size);
        const half* w = weight_ + copy % copies * step_size;
        switch (s.kind) {
        case Kind::Conv:
            s.conv.input = input_, s.conv.weight = w, s.conv.bias = bias_, s.conv.output = output_;
            if (s.conv.residual) s.conv.residual = input_ + kPool / 2;
            if (s.pre) s.conv.pre = pre_;
            break;
        case Kind::Depthwise:
            s.depthwise.input = input_, s.depthwise.weight = w, s.depthwise.bias = bias_,
            s.depthwise.output = output_;
            break;
        case Kind::MaxPool:
        case Kind::AveragePool: s.pool.input = input_, s.pool.output = output_; break;
        case Kind::GlobalPool: s.global.input = input_, s.global.output = output_; break;
        case Kind::Norm: s.norm.input = input_;
        case Kind::Embed: s.norm.output = output_; break;
        case Kind::Attention: {
            int width = (int)s.attention.by_outer[2].divisor * 64;
            s.attention.query = input_, s.attention.key = input_ + width,
            s.attention.value = input_ + 2 * width;
            s.attention.output = output_;
            break;
        }
        case Kind::Image: s.image.output = output_; break;
        }
        return s;
    }
    double check(const Step& step, const Variant& v)
    {
        Step s = bind(step, 0);
        poison(output_, (size_t)s.rows * s.stride);
        prepare(s, v).enqueue(stream_, false);
        CHECK(cudaStreamSynchronize(stream_));
        return relative_error(output_, want_, s.rows, s.columns, s.stride);
    }
    double time(const Step& step, const Variant& v, int times, bool steady)
    {
        double guess = std::max({3e-6, step.flops / 200e12, step.bytes / 2e12});
        int copies = (int)std::clamp(200e-6 / guess, 3.0, 24.0);
        Graph graph(stream_, [&](cudaStream_t s) {
            for (int i = 0; i < copies; ++i) prepare(bind(step, i), v).enqueue(s, true);
        });
        return (steady ? graph.median(times) : graph.minimum(times)) / copies;
    }
    static bool launchable(const Launch& l)
    {
        if (l.cluster == 1) return true;
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {l.cluster, 1, 1};
        cudaLaunchConfig_t config = {};
        config.gridDim = l.grid, config.blockDim = l.threads, config.dynamicSmemBytes = l.shared;
        config.attrs = &attribute, config.numAttrs = 1;
        int clusters = 0;
        bool fine = cudaOccupancyMaxActiveClusters(&clusters, l.kernel, &config) == cudaSuccess &&
                    clusters > 0;
        cudaGetLastError();
        return fine;
    }
    void consider(const Step& step, const Variant& v, Choice& c)
    {
        if (!launchable(prepare(bind(step, 0), v))) return;
        double error = check(step, v);
        ++c.tried, ++total_;
        if (!(error <= kTolerance)) {
            ++c.wrong, ++wrong_;
            printf("WRONG %s %s error %.3g\n", step.key().c_str(), v.name(step.kind).c_str(),
                   error);
            return;
        }
        worst_ = std::max(worst_, error), c.error = std::max(c.error, error);
        double us = time(step, v, 3, false);
        c.table +=
            format("%s\"%s\":%.2f", c.table.empty() ? "" : ",", v.name(step.kind).c_str(), us);
        if (us < c.us) c.us = us, c.best = v;
        if (v.reduce != kCluster && us < c.plain_us) c.plain_us = us, c.plain = v;
    }

    cudaStream_t stream_;
    std::map<std::string, Choice> known_;
    half* input_ = device_alloc<half>(kPool);
    half* output_ = device_alloc<half>(kPool);
    half* weight_ = device_alloc<half>(kPool + (64 << 20));
    float* want_ = device_alloc<float>(kPool / 2);
    float* bias_ = device_alloc<float>(1 << 16);
    half* pre_ = device_alloc<half>(1 << 14);
    int total_ = 0, wrong_ = 0;
    double worst_ = 0;
};

// Microseconds of the whole network as one graph.
double time_network(const Net& net, const std::vector<Variant>& choice, bool dependent,
                    cudaStream_t stream)
{
    Graph graph(stream, [&](cudaStream_t s) {
        for (size_t i = 0; i < net.steps.size(); ++i)
            prepare(net.steps[i], choice[i]).enqueue(s, dependent);
    });
    return graph.median(50);
}

// The output of the network computed by the references, each step on the previous output.
std::vector<half> reference_output(const Net& net)
{
    for (const Step& s : net.steps) reference(s, output_of(s), s.stride);
    std::vector<half> out((size_t)net.batch * net.output.h * net.output.w * net.output.c);
    CHECK(cudaMemcpy(out.data(), net.output.data, out.size() * 2, cudaMemcpyDeviceToHost));
    return out;
}

double output_error(const Net& net, const std::vector<half>& want)
{
    std::vector<half> got(want.size());
    CHECK(cudaMemcpy(got.data(), net.output.data, got.size() * 2, cudaMemcpyDeviceToHost));
    double error = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        double g = (float)got[i], w = (float)want[i];
        error += (g - w) * (g - w), norm += w * w;
    }
    return norm > 0 && error == error ? sqrt(error / norm) : 1e30;
}

struct Report {
    FILE* file;
    bool first = true;

    void layer(const Net& net, const Step& s, const Choice& c, int count)
    {
        double floor_us = std::max(s.flops / kRate, s.bytes / kBandwidth) * 1e6;
        fprintf(file, "%s\n{\"net\":\"%s\",\"batch\":%d,\"name\":\"%s\",\"key\":\"%s\",",
                first ? "" : ",", net.name.c_str(), net.batch, s.name.c_str(), s.key().c_str());
        fprintf(file, "\"kind\":%d,\"count\":%d,", (int)s.kind, count);
        fprintf(file,
                "\"in\":[%d,%d,%d],\"out_c\":%d,\"ker\":[%d,%d],\"stride\":%d,\"pad\":[%d,%d],",
                s.conv.in_h, s.conv.in_w, s.conv.in_c, s.columns, s.conv.ker_h, s.conv.ker_w,
                s.conv.stride_h, s.conv.pad_h, s.conv.pad_w);
        fprintf(file, "\"res\":%d,\"pre\":%d,\"act\":%d,", s.conv.residual != nullptr, (int)s.pre,
                s.conv.act);
        fprintf(file, "\"best\":\"%s\",\"us\":%.3f,\"plain\":\"%s\",\"plain_us\":%.3f,",
                c.best.name(s.kind).c_str(), c.us, c.plain.name(s.kind).c_str(), c.plain_us);
        fprintf(file, "\"tflops\":%.2f,\"gbs\":%.1f,\"floor_us\":%.3f,", s.flops / c.us * 1e-6,
                s.bytes / c.us * 1e-3, floor_us);
        fprintf(file, "\"error\":%.2e,\"tried\":%d,\"wrong\":%d,\"all\":{%s}}", c.error, c.tried,
                c.wrong, c.table.c_str());
        first = false;
    }
};

void run_network(const std::string& name, int batch, Tuner& tuner, Report& report,
                 std::string& nets, cudaStream_t stream)
{
    auto net = make_network(name, batch);
    std::vector<Variant> best, plain;
    std::map<std::string, int> count;
    double sum = 0, floor_us = 0;
    for (const Step& s : net->steps) ++count[s.key()];
    for (const Step& s : net->steps) {
        const Choice& c = tuner.choose(s);
        best.push_back(c.best), plain.push_back(c.plain);
        sum += c.us;
        floor_us += std::max(s.flops / kRate, s.bytes / kBandwidth) * 1e6;
        if (count[s.key()]) report.layer(*net, s, c, count[s.key()]);
        count[s.key()] = 0;
    }
    std::vector<half> want = reference_output(*net);
    double chain = time_network(*net, best, false, stream);
    poison(net->output.data, want.size());
    double pdl = time_network(*net, best, true, stream), error = output_error(*net, want);
    double no_cluster = time_network(*net, plain, true, stream),
           no_cluster_chain = time_network(*net, plain, false, stream);
    nets += format(
        "%s\n{\"net\":\"%s\",\"batch\":%d,\"steps\":%zu,\"weights_mb\":%.1f,"
        "\"layer_sum_us\":%.1f,\"floor_us\":%.1f,"
        "\"graph_us\":%.1f,\"pdl_us\":%.1f,\"plain_pdl_us\":%.1f,\"plain_graph_us\":%.1f,"
        "\"error\":%.2e}",
        nets.empty() ? "" : ",", name.c_str(), batch, net->steps.size(), net->weight_bytes() / 1e6,
        sum, floor_us, chain, pdl, no_cluster, no_cluster_chain, error);
    printf(
        "%-13s b%-2d %3zu steps  layers %7.1f  graph %7.1f  pdl %7.1f  "
        "no-cluster graph %7.1f pdl %7.1f  floor %6.1f  error %.1e\n",
        name.c_str(), batch, net->steps.size(), sum, chain, pdl, no_cluster_chain, no_cluster,
        floor_us, error);
    fflush(stdout);
}

int main(int argc, char** argv)
{
    if (argc < 2) return fprintf(stderr, "usage: bench OUT.json [--quick] [network ...]\n"), 2;
    std::vector<int> batches = {1, 8, 32};
    std::vector<std::string> names;
    for (int i = 2; i < argc; ++i)
        if (!strcmp(argv[i], "--quick"))
            batches = {1};
        else
            names.push_back(argv[i]);
    if (names.empty())
        names = {"resnet50", "resnet152", "vgg19", "densenet201", "mobilenet_v2", "distilbert"};
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Tuner tuner(stream);
    CHECK(cudaDeviceSynchronize());
    Report report = {fopen(argv[1], "w")};
    std::string nets;
    fprintf(report.file, "{\"layers\":[");
    for (const std::string& name : names)
        for (int batch : batches) run_network(name, batch, tuner, report, nets, stream);
    fprintf(report.file, "],\n\"networks\":[%s],\n\"variants_checked\":%d,", nets.c_str(),
            tuner.total_tried());
    fprintf(report.file, "\"variants_wrong\":%d,\"worst_error\":%.2e}\n", tuner.total_wrong(),
            tuner.worst());
    fclose(report.file);
    printf("checked %d variants, %d wrong, worst relative error %.2e\n", tuner.total_tried(),
           tuner.total_wrong(), tuner.worst());
    return tuner.total_wrong() != 0;
}
