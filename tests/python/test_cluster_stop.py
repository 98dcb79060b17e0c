"""Roles of a cluster that stop: before they reached the store, and while clients keep streams."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from cluster import Process
from support import ASSETS, BINARY, STOP_SECONDS, free_ports, wait_for


def role(folder: Path, name: str, *flags: str) -> Process:
    (port,) = free_ports(1)
    store = f"etcd://127.0.0.1:{port}"
    command = [str(BINARY), "cluster", name, "--store", store, "--name", name, *flags]
    return Process(command, folder / f"{name}.log").start()


def code(url: str) -> int:
    try:
        return requests.get(url, timeout=2).status_code
    except requests.RequestException:
        return 0


@pytest.fixture(params=[signal.SIGTERM, signal.SIGINT], ids=["terminate", "interrupt"])
def roles(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple]:
    """All roles without a store, where each listens, and a signal."""
    (tmp_path / "models").mkdir()
    shutil.copy(ASSETS / "digits.onnx", tmp_path / "models")
    frontend_ports, backend_ports = free_ports(3), free_ports(3)

    def listen(ports: list[int]) -> list[str]:
        names = ("--http-port", "--grpc-port", "--metrics-port")
        return [word for pair in zip(names, map(str, ports), strict=True) for word in pair]

    repository = ["--model-repository", str(tmp_path / "models"), "--threads", "1"]
    processes = [
        role(tmp_path, "scheduler"),
        role(tmp_path, "frontend", *listen(frontend_ports)),
        role(tmp_path, "backend", *repository, *listen(backend_ports)),
    ]
    yield processes, (frontend_ports[0], backend_ports[0]), request.param
    for process in processes:
        process.kill()


def test_a_role_that_waits_for_the_store_is_alive_and_obeys_signals(roles: tuple) -> None:
    processes, ports, how = roles
    for port in ports:
        url = f"http://127.0.0.1:{port}/v2"
        assert wait_for(lambda url=url: code(f"{url}/health/live") == 200)
        assert code(f"{url}/health/ready") == 503
    # A frontend does not know yet that there is no such model.
    assert code(f"http://127.0.0.1:{ports[0]}/v2/models/digits") == 503
    assert wait_for(lambda: all("store" in process.text() for process in processes[1:]))
    for process in processes:
        process.process.send_signal(how)
    for process in processes:
        try:
            assert process.process.wait(timeout=STOP_SECONDS) == 0, process.text()
        except subprocess.TimeoutExpired:
            pytest.fail(f"ignored {how.name}: {process.text()}")
