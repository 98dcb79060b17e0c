#!/usr/bin/env python3
"""Compare a server on a GPU with one on the CPU through unmodified Triton clients.

    clients.py ATOLL MODELS_FOLDER NAME [DEVICE,DEVICE]

The default devices are cpu and cuda:0. MODELS_FOLDER holds NAME.onnx and NAME.npz as
scripts/models.py writes them. Needs tritonclient[grpc,http]. Prints for each protocol whether the
index of the largest output agrees, the relative error, and the median and p99 of 200 requests in
microseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http

REQUESTS = 200


def wait_until_ready(client, name: str) -> None:
    for _ in range(600):
        try:
            if client.is_model_ready(name):
                return
        except Exception:  # the server does not listen yet
            pass
        time.sleep(0.1)
    raise SystemExit(f"{name} was not ready after a minute")


def serve_and_measure(atoll: str, model: Path, device: str, port: int) -> dict:
    command = [atoll, "serve", "--model-repository", str(model), "--device", device]
    ports = [
        "--http-port",
        str(port),
        "--grpc-port",
        str(port + 1),
        "--metrics-port",
        str(port + 2),
    ]
    server = subprocess.Popen(command + ports, stderr=subprocess.DEVNULL)
    try:
        client = http.InferenceServerClient(f"127.0.0.1:{port}")
        wait_until_ready(client, model.stem)
        output = client.get_model_metadata(model.stem)["outputs"][0]["name"]
        wires = {
            "http": (http, client),
            "grpc": (grpc, grpc.InferenceServerClient(f"127.0.0.1:{port + 1}")),
        }
        return {
            wire: timed(library, client, model, output) for wire, (library, client) in wires.items()
        }
    finally:
        server.terminate()
        server.wait()


def timed(library, client, model: Path, output: str) -> tuple[np.ndarray, float, float]:
    inputs = []
    for name, value in np.load(model.with_suffix(".npz")).items():
        kinds = {"float32": "FP32", "int64": "INT64"}
        inputs.append(library.InferInput(name, list(value.shape), kinds[str(value.dtype)]))
        inputs[-1].set_data_from_numpy(value)
    taken = []
    for _ in range(REQUESTS):
        start = time.perf_counter()
        result = client.infer(model.stem, inputs)
        taken.append((time.perf_counter() - start) * 1e6)
    taken.sort()
    return result.as_numpy(output), taken[REQUESTS // 2], taken[REQUESTS * 99 // 100]


def main() -> None:
    atoll, model = sys.argv[1], Path(sys.argv[2]) / f"{sys.argv[3]}.onnx"
    devices = sys.argv[4].split(",") if len(sys.argv) > 4 else ["cpu", "cuda:0"]
    wanted, got = (
        serve_and_measure(atoll, model, device, port)
        for device, port in zip(devices, (9100, 9200), strict=True)
    )
    for wire in ("http", "grpc"):
        a, b = got[wire][0], wanted[wire][0]
        error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        print(
            json.dumps(
                {
                    "wire": wire,
                    "device": devices[1],
                    "same_largest": bool(a.argmax() == b.argmax()),
                    "rel_error": error,
                    "p50_us": got[wire][1],
                    "p99_us": got[wire][2],
                    f"{devices[0]}_p50_us": wanted[wire][1],
                }
            )
        )


if __name__ == "__main__":
    main()
