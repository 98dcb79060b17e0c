#!/usr/bin/env python3
"""Measure how well the estimated variants of products are chosen, and fit the estimate.

    calibrate.py make FOLDER [--seed N] [--problems N]
    calibrate.py check TIMES...
    calibrate.py fit TIMES... [--hold-out SHARE]

`make` writes ONNX files of random products and convolutions, from small to large, each on inputs
of its own. On a GPU, `variant_times FOLDER/*.onnx > TIMES` (an example of the crate `compiler`)
measures every variant. `check` compares the variant that was estimated to be the fastest, which is
the first of a problem, with the one measured to be. `fit` changes the constants of the model below,
which is that of `crates/compiler/src/gpu/tile.rs` and `conv/hopper.rs` line by line, until the
choices of all but the held-out problems are good, and prints them with what the held-out ones lose.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

MULTIPROCESSORS = 132


# ---- problems ------------------------------------------------------------------------------------


def log_uniform(rng: random.Random, low: int, high: int, step: int = 1) -> int:
    value = math.exp(rng.uniform(math.log(low), math.log(high)))
    return max(step, round(value / step) * step)


def random_product(rng: random.Random) -> dict:
    while True:
        rows = log_uniform(rng, 1, 20000)
        columns, depth = log_uniform(rng, 32, 5000, 8), log_uniform(rng, 32, 5000, 8)
        if 1e6 < 2 * rows * columns * depth < 3e11 and columns * depth < 12e6:
            return {"op": "MatMul", "rows": rows, "columns": columns, "depth": depth}


def random_convolution(rng: random.Random) -> dict:
    while True:
        size = rng.choice([7, 10, 14, 20, 28, 40, 56, 80, 112])
        images = rng.choice([1, 1, 2, 4, 8, 16, 32])
        inputs, outputs = log_uniform(rng, 16, 2048, 8), log_uniform(rng, 16, 2048, 8)
        kernel, stride = rng.choice([1, 1, 3, 3, 3, 5]), rng.choice([1, 1, 1, 2])
        flops = 2 * images * (size // stride) ** 2 * inputs * outputs * kernel**2
        small = images * size**2 * max(inputs, outputs) < 6e7 and inputs * outputs * kernel**2 < 8e6
        if 1e7 < flops < 2e11 and small:
            shape = {"images": images, "size": size, "inputs": inputs, "outputs": outputs}
            return {"op": "Conv", **shape, "kernel": kernel, "stride": stride}


def random_scores(rng: random.Random) -> dict:
    """A product of two activations, of which there are many."""
    tokens, width = log_uniform(rng, 16, 1024, 8), rng.choice([16, 32, 64, 96, 128])
    parts = log_uniform(rng, 2, max(3, int(2e7 / tokens**2)))
    return {"op": "Scores", "parts": parts, "tokens": tokens, "width": width}


def write_model(path: Path, problems: list[dict], rng: random.Random) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes, inputs, outputs, weights = [], [], [], []
    numbers = np.random.default_rng(rng.getrandbits(32))

    def weight(name: str, shape: list[int]) -> str:
        values = (numbers.random(shape, dtype=np.float32) - 0.5) * 0.1
        weights.append(numpy_helper.from_array(values, name))
        return name

    def given(name: str, shape: list[int]) -> str:
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        return name

    for at, each in enumerate(problems):
        x, y = f"x{at}", f"y{at}"
        if each["op"] == "MatMul":
            given(x, [each["rows"], each["depth"]])
            operands = [x, weight(f"w{at}", [each["depth"], each["columns"]])]
            nodes.append(helper.make_node("MatMul", operands, [y], name=f"n{at}"))
        elif each["op"] == "Scores":
            shape = [each["parts"], each["tokens"], each["width"]]
            given(x, shape)
            given(f"z{at}", [shape[0], shape[2], shape[1]])
            nodes.append(helper.make_node("MatMul", [x, f"z{at}"], [y], name=f"n{at}"))
        else:
            given(x, [each["images"], each["inputs"], each["size"], each["size"]])
            kernel = each["kernel"]
            operands = [x, weight(f"w{at}", [each["outputs"], each["inputs"], kernel, kernel])]
            attributes = {"strides": [each["stride"]] * 2, "pads": [kernel // 2] * 4}
            nodes.append(helper.make_node("Conv", operands, [y], name=f"n{at}", **attributes))
        outputs.append(helper.make_tensor_value_info(y, TensorProto.FLOAT, None))
    graph = helper.make_graph(nodes, "problems", inputs, outputs, weights)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def make(args: argparse.Namespace) -> None:
    rng = random.Random(args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    kinds = [random_product, random_convolution, random_product, random_convolution, random_scores]
    problems = [kinds[at % len(kinds)](rng) for at in range(args.problems)]
    for start in range(0, len(problems), 10):
        path = args.folder / f"problems{start:03}.onnx"
        write_model(path, problems[start : start + 10], rng)


# ---- measurements --------------------------------------------------------------------------------


@dataclass
class Problem:
    """One step with the times of its variants, the estimated one first."""

    text: str
    rows: int
    columns: int
    depth: int
    parts: int
    taps: int
    strided: bool
    weight_bytes: int
    times: dict[str, float] = field(default_factory=dict)

    def best(self) -> float:
        return min(self.times.values())


SHAPE = re.compile(
    r"^(?:MatMul|Conv) (\d+): (\d+)x(\d+)x(\d+)/\d+ -> \d+x\d+x(\d+)/\d+ k(\d+)x(\d+) s(\d+)x(\d+)"
)
VIEW = re.compile(r"F16\[([\d, ]*)\]")


def problem_of(signature: str, flops: int) -> Problem | None:
    found = SHAPE.match(signature)
    if found:
        rows, _, _, channels, columns, kernel_h, kernel_w, _, _ = map(int, found.groups())
        taps = kernel_h * kernel_w
        weights = 2 * columns * channels * taps
        return Problem(signature, rows, columns, channels * taps, 1, taps, False, weights)
    views = [[int(n) for n in text.split(",")] for text in VIEW.findall(signature) if text]
    if signature.startswith("MatMul Matrix") and len(views) >= 3:
        output, depth = views[-1], views[0][-1]
        rows, columns = output[-2], output[-1]
        parts = math.prod(output[:-2])
        if 2 * rows * columns * parts * depth == flops:
            return Problem(signature, rows, columns, depth, parts, 1, True, 0)
    return None


def read(paths: list[Path]) -> list[Problem]:
    problems: dict[str, Problem] = {}
    current = None
    for line in (line for path in paths for line in path.read_text().splitlines()):
        kind, *fields = line.split("\t")
        if kind == "step":
            signature = fields[1]
            current = None if signature in problems else problem_of(signature, int(fields[3]))
            if current is not None:
                problems[signature] = current
        elif kind == "variant" and current is not None and fields[1] != "NaN":
            current.times[fields[0]] = float(fields[1])
    return [problem for problem in problems.values() if len(problem.times) > 1]


# ---- the model -----------------------------------------------------------------------------------

# bm, bn, bk, k-warps: warps along rows, columns and depth, stages.
TILES = {
    (64, 64, 64, 1): ((2, 2, 1), 4),
    (128, 128, 32, 1): ((2, 4, 1), 4),
    (128, 128, 64, 1): ((2, 4, 1), 3),
    (64, 128, 64, 1): ((2, 2, 1), 3),
    (16, 64, 64, 4): ((1, 1, 4), 6),
    (16, 64, 64, 1): ((1, 4, 1), 6),
    (16, 128, 64, 2): ((1, 2, 2), 4),
    (32, 32, 64, 4): ((1, 1, 4), 6),
    (32, 64, 64, 2): ((1, 2, 2), 4),
    (64, 32, 64, 2): ((2, 1, 2), 4),
    (64, 64, 64, 2): ((2, 2, 2), 4),
    (128, 64, 64, 1): ((2, 2, 1), 3),
    (128, 32, 64, 1): ((4, 1, 1), 3),
    (256, 64, 32, 1): ((4, 2, 1), 4),
    (128, 256, 32, 1): ((2, 4, 1), 4),
    (256, 128, 32, 1): ((4, 2, 1), 4),
    (64, 64, 32, 1): ((2, 2, 1), 4),
    (64, 32, 32, 1): ((2, 2, 1), 4),
    (128, 64, 32, 1): ((4, 2, 1), 4),
}
HOPPER = {
    "h256x128x64": (256, 128, 4, 1),
    "h128x192x64": (128, 192, 5, 1),
    "h128x128x64a": (128, 128, 6, 1),
    "h128x128x64p": (128, 128, 3, 2),
    "h256x64x64": (256, 64, 5, 1),
    "h128x64x64": (128, 64, 8, 1),
    "h128x64x64p": (128, 64, 4, 2),
}

START = {
    "launch": 0.777,  # us of a launch, and until the first block has started
    "block": 0.975,  # us of the start and end of a block
    "latency": 0.653,  # us from a copy's start until its data has arrived
    "flops": 1.2e6,  # per us and SM, mma.sync
    "l2": 302e3,  # bytes per us and SM
    "dram": 3.4e6,  # bytes of weights per us, all SMs
    "store": 13.1e3,  # outputs per us and SM
    "cluster": 1.45,  # us to add the parts of a cluster
    "workspace": 1.41,  # us to add parts through memory
    "part": 0.115,  # us for each of them
    "strided": 1.3,  # work of a step with operands of any strides
    "h_launch": 0.711,
    "h_latency": 0.442,
    "h_flops": 6e6,
    "h_l2": 110e3,
    "h_store": 7.24e3,
    "h_overlap": 1.28,  # how much faster an epilogue is beside another block's products
}
VARIANT = re.compile(r"^(\d+)x(\d+)x(\d+)(?:k(\d+))?(?:/([cw])(\d+))?$")


def resident_blocks(bm: int, bn: int, bk: int, warps: tuple[int, int, int], stages: int) -> int:
    ring = (bm + bn) * bk * 2 * stages
    shared = max(ring, warps[2] * bm * (bn + 8) * 4) + bn * 4
    threads = math.prod(warps) * 32
    fragments = (bm // warps[0] // 16) * (bn // warps[1] // 8)
    by_registers = 65536 // (threads * (fragments * 4 + 64))
    return max(1, min((226 << 10) // (shared + 1024), by_registers))


def rounds_us(blocks: int, resident: int, steps: float, step: float, wait: float) -> float:
    """Blocks of an SM, `resident` at a time: each step takes as long as all of them compute, or as
    one waits for its copies."""
    full, rest = divmod(blocks, resident)
    total = full * steps * max(resident * step, wait)
    return total + (steps * max(rest * step, wait) if rest else 0.0)


def weights_us(problem: Problem, blocks: int, c: dict[str, float]) -> float:
    """Weights from memory; SMs without a block do not read."""
    return problem.weight_bytes / (c["dram"] * min(1.0, blocks / MULTIPROCESSORS))


def overlapped_us(work: float, weights: float) -> float:
    """The longer of both; of equal ones, the variant with less of the other is better."""
    return max(work, weights) + 0.05 * min(work, weights)


def estimate(problem: Problem, variant: str, c: dict[str, float]) -> float:
    if variant.startswith("h"):
        bm, bn, stages, blocks = HOPPER[variant]
        tiles = -(-problem.rows // bm) * -(-problem.columns // bn)
        rounds = -(-tiles // MULTIPROCESSORS)
        steps = problem.taps * -(-(problem.depth // problem.taps) // 64)
        resident = min(rounds, blocks)
        step = max(2 * bm * bn * 64 / c["h_flops"], (bm + bn) * 128 / c["h_l2"])
        step = max(step, c["h_latency"] / (stages * resident))
        overlapped = resident > 1 or (variant.endswith("a") and rounds > 1)
        store = bm * bn / (c["h_store"] * (c["h_overlap"] if overlapped else 1.0))
        work = rounds * (steps * step + store)
        return c["h_launch"] + overlapped_us(work, weights_us(problem, tiles, c))
    found = VARIANT.match(variant)
    bm, bn, bk = (int(found.group(at)) for at in (1, 2, 3))
    warps, stages = TILES[(bm, bn, bk, int(found.group(4) or 1))]
    splits = int(found.group(6) or 1)
    tiles = problem.parts * -(-problem.rows // bm) * -(-problem.columns // bn)
    blocks = -(-tiles * splits // MULTIPROCESSORS)
    steps = -(--(-problem.depth // bk) // splits)
    resident = resident_blocks(bm, bn, bk, warps, stages)
    step = max(2 * bm * bn * bk / c["flops"], (bm + bn) * bk * 2 / c["l2"])
    step *= c["strided"] if problem.strided else 1.0
    work = rounds_us(blocks, resident, steps, step, c["latency"] / (stages - 1))
    work += -(-blocks // resident) * c["block"] + blocks * bm * bn / splits / c["store"]
    joining = {"c": c["cluster"], "w": c["workspace"]}.get(found.group(5), 0.0)
    joining += c["part"] * splits if splits > 1 else 0.0
    weights = weights_us(problem, tiles * splits, c)
    return c["launch"] + overlapped_us(work, weights) + joining


# ---- check and fit -------------------------------------------------------------------------------


def loss_of(problem: Problem, c: dict[str, float]) -> float:
    """Time of the chosen variant over that of the best."""
    chosen = min(problem.times, key=lambda variant: estimate(problem, variant, c))
    return problem.times[chosen] / problem.best()


def objective(problems: list[Problem], c: dict[str, float]) -> float:
    total = 0.0
    for problem in problems:
        best = problem.best()
        near = {v: t for v, t in problem.times.items() if t < 2.5 * best}
        guesses = {v: math.log(estimate(problem, v, c) / t) for v, t in near.items()}
        error = sum(guess**2 for guess in guesses.values()) / len(guesses)
        total += math.log(loss_of(problem, c)) + 0.15 * error
    return total / len(problems)


def fit_constants(problems: list[Problem], rounds: int, seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    best = dict(START)
    value = objective(problems, best)
    width = 0.5
    for turn in range(rounds):
        trial = dict(best)
        for name in rng.sample(sorted(trial), rng.choice([1, 1, 2, 3])):
            trial[name] *= math.exp(rng.gauss(0.0, width))
        found = objective(problems, trial)
        if found < value:
            best, value = trial, found
        width = 0.5 * (1.0 - turn / rounds) + 0.03
    return best


def report(name: str, losses: list[tuple[float, str]]) -> None:
    losses.sort(reverse=True)
    mean = math.exp(sum(math.log(loss) for loss, _ in losses) / len(losses))
    share = sum(loss > 1.1 for loss, _ in losses) / len(losses)
    print(f"{name}: {len(losses)} problems, mean {mean:.3f}, above 1.1: {share:.0%}")
    for loss, text in losses[:8]:
        print(f"  {loss:.2f} {text[:110]}")


def check(args: argparse.Namespace) -> None:
    problems = read(args.times)
    first = [(next(iter(p.times.values())) / p.best(), p.text) for p in problems]
    report("variants as the compiler estimated them", first)
    report("the model with its first constants", [(loss_of(p, START), p.text) for p in problems])


def fit(args: argparse.Namespace) -> None:
    problems = sorted(read(args.times), key=lambda problem: problem.text)
    random.Random(7).shuffle(problems)
    held = round(len(problems) * args.hold_out)
    kept, out = problems[held:], problems[:held]
    constants = fit_constants(kept, args.rounds, args.seed)
    for name, value in constants.items():
        print(f"{name} = {value:.4g}")
    report("fitted", [(loss_of(p, constants), p.text) for p in kept])
    if out:
        report("held out", [(loss_of(p, constants), p.text) for p in out])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--seed", type=int, default=1)
    making.add_argument("--problems", type=int, default=80)
    checking = commands.add_parser("check")
    checking.add_argument("times", type=Path, nargs="+")
    fitting = commands.add_parser("fit")
    fitting.add_argument("times", type=Path, nargs="+")
    fitting.add_argument("--hold-out", type=float, default=0.3)
    fitting.add_argument("--rounds", type=int, default=3000)
    fitting.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    {"make": make, "check": check, "fit": fit}[args.command](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
