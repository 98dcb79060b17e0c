"""Times PyTorch on the same device: every convolution and product of bench's report, and the whole networks.

    torch_bench.py BENCH.json OUT.json [--no-layers]

A layer is a CUDA graph of launches over rotated weights, as in bench. A network is torchvision's or transformers' model with
random weights, half precision, channels last, replayed as one CUDA graph; cuDNN picks its algorithms by timing.
"""

import json
import sys

import torch
import torch.nn.functional as F

torch.backends.cudnn.benchmark = True
DEVICE = "cuda"
POOL_BYTES = 256 << 20


def replay_us(body, times=15):
    """Median microseconds of one replay of `body` captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    taken = []
    for i in range(times + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            taken.append(start.elapsed_time(end) * 1e3)
    return sorted(taken)[len(taken) // 2]


def layer_us(layer):
    """The layer as a user of PyTorch would write it: convolution with bias, then the addition and the activation."""
    height, width, channels = layer["in"]
    channels = 3 if channels == 4 else channels
    kernel_h, kernel_w = layer["ker"]
    options = dict(device=DEVICE, dtype=torch.half)
    flat = kernel_h == kernel_w == 1 and height == 1
    shape = (layer["batch"] * width, channels) if flat else (layer["batch"], channels, height, width)
    x = torch.randn(shape, **options)
    size = layer["out_c"] * channels * kernel_h * kernel_w * 2
    copies = min(20, max(3, POOL_BYTES // size))
    bias = torch.randn(layer["out_c"], **options)
    if flat:
        weights = [torch.randn(layer["out_c"], channels, **options) * 0.05 for _ in range(copies)]
        apply = lambda w: F.linear(x, w, bias)
    else:
        x = x.to(memory_format=torch.channels_last)
        last = torch.channels_last
        weights = [
            (torch.randn(layer["out_c"], channels, kernel_h, kernel_w, **options) * 0.05).to(memory_format=last)
            for _ in range(copies)
        ]
        apply = lambda w: F.conv2d(x, w, bias, layer["stride"], layer["pad"])
    activation = {1: F.relu_, 2: lambda t: F.hardtanh_(t, 0.0, 6.0), 3: F.gelu}.get(layer["act"])
    residual = torch.randn_like(apply(weights[0])) if layer["res"] else None

    def fused(w):
        y = apply(w)
        if residual is not None:
            y += residual
        return activation(y) if activation else y

    bare = replay_us(lambda: [apply(w) for w in weights]) / copies
    if activation is None and residual is None:
        return bare, bare
    return bare, replay_us(lambda: [fused(w) for w in weights]) / copies


def build(name):
    if name == "distilbert":
        from transformers import DistilBertConfig, DistilBertModel

        return DistilBertModel(DistilBertConfig())
    import torchvision

    return getattr(torchvision.models, name)(weights=None)


def network_us(name, batch):
    model = build(name).eval().to(DEVICE, torch.half)
    if name == "distilbert":
        x = torch.randint(0, 30000, (batch, 128), device=DEVICE)
    else:
        model = model.to(memory_format=torch.channels_last)
        x = torch.randn(batch, 3, 224, 224, device=DEVICE, dtype=torch.half).to(memory_format=torch.channels_last)
    return replay_us(lambda: model(x), 30)


def main():
    report = json.load(open(sys.argv[1]))
    layers, networks = [], []
    with torch.inference_mode():
        for entry in report["networks"]:
            us = network_us(entry["net"], entry["batch"])
            networks.append({"net": entry["net"], "batch": entry["batch"], "torch_us": us})
            best = min(entry["pdl_us"], entry["graph_us"])
            print(f"{entry['net']:13} b{entry['batch']:<2} torch graph {us:8.1f}  atoll {best:8.1f}  ratio {best / us:.3f}", flush=True)
        seen = set()
        for layer in report["layers"] if "--no-layers" not in sys.argv else []:
            if layer["kind"] != 0 or layer["key"] in seen:
                continue
            if layer["batch"] > 1 and layer["net"] not in ("resnet50", "vgg19") or layer["pre"]:
                continue
            seen.add(layer["key"])
            bare, fused = layer_us(layer)
            layers.append({"key": layer["key"], "torch_bare_us": bare, "torch_fused_us": fused})
    json.dump({"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "networks": networks, "layers": layers},
              open(sys.argv[2], "w"), indent=0)


main()
