#!/usr/bin/env python3
"""A soak under mixed load, registrations, hostile bodies, restarts and faults.

    scripts/soak_security.py --seconds 3600 --append evidence/soak_security.txt

Pieces add up in the file: each run appends one, and the totals are computed again. A piece fails
when an acknowledged registration is lost, a reply is wrong, a request fails while the server is up,
a restart fails, or memory grows by more than --max-slope MiB per hour.

Each registered version multiplies by a constant of its own, so that every reply shows which version
computed it.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from attack import ROOT, AttackedServer, send, status_bytes
from attack_bodies import REAL, form, make_attacks, onnx_model

import numpy as np
from onnx import helper, numpy_helper

# Growth is measured after the allocator and the caches have filled.
WARM_SECONDS = 60
STOP_SECONDS = 60
# Bodies come and go: the least memory of such a time is what stays.
WINDOW_SECONDS = 30
# Why a good model is refused: its check was killed, or the machine is too busy for its time limit.
CHECK_ENDED = (b"killed", b"signal", b"took longer than")
# Statuses that a healthy server may answer under load.
BUSY = {429, 503}


def scale_model(factor: float) -> bytes:
    """y = factor * x, with some weights that make the file as large as a small network."""
    table = np.full((64, 1024), factor, np.float32)
    first = numpy_helper.from_array(np.array([0, 0], np.int64), "first")
    nodes = [
        helper.make_node("GatherND", ["table", "first"], ["factor"]),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    weights = [numpy_helper.from_array(table, "table"), first]
    return onnx_model(nodes, [("x", REAL, ["n"])], ["y"], weights)


class Soak:
    """The server, what clients may expect of it, and what went wrong."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.server = AttackedServer(args.binary, folder, args.limit_mib, [])
        self.command = self.server.process.args
        self.stopped, self.up = threading.Event(), threading.Event()
        self.up.set()
        self.life = 0
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        # Seconds since the start, the number of the process, and its MiB.
        self.samples: list[tuple[float, int, float]] = []
        self.began = time.monotonic()

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def problem(self, text: str) -> None:
        with self.lock:
            self.problems.append(f"{time.monotonic() - self.began:.0f} s: {text}"[:400])

    def post(self, client, path: str, body: bytes, token: str, headers: dict) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}", **headers}
        client.request("POST", path, body, headers)
        reply = client.getresponse()
        return reply.status, reply.read()

    def call(self, method: str, path: str, body: bytes = b"", headers: dict | None = None):
        """One request on a connection of its own; `None` if the server was not up throughout."""
        life, was_up = self.life, self.up.is_set()
        client = http.client.HTTPConnection("127.0.0.1", self.server.ports[0], timeout=90)
        try:
            given = {"Authorization": f"Bearer {self.server.token_}", **(headers or {})}
            client.request(method, path, body, given)
            reply = client.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            if was_up and self.up.is_set() and life == self.life:
                self.problem(f"{method} {path}: {error!r}")
            return None
        finally:
            client.close()


def infer(soak: Soak, model: str, value: float) -> float | int | None:
    """The output for one value; a status, or `None` where the server was down."""
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [value]}
    body = json.dumps({"inputs": [tensor]}).encode()
    reply = soak.call("POST", f"/v2/models/{model}/infer", body)
    if reply is None:
        return None
    if reply[0] != 200:
        return reply[0]
    return float(json.loads(reply[1])["outputs"][0]["data"][0])


def load_rest(soak: Soak, seed: int) -> None:
    """Inference on models of the repository, verified, on connections that are kept."""
    order = random.Random(seed)
    client = None
    while not soak.stopped.is_set():
        value = order.random()
        tensor = {"name": "x", "shape": [3], "datatype": "FP32", "data": [value] * 3}
        body = json.dumps({"inputs": [tensor]}).encode()
        life, was_up = soak.life, soak.up.is_set()
        try:
            if client is None:
                client = http.client.HTTPConnection("127.0.0.1", soak.server.ports[0], timeout=90)
            token = soak.server.token_
            status, text = soak.post(client, "/v2/models/identity/infer", body, token, {})
        except (OSError, http.client.HTTPException) as error:
            client = None
            if was_up and soak.up.is_set() and life == soak.life:
                soak.problem(f"REST: {error!r}")
            time.sleep(0.2)
            continue
        if status == 200:
            got = json.loads(text)["outputs"][0]["data"]
            if any(abs(one - value) > 1e-6 for one in got):
                soak.problem(f"REST: {value} became {got}")
            soak.count("REST replies")
        elif status in BUSY:
            soak.count("REST busy")
        elif soak.up.is_set() and life == soak.life:
            soak.problem(f"REST: {status} {text[:100]!r}")
        time.sleep(order.random() * 0.05)


def load_grpc(soak: Soak, seed: int) -> None:
    """Inference over gRPC with an unmodified client, verified."""
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    order = random.Random(seed)
    client, headers = None, {"authorization": f"Bearer {soak.server.token_}"}
    while not soak.stopped.is_set():
        values = np.array([order.random() for _ in range(7)], np.float32)
        tensor = triton.InferInput("x", [7], "FP32")
        tensor.set_data_from_numpy(values)
        life, was_up = soak.life, soak.up.is_set()
        try:
            if client is None:
                client = triton.InferenceServerClient(f"127.0.0.1:{soak.server.ports[1]}")
            reply = client.infer("identity", [tensor], headers=headers, client_timeout=90)
            if not (reply.as_numpy("y") == values).all():
                soak.problem(f"gRPC: {values} became {reply.as_numpy('y')}")
            soak.count("gRPC replies")
        except InferenceServerException as error:
            text = str(error)
            if "UNAVAILABLE" in str(error.status()) and "memory" in text:
                soak.count("gRPC busy")
            elif was_up and soak.up.is_set() and life == soak.life:
                soak.problem(f"gRPC: {text}")
            client = None
            time.sleep(0.2)
        time.sleep(order.random() * 0.05)


def attack(soak: Soak, seed: int) -> None:
    """Hostile bodies."""
    import grpc

    order, attacks = random.Random(seed), make_attacks()
    limit = [("grpc.max_send_message_length", -1)]
    channel = grpc.insecure_channel(f"127.0.0.1:{soak.server.ports[1]}", options=limit)
    while not soak.stopped.is_set():
        one = order.choice(attacks)
        try:
            result = send(one, soak.server.ports, soak.server.token_, channel)
        except OSError:
            result = "error"
        if result in ("500", "INTERNAL", "UNKNOWN"):
            soak.problem(f"{one.name}: {result}")
        soak.count("attacks")
        soak.stopped.wait(1)


class Owner:
    """Registers, rolls back and deletes versions of one name, and knows what is in force."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.soak, self.name = soak, f"owned{number}"
        self.order = random.Random(number)
        # Factors by version, of those that the server acknowledged.
        self.versions: dict[int, float] = {}
        self.current: float | None = None
        # What a request without a reply may have put in force.
        self.maybe: set[float | None] = set()

    def run(self) -> None:
        while not self.soak.stopped.is_set():
            self.soak.up.wait(timeout=1)
            action = self.order.random()
            if self.current is None or action < 0.4:
                self.register()
            elif action < 0.5 and len(self.versions) > 1:
                self.roll_back()
            elif action < 0.53:
                self.delete()
            else:
                self.verify()
            time.sleep(0.1 + self.order.random())

    def register(self) -> None:
        factor = round(self.order.uniform(1, 1000), 3)
        body, headers = form({"name": self.name.encode(), "model": scale_model(factor)})
        reply = self.soak.call("POST", "/register", body, headers)
        if reply is None:
            self.maybe.add(factor)
        elif reply[0] == 200:
            self.versions[int(json.loads(reply[1])["version"])] = factor
            self.current, self.maybe = factor, set()
            self.soak.count("registrations")
        elif reply[0] in BUSY or any(word in reply[1] for word in CHECK_ENDED):
            self.soak.count("registrations refused")
        else:
            self.soak.problem(f"register {self.name}: {reply[0]} {reply[1][:150]!r}")

    def roll_back(self) -> None:
        reply = self.soak.call("POST", f"/v2/atoll/models/{self.name}/rollback")
        if reply is None:
            # Any of the versions that the server has may be in force now.
            self.maybe |= set(self.versions.values())
        elif reply[0] == 200:
            version = int(json.loads(reply[1])["version"])
            self.current = self.versions.get(version, self.current)
            self.soak.count("rollbacks")
        elif reply[0] not in BUSY | {404}:
            self.soak.problem(f"roll back {self.name}: {reply[0]} {reply[1][:150]!r}")

    def delete(self) -> None:
        reply = self.soak.call("DELETE", f"/v2/atoll/models/{self.name}")
        if reply is None:
            self.maybe.add(None)
        elif reply[0] == 200:
            self.versions, self.current, self.maybe = {}, None, set()
            self.soak.count("deletions")
        elif reply[0] not in BUSY:
            self.soak.problem(f"delete {self.name}: {reply[0]} {reply[1][:150]!r}")

    def verify(self) -> bool:
        """Whether what is in force is what the server acknowledged last."""
        if not self.soak.up.is_set():
            return True
        got = infer(self.soak, self.name, 2.0)
        if got is None or (isinstance(got, int) and got in BUSY):
            return True
        found = None if isinstance(got, int) else got / 2.0
        known = {self.current} | self.maybe
        near = lambda one: (found is None) == (one is None) and (
            found is None or abs(found - one) < 1e-3 * abs(one)
        )
        match = [one for one in known if near(one)]
        if not match:
            self.soak.problem(f"{self.name}: {got}, expected {known} times 2")
            with self.soak.lock:
                self.soak.counts["lost"] += 1
            return False
        self.current, self.maybe = match[0], set()
        self.soak.count("verified")
        return True


def supervise(soak: Soak, owners: list[Owner]) -> None:
    """Restarts, kills and stalls the server, and kills checks of models."""
    order, last = random.Random(7), time.monotonic()
    while not soak.stopped.wait(1):
        process = soak.server.process
        if process.poll() is not None:
            soak.problem(f"the server ended by itself with {process.returncode}")
            restart(soak, None)
        elif time.monotonic() - last > soak.args.restart_seconds:
            kind = signal.SIGKILL if soak.counts["restarts"] % 2 else signal.SIGTERM
            restart(soak, kind)
            last = time.monotonic()
            for owner in owners:
                owner.verify()
        elif order.random() < 1 / 60:
            process.send_signal(signal.SIGSTOP)
            time.sleep(order.uniform(0.2, 2))
            process.send_signal(signal.SIGCONT)
            soak.count("stalls")
        elif order.random() < 1 / 20:
            kill_check(soak, process.pid)


def kill_check(soak: Soak, pid: int) -> None:
    """Ends the process in which a model is checked, if there is one now."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            try:
                os.kill(int(child), signal.SIGKILL)
                soak.count("killed checks")
            except OSError:
                pass


def restart(soak: Soak, with_signal: signal.Signals | None) -> None:
    soak.up.clear()
    process = soak.server.process
    if with_signal is not None:
        process.send_signal(with_signal)
        began = time.monotonic()
        try:
            code = process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            soak.problem(f"SIGTERM did not end the server within {STOP_SECONDS} s")
            process.kill()
            code = process.wait()
        if with_signal == signal.SIGTERM and code != 0:
            soak.problem(f"after SIGTERM it ended with {code}, {time.monotonic() - began:.0f} s")
        soak.count("kills" if with_signal == signal.SIGKILL else "orderly restarts")
    soak.count("restarts")
    with soak.server.log.open("ab") as output:
        soak.server.process = subprocess.Popen(
            soak.command, stdout=output, stderr=output, preexec_fn=soak.server.group.join
        )
    soak.server.wait_ready()
    soak.life += 1
    soak.up.set()


def watch(soak: Soak) -> None:
    while not soak.stopped.wait(2):
        life, process = soak.life, soak.server.process
        try:
            now = status_bytes(process.pid, "VmRSS") / (1 << 20)
        except OSError:
            continue
        if now and life == soak.life and soak.up.is_set():
            soak.samples.append((time.monotonic() - soak.began, life, now))


def slope(samples: list[tuple[float, int, float]]) -> dict:
    """Growth in MiB per hour of what is left between requests, within processes after a warm-up."""
    lives: dict[int, list[tuple[float, float]]] = {}
    for at, life, mib in samples:
        lives.setdefault(life, []).append((at, mib))
    # Slope over all lives together: each has an offset of its own.
    top = bottom = 0.0
    medians = []
    for points in lives.values():
        windows: dict[int, tuple[float, float]] = {}
        for at, mib in points:
            if at - points[0][0] > WARM_SECONDS:
                window = int(at // WINDOW_SECONDS)
                windows[window] = min(windows.get(window, (at, mib)), (at, mib), key=lambda p: p[1])
        late = list(windows.values())
        if len(late) < 5:
            continue
        middle_at = statistics.fmean(at for at, _ in late)
        middle = statistics.fmean(mib for _, mib in late)
        top += sum((at - middle_at) * (mib - middle) for at, mib in late)
        bottom += sum((at - middle_at) ** 2 for at, _ in late)
        medians.append(round(statistics.median(mib for _, mib in late), 1))
    return {
        "mib_per_hour": round(3600 * top / bottom, 2) if bottom else None,
        "median_mib_of_each_process": medians,
        "max_mib": round(max((mib for _, _, mib in samples), default=0), 1),
    }


def piece(args: argparse.Namespace, folder: Path) -> dict:
    soak = Soak(args, folder)
    owners = [Owner(soak, number) for number in range(4)]
    # Threads that still wait for a reply at the end do not keep the process.
    start = lambda target, *given: threading.Thread(target=target, args=given, daemon=True)
    work = [(load_rest, seed) for seed in range(3)] + [(load_grpc, 3), (attack, 4)]
    threads = [start(task, soak, seed) for task, seed in work]
    threads += [start(owner.run) for owner in owners]
    threads += [start(watch, soak)]
    supervisor = start(supervise, soak, owners)
    for thread in [*threads, supervisor]:
        thread.start()
    try:
        end = soak.began + args.seconds
        while time.monotonic() < end and len(soak.problems) < 50:
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    soak.stopped.set()
    until = time.monotonic() + 120
    for thread in [supervisor, *threads]:
        thread.join(timeout=max(0.0, until - time.monotonic()))
    for owner in owners:
        owner.verify()
    memory = slope(soak.samples)
    log = soak.server.log.read_text(errors="replace")
    for word in ("panicked", "memory allocation of"):
        if word in log:
            soak.problem(f"the log has '{word}'")
    grown = memory["mib_per_hour"]
    if args.seconds >= 600 and grown is not None and grown > args.max_slope:
        soak.problem(f"memory grows by {grown} MiB per hour")
    code = soak.server.stop()
    if code != 0:
        soak.problem(f"it ended with {code}")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "command": " ".join(sys.argv),
        "seconds": round(time.monotonic() - soak.began),
        "limit": f"{args.limit_mib} MiB, {soak.server.group.describe()}",
        "counts": dict(sorted(soak.counts.items())),
        "memory": memory,
        "problems": soak.problems,
    }


def append(path: Path, one: dict) -> dict:
    """Adds a piece to the file and computes the totals of all."""
    whole = json.loads(path.read_text()) if path.exists() else {"pieces": []}
    whole["pieces"].append(one)
    counts: Counter[str] = Counter()
    for each in whole["pieces"]:
        counts.update(each["counts"])
    seconds = sum(each["seconds"] for each in whole["pieces"])
    slopes = [each["memory"]["mib_per_hour"] for each in whole["pieces"]]
    whole["total"] = {
        "hours": round(seconds / 3600, 2),
        "counts": dict(sorted(counts.items())),
        "lost": counts["lost"],
        "problems": sum(len(each["problems"]) for each in whole["pieces"]),
        "mib_per_hour_of_each_piece": slopes,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return whole["total"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = ROOT / "target" / "release" / "atoll"
    parser.add_argument("--binary", type=Path, default=Path(os.environ.get("ATOLL_BIN", default)))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--restart-seconds", type=float, default=900)
    parser.add_argument("--limit-mib", type=int, default=2048)
    parser.add_argument("--max-slope", type=float, default=60, help="MiB per hour")
    parser.add_argument("--append", type=Path, help="file to which the piece is added")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one = piece(args, Path(folder))
    print(json.dumps(one, indent=1))
    if args.append:
        print(json.dumps(append(args.append, one), indent=1))
    return 1 if one["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
