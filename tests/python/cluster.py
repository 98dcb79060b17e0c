"""A cluster of real processes on loopback: etcd, schedulers, frontends, backends, and a load that counts answers."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import requests

from support import BINARY, LOST, STOP_SECONDS, Server, free_ports, wait_for

# Nobody is thought gone because a machine stands still for a while; and where somebody is to be missed, soon.
LEASE_MS = 20_000
SHORT_LEASE_MS = 2000
# How long a cluster gets to be as a test wants it: only one that never gets there takes so long.
WAIT_SECONDS = 120
# Why frontends refuse what models are asked while their backends go or change, and nothing is wrong but that.
REASONS = (LOST, "no backend serves model", "is loading", "is not ready: unloaded")


class Process:
    """A process with a log, which can be killed and started again."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.command, self.log = command, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output)
        return self

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Cluster:
    """etcd and the roles, each a process of its own."""

    def __init__(self, folder: Path, models: Path, host: str = "127.0.0.1", lease_ms: int = LEASE_MS) -> None:
        self.folder, self.models, self.lease_ms = folder, models, lease_ms
        self.parts: dict[str, Process] = {}
        self.frontends: dict[str, Server] = {}
        self.model_store = ["--model-store", str(folder / "model-store")]
        client, peer = free_ports(2)
        self.store = f"etcd://{host}:{client}"
        urls = [f"http://{host}:{client}", f"http://127.0.0.1:{peer}"]
        command = ["etcd", "--name", "e", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"]
        command += ["--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]]
        command += ["--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]]
        self.add("etcd", [*command, "--initial-cluster", f"e={urls[1]}"])

    def add(self, name: str, command: list[str]) -> None:
        self.parts[name] = Process(command, self.folder / f"{name}.log").start()

    def role(self, role: str, name: str, *flags: str, inside: tuple[str, ...] = ()) -> None:
        command = [*inside, str(BINARY), "cluster", role, "--store", self.store, "--name", name]
        self.add(name, [*command, "--lease-ms", str(self.lease_ms), *flags])

    def scheduler(self, name: str) -> None:
        self.role("scheduler", name, "--epoch-ms", "5000", "--spacing-ms", "2000")

    def backend(self, name: str, *flags: str, inside: tuple[str, ...] = ()) -> None:
        """A backend; `inside` is a command that runs it somewhere else, such as in a namespace."""
        repository = ["--model-repository", str(self.models), "--threads", "1"]
        self.role("backend", name, *repository, *flags, inside=inside)

    def frontend(self, name: str) -> Server:
        ports = free_ports(3)
        flags = zip(("--http-port", "--grpc-port", "--metrics-port"), map(str, ports), strict=True)
        self.role("frontend", name, *self.model_store, *(part for pair in flags for part in pair))
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
        answer = subprocess.run(command, capture_output=True, check=False, timeout=WAIT_SECONDS)
        return json.loads(answer.stdout) if answer.stdout else {}

    def wait_status(self, holds) -> float:
        """Waits until the status is as wanted and returns how long that took."""
        started = time.monotonic()
        while time.monotonic() - started < WAIT_SECONDS:
            status = self.status()
            if status and holds(status):
                return time.monotonic() - started
            time.sleep(0.05)
        raise AssertionError(f"after {WAIT_SECONDS} s the cluster is {self.status()}\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{part.text()[-1500:]}" for name, part in self.parts.items() if name != "etcd")

    def stop(self) -> None:
        for name, part in self.parts.items():
            if name != "etcd":
                part.kill(signal.SIGTERM)
        self.parts["etcd"].kill()


class Answer(NamedTuple):
    """What a client was told: when it asked, what, with which outcome, after how long."""

    at: float
    identity: str
    code: int
    took: float
    error: str


class Load:
    """Clients that ask at a steady pace. A connection that breaks is no answer: the same request goes to the next
    frontend, as a load balancer would send it."""

    def __init__(self, cluster: Cluster, models: list[str], body: dict, clients: int = 4, pause: float = 0.02) -> None:
        self.urls = [server.url for server in cluster.frontends.values()]
        self.models, self.body, self.pause = models, body, pause
        self.answers: list[Answer] = []
        self.twice: list[str] = []
        self.lost: list[str] = []
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(number,)) for number in range(clients)]

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
            self.ask(session, number + count, identity, model)
            count += 1
            time.sleep(self.pause)

    def ask(self, session: requests.Session, turn: int, identity: str, model: str) -> None:
        started = time.monotonic()
        body = {**self.body, "id": identity}
        for attempt in range(40):
            url = f"{self.urls[(turn + attempt) % len(self.urls)]}/v2/models/{model}/infer"
            try:
                answer = session.post(url, json=body, timeout=WAIT_SECONDS)
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                time.sleep(0.05)
                continue
            except requests.RequestException:
                break
            if answer.status_code == 200 and answer.json()["id"] != identity:
                self.twice.append(identity)
            error = "" if answer.status_code == 200 else answer.text
            took = time.monotonic() - started
            self.answers.append(Answer(started - self.began, identity, answer.status_code, took, error))
            return
        self.lost.append(identity)

    def now(self) -> float:
        return time.monotonic() - self.began

    def wait_more(self, count: int) -> None:
        """Waits until so many more requests were answered."""
        wanted = len(self.answers) + count
        came = wait_for(lambda: len(self.answers) >= wanted, WAIT_SECONDS)
        assert came, f"only {len(self.answers)} of {wanted} answers"

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def codes(self) -> Counter:
        return Counter(answer.code for answer in self.answers)

    def refused(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.code != 200]

    def doubts(self, faults: list[tuple[float, float]], limit: float) -> list[str]:
        """What a machine with time to spare would not show, of faults and how long each took: a report, not a bar."""
        refused = [answer.at for answer in self.refused()]
        apart = [at for at in refused if not any(fault - 1 <= at <= fault + took + 2 for fault, took in faults)]
        found = {
            "recovered late": any(took > limit for _, took in faults),
            "more than 1 % refused": len(refused) > len(self.answers) / 100,
            "refused while nothing was wrong": bool(apart),
        }
        return [text for text, true in found.items() if true]

    def check(self, report: str, reasons: tuple[str, ...] = REASONS) -> None:
        """Each request got exactly one answer, and where that is a refusal, for one of these reasons."""
        assert self.lost == [] and self.twice == [], f"{report}, lost {self.lost}, twice {self.twice}"
        identities = [answer.identity for answer in self.answers]
        assert len(set(identities)) == len(identities), report
        for answer in self.refused():
            assert answer.code == 503 and any(reason in answer.error for reason in reasons), f"{report}: {answer}"
