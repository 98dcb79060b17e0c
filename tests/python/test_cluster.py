"""A cluster of real processes with a real etcd: the clients of a single server, and faults under
load."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from cluster import SHORT_LEASE_MS, WAIT_SECONDS, Cluster, Load
from support import (
    ASSETS,
    BINARY,
    REPOSITORY,
    Server,
    free_ports,
    make_repository,
    retry_while_lost,
    serve,
    wait_for,
)

# The longest recovery on an idle machine: etcd expires leases up to a second late.
RECOVERY_SECONDS = SHORT_LEASE_MS / 1000 + 4
# How long etcd is down; set the variable for a longer test.
ETCD_DOWN_S = float(os.environ.get("ATOLL_TEST_ETCD_DOWN_S", "4"))
MODELS = [f"m{number}" for number in range(10)]
BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")


def run_protocol_tests(ports: list[int]) -> None:
    """Runs the protocol tests of a single server against a frontend."""
    files = [f"tests/python/test_{name}.py" for name in ("http", "grpc", "errors")]
    env = {**os.environ, "ATOLL_TEST_SERVER": ",".join(map(str, ports))}
    command = [sys.executable, "-m", "pytest", "--quiet", "-x", "-p", "no:cacheprovider", *files]
    reply = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    assert reply.returncode == 0, reply.stdout[-4000:]
    assert " passed" in reply.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in MODELS:
        shutil.copy(ASSETS / "digits.onnx", folder / f"{name}.onnx")
    running = Cluster(tmp_path, folder, lease_ms=SHORT_LEASE_MS)
    yield running
    running.stop()


def test_a_frontend_passes_the_protocol_tests_of_a_server(models: Path, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, make_repository(models, tmp_path / "models"))
    try:
        cluster.scheduler("s1")
        cluster.backend("b1", *cluster.model_store)
        cluster.backend("b2", *cluster.model_store)
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
    reply = requests.post(
        f"{url}/register", files={"name": (None, "mine"), "model": model}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    reply = retry_while_lost(
        lambda: requests.post(f"{url}/v2/models/mine/infer", json=BODY, timeout=60)
    )
    assert reply.status_code == 200, reply.text
    broken = requests.post(
        f"{url}/register", files={"name": (None, "bad"), "model": b"no model"}, timeout=60
    )
    assert broken.status_code == 400, broken.text
    assert requests.get(f"{url}/v2/models/bad", timeout=60).status_code == 404


def test_one_process_can_have_all_roles(models: Path, tmp_path: Path) -> None:
    server = serve(
        make_repository(models, tmp_path / "models"), tmp_path / "server.log", "--cluster"
    )
    try:
        reply = retry_while_lost(
            lambda: requests.post(f"{server.url}/v2/models/digits/infer", json=BODY, timeout=60)
        )
        assert reply.status_code == 200, reply.text
        assert server.metric("atoll_cluster_plan_epoch") >= 1
        assert server.metric("atoll_cluster_plan_backends") == 1
        server.assert_alive()
    finally:
        server.stop()


def test_a_role_of_its_own_refuses_the_memory_store() -> None:
    command = [str(BINARY), "cluster", "scheduler", "--store", "memory"]
    reply = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert reply.returncode == 2
    assert "serve --cluster" in reply.stderr


def test_every_request_gets_one_reply_despite_faults(cluster: Cluster) -> None:
    """Kills a backend, the leader, etcd and a frontend one after another under a steady load."""
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
            assert_all_models_served(server)
    finally:
        load.stop()
    times = [round(took, 1) for _, took in faults]
    report = f"{load.codes()}, recovered after {times} s, refused {load.refused()[:10]}"
    print(report)
    load.check(report)
    for anomaly in load.anomalies(faults, RECOVERY_SECONDS):
        warnings.warn(f"{anomaly}: {report}", stacklevel=1)
    for name, process in cluster.processes.items():
        assert "panicked" not in process.text(), f"{name}\n{process.text()[-2000:]}"


def test_every_role_counts_its_calls_to_the_store(cluster: Cluster) -> None:
    ports = dict(zip(("s1", "b1"), free_ports(2), strict=True))
    cluster.scheduler("s1", "--metrics-port", str(ports["s1"]))
    cluster.backend("b1", "--metrics-port", str(ports["b1"]))
    frontend = cluster.frontend("f1")
    cluster.wait_ready()
    ports["f1"] = frontend.metrics_port
    servers = {role: Server([0, 0, port]) for role, port in ports.items()}

    def calls(role: str, what: str, **labels: str) -> float:
        return servers[role].metric(f"atoll_cluster_store_{what}_total", **labels)

    for role, server in servers.items():
        # Leases are renewed for as long as the process lives.
        before = calls(role, "calls", call="renew")
        assert wait_for(lambda: calls(role, "calls", call="renew") > before), role  # noqa: B023
        assert calls(role, "calls", call="transact") > 0, role
        assert calls(role, "calls", call="watch") > 0, role
        assert calls(role, "call_seconds", call="transact") > 0, role
        assert server.metric("atoll_cluster_store_reachable") == 1, role
    cluster.processes["etcd"].kill()
    for role, server in servers.items():
        assert wait_for(lambda: calls(role, "call_failures") > 0), role  # noqa: B023
        gone = lambda: server.metric("atoll_cluster_store_reachable") == 0  # noqa: E731, B023
        assert wait_for(gone), role


def status_command(cluster: Cluster) -> subprocess.CompletedProcess[str]:
    command = [str(BINARY), "cluster", "status", "--store", cluster.store]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_lost_etcd_is_rebuilt_under_load(cluster: Cluster) -> None:
    """etcd starts again without its data: backends put the records of models back, also that of a
    registered one, and no request gets 404."""
    for name in ("s1", "s2"):
        cluster.scheduler(name)
    for name in ("b1", "b2"):
        cluster.backend(name, *cluster.model_store)
    frontend = cluster.frontend("f1")
    cluster.wait_ready()
    digits = (ASSETS / "digits.onnx").read_bytes()
    form = {"name": (None, "registered"), "model": digits}
    reply = requests.post(f"{frontend.url}/register", files=form, timeout=120)
    assert reply.status_code == 200, reply.text
    cluster.wait_status(lambda status: routed(status) and lasting(status) == [])
    assert status_command(cluster).returncode == 0
    load = Load(cluster, [*MODELS, "registered"], BODY).start()
    try:
        load.wait_more(50)
        cluster.processes["etcd"].kill()
        shutil.rmtree(cluster.folder / "etcd")
        load.wait_more(20)
        cluster.processes["etcd"].start()
        took = cluster.wait_status(
            lambda status: len(status["models"]) == len(MODELS) + 1
            and routed(status)
            and status["leader"] is not None
            and lasting(status) == []
        )
        load.wait_more(100)
    finally:
        load.stop()
    report = f"{load.codes()}, rebuilt after {took:.1f} s, refused {load.refused()[:5]}"
    print(report)
    load.check(report)
    # A process that leaves makes the status wrong, which says so.
    for name in ("s1", "s2"):
        cluster.processes[name].kill(signal.SIGTERM)
    # A lease that could not be given back ends by itself.
    said = "PROBLEM no scheduler leads"
    assert wait_for(lambda: said in status_command(cluster).stdout), status_command(cluster).stdout
    assert status_command(cluster).returncode == 1
    index = requests.post(f"{frontend.url}/v2/repository/index", timeout=60).json()
    assert "registered" in {row["name"] for row in index}


def test_a_newer_folder_replaces_a_version_only_with_enough_backends(tmp_path: Path) -> None:
    """A backend with a newer version joins, then a second one: requests never fail, and all get
    the old version until two backends have the new one."""
    folders = [tmp_path / "old", tmp_path / "new"]
    for version, folder in enumerate(folders, start=1):
        (folder / "m" / str(version)).mkdir(parents=True)
        shutil.copy(ASSETS / "digits.onnx", folder / "m" / str(version) / "model.onnx")
    # Other content under the same interface.
    newer = folders[1] / "m" / "2" / "model.onnx"
    newer.write_bytes(newer.read_bytes() + b"\x12\x05newer")
    cluster = Cluster(tmp_path, folders[0], lease_ms=SHORT_LEASE_MS)
    try:
        cluster.scheduler("s1")
        cluster.backend("b1")
        cluster.backend("b2")
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        cluster.models = folders[1]
        load = Load(cluster, ["m"], BODY).start()
        versions = lambda status: [model["version"] for model in status["models"]]  # noqa: E731
        try:
            cluster.backend("b3")
            assert wait_for(
                lambda: "waits; the older one serves" in cluster.processes["b3"].text(),
                WAIT_SECONDS,
            ), cluster.logs()
            assert versions(cluster.status()) == [1]
            cluster.backend("b4")
            cluster.wait_status(lambda status: versions(status) == [2] and routed(status))
            load.wait_more(100)
        finally:
            load.stop()
        load.check(f"{load.codes()}, refused {load.refused()[:5]}")
        assert not [reply for reply in load.refused() if "no backend" in reply.error]
        index = requests.post(f"{frontend.url}/v2/repository/index", timeout=60).json()
        assert [(row["version"], row["state"]) for row in index] == [("2", "READY")], index
    finally:
        cluster.stop()


def assert_all_models_served(server: Server) -> None:
    """Asserts that every model is served again eventually."""

    def is_served(model: str) -> bool:
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
        assert wait_for(lambda model=model: is_served(model), WAIT_SECONDS), (
            f"{model} is no longer served"
        )


def lasting(status: dict) -> list[str]:
    """What is wrong, apart from backends that frontends avoid for moments on a busy machine."""
    problems = [problem["what"] for problem in status["problems"]]
    return [what for what in problems if "avoid" not in what]


def routed(status: dict) -> bool:
    return all(len(model["backends"]) >= 2 for model in status["models"])


def kill_backend(cluster: Cluster) -> float:
    cluster.processes["b1"].kill()

    def is_unused(status: dict) -> bool:
        return all("b1" not in model["backends"] for model in status["models"])

    return cluster.wait_status(lambda status: is_unused(status) and routed(status))


def kill_leader(cluster: Cluster) -> float:
    cluster.wait_status(lambda status: status["leader"] is not None)
    leader = cluster.status()["leader"]
    cluster.processes[leader].kill()
    took = cluster.wait_status(lambda status: status["leader"] not in (None, leader))
    # The new leader plans: it uses a backend that returns.
    cluster.processes["b1"].start()
    cluster.wait_status(lambda status: status["plan"]["backends"] == 4 and routed(status))
    return took


def kill_etcd(cluster: Cluster) -> float:
    cluster.processes["etcd"].kill()
    time.sleep(ETCD_DOWN_S)
    cluster.processes["etcd"].start()
    return cluster.wait_status(lambda status: status["leader"] is not None and routed(status))


def kill_frontend(cluster: Cluster) -> float:
    cluster.processes["f1"].kill()
    took = cluster.wait_status(lambda status: "f1" not in status["frontends"])
    cluster.processes["f1"].start()
    cluster.wait_status(lambda status: "f1" in status["frontends"])
    return took
