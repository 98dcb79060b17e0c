"""What a builder returns and how it is written: NAME.onnx, NAME.npz and side files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

# Supported by every current runtime, and has LayerNormalization.
OPSET = 17
IR_VERSION = 8


@dataclass
class Built:
    """A finished model: the graph, one sample of every input, and side files."""

    model: onnx.ModelProto
    samples: dict[str, np.ndarray]
    side_files: dict[str, str] = field(default_factory=dict)
    module: object | None = None  # the torch module it was exported from, if any


def write(built: Built, name: str, folder: Path) -> Path:
    """Writes NAME.onnx last, so that it exists only if all other files do."""
    folder.mkdir(parents=True, exist_ok=True)
    # Object arrays (strings) would need pickle; fixed-width unicode does not.
    samples = {k: v.astype(str) if v.dtype == object else v for k, v in built.samples.items()}
    np.savez(folder / f"{name}.npz", **samples)
    for suffix, text in built.side_files.items():
        (folder / f"{name}.{suffix}").write_text(text)
    path = folder / f"{name}.onnx"
    partial = path.with_suffix(".partial")
    partial.write_bytes(built.model.SerializeToString(deterministic=True))
    partial.rename(path)
    return path
