"""SLO kept while a server refuses requests: in the console, in `atoll top` and in the metrics."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from browser import Browser
from support import BINARY, Server, fp32_body, infer_url, serve

# Nothing takes so long: only what is refused misses it.
SLO = "class = 'rt'\nslo_ms = 600000\nqueue_capacity = 1\n"
# A batch of these has one row: the queue of the batcher fills instead of that of the core.
BATCHED = "batching = { policy = 'window', max_batch = 1 }\n"


@pytest.fixture(params=["", BATCHED], ids=["alone", "batched"])
def full(request: pytest.FixtureRequest, models: Path, tmp_path: Path) -> Iterator[Server]:
    """A server whose model takes one request and keeps one."""
    folder = tmp_path / "models" / "slow"
    (folder / "1").mkdir(parents=True)
    shutil.copy(models / "slow.onnx", folder / "1" / "model.onnx")
    (folder / "atoll.toml").write_text(SLO + request.param)
    running = serve(folder.parent, tmp_path / "server.log", "--threads", "1")
    yield running
    running.stop()


@contextmanager
def too_many(server: Server) -> Iterator[list[int]]:
    """More requests than the model takes; the codes of their replies."""
    codes: list[int] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(0.05):
            reply = requests.post(infer_url(server, "slow"), json=fp32_body(1.0), timeout=60)
            codes.append(reply.status_code)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield codes
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def cell(title: str) -> str:
    """The text of the cell under a title, in the row of the model."""
    return ("((title) => { const table = document.querySelector('main table');"
            " const at = [...table.querySelectorAll('thead th')]"
            ".findIndex((one) => one.textContent === title);"
            " return [...table.querySelectorAll('tbody tr')]"
            ".find((row) => row.innerText.startsWith('slow'))?.cells[at].textContent; })"
            f"('{title}')")


def test_refused_requests_have_not_kept_the_slo(full: Server, browser: Browser) -> None:
    browser.open(f"{full.url}/#now")
    assert browser.wait("document.querySelector('main table')")
    with too_many(full) as codes:
        failed = f"Number({cell('Failed')}) > 0"
        assert browser.wait(failed), (codes, browser.evaluate("document.body.innerText"))
        done = subprocess.run(
            [str(BINARY), "top", "--once", "--json", "--url", full.url],
            capture_output=True, text=True, timeout=120, check=True,
        )
    assert {200, 503} <= set(codes)
    share = float(browser.evaluate(cell("SLO kept")).removesuffix(" %"))
    assert 0 <= share < 100
    (row,) = json.loads(done.stdout)["models"]
    # Nearly all of a second's requests are refused; at most some ends of slow ones are among them.
    assert row["failed"] > 0 and row["slo_kept"] < 1, row
    labels = {"model": "slow", "version": "1"}
    name = "atoll_slo_requests_total"
    assert full.metric(name, **labels, result="kept") == codes.count(200)
    assert full.metric(name, **labels, result="missed") == codes.count(503)
    # The page and the metric agree, once the page has the last figures.
    kept, missed = codes.count(200), codes.count(503)
    expected = int(1000 * kept / (kept + missed)) / 10
    assert browser.wait(f"{cell('SLO kept')} === '{expected:.1f} %'"), (
        expected, browser.evaluate(cell("SLO kept"))
    )
    assert browser.errors() == []


def test_now_shows_queue_times_and_memory(full: Server, browser: Browser) -> None:
    browser.open(f"{full.url}/#now")
    assert browser.wait("document.querySelector('main table')")
    with too_many(full):
        # The request that is kept waits for the one that runs: milliseconds at least.
        for title in ["Wait, p50", "Wait, p99"]:
            assert browser.wait(f"/m?s$/.test({cell(title)})"), browser.evaluate(cell(title))
        memory = f"/^[0-9.]+ (B|KiB|MiB)$/.test({cell('Memory')})"
        assert browser.wait(memory), browser.evaluate(cell("Memory"))
        legend = "document.querySelector('main .legend').innerText"
        assert browser.wait(f"/slow [0-9.]+ (B|KiB|MiB)/.test({legend})"), browser.evaluate(legend)
        done = subprocess.run(
            [str(BINARY), "top", "--once", "--url", full.url],
            capture_output=True, text=True, timeout=120, check=True,
        )
    lines = done.stdout.splitlines()
    assert any(line.startswith("MODEL") and "WAIT" in line for line in lines), done.stdout
    assert any(line.strip().startswith("memory: slow ") for line in lines), done.stdout
    assert browser.errors() == []
