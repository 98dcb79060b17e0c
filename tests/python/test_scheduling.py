"""Time-outs, cancelled requests and priorities, with a model that takes about a second."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpc_api
from tritonclient.utils import InferenceServerException

from support import Server, fp32_body, infer_url, serve


def run_slow(server: Server, **extra: object) -> requests.Response:
    return requests.post(infer_url(server, "slow"), json=fp32_body(1.0, **extra), timeout=120)


def timed(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def wait_for(what: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def alone(server: Server) -> float:
    """Seconds that one slow request takes when nothing else runs."""
    assert run_slow(server).status_code == 200
    return min(timed(lambda: run_slow(server)) for _ in range(2))


def test_timeout_ends_a_running_request(server: Server, alone: float) -> None:
    started = time.monotonic()
    answer = run_slow(server, parameters={"timeout": 20_000})
    took = time.monotonic() - started
    assert answer.status_code in (503, 504), answer.text
    assert answer.json()["error"]
    assert took < 0.7 * alone, f"{took:.2f} s of {alone:.2f} s"


def test_timeout_ends_a_running_request_grpc(
    server: Server, grpc: grpc_api.InferenceServerClient, alone: float
) -> None:
    given = grpc_api.InferInput("INPUT0", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    started = time.monotonic()
    with pytest.raises(InferenceServerException) as raised:
        grpc.infer("slow", [given], timeout=20_000)
    took = time.monotonic() - started
    assert str(raised.value.status()).removeprefix("StatusCode.") in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
    assert took < 0.7 * alone, f"{took:.2f} s of {alone:.2f} s"


def canceled(server: Server) -> float:
    return server.metric("nv_inference_request_failure", model="slow", reason="CANCELED")


def test_a_client_that_hangs_up_is_forgotten(server: Server, alone: float) -> None:
    before = canceled(server)
    body = json.dumps(fp32_body(1.0)).encode()
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    links = [socket.create_connection(("127.0.0.1", server.http_port)) for _ in range(4)]
    for link in links:
        link.sendall(head + body)
    time.sleep(0.1)
    for link in links:
        link.close()
    assert wait_for(lambda: canceled(server) >= before + 4, max(2.0, alone)), "not counted as CANCELED"
    # Four abandoned requests would cost four times as much.
    assert timed(lambda: run_slow(server)) < 2.5 * alone + 0.2


def test_grpc_cancel(server: Server, grpc: grpc_api.InferenceServerClient, alone: float) -> None:
    before = canceled(server)
    given = grpc_api.InferInput("INPUT0", [1, 1], "FP32")
    given.set_data_from_numpy(np.ones((1, 1), np.float32))
    outcome: list[object] = []
    call = grpc.async_infer("slow", [given], lambda result, error: outcome.append(error or result))
    time.sleep(0.1)
    call.cancel()
    assert wait_for(lambda: bool(outcome), 5)
    assert isinstance(outcome[0], InferenceServerException)
    assert wait_for(lambda: canceled(server) >= before + 1, max(2.0, alone)), "not counted as CANCELED"


def test_priority_one_goes_first(server: Server, alone: float) -> None:
    """With three slow requests in the house, an urgent small one does not wait for any of them."""
    threads = [threading.Thread(target=run_slow, args=(server,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.1)
        times = []
        for _ in range(5):
            body = fp32_body(1.0, parameters={"priority": 1})
            started = time.monotonic()
            answer = requests.post(infer_url(server, "identity_fp32"), json=body, timeout=60)
            times.append(time.monotonic() - started)
            assert answer.status_code == 200
    finally:
        for thread in threads:
            thread.join()
    assert sorted(times)[2] < 0.5 * alone, f"{times} against {alone:.2f} s"


def test_urgent_slow_request_overtakes(server: Server, alone: float) -> None:
    """An urgent request of the slow model itself takes little more than it takes alone."""
    threads = [threading.Thread(target=run_slow, args=(server,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.1)
        took = timed(lambda: run_slow(server, parameters={"priority": 1}))
    finally:
        for thread in threads:
            thread.join()
    assert took < 2.5 * alone + 0.2, f"{took:.2f} s against {alone:.2f} s alone"


def test_real_time_leaves_for_a_higher_priority_where_that_is_set(models: Path, tmp_path: Path, alone: float) -> None:
    """A small urgent request does not wait for real time of a lower priority, which goes on from where it left."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("slow", "identity_fp32"):
        (folder / f"{name}.onnx").write_bytes((models / f"{name}.onnx").read_bytes())
    server = serve(folder, tmp_path / "server.log", "--preempt-real-time")
    try:
        lower = {"atoll_class": "rt", "priority": 5}
        urgent = fp32_body(1.0, parameters={"priority": 1})

        def ask() -> requests.Response:
            return requests.post(infer_url(server, "identity_fp32"), json=urgent, timeout=60)

        assert ask().status_code == 200
        undisturbed = run_slow(server, parameters=lower).json()["outputs"]
        answers: list[requests.Response] = []
        slow = threading.Thread(target=lambda: answers.append(run_slow(server, parameters=lower)))
        slow.start()
        time.sleep(0.2 * alone)
        took = timed(lambda: [ask().raise_for_status() for _ in range(3)])
        during = not answers
        slow.join()
        assert during, f"three urgent ones took {took:.2f} s, longer than the slow one"
        assert answers[0].json()["outputs"] == undisturbed
        assert server.metric("atoll_preemptions_total", model="slow") >= 1
    finally:
        server.stop()
