"""Models and request bodies that ask for more than they send: the worst that is known."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

REAL, LONG = TensorProto.FLOAT, TensorProto.INT64


def onnx_model(nodes: list, inputs: list, outputs: list[str], weights: list | None = None) -> bytes:
    given = [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs]
    made = [helper.make_tensor_value_info(name, REAL, None) for name in outputs]
    graph = helper.make_graph(nodes, "attack", given, made, weights or [])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    proto.ir_version = 8
    return proto.SerializeToString()


def put(folder: Path, name: str, data: bytes, settings: str = "") -> None:
    target = folder / name / "1"
    target.mkdir(parents=True, exist_ok=True)
    (target / "model.onnx").write_bytes(data)
    if settings:
        (folder / name / "atoll.toml").write_text(settings)


def real_time_model(width: int = 1024, layers: int = 6) -> bytes:
    """A few milliseconds of matrix products on one core."""
    random = np.random.default_rng(1)
    nodes, weights, value = [], [], "x"
    for layer in range(layers):
        table = (random.standard_normal((width, width)) / np.sqrt(width)).astype(np.float32)
        weights.append(numpy_helper.from_array(table, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"]))
        value = f"r{layer}"
    nodes.append(helper.make_node("Identity", [value], ["y"]))
    return onnx_model(nodes, [("x", REAL, [1, width])], ["y"], weights)


def make_models(folder: Path) -> None:
    """The real-time model `rt`, and those of `make_hostile_models`."""
    put(folder, "rt", real_time_model(), 'class = "rt"\npriority = 1\n')
    make_hostile_models(folder, 8)


def make_hostile_models(folder: Path, width: int) -> None:
    """Models whose outputs or temporaries are as large as a request says; a token of `attention`
    has `width` numbers."""
    outer = [helper.make_node("MatMul", ["a", "b"], ["y"])]
    put(folder, "outer", onnx_model(outer, [("a", REAL, ["m", 1]), ("b", REAL, [1, "n"])], ["y"]))
    expand = [helper.make_node("Expand", ["x", "shape"], ["y"])]
    inputs = [("x", REAL, [1]), ("shape", LONG, ["rank"])]
    put(folder, "expand", onnx_model(expand, inputs, ["y"]))
    same = [helper.make_node("Identity", ["x"], ["y"])]
    put(folder, "identity", onnx_model(same, [("x", REAL, ["n"])], ["y"]))
    # The scores of all tokens are one value.
    attend = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["x", "t"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "x"], ["z"]),
        helper.make_node("Mul", ["scores", "scores"], ["square"]),
        helper.make_node("ReduceMax", ["square"], ["top"], keepdims=0),
        helper.make_node("Add", ["z", "top"], ["y"]),
    ]
    put(folder, "attention", onnx_model(attend, [("x", REAL, [1, "tokens", width])], ["y"]))
    pixels = [helper.make_node("GlobalAveragePool", ["x"], ["p"])]
    pixels += [helper.make_node("Flatten", ["p"], ["y"])]
    put(folder, "picture", onnx_model(pixels, [("x", REAL, [1, 3, 8, 8])], ["y"]))


@dataclass
class Attack:
    """One hostile request."""

    name: str
    # rest: a POST; grpc: an inference message; raw: bytes on a socket that is then held.
    kind: str
    path: str = ""
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def binary_tensors(tensors: list[tuple[str, np.ndarray]]) -> tuple[bytes, dict[str, str]]:
    kinds = {"float32": "FP32", "int64": "INT64"}
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": kinds[str(array.dtype)],
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in tensors
    ]
    head = json.dumps({"inputs": inputs}).encode()
    body = head + b"".join(array.tobytes() for _, array in tensors)
    return body, {"Inference-Header-Content-Length": str(len(head))}


def tensors(name: str, model: str, given: list[tuple[str, np.ndarray]]) -> Attack:
    body, headers = binary_tensors(given)
    return Attack(name, "rest", f"/v2/models/{model}/infer", body, headers)


def png(edge: int) -> bytes:
    """A black square of some hundred kilobytes that is `edge` times `edge` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * edge)
    data = b"".join(packer.compress(row) for _ in range(edge)) + packer.flush()
    header = struct.pack(">IIBBBBB", edge, edge, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def form(fields: dict[str, bytes], boundary: str = "attack") -> tuple[bytes, dict[str, str]]:
    parts = []
    for name, value in fields.items():
        disposition = f'form-data; name="{name}"'
        if name in ("image", "model"):
            disposition += '; filename="file"'
        parts.append(f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n".encode())
        parts += [value, b"\r\n"]
    parts.append(f"--{boundary}--\r\n".encode())
    return b"".join(parts), {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def folding_bomb() -> bytes:
    nodes, sums = [], ["x"]
    for index in range(250):
        nodes.append(helper.make_node("ConstantOfShape", ["big"], [f"c{index}"]))
        nodes.append(helper.make_node("Exp", [f"c{index}"], [f"e{index}"]))
        nodes.append(helper.make_node("ReduceMax", [f"e{index}"], [f"m{index}"]))
        sums.append(f"m{index}")
    nodes.append(helper.make_node("Sum", sums, ["y"]))
    big = numpy_helper.from_array(np.array([12 << 20], np.int64), "big")
    return onnx_model(nodes, [("x", REAL, [1])], ["y"], [big])


def huge_output() -> bytes:
    """158 bytes that need 8 GiB when they are measured."""
    big = numpy_helper.from_array(np.array([1 << 31], np.int64), "big")
    nodes = [helper.make_node("Expand", ["x", "big"], ["y"])]
    return onnx_model(nodes, [("x", REAL, [1])], ["y"], [big])


def json_bombs() -> Iterator[Attack]:
    head = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":['
    for name, element in (("numbers", b"0,"), ("strings", b'"",'), ("lists", b"[[]],")):
        count = (200 << 20) // len(element)
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)
        packed = packer.compress(head)
        piece = element * (1 << 16)
        for _ in range(count >> 16):
            packed += packer.compress(piece)
        packed += packer.compress(b"0]}]}") + packer.flush()
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        yield Attack(f"gzip JSON {name}", "rest", "/v2/models/identity/infer", packed, headers)
    deep = b"[" * 2_000_000
    body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + deep
    yield Attack("deep JSON", "rest", "/v2/models/identity/infer", body)
    packed = gzip.compress(body * 8, 9)
    headers = {"Content-Encoding": "gzip"}
    yield Attack("deep gzip JSON", "rest", "/v2/models/identity/infer", packed, headers)


def grpc_bombs() -> Iterator[Attack]:
    model = b"\x0a\x08identity"
    # Two bytes of the wire become hundreds: empty inputs, outputs and parameters.
    yield Attack("wide gRPC inputs", "grpc", body=model + b"\x2a\x00" * (4 << 20))
    yield Attack("wide gRPC outputs", "grpc", body=model + b"\x32\x00" * (4 << 20))
    # One element of a contents field is one byte on the wire and eight in memory.
    contents = b"\x1a" + varint(16 << 20) + bytes(16 << 20)
    one = b"\x0a\x01x" + b"\x12\x05INT64" + b"\x2a" + varint(len(contents)) + contents
    yield Attack("wide gRPC contents", "grpc", body=model + b"\x2a" + varint(len(one)) + one)


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def make_attacks() -> list[Attack]:
    """All of them; some hundred megabytes of memory are needed while they are made."""
    attacks = [*json_bombs(), *grpc_bombs()]
    picture, headers = form({"name": b"picture", "image": png(9_000)})
    attacks.append(Attack("PNG of 9000 x 9000", "rest", "/classify", picture, headers))
    names = [{"name": "y"}] * 1024
    tensor = {"name": "x", "shape": [4096], "datatype": "FP32", "data": [0.5] * 4096}
    body = json.dumps({"inputs": [tensor], "outputs": names}).encode()
    attacks.append(Attack("one output 1,024 times", "rest", "/v2/models/identity/infer", body))
    side = np.ones(1 << 17, np.float32)
    outer = [("a", side.reshape(-1, 1)), ("b", side.reshape(1, -1))]
    attacks.append(tensors("outer product of 64 GiB", "outer", outer))
    side = side[:6_000]
    outer = [("a", side.reshape(-1, 1)), ("b", side.reshape(1, -1))]
    attacks.append(tensors("outer product of 144 MB", "outer", outer))
    tokens = np.zeros((1, 49_152, 8), np.float32)
    attacks.append(tensors("attention of 9 GiB", "attention", [("x", tokens)]))
    tokens = np.zeros((1, 5_000, 8), np.float32)
    attacks.append(tensors("attention of 100 MB", "attention", [("x", tokens)]))
    shape = np.array([1 << 20, 1 << 20], np.int64)
    one = np.ones(1, np.float32)
    attacks.append(tensors("expand to 4 TiB", "expand", [("x", one), ("shape", shape)]))
    for name, model in (("folding bomb", folding_bomb()), ("huge output", huge_output())):
        body, headers = form({"name": b"hostile", "slo_ms": b"10", "model": model})
        attacks.append(Attack(f"register {name}", "rest", "/register", body, headers))
    claim = b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    attacks.append(Attack("stalled body", "raw", body=claim + b"100000000\r\n\r\n{"))
    attacks.append(Attack("claim of 8 EiB", "raw", body=claim + b"9223372036854775807\r\n\r\n{"))
    attacks.append(Attack("partial head", "raw", body=claim[:60]))
    attacks.append(Attack("preface and silence", "raw", body=b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
    return attacks
