#!/usr/bin/env python3
"""Measures what viewers of the live stream cost a server: the share of a core that it takes with no
viewer, one and five, in turns.

    scripts/viewer_cost.py target/release/atoll models/identity_fp32.onnx --rounds 12

The server runs on the CPU with a model of one FP32 input. Each round measures every number of
viewers, without requests and with some at a steady pace over one connection, in an order that
rotates. Viewers ask for spans, as the page Timeline does, and read at once. Figures are medians
over the rounds. What viewers cost at full load, `atoll bench server --viewers 0,1,5` measures.
"""

from __future__ import annotations

import argparse
import json
import os
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
    for number in range(args.rounds):
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
                assert viewer.bytes > 0
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
    parser.add_argument("--rate", type=int, default=500, help="requests a second of the pace")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, port = start(args.binary, args.model, folder)
        try:
            paced(port, args.model.stem, args.rate, 1)
            taken = shares(process, port, args.model.stem, args)
        finally:
            process.terminate()
            process.wait()
    print("share of a core that the server takes, by viewers")
    for pace, by_viewers in taken.items():
        words = ", ".join(f"{count}: {share:.2%}" for count, share in by_viewers.items())
        print(f"{pace:>16}  {words}")
    if args.json:
        figures = {"seconds": args.seconds, "rounds": args.rounds, "shares_of_a_core": taken,
                   "cores": os.cpu_count()}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
