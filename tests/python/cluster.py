"""A cluster of real processes on loopback: etcd, schedulers, frontends, backends, and a load
that records every reply."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import requests

from support import BINARY, LOST, STOP_SECONDS, Server, free_ports, wait_for

# Long enough that a machine which stalls for a while loses no lease; the short one is for tests
# that wait until a lease expires.
LEASE_MS = 20_000
SHORT_LEASE_MS = 2000
# How long a test waits for a state of the cluster; only a state that never comes takes so long.
WAIT_SECONDS = 120
# Reasons for which frontends may refuse requests while backends stop or change.
REASONS = (LOST, "no backend serves model", "is loading", "is not ready: unloaded")


class Process:
    """A process with a log that can be killed and restarted."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.command, self.log = command, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        # What a killed backend was busy with concerns only this cluster.
        env = {**os.environ, "ATOLL_DATA_DIR": str(self.log.parent / "data")}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output, env=env)
        return self

    def kill(self, with_signal: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(with_signal)
            try:
                self.process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Cluster:
    """etcd and the roles of a cluster, each in its own process."""

    def __init__(
        self,
        folder: Path,
        models: Path,
        host: str = "127.0.0.1",
        lease_ms: int = LEASE_MS,
        etcd_flags: tuple[str, ...] = (),
        scheme: str = "http",
    ) -> None:
        self.folder, self.models, self.lease_ms = folder, models, lease_ms
        self.processes: dict[str, Process] = {}
        self.frontends: dict[str, Server] = {}
        # A command prefix of all roles, such as one that enters a namespace.
        self.inside: tuple[str, ...] = ()
        self.model_store = ["--model-store", str(folder / "model-store")]
        client, peer = free_ports(2)
        self.store = f"etcd://{host}:{client}"
        urls = [f"{scheme}://{host}:{client}", f"http://127.0.0.1:{peer}"]
        command = ["etcd", "--name", "e", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"]
        command += etcd_flags
        command += ["--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]]
        command += ["--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]]
        self.add("etcd", [*command, "--initial-cluster", f"e={urls[1]}"])

    def add(self, name: str, command: list[str]) -> None:
        self.processes[name] = Process(command, self.folder / f"{name}.log").start()

    def role(self, role: str, name: str, *flags: str, inside: tuple[str, ...] = ()) -> None:
        inside = inside or self.inside
        command = [*inside, str(BINARY), "cluster", role, "--store", self.store, "--name", name]
        self.add(name, [*command, "--lease-ms", str(self.lease_ms), *flags])

    def scheduler(self, name: str, *flags: str) -> None:
        self.role("scheduler", name, "--epoch-ms", "5000", "--spacing-ms", "2000", *flags)

    def backend(self, name: str, *flags: str, inside: tuple[str, ...] = ()) -> None:
        """Starts a backend; `inside` is a command prefix, such as one that enters a namespace."""
        repository = ["--model-repository", str(self.models), "--threads", "1"]
        self.role("backend", name, *repository, *flags, inside=inside)

    def frontend(self, name: str, *flags: str) -> Server:
        ports = free_ports(3)
        given = zip(("--http-port", "--grpc-port", "--metrics-port"), map(str, ports), strict=True)
        words = [word for pair in given for word in pair]
        self.role("frontend", name, *self.model_store, *words, *flags)
        self.frontends[name] = Server(ports)
        return self.frontends[name]

    def wait_ready(self) -> None:
        try:
            for server in self.frontends.values():
                server.start()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def status(self) -> dict:
        command = [str(BINARY), "cluster", "status", "--store", self.store, "--json"]
        reply = subprocess.run(command, capture_output=True, check=False, timeout=WAIT_SECONDS)
        return json.loads(reply.stdout) if reply.stdout else {}

    def wait_status(self, holds) -> float:
        """Waits until `holds(status)` and returns the seconds it took."""
        started = time.monotonic()
        while time.monotonic() - started < WAIT_SECONDS:
            status = self.status()
            if status and holds(status):
                return time.monotonic() - started
            time.sleep(0.05)
        raise AssertionError(
            f"after {WAIT_SECONDS} s the cluster is {self.status()}\n{self.logs()}"
        )

    def logs(self) -> str:
        return "\n".join(
            f"--- {name}\n{process.text()[-1500:]}"
            for name, process in self.processes.items()
            if name != "etcd"
        )

    def stop(self) -> None:
        for name, process in self.processes.items():
            if name != "etcd":
                process.kill(signal.SIGTERM)
        self.processes["etcd"].kill()


class Reply(NamedTuple):
    """One reply: when the request was sent, its id, status code, seconds and error text."""

    at: float
    identity: str
    code: int
    took: float
    error: str


class Load:
    """Clients that send requests at a steady rate. When a connection breaks, the same request goes
    to the next frontend, as a load balancer would do."""

    def __init__(
        self, cluster: Cluster, models: list[str], body: dict, clients: int = 4, pause: float = 0.02
    ) -> None:
        self.urls = [server.url for server in cluster.frontends.values()]
        self.models, self.body, self.pause = models, body, pause
        self.replies: list[Reply] = []
        self.mixed_up: list[str] = []
        self.lost: list[str] = []
        self.stopping = threading.Event()
        self.threads = [
            threading.Thread(target=self.run, args=(number,)) for number in range(clients)
        ]

    def start(self) -> Load:
        self.began = time.monotonic()
        for thread in self.threads:
            thread.start()
        return self

    def run(self, number: int) -> None:
        session = requests.Session()
        count = 0
        while not self.stopping.is_set():
            identity = f"{number}-{count}"
            model = self.models[count % len(self.models)]
            self.send(session, number + count, identity, model)
            count += 1
            time.sleep(self.pause)

    def send(self, session: requests.Session, offset: int, identity: str, model: str) -> None:
        started = time.monotonic()
        body = {**self.body, "id": identity}
        for attempt in range(40):
            url = f"{self.urls[(offset + attempt) % len(self.urls)]}/v2/models/{model}/infer"
            try:
                reply = session.post(url, json=body, timeout=WAIT_SECONDS)
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                time.sleep(0.05)
                continue
            except requests.RequestException:
                break
            if reply.status_code == 200 and reply.json()["id"] != identity:
                self.mixed_up.append(identity)
            error = "" if reply.status_code == 200 else reply.text
            took = time.monotonic() - started
            self.replies.append(
                Reply(started - self.began, identity, reply.status_code, took, error)
            )
            return
        self.lost.append(identity)

    def now(self) -> float:
        return time.monotonic() - self.began

    def wait_more(self, count: int) -> None:
        """Waits for `count` more replies."""
        wanted = len(self.replies) + count
        came = wait_for(lambda: len(self.replies) >= wanted, WAIT_SECONDS)
        assert came, f"only {len(self.replies)} of {wanted} replies"

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def codes(self) -> Counter:
        return Counter(reply.code for reply in self.replies)

    def refused(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.code != 200]

    def anomalies(self, faults: list[tuple[float, float]], limit: float) -> list[str]:
        """What an idle machine would not show, given faults as (time, seconds to recover). Tests
        report these as warnings: a busy machine is no failure."""
        refused = [reply.at for reply in self.refused()]
        unexplained = [
            at
            for at in refused
            if not any(fault - 1 <= at <= fault + took + 2 for fault, took in faults)
        ]
        found = {
            "recovered late": any(took > limit for _, took in faults),
            "more than 1 % refused": len(refused) > len(self.replies) / 100,
            "refused without a fault": bool(unexplained),
        }
        return [text for text, holds in found.items() if holds]

    def check(self, report: str, reasons: tuple[str, ...] = REASONS) -> None:
        """Asserts that each request got one reply, and each refusal is for one of `reasons`."""
        assert self.lost == [] and self.mixed_up == [], (
            f"{report}, lost {self.lost}, mixed up {self.mixed_up}"
        )
        identities = [reply.identity for reply in self.replies]
        assert len(set(identities)) == len(identities), report
        for reply in self.refused():
            assert reply.code == 503 and any(reason in reply.error for reason in reasons), (
                f"{report}: {reply}"
            )
