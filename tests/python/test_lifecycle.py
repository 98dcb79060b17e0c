"""Start, drain, size and memory of the binary."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import requests
from onnx import helper

from support import ASSETS, BINARY, Server, fp32_body, free_ports, infer_url, serve, wait_for

BINARY_LIMIT = 60_000_000


def test_binary_size() -> None:
    assert BINARY.stat().st_size <= BINARY_LIMIT


def test_time_to_ready(tmp_path: Path) -> None:
    """A report, not a bar: the machine may be busy."""
    (tmp_path / "models").mkdir()
    shutil.copy(ASSETS / "digits.onnx", tmp_path / "models")
    server = serve(tmp_path / "models", tmp_path / "log")
    server.stop()
    print(f"ready after {server.seconds_to_ready:.2f} s with the demo model")
    if server.seconds_to_ready >= 1:
        warnings.warn(f"ready only after {server.seconds_to_ready:.2f} s", stacklevel=1)


def test_idle_server_leaves_at_once(repository: Path, tmp_path: Path) -> None:
    """It has far longer for requests that run than anybody waits for it here, and takes none of that."""
    server = serve(repository, tmp_path / "log", "--exit-timeout-secs", "3600")
    try:
        server.terminate()
        assert server.wait() == 0
    finally:
        server.stop()


def test_drain(repository: Path, tmp_path: Path) -> None:
    """After SIGTERM: not ready at once, the running request is answered, then exit status 0."""
    # Where a machine stood still for as long as the request ran, nothing was seen: then with one that runs longer.
    assert any(drains(repository, tmp_path / f"{rows}.log", rows) for rows in (2, 4, 8, 16, 32)), "ready to the end"


def drains(repository: Path, log: Path, rows: int) -> bool:
    """Whether the server was seen not to be ready while a request ran, which is answered in any case."""
    server = serve(repository, log, "--exit-timeout-secs", "3600")
    answers: list[requests.Response] = []

    def ask() -> None:
        answers.append(requests.post(infer_url(server, "slow"), json=fp32_body(*[1.0] * rows), timeout=600))

    thread = threading.Thread(target=ask)
    try:
        thread.start()
        pending = lambda: server.metric("nv_inference_pending_request_count", model="slow")  # noqa: E731
        wait_for(lambda: pending() == 1 or not thread.is_alive())
        server.terminate()
        assert wait_for(lambda: not says_ready(server)), "still ready after SIGTERM"
        during = thread.is_alive()
        thread.join()
        assert answers, f"the running request got no answer:\n{server.log_tail()}"
        assert answers[0].status_code == 200, answers[0].text
        assert server.wait() == 0
        assert "panicked" not in server.log_text()
        return during
    finally:
        server.stop()


def says_ready(server: Server) -> bool:
    """As `is_ready`, but whoever takes long to answer may still be ready."""
    try:
        return requests.get(f"{server.url}/v2/health/ready", timeout=60).status_code == 200
    except requests.ConnectionError:
        return False


def test_port_in_use_is_an_error(repository: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"left with(?s:.*){port}") as raised:
            serve(repository, tmp_path / "log", ports=[port, *free_ports(2)])
    assert "panicked" not in str(raised.value)


def test_all_roles_take_their_own_ports_before_anything_else(repository: Path, tmp_path: Path) -> None:
    """The backend inside takes any free port, so those that were asked for must be taken by then."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1:{port}") as raised:
            serve(repository, tmp_path / "log", "--cluster", ports=[*free_ports(2), port])
    assert "backend: ready" not in str(raised.value), "the backend was there first"


def test_missing_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="left with"):
        serve(tmp_path / "nowhere", tmp_path / "log")


def test_one_broken_model_does_not_stop_the_others(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(models / "identity_fp32.onnx", folder)
    (folder / "broken.onnx").write_bytes(b"\x00\x01\x02")
    server = serve(folder, tmp_path / "log")
    try:
        answer = requests.post(infer_url(server, "identity_fp32"), json=fp32_body(1.0), timeout=60)
        assert answer.status_code == 200
        index = requests.post(f"{server.url}/v2/repository/index", json={}, timeout=60).json()
        (broken,) = [entry for entry in index if entry["name"] == "broken"]
        assert broken["state"] == "UNAVAILABLE"
        assert broken["reason"]
    finally:
        server.stop()


def test_requests_find_their_memory_where_the_last_ones_left_it(tmp_path: Path) -> None:
    """Pages that a request's tensors are on are not given back and fetched again for the next."""
    width = 150_528
    inputs, outputs = ([helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", width])] for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", inputs, outputs)
    (tmp_path / "models").mkdir()
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "models" / "relu.onnx")
    data = np.ones(width, np.float32).tobytes()
    tensor = {"name": "x", "shape": [1, width], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    server = serve(tmp_path / "models", tmp_path / "log")
    try:
        assert server.process is not None
        faults = []
        for _ in range(5):
            before = page_faults(server.process.pid)
            for _ in range(100):
                headers = {"Inference-Header-Content-Length": str(len(head))}
                answer = requests.post(infer_url(server, "relu"), data=head + data, headers=headers, timeout=60)
                assert answer.status_code == 200, answer.text
            faults.append((page_faults(server.process.pid) - before) / 100)
        # The body alone is on 147 pages.
        assert min(faults) < 30, faults
    finally:
        server.stop()


def page_faults(pid: int) -> int:
    """Pages that the process found not to be there, but in memory."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[7])
