"""The console as it is met: long open, with many spans, before frontends, restarts and refusals."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import requests

from browser import Browser
from secure import token
from support import ASSETS, BINARY, Demo, Server, free_ports, serve, wait_for
from test_console_access import drop_file

# How long a page stays open; set the variable for a longer test.
OPEN_S = float(os.environ.get("ATOLL_TEST_CONSOLE_S", "15"))
# A file to which figures are written, as JSON.
REPORT = os.environ.get("ATOLL_TEST_CONSOLE_REPORT")
STATUS = "document.getElementById('status').textContent"
ERRORS = "[...document.querySelectorAll('main .error')].map((one) => one.textContent).join('')"
LIVE = "document.getElementById('status').className === 'status live'"


def report(name: str, figures: object) -> None:
    if not REPORT:
        return
    file = Path(REPORT)
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, name: figures}, indent=1) + "\n")


def test_the_page_is_small(demo: str, browser: Browser) -> None:
    browser.call("Network.enable")
    browser.open(demo)
    assert browser.wait(LIVE)
    sizes = browser.evaluate(
        "['navigation', 'resource'].flatMap((type) => performance.getEntriesByType(type))"
        ".filter(({ name }) => !name.includes('/v2/')).map((entry) => [entry.name,"
        " entry.transferSize, entry.encodedBodySize])"
    )
    assert len(sizes) >= 10 and all(sent > 0 for _, sent, _ in sizes), sizes
    total = sum(sent for _, sent, _ in sizes)
    report("page_bytes", total)
    assert total <= 300_000, sizes
    # They are compressed.
    assert total < 100_000, sizes


def resident_bytes(process: int) -> int:
    words = Path(f"/proc/{process}/statm").read_text().split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


def heap_bytes(browser: Browser) -> int:
    browser.call("HeapProfiler.collectGarbage")
    metrics = browser.call("Performance.getMetrics")["metrics"]
    return int({metric["name"]: metric["value"] for metric in metrics}["JSHeapUsedSize"])


def test_neither_the_page_nor_the_server_grows(
    demo: str, demo_process: Demo, browser: Browser
) -> None:
    """With ATOLL_TEST_CONSOLE_S=600, ten minutes."""
    browser.call("Performance.enable")
    browser.call("HeapProfiler.enable")
    browser.open(f"{demo}/#timeline")
    # Rings that fill within the test: of the page, and of what the server keeps for a viewer.
    capacity = 2_000 if OPEN_S < 120 else 20_000
    assert browser.wait("atoll.pages.timeline.store.size > 100")
    browser.evaluate(f"atoll.pages.timeline.store.capacity = {capacity};"
                     " atoll.pages.timeline.store.clear();"
                     " atoll.pages.timeline.store.data = new Float64Array(0)")
    full = f"atoll.pages.timeline.store.count > {capacity}"
    assert browser.wait(full, 600)
    pages = ["now", "timeline", "models", "cluster", "timeline"]
    samples = []
    began = time.monotonic()
    turn = 0
    while time.monotonic() - began < OPEN_S or len(samples) < 4:
        browser.go(pages[turn % len(pages)])
        turn += 1
        time.sleep(min(OPEN_S / 10, 10))
        samples.append({
            "seconds": round(time.monotonic() - began, 1),
            "heap_bytes": heap_bytes(browser),
            "server_bytes": resident_bytes(demo_process.process.pid),
        })
    report("open", samples)
    assert browser.evaluate("atoll.pages.timeline.store.size") <= capacity
    # A minute of figures fills up in the first minute; afterwards nothing may grow but the ring of
    # spans of the server, which takes 8 MB. Of each half the least counts: requests in flight take
    # tens of megabytes for a moment.
    later = [one for one in samples if one["seconds"] > min(OPEN_S / 3, 90)]
    halves = later[: len(later) // 2], later[len(later) // 2 :]
    for name, most in [("heap_bytes", 6 << 20), ("server_bytes", 24 << 20)]:
        before, after = (min(one[name] for one in half) for half in halves)
        assert after - before < most, (name, samples)
    assert browser.errors() == []


SPANS = """
(async (count) => {
  const { timeline } = atoll.pages;
  const numbers = new Float64Array(count * 14);
  const from = 1e12;
  for (let index = 0; index < count; index += 1) {
    const at = index * 14;
    const begin = from + index * 20e3;
    const request = index % 2;
    const end = begin + 60e3 + (index % 7) * 9e3;
    numbers.set([request ? 0 : 1, 0, index % 8, index % 3 ? 0 : 1, index,
      request ? index : index % 4, 1, 0, 9, index % 5 ? 0 : 1, begin + 5e3, begin + 9e3, begin,
      end], at);
  }
  timeline.store.clear();
  timeline.spans(numbers);
  const found = {};
  for (const [name, width] of [["all", count * 20e3], ["tenth", count * 2e3], ["close", 2e6]]) {
    const times = [];
    const frames = [];
    let last = 0;
    for (let frame = 0; frame < 60; frame += 1) {
      // Another part of it in every frame.
      timeline.look(from + frame * width * 1e-3, from + frame * width * 1e-3 + width / 1.5);
      const now = await new Promise((resolve) => requestAnimationFrame(resolve));
      times.push(timeline.drawMs);
      if (last) frames.push(now - last);
      last = now;
    }
    const middle = (list) => list.sort((a, b) => a - b)[list.length >> 1];
    found[name] = { draw_ms: middle(times), most_ms: Math.max(...times), frame_ms: middle(frames) };
  }
  const listed = document.querySelectorAll('.slow button').length;
  return { size: timeline.store.size, found, listed };
})(100000)
"""


def test_a_hundred_thousand_spans_are_drawn(registry: Server, browser: Browser) -> None:
    browser.open(f"{registry.url}/#timeline")
    assert browser.wait(LIVE)
    result = browser.evaluate(SPANS)
    report("spans", result)
    assert result["size"] == 100_000 and result["listed"] == 8
    assert all(one["draw_ms"] > 0 for one in result["found"].values()), result
    # They are on the canvas: not all of it has one colour.
    colours = browser.evaluate(
        "(() => { const canvas = document.querySelector('.timeline canvas');"
        " const { data } = canvas.getContext('2d').getImageData(140, 50, canvas.width - 150, 60);"
        " const seen = new Set(); for (let at = 0; at < data.length; at += 4)"
        " seen.add(data[at] * 65536 + data[at + 1] * 256 + data[at + 2]); return seen.size; })()"
    )
    assert colours >= 3
    assert browser.errors() == []


def test_a_page_follows_a_server_that_restarts(tmp_path: Path, browser: Browser) -> None:
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(ASSETS / "digits.onnx", models / "digits.onnx")
    ports = free_ports(3)
    server = serve(models, tmp_path / "server.log", ports=ports)
    try:
        browser.open(f"{server.url}/#models")
        assert browser.wait(f"{LIVE} && document.querySelector('tbody tr')")
        server.stop()
        assert browser.wait(f"{STATUS}.includes('onnection')")
        # What was shown stays, and the page says that it is old.
        assert browser.wait(f"{ERRORS}.includes('does not reply')")
        assert browser.wait("!document.getElementById('problem').hidden")
        server = serve(models, tmp_path / "server.log", ports=ports)
        assert browser.wait(LIVE)
        # The error goes when its cause has gone.
        gone = f"!{ERRORS} && document.getElementById('problem').hidden"
        assert browser.wait(gone), browser.evaluate(ERRORS)
        assert browser.wait("document.querySelector('tbody').innerText.includes('ready')")
    finally:
        server.stop()


FAULT = """
(() => {
  const real = fetch;
  window.fetch = (path, options) => {
    if (!path.startsWith('/v2/atoll/models/')) return real(path, options);
    window.fetch = real;
    window.failed = true;
    const stream = new ReadableStream({ start: (one) => one.error(new TypeError('cut')) });
    return Promise.resolve(REPLY);
  };
  document.querySelector('tbody button.link').click();
})()
"""


@pytest.mark.parametrize(
    "reply", ["new Response(stream)", "new Response('{\"error\": \"gone\"}', { status: 404 })"]
)
def test_a_passing_failure_does_not_stay(demo: str, browser: Browser, reply: str) -> None:
    """A reply that ends in the middle, and a model that is unloaded while it is read."""
    browser.open(f"{demo}/#models")
    assert browser.wait("document.querySelector('tbody button.link')")
    browser.evaluate(FAULT.replace("REPLY", reply))
    assert browser.evaluate("failed")
    browser.evaluate("document.querySelector('tbody button.link').click()")
    shown = f"document.querySelector('tr.chosen') && !{ERRORS}"
    assert browser.wait(shown), browser.evaluate(ERRORS)
    assert browser.errors() == []


def test_a_page_asks_for_the_token(tmp_path: Path, browser: Browser) -> None:
    models, data = tmp_path / "models", tmp_path / "data"
    models.mkdir()
    shutil.copy(ASSETS / "digits.onnx", models / "digits.onnx")
    good = token(data, "--scope", "metrics", "--name", "viewer")
    server = serve(models, tmp_path / "server.log", "--data-dir", str(data))
    open_dialog = "document.getElementById('token-dialog').open"

    def enter(text: str) -> None:
        assert browser.wait(open_dialog)
        browser.evaluate(f"document.getElementById('token').value = '{text}';"
                         " document.querySelector('#token-form button').click()")

    try:
        browser.open(server.url)
        assert browser.wait(open_dialog)
        enter("wrong")
        error = "document.getElementById('token-error').textContent"
        assert browser.wait(f"{open_dialog} && {error}"), browser.evaluate(STATUS)
        enter(good)
        assert browser.wait(LIVE) and not browser.evaluate(open_dialog)
        # It is kept for the tab, and not in the address.
        assert good not in browser.evaluate("location.href")
        browser.open(f"{server.url}/#now")
        assert browser.wait(LIVE)
        # What this token may not do is said.
        browser.go("models")
        unload = "document.querySelector('[data-key=\"Unload digits\"]')"
        assert browser.wait(unload), browser.evaluate(ERRORS)
        browser.evaluate(f"{unload}.click()")
        assert browser.wait(f"{ERRORS}.includes('scope')"), browser.evaluate(ERRORS)
        assert not browser.evaluate(open_dialog)
    finally:
        server.stop()


def test_what_is_no_model_is_refused_in_words(registry: Server, browser: Browser) -> None:
    browser.open(f"{registry.url}/#models")
    assert browser.wait("document.querySelector('.drop')")
    error = "document.querySelector('main .error').textContent"

    def submit(name: str) -> str:
        browser.evaluate("document.querySelector('main .error').textContent = ''")
        assert browser.wait("!document.querySelector('form.panel').hidden")
        browser.evaluate(f"document.querySelector('form.panel input').value = '{name}';"
                         " document.querySelector('form.panel').requestSubmit()")
        assert browser.wait(f"{error} && !document.querySelector('form.panel button[type=submit]')"
                            ".disabled")
        return browser.evaluate(error)

    drop_file(browser, os.urandom(5000), "garbage.onnx")
    text = submit("garbage")
    assert "onnx" in text.lower() or "protobuf" in text, text
    # A file that is too large is refused before it is sent: the server would cut the connection.
    drop_file(browser, b"", "empty.onnx")
    assert browser.wait(f"{error}.includes('empty')"), browser.evaluate(error)
    # A name that the server would refuse does not get there.
    drop_file(browser, b"x", "x.onnx")
    assert browser.wait("!document.querySelector('form.panel').hidden")
    browser.evaluate("document.querySelector('form.panel input').value = '../x'")
    assert not browser.evaluate("document.querySelector('form.panel').checkValidity()")
    assert requests.post(f"{registry.url}/v2/repository/index", json={}, timeout=60).json() == []


def test_a_frontend_shows_models_rates_and_backends(tmp_path: Path, browser: Browser) -> None:
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(ASSETS / "digits.onnx", models / "digits.onnx")
    ports = free_ports(3)
    command = [str(BINARY), "serve", "--cluster", "--model-repository", str(models)]
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        command += [flag, str(port)]
    server = Server(ports, command, tmp_path / "cluster.log").start()
    body = {"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32",
                        "data": [0.5] * 64}]}
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            reply = requests.post(f"{server.url}/v2/models/digits/infer", json=body, timeout=60)
            assert reply.status_code in (200, 503), reply.text
            time.sleep(0.01)

    def ready() -> bool:
        return requests.get(f"{server.url}/v2/models/digits/ready", timeout=60).ok

    try:
        assert wait_for(ready, 120)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            browser.open(server.url)
            rows = "[...document.querySelectorAll('main tbody tr')].map((row) => row.innerText)"
            model = f"{rows}.some((row) => /^digits\\s+(real time|best effort)\\s+[1-9]/.test(row))"
            assert browser.wait(model), browser.evaluate(rows)
            backend = f"{rows}.some((row) => /serving[^]*digits/.test(row))"
            assert browser.wait(backend), browser.evaluate(rows)
            assert browser.evaluate(STATUS) == "Live: frontend of 1 backend"
            # The backend's own console has the devices.
            link = browser.evaluate("document.querySelector('main tbody th a').href")
            assert requests.get(f"{link}v2/atoll/live", timeout=60, stream=True).ok
            browser.go("timeline")
            assert browser.wait("document.querySelector('.empty:not([hidden])')"
                                "?.textContent.includes('backend')")
        finally:
            ended.set()
            sender.join()
        assert requests.get(f"{server.url}/v2/atoll/trace", timeout=60).status_code == 501
        assert browser.errors() == []
    finally:
        server.stop()
