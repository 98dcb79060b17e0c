"""A cluster without any backend: the first registration and the first requests start one, of the
cheapest pool whose pods come, and when nobody sends anything it is removed again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from cluster import WAIT_SECONDS, Cluster, Process
from kubernetes_api import COST, KubernetesPools
from secure_cluster import SecureCluster
from support import ASSETS, wait_for

BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}
SCALE = "/apis/apps/v1/namespaces/sea/deployments/"
POOLS = [
    "--kubernetes-scale=deployment/cheap,kind=cheap,min=0,max=3,price=1",
    "--kubernetes-scale=deployment/dear,kind=dear,min=0,max=3,price=2.5",
]
TIMES = ["--scale-cooldown-secs=1", "--scale-down-after-secs=2"]
TIMES += ["--scale-to-zero-after-secs=1", "--scale-pending-secs=3", "--copies=1"]

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")


class Running:
    """A cluster whose backends are the pods of two pools, of which the cheaper one has no quota."""

    def __init__(self, folder: Path, make: Callable[[Path, Path], Cluster] = Cluster) -> None:
        models = folder / "models"
        models.mkdir()
        self.cluster = make(folder, models)
        self.api = KubernetesPools({"cheap": 0, "dear": 2}, self.start_pod)
        self.config = self.api.kubeconfig(folder / "kubeconfig")

    def start_pod(self, pool: str, pod: str) -> Process:
        flags = [*self.cluster.model_store, "--threads", "1", "--device-kind", pool]
        if isinstance(self.cluster, SecureCluster):
            flags += self.cluster.mutual()
        self.cluster.role("backend", pod, *flags)
        return self.cluster.processes[pod]

    def start(self) -> None:
        self.cluster.role("scheduler", "s1", *POOLS, *TIMES)
        self.frontend = self.cluster.frontend("f1", "--cold-start-wait-ms=100000")
        # Without models and without backends.
        self.cluster.wait_ready()

    def url(self, path: str) -> str:
        return f"{self.frontend.url}{path}"

    def replicas(self) -> dict[str, int]:
        with self.api.lock:
            return {name: pool.replicas for name, pool in self.api.pools.items()}

    def wait_for_zero(self) -> None:
        none = lambda: not any(self.replicas().values()) and not any(  # noqa: E731
            pool.running or pool.ending for pool in self.api.pools.values()
        )
        assert wait_for(none, WAIT_SECONDS), f"{self.api.log}\n{self.cluster.logs()}"
        self.cluster.wait_status(lambda status: status["backends"] == [])

    def infer(self, replies: list[requests.Response], **parameters: object) -> None:
        body = {**BODY, "parameters": parameters}
        url = self.url("/v2/models/digits/infer")
        replies.append(requests.post(url, json=body, timeout=WAIT_SECONDS))


def run(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("KUBECONFIG", str(running.config))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    try:
        yield running
    finally:
        running.api.stop()
        running.cluster.stop()


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    yield from run(Running(tmp_path), monkeypatch)


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    make = lambda folder, models: SecureCluster(folder, models, monkeypatch)  # noqa: E731
    yield from run(Running(tmp_path, make), monkeypatch)


def test_a_secured_cluster_comes_from_zero_and_returns_to_it(secured: Running) -> None:
    """Mutual TLS to etcd, which has users, and to backends that come and go; TLS for clients."""
    secured.start()
    report = lambda: f"{secured.api.log}\n{secured.cluster.logs()}"  # noqa: E731
    form = {"name": (None, "digits"), "model": ("m.onnx", (ASSETS / "digits.onnx").read_bytes())}
    reply = requests.post(secured.url("/register"), files=form, timeout=WAIT_SECONDS)
    assert reply.status_code == 200, f"{reply.text}\n{report()}"
    secured.wait_for_zero()
    replies: list[requests.Response] = []
    secured.infer(replies)
    assert replies[0].status_code == 200, f"{replies[0].text}\n{report()}"
    assert secured.frontend.metric("atoll_cluster_cold_start_seconds_count") == 1
    secured.wait_for_zero()


def test_the_first_requests_start_backends_and_the_last_ones_are_removed(running: Running) -> None:
    running.start()
    cluster = running.cluster
    report = lambda: f"{running.api.log}\n{cluster.logs()}"  # noqa: E731
    assert running.api.log == [], "nobody asked for anything"
    # The registration waits for a backend. The cheaper pool is asked first; its pods do not come.
    form = {"name": (None, "digits"), "model": ("m.onnx", (ASSETS / "digits.onnx").read_bytes())}
    reply = requests.post(running.url("/register"), files=form, timeout=WAIT_SECONDS)
    assert reply.status_code == 200, f"{reply.text}\n{report()}"
    assert running.api.log[0] == ("cheap", 1) and ("dear", 1) in running.api.log, report()
    scheduler = cluster.processes["s1"].text()
    # On a busy machine the other pool's pods may take longer than `--scale-pending-secs`, too.
    stalled = [line for line in scheduler.splitlines() if "replicas do not come" in line]
    (line,) = [line for line in stalled if "deployment/cheap" in line]
    assert line == stalled[0] and "only 0 pods exist" in line, stalled
    status = cluster.wait_status(lambda status: status["scaling"]["pools"][0].get("stalled"))
    assert any("deployment/cheap" in problem["what"] for problem in cluster.status()["problems"])
    del status
    # Nobody requests anything: the last backend is emptied, marked and removed.
    running.wait_for_zero()
    assert_emptied_first(running)
    assert_answers_at_zero(running)
    # Requests wait, all are answered, and the time is measured.
    replies: list[requests.Response] = []
    threads = [threading.Thread(target=running.infer, args=(replies,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in replies] == [200] * 5, (
        f"{[reply.text for reply in replies]}\n{report()}"
    )
    assert running.replicas()["cheap"] == 0, "it is not asked again so soon"
    frontend = running.frontend
    assert frontend.metric("atoll_cluster_cold_start_seconds_count") == 1
    seconds = frontend.metric("atoll_cluster_cold_start_seconds_sum")
    assert 0 < seconds <= max(reply.elapsed.total_seconds() for reply in replies) + 0.5
    assert "cold start answered" in cluster.processes["f1"].text()
    cluster.wait_status(lambda status: (status.get("cold_starts") or {}).get("count") == 1)
    running.wait_for_zero()
    # One that has too little time is refused in time, and starts a backend all the same.
    running.infer(replies, timeout=300_000)
    assert replies[-1].status_code == 503 and int(replies[-1].headers["Retry-After"]) >= 1, (
        f"{replies[-1].text}\n{report()}"
    )
    assert wait_for(lambda: running.replicas()["dear"] == 1), report()
    running.infer(replies)
    assert replies[-1].status_code == 200, f"{replies[-1].text}\n{report()}"


def assert_emptied_first(running: Running) -> None:
    """The pod was marked before the replicas were reduced, and had unloaded its model by then."""
    writes = running.api.writes
    fewer = [i for i, (path, body) in enumerate(writes)
             if path == f"{SCALE}dear/scale" and body["spec"]["replicas"] == 0]
    mark = {"metadata": {"annotations": {COST: "-1000"}}}
    marked = [path.rsplit("/", 1)[-1] for path, body in writes[: fewer[0]] if body == mark]
    assert marked == ["dear-0"], writes
    assert "model unloaded" in running.cluster.processes["dear-0"].text()


def assert_answers_at_zero(running: Running) -> None:
    """Frontends are ready, know the model, and nothing counts as a problem but the pool."""
    assert requests.get(running.url("/v2/health/ready"), timeout=5).status_code == 200
    assert requests.get(running.url("/v2/models/digits/ready"), timeout=5).status_code == 200
    reply = requests.get(running.url("/v2/models/digits"), timeout=5)
    assert reply.status_code == 200, reply.text
    metadata = reply.json()
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["image"]
    assert metadata["inputs"][0]["shape"] == [-1, 1, 8, 8] and metadata["outputs"]
    index = requests.post(running.url("/v2/repository/index"), timeout=5).json()
    (row,) = index
    assert (row["name"], row["state"]) == ("digits", "READY") and "scaled to zero" in row["reason"]
    problems = [problem["what"] for problem in running.cluster.status()["problems"]]
    assert all("deployment/cheap" in problem for problem in problems), problems
    # Nothing of this is a request that starts a backend.
    assert not any(running.replicas().values())
