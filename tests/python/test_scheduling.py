"""Time-outs, cancelled requests and priorities, by what comes before what: beside work of minutes none is too slow."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
import requests
import tritonclient.grpc as grpc_api
from tritonclient.utils import InferenceServerException

from support import PATIENCE_SECONDS, SCRIPTS, Server, fp32_body, infer_url, serve, wait_for

sys.path.append(str(SCRIPTS))

from modelzoo import tiny  # noqa: E402

# Rows of a request that takes one thread minutes on any machine, longer than anybody here waits. One takes a moment.
ROWS = 1000
# The chain as it is, for which so many rows run on their own; and one for which they go the way of batches.
SETTINGS = {"chain": "", "batched": "batching = { max_batch = 1024 }\n"}
both_ways = pytest.mark.parametrize("model", list(SETTINGS))


@pytest.fixture(scope="module")
def repository(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scheduling") / "models"
    # Many small products: long work in little memory.
    chain = tiny.chain(side=192, steps=1500).model
    for name, settings in SETTINGS.items():
        (folder / name / "1").mkdir(parents=True)
        onnx.save(chain, folder / name / "1" / "model.onnx")
        (folder / name / "atoll.toml").write_text(settings)
    (folder / "identity_fp32.onnx").write_bytes((models / "identity_fp32.onnx").read_bytes())
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    """A server of this file's own, with one thread: with many, work of minutes is one of seconds."""
    running = serve(repository, repository.parent / "server.log", "--threads", "1")
    yield running
    running.assert_alive()
    running.stop()


def ask(server: Server, model: str, rows: int = 1, **extra: object) -> requests.Response:
    """An answer that has to come before work of `ROWS` could be done."""
    return requests.post(
        infer_url(server, model), json=fp32_body(*[1.0] * rows, **extra), timeout=PATIENCE_SECONDS
    )


def pending(server: Server, model: str) -> float:
    return server.metric("nv_inference_pending_request_count", model=model)


def canceled(server: Server, model: str) -> float:
    return server.metric("nv_inference_request_failure", model=model, reason="CANCELED")


@contextmanager
def long_requests(server: Server, model: str, count: int) -> Iterator[None]:
    """Requests that take minutes. Who asked for them hangs up in the end, which is the end of them."""
    body = json.dumps(fp32_body(*[1.0] * ROWS)).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with ExitStack() as links:
        for _ in range(count):
            link = links.enter_context(
                socket.create_connection(("127.0.0.1", server.http_port), PATIENCE_SECONDS)
            )
            link.sendall(head + body)
        assert wait_for(lambda: pending(server, model) == count), "not all of them came in"
        yield
    assert wait_for(lambda: pending(server, model) == 0), "who hung up is still being served"


def assert_free(server: Server, model: str) -> None:
    """What was given up does not run on: the next request of its model would wait for it for minutes."""
    assert wait_for(lambda: pending(server, model) == 0), "still counted"
    assert ask(server, model).status_code == 200


@both_ways
def test_timeout_ends_a_running_request(server: Server, model: str) -> None:
    answer = ask(server, model, ROWS, parameters={"timeout": 200_000})
    assert answer.status_code in (503, 504), answer.text
    assert answer.json()["error"]
    assert_free(server, model)


def long_input() -> grpc_api.InferInput:
    given = grpc_api.InferInput("INPUT0", [ROWS, 1], "FP32")
    given.set_data_from_numpy(np.ones((ROWS, 1), np.float32))
    return given


def test_timeout_ends_a_running_request_grpc(
    server: Server, grpc: grpc_api.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException) as raised:
        grpc.infer("chain", [long_input()], timeout=200_000, client_timeout=PATIENCE_SECONDS)
    assert str(raised.value.status()).removeprefix("StatusCode.") in (
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
    )
    assert "'chain'" in raised.value.message(), "the client gave up, not the server"
    assert wait_for(lambda: pending(server, "chain") == 0), "still counted"


@both_ways
def test_a_client_that_hangs_up_is_forgotten(server: Server, model: str) -> None:
    before = canceled(server, model)
    with long_requests(server, model, 4):
        pass
    assert wait_for(lambda: canceled(server, model) == before + 4), "not counted as CANCELED"
    assert_free(server, model)


def test_grpc_cancel(server: Server, grpc: grpc_api.InferenceServerClient) -> None:
    before = canceled(server, "chain")
    outcome: list[object] = []
    call = grpc.async_infer(
        "chain", [long_input()], lambda result, error: outcome.append(error or result)
    )
    assert wait_for(lambda: pending(server, "chain") == 1)
    call.cancel()
    assert wait_for(lambda: bool(outcome))
    assert isinstance(outcome[0], InferenceServerException)
    assert wait_for(lambda: canceled(server, "chain") == before + 1), "not counted as CANCELED"


def test_priority_one_goes_first(server: Server) -> None:
    """With three slow requests in the house, an urgent small one does not wait for any of them."""
    with long_requests(server, "chain", 3):
        for _ in range(5):
            assert ask(server, "identity_fp32", parameters={"priority": 1}).status_code == 200
        assert pending(server, "chain") == 3, "a slow one was answered first"


@both_ways
def test_urgent_slow_request_overtakes(server: Server, model: str) -> None:
    """An urgent request of the slow model itself is answered before all that came earlier."""
    with long_requests(server, model, 4):
        assert ask(server, model, parameters={"priority": 1}).status_code == 200
        assert pending(server, model) == 4, "one that came earlier was answered first"


def test_real_time_leaves_for_a_higher_priority_where_that_is_set(
    repository: Path, tmp_path: Path
) -> None:
    """A small urgent request does not wait for real time of a lower priority, which goes on from where it left."""
    server = serve(repository, tmp_path / "server.log", "--preempt-real-time", "--threads", "1")
    try:
        # The first urgent one tells the server that there is such a priority.
        assert ask(server, "identity_fp32", parameters={"priority": 1}).status_code == 200
        undisturbed = ask(server, "chain", 3, parameters=LOWER).json()["outputs"]
        # The slow one is seen to its end, so it is short: a machine that stood still meanwhile gets another chance.
        assert any(left_and_went_on(server, undisturbed) for _ in range(10)), server.metrics()
    finally:
        server.stop()


LOWER = {"atoll_class": "rt", "priority": 5}


def left_and_went_on(server: Server, undisturbed: list[dict]) -> bool:
    """Whether three urgent requests were answered during a slow one that left for them; its answer is right anyway."""
    answers: list[requests.Response] = []
    before = server.metric("atoll_preemptions_total", model="chain")
    slow = threading.Thread(
        target=lambda: answers.append(ask(server, "chain", 3, parameters=LOWER))
    )
    slow.start()
    wait_for(lambda: pending(server, "chain") == 1 or bool(answers))
    urgent = [
        ask(server, "identity_fp32", parameters={"priority": 1}).status_code for _ in range(3)
    ]
    during = not answers
    slow.join()
    assert urgent == [200] * 3
    assert answers[0].json()["outputs"] == undisturbed
    return during and server.metric("atoll_preemptions_total", model="chain") > before
