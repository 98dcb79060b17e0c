"""The manifests and the chart, as a cluster of 1.20 without GPUs takes them."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import yaml

from support import REPOSITORY

MANIFESTS = REPOSITORY / "deploy" / "kubernetes" / "atoll.yaml"
CHART = REPOSITORY / "deploy" / "chart" / "atoll"
KSERVE = REPOSITORY / "deploy" / "kserve" / "atoll.yaml"
# The API server is of 1.20, which has these two kinds under their older versions; the fields that
# the manifests use are the same in both. Everything else is applied as it is.
OLDER = {
    "PodDisruptionBudget": ("policy/v1", "policy/v1beta1"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "autoscaling/v2beta2"),
}


def load(path: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def chart(*values: str) -> list[dict]:
    command = [str(Path(sys.executable).parent / "helm"), "template", "reef", str(CHART)]
    command += ["--namespace", "sea", *values]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def for_this_version(documents: list[dict]) -> list[dict]:
    documents = copy.deepcopy(documents)
    for document in documents:
        newer, older = OLDER.get(document["kind"], (None, None))
        if document["apiVersion"] == newer:
            document["apiVersion"] = older
    return documents


def find(documents: list[dict], kind: str, name: str) -> dict:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def adapted(store: str, scheduler: list[str]) -> list[dict]:
    """The manifests for the test's store, on CPUs, with these arguments of the scheduler beside
    --kubernetes-scale."""
    documents = for_this_version(load(MANIFESTS))
    settings = find(documents, "ConfigMap", "atoll")["data"]
    # A busy machine must not lose a lease.
    settings |= {"ATOLL_STORE": store, "ATOLL_LEASE_MS": "20000"}
    own = container(find(documents, "Deployment", "atoll-scheduler"))
    own["args"] = own["args"][:3] + scheduler
    backend = container(find(documents, "Deployment", "atoll-backend"))
    backend["args"] = [word.replace("cuda:0", "cpu") for word in backend["args"]]
    backend["args"].append("--threads=1")
    # One frontend: two cores run all of this.
    find(documents, "Deployment", "atoll-frontend")["spec"]["replicas"] = 1
    return documents


def stateful(store: str, namespace: str) -> list[dict]:
    """The manifests with two backends as a StatefulSet, of which the scheduler keeps one."""
    limits = ["--replicas-min=1", "--replicas-max=1", "--scale-down-after-secs=2"]
    documents = adapted(store, [*limits, "--scale-cooldown-secs=1", f"--cluster={namespace}"])
    kinds = ("ConfigMap", "PersistentVolumeClaim", "ServiceAccount", "Role", "RoleBinding")
    scheduler = find(documents, "Deployment", "atoll-scheduler")
    scheduler["spec"]["replicas"] = 1
    own = container(scheduler)
    own["args"] = [word.replace("deployment/", "statefulset/") for word in own["args"]]
    backend = find(documents, "Deployment", "atoll-backend")
    backend["kind"] = "StatefulSet"
    backend["spec"] |= {"replicas": 2, "serviceName": "atoll-backend"}
    container(backend)["args"].append(f"--cluster={namespace}")
    documents = [d for d in documents if d["kind"] in kinds] + [scheduler, backend]
    for document in documents:
        document["metadata"]["namespace"] = namespace
        for subject in document.get("subjects", []):
            subject["namespace"] = namespace
    role = find(documents, "Role", "atoll-scheduler")
    role["rules"][0]["resources"] = ["statefulsets/scale"]
    return documents


def pools(store: str, namespace: str, scaled: dict[str, str], scheduler: list[str]) -> list[dict]:
    """The manifests with a Deployment of backends for each pool of `scaled`, which has the keys of
    its --kubernetes-scale by the pool's kind."""
    cluster = f"--cluster={namespace}"
    documents = adapted(store, [*scheduler, cluster])
    own = container(find(documents, "Deployment", "atoll-scheduler"))
    words = [word for word in own["args"] if not word.startswith("--kubernetes-scale")]
    own["args"] = words + [
        f"--kubernetes-scale=deployment/atoll-backend-{kind},kind={kind},{keys}"
        for kind, keys in scaled.items()
    ]
    container(find(documents, "Deployment", "atoll-frontend"))["args"].append(cluster)
    backend = find(documents, "Deployment", "atoll-backend")
    documents = [d for d in documents if d is not backend and d["kind"] != "Namespace"]
    for kind in scaled:
        pool = copy.deepcopy(backend)
        pool["metadata"]["name"] = f"atoll-backend-{kind}"
        for labels in (pool["spec"]["selector"]["matchLabels"],
                       pool["spec"]["template"]["metadata"]["labels"]):
            labels["atoll/pool"] = kind
        container(pool)["args"] += [f"--device-kind={kind}", cluster]
        documents.append(pool)
    names = [f"atoll-backend-{kind}" for kind in scaled]
    find(documents, "Role", "atoll-scheduler")["rules"][0]["resourceNames"] = names
    for document in documents:
        document["metadata"]["namespace"] = namespace
        for subject in document.get("subjects", []):
            subject["namespace"] = namespace
    return documents


def container(deployment: dict) -> dict:
    return deployment["spec"]["template"]["spec"]["containers"][0]
