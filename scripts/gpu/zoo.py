#!/usr/bin/env python3
"""Compare atoll with PyTorch on many networks, in one run: outputs and latency.

    zoo.py ATOLL OUT.json [--only NAME,...] [--skip NAME,...] [--batches 1,8,32]
           [--exporters script,dynamo] [--seconds N] [--compile] [--untuned] [--peers OLD.json]

scripts/modelzoo/zoo_nets.py makes the networks. They are exported by both of torch's exporters in
parallel processes; each export then runs once in atoll at every batch, which compiles its kernels
and compares its outputs with PyTorch in single precision (no TF32). Timing follows, one network at
a time on an otherwise idle GPU: atoll's replays against PyTorch's CUDA graph (half precision,
channels last where inputs are images, cuDNN autotuning), its plain calls where a graph cannot be
captured, and, with --compile, against torch.compile(mode="max-autotune"). OUT.json is written after
every network. --peers takes the latencies of PyTorch from an earlier report: for work in progress,
not for evidence.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

OPSETS = {"script": 17, "dynamo": 20}


def export(name: str, exporter: str, folder: str) -> dict:
    """Writes NAME.EXPORTER.onnx; returns its path or why torch could not export it."""
    import torch

    from modelzoo import zoo_nets

    torch.set_num_threads(2)
    started = time.time()
    path = Path(folder) / f"{name}.{exporter}.onnx"
    try:
        made = zoo_nets.build(name)
        inputs = list(made.samples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"input_names": inputs, "output_names": ["output"], "verbose": False}
            options |= {"opset_version": OPSETS[exporter], "dynamo": exporter == "dynamo"}
            if exporter == "dynamo":
                batch = torch.export.Dim("batch", min=1, max=64)
                options["dynamic_shapes"] = dynamic(made.module, len(inputs), batch)
            else:
                options["dynamic_axes"] = {key: {0: "batch"} for key in [*inputs, "output"]}
            torch.onnx.export(made.module, tuple(made.samples.values()), str(path), **options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {"path": str(path), "export_s": round(time.time() - started, 1)}


def dynamic(module: object, count: int, batch: object) -> object:
    """The first dimension of every input is symbolic; variadic arguments are one tuple."""
    from modelzoo.zoo_nets import Pick

    each = tuple({0: batch} for _ in range(count))
    return (each,) if isinstance(module, Pick) else each


def samples(made: object, batch: int, seed: int) -> dict[str, np.ndarray]:
    """Fresh inputs of `batch` rows, like the samples."""
    random = np.random.default_rng(seed)
    fresh = {}
    for name, value in made.samples.items():
        rows = value.numpy()[random.integers(0, value.shape[0], batch)]
        if rows.dtype.kind == "f":
            rows = rows + 0.1 * random.standard_normal(rows.shape).astype(rows.dtype)
        elif "mask" not in name:
            rows = random.permuted(rows, axis=1)
        fresh[name] = rows
    return fresh


def atoll_output(atoll: str, path: str, inputs: dict[str, np.ndarray], precision: str) -> dict:
    """The first output, or the reason why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        command = [atoll, "run", path, "--device", "cuda:0", "--save", folder, "--json"]
        command += ["--repeat", "30", "--warmup", "5", "--precision", precision]
        for number, (name, value) in enumerate(inputs.items()):
            file = Path(folder) / f"in{number}.npy"
            np.save(file, value)
            command += ["--input", f"{name}={file}"]
        started = time.time()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return {"error": done.stderr.strip()[-600:]}
        report = json.loads(done.stdout)
        name = report["outputs"][0]["name"]
        value = np.load(Path(folder) / f"{name.replace('/', '_')}.npy")
        return {"value": value, "first_s": time.time() - started}


def check(name: str, exporter: str, atoll: str, folder: str, batches: list[int]) -> dict:
    """Exports one network and compares atoll's outputs with PyTorch's at every batch."""
    import torch

    from latency import relative_error
    from modelzoo import zoo_nets

    done = export(name, exporter, folder)
    if "error" in done:
        return done | {"stage": "export"}
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    made = zoo_nets.build(name)
    module, errors = made.module.cuda(), {}
    for batch in batches:
        inputs = samples(made, batch, batch)
        tensors = [torch.from_numpy(value).cuda() for value in inputs.values()]
        with torch.inference_mode():
            wanted = module.float()(*tensors).float().cpu().numpy()
            halves = [t.half() if t.is_floating_point() else t for t in tensors]
            half = module.half()(*halves).float().cpu().numpy()
        result = atoll_output(atoll, done["path"], inputs, "f16")
        if "error" in result:
            return done | result | {"stage": "run", "batch": batch}
        errors[batch] = {
            "error": relative_error([result["value"]], [wanted]),
            "torch_error": relative_error([half], [wanted]),
            "first_s": round(result["first_s"], 2),
        }
    return done | {"errors": errors}


def torch_us(name: str, batches: list[int], compiled: bool) -> dict[int, dict]:
    """PyTorch's latency: a CUDA graph in half precision, and max-autotune."""
    import torch

    from latency import graph_us, replay_us
    from modelzoo import zoo_nets

    torch.backends.cudnn.benchmark = True
    made = zoo_nets.build(name)
    images = any(value.dim() == 4 for value in made.samples.values())
    module = made.module.half().cuda()
    if images:
        module = module.to(memory_format=torch.channels_last)
    found = {}
    for batch in batches:
        tensors = []
        for value in samples(made, batch, batch).values():
            tensor = torch.from_numpy(value).cuda()
            tensor = tensor.half() if tensor.is_floating_point() else tensor
            images = tensor.dim() == 4
            tensors.append(tensor.to(memory_format=torch.channels_last) if images else tensor)
        with torch.inference_mode():
            try:
                found[batch] = {"graph_us": graph_us(module, tensors)}
            except RuntimeError:
                # It makes tensors on the host, which a graph cannot capture.
                torch.cuda.synchronize()
                found[batch] = {"eager_us": replay_us(lambda: module(*tensors))}
        if compiled:
            found[batch]["compile_us"] = compiled_us(module, tensors)
    return found


def compiled_us(module: object, tensors: list) -> float | None:
    """None when torch.compile fails."""
    import torch

    from latency import replay_us

    try:
        torch._dynamo.reset()
        with torch.inference_mode():
            fast = torch.compile(module, mode="max-autotune")
            for _ in range(4):
                fast(*tensors)
            torch.cuda.synchronize()
            return replay_us(lambda: fast(*tensors))
    except Exception:
        traceback.print_exc(limit=1)
        return None


def profile(atoll: str, path: str, batches: list[int], tuned: bool) -> dict:
    """Times every batch, after tuning or with the choices that are there."""
    command = [atoll, "profile", path, "--device", "cuda:0", "--precision", "f16", "--json"]
    command += ["--batches", ",".join(map(str, batches)), *([] if tuned else ["--classes"])]
    started = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {"error": "atoll profile took more than 120 s"}
    if done.returncode != 0:
        return {"error": done.stderr.strip()[-600:]}
    report = json.loads(done.stdout) | {"profile_s": round(time.time() - started, 1)}
    for plan in report["plans"]:
        plan.setdefault("latency_us", plan["classes"]["real_time_us"])
    return report


def slowest(plan: dict, count: int = 3) -> list[dict]:
    """The steps that take longest, equal ones together, with their share of the whole."""
    keys = ("op", "problem", "variant", "bound", "share_of_limit")
    alike: dict[str, dict] = {}
    for step in plan.get("steps", []):
        first = {key: step[key] for key in keys if key in step} | {"times": 0, "us": 0.0}
        entry = alike.setdefault(step.get("problem", step["name"]), first)
        entry["times"] += 1
        entry["us"] += step["us"]
    total = sum(entry["us"] for entry in alike.values()) or 1.0
    steps = sorted(alike.values(), key=lambda entry: -entry["us"])[:count]
    return [
        entry | {"us": round(entry["us"], 2), "share": round(entry["us"] / total, 3)}
        for entry in steps
    ]


def earlier_us(name: str, peers: Path | None) -> dict[int, dict]:
    """PyTorch's latencies of an earlier report, by batch."""
    rows = json.loads(peers.read_text())["rows"] if peers else []
    keys = ("graph_us", "eager_us", "compile_us")
    return {
        row["batch"]: {key: row[key] for key in keys if key in row}
        for row in rows
        if row["network"] == name and any(key in row for key in keys)
    }


def time_network(name: str, exports: dict[str, dict], args: argparse.Namespace) -> list[dict]:
    """Latency of one network in both systems, one row per exporter and batch."""
    batches = [int(batch) for batch in args.batches.split(",")]
    torch_times = earlier_us(name, args.peers) or torch_us(name, batches, args.compile)
    rows = []
    for exporter, checked in exports.items():
        if "errors" not in checked:
            continue
        report = profile(args.atoll, checked["path"], batches, not args.untuned)
        if "error" in report:
            rows.append({"network": name, "exporter": exporter, "error": report["error"]})
            continue
        for plan in report["plans"]:
            batch = plan["batch"]
            peers = [value for value in torch_times[batch].values() if value]
            ours = plan["latency_us"]["p50"]
            row = {"network": name, "exporter": exporter, "batch": batch, "atoll_us": ours}
            row |= torch_times[batch] | checked["errors"][batch]
            row |= {"ratio": round(ours / min(peers), 3), "slowest": slowest(plan)}
            row["profile_s"] = report["profile_s"]
            rows.append(row)
    return rows


def geometric(values: list[float]) -> float | None:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 3) if values else None


def wrong(row: dict) -> bool:
    return row["error"] > max(1.5 * row["torch_error"], 1e-3)


def summary(rows: list[dict], refused: list[dict]) -> dict:
    timed = [row for row in rows if "ratio" in row]
    means = {
        str(batch): geometric([row["ratio"] for row in timed if row["batch"] == batch])
        for batch in sorted({row["batch"] for row in timed})
    }
    return {
        "networks": len({row["network"] for row in timed}),
        "geometric_mean": means,
        "slower": sorted({row["network"] for row in timed if row["ratio"] > 1.0}),
        "wrong": sorted({row["network"] for row in timed if wrong(row)}),
        "refused": sorted({row["network"] for row in refused if row.get("stage") == "run"}),
        "export_failed": sorted(
            f"{row['network']}.{row['exporter']}"
            for row in refused
            if row.get("stage") == "export"
        ),
    }


def check_all(names: list[str], args: argparse.Namespace, folder: str, until: float) -> dict:
    """Exports and compares all networks in parallel; a network that takes too long is left out."""
    import multiprocessing

    batches = [int(batch) for batch in args.batches.split(",")]
    found: dict[str, dict[str, dict]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        waiting = {
            pool.submit(check, name, exporter, args.atoll, folder, batches): (name, exporter)
            for name in names
            for exporter in args.exporters.split(",")
        }
        try:
            for future in as_completed(waiting, timeout=max(1.0, until - time.time())):
                name, exporter = waiting[future]
                try:
                    result = future.result()
                except Exception as error:
                    result = {"error": f"{type(error).__name__}: {error}"[:300], "stage": "check"}
                found.setdefault(name, {})[exporter] = result
                brief = {k: v for k, v in result.items() if k != "path"}
                print(f"{name}.{exporter}: {json.dumps(brief)[:400]}", flush=True)
        except TimeoutError:
            for future in waiting:
                future.cancel()
            for process in list(pool._processes.values()):
                process.kill()
    return found


def main() -> int:
    from modelzoo import zoo_nets

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("atoll")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="networks [default: all]")
    parser.add_argument("--skip", default="", help="networks to leave out")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--exporters", default="script,dynamo")
    parser.add_argument("--jobs", type=int, default=6, help="networks checked at the same time")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--check-share", type=float, default=0.6, help="of it for outputs")
    parser.add_argument("--compile", action="store_true", help="time torch.compile too")
    parser.add_argument("--untuned", action="store_true", help="time without tuning first")
    parser.add_argument("--peers", type=Path, help="earlier report with PyTorch's latencies")
    parser.add_argument("--check-only", action="store_true", help="compare outputs, no timing")
    parser.add_argument("--list", action="store_true", help="print the networks and exit")
    args = parser.parse_args()
    if args.list:
        for name, (domain, _) in zoo_nets.BUILDERS.items():
            print(f"{domain:18} {name}")
        return 0
    started = time.time()
    skipped = args.skip.split(",")
    names = [name for name in args.only.split(",") if name] or list(zoo_nets.BUILDERS)
    names = [name for name in names if name not in skipped]
    rows: list[dict] = []
    refused: list[dict] = []
    checked: dict[str, dict[str, dict]] = {}

    def write() -> None:
        import torch

        report = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        report |= {"summary": summary(rows, refused), "rows": rows, "refused": refused}
        report["checks"] = {
            f"{name}.{exporter}": {k: v for k, v in result.items() if k != "path"}
            for name, each in checked.items()
            for exporter, result in each.items()
        }
        args.out.write_text(json.dumps(report, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        until = started + args.check_share * args.seconds
        checked = check_all(names, args, folder, until)
        for name, each in checked.items():
            for exporter, result in each.items():
                if "error" in result:
                    brief = {k: v for k, v in result.items() if k != "path"}
                    refused.append({"network": name, "exporter": exporter} | brief)
        write()
        for name in [] if args.check_only else names:
            if time.time() - started > args.seconds:
                print(f"stopped before {name}: out of time", flush=True)
                break
            if not any("errors" in each for each in checked.get(name, {}).values()):
                continue
            try:
                found = time_network(name, checked[name], args)
            except Exception as error:
                found = [{"network": name, "error": f"{type(error).__name__}: {error}"[:300]}]
            rows += found
            for row in found:
                brief = {k: v for k, v in row.items() if k != "slowest"}
                print(json.dumps(brief), flush=True)
            write()
    print(json.dumps(summary(rows, refused), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
