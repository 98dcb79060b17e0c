"""Outputs agree with ONNX Runtime at batch 1 and 4, for small models and those in ./models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import ASSETS, BINARY, CACHE, REPOSITORY, SCRIPTS, make_models

sys.path.append(str(SCRIPTS))

from compare_ort import compare_model  # noqa: E402

SMALL = [
    "identity_fp32",
    "identity_int64",
    "add_sub",
    "slow",
    "efficientnet_lite0",
    "rapidocr_det",
    "rapidocr_cls",
    "rapidocr_rec",
    "minilm",
]
LIMIT = 1e-3
# Large networks are optional: scripts/models.py makes them with torch.
FOUND = sorted(
    p
    for p in (REPOSITORY / "models").glob("*.onnx")
    if p.stem not in SMALL and p.stem != "identity_bytes"
)


def assert_agrees(path: Path, batch: int) -> None:
    for row in compare_model(BINARY, path, batch, seed=batch, extra=[]):
        print(f"{row.model} batch {row.batch} {row.output}: {row.relative:.2e}")
        assert not row.bad(LIMIT), row


@pytest.mark.parametrize("batch", [1, 4])
def test_digits_agrees(batch: int) -> None:
    assert_agrees(ASSETS / "digits.onnx", batch)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", SMALL)
def test_small_models_agree(name: str, batch: int) -> None:
    folder = CACHE / "test-models"
    make_models(folder, [name])
    assert_agrees(folder / f"{name}.onnx", batch)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_models_in_the_folder_agree(path: Path, batch: int) -> None:
    assert_agrees(path, batch)
