"""Requests of several clients run as one batch, and each gets its own reply."""

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

# Longer than concurrent clients need to send, so that the test does not depend on timing.
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


def infer_identity(client: grpc_api.InferenceServerClient, model: str, values: np.ndarray) -> None:
    given = grpc_api.InferInput("INPUT0", list(values.shape), "FP32")
    given.set_data_from_numpy(values)
    reply = client.infer(model, [given]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(reply, values)


def infer_concurrently(server: Server, model: str, rows: int = 1) -> None:
    """Many clients send at the same time, each its own numbers."""
    client = grpc_api.InferenceServerClient(server.grpc)

    def one(number: int) -> None:
        for round_number in range(ROUNDS):
            start = 1000 * number + 10 * round_number
            infer_identity(
                client, model, np.arange(start, start + rows, dtype=np.float32).reshape(rows, 1)
            )

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(CLIENTS)))
    client.close()


def executions_of(server: Server, model: str, send: Callable[[], object]) -> int:
    """Executions that all rounds of all clients took, where each request is one inference; asserts
    that every request is counted."""
    inferences, executions, _ = counts(server, model)
    send()
    after, total, sizes = counts(server, model)
    assert after - inferences == CLIENTS * ROUNDS
    assert sum(sizes.values()) == total
    assert sum(size * count for size, count in sizes.items()) == after
    return total - executions


def test_concurrent_requests_share_batches(batching: Server) -> None:
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
        # A client must be used in the thread that created it.
        client = http_api.InferenceServerClient(batching.http)
        for _ in range(ROUNDS):
            reply = client.infer("window", inputs)
            np.testing.assert_array_equal(reply.as_numpy("OUTPUT0"), left + right)
            np.testing.assert_array_equal(reply.as_numpy("OUTPUT1"), left - right)
        client.close()

    def all_at_once() -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(one, range(1, CLIENTS + 1)))

    # Delayed clients may miss the window, so there are several attempts.
    seen = (executions_of(batching, "window", all_at_once) for _ in range(10))
    assert any(executions < CLIENTS * ROUNDS / 2 for executions in seen), counts(batching, "window")
    _, _, sizes = counts(batching, "window")
    assert max(sizes) <= 16


def test_triton_batching_settings_are_used(batching: Server) -> None:
    seen = (
        executions_of(batching, "triton", lambda: infer_concurrently(batching, "triton"))
        for _ in range(10)
    )
    assert any(executions < CLIENTS * ROUNDS for executions in seen), counts(batching, "triton")
    _, _, sizes = counts(batching, "triton")
    assert max(sizes) <= 8, "no batch is larger than the largest preferred one"


def test_requests_of_several_rows_are_not_split(batching: Server) -> None:
    before, _, _ = counts(batching, "triton")
    infer_concurrently(batching, "triton", rows=3)
    after, _, sizes = counts(batching, "triton")
    assert after - before == 3 * CLIENTS * ROUNDS
    assert max(sizes) <= 8


def test_batching_can_be_disabled(batching: Server) -> None:
    infer_concurrently(batching, "single")
    inferences, executions, sizes = counts(batching, "single")
    assert inferences == executions == CLIENTS * ROUNDS and set(sizes) == {1}


def test_batching_works_without_settings(batching: Server) -> None:
    infer_concurrently(batching, "auto")
    inferences, executions, _ = counts(batching, "auto")
    assert inferences == CLIENTS * ROUNDS and 0 < executions <= inferences
    client = http_api.InferenceServerClient(batching.http)
    configs = {
        name: client.get_model_config(name)["parameters"] for name in ("auto", "single", "window")
    }
    client.close()
    policies = {
        name: parameters["atoll_batching"]["string_value"] for name, parameters in configs.items()
    }
    assert policies == {"auto": "auto", "single": "none", "window": "window"}
