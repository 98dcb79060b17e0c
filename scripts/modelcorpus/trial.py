"""Tries one file: check, run beside ONNX Runtime, compare, batch, time."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modelcorpus import feeds
from modelcorpus.peer import ROWS, close, load, rows, save

SCRIPTS = Path(__file__).resolve().parent.parent
# Relative error of an output by what its file computes with. Rounding of a quantised value may fall
# on either side; that is a flip, which later layers spread.
TOLERANCE = {"float32": 1e-3, "float64": 1e-4, "float16": 2e-2, "quantised": 5e-2}
# Labels and indices may differ where two scores are equal within rounding.
INTEGER_FLIPS = 1e-3
# No rounding makes a result right whose error is larger: that of an unrelated one is 1 or more.
QUANTISED_MOST = 0.5
# What the runs of one file take together on each side, in three turns.
TIMED_SECONDS = 0.6


@dataclass(frozen=True)
class Limits:
    """What one file may take."""

    seconds: int
    memory_mib: int
    threads: int


class Ended(Exception):
    """A process failed, ran too long or was killed."""


def call(command: list[str], limits: Limits, **kwargs) -> subprocess.CompletedProcess:
    def limit() -> None:
        size = limits.memory_mib << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limits.seconds,
            preexec_fn=limit,
            **kwargs,
        )
    except subprocess.TimeoutExpired as error:
        raise Ended(f"longer than {limits.seconds} s") from error


def without_folder(text: str, path: Path) -> str:
    """A message without the folder of the file, which differs from machine to machine."""
    return text.replace(str(path), path.name)


def peer(arguments: list[str], limits: Limits) -> dict:
    """What ONNX Runtime says of the file that is the second argument."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-m", "modelcorpus.peer", *arguments]
    done = call(command, limits, env=environment)
    try:
        reply = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        reply = {"error": f"exit {done.returncode}: {done.stderr.strip()[-200:]}"}
    if "error" in reply:
        reply["error"] = without_folder(reply["error"], Path(arguments[1]))
    return reply


def check(binary: Path, path: Path, limits: Limits) -> dict:
    """`atoll check`: whether it runs, why not, and whether it batches."""
    done = call([str(binary), "check", str(path), "--json"], limits)
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        message = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        return {"runs": False, "unsupported": [without_folder(line, path) for line in message]}
    keep = ("runs", "unsupported", "batching", "activation_bytes")
    return {key: report.get(key) for key in keep}


def run(binary: Path, path: Path, names: list[str], folder: Path, limits: Limits, repeat: int = 1):
    """`atoll run` with the arrays of `folder`: its outputs by file name, and its report."""
    with tempfile.TemporaryDirectory(prefix="atoll-corpus-") as out:
        command = [str(binary), "run", str(path), "--save", out, "--json"]
        command += ["--repeat", str(repeat), "--warmup", "0" if repeat == 1 else "2"]
        command += ["--threads", str(limits.threads)]
        for at, name in enumerate(names):
            command += ["--input", f"{name}={folder / f'{at}.npy'}"]
        done = call(command, limits)
        if done.returncode != 0:
            message = (done.stderr or done.stdout).strip().splitlines()[-1:]
            text = without_folder(" ".join(message), path)
            raise Ended(f"exit {done.returncode}: {text}"[:400])
        arrays = {file.stem: np.load(file) for file in Path(out).glob("*.npy")}
        return arrays, json.loads(done.stdout)


def file_name(output: str) -> str:
    return re.sub(r"[/\\]", "_", output)


def compare(
    ours: np.ndarray, theirs: np.ndarray, facts: feeds.FileFacts
) -> tuple[str | None, float, int]:
    """Why an output is wrong, its relative error, and how many elements differ by rounding."""
    quantised = facts.quantised
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} instead of {list(theirs.shape)}", np.inf, 0
    if theirs.dtype.kind in "UO":
        bad = int((ours.astype(str) != theirs.astype(str)).sum())
        return (f"{bad} strings differ" if bad else None), float(bad), 0
    if ours.dtype != theirs.dtype:
        return f"{ours.dtype} instead of {theirs.dtype}", np.inf, 0
    if theirs.dtype.kind != "f":
        return _compare_integers(ours, theirs, quantised)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return "not finite at other places", np.inf, 0
    finite = np.isfinite(b)
    a, b = a[finite], b[finite]
    error = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12)) if a.size else 0.0
    if a.size and np.abs(a - b).max() < 1e-6:
        error = 0.0
    # A file of half precision may give its results as floats.
    kind = "quantised" if quantised else "float16" if facts.half else str(theirs.dtype)
    limit = TOLERANCE[kind]
    flips = 0
    if quantised and a.size:
        flips = int((np.abs(a - b) > 1e-3 * max(np.abs(b).max(), 1e-12)).sum())
    return (None if error <= limit else f"relative error {error:.2g}"), error, flips


def _compare_integers(ours, theirs, quantised: bool) -> tuple[str | None, float, int]:
    a, b = ours.astype(np.int64), theirs.astype(np.int64)
    differ = int((a != b).sum())
    step = int(np.abs(a - b).max()) if a.size else 0
    if quantised and theirs.dtype.itemsize == 1 and step <= 1:
        return None, 0.0, differ
    allowed = int(INTEGER_FLIPS * a.size)
    return (None if differ <= allowed else f"{differ} of {a.size} differ"), float(differ), differ


def compare_all(names, ours: dict, theirs: dict, facts: feeds.FileFacts) -> dict:
    """The worst of all outputs."""
    verdict = {"wrong": None, "error": 0.0, "flips": 0}
    for name in names:
        if file_name(name) not in ours:
            verdict["wrong"] = f"output {name} is missing"
            continue
        if facts.draws:
            same = ours[file_name(name)].dtype == theirs[name].dtype
            verdict["wrong"] = verdict["wrong"] or (None if same else f"type of {name}")
            continue
        wrong, error, flips = compare(ours[file_name(name)], theirs[name], facts)
        if wrong:
            verdict["wrong"] = f"{name}: {wrong}"
        verdict["error"] = max(verdict["error"], error if np.isfinite(error) else 1e9)
        verdict["flips"] += flips
    return verdict


def between(folder: Path, part: str, names: list[str], facts: feeds.FileFacts) -> float:
    """How far the outputs in `part` are from ONNX Runtime's without optimisation."""
    plain, other = load(folder / "out", names), load(folder / part, names)
    errors = [compare(other[name], plain[name], facts)[1] for name in names]
    return max((error for error in errors if np.isfinite(error)), default=0.0)


def own_difference(path: Path, folder: Path, reply: dict, facts, limits: Limits) -> dict:
    """How far ONNX Runtime's result moves by rounding alone: with its optimiser, and with the
    file's numbers moved by one unit in the last place."""
    names = reply["outputs"]
    optimised = between(folder, "optimised", names, facts)
    (folder / "names.json").write_text(json.dumps(reply["inputs"]))
    try:
        nudges = peer(["nudged", str(path), str(folder)], limits).get("nudges", 0)
    except Ended:
        nudges = 0
    moved = [between(folder, f"nudged{turn}", names, facts) for turn in range(nudges)]
    return {"ort_own_error": optimised, "ort_nudged_error": max(moved, default=0.0)}


def nearer_to_wide(folder: Path, names: list[str], ours: dict, facts: feeds.FileFacts) -> dict:
    """How far results are from those of the network in single precision: ours, ONNX Runtime's, and
    those with its optimiser, which rounds folded weights to half precision as we do."""
    parts = {part: load(folder / part, names) for part in ("wide", "out", "optimised")}
    own, ort, optimised = 0.0, 0.0, 0.0
    for name in names:
        # Numbers beyond half precision are infinite in an output that has it.
        with np.errstate(over="ignore"):
            exact = parts["wide"][name].astype(parts["out"][name].dtype)
        own = max(own, compare(ours[file_name(name)], exact, facts)[1])
        ort = max(ort, compare(parts["out"][name], exact, facts)[1])
        optimised = max(optimised, compare(parts["optimised"][name], exact, facts)[1])
    return {
        "error_of_single": min(own, 1e9),
        "ort_error_of_single": min(ort, 1e9),
        # What is infinite says nothing.
        "ort_optimised_error_of_single": optimised if np.isfinite(optimised) else 0.0,
    }


def rows_alone(
    binary: Path, path: Path, names: list[str], folder: Path, limits: Limits
) -> str | None:
    """Why two rows in one run are not the rows alone."""
    whole, _ = run(binary, path, names, folder / "batch", limits)
    arrays = load(folder / "batch", names)
    for row in range(ROWS):
        single = folder / f"row{row}"
        single.mkdir(exist_ok=True)
        for at, value in enumerate(rows(arrays, row).values()):
            np.save(single / f"{at}.npy", value.astype(str) if value.dtype == object else value)
        alone, _ = run(binary, path, names, single, limits)
        for name, value in alone.items():
            if not close(whole[name][row : row + 1], value):
                return f"row {row} of {name} differs from the row alone"
    return None


def time_both(binary: Path, path: Path, names: list[str], folder: Path, limits: Limits) -> dict:
    """Both in turns, three times; the median of the medians."""
    (folder / "names.json").write_text(json.dumps(names))
    arguments = [str(path), str(folder), str(limits.threads), str(TIMED_SECONDS), str(binary)]
    try:
        # All turns of both are in one process.
        reply = peer(["time", *arguments], replace(limits, seconds=3 * limits.seconds))
    except Ended as error:
        return {"error": str(error)}
    if "error" in reply:
        return {"error": reply["error"]}
    us, ort_us = reply["us"], reply["ort_us"]
    return {"us": round(us, 2), "ort_us": round(ort_us, 2), "ratio": round(us / ort_us, 3)}


def time_known(binary: Path, path: Path, rules: dict, sizes: dict, limits: Limits) -> dict:
    """Times a file that was compared with inputs of `sizes`."""
    facts = feeds.facts_of(path)
    arrays = feeds.feed(facts, sizes, rules["seed"], rules.get("inputs"))
    with tempfile.TemporaryDirectory(prefix="atoll-corpus-") as name:
        names = save(Path(name) / "in", arrays)
        return time_both(binary, path, names, Path(name), limits)


def try_file(binary: Path, path: Path, rules: dict, limits: Limits, timed: bool) -> dict:
    """Everything about one file. `status` is accepted, refused, failed, wrong or skipped."""
    result: dict = {}
    try:
        facts = feeds.facts_of(path)
    except Exception as error:
        return {"status": "skipped", "reason": f"no ONNX file: {error}"[:200]}
    result |= {"quantised": facts.quantised, "symbolic_batch": facts.symbolic_batch}
    result |= {"opset": facts.opset}
    with tempfile.TemporaryDirectory(prefix="atoll-corpus-") as name:
        folder = Path(name)
        try:
            reply = peer(["outputs", str(path), str(folder), json.dumps(rules)], limits)
        except Ended as error:
            reply = {"error": str(error)}
        try:
            result |= {"check": check(binary, path, limits)}
            if not result["check"]["runs"]:
                return result | {"status": "refused", "ort": reply.get("error")}
            if "error" in reply:
                return result | {"status": "accepted", "compared": False, "ort": reply["error"]}
            batches = (result["check"].get("batching") or {}).get("possible", False)
            beside = _beside(binary, path, folder, reply, facts, limits, batches)
            if timed and beside["status"] == "accepted":
                beside["time"] = time_both(binary, path, reply["inputs"], folder, limits)
            return result | beside
        except (Ended, ValueError, OSError) as error:
            return result | {"status": "failed", "reason": str(error)}


def _beside(binary, path, folder: Path, reply: dict, facts, limits: Limits, batches: bool) -> dict:
    """Outputs beside ONNX Runtime's and, where requests may be batched, rows beside each alone."""
    inputs = reply["inputs"]
    ours, _ = run(binary, path, inputs, folder / "in", limits)
    verdict = compare_all(reply["outputs"], ours, load(folder / "out", reply["outputs"]), facts)
    if facts.quantised and verdict["wrong"]:
        # Where rounding alone moves ONNX Runtime's result as far, there is nothing else.
        verdict |= own_difference(path, folder, reply, facts, limits)
        noise = 2 * max(verdict["ort_own_error"], verdict["ort_nudged_error"])
        if verdict["error"] <= min(noise, QUANTISED_MOST):
            verdict["wrong"] = None
    if facts.half and not facts.quantised and verdict["wrong"] and (folder / "wide").exists():
        verdict |= nearer_to_wide(folder, reply["outputs"], ours, facts)
        allowed = max(TOLERANCE["float32"], verdict["ort_error_of_single"])
        if verdict["error_of_single"] <= max(allowed, verdict["ort_optimised_error_of_single"]):
            verdict["wrong"] = None
    result = {"status": "wrong" if verdict["wrong"] else "accepted", "compared": True}
    independent = (reply["batch"] or {}).get("independent")
    result |= {"verdict": verdict, "sizes": reply["sizes"], "ort_independent": independent}
    if batches and (folder / "batch").exists() and not facts.draws:
        result["rows_alone"] = rows_alone(binary, path, inputs, folder, limits) or "equal"
    return result
