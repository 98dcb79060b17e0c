"""Files made here: what ONNX Runtime's quantiser and optimiser write, and pipelines of
scikit-learn. Each variant's kind is drawn by the hash of the file it is made of."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization

from modelcorpus import feeds
from modelcorpus.peer import find_feed, session_of

SOURCE_BYTES_MAX = 40 << 20
CALIBRATION_RUNS = 2
WEIGHTED = {"Conv", "MatMul", "Gemm", "LSTM", "ConvTranspose"}


class RandomCalibration(quantization.CalibrationDataReader):
    """The same seeded inputs that the comparison uses, in other draws."""

    def __init__(self, path: Path, seed: str, rules: dict) -> None:
        facts = feeds.facts_of(path)
        session = session_of(path, optimise=False, threads=1)
        sizes, _, _ = find_feed(session, facts, seed, rules)
        self.left = [
            feeds.feed(facts, sizes, f"{seed}/{run}", rules.get("inputs"))
            for run in range(CALIBRATION_RUNS)
        ]

    def get_next(self) -> dict | None:
        return self.left.pop() if self.left else None


def _dynamic(source: Path, target: Path, seed: str, rules: dict) -> None:
    quantization.quantize_dynamic(source, target)


def _static(quant_format: quantization.QuantFormat) -> Callable:
    def make(source: Path, target: Path, seed: str, rules: dict) -> None:
        reader = RandomCalibration(source, seed, rules)
        quantization.quantize_static(source, target, reader, quant_format=quant_format)

    return make


def _optimised(level: onnxruntime.GraphOptimizationLevel) -> Callable:
    def make(source: Path, target: Path, seed: str, rules: dict) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(target)
        onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    return make


def _half(source: Path, target: Path, seed: str, rules: dict) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


LEVELS = onnxruntime.GraphOptimizationLevel
KINDS: dict[str, Callable] = {
    "quantize_dynamic": _dynamic,
    "quantize_static QDQ": _static(quantization.QuantFormat.QDQ),
    "quantize_static QOperator": _static(quantization.QuantFormat.QOperator),
    "optimised extended": _optimised(LEVELS.ORT_ENABLE_EXTENDED),
    "optimised all": _optimised(LEVELS.ORT_ENABLE_ALL),
    "float16": _half,
}


def kinds_of(digest: str, count: int) -> list[str]:
    """`count` kinds, drawn by the hash of the source."""
    names = list(KINDS)
    first = int(digest[8:16], 16)
    return [names[(first + step * (1 + first // 7 % 2)) % len(names)] for step in range(count)]


def wanted(path: Path) -> bool:
    """Whether a file is a float model with weights that a quantiser changes."""
    if path.stat().st_size > SOURCE_BYTES_MAX:
        return False
    facts = feeds.facts_of(path)
    return bool(facts.operators & WEIGHTED) and not facts.quantised


def make(kind: str, source: Path, target: Path, seed: str, rules: dict) -> None:
    """Makes one variant; raises whatever the tool raises."""
    KINDS[kind](source, target, seed, rules)


def pipelines() -> dict[str, Callable]:
    """Names and builders of scikit-learn pipelines as ONNX; empty without skl2onnx."""
    try:
        from modelcorpus import sklearn_pipelines
    except ImportError as error:
        print(f"no scikit-learn pipelines: {error.name} is missing", file=sys.stderr)
        return {}
    return sklearn_pipelines.ALL


def write_pipelines(folder: Path) -> None:
    """Writes NAME.onnx for each pipeline that can be exported."""
    for name, build in pipelines().items():
        try:
            onnx.save(build(), folder / f"{name}.onnx")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}"[:200], file=sys.stderr)


def main() -> int:
    """One variant, or all pipelines, in a process of its own: KIND SOURCE TARGET SEED RULES."""
    kind, source, target, seed, rules = sys.argv[1:]
    try:
        if kind == "scikit-learn":
            write_pipelines(Path(target))
        else:
            make(kind, Path(source), Path(target), seed, json.loads(rules))
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
        return 1
    return 0


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    np.random.seed(0)
    sys.exit(main())
