"""The same network with its numbers moved by one unit in the last place.

Where a value is rounded to a byte, the least change decides to which one, and the layers behind it
spread that. How far ONNX Runtime's own result moves says how far rounding alone can go.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, TensorProto, numpy_helper


def nudge(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """A copy whose numbers of single precision are one unit up or down, by chance."""
    random = np.random.default_rng(seed)
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    for tensor in _tensors(moved.graph):
        if tensor.data_type == TensorProto.FLOAT:
            numbers = numpy_helper.to_array(tensor)
            toward = random.choice(np.float32([-np.inf, np.inf]), numbers.shape)
            # Whole numbers may be sizes or factors of them, and stay.
            whole = numbers == np.round(numbers)
            numbers = np.where(whole, numbers, np.nextafter(numbers, toward))
            tensor.CopyFrom(numpy_helper.from_array(numbers.astype(np.float32), tensor.name))
    return moved


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            elif attribute.type == AttributeProto.GRAPH:
                yield from _tensors(attribute.g)
