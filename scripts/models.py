#!/usr/bin/env python3
"""Make test models: NAME.onnx, and NAME.npz with one sample of every input.

    python scripts/models.py --small                 # everything that needs no torch
    python scripts/models.py --only resnet50,minilm  # some
    python scripts/models.py                         # all; needs torch, torchvision, transformers

Weights are random but calibrated for the torch networks and real for efficientnet_lite0, minilm
and rapidocr_*. The batch dimension is dynamic everywhere. Existing models are kept unless --force
is given.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Entry:
    """The module of a model's builder and what it needs."""

    module: str
    about: str
    torch: bool = False

    @property
    def packages(self) -> list[str]:
        return ["numpy", "onnx"] + (["torch", "torchvision", "transformers"] if self.torch else [])


class ModelError(Exception):
    """A model could not be made or does not run; the script continues with the next one."""


MODELS: dict[str, Entry] = {
    "identity_fp32": Entry("tiny", "one float, unchanged"),
    "identity_int64": Entry("tiny", "one integer, unchanged"),
    "identity_bytes": Entry("tiny", "one string, unchanged"),
    "add_sub": Entry("tiny", "sum and difference of two INT32 vectors"),
    "slow": Entry("tiny", "about a second of matrix products"),
    "efficientnet_lite0": Entry("efficientnet", "real ImageNet weights, with labels"),
    "rapidocr_det": Entry("rapidocr", "real weights, text detector"),
    "rapidocr_cls": Entry("rapidocr", "real weights, text direction"),
    "rapidocr_rec": Entry("rapidocr", "real weights, text recognizer"),
    "minilm": Entry("minilm", "real weights, sentence embedding"),
    "resnet50": Entry("torch_nets", "random weights", torch=True),
    "resnet101": Entry("torch_nets", "random weights", torch=True),
    "resnet152": Entry("torch_nets", "random weights", torch=True),
    "densenet201": Entry("torch_nets", "random weights", torch=True),
    "vgg16": Entry("torch_nets", "random weights", torch=True),
    "vgg19": Entry("torch_nets", "random weights", torch=True),
    "inception_v3": Entry("torch_nets", "random weights", torch=True),
    "mobilenet_v2": Entry("torch_nets", "random weights", torch=True),
    "distilbert": Entry("torch_nets", "random weights", torch=True),
    "bert_large": Entry("torch_nets", "random weights", torch=True),
}


def make(name: str, folder: Path) -> Path:
    """Builds one model and writes it."""
    entry = MODELS[name]
    try:
        builder = getattr(importlib.import_module(f"modelzoo.{entry.module}"), name)
        built = builder()
        target = importlib.import_module("modelzoo.target")
    except ModuleNotFoundError as error:
        advice = f"{sys.executable} -m pip install {' '.join(entry.packages)}"
        raise ModelError(f"{error.name} is missing; run: {advice}") from error
    except RuntimeError as error:
        raise ModelError(str(error)) from error
    return target.write(built, name, folder)


def check(path: Path) -> str:
    """Runs the model with ONNX Runtime at batch 1 and 4; returns the range of each output."""
    try:
        import numpy as np
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ModelError(
            f"--check needs {error.name}; run: {sys.executable} -m pip install onnxruntime"
        ) from error

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    samples = dict(np.load(path.with_suffix(".npz")))
    parts = []
    for batch in (1, 4):
        feed = {
            name: np.repeat(value, batch, axis=0).astype(
                object if value.dtype.kind == "U" else value.dtype
            )
            for name, value in samples.items()
        }
        for meta, value in zip(session.get_outputs(), session.run(None, feed), strict=True):
            if value.shape[0] != batch:
                raise ModelError(f"output {meta.name} is {value.shape} at batch {batch}")
            if value.dtype.kind == "f":
                if not np.isfinite(value).all():
                    raise ModelError(f"output {meta.name} is not finite at batch {batch}")
                parts.append(f"{meta.name}{list(value.shape)} max|x|={np.abs(value).max():.3g}")
    return "; ".join(parts) or "ok"


def choose(only: str | None, small: bool) -> list[str]:
    names = only.split(",") if only else list(MODELS)
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise SystemExit(f"unknown model {', '.join(unknown)}; --list shows the known ones")
    return [name for name in names if not (small and MODELS[name].torch)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=REPOSITORY / "models",
        help="folder to write to (default: models)",
    )
    parser.add_argument("--only", metavar="NAME,...", help="make only these")
    parser.add_argument("--small", action="store_true", help="skip models that need torch")
    parser.add_argument("--list", action="store_true", help="list the models and exit")
    parser.add_argument("--force", action="store_true", help="replace existing models")
    parser.add_argument(
        "--check", action="store_true", help="run each with ONNX Runtime at batch 1 and 4"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    names = choose(args.only, args.small)
    if args.list:
        for name in names:
            entry = MODELS[name]
            print(f"{name:20} {entry.about}{' (torch)' if entry.torch else ''}")
        return 0
    failed = 0
    for number, name in enumerate(names, 1):
        try:
            line = make_and_check(name, args)
        except ModelError as error:
            failed += 1
            line = f"failed: {error}"
        print(f"[{number}/{len(names)}] {name}: {line}", flush=True)
    return 1 if failed else 0


def make_and_check(name: str, args: argparse.Namespace) -> str:
    """Makes one model unless it exists, and describes it."""
    started = time.monotonic()
    path = args.out / f"{name}.onnx"
    made = args.force or not path.exists()
    if made:
        make(name, args.out)
    took = f"{time.monotonic() - started:.1f} s" if made else "kept"
    line = f"{path.stat().st_size / 1e6:.1f} MB, {took}"
    return f"{line}, {check(path)}" if args.check else line


if __name__ == "__main__":
    sys.exit(main())
