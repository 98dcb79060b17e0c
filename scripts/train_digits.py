#!/usr/bin/env python3
"""Train the demo model: a small convolutional digits classifier, in plain numpy.

The data is the digits set of scikit-learn (1,797 images of 8x8 pixels), which is part of the
package. The result is assets/digits.onnx and a few held-out samples that `atoll demo` sends.

    python scripts/train_digits.py            # needs numpy, scikit-learn, onnx
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

try:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error.name} is missing; run: pip install numpy scikit-learn onnx")

REPOSITORY = Path(__file__).resolve().parent.parent
CLASSES = 10
SIDE = 8
# Supported by every current runtime; the model needs no newer operator.
OPSET = 17
IR_VERSION = 8

Params = dict[str, np.ndarray]


def load_split(seed: int, held_out: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (train images, train labels, held-out images, held-out labels), pixels in 0..1."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None, :, :]
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:held_out], order[held_out:]
    return images[train], labels[train], images[test], labels[test]


def initial_params(rng: np.random.Generator) -> Params:
    """He-initialised weights of the network that `forward` runs."""

    def conv(out_channels: int, in_channels: int) -> np.ndarray:
        scale = np.sqrt(2.0 / (in_channels * 9))
        return rng.normal(0, scale, (out_channels, in_channels, 3, 3)).astype(np.float32)

    def dense(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, np.sqrt(2.0 / rows), (rows, columns)).astype(np.float32)

    weights = {
        "conv1": conv(16, 1),
        "conv2": conv(32, 16),
        "conv3": conv(32, 32),
        "conv4": conv(32, 32),
        "fc1": dense(32 * 2 * 2, 64),
        "fc2": dense(64, CLASSES),
    }
    params: Params = {}
    for name, weight in weights.items():
        width = weight.shape[0] if weight.ndim == 4 else weight.shape[1]
        params[f"{name}.weight"] = weight
        params[f"{name}.bias"] = np.zeros(width, np.float32)
    return params


def columns_of(x: np.ndarray) -> np.ndarray:
    """Unfolds 3x3 windows with padding 1: [n, c, h, w] -> [n * h * w, c * 9]."""
    n, channels, height, width = x.shape
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return windows.transpose(0, 2, 3, 1, 4, 5).reshape(n * height * width, channels * 9)


def conv_forward(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    n, _, height, width = x.shape
    columns = columns_of(x)
    y = columns @ weight.reshape(len(weight), -1).T + bias
    return y.reshape(n, height, width, -1).transpose(0, 3, 1, 2), columns


def conv_backward(
    grad: np.ndarray, columns: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns gradients of (input, weight, bias)."""
    flat = grad.transpose(0, 2, 3, 1).reshape(-1, grad.shape[1])
    weight_grad = (flat.T @ columns).reshape(weight.shape)
    # The input gradient of a same-padded convolution is one with the kernel rotated by 180
    # degrees.
    rotated = np.ascontiguousarray(weight[:, :, ::-1, ::-1].transpose(1, 0, 2, 3))
    input_grad, _ = conv_forward(grad, rotated, np.zeros(len(rotated), np.float32))
    return input_grad, weight_grad, flat.sum(axis=0)


def pool_forward(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """2x2 max pooling; the second value marks the maxima for the backward pass."""
    n, channels, height, width = x.shape
    blocks = x.reshape(n, channels, height // 2, 2, width // 2, 2)
    y = blocks.max(axis=(3, 5))
    return y, blocks == y[:, :, :, None, :, None]


def pool_backward(grad: np.ndarray, maxima: np.ndarray) -> np.ndarray:
    n, channels, height, width = grad.shape
    spread = maxima * grad[:, :, :, None, :, None]
    return spread.reshape(n, channels, height * 2, width * 2)


def forward(params: Params, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the logits and what the backward pass needs."""
    kept: dict[str, np.ndarray] = {}

    def conv(name: str, value: np.ndarray) -> np.ndarray:
        y, kept[f"{name}.columns"] = conv_forward(
            value, params[f"{name}.weight"], params[f"{name}.bias"]
        )
        return y

    def relu(name: str, value: np.ndarray) -> np.ndarray:
        kept[name] = value > 0
        return value * kept[name]

    x = relu("relu1", conv("conv1", x))
    x = relu("relu2", conv("conv2", x))
    x, kept["pool1"] = pool_forward(x)
    x = relu("relu3", conv("conv3", x))
    x = relu("relu4", conv("conv4", x) + x)
    x, kept["pool2"] = pool_forward(x)
    kept["flat"] = x = x.reshape(len(x), -1)
    kept["hidden"] = x = relu("relu5", x @ params["fc1.weight"] + params["fc1.bias"])
    return x @ params["fc2.weight"] + params["fc2.bias"], kept


def backward(params: Params, kept: dict[str, np.ndarray], grad: np.ndarray) -> Params:
    """Gradients of every parameter, given the gradient of the logits."""
    grads: Params = {}

    def dense(name: str, value: np.ndarray, out_grad: np.ndarray) -> np.ndarray:
        grads[f"{name}.weight"] = value.T @ out_grad
        grads[f"{name}.bias"] = out_grad.sum(axis=0)
        return out_grad @ params[f"{name}.weight"].T

    def conv(name: str, out_grad: np.ndarray) -> np.ndarray:
        input_grad, grads[f"{name}.weight"], grads[f"{name}.bias"] = conv_backward(
            out_grad, kept[f"{name}.columns"], params[f"{name}.weight"]
        )
        return input_grad

    grad = dense("fc2", kept["hidden"], grad) * kept["relu5"]
    grad = dense("fc1", kept["flat"], grad).reshape(len(grad), 32, 2, 2)
    grad = pool_backward(grad, kept["pool2"]) * kept["relu4"]
    grad = (conv("conv4", grad) + grad) * kept["relu3"]
    grad = pool_backward(conv("conv3", grad), kept["pool1"]) * kept["relu2"]
    conv("conv1", conv("conv2", grad) * kept["relu1"])
    return grads


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def shifted(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shifts the whole batch by up to one pixel, a cheap augmentation."""
    down, right = rng.integers(-1, 2, 2)
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return padded[:, :, 1 + down : 1 + down + SIDE, 1 + right : 1 + right + SIDE]


def train(images: np.ndarray, labels: np.ndarray, epochs: int, seed: int) -> Params:
    """Adam with a linearly decreasing rate."""
    rng = np.random.default_rng(seed)
    params = initial_params(rng)
    first = {k: np.zeros_like(v) for k, v in params.items()}
    second = {k: np.zeros_like(v) for k, v in params.items()}
    batch, step, steps = 64, 0, epochs * (len(labels) // 64)
    for epoch in range(epochs):
        order = rng.permutation(len(labels))
        total = 0.0
        for start in range(0, len(labels) - batch + 1, batch):
            chosen = order[start : start + batch]
            logits, kept = forward(params, shifted(images[chosen], rng))
            probability = softmax(logits)
            total -= float(np.log(probability[np.arange(batch), labels[chosen]] + 1e-12).mean())
            probability[np.arange(batch), labels[chosen]] -= 1.0
            grads = backward(params, kept, (probability / batch).astype(np.float32))
            step += 1
            rate = 2e-3 * (1.0 - step / (steps + 1))
            for name, grad in grads.items():
                first[name] = 0.9 * first[name] + 0.1 * grad
                second[name] = 0.999 * second[name] + 0.001 * grad * grad
                mean = first[name] / (1 - 0.9**step)
                spread = np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
                params[name] = (params[name] - rate * mean / spread).astype(np.float32)
        if epoch % 10 == 9 or epoch == epochs - 1:
            print(
                f"epoch {epoch + 1:3d}  loss {total / (len(labels) // batch):.4f}", file=sys.stderr
            )
    return params


def accuracy(params: Params, images: np.ndarray, labels: np.ndarray) -> float:
    return float((forward(params, images)[0].argmax(axis=1) == labels).mean())


def to_onnx(params: Params) -> onnx.ModelProto:
    """The same network as `forward`, with a symbolic batch dimension."""
    nodes = []

    def node(op: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def conv(name: str, value: str) -> str:
        inputs = [value, f"{name}.weight", f"{name}.bias"]
        return node("Conv", inputs, name, kernel_shape=[3, 3], pads=[1, 1, 1, 1])

    def pool(name: str, value: str) -> str:
        return node("MaxPool", [value], name, kernel_shape=[2, 2], strides=[2, 2])

    x = node("Relu", [conv("conv1", "image")], "relu1")
    x = node("Relu", [conv("conv2", x)], "relu2")
    skip = node("Relu", [conv("conv3", pool("pool1", x))], "relu3")
    x = node("Add", [conv("conv4", skip), skip], "residual")
    x = pool("pool2", node("Relu", [x], "relu4"))
    x = node("Flatten", [x], "flat", axis=1)
    x = node("Gemm", [x, "fc1.weight", "fc1.bias"], "fc1")
    x = node("Relu", [x], "relu5")
    node("Gemm", [x, "fc2.weight", "fc2.bias"], "logits")

    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in params.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    model.producer_name = "atoll"
    onnx.checker.check_model(model, full_check=True)
    return model


def write_samples(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes held-out images in 16 gray levels, as in the set, which keeps the file small.

    A sample's input to the model is `pixels / 16`.
    """
    samples = [
        {"label": int(label), "pixels": [int(p) for p in np.rint(image.ravel() * 16)]}
        for image, label in zip(images, labels, strict=True)
    ]
    body = ",\n".join(json.dumps(s, separators=(",", ":")) for s in samples)
    path.write_text(f'{{"shape":[1,{SIDE},{SIDE}],"scale":16,"samples":[\n{body}\n]}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=REPOSITORY / "assets",
        help="folder to write to (default: assets)",
    )
    parser.add_argument(
        "--epochs", type=int, default=40, help="passes over the training set (default: 40)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=7,
        help="seed of the split, the weights and the order (default: 7)",
    )
    parser.add_argument(
        "--held-out", type=int, default=360, help="images kept for the accuracy (default: 360)"
    )
    parser.add_argument(
        "--samples", type=int, default=64, help="held-out samples to write (default: 64)"
    )
    args = parser.parse_args()

    train_x, train_y, test_x, test_y = load_split(args.seed, args.held_out)
    params = train(train_x, train_y, args.epochs, args.seed)
    score = accuracy(params, test_x, test_y)
    print(f"held-out accuracy {score:.4f} on {len(test_y)} images")
    if score < 0.97:
        print("accuracy is below 0.97; nothing was written", file=sys.stderr)
        return 1

    args.out.mkdir(parents=True, exist_ok=True)
    model_path = args.out / "digits.onnx"
    model_path.write_bytes(to_onnx(params).SerializeToString(deterministic=True))
    write_samples(args.out / "digits_samples.json", test_x[: args.samples], test_y[: args.samples])
    print(f"wrote {model_path} ({model_path.stat().st_size} bytes) and {args.samples} samples")
    return 0


if __name__ == "__main__":
    sys.exit(main())
