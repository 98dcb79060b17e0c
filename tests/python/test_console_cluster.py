"""The page Cluster, with a real cluster that changes while it is open."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from accessibility import violations
from browser import Browser
from cluster import SHORT_LEASE_MS, WAIT_SECONDS, Cluster, Load
from support import ASSETS, wait_for

MODELS = ["digits", "numbers", "figures"]
TEXT = "document.querySelector('main').innerText"

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "models"
    folder.mkdir()
    for name in MODELS:
        shutil.copy(ASSETS / "digits.onnx", folder / f"{name}.onnx")
    running = Cluster(tmp_path, folder, lease_ms=SHORT_LEASE_MS)
    yield running
    running.stop()


def row(name: str) -> str:
    """The text of the row of a backend or model, or nothing."""
    return ("([...document.querySelectorAll('tbody tr')].map((row) => row.innerText)"
            f".find((text) => text.startsWith('{name}')) || '')")


def test_the_page_follows_the_cluster_in_its_place(cluster: Cluster, browser: Browser) -> None:
    cluster.scheduler("s1")
    cluster.backend("b1", *cluster.model_store)
    frontend = cluster.frontend("f1")
    cluster.wait_ready()
    browser.resize(380, 700)
    browser.open(f"{frontend.url}/#cluster")
    assert browser.wait(f"{row('b1')}.includes('digits')"), browser.evaluate(TEXT)
    assert browser.wait(f"{row('figures')}.includes('b1 100 %')"), browser.evaluate(TEXT)
    assert browser.wait("document.querySelector('.figures').innerText.includes('s1')")
    # Who else is there, and why the plan is as it is.
    assert f"127.0.0.1:{frontend.http_port}" in browser.evaluate(row("f1"))
    plan = "document.querySelector('section[aria-label=Plan]').innerText"
    assert browser.wait(f"/Made because\\s+[a-z]/.test({plan})"), browser.evaluate(plan)
    assert browser.wait(f"/1 serve, at least [0-9.]+ are needed/.test({plan})"), (
        browser.evaluate(plan)
    )
    # A reader has gone to a part of a table.
    browser.evaluate(
        "(() => { const table = document.querySelector('[aria-label=Backends].scroll');"
        " table.focus(); table.scrollLeft = 60; window.table = table; })()"
    )
    assert browser.evaluate("table.scrollLeft") == 60
    cluster.backend("b2", *cluster.model_store)
    assert browser.wait(row("b2")), browser.evaluate(TEXT)
    assert browser.wait("document.querySelector('.figures dd').innerText.startsWith('2')")
    kept = "document.activeElement === table && table.scrollLeft === 60 && table.isConnected"
    assert browser.evaluate(kept)
    # A backend that is gone leaves the page, and the reader stays.
    cluster.processes["b2"].kill(signal.SIGTERM)
    assert browser.wait(f"!{row('b2')}"), browser.evaluate(TEXT)
    assert browser.evaluate(kept)
    # What is shown stays when the frontend does not reply.
    cluster.processes["f1"].kill(signal.SIGTERM)
    assert browser.wait("document.querySelector('main .error').textContent.includes('not reply')")
    assert browser.evaluate(row("b1")) and browser.evaluate(kept)


BODY = {"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32",
                    "data": [0.5] * 64}]}


def section(name: str) -> str:
    return f"(document.querySelector('section[aria-label={name}]')?.innerText || '')"


def test_canaries_and_reasons_are_shown(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(ASSETS / "digits.onnx", folder / "digits.onnx")
    cluster = Cluster(tmp_path, folder)
    load = None
    try:
        cluster.scheduler("s1")
        for name in ("b1", "b2"):
            cluster.backend(name, *cluster.model_store)
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        url = f"{frontend.url}/v2/models/digits/ready"
        assert wait_for(lambda: requests.get(url, timeout=60).ok, WAIT_SECONDS), cluster.logs()
        browser.resize(380, 900)
        browser.open(f"{frontend.url}/#cluster")
        assert browser.wait(f"{section('Canaries')}.includes('No model has a canary')")
        assert browser.wait(f"{section('Problems')}.includes('Nothing is wrong')"), (
            browser.evaluate(section("Problems"))
        )
        content = (ASSETS / "digits.onnx").read_bytes()
        form = {"name": "digits", "canary": "30%", "promote_after": "1h"}
        files = {key: (None, value) for key, value in form.items()}
        reply = requests.post(f"{frontend.url}/register", timeout=WAIT_SECONDS,
                              files={**files, "model": ("model.onnx", content)})
        assert reply.ok, f"{reply.text}\n{cluster.logs()}"
        # Version 2 beside 1, its share, its backends and what is missing.
        shown = f"/digits\\s+2\\s+1\\s+running\\s+30 %\\s+b[12]/.test({section('Canaries')})"
        assert browser.wait(shown), browser.evaluate(section("Canaries"))
        # A backend that stands still is ejected, and the page says why.
        load = Load(cluster, ["digits"], BODY).start()
        load.wait_more(50)
        name = browser.evaluate(f"{section('Routes')}.match(/b[12]/)[0]")
        cluster.processes[name].process.send_signal(signal.SIGSTOP)
        try:
            why = f"/(silent|failing): it/.test({row(name)})"
            assert browser.wait(f"{why} && /ejected|on probation/.test({row(name)})"), (
                browser.evaluate(TEXT)
            )
            for scheme in ["light", "dark"]:
                browser.scheme(scheme)
                assert violations(browser) == [], scheme
        finally:
            cluster.processes[name].process.send_signal(signal.SIGCONT)
        assert browser.wait(f"{row(name)}.includes('serving')"), browser.evaluate(TEXT)
        assert not browser.evaluate(why), browser.evaluate(TEXT)
        assert browser.errors() == []
    finally:
        if load:
            load.stop()
        cluster.stop()
