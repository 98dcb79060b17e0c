"""Deliberately broken ONNX files cause a clear error, no panic and no large allocation."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import requests
from onnx import TensorProto, helper, numpy_helper

from support import ASSETS, BINARY, Server


def model(nodes: list, shape: list[int | str] | None = None, weights: list | None = None) -> bytes:
    shape = ["batch", 4] if shape is None else shape
    graph = helper.make_graph(
        nodes,
        "hostile",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights or [],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    return made.SerializeToString()


def node(op: str, inputs: list[str], outputs: list[str], **attributes: object) -> object:
    return helper.make_node(op, inputs, outputs, name=f"the_{op.lower()}", **attributes)


def good() -> bytes:
    return (ASSETS / "digits.onnx").read_bytes()


def cycle() -> bytes:
    return model(
        [node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["y"])]
    )


def missing_value() -> bytes:
    return model([node("Add", ["x", "nowhere"], ["y"])])


def missing_output() -> bytes:
    return model([node("Relu", ["x"], ["z"])])


def duplicate_output() -> bytes:
    return model([node("Relu", ["x"], ["y"]), node("Neg", ["x"], ["y"])])


def huge_claim() -> bytes:
    """A weight whose shape claims 2 GB and whose content is four bytes."""
    weight = numpy_helper.from_array(np.zeros(1, np.float32), "w")
    del weight.dims[:]
    weight.dims.extend([2**29])
    return model([node("Add", ["x", "w"], ["y"])], weights=[weight])


def overflowing_claim() -> bytes:
    weight = numpy_helper.from_array(np.zeros(1, np.float32), "w")
    del weight.dims[:]
    weight.dims.extend([2**62, 2**62])
    return model([node("Add", ["x", "w"], ["y"])], weights=[weight])


def negative_weight() -> bytes:
    weight = numpy_helper.from_array(np.zeros(1, np.float32), "w")
    del weight.dims[:]
    weight.dims.extend([-1])
    return model([node("Add", ["x", "w"], ["y"])], weights=[weight])


def huge_fill() -> bytes:
    """Folding this constant would need 4 TB."""
    shape = numpy_helper.from_array(np.array([2**40], np.int64), "s")
    return model(
        [node("ConstantOfShape", ["s"], ["c"]), node("Add", ["x", "c"], ["y"])], weights=[shape]
    )


def unknown_operator() -> bytes:
    return model([node("Frobnicate", ["x"], ["y"])])


def wrong_attribute() -> bytes:
    weight = numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), "w")
    bad = node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3], strides=[0, 0], dilations=[-1, 1])
    return model([bad], ["batch", 3, 8, 8], [weight])


def wrong_shapes() -> bytes:
    weight = numpy_helper.from_array(np.zeros((5, 7), np.float32), "w")
    return model([node("MatMul", ["x", "w"], ["y"])], weights=[weight])


def escaping_external_data() -> bytes:
    """External data that names a file outside the model's folder."""
    weight = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL
    )
    weight.external_data.add(key="location", value="../../../../etc/passwd")
    return model([node("Add", ["x", "w"], ["y"])], weights=[weight])


FILES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"this is no model",
    "zeros": lambda: b"\x00" * 4096,
    "ones": lambda: b"\xff" * 4096,
    "cut-early": lambda: good()[:100],
    "cut-late": lambda: good()[:-1000],
    **{
        f.__name__: f
        for f in (
            cycle,
            missing_value,
            missing_output,
            duplicate_output,
            huge_claim,
            overflowing_claim,
            negative_weight,
            huge_fill,
            unknown_operator,
            wrong_attribute,
            wrong_shapes,
            escaping_external_data,
        )
    },
}


@pytest.mark.parametrize("kind", list(FILES))
def test_register_refuses_broken_models(server: Server, kind: str) -> None:
    files = {
        "name": (None, f"hostile_{kind.replace('-', '_')}"),
        "model": ("model.onnx", FILES[kind](), "application/octet-stream"),
        "labels": ("labels.txt", "a\nb\n", "text/plain"),
        "preprocessing": (None, "{}", "application/json"),
    }
    reply = requests.post(f"{server.url}/register", files=files, timeout=60)
    assert reply.status_code in (400, 501), f"{reply.status_code}: {reply.text[:300]}"
    assert reply.json()["error"]
    server.assert_alive()


@pytest.mark.parametrize("kind", list(FILES))
def test_check_refuses_broken_models(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(FILES[kind]())
    done = subprocess.run(
        [str(BINARY), "check", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode not in (0, 101) and done.returncode > 0, done
    assert "panicked" not in done.stderr
    assert (done.stdout + done.stderr).strip()


def test_the_error_names_an_unsupported_operator(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(unknown_operator())
    done = subprocess.run(
        [str(BINARY), "check", str(path)], capture_output=True, text=True, timeout=60
    )
    output = done.stdout + done.stderr
    assert "Frobnicate" in output
    assert "the_frobnicate" in output
