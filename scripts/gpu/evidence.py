#!/usr/bin/env python3
"""Turn what scripts/gpu.sh left into evidence that is bound to the sources it was measured on.

    evidence.py RUN_DIR [--command "scripts/gpu.sh OUT"]

Writes evidence/latency.json and evidence/conformance.json, evidence/disb.json of what scripts/gpu/disb.sh left and
evidence/preempt.json of what `atoll bench preempt` wrote there, evidence/best_effort.json of scripts/gpu/best_effort.py,
evidence/batching.json, evidence/swap.json and evidence/big.json of scripts/gpu/batching.sh and swap.sh, evidence/server.json of `atoll bench
server`, evidence/pairs.json and evidence/corner.json of `atoll bench disb` with other workloads and settings, evidence/padding.json of `atoll bench padding`,
evidence/soak_swap.json and evidence/soak_real.json of `atoll bench swap --soak` and `atoll bench disb --soak`; each where RUN_DIR has what it is made of. `cargo xtask evidence` says when they are stale, and prints the README's table.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = ROOT / "crates" / "compiler" / "kernels"


def header(folder: Path, command: str) -> dict:
    device, driver = (folder / "device.txt").read_text().strip().split(", ")
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(KERNELS.glob("*.cuh"))}
    return {"device": device, "driver": driver, "date": datetime.date.today().isoformat(), "command": command, "sha256": hashes}


def steps(plan: dict) -> list[dict]:
    """The steps of a plan, equal ones counted."""
    kept = ("op", "problem", "variant", "us", "registers", "tflops", "gb_per_s", "bound", "share_of_limit")
    counted: dict[str, dict] = {}
    for step in plan["steps"]:
        entry = counted.setdefault(step["problem"], {"times": 0, **{key: step[key] for key in kept}})
        entry["times"] += 1
    rounded = [{key: round(value, 3) if isinstance(value, float) else value for key, value in entry.items()} for entry in counted.values()]
    return sorted(rounded, key=lambda entry: -entry["us"] * entry["times"])


def joined(runs: list[dict]) -> dict:
    """Several calls of latency.py as one."""
    whole = {**runs[0], "rows": [], "files": [], "failed": [], "profiles": {}}
    for run in runs:
        for key in ("rows", "files", "failed"):
            whole[key] += run[key]
        whole["profiles"].update(run["profiles"])
    return whole


def write(name: str, content: dict) -> None:
    (ROOT / "evidence" / name).write_text(json.dumps(content, indent=1) + "\n")


def write_latency(run: Path, head: dict) -> None:
    found = joined([json.loads(path.read_text()) for path in sorted(run.glob("latency*.json"))])
    profiles = {
        name: [{"batch": plan["batch"], "weight_bytes": plan["weight_bytes"], "run_bytes": plan["run_bytes"],
                "plain_graph_us": plan["plain_latency_us"]["p50"], "steps": steps(plan) if plan["batch"] == 1 else []}
               for plan in profile["plans"]]
        for name, profile in found["profiles"].items()
    }
    write("latency.json", {**head, "torch": found["torch"], "cudnn": found["cudnn"], "rows": found["rows"],
                           "files": found["files"], "failed": found["failed"], "profiles": profiles})


def write_disb(run: Path, head: dict) -> None:
    """The cells as they are; the sources' hashes, the device and its driver from the header."""
    found = json.loads((run / "disb.json").read_text())
    kept = {key: found[key] for key in ("seed", "alone", "left_out", "cells")}
    write("disb.json", {**head, "date": found["date"], "command": found["command"], **kept})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--command", default="scripts/gpu.sh OUT")
    args = parser.parse_args()
    head = header(args.run, args.command)
    if any(args.run.glob("latency*.json")):
        write_latency(args.run, head)
    precisions = [name for name in ("f32", "f16", "bf16") if (args.run / f"conformance_{name}.json").is_file()]
    if precisions:
        conformance = {name: json.loads((args.run / f"conformance_{name}.json").read_text()) for name in precisions}
        write("conformance.json", {**head, "precisions": conformance})
    if (args.run / "disb.json").is_file():
        write_disb(args.run, head)
    if (args.run / "preempt.json").is_file():
        found = json.loads((args.run / "preempt.json").read_text())
        kept = {key: found[key] for key in ("date", "command", "rounds", "idle", "real_time_alone", "cases")}
        write("preempt.json", {**head, **kept})
    if (args.run / "best_effort.json").is_file():
        found = json.loads((args.run / "best_effort.json").read_text())
        write("best_effort.json", {**head, "command": "scripts/gpu/best_effort.py ATOLL MODELS OUT.json", **found})
    for name in ("batching.json", "swap.json", "big.json", "server.json", "pairs.json", "corner.json", "padding.json", "soak_swap.json", "soak_real.json"):
        if (args.run / name).is_file():
            found = json.loads((args.run / name).read_text())
            write(name, {**head, **{key: value for key, value in found.items() if key not in ("device", "driver")}})


if __name__ == "__main__":
    main()
