"""ONNX Runtime's side of a comparison, in a process of its own: a file may end it or take all of
its memory.

    python -m modelcorpus.peer outputs FILE FOLDER JSON    inputs and outputs of a file
    python -m modelcorpus.peer nudged FILE FOLDER          outputs with its numbers moved
    python -m modelcorpus.peer time FILE FOLDER THREADS SECONDS BINARY
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from modelcorpus import feeds
from modelcorpus.nudge import nudge
from modelcorpus.widen import widen, widen_arrays

# More symbolic sizes than these are not tried.
TRIALS_MAX = len(feeds.TRIALS)
ROWS = 2
# Networks whose numbers are moved.
NUDGES = 3
# Turns of a timed comparison, and the most runs in one.
TURNS = 3
RUNS_MAX = 300


def session_of(path: Path, optimise: bool, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, arrays: dict) -> dict[str, np.ndarray]:
    """All outputs as arrays; a sequence of maps is its values, as Atoll returns them."""
    names = [output.name for output in session.get_outputs()]
    results = {}
    for name, value in zip(names, session.run(names, arrays), strict=True):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = np.array([list(row.values()) for row in value], np.float32)
        if not isinstance(value, np.ndarray) and not np.isscalar(value):
            raise TypeError(f"output {name} is a {type(value).__name__}, not a tensor")
        results[name] = np.asarray(value)
    return results


def save(folder: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    """Writes `0.npy`, `1.npy`, ... and returns the names in that order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, value in enumerate(arrays.values()):
        np.save(folder / f"{number}.npy", value.astype(str) if value.dtype == object else value)
    return list(arrays)


def load(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    arrays = {name: np.load(folder / f"{at}.npy") for at, name in enumerate(names)}
    return {n: a.astype(object) if a.dtype.kind == "U" else a for n, a in arrays.items()}


def rows(arrays: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    return {name: value[row : row + 1] for name, value in arrays.items()}


def find_feed(session, facts: feeds.FileFacts, seed: str, rules: dict) -> tuple[dict, dict, dict]:
    """The first sizes with which ONNX Runtime runs: sizes, inputs and outputs."""
    error = None
    for trial in feeds.TRIALS:
        try:
            sizes = feeds.bindings(facts, trial, 1) | rules.get("sizes", {})
            arrays = feeds.feed(facts, sizes, seed, rules.get("inputs"))
            outputs = run(session, arrays)
        except TypeError:
            raise
        except Exception as failed:  # ONNX Runtime has many kinds; the first one says most.
            error = error or failed
            continue
        if any(value.size for value in outputs.values()) or trial is feeds.TRIALS[-1]:
            return sizes, arrays, outputs
    raise RuntimeError(f"no sizes found with which it runs: {error}")


def batched(session, facts, sizes: dict, seed: str, rules: dict, folder: Path) -> dict | None:
    """Two rows in one run and each alone, where all inputs begin with the same symbol."""
    firsts = {entry.dims[0] if entry.dims else None for entry in facts.inputs}
    first = firsts.pop() if len(firsts) == 1 else None
    if not isinstance(first, str):
        return None
    two = sizes | {first: ROWS}
    try:
        arrays = feeds.feed(facts, two, seed, rules.get("inputs"))
        if any(len(value) != ROWS for value in arrays.values()):
            return None
        whole = run(session, arrays)
        alone = [run(session, rows(arrays, row)) for row in range(ROWS)]
    except Exception:
        return {"independent": None}
    save(folder / "batch", arrays)
    same = all(
        whole[name].shape[:1] == (ROWS,)
        and all(close(whole[name][row : row + 1], alone[row][name]) for row in range(ROWS))
        for name in whole
    )
    return {"independent": same}


def close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.kind != "f":
        return bool((a == b).all())
    scale = float(np.abs(b[np.isfinite(b)]).max(initial=0.0)) or 1.0
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-4 * scale, equal_nan=True))


def outputs(path: Path, folder: Path, rules: dict) -> dict:
    facts = feeds.facts_of(path)
    session = session_of(path, optimise=False, threads=1)
    sizes, arrays, results = find_feed(session, facts, rules["seed"], rules)
    rounds = facts.quantised or facts.half
    again = run(session_of(path, optimise=True, threads=1), arrays) if rounds else results
    wide_error = save_wide(path, folder, arrays) if facts.half else None
    return {
        "wide_error": wide_error,
        "sizes": sizes,
        "inputs": save(folder / "in", arrays),
        "outputs": save(folder / "out", results),
        "optimised": save(folder / "optimised", again),
        "batch": batched(session, facts, sizes, rules["seed"], rules, folder),
    }


def nudged_outputs(path: Path, folder: Path) -> dict:
    """Saves what the file gives with each of its numbers moved by one unit in the last place, up or
    down by chance: `nudged0`, `nudged1`, ... As networks they are the same."""
    names = json.loads((folder / "names.json").read_text())
    arrays, model, file = load(folder / "in", names), onnx.load(path), folder / "nudged.onnx"
    for turn in range(NUDGES):
        onnx.save(nudge(model, turn), file)
        save(folder / f"nudged{turn}", run(session_of(file, optimise=False, threads=1), arrays))
    file.unlink()
    return {"nudges": NUDGES}


def save_wide(path: Path, folder: Path, arrays: dict) -> str | None:
    """Writes what the same network gives in single precision; returns why it cannot."""
    file = folder / "wide.onnx"
    try:
        onnx.save(widen(onnx.load(path)), file)
        session = session_of(file, optimise=False, threads=1)
        save(folder / "wide", run(session, widen_arrays(arrays)))
    except Exception as error:  # ONNX Runtime has many kinds.
        return f"{type(error).__name__}: {error}"[:400]
    finally:
        file.unlink(missing_ok=True)
    return None


def measure(path: Path, folder: Path, threads: int, seconds: float, binary: str) -> dict:
    """Both in turns, each for `seconds` altogether: the median of each turn's median. The session
    stays open while Atoll runs, whose process is a new one each turn."""
    names = json.loads((folder / "names.json").read_text())
    session = session_of(path, optimise=True, threads=threads)
    arrays = load(folder / "in", names)
    wanted = [output.name for output in session.get_outputs()]
    command = [binary, "run", str(path), "--json", "--threads", str(threads)]
    for at, name in enumerate(names):
        command += ["--input", f"{name}={folder / 'in' / f'{at}.npy'}"]
    ours, theirs = [], []
    for _ in range(TURNS):
        for _ in range(2):
            session.run(wanted, arrays)
        times, until = [], time.perf_counter() + seconds / TURNS
        while len(times) < 3 or (time.perf_counter() < until and len(times) < RUNS_MAX):
            start = time.perf_counter()
            session.run(wanted, arrays)
            times.append((time.perf_counter() - start) * 1e6)
        theirs.append(float(np.median(times)))
        repeat = ["--repeat", str(len(times)), "--warmup", str(min(20, len(times)))]
        done = subprocess.run(command + repeat, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["it ended"])[-1])
        ours.append(json.loads(done.stdout)["latency_us"]["p50"])
    return {"us": float(np.median(ours)), "ort_us": float(np.median(theirs))}


def main() -> int:
    what, path, folder, *rest = sys.argv[1:]
    try:
        if what == "time":
            reply = measure(Path(path), Path(folder), int(rest[0]), float(rest[1]), rest[2])
        elif what == "nudged":
            reply = nudged_outputs(Path(path), Path(folder))
        else:
            reply = outputs(Path(path), Path(folder), json.loads(rest[0]))
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"[:400]}
    print(json.dumps(reply))
    return 0


if __name__ == "__main__":
    sys.exit(main())
