"""The page Cluster, with a real cluster that changes while it is open."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser
from cluster import SHORT_LEASE_MS, Cluster
from support import ASSETS

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
