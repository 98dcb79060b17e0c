#!/usr/bin/env python3
"""Turn what scripts/gpu.sh left into evidence that is bound to the sources it was measured on.

    evidence.py RUN_DIR [--command "scripts/gpu.sh OUT"]

Writes evidence/latency.json and evidence/conformance.json. `cargo xtask evidence` says when they are stale, and prints the
README's table.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--command", default="scripts/gpu.sh OUT")
    args = parser.parse_args()
    head = header(args.run, args.command)
    found = joined([json.loads(path.read_text()) for path in sorted(args.run.glob("latency*.json"))])
    profiles = {
        name: [{"batch": plan["batch"], "weight_bytes": plan["weight_bytes"], "run_bytes": plan["run_bytes"],
                "plain_graph_us": plan["plain_latency_us"]["p50"], "steps": steps(plan) if plan["batch"] == 1 else []}
               for plan in profile["plans"]]
        for name, profile in found["profiles"].items()
    }
    latency = {**head, "torch": found["torch"], "cudnn": found["cudnn"], "rows": found["rows"], "files": found["files"],
               "failed": found["failed"], "profiles": profiles}
    (ROOT / "evidence" / "latency.json").write_text(json.dumps(latency, indent=1) + "\n")
    conformance = {precision: json.loads((args.run / f"conformance_{precision}.json").read_text()) for precision in ("f32", "f16", "bf16")}
    (ROOT / "evidence" / "conformance.json").write_text(json.dumps({**head, "precisions": conformance}, indent=1) + "\n")


if __name__ == "__main__":
    main()
