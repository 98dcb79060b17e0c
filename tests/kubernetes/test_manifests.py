"""The API server validates and stores every document of the manifests and of the chart."""

from __future__ import annotations

import json

import pytest

import documents
from api_server import ApiServer

TLS = ("--set", "tls.secret=atoll-tls")
S3 = ("--set", "models.store=s3://bucket/atoll,models.secret=aws")
CHARTS = {"plain": (), "hpa": ("--set", "scaling=hpa"), "none": ("--set", "scaling=none")}
POOLS = '[{"name": "l4", "kind": "l4", "price": 0.8, "nodeSelector": {"gpu": "l4"}}, '
POOLS += '{"name": "a100", "kind": "a100", "replicas": 0, "tolerations": [{"operator": "Exists"}]}]'
CHARTS |= {"tls": TLS, "s3": S3, "pools": ("--set-json", f"backend.pools={POOLS}")}


def check(api: ApiServer, namespace: str, found: list[dict]) -> None:
    """Creates everything on the server, which validates it, and reads it back: the server stored
    every field that was sent, so it knows all of them."""
    api.namespace(namespace)
    words = ("-n", namespace, "-f", "-")
    first = api.kubectl("apply", "--server-side", *words, documents=found)
    assert len(first.splitlines()) == len(found), first
    stored = json.loads(api.kubectl("get", *words, "-o", "json", documents=found))["items"]
    for document, kept in zip(found, stored, strict=True):
        assert (kept["kind"], kept["apiVersion"]) == (document["kind"], document["apiVersion"])
        assert lost_fields(document, kept, document["kind"]) == []


def lost_fields(sent: object, kept: object, path: str) -> list[str]:
    """Paths of what was sent and is not stored as it was sent."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [
            lost
            for key, value in sent.items()
            # The server omits empty lists and maps.
            if not (key not in kept and value in ([], {}, None))
            for lost in lost_fields(value, kept.get(key), f"{path}.{key}")
        ]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        # The server may order them differently.
        found = [min((lost_fields(item, other, f"{path}[]") for other in kept), key=len)
                 for item in sent]
        return [lost for item in found for lost in item]
    return [] if sent == kept else [f"{path}: {sent!r} became {kept!r}"]


def test_the_manifests_are_accepted(api: ApiServer) -> None:
    check(api, "atoll", documents.for_this_version(documents.load(documents.MANIFESTS)))


@pytest.mark.parametrize("name", CHARTS)
def test_the_chart_is_accepted(api: ApiServer, name: str) -> None:
    check(api, f"sea-{name}", in_namespace(CHARTS[name], f"sea-{name}"))


def in_namespace(values: tuple[str, ...], namespace: str) -> list[dict]:
    return documents.for_this_version(documents.chart(*values, "--namespace", namespace))


def test_the_server_refuses_what_the_manifests_must_not_have(api: ApiServer) -> None:
    """The check can fail: unknown values, wrong types and dangling selectors are refused."""
    found = documents.for_this_version(documents.load(documents.MANIFESTS))
    deployment = documents.find(found, "Deployment", "atoll-backend")
    api.namespace("refused")
    deployment["metadata"]["namespace"] = "refused"
    deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] = "other"
    text = api.kubectl("apply", "--server-side", "-f", "-", documents=[deployment], check=False)
    assert "`selector` does not match template `labels`" in text, text
    found = documents.for_this_version(documents.load(documents.MANIFESTS))
    deployment = documents.find(found, "Deployment", "atoll-backend")
    deployment["metadata"]["namespace"] = "refused"
    documents.container(deployment)["readynessProbe"] = {}
    text = api.kubectl("apply", "--server-side", "-f", "-", documents=[deployment], check=False)
    assert "readynessProbe" in text, text
