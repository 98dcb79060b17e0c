"""The three networks in the wheel of RapidOCR: detector, classifier, recognizer."""

from __future__ import annotations

import numpy as np
import onnx

from modelzoo import wheels
from modelzoo.target import Built

PACKAGE = ("rapidocr", "3.10.0")
FOLDER = "rapidocr/models"


def _carried(file: str, height: int, width: int) -> Built:
    model = onnx.load_from_string(wheels.read(*PACKAGE, f"{FOLDER}/{file}"))
    name = model.graph.input[0].name
    sample = np.random.default_rng(5).uniform(-1, 1, (1, 3, height, width)).astype(np.float32)
    return Built(model, {name: sample})


def rapidocr_det() -> Built:
    """Finds text; height and width are multiples of 32."""
    return _carried("PP-OCRv6_det_small.onnx", 320, 320)


def rapidocr_cls() -> Built:
    """Distinguishes upright text from text rotated by 180 degrees."""
    return _carried("ch_ppocr_mobile_v2.0_cls_mobile.onnx", 48, 192)


def rapidocr_rec() -> Built:
    """Reads one line of text; the width is symbolic."""
    return _carried("PP-OCRv6_rec_small.onnx", 48, 320)
