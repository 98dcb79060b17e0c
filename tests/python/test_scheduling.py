"""Timeouts, cancelled requests and priorities. The tests check the sequence of events beside work
of minutes, so that no machine is too slow for them."""

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

# So many rows take one thread minutes on any machine, longer than the tests wait; one row is quick.
ROWS = 1000
# By default a request of so many rows does not join batches; with a large max_batch it does.
SETTINGS = {"chain": "", "batched": "batching = { max_batch = 1024 }\n"}
with_and_without_batching = pytest.mark.parametrize("model", list(SETTINGS))


@pytest.fixture(scope="module")
def repository(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scheduling") / "models"
    # Many small matrix products: long work in little memory.
    chain = tiny.chain(side=192, steps=1500).model
    for name, settings in SETTINGS.items():
        (folder / name / "1").mkdir(parents=True)
        onnx.save(chain, folder / name / "1" / "model.onnx")
        (folder / name / "atoll.toml").write_text(settings)
    (folder / "identity_fp32.onnx").write_bytes((models / "identity_fp32.onnx").read_bytes())
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    """A server with one thread: with many, work of minutes would take seconds."""
    running = serve(repository, repository.parent / "server.log", "--threads", "1")
    yield running
    running.assert_alive()
    running.stop()


def send(server: Server, model: str, rows: int = 1, **extra: object) -> requests.Response:
    """Sends a request whose reply must come before work of `ROWS` rows could complete."""
    return requests.post(
        infer_url(server, model), json=fp32_body(*[1.0] * rows, **extra), timeout=PATIENCE_SECONDS
    )


def pending(server: Server, model: str) -> float:
    return server.metric("nv_inference_pending_request_count", model=model)


def canceled(server: Server, model: str) -> float:
    return server.metric("nv_inference_request_failure", model=model, reason="CANCELED")


@contextmanager
def long_requests(server: Server, model: str, count: int) -> Iterator[None]:
    """Requests that take minutes; on exit their clients disconnect, which cancels them."""
    body = json.dumps(fp32_body(*[1.0] * ROWS)).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with ExitStack() as links:
        for _ in range(count):
            link = links.enter_context(
                socket.create_connection(("127.0.0.1", server.http_port), PATIENCE_SECONDS)
            )
            link.sendall(head.encode() + body)
        assert wait_for(lambda: pending(server, model) == count), "not all requests arrived"
        yield
    assert wait_for(lambda: pending(server, model) == 0), "cancelled requests are still pending"


def assert_free(server: Server, model: str) -> None:
    """Asserts that cancelled work ended: otherwise the next request would wait minutes for it."""
    assert wait_for(lambda: pending(server, model) == 0), "still pending"
    assert send(server, model).status_code == 200


@with_and_without_batching
def test_a_timeout_ends_a_running_request(server: Server, model: str) -> None:
    reply = send(server, model, ROWS, parameters={"timeout": 200_000})
    assert reply.status_code in (503, 504), reply.text
    assert reply.json()["error"]
    assert_free(server, model)


def long_input() -> grpc_api.InferInput:
    given = grpc_api.InferInput("INPUT0", [ROWS, 1], "FP32")
    given.set_data_from_numpy(np.ones((ROWS, 1), np.float32))
    return given


def test_a_timeout_ends_a_running_request_over_grpc(
    server: Server, grpc: grpc_api.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException) as raised:
        grpc.infer("chain", [long_input()], timeout=200_000, client_timeout=PATIENCE_SECONDS)
    assert str(raised.value.status()).removeprefix("StatusCode.") in (
        "UNAVAILABLE",
        "DEADLINE_EXCEEDED",
    )
    assert "'chain'" in raised.value.message(), "the client timed out, not the server"
    assert wait_for(lambda: pending(server, "chain") == 0), "still pending"


@with_and_without_batching
def test_a_disconnect_cancels_the_request(server: Server, model: str) -> None:
    before = canceled(server, model)
    with long_requests(server, model, 4):
        pass
    assert wait_for(lambda: canceled(server, model) == before + 4), "not counted as CANCELED"
    assert_free(server, model)


def test_a_grpc_cancellation_cancels_the_request(
    server: Server, grpc: grpc_api.InferenceServerClient
) -> None:
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


def test_priority_one_runs_first(server: Server) -> None:
    """An urgent small request waits for none of three slow ones."""
    with long_requests(server, "chain", 3):
        for _ in range(5):
            assert send(server, "identity_fp32", parameters={"priority": 1}).status_code == 200
        assert pending(server, "chain") == 3, "a slow request completed first"


@with_and_without_batching
def test_an_urgent_request_overtakes_its_own_model(server: Server, model: str) -> None:
    """An urgent request of the slow model completes before all earlier ones."""
    with long_requests(server, model, 4):
        assert send(server, model, parameters={"priority": 1}).status_code == 200
        assert pending(server, model) == 4, "an earlier request completed first"


def test_preempt_real_time_preempts_lower_priorities(repository: Path, tmp_path: Path) -> None:
    """A small urgent request preempts real time of a lower priority, which then resumes."""
    server = serve(repository, tmp_path / "server.log", "--preempt-real-time", "--threads", "1")
    try:
        # The first urgent request makes the priority known to the server.
        assert send(server, "identity_fp32", parameters={"priority": 1}).status_code == 200
        undisturbed = send(server, "chain", 3, parameters=LOWER).json()["outputs"]
        # The slow request must complete, so it is short. Try again if the machine stalls.
        assert any(is_preempted_and_resumes(server, undisturbed) for _ in range(10)), (
            server.metrics()
        )
    finally:
        server.stop()


LOWER = {"atoll_class": "rt", "priority": 5}


def is_preempted_and_resumes(server: Server, undisturbed: list[dict]) -> bool:
    """Whether three urgent requests completed during a slow one that was preempted for them;
    asserts that its outputs are right in any case."""
    replies: list[requests.Response] = []
    before = server.metric("atoll_preemptions_total", model="chain")
    slow = threading.Thread(
        target=lambda: replies.append(send(server, "chain", 3, parameters=LOWER))
    )
    slow.start()
    wait_for(lambda: pending(server, "chain") == 1 or bool(replies))
    urgent = [
        send(server, "identity_fp32", parameters={"priority": 1}).status_code for _ in range(3)
    ]
    during = not replies
    slow.join()
    assert urgent == [200] * 3
    assert replies[0].json()["outputs"] == undisturbed
    return during and server.metric("atoll_preemptions_total", model="chain") > before
