"""The same network in single precision, against which results of half precision are judged.

ONNX Runtime rounds to half precision after each operator and overflows beyond 65,504; Atoll
computes such files in single precision. Where the two differ, the nearer one to this network is
right.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, numpy_helper

HALF, SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT
# Attributes that name a type.
TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "stash_type"}


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with float32 in the place of float16."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _widen_graph(wide.graph)
    for function in wide.functions:
        _widen_nodes(function.node)
        for value in function.value_info:
            _widen_type(value.type)
    return wide


def widen_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: a.astype(np.float32) if a.dtype == np.float16 else a for n, a in arrays.items()}


def _widen_graph(graph: GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            _widen_type(value.type)
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterator[NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _widen_graph(attribute.g)
            elif attribute.type == AttributeProto.GRAPHS:
                for graph in attribute.graphs:
                    _widen_graph(graph)
            elif attribute.type == AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.name in TYPE_ATTRIBUTES and attribute.i == HALF:
                attribute.i = SINGLE


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type == HALF:
        single = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(single, tensor.name))


def _widen_type(kind: TypeProto) -> None:
    if kind.HasField("tensor_type") and kind.tensor_type.elem_type == HALF:
        kind.tensor_type.elem_type = SINGLE
    for name in ("sequence_type", "optional_type"):
        if kind.HasField(name):
            _widen_type(getattr(kind, name).elem_type)
