"""The scheduler of real processes scales their number: a backend that is not needed is emptied, marked, and only then let go."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, Load
from kubernetes_api import COST, KubernetesApi
from support import ASSETS, BINARY

BODY = {"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]}
POD = "/api/v1/namespaces/sea/pods/"

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
        cluster.role("scheduler", "s1", "--kubernetes-scale", "deployment/reef", *limits, *times)
        cluster.backend("b1")
        cluster.backend("b2")
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        load = Load(cluster, ["m0", "m1", "m2"], BODY, clients=2).start()
        try:
            cluster.wait_status(lambda status: (status.get("scaling") or {}).get("replicas") == 1, 60)
            gone = goes(cluster, api)
            cluster.wait_status(lambda status: [row["name"] for row in status["backends"]] != ["b1", "b2"], 20)
        finally:
            load.stop()
        assert set(load.codes()) == {200}, f"{load.codes()}\n{cluster.logs()}"
        assert load.lost == [] and load.twice == []
        status = cluster.status()
        assert status["scaling"]["wanted"] == 1 and status["scaling"]["errors"] == 0, status["scaling"]
        assert gone not in {backend for model in status["models"] for backend in model["backends"]}
        assert frontend.metric("atoll_cluster_backends_wanted") == 1
        assert frontend.metric("atoll_cluster_backends_present") in (1, 2)
        command = [str(BINARY), "cluster", "status", "--store", cluster.store]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        assert "deployment/reef: 1 wanted, 1 asked for" in text, text
    finally:
        cluster.stop()


def goes(cluster: Cluster, api: KubernetesApi) -> str:
    """Ends the pod that Kubernetes would, which is the one that was marked before there were fewer replicas, and empty."""
    (mark, scale) = api.writes
    assert mark[0].startswith(POD) and mark[1] == {"metadata": {"annotations": {COST: "-1000"}}}, api.writes
    assert scale[1] == {"metadata": {"resourceVersion": "100"}, "spec": {"replicas": 1}}, api.writes
    gone = mark[0].removeprefix(POD)
    (row,) = [row for row in cluster.status()["backends"] if row["name"] == gone]
    assert row["models"] == [], row
    cluster.parts[gone].kill(signal.SIGTERM)
    with api.lock:
        del api.pods[gone]
    return gone
