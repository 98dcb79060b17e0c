"""Start, drain and size of the binary."""

from __future__ import annotations

import shutil
import socket
import threading
import warnings
from pathlib import Path

import pytest
import requests

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
    assert "cluster_command: ready" not in str(raised.value), "the backend was there first"


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
