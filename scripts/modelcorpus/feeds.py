"""Inputs for an ONNX file: sizes for its symbolic dimensions and seeded random values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

ELEMENTS_MAX = 64 << 20
# Sizes that are tried, one after another, for dimensions that a file leaves open: `batch` for the
# first dimension, `length` for those that are named like one, `side` for the others.
TRIALS = [
    {"batch": 1, "length": 16, "side": 64},
    {"batch": 1, "length": 16, "side": 32},
    {"batch": 1, "length": 512, "side": 224},
    {"batch": 1, "length": 16000, "side": 320},
    {"batch": 1, "length": 16, "side": 16},
    {"batch": 1, "length": 1, "side": 1},
    {"batch": 1, "length": 32, "side": 640},
    {"batch": 1, "length": 76, "side": 76},
    {"batch": 1, "length": 128, "side": 48},
    {"batch": 1, "length": 1280, "side": 3},
    {"batch": 1, "length": 4, "side": 4},
    {"batch": 1, "length": 0, "side": 0},
]
BATCH_NAME = re.compile(r"^(n|b|bs|.*batch.*|dynamicdimension\.0|p2o.*dynamicdimension\.0)$", re.I)
LENGTH_NAME = re.compile(r"seq|len|time|frame|sample|token|audio|^t$|^l$|step|past", re.I)
STATE_NAME = re.compile(r"^(h|c|h0|c0|state.*|hidden.*|.*_state)$", re.I)
WORDS = np.array(["red", "green", "blue", "a small text", "Another Text", "one"])


@dataclass(frozen=True)
class Input:
    """A declared input."""

    name: str
    elem_type: int
    dims: tuple[int | str, ...] | None


@dataclass(frozen=True)
class FileFacts:
    """What a file declares."""

    inputs: list[Input]
    outputs: list[tuple[str, int]]
    operators: set[str]
    quantised: bool
    half: bool
    draws: bool
    symbolic_batch: bool
    opset: int


def facts_of(path: Path) -> FileFacts:
    model = onnx.load(path, load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [_input(value) for value in model.graph.input if value.name not in weights]
    outputs = [(v.name, v.type.tensor_type.elem_type) for v in model.graph.output]
    operators = set(_operators(model.graph))
    for function in model.functions:
        operators |= {node.op_type for node in function.node}
    quantised = any(re.search(r"Quant|QLinear|Integer|QGemm|NBits", name) for name in operators)
    half = TensorProto.FLOAT16
    half = any(tensor.data_type == half for tensor in _tensors(model.graph))
    draws = any(name.startswith("Random") for name in operators)
    draws = draws or bool(operators & {"Bernoulli", "Multinomial", "Dropout_train"})
    first = inputs[0].dims if inputs else None
    symbolic = bool(first) and isinstance(first[0], str)
    versions = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    opset = max(versions, default=0)
    return FileFacts(inputs, outputs, operators, quantised, half, draws, symbolic, opset)


def _tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """Weights, also those that nodes make."""
    yield from graph.initializer
    for node in graph.node:
        yield from (a.t for a in node.attribute if a.type == onnx.AttributeProto.TENSOR)


def _operators(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _operators(attribute.g)


def _input(value: onnx.ValueInfoProto) -> Input:
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        return Input(value.name, kind.elem_type, None)
    dims = []
    for axis, dim in enumerate(kind.shape.dim):
        # A dimension without a usable name is one of its own.
        fixed = dim.HasField("dim_value") and dim.dim_value >= 0
        named = re.search(r"[A-Za-z]", dim.dim_param or "")
        dims.append(dim.dim_value if fixed else dim.dim_param if named else f"?{value.name}.{axis}")
    return Input(value.name, kind.elem_type, tuple(dims))


def bindings(facts: FileFacts, trial: dict[str, int], batch: int) -> dict[str, int]:
    """A size for every symbol: `batch` for the one that the first input begins with and for those
    that are called so."""
    sizes: dict[str, int] = {}
    for number, entry in enumerate(facts.inputs):
        for axis, dim in enumerate(entry.dims or ()):
            if isinstance(dim, int) or dim in sizes:
                continue
            # A lone dimension of a waveform is its length.
            leads = axis == 0 and len(entry.dims) > 1
            # The state of a recurrent layer has its rows second.
            leads = leads or (axis == 1 and bool(STATE_NAME.match(entry.name)))
            named = BATCH_NAME.match(dim) and (axis == 0 or len(dim) > 1)
            if named or (leads and (number == 0 or dim.startswith("?"))):
                sizes[dim] = batch
            elif LENGTH_NAME.search(dim) or len(entry.dims) < 3:
                sizes[dim] = trial["length"]
            else:
                sizes[dim] = trial["side"]
    return sizes


def feed(
    facts: FileFacts, sizes: dict[str, int], seed: str, fixed: dict | None = None
) -> dict[str, np.ndarray]:
    """One random array for each input. `fixed` has shapes and values that a file needs."""
    digest = hashlib.sha256(seed.encode()).digest()
    rng = np.random.default_rng(np.frombuffer(digest, np.uint32))
    arrays = {}
    for entry in facts.inputs:
        rule = (fixed or {}).get(entry.name, {})
        dims = rule.get("shape", entry.dims if entry.dims is not None else ("?batch", 4))
        shape = [dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in dims]
        if int(np.prod(shape, dtype=np.float64)) > ELEMENTS_MAX:
            raise ValueError(f"input {entry.name} would have shape {shape}")
        arrays[entry.name] = _random(entry, shape, rule, sizes, rng)
    return arrays


def _random(entry: Input, shape: list[int], rule: dict, sizes: dict, rng) -> np.ndarray:
    if entry.elem_type == TensorProto.STRING:
        return rng.choice(WORDS, shape).astype(object)
    dtype = helper.tensor_dtype_to_np_dtype(entry.elem_type or TensorProto.FLOAT)
    name = entry.name.lower()
    if "value" in rule:
        return np.full(shape, rule["value"], dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        if name in ("sr", "sample_rate", "sampling_rate"):
            return np.full(shape, 16000, dtype)
        if "len" in name:
            longest = max(sizes.values(), default=1)
            return np.full(shape, longest, dtype)
        if "mask" in name:
            return np.ones(shape, dtype)
        return rng.integers(rule.get("low", 0), rule.get("high", 2), shape).astype(dtype)
    if "mask" in name:
        return np.ones(shape, dtype)
    scale = rule.get("scale", 1.0)
    return (rng.normal(0.0, scale, shape)).astype(dtype)
