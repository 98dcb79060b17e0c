"""`atoll plan` with rates from a real Prometheus server that has days of recorded counters."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from support import BINARY, free_ports, wait_for

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="prometheus and promtool are not installed (Debian package: prometheus)",
)

DAY = 86_400
HOUR = 3_600
STEP = 300
# A whole day in UTC, so that folded windows begin at midnight.
FIRST = 20_000 * DAY
DAYS = 2
PROFILES = (
    "model,mig_gpcs,batch,procs,throughput_total_rps,latency_ms\n"
    "net,1,4,1,100,40\nnet,2,4,1,210,19\nnet,7,4,1,700,6\n"
)
SERVICES = "".join(
    f'[[service]]\nname = "{name}"\nmodel = "net"\nrate = 1\nslo_ms = 300\n' for name in "ab"
)


def rate(name: str, time_s: int) -> float:
    """Service a is busy from 18 to 20 o'clock; b is busy at noon of the second day."""
    hour = time_s % DAY // HOUR
    if name == "a":
        return 900.0 if 18 <= hour < 20 else 60.0
    return 300.0 if hour == 12 and time_s >= FIRST + DAY else 30.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    lines = ["# TYPE requests counter"]
    for name in "ab":
        for pod, share in (("one", 0.25), ("two", 0.75)):
            count = 0.0
            for time_s in range(FIRST, FIRST + DAYS * DAY, STEP):
                lines.append(f'requests_total{{app="{name}",pod="{pod}"}} {count} {time_s}')
                count += share * STEP * rate(name, time_s)
    (folder / "counters.txt").write_text("\n".join([*lines, "# EOF", ""]))
    made = subprocess.run(
        [PROMTOOL, "tsdb", "create-blocks-from", "openmetrics", "counters.txt", "data"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    (folder / "prometheus.yml").write_text("global: {}\n")
    [port] = free_ports(1)
    command = [
        PROMETHEUS,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return requests.get(f"{address}/-/ready", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    try:
        assert wait_for(ready), (folder / "log").read_text()
        yield address
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def plan(address: str, tmp_path: Path):
    (tmp_path / "services.toml").write_text(SERVICES)
    (tmp_path / "profiles.csv").write_text(PROFILES)

    def run(query: str, *more: str) -> subprocess.CompletedProcess[str]:
        inputs = ["--services", "services.toml", "--profiles", "profiles.csv"]
        source = ["--prometheus", address, "--query", query, "--service-label", "app"]
        range_ = ["--start", str(FIRST), "--end", str(FIRST + DAYS * DAY - 1)]
        return subprocess.run(
            [str(BINARY), "plan", *inputs, *source, *range_, *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def windows(done: subprocess.CompletedProcess[str]) -> list[dict]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["windows"]


QUERY = "sum by (app) (rate(requests_total[10m]))"


def test_windows_follow_the_recorded_rates(plan) -> None:
    folded = windows(plan(QUERY, "--window-s", str(2 * HOUR), "--json"))
    assert [row["start_s"] for row in folded] == list(range(0, DAY, 2 * HOUR))
    peaks = {row["start_s"] // HOUR: row["rate"] for row in folded}
    # Prometheus extrapolates at the ends of a range; nowhere else does a rate differ.
    assert peaks[18] == pytest.approx(930, rel=0.02)
    assert peaks[12] == pytest.approx(360, rel=0.02)
    assert peaks[6] == pytest.approx(90, rel=0.02)
    evening = next(row for row in folded if row["start_s"] == 18 * HOUR)
    assert evening["gpus"] > folded[3]["gpus"] and evening["created"] > 0
    days = windows(plan(QUERY, "--window-s", str(DAY), "--unfolded", "--json"))
    assert [round(row["rate"], -1) for row in days] == [930, 1200]


def test_a_percentile_leaves_single_hours_out(plan) -> None:
    [day] = windows(plan(QUERY, "--window-s", str(DAY), "--percentile", "90", "--json"))
    # Two of 24 hours are busy for a, one of 48 for b.
    assert day["rate"] == pytest.approx(90, rel=0.02)


def test_mistakes_are_named_with_query_and_remedy(plan) -> None:
    for query, code, what in (
        ("sum by (app) (rate(requests_total[10m])", 2, "parse error"),
        ("rate(requests_total[10m])", 2, "sum by (app)"),
        ("sum by (pod) (rate(requests_total[10m]))", 2, "no label 'app'; it has pod"),
        ("nothing", 2, "no samples"),
        ("sum by (app) (-requests_total)", 2, "is not from 0"),
    ):
        done = plan(query)
        assert done.returncode == code, done.stderr
        assert what in done.stderr and query in done.stderr, done.stderr


def test_a_fine_step_over_days_is_asked_for_in_parts(plan) -> None:
    # 17,280 steps are more than a server answers at once.
    rows = windows(plan(QUERY, "--step-s", "10", "--json"))
    assert len(rows) == 24
