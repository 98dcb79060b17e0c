#!/usr/bin/env python3
"""Measure the cost of being preemptible: each network as real time and as best effort, alone.

    best_effort.py ATOLL MODELS_DIR OUT.json [--rounds 3] [--repeat 300]

Measures on the device (`atoll profile --classes`: both classes alternate, as one graph and in the
chains that best effort is launched in), and from call to result (`atoll run`), which includes the
handover to the thread of the queue and back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path


def output_of(command: list[str]) -> dict:
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run(atoll: str, model: Path, repeat: int, best_effort: bool) -> dict:
    command = [atoll, "run", str(model), "--device", "cuda:0", "--json"]
    command += ["--repeat", str(repeat), "--warmup", "30"]
    return output_of(command + (["--best-effort"] if best_effort else []))["latency_us"]


def on_device(atoll: str, model: Path, repeat: int) -> dict:
    command = [atoll, "profile", str(model), "--device", "cuda:0", "--json"]
    command += ["--classes", "--batches", "1", "--replays", str(repeat)]
    bind = ["--bind", "sequence=128"] if "bert" in model.stem else []
    return output_of(command + bind)["plans"][0]["classes"]


def median_of(rounds: list[list[dict]], class_: int, key: str) -> float:
    """The median over all rounds of one figure of one class."""
    return statistics.median(pair[class_][key] for pair in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("atoll")
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=300)
    args = parser.parse_args()
    rows = []
    for model in sorted(args.models.glob("*.onnx")):
        rounds = [
            [run(args.atoll, model, args.repeat, class_) for class_ in (False, True)]
            for _ in range(args.rounds)
        ]
        row = {
            "model": model.stem,
            "device": on_device(args.atoll, model, args.repeat),
            "real_time_us": median_of(rounds, 0, "p50"),
            "real_time_p99_us": median_of(rounds, 0, "p99"),
            "best_effort_us": median_of(rounds, 1, "p50"),
            "best_effort_p99_us": median_of(rounds, 1, "p99"),
        }
        row["ratio"] = round(row["best_effort_us"] / row["real_time_us"], 3)
        rows.append(row)
        print(row, flush=True)
    args.out.write_text(
        json.dumps({"rounds": args.rounds, "repeat": args.repeat, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
