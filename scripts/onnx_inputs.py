"""Inputs for a model: random values in the shapes and ranges of its sample in NAME.npz."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

# Dimensions that neither the model nor a sample fixes.
FREE_DIMENSION = 16


def has_strings(path: Path) -> bool:
    """Whether an input has type STRING, which .npy files cannot hold without pickle."""
    model = onnx.load(path, load_external_data=False)
    return any(v.type.tensor_type.elem_type == TensorProto.STRING for v in model.graph.input)


def random_inputs(path: Path, batch: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """One random array per input; a symbolic first dimension becomes `batch`."""
    model = onnx.load(path, load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    sample_path = path.with_suffix(".npz")
    samples = dict(np.load(sample_path)) if sample_path.exists() else {}
    return {
        value.name: _random(value, samples.get(value.name), batch, rng)
        for value in model.graph.input
        if value.name not in weights
    }


def _random(
    value: onnx.ValueInfoProto, sample: np.ndarray | None, batch: int, rng: np.random.Generator
) -> np.ndarray:
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    shape = _shape(value, sample, batch)
    if value.name == "attention_mask":
        # Sentences of different lengths: a prefix of ones in every row.
        lengths = rng.integers(max(1, shape[1] // 2), shape[1] + 1, shape[0])
        return (np.arange(shape[1])[None, :] < lengths[:, None]).astype(dtype)
    if dtype.kind == "f":
        spread, middle = (
            (float(sample.std()), float(sample.mean())) if sample is not None else (1.0, 0.0)
        )
        return rng.normal(middle, spread or 1.0, shape).astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    low, high = (int(sample.min()), int(sample.max())) if sample is not None else (0, 1)
    return rng.integers(low, high + 1, shape).astype(dtype)


def _shape(value: onnx.ValueInfoProto, sample: np.ndarray | None, batch: int) -> list[int]:
    shape = []
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        if dim.dim_value > 0:
            shape.append(dim.dim_value)
        elif axis == 0:
            shape.append(batch)
        else:
            shape.append(sample.shape[axis] if sample is not None else FREE_DIMENSION)
    return shape


def chosen_models(folders: list[Path], only: str | None) -> list[Path]:
    """The .onnx files of some folders, smallest first, so that the first rows come early."""
    wanted = set(only.split(",")) if only else None
    found = [
        path
        for folder in folders
        for path in folder.glob("*.onnx")
        if wanted is None or path.stem in wanted
    ]
    return sorted(found, key=lambda path: (path.stat().st_size, path.name))
