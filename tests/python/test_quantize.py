"""`atoll quantize`: the file that it writes, its accuracy, and ONNX Runtime's results on it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from support import BINARY

SAMPLES = 6


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [BINARY, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def residual_network(opset: int = 17) -> onnx.ModelProto:
    """Convolutions with a pool, a residual, a depthwise filter, and a classifier."""
    random = np.random.default_rng(5)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        values = random.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape)
        return numpy_helper.from_array(values.astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["image", "w1", "b1"], ["c1"], "first", pads=[1] * 4),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("MaxPool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p1", "w2", "b2"], ["c2"], "second", pads=[1] * 4),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("Conv", ["r2", "w3", "b3"], ["c3"], "third", pads=[1] * 4),
        helper.make_node("Add", ["c3", "p1"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["r3"]),
        helper.make_node("Conv", ["r3", "wd"], ["cd"], "filters", pads=[1] * 4, group=16),
        helper.make_node("GlobalAveragePool", ["cd"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w4", "b4"], ["scores"], "classifier", transB=1),
    ]
    constants = [
        weight("w1", 16, 3, 3, 3),
        weight("b1", 16),
        weight("w2", 16, 16, 3, 3),
        weight("b2", 16),
        weight("w3", 16, 16, 3, 3),
        weight("b3", 16),
        weight("wd", 16, 1, 3, 3),
        weight("w4", 10, 16),
        weight("b4", 10),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 12, 12])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "residual", [image], [scores], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize")
    onnx.save(residual_network(), folder / "float.onnx")
    (folder / "samples").mkdir()
    random = np.random.default_rng(6)
    for number in range(SAMPLES):
        image = random.normal(0, 1, (4, 3, 12, 12)).astype(np.float32)
        if number % 2:
            np.savez(folder / "samples" / f"{number}.npz", image=image)
        else:
            np.save(folder / "samples" / f"{number}.npy", image)
    return folder


def reference(path: Path) -> onnxruntime.InferenceSession:
    """Computes what the file says, in single precision. On processors without VNNI ONNX Runtime's
    products of bytes saturate."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options)


def quantize(folder: Path, output: Path, *flags: str) -> dict:
    model, samples = folder / "float.onnx", folder / "samples"
    command = ["quantize", model, "--calibrate", samples, "--output", output, "--json", *flags]
    result = run(*command)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("method", ["max", "percentile", "entropy"])
@pytest.mark.parametrize("activations", ["uint8", "int8"])
def test_the_file_is_as_accurate_as_reported(
    folder: Path, tmp_path: Path, method: str, activations: str
) -> None:
    made = tmp_path / "int8.onnx"
    flags = ["--method", method, "--activations", activations]
    report = quantize(folder, made, *flags)
    onnx.checker.check_model(onnx.load(made), full_check=True)
    assert report["quantized_products"] == 4
    assert [node["node"] for node in report["float_nodes"]] == ["filters"]
    (error,) = report["outputs"]
    assert error["signal_to_noise_db"] > (20 if method == "max" else 12)
    float_session = onnxruntime.InferenceSession(folder / "float.onnx")
    session = reference(made)
    errors = []
    for path in sorted((folder / "samples").iterdir()):
        loaded = np.load(path)
        image = loaded if isinstance(loaded, np.ndarray) else loaded["image"]
        (wanted,) = float_session.run(None, {"image": image})
        (found,) = session.run(None, {"image": image})
        errors.append(np.abs(wanted - found))
    mean = float(np.mean(errors))
    # ONNX Runtime rounds at slightly other places, so the errors are alike, not equal.
    assert 0.5 * mean < error["mean_error"] < 2 * mean


def test_results_are_those_of_onnx_runtime(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "int8.onnx"
    quantize(folder, made)
    image = np.load(folder / "samples" / "0.npy")
    saved = tmp_path / "outputs"
    result = run("run", made, "--input", f"image={folder}/samples/0.npy", "--save", saved)
    assert result.returncode == 0, result.stderr
    (wanted,) = reference(made).run(None, {"image": image})
    found = np.load(saved / "scores.npy")
    # An activation that is rounded the other way moves a score by less than a quantum of it.
    assert np.abs(wanted - found).max() < np.abs(wanted).max() / 64


def test_nodes_can_stay_float(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "int8.onnx"
    report = quantize(folder, made, "--keep", "first", "--keep", "classifier")
    assert report["quantized_products"] == 2
    kept = {node["node"]: node["reason"] for node in report["float_nodes"]}
    assert set(kept) == {"first", "classifier", "filters"}
    operators = [node.op_type for node in onnx.load(made).graph.node]
    assert operators.count("DequantizeLinear") < 10
    names = {constant.name for constant in onnx.load(made).graph.initializer}
    assert "w1" in names and "w2" not in names


def test_what_cannot_be_quantized_is_refused_with_a_reason(folder: Path, tmp_path: Path) -> None:
    def refused(*flags: object) -> str:
        result = run("quantize", *flags, "--output", tmp_path / "no.onnx")
        assert result.returncode != 0
        assert not (tmp_path / "no.onnx").exists()
        return result.stderr

    samples = folder / "samples"
    model = folder / "float.onnx"
    (tmp_path / "empty").mkdir()
    assert "no .npy" in refused(model, "--calibrate", tmp_path / "empty")
    assert "no node 'x'" in refused(model, "--calibrate", samples, "--keep", "x")
    old = residual_network(9)
    onnx.save(old, tmp_path / "old.onnx")
    assert "operator set 9" in refused(tmp_path / "old.onnx", "--calibrate", samples)
    (tmp_path / "broken").mkdir()
    image = np.full((1, 3, 12, 12), np.nan, np.float32)
    np.save(tmp_path / "broken" / "0.npy", image)
    assert "NaN" in refused(model, "--calibrate", tmp_path / "broken")


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_scales_that_cannot_be_divided_by_are_refused(tmp_path: Path, scale: float) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "rounding"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], "back"),
    ]
    constants = [
        numpy_helper.from_array(np.float32(scale), "scale"),
        numpy_helper.from_array(np.uint8(0), "zero"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph(nodes, "bad", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "bad.onnx")
    result = run("check", tmp_path / "bad.onnx")
    assert result.returncode != 0
    assert "rounding" in result.stderr and "scale" in result.stderr
