"""Times PyTorch (cuBLAS, cuDNN) on the problems of hopper.cu, each as a CUDA graph."""

import torch
import torch.nn.functional as F

torch.backends.cudnn.benchmark = True


def time_of(work):
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            work()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 5)
    return sorted(times)[len(times) // 2]


def product(name, rows, columns, depth):
    x = torch.randn(rows, depth, device="cuda", dtype=torch.half)
    w = torch.randn(columns, depth, device="cuda", dtype=torch.half)
    b = torch.randn(columns, device="cuda", dtype=torch.half)
    us = time_of(lambda: F.linear(x, w, b))
    show(name, us, 2 * rows * columns * depth)


def conv(name, batch, edge, inputs, outputs, dilation):
    x = torch.randn(batch, inputs, edge, edge, device="cuda", dtype=torch.half)
    w = torch.randn(outputs, inputs, 3, 3, device="cuda", dtype=torch.half)
    b = torch.randn(outputs, device="cuda", dtype=torch.half)
    x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    us = time_of(lambda: F.conv2d(x, w, b, padding=dilation, dilation=dilation))
    show(name, us, 2 * batch * edge * edge * inputs * outputs * 9)


def show(name, us, flops):
    print(f"torch {name:28} {us:8.1f} us {flops / us * 1e-6:4.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    product("4096x4096x4096", 4096, 4096, 4096)
    product("8192x4096x1024", 8192, 4096, 1024)
    product("12608x768x3072", 12608, 768, 3072)
    product("12608x3072x768", 12608, 3072, 768)
    product("12608x768x768", 12608, 768, 768)
    product("4096x768x768", 4096, 768, 768)
    for channels, edge in ((64, 56), (128, 28), (256, 14), (512, 7)):
        conv(f"resnet 3x3x{channels} b32", 32, edge, channels, channels, 1)
        rows, wide = 32 * edge * edge, 4 * channels
        product(f"resnet 1x1 {channels}>{wide} b32", rows, wide, channels)
        product(f"resnet 1x1 {wide}>{channels} b32", rows, channels, wide)
    conv("vgg 3x3 64>64 224 b8", 8, 224, 64, 64, 1)
    conv("vgg 3x3 128>128 112 b8", 8, 112, 128, 128, 1)
    conv("vgg 3x3 256>256 56 b8", 8, 56, 256, 256, 1)
    conv("vgg 3x3 512>512 28 b8", 8, 28, 512, 512, 1)
    conv("vgg 3x3 512>512 14 b8", 8, 14, 512, 512, 1)
    conv("deeplab 3x3 2048>256 d12 b4", 4, 65, 2048, 256, 12)
    conv("deeplab 3x3 512>512 d2 b4", 4, 65, 512, 512, 2)
