#!/usr/bin/env python3
"""Make the model repository of the query scenarios/ocr.toml: RapidOCR's detector and recognizer.

    scripts/ocr.py models
    atoll serve --cluster --model-repository models --query scenarios/ocr.toml
    curl --data-binary @page.png -H 'Content-Type: image/png' \\
        localhost:8000/v2/atoll/queries/ocr/infer

The labels of the recognizer come from its metadata: a blank, the characters, a space.
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
    """The character of each class of the recognizer."""
    found = [entry.value for entry in model.metadata_props if entry.key == "character"]
    return ["", *found[0].splitlines(), " "]


def make_repository(folder: Path) -> Path:
    """Writes the repository; existing models are kept."""
    for name, file in FILES.items():
        path = folder / name / "1" / "model.onnx"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        content = wheels.read(*PACKAGE, f"{FOLDER}/{file}")
        if name == "rapidocr_rec":
            names = json.dumps(labels(onnx.load_from_string(content)), ensure_ascii=False)
            (folder / name / "atoll.toml").write_text(f"labels = {names}\n", encoding="utf-8")
        path.write_bytes(content)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to write to")
    print(make_repository(parser.parse_args().folder))


if __name__ == "__main__":
    main()
