"""A model store in S3: frontends upload models, backends download them and refuse changed ones."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from bucket import BucketServer
from cluster import Cluster
from support import ASSETS, retry_while_lost, wait_for

BODY = {
    "inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}]
}
STORE = "s3://models/atoll"

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    server = BucketServer(tmp_path, "models")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.fixture
def repository(models: Path, tmp_path: Path) -> Path:
    """A first model: a frontend without any model is not ready."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(models / "identity_fp32.onnx", folder)
    return folder


@pytest.fixture
def cluster(tmp_path: Path, bucket: BucketServer, repository: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path, repository)
    running.scheduler("s1")
    running.model_store = [
        "--model-store",
        STORE,
        "--model-cache",
        str(tmp_path / "frontend-cache"),
    ]
    running.frontend("f1")
    start_backend(running, "b1")
    yield running
    running.stop()


def start_backend(cluster: Cluster, name: str) -> None:
    cache = cluster.folder / f"{name}-cache"
    cluster.backend(name, "--model-store", STORE, "--model-cache", str(cache))


def register(cluster: Cluster, name: str, content: bytes) -> requests.Response:
    url = cluster.frontends["f1"].url
    return requests.post(
        f"{url}/register", files={"name": (None, name), "model": content}, timeout=60
    )


def infer(cluster: Cluster, name: str) -> requests.Response:
    url = f"{cluster.frontends['f1'].url}/v2/models/{name}/infer"
    return retry_while_lost(lambda: requests.post(url, json=BODY, timeout=60))


def contents(bucket: BucketServer) -> list[str]:
    """The objects without the marks of who registered them."""
    return [key for key in bucket.keys() if not key.startswith("atoll/owners/")]


def test_a_registered_model_reaches_backends_through_the_bucket(
    cluster: Cluster, bucket: BucketServer
) -> None:
    cluster.wait_ready()
    cluster.wait_status(lambda status: len(status["backends"]) == 1)
    model = (ASSETS / "digits.onnx").read_bytes()
    digest = hashlib.sha256(model).hexdigest()
    key = f"atoll/sha256/{digest}"
    reply = register(cluster, "mine", model)
    assert reply.status_code == 200, f"{reply.text}\n{cluster.logs()}"
    assert contents(bucket) == [key]
    assert bucket.read(key) == model
    reply = infer(cluster, "mine")
    assert reply.status_code == 200, reply.text
    cache = cluster.folder / "b1-cache" / "sha256"
    assert [path.name for path in cache.iterdir()] == [digest]
    assert (cache / digest).read_bytes() == model
    # The same content under another name is the same object.
    assert register(cluster, "again", model).status_code == 200
    assert contents(bucket) == [key]

    changed = bytearray(model)
    changed[len(changed) // 2] ^= 1
    bucket.write(key, bytes(changed))
    assert_new_backend_refuses(cluster, digest)
    # The backend that has the model continues to serve it.
    assert infer(cluster, "mine").status_code == 200
    # Registering again repairs the object, and the backend that refused it loads it.
    reply = register(cluster, "mine", model)
    assert reply.status_code == 200, reply.text
    assert bucket.read(key) == model
    ready = lambda status: all(len(m["backends"]) == 2 for m in status["models"])  # noqa: E731
    cluster.wait_status(ready)
    assert [path.name for path in (cluster.folder / "b2-cache" / "sha256").iterdir()] == [digest]


def assert_new_backend_refuses(cluster: Cluster, digest: str) -> None:
    start_backend(cluster, "b2")
    # The backend retries, so the reason and the partial file appear and disappear.
    wanted = (
        f"{STORE}/sha256/{digest} is not what was registered: its SHA-256 is",
        "register the model again",
    )
    cluster.wait_status(
        lambda status: any(all(text in why for text in wanted) for why in reasons(status, "b2"))
    )
    cache = cluster.folder / "b2-cache" / "sha256"
    assert wait_for(lambda: list(cache.iterdir()) == []), "the backend keeps a refused file"


def reasons(status: dict, backend: str) -> list[str]:
    """Why a backend cannot load models, as it reports in the store."""
    rows = [row for row in status["backends"] if row["name"] == backend]
    failed = [held for row in rows for held in row["models"] if held["state"] == "failed"]
    return [held["reason"] for held in failed]


def test_the_error_names_a_missing_bucket(
    bucket: BucketServer, repository: Path, tmp_path: Path
) -> None:
    cluster = Cluster(tmp_path, repository)
    try:
        cluster.scheduler("s1")
        cluster.backend("b1")
        cluster.model_store = [
            "--model-store",
            "s3://no-such-bucket",
            "--model-cache",
            str(tmp_path / "cache"),
        ]
        cluster.frontend("f1")
        cluster.wait_ready()
        reply = register(cluster, "mine", (ASSETS / "digits.onnx").read_bytes())
        assert reply.status_code in (503, 404), reply.text
        assert "s3://no-such-bucket" in reply.text and "--model-store" in reply.text, reply.text
    finally:
        cluster.stop()
