"""Settings change while a model is served: at once, for good, and without a lost request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from accessibility import violations
from browser import Browser
from support import ASSETS, Server, fp32_body, infer_url, make_repository, serve, wait_for

MODEL = "identity_fp32"


def path(server: Server, model: str = MODEL) -> str:
    return f"{server.url}/v2/atoll/models/{model}"


def change(server: Server, settings: Any, model: str = MODEL) -> requests.Response:
    return requests.patch(path(server, model), json=settings, timeout=60)


def settings_of(server: Server, model: str = MODEL) -> dict[str, Any]:
    return requests.get(path(server, model), timeout=60).json()["settings"]


def start(folder: Path, *flags: str) -> Server:
    return serve(folder / "models", folder / "server.log", "--data-dir", str(folder / "data"),
                 *flags)


@pytest.fixture
def served(models: Path, tmp_path: Path) -> Iterator[Server]:
    make_repository(models, tmp_path / "models")
    running = start(tmp_path)
    yield running
    running.stop()


def test_no_request_is_lost_while_settings_change(served: Server) -> None:
    stop, lost, sent = threading.Event(), [], []

    def load() -> None:
        session = requests.Session()
        while not stop.is_set():
            reply = session.post(infer_url(served, MODEL), json=fp32_body(1, 2), timeout=60)
            (sent if reply.ok else lost).append(reply.text)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    policies = ["none", "auto", "window", "elastic", "adaptive", "lazy_drop"]
    for turn in range(30):
        reply = change(served, {
            "class": ["rt", "be"][turn % 2],
            "priority": turn + 1,
            "batching": {"policy": policies[turn % len(policies)], "max_batch": turn % 9},
        })
        assert reply.ok, reply.text
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert lost == [] and len(sent) > 50


def test_a_change_is_seen_and_kept(models: Path, tmp_path: Path) -> None:
    repository = make_repository(models, tmp_path / "models")
    files = {file: file.read_bytes() for file in repository.rglob("*") if file.is_file()}
    server = start(tmp_path)
    digits = (ASSETS / "digits.onnx").read_bytes()
    try:
        registered = requests.post(f"{server.url}/register", data={"name": "numbers"},
                                   files={"model": ("digits.onnx", digits)}, timeout=60)
        assert registered.ok, registered.text
        for model, kept in [(MODEL, "data_folder"), ("numbers", "registry")]:
            reply = change(server, {"class": "rt", "slo_ms": 40, "timeout_ms": 900}, model)
            assert reply.ok and reply.json()["kept"] == kept, reply.text
        # Requests that name no class have the new one.
        requests.post(infer_url(server, MODEL), json=fp32_body(1), timeout=60)
        text = requests.get(f"{server.url}/v2/models/{MODEL}/config", timeout=60).text
        assert "900" in text or settings_of(server)["timeout_ms"] == 900
        rows = requests.get(f"{server.url}/v2/atoll/trace?seconds=60", timeout=60).json()
        # Measurements, which have the class of best effort, may begin after it.
        assert any(one["ph"] == "b" and one.get("args", {}).get("class") == "rt"
                   for one in rows["traceEvents"])
    finally:
        server.stop()
    again = start(tmp_path)
    try:
        for model in [MODEL, "numbers"]:
            settings = settings_of(again, model)
            assert (settings["class"], settings["slo_ms"]) == ("rt", 40), model
        # Nothing is written where the user's files are.
        assert files == {file: file.read_bytes() for file in repository.rglob("*")
                         if file.is_file()}
        assert change(again, {"class": None, "slo_ms": None, "timeout_ms": None}).ok
        assert settings_of(again)["class"] == "be"
    finally:
        again.stop()


def test_what_is_wrong_is_named(served: Server) -> None:
    before = settings_of(served)
    for settings, named in [
        ({"priority": 0}, "priority"), ({"prio": 1}, "prio"), ({"slo_ms": -5}, "slo_ms"),
        ({"batching": {"policy": "now"}}, "batching.policy"), ({"labels": []}, "labels"),
        ([], "object"), ({"limits": {"rate": "1/x"}}, "limits.rate"),
    ]:
        reply = change(served, settings)
        assert reply.status_code == 400 and named in reply.json()["error"], reply.text
    assert change(served, {}, "nobody").status_code == 404
    assert settings_of(served) == before


def test_limits_hold_at_once(served: Server) -> None:
    assert change(served, {"limits": {"rate": "2/h"}}).ok
    replies = [requests.post(infer_url(served, MODEL), json=fp32_body(1), timeout=60)
               for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert change(served, {"limits": None}).ok
    assert requests.post(infer_url(served, MODEL), json=fp32_body(1), timeout=60).ok


def test_fixed_models_and_read_only_servers_refuse(models: Path, tmp_path: Path) -> None:
    make_repository(models, tmp_path / "models")
    for flags, status, named in [
        (["--model-control-mode", "none"], 503, "--model-control-mode"),
        (["--read-only"], 403, "read-only"),
        (["--allow-class", "be"], 403, "class"),
        (["--cluster"], 501, "register"),
    ]:
        server = start(tmp_path, *flags)
        try:
            ready = f"{server.url}/v2/models/{MODEL}/ready"
            assert wait_for(lambda: requests.get(ready, timeout=60).ok)  # noqa: B023
            reply = change(server, {"class": "rt"})
            assert reply.status_code == status and named in reply.text, (flags, reply.text)
        finally:
            server.stop()


@pytest.mark.parametrize("width", [1280, 380])
def test_the_page_changes_settings(served: Server, browser: Browser, width: int) -> None:
    browser.resize(width, 900)
    browser.open(f"{served.url}/#models")
    show = f"document.querySelector('[data-key=\"show {MODEL}\"]')"
    assert browser.wait(show)
    browser.evaluate(f"{show}.click()")
    panel = f"document.querySelector('[aria-label=\"Settings of {MODEL}\"]')"
    assert browser.wait(panel)
    browser.evaluate(f"{panel}.querySelector('button[aria-expanded]').click()")
    form = f"document.querySelector('form[aria-label=\"Change settings of {MODEL}\"]')"
    assert browser.wait(form)
    assert browser.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    for scheme in ["light", "dark"]:
        browser.scheme(scheme)
        # Rows that are halfway below the header would count as too small.
        browser.evaluate("scrollTo(0, 0)")
        assert violations(browser) == []
    # Without a change nothing is sent.
    browser.evaluate(f"{form}.requestSubmit()")
    assert browser.wait(f"{form}.textContent.includes('No setting is changed')")
    field = (f"[...{form}.querySelectorAll('label')]"
             ".find((label) => label.textContent.startsWith('{name}')).querySelector('*')")
    for name, value in [("Class", "rt"), ("SLO", "25"), ("Batching", "window")]:
        browser.evaluate(f"{field.format(name=name)}.value = '{value}'")
    browser.evaluate(f"{form}.requestSubmit()")
    assert browser.wait(f"{panel}?.innerText.includes('25 ms')"), browser.evaluate(
        "document.querySelector('main').innerText")
    message = browser.evaluate("document.querySelector('main [role=status]').textContent")
    assert "kept in the data folder" in message
    settings = settings_of(served)
    assert (settings["class"], settings["slo_ms"]) == ("rt", 25)
    assert settings["batching"]["policy"] == "window" and settings["priority"] == 100
    # What the server refuses is shown.
    browser.evaluate(f"{panel}.querySelector('button[aria-expanded]').click()")
    assert browser.wait(form)
    browser.evaluate(f"{field.format(name='Deadline')}.value = '99999999999'")
    browser.evaluate(f"{form}.requestSubmit()")
    assert browser.wait(f"{form}.textContent.includes('timeout_ms')")
    refused = [error for error in browser.errors() if "400" not in error]
    assert refused == []
