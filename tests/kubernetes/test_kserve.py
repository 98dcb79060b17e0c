"""The runtime for KServe: its documents match KServe's published models and definitions, and what
it runs serves a repository."""

from __future__ import annotations

import ast
import os
import re
import shutil
import zipfile
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import requests
import yaml

import documents
from api_server import ApiServer
from support import (
    ASSETS, BINARY, PATIENCE_SECONDS, REPOSITORY, Server, fetch_wheel, free_ports, wait_for,
)

VERSION = "0.21.0"
# The definitions have two megabytes; the loader in C reads them in a second.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# A folder with KServe's definitions, such as config/crd/full of its repository.
DEFINITIONS = os.environ.get("KSERVE_CRDS")
BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}


def runtime() -> dict:
    return documents.find(documents.load(documents.KSERVE), "ServingRuntime", "atoll")


def service() -> dict:
    return documents.find(documents.load(documents.KSERVE), "InferenceService", "atoll")


@cache
def models() -> dict[str, dict[str, str]]:
    """Types of the fields of every class in KServe's package, by the names in documents."""
    found = {}
    with zipfile.ZipFile(fetch_wheel("kserve", VERSION)) as wheel:
        for name in wheel.namelist():
            if not re.fullmatch(r"kserve/models/v1\w+\.py", name):
                continue
            for node in ast.parse(wheel.read(name)).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name] = fields(node)
    return found


def fields(node: ast.ClassDef) -> dict[str, str]:
    tables = {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in node.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
    }
    types, names = tables.get("openapi_types", {}), tables.get("attribute_map", {})
    return {names[key]: kind for key, kind in types.items()}


PLAIN = {"str": str, "bool": bool, "int": int, "float": (int, float), "object": object}


def mismatches(value: object, kind: str, path: str) -> list[str]:
    """What of `value` is not of a type in the notation of KServe's models."""
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{path} is not a list"]
        return [m for item in value for m in mismatches(item, match[1], f"{path}[]")]
    if match := re.fullmatch(r"dict\(str, (.*)\)", kind):
        items = value.items()
        return [m for key, item in items for m in mismatches(item, match[1], f"{path}.{key}")]
    if kind in PLAIN:
        return [] if isinstance(value, PLAIN[kind]) else [f"{path} is not a {kind}"]
    if kind not in models():
        # A type of Kubernetes itself; the pod below has all of them.
        return []
    known = models()[kind]
    unknown = [f"{path}.{key} is unknown" for key in value if key not in known]
    return unknown + [
        m for key, item in value.items() if key in known
        for m in mismatches(item, known[key], f"{path}.{key}")
    ]


def test_the_documents_match_the_models_of_kserve() -> None:
    assert mismatches(runtime(), "V1alpha1ServingRuntime", "runtime") == []
    assert mismatches(service(), "V1beta1InferenceService", "service") == []
    # The check can fail.
    wrong = service()
    wrong["spec"]["predictor"]["model"]["storageURI"] = "x"
    wrong["spec"]["predictor"]["minReplicas"] = "1"
    assert len(mismatches(wrong, "V1beta1InferenceService", "service")) == 2


def test_the_pod_matches_the_schema_of_kubernetes() -> None:
    spec = {key: runtime()["spec"][key] for key in ("containers", "volumes")}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.32", strict=True)
    model = service()["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime()["metadata"]["name"]
    formats = [(entry["name"], entry["version"]) for entry in
               runtime()["spec"]["supportedModelFormats"]]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats
    assert model["protocolVersion"] in runtime()["spec"]["protocolVersions"]
    (tag,) = re.findall(r"docker build -t (\S+) \.", (REPOSITORY / "Dockerfile").read_text())
    assert spec["containers"][0]["image"] == f"{tag}:latest"


def without_empty_defaults(schema: object) -> object:
    """A server of 1.20 reads an empty string that is a default as null, and refuses it."""
    if isinstance(schema, dict):
        return {
            key: without_empty_defaults(value)
            for key, value in schema.items()
            if not (key == "default" and value == "")
        }
    if isinstance(schema, list):
        return [without_empty_defaults(item) for item in schema]
    return schema


def is_established(definition: dict) -> bool:
    conditions = definition.get("status", {}).get("conditions") or []
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)


@pytest.mark.skipif(DEFINITIONS is None, reason="KSERVE_CRDS names no folder of definitions")
def test_an_api_server_with_the_definitions_of_kserve_accepts_them(api: ApiServer) -> None:
    for resource in ("servingruntimes", "inferenceservices"):
        text = (Path(DEFINITIONS) / f"serving.kserve.io_{resource}.yaml").read_text()
        definition = without_empty_defaults(yaml.load(text, Loader))
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        api.call("POST", path, definition)
        kind = f"{path}/{resource}.serving.kserve.io"
        assert wait_for(lambda: is_established(api.call("GET", kind)))  # noqa: B023
    api.namespace("kserve")
    found = [runtime(), service()]
    create = lambda: api.kubectl(  # noqa: E731
        "create", "-n", "kserve", "-f", "-", documents=found, check=False
    )
    text = ""

    def is_created() -> bool:
        # The definitions are served a moment after they are established.
        nonlocal text
        text = create()
        return "no matches for kind" not in text

    assert wait_for(is_created)
    assert "servingruntime.serving.kserve.io/atoll created" in text, text
    assert "inferenceservice.serving.kserve.io/atoll created" in text, text
    broken = runtime()
    broken["metadata"]["name"] = "broken"
    broken["spec"]["supportedModelFormats"][0]["version"] = 1
    text = api.kubectl("create", "-n", "kserve", "-f", "-", documents=[broken], check=False)
    assert "spec.supportedModelFormats" in text and "Invalid value" in text, text


def test_the_runtime_serves_a_repository(tmp_path: Path) -> None:
    """The container's own arguments, with the storage that KServe mounts, on a CPU."""
    repository = tmp_path / "models"
    (repository / "digits" / "1").mkdir(parents=True)
    shutil.copy(ASSETS / "digits.onnx", repository / "digits" / "1" / "model.onnx")
    container = runtime()["spec"]["containers"][0]
    http, grpc, metrics = free_ports(3)
    local = {"/mnt/models": str(repository), "cuda:0": "cpu", "0.0.0.0": "127.0.0.1"}
    local |= {"8080": str(http), "9000": str(grpc), "8002": str(metrics)}
    arguments = []
    for word in container["args"]:
        flag, _, value = word.partition("=")
        arguments.append(f"{flag}={local.get(value, value)}" if value else flag)
    server = Server([http, grpc, metrics], [str(BINARY), *arguments], tmp_path / "log")
    try:
        server.start()
        path = container["readinessProbe"]["httpGet"]["path"]
        assert requests.get(server.url + path, timeout=PATIENCE_SECONDS).status_code == 200
        url = f"{server.url}/v2/models/digits/infer"
        reply = requests.post(url, json=BODY, timeout=PATIENCE_SECONDS)
        assert reply.status_code == 200, reply.text
    finally:
        server.stop()
