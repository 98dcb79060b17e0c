"""The Kubernetes manifests: every document against the published schemas, and every flag and variable against the binary."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache

import kubernetes_validate
import pytest
import yaml

from support import BINARY, REPOSITORY

MANIFESTS = REPOSITORY / "deploy" / "kubernetes" / "atoll.yaml"
VERSIONS = ["1.27", "1.32"]


class StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, of which a plain reader keeps the last."""


def no_duplicates(loader: StrictLoader, node: yaml.MappingNode, deep: bool = False) -> dict:
    keys = [loader.construct_object(key, deep=deep) for key, _ in node.value]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert not twice, f"{twice} twice at {node.start_mark}"
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, no_duplicates)


@cache
def documents() -> list[dict]:
    return list(yaml.load_all(MANIFESTS.read_text(), StrictLoader))  # noqa: S506


def of_kind(kind: str) -> list[dict]:
    return [document for document in documents() if document["kind"] == kind]


def containers() -> list[dict]:
    return [container for d in of_kind("Deployment") for container in d["spec"]["template"]["spec"]["containers"]]


@cache
def help_of(role: str) -> str:
    return subprocess.run([str(BINARY), "cluster", role, "--help"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_is_what_kubernetes_takes(version: str) -> None:
    assert len(documents()) > 8
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_are_strict() -> None:
    broken = yaml.safe_load(yaml.safe_dump(of_kind("Deployment")[0]))
    broken["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_containers_are_started_with_flags_there_are() -> None:
    assert {container["args"][1] for container in containers()} == {"scheduler", "frontend", "backend"}
    for container in containers():
        command, role, *rest = container["args"]
        text = help_of(role)
        assert command == "cluster"
        for flag in (word for word in rest if word.startswith("--")):
            assert re.search(rf"{flag}\b", text), f"{role} has no {flag}"
        names = [entry["name"] for entry in container["env"]]
        names += [name for source in container["envFrom"] for name in config(source["configMapRef"]["name"])]
        for name in names:
            # What all commands have stands in the help of the program itself.
            known = f"[env: {name}" in text or f"[env: {name}" in help_of("frontend")
            assert known, f"{role} reads no {name}"


def config(name: str) -> dict:
    (found,) = [document for document in of_kind("ConfigMap") if document["metadata"]["name"] == name]
    return found["data"]


def test_what_names_others_names_some_that_are_there() -> None:
    deployments = {d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"] for d in of_kind("Deployment")}
    selects = lambda labels: any(labels.items() <= own.items() for own in deployments.values())  # noqa: E731
    for deployment in of_kind("Deployment"):
        own = deployments[deployment["metadata"]["name"]]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= own.items()
    for service in of_kind("Service"):
        assert selects(service["spec"]["selector"])
        ports = {port["name"] for container in containers() for port in container.get("ports", [])}
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    for budget in of_kind("PodDisruptionBudget"):
        assert selects(budget["spec"]["selector"]["matchLabels"])
    for scaler in of_kind("HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] in deployments
    claims = {claim["metadata"]["name"] for claim in of_kind("PersistentVolumeClaim")}
    for deployment in of_kind("Deployment"):
        for volume in deployment["spec"]["template"]["spec"].get("volumes", []):
            assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_gpus_and_probes_are_asked_for() -> None:
    for container in containers():
        assert "readinessProbe" in container
        if container["name"] == "backend":
            assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
