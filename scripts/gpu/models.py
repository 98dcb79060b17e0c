#!/usr/bin/env python3
"""Export networks of scripts/modelzoo with PyTorch, in parallel.

models.py FOLDER [NAME ...]      (default: the five networks of DISB)
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

DISB = ["vgg19", "resnet152", "inception_v3", "densenet201", "distilbert"]


def export(name: str, folder: str) -> str:
    """Writes one network and returns its path."""
    import torch

    from modelzoo import target, torch_nets

    torch.set_num_threads(3)
    return str(target.write(getattr(torch_nets, name)(), name, Path(folder)))


def main() -> None:
    folder, names = sys.argv[1], sys.argv[2:] or DISB
    with ProcessPoolExecutor() as pool:
        for path in pool.map(export, names, [folder] * len(names)):
            print(path, flush=True)


if __name__ == "__main__":
    main()
