"""The Kubernetes manifests and the chart, rendered by Helm: every document against the published schemas, and every flag and
variable against the binary."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from support import BINARY, REPOSITORY

MANIFESTS = REPOSITORY / "deploy" / "kubernetes" / "atoll.yaml"
CHART = REPOSITORY / "deploy" / "chart" / "atoll"
VERSIONS = ["1.27", "1.32"]


class StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, of which a plain reader keeps the last."""


def no_duplicates(loader: StrictLoader, node: yaml.MappingNode, deep: bool = False) -> dict:
    keys = [loader.construct_object(key, deep=deep) for key, _ in node.value]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    assert not twice, f"{twice} twice at {node.start_mark}"
    return yaml.SafeLoader.construct_mapping(loader, node, deep=deep)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, no_duplicates)


# The manifests, and the chart with values that reach all its branches.
S3 = (
    "models.store=s3://bucket/atoll,models.secret=aws,models.env.AWS_ENDPOINT_URL=http://minio:9000"
)
SOURCES = {
    "manifests": None,
    "chart": (),
    "chart-hpa": ("--set", "scaling=hpa"),
    "chart-none": ("--set", "scaling=none"),
    "chart-s3": (
        "--set",
        S3,
        "--set",
        "backend.gpu=2,backend.args={--best-effort-share=10}",
        "--is-upgrade",
    ),
}
every_source = pytest.mark.parametrize("source", SOURCES)


def helm(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "helm"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@cache
def documents(source: str) -> list[dict]:
    if SOURCES[source] is None:
        text = MANIFESTS.read_text()
    else:
        answer = helm("template", "reef", str(CHART), "--namespace", "sea", *SOURCES[source])
        assert answer.returncode == 0, answer.stderr
        text = answer.stdout
    return [document for document in yaml.load_all(text, StrictLoader) if document]  # noqa: S506


def of_kind(source: str, kind: str) -> list[dict]:
    return [document for document in documents(source) if document["kind"] == kind]


def pod_specs(source: str) -> list[dict]:
    return [deployment["spec"]["template"]["spec"] for deployment in of_kind(source, "Deployment")]


def containers(source: str) -> list[dict]:
    return [container for spec in pod_specs(source) for container in spec["containers"]]


@cache
def help_of(role: str) -> str:
    return subprocess.run(
        [str(BINARY), "cluster", role, "--help"], capture_output=True, text=True, check=True
    ).stdout


@every_source
@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_is_what_kubernetes_takes(source: str, version: str) -> None:
    assert len(documents(source)) >= 8
    for document in documents(source):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_are_strict() -> None:
    broken = yaml.safe_load(yaml.safe_dump(of_kind("manifests", "Deployment")[0]))
    broken["spec"]["replica"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_the_chart_passes_helms_own_checks_and_refuses_what_it_does_not_know() -> None:
    answer = helm("lint", "--strict", str(CHART))
    assert answer.returncode == 0, answer.stdout
    answer = helm("template", "reef", str(CHART), "--set", "scaling=both")
    assert answer.returncode != 0
    assert "atoll, hpa, none" in answer.stderr


@every_source
def test_containers_are_started_with_flags_there_are(source: str) -> None:
    assert {container["args"][1] for container in containers(source)} == {
        "scheduler",
        "frontend",
        "backend",
    }
    for container in containers(source):
        command, role, *rest = container["args"]
        text = help_of(role)
        assert command == "cluster"
        for flag in (word.split("=")[0] for word in rest if word.startswith("--")):
            assert re.search(rf"{flag}\b", text), f"{role} has no {flag}"
        names = [entry["name"] for entry in container["env"]]
        maps = [
            entry["configMapRef"]
            for entry in container.get("envFrom", [])
            if "configMapRef" in entry
        ]
        names += [name for reference in maps for name in config(source, reference["name"])]
        for name in names:
            # What all commands have stands in the help of the program itself.
            known = f"[env: {name}" in text or f"[env: {name}" in help_of("frontend")
            assert known or (name.startswith("AWS_") and name in text), f"{role} reads no {name}"


def config(source: str, name: str) -> dict:
    (found,) = [
        document
        for document in of_kind(source, "ConfigMap")
        if document["metadata"]["name"] == name
    ]
    return found["data"]


@every_source
def test_what_names_others_names_some_that_are_there(source: str) -> None:
    deployments = {
        d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"]
        for d in of_kind(source, "Deployment")
    }
    selects = lambda labels: any(labels.items() <= own.items() for own in deployments.values())  # noqa: E731
    for deployment in of_kind(source, "Deployment"):
        own = deployments[deployment["metadata"]["name"]]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= own.items()
    for service in of_kind(source, "Service"):
        assert selects(service["spec"]["selector"])
        ports = {
            port["name"] for container in containers(source) for port in container.get("ports", [])
        }
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
    for budget in of_kind(source, "PodDisruptionBudget"):
        assert selects(budget["spec"]["selector"]["matchLabels"])
    for scaler in of_kind(source, "HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] in deployments
    claims = {claim["metadata"]["name"] for claim in of_kind(source, "PersistentVolumeClaim")} or {
        "atoll-models"
    }
    for spec in pod_specs(source):
        mounted = {
            mount["name"]
            for container in spec["containers"]
            for mount in container.get("volumeMounts", [])
        }
        assert mounted == {volume["name"] for volume in spec.get("volumes", [])}
        for volume in spec.get("volumes", []):
            assert "emptyDir" in volume or volume["persistentVolumeClaim"]["claimName"] in claims


@every_source
def test_gpus_and_probes_are_asked_for(source: str) -> None:
    for container in containers(source):
        assert "readinessProbe" in container
        if container["name"] == "backend":
            gpus = 2 if source == "chart-s3" else 1
            assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus


@every_source
def test_exactly_one_decides_how_many_backends_there_are(source: str) -> None:
    """The scheduler, an autoscaler or nobody; whoever does not is not given the means, and no manifest resets who does."""
    (backend,) = [
        d for d in of_kind(source, "Deployment") if d["metadata"]["name"].endswith("-backend")
    ]
    (scheduler,) = [
        d for d in of_kind(source, "Deployment") if d["metadata"]["name"].endswith("-scheduler")
    ]
    name = backend["metadata"]["name"]
    spec = scheduler["spec"]["template"]["spec"]
    words = [word for argument in spec["containers"][0]["args"] for word in argument.split("=")]
    by_atoll = "--kubernetes-scale" in words
    by_hpa = any(
        s["spec"]["scaleTargetRef"]["name"] == name
        for s in of_kind(source, "HorizontalPodAutoscaler")
    )
    fixed = "replicas" in backend["spec"]
    assert [by_atoll, by_hpa, fixed].count(True) == 1
    assert fixed == (source == "chart-none") and by_hpa == (source == "chart-hpa")
    roles = of_kind(source, "Role")
    assert bool(roles) == by_atoll
    if by_atoll:
        assert f"deployment/{name}" in words
        allowed = may(source, spec["serviceAccountName"])
        scale = ("apps", "deployments/scale", name)
        assert allowed == {(*scale, "get"), (*scale, "patch")} | {
            ("", "pods", "*", verb) for verb in POD_VERBS
        }


# What the scheduler asks of pods: crates/cluster/tests/kubernetes.rs sees it do so.
POD_VERBS = ("get", "list", "patch")


def may(source: str, account: str) -> set[tuple[str, str, str, str]]:
    """What a service account is allowed, by group, resource, name and verb."""
    assert account in {a["metadata"]["name"] for a in of_kind(source, "ServiceAccount")}
    bound = [
        b
        for b in of_kind(source, "RoleBinding")
        if account in {subject["name"] for subject in b["subjects"]}
    ]
    names = {binding["roleRef"]["name"] for binding in bound}
    rules = [
        rule
        for role in of_kind(source, "Role")
        if role["metadata"]["name"] in names
        for rule in role["rules"]
    ]
    return {
        (group, resource, name, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ["*"])
        for verb in rule["verbs"]
    }


def test_answers_that_are_replayed_are_what_kubernetes_says() -> None:
    # Servers of the newer release: a pod has more to say there.
    version = VERSIONS[-1]
    paths = sorted((REPOSITORY / "crates" / "cluster" / "tests" / "kubernetes").glob("*.json"))
    kinds = Counter()
    for path in paths:
        answer = json.loads(path.read_text())
        kinds[answer["kind"]] += 1
        if answer["kind"] == "PodList":
            for pod in answer["items"]:
                kubernetes_validate.validate(
                    {"apiVersion": "v1", "kind": "Pod", **pod}, version, strict=True
                )
        elif answer["kind"] == "Scale":
            kubernetes_validate.validate(answer, version, strict=True)
        elif answer["kind"] == "Status":
            assert (
                answer["status"] == "Failure"
                and answer["reason"]
                and answer["message"]
                and answer["code"] >= 400
            )
    assert kinds["Scale"] >= 3 and kinds["PodList"] >= 3 and kinds["Status"] >= 4
