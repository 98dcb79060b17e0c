#!/usr/bin/env python3
"""Compare quantized networks with their float originals on one GPU, in one run.

    quantized.py ATOLL OUT.json [--only resnet50,...] [--kinds static,dynamic]
                 [--batches 1,8,32] [--samples 4]

Each network is exported and quantized twice: by `atoll quantize` (static: QDQ), and, for text, by
ONNX Runtime (dynamic: MatMulInteger). The quantized file runs on the GPU and in ONNX Runtime on
the CPU. Errors are norms of differences over the norm of what they are compared with: `error` with
ONNX Runtime, `error_to_float` with the float network, and `ort_error_to_float` is that of ONNX
Runtime. `atoll profile` then times both files at every batch; `speedup` is the float file's latency
in fp16 over the quantized one's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from latency import atoll_outputs, relative_error  # noqa: E402
from modelzoo import target, torch_nets  # noqa: E402
from zoo import export, profile, samples, slowest  # noqa: E402

NETWORKS = ["resnet50", "bert_base"]


def float_file(name: str, folder: Path) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """The network in single precision, and inputs of single rows."""
    from modelzoo import zoo_nets

    if name in zoo_nets.BUILDERS:
        done = export(name, "script", str(folder))
        if "error" in done:
            raise RuntimeError(done["error"])
        made = zoo_nets.build(name)
        return Path(done["path"]), [samples(made, 1, seed) for seed in range(16)]
    built = getattr(torch_nets, name)()
    side = built.samples["image"].shape[-1]
    pictures = [torch_nets._pictures(1, side).numpy() for _ in range(16)]
    return target.write(built, name, folder), [{"image": picture} for picture in pictures]


def quantize(atoll: str, path: Path, rows: list[dict[str, np.ndarray]]) -> Path:
    """The static file of `atoll quantize`."""
    folder = path.with_suffix(".samples")
    folder.mkdir()
    for number, row in enumerate(rows):
        np.savez(folder / f"{number}.npz", **row)
    made = path.with_suffix(".static.onnx")
    command = [atoll, "quantize", str(path), "--calibrate", str(folder), "--output", str(made)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-600:])
    return made


def quantize_dynamically(path: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = path.with_suffix(".dynamic.onnx")
    operators = ["MatMul", "Gemm"]
    quantize_dynamic(path, made, operators, per_channel=True, weight_type=QuantType.QInt8)
    return made


def reference(path: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def measured(atoll: str, path: Path, batches: list[int]) -> dict[int, dict]:
    report = profile(atoll, str(path), batches, tuned=True)
    if "error" in report:
        raise RuntimeError(report["error"])
    return {
        plan["batch"]: {"us": plan["latency_us"]["p50"], "slowest": slowest(plan, 12)}
        for plan in report["plans"]
    }


def compare(name: str, args: argparse.Namespace, folder: Path) -> list[dict]:
    """One row per quantized file and batch."""
    batches = [int(batch) for batch in args.batches.split(",")]
    path, rows = float_file(name, folder)
    checked = {key: np.concatenate([rows[-1][key], rows[-2][key]]) for key in rows[0]}
    original = reference(path, checked)
    files = {"static": quantize(args.atoll, path, rows[: args.samples])}
    if "image" not in rows[0] and "dynamic" in args.kinds:
        files["dynamic"] = quantize_dynamically(path)
    plain = measured(args.atoll, path, batches)
    found = []
    for kind, quantized in files.items():
        wanted = reference(quantized, checked)
        got = atoll_outputs(args.atoll, quantized, checked, "cuda:0", "f16")
        error = {
            "error": relative_error(got, wanted),
            "error_to_float": relative_error(got, original),
            "ort_error_to_float": relative_error(wanted, original),
        }
        for batch, timed in measured(args.atoll, quantized, batches).items():
            row = {"network": name, "kind": kind, "batch": batch, **error}
            row |= {"fp16_us": plain[batch]["us"], "int8_us": timed["us"]}
            row["speedup"] = round(plain[batch]["us"] / timed["us"], 3)
            print(json.dumps(row), flush=True)
            row |= {"slowest": timed["slowest"], "fp16_slowest": plain[batch]["slowest"]}
            found.append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("atoll")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--kinds", default="static,dynamic")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--samples", type=int, default=4, help="for calibration, at most 14")
    args = parser.parse_args()
    torch.manual_seed(5)
    report: dict = {"device": torch.cuda.get_device_name(), "rows": [], "failed": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only.split(","):
            try:
                report["rows"] += compare(name, args, Path(folder))
            except Exception as error:
                report["failed"].append({"network": name, "error": str(error)[:600]})
                print(f"{name}: {error}", flush=True)
            args.out.write_text(json.dumps(report, indent=1))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
