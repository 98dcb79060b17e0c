"""Sentences of different lengths share a batch where the model has a mask that it honours."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as grpc_api
import tritonclient.http as http_api
from onnx import TensorProto, helper, numpy_helper

from support import Server, serve, wait_for

WIDTH, WORDS, STEPS = 8, 50, 60
WINDOW = "batching = { policy = 'window', max_batch = 16, max_wait_us = 200000 }\n"


def text_model(honours_mask: bool) -> bytes:
    """The mean of the words that count through many small layers, added to every word.

    Small layers take as long for eight rows as for one, so that batches pay.
    """
    random = np.random.default_rng(1)
    weights = {
        "table": random.standard_normal((WORDS, WIDTH)).astype(np.float32),
        "layer": (random.standard_normal((WIDTH, WIDTH)) / 3).astype(np.float32),
        "last": np.array([2], np.int64),
        "middle": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["counts"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["counts", "last"], ["weights"]),
        helper.make_node("Mul", ["words", "weights"], ["counted"]),
        helper.make_node(
            "ReduceSum", ["counted" if honours_mask else "words", "middle"], ["sum"], keepdims=0
        ),
        helper.make_node("ReduceSum", ["counts", "middle"], ["number"], keepdims=1),
        helper.make_node("Div", ["sum", "number"], ["state0"]),
    ]
    for step in range(STEPS):
        nodes.append(helper.make_node("MatMul", [f"state{step}", "layer"], [f"product{step}"]))
        nodes.append(helper.make_node("Tanh", [f"product{step}"], [f"state{step + 1}"]))
    nodes += [
        helper.make_node("Unsqueeze", [f"state{STEPS}", "middle"], ["mean"]),
        helper.make_node("Add", ["words", "mean"], ["hidden"]),
    ]
    tokens = ["batch", "length"]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, tokens)
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [*tokens, WIDTH])
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "text", inputs, [output], initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("lengths")
    for name, honours_mask, settings in (
        ("mixed", True, WINDOW),
        ("apart", True, WINDOW.replace(" }", ", mix_lengths = false }")),
        ("careless", False, WINDOW),
    ):
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "1" / "model.onnx").write_bytes(text_model(honours_mask))
        (folder / "models" / name / "atoll.toml").write_text(settings)
    running = serve(folder / "models", folder / "server.log")
    yield running
    running.assert_alive()
    running.stop()


def executions(server: Server, model: str) -> int:
    client = http_api.InferenceServerClient(server.http)
    (stats,) = client.get_inference_statistics(model)["model_stats"]
    client.close()
    return stats["execution_count"]


def send_all(server: Server, model: str) -> int:
    """Sends sentences of 1 to 16 words at once, compares the answers, and counts the executions."""
    reference = onnxruntime.InferenceSession(text_model(honours_mask=model != "careless"))
    random = np.random.default_rng(2)
    client = grpc_api.InferenceServerClient(server.grpc)

    def one(words: int) -> None:
        ids = random.integers(0, WORDS, (1, words), dtype=np.int64)
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        inputs = []
        for name, value in values.items():
            given = grpc_api.InferInput(name, list(value.shape), "INT64")
            given.set_data_from_numpy(value)
            inputs.append(given)
        answer = client.infer(model, inputs).as_numpy("hidden")
        (expected,) = reference.run(None, values)
        assert answer.shape == expected.shape
        assert np.linalg.norm(answer - expected) <= 1e-3 * np.linalg.norm(expected)

    before = executions(server, model)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(1, 17)))
    client.close()
    return executions(server, model) - before


def found(server: Server, model: str) -> str:
    """What the log says about the lengths of a model."""
    lines = [line for line in server.log_text().splitlines() if "share batches" in line]
    return next((line for line in lines if f'model="{model}"' in line), "")


def test_sentences_of_different_lengths_share_a_batch(lengths: Server) -> None:
    assert wait_for(lambda: bool(found(lengths, "mixed"))), lengths.log_tail()
    if "do not share" in found(lengths, "mixed"):
        # Whether batches pay is measured, and this machine may be too busy to see it.
        assert "of a request alone" in found(lengths, "mixed"), found(lengths, "mixed")
        pytest.skip(found(lengths, "mixed"))
    assert send_all(lengths, "mixed") <= 8


def test_a_model_that_ignores_its_mask_and_one_that_is_told_to_run_lengths_apart(
    lengths: Server,
) -> None:
    assert wait_for(lambda: "behind the mask" in found(lengths, "careless")), lengths.log_tail()
    assert send_all(lengths, "careless") == 16
    assert send_all(lengths, "apart") == 16
    assert not found(lengths, "apart")
