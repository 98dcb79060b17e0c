"""Backends that renew their leases and do not serve, under load."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import WAIT_SECONDS, Cluster, Load
from support import ASSETS, BINARY, Server, wait_for

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")

MODELS = [f"m{number}" for number in range(3)]
BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}
# Errors of one gray backend on an idle machine.
ERRORS_MAX = 5


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three backends with models of real time, and two frontends."""
    models = tmp_path / "models"
    for name in MODELS:
        (models / name / "1").mkdir(parents=True)
        shutil.copy(ASSETS / "digits.onnx", models / name / "1" / "model.onnx")
        (models / name / "atoll.toml").write_text('class = "rt"\ntimeout_ms = 500\n')
    running = Cluster(tmp_path, models)
    try:
        running.scheduler("s1")
        for name in ("b1", "b2", "b3"):
            running.backend(name)
        for name in ("f1", "f2"):
            running.frontend(name)
        running.wait_ready()
        running.wait_status(is_routed)
        yield running
    finally:
        running.stop()


def is_routed(status: dict) -> bool:
    routed = all(len(model["backends"]) >= 2 for model in status["models"])
    return routed and len(status["models"]) == len(MODELS)


def row(status: dict, backend: str) -> dict:
    return next(row for row in status["backends"] if row["name"] == backend)


def gray_backend(cluster: Cluster) -> tuple[str, str]:
    """A backend with requests: its name and the address that frontends know."""
    status = cluster.status()
    name = status["models"][0]["backends"][0]
    return name, row(status, name)["grpc"]


def ejections(server: Server, address: str) -> float:
    return server.metric("atoll_cluster_ejections", backend=address)


def is_ejected(server: Server, address: str) -> bool:
    return server.metric("atoll_cluster_backend_ejected", backend=address) > 0


@contextmanager
def frozen_in_turns(cluster: Cluster, name: str) -> Iterator[None]:
    """Stops a process for 300 of every 400 ms."""
    process, ended = cluster.processes[name].process, threading.Event()

    def freeze() -> None:
        while not ended.is_set():
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)

    thread = threading.Thread(target=freeze)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        process.send_signal(signal.SIGCONT)


def check(load: Load) -> None:
    """Nothing is lost or mixed up, and few requests fail; a busy machine may make some more."""
    report = f"{load.codes()}, refused {load.refused()[:5]}"
    print(report)
    assert load.lost == [] and load.mixed_up == [], report
    assert len(load.refused()) <= len(load.replies) / 10, report
    if len(load.refused()) > ERRORS_MAX:
        warnings.warn(f"more than {ERRORS_MAX} errors: {report}", stacklevel=2)


def test_a_backend_that_stands_still_most_of_the_time_is_avoided_and_returns(
    cluster: Cluster,
) -> None:
    name, address = gray_backend(cluster)
    servers = list(cluster.frontends.values())
    command = [str(BINARY), "cluster", "status", "--store", cluster.store]

    def says_so() -> bool:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        problem = any(
            line.startswith("PROBLEM") and "avoid" in line and name in line
            for line in said.stdout.splitlines()
        )
        marked = any(
            line.startswith(name) and "AVOIDED" in line for line in said.stdout.splitlines()
        )
        return problem and marked and said.returncode == 1

    load = Load(cluster, MODELS, BODY, clients=6, pause=0.01).start()
    try:
        load.wait_more(100)
        with frozen_in_turns(cluster, name):
            assert wait_for(
                lambda: any(ejections(server, address) > 0 for server in servers), WAIT_SECONDS
            ), cluster.logs()
            assert wait_for(says_so, WAIT_SECONDS), cluster.status()
            load.wait_more(300)
        # The plan may do without it for a while. On a busy machine others may be avoided, too.
        cluster.wait_status(
            lambda status: not row(status, name)["ejected_by"] and not row(status, name)["avoided"]
        )
        load.wait_more(100)
    finally:
        load.stop()
    check(load)


def test_a_frozen_backend_is_probed_and_returns_with_a_good_reply(cluster: Cluster) -> None:
    name, address = gray_backend(cluster)
    servers = list(cluster.frontends.values())
    # Without a leader the routes stay: frontends are on their own.
    cluster.processes["s1"].kill()
    process = cluster.processes[name].process
    load = Load(cluster, MODELS, BODY, clients=6, pause=0.01).start()
    try:
        load.wait_more(100)
        process.send_signal(signal.SIGSTOP)
        try:
            # The first one is for silence, every further one for a probe without a reply.
            assert wait_for(
                lambda: all(ejections(server, address) >= 2 for server in servers), WAIT_SECONDS
            ), cluster.logs()
            assert all(is_ejected(server, address) for server in servers)
        finally:
            process.send_signal(signal.SIGCONT)
        assert wait_for(
            lambda: not any(is_ejected(server, address) for server in servers), WAIT_SECONDS
        ), cluster.logs()
        load.wait_more(100)
    finally:
        load.stop()
    for frontend in cluster.frontends:
        events = [
            "returned" if "backend returned" in line else "ejected"
            for line in cluster.processes[frontend].text().splitlines()
            if address in line and ("backend returned" in line or "backend ejected" in line)
        ]
        assert events[:2] == ["ejected", "ejected"] and "returned" in events[2:], events
    check(load)
