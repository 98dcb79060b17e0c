#!/usr/bin/env python3
"""Measure sentences of mixed lengths in batches against the same sentences one by one.

    mixed_lengths.py ATOLL OUT.json [--device cuda:0] [--clients 24] [--seconds 10] [--seed 1]
                     [--models FOLDER] [--rounds 2]

Serves a text model of six layers in turns, with `batching.mix_lengths` off and on. Clients are
processes that each send one sentence after another over HTTP; lengths are log-normal as those of
`atoll bench strangers`: a median of 14 tokens, 3 to 200. Every client keeps some answers; all
servers must agree about them within 1e-3 of their norm. OUT.json has every figure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from new_sizes import START_SECONDS, Client, call, export, sentence, summary

KEPT = 20


def length(draw: random.Random) -> int:
    return max(3, min(200, round(draw.lognormvariate(math.log(14), 0.75))))


def client(port: int, number: int, seed: int, start: float, seconds: float, out) -> None:
    connection = Client(port, "text", "be")
    draw, generator = random.Random(seed + number), np.random.default_rng(seed + number)
    taken, kept = [], []
    while time.time() < start:
        time.sleep(0.001)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        inputs = sentence(generator, 1, length(draw))
        began = time.perf_counter()
        answer = connection.infer(inputs)
        taken.append((time.perf_counter() - began) * 1e3)
        if len(kept) < KEPT:
            kept.append(answer)
    out.put((number, taken, kept))


def load(port: int, args) -> tuple[dict, dict[int, list[np.ndarray]]]:
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    start = time.time() + 5
    runs = [
        context.Process(target=client, args=(port, number, args.seed, start, args.seconds, out))
        for number in range(args.clients)
    ]
    for run in runs:
        run.start()
    ended = [out.get(timeout=args.seconds + 200) for _ in runs]
    for run in runs:
        run.join()
    taken = [each for _, times, _ in ended for each in times]
    row = {"per_second": round(len(taken) / args.seconds, 1), "latency_ms": summary(taken)}
    return row, {number: kept for number, _, kept in ended}


def serve(args, models: Path, work: Path, mixed: bool) -> tuple[dict, dict]:
    repository = work / ("mixed" if mixed else "alone")
    folder = repository / "text" / "1"
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "model.onnx").symlink_to((models / "text.onnx").resolve())
        setting = "true" if mixed else "false"
        settings = f"batching = {{ mix_lengths = {setting} }}\n"
        (repository / "text" / "atoll.toml").write_text(settings)
    ports = [str(args.port), str(args.port + 1), str(args.port + 2)]
    command = [args.atoll, "serve", "--model-repository", str(repository), "--device", args.device]
    command += ["--http-port", ports[0], "--grpc-port", ports[1], "--metrics-port", ports[2]]
    command += ["--kernel-cache", str(work / "kernels"), "--data-dir", str(work / "data")]
    log = work / "server.log"
    server = subprocess.Popen(command, stderr=log.open("w"))
    try:
        end = time.time() + START_SECONDS
        while not ready(args.port):
            if server.poll() is not None or time.time() > end:
                sys.exit(f"the server does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        # Whether lengths may be mixed is tried after the load.
        while mixed and "share batches" not in log.read_text() and time.time() < end:
            time.sleep(0.1)
        found = [line for line in log.read_text().splitlines() if "share batches" in line]
        # The first load compiles what is missing.
        load(args.port, args)
        row, kept = load(args.port, args)
        return {"mix_lengths": mixed, "log": found[:1], **row}, kept
    finally:
        server.terminate()
        server.wait(60)


def ready(port: int) -> bool:
    try:
        return call(port, "GET", "/v2/models/text/ready") == 200
    except OSError:
        return False


def difference(one: dict, other: dict) -> float:
    """The largest distance of two answers to one sentence, relative to their norm."""
    largest = 0.0
    for number, answers in one.items():
        for a, b in zip(answers, other[number]):
            if a.shape != b.shape:
                return math.inf
            largest = max(largest, float(np.linalg.norm(a - b) / np.linalg.norm(a)))
    return largest


def main() -> None:
    kind = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("atoll")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", type=Path, help="folder of the exported models")
    parser.add_argument("--port", type=int, default=18_100)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    models = args.models or work / "models"
    models.mkdir(exist_ok=True)
    if not (models / "text.onnx").exists():
        export(models)
    rows, kept = [], []
    for turn in range(args.rounds * 2):
        row, answers = serve(args, models, work, mixed=turn % 2 == 1)
        print(json.dumps(row))
        rows.append(row)
        kept.append(answers)
    largest = max(difference(kept[0], other) for other in kept[1:])

    def rate(mixed: bool) -> float:
        return sum(row["per_second"] for row in rows if row["mix_lengths"] == mixed) / args.rounds

    report = {
        "date": datetime.date.today().isoformat(),
        "command": f"scripts/gpu/mixed_lengths.py ATOLL OUT.json --clients {args.clients} "
        f"--seconds {args.seconds:g} --rounds {args.rounds} --seed {args.seed}",
        "rows": rows,
        "mixed_over_alone": round(rate(True) / rate(False), 3),
        "largest_difference": largest,
    }
    print(f"mixed over one by one: {report['mixed_over_alone']}, difference {largest:.2e}")
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
