"""Canaries in a cluster of real processes under load: a good one is promoted, a failing and a slow
one are rolled back, and clients notice only which version replied."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import requests
from onnx import TensorProto, helper, numpy_helper

from cluster import WAIT_SECONDS, Cluster
from secure_cluster import SecureCluster
from support import BINARY, LOST, Server, wait_for

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")

BODY = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
# Sides of the products that make a version slow.
SLOW_SIDE = 640


def model(nodes: list, weights: dict[str, np.ndarray]) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], initializer=initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


def scaled(factor: float) -> bytes:
    """y = factor * x: a reply shows which version computed it."""
    weights = {"w": np.array([factor], np.float32)}
    return model([helper.make_node("Mul", ["x", "w"], ["y"])], weights)


def failing() -> bytes:
    """Runs with x = 0, as backends try it, and fails with x = 1, as clients send it."""
    nodes = [
        helper.make_node("Cast", ["x"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["y"]),
    ]
    return model(nodes, {"table": np.array([3.0], np.float32)})


def slow(factor: float) -> bytes:
    """y = factor * x, after products that depend on x and do not change y."""
    square = np.full((SLOW_SIDE, SLOW_SIDE), 1 / SLOW_SIDE, np.float32)
    nodes = [helper.make_node("Mul", ["x", "square"], ["p0"])]
    for step in range(3):
        nodes.append(helper.make_node("MatMul", [f"p{step}", "square"], [f"p{step + 1}"]))
    nodes += [
        helper.make_node("ReduceMax", ["p3"], ["most"], keepdims=0),
        helper.make_node("Mul", ["most", "zero"], ["nothing"]),
        helper.make_node("Mul", ["x", "w"], ["own"]),
        helper.make_node("Add", ["own", "nothing"], ["y"]),
    ]
    weights = {
        "square": square,
        "zero": np.array(0.0, np.float32),
        "w": np.array([factor], np.float32),
    }
    return model(nodes, weights)


class Reply(NamedTuple):
    code: int
    version: str
    value: float
    error: str


def infer(
    session: requests.Session, url: str, version: str = "", headers: dict | None = None
) -> Reply:
    path = f"{url}/v2/models/m{f'/versions/{version}' if version else ''}/infer"
    reply = session.post(path, json=BODY, headers=headers, timeout=WAIT_SECONDS)
    if reply.status_code != 200:
        return Reply(reply.status_code, "", 0.0, reply.text)
    found = reply.json()
    assert found["model_name"] == "m", found
    return Reply(200, found["model_version"], found["outputs"][0]["data"][0], "")


class Clients:
    """Clients that send requests to all frontends in turn."""

    def __init__(self, servers: list[Server]) -> None:
        self.urls = [server.url for server in servers]
        self.replies: list[Reply] = []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(n,)) for n in range(4)]
        for thread in self.threads:
            thread.start()

    def run(self, number: int) -> None:
        session = requests.Session()
        while not self.stopping.wait(0.01):
            number += 1
            self.replies.append(infer(session, self.urls[number % len(self.urls)]))

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def check(self, factors: dict[str, float]) -> Counter:
        """Asserts that every reply is that of one version; returns how many each version gave."""
        refused = [reply for reply in self.replies if reply.code != 200]
        # A stall of this machine looks like a lost backend.
        assert not [reply for reply in refused if LOST not in reply.error], refused[:5]
        for reply in self.replies:
            assert reply.code != 200 or factors[reply.version] == reply.value, reply
        return Counter(reply.version for reply in self.replies if reply.code == 200)


class Canary:
    """A cluster with the model `m`, as operators see it."""

    def __init__(self, cluster: Cluster, servers: list[Server]) -> None:
        self.cluster, self.servers, self.url = cluster, servers, servers[0].url

    def register(self, content: bytes, **form: str) -> str:
        files = {"name": (None, "m"), "model": ("model.onnx", content)}
        files |= {key: (None, value) for key, value in form.items()}
        reply = requests.post(f"{self.url}/register", files=files, timeout=WAIT_SECONDS)
        assert reply.status_code == 200, f"{reply.text}\n{self.cluster.logs()}"
        return reply.json()["version"]

    def command(self, *words: str) -> dict:
        command = [str(BINARY), "cluster", "canary", "m", *words, "--json", "--url", self.url]
        if isinstance(self.cluster, SecureCluster):
            command += ["--ca", self.cluster.ca]
        reply = subprocess.run(command, capture_output=True, check=False, timeout=WAIT_SECONDS)
        assert reply.returncode == 0, reply.stderr
        return json.loads(reply.stdout)

    def state(self) -> dict:
        url = f"{self.url}/v2/atoll/models/m/canary"
        return requests.get(url, timeout=WAIT_SECONDS).json()

    def wait_ended(self) -> dict:
        ended = wait_for(lambda: self.state()["state"] not in ("running", "promoting"), 120)
        assert ended, f"{self.state()}\n{self.cluster.logs()}"
        return self.state()

    def versions(self, server: Server) -> list[str]:
        index = requests.post(f"{server.url}/v2/repository/index", timeout=WAIT_SECONDS).json()
        return [row["version"] for row in index if row["name"] == "m"]

    def metadata(self, server: Server) -> list[str]:
        url = f"{server.url}/v2/models/m"
        return requests.get(url, timeout=WAIT_SECONDS).json()["versions"]

    def counted(self, server: Server) -> list[str]:
        stats = requests.get(f"{server.url}/v2/models/m/stats", timeout=WAIT_SECONDS).json()
        return sorted(row["version"] for row in stats["model_stats"])

    def assert_served(self, expected: list[str]) -> None:
        """All that tells versions tells these, the one in force first."""
        for server in self.servers:
            agrees = wait_for(lambda s=server: self.versions(s) == expected, WAIT_SECONDS)
            assert agrees, f"{self.versions(server)}, not {expected}"
            assert self.metadata(server) == expected
            # Until the last backend has replaced the version before, it tells what it serves.
            counted = wait_for(lambda s=server: self.counted(s) == sorted(expected), WAIT_SECONDS)
            assert counted, f"{self.counted(server)}, not {expected}"
        rows = self.cluster.status()["models"]
        served = {row["name"]: str(row["version"]) for row in rows if row["name"].startswith("m")}
        names = ["m"] + [f"m@{version}" for version in expected[1:]]
        assert served == dict(zip(names, expected, strict=True))


def run(folder: Path, make: Callable[[Path, Path], Cluster]) -> Iterator[Canary]:
    models = folder / "models"
    models.mkdir()
    (models / "m.onnx").write_bytes(scaled(1.0))
    cluster = make(folder, models)
    try:
        cluster.scheduler("s1")
        for name in ("b1", "b2"):
            cluster.backend(name, *cluster.model_store)
        servers = [cluster.frontend(name) for name in ("f1", "f2")]
        cluster.wait_ready()
        yield Canary(cluster, servers)
    finally:
        cluster.stop()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    yield from run(tmp_path, Cluster)


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Canary]:
    yield from run(tmp_path, lambda folder, models: SecureCluster(folder, models, monkeypatch))


def test_canaries_are_promoted_or_rolled_back_under_load(canary: Canary) -> None:
    factors = {"1": 1.0, "2": 2.0, "4": 4.0}
    clients = Clients(canary.servers)
    try:
        # Without a share, only requests that ask for the canary get it.
        assert canary.register(scaled(2.0), canary="0%") == "2"
        canary.assert_served(["1", "2"])
        check_routing(canary)
        assert {reply.version for reply in clients.replies} == {"1"}

        # A good one gets its share and is promoted.
        limits = ("--promote-after", "4s", "--max-errors", "5%", "--max-slowdown", "2000%")
        started = canary.command("--share", "30%", *limits)
        assert (started["state"], started["version"], started["in_force"]) == ("running", "2", "1")
        assert started["running"]["share_percent"] == 30.0
        ended = canary.wait_ended()
        assert (ended["state"], ended["in_force"]) == ("promoted", "2"), ended
        canary.assert_served(["2"])
        assert "canary promoted" in canary.cluster.processes["s1"].text()

        # One that fails is rolled back; the version in force answers what it does not.
        assert canary.register(failing(), canary="30%", promote_after="1h") == "3"
        ended = canary.wait_ended()
        assert (ended["state"], ended["in_force"], ended["version"]) == ("rolled_back", "2", "3")
        assert "more failures" in ended["why"], ended
        canary.assert_served(["2"])

        # So is one that is slow.
        rules = {"canary": "20%", "promote_after": "1h", "max_slowdown": "200%"}
        assert canary.register(slow(4.0), **rules) == "4"
        ended = canary.wait_ended()
        assert (ended["state"], ended["in_force"], ended["version"]) == ("rolled_back", "2", "4")
        assert "slower" in ended["why"], ended
        canary.assert_served(["2"])
        assert_reported(canary)
    finally:
        clients.stop()
    replies = clients.check(factors)
    assert all(replies[version] > 0 for version in factors), replies


def check_routing(canary: Canary) -> None:
    """Versions by header and by path."""
    session = requests.Session()
    for server in canary.servers:
        for headers, version, expected in [
            ({}, "", "1"),
            ({"x-atoll-canary": "always"}, "", "2"),
            ({"X-Atoll-Canary": "Never"}, "", "1"),
            ({"x-atoll-canary-key": "ada"}, "", "1"),
            ({}, "1", "1"),
            ({}, "2", "2"),
            ({"x-atoll-canary": "never"}, "2", "2"),
        ]:
            reply = infer(session, server.url, version, headers)
            assert (reply.code, reply.version) == (200, expected), (headers, version, reply)
        assert infer(session, server.url, "3").code == 404
        # The name under which backends serve it is no model.
        unknown = session.get(f"{server.url}/v2/models/m@2", timeout=WAIT_SECONDS)
        assert unknown.status_code == 404, unknown.text


def assert_reported(canary: Canary) -> None:
    """Status and metrics tell what was decided."""
    [row] = canary.cluster.status()["canaries"]
    assert (row["model"], row["version"], row["state"]) == ("m", 4, "rolled_back"), row
    command = [str(BINARY), "cluster", "status", "--store", canary.cluster.store]
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert "canary m version 4 was rolled back to 2: more than" in text, text
    log = canary.cluster.processes["s1"].text()
    assert log.count("canary promoted") == 1 and log.count("canary rolled back") == 2, log
    refused = requests.post(f"{canary.url}/v2/atoll/models/m/canary/promote", timeout=60)
    assert refused.status_code == 404, refused.text


def test_canaries_are_served_in_a_secured_cluster(secured: Canary) -> None:
    """Mutual TLS to etcd, which has users, and to backends; TLS for clients and commands."""
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(secured.url, timeout=WAIT_SECONDS, verify=requests.certs.where())
    clients = Clients(secured.servers)
    try:
        assert secured.register(scaled(2.0), canary="0%") == "2"
        secured.assert_served(["1", "2"])
        check_routing(secured)
        limits = ("--promote-after", "2s", "--max-errors", "5%", "--max-slowdown", "2000%")
        assert secured.command("--share", "50%", *limits)["state"] == "running"
        ended = secured.wait_ended()
        assert (ended["state"], ended["in_force"]) == ("promoted", "2"), ended
        secured.assert_served(["2"])
    finally:
        clients.stop()
    replies = clients.check({"1": 1.0, "2": 2.0})
    assert replies["1"] > 0 and replies["2"] > 0, replies


def test_an_operator_ends_canaries(canary: Canary) -> None:
    for wrong in ({"canary": "95%"}, {"canary": "x"}, {"max_errors": "1%"}, {"canary": "-1"}):
        files = {"name": (None, "m"), "model": ("model.onnx", scaled(9.0))}
        files |= {key: (None, value) for key, value in wrong.items()}
        reply = requests.post(f"{canary.url}/register", files=files, timeout=WAIT_SECONDS)
        assert reply.status_code == 400, (wrong, reply.text)
    files = {"name": (None, "new"), "model": ("m.onnx", scaled(9.0)), "canary": (None, "5")}
    reply = requests.post(f"{canary.url}/register", files=files, timeout=WAIT_SECONDS)
    assert reply.status_code == 400 and "in force" in reply.text, reply.text

    assert canary.register(scaled(2.0), canary="50%") == "2"
    # A restarted scheduler and restarted backends find it again.
    for name in ("s1", "b1"):
        canary.cluster.processes[name].kill()
        canary.cluster.processes[name].start()
    session = requests.Session()
    always = {"x-atoll-canary": "always"}

    def replies(headers: dict | None = None) -> str:
        return infer(session, canary.url, headers=headers).version

    assert wait_for(lambda: replies(always) == "2", WAIT_SECONDS)
    aborted = canary.command("abort")
    assert (aborted["state"], aborted["in_force"]) == ("aborted", "1"), aborted
    canary.assert_served(["1"])
    assert wait_for(lambda: replies(always) == "1", WAIT_SECONDS)
    # It is registered still, and can be tried again.
    assert canary.command("--share", "10")["version"] == "2"
    canary.assert_served(["1", "2"])
    assert canary.command("promote")["in_force"] == "2"
    assert wait_for(lambda: {replies() for _ in range(8)} == {"2"}, WAIT_SECONDS)
    # Backends serve it twice until all have it under the model's own name.
    assert canary.wait_ended()["state"] == "promoted"
    canary.assert_served(["2"])
    # It was an ordinary version afterwards: the one before is a rollback away.
    reply = requests.post(f"{canary.url}/v2/atoll/models/m/rollback", timeout=WAIT_SECONDS)
    assert reply.json()["version"] == "1", reply.text
