"""The slowest steps of a model, measured on demand beside the requests of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from accessibility import violations
from browser import Browser
from secure import token
from support import ASSETS, Server, make_repository, serve, wait_for

DIGITS = (ASSETS / "digits.onnx").read_bytes()


def steps(server: Server, model: str = "digits", **kwargs: object) -> requests.Response:
    return requests.post(f"{server.url}/v2/atoll/models/{model}/steps", timeout=60, **kwargs)


def measured(server: Server, model: str = "digits", **kwargs: object) -> requests.Response:
    """The report; a model that was just loaded is being measured for other reasons."""
    replies = [steps(server, model, **kwargs)]
    wait_for(lambda: replies[-1].status_code != 503
             or replies.append(steps(server, model, **kwargs)) is not None)
    return replies[-1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("steps")
    (folder / "models").mkdir()
    (folder / "models" / "digits.onnx").write_bytes(DIGITS)
    running = serve(folder / "models", folder / "server.log", "--data-dir", str(folder / "data"))
    yield running
    running.stop()


def test_the_slowest_steps_come_first(served: Server) -> None:
    reply = measured(served)
    assert reply.ok, reply.text
    report = reply.json()
    times = [step["us"] for step in report["steps"]]
    assert len(times) == report["step_count"] >= 3 and times == sorted(times, reverse=True)
    assert times[0] > 0 and report["runs"] >= 1
    assert sum(times) == pytest.approx(report["total_us"], rel=1e-6)
    assert sum(step["share"] for step in report["steps"]) == pytest.approx(1, abs=1e-6)
    assert all(step["name"] and step["op"] for step in report["steps"])
    # The limits of a CPU are measured with the steps; there is nothing to tune.
    shares = [step["share_of_limit"] for step in report["steps"] if step["op"] == "Conv"]
    assert shares and all(share is not None and share > 0 for share in shares), report
    assert {step["bound"] for step in report["steps"]} <= {"compute", "memory", None}
    details = requests.get(f"{served.url}/v2/atoll/models/digits", timeout=60).json()
    assert details["tuning"] is None
    assert steps(served, "nobody").status_code == 404


def test_measurements_do_not_pile_up(served: Server) -> None:
    replies: list[requests.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(steps(served))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = {reply.status_code for reply in replies}
    assert 200 in codes and codes <= {200, 429, 503}, [reply.text for reply in replies]
    refused = [reply for reply in replies if not reply.ok]
    assert all("retry-after" in reply.headers for reply in refused)


def test_who_may_not_see_all_models_may_not_measure(models: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    infer = token(data, "--scope", "infer")
    metrics = token(data, "--scope", "metrics")
    repository = make_repository(models, tmp_path / "models")
    server = serve(repository, tmp_path / "server.log", "--data-dir", str(data),
                   "--read-only")
    try:
        bearer = lambda secret: {"authorization": f"Bearer {secret}"}  # noqa: E731
        assert steps(server, "add_sub").status_code == 401
        assert steps(server, "add_sub", headers=bearer(infer)).status_code == 403
        # It changes nothing.
        reply = measured(server, "add_sub", headers=bearer(metrics))
        assert reply.ok, reply.text
    finally:
        server.stop()


@pytest.mark.parametrize("width", [1280, 380])
def test_the_page_measures_steps(served: Server, browser: Browser, width: int) -> None:
    browser.resize(width, 900)
    browser.open(f"{served.url}/#models")
    panel = "document.querySelector('[aria-label=\"Slowest steps of digits\"]')"
    assert browser.wait(panel)
    settings = "document.querySelector('[aria-label=\"Settings of digits\"]').innerText"
    assert "nothing to tune" in browser.evaluate(settings)
    browser.evaluate(f"{panel}.querySelector('button').click()")
    assert browser.wait(f"{panel}.querySelector('tbody tr')"), browser.evaluate(
        f"{panel}.innerText")
    text = browser.evaluate(f"{panel}.innerText")
    assert "Conv" in text and "%" in text and "steps" in text
    assert browser.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    for scheme in ["light", "dark"]:
        browser.scheme(scheme)
        assert violations(browser) == []
    assert browser.errors() == []
