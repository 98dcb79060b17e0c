#!/usr/bin/env python3
"""Compare atoll with PyTorch on one GPU, in one run: outputs and latency.

    latency.py ATOLL OUT.json [--only resnet50,...] [--batches 1,8,32] [--models FOLDER]
               [--compile NAME,...] [--compile-batches 1,...]

scripts/modelzoo makes the networks (random but calibrated weights) and exports them to ONNX; both
systems run them. Outputs are compared with PyTorch in single precision (no TF32) on fresh random
inputs. Latency is the median of replays on a warm device: atoll's CUDA graph against PyTorch's
(half precision, channels last, cuDNN autotuning) and torch.compile(mode="reduce-overhead"). Models
without a torch module (real weights, from FOLDER) are compared with atoll's CPU device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from modelzoo import target, torch_nets  # noqa: E402

NETWORKS = [
    "resnet50",
    "resnet152",
    "vgg19",
    "densenet201",
    "inception_v3",
    "mobilenet_v2",
    "distilbert",
    "bert_large",
]
DEVICE = "cuda"
LIMITS = {"f16": 1e-2, "f32": 1e-4}


def replay_us(run, times: int = 50) -> float:
    """Median microseconds of `run` between two events on a warm device."""
    taken = []
    for number in range(times + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        if number >= 5:
            taken.append(start.elapsed_time(end) * 1e3)
    return sorted(taken)[len(taken) // 2]


def graph_us(module, inputs) -> float:
    """One replay of the module captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            module(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(*inputs)
    return replay_us(graph.replay)


def compiled_us(module, inputs) -> float:
    torch._dynamo.reset()  # otherwise a second size is compiled for dynamic sizes
    fast = torch.compile(module, mode="reduce-overhead")
    for _ in range(4):
        fast(*inputs)
    torch.cuda.synchronize()
    return replay_us(lambda: fast(*inputs))


def half_inputs(samples: dict[str, np.ndarray]) -> list[torch.Tensor]:
    tensors = []
    for value in samples.values():
        tensor = torch.from_numpy(value).to(DEVICE)
        if tensor.is_floating_point():
            tensor = tensor.half()
            if tensor.dim() == 4:
                tensor = tensor.to(memory_format=torch.channels_last)
        tensors.append(tensor)
    return tensors


def fresh(samples: dict[str, np.ndarray], batch: int, seed: int) -> dict[str, np.ndarray]:
    """New inputs like the samples: structured images, other tokens, unchanged masks."""
    random = np.random.default_rng(seed)
    made = {}
    for name, value in samples.items():
        shape = (batch, *value.shape[1:])
        if value.dtype.kind == "f":
            torch.manual_seed(seed)
            made[name] = (
                torch_nets._pictures(batch, value.shape[-1]).numpy()
                if len(shape) == 4
                else random.standard_normal(shape).astype(value.dtype)
            )
        elif "mask" in name or "type" in name:
            made[name] = np.repeat(value, batch, axis=0)
        else:
            made[name] = random.integers(1000, 30000, shape, dtype=value.dtype)
    return made


def atoll_outputs(
    atoll: str, model: Path, inputs: dict[str, np.ndarray], device: str, precision: str
) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        command = [atoll, "run", str(model), "--device", device, "--save", folder, "--json"]
        command += ["--repeat", "1", "--warmup", "0"]
        if device != "cpu":
            command += ["--precision", precision]
        for number, (name, value) in enumerate(inputs.items()):
            path = Path(folder) / f"in{number}.npy"
            np.save(path, value)
            command += ["--input", f"{name}={path}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip()[-800:])
        names = [entry["name"] for entry in json.loads(done.stdout)["outputs"]]
        return [np.load(Path(folder) / f"{name.replace('/', '_')}.npy") for name in names]


def relative_error(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The norm of the difference over the norm of the reference, of the worst output."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape or not np.isfinite(a).all():
            return float("inf")
        difference = np.linalg.norm((a.astype(np.float64) - b).ravel())
        worst = max(
            worst, float(difference / max(np.linalg.norm(b.astype(np.float64).ravel()), 1e-30))
        )
    return worst


def largest_error(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference over the largest magnitude, of the worst output."""
    pairs = [(a.astype(np.float64), b) for a, b in zip(got, wanted, strict=True)]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


def profile(atoll: str, model: Path, batches: list[int], precision: str, extra: list[str]) -> dict:
    command = [atoll, "profile", str(model), "--device", "cuda:0", "--precision", precision]
    command += ["--json", "--batches", ",".join(map(str, batches)), *extra]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-800:])
    return json.loads(done.stdout)


def measure(name: str, args: argparse.Namespace, folder: Path) -> tuple[list[dict], dict]:
    started = time.time()
    built = getattr(torch_nets, name)()
    path = target.write(built, name, folder)
    module = built.module.eval().to(DEVICE)
    extra = [] if "image" in built.samples else ["--bind", f"sequence={torch_nets.TOKENS}"]
    batches = [int(batch) for batch in args.batches.split(",")]
    rows, errors, wanted = [], {}, {}
    profiled = profile(args.atoll, path, batches, "f16", extra)
    for batch in batches:
        inputs = fresh(built.samples, batch, args.seed + batch)
        with torch.inference_mode():
            wanted[batch] = (
                module(*[torch.from_numpy(value).to(DEVICE) for value in inputs.values()])
                .cpu()
                .numpy()
            )
        for precision in ("f16", "f32") if batch == batches[0] else ("f16",):
            got = atoll_outputs(args.atoll, path, inputs, "cuda:0", precision)
            errors[precision, batch] = (
                relative_error(got, [wanted[batch]]),
                largest_error(got, [wanted[batch]]),
            )
    module = module.half()
    if "image" in built.samples:
        module = module.to(memory_format=torch.channels_last)
    for plan in profiled["plans"]:
        batch = plan["batch"]
        inputs = half_inputs(fresh(built.samples, batch, args.seed))
        with torch.inference_mode():
            half = (
                module(*half_inputs(fresh(built.samples, batch, args.seed + batch)))
                .float()
                .cpu()
                .numpy()
            )
            peer = graph_us(module, inputs)
            wanted_too = name in args.compile.split(",") and str(
                batch
            ) in args.compile_batches.split(",")
            compiled = compiled_us(module, inputs) if wanted_too else None
        ours = plan["latency_us"]["p50"]
        row = {
            "model": name,
            "batch": batch,
            "precision": "f16",
            "atoll_us": ours,
            "atoll_p99_us": plan["latency_us"]["p99"],
            "torch_graph_us": peer,
            "torch_compile_us": compiled,
            "ratio": ours / min(peer, compiled or peer),
            "rel_error": errors["f16", batch][0],
            "largest_error": errors["f16", batch][1],
            "torch_rel_error": relative_error([half], [wanted[batch]]),
            "torch_largest_error": largest_error([half], [wanted[batch]]),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    row = {
        "model": name,
        "batch": batches[0],
        "precision": "f32",
        "rel_error": errors["f32", batches[0]][0],
        "largest_error": errors["f32", batches[0]][1],
    }
    print(json.dumps(row), f"{time.time() - started:.0f} s", flush=True)
    return [*rows, row], profiled


def measure_file(path: Path, args: argparse.Namespace) -> dict:
    """Compares a model with real weights with atoll's CPU device, which other tests compare with
    ONNX Runtime."""
    samples = dict(np.load(path.with_suffix(".npz")))
    errors = {}
    wanted = atoll_outputs(args.atoll, path, samples, "cpu", "f32")
    for precision in ("f16", "f32"):
        errors[precision] = relative_error(
            atoll_outputs(args.atoll, path, samples, "cuda:0", precision), wanted
        )
    row = {
        "model": path.stem,
        "against": "atoll --device cpu",
        "rel_error_f16": errors["f16"],
        "rel_error_f32": errors["f32"],
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("atoll")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(NETWORKS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--compile", default="", help="networks to time with torch.compile too")
    parser.add_argument("--compile-batches", default="1", help="at these batches")
    parser.add_argument("--models", type=Path, help="folder of models without a torch module")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows, files, steps, failed = [], [], {}, []

    def write() -> None:
        """Called after every network, so that an interrupted run keeps its results."""
        report = {
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "device": torch.cuda.get_device_name(),
            "rows": rows,
            "files": files,
            "failed": failed,
            "profiles": steps,
        }
        args.out.write_text(json.dumps(report, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        for name in filter(None, args.only.split(",")):
            try:
                found, profiled = measure(name, args, Path(folder))
                rows += found
                steps[name] = profiled
            except Exception as error:  # a failure must not stop the other networks
                failed.append({"model": name, "error": str(error)})
                print(f"{name}: {error}", flush=True)
            write()
        for path in sorted(args.models.glob("*.onnx")) if args.models else []:
            try:
                files.append(measure_file(path, args))
            except Exception as error:
                failed.append({"model": path.stem, "error": str(error)})
                print(f"{path.stem}: {error}", flush=True)
    write()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
