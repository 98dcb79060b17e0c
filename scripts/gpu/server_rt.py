#!/usr/bin/env python3
"""Measure what best effort costs a real-time client of the server: p99 with and without it.

    server_rt.py ATOLL MODELS_FOLDER OUT.json [--device cuda:0] [--policy atoll]
                 [--rt vgg19] [--be resnet152,distilbert] [--rate 100] [--seconds 5] [--rounds 3]
                 [--others be] [--serve='--preempt-real-time']

Starts `atoll serve` on the models of MODELS_FOLDER (NAME.onnx, and inputs from NAME.npz if it
exists), on loopback. One client requests the real-time model at a fixed rate; each best-effort
client sends its next request as soon as it gets a reply. Every client is a separate process. With
`--others rt:5` the other clients are real time of priority 5, and the first has priority 1.
`--serve` passes flags to the server. Phases without and with best effort alternate, so that drift
affects both. Uses gRPC through tritonclient if it is installed, otherwise HTTP with binary tensors;
the JSON names the protocol.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

try:
    import tritonclient.grpc as triton
except ImportError:
    triton = None

KINDS = {
    "float32": "FP32",
    "float16": "FP16",
    "float64": "FP64",
    "int64": "INT64",
    "int32": "INT32",
    "uint8": "UINT8",
    "bool": "BOOL",
}
NUMPY = {kind: name for name, kind in KINDS.items()}
TOKENS = 128
START_SECONDS = 600


def parameters_of(kind: str) -> dict:
    """Parameters of a request: its class and, after a colon, its priority."""
    name, _, priority = kind.partition(":")
    return {"atoll_class": name} | ({"priority": int(priority)} if priority else {})


class GrpcClient:
    """One connection that sends requests for one model."""

    def __init__(
        self, ports: list[int], model: str, arrays: dict[str, np.ndarray], kind: str
    ) -> None:
        self.client = triton.InferenceServerClient(f"127.0.0.1:{ports[1]}")
        self.model, self.parameters, self.inputs = model, parameters_of(kind), []
        for name, value in arrays.items():
            self.inputs.append(triton.InferInput(name, list(value.shape), KINDS[str(value.dtype)]))
            self.inputs[-1].set_data_from_numpy(value)

    def infer(self) -> None:
        parameters = {key: value for key, value in self.parameters.items() if key != "priority"}
        self.client.infer(
            self.model,
            self.inputs,
            parameters=parameters,
            priority=self.parameters.get("priority", 0),
        )


class HttpClient:
    """The same over HTTP, with the standard library only."""

    def __init__(
        self, ports: list[int], model: str, arrays: dict[str, np.ndarray], kind: str
    ) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", ports[0])
        self.path = f"/v2/models/{model}/infer"
        entries = [
            {
                "name": name,
                "shape": list(value.shape),
                "datatype": KINDS[str(value.dtype)],
                "parameters": {"binary_data_size": value.nbytes},
            }
            for name, value in arrays.items()
        ]
        head = json.dumps(
            {"inputs": entries, "parameters": parameters_of(kind) | {"binary_data_output": True}}
        ).encode()
        self.body = head + b"".join(
            np.ascontiguousarray(value).tobytes() for value in arrays.values()
        )
        self.headers = {
            "Inference-Header-Content-Length": str(len(head)),
            "Content-Type": "application/octet-stream",
        }
        self.connection.connect()
        self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def infer(self) -> None:
        self.connection.request("POST", self.path, self.body, self.headers)
        reply = self.connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {text[:300]!r}")


def connect(*arguments):
    return (GrpcClient if triton else HttpClient)(*arguments)


def real_time(ports, model, arrays, rate: float, seconds: float, pipe) -> None:
    """Sends `rate` requests a second and skips times that have passed. Reports microseconds,
    skipped requests and errors through `pipe`."""
    client = connect(ports, model, arrays, "rt:1")
    for _ in range(20):
        client.infer()
    taken, dropped, errors = [], 0, []
    start = time.perf_counter() + 0.01
    number = 0
    while number < rate * seconds:
        due = start + number / rate
        number += 1
        remaining = due - time.perf_counter()
        if remaining < -1 / rate:
            dropped += 1
            continue
        if remaining > 0.001:
            time.sleep(remaining - 0.0005)
        while time.perf_counter() < due:
            pass
        sent = time.perf_counter()
        try:
            client.infer()
            taken.append((time.perf_counter() - sent) * 1e6)
        except Exception as error:  # a failed request is a result too
            errors.append(str(error))
    pipe.send((taken, dropped, errors))


def best_effort(ports, model, arrays, kind, stop, pipe) -> None:
    """Sends a request after each reply until `stop`. Reports replies, seconds and errors through
    `pipe`."""
    client = connect(ports, model, arrays, kind)
    replies, errors, start = 0, [], time.perf_counter()
    while not stop.is_set():
        try:
            client.infer()
            replies += 1
        except Exception as error:
            errors.append(str(error))
            time.sleep(0.01)
            if len(errors) > 100:
                break
    pipe.send((replies, time.perf_counter() - start, errors))


def phase(args, ports, inputs, with_best_effort: bool) -> dict:
    """One phase of real time, with or without best effort."""
    stop, running = multiprocessing.Event(), []
    for model in args.be.split(",") if with_best_effort else []:
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(
            target=best_effort, args=(ports, model, inputs[model], args.others, stop, there)
        )
        process.start()
        running.append((model, process, here))
    if running:
        time.sleep(0.5)
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(
        target=real_time, args=(ports, args.rt, inputs[args.rt], args.rate, args.seconds, there)
    )
    process.start()
    taken, dropped, errors = here.recv()
    process.join()
    stop.set()
    rates = {}
    for model, process, pipe in running:
        replies, seconds, failed = pipe.recv()
        process.join()
        rates[model] = round(replies / seconds, 1)
        errors += failed
    return {"taken": taken, "dropped": dropped, "errors": errors, "best_effort_rps": rates}


def summary(phases: list[dict]) -> dict:
    taken = np.array([sample for entry in phases for sample in entry["taken"]])
    errors = [error for entry in phases for error in entry["errors"]]
    rates = [entry["best_effort_rps"] for entry in phases]
    found = {
        "count": len(taken),
        "dropped": sum(entry["dropped"] for entry in phases),
        "errors": len(errors),
        "first_errors": errors[:3],
        "best_effort_rps": {
            model: round(float(np.mean([rate[model] for rate in rates])), 1) for model in rates[0]
        },
    }
    if len(taken):
        p50, p99 = np.percentile(taken, [50, 99], method="higher")
        found |= {
            "mean_us": round(float(taken.mean()), 1),
            "p50_us": round(float(p50), 1),
            "p99_us": round(float(p99), 1),
            "max_us": round(float(taken.max()), 1),
        }
    return found


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    reply = connection.getresponse()
    return reply.status, reply.read()


def wait_until_ready(port: int, server: subprocess.Popen) -> None:
    for _ in range(START_SECONDS * 10):
        if server.poll() is not None:
            raise SystemExit(f"atoll left with {server.returncode}")
        try:
            if get(port, "/v2/health/ready")[0] == 200:
                return
        except OSError:  # the server does not listen yet
            pass
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {START_SECONDS} s")


def inputs_of(port: int, folder: Path, model: str) -> dict[str, np.ndarray]:
    """The sample of the model, or zeros: one row, texts of a fixed length."""
    sample = folder / f"{model}.npz"
    if sample.is_file():
        return dict(np.load(sample))
    status, text = get(port, f"/v2/models/{model}")
    if status != 200:
        raise SystemExit(f"{model}: {text.decode(errors='replace')}")
    made = {}
    for entry in json.loads(text)["inputs"]:
        sizes = [int(size) for size in entry["shape"]]
        shape = [
            size if size > 0 else (1 if axis == 0 else TOKENS) for axis, size in enumerate(sizes)
        ]
        made[entry["name"]] = np.zeros(shape, NUMPY[entry["datatype"]])
    return made


def preemptions(port: int) -> dict[str, float]:
    """Preemptions as counted by the server."""
    lines = get(port, "/metrics")[1].decode().splitlines()
    kept = (
        "atoll_preemptions_total",
        "atoll_preemptions_caused_total",
        "atoll_preemption_seconds_sum",
    )
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(kept)
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("atoll")
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--policy", default="atoll")
    parser.add_argument("--rt", default="vgg19")
    parser.add_argument("--be", default="resnet152,inception_v3,distilbert")
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--others", default="be")
    parser.add_argument("--serve", default="")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    names = sorted({args.rt, *args.be.split(",")})
    ports = free_ports(3)
    command = [args.atoll, "serve", "--model-repository", str(args.models), "--log", "warn"]
    command += ["--device", args.device, "--policy", args.policy]
    command += ["--model-control-mode", "explicit", "--load-model", ",".join(names)]
    command += args.serve.split()
    for flag, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        command += [f"--{flag}-port", str(port)]
    server = subprocess.Popen(command)
    try:
        wait_until_ready(ports[0], server)
        inputs = {name: inputs_of(ports[0], args.models, name) for name in names}
        without, beside = [], []
        phase(args, ports, inputs, True)  # warm up, not counted
        for _ in range(args.rounds):
            without.append(phase(args, ports, inputs, False))
            beside.append(phase(args, ports, inputs, True))
        counted = preemptions(ports[2])
    finally:
        server.terminate()
        server.wait()
    report = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(sys.argv),
        "device": args.device,
        "policy": args.policy,
        "wire": "grpc" if triton else "http",
        "cores": os.cpu_count(),
        "real_time": args.rt,
        "rate": args.rate,
        "without": summary(without),
        "with_best_effort": summary(beside),
        "counted_by_server": counted,
    }
    a, b = report["without"], report["with_best_effort"]
    report["p99_ratio"] = (
        round(b["p99_us"] / a["p99_us"], 3) if "p99_us" in a and "p99_us" in b else None
    )
    report["p50_ratio"] = (
        round(b["p50_us"] / a["p50_us"], 3) if "p50_us" in a and "p50_us" in b else None
    )
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(
        json.dumps(
            {
                key: report[key]
                for key in ("wire", "without", "with_best_effort", "p50_ratio", "p99_ratio")
            },
            indent=1,
        )
    )
    return 1 if a["errors"] or b["errors"] else 0


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    sys.exit(main())
