"""The cluster as real processes with a real etcd: the same clients as for one node, and faults under load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from cluster import SHORT_LEASE_MS, WAIT_SECONDS, Cluster, Load
from support import ASSETS, BINARY, REPOSITORY, Server, lay_out, patiently, serve, wait_for

# What recovery takes at most where there is time to spare: leases are the store's, and end up to a second late.
RECOVERY_SECONDS = SHORT_LEASE_MS / 1000 + 4
# How long the store is away: short in every run of the tests.
ETCD_DOWN_S = float(os.environ.get("ATOLL_TEST_ETCD_DOWN_S", "4"))
MODELS = [f"m{number}" for number in range(10)]
BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")


def run_protocol_tests(ports: list[int]) -> None:
    """The protocol tests of a single node, pointed at a frontend."""
    files = [f"tests/python/test_{name}.py" for name in ("http", "grpc", "errors")]
    env = {**os.environ, "ATOLL_TEST_SERVER": ",".join(map(str, ports))}
    command = [sys.executable, "-m", "pytest", "--quiet", "-x", "-p", "no:cacheprovider", *files]
    answer = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout[-4000:]
    assert " passed" in answer.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in MODELS:
        shutil.copy(ASSETS / "digits.onnx", folder / f"{name}.onnx")
    running = Cluster(tmp_path, folder, lease_ms=SHORT_LEASE_MS)
    yield running
    running.stop()


def test_clients_of_one_node_work_with_a_frontend(models: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, lay_out(models, tmp_path / "models"))
    try:
        cluster.scheduler("s1")
        cluster.backend("b1")
        cluster.backend("b2")
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        run_protocol_tests([frontend.http_port, frontend.grpc_port, frontend.metrics_port])
        load_and_unload(frontend.url)
        register_and_classify(frontend.url)
    finally:
        cluster.stop()


def load_and_unload(url: str) -> None:
    post = requests.post(f"{url}/v2/repository/models/add_sub/unload", timeout=60)
    assert post.status_code == 200, post.text
    assert requests.get(f"{url}/v2/models/add_sub/ready", timeout=60).status_code != 200
    assert requests.post(f"{url}/v2/repository/models/add_sub/load", timeout=60).status_code == 200
    assert requests.get(f"{url}/v2/models/add_sub/ready", timeout=60).status_code == 200
    assert requests.post(f"{url}/v2/repository/models/no_such/load", timeout=60).status_code == 404


def register_and_classify(url: str) -> None:
    model = (ASSETS / "digits.onnx").read_bytes()
    answer = requests.post(
        f"{url}/register", files={"name": (None, "mine"), "model": model}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    answer = patiently(lambda: requests.post(f"{url}/v2/models/mine/infer", json=BODY, timeout=60))
    assert answer.status_code == 200, answer.text
    broken = requests.post(
        f"{url}/register", files={"name": (None, "bad"), "model": b"no model"}, timeout=60
    )
    assert broken.status_code == 400, broken.text
    assert requests.get(f"{url}/v2/models/bad", timeout=60).status_code == 404


def test_all_roles_in_one_process(models: Path, tmp_path: Path) -> None:
    server = serve(lay_out(models, tmp_path / "models"), tmp_path / "server.log", "--cluster")
    try:
        answer = patiently(
            lambda: requests.post(f"{server.url}/v2/models/digits/infer", json=BODY, timeout=60)
        )
        assert answer.status_code == 200, answer.text
        server.assert_alive()
    finally:
        server.stop()


def test_the_memory_store_is_of_one_process() -> None:
    command = [str(BINARY), "cluster", "scheduler", "--store", "memory"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2
    assert "serve --cluster" in answer.stderr


def test_faults_under_load(cluster: Cluster) -> None:
    """kill -9 of a backend, the leader, etcd and a frontend, one after another, under a steady load."""
    for name in ("s1", "s2"):
        cluster.scheduler(name)
    for name in ("b1", "b2", "b3", "b4"):
        cluster.backend(name)
    cluster.frontend("f1")
    cluster.frontend("f2")
    cluster.wait_ready()
    load = Load(cluster, MODELS, BODY).start()
    faults: list[tuple[float, float]] = []
    try:
        for fault in (kill_backend, kill_leader, kill_etcd, kill_frontend):
            load.wait_more(100)
            faults.append((load.now(), fault(cluster)))
        load.wait_more(100)
        for server in cluster.frontends.values():
            assert_all_answer(server)
    finally:
        load.stop()
    times = [round(took, 1) for _, took in faults]
    report = f"{load.codes()}, recovered after {times} s, refused {load.refused()[:10]}"
    print(report)
    load.check(report)
    for doubt in load.doubts(faults, RECOVERY_SECONDS):
        warnings.warn(f"{doubt}: {report}", stacklevel=1)
    for name, part in cluster.parts.items():
        assert "panicked" not in part.text(), f"{name}\n{part.text()[-2000:]}"


def assert_all_answer(server: Server) -> None:
    """Every model is served again, sooner or later."""

    def answers(model: str) -> bool:
        try:
            return (
                requests.post(
                    f"{server.url}/v2/models/{model}/infer", json=BODY, timeout=60
                ).status_code
                == 200
            )
        except requests.ConnectionError:
            return False

    for model in MODELS:
        assert wait_for(lambda model=model: answers(model), WAIT_SECONDS), (
            f"{model} is not answered any more"
        )


def routed(status: dict) -> bool:
    return all(len(model["backends"]) >= 2 for model in status["models"])


def kill_backend(cluster: Cluster) -> float:
    cluster.parts["b1"].kill()
    gone = lambda status: all("b1" not in model["backends"] for model in status["models"])  # noqa: E731
    return cluster.wait_status(lambda status: gone(status) and routed(status))


def kill_leader(cluster: Cluster) -> float:
    cluster.wait_status(lambda status: status["leader"] is not None)
    leader = cluster.status()["leader"]
    cluster.parts[leader].kill()
    took = cluster.wait_status(lambda status: status["leader"] not in (None, leader))
    # The new leader plans: a backend that comes back is counted on.
    cluster.parts["b1"].start()
    cluster.wait_status(lambda status: status["plan"]["backends"] == 4 and routed(status))
    return took


def kill_etcd(cluster: Cluster) -> float:
    cluster.parts["etcd"].kill()
    time.sleep(ETCD_DOWN_S)
    cluster.parts["etcd"].start()
    return cluster.wait_status(lambda status: status["leader"] is not None and routed(status))


def kill_frontend(cluster: Cluster) -> float:
    cluster.parts["f1"].kill()
    took = cluster.wait_status(lambda status: "f1" not in status["frontends"])
    cluster.parts["f1"].start()
    cluster.wait_status(lambda status: "f1" in status["frontends"])
    return took
