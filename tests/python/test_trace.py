"""Traces of a server and of a simulation, and the live stream that viewers read."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import requests

from support import ASSETS, BINARY, REPOSITORY, Server, fp32_body, infer_url
from trace_format import check_trace


def some_requests(server: Server, count: int = 5) -> None:
    for _ in range(count):
        answer = requests.post(infer_url(server, "identity_fp32"), json=fp32_body(1.0), timeout=60)
        assert answer.ok, answer.text


def test_a_trace_of_a_server_is_well_formed(server: Server, tmp_path: Path) -> None:
    some_requests(server)
    file = tmp_path / "trace.json"
    command = [str(BINARY), "trace", "--perfetto", str(file), "--seconds", "60"]
    command += ["--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trace = json.loads(file.read_text())
    phases = check_trace(trace)
    assert phases["X"] >= 5 and phases["b"] >= 5
    requests_of = [event for event in trace["traceEvents"]
                   if event["ph"] == "b" and event.get("args", {}).get("why")]
    assert any(event["name"] == "identity_fp32" for event in requests_of)
    assert all("It took" in event["args"]["why"] for event in requests_of
               if event["args"]["end"] == "done")


def test_a_simulation_writes_the_same_format(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    scenario = REPOSITORY / "scenarios" / "two_classes.toml"
    done = subprocess.run([str(BINARY), "sim", str(scenario), "--perfetto", str(file)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trace = json.loads(file.read_text())
    assert check_trace(trace)["X"] > 100
    ends = {event["args"]["end"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"done", "preempted"} <= ends


def disb(*flags: str) -> None:
    command = [str(BINARY), "bench", "disb", "--policy", "rt_only,atoll", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr


def processes(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs by the name of their process."""
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"]
             if event["ph"] == "M" and event["name"] == "process_name"}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and "end" in event["args"]:
            runs[names[event["pid"]]].append(event)
    return runs


def test_a_simulated_benchmark_writes_every_run(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    disb("--device", "sim", "--workload", "A,C", "--seconds", "2", "--perfetto", str(file))
    trace = json.loads(file.read_text())
    check_trace(trace)
    runs = processes(trace)
    assert [name.split(",")[0] for name in runs] == [
        "A under rt_only", "A under atoll", "C under rt_only", "C under atoll"]
    for name, of_run in runs.items():
        ends = {event["args"]["end"] for event in of_run}
        # Best effort is there, and is cut, where the policy runs it.
        assert ends == ({"done", "preempted"} if " atoll," in name else {"done"}), (name, ends)
    assert trace["otherData"]["lost_spans"] == 0


def test_a_benchmark_in_real_time_writes_every_run(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ["resnet152", "densenet201", "vgg19", "inception_v3", "distilbert"]:
        shutil.copy(ASSETS / "digits.onnx", models / f"{name}.onnx")
    file = tmp_path / "trace.json"
    disb("--device", "cpu", "--models", str(models), "--workload", "A", "--seconds", "1",
         "--warm-seconds", "0.1", "--perfetto", str(file))
    trace = json.loads(file.read_text())
    assert check_trace(trace)["b"] > 0
    runs = processes(trace)
    alone, both = runs.values()
    assert all("A under" in name and "cpu" in name for name in runs)
    classes = [{event["cat"] for event in events} for events in (alone, both)]
    assert classes == [{"rt"}, {"rt", "be"}]


def test_wrong_traces_are_refused(server: Server, tmp_path: Path) -> None:
    for seconds in ["0", "-1", "1e9", "nan", "x"]:
        answer = requests.get(f"{server.url}/v2/atoll/trace?seconds={seconds}", timeout=60)
        assert answer.status_code == 400, (seconds, answer.text)
    gone = requests.get(f"{server.url}/v2/atoll/trace/devices/0/requests/999999999", timeout=60)
    assert gone.status_code == 404
    gone = requests.get(f"{server.url}/v2/atoll/trace/devices/7/requests/1", timeout=60)
    assert gone.status_code == 404
    command = [str(BINARY), "trace", "--perfetto", str(tmp_path / "x")]
    command += ["--url", "http://127.0.0.1:9"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and "127.0.0.1:9" in failed.stderr


def frames(answer: requests.Response, wanted: int) -> list[tuple[bytes, bytes]]:
    """The first frames of a live stream: kind and content."""
    data, found = b"", []
    for chunk in answer.iter_content(None):
        data += chunk
        while len(data) >= 8:
            (length,) = struct.unpack("<I", data[:4])
            if len(data) < 8 + length:
                break
            found.append((data[4:5], data[8 : 8 + length]))
            data = data[8 + length :]
        if len(found) >= wanted:
            return found
    return found


def test_the_live_stream_has_figures_and_spans(server: Server) -> None:
    some_requests(server)
    url = f"{server.url}/v2/atoll/live?spans=true&interval_ms=100"
    with requests.get(url, stream=True, timeout=60) as answer:
        found = frames(answer, 2)
    figures = [json.loads(content) for kind, content in found if kind == b"J"]
    spans = b"".join(content for kind, content in found if kind == b"S")
    assert figures[0]["devices"][0]["name"] and figures[0]["now_ns"] > 0
    names = {number: name for _, number, name in figures[0]["names"]}
    assert len(spans) % (14 * 8) == 0
    records = [struct.unpack("<14d", spans[at : at + 112]) for at in range(0, len(spans), 112)]
    requested = [record for record in records if record[0] == 0]
    mine = [record for record in requested if names.get(record[2]) == "identity_fp32"]
    assert mine and all(record[12] <= record[10] <= record[13] for record in mine)
    number = int(mine[-1][4])
    route = f"{server.url}/v2/atoll/trace/devices/0/requests/{number}"
    why = requests.get(route, timeout=60).json()
    assert why["model"] == "identity_fp32" and why["sentence"].startswith("It took")
    assert sum(part["ns"] for part in why["parts"]) == why["total_ns"]


def test_viewers_are_limited(server: Server) -> None:
    url = f"{server.url}/v2/atoll/live?interval_ms=10000"
    streams = [requests.get(url, stream=True, timeout=60) for _ in range(17)]
    codes = [stream.status_code for stream in streams]
    for stream in streams:
        stream.close()
    assert codes.count(429) >= 1 and codes.count(200) <= 16, codes
    bad = requests.get(f"{server.url}/v2/atoll/live?interval_ms=1", timeout=60)
    assert bad.status_code == 400
