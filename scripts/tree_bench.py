#!/usr/bin/env python3
"""Time a forest beside ONNX Runtime, in one run.

    cargo build --release -p compiler --example run_times
    python scripts/tree_bench.py target/release/examples/run_times [trees] [depth] [threads]

Needs numpy, onnx and onnxruntime. Runs alternate between the two, so that both see the same
machine. Prints medians and their ratio for batches of 1 and 1,000 rows.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FEATURES, ROUNDS = 30, 5


def forest(trees: int, depth: int, random: np.random.Generator) -> bytes:
    """A regressor of complete trees with random thresholds."""
    count, inner = 2 ** (depth + 1) - 1, 2**depth - 1
    nodes = np.arange(count)
    is_leaf = nodes >= inner
    values = random.uniform(-1, 1, trees * count).astype(np.float32)
    attributes = {
        "nodes_treeids": np.repeat(np.arange(trees), count).tolist(),
        "nodes_nodeids": np.tile(nodes, trees).tolist(),
        "nodes_featureids": random.integers(0, FEATURES, trees * count).tolist(),
        "nodes_values": values.tolist(),
        "nodes_modes": np.tile(np.where(is_leaf, "LEAF", "BRANCH_LEQ"), trees).tolist(),
        "nodes_truenodeids": np.tile(np.where(is_leaf, 0, 2 * nodes + 1), trees).tolist(),
        "nodes_falsenodeids": np.tile(np.where(is_leaf, 0, 2 * nodes + 2), trees).tolist(),
        "target_treeids": np.repeat(np.arange(trees), count - inner).tolist(),
        "target_nodeids": np.tile(nodes[inner:], trees).tolist(),
        "target_ids": [0] * (trees * (count - inner)),
        "target_weights": random.uniform(-1, 1, trees * (count - inner)).tolist(),
    }
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, **attributes
    )
    graph = helper.make_graph(
        [node],
        "forest",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", FEATURES])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 1])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def runtime_us(session: onnxruntime.InferenceSession, x: np.ndarray, runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        session.run(None, {"x": x})
        times.append(time.perf_counter() - started)
    return float(np.median(times) * 1e6)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    binary = sys.argv[1]
    trees, depth, threads = (
        int(sys.argv[i]) if len(sys.argv) > i else default
        for i, default in ((2, 500), (3, 12), (4, 2))
    )
    random = np.random.default_rng(1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "forest.onnx"
        model.write_bytes(forest(trees, depth, random))
        session = onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"]
        )
        for rows, runs in ((1, 2000), (1000, 50)):
            x = random.uniform(-1, 1, (rows, FEATURES)).astype(np.float32)
            data = Path(folder) / "x.pb"
            data.write_bytes(numpy_helper.from_array(x, "x").SerializeToString())
            want = session.run(None, {"x": x})[0].ravel()
            ours, theirs = [], []
            for _ in range(ROUNDS):
                theirs.append(runtime_us(session, x, runs))
                command = [binary, str(model), str(data), str(runs), str(threads)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                lines = done.stdout.split("\n")
                ours.append(float(lines[0]))
                got = np.array([float(text) for text in lines[1].split()])
                np.testing.assert_allclose(got, want[: len(got)], rtol=1e-3, atol=1e-4)
            mine, other = np.median(ours), np.median(theirs)
            print(f"{rows:5} rows: {mine:9.1f} us, ONNX Runtime {other:9.1f} us, "
                  f"ratio {mine / other:.2f}")


if __name__ == "__main__":
    main()
