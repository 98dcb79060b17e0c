"""Breaks a cluster of real processes under load, and counts what clients notice.

    scripts/chaos.py --seed 1 --seconds 300 --out chaos.json

Starts Debian's etcd, two schedulers, three backends and two frontends on loopback. A balancer of
its own sends requests at a steady rate to the frontends that are ready, checks every output against
onnxruntime, and repeats a request elsewhere only when its connection breaks. Faults follow in an
order that the seed decides. The report has one row for each fault: errors, slow replies and the
longest time without a good reply until the next fault began.

Wrong: another output or id than the request's. Lost: no reply although attempts were left. Hung: no
reply within 20 s. Twice: bytes after a complete reply.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import requests

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "python"))

from cluster import Cluster, Process  # noqa: E402
from support import ASSETS  # noqa: E402

LEASE_MS = 3000
SLOW_SECONDS = 0.2
HUNG_SECONDS = 20.0
# A balancer checks readiness this often.
CHECK_SECONDS = 0.1
# Time between the end of a fault and the next one.
REST_SECONDS = 3.0
MODELS = [f"m{number}" for number in range(5)]
REAL_TIME = MODELS[:3]
COMPILERS = {"rustc", "cc1plus", "cc1", "compile", "link", "ld", "cargo", "nvcc"}


@dataclass
class Reply:
    """What became of one request; times are seconds since the start."""

    at: float
    took: float
    kind: str
    rerouted: int = 0
    detail: str = ""


@dataclass
class Fault:
    """One fault, and what clients noticed until the next one."""

    name: str
    target: str
    began: float
    ended: float = 0.0
    note: str = ""
    compilers: int = 0
    burst: dict[str, Any] = field(default_factory=dict)


class Samples:
    """Inputs with their right outputs."""

    def __init__(self, seed: int, model: Path) -> None:
        generator = np.random.default_rng(seed)
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        self.bodies: list[dict[str, Any]] = []
        self.outputs: list[np.ndarray] = []
        for _ in range(32):
            image = generator.random((1, 1, 8, 8), dtype=np.float32)
            data = [float(value) for value in image.ravel()]
            tensor = {"name": name, "shape": [1, 1, 8, 8], "datatype": "FP32", "data": data}
            self.bodies.append({"inputs": [tensor]})
            (output,) = session.run(None, {name: image})[:1]
            self.outputs.append(np.asarray(output).ravel())

    def is_right(self, index: int, reply: dict[str, Any]) -> bool:
        data = np.asarray(reply["outputs"][0]["data"], dtype=np.float64)
        return data.shape == self.outputs[index].shape and bool(
            np.allclose(data, self.outputs[index], rtol=1e-3, atol=1e-4)
        )


class Balancer:
    """Sends requests at a steady rate to frontends that are ready."""

    def __init__(self, ports: list[int], samples: Samples, rate: float, seed: int) -> None:
        self.ports, self.samples, self.rate = ports, samples, rate
        self.random = random.Random(seed)
        self.ready: set[int] = set(ports)
        self.idle: dict[int, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {
            port: [] for port in ports
        }
        self.replies: list[Reply] = []
        self.twice = 0
        self.sent = 0
        self.models = list(MODELS)
        self.began = time.monotonic()
        self.stopping = False
        self.tasks: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        return time.monotonic() - self.began

    async def run(self) -> None:
        checks = [asyncio.create_task(self.follow(port)) for port in self.ports]
        next_at = time.monotonic()
        while not self.stopping:
            next_at += 1 / self.rate
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
            task = asyncio.create_task(self.request(self.sent))
            self.sent += 1
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        await asyncio.gather(*self.tasks)
        for check in checks:
            check.cancel()

    async def follow(self, port: int) -> None:
        """Keeps whether the frontend is ready, as a balancer's health check does."""
        while True:
            try:
                status, _, writer = await asyncio.wait_for(self.get_ready(port), 1.0)
                writer.close()
                good = status == 200
            except (OSError, asyncio.TimeoutError, EOFError, ValueError):
                good = False
            (self.ready.add if good else self.ready.discard)(port)
            await asyncio.sleep(CHECK_SECONDS)

    async def get_ready(self, port: int) -> tuple[int, bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v2/health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        status, body, _ = await read_reply(reader)
        return status, body, writer

    async def request(self, number: int) -> None:
        index = number % len(self.samples.bodies)
        identity = f"r{number}"
        model = self.random.choice(self.models)
        body = json.dumps({**self.samples.bodies[index], "id": identity}).encode()
        started = time.monotonic()
        reply = Reply(started - self.began, 0.0, "lost")
        try:
            await asyncio.wait_for(
                self.attempts(model, index, identity, body, reply, number), HUNG_SECONDS
            )
        except asyncio.TimeoutError:
            reply.kind = "hung"
        reply.took = time.monotonic() - started
        self.replies.append(reply)

    async def attempts(
        self, model: str, index: int, identity: str, body: bytes, reply: Reply, offset: int
    ) -> None:
        """Repeats a request while its connection breaks before a reply."""
        for attempt in range(200):
            ports = sorted(self.ready) or self.ports
            port = ports[(offset + attempt) % len(ports)]
            try:
                status, text = await self.exchange(port, model, body)
            except (OSError, EOFError):
                reply.rerouted += 1
                await asyncio.sleep(0.02 if attempt < 5 else 0.1)
                continue
            if status == 200:
                parsed = json.loads(text)
                right = parsed.get("id") == identity and self.samples.is_right(index, parsed)
                reply.kind = "good" if right else "wrong"
                reply.detail = "" if right else text[:300].decode(errors="replace")
            else:
                reply.kind = "error"
                reply.detail = f"{status} {model} {text[:200].decode(errors='replace')}"
            return

    async def exchange(self, port: int, model: str, body: bytes) -> tuple[int, bytes]:
        while self.idle[port]:
            reader, writer = self.idle[port].pop()
            if reader.at_eof() or writer.is_closing():
                writer.close()
                continue
            if reader._buffer:  # noqa: SLF001 - bytes that nobody asked for
                self.twice += 1
                writer.close()
                continue
            break
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        done = False
        try:
            head = (
                f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status, text, keeps = await read_reply(reader)
            done = keeps
            return status, text
        finally:
            if done:
                self.idle[port].append((reader, writer))
            else:
                writer.close()


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return int(lines[0].split()[1]), body, headers.get("connection") != "close"


class Chaos:
    """A cluster, its load and its faults."""

    def __init__(self, folder: Path, seed: int, rate: float) -> None:
        self.random = random.Random(seed)
        models = folder / "models"
        for name in MODELS:
            (models / name / "1").mkdir(parents=True)
            shutil.copy(ASSETS / "digits.onnx", models / name / "1" / "model.onnx")
            if name in REAL_TIME:
                (models / name / "atoll.toml").write_text('class = "rt"\ntimeout_ms = 500\n')
        self.cluster = Cluster(folder, models, lease_ms=LEASE_MS)
        self.schedulers, self.backends = ["s1", "s2"], ["b1", "b2", "b3"]
        for name in self.schedulers:
            self.cluster.scheduler(name)
        for name in self.backends:
            self.cluster.backend(name, *self.cluster.model_store)
        self.frontends = {name: self.cluster.frontend(name) for name in ("f1", "f2")}
        self.samples = Samples(seed, ASSETS / "digits.onnx")
        self.rate, self.seed = rate, seed
        self.faults: list[Fault] = []
        self.registered = 0
        self.kinds: dict[str, Callable[[Fault], Awaitable[None]]] = {
            "kill backend": self.kill_backend,
            "stop backend": self.stop_backend,
            "freeze backend": self.freeze_backend,
            "freeze backend 300 of 400 ms": self.freeze_in_turns,
            "kill frontend": self.kill_frontend,
            "stop frontend": self.stop_frontend,
            "kill leader": self.kill_leader,
            "freeze scheduler": self.freeze_scheduler,
            "kill etcd": self.kill_etcd,
            "stop etcd": self.stop_etcd,
            "freeze etcd": self.freeze_etcd,
            "delete key": self.delete_key,
            "damage key": self.damage_key,
            "register model": self.register_good,
            "register broken file": self.register_broken,
            "restart roles in turn": self.restart_in_turn,
            "restart everything": self.restart_everything,
        }

    def process(self, name: str) -> Process:
        return self.cluster.processes[name]

    async def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        await asyncio.to_thread(self.process(name).kill, how)

    def signal(self, name: str, how: signal.Signals) -> None:
        process = self.process(name).process
        if process is not None and process.poll() is None:
            os.kill(process.pid, how)

    async def down(self, name: str, how: signal.Signals, seconds: float) -> None:
        await self.kill(name, how)
        await asyncio.sleep(seconds)
        self.process(name).start()

    async def freeze(self, name: str, seconds: float) -> None:
        self.signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.signal(name, signal.SIGCONT)

    async def kill_backend(self, fault: Fault) -> None:
        fault.target = self.random.choice(self.backends)
        await self.down(fault.target, signal.SIGKILL, 1.0)

    async def stop_backend(self, fault: Fault) -> None:
        fault.target = self.random.choice(self.backends)
        await self.down(fault.target, signal.SIGTERM, 0.5)

    def busiest_backend(self) -> str:
        """The backend with the largest share of the routes."""
        found = self.etcd("range", key="/atoll/default/routes/", range_end="/atoll/default/routes0")
        shares = dict.fromkeys(self.backends, 0.0)
        for entry in found.get("kvs", []):
            for target in json.loads(base64.b64decode(entry["value"]))["targets"]:
                shares[target["backend"]] += target["weight"]
        return max(shares, key=lambda name: shares[name])

    async def freeze_backend(self, fault: Fault) -> None:
        fault.target = await asyncio.to_thread(self.busiest_backend)
        await self.freeze(fault.target, 4.0)

    async def freeze_in_turns(self, fault: Fault) -> None:
        fault.target = await asyncio.to_thread(self.busiest_backend)
        for _ in range(15):
            await self.freeze(fault.target, 0.3)
            await asyncio.sleep(0.1)

    async def kill_frontend(self, fault: Fault) -> None:
        fault.target = self.random.choice(list(self.frontends))
        await self.down(fault.target, signal.SIGKILL, 1.0)

    async def stop_frontend(self, fault: Fault) -> None:
        fault.target = self.random.choice(list(self.frontends))
        await self.down(fault.target, signal.SIGTERM, 0.5)

    async def leader(self) -> str:
        status = await asyncio.to_thread(self.cluster.status)
        return status.get("leader") or self.schedulers[0]

    async def kill_leader(self, fault: Fault) -> None:
        fault.target = await self.leader()
        await self.down(fault.target, signal.SIGKILL, 1.0)

    async def freeze_scheduler(self, fault: Fault) -> None:
        fault.target = await self.leader()
        await self.freeze(fault.target, 5.0)

    async def kill_etcd(self, fault: Fault) -> None:
        fault.target = "etcd"
        await self.down("etcd", signal.SIGKILL, 3.0)

    async def stop_etcd(self, fault: Fault) -> None:
        fault.target = "etcd"
        await self.down("etcd", signal.SIGTERM, 1.0)

    async def freeze_etcd(self, fault: Fault) -> None:
        fault.target = "etcd"
        await self.freeze("etcd", 4.0)

    def etcd(self, call: str, **words: str) -> dict[str, Any]:
        """A call of etcd's JSON gateway; keys and values are text."""
        url = f"{self.cluster.store.replace('etcd', 'http')}/v3/kv/{call}"
        body = {name: base64.b64encode(text.encode()).decode() for name, text in words.items()}
        reply = requests.post(url, json=body, timeout=10)
        reply.raise_for_status()
        return reply.json()

    def some_key(self, prefixes: tuple[str, ...]) -> str:
        root = "/atoll/default/"
        found = self.etcd("range", key=root, range_end="/atoll/default0")
        keys = [base64.b64decode(entry["key"]).decode() for entry in found.get("kvs", [])]
        keys = sorted(key for key in keys if key.removeprefix(root).startswith(prefixes))
        return self.random.choice(keys)

    async def delete_key(self, fault: Fault) -> None:
        prefixes = ("routes/", "assignments/", "loads/", "plan")
        fault.target = await asyncio.to_thread(self.some_key, prefixes)
        await asyncio.to_thread(self.etcd, "deleterange", key=fault.target)

    async def damage_key(self, fault: Fault) -> None:
        prefixes = ("routes/", "assignments/", "loads/", "plan", "states/")
        fault.target = await asyncio.to_thread(self.some_key, prefixes)
        value = self.random.choice(["", "{", "null", "[1,2]", '{"models":17}', "\x00\xff" * 50])
        await asyncio.to_thread(self.etcd, "put", key=fault.target, value=value)

    async def register(self, name: str, content: bytes) -> int:
        def post() -> int:
            url = next(iter(self.frontends.values())).url
            files = {"name": (None, name), "model": content}
            return requests.post(f"{url}/register", files=files, timeout=60).status_code

        return await asyncio.to_thread(post)

    async def register_good(self, fault: Fault) -> None:
        self.registered += 1
        fault.target = f"registered{self.registered % 3}"
        code = await self.register(fault.target, (ASSETS / "digits.onnx").read_bytes())
        fault.note = f"replied {code}"

    async def register_broken(self, fault: Fault) -> None:
        fault.target = self.random.choice(MODELS)
        content = (ASSETS / "digits.onnx").read_bytes()
        cut = self.random.randrange(1, len(content))
        code = await self.register(fault.target, content[:cut] + b"\xff" * 64)
        fault.note = f"replied {code}"

    async def restart_in_turn(self, fault: Fault) -> None:
        for name in (*self.schedulers, *self.backends, *self.frontends):
            await self.down(name, signal.SIGTERM, 0.1)
            await asyncio.sleep(2.0)

    async def restart_everything(self, fault: Fault) -> None:
        names = list(self.cluster.processes)
        await asyncio.gather(*(self.kill(name) for name in names))
        fault.note = f"all down at {self.balancer.now():.2f} s"
        for name in names:
            self.process(name).start()
        # Until the plan is whole again.
        await asyncio.sleep(6.0)

    async def run(self, seconds: float, kinds: list[str]) -> dict[str, Any]:
        await asyncio.to_thread(self.cluster.wait_ready)
        await asyncio.to_thread(self.cluster.wait_status, self.is_complete)
        ports = [server.http_port for server in self.frontends.values()]
        self.balancer = Balancer(ports, self.samples, self.rate, self.seed)
        load = asyncio.create_task(self.balancer.run())
        await asyncio.sleep(REST_SECONDS)
        order: list[str] = []
        while self.balancer.now() < seconds:
            if not order:
                order = list(kinds)
                self.random.shuffle(order)
            await self.inject(order.pop())
        self.balancer.stopping = True
        await load
        return self.report()

    def is_complete(self, status: dict[str, Any]) -> bool:
        return len(status["models"]) == len(MODELS) and all(
            len(model["backends"]) >= 2 for model in status["models"]
        )

    async def inject(self, name: str) -> None:
        fault = Fault(name, "", self.balancer.now())
        self.faults.append(fault)
        watching = asyncio.create_task(self.watch_compilers(fault))
        try:
            await self.kinds[name](fault)
        except (requests.RequestException, IndexError) as error:
            # The fault itself may fail where another one has not been healed.
            fault.note = f"{fault.note} not injected: {type(error).__name__}"
        fault.ended = self.balancer.now()
        await asyncio.sleep(REST_SECONDS)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    async def watch_compilers(self, fault: Fault) -> None:
        """The most compilers that ran at once on this machine: they delay every process."""
        while True:
            fault.compilers = max(fault.compilers, await asyncio.to_thread(count_compilers))
            await asyncio.sleep(0.5)

    def report(self) -> dict[str, Any]:
        replies = sorted(self.balancer.replies, key=lambda reply: reply.at)
        ends = [fault.began for fault in self.faults[1:]] + [float("inf")]
        for fault, end in zip(self.faults, ends, strict=True):
            mine = [reply for reply in replies if fault.began <= reply.at < end]
            fault.burst = burst(mine, fault.began)
        count = {kind: 0 for kind in ("good", "error", "wrong", "lost", "hung")}
        for reply in replies:
            count[reply.kind] += 1
        panicked = [n for n, p in self.cluster.processes.items() if "panicked" in p.text()]
        return {
            "seed": self.seed,
            "seconds": round(self.balancer.now(), 1),
            "rate": self.rate,
            "sent": self.balancer.sent,
            **count,
            "twice": self.balancer.twice,
            "rerouted": sum(reply.rerouted > 0 for reply in replies),
            "panicked": panicked,
            "faults": [vars(fault) for fault in self.faults],
        }


def count_compilers() -> int:
    count = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                count += (folder / "comm").read_text().strip() in COMPILERS
    return count


def burst(replies: list[Reply], began: float) -> dict[str, Any]:
    """What clients noticed of a fault."""
    good = sorted(reply.at + reply.took for reply in replies if reply.kind == "good")
    times = [began, *good]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    errors = [reply for reply in replies if reply.kind != "good"]
    return {
        "requests": len(replies),
        "errors": len(errors),
        "slow": sum(reply.kind == "good" and reply.took > SLOW_SECONDS for reply in replies),
        "slowest": round(max((reply.took for reply in replies), default=0.0), 3),
        "without_service": round(max(gaps, default=0.0), 3),
        "rerouted": sum(reply.rerouted > 0 for reply in replies),
        "examples": sorted({error.detail for error in errors})[:3],
    }


def table(report: dict[str, Any]) -> str:
    """The faults of each kind: how often, and the worst of each figure."""
    rows = {}
    for fault in report["faults"]:
        rows.setdefault(fault["name"], []).append(fault)
    head = ("fault", "times", "requests", "errors", "worst", "slow", "no reply s", "compilers")
    lines = [head, tuple("---" for _ in head)]
    for name, faults in sorted(rows.items()):
        bursts = [fault["burst"] for fault in faults]
        lines.append(
            (
                name,
                str(len(faults)),
                str(sum(one["requests"] for one in bursts)),
                str(sum(one["errors"] for one in bursts)),
                str(max(one["errors"] for one in bursts)),
                str(max(one["slow"] for one in bursts)),
                f"{max(one['without_service'] for one in bursts):.2f}",
                str(max(fault["compilers"] for fault in faults)),
            )
        )
    counts = ", ".join(
        f"{report[kind]} {kind}" for kind in ("good", "error", "wrong", "lost", "hung", "twice")
    )
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"{text}\n\nseed {report['seed']}: {report['sent']} requests in {report['seconds']} s, "
        f"{counts}; {report['rerouted']} sent again after a broken connection\n"
    )


def run(
    folder: Path, seed: int, seconds: float, rate: float, kinds: list[str] | None = None
) -> dict[str, Any]:
    """Runs and stops a cluster in `folder`; all kinds of faults unless some are named."""
    chaos = Chaos(folder, seed, rate)
    try:
        return asyncio.run(chaos.run(seconds, kinds or list(chaos.kinds)))
    finally:
        for name in chaos.cluster.processes:
            chaos.signal(name, signal.SIGCONT)
        chaos.cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rate", type=float, default=150, help="requests per second")
    parser.add_argument("--fault", action="append", help="only this kind; may be repeated")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--keep", type=Path, help="folder for logs and state, kept")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        report = run(folder, args.seed, args.seconds, args.rate, args.fault)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    if any(report[kind] for kind in ("wrong", "lost", "hung", "twice")) or report["panicked"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
