#!/usr/bin/env python3
"""Measure what sentences of new lengths cost a real-time client of the server.

    new_sizes.py ATOLL OUT.json [--device cuda:0] [--rate 100] [--seconds 10] [--sizes 500]
                 [--seed 1] [--models FOLDER]

Serves ConvNeXt-T as real time and a text model of six layers as best effort, with an empty cache of
kernels. A real-time client sends at a fixed rate, a best-effort client one sentence at a time; each
client is a process of its own and speaks HTTP with binary tensors. Phases: real time alone; beside
sentences of 5 to 200 tokens from the moment the text model is loaded, no kernel compiled before;
beside other lengths; beside the same lengths once more; alone again. Then the text model is asked
in `--sizes` sizes (sentences times tokens) that it never saw, each twice: the difference is what a
new size costs. Answers of sentences that are asked twice must be equal, and those of some lengths
are compared with PyTorch in single precision. OUT.json has every figure and the commands.
"""

from __future__ import annotations

import argparse
import datetime
import http.client
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

START_SECONDS = 300
VOCABULARY = 30_522


def export(folder: Path) -> None:
    """Writes the models: random weights, symbolic batch and tokens."""
    import torch
    import torchvision
    from transformers import DistilBertConfig, DistilBertModel

    torch.manual_seed(1)
    image = torchvision.models.convnext_tiny().eval()
    torch.onnx.export(
        image,
        (torch.randn(1, 3, 224, 224),),
        folder / "image.onnx",
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )
    text = DistilBertModel(DistilBertConfig(attn_implementation="eager")).eval()
    tokens = torch.randint(0, VOCABULARY, (1, 16))
    axes = {0: "batch", 1: "tokens"}
    torch.onnx.export(
        text,
        (tokens, torch.ones_like(tokens)),
        folder / "text.onnx",
        input_names=["input_ids", "attention_mask"],
        output_names=["y"],
        dynamic_axes={"input_ids": axes, "attention_mask": axes, "y": axes},
        opset_version=17,
        dynamo=False,
    )
    torch.save(text.state_dict(), folder / "text.pt")


def expected(folder: Path, ids: np.ndarray) -> np.ndarray:
    import torch
    from transformers import DistilBertConfig, DistilBertModel

    text = DistilBertModel(DistilBertConfig(attn_implementation="eager")).eval()
    text.load_state_dict(torch.load(folder / "text.pt"))
    with torch.no_grad():
        ids = torch.from_numpy(ids)
        return text(ids, torch.ones_like(ids)).last_hidden_state.numpy()


class Client:
    """One connection for one model: binary tensors over HTTP."""

    def __init__(self, port: int, model: str, kind: str):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.connection.connect()
        self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.path = f"/v2/models/{model}/infer"
        self.parameters = {"atoll_class": kind, "binary_data_output": True}

    def infer(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        names = {"float32": "FP32", "int64": "INT64"}
        described = [
            {
                "name": name,
                "shape": list(value.shape),
                "datatype": names[str(value.dtype)],
                "parameters": {"binary_data_size": value.nbytes},
            }
            for name, value in inputs.items()
        ]
        head = json.dumps({"inputs": described, "parameters": self.parameters}).encode()
        body = head + b"".join(value.tobytes() for value in inputs.values())
        headers = {"Inference-Header-Content-Length": str(len(head))}
        self.connection.request("POST", self.path, body, headers)
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {data[:300]!r}")
        length = int(answer.getheader("Inference-Header-Content-Length"))
        shape = json.loads(data[:length])["outputs"][0]["shape"]
        return np.frombuffer(data[length:], np.float32).reshape(shape)


def sentence(generator: np.random.Generator, batch: int, tokens: int) -> dict[str, np.ndarray]:
    ids = generator.integers(0, VOCABULARY, (batch, tokens), dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def real_time(port: int, rate: float, seconds: float, out) -> None:
    """Sends at `rate` and returns latencies in milliseconds; one that is late counts its delay."""
    client = Client(port, "image", "rt")
    picture = {"x": np.random.default_rng(1).standard_normal((1, 3, 224, 224), dtype=np.float32)}
    for _ in range(20):
        client.infer(picture)
    taken, wrong = [], 0
    first = client.infer(picture)
    start = time.perf_counter()
    for number in range(int(rate * seconds)):
        due = start + number / rate
        while (wait := due - time.perf_counter()) > 0:
            time.sleep(wait - 0.0005 if wait > 0.001 else 0)
        began = time.perf_counter()
        answer = client.infer(picture)
        taken.append((time.perf_counter() - began) * 1e3)
        wrong += not np.array_equal(answer, first)
    out.put((taken, wrong))


def best_effort(port: int, lengths: list[int], seconds: float, out) -> None:
    """Sends one sentence after another, and returns how long each took in milliseconds."""
    client, generator = Client(port, "text", "be"), np.random.default_rng(2)
    taken, end, number = [], time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        tokens = lengths[number % len(lengths)]
        began = time.perf_counter()
        client.infer(sentence(generator, 1, tokens))
        taken.append((tokens, (time.perf_counter() - began) * 1e3))
        number += 1
    out.put(taken)


def summary(values: list[float]) -> dict:
    values = sorted(values)

    def at(share: float) -> float:
        return round(values[min(len(values) - 1, int(share * len(values)))], 3)

    top = [round(value, 2) for value in values[-4:]]
    return {"count": len(values), "p50": at(0.5), "p99": at(0.99), "max": top[-1], "slowest": top}


def phase(port: int, args, seconds: float, lengths: list[int] | None) -> dict:
    context = multiprocessing.get_context("spawn")
    answers, others = context.Queue(), context.Queue()
    runs = [context.Process(target=real_time, args=(port, args.rate, seconds, answers))]
    if lengths:
        runs.append(
            context.Process(target=best_effort, args=(port, lengths, seconds + 2, others))
        )
    for run in runs:
        run.start()
    taken, wrong = answers.get(timeout=seconds + 200)
    row = {"real_time_ms": summary(taken), "wrong": wrong}
    if lengths:
        sentences = others.get(timeout=seconds + 200)
        row["best_effort_ms"] = summary([each for _, each in sentences])
        row["lengths"] = len({tokens for tokens, _ in sentences})
    for run in runs:
        run.join()
    return row


def new_sizes(port: int, count: int, seed: int, folder: Path) -> dict:
    """Asks in sizes that were never seen, each twice."""
    client, generator = Client(port, "text", "be"), np.random.default_rng(seed)
    chosen = random.Random(seed)
    sizes = set()
    while len(sizes) < count:
        sizes.add((chosen.randint(1, 8), chosen.randint(201, 480)))
    new, known, differ, slow = [], [], 0, []
    for batch, tokens in sorted(sizes, key=lambda _: chosen.random()):
        inputs = sentence(generator, batch, tokens)
        began = time.perf_counter()
        first = client.infer(inputs)
        middle = time.perf_counter()
        client.infer(inputs)
        again = time.perf_counter()
        second = client.infer(inputs)
        end = time.perf_counter()
        new.append((middle - began) * 1e3)
        known.append((end - again) * 1e3)
        slow.append((round(new[-1], 2), batch, tokens))
        differ += not np.allclose(first, second, rtol=0, atol=1e-3)
    more = [a - b for a, b in zip(new, known)]
    errors = []
    for tokens in [7, 33, 129, 200]:
        inputs = sentence(generator, 1, tokens)
        want = expected(folder, inputs["input_ids"])
        errors.append(float(np.abs(client.infer(inputs) - want).max() / np.abs(want).max()))
    return {
        "sizes": count,
        "new_ms": summary(new),
        "known_ms": summary(known),
        "more_ms": summary(more),
        "slowest": sorted(slow)[-5:],
        "differ": differ,
        "error_to_single_precision": max(errors),
    }


def call(port: int, method: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(method, path, b"" if method == "POST" else None)
    return connection.getresponse().status


def wait_ready(port: int, server: subprocess.Popen) -> None:
    end = time.time() + START_SECONDS
    while time.time() < end:
        if server.poll() is not None:
            sys.exit("the server ended")
        try:
            if call(port, "GET", "/v2/models/image/ready") == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("the server was not ready in time")


def main() -> None:
    kind = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("atoll")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--sizes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", type=Path, help="folder of the exported models")
    parser.add_argument("--log", type=Path, help="write the server's log of debugging here")
    parser.add_argument("--port", type=int, default=18_000)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    models = args.models or work / "models"
    models.mkdir(exist_ok=True)
    if not (models / "text.onnx").exists():
        export(models)
    repository = work / "repository"
    for name in ("image", "text"):
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.onnx").symlink_to((models / f"{name}.onnx").resolve())
    ports = [str(args.port), str(args.port + 1), str(args.port + 2)]
    command = [args.atoll, "serve", "--model-repository", str(repository), "--device", args.device]
    command += ["--http-port", ports[0], "--grpc-port", ports[1], "--metrics-port", ports[2]]
    command += ["--kernel-cache", str(work / "kernels"), "--model-control-mode", "explicit"]
    command += ["--load-model", "image", "--data-dir", str(work / "data")]
    if args.log:
        command[1:1] = ["--log", "debug"]
    server_log = args.log or work / "server.log"
    server = subprocess.Popen(command, stderr=open(server_log, "w"))
    draw = random.Random(args.seed)
    lengths = draw.sample(range(5, 201), 100)
    first, second = lengths[:50], lengths[50:]
    rows = {}
    try:
        wait_ready(args.port, server)
        rows["alone"] = phase(args.port, args, args.seconds, None)
        began = time.time()
        status = call(args.port, "POST", "/v2/repository/models/text/load")
        rows["load"] = {"status": status, "seconds": round(time.time() - began, 2)}
        rows["beside, not compiled"] = phase(args.port, args, args.seconds * 2, first)
        rows["beside, other lengths"] = phase(args.port, args, args.seconds, second)
        rows["beside, the same lengths"] = phase(args.port, args, args.seconds, second)
        rows["alone again"] = phase(args.port, args, args.seconds, None)
        if args.sizes:
            rows["new sizes"] = new_sizes(args.port, args.sizes, args.seed, models)
    finally:
        server.terminate()
        server.wait(60)
        log = server_log.read_text()
    for name, row in rows.items():
        print(f"{name}: {json.dumps(row)}")
    warnings = [line for line in log.splitlines() if " WARN " in line or " ERROR " in line]
    print("\n".join(warnings[:10]))
    report = {
        "date": datetime.date.today().isoformat(),
        "command": f"scripts/gpu/new_sizes.py ATOLL OUT.json --seconds {args.seconds:g} "
        f"--rate {args.rate:g} --sizes {args.sizes} --seed {args.seed}",
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
