"""Models of a few nodes for protocol tests and overhead benchmarks."""

from __future__ import annotations

import numpy as np

from modelzoo.graph import FLOAT, INT32, INT64, STRING, Graph
from modelzoo.target import Built


def _identity(name: str, dtype: int, sample: np.ndarray) -> Built:
    graph = Graph(name)
    graph.input("INPUT0", dtype, ["batch", 1])
    graph.node("Identity", ["INPUT0"], "OUTPUT0")
    graph.output("OUTPUT0", dtype, ["batch", 1])
    return Built(graph.finish(), {"INPUT0": sample})


def identity_fp32() -> Built:
    return _identity("identity_fp32", FLOAT, np.array([[1.5]], np.float32))


def identity_int64() -> Built:
    return _identity("identity_int64", INT64, np.array([[-7]], np.int64))


def identity_bytes() -> Built:
    return _identity("identity_bytes", STRING, np.array([["atoll"]], object))


def add_sub() -> Built:
    """Triton's classic "simple" model: a sum and a difference of two vectors."""
    graph = Graph("add_sub")
    for name in ("INPUT0", "INPUT1"):
        graph.input(name, INT32, ["batch", 16])
    graph.node("Add", ["INPUT0", "INPUT1"], "OUTPUT0")
    graph.node("Sub", ["INPUT0", "INPUT1"], "OUTPUT1")
    for name in ("OUTPUT0", "OUTPUT1"):
        graph.output(name, INT32, ["batch", 16])
    return Built(
        graph.finish(),
        {"INPUT0": np.arange(16, dtype=np.int32)[None], "INPUT1": np.ones((1, 16), np.int32)},
    )


def chain(side: int, steps: int) -> Built:
    """A chain of matrix products, each a step, after a one-float input."""
    rng = np.random.default_rng(1)
    # An orthogonal matrix keeps every product at the same scale.
    turn, _ = np.linalg.qr(rng.normal(size=(side, side)))
    graph = Graph("chain")
    graph.input("INPUT0", FLOAT, ["batch", 1])
    graph.constant("turn", turn.astype(np.float32))
    graph.constant("start", rng.normal(size=(1, side, side)).astype(np.float32))
    graph.constant("axis", np.array([2], np.int64))
    x = graph.node("Unsqueeze", ["INPUT0", "axis"])
    x = graph.node("Mul", [x, "start"])
    for _ in range(steps):
        x = graph.node("MatMul", [x, "turn"])
    x = graph.node("ReduceMax", [x], axes=[1, 2], keepdims=1)
    graph.node("Squeeze", [x, "axis"], "OUTPUT0")
    graph.output("OUTPUT0", FLOAT, ["batch", 1])
    return Built(graph.finish(), {"INPUT0": np.array([[1.0]], np.float32)})


def slow() -> Built:
    """About a second of work on two cores, in some hundred steps.

    Tests of drain, cancellation, timeout and preemption need a request that still runs.
    """
    return chain(side=640, steps=120)
