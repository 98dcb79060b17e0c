"""Fixtures: the models, and one server for the whole run.

ATOLL_BIN names the binary (default target/release/atoll). ATOLL_TEST_SERVER=HTTP,GRPC,METRICS
(ports) runs the protocol tests against a server that is already running, such as Triton, to check
the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from browser import CHROMIUM, Browser
from support import (
    BINARY,
    CACHE,
    STOP_SECONDS,
    Demo,
    Server,
    make_models,
    make_repository,
    serve,
    wait_for,
)

# Servers of tests stop at once, unless a test is about how they stop.
os.environ.setdefault("ATOLL_LAME_DUCK_MS", "0")

TINY = ["identity_fp32", "identity_int64", "identity_bytes", "add_sub", "slow"]


def pytest_configure() -> None:
    if "ATOLL_TEST_SERVER" not in os.environ and not BINARY.exists():
        pytest.exit(f"{BINARY} is missing; build it with: cargo build --release", returncode=2)


@pytest.fixture(scope="session")
def models() -> Path:
    """A folder of small models, kept between runs."""
    folder = CACHE / "test-models"
    make_models(folder, TINY)
    return folder


@pytest.fixture
def repository(models: Path, tmp_path: Path) -> Path:
    """A model repository that belongs to one test."""
    return make_repository(models, tmp_path / "models")


@pytest.fixture(scope="session")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    given = os.environ.get("ATOLL_TEST_SERVER")
    if given:
        yield Server([int(port) for port in given.split(",")]).start()
        return
    folder = tmp_path_factory.mktemp("server")
    running = serve(make_repository(models, folder / "models"), folder / "server.log")
    yield running
    running.stop()


@pytest.fixture
def http(server: Server) -> Iterator[http_client.InferenceServerClient]:
    client = http_client.InferenceServerClient(server.http, concurrency=4)
    yield client
    client.close()


@pytest.fixture
def grpc(server: Server) -> Iterator[grpc_client.InferenceServerClient]:
    client = grpc_client.InferenceServerClient(server.grpc)
    yield client
    client.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("Chromium is missing: apt-get install chromium")
    running = Browser(tmp_path / "profile")
    yield running
    running.close()


@pytest.fixture(scope="module")
def demo_process() -> Iterator[Demo]:
    running = Demo()
    assert wait_for(running.is_ready)
    yield running
    running.process.terminate()
    assert running.process.wait(timeout=STOP_SECONDS) == 0


@pytest.fixture
def demo(browser: Browser, demo_process: Demo) -> str:
    """The URL of a demo under load."""
    return demo_process.url


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without models that keeps those which are registered."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "models").mkdir()
    running = serve(folder / "models", folder / "server.log", "--data-dir", str(folder / "data"))
    yield running
    running.stop()
