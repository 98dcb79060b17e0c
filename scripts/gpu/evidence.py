#!/usr/bin/env python3
"""Turn the results of a run into evidence, bound to the sources that were measured.

    evidence.py RUN_DIR [--command "scripts/gpu.sh OUT"]

Writes these files of evidence/, each if RUN_DIR has the results it is made from:

    latency, conformance      scripts/gpu.sh
    zoo                       scripts/gpu/zoo.py (zoo*.json), added to the parts that are there
    quantized                 scripts/gpu/quantized.py
    disb                      scripts/gpu/disb.sh
    preempt                   atoll bench preempt
    best_effort               scripts/gpu/best_effort.py
    batching                  scripts/gpu/batching.sh
    swap, big                 scripts/gpu/swap.sh
    server                    atoll bench server
    pairs, sm_partition       atoll bench disb with other workloads and settings
    padding                   atoll bench padding
    soak_swap, soak_real      atoll bench swap --soak, atoll bench disb --soak
    new_sizes                 scripts/gpu/new_sizes.py
    strangers                 atoll bench strangers (strangers*.json, one per seed)
    faults                    atoll bench faults
    mixed_lengths             scripts/gpu/mixed_lengths.py

`cargo xtask evidence` reports which of them are stale.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = ROOT / "crates" / "compiler" / "kernels"


def source_hash(path: Path) -> str:
    """The hash of a source without comments and layout, as `cargo xtask evidence` computes it."""
    text = path.read_text()
    if "/*" in text:
        raise SystemExit(f"{path} has a block comment, which the hash would include")
    words = [word for line in text.splitlines() for word in line.split("//")[0].split()]
    kept = ""
    for word in words:
        if kept and is_word(kept[-1]) and is_word(word[0]):
            kept += " "
        kept += word
    return hashlib.sha256(kept.encode()).hexdigest()


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


# Only products of bytes use them.
OF_BYTES = ("bytes.cuh", "byte_end.cuh", "hopper_bytes.cuh")


def header(folder: Path, command: str, quantized: bool = False) -> dict:
    """What was measured where; float networks do not depend on products of bytes."""
    device, driver = (folder / "device.txt").read_text().strip().split(", ")
    sources = sorted(KERNELS.glob("*.cuh"))
    if not quantized:
        sources = [path for path in sources if path.name not in OF_BYTES]
    hashes = {path.name: source_hash(path) for path in sources}
    return {
        "device": device,
        "driver": driver,
        "date": datetime.date.today().isoformat(),
        "command": command,
        "sha256": hashes,
    }


# What decides how long a request of new sizes takes, and who waits for it.
OF_NEW_SIZES = (
    "crates/cuda/src/program.rs",
    "crates/cuda/src/program/batches.rs",
    "crates/cuda/src/program/sizes_ahead.rs",
    "crates/runtime/src/node/preparation.rs",
)


# How a server gets over a fault.
OF_FAULTS = (
    "crates/cli/src/process_replacement.rs",
    "crates/cuda/src/fault_injection.rs",
    "crates/runtime/src/device_group/recovery.rs",
)

# What keeps strangers away from real time.
OF_STRANGERS = (
    *OF_NEW_SIZES,
    "crates/cuda/src/driver/call_thread.rs",
    "crates/cuda/src/driver/pinned_blocks.rs",
    "crates/device/src/thread_placement.rs",
)

# How requests of different lengths share a batch.
OF_MIXED_LENGTHS = (
    "crates/model/src/length_padding.rs",
    "crates/runtime/src/node/lengths.rs",
)


def of_sources(head: dict, names: tuple[str, ...]) -> dict:
    return {**head, "sha256": {name: source_hash(ROOT / name) for name in names}}


def of_new_sizes(head: dict) -> dict:
    return of_sources(head, OF_NEW_SIZES)


def steps(plan: dict) -> list[dict]:
    """The steps of a plan; equal ones are counted."""
    kept = (
        "op",
        "problem",
        "variant",
        "us",
        "registers",
        "tflops",
        "gb_per_s",
        "bound",
        "share_of_limit",
    )
    counted: dict[str, dict] = {}
    for step in plan["steps"]:
        entry = counted.setdefault(
            step["problem"], {"times": 0, **{key: step[key] for key in kept}}
        )
        entry["times"] += 1
    rounded = [
        {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in entry.items()
        }
        for entry in counted.values()
    ]
    return sorted(rounded, key=lambda entry: -entry["us"] * entry["times"])


def joined(runs: list[dict]) -> dict:
    """Joins the results of several calls of latency.py."""
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
        name: [
            {
                "batch": plan["batch"],
                "weight_bytes": plan["weight_bytes"],
                "run_bytes": plan["run_bytes"],
                "plain_graph_us": plan["plain_latency_us"]["p50"],
                "steps": steps(plan) if plan["batch"] == 1 else [],
            }
            for plan in profile["plans"]
        ]
        for name, profile in found["profiles"].items()
    }
    write(
        "latency.json",
        {
            **head,
            "torch": found["torch"],
            "cudnn": found["cudnn"],
            "rows": found["rows"],
            "files": found["files"],
            "failed": found["failed"],
            "profiles": profiles,
        },
    )


def write_disb(run: Path, head: dict) -> None:
    """Keeps the cells; hashes, device and driver come from the header."""
    found = json.loads((run / "disb.json").read_text())
    kept = {key: found[key] for key in ("seed", "alone", "left_out", "cells")}
    write("disb.json", {**head, "date": found["date"], "command": found["command"], **kept})


def add_to_zoo(run: Path, head: dict) -> None:
    """Replaces the rows of the networks that were measured. Every part has its own hashes; those of
    the file are the first part's, so that it is stale as long as any part is."""
    from zoo import summary

    path = ROOT / "evidence" / "zoo.json"
    old = json.loads(path.read_text())
    own = ("device", "driver", "date", "command", "sha256", "note", "torch")
    parts = old.get("parts") or [{key: old[key] for key in own if key in old}]
    found = [json.loads(each.read_text()) for each in sorted(run.glob("zoo*.json"))]
    new = [row for report in found for row in report["rows"] if "ratio" in row]
    measured = {row["network"] for row in new}
    rows = [row for row in old["rows"] if row["network"] not in measured]
    for row in rows:
        row.setdefault("part", 0)
    rows += [row | {"part": len(parts)} for row in new]
    parts.append(head | {"torch": found[0]["torch"]})
    used = sorted({row["part"] for row in rows})
    for row in rows:
        row["part"] = used.index(row["part"])
    parts = [parts[number] for number in used]
    refused = [each for each in old["refused"] if each["network"] not in measured]
    write(
        "zoo.json",
        {
            "sha256": parts[0]["sha256"],
            "parts": parts,
            "summary": summary(rows, refused),
            "rows": rows,
            "refused": refused,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--command", default="scripts/gpu.sh OUT")
    args = parser.parse_args()
    head = header(args.run, args.command)
    if any(args.run.glob("latency*.json")):
        write_latency(args.run, head)
    precisions = [
        name
        for name in ("f32", "tf32", "f16", "bf16")
        if (args.run / f"conformance_{name}.json").is_file()
    ]
    if precisions:
        conformance = {
            name: json.loads((args.run / f"conformance_{name}.json").read_text())
            for name in precisions
        }
        whole = header(args.run, args.command, quantized=True)
        write("conformance.json", {**whole, "precisions": conformance})
    if any(args.run.glob("zoo*.json")):
        add_to_zoo(args.run, head)
    if (args.run / "quantized.json").is_file():
        found = json.loads((args.run / "quantized.json").read_text())
        whole = header(args.run, args.command, quantized=True)
        write("quantized.json", {**whole, "rows": found["rows"], "failed": found["failed"]})
    if (args.run / "disb.json").is_file():
        write_disb(args.run, head)
    if (args.run / "preempt.json").is_file():
        found = json.loads((args.run / "preempt.json").read_text())
        kept = {
            key: found[key]
            for key in ("date", "command", "rounds", "idle", "real_time_alone", "cases")
        }
        write("preempt.json", {**head, **kept})
    if (args.run / "best_effort.json").is_file():
        found = json.loads((args.run / "best_effort.json").read_text())
        write(
            "best_effort.json",
            {**head, "command": "scripts/gpu/best_effort.py ATOLL MODELS OUT.json", **found},
        )
    if (args.run / "new_sizes.json").is_file():
        found = json.loads((args.run / "new_sizes.json").read_text())
        write("new_sizes.json", {**of_new_sizes(head), **found})
    seeds = [json.loads(path.read_text()) for path in sorted(args.run.glob("strangers*.json"))]
    if seeds:
        for found in seeds:
            for name in ("device", "driver", "date"):
                found.pop(name)
            found["command"] = re.sub(r" --json \S+", "", found["command"])
        write("strangers.json", {**of_sources(head, OF_STRANGERS), "seeds": seeds})
    for name, sources in (("faults", OF_FAULTS), ("mixed_lengths", OF_MIXED_LENGTHS)):
        if (args.run / f"{name}.json").is_file():
            found = json.loads((args.run / f"{name}.json").read_text())
            kept = {key: found[key] for key in found if key not in ("device", "driver")}
            write(f"{name}.json", {**of_sources(head, sources), **kept})
    for name in (
        "batching.json",
        "swap.json",
        "big.json",
        "server.json",
        "pairs.json",
        "sm_partition.json",
        "padding.json",
        "soak_swap.json",
        "soak_real.json",
    ):
        if (args.run / name).is_file():
            found = json.loads((args.run / name).read_text())
            kept = {key: found[key] for key in found if key not in ("device", "driver")}
            write(name, {**head, **kept})


if __name__ == "__main__":
    main()
