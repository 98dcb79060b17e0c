"""Prefix batching: models with equal first layers run these as one batch; outputs do not change."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import requests
import tritonclient.http as http_api
from onnx import TensorProto, helper, numpy_helper

from support import LOST, Server, serve, wait_for

# A long window, so that the requests of all clients arrive within it on any machine.
WINDOW = (
    "timeout_ms = 60000\nbatching = { policy = 'window', max_batch = 8, max_wait_us = 300000 }\n"
)
ALONE = "batching = { policy = 'none' }\n"
CHANNELS, SIDE = 16, 12


def network(batch: str, names: str, prefix: int, head: int, classes: int) -> onnx.ModelProto:
    """Two convolutions with weights from the seed `prefix`, then a head from `head`.

    Value names start with `names`.
    """
    inside, own = np.random.default_rng(prefix), np.random.default_rng(head)
    weights = {
        "w0": inside.standard_normal((CHANNELS, 3, 3, 3), dtype=np.float32) * 0.2,
        "w1": inside.standard_normal((CHANNELS, CHANNELS, 3, 3), dtype=np.float32) * 0.1,
        "fc": own.standard_normal((CHANNELS, classes), dtype=np.float32),
        "bias": own.standard_normal(classes, dtype=np.float32),
    }
    name = lambda text: f"{names}_{text}"  # noqa: E731
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", name("w0")], [name("c0")], **pads),
        helper.make_node("Relu", [name("c0")], [name("r0")]),
        helper.make_node("Conv", [name("r0"), name("w1")], [name("c1")], **pads),
        helper.make_node("Relu", [name("c1")], [name("r1")]),
        helper.make_node("GlobalAveragePool", [name("r1")], [name("pool")]),
        helper.make_node("Flatten", [name("pool")], [name("flat")]),
        helper.make_node("Gemm", [name("flat"), name("fc"), name("bias")], [name("scores")]),
        helper.make_node("Softmax", [name("scores")], ["y"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        names,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, classes])],
        [numpy_helper.from_array(value, name(key)) for key, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


MODELS = {
    "cats": network("n", "a", prefix=1, head=2, classes=5),
    "dogs": network("batch", "b", prefix=1, head=3, classes=9),
    "birds": network("N", "c", prefix=1, head=4, classes=3),
    "cars": network("n", "d", prefix=9, head=2, classes=5),
}


def keep(repository: Path, name: str, model: onnx.ModelProto, settings: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    onnx.save(model, repository / name / "1" / "model.onnx")
    (repository / name / "atoll.toml").write_text(settings)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefix") / "models"
    for name, model in MODELS.items():
        keep(folder, name, model, WINDOW)
        keep(folder, f"{name}_alone", model, ALONE)
    return folder


@pytest.fixture(scope="module")
def node(repository: Path) -> Iterator[Server]:
    running = serve(repository, repository.parent / "node.log")
    yield running
    running.assert_alive()
    running.stop()


def picture(seed: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 3, SIDE, SIDE), dtype=np.float32)


def ask(server: Server, model: str, x: np.ndarray) -> np.ndarray:
    client = http_api.InferenceServerClient(server.http)
    given = http_api.InferInput("x", list(x.shape), "FP32")
    given.set_data_from_numpy(x)
    answer = client.infer(model, [given]).as_numpy("y")
    client.close()
    return answer


def ask_patiently(server: Server, model: str, x: np.ndarray) -> np.ndarray:
    """Like `ask`, for a cluster whose only backend may be unreachable for a moment."""
    answers: list[np.ndarray] = []

    def found() -> bool:
        try:
            answers.append(ask(server, model, x))
        except http_api.InferenceServerException as error:
            assert LOST in error.message(), error
        return bool(answers)

    assert wait_for(found), "still lost"
    return answers[0]


def prefix_of(server: Server, model: str) -> str:
    config = requests.get(f"{server.url}/v2/models/{model}/config", timeout=60).json()
    return config["parameters"]["atoll_prefix"]["string_value"]


def test_finds_common_prefixes_regardless_of_names(node: Server) -> None:
    prefixes = {name: prefix_of(node, name) for name in MODELS}
    assert prefixes["cats"] and prefixes["cats"] == prefixes["dogs"] == prefixes["birds"], prefixes
    assert prefixes["cars"] == "", "other weights are another prefix"
    assert prefix_of(node, "cats_alone") == "", "models without batching share no prefix"


@pytest.mark.parametrize("rows", [1, 3])
def test_answers_are_those_of_the_separate_models(node: Server, rows: int) -> None:
    for seed, name in enumerate(MODELS):
        x = picture(seed, rows)
        np.testing.assert_array_equal(ask(node, name, x), ask(node, f"{name}_alone", x))


def test_one_batch_serves_several_models(node: Server) -> None:
    """Eight requests of three models fill one batch of the prefix.

    Without prefix batching the window makes one batch per model.
    """
    names = ["cats", "dogs", "birds", "dogs", "cats", "cats", "birds", "dogs"]
    pictures = [picture(100 + index) for index in range(len(names))]
    alone = [ask(node, f"{name}_alone", x) for name, x in zip(names, pictures, strict=True)]
    prefix = prefix_of(node, "cats")

    def runs() -> float:
        """Executions of the prefix for all requests, whose outputs are checked."""
        before = node.metric("atoll_prefix_executions_total", prefix=prefix)
        asked = node.metric("atoll_prefix_requests_total", prefix=prefix)
        with ThreadPoolExecutor(len(names)) as pool:
            answers = list(
                pool.map(lambda pair: ask(node, *pair), zip(names, pictures, strict=True))
            )
        for answer, expected in zip(answers, alone, strict=True):
            np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)
        assert node.metric("atoll_prefix_requests_total", prefix=prefix) - asked == len(names)
        return node.metric("atoll_prefix_executions_total", prefix=prefix) - before

    # Delayed clients may miss the window, so try again.
    assert any(runs() <= 2 for _ in range(10))


def test_requests_are_counted_once_and_bad_ones_named(node: Server) -> None:
    count = lambda: node.metric("nv_inference_request_success", model="dogs")  # noqa: E731
    before = count()
    ask(node, "dogs", picture(5))
    assert count() == before + 1
    assert node.metric("nv_inference_pending_request_count", model="dogs") == 0
    with pytest.raises(http_api.InferenceServerException, match="must be 3"):
        ask(node, "dogs", np.zeros((1, 4, SIDE, SIDE), np.float32))


def test_models_can_be_unloaded_and_loaded_again(repository: Path, tmp_path: Path) -> None:
    """Unloading a model does not affect the others; loaded again, it shares the prefix again."""
    server = serve(repository, tmp_path / "server.log", "--model-control-mode", "explicit")
    try:
        client = http_api.InferenceServerClient(server.http)
        client.load_model("cats_alone")
        client.load_model("cats")
        assert prefix_of(server, "cats") == "", "no other model has the prefix"
        client.load_model("dogs")
        assert prefix_of(server, "cats") == prefix_of(server, "dogs") != ""
        client.unload_model("dogs")
        x = picture(8)
        np.testing.assert_array_equal(ask(server, "cats", x), ask(server, "cats_alone", x))
        client.load_model("dogs")
        assert prefix_of(server, "cats") == prefix_of(server, "dogs") != ""
        client.unload_model("dogs")
        client.unload_model("cats")
        assert (
            "atoll_prefix_executions_total{" not in server.metrics()
        ), "a prefix is removed with its last model"
        client.close()
        server.assert_alive()
    finally:
        server.stop()


def test_through_a_cluster(repository: Path, tmp_path: Path) -> None:
    """The same through a frontend and a backend that follows a plan."""
    server = serve(repository, tmp_path / "cluster.log", "--cluster")
    try:
        assert prefix_of(server, "cats") == prefix_of(server, "dogs") != ""
        jobs = [(name, picture(200 + index)) for index, name in enumerate(list(MODELS) * 4)]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda job: ask_patiently(server, *job), jobs))
        for (name, x), answer in zip(jobs, answers, strict=True):
            np.testing.assert_allclose(
                answer, ask_patiently(server, f"{name}_alone", x), rtol=1e-5, atol=1e-6
            )
        server.assert_alive()
    finally:
        server.stop()
