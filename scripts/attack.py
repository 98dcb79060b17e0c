#!/usr/bin/env python3
"""Attacks a server within a limit of memory, beside real-time clients, and checks that it lives.

    scripts/attack.py --seconds 600 --json attack.json

A server of its own gets 2 GiB of memory: by a memory cgroup (v1 or v2) where this user may make
one, else by a limit of the address space. Real-time clients are measured alone first. Then clients
send the worst bodies that are known (scripts/attack_bodies.py), as processes that only get idle
cores, because in reality they are other machines. Fails when the process ends, its memory exceeds
the limit, a real-time request fails, or the 99th percentile of real time is more than
--max-slowdown times what it is alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from attack_bodies import Attack, make_attacks, make_models

ROOT = Path(__file__).resolve().parents[1]
RT_BODY = {
    "inputs": [{"name": "x", "shape": [1, 1024], "datatype": "FP32", "data": [0.5] * 1024}],
    "parameters": {"atoll_class": "rt"},
}
# How long a client holds a connection on which it says no more.
HELD_SECONDS = 3.0
REQUEST_SECONDS = 60


class MemoryGroup:
    """A memory cgroup below this process's own, or none where it cannot be made."""

    def __init__(self, limit: int) -> None:
        self.folder, self.version = None, 0
        for version, parent in self.parents():
            folder = parent / f"atoll-attack-{os.getpid()}"
            name = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                (folder / name).write_text(str(limit))
            except OSError:
                # No such controller here, or no right to use it.
                folder.rmdir()
                continue
            self.folder, self.version = folder, version
            return

    @staticmethod
    def parents() -> list[tuple[int, Path]]:
        found = []
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                found.append((1, Path(f"/sys/fs/cgroup/memory{path}")))
            elif number == "0" and not controllers:
                found.append((2, Path(f"/sys/fs/cgroup{path}")))
        return [(version, path) for version, path in found if path.is_dir()]

    def join(self) -> None:
        """Called in the child before it becomes the server."""
        if self.folder:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def read(self, first: str, second: str) -> int | None:
        if not self.folder:
            return None
        path = self.folder / (first if self.version == 1 else second)
        return int(path.read_text().split()[0]) if path.exists() else None

    def peak(self) -> int | None:
        return self.read("memory.max_usage_in_bytes", "memory.peak")

    def killed(self) -> int | None:
        """Processes of the group that the kernel ended for lack of memory."""
        if not self.folder:
            return None
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        lines = (self.folder / name).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def describe(self) -> str:
        kinds = {0: "limit of the address space", 1: "cgroup v1", 2: "cgroup v2"}
        return kinds[self.version]

    def remove(self) -> None:
        for _ in range(50):
            try:
                if self.folder:
                    self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class AttackedServer:
    """A server within the limit, with tokens for real-time clients and for attackers."""

    def __init__(self, binary: Path, folder: Path, limit_mib: int, flags: list[str]) -> None:
        self.folder, self.group = folder, MemoryGroup(limit_mib << 20)
        make_models(folder / "models")
        data = folder / "data"
        self.rt_token = self.token(binary, data, "--scope", "infer", "--class", "rt,be")
        self.token_ = self.token(binary, data, "--scope", "infer,register")
        self.ports = free_ports(3)
        command = [str(binary), "serve", "--model-repository", str(folder / "models")]
        for flag, port in zip(("http", "grpc", "metrics"), self.ports, strict=True):
            command += [f"--{flag}-port", str(port)]
        command += ["--data-dir", str(data), "--model-check-secs", "5", *flags]
        if not self.group.folder:
            # Code, threads and allocator need some of it.
            command += ["--memory-limit-mib", str(limit_mib * 3 // 4)]

        def confine() -> None:
            self.group.join()
            if not self.group.folder:
                # Stacks and arenas of threads are mapped, and hardly used.
                space = (limit_mib << 20) + (6 << 30)
                resource.setrlimit(resource.RLIMIT_AS, (space, space))

        self.log = folder / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, preexec_fn=confine
            )
        self.wait_ready()

    @staticmethod
    def token(binary: Path, data: Path, *flags: str) -> str:
        command = [str(binary), "token", "create", "--data-dir", str(data), *flags]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def wait_ready(self) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            try:
                client = http.client.HTTPConnection("127.0.0.1", self.ports[2], timeout=5)
                client.request("GET", "/v2/health/ready")
                if client.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"the server is not ready:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.group.remove()
        return code


def real_time(port: int, token: str, seconds: float, rate: float, out) -> None:
    """Sends real-time requests at a rate, one after the other, and reports each latency."""
    body = json.dumps(RT_BODY).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    times, failures = [], Counter()
    start, number = time.monotonic(), 0
    while True:
        due = start + number / rate
        number += 1
        now = time.monotonic()
        if due > start + seconds:
            break
        time.sleep(max(0.0, due - now))
        began = time.monotonic()
        try:
            client.request("POST", "/v2/models/rt/infer", body, headers)
            reply = client.getresponse()
            text = reply.read()
            if reply.status == 200:
                times.append(time.monotonic() - began)
            else:
                failures[f"{reply.status}: {text[:120].decode(errors='replace')}"] += 1
        except (OSError, http.client.HTTPException) as error:
            failures[repr(error)[:120]] += 1
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    out.put((times, failures))


def measure_real_time(server: AttackedServer, seconds: float, clients: int, rate: float) -> dict:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    arguments = (server.ports[0], server.rt_token, seconds, rate, out)
    processes = [context.Process(target=real_time, args=arguments) for _ in range(clients)]
    for process in processes:
        process.start()
    times, failures = [], Counter()
    for _ in processes:
        some, failed = out.get(timeout=seconds + 120)
        times += some
        failures += failed
    for process in processes:
        process.join()
    times.sort()
    quantile = lambda share: round(times[int(share * (len(times) - 1))] * 1e3, 3) if times else None
    return {
        "requests": len(times),
        "p50_ms": quantile(0.5),
        "p90_ms": quantile(0.9),
        "p99_ms": quantile(0.99),
        "max_ms": quantile(1.0),
        "failures": dict(failures),
    }


def send(attack: Attack, ports: list[int], token: str, channel) -> str:
    """Sends one hostile request; returns what became of it."""
    if attack.kind == "raw":
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=REQUEST_SECONDS) as stream:
            line = b"Host: localhost\r\n"
            credentials = f"Authorization: Bearer {token}\r\n".encode()
            stream.sendall(attack.body.replace(line, line + credentials))
            stream.settimeout(HELD_SECONDS)
            try:
                data = stream.recv(4096)
            except TimeoutError:
                return "held"
            return data[9:12].decode(errors="replace") if data.startswith(b"HTTP") else "closed"
    if attack.kind == "grpc":
        import grpc

        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        metadata = [("authorization", f"Bearer {token}")]
        try:
            call(
                attack.body,
                timeout=REQUEST_SECONDS,
                metadata=metadata,
                compression=grpc.Compression.Gzip,
            )
            return "OK"
        except grpc.RpcError as error:
            return error.code().name
    headers = {"Authorization": f"Bearer {token}", **attack.headers}
    client = http.client.HTTPConnection("127.0.0.1", ports[0], timeout=REQUEST_SECONDS)
    try:
        client.request("POST", attack.path, attack.body, headers)
        reply = client.getresponse()
        # A reply of gigabytes is read as slowly as it comes.
        while reply.read(1 << 20):
            pass
        return str(reply.status)
    except TimeoutError:
        return "no reply in time"
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        client.close()


def attacker(ports, token, seconds, threads, seed, only, out, ready) -> None:
    """A process of attackers."""
    import grpc

    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)
    attacks = [attack for attack in make_attacks() if only in attack.name]
    limit = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    channel = grpc.insecure_channel(f"127.0.0.1:{ports[1]}", options=limit)
    counts, lock = Counter(), threading.Lock()
    ready.wait()
    until = time.monotonic() + seconds

    def work(number: int) -> None:
        order = random.Random(seed * 1000 + number)
        while time.monotonic() < until:
            attack = order.choice(attacks)
            try:
                result = send(attack, ports, token, channel)
            except OSError as error:
                result = type(error).__name__
            with lock:
                counts[attack.name, result] += 1

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    out.put(dict(counts))


class Attackers:
    """Processes that attack together."""

    def __init__(self, server: AttackedServer, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.out, self.processes = context.Queue(), []
        clients = args.clients
        number = min(4, clients)
        # Bodies take a while to make.
        self.ready = context.Barrier(number + 1)
        for index in range(number):
            threads = clients // number + (index < clients % number)
            arguments = (server.ports, server.token_, args.seconds, threads, args.seed + index)
            arguments += (args.only,)
            process = context.Process(target=attacker, args=(*arguments, self.out, self.ready))
            process.start()
            self.processes.append(process)

    def start(self) -> None:
        self.ready.wait(timeout=300)

    def finish(self) -> dict[str, dict[str, int]]:
        table: dict[str, dict[str, int]] = {}
        for _ in self.processes:
            for (name, result), count in self.out.get(timeout=REQUEST_SECONDS + 300).items():
                row = table.setdefault(name, {})
                row[result] = row.get(result, 0) + count
        for process in self.processes:
            process.join()
        return dict(sorted(table.items()))


class MemoryWatch(threading.Thread):
    """The largest resident size of the server, and whether it ended."""

    def __init__(self, process: subprocess.Popen) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.samples = process, 0, []
        self.done = threading.Event()
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        while not self.done.wait(0.25):
            try:
                now = status_bytes(self.process.pid, "VmRSS")
            except OSError:
                return
            self.peak = max(self.peak, now)
            self.samples.append((round(time.monotonic() - began, 1), now >> 20))


def run(args: argparse.Namespace, folder: Path) -> dict:
    server = AttackedServer(args.binary, folder, args.limit_mib, args.flag)
    watch = MemoryWatch(server.process)
    try:
        measure_real_time(server, 2, args.rt_clients, args.rt_rate)
        alone = measure_real_time(server, args.alone_seconds, args.rt_clients, args.rt_rate)
        attackers = Attackers(server, args)
        attackers.start()
        attacked = measure_real_time(server, args.seconds, args.rt_clients, args.rt_rate)
        table = attackers.finish()
        after = measure_real_time(server, 2, args.rt_clients, args.rt_rate)
        alive = server.process.poll() is None
        watch.done.set()
        report = {
            "command": " ".join(sys.argv),
            "cores": os.cpu_count(),
            "limit": server.group.describe(),
            "limit_mib": args.limit_mib,
            "seconds": args.seconds,
            "clients": args.clients,
            "alive": alive,
            "peak_rss_mib": watch.peak >> 20,
            "cgroup_peak_mib": (server.group.peak() or 0) >> 20 or None,
            "killed_for_memory": server.group.killed(),
            "real_time": {"alone": alone, "attacked": attacked, "after": after},
            "attacks": table,
        }
        log = server.log.read_text(errors="replace")
        report["panics"] = log.count("panicked")
        report["aborts"] = log.count("memory allocation of")
    finally:
        code = server.stop()
    report["exit_code"] = code
    return report


def problems(report: dict, max_slowdown: float) -> list[str]:
    found = []
    times = report["real_time"]
    if not report["alive"] or report["exit_code"] != 0:
        found.append(f"the server ended with {report['exit_code']}")
    if report["peak_rss_mib"] > report["limit_mib"]:
        found.append(f"it used {report['peak_rss_mib']} MiB")
    if report["panics"] or report["aborts"]:
        found.append(f"{report['panics']} panics, {report['aborts']} aborts in the log")
    for name, part in times.items():
        if part["failures"] or not part["requests"]:
            found.append(f"real time {name}: {part['requests']} replies, {part['failures']}")
    if times["alone"]["p99_ms"] and times["attacked"]["p99_ms"]:
        slowdown = times["attacked"]["p99_ms"] / times["alone"]["p99_ms"]
        report["p99_slowdown"] = round(slowdown, 2)
        if slowdown > max_slowdown:
            found.append(f"p99 of real time is {slowdown:.2f} times that alone")
    for name, results in report["attacks"].items():
        # 500 is an error of the server, not of what it was sent.
        if "500" in results or "INTERNAL" in results or "UNKNOWN" in results:
            found.append(f"{name}: {results}")
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = ROOT / "target" / "release" / "atoll"
    parser.add_argument("--binary", type=Path, default=Path(os.environ.get("ATOLL_BIN", default)))
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--alone-seconds", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64, help="attackers")
    parser.add_argument("--rt-clients", type=int, default=2)
    parser.add_argument("--rt-rate", type=float, default=20, help="requests per second of each")
    parser.add_argument("--limit-mib", type=int, default=2048)
    parser.add_argument("--max-slowdown", type=float, default=2.0)
    parser.add_argument("--only", default="", help="only attacks whose name contains this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flag", action="append", default=[], help="further flag of atoll serve")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        report = run(args, Path(folder))
        found = problems(report, args.max_slowdown)
        report["problems"] = found
    text = json.dumps(report, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    for problem in found:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
