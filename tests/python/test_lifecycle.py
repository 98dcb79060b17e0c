"""Start, drain, size and memory use of the binary."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import warnings
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest
import requests
from grpc_health.v1 import health_pb2, health_pb2_grpc
from onnx import helper

from support import ASSETS, BINARY, Server, fp32_body, free_ports, infer_url, serve, wait_for

BINARY_LIMIT = 60_000_000


def test_the_binary_is_small() -> None:
    assert BINARY.stat().st_size <= BINARY_LIMIT


def test_time_to_ready_is_reported(tmp_path: Path) -> None:
    """Warns instead of failing: the machine may be busy."""
    (tmp_path / "models").mkdir()
    shutil.copy(ASSETS / "digits.onnx", tmp_path / "models")
    server = serve(tmp_path / "models", tmp_path / "log")
    server.stop()
    print(f"ready after {server.seconds_to_ready:.2f} s with the demo model")
    if server.seconds_to_ready >= 1:
        warnings.warn(f"ready only after {server.seconds_to_ready:.2f} s", stacklevel=1)


def test_grpc_says_ready_as_soon_as_rest_does(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    shutil.copy(ASSETS / "digits.onnx", tmp_path / "models")
    for number in range(3):
        server = serve(tmp_path / "models", tmp_path / f"{number}.log")
        try:
            with grpc.insecure_channel(server.grpc) as channel:
                request = health_pb2.HealthCheckRequest()
                reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING, number
        finally:
            server.stop()


def test_an_idle_server_exits_at_once(repository: Path, tmp_path: Path) -> None:
    """It does not use its exit timeout, which is longer than this test waits."""
    server = serve(repository, tmp_path / "log", "--exit-timeout-secs", "3600")
    try:
        server.terminate()
        assert server.wait() == 0
    finally:
        server.stop()


def test_sigterm_drains_the_server(repository: Path, tmp_path: Path) -> None:
    """After SIGTERM it is not ready, completes the running request, and exits with status 0."""
    # If the machine stalls while the request runs, nothing is observed; try longer requests.
    assert any(
        observe_drain(repository, tmp_path / f"{rows}.log", rows) for rows in (2, 4, 8, 16, 32)
    ), "the server was ready until it exited"


def observe_drain(repository: Path, log: Path, rows: int) -> bool:
    """Whether the server was observed not ready while a request ran; asserts that it completes."""
    server = serve(repository, log, "--exit-timeout-secs", "3600")
    replies: list[requests.Response] = []

    def send() -> None:
        replies.append(
            requests.post(infer_url(server, "slow"), json=fp32_body(*[1.0] * rows), timeout=600)
        )

    thread = threading.Thread(target=send)
    try:
        thread.start()
        pending = "nv_inference_pending_request_count"
        wait_for(lambda: server.metric(pending, model="slow") == 1 or not thread.is_alive())
        server.terminate()
        assert wait_for(lambda: not reports_ready(server)), "still ready after SIGTERM"
        during = thread.is_alive()
        thread.join()
        assert replies, f"the running request got no reply:\n{server.log_tail()}"
        assert replies[0].status_code == 200, replies[0].text
        assert server.wait() == 0
        assert "panicked" not in server.log_text()
        return during
    finally:
        server.stop()


def reports_ready(server: Server) -> bool:
    """Like `is_ready`, but a slow reply may still say ready."""
    try:
        return requests.get(f"{server.url}/v2/health/ready", timeout=60).status_code == 200
    except requests.ConnectionError:
        return False


def test_a_port_in_use_is_an_error(repository: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"exited with(?s:.*){port}") as raised:
            serve(repository, tmp_path / "log", ports=[port, *free_ports(2)])
    assert "panicked" not in str(raised.value)


def test_given_ports_are_bound_before_free_ones(repository: Path, tmp_path: Path) -> None:
    """With --cluster the backend binds free ports, so the given ones must be bound before."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1:{port}") as raised:
            serve(repository, tmp_path / "log", "--cluster", ports=[*free_ports(2), port])
    assert "backend: ready" not in str(raised.value), "the backend was there first"


def test_a_missing_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exited with"):
        serve(tmp_path / "nowhere", tmp_path / "log")


def test_one_broken_model_does_not_stop_the_others(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(models / "identity_fp32.onnx", folder)
    (folder / "broken.onnx").write_bytes(b"\x00\x01\x02")
    server = serve(folder, tmp_path / "log")
    try:
        reply = requests.post(infer_url(server, "identity_fp32"), json=fp32_body(1.0), timeout=60)
        assert reply.status_code == 200
        index = requests.post(f"{server.url}/v2/repository/index", json={}, timeout=60).json()
        (broken,) = [entry for entry in index if entry["name"] == "broken"]
        assert broken["state"] == "UNAVAILABLE"
        assert broken["reason"]
    finally:
        server.stop()


def test_requests_reuse_the_memory_of_earlier_ones(tmp_path: Path) -> None:
    """The pages of a request's tensors are not returned to the system and faulted in again."""
    width = 150_528
    inputs, outputs = (
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", width])] for name in "xy"
    )
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", inputs, outputs)
    (tmp_path / "models").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "models" / "relu.onnx")
    data = np.ones(width, np.float32).tobytes()
    tensor = {
        "name": "x",
        "shape": [1, width],
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps(
        {"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    ).encode()
    server = serve(tmp_path / "models", tmp_path / "log")
    try:
        assert server.process is not None
        faults = []
        for _ in range(5):
            before = page_faults(server.process.pid)
            for _ in range(100):
                headers = {"Inference-Header-Content-Length": str(len(head))}
                reply = requests.post(
                    infer_url(server, "relu"), data=head + data, headers=headers, timeout=60
                )
                assert reply.status_code == 200, reply.text
            faults.append((page_faults(server.process.pid) - before) / 100)
        # The body alone has 147 pages.
        assert min(faults) < 30, faults
    finally:
        server.stop()


def page_faults(pid: int) -> int:
    """Minor page faults of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[7])
