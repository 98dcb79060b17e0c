"""Fixtures of the tests against a real Kubernetes API server; run by `./test kubernetes`.

ATOLL_BIN names the binary (default target/release/atoll), KUBE_BIN a folder with kube-apiserver and
kubectl. ATOLL_KUBERNETES_LOG=FILE names the file for the log of scale steps (default
.cache/kubernetes/scaling.json).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from api_server import ApiServer  # noqa: E402
from support import BINARY  # noqa: E402


def pytest_configure() -> None:
    if not BINARY.exists():
        pytest.exit(f"{BINARY} is missing; build it with: cargo build --release", returncode=2)


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path_factory.mktemp("kubernetes"))
    yield server
    server.stop()
