"""The metrics page: Triton's names and labels, and values that change."""

from __future__ import annotations

import re

import pytest
import requests

from support import Server, fp32_body, infer_url

COUNTERS = [
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
]
SAMPLE = re.compile(r'[a-zA-Z_:][\w:]*(\{(\w+="(\\.|[^"\\])*",?)*\})? \S+( \d+)?')


def infer(server: Server, *values: float) -> None:
    reply = requests.post(infer_url(server, "identity_fp32"), json=fp32_body(*values), timeout=60)
    assert reply.status_code == 200


def test_the_page_is_prometheus_text(server: Server) -> None:
    infer(server, 1.0)
    reply = requests.get(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60)
    assert reply.headers["Content-Type"].startswith("text/plain")
    for line in reply.text.splitlines():
        assert (
            not line or line.startswith(("# HELP ", "# TYPE ", "# EOF")) or SAMPLE.fullmatch(line)
        ), line


@pytest.mark.parametrize("name", COUNTERS)
def test_triton_counters_are_exported(server: Server, name: str) -> None:
    infer(server, 1.0)
    assert re.search(rf'^{name}\{{[^}}]*model="identity_fp32"', server.metrics(), re.MULTILINE)
    assert re.search(rf"^# TYPE {name} counter$", server.metrics(), re.MULTILINE)


def test_preemption_time_is_a_histogram(server: Server) -> None:
    text = server.metrics()
    name = "atoll_preemption_seconds"
    assert f"# TYPE {name} histogram" in text
    counts = [
        int(count)
        for count in re.findall(
            rf'^{name}_bucket\{{model="identity_fp32".* (\d+)$', text, re.MULTILINE
        )
    ]
    assert counts and counts == sorted(counts)
    assert server.metric(f"{name}_count", model="identity_fp32", version="1") == counts[-1]
    assert "# TYPE atoll_preemptions_caused_total counter" in text


PHASES = ["queue", "compute_input", "compute_infer", "compute_output"]


def test_the_phases_of_requests_add_up_to_their_time(server: Server) -> None:
    labels = {"model": "identity_fp32", "version": "1"}
    for _ in range(20):
        infer(server, 1.0, 2.0)
    whole = server.metric("nv_inference_request_duration_us", **labels)
    parts = [server.metric(f"nv_inference_{phase}_duration_us", **labels) for phase in PHASES]
    # Each is rounded down to a microsecond.
    assert 0 <= whole - sum(parts) <= len(parts)
    assert all(part > 0 for part in parts), dict(zip(PHASES, parts, strict=True))


@pytest.mark.parametrize("phase", ["request", *PHASES])
def test_every_phase_has_a_histogram(server: Server, phase: str) -> None:
    infer(server, 1.0)
    name = f"nv_inference_{phase}_duration_histogram_us"
    text = server.metrics()
    assert f"# TYPE {name} histogram" in text
    found = re.findall(
        rf'^{name}_bucket\{{model="identity_fp32",version="1",le="([^"]+)"\}} (\d+)$', text, re.M
    )
    bounds = [float(bound) for bound, _ in found]
    counts = [int(count) for _, count in found]
    assert bounds == sorted(bounds) and bounds[0] == 10 and bounds[-1] == float("inf")
    assert counts == sorted(counts) and counts[-1] > 0
    labels = {"model": "identity_fp32", "version": "1"}
    assert server.metric(f"{name}_count", **labels) >= counts[-1]
    assert server.metric(f"{name}_sum", **labels) >= 0


def test_runs_beside_best_effort_are_counted(server: Server) -> None:
    text = server.metrics()
    assert "# TYPE atoll_real_time_runs_total counter" in text
    assert re.search(r'^atoll_co_run_pairs\{device="cpu",decision="admitted"\} \d+$', text, re.M)


def test_gpu_metrics_are_absent_without_a_gpu(server: Server) -> None:
    """They are those of NVML, so a server on the CPU has none, not zeros."""
    if re.search(r'^atoll_resident_bytes\{device="cuda', server.metrics(), re.M):
        pytest.skip("the server has a GPU")
    assert "nv_gpu_" not in server.metrics() and "nv_energy" not in server.metrics()


def test_pending_requests_are_a_gauge(server: Server) -> None:
    assert "# TYPE nv_inference_pending_request_count gauge" in server.metrics()


def test_requests_are_counted(server: Server) -> None:
    labels = {"model": "identity_fp32", "version": "1"}
    names = (
        "nv_inference_request_success",
        "nv_inference_count",
        "nv_inference_request_duration_us",
    )
    before = [server.metric(name, **labels) for name in names]
    infer(server, 1.0, 2.0, 3.0)
    infer(server, 4.0)
    after = [server.metric(name, **labels) for name in names]
    assert after[0] - before[0] == 2
    assert after[1] - before[1] in (2, 4)  # rows, if the batch is known
    assert after[2] > before[2]


def test_failures_are_counted(server: Server) -> None:
    """A request that exceeds its timeout counts as a failure of its model."""
    before = server.metric("nv_inference_request_failure", model="slow")
    body = fp32_body(1.0, parameters={"timeout": 1000})
    assert requests.post(infer_url(server, "slow"), json=body, timeout=60).status_code in (503, 504)
    assert server.metric("nv_inference_request_failure", model="slow") == before + 1
