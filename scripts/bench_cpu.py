#!/usr/bin/env python3
"""Measure latency on the CPU: ONNX Runtime and atoll alternate on the same models in one run.

    python scripts/bench_cpu.py models --threads 2     # needs numpy, onnx, onnxruntime

Each round times ONNX Runtime and then atoll, so that both see the same noise. Prints medians over
all rounds as a Markdown table, with atoll's slowest operator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

try:
    import numpy as np
    import onnxruntime

    from onnx_inputs import chosen_models, has_strings, random_inputs
except ImportError as error:
    sys.exit(f"{error.name} is missing; run: pip install numpy onnx onnxruntime")

REPOSITORY = Path(__file__).resolve().parent.parent
RUN_SECONDS = 900


@dataclass
class Row:
    """One model: microseconds of both runtimes."""

    model: str
    batch: int
    ort_p50_us: float
    ort_p99_us: float
    atoll_p50_us: float
    atoll_p99_us: float
    ratio: float
    slowest_op: str


def time_ort(
    session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray], repeat: int, warmup: int
) -> list[float]:
    """Microseconds of each counted run."""
    times = []
    for index in range(warmup + repeat):
        started = time.perf_counter()
        session.run(None, inputs)
        if index >= warmup:
            times.append((time.perf_counter() - started) * 1e6)
    return times


def ort_session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Idle ONNX Runtime threads spin by default and would slow atoll down.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def time_atoll(command: list[str]) -> dict[str, object]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
    return json.loads(done.stdout)


def describe_slowest(report: dict[str, object]) -> str:
    steps = report.get("steps") or []
    if not steps:
        return "-"
    step = steps[0]
    return f"{step['op']} {step['name']} ({100 * step['share']:.0f} %)"


def p99(times: list[float]) -> float:
    return float(np.percentile(times, 99))


def bench(path: Path, args: argparse.Namespace) -> Row:
    inputs = random_inputs(path, args.batch, np.random.default_rng(args.seed))
    session = ort_session(path, args.threads)
    ort_times: list[float] = []
    reports: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        command = [str(args.atoll), "run", str(path), "--threads", str(args.threads)]
        command += ["--repeat", str(args.repeat), "--warmup", str(args.warmup), "--json"]
        for index, (key, value) in enumerate(inputs.items()):
            np.save(Path(name) / f"in{index}.npy", value)
            command += ["--input", f"{key}={Path(name) / f'in{index}.npy'}"]
        for _ in range(args.rounds):
            ort_times += time_ort(session, inputs, args.repeat, args.warmup)
            reports.append(time_atoll(command))
    latencies = [report["latency_us"] for report in reports]
    ort_p50 = statistics.median(ort_times)
    atoll_p50 = statistics.median(latency["p50"] for latency in latencies)
    return Row(
        path.stem,
        args.batch,
        ort_p50,
        p99(ort_times),
        atoll_p50,
        max(latency["p99"] for latency in latencies),
        atoll_p50 / ort_p50,
        describe_slowest(reports[-1]),
    )


def print_row(row: Row) -> None:
    print(
        f"| {row.model} | {row.batch} | {row.ort_p50_us / 1e3:.2f} | {row.ort_p99_us / 1e3:.2f} "
        f"| {row.atoll_p50_us / 1e3:.2f} | {row.atoll_p99_us / 1e3:.2f} "
        f"| {row.ratio:.2f} | {row.slowest_op} |",
        flush=True,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("ATOLL_BIN", str(REPOSITORY / "target" / "release" / "atoll"))
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[REPOSITORY / "models"],
        help="folders of .onnx files (default: models)",
    )
    parser.add_argument(
        "--atoll",
        type=Path,
        default=Path(default),
        help="the binary (default: $ATOLL_BIN or target/release/atoll)",
    )
    parser.add_argument("--only", metavar="NAME,...", help="only these models")
    parser.add_argument(
        "--threads",
        type=int,
        default=os.cpu_count() or 1,
        help="threads of both runtimes (default: all cores)",
    )
    parser.add_argument("--batch", type=int, default=1, help="batch size (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="alternations (default: 3)")
    parser.add_argument("--repeat", type=int, default=10, help="counted runs a round (default: 10)")
    parser.add_argument("--warmup", type=int, default=2, help="uncounted runs a round (default: 2)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random inputs (default: 0)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        help="exit 1 when a model is slower than this many times ONNX Runtime",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if not args.atoll.exists():
        raise SystemExit(f"{args.atoll} is missing; build it with: cargo build --release")
    models = [path for path in chosen_models(args.folders, args.only) if not has_strings(path)]
    if not models:
        raise SystemExit("no models found; make some with: python scripts/models.py")
    print(f"{args.threads} threads, milliseconds\n")
    print(
        "| model | batch | ort p50 | ort p99 | atoll p50 | atoll p99 | ratio | atoll's slowest op |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    rows: list[Row] = []
    failed = 0
    for path in models:
        try:
            rows.append(bench(path, args))
            print_row(rows[-1])
        except (RuntimeError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            failed += 1
            reason = " ".join(str(error).split())
            print(f"| {path.stem} | {args.batch} | | | | | | failed: {reason} |", flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"threads": args.threads, "rows": [asdict(r) for r in rows]}, indent=2)
            + "\n"
        )
    slow = [row.model for row in rows if args.limit and row.ratio > args.limit]
    if slow:
        print(f"\nslower than {args.limit}x ONNX Runtime: {', '.join(slow)}")
    return 1 if failed or slow else 0


if __name__ == "__main__":
    sys.exit(main())
