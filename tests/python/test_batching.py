"""Requests of several clients run as one batch, and each gets its own answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_api
import tritonclient.http as http_api

from support import Server, serve

CLIENTS = 16
ROUNDS = 4

# A wait that is long beside what clients need to come together, so that the test does not go by time.
WINDOW = "class = 'rt'\nbatching = { policy = 'window', max_batch = 16, max_wait_us = 200000 }\n"
PBTXT = """
backend: "onnxruntime"
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 200000 }
"""


@pytest.fixture(scope="module")
def batching(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("batching")
    repository = folder / "models"
    for name, source, settings in (
        ("window", "add_sub", ("atoll.toml", WINDOW)),
        ("triton", "identity_fp32", ("config.pbtxt", PBTXT)),
        ("single", "identity_fp32", ("atoll.toml", "batching = { policy = 'none' }\n")),
        ("auto", "identity_fp32", ("atoll.toml", "")),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.onnx").write_bytes(
            (models / f"{source}.onnx").read_bytes()
        )
        (repository / name / settings[0]).write_text(settings[1])
    running = serve(repository, folder / "server.log")
    yield running
    running.assert_alive()
    running.stop()


def counts(server: Server, model: str) -> tuple[int, int, dict[int, int]]:
    """Inferences, executions, and executions by batch size."""
    client = http_api.InferenceServerClient(server.http)
    (stats,) = client.get_inference_statistics(model)["model_stats"]
    client.close()
    sizes = {entry["batch_size"]: entry["compute_infer"]["count"] for entry in stats["batch_stats"]}
    return stats["inference_count"], stats["execution_count"], sizes


def ask_identity(client: grpc_api.InferenceServerClient, model: str, values: np.ndarray) -> None:
    given = grpc_api.InferInput("INPUT0", list(values.shape), "FP32")
    given.set_data_from_numpy(values)
    answer = client.infer(model, [given]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(answer, values)


def together(server: Server, model: str, rows: int = 1) -> None:
    """Many clients ask at once, each for numbers of its own."""
    client = grpc_api.InferenceServerClient(server.grpc)

    def one(number: int) -> None:
        for turn in range(ROUNDS):
            start = 1000 * number + 10 * turn
            ask_identity(
                client, model, np.arange(start, start + rows, dtype=np.float32).reshape(rows, 1)
            )

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(CLIENTS)))
    client.close()


def runs(server: Server, model: str, ask: Callable[[], object]) -> int:
    """Executions for all rounds of all clients, where each request is one inference; every one of them is counted."""
    inferences, executions, _ = counts(server, model)
    ask()
    after, runs, sizes = counts(server, model)
    assert after - inferences == CLIENTS * ROUNDS
    assert sum(sizes.values()) == runs
    assert sum(size * count for size, count in sizes.items()) == after
    return runs - executions


def test_concurrent_requests_are_one_batch(batching: Server) -> None:
    client = http_api.InferenceServerClient(batching.http)
    shape = client.get_model_metadata("window")["inputs"][0]["shape"]
    client.close()
    width = [size for size in shape if size > 0][0]

    def one(number: int) -> None:
        left, right = (np.full((1, width), number * factor, np.int32) for factor in (1, 1000))
        inputs = []
        for name, values in (("INPUT0", left), ("INPUT1", right)):
            given = http_api.InferInput(name, [1, width], "INT32")
            given.set_data_from_numpy(values)
            inputs.append(given)
        # The client belongs to the thread it is made in.
        client = http_api.InferenceServerClient(batching.http)
        for _ in range(ROUNDS):
            answer = client.infer("window", inputs)
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), left + right)
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), left - right)
        client.close()

    def all_at_once() -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(one, range(1, CLIENTS + 1)))

    # Clients that were held up do not come together within the window: they get another chance.
    seen = (runs(batching, "window", all_at_once) for _ in range(10))
    assert any(executions < CLIENTS * ROUNDS / 2 for executions in seen), counts(batching, "window")
    _, _, sizes = counts(batching, "window")
    assert max(sizes) <= 16


def test_triton_settings_batch(batching: Server) -> None:
    seen = (runs(batching, "triton", lambda: together(batching, "triton")) for _ in range(10))
    assert any(executions < CLIENTS * ROUNDS for executions in seen), counts(batching, "triton")
    _, _, sizes = counts(batching, "triton")
    assert max(sizes) <= 8, "no batch is larger than the largest preferred one"


def test_requests_of_several_rows_stay_whole(batching: Server) -> None:
    before, _, _ = counts(batching, "triton")
    together(batching, "triton", rows=3)
    after, _, sizes = counts(batching, "triton")
    assert after - before == 3 * CLIENTS * ROUNDS
    assert max(sizes) <= 8


def test_batching_can_be_turned_off(batching: Server) -> None:
    together(batching, "single")
    inferences, executions, sizes = counts(batching, "single")
    assert inferences == executions == CLIENTS * ROUNDS and set(sizes) == {1}


def test_nothing_needs_to_be_set(batching: Server) -> None:
    together(batching, "auto")
    inferences, executions, _ = counts(batching, "auto")
    assert inferences == CLIENTS * ROUNDS and 0 < executions <= inferences
    client = http_api.InferenceServerClient(batching.http)
    configs = {
        name: client.get_model_config(name)["parameters"] for name in ("auto", "single", "window")
    }
    client.close()
    said = {
        name: parameters["atoll_batching"]["string_value"] for name, parameters in configs.items()
    }
    assert said == {"auto": "auto", "single": "none", "window": "window"}
