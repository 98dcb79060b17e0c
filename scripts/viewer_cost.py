#!/usr/bin/env python3
"""Measures what viewers of the live stream cost a server: requests a second and p99 with no
viewer, one and five, in turns.

    scripts/viewer_cost.py target/release/atoll models/identity_fp32.onnx --rounds 12

The server runs on the CPU with a model of one FP32 input; clients keep one request each in flight
over REST. Each round measures every number of viewers once, in an order that rotates. Viewers ask
for spans, as the page Timeline does, and read at once. The table has medians over the rounds, and
the median of each round's change against no viewer. The processor time that the server takes for a
request differs less from round to round than rates do; viewers are part of it. A second table has
the share of a core that the server takes, without requests and with some at a steady pace.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

VIEWERS = [0, 1, 5]
BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
).encode()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start(binary: str, model: Path, folder: str) -> tuple[subprocess.Popen[bytes], int]:
    ports = free_ports(3)
    names = ["--http-port", "--grpc-port", "--metrics-port"]
    flags = [part for name, port in zip(names, ports, strict=True) for part in (name, str(port))]
    command = [binary, "serve", "--model-repository", str(model), "--data-dir", folder, *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/v2/health/ready", timeout=5)
            return process, ports[0]
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise SystemExit("the server did not start")


class Viewer:
    """Reads the live stream with spans until it is closed."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(b"GET /v2/atoll/live?spans=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.bytes = 0
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        try:
            while data := self.socket.recv(1 << 20):
                self.bytes += len(data)
        except OSError:
            pass

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.socket.close()


def load(
    process: int, port: int, model: str, clients: int, seconds: float
) -> tuple[float, float, float]:
    """Requests a second, their p99 in milliseconds, and the server's microseconds for one."""
    request = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    ).encode() + BODY
    selector = selectors.DefaultSelector()
    times: list[float] = []
    sent: dict[socket.socket, float] = {}
    for _ in range(clients):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ)
        sent[connection] = time.perf_counter()
        connection.sendall(request)
    taken = processor_seconds(process)
    began = time.perf_counter()
    now = began
    while now - began < seconds:
        for key, _ in selector.select():
            connection = key.fileobj
            # A reply of a few hundred bytes comes in one piece.
            reply = connection.recv(65536)
            assert reply.startswith(b"HTTP/1.1 200"), reply[:300]
            now = time.perf_counter()
            times.append(now - sent[connection])
            sent[connection] = now
            connection.sendall(request)
    taken = processor_seconds(process) - taken
    for connection in sent:
        connection.close()
    times.sort()
    p99 = times[int(len(times) * 0.99)] * 1e3
    return len(times) / (now - began), p99, taken / len(times) * 1e6


def processor_seconds(process: int) -> float:
    """What a process took of the processors so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def paced(port: int, model: str, rate: float, seconds: float) -> None:
    """Sends requests at a steady pace, over one connection."""
    request = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    ).encode() + BODY
    with socket.create_connection(("127.0.0.1", port)) as connection:
        began = time.perf_counter()
        for number in range(int(rate * seconds)):
            time.sleep(max(0.0, began + number / rate - time.perf_counter()))
            connection.sendall(request)
            reply = connection.recv(65536)
            assert reply.startswith(b"HTTP/1.1 200"), reply[:300]
        time.sleep(max(0.0, began + seconds - time.perf_counter()))


def shares(
    process: subprocess.Popen[bytes], port: int, model: str, args: argparse.Namespace
) -> dict[str, dict[int, float]]:
    """Share of a core that the server takes: by pace and number of viewers, medians of rounds."""
    taken: dict[tuple[int, int], list[float]] = {}
    cases = [(rate, count) for rate in (0, args.rate) for count in VIEWERS]
    for number in range(args.share_rounds):
        shift = number % len(cases)
        for rate, count in cases[shift:] + cases[:shift]:
            viewers = [Viewer(port) for _ in range(count)]
            time.sleep(0.5)
            before, began = processor_seconds(process.pid), time.perf_counter()
            if rate:
                paced(port, model, rate, args.seconds)
            else:
                time.sleep(args.seconds)
            took = time.perf_counter() - began
            share = (processor_seconds(process.pid) - before) / took
            taken.setdefault((rate, count), []).append(share)
            for viewer in viewers:
                viewer.close()
    return {
        f"{rate} requests/s": {
            count: round(statistics.median(taken[rate, count]), 4) for count in VIEWERS
        }
        for rate in (0, args.rate)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("model", type=Path, help="an ONNX file with the FP32 input INPUT0 [N, 1]")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=int, default=500, help="requests a second of the pace")
    parser.add_argument("--share-rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, port = start(args.binary, args.model, folder)
        results: dict[int, list[tuple[float, float, float]]] = {count: [] for count in VIEWERS}
        try:
            server = (process.pid, port, args.model.stem, args.clients)
            load(*server, 3)
            for number in range(args.rounds):
                shift = number % len(VIEWERS)
                for count in VIEWERS[shift:] + VIEWERS[:shift]:
                    viewers = [Viewer(port) for _ in range(count)]
                    time.sleep(0.3)
                    results[count].append(load(*server, args.seconds))
                    for viewer in viewers:
                        viewer.close()
                        assert viewer.bytes > 0
            taken = shares(process, port, args.model.stem, args)
        finally:
            process.terminate()
            process.wait()
    rows = []
    print("viewers  requests/s  change     p99 ms  change     us/request  change")
    for count, measured in results.items():
        rates, p99s, costs = zip(*measured, strict=True)
        changes = [
            statistics.median(
                one[i] / none[i] - 1 for one, none in zip(measured, results[0], strict=True)
            )
            for i in (0, 1, 2)
        ]
        row = {
            "viewers": count,
            "requests_per_second": round(statistics.median(rates)),
            "rate_change": round(changes[0], 5),
            "p99_ms": round(statistics.median(p99s), 3),
            "p99_change": round(changes[1], 5),
            "us_per_request": round(statistics.median(costs), 2),
            "us_change": round(changes[2], 5),
            "rounds": [[round(rate), round(p99, 3), round(us, 2)] for rate, p99, us in measured],
        }
        rows.append(row)
        print(f"{count:7}  {row['requests_per_second']:10}  {changes[0]:+7.2%}  "
              f"{row['p99_ms']:9.3f}  {changes[1]:+7.2%}  "
              f"{row['us_per_request']:10.2f}  {changes[2]:+7.2%}")
    print("\nshare of a core that the server takes, by viewers")
    for pace, by_viewers in taken.items():
        words = ", ".join(f"{count}: {share:.2%}" for count, share in by_viewers.items())
        print(f"{pace:>16}  {words}")
    if args.json:
        figures = {"seconds": args.seconds, "clients": args.clients, "rows": rows,
                   "shares_of_a_core": taken, "cores": os.cpu_count()}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
