"""Breaks a cluster of real processes under load, and counts what clients notice.

    scripts/chaos.py --seed 1 --seconds 300 --out chaos.json

Starts Debian's etcd, two schedulers, three backends and two frontends on loopback. A role reaches
etcd through a proxy of its own, and frontends reach a backend through one, which can cut them off
or delay what they send. Where the machine allows it, data folders and registered models are on a
small disk that can be full. There is no fault of clocks: no role of a cluster reads the wall clock,
and monotonic clocks do not jump. A balancer sends requests at a steady rate to
the frontends that are ready, checks every output against onnxruntime, and repeats a request
elsewhere only when its connection breaks. Faults follow in an order that the seed decides. Roles
are also exchanged, in turn, for those of another build (`--other`), or of a copy of this one. The
report has one row for each
fault: errors, slow replies and the longest time without a good reply until the next fault began.

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

from chaos_places import Proxy, small_disk  # noqa: E402
from cluster import Cluster, Process  # noqa: E402
from support import ASSETS, BINARY, free_ports  # noqa: E402

LEASE_MS = 3000
# Space for data folders and registered models; and where frontends reach backends.
DISK_MEBIBYTES = 16
WAY_HOST = "127.0.0.2"
ETCD_QUOTA = 32 << 20
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

    def __init__(self, folder: Path, seed: int, rate: float, other: Path | None = None) -> None:
        self.random = random.Random(seed)
        models = folder / "models"
        for name in MODELS:
            (models / name / "1").mkdir(parents=True)
            shutil.copy(ASSETS / "digits.onnx", models / name / "1" / "model.onnx")
            if name in REAL_TIME:
                (models / name / "atoll.toml").write_text('class = "rt"\ntimeout_ms = 500\n')
        quota = ("--quota-backend-bytes", str(ETCD_QUOTA))
        self.cluster = Cluster(folder, models, lease_ms=LEASE_MS, etcd_flags=quota)
        self.schedulers, self.backends = ["s1", "s2"], ["b1", "b2", "b3"]
        self.proxies: dict[str, Proxy] = {}
        # By backend: the way of frontends to it.
        self.ways: dict[str, Proxy] = {}
        self.disk = small_disk(folder / "disk", DISK_MEBIBYTES)
        data: tuple[str, ...] = ()
        if self.disk is not None:
            self.cluster.inside = self.disk.inside
            self.cluster.model_store[1] = str(self.disk.folder / "model-store")
            data = ("--data-dir", str(self.disk.folder / "data"))
        for name in self.schedulers:
            self.start_role(name, self.cluster.scheduler)
        for name in self.backends:
            self.start_backend(name, *data)
        self.frontends = {
            name: self.start_role(name, self.cluster.frontend, *data) for name in ("f1", "f2")
        }
        # An upgrade to the same build is a restart from another file.
        self.other = other or Path(shutil.copy(BINARY, folder / "other"))
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
            "cut backend off etcd": self.cut_backend,
            "cut frontend off etcd": self.cut_frontend,
            "cut leader off etcd": self.cut_leader,
            "cut frontends off backend": self.cut_frontends,
            "slow etcd": self.slow_etcd,
            "delay all ways to etcd": self.delay_etcd,
            "fill etcd": self.fill_etcd,
            "lose etcd's data": self.lose_data,
            "restart roles in turn": self.restart_in_turn,
            "restart everything": self.restart_everything,
            "exchange roles in turn": self.exchange_in_turn,
        }
        if self.disk is not None:
            self.kinds["fill disk"] = self.fill_disk

    def start_role(self, name: str, start: Callable[..., Any], *flags: str) -> Any:
        """Starts a role whose way to etcd is a proxy."""
        direct = self.cluster.store
        etcd_port = int(direct.rsplit(":", 1)[1])
        (port,) = free_ports(1)
        self.proxies[name] = Proxy("127.0.0.1", port, ("127.0.0.1", etcd_port))
        self.cluster.store = f"etcd://127.0.0.1:{port}"
        try:
            return start(name, *flags)
        finally:
            self.cluster.store = direct

    def start_backend(self, name: str, *flags: str) -> None:
        """Starts a backend to which frontends go through a proxy at another address of loopback."""
        http, grpc = free_ports(2)
        self.ways[name] = Proxy(WAY_HOST, grpc, ("127.0.0.1", grpc))
        ports = ("--http-port", str(http), "--grpc-port", str(grpc), "--advertise", WAY_HOST)
        store = self.cluster.model_store
        self.start_role(name, self.cluster.backend, *store, *ports, *flags)

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

    async def cut(self, name: str, seconds: float, proxies: dict[str, Proxy] | None = None) -> None:
        proxy = (proxies or self.proxies)[name]
        proxy.open.clear()
        await asyncio.sleep(seconds)
        proxy.open.set()

    async def cut_frontends(self, fault: Fault) -> None:
        """The backend lives, keeps its lease, and no frontend reaches it."""
        fault.target = await asyncio.to_thread(self.busiest_backend)
        await self.cut(fault.target, 5.0, self.ways)

    async def delay_etcd(self, fault: Fault) -> None:
        """As a store far away, or one that is overloaded: every message takes long."""
        delay = self.random.uniform(0.1, 0.5)
        fault.target, fault.note = "etcd", f"{1000 * delay:.0f} ms each way"
        for proxy in self.proxies.values():
            proxy.delay = delay
        await asyncio.sleep(5.0)
        for proxy in self.proxies.values():
            proxy.delay = 0.0

    async def fill_disk(self, fault: Fault) -> None:
        """Nothing can be saved or registered, also by a backend that is killed meanwhile."""
        assert self.disk is not None
        fault.target = self.random.choice(self.backends)
        await asyncio.to_thread(self.disk.fill)
        try:
            # Another content than what is there already.
            content = (ASSETS / "digits.onnx").read_bytes()
            content += b"\x12\x08" + self.random.randbytes(4).hex().encode()
            code = await self.register("full", content)
            fault.note = f"registration replied {code}"
            await self.down(fault.target, signal.SIGKILL, 0.5)
            await asyncio.sleep(2.0)
        finally:
            self.disk.empty()

    async def cut_backend(self, fault: Fault) -> None:
        fault.target = self.random.choice(self.backends)
        await self.cut(fault.target, 5.0)

    async def cut_frontend(self, fault: Fault) -> None:
        fault.target = self.random.choice(list(self.frontends))
        await self.cut(fault.target, 5.0)

    async def cut_leader(self, fault: Fault) -> None:
        fault.target = await self.leader()
        await self.cut(fault.target, 5.0)

    async def slow_etcd(self, fault: Fault) -> None:
        """As a disk would make it whose every write takes long."""
        fault.target = "etcd"
        for _ in range(15):
            await self.freeze("etcd", 0.3)
            await asyncio.sleep(0.1)

    def call(self, path: str, **words: Any) -> dict[str, Any]:
        url = f"{self.cluster.store.replace('etcd', 'http')}/v3/{path}"
        reply = requests.post(url, json=words, timeout=10)
        reply.raise_for_status()
        return reply.json()

    def fill(self) -> int:
        """Writes until etcd refuses; the number of writes."""
        for number in range(1000):
            try:
                self.etcd("put", key=f"/chaos/{number}", value="x" * 1_000_000)
            except requests.HTTPError:
                return number
        raise AssertionError("etcd has no quota")

    def empty(self) -> None:
        found = self.etcd("deleterange", key="/chaos/", range_end="/chaos0")
        self.call("kv/compaction", revision=found["header"]["revision"], physical=True)
        self.call("maintenance/defragment")
        member = found["header"]["member_id"]
        self.call("maintenance/alarm", action="DEACTIVATE", memberID=member, alarm="NOSPACE")

    async def fill_etcd(self, fault: Fault) -> None:
        fault.target = "etcd"
        fault.note = f"{await asyncio.to_thread(self.fill)} MB"
        await asyncio.sleep(4.0)
        await asyncio.to_thread(self.empty)

    async def lose_data(self, fault: Fault) -> None:
        fault.target = "etcd"
        await self.kill("etcd")
        await asyncio.to_thread(shutil.rmtree, self.cluster.folder / "etcd")
        self.process("etcd").start()
        # Until leases, records and the plan are there again.
        await asyncio.sleep(6.0)

    async def exchange_in_turn(self, fault: Fault) -> None:
        """A rolling upgrade to the other build, and back."""
        fault.target = str(self.other)
        for old, build in ((BINARY, self.other), (self.other, BINARY)):
            for name in (*self.schedulers, *self.backends, *self.frontends):
                await self.kill(name, signal.SIGTERM)
                command = self.process(name).command
                command[command.index(str(old))] = str(build)
                self.process(name).start()
                await asyncio.sleep(2.0)

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
        for proxy in (*self.proxies.values(), *self.ways.values()):
            await proxy.listen()
        await asyncio.to_thread(self.cluster.wait_ready)
        await asyncio.to_thread(self.cluster.wait_status, self.is_complete)
        ports = [server.http_port for server in self.frontends.values()]
        self.balancer = Balancer(ports, self.samples, self.rate, self.seed)
        load = asyncio.create_task(self.balancer.run())
        await asyncio.sleep(REST_SECONDS)
        order: list[str] = []
        # Every round is finished, so that each kind of fault comes equally often.
        while order or self.balancer.now() < seconds:
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
            fault.burst = burst(mine, fault.began, min(end, self.balancer.now()))
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


def burst(replies: list[Reply], began: float, ended: float) -> dict[str, Any]:
    """What clients noticed of a fault until the next one."""
    good = sorted(reply.at + reply.took for reply in replies if reply.kind == "good")
    times = [began, *good, max(ended, good[-1] if good else began)]
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
    folder: Path,
    seed: int,
    seconds: float,
    rate: float,
    kinds: list[str] | None = None,
    other: Path | None = None,
) -> dict[str, Any]:
    """Runs and stops a cluster in `folder`; all kinds of faults unless some are named."""
    chaos = Chaos(folder.resolve(), seed, rate, other)
    try:
        return asyncio.run(chaos.run(seconds, kinds or list(chaos.kinds)))
    finally:
        for name in chaos.cluster.processes:
            chaos.signal(name, signal.SIGCONT)
        chaos.cluster.stop()
        if chaos.disk is not None:
            chaos.disk.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rate", type=float, default=150, help="requests per second")
    parser.add_argument("--fault", action="append", help="only this kind; may be repeated")
    parser.add_argument("--other", type=Path, help="binary that roles are exchanged for, in turn")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--keep", type=Path, help="folder for logs and state, kept")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        report = run(folder, args.seed, args.seconds, args.rate, args.fault, args.other)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    if any(report[kind] for kind in ("wrong", "lost", "hung", "twice")) or report["panicked"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
