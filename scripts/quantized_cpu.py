#!/usr/bin/env python3
"""Measure quantised networks on the CPU: against their float files and against ONNX Runtime.

    python scripts/quantized_cpu.py --threads 2 --json quantized_cpu.json

Makes a ResNet-50 of random weights, a MobileNet-like network and MiniLM (scripts/models.py), lets
ONNX Runtime quantise them (static as QuantizeLinear and DequantizeLinear, static as QLinearConv,
dynamic), and times each beside ONNX Runtime in alternating rounds of one run. `speed-up` is atoll's
own float time over its int8 time. Needs numpy, onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime

import bench_cpu
from modelzoo.graph import FLOAT, Graph
from onnx_inputs import random_inputs

try:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_dynamic,
        quantize_static,
    )
except ImportError as error:
    sys.exit(f"{error.name} is missing; run: pip install onnxruntime")

REPOSITORY = Path(__file__).resolve().parent.parent
# An output may differ from ONNX Runtime's by this share of its range: bytes that are rounded to the
# other side add up over the layers.
MAX_ERROR = 0.1


class Builder:
    """Convolutions with random weights that keep the scale of activations."""

    def __init__(self, name: str, seed: int) -> None:
        self.graph = Graph(name)
        self.random = np.random.default_rng(seed)
        self.count = 0

    def conv(self, x: str, inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1):
        self.count += 1
        shape = (outputs, inputs // groups, size, size)
        spread = math.sqrt(2.0 / (shape[1] * size * size))
        weight = self.random.normal(0, spread, shape).astype(np.float32)
        bias = self.random.normal(0, 0.05, outputs).astype(np.float32)
        operands = [
            x,
            self.graph.constant(f"w{self.count}", weight),
            self.graph.constant(f"b{self.count}", bias),
        ]
        return self.graph.node(
            "Conv",
            operands,
            kernel_shape=[size, size],
            strides=[stride, stride],
            pads=[size // 2] * 4,
            group=groups,
        )

    def relu(self, x: str) -> str:
        return self.graph.node("Relu", [x])

    def head(self, x: str, channels: int) -> None:
        x = self.graph.node("GlobalAveragePool", [x])
        x = self.graph.node("Flatten", [x])
        weight = self.random.normal(0, 0.03, (channels, 1000)).astype(np.float32)
        self.graph.node("MatMul", [x, self.graph.constant("head", weight)], "logits")
        self.graph.output("logits", FLOAT, ["N", 1000])


def resnet50() -> bytes:
    """ResNet-50 with its normalisation folded into the convolutions."""
    net = Builder("resnet50", 50)
    net.graph.input("x", FLOAT, ["N", 3, 224, 224])
    x = net.relu(net.conv("x", 3, 64, 7, 2))
    x = net.graph.node(
        "MaxPool", [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]
    )
    channels = 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            y = net.relu(net.conv(x, channels, width, 1))
            y = net.relu(net.conv(y, width, width, 3, stride))
            y = net.conv(y, width, 4 * width, 1)
            if block == 0:
                x = net.conv(x, channels, 4 * width, 1, stride)
            channels = 4 * width
            x = net.relu(net.graph.node("Add", [x, y]))
    net.head(x, channels)
    return net.graph.finish().SerializeToString()


def mobilenet() -> bytes:
    """Depthwise and pointwise convolutions in the proportions of MobileNet."""
    net = Builder("mobilenet", 51)
    net.graph.input("x", FLOAT, ["N", 3, 224, 224])
    x = net.relu(net.conv("x", 3, 32, 3, 2))
    channels = 32
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)] + [(512, 1)] * 5
    for outputs, stride in [*plan, (1024, 2), (1024, 1)]:
        x = net.relu(net.conv(x, channels, channels, 3, stride, channels))
        x = net.relu(net.conv(x, channels, outputs, 1))
        channels = outputs
    net.head(x, channels)
    return net.graph.finish().SerializeToString()


class Samples(CalibrationDataReader):
    """A few random inputs."""

    def __init__(self, path: Path, count: int) -> None:
        random = np.random.default_rng(1)
        self.left = [random_inputs(path, 1, random) for _ in range(count)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


def make(folder: Path) -> dict[str, list[Path]]:
    """The float file of each network, and its quantised ones."""
    made = {}
    for name, build in [("resnet50_plain", resnet50), ("mobilenet_plain", mobilenet)]:
        path = folder / f"{name}.onnx"
        if not path.exists():
            path.write_bytes(build())
        variants = [(QuantFormat.QDQ, "qdq"), (QuantFormat.QOperator, "qlinear")]
        files = [folder / f"{name}_{suffix}.onnx" for _, suffix in variants]
        for (form, _), target in zip(variants, files):
            if not target.exists():
                quantize_static(
                    path,
                    target,
                    Samples(path, 4),
                    quant_format=form,
                    activation_type=QuantType.QUInt8,
                    weight_type=QuantType.QInt8,
                    per_channel=True,
                )
        made[str(path)] = files
    command = [sys.executable, str(REPOSITORY / "scripts" / "models.py"), "--only", "minilm"]
    subprocess.run([*command, "--out", str(folder)], check=True)
    path, target = folder / "minilm.onnx", folder / "minilm_dynamic.onnx"
    if not target.exists():
        quantize_dynamic(path, target, weight_type=QuantType.QInt8, per_channel=True)
    made[str(path)] = [target]
    return made


def error(path: Path, args: argparse.Namespace) -> float:
    """The largest difference of an output from ONNX Runtime's, as a share of its range."""
    inputs = random_inputs(path, args.batch, np.random.default_rng(7))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = session.run(None, inputs)
    with tempfile.TemporaryDirectory(prefix="atoll-quantized-") as name:
        command = [str(args.atoll), "run", str(path), "--threads", str(args.threads)]
        for index, (key, value) in enumerate(inputs.items()):
            np.save(Path(name) / f"in{index}.npy", value)
            command += ["--input", f"{key}={Path(name) / f'in{index}.npy'}"]
        command += ["--save", name, "--repeat", "1", "--warmup", "0"]
        subprocess.run(command, check=True, capture_output=True)
        worst = 0.0
        for output, value in zip(session.get_outputs(), wanted):
            got = np.load(Path(name) / f"{output.name}.npy")
            worst = max(worst, float(np.abs(got - value).max() / (np.ptp(value) or 1.0)))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("ATOLL_BIN", str(REPOSITORY / "target" / "release" / "atoll"))
    parser.add_argument("--atoll", type=Path, default=Path(default), help="the binary")
    parser.add_argument("--models", type=Path, default=REPOSITORY / "models", help="their folder")
    parser.add_argument("--threads", type=int, default=2, help="of both (default: 2)")
    parser.add_argument("--batch", type=int, default=1, help="batch size (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="alternations (default: 3)")
    parser.add_argument("--repeat", type=int, default=10, help="counted runs a round (default: 10)")
    parser.add_argument("--only", default="", help="only networks whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    args = parser.parse_args()
    args.warmup, args.seed = 2, 0
    args.models.mkdir(exist_ok=True)
    print(f"{args.threads} threads, batch {args.batch}, milliseconds")
    print("| file | ort p50 | atoll p50 | ratio | speed-up | error | slowest |")
    print("|---|---:|---:|---:|---:|---:|---|")
    rows, wrong = [], 0
    for path, files in make(args.models).items():
        if args.only not in path:
            continue
        float_us = None
        for file in [Path(path), *files]:
            row = bench_cpu.bench(file, args)
            float_us = float_us or row.atoll_p50_us
            off = error(file, args)
            wrong += off > MAX_ERROR
            rows.append({**vars(row), "speed_up": float_us / row.atoll_p50_us, "error": off})
            print(
                f"| {row.model} | {row.ort_p50_us / 1e3:.2f} | {row.atoll_p50_us / 1e3:.2f} "
                f"| {row.ratio:.2f} | {float_us / row.atoll_p50_us:.2f} | {off:.4f} "
                f"| {row.slowest_op} |",
                flush=True,
            )
    if args.json:
        report = {"threads": args.threads, "batch": args.batch, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
