"""The description of REST: what it says is true for requests that are made from it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from browser import CHROMIUM, Browser
from support import Server, make_repository, serve, wait_for

# Answers by design: not supported here, not now, too late. What is left is 500.
CONFIG = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 501, 503, 504]

[[operations]]
include-tag = ["Models", "Inference"]
parameters = { "path.model" = "add_sub", "path.version" = 1 }

[[operations]]
include-operation-id = "change_settings"
parameters = { "path.model" = "add_sub" }

[[operations]]
include-path = "/v2/atoll/trace/devices/{device}/requests/{request}"
parameters = { "path.device" = 0, "path.request" = 1 }

[[operations]]
include-path = "/console/{file}"
parameters = { "path.file" = "app.js" }
"""
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]
# The stream never ends.
ENDLESS = "/v2/atoll/live"


def fuzz(folder: Path, description: str, url: str, *flags: str, examples: int = 10) -> None:
    (folder / "schemathesis.toml").write_text(CONFIG)
    command = [str(Path(sys.executable).with_name("st")), "--config-file", "schemathesis.toml",
               "run", description, "--url", url, "--exclude-path", ENDLESS,
               "--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing",
               "--max-examples", str(examples), "--seed", "1", "--continue-on-failure",
               "--no-color", "--warnings", "off", *flags]
    # The limit only ends what would never end; it is below the one of a test.
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.fixture(scope="module")
def fuzzed(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: fuzzing unloads models and changes their settings."""
    folder = tmp_path_factory.mktemp("fuzzed")
    models = make_repository(models, folder / "models")
    running = serve(models, folder / "server.log", "--data-dir", str(folder / "data"))
    yield running
    running.stop()


def test_every_reply_is_one_that_is_described(fuzzed: Server, tmp_path: Path) -> None:
    fuzz(tmp_path, f"{fuzzed.url}/openapi.json", fuzzed.url, "--exclude-path", "/metrics")
    fuzzed.assert_alive()


def test_the_admin_port_has_what_is_described(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.metrics_port}"
    fuzz(tmp_path, f"{url}/openapi.json", url, "--include-path", "/metrics",
         "--include-path", "/v2/atoll/status")


def test_a_frontend_replies_as_it_is_described(repository: Path, tmp_path: Path) -> None:
    """The same document describes a cluster's frontend, which has queries."""
    frontend = serve(repository, tmp_path / "server.log", "--cluster")
    try:
        wanted = ["Models", "Queries", "Repository", "Server"]
        tags = [flag for tag in wanted for flag in ("--include-tag", tag)]
        cluster = f"{frontend.url}/v2/atoll/cluster"
        shows = lambda what: requests.get(cluster, timeout=60).json()[what]  # noqa: E731
        assert wait_for(lambda: bool(shows("backends") and shows("models") and shows("leader")))
        fuzz(tmp_path, f"{frontend.url}/openapi.json", frontend.url, *tags,
             "--exclude-path", "/metrics", examples=5)
        frontend.assert_alive()
    finally:
        frontend.stop()


def test_the_live_stream_refuses_what_its_description_excludes(server: Server) -> None:
    for wrong in ["interval_ms=49", "interval_ms=10001", "interval_ms=x", "spans=2"]:
        reply = requests.get(f"{server.url}{ENDLESS}?{wrong}", timeout=60)
        assert reply.status_code == 400 and reply.json()["error"]
    with requests.get(f"{server.url}{ENDLESS}?interval_ms=50", timeout=60, stream=True) as reply:
        assert reply.headers["content-type"] == "application/octet-stream"


@pytest.mark.skipif(not CHROMIUM, reason="Chromium is missing: apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 380])
def test_the_page_shows_every_operation(server: Server, tmp_path: Path, width: int) -> None:
    described = requests.get(f"{server.url}/openapi.json", timeout=60).json()
    methods = {"get", "post", "put", "patch", "delete"}
    count = sum(len(methods & path.keys()) for path in described["paths"].values())
    browser = Browser(tmp_path / "profile")
    try:
        browser.resize(width, 800)
        browser.open(f"{server.url}/docs#infer")
        assert browser.wait("document.querySelector('main h1')?.textContent === 'API'")
        assert browser.evaluate("document.querySelectorAll('details').length") == count
        # The operation that the address names is open, with the fields of its body.
        assert browser.wait("document.getElementById('infer').open")
        shown = browser.evaluate("document.getElementById('infer').innerText")
        assert "datatype" in shown and "Inference-Header-Content-Length" in shown
        assert "Scope: infer or admin" in shown
        browser.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        assert browser.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        field = "document.querySelector('input[type=search]')"
        browser.evaluate(f"{field}.value = 'rollback'; {field}.dispatchEvent(new Event('input'))")
        visible = "[...document.querySelectorAll('details')].filter((one) => !one.hidden).length"
        assert browser.evaluate(visible) == 2
        assert browser.errors() == []
    finally:
        browser.close()
