"""OpenTelemetry: spans reach a real collector over OTLP, and a dead one costs nothing."""

from __future__ import annotations

import gzip
import importlib.util
import shutil
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpc_client
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cluster import WAIT_SECONDS, Cluster
from support import BINARY, Server, fp32_body, free_ports, infer_url, serve, stop_process, wait_for

ROTEL = importlib.util.find_spec("rotel")
REQUESTS = 3000
THREADS = 4
CALLER = "00f067aa0ba902b7"
PHASES = ["inputs", "queue", "compute", "outputs"]


class Receiver:
    """An HTTP server that keeps the spans it gets."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(dict(self.headers), ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, headers: dict[str, str], message: ExportTraceServiceRequest) -> None:
        with self.lock:
            self.headers.append({name.lower(): value for name, value in headers.items()})
            for resource in message.resource_spans:
                self.resources.append(
                    {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                )
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)

    def traces(self) -> dict[str, list[Span]]:
        with self.lock:
            found: dict[str, list[Span]] = defaultdict(list)
            for span in self.spans:
                found[span.trace_id.hex()].append(span)
            return found

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()


@pytest.fixture
def collector(receiver: Receiver, tmp_path: Path) -> Iterator[str]:
    """Rotel, an OpenTelemetry collector, which passes spans on to `receiver`; its URL."""
    if ROTEL is None or ROTEL.origin is None:
        pytest.skip("rotel is missing: it is in requirements.txt for x86-64 and Python < 3.14")
    http, grpc = free_ports(2)
    program = Path(ROTEL.origin).with_name("rotel-agent")
    command = [str(program), "start", "--otlp-http-endpoint", f"127.0.0.1:{http}",
               "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--exporter", "otlp",
               "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", receiver.url,
               "--batch-timeout", "100ms"]
    with (tmp_path / "collector.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", http)) == 0

    assert wait_for(listens), (tmp_path / "collector.log").read_text()
    yield f"http://127.0.0.1:{http}"
    stop_process(process)


def traceparent(number: int, flags: str = "01") -> str:
    return f"00-{number:032x}-{CALLER}-{flags}"


def pipelined(server: Server, numbers: range, rate: float) -> None:
    """Sends requests over one connection, about `rate` a second; all are answered with 200."""
    body = requests.Request("POST", server.url, json=fp32_body(1.0)).prepare().body
    assert isinstance(body, bytes)
    head = f"POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: {server.http}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\ntraceparent: "
    began, answered, rest = time.monotonic(), 0, b""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        for start in range(0, len(numbers), 25):
            time.sleep(max(0.0, began + start / rate - time.monotonic()))
            part = numbers[start : start + 25]
            connection.sendall(
                b"".join(f"{head}{traceparent(n)}\r\n\r\n".encode() + body for n in part)
            )
            while answered < start + len(part):
                rest += connection.recv(65536)
                answered += rest.count(b"HTTP/1.1 200 OK")
                # The end may be the begin of the next status line.
                rest = rest[-14:]


def check_trace(spans: list[Span], caller: str) -> None:
    """The trace of one request is complete, and its parts are inside of each other."""
    (whole,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert whole.parent_span_id.hex() == caller
    assert whole.name == "infer identity_fp32" and whole.status.code == 0
    by_name = {span.name: span for span in spans if span is not whole}
    batched = by_name.pop("batch", None)
    assert sorted(by_name) == sorted(PHASES)
    assert len(spans) == len(PHASES) + 1 + (batched is not None)
    if batched is not None:
        assert batched.parent_span_id == whole.span_id
        assert batched.attributes[0].key == "atoll.batch.rows"
    for name, span in by_name.items():
        above = batched if name == "compute" and batched is not None else whole
        assert span.parent_span_id == above.span_id
    in_order = [by_name[name] for name in PHASES]
    for before, after in zip(in_order, in_order[1:], strict=False):
        assert before.start_time_unix_nano <= before.end_time_unix_nano
        assert before.end_time_unix_nano == after.start_time_unix_nano
    # The clocks of requests and of the node are read a moment apart.
    slack = 5_000_000
    assert in_order[0].start_time_unix_nano >= whole.start_time_unix_nano - slack
    assert in_order[-1].end_time_unix_nano <= whole.end_time_unix_nano + slack


def telemetry_server(
    repository: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str
) -> Server:
    for name, value in {"OTEL_BSP_SCHEDULE_DELAY": "100", **variables}.items():
        monkeypatch.setenv(name, value)
    return serve(repository, folder / "server.log")


def test_a_collector_gets_complete_traces_at_1000_requests_a_second(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collector: str,
    receiver: Receiver,
) -> None:
    server = telemetry_server(repository, tmp_path, monkeypatch,
                              OTEL_EXPORTER_OTLP_ENDPOINT=collector, OTEL_SERVICE_NAME="tested",
                              OTEL_RESOURCE_ATTRIBUTES="team=a%20b")
    try:
        share = REQUESTS // THREADS
        parts = [range(1 + i * share, 1 + (i + 1) * share) for i in range(THREADS)]
        rate = 1000 / THREADS
        threads = [
            threading.Thread(target=pipelined, args=(server, part, rate)) for part in parts
        ]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"{REQUESTS / (time.monotonic() - began):.0f} requests a second")
        wanted = {f"{number:032x}" for number in range(1, REQUESTS + 1)}
        assert wait_for(lambda: wanted <= receiver.traces().keys())
        assert wait_for(lambda: all(len(receiver.traces()[name]) >= 5 for name in wanted))
        assert server.metric("atoll_spans_total", result="dropped") == 0
        assert server.metric("atoll_spans_total", result="failed") == 0
    finally:
        server.stop()
    traces = receiver.traces()
    assert traces.keys() == wanted
    for spans in traces.values():
        check_trace(spans, CALLER)
    assert receiver.resources[0]["service.name"] == "tested"
    assert receiver.resources[0]["team"] == "a b"


def test_grpc_errors_and_sampling(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    """Without a collector between, so that headers and compression are seen."""
    server = telemetry_server(
        repository, tmp_path, monkeypatch,
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{receiver.url}/v1/traces",
        OTEL_EXPORTER_OTLP_HEADERS="x-key=secret", OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
    )
    try:
        client = grpc_client.InferenceServerClient(server.grpc)
        tensor = grpc_client.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        client.infer("identity_fp32", [tensor], headers={"traceparent": traceparent(1)})
        client.close()
        url = infer_url(server, "identity_fp32")
        # The caller does not record this one.
        not_sampled = {"traceparent": traceparent(2, "00")}
        assert requests.post(url, json=fp32_body(1.0), headers=not_sampled, timeout=60).ok
        wrong = {"traceparent": traceparent(3)}
        assert requests.post(url, json={}, headers=wrong, timeout=60).status_code == 400
        # Without a caller's trace the server begins one.
        assert requests.post(url, json=fp32_body(1.0), timeout=60).ok
        assert wait_for(lambda: len(receiver.traces()) >= 3)
    finally:
        # What is left is sent at the end.
        server.stop()
    traces = receiver.traces()
    check_trace(traces.pop(f"{1:032x}"), CALLER)
    (refused,) = traces.pop(f"{3:032x}")
    assert refused.status.code == 2 and refused.status.message
    ((name, spans),) = traces.items()
    assert int(name, 16) > 1 << 32
    check_trace(spans, "")
    assert receiver.headers[0]["x-key"] == "secret"
    assert receiver.headers[0]["content-encoding"] == "gzip"


TWO_STAGES = """
slo_ms = 60000
[[stage]]
name = "first"
model = "identity_fp32"
inputs.INPUT0.value = "x"
[[stage]]
name = "second"
model = "identity_fp32"
inputs.INPUT0.value = "first.OUTPUT0"
[output]
y = "second.OUTPUT0"
"""


@pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed")
def test_stages_of_a_query_are_spans_between_frontend_and_backend(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    cluster = Cluster(tmp_path, repository)
    try:
        cluster.scheduler("s1")
        cluster.backend("b1")
        frontend = cluster.frontend("f1")
        cluster.wait_ready()
        url = f"{frontend.url}/v2/atoll/queries/two"

        def query(number: int) -> requests.Response:
            body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [3.0]}]}
            headers = {"traceparent": traceparent(number)}
            return requests.post(f"{url}/infer", json=body, headers=headers, timeout=WAIT_SECONDS)

        added = lambda: requests.put(url, data=TWO_STAGES, timeout=WAIT_SECONDS).ok  # noqa: E731
        assert wait_for(added, WAIT_SECONDS), cluster.logs()
        assert wait_for(lambda: query(1).ok, WAIT_SECONDS), cluster.logs()
        reply = query(2)
        assert reply.json()["outputs"][0]["data"] == [3.0], reply.text
        # A request for one model is followed to its backend as well.
        headers = {"traceparent": traceparent(3)}
        url = infer_url(frontend, "identity_fp32")
        assert requests.post(url, json=fp32_body(1.0), headers=headers, timeout=60).ok
        complete = lambda: len(receiver.traces()[f"{2:032x}"]) >= 3 + 2 * 5 and (  # noqa: E731
            len(receiver.traces()[f"{3:032x}"]) >= 2 + 4
        )
        assert wait_for(complete), receiver.traces()
    finally:
        cluster.stop()
    spans = receiver.traces()[f"{2:032x}"]
    (whole,) = [span for span in spans if span.name == "query two"]
    assert whole.parent_span_id.hex() == CALLER and whole.status.code == 0
    for stage in ("first", "second"):
        (own,) = [span for span in spans if span.name == f"stage {stage}"]
        assert own.parent_span_id == whole.span_id and own.status.code == 0
        attributes = {pair.key: pair.value.string_value for pair in own.attributes}
        assert attributes["atoll.stage"] == stage and attributes["atoll.model"] == "identity_fp32"
        inside = [span for span in spans if span.parent_span_id == own.span_id]
        (backend,) = [span for span in inside if span.kind == Span.SPAN_KIND_SERVER]
        assert backend.name == "infer identity_fp32"
        phases = {span.name for span in spans if span.parent_span_id == backend.span_id}
        assert {"inputs", "queue"} <= phases, phases
    spans = receiver.traces()[f"{3:032x}"]
    (whole,) = [span for span in spans if span.parent_span_id.hex() == CALLER]
    children = [span for span in spans if span.parent_span_id == whole.span_id]
    (backend,) = [span for span in children if span.kind == Span.SPAN_KIND_SERVER]
    assert backend.name == whole.name == "infer identity_fp32"


@pytest.mark.parametrize("answers", [False, True])
def test_a_dead_collector_costs_spans_and_nothing_else(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """One that refuses connections, and one that takes them and never replies."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if answers:
            silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        server = telemetry_server(repository, tmp_path, monkeypatch,
                                  OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
                                  OTEL_BSP_MAX_QUEUE_SIZE="100")
        try:
            pipelined(server, range(1, 501), 10_000)
            assert server.metric("atoll_spans_total", result="dropped") > 0
            assert server.metric("atoll_spans_total", result="exported") == 0
            assert server.metric("nv_inference_request_success", model="identity_fp32") == 500
            server.terminate()
            assert server.wait() == 0
        finally:
            server.stop()


def test_what_is_not_supported_is_said_at_the_start(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    command = [str(BINARY), "serve", "--model-repository", str(repository), "--http-port", "0",
               "--grpc-port", "0", "--metrics-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "use http/protobuf" in done.stderr
