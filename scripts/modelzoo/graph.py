"""A thin builder over onnx.helper: named values in, named values out."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from modelzoo.target import IR_VERSION, OPSET

Shape = list[int | str]


class Graph:
    """Collects nodes and initializers; `finish` checks the result."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._count = 0

    def input(self, name: str, dtype: int, shape: Shape) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Shape) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def constant(self, name: str, value: np.ndarray) -> str:
        """Adds an initializer; an existing name is shared."""
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def node(
        self, op: str, inputs: list[str], output: str | None = None, **attributes: object
    ) -> str:
        """Adds a node with one output and returns the output's name."""
        if output is None:
            self._count += 1
            output = f"{op.lower()}_{self._count}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def finish(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, self.name, self.inputs, self.outputs, list(self.initializers.values())
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = IR_VERSION
        model.producer_name = "atoll"
        onnx.checker.check_model(model, full_check=True)
        return model


FLOAT = TensorProto.FLOAT
INT32 = TensorProto.INT32
INT64 = TensorProto.INT64
STRING = TensorProto.STRING
