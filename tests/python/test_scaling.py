"""The scheduler scales down real processes: a backend that is not needed is drained, marked, and
only then removed."""

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

BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}
POD = "/api/v1/namespaces/sea/pods/"
SCALE = "/apis/apps/v1/namespaces/sea/deployments/reef/scale"
# A frontend may learn later than a backend that a model moved; until then these are refusals of a
# backend that no longer has the model.
MOVED = (LOST, "is not ready: unloaded")

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    server = KubernetesApi(2, ["b1", "b2"])
    yield server
    server.stop()


def test_a_backend_is_drained_before_it_is_removed(
    tmp_path: Path, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        # Both exist before the first plan, so both get models.
        cluster.wait_status(lambda status: len(status["backends"]) == 2)
        cluster.role("scheduler", "s1", "--kubernetes-scale", "deployment/reef", *limits, *times)
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        has_loaded = lambda name: "model ready" in cluster.processes[name].text()  # noqa: E731
        assert wait_for(lambda: has_loaded("b1") and has_loaded("b2")), cluster.logs()
        # One backend suffices even if the machine was slow during profiling.
        load = Load(cluster, ["m0", "m1", "m2"], BODY, clients=2, pause=0.1).start()
        try:
            cluster.wait_status(lambda status: (status.get("scaling") or {}).get("replicas") == 1)
            removed = remove_marked_pod(cluster, api)
            cluster.wait_status(
                lambda status: removed not in [row["name"] for row in status["backends"]]
            )
            load.wait_more(20)
        finally:
            load.stop()
        load.check(f"{load.codes()}\n{cluster.logs()}", MOVED)
        if load.refused():
            warnings.warn(f"refused: {load.refused()}", stacklevel=1)
        assert_models_moved_first(cluster, removed)
        status = cluster.status()
        assert status["scaling"]["wanted"] == 1 and status["scaling"]["errors"] == 0, status[
            "scaling"
        ]
        assert removed not in {
            backend for model in status["models"] for backend in model["backends"]
        }
        assert wait_for(lambda: frontend.metric("atoll_cluster_backends_wanted") == 1), (
            frontend.metrics()
        )
        assert frontend.metric("atoll_cluster_backends_present") in (1, 2)
        command = [str(BINARY), "cluster", "status", "--store", cluster.store, "--leader-only"]
        text = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert "deployment/reef: 1 wanted, 1 requested" in text, text
    finally:
        cluster.stop()


def remove_marked_pod(cluster: Cluster, api: KubernetesApi) -> str:
    """Ends the pod that Kubernetes would: the drained one that was marked before the replicas
    were reduced."""
    with api.lock:
        writes, marked = (
            list(api.writes),
            [name for name, notes in api.pods.items() if COST in notes],
        )
    replicas = [2, *(body["spec"]["replicas"] for path, body in writes if path == SCALE)]
    assert replicas[-1] == 1, writes
    fewer = next(
        index
        for index, (path, body) in enumerate(writes)
        if path == SCALE and body["spec"]["replicas"] < 2
    )
    (removed,) = marked
    assert (POD + removed, {"metadata": {"annotations": {COST: "-1000"}}}) in writes[:fewer], writes
    (row,) = [row for row in cluster.status()["backends"] if row["name"] == removed]
    assert row["models"] == [], row
    cluster.processes[removed].kill(signal.SIGTERM)
    with api.lock:
        del api.pods[removed]
    return removed


def assert_models_moved_first(cluster: Cluster, removed: str) -> None:
    """By the logs, each model was ready on the other backend before this one unloaded it."""
    (other,) = {"b1", "b2"} - {removed}
    event = re.compile(r'^(\S+) .* model (ready|unloaded) model="(\w+)"', re.MULTILINE)
    events = {name: event.findall(cluster.processes[name].text()) for name in (removed, other)}
    unloaded = [(at, model) for at, what, model in events[removed] if what == "unloaded"]
    assert unloaded, f"it never had a model\n{cluster.logs()}"
    for at, model in unloaded:
        before = [what for when, what, name in events[other] if name == model and when < at]
        assert before[-1:] == ["ready"], (
            f"{removed} unloaded {model} before {other} had it\n{cluster.logs()}"
        )
