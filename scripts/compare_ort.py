#!/usr/bin/env python3
"""Compare atoll's outputs with ONNX Runtime's, on fresh random inputs, at batch 1 and 4.

    python scripts/compare_ort.py models               # needs numpy, onnx, onnxruntime
    python scripts/compare_ort.py models --only minilm --seed 7

For each output: the relative error ||a - b|| / ||b||, and the largest difference over the largest
magnitude. Exit status 1 when the relative error of any output is above --limit, or atoll fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

try:
    import numpy as np
    import onnxruntime

    from onnx_inputs import chosen_models, has_strings, random_inputs
except ImportError as error:
    sys.exit(f"{error.name} is missing; run: pip install numpy onnx onnxruntime")

REPOSITORY = Path(__file__).resolve().parent.parent
RUN_SECONDS = 600


@dataclass
class Row:
    """One output of one model at one batch size."""

    model: str
    batch: int
    output: str
    relative: float
    largest: float
    note: str = ""

    def bad(self, limit: float) -> bool:
        # NaN must count as bad.
        return bool(self.note) or not self.relative <= limit


def run_ort(path: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def run_atoll(
    binary: Path, path: Path, inputs: dict[str, np.ndarray], outputs: list[str], extra: list[str]
) -> dict[str, np.ndarray]:
    """Runs `atoll run` with the inputs as .npy files and reads back what it saved."""
    with tempfile.TemporaryDirectory(prefix="atoll-compare-") as name:
        folder = Path(name)
        command = [str(binary), "run", str(path), "--save", str(folder / "out"), "--json"]
        command += ["--repeat", "1", "--warmup", "0", *extra]
        for index, (key, value) in enumerate(inputs.items()):
            np.save(folder / f"in{index}.npy", value)
            command += ["--input", f"{key}={folder / f'in{index}.npy'}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
        if done.returncode != 0:
            raise RuntimeError(
                f"exit {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
            )
        return {key: np.load(folder / "out" / f"{key.replace('/', '_')}.npy") for key in outputs}


def compare(model: str, batch: int, name: str, ours: np.ndarray, theirs: np.ndarray) -> Row:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        note = f"{ours.dtype}{list(ours.shape)} instead of {theirs.dtype}{list(theirs.shape)}"
        return Row(model, batch, name, float("nan"), float("nan"), note)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    tiny = np.finfo(np.float64).tiny
    relative = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), tiny)) if a.size else 0.0
    largest = float(np.abs(a - b).max() / max(np.abs(b).max(), tiny)) if a.size else 0.0
    return Row(model, batch, name, relative, largest)


def compare_model(binary: Path, path: Path, batch: int, seed: int, extra: list[str]) -> list[Row]:
    """All outputs of one model at one batch size; a failure becomes a row with a note."""
    inputs = random_inputs(path, batch, np.random.default_rng([seed, batch]))
    theirs = run_ort(path, inputs)
    try:
        ours = run_atoll(binary, path, inputs, list(theirs), extra)
    except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        return [
            Row(path.stem, batch, "-", float("nan"), float("nan"), " ".join(str(error).split()))
        ]
    return [compare(path.stem, batch, name, ours[name], theirs[name]) for name in theirs]


def print_row(row: Row, limit: float) -> None:
    verdict = "FAIL" if row.bad(limit) else "ok"
    print(
        f"| {row.model} | {row.batch} | {row.output} | {row.relative:.2e} "
        f"| {row.largest:.2e} | {verdict} {row.note}|",
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
        "--batches", default="1,4", help="batch sizes, comma-separated (default: 1,4)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random inputs (default: 0)"
    )
    parser.add_argument(
        "--limit", type=float, default=1e-3, help="largest accepted relative error (default: 1e-3)"
    )
    parser.add_argument(
        "--run-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="passed on to `atoll run`; may repeat",
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if not args.atoll.exists():
        raise SystemExit(f"{args.atoll} is missing; build it with: cargo build --release")
    models = chosen_models(args.folders, args.only)
    if not models:
        raise SystemExit("no models found; make some with: python scripts/models.py --small")
    print("| model | batch | output | relative error | largest | |\n|---|---:|---|---:|---:|---|")
    bad = 0
    for path in models:
        if has_strings(path):
            continue
        for batch in map(int, args.batches.split(",")):
            for row in compare_model(args.atoll, path, batch, args.seed, args.run_arg):
                print_row(row, args.limit)
                bad += row.bad(args.limit)
    print(f"\n{bad} above {args.limit:g}" if bad else f"\nall within {args.limit:g}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
