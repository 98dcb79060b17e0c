"""Dashboard and alert rules against a real Prometheus that scrapes a running server."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from support import (
    REPOSITORY,
    Server,
    fp32_body,
    free_ports,
    infer_url,
    stop_process,
    wait_for,
)

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
RULES = REPOSITORY / "deploy" / "prometheus" / "atoll-rules.yml"
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "atoll.json"
pytestmark = pytest.mark.skipif(
    not (PROMETHEUS and PROMTOOL), reason="Prometheus is missing: apt-get install prometheus"
)


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[str]:
    """A Prometheus that scrapes `server` ten times a second; its URL."""
    (port,) = free_ports(1)
    config = tmp_path / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: 100ms, evaluation_interval: 1s}}\n"
        f"rule_files: ['{RULES}']\n"
        f"scrape_configs:\n"
        f"  - job_name: atoll\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{server.metrics_port}']}}]\n"
    )
    assert PROMETHEUS
    process = subprocess.Popen(
        [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return requests.get(f"{url}/-/ready", timeout=5).ok
        except requests.ConnectionError:
            return False

    try:
        assert wait_for(ready)
        yield url
    finally:
        stop_process(process)


def results(url: str, expression: str) -> list[object]:
    answer = requests.get(f"{url}/api/v1/query", params={"query": expression}, timeout=60)
    assert answer.ok, (expression, answer.text)
    return answer.json()["data"]["result"]


def test_the_rules_are_valid() -> None:
    assert PROMTOOL
    # The cluster's metrics are compared with their rules in the cluster crate.
    files = [str(RULES), str(RULES.with_name("atoll-cluster-rules.yml"))]
    done = subprocess.run([PROMTOOL, "check", "rules", *files], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_panel_is_without_data(server: Server, prometheus: str) -> None:
    asked = threading.Event()

    def send() -> None:
        while not asked.is_set():
            body = fp32_body(1.0)
            assert requests.post(infer_url(server, "identity_fp32"), json=body, timeout=60).ok
            time.sleep(0.02)

    # Rates are those of the last seconds: requests must still come when the last panel is asked.
    sender = threading.Thread(target=send)
    sender.start()
    dashboard = json.loads(DASHBOARD.read_text())
    queries = {
        (panel["title"], target["expr"].replace("$__rate_interval", "10s").replace("$model", ".*"))
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    assert len(queries) >= len(dashboard["panels"]) >= 10
    try:
        for title, expression in sorted(queries):
            assert wait_for(lambda: bool(results(prometheus, expression))), (title, expression)
    finally:
        asked.set()
        sender.join()


def test_the_rules_read_metrics_that_exist(server: Server, prometheus: str) -> None:
    groups = requests.get(f"{prometheus}/api/v1/rules", timeout=60).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 6
    page = server.metrics() + "up{"
    for rule in rules:
        for word in rule["query"].replace("(", " ").replace("{", " ").replace("[", " ").split():
            if word.startswith(("atoll_", "nv_")):
                assert word in page, (rule["name"], word)
    assert wait_for(lambda: bool(results(prometheus, "up")))
