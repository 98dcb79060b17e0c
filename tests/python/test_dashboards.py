"""Dashboard and alert rules against a real Prometheus that scrapes a running server."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from cluster import WAIT_SECONDS, Cluster, Load
from support import (
    ASSETS,
    REPOSITORY,
    Server,
    fp32_body,
    free_ports,
    infer_url,
    serve,
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


@contextmanager
def scraping(folder: Path, ports: list[int]) -> Iterator[str]:
    """A Prometheus that scrapes these ports ten times a second; its URL."""
    (port,) = free_ports(1)
    config = folder / "prometheus.yml"
    targets = ", ".join(f"'127.0.0.1:{target}'" for target in ports)
    config.write_text(
        f"global: {{scrape_interval: 100ms, evaluation_interval: 1s}}\n"
        f"rule_files: ['{RULES}']\n"
        f"scrape_configs:\n"
        f"  - job_name: atoll\n"
        f"    static_configs: [{{targets: [{targets}]}}]\n"
    )
    assert PROMETHEUS
    process = subprocess.Popen(
        [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
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


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[str]:
    """A Prometheus that scrapes `server`."""
    with scraping(tmp_path, [server.metrics_port]) as url:
        yield url


def queries_of(dashboard: Path) -> set[tuple[str, str]]:
    """Titles and expressions of a dashboard's panels, of all models."""
    panels = json.loads(dashboard.read_text())["panels"]
    queries = {
        (panel["title"], target["expr"].replace("$__rate_interval", "10s").replace("$model", ".*"))
        for panel in panels
        for target in panel["targets"]
    }
    assert len(queries) >= len(panels) >= 9
    return queries


def results(url: str, expression: str) -> list[dict[str, object]]:
    answer = requests.get(f"{url}/api/v1/query", params={"query": expression}, timeout=60)
    assert answer.ok, (expression, answer.text)
    return answer.json()["data"]["result"]


def numbers(url: str, expression: str) -> list[float]:
    """What a panel would draw: Grafana shows nothing for NaN, and infinity is no number."""
    values = [float(one["value"][1]) for one in results(url, expression)]
    return [value for value in values if math.isfinite(value)]


def test_a_panel_of_nan_alone_has_no_data(prometheus: str) -> None:
    assert results(prometheus, "vector(0) / 0") and not numbers(prometheus, "vector(0) / 0")
    assert not numbers(prometheus, "vector(1) / 0")
    assert numbers(prometheus, "vector(0)") == [0]


def test_the_rules_are_valid() -> None:
    assert PROMTOOL
    # The cluster's metrics are compared with their rules in the cluster crate.
    files = [str(RULES), str(RULES.with_name("atoll-cluster-rules.yml"))]
    done = subprocess.run([PROMTOOL, "check", "rules", *files], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def both_classes(models: Path, tmp_path: Path) -> Iterator[Server]:
    """A server with a real-time model that has an SLO, and best effort that it preempts."""
    folder = tmp_path / "models"
    for name, settings in [
        ("identity_fp32", "class = 'rt'\nslo_ms = 60000\n"),
        ("slow", "class = 'be'\n"),
    ]:
        (folder / name / "1").mkdir(parents=True)
        shutil.copy(models / f"{name}.onnx", folder / name / "1" / "model.onnx")
        (folder / name / "atoll.toml").write_text(settings)
    running = serve(folder, tmp_path / "server.log")
    yield running
    running.stop()


def test_no_panel_is_without_data(both_classes: Server, tmp_path: Path) -> None:
    asked = threading.Event()

    def send(model: str, pause: float) -> None:
        while not asked.is_set():
            reply = requests.post(infer_url(both_classes, model), json=fp32_body(1.0), timeout=60)
            assert reply.ok, reply.text
            time.sleep(pause)

    # Rates are those of the last seconds: requests must still come when the last panel is asked.
    senders = [
        threading.Thread(target=send, args=args) for args in [("identity_fp32", 0.02), ("slow", 0)]
    ]
    for sender in senders:
        sender.start()
    try:
        with scraping(tmp_path, [both_classes.metrics_port]) as prometheus:
            for title, expression in sorted(queries_of(DASHBOARD)):
                found = wait_for(lambda: bool(numbers(prometheus, expression)))
                assert found, (title, expression, results(prometheus, expression))
    finally:
        asked.set()
        for sender in senders:
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


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_no_panel_of_a_cluster_is_without_data(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "digits" / "1").mkdir(parents=True)
    shutil.copy(ASSETS / "digits.onnx", models / "digits" / "1" / "model.onnx")
    (models / "digits" / "atoll.toml").write_text("slo_ms = 10000\n")
    cluster = Cluster(tmp_path, models)
    body = {"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32",
                        "data": [0.5] * 64}]}
    load = None
    try:
        (admin,) = free_ports(1)
        cluster.scheduler("s1", "--metrics-port", str(admin))
        cluster.backend("b1", *cluster.model_store)
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        url = f"{frontend.url}/v2/models/digits/ready"
        assert wait_for(lambda: requests.get(url, timeout=60).ok, WAIT_SECONDS), cluster.logs()
        load = Load(cluster, ["digits"], body, clients=1).start()
        with scraping(tmp_path, [admin, frontend.metrics_port]) as prometheus:
            for title, expression in sorted(queries_of(DASHBOARD.with_name("atoll-cluster.json"))):
                found = wait_for(lambda: bool(numbers(prometheus, expression)))
                assert found, (title, expression, cluster.logs())
    finally:
        if load:
            load.stop()
        cluster.stop()
