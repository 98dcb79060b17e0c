"""The scheduler of real processes scales their number: a backend that is not needed is emptied, marked, and only then let go."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, Load
from kubernetes_api import COST, KubernetesApi
from support import ASSETS, BINARY, LOST, wait_for

BODY = {"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]}
POD = "/api/v1/namespaces/sea/pods/"
SCALE = "/apis/apps/v1/namespaces/sea/deployments/reef/scale"
# A frontend may hear later than a backend that a model has moved: both then mean a backend that has it no more.
MOVED = (LOST, "is not ready: unloaded")

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    server = KubernetesApi(2, ["b1", "b2"])
    yield server
    server.stop()


def test_a_backend_goes_when_it_is_empty(tmp_path: Path, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    models = tmp_path / "models"
    models.mkdir()
    for name in ("m0", "m1", "m2"):
        shutil.copy(ASSETS / "digits.onnx", models / f"{name}.onnx")
    cluster = Cluster(tmp_path, models)
    try:
        limits = ["--copies", "1", "--replicas-min", "1", "--replicas-max", "4"]
        times = ["--scale-down-after-secs", "3", "--scale-cooldown-secs", "1"]
        cluster.backend("b1")
        cluster.backend("b2")
        # Who plans finds both, so that both get something that they can give up.
        cluster.wait_status(lambda status: len(status["backends"]) == 2)
        cluster.role("scheduler", "s1", "--kubernetes-scale", "deployment/reef", *limits, *times)
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        had = lambda name: "model ready" in cluster.parts[name].text()  # noqa: E731
        assert wait_for(lambda: had("b1") and had("b2")), cluster.logs()
        # So little that one backend is enough even on a machine that was slow while it measured itself.
        load = Load(cluster, ["m0", "m1", "m2"], BODY, clients=2, pause=0.1).start()
        try:
            cluster.wait_status(lambda status: (status.get("scaling") or {}).get("replicas") == 1)
            gone = goes(cluster, api)
            cluster.wait_status(lambda status: gone not in [row["name"] for row in status["backends"]])
            load.wait_more(20)
        finally:
            load.stop()
        load.check(f"{load.codes()}\n{cluster.logs()}", MOVED)
        if load.refused():
            warnings.warn(f"refused: {load.refused()}", stacklevel=1)
        moved_in_order(cluster, gone)
        status = cluster.status()
        assert status["scaling"]["wanted"] == 1 and status["scaling"]["errors"] == 0, status["scaling"]
        assert gone not in {backend for model in status["models"] for backend in model["backends"]}
        assert wait_for(lambda: frontend.metric("atoll_cluster_backends_wanted") == 1), frontend.metrics()
        assert frontend.metric("atoll_cluster_backends_present") in (1, 2)
        command = [str(BINARY), "cluster", "status", "--store", cluster.store]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        assert "deployment/reef: 1 wanted, 1 requested" in text, text
    finally:
        cluster.stop()


def goes(cluster: Cluster, api: KubernetesApi) -> str:
    """Ends the pod that Kubernetes would, which is the one that was marked before there were fewer replicas, and empty."""
    with api.lock:
        writes, marked = list(api.writes), [name for name, notes in api.pods.items() if COST in notes]
    replicas = [2, *(body["spec"]["replicas"] for path, body in writes if path == SCALE)]
    assert replicas[-1] == 1, writes
    fewer = next(index for index, (path, body) in enumerate(writes) if path == SCALE and body["spec"]["replicas"] < 2)
    (gone,) = marked
    assert (POD + gone, {"metadata": {"annotations": {COST: "-1000"}}}) in writes[:fewer], writes
    (row,) = [row for row in cluster.status()["backends"] if row["name"] == gone]
    assert row["models"] == [], row
    cluster.parts[gone].kill(signal.SIGTERM)
    with api.lock:
        del api.pods[gone]
    return gone


def moved_in_order(cluster: Cluster, gone: str) -> None:
    """Whatever a backend gave up, the other one had by then, as their logs say."""
    (other,) = {"b1", "b2"} - {gone}
    event = re.compile(r'^(\S+) .* model (ready|unloaded) model="(\w+)"', re.MULTILINE)
    events = {name: event.findall(cluster.parts[name].text()) for name in (gone, other)}
    left = [(at, model) for at, what, model in events[gone] if what == "unloaded"]
    assert left, f"it never had a model\n{cluster.logs()}"
    for at, model in left:
        before = [what for when, what, name in events[other] if name == model and when < at]
        assert before[-1:] == ["ready"], f"{model} left {gone} before {other} had it\n{cluster.logs()}"
