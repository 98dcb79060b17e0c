#!/usr/bin/env python3
"""Lays out a model repository for the query scenarios/ocr.toml: RapidOCR's detector and recogniser.

    scripts/ocr.py models
    atoll serve --cluster --model-repository models --query scenarios/ocr.toml
    curl --data-binary @page.png -H 'Content-Type: image/png' localhost:8000/v2/atoll/queries/ocr/infer

The recogniser's labels come from its own metadata: a blank first, the characters, a space last.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import onnx

from modelzoo import wheels
from modelzoo.rapidocr import FOLDER, PACKAGE

FILES = {"rapidocr_det": "PP-OCRv6_det_small.onnx", "rapidocr_rec": "PP-OCRv6_rec_small.onnx"}


def labels(model: onnx.ModelProto) -> list[str]:
    """Characters by class, as the recogniser was trained."""
    found = [entry.value for entry in model.metadata_props if entry.key == "character"]
    return ["", *found[0].splitlines(), " "]


def make_repository(folder: Path) -> Path:
    """Writes the repository; what is there already is kept."""
    for name, file in FILES.items():
        path = folder / name / "1" / "model.onnx"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        content = wheels.read(*PACKAGE, f"{FOLDER}/{file}")
        if name == "rapidocr_rec":
            text = f"labels = {json.dumps(labels(onnx.load_from_string(content)), ensure_ascii=False)}\n"
            (folder / name / "atoll.toml").write_text(text, encoding="utf-8")
        path.write_bytes(content)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the repository goes")
    print(make_repository(parser.parse_args().folder))


if __name__ == "__main__":
    main()
